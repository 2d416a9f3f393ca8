"""``hotspa bench reshard`` on real ranks: its figures, the comparison that must see a wrong result, and bad input."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from hotspa_megatron.cli.main import main
from tests.spawn import REPOSITORY, run_ranks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
KEYS = [
    "from", "to", "model_mb", "ours_s", "refit_s", "bound_s", "ratio", "ours_first_s", "refit_first_s", "bytes_total",
    "bytes_max_recv", "floor_max_recv", "messages",
]  # fmt: skip


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command on ranks that it starts itself."""
    command = [sys.executable, "-m", "hotspa_megatron.cli.main", "bench", "reshard", *arguments]
    return subprocess.run(
        command, check=False, cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, timeout=150
    )


@pytest.mark.long
def test_six_pairs_move_the_least_bytes_in_one_message_per_pair_of_ranks() -> None:
    done = _command("--ranks", "4", "--sizes", "12", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["ranks"], printed["backend"]) == (4, "gloo")
    pairs = printed["pairs"]
    assert [(each["from"], each["to"]) for each in pairs] == [
        ("tp4", "dp4"), ("pp4", "dp4"), ("tp2pp2", "tp4"), ("pp4", "tp4"), ("tp4", "tp2pp2"), ("tp2dp2", "pp2dp2"),
    ]  # fmt: skip
    for each in pairs:
        assert list(each) == KEYS
        assert each["model_mb"] == pytest.approx(12, rel=0.01)
        assert each["ratio"] == pytest.approx(each["refit_s"] / each["ours_s"])
        assert min(each[key] for key in KEYS if key.endswith("_s")) > 0
        assert 0 < each["messages"] <= 4 * 3
        assert each["bytes_max_recv"] == each["floor_max_recv"] > 0
    # Each rank of dp4 lacks three quarters of what tp splits, but for the norms, which all ranks have.
    assert pairs[0]["bytes_total"] / 12e6 == pytest.approx(3, rel=0.01)
    assert pairs[0]["bytes_total"] == 4 * pairs[0]["floor_max_recv"]
    # Half of the model is on the other stage, and a rank of tp4 needs a quarter of it: an eighth each, and norms.
    assert sum(each["bytes_total"] for each in pairs[2:5]) / 12e6 == pytest.approx(0.75 * 3, rel=0.01)


def _as_torchrun_does(rank: int, world_size: int, fault: str | None, *arguments: str) -> tuple[int, str, str]:
    """The command as one of ranks that somebody else started, perhaps with a fault on the last one."""
    import contextlib
    import io

    from hotspa_megatron.hooks import refit
    from hotspa_megatron.runtime.executor import Reshard

    if rank == world_size - 1 and fault == "ours":
        run = Reshard.run

        def breaks(self: Reshard, *, sources: Any, destination: Any) -> None:
            run(self, sources=sources, destination=destination)
            next(iter(destination.values())).view(-1)[-1] += 1

        Reshard.run = breaks  # type: ignore[method-assign]
    if rank == world_size - 1 and fault == "refit":
        swap = refit.WeightSwap.run

        def loses(self: refit.WeightSwap) -> None:
            swap(self)
            with torch.no_grad():
                next(self._models[1].parameters()).view(-1)[0] = 0.5

        refit.WeightSwap.run = loses  # type: ignore[method-assign]
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        try:
            code = main(["bench", "reshard", "--sizes", "12", *arguments])
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    return code, said.getvalue(), complained.getvalue()


PAIR = ("--from", "tp2", "--to", "dp2")


@pytest.mark.parametrize("fault", ["ours", "refit"])
def test_control_a_result_that_differs_ends_with_1_on_every_rank(fault: str) -> None:
    ranks = run_ranks(_as_torchrun_does, 2, fault, *PAIR, init_process_group=False, timeout=120)
    assert [code for code, *_ in ranks] == [1, 1]
    complaints = [line for line in ranks[0][2].splitlines() if line.startswith("hotspa: ")]
    assert complaints and all(line.startswith("hotspa: tp2 -> dp2, 12 MB: ") for line in complaints)
    assert all(line.split(": ")[2] in (fault, f"{fault}_first") for line in complaints)


def test_under_torchrun_each_process_is_one_rank_and_the_first_one_prints() -> None:
    ranks = run_ranks(_as_torchrun_does, 2, None, *PAIR, init_process_group=False, timeout=120)
    assert [code for code, *_ in ranks] == [0, 0]
    assert "Moves of bf16 parameters on 2 ranks, gloo" in ranks[0][1] and "tp2 -> dp2" in ranks[0][1]
    assert ranks[1][1] == ""


def test_a_guests_gradients_reach_home_alike_in_one_plan_and_in_two() -> None:
    ranks = run_ranks(
        _as_torchrun_does, 4, None, "--fold", "--json", "--from", "tp2dp2", "--to", "pp2dp2",
        init_process_group=False, timeout=120,
    )  # fmt: skip
    assert [code for code, *_ in ranks] == [0] * 4
    (found,) = json.loads(ranks[0][1])["pairs"]
    assert (found["guest"], found["home"]) == ("pp2dp2", "tp2dp2")
    # Half the bytes, but every replica's addends wait at their owner until they may be added.
    assert found["fused_bytes"] == pytest.approx(found["apart_bytes"] / 2, rel=0.01)
    assert found["fused_buffers"] > 2 * found["apart_buffers"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ranks", "1"), "--ranks must be at least 2, not 1: one rank alone moves nothing"),
        (("--ranks", "3"), "the six pairs need an even number of ranks, not 3; give --from and --to"),
        (("--ranks", "16"), "tp16: 8 attention heads do not divide over tp 16"),
        (("--repeats", "4"), "--repeats must be at least 5, not 4"),
        (("--sizes", "12,13"), "--sizes: there is no model of 13 MB; the models are of 12, 55 and 110 MB"),
        (("--from", "tp4"), "--from and --to go together"),
        (("--from", "tp4", "--to", "qp4"), "--to: 'qp4' is not a strategy; join some of tpN, cpN, ppN and dpN"),
        (("--from", "tp4", "--to", "dp2"), "--to dp2: a world of 4 ranks leaves dp 4, not 2"),
        (("--from", "tp2tp2", "--to", "dp4"), "--from tp2tp2: tp is given twice"),
        (("--fold", "--from", "dp4", "--to", "tp4"), "--fold: a guest of dp 1 and cp 1 has no reduction"),
        (("--", "--bf16"), "takes no arguments of Megatron's"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", "reshard", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA devices")
def test_nccl_without_a_device_is_refused_before_a_rank_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "reshard", "--backend", "nccl"]) == 2
    assert "--backend nccl needs CUDA devices, and none is visible; use gloo" in capsys.readouterr().err
