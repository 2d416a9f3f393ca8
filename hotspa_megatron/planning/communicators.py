"""Counts the communicators that strategies take together, and estimates the memory that NCCL gives to them.

Pure: knows Megatron's axes and nothing of torch. ``hotspa explain`` and the job's start print it; ``memory_model`` counts it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from hotspa_megatron.strategy import Kind, Strategy

_AXIS_SETS: Final = ("tp", "cp", "dp", "pp", "tp-cp", "tp-dp", "tp-pp", "dp-cp", "tp-dp-cp")
"""Axes of the groups that Megatron makes for a dense model; those of its embeddings are counted beside them."""

PAIR_MB: Final = 544
GROUP_MB: Final = 688
"""MiB that a rank gives to a communicator of two ranks, and of more: NCCL's buffers after a first all-reduce.

Measured on four A100 of one node (github.com/NVIDIA/nccl/issues/964). An assumption elsewhere: it grows with the number
of channels and NCCL_BUFFSIZE, and newer releases connect only what is used, so that it is rather too much.
"""
ASSUMPTION: Final = f"{PAIR_MB} MiB per communicator of two ranks, {GROUP_MB} of more: 4 x A100, NVIDIA/nccl issue 964"

Group = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Distinct communicators of more than one rank over all strategies; one that serves several axes counts once."""

    per_axes: dict[str, int]
    total: int
    most_on_one_rank: int


@dataclass(frozen=True, kw_only=True)
class GroupMemory:
    """Estimated MiB of NCCL's buffers on the rank that has most: of all groups, and of those that home does not have."""

    added_groups: int
    total_mb: int
    added_mb: int


def count_groups(strategies: Iterable[Strategy]) -> Groups:
    """Count the communicators that these strategies take together."""
    found = _by_axes(strategies)
    distinct = set().union(*found.values())
    on_rank = Counter(rank for group in distinct for rank in group)
    return Groups(
        per_axes={axes: len(groups) for axes, groups in found.items()},
        total=len(distinct),
        most_on_one_rank=max(on_rank.values(), default=0),
    )


def group_memory(home: Strategy, others: Sequence[tuple[Strategy, Kind]]) -> GroupMemory:
    """What the groups of ``home`` and of the strategies beside it take; moves of guests have a group of the whole world."""
    own = set().union(*_by_axes([home]).values())
    every = set().union(*_by_axes([home, *(strategy for strategy, _ in others)]).values())
    moves = home.world_size > 1 and any(kind is Kind.GUEST for _, kind in others)
    added_mb = sum(map(_megabytes, added_sizes(home, [strategy for strategy, _ in others])))
    return GroupMemory(
        added_groups=len(every - own) + moves,
        total_mb=sum(_megabytes(len(group)) for group in _of_first_rank(home)) + added_mb,
        added_mb=added_mb,
    )


def added_sizes(home: Strategy, others: Iterable[Strategy]) -> tuple[int, ...]:
    """Ranks of each group that strategies add to home's on the rank that gets most, ascending: guests' moves have one, too."""
    others = set(others)
    added = [len(group) for group in frozenset().union(*map(_of_first_rank, others)) - _of_first_rank(home)]
    if home.world_size > 1 and not all(strategy.same_layout(home) for strategy in others):
        added.append(home.world_size)
    return tuple(sorted(added))


@functools.lru_cache(maxsize=1024)
def _of_first_rank(strategy: Strategy) -> frozenset[Group]:
    """Groups that rank 0 is in. No rank is in more: every rank is in one per axes, and rank 0's stage has an embedding."""
    return frozenset(group for groups in _by_axes([strategy]).values() for group in groups if group[0] == 0)


def _megabytes(ranks: int) -> int:
    return PAIR_MB if ranks == 2 else GROUP_MB


def _by_axes(strategies: Iterable[Strategy]) -> dict[str, set[Group]]:
    found: dict[str, set[Group]] = {axes: set() for axes in (*_AXIS_SETS, "all", "embedding")}
    for strategy in sorted(set(strategies)):
        for axes in _AXIS_SETS:
            found[axes].update(group for group in strategy.groups(axes) if len(group) > 1)
        if strategy.pp > 1:
            # All ranks in another order than the world's: Megatron's group of a distributed optimizer's instance.
            found["all"].add(tuple(rank for group in strategy.groups("tp-pp") for rank in group))
            found["embedding"].update((group[0], group[-1]) for group in strategy.groups("pp"))
    return found
