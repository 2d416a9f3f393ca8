"""``hotspa bench step``: whole training steps, ours beside all static strategies that hold the longest sequence under one
limit of tokens per rank.

The limit counts tokens of a micro-batch over tp * cp. A pipeline divides no further: of its pp micro-batches in flight a
rank has the pp-th part of the layers. Where many strategies fit, a first step drops the slow ones.

Every contender is a training of its own, Megatron's loop and optimizer included. They take turns within one run, and all
train the same documents from the same weights, so losses and gradient norms must be equal step by step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from hotspa_megatron.cli import tables
from hotspa_megatron.cli.described_run import whole
from hotspa_megatron.cli.local_ranks import RanksFailed, World
from hotspa_megatron.cli.megatron_args import installed_megatron
from hotspa_megatron.cli.step_contenders import Case, Contender, LineUp, chosen_of, drawn_lengths, line_up, tensor_only
from hotspa_megatron.cli.step_measurement import Taken, measure
from hotspa_megatron.strategy import Strategy

_EPILOG: Final = """\
examples:
  hotspa bench step --ranks 4
      the case whose goals are known: 4 layers of 256, lengths of Wikipedia cut at 2,048, 512 tokens per rank
  hotspa bench step --ranks 4 --config hotspa.yaml --home tp2-cp2 --lengths data/my_text_document
      your own configuration on your own lengths
  hotspa bench step --ranks 4 --max-tokens-per-rank 1658 --only static,ours
      every static strategy that fits, pipelines too, and ours

Exit code: 0; 1 where losses or gradient norms differ or a rank fails; 3 where times vary too much, or are too few, to be judged.
"""
_SCRIPT: Final = Path(__file__).resolve().parents[2] / "examples" / "pretrain_small.py"
_SCRIPT_NEEDS: Final = (0, 19)
_MOST_SPREAD: Final = 0.25
"""(max - min) / median of a contender's step times above which no ratio is judged; nor is it of a single one."""
_LOSS_TOLERANCE: Final = 1e-5
_NORM_TOLERANCE: Final = 1e-4
"""Relative differences that fp32 sums in another order may have."""


def add_part(parts: Any) -> None:
    """Add ``step`` to ``hotspa bench``."""
    parser = parts.add_parser(
        "step",
        help="train steps under one strategy, and by length groups",
        description="Train the same steps under static strategies and by length groups, in turns, and compare.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="hotspa bench step --ranks N [--config FILE] [--home S] [--lengths L] [--contender S] [--json]",
    )
    number = {"metavar": "N"}
    parser.add_argument("--ranks", **number, help="ranks to start here; under torchrun, those that it started")
    parser.add_argument("--max-tokens-per-rank", default="512", **number, help="stands for GPU memory (512)")
    parser.add_argument("--seq-length", default="2048", **number, help="longer documents are cut (2048)")
    parser.add_argument(
        "--lengths", default="wikipedia", metavar="L", help="wikipedia, lognormal:..., an index or a list"
    )
    parser.add_argument(
        "--overlong", default="truncate", choices=("split", "truncate", "drop"), help="longer documents"
    )
    parser.add_argument("--sequences", default="32", **number, help="documents per step (32)")
    parser.add_argument(
        "--full-sequences", default="4", **number, help="full-length sequences of home only and stock (4)"
    )
    parser.add_argument("--home", default=None, metavar="S", help="home of ours, as tp2-cp2 (cpN over all ranks)")
    parser.add_argument(
        "--config", metavar="FILE", help="configuration of ours (default: cp doubled as lengths double)"
    )
    parser.add_argument("--layers", default="4", **number, help="layers (4)")
    parser.add_argument("--hidden", default="256", **number, help="hidden size (256)")
    parser.add_argument("--rounds", default="7", **number, help="steps of every contender that count (7)")
    parser.add_argument("--time-limit", default="840", metavar="S", help="start no round that would end later (840)")
    parser.add_argument(
        "--contender",
        action="append",
        default=[],
        metavar="S",
        help="a static strategy to measure however slow, as tp2-cp2-sp",
    )
    parser.add_argument("--only", metavar="A,B", help="contenders to run; static stands for all static strategies")
    parser.add_argument(
        "--script", default=str(_SCRIPT), metavar="FILE", help="training script (examples/pretrain_small.py)"
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="which lengths are drawn (1234)")
    parser.add_argument("--json", action="store_true", help="print JSON; seconds, bytes, counts")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, megatron_arguments: Sequence[str]) -> None:
    """Measure and print; ``ValueError`` for bad input."""
    if megatron_arguments:
        raise ValueError("bench step takes no arguments of Megatron's; remove what follows --")
    world = World.of(whole("--ranks", arguments.ranks) if arguments.ranks else None)
    case = _case(arguments, world.size)
    entered = line_up(case)
    if arguments.only:
        names = arguments.only.split(",")
        if lacking := [name for name in case.named if not {name, "static"} & set(names)]:
            raise ValueError(f"--only: lacks {lacking[0]}, which --contender names; add it, or remove --contender")
        entered = chosen_of(entered, names)
    rounds, limit = whole("--rounds", arguments.rounds), whole("--time-limit", arguments.time_limit)

    def say(text: str) -> None:
        if world.first:
            print(text, file=sys.stderr, flush=True)

    try:
        taken, dropped = measure(case, entered.contenders, world, rounds=rounds, limit_s=limit, say=say)
    except RanksFailed as error:
        print(f"hotspa: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if not world.first:
        return
    entered = replace(entered, left_out=(*entered.left_out, *dropped))
    result = summary(case, entered, taken)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        _print(case, entered, taken, result)
    if result["different"]:
        for line in result["different"]:
            print(f"hotspa: {line}", file=sys.stderr)
        raise SystemExit(1)
    if result["too_noisy"]:
        raise SystemExit(3)


def _case(options: argparse.Namespace, ranks: int) -> Case:
    hidden, limit = whole("--hidden", options.hidden), whole("--max-tokens-per-rank", options.max_tokens_per_rank)
    seq_length = whole("--seq-length", options.seq_length)
    if hidden % 64:
        raise ValueError(f"--hidden: {hidden} is no multiple of 64, which heads and tensor parallelism take here")
    if limit * ranks < seq_length:
        raise ValueError(
            f"--max-tokens-per-rank: {limit} tokens on each of {ranks} ranks cannot hold a sequence of {seq_length}; give "
            f"at least {-(-seq_length // ranks)}, or a smaller --seq-length"
        )
    script = Path(options.script)
    if not os.path.isfile(script):  # Path.is_file raises where a folder may not be entered
        raise ValueError(f"--script: {script}: no such file; give a training script such as pretrain_gpt.py")
    release = installed_megatron()
    if script == _SCRIPT and release is not None and release < _SCRIPT_NEEDS:
        needed, here = (".".join(map(str, each)) for each in (_SCRIPT_NEEDS, release))
        raise ValueError(
            f"--script: {script} is written for megatron-core {needed}, and here is {here}; give the pretrain_gpt.py of that "
            "release"
        )
    config = None if options.config is None else Path(options.config)
    if config is not None and options.home is None:
        raise ValueError("--home: missing; --config needs home's sizes, as Megatron's command line would give them")
    return Case(
        ranks=ranks,
        layers=whole("--layers", options.layers),
        hidden=hidden,
        ffn=hidden * 2,
        heads=hidden // 32,
        query_groups=hidden // 64,
        vocabulary=1024,
        seq_length=seq_length,
        max_tokens_per_rank=limit,
        lengths=options.lengths,
        overlong=options.overlong,
        sequences=whole("--sequences", options.sequences),
        full_sequences=whole("--full-sequences", options.full_sequences),
        home=_strategy(options.home or f"cp{ranks}", ranks),
        config=config,
        script=script.resolve(),
        seed=options.seed,
        named=tuple(options.contender),
    )


def _strategy(text: str, ranks: int) -> Strategy:
    from hotspa_megatron.cli.bench import read_strategy

    return read_strategy(text, flag="--home", ranks=ranks)


def summary(case: Case, entered: LineUp, taken: dict[str, Taken]) -> dict[str, Any]:
    """Everything ``--json`` prints. Ratios are None where a side is missing; ``too_noisy``: who cannot be judged by its times."""
    chosen = entered.contenders
    wall = {name: statistics.median(each.wall_s) for name, each in taken.items() if each.wall_s}
    cpu = {name: statistics.median(each.cpu_s) for name, each in taken.items() if each.cpu_s}
    fixed = [each for each in chosen if each.static and each.name in wall]
    static = min((each.name for each in fixed), key=lambda name: wall[name], default=None)
    tensor = min((each.name for each in fixed if tensor_only(each)), key=lambda name: wall[name], default=None)
    ours = wall.get("ours")

    def over_ours(name: str | None) -> float | None:
        return None if ours is None or name is None or name not in wall else wall[name] / ours

    share = None
    if static is not None and ours is not None and "ceiling" in wall:
        share = (wall[static] - ours) / (wall[static] - wall["ceiling"])
    both = "home_only" in cpu and "stock" in cpu
    return {
        "case": {
            "ranks": case.ranks,
            "layers": case.layers,
            "hidden": case.hidden,
            "seq_length": case.seq_length,
            "max_tokens_per_rank": case.max_tokens_per_rank,
            "lengths": case.lengths,
            "sequences": case.sequences,
            "tokens": int(drawn_lengths(case).sum()),
            "home": str(case.home),
            "ours": next((each.config for each in chosen if each.name == "ours"), None),
        },
        "contenders": {
            name: {
                "wall_s": wall[name],
                "cpu_s": cpu[name],
                "first_step_s": each.first_s,
                "steps_s": each.wall_s,
                "spread": each.spread,
                "others": each.others,
                "taken_again": each.again,
                "losses": each.losses,
                "grad_norms": each.grad_norms,
            }
            for name, each in taken.items()
            if name in wall
        },
        "left_out": [asdict(each) for each in entered.left_out],
        "planned_static": entered.planned,
        "static": static,
        "tp_static": tensor,
        "ours_s": ours,
        "static_s": None if static is None else wall[static],
        "tp_static_s": None if tensor is None else wall[tensor],
        "unpacked_s": wall.get("unpacked"),
        "ceiling_s": wall.get("ceiling"),
        "home_only_s": wall.get("home_only"),
        "stock_s": wall.get("stock"),
        "ratio_static": over_ours(static),
        "ratio_tp_static": over_ours(tensor),
        "ratio_unpacked": over_ours("unpacked"),
        "ceiling_share": share,
        "ratio_home_only": cpu["home_only"] / cpu["stock"] if both else None,
        "home_only_extra": _extra(taken) if both else None,
        "switch_fraction": statistics.median(taken["ours"].moving_s) / ours if ours else None,
        "collectives": {n: {key: v["count"] for key, v in each.traffic.items()} for n, each in taken.items()},
        "bytes": {n: {key: v["bytes"] for key, v in each.traffic.items()} for n, each in taken.items()},
        "different": _different(chosen, taken),
        "too_noisy": sorted(
            name
            for name, each in taken.items()
            if len(each.wall_s) == 1 or (each.wall_s and each.spread > _MOST_SPREAD)
        ),
    }


def _extra(taken: dict[str, Taken]) -> dict[str, dict[str, float]]:
    """What home only sends per step beside what stock Megatron does; negative where it sends less."""
    ours, stock, nothing = taken["home_only"].traffic, taken["stock"].traffic, {"count": 0, "bytes": 0}
    found = {}
    for key in sorted({*ours, *stock}):
        one, other = ours.get(key, nothing), stock.get(key, nothing)
        if one != other:
            found[key] = {what: one[what] - other[what] for what in ("count", "bytes")}
    return found


def _different(chosen: Sequence[Contender], taken: dict[str, Taken]) -> list[str]:
    """Where losses or gradient norms of contenders on the same sequences are not the same: a line each."""
    lines = []
    for full in (False, True):
        names = [each.name for each in chosen if each.full == full]
        for what, tolerance in (("losses", _LOSS_TOLERANCE), ("grad_norms", _NORM_TOLERANCE)):
            for name in names[1:]:
                # Steps that were disturbed were taken again, so that some have taken more than others.
                values = getattr(taken[names[0]], what), getattr(taken[name], what)
                one, other = (np.array(each[: min(map(len, values))]) for each in values)
                # Written so that a value that is no number counts as a difference.
                off = ~(np.abs(one - other) <= tolerance * np.abs(one))
                if off.any():
                    step = int(np.flatnonzero(off)[0])
                    lines.append(
                        f"{what} of {name} differ from those of {names[0]} in step {step + 1}: {other[step]:.8g}, "
                        f"not {one[step]:.8g} (allowed: {tolerance:g} of it)"
                    )
    return lines


def _print(case: Case, entered: LineUp, taken: dict[str, Taken], result: dict[str, Any]) -> None:
    console = tables.console()
    chosen = [each for each in entered.contenders if taken[each.name].wall_s]
    shown = tables.table(
        "training", "strategy", "wall s", "CPU s", "spread", "again", "loss", "grad norm", left=("training", "strategy")
    )
    for each in chosen:
        of = taken[each.name]
        strategy = f"{each.home}{' sp' if each.sequence_parallel else ''}{' (no limit)' if each.beyond_limit else ''}"
        wall, cpu = statistics.median(of.wall_s), statistics.median(of.cpu_s)
        last = of.again, f"{of.losses[0]:.6f}", f"{of.grad_norms[0]:.5f}"
        tables.row(shown, each.name, strategy, f"{wall:.3f}", f"{cpu:.2f}", f"{of.spread:.0%}", *last)
    tables.print_table(
        console,
        f"{case.ranks} ranks, {case.layers} layers of {case.hidden}, {result['case']['tokens']:,} tokens in {case.sequences} "
        f"sequences of {case.lengths} cut at {case.seq_length:,}, at most {case.max_tokens_per_rank:,} tokens per rank; medians",
        shown,
    )
    if entered.left_out:
        shown = tables.table("strategy", "why it was not measured", left=("strategy", "why it was not measured"))
        for out in entered.left_out:
            tables.row(shown, out.name, out.reason)
        tables.print_table(console, "Static strategies left out", shown)
    if entered.planned is not None:
        tables.say(console, f"The file calls {entered.planned} the best static strategy.")
    shown = tables.table("training", "operation", "per step", "MB", left=("training", "operation"))
    for each in chosen:
        for key, entry in taken[each.name].traffic.items():
            tables.row(shown, each.name, key, f"{entry['count']:,.0f}", f"{entry['bytes'] / 1e6:,.2f}")
    tables.print_table(console, "Sent per step", shown)
    if result["home_only_extra"] is not None:
        more = "; ".join(
            f"{key}: {e['count']:+.0f}, {e['bytes']:+,.0f} bytes" for key, e in result["home_only_extra"].items()
        )
        tables.say(
            console,
            f"Home only beside stock, both on full sequences with this package's attention: {more or 'nothing'}.",
        )
    if result["different"]:
        tables.say(console, "No times are compared: the trainings differ.")
    elif result["too_noisy"]:
        tables.say(
            console,
            f"Not judged: step times of {', '.join(result['too_noisy'])} vary by more than {_MOST_SPREAD:.0%} of their median, "
            "or there is only one.",
        )
    else:
        for key in ("ratio_static", "ratio_tp_static", "ratio_unpacked", "ceiling_share", "ratio_home_only"):
            if result[key] is not None:
                tables.say(console, f"{key}: {result[key]:.3f}")
