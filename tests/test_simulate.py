"""Simulations: suites beside an independent model's figures, what must hold in every setting, and runs step by step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotspa_megatron.planning.baselines import (
    hotspa_rules,
    hotspa_table,
    hybrid_context,
    one_sequence_each,
    static_first_fit,
)
from hotspa_megatron.planning.cost_model import CostModel
from hotspa_megatron.planning.execution import Execution, legal_executions
from hotspa_megatron.planning.hardware import load_hardware
from hotspa_megatron.planning.known_models import KNOWN_MODELS
from hotspa_megatron.planning.lengths import LengthHistogram
from hotspa_megatron.planning.search import plan_strategies
from hotspa_megatron.planning.simulate import (
    Cell,
    Setting,
    Suite,
    load_suite,
    other_systems,
    read_suite,
    run_cell,
    run_suite,
    simulate_run,
)
from hotspa_megatron.strategy import Strategy
from hotspa_megatron.strict_yaml import ConfigError

SUITE = load_suite("a800")
# Seconds per step of static with first-fit rows, HotSPa's tables, Megatron's hybrid context parallelism and its packed
# ideal, and static over the kernels alone, from an independent model of the same settings with the same mini-batches.
OTHER_MODEL = {
    ("llama-7b", 8, 32768, "wikipedia"): (14.03, 17.35, 15.35, 13.19, 1.11),
    ("llama-7b", 8, 32768, "github"): (28.57, 34.81, 29.16, 27.12, 1.1),
    ("llama-7b", 8, 16384, "wikipedia"): (13.42, 15.78, 14.81, 12.66, 1.11),
    ("llama-7b", 8, 16384, "github"): (25.63, 28.28, 26.15, 24.12, 1.11),
    ("llama-7b", 8, 8192, "wikipedia"): (12.83, 14.67, 14.1, 11.99, 1.12),
    ("llama-7b", 8, 8192, "github"): (21.59, 25.45, 22.6, 20.67, 1.09),
    ("llama-7b", 8, 4096, "wikipedia"): (10.58, 10.58, 12.05, 10.0, 1.11),
    ("llama-7b", 8, 4096, "github"): (17.0, 17.06, 18.07, 16.26, 1.09),
    ("llama-7b", 16, 32768, "wikipedia"): (7.29, 10.07, 7.67, 6.56, 1.16),
    ("llama-7b", 16, 32768, "github"): (14.59, 19.02, 14.51, 13.47, 1.12),
    ("llama-7b", 16, 16384, "wikipedia"): (7.06, 8.34, 7.41, 6.3, 1.17),
    ("llama-7b", 16, 16384, "github"): (13.1, 14.8, 13.01, 11.98, 1.13),
    ("llama-7b", 16, 8192, "wikipedia"): (6.71, 8.09, 7.06, 5.96, 1.17),
    ("llama-7b", 16, 8192, "github"): (11.26, 13.89, 11.28, 10.27, 1.14),
    ("llama-7b", 16, 4096, "wikipedia"): (5.57, 5.52, 6.04, 4.98, 1.17),
    ("llama-7b", 16, 4096, "github"): (8.84, 8.97, 9.05, 8.09, 1.13),
    ("llama-13b", 16, 32768, "wikipedia"): (14.39, 16.57, 18.15, 13.27, 1.26),
    ("llama-13b", 16, 32768, "github"): (27.93, 31.88, 34.86, 27.65, 1.2),
    ("llama-13b", 16, 16384, "wikipedia"): (12.96, 15.19, 16.97, 12.39, 1.18),
    ("llama-13b", 16, 16384, "github"): (24.03, 26.75, 27.72, 23.38, 1.15),
    ("llama-13b", 16, 8192, "wikipedia"): (12.26, 14.7, 16.37, 11.76, 1.18),
    ("llama-13b", 16, 8192, "github"): (20.69, 25.07, 24.5, 20.19, 1.13),
    ("llama-13b", 16, 4096, "wikipedia"): (10.14, 10.71, 14.36, 9.87, 1.16),
    ("llama-13b", 16, 4096, "github"): (16.22, 17.24, 20.12, 16.01, 1.14),
    ("llama-32b", 32, 32768, "wikipedia"): (20.98, 24.29, 26.81, 19.19, 1.5),
    ("llama-32b", 32, 32768, "github"): (40.68, 48.42, 49.53, 38.97, 1.43),
    ("llama-32b", 32, 16384, "wikipedia"): (17.51, 21.33, 24.61, 18.42, 1.29),
    ("llama-32b", 32, 16384, "github"): (31.31, 37.02, 41.64, 34.67, 1.22),
    ("llama-32b", 32, 8192, "wikipedia"): (16.49, 20.02, 23.57, 17.43, 1.28),
    ("llama-32b", 32, 8192, "github"): (27.02, 33.74, 36.16, 29.99, 1.22),
    ("llama-32b", 32, 4096, "wikipedia"): (13.85, 13.86, 20.16, 14.16, 1.28),
    ("llama-32b", 32, 4096, "github"): (21.58, 21.65, 28.52, 22.97, 1.23),
}
REDUCED = (
    ("llama-7b", 8, 4096, "wikipedia"),
    ("llama-7b", 16, 8192, "wikipedia"),
    ("llama-13b", 16, 16384, "github"),
    ("llama-32b", 32, 8192, "github"),
)


def key(of: Setting | Cell) -> tuple[str, int, int, str]:
    return of.model, of.gpus, of.context, of.data


def check(cell: Cell) -> None:
    """What holds in every setting."""
    assert cell.hotspa_s <= cell.static_s
    assert cell.static_s >= cell.ceiling_s and cell.hotspa_s >= cell.ceiling_s
    assert cell.switch_fraction <= 0.01
    assert cell.static_first_fit_s is not None and cell.dynamic_cp_s is not None and cell.hybrid_cp_s is not None
    assert cell.hotspa_tables_s is not None and cell.home_unpacked_s is not None
    # Measured: 1.023 at most. The ideal pays for a share of a micro-batch, ours for whole ones.
    assert cell.hotspa_s <= 1.03 * cell.dynamic_cp_s
    assert cell.hotspa_s < cell.hotspa_tables_s and cell.hotspa_s < cell.hybrid_cp_s < cell.home_unpacked_s * 1.5
    if cell.model == "llama-7b":
        # One replica fits a GPU: pipelines are not needed.
        assert cell.hotspa_s <= 1.10 * cell.ceiling_s
    static, tables, hybrid, dynamic, static_by_ceiling = OTHER_MODEL[key(cell)]
    assert cell.hotspa_tables_s == pytest.approx(tables, rel=0.03)
    assert cell.static_first_fit_s == pytest.approx(static, rel=0.03)
    assert cell.hybrid_cp_s == pytest.approx(hybrid, rel=0.03)
    assert cell.dynamic_cp_s == pytest.approx(dynamic, rel=0.03)
    # A ratio of two digits.
    assert cell.ceiling_s == pytest.approx(static / static_by_ceiling, rel=0.035)
    # Packed by cost, which at 4K tokens is all that there is to gain; there the other model's own best is this static plan.
    assert 0.88 * static <= cell.static_s <= 1.03 * static


def test_the_suite_has_every_setting_of_hotspas_evaluation() -> None:
    assert sorted(key(setting) for setting in SUITE.settings) == sorted(OTHER_MODEL)
    for setting in SUITE.settings:
        batches = SUITE.batches(setting)
        assert [len(batch) for batch in batches] == [512, 512]
        assert all(batch.max() <= setting.context and batch.min() >= 1 for batch in batches)


def test_a_reduced_suite_keeps_what_must_hold() -> None:
    reduced = replace(SUITE, settings=tuple(setting for setting in SUITE.settings if key(setting) in REDUCED))
    cells = list(run_suite(reduced))
    assert [key(cell) for cell in cells] == [key(setting) for setting in reduced.settings]
    for cell in cells:
        check(cell)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_whole_suite_keeps_what_must_hold() -> None:
    cells = list(run_suite(SUITE, jobs=2))
    assert len(cells) == 32
    for cell in cells:
        check(cell)


def test_a_suite_over_processes_gives_the_same_cells() -> None:
    tiny = replace(SUITE, settings=SUITE.settings[:1])
    tiny = replace(tiny, data=tuple((name, tuple(batch[:32] for batch in batches)) for name, batches in tiny.data))
    assert list(run_suite(tiny, jobs=2)) == list(run_suite(tiny))


def test_levers_can_be_left_out() -> None:
    """One at a time; what is left of a plan is no faster for it."""
    setting = setting_of("llama-13b", 16, 8192, "wikipedia")
    whole, plain, short = (run_cell(SUITE, setting, without=lever) for lever in (None, "interleaving", "long packing"))
    assert "vpp" in " ".join(whole.groups) and "vpp" not in " ".join((plain.static, *plain.groups))
    assert whole.hotspa_s < min(plain.hotspa_s, short.hotspa_s) and whole.static_s <= min(
        plain.static_s, short.static_s
    )


def setting_of(model: str, gpus: int, context: int, data: str) -> Setting:
    return next(each for each in SUITE.settings if key(each) == (model, gpus, context, data))


def model_of(setting: Setting, suite: Suite = SUITE) -> CostModel:
    shape = replace(KNOWN_MODELS[setting.model], seq_length=setting.context)
    return CostModel(shape, suite.hardware, setting.gpus)


def test_what_the_baselines_leave_out_costs_them() -> None:
    setting = setting_of("llama-7b", 16, 32768, "wikipedia")
    model, batches = model_of(setting), SUITE.batches(setting)
    executions = legal_executions(model.shape, 16, max_tp=8)
    best = static_first_fit(model, executions, batches)
    no_cp = static_first_fit(model, [each for each in executions if each.strategy.cp == 1], batches)
    assert no_cp > 1.1 * best
    packed = hybrid_context(model, batches, max_tp=8, packed=True)
    assert hybrid_context(model, batches, max_tp=8, packed=False) > 1.05 * packed
    table = hotspa_table("llama-7b", 16, 32768)
    assert table is not None and table.limits == (32768, 16384, 4096)
    one_group = replace(table, strategies=table.strategies[:1], limits=table.limits[:1])
    assert hotspa_rules(model, table, batches) < hotspa_rules(model, one_group, batches)
    assert hotspa_table("llama-70b", 16, 32768) is None


def test_a_broken_plan_would_be_noticed() -> None:
    """The reduced suite's checks fail where ours loses its length groups or its packing."""
    setting = setting_of("llama-7b", 16, 8192, "wikipedia")
    cell = run_cell(SUITE, setting)
    check(cell)
    for wrong in (
        {"hotspa_s": cell.static_s * 1.001},
        {"switch_fraction": 0.02},
        {"dynamic_cp_s": cell.hotspa_s / 1.04},
    ):
        with pytest.raises(AssertionError):
            check(replace(cell, **wrong))  # type: ignore[arg-type]


def test_a_run_is_planned_step_by_step() -> None:
    histogram = LengthHistogram.wikipedia(size=10_000)
    shape, hardware = replace(KNOWN_MODELS["llama-7b"], seq_length=8192), load_hardware("a800-80")
    planned = plan_strategies(histogram, shape=shape, hardware=hardware, world_size=8, sequences_per_step=64)
    run = {"shape": shape, "hardware": hardware, "steps": 3, "sequences_per_step": 64}
    steps = list(simulate_run(planned, histogram, **run, seed=7))  # type: ignore[arg-type]
    assert [step.step for step in steps] == [1, 2, 3]
    assert len({step.tokens for step in steps}) > 1 and all(step.sequences == 64 for step in steps)
    assert all(step.time.total > 0 and step.segments >= 1 for step in steps)
    again = list(simulate_run(planned, histogram, **run, seed=7))  # type: ignore[arg-type]
    other = list(simulate_run(planned, histogram, **run, seed=8))  # type: ignore[arg-type]
    assert steps == again != other


def test_a_run_stands_beside_what_others_do_with_its_sequences() -> None:
    histogram = LengthHistogram.wikipedia(size=10_000)
    shape, hardware = replace(KNOWN_MODELS["llama-7b"], seq_length=16384), load_hardware("a800-80")
    planned = plan_strategies(histogram, shape=shape, hardware=hardware, world_size=8, sequences_per_step=64)
    run = {"shape": shape, "hardware": hardware, "steps": 2, "sequences_per_step": 64}
    steps = list(simulate_run(planned, histogram, **run, seed=7))  # type: ignore[arg-type]
    others = other_systems(planned, histogram, **run, seed=7)  # type: ignore[arg-type]
    ours = sum(step.time.total for step in steps) / 2
    assert others.hybrid_cp_s is not None and others.dynamic_cp_s is not None
    assert others.ceiling_s < others.dynamic_cp_s < others.hybrid_cp_s < others.home_unpacked_s
    assert others.ceiling_s < ours < others.hybrid_cp_s
    # Of the very steps that are simulated.
    drawn = [histogram.limited(16384, "split").sample(64, seed=seed) for seed in (7, 8)]
    assert [step.tokens for step in steps] == [int(batch.sum()) for batch in drawn]
    model = CostModel(replace(shape, sequence_parallel=True), hardware, 8)
    assert others.ceiling_s == sum(model.ceiling(batch) for batch in drawn) / 2
    assert others.dynamic_cp_s == hybrid_context(model, drawn, max_tp=8, packed=True)
    # Where no rank could hold a sequence, Megatron's has no time rather than a wrong one.
    small = other_systems(planned, histogram, **{**run, "hardware": replace(hardware, memory_mib=20_000)}, seed=7)  # type: ignore[arg-type]
    assert small.hybrid_cp_s is None and small.dynamic_cp_s is None and small.ceiling_s == others.ceiling_s


def test_virtual_stages_shorten_the_baselines_pipeline_too() -> None:
    setting = setting_of("llama-7b", 8, 4096, "wikipedia")
    model, batches = model_of(setting), SUITE.batches(setting)
    plain, virtual = (
        one_sequence_each(model, Execution(strategy=Strategy.from_world(8, tp=1, cp=1, pp=4, vpp=vpp)), batches)
        for vpp in (1, 2)
    )
    assert virtual < plain


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("hardware: h100", "hardwear: h100", "did you mean hardware"),
        ("hardware: h100", "hardware: h900", "not known"),
        ("llama-7b", "llama-8b", "llama-7b"),
        ("gpus: 8, ", "", "has no gpus"),
        ("[[5, 6]]", "[[]]", "no lengths"),
        ("[[5, 6]]", "[[5, 0]]", "less than 1"),
    ],
)
def test_a_wrong_suite_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = (
        "hardware: h100\ncontexts: [4096]\nsettings: [{model: llama-7b, gpus: 8, max_tp: 8}]\n"
        "data: [{name: few, batches: [[5, 6]]}]\n"
    )
    path = tmp_path / "suite.yaml"
    path.write_text(text)
    suite = read_suite(path)
    assert suite.settings == (Setting(model="llama-7b", gpus=8, context=4096, max_tp=8, data="few"),)
    assert np.array_equal(suite.batches(suite.settings[0])[0], [5, 6])
    path.write_text(text.replace(old, new))
    with pytest.raises((ConfigError, ValueError), match=says):
        read_suite(path)


def test_an_unknown_suite_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'b200' is not known; write one of a800"):
        load_suite("b200")
