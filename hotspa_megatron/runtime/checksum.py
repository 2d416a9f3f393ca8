"""Checksums of tensors' bits that do not depend on how a tensor is cut over ranks.

The checksum of a region is the sum, modulo 2^64, of its elements' bits times a number that follows from each element's
place in the whole tensor. So the checksums of disjoint regions add up to that of their union, in any order, and an
element in the wrong place counts as a wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE: Final = 1 << 22
"""Elements whose places are numbered at one time: what is taken of memory is a few times eight bytes each."""


@torch.no_grad()
def checksum(region: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """The checksum of ``region``, which lies at ``start`` of a tensor of ``shape``: int64, no dims, on its device.

    Any dtype of 1, 2, 4 or 8 bytes, any strides. One wrong element changes it always, several but for once in 2^60.
    """
    region = region.detach()
    total = torch.zeros((), dtype=torch.int64, device=region.device)
    rows = max(1, _AT_ONCE // max(1, math.prod(region.shape[1:])))
    for first in range(0, region.shape[0], rows):
        part = region[first : first + rows]
        bits = part.contiguous().view(_BITS[part.element_size()]).to(torch.int64)
        total += (bits * _weights(_places(part.shape, (start[0] + first, *start[1:]), shape, part.device))).sum()
    return total


def _places(part: Sequence[int], start: Sequence[int], shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """The number of each element, counted through the whole tensor row by row."""
    place = torch.zeros((1,) * len(part), dtype=torch.int64, device=device)
    for dim, (size, low) in enumerate(zip(part, start, strict=True)):
        along = torch.arange(low, low + size, dtype=torch.int64, device=device) * math.prod(shape[dim + 1 :])
        place = place + along.view(*(-1 if other == dim else 1 for other in range(len(part))))
    return place


def _weights(places: torch.Tensor) -> torch.Tensor:
    """Odd numbers without a pattern, by place: an odd factor loses no bit of what it multiplies."""
    mixed = (places + 1) * 0x1E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
    return (mixed ^ (mixed >> 32)) | 1
