"""Sequences of one length group -> micro-batches of every data-parallel rank, under a token budget. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from hotspa_megatron.planning.alignment import Alignment

MicroBatches = tuple[tuple[int, ...], ...]
"""One data-parallel rank's micro-batches: indices of the sequences in each, ascending."""


def pack(
    lengths: Sequence[int],
    *,
    budget: int,
    dp: int,
    alignment: Alignment,
    cost: Callable[[int], float] = float,
) -> tuple[MicroBatches, ...]:
    """Pack sequences of the given lengths (in tokens, each at least 1) into micro-batches.

    Returns, for each of ``dp`` ranks, its micro-batches as tuples of indices into ``lengths``. Guaranteed:

    - every sequence is in exactly one micro-batch, and no micro-batch is empty; a rank's list may be empty;
    - no micro-batch exceeds ``budget`` tokens, counted after ``alignment``: strictly, for any lengths;
    - ranks are balanced by ``cost`` (length in tokens -> time, in any unit);
    - equal inputs give equal results, on every rank and in every process.

    Raises ValueError when a sequence alone exceeds the budget, naming it.
    """
    padded = [alignment.pad_sequence(length) for length in lengths]
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sequence {index} has length {length}; a sequence has at least one token")
        if alignment.pad_total(padded[index]) > budget:
            raise ValueError(
                f"sequence {index} of {length} tokens takes {alignment.pad_total(padded[index])} with its alignment, "
                f"above the budget of {budget} tokens per micro-batch"
            )
    if not lengths:
        return ((),) * dp
    # A micro-batch's padded total may only be a multiple of alignment.total: what is left of the budget is unusable.
    usable = budget // alignment.total * alignment.total
    costs = [cost(length) for length in lengths]
    rounds = -(-sum(padded) // (dp * usable))
    while (bins := _fill(padded, costs, bins=dp * rounds, capacity=usable)) is None:
        # The sum fits, the pieces do not: one more micro-batch per rank gives room.
        rounds += 1
    return _deal(bins, costs, dp)


def _fill(padded: Sequence[int], costs: Sequence[float], *, bins: int, capacity: int) -> list[list[int]] | None:
    """Longest first, each sequence into the cheapest bin that has room; None where one finds no room."""
    contents: list[list[int]] = [[] for _ in range(bins)]
    room = [capacity] * bins
    heap = [(0.0, position) for position in range(bins)]
    for index in sorted(range(len(padded)), key=lambda i: (-padded[i], i)):
        passed_over = []
        while heap and room[heap[0][1]] < padded[index]:
            passed_over.append(heapq.heappop(heap))
        if not heap:
            return None
        spent, position = heapq.heappop(heap)
        contents[position].append(index)
        room[position] -= padded[index]
        heapq.heappush(heap, (spent + costs[index], position))
        for entry in passed_over:
            # Shorter sequences come later and may still fit, unless the bin is full.
            if room[entry[1]] > 0:
                heapq.heappush(heap, entry)
    return [sorted(content) for content in contents if content]


def _deal(bins: list[list[int]], costs: Sequence[float], dp: int) -> tuple[MicroBatches, ...]:
    """Dearest bin first, each to the rank with the least work so far."""
    priced = sorted(((sum(costs[i] for i in content), content) for content in bins), key=lambda b: (-b[0], b[1]))
    heap = [(0.0, rank) for rank in range(dp)]
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(dp)]
    for price, content in priced:
        spent, rank = heapq.heappop(heap)
        dealt[rank].append(tuple(content))
        heapq.heappush(heap, (spent + price, rank))
    return tuple(tuple(micro_batches) for micro_batches in dealt)
