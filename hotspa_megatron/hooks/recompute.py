"""What the backward passes of one segment compute anew, switched on the modules that run it and restored afterwards.

Megatron reads full recomputation from the configuration in every forward pass, and selective recomputation from switches
that modules took from it when they were built. Called by ``forward_backward`` for every segment; owns nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

from hotspa_megatron.hooks.model import chunks_of
from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.planning.execution import Recompute

_CORE_ATTENTION: Final = "checkpoint_core_attention"
_SWITCHES: Final = (
    _CORE_ATTENTION,
    "recompute_input_layernorm",
    "recompute_pre_mlp_layernorm",
    "recompute_mlp",
)
"""Attributes of modules that selective recomputation sets when they are built."""


@contextlib.contextmanager
def recomputing(model: Sequence[Any], recompute: Recompute | None) -> Iterator[None]:
    """Let ``model`` recompute like this, and as the command line says again afterwards; None changes nothing."""
    if recompute is None:
        yield
        return
    patches = Patches()
    try:
        for chunk in chunks_of(model):
            built = chunk.config.recompute_granularity
            for module in chunk.modules():
                _switch(module, built, recompute, patches)
        # The chunks share it: last, because what modules were built for is read off it.
        for config in {id(chunk.config): chunk.config for chunk in chunks_of(model)}.values():
            _configure(config, recompute, patches)
        yield
    finally:
        patches.undo_all()


def _switch(module: Any, built: str | None, recompute: Recompute, patches: Patches) -> None:
    # Modules built for selective recomputation stay as --recompute-modules made them.
    if recompute.granularity == "selective" and built == "selective":
        return
    for name in _SWITCHES:
        if name in vars(module):
            wanted = recompute.granularity == "selective" and name == _CORE_ATTENTION
            patches.set(module, name, wanted)


def _configure(config: Any, recompute: Recompute, patches: Patches) -> None:
    match recompute.granularity:
        case "none":
            values: dict[str, Any] = {"recompute_granularity": None}
        case "selective":
            values = {"recompute_granularity": "selective"}
        case "full" if recompute.layers is not None:
            values = {"recompute_method": "block", "recompute_num_layers": recompute.layers}
        case "full" if config.recompute_granularity == "full" and config.recompute_method == "uniform":
            values = {}  # with the command line's number of layers between checkpoints
        case "full":
            values = {"recompute_method": "uniform", "recompute_num_layers": 1}
    for name, value in {"recompute_granularity": recompute.granularity, **values}.items():
        patches.set(config, name, value)
