"""Memory: parameters, gradients and optimizer state to the byte, activations by stage, refusals at the limit."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_megatron.config import SwitchConfig
from hotspa_megatron.planning import communicators, memory_model
from hotspa_megatron.planning.communicators import added_sizes, group_memory
from hotspa_megatron.planning.cost_model import CostModel
from hotspa_megatron.planning.execution import Execution, Recompute, legal_executions
from hotspa_megatron.planning.hardware import Hardware, load_hardware
from hotspa_megatron.planning.known_models import KNOWN_MODELS
from hotspa_megatron.planning.legality import tp_problem
from hotspa_megatron.planning.memory_model import MemoryModel
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.planning.param_layout import gpt_parameters
from hotspa_megatron.runtime.transport import GLOO_PACE, NCCL_PACE
from hotspa_megatron.strategy import Kind, Strategy
from tests.layouts import layout, model_shape

A800 = load_hardware("a800-80")
SHAPE = KNOWN_MODELS["llama-7b"]


def strategy(world: int, *, tp: int = 1, cp: int = 1, pp: int = 1, vpp: int = 1) -> Strategy:
    return Strategy.from_world(world, tp=tp, cp=cp, pp=pp, vpp=vpp)


def with_memory(usable_bytes: int) -> Hardware:
    """Exactly this much usable memory, for which it must be whole MiB."""
    mib, rest = divmod(usable_bytes, 2**20)
    assert rest == 0
    return replace(A800, memory_mib=mib + A800.reserved_mib + A800.margin_mib)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("axes", [{}, {"tp": 2}, {"pp": 2}, {"tp": 3, "pp": 2}, {"tp": 2, "pp": 4}, {"cp": 2, "pp": 4}])
def test_bytes_are_those_of_the_local_tensors(tied: bool, plain: bool, axes: dict[str, int]) -> None:
    shape = model_shape(tied=tied, plain=plain)
    world = math.prod(axes.values()) * 2
    of = layout(shape, **axes, dp=2)
    home = of.strategy
    memory = MemoryModel(shape, A800, world)
    for stage in range(home.pp):
        rank = home.rank(tp=home.tp - 1, cp=0, dp=1, pp=stage)
        held = [index for index in range(len(of.parameters)) if of.holds(index, rank)]
        numel = sum(math.prod(of.local_shape(index, rank)) for index in held)
        assert memory.numels(home)[stage] == numel
        assert memory.optimizer_shard(home, stage) == 12 * math.ceil(numel / (home.dp * home.cp))
    held_by_fullest = memory.held(Execution(strategy=home), home, 0)
    most = max(memory.numels(home))
    assert held_by_fullest.parameters == 2 * most and held_by_fullest.gradients == 4 * most


def test_ranks_together_hold_every_parameter_once_per_replica() -> None:
    memory = MemoryModel(SHAPE, A800, 16)
    whole = sum(math.prod(parameter.shape) for parameter in gpt_parameters(SHAPE))
    split = sum(math.prod(p.shape) for p in gpt_parameters(SHAPE) if p.split_dim is not None)
    for execution in legal_executions(SHAPE, 16, max_tp=8, recompute=(0.0,)):
        tp = execution.strategy.tp
        assert sum(memory.numels(execution.strategy)) * tp == split + (whole - split) * tp


@pytest.mark.parametrize("replicas", [9, 11, 13])
def test_shards_that_do_not_divide_hold_all_state_together(replicas: int) -> None:
    home, memory = strategy(replicas), MemoryModel(SHAPE, A800, replicas)
    (numel,), shard = memory.numels(home), memory.optimizer_shard(home, 0)
    assert numel % replicas and 12 * numel < replicas * shard < 12 * (numel + replicas)


def test_without_a_distributed_optimizer_every_rank_holds_all_state() -> None:
    shape = replace(SHAPE, distributed_optimizer=False)
    home = strategy(16, tp=4)
    memory = MemoryModel(shape, A800, 16)
    assert memory.optimizer_shard(home, 0) == 12 * memory.numels(home)[0]


def test_live_micro_batches_fall_from_stage_to_stage() -> None:
    shape = replace(model_shape(layers=8), sequence_parallel=False)
    memory = MemoryModel(shape, A800, 4)
    execution = Execution(strategy=strategy(4, pp=4))
    stages = [memory.activation_bytes(execution, stage) for stage in range(4)]
    head = 8 * shape.padded_vocab_size
    assert [each / (stages[3] - head) for each in (*stages[:3], stages[3] - head)] == pytest.approx([4, 3, 2, 1])
    interleaved = Execution(strategy=strategy(4, pp=4, vpp=2))
    # (2 * 3 + 4 + 1) chunks of half a stage.
    assert memory.activation_bytes(interleaved, 0) == pytest.approx(stages[0] / 4 * 5.5)


def test_a_guest_holds_its_own_storage_beside_homes() -> None:
    home, guest = strategy(16, tp=4), strategy(16, tp=2, pp=2)
    memory = MemoryModel(SHAPE, A800, 16)
    held = memory.held(Execution(strategy=guest), home, 4096)
    at_home = memory.held(Execution(strategy=home), home, 4096)
    assert held.home_resident == at_home.parameters + at_home.gradients + at_home.optimizer
    assert held.optimizer == 0 and held.communicators > 0 and at_home.home_resident == at_home.communicators == 0
    sibling = memory.held(Execution(strategy=strategy(16, tp=4, cp=2)), home, 4096)
    assert (sibling.parameters, sibling.optimizer, sibling.home_resident) == (at_home.parameters, at_home.optimizer, 0)


def test_communicators_that_strategies_add_count_together_and_once() -> None:
    home = strategy(32, tp=2, cp=8)
    siblings = [strategy(32, tp=2, cp=cp) for cp in (1, 2, 4)]
    shown = group_memory(home, [(each, Kind.SIBLING) for each in siblings])
    memory = MemoryModel(SHAPE, A800, 32)
    for index, each in enumerate([home, *siblings]):
        others = [*siblings[: index - 1], *siblings[index:]] if index else siblings
        held = memory.held(Execution(strategy=each), home, 4096, others)
        assert held.communicators == shown.added_mb * 2**20 == 5360 * 2**20
        assert held.total == held.parameters + held.gradients + held.optimizer + held.activations + held.communicators
    assert 0 < memory.held(Execution(strategy=siblings[1]), home, 0).communicators < shown.added_mb * 2**20
    assert memory.held(Execution(strategy=home), home, 4096).communicators == 0
    on_cpu = MemoryModel(SHAPE, load_hardware("cpu-gloo"), 32)
    assert on_cpu.held(Execution(strategy=home), home, 4096, siblings).communicators == 0


@st.composite
def strategies_of_16(draw: st.DrawFn) -> Strategy:
    tp, cp, pp = draw(
        st.sampled_from([each for each in itertools.product((1, 2, 4, 8), repeat=3) if math.prod(each) <= 16])
    )
    return strategy(16, tp=tp, cp=cp, pp=pp)


@settings(deadline=None)
@given(home=strategies_of_16(), others=st.lists(strategies_of_16(), max_size=4))
def test_no_rank_gets_more_communicators_than_the_first(home: Strategy, others: list[Strategy]) -> None:
    def groups(strategies: list[Strategy]) -> set[tuple[int, ...]]:
        return set().union(*communicators._by_axes(strategies).values())

    added = groups([home, *others]) - groups([home])
    per_rank = [sorted(len(group) for group in added if rank in group) for rank in range(16)]
    guests = any(not each.same_layout(home) for each in others)
    most = max(per_rank, key=lambda sizes: sum(544 if size == 2 else 688 for size in sizes))
    assert sorted([*most, 16] if guests else most) == list(added_sizes(home, others))


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize(
    ("home", "guest"),
    [
        (strategy(8, tp=4), strategy(8, tp=2)),
        (strategy(8, tp=8), strategy(8)),
        (strategy(8), strategy(8, tp=4)),
        (strategy(8), strategy(8, tp=2, pp=4)),
        (strategy(8, pp=4), strategy(8, tp=8)),
        (strategy(16, tp=8, pp=2), strategy(16, tp=2)),
        (strategy(16, tp=4, pp=2), strategy(16, tp=2, pp=2)),
    ],
)
def test_a_fold_keeps_what_its_real_plan_keeps(home: Strategy, guest: Strategy, distributed: bool) -> None:
    shape = replace(SHAPE, num_layers=8, distributed_optimizer=distributed)
    model = CostModel(shape, A800, home.world_size)
    plan = model.fold_plan(guest, home)
    kept = []
    for rank in range(home.world_size):
        (phase,) = plan.for_rank(rank).phases
        sent = (phase.sends[first].cells for first in set(phase.packed_as))
        cells = [*itertools.chain(*sent), *phase.copies, *itertools.chain(*(each.cells for each in phase.receives))]
        kept.append(shape.gradient_bytes * sum(math.prod(cell.shape) for cell in cells))
    modelled = max(model.memory.fold_bytes(guest, home, stage) for stage in range(home.pp))
    assert 0.85 * max(kept) <= modelled <= 1.25 * max(kept)


def test_folds_under_way_wait_beside_the_groups_that_follow() -> None:
    home, guest, other = strategy(8, tp=4), strategy(8, tp=2), strategy(8, tp=2, pp=2)
    memory = MemoryModel(SHAPE, A800, 8)
    fold = memory.fold_bytes(guest, home, 0)
    assert MemoryModel(SHAPE, A800, 8, fold_itemsize=2).fold_bytes(guest, home, 0) == fold // 2
    sibling = strategy(8, tp=4, cp=2)
    assert fold > 0 and memory.fold_bytes(sibling, home, 0) == memory.fold_bytes(home, home, 0) == 0
    for each in (home, sibling):
        assert memory.held(Execution(strategy=each), home, 8192, [guest]).transfers == fold
        assert memory.held(Execution(strategy=each), home, 8192, [guest, guest]).transfers == 2 * fold
    # A guest's own moves come before and after its activations.
    full = memory.held(Execution(strategy=guest), home, 65536, [other])
    empty = memory.held(Execution(strategy=guest), home, 0, [other])
    waiting = memory.fold_bytes(other, home, 0)
    assert full.transfers == waiting < empty.transfers
    chunks = 2 * SwitchConfig.chunk_mb * 2**20
    before = SHAPE.parameter_bytes * max(memory.numels(other))
    assert empty.transfers == waiting + max(chunks + before, fold)


def test_buffers_are_those_that_a_job_takes() -> None:
    assert GLOO_PACE.buffer == memory_model._GLOO_CHUNK_BYTES
    assert min(NCCL_PACE.buffer, SwitchConfig.chunk_mb << 20) == memory_model._CHUNK_BYTES
    home, guest, shape = strategy(4, tp=2), strategy(4), model_shape()
    empty = MemoryModel(shape, load_hardware("cpu-gloo"), 4).held(Execution(strategy=guest), home, 0)
    assert empty.transfers == 2 * GLOO_PACE.buffer and empty.communicators == 0


@pytest.mark.parametrize("mebibytes", [256, 1024])
def test_small_memory_has_room_for_a_guest_of_a_small_model(mebibytes: int) -> None:
    cpu = load_hardware("cpu-gloo")
    cpu = replace(cpu, memory_mib=mebibytes + cpu.reserved_mib + cpu.margin_mib)
    memory = MemoryModel(model_shape(), cpu, 4)
    assert memory.capacity(Execution(strategy=strategy(4)), strategy(4, tp=2)) > 1024


@pytest.mark.parametrize("axes", [{"tp": 4}, {"tp": 4, "cp": 2}, {"tp": 2}, {"tp": 2, "pp": 2}])
def test_full_at_the_limit_beside_a_plans_other_strategies(axes: dict[str, int]) -> None:
    home, others = strategy(16, tp=4), [strategy(16, tp=8), strategy(16, tp=4, cp=4)]
    memory, execution = MemoryModel(SHAPE, A800, 16), Execution(strategy=strategy(16, **axes))
    capacity = memory.capacity(execution, home, others)
    assert memory.held(execution, home, capacity, others).fits
    assert not memory.held(execution, home, capacity + 8, others).fits
    assert capacity < memory.capacity(execution, home)


@pytest.mark.parametrize("axes", [{"tp": 4}, {"pp": 4}, {"tp": 2, "cp": 2, "pp": 2}])
def test_full_at_the_limit_and_refused_a_byte_above(axes: dict[str, int]) -> None:
    home = strategy(16, **axes)
    execution = Execution(strategy=home)
    capacity = MemoryModel(SHAPE, A800, 16).capacity(execution, home)
    memory = MemoryModel(SHAPE, A800, 16)
    assert memory.held(execution, home, capacity).fits
    assert not memory.held(execution, home, capacity + 8).fits
    need = memory.held(execution, home, 0).total
    assert MemoryModel(SHAPE, with_memory(need // 2**20 * 2**20), 16).capacity(execution, home) == 0
    assert MemoryModel(SHAPE, with_memory((need // 2**20 + 1024) * 2**20), 16).capacity(execution, home) > 0


@settings(deadline=None)
@given(
    tokens=st.integers(1, 10**6),
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    share=st.sampled_from([0.0, 0.25, 0.5]),
)
def test_more_tokens_take_more_and_more_ranks_and_recomputation_less(
    tokens: int, tp: int, cp: int, share: float
) -> None:
    memory = MemoryModel(SHAPE, A800, 16)

    def activations(tokens: int, tp: int, cp: int, share: float) -> int:
        at = strategy(16, tp=tp, cp=cp)
        return memory.held(Execution(strategy=at, recompute=share), at, tokens).activations

    here = activations(tokens, tp, cp, share)
    assert activations(tokens + 1000, tp, cp, share) > here
    assert activations(tokens, 2 * tp, cp, share) < here
    assert activations(tokens, tp, 2 * cp, share) < here
    assert activations(tokens, tp, cp, share + 0.5) < here


def test_activations_are_those_that_hydraulis_measured() -> None:
    # Bytes per token, layer and hidden channel on all tp ranks together (its cost_model.py, LLaMA 7B).
    for tp, measured in ((1, 38), (2, 39), (4, 42), (8, 48), (16, 61)):
        memory = MemoryModel(SHAPE, A800, tp)
        at = Execution(strategy=strategy(tp, tp=tp))
        logits = 8 * SHAPE.padded_vocab_size / tp
        per_layer = (memory.activation_bytes(at, 0) - logits) * tp / SHAPE.num_layers / SHAPE.hidden_size
        assert per_layer == pytest.approx(measured, rel=0.04)


def test_without_sequence_parallelism_tensor_parallelism_saves_less() -> None:
    at = Execution(strategy=strategy(8, tp=8))
    with_it = MemoryModel(SHAPE, A800, 8).activation_bytes(at, 0)
    without = MemoryModel(replace(SHAPE, sequence_parallel=False), A800, 8).activation_bytes(at, 0)
    assert without > 1.5 * with_it


def test_homes_uneven_stages_hold_for_its_layout_alone() -> None:
    shape = replace(model_shape(layers=6), layers_in_first_stage=1, layers_in_last_stage=None)
    home = strategy(4, pp=2)
    memory = MemoryModel(shape, A800, 4, home=home)
    assert [len(stage) for stage in memory.stages(home)] == [1, 5]
    assert [len(stage) for stage in memory.stages(strategy(4, pp=1))] == [6]
    assert [len(stage) for stage in MemoryModel(shape, A800, 4).stages(home)] == [3, 3]
    # What Megatron made of flags that the shape does not hold.
    found = MemoryModel(shape, A800, 4, home=home, home_layers=((0, 1), (2, 3, 4, 5)))
    assert [len(stage) for stage in found.stages(home)] == [2, 4]
    assert found.numels(home)[0] < memory.numels(home)[1]
    assert [len(stage) for stage in found.stages(strategy(4, pp=1))] == [6]


@settings(deadline=None)
@given(
    heads=st.sampled_from([6, 12, 28, 32]),
    groups=st.sampled_from([2, 3, 4, 6]),
    layers=st.sampled_from([4, 6, 12, 30]),
    world=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]),
)
def test_candidates_are_exactly_the_legal_ones(heads: int, groups: int, layers: int, world: int) -> None:
    shape: ModelShape = replace(
        KNOWN_MODELS["llama-7b"],
        num_attention_heads=heads,
        num_query_groups=groups,
        num_layers=layers,
        ffn_hidden_size=11008,
        hidden_size=3072,
        seq_length=8192,
    )
    found = {execution.strategy for execution in legal_executions(shape, world, max_tp=8, recompute=(0.0,))}
    expected = {
        strategy(world, tp=tp, cp=cp, pp=pp)
        for tp in range(1, min(8, world) + 1)
        for cp in range(1, world + 1)
        for pp in range(1, world + 1)
        if world % (tp * cp * pp) == 0
        and layers % pp == 0
        and tp_problem(shape, tp) is None
        and shape.padded_vocab_size % tp == 0
    }
    assert found == expected


@pytest.mark.parametrize(
    ("flags", "share"),
    [((None, None, None), 0), (("selective", None, None), 0), (("full", "uniform", 1), 1), (("full", "block", 2), 0.25),
     (("full", "block", None), 0.125), (("full", "block", 20), 1)],
)  # fmt: skip
def test_megatrons_flags_say_how_much_is_recomputed(flags: tuple[Any, Any, Any], share: float) -> None:
    assert Recompute.of_flags(*flags).share(8) == share


def test_an_execution_says_what_it_is() -> None:
    at = strategy(16, tp=2, pp=2, vpp=2)
    assert str(Execution(strategy=at, recompute=0.5)) == "tp2-cp1-pp2-dp4-vpp2 recompute 0.5"
    assert str(Execution(strategy=at)) == "tp2-cp1-pp2-dp4-vpp2"
    with pytest.raises(ValueError, match="recompute"):
        Execution(strategy=at, recompute=1.5)
