"""``hotspa plan``: choose thresholds, strategies and home for a run, and write the configuration with what to expect of it."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hotspa_megatron.cli import charts, described_run, progress, tables
from hotspa_megatron.cli.described_run import DescribedRun
from hotspa_megatron.cli.hotspa_table import HotSPaTable
from hotspa_megatron.cli.megatron_args import read_command_line
from hotspa_megatron.config import load_config, resolve
from hotspa_megatron.hooks.flags import conflicts
from hotspa_megatron.planning import plan_file
from hotspa_megatron.planning.home_flags import FlagChange
from hotspa_megatron.planning.memory_model import GIB
from hotspa_megatron.planning.plan_file import home_recompute_of, kind_of
from hotspa_megatron.planning.search import PlannedRun
from hotspa_megatron.strategy import Kind

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from rich.console import Console

_EPILOG: Final = """\
examples:
  hotspa plan --hardware h100 --world-size 64 --corpus data/my_text_document -- $GPT_ARGS
      choose everything, write hotspa.yaml, and say which parallel sizes to give Megatron
  hotspa plan --hardware a800-80 --world-size 16 --lengths wikipedia --from-script run.sh --keep-home
      keep the script's own parallel sizes as home

Times and memory are modelled from the cluster's description, not measured. `hotspa explain` checks what was written.
"""
_NEAREST: Final = 3
"""Of what memory rules out, so many of each kind are shown."""
_LEFT: Final = ("lengths", "strategy", "kind")


@dataclass(frozen=True, kw_only=True)
class WrittenPlan:
    """A plan and the file that says it."""

    planned: PlannedRun
    text: str
    path: Path


def add_command(commands: _SubParsersAction[Any]) -> None:
    """Add ``plan`` to the ``hotspa`` command."""
    parser = commands.add_parser(
        "plan",
        help="choose strategies for a model, a cluster and a corpus",
        description="Choose thresholds, strategies and home, and write the configuration file.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="hotspa plan --hardware H --world-size N (--corpus P | --lengths F) [-- MEGATRON ARGS | --from-script FILE]",
    )
    described_run.add_options(parser)
    parser.add_argument("--output", "-o", default="hotspa.yaml", metavar="FILE", help="default hotspa.yaml")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument("--keep-home", action="store_true", help="keep the command line's parallel sizes")
    parser.add_argument("--max-tp", metavar="N", help="largest tp (default: the GPUs of a node)")
    parser.add_argument("--max-cp", metavar="N", help="largest cp; 1 where context parallelism is not available")
    parser.add_argument(
        "--table",
        nargs=2,
        metavar=("SIZES", "STRATEGIES"),
        help="choose nothing: write HotSPa's table, as '32768 16384 4096 0' '1,4,2 8,1,1 2,2,2' (dp,tp,pp)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; seconds, bytes, tokens")
    parser.add_argument("--plot", metavar="FILE", help="draw step time and memory to FILE; needs matplotlib")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, megatron_arguments: Sequence[str]) -> None:
    """Plan, write and print; ``ValueError`` for bad input, with nothing written."""
    path = Path(arguments.output)
    try:
        there = path.exists()
    except OSError as error:
        raise ValueError(f"--output: {path}: {error.strerror}") from None
    if there and not arguments.force:
        raise ValueError(f"--output: {path} is there already; give another name, or --force")
    if arguments.plot is not None:
        charts.check(arguments.plot)
    described = described_run.read_run(arguments, megatron_arguments)
    if arguments.table:
        _write_table(arguments, described, path)
        return
    with progress.waiting("choosing strategies"):
        planned = described.plan(
            keep_home=arguments.keep_home,
            max_tp=described_run.whole("--max-tp", arguments.max_tp) if arguments.max_tp else None,
            max_cp=described_run.whole("--max-cp", arguments.max_cp) if arguments.max_cp else None,
        )
    text = as_yaml(planned, described)
    _check(text, _change(planned, described), described, path)
    if arguments.plot is not None:  # first, as it is what more can go wrong with
        _plot(arguments.plot, planned)
    _write(path, text)
    if arguments.json:
        print(json.dumps(_described(planned, described, path), indent=2))
    else:
        _print(planned, described, path)


def _write_table(arguments: argparse.Namespace, described: DescribedRun, path: Path) -> None:
    """A table of HotSPa's as a file of ours, held against the model that it is for."""
    sizes, triples = arguments.table
    table = HotSPaTable.read(sizes, triples, world_size=described.world_size)
    if table.longest != described.shape.seq_length:
        raise ValueError(
            f"--table: its longest sequences are of {table.longest} tokens, but --seq-length is {described.shape.seq_length}; "
            f"give Megatron --seq-length {table.longest}"
        )
    change = described.change_to(table.home, None)
    _check(table.as_yaml(), change, described, path)
    _write(path, table.as_yaml())
    refused = [row.line for row in conflicts(described.arguments)]
    if arguments.json:
        entries = [{"max_length": longest, "strategy": str(each)} for longest, each in table.entries]
        said = {"output": str(path), "home": str(table.home), **_flags(change), "groups": entries}
        print(json.dumps({**said, "conflicts": refused}, indent=2))
        return
    console = tables.console()
    tables.say(console, f"Home is {table.home}. {_give(change)}")
    for line in refused:
        tables.say(console, f"A job with these arguments would not start: {line}")
    tables.say(console, f"Wrote {path}.")


def as_yaml(planned: PlannedRun, described: DescribedRun) -> str:
    """The configuration file, with what was expected of it in comments."""
    change = _change(planned, described)
    head = [
        f"Chosen by hotspa plan for {described.world_size} ranks of {described.hardware.name}, from",
        f"{described.lengths_from}, {described.sequences_per_step} sequences per step.",
        f"Megatron's own flags make home: {' '.join(change.give)}",
    ]
    if change.remove:
        head.append(f"and these of the command line have to go: {' '.join(change.remove)}")
    return plan_file.as_yaml(planned, num_layers=described.shape.num_layers, given=described.given, head=head)


def _change(planned: PlannedRun, described: DescribedRun) -> FlagChange:
    """What to change on the command line for this home; of recomputation where it is not the command line's."""
    home = planned.home.execution
    recompute = home_recompute_of(home, num_layers=described.shape.num_layers, given=described.given)
    return described.change_to(home.strategy, recompute)


def _flags(change: FlagChange) -> dict[str, list[str]]:
    return {"megatron_flags": list(change.give), "megatron_flags_to_remove": list(change.remove)}


def _give(change: FlagChange) -> str:
    gone = f", and remove: {' '.join(change.remove)}" if change.remove else ""
    return f"Give Megatron: {' '.join(change.give)}{gone}"


def _same_batch(described: DescribedRun) -> int:
    """Documents that have as many tokens as a step of stock Megatron's, whose samples are all --seq-length long."""
    return math.ceil(described.stock_tokens_per_step / max(described.histogram.mean, 1.0))


def _write(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.new")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise ValueError(f"--output: {path}: {error.strerror}") from None


def _check(text: str, change: FlagChange, described: DescribedRun, path: Path) -> None:
    """Hold the file against the reader and the job that it is for, before it is written where it was asked for."""
    arguments = described_run.changed(described.arguments, change)
    line = read_command_line(arguments, world_size=described.world_size)
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / path.name
        draft.write_text(text, encoding="utf-8")
        try:
            resolve(
                load_config(draft), shape=line.shape, home=line.home, recompute=described_run.recompute_of(arguments)
            )
        except ValueError as error:
            raise ValueError(str(error).replace(str(draft), str(path))) from None


def _described(planned: PlannedRun, described: DescribedRun, path: Path) -> dict[str, object]:
    return {
        "output": str(path),
        "hardware": described.hardware.name,
        "assumed": list(described.hardware.assumed),
        "world_size": described.world_size,
        "sequences_per_step": described.sequences_per_step,
        "tokens_per_step": described.sequences_per_step * described.histogram.mean,
        "stock_tokens_per_step": described.stock_tokens_per_step,
        "global_batch_size_for_stock_tokens": _same_batch(described),
        "home": str(planned.home.execution.strategy),
        **_flags(_change(planned, described)),
        "seconds": asdict(planned.time),
        "static": str(planned.static.execution),
        "static_seconds": asdict(planned.static_time),
        "gain": planned.gain,
        "groups": [
            {
                "max_length": choice.max_length,
                "strategy": str(choice.execution.strategy),
                "kind": kind_of(choice, planned),
                "recompute": choice.execution.recompute,
                "tokens_per_microbatch": choice.tokens_per_microbatch,
                "memory": {**asdict(held), "total": held.total},
            }
            for choice, held in zip(planned.groups, planned.held, strict=True)
        ],
        "conflicts": [row.line for row in conflicts(described.arguments)],
        "refused": [
            {
                "strategy": str(refusal.execution),
                "kind": refusal.kind,
                "needed": refusal.needed,
                "limit": refusal.limit,
                "reason": refusal.reason,
            }
            for refusal in planned.refused
        ],
    }


def _print(planned: PlannedRun, described: DescribedRun, path: Path) -> None:
    console = tables.console()
    home = planned.home.execution
    shown = tables.table("lengths", "strategy", "kind", "tokens/micro-batch", "memory GiB", "limit", left=_LEFT)
    ranges = tables.ranges(choice.max_length for choice in planned.groups)
    for lengths, choice, held in zip(ranges, planned.groups, planned.held, strict=True):
        tables.row(
            shown,
            tables.range_text(lengths),
            choice.execution,
            kind_of(choice, planned),
            f"{choice.tokens_per_microbatch:,}",
            f"{held.total / GIB:.1f}",
            f"{held.limit / GIB:.1f}",
        )
    tables.print_table(console, f"{described.world_size} x {described.hardware.name}, {described.lengths_from}", shown)
    time = planned.time
    tables.say(
        console,
        f"Modelled: {time.total:.3f} s per step of {described.sequences_per_step} sequences (switch {time.switch:.3f}, fold "
        f"{time.fold:.3f}, reductions {time.reduce:.3f}, optimizer {time.optimizer:.3f}).",
    )
    tables.say(
        console,
        f"Best static strategy with the same packing: {planned.static.execution}, {planned.static_time.total:.3f} s. "
        f"Gain {planned.gain:.2f}x.",
    )
    tokens = described.sequences_per_step * described.histogram.mean
    tables.say(
        console,
        f"A step of {described.sequences_per_step} documents has {tokens:,.0f} tokens on average; with --global-batch-size "
        f"{_same_batch(described)} (plan for it with --sequences) it has about {described.stock_tokens_per_step:,}, as stock "
        "Megatron with these flags.",
    )
    change = _change(planned, described)
    if home != described.home or change.remove:
        tables.say(console, f"{_give(change)} (now {described.home})")
    if described.line.optimizer_note is not None:
        tables.say(console, f"Counted as Adam with fp32 state; {described.line.optimizer_note} may take other memory.")
    if planned.refused:
        _print_refused(planned, console)
    for row in conflicts(described.arguments):
        tables.say(console, f"A job with these arguments would not start: {row.line}")
    tables.say(console, f"Assumed, without a source: {', '.join(described.hardware.assumed) or 'nothing'}.")
    tables.say(console, f"Wrote {path}.")


def _print_refused(planned: PlannedRun, console: Console) -> None:
    """How many executions memory rules out as what, and those that lack least."""
    shown = tables.table("as", "ruled out", "nearest", "needs GiB", "limit", left=("as", "nearest"))
    for kind in Kind:
        ruled_out = sorted((each for each in planned.refused if each.kind is kind), key=lambda each: each.needed)
        for place, refusal in enumerate(ruled_out[:_NEAREST]):
            tables.row(
                shown,
                *((str(kind), len(ruled_out)) if place == 0 else ("", "")),
                refusal.execution,
                f"{refusal.needed / GIB:.1f}",
                f"{refusal.limit / GIB:.1f}",
            )
    tables.print_table(console, "Ruled out by memory (--json lists all, with what takes it)", shown)


def _plot(path: str, planned: PlannedRun) -> None:
    charts.save_bars(
        path,
        title="Seconds per step (modelled)",
        labels=["whole step", "switch", "fold", "reductions", "optimizer"],
        series={
            name: [time.total, time.switch, time.fold, time.reduce, time.optimizer]
            for name, time in (("static", planned.static_time), ("ours", planned.time))
        },
    )
