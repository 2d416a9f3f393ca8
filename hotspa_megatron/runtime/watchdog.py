"""Names the rank that holds the others up, before the backend's own time-out ends the job.

A rank notes where it is (``Progress``), which costs microseconds. Beside it run two threads (``Watchdog``): one tells the
job's store, over a connection of its own, that the process is alive and where it stands; the other looks whether the rank
gets on, and where it has not for a while says, once per stall, who is behind. They only speak: nothing here ends, holds up
or fails a job. Places are the host's: on CUDA the host runs ahead, and stands still where it waits for the device.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from torch._C._distributed_c10d import PrefixStore, TCPStore

_SAID_BY: Final = 8
"""So many ranks read everybody's beats in a stall: should rank 0 be the one that stands still, another one says so."""
_SHOWN: Final = 4
"""Ranks, or places with ranks, in a message."""
_PER_LIMIT: Final = 30
"""Beats in the time that a stall takes to be named; at most one a second."""
_QUIET: Final = 3
"""Beats that a rank may miss, on a busy machine, before it is taken for a stopped one."""
_STORE_S: Final = 20
FAILED_FIRST: Final = "failed first"
"""The store's key for what the first rank that fails leaves there."""
_LONGEST_PAUSE_S: Final = 60.0
"""Between attempts to reach a store that does not answer."""
_JOIN_S: Final = 2.0
_WAITING_FILES: Final = ("p2p_communication.py", "param_and_grad_buffer.py", "transport.py")
"""Where ranks wait for each other outside of torch.distributed: in Megatron's pipelines and reductions, and in our moves."""


# ------------------------------------------------------------------------------------------------------ where a rank is


@dataclass(frozen=True, slots=True)
class Place:
    """A place of a training loop. ``number``: how many came before in this step, alike on all ranks at one place;
    ``inner``: what is done there, which may differ between ranks; ``peers``: the ranks waited for, where that is known."""

    step: int = 0
    number: int = 0
    phase: str = "start"
    what: str = ""
    segment: str = ""
    inner: str = ""
    peers: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = [f"step {self.step}", f"segment {self.segment}" if self.segment else ""]
        parts += [f"{self.phase} {self.what}".rstrip() if self.phase else "", self.inner]
        return ", ".join(filter(None, parts))


class Progress:
    """Where this rank is. Written by the training loop alone, read by anybody."""

    def __init__(self) -> None:
        self._now = (Place(), time.monotonic())
        self._counts: dict[str, int] = {}

    @property
    def now(self) -> tuple[Place, float]:
        """The place, and since when (``time.monotonic``)."""
        return self._now

    def step(self, number: int) -> None:
        """A step begins."""
        self._counts.clear()
        self.go(Place(step=number, phase="planning"))

    def at(self, phase: str, what: str = "", *, segment: str = "") -> None:
        """The next place, which every rank comes to."""
        self._counts.clear()
        now = self._now[0]
        self.go(Place(step=now.step, number=now.number + 1, phase=phase, what=what, segment=segment))

    def inside(self, what: str, peers: Iterable[int] = ()) -> None:
        """The next thing that is done at this place, counted from 1 by its name."""
        count = self._counts[what] = self._counts.get(what, 0) + 1
        self.go(dataclasses.replace(self._now[0], inner=f"{what} {count}", peers=tuple(peers)))

    def go(self, place: Place) -> None:
        """The one way to another place."""
        self._now = (place, time.monotonic())


# --------------------------------------------------------------------------------------------------- what a rank tells


class Beat(NamedTuple):
    """What a rank says of itself. ``code``: the line that it stands in, where it has stood for a while; ``waits``: whether
    that line waits for other ranks."""

    beats: int
    step: int
    number: int
    place: str
    peers: tuple[int, ...]
    code: str
    waits: bool

    @property
    def at(self) -> tuple[int, int]:
        """Larger is further on."""
        return self.step, self.number


def judge(latest: Mapping[int, Beat | None], quiet: Collection[int]) -> str:
    """Who holds the others up, in one line, from what every rank said last; those in ``quiet`` say nothing any more.

    A quiet rank, or one that never spoke, is behind, whatever its place. Else it is the one that is at the earliest place, or
    of several there the one that waits for nobody.
    """
    silent = [rank for rank, beat in sorted(latest.items()) if beat is None or rank in quiet]
    beating = {rank: beat for rank, beat in sorted(latest.items()) if beat is not None and rank not in silent}
    behind = silent or _last_of(beating, len(latest))
    parts = [_described(rank, latest[rank], silent=bool(silent)) for rank in behind[:_SHOWN]]
    if len(behind) > _SHOWN:
        parts.append(f"{len(behind) - _SHOWN} more ranks are behind")
    others: dict[str, list[int]] = {}
    for rank, beat in beating.items():
        if rank not in behind:
            peers = f", waiting for {_ranks(beat.peers)}" if beat.peers else ""
            code = "" if beat.waits or not beat.code else f", in {beat.code}"
            others.setdefault(f"{beat.place}{peers}{code}", []).append(rank)
    if not behind:
        parts.append("no rank is behind the others, and all processes beat")
    groups = sorted(others.items(), key=lambda group: (-len(group[1]), group[1]))
    parts += [f"{_ranks(ranks)} at {place}" for place, ranks in groups[:_SHOWN]]
    if len(groups) > _SHOWN:
        parts.append(f"{sum(len(ranks) for _, ranks in groups[_SHOWN:])} more ranks elsewhere")
    return "; ".join(parts)


def _last_of(beating: Mapping[int, Beat], world: int) -> list[int]:
    if not beating:
        return []
    earliest = min(beat.at for beat in beating.values())
    last = [rank for rank, beat in beating.items() if beat.at == earliest]
    busy = [rank for rank in last if not beating[rank].waits]
    found = busy or last
    return found if len(found) < world else []


def _described(rank: int, beat: Beat | None, *, silent: bool) -> str:
    if beat is None:
        return f"rank {rank} is behind: it has not come to its first step"
    if silent:
        return (
            f"rank {rank} is behind: last seen at {beat.place}, and its process does not beat any more (stopped, gone, or "
            "kept from running Python)"
        )
    code = f", in {beat.code}" if beat.code else ""
    return f"rank {rank} is behind: at {beat.place}{code}; its process beats"


def _ranks(ranks: Iterable[int]) -> str:
    """Ranks as a message shows them, runs of them drawn together."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs[: 2 * _SHOWN]]
    alone = len(runs) == 1 and runs[0][0] == runs[0][1]
    return f"rank{'' if alone else 's'} {', '.join(shown)}{', ...' if len(runs) > 2 * _SHOWN else ''}"


def _line_of(thread: int | None) -> tuple[str, bool]:
    """The line of code that a thread stands in, and whether it waits for other ranks there."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return "", False
    path, line, name = Path(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name
    waits = path.name in _WAITING_FILES or path.parts[-3:-1] == ("torch", "distributed")
    return f"{path.parent.name}/{path.name}:{line} ({name})", waits


# --------------------------------------------------------------------------------------------------------- the watchdog


class Store(Protocol):
    """What is needed of a torch.distributed store."""

    def set(self, key: str, value: str, /) -> Any: ...

    def check(self, keys: list[str], /) -> bool: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class _Heard(NamedTuple):
    """What the others have said during a stall. ``since``: which stall; ``begun``, ``now``: when it was first and last asked
    for; ``new``: when each one's last words were new; ``verdicts``: how many rank 0 had spoken at first; ``verdict``: one
    that it has spoken since."""

    since: float
    begun: float
    now: float
    latest: dict[int, Beat | None]
    new: dict[int, float]
    verdicts: int
    verdict: str | None

    def quiet(self, seconds: float) -> set[int]:
        """Ranks that have said nothing new for so long: one may stop in the midst of a stall."""
        return {rank for rank, new in self.new.items() if self.now - new >= seconds}


class Watchdog:
    """Watches one rank's progress and says, once per stall of ``seconds``, which rank holds it up.

    ``connect`` gives the job's store, over a connection that nobody else uses; None where there is none, and then only this
    rank's own place is known. ``say`` gets one line at a time, from a thread. Make, start and stop it in the thread that
    ``progress`` belongs to.
    """

    def __init__(
        self,
        progress: Progress,
        *,
        rank: int,
        world_size: int,
        seconds: float,
        connect: Callable[[], Store] | None,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._progress, self._rank, self._world, self._seconds = progress, rank, world_size, seconds
        self._connect, self._say, self._clock = connect, say, clock
        self._watched = threading.current_thread().ident
        self.interval: Final = max(1.0, seconds / _PER_LIMIT)
        self.failed_first: str | None = None
        """What the store said of a rank that failed: it may be gone by the time that this rank notices."""
        self._beats = 0
        self._heard: _Heard | None = None
        self._lost = connect is None
        self._named = math.nan
        self._looked = self._awake = clock()
        self._verdicts = 0
        self._outbox: str | None = None
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to beat and to look."""
        for body in (self._beat, self._look):
            thread = threading.Thread(target=body, name=f"hotspa-watchdog{body.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """End both threads. One that hangs in a store that does not answer is left alone after a moment."""
        self._ended.set()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _beat(self) -> None:
        pause = self.interval
        while self._connect is not None and not self._ended.is_set():
            try:
                store = self._connect()
                while not self._ended.is_set():
                    self.exchange(store)
                    self._lost, pause = False, self.interval
                    self._ended.wait(self.interval)
            except Exception:  # whatever the store does, a training goes on without it
                self._lost = True
                # Its owner may only have stood still: ranks that never beat again would be taken for stopped ones.
                self._ended.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _look(self) -> None:
        while not self._ended.wait(self.interval):
            finding = self.finding()
            if finding is not None and not self._ended.is_set():
                self._say(finding)

    def exchange(self, store: Store) -> None:
        """Tell the store where this rank is; hear who failed and, in a stall, what it knows of the others."""
        self._beats += 1
        place, since = self._progress.now
        still = self._clock() - since
        code, waits = _line_of(self._watched) if still >= self._seconds / 2 else ("", False)
        beat = Beat(self._beats, place.step, place.number, str(place), place.peers, code, waits)
        store.set(str(self._rank), json.dumps(beat))
        if self._outbox is not None:
            text, self._outbox = self._outbox, None
            self._verdicts += 1
            store.set("verdict", json.dumps([self._verdicts, text]))
        if self.failed_first is None:
            self.failed_first = failed_first(store)
        self._heard = self._hear(store, since) if still >= self._seconds / 2 else None

    def _hear(self, store: Store, since: float) -> _Heard:
        number, text = json.loads(store.multi_get(["verdict"])[0]) if store.check(["verdict"]) else (0, "")
        latest: dict[int, Beat | None] = {}
        if self._rank < _SAID_BY:
            latest = dict.fromkeys(range(self._world))
            known = [rank for rank in latest if store.check([str(rank)])]
            for rank, said in zip(known, store.multi_get([str(rank) for rank in known]), strict=True):
                latest[rank] = _read(said)
        now, before = self._clock(), self._heard
        if before is None or before.since != since:
            return _Heard(since, now, now, latest, dict.fromkeys(latest, now), number, None)
        new = {rank: before.new[rank] if beat == before.latest[rank] else now for rank, beat in latest.items()}
        return before._replace(now=now, latest=latest, new=new, verdict=text if number > before.verdicts else None)

    def finding(self) -> str | None:
        """What there is to say now: nothing but once per stall."""
        place, since = self._progress.now
        now = self._clock()
        if now - self._looked > max(4 * self.interval, self._seconds / 2):
            # It is this process that stood still, and its threads with it: what it knows of others is from before.
            self._awake = now
        self._looked = now
        still = now - max(since, self._awake)
        if still < self._seconds or since == self._named:
            return None
        # Rank 0 speaks first, and others with its words, unless they do not come.
        patience = 0.0 if self._rank == 0 else 2 * _QUIET * self.interval
        heard, waited = self._heard, f"no progress for {still:.0f} s"
        here = f"{place}{f', waiting for {_ranks(place.peers)}' if place.peers else ''}"
        if heard is not None and heard.since == since and heard.now - heard.begun >= _QUIET * self.interval:
            if heard.verdict is not None:
                text = f"{waited}, at {here}; rank 0 says: {heard.verdict}"
            elif still < self._seconds + patience:
                return None
            elif not heard.latest:
                text = f"{waited}, at {here}; the first {_SAID_BY} ranks say nothing"
            else:
                verdict = judge(heard.latest, heard.quiet(max(_QUIET * self.interval, self._seconds / 4)))
                text = f"{waited}: {verdict}" if self._rank == 0 else f"{waited}, at {here}: {verdict}"
                if self._rank == 0:
                    self._outbox = verdict
        elif self._lost or still >= self._seconds + 6 * self.interval:
            owner = "torchrun on the first node" if launcher_holds_store() else "rank 0"
            why = f"of others nothing is known: {owner}, which holds the job's store, does not answer"
            text = f"{waited}, at {here}; {why}"
        else:
            return None
        self._named = since
        return text


def _read(said: bytes) -> Beat:
    beats, step, number, place, peers, code, waits = json.loads(said)
    return Beat(beats, step, number, place, tuple(peers), code, waits)


def failed_first(store: Store) -> str | None:
    """What the first rank that failed left in the job's store; None where there is nothing."""
    return store.multi_get([FAILED_FIRST])[0].decode() if store.check([FAILED_FIRST]) else None


def launcher_holds_store() -> bool:
    """Whether the job's store outlives its ranks: torchrun's does; otherwise it is in rank 0's process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connection_beside(store: Any) -> Callable[[], Store] | None:
    """How to reach the TCP store under ``store`` over a connection of one's own, under a prefix of its own; None for others."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    host, port = store.host, store.port
    # A launcher that starts ranks anew may keep its store.
    prefix = f"hotspa/watchdog/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def connect() -> Store:
        # A socket first: where nobody listens any more, the store itself would try for long and print its own stack.
        socket.create_connection((host, port), timeout=_STORE_S).close()
        own = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_STORE_S))
        return PrefixStore(prefix, own)

    return connect
