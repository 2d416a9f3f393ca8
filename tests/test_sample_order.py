"""The order of samples: random access, epochs, shares."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_megatron.planning.sample_order import SampleOrder

blends = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 40), min_size=n, max_size=n), st.lists(st.floats(0.01, 10), min_size=n, max_size=n)
    )
)


@settings(max_examples=200, deadline=None)
@given(blend=blends, seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 300), max_size=4))
def test_the_order_does_not_depend_on_how_it_is_read(
    blend: tuple[list[int], list[float]], seed: int, cuts: list[int]
) -> None:
    whole = SampleOrder(*blend, seed).samples(0, 300)
    assert len(whole) == 300
    pieces = []
    for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), 300], strict=True):
        pieces += SampleOrder(*blend, seed).samples(begin, end - begin)
    assert pieces == whole


@settings(max_examples=200, deadline=None)
@given(blend=blends, count=st.integers(1, 400))
def test_every_source_keeps_its_share_and_every_epoch_holds_each_document_once(
    blend: tuple[list[int], list[float]], count: int
) -> None:
    documents, shares = blend
    samples = SampleOrder(documents, shares, 1).samples(0, count)
    drawn = collections.Counter(source for source, _ in samples)
    for source, share in enumerate(shares):
        # Its own rounding plus the others': half a document each.
        assert abs(drawn[source] - count * share / sum(shares)) <= max(1.0, len(shares) / 2)
        own = [document for each, document in samples if each == source]
        for start in range(0, len(own), documents[source]):
            epoch = own[start : start + documents[source]]
            assert len(set(epoch)) == len(epoch)


def test_seeds_and_epochs_shuffle_anew() -> None:
    one = SampleOrder([50], [1.0], 1).samples(0, 100)
    assert one[:50] != one[50:]
    assert one != SampleOrder([50], [1.0], 2).samples(0, 100)
    assert sorted(one[:50]) == sorted(one[50:])


def test_far_positions_are_reached_at_once() -> None:
    order = SampleOrder([10, 1000], [0.3, 0.7], 5)
    assert len(order.samples(10**12, 8)) == 8


@pytest.mark.parametrize(("documents", "shares"), [([], []), ([0], [1.0]), ([1], [0.0]), ([1, 2], [1.0])])
def test_impossible_corpora_are_refused(documents: list[int], shares: list[float]) -> None:
    with pytest.raises(ValueError, match=r"sources|source"):
        SampleOrder(documents, shares, 0)
