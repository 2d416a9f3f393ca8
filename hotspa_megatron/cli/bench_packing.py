"""``hotspa bench packing``: how evenly sequences of a distribution are packed, how much they are padded, and how long it takes.

Beside it stands what a loader without a plan does: sequences as they come, first fit, micro-batches dealt out in turn.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from hotspa_megatron.cli import tables
from hotspa_megatron.cli.options import numbers
from hotspa_megatron.planning.alignment import Alignment
from hotspa_megatron.planning.known_models import KNOWN_MODELS
from hotspa_megatron.planning.lengths import LengthHistogram
from hotspa_megatron.planning.packing import MicroBatches, first_fit, lower_bound, pack
from hotspa_megatron.planning.step_plan import MicroBatchTime

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_MOST_SEQUENCES: Final = 1_000_000
_MOST_STEPS: Final = 10_000
_MOST_RANKS: Final = 262_144
_EPILOG: Final = """\
examples:
  hotspa bench packing
      512 Wikipedia documents per step, in three length groups, on 4, 16 and 64 data-parallel ranks
  hotspa bench packing --lengths data/my_text_document --groups 2048,16384 --dp 8 --budget 16384
"""


@dataclass(frozen=True, kw_only=True)
class PackingResult:
    """One length group on one number of ranks, over several steps.

    Fractions of the busiest rank's time, each the worst of all steps: ``imbalance`` is (max - mean) / max; ``over_simple``
    what the busiest has above max(mean, longest sequence); ``over_bound`` above what any division must give it.
    ``in_turn`` is the imbalance without a plan. ``padding`` is the share of computed tokens that only align, over all
    steps. ``milliseconds``: CPU time of one call, the mean.
    """

    lower: int
    upper: int
    dp: int
    budget: int
    sequences: float
    micro_batches: float
    imbalance: float
    over_simple: float
    over_bound: float
    in_turn: float
    padding: float
    milliseconds: float


def add_part(parts: _SubParsersAction[Any]) -> None:
    """Add ``packing`` to ``hotspa bench``."""
    packing = parts.add_parser(
        "packing",
        help="pack sequences of a distribution into micro-batches",
        description="Pack a step's sequences into the micro-batches of data-parallel ranks; no rank is started.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    packing.add_argument(
        "--lengths",
        default="wikipedia",
        metavar="WHAT",
        help="wikipedia, lognormal:mean=M,sigma=S,max=N, PREFIX of a data set, or a file of one length per line "
        "(default wikipedia)",
    )
    packing.add_argument(
        "--seq-length", type=int, default=32768, metavar="N", help="split what is longer (default 32768)"
    )
    packing.add_argument("--sequences", type=int, default=512, metavar="N", help="sequences of a step (default 512)")
    packing.add_argument(
        "--groups",
        default="4096,8192,32768",
        metavar="N,N",
        help="limits of the length groups (default 4096,8192,32768)",
    )
    packing.add_argument("--dp", default="4,16,64", metavar="N,N", help="data-parallel ranks (default 4,16,64)")
    packing.add_argument("--budget", type=int, metavar="N", help="tokens of a micro-batch (default: the group's limit)")
    packing.add_argument(
        "--align", type=int, default=1, metavar="N", help="pad each sequence to a multiple (default 1)"
    )
    packing.add_argument(
        "--model", default="llama-7b", choices=sorted(KNOWN_MODELS), help="gives attention's share (default llama-7b)"
    )
    packing.add_argument("--steps", type=int, default=4, metavar="N", help="steps to look at (default 4)")
    packing.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the first step (default 0)")
    packing.add_argument("--json", action="store_true", help="print JSON; lengths in tokens, shares as fractions")
    packing.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, megatron_arguments: Sequence[str]) -> None:
    if megatron_arguments:
        raise ValueError("bench packing takes no arguments of Megatron's; remove what follows --")
    for name in ("seq_length", "sequences", "steps", "align"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")
    for name, most in (("sequences", _MOST_SEQUENCES), ("steps", _MOST_STEPS)):
        if getattr(arguments, name) > most:
            raise ValueError(f"--{name} {getattr(arguments, name)}: at most {most:,} are packed here")
    if any(dp > _MOST_RANKS for dp in numbers(arguments.dp, flag="--dp")):
        raise ValueError(f"--dp {arguments.dp}: at most {_MOST_RANKS:,} ranks")
    if arguments.seed < 0:
        raise ValueError(f"--seed must be at least 0, not {arguments.seed}")
    histogram = LengthHistogram.named(arguments.lengths).limited(arguments.seq_length, "split")
    batches = [
        histogram.sample(arguments.sequences, seed=arguments.seed + number).tolist()
        for number in range(arguments.steps)
    ]
    groups = numbers(arguments.groups, flag="--groups", rising=True)
    results = [
        bench_packing(
            [[length for length in batch if lower < length <= upper] for batch in batches],
            lower=lower,
            upper=upper,
            dp=dp,
            budget=upper if arguments.budget is None else arguments.budget,
            alignment=Alignment(sequence=arguments.align, total=arguments.align),
            time_of=MicroBatchTime.relative(KNOWN_MODELS[arguments.model]),
        )
        for lower, upper in zip((0, *groups), groups, strict=False)
        for dp in numbers(arguments.dp, flag="--dp")
    ]
    if arguments.json:
        settings = {name: getattr(arguments, name) for name in ("lengths", "seq_length", "sequences", "steps", "seed")}
        print(
            json.dumps({**settings, "model": arguments.model, "results": [asdict(each) for each in results]}, indent=2)
        )
    else:
        _print(results, arguments)


def bench_packing(
    batches: Sequence[Sequence[int]],
    *,
    lower: int,
    upper: int,
    dp: int,
    budget: int,
    alignment: Alignment,
    time_of: MicroBatchTime,
) -> PackingResult:
    """Pack each batch's sequences of one length group and look at the worst."""

    def cost(length: int) -> float:
        return time_of.per_token * length + time_of.per_square * length**2

    count, seconds, computed = 0, 0.0, 0
    imbalances, simple, bound, in_turn = [0.0], [0.0], [0.0], [0.0]
    for lengths in batches:
        started = time.process_time()
        packed = pack(lengths, budget=budget, dp=dp, alignment=alignment, cost=cost)
        seconds += time.process_time() - started
        count += sum(map(len, packed))
        computed += sum(alignment.micro_batch(lengths[index] for index in batch) for rank in packed for batch in rank)
        if not lengths:
            continue
        costs = [cost(length) for length in lengths]
        loads = _loads(packed, costs)
        imbalances.append(_imbalance(loads))
        simple.append(max(loads) / max(sum(costs) / dp, *costs) - 1)
        bound.append(max(loads) / lower_bound(costs, dp) - 1)
        in_turn.append(_imbalance(_loads(_dealt_in_turn(lengths, budget, dp, alignment), costs)))
    tokens = sum(map(sum, batches))
    return PackingResult(
        lower=lower,
        upper=upper,
        dp=dp,
        budget=budget,
        sequences=sum(map(len, batches)) / len(batches),
        micro_batches=count / len(batches),
        imbalance=max(imbalances),
        over_simple=max(simple),
        over_bound=max(bound),
        in_turn=max(in_turn),
        padding=1 - tokens / computed if computed else 0.0,
        milliseconds=seconds * 1e3 / len(batches),
    )


def _loads(packed: Sequence[MicroBatches], costs: Sequence[float]) -> list[float]:
    return [sum(costs[index] for batch in rank for index in batch) for rank in packed]


def _imbalance(loads: Sequence[float]) -> float:
    return 1 - sum(loads) / len(loads) / max(loads)


def _dealt_in_turn(lengths: Sequence[int], budget: int, dp: int, alignment: Alignment) -> list[MicroBatches]:
    """Sequences as they come, each into the first micro-batch with room; those dealt to ranks in turn."""
    batches = first_fit(map(alignment.pad_sequence, lengths), budget)
    return [tuple(tuple(batch) for batch in batches[rank::dp]) for rank in range(dp)]


def _print(results: Sequence[PackingResult], arguments: argparse.Namespace) -> None:
    console = tables.console()
    shown = tables.table(
        *("lengths", "dp", "budget", "sequences", "batches", "imbalance", "in turn", "over ideal", "over bound"),
        *("padding", "CPU ms"),
        left=("lengths",),
    )
    for each in results:
        shares = (each.imbalance, each.in_turn, each.over_simple, each.over_bound, each.padding)
        tables.row(
            shown,
            f"{each.lower + 1:,}-{each.upper:,}",
            each.dp,
            f"{each.budget:,}",
            f"{each.sequences:,.0f}",
            f"{each.micro_batches:,.0f}",
            *(f"{share:.2%}" for share in shares),
            f"{each.milliseconds:.1f}",
        )
    title = f"{arguments.sequences:,} sequences of {arguments.lengths} per step, {arguments.steps} steps"
    tables.print_table(console, title, shown)
    tables.say(
        console, "Batches: micro-batches. Imbalance: (busiest rank - mean) / busiest, in the worst of the steps."
    )
    tables.say(console, "In turn: the same for sequences as they come, micro-batches dealt to ranks in turn.")
    tables.say(
        console, "Over: the busiest rank above max(mean, longest sequence), and above what any division must give it."
    )
    tables.say(console, "Padding: tokens that only align, of all that are computed. CPU ms: of one call, on one core.")
