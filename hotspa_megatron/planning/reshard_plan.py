"""Decides every transfer that moves parameters or gradients from the layouts that hold them into another layout.

A pure function of the layouts and the topology: each rank computes the same plan and keeps its own part, so no rank has
to tell another anything. It never touches a tensor; ``runtime/executor.py`` carries one rank's part out.

What a rank holds itself is copied. The rest comes over the cheapest class of link that leads to a holder, from the least
loaded one. In two phases each region crosses the network once per node that lacks it, and is then relayed inside.

Decisions are made for bundles (all regions that the same ranks hold and the same ranks lack) and once for all nodes that
look alike, so that their number hardly grows with layers and replicas. A rank's cells are written out when asked for.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotspa_megatron.planning.load_balance import ANYONE, Load, Pool, Segment, Share, share_out
from hotspa_megatron.planning.param_layout import Box, Holding, Piece, Placement, Point, Ranks, added, subtracted
from hotspa_megatron.planning.topology import LinkClass, Topology

DESTINATION: Final = -1
"""In the place of a cell's source layout: the sender reads its own destination tensor, filled in an earlier phase."""


class Cell(NamedTuple):
    """A region moved in one go: the smallest unit of a plan.

    ``parameter`` is an index into the layouts' parameters and ``source`` one into the plan's source layouts, or
    ``DESTINATION``. ``source_start`` lies in the sender's local tensor, ``destination_start`` in the receiver's;
    ``shape`` is in elements.
    """

    parameter: int
    source: int
    source_start: Point
    destination_start: Point
    shape: Point


@dataclass(frozen=True)
class Message:
    """All cells that go from one rank to another in a phase, in the order in which both ends pack and unpack them."""

    peer: int
    cells: tuple[Cell, ...]
    numel: int


@dataclass(frozen=True)
class LocalTensor:
    """A tensor that a rank must bring: a parameter under source layout ``source``, or (None) under the destination."""

    parameter: int
    name: str
    source: int | None
    shape: Point


@dataclass(frozen=True)
class Phase:
    """One exchange of one rank. What it sends out of the destination was received in the phases before."""

    copies: tuple[Cell, ...]
    """Regions that the rank holds already, in some source layout."""
    sends: tuple[Message, ...]
    """By ascending receiver."""
    receives: tuple[Message, ...]
    """By ascending sender."""
    packed_as: tuple[int, ...]
    """For each send, the first send that carries the same data: those two can share one packed buffer."""

    @property
    def is_empty(self) -> bool:
        return not (self.copies or self.sends or self.receives)


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a plan: as many phases as every other rank has, some or all of them empty."""

    rank: int
    phases: tuple[Phase, ...]
    """In order: what a phase sends may be what the one before received."""
    tensors: tuple[LocalTensor, ...]

    @property
    def is_empty(self) -> bool:
        return all(phase.is_empty for phase in self.phases)


class Volume(NamedTuple):
    """Bytes of one message."""

    phase: int
    sender: int
    receiver: int
    num_bytes: int


class _Region(NamedTuple):
    """A region that no placement holds in part, and who holds or needs it; ``starts`` are those of the region itself.

    Sets of ranks are whole numbers with a bit per rank: cheap to join, compare and hash, however many ranks there are.
    """

    box: Box
    sources: tuple[tuple[int, Point, int], ...]
    """(source layout, start, ranks), ascending."""
    destinations: tuple[tuple[Point, int], ...]
    """(start, ranks), ascending."""

    def source_at(self, rank: int) -> tuple[int, Point]:
        """The first layout under which the rank holds the region, and where it starts there."""
        for layout, start, ranks in self.sources:
            if ranks >> rank & 1:
                return layout, start
        raise AssertionError(f"rank {rank} is to send what it does not hold")

    def destination_at(self, rank: int) -> Point:
        """Where the region starts in the rank's destination tensor."""
        for start, ranks in self.destinations:
            if ranks >> rank & 1:
                return start
        raise AssertionError(f"rank {rank} is to receive, or to send on, what it does not need")


@dataclass(frozen=True)
class _Bundle:
    """All regions with the same holders and the same ranks in need, as one line of elements that is handed out.

    The line is: for each stretch its region of each of its parameters, parameter after parameter.
    """

    owners: int
    needers: int
    stretches: tuple[tuple[tuple[int, ...], _Region], ...]
    """(parameters that lie alike, region)."""

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Where each stretch ends on the line."""
        return tuple(accumulate(region.box.numel * len(parameters) for parameters, region in self.stretches))

    @property
    def size(self) -> int:
        return self.ends[-1]

    def cut(self, position: int) -> int:
        """The nearest position at which the line may be cut: between two slices of a region's longest dim."""
        index = min(bisect_right(self.ends, position), len(self.ends) - 1)
        shape = self.stretches[index][1].box.shape
        start = self.ends[index - 1] if index else 0
        slices = math.prod(shape) // max(shape, default=1)
        return start + (position - start + slices // 2) // slices * slices

    def cells(self, first: int, last: int, *, sender: int, receiver: int, relayed: bool) -> Iterator[Cell]:
        """The cells of elements [first, last) of the line."""
        for index in range(bisect_right(self.ends, first), bisect_left(self.ends, last) + 1):
            parameters, region = self.stretches[index]
            numel, shape = region.box.numel, region.box.shape
            line_start = self.ends[index] - numel * len(parameters)
            low, high = max(first - line_start, 0), min(last - line_start, numel * len(parameters))
            target = region.destination_at(receiver)
            source, start = (DESTINATION, region.destination_at(sender)) if relayed else region.source_at(sender)
            for number in range(low // numel, -(-high // numel)):
                part = low - number * numel, high - number * numel
                if part[0] <= 0 and numel <= part[1]:
                    yield Cell(parameters[number], source, start, target, shape)
                    continue
                dim = shape.index(max(shape))
                slices = numel // shape[dim]
                begin, end = max(part[0], 0) // slices, min(part[1], numel) // slices
                offset = tuple(begin if d == dim else 0 for d in range(len(shape)))
                cut = tuple(end - begin if d == dim else size for d, size in enumerate(shape))
                yield Cell(parameters[number], source, added(start, offset), added(target, offset), cut)


class _Transfers(NamedTuple):
    """Transfers as columns of equal length: elements [first, last) of a bundle's line from one rank to another.

    Sorted by sender, receiver, bundle and first.
    """

    bundle: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    sender: NDArray[np.int64]
    receiver: NDArray[np.int64]

    @property
    def numel(self) -> NDArray[np.int64]:
        return self.last - self.first


_Row = tuple[int, int, int, int, int]
"""One transfer: the fields of ``_Transfers``."""


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """Every transfer of one move, over all ranks. Made by ``plan_reshard``."""

    sources: tuple[Placement, ...]
    destination: Placement
    itemsize: int
    """Bytes of one element on the wire."""
    topology: Topology
    bundles: tuple[_Bundle, ...]
    transfers: tuple[_Transfers, ...]
    """One per phase."""

    def for_rank(self, rank: int) -> RankPlan:
        """What one rank does."""
        phases = []
        for number, transfers in enumerate(self.transfers):
            sends: dict[int, list[Cell]] = {}
            receives: dict[int, list[Cell]] = {}
            for row in np.flatnonzero((transfers.sender == rank) | (transfers.receiver == rank)):
                bundle, first, last, sender, receiver = (int(column[row]) for column in transfers)
                of_peer = sends.setdefault(receiver, []) if sender == rank else receives.setdefault(sender, [])
                of_peer += self.bundles[bundle].cells(first, last, sender=sender, receiver=receiver, relayed=number > 0)
            outgoing = _messages(sends)
            copies = tuple(sorted(self._copies(rank))) if number == 0 else ()
            phases.append(Phase(copies, outgoing, _messages(receives), _packed_as(outgoing)))
        return RankPlan(rank=rank, phases=tuple(phases), tensors=self._tensors(rank, phases))

    @cached_property
    def messages(self) -> tuple[Volume, ...]:
        """Every message, sorted by phase, sender and receiver."""
        found = []
        for number, transfers in enumerate(self.transfers):
            starts = _message_starts(transfers)
            if not len(starts):
                continue
            elements = np.add.reduceat(transfers.numel, starts)
            pairs = transfers.sender[starts].tolist(), transfers.receiver[starts].tolist()
            found += [
                Volume(number, sender, receiver, numel * self.itemsize)
                for sender, receiver, numel in zip(*pairs, elements.tolist(), strict=True)
            ]
        return tuple(found)

    @property
    def num_messages(self) -> int:
        return sum(len(_message_starts(transfers)) for transfers in self.transfers)

    @property
    def total_bytes(self) -> int:
        """Bytes between ranks, over all phases; local copies do not count."""
        return sum(int(transfers.numel.sum()) for transfers in self.transfers) * self.itemsize

    def bytes_sent(self, rank: int, link: LinkClass | None = None) -> int:
        """Bytes that a rank sends over one class of links, or over all."""
        return int(self._sent[link][rank]) * self.itemsize

    def bytes_received(self, rank: int, link: LinkClass | None = None) -> int:
        """Bytes that a rank receives over one class of links, or over all."""
        return int(self._received[link][rank]) * self.itemsize

    @cached_property
    def link_bytes(self) -> dict[LinkClass, int]:
        """Bytes over each class of links, local copies included."""
        held = sum(
            holding.box.numel * len(holding.ranks)
            for index in range(len(self.destination.parameters))
            for holding in self.destination.holdings(index)
        )
        between = {
            link: int(self._sent[link].sum()) * self.itemsize for link in (LinkClass.INTRA_NODE, LinkClass.INTER_NODE)
        }
        return {LinkClass.LOCAL: held * self.itemsize - self._lacked_bytes, **between}

    @cached_property
    def floors(self) -> dict[LinkClass, int]:
        """The least bytes over each class of links with which any plan could do.

        Each region enters a node that lacks it once, and each rank receives what it lacks once.
        """
        network = sum(
            bundle.size
            * sum(not _on_node(bundle.owners, node, self.topology) for node in _nodes(bundle, self.topology))
            for bundle in self.bundles
        )
        network *= self.itemsize
        return {LinkClass.INTER_NODE: network, LinkClass.INTRA_NODE: self._lacked_bytes - network}

    def digest(self) -> str:
        """A hash that ranks can compare: the same in every process for the same layouts, another for another plan."""
        count = len(self.destination.parameters)
        names = tuple((parameter.name, parameter.shape) for parameter in self.destination.parameters)
        found = hashlib.sha256(repr((self.itemsize, names)).encode())
        # Plain tuples: the hash must not change with the name of a class.
        for placement in (*self.sources, self.destination):
            written: dict[tuple[Holding, ...], str] = {}
            for index in range(count):
                holdings = placement.holdings(index)
                if holdings not in written:
                    written[holdings] = repr([(tuple(h.box), h.start, h.ranks) for h in holdings])
                found.update(written[holdings].encode())
            found.update(b"|")
        for transfers in self.transfers:
            for column in transfers:
                found.update(column.astype("<i8").tobytes())
        return found.hexdigest()

    @cached_property
    def _lacked_bytes(self) -> int:
        """Bytes that ranks need and do not hold, summed over the ranks."""
        return sum(bundle.size * bundle.needers.bit_count() for bundle in self.bundles) * self.itemsize

    @cached_property
    def _sent(self) -> dict[LinkClass | None, NDArray[np.int64]]:
        return self._elements("sender")

    @cached_property
    def _received(self) -> dict[LinkClass | None, NDArray[np.int64]]:
        return self._elements("receiver")

    def _elements(self, end: str) -> dict[LinkClass | None, NDArray[np.int64]]:
        """Elements per rank at one end of the transfers, by class of links and (None) in all."""
        found: dict[LinkClass | None, NDArray[np.int64]] = {}
        for link in (LinkClass.LOCAL, LinkClass.INTRA_NODE, LinkClass.INTER_NODE):
            found[link] = np.zeros(self.topology.world_size, np.int64)
        for transfers in self.transfers:
            size = self.topology.gpus_per_node
            crosses = transfers.sender // size != transfers.receiver // size
            for link, chosen in ((LinkClass.INTRA_NODE, ~crosses), (LinkClass.INTER_NODE, crosses)):
                np.add.at(found[link], getattr(transfers, end)[chosen], transfers.numel[chosen])
        found[None] = found[LinkClass.INTRA_NODE] + found[LinkClass.INTER_NODE]
        return found

    def _copies(self, rank: int) -> Iterator[Cell]:
        """What the rank needs and holds. Only its own borders cut it: those of other ranks do not concern a copy."""
        own: dict[int, list[tuple[int, Piece]]] = {}
        for source, placement in enumerate(self.sources):
            for piece in _pieces(placement, rank):
                own.setdefault(piece.parameter, []).append((source, piece))
        # Layers lie alike: they are cut once.
        cuts: dict[tuple[Box, ...], list[tuple[Box, tuple[int, ...]]]] = {}
        for parameter, box, target in _pieces(self.destination, rank):
            held = own.get(parameter, [])
            alike = (box, *(piece.box for _, piece in held))
            if alike not in cuts:
                cuts[alike] = list(_refine(box, [(piece.box, index) for index, (_, piece) in enumerate(held)]))
            for cell, inside in cuts[alike]:
                if inside:
                    source, piece = held[inside[0]]
                    start = added(piece.start, subtracted(cell.lo, piece.box.lo))
                    yield Cell(parameter, source, start, added(target, subtracted(cell.lo, box.lo)), cell.shape)

    def _tensors(self, rank: int, phases: Sequence[Phase]) -> tuple[LocalTensor, ...]:
        copies = [cell for phase in phases for cell in phase.copies]
        outgoing = [cell for phase in phases for send in phase.sends for cell in send.cells]
        incoming = [cell for phase in phases for receive in phase.receives for cell in receive.cells]
        read = sorted({(cell.source, cell.parameter) for cell in outgoing + copies if cell.source != DESTINATION})
        # What is relayed was received first: the destination tensor is among these.
        written = sorted({cell.parameter for cell in incoming + copies})
        parameters = self.destination.parameters
        return tuple(
            LocalTensor(index, parameters[index].name, source, self.sources[source].local_shape(index, rank))
            for source, index in read
        ) + tuple(
            LocalTensor(index, parameters[index].name, None, self.destination.local_shape(index, rank))
            for index in written
        )


def plan_reshard(
    sources: Sequence[Placement],
    destination: Placement,
    *,
    itemsize: int,
    topology: Topology | None = None,
    two_phase: bool = True,
) -> ReshardPlan:
    """Plan how every rank gets what ``destination`` gives it, out of what the ranks hold under ``sources``.

    ``itemsize`` is bytes per element on the wire. Without a topology all ranks are equally near. ``two_phase`` relays
    inside a node what several of its ranks lack; give False where values are added instead of written, since what has
    been added to a tensor cannot be passed on.

    Every destination element is written exactly once. Raises ValueError for an element that no source holds, naming
    parameter and region, for layouts of different parameters, and for a topology of fewer ranks than the layouts have.
    """
    for source in sources:
        if source.parameters != destination.parameters:
            raise ValueError("the layouts of a reshard plan must be of the same parameters")
    world = max(placement.world_size for placement in (*sources, destination))
    topology = topology or Topology.flat(world)
    if topology.world_size < world:
        raise ValueError(f"the topology has {topology.world_size} ranks, but the layouts have {world}")
    bundles = _bundles(sources, destination)
    transfers = _route(bundles, topology, two_phase)
    return ReshardPlan(tuple(sources), destination, itemsize, topology, bundles, transfers)


# ------------------------------------------------------------------------------------------- who lacks what, who has it


def _bundles(sources: Sequence[Placement], destination: Placement) -> tuple[_Bundle, ...]:
    """Everything that some rank needs and does not hold."""
    members: dict[tuple[int, int], list[tuple[tuple[int, ...], _Region]]] = {}
    masks: dict[Ranks, int] = {}
    cuts: _Cuts = {}
    for parameters in _alike(sources, destination):
        for region in _regions(sources, destination, parameters[0], masks, cuts):
            owners = _union(ranks for *_, ranks in region.sources)
            needers = _union(ranks for _, ranks in region.destinations) & ~owners
            if not needers:
                continue
            if not owners:
                raise ValueError(
                    f"no source holds {destination.parameters[parameters[0]].name}[{_slices(region.box)}], which rank "
                    f"{_bits(needers)[0]} needs"
                )
            members.setdefault((owners, needers), []).append((parameters, region))
    return tuple(_Bundle(owners, needers, tuple(found)) for (owners, needers), found in members.items())


def _alike(sources: Sequence[Placement], destination: Placement) -> list[tuple[int, ...]]:
    """Parameters grouped by where their regions lie: the layers of a stage are planned once."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index in range(len(destination.parameters)):
        key = (destination.holdings(index), *(source.holdings(index) for source in sources))
        groups.setdefault(key, []).append(index)
    return [tuple(group) for group in groups.values()]


_Cuts = dict[tuple[object, ...], list[tuple[Box, list[tuple[int, Point, int]]]]]
"""By the shapes of all sides: each cell with (source layout, start, side) of those around it, some of them destinations."""


def _regions(
    sources: Sequence[Placement], destination: Placement, parameter: int, masks: dict[Ranks, int], cuts: _Cuts
) -> Iterator[_Region]:
    """The common refinement of all placements of one parameter, where the destination holds it."""
    sides = [(source, holding) for source, of in enumerate(sources) for holding in of.holdings(parameter)]
    sides += [(DESTINATION, holding) for holding in destination.holdings(parameter)]
    for _, holding in sides:
        if holding.ranks not in masks:
            masks[holding.ranks] = _mask(holding.ranks)
    # Layers of different stages lie alike on different ranks: they are cut once.
    shape = destination.parameters[parameter].shape
    alike = (shape, tuple((source, holding.box, holding.start) for source, holding in sides))
    if alike not in cuts:
        whole = Box((0,) * len(shape), shape)
        cells = []
        for box, inside in _refine(whole, [(holding.box, index) for index, (_, holding) in enumerate(sides)]):
            if any(sides[index][0] == DESTINATION for index in inside):
                around = [(sides[index], index) for index in inside]
                cells.append(
                    (box, [(s, added(h.start, subtracted(box.lo, h.box.lo)), index) for (s, h), index in around])
                )
        cuts[alike] = cells
    for box, found in cuts[alike]:
        ranked = [(source, start, masks[sides[index][1].ranks]) for source, start, index in found]
        yield _Region(
            box,
            tuple(each for each in ranked if each[0] != DESTINATION),
            tuple((start, ranks) for source, start, ranks in ranked if source == DESTINATION),
        )


def _refine(box: Box, others: Sequence[tuple[Box, int]]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Cut ``box`` until no cell is partly inside any other box; each cell comes with the numbers of those around it.

    The cells of a region depend on ``box`` and the others alone, and numbers are ascending.
    """
    around: list[int] = []
    crossing: list[tuple[Box, int]] = []
    for other, number in others:
        common = other.intersect(box)
        if common == box:
            around.append(number)
        elif common is not None:
            crossing.append((common, number))
    if not crossing:
        yield box, tuple(sorted(around))
        return
    dim, borders = _borders(box, [other for other, _ in crossing])
    edges = [box.lo[dim], *borders, box.hi[dim]]
    slabs: list[list[tuple[Box, int]]] = [[] for _ in edges[1:]]
    for other, number in crossing:
        for index in range(bisect_right(edges, other.lo[dim]) - 1, bisect_left(edges, other.hi[dim])):
            slabs[index].append((other, number))
    for (first, last), inside in zip(pairwise(edges), slabs, strict=True):
        slab = Box((*box.lo[:dim], first, *box.lo[dim + 1 :]), (*box.hi[:dim], last, *box.hi[dim + 1 :]))
        for cell, numbers in _refine(slab, inside):
            yield cell, tuple(sorted((*around, *numbers)))


def _borders(box: Box, others: Sequence[Box]) -> tuple[int, list[int]]:
    """The dim to cut ``box`` along, and where.

    First along borders that cut through none of the others: flat shards can be told apart by such borders alone, while
    any other order would cut every row where one shard ends inside a row.
    """
    fewest: tuple[int, list[int]] | None = None
    for dim in range(len(box.lo)):
        low, high = box.lo[dim], box.hi[dim]
        spans = sorted((other.lo[dim], other.hi[dim]) for other in others)
        clean, reach = set(), low
        for first, last in spans:
            if first >= reach:
                clean |= {reach, first}
            reach = max(reach, last)
        clean |= {reach}
        if clean - {low, high}:
            return dim, sorted(clean - {low, high})
        borders = sorted({border for span in spans for border in span} - {low, high})
        if borders and (fewest is None or len(borders) < len(fewest[1])):
            fewest = dim, borders
    assert fewest is not None  # a box that does not cover the other has a border inside it
    return fewest


# --------------------------------------------------------------------------------------------------- who sends to whom


class _NodeShares(NamedTuple):
    """What nodes that look alike do, in ranks counted from the node's first."""

    inside: list[_Row]
    """Between ranks of the node."""
    entering: list[tuple[int, int, int, int]]
    """(bundle, first, last, receiver) of what must come over the network."""
    relayed: list[_Row]
    """What entered, on to the other ranks of the node that lack it."""


_Lack = tuple[int, int, int]
"""A bundle that ranks of a node lack: (bundle, holders on the node, ranks on the node that lack it)."""


def _route(bundles: Sequence[_Bundle], topology: Topology, two_phase: bool) -> tuple[_Transfers, ...]:
    """Choose all senders: the transfers of each phase."""

    def cut(line: int, position: int) -> int:
        return bundles[line].cut(position)

    lacks: dict[int, list[_Lack]] = {}
    for index, bundle in enumerate(bundles):
        for node in _nodes(bundle, topology):
            here = _on_node(bundle.owners, node, topology), _on_node(bundle.needers, node, topology)
            lacks.setdefault(node, []).append((index, *here))
    alike: dict[tuple[_Lack, ...], list[int]] = {}
    for node in sorted(lacks):
        alike.setdefault(tuple(lacks[node]), []).append(node)

    direct, relayed = _Table(), _Table()
    entering: dict[int, list[Segment]] = {}
    for of_node, nodes in alike.items():
        shares = _share_node(of_node, bundles, topology, two_phase, cut)
        starts = [node * topology.gpus_per_node for node in nodes]
        direct.add(shares.inside, starts)
        relayed.add(shares.relayed, starts)
        for line, first, last, receiver in shares.entering:
            segments = entering.setdefault(bundles[line].owners, [])
            segments += (Segment(start + receiver, line, first, last) for start in starts)
    pools = [Pool(tuple(_bits(owners)), segments) for owners, segments in entering.items()]
    network = [_row(share) for share in _share_over_cards(pools, topology, cut)]
    direct.add(network, [0])
    return (direct.sorted(),) if relayed.is_empty else (direct.sorted(), relayed.sorted())


def _share_node(
    lacks: Sequence[_Lack],
    bundles: Sequence[_Bundle],
    topology: Topology,
    two_phase: bool,
    cut: Callable[[int, int], int],
) -> _NodeShares:
    """Decide for one node: who sends inside it, and who receives what it lacks altogether."""
    missing = {line: _bits(needers) for line, owners, needers in lacks if not owners}
    relayed: list[_Row] = []
    load: Load = {}
    if two_phase:
        open_to: dict[tuple[int, ...], list[Segment]] = {}
        for line, ranks in missing.items():
            open_to.setdefault(tuple(ranks), []).append(Segment(ANYONE, line, 0, bundles[line].size))
        pools = [Pool(ranks, segments) for ranks, segments in open_to.items()]
        entering = [(each.line, each.first, each.last, rank) for each, rank in _share_over_cards(pools, topology, cut)]
        for line, first, last, entry in entering:
            others = [rank for rank in missing[line] if rank != entry]
            relayed += [(line, first, last, entry, rank) for rank in others]
            # Who relays more sends less of what the node had before.
            load[entry] = load.get(entry, 0) + len(others) * (last - first)
    else:
        entering = [(line, 0, bundles[line].size, rank) for line, ranks in missing.items() for rank in ranks]
    served: dict[int, list[Segment]] = {}
    for line, owners, needers in lacks:
        if owners:
            segments = served.setdefault(owners, [])
            segments += (Segment(rank, line, 0, bundles[line].size) for rank in _bits(needers))
    inside = share_out([Pool(tuple(_bits(owners)), segments) for owners, segments in served.items()], load, cut)
    return _NodeShares([_row(share) for shares in inside for share in shares], entering, relayed)


def _share_over_cards(pools: Sequence[Pool], topology: Topology, cut: Callable[[int, int], int]) -> list[Share]:
    """Share out among ranks so that network cards are evenly loaded, and then the ranks of each card."""
    if topology.cards_per_node == topology.gpus_per_node:
        return [share for shares in share_out(pools, {}, cut) for share in shares]
    by_card = []
    for pool in pools:
        ranks: dict[int, list[int]] = {}
        for rank in pool.servers:
            ranks.setdefault(topology.card_of(rank), []).append(rank)
        by_card.append(ranks)
    cards = share_out([pool._replace(servers=tuple(of)) for pool, of in zip(pools, by_card, strict=True)], {}, cut)
    on_card: dict[tuple[int, ...], list[Segment]] = {}
    for ranks, shares in zip(by_card, cards, strict=True):
        for segment, card in shares:
            on_card.setdefault(tuple(ranks[card]), []).append(segment)
    shares_of_ranks = share_out([Pool(ranks, segments) for ranks, segments in on_card.items()], {}, cut)
    return [share for shares in shares_of_ranks for share in shares]


def _row(share: Share) -> _Row:
    segment, sender = share
    return segment.line, segment.first, segment.last, sender, segment.receiver


class _Table:
    """Collects transfers."""

    def __init__(self) -> None:
        self._blocks: list[NDArray[np.int64]] = []

    @property
    def is_empty(self) -> bool:
        return not self._blocks

    def add(self, rows: Sequence[_Row], starts: Sequence[int]) -> None:
        """Add the rows once per start, which is what their ranks are counted from."""
        if not rows:
            return
        block = np.tile(np.array(rows, np.int64), (len(starts), 1))
        block[:, 3:] += np.repeat(np.array(starts, np.int64), len(rows))[:, None]
        self._blocks.append(block)

    def sorted(self) -> _Transfers:
        rows = np.concatenate([np.empty((0, 5), np.int64), *self._blocks])
        bundle, first, _, sender, receiver = rows.T
        columns = rows[np.lexsort((first, bundle, receiver, sender))].T
        return _Transfers(*(np.ascontiguousarray(column) for column in columns))


# ------------------------------------------------------------------------------------------------------- sets of ranks


def _mask(ranks: Ranks) -> int:
    """The set of these ranks as a whole number."""
    flags = np.zeros(ranks[-1] + 1 if ranks else 0, np.uint8)
    flags[list(ranks)] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def _bits(mask: int) -> list[int]:
    """The ranks of a set, ascending."""
    packed = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
    found: list[int] = np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
    return found


def _union(masks: Iterator[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def _nodes(bundle: _Bundle, topology: Topology) -> list[int]:
    """Nodes with a rank that lacks the bundle, ascending."""
    return sorted({rank // topology.gpus_per_node for rank in _bits(bundle.needers)})


def _on_node(mask: int, node: int, topology: Topology) -> int:
    """The part of a set that is on a node, in ranks counted from the node's first."""
    return mask >> (node * topology.gpus_per_node) & ((1 << topology.gpus_per_node) - 1)


# --------------------------------------------------------------------------------------------------- a rank's own part


def _pieces(placement: Placement, rank: int) -> tuple[Piece, ...]:
    """What a rank holds: nothing beyond the placement's world."""
    return placement.pieces(rank) if rank < placement.world_size else ()


def _messages(cells_of: dict[int, list[Cell]]) -> tuple[Message, ...]:
    """One message per peer. Cells are ordered by their place at the sender, so that equal data packs equally."""
    return tuple(
        Message(peer, tuple(sorted(cells_of[peer])), sum(math.prod(cell.shape) for cell in cells_of[peer]))
        for peer in sorted(cells_of)
    )


def _packed_as(sends: tuple[Message, ...]) -> tuple[int, ...]:
    first: dict[tuple[object, ...], int] = {}
    return tuple(
        first.setdefault(tuple((c.parameter, c.source, c.source_start, c.shape) for c in send.cells), index)
        for index, send in enumerate(sends)
    )


def _message_starts(transfers: _Transfers) -> NDArray[np.int64]:
    """The first row of each message."""
    another = (np.diff(transfers.sender) != 0) | (np.diff(transfers.receiver) != 0)
    rows = np.flatnonzero(another) + 1
    return np.concatenate([[0], rows]) if len(transfers.sender) else rows


def _slices(box: Box) -> str:
    return ", ".join(f"{low}:{high}" for low, high in zip(box.lo, box.hi, strict=True))
