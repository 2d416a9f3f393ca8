"""The folder that ``trace`` names: what lies in it, how it is written and read. Pure: files, no torch and no Megatron.

``steps.jsonl``: one JSON object per step, by rank 0, for as long as the job runs (about 1 KB a step).
``ranks/rank-00003.json``: what that rank did in the first ``TRACED_STEPS`` steps of the last start, as trace events that
Perfetto and chrome://tracing open, even where the job was killed. ``timeline.json``: all ranks' together.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeVar

from hotspa_megatron.strategy import Kind, Strategy

STEPS: Final = "steps.jsonl"
TIMELINE: Final = "timeline.json"
RANKS: Final = "ranks"
TRACED_STEPS: Final = 20
"""Steps of each start whose timeline is kept: some 100 bytes an event, 10 to 30 events a step and rank."""
_LONGEST_NAME: Final = 200
_LONGEST_LINE: Final = 1 << 20
"""Bytes of a step in its log, some thousand times what it takes."""
_MOST: Final = 2**63 - 1
_LONGEST_S: Final = 1e9
"""Seconds that anything in a step can take, 30 years, so that sums stay finite."""

_LARGEST_SHARE: Final = math.nextafter(1.0, 0.0)

Event = dict[str, Any]
_Number = TypeVar("_Number", int, float)


# --------------------------------------------------------------------------------------------------------------- names


def folder_problem(text: str) -> str | None:
    """What is wrong with a folder's name in a file, with the fix; None where nothing is.

    A configuration may come from somebody else: what it names must lie inside the run's own folder.
    """
    parts = PurePosixPath(text).parts
    if not all(character.isprintable() for character in text):
        return "has characters that no folder's name should have; write a plain name"
    if text.startswith(("/", "~")) or ".." in parts:
        return f"{text!r} leads out of the run's folder; write a folder below --save (without it, where the job starts)"
    if not parts:
        return f"{text!r} names no folder; write a name or null"
    if len(text) > _LONGEST_NAME:
        return f"has more than {_LONGEST_NAME} characters; write a shorter name"
    return None


def folder_inside(base: Path, text: str) -> Path:
    """The folder that ``text`` names below ``base``.

    ValueError where a link leads out of it, a file is in the way, or it cannot be looked at.
    """
    folder = base / text
    if not Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(base)):
        raise ValueError(f"trace: {folder} is, or goes through, a link out of {base}; name another folder")
    for part in (folder, *folder.parents):
        try:
            in_the_way = part.exists() and not part.is_dir()
        except OSError as error:
            raise ValueError(f"trace: {part}: {error.strerror}; name another folder") from None
        if in_the_way:
            raise ValueError(f"trace: {part} is a file; name another folder")
    return folder


def replace_file(path: Path, texts: Iterable[str]) -> None:
    """Write a file that is there as a whole or, with OSError, as it was before."""
    unfinished = path.with_name(f"{path.name}.new")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(texts)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def rank_file(folder: Path, rank: int) -> Path:
    return folder / RANKS / f"rank-{rank:05d}.json"


# ------------------------------------------------------------------------------------------------------------ timelines


def clock_offsets(hosts: Sequence[str], seen: Sequence[Sequence[float]]) -> list[float]:
    """Seconds by which each rank's clock is ahead of rank 0's, from what each saw at moments that all shared.

    ``seen[rank]``: clock readings, one per shared moment. Ranks of one host share its clock; the first of a host to read
    is nearest to the moment.
    """
    first = {
        host: [min(times) for times in zip(*(seen[rank] for rank, at in enumerate(hosts) if at == host), strict=True)]
        for host in set(hosts)
    }
    reference = first[hosts[0]]
    ahead = {
        host: statistics.median(own - other for own, other in zip(times, reference, strict=True))
        for host, times in first.items()
    }
    return [ahead[host] for host in hosts]


def header_events(rank: int, *, name: str, start: str) -> list[Event]:
    """What a timeline says of a rank; ``start`` tells one start of the job from another."""
    process = {"ph": "M", **_place(rank)}
    return [
        {**process, "name": "process_name", "args": {"name": name}},
        {**process, "name": "process_labels", "args": {"labels": start}},
        {**process, "name": "process_sort_index", "args": {"sort_index": rank}},
        {**process, "name": "thread_name", "args": {"name": "step"}},
    ]


def complete_event(
    rank: int, name: str, category: str, *, at: float, seconds: float, details: Mapping[str, Any]
) -> Event:
    """Something that took a rank's own time; ``at`` and ``seconds`` in seconds, as the format's microseconds."""
    return {"ph": "X", **_place(rank), "ts": _microseconds(at), "dur": _microseconds(max(0.0, seconds)),
            "name": name, "cat": category, "args": dict(details)}  # fmt: skip


def moving_events(
    rank: int, name: str, category: str, *, number: str, at: float, seconds: float, details: Mapping[str, Any]
) -> list[Event]:
    """Something beside a rank's own work, which may overlap anything; ``number`` tells those of a rank apart."""
    common = {**_place(rank), "name": name, "cat": category, "id": f"{rank}.{number}"}
    return [
        {"ph": "b", **common, "ts": _microseconds(at), "args": dict(details)},
        {"ph": "e", **common, "ts": _microseconds(at + max(0.0, seconds))},
    ]


def event_lines(events: Iterable[Event]) -> str:
    """Events as a rank's file has them after its first line, an opening bracket: one a line, each with a comma."""
    return "".join(f"{json.dumps(event)},\n" for event in events)


def read_rank(path: Path) -> list[Event]:
    """A rank's events; what was being written when the job ended is left out."""
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
        try:
            event = json.loads(line.removesuffix(","))
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def merge_timelines(folder: Path) -> Path | None:
    """Write all ranks' events of the last start into one file; None where there are none. OSError as files have it."""
    first = rank_file(folder, 0)
    if not first.exists():
        return None
    start = _start_of(read_rank(first))
    events = []
    for path in sorted(first.parent.glob("rank-*.json")):
        own = read_rank(path)
        # An earlier start may have had more ranks.
        if _start_of(own) == start:
            events += own
    path = folder / TIMELINE
    text = ",\n".join(json.dumps(event) for event in events)
    replace_file(path, ('{"displayTimeUnit": "ms", "traceEvents": [\n', text, "\n]}\n"))
    return path


def _start_of(events: Iterable[Event]) -> object:
    labels = (event.get("args") for event in events if event.get("name") == "process_labels")
    return next((each.get("labels") for each in labels if isinstance(each, dict)), None)


def _place(rank: int) -> dict[str, int]:
    """A rank as a process of one thread. Perfetto takes process and thread 0 for the idle one of an operating system."""
    return {"pid": rank + 1, "tid": rank + 1}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


# ---------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True, kw_only=True)
class SegmentEntry:
    """A segment of a logged step; ``seconds`` on rank 0."""

    strategy: str
    kind: str
    sequences: int
    tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class MoveEntry:
    """A switch or fold of a logged step: ``num_bytes`` over all ranks, seconds under way and waited for on rank 0."""

    source: str
    destination: str
    num_bytes: int
    seconds: float
    waited: float
    bound: bool


@dataclass(frozen=True, kw_only=True)
class StepEntry:
    """A line of ``steps.jsonl``. Seconds are rank 0's; ``lengths``: (sequences, tokens) by upper bound, a power of two.

    ``modelled_s``, ``static_modelled_s``: the cost model's, of the step as it was planned and of home alone; None where
    there is no estimate. ``loss`` is NaN where nothing was trained, and may be infinite.
    """

    iteration: int
    loss: float
    tokens: int
    padding_fraction: float
    step_s: float
    plan_s: float
    segments: tuple[SegmentEntry, ...]
    switches: tuple[MoveEntry, ...]
    folds: tuple[MoveEntry, ...]
    reduce_s: float
    wait_s: float
    optimizer_s: float
    lengths: Mapping[int, tuple[int, int]]
    modelled_s: float | None
    static_modelled_s: float | None


def read_steps(path: Path) -> list[StepEntry]:
    """The steps of a log by iteration, the last of each where a resumed job ran some again.

    Raises ValueError, one line that names file and line, for what is not a step log. A last line without its end is
    still being written, and left out.
    """
    found: dict[int, StepEntry] = {}
    try:
        with path.open("rb") as file:
            # One more byte than a line may have, so that a file that is none of ours is not read whole.
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), start=1):
                if len(line) > _LONGEST_LINE:
                    raise ValueError(
                        f"{path}:{number}: the line has more than {_LONGEST_LINE} bytes; name a log of steps"
                    )
                if not line.endswith(b"\n"):
                    break
                entry = _read_step(line, f"{path}:{number}")
                found[entry.iteration] = entry
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; name a log that can be read") from None
    if not found:
        raise ValueError(f"{path}: holds no step; a job writes one a step once it trains")
    return [found[iteration] for iteration in sorted(found)]


def _read_step(line: bytes, place: str) -> StepEntry:
    try:
        return _step(json.loads(line.decode("utf-8")))
    except KeyError as error:
        raise ValueError(f"{place}: the step has no {error.args[0]!r}; was it logged by this version?") from None
    except UnicodeDecodeError:
        raise ValueError(f"{place}: not UTF-8; remove the line") from None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        shown = line.decode("utf-8").strip()[:40]
        raise ValueError(f"{place}: {shown!r} is not a logged step; remove the line") from None


def _step(entry: Mapping[str, Any]) -> StepEntry:
    return StepEntry(
        iteration=_count(entry["iteration"]),
        loss=float(entry["loss"]),
        tokens=_count(entry["tokens"]),
        padding_fraction=_share(entry["padding_fraction"]),
        step_s=_seconds(entry["step_s"]),
        plan_s=_seconds(entry["plan_s"]),
        segments=tuple(
            SegmentEntry(
                strategy=_strategy(each["strategy"]),
                kind=Kind(each["kind"]).value,
                sequences=_count(each["sequences"]),
                tokens=_count(each["tokens"]),
                seconds=_seconds(each["seconds"]),
            )
            for each in entry["segments"]
        ),
        switches=tuple(map(_move, entry["switches"])),
        folds=tuple(map(_move, entry["folds"])),
        reduce_s=_seconds(entry["reduce_s"]),
        wait_s=_seconds(entry["wait_s"]),
        optimizer_s=_seconds(entry["optimizer_s"]),
        lengths={
            _power_of_two(upper): (_count(count), _count(tokens)) for upper, (count, tokens) in entry["lengths"].items()
        },
        modelled_s=None if entry["modelled_s"] is None else _seconds(entry["modelled_s"]),
        static_modelled_s=None if entry["static_modelled_s"] is None else _seconds(entry["static_modelled_s"]),
    )


def _move(entry: Mapping[str, Any]) -> MoveEntry:
    return MoveEntry(
        source=_strategy(entry["from"]),
        destination=_strategy(entry["to"]),
        num_bytes=_count(entry["bytes"]),
        seconds=_seconds(entry["under_way_s"]),
        waited=_seconds(entry["seconds"]),
        bound=bool(entry["bound"]),
    )


def _strategy(value: Any) -> str:
    return str(Strategy.parse(value))


def _within(number: _Number, most: _Number) -> _Number:
    if not 0 <= number <= most:
        raise ValueError(number)
    return number


def _count(value: Any) -> int:
    return _within(int(value), _MOST)


def _power_of_two(value: Any) -> int:
    upper = _count(value)
    if upper.bit_count() != 1:
        raise ValueError(value)
    return upper


def _seconds(value: Any) -> float:
    return _within(float(value), _LONGEST_S)


def _share(value: Any) -> float:
    return _within(float(value), _LARGEST_SHARE)
