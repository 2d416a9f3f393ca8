"""The documentation says what the code does: its commands, files, links and tables.

Commands under "(runs in the tests)" are run as they stand. The others take a cluster or minutes: of them the options, the
files and Megatron's flags are checked, and nothing is started.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotspa_megatron.cli.described_run import check_flags
from hotspa_megatron.cli.main import main
from hotspa_megatron.config import load_config
from tests.spawn import REPOSITORY
from tests.test_lengths import write_index
from tests.test_plan_command import BATCH, MODEL
from tests.training import run_module

PAGES = [
    REPOSITORY / "README.md",
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "patches" / "README.md",
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
RUNS = "(runs in the tests)"
MEGATRON = [*MODEL, *BATCH]


@dataclass(frozen=True)
class Fence:
    """A fenced block. ``before``: the line of text above it."""

    page: Path
    language: str
    text: str
    before: str

    def commands(self) -> list[str]:
        """Its commands; of a console only what follows a prompt."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [line for line in lines if shlex.split(line, comments=True)]


def fences(page: Path) -> Iterator[Fence]:
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.DOTALL | re.MULTILINE):
        above = [line.strip() for line in text[: match.start()].splitlines() if line.strip()]
        yield Fence(page, match[2], textwrap.dedent(match[3]), above[-1] if above else "")


def blocks(*languages: str) -> list[Fence]:
    return [fence for page in PAGES for fence in fences(page) if fence.language in languages]


def named(fence: Fence) -> str:
    return f"{fence.page.name}: {fence.text.strip().splitlines()[0][:50]}"


# ----------------------------------------------------------------------------------------------------------- commands


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the pages suppose to be there: a corpus, a launch script, a configuration."""
    lengths = np.minimum(np.exp(np.random.default_rng(5).normal(6, 1.2, 400)).astype(int) + 2, 8000)
    (tmp_path / "data").mkdir()
    write_index(tmp_path / "data" / "my_text_document", [int(length) for length in lengths])
    (tmp_path / "run.sh").write_text(
        f"ARGS=({shlex.join(MEGATRON)})\ntorchrun --nproc-per-node 8 pretrain_gpt.py ${{ARGS[@]}}\n"
    )
    (configuration,) = (
        fence.text for fence in fences(REPOSITORY / "docs" / "configuration.md") if fence.language == "yaml"
    )
    for name in ("hotspa.yaml", "planned.yaml"):
        (tmp_path / name).write_text(configuration)
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(command: str) -> list[str]:
    """A command's words with the variables that the pages use."""
    words = []
    for word in shlex.split(command, comments=True):
        words += MEGATRON if word == "$GPT_ARGS" else [word]
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        del words[0]
    return words


@pytest.mark.parametrize(
    "fence", [each for each in blocks("bash", "console") if each.before.rstrip(":").endswith(RUNS)], ids=named
)
def test_commands_that_are_said_to_run_do(fence: Fence, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fence.commands()
    for command in fence.commands():
        program, *arguments = words_of(command)
        assert program == "hotspa", f"{command}: only hotspa commands are cheap enough"
        if arguments[0] == "bench":  # imports Megatron, for which it installs the CPU stand-in
            done = run_module("hotspa_megatron.cli.main", *arguments)
            assert done.returncode == 0 and done.stdout, f"{command}: {done.stderr}"
            continue
        try:
            code = main(arguments)
        except SystemExit as end:  # --help
            code = int(end.code or 0)
        written = capsys.readouterr()
        assert code == 0 and written.out and not written.err, f"{command}: {written.err}"


class Outside(Exception):
    """A program that no check is known for."""


def check(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise where a command names an option, a file or a flag of Megatron's that is not there; start nothing."""
    program, *arguments = words_of(command)
    for word in (program, *arguments):
        if re.match(r"(scripts|examples|docker|patches|tests|docs)/", word):
            assert (REPOSITORY / word).exists(), f"{command}: {word} is not there"
    if program == "hotspa":
        parsed(arguments, monkeypatch)
    elif program == "torchrun":
        under_torchrun(arguments, monkeypatch)
    elif program == "bash" or program.startswith("scripts/"):
        script, *options = [program, *arguments] if program != "bash" else arguments
        text = (REPOSITORY / script).read_text()
        for option in options:
            assert not option.startswith("--") or option in text or '"$@"' in text, (
                f"{command}: {option} is not an option"
            )
    elif program == "srun":
        launcher = next(index for index, word in enumerate(arguments) if word in ("torchrun", "python", "bash"))
        check(shlex.join(arguments[launcher:]), monkeypatch)
    elif program == "python" and arguments[:1] == ["-m"]:
        assert arguments[1] in ("pytest", "hotspa_megatron.launch", "hotspa_megatron.cli.main"), command
    elif program not in (
        "pip",
        "source",
        "cd",
        "export",
        "git",
        "sbatch",
        "docker",
        "podman",
        "buildah",
        "curl",
        "scancel",
    ):
        raise Outside(f"{command}: teach this test about {program}")


def parsed(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold a hotspa command against its own parsers."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_do_nothing(self: argparse.ArgumentParser, *rest: Any) -> Any:
        found = parse_args(self, *rest)
        found.run = lambda *_: None
        return found

    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_and_do_nothing)
        try:
            assert main(arguments) == 0
        except SystemExit as end:
            assert not end.code, f"hotspa {shlex.join(arguments)}"


def under_torchrun(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args([word for word in arguments if word != "..."])
    rest = options.training_script_args
    if not options.module:
        assert (REPOSITORY / options.training_script).exists()
    elif options.training_script == "hotspa_megatron.launch":
        flags = [word for word in rest[1:] if word != "--hotspa-config"]
        assert rest[0].endswith(".py")
        check_flags(flags)
    else:
        assert options.training_script == "hotspa_megatron.cli.main"
        parsed(rest, monkeypatch)


@pytest.mark.parametrize("fence", blocks("bash", "console"), ids=named)
def test_commands_name_what_there_is(fence: Fence, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fence.commands()
    for command in fence.commands():
        check(command, monkeypatch)


@pytest.mark.parametrize(
    "command",
    [
        "hotspa plan --hardwear h100 --world-size 8",
        "hotspa frobnicate",
        "bash scripts/no_such.sh",
        "bash scripts/demo_no.sh --break fold",
        "bash scripts/build_image.sh --no-such-option",
        "torchrun --nproc-per-node 8 -m hotspa_megatron.launch pretrain_gpt.py --num-layer 3",
        "torchrun --nproc-per-nodes 8 examples/pretrain_small.py",
        "make all",
    ],
)
def test_a_command_that_is_wrong_is_seen(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, ValueError, SystemExit, Outside, OSError)):
        check(command, monkeypatch)


def test_no_command_hides_in_a_block_without_a_language() -> None:
    for fence in blocks(""):
        first = fence.text.split(maxsplit=1)[0]
        assert first not in ("bash", "torchrun", "hotspa", "pip", "python", "sbatch", "source"), named(fence)


# ------------------------------------------------------------------------------------------------ files, links, tables


@pytest.mark.parametrize("fence", blocks("yaml"), ids=named)
def test_configurations_are_ones_that_a_job_reads(fence: Fence, tmp_path: Path) -> None:
    path = tmp_path / "hotspa.yaml"
    path.write_text(fence.text)
    load_config(path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_the_first_page_is_short_and_leads_to_the_others() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 200 and "(docs/README.md)" in text
    index = (REPOSITORY / "docs" / "README.md").read_text(encoding="utf-8")
    assert [
        page.name for page in (REPOSITORY / "docs").glob("*.md") if page.name != "README.md" and page.name not in index
    ] == []


def test_tables_that_follow_from_the_code_are_fresh() -> None:
    command = [sys.executable, str(REPOSITORY / "scripts" / "write_docs.py"), "--check"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, env=_environment())
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_table_is_seen(tmp_path: Path) -> None:
    """On a copy whose page says something else."""
    for name in ("scripts/write_docs.py", "docs/flags.md", "docs/configuration.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = (REPOSITORY / name).read_text()
        (tmp_path / name).write_text(text.replace("| refused |", "| works |") if name.startswith("docs/") else text)
    command = [sys.executable, str(tmp_path / "scripts" / "write_docs.py")]
    said = [
        subprocess.run([*command, *more], capture_output=True, text=True, check=False, env=_environment())
        for more in (("--check",), (), ("--check",))
    ]
    assert [each.returncode for each in said] == [1, 0, 0]
    assert "flags.md" in said[0].stdout and "configuration.md" not in said[0].stdout


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}


def test_every_name_that_is_replaced_is_listed() -> None:
    page = (REPOSITORY / "docs" / "megatron.md").read_text(encoding="utf-8")
    hooks = REPOSITORY / "hotspa_megatron" / "hooks"
    code = "".join((hooks / name).read_text(encoding="utf-8") for name in ("install.py", "startup.py"))
    names = set(re.findall(r'\bpatches\.(?:wrap|set)\(\s*[\w.]+,\s*"(\w+)"', code))
    assert len(names) > 12
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", page)] == []
