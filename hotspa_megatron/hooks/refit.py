"""Megatron's own planner for moving weights into another layout, fed with our layouts: the peer to measure against.

For benchmarks and tests; nothing that trains calls it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hotspa_megatron.hooks import cpu
from hotspa_megatron.planning.param_layout import Layout


@dataclass(frozen=True)
class PeerPlan:
    """What Megatron would do. It sends every slice on its own: ``operations`` is how many it sends."""

    pairs: dict[tuple[int, int], int]
    """Bytes by (sender, receiver)."""
    operations: int
    seconds: float
    """CPU seconds of one replay of the whole schedule, which every rank makes to find its own part."""


def plan(source: Layout, destination: Layout, *, itemsize: int) -> PeerPlan:
    """Megatron's plan for the same move. ValueError where this Megatron has no planner that takes descriptions.

    Puts the CPU stand-in in place where there is no CUDA device, since Megatron cannot be imported without.
    """
    if cpu.needed():
        cpu.install()
    with cpu.quiet_imports():
        try:
            from megatron.core.resharding import planner
        except ImportError as error:
            raise ValueError(f"this Megatron has no megatron.core.resharding: {error}") from error
    replay = getattr(planner, "_iter_global_transfer_ops", None)
    if replay is None:
        raise ValueError("this Megatron's resharding planner cannot be run without building the models; 0.19 can")
    world = max(source.world_size, destination.world_size)
    described = [_describe(source, itemsize), _describe(destination, itemsize)]
    rosters = planner.index_metadata_rosters(
        [tuple(of[rank] if rank < len(of) else [] for of in described) for rank in range(world)]
    )
    pairs: Counter[tuple[int, int]] = Counter()
    operations = 0
    started = time.process_time()
    schedule = list(replay(*rosters))
    seconds = time.process_time() - started
    for _, receiver, sender, _, taken, _, metadata in schedule:
        if sender != receiver:
            sizes = (len(range(*where.indices(size))) for where, size in zip(taken, metadata.shape, strict=True))
            pairs[sender, receiver] += math.prod(sizes) * itemsize
            operations += 1
    return PeerPlan(dict(pairs), operations, seconds)


def _describe(layout: Layout, itemsize: int) -> list[list[Any]]:
    """Megatron's description of every rank's tensors."""
    import torch
    from megatron.core.resharding.utils import ParameterMetadata

    groups = {
        axis: {rank: list(group) for group in layout.strategy.groups(axis) for rank in group} for axis in ("tp", "dp")
    }
    described = []
    for rank in range(layout.world_size):
        held = sorted({piece.parameter for piece in layout.pieces(rank)})
        described.append(
            [
                ParameterMetadata(
                    name=parameter.name,
                    resolved_name=parameter.name,
                    shape=layout.local_shape(index, rank),
                    dtype=torch.bfloat16,
                    element_size=itemsize,
                    is_tp=parameter.split_dim is not None,
                    partition_dim=parameter.split_dim or 0,
                    partition_stride=parameter.split_stride,
                    owner_rank=rank,
                    tensor_parallel_group_ranks=groups["tp"][rank],
                    data_parallel_group_ranks=groups["dp"][rank],
                )
                for index, parameter in ((index, layout.parameters[index]) for index in held)
            ]
        )
    return described
