"""The CPU stand-in says where it does not belong; the step's work is counted once however it was spread."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

from hotspa_megatron.hooks import cpu
from hotspa_megatron.hooks.forward_backward import count_work
from hotspa_megatron.strategy import Strategy
from tests.spawn import run_ranks
from tests.training import import_megatron


def test_the_stand_in_refuses_to_hide_a_visible_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not cpu.needed()
    with pytest.raises(RuntimeError, match="refuses to hide a visible CUDA device"):
        cpu.install()
    assert cpu.replaced() == ()


@pytest.mark.parametrize(
    "home", [Strategy(tp=2, cp=2, pp=1, dp=1), Strategy(tp=1, cp=1, pp=2, dp=2), Strategy(tp=1, cp=1, pp=1, dp=4)]
)
@pytest.mark.parametrize("lengths", [(5, 7, 11, 13, 17), (3,), ()])
def test_the_throughput_line_counts_every_sequence_once(
    home: Strategy, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **_: self)
    step: Any = types.SimpleNamespace(plan=types.SimpleNamespace(lengths=lengths))
    states: Any = types.SimpleNamespace(home=types.SimpleNamespace(strategy=home))
    counted: list[torch.Tensor] = []
    for rank in range(home.world_size):
        count_work(step, states, rank, counted.append)
    # Megatron sums over the world, ranks without work included, and divides by home's tp x cp x pp.
    assert len(counted) == home.world_size
    seen = [n for boundaries in counted for n in (boundaries[1:] - boundaries[:-1]).tolist() if n]
    assert sorted(seen) == sorted(lengths * home.replica_size)


def test_what_a_checkpoints_writer_is_given_is_a_copy() -> None:
    """It writes while the next steps change what is saved; from a GPU it has copied it by then."""
    assert run_ranks(_preload, 1, prepare=import_megatron, init_process_group=False) == [([1.0, 1.0], [2.0, 2.0])]


def _preload(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    saved = torch.ones(2)
    buckets: Any = [("file", "key", ([], [("item", saved)]))]
    ((_, _, (_, ((_, copy),))),) = FileSystemWriterAsync.preload_tensors(buckets)
    saved += 1
    return copy.tolist(), saved.tolist()
