"""Which strategies a model can take: Megatron's divisibility rules, stated once for the configuration and for planning.

The layer rule stands in ``strategy.stage_layers``; the rule for the world in ``Strategy.from_world``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.strategy import listed

_VOCABULARY_MULTIPLE: Final = 128
"""Megatron's default of --make-vocab-size-divisible-by."""


def tp_problem(shape: ModelShape, tp: int) -> str | None:
    """Why the model cannot be cut over ``tp`` ranks, vocabulary aside; None where it can."""
    if shape.num_attention_heads % tp:
        return f"{shape.num_attention_heads} attention heads do not divide over tp {tp}"
    if shape.num_query_groups % tp and tp % shape.num_query_groups:
        return f"{shape.num_query_groups} query groups neither divide over tp {tp} nor divide it"
    qkv = (shape.num_attention_heads + 2 * shape.num_query_groups) * shape.kv_channels
    if qkv % tp:
        # With fewer query groups than ranks Megatron cuts the fused QKV without regard to heads, and gathers it again.
        return f"the {qkv} rows of the fused QKV do not divide over tp {tp}"
    if shape.ffn_hidden_size % tp:
        return f"ffn_hidden_size {shape.ffn_hidden_size} does not divide over tp {tp}"
    if shape.sequence_parallel and shape.hidden_size % tp:
        return f"hidden_size {shape.hidden_size} does not divide over tp {tp} under sequence parallelism"
    return None


def vocabulary_problem(shape: ModelShape, tp: int, *, every_tp: Iterable[int]) -> str | None:
    """Why home's padded vocabulary cannot be cut over ``tp`` ranks, with the fix; None where it can.

    ``every_tp`` are the tp of all strategies, so that the value offered serves them all.
    """
    if shape.padded_vocab_size % tp == 0:
        return None
    multiple = math.lcm(_VOCABULARY_MULTIPLE, *every_tp)
    return (
        f"the padded vocabulary of {shape.padded_vocab_size} does not divide over tp {tp}; "
        f"give Megatron --make-vocab-size-divisible-by {multiple}"
    )


def legal_tps(shape: ModelShape, *, ranks: int) -> list[int]:
    """Every tp that divides ``ranks`` and that the model's own sizes allow, ascending."""
    return [tp for tp in range(1, ranks + 1) if ranks % tp == 0 and tp_problem(shape, tp) is None]


def legal_products(world_size: int) -> str:
    """The values that tp * cp * pp may take, as a message lists them."""
    return listed(size for size in range(1, world_size + 1) if world_size % size == 0)
