"""How a strategy is run: with how much recomputation; and every way that a model allows.

Pure numbers. ``memory_model`` and ``cost_model`` say what an execution holds and how long it takes; ``search`` chooses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from hotspa_megatron.planning.legality import tp_problem
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.strategy import Strategy, stage_layers

RECOMPUTE_SHARES: Final = (0.0, 0.5, 1.0)
"""Shares of a stage's layers recomputed in full, as --recompute-method block takes a number of layers."""
VIRTUAL_STAGES: Final = (1, 2, 3, 4)
"""Virtual stages per pipeline stage that are tried: each more saves less of the pipeline's fill and sends more."""
_SHORTEST_SLICE: Final = 512
"""Tokens of the longest sequence that a context-parallel rank is left with at least: thinner slices only add messages."""


Granularity: TypeAlias = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What the backward pass computes anew, in Megatron's own terms.

    ``none``; ``selective``: the core attention; ``full``: whole layers, the first ``layers`` of each virtual stage, or
    (None) all of them. Raises ValueError for ``layers`` without full.
    """

    granularity: Granularity
    layers: int | None = None

    def __post_init__(self) -> None:
        if self.layers is not None and (self.granularity != "full" or self.layers < 1):
            raise ValueError(
                f"{self.layers} layers of recompute {self.granularity}: full recomputes at least one layer"
            )

    def __str__(self) -> str:
        return self.granularity if self.layers is None else f"{self.granularity} of {self.layers} layers"

    @classmethod
    def of_flags(cls, granularity: str | None, method: str | None, num_layers: int | None) -> Recompute:
        """What Megatron's --recompute-granularity, -method and -num-layers say, for any strategy."""
        if granularity == "full":
            return cls(granularity="full", layers=(num_layers or 1) if method == "block" else None)
        return cls(granularity="selective" if granularity == "selective" else "none")

    def share(self, layers: float) -> float:
        """The share of layers that is recomputed in full, of virtual stages with so many.

        Selective recomputation keeps as much as none where attention is fused, so it counts as none.
        """
        if self.granularity != "full":
            return 0.0
        return 1.0 if self.layers is None else min(1.0, self.layers / layers)

    @classmethod
    def of_share(cls, share: float, layers: int) -> Recompute:
        """Of virtual stages with so many layers, the nearest that recomputes no less than this share of them."""
        if share == 0:
            return cls(granularity="none")
        again = math.ceil(share * layers - 1e-9)
        return cls(granularity="full", layers=None if again >= layers else again)


@dataclass(frozen=True, kw_only=True, order=True)
class Execution:
    """A strategy, and the share of its layers that is recomputed in full: 0 to 1, else ``ValueError``."""

    strategy: Strategy
    recompute: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.recompute <= 1:
            raise ValueError(f"recompute is a share of layers from 0 to 1, not {self.recompute}")

    def __str__(self) -> str:
        return f"{self.strategy} recompute {self.recompute:g}" if self.recompute else str(self.strategy)

    @property
    def layout(self) -> tuple[int, int, int]:
        """(tp, pp, vpp): what decides where parameters lie in a world of given size."""
        return self.strategy.tp, self.strategy.pp, self.strategy.vpp


def legal_executions(
    shape: ModelShape,
    world_size: int,
    *,
    max_tp: int,
    recompute: Sequence[float] = RECOMPUTE_SHARES,
    vpp: Sequence[int] = (1,),
    max_cp: int | None = None,
) -> tuple[Execution, ...]:
    """Every execution that the model's sizes allow on ``world_size`` ranks, sorted.

    ``max_tp`` is usually the GPUs of a node. ``max_cp`` defaults to what leaves each rank a slice worth computing.
    """
    longest_cp = max(1, shape.seq_length // _SHORTEST_SLICE) if max_cp is None else max_cp
    sizes = [size for size in range(1, world_size + 1) if world_size % size == 0]
    found = []
    for tp in sizes:
        if tp > max_tp or tp_problem(shape, tp) is not None or shape.padded_vocab_size % tp:
            continue
        for pp in sizes:
            if world_size % (tp * pp) or not _stages_divide(shape.num_layers, pp):
                continue
            for cp in sizes:
                if cp > longest_cp or world_size % (tp * pp * cp):
                    continue
                for virtual in vpp:
                    if virtual > 1 and (pp == 1 or not _stages_divide(shape.num_layers, pp * virtual)):
                        continue
                    strategy = Strategy.from_world(world_size, tp=tp, cp=cp, pp=pp, vpp=virtual)
                    found += [Execution(strategy=strategy, recompute=share) for share in recompute]
    return tuple(sorted(found))


def _stages_divide(num_layers: int, stages: int) -> bool:
    try:
        stage_layers(num_layers, stages)
    except ValueError:
        return False
    return True
