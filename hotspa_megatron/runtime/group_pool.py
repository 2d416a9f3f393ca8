"""All process groups of all strategies, created once and shared by rank tuple.

Creating a group is collective over the whole world: every rank must ask for every group in the same order, members or
not. The pool keeps the order in ``log``, so that ranks can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class GroupPool:
    """Process groups by (rank tuple, backend). A rank outside a group holds torch's non-member value for it.

    ``create`` is torch.distributed.new_group or a function with its keywords.
    """

    def __init__(self, create: Callable[..., Any] = dist.new_group) -> None:
        self._create = create
        self._groups: dict[tuple[tuple[int, ...], str | None], Any] = {}
        self._sealed = False
        self.log: list[tuple[tuple[int, ...], str | None]] = []
        """What was created or adopted, in order."""
        self.created: list[tuple[tuple[int, ...], str | None]] = []
        """What was created here, in order."""
        self.seconds = 0.0
        """Time that creating took on this rank."""

    def __len__(self) -> int:
        return len(self._groups)

    def adopt(self, ranks: Sequence[int], group: Any, *, backend: str | None = None) -> None:
        """Take in a group that somebody else created; the first of equal rank tuples is the one that is shared."""
        key = (tuple(ranks), backend)
        if key not in self._groups:
            self._groups[key] = group
            self.log.append(key)

    def get(self, ranks: Sequence[int], *, backend: str | None = None, **options: Any) -> Any:
        """The group of these ranks; created on first use, by all ranks of the world together.

        A rank alone has nothing to send: it gets any group of its own that there is, whatever the backend. Raises
        RuntimeError for an unknown group after ``seal``: a group that appears later on some ranks only would hang.
        """
        key = (tuple(ranks), backend)
        if len(key[0]) == 1:
            key = next((known for known in self._groups if known[0] == key[0]), key)
        if key not in self._groups:
            if self._sealed:
                raise RuntimeError(
                    f"process group {list(ranks)} was not planned at start; all groups are created there"
                )
            started = time.perf_counter()
            self._groups[key] = self._create(ranks=list(ranks), backend=backend, **options)
            self.seconds += time.perf_counter() - started
            self.log.append(key)
            self.created.append(key)
        return self._groups[key]

    def warm_up(self) -> None:
        """Let NCCL take the memory of the created groups now, and not at its peak. Collective.

        Every rank goes through its groups in the order of creation, so that no two wait for each other.
        """
        for ranks, backend in self.created:
            group = self._groups[ranks, backend]
            if len(ranks) == 1 or group is dist.GroupMember.NON_GROUP_MEMBER:
                continue
            if dist.get_backend(group) == dist.Backend.NCCL:
                dist.all_reduce(torch.zeros(1, device="cuda"), group=group)

    def seal(self) -> None:
        """From now on only known groups are given out."""
        self._sealed = True
