"""The launcher and the hooks at their edges: nothing changes without the flag, everything goes back, errors are one line."""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.spawn import run_ranks
from tests.training import (
    RELEASE,
    SCRIPT,
    SHARDED,
    Job,
    Run,
    arguments,
    corpus,
    flag,
    import_megatron,
    printed_losses,
    run_module,
    train,
    train_on_this_rank,
    under_torchrun,
)

# ------------------------------------------------------------------------------------------------------ without the flag


def test_without_the_flag_every_bit_is_stock_megatrons() -> None:
    """Through everything that the hooks replace: training, skipped steps, evaluation, the distributed optimizer."""
    line = arguments(
        SHARDED, "--iterations-to-skip", "2", "--eval-interval", "3", "--eval-iters", "1", tp=2, iterations=4
    )
    stock, hooked = (train(Job(line, None, hooks=hooks)) for hooks in (False, True))
    assert _bits(hooked) == _bits(stock)
    assert hooked.parameters == stock.parameters and len(stock.parameters) == 4
    # The comparison sees one more document in the last step.
    other = train(Job((*line, "--seed", "1235"), None))
    assert _bits(other) != _bits(stock) and other.parameters != stock.parameters


def _bits(run: Run) -> list[str]:
    numbers = [number for each in run.iterations for number in (each.loss, each.grad_norm)]
    return [number.hex() for number in (*numbers, *run.evaluations)]


# ------------------------------------------------------------------------------------------------------- and back again


def test_uninstalling_restores_every_name() -> None:
    documents = corpus()
    line = arguments("--eval-interval", "2", "--eval-iters", "1", tp=2, iterations=2, documents=documents)
    job = Job(line, "strategies: [{max_length: 32, tp: 1}, {max_length: 64, tp: 2}]")
    for changed, during in run_ranks(
        _install_and_uninstall, 2, job, flag(job.config), timeout=200, init_process_group=False
    ):
        assert changed == []
        # The comparison sees replaced names, in every package that has some.
        assert during >= 60


def _install_and_uninstall(rank: int, world_size: int, job: Job, more: tuple[str, ...]) -> tuple[list[str], int]:
    """Names that differ after a job and the way back, and how many differed before the way back."""
    from hotspa_megatron.hooks import cpu, install

    environment = dict(os.environ)
    names = _names("torch", "builtins", "typing")
    import_megatron()
    names += _names("megatron")
    train_on_this_rank(rank, world_size, job, [str(SCRIPT), *job.arguments, *more])
    main = vars(sys.modules["__main__"])
    assert hasattr(main["get_batch"], "serves_hotspa")
    during = _differing(names)
    assert {name.split(".")[0] for name in during} == {"torch", "builtins", "megatron"}
    assert all(name in during for name in ("torch.cuda.is_available", "megatron.training.training.train_step"))
    variables = [name[len("os.environ[") : -1] for name in cpu.replaced() if name.startswith("os.environ[")]
    install.uninstall()
    assert not hasattr(main["get_batch"], "serves_hotspa")
    assert not any(name.startswith("megatron.training") for name in _differing(names))
    cpu.uninstall()
    assert not install.replaced() and not cpu.replaced()
    left = [name for name in variables if os.environ.get(name) != environment.get(name)]
    return _differing(names) + left, len(during)


Name = tuple[str, Any, str, Any]
"""How it is called, what has it, its own name there, its value."""


def _names(*packages: str) -> list[Name]:
    """Functions, classes and modules that the loaded modules of these packages have, and their classes' own functions."""
    found: list[Name] = []
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] not in packages or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if callable(value) or isinstance(value, types.ModuleType):
                found.append((f"{name}.{attribute}", module, attribute, value))
            if isinstance(value, type) and value.__module__ == name:
                own = [(each, kept) for each, kept in list(vars(value).items()) if callable(kept)]
                found += [(f"{name}.{attribute}.{each}", value, each, kept) for each, kept in own]
    return found


def _differing(names: Sequence[Name]) -> list[str]:
    """Names whose value is another one now, except where Megatron put a function of its own into torch."""
    now = [(called, vars(owner).get(name), value) for called, owner, name, value in names]
    return [called for called, found, value in now if found is not value and not _is_megatrons(found)]


def _is_megatrons(value: Any) -> bool:
    code = getattr(getattr(value, "__func__", value), "__code__", None)  # a static method has its function inside
    return code is not None and "megatron" in Path(code.co_filename).parts


# ---------------------------------------------------------------------------------------------------------- bad input

GOOD = "strategies: [{max_length: 64, tp: 1}]"


def _launched(rank: int, world_size: int, argv: Sequence[str], errors: Path) -> tuple[int, str, str]:
    """Exit code, standard error and standard output of the launcher in this process; an exception fails the rank."""
    from hotspa_megatron import launch

    descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 2)
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = ["launch", *argv]
    code: Any = 0
    try:
        launch.main()
    except SystemExit as end:
        code = end.code
    import torch.distributed as dist

    assert not dist.is_initialized()
    sys.stdout.flush()
    return code, errors.read_text(), Path("/proc/self/fd/1").read_text(errors="replace")


def refused(argv: Sequence[str], folder: Path, *, world: int = 4) -> str:
    """The one line with which the launcher ends rank 0 of a world that does not exist: had it gone on, it would hang."""
    ((code, errors, output),) = run_ranks(
        _launched, 1, argv, folder / "errors", env={"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)},
        timeout=40, prepare=import_megatron, init_process_group=False,
    )  # fmt: skip
    ours = [line for line in errors.splitlines() if line.startswith("hotspa:")]
    assert code == 2 and len(ours) == 1, errors
    assert "Traceback" not in errors + output and "initializing torch distributed" not in output
    return ours[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--micro-batch-size", "2"), "--micro-batch-size: must be 1"),
        (
            ("--microbatch-group-size-per-virtual-pipeline-stage", "3"),
            "--microbatch-group-size-per-virtual-pipeline-stage: other than the pipeline size is not supported",
        ),
        (("--num-experts", "4"), "--num-experts: .*not supported yet"),
        (("--dataloader-type", "external"), "--dataloader-type: external"),
        (("--fp8-format", "e4m3"), "--fp8-format"),
        (("--use-megatron-fsdp",), "--use-megatron-fsdp"),
        (("--spec", "some.module", "layers"), "--spec"),
        pytest.param(
            ("--rampup-batch-size", "4", "4", "64"),
            "--rampup-batch-size: is ignored .*--step-batch-size-schedule",
            marks=pytest.mark.skipif(RELEASE < (0, 18), reason="Megatron has ramps there"),
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_flags_that_cannot_be_honoured(more: tuple[str, ...], message: str, tmp_path: Path) -> None:
    line = refused([str(SCRIPT), *arguments(*more, tp=2, pp=2, documents=tmp_path), *flag(GOOD)], tmp_path)
    assert re.search(message, line) and line.endswith("(--hotspa-config is set)"), line


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("strategies: []\nstratgies: []", "1?2.*stratgies.*strategies"),
        ("strategies: [{max_length: 010}]", "010"),
        ("strategies: []\nstrategies: []", "strategies.*twice|duplicate|again"),
        ("strategies: [{max_length: 64, cp: 3}]", "world of 4 ranks.*cp 3"),
        ("strategies: [{max_length: 512}]", "512 is longer than --seq-length 256"),
        ("strategies: []\nwatchdog_s: 600", "2: watchdog_s: 600 is not below --distributed-timeout-minutes, 600 s"),
    ],
    ids=["unknown key", "octal", "duplicate keys", "world", "max_length", "watchdog"],
)
def test_files_that_make_no_sense(config: str, message: str, tmp_path: Path) -> None:
    line = refused([str(SCRIPT), *arguments(tp=2, documents=tmp_path), *flag(config)], tmp_path)
    assert re.search(message, line) and flag(config)[1] in line, line


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--num-attention-heads", "6", "--num-query-groups", "6"), "6 attention heads do not divide over tp 4"),
        (("--make-vocab-size-divisible-by", "1"), "padded vocabulary of 122 .*tp 4.*--make-vocab-size-divisible-by"),
    ],
    ids=["heads", "vocabulary"],
)
def test_models_that_a_strategy_cannot_cut(more: tuple[str, ...], message: str, tmp_path: Path) -> None:
    config = "strategies: [{max_length: 64, tp: 4}]"
    line = refused([str(SCRIPT), *arguments(*more, tp=2, documents=tmp_path), *flag(config)], tmp_path)
    assert re.search(message, line), line


def test_files_that_are_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    assert missing in refused([str(SCRIPT), *arguments(documents=tmp_path), "--hotspa-config", missing], tmp_path)
    assert f"{missing}: no such script" in refused([missing, *arguments(documents=tmp_path)], tmp_path)


# ------------------------------------------------------------------------------------------------- as users start it


def test_the_launcher_says_how_to_use_it() -> None:
    bare, asked = run_module("hotspa_megatron.launch"), run_module("hotspa_megatron.launch", "--help")
    assert (bare.returncode, asked.returncode) == (2, 0)
    assert bare.stdout == asked.stdout and "--hotspa-config" in asked.stdout
    missing = run_module("hotspa_megatron.launch", "missing.py")
    assert missing.returncode == 2 and missing.stderr.startswith("hotspa: missing.py: no such script")


def test_torchrun_ends_with_one_line_where_ranks_are_refused(tmp_path: Path) -> None:
    line = arguments("--num-experts", "4", documents=tmp_path)
    code, output, errors = under_torchrun(tmp_path, SCRIPT, *line, *flag(GOOD))
    assert code != 0
    first, second = ([line for line in text.splitlines() if line.startswith("hotspa:")] for text in errors)
    assert len(first) == 1 and first[0].startswith("hotspa: --num-experts: ")
    # Rank 0 speaks for all, unless torchrun is so slow that another rank had to fear that nobody would.
    assert all(line == first[0].replace("hotspa:", "hotspa: rank 1:") for line in second)
    assert not any("Traceback" in text for text in (*output, *errors))
    assert not any("initializing torch distributed" in text for text in output)


def test_torchrun_trains_and_saves_as_the_tests_ranks_do(tmp_path: Path) -> None:
    """The launcher itself, and what it does for processes that a checkpoint's writers start."""
    line = arguments(tp=2, iterations=3)
    config = "strategies: [{max_length: 32, tp: 1}]"
    losses = train(Job(line, config, ranks=2)).losses
    code, output, errors = under_torchrun(
        tmp_path, SCRIPT, *line, "--save", str(tmp_path / "saved"), "--save-interval", "3", *flag(config)
    )
    assert code == 0, errors[0]
    assert (tmp_path / "saved" / "latest_checkpointed_iteration.txt").read_text() == "3"
    # Megatron prints the mean of the first two as the second.
    assert printed_losses(output[-1]) == [round(loss, 6) for loss in (losses[0], sum(losses[:2]) / 2, losses[2])]
    assert "hotspa: no CUDA device is visible" in output[0] and "no CUDA device" not in output[1]


def test_a_script_is_run_as_it_would_be_alone(tmp_path: Path) -> None:
    """Nothing of the launcher's own module shows, and processes that the script spawns find the script's functions."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import dataclasses, multiprocessing, sys

@dataclasses.dataclass
class Annotated:
    field: int

def child(queue):
    queue.put(("child", __name__))

if __name__ == "__main__":
    shown = sorted(name for name in globals() if not name.startswith("__"))
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(queue,))
    process.start(); process.join()
    print([each.type for each in dataclasses.fields(Annotated)], shown, __doc__, sys.argv[1:], queue.get(), process.exitcode)
"""
    )
    launched = run_module("hotspa_megatron.launch", str(script), "a", "b")
    names = ["Annotated", "child", "dataclasses", "multiprocessing", "sys"]
    expected = f"[<class 'int'>] {names} None ['a', 'b'] ('child', '__mp_main__') 0"
    assert launched.stdout.splitlines()[-1] == expected, launched.stderr
