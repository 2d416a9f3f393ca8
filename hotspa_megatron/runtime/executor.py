"""Carries one rank's part of a reshard plan out: copy or pack, exchange, unpack or add.

It only walks the plan and decides nothing about who sends what. Messages travel in pieces, which take turns in two
buffers of bounded size; what is one run of memory at an end takes none there (``binding``). There is no barrier and no
device-wide synchronisation: a rank with nothing to do returns at once. On CUDA everything runs on a stream of its own,
for which the consumer's stream waits.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from hotspa_megatron.planning.reshard_plan import RankPlan
from hotspa_megatron.runtime.binding import Batch, Binder, Binding, Sizes, Tensors
from hotspa_megatron.runtime.storage import resident_bytes
from hotspa_megatron.runtime.transport import Exchange, Transport

CHUNK_BYTES: Final = 256 << 20
"""Default size of each of the two buffers of a move."""


class _Place(NamedTuple):
    """Where a tensor lies; views of it stay right for as long as this stays the same."""

    storage: int
    offset: int
    stride: tuple[int, ...]
    dtype: torch.dtype


class Reshard:
    """One rank's part of a plan, ready to be carried out any number of times.

    Values travel as ``dtype``, local copies included: replicas must not differ by who sent to them. Views and buffers
    are found once and kept for as long as the tensors stay where they are; their memory may be released in between.

    With ``accumulate`` regions are added to the destination, in its dtype, exactly once and only in ``finish``, so that
    gradients may still be accumulated there meanwhile; ``begin`` reads all sources, which may be released after it, and
    until ``finish`` the move holds what it sends and receives. Where several source layouts hold addends of one element,
    every rank adds them in the order of the layouts. Without ``accumulate`` regions overwrite, sources and destination
    must stay until ``finish``, and buffers take up to twice ``chunk_bytes``, which is the same on every rank.

    ``waiting`` is told of every batch of messages before it is waited for: the ranks it goes to or comes from.

    Raises ValueError for a plan in two phases that is to be added.
    """

    def __init__(
        self,
        plan: RankPlan,
        transport: Transport,
        *,
        accumulate: bool,
        dtype: torch.dtype,
        chunk_bytes: int = CHUNK_BYTES,
        waiting: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        if accumulate and len(plan.phases) > 1:
            raise ValueError(
                "a plan in two phases relays what it has written and cannot add; plan with two_phase=False"
            )
        self.plan = plan
        self._transport, self._accumulate, self._dtype, self._waiting = transport, accumulate, dtype, waiting
        pace = transport.pace
        buffer = min(chunk_bytes, pace.buffer)
        piece = min(pace.piece, buffer)
        self._sizes = Sizes(*(size // dtype.itemsize for size in (piece, min(pace.direct, piece), buffer)))
        self._places: list[_Place] = []
        self._idle: list[Binding] = []

    def begin(self, *, sources: Sequence[Tensors], destination: Tensors) -> PendingReshard:
        """Start the exchange; ``finish`` of the result completes the destination. No autograd graph is built.

        Every rank of the transport begins, those without a part as well. ``sources`` holds the rank's local tensors under
        each source layout of the plan. Raises RuntimeError, naming the parameter, where one is missing or has another
        shape than the plan's; nothing has been exchanged then.
        """
        places = self._find(sources, destination)
        if places != self._places:
            # Views of tensors that moved away would keep their memory.
            self._places, self._idle = places, []
        if self._idle:
            binding = self._idle.pop()
        else:
            binder = Binder(self.plan, sources=sources, destination=destination, dtype=self._dtype)
            binding = binder.to_add() if self._accumulate else binder.to_copy(self._sizes)
        return PendingReshard(
            binding, self._transport, self._dtype, accumulate=self._accumulate, idle=self._idle, waiting=self._waiting
        )

    def run(self, *, sources: Sequence[Tensors], destination: Tensors) -> None:
        """``begin`` and ``finish`` in one."""
        self.begin(sources=sources, destination=destination).finish()

    def _find(self, sources: Sequence[Tensors], destination: Tensors) -> list[_Place]:
        """Where the plan's tensors lie; checks that they are there and have its shapes."""
        places = []
        for needed in self.plan.tensors:
            tensor = (destination if needed.source is None else sources[needed.source]).get(needed.parameter)
            if tensor is None or tensor.shape != needed.shape:
                where = "the destination" if needed.source is None else f"source layout {needed.source}"
                problem = (
                    f"is missing from {where}, but the plan needs it"
                    if tensor is None
                    else f"has shape {tuple(tensor.shape)} in {where}, but the plan is for {needed.shape}"
                )
                raise RuntimeError(f"rank {self.plan.rank}: {needed.name} {problem}")
            # The storage object and not its memory, which may be released and given back.
            storage = tensor.untyped_storage()._cdata
            places.append(_Place(storage, int(tensor.storage_offset()), tensor.stride(), tensor.dtype))
        return places


class PendingReshard:
    """A move that has begun."""

    @torch.no_grad()
    def __init__(
        self,
        binding: Binding,
        transport: Transport,
        dtype: torch.dtype,
        *,
        accumulate: bool,
        idle: list[Binding],
        waiting: Callable[[Sequence[int]], None] | None,
    ) -> None:
        """Begin. ``idle`` takes the binding back in the end."""
        self._binding, self._transport, self._dtype, self._idle = binding, transport, dtype, idle
        self._waiting = waiting
        self._accumulate = accumulate
        self._inbox = binding.addends
        self._tag = transport.next_tag()
        self._later = deque(binding.batches)
        self._running: deque[tuple[Batch, Exchange | None]] = deque()
        self._arrived: torch.cuda.Event | None = None
        self._finished = False
        for buffer in binding.buffers:
            buffer.materialise()
        if accumulate:
            # Now, and on the caller's own stream: it may release the sources next.
            for batch in binding.batches:
                batch.packs.copy()
        with self._beside():
            self._start()
            if transport.pace.on_stream:
                self._complete()

    @property
    def buffer_bytes(self) -> int:
        """Memory that the move takes beside its sources and its destination."""
        return resident_bytes(self._binding.buffers)

    @property
    def arrived(self) -> torch.cuda.Event | None:
        """When the destination's values are there, or the addends; None where the move is not queued whole on a device."""
        return self._arrived

    @torch.no_grad()
    def finish(self) -> None:
        """Complete the destination; on CUDA, for the current stream. RuntimeError when called twice."""
        if self._finished:
            raise RuntimeError("this move was finished before; a second time would add its values twice")
        self._finished = True
        if self._running:
            with self._beside():
                self._complete()
        if self._arrived is not None:
            self._arrived.wait()
        for addends in self._inbox:
            addends.add()
        for buffer in self._binding.buffers:
            buffer.release()
        self._idle.append(self._binding)

    def _start(self) -> None:
        """Keep two batches under way, so that one travels while the other is packed or unpacked."""
        while self._later and len(self._running) < 2 and not (self._later[0].starts_phase and self._running):
            batch = self._later.popleft()
            if not self._accumulate:
                batch.packs.copy()
            for tensor, sender in batch.receives:
                self._transport.submit_receive(tensor, sender, self._tag)
            for tensor, receiver in batch.sends:
                self._transport.submit_send(tensor, receiver, self._tag)
            self._running.append((batch, self._transport.run() if batch.receives or batch.sends else None))
            batch.copies.copy(through=self._dtype)

    def _complete(self) -> None:
        while self._running:
            batch, exchange = self._running.popleft()
            if exchange is not None:
                if self._waiting is not None:
                    self._waiting(sorted({peer for _, peer in (*batch.receives, *batch.sends)}))
                exchange.wait()
            batch.unpacks.copy()
            self._start()
        if self._binding.device.type == "cuda":
            self._arrived = torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """On the stream of moves, after all that the current stream was given so far."""
        if self._binding.device.type != "cuda":
            yield
            return
        stream = _stream_of_moves(self._binding.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield


@functools.cache
def _stream_of_moves(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
