"""Resolves one rank's part of a reshard plan into views of its own tensors and of the buffers that pieces travel in.

A message is cut into pieces here, and pieces are put together to batches that fit the buffers. Both ends cut a message
alike, since its cells and the sizes are all that counts; each end batches as its own buffers allow. The batches of two
ranks need not agree: every rank takes its pieces in one order that holds for all, and a batch is a stretch of it. So the
first piece that is still to travel is always under way at both of its ends. Called by ``executor`` alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch

from hotspa_megatron.planning.regions import DESTINATION, Cell
from hotspa_megatron.planning.reshard_plan import Phase, RankPlan
from hotspa_megatron.runtime.storage import Storage

Tensors = Mapping[int, torch.Tensor]
"""Local tensors (any strides) by parameter index."""

_ALIGNMENT: Final = 128
"""Bytes to which pieces are aligned in a buffer."""


class Sizes(NamedTuple):
    """How messages are cut and batched, in elements on the wire; the first two must be the same on all ranks.

    ``piece``: the most that travels in one operation. ``direct``: a cell from this size on is a piece of its own, which
    travels without a buffer where it is one run of memory. ``buffer``: the most that a batch takes of a buffer.
    """

    piece: int
    direct: int
    buffer: int


class Region(NamedTuple):
    """A region of a tensor as numbers: cheap to make and to join, and a view only when it is asked for.

    ``offset`` and ``stride`` are those of the view, in elements; ``is_run``: it is one run of memory.
    """

    tensor: torch.Tensor
    memory: tuple[int, torch.dtype]
    """What regions must share to follow each other."""
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    is_run: bool

    @classmethod
    def all_of(cls, tensor: torch.Tensor) -> Region:
        """The whole tensor, detached: autograd must not learn of what is done to views of parameters."""
        shape, stride = tuple(tensor.shape), tensor.stride()
        memory = tensor.untyped_storage()._cdata, tensor.dtype
        numel, is_run = _extent(shape, stride)
        return cls(tensor.detach(), memory, int(tensor.storage_offset()), shape, stride, numel, is_run)

    def part(self, start: tuple[int, ...], shape: tuple[int, ...]) -> Region:
        """The elements from ``start`` on, counted from this region's first."""
        offset = self.offset
        for low, step in zip(start, self.stride, strict=True):
            offset += low * step
        numel, is_run = _extent(shape, self.stride)
        return Region(self.tensor, self.memory, offset, shape, self.stride, numel, is_run)

    def parts(self, shapes: Iterable[tuple[int, ...]]) -> Iterator[Region]:
        """Regions of these shapes, one after the other from the start of this one, which is a run."""
        offset = self.offset
        for shape in shapes:
            numel = math.prod(shape)
            yield Region(self.tensor, self.memory, offset, shape, _strides(shape), numel, is_run=True)
            offset += numel

    def view(self) -> torch.Tensor:
        return self.tensor.as_strided(self.shape, self.stride, self.offset)

    def flat(self, numel: int) -> torch.Tensor:
        """The first ``numel`` elements of a run, and of the runs that follow it."""
        return self.tensor.as_strided((numel,), (1,), self.offset)

    def precedes(self, other: Region, numel: int) -> bool:
        """Whether ``other`` starts where ``numel`` elements from the start of this one end, and both are runs."""
        return self.is_run and other.is_run and other.offset == self.offset + numel and other.memory == self.memory


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, bool]:
    """How many elements, and whether they are one run of memory."""
    numel, is_run = 1, True
    for index in range(len(shape) - 1, -1, -1):
        size = shape[index]
        if size != 1 and stride[index] != numel:
            is_run = False
        numel *= size
    return numel, is_run


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    found = [1] * len(shape)
    for index in range(len(shape) - 1, 0, -1):
        found[index - 1] = found[index] * shape[index]
    return tuple(found)


class Copies:
    """Pairs of views: what to copy or add to, and of. Pairs that follow each other in memory are joined."""

    def __init__(self) -> None:
        self.to: list[torch.Tensor] = []
        self.of: list[torch.Tensor] = []

    def extend(self, to: Iterable[Region], of: Iterable[Region]) -> None:
        """Add pairs of regions of equal shapes."""
        first: tuple[Region, Region] | None = None
        numel = 0
        for pair in zip(to, of, strict=True):
            if first is not None and first[0].precedes(pair[0], numel) and first[1].precedes(pair[1], numel):
                numel += pair[0].numel
                continue
            self._add(first, numel)
            first, numel = pair, pair[0].numel
        self._add(first, numel)

    def _add(self, pair: tuple[Region, Region] | None, numel: int) -> None:
        if pair is None:
            return
        to, of = pair
        runs = to.is_run and of.is_run
        self.to.append(to.flat(numel) if runs else to.view())
        self.of.append(of.flat(numel) if runs else of.view())

    def copy(self, *, through: torch.dtype | None = None) -> None:
        """Copy; ``through`` is the type that values take on the way, where it is neither end's."""
        if self.to:
            torch._foreach_copy_(self.to, self.of if through is None else [view.to(through) for view in self.of])

    def add(self) -> None:
        if self.to:
            torch._foreach_add_(self.to, self.of)


@dataclass
class Batch:
    """Pieces that travel together, with their peers, and what to copy before, meanwhile and after."""

    starts_phase: bool
    """Whether it may send what earlier batches bring."""
    packs: Copies = field(default_factory=Copies)
    sends: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    receives: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    copies: Copies = field(default_factory=Copies)
    unpacks: Copies = field(default_factory=Copies)


@dataclass
class Binding:
    """A plan on the tensors of one rank. ``addends`` are by source layout: within one, no element comes twice."""

    batches: list[Batch]
    buffers: list[Storage]
    device: torch.device
    addends: list[Copies] = field(default_factory=list)


@dataclass
class _Piece:
    """A piece of a message at this rank's end. ``start``: its place in the buffer, where it needs one."""

    order: tuple[int, ...]
    peer: int
    content: tuple[int, ...]
    """Pieces of the same content can share a place in the buffer."""
    regions: list[Region]
    numel: int
    run: torch.Tensor | None
    """The piece as it lies, where it is one run of memory."""
    outgoing: bool
    start: int = 0


class Binder:
    """Finds a rank's views. ``sources`` and ``destination`` as in ``Reshard.begin``; ``dtype`` is what travels."""

    def __init__(self, plan: RankPlan, *, sources: Sequence[Tensors], destination: Tensors, dtype: torch.dtype) -> None:
        self._plan, self._dtype = plan, dtype
        self._sources = len(sources)
        # Only what the plan names: finding out about a tensor takes longer than about a region of it.
        self._whole = {
            (DESTINATION if each.source is None else each.source, each.parameter): Region.all_of(
                (destination if each.source is None else sources[each.source])[each.parameter]
            )
            for each in plan.tensors
        }
        every = (tensor.device for of in (*sources, destination) for tensor in of.values())
        self._device = next(every, torch.device("cpu"))
        self._alignment = _ALIGNMENT // dtype.itemsize

    def to_copy(self, sizes: Sizes) -> Binding:
        """Bind for overwriting: batches take turns in two buffers."""
        batches, stretches = [], []
        for number, phase in enumerate(self._plan.phases):
            # A phase of copies alone has a batch, too.
            of_phase = self._stretches(self._pieces(phase, sizes), sizes.buffer) or [[]]
            stretches += of_phase
            batches += [Batch(starts_phase=number > 0 and index == 0) for index in range(len(of_phase))]
            first = batches[-len(of_phase)]
            first.copies.extend(map(self._target, phase.copies), map(self._origin, phase.copies))
        ends = [max((p.start + p.numel for p in stretch if p.run is None), default=0) for stretch in stretches]
        buffers = [self._buffer(max(ends[turn::2], default=0)) for turn in (0, 1)]
        for index, (batch, stretch) in enumerate(zip(batches, stretches, strict=True)):
            packed = set()
            for piece in stretch:
                tensor = piece.run
                if tensor is None:
                    place = Region.all_of(buffers[index % 2].flat[piece.start : piece.start + piece.numel])
                    tensor, parts = place.tensor, place.parts(region.shape for region in piece.regions)
                    if not piece.outgoing:
                        batch.unpacks.extend(piece.regions, parts)
                    elif piece.content not in packed:
                        packed.add(piece.content)
                        batch.packs.extend(parts, piece.regions)
                (batch.sends if piece.outgoing else batch.receives).append((tensor, piece.peer))
        return Binding(batches, buffers, self._device)

    def to_add(self) -> Binding:
        """Bind for adding: what is sent, and what is to be added, local copies included, lies in one buffer."""
        (phase,) = self._plan.phases
        sent = {first: phase.sends[first].cells for first in sorted(set(phase.packed_as))}
        kept = [*sent.values(), phase.copies, *(message.cells for message in phase.receives)]
        starts, end = [], 0
        for cells in kept:
            starts.append(end)
            end += self._aligned(_numel(cells))
        buffer = self._buffer(end)
        places = [
            Region.all_of(buffer.flat[start : start + _numel(cells)]) for start, cells in zip(starts, kept, strict=True)
        ]
        outgoing = dict(zip(sent, places, strict=False))
        copied, incoming = places[len(sent)], places[len(sent) + 1 :]
        batch = Batch(starts_phase=False)
        for first, cells in sent.items():
            batch.packs.extend(_parts(outgoing[first], cells), map(self._origin, cells))
        batch.packs.extend(_parts(copied, phase.copies), map(self._origin, phase.copies))
        batch.sends = [(outgoing[first].tensor, m.peer) for first, m in zip(phase.packed_as, phase.sends, strict=True)]
        batch.receives = [(place.tensor, m.peer) for place, m in zip(incoming, phase.receives, strict=True)]
        rows: list[list[tuple[Region, Region]]] = [[] for _ in range(self._sources)]
        for cells, place in zip(kept[len(sent) :], places[len(sent) :], strict=True):
            for cell, part in zip(cells, _parts(place, cells), strict=True):
                rows[cell.source].append((self._target(cell), part))
        addends = [Copies() for _ in rows]
        for of_source, found in zip(addends, rows, strict=True):
            of_source.extend((to for to, _ in found), (of for _, of in found))
        return Binding([batch], [buffer], self._device, addends)

    def _buffer(self, numel: int) -> Storage:
        return Storage(torch.empty(numel, dtype=self._dtype, device=self._device))

    def _aligned(self, numel: int) -> int:
        return -(-numel // self._alignment) * self._alignment

    def _target(self, cell: Cell) -> Region:
        return self._whole[DESTINATION, cell.parameter].part(cell.destination_start, cell.shape)

    def _origin(self, cell: Cell) -> Region:
        return self._whole[cell.source, cell.parameter].part(cell.source_start, cell.shape)

    def _pieces(self, phase: Phase, sizes: Sizes) -> list[_Piece]:
        """The pieces of all messages of a phase, in the order that holds on every rank."""
        rank, found = self._plan.rank, []
        outgoing: dict[int, list[list[Region]]] = {}
        for message, first in zip(phase.sends, phase.packed_as, strict=True):
            if first not in outgoing:
                outgoing[first] = [[self._origin(cell) for cell in cells] for cells in cut(message.cells, sizes)]
            for number, regions in enumerate(outgoing[first]):
                order = (number, abs(message.peer - rank), rank, message.peer)
                found.append(self._piece(order, message.peer, (first, number), regions, outgoing=True))
        for message in phase.receives:
            for number, cells in enumerate(cut(message.cells, sizes)):
                regions = [self._target(cell) for cell in cells]
                order = (number, abs(message.peer - rank), message.peer, rank)
                found.append(self._piece(order, message.peer, order, regions, outgoing=False))
        return sorted(found, key=lambda piece: piece.order)

    def _piece(
        self, order: tuple[int, ...], peer: int, content: tuple[int, ...], regions: list[Region], *, outgoing: bool
    ) -> _Piece:
        first, numel = regions[0], 0
        one_run = first.memory[1] == self._dtype and first.is_run
        for region in regions:
            one_run = one_run and (region is first or first.precedes(region, numel))
            numel += region.numel
        return _Piece(order, peer, content, regions, numel, first.flat(numel) if one_run else None, outgoing)

    def _stretches(self, pieces: list[_Piece], limit: int) -> list[list[_Piece]]:
        """Cut the order into batches, and place their pieces in the buffer."""
        stretches: list[list[_Piece]] = []
        places: dict[tuple[int, ...], int] = {}
        end = 0
        for piece in pieces:
            buffered = piece.run is None and piece.content not in places
            if not stretches or (buffered and end + piece.numel > limit):
                stretches.append([])
                places, end = {}, 0
            if piece.run is None:
                if piece.content not in places:
                    places[piece.content] = end
                    end = self._aligned(end + piece.numel)
                piece.start = places[piece.content]
            stretches[-1].append(piece)
        return stretches


def cut(cells: Sequence[Cell], sizes: Sizes) -> list[tuple[Cell, ...]]:
    """Cut a message into pieces. Both of its ends call this with the same arguments, and so agree.

    Large cells travel one by one, after all the others, which share pieces.
    """
    pieces: list[tuple[Cell, ...]] = []
    shared: list[Cell] = []
    size = 0
    large = []
    for cell in cells:
        numel = math.prod(cell.shape)
        if numel >= sizes.direct:
            large += [(part,) for part in _slices(cell, sizes.piece)]
            continue
        if size + numel > sizes.piece:
            pieces.append(tuple(shared))
            shared, size = [], 0
        shared.append(cell)
        size += numel
    if shared:
        pieces.append(tuple(shared))
    return pieces + large


def _slices(cell: Cell, limit: int) -> Iterator[Cell]:
    """Cut a cell along its outermost dims into slices of up to ``limit`` elements."""
    numel = math.prod(cell.shape)
    if numel <= limit:
        yield cell
        return
    dim = next(index for index, size in enumerate(cell.shape) if size > 1)
    rows = max(1, limit * cell.shape[dim] // numel)
    for first in range(0, cell.shape[dim], rows):
        shape = list(cell.shape)
        shape[dim] = min(rows, cell.shape[dim] - first)
        source, target = list(cell.source_start), list(cell.destination_start)
        source[dim] += first
        target[dim] += first
        part = cell._replace(source_start=tuple(source), destination_start=tuple(target), shape=tuple(shape))
        yield from _slices(part, limit)


def _numel(cells: Iterable[Cell]) -> int:
    return sum(math.prod(cell.shape) for cell in cells)


def _parts(place: Region, cells: Iterable[Cell]) -> Iterator[Region]:
    return place.parts(cell.shape for cell in cells)
