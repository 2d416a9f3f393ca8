"""``--hotspa-config auto``: a job plans for itself, from its own documents and cluster, and resumed runs keep to it."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from hotspa_megatron.config import load_config
from hotspa_megatron.hooks.auto import FILE_NAME
from hotspa_megatron.planning import profile_file
from hotspa_megatron.planning.hardware import load_hardware
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
