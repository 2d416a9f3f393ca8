"""``hotspa data``: what a data set in Megatron's indexed format holds, and whether it is whole. Reads no Megatron code.

``lengths`` shows how sequences and tokens are spread over length groups; ``check`` holds the index against itself and
against its data file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hotspa_megatron.cli import charts, tables
from hotspa_megatron.cli.options import numbers
from hotspa_megatron.planning.data_check import check_data
from hotspa_megatron.planning.lengths import GroupShare, LengthHistogram, read_index

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_LENGTHS_EPILOG: Final = """\
A length is a number of input positions, as max_length counts it: a document of L tokens has L - 1.

examples:
  hotspa data lengths data/my_text_document
  hotspa data lengths data/my_text_document --groups 1024,8192 --seq-length 32768 --plot lengths.png
"""
_CHECK_EPILOG: Final = """\
example:
  hotspa data check data/my_text_document && sbatch pretrain.slurm
      exit code 2 and one line where an entry of the index cannot be read
"""
_GROUPS: Final = "512,1024,2048,4096,8192,16384,32768"
_QUANTILES: Final = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
_BAR: Final = 40


def add_command(commands: _SubParsersAction[Any]) -> None:
    """Add ``data`` and its subcommands to the ``hotspa`` command."""
    parser = commands.add_parser(
        "data",
        help="look into a data set: lengths of its sequences, and whether it is whole",
        description="Look into a data set in Megatron's indexed format (PREFIX.idx and PREFIX.bin).",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    lengths = actions.add_parser(
        "lengths",
        help="show how long its sequences are",
        description="Show how sequences and tokens are spread over length groups. Reads PREFIX.idx alone.",
        epilog=_LENGTHS_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    lengths.add_argument("prefix", metavar="PREFIX", help="the data set, as --data-path names it")
    lengths.add_argument(
        "--groups", default=_GROUPS, metavar="N,N", help=f"limits of length groups (default {_GROUPS})"
    )
    lengths.add_argument("--seq-length", type=int, metavar="N", help="split what is longer, as training does")
    lengths.add_argument("--plot", metavar="FILE", help="draw the histogram into FILE.png, .pdf or .svg")
    lengths.add_argument("--json", action="store_true", help="print JSON; lengths in tokens, shares as fractions")
    lengths.set_defaults(run=_run_lengths)
    check = actions.add_parser(
        "check",
        help="hold its index against its data",
        description="Check that every entry of PREFIX.idx can be read from PREFIX.bin.",
        epilog=_CHECK_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("prefix", metavar="PREFIX", help="the data set, as --data-path names it")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=_run_check)


def _refuse_megatron_arguments(megatron_arguments: Sequence[str]) -> None:
    if megatron_arguments:
        raise ValueError("data takes no arguments of Megatron's; remove what follows --")


# ------------------------------------------------------------------------------------------------------------- lengths


def _run_lengths(arguments: argparse.Namespace, megatron_arguments: Sequence[str]) -> None:
    _refuse_megatron_arguments(megatron_arguments)
    limits = numbers(arguments.groups, flag="--groups", rising=True)
    if arguments.plot is not None:
        charts.check(arguments.plot)
    histogram = LengthHistogram.from_index(arguments.prefix)
    if arguments.seq_length is not None:
        if arguments.seq_length < 1:
            raise ValueError(f"--seq-length must be at least 1, not {arguments.seq_length}")
        histogram = histogram.limited(arguments.seq_length, "split")
    # Limits beyond the longest sequence would only add empty groups.
    needed = [limit for limit in limits if limit < histogram.longest]
    groups = histogram.shares([*needed, *limits[len(needed) : len(needed) + 1]])
    if groups[-1].sequences == 0:
        groups = groups[:-1]
    if arguments.plot is not None:
        _plot(histogram, limits, arguments.plot, title=Path(arguments.prefix).name)
    if arguments.json:
        print(json.dumps(_described(histogram, groups), indent=2))
    else:
        _print_lengths(histogram, groups, arguments.prefix)


def _described(histogram: LengthHistogram, groups: Sequence[GroupShare]) -> dict[str, object]:
    return {
        "sequences": histogram.sequences,
        "tokens": histogram.tokens,
        "mean": histogram.mean,
        "shortest": int(histogram.lengths[0]),
        "longest": histogram.longest,
        "quantiles": {f"{share:g}": histogram.quantile(share) for share in _QUANTILES},
        "groups": [asdict(group) for group in groups],
    }


def _print_lengths(histogram: LengthHistogram, groups: Sequence[GroupShare], prefix: str) -> None:
    console = tables.console()
    shown = tables.table("lengths", "sequences", "share", "tokens", "share of tokens", "", left=("lengths", ""))
    for group in groups:
        upper = "" if group.upper is None else f"{group.upper:,}"
        tables.row(
            shown,
            f"{group.lower + 1:,}-{upper}",
            f"{group.sequences:,}",
            f"{group.sequence_share:.1%}",
            f"{group.tokens:,}",
            f"{group.token_share:.1%}",
            "#" * round(_BAR * group.token_share),
        )
    tables.print_table(
        console, f"{prefix}: {histogram.sequences:,} sequences, {histogram.tokens:,} input positions", shown
    )
    shown = tables.table(*(f"{share:.4g}%" for share in (100 * share for share in _QUANTILES)), "longest", left=())
    tables.row(shown, *(f"{histogram.quantile(share):,}" for share in _QUANTILES), f"{histogram.longest:,}")
    tables.print_table(console, f"At most this long (mean {histogram.mean:,.0f})", shown)
    tables.say(console, "Length: input positions, one less than tokens. Sequences without a target are not counted.")


def _plot(histogram: LengthHistogram, limits: Sequence[int], path: str, *, title: str) -> None:
    """Shares of sequences and of tokens by length."""
    edges = np.unique(np.geomspace(int(histogram.lengths[0]), histogram.longest + 1, 61).round())
    series = {}
    for name, weights in (("sequences", histogram.counts), ("tokens", histogram.counts * histogram.lengths)):
        shares, _ = np.histogram(histogram.lengths, bins=edges, weights=weights / weights.sum())
        series[name] = (100 * shares).tolist()
    charts.save_shares(
        path,
        title=f"{title}: {histogram.sequences:,} sequences",
        edges=edges.tolist(),
        series=series,
        limits=[limit for limit in limits if limit <= histogram.longest],
    )


# --------------------------------------------------------------------------------------------------------------- check


def _run_check(arguments: argparse.Namespace, megatron_arguments: Sequence[str]) -> None:
    _refuse_megatron_arguments(megatron_arguments)
    summary = check_data(read_index(arguments.prefix))
    if arguments.json:
        print(json.dumps(asdict(summary), indent=2))
        return
    console = tables.console()
    tables.say(
        console,
        f"{summary.index}: {summary.sequences:,} sequences in {summary.documents:,} documents, {summary.tokens:,} tokens of "
        f"{summary.token_type}, {summary.shortest:,} to {summary.longest:,} long; every entry can be read",
    )
    if summary.without_target:
        tables.say(
            console,
            f"{summary.without_target:,} sequences have fewer than two tokens, so no target ({summary.empty_sequences:,} of "
            "them none at all): each counts as a sample and trains nothing",
        )
    if summary.empty_documents:
        tables.say(console, f"{summary.empty_documents:,} documents hold no sequence")
