"""Faults at named points of a step: a rank is killed, stopped, slowed, or fails there.

A point is a place that a rank itself says it comes to (``runtime/watchdog.py``); the fault strikes on arriving. Nothing here
checks anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.runtime.watchdog import Place, Progress

POINTS = (
    "planning", "waiting", "switch", "switch chunk", "activation", "forward", "backward", "reduction", "fold", "fold chunk",
    "optimizer", "save",
)  # fmt: skip
Kind = Literal["kill", "stop", "raise", "slow", "terminate", "interrupt", "fill"]


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to ``rank`` (None: to all) when it comes to ``point`` for the first time in the ``step``-th step of its
    process, counted from 1, or in a later one; ``seconds``: of slow ones; ``disk``: a folder whose file system is filled."""

    kind: Kind
    rank: int | None
    point: str
    step: int
    seconds: float = 0.3
    disk: Path | None = None

    @property
    def message(self) -> str:
        """What a rank that fails says."""
        return f"planted at {self.point} in step {self.step} on rank {self.rank}"


def point_of(place: Place) -> str:
    """A place's name among ``POINTS``."""
    inner = place.inner.rpartition(" ")[0]
    if inner == "chunk":
        return f"{place.phase} chunk"
    return inner or place.phase


def plant(faults: Sequence[Fault], struck: Path, *, end: bool, backend_s: float | None = None) -> None:
    """Have the faults of this rank strike in this process; each leaves a file in ``struck``, named by its number.

    ``end``: have a process that fails end, as it would outside of tests, where a rank of ``run_ranks`` reports and stays.
    ``backend_s``: the backend's time-out, which Megatron takes in whole minutes only.
    """
    rank, left, steps = int(os.environ["RANK"]), list(faults), 0
    go = Progress.go

    def went(progress: Progress, place: Place) -> None:
        nonlocal steps
        go(progress, place)
        steps += place.number == 0
        for fault in list(left):
            if fault.rank in (rank, None) and fault.step <= steps and fault.point == point_of(place):
                left.remove(fault)
                (struck / f"{faults.index(fault)}").touch()
                _strike(fault)

    patches = Patches()
    patches.set(Progress, "go", went)
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
        os.kill(os.getpid(), signal.SIGINT)
    else:
        sent = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}[fault.kind]
        os.kill(os.getpid(), sent)


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


def _shorten(patches: Patches, backend_s: float) -> None:
    from megatron.training import get_args, initialize

    def with_time_out(original: Callable[..., Any]) -> Callable[..., Any]:
        def initialize_distributed(*positional: Any, **options: Any) -> Any:
            get_args().distributed_timeout_minutes = backend_s / 60
            return original(*positional, **options)

        return initialize_distributed

    patches.wrap(initialize, "_initialize_distributed", with_time_out)
