"""The timeline of this rank's first steps, into the folder that ``trace`` names; ``run_folder`` says how it is written."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from hotspa_megatron import run_folder
from hotspa_megatron.hooks.step_report import LineFile, StepSeen

_SHARED_MOMENTS: Final = 3


class Trace:
    """Takes steps until ``TRACED_STEPS`` are written. Made on all ranks together."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        rank, host = dist.get_rank(), socket.gethostname()
        moments = []
        for _ in range(_SHARED_MOMENTS):
            dist.barrier()
            moments.append(time.time())
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (host, moments))
        self._zero = gathered[0][1][0] + run_folder.clock_offsets(*zip(*gathered, strict=True))[rank]
        self._folder, self._rank, self._say, self._left = folder, rank, say, run_folder.TRACED_STEPS
        self._file = LineFile(run_folder.rank_file(folder, rank), say, anew=True)
        start = f"{datetime.fromtimestamp(gathered[0][1][0], UTC):%Y-%m-%d %H:%M:%S.%f} UTC"
        self._file.write("[\n")
        self._add(run_folder.header_events(rank, name=f"rank {rank} ({host})", start=start))

    def add(self, seen: StepSeen) -> None:
        """Write a step's events, while there is room for it."""
        if not self._left:
            return
        self._left -= 1
        at = seen.began - self._zero
        total, tokens = next(iter(seen.record.losses.values()), (0.0, 0.0))
        ends = [span.start + span.seconds for span in seen.spans]
        details: dict[str, Any] = {"tokens": sum(seen.step.plan.lengths), "loss": total / max(tokens, 1.0)}
        name = f"step {seen.iteration}"
        events = [
            run_folder.complete_event(self._rank, name, "step", at=at, seconds=max(ends, default=0.0), details=details)
        ]
        for span in seen.spans:
            details = {}
            if span.kind == "segment":
                described = seen.record.segments[span.details["position"]]
                details = {key: described[key] for key in ("kind", "sequences", "micro_batches", "tokens")}
            title = span.name if span.kind == "segment" else f"{_TITLES[span.kind]}{span.name}"
            events.append(
                run_folder.complete_event(
                    self._rank, title, span.kind, at=at + span.start, seconds=span.seconds, details=details
                )
            )
        for index, move in enumerate(seen.passages):
            events += run_folder.moving_events(
                self._rank, f"{move.kind} {move.source} -> {move.destination}", move.kind,
                number=f"{seen.iteration}.{index}", at=at + move.start, seconds=move.seconds,
                details={"bytes of all ranks": move.num_bytes, "messages": move.messages, "waited (ms)": 1e3 * move.waited},
            )  # fmt: skip
        self._add(events)

    def close(self) -> None:
        self._file.close()

    def merge(self) -> None:
        """Put all ranks' files together, on rank 0. Call it once all are closed. Where that fails, a line says so."""
        if self._rank == 0:
            try:
                run_folder.merge_timelines(self._folder)
            except OSError as error:  # the last checkpoint may still be to come
                self._say(
                    f"{error.filename or self._folder}: {error.strerror}; hotspa report can put the timelines together"
                )

    def _add(self, events: list[run_folder.Event]) -> None:
        self._file.write(run_folder.event_lines(events))


_TITLES: Final = {
    "plan": "plan: ",
    "switch": "wait for switch ",
    "fold": "wait for fold ",
    "reduce": "reduce gradients: ",
    "wait": "wait ",
    "optimizer": "",
}
