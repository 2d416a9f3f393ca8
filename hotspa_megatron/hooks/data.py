"""One step's samples -> its plan -> every rank's own part of every micro-batch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from hotspa_megatron.hooks.samples import Piece, Samples
from hotspa_megatron.planning.alignment import Alignment
from hotspa_megatron.planning.step_plan import Segment, StepPlan, StepPlanner
from hotspa_megatron.runtime.attention import zigzag_indices
from hotspa_megatron.strategy import Coordinates

# ---------------------------------------------------------------------------------------------------- one step's data


@dataclass(frozen=True)
class StepBatch:
    """Which samples a step takes."""

    first_sample: int
    samples: int


@dataclass(frozen=True)
class Step:
    """A step ready to run: its sequences and the plan over them (``plan.lengths[i]`` is ``sequences[i].length``)."""

    batch: StepBatch
    sequences: tuple[Piece, ...]
    plan: StepPlan


class StepLoader:
    """Serves steps as a pure function of consumed samples.

    Iterating yields the numbers of a ``StepBatch`` per step, for the position and size that ``position`` reports then, so
    batch-size ramp-up and skipped iterations need nothing of their own. (Numbers, because a checkpoint for a rerun elsewhere
    keeps what was yielded, and Megatron reads no class of ours from one.) While a step runs, a thread plans the one that
    follows it if nothing unusual happens; anything else is planned when it is asked for.
    """

    def __init__(self, samples: Samples, planner: StepPlanner, *, position: Callable[[], tuple[int, int]]) -> None:
        self.samples = samples
        self._planner = planner
        self._position = position
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hotspa-planner")
        # The last step, which a rerun asks for again, and the next.
        self._planned: dict[StepBatch, Future[Step]] = {}

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while True:
            yield self._position()

    def step(self, batch: StepBatch) -> Step:
        """The step of these samples; an error in them is raised here, when the step is due, not when it was planned."""
        following = StepBatch(batch.first_sample + batch.samples, batch.samples)
        planned = {each: self._plan(each) for each in (batch, following)}
        self._planned = planned
        return planned[batch].result()

    def _plan(self, batch: StepBatch) -> Future[Step]:
        known = self._planned.get(batch)
        return known if known is not None else self._worker.submit(self._make_step, batch)

    def _make_step(self, batch: StepBatch) -> Step:
        sequences = self.samples.pieces(batch.first_sample, batch.samples)
        return Step(batch, tuple(sequences), self._planner.plan([each.length for each in sequences]))


# ------------------------------------------------------------------------------------------------------ micro-batches


@dataclass(frozen=True)
class MicroBatch:
    """This rank's part of one packed micro-batch, batch dim 1.

    ``tokens``, ``labels``, ``position_ids``: int64 [1, tokens / cp]; ``loss_mask``: float32 alike; ``boundaries``: the
    cumulative padded lengths over all context-parallel ranks, ``real_boundaries`` without the padding at each
    sequence's end; ``longest``: the longest padded sequence.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    boundaries: tuple[int, ...]
    real_boundaries: tuple[int, ...]
    longest: int


_FILLER: Final = 128
"""Tokens of the sequences in a micro-batch without real ones: short, but not so short that they are many."""


class SegmentIterator:
    """The micro-batches of one segment that this rank runs, in order; ``forward_step`` takes them from here.

    Micro-batches of a pipelined replica are all padded to the replica's longest, ``total_tokens``, so that stages know
    each other's shapes without asking.
    """

    def __init__(self, step: Step, segment: Segment, samples: Samples, at: Coordinates, alignment: Alignment) -> None:
        self._step, self._samples, self._at, self._alignment = step, samples, at, alignment
        self._cp = segment.strategy.cp
        self._batches = segment.micro_batches[at.dp]
        totals = [alignment.micro_batch(step.plan.lengths[i] for i in batch) for batch in self._batches]
        self.total_tokens = max(totals, default=0)
        self._totals = [self.total_tokens] * len(totals) if segment.strategy.pp > 1 else totals
        self._next = 0
        self.latest_mask: torch.Tensor | None = None
        """Loss mask of the micro-batch that was served last."""

    def __len__(self) -> int:
        return len(self._batches)

    def again(self) -> SegmentIterator:
        """The same micro-batches from the first on, for another chunk of an interleaved pipeline."""
        fresh = copy.copy(self)
        fresh._next = 0
        return fresh

    @property
    def padded(self) -> int:
        """Tokens that this rank's replica computes over, padding included."""
        return sum(self._totals)

    def __iter__(self) -> SegmentIterator:
        return self

    def __next__(self) -> MicroBatch:
        if self._next == len(self._batches):
            raise StopIteration
        batch, total = self._batches[self._next], self._totals[self._next]
        self._next += 1
        built = self._build(batch, total)
        self.latest_mask = built.loss_mask
        return built

    def _build(self, batch: tuple[int, ...], total: int) -> MicroBatch:
        tokens, labels = np.zeros(total, np.int64), np.zeros(total, np.int64)
        mask, positions = np.zeros(total, np.float32), np.zeros(total, np.int64)
        boundaries, real = [0], [0]
        for index in batch:
            piece = self._step.sequences[index]
            begin, padded = boundaries[-1], self._alignment.pad_sequence(piece.length)
            end = begin + piece.length
            tokens[begin:end], labels[begin:end], mask[begin:end] = self._samples.text(piece)
            # Padding repeats the last position: it is never looked at, and stays within a learned position table.
            positions[begin : begin + padded] = np.minimum(np.arange(padded), piece.length - 1)
            boundaries.append(begin + padded)
            real.append(real[-1] + piece.length)
        # What is left belongs to sequences of its own, none longer than the real ones: attention is quadratic. A micro-batch
        # without any, which an interleaved schedule may need to make up its number, has no weight in the loss at all.
        longest = max(
            (end - begin for begin, end in itertools.pairwise(boundaries)),
            default=min(total, self._alignment.pad_sequence(_FILLER)),
        )
        while boundaries[-1] < total:
            filler = min(longest, total - boundaries[-1])
            real.append(real[-1] + filler)
            boundaries.append(boundaries[-1] + filler)
        mine = zigzag_indices(boundaries, self._cp, self._at.cp).numpy()

        def part(values: NDArray[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.from_numpy(values[mine]).to(dtype).unsqueeze(0).cuda(non_blocking=True)

        return MicroBatch(
            tokens=part(tokens),
            labels=part(labels),
            loss_mask=part(mask, torch.float32),
            position_ids=part(positions),
            boundaries=tuple(boundaries),
            real_boundaries=tuple(real),
            longest=longest,
        )


def padding_fraction(step: Step, planner: StepPlanner) -> float:
    """Share of the step's computed tokens that pad; 0 for an empty step."""
    computed = sum(planner.computed_tokens(segment, step.plan.lengths) for segment in step.plan.segments)
    return 1.0 - sum(step.plan.lengths) / computed if computed else 0.0
