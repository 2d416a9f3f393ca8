"""YAML read strictly: every value keeps its text and line, and nothing turns into a number or a truth by accident.

PyYAML's own constructors read ``010`` as 8, ``1:30`` as 90 and ``on`` as true, and let a repeated key win silently.
Here the composer alone runs; a schema asks each value for the type it needs. For every YAML file that this package reads.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeVar

import yaml

SIZE_LIMIT: Final = 1 << 20
"""Bytes of a configuration file."""
DEPTH_LIMIT: Final = 16
LARGEST_INTEGER: Final = 2**31 - 1

_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)")
_LEADING_ZERO: Final = re.compile(r"-?0[0-9]+")
_MISSING_SPACE: Final = re.compile(r"(?:.*\s)?([A-Za-z_]+):(\S+)", re.DOTALL)
_NULLS: Final = ("", "~", "null", "Null", "NULL")
_TRUTHS: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_SHOWN_CHARACTERS: Final = 60
_SHOWN_PROBLEM: Final = 200
"""Of what the YAML reader says, which may quote the file."""

_Name = TypeVar("_Name", bound=str)


class ConfigError(ValueError):
    """What is wrong with a configuration, on one line: ``FILE:LINE: KEY: problem; fix``."""


class _Refused(yaml.MarkedYAMLError):
    """Valid YAML of a kind that is not read here."""


class _Composer(yaml.BaseLoader):
    """Builds nodes without resolving any scalar, and refuses what a configuration has no use for."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise _Refused(
                problem="anchors and aliases are not read; write the values out", problem_mark=event.start_mark
            )
        if event.tag is not None and event.tag != "!":
            raise _Refused(problem=f"the tag {shown(event.tag)} is not read; remove it", problem_mark=event.start_mark)
        if self._depth == DEPTH_LIMIT:
            raise _Refused(
                problem=f"nested more than {DEPTH_LIMIT} deep; no key needs that", problem_mark=event.start_mark
            )
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


@dataclass(frozen=True, kw_only=True)
class Value:
    """One value of a file: its full key ("strategies[0].tp"), its line, and readers that check its type."""

    path: Path
    key: str
    line: int
    node: yaml.Node

    def error(self, problem: str) -> ConfigError:
        """An error at this value; ``problem`` says what is wrong, then the fix after a semicolon."""
        return config_error(self.path, self.line, self.key or "file", problem)

    def integer(self, *, least: Literal[0, 1] = 1, most: int = LARGEST_INTEGER) -> int:
        """A whole number of at least ``least``, written in plain decimal digits."""
        text = self._scalar("a whole number")
        if self._is_null(text):
            raise self.error("has no value; write a whole number or remove the key")
        if self._quoted():
            raise self.error(f"{shown(text)} is text; write a whole number without quotes")
        if _LEADING_ZERO.fullmatch(text):
            raise self.error(f"{shown(text)} has a leading zero, which some read as octal; write it without")
        if not _INTEGER.fullmatch(text):
            raise self.error(
                f"{shown(text)} is not a whole number; {_missing_space(text) or 'write decimal digits only'}"
            )
        if text.startswith("-") or (text == "0" and least):
            raise self.error(f"{text} is less than {least}; write a whole number of at least {least}")
        if len(text) > len(str(most)) or int(text) > most:
            raise self.error(f"{shown(text)} is too large; write at most {most}")
        return int(text)

    def boolean(self) -> bool:
        """true or false; not yes, no, on or off."""
        text = self._scalar("true or false")
        if self._quoted() or text not in _TRUTHS:
            raise self.error(f"{shown(text)} is not true or false; write one of them, without quotes")
        return _TRUTHS[text]

    def choice(self, names: Sequence[_Name]) -> _Name:
        """One of ``names``."""
        text = self._scalar("text")
        for name in names:
            if text == name:
                return name
        what = "has no value" if self._is_null(text) else f"{shown(text)} is not known"
        raise self.error(f"{what}; write {' or '.join(names)}")

    def text(self) -> str | None:
        """Text, or None for null or nothing."""
        text = self._scalar("text")
        return None if self._is_null(text) else text

    def sequence(self) -> list[Value]:
        """The entries of a list."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error(f"{self._described()} stands where a list is due; write [] for an empty list")
        return [
            Value(path=self.path, key=f"{self.key}[{index}]", line=_line(node), node=node)
            for index, node in enumerate(self.node.value)
        ]

    def mapping(self, *, known: Sequence[str], refused: Mapping[str, str], also: Mapping[str, str]) -> dict[str, Value]:
        """The entries of a map, by key; every key must be in ``known`` and stand once.

        ``refused`` gives the problem of a key that is understood and not accepted; ``also`` maps other people's names
        to ours, for the message alone.
        """
        if not isinstance(self.node, yaml.MappingNode):
            text = self.node.value if isinstance(self.node, yaml.ScalarNode) else ""
            fix = _missing_space(text) or f"write {known[0]}: and its value"
            raise self.error(f"{self._described()} stands where a map is due; {fix}")
        values: dict[str, Value] = {}
        for key_node, node in self.node.value:
            name = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            full = f"{self.key}.{_cut(str(name))}" if self.key else _cut(str(name))
            entry = Value(path=self.path, key=one_line(full), line=_line(key_node), node=node)
            if name is None:
                raise Value(path=self.path, key=self.key or known[0], line=_line(key_node), node=node).error(
                    "a list or a map stands where a key is due; write a name"
                )
            if name in refused:
                raise entry.error(refused[name])
            if name not in known:
                raise entry.error(_unknown(name, known, also))
            if name in values:
                raise entry.error(f"stands twice, first in line {values[name].line}; remove one")
            values[name] = entry
        return values

    def _scalar(self, wanted: str) -> str:
        if not isinstance(self.node, yaml.ScalarNode):
            raise self.error(f"{self._described()} stands where {wanted} is due; write a single value")
        return str(self.node.value)

    def _quoted(self) -> bool:
        return self.node.style is not None if isinstance(self.node, yaml.ScalarNode) else False

    def _is_null(self, text: str) -> bool:
        return not self._quoted() and text in _NULLS

    def _described(self) -> str:
        if isinstance(self.node, yaml.SequenceNode):
            return "a list"
        if isinstance(self.node, yaml.MappingNode):
            return "a map"
        text = str(self.node.value)
        return "nothing" if self._is_null(text) else f"the text {shown(text)}"


def read_document(path: Path) -> Value | None:
    """The single document of a file, or None where it holds no value; ``ConfigError`` for what is not plain YAML."""
    text = _read_text(path)
    try:
        node = _Composer(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        problem, line = _syntax_problem(error)
        raise config_error(path, line, "syntax", problem) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise config_error(path, line, "syntax", f"character {error.character:#x} is not allowed; remove it") from None
    except (ValueError, OverflowError):
        # PyYAML's own slips: a version of thousands of digits, "\\U" with a number that no character has.
        raise config_error(
            path, None, "syntax", "not valid YAML (a number or an escape is out of range); correct it"
        ) from None
    if node is None:
        return None
    return Value(path=path, key="", line=_line(node), node=node)


def config_error(path: Path, line: int | None, key: str, problem: str) -> ConfigError:
    """An error in the one form that all of them take; ``line`` is None where the file as a whole is meant."""
    place = str(path) if line is None else f"{path}:{line}"
    return ConfigError(one_line(f"{place}: {key}: {problem}"))


def shown(text: str) -> str:
    """A value as a message shows it: quoted, on one line, cut where it is long."""
    return repr(_cut(text))


def _cut(text: str, *, most: int = _SHOWN_CHARACTERS) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            # Bounded, because the path may name a device or a pipe without end.
            data = file.read(SIZE_LIMIT + 1)
    except OSError as error:
        raise config_error(path, None, "file", f"cannot be read ({error.strerror}); check the path") from None
    if len(data) > SIZE_LIMIT:
        raise config_error(path, None, "file", f"is larger than {SIZE_LIMIT} bytes; is it a configuration?")
    try:
        # -sig: Windows editors put a byte order mark before the first key.
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise config_error(path, line, "syntax", f"byte {data[error.start]:#x} is not UTF-8; save as UTF-8") from None


def _syntax_problem(error: yaml.MarkedYAMLError) -> tuple[str, int]:
    """What is wrong and in which line."""
    problem = error.problem or error.context or "cannot be read"
    mark = error.problem_mark or error.context_mark
    context = f"{error.context}, " if error.context else ""
    if isinstance(error, _Refused):
        pass
    elif "'\\t'" in problem:
        problem = "a tab stands where YAML allows only spaces; write spaces"
    elif problem == "but found another document":
        problem = "a second document starts here; keep one document in the file"
    elif problem == "could not find expected ':'":
        problem = "neither a list entry nor 'key: value'; a colon needs a space after it"
        # PyYAML notices at the line after, and gives the start of the text as the context.
        mark = error.context_mark or mark
    else:
        problem = f"not valid YAML ({_cut(f'{context}{problem}', most=_SHOWN_PROBLEM)}); correct it"
    return problem, 1 if mark is None else mark.line + 1


def _unknown(name: str, known: Sequence[str], also: Mapping[str, str]) -> str:
    if missing := _missing_space(name):
        return f"unknown key {shown(name)}; {missing}"
    plain = name.strip().lower().replace("-", "_").removesuffix("_size")
    nearest = [also[plain]] if plain in also else difflib.get_close_matches(plain, known, n=1, cutoff=0.5)
    fix = f"did you mean {nearest[0]}?" if nearest else f"valid keys: {', '.join(known)}"
    return f"unknown key {shown(name)}; {fix}"


def _missing_space(text: str) -> str | None:
    """The fix where a colon without a space after it made ``pp:1`` one word, else None."""
    match = _MISSING_SPACE.fullmatch(text)
    return f"write {shown(f'{match[1]}: {match[2]}')} with a space after the colon" if match else None


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def one_line(text: str) -> str:
    """The text with every character that would break the line, or does not print, as its escape."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
