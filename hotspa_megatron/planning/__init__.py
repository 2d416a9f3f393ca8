"""Pure decisions: no torch, no Megatron, no process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotspa_megatron.planning.search import plan_strategies

__all__ = ["plan_strategies"]


def __getattr__(name: str) -> object:
    # On demand: most of this room is imported without the search, and some of it by what the search imports.
    if name == "plan_strategies":
        from hotspa_megatron.planning.search import plan_strategies

        return plan_strategies
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
