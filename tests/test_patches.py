"""The one line for pretrain_gpt.py: put in, found, taken out. test_megatron_lm.py trains with it where a checkout is given."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.training import REPOSITORY

PATCHES = sorted(REPOSITORY.glob("patches/core_v*/pretrain_gpt.patch"))
LINE = "import hotspa_megatron; hotspa_megatron.install()\n"


# Root reads whatever a file's mode says, unless it gives that up.
WITHOUT_PRIVILEGES = () if os.geteuid() else ("setpriv", "--bounding-set=-dac_override,-dac_read_search")


def apply_patches(*arguments: str | Path, by: Sequence[str] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*by, "bash", REPOSITORY / "scripts" / "apply_patches.sh", *arguments], env={**os.environ, **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(params=PATCHES, ids=lambda path: path.parent.name)
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_checkout(tmp_path / "Megatron-LM", request.param)


def make_checkout(folder: Path, patch_file: Path) -> Path:
    """A folder that says it is the patch's release, with a script of lines of our own where the patch has its context."""
    tag, patch = patch_file.parent.name, patch_file.read_text()
    first = int(re.findall(r"^@@ -(\d+)", patch, re.M)[0])
    context = [line[1:] for line in patch.splitlines(keepends=True)[3:] if line.startswith(" ")]
    (folder / "megatron" / "core").mkdir(parents=True)
    major, minor, number = re.findall(r"\d+", tag)
    info = f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {number}\n"
    (folder / "megatron" / "core" / "package_info.py").write_text(info)
    before = [f"x{number} = {number}\n" for number in range(1, first)]
    (folder / "pretrain_gpt.py").write_text("".join([*before, *context, "import os\n", "import megatron\n"]))
    return folder


def test_the_line_goes_in_before_megatron_and_out_again(checkout: Path) -> None:
    script = checkout / "pretrain_gpt.py"
    original = script.read_bytes()

    def said(*mode: str) -> str:
        done = apply_patches(checkout, *mode)
        assert done.returncode == 0 and not done.stderr, done.stderr
        return done.stdout

    assert "not applied; it can be" in said("--check") and script.read_bytes() == original
    assert said().endswith(": applied\n")
    lines = script.read_text().splitlines(keepends=True)
    assert lines.count(LINE) == 1 and lines.index(LINE) < lines.index("import megatron\n")
    lines.remove(LINE)
    assert "".join(lines).encode() == original
    patched = script.read_bytes()
    assert said("--check").endswith(": applied\n") and "applied before" in said() and script.read_bytes() == patched
    assert "taken out" in said("--reverse") and script.read_bytes() == original
    assert "not applied" in said("--reverse") and script.read_bytes() == original


def test_another_script_is_left_alone(checkout: Path) -> None:
    script = checkout / "pretrain_gpt.py"
    script.write_text("print('mine')\n")
    for mode in ((), ("--check",), ("--reverse",)):
        done = apply_patches(checkout, *mode)
        assert done.returncode == 1 and not done.stdout
        (line,) = done.stderr.splitlines()
        assert "pretrain_gpt.py is not that of core_v" in line and "before its first import of Megatron" in line
    assert script.read_text() == "print('mine')\n"


def test_a_release_without_a_patch_is_named(checkout: Path) -> None:
    info = checkout / "megatron" / "core" / "package_info.py"
    info.write_text("MAJOR = 0\nMINOR = 3\n")
    done = apply_patches(checkout)
    assert done.returncode == 1 and "is release 0.3, for which there is no patch: core_v" in done.stderr


def tools(folder: Path, *names: str) -> Path:
    """A folder for PATH, of these programs."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found is not None, name
        (folder / name).symlink_to(found)
    return folder


def test_without_git_that_is_what_it_says(checkout: Path, tmp_path: Path) -> None:
    path = tools(tmp_path / "tools", "bash", "sed", "head", "dirname", "basename")
    done = apply_patches(checkout, PATH=str(path))
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("apply_patches: no git on PATH, which applies ")
    assert f"install it, or edit {checkout}/pretrain_gpt.py by hand" in line


@pytest.mark.parametrize("name", ["pretrain_gpt.py", "megatron/core/package_info.py"])
def test_a_checkout_that_cannot_be_read_is_one_line(checkout: Path, name: str) -> None:
    (checkout / name).chmod(0)
    done = apply_patches(checkout, by=WITHOUT_PRIVILEGES)
    fix = "cannot be read; make the checkout readable, or run this as its owner"
    assert (done.returncode, done.stderr) == (1, f"apply_patches: {checkout / name}: {fix}\n")


def test_a_checkout_that_cannot_be_written_is_one_line(checkout: Path, tmp_path: Path) -> None:
    """git's own words, since root may write whatever its mode, and a file system may be read-only."""
    git = tools(tmp_path / "tools") / "git"
    words = "error: unable to write file 'pretrain_gpt.py' mode 100644: Read-only file system"
    real = f'case "$*" in *--check*) exec {shutil.which("git")} "$@" ;; esac'
    git.write_text(f'#!/bin/sh\n{real}\necho "{words}" >&2\nexit 1\n')
    git.chmod(0o755)
    path = f"{git.parent}:{os.environ['PATH']}"
    for mode in ("", "--reverse"):
        if mode:
            assert apply_patches(checkout).returncode == 0
        done = apply_patches(checkout, *mode.split(), PATH=path)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            f"apply_patches: {checkout}/pretrain_gpt.py: not changed, {words.removeprefix('error: ')}; "
            "make the checkout writable, or run this as its owner\n"
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no checkout given"),
        (("--sideways",), "--sideways: no such option"),
        (("nowhere",), "nowhere/pretrain_gpt.py: no such file"),
    ],
)
def test_bad_usage(arguments: tuple[str, ...], message: str) -> None:
    done = apply_patches(*arguments)
    assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1


def test_importing_the_package_changes_nothing_and_installing_adds_the_flag() -> None:
    """What the line does, in a process of its own."""
    import sys

    program = (
        "import sys, hotspa_megatron\n"
        "assert not any(name.split('.')[0] in ('torch', 'megatron') for name in sys.modules)\n"
        "hotspa_megatron.install(); hotspa_megatron.install()\n"
        "from megatron.training import arguments, pretrain\n"
        "import argparse\n"
        "parser = arguments.add_megatron_arguments(argparse.ArgumentParser())\n"
        "print('--hotspa-config' in parser._option_string_actions, pretrain.__wrapped__.__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1] == "True pretrain", done.stderr
    assert done.stdout.count("no CUDA device is visible") == 1
