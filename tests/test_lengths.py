"""Length histograms: counts, shares and samples from every source, in 64 bits; index files read without Megatron."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_megatron.planning import lengths as module
from hotspa_megatron.planning.lengths import LengthHistogram, read_index

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
OPENWEBTEXT = SHARED / "openwebtext_1k"
WIKIPEDIA = SHARED / "wikipedia_lengths_200k.npy"

some_lengths = st.lists(st.integers(1, 500), min_size=1, max_size=80)


def write_index(
    prefix: Path,
    lengths: Sequence[int],
    *,
    code: int = 8,
    itemsize: int = 2,
    boundaries: Sequence[int] | None = None,
    data: bool = True,
) -> Path:
    """Write ``prefix.idx`` and, unless told otherwise, ``prefix.bin`` as Megatron's builder does."""
    pointers = np.concatenate(([0], np.cumsum(np.array(lengths, np.int64) * itemsize)))
    marks = range(len(lengths) + 1) if boundaries is None else boundaries
    prefix.with_name(prefix.name + ".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, code, len(lengths), len(marks))
        + np.array(lengths, np.int32).tobytes()
        + pointers[:-1].astype(np.int64).tobytes()
        + np.array(marks, np.int64).tobytes()
    )
    if data:
        prefix.with_name(prefix.name + ".bin").write_bytes(bytes(int(pointers[-1])))
    return prefix


# ------------------------------------------------------------------------------------------------------------ contents


@settings(max_examples=100, deadline=None)
@given(lengths=some_lengths, limits=st.sets(st.integers(1, 600), max_size=5))
def test_shares_add_up_to_the_whole(lengths: list[int], limits: set[int]) -> None:
    histogram = LengthHistogram.of(lengths)
    assert (histogram.sequences, histogram.tokens, histogram.longest) == (len(lengths), sum(lengths), max(lengths))
    groups = histogram.shares(sorted(limits))
    assert len(groups) == len(limits) + 1
    for group in groups:
        inside = [n for n in lengths if group.lower < n and (group.upper is None or n <= group.upper)]
        assert (group.sequences, group.tokens) == (len(inside), sum(inside))
    assert sum(group.sequence_share for group in groups) == pytest.approx(1)
    assert sum(group.token_share for group in groups) == pytest.approx(1)


@settings(max_examples=100, deadline=None)
@given(lengths=some_lengths, share=st.floats(0, 1))
def test_quantiles_are_numpys(lengths: list[int], share: float) -> None:
    assert LengthHistogram.of(lengths).quantile(share) == np.quantile(lengths, share, method="inverted_cdf")


@settings(max_examples=100, deadline=None)
@given(lengths=some_lengths, limit=st.integers(1, 600))
def test_splitting_keeps_every_token_and_the_other_rules_say_what_they_lose(lengths: list[int], limit: int) -> None:
    histogram = LengthHistogram.of(lengths)
    pieces = [min(limit, n - start) for n in lengths for start in range(0, n, limit)]
    assert same(histogram.limited(limit, "split"), LengthHistogram.of(pieces))
    assert same(histogram.limited(limit, "truncate"), LengthHistogram.of([min(limit, n) for n in lengths]))
    kept = [n for n in lengths if n <= limit]
    if kept:
        assert same(histogram.limited(limit, "drop"), LengthHistogram.of(kept))
    else:
        with pytest.raises(ValueError, match="every sequence is longer"):
            histogram.limited(limit, "drop")


def same(one: LengthHistogram, other: LengthHistogram) -> bool:
    return bool(np.array_equal(one.lengths, other.lengths) and np.array_equal(one.counts, other.counts))


def test_the_comparison_can_fail() -> None:
    assert not same(LengthHistogram.of([1, 2]), LengthHistogram.of([1, 1, 2]))
    assert not same(LengthHistogram.of([1, 2]), LengthHistogram.of([1, 3]))


def test_samples_repeat_and_follow_the_counts() -> None:
    histogram = LengthHistogram.of([5] * 30 + [7] * 60 + [9] * 10)
    drawn = histogram.sample(20_000, seed=1)
    assert drawn.dtype == np.int64
    assert [float((drawn == n).mean()) for n in (5, 7, 9)] == pytest.approx([0.3, 0.6, 0.1], abs=0.015)
    assert np.array_equal(drawn, histogram.sample(20_000, seed=1))
    assert not np.array_equal(drawn, histogram.sample(20_000, seed=2))
    # In figures, so that another numpy or machine cannot change them unseen.
    assert LengthHistogram.of(range(1, 101)).sample(8, seed=0).tolist() == [72, 18, 25, 34, 72, 95, 8, 58]


def test_counters_have_64_bits(tmp_path: Path) -> None:
    long = 2**30
    histogram = LengthHistogram.of(np.array([long] * 3, np.int32))
    assert histogram.tokens == 3 * 2**30
    assert histogram.limited(3 * 2**10, "split").tokens == 3 * 2**30
    huge = LengthHistogram(np.array([2**31 - 1]), np.array([2**31]))
    assert huge.tokens == (2**31 - 1) * 2**31
    assert huge.shares([100])[1].tokens == huge.tokens
    assert huge.sample(3, seed=0).tolist() == [2**31 - 1] * 3
    write_index(tmp_path / "long", [long] * 3, code=4, itemsize=4, data=False)
    index = read_index(tmp_path / "long")
    assert index.pointers.tolist() == [0, 2**32, 2**33]
    assert LengthHistogram.from_index(tmp_path / "long").tokens == 3 * (2**30 - 1)


# -------------------------------------------------------------------------------------------------------- distributions


def test_wikipedias_quantiles_are_built_in() -> None:
    wikipedia = LengthHistogram.wikipedia()
    assert wikipedia.sequences == 100_000
    assert wikipedia.quantile(0.5) == pytest.approx(344, rel=0.01)
    assert wikipedia.quantile(0.99) == pytest.approx(10_800, rel=0.01)
    assert wikipedia.mean == pytest.approx(1_003, rel=0.02)


@pytest.mark.skipif(not WIKIPEDIA.exists(), reason="needs the lengths of 200,000 Wikipedia documents")
def test_wikipedias_quantiles_are_near_the_documents_themselves() -> None:
    real = LengthHistogram.of(np.maximum(np.load(WIKIPEDIA).astype(np.int64) - 1, 1))
    built_in = LengthHistogram.wikipedia()
    for ours, theirs in zip(*(h.shares([128, 512, 2048, 4096, 8192, 32768]) for h in (built_in, real)), strict=True):
        assert ours.sequence_share == pytest.approx(theirs.sequence_share, abs=0.005)
        assert ours.token_share == pytest.approx(theirs.token_share, abs=0.01)


def test_quantiles_are_met_where_they_are_given() -> None:
    histogram = LengthHistogram.from_quantiles([(0, 10), (0.5, 100), (1, 1000)], size=10_001)
    assert histogram.quantile(0.5) == 100
    assert histogram.lengths[0] == 10
    assert histogram.longest == 1000
    assert histogram.quantile(0.25) == pytest.approx(10**1.5, abs=1)


def test_a_lognormal_has_its_mean_its_spread_and_its_limits() -> None:
    wide = LengthHistogram.lognormal(mean=1000, sigma=0.5, maximum=10**6)
    assert wide.mean == pytest.approx(1000, rel=0.01)
    assert wide.quantile(0.5) == pytest.approx(1000 * np.exp(-0.125), rel=0.01)
    clipped = LengthHistogram.lognormal(mean=1000, sigma=3, minimum=64, maximum=4096)
    assert (clipped.lengths[0], clipped.longest) == (64, 4096)
    assert LengthHistogram.lognormal(mean=100, sigma=0, maximum=200).lengths.tolist() == [100]
    assert LengthHistogram.lognormal(mean=100, sigma=400, maximum=2**40, size=10).longest <= 2**40


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LengthHistogram.of([]), "no sequences"),
        (lambda: LengthHistogram.of([0, 3]), "a length is 0"),
        (lambda: LengthHistogram.of([1.5]), "whole numbers"),
        (lambda: LengthHistogram.lognormal(mean=0, sigma=1, maximum=9), "mean must be above 0"),
        (lambda: LengthHistogram.lognormal(mean=9, sigma=1, minimum=9, maximum=8), "minimum <= maximum"),
        (lambda: LengthHistogram.from_quantiles([(0, 1)]), "from 0 to 1"),
        (lambda: LengthHistogram.from_quantiles([(0, 1), (0.9, 5)]), "from 0 to 1"),
        (lambda: LengthHistogram.from_quantiles([(0, 5), (1, 4)]), "must not fall"),
        (lambda: LengthHistogram.from_quantiles([(0, 0), (1, 4)]), "from at least 1"),
        (lambda: LengthHistogram.of([1]).quantile(1.1), "0 to 1"),
        (lambda: LengthHistogram.of([1]).shares([5, 5]), "must rise"),
        (lambda: LengthHistogram.of([1]).shares([0]), "must rise"),
        (lambda: LengthHistogram.of([1]).limited(0), "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


# ---------------------------------------------------------------------------------------------------------------- files


def test_a_list_of_lengths_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("5\n\n 7 \n5")
    assert same(LengthHistogram.from_text(path), LengthHistogram.of([5, 7, 5]))


@pytest.mark.parametrize("line", ["0", "-3", "1.5", "seven", "1 2", "9" * 30, "٣", "1_000"])
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(f"5\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"lengths\.txt:2: .* is not a length"):
        LengthHistogram.from_text(path)


def test_a_command_line_names_any_source(tmp_path: Path) -> None:
    prefix = write_index(tmp_path / "data", [5, 9])
    (tmp_path / "list.txt").write_text("4\n8\n")
    for name in (prefix, f"{prefix}.bin", tmp_path / "list.txt"):
        assert same(LengthHistogram.named(str(name)), LengthHistogram.of([4, 8]))
    assert same(LengthHistogram.named("wikipedia"), LengthHistogram.wikipedia())
    named = LengthHistogram.named("lognormal:mean=90.5,sigma=1.5,max=400,min=7")
    assert same(named, LengthHistogram.lognormal(mean=90.5, sigma=1.5, minimum=7, maximum=400))
    for wrong in ("lognormal:mean=1", "lognormal:mean=1,sigma=1,max=1.5", "lognormal:mean=1,sigma=1,max=5,", "nothing"):
        with pytest.raises(ValueError, match="names no lengths"):
            LengthHistogram.named(wrong)


def test_files_without_lengths_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="holds no lengths"):
        LengthHistogram.from_text(tmp_path / "empty")
    with pytest.raises(ValueError, match="No such file"):
        LengthHistogram.from_text(tmp_path / "none")
    with pytest.raises(ValueError, match="no document has two tokens"):
        LengthHistogram.from_index(write_index(tmp_path / "short", [0, 1, 1]))
    with pytest.raises(ValueError, match="no document has two tokens"):
        LengthHistogram.from_index(write_index(tmp_path / "none", []))
    with pytest.raises(ValueError, match="a sequence has length -4"):
        LengthHistogram.from_index(write_index(tmp_path / "negative", [5, -4], data=False))


@pytest.mark.parametrize("chunk", [1, 3, 1 << 22])
@pytest.mark.parametrize("suffix", ["", ".idx", ".bin"])
def test_documents_of_an_index_count_their_input_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, chunk: int
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    prefix = write_index(tmp_path / "some.documents", [5, 0, 1, 9, 2, 5])
    histogram = LengthHistogram.from_index(f"{prefix}{suffix}")
    assert (histogram.lengths.tolist(), histogram.counts.tolist()) == ([1, 4, 8], [1, 2, 1])


@pytest.mark.skipif(not OPENWEBTEXT.with_suffix(".idx").exists(), reason="needs 1,000 documents of OpenWebText")
def test_a_real_index_is_read() -> None:
    index = read_index(OPENWEBTEXT)
    assert (index.token_dtype, len(index.lengths), len(index.boundaries)) == (np.dtype("u2"), 1000, 1001)
    histogram = LengthHistogram.from_index(OPENWEBTEXT)
    assert histogram.tokens == 1_361_845 - 1000
    assert (histogram.lengths[0], histogram.longest) == (193 - 1, 21_809 - 1)
    below, _, _ = histogram.shares([511, 1023])
    assert below.sequence_share == pytest.approx(0.25, abs=0.01)
    assert below.token_share == pytest.approx(0.067, abs=0.003)


def test_an_index_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    prefix = write_index(tmp_path / "data", [5, 9, 2])
    path = tmp_path / "data.idx"
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"data\.idx: (the file ends within its header|.*are missing|this is not)"):
            read_index(prefix)
    path.write_bytes(whole + bytes(3))
    assert read_index(prefix).has_modes  # a mode for each of the three sequences
    path.write_bytes(whole + bytes(4))
    with pytest.raises(ValueError, match="4 bytes are too many"):
        read_index(prefix)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [(0, b"X", "not an index"), (9, b"\x02", "version 2"), (17, b"\x09", "code 9"), (25, b"\xff", "are missing")],
)
def test_a_header_that_is_wrong_is_refused(tmp_path: Path, at: int, value: bytes, message: str) -> None:
    prefix = write_index(tmp_path / "data", [5, 9, 2])
    path = tmp_path / "data.idx"
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + value + whole[at + 1 :])
    with pytest.raises(ValueError, match=message):
        read_index(prefix)


def test_a_missing_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing\.idx: No such file"):
        read_index(tmp_path / "nothing")
