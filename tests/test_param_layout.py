"""Who holds which region: exact cover under any strategy, Megatron's own names and shapes, flat optimizer shards."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.planning.param_layout import (
    Box,
    ExpertAxes,
    Layer,
    Layout,
    LogicalParameter,
    Piece,
    flat_boxes,
    flat_shards,
    gpt_parameters,
    model_layout,
    shard_pieces,
)
from hotspa_megatron.strategy import Strategy, stage_layers
from tests.layouts import (
    layout,
    layouts,
    mixed_layouts,
    mixed_parameters,
    model_shape,
    optimizer_shards,
)
from tests.spawn import run_ranks
from tests.training import import_megatron

quick = settings(max_examples=40, deadline=None)
MIXED = mixed_parameters()


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(box.lo, box.hi, strict=True))


def _index(of: Layout, name: str) -> int:
    return [parameter.name for parameter in of.parameters].index(name)


def test_box_arithmetic() -> None:
    box = Box((0, 2), (4, 6))
    assert box.shape == (4, 4) and box.numel == 16
    assert box.intersect(Box((3, 0), (9, 3))) == Box((3, 2), (4, 3))
    assert box.intersect(Box((4, 2), (5, 6))) is None
    assert box.shift((1, -2)) == Box((1, 0), (5, 4))
    assert box.contains(Box((1, 2), (2, 6))) and not box.contains(Box((1, 2), (5, 6)))
    assert Box((), ()).numel == 1 and Box((), ()).intersect(Box((), ())) == Box((), ())


@quick
@given(st.data())
def test_flat_intervals_are_cut_into_few_boxes_that_cover_them(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    numel = math.prod(shape)
    first = data.draw(st.integers(0, numel))
    last = data.draw(st.integers(first, numel))
    boxes = flat_boxes(shape, first, last)
    covered = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        covered[_slices(box)] += 1
    assert covered.flatten().tolist() == [int(first <= index < last) for index in range(numel)]
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@quick
@given(st.data(), st.booleans())
def test_every_element_is_held_as_often_as_the_strategy_says(data: st.DataObject, tied: bool) -> None:
    of = data.draw(layouts(model_shape(tied=tied, plain=False)))
    strategy = of.strategy
    for index, parameter in enumerate(of.parameters):
        held = torch.zeros(parameter.shape, dtype=torch.int64)
        for holding in of.holdings(index):
            held[_slices(holding.box)] += len(holding.ranks)
        copies = 2 if tied and strategy.pp > 1 and parameter.name == "embedding.word_embeddings.weight" else 1
        times = copies * strategy.cp * strategy.dp * (strategy.tp if parameter.split_dim is None else 1)
        assert bool((held == times).all()), parameter.name


@quick
@given(mixed_layouts(MIXED))
def test_every_element_of_an_expert_is_held_by_its_own_ranks_alone(of: Layout) -> None:
    assert of.experts is not None
    stage = of.world_size // of.strategy.pp
    for index, parameter in enumerate(of.parameters):
        if parameter.expert is None:
            continue
        held = np.zeros(parameter.shape, np.int64)
        for holding in of.holdings(index):
            held[_slices(holding.box)] += len(holding.ranks)
        times = stage // (of.experts.ep * (1 if parameter.split_dim is None else of.experts.tp))
        assert (held == times).all(), parameter.name


@quick
@given(st.one_of(layouts(model_shape(tied=True)), mixed_layouts(MIXED)))
def test_pieces_fill_each_local_tensor_once_and_agree_with_the_holdings(of: Layout) -> None:
    by_rank: dict[int, list[Piece]] = {rank: [] for rank in range(of.world_size)}
    for index in range(len(of.parameters)):
        for box, start, ranks in of.holdings(index):
            for rank in ranks:
                by_rank[rank].append(Piece(index, box, start))
    for rank in range(of.world_size):
        pieces = of.pieces(rank)
        assert list(pieces) == sorted(pieces) == sorted(by_rank[rank])
        local = {
            index: torch.zeros(of.local_shape(index, rank), dtype=torch.int64)
            for index in range(len(of.parameters))
            if of.holds(index, rank)
        }
        for piece in pieces:
            local[piece.parameter][_slices(Box((0,) * len(piece.start), piece.box.shape).shift(piece.start))] += 1
        assert all(bool((tensor == 1).all()) for tensor in local.values())
        assert of.local_numel(rank) == sum(tensor.numel() for tensor in local.values())


def test_gated_fc1_holds_its_part_of_the_gate_and_of_the_up_half() -> None:
    of = layout(model_shape(), tp=3)
    fc1 = _index(of, "decoder.layers.0.mlp.linear_fc1.weight")
    assert [piece for piece in of.pieces(1) if piece.parameter == fc1] == [
        Piece(fc1, Box((8, 0), (16, 12)), (0, 0)),
        Piece(fc1, Box((32, 0), (40, 12)), (8, 0)),
    ]


def test_qkv_is_contiguous_rows_even_where_tp_exceeds_the_query_groups() -> None:
    of = layout(model_shape(), tp=4)
    qkv = _index(of, "decoder.layers.1.self_attention.linear_qkv.weight")
    assert [piece for piece in of.pieces(2) if piece.parameter == qkv] == [Piece(qkv, Box((24, 0), (36, 12)), (0, 0))]


def test_tied_embeddings_are_on_both_ends_of_a_pipeline_and_once_without_one() -> None:
    shape = model_shape(tied=True)
    for pp, ranks in ((1, [0]), (2, [0, 1]), (4, [0, 3])):
        of = layout(shape, pp=pp)
        assert [list(holding.ranks) for holding in of.holdings(0)] == [ranks]
        assert not any(parameter.name == "output_layer.weight" for parameter in of.parameters)


def test_unequal_blocks_are_split_one_by_one() -> None:
    parameter = LogicalParameter(name="w", shape=(56,), place=Layer(0), split_dim=0, split_sizes=(32, 16, 8))
    of = model_layout([parameter], Strategy(tp=4, cp=1, pp=1, dp=1), [[0]], tied=False)
    assert of.pieces(1) == (
        Piece(0, Box((8,), (16,)), (0,)),
        Piece(0, Box((36,), (40,)), (8,)),
        Piece(0, Box((50,), (52,)), (12,)),
    )
    assert of.local_shape(0, 1) == (14,)


def test_experts_lie_in_runs_on_their_own_grid() -> None:
    parameters = [
        LogicalParameter(name=f"{expert}.{kind}", shape=(8,), place=Layer(layer), split_dim=dim, expert=expert)
        for layer in (0, 1)
        for expert in range(4)
        for kind, dim in ((f"weight.{layer}", 0), (f"bias.{layer}", None))
    ]
    axes = ExpertAxes(experts=4, ep=2, tp=2)
    of = model_layout(parameters, Strategy(tp=4, cp=1, pp=2, dp=2), [[0], [1]], tied=False, experts=axes)
    held = {parameter.name: of.holdings(index) for index, parameter in enumerate(parameters)}
    # Eight ranks per stage: expert tp fastest, then ep, then replicas.
    assert [list(holding.ranks) for holding in held["0.weight.0"]] == [[0, 4], [1, 5]]
    assert [list(holding.ranks) for holding in held["1.weight.0"]] == [[0, 4], [1, 5]]
    assert [list(holding.ranks) for holding in held["2.weight.0"]] == [[2, 6], [3, 7]]
    assert [list(holding.ranks) for holding in held["3.weight.1"]] == [[10, 14], [11, 15]]
    assert [list(holding.ranks) for holding in held["3.bias.1"]] == [[10, 11, 14, 15]]
    assert of.local_shape(0, 5) == (4,)
    with pytest.raises(ValueError, match=r"rank 2 holds nothing of 0\.weight\.0"):
        of.local_shape(0, 2)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
@pytest.mark.parametrize(("tp", "etp", "ep", "pp"), [(4, 2, 3, 2), (2, 1, 4, 1), (1, 3, 2, 2), (4, 4, 1, 1)])
def test_experts_lie_where_megatrons_own_rank_generator_puts_them(tp: int, etp: int, ep: int, pp: int) -> None:
    world = 12 * tp * pp
    (groups,) = run_ranks(_expert_groups, 1, etp, ep, pp, world, timeout=120, prepare=import_megatron)
    parameters = [
        LogicalParameter(name=str(expert), shape=(12,), place=Layer(0), split_dim=0, expert=expert)
        for expert in range(2 * ep)
    ]
    strategy = Strategy.from_world(world, tp=tp, cp=1, pp=pp)
    layers = [[0], *([stage] for stage in range(1, pp))]
    of = model_layout(parameters, strategy, layers, tied=False, experts=ExpertAxes(experts=2 * ep, ep=ep, tp=etp))
    for tp_group, ep_group, dp_group in zip(*(groups[axis] for axis in ("tp", "ep", "dp")), strict=True):
        # One rank of each axis is common to its three groups.
        (rank,) = set(tp_group) & set(ep_group) & set(dp_group)
        if rank >= world // pp:
            continue  # layer 0 is on the first stage
        held = list(of.pieces(rank))
        expert = 2 * ep_group.index(rank)
        part = 12 // etp
        low = part * tp_group.index(rank)
        assert held == [Piece(index, Box((low,), (low + part,)), (0,)) for index in (expert, expert + 1)]
        assert list(of.holdings(expert)[tp_group.index(rank)].ranks) == dp_group


def _expert_groups(rank: int, world_size: int, etp: int, ep: int, pp: int, world: int) -> dict[str, list[list[int]]]:
    """For every rank, its groups on the experts' grid."""
    from megatron.core.parallel_state import RankGenerator

    generator = RankGenerator(tp=etp, ep=ep, dp=world // (etp * ep * pp), pp=pp, cp=1, order="tp-cp-ep-dp-pp")
    return {
        axis: [next(group for group in generator.get_ranks(axis) if of in group) for of in range(world)]
        for axis in ("tp", "ep", "dp")
    }


def test_uneven_stages_place_layers_by_number() -> None:
    of = layout(model_shape(layers=5), pp=3, stages=stage_layers(5, 3, 2, 1))
    norm = "decoder.layers.{}.input_layernorm.weight"
    where = [list(of.holdings(_index(of, norm.format(number)))[0].ranks) for number in range(5)]
    assert where == [[0], [0], [1], [1], [2]]
    with pytest.raises(ValueError, match=r"rank 0 holds nothing of decoder\.layers\.4"):
        of.local_shape(_index(of, norm.format(4)), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 5}, r"embedding\.word_embeddings\.weight: dim 0 of size 24 does not split into 1 x tp 5 equal parts"),
        ({"pp": 2, "stages": [[0, 1, 2, 3]]}, "layers are given for 1 stages, but tp1-cp1-pp2-dp1 has 2"),
        ({"pp": 2, "stages": [[0, 1], [1, 2, 3]]}, "layer 1 is on stage 0 and on stage 1"),
        ({"pp": 2, "stages": [[0, 1], [3]]}, r"decoder\.layers\.2\.input_layernorm\.weight: layer 2 is on no pipeline"),
    ],
)
def test_impossible_layouts_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout(model_shape(), **change)


def test_contradictory_parameters_are_refused() -> None:
    untied = gpt_parameters(model_shape())
    strategy = Strategy(tp=1, cp=1, pp=1, dp=1)
    with pytest.raises(ValueError, match=r"output_layer\.weight is given, but tied embeddings"):
        model_layout(untied, strategy, [range(4)], tied=True)
    with pytest.raises(ValueError, match=r"embedding\.word_embeddings\.weight is given twice"):
        model_layout((*untied, untied[0]), strategy, [range(4)], tied=False)
    with pytest.raises(ValueError, match=r"w: split dim 1 is outside shape \(3,\)"):
        LogicalParameter(name="w", shape=(3,), place=Layer(0), split_dim=1)
    with pytest.raises(ValueError, match="w: split stride 0"):
        LogicalParameter(name="w", shape=(3,), place=Layer(0), split_dim=0, split_stride=0)
    with pytest.raises(ValueError, match=r"w: split sizes \(1, 1\) do not add up to dim 0 of \(3,\)"):
        LogicalParameter(name="w", shape=(3,), place=Layer(0), split_dim=0, split_sizes=(1, 1))
    with pytest.raises(ValueError, match=r"w: split sizes \(1, 2\) need a split dim and no split stride"):
        LogicalParameter(name="w", shape=(3,), place=Layer(0), split_sizes=(1, 2))
    blocks = LogicalParameter(name="w", shape=(6,), place=Layer(0), split_dim=0, split_sizes=(4, 2))
    with pytest.raises(ValueError, match="w: dim 0 of size 6 does not split into blocks of 4, 2 x tp 4 equal parts"):
        model_layout([blocks], Strategy(tp=4, cp=1, pp=1, dp=1), [[0]], tied=False)


def test_impossible_grids_of_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="experts 4, ep 0 and expert tp 1 must be at least 1"):
        ExpertAxes(experts=4, ep=0)
    with pytest.raises(ValueError, match="4 experts do not divide over ep 3"):
        ExpertAxes(experts=4, ep=3)
    strategy = Strategy(tp=2, cp=1, pp=1, dp=3)
    weight = LogicalParameter(name="w", shape=(6,), place=Layer(0), split_dim=0, expert=1)
    for axes, message in (
        (None, "w belongs to expert 1, but no expert axes are given"),
        (ExpertAxes(experts=1), "expert 1 is not one of 1"),
        (ExpertAxes(experts=4, tp=4), "w: dim 0 of size 6 does not split into 1 x expert tp 4 equal parts"),
        (
            ExpertAxes(experts=4, ep=4),
            r"the 6 ranks of a stage of tp2-cp1-pp1-dp3 do not divide over ep 4 x expert tp 1",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model_layout([weight], strategy, [[0]], tied=False, experts=axes)


@quick
@given(st.data())
def test_optimizer_shards_partition_what_their_ranks_hold(data: st.DataObject) -> None:
    of = data.draw(layouts(model_shape()))
    shards = optimizer_shards(of)
    strategy = of.strategy
    for index, parameter in enumerate(of.parameters):
        held = torch.zeros(parameter.shape, dtype=torch.int64)
        for holding in shards.holdings(index):
            held[_slices(holding.box)] += len(holding.ranks)
        assert bool((held == (strategy.tp if parameter.split_dim is None else 1)).all()), parameter.name
    for rank in range(of.world_size):
        whole = {piece.parameter: piece for piece in of.pieces(rank)}
        for piece in shards.pieces(rank):
            shape = of.local_shape(piece.parameter, rank)
            assert Box((0,) * len(shape), shape).contains(Box(piece.start, piece.start).shift((0,) * len(shape)))
            if of.parameters[piece.parameter].split_stride == 1:
                # One whole piece: local and global differ by one offset, which a shard must keep.
                offset = [
                    a - b for a, b in zip(whole[piece.parameter].box.lo, whole[piece.parameter].start, strict=True)
                ]
                assert [a - b for a, b in zip(piece.box.lo, piece.start, strict=True)] == offset


def test_a_shard_that_crosses_the_gate_half_has_a_piece_in_each() -> None:
    of = layout(model_shape(), tp=3)
    fc1 = _index(of, "decoder.layers.0.mlp.linear_fc1.weight")
    # Local fc1 is (16, 12): rows 0-7 gate, rows 8-15 up. The interval starts in row 7 at column 6 and ends in row 9.
    assert shard_pieces(of, 0, {fc1: [(7 * 12 + 6, 9 * 12)]}) == (
        Piece(fc1, Box((7, 6), (8, 12)), (7, 6)),
        Piece(fc1, Box((24, 0), (25, 12)), (8, 0)),
    )


def test_bad_shards_are_refused_by_name() -> None:
    of = layout(model_shape())
    name = r"embedding\.word_embeddings\.weight"
    with pytest.raises(ValueError, match=rf"{name}: \[200, 300\) is outside rank 0's 288 elements"):
        flat_shards(of, {0: {0: [(200, 300)]}})
    with pytest.raises(ValueError, match=rf"{name}: intervals of rank 0 overlap at element 15"):
        flat_shards(of, {0: {0: [(15, 30), (10, 20)]}})


def _model_parameters(
    rank: int, world_size: int, shapes: list[ModelShape], sizes: list[tuple[int, int]]
) -> list[dict[str, tuple[tuple[int, ...], int | None, int]]]:
    """Names, local shapes and split attributes of real GPTModels, with global layer numbers, for each (tp, pp)."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    found = []
    for tp, pp in sizes:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        for shape in shapes:
            first = parallel_state.get_pipeline_model_parallel_rank() * (shape.num_layers // pp)
            named = {}
            for name, parameter in _gpt_model(shape, tp=tp, pp=pp).named_parameters():
                parts = name.split(".")
                if parts[:2] == ["decoder", "layers"]:
                    parts[2] = str(int(parts[2]) + first)
                split = getattr(parameter, "tensor_model_parallel", False)
                named[".".join(parts)] = (
                    tuple(parameter.shape),
                    getattr(parameter, "partition_dim", None) if split else None,
                    getattr(parameter, "partition_stride", 1) if split else 1,
                )
            found.append(named)
        parallel_state.destroy_model_parallel()
    return found


def _gpt_model(shape: ModelShape, *, tp: int, pp: int) -> torch.nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_query_groups,
        kv_channels=shape.kv_channels,
        gated_linear_unit=shape.gated_linear_unit,
        add_bias_linear=shape.linear_bias,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_layernorm,
        normalization="RMSNorm" if shape.rms_norm else "LayerNorm",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            qk_layernorm=shape.qk_layernorm, normalization=config.normalization
        ),
        vocab_size=shape.padded_vocab_size,
        max_sequence_length=shape.learned_positions or shape.seq_length,
        share_embeddings_and_output_weights=shape.tied_embeddings,
        position_embedding_type="rope" if shape.learned_positions is None else "learned_absolute",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    return model


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_names_shapes_and_splits_are_those_of_megatrons_own_model() -> None:
    shapes = [
        model_shape(gated=True, plain=True, tied=False, layers=2),
        model_shape(gated=False, plain=False, tied=True, layers=2),
        model_shape(gated=True, plain=False, tied=True, layers=2),
    ]
    sizes = [(2, 1), (1, 2)]
    cases = [layout(shape, tp=tp, pp=pp) for tp, pp in sizes for shape in shapes]
    for rank, models in enumerate(run_ranks(_model_parameters, 2, shapes, sizes, timeout=120, prepare=import_megatron)):
        for of, found in zip(cases, models, strict=True):
            here = {}
            for index, parameter in enumerate(of.parameters):
                if of.holds(index, rank):
                    copy = index == 0 and of.strategy.coordinates(rank).pp == 1
                    split = parameter.split_dim, parameter.split_stride
                    name = "output_layer.weight" if copy else parameter.name
                    here[name] = (of.local_shape(index, rank), *split)
            assert here == found
