"""``hotspa profile``: what is measured becomes a description that plans can use, and says of every number where it is from."""

from __future__ import annotations

import time
from dataclasses import fields, make_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hotspa_megatron.cli import profile
from hotspa_megatron.cli.main import main
from hotspa_megatron.planning import profile_file
from hotspa_megatron.planning.hardware import Hardware, load_hardware
from hotspa_megatron.runtime import calibration
from tests.spawn import run_ranks

MEASURED = "measured 2026-11-30 by a test"


def shortened(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """A calibration of sizes that take no time."""
    shorten()
    said: list[str] = []
    done = calibration.calibrate(torch.device("cpu"), ranks_per_node=world_size, say=said.append)
    return done.values, done.assumed, said


def shorten() -> None:
    calibration._SLICE_S = 0.02  # type: ignore[misc]
    calibration._ON_CPU = calibration._Sizes(  # type: ignore[misc]
        (64, 128), 256, 128, (64, 32), 1 << 16, 1 << 16, torch.float32
    )


def test_what_ranks_measure_is_alike_on_all_and_a_whole_description(tmp_path: Path) -> None:
    results = run_ranks(shortened, 4)
    values, assumed, said = results[0]
    assert all(each[0]["layer_overhead_us"] == values["layer_overhead_us"] for each in results)
    assert said == ["memory", "matrix products", "layers", "attention", "collectives", "messages and copies"]
    path = tmp_path / "here.yaml"
    profile_file.write(path, profile_file.as_yaml(values, assumed, title="a test", measured=MEASURED))
    hardware = load_hardware(path)
    assert (hardware.name, hardware.gpus_per_node) == ("here", 4)
    # One machine has no network to measure; everything else is from here.
    assert set(hardware.assumed) == {
        "cards_per_node", "margin_mib", "communicator_mib", "card_gigabytes_per_s", "card_latency_us", "spanning_gigabytes_per_s"
    }  # fmt: skip
    assert path.read_text().count(MEASURED) == len(fields(Hardware)) - 2 - len(hardware.assumed)
    # Several ranks pay for waiting on each other: more for tp 4 than for none.
    overhead = dict(hardware.layer_overhead_us)
    assert set(overhead) == {1, 2, 4} and overhead[4] > overhead[1]


def test_one_rank_alone_is_measured_too(tmp_path: Path) -> None:
    ((values, assumed, _),) = run_ranks(shortened, 1)
    path = tmp_path / "one.yaml"
    profile_file.write(path, profile_file.as_yaml(values, assumed, title="a test", measured=MEASURED))
    assert "intra_gigabytes_per_s" in load_hardware(path).assumed
    assert load_hardware(path).layer_overhead_us[0][0] == 1


def test_a_description_that_the_reader_refuses_is_not_written(tmp_path: Path) -> None:
    ((values, assumed, _),) = run_ranks(shortened, 1)
    text = profile_file.as_yaml({**values, "memory_mib": 1}, assumed, title="a test", measured=MEASURED)
    with pytest.raises(ValueError, match="nothing is left"):
        profile_file.write(tmp_path / "bad.yaml", text)
    assert not list(tmp_path.iterdir())


def test_what_takes_longer_than_a_measurement_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ((slow, quick),) = run_ranks(counted_runs, 1)
    assert (slow, quick) == (2, 2 + calibration._FEWEST)  # the first is not counted


def counted_runs(rank: int, world_size: int) -> tuple[int, int]:
    """Runs of what takes longer than a measurement, and of what takes half of one."""
    calibration._SLICE_S = 0.6  # type: ignore[misc]
    calibrator = calibration._Calibrator(torch.device("cpu"), world_size, lambda _: None)
    counts = []
    for seconds in (0.7, 0.3):
        runs: list[None] = []
        calibrator._time(lambda runs=runs, seconds=seconds: (runs.append(None), time.sleep(seconds)))  # type: ignore[misc]
        counts.append(len(runs))
    return counts[0], counts[1]


def is_never_done(channel: Any, backend: str | None) -> None:
    channel.send("memory")
    while True:
        channel.send("layers")
        time.sleep(1)


def test_it_ends_in_time_whatever_a_measurement_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The limit is for all of it: every message comes soon enough here."""
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(profile, "_measure_on_this_rank", is_never_done)
    monkeypatch.setattr(profile, "_LIMIT_S", 8.0)
    began = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main(["profile", "--ranks", "1", "--output", str(tmp_path / "here.yaml")])
    assert ended.value.code == 1 and time.monotonic() - began < 30
    *said, last = capsys.readouterr().err.splitlines()
    assert said[:2] == ["  measuring memory", "  measuring layers"]
    assert last.startswith("hotspa: profile: not done within 8 s, after which it was still measuring layers. End")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "written"), [(3, "3"), (0.00012345, "0.00012345"), (123456.7, "123500"), (0.30004, "0.3"), (1e-12, "0")]
)
def test_numbers_are_plain_digits(value: float, written: str) -> None:
    assert profile_file._number(value) == written


def test_profiles_of_other_clusters_have_other_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(profile_file.CACHE_VARIABLE, str(tmp_path))
    one = {"device": "NVIDIA H100", "ranks_per_node": 8, "world_size": 16, "versions": "torch 2"}
    path = profile_file.cached_path(**one)  # type: ignore[arg-type]
    assert path is not None and path.parent == tmp_path and path.name.startswith("nvidia-h100-8-of-16-")
    for other in ({"device": "CPU"}, {"ranks_per_node": 4}, {"world_size": 8}, {"versions": "torch 3"}):
        assert profile_file.cached_path(**{**one, **other}) != path  # type: ignore[arg-type]
    # One that was made before a number was asked for could not be read.
    monkeypatch.setattr(profile_file, "Hardware", make_dataclass("Hardware", ["name", "gpus_per_node"]))
    assert profile_file.cached_path(**one) != path  # type: ignore[arg-type]


def test_a_user_without_a_home_folder_has_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(profile_file.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert profile_file.cached_path(device="CPU", ranks_per_node=1, world_size=1, versions="") is None


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ([], "--ranks: missing"),
        (["--ranks", "x"], "--ranks: 'x' is not a whole number"),
        (["--ranks", "1", "--output", "here.txt"], "--output: here.txt: write a name that ends in .yaml"),
        (["--ranks", "1", "--output", "there.yaml"], "--output: there.yaml is there already"),
        (["--ranks", "1", "--", "--bf16"], "profile takes no arguments of Megatron's"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_measured(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: list[str],
    problem: str,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("there.yaml").write_text("kept")
    assert main(["profile", *options]) == 2
    said = capsys.readouterr().err
    assert problem in said and said.count("\n") == 1
    assert Path("there.yaml").read_text() == "kept" and len(list(tmp_path.iterdir())) == 1
