"""One training step under several strategies, in the place of Megatron's forward_backward_func.

The order is fixed: guest segments, sibling segments, home's; then home's gradients are finished, the guests' are added
once, and everything is divided once by the step's valid tokens. Each segment runs Megatron's own schedule with the
user's own forward_step. All of it is one forward-backward pass to Megatron's rerun machine and NaN checks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist

from hotspa_megatron.config import SwitchConfig
from hotspa_megatron.hooks import get_batch
from hotspa_megatron.hooks.data import SegmentIterator, Step, StepLoader
from hotspa_megatron.hooks.model import (
    Guest,
    LogicalModel,
    check_against,
    home_modules_under,
    local_tensors,
    owned_gradients,
    packed_only,
)
from hotspa_megatron.hooks.parallel_state import ParallelStates, random_state_of
from hotspa_megatron.hooks.recompute import recomputing
from hotspa_megatron.hooks.timeline import Timeline, Voyage
from hotspa_megatron.planning.reshard_plan import ReshardPlan, plan_reshard
from hotspa_megatron.planning.step_plan import Segment, StepPlanner
from hotspa_megatron.planning.topology import Topology
from hotspa_megatron.runtime.executor import PendingReshard, Reshard
from hotspa_megatron.runtime.transport import Transport
from hotspa_megatron.runtime.watchdog import Progress
from hotspa_megatron.strategy import Kind, Strategy


@dataclass(frozen=True)
class Move:
    """A switch or a fold as it was carried out. ``num_bytes`` and ``messages``: over all ranks; ``seconds``: this rank's."""

    source: str
    destination: str
    num_bytes: int
    messages: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.source} -> {self.destination}: {self.num_bytes / 2**20:.1f} MiB sent, {self.messages} messages, "
            f"{self.seconds * 1e3:.0f} ms"
        )


@dataclass(frozen=True)
class _Route:
    """A planned move: this rank's part, and its bytes and messages over all ranks."""

    reshard: Reshard
    num_bytes: int
    messages: int

    def move(self, source: Strategy, destination: Strategy, seconds: float) -> Move:
        return Move(str(source), str(destination), self.num_bytes, self.messages, seconds)

    def voyage(
        self, timeline: Timeline, kind: Literal["switch", "fold"], source: Strategy, destination: Strategy
    ) -> Voyage:
        return timeline.moving(kind, str(source), str(destination), size=self.num_bytes, messages=self.messages)


@dataclass(frozen=True)
class _Fetch:
    """A guest's parameters under way to it, or its gradients from it. ``move``: what it has taken so far."""

    guest: Guest
    pending: PendingReshard
    move: Move
    voyage: Voyage


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

    ``model`` is home's list of DDP-wrapped chunks, ``guests`` the built guests by strategy. ``args`` is Megatron's
    argument namespace; ``progress`` is told where the rank is, for a watchdog.
    """

    def __init__(
        self,
        *,
        args: Any,
        states: ParallelStates,
        planner: StepPlanner,
        logical: LogicalModel,
        model: Sequence[Any],
        guests: dict[Strategy, Guest],
        transport: Transport,
        topology: Topology,
        switch: SwitchConfig,
        check_plans: bool,
        log: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self._args, self._states, self.planner = args, states, planner
        self._model, self._guests = list(model), guests
        self._transport, self._topology, self._switching = transport, topology, switch
        self._check_plans, self._log = check_plans, log
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        home = states.home.strategy
        self._layout = logical.layout(home, logical.home_layers)
        self._parameters = local_tensors(model, logical)
        check_against(self._layout, self._parameters, self._rank)
        self._owned = owned_gradients(model, self._layout, self._parameters)
        self._switches: dict[tuple[Strategy | None, Strategy], _Route] = {}
        self._folds: dict[Strategy, _Route] = {}
        self._fetch: _Fetch | None = None
        self._progress = progress
        self._timeline = Timeline(progress)
        self._fits: dict[tuple[Strategy, Strategy], bool | None] = {}
        self._parameter_dtype = _single_dtype("parameters", (p.dtype for p in self._parameters.values()))
        main_grad = _single_dtype("gradients", (p.main_grad.dtype for p in self._parameters.values()))
        narrower = switch.fold_itemsize(main_grad.itemsize) < main_grad.itemsize
        self._fold_dtype = torch.bfloat16 if narrower else main_grad
        self._report_keys: tuple[str, ...] | None = None
        self._seen_switches: set[tuple[str, str]] = set()

    @property
    def fold_dtype(self) -> torch.dtype | None:
        """What guests' gradients travel home as; None without guests."""
        return self._fold_dtype if self._guests else None

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
        record, tally = StepRecord(timeline=timeline), _Tally()
        with timeline.span("wait", "for all ranks to agree on the step"):
            if self._check_plans:
                self._compare_plans(step)
            self._sync_home_parameters(step)
        finalize = _config(self._model).finalize_model_grads_func
        try:
            folds = self._run_segments(forward_step_func, step, loader, record, tally, switched, **options)
        finally:
            # After a step nothing of a guest stays, after a failed one either. What still arrives there ends first.
            self._fetch = None
            for guest in self._guests.values():
                guest.release_parameters()
                guest.release_gradients()
        with timeline.span("wait", "for all ranks' losses"):
            totals = self._sum_reports(tally)
        with timeline.span("reduce", "home"):
            self._finish_home(finalize, options)
        for fold in folds:
            started = time.perf_counter()
            with fold.voyage.waiting():
                fold.pending.finish()
            fold.voyage.land()
            seconds = fold.move.seconds + time.perf_counter() - started
            record.folds.append(dataclasses.replace(fold.move, seconds=seconds))
        self._scale(totals.pop(_TOKENS)[1])
        record.losses = totals
        return self._report(totals), record

    def _run_segments(
        self,
        forward_step_func: Callable[..., Any],
        step: Step,
        loader: StepLoader,
        record: StepRecord,
        tally: _Tally,
        switched: Callable[[Guest], None] | None,
        **options: Any,
    ) -> list[_Fetch]:
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
                    record.switches.append(self._switch(resident, guest))
                    if resident is not None:
                        resident.release_parameters()
                    resident = guest
                    if switched is not None:
                        switched(guest)
                else:
                    guest.materialise()
                self._prefetch(guest, step.plan.segments[position + 1 :])
                with self._segment(segment, position, guest.config, home_config):
                    with self._timeline.span("segment", str(segment.strategy), position=position):
                        reports = self._schedule(forward_step_func, guest.model, iterator, tally, **options)
                    with self._timeline.span("reduce", str(segment.strategy)):
                        self._finish_guest(guest)
                    tally.add(reports, self._reports_loss(segment.strategy))
                folds.append(self._begin_fold(guest))
                guest.release_gradients()
                continue
            if resident is not None:
                resident.release_parameters()
                resident = None
            with home_schedule.accumulating(segment), self._segment(segment, position, home_config, home_config):
                with self._timeline.span("segment", str(segment.strategy), position=position):
                    reports = self._schedule(forward_step_func, self._model, iterator, tally, **options)
                tally.add(reports, self._reports_loss(segment.strategy))
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
        tally: _Tally,
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
                    forward_step_func=_checked(forward_step_func),
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

    # -------------------------------------------------------------------------------------------- parameters and folds

    def _switch(self, resident: Guest | None, guest: Guest) -> Move:
        """Complete the parameters of ``guest``, whether their move has begun or not, and give it its gradients."""
        fetch = self._fetch or self._begin_switch(resident, guest)
        assert fetch.guest is guest
        started = time.perf_counter()
        with fetch.voyage.waiting():
            guest.materialise()
            fetch.pending.finish()
        fetch.voyage.land()
        self._fetch = None
        move = dataclasses.replace(fetch.move, seconds=fetch.move.seconds + time.perf_counter() - started)
        if (move.source, move.destination) not in self._seen_switches:
            self._seen_switches.add((move.source, move.destination))
            self._log(f"switch {move}")
        return move

    def _begin_switch(self, resident: Guest | None, guest: Guest) -> _Fetch:
        """Start the move of parameters out of home and the resident guest, both of which must stay until it is finished."""
        started = time.perf_counter()
        route = self._switch_route(resident.state.strategy if resident else None, guest.state.strategy)
        source = resident.state.strategy if resident else self._states.home.strategy
        voyage = route.voyage(self._timeline, "switch", source, guest.state.strategy)
        with voyage.waiting():
            guest.materialise_parameters()
            sources: list[dict[int, Any]] = [self._parameters]
            if resident is not None:
                sources.append(resident.parameters)
            pending = route.reshard.begin(sources=sources, destination=guest.parameters)
        voyage.arrival = pending.arrived
        return _Fetch(guest, pending, route.move(source, guest.state.strategy, time.perf_counter() - started), voyage)

    def _prefetch(self, resident: Guest, later: Sequence[Segment]) -> None:
        """Start the next guest's switch beside the segment that comes first, where that is wanted and fits."""
        if not later or later[0].kind is not Kind.GUEST:
            return
        guest = self._guests[later[0].strategy]
        if guest is not resident and self._may_prefetch(resident, guest):
            self._fetch = self._begin_switch(resident, guest)

    def _may_prefetch(self, resident: Guest, guest: Guest) -> bool:
        """Whether to prefetch; the same answer on every rank."""
        if self._switching.prefetch != "auto":
            return self._switching.prefetch == "always"
        if not self._transport.pace.on_stream:
            return False
        pair = resident.state.strategy, guest.state.strategy
        if pair not in self._fits:
            # The memory that the segment takes is known once it has run.
            self._fits[pair] = None
            return False
        if self._fits[pair] is None:
            needed = guest.parameter_bytes + 2 * (self._switching.chunk_mb << 20)
            fits = torch.tensor([int(_unused_bytes() >= needed)]).cuda()
            dist.all_reduce(fits, op=dist.ReduceOp.MIN)
            self._fits[pair] = bool(fits.item())
            self._log(f"prefetch {pair[0]} -> {pair[1]}: {'fits' if self._fits[pair] else 'too little memory'}")
        return bool(self._fits[pair])

    def _switch_route(self, resident: Strategy | None, guest: Strategy) -> _Route:
        if (resident, guest) not in self._switches:
            sources = [self._layout] + ([self._guests[resident].layout] if resident else [])
            dtype = self._parameter_dtype
            with self._timeline.span("plan", f"switch to {guest}"):
                plan = plan_reshard(
                    sources, self._guests[guest].layout, itemsize=dtype.itemsize, topology=self._topology
                )
                self._switches[resident, guest] = self._route(plan, dtype, accumulate=False)
        return self._switches[resident, guest]

    def _begin_fold(self, guest: Guest) -> _Fetch:
        """Send the guest's finished gradients to the ranks that own them at home; they are added after home's own."""
        started = time.perf_counter()
        route = self._fold_route(guest.state.strategy)
        home = self._states.home.strategy
        voyage = route.voyage(self._timeline, "fold", guest.state.strategy, home)
        with voyage.waiting():
            pending = route.reshard.begin(sources=[guest.gradients], destination=self._home_gradients())
        voyage.arrival = pending.arrived
        return _Fetch(guest, pending, route.move(guest.state.strategy, home, time.perf_counter() - started), voyage)

    def _fold_route(self, guest: Strategy) -> _Route:
        if guest not in self._folds:
            dtype = self._fold_dtype
            # What was added cannot be relayed: each addend goes straight to its owner.
            with self._timeline.span("plan", f"fold from {guest}"):
                plan = plan_reshard(
                    [self._guests[guest].layout],
                    self._owned,
                    itemsize=dtype.itemsize,
                    topology=self._topology,
                    two_phase=False,
                )
                self._folds[guest] = self._route(plan, dtype, accumulate=True)
        return self._folds[guest]

    def _route(self, plan: ReshardPlan, dtype: torch.dtype, *, accumulate: bool) -> _Route:
        part = plan.for_rank(self._rank)
        chunk_bytes = self._switching.chunk_mb << 20
        waiting = functools.partial(self._progress.inside, "chunk")
        reshard = Reshard(
            part, self._transport, accumulate=accumulate, dtype=dtype, chunk_bytes=chunk_bytes, waiting=waiting
        )
        return _Route(reshard, plan.total_bytes, plan.num_messages)

    def _home_gradients(self) -> dict[int, torch.Tensor]:
        return {index: parameter.main_grad for index, parameter in self._parameters.items()}

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

    # --------------------------------------------------------------------------------------------------------- reports

    def _reports_loss(self, strategy: Strategy) -> bool:
        """Whether this rank's loss reports count: once per token, so only tp 0 of the last stage."""
        at = strategy.coordinates(self._rank)
        return at.pp == strategy.pp - 1 and at.tp == 0

    def _sum_reports(self, tally: _Tally) -> dict[str, tuple[float, float]]:
        """Sum every key's (total, tokens) over the world, once per step; ``_TOKENS`` holds the valid tokens.

        Ranks that never are a last stage do not know the keys: they learn them in the first step that has any.
        """
        keys = self._report_keys
        if keys is None:
            gathered: list[Any] = [None] * self._world
            dist.all_gather_object(gathered, tuple(tally.sums))
            keys = tuple(sorted({key for each in gathered for key in each}))
            if keys:
                self._report_keys = keys
        unknown = sorted(set(tally.sums) - set(keys))
        if unknown:
            raise RuntimeError(f"the loss report has a new key {unknown[0]!r}; its keys must be the same in every step")
        zero = (0.0, 0.0)
        rows = [tally.sums.get(key, zero) for key in keys] + [(0.0, tally.tokens)]
        values = torch.tensor(rows, dtype=torch.float64).cuda()
        dist.all_reduce(values)
        sums = [(float(total), float(tokens)) for total, tokens in values.tolist()]
        return dict(zip((*keys, _TOKENS), sums, strict=True))

    def _report(self, totals: dict[str, tuple[float, float]]) -> list[Any]:
        """One report on every rank of home's last stage: the training loop then sums it over home's dp x cp ranks."""
        home = self._states.home.strategy
        if home.coordinates(self._rank).pp != home.pp - 1:
            return []
        share = home.dp * home.cp
        return [
            {
                # Without a valid token the loss is 0 of something, not 0 / 0.
                key: torch.tensor([total / share, (tokens or 1.0) / share], dtype=torch.float64).cuda()
                for key, (total, tokens) in totals.items()
            }
        ]

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


_TOKENS = ""
"""Key of the valid tokens in ``StepRunner._sum_reports``; no loss report can use it."""


class _Tally:
    """Loss reports and valid tokens of this rank's segments, summed in double precision."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        self.tokens = 0.0
        self._last = 0.0

    def count_tokens(self, model: Any, num_tokens: Any = None, **_: Any) -> None:
        """In the place of finalize_model_grads while a segment runs: only note the tokens that the schedule counted."""
        self._last = float(num_tokens) if num_tokens is not None else 0.0

    def add(self, reports: list[Any], counts: bool) -> None:
        """Take in a segment's reports (one dict per micro-batch) where this rank's count."""
        tokens, self._last = self._last, 0.0
        if not counts:
            return
        self.tokens += tokens
        for key in reports[0] if reports else ():
            values = [report[key].detach() for report in reports]
            if values[0].numel() != 2:
                raise ValueError(
                    f"the loss report's {key!r} has {values[0].numel()} elements; return [sum, tokens] of two, as "
                    "Megatron's own loss function does"
                )
            total, count = torch.stack([value.double().view(2) for value in values]).sum(0).tolist()
            before = self.sums.get(key, (0.0, 0.0))
            self.sums[key] = (before[0] + total, before[1] + count)


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


def _unused_bytes() -> int:
    """Device memory that this process has not needed so far, but for a twentieth of it all."""
    free, total = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated() - total // 20


def _config(model: Sequence[Any]) -> Any:
    from megatron.core.utils import get_model_config

    return get_model_config(model[0])


def _checked(forward_step_func: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a loss function without a token count: its sum over micro-batches of any size would be meaningless.

    And have it see zeros where the mask is: it multiplies by the mask, and a NaN that a kernel left there would stay one.
    """

    @functools.wraps(forward_step_func)
    def forward_step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        output, loss_func = forward_step_func(data_iterator, model, *args, **kwargs)

        def counted(losses: Any, *loss_args: Any, **loss_kwargs: Any) -> Any:
            result = loss_func(_only_counted(losses, data_iterator), *loss_args, **loss_kwargs)
            if len(result) != 3:
                raise ValueError(
                    f"the loss function returns {len(result)} values; return (loss sum, number of tokens, report), as "
                    "Megatron's own does: a mean per micro-batch cannot be put together exactly"
                )
            return result

        return output, counted

    return forward_step


def _only_counted(losses: Any, iterator: SegmentIterator) -> Any:
    """Losses of tokens, exactly 0 where they do not count; what is not one number per token stays as it is."""
    mask = iterator.latest_mask
    if not torch.is_tensor(losses) or mask is None or losses.shape != mask.shape:
        return losses
    return torch.where(mask != 0, losses, 0.0)


def _single_dtype(what: str, dtypes: Iterator[torch.dtype]) -> torch.dtype:
    found = sorted(set(dtypes), key=str)
    if len(found) != 1:
        raise ValueError(f"home's {what} have several dtypes ({', '.join(map(str, found))}); one is supported")
    return found[0]


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
