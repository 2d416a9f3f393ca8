"""Hardware descriptions: every number has a source or a reason, and a file that says less is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hotspa_megatron.planning import hardware as module
from hotspa_megatron.planning.hardware import UNKNOWN_DEVICE, Hardware, described_device, hardware_names, load_hardware
from hotspa_megatron.planning.topology import LinkClass
from hotspa_megatron.strict_yaml import ConfigError

NAMES = ("a100-40", "a100-80", "a800-80", "cpu-gloo", "h100", "h20", "h200", "l40s-pcie", "mi250x")
FOLDER = Path(module.__file__).with_suffix("")


def changed(tmp_path: Path, old: str, new: str) -> Path:
    text = (FOLDER / "a800-80.yaml").read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_every_description_loads_and_is_plausible(name: str) -> None:
    assert hardware_names() == NAMES
    hardware = load_hardware(name)
    assert hardware.name == name
    assert 0 < hardware.usable_bytes < hardware.memory_mib * 2**20
    assert hardware.gemm_flops(4096) <= hardware.peak_bf16_teraflops * 1e12
    assert hardware.attention_flops(104) <= hardware.attention_flops(128)
    assert hardware.layer_overhead_s(3) == hardware.layer_overhead_s(2)
    topology = hardware.topology(2 * hardware.gpus_per_node)
    assert topology.num_nodes == 2
    assert topology.of(LinkClass.INTER_NODE).gigabytes_per_s == hardware.card_gigabytes_per_s
    assert topology.of(LinkClass.INTRA_NODE).gigabytes_per_s <= topology.of(LinkClass.LOCAL).gigabytes_per_s


def test_small_worlds_have_no_more_cards_than_ranks() -> None:
    topology = load_hardware("a800-80").topology(2)
    assert (topology.gpus_per_node, topology.cards_per_node) == (2, 2)


def test_what_is_assumed_is_said() -> None:
    hardware = load_hardware("a800-80")
    assert "card_gigabytes_per_s" in hardware.assumed
    assert not {"gemm_efficiency", "attention_efficiency", "layer_overhead_us", "memory_mib"} & set(hardware.assumed)


def test_communicators_take_memory_on_devices_alone() -> None:
    hardware = load_hardware("a800-80")
    assert [hardware.communicator_bytes(ranks) for ranks in (2, 3, 4, 512)] == [544 << 20, *[688 << 20] * 3]
    assert load_hardware("cpu-gloo").communicator_bytes(8) == 0


def test_efficiency_is_interpolated_and_held_at_the_ends() -> None:
    hardware = load_hardware("a800-80")
    at = {hidden: hardware.gemm_flops(hidden) for hidden in (1024, 4096, 4608, 5120, 16384)}
    assert at[1024] == at[4096] and at[16384] == hardware.gemm_flops(6656)
    assert at[4608] == pytest.approx((at[4096] + at[5120]) / 2)
    assert hardware.gemm_flops(4096, parameter_bytes=4) == at[4096] / 2


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("{value: 8, source", "{value: 8, sauce", "did you mean source"),
        ('source: "the limit in Hydraulis\' cost_model.py"', "", "source"),
        ('source: "the limit in Hydraulis\' cost_model.py"', 'source: " "', "says nothing"),
        ('value: 156, source: "NVIDIA/nccl', 'value: 1e9, source: "NVIDIA/nccl', "not a number"),
        ("value: 81252", "value: 81252.5", "whole number"),
        ("value: 81252", "value: 9000", "nothing is left"),
        ("[4096, 0.678]", "[4096, 1.678]", "share of the peak"),
        ("[4096, 0.678], [5120, 0.724]", "[5120, 0.678], [4096, 0.724]", "rising"),
        ("[4096, 0.678]", "[4096]", "not a pair"),
        ("[[1, 1077], ", "[", "must start at tp 1"),
        ("[[2, 544], ", "[", "must start at 2 ranks"),
        ("card_latency_us:", "card_latency:", "did you mean"),
        ('value: 20, assumed: "80 %', 'value: 0, assumed: "80 %', "above 0"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        load_hardware(changed(tmp_path, old, new))
    assert "mine.yaml" in str(error.value) and "\n" not in str(error.value)


def test_a_missing_number_is_named(tmp_path: Path) -> None:
    lines = (FOLDER / "h100.yaml").read_text().splitlines()
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(line for line in lines if not line.startswith("margin_mib")))
    with pytest.raises(ConfigError, match="margin_mib: is missing"):
        load_hardware(path)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'h900' is not known; write one of a100-40, "):
        load_hardware("h900")


def test_a_file_of_ones_own_is_named_after_itself(tmp_path: Path) -> None:
    hardware = load_hardware(changed(tmp_path, "value: 81252", "value: 40000"))
    assert isinstance(hardware, Hardware)
    assert (hardware.name, hardware.memory_mib) == ("mine", 40000)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A800-SXM4-80GB", "a800-80"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA L40S", "l40s-pcie"),
        ("AMD Instinct MI250X", "mi250x"),
        ("NVIDIA GH200 480GB", UNKNOWN_DEVICE),
        ("NVIDIA GeForce RTX 4090", UNKNOWN_DEVICE),
        (None, "cpu-gloo"),
    ],
)
def test_a_device_finds_its_description(device: str | None, name: str) -> None:
    assert described_device(device) == name
    assert name in hardware_names()


def test_nodes_of_another_size_keep_their_cards_in_proportion() -> None:
    hardware = replace(load_hardware("a800-80"), cards_per_node=4)
    found = [
        (hardware.with_nodes_of(gpus).gpus_per_node, hardware.with_nodes_of(gpus).cards_per_node) for gpus in (1, 4, 8)
    ]
    assert found == [(1, 1), (4, 2), (8, 4)]
    assert hardware.with_nodes_of(4).topology(16).num_nodes == 4
