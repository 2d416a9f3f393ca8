"""What people see of every step: Megatron's log line, timers, TensorBoard and W&B writers, and our own step log.

Everything is this rank's own (Megatron's line and writers are the last rank's, the step log rank 0's; timers show the
least and the most over ranks), so nothing here needs another rank. Nothing here changes how a step runs.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from hotspa_megatron.hooks.data import Step, padding_fraction
from hotspa_megatron.hooks.forward_backward import StepRecord
from hotspa_megatron.hooks.timeline import Passage, Span, SpanKind
from hotspa_megatron.planning.step_plan import StepPlan, StepPlanner
from hotspa_megatron.planning.step_time import StepEstimator
from hotspa_megatron.strategy import Kind

_TIMERS: Final = ("hotspa-plan", "hotspa-switch", "hotspa-fold", *(f"hotspa-{kind}-segments" for kind in Kind))
_LEVEL: Final = 1
"""Of our timers: shown from --timing-log-level 1 on, as Megatron's forward-backward is."""
_PATIENCE_S: Final = 5.0
_JOIN_S: Final = 1.0
_KNOWN: Final = "forward-backward"
"""A timer that Megatron shows at that level."""


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """A step in numbers, or the sum over several; seconds, bytes over all ranks.

    ``tokens``: input positions; ``computed``: those with padding. ``switch_bound``, ``fold_bound``: the seconds under way
    are the most that it can have been. ``modelled``, ``static``: the cost model's time of the step as planned and under
    home alone; NaN where there is none.
    """

    steps: int
    segments: int
    tokens: int
    computed: float
    seconds: float
    switches: int
    switch_bytes: int
    switch_seconds: float
    switch_bound: bool
    folds: int
    fold_bytes: int
    fold_seconds: float
    fold_bound: bool
    hidden: float
    modelled: float
    static: float

    def __add__(self, other: StepFigures) -> StepFigures:
        pairs = {name: (value, getattr(other, name)) for name, value in vars(self).items()}
        return StepFigures(**{
            name: one or two if isinstance(one, bool) else one + two for name, (one, two) in pairs.items()
        })  # fmt: skip

    def scalars(self) -> dict[str, float]:
        """By the name that a writer shows, means over the steps; what did not happen or is not known is left out."""
        moving = self.switch_seconds + self.fold_seconds
        found = {
            "segments": self.segments / self.steps,
            "tokens": self.tokens / self.steps,
            "padding (%)": 100 * (1 - self.tokens / self.computed) if self.computed else 0.0,
        }
        for name, count, size, seconds in (
            ("switch", self.switches, self.switch_bytes, self.switch_seconds),
            ("fold", self.folds, self.fold_bytes, self.fold_seconds),
        ):
            if count:
                found[f"{name} (ms)"] = 1e3 * seconds / self.steps
                found[f"{name} (GB)"] = size / 1e9 / self.steps
                if size and seconds:
                    found[f"{name} (GB/s)"] = size / 1e9 / seconds
        if moving:
            found["hidden (%)"] = 100 * self.hidden / moving
        if not math.isnan(self.static):
            found["modelled (ms)"] = 1e3 * self.modelled / self.steps
            found["modelled static (ms)"] = 1e3 * self.static / self.steps
            found["gain over modelled static"] = self.static / self.seconds
        return found

    def text(self) -> str:
        """The end of a log line, as Megatron writes it."""
        bounds = {"switch (ms)": self.switch_bound, "fold (ms)": self.fold_bound,
                  "hidden (%)": self.switch_bound or self.fold_bound}  # fmt: skip
        bounds |= {"switch (GB/s)": self.switch_bound, "fold (GB/s)": self.fold_bound}
        parts = []
        for name, value in self.scalars().items():
            shown = f"{value:.0f}" if name == "tokens" else f"{value:.1f}" if value >= 100 else f"{value:.3g}"
            bound = (">=" if name.endswith("(GB/s)") else "<=") if bounds.get(name) else ""
            parts.append(f" {name}: {bound}{shown} |")
        return f" hotspa{''.join(parts)}"


@dataclass(frozen=True, kw_only=True)
class StepSeen:
    """A finished step as this rank saw it; ``seconds`` of the whole train_step, ``spans`` from its forward-backward on."""

    iteration: int
    step: Step
    record: StepRecord
    padding: float
    seconds: float
    began: float
    spans: tuple[Span, ...]
    passages: tuple[Passage, ...]
    estimate: tuple[float, float] | None
    """Modelled seconds: as planned, static."""

    def spent(self, *kinds: SpanKind) -> float:
        return sum(span.seconds for span in self.spans if span.kind in kinds)

    def segment_seconds(self) -> dict[int, float]:
        """By the segment's position in the step."""
        return {span.details["position"]: span.seconds for span in self.spans if span.kind == "segment"}

    def figures(self) -> StepFigures:
        tokens = sum(self.step.plan.lengths)
        moves = {kind: [each for each in self.passages if each.kind == kind] for kind in ("switch", "fold")}
        modelled, static = self.estimate or (math.nan, math.nan)
        return StepFigures(
            steps=1,
            segments=len(self.step.plan.segments),
            tokens=tokens,
            computed=tokens / (1 - self.padding),
            seconds=self.seconds,
            switches=len(moves["switch"]),
            switch_bytes=sum(each.num_bytes for each in moves["switch"]),
            switch_seconds=sum(each.seconds for each in moves["switch"]),
            switch_bound=any(each.bound for each in moves["switch"]),
            folds=len(moves["fold"]),
            fold_bytes=sum(each.num_bytes for each in moves["fold"]),
            fold_seconds=sum(each.seconds for each in moves["fold"]),
            fold_bound=any(each.bound for each in moves["fold"]),
            hidden=sum(each.hidden for each in self.passages),
            modelled=modelled,
            static=static,
        )

    def entry(self) -> dict[str, Any]:
        """The step's line in the step log; ``run_folder.StepEntry`` says what it holds."""
        total, tokens = next(iter(self.record.losses.values()), (0.0, 0.0))
        seconds = self.segment_seconds()
        modelled, static = self.estimate or (None, None)
        return {
            "iteration": self.iteration,
            "loss": total / max(tokens, 1.0),
            "tokens": int(tokens),
            "padding_fraction": self.padding,
            "step_s": self.seconds,
            "plan_s": self.record.plan_seconds,
            "segments": [
                {**each, "seconds": seconds.get(position, 0.0)} for position, each in enumerate(self.record.segments)
            ],
            "switches": [_moved(each) for each in self.passages if each.kind == "switch"],
            "folds": [_moved(each) for each in self.passages if each.kind == "fold"],
            "reduce_s": self.spent("reduce"),
            "wait_s": self.spent("wait"),
            "optimizer_s": self.spent("optimizer"),
            "lengths": _lengths(self.step.plan.lengths),
            "modelled_s": modelled,
            "static_modelled_s": static,
        }


def _moved(each: Passage) -> dict[str, Any]:
    return {"from": each.source, "to": each.destination, "bytes": each.num_bytes, "messages": each.messages,
            "seconds": each.waited, "under_way_s": each.seconds, "bound": each.bound}  # fmt: skip


def _lengths(lengths: Sequence[int]) -> dict[str, tuple[int, int]]:
    """Sequences and tokens by the power of two that their length does not exceed."""
    found: dict[int, tuple[int, int]] = {}
    for length in lengths:
        upper = 1 << (length - 1).bit_length()
        count, tokens = found.get(upper, (0, 0))
        found[upper] = (count + 1, tokens + length)
    return {str(upper): found[upper] for upper in sorted(found)}


class Estimates:
    """Modelled times of steps, made in a thread while the steps run. Gives up, saying so once, where the model fails.

    A step whose estimate is not there ``patience`` seconds after its end has none: moves of large models, which the first
    estimate plans, must not hold up a training.
    """

    def __init__(
        self, make: Callable[[], StepEstimator], say: Callable[[str], None], *, patience: float = _PATIENCE_S
    ) -> None:
        self._make, self._say, self._patience = make, say, patience
        self._estimator: StepEstimator | None = None
        self._plans: SimpleQueue[tuple[StepPlan, Future[tuple[float, float]]] | None] = SimpleQueue()
        # Not an executor's: those are waited for when a process ends, and a rank that fails must not be held up.
        self._worker = threading.Thread(target=self._work, name="hotspa-estimates", daemon=True)
        self._worker.start()
        self._under_way: Future[tuple[float, float]] | None = None
        self._asked = self._failed = False

    def begin(self, plan: StepPlan) -> None:
        """Estimate the step that is about to run."""
        late = self._under_way is not None and not self._under_way.done()
        self._asked = not (self._failed or late)
        if self._asked:
            self._under_way = Future()
            self._plans.put((plan, self._under_way))

    def take(self) -> tuple[float, float] | None:
        """Seconds as planned and static of the step that ``begin`` was last called for."""
        if not self._asked or self._under_way is None:
            return None
        self._asked = False
        try:
            return self._under_way.result(self._patience)
        except TimeoutError:
            return None
        except Exception as error:  # a model that does not fit must not end a training that does
            self._failed = True
            self._say(f"steps are not estimated any more: {type(error).__name__}: {error}")
            return None

    def close(self) -> None:
        """End the thread; one that is at work is left alone after a moment."""
        self._plans.put(None)
        self._worker.join(_JOIN_S)

    def _work(self) -> None:
        while (asked := self._plans.get()) is not None:
            plan, answer = asked
            try:
                answer.set_result(self._estimate(plan))
            except Exception as error:  # told by ``take``
                answer.set_exception(error)

    def _estimate(self, plan: StepPlan) -> tuple[float, float]:
        if self._estimator is None:
            self._estimator = self._make()
        planned, static = self._estimator.times(plan)
        return planned.total, static.total


class LineFile:
    """A file that lines are added to. Where that fails it says so once and stops: a full disk must not end a training."""

    def __init__(self, path: Path, say: Callable[[str], None], *, anew: bool = False) -> None:
        self._path, self._say = path, say
        self._file: Any = None
        self._open("w" if anew else "a")

    def write(self, text: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # what is left cannot be written either
                self._file.close()
            self._file = None
            self._complain(error)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()  # where a file system over a network may say for the first time that there was no room
            except OSError as error:
                self._complain(error)

    def _open(self, mode: str) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open(mode, encoding="utf-8")
        except OSError as error:
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        self._say(f"{self._path}: {error.strerror}; nothing more is written there")


class StepLog:
    """One JSON object per step, in files that rank 0 has open."""

    def __init__(self, files: Sequence[LineFile]) -> None:
        self._files = files

    def write(self, seen: StepSeen) -> None:
        if self._files:
            line = json.dumps(seen.entry()) + "\n"
            for file in self._files:
                file.write(line)


class StepReport:
    """What a job's steps are told through. One per job, fed by the training loop's hooks on every rank."""

    def __init__(
        self,
        *,
        args: Any,
        planner: StepPlanner,
        estimates: Estimates | None,
        log: StepLog,
        trace: Callable[[StepSeen], None] | None,
        say: Callable[[str], None],
    ) -> None:
        """``estimates`` only on ranks whose figures anybody sees; ``trace`` takes steps as long as they are traced; ``say``
        writes a line of the job's log."""
        self._args, self._planner, self._estimates, self._log, self._trace = args, planner, estimates, log, trace
        self._say: Callable[[str], None] | None = say
        """None once the one thing that it is for has been said."""
        self._last: StepFigures | None = None
        self._interval: StepFigures | None = None
        self._line: str | None = None
        """What Megatron's next line ends with; None outside its training_log."""

    def begin(self, plan: StepPlan) -> None:
        """A step with this plan is about to run."""
        if self._estimates is not None:
            self._estimates.begin(plan)

    def end(self, iteration: int, step: Step, record: StepRecord, seconds: float) -> None:
        """A step has run; ``seconds`` of the whole train_step."""
        seen = StepSeen(
            iteration=iteration,
            step=step,
            record=record,
            padding=padding_fraction(step, self._planner),
            seconds=seconds,
            began=record.timeline.began,
            spans=tuple(record.timeline.spans()),
            passages=tuple(record.timeline.passages()),
            estimate=None if self._estimates is None else self._estimates.take(),
        )
        self._last = seen.figures()
        self._interval = self._last if self._interval is None else self._interval + self._last
        self._advance_timers(seen)
        self._log.write(seen)
        if self._trace is not None:
            self._trace(seen)
        if self._say is not None and not any(tokens for _, tokens in record.losses.values()):
            self._say(
                f"iteration {iteration}: no token of this step counts towards the loss, so loss and gradient are 0; "
                "further such steps are not told"
            )
            self._say = None

    def during_log(self, iteration: int, *, first: bool, log: Callable[[], Any]) -> Any:
        """Run Megatron's ``training_log``, with our part in its line and in its writers; ``first`` resets nothing."""
        self._line = "" if self._interval is None else self._interval.text()
        try:
            result = log()
        finally:
            self._line = None
        if iteration % self._args.log_interval == 0 and not first:
            self._interval = None
        self._write_scalars(iteration)
        return result

    def complete(self, message: str) -> str:
        """A line that Megatron prints: ours follows where it is the one about iterations."""
        if self._line and " iteration " in message and message.endswith("|"):
            message, self._line = message + self._line, ""
        return message

    def more_timers(self, names: Sequence[str]) -> list[str]:
        """The timers that Megatron shows, with ours where it shows those of our level."""
        shown = list(names)
        return [*shown, *_TIMERS] if self._line is not None and _KNOWN in shown else shown

    def close(self) -> None:
        """Training has ended."""
        if self._estimates is not None:
            self._estimates.close()

    def _advance_timers(self, seen: StepSeen) -> None:
        if self._args.timing_log_level < _LEVEL:
            return
        from megatron.training import get_timers

        spent = dict.fromkeys(_TIMERS, 0.0)
        spent["hotspa-plan"] = seen.record.plan_seconds
        spent["hotspa-switch"], spent["hotspa-fold"] = seen.spent("switch"), seen.spent("fold")
        for position, seconds in seen.segment_seconds().items():
            spent[f"hotspa-{seen.step.plan.segments[position].kind}-segments"] += seconds
        for name, seconds in spent.items():
            timer = get_timers()(name, log_level=_LEVEL)
            # What a step took is known: starting and stopping a timer would make the host wait for the device.
            timer.set_elapsed(timer.elapsed(reset=False) + seconds)

    def _write_scalars(self, iteration: int) -> None:
        from megatron.training import training

        writer, wandb = training.get_tensorboard_writer(), training.get_wandb_writer()
        if self._last is None or not writer or iteration % self._args.tensorboard_log_interval:
            return
        scalars = {f"hotspa/{_tag(name)}": value for name, value in self._last.scalars().items()}
        for name, value in scalars.items():
            writer.add_scalar(name, value, iteration)
        if wandb:
            wandb.log(scalars, iteration)


def _tag(name: str) -> str:
    """A name as TensorBoard takes it."""
    return re.sub(r"[ ()]+", "-", name.replace("%", "percent").replace("/s", "-per-s")).rstrip("-")
