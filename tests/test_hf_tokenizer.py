"""Conversations by a Hugging Face tokenizer, as under --tokenizer-type SFTTokenizer: made here, nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.spawn import run_ranks
from tests.test_conversations import LINES, _talk, write_lines
from tests.training import import_megatron

FORMAT = "nemotron-h-aligned"


def test_tokens_and_masks_are_those_of_megatrons_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = write_lines(
        tmp_path / "talk.jsonl", [line for line in (*LINES, *_talk(20, seed=4)) if line[-1]["role"] == "assistant"]
    )
    compared, counted = run_ranks(_compare, 1, tmp_path, path, prepare=import_megatron)[0]
    assert 0 < counted < compared


def _make(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "</s>", *(f"<SPECIAL_{number}>" for number in (10, 11, 233))]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={each: at for at, each in enumerate([*special, *letters])}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="</s>", additional_special_tokens=special[2:]
    )
    wrapped.save_pretrained(folder)


def _compare(rank: int, world_size: int, folder: Path, path: Path) -> tuple[int, int]:
    from megatron.core.tokenizers import MegatronTokenizer

    from hotspa_megatron.hooks.conversations import (
        IGNORED,
        ConversationFile,
        Conversations,
        ConversationSource,
        conversations_of,
        tokenise_once,
    )
    from hotspa_megatron.hooks.samples import Piece

    _make(folder / "tokenizer")
    tokenizer = MegatronTokenizer.from_pretrained(
        tokenizer_path=str(folder / "tokenizer"), metadata_path={"library": "sft"}, prompt_format=FORMAT
    )
    file = ConversationFile(path)
    (read,) = tokenise_once([file], tokenizer, prompt_format=FORMAT, cache=folder / "cache", log=print)
    samples = Conversations(
        [ConversationSource(read, np.arange(len(file)), tokenizer.pad)],
        [1.0],
        seed=1,
        seq_length=4096,
        overlong="error",
    )
    compared = counted = number = 0
    for line in range(len(file)):
        for conversation in conversations_of(file[line]):
            tokens, targets = tokenizer.tokenize_conversation(
                conversation, return_target=True, add_generation_prompt=False
            )
            text = samples.text(Piece(0, number, 0, len(tokens) - 1))
            assert text.inputs.tolist() == tokens[:-1].tolist()
            assert text.counted.tolist() == (targets[1:] != IGNORED).tolist()
            assert text.targets[text.counted].tolist() == targets[1:][text.counted].tolist()
            compared, counted, number = compared + len(tokens), counted + int(text.counted.sum()), number + 1
    return compared, counted
