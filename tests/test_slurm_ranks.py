"""Under Slurm rank 0 is on the first node of the job's own list, wherever the job was submitted, and every node knows its place.

With scontrol and srun replaced by scripts that say what they are given: no Slurm is needed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spawn import REPOSITORY

FOLDER = REPOSITORY / "scripts" / "slurm"
LISTS = {"n[01-02]": "n01 n02", "a[1,3-4],b7": "a1 a3 a4 b7", "solo": "solo"}
SCONTROL = (
    '#!/bin/sh\ncase "$3" in\n'
    + "".join(f"'{given}') printf '%s\\n' {nodes} ;;\n" for given, nodes in LISTS.items())
    + "*) exit 1 ;;\nesac\n"
)
UNSET = ("MASTER_ADDR", "SLURM_ARRAY_TASK_ID")
SRUN = '#!/bin/sh\n{ env; echo "== $*"; } > "$SAID"\n'


def submitted(
    tmp_path: Path, nodes: str, *, script: str = "pretrain_gpt_hotspa", more: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """A job on these nodes; what srun is given goes to the file "said"."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("scancel", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    environment = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, "SLURM_NNODES": str(len(LISTS.get(nodes, "a").split())),
        "SLURM_CPUS_ON_NODE": "16", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1", "SLURM_SUBMIT_HOST": "login",
        "RANKS_PER_NODE": "4", "PYTHON": sys.executable, "SCRIPT": str(REPOSITORY / "examples" / "pretrain_small.py"),
        "CHECKPOINTS": str(tmp_path), "SAID": str(tmp_path / "said"), **variables,
    }  # fmt: skip
    environment = {
        name: value for name, value in {**os.environ, **environment}.items() if name not in UNSET or name in variables
    }
    return subprocess.run(
        ["bash", FOLDER / f"{script}.sbatch", "--hotspa-config", "x.yaml", *more],
        env={**environment, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def started(tmp_path: Path, nodes: str, **variables: str) -> tuple[dict[str, str], str]:
    """The environment and the arguments that srun is given by a job on these nodes."""
    done = submitted(tmp_path, nodes, **variables)
    assert done.returncode == 0, done.stderr
    said, _, command = (tmp_path / "said").read_text().rpartition("== ")
    return dict(line.split("=", 1) for line in said.splitlines() if "=" in line), command


@pytest.mark.parametrize(("nodes", "first"), [("n[01-02]", "n01"), ("a[1,3-4],b7", "a1"), ("solo", "solo")])
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_rank_0_is_on_the_first_node_of_the_list(tmp_path: Path, nodes: str, first: str, launcher: str) -> None:
    environment, command = started(tmp_path, nodes, LAUNCHER=launcher)
    count = len(LISTS[nodes].split())
    assert environment["MASTER_ADDR"] == first
    tasks = (4 * count, 4) if launcher == "srun" else (count, 1)
    assert f"--ntasks={tasks[0]} --ntasks-per-node={tasks[1]} " in command and "--distribution=block" in command
    assert command.rstrip().count("hotspa_megatron.launch") == 1 and "--hotspa-config x.yaml" in command


def test_four_tasks_of_one_device_are_four_ranks_of_a_node(tmp_path: Path) -> None:
    _, command = started(tmp_path, "n[01-02]", RANKS_PER_NODE="", SLURM_NTASKS_PER_NODE="4")
    assert "--ntasks=8 --ntasks-per-node=4 --cpus-per-task=4 " in command


def test_a_requeued_job_takes_another_port_and_the_same_checkpoints(tmp_path: Path) -> None:
    first, command = started(tmp_path, "n[01-02]")
    again, after = started(tmp_path, "n[01-02]", SLURM_RESTART_COUNT="1")
    assert first["MASTER_PORT"] != again["MASTER_PORT"] and first["MASTER_ADDR"] == again["MASTER_ADDR"]
    assert after == command and f"--save {tmp_path} --load {tmp_path}" in command


def test_an_address_that_is_set_already_stays(tmp_path: Path) -> None:
    """Another network's name of the first node, for instance."""
    environment, _ = started(tmp_path, "n[01-02]", MASTER_ADDR="n01-ib0")
    assert environment["MASTER_ADDR"] == "n01-ib0"
    environment, _ = started(tmp_path, "n[01-02]", MASTER_ADDR="")
    assert environment["MASTER_ADDR"] == "n01"


@pytest.mark.parametrize("nodes", ["", "z[1-2]"])
def test_without_an_address_nothing_is_started(tmp_path: Path, nodes: str) -> None:
    done = submitted(tmp_path, nodes)
    assert done.returncode == 2 and not (tmp_path / "said").exists()
    assert done.stderr == (
        f"slurm: SLURM_JOB_NODELIST={nodes}: scontrol names no node; set MASTER_ADDR to the first node's address\n"
    )


def test_tasks_of_an_array_have_checkpoints_of_their_own(tmp_path: Path) -> None:
    said = [
        started(tmp_path, "solo", CHECKPOINTS="", SLURM_JOB_NAME="run", SLURM_ARRAY_TASK_ID=task)[1] for task in "12"
    ]
    assert [f"/checkpoints/run-{task} --load" in each for task, each in zip("12", said, strict=True)] == [True, True]
    assert "/checkpoints/run --load" in started(tmp_path, "solo", CHECKPOINTS="", SLURM_JOB_NAME="run")[1]


@pytest.mark.parametrize(
    ("argument", "fix"),
    [("--load=/data/run6", "set CHECKPOINTS"), ("--save", "set CHECKPOINTS"), ("--finetune", "at every requeue")],
)
def test_what_would_be_overridden_is_refused(tmp_path: Path, argument: str, fix: str) -> None:
    """Megatron would only warn, and start a job that has run for weeks from random weights."""
    done = submitted(tmp_path, "solo", more=(argument,))
    assert done.returncode == 2 and not (tmp_path / "said").exists()
    assert done.stderr.startswith(f"slurm: {argument}: ") and fix in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", ["pretrain_gpt_hotspa", "plan", "verify"])
def test_help_is_the_head_of_the_script_and_starts_nothing(tmp_path: Path, script: str) -> None:
    done = submitted(tmp_path, "solo", script=script, more=("--help",))
    assert done.returncode == 0 and not (tmp_path / "said").exists()
    assert f"scripts/slurm/{script}.sbatch" in done.stdout and "SBATCH" not in done.stdout and not done.stderr
