"""A dynamic programme over cut points and layouts: the best length groups around one layout of home, by estimates.

Switches and folds enter it with the times of real reshard plans, made only for moves that a good plan uses. Called by
``search``, which times what it finds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hotspa_megatron.planning.execution import Execution
from hotspa_megatron.planning.group_estimates import GroupEstimates
from hotspa_megatron.planning.step_time import GroupChoice
from hotspa_megatron.strategy import Strategy

Layout = tuple[int, int, int]
"""tp, pp, vpp: what decides who holds which parameter."""


class Interval(NamedTuple):
    """The sequences between two cut points and the execution that runs them."""

    first: int
    last: int
    execution: Execution


class Solution(NamedTuple):
    """``seconds`` of a step, its end included; intervals short to long."""

    seconds: float
    intervals: tuple[Interval, ...]


class Programme:
    """The best length groups around one layout of home, by estimates.

    Costs depend on what came before only through the guest that ran last, out of which the next one may be made. Moves
    count as free until ``make_real`` has planned them, so a solution whose moves are all real is the best there is. Budgets
    are those of a strategy alone beside home, until ``make_room`` has found that they are too much together.
    """

    def __init__(self, estimates: GroupEstimates, homes: Sequence[GroupChoice], *, guests: bool) -> None:
        self._estimates, self._homes = estimates, homes
        self._home = homes[0].execution.strategy
        own = homes[0].execution.layout
        self._layouts = estimates.layouts if guests else [own]
        self._own = self._layouts.index(own)
        self._model = estimates.models.under(self._home)
        self._others: frozenset[Strategy] = frozenset()
        self._fill()
        count = len(self._layouts)
        # Before: each layout's guest, and (last) none. Not known yet: free.
        self._switch = np.zeros((count + 1, count))
        self._fold = np.zeros(count)
        self._known: set[tuple[int, int]] = set()

    def _fill(self) -> None:
        """The least time of each interval in each layout, and who takes it, in the memory that is left."""
        estimates = self._estimates
        size = len(estimates.cuts)
        self._values = np.full((len(self._layouts), size, size), math.inf)
        self._chosen = np.zeros((len(self._layouts), size, size), np.int64)
        self._capacity: dict[Execution, int] = {}
        for number, execution in enumerate(estimates.executions):
            if execution.layout not in self._layouts:
                continue
            others = sorted(self._others - {execution.strategy})
            capacity = estimates.beside(execution, self._home, others)
            if capacity is None:
                continue
            self._capacity[execution] = capacity
            place = self._layouts.index(execution.layout)
            estimate = estimates.seconds(execution, capacity, self._home)
            better = estimate < self._values[place]
            self._values[place][better] = estimate[better]
            self._chosen[place][better] = number
        for place, layout in enumerate(self._layouts):
            if place != self._own:
                self._values[place] += self._model.guest_reduction(self._strategy(layout))

    def solve(self) -> Solution:
        """The best groups by what is known of moves and memory; no intervals, and infinite time, where nothing fits."""
        cuts, count = len(self._estimates.cuts), len(self._layouts)
        best = np.full((cuts, count + 1), math.inf)
        best[0, count] = 0.0
        back: dict[tuple[int, int], tuple[int, int, int]] = {}
        for first in range(cuts - 1):
            if not np.isfinite(best[first]).any():
                continue
            through = best[first][:, None] + self._switch
            before = through.argmin(axis=0)
            reached = through.min(axis=0) + self._fold
            for last in range(first + 1, cuts):
                stays = best[first] + self._values[self._own, first, last]
                for guest in np.flatnonzero(stays < best[last]).tolist():
                    best[last, guest] = stays[guest]
                    back[last, guest] = first, guest, self._own
                goes = reached + self._values[:, first, last]
                goes[self._own] = math.inf
                for guest in np.flatnonzero(goes < best[last, :count]).tolist():
                    best[last, guest] = goes[guest]
                    back[last, guest] = first, int(before[guest]), guest
        state = cuts - 1, int(best[-1].argmin())
        seconds = float(best[state])
        if not math.isfinite(seconds):
            return Solution(math.inf, ())
        intervals: list[Interval] = []
        while state in back:
            first, guest, place = back[state]
            chosen = self._estimates.executions[int(self._chosen[place, first, state[0]])]
            intervals.append(Interval(first, state[0], chosen))
            state = first, guest
        solution = Solution(seconds, tuple(reversed(intervals)))
        return solution._replace(seconds=seconds + self._estimates.end_of_step(self.home_choice(solution)))

    def make_real(self, solution: Solution) -> bool:
        """Plan the moves that the solution takes and that were free so far; False where there were none."""
        found, before = False, len(self._layouts)
        for interval in solution.intervals:
            place = self._layouts.index(interval.execution.layout)
            if place == self._own:
                continue
            if (before, place) not in self._known:
                self._known.add((before, place))
                found = True
                guest = self._strategy(self._layouts[place])
                source = None if before == len(self._layouts) else self._strategy(self._layouts[before])
                if source != guest:
                    self._switch[before, place] = self._model.switch_seconds(self._home, source, guest)
                self._fold[place] = self._model.fold_seconds(guest, self._home)
            before = place
        return found

    def make_room(self, solution: Solution) -> bool:
        """Keep free what the solution's strategies take together; False where that was so already, or leaves no home."""
        others = self._others | {interval.execution.strategy for interval in solution.intervals} - {self._home}
        if others == self._others:
            return False
        self._others = others
        self._homes = [
            choice
            for choice in self._homes
            if self._model.memory.capacity(choice.execution, choice.execution.strategy, sorted(others))
            >= self._estimates.least(choice.execution, choice.execution.strategy, choice.max_length)
        ]
        self._fill()
        return bool(self._homes)

    def groups(self, solution: Solution) -> tuple[GroupChoice, ...]:
        """The solution as length groups, home last; neighbours with one execution become one."""
        home = self.home_choice(solution)
        choices = [
            GroupChoice(
                max_length=self._estimates.cuts[interval.last],
                execution=interval.execution,
                tokens_per_microbatch=self._capacity[interval.execution],
            )
            for interval in solution.intervals
        ]
        if choices[-1].execution == home.execution:
            choices.pop()
        merged = [
            one
            for one, two in itertools.zip_longest(choices, choices[1:])
            if two is None or one.execution != two.execution
        ]
        return (*merged, home)

    def home_choice(self, solution: Solution) -> GroupChoice:
        """Home runs the longest sequences, or keeps the parameters where a guest or nobody can do that faster."""
        last = solution.intervals[-1].execution if solution.intervals else None
        for choice in self._homes:
            if choice.execution == last:
                return choice
        return self._homes[0]

    def _strategy(self, layout: Layout) -> Strategy:
        tp, pp, vpp = layout
        return Strategy.from_world(self._estimates.models.world_size, tp=tp, cp=1, pp=pp, vpp=vpp)
