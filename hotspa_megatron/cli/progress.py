"""How far a command is that takes long: on standard error, where that is a terminal, and gone when it is done."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track

_Item = TypeVar("_Item")


def counted(items: Iterable[_Item], *, what: str, total: int) -> Iterator[_Item]:
    """The items, counted as they are asked for."""
    yield from track(items, what, total, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """A sign of life while the block runs, of which nobody knows how far it is."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(what):
        yield
