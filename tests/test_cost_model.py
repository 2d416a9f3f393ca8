"""Times against published ones, on what they must depend, and moves on real reshard plans."""

from __future__ import annotations

import importlib.util
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_megatron.planning.cost_model import CostModel
from hotspa_megatron.planning.execution import Execution
from hotspa_megatron.planning.hardware import Hardware, load_hardware
from hotspa_megatron.planning.known_models import KNOWN_MODELS
from hotspa_megatron.planning.step_plan import MicroBatchTime
from hotspa_megatron.strategy import Strategy

A800 = load_hardware("a800-80")
ROOT = Path(__file__).resolve().parent.parent


def fit_script() -> ModuleType:
    name = "fit_cost_model"
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def model(name: str = "llama-7b", world: int = 16, hardware: Hardware = A800) -> CostModel:
    return CostModel(KNOWN_MODELS[name], hardware, world)


def at(world: int, *, tp: int = 1, cp: int = 1, pp: int = 1, recompute: float = 0.0, vpp: int = 1) -> Execution:
    return Execution(strategy=Strategy.from_world(world, tp=tp, cp=cp, pp=pp, vpp=vpp), recompute=recompute)


# -------------------------------------------------------------------------------------------------------- calibration


def test_published_times_are_met() -> None:
    script = fit_script()
    assert len(script.rows()) == 25
    sizes = [abs(error) for _, _, error in script.errors(A800)]
    assert len(sizes) == 100
    assert statistics.mean(sizes) < 0.05 and max(sizes) < 0.12
    for name in ("llama-7b", "llama-13b", "llama-32b"):
        assert statistics.mean(abs(error) for row, _, error in script.errors(A800) if row.model == name) < 0.05


def test_the_file_says_what_the_fit_gives() -> None:
    script = fit_script()
    fitted, written = script.fit(A800), script.written(A800)
    assert fitted == pytest.approx({name: written[name] for name in fitted}, rel=script.CLOSE)


@pytest.mark.parametrize(
    "wrong",
    [
        {"intra_gigabytes_per_s": 60.0},
        {"gemm_efficiency": ((4096, 0.55),)},
        {"layer_overhead_us": ((1, 4000.0),)},
        {"attention_efficiency": ((64, 0.3),)},
    ],
)
def test_a_wrong_constant_would_be_noticed(wrong: dict[str, object]) -> None:
    script = fit_script()
    sizes = [abs(error) for _, _, error in script.errors(replace(A800, **wrong))]  # type: ignore[arg-type]
    assert statistics.mean(sizes) > 0.05 or max(sizes) > 0.12


# ------------------------------------------------------------------------------------------------------- micro-batches


@settings(deadline=None)
@given(
    tokens=st.integers(1, 200_000),
    longest=st.integers(1, 32_768),
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_time_grows_with_tokens_with_squares_and_with_recomputation(
    tokens: int, longest: int, tp: int, cp: int, pp: int, recompute: float
) -> None:
    of = model(world=64)
    squares = float(tokens) * longest
    time = of.stage_time(at(64, tp=tp, cp=cp, pp=pp, recompute=recompute))
    here = float(time.seconds(float(tokens), squares))
    assert here > 0
    assert float(time.seconds(float(tokens + 100), squares)) > here
    assert float(time.seconds(float(tokens), squares * 1.1)) >= here
    more = of.stage_time(at(64, tp=tp, cp=cp, pp=pp, recompute=min(1.0, recompute + 0.25)))
    assert float(more.seconds(float(tokens), squares)) >= here


def test_work_is_the_models_and_divides_over_ranks() -> None:
    shape, of = KNOWN_MODELS["llama-7b"], model(world=16)
    relative = MicroBatchTime.relative(shape)
    time = of.stage_time(at(16))
    assert time.gemm == pytest.approx(relative.per_token / A800.gemm_flops(4096))
    assert time.attention == pytest.approx(relative.per_square / A800.attention_flops(128))
    assert of.stage_time(at(16, tp=4)).gemm == pytest.approx(time.gemm / 4)
    assert of.stage_time(at(16, cp=4)).attention == pytest.approx(time.attention / 4)
    lengths = np.array([100, 2000], np.int64)
    alone = sum(float(time.gemm * length + time.attention * length**2) for length in lengths)
    assert of.ceiling(lengths) == pytest.approx(alone / 16)


def test_a_recomputed_layer_runs_forward_once_more() -> None:
    """A third more of its products and of its attention, half more of what it sends within a step; nothing else changes."""
    of = model(world=16)
    never, half, all_ = (of.stage_time(at(16, tp=2, recompute=share)) for share in (0.0, 0.5, 1.0))
    assert all_.per_square == pytest.approx(4 / 3 * never.per_square)
    assert half.per_square == pytest.approx(7 / 6 * never.per_square)
    sent = never.tensor
    assert all_.per_token - never.per_token == pytest.approx(never.gemm / 3 + sent / 2)
    assert half.per_token - never.per_token == pytest.approx(never.gemm / 6 + sent / 4)


def test_the_last_stage_also_has_the_output_layer() -> None:
    of = model(world=16)
    whole, half = of.stage_time(at(16)).gemm, of.stage_time(at(16, pp=2)).gemm
    head = 6 * 30592 * 4096 / A800.gemm_flops(4096)
    assert half == pytest.approx((whole - head) / 2 + head)


def test_links_matter_where_groups_cross_nodes() -> None:
    of = model("llama-32b", 32)
    within, across = of.stage_time(at(32, tp=8)).tensor, of.stage_time(at(32, tp=16)).tensor
    assert across > within
    near, far = of.stage_time(at(32, cp=8)), of.stage_time(at(32, cp=16))
    assert near.all_to_all is not None and far.all_to_all is not None
    assert far.all_to_all * 16 > near.all_to_all * 8
    slow = CostModel(of.shape, replace(A800, card_gigabytes_per_s=1.0), 32)
    assert slow.stage_time(at(32, cp=16)).ring > far.ring and slow.stage_time(at(32, cp=8)).ring == near.ring


def test_grouped_queries_send_less_and_fall_back_to_a_ring() -> None:
    few = model("llama-70b", 64)
    many = CostModel(replace(few.shape, num_query_groups=64), A800, 64)
    execution = at(64, tp=2, cp=4)
    assert few.stage_time(execution).ring < many.stage_time(execution).ring / 7
    one, other = few.stage_time(execution).all_to_all, many.stage_time(execution).all_to_all
    assert one is not None and other is not None and one < other
    # 8 query groups over tp 8 * cp 2 do not divide: a ring is left, which hides behind attention.
    ring = few.stage_time(at(64, tp=8, cp=2))
    assert ring.all_to_all is None and many.stage_time(at(64, tp=8, cp=2)).all_to_all is not None
    assert float(ring.context(1000.0, 1000.0**2)) > 0
    assert float(ring.context(1000.0, 1e12)) == 0


# ---------------------------------------------------------------------------------------------- reductions and moves


def test_a_reduction_hides_behind_the_last_micro_batch() -> None:
    of = model(world=16)
    home = Strategy.from_world(16, tp=1, cp=1, pp=1)
    alone = of.home_reduction(home, last=0.0)
    # A reduce-scatter of 4 bytes and a gather of 2 per parameter, over a ring that enters each node once.
    assert alone == pytest.approx(6 * 6.73e9 * 15 / 16 / 156e9, rel=0.02)
    assert of.home_reduction(home, last=0.1) == pytest.approx(alone - 0.05)
    assert of.home_reduction(home, last=100.0) == pytest.approx(alone / 10)
    assert of.home_reduction(Strategy.from_world(16, tp=16, cp=1, pp=1), last=0.0) == 0
    guest = of.guest_reduction(Strategy.from_world(16, tp=2, cp=1, pp=1))
    assert guest == pytest.approx(8 * 6.73e9 / 2 * 7 / 8 / 80e9, rel=0.05)


def test_moves_take_what_their_plans_take() -> None:
    of = model("llama-32b", 32)
    home, guest = Strategy.from_world(32, tp=8, cp=1, pp=1), Strategy.from_world(32, tp=2, cp=1, pp=4)
    third = Strategy.from_world(32, tp=4, cp=1, pp=2)
    assert of.switch_seconds(home, None, Strategy.from_world(32, tp=8, cp=4, pp=1)) == 0
    switch, fold = of.switch_seconds(home, None, guest), of.fold_seconds(guest, home)
    assert 0.005 < switch < 0.5 and 0.005 < fold < 0.5
    # A guest that is still there is one more source, and can only help.
    assert of.switch_seconds(home, third, guest) <= of.switch_seconds(home, None, guest) * 1.001
    slow = CostModel(of.shape, replace(A800, card_gigabytes_per_s=2.0, intra_gigabytes_per_s=15.6), 32)
    assert slow.switch_seconds(home, None, guest) > 5 * switch
    assert slow.fold_seconds(guest, home) > 5 * fold


def test_hotspas_own_switch_crosses_the_network_more() -> None:
    of = model("llama-7b", 16)
    home, short = Strategy.from_world(16, tp=4, cp=1, pp=2), Strategy.from_world(16, tp=1, cp=1, pp=1)
    # 108 GB over the network instead of 13.5.
    assert of.chain_switch_seconds(home, short) > 2 * of.switch_seconds(home, None, short)
