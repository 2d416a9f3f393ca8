"""In a job, small length groups join a longer one where their own strategy would not pay, by times that rank 0 decides."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch.distributed as dist

from hotspa_megatron.hooks.patching import Patches
from tests.test_training import assert_equal, strategies_of
from tests.training import GUEST_AND_SIBLING, STATIC, TP2_CP2, Run

AUTO = GUEST_AND_SIBLING + "merge: auto"
NEVER = GUEST_AND_SIBLING + "merge: never"


def run(config: str, **options: Any) -> Run:
    return TP2_CP2.run(config, iterations=4, **options)


def used(of: Run) -> list[list[str]]:
    return [[segment.strategy for segment in step.segments] for step in of.steps]


def _on_hardware(**changes: Any) -> None:
    """A job on a machine that differs from the described one; only rank 0 is asked."""
    from hotspa_megatron.hooks import costs
    from hotspa_megatron.planning.hardware import load_hardware

    def here() -> Any:
        if dist.get_rank():
            raise AssertionError("a rank other than 0 was asked for its hardware")
        return dataclasses.replace(load_hardware("cpu-gloo"), **changes), "a machine of the test"

    Patches().set(costs, "hardware_here", here)


def _dear_layers_under_tp_and_free_links() -> None:
    overheads = ((1, 10.0), (2, 50_000.0))
    _on_hardware(layer_overhead_us=overheads, intra_gigabytes_per_s=1e6, intra_latency_us=0.0)


def _links_that_nothing_pays_for() -> None:
    _on_hardware(intra_gigabytes_per_s=1e-4)


def test_merged_or_not_the_training_is_the_static_one() -> None:
    static, never, auto = (run(config) for config in (STATIC, NEVER, AUTO))
    assert_equal("merged where a switch does not pay", auto, static, [static, never])
    merged = [len(one) < len(all_) for one, all_ in zip(used(auto), used(never), strict=True)]
    assert any(merged) and not all(merged)
    assert "merge: auto); times are those of the description cpu-gloo of ranks on CPU" in auto.output
    assert "no length group is merged (merge: never)" in never.output


def test_what_moves_cost_decides() -> None:
    cheap, dear = (
        run(AUTO, before=links) for links in (_dear_layers_under_tp_and_free_links, _links_that_nothing_pays_for)
    )
    short = [step[0] for step in used(run(NEVER))]
    assert set(short) == {"tp1-cp1-pp1-dp4"} and [step[0] for step in used(cheap)] == short
    assert "guest" not in {kind for _, kind in strategies_of(dear)}
    assert "a machine of the test" in cheap.output
    assert_equal("nothing merged", cheap, dear, [cheap, dear])


def test_copies_of_a_parameter_stay_the_same_bits_over_twenty_steps() -> None:
    """Ranks that hold the same part of the model, and every rank's norms, which tensor parallelism does not cut."""
    of = TP2_CP2.run(GUEST_AND_SIBLING).parameters
    assert of[0] == of[2] and of[1] == of[3] and of[0] != of[1]
    norms = [{name: bits for name, bits in rank.items() if "norm" in name} for rank in of]
    assert norms[0] == norms[1] and len(set(norms[0].values())) > 4


def _another_opinion() -> None:
    from hotspa_megatron.hooks import session
    from hotspa_megatron.planning.step_plan import StepCosts

    decide = vars(session)["decide_costs"]

    def other(*given: Any) -> Any:
        costs, source = decide(*given)
        return (StepCosts(times=costs.times), source) if dist.get_rank() == 2 else (costs, source)

    Patches().set(session, "decide_costs", other)


def test_a_rank_with_other_costs_plans_another_step_and_is_named() -> None:
    with pytest.raises(AssertionError, match="ranks 2 planned another step than the others"):
        run(AUTO, before=_another_opinion)
