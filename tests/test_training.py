"""Trainings under several strategies give the losses and gradient norms of the static training of the same home.

Through megatron.training.pretrain on four ranks. The bound is 1e-6 (losses) and 1e-5 (norms), or twice what two static
layouts differ by, whatever is larger; that spread is printed beside it. Broken runs beside them must exceed the bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from tests.training import Job, Run, arguments, from_common_weights, train

STATIC = "strategies: []"
SHARDED = "--use-distributed-optimizer"
SP = "--sequence-parallel"


class Home(NamedTuple):
    """Home's sizes and what else its command line says."""

    tp: int
    cp: int
    pp: int
    flags: tuple[str, ...]

    def run(self, config: str, *more: str, iterations: int = 20, **options: Any) -> Run:
        """A run from the common weights."""
        line = arguments(
            *self.flags, *from_common_weights(), *more, tp=self.tp, cp=self.cp, pp=self.pp, iterations=iterations
        )
        return train(Job(line, config, **options))


TP2_CP2 = Home(2, 2, 1, (SP, SHARDED))
TP2_PP2 = Home(2, 1, 2, ())
DP4 = Home(1, 1, 1, (SHARDED,))

GUEST_AND_SIBLING = """
strategies:
  - {max_length: 32, tp: 1, tokens_per_microbatch: 96}
  - {max_length: 128, tp: 2, tokens_per_microbatch: 192}
"""
TWO_GUESTS = """
strategies:
  - {max_length: 32, tp: 1, tokens_per_microbatch: 96}
  - {max_length: 128, tp: 4}
"""
PIPELINED_GUEST = """
strategies:
  - {max_length: 64, tp: 2, pp: 2, tokens_per_microbatch: 128}
"""


def difference(values: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference; runs of different lengths are compared as far as both go."""
    pairs = list(zip(values, reference, strict=False))
    assert pairs
    return max(abs(value - other) / abs(other) for value, other in pairs)


def spread(runs: Sequence[Run]) -> tuple[float, float]:
    """What runs that should agree differ by at most, in losses and in gradient norms."""
    pairs = list(itertools.combinations(runs, 2))
    return (
        max(difference(one.losses, other.losses) for one, other in pairs),
        max(difference(one.grad_norms, other.grad_norms) for one, other in pairs),
    )


def assert_equal(name: str, run: Run, static: Run, layouts: Sequence[Run], *, floor: tuple[float, float] = (1e-6, 1e-5)) -> None:
    """``run`` equals ``static`` within ``floor`` or twice the spread of ``layouts``, static runs of the same training."""
    losses, norms = difference(run.losses, static.losses), difference(run.grad_norms, static.grad_norms)
    of_losses, of_norms = spread(layouts)
    print(f"{name}: losses {losses:.1e} (static layouts {of_losses:.1e}), gradient norms {norms:.1e} ({of_norms:.1e})")
    assert len(run.losses) == len(static.losses)
    assert losses <= max(floor[0], 2 * of_losses)
    assert norms <= max(floor[1], 2 * of_norms)


def strategies_of(run: Run) -> set[tuple[str, str]]:
    """(strategy, kind) of every segment that ran."""
    return {(segment.strategy, segment.kind) for step in run.steps for segment in step.segments}


@pytest.fixture(scope="module")
def static_layouts() -> list[Run]:
    """The same training under three static layouts."""
    return [home.run(STATIC) for home in (TP2_CP2, TP2_PP2, DP4)]


@pytest.mark.parametrize(
    ("home", "config", "expected"),
    [
        (TP2_CP2, GUEST_AND_SIBLING, {("tp1-cp1-pp1-dp4", "guest"), ("tp2-cp1-pp1-dp2", "sibling"), ("tp2-cp2-pp1-dp1", "home")}),
        (TP2_PP2, TWO_GUESTS, {("tp1-cp1-pp1-dp4", "guest"), ("tp4-cp1-pp1-dp1", "guest"), ("tp2-cp1-pp2-dp1", "home")}),
        (DP4, PIPELINED_GUEST, {("tp2-cp1-pp2-dp1", "guest"), ("tp1-cp1-pp1-dp4", "home")}),
    ],
    ids=["guest and sibling", "two guests", "pipelined guest"],
)  # fmt: skip
def test_mixed_training_equals_the_static_one(
    static_layouts: list[Run], home: Home, config: str, expected: set[tuple[str, str]], request: pytest.FixtureRequest
) -> None:
    mixed = home.run(config)
    assert strategies_of(mixed) == expected
    assert [each.consumed_samples for each in mixed.iterations] == [16 * step for step in range(1, 21)]
    assert_equal(request.node.callspec.id, mixed, home.run(STATIC), static_layouts)
