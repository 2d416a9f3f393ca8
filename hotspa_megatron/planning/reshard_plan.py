"""Decides every transfer that moves parameters or gradients from the layouts that hold them into another layout.

A pure function of the layouts and the topology: each rank computes the same plan and keeps its own part, so no rank has
to tell another anything. It never touches a tensor; ``runtime/executor.py`` carries one rank's part out.

What a rank holds itself is copied. The rest comes over the cheapest class of link that leads to a holder, from the least
loaded one. In two phases each region crosses the network once per node that lacks it, and is then relayed inside.

Decisions are made for bundles (``regions``: all that the same ranks hold and the same ranks lack) and once for all nodes
that look alike (``routing``), so that their number hardly grows with layers and replicas. A rank's cells are written out
when asked for.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotspa_megatron.planning.param_layout import Box, Holding, Piece, Placement, Point, added, subtracted
from hotspa_megatron.planning.regions import DESTINATION, Bundle, Cell, bundles_of, refine
from hotspa_megatron.planning.routing import Transfers, nodes_lacking, on_node, route
from hotspa_megatron.planning.topology import LinkClass, Topology


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


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """Every transfer of one move, over all ranks. Made by ``plan_reshard``."""

    sources: tuple[Placement, ...]
    destination: Placement
    itemsize: int
    """Bytes of one element on the wire."""
    topology: Topology
    bundles: tuple[Bundle, ...]
    transfers: tuple[Transfers, ...]
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
            starts = transfers.message_starts
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
        return sum(len(transfers.message_starts) for transfers in self.transfers)

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
            * sum(not on_node(bundle.owners, node, self.topology) for node in nodes_lacking(bundle, self.topology))
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
                cuts[alike] = list(refine(box, [(piece.box, index) for index, (_, piece) in enumerate(held)]))
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
    bundles = bundles_of(sources, destination)
    transfers = route(bundles, topology, two_phase)
    return ReshardPlan(tuple(sources), destination, itemsize, topology, bundles, transfers)


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
