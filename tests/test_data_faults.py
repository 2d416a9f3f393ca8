"""Data that is missing, cut short or corrupt ends the job on all ranks with one clear message.

What can be known beforehand is, before any process group exists; what only a read token shows ends the rank that reads it,
and with it the others, none of which may be left waiting for it.
"""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.hooks.samples import CheckedSamples, Corpus, Documents, Piece, Source, check_index
from hotspa_megatron.planning.sample_order import SampleOrder
from tests.test_lengths import write_index
from tests.training import (
    DP4,
    GUEST_AND_SIBLING,
    PIPELINED_GUEST,
    SEED,
    STATIC,
    TP2_CP2,
    Home,
    Job,
    arguments,
    corpus,
    train,
)

# ------------------------------------------------------------------------------------------------- before anything starts


def _edited(path: Path, edit: Callable[[bytearray], Any]) -> None:
    data = bytearray(path.read_bytes())
    edit(data)
    path.write_bytes(data)


def _put(path: Path, at: int, value: int, dtype: type[np.signedinteger[Any]]) -> None:
    data = np.array([value], dtype).tobytes()
    _edited(path, lambda old: old.__setitem__(slice(at, at + len(data)), data))


# Where the parts of an index of three sequences begin: a header, 4 bytes per length, 8 per pointer, 8 per boundary.
_LENGTHS, _POINTERS, _BOUNDARIES = 34, 34 + 3 * 4, 34 + 3 * 12

FAULTS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "no index": (lambda idx, data: idx.unlink(), r"\.idx: No such file"),
    "no data": (lambda idx, data: data.unlink(), r"\.bin: No such file"),
    "empty index": (lambda idx, data: idx.write_bytes(b""), r"\.idx: this is not an index of Megatron's"),
    "index cut short": (lambda idx, data: os.truncate(idx, 60), r"\.idx: 3 sequences .* bytes are missing"),
    "data cut short": (
        lambda idx, data: os.truncate(data, 31),
        r"\.bin: the file is cut off: it has 31 of 32 bytes, and sequence 2 is the first that cannot be read",
    ),
    "another header": (lambda idx, data: _put(idx, 0, 0, np.int8), r"\.idx: this is not an index"),
    "negative length": (lambda idx, data: _put(idx, _LENGTHS, -5, np.int32), r"\.idx: sequence 0 has length -5"),
    "pointer behind the data": (
        lambda idx, data: _put(idx, _POINTERS + 8, 1 << 40, np.int64),
        r"\.idx: sequence 1 should start at byte 10, .* but its pointer is 1,099,511,627,776",
    ),
    "negative pointer": (
        lambda idx, data: _put(idx, _POINTERS + 8, -2, np.int64),
        r"\.idx: sequence 1 should start at byte 10, .* pointer is -2",
    ),
    "data of another index": (
        lambda idx, data: data.write_bytes(bytes(40)),
        r"\.bin: 8 bytes lie behind the last sequence",
    ),
    "boundary": (
        lambda idx, data: _put(idx, _BOUNDARIES + 24, 2, np.int64),
        r"\.idx: documents cover from 0 to 2, but there are 3 sequences",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_index_and_its_data_are_held_against_each_other(tmp_path: Path, fault: str) -> None:
    prefix = write_index(tmp_path / "corpus", [5, 9, 2])
    check_index(str(prefix))
    break_it, message = FAULTS[fault]
    break_it(prefix.with_suffix(".idx"), prefix.with_suffix(".bin"))
    with pytest.raises(ValueError, match=message) as caught:
        check_index(str(prefix))
    assert "\n" not in str(caught.value)


def test_documents_without_a_token_are_fine_unless_there_is_nothing_else(tmp_path: Path) -> None:
    check_index(str(write_index(tmp_path / "some", [0, 3, 0])))
    for name, lengths in (("empty", [0, 0]), ("single", [1, 0, 1]), ("none", [])):
        with pytest.raises(ValueError, match=r"no document has two tokens or more, so there is nothing to train on"):
            check_index(str(write_index(tmp_path / name, lengths)))


def _copy(tmp_path: Path, source: Path) -> Path:
    for suffix in (".bin", ".idx"):
        shutil.copy(source.with_suffix(suffix), tmp_path / f"documents{suffix}")
    return tmp_path / "documents"


def refusal(job: Job) -> str:
    """The last line of rank 0 of a job that must end before it trains."""
    with pytest.raises(AssertionError, match="SystemExit: 2") as caught:
        train(job)
    first_rank = str(caught.value).split("---- rank ")[1]
    return [line for line in first_rank.splitlines() if line.startswith("hotspa: ")][-1].removeprefix("hotspa: ")


@pytest.mark.parametrize(
    ("fault", "message"),
    [("data cut short", "documents.bin: the file is cut off: it has 31 of"), ("no index", "No such")],
)
def test_a_job_with_such_data_does_not_start(tmp_path: Path, fault: str, message: str) -> None:
    prefix = _copy(tmp_path, corpus())
    FAULTS[fault][0](prefix.with_suffix(".idx"), prefix.with_suffix(".bin"))
    line = refusal(Job(arguments(documents=prefix), STATIC, ranks=2, before=_no_process_group))
    assert message in line and str(prefix) in line


def _no_process_group() -> None:
    import torch.distributed as dist

    Patches().set(dist, "init_process_group", lambda *_, **__: pytest.fail("a process group was made"))


# ---------------------------------------------------------------------------------------------------------- read tokens


class _Tokens:
    """An indexed dataset of one document."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = np.array(tokens)

    def get(self, index: int, offset: int = 0, length: int = 0) -> Any:
        return np.frombuffer(self._tokens.data, dtype=self._tokens.dtype, count=length, offset=8 * offset)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ((3, 8, 2), None),
        ((3, -1, 2), None),  # padding, which the embedding never sees
        ((3, 9, 2), r"document 4 of corpus has token id 9; the model's vocabulary has 9 ids, padding included"),
        ((3, 2, 9), "token id 9"),
        ((3, -5, 2), "token id -5"),
        ((3, 2), r"document 4 of corpus cannot be read: buffer is smaller"),
    ],
)
def test_what_is_read_is_checked(tokens: tuple[int, ...], message: str | None) -> None:
    source = Source(_Tokens(*tokens), np.array([4]), np.array([3]), -1, name="corpus")
    samples = CheckedSamples(
        Documents(Corpus((source,), (1.0,), None), seed=1, seq_length=8, overlong="split"), vocabulary=9
    )
    (piece,) = samples.pieces(0, 1)
    assert piece == Piece(0, 0, 0, 2)
    if message is None:
        assert samples.text(piece).inputs.tolist() == [3, max(tokens[1], 0)]
    else:
        with pytest.raises(ValueError, match=message):
            samples.text(piece)


def _end_as_processes_do() -> None:
    """Have a failing rank's process end at once, as it does outside of tests: that is all that its peers see of it."""
    from hotspa_megatron.hooks.forward_backward import StepRunner

    run = StepRunner.run

    def run_or_end(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    Patches().set(StepRunner, "run", run_or_end)


@pytest.mark.parametrize(
    ("home", "config", "reading"),
    [(DP4, STATIC, 1), (TP2_CP2, GUEST_AND_SIBLING, 1), (DP4, PIPELINED_GUEST, 2)],
    ids=["home", "a guest", "a pipelined guest"],
)
def test_a_corrupt_sample_that_one_rank_reads_ends_all(tmp_path: Path, home: Home, config: str, reading: int) -> None:
    prefix = _copy(tmp_path, corpus((30,) * 40))
    # The first document of the second step; its tokens are two bytes each.
    ((_, document),) = SampleOrder([40], [1.0], SEED).samples(8, 1)
    _put(prefix.with_suffix(".bin"), (30 * document + 11) * 2, 4000, np.int16)
    line = arguments(
        *home.flags, "--split", "100,0,0", tp=home.tp, cp=home.cp, pp=home.pp, iterations=3, batch=8, documents=prefix
    )
    with pytest.raises(AssertionError) as caught:
        train(Job(line, config, before=_end_as_processes_do))
    told = str(caught.value)
    # After the first end the others have GRACE_SECONDS to end by themselves: none waits for what will not come.
    assert told.count("died without a traceback, exit code 1") == 4
    # Only who reads the document speaks of it; a later pipeline stage waits for what it would read it with.
    problem = f"document {document} of {prefix} has token id 4000; the model's vocabulary has 128 ids"
    assert told.count(f"ValueError: {problem}") == reading
