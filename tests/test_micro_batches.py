"""Micro-batches as ranks get them: boundaries, padding and the parts of context-parallel ranks, for any lengths.

What is cut over ranks is put together again here and compared with the sequences. (That attention over such parts is right
is shown in test_attention.py, that gradients are in test_gradients.py and test_conversations.py.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hotspa_megatron.planning.alignment import alignment_of
from hotspa_megatron.planning.step_plan import Segment, StepPlan
from hotspa_megatron.strategy import Coordinates, Kind, Strategy
from tests.spawn import run_ranks
from tests.training import import_megatron

PACKS: tuple[tuple[int, ...], ...] = (
    *((length,) for length in range(1, 18)),
    tuple(range(1, 10)),
    (1,) * 17,
    (2,),
    (15,),
    (1, 2, 3),
    (512, 512),
    (1023, 1),
)


def test_parts_of_every_strategy_make_up_the_sequences() -> None:
    """tp and cp up to 4, with and without sequence parallelism; lengths down to one token, where ranks get padding alone."""
    seen = run_ranks(_put_together, 1, prepare=import_megatron, init_process_group=False)[0]
    assert seen["micro-batches"] == 9 * 2 * len(PACKS) and seen["ranks with padding alone"] > 0


def _put_together(rank: int, world_size: int) -> dict[str, int]:
    seen = {"micro-batches": 0, "ranks with padding alone": 0}
    for tp, cp in itertools.product((1, 2, 4), repeat=2):
        for parallel, lengths in itertools.product((False, True), PACKS):
            _check(Strategy(tp=tp, cp=cp, pp=1, dp=1), parallel, lengths, seen)
            seen["micro-batches"] += 1
    return seen


class _Numbered:
    """Token i of sequence d is 10,000 d + i + 1: never 0, which is padding."""

    def text(self, piece: Any) -> Any:
        from hotspa_megatron.hooks.samples import Text

        tokens = 10_000 * piece.document + np.arange(piece.length + 1) + 1
        return Text(tokens[:-1], tokens[1:], np.ones(piece.length, bool))


def _check(strategy: Strategy, sequence_parallel: bool, lengths: Sequence[int], seen: dict[str, int]) -> None:
    from hotspa_megatron.hooks.data import SegmentIterator, Step, StepBatch
    from hotspa_megatron.hooks.samples import Piece
    from hotspa_megatron.runtime.attention import zigzag_indices

    alignment = alignment_of(strategy, sequence_parallel=sequence_parallel)
    segment = Segment(group=0, strategy=strategy, kind=Kind.HOME, micro_batches=((tuple(range(len(lengths))),),))
    pieces = tuple(Piece(0, index, 0, length) for index, length in enumerate(lengths))
    step = Step(StepBatch(0, len(lengths)), pieces, StepPlan(lengths=tuple(lengths), segments=(segment,)))
    total = alignment.micro_batch(lengths)
    whole = {name: np.full(total, -1, np.int64) for name in ("tokens", "labels", "position_ids", "loss_mask")}
    samples: Any = _Numbered()
    boundaries: tuple[int, ...] = ()
    for cp in range(strategy.cp):
        (batch,) = SegmentIterator(step, segment, samples, Coordinates(tp=0, cp=cp, dp=0, pp=0), alignment)
        boundaries, real = batch.boundaries, batch.real_boundaries
        # From 0 in rising steps to all tokens, none longer than said; and within 32 bits.
        assert boundaries[0] == real[0] == 0 and boundaries[-1] == total < 2**31
        sizes = np.diff(boundaries)
        assert (sizes > 0).all() and sizes.max() == batch.longest and len(real) == len(boundaries)
        assert np.diff(real)[: len(lengths)].tolist() == list(lengths)
        assert (np.diff(real) <= sizes).all() and (sizes % alignment.sequence == 0).all()
        mine = zigzag_indices(boundaries, strategy.cp, cp).numpy()
        # Every rank of a replica computes equally much, and sequence parallelism can cut it.
        assert batch.tokens.shape == (1, total // strategy.cp)
        assert not sequence_parallel or batch.tokens.shape[1] % strategy.tp == 0
        seen["ranks with padding alone"] += not batch.loss_mask.any()
        for name, values in whole.items():
            assert (values[mine] == -1).all()
            values[mine] = getattr(batch, name)[0].numpy()
    for index, length in enumerate(lengths):
        inside = slice(boundaries[index], boundaries[index] + length)
        assert whole["tokens"][inside].tolist() == [10_000 * index + i + 1 for i in range(length)]
        assert whole["labels"][inside].tolist() == [10_000 * index + i + 2 for i in range(length)]
        assert whole["position_ids"][inside].tolist() == list(range(length))
        assert (whole["loss_mask"][inside] == 1).all()
    # What is left counts for nothing, and stays within a table of learned positions.
    assert whole["loss_mask"].sum() == sum(lengths)
    assert (whole["tokens"] > 0).sum() == sum(lengths)
    assert whole["position_ids"].min() >= 0 and whole["position_ids"].max() < max(lengths)
