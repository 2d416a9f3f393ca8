"""Trainings under several strategies give the losses and gradient norms of the static training of the same home.

Through megatron.training.pretrain on four ranks. The bound is 1e-6 (losses) and 1e-5 (norms), or twice what two static
layouts differ by, whatever is larger; that spread is printed beside it. Broken runs beside them must exceed the bound.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hotspa_megatron.hooks.patching import Patches
from tests.training import (
    DP4,
    GUEST_AND_SIBLING,
    LLAMA,
    PIPELINED_GUEST,
    RELEASE,
    SHARDED,
    SP,
    STATIC,
    TP2_CP2,
    TP2_PP2,
    TWO_GUESTS,
    Home,
    Job,
    Run,
    arguments,
    difference,
    train,
)

CP2_PP2_VIRTUAL = Home(
    1, 2, 2, (SHARDED, "--overlap-grad-reduce", "--overlap-param-gather", "--num-virtual-stages-per-pipeline-rank", "2")
)
RECOMPUTING_AND_INTERLEAVED = """
strategies:
  - {max_length: 32, tp: 1, pp: 2, tokens_per_microbatch: 96, recompute: selective}
  - {max_length: 128, tp: 2, pp: 2, vpp: 2, tokens_per_microbatch: 128, recompute: full}
"""

# Runs are shared: whichever test comes first waits for those that it compares with.
pytestmark = pytest.mark.timeout(600)


def spread(runs: Sequence[Run]) -> tuple[float, float]:
    """What runs that should agree differ by at most, in losses and in gradient norms."""
    pairs = list(itertools.combinations(runs, 2))
    return (
        max(difference(one.losses, other.losses) for one, other in pairs),
        max(difference(one.grad_norms, other.grad_norms) for one, other in pairs),
    )


def assert_equal(
    name: str, run: Run, static: Run, layouts: Sequence[Run], *, floor: tuple[float, float] = (1e-6, 1e-5)
) -> None:
    """``run`` equals ``static`` within ``floor`` or twice the spread of ``layouts``, static runs of the same training."""
    losses, norms = difference(run.losses, static.losses), difference(run.grad_norms, static.grad_norms)
    of_losses, of_norms = spread(layouts)
    print(f"{name}: losses {losses:.1e} (static layouts {of_losses:.1e}), gradient norms {norms:.1e} ({of_norms:.1e})")
    assert len(run.losses) == len(static.losses)
    assert losses <= max(floor[0], 2 * of_losses)
    assert norms <= max(floor[1], 2 * of_norms)


def strategies_of(run: Run) -> set[tuple[str, str]]:
    """(strategy, kind) of every segment that ran."""
    return {(segment.strategy, segment.kind) for step in run.steps for segment in step.segments}


@pytest.fixture(scope="module")
def static_layouts() -> list[Run]:
    """The same training under three static layouts."""
    return [home.run(STATIC) for home in (TP2_CP2, TP2_PP2, DP4)]


@pytest.mark.parametrize(
    ("home", "config", "expected"),
    [
        (TP2_CP2, GUEST_AND_SIBLING, {("tp1-cp1-pp1-dp4", "guest"), ("tp2-cp1-pp1-dp2", "sibling"), ("tp2-cp2-pp1-dp1", "home")}),
        (TP2_PP2, TWO_GUESTS, {("tp1-cp1-pp1-dp4", "guest"), ("tp4-cp1-pp1-dp1", "guest"), ("tp2-cp1-pp2-dp1", "home")}),
        (DP4, PIPELINED_GUEST, {("tp2-cp1-pp2-dp1", "guest"), ("tp1-cp1-pp1-dp4", "home")}),
        pytest.param(
            CP2_PP2_VIRTUAL, RECOMPUTING_AND_INTERLEAVED,
            {("tp1-cp1-pp2-dp2-vpp2", "sibling"), ("tp2-cp1-pp2-dp1-vpp2", "guest"), ("tp1-cp2-pp2-dp1-vpp2", "home")},
            marks=[pytest.mark.long, pytest.mark.skipif(RELEASE < (0, 18), reason="vpp is refused")],
        ),
    ],
    ids=["guest and sibling", "two guests", "pipelined guest", "recomputing and interleaved"],
)  # fmt: skip
def test_mixed_training_equals_the_static_one(
    static_layouts: list[Run], home: Home, config: str, expected: set[tuple[str, str]], request: pytest.FixtureRequest
) -> None:
    mixed = home.run(config)
    assert strategies_of(mixed) == expected
    assert [each.consumed_samples for each in mixed.iterations] == [16 * step for step in range(1, 21)]
    assert_equal(request.node.callspec.id, mixed, home.run(STATIC), static_layouts)


# ------------------------------------------------------------------------------------------- what the comparison catches


def forward_backward() -> Any:
    """The module of the step's runner; only a rank can import it."""
    from hotspa_megatron.hooks import forward_backward

    return forward_backward


def _drop_folds() -> None:
    from hotspa_megatron.runtime.executor import PendingReshard

    finish = PendingReshard.finish

    def receive_and_forget(self: PendingReshard) -> None:
        self._inbox = [] if self._accumulate else self._inbox
        finish(self)

    Patches().set(PendingReshard, "finish", receive_and_forget)


def _weigh_guests_by_segment() -> None:
    """Every guest's gradient as large as if the step were the mean of its segments' means: the scale of a wrong sum."""
    runner = forward_backward().StepRunner
    run, finish_guest = runner.run, runner._finish_guest
    weight = 1.0

    def remember(self: Any, *, step: Any, **options: Any) -> Any:
        nonlocal weight
        shortest = sum(sorted(step.plan.lengths)[: step.plan.segments[0].sequences])
        weight = sum(step.plan.lengths) / len(step.plan.segments) / shortest
        return run(self, step=step, **options)

    def weighted(self: Any, guest: Any) -> None:
        finish_guest(self, guest)
        for chunk in guest.model:
            chunk.scale_gradients(weight)

    Patches().set(runner, "run", remember)
    Patches().set(runner, "_finish_guest", weighted)


@pytest.mark.parametrize("sabotage", [_drop_folds, _weigh_guests_by_segment])
def test_guests_gradients_lost_or_of_another_scale_are_seen(
    static_layouts: list[Run], sabotage: Callable[[], None]
) -> None:
    broken = TP2_PP2.run(TWO_GUESTS, iterations=3, before=sabotage)
    norms = difference(broken.grad_norms, TP2_PP2.run(STATIC).grad_norms)
    losses = difference(broken.losses, TP2_PP2.run(STATIC).losses)
    print(f"{sabotage.__name__}: losses {losses:.1e}, gradient norms {norms:.1e}")
    assert losses > 1e-4 and norms > 1e-2


# ------------------------------------------------------------------------------------- optimizers, precision, overlap


@pytest.mark.long
@pytest.mark.parametrize(
    ("home", "config"),
    [
        (Home(2, 2, 1, (SP,)), GUEST_AND_SIBLING),
        (Home(2, 1, 2, (SP, SHARDED)), TWO_GUESTS),
        (Home(1, 1, 1, ()), PIPELINED_GUEST),
    ],
    ids=["guest and sibling", "two guests", "pipelined guest"],
)
def test_mixed_training_with_the_other_optimizer_equals_the_static_one(
    static_layouts: list[Run], home: Home, config: str, request: pytest.FixtureRequest
) -> None:
    assert_equal(request.node.callspec.id, home.run(config), home.run(STATIC), static_layouts)


@pytest.mark.long
def test_mixed_training_in_bf16_differs_by_no_more_than_static_layouts_do() -> None:
    layouts = [home.run(STATIC, "--bf16", iterations=6) for home in (TP2_CP2, TP2_PP2, DP4)]
    mixed = TP2_CP2.run(GUEST_AND_SIBLING, "--bf16", iterations=6)
    assert_equal("bf16", mixed, layouts[0], layouts, floor=(0.0, 0.0))


OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "5000")
# Tokens of each step's documents. Under the strategies below: everything, no home, only home, only a guest, one
# sequence for home (some replicas idle), nothing to train at all.
ALL, NO_HOME, ONLY_HOME = (20, 21, 100, 200), (20, 30, 25, 100), (200, 250, 180, 240)
ONLY_GUEST, ONE_FOR_HOME, NOTHING = (10, 20, 30, 12), (20, 22, 24, 250), (1, 1, 1, 1)
MOSTLY_HOME, ONLY_SIBLING = (100, 250, 240, 230), (60, 70, 80, 90)
VARYING = (
    ONE_FOR_HOME,
    ALL,
    NO_HOME,
    ONLY_HOME,
    ONLY_GUEST,
    MOSTLY_HOME,
    NOTHING,
    ONLY_SIBLING,
    ONLY_HOME,
    NO_HOME,
    ALL,
)


@pytest.mark.parametrize(
    ("home", "config", "steps"),
    [
        (TP2_CP2, GUEST_AND_SIBLING, (*VARYING[2:], *VARYING[:2])),
        pytest.param(DP4, PIPELINED_GUEST, VARYING, marks=pytest.mark.long),
        # Home's own layout again with another budget: a sibling under pipeline parallelism.
        pytest.param(
            Home(1, 1, 2, (SHARDED,)),
            "strategies: [{max_length: 32, tp: 2}, {max_length: 128, pp: 2}]",
            VARYING,
            marks=pytest.mark.long,
        ),
    ],
    ids=["guest and sibling", "pipelined guest", "pipelined home"],
)
def test_overlap_changes_nothing(home: Home, config: str, steps: Sequence[Sequence[int]]) -> None:
    static, mixed = (home.run(text, *OVERLAP, steps=steps) for text in (STATIC, config))
    plain = home.run(STATIC, steps=steps)
    for name, run in (("static", static), ("mixed", mixed)):
        assert_equal(f"{name} with overlap", run, plain, [plain, static])
    kinds = [{segment.kind for segment in step.segments} for step in mixed.steps]
    counts = [segment.micro_batches for step in mixed.steps for segment in step.segments if segment.kind == "home"]
    assert {"home"} in kinds and set() in kinds
    assert any(found and "home" not in found for found in kinds) and any(len(found) > 1 for found in kinds)
    assert len(set(counts)) > 1
    if home.cp == 1:
        assert any(0 in count for count in counts) and any(0 not in count for count in counts)


def _leave_parameters_unsynchronised() -> None:
    Patches().set(forward_backward().StepRunner, "_sync_home_parameters", lambda self, step: None)


def _reduce_in_every_segment() -> None:
    Patches().set(forward_backward()._HomeSchedule, "accumulating", lambda self, segment: contextlib.nullcontext())


def _start_nothing_afterwards() -> None:
    Patches().set(forward_backward()._HomeSchedule, "start_what_did_not_run", lambda self: None)


@pytest.mark.parametrize(
    ("sabotage", "steps"),
    [
        (_leave_parameters_unsynchronised, ((20, 60, 70, 200),) * 3),
        (_reduce_in_every_segment, (ONLY_HOME, (60, 70, 200, 201), (60, 70, 200, 201))),
        (_start_nothing_afterwards, (ALL, ONLY_GUEST)),
    ],
)
def test_what_overlap_needs_is_seen_when_it_is_missing(
    sabotage: Callable[[], None], steps: Sequence[Sequence[int]]
) -> None:
    fast = ("--lr", "1e-2")  # stale parameters are far from fresh ones
    static = TP2_CP2.run(STATIC, *fast, steps=steps)
    try:
        broken = TP2_CP2.run(GUEST_AND_SIBLING, *OVERLAP, *fast, steps=steps, before=sabotage)
    except AssertionError as error:
        print(f"{sabotage.__name__}: {str(error).splitlines()[0]}")
        assert "param_and_grad_buffer" in str(error)  # DDP noticed it itself
    else:
        norms = difference(broken.grad_norms, static.grad_norms)
        print(f"{sabotage.__name__}: gradient norms {norms:.1e}")
        assert norms > 1e-4


# ------------------------------------------------------------------------------------------------------ evaluation


EVALUATE = ("--eval-interval", "2", "--eval-iters", "2")
STANDING = ("--lr", "0", "--min-lr", "0")


@pytest.mark.long
def test_evaluation_under_the_flag_is_stock_megatrons() -> None:
    stock = DP4.run(None, *EVALUATE, *STANDING, iterations=4, hooks=False).evaluations
    assert len(stock) == 3 and len(set(stock)) == 3  # the last one follows the training
    for home, config in ((TP2_CP2, GUEST_AND_SIBLING), (TP2_PP2, TWO_GUESTS)):
        mixed = home.run(config, *EVALUATE, *STANDING, iterations=4).evaluations
        assert len(mixed) == 3 and difference(mixed, stock) < 1e-6
    # After two steps the weights are others; the comparison would see that.
    assert difference(TP2_CP2.run(GUEST_AND_SIBLING, *EVALUATE, iterations=4).evaluations, stock) > 1e-4


def test_evaluation_does_not_disturb_the_training() -> None:
    without, with_ = (TP2_CP2.run(GUEST_AND_SIBLING, *OVERLAP, *more, iterations=4) for more in ((), EVALUATE))
    assert len(with_.evaluations) == 3 and not without.evaluations
    assert with_.losses == without.losses and with_.grad_norms == without.grad_norms


# ------------------------------------------------------------------------------------------- the training loop's turns


def positions(run: Run) -> list[tuple[int, int]]:
    return [(step.first_sample, step.samples) for step in run.steps]


def test_skipped_iterations_leave_out_their_samples_and_no_others() -> None:
    whole = TP2_CP2.run(GUEST_AND_SIBLING, *STANDING, iterations=6)
    skipping = TP2_CP2.run(GUEST_AND_SIBLING, *STANDING, "--iterations-to-skip", "1", "4", iterations=6)
    assert positions(whole) == [(16 * step, 16) for step in range(6)]
    assert positions(skipping) == [(16 * step, 16) for step in (1, 2, 4, 5)]
    # Weights stand still: a step's loss says which samples it had.
    assert skipping.losses == [whole.losses[step] for step in (1, 2, 4, 5)]
    assert len(set(whole.losses)) == 6
    assert skipping.iterations[-1].consumed_samples == whole.iterations[-1].consumed_samples == 96


@pytest.mark.skipif(RELEASE < (0, 18), reason="--step-batch-size-schedule is newer")
def test_a_growing_batch_takes_the_same_samples_in_the_same_order() -> None:
    # From as many tokens on as full samples have: 8, 24 and 36 samples.
    growing = TP2_CP2.run(GUEST_AND_SIBLING, *STANDING, batch="0:4 2048:8 6144:12 9216:16", iterations=6)
    constant = TP2_CP2.run(GUEST_AND_SIBLING, *STANDING, batch=4, iterations=14)
    assert_the_same_samples(growing, constant, sizes=[4, 4, 8, 8, 12, 16])


@pytest.mark.skipif(RELEASE >= (0, 18), reason="--rampup-batch-size is passed over")
def test_a_ramped_batch_takes_the_same_samples_in_the_same_order() -> None:
    # On one rank: weights are alike from the start. A ramp needs training that is counted in samples.
    ramp = ("--rampup-batch-size", "4", "4", "36", "--train-samples", "56", "--lr-decay-samples", "640")
    ramped = list(arguments(*STANDING, *ramp))
    for iterations in ("--train-iters", "--lr-decay-iters"):
        at = ramped.index(iterations)
        del ramped[at : at + 2]
    config = "strategies: [{max_length: 64, tokens_per_microbatch: 128}]"
    growing = train(Job(tuple(ramped), config, ranks=1))
    constant = train(Job(arguments(*STANDING, batch=4, iterations=14), config, ranks=1))
    assert {kind for _, kind in strategies_of(growing)} == {"sibling", "home"}
    assert_the_same_samples(growing, constant, sizes=[4, 4, 4, 8, 8, 12, 16])


def assert_the_same_samples(growing: Run, constant: Run, *, sizes: Sequence[int]) -> None:
    """A batch that grows through ``sizes`` has the samples, and the losses, of 4 at a time; weights stand still."""
    assert [step.samples for step in growing.steps] == sizes and len(positions(growing)) == len(set(positions(growing)))
    assert positions(growing) == [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]
    small = zip(constant.steps, constant.losses, strict=True)
    for step, loss in zip(growing.steps, growing.losses, strict=True):
        parts = list(itertools.islice(small, step.samples // 4))
        tokens = sum(part.tokens for part, _ in parts)
        expected = sum(part.tokens * part_loss for part, part_loss in parts) / tokens
        assert step.tokens == tokens and abs(loss - expected) < 1e-6 * expected


def _find_a_fault_once() -> None:
    """In the third step, let one rank's validation meet a NaN that is gone when the step runs again."""
    runner = forward_backward().StepRunner
    run, calls = runner.run, 0

    def validated(self: Any, **options: Any) -> Any:
        import torch
        import torch.distributed as dist
        from megatron.core.rerun_state_machine import get_rerun_state_machine

        nonlocal calls
        calls += 1
        result = run(self, **options)
        value = torch.tensor(float("nan") if calls == 3 and dist.get_rank() == 1 else 1.0)
        get_rerun_state_machine().validate_result(
            result=value, rejection_func=torch.isnan, message="injected", fatal=False
        )
        return result

    Patches().set(runner, "run", validated)


def test_a_step_that_megatron_runs_again_is_the_same_step() -> None:
    once = TP2_CP2.run(GUEST_AND_SIBLING, *OVERLAP, iterations=4)
    again = TP2_CP2.run(GUEST_AND_SIBLING, *OVERLAP, iterations=4, before=_find_a_fault_once)
    assert positions(once) == [(0, 16), (16, 16), (32, 16), (48, 16)]
    assert positions(again) == [(0, 16), (16, 16), (32, 16), (32, 16), (48, 16)]
    assert again.losses == once.losses and again.grad_norms == once.grad_norms


# -------------------------------------------------------------------------------------------------------- other models


GPT2 = ("--position-embedding-type", "learned_absolute")
LLAMA_TIED = tuple(flag for flag in LLAMA if not flag.startswith("--untie"))


@pytest.mark.parametrize(
    ("home", "config", "model"),
    [
        # Tied, LayerNorm, biases, learned positions; a first stage of one layer and a second one of three.
        (Home(2, 1, 2, ("--decoder-first-pipeline-num-layers", "1")), TWO_GUESTS, GPT2),
        (TP2_CP2, GUEST_AND_SIBLING, (*LLAMA, "--qk-layernorm", "--add-qkv-bias")),
        # One copy of the tied embedding at home, two at the guest, and the other way round.
        (DP4, PIPELINED_GUEST, LLAMA_TIED),
        (Home(2, 1, 2, (SP, SHARDED)), TWO_GUESTS, LLAMA_TIED),
    ],
    ids=["gpt-2 on uneven stages", "qk-layernorm and qkv bias", "tied at home", "tied at a pipelined home"],
)
def test_other_models(home: Home, config: str, model: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    line = arguments(*home.flags, tp=home.tp, cp=home.cp, pp=home.pp, iterations=3, model=model)
    static, mixed = (train(Job(line, text)) for text in (STATIC, config))
    losses, norms = difference(mixed.losses, static.losses), difference(mixed.grad_norms, static.grad_norms)
    print(f"{request.node.callspec.id}: losses {losses:.1e}, gradient norms {norms:.1e}")
    assert len(strategies_of(mixed)) > 1 and len(mixed.losses) == 3
    assert losses <= 1e-6 and norms <= 1e-5
