"""A command of somebody's, in a session of its own: started, and ended with all that it has started.

Ranks are in sessions of their own, too, so that no signal to a group reaches all; what descends from the command is read
off /proc. Used by ``verify``, which decides when.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

POLL_S: Final = 0.2
_DYING_S: Final = 2.0
"""Seconds of a grace for what had to be killed: its devices are free when it is gone."""


class Signals:
    """Notes the signals that would end this process, for as long as it has a command running, and raises when asked.

    A command has a session of its own: it would go on without us, and keep its devices.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self.answer()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen.append(number)

    def answer(self) -> None:
        """End this process as the first of them would have, where there was one."""
        if self.seen:
            number, self.seen = self.seen[0], []
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            print(f"hotspa: ended by {signal.Signals(number).name}, and the command with it", file=sys.stderr)
            raise SystemExit(128 + number)

    @property
    def impatient(self) -> bool:
        """Whether Ctrl-C was pressed again. Other signals come twice by themselves: ``timeout`` sends its own so."""
        return self.seen.count(signal.SIGINT) > 1


def start(command: Sequence[str], environment: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
    """Start a command that writes to ``output``, after a line that says what it is. OSError where that cannot be."""
    with output.open("wb") as log:
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        return subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip


def end(process: subprocess.Popen[bytes], signals: Signals, *, grace_s: float) -> None:
    """End a command with all that it has started: asked first, and killed after the grace.

    A launcher that is killed does not end its ranks.
    """
    known = _living({process.pid: None})
    over = time.monotonic() + grace_s
    patient = over - min(_DYING_S, grace_s / 2)
    _send(known, signal.SIGTERM)
    while (known := _living(known)) and time.monotonic() < patient and not signals.impatient:
        time.sleep(POLL_S)
    _send(known, signal.SIGKILL)
    process.wait()
    while (known := _living(known)) and time.monotonic() < over:
        time.sleep(POLL_S)


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            os.kill(pid, number)


def _living(known: Mapping[int, str | None]) -> dict[int, str | None]:
    """Those of these processes that still run, and all that descend from them; each with when it started.

    By that a number that another process has got meanwhile is told apart; None where it is not known yet.
    """
    parents: dict[int, int] = {}
    began: dict[int, str] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                # After the name, which may hold anything: state and parent; the 20th is when it started.
                stat = Path("/proc", name, "stat").read_text(errors="replace").rpartition(")")[2].split()
                if stat[0] != "Z":
                    parents[int(name)], began[int(name)] = int(stat[1]), stat[19]
    found = {pid for pid, start in known.items() if pid in began and start in (None, began[pid])}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {pid: began[pid] for pid in sorted(found)}
