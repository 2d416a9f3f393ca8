"""Megatron's arguments out of the shell script that starts a job: read, never run.

Follows assignments, arrays, line continuations and plain conditions, which is what such scripts are made of; anything else
that an argument depends on is an error that names it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

_ASSIGNMENT: Final = re.compile(r"(?:export\s+|readonly\s+|local\s+)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_VARIABLE: Final = re.compile(
    r"\$(?:\{(?P<braced>[A-Za-z_]\w*|[0-9]+)(?P<index>\[[@*]\])?(?::?-(?P<default>[^}]*))?\}|(?P<plain>[A-Za-z_]\w*|[0-9]))"
)
_SCRIPT: Final = re.compile(r"(?:\S*/)?pretrain\w*\.py|\S+\.py")
_KEYWORD: Final = re.compile(r"(if|elif|else|fi|for|while|until|case|do|done|esac|then)\b\s*(.*)", re.DOTALL)
_COMPARISON: Final = re.compile(r"\[{1,2}\s+(.*?)\s+\]{1,2}", re.DOTALL)
_GUARDED: Final = re.compile(r"(\[{1,2} .*? \]{1,2})\s*&&\s*(.*)", re.DOTALL)
_ONE_LINE: Final = re.compile(r"if\s+(.*?);\s*then\s+(.*?);?\s*fi", re.DOTALL)
_SET_SOMEWHERE: Final = re.compile(r"(?:^|[\s;&|({])([A-Za-z_]\w*)\+?=")
_SETS_NAMES: Final = re.compile(
    r"(?:^|[\s;&|({])(?:read|unset|declare|typeset|local|let|mapfile|readarray|for)\s+([^;&|]*)"
)
_OTHER_COMMANDS: Final = ("echo", "printf", "cat", "ls", "cp", "cd", "mkdir", "set", "source", ".", "module")
# What stands in the place of a value that is not known.
_OF_A_CONDITION: Final = "$?"
_OF_A_COMMAND: Final = "$()"
_UNKNOWN: Final = ([_OF_A_CONDITION], [_OF_A_COMMAND])
_LARGEST_BYTES: Final = 1 << 20

Values = dict[str, list[str]]


def arguments_of_script(path: str | Path) -> list[str]:
    """What the script gives to the last Python file it starts; ``ValueError`` where that cannot be read off it."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise ValueError(f"--from-script: {path}: {error.strerror}") from None
    if len(data) > _LARGEST_BYTES:
        raise ValueError(f"--from-script: {path}: is larger than {_LARGEST_BYTES} bytes; is it a script?")
    text = data.decode("utf-8", "replace")
    values: Values = {}
    found: list[str] | None = None
    for number, line, certain in _followed(text, values):
        where = f"{path}:{number}"
        assigned = _ASSIGNMENT.fullmatch(line)
        if assigned is not None:
            name, added, right = assigned.groups()
            words = _assigned(right, values, where) if certain else None
            if words is not None:
                before = values.get(name, []) if added else []
                values[name] = before if before in _UNKNOWN else [*before, *words]
            else:  # an error where an argument needs it
                values[name] = [_OF_A_COMMAND if certain else _OF_A_CONDITION]
                values.update((other, [_OF_A_CONDITION]) for other in _touched(f" {right}"))
            continue
        values.update((name, [_OF_A_CONDITION]) for name in _touched(line))
        started = _started(line, values, where)
        if started is not None:
            found = started
    if found is None:
        raise ValueError(f"--from-script: {path}: starts no Python file; give Megatron's arguments behind -- instead")
    return found


def _touched(line: str) -> set[str]:
    """Variables that a command may change, other than by a plain assignment: behind a condition, in a loop, several at once."""
    named = {match[1] for match in _SET_SOMEWHERE.finditer(line)}
    for match in _SETS_NAMES.finditer(line):
        named.update(re.findall(r"(?<![-\w$])[A-Za-z_]\w*", match[1]))
    return named


def _followed(text: str, values: Values) -> Iterator[tuple[int, str, bool]]:
    """(first line, command, whether it surely runs) of the commands that are not in a branch that is surely left out.

    ``values``: those at the time; conditions are read with them.
    """
    # One entry per open `if`: whether its present branch runs and whether one before it did; None where that is not known.
    branches: list[tuple[bool | None, bool | None]] = []
    loops = 0
    for number, line in _commands(text):
        keyword = _KEYWORD.fullmatch(line)
        if keyword is not None and (behind := _behind(*keyword.groups())):
            yield number, behind, False
        if keyword is None:
            guarded = _GUARDED.fullmatch(line)
            guard = True if guarded is None else _holds(guarded[1], values)
            runs = [guard, *(each for each, _ in branches)]
            if all(each is not False for each in runs):
                yield number, line if guarded is None else guarded[2], not loops and all(each is True for each in runs)
            continue
        word, rest = keyword.groups()
        if word == "if":
            branches.append((_holds(rest, values), False))
        elif word in ("elif", "else") and branches:
            before = _either(*branches[-1])
            holds = True if word == "else" else _holds(rest, values)
            if before is None and holds is not False:
                holds = None
            branches[-1] = (False if before else holds, before)
        elif word == "fi" and branches:
            branches.pop()
        elif word in ("for", "while", "until", "case"):
            loops += not re.search(r"\b(done|esac)$", rest)
            values.update((name, [_OF_A_CONDITION]) for name in _touched(line))
        elif word in ("done", "esac"):
            loops -= 1


def _behind(word: str, rest: str) -> str:
    """The command that stands on the line of a keyword, whose own line it should have."""
    if word in ("if", "elif", "while", "until"):
        _, _, rest = re.sub(r"\s*;\s*(then|do)\b", "\0", rest).partition("\0")
        return rest.strip()
    return rest.strip() if word in ("then", "else", "do") else ""


def _either(one: bool | None, other: bool | None) -> bool | None:
    return True if one or other else None if one is None or other is None else False


def _holds(condition: str, values: Mapping[str, list[str]]) -> bool | None:
    """Whether a condition holds, where it only compares texts; None where that cannot be said."""
    condition = re.sub(r";?\s*then\b.*", "", condition, flags=re.DOTALL).strip()
    known: bool | None = False
    for part in condition.split("||"):
        match = _COMPARISON.fullmatch(part.strip())
        known = _either(known, _compared(match[1], values) if match else None)
    return known


def _compared(comparison: str, values: Mapping[str, list[str]]) -> bool | None:
    try:
        words = [
            _VARIABLE.sub(lambda match: " ".join(_value(match, values, "", unset=[])), each)
            for each in shlex.split(comparison)
        ]
    except ValueError:
        return None
    if len(words) == 3 and words[1] in ("=", "==", "!="):
        return (words[0] == words[2]) == (words[1] != "!=")
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return bool(words[1]) == (words[0] == "-n")
    return None


def _started(line: str, values: Mapping[str, list[str]], where: str) -> list[str] | None:
    """The arguments of the last Python file that a command starts; None where it starts none."""
    if line.split(maxsplit=1)[0] in _OTHER_COMMANDS:
        return None
    try:
        raw = _words(line, where)
    except ValueError:
        if ".py" in line:
            raise
        return None
    words: list[tuple[str, bool]] = []  # and whether it is expanded
    for word in raw:
        if " " in word:  # `bash -c "..."` holds a command of its own
            inner = _VARIABLE.sub(lambda match: _known(match, values, where), word)
            words += [(part, True) for part in (_words(inner, where) if ".py " in inner else [inner])]
            continue
        try:
            words += [(each, True) for each in _expanded(word, values, where)]
        except ValueError:
            words.append((word, False))
    scripts = [index for index, (word, _) in enumerate(words) if _SCRIPT.fullmatch(word)]
    if not scripts:
        return None
    found: list[str] = []
    for word, done in words[scripts[-1] + 1 :]:
        if word in ("|", "||", "&&", ";", "&") or re.match(r"[0-9]*[<>]|&>", word):
            break
        for part in _expanded(word, values, where) if not done or "$" in word else [word]:
            # An element such as "--fp8-format hybrid" falls apart where the array stands unquoted.
            found += part.split() if part.startswith("--") and "=" not in part.split(maxsplit=1)[0] else [part]
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
        continued = stripped.endswith(("\\", "&&", "||", "|"))
        pending += (" " if pending else "") + stripped.removesuffix("\\").strip()
        array = _ASSIGNMENT.match(pending)
        depth = 1 if array is not None and array[3].startswith("(") and not pending.endswith(")") else 0
        quotes = pending.count('"') % 2 or pending.count("'") % 2
        if not continued and not depth and not quotes:
            found += [(start, each) for each in _parts(pending)]
            pending = ""
    if pending:
        found.append((start, pending))
    return found


def _parts(command: str) -> list[str]:
    """An `if` on one line as the commands that it would be on several."""
    one_line = _ONE_LINE.fullmatch(command)
    if one_line is None:
        return [command]
    body = re.sub(r";\s*else\b", "; else;", one_line[2])
    return [f"if {one_line[1]}", *(each for each in re.split(r"\s*;\s*", body) if each), "fi"]


def _assigned(right: str, values: Mapping[str, list[str]], where: str) -> list[str] | None:
    """The words that a variable gets; None where they come from a command, which is not run."""
    array = right.startswith("(") and right.endswith(")")
    words = _words(right[1:-1] if array else right, where)
    if not array and len(words) > 1:
        # `NAME=value command`: set for that command alone.
        return None
    if not array:
        # A plain variable holds one text; unquoted it falls apart at its spaces, which is how scripts keep lists in it.
        # What is not known stays as it is written: an error only where an argument needs it.
        if words and ("$(" in words[0] or "`" in words[0]) and " " not in words[0]:
            return None
        return " ".join(_VARIABLE.sub(lambda match: _known(match, values, where), word) for word in words).split()
    try:
        return [each for word in words for each in _expanded(word, values, where)]
    except ValueError:
        return None  # an error only where an argument needs it


def _known(match: re.Match[str], values: Mapping[str, list[str]], where: str) -> str:
    try:
        return " ".join(_value(match, values, where))
    except ValueError:
        return match[0]


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


def _value(
    match: re.Match[str], values: Mapping[str, list[str]], where: str, *, unset: list[str] | None = None
) -> list[str]:
    """``unset``: what a variable is that nobody has set; None: an error."""
    name = match["braced"] or match["plain"]
    known = values.get(name)
    if known == [_OF_A_CONDITION]:
        raise ValueError(
            f"--from-script: {where}: ${name} depends on a condition that is not evaluated; set it in plain words"
        )
    if known is not None and known != [_OF_A_COMMAND]:
        return known
    if os.environ.get(name):
        return os.environ[name].split()
    if match["default"] is not None and known is None:
        return match["default"].split()
    if known is None and unset is not None:
        return unset
    raise ValueError(f"--from-script: {where}: ${name} is not set in the script; set it in the environment")


def _words(line: str, where: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ValueError(f"--from-script: {where}: {str(error).lower()}") from None
