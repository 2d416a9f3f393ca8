"""``--hotspa-config auto``: a job plans for itself, from its own documents and cluster, and resumed runs keep to it."""

from __future__ import annotations

import errno
import functools
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hotspa_megatron.config import load_config, resolve
from hotspa_megatron.hooks import auto as auto_module
from hotspa_megatron.hooks import compat, costs
from hotspa_megatron.hooks.arguments import recompute_of
from hotspa_megatron.hooks.auto import FILE_NAME
from hotspa_megatron.planning import profile_file
from hotspa_megatron.planning.execution import Recompute
from hotspa_megatron.planning.hardware import load_hardware
from hotspa_megatron.planning.known_models import KNOWN_MODELS
from hotspa_megatron.planning.lengths import LengthHistogram
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.strategy import Strategy
from tests.test_data_faults import refusal
from tests.test_profile import shorten
from tests.training import STATIC, Job, Run, arguments, train

AUTO = ("--hotspa-config", "auto")


def with_cache(folder: str) -> None:
    """On every rank: profiles are kept here, and measuring takes no time."""
    os.environ[profile_file.CACHE_VARIABLE] = folder
    shorten()


def auto(tmp_path: Path, *more: str, tp: int = 2, iterations: int = 2) -> Run:
    save = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "2", *AUTO)
    line = arguments(*save, *more, tp=tp, cp=2, iterations=iterations, batch=8)
    return train(Job(line, None, before=functools.partial(with_cache, str(tmp_path / "cache"))))


def test_a_job_plans_once_and_a_resumed_run_keeps_to_the_file(tmp_path: Path) -> None:
    path, cache = tmp_path / "checkpoints" / FILE_NAME, tmp_path / "cache"
    first = auto(tmp_path)
    assert "nothing is known of" in first.output and f"wrote {path}" in first.output
    (profile,) = cache.iterdir()
    assert load_hardware(profile).gpus_per_node == 4
    static = train(Job(arguments(tp=2, cp=2, iterations=2, batch=8), STATIC))
    assert first.losses == pytest.approx(static.losses, rel=1e-6)

    # Somebody lowers home's budget: it is this file that counts, and nothing is measured or planned again.
    text = path.read_text()
    kept = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    path.write_text(f"{kept}strategies: []\nhome: {{tokens_per_microbatch: 300}}\n")
    resumed = auto(tmp_path, "--load", str(tmp_path / "checkpoints"), "--override-opt-param-scheduler", iterations=4)
    assert [each.number for each in resumed.iterations] == [3, 4]
    assert f"using {path} of an earlier run" in resumed.output and "measuring" not in resumed.output
    assert "300 tokens per micro-batch" in resumed.output
    assert load_config(path).home_tokens_per_microbatch == 300

    # Other parallel sizes are another job: its plan is made anew, with what was measured before.
    other = auto(tmp_path, tp=1)
    assert "planning anew" in other.output and "measuring" not in other.output
    assert load_config(path).home_tokens_per_microbatch != 300


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--mock-data",), "mock data has no lengths of its own"),
        (("--sft",), "lengths of conversations are known only once"),
    ],
)
def test_lengths_that_nobody_knows_are_refused(flags: tuple[str, ...], problem: str) -> None:
    assert problem in refusal(Job(arguments(*flags, *AUTO), None, ranks=1))


def test_a_profile_that_cannot_be_kept_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("no folder")
    save = ("--save", str(tmp_path / "checkpoints"), "--save-interval", "9")
    line = arguments(*save, *AUTO, iterations=1, batch=4)
    run = train(Job(line, None, ranks=1, before=functools.partial(with_cache, str(tmp_path / "cache"))))
    assert "not kept for other jobs (" in run.output and "HOTSPA_CACHE names another folder" in run.output
    assert len(run.losses) == 1


@pytest.mark.parametrize("place", ["damaged", "closed", "nowhere"])
def test_a_profile_that_cannot_be_read_leaves_the_description(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("gpus_per_node: a few\n")
    monkeypatch.setattr(costs, "cached_profile", lambda: None if place == "nowhere" else path)
    stat = os.stat

    def closed(file: Any, *more: Any, **options: Any) -> os.stat_result:
        if str(file) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(file, *more, **options)

    if place == "closed":
        monkeypatch.setattr(os, "stat", closed)
    hardware, source = costs.hardware_here()
    assert hardware.name == "cpu-gloo" and source.startswith("the description cpu-gloo of ranks on CPU")
    assert ("cannot be used" in source and str(path) in source) == (place == "damaged")


SEVEN = replace(KNOWN_MODELS["llama-7b"], seq_length=16384)
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


class Planned:
    """What a job of these flags and this home would plan on 8 GPUs of 80 GB, and what it asked of the search."""

    def __init__(
        self,
        tmp_path: Path,
        patched: pytest.MonkeyPatch,
        *,
        home: Strategy,
        shape: ModelShape = SEVEN,
        release: tuple[int, int] = (0, 19),
        **flags: Any,
    ) -> None:
        given = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None, **flags}
        optimizer = {"optimizer": "adam", "use_precision_aware_optimizer": False, **flags}
        self.args = SimpleNamespace(**{**given, **optimizer}, world_size=8, global_batch_size=128)
        self.home, self.shape = home, shape
        self.asked: dict[str, Any] = {}
        plan_strategies = auto_module.plan_strategies

        def planning(*lengths: Any, **options: Any) -> Any:
            self.asked = options
            self.planned = plan_strategies(*lengths, **options)
            return self.planned

        with patched.context() as patch:
            patch.setattr(compat, "release", lambda: release)
            patch.setattr(auto_module.arguments, "shape_of", lambda args: shape)
            patch.setattr(auto_module.arguments, "home_of", lambda args: home)
            patch.setattr(auto_module, "_lengths", lambda args: (LengthHistogram.wikipedia(size=10_000), "Wikipedia"))
            patch.setattr(auto_module, "plan_strategies", planning)
            self.job = auto_module.Job(self.args, tmp_path)
            self.mark = self.job.mark
            auto_module._plan(self.job, load_hardware("a800-80"), lambda line: None)
        self.config = load_config(self.job.path)


def test_siblings_and_guests_choose_their_own_recomputation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Home keeps the command line's, which its long sequences need; the short ones go without."""
    home = Strategy(tp=2, cp=1, pp=1, dp=4)
    found = Planned(tmp_path, monkeypatch, home=home, **FULL)
    assert found.config.home_recompute == Recompute(granularity="full") == recompute_of(found.args)
    assert {each.recompute for each in found.config.strategies} == {Recompute(granularity="none")}
    assert all(held.total <= held.limit for held in found.planned.held)
    resolved = resolve(found.config, shape=SEVEN, home=home, recompute=recompute_of(found.args))
    assert resolved.strategies
    # A job without the flags has no room for home's micro-batches.
    with pytest.raises(ValueError, match=r"home\.recompute: the file was made for a home of recompute full"):
        resolve(found.config, shape=SEVEN, home=home)


def test_virtual_stages_and_the_optimizers_bytes_are_those_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Strategy(tp=4, cp=1, pp=1, dp=2)
    half = Planned(tmp_path, monkeypatch, home=home)
    assert half.asked["optimizer_bytes"] == 12 and max(half.asked["vpp"]) > 1
    single = Planned(tmp_path, monkeypatch, home=home, shape=replace(SEVEN, parameter_bytes=4, seq_length=2048))
    assert single.asked["optimizer_bytes"] == 8
    other = Planned(tmp_path, monkeypatch, home=home, optimizer="sgd")
    assert other.asked["optimizer_bytes"] == 12
    # An older Megatron's interleaved schedule gives wrong gradients, and the job would be refused.
    assert Planned(tmp_path, monkeypatch, home=home, release=(0, 17)).asked["vpp"] == (1,)


def test_another_recomputation_is_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file would be refused: home's recomputation is written in it."""
    home = Strategy(tp=2, cp=1, pp=2, dp=2)
    marks = [Planned(tmp_path, monkeypatch, home=home, **flags).mark for flags in ({}, FULL, FULL)]
    assert marks[0] != marks[1] == marks[2]
