"""A step drawn rank by rank, for ``hotspa explain``: as text, or by matplotlib."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console

from hotspa_megatron.cli import tables
from hotspa_megatron.planning.step_time import Activity

_SYMBOLS: Final = {Activity.SWITCH: "<", Activity.REDUCE: "=", Activity.FOLD: ">", Activity.OPTIMIZER: "*"}
_WORDS: Final = {
    Activity.SWITCH: "parameters to a guest",
    Activity.REDUCE: "gradient reduction",
    Activity.FOLD: "gradients home",
    Activity.OPTIMIZER: "optimizer",
}
_WAITS: Final = "."
_WIDTH: Final = 80
_MOST_LINES: Final = 32


@dataclass(frozen=True, kw_only=True)
class SpanShown:
    """``ranks`` at one activity, from ``start`` to ``end`` in seconds; ``segment`` counts from 0, None at the step's end."""

    activity: Activity
    segment: int | None
    ranks: tuple[int, ...]
    start: float
    end: float

    @property
    def symbol(self) -> str:
        return _SYMBOLS.get(self.activity) or symbol_of(self.segment or 0)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Neighbouring ``ranks`` that do the same at the same time."""

    ranks: range
    spans: tuple[SpanShown, ...]

    @property
    def label(self) -> str:
        return _label(self.ranks[0], self.ranks[-1])

    def busy(self) -> float:
        """Seconds of micro-batches."""
        return sum(each.end - each.start for each in self.spans if each.activity is Activity.COMPUTE)

    def drawn(self, seconds: float, width: int) -> str:
        """A character for each of ``width`` equal parts of so many seconds: what takes most of that part."""
        column, text = seconds / width, []
        for place in range(width):
            begin, end = place * column, (place + 1) * column
            taken = {_WAITS: column}
            for each in self.spans:
                within = min(end, each.end) - max(begin, each.start)
                if within > 0:
                    taken[each.symbol] = taken.get(each.symbol, 0.0) + within
                    taken[_WAITS] -= within
            text.append(max(taken, key=taken.__getitem__))
        return "".join(text)


def symbol_of(segment: int) -> str:
    """A character for a segment: digits from 1, then letters."""
    symbols = string.digits[1:] + string.ascii_letters
    return symbols[segment % len(symbols)]


def rows_of(spans: Sequence[SpanShown], world_size: int) -> Iterator[Row]:
    """The ranks from 0, those together that do the same."""
    own: list[list[SpanShown]] = [[] for _ in range(world_size)]
    for each in spans:
        for rank in each.ranks:
            own[rank].append(each)
    times = [tuple((each.activity, each.segment, each.start, each.end) for each in found) for found in own]
    for _, ranks in itertools.groupby(range(world_size), key=times.__getitem__):
        first, *others = ranks
        yield Row(ranks=range(first, first + 1 + len(others)), spans=tuple(own[first]))


def print_timeline(console: Console, spans: Sequence[SpanShown], *, world_size: int, seconds: float) -> None:
    lines = ((row, (row.drawn(seconds, _WIDTH), f"{row.busy() / seconds:.1%}")) for row in rows_of(spans, world_size))
    # Ranks that look alike share a line, too.
    alike = [
        (text, [row.ranks for row, _ in found]) for text, found in itertools.groupby(lines, key=lambda line: line[1])
    ]
    shown = tables.table("ranks", "time from left to right", "computes", left=("ranks", "time from left to right"))
    for text, ranks in alike[:_MOST_LINES]:
        tables.row(shown, _label(ranks[0][0], ranks[-1][-1]), *text)
    tables.print_table(console, f"The step rank by rank: {seconds * 1e3:,.1f} ms", shown)
    if len(alike) > _MOST_LINES:
        tables.say(console, f"and {world_size - alike[_MOST_LINES][1][0][0]:,} ranks more, of which --json tells.")
    taken = dict.fromkeys(_SYMBOLS, 0.0)
    for each in spans:
        if each.activity in taken:
            taken[each.activity] += each.end - each.start
    ends = [f"{_SYMBOLS[each]} {_WORDS[each]} {time * 1e3:,.1f} ms" for each, time in taken.items() if time]
    tables.say(console, "; ".join(["Digits: segments, as numbered above", *ends, f"{_WAITS} waiting."]))
    tables.say(console, f"A character is {seconds / _WIDTH * 1e3:,.2f} ms and shows what takes most of it.")


def _label(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
