"""Hands pieces of work out to servers so that the busiest has as little as possible, and few servers meet each receiver.

The work lies on lines of elements that may be cut almost anywhere. How much each server takes is settled first, exactly
and over all pools at once; then receivers are handed out whole, and only one that straddles two servers' amounts is cut.
Everything is whole numbers: ranks on unlike processors must come to the same result. Used by ``reshard_plan``, whose
servers are ranks and network cards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

ANYONE: Final = -1
"""Receiver of a segment for which a server is all that is wanted."""

_ROUNDS: Final = 32
"""Passes over all pools. Two are enough where pools are apart or nested; others close in on the optimum."""
_GRAIN: Final = 1000
"""Less than one part in so many of the busiest server's load is not worth a message of its own."""

Load = dict[int, int]
"""Elements that each server has been given already; servers that are not named have none."""


class Segment(NamedTuple):
    """Elements [first, last) of a line, for one receiver."""

    receiver: int
    line: int
    first: int
    last: int

    @property
    def size(self) -> int:
        return self.last - self.first


class Pool(NamedTuple):
    """Segments that the same servers, ascending and at least one, can serve."""

    servers: tuple[int, ...]
    segments: Sequence[Segment]


Share = tuple[Segment, int]
"""A segment, cut or whole, and its server."""


def share_out(pools: Sequence[Pool], load: Load, cut: Callable[[int, int], int]) -> list[list[Share]]:
    """Give every segment of every pool a server; adds what each server takes to ``load``.

    ``cut(line, position)`` is the position nearest to ``position`` at which the line may be cut. The shares come per
    pool, in the order of ``pools``.
    """
    order = sorted(range(len(pools)), key=lambda index: (len(pools[index].servers), pools[index].servers, index))
    amounts = _balance([pools[index] for index in order], load)
    slack = max(load.values(), default=0) // _GRAIN
    partners: dict[int, dict[int, None]] = {}
    shares: list[list[Share]] = [[] for _ in pools]
    for index, planned in zip(order, amounts, strict=True):
        pool = pools[index]
        room = dict(zip(pool.servers, planned, strict=True))
        for server, amount in room.items():
            load[server] -= amount
        found = shares[index]
        rest: list[Segment] = []
        for segment in sorted(pool.segments):
            # Who sends to the receiver already sends it this, too, as long as it stays within its amount.
            for server in partners.get(segment.receiver, ()):
                if server in room and segment.size <= room[server] + slack:
                    room[server] -= segment.size
                    load[server] += segment.size
                    found.append((segment, server))
                    break
            else:
                rest.append(segment)
        amounts_left = water_fill([load[server] for server in pool.servers], sum(each.size for each in rest))
        for segment, server in _lay_out(rest, pool.servers, amounts_left, slack, cut):
            load[server] += segment.size
            found.append((segment, server))
            if segment.receiver != ANYONE:
                partners.setdefault(segment.receiver, {})[server] = None
    return shares


def water_fill(loads: Sequence[int], amount: int) -> list[int]:
    """Split ``amount`` so that the lowest of ``loads`` rise to a common level; the rest get nothing."""
    order = sorted(range(len(loads)), key=lambda index: (loads[index], index))
    filled, below = 0, 0
    for filled, index in enumerate(order, 1):
        below += loads[index]
        if filled == len(order) or amount + below <= loads[order[filled]] * filled:
            break
    parts = [0] * len(loads)
    if filled:
        level, extra = divmod(amount + below, filled)
        for place, index in enumerate(order[:filled]):
            parts[index] = level + (place < extra) - loads[index]
    return parts


def _balance(pools: Sequence[Pool], load: Load) -> list[list[int]]:
    """How much each server of each pool takes; adds it to ``load``.

    Pool after pool is filled anew around the others. Each pass lowers the sum of the squared loads, whose minimum is
    also where the busiest server has least.
    """
    demands = [sum(segment.size for segment in pool.segments) for pool in pools]
    amounts = [[0] * len(pool.servers) for pool in pools]
    for _ in range(_ROUNDS):
        moved = 0
        for index, pool in enumerate(pools):
            before = amounts[index]
            others = [load.get(server, 0) - had for server, had in zip(pool.servers, before, strict=True)]
            after = water_fill(others, demands[index])
            for server, other, takes in zip(pool.servers, others, after, strict=True):
                load[server] = other + takes
            moved = max(moved, *(abs(b - a) for a, b in zip(after, before, strict=True)))
            amounts[index] = after
        if moved * _GRAIN <= max(load.values(), default=0):
            break
    return amounts


def _lay_out(
    segments: Sequence[Segment],
    servers: Sequence[int],
    amounts: Sequence[int],
    slack: int,
    cut: Callable[[int, int], int],
) -> Iterator[Share]:
    """Lay the segments end to end and give each server the stretch of its amount, cut where it has to be.

    A border within ``slack`` of a segment's end moves there. Borders move one by one, so errors do not add up.
    """
    taking = [(server, amount) for server, amount in zip(servers, amounts, strict=True) if amount]
    if sum(amounts) <= slack and taking:
        taking = [max(taking, key=lambda each: each[1])]
    borders = list(itertools.accumulate(amount for _, amount in taking))
    turn, position = 0, 0
    for segment in segments:
        while segment.size:
            while turn < len(taking) - 1 and borders[turn] <= position + slack:
                turn += 1
            served = segment
            if turn < len(taking) - 1 and borders[turn] + slack < position + segment.size:
                at = min(cut(segment.line, segment.first + borders[turn] - position), segment.last)
                served = segment._replace(last=max(at, segment.first))
            if served.size:
                yield served, taking[turn][0]
            else:
                turn += 1
            position += served.size
            segment = segment._replace(first=served.last)
