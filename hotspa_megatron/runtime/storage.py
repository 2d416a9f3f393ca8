"""Tensor storage that exists only while it is used: zero bytes after ``release``, the same tensors after ``materialise``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch


class Storage:
    """One flat tensor whose memory comes and goes; views of it stay valid tensors throughout.

    Reading a view while released is an error of the caller: it has a size but no memory.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        """``flat`` owns its whole storage: nothing else may live in it."""
        self.flat = flat
        self._bytes = flat.untyped_storage().nbytes()

    @property
    def resident_bytes(self) -> int:
        return self.flat.untyped_storage().nbytes()

    def release(self) -> None:
        self.flat.untyped_storage().resize_(0)

    def materialise(self) -> None:
        """Give the memory back; what it holds is undefined."""
        if not self.resident_bytes:
            self.flat.untyped_storage().resize_(self._bytes)


@torch.no_grad()
def flatten(parameters: Sequence[torch.nn.Parameter]) -> list[Storage]:
    """Move parameters into one flat tensor per (dtype, device), keeping their values and the Parameter objects.

    Hooks and gradient accumulators hang on the objects, which therefore never change.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    storages = []
    for (dtype, device), members in groups.items():
        flat = torch.empty(sum(each.numel() for each in members), dtype=dtype, device=device)
        offset = 0
        for each in members:
            view = flat[offset : offset + each.numel()].view(each.shape)
            view.copy_(each.data)
            each.data = view
            offset += each.numel()
        storages.append(Storage(flat))
    return storages


def resident_bytes(storages: Iterable[Storage]) -> int:
    return sum(storage.resident_bytes for storage in storages)
