"""Conversations: lines read and refused, tokenised once, labelled and masked as Megatron's SFTDataset does, trained exactly.

What trains on ranks is compared with a plain torch reference in double precision, and through pretrain() with the static
training. Prompts carry no loss wherever they gather: in a micro-batch, on a rank, in a length group, in a whole step.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from hotspa_megatron.config import ConfigError, HotSPaConfig, load_config
from hotspa_megatron.hooks import conversations as module
from hotspa_megatron.hooks.conversations import (
    IGNORED,
    ConversationFile,
    Conversations,
    ConversationSource,
    bytes_of,
    conversations_of,
    counts_prompts,
    tokenised,
)
from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.hooks.samples import Piece, Text
from hotspa_megatron.planning.sample_order import SampleOrder
from tests.job import SEQ_LENGTH, VOCAB, Mix, double_precision, region, start
from tests.reference_gpt import of_sequences
from tests.spawn import run_ranks
from tests.test_data_faults import refusal
from tests.test_gradients import SHARDED, SP, UNTIED, _gathered, _value, _worsen
from tests.test_training import assert_equal, strategies_of
from tests.training import (
    GUEST_AND_SIBLING,
    RELEASE,
    SEED,
    STATIC,
    TP2_CP2,
    Job,
    Run,
    arguments,
    import_megatron,
    train,
    workspace,
)

END = 287
"""End of document of a NullTokenizer of 288 ids."""
needs_padding = pytest.mark.skipif(
    RELEASE < (0, 18), reason="0.17's NullTokenizer has no token for padding, and SFTDataset fails"
)

# ---------------------------------------------------------------------------------------------------------------- lines


def said(*turns: str) -> list[dict[str, str]]:
    """Messages from "role: content"."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


def write_lines(path: Path, lines: Sequence[Sequence[dict[str, Any]]]) -> Path:
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in lines))
    return path


def test_lines_are_read_in_any_order_and_blank_ones_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "talk.jsonl"
    one, two = said("user: hello", "assistant: good morning"), said("user: \N{SNOWMAN}", "assistant: ")
    path.write_bytes(
        b"\xef\xbb\xbf" + json.dumps({"messages": one}).encode() + b"\r\n\n  \n"
        + json.dumps({"id": 7, "messages": two}, ensure_ascii=False).encode()
    )  # fmt: skip
    file = ConversationFile(path)
    assert len(file) == 2
    assert [file[1], file[0], file[1]] == [two, one, two]
    assert [file.place(0), file.place(1)] == [f"{path}:1", f"{path}:4"]


BAD_LINES = {
    "not JSON": (b'{"messages": [}', r"not JSON: Expecting value, column 15"),
    "cut short": (b'{"messages": [{"role": "user", "cont', "not JSON: Unterminated string"),
    "not UTF-8": (b'{"messages": [{"role": "user", "content": "\xff"}]}', "byte 44 of the line is not UTF-8"),
    "a list": (b"[1, 2]", r'has no messages; write \{"messages": '),
    "a number": (b"7", "has no messages"),
    "another key": (b'{"conversations": []}', "has no messages"),
    "no message": (b'{"messages": []}', "has no messages"),
    "messages are text": (b'{"messages": "hello"}', "has no messages"),
    "a message is text": (b'{"messages": ["hello"]}', r'message 1 is not \{"role": "...", "content": "..."\}'),
    "no role": (b'{"messages": [{"role": "user", "content": ""}, {"content": "x"}]}', "message 2 is not"),
    "role is a number": (b'{"messages": [{"role": 1, "content": "x"}]}', "message 1 is not"),
    "no content": (b'{"messages": [{"role": "user"}]}', "message 1 is not"),
    "deep": (b"[" * 100_000, "nested too deep|not JSON"),
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_is_refused_with_its_place(tmp_path: Path, bad: str) -> None:
    line, message = BAD_LINES[bad]
    path = tmp_path / "talk.jsonl"
    path.write_bytes(b'{"messages": [{"role": "user", "content": "x"}]}\n\n' + line + b"\n")
    file = ConversationFile(path)
    assert len(file[0]) == 1
    with pytest.raises(ValueError, match=rf"talk\.jsonl:3: ({message})") as caught:
        file[1]
    assert "\n" not in str(caught.value)


def test_a_file_without_a_line_or_none_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.jsonl: No such file"):
        ConversationFile(tmp_path / "none.jsonl")
    (tmp_path / "blank.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match=r"blank\.jsonl: the file holds no line"):
        ConversationFile(tmp_path / "blank.jsonl")


def test_each_message_of_the_system_starts_a_conversation() -> None:
    user, answer, system = said("user: a", "assistant: b", "system: c")
    assert conversations_of([user]) == [[user]]
    assert conversations_of([user, answer, system, user, answer]) == [[user, answer], [system, user, answer]]
    assert conversations_of([system, system, user]) == [[system], [system, user]]


# ---------------------------------------------------------------------------------------------------------------- bytes


def test_bytes_leave_prompts_and_roles_out_of_the_loss() -> None:
    conversation = said(
        "system: S", "user: \N{LATIN SMALL LETTER E WITH ACUTE}", "assistant: ok", "tool: t", "assistant: "
    )
    tokens, targets = bytes_of(conversation, end=END, count_prompts=False)
    prompt = [256, 83, END, 257, 0xC3, 0xA9, END]
    assert tokens.tolist() == [*prompt, 258, 111, 107, END, 259, 116, END, 258, END]
    assert targets.tolist() == [IGNORED] * 8 + [111, 107, END] + [IGNORED] * 4 + [END]
    everything = bytes_of(conversation, end=END, count_prompts=True)
    assert everything[0].tolist() == everything[1].tolist() == tokens.tolist()
    assert [counts_prompts(name) for name in ("default", "identity", "nemotron-h-aligned")] == [True, True, False]


@pytest.mark.parametrize(
    ("message", "problem"),
    [({"role": "human", "content": "x"}, "role 'human' is not known; roles are system, user"),
     ({"role": "assistant", "content": None}, "the content of a turn of the assistant is not text")],
)  # fmt: skip
def test_bytes_refuse_what_they_cannot_say(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        bytes_of([message], end=END, count_prompts=False)


# ------------------------------------------------------------------------------------------------------- tokenised once


class _Tokenizer:
    """As Megatron's, with bytes; counts what it is asked for."""

    vocab_size, eod, pad = 288, END, 286

    def __init__(self, **identity: Any) -> None:
        self.unique_identifiers = {"class": "tests", **identity}
        self.asked = 0

    def tokenize_conversation(self, conversation: Any, *, return_target: bool, add_generation_prompt: bool) -> Any:
        assert return_target and not add_generation_prompt
        self.asked += 1
        return bytes_of(conversation, end=self.eod, count_prompts=False)


LINES = (
    said("user: hello", "assistant: good morning"),
    said("system: be kind", "user: a", "assistant: bc", "system: be terse", "user: d", "assistant: e", "user: f", "assistant: g"),
    said("user: nobody answers"),
)  # fmt: skip


def _tokenised(
    path: Path,
    tokenizer: Any,
    *,
    prompt_format: str = "",
    cache: Path | None = None,
    log: Callable[[str], None] = print,
) -> Path:
    return tokenised(ConversationFile(path), tokenizer, prompt_format=prompt_format, cache=cache, log=log)


def a_file_is_tokenised_once_for_its_contents_and_its_tokenizer(rank: int, world_size: int, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "talk.jsonl", LINES)
    heard: list[str] = []
    tokenizer = _Tokenizer()
    first = _tokenised(path, tokenizer, log=heard.append)
    assert first.parent == tmp_path / "cache" and tokenizer.asked == 4
    assert "tokenised 3 lines: 4 conversations of 75 tokens, 20 of which are targets" in heard[-1]
    # Neither the time of the file nor its folder matters.
    os.utime(path, (1, 1))
    moved = tmp_path / "moved"
    moved.mkdir()
    path.rename(moved / path.name)
    again = _tokenised(moved / path.name, _Tokenizer(), cache=tmp_path / "cache", log=heard.append)
    assert again == first and tokenizer.asked == 4 and "tokenised before" in heard[-1]
    # Another tokenizer, format or content does.
    path = moved / path.name
    others = {
        _tokenised(path, _Tokenizer(vocabulary="b"), cache=first.parent),
        _tokenised(path, _Tokenizer(), prompt_format="default", cache=first.parent),
        _tokenised(write_lines(path, LINES[:2]), _Tokenizer(), cache=first.parent),
    }
    assert len(others) == 3 and first not in others
    assert sorted(each.name for each in first.iterdir()) == ["targets.bin", "targets.idx", "tokens.bin", "tokens.idx"]
    assert not list(first.parent.glob("*.tmp"))


def a_tokenizers_own_files_belong_to_it(rank: int, world_size: int, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "talk.jsonl", LINES)
    files = tmp_path / "tokenizer"
    files.mkdir()
    (files / "tokenizer.json").write_text("{}")
    tokenizer = _Tokenizer()
    tokenizer.path = str(files)  # type: ignore[attr-defined]
    first = _tokenised(path, tokenizer)
    assert _tokenised(path, tokenizer) == first
    (files / "tokenizer.json").write_text("{ }")
    assert _tokenised(path, tokenizer) != first


def a_line_that_cannot_be_tokenised_leaves_nothing_behind(rank: int, world_size: int, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "talk.jsonl", [*LINES, said("human: hello")])
    with pytest.raises(ValueError, match=r"talk\.jsonl:4: cannot be tokenised: role 'human' is not known"):
        _tokenised(path, _Tokenizer())
    assert list((tmp_path / "cache").iterdir()) == []


def a_tokenizer_without_conversations_is_named(rank: int, world_size: int, tmp_path: Path) -> None:
    class Plain(_Tokenizer):
        def tokenize_conversation(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError("This method is supported only for SFTTokenizer.")

    with pytest.raises(ValueError, match=r"--tokenizer-type: Plain tokenises no conversations; take SFTTokenizer"):
        _tokenised(write_lines(tmp_path / "talk.jsonl", LINES), Plain())


def a_cache_that_is_not_whole_is_named(rank: int, world_size: int, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "talk.jsonl", LINES)
    folder = _tokenised(path, _Tokenizer())
    whole = module.TokenisedFile.open(ConversationFile(path), folder)
    assert whole.lengths.tolist() == [21, 16, 22, 16] and whole.lines.tolist() == [0, 1, 3, 4]
    other = ConversationFile(write_lines(tmp_path / "other.jsonl", LINES[:1]))
    with pytest.raises(
        ValueError, match=r"does not hold the conversations of .*other\.jsonl; .* remove .*, and it is made"
    ):
        module.TokenisedFile.open(other, folder)
    os.truncate(folder / "targets.bin", 100)
    with pytest.raises(
        ValueError, match=r"targets\.bin: the file is cut off: .*sequence 1 is.* remove .*, and it is made anew"
    ):
        module.TokenisedFile.open(ConversationFile(path), folder)


def a_cache_that_cannot_be_written_is_named(rank: int, world_size: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file.*: Not a directory; name a folder .* with --data-cache-path"):
        _tokenised(write_lines(tmp_path / "talk.jsonl", LINES), _Tokenizer(), cache=tmp_path / "file")


@pytest.mark.parametrize(
    "check",
    [
        a_file_is_tokenised_once_for_its_contents_and_its_tokenizer,
        a_tokenizers_own_files_belong_to_it,
        a_line_that_cannot_be_tokenised_leaves_nothing_behind,
        a_tokenizer_without_conversations_is_named,
        a_cache_that_is_not_whole_is_named,
        a_cache_that_cannot_be_written_is_named,
    ],
    ids=lambda check: check.__name__,
)
def test_tokenising(tmp_path: Path, check: Callable[..., None]) -> None:
    """On a rank, because Megatron's writer of indexed datasets takes part."""
    run_ranks(check, 1, tmp_path, prepare=import_megatron, init_process_group=False)


# -------------------------------------------------------------------------------------------------------------- samples


class _Sequences:
    """An indexed dataset in memory."""

    def __init__(self, sequences: Sequence[np.ndarray]) -> None:
        self.sequence_lengths = np.array([len(each) for each in sequences], np.int32)
        self._sequences = sequences

    def get(self, index: int, offset: int = 0, length: int = 0) -> np.ndarray:
        return self._sequences[index][offset : offset + length]


@dataclasses.dataclass(frozen=True)
class _Tokenised:
    """A tokenised file in memory: per line its conversations, each as (tokens, targets)."""

    talk: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]]

    def __post_init__(self) -> None:
        every = [pair for line in self.talk for pair in line]
        self.__dict__["tokens"] = _Sequences([tokens for tokens, _ in every])
        self.__dict__["targets"] = _Sequences([targets for _, targets in every])
        self.__dict__["lengths"] = self.__dict__["tokens"].sequence_lengths
        self.__dict__["lines"] = np.cumsum([0, *(len(line) for line in self.talk)])
        self.__dict__["file"] = self

    def place(self, sample: int) -> str:
        return f"talk.jsonl:{sample + 1}"


def in_memory(
    talk: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]], *, limit: int, overlong: Any = "error", seed: int = 1
) -> Conversations:
    source: Any = ConversationSource(_Tokenised(talk), np.arange(len(talk)), pad_token=-1)  # type: ignore[arg-type]
    return Conversations([source], [1.0], seed=seed, seq_length=limit, overlong=overlong)


def tokens_of(length: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(length), np.arange(length)


LENGTHS = [[(5)], [11, 4], [12, 1], [3, 30]]


def test_a_conversation_is_a_sequence_and_overlong_ones_follow_the_rule() -> None:
    talk = [[tokens_of(length) for length in line] for line in LENGTHS]

    def pieces(overlong: str) -> list[tuple[int, int, int]]:
        found = in_memory(talk, limit=10, overlong=overlong).pieces(0, 4)
        return sorted((piece.document, piece.start, piece.length) for piece in found)

    # Conversation 4 is a single token; 11 tokens are 10 input positions, which fit.
    fitting = [(0, 0, 4), (1, 0, 10), (2, 0, 3), (5, 0, 2)]
    assert pieces("drop") == fitting
    assert pieces("truncate") == sorted([*fitting, (3, 0, 10), (6, 0, 10)])
    message = (
        r"sample 2 \(talk.jsonl:3\) has a conversation of 11 input positions, more than --seq-length 10; so have 1 further "
        r"samples; raise --seq-length or set overlong: truncate or drop"
    )
    with pytest.raises(ValueError, match=message):
        in_memory(talk, limit=10)
    in_memory(talk, limit=29)


def test_samples_are_lines_in_an_order_of_their_own() -> None:
    samples = in_memory([[tokens_of(3)] * n for n in (1, 2, 3)], limit=8)
    epochs = [[piece.document for piece in samples.pieces(first, 3)] for first in (0, 3, 6, 9)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs) and len({tuple(epoch) for epoch in epochs}) > 1
    assert [piece.document for piece in samples.pieces(0, 12)] == [each for epoch in epochs for each in epoch]
    again, other = (in_memory([[tokens_of(3)] * n for n in (1, 2, 3)], limit=8, seed=seed) for seed in (1, 2))
    assert again.pieces(0, 12) == samples.pieces(0, 12) != other.pieces(0, 12)
    assert samples.place(Piece(0, 4, 0, 2)) == "conversation 2 of talk.jsonl:3"


def test_what_is_said_at_the_start_counts_the_split(tmp_path: Path) -> None:
    talk: Any = _Tokenised([[tokens_of(length) for length in line] for line in LENGTHS])
    source = ConversationSource(talk, np.array([3, 1]), pad_token=-1)
    assert source.lengths().tolist() == [2, 29, 10, 3]
    samples = Conversations([source], [1.0], seed=1, seq_length=20, overlong="drop")
    line = samples.describe(16)
    assert "16 of them are 120 tokens per step on average (mean 8)" in line
    assert "1 of 4 conversations are longer than --seq-length 20 (overlong: drop)" in line


def test_the_rule_for_overlong_conversations_is_error_unless_given(tmp_path: Path) -> None:
    def rule(text: str) -> str:
        path = tmp_path / "hotspa.yaml"
        path.write_text("strategies: []\n" + text)
        config: HotSPaConfig = load_config(path)
        return config.overlong_for_conversations()

    assert [rule(""), rule("overlong: drop"), rule("overlong: truncate"), rule("overlong: error")] == [
        "error", "drop", "truncate", "error",
    ]  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"hotspa\.yaml:3: overlong: split cuts documents; conversations .* are not cut"
    ):
        rule("samples: documents\noverlong: split\n")


# ------------------------------------------------------------------------------------------- Megatron's own SFT dataset


@needs_padding
def test_labels_and_masks_are_those_of_megatrons_own_dataset() -> None:
    path = write_lines(workspace() / "compared.jsonl", [*LINES, *_talk(30, seed=3)])
    assert run_ranks(_compare_with_dataset, 1, path, prepare=import_megatron)[0] > 2000


def _compare_with_dataset(rank: int, world_size: int, path: Path) -> int:
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers import MegatronTokenizer
    from megatron.core.tokenizers.text.text_tokenizer import MegatronTokenizerText
    from megatron.training.datasets.sft_dataset import SFTDataset

    compared = 0
    for prompt_format in ("nemotron-h-aligned", "default"):
        patches = Patches()
        count = counts_prompts(prompt_format)
        patches.wrap(
            MegatronTokenizerText,
            "tokenize_conversation",
            lambda original, count=count: module.speaking_bytes(original, count_prompts=count),
        )
        tokenizer = MegatronTokenizer.from_pretrained(
            metadata_path={"library": "null-text"}, vocab_size=288, pad_id=286
        )
        config = GPTDatasetConfig(
            random_seed=1, sequence_length=800, blend=None, split="1,0,0", tokenizer=tokenizer, reset_position_ids=False,
            reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False, context_parallel_size=1,
        )  # fmt: skip
        file = ConversationFile(path)
        dataset = SFTDataset(file, str(path), np.arange(len(file)), len(file), Split.train, config)
        (read,) = module.tokenise_once([file], tokenizer, prompt_format=prompt_format, cache=None, log=print)
        source = ConversationSource(read, np.arange(len(file)), tokenizer.pad)
        samples = Conversations([source], [1.0], seed=1, seq_length=800, overlong="error")
        for line in range(len(file)):
            stock, begin = dataset[line], 0
            assert len(dataset._split_conversations(file[line])) == len(source.conversations(line))
            for conversation in source.conversations(line):
                length = int(read.lengths[conversation])
                text = samples.text(Piece(0, conversation, 0, length - 1))
                where = slice(begin, begin + length - 1)
                assert (text.inputs == stock["tokens"][where].numpy()).all()
                assert (text.targets == stock["labels"][where].numpy()).all()
                assert (text.counted == stock["loss_mask"][where].numpy().astype(bool)).all()
                assert (stock["position_ids"][where] == torch.arange(length - 1)).all()
                # The last token: stock keeps it as an input, whose target is the next conversation's first, or padding.
                last = bool(stock["loss_mask"][begin + length - 1])
                assert last == (count and conversation + 1 in source.conversations(line))
                compared += length
                begin += length
            assert not stock["loss_mask"][begin:].any()
        patches.undo_all()
    return compared


# ------------------------------------------------------------------------------------- gradients, in double precision


def _sequence(number: int, length: int, counted: str) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets of a conversation with ``length`` input positions; ``counted``: all, none, end, every third."""
    tokens = np.random.default_rng([number, length]).integers(0, VOCAB, length + 1)
    at = np.arange(length + 1)
    keeps = {"all": at >= 0, "none": at < 0, "end": at > length // 2, "third": at % 3 == 0}[counted]
    return tokens, np.where(keeps, tokens, IGNORED)


# Each step's (input positions, which targets count). SEQ_LENGTH is 64; the strategies below end at 16 and 32.
STEPS: dict[str, tuple[tuple[int, str], ...]] = {
    "ordinary": ((3, "end"), (9, "third"), (16, "all"), (21, "end"), (33, "end"), (64, "third"), (47, "end"), (5, "all")),
    "single tokens and odd lengths": ((1, "all"), (1, "all"), (1, "none"), (3, "end"), (5, "all"), (37, "third"), (49, "all")),
    "a micro-batch and a rank without targets": (
        (16, "none"), (16, "all"), (16, "end"), (16, "none"), (17, "none"), (40, "end"), (41, "none"),
    ),
    "a group without targets": ((4, "none"), (7, "none"), (12, "none"), (20, "end"), (50, "third")),
    "one sequence": ((23, "end"),),
    "fewer sequences than data-parallel ranks": ((13, "end"), (14, "all"), (60, "end")),
    "nothing for home": ((13, "end"), (14, "none"), (15, "all"), (29, "third")),
    "nothing counts": ((3, "none"), (18, "none"), (60, "none")),
}  # fmt: skip
MIXES = (
    Mix((2, 2, 1), ((16, 1, 1, 1), (32, 2, 1, 1)), (SP, UNTIED, SHARDED, "--overlap-grad-reduce")),
    Mix((2, 1, 2), ((16, 1, 1, 1), (32, 2, 2, 1)), (SP,)),
    Mix((1, 1, 1), ((16, 2, 2, 1), (32, 2, 1, 2)), (SP, SHARDED)),
)


PROMPTS_COUNT = "prompts count"
PLANTED, PLANTED_AND_MULTIPLIED = "NaN planted", "NaN planted and multiplied by the mask"
"""Every loss of a position that does not count (prompts, padding, filler) is NaN, as a kernel may leave it."""


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """Of every mix, of one with NaN planted at masked positions; then of broken steps."""
    jobs = [
        *((mix, "") for mix in MIXES),
        (MIXES[0], PLANTED),
        (MIXES[0], PLANTED_AND_MULTIPLIED),
        (MIXES[0], PROMPTS_COUNT),
    ]
    return list(run_ranks(_gradient_errors, 4, jobs, timeout=280, prepare=import_megatron)[0])


def test_gradients_equal_the_reference_wherever_prompts_gather(results: list[dict[str, Any]]) -> None:
    for result in results[:-2]:
        worst = max(result["errors"], key=lambda key: result["errors"][key])
        print(f"{result['mix']}: {result['errors'][worst]:.1e} ({worst})")
        assert result["errors"][worst] <= 1e-9
        assert {name for name, _ in result["errors"]} == set(STEPS)


def test_the_steps_are_what_they_are_called(results: list[dict[str, Any]]) -> None:
    seen = {each for result in results[:-2] for each in result["seen"]}
    assert {"masked micro-batch", "masked replica", "masked group", "masked step", "idle replica", "no home"} <= seen


def test_a_nan_that_is_multiplied_by_the_mask_is_seen(results: list[dict[str, Any]]) -> None:
    """Negative control: without selecting, what was planted at masked positions reaches the loss."""
    assert results[-2]["errors"]["ordinary", "loss"] == math.inf


def test_prompts_that_count_are_seen(results: list[dict[str, Any]]) -> None:
    """Negative control: the reference leaves prompts out, the step does not."""
    assert min(error for (name, _), error in results[-1]["errors"].items() if name == "ordinary") > 1e-3


def _gradient_errors(rank: int, world: int, jobs: Sequence[tuple[Mix, str]]) -> list[dict[str, Any]]:
    with double_precision():
        return [_errors_of(mix, rank, world, fault) for mix, fault in jobs]


def _errors_of(mix: Mix, rank: int, world: int, fault: str) -> dict[str, Any]:
    """By (step, parameter or "loss"): the relative error, of zero gradients the largest; and what the steps contained."""
    from hotspa_megatron.hooks import arguments as megatron_arguments
    from hotspa_megatron.hooks import get_batch, install
    from hotspa_megatron.hooks.data import StepBatch, StepLoader

    session, model, forward_step = start(mix, world, torch.float64)
    runner, layout = session.runner, session.runner.moves.layout
    values = {parameter.name: _value(parameter) for parameter in layout.parameters}
    for piece in layout.pieces(rank):
        whole = values[layout.parameters[piece.parameter].name]
        local = runner.moves.parameters[piece.parameter].data
        local[region(piece.start, piece.box.shape)] = whole[region(piece.box.lo, piece.box.shape)]
    patches = Patches()
    get_batch.serve(forward_step, patches, adapter=None)
    if fault == PROMPTS_COUNT:
        patches.wrap(Conversations, "text", lambda text: lambda *at: Text(*text(*at)[:2], np.ones(at[1].length, bool)))
    if fault == PLANTED_AND_MULTIPLIED:
        from hotspa_megatron.hooks import loss_reports

        patches.set(loss_reports, "_only_counted", lambda losses, iterator: losses)
    shape = megatron_arguments.shape_of(session.args)
    errors: dict[tuple[str, str], float] = {}
    seen: set[str] = set()
    finite = _watch_losses(patches, forward_step)
    for number, (name, wanted) in enumerate(STEPS.items()):
        # Two conversations to a line, where there are two.
        talk = [_sequence(10 * number + index, *each) for index, each in enumerate(wanted)]
        samples = in_memory([talk[begin : begin + 2] for begin in range(0, len(talk), 2)], limit=SEQ_LENGTH)
        lines = -(-len(talk) // 2)
        loader = StepLoader(samples, session.planner, position=lambda lines=lines: (0, lines))  # type: ignore[misc]
        step = loader.step(StepBatch(0, lines))
        for chunk in model:
            chunk.zero_grad_buffer()
        planting = functools.partial(_planting, forward_step) if fault.startswith(PLANTED) else forward_step
        _, record = runner.run(forward_step_func=planting, step=step, loader=loader)
        seen |= _contents(step, [bool((y[1:] != IGNORED).any()) for _, y in talk], samples)
        for guest in runner._guests.values():
            assert guest.resident_bytes == 0
        gathered = _gathered(runner)
        if rank:  # all of them hold the same, and share the cores
            continue
        loss, targets, expected = of_sequences(
            values, shape, [(torch.from_numpy(t[:-1]), torch.from_numpy(y[1:])) for t, y in talk]
        )
        ((total, tokens),) = record.losses.values()
        assert tokens == targets or fault == PROMPTS_COUNT
        _worsen_at(errors, name, "loss", abs(total - loss) / max(abs(loss), 1.0))
        for parameter, gradient in gathered.items():
            reference = expected[parameter] / max(targets, 1)
            scale = float(reference.abs().max()) or 1.0
            _worsen_at(errors, name, parameter, float((gradient - reference).abs().max()) / scale)
    assert finite and (all(finite) or fault == PLANTED_AND_MULTIPLIED)
    patches.undo_all()
    install.uninstall()
    return {"mix": str(mix), "errors": errors, "seen": sorted(seen)}


def _planting(forward_step: Any, iterator: Any, model: Any) -> Any:
    output, loss_func = forward_step(iterator, model)
    (mask,) = loss_func.args
    if output.shape == mask.shape:  # losses: of the last pipeline stage
        output = output + torch.where(mask != 0, 0.0, math.nan)
    return output, loss_func


def _worsen_at(errors: dict[tuple[str, str], float], step: str, name: str, error: float) -> None:
    named: dict[str, Any] = {name: errors.get((step, name), 0.0)}
    _worsen(named, name, error)
    errors[step, name] = named[name]


def _watch_losses(patches: Patches, forward_step: Any) -> list[bool]:
    """Notes whether every token's loss is finite, those of prompts, padding and filler included."""
    finite: list[bool] = []
    script = forward_step.__globals__
    loss_func = script["loss_func"]

    def watched(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
        finite.append(bool(torch.isfinite(losses).all()))
        return loss_func(loss_mask, losses)

    patches.item(script, "loss_func", watched)
    return finite


def _contents(step: Any, has_targets: Sequence[bool], samples: Conversations) -> set[str]:
    """Which of the cases that have to be met a step meets."""
    counts = [has_targets[piece.document] for piece in step.sequences]
    found = set() if any(counts) else {"masked step"}
    if not any(str(segment.kind) == "home" for segment in step.plan.segments):
        found.add("no home")
    for segment in step.plan.segments:
        ids = [[i for batch in batches for i in batch] for batches in segment.micro_batches]
        if not any(counts[i] for replica in ids for i in replica):
            found.add("masked group")
        for replica, batches in zip(ids, segment.micro_batches, strict=True):
            if not batches:
                found.add("idle replica")
            elif not any(counts[i] for i in replica):
                found.add("masked replica")
            elif any(batch and not any(counts[i] for i in batch) for batch in batches):
                found.add("masked micro-batch")
    return found


# --------------------------------------------------------------------------------------- through megatron.training.pretrain


def _talk(lines: int, seed: int) -> list[list[dict[str, str]]]:
    """Lines of one to three conversations, mostly short."""
    numbers = random.Random(seed)
    found = []
    for _ in range(lines):
        line = []
        for _ in range(numbers.choice((1, 1, 1, 2, 3))):
            turns = ["system: be kind"]
            for _ in range(numbers.choice((1, 1, 2))):
                start = numbers.randrange(97, 110)
                answer = "".join(chr(start + i % 9) for i in range(min(int(numbers.lognormvariate(3, 1)), 100)))
                turns += [f"user: {chr(start) * numbers.randrange(1, 20)}", f"assistant: {answer}"]
            line += said(*turns)
        found.append(line)
    return found


def _provide_conversations() -> None:
    """The example script knows documents alone; pretrain_gpt.py gives its builder this class under --sft."""
    from megatron.core.datasets import blended_megatron_dataset_builder as builders

    original = builders.BlendedMegatronDatasetBuilder

    def builder(kind: Any, *rest: Any) -> Any:
        from megatron.training.datasets.sft_dataset import SFTDataset

        return original(SFTDataset, *rest)

    Patches().set(builders, "BlendedMegatronDatasetBuilder", builder)


def _no_tokenising() -> None:
    _provide_conversations()
    from hotspa_megatron.hooks import conversations

    def refuse(*_: Any) -> None:
        raise AssertionError("a file was tokenised again")

    Patches().set(conversations, "_write", refuse)


def conversation_run(
    config: str, path: Path, *more: str, before: Any = _provide_conversations, iterations: int = 5
) -> Run:
    line = arguments(
        *TP2_CP2.flags, "--sft", "--vocab-size", "288", "--split", "100,0,0", *more, tp=2, cp=2, iterations=iterations,
        batch=8, documents=path,
    )  # fmt: skip
    return train(Job(line, config, before=before))


@functools.cache
def training_lines() -> Path:
    """40 lines, five steps of eight. In the third step nobody answers."""
    talk = _talk(40, seed=5)
    for sample in range(16, 24):
        talk[sample] = [message for message in talk[sample] if message["role"] != "assistant"]
    order = SampleOrder([40], [1.0], SEED).samples(0, 40)
    placed = {line: talk[sample] for sample, (_, line) in enumerate(order)}
    return write_lines(workspace() / "talk.jsonl", [placed[line] for line in range(40)])


@needs_padding
def test_mixed_training_on_conversations_equals_the_static_one_and_tokenises_once() -> None:
    static = conversation_run(STATIC, training_lines())
    mixed = conversation_run(GUEST_AND_SIBLING, training_lines(), before=_no_tokenising)
    assert "tokenised 40 lines" in static.output and "40 lines, tokenised before" in mixed.output
    assert {kind for _, kind in strategies_of(mixed)} == {"guest", "sibling", "home"}
    assert [each.consumed_samples for each in mixed.iterations] == [8 * step for step in range(1, 6)]
    assert_equal("conversations", mixed, static, [static, static])
    # A step without a target has zero gradients and does no harm.
    for run in (static, mixed):
        assert run.grad_norms[2] == 0 and all(0 < norm < math.inf for norm in run.grad_norms[:2] + run.grad_norms[3:])
        assert run.losses[4] < run.losses[0]


@needs_padding
def test_other_prompt_formats_train_on_more() -> None:
    """Negative control: another mask is another training."""
    masked = conversation_run(STATIC, training_lines())
    whole = conversation_run(STATIC, training_lines(), "--sft-tokenizer-prompt-format", "default", iterations=2)
    with pytest.raises(AssertionError):
        assert_equal("prompts", whole, dataclasses.replace(masked, iterations=masked.iterations[:2]), [masked, masked])


class _WithoutPadding:
    """As NullTokenizer is before 0.18; later ones raise where none is set."""

    @property
    def pad(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize("tokenizer", [object(), _WithoutPadding(), SimpleNamespace(pad=None)])
def test_a_tokenizer_without_padding_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=rf"--tokenizer-type: {type(tokenizer).__name__} has no token for padding"):
        module._padding_of(tokenizer)
    assert module._padding_of(SimpleNamespace(pad=286)) == 286


@needs_padding
@pytest.mark.parametrize(
    ("lines", "config", "more", "message"),
    [
        ([*_talk(20, seed=1), [{"role": "user"}]], STATIC, (), "talk.jsonl:21: message 1 is not"),
        ([said("user: " + "x" * 300, "assistant: y")] * 12, STATIC, (), "input positions, more than --seq-length 256"),
        (_talk(12, seed=1), "strategies: []\noverlong: split", (), ":2: overlong: split cuts documents"),
        (_talk(12, seed=1), "strategies: []\nsamples: megatron", (), "samples: megatron cuts documents"),
        (_talk(12, seed=1), STATIC, ("--vocab-size", "200"), "--vocab-size 200: NullTokenizer tokenises"),
        ([], STATIC, (), "talk.jsonl: the file is empty"),
    ],
    ids=["bad line", "overlong", "split", "megatron", "vocabulary", "empty"],
)
def test_what_cannot_be_trained_ends_with_one_line(
    tmp_path: Path, lines: Any, config: str, more: tuple[str, ...], message: str
) -> None:
    path = write_lines(tmp_path / "talk.jsonl", lines)
    line = arguments("--sft", "--vocab-size", "288", "--split", "100,0,0", *more, documents=path)
    assert message in refusal(Job(line, config, ranks=2, before=_provide_conversations))
