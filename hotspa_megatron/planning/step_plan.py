"""The plan of one step: which strategy runs which sequences, in which order, in whose micro-batches.

A pure function of the mini-batch's lengths and the resolved configuration: every rank computes it alone and gets the
same, which ``StepPlan.digest`` lets ranks compare.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hotspa_megatron.planning.alignment import Alignment
from hotspa_megatron.planning.packing import MicroBatches, pack
from hotspa_megatron.strategy import Kind, Strategy


@dataclass(frozen=True, kw_only=True)
class LengthGroup:
    """Where sequences with length in (longer group's lower bound, ``max_length``] run. Lengths and budget in tokens."""

    strategy: Strategy
    kind: Kind
    max_length: int
    tokens_per_microbatch: int
    alignment: Alignment


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One length group under one strategy inside a step.

    ``group`` is its position in the planner's groups. ``micro_batches[dp]`` lists the micro-batches of data-parallel
    rank ``dp`` as indices into the step's sequences; a rank may have none.
    """

    group: int
    strategy: Strategy
    kind: Kind
    micro_batches: tuple[MicroBatches, ...]

    @property
    def sequences(self) -> int:
        return sum(len(batch) for batches in self.micro_batches for batch in batches)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The ordered segments of one step over the step's sequences (their lengths, in tokens)."""

    lengths: tuple[int, ...]
    segments: tuple[Segment, ...]

    def digest(self) -> int:
        """A 63-bit fingerprint: equal plans have equal fingerprints in any process."""
        text = repr((self.lengths, [(s.group, str(s.strategy), s.micro_batches) for s in self.segments]))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class StepPlanner:
    """Plans steps over fixed length groups, given short to long with home last."""

    def __init__(self, groups: Sequence[LengthGroup]) -> None:
        if not groups or groups[-1].kind is not Kind.HOME:
            raise ValueError("the last length group must be home's")
        self.groups = tuple(groups)
        # Guests first, short to long, so that home's own layout, and with it home's gradients, come last.
        order = {Kind.GUEST: 0, Kind.SIBLING: 1, Kind.HOME: 2}
        self._order = sorted(range(len(groups)), key=lambda g: (order[groups[g].kind], g))

    @classmethod
    def from_resolved(cls, resolved: Any) -> StepPlanner:
        """The planner of a resolved configuration (``config.ResolvedConfig``)."""
        return cls(
            [
                LengthGroup(
                    strategy=each.strategy,
                    kind=each.kind,
                    max_length=each.max_length,
                    tokens_per_microbatch=each.tokens_per_microbatch,
                    alignment=each.alignment,
                )
                for each in (*resolved.strategies, resolved.home)
            ]
        )

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Plan a step for sequences of these lengths (tokens, each at least 1); a group without sequences gets no segment.

        Raises ValueError for a sequence longer than home's max_length.
        """
        members: list[list[int]] = [[] for _ in self.groups]
        for index, length in enumerate(lengths):
            for position, group in enumerate(self.groups):
                if length <= group.max_length:
                    members[position].append(index)
                    break
            else:
                raise ValueError(f"sequence {index} has {length} tokens, more than home's {self.groups[-1].max_length}")
        segments = []
        for position in self._order:
            if not members[position]:
                continue
            group = self.groups[position]
            packed = pack(
                [lengths[i] for i in members[position]],
                budget=group.tokens_per_microbatch,
                dp=group.strategy.dp,
                alignment=group.alignment,
            )
            segments.append(
                Segment(
                    group=position,
                    strategy=group.strategy,
                    kind=group.kind,
                    micro_batches=tuple(
                        tuple(tuple(members[position][i] for i in batch) for batch in batches) for batches in packed
                    ),
                )
            )
        return StepPlan(lengths=tuple(lengths), segments=tuple(segments))
