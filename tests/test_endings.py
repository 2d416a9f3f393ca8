"""Which errors are another rank's, which are a file's, and which are nobody's but the code's."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from hotspa_megatron.hooks import checkpoint_hooks, endings
from hotspa_megatron.hooks.endings import INTERRUPTED, cause_in_files, peer_lost, state_of, told
from hotspa_megatron.runtime.watchdog import Progress

FULL = OSError(errno.ENOSPC, "No space left on device", "a/b")
GLOO = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
)
WRITER = RuntimeError("Worker failure: An error is caught while starting worker 0, error: <class 'OSError'>")


def _caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (FULL, "No space left on device (a/b)"),
        (_caused(RuntimeError("cannot save"), FULL), "No space left on device (a/b)"),
        (CheckpointException("write", {3: (FULL, None)}), "rank 3: No space left on device (a/b)"),  # type: ignore[dict-item]
        (CheckpointException("write", {0: (WRITER, None)}), f"rank 0: {WRITER}"),  # type: ignore[dict-item]
        (CheckpointException("write", {}), "another rank could not do its part"),
        (pickle.UnpicklingError("pickle data was truncated"), "pickle data was truncated"),
        (RuntimeError("PytorchStreamReader failed reading zip archive\nmore"), "PytorchStreamReader failed reading zip archive"),
        (CheckpointException("write", {1: (KeyError("a"), None)}), None),  # type: ignore[dict-item]
        (AssertionError("sizes differ"), None),
        (KeyboardInterrupt(), None),
        (GLOO, None),
        # Of the process that writes, not of what it writes.
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), None),
        (EOFError("no more messages"), None),
    ],
)  # fmt: skip
def test_what_a_file_has_to_do_with_it(error: BaseException, cause: str | None) -> None:
    assert cause_in_files(error, reading=False) == cause


def test_a_file_that_ends_early_is_one_only_where_it_is_read() -> None:
    assert cause_in_files(EOFError("Ran out of input"), reading=True) == "Ran out of input"


def test_a_rank_that_reads_by_itself_is_not_called_rank_0() -> None:
    error = CheckpointException("read", {0: (FULL, None)})  # type: ignore[dict-item]
    assert cause_in_files(error, reading=True) == "No space left on device (a/b)"


def test_a_shard_that_is_cut_short_is_a_files_fault(tmp_path: Path) -> None:
    for keep in (10, 600):
        torch.save(torch.zeros(1000), tmp_path / "shard")
        with (tmp_path / "shard").open("r+b") as file:
            file.truncate(keep)
        with pytest.raises(Exception) as caught:
            torch.load(tmp_path / "shard")
        assert cause_in_files(caught.value, reading=True) is not None


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (GLOO, True),
        (dist.DistNetworkError("recv failed"), True),
        (CheckpointException("read", {0: (GLOO, None)}), True),  # type: ignore[dict-item]
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (ValueError("gloo/transport"), False),
        (FULL, False),
        # A backend says of its own rank, too, that it failed; that is the first message, which must not pass for a second.
        (dist.DistBackendError("NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, ncclUnhandledCudaError"), False),
        (dist.DistBackendError("NCCL error in: x.cpp:1, ncclSystemError: socketProgress: card failed"), False),
        (dist.DistBackendError("NCCL error in: x.cpp:1, ncclRemoteError: A call failed possibly due to a peer"), True),
        (dist.DistBackendError("NCCL error: ncclSystemError, Connection closed by remote peer node7"), True),
        (dist.DistBackendError("NCCL communicator was aborted on rank 1."), True),
    ],
)
def test_whether_another_rank_was_lost(error: BaseException, lost: bool) -> None:
    assert (peer_lost(error) is not None) == lost


class _Memory:
    """A store of a job's, as far as its end needs one."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.values.setdefault(key, desired.encode())


def _ended(
    error: BaseException,
    progress: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    rank: int = 0,
    connect: Any = None,
    heard: str | None = None,
) -> tuple[BaseException, list[str], float]:
    """What a job that fails with ``error`` ends with, what it says, and how long it waits before."""
    said: list[str] = []
    waited: list[float] = [0.0]
    monkeypatch.setattr(endings.time, "sleep", waited.append)
    with pytest.raises(type(error) if not isinstance(error, KeyboardInterrupt) else BaseException) as caught, \
            told(lambda: progress, said.append, rank=rank, connection=lambda: connect, heard=lambda: heard):  # fmt: skip
        raise error
    return caught.value, said, sum(waited)


def test_a_lost_rank_and_an_interrupt_are_said_with_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress()
    progress.step(3)
    error, said, waited = _ended(GLOO, progress, monkeypatch)
    assert error is GLOO and said[0].startswith("lost another rank at step 3, planning: [/pytorch")
    # Who holds the store stays until others, who lose only those that go first, have asked it.
    others = _ended(GLOO, progress, monkeypatch, rank=1)[2]
    assert 1 < others < waited / 2 and waited < 10
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert _ended(GLOO, progress, monkeypatch)[2] == others
    end, said, _ = _ended(KeyboardInterrupt(), progress, monkeypatch)
    assert isinstance(end, SystemExit) and end.code == INTERRUPTED and said == ["interrupted at step 3, planning"]


def test_who_only_lost_a_rank_says_which_one_failed_first_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    progress, store = Progress(), _Memory()
    progress.step(3)

    def said_by(rank: int, error: BaseException, connect: Any = lambda: store) -> list[str]:
        return _ended(error, progress, monkeypatch, rank=rank, connect=connect)[1]

    lost = f"lost another rank at step 3, planning: {GLOO}"
    assert said_by(0, GLOO) == [lost]  # one that was killed
    refused = SystemExit(2)
    refused.__cause__ = ValueError("--save: no room\nmore")
    for rank, error in ((2, refused), (1, KeyError("a")), (3, SystemExit(16))):
        assert said_by(rank, error) == []
    assert said_by(0, GLOO) == [lost, "the first to fail: rank 2 at step 3, planning: --save: no room"]
    store.values.clear()
    said_by(1, KeyError("a"))
    assert said_by(0, GLOO) == [lost, "the first to fail: rank 1 at step 3, planning: KeyError: 'a'"]
    # What the store says counts, and where it is gone what was heard of it before.
    for connect, who in ((lambda: store, "rank 1 at step 3, planning: KeyError: 'a'"), (_no_store, "rank 5")):
        ended = _ended(GLOO, progress, monkeypatch, connect=connect, heard="rank 5")
        assert ended[1] == [lost, f"the first to fail: {who}"]
    # A store whose owner is gone costs nothing but the name.
    for connect in (None, _no_store):
        assert said_by(0, GLOO, connect) == [lost]
        assert said_by(0, KeyError("a"), connect) == []


def _no_store() -> Any:
    raise ConnectionError("no store")


def test_other_errors_and_other_jobs_pass_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, progress in ((ValueError("x"), Progress()), (GLOO, None), (KeyboardInterrupt(), None)):
        ended, said, waited = _ended(error, progress, monkeypatch)
        assert ended is error and said == [] and waited == 0.0


def test_the_last_whole_checkpoint_and_the_room_are_said(tmp_path: Path) -> None:
    assert state_of(str(tmp_path / "none")).endswith("none holds no whole one")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    text = state_of(str(tmp_path))
    assert " MiB are free there; the last whole one in " in text and text.endswith("is that of iteration 7")


@pytest.mark.parametrize("error", [FULL, ValueError("x")])
def test_an_asynchronous_save_that_finds_no_room_is_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its writers' errors come up steps later, in another function of Megatron's than the one that saves."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")

    def finalize(blocking: bool = False) -> None:
        raise CheckpointException("write", {0: (error, None)})  # type: ignore[dict-item]

    session = SimpleNamespace(args=SimpleNamespace(save=str(tmp_path)))
    for current in (session, None):
        monkeypatch.setattr(checkpoint_hooks, "current_session", lambda current=current: current)
        # torch's own for checkpoints is no Exception.
        with pytest.raises(BaseException) as caught:
            checkpoint_hooks.say_why_not_finished(finalize)(blocking=True)
        said = capsys.readouterr().err
        if current is session and error is FULL:
            assert isinstance(caught.value, SystemExit) and caught.value.code == 1
            start = (
                "hotspa: a checkpoint that was being written meanwhile cannot be saved: rank 0: No space left on device"
            )
            assert said.startswith(start) and said.endswith("is that of iteration 7\n") and said.count("\n") == 1
        else:
            assert isinstance(caught.value, CheckpointException) and not said
