"""Values of flags that several subcommands read alike; an error names the flag."""

from __future__ import annotations

import os
import re
from pathlib import Path


def numbers(text: str, *, flag: str, rising: bool = False) -> tuple[int, ...]:
    """Whole numbers of at least 1 out of ``1,2,3``; ``ValueError`` names the flag."""
    if not re.fullmatch(r"[1-9][0-9]{0,11}(,[1-9][0-9]{0,11})*", text):
        raise ValueError(f"{flag}: {text!r} is not a list of numbers; write them as 512,4096")
    found = tuple(int(part) for part in text.split(","))
    if rising and list(found) != sorted(set(found)):
        raise ValueError(f"{flag}: {text} does not rise; write each number once, from small to large")
    return found


def seed(number: int) -> int:
    """The seed that was given; ``ValueError`` where it is negative."""
    if number < 0:
        raise ValueError(f"--seed: {number} is not a seed; write a whole number of at least 0")
    return number


def writable(path: str, *, flag: str) -> Path:
    """A file that can be written, found out before the work whose results are for it; ``ValueError`` where it cannot.

    Leaves no file where there was none, and what is in one that is there.
    """
    if not path:
        raise ValueError(f"{flag}: '' names no file; write a path")
    target = Path(path)
    try:
        behind = target.resolve()  # of a link to nothing, what it names: the link itself stays
        if target.exists() and not target.is_file() and not target.is_dir():
            return target  # a pipe or a device, which must not be opened twice
        there = behind.exists()
        with behind.open("ab"):
            pass
        if not there:
            os.unlink(behind)
    except OSError as error:
        raise ValueError(f"{flag}: {path}: {error.strerror}") from None
    return target
