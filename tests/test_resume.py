"""A run goes on exactly where its checkpoint stands: after a kill, in another layout, across epochs, with blends.

What a resumed run trains on is a function of the consumed samples alone.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hotspa_megatron.hooks.patching import Patches
from tests.test_data_faults import refusal
from tests.test_merging import AUTO
from tests.training import (
    GUEST_AND_SIBLING,
    PIPELINED_GUEST,
    SCRIPT,
    SHARDED,
    SP,
    STATIC,
    TWO_GUESTS,
    Home,
    Job,
    Run,
    StepSeen,
    arguments,
    corpus,
    flag,
    log_steps,
    skewed_lengths,
    train,
    under_torchrun,
)

# Without a sharded optimizer: stock Megatron does not restore that one on CPU.
TP2_PP2, TP2_CP2, DP4 = Home(2, 1, 2, ()), Home(2, 2, 1, (SP,)), Home(1, 1, 1, ())


def line(home: Home, *more: str, iterations: int = 6, batch: int = 16) -> tuple[str, ...]:
    return arguments(*home.flags, *more, tp=home.tp, cp=home.cp, pp=home.pp, iterations=iterations, batch=batch)


def samples(run: Run | Sequence[StepSeen]) -> list[tuple[int, tuple[tuple[int, int, int, int], ...]]]:
    return [(step.first_sample, step.sequences) for step in (run.steps if isinstance(run, Run) else run)]


# ------------------------------------------------------------------------------------------------------ after a kill


def _log_steps_and_die(log: Path, step: int | None, fraction: float) -> None:
    """Write rank 0's step log; in the given step end this process as kill -9 does, after a part of a step's time."""
    from hotspa_megatron.hooks.forward_backward import StepRunner

    log_steps(log)
    if step is None:
        return
    run, begins = StepRunner.run, [0.0]

    def die(seconds: float) -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    def counted(*args: Any, **options: Any) -> Any:
        begins.append(time.monotonic())
        if len(begins) == step + 1:
            # From the start of one step to that of the next: a save in between counts, too.
            seconds = fraction * (begins[-1] - begins[-2] if step > 1 else 0.1)
            threading.Thread(target=die, args=(seconds,), daemon=True).start()
        return run(*args, **options)

    Patches().set(StepRunner, "run", counted)


def _logged(log: Path) -> list[tuple[int, float]]:
    entries = [json.loads(text) for text in log.read_text().splitlines()]
    return [(entry["iteration"], entry["loss"]) for entry in entries]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_three_times_at_random_the_loss_trace_is_the_unbroken_runs(tmp_path: Path) -> None:
    iterations, save = 14, ("--save", str(tmp_path / "saved"), "--save-interval", "2")

    def job(name: str, *more: str, step: int | None = None, fraction: float = 0.0) -> Job:
        before = functools.partial(_log_steps_and_die, tmp_path / name, step, fraction)
        return Job(line(TP2_CP2, *more, iterations=iterations), AUTO, before=before)

    unbroken = train(job("unbroken"))
    expected = dict(_logged(tmp_path / "unbroken"))
    assert list(expected) == list(range(1, iterations + 1)) and len(set(expected.values())) == iterations
    tracker = tmp_path / "saved" / "latest_checkpointed_iteration.txt"
    seed = random.SystemRandom().randrange(2**32)
    chance, reached = random.Random(seed), []
    load = ("--load", str(tmp_path / "saved"))
    for _ in range(3):
        done = int(tracker.read_text()) if tracker.exists() else 0
        step, fraction = chance.randint(1, min(5, iterations - done - 1)), chance.random()
        print(f"seed {seed}: resumed after iteration {done}, killed {fraction:.2f} of a step into its step {step}")
        with pytest.raises(AssertionError, match="exit code -9"):
            train(job("broken", *save, *(load if done else ()), step=step, fraction=fraction))
        reached.append(done)
    last = train(job("broken", *save, *load))
    trace = _logged(tmp_path / "broken")
    assert {iteration for iteration, _ in trace} == set(expected)
    assert [(iteration, loss) for iteration, loss in trace if loss != expected[iteration]] == []
    # Something was done anew and something was not: it was resumed, and from where it had been saved.
    assert len(trace) < (len(reached) + 1) * iterations
    assert last.parameters == unbroken.parameters
    assert last.steps == unbroken.steps[-len(last.steps) :]


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_the_second_save() -> None:
    """Rank 1 has no part in what rank 0 has begun to write."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    save, calls = dist_checkpointing.save, 0

    def second_is_the_last(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and dist.get_rank() == 1:
            _die()
        return save(*args, **options)

    Patches().set(dist_checkpointing, "save", second_is_the_last)


def _die_between_two_segments() -> None:
    """Rank 1 of the third step, with a guest's gradients on their way and home's segment to come."""
    import torch.distributed as dist

    from hotspa_megatron.hooks.moves import Moves

    begin_fold, calls = Moves.begin_fold, 0

    def third_is_the_last(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        begun = begin_fold(*args)
        if calls == 3 and dist.get_rank() == 1:
            _die()
        return begun

    Patches().set(Moves, "begin_fold", third_is_the_last)


@pytest.mark.parametrize(
    "end", [_die_in_the_second_save, pytest.param(_die_between_two_segments, marks=pytest.mark.long)]
)
def test_half_a_save_and_half_a_step_count_for_nothing(tmp_path: Path, end: Callable[[], None]) -> None:
    home = Home(2, 1, 1, ())
    both = "strategies: [{max_length: 64, tp: 1}]"
    save = ("--save", str(tmp_path), "--save-interval", "2")
    unbroken = train(Job(line(home, iterations=5), both, ranks=2))
    assert all({segment.kind for segment in step.segments} == {"guest", "home"} for step in unbroken.steps)
    with pytest.raises(AssertionError, match="exit code -9"):
        train(Job(line(home, *save, iterations=5), both, ranks=2, before=end))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (tmp_path / "iter_0000004").exists() == (end is _die_in_the_second_save)
    resumed = train(Job(line(home, *save, "--load", str(tmp_path), iterations=5), both, ranks=2))
    assert resumed.iterations == unbroken.iterations[2:]
    assert resumed.steps == unbroken.steps[2:]
    assert resumed.parameters == unbroken.parameters


def _die_before_it_is_finished() -> None:
    """With all shards written."""
    from megatron.core.dist_checkpointing import serialization

    Patches().set(serialization, "save_config", _die)


@pytest.mark.long
def test_a_save_over_an_earlier_one_keeps_that_until_it_is_finished(tmp_path: Path) -> None:
    """Who goes back to an earlier checkpoint meets the later ones again; the tracker still names the last of those."""
    home, both = Home(1, 1, 1, ()), STATIC
    save = ("--save", str(tmp_path), "--save-interval", "2")
    back = (*save, "--load", str(tmp_path), "--ckpt-step", "2", "--override-opt-param-scheduler")
    whole = train(Job(line(home, *save, iterations=4), both, ranks=1))
    later, aside = tmp_path / "iter_0000004", tmp_path / "iter_0000004.replaced"
    before = {path.name: path.read_bytes() for path in later.iterdir()}
    with pytest.raises(AssertionError, match="exit code -9"):
        train(Job(line(home, *back, iterations=4), both, ranks=1, before=_die_before_it_is_finished))
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before
    told = refusal(Job(line(home, "--load", str(tmp_path), iterations=4), both, ranks=1))
    assert (
        "is not whole: its save was interrupted; --ckpt-step 2 names the latest" in told and f"kept in {aside}" in told
    )
    again = train(Job(line(home, *back, iterations=4), both, ranks=1))
    assert again.iterations == whole.iterations[2:] and again.parameters == whole.parameters
    assert (later / "metadata.json").is_file()
    deadline = time.monotonic() + 30
    while aside.exists():  # removed beside the training
        assert time.monotonic() < deadline
        time.sleep(0.05)


DIES_WHILE_IT_WRITES = """
    import os
    import signal
    from megatron.training import checkpointing
    schedule, calls = checkpointing.schedule_async_save, 0

    def second_is_the_last(request):
        global calls
        calls += 1
        schedule(request)
        if calls == 2 and os.environ["RANK"] == "1":
            os.killpg(0, signal.SIGKILL)  # the writer as well, as when a node goes down

    checkpointing.schedule_async_save = second_is_the_last
"""


@pytest.mark.parametrize(
    ("home", "dies"),
    [
        (Home(2, 1, 1, ()), False),
        pytest.param(Home(1, 1, 1, (SHARDED,)), False, marks=pytest.mark.long),
        pytest.param(Home(2, 1, 1, ()), True, marks=pytest.mark.long),
    ],
    ids=["ends well", "ends well with a sharded optimizer", "dies in a save"],
)
def test_what_is_written_beside_the_training_is_a_whole_checkpoint_or_none(
    tmp_path: Path, home: Home, dies: bool
) -> None:
    """--async-save as people run it: each rank's writer is a process that finds what it needs by the script's name."""
    both, folder = f"strategies: [{{max_length: 64, tp: {3 - home.tp}}}]", tmp_path / "saved"
    save = f"""
        --save {folder} --save-interval 2 --async-save --async-strategy mcore --use-persistent-ckpt-worker
        --no-ckpt-fully-parallel-save --ckpt-assume-constant-structure --log-progress
    """.split()
    folder.mkdir()  # 0.17 makes it after --log-progress has written there
    begins = 'if __name__ == "__main__":\n'
    head, main = SCRIPT.read_text().split(begins)
    script = tmp_path / "pretrain.py"
    script.write_text(f"{head}{begins}{DIES_WHILE_IT_WRITES if dies else ''}{main}")
    code, output, errors = under_torchrun(tmp_path / "logs", script, *line(home, *save, iterations=6), *flag(both))
    assert (code != 0) == dies, errors
    assert "scheduled an async checkpoint save at iteration       4" in output[0] or dies
    last = int((folder / "latest_checkpointed_iteration.txt").read_text())
    assert last in ((2, 4) if dies else (6,))
    go_on = (
        "--load",
        str(folder),
        "--ckpt-step",
        str(min(last, 4)),
        "--ckpt-fully-parallel-load",
        "--use-checkpoint-args",
    )
    resumed = train(Job(line(home, *go_on, iterations=6), both, ranks=2))
    unbroken = train(Job(line(home, iterations=6), both, ranks=2))
    assert resumed.iterations == unbroken.iterations[min(last, 4) :]
    assert resumed.parameters == unbroken.parameters
    stock = train(Job(line(home, *go_on, iterations=6), None, ranks=2, hooks=False))
    assert [each.number for each in stock.iterations] == [each.number for each in resumed.iterations]
    assert stock.loaded == resumed.loaded != unbroken.parameters


# ------------------------------------------------------------------------------------------------- in another layout


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A run of six iterations with a checkpoint after the third."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, train(Job(line(TP2_PP2, "--save", str(folder), "--save-interval", "3"), TWO_GUESTS))


@pytest.mark.parametrize(
    ("home", "config"),
    [(DP4, PIPELINED_GUEST), (TP2_CP2, GUEST_AND_SIBLING), pytest.param(DP4, STATIC, marks=pytest.mark.long)],
    ids=["dp4 with a guest", "tp2-cp2 with a guest and a sibling", "dp4 alone"],
)
def test_a_run_goes_on_under_another_home(saved: tuple[Path, Run], home: Home, config: str) -> None:
    folder, unbroken = saved
    resumed = train(
        Job(line(home, "--load", str(folder), "--ckpt-step", "3", "--override-opt-param-scheduler"), config)
    )
    assert samples(resumed) == samples(unbroken)[3:]
    assert [each.consumed_samples for each in resumed.iterations] == [64, 80, 96]
    for here, there in zip(resumed.iterations, unbroken.iterations[3:], strict=True):
        assert math.isclose(here.loss, there.loss, rel_tol=1e-6)
        assert math.isclose(here.grad_norm, there.grad_norm, rel_tol=1e-5)
    # Weights that were not loaded would be seen.
    assert not math.isclose(unbroken.losses[3], unbroken.losses[0], rel_tol=1e-4)


# ----------------------------------------------------------------------------- epochs, blends, counting by samples


GUEST = "strategies: [{max_length: 64, tp: 2}]"


def _counted_in_samples(*more: str, total: int, ranks: int = 2, config: str = GUEST) -> Job:
    """A job that is told how many samples to train on, on a blend of two small corpora that it goes through more than once."""
    one, other = corpus((30, 12, 200, 5, 77, 9)), corpus(skewed_lengths()[:20])
    text = list(
        line(Home(1, 1, 1, ()), "--split", "100,0,0", "--data-path", "0.3", str(one), "0.7", str(other), *more, batch=8)
    )
    for name in ("--train-iters", "--lr-decay-iters"):
        del text[text.index(name) : text.index(name) + 2]
    counts = ("--train-samples", str(total), "--lr-decay-samples", "320")
    return Job((*text, *counts), config, ranks=ranks)


def test_a_blend_goes_on_across_epochs_when_samples_are_counted(tmp_path: Path) -> None:
    unbroken = train(_counted_in_samples("--save", str(tmp_path), "--save-interval", "2", total=48))
    assert [each.consumed_samples for each in unbroken.iterations] == [8, 16, 24, 32, 40, 48]
    drawn = [(source, document) for _, found in samples(unbroken) for source, document, *_ in found]
    # Both corpora were gone through once and begun again before the end, the small one before the checkpoint.
    for source, documents in ((0, 6), (1, 20)):
        own = [document for each, document in drawn if each == source]
        assert len(own) > len(set(own)) >= documents - 1
    load = ("--load", str(tmp_path), "--override-opt-param-scheduler")
    for iteration in (2, 4):
        resumed = train(_counted_in_samples(*load, "--ckpt-step", str(iteration), total=48))
        assert resumed.iterations == unbroken.iterations[iteration:]
        assert resumed.steps == unbroken.steps[iteration:]
        assert resumed.parameters == unbroken.parameters


@pytest.mark.parametrize(("ranks", "config"), [(1, STATIC), (4, PIPELINED_GUEST)])
def test_the_samples_of_a_step_do_not_depend_on_ranks_and_strategies(ranks: int, config: str) -> None:
    two, other = (train(_counted_in_samples(total=24, **each)) for each in ({}, {"ranks": ranks, "config": config}))  # type: ignore[arg-type]
    assert samples(two) == samples(other)
    assert [each.consumed_samples for each in two.iterations] == [each.consumed_samples for each in other.iterations]
    for here, there in zip(two.losses, other.losses, strict=True):
        assert math.isclose(here, there, rel_tol=1e-6)
