"""Carries out the moves of a step: parameters from home to its guests (switches), their gradients back (folds).

A move is planned once per pair of layouts and then kept. A switch may begin beside the segment before it; a fold begins when
its guest is done, and is added after home's own gradients are finished. ``forward_backward`` says when; nothing here decides
what a step runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from hotspa_megatron.config import SwitchConfig
from hotspa_megatron.hooks.model import Guest, LogicalModel, check_against, local_tensors, owned_gradients
from hotspa_megatron.hooks.timeline import Timeline, Voyage
from hotspa_megatron.planning.reshard_plan import ReshardPlan, plan_reshard
from hotspa_megatron.planning.step_plan import Segment
from hotspa_megatron.planning.topology import Topology
from hotspa_megatron.runtime.executor import PendingReshard, Reshard
from hotspa_megatron.runtime.transport import Transport
from hotspa_megatron.runtime.watchdog import Progress
from hotspa_megatron.strategy import Kind, Strategy


@dataclass(frozen=True)
class Move:
    """A switch or a fold as it was carried out. ``num_bytes`` and ``messages``: over all ranks; ``seconds``: this rank's."""

    source: str
    destination: str
    num_bytes: int
    messages: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.source} -> {self.destination}: {self.num_bytes / 2**20:.1f} MiB sent, {self.messages} messages, "
            f"{self.seconds * 1e3:.0f} ms"
        )


@dataclass(frozen=True)
class _Route:
    """A planned move: this rank's part, and its bytes and messages over all ranks."""

    reshard: Reshard
    num_bytes: int
    messages: int

    def move(self, source: Strategy, destination: Strategy, seconds: float) -> Move:
        return Move(str(source), str(destination), self.num_bytes, self.messages, seconds)

    def voyage(
        self, timeline: Timeline, kind: Literal["switch", "fold"], source: Strategy, destination: Strategy
    ) -> Voyage:
        return timeline.moving(kind, str(source), str(destination), size=self.num_bytes, messages=self.messages)


@dataclass(frozen=True)
class Fetch:
    """A guest's parameters under way to it, or its gradients from it. ``move``: what it has taken so far."""

    guest: Guest
    pending: PendingReshard
    move: Move
    voyage: Voyage


class Moves:
    """The moves between home's ``model`` and ``guests``. One per runner of steps; collective calls throughout.

    ``model`` is home's list of DDP-wrapped chunks. ``layout``: where home's parameters lie; ``parameters``: this rank's own,
    by the layout's index; ``owned``: where the gradients of a step end.
    """

    def __init__(
        self,
        *,
        home: Strategy,
        logical: LogicalModel,
        model: Sequence[Any],
        guests: Mapping[Strategy, Guest],
        transport: Transport,
        topology: Topology,
        switch: SwitchConfig,
        progress: Progress,
        log: Callable[[str], None],
    ) -> None:
        self._home, self.guests = home, guests
        self._transport, self._topology, self._switching = transport, topology, switch
        self._progress, self._log = progress, log
        self._rank = dist.get_rank()
        self.layout = logical.layout(home, logical.home_layers)
        self.parameters = local_tensors(model, logical)
        check_against(self.layout, self.parameters, self._rank)
        self.owned = owned_gradients(model, self.layout, self.parameters)
        self._switches: dict[tuple[Strategy | None, Strategy], _Route] = {}
        self._folds: dict[Strategy, _Route] = {}
        self._fetch: Fetch | None = None
        self._mid_switch = False
        self._timeline = Timeline(progress)
        self._fits: dict[tuple[Strategy, Strategy], bool | None] = {}
        self._parameter_dtype = _single_dtype("parameters", (p.dtype for p in self.parameters.values()))
        main_grad = _single_dtype("gradients", (p.main_grad.dtype for p in self.parameters.values()))
        narrower = switch.fold_itemsize(main_grad.itemsize) < main_grad.itemsize
        self._fold_dtype = torch.bfloat16 if narrower else main_grad
        self._seen_switches: set[tuple[str, str]] = set()

    @property
    def fold_dtype(self) -> torch.dtype | None:
        """What guests' gradients travel home as; None without guests."""
        return self._fold_dtype if self.guests else None

    def begin_step(self, timeline: Timeline) -> None:
        """What moves from now on belongs to a step with this timeline."""
        self._timeline = timeline

    def end_step(self) -> None:
        """After a step nothing of a guest stays, after a failed one either. What still arrives there ends first.

        But for a switch that failed itself: its error keeps its messages alive, and peers may still write into parameters.
        """
        self._fetch = None
        for guest in self.guests.values():
            if not self._mid_switch:
                guest.release_parameters()
            guest.release_gradients()

    @contextlib.contextmanager
    def _switching_parameters(self) -> Iterator[None]:
        self._mid_switch = True
        yield
        self._mid_switch = False

    def switch(self, resident: Guest | None, guest: Guest) -> Move:
        """Complete the parameters of ``guest``, whether their move has begun or not, and give it its gradients."""
        fetch = self._fetch or self._begin_switch(resident, guest)
        assert fetch.guest is guest
        started = time.perf_counter()
        with fetch.voyage.waiting(), self._switching_parameters():
            guest.materialise()
            fetch.pending.finish()
        fetch.voyage.land()
        self._fetch = None
        move = dataclasses.replace(fetch.move, seconds=fetch.move.seconds + time.perf_counter() - started)
        if (move.source, move.destination) not in self._seen_switches:
            self._seen_switches.add((move.source, move.destination))
            self._log(f"switch {move}")
        return move

    def _begin_switch(self, resident: Guest | None, guest: Guest) -> Fetch:
        """Start the move of parameters out of home and the resident guest, both of which must stay until it is finished."""
        started = time.perf_counter()
        route = self._switch_route(resident.state.strategy if resident else None, guest.state.strategy)
        source = resident.state.strategy if resident else self._home
        voyage = route.voyage(self._timeline, "switch", source, guest.state.strategy)
        with voyage.waiting(), self._switching_parameters():
            guest.materialise_parameters()
            sources: list[dict[int, Any]] = [self.parameters]
            if resident is not None:
                sources.append(resident.parameters)
            pending = route.reshard.begin(sources=sources, destination=guest.parameters)
        voyage.arrival = pending.arrived
        return Fetch(guest, pending, route.move(source, guest.state.strategy, time.perf_counter() - started), voyage)

    def prefetch(self, resident: Guest, later: Sequence[Segment]) -> None:
        """Start the next guest's switch beside the segment that comes first, where that is wanted and fits."""
        if not later or later[0].kind is not Kind.GUEST:
            return
        guest = self.guests[later[0].strategy]
        if guest is not resident and self._may_prefetch(resident, guest):
            self._fetch = self._begin_switch(resident, guest)

    def _may_prefetch(self, resident: Guest, guest: Guest) -> bool:
        """Whether to prefetch; the same answer on every rank."""
        if self._switching.prefetch != "auto":
            return self._switching.prefetch == "always"
        if not self._transport.pace.on_stream:
            return False
        pair = resident.state.strategy, guest.state.strategy
        if pair not in self._fits:
            # The memory that the segment takes is known once it has run.
            self._fits[pair] = None
            return False
        if self._fits[pair] is None:
            needed = guest.parameter_bytes + 2 * (self._switching.chunk_mb << 20)
            fits = torch.tensor([int(_unused_bytes() >= needed)]).cuda()
            dist.all_reduce(fits, op=dist.ReduceOp.MIN)
            self._fits[pair] = bool(fits.item())
            self._log(f"prefetch {pair[0]} -> {pair[1]}: {'fits' if self._fits[pair] else 'too little memory'}")
        return bool(self._fits[pair])

    def _switch_route(self, resident: Strategy | None, guest: Strategy) -> _Route:
        if (resident, guest) not in self._switches:
            sources = [self.layout] + ([self.guests[resident].layout] if resident else [])
            dtype = self._parameter_dtype
            with self._timeline.span("plan", f"switch to {guest}"):
                plan = plan_reshard(
                    sources, self.guests[guest].layout, itemsize=dtype.itemsize, topology=self._topology
                )
                self._switches[resident, guest] = self._route(plan, dtype, accumulate=False)
        return self._switches[resident, guest]

    def begin_fold(self, guest: Guest) -> Fetch:
        """Send the guest's finished gradients to the ranks that own them at home; they are added after home's own."""
        started = time.perf_counter()
        route = self._fold_route(guest.state.strategy)
        home = self._home
        voyage = route.voyage(self._timeline, "fold", guest.state.strategy, home)
        with voyage.waiting():
            pending = route.reshard.begin(sources=[guest.gradients], destination=self._home_gradients())
        voyage.arrival = pending.arrived
        return Fetch(guest, pending, route.move(guest.state.strategy, home, time.perf_counter() - started), voyage)

    def finish_fold(self, fold: Fetch) -> Move:
        """Wait for a fold's gradients, and add them to home's own."""
        started = time.perf_counter()
        with fold.voyage.waiting():
            fold.pending.finish()
        fold.voyage.land()
        return dataclasses.replace(fold.move, seconds=fold.move.seconds + time.perf_counter() - started)

    def _fold_route(self, guest: Strategy) -> _Route:
        if guest not in self._folds:
            dtype = self._fold_dtype
            # What was added cannot be relayed: each addend goes straight to its owner.
            with self._timeline.span("plan", f"fold from {guest}"):
                plan = plan_reshard(
                    [self.guests[guest].layout],
                    self.owned,
                    itemsize=dtype.itemsize,
                    topology=self._topology,
                    two_phase=False,
                )
                self._folds[guest] = self._route(plan, dtype, accumulate=True)
        return self._folds[guest]

    def _route(self, plan: ReshardPlan, dtype: torch.dtype, *, accumulate: bool) -> _Route:
        part = plan.for_rank(self._rank)
        chunk_bytes = self._switching.chunk_mb << 20
        waiting = functools.partial(self._progress.inside, "chunk")
        reshard = Reshard(
            part, self._transport, accumulate=accumulate, dtype=dtype, chunk_bytes=chunk_bytes, waiting=waiting
        )
        return _Route(reshard, plan.total_bytes, plan.num_messages)

    def _home_gradients(self) -> dict[int, torch.Tensor]:
        return {index: parameter.main_grad for index, parameter in self.parameters.items()}


def _single_dtype(what: str, dtypes: Iterator[torch.dtype]) -> torch.dtype:
    found = sorted(set(dtypes), key=str)
    if len(found) != 1:
        raise ValueError(f"home's {what} have several dtypes ({', '.join(map(str, found))}); one is supported")
    return found[0]


def _unused_bytes() -> int:
    """Device memory that this process has not needed so far, but for a twentieth of it all."""
    free, total = torch.cuda.mem_get_info()
    return free + torch.cuda.memory_reserved() - torch.cuda.max_memory_allocated() - total // 20
