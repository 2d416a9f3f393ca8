"""Decides every transfer that moves parameters or gradients from the layouts that hold them into another layout.

A pure function of the layouts: each rank computes the same plan and keeps its own part, so no rank has to tell another
anything. It never touches a tensor; ``runtime/executor.py`` carries one rank's part out.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from hotspa_megatron.planning.param_layout import Box, Holder, Placement, Point, added, subtracted


class Cell(NamedTuple):
    """A region moved in one go: the smallest unit of a plan.

    ``parameter`` is an index into the layouts' parameters and ``source`` one into the plan's source layouts.
    ``source_start`` lies in the sender's local tensor, ``destination_start`` in the receiver's; ``shape`` is in
    elements.
    """

    parameter: int
    source: int
    source_start: Point
    destination_start: Point
    shape: Point


@dataclass(frozen=True)
class Message:
    """All cells that go from one rank to another, in the order in which both ends pack and unpack them."""

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
class RankPlan:
    """One rank's part of a plan. A rank with nothing to send, receive or copy has an empty one."""

    rank: int
    copies: tuple[Cell, ...]
    """Regions that the rank holds already, in some source layout."""
    sends: tuple[Message, ...]
    """By ascending receiver."""
    receives: tuple[Message, ...]
    """By ascending sender."""
    packed_as: tuple[int, ...]
    """For each send, the first send that carries the same data: those two can share one packed buffer."""
    tensors: tuple[LocalTensor, ...]

    @property
    def is_empty(self) -> bool:
        return not (self.copies or self.sends or self.receives)


class Volume(NamedTuple):
    """Bytes of one message."""

    sender: int
    receiver: int
    num_bytes: int


class _Option(NamedTuple):
    """A rank that can send a region: from its local tensor under layout ``source``, at ``start``."""

    rank: int
    source: int
    start: Point


class _Demand(NamedTuple):
    """A region that ``receiver`` needs, and who could send it. Itself alone where it holds the region already."""

    receiver: int
    shape: Point
    numel: int
    start: Point
    options: tuple[_Option, ...]


@dataclass(frozen=True)
class _Route:
    """The decision for one demand, which parameters that lie alike share: ``senders[i]`` serves ``parameters[i]``."""

    parameters: tuple[int, ...]
    demand: _Demand
    senders: tuple[int, ...]
    """Indices into the demand's options."""


@dataclass(frozen=True)
class ReshardPlan:
    """Every transfer of one move, over all ranks. Made by ``plan_reshard``."""

    sources: tuple[Placement, ...]
    destination: Placement
    itemsize: int
    """Bytes of one element on the wire."""
    routes: tuple[_Route, ...]

    def for_rank(self, rank: int) -> RankPlan:
        """What one rank does."""
        copies: list[Cell] = []
        sends: dict[int, list[Cell]] = {}
        receives: dict[int, list[Cell]] = {}
        for index in self._routes_of.get(rank, ()):
            route = self.routes[index]
            _, shape, _, start, options = route.demand
            for parameter, choice in zip(route.parameters, route.senders, strict=True):
                sender = options[choice]
                if rank not in (sender.rank, route.demand.receiver):
                    continue
                cell = Cell(parameter, sender.source, sender.start, start, shape)
                if sender.rank == route.demand.receiver:
                    copies.append(cell)
                elif sender.rank == rank:
                    sends.setdefault(route.demand.receiver, []).append(cell)
                else:
                    receives.setdefault(sender.rank, []).append(cell)
        outgoing = _messages(sends)
        return RankPlan(
            rank=rank,
            copies=tuple(sorted(copies)),
            sends=outgoing,
            receives=_messages(receives),
            packed_as=_packed_as(outgoing),
            tensors=self._tensors(rank, copies, sends, receives),
        )

    @cached_property
    def messages(self) -> tuple[Volume, ...]:
        """Every message, sorted by sender and receiver."""
        elements: dict[tuple[int, int], int] = {}
        for route in self.routes:
            receiver = route.demand.receiver
            for choice in route.senders:
                sender = route.demand.options[choice].rank
                if sender != receiver:
                    elements[sender, receiver] = elements.get((sender, receiver), 0) + route.demand.numel
        return tuple(Volume(*pair, elements[pair] * self.itemsize) for pair in sorted(elements))

    @property
    def total_bytes(self) -> int:
        """Bytes between ranks; local copies do not count."""
        return sum(message.num_bytes for message in self.messages)

    def bytes_sent(self, rank: int) -> int:
        return sum(message.num_bytes for message in self.messages if message.sender == rank)

    def bytes_received(self, rank: int) -> int:
        return sum(message.num_bytes for message in self.messages if message.receiver == rank)

    def digest(self) -> str:
        """A hash that ranks can compare: the same in every process for the same layouts, another for another plan."""
        names = tuple((parameter.name, parameter.shape) for parameter in self.destination.parameters)
        # Plain tuples: the hash must not change with the name of a class.
        routes = tuple(
            (
                route.parameters,
                (route.demand.receiver, route.demand.start, route.demand.shape),
                tuple(tuple(option) for option in route.demand.options),
                route.senders,
            )
            for route in self.routes
        )
        return hashlib.sha256(repr((self.itemsize, names, routes)).encode()).hexdigest()

    @cached_property
    def _routes_of(self) -> dict[int, list[int]]:
        """For each rank, the routes in which it may have a part."""
        found: dict[int, list[int]] = {}
        for index, route in enumerate(self.routes):
            chosen = {route.demand.options[choice].rank for choice in set(route.senders)}
            for rank in sorted(chosen | {route.demand.receiver}):
                found.setdefault(rank, []).append(index)
        return found

    def _tensors(
        self, rank: int, copies: list[Cell], sends: dict[int, list[Cell]], receives: dict[int, list[Cell]]
    ) -> tuple[LocalTensor, ...]:
        outgoing = [cell for cells in sends.values() for cell in cells]
        incoming = [cell for cells in receives.values() for cell in cells]
        read = sorted({(cell.source, cell.parameter) for cell in outgoing + copies})
        written = sorted({cell.parameter for cell in incoming + copies})
        parameters = self.destination.parameters
        return tuple(
            LocalTensor(index, parameters[index].name, source, self.sources[source].local_shape(index, rank))
            for source, index in read
        ) + tuple(
            LocalTensor(index, parameters[index].name, None, self.destination.local_shape(index, rank))
            for index in written
        )


def plan_reshard(sources: Sequence[Placement], destination: Placement, *, itemsize: int) -> ReshardPlan:
    """Plan how every rank gets what it holds under ``destination`` from the layouts in ``sources``.

    Where several source layouts hold valid data at once, each transfer reads whichever serves best. A region that the
    receiver holds itself is copied locally; any other comes from the rank that has least to send so far (then from the
    lowest rank), demands with a choice being settled after those without one, large ones first. ``itemsize`` is bytes
    per element on the wire.

    Every destination element is written exactly once. Raises ValueError for an element that no source holds, naming
    parameter and region, and for layouts of different parameters.
    """
    for source in sources:
        if source.parameters != destination.parameters:
            raise ValueError("the layouts of a reshard plan must be of the same parameters")
    demands = [
        (alike, demand) for alike in _alike(sources, destination) for demand in _demands(sources, destination, alike[0])
    ]
    load = [0] * max(placement.world_size for placement in (*sources, destination))
    forced = [_Route(alike, demand, (0,) * len(alike)) for alike, demand in demands if len(demand.options) == 1]
    for route in forced:
        sender = route.demand.options[0].rank
        if sender != route.demand.receiver:
            load[sender] += route.demand.numel * len(route.parameters)
    free = [pair for pair in demands if len(pair[1].options) > 1]
    free.sort(key=lambda pair: -pair[1].numel)
    balanced = [_Route(alike, demand, _least_loaded(demand, len(alike), load)) for alike, demand in free]
    return ReshardPlan(tuple(sources), destination, itemsize, tuple(forced + balanced))


def _alike(sources: Sequence[Placement], destination: Placement) -> list[tuple[int, ...]]:
    """Parameters grouped by where their regions lie: the layers of a stage are planned once."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index in range(len(destination.parameters)):
        key = (destination.holders(index), *(source.holders(index) for source in sources))
        groups.setdefault(key, []).append(index)
    return [tuple(group) for group in groups.values()]


def _demands(sources: Sequence[Placement], destination: Placement, parameter: int) -> list[_Demand]:
    """Everything that the destination needs of one parameter, by receiver and region."""
    held: dict[Box, list[tuple[int, Holder]]] = {}
    own: dict[int, list[Box]] = {}
    for index, source in enumerate(sources):
        for holder in source.holders(parameter):
            held.setdefault(holder.box, []).append((index, holder))
            own.setdefault(holder.rank, []).append(holder.box)
    anywhere = sorted(held)
    refined: dict[tuple[Box, tuple[Box, ...]], list[Box]] = {}
    senders: dict[Box, tuple[_Option, ...]] = {}
    demands = []
    for receiver, box, start in destination.holders(parameter):
        near = tuple(sorted(set(own.get(receiver, ()))))
        if (box, near) not in refined:
            refined[box, near] = list(_cells(box, near, anywhere))
        for cell in refined[box, near]:
            if cell not in senders:
                senders[cell] = _options(cell, held)
            options = senders[cell]
            if not options:
                name = destination.parameters[parameter].name
                raise ValueError(f"no source holds {name}[{_slices(cell)}], which rank {receiver} needs")
            local = tuple(option for option in options if option.rank == receiver)
            at = added(start, subtracted(cell.lo, box.lo))
            demands.append(_Demand(receiver, cell.shape, cell.numel, at, local or options))
    return demands


def _cells(box: Box, near: Sequence[Box], anywhere: Sequence[Box]) -> Iterator[Box]:
    """Cut ``box`` so that no cell is partly inside any of the source boxes.

    What the receiver holds itself is cut only by its own boxes: other ranks' boundaries would split local copies.
    """
    for cell in _refine(box, near, 0):
        if any(mine.contains(cell) for mine in near):
            yield cell
        else:
            yield from _refine(cell, anywhere, 0)


def _refine(box: Box, cutters: Sequence[Box], dim: int) -> Iterator[Box]:
    """Cut ``box`` at the borders of ``cutters``, dim by dim, from ``dim`` on.

    Within each slab only the cutters that meet it cut further. Flat shards need this: their borders inside a row
    would otherwise cut every row of the tensor.
    """
    cutters = [cutter for cutter in cutters if cutter.intersect(box) is not None]
    if not cutters or dim == len(box.lo):
        yield box
        return
    low, high = box.lo[dim], box.hi[dim]
    borders = {low, high}
    for cutter in cutters:
        borders.update(border for border in (cutter.lo[dim], cutter.hi[dim]) if low < border < high)
    for first, last in pairwise(sorted(borders)):
        slab = Box((*box.lo[:dim], first, *box.lo[dim + 1 :]), (*box.hi[:dim], last, *box.hi[dim + 1 :]))
        yield from _refine(slab, cutters, dim + 1)


def _options(cell: Box, held: dict[Box, list[tuple[int, Holder]]]) -> tuple[_Option, ...]:
    """Every rank that holds the cell, ascending; of its layouts that hold it, the first."""
    found: dict[int, _Option] = {}
    for box in sorted(held):
        if box.contains(cell):
            for source, holder in held[box]:
                option = _Option(holder.rank, source, added(holder.start, subtracted(cell.lo, box.lo)))
                found[holder.rank] = min(option, found.get(holder.rank, option))
    return tuple(found[rank] for rank in sorted(found))


def _least_loaded(demand: _Demand, count: int, load: list[int]) -> tuple[int, ...]:
    """Senders of the demand for ``count`` parameters, one after the other; adds what they send to ``load``."""
    heap = [(load[option.rank], option.rank, choice) for choice, option in enumerate(demand.options)]
    heapq.heapify(heap)
    chosen = []
    for _ in range(count):
        sent, rank, choice = heap[0]
        heapq.heapreplace(heap, (sent + demand.numel, rank, choice))
        load[rank] += demand.numel
        chosen.append(choice)
    return tuple(chosen)


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


def _slices(box: Box) -> str:
    return ", ".join(f"{low}:{high}" for low, high in zip(box.lo, box.hi, strict=True))
