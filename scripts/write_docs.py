#!/usr/bin/env python3
"""Writes the tables of docs/ that follow from the code: Megatron's flags, and the keys of the configuration file.

    scripts/write_docs.py            write them
    scripts/write_docs.py --check    exit with 1, naming the pages, where one says something else

A table stands between two comments of its page; what is around them is written by hand.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints
from unittest import mock

from hotspa_megatron import config
from hotspa_megatron.hooks import compat
from hotspa_megatron.hooks.flags import (
    FLAG,
    NEWEST,
    OLDEST,
    OR_WITHOUT,
    TABLE,
    Newer,
    OnGpus,
    Refusal,
    Row,
    settings,
)
from hotspa_megatron.planning.execution import Granularity

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"

MEANINGS: Final = {
    "strategies": "by ascending `max_length`; `[]` is the static run on the same samples and packing | required",
    "strategies[].max_length": "the longest sequence that the entry takes, in input positions | required",
    "strategies[].tp": "tensor-parallel size",
    "strategies[].cp": "context-parallel size; dp = world / (tp * cp * pp)",
    "strategies[].pp": "pipeline stages",
    "strategies[].vpp": "virtual stages of each pipeline stage | home's where tp and pp are home's, else 1",
    "strategies[].tokens_per_microbatch": "packing budget over all cp ranks of a replica, padding included | what one "
    "sequence of max_length takes",
    "strategies[].recompute": "what the backward pass computes again | what Megatron's flags say",
    "strategies[].recompute_layers": "with `recompute: full`: how many layers of a stage | all",
    "home.tp": "the home that the file was made for; a job whose command line has another is refused, as siblings would be "
    "guests and budgets too large. `hotspa plan` writes it | not looked at",
    "home.cp": "the same | not looked at",
    "home.pp": "the same | not looked at",
    "home.vpp": "the same: its virtual stages of each pipeline stage | not looked at",
    "home.recompute": "the same: what its backward pass computes again, for which Megatron's own flags decide | not looked at",
    "home.recompute_layers": "with `recompute: full`: how many layers of a stage, as --recompute-method block has it | all",
    "home.tokens_per_microbatch": "home's packing budget | what one sequence of --seq-length takes",
    "samples": "what a sample is: a document (a conversation under --sft), or Megatron's own sample cut at document ends",
    "overlong": "documents longer than --seq-length. split: pieces that share one token, so no target is lost; conversations "
    "are never cut: error there, unless truncate or drop is written",
    "mock_lengths": "lengths for --mock-data: `wikipedia`, or `lognormal:mean=M,sigma=S,max=N` | Megatron's own",
    "merge": "auto: a length group joins a longer one's strategy in steps where its own would cost more than it saves; "
    "never: always as listed",
    "switch.chunk_mb": "MiB of each of the two buffers that a move may take",
    "switch.prefetch": "whether the next guest's parameters arrive while a guest runs",
    "switch.transport": "what moves travel with; auto: the job's own backend",
    "switch.max_group_mb": "the most MiB of a rank that the communicators of added strategies may take | `null`: no limit",
    "switch.fold_dtype": "what guests' gradients travel home as; `bf16` halves the bytes of fp32 gradients and rounds each "
    "element once, so that the gradient is no longer exact",
    "check_plans": "compare every step's plan across ranks",
    "verify_every": "check, in every step that it divides, that copies of parameters are the same bits, after switches too, and "
    "that the step's gradient is that of home alone: [how](debugging.md#checks-while-it-trains) | `null` or 0: never",
    "get_batch": "`pkg.mod:function` from our micro-batch to what your forward_step expects, where that cannot be read | `null`",
    "trace": "a folder for the log of all steps and the timeline of the first ones, which `hotspa report` draws | `null`",
    "watchdog_s": "seconds without progress after which the log says which rank is behind, where, and who waits for it: "
    "[how to read it](debugging.md#a-job-that-stands-still); at most half of --distributed-timeout-minutes | `120`; `null` or 0: "
    "never",
    "start_sample": "where the checkpoint counts another kind of sample (stock's is megatron): how many of this "
    "job's kind count as consumed; [when](running-jobs.md#from-stock-to-documents) | `null`: such a checkpoint is refused",
    "allow_untested": "what may run although the authors never ran it",
}
"""What each key means; after a bar its default, where that is not a value."""


def keys() -> str:
    """The table of docs/configuration.md."""
    lines = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for key, kind, default in _keys():
        meaning, _, said = MEANINGS[key].partition(" | ")
        values = "a whole number of at least 0" if key == "start_sample" else _values(kind)
        lines.append(f"| `{key}` | {values} | {said or _default(default)} | {meaning} |")
    lines += ["", "Understood and refused:", ""]
    lines += [f"- `strategies[].{name}`: {why}" for name, why in config._STRATEGY_REFUSED.items()]
    return "\n".join(lines)


def _keys() -> Iterator[tuple[str, Any, Any]]:
    """Every key that the reader knows, its type and its default."""
    parts = {
        "strategies": ("strategies[].", config._STRATEGY_KEYS, config.StrategyConfig),
        "switch": ("switch.", config._SWITCH_KEYS, config.SwitchConfig),
    }
    for top in config._TOP_KEYS:
        if top == "home":
            yield from (
                (f"home.{name}", Granularity if name == "recompute" else int, None) for name in config._HOME_KEYS
            )
            continue
        if top != "switch":
            yield _typed(top, top, config.HotSPaConfig)
        prefix, names, owner = parts.get(top, ("", (), config.HotSPaConfig))
        for name in names:
            if name == "recompute":
                yield f"{prefix}{name}", Granularity, None
            elif name == "recompute_layers":
                yield f"{prefix}{name}", int, None
            else:
                yield _typed(f"{prefix}{name}", name, owner)


def _typed(key: str, name: str, owner: Any) -> tuple[str, Any, Any]:
    field = next(each for each in dataclasses.fields(owner) if each.name == name)
    return key, get_type_hints(owner)[name], field.default


def _values(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(kind))
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        return "a list of entries" if dataclasses.is_dataclass(inner) else f"a list of {_values(inner)}"
    options = [each for each in get_args(kind) if each is not type(None)]
    if options:
        return _values(options[0])
    return {int: "a whole number of at least 1", bool: "`true`, `false`", str: "text"}[kind]


def _default(default: Any) -> str:
    if default is dataclasses.MISSING or default is None:
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{list(default) if isinstance(default, tuple) else default}`"


def flags() -> str:
    """The tables of docs/flags.md."""
    parts = [f"Tested with megatron-core {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}."]
    for title, rows in TABLE:
        parts += [f"### {title}", "| flags | | |\n| --- | --- | --- |\n" + "\n".join(map(_row, rows))]
    return "\n\n".join(parts)


def _row(row: Row) -> str:
    if isinstance(row, Newer):
        return f"| megatron-core {row.example} | refused | not run; `{_shown(_said_of(row.example))}` |"
    since = {"": "", "dev": " (Megatron's branch `dev`)"}.get(row.since, f" (from {row.since} on)")
    if isinstance(row, Refusal):
        not_run = "written, not run; " if row.unless else ""
        return f"| `{row.example}`{since} | refused | {not_run}`{_shown(row.line(''))}` |"
    named = " ".join(f"`{each}`" for each in settings(row.flags)) + since
    if isinstance(row, OnGpus):
        without = "without " if row.left_out else ""
        return f"| {without}{named} | GPU only | written, not run{f'; {row.note}' if row.note else ''} |"
    until = f" (before {row.until})" if row.until else ""
    return f"| {named}{until} | works | {f'{row.note}; ' if row.note else ''}tests/{row.test} |"


def _shown(line: str) -> str:
    """A line that a job ends with, without what all of them end in."""
    return line.removesuffix(OR_WITHOUT).removesuffix(f" ({FLAG} is set)")


def _said_of(release: str) -> str:
    """What a job under this release of megatron-core ends with."""
    with mock.patch.object(compat, "version", return_value=release):
        try:
            compat.check_tested()
        except ValueError as error:
            return str(error)
    raise ValueError(f"megatron-core {release} is not refused, and the table says it is")


def page(text: str, name: str, table: str) -> str:
    """A page with its table put between the comments."""
    begin, end = f"<!-- {name}: made by scripts/write_docs.py -->", f"<!-- end of {name} -->"
    found = re.fullmatch(f"(.*{re.escape(begin)}\n).*(\n{re.escape(end)}.*)", text, re.DOTALL)
    if found is None:
        raise ValueError(f"the comments {begin} and {end} are missing")
    return f"{found[1]}{table}{found[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where a page is not as it would be"
    )
    check = parser.parse_args().check
    stale = []
    for path, name, table in (
        (DOCS / "configuration.md", "keys", keys()),
        (DOCS / "flags.md", "flags", flags()),
    ):
        text = path.read_text(encoding="utf-8")
        made = page(text, name, table)
        if made != text:
            stale.append(path)
            if not check:
                path.write_text(made, encoding="utf-8")
    for path in stale:
        sys.stdout.write(f"{path}: {'is not what the code says; run scripts/write_docs.py' if check else 'written'}\n")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
