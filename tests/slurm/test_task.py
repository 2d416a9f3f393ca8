"""scripts/slurm without Slurm: what a task does with an address and with signals, and what settings are refused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.lint import assert_clean
from tests.spawn import REPOSITORY

FOLDER = REPOSITORY / "scripts" / "slurm"
FILES = sorted(FOLDER.iterdir())
# A rank that, as Megatron does, listens to the signal only after a while, and then ends in good order. As when it writes a
# checkpoint, it has a process beside it that knows nothing of signals.
RANK = """
import os, pathlib, signal, subprocess, sys, time
helper = subprocess.Popen(["sleep", "60"])
folder, heard = pathlib.Path(sys.argv[1]), []
name = os.environ["RANK"]
(folder / f"started-{name}").touch()
while not (folder / "listen").exists():
    time.sleep(0.02)
signal.signal(signal.SIGURG, lambda *_: heard.append(1))
(folder / f"listens-{name}").touch()
while not heard:
    time.sleep(0.02)
(folder / f"saved-{name}").write_text(" ".join(os.environ[n] for n in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))
assert helper.poll() is None
helper.kill()
"""


@pytest.mark.parametrize("script", FILES, ids=lambda path: path.name)
def test_script_is_sound(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n") and "\nset -euo pipefail\n" in text
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("script", FILES, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    assert_clean("shellcheck", "-x", "-P", REPOSITORY, script)


def task(*python: str, **variables: str) -> subprocess.Popen[str]:
    """task.sh as the first of Slurm's tasks, in a session of its own."""
    environment = {
        "MASTER_ADDR": "localhost", "MASTER_PORT": "29517", "LAUNCHER": "srun", "RANKS_PER_NODE": "2",
        "PYTHON": sys.executable, "EXIT_SIGNAL": "URG", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
        "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", **variables,
    }  # fmt: skip
    return subprocess.Popen(
        ["bash", str(FOLDER / "task.sh"), *python], env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def test_an_address_that_does_not_resolve_is_said_at_once() -> None:
    """Ranks would try to connect until the job's time is over."""
    began = time.monotonic()
    process = task("-c", "raise SystemExit(0)", MASTER_ADDR="no-such-host.invalid", SLURMD_NODENAME="node7")
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert errors == (
        "slurm: node7: no-such-host.invalid, the node of rank 0, does not resolve here: put it into DNS or /etc/hosts of "
        "every node\n"
    )
    assert time.monotonic() - began < 30


def until(folder: Path, *names: str) -> None:
    deadline = time.monotonic() + 60
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, (names, sorted(path.name for path in folder.iterdir()))
        time.sleep(0.02)


def signal_task(process: subprocess.Popen[str]) -> None:
    """To Slurm's own task alone, as where Slurm tracks processes by cgroups."""
    process.send_signal(signal.SIGURG)


def signal_all(process: subprocess.Popen[str]) -> None:
    """To the task and all that come of it, as where Slurm looks for its descendants."""
    for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        each.send_signal(signal.SIGURG)


@pytest.mark.parametrize("send", [signal_task, signal_all])
@pytest.mark.parametrize(
    ("launcher", "ranks", "seen"), [("srun", (3,), ["8 1 2"]), ("torchrun", (0, 1), ["2 0 2", "2 1 2"])]
)
def test_the_signal_reaches_the_ranks_and_kills_nothing_that_does_not_listen(
    launcher: str, ranks: tuple[int, ...], seen: list[str], send: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    process = task(str(tmp_path / "rank.py"), str(tmp_path), LAUNCHER=launcher)
    until(tmp_path, *(f"started-{rank}" for rank in ranks))
    send(process)
    time.sleep(0.3)
    (tmp_path / "listen").touch()
    until(tmp_path, *(f"listens-{rank}" for rank in ranks))
    assert process.poll() is None and not list(tmp_path.glob("saved-*"))
    send(process)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in ranks] == seen


# In the place of torchrun: ends while the task handles a signal, whose pkill comes back once it has ended.
RACING = """#!/bin/sh
until [ $((0x$(sed -n 's/^SigCgt:[^0-9a-f]*//p' "/proc/$PPID/status") & 0x4000)) = $((0x4000)) ]; do sleep 0.02; done
echo $$ >"$HERE/torchrun" && kill -URG "$PPID"
until [ -e "$HERE/heard" ]; do sleep 0.02; done
exit 3
"""
PKILL = """#!/bin/sh
touch "$HERE/heard"
while kill -0 "$(cat "$HERE/torchrun")" 2>/dev/null; do sleep 0.02; done
"""


def test_a_task_whose_ranks_end_while_it_handles_a_signal_has_their_code(tmp_path: Path) -> None:
    for name, text in (("python", RACING), ("pkill", PKILL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    variables = {"HERE": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": str(tmp_path / "python")}
    process = task("x.py", LAUNCHER="torchrun", **variables)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (3, "")


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_task_ends_with_its_ranks_failure(launcher: str) -> None:
    process = task("/no/such/script.py", LAUNCHER=launcher)
    process.communicate(timeout=60)
    assert process.returncode not in (0, None)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_JOB_ID": ""}, "no SLURM_JOB_ID: start this with sbatch"),
        ({"LAUNCHER": "mpirun"}, "LAUNCHER=mpirun: write srun or torchrun"),
        ({"EXIT_SIGNAL": "HUP"}, "EXIT_SIGNAL=HUP: write URG or TERM"),
        (
            {"EXIT_SIGNAL": "TERM", "LAUNCHER": "torchrun"},
            "EXIT_SIGNAL=TERM: torchrun would end its ranks before they have",
        ),
        ({"RANKS_PER_NODE": "all"}, "RANKS_PER_NODE=all: write the number of GPUs of a node"),
        ({"PYTHON": "/no/python"}, "PYTHON=/no/python: no such interpreter"),
        ({"SCRIPT": "/no/pretrain.py"}, "SCRIPT=/no/pretrain.py: no such file; set SCRIPT, or MEGATRON_LM_PATH to a"),
        ({"HOTSPA_SLURM": "/no/slurm"}, "no /no/slurm/site.sh: run sbatch in the checkout, or set HOTSPA_SLURM"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_that_cannot_be_is_one_line(variables: dict[str, str], said: str, tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho node1\n")
    scontrol.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1", "SLURM_NNODES": "1", "SLURM_CPUS_ON_NODE": "2"}
    environment = {**os.environ, **slurm, "PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
    done = subprocess.run(
        ["bash", FOLDER / "pretrain_gpt_hotspa.sbatch"], env={"PYTHON": sys.executable, **environment},
        cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"slurm: {said}") and done.stderr.count("\n") == 1, done.stderr
