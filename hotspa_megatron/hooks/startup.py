"""From the command line to a model with its guests: the flag, the checks, the process groups, the modules for CPU.

Each function here wraps one of Megatron's; ``install`` lists which.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from hotspa_megatron.config import HotSPaConfig, ResolvedConfig, Untested, load_config, resolve
from hotspa_megatron.hooks import agreement, arguments, auto, checkpoint, compat, cpu, endings, get_batch
from hotspa_megatron.hooks.conversations import ConversationFile, counts_prompts, speaking_bytes
from hotspa_megatron.hooks.model import builder_for
from hotspa_megatron.hooks.parallel_state import ParallelStates, recording_groups
from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.hooks.samples import check_data_files
from hotspa_megatron.hooks.session import Session, begin, current_session, patches, refuse, say, say_here
from hotspa_megatron.planning.communicators import ASSUMPTION
from hotspa_megatron.planning.topology import Topology
from hotspa_megatron.runtime.attention import PackedDotProductAttention, make_norm
from hotspa_megatron.runtime.transport import BatchedTransport
from hotspa_megatron.runtime.watchdog import Progress, Store, connection_beside
from hotspa_megatron.strict_yaml import config_error

_NOT_RUN: Final = (
    "on GPUs: NCCL between several GPUs, Transformer Engine, flash attention, fused kernels and fp8 are written to their "
    "documentation, not run by the authors"
)

_forward_step: Callable[..., Any] | None = None
"""The script's own, from when it calls pretrain."""


def add_flag(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_megatron_arguments(parser: Any) -> Any:
        parser = original(parser)
        agreement.remember_flags(parser)
        return arguments.add_flag(parser)

    return add_megatron_arguments


def check_flags_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **options: Any) -> Any:
        if not getattr(args, "hotspa_config", None):
            return original(args, *rest, **options)
        try:
            if args.hotspa_config == auto.AUTO:
                check_untested(args, ())
                auto.check(args)
            else:
                check_untested(args, load_config(args.hotspa_config).allow_untested)
        except ValueError as error:
            refuse(error)
        # Sums over strategies of any size only add up when each is a sum: one division per step, by its valid tokens.
        args.calculate_per_token_loss = True
        return original(args, *rest, **options)

    return validate_args


def remember_forward_step(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def pretrain(*positional: Any, **options: Any) -> Any:
        global _forward_step
        _forward_step = signature.bind(*positional, **options).arguments["forward_step_func"]
        rank = int(os.environ.get("RANK", "0"))
        with endings.told(_progress, say_here, rank=rank, connection=_connection, heard=_heard):
            try:
                return original(*positional, **options)
            finally:
                if session := current_session():
                    session.stop_watching()

    return pretrain


def forget() -> None:
    """Undo what ``remember_forward_step`` has noted."""
    global _forward_step
    _forward_step = None


def _progress() -> Progress | None:
    session = current_session()
    return None if session is None else session.progress


def _heard() -> str | None:
    session = current_session()
    return None if session is None or session.watchdog is None else session.watchdog.failed_first


def _connection() -> Callable[[], Store] | None:
    return connection_beside(dist.distributed_c10d._get_default_store()) if dist.is_initialized() else None


def plan_before_and_create_groups_after(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_distributed(*positional: Any, **options: Any) -> Any:
        from megatron.training import get_args

        args = get_args()
        if not getattr(args, "hotspa_config", None):
            return original(*positional, **options)
        try:
            if args.hotspa_config == auto.AUTO:
                check_data_files(args)
                auto.join(args)
                # Before ranks exchange a plan: one that was given a file would not take part, and all would wait.
                agreement.compare(agreement.given(args, None))
                args.hotspa_config = str(auto.decide(args, say=say))
            session = Session(args, _resolved(args))
            # With a file no rank knows the others yet, so each would speak.
            checkpoint.check(args, session.resolved.config, say=say if args.rank == 0 else lambda line: None)
        except ValueError as error:
            refuse(error)
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
        begin(session)
        say(f"megatron-core {compat.version()}, {'on CPU and gloo' if cpu.installed() else _NOT_RUN}")
        if session.resolved.config.allow_untested:
            say(f"allowed, although untested: {', '.join(session.resolved.config.allow_untested)}")
        _say_groups(session)
        if limit := checkpoint.saved_for_one_layout(args):
            say(limit)
        for each in (*session.resolved.strategies, session.resolved.home):
            say(
                f"up to {each.max_length:,} tokens: {each.strategy} ({each.kind}), {each.tokens_per_microbatch:,} tokens per "
                "micro-batch"
            )
        return result

    return initialize_distributed


def _resolved(args: Any) -> ResolvedConfig:
    """The configuration file checked against the whole command line; ValueError where they do not go together."""
    config = load_config(args.hotspa_config)
    # The flags again, now that defaults and the tokenizer are known.
    check_untested(args, config.allow_untested)
    if _forward_step is not None:
        get_batch.check(_forward_step, adapter=config.get_batch)
    if args.sft:
        arguments.check_conversations(args, samples=config.samples)
        config.overlong_for_conversations()
    if config.mock_lengths is not None:
        arguments.check_mock_lengths(args, samples=config.samples)
    if config.samples == "megatron":
        arguments.check_megatron_samples(args)
    resolved = resolve(
        config, shape=arguments.shape_of(args), home=arguments.home_of(args), recompute=arguments.recompute_of(args)
    )
    compat.check_interleaving(each.strategy for each in (*resolved.strategies, resolved.home))
    _check_watchdog(config, args)
    check_data_files(args)
    _check_transport(config, args)
    return resolved


def check_untested(args: Any, allowed: Collection[Untested]) -> None:
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
    say(
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
            refuse(error)

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
        patches.set(module, name, Attention)
    patches.set(torch_norm.WrappedTorchNorm, "__new__", norm(torch_norm.WrappedTorchNorm.__new__))


def _replace_reading_of_conversations(args: Any) -> None:
    """Lines without the package `datasets`, and bytes for the tokenizer that has no text."""
    from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
    from megatron.training.datasets import sft_dataset

    count_prompts = counts_prompts(args.sft_tokenizer_prompt_format)
    patches.set(sft_dataset, "SFTLowLevelDataset", ConversationFile)
    patches.wrap(
        MegatronTokenizerText,
        "tokenize_conversation",
        functools.partial(speaking_bytes, count_prompts=count_prompts),
    )


def build_guests_after(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def setup_model_and_optimizer(*positional: Any, **options: Any) -> Any:
        result = original(*positional, **options)
        session, model = current_session(), result[0]
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
