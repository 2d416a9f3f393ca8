"""How a training ends that does not end well: who speaks, and in which words.

The first rank that fails has the cause, and leaves it in the job's store; the others only lose a peer, within
milliseconds. They say so in one line, and what the first one left in another, and wait a moment, so that a launcher
ends them before their errors cover the first one. What is nobody's bug (an interrupt, a full disk, a checkpoint that
cannot be read) is one line, too. Used by the wrappers of Megatron's own functions in ``startup`` and
``checkpoint_hooks``.
"""

from __future__ import annotations

import contextlib
import pickle  # nosec B403: for its exception alone
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from hotspa_megatron.hooks.checkpoint import last_finished
from hotspa_megatron.runtime.watchdog import FAILED_FIRST, Progress, Store, failed_first, launcher_holds_store

_Found = TypeVar("_Found")

INTERRUPTED: Final = 130
"""Exit code after SIGINT, as shells have it."""
_YIELD_S: Final = 3.0
"""How long a rank that lost another stays, so that a launcher ends it before its error covers the first one."""
_HOLD_S: Final = 8.0
"""The same for a rank that holds the job's store, which others ask, or a watchdog's beat hears: some notice the loss late."""
_STORE_S: Final = 2.0
_SHOWN: Final = 300
_OF_A_PEER: Final = re.compile(
    r"gloo/transport|Connection (closed|reset) by (remote )?peer|Broken pipe|Timed out waiting|Socket Timeout|"
    r"ncclRemoteError|NCCL communicator was aborted|Watchdog caught collective operation timeout|"
    r"Application timeout caused pair closure"
)
_OF_A_FILE: Final = re.compile(
    r"PytorchStream(Reader|Writer)|central directory|unexpected pos|storage has wrong byte size|Worker failure.*OSError"
)
"""What torch says of files that are cut short or corrupt, and Megatron of a process that writes one."""


@contextlib.contextmanager
def told(
    progress: Callable[[], Progress | None],
    say: Callable[[str], None],
    *,
    rank: int,
    connection: Callable[[], Callable[[], Store] | None],
    heard: Callable[[], str | None],
) -> Iterator[None]:
    """Around a whole job: say where it was when it was interrupted or lost a peer. Every other error passes as it is.

    ``progress`` gives None where the job is not ours; ``connection``, how to reach the job's store, None where there is none;
    ``heard``, what that said of a rank that failed while it still answered.
    """
    try:
        yield
    except KeyboardInterrupt:
        found = progress()
        if found is None:
            raise
        say(f"interrupted at {found.now[0]}")
        raise SystemExit(INTERRUPTED) from None
    except BaseException as error:  # torch's own for checkpoints is no Exception
        found, lost = progress(), peer_lost(error)
        if found is not None and lost is None and (cause := _own(error)):
            _in_store(
                connection(),
                lambda store: store.compare_set(FAILED_FIRST, "", f"rank {rank} at {found.now[0]}: {cause}"),
            )
        if found is not None and lost is not None:
            say(f"lost another rank at {found.now[0]}: {lost}")
            # Then, as a launcher may leave no time for it.
            first = _in_store(connection(), failed_first) or heard()
            if first:
                say(f"the first to fail: {first}")
            time.sleep(_YIELD_S if rank or launcher_holds_store() else _HOLD_S)
        raise


def _own(error: BaseException) -> str | None:
    """An error of this rank's in one line; None where it ends as it should."""
    if isinstance(error, SystemExit):
        # ``refuse`` has said why; Megatron ends all ranks so, each for itself.
        return None if error.__cause__ is None else _first_line(error.__cause__)
    return f"{type(error).__name__}: {_first_line(error)}"


def _in_store(connect: Callable[[], Store] | None, do: Callable[[Store], _Found]) -> _Found | None:
    """What ``do`` finds in the job's store; None where that does not answer soon: its owner may be what has failed."""
    found: list[_Found] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            if connect is not None:
                found.append(do(connect()))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_STORE_S)
    return found[0] if found else None


def peer_lost(error: BaseException) -> str | None:
    """The first line of an error that only says that another rank is gone or does not answer; None for others."""
    for _, each in _behind(error):
        # A backend's error may as well have its cause on this rank: a CUDA error, or a network card that fails.
        if isinstance(each, dist.DistNetworkError):
            return _first_line(each)
        if isinstance(each, RuntimeError) and _OF_A_PEER.search(str(each)):
            return _first_line(each)
    return None


def cause_in_files(error: BaseException, *, reading: bool) -> str | None:
    """What a file system or a file's content has to do with a failed save or load, in one line; None for nothing."""
    for where, each in _behind(error):
        if reading:
            where = ""  # each rank reads by itself, and torch calls every one of them rank 0 then
        if isinstance(each, ConnectionError) or (isinstance(each, EOFError) and not reading):
            continue  # of a process or a socket, not of a file
        if isinstance(each, OSError) and each.errno is not None:
            return f"{where}{each.strerror}{f' ({each.filename})' if each.filename else ''}"
        if isinstance(each, CheckpointException):  # whose text is that of all it packs
            if not each.failures:
                return "another rank could not do its part"
        elif isinstance(each, (EOFError, pickle.UnpicklingError)) or _OF_A_FILE.search(str(each)):
            return f"{where}{_first_line(each)}"
    return None


def _behind(error: BaseException) -> Iterator[tuple[str, BaseException]]:
    """An error and what caused it, with the rank that it is said to be of.

    torch packs the errors of ranks in a checkpoint's collectives into one, and raises that on all of them.
    """
    if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
        return
    queue: list[tuple[str, BaseException | None]] = [("", error)]
    seen: set[int] = set()
    while queue:
        where, each = queue.pop(0)
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield where, each
        queue += [(f"rank {rank}: ", failure[0]) for rank, failure in sorted(getattr(each, "failures", {}).items())]
        queue.append((where, each.__cause__))


def state_of(folder: str) -> str:
    """The room in a --save folder, and which of its checkpoints counts, for a message."""
    try:
        free = f"{shutil.disk_usage(folder).free >> 20:,} MiB are free there; "
    except OSError:
        free = ""
    tracker = Path(folder) / "latest_checkpointed_iteration.txt"
    try:
        number = last_finished(tracker) or int(tracker.read_text())
    except (OSError, ValueError):
        return f"{free}{folder} holds no whole one"
    return f"{free}the last whole one in {folder} is that of iteration {number}"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:_SHOWN] if lines else type(error).__name__
