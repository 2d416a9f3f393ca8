"""Published LLaMA shapes by name, for benchmarks and simulations that have no Megatron command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hotspa_megatron.planning.model_shape import ModelShape


def llama(*, layers: int, hidden: int, ffn: int, heads: int, groups: int, vocab: int, seq_length: int) -> ModelShape:
    """A LLaMA of these sizes in bf16 with fp32 gradients; ``vocab`` is padded, lengths are in tokens."""
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        kv_channels=hidden // heads,
        padded_vocab_size=vocab,
        seq_length=seq_length,
        gated_linear_unit=True,
        tied_embeddings=False,
        rms_norm=True,
        qk_layernorm=False,
        linear_bias=False,
        qkv_bias=False,
        learned_positions=None,
        sequence_parallel=True,
        layers_in_first_stage=None,
        layers_in_last_stage=None,
        parameter_bytes=2,
        gradient_bytes=4,
        distributed_optimizer=True,
    )


# 7B, 13B and 32B are the models of HotSPa's evaluation (SOSP'24 artifact: its layers, hidden, ffn, heads and its padded
# GPT-2 vocabulary, at contexts of up to 32K); 70B is Llama 2 70B with its vocabulary of 32000 padded to 8 * 128.
KNOWN_MODELS: Final[Mapping[str, ModelShape]] = {
    "llama-7b": llama(layers=32, hidden=4096, ffn=11008, heads=32, groups=32, vocab=30592, seq_length=32768),
    "llama-13b": llama(layers=40, hidden=5120, ffn=13824, heads=40, groups=40, vocab=30592, seq_length=32768),
    "llama-32b": llama(layers=60, hidden=6656, ffn=17920, heads=64, groups=64, vocab=30592, seq_length=32768),
    "llama-70b": llama(layers=80, hidden=8192, ffn=28672, heads=64, groups=8, vocab=32768, seq_length=4096),
}
