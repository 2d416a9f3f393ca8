"""A GPT in plain torch, one sequence at a time, on one process: what every strategy mix is compared with.

It shares no code with Megatron or the package: only the meaning of the parameters (by their global names) is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor

from hotspa_megatron.planning.model_shape import ModelShape


def loss_and_gradients(
    parameters: Mapping[str, Tensor], shape: ModelShape, documents: Sequence[Tensor], *, limit: int
) -> tuple[float, int, dict[str, Tensor]]:
    """``of_sequences`` of documents: token ids, int64 [L]; pieces of ``limit`` input positions are sequences of their own."""
    pieces = [
        document[start : start + limit + 1] for document in documents for start in range(0, len(document) - 1, limit)
    ]
    return of_sequences(parameters, shape, [(piece[:-1], piece[1:]) for piece in pieces])


def of_sequences(
    parameters: Mapping[str, Tensor], shape: ModelShape, sequences: Sequence[tuple[Tensor, Tensor]]
) -> tuple[float, int, dict[str, Tensor]]:
    """Sum of token losses over all sequences, number of targets, and the sum's gradient per parameter.

    A sequence is its inputs and its labels, both int64 [n]; a label of -100 is no target.
    """
    leaves = {name: value.detach().clone().requires_grad_() for name, value in parameters.items()}
    total, targets = 0.0, 0
    for inputs, labels in sequences:
        loss = _forward(leaves, shape, inputs, labels)
        loss.backward()
        total += float(loss.detach())
        targets += int((labels != -100).sum())
    return total, targets, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _forward(parameters: Mapping[str, Tensor], shape: ModelShape, tokens: Tensor, labels: Tensor) -> Tensor:
    hidden = parameters["embedding.word_embeddings.weight"][tokens]
    if shape.learned_positions is not None:
        hidden = hidden + parameters["embedding.position_embeddings.weight"][torch.arange(len(tokens))]
    for number in range(shape.num_layers):
        layer = f"decoder.layers.{number}"
        hidden = hidden + _attention(
            parameters, shape, layer, _norm(parameters, shape, f"{layer}.input_layernorm", hidden)
        )
        hidden = hidden + _mlp(parameters, shape, layer, _norm(parameters, shape, f"{layer}.pre_mlp_layernorm", hidden))
    hidden = _norm(parameters, shape, "decoder.final_layernorm", hidden)
    head = "embedding.word_embeddings.weight" if shape.tied_embeddings else "output_layer.weight"
    return functional.cross_entropy(hidden @ parameters[head].T, labels, reduction="sum")


def _norm(parameters: Mapping[str, Tensor], shape: ModelShape, name: str, x: Tensor) -> Tensor:
    weight = parameters[f"{name}.weight"]
    if shape.rms_norm:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) * weight + parameters[f"{name}.bias"]


def _linear(parameters: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ parameters[f"{name}.weight"].T
    return y + parameters[f"{name}.bias"] if f"{name}.bias" in parameters else y


def _attention(parameters: Mapping[str, Tensor], shape: ModelShape, layer: str, x: Tensor) -> Tensor:
    tokens, channels, groups = len(x), shape.kv_channels, shape.num_query_groups
    per_group = shape.num_attention_heads // groups
    # Rows of the fused projection: for each group its query heads, then its key, then its value.
    fused = _linear(parameters, f"{layer}.self_attention.linear_qkv", x).view(tokens, groups, per_group + 2, channels)
    query, key, value = fused[:, :, :per_group], fused[:, :, per_group : per_group + 1], fused[:, :, per_group + 1 :]
    if shape.qk_layernorm:
        query = _norm(parameters, shape, f"{layer}.self_attention.q_layernorm", query)
        key = _norm(parameters, shape, f"{layer}.self_attention.k_layernorm", key)
    if shape.learned_positions is None:
        query, key = _rotated(query), _rotated(key)
    scores = torch.einsum("tgqc,sgkc->gqts", query, key) / channels**0.5
    seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    mixed = torch.einsum("gqts,sgkc->tgqc", weights, value).reshape(tokens, groups * per_group * channels)
    return _linear(parameters, f"{layer}.self_attention.linear_proj", mixed)


def _rotated(x: Tensor) -> Tensor:
    """Rotary positions over all channels. Angles are single precision, as everywhere in Megatron."""
    tokens, channels = x.shape[0], x.shape[-1]
    rates = 1.0 / (10000 ** (torch.arange(0, channels, 2, dtype=torch.float32) / channels))
    angles = torch.outer(torch.arange(tokens, dtype=torch.float32), rates)
    cos, sin = (f(angles).to(x.dtype)[:, None, None, :] for f in (torch.cos, torch.sin))
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def _mlp(parameters: Mapping[str, Tensor], shape: ModelShape, layer: str, x: Tensor) -> Tensor:
    y = _linear(parameters, f"{layer}.mlp.linear_fc1", x)
    if shape.gated_linear_unit:
        gate, up = y.chunk(2, -1)
        y = functional.silu(gate) * up
    else:
        y = functional.gelu(y)
    return _linear(parameters, f"{layer}.mlp.linear_fc2", y)
