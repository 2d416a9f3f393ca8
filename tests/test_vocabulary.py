"""One padded vocabulary for all strategies: home's own, as stock Megatron computes it.

Rows beyond the vocabulary are what they are in stock Megatron: parts of the softmax like any other, and never an input. So
they must be as many, and hold the same numbers, in every layout.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hotspa_megatron.config import ConfigError, load_config, resolve
from hotspa_megatron.hooks import arguments
from tests.job import SEQ_LENGTH, Mix, document, double_precision, region, start, step_of
from tests.reference_gpt import loss_and_gradients
from tests.spawn import run_ranks
from tests.test_config import write
from tests.test_explain import GPT, read
from tests.test_gradients import _gathered, _value
from tests.training import LLAMA, SHARDED, SP, Job, Run, import_megatron, train
from tests.training import arguments as command_line

TPS = (1, 2, 4, 8)
PADDED = {
    (50257, 128): (50304, 50432, 50688, 51200),
    (32000, 128): (32000, 32000, 32256, 32768),
    (32002, 128): (32128, 32256, 32256, 32768),
    (65535, 128): (65536, 65536, 65536, 65536),
    (97, 1): (97, 98, 100, 104),
}
"""(vocabulary, --make-vocab-size-divisible-by): rows at home's tp of 1, 2, 4 and 8."""


@pytest.mark.parametrize(("vocabulary", "multiple"), PADDED)
def test_every_strategy_has_homes_rows(tmp_path: Path, vocabulary: int, multiple: int) -> None:
    """Whatever home's tp; a strategy that they do not divide over is refused with a value that serves all."""
    path = write(tmp_path, "strategies: [" + ", ".join(f"{{max_length: {tp}, tp: {tp}}}" for tp in TPS) + "]")
    sizes = ["--vocab-size", str(vocabulary), "--make-vocab-size-divisible-by"]
    for tp, rows in zip(TPS, PADDED[vocabulary, multiple], strict=True):
        line = [*GPT, "--tensor-model-parallel-size", str(tp), *sizes]
        given = read(*line, str(multiple), world_size=8)
        assert given.shape.padded_vocab_size == rows
        if rows % 8 == 0:
            resolved = resolve(load_config(path), shape=given.shape, home=given.home)
            assert resolved.shape.padded_vocab_size == rows and len(resolved.strategies) == 4
            continue
        with pytest.raises(ConfigError, match=rf"vocabulary of {rows} does not divide over tp") as refused:
            resolve(load_config(path), shape=given.shape, home=given.home)
        fixed = read(*line, str(refused.value).rsplit(" ", 1)[1], world_size=8)
        assert len(resolve(load_config(path), shape=fixed.shape, home=fixed.home).strategies) == 4


# Home's tp makes 100 rows of 97; the other strategies must take those, and not 97 or 98 of their own.
ODD = (
    "--vocab-size",
    "97",
    "--make-vocab-size-divisible-by",
    "1",
    "--untie-embeddings-and-output-weights",
    SP,
    SHARDED,
)
MIXES = (Mix((4, 1, 1), ((16, 1, 1, 1), (32, 2, 1, 1)), ODD), Mix((4, 1, 1), ((16, 1, 1, 4), (32, 2, 2, 1)), ODD))


def test_a_vocabulary_that_needs_padding_changes_nothing_in_any_layout() -> None:
    for results in run_ranks(_rows, 4, MIXES, timeout=120, prepare=import_megatron)[0]:
        assert results["rows"] == 100
        # Loss and gradients are those of one process with as many rows, padded ones included.
        assert results["loss"] < 1e-9 and results["embedding"] < 1e-9 and results["output"] < 1e-9
        # A padded row is never an input, and always a part of the softmax.
        assert results["padded embedding"] == 0.0 and results["padded output"] > 1e-6
        # Control: padded rows that were left out of the softmax would be seen.
        assert results["loss without them"] > 1e-3


def _rows(rank: int, world: int, mixes: tuple[Mix, ...]) -> list[dict[str, float]]:
    with double_precision():
        return [_rows_of(mix, rank, world) for mix in mixes]


def _rows_of(mix: Mix, rank: int, world: int) -> dict[str, float]:
    from hotspa_megatron.hooks import get_batch, install
    from hotspa_megatron.hooks.patching import Patches

    session, model, forward_step = start(mix, world, torch.float64)
    runner, layout, patches = session.runner, session.runner.moves.layout, Patches()
    whole = {parameter.name: _value(parameter) for parameter in layout.parameters}
    for piece in layout.pieces(rank):
        value = whole[layout.parameters[piece.parameter].name]
        runner.moves.parameters[piece.parameter].data[region(piece.start, piece.box.shape)] = value[
            region(piece.box.lo, piece.box.shape)
        ]
    get_batch.serve(forward_step, patches, adapter=None)
    documents = [document(0, index, length) for index, length in enumerate((5, 12, 17, 30, 40, 60))]
    loader, step = step_of(session, documents)
    for chunk in model:
        chunk.zero_grad_buffer()
    _, record = runner.run(forward_step_func=forward_step, step=step, loader=loader)
    gathered = _gathered(runner)
    patches.undo_all()
    install.uninstall()

    shape, texts = arguments.shape_of(session.args), [torch.from_numpy(each) for each in documents]
    loss, targets, expected = loss_and_gradients(whole, shape, texts, limit=SEQ_LENGTH)
    names = ("embedding.word_embeddings.weight", "output_layer.weight")
    cut = {name: value[:97] if name in names else value for name, value in whole.items()}
    fewer, _, _ = loss_and_gradients(cut, shape, texts, limit=SEQ_LENGTH)
    ((total, _),) = record.losses.values()
    found = {"rows": float(len(whole[names[1]])), "loss": abs(total - loss) / loss}
    found["loss without them"] = abs(total - fewer) / loss
    for name, short in zip(names, ("embedding", "output"), strict=True):
        reference = expected[name] / targets
        found[short] = float((gathered[name] - reference).abs().max() / reference.abs().max())
        found[f"padded {short}"] = float(gathered[name][97:].abs().max())
    return found


@pytest.mark.long
def test_a_checkpoint_of_stock_megatron_with_fewer_rows_is_taken_up(tmp_path: Path) -> None:
    """122 rows on disk, 128 in the job: a job under the flag makes of it what it makes of it under home alone."""
    saved = _line("--make-vocab-size-divisible-by", "1", "--save", str(tmp_path), "--save-interval", "1", iterations=1)
    train(Job(saved, None, ranks=2, hooks=False))
    load = ("--load", str(tmp_path), "--finetune", "--no-load-optim", "--no-load-rng")
    run = functools.partial(_line, "--make-vocab-size-divisible-by", "64", *load, iterations=3)
    static, mixed = (
        train(Job(run(), config, ranks=2)) for config in ("strategies: []", "strategies: [{max_length: 64, tp: 1}]")
    )
    assert any(segment.kind == "guest" for step in mixed.steps for segment in step.segments)
    assert mixed.loaded == static.loaded
    np.testing.assert_allclose(mixed.losses, static.losses, rtol=1e-6)
    # The rows of the checkpoint, and not new ones: the same job without it begins elsewhere.
    fresh: Run = train(Job(_line("--make-vocab-size-divisible-by", "64", iterations=1), "strategies: []", ranks=2))
    assert fresh.loaded != static.loaded


def _line(*more: str, iterations: int) -> tuple[str, ...]:
    flags: dict[str, Any] = {"tp": 2, "iterations": iterations, "batch": 8, "model": LLAMA}
    return command_line(SHARDED, *more, **flags)
