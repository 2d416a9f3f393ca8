"""Carries one rank's part of a reshard plan out: copy or pack, exchange, unpack or add.

It only walks the plan and decides nothing. A later phase relays what an earlier one brought. There is no barrier and no
device-wide synchronisation: a rank with nothing to do returns at once, and on CUDA everything is ordered on the current
stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from hotspa_megatron.planning.reshard_plan import DESTINATION, Cell, Phase, RankPlan
from hotspa_megatron.runtime.transport import Exchange, Transport

Tensors = Mapping[int, torch.Tensor]
"""Local tensors (any strides) by parameter index."""


class PendingReshard:
    """A move that has begun. Its sources are free to be released; its destination is complete after ``finish``."""

    def __init__(
        self, plan: RankPlan, destination: Tensors, transport: Transport, accumulate: bool, dtype: torch.dtype
    ) -> None:
        self._later = list(plan.phases)
        self._destination, self._transport = destination, transport
        self._accumulate, self._dtype = accumulate, dtype
        self._exchange: Exchange | None = None
        self._inbox: list[tuple[torch.Tensor, tuple[Cell, ...]]] = []
        self._finished = False

    @torch.no_grad()
    def start(self, sources: Sequence[Tensors]) -> None:
        """Start the next phase."""
        phase = self._later.pop(0)
        if phase.is_empty:
            return
        device = next(iter((*self._destination.values(), *(tensor for of in sources for tensor in of.values())))).device
        self._exchange, self._inbox = _exchange(phase, sources, self._destination, self._transport, self._dtype, device)
        if phase.copies and self._accumulate:
            # Adding waits for finish, but the source may be gone by then.
            self._inbox.append((_pack(phase.copies, sources, self._destination, self._dtype, device), phase.copies))
        elif phase.copies:
            torch._foreach_copy_(
                [_region(self._destination, c.parameter, c.destination_start, c.shape) for c in phase.copies],
                [
                    _region(sources[c.source], c.parameter, c.source_start, c.shape).to(self._dtype)
                    for c in phase.copies
                ],
            )

    @torch.no_grad()
    def advance(self) -> None:
        """Wait for the phase under way, write what it brought to the destination or add it, and start the next phase.

        Ranks that share a process take turns with it; ``finish`` is all others need.
        """
        if self._exchange is not None:
            self._exchange.wait()
            self._exchange = None
        for buffer, cells in self._inbox:
            views = [_region(self._destination, c.parameter, c.destination_start, c.shape) for c in cells]
            if self._accumulate:
                torch._foreach_add_(views, _unpacked(buffer, cells))
            else:
                torch._foreach_copy_(views, _unpacked(buffer, cells))
        self._inbox = []
        if self._later:
            self.start(())

    def finish(self) -> None:
        """Carry out what is left of every phase. RuntimeError when called twice."""
        if self._finished:
            raise RuntimeError("this move was finished before; a second time would add its values twice")
        self._finished = True
        while self._later or self._inbox or self._exchange is not None:
            self.advance()


def execute(
    plan: RankPlan,
    *,
    sources: Sequence[Tensors],
    destination: Tensors,
    transport: Transport,
    accumulate: bool,
    dtype: torch.dtype,
) -> None:
    """``begin`` and ``finish`` in one."""
    begin(
        plan, sources=sources, destination=destination, transport=transport, accumulate=accumulate, dtype=dtype
    ).finish()


@torch.no_grad()
def begin(
    plan: RankPlan,
    *,
    sources: Sequence[Tensors],
    destination: Tensors,
    transport: Transport,
    accumulate: bool,
    dtype: torch.dtype,
) -> PendingReshard:
    """Read all sources and start the exchange; ``finish`` of the result completes the destination.

    ``sources`` holds the rank's local tensors under each source layout of the plan. With ``accumulate`` each region is
    added to the destination exactly once, in the destination's dtype and only in ``finish``, so that a fold may travel
    while gradients are still being accumulated there; without it, regions overwrite. Values travel as ``dtype``, local
    copies included: replicas must not differ by who sent to them.

    No autograd graph is built. Before anything is exchanged, raises RuntimeError, naming the parameter, where a local
    tensor is missing or its shape is not the plan's, and ValueError for a plan that relays what it should add.
    """
    _check(plan, sources, destination)
    if accumulate and any(cell.source == DESTINATION for phase in plan.phases for m in phase.sends for cell in m.cells):
        raise ValueError("a plan in two phases relays what it has written and cannot add; plan with two_phase=False")
    pending = PendingReshard(plan, destination, transport, accumulate, dtype)
    pending.start(sources)
    return pending


def _exchange(
    phase: Phase,
    sources: Sequence[Tensors],
    destination: Tensors,
    transport: Transport,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Exchange | None, list[tuple[torch.Tensor, tuple[Cell, ...]]]]:
    """Pack and start; what arrives lies in the buffers afterwards."""
    packed: dict[int, torch.Tensor] = {}
    for index, message in enumerate(phase.sends):
        first = phase.packed_as[index]
        if first not in packed:
            packed[first] = _pack(message.cells, sources, destination, dtype, device)
        transport.submit_send(packed[first], message.peer)
    inbox = []
    for message in phase.receives:
        buffer = torch.empty(message.numel, dtype=dtype, device=device)
        transport.submit_receive(buffer, message.peer)
        inbox.append((buffer, message.cells))
    return (transport.run() if phase.sends or phase.receives else None), inbox


def _check(plan: RankPlan, sources: Sequence[Tensors], destination: Tensors) -> None:
    for tensor in plan.tensors:
        side = destination if tensor.source is None else sources[tensor.source]
        where = "the destination" if tensor.source is None else f"source layout {tensor.source}"
        if tensor.parameter not in side:
            raise RuntimeError(f"rank {plan.rank}: {tensor.name} is missing from {where}, but the plan needs it")
        shape = tuple(side[tensor.parameter].shape)
        if shape != tensor.shape:
            raise RuntimeError(
                f"rank {plan.rank}: {tensor.name} has shape {shape} in {where}, but the plan is for {tensor.shape}"
            )


def _region(tensors: Tensors, parameter: int, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    view = tensors[parameter].detach()
    for dim, (low, size) in enumerate(zip(start, shape, strict=True)):
        if size != view.shape[dim]:
            view = view.narrow(dim, low, size)
    return view


def _pack(
    cells: tuple[Cell, ...],
    sources: Sequence[Tensors],
    destination: Tensors,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    buffer = torch.empty(sum(math.prod(cell.shape) for cell in cells), dtype=dtype, device=device)
    views = [
        _region(destination if c.source == DESTINATION else sources[c.source], c.parameter, c.source_start, c.shape)
        for c in cells
    ]
    torch._foreach_copy_(_unpacked(buffer, cells), views)
    return buffer


def _unpacked(buffer: torch.Tensor, cells: tuple[Cell, ...]) -> list[torch.Tensor]:
    """The cells' regions of a message, as views of its buffer."""
    parts = buffer.split([math.prod(cell.shape) for cell in cells])
    return [part.view(cell.shape) for part, cell in zip(parts, cells, strict=True)]
