"""Whatever happens to a rank at whatever point of a step: all ranks end soon, the cause is said, and a resume goes on as if
nothing had happened. A rank that stands still is named; one that is slow changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import pytest

from tests.faults import POINTS, SAVED, TRACKER, Fault, Kind, Traces, plant
from tests.spawn import REPOSITORY, process_state
from tests.training import SCRIPT, TWO_GUESTS, Home, Job, Run, arguments, flag, log_steps, ranks_here, train, workspace

# Without a sharded optimizer: stock Megatron does not restore that one on CPU.
HOME = Home(2, 1, 2, ())
WATCHED = TWO_GUESTS + "watchdog_s: 2\n"
BACKEND_S = 15.0
"""Longer than the watchdog takes where the rank that holds the store stands still: four times its patience, and looks."""
PAIR = Home(2, 1, 1, ())
END_S = 30.0
"""In this time all ranks have to be gone once one is, or once the backend has given one up."""


def line(*more: str, iterations: int, home: Home = HOME, documents: Path | None = None) -> tuple[str, ...]:
    return arguments(
        *home.flags, *more, tp=home.tp, cp=home.cp, pp=home.pp, iterations=iterations, batch=8, documents=documents
    )


def _planted(faults: Sequence[Fault], folder: Path, log: Path | None, backend_s: float | None) -> None:
    plant(faults, folder, end=True, backend_s=backend_s)
    if log is not None:
        log_steps(log)


def job(
    arguments: tuple[str, ...], faults: Sequence[Fault], traces: Path, *, log: Path | None = None, ranks: int = 4
) -> Job:
    traces.mkdir(exist_ok=True)
    stopped = any(fault.kind == "stop" for fault in faults)
    before = functools.partial(_planted, tuple(faults), traces, log, BACKEND_S if stopped else None)
    return Job(arguments, WATCHED, ranks=ranks, before=before)


@dataclasses.dataclass(frozen=True)
class Broken:
    """How the ranks of a training that did not end well ended, and when the last one had (``time.monotonic``)."""

    ranks: tuple[str, ...]
    ended: float

    @classmethod
    def train(cls, job: Job) -> Broken:
        with pytest.raises(AssertionError) as caught:
            train(job, grace=END_S)
        ended = time.monotonic()
        _, *parts = re.split(r"^---- rank \d+ of \d+ ----$", str(caught.value), flags=re.MULTILINE)
        return cls(tuple(part.strip() for part in parts), ended)

    def code(self, rank: int) -> int | None:
        """The exit code of a rank, None where it was still there."""
        found = re.match(r"died without a traceback, exit code (-?\d+)", self.ranks[rank])
        return None if found is None else int(found[1])

    def lines(self, rank: int) -> list[str]:
        return [each for each in self.ranks[rank].splitlines() if each.startswith("hotspa:")]


def check(broken: Broken, faults: Sequence[Fault], traces: Traces) -> None:
    """All of ``faults`` struck. At the one that is not slow a rank ended or was stopped; so did the others, and they know of
    no other cause."""
    (number,) = (number for number, each in enumerate(faults) if each.kind != "slow")
    fault = faults[number]
    assert fault.rank is not None
    assert [each for number, each in enumerate(faults) if traces.struck(number) is None] == [], broken.ranks
    others = [rank for rank in range(len(broken.ranks)) if rank != fault.rank]
    assert all(broken.code(rank) == 1 for rank in others), broken.ranks
    for rank in others:
        assert any(re.match(r"lost another rank at step \d+", each.line) for each in traces.said(rank)), broken.ranks[
            rank
        ]
    if fault.kind == "stop":
        assert broken.code(fault.rank) is None
        struck = traces.struck(number)
        assert struck is not None and broken.ended - struck < BACKEND_S + END_S
        _check_stop(broken, fault.rank, others, traces)
    elif fault.kind in ("kill", "terminate"):
        assert broken.code(fault.rank) == -(signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
    else:
        assert broken.code(fault.rank) == 1 and f"ArithmeticError: {fault.message}" in broken.ranks[fault.rank]
        for rank in others:
            first = f"the first to fail: rank {fault.rank} at "
            words = [each.line for each in traces.said(rank) if each.line.startswith(first)]
            # The store is in rank 0's process here, which takes its own word with it.
            assert words or not fault.rank, broken.ranks[rank]
            assert all(each.endswith(f": ArithmeticError: {fault.message}") for each in words)
            assert broken.ranks[rank].count(fault.message) <= 1


def _check_stop(broken: Broken, stopped: int, others: Sequence[int], traces: Traces) -> None:
    """The stopped rank is named by all the others before they end, which they do once the backend's time-out is over."""
    # The store is in rank 0's process here, which a launcher's is not.
    who = f"rank {stopped} is behind: " if stopped else "rank 0, which holds the job's store, does not answer"
    losses = []
    for rank in others:
        *findings, loss = traces.said(rank)
        # Of earlier stalls, on a machine that is busy, it may have spoken, too.
        assert findings and who in findings[-1].line, broken.ranks[rank]
        if stopped:
            assert re.search("does not beat any more|has not come to its first step", findings[-1].line)
        assert findings[-1].at < loss.at
        losses.append(loss)
    # Some rank gave up after as long as the backend lets it; the others lost that one, where they had come a moment later.
    gave_up = [loss for loss in losses if re.search(r"Timed out waiting|Application timeout", loss.line)]
    assert gave_up and all(loss.at - loss.since >= BACKEND_S for loss in gave_up), losses


def logged(log: Path) -> list[tuple[int, float]]:
    entries = [json.loads(text) for text in log.read_text().splitlines()]
    return [(entry["iteration"], entry["loss"]) for entry in entries]


# ----------------------------------------------------------------------------------------------------- at random points

RANKS = 4
FATAL: tuple[Kind, ...] = ("kill", "raise", "stop")
CHAINS = 8
LINKS = len(FATAL) * len(POINTS) // CHAINS
SEED = 20261201
BESIDE = {"", "after the step", "after the save", "after the last step"}
"""Places that are no points: between two of them there is nothing to break."""


def drawn() -> list[list[tuple[Fault, ...]]]:
    """The faults of each run of each chain: every kind at every point, in any order. The last runs end well."""
    chance = random.Random(SEED)
    # Of the four kinds at a point each meets another rank.
    ranks = {point: (0,) * RANKS if point == TRACKER else chance.sample(range(RANKS), RANKS) for point in POINTS}
    faults = {
        kind: [
            Fault(kind, ranks[point][number], point, chance.randint(1, 2), seconds=chance.uniform(0.1, 0.8))
            for point in chance.sample(POINTS, len(POINTS))
        ]
        for number, kind in enumerate((*FATAL, "slow"))
    }
    chains = []
    for number in range(CHAINS):
        fatal = [fault for kind in FATAL for fault in faults[kind][number::CHAINS]]
        links: list[tuple[Fault, ...]] = []
        for fault in chance.sample(fatal, len(fatal)):
            # All ranks end a step together, so that one that is slow in the first is so before a fault in the second.
            slow = dataclasses.replace(chance.choice(faults["slow"]), step=1)
            links.append((fault, slow) if fault.step == 2 else (fault,))
        chains.append([*links, tuple(faults["slow"][number::CHAINS])])
    return chains


def test_every_kind_of_fault_is_drawn_at_every_point_and_every_rank_at_every_point() -> None:
    chains = drawn()
    faults = [fault for links in chains for link in links for fault in link]
    fatal = [link[0] for links in chains for link in links[:-1]]
    assert len(fatal) + sum(len(links[-1]) for links in chains) >= 50
    assert {(fault.kind, fault.point) for fault in faults} == set(itertools.product((*FATAL, "slow"), POINTS))
    only_rank_0 = set(itertools.product(range(1, RANKS), [TRACKER]))
    assert {(fault.rank, fault.point) for fault in faults} == set(itertools.product(range(RANKS), POINTS)) - only_rank_0
    assert {(fault.kind, fault.step) for fault in faults} == set(itertools.product((*FATAL, "slow"), (1, 2)))
    assert {fault.kind for fault in fatal} == set(FATAL) and set(FATAL) < set(get_args(Kind))
    assert all(fault.kind == "slow" for links in chains for link in links for fault in link[1:] + links[-1])


@functools.cache
def unbroken(iterations: int) -> tuple[Run, dict[int, float]]:
    log = workspace() / f"unbroken-{iterations}"
    run = train(Job(line(iterations=iterations), WATCHED, before=functools.partial(log_steps, log)))
    return run, dict(logged(log))


def counts(tracker: Path) -> int:
    """The iteration that a start goes on from: the tracker's, or for an empty one that of the last finished checkpoint."""
    if text := tracker.read_text():
        return int(text)
    return max(int(each.parent.name.removeprefix("iter_")) for each in tracker.parent.glob("iter_*/metadata.json"))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(CHAINS))
def test_faults_at_random_points_leave_the_loss_trace_as_it_is(tmp_path: Path, number: int) -> None:
    """Each chain is one training, broken off ``LINKS`` times and resumed, and slowed on the way."""
    iterations = 2 * LINKS + 2
    whole, expected = unbroken(iterations)
    assert len(set(expected.values())) == iterations
    tracker = tmp_path / "saved" / "latest_checkpointed_iteration.txt"
    log = tmp_path / "log"

    def part(faults: Sequence[Fault], name: str) -> Job:
        save = ("--save", str(tmp_path / "saved"), "--save-interval", "1")
        load = ("--load", str(tmp_path / "saved")) if tracker.exists() else ()
        return job(line(*save, *load, iterations=iterations), faults, tmp_path / name, log=log)

    *links, last = drawn()[number]
    for index, faults in enumerate(links):
        print(f"after {counts(tracker) if tracker.exists() else 0}: {faults}")
        check(Broken.train(part(faults, f"link-{index}")), faults, Traces(tmp_path / f"link-{index}"))
    print(f"after {counts(tracker)}: {last}")
    end = train(part(last, "last"))
    traces = Traces(tmp_path / "last")
    assert [fault for index, fault in enumerate(last) if traces.struck(index) is None] == []
    # All the points that there are: every chunk of every move is one of them.
    for rank in range(RANKS):
        assert traces.points(rank) - BESIDE == set(POINTS) - ({TRACKER} if rank else set())
    trace = logged(log)
    assert {iteration for iteration, _ in trace} == set(expected)
    assert [(iteration, loss) for iteration, loss in trace if loss != expected[iteration]] == []
    assert end.parameters == whole.parameters


# ----------------------------------------------------------------------------------------------------- a few, by default


@pytest.mark.parametrize(
    "fault",
    [Fault("stop", 3, "forward", 2), pytest.param(Fault("stop", 0, "switch chunk 2", 2), marks=pytest.mark.long)],
    ids=lambda fault: f"rank {fault.rank} in {fault.point}",
)
def test_a_stopped_rank_is_named_and_the_backends_time_out_ends_the_job(tmp_path: Path, fault: Fault) -> None:
    # It is slow before, so that it has told where it is: it does so once a second. So are the others, which would look for
    # it while it still beats.
    slow = dataclasses.replace(fault, kind="slow", rank=None, seconds=1.5)
    broken = Broken.train(job(line(iterations=3), (slow, fault), tmp_path / "traces"))
    check(broken, (slow, fault), Traces(tmp_path / "traces"))
    if fault.rank:
        named = [each for each in broken.lines(1) if "watchdog" in each][-1]
        # In rank 0's words, but for a machine on which those come late.
        assert re.search(r"watchdog: no progress for \d+ s, at step 2, .*: rank 3 is behind: last seen", named), named
        assert re.search(
            r"rank 3 is behind: last seen at step 2, segment 1 \(tp1-cp1-pp1-dp4\), forward 1, and", named
        ), named


@pytest.mark.long
def test_a_slow_rank_changes_nothing_but_is_named(tmp_path: Path) -> None:
    """For longer than the watchdog waits; the job goes on as if nothing had been."""
    slow = Fault("slow", 1, "backward", 2, seconds=8.0)
    run = train(job(line(iterations=3), (slow,), tmp_path / "traces"))
    assert Traces(tmp_path / "traces").struck(0) is not None
    whole, _ = unbroken(3)
    assert run.iterations == whole.iterations and run.parameters == whole.parameters
    named = [each for each in run.output.splitlines() if each.startswith("hotspa: watchdog:")]
    assert len(named) == 1 and re.search(
        r"no progress for \d+ s: rank 1 is behind: at step 2, .*backward \d+, in tests/faults\.py:\d+ \(_strike\); its "
        "process beats",
        named[0],
    )
    assert "hotspa: watchdog:" not in whole.output


@pytest.mark.long
def test_the_watchdog_names_the_peer_that_a_rank_waits_for(tmp_path: Path) -> None:
    """Rank 1 stands still with two of a switch's three batches under way: rank 0 comes to the third at most."""
    fault = Fault("stop", 1, "switch chunk 1", 2)
    slow = dataclasses.replace(fault, kind="slow", rank=None, seconds=1.5)
    broken = Broken.train(_pair((slow, fault), tmp_path / "traces"))
    check(broken, (slow, fault), Traces(tmp_path / "traces"))
    assert re.search(
        r"watchdog: no progress for \d+ s: rank 1 is behind: last seen at step 2, switch (\S+ -> \S+), chunk 1, and its "
        r"process does not beat any more \(.*\); rank 0 at step 2, switch \1, chunk [123], waiting for rank 1$",
        [each for each in broken.lines(0) if "watchdog" in each][-1],
    ), broken.lines(0)


# ------------------------------------------------------------------------------------------------------- under torchrun


@dataclasses.dataclass(frozen=True)
class Launched:
    """How torchrun ended. ``errors``: the lines of its standard error, with all ranks' in it; ``seconds``: from the first
    fault until it and all ranks were gone."""

    code: int
    errors: list[str]
    seconds: float

    @property
    def ours(self) -> list[str]:
        return [each for each in self.errors if each.startswith("hotspa:")]


def torchrun(
    folder: Path,
    faults: Sequence[Fault],
    *argv: str,
    ranks: int = 2,
    sent: signal.Signals | None = None,
    waits: str | None = None,
) -> Launched:
    """A job that is started as people start it. ``sent``: what torchrun's own process gets at the first fault, or, with
    ``waits``, once rank 0 has come to that point, too."""
    script = folder / "faulty.py"
    script.write_text(
        textwrap.dedent(f"""
            import pathlib
            from tests.faults import Fault, plant
            if __name__ == "__main__":  # and no process that a checkpoint's writer spawns
                plant({list(faults)!r}, pathlib.Path({str(folder)!r}), end=False)
            exec(compile(pathlib.Path({str(SCRIPT)!r}).read_text(), {str(SCRIPT)!r}, "exec"))
        """)
    )
    command = [sys.executable, "-m", *ranks_here(ranks), "-m", "hotspa_megatron.launch", str(script), *argv]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    errors, traces = folder / "errors", Traces(folder)
    with errors.open("w") as file:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=file)
        try:
            while process.poll() is None and (traces.struck(0) is None or (waits and waits not in traces.points(0))):
                time.sleep(0.1)
            began = time.monotonic()
            if sent is not None:
                process.send_signal(sent)
            code = process.wait(2 * END_S)
            while (
                any(process_state(rank) not in (None, "Z") for rank in traces.processes())
                and time.monotonic() < began + 2 * END_S
            ):
                time.sleep(0.1)
            seconds = time.monotonic() - began
        finally:
            process.kill()
            process.wait()
            # Each rank leads a group, in which helpers of a checkpoint's writer outlive a rank that was killed.
            for rank in traces.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank, signal.SIGKILL)
    return Launched(code, errors.read_text(errors="replace").splitlines(), seconds)


GUEST_OF_TWO = "strategies: [{max_length: 64, tp: 1}]"


@pytest.mark.parametrize(
    ("fault", "home"),
    [
        (Fault("raise", 1, "backward", 2), PAIR),
        pytest.param(Fault("kill", 1, "backward", 2), PAIR, marks=pytest.mark.long),
        pytest.param(Fault("raise", 2, "save", 1), HOME, marks=pytest.mark.long),
        pytest.param(Fault("raise", 3, "fold", 2), HOME, marks=pytest.mark.long),
    ],
    ids=lambda value: f"{value.kind} at {value.point}" if isinstance(value, Fault) else f"{value.tp * value.pp} ranks",
)
def test_torchrun_ends_all_ranks_and_its_last_words_are_the_first_failing_ranks(
    tmp_path: Path, fault: Fault, home: Home
) -> None:
    argv = line("--save", str(tmp_path / "saved"), "--save-interval", "1", iterations=3, home=home)
    config = WATCHED if home == HOME else GUEST_OF_TWO
    ended = torchrun(tmp_path, (fault,), *argv, *flag(config), ranks=home.tp * home.pp)
    text = "\n".join(ended.errors)
    assert ended.code != 0 and ended.seconds < END_S, text
    last = text[text.rindex("Root Cause (first observed failure)") :]
    assert re.search(rf"rank +: {fault.rank} ", last), last
    assert (f"ArithmeticError: {fault.message}" if fault.kind == "raise" else "Signal 9 (SIGKILL)") in last
    # The others' loss of a peer covers nothing.
    assert "gloo/transport" not in "".join(each for each in ended.errors if not each.startswith("hotspa:"))
    assert text.count("Traceback (most recent call last)") <= text.count(fault.message) + 1


@pytest.mark.long
def test_an_interrupt_is_one_line_of_every_rank(tmp_path: Path) -> None:
    slow = Fault("slow", None, "after the step", 1, seconds=4.0)
    argv = line(iterations=50, home=PAIR)
    ended = torchrun(tmp_path, (slow,), *argv, *flag(GUEST_OF_TWO), sent=signal.SIGINT)
    assert ended.code != 0 and ended.seconds < END_S
    assert sorted(each for each in ended.ours if "interrupted" in each) == [
        "hotspa: interrupted at step 1, after the step",
        "hotspa: rank 1: interrupted at step 1, after the step",
    ]


@pytest.mark.long
def test_an_interrupt_ends_a_rank_that_waits_for_another(tmp_path: Path) -> None:
    """It waits in a call of the backend's, which no interrupt ends: the other rank's end does."""
    slow = Fault("slow", 1, "backward", 1, seconds=20.0)
    argv = line(iterations=50, home=PAIR)
    ended = torchrun(tmp_path, (slow,), *argv, *flag(GUEST_OF_TWO), sent=signal.SIGINT, waits="reduction")
    assert ended.code != 0 and ended.seconds < END_S
    ours = sorted(each for each in ended.ours if " at step 1" in each)
    assert len(ours) == 2, ended.errors
    assert re.match(r"hotspa: (interrupted|lost another rank) at step 1, reduction \S+", ours[0])
    assert re.fullmatch(r"hotspa: rank 1: interrupted at step 1, segment .*, backward 1", ours[1])


@pytest.mark.long
def test_ranks_whose_launcher_is_gone_end_and_say_so(tmp_path: Path) -> None:
    """It held the job's store, and nobody else would end the others where one fails."""
    slow = Fault("slow", 1, "backward", 2, seconds=1.0)
    argv = line(iterations=5000, home=PAIR)
    ended = torchrun(tmp_path, (slow,), *argv, *flag(GUEST_OF_TWO), sent=signal.SIGKILL)
    assert ended.code == -signal.SIGKILL and ended.seconds < END_S, ended.errors
    for prefix in ("hotspa: ", "hotspa: rank 1: "):
        assert any(
            re.match(rf"{prefix}(torchrun, which started this rank, is gone|lost another rank at step)", each)
            for each in ended.ours
        ), ended.errors


# --------------------------------------------------------------------------------------------- signals and time limits


@functools.cache
def pair(*more: str, iterations: int = 4) -> Run:
    return train(Job(line(*more, iterations=iterations, home=PAIR), WATCHED.replace("tp: 4", "tp: 2"), ranks=2))


def _pair(faults: Sequence[Fault], struck: Path, *more: str) -> Job:
    return dataclasses.replace(
        job(line(*more, iterations=4, home=PAIR), faults, struck, ranks=2), config=WATCHED.replace("tp: 4", "tp: 2")
    )


@pytest.mark.parametrize("end", ["a signal", pytest.param("a time limit", marks=pytest.mark.long)])
def test_a_signal_or_a_time_limit_saves_and_the_resumed_run_is_the_unbroken_one(tmp_path: Path, end: str) -> None:
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "100")
    faults = (Fault("terminate", 1, "optimizer", 1),) if end == "a signal" else ()
    # Megatron counts whole minutes; this many are over after the first iteration.
    limit = ("--exit-signal-handler",) if end == "a signal" else ("--exit-duration-in-mins", "-1")
    with pytest.raises(AssertionError, match="SystemExit: 0"):
        train(_pair(faults, tmp_path / "traces", *save, *limit))
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "1"
    resumed = pair("--load", str(tmp_path / "saved"))
    assert resumed.iterations == pair().iterations[1:] and resumed.parameters == pair().parameters


@pytest.mark.long
def test_a_signal_that_nobody_handles_ends_all_and_the_last_checkpoint_counts(tmp_path: Path) -> None:
    """SIGTERM without --exit-signal-handler."""
    fault = Fault("terminate", 1, "optimizer", 2)
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "1")
    check(Broken.train(_pair((fault,), tmp_path / "traces", *save)), (fault,), Traces(tmp_path / "traces"))
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "1"
    resumed = pair("--load", str(tmp_path / "saved"))
    assert resumed.iterations == pair().iterations[1:] and resumed.parameters == pair().parameters


@pytest.mark.long
def test_an_interrupt_while_a_rank_waits_for_another_is_said_when_that_one_comes(tmp_path: Path) -> None:
    faults = (Fault("slow", 1, "backward", 2, seconds=9.0), Fault("interrupt", 0, "backward", 2, seconds=5.0))
    broken = Broken.train(_pair(faults, tmp_path / "traces"))
    # Not where it was when the signal was set, but where it has waited since.
    assert broken.code(0) == 130 and re.fullmatch(r"hotspa: interrupted at step 2, reduction \S+", broken.lines(0)[-1])
    assert "Traceback" not in broken.ranks[0]
    assert broken.code(1) == 1
    assert Traces(tmp_path / "traces").said(1)[-1].line.startswith("lost another rank at step 2")


def test_an_interrupted_rank_says_where_it_was(tmp_path: Path) -> None:
    broken = Broken.train(_pair((Fault("interrupt", None, "optimizer", 2),), tmp_path / "traces"))
    for rank, prefix in enumerate(("hotspa: ", "hotspa: rank 1: ")):
        assert broken.code(rank) == 130 and broken.lines(rank)[-1] == f"{prefix}interrupted at step 2, optimizer"
        assert "Traceback" not in broken.ranks[rank]


# ------------------------------------------------------------------------------------------------------ saves and loads


@pytest.mark.long
@pytest.mark.parametrize(
    "fault", [Fault("kill", 1, SAVED, 2), Fault("kill", 0, TRACKER, 2)], ids=lambda fault: str(fault.point)
)
def test_a_save_that_was_all_but_done_costs_one_step_at_most(tmp_path: Path, fault: Fault) -> None:
    """The checkpoint before counts for as long as the file that names the last one does not say otherwise."""
    saved, traces = tmp_path / "saved", tmp_path / "traces"
    load = ("--load", str(saved))
    check(Broken.train(_pair((fault,), traces, "--save", str(saved), "--save-interval", "1")), (fault,), Traces(traces))
    assert sorted(path.parent.name for path in saved.glob("iter_*/metadata.json")) == ["iter_0000001", "iter_0000002"]
    tracker = saved / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == ("" if fault.point == TRACKER else "1")
    done = 2 if fault.point == TRACKER else 1
    assert counts(tracker) == done
    resumed = pair(*load)
    assert resumed.iterations == pair().iterations[done:] and resumed.parameters == pair().parameters


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "none", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a full disk is a small tmpfs, which cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_ends_all_ranks_with_one_line_and_the_checkpoint_before_stays_good(
    disk: Path, tmp_path: Path
) -> None:
    save = ("--save", str(disk), "--save-interval", "1")
    fault = Fault("fill", 0, "save", 3, disk=disk)
    broken = Broken.train(_pair((fault,), tmp_path / "traces", *save))
    saved = int((disk / "latest_checkpointed_iteration.txt").read_text())
    assert saved == 2
    for rank in range(2):
        assert broken.code(rank) == 1, broken.ranks[rank]
        assert "Traceback" not in broken.ranks[rank]
        assert re.search(
            rf"the checkpoint of iteration {saved + 1} cannot be saved: (rank 0: .*OSError.*|another rank could not .*); "
            rf"0 MiB are free there; the last whole one in {disk} is that of iteration {saved}$",
            broken.lines(rank)[-1],
        )
    resumed = pair("--load", str(disk))
    assert resumed.iterations == pair().iterations[saved:] and resumed.parameters == pair().parameters


@pytest.mark.long
@pytest.mark.parametrize("what", ["cut", "gone"])
def test_a_shard_that_one_rank_cannot_read_is_one_line_and_ends_all(tmp_path: Path, what: str) -> None:
    pair("--save", str(tmp_path), "--save-interval", "2")
    shard = max((tmp_path / "iter_0000004").glob("__1_*.distcp"))
    if what == "cut":
        os.truncate(shard, shard.stat().st_size // 2)
    else:
        shard.unlink()
    broken = Broken.train(_pair((), tmp_path / "traces", "--load", str(tmp_path)))
    assert [broken.code(rank) for rank in range(2)] == [1, 1], broken.ranks
    # Each rank reads what it needs: rank 0 has all of that, loses rank 1, and says why that ended.
    assert broken.lines(1)[-1].startswith(f"hotspa: rank 1: the checkpoint in {tmp_path} cannot be loaded: ")
    assert "rank 0" not in broken.lines(1)[-1] and "Traceback" not in broken.ranks[1]
    lost, first = (said.line for said in Traces(tmp_path / "traces").said(0))
    assert lost.startswith("lost another rank at step 0, start: ")
    cause = broken.lines(1)[-1].removeprefix("hotspa: rank 1: ")
    assert first == f"the first to fail: rank 1 at step 0, start: {cause}"[: len(first)] and len(first) > 100
    assert broken.ranks[0].count("cannot be loaded") <= 1
    # The checkpoint before is as good as it was.
    resumed = pair("--load", str(tmp_path), "--ckpt-step", "2")
    assert resumed.iterations == pair().iterations[2:] and resumed.parameters == pair().parameters
