"""Holds a Megatron index against itself and against its data file: every entry can be read, lengths are sane.

``hotspa data check`` shows what is found; a job does the same before it starts. Reads no token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from hotspa_megatron.planning.lengths import IndexFile

_CHUNK: Final = 1 << 22
"""Documents that are looked at together."""


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """A data set whose index and data file agree. Counts of sequences, tokens and bytes.

    ``without_target``: sequences of fewer than two tokens, the ``empty_sequences`` of none included.
    ``empty_documents``: documents of no sequence.
    """

    index: str
    token_type: str
    sequences: int
    documents: int
    tokens: int
    num_bytes: int
    shortest: int
    longest: int
    empty_sequences: int
    without_target: int
    empty_documents: int


def check_data(index: IndexFile) -> DataSummary:
    """Hold an index against itself and its data file; ``ValueError`` names the first entry that is wrong."""
    itemsize = index.token_dtype.itemsize
    end, shortest, longest, empty, without_target = 0, np.iinfo(np.int64).max, 0, 0, 0
    for first, lengths, pointers in index.chunks():
        negative = np.flatnonzero(lengths < 0)
        if len(negative):
            at = int(negative[0])
            raise ValueError(f"{index.path}: sequence {first + at} has length {lengths[at]}")
        ends = end + np.cumsum(lengths * itemsize)
        wrong = np.flatnonzero(pointers != ends - lengths * itemsize)
        if len(wrong):
            at = int(wrong[0])
            expected = int(ends[at] - lengths[at] * itemsize)
            raise ValueError(
                f"{index.path}: sequence {first + at} should start at byte {expected:,}, where those before it end, "
                f"but its pointer is {pointers[at]:,}"
            )
        end = int(ends[-1])
        shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
        empty += int((lengths == 0).sum())
        without_target += int((lengths < 2).sum())
    sequences = len(index.lengths)
    empty_documents = _check_boundaries(index, sequences)
    _check_size(index, end)
    return DataSummary(
        index=str(index.path),
        token_type=index.token_dtype.name,
        sequences=sequences,
        documents=len(index.boundaries) - 1,
        tokens=end // itemsize,
        num_bytes=end,
        shortest=int(shortest) if sequences else 0,
        longest=longest,
        empty_sequences=empty,
        without_target=without_target,
        empty_documents=empty_documents,
    )


def _check_boundaries(index: IndexFile, sequences: int) -> int:
    """Documents must cover the sequences in order; returns how many hold none."""
    boundaries = index.boundaries
    if not len(boundaries) or boundaries[0] != 0 or boundaries[-1] != sequences:
        shown = f"from {boundaries[0]} to {boundaries[-1]}" if len(boundaries) else "no sequence"
        raise ValueError(f"{index.path}: documents cover {shown}, but there are {sequences:,} sequences")
    empty = 0
    for start in range(0, len(boundaries), _CHUNK):
        sizes = np.diff(boundaries[start : start + _CHUNK + 1])
        falling = np.flatnonzero(sizes < 0)
        if len(falling):
            at = start + int(falling[0])
            raise ValueError(
                f"{index.path}: document {at} begins at sequence {boundaries[at]} and ends before it, at "
                f"{boundaries[at + 1]}"
            )
        empty += int((sizes == 0).sum())
    return empty


def _check_size(index: IndexFile, end: int) -> None:
    try:
        size = index.data_path.stat().st_size
    except OSError as error:
        raise ValueError(f"{index.data_path}: {error.strerror}") from None
    if size > end:
        raise ValueError(
            f"{index.data_path}: {size - end:,} bytes lie behind the last sequence of {index.path.name}, which ends at byte "
            f"{end:,} of {size:,}: the two files do not belong together"
        )
    if size < end:
        for first, lengths, pointers in index.chunks():
            cut = np.flatnonzero(pointers + lengths * index.token_dtype.itemsize > size)
            if len(cut):
                raise ValueError(
                    f"{index.data_path}: the file is cut off: it has {size:,} of {end:,} bytes, and sequence "
                    f"{first + int(cut[0])} is the first that cannot be read"
                )
