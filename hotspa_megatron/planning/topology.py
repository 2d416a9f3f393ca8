"""Where ranks sit in a cluster and what its links carry: nodes, link classes, network cards.

Pure numbers, given by whoever describes the cluster; nothing is discovered or measured here. ``reshard_plan`` asks for
it which ranks share a node and a card, and reports what its transfers cost per link class.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


class LinkClass(enum.StrEnum):
    """What data crosses between two ranks, from the cheapest to the dearest."""

    LOCAL = "local"
    INTRA_NODE = "intra_node"
    INTER_NODE = "inter_node"


@dataclass(frozen=True, kw_only=True)
class Link:
    """What one link carries in one direction while the other direction carries as much.

    ``gigabytes_per_s``: 10^9 bytes per second, of one GPU (local, within a node) or of one network card (between nodes).
    ``latency_us``: microseconds that every message costs besides.
    """

    gigabytes_per_s: float
    latency_us: float

    def __post_init__(self) -> None:
        if not self.gigabytes_per_s > 0 or not self.latency_us >= 0:
            raise ValueError(
                f"a link carries more than 0 GB/s and has a latency of at least 0 us, not {self.gigabytes_per_s} GB/s "
                f"and {self.latency_us} us"
            )

    def seconds(self, num_bytes: int, *, messages: int = 1) -> float:
        """Time that ``num_bytes`` in ``messages`` messages take one after the other."""
        return num_bytes / (self.gigabytes_per_s * 1e9) + messages * self.latency_us * 1e-6


# Peaks of NVIDIA's data sheets for an H100 SXM node: HBM3 at 3.35 TB/s, which a copy both reads and writes; NVLink 4 at
# 900 GB/s and ConnectX-7 at 400 Gb/s per card. The latencies are what a message of a batched exchange costs about.
H100_MEMORY: Final = Link(gigabytes_per_s=1675.0, latency_us=5.0)
H100_NVLINK: Final = Link(gigabytes_per_s=450.0, latency_us=20.0)
NDR400_CARD: Final = Link(gigabytes_per_s=50.0, latency_us=20.0)


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A cluster as planning sees it: consecutive ranks fill one node after the other, and the last one may stay short.

    ``cards_per_node``: network cards, shared out over a node's GPUs in order. Raises ValueError for sizes below 1 and
    for more cards than GPUs.
    """

    world_size: int
    gpus_per_node: int
    cards_per_node: int
    local: Link = H100_MEMORY
    intra_node: Link = H100_NVLINK
    inter_node: Link = NDR400_CARD

    def __post_init__(self) -> None:
        for name in ("world_size", "gpus_per_node", "cards_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.cards_per_node > self.gpus_per_node:
            raise ValueError(
                f"{self.cards_per_node} network cards for {self.gpus_per_node} GPUs of a node; where a GPU has several, "
                "count them as one card of their joint bandwidth"
            )

    @classmethod
    def flat(cls, world_size: int) -> Topology:
        """All ranks in one node: every pair is as near as any other."""
        return cls(world_size=world_size, gpus_per_node=world_size, cards_per_node=world_size)

    @classmethod
    def nodes(
        cls,
        world_size: int,
        gpus_per_node: int,
        *,
        cards_per_node: int | None = None,
        local: Link = H100_MEMORY,
        intra_node: Link = H100_NVLINK,
        inter_node: Link = NDR400_CARD,
    ) -> Topology:
        """Nodes of ``gpus_per_node`` GPUs, each with a network card of its own unless ``cards_per_node`` says fewer."""
        return cls(
            world_size=world_size,
            gpus_per_node=gpus_per_node,
            cards_per_node=gpus_per_node if cards_per_node is None else cards_per_node,
            local=local,
            intra_node=intra_node,
            inter_node=inter_node,
        )

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.gpus_per_node)

    def node_of(self, rank: int) -> int:
        """The node of a rank; ValueError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the {self.world_size} ranks of the cluster")
        return rank // self.gpus_per_node

    def card_of(self, rank: int) -> int:
        """The network card that a rank uses, counted over all nodes."""
        node, place = self.node_of(rank), rank % self.gpus_per_node
        return node * self.cards_per_node + place * self.cards_per_node // self.gpus_per_node

    def link(self, sender: int, receiver: int) -> LinkClass:
        """What data from one rank to another crosses."""
        if self.node_of(sender) != self.node_of(receiver):
            return LinkClass.INTER_NODE
        return LinkClass.LOCAL if sender == receiver else LinkClass.INTRA_NODE

    def of(self, link: LinkClass) -> Link:
        """What a link of this class carries."""
        return {
            LinkClass.LOCAL: self.local,
            LinkClass.INTRA_NODE: self.intra_node,
            LinkClass.INTER_NODE: self.inter_node,
        }[link]
