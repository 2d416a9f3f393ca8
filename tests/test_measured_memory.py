"""The memory model against what ranks really hold at their fullest: every storage counted while the real step runs.

Four ranks on gloo run steps of full micro-batches under home alone. Compared on the fullest rank: everything (parameters,
gradients and what the step adds), and what the step adds alone, which is what the model has to estimate.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from hotspa_megatron.hooks import arguments
from hotspa_megatron.planning.execution import Execution
from hotspa_megatron.planning.hardware import load_hardware
from hotspa_megatron.planning.memory_model import MemoryModel
from hotspa_megatron.strategy import Strategy
from tests.job import SEQ_LENGTH, Mix, document, single_precision, start, step_of
from tests.live_bytes import LiveBytes, resident, unwatched
from tests.spawn import run_ranks
from tests.training import import_megatron

TOKENS = 1024
"""Of a micro-batch at most, over all context-parallel ranks: 16 sequences of --seq-length."""
ALLOWED = 0.10
MODEL = (
    *("--hidden-size", "64", "--ffn-hidden-size", "192", "--num-layers", "8", "--num-attention-heads", "8"),
    *("--num-query-groups", "4", "--vocab-size", "1000", "--untie-embeddings-and-output-weights"),
)
SP = ("--sequence-parallel",)
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
HALF = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "4")
VIRTUAL = ("--num-virtual-stages-per-pipeline-rank", "2")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A home as (tp, cp, pp), what it recomputes in Megatron's flags, and the share of layers that this is."""

    home: tuple[int, int, int]
    flags: tuple[str, ...] = ()
    share: float = 0.0

    def __str__(self) -> str:
        return f"tp{self.home[0]}-cp{self.home[1]}-pp{self.home[2]} {' '.join(self.flags)}".strip()


FEW = (
    Layout((1, 1, 1)),
    Layout((2, 2, 1), (*SP, *FULL), 1.0),
    Layout((2, 1, 2), SP),
    Layout((1, 1, 2), (*VIRTUAL, *FULL), 1.0),
)
MORE = (
    Layout((1, 1, 1), FULL, 1.0),
    Layout((1, 1, 1), HALF, 0.5),
    Layout((2, 1, 1)),
    Layout((2, 1, 1), SP),
    Layout((2, 1, 1), (*SP, *FULL), 1.0),
    Layout((4, 1, 1), SP),
    Layout((1, 2, 1)),
    Layout((1, 4, 1)),
    Layout((1, 2, 1), FULL, 1.0),
    Layout((2, 2, 1), SP),
    Layout((1, 1, 2)),
    Layout((1, 1, 2), FULL, 1.0),
    Layout((1, 1, 4)),
    Layout((1, 2, 2)),
    Layout((1, 1, 2), VIRTUAL),
    Layout((2, 1, 2), (*SP, *VIRTUAL)),
    Layout((2, 1, 2), (*SP, *FULL), 1.0),
)


@pytest.mark.long
def test_modelled_memory_is_what_ranks_hold() -> None:
    for layout, measured in zip(FEW, _measured(FEW), strict=True):
        _check(layout, *measured)


@pytest.mark.long
def test_modelled_memory_is_what_ranks_hold_in_every_layout() -> None:
    for layout, measured in zip(MORE, _measured(MORE), strict=True):
        _check(layout, *measured)


def test_the_comparison_sees_recomputation_that_does_not_happen() -> None:
    """Negative control: modelled as if it recomputed, a layout is far off."""
    (measured,) = _measured(FEW[:1])
    with pytest.raises(AssertionError, match="is off by"):
        _check(dataclasses.replace(FEW[0], share=1.0), *measured)


def _measured(layouts: tuple[Layout, ...]) -> list[Any]:
    """Of each layout the model's shape, the largest micro-batch's tokens, and every rank's bytes before the step and the
    most that the step added."""
    by_rank = run_ranks(_bytes_of, 4, layouts, timeout=280, prepare=import_megatron)
    return [(*each[0][:2], [rank[2:] for rank in each]) for each in zip(*by_rank, strict=True)]


def _check(layout: Layout, shape: Any, tokens: int, ranks: list[tuple[int, int]]) -> None:
    home, memory = _home(layout), _memory(layout, shape)
    modelled = memory.held(Execution(strategy=home, recompute=layout.share), home, tokens)
    # Parameters and gradients to the byte on every stage, where no distributed optimizer pads its buffers.
    stages = [8 * memory.numels(home)[home.coordinates(rank).pp] for rank in range(len(ranks))]
    assert [fixed for fixed, _ in ranks] == stages, str(layout)
    fixed, added = max(ranks, key=sum)
    for what, measured, expected in (
        ("all", fixed + added, modelled.parameters + modelled.gradients + modelled.activations),
        ("added", max(added for _, added in ranks), modelled.activations),
    ):
        error = expected / measured - 1
        print(f"{layout}: {what} {measured / 2**20:.2f} MiB, modelled {expected / 2**20:.2f} ({error:+.1%})")
        assert abs(error) <= ALLOWED, f"{layout}: {what} is off by {error:+.1%}"


def _home(layout: Layout) -> Strategy:
    tp, cp, pp = layout.home
    return Strategy.from_world(4, tp=tp, cp=cp, pp=pp, vpp=2 if VIRTUAL[0] in layout.flags else 1)


def _memory(layout: Layout, shape: Any) -> MemoryModel:
    return MemoryModel(shape, load_hardware("cpu-gloo"), 4, home=_home(layout))


def _bytes_of(rank: int, world: int, layouts: tuple[Layout, ...]) -> list[tuple[Any, int, int, int]]:
    with single_precision():
        return [_bytes_of_one(layout, world) for layout in layouts]


def _bytes_of_one(layout: Layout, world: int) -> tuple[Any, int, int, int]:
    from hotspa_megatron.hooks import get_batch, install
    from hotspa_megatron.hooks.patching import Patches
    from hotspa_megatron.runtime import attention

    mix = Mix(layout.home, (), (*MODEL, *layout.flags), budget=TOKENS)
    session, model, forward_step = start(mix, world, torch.float32)
    runner, patches = session.runner, Patches()
    get_batch.serve(forward_step, patches, adapter=None)
    # Its tensor of no bytes that are ever written cannot be made while operators are watched.
    patches.wrap(attention, "causal_lower_right", unwatched)
    home = session.resolved.home.strategy
    # So many micro-batches that a pipeline is full; planning may make them smaller, for more of them to fill it.
    sequences = home.dp * max(2, 2 * home.pp) * TOKENS // SEQ_LENGTH
    loader, step = step_of(session, [document(0, index, SEQ_LENGTH + 1) for index in range(sequences)])
    known = [parameter for chunk in model for parameter in chunk.parameters()]
    known += [buffer.grad_data for chunk in model for buffer in chunk.buffers]
    with LiveBytes(known) as live:
        runner.run(forward_step_func=forward_step, step=step, loader=loader)
    patches.undo_all()
    install.uninstall()
    (segment,) = step.plan.segments
    tokens = max(sum(step.plan.lengths[i] for i in batch) for batches in segment.micro_batches for batch in batches)
    return arguments.shape_of(session.args), tokens, resident(known), live.peak
