"""The plan of one step: which strategy runs which sequences, in which order, in whose micro-batches.

A pure function of the mini-batch's lengths, the resolved configuration and the costs: every rank computes it alone and
gets the same, which ``StepPlan.digest`` lets ranks compare. It never looks at a clock, a tensor or another rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotspa_megatron.config import ResolvedConfig
from hotspa_megatron.planning.alignment import Alignment
from hotspa_megatron.planning.execution import Recompute
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.planning.packing import MicroBatches, as_lengths, pack
from hotspa_megatron.planning.param_layout import gpt_parameters
from hotspa_megatron.planning.reshard_plan import ReshardPlan
from hotspa_megatron.planning.topology import LinkClass
from hotspa_megatron.strategy import Kind, Strategy

_SHARE: Final = 2**20
"""Whole steps in which shares of a micro-batch are added up: sums that do not depend on the order."""
_ORDERED: Final = 10
"""Length groups under guests up to which the best order of each choice of them is worked out, once; more run short to long."""


@dataclass(frozen=True, kw_only=True)
class LengthGroup:
    """Where sequences with length in (longer group's lower bound, ``max_length``] run. Lengths and budget in tokens.

    ``multiple_of``: the number of micro-batches of every rank is a multiple of it, as interleaved schedules need.
    ``recompute``: what the strategy's backward passes compute anew; None: what the command line says.
    """

    strategy: Strategy
    kind: Kind
    max_length: int
    tokens_per_microbatch: int
    alignment: Alignment
    multiple_of: int = 1
    recompute: Recompute | None = None


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One length group, or several that were merged, under one strategy inside a step.

    ``group`` is the strategy's position in the planner's groups. ``micro_batches[dp]`` lists the micro-batches of
    data-parallel rank ``dp`` as indices into the step's sequences; a rank may have none.
    """

    group: int
    strategy: Strategy
    kind: Kind
    micro_batches: tuple[MicroBatches, ...]

    @property
    def sequences(self) -> int:
        return sum(len(batch) for batches in self.micro_batches for batch in batches)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The ordered segments of one step over the step's sequences (their lengths, in tokens)."""

    lengths: tuple[int, ...]
    segments: tuple[Segment, ...]

    def digest(self) -> int:
        """A 63-bit fingerprint: equal plans have equal fingerprints in any process, on any machine."""
        numbers = [len(self.lengths), len(self.segments)]
        for segment in self.segments:
            at = segment.strategy
            numbers += (segment.group, at.tp, at.cp, at.pp, at.dp, at.vpp, len(segment.micro_batches))
            for batches in segment.micro_batches:
                numbers.append(len(batches))
                for batch in batches:
                    numbers.append(len(batch))
                    numbers += batch
        # Every list goes in with its length, so that no two plans give the same numbers.
        numbers += self.lengths
        return int.from_bytes(hashlib.sha256(np.array(numbers, "<i8").tobytes()).digest()[:8], "big") >> 1


# ---------------------------------------------------------------------------------------------------------------- costs


@dataclass(frozen=True, kw_only=True)
class MicroBatchTime:
    """Time of a micro-batch on one pipeline stage: ``fixed + per_token * tokens + per_square * sum of length ** 2``.

    Tokens are counted over all context-parallel ranks, padding included. In seconds where plans are to be compared with
    switches; in any unit where sequences are only to be balanced against each other.
    """

    per_token: float
    per_square: float = 0.0
    fixed: float = 0.0

    @classmethod
    def relative(cls, shape: ModelShape) -> MicroBatchTime:
        """Floating-point operations of the whole model, forward and backward, with nothing fixed.

        6 per token and weight of a matrix (2 forward, 4 backward), the output layer included and the embedding lookup not;
        6 per squared token and channel of causal attention (2 matrices of length ** 2 / 2, 2 forward, 4 backward).
        """
        matrices = sum(
            math.prod(p.shape) for p in gpt_parameters(shape) if len(p.shape) == 2 and p.place != "embedding"
        )
        if shape.tied_embeddings:
            matrices += shape.padded_vocab_size * shape.hidden_size
        channels = shape.num_attention_heads * shape.kv_channels
        return cls(per_token=6.0 * matrices, per_square=6.0 * shape.num_layers * channels)

    @classmethod
    def estimated(
        cls,
        shape: ModelShape,
        strategy: Strategy,
        *,
        flops_per_second: float,
        bytes_per_second: float,
        seconds_per_layer: float,
    ) -> MicroBatchTime:
        """Seconds under a strategy, from three numbers of the hardware and nothing measured on it.

        The operations of ``relative`` at ``flops_per_second`` (what one device sustains), divided over the replica's
        devices; what tensor parallelism with sequence parallelism moves, 16 * hidden * (tp - 1) / tp bytes per token and
        layer in 16-bit formats (4 all-gathers, 4 reduce-scatters and nothing recomputed), and context parallelism by
        all-to-all, 16 * hidden / (tp * cp) * (cp - 1) / cp, both at ``bytes_per_second`` of one device; and
        ``seconds_per_layer`` of launches and gaps for each of the stage's layers, per micro-batch.
        """
        work, layers = cls.relative(shape), shape.num_layers / strategy.pp
        share = strategy.replica_size * flops_per_second
        tensor = 16.0 * shape.hidden_size * (strategy.tp - 1) / strategy.tp / strategy.cp
        context = 16.0 * shape.hidden_size / (strategy.tp * strategy.cp) * (strategy.cp - 1) / strategy.cp
        return cls(
            per_token=work.per_token / share + (tensor + context) * layers / bytes_per_second,
            per_square=work.per_square / share,
            fixed=seconds_per_layer * layers,
        )


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Seconds that moving parameters and gradients takes, as far as nothing hides it.

    ``switches[before, guest]``: materialise the guest while another guest, or (None) home alone, is valid.
    ``folds[guest]``: bring its gradients home.
    """

    switches: Mapping[tuple[Strategy | None, Strategy], float]
    folds: Mapping[Strategy, float]

    @classmethod
    def of_plans(
        cls,
        *,
        switches: Mapping[tuple[Strategy | None, Strategy], ReshardPlan],
        folds: Mapping[Strategy, ReshardPlan],
    ) -> Moves:
        """From the reshard plans that will be carried out, over the links of their topology."""
        return cls(
            switches={pair: reshard_seconds(plan) for pair, plan in switches.items()},
            folds={guest: reshard_seconds(plan) for guest, plan in folds.items()},
        )

    def switch(self, before: Strategy | None, guest: Strategy) -> float:
        """Seconds to materialise ``guest``; nothing where it is there already."""
        return 0.0 if before == guest else self.switches[before, guest]


def reshard_seconds(plan: ReshardPlan) -> float:
    """Time of a plan's messages: of each phase the busiest rank's within nodes or network card's between, either way."""
    topology, seconds = plan.topology, 0.0
    for _, messages in itertools.groupby(plan.messages, key=lambda message: message.phase):
        # (link, sending, rank or card): bytes and messages.
        loads: dict[tuple[LinkClass, bool, int], tuple[int, int]] = {}
        for _, sender, receiver, num_bytes in messages:
            link = topology.link(sender, receiver)
            for rank in (sender, receiver):
                place = topology.card_of(rank) if link is LinkClass.INTER_NODE else rank
                end = (link, rank == sender, place)
                moved, count = loads.get(end, (0, 0))
                loads[end] = (moved + num_bytes, count + 1)
        seconds += max(topology.of(end[0]).seconds(moved, messages=count) for end, (moved, count) in loads.items())
    return seconds


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What the planner knows about time; equal on every rank, or ranks plan different steps.

    ``times``: of each length group, short to long, as two of one strategy may differ in what they recompute; empty:
    ``other_times`` for all. Without ``moves`` nothing is merged and guests run short to long: times then only balance
    micro-batches.
    """

    times: tuple[MicroBatchTime, ...] = ()
    other_times: MicroBatchTime = MicroBatchTime(per_token=1.0)
    moves: Moves | None = None

    def time(self, group: int) -> MicroBatchTime:
        return self.times[group] if self.times else self.other_times


# -------------------------------------------------------------------------------------------------------------- planner


class _Range(NamedTuple):
    """Sums over the sequences that a group would run.

    ``tokens`` are padded. ``shares`` adds up, over the sequences, the part of a micro-batch's room that each takes where
    all in it are as long as itself: about how many micro-batches they fill.
    """

    sequences: int
    tokens: int
    squares: float
    shares: float
    longest: int


class StepPlanner:
    """Plans steps over fixed length groups, given short to long with home last. Holds nothing that changes.

    With ``costs.moves``, guests are ordered so that switches take least. ``merge`` False: every group with sequences runs
    under its own strategy, whatever that costs. Otherwise sequences of a length group join the next longer group in use
    where that is cheaper over the whole step. Choices are searched by estimates; what comes of it is
    packed and compared with the groups as given, with home alone (the static run), and with the best single strategies
    that take the step's own longest sequence, so that a plan is never modelled slower than those.
    """

    def __init__(self, groups: Sequence[LengthGroup], costs: StepCosts | None = None, *, merge: bool = True) -> None:
        if not groups or groups[-1].kind is not Kind.HOME:
            raise ValueError("the last length group must be home's")
        self.groups = tuple(groups)
        self.costs = costs if costs is not None else StepCosts()
        if len(self.costs.times) not in (0, len(groups)):
            raise ValueError(f"costs name {len(self.costs.times)} times for {len(groups)} length groups")
        self.merge = merge and self.costs.moves is not None
        self._max_lengths = np.array([group.max_length for group in groups], np.int64)
        for shorter, longer in itertools.pairwise(groups):
            if shorter.max_length > longer.max_length:
                raise ValueError(f"max_length {longer.max_length} comes after {shorter.max_length}; list short to long")
        for group in groups:
            if group.alignment.alone(group.max_length) > group.tokens_per_microbatch:
                raise ValueError(
                    f"{group.strategy}: tokens_per_microbatch {group.tokens_per_microbatch} cannot hold one sequence of "
                    f"max_length {group.max_length}, which takes {group.alignment.alone(group.max_length)} tokens"
                )
        self._guest_orders: dict[tuple[int, ...], tuple[int, ...]] = {}
        if self.costs.moves is not None:
            guests = {at: group.strategy for at, group in enumerate(groups) if group.kind is Kind.GUEST}
            _check_moves(self.costs.moves, list(guests.values()))
            if len(guests) <= _ORDERED:
                self._guest_orders = _best_orders(guests, self.costs.moves)

    @classmethod
    def from_resolved(
        cls, resolved: ResolvedConfig, costs: StepCosts | None = None, *, merge: bool = True
    ) -> StepPlanner:
        """The planner of a resolved configuration."""
        return cls(
            [
                LengthGroup(
                    strategy=each.strategy,
                    kind=each.kind,
                    max_length=each.max_length,
                    tokens_per_microbatch=each.tokens_per_microbatch,
                    alignment=each.alignment,
                    multiple_of=each.strategy.pp if each.strategy.vpp > 1 else 1,
                    recompute=each.recompute,
                )
                for each in (*resolved.strategies, resolved.home)
            ],
            StepCosts(other_times=MicroBatchTime.relative(resolved.shape)) if costs is None else costs,
            merge=merge,
        )

    def in_home(self) -> StepPlanner:
        """The planner of the static run: home takes every sequence."""
        costs = dataclasses.replace(self.costs, times=self.costs.times[-1:])
        return StepPlanner(self.groups[-1:], costs, merge=False)

    def plan(self, lengths: Sequence[int] | NDArray[np.integer]) -> StepPlan:
        """Plan a step for sequences of these lengths (tokens, each at least 1); a group without sequences gets no segment.

        Raises ValueError for a sequence longer than home's max_length.
        """
        whole = as_lengths(lengths)
        own = np.searchsorted(self._max_lengths, whole)
        for index in np.flatnonzero((own == len(self.groups)) | (whole < 1))[:1].tolist():
            length = int(whole[index])
            if length < 1:
                raise ValueError(f"sequence {index} has length {length}; a sequence has at least one token")
            raise ValueError(f"sequence {index} has {length} tokens, more than home's {self.groups[-1].max_length}")
        if not len(whole):
            return StepPlan(lengths=(), segments=())
        step = _Step(self, whole, own)
        best = min(step.candidates(), key=step.seconds)
        return StepPlan(lengths=tuple(whole.tolist()), segments=step.segments(best))

    def seconds(self, plan: StepPlan) -> float:
        """The modelled time of a plan's segments and moves, in the unit of ``costs``; without ``moves`` they take none."""
        whole = np.array(plan.lengths, np.int64)
        work = sum(self._segment_seconds(segment, whole) for segment in plan.segments)
        return work + self._moving([segment.group for segment in plan.segments])

    def busy(self, segment: Segment, lengths: NDArray[np.int64]) -> list[float]:
        """Each replica's time, in the unit of ``costs``; a pipeline fills with its longest micro-batch, as all are padded to."""
        group = self.groups[segment.group]
        time, stages = self.costs.time(segment.group), group.strategy.pp
        found = []
        for batches in segment.micro_batches:
            real = [batch for batch in batches if batch]
            if not real:
                found.append(0.0)
                continue
            members = np.array([index for batch in real for index in batch], np.int64)
            starts = np.cumsum([0, *(len(batch) for batch in real)])[:-1]
            padded = -(-lengths[members] // group.alignment.sequence) * group.alignment.sequence
            tokens = -(-np.add.reduceat(padded, starts) // group.alignment.total) * group.alignment.total
            if stages > 1:
                tokens[:] = tokens.max()
            squares = np.add.reduceat(lengths[members].astype(np.float64) ** 2, starts)
            times = time.fixed + time.per_token * tokens + time.per_square * squares
            fillers = (len(batches) - len(real)) * (time.fixed + time.per_token * int(tokens.max()))
            # fsum: the same on machines whose numpy adds in another order.
            fill = (stages - 1) * float(times.max()) / group.strategy.vpp
            found.append(math.fsum(times.tolist()) + fill + fillers)
        return found

    def computed_tokens(self, segment: Segment, lengths: Sequence[int]) -> int:
        """Tokens that a segment computes over, padding included; micro-batches of a pipeline are all as long as the longest."""
        alignment, computed = self.groups[segment.group].alignment, 0
        for batches in segment.micro_batches:
            totals = [alignment.micro_batch(lengths[index] for index in batch) for batch in batches]
            computed += max(totals, default=0) * len(totals) if segment.strategy.pp > 1 else sum(totals)
        return computed

    def _segment_seconds(self, segment: Segment, lengths: NDArray[np.int64]) -> float:
        return max(self.busy(segment, lengths))

    def _moving(self, order: Sequence[int]) -> float:
        """Seconds of the switches and folds of segments run in this order of groups."""
        moves, total = self.costs.moves, 0.0
        if moves is None:
            return total
        before: Strategy | None = None
        for position in order:
            if self.groups[position].kind is Kind.GUEST:
                guest = self.groups[position].strategy
                total += moves.switch(before, guest) + moves.folds[guest]
                before = guest
        return total

    def _in_order(self, used: Sequence[int]) -> tuple[int, ...]:
        """Groups as they run: guests so that switches take least, then siblings, both short to long, then home.

        Home's own layout, and with it home's gradients, comes last; and the last hop to it moves nothing.
        """
        guests = tuple(position for position in used if self.groups[position].kind is Kind.GUEST)
        others = tuple(position for position in used if self.groups[position].kind is not Kind.GUEST)
        return (*self._guest_orders.get(guests, guests), *others)


def _check_moves(moves: Moves, guests: Sequence[Strategy]) -> None:
    for guest in guests:
        for before in (None, *guests):
            if before != guest and (before, guest) not in moves.switches:
                raise ValueError(f"costs name no switch from {before or 'home'} to {guest}")
        if guest not in moves.folds:
            raise ValueError(f"costs name no fold from {guest}")


def _best_orders(guests: Mapping[int, Strategy], moves: Moves) -> dict[tuple[int, ...], tuple[int, ...]]:
    """For every choice of the guests' positions, ascending, the order whose switches take least; of equal ones the first."""
    # By choice and last guest: the time of the best order and that order (Held and Karp's recursion).
    best: dict[tuple[int, ...], dict[int, tuple[float, tuple[int, ...]]]] = {}
    for count in range(1, len(guests) + 1):
        for choice in itertools.combinations(guests, count):
            best[choice] = {}
            for last in choice:
                before = best.get(tuple(position for position in choice if position != last), {})
                best[choice][last] = min(
                    (
                        (spent + moves.switch(guests[order[-1]], guests[last]), (*order, last))
                        for spent, order in before.values()
                    ),
                    default=(moves.switch(None, guests[last]), (last,)),
                )
    return {choice: min(ways.values())[1] for choice, ways in best.items()}


class _Step:
    """One step while it is planned: the choices of which groups run, and what each choice would take.

    A choice is the ascending positions of the groups in use; every sequence runs under the shortest of them that takes it.
    """

    def __init__(self, planner: StepPlanner, lengths: NDArray[np.int64], own: NDArray[np.int64]) -> None:
        self._planner, self._lengths, self._own = planner, lengths, own
        self._with_work = np.flatnonzero(np.bincount(own, minlength=len(planner.groups))).tolist()
        self._segments: dict[tuple[int, int], Segment] = {}
        self._ranges: dict[tuple[int, int], _Range] = {}

    def candidates(self) -> list[tuple[int, ...]]:
        """Choices worth packing: the groups as given; to merge also every single strategy, and by estimate the best merge."""
        as_given = tuple(self._with_work)
        if not self._planner.merge:
            return [as_given]
        singles = [(position,) for position in range(self._with_work[-1], len(self._planner.groups))]
        return list(dict.fromkeys([as_given, self._best_merge(), *singles]))

    def seconds(self, used: tuple[int, ...]) -> float:
        if not self._planner.merge:
            return 0.0  # there is only one candidate
        work = sum(self._planner._segment_seconds(segment, self._lengths) for segment in self.segments(used))
        return work + self._planner._moving(self._planner._in_order(used))

    def segments(self, used: tuple[int, ...]) -> tuple[Segment, ...]:
        lower = dict(zip(used, (-1, *used), strict=False))
        return tuple(self._segment(lower[position], position) for position in self._planner._in_order(used))

    def _segment(self, after: int, position: int) -> Segment:
        """The sequences of the groups behind ``after`` up to ``position``, under the latter's strategy."""
        if (after, position) not in self._segments:
            group, time = self._planner.groups[position], self._time(position)
            members = np.flatnonzero((self._own > after) & (self._own <= position))
            room = group.tokens_per_microbatch // group.alignment.total * group.alignment.total

            def cost(length: int) -> float:
                padded = group.alignment.pad_sequence(length)
                # A micro-batch's fixed time is shared by as many sequences of this length as it holds.
                return time.per_token * padded + time.per_square * length**2 + time.fixed / (room // padded)

            packed = pack(
                self._lengths[members],
                budget=group.tokens_per_microbatch,
                dp=group.strategy.dp,
                alignment=group.alignment,
                cost=cost,
                multiple_of=group.multiple_of,
                at_least=self._micro_batches(position, self._range(after, position)),
                equal_shapes=group.strategy.pp > 1,
            )
            index = members.tolist()
            self._segments[after, position] = Segment(
                group=position,
                strategy=group.strategy,
                kind=group.kind,
                micro_batches=tuple(
                    tuple(tuple(index[item] for item in batch) for batch in batches) for batches in packed
                ),
            )
        return self._segments[after, position]

    # ------------------------------------------------------------------------------------------------------ estimation

    def _time(self, position: int) -> MicroBatchTime:
        return self._planner.costs.time(position)

    def _range(self, after: int, position: int) -> _Range:
        if (after, position) not in self._ranges:
            own = self._lengths[(self._own > after) & (self._own <= position)]
            group = self._planner.groups[position]
            padded = -(-own // group.alignment.sequence) * group.alignment.sequence
            self._ranges[after, position] = _Range(
                sequences=len(own),
                tokens=int(padded.sum()),
                squares=float((own.astype(np.float64) ** 2).sum()),
                shares=int((_SHARE // (group.tokens_per_microbatch // padded)).sum()) / _SHARE,
                longest=int(own.max(initial=0)),
            )
        return self._ranges[after, position]

    def _micro_batches(self, position: int, of: _Range) -> int:
        """How many micro-batches a replica of a pipeline should have at least: the fill costs less with more of them.

        With ``fill = (pp - 1) / vpp``, ``(m + fill) * (busy / m + fixed)`` is least at ``m = sqrt(fill * busy / fixed)``.
        But each is padded to the longest, which is no shorter than the longest sequence. Where no fixed time is known,
        the budget alone decides.
        """
        group, time = self._planner.groups[position], self._time(position)
        replicas, stages, fill = group.strategy.dp, group.strategy.pp, (group.strategy.pp - 1) / group.strategy.vpp
        if stages == 1 or time.fixed <= 0:
            return 1
        busy = (time.per_token * of.tokens + time.per_square * of.squares) / replicas
        as_long = of.tokens // (replicas * group.alignment.alone(of.longest))
        return max(1, min(round(math.sqrt(fill * busy / time.fixed)), as_long))

    def _estimated_segment(self, after: int, position: int) -> float:
        """Time of the busiest replica, from the bound that packing comes close to: the mean, or the longest sequence."""
        of = self._range(after, position)
        if not of.sequences:
            return 0.0
        group, time = self._planner.groups[position], self._time(position)
        replicas, stages, fill = group.strategy.dp, group.strategy.pp, (group.strategy.pp - 1) / group.strategy.vpp
        count = max(self._micro_batches(position, of), math.ceil(of.shares / replicas))
        count = -(-count // group.multiple_of) * group.multiple_of
        alone, alone_squared = group.alignment.alone(of.longest), float(of.longest) ** 2
        if stages == 1:
            mean = (time.per_token * of.tokens + time.per_square * of.squares) / replicas
            return max(mean, time.per_token * alone + time.per_square * alone_squared) + count * time.fixed
        slot = time.fixed + time.per_token * max(of.tokens / (replicas * count), alone)
        squares = max(of.squares / replicas, alone_squared) + fill * alone_squared
        return (count + fill) * slot + time.per_square * squares

    def _estimate(self, used: tuple[int, ...]) -> float:
        work = sum(self._estimated_segment(after, position) for after, position in itertools.pairwise((-1, *used)))
        return work + self._planner._moving(self._planner._in_order(used))

    def _best_merge(self) -> tuple[int, ...]:
        """The choice with the lowest estimate: exact over all choices, with guests in the order short to long.

        Built up group by group: the best way to have run everything up to a group depends on the last guest alone.
        """
        groups, moves = self._planner.groups, self._planner.costs.moves
        assert moves is not None
        nothing: dict[Strategy | None, tuple[float, tuple[int, ...]]] = {None: (0.0, ())}
        best = {-1: nothing}
        for position, group in enumerate(groups):
            here: dict[Strategy | None, tuple[float, tuple[int, ...]]] = {}
            for after in sorted(best):
                if not self._range(after, position).sequences:
                    continue
                work = self._estimated_segment(after, position)
                for guest, (spent, used) in best[after].items():
                    now, moving = guest, 0.0
                    if group.kind is Kind.GUEST:
                        now = group.strategy
                        moving = moves.switch(guest, now) + moves.folds[now]
                    way = (spent + work + moving, (*used, position))
                    here[now] = min(way, here.get(now, way))
            best[position] = here
        complete = range(self._with_work[-1], len(groups))
        return min(_ways(best[position] for position in complete))[1]


def _ways(
    best: Iterator[dict[Strategy | None, tuple[float, tuple[int, ...]]]],
) -> Iterator[tuple[float, tuple[int, ...]]]:
    for states in best:
        yield from states.values()
