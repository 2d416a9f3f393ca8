"""Chooses thresholds, strategies and home for a distribution of lengths: what ``hotspa plan`` writes down.

A dynamic programme over cut points and layouts finds plans by closed-form estimates; switches and folds enter it with the
times of real reshard plans, made only for moves that a good plan uses. The best plans, and the best static ones packed
alike, are then planned and timed step by step, so the answer is never slower than static on the steps looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotspa_megatron.planning.alignment import alignment_of
from hotspa_megatron.planning.cost_model import CostModel
from hotspa_megatron.planning.execution import RECOMPUTE_SHARES, Execution, legal_executions
from hotspa_megatron.planning.hardware import Hardware
from hotspa_megatron.planning.lengths import LengthHistogram, Lengths
from hotspa_megatron.planning.memory_model import ADAM_BYTES, GIB, Held
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.planning.step_time import GroupChoice, RunModel, StepTime, mean_time
from hotspa_megatron.strategy import Kind, Strategy

_FILLED: Final = 0.97
"""Share of a micro-batch's room that packing fills."""
_STATIC_SLACK: Final = 0.92
"""Static plans whose estimate, times this, is below the best exact time are timed exactly, too."""
_MOST_STATIC: Final = 24
_FINALISTS: Final = 5
"""Plans of the dynamic programme that are timed exactly."""
_WORTH_A_LOOK: Final = 1.05
"""How far above the best estimate a plan's may lie for that."""
_STARTS: Final = 4
"""Plans with different homes that are improved step by step."""
_REFINED_SEQUENCES: Final = 400 * 1024
"""Sequences of neighbours of the best plan that are planned and timed exactly, at most: what seconds allow."""
_LEAST_REFINED: Final = 16
"""Neighbours of each start that are timed however large the steps are."""
_WORTH_A_GROUP: Final = 0.999
"""Share of the time to which one more length group must bring a step."""
_LEAST_FILLED: Final = 8
"""Times that the longest sequence of an added group may go into a micro-batch."""
_GRAIN: Final = 64
"""Tokens to which a moved threshold is rounded."""
_MOST_REAL_MOVES: Final = 60
"""Times that programmes are run again with real moves, and memory, in place of optimistic ones, at most."""
_SHORTEST_CUT: Final = 512
"""Tokens: below, length groups gain nothing that packing does not."""
_FINER: Final = (0.84, 1.19, 0.92, 1.09, 0.71, 1.41)
"""Factors by which a threshold is moved: about a half, a quarter and a whole step between cut points."""


_Layout = tuple[int, int, int]
_Estimates = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """An execution that memory rules out, as home or beside the chosen one, and why, with the numbers.

    ``needed``: bytes of the fullest rank with the least that makes it of use: as home a micro-batch of the longest sequence,
    beside home one of the shortest length group; ``limit``: what there is.
    """

    execution: Execution
    kind: Kind
    needed: int
    limit: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The chosen length groups, home last, and the best static run on the same steps with the same packing.

    ``time`` and ``static_time`` are means over the steps looked at. ``held``: memory of each group's fullest rank with full
    micro-batches, with what the other groups keep there. ``refused``: executions that could not be home for memory, and those
    that cannot run beside this home, even alone.
    """

    groups: tuple[GroupChoice, ...]
    time: StepTime
    held: tuple[Held, ...]
    static: GroupChoice
    static_time: StepTime
    refused: tuple[Refusal, ...]

    @property
    def home(self) -> GroupChoice:
        return self.groups[-1]

    @property
    def gain(self) -> float:
        """How many times faster than static."""
        return self.static_time.total / self.time.total


def plan_strategies(
    histogram: LengthHistogram,
    *,
    shape: ModelShape,
    hardware: Hardware,
    world_size: int,
    sequences_per_step: int,
    home: Strategy | None = None,
    home_recompute: float | None = None,
    recompute: Sequence[float] = RECOMPUTE_SHARES,
    vpp: Sequence[int] = (1,),
    max_tp: int | None = None,
    max_cp: int | None = None,
    optimizer_bytes: int = ADAM_BYTES,
    steps: int = 2,
    seed: int = 0,
) -> PlannedRun:
    """Choose length groups for a corpus; lengths above ``shape.seq_length`` are split as the run would split them.

    >>> from hotspa_megatron.planning import plan_strategies
    >>> from hotspa_megatron.planning.hardware import load_hardware
    >>> from hotspa_megatron.planning.known_models import KNOWN_MODELS
    >>> from hotspa_megatron.planning.lengths import LengthHistogram
    >>> planned = plan_strategies(
    ...     LengthHistogram.wikipedia(size=10_000), shape=KNOWN_MODELS["llama-7b"], hardware=load_hardware("a800-80"),
    ...     world_size=8, sequences_per_step=128,
    ... )
    >>> planned.time.total <= planned.static_time.total
    True
    >>> planned.home.max_length
    32768

    ``home``: keep to this one, and take the static run under it as the baseline; None: choose, among all. ``home_recompute``:
    the share of layers that home, and so the baseline, recomputes; None: choose. ``recompute`` and ``vpp``: what may be chosen
    for each strategy; ``home_recompute`` may be, too. ``max_tp``: the GPUs of a node unless given. ``max_cp``: 1 where context
    parallelism is not available. ``steps`` mini-batches of
    ``sequences_per_step`` are drawn with ``seed`` and looked at. Raises ValueError where nothing fits, with the reason.
    """
    fitting = histogram.limited(shape.seq_length, "split")
    batches = [fitting.sample(sequences_per_step, seed=seed + step) for step in range(steps)]
    return plan_batches(
        batches,
        shape=shape,
        hardware=hardware,
        world_size=world_size,
        home=home,
        home_recompute=home_recompute,
        recompute=recompute,
        vpp=vpp,
        max_tp=max_tp,
        max_cp=max_cp,
        optimizer_bytes=optimizer_bytes,
    )


def plan_batches(
    batches: Sequence[Lengths],
    *,
    shape: ModelShape,
    hardware: Hardware,
    world_size: int,
    home: Strategy | None = None,
    home_recompute: float | None = None,
    recompute: Sequence[float] = RECOMPUTE_SHARES,
    vpp: Sequence[int] = (1,),
    max_tp: int | None = None,
    max_cp: int | None = None,
    optimizer_bytes: int = ADAM_BYTES,
    beyond_longest: bool = True,
) -> PlannedRun:
    """``plan_strategies`` for given mini-batches: lengths in tokens, none above ``shape.seq_length``.

    ``beyond_longest`` False: no micro-batch larger than its group's longest sequence, to see what larger ones give.
    """
    shares = sorted({*recompute, *(() if home_recompute is None else (home_recompute,))})
    executions = legal_executions(
        shape,
        world_size,
        max_tp=min(hardware.gpus_per_node, world_size) if max_tp is None else max_tp,
        recompute=shares,
        vpp=vpp,
        max_cp=max_cp,
    )
    if home is not None:
        uneven = [
            Execution(strategy=replace_axes(home, cp), recompute=share) for cp in _cps(home, max_cp) for share in shares
        ]
        executions = tuple(sorted({*executions, *uneven}))
    models = Models(shape, hardware, world_size, home=home, optimizer_bytes=optimizer_bytes)
    searching = _Search(models, batches, executions, home, home_recompute, beyond_longest)
    found = searching.run()
    plain = tuple(each for each in executions if each.strategy.vpp == 1)
    if plain == executions or (home is not None and home.vpp > 1):
        return found
    try:
        other = _Search(models, batches, plain, home, home_recompute, beyond_longest).run()
    except ValueError:  # without virtual stages nothing fits
        return found
    # With more to choose from a search that improves step by step can end at less: neither may be lost.
    best = min(found, other, key=lambda planned: planned.time.total)
    static = min(found, other, key=lambda planned: planned.static_time.total)
    return replace(
        best,
        static=static.static,
        static_time=static.static_time,
        refused=searching.refused(best.home.execution.strategy),
    )


def replace_axes(strategy: Strategy, cp: int) -> Strategy:
    """The strategy with another cp over the same ranks."""
    return Strategy.from_world(strategy.world_size, tp=strategy.tp, cp=cp, pp=strategy.pp, vpp=strategy.vpp)


def _cps(home: Strategy, max_cp: int | None) -> list[int]:
    """The cp of home's siblings, home's own among them."""
    replicas = home.dp * home.cp
    most = replicas if max_cp is None else max(max_cp, home.cp)
    return [cp for cp in range(1, most + 1) if replicas % cp == 0]


class Models:
    """Cost models of a run whose home is not settled: Megatron turns sequence parallelism off for all if home has tp 1."""

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        world_size: int,
        *,
        home: Strategy | None = None,
        optimizer_bytes: int = ADAM_BYTES,
    ) -> None:
        self.shape, self.hardware, self.world_size = shape, hardware, world_size
        self._home, self._optimizer_bytes = home, optimizer_bytes
        self._models: dict[bool, CostModel] = {}

    def under(self, home: Strategy) -> CostModel:
        """The model that holds where this is home."""
        parallel = self.shape.sequence_parallel and home.tp > 1
        if parallel not in self._models:
            self._models[parallel] = CostModel(
                replace(self.shape, sequence_parallel=parallel),
                self.hardware,
                self.world_size,
                home=self._home,
                optimizer_bytes=self._optimizer_bytes,
            )
        return self._models[parallel]


class _Interval(NamedTuple):
    """The sequences between two cut points and the execution that runs them."""

    first: int
    last: int
    execution: Execution


@dataclass(frozen=True)
class _Sums:
    """Of the sequences in (cut i, cut j], by [batch, i, j]."""

    tokens: _Estimates
    squares: _Estimates
    count: _Estimates
    longest: _Estimates

    @classmethod
    def of(cls, batches: Sequence[Lengths], cuts: Sequence[int]) -> _Sums:
        size = len(cuts)
        tokens, squares, count, longest = (np.zeros((len(batches), size, size)) for _ in range(4))
        for number, batch in enumerate(batches):
            ordered = np.sort(batch).astype(np.float64)
            at = np.searchsorted(ordered, cuts, side="right")
            for values, into in ((ordered, tokens), (ordered**2, squares), (np.ones_like(ordered), count)):
                below = np.concatenate([[0.0], np.cumsum(values)])[at]
                into[number] = np.maximum(below[None, :] - below[:, None], 0.0)
            longest[number] = np.where(count[number] > 0, np.concatenate([[0.0], ordered])[at][None, :], 0.0)
        return cls(tokens, squares, count, longest)


class _Search:
    def __init__(
        self,
        models: Models,
        batches: Sequence[Lengths],
        executions: Sequence[Execution],
        home: Strategy | None,
        home_recompute: float | None = None,
        beyond_longest: bool = True,
    ) -> None:
        self._models, self._batches, self._beyond_longest = models, batches, beyond_longest
        self._home, self._home_recompute = home, home_recompute
        self._executions = executions
        self._longest = models.shape.seq_length
        self._cuts = cut_points(self._longest)
        self._sums = _Sums.of(batches, self._cuts)
        self._layouts = sorted({execution.layout for execution in executions})
        self._exact: dict[tuple[GroupChoice, ...], StepTime] = {}
        self._estimates: dict[tuple[Execution, int, bool], _Estimates] = {}

    def run(self) -> PlannedRun:
        homes, refused = self._homes()
        if not homes:
            closest = min(refused, key=lambda refusal: refusal.needed) if refused else None
            why = f"the nearest is {closest.execution}: {closest.reason}" if closest else "no strategy is legal"
            raise ValueError(f"no strategy holds sequences of {self._longest} tokens on this hardware; {why}")
        statics = self._statics(homes)
        static = statics[0]
        best = min((self._refined(start) for start in self._starts(statics, homes)), key=self._seconds)
        home = best[-1].execution.strategy
        memory = self._models.under(home).memory
        return PlannedRun(
            groups=best,
            time=self._time(best),
            held=tuple(
                memory.held(choice.execution, home, choice.tokens_per_microbatch, others_of(best, index))
                for index, choice in enumerate(best)
            ),
            static=static,
            static_time=self._time((static,)),
            refused=self.refused(home),
        )

    def refused(self, home: Strategy) -> tuple[Refusal, ...]:
        """What memory rules out: as home, and beside this home."""
        beside = []
        for execution in self._executions:
            if execution.strategy != home and self._beside(execution, home) is None:
                beside.append(self._refusal(execution, home, _SHORTEST_CUT))
        return (*self._homes()[1], *beside)

    # ------------------------------------------------------------------------------------- what memory allows, and as what

    def _homes(self) -> tuple[list[GroupChoice], list[Refusal]]:
        """Every execution that can be home, with its budget, and the refusal of every other one."""
        homes: list[GroupChoice] = []
        refused = []
        for execution in self._executions:
            strategy = execution.strategy
            if self._home is not None and strategy != self._home:
                continue
            if self._home_recompute is not None and execution.recompute != self._home_recompute:
                continue
            alone = GroupChoice(max_length=self._longest, execution=execution, tokens_per_microbatch=0)
            if sized := self._sized((alone,)):
                homes += sized
            else:
                refused.append(self._refusal(execution, strategy, self._longest))
        return homes, refused

    def _beside(self, execution: Execution, home: Strategy, others: Sequence[Strategy] = ()) -> int | None:
        """The budget of an execution beside a home, and other strategies, None where it is of no use."""
        capacity = self._models.under(home).memory.capacity(execution, home, others)
        return self._cap(capacity) if capacity >= _SHORTEST_CUT else None

    def _refusal(self, execution: Execution, home: Strategy, length: int) -> Refusal:
        memory, least = self._models.under(home).memory, self._least(execution, home, length)
        held = memory.held(execution, home, least)
        return Refusal(
            execution=execution,
            kind=execution.strategy.kind(home),
            needed=held.total,
            limit=held.limit,
            reason=_over(held, memory.capacity(execution, home), least),
        )

    def _sized(self, groups: tuple[GroupChoice, ...]) -> tuple[GroupChoice, ...] | None:
        """The plan with the budgets that memory leaves it, as a whole; None where one cannot hold its longest sequence."""
        home = groups[-1].execution.strategy
        memory, sized = self._models.under(home).memory, []
        for index, choice in enumerate(groups):
            capacity = memory.capacity(choice.execution, home, others_of(groups, index))
            least = self._least(choice.execution, home, choice.max_length)
            if capacity < least:
                return None
            budget = self._cap(capacity) if self._beyond_longest else least
            sized.append(replace(choice, tokens_per_microbatch=budget))
        return tuple(sized)

    def _least(self, execution: Execution, home: Strategy, length: int) -> int:
        """Tokens of a micro-batch with one sequence of this length."""
        shape = self._models.under(home).shape
        return alignment_of(execution.strategy, sequence_parallel=shape.sequence_parallel).alone(length)

    def _cap(self, capacity: int) -> int:
        """A budget no larger than all that a step could put into one micro-batch."""
        most = max(int(self._sums.tokens[:, 0, -1].max()) * 2, self._longest * 2)
        return capacity if capacity <= most else min(capacity, max(1, most // 4096) * 4096)

    # -------------------------------------------------------------------------------------------------------- exact times

    def _seconds(self, groups: tuple[GroupChoice, ...]) -> float:
        return self._time(groups).total

    def _time(self, groups: tuple[GroupChoice, ...]) -> StepTime:
        if groups not in self._exact:
            run = RunModel(self._models.under(groups[-1].execution.strategy), groups)
            self._exact[groups] = mean_time([run.step(batch) for batch in self._batches])
        return self._exact[groups]

    def _statics(self, homes: Sequence[GroupChoice]) -> list[GroupChoice]:
        """Static runs by exact time, the best first: exactly timed by ascending estimate until estimates leave no hope."""
        estimated = []
        for choice in homes:
            whole = self._estimate(choice.execution, choice.tokens_per_microbatch, choice.execution.strategy)[0, -1]
            estimated.append((float(whole) + self._end_of_step(choice), choice.execution, choice))
        timed: list[GroupChoice] = []
        best = math.inf
        for estimate, _, choice in sorted(estimated, key=lambda entry: entry[:2]):
            if len(timed) >= _MOST_STATIC or estimate * _STATIC_SLACK > best:
                break
            timed.append(choice)
            best = min(best, self._seconds((choice,)))
        return sorted(timed, key=lambda choice: (self._seconds((choice,)), choice.execution))

    def _starts(self, statics: Sequence[GroupChoice], homes: Sequence[GroupChoice]) -> list[tuple[GroupChoice, ...]]:
        """Plans to improve on: the best by exact time of each of home's executions, and of those the best few."""
        found: dict[Execution, tuple[GroupChoice, ...]] = {}
        plans = [*self._finalists(homes), *((static,) for static in statics)]
        for plan in sorted(plans, key=self._seconds):
            found.setdefault(plan[-1].execution, plan)
        return list(found.values())[:_STARTS]

    def _refined(self, best: tuple[GroupChoice, ...]) -> tuple[GroupChoice, ...]:
        """Change one group at a time as long as that helps; a group more must be worth it, one less need not."""
        left = max(_LEAST_REFINED, _REFINED_SEQUENCES // _STARTS // sum(len(batch) for batch in self._batches))
        improved = True
        while improved:
            improved = False
            for changed in self._neighbours(best):
                other = self._sized(changed)
                if other is None:
                    continue
                if other not in self._exact:
                    if left == 0:
                        return best
                    left -= 1
                limit = self._seconds(best)
                if len(other) > len(best):
                    limit *= _WORTH_A_GROUP
                if self._seconds(other) < limit or (len(other) < len(best) and self._seconds(other) <= limit):
                    best, improved = other, True
                    break
        return best

    def _neighbours(self, groups: tuple[GroupChoice, ...]) -> Iterator[tuple[GroupChoice, ...]]:
        """Plans with one group left out, moved, run otherwise under home's layout, or added."""
        *others, home = groups
        siblings = self._siblings(home)
        for index, choice in enumerate(others):
            rest = (*others[:index], *others[index + 1 :])
            yield (*rest, home)
            for factor in _FINER:
                limit = round(choice.max_length * factor / _GRAIN) * _GRAIN
                if self._takes(choice, limit, home):
                    yield _in_order((*rest, replace(choice, max_length=limit)), home)
            for other in siblings:
                if other.execution != choice.execution and self._takes(other, choice.max_length, home):
                    yield _in_order((*rest, replace(other, max_length=choice.max_length)), home)
        for other in siblings:
            for cut in self._cuts[1:-1]:
                # Shorter ones would leave most of the room that this execution pays for unused.
                filled = not self._beyond_longest or cut * _LEAST_FILLED >= other.tokens_per_microbatch
                if filled and self._takes(other, cut, home):
                    yield _in_order((*others, replace(other, max_length=cut)), home)

    def _siblings(self, home: GroupChoice) -> list[GroupChoice]:
        """Executions on home's parameters with no more cp and recomputation than home needs for the longest sequences.

        A share of recomputation that was given to home says nothing of that need.
        """
        at, most = home.execution.strategy, home.execution.recompute if self._home_recompute is None else 1.0
        memory = self._models.under(at).memory
        return [
            replace(home, execution=each, tokens_per_microbatch=self._cap(memory.capacity(each, at)))
            for each in self._executions
            if each.layout == home.execution.layout
            and each != home.execution
            and each.strategy.cp <= at.cp
            and each.recompute <= most
        ]

    def _takes(self, choice: GroupChoice, limit: int, home: GroupChoice) -> bool:
        """Whether the group's budget holds a sequence of this length, which must be shorter than home's."""
        if not 0 < limit < self._longest:
            return False
        at, room = home.execution.strategy, choice.tokens_per_microbatch
        if not self._beyond_longest:  # the budget is what the group took so far, and grows with it
            room = self._models.under(at).memory.capacity(choice.execution, at)
        return self._least(choice.execution, at, limit) <= room

    # ---------------------------------------------------------------------------------------------------------- estimates

    def _estimate(self, execution: Execution, capacity: int, home: Strategy) -> _Estimates:
        """Mean over the batches of the time of each interval, infinite where its longest sequence does not fit."""
        model = self._models.under(home)
        key = execution, capacity, model.shape.sequence_parallel
        if key in self._estimates:
            return self._estimates[key]
        sums, strategy = self._sums, execution.strategy
        time = model.stage_time(execution)
        work = np.asarray(time.seconds(sums.tokens, sums.squares)) - time.fixed
        alone = np.asarray(time.seconds(sums.longest, sums.longest**2))
        most = np.maximum(1.0, np.ceil(sums.count / strategy.dp))
        room = np.minimum(max(capacity, 1), math.inf if self._beyond_longest else np.maximum(1, self._cuts))
        fewest = np.minimum(most, np.maximum(1.0, np.ceil(sums.tokens / (_FILLED * room) / strategy.dp)))
        if strategy.pp == 1:
            found = np.maximum(work / strategy.dp + time.fixed * fewest, alone)
        else:
            found = np.full_like(work, math.inf)
            for factor in (1, 2, 4):
                count = np.minimum(most, fewest * factor)
                # All are padded to the longest sequence's tokens at least; only one of them has its square.
                tokens = np.maximum(sums.tokens / (strategy.dp * count), sums.longest)
                slot = np.asarray(time.seconds(tokens, sums.squares / (strategy.dp * count)))
                found = np.minimum(found, count * slot + (strategy.pp - 1) / strategy.vpp * np.maximum(slot, alone))
        mean: _Estimates = np.where(sums.count > 0, found, 0.0).mean(axis=0)
        fits = np.array([self._least(execution, home, cut) <= capacity if cut else True for cut in self._cuts])
        mean = np.where(fits[None, :], mean, math.inf)
        mean[np.tril_indices(len(self._cuts))] = math.inf
        self._estimates[key] = mean
        return mean

    def _end_of_step(self, home: GroupChoice) -> float:
        """Reduction and optimizer, hiding behind a full micro-batch."""
        strategy = home.execution.strategy
        model = self._models.under(strategy)
        tokens = min(float(home.tokens_per_microbatch), float(self._sums.tokens[:, 0, -1].mean()) / strategy.dp)
        last = float(model.stage_time(home.execution).seconds(tokens, 0.0))
        return model.home_reduction(strategy, last=last) + model.optimizer_seconds(strategy)

    # -------------------------------------------------------------------------------------------------- dynamic programme

    def _finalists(self, homes: Sequence[GroupChoice]) -> Iterator[tuple[GroupChoice, ...]]:
        """The best plans by estimate whose moves are real, one or two per home's layout."""
        by_layout: dict[_Layout, list[GroupChoice]] = {}
        for choice in homes:
            by_layout.setdefault(choice.execution.layout, []).append(choice)
        programmes = {
            (layout, guests): _Programme(self, of, guests=guests)
            for layout, of in by_layout.items()
            for guests in (False, True)
        }
        waiting = {key: programme.solve() for key, programme in programmes.items()}
        best, found, rerun = math.inf, 0, 0
        while waiting and found < _FINALISTS:
            key = min(waiting, key=lambda each: (waiting[each].seconds, each))
            solution = waiting.pop(key)
            if solution.seconds > best * _WORTH_A_LOOK:
                return
            if not solution.intervals:
                continue
            if rerun < _MOST_REAL_MOVES and programmes[key].make_real(solution):
                rerun += 1
                waiting[key] = programmes[key].solve()
                continue
            groups = programmes[key].groups(solution)
            plan = self._sized(groups)
            if plan is not None:
                best, found = min(best, solution.seconds), found + 1
                yield plan
            elif rerun < _MOST_REAL_MOVES and programmes[key].make_room(solution):
                rerun += 1
                waiting[key] = programmes[key].solve()
            else:
                yield from self._fewer(groups)

    def _fewer(self, groups: tuple[GroupChoice, ...]) -> list[tuple[GroupChoice, ...]]:
        """What is left of a plan that does not fit: with as few groups left out as need be, in every way that then fits."""
        *others, home = groups
        for size in range(len(others) - 1, 0, -1):
            kept = (self._sized((*some, home)) for some in itertools.combinations(others, size))
            if fitting := [plan for plan in kept if plan is not None]:
                return fitting
        return []


class _Solution(NamedTuple):
    seconds: float
    intervals: tuple[_Interval, ...]


class _Programme:
    """The best length groups around one layout of home, by estimates.

    Costs depend on what came before only through the guest that ran last, out of which the next one may be made. Moves
    count as free until ``make_real`` has planned them, so a solution whose moves are all real is the best there is. Budgets
    are those of a strategy alone beside home, until ``make_room`` has found that they are too much together.
    """

    def __init__(self, search: _Search, homes: Sequence[GroupChoice], *, guests: bool) -> None:
        self._search, self._homes = search, homes
        self._home = homes[0].execution.strategy
        own = homes[0].execution.layout
        self._layouts = search._layouts if guests else [own]
        self._own = self._layouts.index(own)
        self._model = search._models.under(self._home)
        self._others: frozenset[Strategy] = frozenset()
        self._fill()
        count = len(self._layouts)
        # Before: each layout's guest, and (last) none. Not known yet: free.
        self._switch = np.zeros((count + 1, count))
        self._fold = np.zeros(count)
        self._known: set[tuple[int, int]] = set()

    def _fill(self) -> None:
        """The least time of each interval in each layout, and who takes it, in the memory that is left."""
        search = self._search
        size = len(search._cuts)
        self._values = np.full((len(self._layouts), size, size), math.inf)
        self._chosen = np.zeros((len(self._layouts), size, size), np.int64)
        self._capacity: dict[Execution, int] = {}
        for number, execution in enumerate(search._executions):
            if execution.layout not in self._layouts:
                continue
            others = sorted(self._others - {execution.strategy})
            capacity = search._beside(execution, self._home, others)
            if capacity is None:
                continue
            self._capacity[execution] = capacity
            place = self._layouts.index(execution.layout)
            estimate = search._estimate(execution, capacity, self._home)
            better = estimate < self._values[place]
            self._values[place][better] = estimate[better]
            self._chosen[place][better] = number
        for place, layout in enumerate(self._layouts):
            if place != self._own:
                self._values[place] += self._model.guest_reduction(self._strategy(layout))

    def solve(self) -> _Solution:
        cuts, count = len(self._search._cuts), len(self._layouts)
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
            return _Solution(math.inf, ())
        intervals: list[_Interval] = []
        while state in back:
            first, guest, place = back[state]
            chosen = self._search._executions[int(self._chosen[place, first, state[0]])]
            intervals.append(_Interval(first, state[0], chosen))
            state = first, guest
        solution = _Solution(seconds, tuple(reversed(intervals)))
        return solution._replace(seconds=seconds + self._search._end_of_step(self._home_choice(solution)))

    def make_real(self, solution: _Solution) -> bool:
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

    def make_room(self, solution: _Solution) -> bool:
        """Keep free what the solution's strategies take together; False where that was so already, or leaves no home."""
        others = self._others | {interval.execution.strategy for interval in solution.intervals} - {self._home}
        if others == self._others:
            return False
        self._others = others
        self._homes = [
            choice
            for choice in self._homes
            if self._model.memory.capacity(choice.execution, choice.execution.strategy, sorted(others))
            >= self._search._least(choice.execution, choice.execution.strategy, choice.max_length)
        ]
        self._fill()
        return bool(self._homes)

    def groups(self, solution: _Solution) -> tuple[GroupChoice, ...]:
        """The solution as length groups, home last; neighbours with one execution become one."""
        home = self._home_choice(solution)
        choices = [
            GroupChoice(
                max_length=self._search._cuts[interval.last],
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

    def _home_choice(self, solution: _Solution) -> GroupChoice:
        """Home runs the longest sequences, or keeps the parameters where a guest or nobody can do that faster."""
        last = solution.intervals[-1].execution if solution.intervals else None
        for choice in self._homes:
            if choice.execution == last:
                return choice
        return self._homes[0]

    def _strategy(self, layout: _Layout) -> Strategy:
        tp, pp, vpp = layout
        return Strategy.from_world(self._search._models.world_size, tp=tp, cp=1, pp=pp, vpp=vpp)


def others_of(groups: Sequence[GroupChoice], index: int) -> list[Strategy]:
    """Strategies of a plan's groups beside this one, home's aside: what ``memory_model`` has to know of the rest of a plan."""
    return [choice.execution.strategy for at, choice in enumerate(groups[:-1]) if at != index]


def _in_order(others: Sequence[GroupChoice], home: GroupChoice) -> tuple[GroupChoice, ...]:
    """Short to long, home last; of groups that end at one length the first alone."""
    ends: dict[int, GroupChoice] = {}
    for choice in others:
        ends.setdefault(choice.max_length, choice)
    return (*(ends[end] for end in sorted(ends)), home)


def cut_points(longest: int) -> tuple[int, ...]:
    """Lengths at which groups may end, after 0: 512 times powers of two, the middles from 2048 on, and the longest."""
    found = {0, longest}
    size = _SHORTEST_CUT
    while size < longest:
        found |= {size, size * 3 // 2} if size >= 4 * _SHORTEST_CUT else {size}
        size *= 2
    return tuple(sorted(cut for cut in found if cut <= longest))


def _over(held: Held, capacity: int, least: int) -> str:
    parts = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "home's": held.home_resident,
        "activations": held.activations,
        "communicators": held.communicators,
        "transfers": held.transfers,
    }
    taken = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    whole = f"{held.total / GIB:.1f} GiB ({taken}) of {held.limit / GIB:.1f}"
    return f"{least:,} tokens take {whole}; at most {capacity:,} tokens fit"
