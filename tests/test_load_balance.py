"""Work handed out to servers: all of it once, close to the least possible maximum, and to few servers per receiver."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotspa_megatron.planning.load_balance import ANYONE, Pool, Segment, Share, share_out, water_fill

quick = settings(max_examples=100, deadline=None)


def anywhere(line: int, position: int) -> int:
    return position


def least_maximum(demands: Sequence[tuple[tuple[int, ...], int]]) -> Fraction:
    """The busiest server's load in the best of all ways: what some pools ask of servers that only they can use.

    By the max-flow min-cut theorem the worst set of pools is the bound, and it is reached.
    """
    bound = Fraction(0)
    for count in range(1, len(demands) + 1):
        for chosen in itertools.combinations(demands, count):
            servers = set().union(*(servers for servers, _ in chosen))
            bound = max(bound, Fraction(sum(amount for _, amount in chosen), len(servers)))
    return bound


@st.composite
def pools(draw: st.DrawFn) -> list[Pool]:
    """A few pools over a few servers, with segments of several lines for several receivers."""
    made = []
    for line in range(draw(st.integers(1, 5))):
        servers = draw(st.sets(st.integers(0, 6), min_size=1))
        size = draw(st.integers(1, 4)) * 10_000
        receivers = draw(st.lists(st.integers(10, 20), min_size=1, max_size=6, unique=True))
        segments = [Segment(receiver, line, 0, size) for receiver in receivers]
        made.append(Pool(tuple(sorted(servers)), segments))
    return made


def check_complete(given_out: Sequence[Pool], shares: Sequence[Sequence[Share]]) -> None:
    """Every element of every segment has exactly one server, and one that may serve it."""
    for pool, of_pool in zip(given_out, shares, strict=True):
        assert all(server in pool.servers for _, server in of_pool)
        parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for segment, _ in of_pool:
            assert segment.size > 0
            parts.setdefault((segment.receiver, segment.line), []).append((segment.first, segment.last))
        for segment in pool.segments:
            found = sorted(parts.pop((segment.receiver, segment.line)))
            assert found[0][0] == segment.first and found[-1][1] == segment.last
            assert all(before[1] == after[0] for before, after in itertools.pairwise(found))
        assert not parts


@quick
@given(pools())
def test_everything_is_served_once_and_the_busiest_server_has_close_to_the_least(given_out: list[Pool]) -> None:
    load: dict[int, int] = {}
    shares = share_out(given_out, load, anywhere)
    check_complete(given_out, shares)
    counted: Counter[int] = Counter()
    for segment, server in itertools.chain.from_iterable(shares):
        counted[server] += segment.size
    assert {server: amount for server, amount in load.items() if amount} == dict(counted)
    best = least_maximum([(pool.servers, sum(s.size for s in pool.segments)) for pool in given_out])
    assert max(load.values()) <= best * Fraction(101, 100)


@quick
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 200))
@example([0, 10, 10], 0)
def test_water_fills_the_lowest(loads: list[int], amount: int) -> None:
    parts = water_fill(loads, amount)
    assert sum(parts) == amount and min(parts) >= 0
    after = [load + part for load, part in zip(loads, parts, strict=True)]
    filled = [level for level, part in zip(after, parts, strict=True) if part]
    if filled:
        assert max(filled) - min(filled) <= 1
        assert all(level >= max(filled) - 1 for level in after)


def test_receivers_are_handed_out_whole_where_their_number_is_a_multiple() -> None:
    pool = Pool((0, 1), [Segment(receiver, 0, 0, 100) for receiver in range(10, 16)])
    (shares,) = share_out([pool], {}, anywhere)
    assert [(segment.receiver, server) for segment, server in shares] == [
        *((receiver, 0) for receiver in (10, 11, 12)),
        *((receiver, 1) for receiver in (13, 14, 15)),
    ]


def test_only_a_receiver_between_two_servers_is_cut() -> None:
    pool = Pool((0, 1, 2), [Segment(receiver, 0, 0, 3000) for receiver in (10, 11)])
    (shares,) = share_out([pool], {}, anywhere)
    assert [(segment.receiver, segment.first, segment.last, server) for segment, server in shares] == [
        (10, 0, 2000, 0),
        (10, 2000, 3000, 1),
        (11, 0, 1000, 1),
        (11, 1000, 3000, 2),
    ]


def test_cuts_are_made_where_the_line_may_be_cut() -> None:
    pool = Pool((0, 1, 2), [Segment(10, 0, 0, 3000)])
    (shares,) = share_out([pool], {}, lambda line, position: round(position / 700) * 700)
    assert [(segment.first, segment.last) for segment, _ in shares] == [(0, 700), (700, 2100), (2100, 3000)]
    # A line in one piece goes to one server.
    (shares,) = share_out([pool], {}, lambda line, position: 0)
    assert [(segment.first, segment.last) for segment, _ in shares] == [(0, 3000)]


def test_small_things_come_from_who_sends_to_the_receiver_anyway() -> None:
    large = [Pool((server,), [Segment(10 + server, server, 0, 80_000)]) for server in range(4)]
    small = Pool((0, 1, 2, 3), [Segment(13 - n, 9, 10 * n, 10 * n + 10) for n in range(4)])
    shares = share_out([small, *large], {}, anywhere)
    assert {(segment.receiver, server) for segment, server in shares[0]} == {(10 + n, n) for n in range(4)}


def test_what_servers_carry_already_counts() -> None:
    load = {0: 900, 1: 0}
    (shares,) = share_out([Pool((0, 1), [Segment(ANYONE, 0, 0, 1000)])], load, anywhere)
    assert [(segment.first, segment.last, server) for segment, server in shares] == [(0, 50, 0), (50, 1000, 1)]
    assert load == {0: 950, 1: 950}


def test_one_server_in_common_takes_less_of_each() -> None:
    # Filled one after the other, server 1 would have twice the others' load.
    given_out = [
        Pool((0, 1), [Segment(10, 0, 0, 30_000)]),
        Pool((1, 2), [Segment(11, 1, 0, 30_000)]),
    ]
    load: dict[int, int] = {}
    check_complete(given_out, share_out(given_out, load, anywhere))
    assert max(load.values()) <= 20_200
