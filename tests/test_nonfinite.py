"""Inf and NaN in one segment of a step: skipped, run again or refused as Megatron does in a step, with nothing half-added.

A micro-batch that holds a document of a given length has its losses spoiled, whatever strategy runs it. So the static run
meets the same number in the same step, and each kind of segment in turn is the one that has it.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hotspa_megatron.hooks.patching import Patches
from tests.training import GUEST_AND_SIBLING, STATIC, TP2_CP2, Home, Run, difference

pytestmark = pytest.mark.timeout(600)

GUEST, SIBLING, HOME = 20, 100, 240
"""Lengths that the strategies run: one for each kind of segment."""
STEP = (GUEST, 21, SIBLING, 101, HOME, 201)
INF, NAN = math.inf, math.nan
REPRODUCED, NOT_REPRODUCED = 16, 17
"""Exit codes of Megatron's rerun state machine: a second run of the step on the same device gave the same, or did not."""
# Every kind of segment in turn, first alone in its step to do so, then two at once.
SPOILED = ((2, GUEST, INF), (4, SIBLING, NAN), (6, HOME, INF), (7, GUEST, NAN), (7, HOME, INF))
SKIPPED = (2, 4, 6, 7)
STEPS = (STEP,) * 9
# In single precision, which the optimizer that is sharded scales too where it is told to.
SCALED = ("--loss-scale", "64", "--no-check-for-nan-in-loss-and-grad")

Spoiled = Sequence[tuple[int, int, float]]


def spoil(steps: Spoiled, *, times: int = 10**9) -> None:
    """Multiply the losses of a micro-batch by a number: (iteration, tokens of a document in it, number). For ``Job.before``.

    ``times``: how often an iteration that Megatron runs again meets it.
    """
    from megatron.training import get_args

    from hotspa_megatron.hooks import forward_backward, loss_reports

    only_counted, run = loss_reports._only_counted, forward_backward.StepRunner.run
    passes: dict[int, int] = {}

    def count_passes(self: Any, **options: Any) -> Any:
        passes[get_args().curr_iteration + 1] = passes.get(get_args().curr_iteration + 1, 0) + 1
        return run(self, **options)

    def spoiled(losses: Any, iterator: Any) -> Any:
        losses, iteration = only_counted(losses, iterator), get_args().curr_iteration + 1
        lengths = {iterator._step.plan.lengths[index] + 1 for index in iterator._batches[iterator._next - 1]}
        for number, length, factor in steps:
            if number == iteration and length in lengths and passes[iteration] <= times:
                losses = losses * factor
        return losses

    patches = Patches()
    patches.set(loss_reports, "_only_counted", spoiled)
    patches.set(forward_backward.StepRunner, "run", count_passes)


def spoil_and_watch(steps: Spoiled, skipped: Sequence[int]) -> None:
    """As ``spoil``; a skipped step must leave every bit of parameters and optimizer state, and any other one change some."""
    from megatron.training import get_args, training

    spoil(steps)
    train_step = training.train_step

    def watched(forward_step: Any, iterator: Any, model: Any, optimizer: Any, *rest: Any, **options: Any) -> Any:
        before = _bits(model, optimizer)
        result = train_step(forward_step, iterator, model, optimizer, *rest, **options)
        assert (_bits(model, optimizer) == before) == (get_args().curr_iteration + 1 in skipped)
        return result

    Patches().set(training, "train_step", watched)


def _bits(model: Any, optimizer: Any) -> str:
    import torch

    found = hashlib.sha256()
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    values = [parameter for chunk in model for parameter in chunk.parameters()]
    for each in chained:
        values += [parameter for group in each.optimizer.param_groups for parameter in group["params"]]
        values += [
            value for state in each.optimizer.state.values() for value in state.values() if torch.is_tensor(value)
        ]
    for value in values:
        found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def run(config: str, steps: Spoiled = SPOILED, *, skipped: Sequence[int] = SKIPPED) -> Run:
    before = functools.partial(spoil_and_watch, steps, skipped)
    return TP2_CP2.run(config, *SCALED, steps=STEPS, before=before)


def test_a_step_that_overflows_in_any_segment_is_skipped_whole() -> None:
    static, mixed = run(STATIC), run(GUEST_AND_SIBLING)
    kinds = [{segment.kind for segment in step.segments} for step in mixed.steps]
    assert kinds == [{"guest", "sibling", "home"}] * 9
    for each in (static, mixed):
        assert [index for index, norm in enumerate(each.grad_norms, 1) if math.isnan(norm)] == list(SKIPPED)
    # The steps after it, too, are those of the static run that skipped the same ones.
    fine = [index for index in range(9) if index + 1 not in SKIPPED]
    losses, norms = (
        difference([of(mixed)[index] for index in fine], [of(static)[index] for index in fine])
        for of in (lambda each: each.losses, lambda each: each.grad_norms)
    )
    print(f"losses {losses:.1e}, gradient norms {norms:.1e}")
    assert losses <= 1e-6 and norms <= 1e-5
    # Whichever segment spoils a step, what comes after it is the same to the bit: nothing of the others was added.
    elsewhere = run(GUEST_AND_SIBLING, [(2, HOME, NAN), (4, GUEST, INF), (6, SIBLING, INF), (7, SIBLING, NAN)])
    assert [elsewhere.losses[index] for index in fine] == [mixed.losses[index] for index in fine]
    assert [elsewhere.grad_norms[index] for index in fine] == [mixed.grad_norms[index] for index in fine]
    assert elsewhere.parameters == mixed.parameters
    # Control: one skip less is another training.
    other = run(GUEST_AND_SIBLING, SPOILED[1:], skipped=SKIPPED[1:])
    assert difference(other.losses[2:3], mixed.losses[2:3]) > 1e-4 and other.parameters != mixed.parameters


def test_the_loss_scale_falls_and_rises_as_in_the_static_run() -> None:
    """fp16: every overflow halves the scale, every two fine steps double it, whichever strategy overflows."""
    flags = shlex.split("--fp16 --initial-loss-scale 256 --min-loss-scale 1 --loss-scale-window 2 --hysteresis 1")
    home, config = Home(2, 1, 1, TP2_CP2.flags), "strategies: [{max_length: 64, tp: 1}, {max_length: 128, tp: 2}]"
    static, mixed = (
        home.run(text, *flags, steps=STEPS, ranks=2, before=functools.partial(spoil, SPOILED))
        for text in (STATIC, config)
    )
    assert mixed.scales == static.scales and mixed.scales[:4] == [256, 128, 128, 64]
    assert {segment.kind for step in mixed.steps for segment in step.segments} == {"guest", "sibling", "home"}
    skipped = [index for index, norm in enumerate(mixed.grad_norms, 1) if math.isnan(norm)]
    assert skipped == list(SKIPPED) == [index for index, norm in enumerate(static.grad_norms, 1) if math.isnan(norm)]
    fine = [index for index in range(9) if index + 1 not in SKIPPED]
    assert difference([mixed.losses[index] for index in fine], [static.losses[index] for index in fine]) < 1e-3


def ends_with(config: str, steps: Spoiled, folder: Path, *, times: int) -> tuple[int, list[str]]:
    """The code that the ranks of a spoiled job exit with, and the checkpoints that it leaves."""
    with pytest.raises(AssertionError) as caught:
        TP2_CP2.run(
            config, "--save", str(folder), "--save-interval", "100", steps=STEPS[:4],
            before=functools.partial(spoil, steps, times=times),
        )  # fmt: skip
    (code,) = set(re.findall(r"^SystemExit: (\d+)$", str(caught.value), re.MULTILINE))
    return int(code), sorted(path.name for path in folder.glob("*") if path.is_dir())


@pytest.mark.long
@pytest.mark.parametrize("length", [GUEST, SIBLING, HOME])
def test_what_stays_nan_ends_the_job_with_a_checkpoint_of_the_step_before(length: int, tmp_path: Path) -> None:
    """Megatron runs the step again, finds the same, saves and exits, for a person to look at the device."""
    spoiled = [(3, length, NAN)]
    static, mixed = (
        ends_with(config, spoiled, tmp_path / name, times=10**9)
        for name, config in (("s", STATIC), ("m", GUEST_AND_SIBLING))
    )
    assert mixed == static and mixed[0] == REPRODUCED and mixed[1]


@pytest.mark.long
@pytest.mark.parametrize(("length", "factor"), [(GUEST, NAN), (SIBLING, INF), (HOME, NAN)])
def test_what_is_gone_in_the_second_run_is_said_to_be_and_saves_nothing(
    length: int, factor: float, tmp_path: Path
) -> None:
    """Megatron takes the device for unreliable and ends the job, to go on from an earlier checkpoint."""
    static, mixed = (
        ends_with(config, [(3, length, factor)], tmp_path / name, times=1)
        for name, config in (("s", STATIC), ("m", GUEST_AND_SIBLING))
    )
    assert mixed == static == (NOT_REPRODUCED, [])
