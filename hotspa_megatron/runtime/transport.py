"""Point-to-point exchange between ranks in three verbs: submit a send, submit a receive, run.

The executor packs and unpacks; a transport only carries flat buffers, and says of what size it likes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How a transport is fed best: the same on every rank, since messages are cut by it. Sizes in bytes.

    ``piece``: the most in one operation. ``direct``: from this size on, an operation of its own costs less than copying
    beside others into a common buffer. ``buffer``: above this size, buffers gain nothing. ``on_stream``: waiting is the
    device's affair and not the host's, so that a whole move can be queued at once.
    """

    piece: int
    direct: int
    buffer: int
    on_stream: bool


class Exchange(Protocol):
    """What ``run`` started."""

    def wait(self) -> None:
        """Return when received buffers may be read and sent ones overwritten (on CUDA: by the current stream)."""
        ...


class Transport(Protocol):
    """Peers are global ranks; buffers are contiguous and stay untouched from submission until ``Exchange.wait``.

    Between two ranks, messages of one tag arrive in the order in which they were submitted.
    """

    @property
    def pace(self) -> Pace: ...

    def next_tag(self) -> int:
        """A tag for the messages of one move, which every rank of the group begins, with or without messages."""
        ...

    def submit_send(self, buffer: torch.Tensor, receiver: int, tag: int) -> None: ...

    def submit_receive(self, buffer: torch.Tensor, sender: int, tag: int) -> None: ...

    def run(self) -> Exchange:
        """Start everything submitted since the last run, as one batch. Nothing submitted: nothing happens."""
        ...


GLOO_PACE: Final = Pace(piece=1 << 22, direct=1 << 18, buffer=1 << 24, on_stream=False)
"""Buffers that fit a core's cache: memory that is touched for the first time costs several times what a copy does."""
NCCL_PACE: Final = Pace(piece=1 << 24, direct=1 << 22, buffer=1 << 40, on_stream=True)
_TAGS: Final = 1 << 10
"""Tags come round again after so many moves: never so many are under way."""


class BatchedTransport:
    """NCCL or gloo, over one process group. Gloo carries CUDA tensors through pinned host memory.

    A rank with nothing to send or receive takes no part in a run. NCCL sets up its communicator in the first operation
    of a group, in which all ranks must take part: create the transport on every rank of the group at the same time.
    NCCL knows no tags: there, moves are queued whole, and so in one order on every rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """``group`` holds every rank that ever sends or receives; None is the world."""
        self._group = group
        self._nccl = dist.get_backend(group) == dist.Backend.NCCL
        self._tag = 0
        self._sends: list[tuple[torch.Tensor, int, int]] = []
        self._receives: list[tuple[torch.Tensor, int, int]] = []
        if self._nccl and dist.get_world_size(group) > 1:
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)

    @property
    def pace(self) -> Pace:
        return NCCL_PACE if self._nccl else GLOO_PACE

    def next_tag(self) -> int:
        self._tag = (self._tag + 1) % _TAGS
        return self._tag

    def submit_send(self, buffer: torch.Tensor, receiver: int, tag: int) -> None:
        self._sends.append((buffer, receiver, tag))

    def submit_receive(self, buffer: torch.Tensor, sender: int, tag: int) -> None:
        self._receives.append((buffer, sender, tag))

    def run(self) -> Exchange:
        sends, self._sends = self._sends, []
        receives, self._receives = self._receives, []
        return self._run_nccl(sends, receives) if self._nccl else self._run_gloo(sends, receives)

    def _run_nccl(
        self, sends: list[tuple[torch.Tensor, int, int]], receives: list[tuple[torch.Tensor, int, int]]
    ) -> Exchange:
        operations = [dist.P2POp(dist.irecv, buffer, peer, self._group) for buffer, peer, _ in receives]
        operations += [dist.P2POp(dist.isend, buffer, peer, self._group) for buffer, peer, _ in sends]
        return _Works(operations, dist.batch_isend_irecv(operations) if operations else [], [])

    def _run_gloo(
        self, sends: list[tuple[torch.Tensor, int, int]], receives: list[tuple[torch.Tensor, int, int]]
    ) -> Exchange:
        # A receive that is there first saves its sender a round trip.
        on_host = [(_host_like(buffer), buffer, peer, tag) for buffer, peer, tag in receives]
        works = [dist.irecv(host, peer, group=self._group, tag=tag) for host, _, peer, tag in on_host]
        outgoing = [(_to_host(buffer), peer, tag) for buffer, peer, tag in sends]
        if any(host is not buffer for (host, *_), (buffer, *_) in zip(outgoing, sends, strict=True)):
            torch.cuda.current_stream().synchronize()
        works += [dist.isend(host, peer, group=self._group, tag=tag) for host, peer, tag in outgoing]
        staged = [(buffer, host) for host, buffer, *_ in on_host if host is not buffer]
        return _Works([outgoing, on_host], works, staged)


class _Works:
    def __init__(
        self, alive: object, works: Sequence[dist.Work | None], staged: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        self._alive = alive  # the buffers
        self._works = works
        self._staged = staged

    def wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        for buffer, host in self._staged:
            buffer.copy_(host, non_blocking=True)
        self._alive, self._works, self._staged = None, (), []


def _host_like(buffer: torch.Tensor) -> torch.Tensor:
    if not buffer.is_cuda:
        return buffer
    return torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)


def _to_host(buffer: torch.Tensor) -> torch.Tensor:
    host = _host_like(buffer)
    if host is not buffer:
        host.copy_(buffer, non_blocking=True)
    return host
