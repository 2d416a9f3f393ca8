"""Packed attention against a plain reference with an explicit mask, in fp64: values, gradients, ranks, refusals."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import accumulate, pairwise
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hotspa_megatron.runtime import attention
from hotspa_megatron.runtime.attention import (
    SUPPORTED_VALUES,
    PackedDotProductAttention,
    SequenceParallelNorm,
    dense_attention,
    make_norm,
    packed_attention,
    zigzag_indices,
)
from tests.spawn import run_ranks

SCALE = 0.3
TOLERANCE = 1e-12


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other over tiny tensors make these tests slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def padding(padded: bool) -> Iterator[None]:
    """Share kernel calls as on this device, or as where padding pays."""
    with pytest.MonkeyPatch.context() as patch:
        if padded:
            patch.setattr(attention, "UNPADDED_DEVICES", frozenset())
            patch.setattr(attention, "SHARED_LIMIT", 256)
        yield


@pytest.fixture(params=[False, True], ids=["equal calls", "padded calls"])
def either_sharing(request: pytest.FixtureRequest) -> Iterator[None]:
    with padding(request.param):
        yield


def boundaries_of(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def draw(
    *shape: int, heads: int = 4, groups: int = 2, d: int = 8, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key, value (all with gradients) and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(*shape, n, d, generator=generator, dtype=torch.float64).to(dtype)
        for n in (heads, groups, groups, heads)
    ]
    return tensors[0].requires_grad_(), tensors[1].requires_grad_(), tensors[2].requires_grad_(), tensors[3]


def reference(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> Tensor:
    """Plain attention, [t, heads, d]; ``visible``: bool [t, t] over the whole pack."""
    repeats = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * SCALE
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def own_and_earlier(lengths: Sequence[int]) -> Tensor:
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(sequence))
    return (sequence[:, None] == sequence) & (position[:, None] >= position)


def results(output: Tensor, inputs: Sequence[Tensor], gradient: Tensor) -> list[Tensor]:
    """The output and the gradients of the inputs."""
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def largest_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    assert [a.shape for a in ours] == [b.shape for b in theirs]
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


LENGTHS = st.lists(st.one_of(st.integers(1, 20), st.integers(50, 130)), min_size=1, max_size=7)


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.sampled_from([(4, 4), (4, 2), (4, 1), (1, 1)]), st.sampled_from([4, 8]), st.booleans())
def test_pack_equals_dense_reference(lengths: list[int], heads_groups: tuple[int, int], d: int, padded: bool) -> None:
    heads, groups = heads_groups
    query, key, value, gradient = draw(sum(lengths), heads=heads, groups=groups, d=d, seed=sum(lengths))
    with padding(padded):
        packed = packed_attention(query, key, value, boundaries=boundaries_of(lengths), softmax_scale=SCALE)
    plain = reference(query, key, value, own_and_earlier(lengths))
    inputs = (query, key, value)
    assert packed.dtype == torch.float64
    assert largest_difference(results(packed, inputs, gradient), results(plain, inputs, gradient)) < TOLERANCE


@pytest.mark.usefixtures("either_sharing")
@pytest.mark.parametrize("lengths", [[50] * 12, [1] * 9, [5, 1, 1, 7, 300, 64, 64, 300, 290, 3], [700]])
def test_pack_equals_sequences_one_at_a_time(lengths: list[int]) -> None:
    query, key, value, gradient = draw(sum(lengths))
    packed = packed_attention(query, key, value, boundaries=boundaries_of(lengths), softmax_scale=SCALE)
    alone = [
        packed_attention(q, k, v, boundaries=[0, len(q)], softmax_scale=SCALE)
        for q, k, v in zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
    ]
    inputs = (query, key, value)
    difference = largest_difference(results(packed, inputs, gradient), results(torch.cat(alone), inputs, gradient))
    assert difference < TOLERANCE


@pytest.mark.usefixtures("either_sharing")
@pytest.mark.parametrize("lengths", [[9, 30, 30, 64, 1], [100, 90, 300, 290]])
def test_no_sequence_sees_another(lengths: list[int]) -> None:
    query, key, value, gradient = draw(sum(lengths))
    marks = boundaries_of(lengths)
    before = results(
        packed_attention(query, key, value, boundaries=marks, softmax_scale=SCALE), (query, key, value), gradient
    )
    for changed in range(len(lengths)):
        mine = slice(marks[changed], marks[changed + 1])
        inputs = [tensor.detach().clone() for tensor in (query, key, value)]
        for tensor in inputs:
            tensor[mine] = float("nan")
            tensor.requires_grad_()
        after = results(packed_attention(*inputs, boundaries=marks, softmax_scale=SCALE), inputs, gradient)
        for old, new in zip(before, after, strict=True):
            assert torch.isnan(new[mine]).any()
            for others in (slice(0, mine.start), slice(mine.stop, None)):
                assert torch.equal(old[others], new[others])


def test_later_tokens_do_not_change_earlier_ones() -> None:
    query, key, value, _ = draw(40)
    outputs = []
    for last in (0.0, 5.0):
        key, value = key.detach().clone(), value.detach().clone()
        key[-1] = value[-1] = last
        outputs.append(packed_attention(query, key, value, boundaries=[0, 10, 40], softmax_scale=SCALE))
    assert torch.equal(outputs[0][:-1], outputs[1][:-1])
    assert not torch.equal(outputs[0][-1], outputs[1][-1])


def test_boundaries_as_list_and_as_tensors_give_the_same() -> None:
    query, key, value, _ = draw(30)
    forms: list[Any] = [[0, 7, 30], torch.tensor([0, 7, 30], dtype=torch.int32), torch.tensor([[0, 7, 30]])]
    outputs = [packed_attention(query, key, value, boundaries=form, softmax_scale=SCALE) for form in forms]
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@pytest.mark.usefixtures("either_sharing")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 3e-2)])
def test_lower_precision_stays_close(dtype: torch.dtype, tolerance: float) -> None:
    lengths = [3, 70, 64, 1, 150, 70]
    query, key, value, gradient = draw(sum(lengths), dtype=dtype)
    ours = results(
        packed_attention(query, key, value, boundaries=boundaries_of(lengths), softmax_scale=SCALE),
        (query, key, value),
        gradient,
    )
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    theirs = results(reference(*exact, own_and_earlier(lengths)), exact, gradient.double())
    assert all(tensor.dtype == dtype for tensor in ours)
    for a, b in zip(ours, theirs, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < tolerance


@pytest.mark.usefixtures("either_sharing")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_gives_the_same(use_reentrant: bool) -> None:
    lengths = [3, 70, 64, 1, 150]
    query, key, value, gradient = draw(sum(lengths))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(q, k, v, boundaries=boundaries_of(lengths), softmax_scale=SCALE)

    inputs = (query, key, value)
    kept = results(attend(*inputs), inputs, gradient)
    output = checkpoint(attend, *inputs, use_reentrant=use_reentrant)
    output.backward(gradient)
    assert torch.equal(output, kept[0])
    assert all(torch.equal(tensor.grad, old) for tensor, old in zip(inputs, kept[1:], strict=True))


@pytest.mark.usefixtures("either_sharing")
def test_layout_made_without_autograd_serves_training() -> None:
    attention._layout.cache_clear()
    query, key, value, gradient = draw(121)
    with torch.inference_mode():
        packed_attention(query, key, value, boundaries=[0, 11, 24, 121], softmax_scale=SCALE)
    packed_attention(query, key, value, boundaries=[0, 11, 24, 121], softmax_scale=SCALE).backward(gradient)
    assert query.grad is not None


def test_inputs_without_gradient() -> None:
    query, key, value, gradient = draw(20)
    output = packed_attention(query, key.detach(), value.detach(), boundaries=[0, 12, 20], softmax_scale=SCALE)
    output.backward(gradient)
    assert query.grad is not None and key.grad is None


def test_dropout_drops_and_keeps_the_mean() -> None:
    lengths = [30, 50]
    query, key, _, _ = draw(80)
    value = torch.ones_like(key)
    torch.manual_seed(1)
    output = packed_attention(query, key, value, boundaries=boundaries_of(lengths), softmax_scale=SCALE, dropout_p=0.25)
    output = output.detach()
    assert float((output - 1).abs().max()) > 0.1
    assert abs(float(output.mean()) - 1) < 0.05


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0], "start at 0"),
        ([1, 12], "start at 0"),
        ([0, 5, 5, 12], "sequence 1 of the pack has length 0"),
        ([0, 7, 5, 12], "sequence 1 of the pack has length -2"),
        ([0, 5, 11], "boundaries end at 11 tokens"),
    ],
)
def test_bad_boundaries_are_refused(boundaries: list[int], message: str) -> None:
    query, key, value, _ = draw(12)
    with pytest.raises(ValueError, match=message):
        packed_attention(query, key, value, boundaries=boundaries, softmax_scale=SCALE)


def test_bad_shapes_are_refused() -> None:
    query, key, value, _ = draw(12)
    for q, k, v in ((query[:, :3], key, value), (query, key[:11], value), (query, key[..., :4], value)):
        with pytest.raises(ValueError, match="do not fit"):
            packed_attention(q, k, v, boundaries=[0, 12], softmax_scale=SCALE)
    with pytest.raises(ValueError, match="takes \\[tokens, heads, d\\]"):
        packed_attention(query[:, None], key[:, None], value[:, None], boundaries=[0, 12], softmax_scale=SCALE)
    with pytest.raises(ValueError, match="takes \\[s, b, heads, d\\]"):
        dense_attention(query, key, value, softmax_scale=SCALE)


# Dense (unpacked) samples


def test_dense_equals_reference() -> None:
    query, key, value, gradient = draw(33, 3)
    inputs = (query, key, value)
    plain = torch.stack(
        [reference(query[:, i], key[:, i], value[:, i], own_and_earlier([33])) for i in range(3)], dim=1
    )
    ours = dense_attention(query, key, value, softmax_scale=SCALE)
    assert largest_difference(results(ours, inputs, gradient), results(plain, inputs, gradient)) < TOLERANCE


@pytest.mark.parametrize("samples", [1, 2])
def test_dense_with_a_mask_equals_the_pack_it_describes(samples: int) -> None:
    lengths = [7, 1, 25]
    query, key, value, gradient = draw(33, 2)
    mask = ~own_and_earlier(lengths).expand(samples, 1, 33, 33)
    inputs = (query, key, value)
    ours = dense_attention(query, key, value, softmax_scale=SCALE, attention_mask=mask)
    packed = torch.stack(
        [
            packed_attention(
                query[:, i], key[:, i], value[:, i], boundaries=boundaries_of(lengths), softmax_scale=SCALE
            )
            for i in range(2)
        ],
        dim=1,
    )
    assert largest_difference(results(ours, inputs, gradient), results(packed, inputs, gradient)) < TOLERANCE


def test_dense_refuses_other_masks() -> None:
    query, key, value, _ = draw(6, 2)
    for mask in (torch.zeros(6, 6, dtype=torch.bool), torch.zeros(2, 1, 6, 6), torch.zeros(3, 1, 6, 6).bool()):
        with pytest.raises(ValueError, match="attention_mask is"):
            dense_attention(query, key, value, softmax_scale=SCALE, attention_mask=mask)


# Zigzag


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([1, 2, 3, 4]))
def test_zigzag_is_a_permutation_of_every_sequence(units: list[int], cp: int) -> None:
    lengths = [unit * 2 * cp for unit in units]
    marks = boundaries_of(lengths)
    ranks = [zigzag_indices(marks, cp, rank) for rank in range(cp)]
    assert all(indices.dtype == torch.int64 for indices in ranks)
    assert torch.equal(torch.cat(ranks).sort().values, torch.arange(marks[-1]))
    for start, end in pairwise(marks):
        local = slice(start // cp, end // cp)
        assert all(bool(((start <= indices[local]) & (indices[local] < end)).all()) for indices in ranks)
        # A query sees as many keys as come before it, so every rank has the same work where positions sum up alike.
        assert len({int(indices[local].sum()) for indices in ranks}) == 1


def test_zigzag_refusals() -> None:
    with pytest.raises(ValueError, match=r"sequence 1 .* length 6 .* multiple of 4"):
        zigzag_indices([0, 4, 10], 2, 0)
    with pytest.raises(ValueError, match=r"rank 2 is not in 0\.\.1"):
        zigzag_indices([0, 4], 2, 2)


def megatron_slices() -> Any:
    """Megatron's own function for the rotary frequencies of a rank, cut from its source: no import of Megatron."""
    root = find_spec("megatron")
    folders = list(root.submodule_search_locations or []) if root else []
    for source in (Path(folder) / "core/models/common/embeddings/rope_utils.py" for folder in folders):
        if source.exists():
            wanted = "_get_thd_freqs_on_this_cp_rank"
            body = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", None) == wanted]
            names: dict[str, Any] = {"torch": torch, "Tensor": Tensor}
            exec(compile(ast.Module(body=body, type_ignores=[]), str(source), "exec"), names)
            return names[wanted]
    pytest.skip("megatron-core is not installed")


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_zigzag_is_megatrons(cp: int) -> None:
    slices = megatron_slices()
    lengths = [8, 16, 8, 48]
    marks = boundaries_of(lengths)
    for rank in range(cp):
        expected = [
            slices(rank, cp, torch.empty(length // cp), torch.arange(start, start + length))
            for start, length in zip(marks, lengths, strict=False)
        ]
        assert torch.equal(zigzag_indices(marks, cp, rank), torch.cat(expected))


# Ranks

CP_PACKS = {
    "equal": (2, [16] * 5),
    "runs of equals": (4, [8, 8, 64, 64, 8, 16]),
    "short and unlike": (1, [8, 16, 24, 40, 8, 56, 32]),
    "alike": (2, [152, 176, 168, 152]),
    "mixed, filler behind": (1, [8, 104, 96, 216, 88, 16]),
    "long and unlike": (4, [264, 272]),
    "one": (4, [64]),
}
"""Query groups (of 4 heads) and lengths."""


def contiguous_indices(boundaries: Sequence[int], cp: int, rank: int) -> Tensor:
    """The wrong split: each rank takes one piece of every sequence."""
    pieces = [torch.arange(a, b).chunk(cp)[rank] for a, b in pairwise(boundaries)]
    return torch.cat(pieces)


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    calls: list[str] = []

    def counting(name: str, function: Any) -> Any:
        return lambda *args, **kwargs: (calls.append(name), function(*args, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        for name in ("_all_gather", "_all_to_all"):
            patch.setattr(attention, name, counting(name, getattr(attention, name)))
        yield calls


def on_cp_ranks(rank: int, cp: int) -> dict[str, float]:
    """Every check that needs a group; returns the largest difference of each."""
    group = dist.group.WORLD
    assert group is not None

    def attend(*inputs: Tensor, boundaries: list[int]) -> Tensor:
        return packed_attention(*inputs, boundaries=boundaries, softmax_scale=SCALE, cp_group=group)

    found = {}
    for name, (groups, lengths) in CP_PACKS.items():
        marks = boundaries_of(lengths)
        query, key, value, gradient = draw(marks[-1], groups=groups, d=4)
        whole = (query, key, value)
        alone = [
            reference(*one, own_and_earlier([len(one[0])]))
            for one in zip(*(tensor.split(lengths) for tensor in whole), strict=True)
        ]
        theirs = results(torch.cat(alone), whole, gradient)
        for split, padded in ((contiguous_indices, False), (zigzag_indices, False), (zigzag_indices, True)):
            indices = split(marks, cp, rank)
            local = [tensor.detach()[indices].requires_grad_() for tensor in whole]
            with padding(padded), counted_collectives() as calls:
                ours = results(attend(*local, boundaries=marks), local, gradient[indices])
            assert calls == ["_all_gather", "_all_to_all"], calls
            difference = largest_difference(ours, [tensor[indices] for tensor in theirs])
            found[f"{name}, padded {padded}, {split.__name__}"] = difference
        if name == "mixed, filler behind":
            with padding(True):
                output = checkpoint(attend, *local, boundaries=marks, use_reentrant=False)
                again = results(output, local, gradient[indices])
                output = attend(local[0], local[1].detach(), local[2].detach(), boundaries=marks)
            found["recomputed"] = largest_difference(again, ours)
            fewer = results(output, local[:1], gradient[indices])
            found["gradient of the query only"] = largest_difference(fewer, ours[:2])
    found |= dense_on_cp_ranks(rank, cp, group)
    found |= half_on_cp_ranks(rank, cp, group)
    return found


def dense_on_cp_ranks(rank: int, cp: int, group: dist.ProcessGroup) -> dict[str, float]:
    found = {}
    query, key, value, gradient = draw(32, 3)
    whole = (query, key, value)
    indices = zigzag_indices([0, 32], cp, rank)
    local = [tensor.detach()[indices].requires_grad_() for tensor in whole]
    for name, visible in {"causal": own_and_earlier([32]), "masked": own_and_earlier([9, 3, 20])}.items():
        plain = torch.stack([reference(query[:, i], key[:, i], value[:, i], visible) for i in range(3)], dim=1)
        theirs = [tensor[indices] for tensor in results(plain, whole, gradient)]
        masks = [~visible[indices][None, None]] + ([None] if name == "causal" else [])
        for mask in masks:
            ours = dense_attention(*local, softmax_scale=SCALE, cp_group=group, attention_mask=mask)
            difference = largest_difference(results(ours, local, gradient[indices]), theirs)
            found[f"dense, {name}, mask given {mask is not None}"] = difference
    with pytest.raises(ValueError, match="two equal chunks"):
        dense_attention(*(tensor[:3] for tensor in local), softmax_scale=SCALE, cp_group=group)
    return found


def half_on_cp_ranks(rank: int, cp: int, group: dist.ProcessGroup) -> dict[str, float]:
    marks = [0, 16, 64]
    indices = zigzag_indices(marks, cp, rank)
    query, key, value, gradient = (tensor.detach()[indices] for tensor in draw(64))
    exact = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    half = [tensor.bfloat16().requires_grad_() for tensor in (query, key, value)]
    outputs = [
        packed_attention(*inputs, boundaries=marks, softmax_scale=SCALE, cp_group=group) for inputs in (exact, half)
    ]
    theirs = results(outputs[0], exact, gradient)
    ours = results(outputs[1], half, gradient.bfloat16())
    assert all(tensor.dtype == torch.bfloat16 for tensor in ours)
    worst = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))
    assert worst < 3e-2, worst
    return {}


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_ranks_equal_the_reference(cp: int) -> None:
    for found in run_ranks(on_cp_ranks, cp):
        right = {name: value for name, value in found.items() if not name.endswith("contiguous_indices")}
        wrong = [value for name, value in found.items() if name.endswith("contiguous_indices")]
        assert len(wrong) == len(CP_PACKS)
        assert max(right.values()) < TOLERANCE, right
        assert min(wrong) > 1e-2, "a wrong split passed: the comparison proves nothing"


# In Megatron's place


@dataclass
class Config:
    kv_channels: int = 8
    attention_dropout: float = 0.0
    sequence_parallel: bool = False
    normalization: str = "RMSNorm"
    layernorm_zero_centered_gamma: bool = False
    params_dtype: torch.dtype = torch.bfloat16
    apply_query_key_layer_scaling: bool = False
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"
    qk_clip: bool = False
    log_max_attention_logit: bool = False


@dataclass
class Packed:
    cu_seqlens_q: Tensor
    cu_seqlens_q_padded: Tensor | None = None
    qkv_format: str = "thd"


@dataclass
class Collection:
    cp: dist.ProcessGroup | None = None
    tp: Any = field(default_factory=lambda: None)


CAUSAL = SimpleNamespace(name="causal")


def core_attention(config: Config | None = None, **arguments: Any) -> PackedDotProductAttention:
    """Built as Megatron's Attention builds it."""
    asked: dict[str, Any] = {"attn_mask_type": CAUSAL, "attention_type": "self", "softmax_scale": None}
    asked |= {"cp_comm_type": "p2p", "pg_collection": Collection()} | arguments
    return PackedDotProductAttention(config=config or Config(), layer_number=3, **asked)


def test_module_serves_packed_and_unpacked() -> None:
    core = core_attention()
    query, key, value, _ = draw(20)
    packed = core(query, key, value, None, attn_mask_type=CAUSAL, packed_seq_params=Packed(torch.tensor([0, 5, 20])))
    expected = packed_attention(query, key, value, boundaries=[0, 5, 20], softmax_scale=1 / sqrt(8))
    assert packed.shape == (20, 1, 32)
    assert torch.equal(packed, expected.reshape(20, 1, 32))
    padded = Packed(torch.tensor([0, 3, 17]), torch.tensor([0, 5, 20]))
    assert torch.equal(core(query, key, value, None, packed_seq_params=padded), packed)

    samples = draw(20, 2)[:3]
    unpacked = core(*samples, None, attn_mask_type=None, attention_bias=None)
    assert unpacked.shape == (20, 2, 32)
    assert torch.equal(unpacked, dense_attention(*samples, softmax_scale=1 / sqrt(8)).reshape(20, 2, 32))
    causal = torch.ones(1, 1, 20, 20).tril() < 0.5
    torch.testing.assert_close(core(*samples, causal), unpacked, rtol=0, atol=TOLERANCE)
    assert not core.state_dict()


def test_module_takes_its_scale_and_group() -> None:
    assert core_attention().softmax_scale == 1 / sqrt(8)
    assert core_attention(softmax_scale=0.7).softmax_scale == 0.7
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    assert core_attention(pg_collection=Collection(cp=group)).cp_group is group  # type: ignore[arg-type]
    assert core_attention(pg_collection=None).cp_group is None


def test_module_draws_dropout_in_training_only_and_under_the_given_rng() -> None:
    query, key, value, _ = draw(20)
    packed = Packed(torch.tensor([0, 5, 20]))
    entered = []

    @contextmanager
    def fork() -> Iterator[None]:
        entered.append(True)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            yield

    def outputs(core: PackedDotProductAttention) -> Tensor:
        return core(query, key, value, None, packed_seq_params=packed).detach()

    plain = outputs(core_attention())
    core = core_attention(Config(attention_dropout=0.5))
    core.rng_fork = fork
    assert not torch.equal(outputs(core), plain)
    assert torch.equal(outputs(core), outputs(core))
    assert len(entered) == 3
    assert torch.equal(outputs(core.eval()), plain)
    assert torch.equal(outputs(core_attention(Config(attention_dropout=0.5), attention_dropout=0.0)), plain)
    assert len(entered) == 3
    sequence_parallel = core_attention(Config(attention_dropout=0.5, sequence_parallel=True))
    sequence_parallel.rng_fork = fork
    assert not torch.equal(outputs(sequence_parallel), plain)
    assert len(entered) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("apply_query_key_layer_scaling", True),
        ("window_size", (128, 0)),
        ("softmax_type", "learnable"),
        ("qk_clip", True),
        ("log_max_attention_logit", True),
    ],
)
def test_module_refuses_configs(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^layer 3: {name} = "):
        core_attention(Config(**{name: value}))
    assert name in SUPPORTED_VALUES


def test_module_refuses_arguments() -> None:
    with pytest.raises(ValueError, match="attention_type = 'cross'"):
        core_attention(attention_type="cross")
    with pytest.raises(ValueError, match="k_channels = 24"):
        core_attention(k_channels=24)
    with pytest.raises(ValueError, match="mask type 'padding' is not supported"):
        core_attention(attn_mask_type=SimpleNamespace(name="padding"))
    query, key, value, _ = draw(6, 2)
    with pytest.raises(ValueError, match="mask type 'no_mask'"):
        core_attention()(query, key, value, None, attn_mask_type=SimpleNamespace(name="no_mask"))
    with pytest.raises(ValueError, match="attention_bias"):
        core_attention()(query, key, value, None, attention_bias=torch.zeros(1))
    with pytest.raises(ValueError, match="qkv_format 'sbhd'"):
        core_attention()(query, key, value, None, packed_seq_params=Packed(torch.tensor([0, 6]), qkv_format="sbhd"))


@pytest.mark.parametrize(("kind", "count"), [("RMSNorm", 1), ("LayerNorm", 2)])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_norm_marks_its_parameters(kind: str, count: int, sequence_parallel: bool) -> None:
    config = Config(normalization=kind, sequence_parallel=sequence_parallel)
    for norm in (make_norm(config, 16, 1e-3), SequenceParallelNorm(config=config, hidden_size=16, eps=1e-3)):
        parameters = list(norm.parameters())
        assert type(norm).__name__ == kind and norm.eps == 1e-3
        assert len(parameters) == count
        assert all(p.sequence_parallel is sequence_parallel and p.dtype == torch.bfloat16 for p in parameters)
        assert norm(torch.randn(3, 2, 16, dtype=torch.bfloat16)).shape == (3, 2, 16)


def test_norm_refusals() -> None:
    with pytest.raises(ValueError, match="--apply-layernorm-1p"):
        make_norm(Config(layernorm_zero_centered_gamma=True), 16)
    with pytest.raises(ValueError, match="'L2Norm' is not supported"):
        make_norm(Config(normalization="L2Norm"), 16)


def test_sharing_of_kernel_calls() -> None:
    lengths = [50, 50, 7, 300, 250, 50, 2000, 1900, 2000, 239]
    assert attention._equal_calls(lengths) == [[0, 1], [2], [3], [4], [5], [6], [7], [8], [9]]
    assert attention._padded_calls(lengths) == [[0, 1, 2, 5], [3, 4], [6, 8], [7], [9]]
    cpu = torch.device("cpu")
    assert attention._layout((30, 20, 1000), 1, 0, cpu, False).slots is None
    assert attention._layout((300, 20, 1000), 1, 0, cpu, True).slots is None
    assert attention._layout((30, 20, 1000), 1, 0, cpu, True).rows == 2 * 30 + 1000
