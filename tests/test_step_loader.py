"""A step's plan is ready when the step is due: a thread makes it while the step before runs."""

from __future__ import annotations

import dataclasses
import io
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hotspa_megatron.config import Overlong
from hotspa_megatron.hooks.data import StepBatch, StepLoader
from hotspa_megatron.hooks.samples import Corpus, Documents, Source
from hotspa_megatron.planning.alignment import Alignment
from hotspa_megatron.planning.step_plan import LengthGroup, StepPlan, StepPlanner
from hotspa_megatron.strategy import Kind, Strategy
from tests.spawn import run_ranks
from tests.test_data_faults import refusal
from tests.training import DP4, Job, arguments, corpus, import_megatron, lengths_for, train

HANG_S = 30
HOME = LengthGroup(
    strategy=Strategy(tp=1, cp=1, pp=1, dp=2),
    kind=Kind.HOME,
    max_length=100,
    tokens_per_microbatch=100,
    alignment=Alignment(sequence=1, total=1),
)


class Planner:
    """A planner that notes which thread asked for what, and can be made to wait."""

    def __init__(self) -> None:
        self._planner = StepPlanner([HOME])
        self.asked: list[tuple[str, int]] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        self.asked.append((threading.current_thread().name, len(lengths)))
        assert self.may_go_on.wait(HANG_S)
        return self._planner.plan(lengths)

    def wait_for(self, calls: int) -> None:
        began = time.monotonic()
        while len(self.asked) < calls:
            assert time.monotonic() - began < HANG_S
            time.sleep(0.001)


def documents(lengths: Sequence[int], overlong: Overlong = "split") -> Documents:
    source = Source(None, np.arange(len(lengths)), np.array(lengths, np.int64), -1)
    return Documents(Corpus((source,), (1.0,), None), seed=3, seq_length=100, overlong=overlong)


@pytest.fixture
def planner() -> Iterator[Planner]:
    made = Planner()
    yield made
    made.may_go_on.set()


def loader_of(planner: Any, samples: Documents | None = None) -> StepLoader:
    return StepLoader(samples or documents([11] * 40), planner, position=lambda: (0, 4))


def test_the_next_step_is_planned_by_a_thread_while_this_one_runs(planner: Planner) -> None:
    loader = loader_of(planner)
    first = loader.step(StepBatch(0, 4))
    planner.wait_for(2)  # nobody asked for the second step yet
    planner.may_go_on.clear()
    second = loader.step(StepBatch(4, 4))  # ready: the planner, which now waits, is not needed for it
    planner.wait_for(3)
    assert [step.batch.first_sample for step in (first, second)] == [0, 4]
    assert len(planner.asked) == 3
    assert all(name.startswith("hotspa-planner") for name, _ in planner.asked)


def test_a_step_that_was_not_foreseen_is_planned_when_it_is_asked_for(planner: Planner) -> None:
    loader = loader_of(planner)
    loader.step(StepBatch(0, 4))
    planner.wait_for(2)
    # A batch that grows, iterations that are skipped.
    assert len(loader.step(StepBatch(4, 6)).sequences) == 6
    assert loader.step(StepBatch(20, 4)).batch.first_sample == 20
    planner.wait_for(6)
    assert [count for _, count in planner.asked] == [4, 4, 6, 6, 4, 4]


def test_a_step_that_runs_again_is_not_planned_again(planner: Planner) -> None:
    loader = loader_of(planner)
    once = loader.step(StepBatch(0, 4))
    planner.wait_for(2)
    assert loader.step(StepBatch(0, 4)) is once
    assert len(planner.asked) == 2


def test_an_error_in_a_step_is_raised_when_that_step_is_due(planner: Planner) -> None:
    order = lengths_for([[5, 6], [7, 8], [9, 101 + 1], [5, 5]])
    source = Source(None, np.arange(len(order)), np.array(order, np.int64), -1)
    samples = Documents(Corpus((source,), (1.0,), None), seed=1234, seq_length=100, overlong="error")
    loader = loader_of(planner, samples)
    for first in (0, 2):
        assert [piece.length for piece in loader.step(StepBatch(first, 2)).sequences] == [4 + first, 5 + first]
    with pytest.raises(ValueError, match=r"sample 5 \(document \d of source 0\) has 101 input positions, more than"):
        loader.step(StepBatch(4, 2))


@pytest.mark.parametrize("stop", [7, 8, 9, 16])
def test_a_loader_made_anew_goes_on_where_the_other_stopped(stop: int) -> None:
    """64 samples in steps of 8, twice through: stopped before, at and behind the end of an epoch, and at the very end."""
    lengths = list(range(2, 66))

    def documents_of(steps: range) -> list[list[int]]:
        loader = loader_of(StepPlanner([HOME]), documents(lengths))
        return [[piece.document for piece in loader.step(StepBatch(8 * step, 8)).sequences] for step in steps]

    unbroken = documents_of(range(17))
    assert documents_of(range(stop)) + documents_of(range(stop, 17)) == unbroken
    epochs = [[document for step in unbroken[first : first + 8] for document in step] for first in (0, 8)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(64)) and epochs[0] != epochs[1]


def _read_again(rank: int, world_size: int) -> list[bool]:
    """Whether Megatron reads what its iterator keeps of a step that a loader yielded: as it does, and as an object of ours."""
    from megatron.core.rerun_state_machine import RerunDataIterator, RerunMode, get_rerun_state_machine

    get_rerun_state_machine().set_mode(RerunMode.VALIDATE_RESULTS)
    read = []
    for yielded in (iter(loader_of(StepPlanner([HOME]))), iter([StepBatch(0, 4)])):
        kept, file = RerunDataIterator(yielded), io.BytesIO()
        next(kept)
        torch.save(kept.state_dict(), file)
        file.seek(0)
        try:
            other = RerunDataIterator(iter(()))
            other.load_state_dict(torch.load(file, weights_only=True))  # as it reads checkpoints
            other.rewind()
            read.append(StepBatch(*next(other)) == StepBatch(0, 4))
        except pickle.UnpicklingError:
            read.append(False)
    return read


def test_megatron_reads_what_a_checkpoint_keeps_for_a_rerun_elsewhere() -> None:
    assert run_ranks(_read_again, 1, prepare=import_megatron) == [[True, False]]


def test_a_mini_batch_is_the_same_however_many_ranks_share_it() -> None:
    """Six samples over dp 1, 2, 3 and 6: each once, none more than once."""
    found = []
    for dp in (1, 2, 3, 6):
        home = dataclasses.replace(HOME, strategy=Strategy(tp=1, cp=1, pp=1, dp=dp))
        for first in (0, 6, 12):
            step = loader_of(StepPlanner([home]), documents(range(2, 32))).step(StepBatch(first, 6))
            (segment,) = step.plan.segments
            indices = [index for batches in segment.micro_batches for batch in batches for index in batch]
            assert sorted(indices) == list(range(6)) and len(segment.micro_batches) == dp
            found.append((first, step.sequences))
    assert len(set(found)) == len(dict(found)) == 3


def test_an_overlong_document_ends_the_job_at_its_step_and_not_before() -> None:
    steps = [(30, 40, 50, 60), (30, 40, 50, 60), (30, 257, 258, 60)]
    config = "strategies: [{max_length: 64, tp: 2}]\noverlong: error"
    prefix = corpus(lengths_for(steps))

    def job(iterations: int) -> Job:
        return Job(
            arguments("--split", "100,0,0", *DP4.flags, batch=4, iterations=iterations, documents=prefix), config
        )

    # The third step's plan is asked for ahead, while the second runs.
    assert len(train(job(2)).losses) == 2
    line = refusal(job(3))
    assert "sample 10 (document " in line and "has 257 input positions, more than --seq-length 256" in line
