"""Conversations for fine-tuning (--sft): lines of JSON -> sequences of their true lengths, tokenised once.

A sample is a line, as in Megatron's SFTDataset; every conversation in it is a sequence of its own, with the labels and the
loss mask that the tokenizer gives it there. Rank 0 tokenises a file into an index in the data cache and every rank maps that,
so that planning asks nobody. Conversations are never cut in two: the end of one would answer what it does not hold.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import shutil
import time
import uuid
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from hotspa_megatron.config import Overlong
from hotspa_megatron.hooks import compat
from hotspa_megatron.hooks.samples import Piece, Text, check_index, members_of, spans, trained
from hotspa_megatron.planning.sample_order import SampleOrder

Message: TypeAlias = Mapping[str, Any]

LONGEST_LINE: Final = 1 << 26
"""Bytes of a line: hundreds of times a long book. A file without line breaks would fill the memory of every rank."""
IGNORED: Final = -100
"""The target that Megatron's tokenizers give a token of a prompt."""

# ---------------------------------------------------------------------------------------------------------------- lines


class ConversationFile:
    """A file of JSON lines, each {"messages": [{"role": "user", "content": "..."}, ...]}; blank lines do not count.

    Stands in for Megatron's SFTLowLevelDataset, which needs the package `datasets`, and says where a line is wrong.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._starts, self._numbers = array("q"), array("q")
        start = 0
        try:
            with self.path.open("rb") as file:
                for number in itertools.count(1):
                    line = file.readline(LONGEST_LINE + 1)
                    if not line:
                        break
                    if len(line) > LONGEST_LINE:
                        raise ValueError(
                            f"{self.path}:{number}: the line has more than {LONGEST_LINE} bytes; is it JSON lines?"
                        )
                    if line.strip():
                        self._starts.append(start)
                        self._numbers.append(number)
                    start += len(line)
        except OSError as error:
            raise ValueError(f"{self.path}: {error.strerror}") from None
        if not self._starts:
            raise ValueError(f"{self.path}: the file holds no line")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, sample: int) -> list[Message]:
        """All messages of a line, in order. ValueError, with file and line, for what is not a line of messages."""
        with self.path.open("rb") as file:
            file.seek(self._starts[sample])
            line = file.readline().rstrip()
        try:
            return _messages(line)
        except ValueError as error:
            raise ValueError(f"{self.place(sample)}: {error}") from None

    def place(self, sample: int) -> str:
        """FILE:LINE of a sample."""
        return f"{self.path}:{self._numbers[sample]}"


def _messages(line: bytes) -> list[Message]:
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} of the line is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg}, column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deep") from None
    messages = found.get("messages") if isinstance(found, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('has no messages; write {"messages": [{"role": "user", "content": "..."}, ...]}')
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f'message {number} is not {{"role": "...", "content": "..."}}')
    return messages


def conversations_of(messages: Sequence[Message]) -> list[Sequence[Message]]:
    """The conversations of a line: each begins at a message of the system, the first wherever the line begins."""
    starts = [number for number, message in enumerate(messages) if number == 0 or message["role"] == "system"]
    return [messages[begin:end] for begin, end in itertools.pairwise([*starts, len(messages)])]


# ---------------------------------------------------------------------------------------------------------------- bytes

ROLES: Final = ("system", "user", "assistant", "tool")
BYTE_VOCABULARY: Final = 256 + len(ROLES) + 1
"""Token ids that conversations by bytes take: bytes, roles, end of turn."""


def bytes_of(
    conversation: Sequence[Message], *, end: int, count_prompts: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens and targets of a conversation by bytes: what needs no vocabulary file, for tests and trials.

    A turn is its role (256 + its place in ``ROLES``), the UTF-8 bytes of its content, and ``end``. Prompts, which are all
    turns but the assistant's, and the roles are ``IGNORED`` as targets, unless ``count_prompts``.
    """
    tokens: list[int] = []
    targets: list[int] = []
    for turn in conversation:
        role, content = turn["role"], turn["content"]
        if role not in ROLES:
            raise ValueError(f"role {role!r} is not known; roles are {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"the content of a turn of the {role} is not text")
        try:
            said = [256 + ROLES.index(role), *content.encode(), end]
        except UnicodeEncodeError as error:
            raise ValueError(
                f"character {error.start + 1} of a turn of the {role} is half of a surrogate pair, which is no text"
            ) from None
        tokens += said
        if count_prompts:
            targets += said
        elif role == "assistant":
            targets += [IGNORED, *said[1:]]
        else:
            targets += [IGNORED] * len(said)
    return np.array(tokens, np.int64), np.array(targets, np.int64)


def speaking_bytes(original: Callable[..., Any], *, count_prompts: bool) -> Callable[..., Any]:
    """Megatron's ``tokenize_conversation``, which only its SFTTokenizer has, with bytes for its NullTokenizer."""

    @functools.wraps(original)
    def tokenize_conversation(
        self: Any, conversation: Sequence[Message], return_target: bool, add_generation_prompt: bool
    ) -> Any:
        if self.library != "null-text" or add_generation_prompt:
            return original(self, conversation, return_target, add_generation_prompt)
        tokens, targets = bytes_of(conversation, end=self.eod, count_prompts=count_prompts)
        return (tokens, targets) if return_target else tokens

    return tokenize_conversation


def counts_prompts(prompt_format: str) -> bool:
    """Megatron's rule for --sft-tokenizer-prompt-format: these two leave nothing out of the loss."""
    return prompt_format in ("default", "identity")


# ------------------------------------------------------------------------------------------------------- tokenised once

_FORMAT: Final = 1
"""Of what lies in the cache; a change makes every file be tokenised anew."""
_COLUMNS: Final = ("tokens", "targets")


@dataclass(frozen=True)
class TokenisedFile:
    """A file as every rank reads it: two of Megatron's indexed datasets, of one document per line, one sequence per
    conversation. ``targets`` are the tokens, or ``IGNORED``.

    What it gives is read from maps that Megatron closes with the datasets: it must not outlive them.
    """

    file: ConversationFile
    tokens: Any
    targets: Any

    @classmethod
    def open(cls, file: ConversationFile, folder: Path) -> TokenisedFile:
        """ValueError where the folder is not whole, or does not belong to the file."""
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        try:
            for name in _COLUMNS:
                check_index(str(folder / name))
            found = cls(file, *(IndexedDataset(str(folder / name)) for name in _COLUMNS))
            if len(found.lines) != len(file) + 1 or not np.array_equal(found.lengths, found.targets.sequence_lengths):
                raise ValueError(f"{folder}: does not hold the conversations of {file.path}")
        except ValueError as error:
            raise ValueError(
                f"{error}; the data cache (--data-cache-path) is one that all ranks share: if this rank has it, remove "
                f"{folder}, and it is made anew"
            ) from None
        return found

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each conversation."""
        return np.asarray(self.tokens.sequence_lengths)

    @property
    def lines(self) -> NDArray[np.int64]:
        """The first conversation of each line, and the end of the last."""
        return np.asarray(self.tokens.document_indices)


def tokenise_once(
    files: Sequence[ConversationFile],
    tokenizer: Any,
    *,
    prompt_format: str,
    cache: Path | None,
    log: Callable[[str], None],
) -> list[TokenisedFile]:
    """Have rank 0 tokenise what is not in the cache yet, and open it. Collective.

    ``cache``: None is a folder beside each file. ValueError, the same on every rank, for a line that cannot be read or
    tokenised, and where a rank does not find what rank 0 wrote.
    """
    # Of its own, because tokenising may take longer than any exchange in training is allowed to.
    waiting: Any = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    folders: list[Path] = []
    problem = None
    if dist.get_rank() == 0:
        try:
            folders = [tokenised(file, tokenizer, prompt_format=prompt_format, cache=cache, log=log) for file in files]
        except ValueError as error:
            problem = str(error)
    told: list[Any] = [(folders, problem)]
    dist.broadcast_object_list(told, src=0, group=waiting)
    folders, problem = told[0]
    opened: list[TokenisedFile] = []
    if problem is None:
        try:
            opened = [TokenisedFile.open(file, folder) for file, folder in zip(files, folders, strict=True)]
        except ValueError as error:
            problem = f"rank {dist.get_rank()}: {error}"
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, problem, group=waiting)
    dist.destroy_process_group(waiting)
    for each in everyone:
        if each is not None:
            raise ValueError(each)
    return opened


def tokenised(
    file: ConversationFile, tokenizer: Any, *, prompt_format: str, cache: Path | None, log: Callable[[str], None]
) -> Path:
    """The folder of a tokenised file, made unless it is there: named by the contents of the file and the tokenizer."""
    with file.path.open("rb") as contents:
        digest = hashlib.file_digest(contents, "sha256").hexdigest()
    identity = {
        "format": _FORMAT,
        "contents": digest,
        "tokenizer": _identity_of(tokenizer),
        "prompt format": prompt_format,
        "megatron-core": compat.version(),
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:16]
    folder = (file.path.parent / "cache" if cache is None else cache) / f"{file.path.stem}-conversations-{key}"
    if folder.exists():
        log(f"{file.path}: {len(file):,} lines, tokenised before: {folder}")
        return folder
    # Under another name until it is whole, so that neither a killed job nor a second one leaves half of it.
    unfinished = folder.with_name(f"{folder.name}-{uuid.uuid4().hex}.tmp")
    try:
        unfinished.mkdir(parents=True)
        _write(unfinished, file, tokenizer, log)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():  # else another job was faster, and wrote the same
                raise
    except OSError as error:
        raise ValueError(
            f"{error.filename or folder}: {error.strerror}; name a folder that can be written with --data-cache-path"
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _write(folder: Path, file: ConversationFile, tokenizer: Any, log: Callable[[str], None]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    started = said = time.monotonic()
    num_tokens = counted = conversations = 0
    with contextlib.ExitStack() as opened:
        builders = {name: IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=np.int32) for name in _COLUMNS}
        for builder in builders.values():
            opened.callback(builder.data_file.close)
        for sample in range(len(file)):
            pairs = _tokenise(file, sample, tokenizer)
            lengths = [len(tokens) for tokens, _ in pairs]
            for builder, column in zip(builders.values(), zip(*pairs, strict=True), strict=True):
                builder.add_document(np.concatenate(column), lengths)
            num_tokens += sum(lengths)
            counted += sum(int((targets[1:] != IGNORED).sum()) for _, targets in pairs)
            conversations += len(pairs)
            if time.monotonic() - said > 30:
                said = time.monotonic()
                log(f"{file.path}: tokenised {sample + 1:,} of {len(file):,} lines")
        for name, builder in builders.items():
            builder.finalize(str(folder / f"{name}.idx"))
    log(
        f"{file.path}: tokenised {len(file):,} lines: {conversations:,} conversations of {num_tokens:,} tokens, {counted:,} of "
        f"which are targets, in {time.monotonic() - started:.1f} s"
    )


def _tokenise(file: ConversationFile, sample: int, tokenizer: Any) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Tokens and targets of every conversation of a line. ValueError, with file and line, where there are none."""
    pairs = []
    for conversation in conversations_of(file[sample]):
        try:
            found = tokenizer.tokenize_conversation(conversation, return_target=True, add_generation_prompt=False)
            tokens, targets = (np.asarray(each, np.int64) for each in found)
            if tokens.ndim != 1 or tokens.shape != targets.shape:
                raise ValueError(f"the tokenizer gave tokens {tokens.shape} and targets {targets.shape}")
        except NotImplementedError:
            raise ValueError(
                f"--tokenizer-type: {type(tokenizer).__name__} tokenises no conversations; take SFTTokenizer, or "
                "NullTokenizer for bytes"
            ) from None
        except Exception as error:  # whatever a template or a tokenizer finds wrong, the line is what to look at
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ValueError(f"{file.place(sample)}: cannot be tokenised: {reason}") from None
        pairs.append((tokens, targets))
    return pairs


def _identity_of(tokenizer: Any) -> dict[str, Any]:
    """What the tokens depend on, as far as it shows: the tokenizer's own identity, and its files where it has a folder."""
    identity = {
        "class": f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}",
        "vocabulary": tokenizer.vocab_size,
    }
    identity |= dict(getattr(tokenizer, "unique_identifiers", {}))
    path = getattr(tokenizer, "path", None)
    if path and os.path.exists(path):
        place = Path(path)
        files = sorted(each for each in place.iterdir() if each.is_file()) if place.is_dir() else [place]
        identity["files"] = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    return identity


# -------------------------------------------------------------------------------------------------------------- samples


@dataclass(frozen=True)
class ConversationSource:
    """A file as Megatron's --split exposes it: ``indices`` are its lines, counted from 0 and without blank ones."""

    tokenised: TokenisedFile
    indices: NDArray[np.int64]
    pad_token: int

    def conversations(self, line: int) -> range:
        """The conversations of the ``line``-th line of the split."""
        begin, end = self.tokenised.lines[self.indices[line] : self.indices[line] + 2].tolist()
        return range(begin, end)

    def lengths(self) -> NDArray[np.int64]:
        """Input positions of every conversation of the split: L - 1 for L tokens."""
        lines, size = self.tokenised.lines, np.diff(self.tokenised.lines)[self.indices]
        first = np.repeat(lines[self.indices], size)
        within = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
        return np.maximum(self.tokenised.lengths[first + within].astype(np.int64) - 1, 0)


class Conversations:
    """A sample is a line of conversations; weights of a blend are shares of lines, as Megatron's are for SFTDataset.

    ``seq_length``: the longest sequence, in input positions; ``overlong``: what becomes of longer ones, not ``split``.
    """

    def __init__(
        self,
        sources: Sequence[ConversationSource],
        line_shares: Sequence[float],
        *,
        seed: int,
        seq_length: int,
        overlong: Overlong,
    ) -> None:
        """Raises ValueError for the first conversation that is too long where the rule is ``error``."""
        self._sources = tuple(sources)
        self._order = SampleOrder([len(each.indices) for each in sources], line_shares, seed)
        self._shares = [share / sum(line_shares) for share in line_shares]
        self._seq_length = seq_length
        self._overlong = overlong
        if overlong == "error":
            for source in self._sources:
                self._refuse_longer(source)

    def pieces(self, first: int, count: int) -> list[Piece]:
        found: list[Piece] = []
        for source, line in self._order.samples(first, count):
            for conversation in self._sources[source].conversations(line):
                length = int(self._sources[source].tokenised.lengths[conversation]) - 1
                cut = spans(length, limit=self._seq_length, overlong=self._overlong)
                found += [Piece(source, conversation, start, size) for start, size in cut]
        return found

    def text(self, piece: Piece) -> Text:
        source = self._sources[piece.source]
        tokens, targets = (
            np.asarray(each.get(piece.document, offset=piece.start, length=piece.length + 1), np.int64)
            for each in (source.tokenised.tokens, source.tokenised.targets)
        )
        counted = (targets != IGNORED) & (targets != source.pad_token)
        return Text(tokens[:-1], targets[1:], counted[1:])

    def place(self, piece: Piece) -> str:
        tokenised = self._sources[piece.source].tokenised
        line = int(np.searchsorted(tokenised.lines, piece.document, side="right")) - 1
        return f"conversation {piece.document - int(tokenised.lines[line]) + 1} of {tokenised.file.place(line)}"

    def describe(self, global_batch_size: int) -> str:
        lengths = [source.lengths() for source in self._sources]
        means = [
            trained(each, self._seq_length, self._overlong).sum() / len(source.indices)
            for each, source in zip(lengths, self._sources, strict=True)
        ]
        mean = float(sum(share * each for share, each in zip(self._shares, means, strict=True)))
        over = sum(int((each > self._seq_length).sum()) for each in lengths)
        return (
            f"samples are lines of conversations: {global_batch_size} of them are {global_batch_size * mean:,.0f} tokens per "
            f"step on average (mean {mean:,.0f}), where stock Megatron pads each line to {self._seq_length:,}; {over:,} of "
            f"{sum(map(len, lengths)):,} conversations are longer than --seq-length {self._seq_length} (overlong: "
            f"{self._overlong})"
        )

    def _refuse_longer(self, source: ConversationSource) -> None:
        tokenised = source.tokenised
        longest = np.maximum.reduceat(tokenised.lengths, tokenised.lines[:-1])[source.indices].astype(np.int64) - 1
        over = np.flatnonzero(longest > self._seq_length)
        if len(over):
            sample = int(source.indices[over[0]])
            raise ValueError(
                f"sample {sample} ({tokenised.file.place(sample)}) has a conversation of {longest[over[0]]:,} input "
                f"positions, more than --seq-length {self._seq_length}; so have {len(over) - 1:,} further samples; raise "
                "--seq-length or set overlong: truncate or drop"
            )


def _padding_of(tokenizer: Any) -> int:
    """The token that fills a line up. ValueError for a tokenizer that has none, with which SFTDataset fails, too."""
    try:
        return int(tokenizer.pad)
    # No such attribute before 0.18, None where none was set, or a tokenizer that raises what Megatron's base class does.
    except (AttributeError, TypeError, NotImplementedError):
        name = type(getattr(tokenizer, "_tokenizer", tokenizer)).__name__
        raise ValueError(
            f"--tokenizer-type: {name} has no token for padding, which --sft needs; choose another"
        ) from None


def conversations_from(
    dataset: Any, *, prompt_format: str, seed: int, seq_length: int, overlong: Overlong, log: Callable[[str], None]
) -> Conversations:
    """Unwrap what the user's provider returned for training, tokenised. Collective.

    ValueError for another class than SFTDataset and blends of it, and as ``tokenise_once`` and ``Conversations``.
    """
    from megatron.training.datasets.sft_dataset import SFTDataset

    members, weights = members_of(dataset, (SFTDataset,), what="conversations")
    config = members[0].config
    padding = _padding_of(config.tokenizer)  # before all lines are tokenised for nothing
    files = tokenise_once(
        [member.dataset for member in members],
        config.tokenizer,
        prompt_format=prompt_format,
        cache=Path(config.path_to_cache) if config.path_to_cache else None,
        log=log,
    )
    sources = []
    for member, tokenised_file in zip(members, files, strict=True):
        lines = np.arange(len(tokenised_file.file)) if member.indices is None else np.asarray(member.indices)
        sources.append(ConversationSource(tokenised_file, lines.astype(np.int64), padding))
    return Conversations(sources, weights, seed=seed, seq_length=seq_length, overlong=overlong)
