"""One set of rules says what a model can take: the file's, the planner's and Megatron's own are the same."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hotspa_megatron.config import ConfigError, load_config, resolve
from hotspa_megatron.planning.execution import legal_executions
from hotspa_megatron.planning.hardware import load_hardware
from hotspa_megatron.planning.known_models import KNOWN_MODELS
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.planning.search import plan_batches
from hotspa_megatron.strategy import Strategy
from tests.spawn import run_ranks
from tests.test_config import write
from tests.test_param_layout import _gpt_model
from tests.training import import_megatron

A800 = load_hardware("a800-80")
HEADS = (6, 12, 28, 32, 5, 16, 24)


def models(count: int = 20) -> list[ModelShape]:
    """Random sizes, few of which divide by everything."""
    numbers = np.random.default_rng(11)
    found = []
    for index in range(count):
        heads = HEADS[index % len(HEADS)]
        groups = int(numbers.choice([size for size in range(1, heads + 1) if heads % size == 0]))
        found.append(
            replace(
                KNOWN_MODELS["llama-7b"],
                num_layers=int(numbers.choice([3, 4, 5, 6, 8, 12])),
                hidden_size=heads * 8,
                ffn_hidden_size=int(numbers.choice([48, 50, 72, 96])),
                num_attention_heads=heads,
                num_query_groups=groups,
                kv_channels=8,
                padded_vocab_size=int(numbers.choice([96, 97 * 16, 1680])),
                seq_length=4096,
                sequence_parallel=True,
                layers_in_first_stage=None,
                layers_in_last_stage=None,
            )
        )
    return found


def test_a_file_may_say_what_the_planner_may_choose_and_nothing_else(tmp_path: Path) -> None:
    """All sizes on worlds of up to 16 ranks, legal or not."""
    accepted = refused = 0
    path = tmp_path / "hotspa.yaml"
    for number, shape in enumerate(models()):
        for world in (1, 2, 3, 4, 6, 8, 12, 16) if number < 4 else (12, 16):
            sizes = range(1, world + 2)
            legal = {
                each.strategy for each in legal_executions(shape, world, max_tp=world, max_cp=world, recompute=(0.0,))
            }
            home = Strategy.from_world(world, tp=1, cp=1, pp=1)
            for tp, cp, pp in ((t, c, p) for t in sizes for c in sizes for p in sizes if t * c * p <= world + 1):
                path.write_text(f"strategies: [{{max_length: 8, tp: {tp}, cp: {cp}, pp: {pp}, vpp: 1}}]")
                try:
                    (entry,) = resolve(load_config(path), shape=shape, home=home).strategies
                    assert entry.strategy in legal
                    accepted += 1
                except ConfigError as error:
                    strategy = None if world % (tp * cp * pp) else Strategy.from_world(world, tp=tp, cp=cp, pp=pp)
                    assert strategy not in legal, error
                    # What would do instead is said, or which flag of Megatron's makes it legal.
                    assert "legal " in str(error) or "--make-vocab-size-divisible-by" in str(error)
                    refused += 1
    print(f"{accepted} accepted, {refused} refused")
    assert accepted > 300 and refused > 1000


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_what_is_planned_passes_as_a_file_and_builds_in_megatron_which_refuses_what_we_do(tmp_path: Path) -> None:
    cases: list[tuple[ModelShape, Strategy, bool]] = []
    for number, shape in enumerate(models()):
        world = (4, 6, 8, 12, 16)[number % 5]
        planned = plan_batches(
            [np.array([200, 900, 4000])], shape=shape, hardware=A800, world_size=world, recompute=(0.0,)
        )
        home = planned.home.execution.strategy
        entries = [choice for choice in planned.groups if choice is not planned.home]
        text = ", ".join(
            f"{{max_length: {each.max_length}, tp: {each.execution.strategy.tp}, cp: {each.execution.strategy.cp}, "
            f"pp: {each.execution.strategy.pp}, vpp: {each.execution.strategy.vpp}}}"
            for each in entries
        )
        fitting = replace(shape, sequence_parallel=home.tp > 1)
        resolve(load_config(write(tmp_path, f"strategies: [{text}]")), shape=fitting, home=home)
        cases += [(shape, choice.execution.strategy, True) for choice in planned.groups]
        legal = {each.strategy for each in legal_executions(shape, world, max_tp=world, max_cp=world, recompute=(0.0,))}
        for tp in (size for size in range(1, world + 1) if world % size == 0):
            strategy = Strategy.from_world(world, tp=tp, cp=1, pp=1)
            cases.append((shape, strategy, strategy in legal))
    built = run_ranks(_builds, 1, cases, init_process_group=False, timeout=120, prepare=import_megatron)[0]
    for (shape, strategy, legal), error in zip(cases, built, strict=True):
        assert (not error) == legal, f"{strategy} of {shape}: {error or 'built, but refused by us'}"
    assert sum(not error for error in built) > 30 and sum(bool(error) for error in built) > 20


def _builds(_: int, __: int, cases: Sequence[tuple[ModelShape, Strategy, bool]]) -> list[str]:
    """What Megatron says to each case, nothing where it builds the first and the last rank's model on the meta device."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from hotspa_megatron.hooks.parallel_state import _read_globals, _write_globals

    said, empty = [], {name: {} if isinstance(value, dict) else None for name, value in _read_globals().items()}
    for shape, strategy, _legal in cases:
        error = ""
        for rank in sorted({0, strategy.world_size - 1}):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=strategy.world_size)
            _write_globals(empty)
            parallel_state._GLOBAL_MEMORY_BUFFER = None
            try:
                parallel_state.initialize_model_parallel(
                    strategy.tp, strategy.pp, context_parallel_size=strategy.cp, create_gloo_process_groups=False
                )
                with torch.device("meta"):
                    _gpt_model(shape, tp=strategy.tp, pp=strategy.pp)
            except (AssertionError, ValueError, RuntimeError) as problem:
                error = f"{type(problem).__name__}: {problem}"
            dist.destroy_process_group()
        said.append(error)
    return said
