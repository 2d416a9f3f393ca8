"""Megatron's own way to move weights into another layout, fed with our layouts: the peer to measure against.

``plan`` runs its planner alone, ``WeightSwap`` all of it on real ranks. For benchmarks and tests; nothing that trains
calls either.
"""

from __future__ import annotations

import math
import time
import types
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotspa_megatron.hooks import cpu
from hotspa_megatron.planning.param_layout import Layout

if TYPE_CHECKING:
    import torch


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
    planner, _ = _import()
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


def _import() -> tuple[Any, Any]:
    """Megatron's planner and what carries its plans out. ValueError where this Megatron has neither."""
    if cpu.needed():
        cpu.install()
    with cpu.quiet_imports():
        try:
            from megatron.core.resharding import planner, refit
        except ImportError as error:
            raise ValueError(f"this Megatron has no megatron.core.resharding: {error}") from error
    return planner, refit


class WeightSwap:
    """``megatron.core.resharding.swap_model_weights`` between two models that hold given tensors.

    It finds in the models what it looks for in a GPTModel: parameters by name with the attributes of Megatron's linear
    layers, and process groups. ``sources`` and ``destination``: this rank's tensors by index into the layouts'
    parameters. ``group`` of a strategy's ranks makes or finds a process group; all ranks call it in the same order.
    ValueError where this Megatron has no such function.
    """

    def __init__(
        self,
        source: Layout,
        destination: Layout,
        *,
        sources: Mapping[int, torch.Tensor],
        destinations: Mapping[int, torch.Tensor],
        rank: int,
        backend: str,
        group: Callable[[tuple[int, ...]], Any],
    ) -> None:
        _, self._refit = _import()
        self._backend = backend
        self._groups = [_groups_of(layout, rank, group) for layout in (source, destination)]
        self._sides = (source, sources), (destination, destinations)
        self.forget()

    def forget(self) -> None:
        """As before the first swap: no plan, and nothing noted in the models. Its key of plans ignores their width."""
        self._refit.clear_plan_cache()
        self._models = [
            _model(layout, tensors, groups) for (layout, tensors), groups in zip(self._sides, self._groups, strict=True)
        ]

    def run(self) -> None:
        source, destination = self._models
        self._refit.swap_model_weights(source, destination, self._backend)


def _groups_of(layout: Layout, rank: int, group: Callable[[tuple[int, ...]], Any]) -> Any:
    found = {}
    for axis in ("tp", "dp", "pp"):
        for ranks in layout.strategy.groups(axis):
            made = group(tuple(ranks))
            if rank in ranks:
                found[axis] = made
    return types.SimpleNamespace(**found, ep=None, expt_tp=None)


def _model(layout: Layout, tensors: Mapping[int, torch.Tensor], groups: Any) -> Any:
    """A module with the tensors as parameters under their global names."""
    import torch

    root = torch.nn.Module()
    for index in sorted(tensors):
        logical = layout.parameters[index]
        *path, name = logical.name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        parameter = torch.nn.Parameter(tensors[index], requires_grad=False)
        parameter.__dict__.update(
            tensor_model_parallel=logical.split_dim is not None,
            partition_dim=logical.split_dim or 0,
            partition_stride=logical.split_stride,
        )
        module.register_parameter(name, parameter)
    root.pg_collection = groups
    root.config = types.SimpleNamespace(num_moe_experts=None)  # type: ignore[assignment]
    return root


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
