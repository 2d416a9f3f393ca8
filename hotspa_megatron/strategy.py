"""A parallel strategy and the rank arithmetic that follows from it, in Megatron's default rank order.

Pure numbers: which coordinates a rank has, which ranks form a group, which layers a pipeline stage holds. Nothing here
knows a model's sizes, creates a process group or touches a tensor.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

RANK_ORDER: Final = ("tp", "cp", "dp", "pp")
"""Axes from the fastest to the slowest varying: Megatron's default order tp-cp-ep-dp-pp without experts."""

_TEXT: Final = re.compile(
    r"tp([1-9][0-9]*)-cp([1-9][0-9]*)-pp([1-9][0-9]*)-dp([1-9][0-9]*)(?:-vpp([2-9]|[1-9][0-9]+))?"
)
_VALUES_SHOWN: Final = 16
LARGEST_WORLD: Final = 1 << 18
"""Ranks: above those of any cluster, and few enough that a mistyped number is refused before groups are counted for it."""


class Kind(enum.StrEnum):
    """What a strategy is to home: home itself, one that runs on home's parameters, or one with its own layout."""

    HOME = "home"
    SIBLING = "sibling"
    GUEST = "guest"


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Where one rank stands on each axis, every value counted from 0."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, kw_only=True, order=True)
class Strategy:
    """Sizes of the tensor, context, pipeline and data axes: whole numbers of at least 1, else ``ValueError``.

    ``vpp``: virtual stages of each pipeline stage, whose micro-batches then interleave; above 1 they need a pipeline.
    """

    tp: int
    cp: int
    pp: int
    dp: int
    vpp: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "cp", "pp", "dp", "vpp"):
            size: object = getattr(self, axis)
            # bool is an int to Python, but `tp: true` is a mistake, never a size.
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{axis} must be a whole number of at least 1, not {size!r}")
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(f"vpp {self.vpp} at pp 1: virtual stages need a pipeline")

    def __str__(self) -> str:
        virtual = f"-vpp{self.vpp}" if self.vpp > 1 else ""
        return f"tp{self.tp}-cp{self.cp}-pp{self.pp}-dp{self.dp}{virtual}"

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read what ``str`` prints; ``ValueError`` for anything else."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a strategy; write it like tp4-cp1-pp2-dp1")
        tp, cp, pp, dp, vpp = (int(size) for size in match.groups(default="1"))
        return cls(tp=tp, cp=cp, pp=pp, dp=dp, vpp=vpp)

    @classmethod
    def from_world(cls, world_size: int, *, tp: int, cp: int, pp: int, vpp: int = 1) -> Strategy:
        """Give the ranks that tp, cp and pp leave over to dp; ``ValueError`` where they do not fill the world."""
        if world_size > LARGEST_WORLD:
            raise ValueError(f"{world_size} ranks are more than any cluster has; at most {LARGEST_WORLD}")
        one_replica = cls(tp=tp, cp=cp, pp=pp, dp=1).replica_size
        if world_size < 1 or world_size % one_replica:
            raise ValueError(
                f"a world of {world_size} ranks does not divide into replicas of "
                f"tp {tp} * cp {cp} * pp {pp} = {one_replica} ranks"
            )
        return cls(tp=tp, cp=cp, pp=pp, dp=world_size // one_replica, vpp=vpp)

    @property
    def replica_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tp * self.cp * self.pp

    @property
    def world_size(self) -> int:
        """Ranks of all replicas together."""
        return self.replica_size * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """Where a global rank stands; ``ValueError`` for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the {self.world_size} ranks of {self}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank(self, *, tp: int, cp: int, dp: int, pp: int) -> int:
        """The global rank at these coordinates; ``ValueError`` where one lies outside its axis."""
        for axis, position in (("tp", tp), ("cp", cp), ("dp", dp), ("pp", pp)):
            if not 0 <= position < getattr(self, axis):
                raise ValueError(f"{axis} coordinate {position} is outside {self}")
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def groups(self, axes: str) -> tuple[tuple[int, ...], ...]:
        """Rank groups that vary along ``axes`` ("tp", "dp-cp", ...) and agree on every other axis.

        Groups, and ranks within a group, come in Megatron's own order, whatever order ``axes`` names them in.
        """
        wanted = axes.split("-")
        if len(set(wanted)) != len(wanted) or not set(wanted) <= set(RANK_ORDER):
            raise ValueError(f"{axes!r} does not name axes; join some of {', '.join(RANK_ORDER)} with '-'")
        inside = self._offsets(axis for axis in RANK_ORDER if axis in wanted)
        outside = self._offsets(axis for axis in RANK_ORDER if axis not in wanted)
        return tuple(tuple(start + step for step in inside) for start in outside)

    def same_layout(self, other: Strategy) -> bool:
        """Whether parameters lie alike over the ranks of a replica, so that one model serves both strategies.

        Ranks with the same (tp, pp) coordinates hold the same parameters. Equal worlds alone do not make equal
        placement: with the same tp and pp, a rank's coordinates on both axes are the same in both strategies.
        Virtual stages place layers elsewhere.
        """
        return (self.tp, self.pp, self.vpp, self.world_size) == (other.tp, other.pp, other.vpp, other.world_size)

    def kind(self, home: Strategy) -> Kind:
        """What this strategy is where ``home`` is the command line's."""
        if self == home:
            return Kind.HOME
        return Kind.SIBLING if self.same_layout(home) else Kind.GUEST

    def _offsets(self, axes: Iterable[str]) -> list[int]:
        """Ranks reached from rank 0 along ``axes`` alone, the first axis varying fastest."""
        strides = {"tp": 1, "cp": self.tp, "dp": self.tp * self.cp, "pp": self.tp * self.cp * self.dp}
        steps = [[position * strides[axis] for position in range(getattr(self, axis))] for axis in axes]
        # itertools.product varies its last argument fastest.
        return [sum(step) for step in itertools.product(*reversed(steps))]


def layers_by_stage(virtual_stages: Sequence[Sequence[int]], pp: int) -> tuple[tuple[int, ...], ...]:
    """Layers of each pipeline stage, all its chunks', from those of the virtual stages in the model's order.

    Virtual stage k lies on pipeline stage k % pp, as Megatron's interleaved schedule has it.
    """
    return tuple(tuple(layer for chunk in virtual_stages[stage::pp] for layer in chunk) for stage in range(pp))


def stage_layers(num_layers: int, pp: int, first: int | None = None, last: int | None = None) -> tuple[range, ...]:
    """Layers of each pipeline stage, counted from 0, as Megatron places them.

    ``first`` and ``last`` are --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers; the layers
    they leave divide evenly over the other stages. ``ValueError`` lists the values that would do.
    """
    if num_layers < 1 or pp < 1:
        raise ValueError(f"{num_layers} layers on pp {pp} stages: both must be at least 1")
    if pp == 1 and (first is not None or last is not None):
        raise ValueError(
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers have no meaning at pp 1; "
            "remove them"
        )
    counts = _stage_counts(num_layers, pp, first, last)
    if counts is None:
        raise ValueError(_why_no_stages(num_layers, pp, first, last))
    ends = list(itertools.accumulate(counts))
    return tuple(range(end - count, end) for count, end in zip(counts, ends, strict=True))


def _stage_counts(num_layers: int, pp: int, first: int | None, last: int | None) -> list[int] | None:
    """Layers per stage, or None where Megatron cannot place them."""
    middle_stages = pp - (first is not None) - (last is not None)
    middle_layers = num_layers - (first or 0) - (last or 0)
    if (first is not None and first < 1) or (last is not None and last < 1) or middle_layers < middle_stages:
        return None
    if middle_layers % middle_stages if middle_stages else middle_layers:
        return None
    middle = [middle_layers // middle_stages] * middle_stages if middle_stages else []
    return ([] if first is None else [first]) + middle + ([] if last is None else [last])


def _why_no_stages(num_layers: int, pp: int, first: int | None, last: int | None) -> str:
    if first is None and last is None:
        legal = [size for size in range(1, num_layers + 1) if num_layers % size == 0]
        return f"{num_layers} layers do not divide over pp {pp} stages; legal pp: {listed(legal)}"
    given, fixes = [], []
    for flag, value, firsts_lasts in (
        ("--decoder-first-pipeline-num-layers", first, [(n, last) for n in range(1, num_layers + 1)]),
        ("--decoder-last-pipeline-num-layers", last, [(first, n) for n in range(1, num_layers + 1)]),
    ):
        if value is None:
            continue
        given.append(f"{flag} {value}")
        legal = [n for n, pair in enumerate(firsts_lasts, 1) if _stage_counts(num_layers, pp, *pair) is not None]
        fixes.append(f"legal {flag}: {listed(legal)}")
    return f"{num_layers} layers do not divide over pp {pp} stages with {' and '.join(given)}; {'; '.join(fixes)}"


def listed(values: Iterable[int]) -> str:
    """Numbers as a message shows them: comma-separated, cut where the list grows long, "none" where it is empty."""
    numbers = [str(value) for value in values]
    if len(numbers) > _VALUES_SHOWN:
        numbers[_VALUES_SHOWN:] = ["..."]
    return ", ".join(numbers) or "none"
