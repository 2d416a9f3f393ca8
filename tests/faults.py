"""Faults at named points of a step: a rank is killed, stopped, slowed, or fails there.

A point is a place that a rank itself says it comes to (``runtime/watchdog.py``); the fault strikes on arriving. Nothing here
checks anything.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.runtime.transport import Pace
from hotspa_megatron.runtime.watchdog import Place, Progress, Watchdog

CHUNKS: Final = 3
"""Batches of messages of a switch that sends any, at ``PACE``, on every rank; a fold has one."""
PACE: Final = Pace(piece=1 << 16, direct=1 << 14, buffer=3 << 15, on_stream=False)
"""What the transport is fed with where faults are planted: gloo's own would move these small models in one batch."""
SAVED, TRACKER = "shards saved", "tracker opened"
"""Points within a save. At ``TRACKER``, which rank 0 alone comes to, the file that names the last one is open and empty."""
POINTS: Final = (
    "planning", "waiting", "switch", *(f"switch chunk {number + 1}" for number in range(CHUNKS)), "activation", "forward",
    "backward", "reduction", "fold", "fold chunk 1", "optimizer", "save", SAVED, TRACKER,
)  # fmt: skip
Kind = Literal["kill", "stop", "raise", "slow", "terminate", "interrupt", "fill"]


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to ``rank`` (None: to all) when it comes to ``point`` for the first time in the ``step``-th step of its
    process, counted from 1, or in a later one.

    ``seconds``: how long a slow one takes, and how much later an interrupt comes. ``disk``: a folder whose file system is
    filled.
    """

    kind: Kind
    rank: int | None
    point: str
    step: int
    seconds: float = 0.0
    disk: Path | None = None

    @property
    def message(self) -> str:
        """What a rank that fails says."""
        return f"planted at {self.point} in step {self.step} on rank {self.rank}"


class Said(NamedTuple):
    """A line of a rank's about a stall or a loss. ``at``: when; ``since``: when it had come to where it was then
    (``time.monotonic``, which all processes share)."""

    at: float
    since: float
    line: str


class Traces:
    """What the ranks of a job with faults leave in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def struck(self, number: int) -> float | None:
        """When the fault of this number struck first (``time.monotonic``); None where it did not."""
        lines = self._lines(f"struck-{number}")
        return float(lines[0]) if lines else None

    def said(self, rank: int) -> list[Said]:
        """What the watchdog found on a rank, and the loss of a peer."""
        return [Said(*json.loads(line)) for line in self._lines(f"said-{rank}")]

    def points(self, rank: int) -> set[str]:
        """All the points that a rank has come to."""
        return set(self._lines(f"points-{rank}"))

    def processes(self) -> list[int]:
        """Ids of the ranks' processes."""
        return [int(line) for file in sorted(self._folder.glob("process-*")) for line in self._lines(file.name)]

    def note(self, name: str, line: str) -> None:
        with (self._folder / name).open("a") as file:
            file.write(f"{line}\n")

    def _lines(self, name: str) -> list[str]:
        file = self._folder / name
        return file.read_text().splitlines() if file.exists() else []


def point_of(place: Place) -> str:
    """A place's name among ``POINTS``."""
    inner = place.inner.rpartition(" ")[0]
    if inner == "chunk":
        return f"{place.phase} {place.inner}"
    return inner or place.phase


def plant(faults: Sequence[Fault], folder: Path, *, end: bool, backend_s: float | None = None) -> None:
    """Have the faults of this rank strike in this process, which leaves ``Traces`` in ``folder``.

    ``end``: have a process that fails end, as it would outside of tests, where a rank of ``run_ranks`` reports and stays.
    ``backend_s``: the backend's time-out, which Megatron takes in whole minutes only.
    """
    rank, left, steps = int(os.environ["RANK"]), list(faults), 0
    traces, points = Traces(folder), set[str]()
    traces.note(f"process-{rank}", str(os.getpid()))
    go = Progress.go

    def went(progress: Progress, place: Place) -> None:
        nonlocal steps
        go(progress, place)
        if place.number == 0 and not place.inner:
            steps += 1
            if steps == 1 and backend_s is not None:
                _give_up_after(backend_s)
        point = point_of(place)
        if point not in points:
            points.add(point)
            traces.note(f"points-{rank}", point)
        for fault in list(left):
            if fault.rank in (rank, None) and fault.step <= steps and fault.point == point:
                left.remove(fault)
                traces.note(f"struck-{faults.index(fault)}", str(time.monotonic()))
                _strike(fault)

    patches = Patches()
    patches.set(Progress, "go", went)
    _go_on_in_chunks(patches)
    _tell_of_two_more_points(patches)
    _note_what_is_said(patches, traces, rank)
    if end:
        _end_as_processes_do(patches)
    if backend_s is not None:
        _shorten(patches, backend_s)


def _strike(fault: Fault) -> None:
    if fault.kind == "slow":
        time.sleep(fault.seconds)
    elif fault.kind == "raise":
        raise ArithmeticError(fault.message)
    elif fault.kind == "fill":
        assert fault.disk is not None
        with contextlib.suppress(OSError), (fault.disk / "filler").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    elif fault.kind == "interrupt":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if fault.seconds:
            later = threading.Timer(fault.seconds, os.kill, (os.getpid(), signal.SIGINT))
            later.daemon = True
            later.start()
        else:
            os.kill(os.getpid(), signal.SIGINT)
    else:
        sent = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}[fault.kind]
        os.kill(os.getpid(), sent)


def _shorten(patches: Patches, backend_s: float) -> None:
    """Make all groups with this time-out. From the first step on it holds for all that ranks do together; until then, as
    some may take longer to start than others, for messages between two ranks alone, whose time-out is fixed."""
    from megatron.training import get_args, initialize

    def with_time_out(original: Callable[..., Any]) -> Callable[..., Any]:
        def initialize_distributed(*positional: Any, **options: Any) -> Any:
            get_args().distributed_timeout_minutes = backend_s / 60
            result = original(*positional, **options)
            _give_up_after(600)
            return result

        return initialize_distributed

    patches.wrap(initialize, "_initialize_distributed", with_time_out)


def _give_up_after(seconds: float) -> None:
    import torch.distributed as dist

    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def _go_on_in_chunks(patches: Patches) -> None:
    from hotspa_megatron.runtime import transport

    patches.set(transport, "GLOO_PACE", PACE)


def _tell_of_two_more_points(patches: Patches) -> None:
    """Have a rank say when its part of a checkpoint is written, and when rank 0 writes which one is the last."""
    from megatron.core import dist_checkpointing

    from hotspa_megatron.hooks.session import current_session

    def inside(point: str) -> None:
        session = current_session()
        if session is not None:
            session.progress.inside(point)

    def saving(original: Callable[..., Any]) -> Callable[..., Any]:
        def save(*positional: Any, **options: Any) -> Any:
            result = original(*positional, **options)
            inside(SAVED)
            return result

        return save

    def opening(original: Callable[..., Any]) -> Callable[..., Any]:
        def open(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            opened = original(file, mode, *rest, **options)
            if "w" in mode and str(file).endswith("latest_checkpointed_iteration.txt"):
                inside(TRACKER)
            return opened

        return open

    patches.wrap(dist_checkpointing, "save", saving)
    patches.wrap(builtins, "open", opening)


def _note_what_is_said(patches: Patches, traces: Traces, rank: int) -> None:
    from hotspa_megatron.hooks import startup
    from hotspa_megatron.hooks.session import current_session

    def note(line: str) -> None:
        session = current_session()
        assert session is not None
        traces.note(f"said-{rank}", json.dumps(Said(time.monotonic(), session.progress.now[1], line)))

    def finding_and_noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def finding(watchdog: Watchdog) -> str | None:
            found: str | None = original(watchdog)
            if found is not None:
                note(found)
            return found

        return finding

    def saying_and_noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def say_here(line: str) -> None:
            original(line)
            note(line)

        return say_here

    patches.wrap(Watchdog, "finding", finding_and_noting)
    patches.wrap(startup, "say_here", saying_and_noting)


def _end_as_processes_do(patches: Patches) -> None:
    """A rank of the tests reports its error and stays; outside, its process ends, and that is all that its peers see."""
    import megatron.training

    def ending(original: Callable[..., Any]) -> Callable[..., Any]:
        def pretrain(*positional: Any, **options: Any) -> Any:
            try:
                return original(*positional, **options)
            except SystemExit as end:
                if not end.code:
                    raise
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

        return pretrain

    patches.wrap(megatron.training, "pretrain", ending)
