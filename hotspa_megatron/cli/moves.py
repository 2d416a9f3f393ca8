"""What each pair of strategies moves, for ``hotspa explain``: bytes and time of the plans that a job carries out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from hotspa_megatron.cli import tables
from hotspa_megatron.planning.cost_model import CostModel
from hotspa_megatron.planning.execution import Execution
from hotspa_megatron.planning.reshard_plan import ReshardPlan
from hotspa_megatron.planning.topology import LinkClass
from hotspa_megatron.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class MoveShown:
    """A move from one strategy to another; bytes and messages of all ranks together, ``busiest_rank_bytes`` of one.

    ``carries`` parameters to a guest: each from whichever rank is nearest, be it of ``source`` or of home; or a guest's
    gradients home, after the guest's own reduction. ``copied_bytes`` stay on their rank. ``seconds``: modelled, nothing hidden.
    """

    source: str
    destination: str
    carries: Literal["parameters", "gradients"]
    bytes: int
    between_nodes_bytes: int
    copied_bytes: int
    busiest_rank_bytes: int
    messages: int
    seconds: float


def moves_between(model: CostModel, executions: Sequence[Execution]) -> tuple[MoveShown, ...]:
    """Every ordered pair that has a guest in it; ``executions`` as of the length groups, home last."""
    home = executions[-1].strategy
    guests = sorted({each.strategy for each in executions if not each.strategy.same_layout(home)})
    found = []
    for guest in guests:
        for before in (None, *(other for other in guests if other != guest)):
            found.append(_shown(model, before or home, guest, "parameters", model.switch_plan(home, before, guest)))
        found.append(_shown(model, guest, home, "gradients", model.fold_plan(guest, home)))
    return tuple(found)


def _shown(
    model: CostModel,
    source: Strategy,
    destination: Strategy,
    carries: Literal["parameters", "gradients"],
    plan: ReshardPlan,
) -> MoveShown:
    return MoveShown(
        source=str(source),
        destination=str(destination),
        carries=carries,
        bytes=plan.total_bytes,
        between_nodes_bytes=plan.link_bytes[LinkClass.INTER_NODE],
        copied_bytes=plan.link_bytes[LinkClass.LOCAL],
        busiest_rank_bytes=max(plan.bytes_sent(rank) + plan.bytes_received(rank) for rank in range(model.world_size)),
        messages=plan.num_messages,
        seconds=model.reshard_time(plan),
    )


def print_moves(console: Console, moves: Sequence[MoveShown], *, hardware: str) -> None:
    if not moves:
        tables.say(console, "\nNo strategy moves anything: all run on home's own parameters and gradients.")
        return
    left = ("from", "to", "carries")
    shown = tables.table(*left, "all ranks", "between nodes", "busiest rank", "messages", "ms", left=left)
    for each in moves:
        sizes = map(tables.size_text, (each.bytes, each.between_nodes_bytes, each.busiest_rank_bytes))
        cells = (
            each.source,
            each.destination,
            each.carries,
            *sizes,
            f"{each.messages:,}",
            f"{each.seconds * 1e3:,.1f}",
        )
        tables.row(shown, *cells)
    tables.print_table(console, "Moves between strategies", shown)
    tables.say(
        console,
        "Between home and its siblings nothing moves. A guest takes each parameter from the nearest rank that has it,",
    )
    tables.say(
        console,
        f"home's included. Busiest rank: sent and received. Modelled on {hardware} (--hardware), nothing hidden.",
    )
