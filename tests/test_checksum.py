"""Checksums add up however a tensor is cut, and no change of its bits leaves them as they were."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_megatron.runtime import checksum as module
from hotspa_megatron.runtime.checksum import checksum
from tests.job import region

SHAPE = (5, 6, 3)


def numbers(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)).to(dtype)


def whole(tensor: torch.Tensor) -> int:
    return int(checksum(tensor, (0,) * tensor.dim(), tensor.shape))


@settings(deadline=None)
@given(st.tuples(*(st.sets(st.integers(1, size - 1), max_size=2) for size in SHAPE)), st.sampled_from((1, 7, 1 << 22)))
def test_the_parts_of_a_tensor_add_up_to_all_of_it(cuts: tuple[set[int], ...], at_once: int) -> None:
    tensor = numbers()
    edges = [sorted({0, size, *of}) for of, size in zip(cuts, SHAPE, strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_AT_ONCE", at_once)
        parts = [
            checksum(tensor[region(start, shape)], start, SHAPE)
            for bounds in itertools.product(*(itertools.pairwise(each) for each in edges))
            for start, shape in [(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))]
        ]
    assert int(torch.stack(parts).sum()) == whole(tensor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    tensor = numbers(dtype) if dtype != torch.uint8 else torch.arange(90, dtype=dtype).view(SHAPE)
    right = whole(tensor)
    width = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[tensor.element_size()]
    for bit in range(8 * tensor.element_size()):
        changed = tensor.clone()
        flat = changed.view(width).view(-1)
        flat[17] ^= 1 << bit if bit < 8 * tensor.element_size() - 1 or width == torch.uint8 else -(1 << bit)
        assert not torch.equal(changed.view(width), tensor.view(width)) and whole(changed) != right, bit


def test_places_count_too_and_strides_do_not() -> None:
    tensor = numbers()
    right = whole(tensor)
    assert whole(tensor.flip(0)) != right != whole(tensor.transpose(0, 1).contiguous().view(SHAPE))
    swapped = tensor.clone()
    swapped[0, 0, 0], swapped[4, 5, 2] = tensor[4, 5, 2], tensor[0, 0, 0]
    assert whole(swapped) != right
    strided = torch.empty(3, 6, 5).permute(2, 1, 0)
    strided.copy_(tensor)
    assert not strided.is_contiguous() and whole(strided) == right
    assert int(checksum(tensor, (0, 0, 0), (9, 6, 3))) == right and int(checksum(tensor, (1, 0, 0), (9, 6, 3))) != right


def test_what_compares_equal_is_not_always_the_same_bits() -> None:
    zeros = torch.zeros(4)
    assert torch.equal(zeros, -zeros) and whole(zeros) != whole(-zeros)
    assert whole(torch.full((4,), float("nan"))) == whole(torch.full((4,), float("nan")))
