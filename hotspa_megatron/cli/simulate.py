"""``hotspa simulate``: modelled step times of a run, or of a suite of settings beside other systems."""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from hotspa_megatron.cli import charts, described_run, options, progress, tables
from hotspa_megatron.planning.simulate import (
    Cell,
    Lever,
    SimulatedStep,
    load_suite,
    other_systems,
    run_suite,
    simulate_run,
    suite_names,
)
from hotspa_megatron.planning.simulate import described as described_groups

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_EPILOG: Final = """\
examples:
  hotspa simulate --suite a800
      HotSPa's 32 settings on A800 nodes: best static, ours, HotSPa's tables, hybrid and dynamic context parallelism
  hotspa simulate --hardware h100 --world-size 64 --lengths wikipedia --steps 20 -- $GPT_ARGS
      the steps of one run under the strategies that `hotspa plan` would choose, and what other systems would take

Everything is modelled from published and assumed numbers; nothing is run. Relative figures are worth more than seconds.
"""
_SYSTEMS: Final = (
    ("static", "static_s"),
    ("first fit", "static_first_fit_s"),
    ("ours", "hotspa_s"),
    ("HotSPa tables", "hotspa_tables_s"),
    ("hybrid CP", "hybrid_cp_s"),
    ("dynamic CP", "dynamic_cp_s"),
    ("ceiling", "ceiling_s"),
)


_MEANS: Final = (
    ("static", "static_s", "the best strategy, packed alike"),
    ("home, unpacked", "home_unpacked_s", "the home of ours, one sequence per micro-batch"),
    ("ours", "hotspa_s", "length groups"),
    ("hybrid CP", "hybrid_cp_s", "Megatron's hybrid context parallelism, one sequence per micro-batch, as in its code"),
    ("dynamic CP", "dynamic_cp_s", "the ideal of it, packed, that nobody schedules"),
    ("ceiling", "ceiling_s", "the kernels alone"),
)


def add_command(commands: _SubParsersAction[Any]) -> None:
    """Add ``simulate`` to the ``hotspa`` command."""
    parser = commands.add_parser(
        "simulate",
        help="model the steps of a run on a cluster that is not at hand",
        description="Model step times: a suite of settings beside other systems, or the steps of one run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="hotspa simulate --suite NAME | --hardware H --world-size N (--corpus P | --lengths F) [-- MEGATRON ARGS]",
    )
    parser.add_argument("--suite", metavar="NAME", help=f"a suite of settings: {', '.join(suite_names())}")
    parser.add_argument(
        "--without",
        choices=get_args(Lever),
        help="run the suite without virtual stages, or without micro-batches larger than a group's longest sequence",
    )
    described_run.add_options(parser, required=False)
    parser.add_argument("--steps", default="8", metavar="N", help="steps of a run (default 8)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the sequences drawn (default 1)")
    parser.add_argument("--jobs", metavar="N", help="processes for a suite (default: the cores)")
    parser.add_argument("--json", action="store_true", help="print JSON; seconds, tokens")
    parser.add_argument("--csv", metavar="FILE", help="write the table to FILE as well")
    parser.add_argument("--plot", metavar="FILE", help="draw it to FILE (.png, .svg, .pdf); needs matplotlib")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, megatron_arguments: Sequence[str]) -> None:
    """Simulate and print; ``ValueError`` for bad input, before the work where that can be."""
    options.seed(arguments.seed)
    if arguments.csv is not None:
        options.writable(arguments.csv, flag="--csv")
    if arguments.plot is not None:
        charts.check(arguments.plot)
    if arguments.suite is None:
        if arguments.without is not None:
            raise ValueError("--without: is for a suite; add --suite")
        _run_steps(arguments, megatron_arguments)
        return
    given = [
        name
        for name in ("hardware", "world_size", "corpus", "lengths", "from_script", "sequences")
        if getattr(arguments, name)
    ]
    if given or megatron_arguments:
        what = f"--{given[0].replace('_', '-')}" if given else "Megatron's arguments"
        raise ValueError(f"--suite: says all of model, cluster and lengths; remove {what}")
    suite = load_suite(arguments.suite)
    jobs = described_run.whole("--jobs", arguments.jobs) if arguments.jobs else os.cpu_count() or 1
    cells = list(
        progress.counted(
            run_suite(suite, jobs=jobs, without=arguments.without), what="settings", total=len(suite.settings)
        )
    )
    if arguments.csv:
        _write_csv(arguments.csv, [_flat(cell) for cell in cells])
    if arguments.plot:
        charts.save_bars(
            arguments.plot,
            title=f"Seconds per step over the kernels' own time, {suite.hardware.name} (modelled)",
            labels=[f"{cell.model[6:]}@{cell.gpus} {cell.context // 1024}K {cell.data[:4]}" for cell in cells],
            series={
                name: [(getattr(cell, field) or 0.0) / cell.ceiling_s for cell in cells]
                for name, field in _SYSTEMS
                if field not in ("static_first_fit_s", "ceiling_s")
            },
        )
    if arguments.json:
        described = {
            "suite": suite.name,
            "without": arguments.without,
            "hardware": suite.hardware.name,
            "assumed": list(suite.hardware.assumed),
            "cells": [asdict(cell) for cell in cells],
        }
        print(json.dumps(described, indent=2))
    else:
        _print_suite(cells, suite.hardware.name, suite.hardware.assumed, without=arguments.without)


def _print_suite(cells: Sequence[Cell], hardware: str, assumed: Sequence[str], *, without: Lever | None) -> None:
    console = tables.console()
    names = [name for name, _ in _SYSTEMS]
    shown = tables.table("setting", *names, "static/ours", "ours/ceiling", "switch", left=("setting",))
    for cell in cells:
        seconds = [getattr(cell, field) for _, field in _SYSTEMS]
        tables.row(
            shown,
            f"{cell.model[6:]}@{cell.gpus} {cell.context // 1024}K {cell.data}",
            *("-" if value is None else f"{value:.2f}" for value in seconds),
            f"{cell.static_s / cell.hotspa_s:.2f}x",
            f"{cell.hotspa_s / cell.ceiling_s:.2f}x",
            f"{cell.switch_fraction:.1%}",
        )
    left_out = f", without {without}" if without else ""
    tables.print_table(console, f"Seconds per step on {hardware} (modelled){left_out}", shown)
    gains = [cell.static_s / cell.hotspa_s for cell in cells]
    tables.say(
        console,
        f"Against the best static strategy with the same packing: {min(gains):.2f}x to {max(gains):.2f}x, median "
        f"{statistics.median(gains):.2f}x.",
    )
    tables.say(
        console, "first fit: static with random rows of whole contexts. dynamic CP: an ideal that nobody schedules."
    )
    tables.say(console, f"Assumed, without a source: {', '.join(assumed)}.")


def _run_steps(arguments: argparse.Namespace, megatron_arguments: Sequence[str]) -> None:
    described_run.require(arguments)
    count = described_run.whole("--steps", arguments.steps, most=described_run.MOST_COUNTED)
    described = described_run.read_run(arguments, megatron_arguments)
    with progress.waiting("choosing strategies"):
        planned = described.plan()
    simulated = simulate_run(
        planned,
        described.histogram,
        shape=described.shape,
        hardware=described.hardware,
        steps=count,
        sequences_per_step=described.sequences_per_step,
        seed=arguments.seed,
    )
    steps = list(progress.counted(simulated, what="steps", total=count))
    with progress.waiting("other systems"):
        others = other_systems(
            planned,
            described.histogram,
            shape=described.shape,
            hardware=described.hardware,
            steps=count,
            sequences_per_step=described.sequences_per_step,
            seed=arguments.seed,
            optimizer_bytes=described.optimizer_bytes,
        )
    ours = statistics.fmean(step.time.total for step in steps)
    static = statistics.fmean(step.static.total for step in steps)
    means: dict[str, float | None] = {"static_s": static, "hotspa_s": ours, **asdict(others)}
    rows = [_step_row(step) for step in steps]
    if arguments.csv:
        _write_csv(arguments.csv, rows)
    if arguments.plot:
        charts.save_lines(
            arguments.plot,
            title=f"Seconds per step on {described.world_size} x {described.hardware.name} (modelled)",
            series={"static": [step.static.total for step in steps], "ours": [step.time.total for step in steps]},
        )
    groups = described_groups(planned.groups)
    if arguments.json:
        said = {"groups": groups, "static": str(planned.static.execution), "steps": rows, "means": means}
        print(json.dumps(said, indent=2))
        return
    console = tables.console()
    shown = tables.table("step", "tokens", "segments", "static s", "ours s", "gain", "switch s", "fold s", left=())
    for step in steps:
        gain = step.static.total / step.time.total
        moves = (f"{step.time.switch:.3f}", f"{step.time.fold:.3f}")
        tables.row(
            shown,
            step.step,
            f"{step.tokens:,}",
            step.segments,
            f"{step.static.total:.3f}",
            f"{step.time.total:.3f}",
            f"{gain:.2f}x",
            *moves,
        )
    tables.print_table(console, f"{described.world_size} x {described.hardware.name} (modelled)", shown)
    tables.say(console, f"ours: {'; '.join(groups)}")
    tables.say(console, f"static: {planned.static.execution}, with the same packing")
    shown = tables.table("system", "s", "over ours", "", left=("system", ""))
    for name, field, what in _MEANS:
        value = means[field]
        cells = ("-", "-") if value is None else (f"{value:.3f}", f"{value / ours:.2f}x")
        tables.row(shown, name, *cells, what)
    tables.print_table(console, "Seconds per step beside other systems, means over these steps (modelled)", shown)


def _step_row(step: SimulatedStep) -> dict[str, object]:
    return {
        "step": step.step,
        "sequences": step.sequences,
        "tokens": step.tokens,
        "segments": step.segments,
        "static_s": step.static.total,
        "hotspa_s": step.time.total,
        **{f"{each.name}_s": getattr(step.time, each.name) for each in fields(step.time) if each.name != "total"},
    }


def _flat(cell: Cell) -> dict[str, object]:
    return {**asdict(cell), "groups": "; ".join(cell.groups)}


def _write_csv(path: str, rows: Sequence[Mapping[str, object]]) -> None:
    try:
        with Path(path).open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ValueError(f"--csv: {path}: {error.strerror}") from None
