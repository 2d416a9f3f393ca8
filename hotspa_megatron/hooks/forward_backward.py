"""One training step under several strategies, in the place of Megatron's forward_backward_func.

The order is fixed: guest segments, sibling segments, home's; then home's gradients are finished, the guests' are added
once, and everything is divided once by the step's valid tokens. Each segment runs Megatron's own schedule with the
user's own forward_step. All of it is one forward-backward pass to Megatron's rerun machine and NaN checks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from hotspa_megatron.hooks import get_batch
from hotspa_megatron.hooks.data import SegmentIterator, Step, StepLoader
from hotspa_megatron.hooks.loss_reports import TOKENS, LossReports, Tally, checked
from hotspa_megatron.hooks.model import Guest, home_modules_under, packed_only
from hotspa_megatron.hooks.moves import Fetch, Move, Moves
from hotspa_megatron.hooks.parallel_state import ParallelStates, random_state_of
from hotspa_megatron.hooks.recompute import recomputing
from hotspa_megatron.hooks.timeline import Timeline
from hotspa_megatron.planning.step_plan import Segment, StepPlanner
from hotspa_megatron.runtime.watchdog import Progress
from hotspa_megatron.strategy import Kind


@dataclass
class StepRecord:
    """What one step did, for logs and reports.

    ``losses``: total and valid tokens per key of the user's loss report. ``plan_seconds``: how long the training loop
    waited for the step's plan.
    """

    switches: list[Move] = field(default_factory=list)
    folds: list[Move] = field(default_factory=list)
    segments: list[dict[str, Any]] = field(default_factory=list)
    losses: dict[str, tuple[float, float]] = field(default_factory=dict)
    plan_seconds: float = 0.0
    timeline: Timeline = field(default_factory=Timeline)


class StepRunner:
    """Runs steps over home's model and the guests. One per job; collective calls throughout.

    ``model`` is home's list of DDP-wrapped chunks; ``moves`` knows the guests. ``args`` is Megatron's argument namespace;
    ``progress`` is told where the rank is, for a watchdog.
    """

    def __init__(
        self,
        *,
        args: Any,
        states: ParallelStates,
        planner: StepPlanner,
        model: Sequence[Any],
        moves: Moves,
        check_plans: bool,
        progress: Progress,
    ) -> None:
        self._args, self._states, self.planner = args, states, planner
        self._model, self.moves, self._guests = list(model), moves, moves.guests
        self._check_plans, self._progress = check_plans, progress
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._losses = LossReports(states.home.strategy)
        self._timeline = Timeline(progress)

    # ------------------------------------------------------------------------------------------------------- the step

    def run(
        self,
        *,
        forward_step_func: Callable[..., Any],
        step: Step,
        loader: StepLoader,
        timeline: Timeline | None = None,
        switched: Callable[[Guest], None] | None = None,
        **options: Any,
    ) -> tuple[list[Any], StepRecord]:
        """Forward and backward of a whole step; gradients end at home, divided by the step's valid tokens.

        ``timeline``: the step's, where it began before. ``switched``: called when a guest's parameters have arrived.
        ``options`` are those of Megatron's schedules. Returns what the training loop expects of a schedule (one loss report
        on home's last pipeline stage, else none) and the record of the step.
        """
        self._timeline = timeline = timeline or Timeline(self._progress)
        self.moves.begin_step(timeline)
        record, tally = StepRecord(timeline=timeline), Tally()
        with timeline.span("wait", "for all ranks to agree on the step"):
            if self._check_plans:
                self._compare_plans(step)
            self._sync_home_parameters(step)
        finalize = _config(self._model).finalize_model_grads_func
        try:
            folds = self._run_segments(forward_step_func, step, loader, record, tally, switched, **options)
        finally:
            self.moves.end_step()
        with timeline.span("wait", "for all ranks' losses"):
            totals = self._losses.sum(tally)
        with timeline.span("reduce", "home"):
            self._finish_home(finalize, options)
        for fold in folds:
            record.folds.append(self.moves.finish_fold(fold))
        self._scale(totals.pop(TOKENS)[1])
        record.losses = totals
        return self._losses.report(totals), record

    def _run_segments(
        self,
        forward_step_func: Callable[..., Any],
        step: Step,
        loader: StepLoader,
        record: StepRecord,
        tally: Tally,
        switched: Callable[[Guest], None] | None,
        **options: Any,
    ) -> list[Fetch]:
        """Forward and backward of every segment in order; returns the folds under way."""
        home_config = _config(self._model)
        home_schedule = _HomeSchedule(self._model, step)
        folds = []
        resident: Guest | None = None
        for position, segment in enumerate(step.plan.segments):
            iterator = self._iterator(step, segment, loader)
            record.segments.append(_describe(segment, step))
            if segment.kind is Kind.GUEST:
                guest = self._guests[segment.strategy]
                if resident is not guest:
                    # Both hold valid parameters until the next guest has its own.
                    record.switches.append(self.moves.switch(resident, guest))
                    if resident is not None:
                        resident.release_parameters()
                    resident = guest
                    if switched is not None:
                        switched(guest)
                else:
                    guest.materialise()
                self.moves.prefetch(guest, step.plan.segments[position + 1 :])
                with self._segment(segment, position, guest.config, home_config):
                    with self._timeline.span("segment", str(segment.strategy), position=position):
                        reports = self._schedule(forward_step_func, guest.model, iterator, tally, **options)
                    with self._timeline.span("reduce", str(segment.strategy)):
                        self._finish_guest(guest)
                    tally.add(reports, self._losses.counts(segment.strategy))
                folds.append(self.moves.begin_fold(guest))
                guest.release_gradients()
                continue
            if resident is not None:
                resident.release_parameters()
                resident = None
            with home_schedule.accumulating(segment), self._segment(segment, position, home_config, home_config):
                with self._timeline.span("segment", str(segment.strategy), position=position):
                    reports = self._schedule(forward_step_func, self._model, iterator, tally, **options)
                tally.add(reports, self._losses.counts(segment.strategy))
        home_schedule.start_what_did_not_run()
        return folds

    def _finish_home(self, finalize: Callable[..., None] | None, options: dict[str, Any]) -> None:
        from megatron.core.distributed import finalize_model_grads

        (finalize or finalize_model_grads)(
            self._model,
            None,
            pg_collection=self._states.home.groups,
            force_all_reduce=options.get("force_all_reduce", False),
        )

    def _finish_guest(self, guest: Guest) -> None:
        """The guest's own sums: data parallelism, sequence-parallel norms, both copies of tied embeddings."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads(guest.model, None, pg_collection=guest.state.groups)

    def _scale(self, tokens: float) -> None:
        # A step without valid tokens has zero gradients; dividing them by one leaves them so.
        scale = 1.0 / max(tokens, 1.0)
        for chunk in self._model:
            chunk.scale_gradients(scale)

    @contextlib.contextmanager
    def _segment(self, segment: Segment, position: int, config: Any, home_config: Any) -> Iterator[None]:
        """Everything that must stand while a segment's schedule runs, and must not afterwards."""
        strategy, home = segment.strategy, self._states.home
        self._progress.at("activation", segment=f"{position + 1} ({strategy})")
        with contextlib.ExitStack() as stack:
            state = stack.enter_context(self._states.activate(strategy))
            stack.enter_context(_schedule_hooks_off(config, home_config))
            # A replica without micro-batches runs no schedule: its peers must not wait for the whole world in a timer.
            stack.enter_context(_replaced(config, barrier_with_L1_time=False))
            if segment.kind is Kind.GUEST or position or not all(segment.micro_batches):
                # Interleaved schedules start home's parameter gather themselves: here it is complete, or under way.
                stack.enter_context(_replaced(config, param_sync_func=None))
            if segment.kind is Kind.SIBLING and state is not home:
                stack.enter_context(home_modules_under(self._model, home, state))
            # Home's, too: its replicas draw unequally often, and a checkpoint holds the generators of the first one only.
            stack.enter_context(
                random_state_of(
                    strategy,
                    rank=self._rank,
                    seed=self._args.seed,
                    iteration=getattr(self._args, "curr_iteration", None) or 0,
                    segment=position,
                )
            )
            model = self._guests[strategy].model if segment.kind is Kind.GUEST else self._model
            stack.enter_context(recomputing(model, self.planner.groups[segment.group].recompute))
            stack.enter_context(packed_only(model))
            get_batch.mark_segment(True)
            try:
                yield
            finally:
                get_batch.mark_segment(False)

    def _schedule(
        self,
        forward_step_func: Callable[..., Any],
        model: list[Any],
        iterator: SegmentIterator,
        tally: Tally,
        **options: Any,
    ) -> list[Any]:
        """Megatron's own schedule over this rank's micro-batches; a replica without any runs nothing."""
        if not len(iterator):
            return []
        from megatron.core.pipeline_parallel import get_forward_backward_func

        config = _config(model)
        previous, config.finalize_model_grads_func = config.finalize_model_grads_func, tally.count_tokens
        try:
            return list(
                get_forward_backward_func()(
                    forward_step_func=checked(forward_step_func),
                    data_iterator=iterator if len(model) == 1 else [iterator.again() for _ in model],
                    model=model,
                    num_microbatches=len(iterator),
                    seq_length=iterator.total_tokens,
                    micro_batch_size=1,
                    decoder_seq_length=iterator.total_tokens,
                    forward_only=False,
                    force_all_reduce=options.get("force_all_reduce", False),
                )
            )
        finally:
            config.finalize_model_grads_func = previous

    def _iterator(self, step: Step, segment: Segment, loader: StepLoader) -> SegmentIterator:
        alignment = self.planner.groups[segment.group].alignment
        at = segment.strategy.coordinates(self._rank)
        return SegmentIterator(step, segment, loader.samples, at, alignment)

    def _sync_home_parameters(self, step: Step) -> None:
        """Complete an overlapped parameter all-gather that this step would read past, or enter on some ranks only.

        Megatron starts it in the first forward of home's modules. A guest's switch reads the parameters before that, and
        a replica without micro-batches has no forward at all while its peers would wait for it.
        """
        segments = step.plan.segments
        first = segments[0] if segments else None
        if first is None or first.kind is Kind.GUEST or not all(first.micro_batches):
            self.complete_parameters()

    def complete_parameters(self) -> None:
        """Complete an overlapped all-gather of home's parameters, if one is under way or due. Collective."""
        for chunk in self._model:
            if not chunk.ddp_config.overlap_param_gather or not chunk.remove_forward_pre_hook_handles:
                continue
            with torch.no_grad():
                for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                    if group.param_gather_handle is not None or not group.param_gather_dispatched:
                        group.start_param_sync(force_sync=True)

    def _compare_plans(self, step: Step) -> None:
        """Raise RuntimeError on every rank, naming the ranks that differ, where ranks planned different steps."""
        own = torch.tensor([step.plan.digest()], dtype=torch.int64).cuda()
        everyone = [torch.zeros_like(own) for _ in range(self._world)]
        dist.all_gather(everyone, own)
        digests = [int(each.item()) for each in everyone]
        common = max(set(digests), key=lambda digest: (digests.count(digest), -digests.index(digest)))
        different = [rank for rank, digest in enumerate(digests) if digest != common]
        if different:
            said: list[Any] = [None] * self._world
            segments = [_describe(segment, step) for segment in step.plan.segments]
            dist.all_gather_object(said, (step.plan.lengths, [" ".join(map(str, each.values())) for each in segments]))
            raise RuntimeError(
                f"ranks {', '.join(map(str, different))} planned another step than the others (samples "
                f"{step.batch.first_sample} to {step.batch.first_sample + step.batch.samples - 1}): "
                f"{_plans_differ(different[0], said[different[0]], digests.index(common), said[digests.index(common)])}; "
                "their data, costs or code differ"
            )


class _HomeSchedule:
    """Keeps home's overlapped gradient reduction right when several schedule calls accumulate into home's gradients.

    DDP starts a reduction inside the backward of what it takes for the last micro-batch. So all but the step's last
    home-layout segment run without synchronisation; so does the last one where some replica has nothing to run, since
    ranks would start their buckets at different points. What was not started inside a backward is started afterwards,
    on all ranks in the same order.
    """

    def __init__(self, model: Sequence[Any], step: Step) -> None:
        self._model = list(model)
        self._overlap = any(chunk.ddp_config.overlap_grad_reduce for chunk in model)
        on_home = [segment for segment in step.plan.segments if segment.kind is not Kind.GUEST]
        last = on_home[-1] if on_home else None
        # A sibling's replicas are other ranks than home's, but idle is idle.
        self._reducing = last if last is not None and all(last.micro_batches) else None

    @contextlib.contextmanager
    def accumulating(self, segment: Segment) -> Iterator[None]:
        if not self._overlap:
            yield
            return
        config = _config(self._model)
        with contextlib.ExitStack() as stack:
            if segment is not self._reducing:
                # no_sync is not re-entrant: the schedule must not use it inside.
                for chunk in self._model:
                    stack.enter_context(chunk.no_sync())
                stack.enter_context(_replaced(config, no_sync_func=None, grad_sync_func=None))
            yield

    def start_what_did_not_run(self) -> None:
        """Start the reduction of every bucket that no backward started."""
        if not self._overlap or self._reducing is not None:
            return
        for chunk in self._model:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                # Until DDP has seen its first full backward, finish_grad_sync starts them itself.
                if not getattr(group, "is_first_batch", False):
                    group.start_grad_sync()


@contextlib.contextmanager
def _schedule_hooks_off(config: Any, home_config: Any) -> Iterator[None]:
    """A guest's configuration follows home's loss scale and timers; on home itself nothing changes."""
    if config is home_config:
        yield
        return
    with _replaced(config, grad_scale_func=home_config.grad_scale_func, timers=home_config.timers):
        yield


@contextlib.contextmanager
def _replaced(config: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(config, name) for name in values}
    for name, value in values.items():
        setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def _config(model: Sequence[Any]) -> Any:
    from megatron.core.utils import get_model_config

    return get_model_config(model[0])


def _plans_differ(rank: int, one: tuple[Any, Any], other: int, two: tuple[Any, Any]) -> str:
    """The first thing in which two plans differ; each is (lengths, segments as text: kind, sequences, micro-batches, tokens)."""
    for name, mine, theirs in (("sequence", one[0], two[0]), ("segment", one[1], two[1])):
        if len(mine) != len(theirs):
            return f"it has {len(mine)} {name}s on rank {rank}, {len(theirs)} on rank {other}"
        for index, (here, there) in enumerate(zip(mine, theirs, strict=True)):
            if here != there:
                unit = " tokens" if name == "sequence" else ""
                return f"{name} {index} is {here}{unit} on rank {rank}, {there}{unit} on rank {other}"
    return "which sequences share a micro-batch"


def _describe(segment: Segment, step: Step) -> dict[str, Any]:
    ids = [i for batches in segment.micro_batches for batch in batches for i in batch]
    return {
        "strategy": str(segment.strategy),
        "kind": str(segment.kind),
        "sequences": segment.sequences,
        "micro_batches": sum(len(batches) for batches in segment.micro_batches),
        "tokens": sum(step.plan.lengths[i] for i in ids),
    }


def count_work(step: Step, states: ParallelStates, rank: int, update: Callable[[torch.Tensor], None]) -> None:
    """Feed Megatron's throughput line with the step's real sequence lengths, each counted once.

    Megatron sums over the world and divides by home's tp x cp x pp, so home's data-parallel ranks share the sequences.
    """
    home = states.home.strategy
    own = step.plan.lengths[home.coordinates(rank).dp :: home.dp]
    boundaries = torch.zeros(len(own) + 1, dtype=torch.int64)
    boundaries[1:] = torch.tensor(own, dtype=torch.int64).cumsum(0)
    # Ranks without a sequence still count: the training loop's sum over the world must meet on all of them.
    update(boundaries.cuda() if own else torch.zeros(2, dtype=torch.int64).cuda())
