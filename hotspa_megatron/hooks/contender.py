"""One rank of a training that is measured beside others: it takes a step when told to, and reports what the step took.

The training is the user's own script under the launcher's hooks, or stock Megatron's without the flag; only when it takes
its steps is decided from outside. What it sends to other ranks is counted where torch hands it to a backend.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import runpy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
import torch.distributed as dist

from hotspa_megatron.hooks import cpu, install, startup
from hotspa_megatron.hooks.forward_backward import StepRecord, StepRunner
from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.planning import step_plan

_OPERATIONS: Final = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
}
"""Methods by which torch hands an operation to a backend (those that this torch has), and what they are counted as."""

_WEIGHTS_SEED: Final = 1


class Channel(Protocol):
    """How the driver speaks to a rank."""

    def send(self, message: Any) -> None: ...

    def recv(self) -> Any: ...


@dataclass
class Traffic:
    """Operations by (kind, ranks taking part): [how many, bytes]. An operation's bytes are those of its whole tensor, which
    every rank ends with (a gather), starts from (a reduce-scatter) or both."""

    counts: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def add(self, kind: str, ranks: int, num_bytes: int) -> None:
        entry = self.counts.setdefault((kind, ranks), [0, 0])
        entry[0] += 1
        entry[1] += num_bytes


@dataclass(frozen=True, kw_only=True)
class StepTaken:
    """One step of one rank. ``moving_s``: seconds of switches and folds; ``loss``: None where this rank has none."""

    wall_s: float
    cpu_s: float
    loss: float | None
    grad_norm: float
    moving_s: float
    traffic: dict[tuple[str, int], list[int]]


class _Stop(BaseException):
    """Leaves the training loop through everything that catches exceptions."""


def prepare() -> None:
    """Import Megatron, on the CPU stand-in where there is no CUDA device; ranks forked from here then share it."""
    if cpu.needed():
        cpu.install()
    with cpu.quiet_imports():
        import megatron.training.training  # noqa: F401
    # What is there now stays: collecting it again in every rank would only take time out of their steps.
    gc.collect()
    gc.freeze()


def write_corpus(prefix: Path, lengths: Sequence[int], *, vocabulary: int, seed: int) -> None:
    """Write ``prefix.bin`` and ``prefix.idx``: a document of ``length`` input positions for each, of a learnable text."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    numbers = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in lengths:
        # Steps of a walk: the next token is near, so that there is something to learn. The last two ids do not occur: one
        # of them ends documents.
        walk = numbers.integers(vocabulary) + np.cumsum(numbers.integers(-6, 7, length + 1))
        builder.add_document(torch.from_numpy((walk % (vocabulary - 2)).astype(np.uint16)), [length + 1])
    builder.finalize(f"{prefix}.idx")


def train(
    script: Path,
    arguments: Sequence[str],
    channel: Channel,
    *,
    packed_attention: bool,
    unpacked: bool,
) -> None:
    """Run ``script``, taking each step when ``channel`` says "step", until it says "stop". Call ``prepare`` before.

    ``packed_attention``: use this package's attention without its flag, too. ``unpacked``: a micro-batch per sequence.
    """
    install.install()
    patches = Patches()
    if packed_attention:
        startup.replace_local_modules()
    if unpacked:
        patches.wrap(step_plan, "pack", _one_by_one)
    from megatron.core.transformer import transformer_layer
    from megatron.training import training

    patches.wrap(training, "setup_model_and_optimizer", _from_one_seed)
    patches.wrap(transformer_layer.TransformerLayer, "__init__", _from_its_number)
    traffic, records = _counting(patches), _recording(patches)
    patches.wrap(training, "train_step", functools.partial(_gated, channel=channel, traffic=traffic, records=records))
    before = sys.argv
    sys.argv = [str(script), *arguments]
    try:
        with contextlib.suppress(_Stop):
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
        patches.undo_all()


def _from_one_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Under --use-cpu-initialization weights then do not depend on the layout: Megatron warms its kernels up with random
    numbers, as many as the layout says, out of the generator that makes the weights."""

    @functools.wraps(original)
    def setup_model_and_optimizer(*positional: Any, **options: Any) -> Any:
        torch.manual_seed(_WEIGHTS_SEED)
        return original(*positional, **options)

    return setup_model_and_optimizer


def _from_its_number(original: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's weights then follow from its place in the model, not from the layers that its pipeline stage has before."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    @functools.wraps(original)
    def __init__(layer: Any, *positional: Any, **options: Any) -> None:
        given = inspect.signature(original).bind(layer, *positional, **options).arguments
        offset = get_transformer_layer_offset(given["config"], given.get("vp_stage"))
        torch.manual_seed(_WEIGHTS_SEED + offset + given.get("layer_number", 1))
        original(layer, *positional, **options)

    return __init__


def _gated(
    original: Callable[..., Any], *, channel: Channel, traffic: Traffic, records: list[StepRecord]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def train_step(*positional: Any, **options: Any) -> Any:
        gc.collect()
        channel.send("ready")
        if channel.recv() == "stop":
            raise _Stop
        traffic.counts.clear()
        records.clear()
        wall, cpu_seconds = time.perf_counter(), time.process_time()
        result = original(*positional, **options)
        wall, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu_seconds
        losses = [float(loss) for loss in result[0].values()]
        channel.send(
            StepTaken(
                wall_s=wall,
                cpu_s=cpu_seconds,
                loss=losses[0] if losses else None,
                grad_norm=float(result[5]),
                moving_s=sum(move.seconds for record in records for move in (*record.switches, *record.folds)),
                traffic={key: list(entry) for key, entry in traffic.counts.items()},
            )
        )
        return result

    return train_step


def _one_by_one(pack: Callable[..., Any]) -> Callable[..., Any]:
    """Packing that still deals out to replicas, but puts each sequence into a micro-batch of its own."""

    @functools.wraps(pack)
    def packed(*positional: Any, **options: Any) -> Any:
        return tuple(
            tuple((index,) for batch in batches for index in batch) for batches in pack(*positional, **options)
        )

    return packed


def _recording(patches: Patches) -> list[StepRecord]:
    """Where the records of the steps go that this package runs from now on."""
    records: list[StepRecord] = []

    def kept(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def run_and_keep(runner: StepRunner, **options: Any) -> Any:
            reports, record = run(runner, **options)
            records.append(record)
            return reports, record

        return run_and_keep

    patches.wrap(StepRunner, "run", kept)
    return records


def _counting(patches: Patches) -> Traffic:
    """Count, from now on, what this process hands to its backends."""
    traffic = Traffic()

    def counted(original: Callable[..., Any], *, kind: str) -> Callable[..., Any]:
        def call(group: Any, *positional: Any, **options: Any) -> Any:
            ranks = 2 if kind == "send" else group.size()
            # Of (output, input) the larger is the whole tensor; a list of outputs is one, too.
            sizes = [sum(t.numel() * t.element_size() for t in _tensors(each)) for each in positional]
            traffic.add(kind, ranks, max(sizes, default=0))
            return original(group, *positional, **options)

        return call

    for name, kind in _OPERATIONS.items():
        if hasattr(dist.ProcessGroup, name):
            patches.wrap(dist.ProcessGroup, name, functools.partial(counted, kind=kind))
    return traffic


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
