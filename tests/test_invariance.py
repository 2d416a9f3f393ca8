"""The gradient of a step on real documents and conversations is the same whatever splits, packs and runs it.

In double precision to 1e-9, between homes, thresholds, strategies, numbers of data-parallel ranks, budgets and orders of the
sequences; with masks, and with documents as they come in a corpus (stand-ins where OpenWebText is not at hand).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotspa_megatron.hooks.patching import Patches
from tests.job import Mix, double_precision, region, start
from tests.spawn import run_ranks
from tests.test_conversations import _talk, write_lines
from tests.test_gradients import _gathered, _value
from tests.test_lengths import OPENWEBTEXT
from tests.training import import_megatron, workspace

LIMIT, VOCAB = 512, 288
SIZES = ("--seq-length", str(LIMIT), "--max-position-embeddings", str(LIMIT), "--vocab-size", str(VOCAB))
SP, UNTIED = "--sequence-parallel", "--untie-embeddings-and-output-weights"
MIXES = (
    Mix((1, 1, 1), (), (*SIZES, UNTIED)),
    Mix((2, 1, 1), ((64, 1, 1, 1), (400, 4, 1, 1)), (*SIZES, UNTIED, SP)),
    Mix((1, 2, 2), ((60, 2, 2, 1), (300, 4, 1, 1)), (*SIZES, UNTIED)),
    Mix((2, 2, 1), ((30, 1, 1, 1), (400, 2, 1, 1)), (*SIZES, UNTIED, SP, "--use-distributed-optimizer")),
)
DOCUMENTS, LINES = 6, 12


@dataclasses.dataclass(frozen=True)
class Variant:
    """``wider``: micro-batches of so many times the budget; ``turned``: the step's sequences in the opposite order."""

    wider: int = 1
    turned: bool = False


VARIANTS = (Variant(), Variant(wider=3), Variant(turned=True))


def test_the_gradient_of_a_step_depends_on_its_sequences_alone() -> None:
    talk = write_lines(workspace() / "invariance.jsonl", _talk(40, seed=11))
    found = run_ranks(_gradients_of_all, 4, talk, timeout=280, prepare=import_megatron)[0]
    assert {name for name, _, _ in found} == {"documents", "conversations", "one sequence fewer"}
    for name in ("documents", "conversations"):
        own = {key[1:]: value for key, value in found.items() if key[0] == name}
        assert len(own) == len(MIXES) + len(VARIANTS) - 1
        reference = own[str(MIXES[0]), Variant()]
        worst = {key: _difference(each, reference) for key, each in own.items()}
        print(name, {f"{mix} {variant}": f"{error:.1e}" for (mix, variant), error in worst.items()})
        assert max(worst.values()) <= 1e-9
        # The comparison sees a sequence.
        less = found["one sequence fewer", str(MIXES[0]), Variant()] if name == "documents" else None
        assert less is None or _difference(less, reference) > 1e-3


def _difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    errors = [float(np.abs(one[name] - other[name]).max() / np.abs(other[name]).max()) for name in other]
    return max(error if error == error else float("inf") for error in errors)


def _gradients_of_all(rank: int, world: int, talk: Path) -> dict[tuple[str, str, Variant], dict[str, np.ndarray]]:
    found: dict[tuple[str, str, Variant], dict[str, np.ndarray]] = {}
    with double_precision():
        for mix in MIXES:
            session, model, forward_step, patches = _brought_up(mix, rank, world)
            steps: list[tuple[str, Callable[[], Any], int]] = [
                ("documents", _documents, DOCUMENTS),
                ("conversations", lambda: _conversations(talk), LINES),
            ]
            if mix is MIXES[0]:
                steps.append(("one sequence fewer", _documents, DOCUMENTS - 1))
            for name, make, count in steps:
                varied = VARIANTS if mix is MIXES[3] and name != "one sequence fewer" else VARIANTS[:1]
                for variant in varied:
                    gradients = _gradients(session, model, forward_step, make(), count, variant)
                    if rank == 0:
                        found[name, str(mix), variant] = gradients
            patches.undo_all()
            _taken_down()
    return found


def _brought_up(mix: Mix, rank: int, world: int) -> tuple[Any, Any, Any, Patches]:
    from hotspa_megatron.hooks import get_batch

    session, model, forward_step = start(mix, world, torch.float64)
    runner, layout = session.runner, session.runner.moves.layout
    for piece in layout.pieces(rank):
        whole = _value(layout.parameters[piece.parameter])
        local = runner.moves.parameters[piece.parameter].data
        local[region(piece.start, piece.box.shape)] = whole[region(piece.box.lo, piece.box.shape)]
    patches = Patches()
    get_batch.serve(forward_step, patches, adapter=None)
    return session, model, forward_step, patches


def _taken_down() -> None:
    from hotspa_megatron.hooks import install

    install.uninstall()


def _gradients(
    session: Any, model: Any, forward_step: Any, samples: Any, count: int, variant: Variant
) -> dict[str, np.ndarray]:
    from hotspa_megatron.hooks.data import StepBatch, StepLoader
    from hotspa_megatron.planning.step_plan import StepPlanner

    groups = [
        dataclasses.replace(group, tokens_per_microbatch=variant.wider * group.tokens_per_microbatch)
        for group in session.planner.groups
    ]
    planner = StepPlanner(groups, session.planner.costs, merge=False)
    if variant.turned:
        pieces = samples.pieces
        samples.pieces = lambda first, count: pieces(first, count)[::-1]
    loader = StepLoader(samples, planner, position=lambda: (0, count))
    step = loader.step(StepBatch(0, count))
    assert len(step.sequences) > count and (len(step.plan.segments) > 1 or len(groups) == 1)
    for chunk in model:
        chunk.zero_grad_buffer()
    session.runner.run(forward_step_func=forward_step, step=step, loader=loader)
    return {name: value.numpy() for name, value in _gathered(session.runner).items()}


class _Folded:
    """An indexed dataset whose token ids are folded into a small vocabulary: its lengths are what matters."""

    def __init__(self, indexed: Any) -> None:
        self._indexed = indexed

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        return np.asarray(self._indexed.get(index, offset=offset, length=length), np.int64) % VOCAB


class _MadeUp:
    """Documents of OpenWebText's lengths, where it is not at hand."""

    sequence_lengths = np.exp(np.random.default_rng(5).normal(6.8, 0.9, 200)).astype(np.int64).clip(193, 21_809)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        tokens = np.random.default_rng([6, index]).integers(0, VOCAB, self.sequence_lengths[index])
        return tokens[offset : None if length is None else offset + length]


def _documents() -> Any:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from hotspa_megatron.hooks.samples import Corpus, Documents, Source

    there = OPENWEBTEXT.with_suffix(".idx").exists()
    indexed: Any = IndexedDataset(str(OPENWEBTEXT)) if there else _MadeUp()
    lengths = np.asarray(indexed.sequence_lengths).astype(np.int64)
    # Of the shorter half, so that the test stays short; some are still several times the limit.
    indices = np.flatnonzero(lengths <= 1200)
    source = Source(_Folded(indexed), indices, lengths[indices], -1)
    return Documents(Corpus((source,), (1.0,), None), seed=2, seq_length=LIMIT, overlong="split")


def _conversations(path: Path) -> Any:
    from megatron.core.tokenizers import MegatronTokenizer
    from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText

    from hotspa_megatron.hooks import conversations

    patches = Patches()
    patches.wrap(
        MegatronTokenizerText,
        "tokenize_conversation",
        lambda original: conversations.speaking_bytes(original, count_prompts=False),
    )
    tokenizer = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=VOCAB, pad_id=286)
    file = conversations.ConversationFile(path)
    (read,) = conversations.tokenise_once([file], tokenizer, prompt_format="nemotron-h-aligned", cache=None, log=print)
    patches.undo_all()
    source = conversations.ConversationSource(read, np.arange(len(file)), tokenizer.pad)
    return conversations.Conversations([source], [1.0], seed=1, seq_length=LIMIT, overlong="truncate")
