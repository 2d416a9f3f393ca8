"""Chooses thresholds, strategies and home for a distribution of lengths: what ``hotspa plan`` writes down.

A dynamic programme (``programme``) finds plans by closed-form estimates (``group_estimates``). The best of them, and the best
static ones packed alike, are then planned and timed step by step, so the answer is never slower than static on the steps
looked at.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hotspa_megatron.planning.execution import RECOMPUTE_SHARES, Execution, legal_executions
from hotspa_megatron.planning.group_estimates import SHORTEST_CUT, GroupEstimates, Models
from hotspa_megatron.planning.hardware import Hardware
from hotspa_megatron.planning.lengths import LengthHistogram, Lengths
from hotspa_megatron.planning.memory_model import ADAM_BYTES, GIB, Held
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.planning.programme import Layout, Programme
from hotspa_megatron.planning.step_time import GroupChoice, RunModel, StepTime, mean_time
from hotspa_megatron.strategy import Kind, Strategy

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
_FINER: Final = (0.84, 1.19, 0.92, 1.09, 0.71, 1.41)
"""Factors by which a threshold is moved: about a half, a quarter and a whole step between cut points."""


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
        self._models, self._batches, self._executions = models, batches, executions
        self._home, self._home_recompute = home, home_recompute
        self.estimates = GroupEstimates(models, batches, executions, beyond_longest=beyond_longest)
        self._exact: dict[tuple[GroupChoice, ...], StepTime] = {}

    def run(self) -> PlannedRun:
        homes, refused = self._homes()
        if not homes:
            closest = min(refused, key=lambda refusal: refusal.needed) if refused else None
            why = f"the nearest is {closest.execution}: {closest.reason}" if closest else "no strategy is legal"
            raise ValueError(f"no strategy holds sequences of {self.estimates.longest} tokens on this hardware; {why}")
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
            if execution.strategy != home and self.estimates.beside(execution, home) is None:
                beside.append(self._refusal(execution, home, SHORTEST_CUT))
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
            alone = GroupChoice(max_length=self.estimates.longest, execution=execution, tokens_per_microbatch=0)
            if sized := self._sized((alone,)):
                homes += sized
            else:
                refused.append(self._refusal(execution, strategy, self.estimates.longest))
        return homes, refused

    def _refusal(self, execution: Execution, home: Strategy, length: int) -> Refusal:
        memory, least = self._models.under(home).memory, self.estimates.least(execution, home, length)
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
            least = self.estimates.least(choice.execution, home, choice.max_length)
            if capacity < least:
                return None
            budget = self.estimates.cap(capacity) if self.estimates.beyond_longest else least
            sized.append(replace(choice, tokens_per_microbatch=budget))
        return tuple(sized)

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
            execution, room = choice.execution, choice.tokens_per_microbatch
            whole = float(self.estimates.seconds(execution, room, execution.strategy)[0, -1])
            estimated.append((whole + self.estimates.end_of_step(choice), execution, choice))
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
            for cut in self.estimates.cuts[1:-1]:
                # Shorter ones would leave most of the room that this execution pays for unused.
                filled = not self.estimates.beyond_longest or cut * _LEAST_FILLED >= other.tokens_per_microbatch
                if filled and self._takes(other, cut, home):
                    yield _in_order((*others, replace(other, max_length=cut)), home)

    def _siblings(self, home: GroupChoice) -> list[GroupChoice]:
        """Executions on home's parameters with no more cp and recomputation than home needs for the longest sequences.

        A share of recomputation that was given to home says nothing of that need.
        """
        at, most = home.execution.strategy, home.execution.recompute if self._home_recompute is None else 1.0
        memory = self._models.under(at).memory
        return [
            replace(home, execution=each, tokens_per_microbatch=self.estimates.cap(memory.capacity(each, at)))
            for each in self._executions
            if each.layout == home.execution.layout
            and each != home.execution
            and each.strategy.cp <= at.cp
            and each.recompute <= most
        ]

    def _takes(self, choice: GroupChoice, limit: int, home: GroupChoice) -> bool:
        """Whether the group's budget holds a sequence of this length, which must be shorter than home's."""
        if not 0 < limit < self.estimates.longest:
            return False
        at, room = home.execution.strategy, choice.tokens_per_microbatch
        if not self.estimates.beyond_longest:  # the budget is what the group took so far, and grows with it
            room = self._models.under(at).memory.capacity(choice.execution, at)
        return self.estimates.least(choice.execution, at, limit) <= room

    # -------------------------------------------------------------------------------------------------- dynamic programme

    def _finalists(self, homes: Sequence[GroupChoice]) -> Iterator[tuple[GroupChoice, ...]]:
        """The best plans by estimate whose moves are real, one or two per home's layout."""
        by_layout: dict[Layout, list[GroupChoice]] = {}
        for choice in homes:
            by_layout.setdefault(choice.execution.layout, []).append(choice)
        programmes = {
            (layout, guests): Programme(self.estimates, of, guests=guests)
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


def others_of(groups: Sequence[GroupChoice], index: int) -> list[Strategy]:
    """Strategies of a plan's groups beside this one, home's aside: what ``memory_model`` has to know of the rest of a plan."""
    return [choice.execution.strategy for at, choice in enumerate(groups[:-1]) if at != index]


def _in_order(others: Sequence[GroupChoice], home: GroupChoice) -> tuple[GroupChoice, ...]:
    """Short to long, home last; of groups that end at one length the first alone."""
    ends: dict[int, GroupChoice] = {}
    for choice in others:
        ends.setdefault(choice.max_length, choice)
    return (*(ends[end] for end in sorted(ends)), home)


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
