"""Values of flags that several subcommands read alike; an error names the flag."""

from __future__ import annotations

import re


def numbers(text: str, *, flag: str, rising: bool = False) -> tuple[int, ...]:
    """Whole numbers of at least 1 out of ``1,2,3``; ``ValueError`` names the flag."""
    if not re.fullmatch(r"[1-9][0-9]{0,11}(,[1-9][0-9]{0,11})*", text):
        raise ValueError(f"{flag}: {text!r} is not a list of numbers; write them as 512,4096")
    found = tuple(int(part) for part in text.split(","))
    if rising and list(found) != sorted(set(found)):
        raise ValueError(f"{flag}: {text} does not rise; write each number once, from small to large")
    return found
