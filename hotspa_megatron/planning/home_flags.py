"""Megatron's flags that make a home: which to give, and which to remove from a command line that makes another one.

What refuses a job under a file made for another home and ``hotspa plan`` say it alike. Knows the names of flags and
nothing of how they are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from hotspa_megatron.planning.execution import Recompute
from hotspa_megatron.strategy import Strategy

PARALLEL_FLAGS: Final = {
    "tp": "--tensor-model-parallel-size", "cp": "--context-parallel-size", "pp": "--pipeline-model-parallel-size"
}  # fmt: skip
VIRTUAL_FLAGS: Final = ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage")
"""Two ways to say it, of which Megatron takes one."""
RECOMPUTE_ACTIVATIONS: Final = "--recompute-activations"
"""Without a value; Megatron takes it for selective recomputation, whatever else is said."""
RECOMPUTE_FLAGS: Final = (
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
    RECOMPUTE_ACTIVATIONS,
)


@dataclass(frozen=True, kw_only=True)
class FlagChange:
    """``give``: flags and values in place of what is there; ``remove``: flags that have to go, with their values."""

    give: tuple[str, ...]
    remove: tuple[str, ...]

    def __str__(self) -> str:
        parts = [(f"give Megatron {' '.join(self.give)}", self.give), (f"remove {' '.join(self.remove)}", self.remove)]
        return " and ".join(said for said, flags in parts if flags)


def change_of_home(
    sizes: Mapping[str, int],
    recompute: Recompute | None,
    *,
    now: Strategy,
    now_recompute: Recompute,
    given: Collection[str] | None = None,
) -> FlagChange:
    """From the home ``now`` to one of these ``sizes`` (of tp, cp, pp, vpp) and ``recompute``; what is left out may stay.

    ``given``: the flags of the command line; None where they are not known: then those that ``now`` can be made by.
    """
    give = [text for axis, flag in PARALLEL_FLAGS.items() if axis in sizes for text in (flag, str(sizes[axis]))]
    remove: list[str] = []
    if "vpp" in sizes:
        if sizes["vpp"] > 1:
            give += [VIRTUAL_FLAGS[0], str(sizes["vpp"])]
        remove += VIRTUAL_FLAGS if now.vpp > 1 or given is not None else ()
    if recompute is not None and recompute != now_recompute:
        give += recompute_flags(recompute)
        remove += RECOMPUTE_FLAGS if given is not None else _made_by(now_recompute)
    there = remove if given is None else given
    return FlagChange(give=tuple(give), remove=tuple(flag for flag in remove if flag in there and flag not in give))


def recompute_flags(recompute: Recompute) -> tuple[str, ...]:
    """What makes Megatron recompute like this at home."""
    granularity, method, layers, _ = RECOMPUTE_FLAGS
    if recompute.granularity == "none":
        return ()
    if recompute.granularity == "selective":
        return granularity, "selective"
    if recompute.layers is None:
        return granularity, "full", method, "uniform", layers, "1"
    return granularity, "full", method, "block", layers, str(recompute.layers)


def _made_by(recompute: Recompute) -> tuple[str, ...]:
    if recompute.granularity == "selective":
        return RECOMPUTE_FLAGS[0], RECOMPUTE_ACTIVATIONS
    return RECOMPUTE_FLAGS[:3] if recompute.granularity == "full" else ()
