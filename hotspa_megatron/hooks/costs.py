"""What a running job's step planner knows of time: decided once, at the start, by rank 0 for all ranks.

Planning stays a pure function of what is decided here. ``hardware_here`` is the one place that says what the job runs on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hotspa_megatron.config import ResolvedConfig
from hotspa_megatron.hooks import arguments, cpu
from hotspa_megatron.hooks.auto import cached_profile
from hotspa_megatron.hooks.model import LogicalModel
from hotspa_megatron.planning.hardware import Hardware, described_device, load_hardware
from hotspa_megatron.planning.step_plan import StepCosts, StepPlanner
from hotspa_megatron.planning.step_time import StepEstimator, resolved_costs
from hotspa_megatron.planning.topology import Topology


def hardware_here() -> tuple[Hardware, str]:
    """A profile that was made of this cluster, else the description of this rank's device; and how it was found."""
    profile, problem = cached_profile(), ""
    # Not Path.exists, which raises where a folder may not be entered.
    if profile is not None and os.path.exists(profile):
        try:
            return load_hardware(profile), f"the profile {profile}"
        except ValueError as error:
            problem = f", as the profile of this cluster cannot be used ({error})"
    device = None if cpu.needed() else torch.cuda.get_device_name()
    name = described_device(device)
    return load_hardware(name), f"the description {name} of {device or 'ranks on CPU'}{problem}"


def decide_costs(
    args: Any, resolved: ResolvedConfig, logical: LogicalModel, topology: Topology
) -> tuple[StepCosts, str]:
    """What rank 0 finds for the job's strategies on the nodes of ``topology``, and what that rests on. Collective.

    One rank decides: on another kind of device, or with another library of mathematics, a rank could plan other steps.
    """
    decided: list[Any] = [None]
    if dist.get_rank() == 0:
        hardware, source = hardware_here()
        decided = [(_costs_on(hardware.with_nodes_of(topology.gpus_per_node), args, resolved, logical), source)]
    dist.broadcast_object_list(decided, src=0)
    costs, source = decided[0]
    return costs, source


def decide_estimator(
    args: Any, resolved: ResolvedConfig, logical: LogicalModel, topology: Topology, planner: StepPlanner
) -> Callable[[], StepEstimator]:
    """What makes the model of this job's steps, on what rank 0 says that it runs on. Collective; making it is not."""
    decided: list[Any] = [None]
    if dist.get_rank() == 0:
        decided = [hardware_here()[0].with_nodes_of(topology.gpus_per_node)]
    dist.broadcast_object_list(decided, src=0)
    recompute, layers = arguments.recompute_of(args), _home_layers(logical)
    return lambda: StepEstimator(resolved, decided[0], planner, recompute=recompute, home_layers=layers)


def _costs_on(hardware: Hardware, args: Any, resolved: ResolvedConfig, logical: LogicalModel) -> StepCosts:
    return resolved_costs(resolved, hardware, recompute=arguments.recompute_of(args), home_layers=_home_layers(logical))


def _home_layers(logical: LogicalModel) -> list[list[int]]:
    return [list(stage) for stage in logical.home_layers]
