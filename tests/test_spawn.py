"""The helper that starts ranks: results in order, every traceback, no process left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time

import pytest
import torch
import torch.distributed as dist

from tests.spawn import run_ranks


def _sum_of_ranks(rank: int, world_size: int, offset: int) -> tuple[int, int, int]:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    assert torch.get_num_threads() == 1
    assert int(os.environ["RANK"]) == rank and int(os.environ["WORLD_SIZE"]) == world_size
    return rank, int(total.item()), os.getpid()


def _fail_on_one(rank: int, world_size: int) -> None:
    print(f"rank {rank} was here")
    if rank == 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def _hang(rank: int, world_size: int, marker: str) -> None:
    with open(f"{marker}.{rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


def _die(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(7)
    dist.barrier()


def _leave_a_child(rank: int, world_size: int) -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def _no_group(rank: int, world_size: int) -> bool:
    return dist.is_initialized()


def _meet_at_the_port(rank: int, world_size: int) -> int:
    with pytest.raises(OSError), socket.socket() as other:
        other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return int(total.item())


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_results_come_back_in_rank_order_and_no_rank_stays() -> None:
    results = run_ranks(_sum_of_ranks, 3, 10)
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    assert {total for _, total, _ in results} == {33}
    assert not any(_is_alive(pid) for _, _, pid in results)


def test_one_failure_ends_all_ranks_and_shows_every_traceback() -> None:
    started = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_ranks(_fail_on_one, 3, timeout=50)
    assert time.monotonic() - started < 20
    message = str(caught.value)
    assert "failed on ranks" in message and "ValueError: broken on purpose" in message
    assert "rank 2 was here" in message
    assert message.count("---- rank ") == 3 and "_fail_on_one" in message


def test_a_hang_is_ended_at_the_timeout_and_located(tmp_path: object) -> None:
    marker = f"{tmp_path}/pid"
    with pytest.raises(AssertionError, match="did not finish within 3 s") as caught:
        run_ranks(_hang, 2, marker, timeout=3)
    assert "in _hang" in str(caught.value)
    for rank in range(2):
        with open(f"{marker}.{rank}") as file:
            assert not _is_alive(int(file.read()))


def test_a_rank_that_dies_without_a_word_is_named() -> None:
    with pytest.raises(AssertionError, match="died without a traceback, exit code 7"):
        run_ranks(_die, 2, timeout=30)


def test_what_a_rank_started_ends_with_it() -> None:
    children = run_ranks(_leave_a_child, 2, init_process_group=False)
    deadline = time.monotonic() + 20  # they have been killed; somebody else has to take them off the process table
    while any(_is_alive(child) for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_ranks_may_initialise_by_themselves() -> None:
    assert run_ranks(_no_group, 2, init_process_group=False) == [False, False]
    assert run_ranks(_meet_at_the_port, 3, init_process_group=False) == [3, 3, 3]


_prepared: list[int] = []


def _prepare() -> None:
    _prepared.append(os.getpid())


def _prepared_by(rank: int, world_size: int) -> tuple[list[int], int]:
    dist.barrier()
    return _prepared, os.getppid()


def _fail_to_prepare() -> None:
    raise OSError("nothing to prepare from")


def test_ranks_of_all_calls_are_forked_from_one_prepared_server() -> None:
    results = [result for _ in range(2) for result in run_ranks(_prepared_by, 2, prepare=_prepare)]
    server = results[0][1]
    assert server != os.getpid() and results == [([server], server)] * 4
    assert not _prepared


def test_a_failure_in_a_prepared_server_is_told_as_any_other() -> None:
    with pytest.raises(AssertionError, match="broken on purpose"):
        run_ranks(_fail_on_one, 2, timeout=50, prepare=_prepare)
    assert len(run_ranks(_prepared_by, 2, prepare=_prepare)) == 2
    with pytest.raises(AssertionError, match="nothing to prepare from"):
        run_ranks(_prepared_by, 2, prepare=_fail_to_prepare)


def test_an_interrupted_call_leaves_no_rank_and_the_next_gets_a_new_server(tmp_path: object) -> None:
    marker = f"{tmp_path}/pid"

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 3)
        with pytest.raises(KeyboardInterrupt):
            run_ranks(_hang, 2, marker, timeout=60, prepare=_prepare)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for rank in range(2):
        with open(f"{marker}.{rank}") as file:
            assert not _is_alive(int(file.read()))
    assert len(run_ranks(_prepared_by, 2, prepare=_prepare)) == 2
