"""What each rank's training steps gave, with the flag and without: written for `hotspa verify`, on request only."""

from __future__ import annotations

import functools
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK_LOG_VARIABLE = "HOTSPA_RANK_LOG"
"""Environment variable: the folder in which every rank writes one JSON object per step to a file of its own."""


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank writes."""
    return folder / f"rank-{rank:05d}.jsonl"


def log_every_rank(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's train_step, which notes afterwards what it returned. ``original`` itself where nobody asked for it.

    A line holds ``iteration``, ``losses`` (on the last pipeline stage), ``grad_norm``, ``step_s`` in seconds, and
    ``peak_bytes``: the device memory that torch has allocated at most, or on CPU all memory of the process.
    """
    name = os.environ.get(RANK_LOG_VARIABLE)
    if not name:
        return original
    folder = Path(name)

    @functools.wraps(original)
    def train_step(*positional: Any, **options: Any) -> Any:
        from megatron.training import get_args

        began = time.perf_counter()
        result = original(*positional, **options)
        losses, grad_norm = result[0], result[5]
        entry = {
            # Of 0.17, too; Megatron counts it up after the step.
            "iteration": get_args().curr_iteration + 1,
            "losses": {key: float(value) for key, value in sorted(losses.items())},
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "step_s": time.perf_counter() - began,
            "peak_bytes": _peak_bytes(),
        }
        with rank_file(folder, int(os.environ.get("RANK", "0"))).open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return result

    return train_step


def _peak_bytes() -> int:
    import torch

    from hotspa_megatron.hooks import cpu

    if cpu.installed():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.cuda.max_memory_allocated())
