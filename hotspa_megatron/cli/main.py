"""The ``hotspa`` command: one subcommand per file beside this one. Bad input is one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

_NEEDED: Final = (("numpy", "numpy"), ("PyYAML", "yaml"), ("rich", "rich.console"))
"""Distributions that every subcommand needs, and what is imported of them. This file alone imports without them."""
_SOMETIMES: Final = ("torch", "megatron")
"""What some subcommands import when they run."""
_LONGEST_MESSAGE: Final = 1200
_INTERRUPTED: Final = 130
"""As shells have it for Ctrl-C."""


class _Parser(argparse.ArgumentParser):
    """argparse without abbreviations, and with an error on one line instead of a usage block before it."""

    def __init__(self, **options: Any) -> None:
        # Its subparsers are of this class, too. A mistyped flag must not be taken for another that begins like it.
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{_line(f'{self.prog}: {message}')}; see {self.prog} --help\n")


def _line(message: str) -> str:
    """A message on one line that can be read, whatever was given stands in it: line breaks, 100 KB."""
    from hotspa_megatron.strict_yaml import one_line

    text = one_line(message)
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[:_LONGEST_MESSAGE]}..."


def _missing() -> str | None:
    """What keeps every subcommand from running, and the fix; None where nothing does."""
    for name, module in _NEEDED:
        try:
            importlib.import_module(module)
        except Exception as error:  # half an installation fails in any way
            said = (str(error).splitlines() or [type(error).__name__])[0]
            return f"{name} cannot be imported ({said}); pip install {name}, or mend its installation"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        print("hotspa: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _main(given: Sequence[str]) -> int:
    if (problem := _missing()) is not None:
        print(f"hotspa: {problem}", file=sys.stderr)
        return 2
    # Not before: they import what was looked for.
    from hotspa_megatron.cli import bench, data, doctor, explain, plan, profile, report, simulate, verify

    # What follows the first "--" is another program's command line, which argparse must not look into.
    split = given.index("--") if "--" in given else len(given)
    own, megatron = given[:split], given[split + 1 :]
    parser = _Parser(prog="hotspa", description="Plan and look into training under several parallel strategies.")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    explain.add_command(commands)
    plan.add_command(commands)
    simulate.add_command(commands)
    profile.add_command(commands)
    doctor.add_command(commands)
    bench.add_command(commands)
    data.add_command(commands)
    report.add_command(commands)
    verify.add_command(commands)
    arguments = parser.parse_args(own)
    try:
        arguments.run(arguments, megatron)
        sys.stdout.flush()
    except ValueError as error:
        print(_line(f"hotspa: {error}"), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in _SOMETIMES:
            raise
        print(_line(f"hotspa: {error}, which this command needs; see hotspa doctor"), file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, `head` perhaps, has seen enough; rich, too, exits with 1 then. Without this Python would complain
        # once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
