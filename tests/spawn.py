"""Runs a function on several real ranks (processes, gloo, CPU) and returns what each one returned.

The one way in which the suite starts ranks. Ranks are forked from a server that has torch imported already, so that
starting four of them costs tenths of a second; rendezvous goes through a file, so that parallel test runs cannot
collide on a port. The first failing rank ends all of them, and the error shows every rank's traceback.

What takes seconds to import, and changes a process for good (Megatron on the CPU stand-in), goes into a server of its
own: ``prepare`` runs there once, and its ranks are forked from it.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkProcess, ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any, NoReturn

REPOSITORY = Path(__file__).resolve().parent.parent
PRELOAD_VARIABLE = "HOTSPA_TEST_PRELOAD"
"""Environment variable: more modules, separated by commas, that the server imports before it forks the first rank."""

GRACE_SECONDS = 2.0
"""How long the other ranks may take to report after the first failure: their tracebacks often name the real cause."""
DUMP_SECONDS = 0.5
LOG_TAIL = 20_000
"""Characters of a rank's output that are shown: a chain of errors out of Megatron takes a half of that."""


@dataclass
class _Rank:
    process: ForkServerProcess | ForkProcess
    connection: Connection
    folder: Path
    reported: bool = False
    value: Any = None
    failure: str | None = None
    log: Path = field(init=False)
    stack: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "log.txt"
        self.stack = self.folder / "stack.txt"

    @property
    def pending(self) -> bool:
        return not self.reported and self.failure is None

    def read_report(self) -> None:
        """Take the rank's report; an end of file is a rank that died without one."""
        try:
            succeeded, payload = self.connection.recv()
        except (EOFError, OSError):
            self.process.join(5)
            self.failure = f"died without a traceback, exit code {self.process.exitcode}"
            return
        except Exception:  # a return value that pickles but does not unpickle is the test's fault: name it
            self.failure = "its return value could not be unpickled\n" + traceback.format_exc()
            return
        if succeeded:
            self.reported, self.value = True, payload
        else:
            self.failure = payload


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    init_process_group: bool = True,
    env: Mapping[str, str] | None = None,
    prepare: Callable[[], None] | None = None,
    grace: float = GRACE_SECONDS,
) -> list[Any]:
    """Run ``fn(rank, world_size, *args)`` on ``world_size`` processes and return their results in rank order.

    ``fn`` is a module-level function; ``args`` and results are pickled. Every rank sees RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (a port that is kept for them) and ``env``, has one thread, and, with
    ``init_process_group``, a gloo default group. ``timeout`` is in seconds and covers everything but ``prepare``, a
    module-level function that has run, once for all calls that name it, in the process that the ranks are forked from.
    ``grace``: seconds that the others may take to end by themselves after the first failure.

    Raises AssertionError with every rank's traceback (of ranks that hang: where they are) and the tail of its output
    as soon as one rank fails, or at the timeout. No rank is left running in any case.
    """
    call = _Call(fn, world_size, args, timeout, init_process_group, env, grace)
    if prepare is None:
        return _run(_context(), call)
    if prepare not in _servers:
        _servers[prepare] = _Server(prepare)
    return _servers[prepare].run(call)


@dataclass(frozen=True)
class _Call:
    """One call of ``run_ranks``, as it travels to a server."""

    fn: Callable[..., Any]
    world_size: int
    args: tuple[Any, ...]
    timeout: float
    init_process_group: bool
    env: Mapping[str, str] | None
    grace: float


class _Server:
    """A process in which ``prepare`` has run; it forks the ranks of one call after the other.

    It ends with the test process: its connection closes then, whatever happened.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        context = _context()
        self._prepare = prepare
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(prepare, theirs), name=prepare.__name__)
        self._process.start()
        theirs.close()
        # Registered after multiprocessing's own exit handler, which would wait for the server, and so run before it.
        atexit.register(self.end)

    def run(self, call: _Call) -> list[Any]:
        try:
            self._connection.send(call)
            succeeded, payload = self._connection.recv()
        except BaseException:
            # A call that was left (an interrupt, a test's time limit) still runs there; the next one needs a new server.
            self.end()
            raise
        if not succeeded:
            raise AssertionError(payload)
        return list(payload)

    def end(self) -> None:
        atexit.unregister(self.end)
        _servers.pop(self._prepare, None)
        self._process.terminate()
        self._process.join(GRACE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()


_servers: dict[Callable[[], None], _Server] = {}


def _serve(prepare: Callable[[], None], connection: Connection) -> None:
    """Body of a server's process."""

    def leave(*_: object) -> NoReturn:
        raise SystemExit  # through the handlers that end the ranks

    signal.signal(signal.SIGTERM, leave)
    failure = None
    try:
        prepare()
    except Exception:
        failure = f"{prepare.__name__} failed\n{traceback.format_exc()}"
    with suppress(EOFError, BrokenPipeError):
        while True:
            call = connection.recv()
            try:
                answer = (True, _run(get_context("fork"), call)) if failure is None else (False, failure)
            except AssertionError as error:
                answer = (False, str(error))
            except Exception:
                answer = (False, traceback.format_exc())
            connection.send(answer)


def _run(context: ForkServerContext | ForkContext, call: _Call) -> list[Any]:
    deadline = time.monotonic() + call.timeout
    with tempfile.TemporaryDirectory(prefix="ranks-") as name, _reserved_port() as port:
        shared = _shared_environment(call.world_size, port, call.env)
        ranks: list[_Rank] = []
        try:
            for rank in range(call.world_size):
                folder = Path(name) / str(rank)
                folder.mkdir()
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(call, rank, theirs, name, shared),
                    name=f"rank {rank}",
                )
                process.start()
                theirs.close()
                ranks.append(_Rank(process, ours, folder))
            _collect(ranks, deadline, call.grace)
            if any(rank.pending or rank.failure for rank in ranks):
                raise AssertionError(_describe(ranks, call.fn, call.timeout))
            return [rank.value for rank in ranks]
        finally:
            _end(ranks)


def _context() -> ForkServerContext:
    """The context whose fork server has torch (and what the environment asks for) imported."""
    context = get_context("forkserver")
    extra = [name for name in os.environ.get(PRELOAD_VARIABLE, "").split(",") if name]
    context.set_forkserver_preload(["__main__", "numpy", "torch", "torch.distributed", *extra])
    # The server starts once per test process; it does not get our sys.path before Python 3.14, hence PYTHONPATH.
    before = {key: os.environ.get(key) for key in ("PYTHONPATH", "OMP_NUM_THREADS")}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), before["PYTHONPATH"]]))
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        ensure_running()
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
    return context


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A port that nobody is given who asks for any port, while torch's store, which asks for this one, can have it."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield int(bound.getsockname()[1])


def _shared_environment(world_size: int, port: int, env: Mapping[str, str] | None) -> dict[str, str]:
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve must not fail the tests
    return shared | dict(env or {})


def _collect(ranks: list[_Rank], deadline: float, grace: float) -> None:
    """Read reports until all are in, one failed (plus a grace period), or the deadline has passed.

    Of ranks that are stopped, which end by nothing but a signal, no report is waited for once another has failed.
    """
    failed = False
    while pending := {rank.connection: rank for rank in ranks if rank.pending}:
        left = deadline - time.monotonic()
        ready = wait(list(pending), timeout=max(0.0, min(left, 0.5) if failed else left))
        if not ready and (left <= 0 or not failed or all(map(_stopped, pending.values()))):
            return
        for connection in ready:
            assert isinstance(connection, Connection)
            pending[connection].read_report()
        if not failed and any(rank.failure for rank in ranks):
            failed = True
            deadline = min(deadline, time.monotonic() + grace)


def _stopped(rank: _Rank) -> bool:
    return rank.process.pid is not None and process_state(rank.process.pid) == "T"


def process_state(pid: int) -> str | None:
    """The letter that Linux has for a process's state; None for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def _describe(ranks: list[_Rank], fn: Callable[..., Any], timeout: float) -> str:
    """One message with every rank's end; ranks that hang are asked for their stacks first."""
    pending = [rank for rank in ranks if rank.pending]
    for rank in pending:
        with suppress(ProcessLookupError):
            if rank.process.pid is not None and rank.stack.exists():
                os.kill(rank.process.pid, signal.SIGUSR1)
    if pending:
        time.sleep(DUMP_SECONDS)
    failures = [index for index, rank in enumerate(ranks) if rank.failure]
    reason = f"failed on ranks {failures}" if failures else f"did not finish within {timeout:g} s"
    lines = [f"{fn.__module__}.{fn.__qualname__} {reason}"]
    for index, rank in enumerate(ranks):
        lines.append(f"---- rank {index} of {len(ranks)} ----")
        if rank.failure:
            lines.append(rank.failure.rstrip())
        elif rank.pending:
            stack = rank.stack.read_text(errors="replace").strip() if rank.stack.exists() else ""
            lines.append("still running, in:\n" + stack if stack else "still running, before its function was called")
        else:
            lines.append("finished")
        output = rank.log.read_text(errors="replace").strip() if rank.log.exists() else ""
        if output:
            lines.append("output:\n" + output[-LOG_TAIL:])
    return "\n".join(lines)


def _end(ranks: list[_Rank]) -> None:
    """Let ranks that reported leave by themselves and kill the others, both with whatever they started."""
    for rank in ranks:
        if rank.reported:
            with suppress(OSError):
                rank.connection.send(None)
        elif rank.process.pid is not None:
            _kill(rank.process.pid)
    for rank in ranks:
        rank.process.join(5 if rank.reported else None)
        if rank.process.pid is not None:
            # A rank that left skips Python's own exit, in which helpers (of a checkpoint's writer) would be ended.
            _kill(rank.process.pid)
        rank.process.join()
        rank.connection.close()
        rank.process.close()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # the rank leads its own process group as soon as its main function runs
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _rank_main(call: _Call, rank: int, connection: Connection, folder: str, shared: dict[str, str]) -> None:
    """Body of one rank's process."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a server's handler came along
    own = Path(folder) / str(rank)
    with (own / "stack.txt").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        # If the test process is killed nobody ends us: end ourselves.
        faulthandler.dump_traceback_later(call.timeout + 10, exit=True, file=stack)
        # Under pytest the inherited descriptors are some other test's capture file.
        log = os.open(own / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(shared, RANK=str(rank), LOCAL_RANK=str(rank))
        try:
            value = _value_of(call, rank, Path(folder))
            connection.send((True, value))
        except BaseException:  # SystemExit and pytest's Failed count as failures of the rank, too
            sys.stdout.flush()
            connection.send((False, traceback.format_exc()))
        sys.stdout.flush()
        with suppress(EOFError, OSError):
            # A rank that is done waits for the others: gloo peers that leave early look like a fault to them.
            connection.recv()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGUSR1)
        # Groups and threads of the rank need no teardown, and a teardown could hang.
        os._exit(0)


def _value_of(call: _Call, rank: int, folder: Path) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if call.init_process_group:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=call.world_size,
            timeout=timedelta(seconds=call.timeout),
        )
    return call.fn(rank, call.world_size, *call.args)
