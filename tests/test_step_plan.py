"""Step plans: every sequence once, guests first and home last, merges that pay, the same on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_megatron.planning.alignment import alignment_of
from hotspa_megatron.planning.step_plan import LengthGroup, StepPlan, StepPlanner
from hotspa_megatron.strategy import Kind, Strategy


def planner() -> StepPlanner:
    home, sibling, guest = (
        Strategy(tp=2, cp=2, pp=1, dp=1),
        Strategy(tp=2, cp=1, pp=1, dp=2),
        Strategy(tp=1, cp=1, pp=1, dp=4),
    )
    return StepPlanner(
        [
            LengthGroup(
                strategy=strategy,
                kind=strategy.kind(home),
                max_length=max_length,
                tokens_per_microbatch=max_length,
                alignment=alignment_of(strategy, sequence_parallel=True),
            )
            # The sibling takes the shortest here: kinds, not lengths, decide which of them runs first.
            for strategy, max_length in ((sibling, 16), (guest, 64), (home, 256))
        ]
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 256), max_size=50))
def test_segments_hold_a_permutation_of_the_batch_with_guests_first_and_home_last(lengths: list[int]) -> None:
    plan = planner().plan(lengths)
    assert sorted(i for s in plan.segments for rank in s.micro_batches for b in rank for i in b) == list(
        range(len(lengths))
    )
    kinds = [segment.kind for segment in plan.segments]
    assert kinds == sorted(kinds, key=[Kind.GUEST, Kind.SIBLING, Kind.HOME].index)
    lower = {16: 0, 64: 16, 256: 64}
    for segment in plan.segments:
        assert segment.sequences
        group = planner().groups[segment.group]
        for rank in segment.micro_batches:
            for batch in rank:
                assert all(lower[group.max_length] < lengths[i] <= group.max_length for i in batch)


def test_only_groups_with_work_get_a_segment() -> None:
    assert [s.kind for s in planner().plan([20, 30]).segments] == [Kind.GUEST]
    assert planner().plan([]).segments == ()
    with pytest.raises(ValueError, match="sequence 1 has 257 tokens"):
        planner().plan([1, 257])


def test_the_digest_tells_plans_apart() -> None:
    plan = planner().plan([5, 20, 100])
    assert plan.digest() == planner().plan([5, 20, 100]).digest()
    assert plan.digest() != planner().plan([5, 21, 100]).digest()
    swapped = StepPlan(lengths=plan.lengths, segments=plan.segments[::-1])
    assert plan.digest() != swapped.digest()
    assert 0 <= plan.digest() < 2**63
