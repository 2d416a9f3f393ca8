"""The engine as a library: the documented example runs on ranks that know nothing of Megatron, and its figures are true."""

from __future__ import annotations

import contextlib
import io
import runpy
import sys

import torch

from tests.spawn import REPOSITORY, run_ranks


def _example(rank: int, world_size: int) -> tuple[str, bool, set[str]]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        module = runpy.run_path(str(REPOSITORY / "examples" / "reshard.py"))
        held = module["main"]()
    right = sorted(held) == list(range(12)) and all(
        torch.equal(tensor, torch.full(module["PARAMETERS"][index].shape, float(index)))
        for index, tensor in held.items()
    )
    return said.getvalue(), right, {"megatron", "megatron.core"} & set(sys.modules)


def test_the_documented_example_moves_a_model_without_megatron() -> None:
    ranks = run_ranks(_example, 4)
    assert all(right and not imported for _, right, imported in ranks)
    documented = (REPOSITORY / "docs" / "resharding.md").read_text(encoding="utf-8")
    assert ranks[0][0].count("\n") == 1 and ranks[0][0] in documented
