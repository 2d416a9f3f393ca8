"""The documentation says what the code does: its commands, files, links and tables.

Commands under "(runs in the tests)" are run as they stand. The other blocks' are run here on few CPU ranks with what ``SMALLER``
changes, or by another test (``ELSEWHERE_RUN``), or not at all (``NOT_RUN`` says why); one that is in none of them is found. Of
all, and of those within the text, variables, options, files and Megatron's flags are checked without starting anything.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import functools
import os
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
from hotspa_megatron.hooks.recompute import _SWITCHES
from tests.spawn import REPOSITORY
from tests.test_lengths import write_index
from tests.test_patches import PATCHES, make_checkout
from tests.test_plan_command import BATCH, MODEL
from tests.test_report import logged, write_steps
from tests.training import SCRIPT, arguments, run_module

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
    """What the pages suppose to be there: a corpus, a launch script, a configuration, a checkout, a run's folder."""
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
    make_checkout(tmp_path / "Megatron-LM", PATCHES[-1])
    write_steps(tmp_path / "checkpoints" / "watched", *(logged(iteration) for iteration in range(1, 5)))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


VARIABLE = r"[A-Z_]+=\S*"


def words_of(command: str) -> list[str]:
    """A command's words after its variables, with what the pages write for the user's own arguments and data."""
    command = command.replace("YOUR ARGUMENTS", "$GPT_ARGS").replace("YOUR_DATA_PREFIX", "data/my_text_document")
    words = []
    for word in shlex.split(command, comments=True):
        words += MEGATRON if word == "$GPT_ARGS" else [word]
    while words and re.fullmatch(VARIABLE, words[0]):
        del words[0]
    return words


def said_to_run(fence: Fence) -> bool:
    return fence.before.rstrip(":").endswith(RUNS)


@pytest.mark.parametrize("fence", [each for each in blocks("bash", "console") if said_to_run(each)], ids=named)
def test_commands_that_are_said_to_run_do(fence: Fence, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fence.commands()
    for command in fence.commands():
        program, *arguments = words_of(command)
        if program == "bash":
            done = subprocess.run(["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, check=False)
            assert done.returncode == 0 and done.stdout and not done.stderr, f"{command}: {done.stderr}"
            continue
        assert program == "hotspa", f"{command}: teach this test about {program}"
        if arguments[0] in ("bench", "doctor"):  # import Megatron, for which bench installs the CPU stand-in
            done = run_module("hotspa_megatron.cli.main", *arguments)
            assert done.returncode == 0 and done.stdout, f"{command}: {done.stderr}"
            continue
        try:
            code = main(arguments)
        except SystemExit as end:  # --help
            code = int(end.code or 0)
        written = capsys.readouterr()
        assert code == 0 and written.out and not written.err, f"{command}: {written.err}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_said_to_run_stands_above_commands(page: Path) -> None:
    """In the very words that are looked for."""
    said = re.findall(rf"{RUNS.strip('()')}\W*$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(said) == sum(said_to_run(fence) and bool(fence.commands()) for fence in fences(page))


# --------------------------------------------------------------------------------------- those that take a cluster, minutes

TORCHRUN = "torchrun --nproc-per-node 8 -m hotspa_megatron.launch pretrain_gpt.py $GPT_ARGS"
MODEL_OF_2 = "--ranks 2 --layers 2 --hidden 128 --sequences 12 --full-sequences 2"
Change = tuple[str, str]
FOR_ALL: tuple[Change, ...] = (
    ("--nproc-per-node 8", "--standalone --local-addr 127.0.0.1 --nproc-per-node 2"),
    ("pretrain_gpt.py", str(SCRIPT)),
)
"""Two ranks of this machine, whose name need not resolve, and the training script that is here. $GPT_ARGS is a small model on
CPU, and the files are ``SMALL_FILE``."""
SMALLER: dict[str, tuple[Change, ...]] = {
    f"{TORCHRUN} --hotspa-config hotspa.yaml": (),
    f"HOTSPA_STEP_LOG=steps.jsonl {TORCHRUN} --hotspa-config hotspa.yaml": (),
    f"{TORCHRUN} --load checkpoints --save checkpoints --hotspa-config megatron.yaml": (
        ("$GPT_ARGS", "$GPT_ARGS --save-interval 6 --reset-position-ids --reset-attention-mask --eod-mask-loss"),
    ),
    f"hotspa verify -- {TORCHRUN} --hotspa-config hotspa.yaml": (),
    "hotspa profile --ranks 8 -o node.yaml": (("--ranks 8", "--ranks 2"),),
    "hotspa bench step --ranks 4 --rounds 3": (
        ("--ranks 4", f"{MODEL_OF_2} --seq-length 64 --max-tokens-per-rank 32 --lengths lognormal:mean=24,sigma=0.8,max=64"),
        ("--rounds 3", "--rounds 1"),
    ),
    "hotspa bench step --ranks 4 --lengths data/my_text_document --overlong split --config hotspa.yaml --home cp4 "
    "--max-tokens-per-rank 1238 --only static,ours --time-limit 470": (
        ("--ranks 4", f"{MODEL_OF_2} --seq-length 256"),
        ("--home cp4", "--home cp2"),
        ("--max-tokens-per-rank 1238", "--max-tokens-per-rank 128"),
        ("--time-limit 470", "--time-limit 60"),
    ),
    "hotspa bench reshard --ranks 4": (("--ranks 4", "--ranks 2 --sizes 12"),),
    "hotspa simulate --suite a800 --csv suite.csv": (),
}  # fmt: skip
"""Commands that run here, and what is changed in each for that."""

SLURM = "slurm/test_jobs.py"
ELSEWHERE_RUN = {
    "bash scripts/demo.sh": "test_scripts.py::test_demo_for_real",
    "bash examples/cpu.sh": "test_scripts.py::test_the_cpu_example_trains_as_the_readme_says",
    "torchrun --nproc-per-node 4 examples/reshard.py":
        "test_resharding_alone.py::test_the_documented_example_moves_a_model_without_megatron",
    "sbatch --nodes 4 --gpus-per-node 8 scripts/slurm/plan.sbatch --keep-home --corpus data/my_text_document -- $GPT_ARGS":
        f"{SLURM}::test_nodes_are_measured_and_then_planned_for",
    "sbatch --nodes 4 --gpus-per-node 8 scripts/slurm/verify.sbatch --hotspa-config hotspa.yaml $GPT_ARGS":
        f"{SLURM}::test_a_job_is_verified_before_it_trains",
    "CHECKPOINTS=/data/run7 sbatch --nodes 4 --gpus-per-node 8 scripts/slurm/pretrain_gpt_hotspa.sbatch "
    "--hotspa-config hotspa.yaml $GPT_ARGS": f"{SLURM}::test_preempted_it_saves_and_goes_on_with_the_unbroken_runs_losses",
    "bash scripts/build_image.sh gpu --build-arg MEGATRON_TAG=core_v0.19.0":
        "test_images.py::test_the_gpu_images_steps_run_on_a_base_with_torch",
    "bash scripts/build_image.sh cpu": "test_images.py::test_the_cpu_image_is_built_and_its_user_is_not_root",
    "pip install --no-deps .": "test_supply.py::test_built_installed_run_from_elsewhere_and_uninstalled",
    "bash scripts/setup.sh": "test_images.py::test_the_cpu_image_is_built_and_its_user_is_not_root",
    "bash scripts/test.sh": "test_scripts.py::test_test_script_checks_then_tests",
    "bash scripts/test.sh --all": "test_scripts.py::test_test_script_checks_then_tests",
    "bash scripts/test_versions.sh": "test_scripts.py::test_each_release_runs_the_files_and_says_how_it_ended",
    "bash scripts/test_versions.sh 0.18.2": "test_scripts.py::test_each_release_runs_the_files_and_says_how_it_ended",
}  # fmt: skip
"""The test that runs a command, or what its script starts, or its script with something in the place of that."""

NOT_RUN = {"pip install pyyaml rich": "asks a package index, which tests do without"}

SMALL_FILE = "merge: never\nstrategies: [{max_length: 64, tp: 1, tokens_per_microbatch: 128}]\n"


def plain(command: str) -> str:
    """A command as the tables have it: without its comment, and with one name for the user's arguments."""
    return re.sub(r"\s+#.*", "", " ".join(command.split())).replace("YOUR ARGUMENTS", "$GPT_ARGS")


def test_every_command_of_a_block_is_run_or_said_not_to_be() -> None:
    fenced = blocks("bash", "console")
    others = {plain(command) for fence in fenced if not said_to_run(fence) for command in fence.commands()}
    assert others == {*SMALLER, *ELSEWHERE_RUN, *NOT_RUN}
    assert len(others) == len(SMALLER) + len(ELSEWHERE_RUN) + len(NOT_RUN)
    for test in ELSEWHERE_RUN.values():
        file, name = test.split("::")
        tree = ast.parse((REPOSITORY / "tests" / file).read_text(encoding="utf-8"))
        assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}, test


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("command", SMALLER, ids=lambda command: command[:60])
def test_commands_run_on_few_ranks(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = command
    for old, new in SMALLER[command]:
        assert old in line, f"{old}: is not in it any more"
        line = line.replace(old, new)
    for old, new in FOR_ALL:
        line = line.replace(old, new)
    (folder / "hotspa.yaml").write_text(SMALL_FILE)
    (folder / "megatron.yaml").write_text(f"samples: megatron\n{SMALL_FILE}")
    model = arguments(tp=2, iterations=6, batch=8)
    words = []
    for word in shlex.split(line):
        if re.fullmatch(VARIABLE, word) and not words:
            monkeypatch.setenv(*word.split("=", 1))
        elif word == "torchrun":
            words += [sys.executable, "-m", "torch.distributed.run"]
        elif word == "hotspa":
            words += [sys.executable, "-m", "hotspa_megatron.cli.main"]
        else:
            words += model if word == "$GPT_ARGS" else [word]
    assert words[:2] == [sys.executable, "-m"], f"{command}: teach this test about {words[0]}"
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=1000, check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    # 3: times that vary too much to be judged, which is no test's business.
    assert done.returncode in ((0, 3) if "bench step" in command else (0,)), f"{line}: {done.stdout}\n{done.stderr}"
    assert done.stdout
    for written in re.findall(r"(?:(?<!\S)-o |--csv |HOTSPA_STEP_LOG=)(\S+)", command):
        assert (folder / written).stat().st_size


class Outside(Exception):
    """A program that no check is known for."""


def check(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise where a command names a variable, an option, a file or a flag of Megatron's that is not there; start nothing."""
    program, *arguments = words_of(command)
    for word in (program, *arguments):
        if re.match(r"(scripts|examples|docker|patches|tests|docs)/", word):
            assert (REPOSITORY / word).exists(), f"{command}: {word} is not there"
    script = next((word for word in (program, *arguments) if word.startswith(("scripts/", "examples/"))), None)
    for word in shlex.split(command, comments=True):
        if not re.fullmatch(VARIABLE, word):
            break
        assert reads(word.partition("=")[0], script), f"{command}: nothing reads {word}"
    if program == "hotspa":
        parsed(arguments, monkeypatch)
    elif program == "torchrun":
        under_torchrun(arguments, monkeypatch)
    elif program == "bash" or program.startswith("scripts/"):
        script, *options = [program, *arguments] if program != "bash" else arguments
        text = (REPOSITORY / script).read_text()
        handed_on = '"$@"' in text
        if module := re.search(r"-m (examples\.demo) ", text):
            handed_on, text = False, (REPOSITORY / module[1].replace(".", "/") / "__main__.py").read_text()
        for option in options:
            assert not option.startswith("--") or has(text, option) or handed_on, (
                f"{command}: {option} is not an option"
            )
    elif program == "sbatch":
        under_sbatch(arguments, monkeypatch)
    elif program in KNOWN:
        known_to(program, arguments)
    elif program == "srun":
        launcher = next(index for index, word in enumerate(arguments) if word in ("torchrun", "python", "bash"))
        check(shlex.join(arguments[launcher:]), monkeypatch)
    elif program == "python" and arguments[:1] == ["-m"]:
        assert arguments[1] in ("pytest", "hotspa_megatron.launch", "hotspa_megatron.cli.main"), command
    else:
        raise Outside(f"{command}: teach this test about {program}")


def has(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text) is not None


def reads(variable: str, script: str | None) -> bool:
    """Whether the script, or what it sources, looks at this variable; without one, whether the package does."""
    if script is None:
        code = (path.read_text(encoding="utf-8") for path in (REPOSITORY / "hotspa_megatron").rglob("*.py"))
        return any(f'"{variable}"' in text for text in code)
    path = REPOSITORY / script
    text = "".join(each.read_text(encoding="utf-8") for each in (path, *path.parent.glob("site.sh")))
    return re.search(rf"\$\{{?{variable}\b", text) is not None


SBATCH = ("--nodes", "--ntasks-per-node", "--gpus-per-node", "--gres", "--time", "--partition", "--account")
"""Options of sbatch's that the pages may use; each takes a value."""

KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "pip": {"install": ("--no-deps", "--require-hashes", "-r"), "uninstall": ()},
    "docker": {"run": ("--rm", "--gpus", "--shm-size", "--ulimit", "--network")},
    "source": {".venv/bin/activate": ()},
}
"""Other people's commands that the pages may use: what follows them, and the options of that."""


def known_to(program: str, arguments: list[str]) -> None:
    assert arguments and arguments[0] in KNOWN[program], f"{program} {shlex.join(arguments)}"
    options = KNOWN[program][arguments[0]]
    for word, before in zip(arguments[1:], arguments, strict=False):
        if word.startswith("-"):
            assert word in options, f"{program} {arguments[0]}: {word} is not an option"
        elif program == "pip":
            there = (REPOSITORY / word).is_file() if before == "-r" else (REPOSITORY / word / "setup.cfg").is_file()
            assert there or (before != "-r" and word in needed()), word
        elif program == "docker" and (before == "--rm" or not before.startswith("-")):
            tags = re.findall(r"\btag=([\w-]+)", (REPOSITORY / "scripts" / "build_image.sh").read_text())
            assert word in tags, f"no image {word}; build_image.sh makes {tags}"


def needed() -> list[str]:
    """Distributions that the package needs, by their names."""
    metadata = configparser.ConfigParser()
    metadata.read(REPOSITORY / "setup.cfg")
    return re.findall(r"^[\w-]+", metadata["options"]["install_requires"], re.MULTILINE)


def under_sbatch(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of Slurm's, a script that bash can read, and what that script hands its arguments to."""
    while arguments and arguments[0].startswith("-"):
        option, joined, _ = arguments[0].partition("=")
        assert option in SBATCH, f"sbatch: {option} is not an option"
        arguments = arguments[1 if joined else 2 :]
    script, *rest = arguments
    assert script.endswith(".sbatch")
    subprocess.run(["bash", "-n", REPOSITORY / script], check=True)
    text = (REPOSITORY / script).read_text()
    if "-m hotspa_megatron.launch" in text:
        assert '"$SCRIPT" ' in text and '"$@"' in text
        under_torchrun(["-m", "hotspa_megatron.launch", "pretrain_gpt.py", *rest], monkeypatch)
    else:
        (subcommand,) = re.findall(r'"\$\{hotspa\[@\]\}" (\w+) .*"\$@"', text)
        parsed([subcommand, "--world-size", "32", "--profile", "cluster.yaml", *rest], monkeypatch)


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
        "HOTSPA_STEP_LOGS=steps.jsonl torchrun --nproc-per-node 8 examples/pretrain_small.py",
        "HOTSPA_LOCK=1 bash scripts/setup.sh",
        "bash scripts/demo.sh --iteration 3",
        "sbatch scripts/slurm/train.sbatch --hotspa-config hotspa.yaml $GPT_ARGS",
        "sbatch --node 4 scripts/slurm/verify.sbatch --hotspa-config hotspa.yaml $GPT_ARGS",
        "sbatch scripts/slurm/verify.sbatch --hotspa-config hotspa.yaml --num-layer 3",
        "sbatch scripts/slurm/plan.sbatch --corpsu data/my_text_document -- $GPT_ARGS",
        "CHECKPOINT=/data sbatch scripts/slurm/pretrain_gpt_hotspa.sbatch --hotspa-config hotspa.yaml $GPT_ARGS",
        "pip install --nodeps .",
        "pip install docs",
        "pip install ritch",
        "pip install --require-hashes -r rich",
        "pip install --require-hashes -r requirements/none.txt",
        "docker build .",
        "docker run --remove hotspa-megatron-cpu",
        "docker run --rm hotspa-megatron-tpu",
        "make all",
    ],
)
def test_a_command_that_is_wrong_is_seen(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((AssertionError, ValueError, SystemExit, Outside, OSError)):
        check(command, monkeypatch)


# ------------------------------------------------------------------------------------------- commands within the text


@functools.cache
def hotspa_parser() -> argparse.ArgumentParser:
    """The parser of the ``hotspa`` command."""

    class Made(Exception):
        pass

    def raise_it(self: argparse.ArgumentParser, *_: Any) -> Any:
        raise Made(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", raise_it)
        with pytest.raises(Made) as made:
            main(["doctor"])
    parser = made.value.args[0]
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def check_mention(words: list[str]) -> None:
    """Raise where part of a hotspa command, as sentences have it, names a subcommand or an option that is not there."""
    parser = hotspa_parser()
    own = words[: words.index("--")] if "--" in words else words
    while own and not own[0].startswith("-") and own[0] != "COMMAND":
        commands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not commands:
            break
        parser, own = commands[0].choices[own[0]], own[1:]
    for word in own:
        if word.startswith("-"):
            assert word.partition("=")[0] in parser._option_string_actions, f"{parser.prog}: {word} is not an option"


def mentions(page: Path) -> list[str]:
    """Commands in backticks within the text of a page."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    quoted = (part.strip() for code in re.findall(r"`([^`\n]+)`", text) for part in code.split(";"))
    return [
        each for each in quoted if re.match(rf"(?:{VARIABLE} )*(?:hotspa|bash|sbatch|pip|docker|source) [^-\s]", each)
    ]


def table_of_commands() -> list[str]:
    """Those of the first page, each of them whole."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(hotspa [^`]+)` \|", text, re.MULTILINE)


@pytest.mark.parametrize("page", [each for each in PAGES if mentions(each)], ids=lambda page: page.name)
def test_commands_within_the_text_name_what_there_is(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in mentions(page):
        program, *words = shlex.split(command)
        if program == "hotspa":
            check_mention(words)
        else:
            check(command, monkeypatch)


def test_the_first_pages_table_has_whole_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = table_of_commands()
    assert {command.split()[1] for command in commands} > {"profile", "plan", "verify", "bench"}
    for command in commands:
        parsed([word for word in shlex.split(command)[1:] if word != "..."], monkeypatch)


@pytest.mark.parametrize(
    "words", ["doctro", "doctor --jsn", "plan --tabel", "bench stepp --ranks 4", "bench step --rank 4"]
)
def test_a_mention_that_is_wrong_is_seen(words: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        check_mention(words.split())


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


# Places that replace names which do not stand in the call itself, and what the page says of them.
ELSEWHERE: dict[tuple[str, str], tuple[str, ...]] = {
    ("forward_backward.py", "_replaced"): (),  # its calls have the names as keywords
    ("model.py", "_point_at"): ("process groups and collections of them in home's modules",),
    ("model.py", "from_provider"): (
        "use_distributed_optimizer",
        "overlap_grad_reduce",
        "overlap_param_gather",
        "align_param_gather",
    ),
    ("parallel_state.py", "_write_globals"): ("the module globals of `core.parallel_state`",),
    ("parallel_state.py", "_write_sizes"): ("the parallel sizes of args",),
    ("recompute.py", "_configure"): ("recompute_granularity", "recompute_method", "recompute_num_layers"),
    ("recompute.py", "_switch"): _SWITCHES,
    ("startup.py", "replace_local_modules"): ("DotProductAttention", "MCoreDotProductAttention"),
    # Not Megatron's: a copy of a configuration that a guest is built from, and what is added to args.
    ("model.py", "from_configuration"): (),
    ("model.py", "_set_sizes"): (),
    ("startup.py", "initialize_distributed"): (),
}
# The stand-in for torch.cuda and the runs of `hotspa bench step`, each named on the page as a whole; what replaces at all.
WHOLE = ("cpu.py", "contender.py", "patching.py")


def replacements(code: str) -> Iterator[tuple[str, str | None]]:
    """(function, name replaced in it) of a module; None for a name that does not stand there."""
    tree = ast.parse(code)
    inside = {
        node: function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
    }  # the innermost one comes last
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name: ast.expr | None = None
        match node.func:
            case ast.Attribute(value=ast.Name(id="patches" | "_patches"), attr="wrap" | "set" | "item" | "add"):
                name = node.args[1]
            case ast.Attribute(value=ast.Name(id="patches" | "_patches"), attr="on_undo"):
                (label,) = re.findall(r"\.(\w+)", str(ast.literal_eval(_text_of(node.args[0]))))
                yield inside[node], label
                continue
            case ast.Name(id="setattr"):
                name = node.args[1]
            case ast.Name(id="_replaced"):
                yield from ((inside[node], keyword.arg) for keyword in node.keywords)
                continue
            case _:
                continue
        yield inside[node], name.value if isinstance(name, ast.Constant) else None
    for node in ast.walk(tree):  # as Megatron itself does with its configuration
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr.endswith("_func"):
            yield inside[node], node.attr


def _text_of(text: ast.expr) -> ast.expr:
    """The part of a string that is fixed."""
    return text.values[-1] if isinstance(text, ast.JoinedStr) else text


def test_every_name_that_is_replaced_is_listed() -> None:
    page = (REPOSITORY / "docs" / "megatron.md").read_text(encoding="utf-8")
    names: set[str] = set()
    elsewhere: set[tuple[str, str]] = set()
    for path in sorted((REPOSITORY / "hotspa_megatron" / "hooks").glob("*.py")):
        if path.name in WHOLE:
            assert path.name == "patching.py" or f"`hooks/{path.name}`" in page
            continue
        for function, name in replacements(path.read_text(encoding="utf-8")):
            if name is None:
                elsewhere.add((path.name, function))
            else:
                names.add(name)
    assert elsewhere == set(ELSEWHERE)
    assert len(names) > 30 and {"get_batch", "validate_result", "update_seqlen_stats_from_cu_seqlens"} < names
    assert [name for name in sorted(names) if not has(page, name)] == []
    assert [text for texts in ELSEWHERE.values() for text in texts if text not in page] == []


def test_a_replacement_is_found_however_it_is_written() -> None:
    code = """
def install():
    patches.wrap(
        training, "train_step", counted)
    def inner():
        setattr(config, field, None)
    with _replaced(config, timers=None):
        config.grad_sync_func = None
    patches.on_undo(f"{module}.set_group", restore)
"""
    found = {("install", "train_step"), ("inner", None), ("install", "timers"), ("install", "set_group")}
    assert set(replacements(code)) == found | {("install", "grad_sync_func")}
