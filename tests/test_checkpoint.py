"""Checkpoints under the flag are stock Megatron's: resuming continues the unbroken run, and either side loads the other's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.spawn import run_ranks
from tests.training import (
    DP4,
    STATIC,
    TP2_PP2,
    TWO_GUESTS,
    Home,
    Job,
    Run,
    arguments,
    import_megatron,
    train,
    workspace,
)

PLAIN_ADAM_ONLY = (
    "Megatron's distributed optimizer cannot load its own checkpoint without Apex or Transformer Engine, which the CPU "
    "lacks: DistributedOptimizer.state_dict wants the step of a state that does not exist yet"
)


def run(home: Home, config: str | None, *more: str, iterations: int, hooks: bool = True) -> Run:
    line = arguments(*home.flags, *more, tp=home.tp, cp=home.cp, pp=home.pp, iterations=iterations)
    return train(Job(line, config, hooks=hooks))


def saving(name: str) -> tuple[str, ...]:
    return ("--save", str(workspace() / name), "--save-interval", "3")


def loading(name: str, iteration: int) -> tuple[str, ...]:
    # Only the number of iterations differs from what was saved; the scheduler would take that for a mistake.
    return ("--load", str(workspace() / name), "--ckpt-step", str(iteration), "--override-opt-param-scheduler")


@pytest.fixture(scope="module")
def unbroken() -> Run:
    return run(TP2_PP2, TWO_GUESTS, *saving("flag"), iterations=6)


@pytest.mark.parametrize(
    "home", [TP2_PP2, pytest.param(DP4, marks=pytest.mark.skip(reason=PLAIN_ADAM_ONLY))], ids=["plain", "sharded"]
)
def test_resuming_continues_the_unbroken_run_bit_for_bit(unbroken: Run, home: Home) -> None:
    resumed = run(home, TWO_GUESTS, *loading("flag", 3), iterations=6)
    assert [each.number for each in resumed.iterations] == [4, 5, 6]
    assert resumed.iterations == unbroken.iterations[3:]
    assert resumed.steps == unbroken.steps[3:]
    assert resumed.parameters == unbroken.parameters
    assert (
        resumed.loaded != unbroken.loaded != unbroken.parameters
    )  # three different states, so the hashes say something


def test_resuming_draws_the_same_random_numbers() -> None:
    """With dropout: the numbers of every segment are a function of the step alone."""
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    unbroken = run(TP2_PP2, TWO_GUESTS, *dropout, *saving("dropout"), iterations=5)
    resumed = run(TP2_PP2, TWO_GUESTS, *dropout, *loading("dropout", 3), iterations=5)
    assert resumed.iterations == unbroken.iterations[3:]
    assert resumed.parameters == unbroken.parameters
    assert resumed.losses != run(TP2_PP2, TWO_GUESTS, *loading("dropout", 3), iterations=5).losses


def test_a_resumed_run_may_change_strategies(unbroken: Run) -> None:
    static = run(TP2_PP2, STATIC, *loading("flag", 3), iterations=6)
    assert [each.consumed_samples for each in static.iterations] == [64, 80, 96]
    for resumed, original in zip(static.iterations, unbroken.iterations[3:], strict=True):
        assert math.isclose(resumed.loss, original.loss, rel_tol=1e-6)
        assert math.isclose(resumed.grad_norm, original.grad_norm, rel_tol=1e-5)


def test_stock_megatron_loads_what_was_saved_under_the_flag(unbroken: Run) -> None:
    stock = run(TP2_PP2, None, *loading("flag", 6), iterations=8, hooks=False)
    assert stock.loaded == unbroken.parameters
    assert [(each.number, each.consumed_samples) for each in stock.iterations] == [(7, 112), (8, 128)]
    assert all(math.isfinite(each.loss) for each in stock.iterations)


def test_the_flag_loads_what_stock_megatron_saved_and_both_save_the_same(unbroken: Run) -> None:
    stock = run(TP2_PP2, None, *saving("stock"), iterations=3, hooks=False)
    taken_up = run(TP2_PP2, TWO_GUESTS, *loading("stock", 3), iterations=4)
    assert taken_up.loaded == stock.parameters
    assert [(each.first_sample, each.samples) for each in taken_up.steps] == [(48, 16)]
    ours, theirs = (_contents(workspace() / name / "iter_0000003") for name in ("flag", "stock"))
    added = {"args.hotspa_config"}
    assert ours - theirs == added and theirs <= ours
    assert any(key.startswith("optimizer") for key in theirs) and "args.num_layers" in theirs


def _contents(checkpoint: Path) -> set[str]:
    """Every key of a checkpoint: what is sharded, and the common state, its arguments included."""
    (keys,) = run_ranks(_read_contents, 1, checkpoint, prepare=import_megatron, init_process_group=False)
    return set(keys)


def _read_contents(rank: int, world_size: int, checkpoint: Path) -> list[str]:
    from megatron.core.dist_checkpointing import serialization

    stored = serialization.load_sharded_metadata(str(checkpoint))  # tensors and objects
    common = serialization.load_common_state_dict(str(checkpoint))
    return [*stored, *common, *(f"args.{name}" for name in vars(common["args"]))]
