"""The pool at world size 64 in one process, on torch's fake backend: what is shared, what is added, what is refused."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest

from hotspa_megatron.planning.communicators import count_groups
from hotspa_megatron.runtime.group_pool import GroupPool
from hotspa_megatron.strategy import Strategy
from tests.job import home_on_the_fake_backend
from tests.spawn import run_ranks

WORLD = 64
HOME = Strategy(tp=8, cp=2, pp=2, dp=2)
OTHERS = (Strategy(tp=2, cp=1, pp=1, dp=32), Strategy(tp=1, cp=1, pp=8, dp=8), Strategy(tp=8, cp=1, pp=2, dp=4))
needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")


def on_the_fake_backend(_: int, __: int, rank: int) -> dict[str, Any]:
    """What a job of 64 ranks makes on one of them: home by Megatron itself, the others through the pool."""
    pool, states = home_on_the_fake_backend(HOME, rank=rank)
    before = len(pool)
    for other in OTHERS:
        states.create(other)
    mine = states[OTHERS[0]].groups
    return {
        "home": before,
        "log": list(pool.log),
        "created": list(pool.created),
        "sizes": (mine.tp.size(), mine.cp.size(), mine.dp.size(), mine.pp.size()),
    }


@needs_megatron
def test_strategies_share_groups_by_rank_tuple_and_add_none_of_one_rank() -> None:
    seen = [run_ranks(on_the_fake_backend, 1, rank, init_process_group=False, timeout=120)[0] for rank in (0, 37)]
    for each in seen:
        # Every rank makes every group, in one order.
        assert each["log"] == seen[0]["log"] and each["created"] == seen[0]["created"]
        assert each["sizes"] == (2, 1, 32, 1)
    created = seen[0]["created"]
    assert created and all(len(ranks) > 1 for ranks, _ in created)
    assert len({ranks for ranks, _ in created}) == len(created)
    assert not {ranks for ranks, _ in created} & {ranks for ranks, _ in seen[0]["log"][: seen[0]["home"]]}
    planned = count_groups([HOME, *OTHERS]).total - count_groups([HOME]).total
    assert len(created) == planned


def named(ranks: list[int], backend: str | None, **options: Any) -> str:
    return f"{ranks} {backend} {sorted(options)}"


def test_a_rank_alone_gets_whatever_group_of_its_own_there_is() -> None:
    pool = GroupPool(named)
    pool.adopt([3], "Megatron's", backend="gloo")
    assert pool.get([3]) == pool.get([3], backend="nccl") == "Megatron's"
    assert pool.get([3, 4]) != pool.get([3, 4], backend="nccl")
    assert pool.created == [((3, 4), None), ((3, 4), "nccl")]


def test_creation_is_timed_and_sealed() -> None:
    ticks = itertools.count()
    pool = GroupPool(lambda **_: next(ticks))
    assert (pool.get([0, 1]), pool.get([0, 1]), pool.get([1, 0])) == (0, 0, 1)
    assert pool.seconds > 0 and len(pool) == 2
    pool.seal()
    with pytest.raises(RuntimeError, match="was not planned at start"):
        pool.get([0, 2])
