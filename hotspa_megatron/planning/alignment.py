"""How a strategy pads sequences and micro-batches: the one place that knows, for budgets, packing and batches alike."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from hotspa_megatron.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """Multiples that a strategy asks of token counts, in tokens over all context-parallel ranks of a replica.

    ``sequence``: every sequence is padded to a multiple of it, so that context parallelism can cut it into its two
    balanced halves per rank. ``total``: the sum over a micro-batch is a multiple of it, so that sequence parallelism
    can split what each context-parallel rank holds. ``total`` is itself a multiple of ``sequence``.
    """

    sequence: int
    total: int

    def __post_init__(self) -> None:
        if self.sequence < 1 or self.total < 1 or self.total % self.sequence:
            raise ValueError(f"total {self.total} must be a multiple of sequence {self.sequence}, both at least 1")

    def pad_sequence(self, tokens: int) -> int:
        """Tokens that a sequence of ``tokens`` occupies among others."""
        return -(-tokens // self.sequence) * self.sequence

    def pad_total(self, tokens: int) -> int:
        """Tokens of a micro-batch whose padded sequences sum to ``tokens``."""
        return -(-tokens // self.total) * self.total

    def micro_batch(self, lengths: Iterable[int]) -> int:
        """Tokens of a micro-batch that holds sequences of these lengths."""
        return self.pad_total(sum(self.pad_sequence(length) for length in lengths))

    def alone(self, tokens: int) -> int:
        """Tokens of a micro-batch that holds a single sequence of ``tokens``."""
        return self.pad_total(self.pad_sequence(tokens))


def alignment_of(strategy: Strategy, *, sequence_parallel: bool, token_multiple: int = 1) -> Alignment:
    """The alignment of ``strategy``; sequence parallelism has no effect at tp 1, as in Megatron.

    ``token_multiple``: what the tokens that a rank holds have to be a multiple of.
    """
    sequence = 2 * strategy.cp if strategy.cp > 1 else 1
    ranks = strategy.cp * strategy.tp if sequence_parallel else strategy.cp
    return Alignment(sequence=sequence, total=math.lcm(sequence, ranks * token_multiple))
