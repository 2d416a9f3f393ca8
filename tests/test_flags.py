"""Megatron's flags beside ours: the table of them is true, row by row, and so is the page that is made of it."""

from __future__ import annotations

import argparse
import ast
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hotspa_megatron.hooks.flags import NEWEST, TABLE, OnGpus, Refusal, Works, conflicts, refusals
from tests.spawn import REPOSITORY, run_ranks
from tests.training import (
    RELEASE,
    SHARDED,
    SP,
    STATIC,
    Home,
    Job,
    Run,
    arguments,
    difference,
    from_common_weights,
    import_megatron,
    train,
)

pytestmark = pytest.mark.timeout(600)

ROWS = [row for _, rows in TABLE for row in rows]


def _known(row: Works | OnGpus | Refusal) -> bool:
    """Whether the installed release has the row's flags."""
    if row.since == "main":
        return RELEASE > NEWEST
    return not row.since or tuple(int(part) for part in row.since.split(".")) <= RELEASE


# ---------------------------------------------------------------------------------------------------------- the table


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise AssertionError(message)  # a row's example is what Megatron takes


def _flags_and_refusals(rank: int, world_size: int, lines: Sequence[tuple[str, ...]]) -> tuple[set[str], list[str]]:
    """Every flag that Megatron's parser has, and what each of the command lines is refused with ("" where it is not)."""
    from megatron.training import arguments as megatron_arguments

    from hotspa_megatron.hooks.arguments import check_flags

    parser = megatron_arguments.add_megatron_arguments(_Parser(allow_abbrev=False))
    said = []
    for line in lines:
        try:
            check_flags(parser.parse_args(line))
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")
    return {flag for action in parser._actions for flag in action.option_strings}, said


@pytest.fixture(scope="module")
def parsed() -> tuple[set[str], list[str]]:
    """Of an ordinary command line, and of the same with each refused row's example."""
    line = arguments(documents=Path("documents"))
    lines = [line, *((*line, *row.example.split()) for row in refusals() if _known(row))]
    ((flags, said),) = run_ranks(_flags_and_refusals, 1, lines, prepare=import_megatron, init_process_group=False)
    return flags, said


def test_every_flag_is_megatrons_or_says_since_when(parsed: tuple[set[str], list[str]]) -> None:
    flags, _ = parsed
    for row in ROWS:
        for flag in row.flag.split() if isinstance(row, Refusal) else row.flags.split():
            # 0.17 has the ramp that later releases pass over.
            assert (flag in flags) == (_known(row) or flag == "--rampup-batch-size"), (flag, row.since)


def test_refused_rows_refuse_with_their_line_and_nothing_else_does(parsed: tuple[set[str], list[str]]) -> None:
    _, (ordinary, *said) = parsed
    assert ordinary == ""
    assert said == [row.line for row in refusals() if _known(row)]
    for line in said:
        assert re.fullmatch(r"--[a-z0-9-]+: [^\n]+ \(--hotspa-config is set\)", line), line


def test_rows_that_name_a_test_name_one_that_there_is() -> None:
    tests: dict[str, set[str]] = {}
    for row in ROWS:
        if isinstance(row, Works):
            file, name = row.test.split("::")
            if file not in tests:
                tree = ast.parse((REPOSITORY / "tests" / file).read_text())
                tests[file] = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
            assert name in tests[file], row.test


def test_rows_that_name_a_test_have_their_flags_in_it() -> None:
    shared = "".join((REPOSITORY / "tests" / name).read_text() for name in ("training.py", "job.py"))
    for row in ROWS:
        if isinstance(row, Works):
            text = shared + (REPOSITORY / "tests" / row.test.split("::")[0]).read_text()
            for flag in row.flags.split():
                assert re.search(rf"{flag}(?![\w-])", text), (flag, row.test)


def test_no_flag_stands_in_two_rows_that_say_the_same() -> None:
    for kind in (Works, OnGpus):
        flags = [flag for row in ROWS if isinstance(row, kind) for flag in row.flags.split()]
        assert len(flags) == len(set(flags))
    assert len({row.flag for row in refusals()}) == len(list(refusals()))


def test_conflicts_are_read_off_a_command_line_as_a_job_finds_them() -> None:
    ordinary = arguments(documents=Path("documents"))
    assert conflicts(ordinary) == []
    for row in refusals():
        assert conflicts([*ordinary, *row.example.split()]) == [row], row.flag
    both = [*ordinary, "--num-experts=8", "--fp8-format", "hybrid", "--micro-batch-size=1"]
    assert [row.flag for row in conflicts(both)] == ["--num-experts", "--fp8-format"]


# ------------------------------------------------------------------------------------------------- what a file allows


ALLOWED: list[tuple[str, tuple[Any, ...], str, str]] = [
    ("--fp8-format hybrid", (), "", r"--fp8-format: never ran .*; allow_untested: \[fp8\] lets it run"),
    ("--fp8-format hybrid", ("megatron",), "", "--fp8-format: never ran"),
    ("--fp8-format hybrid", ("fp8",), "", "$"),
    ("--fp8-format hybrid --fp8-param-gather", ("fp8",), "", "--fp8-param-gather: keeps parameters in fp8"),
    ("", (), "0.20.0rc1", r"megatron-core 0\.20\.0rc1 is newer than 0\.19.*allow_untested: \[megatron\]"),
    ("", ("megatron",), "0.20.0rc1", "$"),
    ("", ("fp8",), "1.0.0", r"megatron-core 1\.0\.0 is newer than 0\.19"),
    ("", (), "0.19.9", "$"),
]
"""A command line's further flags, what the file allows, the version that Megatron says it is, what a job ends with."""


def _checked(rank: int, world_size: int) -> list[str]:
    from megatron.core import package_info
    from megatron.training import arguments as megatron_arguments

    from hotspa_megatron.hooks.startup import check_untested

    parser = megatron_arguments.add_megatron_arguments(_Parser(allow_abbrev=False))
    said, installed = [], package_info.__version__
    for more, allowed, version, _ in ALLOWED:
        package_info.__version__ = version or installed
        try:
            check_untested(parser.parse_args(arguments(*more.split(), documents=Path("documents"))), allowed)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_the_file_may_allow_what_nobody_ran() -> None:
    (said,) = run_ranks(_checked, 1, prepare=import_megatron, init_process_group=False)
    for line, (*_, expected) in zip(said, ALLOWED, strict=True):
        assert re.match(expected, line), line


# ------------------------------------------------------------------------------------------------------ short trainings

TP2 = Home(2, 1, 1, (SP, SHARDED))
DP2 = Home(1, 1, 1, (SHARDED,))
GUEST = "strategies: [{max_length: 64, tp: 1, tokens_per_microbatch: 128}]"
EVERYDAY = shlex.split("""
    --decoupled-lr 5e-4 --decoupled-min-lr 4e-5 --rotary-base 1000000 --use-rope-scaling --rotary-percent 0.5
    --check-for-large-grads --no-check-for-nan-in-loss-and-grad --check-weight-hash-across-dp-replicas-interval 2
    --log-num-zeros-in-grad --log-params-norm --log-throughput --manual-gc --manual-gc-interval 1
    --cross-entropy-loss-fusion --empty-unused-memory-level 1 --train-sync-interval 1 --rerun-mode disabled
    --no-mmap-bin-files --disable-gloo-process-groups --distributed-timeout-minutes 30 --exit-duration-in-mins 235
""")
"""As launch scripts have them, Megatron's own example for Llama 3 among them."""


def run(home: Home, config: str, *more: str, iterations: int = 4) -> Run:
    return home.run(config, *more, iterations=iterations, batch=8, ranks=2)


def assert_alike(mixed: Run, static: Run, *, strategies: int = 2) -> None:
    losses, norms = difference(mixed.losses, static.losses), difference(mixed.grad_norms, static.grad_norms)
    print(f"losses {losses:.1e}, gradient norms {norms:.1e}")
    assert len(mixed.losses) == len(static.losses) > 2
    assert losses <= 1e-6 and norms <= 1e-5
    assert len({segment.strategy for step in mixed.steps for segment in step.segments}) == strategies


def test_everyday_flags_train_as_the_static_run_does() -> None:
    mixed, static = (run(TP2, config, *EVERYDAY) for config in (GUEST, STATIC))
    assert_alike(mixed, static)
    # They are in use: at one learning rate for all parameters the same steps end elsewhere.
    other = run(TP2, GUEST, *EVERYDAY[4:])
    assert EVERYDAY[2] == "--decoupled-min-lr" and difference(other.losses, static.losses) > 1e-5


LOW_PRECISION = {
    "bf16": "--bf16 --grad-reduce-in-bf16",
    "fp16": "--fp16 --initial-loss-scale 128 --min-loss-scale 1 --loss-scale-window 3 --hysteresis 1 "
    "--accumulate-allreduce-grads-in-fp32",
}


@pytest.mark.parametrize("kind", ["fp16", pytest.param("bf16", marks=pytest.mark.long)])
def test_low_precision_differs_by_no_more_than_static_layouts_do(kind: str) -> None:
    flags = LOW_PRECISION[kind].split()
    tp, dp, mixed = (run(home, config, *flags) for home, config in ((TP2, STATIC), (DP2, STATIC), (TP2, GUEST)))
    spread = difference(dp.losses, tp.losses), difference(dp.grad_norms, tp.grad_norms)
    seen = difference(mixed.losses, tp.losses), difference(mixed.grad_norms, tp.grad_norms)
    print(f"{kind}: losses {seen[0]:.1e} (static layouts {spread[0]:.1e}), norms {seen[1]:.1e} ({spread[1]:.1e})")
    assert len(mixed.losses) == 4 and len({segment.strategy for step in mixed.steps for segment in step.segments}) == 2
    assert seen[0] <= max(2 * spread[0], 1e-5) < 1e-3 and seen[1] <= max(2 * spread[1], 1e-4) < 0.1


def test_an_overflow_of_a_guests_fp16_gradients_skips_the_step() -> None:
    """Its losses are scaled as home's are, and what overflows there is found where the optimizer is."""
    steps = ((20, 21, 22, 23, 24, 25, 26, 27), (30, 31, 32, 33, 34, 35, 36, 37))
    flags = ("--fp16", "--hysteresis", "1", "--initial-loss-scale")
    too_large, fitting = (TP2.run(GUEST, *flags, scale, steps=steps, ranks=2) for scale in ("4294967296", "128"))
    for each in (too_large, fitting):
        assert [[segment.kind for segment in step.segments] for step in each.steps] == [["guest"], ["guest"]]
    assert all(math.isnan(norm) for norm in too_large.grad_norms) and too_large.parameters == too_large.loaded
    assert not any(math.isnan(norm) for norm in fitting.grad_norms) and fitting.parameters != fitting.loaded


def test_other_optimizers_and_counts_train_as_the_static_run_does() -> None:
    flags = shlex.split("""
        --optimizer sgd --sgd-momentum 0.9 --dataloader-type cyclic --distribute-saved-activations
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    """)
    counts = ("--train-samples", "32", "--lr-decay-samples", "32", "--lr-warmup-samples", "8")
    line = list(arguments(*from_common_weights(), *flags, tp=2, batch=8))
    for flag in ("--train-iters", "--lr-decay-iters"):
        at = line.index(flag)
        del line[at : at + 2]
    mixed, static = (train(Job((*line, *counts), config, ranks=2)) for config in (GUEST, STATIC))
    assert [each.consumed_samples for each in mixed.iterations] == [8, 16, 24, 32]
    assert_alike(mixed, static)
