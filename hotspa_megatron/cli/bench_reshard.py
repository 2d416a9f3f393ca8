"""``hotspa bench reshard``: moves a model between strategies on real ranks, ours beside Megatron's own, taking turns.

Starts its own local ranks, or is one of torchrun's. What is measured, and how, is in ``reshard_measurement``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from hotspa_megatron.cli import tables
from hotspa_megatron.cli.options import numbers
from hotspa_megatron.planning.known_models import llama
from hotspa_megatron.planning.legality import tp_problem
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.strategy import Strategy, stage_layers

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from hotspa_megatron.cli.reshard_measurement import FoldResult, PairResult

_EPILOG: Final = """\
examples:
  hotspa bench reshard
      three models and six pairs of strategies on four ranks of this machine
  hotspa bench reshard --ranks 8 --sizes 110 --from tp8 --to dp8
  torchrun --nproc-per-node 8 -m hotspa_megatron.cli.main bench reshard
  hotspa bench reshard --fold
      a guest's gradients on their way home: Megatron's reduction and a move, or both in one plan

exit code: 1 where a move left another value than it should have, 2 for bad input
"""


_MODELS: Final[Mapping[int, ModelShape]] = {
    12: llama(layers=8, hidden=240, ffn=640, heads=8, groups=8, vocab=960, seq_length=4096),
    55: llama(layers=8, hidden=512, ffn=1376, heads=8, groups=8, vocab=2048, seq_length=4096),
    110: llama(layers=16, hidden=512, ffn=1376, heads=8, groups=8, vocab=4096, seq_length=4096),
}
"""By megabytes of bf16 parameters: LLaMA-like models that split over tp 8 and pp 8."""
_LEAST_REPEATS: Final = 5
_GRACE_S: Final = 3.0
"""How long the other ranks may go on after the first failure: theirs may be the message that tells."""


def add_part(parts: _SubParsersAction[Any]) -> None:
    """Add ``reshard`` to ``hotspa bench``."""
    reshard = parts.add_parser(
        "reshard",
        help="move a model between strategies on real ranks",
        description="Move a model between strategies on real ranks: ours, megatron.core.resharding, and the bound (one "
        "packed message per pair of ranks with its copies), in turn on the same tensors. The results are compared.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    reshard.add_argument(
        "--ranks", type=int, default=4, metavar="N", help="ranks started here (default 4); torchrun's world otherwise"
    )
    reshard.add_argument(
        "--sizes", default="12,55,110", metavar="MB,MB", help="models, from 12, 55 and 110 MB (default: all)"
    )
    for flag, what in (("--from", "held"), ("--to", "wanted")):
        reshard.add_argument(
            flag,
            dest=flag.strip("-"),
            metavar="STRATEGY",
            help=f"one pair alone: what is {what}, as in tp4 or tp2pp2 (default: six pairs)",
        )
    reshard.add_argument("--backend", choices=("auto", "gloo", "nccl"), default="auto", help="default auto")
    reshard.add_argument(
        "--repeats", type=int, default=_LEAST_REPEATS, metavar="N", help="of which the median is taken (default 5)"
    )
    reshard.add_argument("--fold", action="store_true", help="measure the way of a guest's gradients home instead")
    reshard.add_argument("--json", action="store_true", help="print JSON; sizes in bytes or MB, times in seconds")
    reshard.set_defaults(run=_run)


def _run(arguments: argparse.Namespace, megatron_arguments: Sequence[str]) -> None:
    if megatron_arguments:
        raise ValueError("bench reshard takes no arguments of Megatron's; remove what follows --")
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    world = int(os.environ["WORLD_SIZE"]) if launched else arguments.ranks
    if world < 2:
        raise ValueError(f"--ranks must be at least 2, not {world}: one rank alone moves nothing")
    if arguments.repeats < _LEAST_REPEATS:
        raise ValueError(f"--repeats must be at least {_LEAST_REPEATS}, not {arguments.repeats}")
    sizes = numbers(arguments.sizes, flag="--sizes", rising=True)
    unknown = [size for size in sizes if size not in _MODELS]
    if unknown:
        raise ValueError(f"--sizes: there is no model of {unknown[0]} MB; the models are of 12, 55 and 110 MB")
    cases = [(_MODELS[size], *pair) for size in sizes for pair in _pairs(arguments, world)]
    for shape, *pair in cases:
        for strategy in pair:
            problem = tp_problem(shape, strategy.tp)
            if problem is not None:
                raise ValueError(f"{name_of(strategy)}: {problem}")
            stage_layers(shape.num_layers, strategy.pp)
    if arguments.fold:
        # A guest without data parallelism has nothing to reduce.
        cases = [(shape, guest, home) for shape, home, guest in cases if guest.dp * guest.cp > 1]
        if not cases:
            raise ValueError("--fold: a guest of dp 1 and cp 1 has no reduction; give --to a strategy with dp")
    if launched:
        _measure(arguments, cases)
    else:
        _start_ranks(arguments, world)


def name_of(strategy: Strategy) -> str:
    """Only the axes above 1: tp2pp2."""
    axes = [f"{axis}{getattr(strategy, axis)}" for axis in ("tp", "cp", "pp", "dp") if getattr(strategy, axis) > 1]
    return "".join(axes) or "dp1"


def strategy_of(text: str, *, flag: str, world: int) -> Strategy:
    """The strategy that tp4, tp2pp2 and the like name; dp, where it is not given, is what is left of the world."""
    axes: dict[str, int] = {}
    if not re.fullmatch(r"((tp|cp|pp|dp)[1-9][0-9]*-?)+", text):
        raise ValueError(f"{flag}: {text!r} is not a strategy; join some of tpN, cpN, ppN and dpN, as in tp2pp2")
    for axis, size in re.findall(r"(tp|cp|pp|dp)([0-9]+)", text):
        if axis in axes:
            raise ValueError(f"{flag} {text}: {axis} is given twice")
        axes[axis] = int(size)
    dp = axes.pop("dp", None)
    try:
        found = Strategy.from_world(world, **(dict.fromkeys(("tp", "cp", "pp"), 1) | axes))
    except ValueError as error:
        raise ValueError(f"{flag} {text}: {error}") from error
    if dp is not None and dp != found.dp:
        raise ValueError(f"{flag} {text}: a world of {world} ranks leaves dp {found.dp}, not {dp}")
    return found


def _pairs(arguments: argparse.Namespace, world: int) -> list[tuple[Strategy, Strategy]]:
    given = [getattr(arguments, name) for name in ("from", "to")]
    if any(given):
        if not all(given):
            raise ValueError("--from and --to go together: give both, or none for the six pairs")
        source, destination = (strategy_of(text, flag=f"--{name}", world=world) for text, name in
                               zip(given, ("from", "to"), strict=True))  # fmt: skip
        return [(source, destination)]
    if world % 2:
        raise ValueError(f"the six pairs need an even number of ranks, not {world}; give --from and --to")
    half = world // 2
    pairs = (
        (f"tp{world}", f"dp{world}"),
        (f"pp{world}", f"dp{world}"),
        (f"tp{half}pp2", f"tp{world}"),
        (f"pp{world}", f"tp{world}"),
        (f"tp{world}", f"tp{half}pp2"),
        (f"tp2dp{half}", f"pp2dp{half}"),
    )
    # On two ranks some of them are the same.
    return list(
        dict.fromkeys(
            (strategy_of(a, flag="--from", world=world), strategy_of(b, flag="--to", world=world)) for a, b in pairs
        )
    )


# ------------------------------------------------------------------------------------------------------------------ ranks


def _backend(wanted: str) -> str:
    import torch

    if wanted == "auto":
        return "nccl" if torch.cuda.is_available() else "gloo"
    if wanted == "nccl" and not torch.cuda.is_available():
        raise ValueError("--backend nccl needs CUDA devices, and none is visible; use gloo")
    return wanted


def _start_ranks(arguments: argparse.Namespace, world: int) -> None:
    """Run this very command on ``world`` local ranks. SystemExit with the first failing rank's code."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not re-exported by name

    backend = _backend(arguments.backend)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        # The store is here already, as it is under torchrun: no rank opens one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # Ranks of one machine need no host name that resolves.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    command = [sys.executable, "-m", "hotspa_megatron.cli.main", "bench", "reshard", "--backend", backend]
    command += ["--sizes", arguments.sizes, "--repeats", str(arguments.repeats)]
    for name in ("from", "to"):
        command += [f"--{name}", getattr(arguments, name)] if getattr(arguments, name) else []
    command += [f"--{name}" for name in ("fold", "json") if getattr(arguments, name)]
    # Ended from outside, this process still ends its ranks.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.stdout.flush()
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(command, env=environment))
        _wait(ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.terminate()
        for process in ranks:
            process.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Until all ranks end well, or some time after the first that does not: the others may have more to say."""
    until = math.inf
    while time.monotonic() < until:
        codes = [process.poll() for process in ranks]
        if all(code == 0 for code in codes):
            return
        if None not in codes:
            break
        if until == math.inf and any(codes):
            until = time.monotonic() + _GRACE_S
        time.sleep(0.05)
    failed = next(code for code in (process.poll() for process in ranks) if code)
    raise SystemExit(failed if failed > 0 else 1)


def _measure(arguments: argparse.Namespace, cases: Sequence[tuple[ModelShape, Strategy, Strategy]]) -> None:
    """On one rank: measure every case; rank 0 prints. SystemExit(1) on every rank where results differ."""
    import torch
    import torch.distributed as dist

    from hotspa_megatron.cli.reshard_measurement import Bench

    backend = _backend(arguments.backend)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend)
    rank = dist.get_rank()
    failures: list[str] = []
    found: list[Any] = []
    try:
        bench = Bench(device)
        for number, (shape, source, destination) in enumerate(cases, start=1):
            names = name_of(source), name_of(destination)
            measure = bench.measure_fold if arguments.fold else bench.measure
            result = measure(shape, source, destination, repeats=arguments.repeats, names=names)
            what = f"{names[0]} -> {names[1]}, {result.model_mb:.0f} MB"
            failures += [f"{what}: {each}" for each in result.differences]
            found.append(result)
            if rank == 0 and not arguments.json:
                print(f"{number}/{len(cases)}  {what}", file=sys.stderr, flush=True)
    except ValueError:
        if rank:
            raise SystemExit(2) from None  # rank 0 says it
        raise
    finally:
        dist.destroy_process_group()
    if rank == 0:
        if arguments.json:
            rows = [result.row() for result in found]
            print(json.dumps({"ranks": bench.world, "backend": backend, "pairs": rows}, indent=2))
        else:
            (_print_folds if arguments.fold else _print_pairs)(found, backend, bench.world)
        for line in failures:
            print(f"hotspa: {line}", file=sys.stderr)
    if failures:
        raise SystemExit(1)


# --------------------------------------------------------------------------------------------------------------- printing


def _print_pairs(found: Sequence[PairResult], backend: str, world: int) -> None:
    console = tables.console()
    shown = tables.table("move", "MB", "ours ms", "refit", "bound", "refit/ours", "ours/bound", "first ms", "refit first",
                         "refit/ours first", left=("move",))  # fmt: skip
    for each in found:
        tables.row(
            shown, f"{each.source} -> {each.destination}", f"{each.model_mb:.0f}", f"{each.ours_s * 1e3:.1f}",
            f"{each.refit_s * 1e3:.1f}", f"{each.bound_s * 1e3:.1f}", f"{each.ratio:.2f}",
            f"{each.ours_s / each.bound_s:.2f}", f"{each.ours_first_s * 1e3:.1f}", f"{each.refit_first_s * 1e3:.1f}",
            f"{each.refit_first_s / each.ours_first_s:.2f}",
        )  # fmt: skip
    tables.print_table(console, f"Moves of bf16 parameters on {world} ranks, {backend}", shown)
    shown = tables.table("move", "MB", "moved MB", "floor", "most received MB", "floor of it", "messages", "operations",
                         left=("move",))  # fmt: skip
    for each in found:
        sizes = (each.bytes_total, each.floor_total, each.bytes_max_recv, each.floor_max_recv)
        tables.row(
            shown, f"{each.source} -> {each.destination}", f"{each.model_mb:.0f}", *(f"{s / 1e6:.2f}" for s in sizes),
            each.messages, each.operations,
        )  # fmt: skip
    tables.print_table(console, "What went over the transport", shown)
    tables.say(console, "refit: megatron.core.resharding. bound: one packed message per pair of ranks and its copies.")
    tables.say(console, "Medians of the slowest rank; first: planning included. Floors: what ranks lack.")
    tables.say(console, "messages: pairs of ranks that exchange; a message travels in one or more operations.")


def _print_folds(found: Sequence[FoldResult], backend: str, world: int) -> None:
    console = tables.console()
    shown = tables.table("guest", "home", "MB", "apart ms", "fused ms", "fused/apart", "apart MB", "fused MB",
                         "kept apart MB", "kept fused MB", left=("guest", "home"))  # fmt: skip
    for each in found:
        tables.row(
            shown, each.source, each.destination, f"{each.model_mb:.0f}", f"{each.apart_s * 1e3:.1f}",
            f"{each.fused_s * 1e3:.1f}", f"{each.fused_s / each.apart_s:.2f}", f"{each.apart_bytes / 1e6:.1f}",
            f"{each.fused_bytes / 1e6:.1f}", f"{each.apart_buffers / 1e6:.1f}", f"{each.fused_buffers / 1e6:.1f}",
        )  # fmt: skip
    tables.print_table(console, f"A guest's fp32 gradients on their way home, {world} ranks, {backend}", shown)
    tables.say(
        console, "apart: Megatron's reduction over the guest's dp, then a move. fused: every addend straight home."
    )
    tables.say(
        console,
        "MB over all ranks; the reduction counted as a ring: 2 (n - 1) / n of the gradients of each of n replicas.",
    )
    tables.say(console, "kept: what the rank with most keeps until the gradients are added.")
