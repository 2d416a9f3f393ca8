"""Checkpoints under the flag are stock Megatron's: resuming continues the unbroken run, and either side loads the other's.

What the count of consumed samples means where the flag comes or goes is held in test_start_sample.py.
"""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hotspa_megatron.hooks import checkpoint
from hotspa_megatron.hooks.patching import Patches
from tests.spawn import run_ranks
from tests.test_data_faults import _no_process_group, refusal
from tests.training import (
    GUEST_AND_SIBLING,
    PIPELINED_GUEST,
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
    import_megatron,
    train,
    workspace,
)

GUEST = "strategies: [{max_length: 64, tp: 2}]"
TP2 = Home(2, 1, 1, (SP, SHARDED))
TP1_GUEST = "strategies: [{max_length: 48, tp: 1, tokens_per_microbatch: 96}]"
RESHARDABLE = "--dist-ckpt-optim-fully-reshardable"


class Setup(NamedTuple):
    home: Home
    config: str
    ranks: int


SETUPS = {
    "plain": Setup(TP2_PP2, TWO_GUESTS, 4),
    "sharded": Setup(Home(1, 1, 1, (SHARDED,)), GUEST, 2),
}
"""By what becomes of the optimizer: every rank has its parameters' state, or the data-parallel ranks share it."""


def run(setup: Setup, *more: str, iterations: int, **options: Any) -> Run:
    home = setup.home
    line = arguments(*home.flags, *more, tp=home.tp, cp=home.cp, pp=home.pp, iterations=iterations)
    return train(Job(line, setup.config, ranks=setup.ranks, **options))


def stock(setup: Setup, *more: str, iterations: int) -> Run:
    """Without the flag, and without a hook of ours."""
    return run(setup._replace(config=None), *more, iterations=iterations, hooks=False)  # type: ignore[arg-type]


def saving(name: str, interval: int = 3) -> tuple[str, ...]:
    return ("--save", str(workspace() / name), "--save-interval", str(interval))


def loading(name: str, iteration: int) -> tuple[str, ...]:
    # Only the number of iterations differs from what was saved; the scheduler would take that for a mistake.
    return ("--load", str(workspace() / name), "--ckpt-step", str(iteration), "--override-opt-param-scheduler")


def unbroken(name: str) -> Run:
    return run(SETUPS[name], *saving(name), iterations=6)


# ---------------------------------------------------------------------------------------------------- in one layout


@pytest.mark.parametrize("name", list(SETUPS))
def test_resuming_continues_the_unbroken_run_bit_for_bit(name: str) -> None:
    whole, resumed = unbroken(name), run(SETUPS[name], *loading(name, 3), iterations=6)
    assert [each.number for each in resumed.iterations] == [4, 5, 6]
    assert resumed.iterations == whole.iterations[3:]
    assert resumed.steps == whole.steps[3:]
    assert resumed.parameters == whole.parameters
    assert resumed.loaded != whole.loaded != whole.parameters  # three different states, so the hashes say something


@pytest.mark.long
def test_resuming_draws_the_same_random_numbers() -> None:
    """With dropout: the numbers of every segment are a function of the step alone."""
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    plain = SETUPS["plain"]
    whole = run(plain, *dropout, *saving("dropout"), iterations=5)
    resumed = run(plain, *dropout, *loading("dropout", 3), iterations=5)
    assert resumed.iterations == whole.iterations[3:]
    assert resumed.parameters == whole.parameters
    assert resumed.losses != run(plain, *loading("dropout", 3), iterations=5).losses


def test_a_resumed_run_may_change_strategies() -> None:
    whole = unbroken("plain")
    static = run(SETUPS["plain"]._replace(config=STATIC), *loading("plain", 3), iterations=6)
    assert [each.consumed_samples for each in static.iterations] == [64, 80, 96]
    assert_goes_on(static, whole)


def assert_goes_on(resumed: Run, whole: Run) -> None:
    """In another layout: the same to the order of sums."""
    first = resumed.iterations[0].number - 1
    assert [each.number for each in resumed.iterations] == [each.number for each in whole.iterations[first:]]
    losses = difference(resumed.losses, whole.losses[first:])
    norms = difference(resumed.grad_norms, whole.grad_norms[first:])
    print(f"losses {losses:.1e}, gradient norms {norms:.1e}")
    assert losses <= 1e-6 and norms <= 1e-5
    # A run that had not moved on from its start would be seen.
    assert difference(whole.losses[first : first + 1], whole.losses[:1]) > 1e-4


# --------------------------------------------------------------------------------------------- stock Megatron's own


@pytest.mark.parametrize("name", list(SETUPS))
def test_stock_megatron_loads_what_was_saved_under_the_flag(name: str) -> None:
    whole = unbroken(name)
    later = stock(SETUPS[name], *loading(name, 6), iterations=8)
    assert later.loaded == whole.parameters
    assert [(each.number, each.consumed_samples) for each in later.iterations] == [(7, 112), (8, 128)]
    assert all(math.isfinite(each.loss) for each in later.iterations)


def test_both_save_the_same_but_for_two_strings_among_the_arguments() -> None:
    unbroken("sharded")
    stock(SETUPS["sharded"], *saving("stock"), iterations=3)
    ours, theirs = (contents(workspace() / name / "iter_0000003") for name in ("sharded", "stock"))
    assert ours - theirs == {"args.hotspa_config", "args.hotspa_samples"} and theirs <= ours
    assert any(key.startswith("optimizer") for key in theirs) and "args.num_layers" in theirs


def test_no_file_of_a_checkpoint_names_a_class_of_ours() -> None:
    """Files hold pickles uncompressed, in which the module of every class stands in plain letters."""
    unbroken("sharded")
    files = [path for path in (workspace() / "sharded" / "iter_0000003").rglob("*") if path.is_file()]
    texts = [path.read_bytes() for path in files]
    assert any(b"argparse" in text for text in texts)
    assert [path for path, text in zip(files, texts, strict=True) if b"hotspa_megatron" in text] == []


def contents(checkpoint: Path) -> set[str]:
    """Every key of a checkpoint: what is sharded, and the common state, its arguments included."""
    (keys,) = run_ranks(_read_contents, 1, checkpoint, prepare=import_megatron, init_process_group=False)
    return set(keys)


def _read_contents(rank: int, world_size: int, checkpoint: Path) -> list[str]:
    from megatron.core.dist_checkpointing import serialization

    stored = serialization.load_sharded_metadata(str(checkpoint))  # tensors and objects
    common = serialization.load_common_state_dict(str(checkpoint))
    return [*stored, *common, *(f"args.{name}" for name in vars(common["args"]))]


# ------------------------------------------------------------------------------------------------ in another layout


def copying_state(folder: Path) -> Callable[[], None]:
    """For ``Job.before``: have the job write its state for any layout, too: to "begin" before its first iteration, and to the
    iteration's number wherever it saves."""
    return functools.partial(_copy_state, folder)


def _copy_state(folder: Path) -> None:
    from megatron.training import checkpointing, get_args, training

    train_, save = training.train, training.save_checkpoint_and_time

    def copy(name: str, model: Any, optimizer: Any, scheduler: Any) -> None:
        args, patches = get_args(), Patches()
        patches.set(args, "save", str(folder / name))
        patches.set(args, "dist_ckpt_optim_fully_reshardable", True)
        checkpointing.save_checkpoint(1, model, optimizer, scheduler, 0)
        patches.undo_all()

    def train(forward_step: Any, model: Any, optimizer: Any, scheduler: Any, *rest: Any, **options: Any) -> Any:
        copy("begin", model, optimizer, scheduler)
        return train_(forward_step, model, optimizer, scheduler, *rest, **options)

    def save_too(iteration: int, model: Any, optimizer: Any, scheduler: Any, *rest: Any, **options: Any) -> Any:
        copy(str(iteration), model, optimizer, scheduler)
        return save(iteration, model, optimizer, scheduler, *rest, **options)

    Patches().set(training, "train", train)
    Patches().set(training, "save_checkpoint_and_time", save_too)


class State(NamedTuple):
    """What a checkpoint holds whatever the layout: tensors whole, by name (fp32 copies, both moments, weights), and the
    optimizer's steps."""

    tensors: dict[str, Any]
    steps: set[float]


def state(folder: Path) -> State:
    ((tensors, steps),) = run_ranks(_read_state, 1, folder / "iter_0000001", prepare=import_megatron)
    return State(tensors, steps)


def _read_state(rank: int, world_size: int, checkpoint: Path) -> tuple[dict[str, Any], set[float]]:
    import torch
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load_plain_tensors(str(checkpoint))
    tensors = {name: each for name, each in found.items() if torch.is_tensor(each) and each.is_floating_point()}
    common = dist_checkpointing.load_common_state_dict(str(checkpoint))
    groups = common["optimizer"]["optimizer"]["param_groups"]
    return {name: tensor.float().numpy() for name, tensor in tensors.items()}, {
        float(group["step"]) for group in groups
    }


def assert_same_bits(one: State, other: State) -> None:
    assert one.tensors.keys() == other.tensors.keys() and one.steps == other.steps
    assert {kind for kind in ("param", "exp_avg", "exp_avg_sq") for name in one.tensors if f".{kind}." in name} == {
        "param", "exp_avg", "exp_avg_sq"
    }  # fmt: skip
    different = [name for name in one.tensors if one.tensors[name].tobytes() != other.tensors[name].tobytes()]
    assert different == []


@functools.cache
def any_layouts() -> Run:
    more = (*saving("any"), RESHARDABLE)
    return run(Setup(TP2, TP1_GUEST, 2), *more, iterations=6, before=copying_state(workspace() / "any-copy"))


@pytest.mark.parametrize(
    ("home", "config", "ranks"),
    [
        pytest.param(Home(1, 1, 1, (SHARDED,)), GUEST, 2, marks=pytest.mark.long),
        pytest.param(Home(1, 1, 2, (SHARDED,)), STATIC, 2, marks=pytest.mark.long),
        pytest.param(Home(1, 1, 1, (SHARDED,)), PIPELINED_GUEST, 4, marks=pytest.mark.long),
        pytest.param(TP2_CP2, GUEST_AND_SIBLING, 4, marks=pytest.mark.long),
        pytest.param(Home(4, 1, 1, (SHARDED, SP)), STATIC, 4, marks=pytest.mark.long),
        pytest.param(Home(2, 1, 2, (SHARDED, SP)), TWO_GUESTS, 4, marks=pytest.mark.long),
    ],
    ids=["dp2", "pp2", "dp4", "tp2-cp2", "tp4", "tp2-pp2"],
)
def test_a_sharded_optimizers_state_is_the_same_under_another_home(
    home: Home, config: str, ranks: int, tmp_path: Path
) -> None:
    """Gate and up of SwiGLU's first layer, which lie in turns over tensor-parallel ranks, among it."""
    whole = any_layouts()
    resumed = run(Setup(home, config, ranks), *loading("any", 3), iterations=6, before=copying_state(tmp_path))
    assert_goes_on(resumed, whole)
    loaded, copies = state(tmp_path / "begin"), workspace() / "any-copy"
    assert_same_bits(loaded, state(copies / "3"))
    assert any("exp_avg_sq" in name and "linear_fc1" in name for name in loaded.tensors)
    with pytest.raises(AssertionError):
        assert_same_bits(loaded, state(copies / "6"))


# One weight is larger than all others together, so that at dp 3 and 4 slices lie inside it; others end in padding.
ONE_LARGE_WEIGHT = ("--make-vocab-size-divisible-by", "4096")
TIED = ("--group-query-attention", "--num-query-groups", "2", "--swiglu", "--disable-bias-linear",
        "--normalization", "RMSNorm", "--position-embedding-type", "rope")  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("chain", [(2, 3), (2, 3, 4, 1)])
def test_a_sharded_optimizers_state_is_the_same_at_any_dp(chain: tuple[int, ...], tmp_path: Path) -> None:
    """As Megatron saves it by default: by places in flat buffers, whose padding depends on dp."""

    def job(dp: int, *more: str, iterations: int, copy: Path) -> Run:
        line = arguments(SHARDED, *ONE_LARGE_WEIGHT, *more, iterations=iterations, batch=12, model=TIED)
        config = STATIC if dp % 2 else GUEST
        return train(Job(line, config, ranks=dp, before=copying_state(copy)))

    whole = job(chain[0], iterations=2 * len(chain), copy=tmp_path / "whole")
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "2")
    for link, dp in enumerate(chain):
        load = ("--load", str(tmp_path / "saved"), "--override-opt-param-scheduler") if link else ()
        part = job(dp, *save, *load, iterations=2 * link + 2, copy=tmp_path / str(link))
        losses = difference(part.losses, whole.losses[2 * link : 2 * link + 2])
        print(f"dp {dp}: losses {losses:.1e}")
        assert losses <= 1e-6 and len(part.losses) == 2
        if link:
            before, after = state(tmp_path / str(link - 1) / str(2 * link)), state(tmp_path / str(link) / "begin")
            assert_same_bits(after, before)
            assert after.steps == {2.0 * link}
    sizes = sorted(each.size for name, each in before.tensors.items() if name.startswith("optimizer.state.exp_avg."))
    assert sizes[-1] > sum(sizes[:-1]) and {size % 64 for size in sizes} > {0}


# ---------------------------------------------------------------------------------------------- the state stays put


def _optimizer_stays(folder: Path, touch: bool) -> None:
    """For ``Job.before``: look at every rank's optimizer, storage and bits, around the work of each step, up to where
    Megatron's own optimizer begins. ``touch`` changes a number of it in between."""
    import torch
    import torch.distributed as dist
    from megatron.training import training

    from hotspa_megatron.hooks.forward_backward import StepRunner

    setup, run_step, optimizers, steps = training.setup_model_and_optimizer, StepRunner.run, [], 0

    def setup_model_and_optimizer(*args: Any, **options: Any) -> Any:
        result = setup(*args, **options)
        optimizers.extend(each.optimizer for each in result[1].chained_optimizers)
        return result

    def seen() -> list[tuple[int, bytes]]:
        (optimizer,) = optimizers
        tensors = [each for group in optimizer.param_groups for each in group["params"]]
        tensors += [value for each in tensors for value in optimizer.state[each].values()]
        return [(each.data_ptr(), each.detach().reshape(-1).view(torch.uint8).numpy().tobytes()) for each in tensors]

    def run(self: Any, **options: Any) -> Any:
        nonlocal steps
        before = seen()
        result = run_step(self, **options)
        if touch and steps == 2 and dist.get_rank() == 1:
            next(iter(optimizers[0].state.values()))["exp_avg"][0] += 1
        assert seen() == before, "the optimizer's state was touched"
        steps += 1
        (folder / f"steps-{dist.get_rank()}").write_text(str(steps))
        return result

    Patches().set(training, "setup_model_and_optimizer", setup_model_and_optimizer)
    Patches().set(StepRunner, "run", run)


def _stays_and_is_copied(folder: Path) -> None:
    _copy_state(folder)
    _optimizer_stays(folder, touch=False)


def test_the_optimizers_state_stays_where_it_is_while_parameters_move(tmp_path: Path) -> None:
    """In bf16, whose fp32 copies would put an old weight back at the next step, had a switch changed it at home."""
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "10")
    line = arguments(*TP2.flags, "--bf16", "--lr", "0", "--min-lr", "0", *save, tp=2, iterations=10)
    still = train(Job(line, TP1_GUEST, ranks=2, before=functools.partial(_stays_and_is_copied, tmp_path)))
    assert all({segment.kind for segment in step.segments} == {"guest", "home"} for step in still.steps)
    assert [(tmp_path / f"steps-{rank}").read_text() for rank in range(2)] == ["10", "10"]
    assert still.parameters == still.loaded  # at a learning rate of 0: ten switches have brought back every bit
    begin, end = state(tmp_path / "begin"), state(tmp_path / "10")
    changed = {
        name.split(".")[2] for name in begin.tensors if begin.tensors[name].tobytes() != end.tensors[name].tobytes()
    }
    assert changed == {"exp_avg", "exp_avg_sq"} and end.steps == {10.0}


@pytest.mark.long
def test_a_touched_optimizer_is_seen(tmp_path: Path) -> None:
    line = arguments(*TP2.flags, tp=2, iterations=4)
    with pytest.raises(AssertionError, match="the optimizer's state was touched"):
        train(Job(line, TP1_GUEST, ranks=2, before=functools.partial(_optimizer_stays, tmp_path, True)))


@pytest.mark.long
def test_ten_steps_of_changing_strategies_leave_the_static_runs_fp32_copies(tmp_path: Path) -> None:
    ends = []
    for config in (TP1_GUEST, STATIC):
        folder = tmp_path / ("mixed" if config is TP1_GUEST else "static")
        save = ("--save", str(folder), "--save-interval", "10")
        train(Job(arguments(*TP2.flags, *save, tp=2, iterations=10), config, ranks=2, before=copying_state(folder)))
        ends.append(state(folder / "10"))
    begin, (mixed, static) = state(tmp_path / "static" / "begin"), ends
    weights = [name for name in static.tensors if ".param." in name]
    off = max(abs(mixed.tensors[name] - static.tensors[name]).max() for name in weights)
    moved = max(abs(begin.tensors[name] - static.tensors[name]).max() for name in weights)
    print(f"fp32 copies differ by {off:.1e}; training moved them by {moved:.1e}")
    assert off <= 1e-6 < 1e-3 < moved


# ------------------------------------------------------------------------------------------- what cannot be gone on from


def test_a_layout_that_the_state_was_not_saved_for_is_refused_before_anything_is_started() -> None:
    """Megatron's own error comes once all groups and the model are there, and names another flag."""
    unbroken("sharded")
    ours = refusal(Job(arguments(SHARDED, *loading("sharded", 3), tp=2), GUEST, ranks=2, before=_no_process_group))
    assert ours.startswith(f"--load {workspace() / 'sharded'}: its optimizer state was saved at tp1 pp1 without")
    assert f"cannot be loaded at tp2 pp1; run at tp1 pp1 with {RESHARDABLE} until" in ours
    plain = refusal(Job(arguments(*loading("sharded", 3)), GUEST, ranks=2, before=_no_process_group))
    assert "its optimizer state is the distributed optimizer's; add --use-distributed-optimizer, or" in plain


PP2 = Home(1, 1, 2, (SHARDED,))
NOT_LOADED = {
    "tp": (SETUPS["sharded"].home, Home(2, 1, 1, (SHARDED,)), "saved at tp1 pp1 without"),
    "vpp": (PP2, Home(1, 1, 2, (SHARDED, "--num-virtual-stages-per-pipeline-rank", "2")), "loaded at tp1 pp2 vpp2; run"),
    "uneven": (PP2, Home(1, 1, 2, (SHARDED, "--decoder-first-pipeline-num-layers", "1")),
               "loaded at tp1 pp2 --decoder-first-pipeline-num-layers 1; run"),
    "to plain": (PP2, Home(1, 1, 2, ()), "add --use-distributed-optimizer, or"),
    "from plain": (Home(1, 1, 2, ()), PP2, "saved without --use-distributed-optimizer"),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", list(NOT_LOADED))
def test_what_is_refused_is_what_megatron_cannot_load(name: str) -> None:
    first, then, line = NOT_LOADED[name]
    stock(Setup(first, STATIC, 2), *saving(f"refused-{name}", 1), iterations=1)
    load = loading(f"refused-{name}", 1)
    with pytest.raises(AssertionError, match="load_checkpoint"):
        stock(Setup(then, STATIC, 2), *load, iterations=2)
    with pytest.raises(AssertionError, match=re.escape(line)):
        run(Setup(then, "strategies: []\nsamples: documents\nstart_sample: 16", 2), *load, iterations=2)
    without = stock(Setup(then, STATIC, 2), *load, "--no-load-optim", iterations=2)
    assert [each.number for each in without.iterations] == [2]


def test_the_jobs_first_lines_say_which_flag_another_layout_takes() -> None:
    assert f"hotspa: checkpoints can be loaded at another dp or cp; for another tp or pp, save with {RESHARDABLE}" in (
        unbroken("sharded").output
    )
    assert "save with" not in any_layouts().output and "save with" not in unbroken("plain").output


def test_a_damaged_checkpoint_is_named_before_anything_is_started(tmp_path: Path) -> None:
    unbroken("sharded")
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    whole = workspace() / "sharded" / "iter_0000003"
    for name in ("metadata.json", ".metadata", "common.pt"):
        if (whole / name).exists():
            text = (whole / name).read_bytes()
            (folder / name).write_bytes(text if name == "metadata.json" else text[: len(text) // 2])
    line = refusal(Job(arguments(SHARDED, "--load", str(tmp_path)), GUEST, ranks=2, before=_no_process_group))
    assert line.startswith(f"--load: {folder} cannot be read (") and line.endswith("with --ckpt-step")


def test_a_checkpoint_that_is_gone_or_half_written_is_named_with_the_latest_whole_one(tmp_path: Path) -> None:
    def refused() -> str:
        return refusal(Job(arguments(SHARDED, "--load", str(tmp_path)), GUEST, ranks=2, before=_no_process_group))

    tracker, folder = tmp_path / "latest_checkpointed_iteration.txt", tmp_path / "iter_0000012"
    tracker.write_text("12")
    assert refused() == f"--load: {folder} is not there; give another --load"
    (tmp_path / "iter_0000009").mkdir()
    (tmp_path / "iter_0000009" / "metadata.json").write_text("{}")
    assert refused() == f"--load: {folder} is not there; --ckpt-step 9 names the latest that is whole"
    folder.mkdir()
    for name in ("common.pt", ".metadata"):
        (folder / name).write_text("")
    aside = tmp_path / "iter_0000012.replaced"
    aside.mkdir()
    line = f"--load: {folder} is not whole: its save was interrupted; --ckpt-step 9 names the latest that is whole"
    assert refused() == f"{line}; the one that it was to replace is kept in {aside}"


@pytest.mark.parametrize("name", ["metadata.json", ".metadata", "mp_rank_00_000"])
def test_every_format_of_megatrons_is_left_to_megatron(tmp_path: Path, name: str) -> None:
    folder, tracker = tmp_path / "iter_0000001", tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("1")
    folder.mkdir()
    with pytest.raises(ValueError, match="is not there"):
        checkpoint._check_whole(folder, tracker, of_torch=True)
    (folder / name).write_text("")
    checkpoint._check_whole(folder, tracker, of_torch=True)
    if name == ".metadata":  # which torch_dist has, too, before its save is finished
        with pytest.raises(ValueError, match="is not whole"):
            checkpoint._check_whole(folder, tracker, of_torch=False)
    else:
        checkpoint._check_whole(folder, tracker, of_torch=False)
    # Without a tracker nothing is loaded.
    checkpoint._check_whole(tmp_path / "iter_0000002", tmp_path / "none", of_torch=False)


def test_a_tracker_that_was_cut_is_seen(tmp_path: Path) -> None:
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    for number in (1, 12):
        folder = tmp_path / f"iter_{number:07}"
        folder.mkdir()
        (folder / "metadata.json").write_text("{}")
    tracker.write_text("1")
    line = checkpoint._surprise_of(tracker)
    assert line is not None and "names iteration 1, and there are whole checkpoints up to that of iteration 12" in line
    tracker.write_text("12")
    assert checkpoint._surprise_of(tracker) is None


def test_an_empty_tracker_stands_for_the_checkpoint_that_was_finished_last(tmp_path: Path) -> None:
    """As a rank leaves it that is killed while it writes it; Megatron ends with exit code 0, as if the job were done."""
    unbroken("sharded")
    whole, cut = tmp_path / "iter_0000003", tmp_path / "iter_0000006"
    whole.symlink_to(workspace() / "sharded" / "iter_0000003")
    cut.mkdir()
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("")
    resumed = run(
        SETUPS["sharded"],
        "--load",
        str(tmp_path),
        "--use-checkpoint-args",
        "--override-opt-param-scheduler",
        iterations=6,
    )
    assert resumed.output.count(f"{tracker} is empty, as a job leaves it that is killed while it writes it") == 1
    assert "finished counts, that of iteration 3" in resumed.output
    assert resumed.iterations == unbroken("sharded").iterations[3:]
    assert resumed.parameters == unbroken("sharded").parameters
    assert tracker.read_text() == ""


def test_an_empty_tracker_does_not_break_the_next_save(tmp_path: Path) -> None:
    """With --save-retain-interval Megatron reads a number in it first."""
    unbroken("sharded")
    shutil.copytree(workspace() / "sharded" / "iter_0000003", tmp_path / "iter_0000003")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("")
    save = ("--save", str(tmp_path), "--save-interval", "1", "--save-retain-interval", "2")
    resumed = run(SETUPS["sharded"], "--load", str(tmp_path), *save, "--override-opt-param-scheduler", iterations=6)
    assert resumed.iterations == unbroken("sharded").iterations[3:]
    assert tracker.read_text() == "6"
    # As the interval has it: the ones at its multiples stay.
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000006"]


def test_an_iteration_that_is_named_counts_whatever_an_empty_tracker_stands_for(tmp_path: Path) -> None:
    unbroken("sharded")
    for number in (3, 6):
        shutil.copytree(workspace() / "sharded" / f"iter_{number:07d}", tmp_path / f"iter_{number:07d}")
    os.utime(tmp_path / "iter_0000003" / "metadata.json", (2e9, 2e9))  # gone back to, and saved anew
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("")
    resumed = run(
        SETUPS["sharded"], "--load", str(tmp_path), "--ckpt-step", "3", "--override-opt-param-scheduler", iterations=6
    )
    assert resumed.iterations == unbroken("sharded").iterations[3:] and "is empty" not in resumed.output


def test_what_an_empty_tracker_stands_for(tmp_path: Path) -> None:
    """The checkpoint that was finished last; nothing, where a later iteration is there that was finished before it."""
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("\n")
    assert checkpoint.last_finished(tracker) is None
    for age, number in ((3, 2), (2, 4), (1, 10)):
        metadata = tmp_path / f"iter_{number:07d}" / "metadata.json"
        metadata.parent.mkdir()
        metadata.write_text("{}")
        os.utime(metadata, (1e9 - age, 1e9 - age))
        assert checkpoint.last_finished(tracker) == number
        checkpoint._check_tracker(tracker)
    (tmp_path / "iter_0000012").mkdir()
    assert checkpoint.last_finished(tracker) == 10
    # Gone back to iteration 2, and saved 4 anew.
    os.utime(tmp_path / "iter_0000004" / "metadata.json", (1e9, 1e9))
    assert checkpoint.last_finished(tracker) is None
    with pytest.raises(
        ValueError, match="holds ''; the latest whole checkpoint is that of iteration 10: write 10 into it"
    ):
        checkpoint._check_tracker(tracker)
    tracker.write_text("2")
    assert checkpoint.last_finished(tracker) is None


def test_a_folder_that_cannot_be_saved_to_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    """Megatron finds out at its first save, hours later."""
    file = tmp_path / "file"
    file.write_text("")
    save = ("--save", str(file / "deep" / "er"), "--save-interval", "2")
    line = refusal(Job(arguments(SHARDED, *save), GUEST, ranks=2, before=_no_process_group))
    assert line == f"--save: {file / 'deep' / 'er'}: {file} is no folder; name a folder that this job may write to"
    checkpoint._check_room(tmp_path / "deep" / "er")
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize("text", ["\0\0", "3 4", "-1", "releas"])
def test_a_tracker_that_names_no_iteration_is_refused(tmp_path: Path, text: str) -> None:
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text(text)
    with pytest.raises(ValueError, match=r"should name an iteration, and holds .*; remove it to begin anew"):
        checkpoint._check_tracker(tracker)
    for right in ("12\n", "release"):
        tracker.write_text(right)
        checkpoint._check_tracker(tracker)
    tracker.unlink()
    checkpoint._check_tracker(tracker)


# ----------------------------------------------------------------------- what stock Megatron lacks without Apex and TE


def _forget_the_step() -> None:
    """As Megatron has it, once it gets past the state that is not there yet."""
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    name = "_set_main_param_and_optimizer_states"
    # Its own would not get through in fp32, where it writes into parameters that require gradients.
    Patches().set(DistributedOptimizer, name, torch.no_grad()(getattr(DistributedOptimizer, name).__wrapped__))


def _as_megatron_has_it() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    _forget_the_step()
    Patches().set(DistributedOptimizer, "state_dict", DistributedOptimizer.state_dict.__wrapped__)  # type: ignore[attr-defined]


@pytest.mark.long
def test_without_the_stand_ins_mend_stock_megatron_and_the_flag_forget_the_same_step() -> None:
    """torch's AdamW keeps its step among the state, where Megatron's distributed optimizer does not restore it."""
    home, forgotten = SETUPS["sharded"].home, {}
    for name, hooks in (("stock", False), ("flag", True)):
        setup = Setup(home, GUEST if hooks else None, 2)  # type: ignore[arg-type]
        whole = run(setup, *saving(f"mend-{name}"), iterations=6, hooks=hooks)
        load = loading(f"mend-{name}", 3)
        mended = run(setup, *load, iterations=6, hooks=hooks)
        assert mended.iterations == whole.iterations[3:] and mended.parameters == whole.parameters
        without = run(setup, *load, iterations=6, hooks=hooks, before=_forget_the_step)
        assert without.losses[0] == whole.losses[3]
        forgotten[name] = difference(without.losses, whole.losses[3:])
        with pytest.raises(AssertionError, match=r"assert len\(steps\) == 1"):
            run(setup, *load, iterations=6, hooks=hooks, before=_as_megatron_has_it)
    print(f"losses of the resumed run differ by {forgotten} without the mend, by 0 with it")
    assert all(1e-5 < each < 1e-1 for each in forgotten.values())
