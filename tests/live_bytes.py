"""How many bytes of tensors a rank holds at its fullest, counted storage by storage while real code runs.

Every storage that an operator returns counts from then on until nothing holds it: saved for a backward pass, as a parameter,
or as an intermediate. What exists already is counted by ``resident``. Nothing here decides anything.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts bytes of storages that appear while it is active. ``peak``: the most that lived at one time."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        # What is there already is no news when an operator returns a view of it.
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}
        self._live = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._note(value.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key = storage._cdata
        if key in self._seen:
            return
        self._seen.add(key)
        size = storage.nbytes()
        self._live += size
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._live -= size
        self._seen.discard(key)


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with what it makes not counted."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def resident(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind these tensors."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())
