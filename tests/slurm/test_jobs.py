"""scripts/slurm under a real Slurm: 8 ranks on 4 nodes train, leave for another job or their time limit, and go on.

Needs root and Debian's packages of Slurm, which are installed where they are missing; skipped where that cannot be.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotspa_megatron.config import load_config
from tests.slurm import cluster
from tests.slurm.cluster import Cluster
from tests.spawn import REPOSITORY
from tests.training import SCRIPT, SP, Job, arguments, corpus, flag, train

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

NODES, RANKS_PER_NODE, ITERATIONS = 4, 2, 40
CONFIG = """
strategies:
  - {max_length: 32, tp: 1, tokens_per_microbatch: 96}
  - {max_length: 128, tp: 2, tokens_per_microbatch: 192}
"""
ON_CPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
}
TRAINING = "scripts/slurm/pretrain_gpt_hotspa.sbatch"


def line() -> tuple[str, ...]:
    """Megatron's arguments of every run. Without a sharded optimizer: stock Megatron does not restore that one on CPU."""
    return arguments(SP, tp=2, cp=2, iterations=ITERATIONS)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    cluster.install()
    with cluster.started(nodes=NODES) as running:
        yield running


def _log_steps(log: Path) -> None:
    """In a rank: have rank 0 write its step log there."""
    from hotspa_megatron.hooks.session import STEP_LOG_VARIABLE

    os.environ[STEP_LOG_VARIABLE] = str(log)


def logged(log: Path) -> list[tuple[int, float]]:
    """(iteration, loss) of every step that a step log holds."""
    entries = [json.loads(text) for text in log.read_text().splitlines()] if log.exists() else []
    return [(entry["iteration"], entry["loss"]) for entry in entries]


@functools.cache
def unbroken() -> list[tuple[int, float]]:
    """The same training without Slurm and without a break."""
    log = corpus().parent / "unbroken.json"
    train(Job(line(), CONFIG, ranks=NODES * RANKS_PER_NODE, before=functools.partial(_log_steps, log)))
    return logged(log)


# The training script, which begins when a file is there.
LATER = f"""
import os, time
from pathlib import Path
while not Path(os.environ["BEGIN"]).exists():
    time.sleep(0.2)
exec(compile(Path({str(SCRIPT)!r}).read_text(), {str(SCRIPT)!r}, "exec"))
"""


class Training:
    """A submitted training and what it leaves behind."""

    def __init__(self, slurm: Cluster, folder: Path, *options: str, **settings: str) -> None:
        self._slurm, self.steps, self.output = slurm, folder / "steps.json", folder / "job.out"
        environment = {
            **ON_CPU, "PYTHON": sys.executable, "SCRIPT": str(SCRIPT), "PYTHONPATH": str(REPOSITORY),
            "HOTSPA_STEP_LOG": str(self.steps), "CHECKPOINTS": str(folder / "saved"), **settings,
        }  # fmt: skip
        self.job = slurm.submit(
            f"--chdir={REPOSITORY}", f"--nodes={NODES}", f"--ntasks-per-node={RANKS_PER_NODE}", "--time=30",
            f"--output={self.output}", *options, str(REPOSITORY / TRAINING), *line(), *flag(CONFIG),
            environment=environment,
        )  # fmt: skip

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + 300
        while len(logged(self.steps)) < count:
            assert self._slurm.state(self.job) in ("PENDING", "RUNNING", "CONFIGURING"), self.output.read_text()[-3000:]
            assert time.monotonic() < deadline, self.output.read_text()[-3000:]
            time.sleep(0.2)

    def wait_until_told(self) -> None:
        """Until Slurm has told the job's script that its time is nearly over."""
        deadline = time.monotonic() + 150
        while not self.output.exists() or "got USR1: the ranks are to save and end" not in self.said:
            assert time.monotonic() < deadline, self.output.read_text()[-3000:]
            time.sleep(0.2)

    def wait(self, *states: str) -> None:
        self._slurm.wait(self.job, *states, limit_s=400, log=self.output)

    @property
    def said(self) -> list[str]:
        """The job script's own lines, without the times."""
        return re.findall(r"^slurm: \S+T\S+ (.*)$", self.output.read_text(), re.MULTILINE)

    def went_on_as_unbroken(self) -> bool:
        """Whether it was interrupted once, saved at its last step, and trained every step once, to the unbroken losses."""
        trace, expected = logged(self.steps), unbroken()
        assert [iteration for iteration, _ in expected] == list(range(1, ITERATIONS + 1))
        assert len({loss for _, loss in expected}) == ITERATIONS
        saved = [
            int(text) for text in re.findall(r"the ranks ended with code 0; saved: (\d+)", self.output.read_text())
        ]
        assert len(saved) == 2 and 0 < saved[0] < saved[1] == ITERATIONS, self.said
        assert f"saved: {saved[0]}" in self.said[-2] and self.said[-2].startswith("start 1 on node[1-4]"), self.said
        return trace == expected


def test_preempted_it_saves_and_goes_on_with_the_unbroken_runs_losses(slurm: Cluster, tmp_path: Path) -> None:
    training = Training(slurm, tmp_path)
    training.wait_for_steps(4)
    urgent = slurm.submit(
        "--partition=urgent", f"--nodes={NODES}", "--exclusive", "--output=/dev/null", "--wrap=sleep 3"
    )
    slurm.wait(urgent, "COMPLETED", limit_s=200, log=training.output)
    training.wait("COMPLETED")
    assert slurm.field(training.job, "Restarts") == "1"
    assert "got USR1: the ranks are to save and end" in training.said and "back to the queue" in training.said
    assert training.went_on_as_unbroken()


def test_at_its_time_limit_it_saves_and_goes_on_with_the_unbroken_runs_losses(slurm: Cluster, tmp_path: Path) -> None:
    """By torchrun, with static node ranks."""
    begin, script = tmp_path / "begin", tmp_path / "later.py"
    script.write_text(LATER)
    # The signal is due 5 minutes before the end, which is at once, and Slurm looks every half minute: training must not be
    # through by then, however fast it is.
    training = Training(slurm, tmp_path, "--time=5", LAUNCHER="torchrun", SCRIPT=str(script), BEGIN=str(begin))
    training.wait_until_told()
    begin.touch()
    training.wait("PENDING")
    slurm.run("scontrol", "update", f"JobId={training.job}", "TimeLimit=30")
    training.wait("COMPLETED")
    assert slurm.field(training.job, "Restarts") == "1"
    assert training.went_on_as_unbroken()


# In the place of a training: waits to be told to save, and saves if it may; a later start only says that it goes on.
WAITING = """
import pathlib, signal, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--save") + 1])
tracker = folder / "latest_checkpointed_iteration.txt"
if folder.exists():
    print("goes on after", tracker.read_text() if tracker.exists() else "nothing", flush=True)
    sys.exit()
folder.mkdir(parents=True)
if "--saved-before" in sys.argv:
    tracker.write_text("4")
told = []
number = getattr(signal, sys.argv[sys.argv.index("--exit-signal") + 1])
signal.signal(number, lambda *_: told.append(1))
print("waits", flush=True)
while not told:
    signal.sigtimedwait([], 0.1)
if "--saves" in sys.argv:
    tracker.write_text("5")
"""


def waiting(slurm: Cluster, folder: Path, *arguments: str, **settings: str) -> tuple[int, Path]:
    """Submit the training script with WAITING for a training, on one node, and wait for it; its number and its output."""
    script, output = folder / "waiting.py", folder / "job.out"
    script.write_text(WAITING)
    environment = {
        **ON_CPU, **settings, "PYTHON": sys.executable, "SCRIPT": str(script), "PYTHONPATH": str(REPOSITORY),
        "CHECKPOINTS": str(folder / "saved"),
    }  # fmt: skip
    job = slurm.submit(
        f"--chdir={REPOSITORY}", "--nodes=1", "--ntasks-per-node=1", "--time=30", f"--output={output}",
        str(REPOSITORY / TRAINING), *arguments, environment=environment,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not output.exists() or "waits" not in output.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.3)
    return job, output


def test_a_job_that_never_saves_does_not_go_round_for_ever(slurm: Cluster, tmp_path: Path) -> None:
    job, output = waiting(slurm, tmp_path)
    slurm.run("scancel", "--batch", "--signal=USR1", str(job))
    slurm.wait(job, "FAILED", limit_s=60, log=output)
    assert "nothing was saved since this start, so it is not requeued" in output.read_text()
    assert slurm.field(job, "Restarts") == "0"


@pytest.mark.parametrize("exit_signal", ["URG", "TERM"], ids=["ranks die", "ranks save"])
def test_cancelled_it_stays_away_whatever_it_saved(exit_signal: str, slurm: Cluster, tmp_path: Path) -> None:
    job, output = waiting(slurm, tmp_path, "--saved-before", "--saves", EXIT_SIGNAL=exit_signal)
    slurm.run("scancel", str(job))
    slurm.wait(job, "CANCELLED", limit_s=60, log=output)
    said = output.read_text()
    assert "got TERM" in said and "it is not requeued" in said and "goes on" not in said
    assert f"saved: {5 if exit_signal == 'TERM' else 4}\n" in said
    assert slurm.field(job, "Restarts") == "0"


@pytest.mark.parametrize("saves", [("--saves",), ()], ids=["saves", "too early to save"])
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_preempted_it_comes_back_whatever_it_saved(
    launcher: str, saves: tuple[str, ...], slurm: Cluster, tmp_path: Path
) -> None:
    comes_back(slurm, *waiting(slurm, tmp_path, *saves, LAUNCHER=launcher), after="5" if saves else "nothing")


def test_preempted_where_only_ranks_are_told_it_comes_back_too(tmp_path: Path) -> None:
    cluster.install()
    with cluster.started(nodes=1, tell_scripts=False) as slurm:
        comes_back(slurm, *waiting(slurm, tmp_path, "--saves", EXIT_SIGNAL="TERM"), after="5")


def test_one_task_of_an_array_goes_and_comes_back_alone(slurm: Cluster, tmp_path: Path) -> None:
    """The one that has the array's own number, by which all are meant."""
    (tmp_path / "waiting.py").write_text(WAITING)
    environment = {
        **ON_CPU, "PYTHON": sys.executable, "SCRIPT": str(tmp_path / "waiting.py"), "PYTHONPATH": str(REPOSITORY),
        "HOTSPA_SLURM": str(REPOSITORY / "scripts" / "slurm"),
    }  # fmt: skip
    array = slurm.submit(
        f"--chdir={tmp_path}", "--array=0-1", "--nodes=1", "--ntasks-per-node=1", "--time=30", "--output=%a.out",
        str(REPOSITORY / TRAINING), "--saves", environment=environment,
    )  # fmt: skip
    outputs = [tmp_path / f"{task}.out" for task in (0, 1)]
    deadline = time.monotonic() + 120
    while not all(output.exists() and "waits" in output.read_text() for output in outputs):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    named = [slurm.field(f"{array}_{task}", "JobId") for task in (0, 1)].index(str(array))
    other = f"{array}_{1 - named}"
    slurm.run("scancel", "--batch", "--signal=USR1", f"{array}_{named}")
    slurm.wait(f"{array}_{named}", "COMPLETED", limit_s=100, log=outputs[named])
    assert slurm.field(f"{array}_{named}", "Restarts") == "1" and "goes on after 5" in outputs[named].read_text()
    assert slurm.state(other) == "RUNNING" and slurm.field(other, "Restarts") == "0"
    assert outputs[1 - named].read_text().rstrip().endswith("waits")
    slurm.run("scancel", other)
    slurm.wait(other, "CANCELLED", limit_s=60, log=outputs[1 - named])


def comes_back(slurm: Cluster, job: int, output: Path, *, after: str) -> None:
    """Preempt the job and see it go on after what it had saved."""
    urgent = slurm.submit(
        "--partition=urgent", f"--nodes={slurm.nodes}", "--exclusive", "--output=/dev/null", "--wrap=sleep 3"
    )
    slurm.wait(urgent, "COMPLETED", limit_s=200, log=output)
    slurm.wait(job, "COMPLETED", limit_s=100, log=output)
    assert slurm.field(job, "Restarts") == "1"
    assert f"goes on after {after}" in output.read_text()


def test_nodes_are_measured_and_then_planned_for(slurm: Cluster, tmp_path: Path) -> None:
    output, plan, profile = tmp_path / "job.out", tmp_path / "hotspa.yaml", tmp_path / "cluster.yaml"
    job = slurm.submit(
        f"--chdir={REPOSITORY}", "--nodes=2", "--ntasks-per-node=1", f"--output={output}",
        str(REPOSITORY / "scripts/slurm/plan.sbatch"), "--corpus", str(corpus()), "--", *arguments(tp=2),
        environment={
            **ON_CPU, "PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY), "PROFILE": str(profile), "PLAN": str(plan)
        },
    )  # fmt: skip
    slurm.wait(job, "COMPLETED", limit_s=400, log=output)
    assert "2 ranks, 1 per node, measured by hotspa profile" in profile.read_text()
    assert load_config(plan) and "for 2 ranks of" in plan.read_text()


def test_a_job_is_verified_before_it_trains(slurm: Cluster, tmp_path: Path) -> None:
    output, logs = tmp_path / "job.out", tmp_path / "logs"
    job = slurm.submit(
        f"--chdir={REPOSITORY}", "--nodes=2", "--ntasks-per-node=2", f"--output={output}",
        str(REPOSITORY / "scripts/slurm/verify.sbatch"), *line(), *flag(CONFIG),
        environment={
            **ON_CPU, "PYTHON": sys.executable, "SCRIPT": str(SCRIPT), "PYTHONPATH": str(REPOSITORY), "LOGS": str(logs),
        },
    )  # fmt: skip
    slurm.wait(job, "COMPLETED", limit_s=400, log=output)
    assert "PASS: config: the same training as under one strategy" in output.read_text()
