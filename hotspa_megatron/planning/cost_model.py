"""How long micro-batches, reductions, switches and folds take under an execution, from a model's and a cluster's numbers.

Constants are those of ``hardware``; what was fitted, and to what, is in ``scripts/fit_cost_model.py``. Switches and folds
are timed on the reshard plans that would be carried out. Seconds throughout; nothing is measured here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hotspa_megatron.planning.execution import Execution
from hotspa_megatron.planning.hardware import Hardware
from hotspa_megatron.planning.memory_model import ADAM_BYTES, MemoryModel
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.planning.param_layout import Interval, Layout, RankPieces, flat_shards, gpt_parameters
from hotspa_megatron.planning.reshard_plan import ReshardPlan, plan_reshard
from hotspa_megatron.planning.step_plan import MicroBatchTime, reshard_seconds
from hotspa_megatron.strategy import Strategy

Seconds: TypeAlias = NDArray[np.float64]

_RING_OVERLAP: Final = 0.8
"""Share of the attention's time behind which a ring's transfers hide."""
_REDUCTION_OVERLAP: Final = 0.5
"""Share of the last micro-batch, its backward pass, behind which home's gradient reduction hides."""
_NEVER_HIDDEN: Final = 0.1
"""Share of the reduction that is left in any case: the first layers' gradients are ready last."""
_ADAM_TRAFFIC: Final = 28
"""Bytes that Adam reads and writes per parameter of a shard: gradient, master and moments, bf16 result."""


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Time of a micro-batch on the slowest pipeline stage, by cause: seconds per micro-batch, token, squared token.

    Tokens are counted over all context-parallel ranks. ``all_to_all`` is None where heads or query groups do not divide over
    tp * cp, as Transformer Engine asks.
    """

    fixed: float
    gemm: float
    attention: float
    tensor: float
    pipeline: float
    ring: float
    all_to_all: float | None
    recompute_token: float
    recompute_square: float

    @property
    def per_token(self) -> float:
        """Everything that grows with tokens, context parallelism aside."""
        return self.gemm + self.tensor + self.pipeline + self.recompute_token

    @property
    def per_square(self) -> float:
        return self.attention + self.recompute_square

    def context(self, tokens: Seconds | float, squares: Seconds | float) -> Seconds | float:
        """Context parallelism's share, by the cheaper of all-to-all and a ring that hides behind attention."""
        if not self.ring:
            return 0.0
        ring = np.maximum(0.0, self.ring * tokens - _RING_OVERLAP * self.attention * squares)
        return ring if self.all_to_all is None else np.minimum(self.all_to_all * tokens, ring)

    def seconds(self, tokens: Seconds | float, squares: Seconds | float) -> Seconds | float:
        """Time of micro-batches with these tokens and sums of squared lengths."""
        return self.fixed + self.per_token * tokens + self.per_square * squares + self.context(tokens, squares)

    def linear(self) -> MicroBatchTime:
        """What ``step_plan`` balances by: context parallelism counted by all-to-all, or as an unhidden ring."""
        context = self.ring if self.all_to_all is None else min(self.all_to_all, self.ring)
        return MicroBatchTime(per_token=self.per_token + context, per_square=self.per_square, fixed=self.fixed)


class CostModel:
    """Times of one model on one cluster. ``home`` and all after it: see ``MemoryModel``, which this one holds as ``memory``.

    Results depend on the arguments alone and are kept.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        world_size: int,
        *,
        home: Strategy | None = None,
        home_layers: Sequence[Sequence[int]] | None = None,
        optimizer_bytes: int = ADAM_BYTES,
        fold_itemsize: int | None = None,
    ) -> None:
        self.shape = shape
        self.hardware = hardware
        self.world_size = world_size
        self.memory = MemoryModel(
            shape,
            hardware,
            world_size,
            home=home,
            home_layers=home_layers,
            optimizer_bytes=optimizer_bytes,
            fold_itemsize=fold_itemsize,
        )
        self.topology = hardware.topology(world_size)
        parameters = gpt_parameters(shape)
        matrices = [(p.place, math.prod(p.shape)) for p in parameters if len(p.shape) == 2]
        self._head = shape.padded_vocab_size * shape.hidden_size
        self._layer = sum(size for place, size in matrices if place not in ("embedding", "head")) / shape.num_layers
        self._stage_times: dict[Execution, StageTime] = {}
        self._switches: dict[tuple[Strategy, Strategy | None, Strategy], float] = {}
        self._folds: dict[tuple[Strategy, Strategy], float] = {}
        self._shards: dict[Strategy, RankPieces | Layout] = {}

    # ------------------------------------------------------------------------------------------------------ micro-batches

    def stage_time(self, execution: Execution) -> StageTime:
        """What a micro-batch takes on the slowest stage, under an execution."""
        if execution not in self._stage_times:
            self._stage_times[execution] = self._stage_time(execution)
        return self._stage_times[execution]

    def _stage_time(self, execution: Execution) -> StageTime:
        shape, hardware, strategy = self.shape, self.hardware, execution.strategy
        tp, cp, size, again = strategy.tp, strategy.cp, shape.parameter_bytes, execution.recompute
        stages = [len(stage) for stage in self.memory.stages(strategy)]
        # The stage with most work: the last also has the output layer.
        work = [self._layer * layers for layers in stages]
        work[-1] += self._head
        slowest = max(range(len(work)), key=work.__getitem__)
        layers, hidden = stages[slowest], shape.hidden_size
        queries = shape.num_attention_heads * shape.kv_channels
        keys = shape.num_query_groups * shape.kv_channels
        gemm = 6 * work[slowest] / (tp * cp) / hardware.gemm_flops(hidden, parameter_bytes=size)
        attention = 6.0 * queries * layers / (tp * cp)
        attention /= hardware.attention_flops(shape.kv_channels, parameter_bytes=size)
        # Per layer four all-gathers and four reduce-scatters of (tp - 1) / tp of the hidden state.
        tensor = 8 * size * hidden * (tp - 1) / tp * layers / cp / self._tensor_bandwidth(tp)
        ring, all_to_all = 0.0, None
        if cp > 1:
            # Keys and values go round forward, and with their gradients backward.
            ring = 6 * size * keys / tp * (cp - 1) / cp * layers
            ring /= self._card if tp * cp > hardware.gpus_per_node else self._node
            if shape.num_attention_heads % (tp * cp) == 0 and shape.num_query_groups % (tp * cp) == 0:
                # Queries and outputs, keys and values, each twice forward and backward.
                all_to_all = 4 * size * (queries + keys) / (tp * cp) * layers * self._all_to_all_per_byte(tp, cp)
        pipeline = 0.0
        if strategy.pp > 1:
            # Where stages are on several nodes some hop leaves one, and every micro-batch takes every hop.
            crosses = self.world_size > hardware.gpus_per_node
            # Between virtual stages the same goes round once for each of them.
            pipeline = strategy.vpp * 2 * size * hidden / (tp * cp) / (self._card if crosses else self._node)
        fixed = layers * (hardware.layer_overhead_s(tp) + (hardware.context_overhead_us * 1e-6 if cp > 1 else 0.0))
        # A recomputed layer runs forward once more: a third of its operations, half of its communication.
        more = 1 + again / 2
        return StageTime(
            fixed=fixed * (1 + again / 3),
            gemm=gemm,
            attention=attention,
            tensor=tensor * more,
            pipeline=pipeline,
            ring=ring * more,
            all_to_all=None if all_to_all is None else all_to_all * more,
            recompute_token=gemm * again / 3,
            recompute_square=attention * again / 3,
        )

    def ceiling(self, lengths: NDArray[np.int64]) -> float:
        """Seconds of the matrix products and the attention alone, evenly over all ranks: nothing is faster."""
        shape, size = self.shape, self.shape.parameter_bytes
        gemm = 6.0 * (self._layer * shape.num_layers + self._head) * int(lengths.sum())
        attention = 6.0 * shape.num_attention_heads * shape.kv_channels * shape.num_layers
        attention *= float((lengths.astype(np.float64) ** 2).sum())
        gemm /= self.hardware.gemm_flops(shape.hidden_size, parameter_bytes=size)
        attention /= self.hardware.attention_flops(shape.kv_channels, parameter_bytes=size)
        return (gemm + attention) / self.world_size

    # ------------------------------------------------------------------------------------------- the end of segment and step

    def home_reduction(self, home: Strategy, *, last: float) -> float:
        """Exposed time of home's gradient reduction and parameter gather; ``last``: seconds of the last micro-batch."""
        return self.sharded_reduction(home, gradient_bytes=self.shape.gradient_bytes, gather=True, last=last)

    def sharded_reduction(self, strategy: Strategy, *, gradient_bytes: int, gather: bool, last: float) -> float:
        """Exposed time of a reduction over dp * cp that hides behind the backward pass of the last micro-batch.

        With a distributed optimizer it scatters, and ``gather`` adds the parameters' way back; without, it is an all-reduce.
        """
        if strategy.dp * strategy.cp == 1:
            return 0.0
        back = (self.shape.parameter_bytes if gather else 0) if self.shape.distributed_optimizer else gradient_bytes
        whole = self._reduce_seconds(strategy, gradient_bytes + back)
        return max(_NEVER_HIDDEN * whole, whole - _REDUCTION_OVERLAP * last)

    def guest_reduction(self, guest: Strategy) -> float:
        """Time of a guest's own all-reduce of its gradients: it has no distributed optimizer and hides nothing."""
        if guest.dp * guest.cp == 1:
            return 0.0
        return self._reduce_seconds(guest, 2 * self.shape.gradient_bytes)

    def optimizer_seconds(self, home: Strategy) -> float:
        """Adam on a rank's shard, bound by memory."""
        shards = home.dp * home.cp if self.shape.distributed_optimizer else 1
        return _ADAM_TRAFFIC * max(self.memory.numels(home)) / shards / (self.hardware.copy_gigabytes_per_s * 1e9)

    # ----------------------------------------------------------------------------------------------------- switch and fold

    def switch_plan(self, home: Strategy, before: Strategy | None, guest: Strategy) -> ReshardPlan:
        """How a guest is materialised out of home's parameters and those of the guest that ran before (None: none)."""
        sources = (home,) if before is None else (home, before)
        plan = plan_reshard(
            [self.memory.layout(each) for each in sources],
            self.memory.layout(guest),
            itemsize=self.shape.parameter_bytes,
            topology=self.topology,
        )
        self._switches.setdefault(self._switch_key(home, before, guest), self.reshard_time(plan))
        return plan

    def switch_seconds(self, home: Strategy, before: Strategy | None, guest: Strategy) -> float:
        """Time of ``switch_plan``."""
        key = self._switch_key(home, before, guest)
        if key not in self._switches:
            self.switch_plan(*key)
        return self._switches[key]

    def _switch_key(
        self, home: Strategy, before: Strategy | None, guest: Strategy
    ) -> tuple[Strategy, Strategy | None, Strategy]:
        return self._plain(home), None if before is None else self._plain(before), self._plain(guest)

    def chain_switch_seconds(self, before: Strategy, after: Strategy) -> float:
        """Time of a switch as HotSPa does it: out of the layout before alone, every receiver straight from a holder."""
        plan = plan_reshard(
            [self.memory.layout(before)],
            self.memory.layout(after),
            itemsize=self.shape.parameter_bytes,
            topology=self.topology,
            two_phase=False,
        )
        return self.reshard_time(plan)

    def fold_plan(self, guest: Strategy, home: Strategy) -> ReshardPlan:
        """How a guest's finished gradients get to the ranks that own them at home."""
        plan = plan_reshard(
            [self.memory.layout(guest)],
            self._owned(home),
            itemsize=self.memory.fold_itemsize,
            topology=self.topology,
            two_phase=False,
        )
        self._folds.setdefault((self._plain(guest), self._plain(home)), self.reshard_time(plan))
        return plan

    def fold_seconds(self, guest: Strategy, home: Strategy) -> float:
        """Time of ``fold_plan``."""
        key = self._plain(guest), self._plain(home)
        if key not in self._folds:
            self.fold_plan(guest, home)
        return self._folds[key]

    def reshard_time(self, plan: ReshardPlan) -> float:
        """Time of a reshard plan: its messages, and packing and unpacking in the busiest rank's memory."""
        if not plan.messages:
            return 0.0
        busiest = max(plan.bytes_sent(rank) + plan.bytes_received(rank) for rank in range(self.world_size))
        # Each byte is read and written once at either end.
        return reshard_seconds(plan) + 2 * busiest / (self.hardware.copy_gigabytes_per_s * 1e9)

    def exchange_seconds(self, *, near: float, far: float) -> float:
        """Time of an even exchange in which every rank receives so many bytes within its node and from others."""
        return near / self._node + far / self._card

    def _plain(self, strategy: Strategy) -> Strategy:
        """The strategy that stands for all with its layout."""
        return self.memory.plain(strategy)

    def _owned(self, home: Strategy) -> RankPieces | Layout:
        """Where home's gradients are wanted: the distributed optimizer's shards, or home's whole layout."""
        plain = self._plain(home)
        if plain not in self._shards:
            layout = self.memory.layout(plain)
            self._shards[plain] = (
                flat_shards(layout, _optimizer_intervals(layout)) if self.shape.distributed_optimizer else layout
            )
        return self._shards[plain]

    # ------------------------------------------------------------------------------------------------------------- links

    @property
    def _node(self) -> float:
        """Bytes per second and GPU of a collective within a node."""
        return self.hardware.intra_gigabytes_per_s * 1e9

    @property
    def _card(self) -> float:
        """Bytes per second and GPU between nodes, with all GPUs of a node at it."""
        hardware = self.hardware
        return hardware.card_gigabytes_per_s * 1e9 * hardware.cards_per_node / hardware.gpus_per_node

    def _tensor_bandwidth(self, tp: int) -> float:
        hardware = self.hardware
        if tp > hardware.gpus_per_node:
            return hardware.spanning_gigabytes_per_s * 1e9
        return hardware.pair_gigabytes_per_s * 1e9 if tp == 2 else self._node

    def _all_to_all_per_byte(self, tp: int, cp: int) -> float:
        """Seconds per byte that a rank exchanges with all others of its context-parallel group."""
        near = min(cp, max(1, self.hardware.gpus_per_node // tp))
        return (cp - near) / cp / self._card + (near - 1) / cp / self._node

    def _reduce_seconds(self, strategy: Strategy, bytes_per_parameter: int) -> float:
        """Time of a ring over dp * cp ranks that moves so many bytes per parameter, reduce-scatter and gather together."""
        ranks = strategy.dp * strategy.cp
        num_bytes = bytes_per_parameter * max(self.memory.numels(strategy)) * (ranks - 1) / ranks
        bandwidth = self._node
        if strategy.tp * ranks > self.hardware.gpus_per_node:
            # The ring enters and leaves a node once, over the cards of all its members there.
            members = max(1, self.hardware.gpus_per_node // strategy.tp)
            bandwidth = min(bandwidth, members * self._card)
        return num_bytes / bandwidth


def _optimizer_intervals(layout: Layout) -> Mapping[int, Mapping[int, list[Interval]]]:
    """Equal flat shards of each rank's parameters, in reverse order as in Megatron's gradient buffer, over its replicas."""
    strategy = layout.strategy
    intervals: dict[int, dict[int, list[Interval]]] = {}
    for pp in range(strategy.pp):
        for tp in range(strategy.tp):
            first = strategy.rank(tp=tp, cp=0, dp=0, pp=pp)
            held = [index for index in reversed(range(len(layout.parameters))) if layout.holds(index, first)]
            sizes = [math.prod(layout.local_shape(index, first)) for index in held]
            ends = list(accumulate(sizes))
            size = -(-ends[-1] // strategy.dp)
            for dp in range(strategy.dp):
                low, high = dp * size, min((dp + 1) * size, ends[-1])
                of_rank = {}
                for place in range(bisect_right(ends, low), len(held)):
                    start = ends[place] - sizes[place]
                    if start >= high:
                        break
                    of_rank[held[place]] = [(max(low - start, 0), min(high - start, sizes[place]))]
                intervals[strategy.rank(tp=tp, cp=0, dp=dp, pp=pp)] = of_rank
    return intervals
