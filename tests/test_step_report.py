"""What people see of a job under the flag: Megatron's line, writers and timers, and the folder that ``trace`` names."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import re
import statistics
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hotspa_megatron import run_folder
from hotspa_megatron.cli.main import main
from hotspa_megatron.hooks.step_report import Estimates, LineFile, StepFigures, StepLog
from hotspa_megatron.hooks.timeline import Passage, Timeline
from hotspa_megatron.planning.step_plan import StepPlan
from hotspa_megatron.planning.step_time import StepTime
from hotspa_megatron.strategy import Kind
from tests.spawn import run_ranks
from tests.test_launch import refused
from tests.training import SCRIPT, SHARDED, SP, Job, arguments, flag, import_megatron, train, train_on_this_rank

CONFIG = """
strategies:
  - {max_length: 32, tp: 1, tokens_per_microbatch: 96}
  - {max_length: 64, tp: 2, tokens_per_microbatch: 192}
trace: watched
"""
RANKS, STEPS, INTERVAL, TRACED = 2, 5, 2, 3


class Scalar(NamedTuple):
    """What a writer was given."""

    name: str
    value: float
    iteration: int


class Recorder:
    """Stands for a TensorBoard writer and for the wandb module."""

    def __init__(self) -> None:
        self.scalars: list[Scalar] = []
        self.logged: list[Scalar] = []
        self.config: dict[str, Any] = {}

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self.scalars.append(Scalar(name, float(value), iteration))

    def log(self, values: dict[str, Any], iteration: int) -> None:
        self.logged += [Scalar(name, float(value), iteration) for name, value in values.items()]

    def flush(self) -> None: ...

    close = finish = flush


class Seen(NamedTuple):
    """Of one rank: what it printed, what its writer got, and its steps as it would log them."""

    output: str
    writer: Recorder
    steps: list[run_folder.StepEntry]


def _watch(rank: int, world: int, job: Job, argv: list[str], folder: Path) -> Seen:
    from megatron.core import timers
    from megatron.training import training

    os.chdir(folder)  # where ``trace`` lies without --save
    writer = Recorder()
    timers.SummaryWriter, timers.wandb = Recorder, writer  # the tests need neither package
    if rank == world - 1:
        training.get_tensorboard_writer = training.get_wandb_writer = lambda: writer
    run_folder.TRACED_STEPS = TRACED  # type: ignore[misc]
    steps: list[run_folder.StepEntry] = []
    log = StepLog.write

    def note(self: StepLog, seen: Any) -> None:
        steps.append(run_folder._step(json.loads(json.dumps(seen.entry()))))
        log(self, seen)

    StepLog.write = note  # type: ignore[method-assign]
    return Seen(train_on_this_rank(rank, world, job, argv).output, writer, steps)


def _run(folder: Path, config: str | None, *more: str, ranks: int, **options: Any) -> list[Seen]:
    line = arguments(SHARDED, *more, "--log-interval", str(INTERVAL), iterations=STEPS, **options)
    job = Job(line, config, ranks=ranks)
    argv = [str(SCRIPT), *job.arguments, *flag(config)]
    return run_ranks(_watch, ranks, job, argv, folder, timeout=200, prepare=import_megatron, init_process_group=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def watched(folder: Path) -> list[Seen]:
    """One job, of which the tests here look at this and that."""
    return _run(folder, CONFIG, SP, "--timing-log-level", "1", "--log-timers-to-tensorboard", tp=2, ranks=RANKS)


@pytest.fixture(scope="module")
def steps(watched: list[Seen], folder: Path) -> list[run_folder.StepEntry]:
    return run_folder.read_steps(folder / "watched" / run_folder.STEPS)


def _lines(output: str) -> dict[int, str]:
    """Megatron's own lines by iteration."""
    return {int(found[1]): found[0] for found in re.finditer(r"^ \[.*\] iteration +(\d+)/.*$", output, re.M)}


def _values(line: str) -> dict[str, float]:
    """What follows ours in a line, without what marks a bound."""
    pairs = re.findall(r" ([^:|]+): [<>]?=?(\S+) \|", line.split("| hotspa")[1])
    return {name: float(value) for name, value in pairs}


# ---------------------------------------------------------------------------------------------------------------- steps


def test_the_log_has_every_step_as_it_ran(steps: list[run_folder.StepEntry], watched: list[Seen]) -> None:
    assert [step.iteration for step in steps] == list(range(1, STEPS + 1))
    assert steps == watched[0].steps  # which the tests below have of the last rank, too, whose line and writer it is
    for step in steps:
        assert [each.kind for each in step.segments] == ["guest", "sibling", "home"]
        assert sum(count for count, _ in step.lengths.values()) == sum(each.sequences for each in step.segments)
        assert sum(tokens for _, tokens in step.lengths.values()) == sum(each.tokens for each in step.segments)
        (switch,), (fold,) = step.switches, step.folds
        assert (switch.source, switch.destination) == (fold.destination, fold.source)
        assert switch.num_bytes > 0 and 0 < switch.waited <= switch.seconds
        # What was counted is a part of the step, and most of it.
        parts = [each.seconds for each in step.segments] + [move.waited for move in (switch, fold)]
        parts += [step.plan_s, step.reduce_s, step.wait_s, step.optimizer_s]
        assert min(parts) > 0 and sum(parts) <= step.step_s
        assert step.modelled_s is not None and step.static_modelled_s is not None
        assert 0 < step.static_modelled_s != step.modelled_s > 0
    # A guest of tp1 on two ranks has both halves everywhere: in fp32, each rank receives what it lacks.
    assert len({step.switches[0].num_bytes for step in steps}) == 1


def test_megatrons_line_ends_with_means_over_its_interval(watched: list[Seen]) -> None:
    lines, steps = _lines(watched[-1].output), watched[-1].steps
    assert list(lines) == [1, 2, 4]  # every second one, and the first
    assert watched[-1].output.count("| hotspa") == len(lines) and "| hotspa" not in watched[0].output
    # As Megatron does with the loss, the first line leaves its step to the second.
    for iteration, own in ((1, steps[:1]), (2, steps[:2]), (4, steps[2:4])):
        values = _values(lines[iteration])
        tokens = sum(tokens for step in own for _, tokens in step.lengths.values())
        assert values["segments"] == 3
        assert values["tokens"] == pytest.approx(tokens / len(own), abs=0.51)
        size = statistics.fmean(step.switches[0].num_bytes for step in own)
        assert values["switch (GB)"] == pytest.approx(size / 1e9, rel=0.01)
        assert values["switch (GB/s)"] == pytest.approx(values["switch (GB)"] / values["switch (ms)"] * 1e3, rel=0.02)
        computed = sum(step.tokens / (1 - step.padding_fraction) for step in own)
        assert values["padding (%)"] == pytest.approx(100 * (1 - tokens / computed), rel=0.01)
        static = sum(step.static_modelled_s or 0 for step in own)
        assert values["modelled static (ms)"] == pytest.approx(1e3 * static / len(own), rel=0.01)
        gain = static / sum(step.step_s for step in own)
        assert values["gain over modelled static"] == pytest.approx(gain, rel=0.01)
        for name, moves in (("switch", [each.switches for each in own]), ("fold", [each.folds for each in own])):
            under_way = sum(move.seconds for (move,) in moves)
            assert values[f"{name} (ms)"] == pytest.approx(1e3 * under_way / len(own), rel=0.01)
        moved = [move for step in own for move in (*step.switches, *step.folds)]
        hidden = sum(max(0.0, move.seconds - move.waited) for move in moved) / sum(move.seconds for move in moved)
        assert values["hidden (%)"] == pytest.approx(100 * hidden, rel=0.01, abs=1e-9)


def test_means_over_steps_are_of_all_of_them_and_the_gain_is_static_over_measured() -> None:
    one = StepFigures(
        steps=1, segments=2, tokens=900, computed=1000, seconds=4.0, switches=1, switch_bytes=3 * 10**9, switch_seconds=0.5,
        switch_bound=False, folds=0, fold_bytes=0, fold_seconds=0.0, fold_bound=False, hidden=0.125, modelled=5.0, static=8.0,
    )  # fmt: skip
    two = dataclasses.replace(one, seconds=2.0, switch_seconds=1.5, hidden=0.375, static=1.0)
    assert (one + two).scalars() == {
        "segments": 2, "tokens": 900, "padding (%)": pytest.approx(10), "switch (ms)": 1000, "switch (GB)": 3,
        "switch (GB/s)": 3, "hidden (%)": 25, "modelled (ms)": 5000, "modelled static (ms)": 4500,
        "gain over modelled static": 1.5,
    }  # fmt: skip


def test_tensorboard_itself_has_what_it_was_given(tmp_path: Path) -> None:
    """Not a recorder in its place; where the package is."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    where = ("--tensorboard-dir", str(tmp_path / "events"), "--tensorboard-log-interval", "1")
    config = CONFIG.replace("trace: watched\n", "")
    run = train(Job(arguments(SHARDED, *where, tp=2, iterations=STEPS), config, ranks=RANKS))
    found = events.EventAccumulator(str(tmp_path / "events")).Reload()
    for name, of in (("tokens", lambda step: step.tokens), ("segments", lambda step: len(step.segments))):
        scalars = found.Scalars(f"hotspa/{name}")
        assert [each.step for each in scalars] == list(range(1, STEPS + 1))
        assert [each.value for each in scalars] == [of(step) for step in run.steps]


def test_writers_get_every_steps_figures(watched: list[Seen]) -> None:
    assert not watched[0].writer.scalars
    writer, steps = watched[-1].writer, watched[-1].steps
    by_name: dict[str, dict[int, float]] = {}
    for each in writer.scalars:
        if each.name.startswith("hotspa/"):
            by_name.setdefault(each.name, {})[each.iteration] = each.value
    assert set(by_name) == {f"hotspa/{name}" for name in (
        "segments", "tokens", "padding-percent", "switch-ms", "switch-GB", "switch-GB-per-s", "fold-ms", "fold-GB",
        "hidden-percent", "modelled-ms", "modelled-static-ms", "gain-over-modelled-static")}  # fmt: skip
    for step in steps:
        assert by_name["hotspa/switch-GB"][step.iteration] == step.switches[0].num_bytes / 1e9
        assert by_name["hotspa/padding-percent"][step.iteration] == pytest.approx(100 * step.padding_fraction)
        assert step.static_modelled_s is not None
        gain = step.static_modelled_s / step.step_s
        assert by_name["hotspa/gain-over-modelled-static"][step.iteration] == pytest.approx(gain)
        assert by_name["hotspa/switch-ms"][step.iteration] == pytest.approx(1e3 * step.switches[0].seconds)
    assert {each for each in writer.logged if each.name.startswith("hotspa/")} == {
        each for each in writer.scalars if each.name.startswith("hotspa/")
    }


def test_timers_show_ours_beside_megatrons(watched: list[Seen]) -> None:
    output, writer = watched[-1].output, watched[-1].writer
    for name in ("hotspa-plan", "hotspa-switch", "hotspa-fold", *(f"hotspa-{kind}-segments" for kind in Kind)):
        assert len(re.findall(rf"^ +{name} \.+: \(\d+\.\d+, \d+\.\d+\)$", output, re.M)) == 3
        assert [each.iteration for each in writer.scalars if each.name == f"{name}-time"][::2] == [1, 2, 4]
    shown = [float(value) for value in re.findall(r"hotspa-home-segments \.+: \(\d+\.\d+, (\d+\.\d+)\)", output)]
    whole = [float(value) for value in re.findall(r"forward-backward \.+: \(\d+\.\d+, (\d+\.\d+)\)", output)]
    assert len(shown) == len(whole) == 3 and all(part < all_of_it for part, all_of_it in zip(shown, whole, strict=True))


def test_without_the_flag_nothing_is_added(tmp_path: Path) -> None:
    (seen,) = _run(tmp_path, None, "--timing-log-level", "1", "--log-timers-to-tensorboard", ranks=1)
    assert list(_lines(seen.output)) == [1, 2, 4]
    assert not re.search(r"hotspa-(plan|switch|fold|\w+-segments)|\| hotspa", seen.output)
    assert seen.writer.scalars and not any("hotspa" in each.name for each in seen.writer.scalars + seen.writer.logged)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------- timeline


def problems(events: Sequence[dict[str, Any]]) -> list[str]:
    """What a viewer of the trace event format would stumble over: fields, pairs, and slices of a thread that cross."""
    found = []
    open_moves: dict[tuple[Any, ...], float] = {}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named = {each["pid"] for each in events if each.get("name") == "process_name"}
    for each in events:
        kind = each.get("ph")
        whole = all(isinstance(each.get(key), int) for key in ("pid", "tid")) and isinstance(each.get("name"), str)
        if not whole or kind not in ("M", "X", "b", "e"):
            found.append(f"not an event: {each}")
            continue
        if kind == "M":
            continue
        if each["pid"] not in named or not isinstance(each.get("ts"), float) or each["ts"] < 0:
            found.append(f"no place: {each}")
            continue
        if kind == "X":
            if not isinstance(each.get("dur"), float) or each["dur"] < 0:
                found.append(f"no duration: {each}")
                continue
            slices.setdefault((each["pid"], each["tid"]), []).append((each["ts"], each["ts"] + each["dur"]))
            continue
        key = (each["cat"], each["id"], each["pid"], each["name"])
        if kind == "b":
            open_moves[key] = each["ts"]
        elif open_moves.pop(key, math.inf) > each["ts"]:
            found.append(f"ends before it begins: {each}")
    found += [f"never ends: {key}" for key in open_moves]
    for thread, own in slices.items():
        inside: list[float] = []
        for start, end in sorted(own, key=lambda piece: (piece[0], -piece[1])):
            while inside and inside[-1] <= start:
                inside.pop()
            if inside and end > inside[-1] + 0.2:  # in tenths of microseconds
                found.append(f"slices of {thread} cross at {start}")
            inside.append(end)
    return found


@pytest.fixture(scope="module")
def events(watched: list[Seen], folder: Path) -> list[dict[str, Any]]:
    document = json.loads((folder / "watched" / run_folder.TIMELINE).read_text())
    return list(document["traceEvents"])


def test_the_timeline_is_what_viewers_expect(events: list[dict[str, Any]]) -> None:
    assert problems(events) == []
    # The check sees what would not be drawn, or drawn wrong.
    slices = [index for index, each in enumerate(events) if each["ph"] == "X" and each["cat"] == "segment"]
    last_move = max(index for index, each in enumerate(events) if each["ph"] == "e")
    longer = {**events[slices[0]], "dur": 1e9}
    for index, wrong in ((slices[0], {"ph": "X"}), (slices[0], longer), (last_move, None), (0, None)):
        broken = [wrong if place == index else each for place, each in enumerate(events)]
        assert problems([each for each in broken if each is not None]) != []


def test_every_ranks_segments_switches_folds_and_waits_are_on_it(events: list[dict[str, Any]]) -> None:
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert {process: name.split(" (")[0] for process, name in names.items()} == {1: "rank 0", 2: "rank 1"}
    for process in names:
        own = [each for each in events if each["pid"] == process and each["ph"] in "Xb"]
        counts = {kind: sum(each["cat"] == kind for each in own if each["ph"] == "X") for kind in ("step", "segment")}
        assert counts == {"step": TRACED, "segment": 3 * TRACED}  # and not of the steps after those
        assert {each["cat"] for each in own} == {
            "step", "plan", "segment", "switch", "fold", "reduce", "wait", "optimizer"
        }  # fmt: skip
        moves = [each["name"] for each in own if each["ph"] == "b"]
        assert moves == TRACED * [
            "switch tp2-cp1-pp1-dp1 -> tp1-cp1-pp1-dp2",
            "fold tp1-cp1-pp1-dp2 -> tp2-cp1-pp1-dp1",
        ]


def test_ranks_have_one_clock(events: list[dict[str, Any]]) -> None:
    """A step of one rank overlaps the same step of the other, in which both exchange, and no other one."""
    for number in range(1, TRACED + 1):
        own = [each for each in events if each["name"] == f"step {number}"]
        assert len(own) == RANKS
        assert max(each["ts"] for each in own) < min(each["ts"] + each["dur"] for each in own)


def test_the_runs_folder_is_all_that_the_report_needs(
    watched: list[Seen], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folder)]) == 0
    assert "report.html: 5 steps" in capsys.readouterr().out
    text = (folder / "watched" / "report.html").read_text()
    assert "tp1-cp1-pp1-dp2 (guest)" in text and run_folder.TIMELINE in text


# ------------------------------------------------------------------------------------------------------ what was hidden


class _Event:
    """A device's event on a clock that the test turns, as torch.cuda.Event is one."""

    now = 0.0

    def __init__(self, **_: Any) -> None:
        self.at = math.nan

    def record(self) -> None:
        self.at = _Event.now

    def synchronize(self) -> None:
        assert not math.isnan(self.at)

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.at - self.at)


def _moved(*, size: int, segment: float, late: float, arrives: float | None) -> Passage:
    """A move whose beginning takes 1 s of the step, which then runs a segment and waits ``late`` for the rest."""
    timeline = Timeline()
    voyage = timeline.moving("switch", "a", "b", size=size, messages=2)
    with voyage.waiting():
        _Event.now += 1.0
    if arrives is not None:
        voyage.arrival = _Event()
        voyage.arrival.at = _Event.now + arrives
    with timeline.span("segment", "a", position=0):
        _Event.now += segment
    with voyage.waiting():
        _Event.now += late
    voyage.land()
    (passage,) = timeline.passages()
    spans = {(each.kind, each.seconds) for each in timeline.spans()}
    assert spans == {("switch", 1.0), ("segment", segment), ("switch", late)}
    return passage


def test_what_a_move_took_and_what_of_it_was_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(_Event, "now", 100.0)
    # A device says when values arrived: here 2 s into a segment of 8 s.
    known = _moved(size=10, segment=8.0, late=0.0, arrives=2.0)
    assert (known.seconds, known.waited, known.hidden, known.bound) == (3.0, 1.0, 2.0, False)
    late = _moved(size=10, segment=8.0, late=4.0, arrives=12.0)
    assert (late.seconds, late.waited, late.hidden, late.bound) == (13.0, 5.0, 8.0, False)
    # Gloo does not: the same move may have taken the whole segment.
    unknown = _moved(size=10, segment=8.0, late=0.0, arrives=None)
    assert (unknown.seconds, unknown.waited, unknown.hidden, unknown.bound) == (9.0, 1.0, 8.0, True)
    # Waited for from its beginning on, there is nothing to guess; and what no rank sends is not under way.
    whole = _moved(size=10, segment=0.0, late=4.0, arrives=None)
    assert (whole.seconds, whole.waited, whole.hidden, whole.bound) == (5.0, 5.0, 0.0, False)
    local = _moved(size=0, segment=8.0, late=0.5, arrives=None)
    assert (local.seconds, local.waited, local.hidden, local.bound) == (1.5, 1.5, 0.0, False)


# --------------------------------------------------------------------------------------------------------- what can fail


def test_a_folder_behind_a_link_ends_the_job_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "out").symlink_to(tmp_path)
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "10")
    line = [str(SCRIPT), *arguments(*save), *flag("strategies: []\ntrace: out/a\n")]
    assert "trace: " in (said := refused(line, tmp_path)) and "a link out of" in said
    assert not (tmp_path / "a").exists()


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    file = LineFile(Path("/dev/full"), said.append)
    for _ in range(3):
        file.write("x\n")
    assert said == ["/dev/full: No space left on device; nothing more is written there"]
    (tmp_path / "file").write_text("")
    LineFile(tmp_path / "file" / "a", said.append).write("x")
    assert len(said) == 2 and "nothing more is written" in said[1]

    # Over a network it may be the end of a file at which that is found.
    class Late:
        def close(self) -> None:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")

    file = LineFile(tmp_path / "b", said.append)
    file._file.close()
    file._file = Late()
    file.close()
    file.close()
    assert said[2:] == [f"{tmp_path / 'b'}: Disk quota exceeded; nothing more is written there"]


def test_a_model_that_fails_ends_the_estimates_and_nothing_else() -> None:
    def make() -> Any:
        raise KeyError("no such layout")

    said: list[str] = []
    estimates, plan = Estimates(make, said.append), StepPlan(lengths=(), segments=())
    for _ in range(3):
        estimates.begin(plan)
        assert estimates.take() is None
    estimates.close()
    assert said == ["steps are not estimated any more: KeyError: 'no such layout'"]


def test_an_estimate_that_takes_long_is_not_waited_for() -> None:
    asked: list[StepPlan] = []
    may_end = threading.Event()

    class Slow:
        def times(self, plan: StepPlan) -> tuple[StepTime, StepTime]:
            asked.append(plan)
            assert may_end.wait(60)
            time = StepTime(total=float(len(plan.lengths)), switch=0.0, fold=0.0, reduce=0.0, optimizer=0.0)
            return time, time

    estimates = Estimates(Slow, print, patience=0.0)  # type: ignore[arg-type]
    first, second, third = (StepPlan(lengths=(1,) * count, segments=()) for count in (1, 2, 3))
    estimates.begin(first)
    assert estimates.take() is None
    # Steps that follow meanwhile have none either, and do not queue up.
    estimates.begin(second)
    assert estimates.take() is None
    may_end.set()
    estimates.close()
    assert asked == [first]
    patient = Estimates(Slow, print, patience=60.0)  # type: ignore[arg-type]
    patient.begin(third)
    assert patient.take() == (3.0, 3.0) and patient.take() is None
    patient.close()


def test_a_model_that_never_ends_holds_no_rank_up() -> None:
    """One that fails leaves its cause for the others next, and its process ends."""
    code = """
import threading
from hotspa_megatron.hooks.step_report import Estimates
from hotspa_megatron.planning.step_plan import StepPlan

estimates = Estimates(threading.Event().wait, print)
estimates.begin(StepPlan(lengths=(), segments=()))
estimates.close()
print("closed", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "closed\n"


def test_timelines_that_cannot_be_put_together_cost_no_checkpoint(tmp_path: Path) -> None:
    """The last one is saved after the training loop, which ends the trace."""
    saved = tmp_path / "saved"
    (saved / "watched" / f"{run_folder.TIMELINE}.new").mkdir(parents=True)
    save = ("--save", str(saved), "--save-interval", "10")
    run = train(Job(arguments(*save, iterations=1), "strategies: []\ntrace: watched\n", ranks=1))
    assert len(run.losses) == 1
    assert re.search(r"^hotspa: \S+\.json\.new: Is a directory; hotspa report can put", run.output, re.MULTILINE)
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "1"
