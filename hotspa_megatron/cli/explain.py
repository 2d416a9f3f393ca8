"""``hotspa explain``: what a configuration means for a model and a world, before anything is started.

Prints which lengths run under which strategy, the communicators that takes, the memory that every rank holds, what each
pair of strategies moves, and one step of a corpus, rank by rank.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from hotspa_megatron.cli import charts, options, tables
from hotspa_megatron.cli.described_run import MOST_COUNTED, check_flags, recompute_of, whole, whole_of, world_size_of
from hotspa_megatron.cli.megatron_args import MegatronCommandLine, read_command_line
from hotspa_megatron.cli.moves import moves_between, print_moves
from hotspa_megatron.cli.sample_step import StepShown, plot_step, print_step, sample_step
from hotspa_megatron.config import HotSPaConfig, ResolvedConfig, ResolvedStrategy, load_config, resolve
from hotspa_megatron.hooks.flags import conflicts
from hotspa_megatron.planning.communicators import ASSUMPTION, GroupMemory, Groups, count_groups
from hotspa_megatron.planning.cost_model import CostModel
from hotspa_megatron.planning.hardware import UNKNOWN_DEVICE, hardware_names, load_hardware
from hotspa_megatron.planning.lengths import LengthHistogram
from hotspa_megatron.planning.param_layout import gpt_parameters, model_layout
from hotspa_megatron.planning.step_time import GroupChoice, resolved_model
from hotspa_megatron.strategy import Kind

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_EPILOG: Final = """\
examples:
  hotspa explain hotspa.yaml
      check the file alone
  hotspa explain hotspa.yaml --world-size 16 -- $GPT_ARGS
      check it against the model and show groups, memory and moves; $GPT_ARGS is what pretrain_gpt.py is given
  hotspa explain hotspa.yaml --world-size 16 --lengths data/my_text_document --hardware h100 -- $GPT_ARGS
      and what a step of that corpus would look like, rank by rank
"""
_LEFT: Final = ("lengths", "strategy", "kind", "axes")


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What one rank of a pipeline stage holds for a strategy while it runs, beyond what home keeps there, in bytes."""

    stage: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None

    @property
    def known_bytes(self) -> int:
        return self.parameter_bytes + self.gradient_bytes + (self.optimizer_bytes or 0)


def add_command(commands: _SubParsersAction[Any]) -> None:
    """Add ``explain`` to the ``hotspa`` command."""
    parser = commands.add_parser(
        "explain",
        help="show what a configuration means for a model and a world",
        description="Check a configuration and show its strategies; with Megatron's arguments, also groups, memory and moves.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="hotspa explain CONFIG [--world-size N] [--lengths WHAT] [options] [-- MEGATRON ARGS]",
    )
    parser.add_argument("config", metavar="CONFIG", help="the file that --hotspa-config will name")
    parser.add_argument(
        "--world-size",
        metavar="N",
        help="ranks (default: WORLD_SIZE, else SLURM_NTASKS, else one replica of home)",
    )
    parser.add_argument(
        "--lengths",
        metavar="WHAT",
        help="show a step of these: PREFIX of a data set, a file of one length per line, wikipedia, or "
        "lognormal:mean=M,sigma=S,max=N",
    )
    parser.add_argument(
        "--sequences", metavar="N", help="samples of that step (default: Megatron's --global-batch-size)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of that step (default 0)")
    parser.add_argument(
        "--hardware",
        "--profile",
        default=UNKNOWN_DEVICE,
        metavar="NAME|FILE",
        help=f"whose times moves and steps take: {', '.join(hardware_names())}, or a file (default {UNKNOWN_DEVICE})",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw that step to FILE (.png, .svg, .pdf); needs matplotlib")
    parser.add_argument("--json", action="store_true", help="print JSON; sizes in bytes, lengths in tokens")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, megatron_arguments: Sequence[str]) -> None:
    """Print the explanation; ``ValueError`` for bad input."""
    config = load_config(arguments.config)
    hardware = load_hardware(arguments.hardware)  # whether or not a step is planned with it: a wrong name is one
    if arguments.plot is not None and arguments.lengths is None:
        raise ValueError("--plot: it draws a step, and there is none to draw; add --lengths")
    if arguments.plot is not None:
        charts.check(arguments.plot)
    if not megatron_arguments:
        if arguments.world_size is not None:
            raise ValueError("--world-size: has no meaning without Megatron's arguments; add them behind --")
        if arguments.lengths is not None:
            raise ValueError("--lengths: a step cannot be planned without Megatron's arguments; add them behind --")
        described = _describe_file(config)
        if not arguments.json:
            _print_file(config)
    else:
        check_flags(megatron_arguments)
        line = read_command_line(megatron_arguments, world_size=world_size_of(arguments.world_size))
        recompute = recompute_of(megatron_arguments)
        resolved = resolve(config, shape=line.shape, home=line.home, recompute=recompute)
        groups = count_groups([each.strategy for each in (*resolved.strategies, resolved.home)])
        taken = resolved.group_memory
        memory = [memory_per_stage(each, resolved, line) for each in (*resolved.strategies, resolved.home)]
        refused = [row.line for row in conflicts(megatron_arguments) if row.unless not in config.allow_untested]
        model, choices = resolved_model(resolved, hardware, recompute=recompute)
        moves = moves_between(model, [choice.execution for choice in choices])
        described = {**_describe(resolved, groups, taken, memory), "conflicts": refused}
        described |= {"hardware": hardware.name, "moves": [asdict(move) for move in moves]}
        step = None
        if arguments.lengths is not None:
            step = _step(arguments, resolved, model, choices, megatron_arguments)
            if arguments.plot is not None:
                plot_step(arguments.plot, step, source=arguments.lengths)
            described["step"] = asdict(step)
        if not arguments.json:
            _print(resolved, groups, taken, memory, line)
            print_moves(tables.console(), moves, hardware=hardware.name)
            if step is not None:
                print_step(tables.console(), step, source=arguments.lengths)
            for problem in refused:
                tables.say(tables.console(), f"A job with these arguments would not start: {problem}")
    if arguments.json:
        print(json.dumps(described, indent=2))


def _step(
    arguments: argparse.Namespace,
    resolved: ResolvedConfig,
    model: CostModel,
    choices: Sequence[GroupChoice],
    megatron_arguments: Sequence[str],
) -> StepShown:
    given = arguments.sequences
    if given is None:
        sequences = whole_of(megatron_arguments, "--global-batch-size", most=MOST_COUNTED)
    else:
        sequences = whole("--sequences", given, most=MOST_COUNTED)
    if sequences is None:
        raise ValueError("--sequences: missing, and the command line has no --global-batch-size; give one of them")
    return sample_step(
        resolved,
        LengthHistogram.named(arguments.lengths),
        model,
        choices,
        sequences=sequences,
        seed=options.seed(arguments.seed),
    )


def memory_per_stage(
    each: ResolvedStrategy, resolved: ResolvedConfig, line: MegatronCommandLine
) -> tuple[StageMemory, ...]:
    """What a rank of each pipeline stage holds; a sibling runs on home's and adds nothing."""
    shape, strategy = resolved.shape, each.strategy
    if each.kind is Kind.SIBLING:
        return tuple(
            StageMemory(stage=stage, parameters=0, parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0)
            for stage in range(strategy.pp)
        )
    layout = model_layout(gpt_parameters(shape), strategy, each.stages, shape.tied_embeddings)
    stages = []
    for stage in range(strategy.pp):
        # Every tensor-parallel rank of a stage holds as many elements as the first.
        numel = layout.local_numel(strategy.rank(tp=0, cp=0, dp=0, pp=stage))
        optimizer: int | None = 0
        if each.kind is Kind.HOME:
            shards = strategy.dp * strategy.cp if shape.distributed_optimizer else 1
            optimizer = None if line.optimizer_bytes is None else line.optimizer_bytes * -(-numel // shards)
        stages.append(
            StageMemory(
                stage=stage,
                parameters=numel,
                parameter_bytes=numel * shape.parameter_bytes,
                gradient_bytes=numel * shape.gradient_bytes,
                optimizer_bytes=optimizer,
            )
        )
    return tuple(stages)


def _describe_file(config: HotSPaConfig) -> dict[str, object]:
    return {
        "config": str(config.path),
        "digest": config.digest(),
        "samples": config.samples,
        "overlong": config.overlong,
        "merge": config.merge,
        "switch": {each.name: getattr(config.switch, each.name) for each in fields(config.switch) if each.compare},
        "check_plans": config.check_plans,
        "verify_every": config.verify_every,
        "get_batch": config.get_batch,
        "strategies": [
            {
                "lengths": lengths,
                "tp": entry.tp,
                "cp": entry.cp,
                "pp": entry.pp,
                "vpp": entry.vpp,
                "recompute": None if entry.recompute is None else str(entry.recompute),
                "tokens_per_microbatch": entry.tokens_per_microbatch,
            }
            for lengths, entry in zip(
                tables.ranges(entry.max_length for entry in config.strategies), config.strategies, strict=True
            )
        ],
        "home": {"tokens_per_microbatch": config.home_tokens_per_microbatch},
    }


def _describe(
    resolved: ResolvedConfig, groups: Groups, taken: GroupMemory, memory: Sequence[Sequence[StageMemory]]
) -> dict[str, object]:
    every = (*resolved.strategies, resolved.home)
    ranges = tables.ranges(each.max_length for each in every)
    strategies: list[dict[str, object]] = [
        {
            "lengths": lengths,
            "strategy": str(each.strategy),
            "kind": each.kind,
            "tokens_per_microbatch": each.tokens_per_microbatch,
            "recompute": None if each.recompute is None else str(each.recompute),
            "layers": [[stage.start, stage.stop] for stage in each.layers],
            "memory": [asdict(stage) for stage in stages],
        }
        for lengths, each, stages in zip(ranges, every, memory, strict=True)
    ]
    return {
        **_describe_file(resolved.config),
        "world_size": resolved.home.strategy.world_size,
        "strategies": strategies[:-1],
        "home": strategies[-1],
        "groups": asdict(groups) | asdict(taken),
    }


def _print_file(config: HotSPaConfig) -> None:
    columns = ("lengths", "tp", "cp", "pp", "vpp", "recompute", "tokens/micro-batch")
    console, table = tables.console(), tables.table(*columns, left=_LEFT)
    ranges = tables.ranges(entry.max_length for entry in config.strategies)
    for lengths, entry in zip(ranges, config.strategies, strict=True):
        budget = "default" if entry.tokens_per_microbatch is None else f"{entry.tokens_per_microbatch:,}"
        virtual = "default" if entry.vpp is None else entry.vpp
        tables.row(
            table,
            tables.range_text(lengths),
            entry.tp,
            entry.cp,
            entry.pp,
            virtual,
            entry.recompute or "default",
            budget,
        )
    tables.print_table(console, "Strategies of the file", table)
    tables.say(console, "Home takes what is longer. Give Megatron's arguments behind -- for home, groups and memory.")
    tables.say(console, f"samples: {config.samples}; overlong: {config.overlong}; merge: {config.merge}")


def _print(
    resolved: ResolvedConfig,
    groups: Groups,
    taken: GroupMemory,
    memory: Sequence[Sequence[StageMemory]],
    line: MegatronCommandLine,
) -> None:
    console = tables.console()
    every = (*resolved.strategies, resolved.home)
    world = resolved.home.strategy.world_size
    table = tables.table("lengths", "strategy", "kind", "recompute", "tokens/micro-batch", "ranks", left=_LEFT)
    for lengths, each in zip(tables.ranges(each.max_length for each in every), every, strict=True):
        ranks = f"{each.strategy.dp} x {each.strategy.replica_size}"
        again = each.recompute or "flags"
        tables.row(
            table, tables.range_text(lengths), each.strategy, each.kind, again, f"{each.tokens_per_microbatch:,}", ranks
        )
    tables.print_table(console, f"Strategies on {world} ranks", table)
    tables.say(console, "Ranks: replicas x ranks of one replica. Recompute: flags is what Megatron's own flags say.")
    tables.say(
        console,
        f"samples: {resolved.config.samples}; overlong: {resolved.config.overlong}; merge: {resolved.config.merge}",
    )

    table = tables.table("axes", "distinct", left=_LEFT)
    for axes, count in groups.per_axes.items():
        if count:
            tables.row(table, axes, count)
    tables.print_table(console, "Groups of more than one rank", table)
    tables.say(console, f"{groups.total} distinct in all, at most {groups.most_on_one_rank} on one rank.")
    tables.say(
        console,
        f"NCCL's buffers take about {taken.total_mb:,} MiB of a rank's memory, {taken.added_mb:,} of them for "
        f"{taken.added_groups} groups that home alone does not have ({ASSUMPTION}).",
    )

    sizes = ("weights", "gradients", "optimizer", "active", "inactive")
    table = tables.table("strategy", "kind", "stage", "parameters", *sizes, left=_LEFT)
    for each, stages in zip(every, memory, strict=True):
        most = max(stages, key=lambda stage: stage.known_bytes)
        inactive = most.known_bytes if each.kind is Kind.HOME else 0
        held = (most.parameter_bytes, most.gradient_bytes, most.optimizer_bytes, most.known_bytes, inactive)
        tables.row(table, each.strategy, each.kind, most.stage, f"{most.parameters:,}", *map(tables.size_text, held))
    tables.print_table(console, "Memory of the fullest rank", table)
    tables.say(console, "A sibling runs on home's parameters; a guest's storage exists only while it runs.")
    tables.say(console, "Activations are not counted. --json gives bytes, for every stage.")
    if line.optimizer_note is not None:
        tables.say(console, f"The optimizer's state is not counted under {line.optimizer_note}.")
