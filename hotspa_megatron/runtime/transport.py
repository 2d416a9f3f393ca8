"""Point-to-point exchange between ranks in three verbs: submit a send, submit a receive, run.

The executor packs and unpacks; a transport only carries flat buffers. Messages between the same two ranks arrive in the
order in which they were submitted.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist


class Exchange(Protocol):
    """What ``run`` started."""

    def wait(self) -> None:
        """Return when received buffers may be read and sent ones overwritten (on CUDA: by the current stream)."""
        ...


class Transport(Protocol):
    """Peers are global ranks; buffers are contiguous and stay untouched from submission until ``Exchange.wait``."""

    def submit_send(self, buffer: torch.Tensor, receiver: int) -> None: ...

    def submit_receive(self, buffer: torch.Tensor, sender: int) -> None: ...

    def run(self) -> Exchange:
        """Start everything submitted since the last run, as one batch. Nothing submitted: nothing happens."""
        ...


class BatchedTransport:
    """NCCL or gloo: one ``batch_isend_irecv`` per run, over one process group.

    A rank with nothing to send or receive takes no part in a run. NCCL sets up its communicator in the first operation
    of a group, in which all ranks must take part: create the transport on every rank of the group at the same time.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """``group`` holds every rank that ever sends or receives; None is the world."""
        self._group = group
        self._operations: list[dist.P2POp] = []
        if dist.get_backend(group) == dist.Backend.NCCL:
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)

    def submit_send(self, buffer: torch.Tensor, receiver: int) -> None:
        self._operations.append(dist.P2POp(dist.isend, buffer, receiver, self._group))

    def submit_receive(self, buffer: torch.Tensor, sender: int) -> None:
        self._operations.append(dist.P2POp(dist.irecv, buffer, sender, self._group))

    def run(self) -> Exchange:
        operations, self._operations = self._operations, []
        return _Works(operations, dist.batch_isend_irecv(operations) if operations else [])


class _Works:
    def __init__(self, operations: list[dist.P2POp], works: list[dist.Work]) -> None:
        self._operations = operations  # keeps the buffers alive
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = []
        self._operations = []
