"""Small models laid over ranks, and what each rank must then hold: the oracle of the resharding tests.

The oracle cuts whole tensors with ``chunk`` and ``cat``, the way Megatron does; it shares no code with the layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.planning.param_layout import (
    Interval,
    Layout,
    RankPieces,
    flat_shards,
    gpt_parameters,
    model_layout,
)
from hotspa_megatron.strategy import Strategy, stage_layers

LAYERS = 4
ALIGNMENT = 8
"""Elements to which a distributed optimizer pads its buffer in these tests."""


def model_shape(*, tied: bool = False, gated: bool = True, layers: int = LAYERS, plain: bool = True) -> ModelShape:
    """A model whose every dim splits over tp 1, 2, 3, 4 and 6; two query groups, so that tp may exceed them.

    ``plain`` leaves out biases, qk norms and learned positions.
    """
    return ModelShape(
        num_layers=layers,
        hidden_size=12,
        ffn_hidden_size=24,
        num_attention_heads=12,
        num_query_groups=2,
        kv_channels=3,
        padded_vocab_size=24,
        seq_length=16,
        gated_linear_unit=gated,
        tied_embeddings=tied,
        rms_norm=plain,
        qk_layernorm=not plain,
        linear_bias=not plain,
        qkv_bias=not plain,
        learned_positions=None if plain else 10,
        sequence_parallel=True,
        layers_in_first_stage=None,
        layers_in_last_stage=None,
        parameter_bytes=2,
        gradient_bytes=4,
        distributed_optimizer=True,
    )


def layout(
    shape: ModelShape,
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    dp: int = 1,
    stages: Sequence[Sequence[int]] | None = None,
) -> Layout:
    """``shape`` under a strategy, on even stages unless ``stages`` says which layers each one holds."""
    strategy = Strategy(tp=tp, cp=cp, pp=pp, dp=dp)
    layers = stage_layers(shape.num_layers, pp) if stages is None else stages
    return model_layout(gpt_parameters(shape), strategy, layers, shape.tied_embeddings)


@st.composite
def layouts(draw: st.DrawFn, shape: ModelShape) -> Layout:
    """Any small strategy; any layers on any stage, as uneven and virtual pipelines have them."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 6]))
    pp = draw(st.integers(1, 3))
    replicas = draw(st.integers(1, 3))
    cp = draw(st.sampled_from([1, replicas]))
    stage_of = draw(st.lists(st.integers(0, pp - 1), min_size=shape.num_layers, max_size=shape.num_layers))
    stages = [[layer for layer, stage in enumerate(stage_of) if stage == index] for index in range(pp)]
    return layout(shape, tp=tp, cp=cp, pp=pp, dp=replicas // cp, stages=stages)


def optimizer_intervals(of: Layout) -> dict[int, dict[int, list[Interval]]]:
    """Shards as a distributed optimizer makes them: equal ranges of the flat buffer of each (tp, pp) coordinate.

    Parameters lie in reverse order, as in Megatron's buffer; ranges cross parameters and rows.
    """
    strategy = of.strategy
    intervals: dict[int, dict[int, list[Interval]]] = {}
    for rank in range(of.world_size):
        at = strategy.coordinates(rank)
        shards = strategy.dp * strategy.cp
        size = math.ceil(of.local_numel(rank) / (shards * ALIGNMENT)) * ALIGNMENT
        first = (at.dp * strategy.cp + at.cp) * size
        start = 0
        for parameter in reversed(range(len(of.parameters))):
            if not of.holds(parameter, rank):
                continue
            numel = math.prod(of.local_shape(parameter, rank))
            low, high = max(first - start, 0), min(first + size - start, numel)
            if low < high:
                intervals.setdefault(rank, {})[parameter] = [(low, high)]
            start += numel
    return intervals


def optimizer_shards(of: Layout) -> RankPieces:
    return flat_shards(of, optimizer_intervals(of))


def full_tensors(of: Layout, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """The whole model's parameters, filled with integers that bf16 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-256, 257, parameter.shape, generator=generator).to(dtype) for parameter in of.parameters]


def expected(full: Sequence[torch.Tensor], of: Layout, rank: int) -> dict[int, torch.Tensor]:
    """What ``rank`` must hold, by parameter index: copies, cut from the whole tensors."""
    at = of.strategy.coordinates(rank)
    held = {}
    for index, parameter in enumerate(of.parameters):
        if not of.holds(index, rank):
            continue
        dim = parameter.split_dim
        if dim is None:
            held[index] = full[index].clone()
            continue
        blocks = full[index].chunk(parameter.split_stride, dim)
        held[index] = torch.cat([block.chunk(of.strategy.tp, dim)[at.tp] for block in blocks], dim)
    return held


def filled(of: Layout, rank: int, value: float, dtype: torch.dtype = torch.float32) -> dict[int, torch.Tensor]:
    """Local tensors of ``rank``, all of one value."""
    held = (index for index in range(len(of.parameters)) if of.holds(index, rank))
    return {index: torch.full(of.local_shape(index, rank), value, dtype=dtype) for index in held}
