"""The watchdog names the rank that holds the others up, once per stall, and costs a job nothing but its lines.

Ranks are objects here, beside one store and one clock that the test moves; trainings that stand still are in test_faults.py.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch.distributed as dist

from hotspa_megatron.runtime.watchdog import FAILED_FIRST, Beat, Progress, Watchdog, connection_beside, judge

SECONDS = 60


class _Memory:
    """A store that counts what it is asked."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.calls.append("set")
        self.values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self.calls.append("check")
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.calls.append("get")
        return [self.values[key] for key in keys]


class _Job:
    """Ranks whose threads the test plays; ``now`` is their clock."""

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.store = _Memory()
        self.progress = [Progress() for _ in range(world)]
        self.ranks = [
            Watchdog(
                each, rank=rank, world_size=world, seconds=SECONDS, connect=lambda: self.store, say=lambda _: None,
                clock=lambda: self.now,
            )
            for rank, each in enumerate(self.progress)
        ]  # fmt: skip

    def train(self, step: int, ranks: Iterable[int] = ()) -> None:
        """All ranks, or those, come to the end of a step's planning."""
        for rank in ranks or range(len(self.ranks)):
            self.progress[rank].step(step)
            self.progress[rank].at("waiting", "for all ranks to agree on the step")

    def wait(self, seconds: float, *, stopped: Iterable[int] = ()) -> dict[int, list[str]]:
        """Time passes; what each rank says meanwhile."""
        said: dict[int, list[str]] = {}
        end, silent = self.now + seconds, set(stopped)
        while self.now < end:
            self.now += self.ranks[0].interval
            alive = [rank for rank in range(len(self.ranks)) if rank not in silent]
            for rank in alive:
                self.ranks[rank].exchange(self.store)
            for rank in alive:
                if (line := self.ranks[rank].finding()) is not None:
                    said.setdefault(rank, []).append(line)
        return said


def test_who_failed_first_is_heard_while_the_store_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may wait for the one that holds the store, and notices nothing before both are gone."""
    job = _Job(2, monkeypatch)
    job.train(1)
    job.wait(10)
    assert [rank.failed_first for rank in job.ranks] == [None, None]
    job.store.set(FAILED_FIRST, "rank 3 at step 1: KeyError")
    job.wait(job.ranks[0].interval)
    job.store.set(FAILED_FIRST, "another")
    job.wait(job.ranks[0].interval)
    assert [rank.failed_first for rank in job.ranks] == ["rank 3 at step 1: KeyError"] * 2


def test_a_stopped_rank_is_named_once_and_again_in_another_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    job = _Job(4, monkeypatch)
    for step in (1, 2):
        job.train(step)
        assert job.wait(5) == {}
        # Rank 2 does not come on.
        for rank in (0, 1, 3):
            job.progress[rank].at("fold", "a -> b")
            job.progress[rank].inside("chunk", [2])
        assert job.wait(SECONDS / 2, stopped=[2]) == {}
        said = job.wait(SECONDS, stopped=[2])
        assert sorted(said) == [0, 1, 3] and all(len(lines) == 1 for lines in said.values())
        assert re.fullmatch(
            rf"no progress for \d+ s: rank 2 is behind: last seen at step {step}, waiting for all ranks to agree on the step, "
            rf"and its process does not beat any more \(.*\); ranks 0-1, 3 at step {step}, fold a -> b, chunk 1, "
            r"waiting for rank 2(, in \S+ \(\w+\))?",
            said[0][0],
        )
        for rank in (1, 3):
            assert re.search(
                rf"at step {step}, fold a -> b, chunk 1, waiting for rank 2; rank 0 says: rank 2 is behind",
                said[rank][0],
            )


@pytest.mark.parametrize(("after", "beats"), [(0.7, False), (0.9, True)])
def test_a_rank_may_stop_in_the_midst_of_a_stall(after: float, beats: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the others up, and is stopped while they have begun to look for it; of the last moment nobody can tell."""
    job = _Job(4, monkeypatch)
    job.train(1)
    for rank in (0, 1, 3):
        job.progress[rank].at("fold", "a -> b")
    assert job.wait(after * SECONDS) == {}
    said = job.wait(SECONDS, stopped=[2])
    assert ("its process beats" in said[0][0]) == beats and ("does not beat any more" in said[0][0]) != beats
    assert "rank 0 says: rank 2 is behind" in said[1][0]


def test_a_rank_that_was_stopped_itself_blames_nobody_when_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it knows of others is from before, and its connection may be a moment late."""
    job = _Job(2, monkeypatch)
    job.train(1)
    assert job.wait(5) == {}
    said = job.wait(2 * SECONDS, stopped=[0])
    assert sorted(said) == [1]
    assert job.ranks[0].finding() is None  # goes on, a minute or two later
    assert job.wait(SECONDS / 2) == {}
    # Nothing keeps it from being told of a stall that begins then.
    assert 0 in job.wait(2 * SECONDS, stopped=[1])


def test_a_rank_that_hangs_in_its_own_code_still_beats_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    job = _Job(3, monkeypatch)
    job.train(7)
    job.progress[1].inside("forward")
    for rank in (0, 2):
        job.progress[rank].at("waiting", "for all ranks' losses")
    assert job.wait(5) == {}
    said = job.wait(2 * SECONDS)
    assert re.search(
        r"rank 1 is behind: at step 7, .*, forward 1, in \S+\.py:\d+ \(\w+\); its process beats", said[0][0]
    )
    # So does the rank itself.
    assert "rank 0 says: rank 1 is behind" in said[1][0]


def test_a_job_that_gets_on_is_told_of_nothing_and_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    job = _Job(4, monkeypatch)
    for step in range(20):
        job.train(step)
        assert job.wait(SECONDS / 3) == {}
    beats = int(20 * SECONDS / 3 / job.ranks[0].interval)
    # Once a beat each says where it is, and asks whether anybody has failed: should it notice that too late to ask.
    assert job.store.calls == ["set", "check"] * 4 * beats


@pytest.mark.parametrize("silent", [0, None])
def test_without_rank_0_others_find_out_by_themselves(silent: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _Job(12, monkeypatch)
    job.train(3)
    for rank in range(1, 12):
        job.progress[rank].at("waiting", "for all ranks' losses")
    assert job.wait(5) == {}
    said = job.wait(2 * SECONDS, stopped=() if silent is None else [silent])
    assert all("rank 0 is behind" in said[rank][0] for rank in range(1, 8))
    # Not everybody asks for everybody: that would be a storm on the store.
    last = said[11][0]
    assert ("rank 0 says: rank 0 is behind" if silent is None else "the first 8 ranks say nothing") in last


def _beat(place: int, *, waits: bool = True, step: int = 1) -> Beat:
    return Beat(9, step, place, f"place {place}", (), "x.py:1 (f)", waits)


@pytest.mark.parametrize(
    ("beats", "quiet", "message"),
    [
        ({0: _beat(3), 1: _beat(3), 2: _beat(3)}, (), "no rank is behind the others.*; ranks 0-2 at place 3$"),
        ({0: _beat(3), 1: _beat(3, waits=False), 2: _beat(3)}, (), "^rank 1 is behind: at place 3, in x.py:1"),
        (
            {0: _beat(3), 1: _beat(2), 2: _beat(2, waits=False)},
            (),
            "^rank 2 is behind: .*; ranks? 0 at place 3; rank 1 at place 2",
        ),
        ({0: _beat(3), 1: _beat(5), 2: _beat(0, step=2)}, (), "^rank 0 is behind"),
        ({0: _beat(3), 1: None, 2: _beat(1)}, (), "^rank 1 is behind: it has not come to its first step"),
        ({0: _beat(3), 1: _beat(4), 2: _beat(1)}, (0,), "^rank 0 is behind: .* does not beat any more"),
        (dict.fromkeys(range(10), _beat(3)), range(9), "5 more ranks are behind; rank 9 at place 3$"),
    ],
    ids=["nobody", "one waits for nobody", "of two", "earlier", "never came", "quiet", "many"],
)
def test_who_is_behind(beats: dict[int, Beat | None], quiet: Collection[int], message: str) -> None:
    assert re.search(message, judge(beats, quiet))


# --------------------------------------------------------------------------------------------------- with real threads


def _watch(connect: Any, said: list[str], seconds: float = 1.0) -> Watchdog:
    progress = Progress()
    progress.step(4)
    return Watchdog(progress, rank=1, world_size=2, seconds=seconds, connect=connect, say=said.append)


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _fails(*_: object) -> Any:
    raise ConnectionError("no store")


def test_a_store_that_comes_back_is_beaten_to_again() -> None:
    """Its owner may be stopped for a minute and go on: a rank that had given up would be taken for a stopped one."""
    store, calls, said = _Memory(), itertools.count(1), list[str]()

    def connect() -> _Memory:
        if next(calls) in (1, 2):
            raise ConnectionError("no store")
        return store

    watchdog = _watch(connect, said, seconds=3600.0)
    watchdog.interval = 0.01  # type: ignore[misc]
    watchdog.start()
    _until(lambda: "1" in store.values)
    assert not watchdog._lost
    store.set = _fails  # type: ignore[method-assign, assignment]
    _until(lambda: watchdog._lost)
    del store.set
    store.values.clear()
    _until(lambda: "1" in store.values and not watchdog._lost)
    watchdog.stop()


def test_a_store_that_is_lost_costs_a_job_nothing() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connect = connection_beside(dist.PrefixStore("a", dist.PrefixStore("b", server)))
    assert connect is not None and connection_beside(dist.HashStore()) is None
    reader, said = connect(), []
    one, other = _watch(connect, said), _watch(_fails, said)
    before = threading.active_count()
    one.start()
    other.start()
    _until(lambda: reader.check(["1"]))
    del server
    _until(lambda: len(said) == 2)
    for line in said:
        assert re.match(
            r"no progress for \d+ s, at step 4, planning; of others nothing is known: .*does not answer", line
        )
    one.stop()
    other.stop()
    # One may still be trying to reach the store, and ends when that fails.
    _until(lambda: threading.active_count() == before)
