"""Megatron's flags beside ours: the table of them is true, row by row, and so is the page that is made of it."""

from __future__ import annotations

import argparse
import ast
import functools
import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from hotspa_megatron.hooks.flags import (
    DOCUMENT_FLAGS,
    OR_WITHOUT,
    TABLE,
    Newer,
    OnGpus,
    Refusal,
    Works,
    conflicts,
    settings,
)
from tests.job import Mix, start
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

ROWS = [row for _, rows in TABLE for row in rows if not isinstance(row, Newer)]
REFUSED = [row for row in ROWS if isinstance(row, Refusal)]


def _release(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in number.split("."))


def _known(row: Works | OnGpus | Refusal) -> bool:
    """Whether the row is about the installed release, or a newer one. What a branch alone has is in none."""
    if isinstance(row, Works) and row.until:
        return _release(row.until) > RELEASE
    return not row.since or (row.since != "dev" and _release(row.since) <= RELEASE)


def _flags_of(row: Works | OnGpus | Refusal) -> list[str]:
    """Its flags, without values."""
    return [row.flag] if isinstance(row, Refusal) else [each.split()[0] for each in settings(row.flags)]


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
    lines = [line, *((*line, *row.example.split()) for row in REFUSED if _known(row))]
    ((flags, said),) = run_ranks(_flags_and_refusals, 1, lines, prepare=import_megatron, init_process_group=False)
    return flags, said


def test_every_flag_is_megatrons_or_says_since_when(parsed: tuple[set[str], list[str]]) -> None:
    flags, _ = parsed
    known: dict[str, bool] = {}
    for row in ROWS:
        for flag in _flags_of(row):
            known[flag] = known.get(flag, False) or _known(row)
    assert {flag: flag in flags for flag in known} == known


def test_refused_rows_refuse_with_their_line_and_nothing_else_does(parsed: tuple[set[str], list[str]]) -> None:
    _, (ordinary, *said) = parsed
    assert ordinary == ""
    assert said == [line_of(row) for row in REFUSED if _known(row)]


def line_of(row: Refusal) -> str:
    """What a job of the row's example ends with."""
    return row.line(row.example.partition(" ")[2])


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.flag)
def test_a_refused_row_says_why_which_value_and_what_to_do(row: Refusal) -> None:
    flag, _, value = row.example.partition(" ")
    given = f" (given: {value})" if value else ""
    assert flag == row.flag and OR_WITHOUT == ", or train without our flag (--hotspa-config is set)"
    line = re.fullmatch(rf"{flag}: ([^\n;]+){re.escape(given)}; ([^\n;]+){re.escape(OR_WITHOUT)}", line_of(row))
    assert line is not None, line_of(row)
    why, fix = line.groups()
    assert "given" not in why and fix.startswith(("remove it", "write ", "give "))
    assert (f"(allow_untested: [{row.unless}])" in fix) == (row.unless is not None)


def test_rows_that_name_a_test_have_their_flags_in_it() -> None:
    for row in ROWS:
        if isinstance(row, Works):
            file, name = row.test.split("::")
            assert missing(row.flags, strings_of(file, name)) == [], row.test


def missing(flags: str, said: Sequence[str]) -> list[str]:
    """Which of a row's flags, with their values, stand nowhere in these strings."""
    text = " ".join(said)
    return [each for each in settings(flags) if not re.search(rf"(?<![\w-]){each}(?![\w-])", text)]


def strings_of(file: str, name: str) -> list[str]:
    """Every string that the test of this name can use, in order: its own, its marks', and those of what it names, near or far.

    Names lead to functions, classes and constants of the same file and of the tests' modules that it imports. Docstrings are
    left out: they say what is not there.
    """
    found: list[str] = []
    waiting, seen = [(file, name)], set()
    while waiting:
        place = waiting.pop(0)
        if place in seen:
            continue
        seen.add(place)
        names = _definitions(place[0])
        definition = names.get(place[1])
        if isinstance(definition, ast.ImportFrom):
            module = str(definition.module).removeprefix("tests.")
            origin = {each.asname or each.name: each.name for each in definition.names}
            waiting.append((f"{module}.py", origin[place[1]]))
        elif definition is not None:
            comments = {id(each.value) for each in ast.walk(definition) if isinstance(each, ast.Expr)}
            for node in ast.walk(definition):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in comments:
                    found.append(node.value)
                elif isinstance(node, ast.Name | ast.arg):  # an argument may be a fixture
                    waiting.append((place[0], node.id if isinstance(node, ast.Name) else node.arg))
        elif place == (file, name):
            raise LookupError(f"{file} has no {name}")
    return found


@functools.cache
def _definitions(file: str) -> dict[str, ast.stmt]:
    """What defines each name of a module of the tests."""
    tree = ast.parse((REPOSITORY / "tests" / file).read_text(encoding="utf-8"))
    names: dict[str, ast.stmt] = {}
    for each in tree.body:
        if isinstance(each, ast.FunctionDef | ast.ClassDef):
            names[each.name] = each
        elif isinstance(each, ast.Assign | ast.AnnAssign):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            names.update(
                {node.id: each for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
            )
        elif isinstance(each, ast.ImportFrom) and str(each.module).startswith("tests."):
            names.update({alias.asname or alias.name: each for alias in each.names})
    return names


@pytest.mark.parametrize(
    ("flags", "test"),
    [
        # In the same file as a test that has them, or in what only others use.
        ("--pipeline-model-parallel-layout", "test_gradients.py::test_gradients_of_every_mix_equal_the_reference"),
        ("--decoupled-lr", "test_flags.py::test_low_precision_differs_by_no_more_than_static_layouts_do"),
        ("--iterations-to-skip", "test_training.py::test_overlap_changes_nothing"),
        # With another value, or as the beginning of a longer name.
        ("--distributed-backend nccl", "test_training.py::test_overlap_changes_nothing"),
        ("--transformer-impl transformer_engine", "test_training.py::test_overlap_changes_nothing"),
        ("--use-distributed", "test_training.py::test_overlap_changes_nothing"),
    ],
)
def test_a_flag_that_the_test_lacks_is_seen(flags: str, test: str) -> None:
    assert missing(flags, strings_of(*test.split("::"))) == [flags]


def test_a_test_that_is_not_there_is_seen() -> None:
    with pytest.raises(LookupError, match=r"test_training\.py has no test_overlap$"):
        strings_of("test_training.py", "test_overlap")


def test_no_flag_stands_in_two_rows_that_say_the_same() -> None:
    for kind in (Works, OnGpus):
        flags = [each for row in ROWS if isinstance(row, kind) for each in settings(row.flags)]
        assert len(flags) == len(set(flags))
    assert len({row.flag for row in REFUSED}) == len(REFUSED)


NOT_RUN = {
    "NCCL": "--distributed-backend nccl",
    "Transformer Engine": "--transformer-impl transformer_engine",
    "flash attention": "--attention-backend flash",
    "fused kernels": "--no-gradient-accumulation-fusion",
    "fp8": "--fp8-format",
}
"""What never ran on several GPUs, in the words of a job's first line, and the flag of the table that stands for it."""


def test_what_never_ran_is_marked_so() -> None:
    page = (REPOSITORY / "docs" / "flags.md").read_text(encoding="utf-8")
    for setting in NOT_RUN.values():
        rows = [line for line in page.splitlines() if re.match(rf"\| [^|]*`{setting}[` ]", line)]
        assert any("written, not run" in line for line in rows), setting
        works = [row for row in ROWS if isinstance(row, Works) and setting in settings(row.flags)]
        # With their flag left out they are on.
        assert not works or "| without" in "".join(rows), setting


def _first_line(rank: int, world_size: int, installed: bool) -> str:
    """What a job of one rank says first when it is told that it runs on CPU, or that it does not."""
    from hotspa_megatron.hooks import cpu, install, startup
    from hotspa_megatron.hooks.patching import Patches

    said: list[str] = []
    patches = Patches()
    cpu.install()
    patches.set(startup, "say", said.append)
    patches.set(cpu, "installed", lambda: installed)
    try:
        start(Mix((1, 1, 1), ()), world_size, torch.float32)
    finally:
        patches.undo_all()
        install.uninstall()
    return said[0]


@pytest.mark.parametrize("installed", [True, False], ids=["cpu", "gpu"])
def test_a_jobs_first_line_says_what_never_ran_on_gpus(installed: bool) -> None:
    (line,) = run_ranks(_first_line, 1, installed, prepare=import_megatron)
    assert line.startswith("megatron-core 0.")
    if installed:
        assert line.endswith(", on CPU and gloo")
    else:
        assert re.search(r", on GPUs: .* are written to their documentation, not run by the authors$", line), line
    assert [each in line for each in NOT_RUN] == [not installed] * len(NOT_RUN)


def test_conflicts_are_read_off_a_command_line_as_a_job_finds_them() -> None:
    ordinary = arguments(documents=Path("documents"))
    assert conflicts(ordinary) == []
    for row in REFUSED:
        assert [each.line for each in conflicts([*ordinary, *row.example.split()])] == [line_of(row)]
    both = [*ordinary, "--num-experts=8", "--fp8-format", "hybrid", "--micro-batch-size=1"]
    assert [row.flag for row in conflicts(both)] == ["--num-experts", "--fp8-format"]
    assert conflicts([*ordinary, "--micro-batch-size", "two"]) == []  # Megatron's parser has its own words for it


def test_a_value_of_any_length_is_one_line() -> None:
    (found,) = conflicts(["--spec", "a\nb", "x" * 1000])
    assert found.line == (
        rf"--spec: a layer specification of your own is not supported (given: a\nb {'x' * 55}...); remove it{OR_WITHOUT}"
    )


# ------------------------------------------------------------------------------------------------- what a file allows


ALLOWED: list[tuple[str, tuple[Any, ...], str, str]] = [
    ("--fp8-format hybrid", (), "", r"--fp8-format: never ran .*, let it run \(allow_untested: \[fp8\]\)"),
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


def test_the_table_has_the_line_of_a_newer_megatron() -> None:
    """As a job prints it: see above."""
    (row,) = (row for _, rows in TABLE for row in rows if isinstance(row, Newer))
    page = (REPOSITORY / "docs" / "flags.md").read_text(encoding="utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith("| megatron-core "))
    expected = rf"\| megatron-core ([\d.]+) \| refused \| not run; `megatron-core \1 is newer .*allow_untested: \[{row.unless}\]"
    assert re.match(expected, line) and row.example in line, line


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


@pytest.mark.long
@pytest.mark.skipif(RELEASE < (0, 18), reason="Megatron has --save-params-interval from 0.18 on")
def test_parameters_saved_apart_are_homes(tmp_path: Path) -> None:
    """After the optimizer's step, in home's own shards."""
    saved = []
    for name, config in (("mixed", GUEST), ("static", STATIC)):
        folder = tmp_path / name
        run(TP2, config, "--save", str(folder), "--save-interval", "100", "--save-params-interval", "4")
        saved.append([torch.load(each) for each in sorted((folder / "params" / "iter_0000004").iterdir())])
    for ours, statics in zip(*saved, strict=True):
        assert ours.keys() == statics.keys() == {"model_chunk0"} and len(ours["model_chunk0"]) > 10
        for name, value in statics["model_chunk0"].items():
            torch.testing.assert_close(ours["model_chunk0"][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(RELEASE < (0, 19), reason="Megatron has --dataloader-inter-document-masking from 0.19 on")
@pytest.mark.long
@pytest.mark.parametrize("samples", ["documents", "megatron"])
def test_document_ends_of_the_data_loader_change_nothing(samples: str) -> None:
    config = f"samples: {samples}\n{GUEST}"
    more = DOCUMENT_FLAGS if samples == "megatron" else ()
    plain, masked = (run(TP2, config, *more, *flags) for flags in ((), ("--dataloader-inter-document-masking",)))
    assert masked.losses == plain.losses and masked.parameters == plain.parameters


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


MODULES = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "mlp")
RAN = "an MLP ran"
LAYERS = 4


def _tell_of_mlps() -> None:
    """Every forward pass of an MLP prints a line, those of backward passes too."""
    from megatron.core.transformer.mlp import MLP

    forward = MLP.forward

    def told(self: Any, *positional: Any, **options: Any) -> Any:
        print(RAN)
        return forward(self, *positional, **options)

    MLP.forward = told


def test_recomputed_modules_are_those_of_every_segment() -> None:
    """Every MLP of a guest runs once more, too; what another strategy's entry says holds for its segment alone."""
    config = (
        "strategies: [{max_length: 32, tp: 1, tokens_per_microbatch: 64}, "
        "{max_length: 64, tp: 1, tokens_per_microbatch: 128, recompute: none}]"
    )
    steps = ((20, 25, 30, 31, 40, 50, 60, 100), (10, 11, 12, 45, 46, 47, 200, 256), (5, 31, 32, 33, 60, 63, 64, 90))
    mixed = TP2.run(config, *MODULES, steps=steps, ranks=2, before=_tell_of_mlps)
    assert_alike(mixed, TP2.run(STATIC, *MODULES, steps=steps, ranks=2))
    expected = 0
    for step in mixed.steps:
        assert [segment.kind for segment in step.segments] == ["guest", "guest", "home"]
        for segment, runs in zip(step.segments, (2, 1, 2), strict=True):
            expected += LAYERS * runs * segment.micro_batches[0]  # the replica of rank 0, whose output it is
    assert mixed.output.count(RAN) == expected


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
