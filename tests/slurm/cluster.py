"""A real Slurm on this machine, for tests: munged, slurmctld and one slurmd per node, all below one folder.

The nodes are names for this machine, which only the daemons and their jobs resolve: each slurmd has an /etc/hosts of its
own. Nothing is a system service, and every daemon ends with the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
CPUS_PER_NODE: Final = 2
_POLL_S: Final = 0.3

_CONFIGURATION: Final = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,bf_interval=2,sched_interval=2,sched_min_interval=0,requeue_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=60
KillWait=10
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
"""
_TELL_SCRIPTS: Final = "SlurmctldParameters=preempt_send_user_signal\n"
_PARTITIONS: Final = """\
PartitionName=main Nodes=node[1-{nodes}] Default=YES MaxTime=1:00:00 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
PartitionName=urgent Nodes=node[1-{nodes}] MaxTime=1:00:00 State=UP PriorityTier=10 PreemptMode=OFF
"""


def install() -> None:
    """Have Slurm's programs on this machine, from Debian's packages if need be; skips the test where they cannot be had."""
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons and mount namespaces need root")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here, in which nodes have names that resolve")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing and shutil.which("apt-get") is None:
        pytest.skip(f"Slurm is not installed ({missing[0]} is missing), and there is no apt-get")
    if missing:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in ("update", "install --yes --no-install-recommends slurm-wlm munge"):
            done = subprocess.run(
                ["apt-get", "-qq", *command.split()], env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                pytest.skip(f"apt-get {command}: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class Cluster:
    """The running cluster; ``started`` makes one."""

    def __init__(self, folder: Path, nodes: int, tell_scripts: bool) -> None:
        self.folder, self.nodes, self._tell_scripts = folder, nodes, tell_scripts
        self._daemons: list[subprocess.Popen[bytes]] = []

    def _configure(self) -> None:
        port, *node_ports = _free_ports(self.nodes + 1)
        host = socket.gethostname().split(".")[0]
        names = [f"node{number}" for number in range(1, self.nodes + 1)]
        text = _CONFIGURATION.format(host=host, port=port, folder=self.folder)
        text += _TELL_SCRIPTS if self._tell_scripts else ""
        for name, node_port in zip(names, node_ports, strict=True):
            text += (
                f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={node_port} CPUs={CPUS_PER_NODE} "
                "RealMemory=5000 State=UNKNOWN\n"
            )
            (self.folder / f"spool-{name}").mkdir()
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text(text + _PARTITIONS.format(nodes=self.nodes))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(names)}\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)

    def start(self) -> None:
        """Start the daemons and wait until all nodes are idle."""
        self._configure()
        # --force: the folder is root's alone, and so are all who use it.
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key",
            f"--socket={self.folder}/munge.socket", f"--pid-file={self.folder}/munged.pid",
            f"--seed-file={self.folder}/munge.seed", f"--log-file={self.folder}/munged.log",
        )  # fmt: skip
        self._until((self.folder / "munge.socket").exists, "munged", limit_s=20)
        configuration = f"{self.folder}/slurm.conf"
        self._daemon("slurmctld", "-D", "-f", configuration)
        for number in range(1, self.nodes + 1):
            private = 'mount --bind "$0" /etc/hosts && exec "$@"'
            self._daemon(
                "unshare", "--mount", "--propagation", "private", "sh", "-c", private, f"{self.folder}/hosts",
                "slurmd", "-D", "-f", configuration, "-N", f"node{number}",
            )  # fmt: skip
        self._until(self._all_idle, "nodes", limit_s=60)

    def _all_idle(self) -> bool:
        done = self._client("sinfo", "--noheader", "--partition=main", "--states=idle", "--format=%D")
        return done.returncode == 0 and done.stdout.split() == [str(self.nodes)]

    def _daemon(self, *command: str) -> None:
        output = (self.folder / f"{len(self._daemons)}.out").open("wb")
        with output:
            self._daemons.append(
                subprocess.Popen(
                    ["setpriv", "--pdeathsig", "TERM", *command],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                )
            )  # fmt: skip

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        self._client("scancel", "--user=root", "--full")
        with contextlib.suppress(AssertionError):
            self._until(lambda: not self._client("squeue", "--noheader").stdout.strip(), "jobs to end", limit_s=30)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _client(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return subprocess.run(
            command, env={**inherited, "SLURM_CONF": f"{self.folder}/slurm.conf", **environment},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def run(self, *command: str, **environment: str) -> str:
        """What one of Slurm's client programs prints."""
        done = self._client(*command, **environment)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *options_and_script: str, environment: Mapping[str, str] | None = None) -> int:
        """Submit a job; its number."""
        return int(self.run("sbatch", "--parsable", *options_and_script, **(environment or {})))

    def field(self, job: int | str, name: str) -> str:
        """A field of ``scontrol show job``, such as JobState or Restarts; a task of an array is written as 7_2."""
        found = re.search(rf"(?:^|\s){name}=(\S*)", self.run("scontrol", "--oneliner", "show", "job", str(job)))
        assert found is not None, name
        return found[1]

    def state(self, job: int | str) -> str:
        return self.field(job, "JobState")

    def wait(self, job: int | str, *states: str, limit_s: float, log: Path | None = None) -> str:
        """Wait until the job is in one of these states; fails with the end of its output where it is in another final one."""
        final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")
        self._until(
            lambda: self.state(job) in (*states, *final), f"job {job} to be {' or '.join(states)}", limit_s, log
        )
        state = self.state(job)
        assert state in states, f"job {job} is {state}\n{_tail(log)}"
        return state

    def _until(self, reached: Callable[[], bool], what: str, limit_s: float, log: Path | None = None) -> None:
        deadline = time.monotonic() + limit_s
        while not reached():
            dead = [str(daemon.args) for daemon in self._daemons if daemon.poll() is not None]
            assert not dead, f"{dead[0]} has ended\n{_tail(*sorted(self.folder.glob('*.log')))}"
            assert time.monotonic() < deadline, (
                f"waited {limit_s:.0f} s for {what}\n{_tail(log)}\n{self._client('squeue', '--long').stdout}"
                f"{_tail(self.folder / 'slurmctld.log')}"
            )
            time.sleep(_POLL_S)


def _tail(*files: Path | None, characters: int = 3000) -> str:
    return "\n".join(file.read_text(errors="replace")[-characters:] for file in files if file and file.exists())


@contextlib.contextmanager
def started(*, nodes: int, tell_scripts: bool = True) -> Iterator[Cluster]:
    """A cluster of this many nodes with the partitions main and urgent, whose jobs preempt main's.

    ``tell_scripts``: a preempted job's script gets the signal that it asked for; without, ranks get TERM and it nothing.
    """
    # Short, as the path of a socket has to be.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    cluster = Cluster(folder, nodes, tell_scripts)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
