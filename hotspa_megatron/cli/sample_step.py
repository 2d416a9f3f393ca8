"""What one step of a corpus would look like under a configuration, for ``hotspa explain``: planned as a job plans it.

Lengths are drawn from the corpus, so the step is one like those of the job, not one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from hotspa_megatron.cli import charts, tables
from hotspa_megatron.cli.timeline import SpanShown, print_timeline, rows_of, symbol_of
from hotspa_megatron.config import ResolvedConfig
from hotspa_megatron.planning.cost_model import CostModel
from hotspa_megatron.planning.lengths import LengthHistogram
from hotspa_megatron.planning.step_plan import StepPlan, StepPlanner
from hotspa_megatron.planning.step_time import Activity, GroupChoice, RunModel, Span, step_costs


@dataclass(frozen=True, kw_only=True)
class SegmentShown:
    """A segment. ``shortest`` to ``longest``: lengths of its sequences. ``micro_batches``: of each replica.

    ``computed_tokens`` include padding; ``imbalance``: (busiest replica - mean) / busiest, by modelled time; ``seconds``: the
    busiest replica's, modelled.
    """

    strategy: str
    kind: str
    shortest: int
    longest: int
    sequences: int
    tokens: int
    computed_tokens: int
    micro_batches: tuple[int, ...]
    imbalance: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepShown:
    """A step. ``hardware``: whose times decided; ``padding``: share of computed tokens; ``seconds``: all of the step.

    ``timeline``: what the ranks do, and when, as modelled.
    """

    hardware: str
    sequences: int
    tokens: int
    padding: float
    segments: tuple[SegmentShown, ...]
    seconds: float
    world_size: int
    timeline: tuple[SpanShown, ...]


def sample_step(
    resolved: ResolvedConfig,
    histogram: LengthHistogram,
    model: CostModel,
    groups: Sequence[GroupChoice],
    *,
    sequences: int,
    seed: int,
) -> StepShown:
    """Plan a step of so many documents (the pieces of one that is split count as it); ``ValueError`` where none fits.

    ``model``, ``groups``: of the configuration, as ``step_time.resolved_model`` makes them.
    """
    config, limit = resolved.config, resolved.shape.seq_length
    if config.samples == "megatron":
        raise ValueError(
            "--lengths: with samples: megatron a step holds Megatron's own samples, which only a job draws; remove --lengths, or "
            "the key for a look at documents"
        )
    drawn = LengthHistogram.of(histogram.sample(sequences, seed=seed))
    if config.overlong == "error":
        if drawn.longest > limit:
            raise ValueError(
                f"--lengths: a document has {drawn.longest} input positions, more than --seq-length {limit}, which "
                "overlong: error does not allow"
            )
    else:
        drawn = drawn.limited(limit, config.overlong)
    lengths = [
        length
        for length, count in zip(drawn.lengths.tolist(), drawn.counts.tolist(), strict=True)
        for _ in range(count)
    ]
    costs = step_costs(model, [choice.execution for choice in groups])
    planner = StepPlanner.from_resolved(resolved, costs, merge=config.merge == "auto")
    plan = planner.plan(lengths)
    timeline = RunModel(model, groups, planner).timeline(plan)
    segments = []
    for number, segment in enumerate(plan.segments):
        own = [lengths[index] for batches in segment.micro_batches for batch in batches for index in batch]
        busy = [0.0] * segment.strategy.dp
        for span in timeline.spans:
            if span.activity is Activity.COMPUTE and span.segment == number and span.replica is not None:
                busy[span.replica] = span.end - span.start
        segments.append(
            SegmentShown(
                strategy=str(segment.strategy),
                kind=segment.kind,
                shortest=min(own),
                longest=max(own),
                sequences=len(own),
                tokens=sum(own),
                computed_tokens=planner.computed_tokens(segment, plan.lengths),
                micro_batches=tuple(len(batches) for batches in segment.micro_batches),
                imbalance=max(0.0, 1 - sum(busy) / len(busy) / max(busy)),  # a mean may round up past the busiest
                seconds=max(busy),
            )
        )
    return StepShown(
        hardware=model.hardware.name,
        sequences=len(lengths),
        tokens=sum(lengths),
        padding=1 - sum(lengths) / sum(each.computed_tokens for each in segments),
        segments=tuple(segments),
        seconds=timeline.time.total,
        world_size=model.world_size,
        timeline=tuple(
            sorted(
                (each for span in timeline.spans for each in _shown(span, plan, model.world_size)),
                key=lambda each: each.start,
            )
        ),
    )


def _shown(span: Span, plan: StepPlan, world_size: int) -> Iterator[SpanShown]:
    ranks = np.arange(world_size).reshape(1, world_size)
    if span.segment is not None and span.replica is not None:
        strategy = plan.segments[span.segment].strategy
        # Ranks lie as tp, cp, dp, pp from the fastest axis.
        ranks = ranks.reshape(strategy.pp, strategy.dp, strategy.cp * strategy.tp)[:, span.replica]
    for stage, own in enumerate(ranks.tolist()):
        for start, end in span.of_stage(stage, len(ranks)):
            yield SpanShown(activity=span.activity, segment=span.segment, ranks=tuple(own), start=start, end=end)


def print_step(console: Console, step: StepShown, *, source: str) -> None:
    shown = tables.table(
        *("", "strategy", "kind", "lengths", "sequences", "tokens", "micro-batches", "padding", "imbalance", "ms"),
        left=("strategy", "kind", "lengths"),
    )
    for number, each in enumerate(step.segments):
        tables.row(
            shown,
            symbol_of(number),
            each.strategy,
            each.kind,
            f"{each.shortest:,}-{each.longest:,}",
            f"{each.sequences:,}",
            f"{each.tokens:,}",
            _counts(each.micro_batches),
            f"{1 - each.tokens / each.computed_tokens:.1%}",
            f"{each.imbalance:.1%}",
            f"{each.seconds * 1e3:,.0f}",
        )
    title = f"A step of {source}: {step.sequences:,} sequences, {step.tokens:,} tokens, {step.padding:.1%} padding"
    tables.print_table(console, title, shown)
    tables.say(
        console,
        "Micro-batches: of the replica with fewest and with most. Imbalance: (busiest replica - mean) / busiest.",
    )
    tables.say(console, f"Modelled on {step.hardware} (--hardware).")
    print_timeline(console, step.timeline, world_size=step.world_size, seconds=step.seconds)


def plot_step(path: str, step: StepShown, *, source: str) -> None:
    """Draw the step rank by rank; ``ValueError`` where matplotlib or the file fails."""
    names = {number: f"{symbol_of(number)} {each.strategy}" for number, each in enumerate(step.segments)}
    charts.save_spans(
        path,
        title=f"A step of {source} on {step.hardware}, modelled",
        rows={
            row.label: [
                (
                    names[each.segment]
                    if each.activity is Activity.COMPUTE and each.segment is not None
                    else each.activity,
                    each.start * 1e3,
                    (each.end - each.start) * 1e3,
                )
                for each in row.spans
            ]
            for row in rows_of(step.timeline, step.world_size)
        },
    )


def _counts(micro_batches: Sequence[int]) -> str:
    fewest, most = min(micro_batches), max(micro_batches)
    return str(most) if fewest == most else f"{fewest}-{most}"
