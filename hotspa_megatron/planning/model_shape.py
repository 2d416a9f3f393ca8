"""The numbers of a decoder-only GPT that planning needs; nothing about how it is laid over ranks.

Read from Megatron's arguments by ``hooks/arguments.py`` (a live job) and by ``cli/`` (a command line); never from a model.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A dense GPT as Megatron's arguments describe it.

    Sizes are global (not per rank) and in elements. ``padded_vocab_size`` is home's, which every strategy uses.
    ``layers_in_first_stage`` and ``layers_in_last_stage`` are home's uneven pipeline split (None: even); a guest's
    pipeline always splits evenly. ``parameter_bytes`` and ``gradient_bytes`` are bytes per element of the model's
    parameters (2 for bf16 and fp16) and of Megatron's main_grad (4 unless gradients are kept in bf16).
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    padded_vocab_size: int
    seq_length: int
    gated_linear_unit: bool
    tied_embeddings: bool
    rms_norm: bool
    qk_layernorm: bool
    linear_bias: bool
    qkv_bias: bool
    learned_positions: int | None
    """Rows of the learned position embedding; None where positions are rotary or absent."""
    sequence_parallel: bool
    layers_in_first_stage: int | None
    layers_in_last_stage: int | None
    parameter_bytes: int
    gradient_bytes: int
    distributed_optimizer: bool
    home_split_by_megatron: bool = False
    """Home's stages follow from other flags of Megatron's (a layout, or room for embedding and loss): not known here."""
    local_layers: bool = False
    """--transformer-impl local: layers of torch's own operators, which keep more for the backward pass than fused ones."""
    token_multiple: int = 1
    """What the tokens that a rank holds of a micro-batch are a multiple of, as products in fp8 ask for."""
