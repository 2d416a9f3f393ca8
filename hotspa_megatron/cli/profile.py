"""``hotspa profile``: measures this machine, or under torchrun this cluster, and writes a description that plans rest on."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hotspa_megatron.cli.described_run import whole
from hotspa_megatron.cli.local_ranks import Jobs, RanksFailed, World
from hotspa_megatron.planning import profile_file

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_EPILOG: Final = """\
examples:
  hotspa profile --ranks 8 --output my-node.yaml
      measure 8 ranks of this machine; then: hotspa plan --profile my-node.yaml ...
  srun -N 4 torchrun --nnodes 4 ... -m hotspa_megatron.cli.main profile --output cluster.yaml
      measure the network between nodes, too

At most 3 minutes. Run it while nothing else runs: what is measured is what ranks get when all of them work.
"""
_LIMIT_S: Final = 170.0
"""For starting ranks and all that they measure: what is left of the 3 minutes is for ending them."""


def add_command(commands: _SubParsersAction[Any]) -> None:
    """Add ``profile`` to the ``hotspa`` command."""
    parser = commands.add_parser(
        "profile",
        help="measure this machine or cluster",
        description="Measure layers, attention, collectives and messages with all ranks at it; write a description of it.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="hotspa profile --ranks N [--output FILE] [--json]",
    )
    parser.add_argument("--ranks", metavar="N", help="ranks to start here; under torchrun, those that it started")
    parser.add_argument("--output", "-o", default="profile.yaml", metavar="FILE", help="default profile.yaml")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="default: nccl with CUDA devices, else gloo")
    parser.add_argument(
        "--memory-mib", metavar="N", help="memory of a rank that plans may count on (default: what it has)"
    )
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, megatron_arguments: Sequence[str]) -> None:
    """Measure, write and print; ``ValueError`` for bad input, with nothing written."""
    if megatron_arguments:
        raise ValueError("profile takes no arguments of Megatron's; remove what follows --")
    world = World.of(whole("--ranks", arguments.ranks) if arguments.ranks else None)
    memory = whole("--memory-mib", arguments.memory_mib) if arguments.memory_mib else None
    path = Path(arguments.output)
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--output: {path}: write a name that ends in .yaml, by which other commands know it")
    if path.exists() and not arguments.force:
        raise ValueError(f"--output: {path} is there already; give another name, or --force")
    try:
        measured = _measure(world, arguments.backend)
    except RanksFailed as error:
        print(f"hotspa: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if not world.first:
        return
    values, assumed = dict(measured["values"]), dict(measured["assumed"])
    if memory is not None:
        values["memory_mib"], assumed["memory_mib"] = memory, "as given by --memory-mib"
    text = profile_file.as_yaml(
        values,
        assumed,
        title=f"{measured['device']}: {world.size} ranks, {world.local_size} per node, measured by hotspa profile",
        measured=f"measured {datetime.date.today()} by hotspa profile: {measured['versions']}",
        notes=measured["notes"],
    )
    profile_file.write(path, text)
    if arguments.json:
        print(json.dumps({"output": str(path), **measured}, indent=2))
    else:
        print(text, end="")
        print(f"Wrote {path} after {measured['seconds']:.0f} s.")


def _measure(world: World, backend: str | None) -> dict[str, Any]:
    with Jobs(world, _nothing_to_prepare) as jobs:
        ranks = jobs.start("profile", _measure_on_this_rank, backend)
        jobs.begin([ranks])
        # From here on, where all launchers' processes meet, so that their time ends together.
        deadline, doing = time.monotonic() + _LIMIT_S, "beginning"
        while True:
            try:
                messages = ranks.receive(limit_s=max(0.0, deadline - time.monotonic()))
            except RanksFailed:
                if time.monotonic() < deadline:
                    raise
                raise RanksFailed(
                    f"profile: not done within {_LIMIT_S:.0f} s, after which it was still {doing}. End what else runs here, "
                    "or give fewer --ranks"
                ) from None
            if isinstance(messages[0], dict):
                return messages[0]
            doing = f"measuring {messages[0]}"
            if world.first:
                print(f"  {doing}", file=sys.stderr, flush=True)


def _nothing_to_prepare() -> None:
    """Torch is all that ranks need."""


def _measure_on_this_rank(channel: Any, backend: str | None) -> None:
    import torch
    import torch.distributed as dist

    from hotspa_megatron.runtime.calibration import calibrate

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
    dist.init_process_group(chosen)
    done = calibrate(device, ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]), say=channel.send)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    channel.send(
        {
            "device": name,
            "versions": f"{dist.get_world_size()} ranks on {name}, {chosen}, torch {torch.__version__}",
            "values": done.values,
            "assumed": done.assumed,
            "notes": list(done.notes),
            "seconds": done.seconds,
        }
    )
