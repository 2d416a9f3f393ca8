"""How long the sequences of a data set are: counted from its index, from a list, or drawn from a distribution.

Length is the number of input positions: a document of L tokens has L - 1. Counters are 64-bit throughout. Nothing here
reads a token or knows a strategy; choosing strategies, simulating runs and ``hotspa data`` start from it.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hotspa_megatron.strict_yaml import shown

Lengths: TypeAlias = NDArray[np.int64]

WIKIPEDIA_QUANTILES: Final = (
    *((0, 1), (0.0005, 12), (0.002, 22), (0.01, 38), (0.03, 55), (0.06, 71), (0.1, 86), (0.15, 101), (0.2, 120)),
    *((0.25, 144), (0.3, 169), (0.35, 203), (0.4, 241), (0.45, 287), (0.5, 344), (0.55, 408), (0.6, 469), (0.65, 552)),
    *((0.7, 683), (0.75, 859), (0.8, 1089), (0.85, 1459), (0.9, 2097), (0.925, 2692), (0.95, 3715), (0.965, 4811)),
    *((0.975, 6019), (0.985, 8539), (0.99, 10800), (0.993, 13007), (0.996, 17510), (0.998, 25627), (0.999, 37188)),
    *((0.9995, 50861), (0.9999, 98679), (1, 269427)),
)
"""(share of documents, length at most) of English Wikipedia, over 200,000 documents.

Source: the document lengths that PKU-DAIR/Hetu-Galvatron publishes with FlexSP (branch flexsp, Apache-2.0).
"""

_SIZE: Final = 100_000
"""Sequences that stand for a distribution."""
_LOGNORMAL: Final = re.compile(
    r"lognormal:mean=([0-9]{1,9}(?:\.[0-9]+)?),sigma=([0-9]{1,3}(?:\.[0-9]+)?),max=([0-9]{1,12})(?:,min=([0-9]{1,12}))?"
)
_LONGEST: Final = 2**31 - 1
"""Tokens of a sequence that an index can hold."""
_LONGEST_LINE: Final = 1000
"""Characters of a line of a list of lengths, white space included."""
_CHUNK: Final = 1 << 22
"""Entries of an index that are looked at together, so that one larger than memory can be read."""


@dataclass(frozen=True, kw_only=True)
class GroupShare:
    """What one length group holds: lengths in (``lower``, ``upper``], ``upper`` None without a limit."""

    lower: int
    upper: int | None
    sequences: int
    tokens: int
    sequence_share: float
    token_share: float


@dataclass(frozen=True, eq=False)
class LengthHistogram:
    """How many sequences there are of each length. Never empty.

    ``lengths``: input positions, distinct, ascending, each at least 1. ``counts``: sequences of each, at least 1. Both int64.
    """

    lengths: Lengths
    counts: Lengths

    def __post_init__(self) -> None:
        if not len(self.lengths):
            raise ValueError("there are no sequences to count")
        if self.lengths[0] < 1:
            raise ValueError(f"a length is {self.lengths[0]}; a sequence has at least one token")

    # -------------------------------------------------------------------------------------------------------- where from

    @classmethod
    def of(cls, lengths: ArrayLike) -> LengthHistogram:
        """Count a list of lengths; ``ValueError`` where one is not a whole number of at least 1."""
        given = np.asarray(lengths)
        if given.size and given.dtype.kind not in "iu":
            raise ValueError(f"lengths must be whole numbers, not {given.dtype}")
        return cls(*_counted(given.reshape(-1)))

    @classmethod
    def from_index(cls, prefix: str | Path) -> LengthHistogram:
        """Count the documents of ``PREFIX.idx``; one of fewer than two tokens has no target and is left out."""
        index = read_index(prefix)
        lengths, counts = _counted(index.lengths)
        if len(lengths) and lengths[0] < 0:
            raise ValueError(f"{index.path}: a sequence has length {lengths[0]}")
        if not (lengths >= 2).any():
            raise ValueError(f"{index.path}: no document has two tokens or more, so there is nothing to train on")
        return cls(lengths[lengths >= 2] - 1, counts[lengths >= 2])

    @classmethod
    def from_text(cls, path: str | Path) -> LengthHistogram:
        """Count a file of one length per line; blank lines do not count."""
        lengths = array("q")
        for number, line in enumerate(_lines(Path(path)), 1):
            text = line.strip()
            if not text and len(line) < _LONGEST_LINE:
                continue
            if not (
                text.isascii() and text.isdigit() and len(text) <= len(str(_LONGEST)) and 0 < int(text) <= _LONGEST
            ):
                raise ValueError(
                    f"{path}:{number}: {text[:40]!r} is not a length; write one whole number from 1 to {_LONGEST}"
                )
            lengths.append(int(text))
        if not lengths:
            raise ValueError(f"{path}: the file holds no lengths")
        return cls.of(np.frombuffer(lengths, np.int64))

    @classmethod
    def lognormal(
        cls, *, mean: float, sigma: float, minimum: int = 1, maximum: int, size: int = _SIZE
    ) -> LengthHistogram:
        """``size`` sequences whose logarithm is normal; ``mean`` in tokens, of what is not yet clipped to the limits."""
        if not (mean > 0 and sigma >= 0 and 1 <= minimum <= maximum and size >= 1):
            raise ValueError(
                f"a lognormal of mean {mean:g}, sigma {sigma:g}, from {minimum} to {maximum}, {size} sequences: mean must be "
                "above 0, sigma at least 0, and 1 <= minimum <= maximum"
            )
        centre = np.log(mean) - sigma**2 / 2
        normal = statistics.NormalDist()
        deviations = np.array([normal.inv_cdf(share) for share in _middles(size)])
        # Clipped before exp: a large sigma would overflow there.
        logs = np.clip(centre + sigma * deviations, np.log(minimum), np.log(maximum))
        return cls.of(np.clip(np.rint(np.exp(logs)), minimum, maximum).astype(np.int64))

    @classmethod
    def from_quantiles(cls, points: Sequence[tuple[float, float]], *, size: int = _SIZE) -> LengthHistogram:
        """``size`` sequences from (share of sequences, length at most), shares from 0 to 1; geometric in between."""
        shares, lengths = [float(share) for share, _ in points], [float(length) for _, length in points]
        rising = all(one < two for one, two in itertools.pairwise(shares))
        if len(points) < 2 or shares[0] != 0 or shares[-1] != 1 or not rising:
            raise ValueError(
                f"the shares of quantiles must rise from 0 to 1, not {', '.join(f'{s:g}' for s in shares)}"
            )
        if lengths[0] < 1 or lengths != sorted(lengths):
            raise ValueError(f"quantiles must not fall, from at least 1: {', '.join(f'{n:g}' for n in lengths)}")
        drawn = np.exp(np.interp(_middles(size), shares, np.log(lengths)))
        return cls.of(np.rint(drawn).astype(np.int64))

    @classmethod
    def wikipedia(cls, *, size: int = _SIZE) -> LengthHistogram:
        """English Wikipedia: half of the documents below 345 tokens, 1 % above 10,800."""
        return cls.from_quantiles(WIKIPEDIA_QUANTILES, size=size)

    @classmethod
    def named(cls, text: str) -> LengthHistogram:
        """What a command line names: wikipedia, lognormal:mean=M,sigma=S,max=N[,min=N], PREFIX of an index, or a list.

        ``ValueError`` says what was expected.
        """
        if text == "wikipedia":
            return cls.wikipedia()
        if match := _LOGNORMAL.fullmatch(text):
            mean, sigma, maximum, minimum = match.groups()
            return cls.lognormal(mean=float(mean), sigma=float(sigma), maximum=int(maximum), minimum=int(minimum or 1))
        # os.path, because pathlib's own raises for names that are too long.
        if os.path.exists(index_path(text)):
            return cls.from_index(text)
        if os.path.exists(text):
            return cls.from_text(text)
        raise ValueError(
            f"{shown(text)} names no lengths: there is neither such a file nor an index {shown(str(index_path(text)))}, and it "
            "is neither wikipedia nor lognormal:mean=1000,sigma=1.5,max=32768"
        )

    # ------------------------------------------------------------------------------------------------------- what it says

    @property
    def sequences(self) -> int:
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        return int((self.lengths * self.counts).sum())

    @property
    def longest(self) -> int:
        return int(self.lengths[-1])

    @property
    def mean(self) -> float:
        return self.tokens / self.sequences

    def quantile(self, share: float) -> int:
        """The least length that at least this share (0 to 1) of the sequences do not exceed."""
        if not 0 <= share <= 1:
            raise ValueError(f"a quantile is asked for by a share from 0 to 1, not {share:g}")
        within = np.cumsum(self.counts)
        return int(self.lengths[min(int(np.searchsorted(within, share * self.sequences)), len(within) - 1)])

    def shares(self, limits: Iterable[int]) -> tuple[GroupShare, ...]:
        """Length groups with these upper limits, ascending, and one more for what is longer than the last."""
        bounds = list(limits)
        if bounds != sorted(set(bounds)) or (bounds and bounds[0] < 1):
            raise ValueError(f"length groups must rise from at least 1: {', '.join(map(str, bounds))}")
        groups = []
        for lower, upper in zip([0, *bounds], [*bounds, None], strict=True):
            inside = slice(
                int(np.searchsorted(self.lengths, lower, "right")),
                len(self.lengths) if upper is None else int(np.searchsorted(self.lengths, upper, "right")),
            )
            sequences = int(self.counts[inside].sum())
            tokens = int((self.lengths[inside] * self.counts[inside]).sum())
            groups.append(
                GroupShare(
                    lower=lower,
                    upper=upper,
                    sequences=sequences,
                    tokens=tokens,
                    sequence_share=sequences / self.sequences,
                    token_share=tokens / self.tokens,
                )
            )
        return tuple(groups)

    def limited(self, limit: int, overlong: Literal["split", "truncate", "drop"] = "truncate") -> LengthHistogram:
        """The sequences as they train with --seq-length ``limit``, by the rule of that name for longer ones.

        split: pieces of ``limit`` and what is left. ``ValueError`` where dropping leaves none.
        """
        if limit < 1:
            raise ValueError(f"a limit of {limit} tokens leaves nothing; it is at least 1")
        fits = self.lengths <= limit
        lengths, counts = [self.lengths[fits]], [self.counts[fits]]
        over, times = self.lengths[~fits], self.counts[~fits]
        if overlong == "drop" and not fits.any():
            raise ValueError(f"every sequence is longer than {limit} tokens, so dropping those leaves none")
        if len(over) and overlong == "truncate":
            lengths.append(np.array([limit], np.int64))
            counts.append(np.array([times.sum()], np.int64))
        elif len(over) and overlong == "split":
            whole, rest = np.divmod(over, limit)
            lengths += [np.array([limit], np.int64), rest[rest > 0]]
            counts += [np.array([(whole * times).sum()], np.int64), times[rest > 0]]
        return LengthHistogram(*_merged(np.concatenate(lengths), np.concatenate(counts)))

    def sample(self, count: int, *, seed: int) -> Lengths:
        """``count`` lengths drawn with replacement: the same for the same seed, on any machine and numpy release."""
        # Raw output of a bit generator is stable between releases, that of numpy's distributions is not promised to be.
        # The remainder's bias is below the number of sequences / 2**64.
        raw = np.random.PCG64(seed).random_raw(count)
        drawn = (raw % np.uint64(self.sequences)).astype(np.int64)
        return self.lengths[np.searchsorted(np.cumsum(self.counts), drawn, "right")]


def _middles(size: int) -> NDArray[np.float64]:
    """Shares in the middle of ``size`` equal parts of 0 to 1."""
    return (np.arange(size) + 0.5) / size


def _counted(lengths: NDArray[np.integer]) -> tuple[Lengths, Lengths]:
    """Distinct values, ascending, and how often each occurs."""
    found, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for start in range(0, len(lengths), _CHUNK):
        values, times = np.unique(lengths[start : start + _CHUNK], return_counts=True)
        found.append(values.astype(np.int64))
        counts.append(times.astype(np.int64))
    return _merged(np.concatenate(found), np.concatenate(counts))


def _merged(lengths: Lengths, counts: Lengths) -> tuple[Lengths, Lengths]:
    """Add up the counts of equal lengths."""
    distinct, where = np.unique(lengths, return_inverse=True)
    total = np.zeros(len(distinct), np.int64)
    np.add.at(total, where, counts)
    return distinct, total


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            # Bounded, because a file of another kind may be one line without end.
            while line := file.readline(_LONGEST_LINE):
                yield line
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


# ------------------------------------------------------------------------------------------------ Megatron's index files

_HEADER: Final = struct.Struct("<9sQBQQ")
"""Magic, version, code of the token dtype, number of sequences, number of document boundaries."""
_MAGIC: Final = b"MMIDIDX\x00\x00"
_TOKEN_DTYPES: Final = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


@dataclass(frozen=True, eq=False)
class IndexFile:
    """A Megatron index, mapped into memory as it stands in the file; only the sizes of its parts have been checked.

    ``lengths``: tokens of each sequence. ``pointers``: where each starts in the .bin, in bytes. ``boundaries``: the
    sequence at which each document starts, and the end of the last. ``has_modes``: a mode per sequence follows
    (multimodal data).
    """

    path: Path
    token_dtype: np.dtype[np.generic]
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    boundaries: NDArray[np.int64]
    has_modes: bool

    @property
    def data_path(self) -> Path:
        return self.path.with_suffix(".bin")

    def chunks(self) -> Iterator[tuple[int, Lengths, Lengths]]:
        """(first sequence, lengths, pointers) of consecutive runs of sequences."""
        for start in range(0, len(self.lengths), _CHUNK):
            stop = start + _CHUNK
            yield start, self.lengths[start:stop].astype(np.int64), self.pointers[start:stop].astype(np.int64)


def index_path(prefix: str | Path) -> Path:
    """The index of a data set, named by its prefix or by either of its files."""
    path = Path(prefix)
    return path.with_suffix(".idx") if path.suffix in (".idx", ".bin") else path.parent / f"{path.name}.idx"


def read_index(prefix: str | Path) -> IndexFile:
    """Open ``PREFIX.idx``, given with or without its .idx or .bin; ``ValueError`` where it is not a whole index."""
    path = index_path(prefix)
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
        size = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if header[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{path}: this is not an index of Megatron's: it does not begin with MMIDIDX")
    if len(header) < _HEADER.size:
        raise ValueError(f"{path}: the file ends within its header, after {size} of {_HEADER.size} bytes")
    _, version, code, sequences, boundaries = _HEADER.unpack(header)
    if version != 1:
        raise ValueError(f"{path}: version {version} of the format; version 1 is known")
    if code not in _TOKEN_DTYPES:
        raise ValueError(f"{path}: code {code} for the type of a token; codes are 1 to {max(_TOKEN_DTYPES)}")
    needed = _HEADER.size + 12 * sequences + 8 * boundaries
    if size not in (needed, needed + sequences):
        difference = (
            f"{needed - size:,} bytes are missing" if size < needed else f"{size - needed:,} bytes are too many"
        )
        raise ValueError(
            f"{path}: {sequences:,} sequences and {boundaries:,} document boundaries take {needed:,} bytes, "
            f"the file has {size:,}: {difference}"
        )
    whole = np.memmap(path, mode="r", dtype=np.uint8)
    lengths_end = _HEADER.size + 4 * sequences
    pointers_end = lengths_end + 8 * sequences
    return IndexFile(
        path=path,
        token_dtype=np.dtype(_TOKEN_DTYPES[code]),
        lengths=whole[_HEADER.size : lengths_end].view("<i4"),
        pointers=whole[lengths_end:pointers_end].view("<i8"),
        boundaries=whole[pointers_end:needed].view("<i8"),
        has_modes=sequences > 0 and size > needed,
    )
