"""What is installed, from where, and what is left behind: locked releases, the audit, and a wheel's whole life."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LISTS = sorted((ROOT / "requirements").glob("*.txt"))

DROPPED = ("HOTSPA_LOCKED", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in DROPPED}
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


def python_standing_in(folder: Path, version: str) -> tuple[Path, Path]:
    """An interpreter of this version, without torch and Megatron, whose pip only writes down what it is asked for."""
    folder.mkdir()
    asked, python = folder / "asked", folder / "python"
    python.write_text(f"""#!/usr/bin/env bash
case "$*" in
    "-") printf 'ok\\t%s\\t{folder}\\t{version}.4\\t-\\t-\\t-\\n' "$0" ;;
    "- "*) exec {sys.executable} "$@" ;;
    "-m venv "*) mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
    "-m pip "*) printf '%s\\n' "$*" >>{asked} ;;
esac
""")
    python.chmod(0o755)
    asked.touch()
    return python, asked


def locked_setup(tmp_path: Path, version: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """What scripts/setup.sh says with HOTSPA_LOCKED, and what it asks pip for, on Python ``version``."""
    python, asked = python_standing_in(tmp_path / f"python {version}".replace(" ", "-"), version)
    variables = {"PYTHON": str(python), "HOTSPA_VENV": str(tmp_path / f"venv-{version}"), "HOTSPA_LOCKED": "1"}
    done = run("bash", tmp_path / "scripts" / "setup.sh", **variables)
    return done, [line.split()[2:] for line in asked.read_text().splitlines()]


def image_python() -> str:
    """The Python of the CPU image's base."""
    found = re.search(
        r"^ARG BASE_IMAGE=python:(3\.\d+)-", (ROOT / "docker" / "Dockerfile.cpu").read_text(), re.MULTILINE
    )
    assert found is not None
    return found[1]


def test_with_locked_releases_nothing_is_installed_without_its_hash(tmp_path: Path) -> None:
    """On the image's Python and every other that is supported: torch, what it needs, Megatron, the tools."""
    for name in ("scripts", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    versions = ("3.11", "3.12", "3.13")
    assert image_python() in versions
    for version in versions:
        done, asked = locked_setup(tmp_path, version)
        assert done.returncode == 0, done.stdout + done.stderr
        *others, own = asked
        # Our own tree, which needs no other.
        assert own == ["install", "--no-deps", "--no-build-isolation", "--editable", str(tmp_path)]
        lists = []
        for words in others:
            assert {"--no-deps", "--require-hashes"} <= set(words) and words[-2] == "--requirement", words
            lists.append(Path(words[-1]).name)
            assert not any("==" in word for word in words)
        # Python 3.11 builds Megatron, with what a list names and not with what pip would fetch for it.
        build = version == "3.11"
        assert lists == ["torch.txt", "locked.txt", *(["build.txt"] if build else []), "megatron.txt"]
        assert ("--no-build-isolation" in others[-1]) == ("--no-binary" in others[-1]) == build
    # One hash for each build that is said to be checked; a Python whose build is not is told so, and gets nothing.
    torch = tmp_path / "requirements" / "torch.txt"
    (hashes,) = entries(torch.read_text()).values()
    builds = re.findall(r"\bcp3\d+", torch.read_text())
    assert builds == ["cp311", "cp312", "cp313"] and len(set(hashes)) == len(builds)
    torch.write_text(torch.read_text().replace(" cp312", ""))
    shutil.rmtree(tmp_path / "python-3.12")
    shutil.rmtree(tmp_path / "venv-3.12")
    done, asked = locked_setup(tmp_path, "3.12")
    assert done.returncode == 1 and "requirements/torch.txt has no hash of torch for cp312" in done.stderr and not asked


def test_a_build_that_is_at_hand_has_the_hash_that_is_locked() -> None:
    (hashes,) = entries((ROOT / "requirements" / "torch.txt").read_text()).values()
    folder = Path(os.environ.get("PIP_FIND_LINKS", "/nowhere"))
    found = sorted(folder.glob("torch-2.13.0+cpu-cp31[123]-*x86_64.whl"))
    if not found:
        pytest.skip("PIP_FIND_LINKS names no folder with a build of torch for CPU")
    for path in found:
        with path.open("rb") as file:
            assert f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" in hashes


def test_ci_and_the_cpu_image_ask_for_what_is_locked() -> None:
    image = (ROOT / "docker" / "Dockerfile.cpu").read_text()
    for text in ((ROOT / ".ci" / "run").read_text(), image):
        assert re.search(r"HOTSPA_LOCKED=1 .*bash scripts/setup\.sh", text)
        assert not re.search(r"\bpip3? install|uv (pip|sync)", text)
    assert re.search(r"^COPY .*\brequirements requirements$", image, re.MULTILINE)


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

PIP_AUDIT = """#!{python}
import json, os, pathlib, sys
words = sys.argv[1:]
asked = pathlib.Path(words[words.index("--requirement") + 1]).read_text().split()
with open(os.environ["SEEN"], "a") as file:
    file.write(" ".join(asked) + chr(10))
mode = os.environ["MODE"]
if mode != "no report":
    found = []
    for name, version in (each.split("==") for each in asked):
        if mode == "nothing" or (mode == "forgotten" and name == "numpy"):
            continue
        if mode == "mirror" or (mode == "skipped" and name == "torch"):
            found.append(dict(name=name, skip_reason="not found on PyPI"))
        else:
            hole = mode == "vulnerable" and (name, version) == ("pyyaml", "6.0")
            found.append(dict(name=name, version=version, vulns=[dict(id="PYSEC-1", fix_versions=["6.1"])] * hole))
    pathlib.Path(words[words.index("--output") + 1]).write_text(json.dumps(dict(dependencies=found)))
sys.exit(mode in ("vulnerable", "no report", "failed"))
"""
LISTED = """numpy==2.4.6 ; python_full_version < '3.12' \\
    --hash=sha256:00
numpy==2.5.5 ; python_full_version >= '3.12' \\
    --hash=sha256:00 \\
    --hash=sha256:01
PyYAML==6.0 ; sys_platform == 'win32' \\
    --hash=sha256:00
"""


@pytest.mark.parametrize(
    ("mode", "bandit_code", "code", "said"),
    [
        ("clean", 0, 0, "7 releases were looked at; none has a known vulnerability"),
        ("skipped", 0, 1, "torch 2.13.0: not looked at: not found on PyPI\naudit: 0 known vulnerabilities; 1 of 7"),
        ("mirror", 0, 1, "not one answer: does this machine reach https://pypi.org/pypi/NAME/VERSION/json?"),
        ("forgotten", 0, 1, "numpy 2.5.5: not looked at: the report does not name it"),
        ("vulnerable", 0, 1, "pyyaml 6.0: PYSEC-1, mended in 6.1"),
        ("nothing", 0, 1, "7 of 7 releases were not looked at"),
        ("failed", 0, 1, "0 known vulnerabilities; 0 of 7"),
        ("no report", 0, 1, "pip-audit gave no report (exit code 1)"),
        ("clean", 1, 1, ""),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_audit_that_looks_at_nothing_is_no_pass(
    tmp_path: Path, mode: str, bandit_code: int, code: int, said: str
) -> None:
    """With stand-ins for both tools; what they find themselves is theirs."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "audit.sh", tmp_path / "scripts")
    (tmp_path / "requirements").mkdir()
    one = "{}==1.0 \\\n    --hash=sha256:00\n"
    lists = {"locked": LISTED, "torch": "# a remark\ntorch==2.13.0+cpu \\\n    --hash=sha256:00\n"}
    for name, text in {
        **lists,
        "megatron": one.format("megatron-core"),
        "build": one.format("pybind11"),
        "release": one.format("build"),
    }.items():
        (tmp_path / "requirements" / f"{name}.txt").write_text(text)
    for name, text in (
        ("bandit", f"#!/bin/sh\nexit {bandit_code}\n"),
        ("pip-audit", PIP_AUDIT.replace("{python}", sys.executable)),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MODE": mode, "SEEN": str(tmp_path / "seen")}
    done = run("bash", tmp_path / "scripts" / "audit.sh", **variables)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    if bandit_code:
        assert not (tmp_path / "seen").exists()
        return
    # For every Python, under PyPI's own versions, and no name twice in one list.
    first, second = (tmp_path / "seen").read_text().splitlines()
    assert {first, second} == {
        "numpy==2.4.6 pyyaml==6.0 torch==2.13.0 megatron-core==1.0 pybind11==1.0 build==1.0",
        "numpy==2.5.5",
    }


def test_bandit_finds_nothing() -> None:
    """Of the release: what the audit runs, where bandit is at hand."""
    if shutil.which("bandit") is None:
        pytest.skip("no bandit on PATH: pip install -r requirements/release.txt")
    words = re.search(r"^(bandit .*)$", (ROOT / "scripts" / "audit.sh").read_text(), re.MULTILINE)
    assert words is not None
    done = run(*words[1].split())
    assert done.returncode == 0, done.stdout


# ------------------------------------------------------------------------------------------------ a wheel's whole life


DEMO = ("--iterations", "2")
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"


def files_under(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if "__pycache__" not in path.parts}


def unpacked_sdist(tmp_path: Path) -> tuple[Path, set[str]]:
    """The unpacked sdist of a copy of the tree as it stands, and the names of what git tracks."""
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").stdout
    source = tmp_path / "source"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    done = run(sys.executable, "-c", BUILD, "build_sdist", tmp_path / "dist", cwd=source)
    assert done.returncode == 0, done.stderr
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    tracked = run("git", "ls-files", "-z").stdout
    return unpacked, {name for name in tracked.split("\0") if name and (ROOT / name).is_file()}


def test_the_sdist_holds_what_git_does(tmp_path: Path) -> None:
    """Examples, scripts, locked lists, documentation and tests, so that each command of the README is in it."""
    unpacked, tracked = unpacked_sdist(tmp_path)
    packed = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    assert {"examples/demo/__main__.py", "scripts/demo.sh", "MANIFEST.in"} <= tracked
    assert tracked - packed == set()
    assert not any(name.endswith(".pyc") for name in packed)
    assert (unpacked / "scripts" / "demo.sh").stat().st_mode & 0o111


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_built_installed_run_from_elsewhere_and_uninstalled(tmp_path: Path) -> None:
    """sdist -> wheel -> an environment of its own beside this one's torch and Megatron; the demo runs from another folder."""
    dist = tmp_path / "dist"
    unpacked, tracked = unpacked_sdist(tmp_path)
    # The wheel comes from the sdist, so that one that lacks a file shows.
    done = run(sys.executable, "-c", BUILD, "build_wheel", dist, cwd=unpacked)
    assert done.returncode == 0, done.stderr
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if not name.startswith("hotspa_megatron-")}
    assert packed == {
        name for name in tracked if name.startswith("hotspa_megatron/") and name.endswith((".py", ".yaml", "py.typed"))
    }

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
    shutil.copytree(unpacked / "examples", elsewhere / "examples")
    few = {"PYTHONPATH": str(elsewhere), "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = run(python, "-m", "examples.demo", *DEMO, cwd=elsewhere, CUDA_DEVICE_MAX_CONNECTIONS="1", **few)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "the same training" in done.stdout
    assert run(python, "-m", "pip", "uninstall", "--yes", "hotspa_megatron", cwd=elsewhere).returncode == 0
    assert files_under(venv) == before
    # Nor what running it has compiled.
    assert not list(site.glob("hotspa*")) and not (venv / "bin" / "hotspa").exists()
