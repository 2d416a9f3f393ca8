"""Packed causal attention with context parallelism on torch's own kernels, and the norm that goes with it.

Stands where Megatron's local layer spec has its own core attention, which knows neither packing nor context
parallelism. Every sequence of a pack sees itself only, causally. Short sequences of like length share a kernel call;
no mask spans the pack. With context parallelism keys and values are gathered once per call (one all-gather forward,
one reduce-scatter backward) and each rank computes its two chunks of every sequence. Knows torch only: configs, group
collections and pack descriptions are read by attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise
from math import sqrt
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right

# torch 2.13 renamed both and warns about the earlier names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_to_all: Callable[..., Any] = dist.all_to_all_single

UNPADDED_DEVICES = frozenset({"cpu"})
"""Device types where padding costs more than a kernel call: there, only neighbours of equal length share a call.

Measured on a CPU: some 25 microseconds a call, less than copying a pack of unlike lengths into place. On a GPU a call is
several launches, which short sequences cannot hide; that padding pays there is reasoned, not measured.
"""
SHARED_LENGTH = 128
"""Tokens: on other devices sequences up to this length always share a kernel call, whatever their lengths."""
SHARED_RATIO = 0.8
"""Longer sequences share a call with any that is at least this fraction of the longest in it, up to SHARED_LIMIT."""
SHARED_LIMIT = 1024
"""Tokens: longer sequences share a call with equals only. Bounds the mask that context parallelism needs otherwise."""


# Where the tokens are


def zigzag_indices(boundaries: Sequence[int] | Tensor, cp: int, rank: int) -> Tensor:
    """Positions in the pack (int64, CPU, [tokens / cp]) of the tokens that context-parallel rank ``rank`` holds.

    ``boundaries``: cumulative sequence lengths in tokens over all ranks, starting at 0. Every sequence is cut into
    2 * cp equal chunks; the rank holds chunks ``rank`` and ``2 * cp - 1 - rank`` of each, in this order. Ranks' indices
    together are a permutation of the pack; with cp 1 they are its positions in order.

    Raises ValueError for boundaries that are not increasing from 0, for a length that 2 * cp does not divide (cp > 1),
    and for a rank outside of 0..cp-1.
    """
    if not 0 <= rank < cp:
        raise ValueError(f"context-parallel rank {rank} is not in 0..{cp - 1}")
    lengths = torch.tensor(_sequence_lengths(boundaries, cp))
    if cp == 1:
        return torch.arange(int(lengths.sum()))
    chunks = lengths // (2 * cp)
    starts = lengths.cumsum(0) - lengths
    starts = torch.stack((starts + rank * chunks, starts + (2 * cp - 1 - rank) * chunks), dim=1)
    return _ranges(starts.flatten(), chunks.repeat_interleave(2))


def _sequence_lengths(boundaries: Sequence[int] | Tensor, cp: int) -> tuple[int, ...]:
    """Lengths in tokens of the sequences between ``boundaries``, checked."""
    marks = boundaries.flatten().tolist() if isinstance(boundaries, Tensor) else list(boundaries)
    if len(marks) < 2 or marks[0] != 0:
        raise ValueError(f"boundaries of a pack start at 0 and end at its number of tokens, got {marks}")
    lengths = tuple(end - start for start, end in pairwise(marks))
    multiple = 2 * cp if cp > 1 else 1
    for index, length in enumerate(lengths):
        if length < 1 or length % multiple:
            raise ValueError(
                f"sequence {index} of the pack has length {length} (boundaries {marks[index]}, {marks[index + 1]}); "
                f"with context-parallel size {cp} a length is a positive multiple of {multiple}"
            )
    return lengths


def _ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """Concatenation of ``starts[i] .. starts[i] + counts[i] - 1``, int64."""
    before = counts.cumsum(0) - counts
    return torch.repeat_interleave(starts - before, counts) + torch.arange(int(counts.sum()))


@dataclass(frozen=True)
class _Batch:
    """Sequences that share a kernel call: consecutive rows of the spread pack, [sequences, parts, chunk]."""

    sequences: int
    chunk: int
    masks: tuple[Tensor | None, ...]
    """One per part: bool [sequences, 1, chunk, keys], True where a query sees a key; None where causality says it."""


@dataclass(frozen=True)
class _Layout:
    """How one rank's tokens of a pack are spread for the kernels.

    A sequence occupies ``parts`` chunks (1, or 2 with context parallelism); in a batch every chunk is filled up at its
    end to the batch's longest. Causality alone keeps that filler from the queries of its own chunk; queries of later
    chunks (context parallelism only) need a mask for it.
    """

    parts: int
    rows: int
    slots: Tensor | None
    """int64 [tokens]: the row of each token; None where the pack is spread already. Equal on all ranks of the group."""
    batches: tuple[_Batch, ...]

    def spread(self, packed: Tensor, dim: int) -> Tensor:
        """Tokens along ``dim`` -> rows along ``dim``, zero where there is no token."""
        if self.slots is None:
            return packed
        rows = packed.new_zeros((*packed.shape[:dim], self.rows, *packed.shape[dim + 1 :]))
        return rows.index_copy(dim, self.slots, packed)

    def collect(self, rows: Tensor) -> Tensor:
        """Rows along dim 0 -> tokens along dim 0."""
        return rows if self.slots is None else rows.index_select(0, self.slots)


# All layers of a micro-batch, and its recomputation, ask for the same layout: it is built, and copied to the device,
# once. A pure function of its arguments, so a dropped entry costs time only.
@lru_cache(maxsize=16)
@torch.inference_mode(False)  # an inference tensor could not be saved for a later backward
def _layout(lengths: tuple[int, ...], cp: int, rank: int, device: torch.device, padded: bool) -> _Layout:
    parts = 1 if cp == 1 else 2
    per_sequence = torch.tensor(lengths) // (1 if cp == 1 else 2 * cp)
    first_row = torch.empty(len(lengths), parts, dtype=torch.int64)
    batches = []
    rows = 0
    for members in _padded_calls(lengths) if padded else _equal_calls(lengths):
        chunks = per_sequence[members]
        chunk = int(chunks.max())
        stop = rows + len(members) * parts * chunk
        first_row[members] = torch.arange(rows, stop, chunk).view(len(members), parts)
        # With one part, the filler lies behind every query that counts.
        ragged = parts > 1 and int(chunks.min()) < chunk
        masks = tuple(
            _to_device(_ragged_mask(chunks, chunk, index), device) if ragged else None for index in _chunks_of(cp, rank)
        )
        batches.append(_Batch(len(members), chunk, masks))
        rows = stop
    slots = _ranges(first_row.flatten(), per_sequence.repeat_interleave(parts))
    in_place = rows == len(slots) and torch.equal(slots, torch.arange(rows))
    return _Layout(parts, rows, None if in_place else _to_device(slots, device), tuple(batches))


def _equal_calls(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the sequences that share a kernel call: neighbours of equal length."""
    return [list(call) for _, call in groupby(range(len(lengths)), key=lambda index: lengths[index])]


def _padded_calls(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the sequences that share a kernel call: those of like length, wherever in the pack they are."""
    calls: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        longest = lengths[calls[-1][0]] if calls else 0
        alike = longest <= SHARED_LIMIT and (longest <= SHARED_LENGTH or length >= SHARED_RATIO * longest)
        if calls and (length == longest or alike):
            calls[-1].append(index)
        else:
            calls.append([index])
    # In pack order, so that a pack of unlike lengths needs no spreading.
    return sorted(sorted(call) for call in calls)


def _chunks_of(cp: int, rank: int) -> tuple[int, ...]:
    """Which chunks of a sequence the rank holds, in order."""
    return (0,) if cp == 1 else (rank, 2 * cp - 1 - rank)


def _ragged_mask(chunks: Tensor, chunk: int, index: int) -> Tensor:
    """What queries of chunk ``index`` see, bool [sequences, 1, chunk, (index + 1) * chunk]; ``chunks``: lengths."""
    real = (torch.arange(chunk) < chunks[:, None]).repeat(1, index + 1)
    causal = torch.ones(chunk, (index + 1) * chunk, dtype=torch.bool).tril(index * chunk)
    return (causal & real[:, None])[:, None]


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy from the CPU without making the CPU wait for the device."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


# Attention


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    boundaries: Sequence[int] | Tensor,
    softmax_scale: float,
    dropout_p: float = 0.0,
    cp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Causal self-attention of every sequence of a pack to itself: [t, heads, d_value], in the query's dtype.

    ``query`` [t, heads, d], ``key`` [t, groups, d], ``value`` [t, groups, d_value], floating, of one dtype and device;
    t: this rank's tokens, laid out as ``zigzag_indices`` says; groups divides heads. ``boundaries``: cumulative
    sequence lengths in tokens over all ranks of ``cp_group``, [sequences + 1] integers from 0 to t * cp; each token
    belongs to a sequence, alignment filler too. Give a list or a CPU tensor: one on the device makes the CPU wait for
    it. ``dropout_p``: probability with which an attention weight is dropped, from torch's default generator.
    ``cp_group``: None or a group of one is no context parallelism; else every rank of it has to make the same call.

    Raises ValueError for shapes and boundaries that do not fit.
    """
    cp, rank = _size_and_rank(cp_group)
    if query.dim() != 3:
        raise ValueError(f"packed attention takes [tokens, heads, d], got a query of shape {list(query.shape)}")
    _check_shapes(query, key, value)
    lengths = _sequence_lengths(boundaries, cp)
    if sum(lengths) != query.size(0) * cp:
        raise ValueError(
            f"boundaries end at {sum(lengths)} tokens, but {cp} context-parallel rank(s) of {query.size(0)} tokens "
            f"hold {query.size(0) * cp}; alignment filler is a sequence, too"
        )
    layout = _layout(lengths, cp, rank, query.device, query.device.type not in UNPADDED_DEVICES)
    # split, not slices: the gradient of a slice is as large as the pack.
    sizes = [batch.sequences * layout.parts * batch.chunk for batch in layout.batches]
    queries = layout.spread(query, 0).split(sizes)
    stores = zip(*(layout.spread(store, 1).split(sizes, 1) for store in _gather(key, value, cp_group)), strict=True)
    outputs = []
    for batch, query_rows, store_rows in zip(layout.batches, queries, stores, strict=True):
        shape = (batch.sequences, layout.parts, batch.chunk)
        output = _attend(
            query_rows.unflatten(0, shape),
            *_in_order([store.unflatten(1, shape) for store in store_rows], key.size(-1)),
            chunks=_chunks_of(cp, rank),
            masks=batch.masks,
            softmax_scale=softmax_scale,
            dropout_p=dropout_p,
        )
        outputs.append(output.flatten(0, 2))
    return layout.collect(outputs[0] if len(outputs) == 1 else torch.cat(outputs))


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: float,
    dropout_p: float = 0.0,
    cp_group: dist.ProcessGroup | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Causal self-attention of ``b`` samples of one sequence each: [s, b, heads, d_value], in the query's dtype.

    ``query`` [s, b, heads, d], ``key`` [s, b, groups, d], ``value`` [s, b, groups, d_value]; s: this rank's tokens of
    a sample of s * cp tokens, which context parallelism cuts as ``zigzag_indices`` says. ``attention_mask``: bool
    [b or 1, 1, s, s * cp], True where a query (this rank's) must not see a key (all ranks', in order), as Megatron has
    it; it then stands instead of causality and leaves each query at least one key. Else as ``packed_attention``.

    Raises ValueError for shapes that do not fit, and for an s that is not even with context parallelism.
    """
    cp, rank = _size_and_rank(cp_group)
    if query.dim() != 4:
        raise ValueError(f"dense attention takes [s, b, heads, d], got a query of shape {list(query.shape)}")
    _check_shapes(query, key, value)
    tokens, samples = query.shape[:2]
    parts = 1 if cp == 1 else 2
    if tokens % parts:
        raise ValueError(f"a context-parallel rank holds two equal chunks of a sample, got {tokens} tokens")
    shape = (parts, tokens // parts)
    stores = [store.transpose(1, 2).unflatten(2, shape) for store in _gather(key, value, cp_group)]
    key, value = _in_order(stores, key.size(-1))
    query = query.transpose(0, 1)
    if attention_mask is None:
        output = _attend(
            query.unflatten(1, shape),
            key,
            value,
            chunks=_chunks_of(cp, rank),
            masks=(None,) * parts,
            softmax_scale=softmax_scale,
            dropout_p=dropout_p,
        ).flatten(1, 2)
    else:
        if attention_mask.dtype != torch.bool or attention_mask.shape not in (
            (samples, 1, tokens, tokens * cp),
            (1, 1, tokens, tokens * cp),
        ):
            raise ValueError(
                f"attention_mask is {attention_mask.dtype} {list(attention_mask.shape)}; expected torch.bool "
                f"[{samples} or 1, 1, {tokens}, {tokens * cp}]"
            )
        output = _kernel(query, key, value, mask=~attention_mask, softmax_scale=softmax_scale, dropout_p=dropout_p)
    return output.transpose(0, 1)


def _size_and_rank(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (1, 0) if group is None else (group.size(), group.rank())


def _check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    if not (
        key.shape[:-1] == value.shape[:-1]
        and query.shape[:-2] == key.shape[:-2]
        and query.size(-1) == key.size(-1)
        and query.size(-2) % key.size(-2) == 0
    ):
        raise ValueError(
            f"query {list(query.shape)}, key {list(key.shape)} and value {list(value.shape)} do not fit: "
            "self-attention takes equal token counts, one d for query and key, and heads that the key's groups divide"
        )


class _GatherOverRanks(torch.autograd.Function):
    """[tokens, ...] -> [cp, tokens, ...] of all ranks of the group; gradients are summed back to each rank's own."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = local.new_empty((group.size() * local.size(0), *local.shape[1:]))
        _all_gather(gathered, local.contiguous(), group=group)
        return gathered.unflatten(0, (group.size(), local.size(0)))

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parts = gradient.contiguous()
        if dist.get_backend(ctx.group) == dist.Backend.GLOO:
            # gloo's own reduce-scatter is an all-reduce of everything: twice the bytes, and twice the time.
            received = torch.empty_like(parts)
            _all_to_all(received, parts, group=ctx.group)
            return received.sum(0), None
        local = parts.new_empty(parts.shape[1:])
        _reduce_scatter(local, parts.flatten(0, 1), group=ctx.group)
        return local, None


def _gather(key: Tensor, value: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    """Keys and values of all ranks, [cp, tokens, ..., d]: side by side in one tensor, or in two if cp is 1."""
    if group is None or group.size() == 1:
        return [key[None], value[None]]
    # One buffer, one collective.
    return [_GatherOverRanks.apply(torch.cat((key, value), dim=-1), group)]


def _in_order(stores: list[Tensor], width: int) -> tuple[Tensor, Tensor]:
    """``_gather``'s stores as [cp, n, parts, chunk, groups, d] -> keys, values [n, keys, groups, d] in sequence order.

    ``width``: d of the keys.
    """
    if len(stores) == 2:
        key, value = (store.squeeze(0).flatten(1, 2) for store in stores)
        return key, value
    by_sequence = stores[0].transpose(0, 1)
    # Chunk r of rank r, in order of ranks; then chunk 2 * cp - 1 - r of rank r, in reverse order.
    both = torch.cat((by_sequence[:, :, 0], by_sequence[:, :, 1].flip(1)), dim=1).flatten(1, 2)
    return both[..., :width], both[..., width:]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    chunks: tuple[int, ...],
    masks: tuple[Tensor | None, ...],
    softmax_scale: float,
    dropout_p: float,
) -> Tensor:
    """Query [n, parts, chunk, heads, d] of the given chunks; key, value [n, keys, groups, d] -> as query."""
    chunk = query.size(2)
    if len(chunks) == 1:
        # Views only: indexing would cost a copy of every gradient.
        output = _kernel(query.squeeze(1), key, value, mask=masks[0], softmax_scale=softmax_scale, dropout_p=dropout_p)
        return output.unsqueeze(1)
    outputs = [
        _kernel(
            part,
            key[:, : (index + 1) * chunk],
            value[:, : (index + 1) * chunk],
            mask=mask,
            softmax_scale=softmax_scale,
            dropout_p=dropout_p,
        )
        for part, index, mask in zip(query.unbind(1), chunks, masks, strict=True)
    ]
    return torch.stack(outputs, dim=1)


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None, softmax_scale: float, dropout_p: float
) -> Tensor:
    """Query [n, q, heads, d]; key, value [n, k, groups, d] -> [n, q, heads, d_value].

    ``mask``: bool, True where a query sees a key; None: causal, with the last query at the last key.
    """
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    grouped = query.size(1) != key.size(1)
    if grouped and query.is_cuda and (mask is not None or query.dtype not in (torch.float16, torch.bfloat16)):
        # Of the CUDA kernels that do without a matrix of scores only flash attention takes groups.
        repeats = query.size(1) // key.size(1)
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        grouped = False
    square = query.size(2) == key.size(2)
    if mask is None and not square:
        mask = causal_lower_right(query.size(2), key.size(2))  # a shape, not a matrix, where the kernel allows it
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=mask is None,
        scale=softmax_scale,
        enable_gqa=grouped,
    ).transpose(1, 2)


# Modules in Megatron's places


class AttentionConfig(Protocol):
    """What is read of Megatron's TransformerConfig, with the fields that SUPPORTED_VALUES names, where present."""

    kv_channels: int
    attention_dropout: float
    sequence_parallel: bool


class NormConfig(Protocol):
    """What is read of Megatron's TransformerConfig for a norm."""

    normalization: str
    sequence_parallel: bool
    layernorm_zero_centered_gamma: bool
    params_dtype: torch.dtype


class PackedSequences(Protocol):
    """What is read of Megatron's PackedSeqParams."""

    qkv_format: str
    cu_seqlens_q: Tensor
    cu_seqlens_q_padded: Tensor | None


SUPPORTED_VALUES: dict[str, Any] = {
    "attention_type": "self",
    "apply_query_key_layer_scaling": False,
    "window_size": None,
    "softmax_type": "vanilla",
    "qk_clip": False,
    "log_max_attention_logit": False,
}
"""What Megatron can ask of an attention by argument or config, and the only value of it that is computed here."""


class PackedDotProductAttention(nn.Module):
    """Core attention for Megatron's local layer spec: packed or not, with or without context parallelism.

    ``cp_group`` is the group of the next forward; it may be pointed at another one between micro-batches.
    ``rng_fork`` gives the context in which attention dropout is drawn where sequence parallelism has not set one; a
    subclass points it (as a staticmethod) at Megatron's model-parallel RNG tracker to draw as Megatron's attention does.
    """

    rng_fork: Callable[[], AbstractContextManager[Any]] = staticmethod(nullcontext)

    def __init__(
        self,
        config: AttentionConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **options: Any,
    ) -> None:
        """Take Megatron's arguments; ``attention_dropout`` and ``softmax_scale`` default to the config's and 1/sqrt(d).

        ``pg_collection.cp``: the context-parallel group, if any. ``cp_comm_type`` is of no effect: keys and values are
        gathered, exactly, whatever it says.

        Raises ValueError for what this attention cannot compute.
        """
        super().__init__()
        self.config = config
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.cp_group: dist.ProcessGroup | None = getattr(pg_collection, "cp", None)
        self.dropout_p = config.attention_dropout if attention_dropout is None else attention_dropout
        self.softmax_scale = 1.0 / sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        _check_causal(attn_mask_type)
        given = {"attention_type": attention_type, **options}
        given.update({name: getattr(config, name) for name in SUPPORTED_VALUES if hasattr(config, name)})
        for name, value in given.items():
            supported = SUPPORTED_VALUES.get(name)
            if value != supported:
                raise ValueError(
                    f"layer {layer_number}: {name} = {value!r} is not supported by this attention, only {supported!r}"
                )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """Unpacked [s, b, heads, d] -> [s, b, heads * d]; packed [t, heads, d] -> [t, 1, heads * d].

        A pack's ``cu_seqlens_q_padded``, or else ``cu_seqlens_q``, are its boundaries; they are best on the CPU (see
        ``packed_attention``), and ``attention_mask`` is then ignored, as by Megatron's own packed attention.

        Raises ValueError for a mask type that is not causal, a bias, or another packed format than thd.
        """
        if attn_mask_type is not None:
            _check_causal(attn_mask_type)
        if attention_bias is not None:
            raise ValueError("attention_bias is not supported by this attention")
        dropout_p = self.dropout_p if self.training else 0.0
        # Under sequence parallelism Megatron runs the whole layer under the tracker's seed already.
        fork = self.rng_fork() if dropout_p and not self.config.sequence_parallel else nullcontext()
        with fork:
            if packed_seq_params is None:
                output = dense_attention(
                    query,
                    key,
                    value,
                    softmax_scale=self.softmax_scale,
                    dropout_p=dropout_p,
                    cp_group=self.cp_group,
                    attention_mask=attention_mask,
                )
                return output.flatten(2)
            if packed_seq_params.qkv_format != "thd":
                raise ValueError(f"packed sequences come as thd, got qkv_format {packed_seq_params.qkv_format!r}")
            padded = packed_seq_params.cu_seqlens_q_padded
            output = packed_attention(
                query,
                key,
                value,
                boundaries=packed_seq_params.cu_seqlens_q if padded is None else padded,
                softmax_scale=self.softmax_scale,
                dropout_p=dropout_p,
                cp_group=self.cp_group,
            )
            return output.flatten(1).unsqueeze(1)


def _check_causal(attn_mask_type: Any) -> None:
    """Megatron's AttnMaskType, by name."""
    if attn_mask_type.name not in ("causal", "padding_causal"):
        raise ValueError(f"attention mask type {attn_mask_type.name!r} is not supported: only causal attention is")


def make_norm(config: NormConfig, hidden_size: int, eps: float = 1e-5) -> nn.Module:
    """torch's RMSNorm or LayerNorm over the last dim, parameters in ``config.params_dtype``.

    Parameters carry ``sequence_parallel`` as Megatron expects: each rank of a tensor-parallel group then has a partial
    gradient, which Megatron's own finalize sums.

    Raises ValueError for another normalization, and for zero-centered gammas, which torch's norms do not have.
    """
    if config.layernorm_zero_centered_gamma:
        raise ValueError("torch's norms have no zero-centered gamma: leave --apply-layernorm-1p out")
    kinds: dict[str, type[nn.RMSNorm] | type[nn.LayerNorm]] = {"RMSNorm": nn.RMSNorm, "LayerNorm": nn.LayerNorm}
    if config.normalization not in kinds:
        raise ValueError(f"normalization {config.normalization!r} is not supported: use one of {sorted(kinds)}")
    norm = kinds[config.normalization](hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm


class SequenceParallelNorm:
    """``make_norm`` for Megatron's layer specs, which call classes but hand functions back uncalled."""

    def __new__(cls, config: NormConfig, hidden_size: int, eps: float = 1e-5) -> nn.Module:  # type: ignore[misc]
        return make_norm(config, hidden_size, eps)
