"""``hotspa data``: figures of a data set, and one line with exit code 2 for every way in which it may be broken."""

from __future__ import annotations

import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hotspa_megatron.cli.main import main
from hotspa_megatron.planning import data_check
from hotspa_megatron.planning import lengths as lengths_module
from tests.test_lengths import OPENWEBTEXT, write_index

LENGTHS = [5, 0, 9, 1, 700, 2, 30]


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line on stderr with which a command ends; nothing on stdout."""
    assert main([str(argument) for argument in arguments]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("hotspa: ")
    assert written.err.count("\n") == 1
    return written.err


class HalfInstalled(types.ModuleType):
    def __getattr__(self, name: str) -> object:
        raise RuntimeError("numpy.core failed")


# ------------------------------------------------------------------------------------------------------------- lengths


def test_lengths_are_input_positions_by_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_index(tmp_path / "data", LENGTHS, data=False)
    assert main(["data", "lengths", str(prefix), "--groups", "4,64,512,4096", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert (described["sequences"], described["tokens"]) == (5, 4 + 8 + 699 + 1 + 29)
    assert (described["shortest"], described["longest"]) == (1, 699)
    assert described["quantiles"]["0.5"] == 8
    groups = [(group["lower"], group["upper"], group["sequences"], group["tokens"]) for group in described["groups"]]
    assert groups == [(0, 4, 2, 5), (4, 64, 2, 37), (64, 512, 0, 0), (512, 4096, 1, 699)]
    assert sum(group["token_share"] for group in described["groups"]) == pytest.approx(1)


def test_what_is_longer_than_the_last_group_is_shown_and_empty_groups_beyond_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = write_index(tmp_path / "data", LENGTHS, data=False)
    assert main(["data", "lengths", str(prefix), "--groups", "4,64"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {row[0]: row[1] for row in rows if len(row) >= 5 and row[0][0].isdigit() and "-" in row[0]}
    assert shown == {"1-4": "2", "5-64": "2", "65-": "1"}
    assert main(["data", "lengths", str(prefix)]) == 0
    assert "1,025" not in capsys.readouterr().out


def test_long_sequences_are_split_as_training_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_index(tmp_path / "data", LENGTHS, data=False)
    assert main(["data", "lengths", str(prefix), "--seq-length", "256", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    # 699 input positions are 256 + 256 + 187.
    assert (described["sequences"], described["tokens"], described["longest"]) == (7, 741, 256)


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_histogram_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"lengths.{kind}"
    for lengths in (LENGTHS, [2, 2]):
        prefix = write_index(tmp_path / "data", lengths, data=False)
        assert main(["data", "lengths", str(prefix), "--plot", str(path)]) == 0
        assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
        path.unlink()
    assert "sequences" in capsys.readouterr().out


def test_lengths_refuses_what_it_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_index(tmp_path / "data", LENGTHS, data=False)
    lengths = ("data", "lengths", prefix)
    assert "--groups: 'x' is not a list" in fails(capsys, *lengths, "--groups", "x")
    assert "--groups: 64,4 does not rise" in fails(capsys, *lengths, "--groups", "64,4")
    assert "--seq-length must be at least 1" in fails(capsys, *lengths, "--seq-length", "0")
    assert "remove what follows --" in fails(capsys, *lengths, "--", "--tensor-model-parallel-size", "2")
    assert "nothing.idx: No such file" in fails(capsys, "data", "lengths", tmp_path / "nothing")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in fails(capsys, *lengths, "--plot", tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", HalfInstalled("matplotlib.figure"))
    assert "matplotlib cannot be imported (numpy.core failed)" in fails(capsys, *lengths, "--plot", tmp_path / "x.png")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert "--plot: '' names no file" in fails(capsys, *lengths, "--plot", "")
    assert "--plot" in fails(capsys, *lengths, "--plot", tmp_path / "nowhere" / "x.png")
    assert "not supported" in fails(capsys, *lengths, "--plot", tmp_path / "x.nothing")


@pytest.mark.parametrize("words", [["data"], ["data", "lengths"], ["data", "check"]])
def test_help_has_an_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert len(words) == 1 or f"hotspa {' '.join(words)} data/my_text_document" in text


# --------------------------------------------------------------------------------------------------------------- check


def test_a_whole_data_set_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_index(tmp_path / "data", LENGTHS, code=4, itemsize=4, boundaries=[0, 2, 2, 6, 7])
    assert main(["data", "check", str(prefix), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "index": f"{prefix}.idx",
        "token_type": "int32",
        "sequences": 7,
        "documents": 4,
        "tokens": sum(LENGTHS),
        "num_bytes": 4 * sum(LENGTHS),
        "shortest": 0,
        "longest": 700,
        "empty_sequences": 1,
        "without_target": 2,
        "empty_documents": 1,
    }
    assert main(["data", "check", f"{prefix}.bin"]) == 0
    written = capsys.readouterr().out
    assert "7 sequences in 4 documents, 747 tokens of int32, 0 to 700 long" in written
    assert "2 sequences have fewer than two tokens, so no target (1 of them none at all)" in written
    assert "1 documents hold no sequence" in written


def test_an_empty_data_set_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(write_index(tmp_path / "data", []))]) == 0
    assert "0 sequences in 0 documents" in capsys.readouterr().out


@pytest.mark.parametrize("chunk", [1, 2, 1 << 22])
def test_every_fault_is_found_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(lengths_module, "_CHUNK", chunk)
    monkeypatch.setattr(data_check, "_CHUNK", chunk)
    prefix = write_index(tmp_path / "data", LENGTHS, boundaries=[0, 2, 5, 7])
    index, tokens = tmp_path / "data.idx", tmp_path / "data.bin"
    whole_index, whole_tokens = index.read_bytes(), tokens.read_bytes()
    lengths_at, pointers_at = 34, 34 + 4 * len(LENGTHS)
    boundaries_at = pointers_at + 8 * len(LENGTHS)

    def changed(at: int, value: np.integer) -> bytes:
        raw = value.tobytes()
        return whole_index[:at] + raw + whole_index[at + len(raw) :]

    faults: list[tuple[bytes, bytes, str]] = [
        (changed(lengths_at + 8, np.int32(-9)), whole_tokens, "data.idx: sequence 2 has length -9"),
        (
            changed(lengths_at + 8, np.int32(10)),
            whole_tokens,
            "sequence 3 should start at byte 30, where those before it end, but its pointer is 28",
        ),
        (changed(pointers_at, np.int64(2)), whole_tokens, "sequence 0 should start at byte 0"),
        (changed(pointers_at + 48, np.int64(-4)), whole_tokens, "sequence 6 should start at byte 1,434"),
        (changed(boundaries_at, np.int64(1)), whole_tokens, "documents cover from 1 to 7, but there are 7"),
        (changed(boundaries_at + 24, np.int64(8)), whole_tokens, "documents cover from 0 to 8, but there are 7"),
        (
            changed(boundaries_at + 8, np.int64(6)),
            whole_tokens,
            "document 1 begins at sequence 6 and ends before it, at 5",
        ),
        (
            whole_index,
            whole_tokens[:-1],
            "the file is cut off: it has 1,493 of 1,494 bytes, and sequence 6 is the first",
        ),
        (whole_index, whole_tokens[:27], "sequence 2 is the first that cannot be read"),
        (whole_index, b"", "sequence 0 is the first that cannot be read"),
        (whole_index, whole_tokens + b"1", "1 bytes lie behind the last sequence of data.idx"),
        (whole_index[:-1], whole_tokens, "1 bytes are missing"),
    ]
    for index_bytes, token_bytes, message in faults:
        index.write_bytes(index_bytes)
        tokens.write_bytes(token_bytes)
        assert message in fails(capsys, "data", "check", prefix)
    index.write_bytes(whole_index)
    tokens.unlink()
    assert "data.bin: No such file" in fails(capsys, "data", "check", prefix)
    tokens.write_bytes(whole_tokens)
    assert main(["data", "check", str(prefix)]) == 0


def test_boundaries_without_an_end_are_a_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_index(tmp_path / "data", [5], boundaries=[])
    assert "documents cover no sequence, but there are 1" in fails(capsys, "data", "check", prefix)


@pytest.mark.skipif(not OPENWEBTEXT.with_suffix(".idx").exists(), reason="needs 1,000 documents of OpenWebText")
@pytest.mark.parametrize("damage", ["none", "cut", "swapped"])
def test_a_real_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    for suffix in (".idx", ".bin"):
        shutil.copyfile(OPENWEBTEXT.with_suffix(suffix), tmp_path / f"data{suffix}")
    tokens = tmp_path / "data.bin"
    change: dict[str, Callable[[bytes], bytes]] = {
        "cut": lambda raw: raw[: len(raw) // 2],
        "swapped": lambda raw: raw * 2,
    }
    if damage == "none":
        assert main(["data", "check", str(tmp_path / "data")]) == 0
        assert "1,361,845 tokens of uint16, 193 to 21,809 long" in capsys.readouterr().out
        return
    tokens.write_bytes(change[damage](tokens.read_bytes()))
    message = {"cut": "the file is cut off", "swapped": "do not belong together"}[damage]
    assert message in fails(capsys, "data", "check", tmp_path / "data")
