"""Switching leaves nothing behind: groups, threads, descriptors, memory, Megatron's globals, random numbers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.job import Mix, document, start, step_of
from tests.spawn import run_ranks
from tests.training import import_megatron

MIX = Mix(
    (2, 2, 1), ((16, 1, 1, 1), (32, 1, 1, 2), (48, 2, 1, 1)), ("--sequence-parallel", "--use-distributed-optimizer")
)
LENGTHS = (5, 9, 16, 20, 30, 33, 40, 50, 60)


@pytest.fixture(scope="module")
def observed() -> list[dict[str, Any]]:
    """What every rank of one job saw; one job serves all tests here but the longest."""
    return run_ranks(_observe, 4, timeout=200, prepare=import_megatron)


def _observe(rank: int, world: int) -> dict[str, Any]:
    job = _job(rank, world)
    watched = (_watch_memory, _fail_inside, _draw, _disagree, _lose_a_peer, _pool_of)
    return {function.__name__: function(rank, *job) for function in watched}


def _job(rank: int, world: int) -> tuple[Any, Any, Any, Any]:
    from hotspa_megatron.hooks import get_batch
    from hotspa_megatron.hooks.patching import Patches

    session, model, forward_step = start(MIX, world, torch.float32)
    get_batch.serve(forward_step, Patches(), adapter=None)
    loader, step = step_of(session, [document(0, i, n) for i, n in enumerate(LENGTHS)])

    def run() -> Any:
        for chunk in model:
            chunk.zero_grad_buffer()
        return session.runner.run(forward_step_func=forward_step, step=step, loader=loader)

    return session, model, run, step


@pytest.mark.long
def test_two_hundred_switches_leave_groups_threads_descriptors_and_memory_as_they_were() -> None:
    for before, after, leaked, ended, switches, resident in run_ranks(
        _switch_often, 4, timeout=200, prepare=import_megatron
    ):
        assert switches == 200
        assert before == after
        assert resident == 0
        # One group, thread or descriptor more would have been seen; at the end of a job no group is left.
        assert {name: leaked[name] - after[name] > 0 for name in leaked} == {
            **dict.fromkeys(leaked, True),
            "pool": False,
        }
        assert ended["groups"] == 0


def _switch_often(
    rank: int, world: int
) -> tuple[dict[str, int], dict[str, int], dict[str, int], dict[str, int], int, int]:
    session, _, run, _ = _job(rank, world)
    guests = session.runner._guests.values()

    def counted() -> dict[str, int]:
        return {
            "groups": len(dist.distributed_c10d._world.pg_map),
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "pool": len(session.pool),
        }

    run()
    before, switches, resident = counted(), 0, 0
    while switches < 200:
        _, record = run()
        switches += len(record.switches)
        resident = max(resident, *(guest.resident_bytes for guest in guests))
    after = counted()
    # Megatron's own way of setting strategies up and down would leave such a group behind each time.
    kept = dist.new_group(list(range(world))), os.open("/dev/null", os.O_RDONLY)
    assert kept
    leaked = counted()
    dist.destroy_process_group()
    return before, after, leaked, counted(), switches, resident


def test_a_guest_holds_memory_only_while_it_runs(observed: list[dict[str, Any]]) -> None:
    for inside, full, after in (each["_watch_memory"] for each in observed):
        # Both guests' segments are watched, so that a guest that never had memory cannot pass.
        assert len(inside) == 2
        for held, expected in zip(inside, full, strict=True):
            assert held == expected > 0
        assert after == [0, 0]


def _watch_memory(rank: int, session: Any, model: Any, run: Any, step: Any) -> tuple[list[int], list[int], list[int]]:
    runner = session.runner
    guests = list(runner._guests.values())
    full = [sum(2 * p.numel() * p.element_size() for p in guest.parameters.values()) for guest in guests]
    inside: list[int] = []
    finish = runner._finish_guest

    def watched(guest: Any) -> None:
        inside.append(guest.resident_bytes)
        assert all(other is guest or other.resident_bytes == 0 for other in guests)
        finish(guest)

    runner._finish_guest = watched
    run()
    runner._finish_guest = finish
    return inside, full, [guest.resident_bytes for guest in guests]


def test_an_error_inside_a_segment_leaves_home_in_place(observed: list[dict[str, Any]]) -> None:
    assert [each["_fail_inside"] for each in observed] == [4] * 4


def _fail_inside(rank: int, session: Any, model: Any, run: Any, step: Any) -> int:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from hotspa_megatron.hooks.model import chunks_of
    from hotspa_megatron.hooks.parallel_state import _read_globals

    home = {name: getattr(session.args, name) for name in session.states.home.sizes}
    before, states = _read_globals(), get_cuda_rng_tracker().get_states()
    held = [dict(vars(module)) for chunk in chunks_of(model) for module in chunk.modules()]
    schedule = session.runner._schedule
    # The first segment, then the last: a failed step ends a job, and its folds under way would meet the next one's.
    for failing in (0, len(step.plan.segments) - 1):
        seen = []

        def fails(*args: Any, failing: int = failing, seen: list[int] = seen, **options: Any) -> Any:
            seen.append(len(seen))
            if len(seen) > failing:
                raise KeyError("planted")
            return schedule(*args, **options)

        session.runner._schedule = fails
        with pytest.raises(KeyError, match="planted"):
            run()
        assert all(guest.resident_bytes == 0 for guest in session.runner._guests.values())
        after = _read_globals()
        assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
        assert home == {name: getattr(session.args, name) for name in home}
        tracked = get_cuda_rng_tracker().get_states()
        assert states.keys() == tracked.keys() and all(torch.equal(states[name], tracked[name]) for name in states)
        for module, values in zip((m for c in chunks_of(model) for m in c.modules()), held, strict=True):
            assert all(
                vars(module)[name] is value for name, value in values.items() if name.endswith(("group", "collection"))
            )
            assert not hasattr(module, "config") or module.config.context_parallel_size == home["context_parallel_size"]
    return len(step.plan.segments)


def test_memory_that_peers_still_write_into_is_not_released(observed: list[dict[str, Any]]) -> None:
    """A rank that loses one peer within a switch has messages of the others under way: it must live to say what it lost."""
    assert [each["_lose_a_peer"] for each in observed] == [(True, 0)] * 4


def _lose_a_peer(rank: int, session: Any, model: Any, run: Any, step: Any) -> tuple[bool, int]:
    from hotspa_megatron.hooks.patching import Patches
    from hotspa_megatron.runtime.executor import PendingReshard

    patches, guests = Patches(), session.runner.moves.guests.values()

    def lost(self: PendingReshard) -> None:
        raise ConnectionError("planted")

    patches.set(PendingReshard, "finish", lost)
    with pytest.raises(ConnectionError, match="planted"):
        run()
    kept = any(guest.resident_bytes for guest in guests)
    patches.undo_all()
    session.runner.moves._mid_switch = False
    session.runner.moves.end_step()
    return kept, sum(guest.resident_bytes for guest in guests)


def test_random_numbers_of_a_segment_follow_from_its_place_alone(observed: list[dict[str, Any]]) -> None:
    drawn = [each["_draw"] for each in observed]
    for first, again, other_iteration, other_segment, home_before, home_after in drawn:
        assert first == again
        assert len({first, other_iteration, other_segment}) == 3
        assert home_before == home_after
    # Under tp1-dp4 every rank is another replica.
    assert len({each[0] for each in drawn}) == 4


def _draw(rank: int, session: Any, model: Any, run: Any, step: Any) -> tuple[float, ...]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from hotspa_megatron.hooks.parallel_state import random_state_of

    guest = session.resolved.strategies[0].strategy

    def draw(iteration: int, segment: int) -> float:
        with (
            session.states.activate(guest),
            random_state_of(guest, rank=rank, seed=7, iteration=iteration, segment=segment),
            get_cuda_rng_tracker().fork(),
        ):
            return float(torch.rand(()))

    home_before = torch.get_rng_state().sum().item()
    values = draw(3, 0), draw(3, 0), draw(4, 0), draw(3, 1)
    return (*values, float(home_before), float(torch.get_rng_state().sum().item()))


def test_ranks_that_planned_another_step_are_named_on_every_rank(observed: list[dict[str, Any]]) -> None:
    for message in (each["_disagree"] for each in observed):
        assert message.startswith("ranks 2 planned another step than the others (samples 0 to 8)")


def _disagree(rank: int, session: Any, model: Any, run: Any, step: Any) -> str:
    _, other = step_of(session, [document(0, i, n + (rank == 2 and i == 4)) for i, n in enumerate(LENGTHS)])
    with pytest.raises(RuntimeError) as caught:
        session.runner._compare_plans(other)
    session.runner._compare_plans(step)
    return str(caught.value)


def test_groups_are_shared_by_rank_tuple_and_a_late_one_is_refused(observed: list[dict[str, Any]]) -> None:
    logs = [each["_pool_of"] for each in observed]
    for log, refused in logs:
        assert log == logs[0][0]
        assert len(set(log)) == len(log)
        assert "was not planned at start" in refused


def _pool_of(rank: int, session: Any, model: Any, run: Any, step: Any) -> tuple[list[Any], str]:
    with pytest.raises(RuntimeError) as caught:
        session.pool.get([0, 3])
    return list(session.pool.log), str(caught.value)
