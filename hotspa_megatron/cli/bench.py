"""``hotspa bench``: measures a part of this package on its own, beside what Megatron has for the same task."""

from __future__ import annotations

import argparse
import json
import re
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from hotspa_megatron.cli import bench_packing, bench_reshard, bench_step, tables
from hotspa_megatron.planning.known_models import KNOWN_MODELS
from hotspa_megatron.planning.legality import tp_problem
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.planning.param_layout import Layout, gpt_parameters, model_layout
from hotspa_megatron.planning.reshard_plan import plan_reshard
from hotspa_megatron.planning.topology import LinkClass, Topology
from hotspa_megatron.strategy import Strategy, stage_layers

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_EPILOG: Final = """\
example:
  hotspa bench planner --model llama-70b --ranks 8192 --gpus-per-node 8 --from tp8-pp8 --to tp4-pp4
"""
_MOST_RANKS_OF_PEER: Final = 128
"""Megatron's planner looks at every rank for every tensor of every rank: above, it takes minutes."""


def add_command(commands: _SubParsersAction[Any]) -> None:
    """Add ``bench`` and its subcommands to the ``hotspa`` command."""
    parser = commands.add_parser(
        "bench",
        help="measure a part on its own, beside Megatron's",
        description="Measure a part of this package on its own, beside what Megatron has for the same task.",
    )
    parts = parser.add_subparsers(title="parts", metavar="PART", required=True)
    planner = parts.add_parser(
        "planner",
        help="plan the transfers between two strategies",
        description="Plan the transfers that take a model from one strategy to another; no rank is started.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    planner.add_argument("--model", required=True, choices=sorted(KNOWN_MODELS), help="a published model")
    planner.add_argument("--ranks", required=True, type=int, metavar="N", help="ranks of the whole job")
    planner.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default 8")
    planner.add_argument("--cards-per-node", type=int, metavar="N", help="network cards (default: one per GPU)")
    for flag, what in (("--from", "held now"), ("--to", "wanted")):
        planner.add_argument(
            flag, required=True, dest=flag.strip("-"), metavar="STRATEGY", help=f"what is {what}: tp8-pp8, tp2-cp2, ..."
        )
    planner.add_argument("--one-phase", action="store_true", help="let every rank receive from a holder directly")
    planner.add_argument("--json", action="store_true", help="print JSON; sizes in bytes, times in CPU seconds")
    planner.set_defaults(run=_run_planner)
    bench_packing.add_part(parts)
    bench_reshard.add_part(parts)
    bench_step.add_part(parts)


@dataclass(frozen=True, kw_only=True)
class LinkTraffic:
    """Bytes over one class of links: in all, the least possible, and at the busiest rank."""

    num_bytes: int
    floor: int
    busiest_sender: int
    busiest_receiver: int


@dataclass(frozen=True, kw_only=True)
class PlannerResult:
    """One planner on one case. Times in CPU seconds; ``links`` by class of links."""

    whole_plan_s: float
    one_rank_s: float
    peak_memory_bytes: int | None
    """Of the whole process, Python and numpy included; None where it was not measured alone."""
    phases: int
    messages: int
    links: Mapping[str, LinkTraffic]


@dataclass(frozen=True, kw_only=True)
class PlannerBench:
    """``peer`` is Megatron's planner on the same case, or None and the reason."""

    model: str
    ranks: int
    nodes: int
    source: str
    destination: str
    ours: PlannerResult
    peer: PlannerResult | None
    peer_missing: str | None


def _run_planner(arguments: argparse.Namespace, megatron_arguments: Sequence[str]) -> None:
    if megatron_arguments:
        raise ValueError("bench planner takes no arguments of Megatron's; remove what follows --")
    source, destination = (
        read_strategy(getattr(arguments, name), flag=f"--{name}", ranks=arguments.ranks) for name in ("from", "to")
    )
    bench = bench_planner(
        arguments.model,
        source,
        destination,
        Topology.nodes(arguments.ranks, arguments.gpus_per_node, cards_per_node=arguments.cards_per_node),
        two_phase=not arguments.one_phase,
    )
    if arguments.json:
        print(json.dumps(asdict(bench), indent=2))
    else:
        _print_planner(bench)


def read_strategy(text: str, *, flag: str, ranks: int) -> Strategy:
    """The strategy over ``ranks`` that ``tp4-pp2`` and the like name: axes in any order, 1 where absent, dp the rest."""
    axes = dict.fromkeys(("tp", "cp", "pp"), 1)
    for part in text.split("-"):
        match = re.fullmatch(r"(tp|cp|pp)([1-9][0-9]*)", part)
        if match is None:
            raise ValueError(
                f"{flag}: {text!r} is not a strategy; join some of tpN, cpN and ppN with '-', as in tp8-pp2"
            )
        axes[match[1]] = int(match[2])
    try:
        return Strategy.from_world(ranks, **axes)
    except ValueError as error:
        raise ValueError(f"{flag} {text}: {error}") from error


def bench_planner(
    model: str, source: Strategy, destination: Strategy, topology: Topology, *, two_phase: bool = True
) -> PlannerBench:
    """Plan once and count; ValueError where the model does not take a strategy."""
    shape = KNOWN_MODELS[model]
    started = time.process_time()
    sides = [_layout(shape, strategy) for strategy in (source, destination)]
    plan = plan_reshard(sides[:1], sides[1], itemsize=shape.parameter_bytes, topology=topology, two_phase=two_phase)
    whole = time.process_time() - started
    one_rank = 0.0
    for rank in sorted({0, source.world_size // 2, source.world_size - 1}):
        started = time.process_time()
        plan.for_rank(rank)
        one_rank = max(one_rank, time.process_time() - started)
    ours = PlannerResult(
        whole_plan_s=whole,
        one_rank_s=one_rank,
        peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        phases=len(plan.transfers),
        messages=plan.num_messages,
        links=_traffic(topology, plan.link_bytes, plan.floors, plan.bytes_sent, plan.bytes_received),
    )
    peer, missing = _bench_peer(sides[0], sides[1], topology, shape.parameter_bytes, plan.floors)
    return PlannerBench(
        model=model,
        ranks=source.world_size,
        nodes=topology.num_nodes,
        source=str(source),
        destination=str(destination),
        ours=ours,
        peer=peer,
        peer_missing=missing,
    )


def _layout(shape: ModelShape, strategy: Strategy) -> Layout:
    problem = tp_problem(shape, strategy.tp)
    if problem is not None:
        raise ValueError(problem)
    return model_layout(
        gpt_parameters(shape), strategy, stage_layers(shape.num_layers, strategy.pp), shape.tied_embeddings
    )


def _traffic(
    topology: Topology,
    link_bytes: Mapping[LinkClass, int],
    floors: Mapping[LinkClass, int],
    sent: Callable[[int, LinkClass], int],
    received: Callable[[int, LinkClass], int],
) -> dict[str, LinkTraffic]:
    return {
        str(link): LinkTraffic(
            num_bytes=link_bytes[link],
            floor=floors[link],
            busiest_sender=max(sent(rank, link) for rank in range(topology.world_size)),
            busiest_receiver=max(received(rank, link) for rank in range(topology.world_size)),
        )
        for link in (LinkClass.INTRA_NODE, LinkClass.INTER_NODE)
    }


def _bench_peer(
    source: Layout, destination: Layout, topology: Topology, itemsize: int, floors: Mapping[LinkClass, int]
) -> tuple[PlannerResult | None, str | None]:
    if topology.world_size > _MOST_RANKS_OF_PEER:
        return None, f"its time grows with the square of the ranks: run up to {_MOST_RANKS_OF_PEER}"
    # Imports torch and Megatron, which takes seconds and memory: after our own figures are taken.
    from hotspa_megatron.hooks import refit

    try:
        theirs = refit.plan(source, destination, itemsize=itemsize)
    except (ImportError, ValueError) as error:
        return None, str(error)
    ends: dict[tuple[str, int, LinkClass], int] = {}
    total = dict.fromkeys((LinkClass.INTRA_NODE, LinkClass.INTER_NODE), 0)
    for (sender, receiver), num_bytes in theirs.pairs.items():
        link = topology.link(sender, receiver)
        total[link] += num_bytes
        for key in (("sent", sender, link), ("received", receiver, link)):
            ends[key] = ends.get(key, 0) + num_bytes

    def at(end: str) -> Callable[[int, LinkClass], int]:
        return lambda rank, link: ends.get((end, rank, link), 0)

    return PlannerResult(
        whole_plan_s=theirs.seconds,
        one_rank_s=theirs.seconds,
        peak_memory_bytes=None,
        phases=1,
        messages=theirs.operations,
        links=_traffic(topology, total, floors, at("sent"), at("received")),
    ), None


def _print_planner(bench: PlannerBench) -> None:
    console = tables.console()
    planners = [("ours", bench.ours)] + ([("megatron.core.resharding", bench.peer)] if bench.peer else [])
    shown = tables.table("planner", "whole plan", "one rank", "peak memory", "phases", "messages", left=("planner",))
    for name, result in planners:
        memory = "" if result.peak_memory_bytes is None else f"{result.peak_memory_bytes / 2**20:,.0f} MiB"
        times = f"{result.whole_plan_s:.3f} s", f"{result.one_rank_s * 1e3:.1f} ms"
        tables.row(shown, name, *times, memory, result.phases, f"{result.messages:,}")
    title = f"{bench.model} on {bench.ranks} ranks, {bench.nodes} nodes: {bench.source} -> {bench.destination}"
    tables.print_table(console, title, shown)
    shown = tables.table(
        "link", "planner", "GB", "floor", "busiest sender", "busiest receiver", left=("link", "planner")
    )
    for link in (LinkClass.INTER_NODE, LinkClass.INTRA_NODE):
        for name, result in planners:
            traffic = result.links[str(link)]
            sizes = (traffic.num_bytes, traffic.floor, traffic.busiest_sender, traffic.busiest_receiver)
            tables.row(shown, link, name, *(f"{size / 1e9:,.2f}" for size in sizes))
    tables.print_table(console, "Traffic", shown)
    tables.say(
        console, "Times are CPU seconds of one core. Floors: what a node lacks enters it once, and so for a rank."
    )
    tables.say(console, "What ranks fetch over the network, instead of from their node, is missing inside it.")
    if bench.peer_missing is not None:
        tables.say(console, f"Megatron's own planner was not run: {bench.peer_missing}.")
