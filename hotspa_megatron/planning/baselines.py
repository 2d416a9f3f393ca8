"""What others do with the same mini-batches on the same modelled cluster: the systems that a plan is compared with.

Static Megatron as it is usually run, HotSPa's own tables and rules, Megatron's hybrid context parallelism, the ideal that
packed dynamic context parallelism could reach, and what the kernels alone take. Static with our packing is a plan like any
other and comes from ``search``. Pure; used by ``simulate``.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hotspa_megatron.planning.cost_model import CostModel, Seconds
from hotspa_megatron.planning.execution import RECOMPUTE_SHARES, Execution
from hotspa_megatron.planning.legality import tp_problem
from hotspa_megatron.planning.lengths import Lengths
from hotspa_megatron.planning.packing import first_fit
from hotspa_megatron.strategy import Strategy

_ROWS: Final = (1, 2, 4, 8, 16)
"""Contexts that a row of the usual static run may hold."""
_FOLD_EXPOSED: Final = 0.3
"""Share of HotSPa's gradient moves that its next segment does not hide (an assumption)."""
_HOTSPA_GRADIENT_BYTES: Final = 2
"""HotSPa accumulates and moves gradients in bf16."""


@dataclass(frozen=True, kw_only=True)
class HotSPaTable:
    """A table of HotSPa's artifact: (dp, tp, pp) for the longest sequences first, then from the shortest up.

    ``limits``: where length groups end, longest first, in tokens.
    """

    strategies: tuple[tuple[int, int, int], ...]
    limits: tuple[int, ...]


# "c1" of llama_hot_switch.sh in HotSPa's artifact (SOSP'24), for its CommonCrawl runs, by context in units of 1024 tokens.
_SHORT_TO_LONG: Final[Mapping[tuple[str, int], Mapping[int, tuple[tuple[int, int, int], ...]]]] = {
    ("llama-7b", 8): {
        32: ((1, 4, 2), (8, 1, 1), (2, 2, 2)),
        16: ((2, 2, 2), (8, 1, 1)),
        8: ((2, 2, 2), (8, 1, 1)),
        4: ((8, 1, 1),),
    },
    ("llama-7b", 16): {
        32: ((2, 4, 2), (16, 1, 1), (4, 4, 1)),
        16: ((4, 4, 1), (16, 1, 1)),
        8: ((4, 4, 1), (16, 1, 1)),
        4: ((16, 1, 1),),
    },
    ("llama-13b", 16): {
        32: ((2, 8, 1), (8, 2, 1), (4, 4, 1)),
        16: ((4, 4, 1), (8, 2, 1)),
        8: ((4, 4, 1), (8, 2, 1)),
        4: ((8, 2, 1),),
    },
    ("llama-32b", 32): {
        32: ((1, 16, 2), (4, 2, 4), (2, 8, 2)),
        16: ((2, 8, 2), (4, 2, 4)),
        8: ((2, 8, 2), (4, 2, 4)),
        4: ((4, 2, 4),),
    },
}
_LIMITS: Final = {32: (32768, 16384, 4096), 16: (16384, 4096), 8: (8192, 4096), 4: (4096,)}


def hotspa_table(model: str, gpus: int, context: int) -> HotSPaTable | None:
    """HotSPa's table for one of its own settings, None where it has none; ``context`` in tokens."""
    of = _SHORT_TO_LONG.get((model, gpus), {}).get(context // 1024)
    return None if of is None else HotSPaTable(strategies=of, limits=_LIMITS[context // 1024])


# ------------------------------------------------------------------------------------------------------------------ static


def static_first_fit(model: CostModel, executions: Iterable[Execution], batches: Sequence[Lengths]) -> float:
    """Mean step of the best static run as usual: rows of whole contexts filled first-fit in random order, round robin.

    A row is one micro-batch; rows of several contexts are tried as far as memory goes.
    """
    context = model.shape.seq_length
    packed: dict[tuple[int, int], tuple[Seconds, Seconds]] = {}
    best = math.inf
    for execution in executions:
        capacity = model.memory.capacity(execution, execution.strategy)
        for contexts in _ROWS:
            if context * contexts > capacity:
                break
            seconds = []
            for number, batch in enumerate(batches):
                key = number, contexts
                if key not in packed:
                    order = np.random.Generator(np.random.PCG64(0)).permutation(batch)
                    packed[key] = _rows(order, context * contexts)
                tokens, squares = packed[key]
                if execution.strategy.pp > 1:
                    # The stages of a pipeline exchange micro-batches of one shape.
                    tokens = np.full_like(tokens, tokens.max())
                seconds.append(_rows_seconds(model, execution, tokens, squares))
            best = min(best, _mean(seconds))
    return best


def one_sequence_each(model: CostModel, execution: Execution, batches: Sequence[Lengths]) -> float:
    """Mean step of a static run without packing: every sequence is a micro-batch of its own, round robin over ranks."""
    steps = []
    for batch in batches:
        tokens = batch.astype(np.float64)
        steps.append(_rows_seconds(model, execution, tokens, tokens**2))
    return _mean(steps)


def _rows_seconds(model: CostModel, execution: Execution, tokens: Seconds, squares: Seconds) -> float:
    strategy = execution.strategy
    each = np.asarray(model.stage_time(execution).seconds(tokens, squares))
    ranks = np.pad(each, (0, -len(each) % strategy.dp)).reshape(-1, strategy.dp).sum(axis=0)
    busy = float(ranks.max() + (strategy.pp - 1) * each.max() / strategy.vpp)
    last = float(each.mean())
    return busy + model.home_reduction(strategy, last=last) + model.optimizer_seconds(strategy)


def _rows(lengths: Lengths, room: int) -> tuple[Seconds, Seconds]:
    """(tokens, sum of squares) of each row that first fit fills."""
    rows = [lengths[row].astype(np.float64) for row in first_fit(lengths.tolist(), room)]
    return np.array([row.sum() for row in rows]), np.array([(row**2).sum() for row in rows])


# --------------------------------------------------------------------------------------------------------- HotSPa's own rules


def hotspa_rules(model: CostModel, table: HotSPaTable, batches: Sequence[Lengths]) -> float:
    """Mean step under HotSPa's table with its artifact's rules.

    Rows filled first-fit from the longest sequence down and padded to their group's limit, round robin over replicas; no
    recomputation, no context parallelism; gradients in bf16 travel along from one strategy to the next, home's parameters
    too. Rows that do not fill all replicas are kept, which the artifact drops; its memory is not checked.
    """
    home, *others = [Strategy.from_world(model.world_size, tp=tp, cp=1, pp=pp) for _, tp, pp in table.strategies]
    lowers = (*table.limits[1:], 0)
    # Short to long, home last.
    order = [
        *zip(others, reversed(table.limits[1:]), reversed(lowers[1:]), strict=True),
        (home, table.limits[0], lowers[0]),
    ]
    moves, before = 0.0, home
    for position, (strategy, _, _) in enumerate(order):
        if not strategy.same_layout(before):
            moves += model.chain_switch_seconds(before, strategy)
        if position:
            moves += _FOLD_EXPOSED * _shard_move(model)
        before = strategy
    steps = []
    for batch in batches:
        total = moves + model.optimizer_seconds(home)
        for strategy, upper, lower in order:
            inside = np.sort(batch[(batch > lower) & (batch <= upper)])[::-1]
            if not len(inside):
                continue
            tokens, squares = _rows(inside, upper)
            # What a row is padded with is a sequence of its own to the attention kernel.
            squares = squares + (upper - tokens) ** 2
            each = np.asarray(
                model.stage_time(Execution(strategy=strategy)).seconds(np.full_like(tokens, upper), squares)
            )
            ranks = np.pad(each, (0, -len(each) % strategy.dp)).reshape(-1, strategy.dp).sum(axis=0)
            total += float(ranks.max() + (strategy.pp - 1) * each.max())
            total += model.sharded_reduction(
                strategy,
                gradient_bytes=_HOTSPA_GRADIENT_BYTES,
                gather=strategy == home,
                last=float(each.mean()),
            )
        steps.append(total)
    return _mean(steps)


def _shard_move(model: CostModel) -> float:
    """Seconds in which every rank receives its shard of the gradients from wherever they are, evenly over all ranks."""
    parameters = sum(model.memory.numels(Strategy.from_world(model.world_size, tp=1, cp=1, pp=1)))
    num_bytes = _HOTSPA_GRADIENT_BYTES * parameters / model.world_size
    nodes = model.topology.num_nodes
    return model.exchange_seconds(near=num_bytes / nodes, far=num_bytes * (1 - 1 / nodes))


# --------------------------------------------------------------------------------------------------- context parallelism alone


def hybrid_context(model: CostModel, batches: Sequence[Lengths], *, max_tp: int, packed: bool) -> float:
    """Mean step of context parallelism by sequence length under one tp and pp 1.

    Each sequence runs on the power of two of context-parallel ranks that holds it, longest first on the ranks that are free
    earliest, without any barrier. ``packed`` False: one sequence per micro-batch, as in Megatron's hybrid_cp_schedule.
    True: the ideal of a scheme that packs, in which a sequence pays its share of a micro-batch's fixed time and nothing is
    lost between micro-batches; no such scheduler exists. In the rival's favour, tp and recomputation are the best for every
    batch by itself, and the reduction hides behind a quarter of the step, whatever comes last.
    """
    return _mean([_best_hybrid(model, batch, max_tp=max_tp, packed=packed) for batch in batches])


def _best_hybrid(model: CostModel, batch: Lengths, *, max_tp: int, packed: bool) -> float:
    best = math.inf
    shape = model.shape
    for tp in (size for size in range(1, max_tp + 1) if model.world_size % size == 0):
        if tp_problem(shape, tp) is not None or shape.padded_vocab_size % tp:
            continue
        alone = Strategy.from_world(model.world_size, tp=tp, cp=1, pp=1)
        for share in RECOMPUTE_SHARES:
            capacity = model.memory.capacity(Execution(strategy=alone, recompute=share), alone)
            if capacity < 64 or int(batch.max()) > capacity * alone.dp:
                continue
            busy = _scheduled(model, batch, tp=tp, share=share, capacity=capacity, packed=packed)
            best = min(best, busy + model.home_reduction(alone, last=busy / 4) + model.optimizer_seconds(alone))
    return best


def _scheduled(model: CostModel, batch: Lengths, *, tp: int, share: float, capacity: int, packed: bool) -> float:
    """When the last rank is done."""
    width = model.world_size // tp
    busy: dict[int, list[tuple[float, int]]] = {}
    clock: NDArray[np.float64] = np.zeros(width)
    for length in sorted(batch.tolist(), reverse=True):
        cp = 2 ** max(0, math.ceil(math.log2(length / capacity)))
        strategy = Strategy.from_world(model.world_size, tp=tp, cp=cp, pp=1)
        time = model.stage_time(Execution(strategy=strategy, recompute=share))
        seconds = float(time.seconds(float(length), float(length) ** 2))
        if packed:
            seconds += time.fixed * (min(1.0, length / cp / capacity) - 1)
        if cp not in busy:
            # Sequences come longest first, so that blocks only ever become smaller.
            blocks = clock.reshape(-1, cp).max(axis=1) if not busy else _clock(busy, width).reshape(-1, cp).max(axis=1)
            busy = {cp: [(at, block) for block, at in enumerate(blocks.tolist())]}
            heapq.heapify(busy[cp])
        at, block = busy[cp][0]
        heapq.heapreplace(busy[cp], (at + seconds, block))
    return max(at for blocks in busy.values() for at, _ in blocks)


def _clock(busy: Mapping[int, list[tuple[float, int]]], width: int) -> NDArray[np.float64]:
    clock = np.zeros(width)
    for cp, blocks in busy.items():
        for at, block in blocks:
            clock[block * cp : (block + 1) * cp] = at
    return clock


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
