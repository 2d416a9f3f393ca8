"""All process groups of all strategies, created once and shared by rank tuple.

Creating a group is collective over the whole world: every rank must ask for every group in the same order, members or
not. The pool keeps the order in ``log``, so that ranks can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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

        Raises RuntimeError for an unknown group after ``seal``: a group that appears later on some ranks only would hang.
        """
        key = (tuple(ranks), backend)
        if key not in self._groups:
            if self._sealed:
                raise RuntimeError(
                    f"process group {list(ranks)} was not planned at start; all groups are created there"
                )
            self._groups[key] = self._create(ranks=list(ranks), backend=backend, **options)
            self.log.append(key)
        return self._groups[key]

    def seal(self) -> None:
        """From now on only known groups are given out."""
        self._sealed = True
