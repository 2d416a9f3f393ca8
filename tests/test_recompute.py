"""Recomputation per strategy: each segment's backward passes compute anew what its entry says, and nothing stays switched.

That gradients stay exact under it is checked in test_gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hotspa_megatron.planning.execution import Recompute
from tests.job import Mix, document, double_precision, start, step_of
from tests.spawn import run_ranks
from tests.training import import_megatron

LAYERS = 4
LENGTHS = (5, 6, 7, 12, 13, 14, 25, 26, 27, 40, 41, 42)
SELECTIVE = "--recompute-activations"
FULL = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "1")
GUESTS_AND_SIBLING = (
    (8, 1, 1, 1, "recompute: none"),
    (16, 1, 1, 1, "recompute: selective"),
    (32, 2, 1, 1, "recompute: full"),
)
SIBLINGS = ((8, 2, 1, 1, "recompute: none"), (16, 2, 1, 1, "recompute: full, recompute_layers: 3"), (32, 2, 1, 1))


@pytest.mark.parametrize(
    ("strategies", "flags", "expected"),
    [
        (GUESTS_AND_SIBLING, (), ((0, 0), (0, LAYERS), (LAYERS, LAYERS), (0, 0))),
        (GUESTS_AND_SIBLING, (SELECTIVE,), ((0, 0), (0, LAYERS), (LAYERS, LAYERS), (0, LAYERS))),
        (SIBLINGS, FULL, ((0, 0), (3, 3), (1, 1), (1, 1))),
    ],
    ids=["home_none", "home_selective", "home_full"],
)
def test_every_segment_recomputes_what_its_entry_says(
    strategies: tuple[tuple[int, int, int, int, str], ...],
    flags: tuple[str, ...],
    expected: tuple[tuple[int, int], ...],
) -> None:
    """Of each group: layers, and core attentions, that run once more per micro-batch; an entry without the key as home."""
    mix = Mix((2, 1, 1), strategies, flags)
    for again, switched in run_ranks(_computed_anew, 2, mix, timeout=120, prepare=import_megatron):
        assert again == dict(enumerate(expected))
        assert switched == []


def _computed_anew(rank: int, world: int, mix: Mix) -> tuple[dict[int, tuple[int, int]], list[str]]:
    """By group, runs of layers and of core attention per micro-batch beyond the first; and what differs after the step."""
    with double_precision():
        return _counted(mix, world)


def _counted(mix: Mix, world: int) -> tuple[dict[int, tuple[int, int]], list[str]]:
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from hotspa_megatron.hooks import forward_backward, get_batch, install
    from hotspa_megatron.hooks.model import chunks_of
    from hotspa_megatron.hooks.patching import Patches
    from hotspa_megatron.runtime.attention import PackedDotProductAttention

    session, model, forward_step = start(mix, world, torch.float64)
    runner, patches = session.runner, Patches()
    runs: Counter[tuple[str, int]] = Counter()
    group = -1

    def counting(name: str, original: Any) -> Any:
        def forward(self: Any, *args: Any, **options: Any) -> Any:
            runs[name, group] += 1
            return original(self, *args, **options)

        return forward

    patches.wrap(TransformerLayer, "forward", lambda original: counting("layer", original))
    patches.wrap(PackedDotProductAttention, "forward", lambda original: counting("attention", original))
    segment_of = forward_backward.StepRunner._segment

    @contextmanager
    def noting(self: Any, segment: Any, *rest: Any) -> Iterator[None]:
        nonlocal group
        group = segment.group
        with segment_of(self, segment, *rest):
            yield

    patches.set(forward_backward.StepRunner, "_segment", noting)
    get_batch.serve(forward_step, patches, adapter=None)
    models = [model, *(guest.model for guest in runner._guests.values())]
    before = [_switches(chunk) for each in models for chunk in chunks_of(each)]
    loader, step = step_of(session, [document(0, index, length) for index, length in enumerate(LENGTHS)])
    runner.run(forward_step_func=forward_step, step=step, loader=loader)
    after = [_switches(chunk) for each in models for chunk in chunks_of(each)]
    rank = torch.distributed.get_rank()
    counts = {
        segment.group: len(segment.micro_batches[segment.strategy.coordinates(rank).dp])
        for segment in step.plan.segments
    }
    again = {
        at: (runs["layer", at] // count - LAYERS, runs["attention", at] // count - LAYERS)
        for at, count in sorted(counts.items())
    }
    patches.undo_all()
    install.uninstall()
    return again, [name for one, two in zip(before, after, strict=True) for name in one if one[name] != two[name]]


def _switches(chunk: Any) -> dict[str, Any]:
    """Everything of a model that says what is recomputed."""
    found = {name: value for name, value in vars(chunk.config).items() if "recompute" in name}
    for name, module in chunk.named_modules():
        found |= {
            f"{name}.{key}": value for key, value in vars(module).items() if "recompute" in key or "checkpoint" in key
        }
    return found


@pytest.mark.parametrize(
    ("share", "layers", "expected"),
    [(0.0, 8, "none"), (0.5, 8, "full of 4 layers"), (0.5, 1, "full"), (1.0, 8, "full"), (0.3, 8, "full of 3 layers")],
)
def test_a_share_of_layers_becomes_no_less_than_it(share: float, layers: int, expected: str) -> None:
    assert str(Recompute.of_share(share, layers)) == expected
