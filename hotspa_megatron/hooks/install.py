"""Every name of Megatron that is replaced, in one place, and the way back.

Without ``--hotspa-config`` each replacement calls the original and does nothing else. With it, the training loop stays
Megatron's own: only where the step's data and its forward-backward pass come from changes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from hotspa_megatron import run_folder
from hotspa_megatron.config import HotSPaConfig, ResolvedConfig, Untested, load_config, resolve
from hotspa_megatron.hooks import agreement, arguments, auto, checkpoint, compat, cpu, endings, get_batch
from hotspa_megatron.hooks.conversations import ConversationFile, conversations_from, counts_prompts, speaking_bytes
from hotspa_megatron.hooks.costs import decide_costs, decide_estimator
from hotspa_megatron.hooks.data import Step, StepBatch, StepLoader
from hotspa_megatron.hooks.forward_backward import StepRecord, StepRunner, count_work
from hotspa_megatron.hooks.guard import Guard
from hotspa_megatron.hooks.model import LogicalModel, build_guest, builder_for, read_home
from hotspa_megatron.hooks.parallel_state import ParallelState, ParallelStates, recording_groups
from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.hooks.rank_log import log_every_rank
from hotspa_megatron.hooks.samples import (
    CheckedSamples,
    Documents,
    MegatronSamples,
    Samples,
    check_data_files,
    corpus_from,
    first_rank_of_every_group,
)
from hotspa_megatron.hooks.step_report import Estimates, LineFile, StepLog, StepReport
from hotspa_megatron.hooks.timeline import Mark, Timeline
from hotspa_megatron.hooks.trace import Trace
from hotspa_megatron.planning.communicators import ASSUMPTION
from hotspa_megatron.planning.lengths import LengthHistogram
from hotspa_megatron.planning.step_plan import StepPlanner
from hotspa_megatron.planning.topology import Topology
from hotspa_megatron.runtime.attention import PackedDotProductAttention, make_norm
from hotspa_megatron.runtime.group_pool import GroupPool
from hotspa_megatron.runtime.transport import BatchedTransport
from hotspa_megatron.runtime.watchdog import Progress, Watchdog, connection_beside
from hotspa_megatron.strategy import Kind
from hotspa_megatron.strict_yaml import config_error

STEP_LOG_VARIABLE = "HOTSPA_STEP_LOG"
"""Environment variable: the file to which rank 0 writes one JSON object per step."""

_NOT_RUN = (
    "on GPUs: NCCL, Transformer Engine and flash attention are written to their documentation, not run by the authors"
)

_patches = Patches()
_session: Session | None = None
_forward_step: Callable[..., Any] | None = None


def install() -> None:
    """Replace Megatron's names; a second call does nothing.

    Raises ValueError where this Megatron is not supported. Imports megatron.training, so a CPU stand-in comes first.
    """
    if _patches.replaced:
        return
    compat.check_version()
    import megatron.training
    from megatron.core import timers
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import arguments as megatron_arguments
    from megatron.training import checkpointing, initialize, training

    _patches.wrap(megatron_arguments, "add_megatron_arguments", _add_flag)
    _patches.wrap(megatron_arguments, "validate_args", _check_flags_first)
    if hasattr(initialize, "validate_args"):  # 0.17 reads the command line there, through a reference of its own
        _patches.set(initialize, "validate_args", megatron_arguments.validate_args)
    _patches.wrap(training, "pretrain", _remember_forward_step)
    # Scripts import it from the package, which took its own reference.
    _patches.set(megatron.training, "pretrain", training.pretrain)
    # Inside initialize_megatron: 0.17 knows its arguments only there.
    _patches.wrap(initialize, "_initialize_distributed", _plan_before_and_create_groups_after)
    _patches.wrap(training, "setup_model_and_optimizer", _build_guests_after)
    _patches.wrap(checkpointing, "check_checkpoint_args", _count_samples_of_this_job)
    _patches.wrap(training, "load_checkpoint", _move_schedule_with_the_count)
    _patches.wrap(training, "build_train_valid_test_data_iterators", _read_documents_on_every_rank)
    _patches.wrap(training, "build_train_valid_test_datasets", _ask_provider_once)
    _patches.wrap(training, "build_pretraining_data_loader", _serve_steps)
    _patches.wrap(training, "train_step", _train_under_several_strategies)
    _patches.wrap(training, "train_step", log_every_rank)
    _patches.wrap(training, "dummy_train_step", _skip_one_step)
    # What people see: our part of Megatron's line about an iteration, of its writers and of its timers.
    _patches.wrap(training, "training_log", _log_steps)
    _patches.wrap(training, "print_rank_last", _complete_line)
    _patches.wrap(timers.Timers, "log", _show_timers)
    _patches.wrap(timers.Timers, "write", _show_timers)
    _patches.wrap(training, "train", _watch_and_end_reports_after)
    # Where a rank is, for the watchdog, and what is said when it does not get on.
    _patches.wrap(schedules, "forward_step", functools.partial(_noting, "forward"))
    _patches.wrap(schedules, "backward_step", functools.partial(_noting, "backward"))
    _patches.wrap(training, "save_checkpoint", _say_why_not_saved)
    _patches.wrap(training, "load_checkpoint", _say_why_not_loaded)


def uninstall() -> None:
    """Restore every replaced name, those replaced while a job ran included."""
    global _session, _forward_step
    _session = _forward_step = None
    _patches.undo_all()


def replaced() -> tuple[str, ...]:
    """The names that stand replaced now."""
    return _patches.replaced


class Session:
    """What one job under the flag holds between the hooks, filled in as Megatron starts up."""

    def __init__(self, args: Any, resolved: ResolvedConfig) -> None:
        self.args = args
        self.resolved = resolved
        self.progress = Progress()
        self._planner: StepPlanner | None = None
        self.pool = GroupPool()
        self.states: ParallelStates | None = None
        self.transport: BatchedTransport | None = None
        self.topology = Topology.flat(args.world_size)
        self.runner: StepRunner | None = None
        self.guard: Guard | None = None
        self.train_dataset: Any = None
        self.loader: StepLoader | None = None
        self.first_sample: int | None = None
        """Where the count of samples was taken up, if the checkpoint counted another kind."""
        self.folder = _run_folder(args, resolved.config.trace)
        self.report: StepReport | None = None
        self.trace: Trace | None = None

    @property
    def planner(self) -> StepPlanner:
        """The planner of steps, from when the model is there."""
        assert self._planner is not None
        return self._planner

    def prepare_runner(self, model: list[Any], build: Callable[[ParallelState], list[Any]]) -> StepRunner:
        """Build the guests beside home's ``model`` and make the runner of steps. Collective."""
        assert self.states is not None and self.transport is not None
        logical = read_home(model, self.resolved.home.strategy)
        self._planner = self._plan_by_costs(logical)
        # Each guest once, in the order of the file, however many length groups it serves.
        layers = {s.strategy: s.stages for s in self.resolved.strategies if s.kind is Kind.GUEST}
        make_runner = functools.partial(
            StepRunner,
            args=self.args,
            states=self.states,
            logical=logical,
            model=model,
            transport=self.transport,
            topology=self.topology,
            switch=self.resolved.config.switch,
            progress=self.progress,
            log=_say,
        )
        self.runner = make_runner(
            planner=self.planner,
            guests={guest: build_guest(self.states, guest, logical, layers[guest], build) for guest in layers},
            check_plans=self.resolved.config.check_plans,
        )
        if self.resolved.config.verify_every is not None:
            in_home = StepPlanner(self.planner.groups[-1:], self.planner.costs, merge=False)
            self.guard = Guard(
                every=self.resolved.config.verify_every,
                ungraded=_why_ungraded(self.args, self.resolved),
                alone=make_runner(planner=in_home, guests={}, check_plans=False),
                home=self.resolved.home.strategy,
                logical=logical,
                model=model,
                say=_say,
                scaled=bool(self.args.fp16 or self.args.loss_scale),
            )
        self.report = self._prepare_report(logical)
        return self.runner

    def _prepare_report(self, logical: LogicalModel) -> StepReport:
        make = decide_estimator(self.args, self.resolved, logical, self.topology, self.planner)
        files = []
        if self.args.rank == 0:
            # Of a resumed job: what it logged before stays.
            paths = [Path(path) for path in filter(None, [os.environ.get(STEP_LOG_VARIABLE)])]
            paths += [] if self.folder is None else [self.folder / run_folder.STEPS]
            files = [LineFile(path, _say_here) for path in paths]
        self.trace = None if self.folder is None else Trace(self.folder, _say_here)
        # Megatron's line and writers are the last rank's.
        seen = bool(files) or self.args.rank == self.args.world_size - 1
        return StepReport(
            args=self.args, planner=self.planner, estimates=Estimates(make, _say_here) if seen else None,
            log=StepLog(files), trace=None if self.trace is None else self.trace.add,
        )  # fmt: skip

    def _plan_by_costs(self, logical: LogicalModel) -> StepPlanner:
        costs, source = decide_costs(self.args, self.resolved, logical, self.topology)
        merge = self.resolved.config.merge == "auto"
        if self.resolved.strategies:
            what = "length groups are merged where switches do not pay" if merge else "no length group is merged"
            _say(f"{what} (merge: {self.resolved.config.merge}); times are those of {source}")
        return StepPlanner.from_resolved(self.resolved, costs, merge=merge)


def _why_ungraded(args: Any, resolved: ResolvedConfig) -> str | None:
    """Why a step's gradient is not compared with that of home alone; None where it is."""
    if not resolved.strategies:
        return "home is the only strategy"
    if args.hidden_dropout or args.attention_dropout:
        return "dropout draws other numbers under other strategies"
    if getattr(args, "fp8", None) or getattr(args, "fp4", None):
        return "the scales of fp8 and fp4 follow from every pass, so that one more would change the training"
    return None


def current_session() -> Session | None:
    """The running job's session; None without the flag."""
    return _session


def _say(line: str) -> None:
    from megatron.training.utils import print_rank_0

    print_rank_0(f"hotspa: {line}")


def _say_here(line: str) -> None:
    """On the rank that knows it."""
    rank = os.environ.get("RANK", "0")
    sys.stderr.write(f"hotspa: {'' if rank == '0' else f'rank {rank}: '}{line}\n")


def _refuse(error: Exception, *, code: int = 2) -> NoReturn:
    """End this rank with one line and an exit code, over what every rank finds as this one does.

    Rank 0 speaks for all. Another rank speaks only if rank 0 had nothing to say: the launcher ends it before otherwise.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank:
        time.sleep(3)
    sys.stderr.write(f"hotspa: {f'rank {rank}: ' if rank else ''}{error}\n")
    sys.stderr.flush()
    raise SystemExit(code)


# ------------------------------------------------------------------------------------------------- arguments, start-up


def _add_flag(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        parser = original(parser)
        agreement.remember_flags(parser)
        return arguments.add_flag(parser)

    return add_megatron_arguments


def _check_flags_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **options: Any) -> Any:
        if not getattr(args, "hotspa_config", None):
            return original(args, *rest, **options)
        try:
            if args.hotspa_config == auto.AUTO:
                _check_untested(args, ())
                auto.check(args)
            else:
                _check_untested(args, load_config(args.hotspa_config).allow_untested)
        except ValueError as error:
            _refuse(error)
        # Sums over strategies of any size only add up when each is a sum: one division per step, by its valid tokens.
        args.calculate_per_token_loss = True
        return original(args, *rest, **options)

    return validate_args


def _remember_forward_step(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def pretrain(*positional: Any, **options: Any) -> Any:
        global _forward_step
        _forward_step = signature.bind(*positional, **options).arguments["forward_step_func"]
        with endings.told(lambda: None if _session is None else _session.progress, _say_here):
            return original(*positional, **options)

    return pretrain


def _plan_before_and_create_groups_after(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_distributed(*positional: Any, **options: Any) -> Any:
        global _session
        from megatron.training import get_args

        args = get_args()
        if not getattr(args, "hotspa_config", None):
            return original(*positional, **options)
        try:
            if args.hotspa_config == auto.AUTO:
                args.hotspa_config = str(auto.decide(args, say=_say))
            session = Session(args, _resolved(args))
            checkpoint.check(args, session.resolved.config)
        except ValueError as error:
            _refuse(error)
        setattr(args, checkpoint.MARK, checkpoint.kind_of(args, session.resolved.config))
        if args.transformer_impl == "local":
            replace_local_modules()
        if args.sft:
            _replace_reading_of_conversations(args)
        with recording_groups(session.pool), _comparing_ranks(session):
            result = original(*positional, **options)
        bound = signature.bind(*positional, **options).arguments
        session.states = ParallelStates(
            session.resolved.home.strategy, args, session.pool,
            embedding_ranks=bound["get_embedding_ranks"], position_ranks=bound["get_position_embedding_ranks"],
        )  # fmt: skip
        for each in session.resolved.strategies:
            session.states.create(each.strategy)
        session.pool.seal()
        session.pool.warm_up()
        session.transport = _transport(session.resolved.config.switch.transport, args)
        session.topology = _topology()
        _session = session
        _say(f"megatron-core {compat.version()}, {'on CPU and gloo' if cpu.installed() else _NOT_RUN}")
        if session.resolved.config.allow_untested:
            _say(f"allowed, although untested: {', '.join(session.resolved.config.allow_untested)}")
        _say_groups(session)
        if limit := checkpoint.saved_for_one_layout(args):
            _say(limit)
        for each in (*session.resolved.strategies, session.resolved.home):
            _say(
                f"up to {each.max_length:,} tokens: {each.strategy} ({each.kind}), {each.tokens_per_microbatch:,} tokens per "
                "micro-batch"
            )
        return result

    return initialize_distributed


def _resolved(args: Any) -> ResolvedConfig:
    """The configuration file checked against the whole command line; ValueError where they do not go together."""
    config = load_config(args.hotspa_config)
    # The flags again, now that defaults and the tokenizer are known.
    _check_untested(args, config.allow_untested)
    if _forward_step is not None:
        get_batch.check(_forward_step, adapter=config.get_batch)
    if args.sft:
        arguments.check_conversations(args, samples=config.samples)
        config.overlong_for_conversations()
    if config.mock_lengths is not None:
        arguments.check_mock_lengths(args, samples=config.samples)
    if config.samples == "megatron":
        arguments.check_megatron_samples(args)
    resolved = resolve(config, shape=arguments.shape_of(args), home=arguments.home_of(args))
    compat.check_interleaving(each.strategy for each in (*resolved.strategies, resolved.home))
    _check_watchdog(config, args)
    check_data_files(args)
    _check_transport(config, args)
    return resolved


def _check_untested(args: Any, allowed: Collection[Untested]) -> None:
    """ValueError for a flag or a Megatron that is not run, unless the file says so."""
    if "megatron" not in allowed:
        compat.check_tested()
    arguments.check_flags(args, allowed)


def _check_transport(config: HotSPaConfig, args: Any) -> None:
    """``ConfigError`` where NCCL is asked for and cannot be had."""
    if config.switch.transport == "nccl" and (cpu.needed() or args.distributed_backend != "nccl"):
        line = config.switch.line_of("transport")
        problem = "nccl needs CUDA devices and --distributed-backend nccl; write auto or gloo"
        raise config_error(config.path, line, "switch.transport", problem)


def _check_watchdog(config: HotSPaConfig, args: Any) -> None:
    """``ConfigError`` where the job would have ended before the watchdog says why."""
    limit = args.distributed_timeout_minutes * 60
    if config.watchdog_line is not None and config.watchdog_s is not None and config.watchdog_s >= limit:
        late = f"{config.watchdog_s} is not below --distributed-timeout-minutes, {limit:g} s, when the job ends"
        problem = f"{late}; write at most {max(1, int(limit // 2))}, or null"
        raise config_error(config.path, config.watchdog_line, "watchdog_s", problem)


def _run_folder(args: Any, trace: str | None) -> Path | None:
    """Where the file's ``trace`` lies: below --save, else below where the job was started. ValueError where it cannot."""
    if trace is None:
        return None
    folder = run_folder.folder_inside(auto.Job.of(args).folder, trace)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"trace: {folder} cannot be made ({error.strerror}); name another folder") from None
    return folder


def _transport(name: str, args: Any) -> BatchedTransport:
    """What parameters and gradients travel with. Collective."""
    world = dist.get_world_size()
    if world == 1:
        return BatchedTransport()
    # A group of its own: Megatron's pipelines send point to point, too, and messages must not meet.
    everyone: Any = dist.new_group(
        list(range(world)), backend=None if name == "auto" else name,
        timeout=timedelta(minutes=args.distributed_timeout_minutes),
    )  # fmt: skip
    return BatchedTransport(everyone)


def _topology() -> Topology:
    """Nodes as the launcher filled them, where all are filled alike. Collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, int(os.environ.get("LOCAL_WORLD_SIZE", "0")))
    ranks, world = gathered[0], len(gathered)
    alike = ranks > 0 and world % ranks == 0 and all(each == ranks for each in gathered)
    return Topology.nodes(world, ranks) if alike else Topology.flat(world)


def _say_groups(session: Session) -> None:
    pool, taken = session.pool, session.resolved.group_memory
    shared = len({ranks for ranks, _ in pool.log if len(ranks) > 1})
    _say(
        f"{shared} process groups of several ranks, {len(pool.created)} of them beside home's, made in {pool.seconds:.1f} s; "
        f"NCCL would take about {taken.added_mb:,} MiB of a rank's memory for what is added ({ASSUMPTION})"
    )


@contextlib.contextmanager
def _comparing_ranks(session: Session) -> Iterator[None]:
    """Compare what ranks were given as soon as they know each other: before Megatron's groups, which would never be done."""

    def compare() -> None:
        try:
            agreement.compare(agreement.given(session.args, session.resolved))
        except ValueError as error:
            _refuse(error)

    if dist.is_initialized():
        compare()
        yield
        return

    def then_compare(join: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(join)
        def init_process_group(*positional: Any, **options: Any) -> None:
            join(*positional, **options)
            compare()

        return init_process_group

    patches = Patches()
    patches.wrap(dist, "init_process_group", then_compare)
    try:
        yield
    finally:
        patches.undo_all()


def replace_local_modules() -> None:
    """Packed attention with context parallelism, and norms under sequence parallelism, for --transformer-impl local."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer import torch_norm

    @contextlib.contextmanager
    def model_parallel_numbers() -> Any:
        with get_cuda_rng_tracker().fork():
            yield

    class Attention(PackedDotProductAttention):
        rng_fork = staticmethod(model_parallel_numbers)

    def norm(original: Any) -> Any:
        def new(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> Any:
            if not config.sequence_parallel:
                return original(cls, config, hidden_size, eps, **options)
            return make_norm(config, hidden_size, eps)

        return new

    for module, name in compat.local_attention_names():
        _patches.set(module, name, Attention)
    _patches.set(torch_norm.WrappedTorchNorm, "__new__", norm(torch_norm.WrappedTorchNorm.__new__))


def _replace_reading_of_conversations(args: Any) -> None:
    """Lines without the package `datasets`, and bytes for the tokenizer that has no text."""
    from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
    from megatron.training.datasets import sft_dataset

    count_prompts = counts_prompts(args.sft_tokenizer_prompt_format)
    _patches.set(sft_dataset, "SFTLowLevelDataset", ConversationFile)
    _patches.wrap(
        MegatronTokenizerText,
        "tokenize_conversation",
        functools.partial(speaking_bytes, count_prompts=count_prompts),
    )


def _build_guests_after(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def setup_model_and_optimizer(*positional: Any, **options: Any) -> Any:
        result = original(*positional, **options)
        session, model = _session, result[0]
        if session is None or result[1] is None:  # without an optimizer nothing is trained
            return result
        bound = signature.bind(*positional, **options).arguments
        build = builder_for(
            session.args,
            cfg_container=bound.get("cfg_container"),
            model_provider=bound.get("model_provider_func"),
            model_type=bound.get("model_type"),
        )
        session.prepare_runner(model, build)
        return result

    return setup_model_and_optimizer


# --------------------------------------------------------------------------------------------------------- checkpoints


def _count_samples_of_this_job(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron asks this of a checkpoint's arguments before it takes the consumed samples from them."""

    @functools.wraps(original)
    def check_checkpoint_args(saved: Any, *rest: Any, **options: Any) -> Any:
        result = original(saved, *rest, **options)
        session = _session
        if session is None:
            return result
        config = session.resolved.config
        try:
            session.first_sample = checkpoint.first_sample(session.args, saved, config)
        except ValueError as error:  # in a checkpoint that could not be looked at before
            _refuse(error)
        kind = checkpoint.kind_of(session.args, config)
        if session.first_sample is not None:
            _say(f"start_sample: {kind} are counted from {session.first_sample} on, by schedules too")
            saved.consumed_train_samples, saved.skipped_train_samples = session.first_sample, 0
        elif config.start_sample is not None:
            _say(f"start_sample: has no effect, as the checkpoint counts {kind} already")
        return result

    return check_checkpoint_args


def _move_schedule_with_the_count(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(*positional: Any, **options: Any) -> Any:
        result = original(*positional, **options)
        first = None if _session is None else _session.first_sample
        scheduler = signature.bind(*positional, **options).arguments["opt_param_scheduler"]
        if first is not None and scheduler is not None and scheduler.num_steps:  # 0 where it was not loaded
            scheduler.num_steps = first
            scheduler.step(0)
        return result

    return load_checkpoint


# ---------------------------------------------------------------------------------------------------------------- data


def _read_documents_on_every_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_train_valid_test_data_iterators(provider: Any) -> Any:
        if _session is None:
            return original(provider)
        if getattr(provider, "keywords", {}).get("vp_stage"):
            # Providers read for the first and the last chunk; here every chunk has what the first one of all has.
            first = functools.partial(provider, vp_stage=0)
            vars(first).update(vars(provider))
            provider = first
        with contextlib.ExitStack() as stack:
            stack.enter_context(first_rank_of_every_group())
            if _session.first_sample == 0:
                stack.enter_context(checkpoint.nothing_consumed(_session.args))
            return original(provider)

    return build_train_valid_test_data_iterators


def _ask_provider_once(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_train_valid_test_datasets(provider: Any, *rest: Any, **options: Any) -> Any:
        session = _session
        if session is None:
            return original(provider, *rest, **options)

        def with_few_training_samples(sizes: Any) -> Any:
            # Documents need no index of the run's chunks: Megatron would build one of all its iterations.
            if session.resolved.config.samples == "megatron" or not isinstance(sizes, (list, tuple)):
                return provider(sizes)
            return provider(type(sizes)((1, *sizes[1:])))

        train, valid, test = original(with_few_training_samples, *rest, **options)
        if session.args.skip_train:
            return train, valid, test
        session.train_dataset = train
        if session.loader is None:  # chunks of a pipeline with virtual stages ask once each, for one loader
            session.loader = _loader(session, train)
        return train, valid, test

    return build_train_valid_test_datasets


def _loader(session: Session, train: Any) -> StepLoader:
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size

    args = session.args
    try:
        samples = CheckedSamples(_samples(session, train), vocabulary=session.resolved.shape.padded_vocab_size)
    except ValueError as error:
        _refuse(error)
    _say(samples.describe(args.global_batch_size))
    return StepLoader(
        samples, session.planner, position=lambda: (args.consumed_train_samples, get_current_global_batch_size())
    )


def _samples(session: Session, train: Any) -> Samples:
    args, config = session.args, session.resolved.config
    if args.sft:
        return conversations_from(
            train, prompt_format=args.sft_tokenizer_prompt_format, seed=args.seed, seq_length=args.seq_length,
            overlong=config.overlong_for_conversations(), log=_say,
        )  # fmt: skip
    if config.samples == "megatron":
        return MegatronSamples(train, seq_length=args.seq_length)
    lengths = None if config.mock_lengths is None else LengthHistogram.named(config.mock_lengths)
    corpus = corpus_from(train, mock_lengths=lengths)
    return Documents(corpus, seed=args.seed, seq_length=args.seq_length, overlong=config.overlong)


def _serve_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_pretraining_data_loader(dataset: Any, *rest: Any, **options: Any) -> Any:
        if _session is None or dataset is None or dataset is not _session.train_dataset:
            return original(dataset, *rest, **options)
        return _session.loader

    return build_pretraining_data_loader


# ------------------------------------------------------------------------------------------------------------ training


def _train_under_several_strategies(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train_step(*positional: Any, **options: Any) -> Any:
        session = _session
        if session is None:
            return original(*positional, **options)
        runner, loader, states = session.runner, session.loader, session.states
        assert runner is not None and loader is not None and states is not None
        report = session.report
        assert report is not None
        session.progress.step(session.args.curr_iteration + 1)
        bound = signature.bind(*positional, **options)
        get_batch.serve(bound.arguments["forward_step_func"], _patches, adapter=session.resolved.config.get_batch)
        done: list[tuple[Any, StepRecord, Mark]] = []
        guard, iteration = session.guard, session.args.curr_iteration + 1
        if guard is not None and guard.due(iteration):
            # Outside Megatron's own step, which clears gradients first and may run its pass several times.
            guard.before(bound.arguments["forward_step_func"], _step_of(loader, next(iter(loader))), loader, iteration)
        else:
            guard = None

        def forward_backward(*, forward_step_func: Any, data_iterator: Any, **schedule_options: Any) -> Any:
            timeline, began = Timeline(session.progress), time.perf_counter()
            with timeline.span("plan", "this step"):
                # One iterator per chunk of a pipeline with virtual stages: all say the same.
                iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
                batches = [next(iterator) for iterator in iterators]
                step = _step_of(loader, batches[0])
            planned = time.perf_counter()
            report.begin(step.plan)
            reports, record = runner.run(
                forward_step_func=forward_step_func, step=step, loader=loader, timeline=timeline,
                switched=None if guard is None else guard.switched,
                force_all_reduce=schedule_options.get("force_all_reduce", False),
            )  # fmt: skip
            record.plan_seconds = planned - began
            if guard is not None:
                guard.after(record)
            session.progress.at("optimizer")
            done[:] = [(step, record, Mark())]
            return reports

        bound.arguments["forward_backward_func"] = forward_backward
        started = time.perf_counter()
        result = original(*bound.args, **bound.kwargs)
        if done:
            step, record, finished = done[0]
            record.timeline.took("optimizer", "optimizer", finished)
            seconds = time.perf_counter() - started
            _count_work(step, states)
            report.end(session.args.curr_iteration + 1, step, record, seconds)
        session.progress.at("after the step")
        return result

    return train_step


def _step_of(loader: StepLoader, batch: tuple[int, int]) -> Step:
    try:
        return loader.step(StepBatch(*batch))
    except ValueError as error:  # what a sample is, every rank finds alike
        _refuse(error)


def _count_work(step: Any, states: ParallelStates) -> None:
    from megatron.training import training

    update = getattr(training, "update_seqlen_stats_from_cu_seqlens", None)
    if update is not None:  # from 0.18 on
        count_work(step, states, dist.get_rank(), update)


def _skip_one_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dummy_train_step(data_iterator: Any) -> None:
        if _session is None:
            original(data_iterator)
            return
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        machine = get_rerun_state_machine()
        while machine.should_run_forward_backward(data_iterator):
            for iterator in data_iterator if isinstance(data_iterator, list) else [data_iterator]:
                next(iterator)

    return dummy_train_step


# ---------------------------------------------------------------------------------------------------- what people see


def _log_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def training_log(*positional: Any, **options: Any) -> Any:
        report = None if _session is None else _session.report
        if report is None:
            return original(*positional, **options)
        bound = signature.bind(*positional, **options).arguments
        return report.during_log(
            bound["iteration"],
            first=bound.get("is_first_iteration", False),
            log=functools.partial(original, *positional, **options),
        )

    return training_log


def _complete_line(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def print_rank_last(message: Any) -> Any:
        report = None if _session is None else _session.report
        return original(message if report is None else report.complete(message))

    return print_rank_last


def _show_timers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def show(self: Any, names: Any, *rest: Any, **options: Any) -> Any:
        report = None if _session is None else _session.report
        return original(self, names if report is None else report.more_timers(names), *rest, **options)

    return show


def _watch_and_end_reports_after(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def train(*positional: Any, **options: Any) -> Any:
        session = _session
        if session is None:
            return original(*positional, **options)
        ended, watchdog = False, _watchdog(session)
        try:
            result = original(*positional, **options)
            ended = True
            return result
        except SystemExit as end:  # Megatron's own way out, on all ranks: --exit-interval and its like
            ended = not end.code
            raise
        finally:
            if watchdog is not None:
                watchdog.stop()
            if session.report is not None:
                session.report.close()
                if session.trace is not None:
                    session.trace.close()
                    if ended:
                        dist.barrier()
                        session.trace.merge()

    return train


# ------------------------------------------------------------------------------------- what does not go as it should


def _watchdog(session: Session) -> Watchdog | None:
    """The running watchdog of this rank, if the file wants one."""
    config, args = session.resolved.config, session.args
    if config.watchdog_s is None:
        return None
    # Where the file says nothing, early enough for a short time-out, too.
    half = args.distributed_timeout_minutes * 30
    watchdog = Watchdog(
        session.progress,
        rank=args.rank,
        world_size=args.world_size,
        seconds=config.watchdog_s if config.watchdog_line is not None else min(config.watchdog_s, half),
        connect=connection_beside(dist.distributed_c10d._get_default_store()),
        say=lambda line: _say_here(f"watchdog: {line}"),
    )
    watchdog.start()
    return watchdog


def _noting(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def noted(*positional: Any, **options: Any) -> Any:
        if _session is not None:
            _session.progress.inside(what)
        return original(*positional, **options)

    return noted


def _say_why_not_saved(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_checkpoint(iteration: int, *positional: Any, **options: Any) -> Any:
        session = _session
        if session is None:
            return original(iteration, *positional, **options)
        session.progress.at("save", f"of iteration {iteration}")
        try:
            result = original(iteration, *positional, **options)
        except BaseException as error:  # torch's own for checkpoints is no Exception
            cause = endings.cause_in_files(error)
            if cause is None:
                raise
            problem = f"the checkpoint of iteration {iteration} cannot be saved: {cause}"
            _refuse(OSError(f"{problem}; {endings.state_of(session.args.save)}"), code=1)
        session.progress.at("after the save")
        return result

    return save_checkpoint


def _say_why_not_loaded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_checkpoint(*positional: Any, **options: Any) -> Any:
        try:
            return original(*positional, **options)
        except BaseException as error:
            cause = None if _session is None else endings.cause_in_files(error)
            if cause is None:
                raise
            assert _session is not None
            problem = f"the checkpoint in {_session.args.load} cannot be loaded: {cause}"
            _refuse(OSError(f"{problem}; restore it, or name an earlier one with --ckpt-step"), code=1)

    return load_checkpoint
