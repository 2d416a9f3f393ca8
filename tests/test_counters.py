"""Counts of tokens, elements and bytes beyond 32 bits stay right; only what is a 32-bit format is held to its range.

(pytest turns every warning of ours into an error, numpy's about overflow among them.)
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotspa_megatron.planning.alignment import Alignment
from hotspa_megatron.planning.data_check import check_data
from hotspa_megatron.planning.known_models import KNOWN_MODELS
from hotspa_megatron.planning.lengths import read_index
from hotspa_megatron.planning.packing import LARGEST_MICRO_BATCH
from hotspa_megatron.planning.param_layout import gpt_parameters, model_layout
from hotspa_megatron.planning.reshard_plan import plan_reshard
from hotspa_megatron.planning.step_plan import LengthGroup, StepCosts, StepPlanner
from hotspa_megatron.planning.topology import Topology
from hotspa_megatron.strategy import Kind, Strategy, stage_layers
from tests.test_lengths import write_index


def test_a_data_file_of_12_gib_is_checked_to_its_last_byte(tmp_path: Path) -> None:
    prefix = write_index(tmp_path / "long", [2**30] * 3, code=4, itemsize=4, data=False)
    data = tmp_path / "long.bin"
    data.touch()
    os.truncate(data, 3 * 2**32)  # a file of one hole
    summary = check_data(read_index(prefix))
    assert (summary.num_bytes, summary.tokens) == (3 * 2**32, 3 * 2**30)
    os.truncate(data, 3 * 2**32 - 1)
    with pytest.raises(ValueError, match="sequence 2 is the first that cannot be read"):
        check_data(read_index(prefix))


def test_a_step_may_hold_more_tokens_than_32_bits_count() -> None:
    strategy = Strategy(tp=1, cp=1, pp=1, dp=2)
    group = LengthGroup(
        strategy=strategy,
        kind=Kind.HOME,
        max_length=2**30,
        tokens_per_microbatch=LARGEST_MICRO_BATCH,
        alignment=Alignment(sequence=1, total=1),
    )
    planner = StepPlanner([group], StepCosts())
    for lengths in ([2**30] * 6, np.full(6, 2**30, np.int32)):
        plan = planner.plan(lengths)
        (segment,) = plan.segments
        assert [[len(batch) for batch in batches] for batches in segment.micro_batches] == [[1, 1, 1]] * 2
        assert planner.computed_tokens(segment, plan.lengths) == 6 * 2**30
        assert planner.busy(segment, np.array(plan.lengths, np.int64)) == [3 * 2**30] * 2
    with pytest.raises(ValueError, match="32-bit"):
        StepPlanner([replace(group, tokens_per_microbatch=LARGEST_MICRO_BATCH + 1)]).plan([5])


def test_a_parameter_of_more_elements_than_32_bits_count_is_moved_whole() -> None:
    shape = replace(KNOWN_MODELS["llama-70b"], padded_vocab_size=302_304, num_layers=2)
    parameters = gpt_parameters(shape)
    embedding = 302_304 * 8192
    assert embedding > 2**31
    home, guest = (
        model_layout(parameters, strategy, stage_layers(2, 1), shape.tied_embeddings)
        for strategy in (Strategy(tp=2, cp=1, pp=1, dp=1), Strategy(tp=1, cp=1, pp=1, dp=2))
    )
    plan = plan_reshard([home], guest, itemsize=4, topology=Topology.flat(2))
    # Each rank lacks what the other has of everything that is cut.
    assert plan.total_bytes == 4 * 2 * (guest.local_numel(0) - home.local_numel(0)) > 2**33
