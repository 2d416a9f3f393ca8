"""A job under the flag, brought up inside ranks that already have a process group, several times if need be.

As pretrain() does it up to the optimizer; then tests drive the runner of steps themselves.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hotspa_megatron.runtime.group_pool import GroupPool
from hotspa_megatron.strategy import Strategy
from tests.training import RELEASE, SCRIPT

SEQ_LENGTH = 64
VOCAB = 96


@dataclasses.dataclass(frozen=True)
class Mix:
    """Home as (tp, cp, pp), the listed strategies as (max_length, tp, cp, pp, and what else their keys say), and flags."""

    home: tuple[int, int, int]
    strategies: tuple[tuple[int, int, int, int] | tuple[int, int, int, int, str], ...]
    flags: tuple[str, ...] = ()
    switch: str = ""
    """Keys and values of ``switch``, as the file has them in braces."""
    budget: int | None = None
    """Home's tokens per micro-batch; None leaves it out."""
    more: str = ""
    """Further lines of the file."""

    @property
    def entries(self) -> list[str]:
        """The strategies as the file lists them."""
        return [
            f"{{max_length: {length}, tp: {tp}, cp: {cp}, pp: {pp}{''.join(f', {key}' for key in more)}}}"
            for length, tp, cp, pp, *more in self.strategies
        ]

    def __str__(self) -> str:
        listed = " + ".join(self.entries) or "static"
        return f"home tp{self.home[0]}-cp{self.home[1]}-pp{self.home[2]} + {listed} {' '.join(self.flags)} {self.switch}".strip()


def start(mix: Mix, world: int, dtype: torch.dtype) -> tuple[Any, list[Any], Any]:
    """Bring Megatron up for a mix, as pretrain() does up to the optimizer, in a process that may have had another."""
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.training import global_vars

    from hotspa_megatron.hooks import install
    from hotspa_megatron.hooks.model import builder_for
    from hotspa_megatron.hooks.parallel_state import _read_globals, _write_globals
    from hotspa_megatron.hooks.session import current_session

    for destroy in (
        global_vars.destroy_global_vars,
        num_microbatches_calculator.destroy_num_microbatches_calculator,
        rerun_state_machine.destroy_rerun_state_machine,
    ):
        destroy()
    _write_globals({name: {} if isinstance(value, dict) else None for name, value in _read_globals().items()})
    parallel_state._GLOBAL_MEMORY_BUFFER = None
    install.install()
    from megatron.training import training

    example = example_script()
    config = Path(tempfile.mkdtemp()) / "hotspa.yaml"
    config.write_text(
        "strategies:" + (" []" if not mix.strategies else "")
        + "".join(f"\n  - {entry}" for entry in mix.entries)
        + "\nmerge: never\nswitch: {" + mix.switch + "}\n"
        + ("" if mix.budget is None else f"home: {{tokens_per_microbatch: {mix.budget}}}\n")
        + mix.more
    )  # fmt: skip
    sys.argv = ["pretrain", *arguments_of(mix), "--hotspa-config", str(config)]
    args = _start_megatron()
    args.params_dtype, args.curr_iteration = dtype, 0
    session = current_session()
    assert session is not None and session.states is not None
    if RELEASE >= (0, 19):
        model_config = example.gpt_config_from_args(args)
        container = example.pretrain_cfg_container_from_args(args, model_config)
        model = model_config.get_builder_cls()(model_config).build_distributed_models(
            pg_collection=session.states.home.groups, ddp_config=container.ddp, data_parallel_random_init=False
        )
        build = builder_for(args, cfg_container=container, model_provider=None, model_type=None)
    else:
        provider, kind = example.model_provider, example.ModelType.encoder_or_decoder
        model = training.get_model(provider, kind)
        build = builder_for(args, cfg_container=None, model_provider=provider, model_type=kind)
    session.prepare_runner(model, build)
    if args.overlap_grad_reduce:
        model[0].config.no_sync_func = [chunk.no_sync for chunk in model] if len(model) > 1 else model[0].no_sync
    return session, model, example.forward_step


def _start_megatron() -> Any:
    """Read sys.argv and set up home's groups; Megatron's argument namespace."""
    from megatron.training import get_args, training

    defaults = {"tokenizer_type": "NullTokenizer"}
    if RELEASE >= (0, 18):
        from megatron.training.arguments import parse_and_validate_args

        parse_and_validate_args(args_defaults=defaults)
        training.initialize_megatron()
    else:
        training.initialize_megatron(args_defaults=defaults)
    return get_args()


def home_on_the_fake_backend(home: Strategy, *, rank: int) -> tuple[GroupPool, Any]:
    """The pool and the ParallelStates of a job on one of its ranks, with home's groups as Megatron makes them.

    In a process without a process group. Groups have members and send nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hotspa_megatron.hooks import cpu

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=home.world_size)
    cpu.install()
    from megatron.core import parallel_state

    from hotspa_megatron.hooks.parallel_state import ParallelStates, recording_groups

    args = types.SimpleNamespace(
        pipeline_model_parallel_comm_backend=None,
        distributed_timeout_minutes=10,
        nccl_communicator_config_path=None,
        sequence_parallel=False,
        tensor_model_parallel_size=home.tp,
        pipeline_model_parallel_size=home.pp,
        context_parallel_size=home.cp,
        data_parallel_size=home.dp,
    )
    pool = GroupPool()
    with recording_groups(pool):
        parallel_state.initialize_model_parallel(
            home.tp, home.pp, None, context_parallel_size=home.cp, create_gloo_process_groups=False
        )
    return pool, ParallelStates(home, args, pool)


def arguments_of(mix: Mix) -> list[str]:
    tp, cp, pp = mix.home
    text = f"""
        --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
        --num-query-groups 2 --swiglu --position-embedding-type rope --normalization RMSNorm --disable-bias-linear
        --seq-length {SEQ_LENGTH} --max-position-embeddings {SEQ_LENGTH} --vocab-size {VOCAB}
        --make-vocab-size-divisible-by 8 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3
        --eval-interval 10 --hidden-dropout 0 --attention-dropout 0 --tensor-model-parallel-size {tp}
        --context-parallel-size {cp} --pipeline-model-parallel-size {pp} --transformer-impl local
        --attention-backend unfused --distributed-backend gloo --no-gradient-accumulation-fusion
        --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
        --no-bias-dropout-fusion --no-rope-fusion --no-check-for-nan-in-loss-and-grad --mock-data
    """.split()
    flags = list(mix.flags)
    if "--add-qkv-bias" in flags:
        text.remove("--disable-bias-linear")
    return text + flags


def example_script() -> Any:
    """The release's small training script as a module: its forward_step is what a user would have written."""
    specification = importlib.util.spec_from_file_location("pretrain_small", SCRIPT)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class Indexed:
    """Megatron's indexed dataset, in memory."""

    def __init__(self, documents: list[np.ndarray]) -> None:
        self._documents = documents

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        end = None if length is None else offset + length
        return self._documents[index][offset:end]


def document(step: int, index: int, length: int) -> np.ndarray:
    return np.random.default_rng([step, index]).integers(0, VOCAB, length)


@contextmanager
def double_precision() -> Iterator[None]:
    """Lift Megatron's casts of logits and losses to single precision, where they are double."""
    cast, default = torch.Tensor.float, torch.get_default_dtype()

    def keep_double(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self if self.dtype is torch.float64 else cast(self, *args, **kwargs)

    torch.Tensor.float = keep_double  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.Tensor.float = cast  # type: ignore[method-assign]
        torch.set_default_dtype(default)


@contextmanager
def single_precision() -> Iterator[None]:
    yield


def region(start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(low, low + size) for low, size in zip(start, shape, strict=True))


def step_of(session: Any, documents: list[np.ndarray]) -> tuple[Any, Any]:
    """(loader, step) of one mini-batch that holds exactly these documents."""
    from hotspa_megatron.hooks.data import StepBatch, StepLoader
    from hotspa_megatron.hooks.samples import Corpus, Documents, Source

    lengths = np.array([len(each) for each in documents])
    corpus = Corpus((Source(Indexed(documents), np.arange(len(documents)), lengths, -1),), (1.0,), None)
    samples = Documents(corpus, seed=1, seq_length=SEQ_LENGTH, overlong="split")
    loader = StepLoader(samples, session.planner, position=lambda: (0, len(documents)))
    return loader, loader.step(StepBatch(0, len(documents)))
