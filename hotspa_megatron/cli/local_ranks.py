"""Starts the ranks of one or several jobs and speaks to them: all on this machine, or under torchrun each process its own.

Commands that measure use it. Ranks report through pipes; the first failure ends all of them with its message. Nothing
here knows what ranks do.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

_LAUNCHERS_OWN: Final = ("TORCHELASTIC_", "GROUP_", "ROLE_")
"""Variables of torchrun's that are about its own ranks."""
_LOG_TAIL: Final = 2000


class RanksFailed(Exception):
    """A rank ended early or said why it could not go on; the message is for the user."""


@dataclass(frozen=True)
class World:
    """Who takes part: ``own`` are the ranks that this process starts; ``first`` whether it speaks for all."""

    size: int
    own: tuple[int, ...]
    local_size: int
    first: bool
    address: str

    @classmethod
    def of(cls, ranks: int | None) -> World:
        """``ranks`` of this machine, or what torchrun says; ``ValueError`` where both say something else, or nobody."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            if ranks is None:
                raise ValueError("--ranks: missing; give the number of ranks, or start this under torchrun")
            return cls(ranks, tuple(range(ranks)), ranks, True, "127.0.0.1")
        size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        if ranks not in (None, size):
            raise ValueError(f"--ranks {ranks}: torchrun has started {size}; leave --ranks out")
        return cls(size, (rank,), int(os.environ["LOCAL_WORLD_SIZE"]), rank == 0, os.environ["MASTER_ADDR"])

    @property
    def alone(self) -> bool:
        """Whether this process has started all ranks."""
        return len(self.own) == self.size


@dataclass
class _Rank:
    process: Any
    connection: Connection
    log: Path


@dataclass
class Ranks:
    """The ranks of one job that this process started. They run ``fn(connection, *args)``, from ``begin`` on."""

    name: str
    ranks: list[_Rank] = field(default_factory=list)

    def send(self, message: Any) -> None:
        for rank in self.ranks:
            try:
                rank.connection.send(message)
            except OSError:
                self._fail(rank)

    def receive(self, *, limit_s: float) -> list[Any]:
        """One message of each, in rank order; ``RanksFailed`` where one failed or none came in time."""
        deadline = time.monotonic() + limit_s
        found: dict[int, Any] = {}
        while len(found) < len(self.ranks):
            missing = [index for index in range(len(self.ranks)) if index not in found]
            ready = wait([self.ranks[i].connection for i in missing], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RanksFailed(
                    f"{self.name}: no answer within {limit_s:.0f} s\n{self._tail(self.ranks[missing[0]])}"
                )
            for index in missing:
                if self.ranks[index].connection in ready:
                    found[index] = self._read(self.ranks[index])
        return [found[index] for index in range(len(self.ranks))]

    def _read(self, rank: _Rank) -> Any:
        try:
            succeeded, message = rank.connection.recv()
        except (EOFError, OSError):
            self._fail(rank)
        if not succeeded:
            raise RanksFailed(f"{self.name}: {message}\n{self._tail(rank)}")
        return message

    def _fail(self, rank: _Rank) -> Any:
        rank.process.join(5)
        raise RanksFailed(f"{self.name}: a rank ended with code {rank.process.exitcode}\n{self._tail(rank)}")

    def _tail(self, rank: _Rank) -> str:
        text = rank.log.read_text(errors="replace") if rank.log.exists() else ""
        return text[-_LOG_TAIL:].strip()


class Jobs:
    """Starts jobs and, on leaving, ends whatever is left of them.

    ``prepare`` runs once here before ranks are forked, or in each rank where they cannot be (CUDA).
    """

    def __init__(self, world: World, prepare: Callable[[], None]) -> None:
        self.world, self._prepare = world, prepare
        self._jobs: list[Ranks] = []
        self._folder = tempfile.TemporaryDirectory(prefix="hotspa-ranks-")
        self._group: Any = None
        fork = not _cuda_devices()
        self._context = multiprocessing.get_context("fork" if fork else "spawn")
        if fork:
            prepare()
        self._prepared = fork

    def start(self, name: str, fn: Callable[..., None], *args: Any) -> Ranks:
        """Start a job's ranks; they wait for ``begin``. Before the first ``begin``, since what runs is not forked."""
        job = Ranks(name)
        for local, rank in enumerate(self.world.own):
            ours, theirs = self._context.Pipe()
            log = Path(self._folder.name) / f"{name}-{rank}.log"
            local_rank = local if self.world.alone else int(os.environ["LOCAL_RANK"])
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.world.size),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(self.world.local_size),
                "MASTER_ADDR": self.world.address,
            }
            prepare = None if self._prepared else self._prepare
            process: Any = self._context.Process(  # type: ignore[attr-defined]
                target=_rank_main,
                args=(theirs, log, environment, prepare, fn, args),
                name=f"{name} {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            job.ranks.append(_Rank(process, ours, log))
        self._jobs.append(job)
        return job

    def begin(self, jobs: Sequence[Ranks]) -> None:
        """Give each job a port and let its ranks run."""
        for job in jobs:
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
            job.send(self.agree(port))

    def agree(self, value: Any) -> Any:
        """The first process's value, for all."""
        return self.gather(value)[0]

    def gather(self, value: Any) -> list[Any]:
        """Every process's value; a process alone has its own."""
        if self.world.alone:
            return [value]
        import torch.distributed as dist

        if self._group is None:
            dist.init_process_group("gloo")
            self._group = dist.group.WORLD
        gathered: list[Any] = [None] * self.world.size
        dist.all_gather_object(gathered, value)
        return gathered

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs:
            for rank in job.ranks:
                rank.process.terminate()
        for job in self._jobs:
            for rank in job.ranks:
                rank.process.join(5)
                if rank.process.is_alive():
                    rank.process.kill()
                    rank.process.join()
                rank.connection.close()
        self._folder.cleanup()


def _cuda_devices() -> bool:
    """Whether there is a CUDA device, without making this process a user of it: it could not fork then."""
    import torch

    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.is_available()


class _Channel:
    """A rank's end of its pipe: what it sends is marked as no failure."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: Any) -> None:
        self._connection.send((True, message))

    def recv(self) -> Any:
        return self._connection.recv()


def _end_with_parent() -> None:
    """Have Linux end this process with the one that started it, however that ends."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _rank_main(
    connection: Connection,
    log: Path,
    environment: Mapping[str, str],
    prepare: Callable[[], None] | None,
    fn: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    """Body of a rank's process."""
    _end_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS_OWN)]:
        del os.environ[name]
    os.environ.update(environment)
    code = 0
    try:
        port = connection.recv()
        os.environ["MASTER_PORT"] = str(port)
        import torch

        if prepare is not None:
            prepare()
        else:
            # On CPU: ranks share the cores, and those of one machine need no host name that resolves.
            torch.set_num_threads(1)
            if environment["MASTER_ADDR"] == "127.0.0.1":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        fn(_Channel(connection), *args)
    except BaseException as error:
        code = 1
        traceback.print_exc()
        with contextlib.suppress(OSError):
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            connection.send((False, said.splitlines()[0]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Groups and their threads need no teardown, and a teardown could hang.
    os._exit(code)
