"""Whatever happens to a rank at whatever point of a step: all ranks end soon, the cause is said, and a resume goes on as if
nothing had happened. A rank that stands still is named; one that is slow changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults import POINTS, Fault, Kind, plant
from tests.spawn import REPOSITORY
from tests.training import SCRIPT, TWO_GUESTS, Home, Job, Run, arguments, flag, log_steps, train, workspace

# Without a sharded optimizer: stock Megatron does not restore that one on CPU.
HOME = Home(2, 1, 2, ())
WATCHED = TWO_GUESTS + "watchdog_s: 2\n"
BACKEND_S = 9.0
END_S = 30.0
"""In this time all ranks have to be gone once one is."""


def line(*more: str, iterations: int, home: Home = HOME, documents: Path | None = None) -> tuple[str, ...]:
    return arguments(
        *home.flags, *more, tp=home.tp, cp=home.cp, pp=home.pp, iterations=iterations, batch=8, documents=documents
    )


def _planted(faults: Sequence[Fault], struck: Path, log: Path | None, backend_s: float | None) -> None:
    plant(faults, struck, end=True, backend_s=backend_s)
    if log is not None:
        log_steps(log)


def job(
    arguments: tuple[str, ...], faults: Sequence[Fault], struck: Path, *, log: Path | None = None, ranks: int = 4
) -> Job:
    struck.mkdir(exist_ok=True)
    stopped = any(fault.kind == "stop" for fault in faults)
    before = functools.partial(_planted, tuple(faults), struck, log, BACKEND_S if stopped else None)
    return Job(arguments, WATCHED, ranks=ranks, before=before)


@dataclasses.dataclass(frozen=True)
class Broken:
    """How the ranks of a training that did not end well ended."""

    ranks: tuple[str, ...]

    @classmethod
    def train(cls, job: Job) -> Broken:
        with pytest.raises(AssertionError) as caught:
            train(job, grace=END_S)
        _, *parts = re.split(r"^---- rank \d+ of \d+ ----$", str(caught.value), flags=re.MULTILINE)
        return cls(tuple(part.strip() for part in parts))

    def code(self, rank: int) -> int | None:
        """The exit code of a rank, None where it was still there."""
        found = re.match(r"died without a traceback, exit code (-?\d+)", self.ranks[rank])
        return None if found is None else int(found[1])

    def lines(self, rank: int) -> list[str]:
        return [each for each in self.ranks[rank].splitlines() if each.startswith("hotspa:")]


def check(broken: Broken, fault: Fault) -> None:
    """A rank ended or was stopped; so did the others, and they know of no other cause."""
    assert fault.rank is not None
    others = [rank for rank in range(len(broken.ranks)) if rank != fault.rank]
    assert all(broken.code(rank) == 1 for rank in others), broken.ranks
    for rank in others:
        assert any(re.search(r"lost another rank at step \d+", each) for each in broken.lines(rank)), broken.ranks[rank]
    if fault.kind == "stop":
        assert broken.code(fault.rank) is None
        named = [each for rank in others for each in broken.lines(rank) if "watchdog: no progress for" in each]
        # Once on each rank; the store is in rank 0's process here, which a launcher's is not.
        who = f"rank {fault.rank} is behind" if fault.rank else "rank 0, which holds the job's store, does not answer"
        assert len(named) == len(others) and all(who in each for each in named), broken.ranks
        if fault.rank:
            assert all("does not beat any more" in each for each in named)
    elif fault.kind == "kill":
        assert broken.code(fault.rank) == -signal.SIGKILL
    else:
        assert broken.code(fault.rank) == 1 and f"ArithmeticError: {fault.message}" in broken.ranks[fault.rank]
        assert not any(fault.message in broken.ranks[rank] for rank in others)


def logged(log: Path) -> list[tuple[int, float]]:
    entries = [json.loads(text) for text in log.read_text().splitlines()]
    return [(entry["iteration"], entry["loss"]) for entry in entries]


# ----------------------------------------------------------------------------------------------------- at random points

CHAINS, LINKS = 8, 5
BASE_SEED = 20261130


def _drawn(chance: random.Random, kind: Kind) -> Fault:
    return Fault(
        kind, chance.randrange(4), chance.choice(POINTS), chance.randint(1, 2), seconds=chance.uniform(0.1, 0.8)
    )


@functools.cache
def unbroken(iterations: int) -> tuple[Run, dict[int, float]]:
    log = workspace() / f"unbroken-{iterations}"
    run = train(Job(line(iterations=iterations), WATCHED, before=functools.partial(log_steps, log)))
    return run, dict(logged(log))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(CHAINS))
def test_faults_at_random_points_leave_the_loss_trace_as_it_is(tmp_path: Path, number: int) -> None:
    """Each chain is one training, broken off ``LINKS`` times and resumed, and slowed on the way: 88 faults in all."""
    iterations = 2 * LINKS + 2
    whole, expected = unbroken(iterations)
    assert len(set(expected.values())) == iterations
    seed = BASE_SEED + number
    chance, tracker = random.Random(seed), tmp_path / "saved" / "latest_checkpointed_iteration.txt"
    print(f"seed {seed}")
    log = tmp_path / "log"

    def part(faults: Sequence[Fault], name: str) -> Job:
        save = ("--save", str(tmp_path / "saved"), "--save-interval", "1")
        load = ("--load", str(tmp_path / "saved")) if tracker.exists() else ()
        return job(line(*save, *load, iterations=iterations), faults, tmp_path / name, log=log)

    for link in range(LINKS):
        # Two of five stand still or fail: what takes a time-out is dear.
        fault = _drawn(chance, ("kill", "raise", "kill", "raise", "stop")[link])
        slow = dataclasses.replace(_drawn(chance, "slow"), step=1)
        print(f"resumed after {tracker.read_text() if tracker.exists() else 0}: {fault}, {slow}")
        check(Broken.train(part((fault, slow), f"struck-{link}")), fault)
        assert (tmp_path / f"struck-{link}" / "0").exists()
    slow = _drawn(chance, "slow")
    last = train(part((slow,), "struck-last"))
    assert (tmp_path / "struck-last" / "0").exists()
    trace = logged(log)
    assert {iteration for iteration, _ in trace} == set(expected)
    assert [(iteration, loss) for iteration, loss in trace if loss != expected[iteration]] == []
    assert last.parameters == whole.parameters


# ----------------------------------------------------------------------------------------------------- a few, by default


@pytest.mark.parametrize(
    "fault",
    [Fault("stop", 3, "forward", 2), pytest.param(Fault("stop", 0, "switch chunk", 2), marks=pytest.mark.long)],
    ids=lambda fault: f"rank {fault.rank} in {fault.point}",
)
def test_a_stopped_rank_is_named_and_the_backends_time_out_ends_the_job(tmp_path: Path, fault: Fault) -> None:
    # It is slow before, so that it has told where it is: it does so once a second.
    slow = dataclasses.replace(fault, kind="slow", seconds=1.5)
    broken = Broken.train(job(line(iterations=3), (slow, fault), tmp_path / "struck"))
    check(broken, fault)
    if fault.rank:
        (named,) = (each for each in broken.lines(1) if "watchdog" in each)
        assert re.search(r"watchdog: no progress for \d+ s, at step 2, .*rank 0 says: rank 3 is behind", named)
        assert re.search(
            r"rank 3 is behind: last seen at step 2, segment 1 \(tp1-cp1-pp1-dp4\), forward 1, and", named
        ), named


@pytest.mark.long
def test_a_slow_rank_changes_nothing_but_is_named(tmp_path: Path) -> None:
    """For longer than the watchdog waits; the job goes on as if nothing had been."""
    slow = Fault("slow", 1, "backward", 2, seconds=5.0)
    run = train(job(line(iterations=3), (slow,), tmp_path / "struck"))
    assert (tmp_path / "struck" / "0").exists()
    whole, _ = unbroken(3)
    assert run.iterations == whole.iterations and run.parameters == whole.parameters
    named = [each for each in run.output.splitlines() if each.startswith("hotspa: watchdog:")]
    assert len(named) == 1 and re.search(
        r"no progress for \d+ s: rank 1 is behind: at step 2, .*backward \d+, in tests/faults\.py:\d+ \(_strike\); its "
        "process beats",
        named[0],
    )
    assert "hotspa: watchdog:" not in whole.output


# ------------------------------------------------------------------------------------------------------- under torchrun


def torchrun(
    folder: Path, faults: Sequence[Fault], *argv: str, ranks: int = 2, interrupt: bool = False
) -> tuple[int, list[str], float]:
    """Exit code of torchrun, the lines of its standard error with all ranks' in it, and seconds from the first fault on."""
    script = folder / "faulty.py"
    script.write_text(
        textwrap.dedent(f"""
            import pathlib
            from tests.faults import Fault, plant
            plant({list(faults)!r}, pathlib.Path({str(folder)!r}), end=False)
            exec(compile(pathlib.Path({str(SCRIPT)!r}).read_text(), {str(SCRIPT)!r}, "exec"))
        """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["-m", "hotspa_megatron.launch", str(script), *argv]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    errors = folder / "errors"
    with errors.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True
        )
        try:
            struck = folder / "0"
            while process.poll() is None and not struck.exists():
                time.sleep(0.1)
            began = time.monotonic()
            if interrupt:
                os.killpg(process.pid, signal.SIGINT)
            code = process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return code, errors.read_text(errors="replace").splitlines(), time.monotonic() - began


@pytest.mark.parametrize("kind", ["raise", "kill"])
def test_torchrun_ends_all_ranks_and_its_last_words_are_the_first_failing_ranks(tmp_path: Path, kind: Kind) -> None:
    fault = Fault(kind, 1, "backward", 2)
    argv = (*line(iterations=3, home=Home(2, 1, 1, ())), *flag("strategies: [{max_length: 64, tp: 1}]"))
    code, errors, seconds = torchrun(tmp_path, (fault,), *argv)
    text = "\n".join(errors)
    assert code != 0 and seconds < END_S, text
    last = text[text.rindex("Root Cause (first observed failure)") :]
    assert re.search(r"rank +: 1 ", last), last
    assert (f"ArithmeticError: {fault.message}" if kind == "raise" else "Signal 9 (SIGKILL)") in last
    # The other one's loss of a peer covers nothing.
    assert "gloo/transport" not in "".join(each for each in errors if not each.startswith("hotspa:"))
    assert text.count("Traceback (most recent call last)") <= text.count(fault.message) + 1


@pytest.mark.long
def test_an_interrupt_is_one_line_of_every_rank(tmp_path: Path) -> None:
    slow = Fault("slow", None, "after the step", 1, seconds=4.0)
    argv = (*line(iterations=50, home=Home(2, 1, 1, ())), *flag("strategies: [{max_length: 64, tp: 1}]"))
    code, errors, seconds = torchrun(tmp_path, (slow,), *argv, interrupt=True)
    assert code != 0 and seconds < END_S
    ours = sorted(each for each in errors if each.startswith("hotspa:") and "interrupted" in each)
    assert ours == [
        "hotspa: interrupted at step 1, after the step",
        "hotspa: rank 1: interrupted at step 1, after the step",
    ]


# --------------------------------------------------------------------------------------------- signals and time limits

PAIR = Home(2, 1, 1, ())


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
        train(_pair(faults, tmp_path / "struck", *save, *limit))
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "1"
    resumed = pair("--load", str(tmp_path / "saved"))
    assert resumed.iterations == pair().iterations[1:] and resumed.parameters == pair().parameters


def test_an_interrupted_rank_says_where_it_was(tmp_path: Path) -> None:
    broken = Broken.train(_pair((Fault("interrupt", None, "optimizer", 2),), tmp_path / "struck"))
    for rank, prefix in enumerate(("hotspa: ", "hotspa: rank 1: ")):
        assert broken.code(rank) == 130 and broken.lines(rank)[-1] == f"{prefix}interrupted at step 2, optimizer"
        assert "Traceback" not in broken.ranks[rank]


# ------------------------------------------------------------------------------------------------------ saves and loads


@pytest.mark.skipif(os.geteuid() != 0, reason="a full disk is a small tmpfs, which only root can mount")
def test_a_full_disk_ends_all_ranks_with_one_line_and_the_checkpoint_before_stays_good(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", str(disk)], check=True)
    try:
        save = ("--save", str(disk), "--save-interval", "1")
        fault = Fault("fill", 0, "save", 3, disk=disk)
        broken = Broken.train(_pair((fault,), tmp_path / "struck", *save))
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
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.long
@pytest.mark.parametrize("what", ["cut", "gone"])
def test_a_shard_that_one_rank_cannot_read_is_one_line_and_ends_all(tmp_path: Path, what: str) -> None:
    pair("--save", str(tmp_path), "--save-interval", "2")
    shard = max((tmp_path / "iter_0000004").glob("__1_*.distcp"))
    if what == "cut":
        os.truncate(shard, shard.stat().st_size // 2)
    else:
        shard.unlink()
    broken = Broken.train(_pair((), tmp_path / "struck", "--load", str(tmp_path)))
    assert [broken.code(rank) for rank in range(2)] == [1, 1], broken.ranks
    assert "Traceback" not in broken.ranks[1]
    assert f"hotspa: rank 1: the checkpoint in {tmp_path} cannot be loaded: " in broken.lines(1)[-1]
    # The checkpoint before is as good as it was.
    resumed = pair("--load", str(tmp_path), "--ckpt-step", "2")
    assert resumed.iterations == pair().iterations[2:] and resumed.parameters == pair().parameters
