"""Two thousand steps of random strategy mixes: what the ranks hold stays flat, and losses stay with the static runs'.

HOTSPA_SOAK_PLOT names a file for the plot; without it the plot lies in the test's own folder.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import shlex
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hotspa_megatron.hooks.patching import Patches
from tests.training import SHARDED, SP, STATIC, Job, Run, arguments, corpus, train, workspace

STEPS = 2000
EVERY = 40
"""Steps between two looks at what a rank holds."""
SMALL = shlex.split("""
    --num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 4 --kv-channels 4
    --seq-length 64 --max-position-embeddings 64 --split 100,0,0 --log-interval 100 --lr-decay-iters 2000
""")
MIXED = """
strategies:
  - {max_length: 12, tp: 1, tokens_per_microbatch: 24}
  - {max_length: 24, tp: 1, pp: 2}
  - {max_length: 48, tp: 2, cp: 2}
home: {tokens_per_microbatch: 128}
"""
COUNTED = ("groups", "threads", "descriptors")
"""What must not change by a single one."""
ALLOWED = {"resident": 6.0, "tensors": 0.02}
"""MiB that the second half of a run may have on the first: what allocators keep, and what differs from step to step."""


def mix_at_random() -> None:
    """Have every step run a random choice of its length groups, the others' sequences under the next longer one."""
    from hotspa_megatron.planning.step_plan import StepPlan, StepPlanner

    plan = StepPlanner.plan
    few: dict[tuple[int, ...], StepPlanner] = {}

    def planned(self: StepPlanner, lengths: Any) -> StepPlan:
        last = len(self.groups) - 1
        numbers = np.random.default_rng([int(length) for length in lengths])
        used = (*(at for at in range(last) if numbers.integers(2)), last)
        if len(used) == len(self.groups):
            return plan(self, lengths)
        if used not in few:
            times = tuple(self.costs.times[at] for at in used)
            costs = dataclasses.replace(self.costs, times=times)
            few[used] = StepPlanner([self.groups[at] for at in used], costs, merge=False)
        found = plan(few[used], lengths)
        segments = [dataclasses.replace(each, group=used[each.group]) for each in found.segments]
        return StepPlan(lengths=found.lengths, segments=tuple(segments))

    Patches().set(StepPlanner, "plan", planned)


def watch(folder: Path, *, mix: bool, leak: str = "") -> None:
    """Note what this rank holds, every few steps, in a file of the folder. ``leak``: what is kept for good in every step."""
    from hotspa_megatron.hooks.forward_backward import StepRunner

    if mix:
        mix_at_random()
    run, number, kept, every = StepRunner.run, 0, [], EVERY if not leak else 5
    file = (folder / f"rank-{os.environ['RANK']}.jsonl").open("w", buffering=1)

    def watched(self: Any, **options: Any) -> Any:
        nonlocal number
        result = run(self, **options)
        number += 1
        if leak:
            kept.append(LEAKS[leak]())
        if number % every == 0:
            file.write(json.dumps({"step": number, **_held()}) + "\n")
        return result

    Patches().set(StepRunner, "run", watched)


def _held() -> dict[str, float]:
    gc.collect()
    storages = {
        each.untyped_storage()._cdata: each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if type(each) is torch.Tensor
    }
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "groups": len(dist.distributed_c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tensors": sum(storages.values()) / 2**20,
        "resident": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    }


def _wait_for_ever() -> threading.Thread:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    return thread


LEAKS = {
    "groups": lambda: dist.new_group([0, 1]),
    "threads": _wait_for_ever,
    "descriptors": lambda: os.open("/dev/null", os.O_RDONLY),
    "tensors": lambda: torch.zeros(1 << 12),
    "resident": lambda: np.ones(1 << 18),
}


def looks(folder: Path) -> list[dict[str, NDArray[np.float64]]]:
    """What every rank noted, by quantity; ``step`` among them."""
    found = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found.append({name: np.array([line[name] for line in lines], float) for name in lines[0]})
    return found


def grown(ranks: Sequence[dict[str, NDArray[np.float64]]]) -> set[str]:
    """The quantities that are not flat on some rank: the second half of a run against what follows its first tenth."""
    found = set()
    for rank in ranks:
        count = len(rank["step"])
        early, late = slice(count // 10, count // 2), slice(count // 2, count)
        for name in (*COUNTED, *ALLOWED):
            most = float(rank[name][early].max()) + ALLOWED.get(name, 0.0)
            if float(rank[name][late].max()) > most:
                found.add(name)
    return found


def train_small(config: str | None, *more: str, tp: int, iterations: int, before: Any = None) -> Run:
    lengths = np.minimum(np.exp(np.random.default_rng(5).normal(2.6, 0.9, 600)).astype(int) + 3, 65)
    line = arguments(
        *(SP, SHARDED) if tp > 1 else (SHARDED,), *SMALL, *more, tp=tp, iterations=iterations, batch=4,
        documents=corpus(tuple(int(length) for length in lengths)),
    )  # fmt: skip
    return train(Job(line, config, before=before), timeout=900)


@functools.cache
def from_weights() -> tuple[str, ...]:
    """The same weights for every layout."""
    folder = str(workspace() / "weights-of-the-soak")
    train_small(None, "--save", folder, "--save-interval", "1", "--no-save-optim", "--no-save-rng", tp=1, iterations=1)
    return ("--load", folder, "--finetune", "--no-load-optim", "--no-load-rng")


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_two_thousand_steps_of_random_mixes_leave_no_trace(tmp_path: Path) -> None:
    watching = functools.partial(watch, tmp_path, mix=True)
    mixed = train_small(MIXED, *from_weights(), tp=2, iterations=STEPS, before=watching)
    layouts = [train_small(STATIC, *from_weights(), tp=tp, iterations=STEPS) for tp in (2, 1)]
    kinds = [tuple(segment.strategy for segment in step.segments) for step in mixed.steps]
    print(f"{len(set(kinds))} different mixes of strategies")
    assert len(mixed.losses) == STEPS and len(set(kinds)) > 8
    ranks = looks(tmp_path)
    plot(ranks, mixed, layouts, Path(os.environ.get("HOTSPA_SOAK_PLOT", tmp_path / "soak.png")))
    for name in (*COUNTED, *ALLOWED):
        print(name, [f"{rank[name][len(rank[name]) // 10]:.6g} -> {rank[name][-1]:.6g}" for rank in ranks])
    assert len(ranks) == 4 and not grown(ranks)
    static, other = (np.array(each.losses) for each in layouts)
    spread = float(np.abs(static - other).max())
    apart = float(np.abs(static - np.array(mixed.losses)).max())
    print(f"losses: mixed and static differ by up to {apart:.2e}, two static layouts by up to {spread:.2e}")
    assert static[-100:].mean() < static[:100].mean() - 0.1  # it learns
    assert apart <= 2 * spread


@pytest.mark.long
@pytest.mark.parametrize("leak", LEAKS)
def test_what_is_kept_in_every_step_is_seen(leak: str, tmp_path: Path) -> None:
    train_small(MIXED, tp=2, iterations=100, before=functools.partial(watch, tmp_path, mix=True, leak=leak))
    assert leak in grown(looks(tmp_path))


def plot(ranks: Sequence[dict[str, NDArray[np.float64]]], mixed: Run, layouts: Sequence[Run], path: Path) -> None:
    """What the ranks held, and the losses beside each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 2, figsize=(12, 10))
    for name, axis in zip((*COUNTED, *ALLOWED), axes.flat, strict=False):
        for number, rank in enumerate(ranks):
            axis.plot(rank["step"], rank[name], label=f"rank {number}")
        axis.set(title=f"{name}{' (MiB)' if name in ALLOWED else ''}", xlabel="step", ylim=(0, None))
    axis = axes.flat[5]
    steps = np.arange(1, len(mixed.losses) + 1)
    static, other = (np.array(each.losses) for each in layouts)
    axis.semilogy(steps, np.abs(static - np.array(mixed.losses)) + 1e-12, label="mixed - static", linewidth=0.5)
    axis.semilogy(steps, np.abs(static - other) + 1e-12, label="static - other static", linewidth=0.5)
    axis.set(title="differences of losses", xlabel="step")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path)
    print(f"plot: {path}")
