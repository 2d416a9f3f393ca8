"""Megatron's arguments out of the shell script that starts a job: read, never run.

Follows assignments, arrays and line continuations, which is what such scripts are made of; anything else that an argument
depends on is an error that names it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_ASSIGNMENT: Final = re.compile(r"(?:export\s+|readonly\s+|local\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE: Final = re.compile(
    r"\$(?:\{(?P<braced>[A-Za-z_]\w*)(?P<index>\[[@*]\])?(?::?-(?P<default>[^}]*))?\}|(?P<plain>[A-Za-z_]\w*))"
)
_SCRIPT: Final = re.compile(r"(?:\S*/)?pretrain\w*\.py|\S+\.py")
_LARGEST_BYTES: Final = 1 << 20


def arguments_of_script(path: str | Path) -> list[str]:
    """What the script gives to the last Python file it starts; ``ValueError`` where that cannot be read off it."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ValueError(f"--from-script: {path}: {error.strerror}") from None
    values: dict[str, list[str]] = {}
    found: list[str] | None = None
    for number, line in _commands(text):
        assigned = _ASSIGNMENT.fullmatch(line)
        if assigned is not None:
            name, added, right = assigned.groups()
            words = _assigned(right, values, f"{path}:{number}")
            if words is not None:
                values[name] = [*values.get(name, []), *words] if added else words
            continue
        raw = _words(line, f"{path}:{number}") if ".py" in line else []
        starts = [index for index, word in enumerate(raw) if _SCRIPT.fullmatch(word)]
        if starts:
            found = []
            for word in raw[starts[-1] + 1 :]:
                if word in ("|", "||", "&&", ";", "&") or re.match(r"[0-9]*[<>]|&>", word):
                    break
                found += _expanded(word, values, f"{path}:{number}")
    if found is None:
        raise ValueError(f"--from-script: {path}: starts no Python file; give Megatron's arguments behind -- instead")
    return found


def _commands(text: str) -> list[tuple[int, str]]:
    """(first line, command) with continued lines joined, arrays whole, comments and blank lines left out."""
    found: list[tuple[int, str]] = []
    pending, start, depth = "", 0, 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = re.sub(r"(?:^|(?<=\s))#.*", "", line).strip()
        if not stripped and not pending:
            continue
        if not pending:
            start = number
        continued = stripped.endswith("\\")
        pending += (" " if pending else "") + stripped.removesuffix("\\").strip()
        array = _ASSIGNMENT.match(pending)
        depth = 1 if array is not None and array[3].startswith("(") and not pending.endswith(")") else 0
        quotes = pending.count('"') % 2 or pending.count("'") % 2
        if not continued and not depth and not quotes:
            found.append((start, pending))
            pending = ""
    if pending:
        found.append((start, pending))
    return found


def _assigned(right: str, values: Mapping[str, list[str]], where: str) -> list[str] | None:
    """The words that a variable gets; None where they come from a command, which is not run."""
    if "$(" in right or "`" in right:
        return None
    array = right.startswith("(") and right.endswith(")")
    words = _words(right[1:-1] if array else right, where)
    if not array and len(words) > 1:
        # `NAME=value command`: set for that command alone.
        return None
    try:
        expanded = [each for word in words for each in _expanded(word, values, where)]
    except ValueError:
        return None  # an error only where an argument needs it
    if array:
        return expanded
    # A plain variable holds one text; unquoted it falls apart at its spaces, which is how scripts keep lists in it.
    return " ".join(expanded).split()


def _expanded(word: str, values: Mapping[str, list[str]], where: str) -> list[str]:
    """The word with its variables replaced: as many words as an array alone in it has."""
    whole = _VARIABLE.fullmatch(word)
    if whole is not None:
        return _value(whole, values, where)
    if "$(" in word or "`" in word:
        raise ValueError(
            f"--from-script: {where}: {word!r} comes from a command, which is not run; write the value out"
        )
    return [_VARIABLE.sub(lambda match: " ".join(_value(match, values, where)), word)]


def _value(match: re.Match[str], values: Mapping[str, list[str]], where: str) -> list[str]:
    name = match["braced"] or match["plain"]
    if name in values:
        return values[name]
    if os.environ.get(name):
        return os.environ[name].split()
    if match["default"] is not None:
        return match["default"].split()
    raise ValueError(f"--from-script: {where}: ${name} is not set in the script; set it in the environment")


def _words(line: str, where: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ValueError(f"--from-script: {where}: {str(error).lower()}") from None
