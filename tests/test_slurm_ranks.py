"""Under Slurm rank 0 is on the first node of the job's own list, wherever the job was submitted, and every node knows its place.

And a job goes back to the queue where Slurm takes its time away, not where somebody ends it.

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
UNSET = ("MASTER_ADDR", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
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


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_every_rank_sees_the_devices_of_its_node(tmp_path: Path, launcher: str) -> None:
    """Whatever sbatch was told: Megatron takes the device of its local rank. A site's own options come later, and win."""
    more = {"SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "per_task:1", "SRUN_OPTIONS": "--gpu-bind=closest"}
    _, command = started(tmp_path, "n[01-02]", LAUNCHER=launcher, **more)
    assert [word for word in command.split() if "gpu" in word] == ["--gpu-bind=none", "--gpu-bind=closest"]


def task(visible: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The second of a node's four ranks, which sees these devices."""
    environment = {
        "MASTER_ADDR": "localhost", "LAUNCHER": "srun", "EXIT_SIGNAL": "URG", "RANKS_PER_NODE": "4", "PYTHON": "echo",
        "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURMD_NODENAME": "n01",
        "CUDA_VISIBLE_DEVICES": visible, **variables,
    }  # fmt: skip
    return subprocess.run(
        ["bash", FOLDER / "task.sh", "train"], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@pytest.mark.parametrize("visible", ["1", "0,1,2", "GPU-3b1c,GPU-77a0", "MIG-6e2f"])
def test_a_rank_that_does_not_see_its_device_is_refused(visible: str, launcher: str) -> None:
    """CUDA would only say "invalid device ordinal", on all ranks but the first."""
    done = task(visible, LAUNCHER=launcher)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"slurm: n01: CUDA_VISIBLE_DEVICES={visible}, and the node has 4 ranks, each of which has to see the devices of all: "
        "give sbatch --gpus-per-node=4, not --gpus-per-task or --gpu-bind; or set RANKS_PER_NODE\n"
    )


@pytest.mark.parametrize("visible", ["0,1,2,3", "3,2,1,0,4", "", "-1", "NoDevFiles"])
def test_a_rank_that_sees_its_device_or_none_at_all_is_started(visible: str) -> None:
    done = task(visible)
    assert (done.returncode, done.stdout, done.stderr) == (0, "train\n", "")


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


# ----------------------------------------------------------------------------------------------------- back to the queue

# In srun's place, once the job's script listens to USR1 and TERM: signals for it; then ranks save if they may, and end.
LISTENS = """#!/bin/sh
until [ $((0x$(sed -n 's/^SigCgt:[^0-9a-f]*//p' "/proc/$PPID/status") & 0x4200)) = $((0x4200)) ]; do sleep 1; done
"""
STEPS = f"""{LISTENS}
for name in $SIGNALS; do kill "-$name" "$PPID"; sleep 1; done
[ -z "$SAVES" ] || echo 5 >"$CHECKPOINTS/latest_checkpointed_iteration.txt"
exit 3
"""
# The same, where ranks end while the script handles a signal: it asks for the time, which comes when they have ended.
RACING = f"""{LISTENS}
echo $$ >"$CHECKPOINTS/ranks" && kill -TERM "$PPID"
until [ -e "$CHECKPOINTS/heard" ]; do sleep 1; done
exit 3
"""
CLOCK = """#!/bin/sh
if [ -e "$CHECKPOINTS/ranks" ]; then
    touch "$CHECKPOINTS/heard"
    while kill -0 "$(cat "$CHECKPOINTS/ranks")" 2>/dev/null; do sleep 1; done
fi
echo now
"""
# Slurm's other clients note their arguments.
CLIENT = """#!/bin/sh
case "$(basename "$0") $*" in
    *hostnames*) echo solo ;;
    'scontrol --oneliner show job'*) echo "JobId=7 JobName=run $SHOWN"; echo "$*" >>"$SAID" ;;
    *) echo "$(basename "$0") $*" >>"$SAID" ;;
esac
"""
RUNNING = "JobState=RUNNING Reason=None StartTime=2026-01-02T03:00:00 PreemptTime=None"
PREEMPTED = "JobState=RUNNING Reason=None StartTime=2026-01-02T03:00:00 PreemptTime=2026-01-02T04:00:00"
COMPLETING = RUNNING.replace("RUNNING", "COMPLETING")


def ended(
    folder: Path, shown: str, *signals: str, steps: str = STEPS, saves: bool = True, **variables: str
) -> tuple[int, list[str], str]:
    """A job whose script gets these signals: its code, what it asked of Slurm, what it said."""
    # Naps are short, and the last one, in which Slurm would end the script, is left out.
    sleep = '#!/bin/sh\n[ "$1" = 600 ] || exec /bin/sleep 0.05\n'
    files = {"srun": steps, "scontrol": CLIENT, "scancel": CLIENT, "date": CLOCK, "sleep": sleep}
    for name, text in files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "solo", "SLURM_NNODES": "1", "SLURM_CPUS_ON_NODE": "1",
        "RANKS_PER_NODE": "1", "PYTHON": sys.executable, "SCRIPT": str(REPOSITORY / "examples" / "pretrain_small.py"),
        "CHECKPOINTS": str(folder), "SAID": str(folder / "said"), "SHOWN": shown, "SIGNALS": " ".join(signals),
        "SAVES": "yes" if saves else "", "PATH": f"{folder}:{os.environ['PATH']}", **variables,
    }  # fmt: skip
    done = subprocess.run(
        ["bash", FOLDER / "pretrain_gpt_hotspa.sbatch"],
        env={**{name: value for name, value in os.environ.items() if name not in UNSET}, **environment},
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, (folder / "said").read_text().splitlines(), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("shown", "signals"),
    [
        (RUNNING, ("USR1",)),
        (COMPLETING.replace("None", "TimeLimit", 1), ("USR1", "TERM")),
        (PREEMPTED, ("USR1",)),
        (PREEMPTED, ("TERM",)),
        (PREEMPTED, ()),
    ],
    ids=["time is nearly over", "time is over", "preempted", "preempted, told by TERM", "preempted, ranks told alone"],
)
def test_a_job_whose_time_is_taken_away_goes_back_to_the_queue(
    tmp_path: Path, shown: str, signals: tuple[str, ...]
) -> None:
    _, asked, said = ended(tmp_path, shown, *signals)
    assert asked[-1] == "scontrol requeue 7" and "back to the queue" in said


@pytest.mark.parametrize(
    ("shown", "signals"),
    [
        (COMPLETING, ("TERM",)),
        (RUNNING, ("TERM",)),
        (COMPLETING, ("USR1", "TERM")),
        (PREEMPTED.replace("RUNNING", "COMPLETING"), ("USR1", "TERM")),
        (RUNNING, ()),
        (PREEMPTED.replace("T04", "T02"), ()),
    ],
    ids=["cancelled", "script told", "while it saves", "while preempted", "by itself", "preempted before this start"],
)
def test_a_job_that_somebody_ends_stays_away(tmp_path: Path, shown: str, signals: tuple[str, ...]) -> None:
    """However much it has saved since it started; its code is that of its ranks."""
    code, asked, said = ended(tmp_path, shown, *signals)
    assert code == 3 and not any("requeue" in line for line in asked) and "back to the queue" not in said


def test_a_job_that_has_saved_nothing_stays_away_unless_preempted(tmp_path: Path) -> None:
    code, asked, said = ended(tmp_path, RUNNING, "USR1", saves=False)
    assert code == 2 and not any("requeue" in line for line in asked) and "nothing was saved since this start" in said
    _, asked, _ = ended(tmp_path, PREEMPTED, "USR1", saves=False)
    assert asked[-1] == "scontrol requeue 7"


def test_a_task_of_an_array_speaks_of_itself_alone(tmp_path: Path) -> None:
    """The last one's number is the array's: what goes by that goes to all tasks."""
    _, asked, _ = ended(tmp_path, RUNNING, "USR1", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2")
    assert {line.split()[-1] for line in asked} == {"7_2"} and asked[-1] == "scontrol requeue 7_2"


def test_ranks_that_end_while_a_signal_is_handled_keep_their_code(tmp_path: Path) -> None:
    """What waited for them has returned with the signal's number then."""
    code, _, said = ended(tmp_path, RUNNING, steps=RACING)
    assert code == 3 and "got TERM" in said and "the ranks ended with code 3;" in said
