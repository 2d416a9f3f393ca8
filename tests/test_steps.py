"""Steps in which something is missing or random: idle replicas, no packing, dropout across a resume."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hotspa_megatron.hooks.loss_reports import Tally
from tests.test_training import DP4, GUEST_AND_SIBLING, TP2_CP2
from tests.training import TP2_PP2, TWO_GUESTS, Job, arguments, log_steps, train

ONE_GUEST = "strategies: [{max_length: 128, tp: 2, pp: 2}]"
# Fewer sequences than replicas, for every strategy in turn; a step without a target; one without home.
SPARSE = ((60, 30, 1, 1), (200, 1, 1, 1), (250, 240, 9, 1), (1, 1, 1, 1), (8, 7, 6, 1))


def test_timers_that_wait_for_every_rank_do_not_wait_for_idle_replicas() -> None:
    """At this level Megatron puts a barrier of the whole world before every schedule, which an idle replica never runs."""
    timed = ("--timing-log-level", "2")
    mixed, static = (DP4.run(config, *timed, steps=SPARSE) for config in (ONE_GUEST, "strategies: []"))
    idle = [0 in segment.micro_batches for step in mixed.steps for segment in step.segments]
    assert any(idle)
    for one, other in zip(mixed.losses, static.losses, strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    # The step without a target: no loss, no gradient, nothing broken for the one after it.
    assert mixed.losses[3] == mixed.grad_norms[3] == 0.0
    assert mixed.losses[4] > 0
    told = re.findall(
        r"^hotspa: iteration (\d+): no token of this step counts towards the loss", mixed.output, re.MULTILINE
    )
    assert told == ["4"]


@pytest.mark.parametrize(
    ("home", "config"),
    [pytest.param(DP4, ONE_GUEST, marks=pytest.mark.long), (TP2_CP2, GUEST_AND_SIBLING)],
    ids=["dp4", "tp2-cp2"],
)
def test_dropout_is_the_same_after_a_resume(home: Any, config: str, tmp_path: Path) -> None:
    """Replicas draw unequally often in a step, and a checkpoint keeps the generators of the first one only."""
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    flags = [each for each in home.flags if each != "--use-distributed-optimizer"]
    line = arguments(*flags, *dropout, tp=home.tp, cp=home.cp, pp=home.pp, iterations=4, batch=4)
    save = ("--save", str(tmp_path), "--save-interval", "2")
    unbroken = train(Job((*line, *save), config))
    resumed = train(Job((*line, "--load", str(tmp_path), "--ckpt-step", "2"), config))
    assert [each.number for each in resumed.iterations] == [3, 4]
    assert resumed.losses == unbroken.losses[2:]
    # Dropout is really on.
    assert train(Job((*line, "--seed", "7"), config)).losses != unbroken.losses


def test_only_guests_with_work_are_switched_to_and_folded_once(tmp_path: Path) -> None:
    """Whole groups without a sequence, also all of them: no switch, no fold, no segment."""
    log = tmp_path / "steps.jsonl"
    steps = (
        (10, 60, 200, 11),
        (10, 11, 12, 13),
        (60, 61, 62, 1),
        (250, 251, 252, 249),
        (1, 1, 1, 1),
        (10, 250, 251, 1),
    )
    TP2_PP2.run(TWO_GUESTS, steps=steps, before=functools.partial(log_steps, log))
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    used = [[segment["kind"] for segment in entry["segments"]] for entry in entries]
    assert used == [["guest", "guest", "home"], ["guest"], ["guest"], ["home"], [], ["guest", "home"]]
    for entry, kinds in zip(entries, used, strict=True):
        assert len(entry["switches"]) == len(entry["folds"]) == kinds.count("guest")
    # Targets alone are counted: neither padding nor filler.
    assert [entry["tokens"] for entry in entries] == [sum(length - 1 for length in step) for step in steps]


def test_a_steps_loss_is_a_mean_of_tokens_and_not_of_micro_batches() -> None:
    """A micro-batch with 1 target and a loss sum of 2, one with 9 and 90: 9.2, where a mean of means would say 6."""
    tally = Tally()
    for total, targets in ((2.0, 1), (90.0, 9)):
        tally.count_tokens(None, targets)
        tally.add([{"lm loss": torch.tensor([total, float(targets)])}], True)
    ((total, tokens),) = tally.sums.values()
    assert total / tokens == 9.2 and tally.tokens == 10


def test_a_forward_step_that_does_not_say_where_sequences_begin_is_refused() -> None:
    with pytest.raises(AssertionError, match="calls the model without packed_seq_params"):
        DP4.run(ONE_GUEST, steps=SPARSE, before=_forget_packing)


def _forget_packing() -> None:
    from megatron.core.models.gpt import GPTModel

    forward = GPTModel.__call__

    def without(self: Any, *args: Any, packed_seq_params: Any = None, **options: Any) -> Any:
        return forward(self, *args, **options)

    GPTModel.__call__ = without  # type: ignore[method-assign]
