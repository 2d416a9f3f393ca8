"""Named replacements that can all be undone: the only way in which this package changes another module's names."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches:
    """A stack of replaced attributes and environment variables.

    ``replaced`` lists what stands replaced now, as ``owner.name`` strings, in the order of replacement.
    """

    def __init__(self) -> None:
        self._undo: list[tuple[str, Callable[[], None]]] = []

    @property
    def replaced(self) -> tuple[str, ...]:
        return tuple(label for label, _ in self._undo)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``. Raises AttributeError when there is no such name: a typo must not pass silently."""
        if not hasattr(owner, name):
            raise AttributeError(f"{_label(owner)} has no attribute {name!r} to replace")
        self._store(owner, name, value)

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` where it may be absent; undoing removes it again."""
        self._store(owner, name, value)

    def wrap(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace ``owner.name`` by ``make(original)``."""
        self.set(owner, name, make(getattr(owner, name)))

    def item(self, mapping: dict[str, Any], name: str, value: Any) -> None:
        """Replace ``mapping[name]``, which must be there: the globals of a module that has no module object."""
        original = mapping[name]
        mapping[name] = value
        label = f"{mapping.get('__name__', 'mapping')}.{name}"
        self._undo.append((label, lambda: mapping.__setitem__(name, original)))

    def on_undo(self, label: str, restore: Callable[[], None]) -> None:
        """Have ``restore`` called in its turn, for a change made through another module's own setter."""
        self._undo.append((label, restore))

    def environment(self, name: str, default: str) -> None:
        """Set an environment variable unless the user has."""
        if name in os.environ:
            return
        os.environ[name] = default
        self._undo.append((f"os.environ[{name}]", lambda: void(os.environ.pop(name, None))))

    def undo_all(self) -> None:
        """Restore every name, last replaced first."""
        while self._undo:
            _, restore = self._undo.pop()
            restore()

    def _store(self, owner: Any, name: str, value: Any) -> None:
        # The class's own dictionary tells an own attribute from an inherited one, which must not become an own one.
        own = vars(owner).get(name, _MISSING) if hasattr(owner, "__dict__") else getattr(owner, name, _MISSING)
        setattr(owner, name, value)

        def restore() -> None:
            if own is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.append((f"{_label(owner)}.{name}", restore))


def void(_: object) -> None:
    """Discard a value where a callable must return None."""


def _label(owner: Any) -> str:
    if isinstance(owner, type):
        return f"{owner.__module__}.{owner.__qualname__}"
    return str(getattr(owner, "__name__", type(owner).__name__))
