"""``hotspa bench``: its figures on cases that are known, Megatron's planner beside ours, and one line for bad input."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hotspa_megatron.cli.bench import read_strategy
from hotspa_megatron.cli.main import main
from hotspa_megatron.planning.known_models import KNOWN_MODELS
from hotspa_megatron.planning.param_layout import gpt_parameters, model_layout
from hotspa_megatron.planning.reshard_plan import plan_reshard
from hotspa_megatron.planning.topology import LinkClass, Topology
from hotspa_megatron.strategy import Strategy, stage_layers
from tests.layouts import layout, model_shape
from tests.spawn import run_ranks

needs_megatron = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
SEVENTY_B = ("--model", "llama-70b", "--ranks", "8192", "--gpus-per-node", "8", "--from", "tp8-pp8", "--to", "tp4-pp4")


def measured(*arguments: str) -> dict[str, Any]:
    """What a fresh ``hotspa bench planner --json`` prints: memory is that of its whole process."""
    root = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "hotspa_megatron.cli.main", "bench", "planner", *arguments, "--json"]
    done = subprocess.run(command, cwd=root, env=os.environ, stdout=subprocess.PIPE, text=True, check=True)
    described: dict[str, Any] = json.loads(done.stdout)
    return described


def test_a_plan_for_8192_ranks_keeps_within_its_time_and_memory() -> None:
    bench = measured(*SEVENTY_B)
    ours = bench["ours"]
    assert bench["nodes"] == 1024
    assert (bench["source"], bench["destination"]) == ("tp8-cp1-pp8-dp128", "tp4-cp1-pp4-dp512")
    assert ours["whole_plan_s"] < 2 and ours["one_rank_s"] < 0.05 and ours["peak_memory_bytes"] < 2**30
    assert ours["phases"] == 2 and ours["messages"] < 5 * 8192
    for traffic in ours["links"].values():
        assert traffic["num_bytes"] == traffic["floor"]
        assert traffic["busiest_sender"] <= 1.15 * traffic["num_bytes"] / 8192
    assert bench["peer"] is None and "square of the ranks" in bench["peer_missing"]


@needs_megatron
def test_megatrons_planner_crosses_the_network_once_per_rank_and_ours_once_per_node() -> None:
    bench = measured("--model", "llama-7b", "--ranks", "16", "--from", "tp4-pp2", "--to", "tp1")
    ours, theirs = bench["ours"], bench["peer"]
    assert ours["links"]["inter_node"]["num_bytes"] / 1e9 == pytest.approx(13.5, rel=0.01)
    assert theirs["links"]["inter_node"]["num_bytes"] / 1e9 == pytest.approx(108, rel=0.01)
    total = [sum(traffic["num_bytes"] for traffic in of["links"].values()) for of in (ours, theirs)]
    assert total[0] == total[1]
    assert ours["messages"] < theirs["messages"] and ours["whole_plan_s"] < theirs["whole_plan_s"]


PAIRS: list[tuple[dict[str, int], dict[str, int]]] = [
    ({"tp": 4, "pp": 2, "dp": 2}, {"dp": 16}),
    ({"dp": 16}, {"tp": 4, "dp": 4}),
    ({"tp": 4, "dp": 4}, {"tp": 2, "pp": 4, "dp": 2}),
    ({"tp": 2, "pp": 2, "dp": 4}, {"tp": 4, "pp": 2, "dp": 2}),
    ({"pp": 4, "dp": 4}, {"tp": 2, "dp": 8}),
    ({"tp": 3, "pp": 2, "dp": 2}, {"tp": 6, "dp": 2}),
]


def _of_megatron(rank: int, world_size: int) -> list[dict[tuple[int, int], int]]:
    from hotspa_megatron.hooks import refit

    shape = model_shape()
    return [refit.plan(layout(shape, **a), layout(shape, **b), itemsize=2).pairs for a, b in PAIRS]


@needs_megatron
def test_no_rank_receives_more_than_with_megatrons_planner_and_no_link_class_is_busier() -> None:
    shape = model_shape()
    (plans,) = run_ranks(_of_megatron, 1, timeout=120)
    for (before, after), pairs in zip(PAIRS, plans, strict=True):
        source, destination = layout(shape, **before), layout(shape, **after)
        world = range(source.world_size)
        cluster = Topology.nodes(len(world), 4)
        ours = plan_reshard([source], destination, itemsize=2, topology=cluster, two_phase=False)
        for rank in world:
            assert ours.bytes_received(rank) <= sum(size for (_, receiver), size in pairs.items() if receiver == rank)
        crossing = {pair: size for pair, size in pairs.items() if cluster.link(*pair) is LinkClass.INTER_NODE}
        assert ours.link_bytes[LinkClass.INTER_NODE] <= sum(crossing.values())
        theirs = max(sum(size for (sender, _), size in crossing.items() if sender == rank) for rank in world)
        assert max(ours.bytes_sent(rank, LinkClass.INTER_NODE) for rank in world) <= theirs


def test_tables_name_the_case(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", "llama-7b", "--ranks", "256", "--from", "tp8", "--to", "pp2-tp4", "--cards-per-node", "2")
    assert main(["bench", "planner", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "llama-7b on 256 ranks, 32 nodes: tp8-cp1-pp1-dp32 -> tp4-cp1-pp2-dp32" in shown
    assert "inter_node" in shown and "Megatron's own planner was not run" in shown


def test_known_models_have_their_published_sizes() -> None:
    billions = {}
    for name, shape in KNOWN_MODELS.items():
        one = model_layout(
            gpt_parameters(shape), Strategy(tp=1, cp=1, pp=1, dp=1), stage_layers(shape.num_layers, 1), tied=False
        )
        billions[name] = one.local_numel(0) / 1e9
    assert billions == pytest.approx(
        {"llama-7b": 6.73, "llama-13b": 13.0, "llama-32b": 32.5, "llama-70b": 69.0}, rel=0.01
    )


def test_strategies_are_read_in_any_order() -> None:
    assert read_strategy("pp2-tp4", flag="--to", ranks=16) == Strategy(tp=4, cp=1, pp=2, dp=2)
    assert read_strategy("cp2", flag="--to", ranks=16) == Strategy(tp=1, cp=2, pp=1, dp=8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"--from": "tp8-qp8"},
            "--from: 'tp8-qp8' is not a strategy; join some of tpN, cpN and ppN with '-', as in tp8-pp2",
        ),
        (
            {"--to": "tp5"},
            "--to tp5: a world of 256 ranks does not divide into replicas of tp 5 * cp 1 * pp 1 = 5 ranks",
        ),
        ({"--to": "pp128"}, "80 layers do not divide over pp 128 stages; legal pp: 1, 2, 4, 5, 8, 10, 16, 20, 40, 80"),
        ({"--to": "tp128"}, "64 attention heads do not divide over tp 128"),
        ({"--gpus-per-node": "0"}, "gpus_per_node must be at least 1, not 0"),
        ({"--cards-per-node": "9"}, "9 network cards for 8 GPUs of a node"),
        ({"--ranks": "0"}, "--from tp8-pp8: a world of 0 ranks"),
    ],
)
def test_bad_input_is_one_line(change: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"--model": "llama-70b", "--ranks": "256", "--from": "tp8-pp8", "--to": "tp4"} | change
    assert main(["bench", "planner", *(text for pair in given.items() for text in pair)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_an_unknown_model_and_arguments_of_megatrons_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "planner", "--model", "llama-8b", "--ranks", "8", "--from", "tp8", "--to", "tp4"])
    assert stopped.value.code == 2
    assert "invalid choice: 'llama-8b'" in capsys.readouterr().err
    assert main(["bench", "planner", *SEVENTY_B, "--", "--bf16"]) == 2
    assert "takes no arguments of Megatron's" in capsys.readouterr().err
