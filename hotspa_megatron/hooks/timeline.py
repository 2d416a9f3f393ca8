"""When what happened on this rank inside a step, by the device's own clock: what a step waits for is not the host's affair.

Marks are CUDA events, which the CPU stand-in has, too: there they are the host's clock. Setting one costs microseconds
and waits for nothing; reading waits for the device, so it is done once, after the step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

import torch

from hotspa_megatron.runtime.watchdog import Progress

_PHASES: Final = {"plan": "planning", "reduce": "reduction", "wait": "waiting"}
"""Kinds of spans as a message calls them, where that is something else."""
_ALL: Final = 1.05
"""Of what was waited for: a move that took no longer was waited for from its beginning to its end."""

SpanKind: TypeAlias = Literal["plan", "segment", "switch", "fold", "reduce", "wait", "optimizer"]
"""What a span is spent on. switch and fold: what is waited for of them; reduce: gradients within a layout; wait: for others."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of the step's own time: seconds since the step began, and how many."""

    kind: SpanKind
    name: str
    start: float
    seconds: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Passage:
    """A move between layouts, from its beginning to when its values were there; seconds.

    ``waited``: how long the step stood still for it. Where ``bound`` is true, the transport did not tell when values
    arrived: they count as under way until the step asked for them, so that ``seconds`` is the most it can have been. What
    no rank sends is never under way. ``num_bytes``, ``messages``: over all ranks.
    """

    kind: Literal["switch", "fold"]
    source: str
    destination: str
    start: float
    seconds: float
    waited: float
    num_bytes: int
    messages: int
    bound: bool

    @property
    def hidden(self) -> float:
        """Seconds under way that the step did not wait."""
        return max(0.0, self.seconds - self.waited)


class Mark:
    """A moment in the device's queue."""

    def __init__(self) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=True)
        self.event.record()


class Voyage:
    """A move under way. ``waiting`` surrounds every part of it that the step waits for; ``land`` ends it."""

    def __init__(
        self,
        kind: Literal["switch", "fold"],
        source: str,
        destination: str,
        *,
        size: int,
        messages: int,
        progress: Progress,
    ) -> None:
        self.kind, self.source, self.destination = kind, source, destination
        self.num_bytes, self.messages, self._progress = size, messages, progress
        self.waits: list[tuple[Mark, Mark]] = []
        self.landed: Any = None
        """The event at which the values were there."""
        self.arrival: torch.cuda.Event | None = None
        """The device's event of it; None where only the end of the last wait is known."""

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self._progress.at(self.kind, f"{self.source} -> {self.destination}")
        began = Mark()
        try:
            yield
        finally:
            self.waits.append((began, Mark()))

    def land(self) -> None:
        """The step has what it waited for."""
        self.landed = self.waits[-1][1].event if self.arrival is None else self.arrival


class Timeline:
    """One step's marks. ``began``: seconds since the epoch, by the host's clock; ``progress`` is told of what begins."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._progress = progress or Progress()
        self._zero = Mark()
        self.began = time.time()
        self._spans: list[tuple[SpanKind, str, dict[str, Any], Mark, Mark]] = []
        self._voyages: list[Voyage] = []

    @contextlib.contextmanager
    def span(self, kind: SpanKind, name: str, **details: Any) -> Iterator[None]:
        """A stretch of time, kept when the block ends without an error."""
        if kind == "segment":
            self._progress.at("", segment=f"{details['position'] + 1} ({name})")
        else:
            self._progress.at(_PHASES.get(kind, kind), name)
        began = Mark()
        yield
        self.took(kind, name, began, **details)

    def took(self, kind: SpanKind, name: str, began: Mark, **details: Any) -> None:
        """A stretch of time from a mark until now."""
        self._spans.append((kind, name, details, began, Mark()))

    def moving(
        self, kind: Literal["switch", "fold"], source: str, destination: str, *, size: int, messages: int
    ) -> Voyage:
        """A move that begins. ``size``: its bytes over all ranks."""
        self._voyages.append(Voyage(kind, source, destination, size=size, messages=messages, progress=self._progress))
        return self._voyages[-1]

    def passages(self) -> list[Passage]:
        """The moves that ended, in the order in which they began. Waits for the device."""
        return [self._passage(each) for each in self._voyages if each.landed is not None]

    def _passage(self, of: Voyage) -> Passage:
        start = self._at(of.waits[0][0].event)
        waited = sum(self._at(end.event) - self._at(begin.event) for begin, end in of.waits)
        seconds = self._at(of.landed) - start if of.num_bytes else waited
        return Passage(
            kind=of.kind,
            source=of.source,
            destination=of.destination,
            start=start,
            seconds=seconds,
            waited=waited,
            num_bytes=of.num_bytes,
            messages=of.messages,
            bound=of.arrival is None and seconds > _ALL * waited,
        )

    def spans(self) -> list[Span]:
        """Everything that took the step's own time, by start. Waits for the device."""
        found = [
            Span(kind=kind, name=name, start=self._at(begin.event), seconds=self._at(end.event) - self._at(begin.event),
                 details=details)
            for kind, name, details, begin, end in self._spans
        ]  # fmt: skip
        for each in self._voyages:
            for begin, end in each.waits:
                start = self._at(begin.event)
                name = f"{each.source} -> {each.destination}"
                found.append(Span(kind=each.kind, name=name, start=start, seconds=self._at(end.event) - start))
        return sorted(found, key=lambda span: (span.start, -span.seconds))

    def _at(self, event: Any) -> float:
        event.synchronize()
        return float(self._zero.event.elapsed_time(event)) / 1e3
