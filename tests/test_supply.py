"""What is installed, from where, and what is left behind: locked releases, the audit, and a wheel's whole life."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LISTS = sorted((ROOT / "requirements").glob("*.txt"))


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("HOTSPA_LOCKED", "PYTHONPATH")}
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


# ----------------------------------------------------------------------------------------------------- locked releases


def entries(text: str) -> dict[str, list[str]]:
    """Hashes by what is asked for, such as ``numpy==2.4.6 ; python_full_version < '3.12'``."""
    lines = [line for line in text.replace("\\\n", "").splitlines() if line.strip() and not line.startswith("#")]
    return {
        line.split(" --hash=")[0].strip(): line.split(" --hash=")[1:] for line in map(" ".join, map(str.split, lines))
    }


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.name)
def test_every_entry_is_one_release_with_hashes(path: Path) -> None:
    found = entries(path.read_text())
    assert found
    for what, hashes in found.items():
        assert re.fullmatch(r"[a-z0-9.-]+==[0-9][0-9a-z.+]*( ; .+)?", what), what
        assert hashes and all(re.fullmatch("sha256:[0-9a-f]{64}", each) for each in hashes), what


def test_what_setup_cfg_asks_for_is_locked() -> None:
    done = run("bash", "scripts/setup.sh", "--plan", PYTHON=getattr(sys, "_base_executable", sys.executable))
    (asked,) = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("requires ")]
    locked = {what.split("==")[0] for what in entries((ROOT / "requirements" / "locked.txt").read_text())}
    missing = [name for name in asked if re.split("[<>=!~]", name)[0].lower() not in locked]
    assert not missing, f"{missing}: run scripts/lock.sh"
    release = re.search(r"HOTSPA_MEGATRON:-([0-9.]+)", (ROOT / "scripts" / "setup.sh").read_text())
    assert release and f"megatron-core=={release[1]}" in entries((ROOT / "requirements" / "megatron.txt").read_text())


def test_ci_and_the_cpu_image_install_what_is_locked() -> None:
    assert "HOTSPA_LOCKED=1" in (ROOT / ".ci" / "run").read_text()
    image = (ROOT / "docker" / "Dockerfile.cpu").read_text()
    assert "HOTSPA_LOCKED=1" in image and "requirements" in image


def test_what_was_locked_serves_those_who_did_not_ask_but_not_the_other_way_round(tmp_path: Path) -> None:
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    setup, variables = (
        tmp_path / "scripts" / "setup.sh",
        {"PYTHON": sys.executable, "HOTSPA_VENV": str(tmp_path / "venv")},
    )
    plans = {
        locked: run("bash", setup, "--plan", **variables, **({"HOTSPA_LOCKED": "1"} if locked else {})).stdout
        for locked in (False, True)
    }
    assert plans[True].startswith(plans[False]) and plans[True].splitlines()[-1].startswith("locked ")
    binary = tmp_path / "venv" / "bin" / "python"
    binary.parent.mkdir(parents=True)
    binary.symlink_to(sys.executable)
    (tmp_path / "venv" / "hotspa-plan").write_text(plans[True])
    for options in ({}, {"HOTSPA_LOCKED": "1"}):
        assert run("bash", setup, **variables, **options).stdout.endswith("is up to date\n")
    # Not made by the script, so it stops before it would make it anew.
    (tmp_path / "venv" / "hotspa-plan").write_text(plans[False])
    done = run("bash", setup, **variables, HOTSPA_LOCKED="1")
    assert done.returncode == 1 and "was not made by this script" in done.stderr
    done = run("bash", setup, "--plan", **variables, HOTSPA_LOCKED="1", HOTSPA_MEGATRON="0.18.2")
    assert done.returncode == 1 and "only one release is locked" in done.stderr


# ------------------------------------------------------------------------------------------------------------ the audit

CLEAN: dict[str, Any] = {"name": "numpy", "version": "2.4.6", "vulns": []}
SKIPPED: dict[str, Any] = {"name": "torch", "skip_reason": "not found on PyPI"}
HOLE: dict[str, Any] = {**CLEAN, "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.4.7"]}]}


@pytest.mark.parametrize(
    ("report", "audit_code", "bandit_code", "code", "said"),
    [
        ([CLEAN], 0, 0, 0, "1 packages were looked at; none has a known vulnerability"),
        ([CLEAN, SKIPPED], 0, 0, 1, "0 known vulnerabilities; 1 of 2 packages were not looked at"),
        ([HOLE], 1, 0, 1, "numpy 2.4.6: PYSEC-1, mended in 2.4.7"),
        ([], 0, 0, 1, "0 of 0 packages"),
        ([CLEAN], 1, 0, 1, "0 known vulnerabilities"),
        (None, 1, 0, 1, "pip-audit gave no report (exit code 1)"),
        ([CLEAN], 0, 1, 1, ""),
    ],
    ids=["clean", "skipped", "vulnerable", "nothing", "failed", "no report", "bandit finds something"],
)
def test_an_audit_that_looks_at_nothing_is_no_pass(
    tmp_path: Path, report: list[Any] | None, audit_code: int, bandit_code: int, code: int, said: str
) -> None:
    """With stand-ins for both tools; what they find themselves is theirs."""
    text = "" if report is None else json.dumps({"dependencies": report})
    for name, body in (
        ("bandit", f"exit {bandit_code}"),
        ("pip-audit", f'while [ "$1" != --output ]; do shift; done; printf %s \'{text}\' >"$2"; exit {audit_code}'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = run("bash", "scripts/audit.sh", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------ a wheel's whole life


DEMO = ("--iterations", "2")


def files_under(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_built_installed_run_from_elsewhere_and_uninstalled(tmp_path: Path) -> None:
    """sdist -> wheel -> an environment of its own beside this one's torch and Megatron; the demo runs from another folder."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout
    source = tmp_path / "source"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    dist = tmp_path / "dist"
    build = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
    done = run(sys.executable, "-c", build, "build_sdist", dist, cwd=source)
    assert done.returncode == 0, done.stderr
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    # The wheel comes from the sdist, so that one that lacks a file shows.
    done = run(sys.executable, "-c", build, "build_wheel", dist, cwd=unpacked)
    assert done.returncode == 0, done.stderr
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.startswith("hotspa_megatron-")}
    tracked = {name for name in listed.split("\0") if name.startswith("hotspa_megatron/")}
    assert packed == {name for name in tracked if name.endswith((".py", ".yaml", "py.typed"))}

    venv = tmp_path / "venv"
    assert run(sys.executable, "-m", "venv", venv).returncode == 0
    (site,) = venv.glob("lib/python*/site-packages")
    # torch, Megatron and the rest come from this environment; an editable install of the package is not looked for there.
    own = Path(sys.executable).parent.parent / site.relative_to(venv)
    (site / "beside.pth").write_text(f"{own}\n")
    before = files_under(venv)
    python = venv / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--no-deps", "--no-index", "--ignore-installed", wheel)
    assert run(*pip).returncode == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    where = run(python, "-c", "import hotspa_megatron; print(hotspa_megatron.__file__)", cwd=elsewhere).stdout.strip()
    assert Path(where).is_relative_to(venv)
    assert run(venv / "bin" / "hotspa", "simulate", "--help", cwd=elsewhere).returncode == 0
    shutil.copytree(ROOT / "examples", elsewhere / "examples")
    few = {"PYTHONPATH": str(elsewhere), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = run(python, "-m", "examples.demo", *DEMO, cwd=elsewhere, CUDA_DEVICE_MAX_CONNECTIONS="1", **few)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "the same training" in done.stdout
    assert run(python, "-m", "pip", "uninstall", "--yes", "hotspa_megatron", cwd=elsewhere).returncode == 0
    assert files_under(venv) == before
