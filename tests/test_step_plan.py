"""Packing and step plans: every sequence once, the budget strict, the same on every rank."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_megatron.planning.alignment import Alignment, alignment_of
from hotspa_megatron.planning.packing import pack
from hotspa_megatron.planning.step_plan import LengthGroup, StepPlan, StepPlanner
from hotspa_megatron.strategy import Kind, Strategy

alignments = st.sampled_from(
    [
        Alignment(sequence=1, total=1),
        Alignment(sequence=4, total=4),
        Alignment(sequence=4, total=8),
        Alignment(sequence=1, total=2),
    ]
)


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), max_size=60),
    slack=st.integers(0, 500),
    dp=st.integers(1, 5),
    alignment=alignments,
)
def test_every_sequence_is_packed_once_and_no_micro_batch_exceeds_the_budget(
    lengths: list[int], slack: int, dp: int, alignment: Alignment
) -> None:
    budget = max([alignment.alone(n) for n in lengths], default=1) + slack
    packed = pack(lengths, budget=budget, dp=dp, alignment=alignment)
    assert len(packed) == dp
    batches = [batch for rank in packed for batch in rank]
    assert all(batches)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert alignment.pad_total(sum(alignment.pad_sequence(lengths[i]) for i in batch)) <= budget
    assert packed == pack(lengths, budget=budget, dp=dp, alignment=alignment)


@pytest.mark.parametrize(
    ("lengths", "budget"),
    [([7] * 8, 8), ([8] * 3, 8), ([5, 4, 4, 4, 3], 8), ([1] * 17, 8), ([30720] * 16, 32768)],
)
def test_the_budget_is_strict_where_a_count_by_total_tokens_is_too_low(lengths: list[int], budget: int) -> None:
    plain = Alignment(sequence=1, total=1)
    for batches in pack(lengths, budget=budget, dp=1, alignment=plain):
        assert all(sum(lengths[i] for i in batch) <= budget for batch in batches)


def test_work_is_spread_over_ranks_before_it_is_piled_up() -> None:
    packed = pack([10] * 8, budget=1000, dp=4, alignment=Alignment(sequence=1, total=1))
    assert [sum(len(batch) for batch in rank) for rank in packed] == [2, 2, 2, 2]


def test_a_sequence_above_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match="sequence 1 of 61 tokens takes 64"):
        pack([30, 61], budget=60, dp=1, alignment=Alignment(sequence=4, total=4))
    assert pack([60], budget=60, dp=1, alignment=Alignment(sequence=4, total=4)) == (((0,),),)
    with pytest.raises(ValueError, match="at least one token"):
        pack([0], budget=60, dp=1, alignment=Alignment(sequence=1, total=1))


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
