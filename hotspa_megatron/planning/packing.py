"""Sequences of one length group -> micro-batches of every data-parallel rank, under a token budget. Pure.

First the sequences are divided over the ranks by their cost, since ranks wait for the busiest; then each rank's own over
its micro-batches, strictly within the budget. Costs are turned into whole numbers before anything is compared: sums are
then exact, and equal on machines that add floats in different orders. ``step_plan`` calls this for every segment.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hotspa_megatron.planning.alignment import Alignment

MicroBatches: TypeAlias = tuple[tuple[int, ...], ...]
"""One data-parallel rank's micro-batches: indices of the sequences in each, ascending."""

LARGEST_MICRO_BATCH: Final = 2**31 - 1
"""Tokens: the boundaries of a packed micro-batch (cu_seqlens) are 32-bit."""

_COST_STEPS: Final = 2**30
"""Whole steps into which the dearest sequence's cost is divided; sums of 2**31 sequences stay below 2**61."""
_WORTH_A_MICRO_BATCH: Final = 1.01
"""How much busier the busiest rank may be if that keeps every rank at the fewest micro-batches: each has a fixed cost."""
_EXACT: Final = 14
"""Sequences of two parts up to which their best division is found by trying all 2**13."""
_FEW: Final = 4
"""Sequences per part up to which filling to a limit is tried: it divides few large ones better than longest-first."""
_MOST_FILLED: Final = 1024
"""Sequences up to which that is tried: it looks at every part for each of them, several times over."""
_HALVINGS: Final = 6
"""Steps of the search for that limit: they narrow the tenth of the bound that is in doubt to a part in six hundred."""
_PIGEONS: Final = 8
"""Sequences in one part up to which the bound counts them: with more per part the mean is the higher bound anyway."""


class _Effort(NamedTuple):
    """When looking for a better division ends.

    With the heaviest part this ``close`` above the lower bound, or after ``trials`` pairs of parts have been divided anew
    (some 30 microseconds each).
    """

    close: float
    trials: int


_BETWEEN_RANKS: Final = _Effort(1.001, 256)
_WITHIN_A_RANK: Final = _Effort(1.01, 32)


def pack(
    lengths: Sequence[int] | NDArray[np.integer],
    *,
    budget: int,
    dp: int,
    alignment: Alignment,
    cost: Callable[[int], float] = float,
    multiple_of: int = 1,
    at_least: int = 1,
    equal_counts: bool = False,
    equal_shapes: bool = False,
) -> tuple[MicroBatches, ...]:
    """Pack sequences of the given lengths (in tokens, each at least 1) into micro-batches.

    Returns, for each of ``dp`` ranks, its micro-batches as tuples of indices into ``lengths``, dearest first. Guaranteed:

    - every sequence is in exactly one micro-batch; a rank's list may be empty;
    - no micro-batch exceeds ``budget`` tokens, counted after ``alignment``: strictly, for any lengths;
    - ranks are balanced by ``cost`` (length in tokens -> time, in any unit), and so are the micro-batches of a rank, which
      are as few as its tokens allow;
    - equal inputs give equal results, on every rank and in every process; the order of the sequences changes which of two
      equal ones goes where, and nothing else.

    Options, for schedules that need them:

    - ``multiple_of``: a rank's number of micro-batches is a multiple of it. Micro-batches are split for that; a rank with
      too few sequences gets empty micro-batches at its end, which the caller fills with what has no weight in the loss;
    - ``at_least``: a rank has as many micro-batches as this, or one per sequence: a pipeline fills better with more;
    - ``equal_counts``: all ranks have equally many, made up for as above;
    - ``equal_shapes``: a rank's micro-batches will be padded to the longest of them, so their tokens are balanced, not
      their costs.

    Without ``multiple_of`` and ``equal_counts`` no micro-batch is empty. Raises ValueError, naming the sequence, where one
    exceeds the budget alone, and for a budget above 2**31 - 1 tokens.
    """
    if min(dp, multiple_of, at_least) < 1:
        raise ValueError(f"dp {dp}, multiple_of {multiple_of} and at_least {at_least} must be at least 1")
    if budget > LARGEST_MICRO_BATCH:
        raise ValueError(
            f"a budget of {budget} tokens per micro-batch is above {LARGEST_MICRO_BATCH}: "
            "the boundaries of packed sequences are 32-bit"
        )
    whole = as_lengths(lengths)
    if not len(whole):
        return ((),) * dp
    padded = -(-whole // alignment.sequence) * alignment.sequence
    _refuse_what_does_not_fit(whole, padded, budget, alignment)
    weights = _weights(whole, cost)
    # Dearest first, then largest: what is left to the position in the input are equal sequences.
    order = np.lexsort((-padded, -weights))
    items = _Items(weights[order].tolist(), padded[order].tolist())
    # A micro-batch's padded total may only be a multiple of alignment.total: what is left of the budget is unusable.
    room = budget // alignment.total * alignment.total
    by = items.sizes if equal_shapes else items.weights
    packed, counts = [], []
    for members in _over_ranks(items, dp, room):
        batches = _into_micro_batches(items.sizes, by, members, room, at_least)
        packed.append(batches)
        counts.append(-(-len(batches) // multiple_of) * multiple_of)
    if equal_counts:
        counts = [max(counts)] * dp
    for rank, (batches, count) in enumerate(zip(packed, counts, strict=True)):
        if len(batches) < count:
            packed[rank] = _into_more(items.sizes, by, batches, room, count)
    positions = order.tolist()
    return tuple(
        tuple(tuple(sorted(positions[item] for item in batch)) for batch in _dearest_first(batches, items))
        + ((),) * (count - len(batches))
        for batches, count in zip(packed, counts, strict=True)
    )


def lower_bound(costs: Iterable[float], parts: int) -> float:
    """What the heaviest of ``parts`` parts weighs at least, however the costs are divided.

    That is the mean and the dearest one, and, since of the ``j * parts + 1`` dearest some part holds ``j + 1``, the sum of
    the ``j + 1`` cheapest of those.
    """
    dear = np.sort(np.asarray(list(costs)))[::-1]
    if not len(dear):
        return 0.0
    bound = max(float(dear.sum()) / parts, float(dear[0]))
    for together in range(1, (len(dear) - 1) // parts + 1):
        last = together * parts
        bound = max(bound, float(dear[last - together : last + 1].sum()))
        if together == _PIGEONS:
            break
    return bound


def first_fit(sizes: Iterable[int], room: int) -> list[list[int]]:
    """Positions of ``sizes``, each as it comes put into the first part that has room: what a loader without a plan does."""
    parts: list[list[int]] = []
    left: list[int] = []
    for position, size in enumerate(sizes):
        part = next((part for part, free in enumerate(left) if free >= size), len(left))
        if part == len(left):
            parts.append([])
            left.append(room)
        parts[part].append(position)
        left[part] -= size
    return parts


class _Items(NamedTuple):
    """Sequences as the algorithms see them: by position, dearest first; sizes are padded tokens."""

    weights: list[int]
    sizes: list[int]


def as_lengths(lengths: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """Lengths as an array; ``ValueError`` where they are not whole numbers."""
    given = np.asarray(lengths)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"lengths must be a flat list of whole numbers, not {given.dtype} of {given.ndim} dims")
    return given.astype(np.int64)


def _refuse_what_does_not_fit(
    lengths: NDArray[np.int64], padded: NDArray[np.int64], budget: int, alignment: Alignment
) -> None:
    wrong = np.flatnonzero((lengths < 1) | (-(-padded // alignment.total) * alignment.total > budget))
    if not len(wrong):
        return
    index = int(wrong[0])
    length = int(lengths[index])
    if length < 1:
        raise ValueError(f"sequence {index} has length {length}; a sequence has at least one token")
    raise ValueError(
        f"sequence {index} of {length} tokens takes {alignment.alone(length)} with its alignment, "
        f"above the budget of {budget} tokens per micro-batch"
    )


def _weights(lengths: NDArray[np.int64], cost: Callable[[int], float]) -> NDArray[np.int64]:
    """Costs in whole steps, each at least 1; asked for once per length."""
    distinct, where = np.unique(lengths, return_inverse=True)
    costs = [float(cost(length)) for length in distinct.tolist()]
    for length, each in zip(distinct.tolist(), costs, strict=True):
        if not 0 <= each < math.inf:
            raise ValueError(f"the cost of {length} tokens is {each}; a cost is at least 0")
    step = max(costs) / _COST_STEPS or 1.0
    return np.array([max(1, round(each / step)) for each in costs], np.int64)[where]


# -------------------------------------------------------------------------------------------------------- two divisions


def _over_ranks(items: _Items, dp: int, room: int) -> list[list[int]]:
    """Divide all sequences over ranks by cost; with the fewest micro-batches that hold them where that costs little."""
    everything = range(len(items.sizes))
    fewest = -(-sum(items.sizes) // (dp * room))
    enough = lower_bound(items.weights, dp) * _WORTH_A_MICRO_BATCH
    tight = _divide_well(items, everything, dp, fewest * room)
    if tight is not None and _heaviest(items.weights, tight) <= enough:
        return tight
    free = _divide_well(items, everything, dp, sum(items.sizes))
    assert free is not None
    if tight is None or _heaviest(items.weights, tight) > _heaviest(items.weights, free) * _WORTH_A_MICRO_BATCH:
        return free
    return tight


def _divide_well(items: _Items, members: Sequence[int], parts: int, room: int) -> list[list[int]] | None:
    """``_divide`` by cost, with a second way where a part holds few and the first does not come near the bound."""
    weights, sizes = items
    divided = _divide(weights, sizes, members, parts, room, _BETWEEN_RANKS)
    bound = lower_bound(weights, parts)
    few = len(members) <= min(_FEW * parts, _MOST_FILLED)
    if divided is None or not few or _heaviest(weights, divided) <= bound * _WORTH_A_MICRO_BATCH:
        return divided
    other = _filled_to_a_limit(weights, sizes, members, parts, room, int(bound), _heaviest(weights, divided))
    if other is None:
        return divided
    _improve(weights, sizes, other, room, bound, _BETWEEN_RANKS)
    return other


def _into_micro_batches(
    sizes: list[int], weights: list[int], members: list[int], room: int, at_least: int
) -> list[list[int]]:
    """Divide a rank's sequences into few micro-batches that hold them, but ``at_least`` many where there are as many."""
    if not members:
        return []
    fewest = max(-(-sum(sizes[item] for item in members) // room), min(at_least, len(members)))
    batches = _divide(weights, sizes, members, fewest, room, _WITHIN_A_RANK)
    if batches is not None:
        return batches
    # The sum fits, the pieces do not when they are spread evenly: fill one up after the other and see how many it takes.
    return _into_more(sizes, weights, _best_fit(sizes, members, room), room, fewest)


def _into_more(
    sizes: list[int], weights: list[int], batches: list[list[int]], room: int, count: int
) -> list[list[int]]:
    """The sequences of these micro-batches in ``count`` balanced ones, or in as many as there are sequences or batches."""
    members = [item for batch in batches for item in batch]
    count = max(len(batches), min(count, len(members)))
    divided = _divide(weights, sizes, members, count, room, _WITHIN_A_RANK)
    if divided is not None:
        return divided
    while len(batches) < count:
        most = max(batches, key=len)
        batches.append([most.pop() for _ in range(len(most) // 2)])
    return batches


def _dearest_first(batches: list[list[int]], items: _Items) -> list[list[int]]:
    return sorted(batches, key=lambda batch: (-sum(items.weights[item] for item in batch), sorted(batch)))


# ------------------------------------------------------------------------------------- items into parts of limited size


def _heaviest(weights: list[int], parts: list[list[int]]) -> int:
    return max(sum(weights[item] for item in part) for part in parts)


def _divide(
    weights: list[int], sizes: list[int], members: Sequence[int], parts: int, room: int, effort: _Effort
) -> list[list[int]] | None:
    """Divide items over parts of at most ``room`` in size so that the heaviest part is light; None where one finds no room.

    No part is empty unless there are fewer items than parts.
    """
    ordered = sorted(members, key=lambda item: (-weights[item], -sizes[item], item))
    divided = _longest_first(weights, sizes, ordered, parts, room)
    if divided is not None and parts > 1:
        bound = lower_bound([weights[item] for item in members], parts)
        _improve(weights, sizes, divided, room, bound, effort)
    return divided


def _longest_first(
    weights: list[int], sizes: list[int], ordered: Sequence[int], parts: int, room: int
) -> list[list[int]] | None:
    """Each item, heaviest first, into the lightest part that has room."""
    contents: list[list[int]] = [[] for _ in range(parts)]
    # (weight, size, part); an empty part comes before one of equal weight.
    open_parts = [(0, 0, part) for part in range(parts)]
    # (size, weight, part) of parts that had no room for an item before.
    waiting: list[tuple[int, int, int]] = []
    for item in ordered:
        size = sizes[item]
        while waiting and waiting[0][0] + size <= room:
            filled, weight, part = heapq.heappop(waiting)
            heapq.heappush(open_parts, (weight, filled, part))
        while open_parts and open_parts[0][1] + size > room:
            weight, filled, part = heapq.heappop(open_parts)
            heapq.heappush(waiting, (filled, weight, part))
        if not open_parts:
            return None
        weight, filled, part = open_parts[0]
        heapq.heapreplace(open_parts, (weight + weights[item], filled + size, part))
        contents[part].append(item)
    return contents


def _filled_to_a_limit(
    weights: list[int], sizes: list[int], ordered: Sequence[int], parts: int, room: int, low: int, high: int
) -> list[list[int]] | None:
    """Each item, heaviest first, into the first part that stays within a limit, for the lowest limit found to do.

    Coffman, Garey and Johnson's MULTIFIT. None where no limit below ``high`` does.
    """
    found = None
    for _ in range(_HALVINGS):
        limit = (low + high) // 2
        loads, filled = np.zeros(parts, np.int64), np.zeros(parts, np.int64)
        contents: list[list[int]] = [[] for _ in range(parts)]
        for item in ordered:
            fits = (loads + weights[item] <= limit) & (filled + sizes[item] <= room)
            part = int(fits.argmax())
            if not fits[part]:
                low = limit
                break
            loads[part] += weights[item]
            filled[part] += sizes[item]
            contents[part].append(item)
        else:
            found, high = contents, int(loads.max())
    return found


def _best_fit(sizes: list[int], members: Sequence[int], room: int) -> list[list[int]]:
    """Each item, largest first, into the fullest part that has room, or into a new one."""
    contents: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for item in sorted(members, key=lambda item: (-sizes[item], item)):
        place = bisect_left(rooms, (sizes[item], -1))
        if place < len(rooms):
            left, part = rooms.pop(place)
        else:
            left, part = room, len(contents)
            contents.append([])
        contents[part].append(item)
        insort(rooms, (left - sizes[item], part))
    return contents


# ---------------------------------------------------------------------------------------------------------- improvement


def _improve(
    weights: list[int], sizes: list[int], parts: list[list[int]], room: int, bound: float, effort: _Effort
) -> None:
    """Make the heaviest part lighter, in place, by dividing it and another anew, the lightest first."""
    loads = np.array([sum(weights[item] for item in part) for part in parts], np.int64)
    left = effort.trials
    while (heaviest := int(loads.max())) > bound * effort.close:
        top = int(loads.argmax())
        for other in np.argsort(loads, kind="stable").tolist():
            if not left or loads[other] >= heaviest:
                return
            left -= 1
            anew = _pair_anew(weights, sizes, parts[top], parts[other], room)
            if anew is not None:
                parts[top], parts[other] = anew
                loads[top], loads[other] = (sum(weights[item] for item in part) for part in anew)
                break


def _pair_anew(
    weights: list[int], sizes: list[int], heavy: list[int], light: list[int], room: int
) -> tuple[list[int], list[int]] | None:
    """The items of two parts divided so that the heavier one is lighter than ``heavy``; None where that is not found."""
    if len(heavy) + len(light) <= _EXACT:
        return _best_of_all_divisions(weights, sizes, heavy, light, room)
    return _best_exchange(weights, sizes, heavy, light, room)


def _best_of_all_divisions(
    weights: list[int], sizes: list[int], heavy: list[int], light: list[int], room: int
) -> tuple[list[int], list[int]] | None:
    first, *rest = heavy + light
    sums, filled = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for item in rest:
        sums = np.concatenate((sums, sums + weights[item]))
        filled = np.concatenate((filled, filled + sizes[item]))
    whole, total = int(sums[-1]) + weights[first], int(filled[-1]) + sizes[first]
    heavier = np.maximum(sums, whole - sums)
    heavier[(filled > room) | (total - filled > room)] = whole
    choice = int(heavier.argmin())
    if heavier[choice] >= sum(weights[item] for item in heavy):
        return None
    one = [item for bit, item in enumerate(rest) if choice >> bit & 1]
    return [first, *(item for bit, item in enumerate(rest) if not choice >> bit & 1)], one


def _best_exchange(
    weights: list[int], sizes: list[int], heavy: list[int], light: list[int], room: int
) -> tuple[list[int], list[int]] | None:
    """Move one item of ``heavy`` over, or exchange it for one of ``light``, so that their weights come closest."""
    gap = sum(weights[item] for item in heavy) - sum(weights[item] for item in light)
    # Position 0 stands for no item in return.
    back = sorted(light, key=lambda item: (weights[item], sizes[item], item))
    back_weights = np.array([0, *(weights[item] for item in back)], np.int64)
    back_sizes = np.array([0, *(sizes[item] for item in back)], np.int64)
    over_weights = np.array([weights[item] for item in heavy], np.int64)[:, None]
    over_sizes = np.array([sizes[item] for item in heavy], np.int64)[:, None]
    # Of what could come back for each item, the two on either side of what would make the parts equal.
    nearest = np.searchsorted(back_weights, over_weights - gap // 2)
    choices = np.clip(np.concatenate((nearest - 1, nearest), axis=1), 0, len(back))
    moved = over_weights - back_weights[choices]
    grows = over_sizes - back_sizes[choices]
    spare_light = room - sum(sizes[item] for item in light)
    spare_heavy = room - sum(sizes[item] for item in heavy)
    allowed = (moved > 0) & (moved < gap) & (grows <= spare_light) & (-grows <= spare_heavy)
    off = np.where(allowed, np.abs(2 * moved - gap), gap)
    row, column = divmod(int(off.argmin()), 2)
    if off[row, column] >= gap:
        return None
    position = int(choices[row, column])
    over = heavy[row]
    stays, goes = [item for item in heavy if item != over], [*light, over]
    if position:
        returned = back[position - 1]
        stays.append(returned)
        goes.remove(returned)
    return stays, goes
