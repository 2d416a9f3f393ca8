"""Closed-form estimates of length groups, and what memory leaves them: what the search looks at before it plans a step.

Times of whole steps are not known here: ``step_time`` plans them. Called by ``programme`` and ``search``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hotspa_megatron.planning.alignment import alignment_of
from hotspa_megatron.planning.cost_model import CostModel
from hotspa_megatron.planning.execution import Execution
from hotspa_megatron.planning.hardware import Hardware
from hotspa_megatron.planning.lengths import Lengths
from hotspa_megatron.planning.memory_model import ADAM_BYTES
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.planning.step_time import GroupChoice
from hotspa_megatron.strategy import Strategy

_FILLED: Final = 0.97
"""Share of a micro-batch's room that packing fills."""
SHORTEST_CUT: Final = 512
"""Tokens: below, length groups gain nothing that packing does not."""

Estimates = NDArray[np.float64]


class Models:
    """Cost models of a run whose home is not settled: Megatron turns sequence parallelism off for all if home has tp 1."""

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        world_size: int,
        *,
        home: Strategy | None = None,
        optimizer_bytes: int = ADAM_BYTES,
    ) -> None:
        self.shape, self.hardware, self.world_size = shape, hardware, world_size
        self._home, self._optimizer_bytes = home, optimizer_bytes
        self._models: dict[bool, CostModel] = {}

    def under(self, home: Strategy) -> CostModel:
        """The model that holds where this is home."""
        parallel = self.shape.sequence_parallel and home.tp > 1
        if parallel not in self._models:
            self._models[parallel] = CostModel(
                replace(self.shape, sequence_parallel=parallel),
                self.hardware,
                self.world_size,
                home=self._home,
                optimizer_bytes=self._optimizer_bytes,
            )
        return self._models[parallel]


def cut_points(longest: int) -> tuple[int, ...]:
    """Lengths at which groups may end, after 0: 512 times powers of two, the middles from 2048 on, and the longest."""
    found = {0, longest}
    size = SHORTEST_CUT
    while size < longest:
        found |= {size, size * 3 // 2} if size >= 4 * SHORTEST_CUT else {size}
        size *= 2
    return tuple(sorted(cut for cut in found if cut <= longest))


@dataclass(frozen=True)
class _Sums:
    """Of the sequences in (cut i, cut j], by [batch, i, j]."""

    tokens: Estimates
    squares: Estimates
    count: Estimates
    longest: Estimates

    @classmethod
    def of(cls, batches: Sequence[Lengths], cuts: Sequence[int]) -> _Sums:
        size = len(cuts)
        tokens, squares, count, longest = (np.zeros((len(batches), size, size)) for _ in range(4))
        for number, batch in enumerate(batches):
            ordered = np.sort(batch).astype(np.float64)
            at = np.searchsorted(ordered, cuts, side="right")
            for values, into in ((ordered, tokens), (ordered**2, squares), (np.ones_like(ordered), count)):
                below = np.concatenate([[0.0], np.cumsum(values)])[at]
                into[number] = np.maximum(below[None, :] - below[:, None], 0.0)
            longest[number] = np.where(count[number] > 0, np.concatenate([[0.0], ordered])[at][None, :], 0.0)
        return cls(tokens, squares, count, longest)


class GroupEstimates:
    """What a run's groups may take and how long, for given mini-batches; results are kept.

    ``beyond_longest`` False: no micro-batch larger than its group's longest sequence.
    """

    def __init__(
        self, models: Models, batches: Sequence[Lengths], executions: Sequence[Execution], *, beyond_longest: bool
    ) -> None:
        self.models, self.executions, self.beyond_longest = models, tuple(executions), beyond_longest
        self.longest = models.shape.seq_length
        self.cuts = cut_points(self.longest)
        self.layouts = sorted({execution.layout for execution in executions})
        self._sums = _Sums.of(batches, self.cuts)
        self._seconds: dict[tuple[Execution, int, bool], Estimates] = {}

    def least(self, execution: Execution, home: Strategy, length: int) -> int:
        """Tokens of a micro-batch with one sequence of this length."""
        shape = self.models.under(home).shape
        return alignment_of(execution.strategy, sequence_parallel=shape.sequence_parallel).alone(length)

    def cap(self, capacity: int) -> int:
        """A budget no larger than all that a step could put into one micro-batch."""
        most = max(int(self._sums.tokens[:, 0, -1].max()) * 2, self.longest * 2)
        return capacity if capacity <= most else min(capacity, max(1, most // 4096) * 4096)

    def beside(self, execution: Execution, home: Strategy, others: Sequence[Strategy] = ()) -> int | None:
        """The budget of an execution beside a home, and other strategies, None where it is of no use."""
        capacity = self.models.under(home).memory.capacity(execution, home, others)
        return self.cap(capacity) if capacity >= SHORTEST_CUT else None

    def seconds(self, execution: Execution, capacity: int, home: Strategy) -> Estimates:
        """Mean over the batches of the time of each interval, infinite where its longest sequence does not fit."""
        model = self.models.under(home)
        key = execution, capacity, model.shape.sequence_parallel
        if key in self._seconds:
            return self._seconds[key]
        sums, strategy = self._sums, execution.strategy
        time = model.stage_time(execution)
        work = np.asarray(time.seconds(sums.tokens, sums.squares)) - time.fixed
        alone = np.asarray(time.seconds(sums.longest, sums.longest**2))
        most = np.maximum(1.0, np.ceil(sums.count / strategy.dp))
        room = np.minimum(max(capacity, 1), math.inf if self.beyond_longest else np.maximum(1, self.cuts))
        fewest = np.minimum(most, np.maximum(1.0, np.ceil(sums.tokens / (_FILLED * room) / strategy.dp)))
        if strategy.pp == 1:
            found = np.maximum(work / strategy.dp + time.fixed * fewest, alone)
        else:
            found = np.full_like(work, math.inf)
            for factor in (1, 2, 4):
                count = np.minimum(most, fewest * factor)
                # All are padded to the longest sequence's tokens at least; only one of them has its square.
                tokens = np.maximum(sums.tokens / (strategy.dp * count), sums.longest)
                slot = np.asarray(time.seconds(tokens, sums.squares / (strategy.dp * count)))
                found = np.minimum(found, count * slot + (strategy.pp - 1) / strategy.vpp * np.maximum(slot, alone))
        mean: Estimates = np.where(sums.count > 0, found, 0.0).mean(axis=0)
        fits = np.array([self.least(execution, home, cut) <= capacity if cut else True for cut in self.cuts])
        mean = np.where(fits[None, :], mean, math.inf)
        mean[np.tril_indices(len(self.cuts))] = math.inf
        self._seconds[key] = mean
        return mean

    def end_of_step(self, home: GroupChoice) -> float:
        """Reduction and optimizer, hiding behind a full micro-batch."""
        strategy = home.execution.strategy
        model = self.models.under(strategy)
        tokens = min(float(home.tokens_per_microbatch), float(self._sums.tokens[:, 0, -1].mean()) / strategy.dp)
        last = float(model.stage_time(home.execution).seconds(tokens, 0.0))
        return model.home_reduction(strategy, last=last) + model.optimizer_seconds(strategy)
