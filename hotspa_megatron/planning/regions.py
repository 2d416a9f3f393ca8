"""Who lacks what of a move, and who has it: the regions that no layout holds in part, drawn together by their holders.

The first half of ``reshard_plan``: it asks the layouts alone, and neither chooses who sends nor knows a topology.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np

from hotspa_megatron.planning.param_layout import Box, Placement, Point, Ranks, added, subtracted

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
class Bundle:
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


def bundles_of(sources: Sequence[Placement], destination: Placement) -> tuple[Bundle, ...]:
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
                    f"{ranks_of(needers)[0]} needs"
                )
            members.setdefault((owners, needers), []).append((parameters, region))
    return tuple(Bundle(owners, needers, tuple(found)) for (owners, needers), found in members.items())


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
        for box, inside in refine(whole, [(holding.box, index) for index, (_, holding) in enumerate(sides)]):
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


def refine(box: Box, others: Sequence[tuple[Box, int]]) -> Iterator[tuple[Box, tuple[int, ...]]]:
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
        for cell, numbers in refine(slab, inside):
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


# ------------------------------------------------------------------------------------------------------- sets of ranks


def _mask(ranks: Ranks) -> int:
    """The set of these ranks as a whole number."""
    flags = np.zeros(ranks[-1] + 1 if ranks else 0, np.uint8)
    flags[list(ranks)] = 1
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


def ranks_of(mask: int) -> list[int]:
    """The ranks of a set, ascending."""
    packed = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
    found: list[int] = np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
    return found


def _union(masks: Iterator[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def _slices(box: Box) -> str:
    return ", ".join(f"{low}:{high}" for low, high in zip(box.lo, box.hi, strict=True))
