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

from hotspa_megatron.planning.reshard_plan import DESTINATION, Cell, Phase, RankPlan
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


class Copies:
    """Pairs of views: what to copy or add to, and of. Pairs that follow each other in memory are joined."""

    def __init__(self) -> None:
        self.to: list[torch.Tensor] = []
        self.of: list[torch.Tensor] = []

    def extend(self, to: Iterable[torch.Tensor], of: Iterable[torch.Tensor]) -> None:
        for left, right in _joined(to, of):
            self.to.append(left)
            self.of.append(right)

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
    views: list[torch.Tensor]
    numel: int
    run: torch.Tensor | None
    """The piece as it lies, where it is one run of memory."""
    outgoing: bool
    start: int = 0


class Binder:
    """Finds a rank's views. ``sources`` and ``destination`` as in ``Reshard.begin``; ``dtype`` is what travels."""

    def __init__(self, plan: RankPlan, *, sources: Sequence[Tensors], destination: Tensors, dtype: torch.dtype) -> None:
        self._plan, self._dtype = plan, dtype
        # Detached: autograd must not learn of what is done to views of parameters.
        self._sources = [{index: tensor.detach() for index, tensor in of.items()} for of in sources]
        self._destination = {index: tensor.detach() for index, tensor in destination.items()}
        every = (tensor.device for of in (*self._sources, self._destination) for tensor in of.values())
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
                    tensor = buffers[index % 2].flat[piece.start : piece.start + piece.numel]
                    parts = _parts(tensor, piece.views)
                    if not piece.outgoing:
                        batch.unpacks.extend(piece.views, parts)
                    elif piece.content not in packed:
                        packed.add(piece.content)
                        batch.packs.extend(parts, piece.views)
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
        places = [buffer.flat[start : start + _numel(cells)] for start, cells in zip(starts, kept, strict=True)]
        outgoing = dict(zip(sent, places, strict=False))
        copied, incoming = places[len(sent)], places[len(sent) + 1 :]
        batch = Batch(starts_phase=False)
        for first, cells in sent.items():
            batch.packs.extend(_parts(outgoing[first], cells), map(self._origin, cells))
        batch.packs.extend(_parts(copied, phase.copies), map(self._origin, phase.copies))
        batch.sends = [(outgoing[first], m.peer) for first, m in zip(phase.packed_as, phase.sends, strict=True)]
        batch.receives = [(place, m.peer) for place, m in zip(incoming, phase.receives, strict=True)]
        rows: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self._sources]
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

    def _target(self, cell: Cell) -> torch.Tensor:
        return _region(self._destination[cell.parameter], cell.destination_start, cell.shape)

    def _origin(self, cell: Cell) -> torch.Tensor:
        side = self._destination if cell.source == DESTINATION else self._sources[cell.source]
        return _region(side[cell.parameter], cell.source_start, cell.shape)

    def _pieces(self, phase: Phase, sizes: Sizes) -> list[_Piece]:
        """The pieces of all messages of a phase, in the order that holds on every rank."""
        rank, found = self._plan.rank, []
        for message, first in zip(phase.sends, phase.packed_as, strict=True):
            for number, cells in enumerate(cut(message.cells, sizes)):
                views = [self._origin(cell) for cell in cells]
                order = (number, abs(message.peer - rank), rank, message.peer)
                found.append(self._piece(order, message.peer, (first, number), views, outgoing=True))
        for message in phase.receives:
            for number, cells in enumerate(cut(message.cells, sizes)):
                views = [self._target(cell) for cell in cells]
                order = (number, abs(message.peer - rank), message.peer, rank)
                found.append(self._piece(order, message.peer, order, views, outgoing=False))
        return sorted(found, key=lambda piece: piece.order)

    def _piece(
        self, order: tuple[int, ...], peer: int, content: tuple[int, ...], views: list[torch.Tensor], *, outgoing: bool
    ) -> _Piece:
        joined = [view for (view,) in _joined(views)]
        one_run = len(joined) == 1 and joined[0].is_contiguous() and joined[0].dtype == self._dtype
        numel = sum(view.numel() for view in views)
        return _Piece(order, peer, content, views, numel, joined[0].view(-1) if one_run else None, outgoing)

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


def _region(tensor: torch.Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    for dim, (low, size) in enumerate(zip(start, shape, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, low, size)
    return tensor


def _parts(buffer: torch.Tensor, like: Sequence[Cell | torch.Tensor]) -> list[torch.Tensor]:
    """Regions of these shapes, one after the other in a buffer."""
    shapes = [tuple(each.shape) for each in like]
    parts = buffer.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _joined(*sides: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """Rows of views, one per side; rows that follow each other in memory on every side become one row of flat views."""
    joined: list[tuple[torch.Tensor, ...]] = []
    numel = 0
    for row in zip(*sides, strict=True):
        if joined and all(_follows(view, before, numel) for view, before in zip(row, joined[-1], strict=True)):
            numel += row[0].numel()
            joined[-1] = tuple(view.as_strided((numel,), (1,), view.storage_offset()) for view in joined[-1])
        else:
            joined.append(row)
            numel = row[0].numel()
    return joined


def _follows(view: torch.Tensor, before: torch.Tensor, numel: int) -> bool:
    """Whether a view starts where the ``numel`` elements of the one before end."""
    return (
        view.is_contiguous()
        and before.is_contiguous()
        and view.dtype == before.dtype
        and view.untyped_storage()._cdata == before.untyped_storage()._cdata
        and view.storage_offset() == before.storage_offset() + numel
    )
