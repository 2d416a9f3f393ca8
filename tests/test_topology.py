"""Which ranks share a node and a card, what lies between two ranks, and what a link takes."""

from __future__ import annotations

from typing import Any

import pytest

from hotspa_megatron.planning.topology import H100_NVLINK, NDR400_CARD, Link, LinkClass, Topology


def test_consecutive_ranks_fill_nodes_and_the_last_may_stay_short() -> None:
    cluster = Topology.nodes(12, 8)
    assert cluster.num_nodes == 2
    assert [cluster.node_of(rank) for rank in (0, 7, 8, 11)] == [0, 0, 1, 1]
    assert cluster.link(3, 3) is LinkClass.LOCAL
    assert cluster.link(3, 7) is LinkClass.INTRA_NODE
    assert cluster.link(7, 8) is LinkClass.INTER_NODE
    for outside in (-1, 12):
        with pytest.raises(ValueError, match=f"rank {outside} is outside the 12 ranks"):
            cluster.node_of(outside)


def test_a_flat_cluster_has_no_network() -> None:
    flat = Topology.flat(5)
    assert {flat.link(a, b) for a in range(5) for b in range(5) if a != b} == {LinkClass.INTRA_NODE}


def test_cards_are_shared_out_in_order() -> None:
    assert [Topology.nodes(16, 8).card_of(rank) for rank in range(16)] == list(range(16))
    two = Topology.nodes(16, 8, cards_per_node=2)
    assert [two.card_of(rank) for rank in (0, 3, 4, 7, 8, 15)] == [0, 0, 1, 1, 2, 3]
    three = Topology.nodes(8, 8, cards_per_node=3)
    assert [three.card_of(rank) for rank in range(8)] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_a_link_takes_its_bandwidth_and_a_latency_per_message() -> None:
    link = Link(gigabytes_per_s=50, latency_us=20)
    assert link.seconds(10**9) == pytest.approx(0.02 + 20e-6)
    assert link.seconds(0, messages=3) == pytest.approx(60e-6)
    cluster = Topology.nodes(16, 8, inter_node=link)
    assert cluster.of(LinkClass.INTER_NODE) is link and cluster.of(LinkClass.INTRA_NODE) is H100_NVLINK
    assert NDR400_CARD.seconds(50 * 10**9) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world_size": 0, "gpus_per_node": 8}, "world_size must be at least 1, not 0"),
        ({"world_size": 8, "gpus_per_node": 0}, "gpus_per_node must be at least 1, not 0"),
        ({"world_size": 8, "gpus_per_node": 4, "cards_per_node": 8}, "8 network cards for 4 GPUs"),
    ],
)
def test_impossible_clusters_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology.nodes(sizes.pop("world_size"), sizes.pop("gpus_per_node"), **sizes)


def test_a_link_that_carries_nothing_is_refused() -> None:
    for speed, latency in ((0.0, 1.0), (float("nan"), 1.0), (1.0, -1.0)):
        with pytest.raises(ValueError, match="a link carries more than 0 GB/s"):
            Link(gigabytes_per_s=speed, latency_us=latency)
