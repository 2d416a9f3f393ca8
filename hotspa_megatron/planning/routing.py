"""Who sends what of a move to whom: over the cheapest class of link that leads to a holder, from the least loaded one.

The second half of ``reshard_plan``. Nodes that look alike are decided for once. In two phases a bundle crosses the network
once per node that lacks it, and is then relayed inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotspa_megatron.planning.load_balance import ANYONE, Load, Pool, Segment, Share, share_out
from hotspa_megatron.planning.regions import Bundle, ranks_of
from hotspa_megatron.planning.topology import Topology


class Transfers(NamedTuple):
    """Transfers as columns of equal length: elements [first, last) of a bundle's line from one rank to another.

    Sorted by sender, receiver, bundle and first.
    """

    bundle: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    sender: NDArray[np.int64]
    receiver: NDArray[np.int64]

    @property
    def numel(self) -> NDArray[np.int64]:
        return self.last - self.first

    @property
    def message_starts(self) -> NDArray[np.int64]:
        """The first row of each message: all that goes from one rank to another."""
        another = (np.diff(self.sender) != 0) | (np.diff(self.receiver) != 0)
        rows = np.flatnonzero(another) + 1
        return np.concatenate([[0], rows]) if len(self.sender) else rows


_Row = tuple[int, int, int, int, int]
"""One transfer: the fields of ``Transfers``."""


class _NodeShares(NamedTuple):
    """What nodes that look alike do, in ranks counted from the node's first."""

    inside: list[_Row]
    """Between ranks of the node."""
    entering: list[tuple[int, int, int, int]]
    """(bundle, first, last, receiver) of what must come over the network."""
    relayed: list[_Row]
    """What entered, on to the other ranks of the node that lack it."""


_Lack = tuple[int, int, int]
"""A bundle that ranks of a node lack: (bundle, holders on the node, ranks on the node that lack it)."""


def route(bundles: Sequence[Bundle], topology: Topology, two_phase: bool) -> tuple[Transfers, ...]:
    """Choose all senders: the transfers of each phase."""

    def cut(line: int, position: int) -> int:
        return bundles[line].cut(position)

    lacks: dict[int, list[_Lack]] = {}
    for index, bundle in enumerate(bundles):
        for node in nodes_lacking(bundle, topology):
            here = on_node(bundle.owners, node, topology), on_node(bundle.needers, node, topology)
            lacks.setdefault(node, []).append((index, *here))
    alike: dict[tuple[_Lack, ...], list[int]] = {}
    for node in sorted(lacks):
        alike.setdefault(tuple(lacks[node]), []).append(node)

    direct, relayed = _Table(), _Table()
    entering: dict[int, list[Segment]] = {}
    for of_node, nodes in alike.items():
        shares = _share_node(of_node, bundles, topology, two_phase, cut)
        starts = [node * topology.gpus_per_node for node in nodes]
        direct.add(shares.inside, starts)
        relayed.add(shares.relayed, starts)
        for line, first, last, receiver in shares.entering:
            segments = entering.setdefault(bundles[line].owners, [])
            segments += (Segment(start + receiver, line, first, last) for start in starts)
    pools = [Pool(tuple(ranks_of(owners)), segments) for owners, segments in entering.items()]
    network = [_row(share) for share in _share_over_cards(pools, topology, cut)]
    direct.add(network, [0])
    return (direct.sorted(),) if relayed.is_empty else (direct.sorted(), relayed.sorted())


def _share_node(
    lacks: Sequence[_Lack],
    bundles: Sequence[Bundle],
    topology: Topology,
    two_phase: bool,
    cut: Callable[[int, int], int],
) -> _NodeShares:
    """Decide for one node: who sends inside it, and who receives what it lacks altogether."""
    missing = {line: ranks_of(needers) for line, owners, needers in lacks if not owners}
    relayed: list[_Row] = []
    load: Load = {}
    if two_phase:
        open_to: dict[tuple[int, ...], list[Segment]] = {}
        for line, ranks in missing.items():
            open_to.setdefault(tuple(ranks), []).append(Segment(ANYONE, line, 0, bundles[line].size))
        pools = [Pool(ranks, segments) for ranks, segments in open_to.items()]
        entering = [(each.line, each.first, each.last, rank) for each, rank in _share_over_cards(pools, topology, cut)]
        for line, first, last, entry in entering:
            others = [rank for rank in missing[line] if rank != entry]
            relayed += [(line, first, last, entry, rank) for rank in others]
            # Who relays more sends less of what the node had before.
            load[entry] = load.get(entry, 0) + len(others) * (last - first)
    else:
        entering = [(line, 0, bundles[line].size, rank) for line, ranks in missing.items() for rank in ranks]
    served: dict[int, list[Segment]] = {}
    for line, owners, needers in lacks:
        if owners:
            segments = served.setdefault(owners, [])
            segments += (Segment(rank, line, 0, bundles[line].size) for rank in ranks_of(needers))
    inside = share_out([Pool(tuple(ranks_of(owners)), segments) for owners, segments in served.items()], load, cut)
    return _NodeShares([_row(share) for shares in inside for share in shares], entering, relayed)


def _share_over_cards(pools: Sequence[Pool], topology: Topology, cut: Callable[[int, int], int]) -> list[Share]:
    """Share out among ranks so that network cards are evenly loaded, and then the ranks of each card."""
    if topology.cards_per_node == topology.gpus_per_node:
        return [share for shares in share_out(pools, {}, cut) for share in shares]
    by_card = []
    for pool in pools:
        ranks: dict[int, list[int]] = {}
        for rank in pool.servers:
            ranks.setdefault(topology.card_of(rank), []).append(rank)
        by_card.append(ranks)
    cards = share_out([pool._replace(servers=tuple(of)) for pool, of in zip(pools, by_card, strict=True)], {}, cut)
    on_card: dict[tuple[int, ...], list[Segment]] = {}
    for ranks, shares in zip(by_card, cards, strict=True):
        for segment, card in shares:
            on_card.setdefault(tuple(ranks[card]), []).append(segment)
    shares_of_ranks = share_out([Pool(ranks, segments) for ranks, segments in on_card.items()], {}, cut)
    return [share for shares in shares_of_ranks for share in shares]


def _row(share: Share) -> _Row:
    segment, sender = share
    return segment.line, segment.first, segment.last, sender, segment.receiver


class _Table:
    """Collects transfers."""

    def __init__(self) -> None:
        self._blocks: list[NDArray[np.int64]] = []

    @property
    def is_empty(self) -> bool:
        return not self._blocks

    def add(self, rows: Sequence[_Row], starts: Sequence[int]) -> None:
        """Add the rows once per start, which is what their ranks are counted from."""
        if not rows:
            return
        block = np.tile(np.array(rows, np.int64), (len(starts), 1))
        block[:, 3:] += np.repeat(np.array(starts, np.int64), len(rows))[:, None]
        self._blocks.append(block)

    def sorted(self) -> Transfers:
        rows = np.concatenate([np.empty((0, 5), np.int64), *self._blocks])
        bundle, first, _, sender, receiver = rows.T
        columns = rows[np.lexsort((first, bundle, receiver, sender))].T
        return Transfers(*(np.ascontiguousarray(column) for column in columns))


def nodes_lacking(bundle: Bundle, topology: Topology) -> list[int]:
    """Nodes with a rank that lacks the bundle, ascending."""
    return sorted({rank // topology.gpus_per_node for rank in ranks_of(bundle.needers)})


def on_node(mask: int, node: int, topology: Topology) -> int:
    """The part of a set that is on a node, in ranks counted from the node's first."""
    return mask >> (node * topology.gpus_per_node) & ((1 << topology.gpus_per_node) - 1)
