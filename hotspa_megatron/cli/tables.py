"""How the subcommands print: tables that a file or a pipe gets whole. Decides nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_LEAST_WIDTH: Final = 120


def console() -> Console:
    """Standard output, never so narrow that a number is cut in two: files have no width, and terminals wrap lines."""
    terminal = Console().width if sys.stdout.isatty() else 0
    return Console(width=max(terminal, _LEAST_WIDTH), highlight=False)


def table(*columns: str, left: tuple[str, ...]) -> Table:
    """A table of these columns, those in ``left`` aligned left and the others, numbers, right."""
    made = Table(box=SIMPLE_HEAD if sys.stdout.isatty() else None, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    return made


def print_table(to: Console, title: str, shown: Table) -> None:
    to.print(Text(f"\n{title}", style="bold"), shown, sep="\n")


def row(of: Table, *cells: object) -> None:
    # Text: what comes from the user must not be read as markup.
    of.add_row(*(Text(str(cell)) for cell in cells))


def say(to: Console, text: str) -> None:
    to.print(Text(text), soft_wrap=True)


def ranges(max_lengths: Iterable[int]) -> list[tuple[int, int] | None]:
    """First and last length of each range, for ascending limits; None where the limit before leaves nothing."""
    found: list[tuple[int, int] | None] = []
    low = 1
    for limit in max_lengths:
        found.append((low, limit) if low <= limit else None)
        low = limit + 1
    return found


def range_text(lengths: tuple[int, int] | None) -> str:
    return "none" if lengths is None else f"{lengths[0]}-{lengths[1]}"


def size_text(count: int | None) -> str:
    """Bytes in the unit that reads best."""
    if count is None:
        return "not known"
    if count < 1 << 20:
        return f"{count / (1 << 10):.1f} KiB" if count else "0"
    return f"{count / (1 << 20):.1f} MiB" if count < 1 << 30 else f"{count / (1 << 30):.2f} GiB"
