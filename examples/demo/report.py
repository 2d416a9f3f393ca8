"""Reads the step logs of the demo's two runs, compares them and writes report.json.

Pure but for two files read and one written. A step log holds one JSON object per line, one line per step.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

MAX_REL_LOSS_DIFF: Final = 1e-5
"""How far two losses of one step may be apart: fp32 sums in another order, amplified by the optimizer over the run."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One length group of one step, as it was run."""

    strategy: str
    kind: str
    sequences: int
    micro_batches: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step; bytes are sums over ranks, ``padding_fraction`` is padding over all positions computed."""

    iteration: int
    loss: float
    tokens: int
    padding_fraction: float
    step_s: float
    segments: tuple[Segment, ...]
    switch_bytes: int
    fold_bytes: int


def parse_step(line: str) -> Step:
    """One line of a step log."""
    entry: dict[str, Any] = json.loads(line)
    return Step(
        iteration=int(entry["iteration"]),
        loss=float(entry["loss"]),
        tokens=int(entry["tokens"]),
        padding_fraction=float(entry["padding_fraction"]),
        step_s=float(entry["step_s"]),
        segments=tuple(
            Segment(
                strategy=str(part["strategy"]),
                kind=str(part["kind"]),
                sequences=int(part["sequences"]),
                micro_batches=int(part["micro_batches"]),
                tokens=int(part["tokens"]),
            )
            for part in entry["segments"]
        ),
        switch_bytes=sum(int(switch["bytes"]) for switch in entry["switches"]),
        fold_bytes=sum(int(fold["bytes"]) for fold in entry["folds"]),
    )


def read_steps(path: Path) -> tuple[Step, ...]:
    """A whole step log; a last line that is still being written is left out."""
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return tuple(parse_step(line) for line in lines if line.endswith("\n"))


def relative_difference(value: float, reference: float) -> float:
    """How far a loss is from the reference; not a number, or a reference of zero, is infinitely far."""
    if not (math.isfinite(value) and math.isfinite(reference)) or reference == 0:
        return math.inf
    return abs(value - reference) / abs(reference)


def padding_fraction(steps: Sequence[Step]) -> float:
    """Padding over all positions computed, of several steps together."""
    positions = sum(step.tokens / (1 - step.padding_fraction) for step in steps)
    return 1 - sum(step.tokens for step in steps) / positions if positions else 0.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What report.json holds; ``max_rel_loss_diff`` is None where a loss is not finite, as JSON knows no infinity."""

    iterations: int
    passed: bool
    broken: str | None
    max_rel_loss_diff: float | None
    tolerance: float
    static_losses: tuple[float, ...]
    hotspa_losses: tuple[float, ...]
    static_step_s: float
    hotspa_step_s: float
    tokens: int
    padding_fraction: float
    static_padding_fraction: float
    switch_bytes: int
    fold_bytes: int
    segments: tuple[dict[str, Any], ...]


def compare(static: Sequence[Step], hotspa: Sequence[Step], *, broken: str | None = None) -> Comparison:
    """Compare two runs step by step.

    Raises RuntimeError where they are not runs of the same steps on the same data: then no loss can be compared.
    """
    if not static or [step.iteration for step in static] != [step.iteration for step in hotspa]:
        raise RuntimeError(f"the static run logged {len(static)} steps, the other {len(hotspa)}: not the same run")
    for one, other in zip(static, hotspa, strict=True):
        if one.tokens != other.tokens:
            raise RuntimeError(
                f"step {one.iteration} trained {one.tokens} tokens in the static run and {other.tokens} in the other"
            )
    worst = max(relative_difference(b.loss, a.loss) for a, b in zip(static, hotspa, strict=True))
    return Comparison(
        iterations=len(static),
        passed=worst <= MAX_REL_LOSS_DIFF,
        broken=broken,
        max_rel_loss_diff=worst if math.isfinite(worst) else None,
        tolerance=MAX_REL_LOSS_DIFF,
        static_losses=tuple(step.loss for step in static),
        hotspa_losses=tuple(step.loss for step in hotspa),
        static_step_s=statistics.median(step.step_s for step in static),
        hotspa_step_s=statistics.median(step.step_s for step in hotspa),
        tokens=sum(step.tokens for step in hotspa),
        padding_fraction=padding_fraction(hotspa),
        static_padding_fraction=padding_fraction(static),
        switch_bytes=sum(step.switch_bytes for step in hotspa),
        fold_bytes=sum(step.fold_bytes for step in hotspa),
        segments=tuple({"iteration": step.iteration, **asdict(part)} for step in hotspa for part in step.segments),
    )


def exit_code(comparison: Comparison) -> int:
    """0 where the losses agree, 1 where they do not."""
    return 0 if comparison.passed else 1


def write_report(comparison: Comparison, path: Path) -> None:
    """Write the comparison as JSON, whole or not at all."""
    unfinished = path.with_suffix(".new")
    # A loss that is not finite is written as null.
    entries = {
        key: [item if not isinstance(item, float) or math.isfinite(item) else None for item in value]
        if isinstance(value, tuple)
        else value
        for key, value in asdict(comparison).items()
    }
    unfinished.write_text(json.dumps(entries, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    unfinished.replace(path)


def mebibytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 2**20:.1f} MiB"


def step_line(step: Step, *, total: int, static: Step | None = None) -> str:
    """One line about a step, beside the static run's same step where there is one."""
    head = f"  step {step.iteration:>{len(str(total))}}/{total}"
    if static is None:
        return f"{head}  loss {step.loss:.6f}  {step.step_s:5.2f} s  {step.tokens:,} tokens"
    off = relative_difference(step.loss, static.loss)
    return (
        f"{head}  loss {step.loss:.6f} (static {static.loss:.6f}, off by {off:.1e})  "
        f"{step.step_s:5.2f} s (static {static.step_s:.2f} s)"
    )


def segment_lines(step: Step) -> list[str]:
    """One line per segment of a step."""
    return [
        f"    {part.strategy:<18} {part.kind:<8} {part.sequences:4} sequences, {part.tokens:7,} tokens, "
        f"{part.micro_batches} micro-batches"
        for part in step.segments
    ]


def summary_lines(comparison: Comparison) -> list[str]:
    """The end of the demo's output."""
    worst = "not finite" if comparison.max_rel_loss_diff is None else f"{comparison.max_rel_loss_diff:.1e}"
    verdict = "the same training" if comparison.passed else "NOT the same training"
    faster = comparison.static_step_s / comparison.hotspa_step_s if comparison.hotspa_step_s else math.inf
    losses = f"{verdict}; the losses differ by {worst} at most (allowed {comparison.tolerance:.0e})"
    times = f"static {comparison.static_step_s:.2f} s, with length groups {comparison.hotspa_step_s:.2f} s"
    gradients = mebibytes(comparison.fold_bytes)
    if not comparison.fold_bytes and any(part["kind"] == "guest" for part in comparison.segments):
        gradients = "none (after a guest's own reduction every rank held home's part)"
    moved = f"parameters {mebibytes(comparison.switch_bytes)}, gradients {gradients}"
    padding = f"{comparison.padding_fraction:.1%} of positions (static {comparison.static_padding_fraction:.1%})"
    return [
        f"{comparison.iterations} steps, {comparison.tokens:,} tokens: {losses}",
        f"median step: {times} ({faster:.2f}x); times on CPU say little about GPUs",
        f"moved, all ranks and steps: {moved}",
        f"padding: {padding}",
    ]
