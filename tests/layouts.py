"""Small models laid over ranks, and what each rank must then hold: the oracle of the resharding tests.

The oracle cuts whole tensors with ``chunk`` and ``cat``, the way Megatron does; it shares no code with the layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.planning.param_layout import (
    ExpertAxes,
    Interval,
    Layer,
    Layout,
    LogicalParameter,
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


WIDE = 48
"""Elements that split over tp 1, 2, 3, 4, 6, 8, 12 and 16."""
EXPERTS = 6


def mixed_parameters(layers: int = 3) -> tuple[LogicalParameter, ...]:
    """A model of few elements that has every kind of tensor there is, with odd sizes wherever nothing splits."""
    parameters = [
        LogicalParameter(name="embedding.word_embeddings.weight", shape=(WIDE, 5), place="embedding", split_dim=0),
        LogicalParameter(name="decoder.final_layernorm.weight", shape=(7,), place="head"),
    ]
    for number in range(layers):
        place = Layer(number)
        kinds: dict[str, dict[str, Any]] = {
            "column": {"shape": (2 * WIDE, 3), "split_dim": 0},
            "row": {"shape": (3, WIDE), "split_dim": 1},
            "gated": {"shape": (2 * WIDE, 3), "split_dim": 0, "split_stride": 2},
            "fused": {"shape": (WIDE + 2 * WIDE + WIDE,), "split_dim": 0, "split_sizes": (WIDE, 2 * WIDE, WIDE)},
            "norm": {"shape": (7,)},
            "scale": {"shape": ()},
        }
        for expert in range(EXPERTS):
            kinds |= {
                f"experts.{expert}.gated": {
                    "shape": (2 * WIDE, 1),
                    "split_dim": 0,
                    "split_stride": 2,
                    "expert": expert,
                },
                f"experts.{expert}.bias": {"shape": (5,), "expert": expert},
            }
        parameters += [LogicalParameter(name=f"{number}.{kind}", place=place, **of) for kind, of in kinds.items()]
    return tuple(parameters)


@st.composite
def mixed_layouts(draw: st.DrawFn, parameters: tuple[LogicalParameter, ...], *, most_ranks: int = 32) -> Layout:
    """``parameters`` under any strategy of up to ``most_ranks``: wide tp, any layer on any stage, any grid of experts."""
    tp = draw(st.sampled_from([size for size in (1, 2, 3, 4, 6, 8, 12, 16) if size <= most_ranks]))
    pp = draw(st.integers(1, min(3, most_ranks // tp)))
    replicas = draw(st.integers(1, min(4, most_ranks // (tp * pp))))
    grids = [
        ExpertAxes(experts=EXPERTS, ep=ep, tp=etp)
        for ep in (1, 2, 3, 6)
        for etp in (1, 2, 3, 4)
        if tp * replicas % (ep * etp) == 0
    ]
    layers = sorted({p.place.number for p in parameters if isinstance(p.place, Layer)})
    stage_of = draw(st.lists(st.integers(0, pp - 1), min_size=len(layers), max_size=len(layers)))
    stages = [[layer for layer, stage in zip(layers, stage_of, strict=True) if stage == index] for index in range(pp)]
    strategy = Strategy(tp=tp, cp=1, pp=pp, dp=replicas)
    return model_layout(parameters, strategy, stages, draw(st.booleans()), draw(st.sampled_from(grids)))


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
    position = rank % (of.world_size // of.strategy.pp)
    held = {}
    for index, parameter in enumerate(of.parameters):
        if not of.holds(index, rank):
            continue
        dim, width = parameter.split_dim, of.strategy.tp
        if parameter.expert is not None:
            assert of.experts is not None
            width = of.experts.tp
        if dim is None:
            held[index] = full[index].clone()
            continue
        sizes = parameter.split_sizes or [parameter.shape[dim] // parameter.split_stride] * parameter.split_stride
        blocks = full[index].split(sizes, dim)
        held[index] = torch.cat([block.chunk(width, dim)[position % width] for block in blocks], dim)
    return held


def filled(of: Layout, rank: int, value: float, dtype: torch.dtype = torch.float32) -> dict[int, torch.Tensor]:
    """Local tensors of ``rank``, all of one value."""
    held = (index for index in range(len(of.parameters)) if of.holds(index, rank))
    return {index: torch.full(of.local_shape(index, rank), value, dtype=dtype) for index in held}
