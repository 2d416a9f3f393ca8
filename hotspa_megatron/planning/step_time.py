"""The modelled time of one planned step, rank by rank: segments, switches, folds, reductions, optimizer.

Ranks are followed one by one: a replica of the next segment starts when its own ranks are free, so sibling segments do not
wait for each other; a switch waits for all. Pure; ``search`` compares plans by it and ``simulate`` reports it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from hotspa_megatron.config import ResolvedConfig
from hotspa_megatron.planning.alignment import alignment_of
from hotspa_megatron.planning.cost_model import CostModel
from hotspa_megatron.planning.execution import Execution, Recompute
from hotspa_megatron.planning.hardware import Hardware
from hotspa_megatron.planning.step_plan import (
    LengthGroup,
    Moves,
    Segment,
    StepCosts,
    StepPlan,
    StepPlanner,
)
from hotspa_megatron.strategy import Kind, Strategy


@dataclass(frozen=True, kw_only=True)
class GroupChoice:
    """One length group of a run: its sequences are up to ``max_length`` tokens and longer than the group before.

    ``tokens_per_microbatch`` counts a micro-batch over all cp ranks, padding included.
    """

    max_length: int
    execution: Execution
    tokens_per_microbatch: int


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step: ``total`` on the slowest path; the others are shares of it that can be told apart.

    ``switch`` and ``fold`` move parameters to guests and gradients home; ``reduce`` is what gradient reductions and
    parameter gathers take unhidden, guests' included; ``optimizer`` is Adam's.
    """

    total: float
    switch: float
    fold: float
    reduce: float
    optimizer: float


class Activity(enum.StrEnum):
    """What ranks do in a step: run micro-batches, or what ``StepTime`` has a share for."""

    COMPUTE = "compute"
    SWITCH = "switch"
    REDUCE = "reduce"
    FOLD = "fold"
    OPTIMIZER = "optimizer"


class Span(NamedTuple):
    """Ranks at one activity, ``start`` to ``end`` in seconds from the start of the step.

    ``segment``: its place in the plan, None where the step ends. ``replica``: None for all ranks. ``fill``: how long each
    stage of a pipeline waits for others within the span.
    """

    activity: Activity
    segment: int | None
    replica: int | None
    start: float
    end: float
    fill: float = 0.0

    def of_stage(self, stage: int, stages: int) -> tuple[tuple[float, float], ...]:
        """When a pipeline's stage computes within the span: not while it waits, as 1F1B has it with even micro-batches.

        A forward pass is a third of a micro-batch's time. Stage s waits for the s forward passes before its first one, at
        the end for s backward passes; and between its first forward passes and its first backward pass for the rest.
        """
        if not self.fill:
            return ((self.start, self.end),)
        one = self.fill / (stages - 1)
        begin, end = self.start + stage * one / 3, self.end - stage * one * 2 / 3
        work = self.end - self.start - self.fill
        first = min(work, (stages - stage) * one) / 3
        return (begin, begin + first), (begin + first + (stages - 1 - stage) * one, end)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """A step's spans, by start, and its time. Where a rank has no span, it waits for others."""

    spans: tuple[Span, ...]
    time: StepTime


def mean_time(times: Sequence[StepTime]) -> StepTime:
    """The mean over steps."""
    return StepTime(
        **{each.name: sum(getattr(time, each.name) for time in times) / len(times) for each in fields(StepTime)}
    )


class RunModel:
    """The length groups of a run on a modelled cluster: plans its steps as the real one does, and times them.

    ``groups`` short to long, home last; ``planner``: the run's own, where it has one. Raises ValueError where a group's
    budget cannot hold its longest sequence.
    """

    def __init__(self, model: CostModel, groups: Sequence[GroupChoice], planner: StepPlanner | None = None) -> None:
        self.model = model
        self.groups = tuple(groups)
        self.home = groups[-1].execution.strategy
        self.planner = planner or StepPlanner(
            [self._length_group(choice, last=choice is groups[-1]) for choice in groups],
            step_costs(model, [choice.execution for choice in groups]),
        )

    def step(self, lengths: np.ndarray) -> StepTime:
        """Plan and time one step."""
        return self.time(self.planner.plan(lengths))

    def time(self, plan: StepPlan) -> StepTime:
        """The time of a plan that this run's planner made."""
        return self.timeline(plan).time

    def timeline(self, plan: StepPlan) -> Timeline:
        """What the ranks do in a plan that this run's planner made, and when."""
        model, home = self.model, self.home
        lengths = np.array(plan.lengths, np.int64)
        clock = np.zeros(model.world_size)
        spans: list[Span] = []
        taken = dict.fromkeys((each.name for each in fields(StepTime) if each.name != "total"), 0.0)

        def together(activity: Activity, segment: int | None, seconds: float) -> None:
            taken[activity] += seconds
            start = float(clock.max())
            clock[:] = start + seconds
            if seconds:
                spans.append(Span(activity, segment, None, start, start + seconds))

        last = 0.0
        before: Strategy | None = None
        for number, segment in enumerate(plan.segments):
            guest = segment.strategy if segment.kind is Kind.GUEST else None
            if guest is not None:
                together(Activity.SWITCH, number, 0.0 if guest == before else model.switch_seconds(home, before, guest))
                before = guest
            work, mean = self._run(segment, lengths, clock)
            spans += [Span(Activity.COMPUTE, number, *each) for each in work]
            if guest is not None:
                together(Activity.REDUCE, number, model.guest_reduction(guest))
                together(Activity.FOLD, number, model.fold_seconds(guest, home))
            else:
                last = mean
        together(Activity.REDUCE, None, model.home_reduction(home, last=last))
        together(Activity.OPTIMIZER, None, model.optimizer_seconds(home))
        return Timeline(
            spans=tuple(sorted(spans, key=lambda each: each.start)), time=StepTime(total=float(clock.max()), **taken)
        )

    def _run(
        self, segment: Segment, lengths: np.ndarray, clock: np.ndarray
    ) -> tuple[list[tuple[int, float, float, float]], float]:
        """Advance the ranks' clocks by a segment; returns (replica, start, end, fill), and the mean time of micro-batches."""
        execution = self.groups[segment.group].execution
        group, strategy = self.planner.groups[segment.group], segment.strategy
        time = self.model.stage_time(execution)
        times, work = [], []
        for replica, batches in enumerate(segment.micro_batches):
            real = [batch for batch in batches if batch]
            if not real:
                continue
            members = np.array([index for batch in real for index in batch], np.int64)
            starts = np.cumsum([0, *(len(batch) for batch in real)])[:-1]
            padded = -(-lengths[members] // group.alignment.sequence) * group.alignment.sequence
            tokens = -(-np.add.reduceat(padded, starts) // group.alignment.total) * group.alignment.total
            if strategy.pp > 1:
                tokens[:] = tokens.max()
            squares = np.add.reduceat(lengths[members].astype(np.float64) ** 2, starts)
            each = np.asarray(time.seconds(tokens.astype(np.float64), squares))
            times.append(each)
            fill = (strategy.pp - 1) * float(each.max()) / strategy.vpp
            # Ranks lie as tp, cp, dp, pp from the fastest axis: a replica is a slice of this view.
            ranks = clock.reshape(strategy.pp, strategy.dp, strategy.cp * strategy.tp)[:, replica]
            filler = float(time.fixed + time.per_token * tokens.max())
            start = float(ranks.max())
            end = start + float(each.sum()) + fill + (len(batches) - len(real)) * filler
            ranks[:] = end
            work.append((replica, start, end, fill))
        return work, float(np.concatenate(times).mean()) if times else 0.0

    def _length_group(self, choice: GroupChoice, *, last: bool) -> LengthGroup:
        strategy = choice.execution.strategy
        kind = Kind.HOME if last else Kind.SIBLING if strategy.same_layout(self.home) else Kind.GUEST
        return LengthGroup(
            strategy=strategy,
            kind=kind,
            max_length=choice.max_length,
            tokens_per_microbatch=choice.tokens_per_microbatch,
            alignment=alignment_of(strategy, sequence_parallel=self.model.shape.sequence_parallel),
            multiple_of=strategy.pp if strategy.vpp > 1 else 1,
        )


def resolved_costs(
    resolved: ResolvedConfig,
    hardware: Hardware,
    *,
    recompute: Recompute,
    home_layers: Sequence[Sequence[int]] | None = None,
) -> StepCosts:
    """``step_costs`` of a resolved configuration on this hardware.

    ``recompute``: what the command line recomputes, where a strategy says nothing else.
    ``home_layers``: of each of home's stages, where Megatron laid them as the configuration does not say.
    """
    model, groups = resolved_model(resolved, hardware, recompute=recompute, home_layers=home_layers)
    return step_costs(model, [choice.execution for choice in groups])


class StepEstimator:
    """Modelled times of a job's real steps: as they were planned, and as home alone would run them with its own packing.

    ``planner``: the job's own; the others as for ``resolved_costs``.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        hardware: Hardware,
        planner: StepPlanner,
        *,
        recompute: Recompute,
        home_layers: Sequence[Sequence[int]] | None = None,
    ) -> None:
        model, groups = resolved_model(resolved, hardware, recompute=recompute, home_layers=home_layers)
        self._planned = RunModel(model, groups, planner)
        self._static = RunModel(model, groups[-1:])

    def times(self, plan: StepPlan) -> tuple[StepTime, StepTime]:
        """(as planned, static), for a plan of the job's planner."""
        return self._planned.time(plan), self._static.step(np.array(plan.lengths, np.int64))


def resolved_model(
    resolved: ResolvedConfig,
    hardware: Hardware,
    *,
    recompute: Recompute,
    home_layers: Sequence[Sequence[int]] | None = None,
) -> tuple[CostModel, list[GroupChoice]]:
    """The cost model and the length groups of a resolved configuration; arguments as for ``resolved_costs``."""
    shape, home = resolved.shape, resolved.home.strategy
    groups = []
    for each in (*resolved.strategies, resolved.home):
        layers = shape.num_layers / (each.strategy.pp * each.strategy.vpp)
        share = (each.recompute or recompute).share(layers)
        execution = Execution(strategy=each.strategy, recompute=share)
        budget = each.tokens_per_microbatch
        groups.append(GroupChoice(max_length=each.max_length, execution=execution, tokens_per_microbatch=budget))
    model = CostModel(
        shape,
        hardware,
        home.world_size,
        home=home,
        home_layers=home_layers or resolved.home.stages,
        fold_itemsize=resolved.config.switch.fold_itemsize(shape.gradient_bytes),
    )
    return model, groups


def step_costs(model: CostModel, executions: Sequence[Execution]) -> StepCosts:
    """What a planner of steps has to know of time, for these executions of the length groups, short to long, home last.

    Moves are timed on the reshard plans that a run carries out: ``model`` must have been made with this home.
    """
    home = executions[-1].strategy
    guests = sorted({each.strategy for each in executions if not each.strategy.same_layout(home)})
    return StepCosts(
        times=tuple(model.stage_time(execution).linear() for execution in executions),
        moves=Moves(
            switches={
                (before, guest): model.switch_seconds(home, before, guest)
                for guest in guests
                for before in (None, *guests)
                if before != guest
            },
            folds={guest: model.fold_seconds(guest, home) + model.guest_reduction(guest) for guest in guests},
        ),
    )
