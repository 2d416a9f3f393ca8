"""The resharding engine on its own: weights from a training layout into one that generates, without a training job.

    torchrun --nproc-per-node 4 examples/reshard.py

Four ranks hold a model under tp2-pp2; afterwards each holds all of it, as four generating replicas do. Only torch is
needed; on GPUs, initialise NCCL and put the tensors there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from hotspa_megatron.planning.param_layout import Layer, LogicalParameter, model_layout
from hotspa_megatron.planning.reshard_plan import plan_reshard
from hotspa_megatron.planning.topology import Topology
from hotspa_megatron.runtime.executor import Reshard
from hotspa_megatron.runtime.transport import BatchedTransport
from hotspa_megatron.strategy import Strategy

# What the model is, whoever holds it: global names and shapes, and the dim that tensor parallelism splits.
PARAMETERS = [
    LogicalParameter(
        name=f"layers.{number}.{name}", place=Layer(number), shape=shape, split_dim=dim, split_stride=stride
    )
    for number in range(4)
    for name, shape, dim, stride in (
        ("up", (128, 32), 0, 2),  # [gate; up], each half split over tp
        ("down", (32, 64), 1, 1),
        ("norm", (32,), None, 1),
    )
]
TRAINING = model_layout(PARAMETERS, Strategy(tp=2, cp=1, pp=2, dp=1), [range(2), range(2, 4)], tied=False)
GENERATING = model_layout(PARAMETERS, Strategy(tp=1, cp=1, pp=1, dp=4), [range(4)], tied=False)


def main() -> dict[int, torch.Tensor]:
    """Move the weights; returns this rank's, by index into ``PARAMETERS``."""
    rank = dist.get_rank()
    # Two nodes of two ranks: what a node lacks crosses the network once. A plan is the same on every rank, made alone.
    plan = plan_reshard([TRAINING], GENERATING, itemsize=4, topology=Topology.nodes(4, 2))
    reshard = Reshard(plan.for_rank(rank), BatchedTransport(), accumulate=False, dtype=torch.float32)
    trained = {
        index: torch.full(TRAINING.local_shape(index, rank), float(index))
        for index in range(len(PARAMETERS))
        if TRAINING.holds(index, rank)
    }
    generating = {index: torch.empty(parameter.shape) for index, parameter in enumerate(PARAMETERS)}
    # As often as weights change: views and buffers are found once.
    reshard.run(sources=[trained], destination=generating)
    if rank == 0:
        sent, messages = plan.total_bytes / 2**20, plan.num_messages
        print(f"{TRAINING.strategy} -> {GENERATING.strategy}: {sent:.2f} MiB in {messages} messages")
    return generating


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
