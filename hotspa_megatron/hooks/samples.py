"""What a training sample is, and its tokens: read off the datasets that the user's own provider returned.

The provider is called once and unwrapped. ``Documents``: a sample is a document, whose length stands in the index, so no
rank has to ask another. ``MegatronSamples``: a sample is one of Megatron's own, cut at its document ends. Either is a
pure function of the consumed samples. (Conversations are in ``conversations.py``.) What is read is checked here: the files
before anything is started (``check_data_files``), tokens as they come (``CheckedSamples``).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hotspa_megatron.config import Overlong
from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.planning.data_check import check_data
from hotspa_megatron.planning.lengths import LengthHistogram, read_index
from hotspa_megatron.planning.sample_order import SampleOrder


@dataclass(frozen=True)
class Piece:
    """A sequence: ``length`` input positions of a document (or sample) of a source, from token ``start`` on."""

    source: int
    document: int
    start: int
    length: int


class Text(NamedTuple):
    """A sequence's inputs, its targets (int64) and which targets count in the loss (bool), all of its length."""

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    counted: NDArray[np.bool_]


class Samples(Protocol):
    """Where steps take their sequences from."""

    def pieces(self, first: int, count: int) -> list[Piece]:
        """The sequences of samples ``first`` to ``first + count - 1``; a sample may give several, or none."""
        ...

    def text(self, piece: Piece) -> Text: ...

    def place(self, piece: Piece) -> str:
        """Where a sequence stands in the data, for a message."""
        ...

    def describe(self, global_batch_size: int) -> str:
        """One line for the job's start: what a sample is and what that means for the tokens of a step."""
        ...


class CheckedSamples:
    """Samples of which every token is held against the embedding as it is read.

    A tensor-parallel embedding would take an id beyond its table for another rank's, and train on zeros.
    """

    def __init__(self, samples: Samples, *, vocabulary: int) -> None:
        """``vocabulary``: rows of the embedding, padding included."""
        self._samples = samples
        self._vocabulary = vocabulary
        self.pieces, self.place, self.describe = samples.pieces, samples.place, samples.describe

    def text(self, piece: Piece) -> Text:
        """Raises ValueError that says where, for tokens that are not there or that the embedding has not."""
        try:
            text = self._samples.text(piece)
        except (ValueError, IndexError, OSError) as error:
            raise ValueError(f"{self.place(piece)} cannot be read: {error}") from error
        if not len(text.inputs) == len(text.targets) == piece.length:
            raise ValueError(
                f"{self.place(piece)} has {piece.length} targets by its index, {len(text.targets)} were read"
            )
        for tokens in (text.inputs, text.targets[text.counted]):
            outside = tokens[(tokens < 0) | (tokens >= self._vocabulary)]
            if len(outside):
                raise ValueError(
                    f"{self.place(piece)} has token id {outside[0]}; the model's vocabulary has {self._vocabulary} ids, "
                    "padding included: the data was tokenised for another one, or is corrupt"
                )
        return text


# ---------------------------------------------------------------------------------------------------------- documents


@dataclass(frozen=True)
class Source:
    """One indexed dataset as Megatron's --split exposes it.

    ``lengths``: tokens of each of its documents; ``name``: where they are read from, for messages.
    """

    indexed: Any
    indices: NDArray[np.int64]
    lengths: NDArray[np.int64]
    pad_token: int
    name: str = "the data"

    def tokens(self, document: int, start: int, count: int) -> NDArray[np.int64]:
        """``count`` tokens of a document from position ``start`` on."""
        found = self.indexed.get(int(self.indices[document]), offset=start, length=count)
        return np.asarray(found, np.int64)


@dataclass(frozen=True)
class Corpus:
    """The user's training data. ``token_shares`` add up to 1; ``masked_token`` is left out of the loss as an input."""

    sources: tuple[Source, ...]
    token_shares: tuple[float, ...]
    masked_token: int | None

    def trained(self, limit: int, overlong: Overlong) -> list[NDArray[np.int64]]:
        """Input positions that each document of each source trains (a document of L tokens has L - 1)."""
        return [trained(np.maximum(source.lengths - 1, 0), limit, overlong) for source in self.sources]

    def mean_length(self, limit: int, overlong: Overlong) -> float:
        """Mean input positions that a sample trains."""
        shares = self.document_shares(limit, overlong)
        means = [float(each.mean()) for each in self.trained(limit, overlong)]
        return sum(share * mean for share, mean in zip(shares, means, strict=True)) / sum(shares)

    def document_shares(self, limit: int, overlong: Overlong) -> list[float]:
        """Shares of documents that give ``token_shares`` of trained tokens, on any scale.

        Raises ValueError for a source of a blend that would train nothing.
        """
        if len(self.sources) == 1:
            return [1.0]
        means = [float(each.mean()) for each in self.trained(limit, overlong)]
        for source, mean in zip(self.sources, means, strict=True):
            if not mean:
                raise ValueError(
                    f"{source.name}: no document has a target within --seq-length {limit} under overlong: {overlong}; "
                    "take it out of the blend or choose another rule"
                )
        return [share / mean for share, mean in zip(self.token_shares, means, strict=True)]

    def without_target(self) -> int:
        """Documents of fewer than two tokens."""
        return sum(int((source.lengths < 2).sum()) for source in self.sources)

    def longer_than(self, limit: int) -> tuple[int, int]:
        """(documents with more input positions than ``limit``, all documents)."""
        over = sum(int((source.lengths - 1 > limit).sum()) for source in self.sources)
        return over, sum(len(source.lengths) for source in self.sources)


def members_of(dataset: Any, kinds: Sequence[type], *, what: str) -> tuple[list[Any], list[float]]:
    """The datasets inside what the user's provider returned for training, and their weights in the blend.

    Raises ValueError, naming the class, for anything but exactly these kinds and blends of them: a class that draws or
    rewrites documents in a way of its own cannot be read past. ``what``: what they are read as.
    """
    from megatron.core.datasets.blended_dataset import BlendedDataset

    blended = type(dataset) is BlendedDataset
    members = list(dataset.datasets) if blended else [dataset]
    for member in members:
        if type(member) not in kinds:
            kind, known = type(member), ", ".join(each.__name__ for each in kinds)
            raise ValueError(
                f"train dataset of class {kind.__module__}.{kind.__qualname__} cannot be read as {what}; {known} and "
                "blends can"
            )
    return members, [float(weight) for weight in dataset.weights] if blended else [1.0]


def gpt_members_of(dataset: Any) -> tuple[list[Any], list[float]]:
    """``members_of`` for documents."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset

    return members_of(dataset, (GPTDataset, MockGPTDataset), what="documents")


def corpus_from(dataset: Any, *, mock_lengths: LengthHistogram | None = None) -> Corpus:
    """Unwrap what the user's provider returned for training to its documents. ValueError as ``members_of``.

    ``mock_lengths``: what to draw the input positions of mock documents from; None leaves them as they are.
    """
    members, weights = gpt_members_of(dataset)
    sources = []
    for member in members:
        indexed = member.dataset
        if mock_lengths is not None:
            indexed = _mock_documents(indexed, mock_lengths, seed=member.config.random_seed)
        lengths = np.asarray(indexed.sequence_lengths)
        indices = np.arange(len(lengths)) if member.indices is None else np.asarray(member.indices)
        sources.append(
            Source(
                indexed, indices.astype(np.int64), lengths[indices].astype(np.int64), member._pad_token_id,
                name=member.dataset_path or "the mock data",
            )
        )  # fmt: skip
    config = members[0].config
    eod = config.tokenizer.eod if config.eod_mask_loss else None
    return Corpus(tuple(sources), tuple(weight / sum(weights) for weight in weights), eod)


def _mock_documents(mock: Any, lengths: LengthHistogram, *, seed: int) -> Any:
    """Megatron's mock documents with other lengths: as many, and each what Megatron makes of its length."""
    if lengths.longest >= np.iinfo(np.int32).max:
        raise ValueError(f"mock_lengths: a length of {lengths.longest:,} is beyond what an index holds")
    other = copy.copy(mock)
    other.sequence_lengths = (lengths.sample(len(mock), seed=seed) + 1).astype(np.int32)
    return other


class Documents:
    """A sample is a document of the corpus, in an order of our own (``SampleOrder``).

    ``seq_length``: the longest sequence, in input positions; ``overlong``: what becomes of longer documents.
    """

    def __init__(self, corpus: Corpus, *, seed: int, seq_length: int, overlong: Overlong) -> None:
        self._corpus = corpus
        self._order = SampleOrder(
            [len(s.lengths) for s in corpus.sources], corpus.document_shares(seq_length, overlong), seed
        )
        self._seq_length = seq_length
        self._overlong = overlong

    def pieces(self, first: int, count: int) -> list[Piece]:
        """Raises ValueError for a document that is too long where the rule is ``error``."""
        found: list[Piece] = []
        for offset, (source, document) in enumerate(self._order.samples(first, count)):
            length = int(self._corpus.sources[source].lengths[document]) - 1
            if self._overlong == "error" and length > self._seq_length:
                raise ValueError(
                    f"sample {first + offset} (document {document} of source {source}) has {length} input positions, more "
                    f"than --seq-length {self._seq_length}; raise --seq-length or set overlong: split, truncate or drop"
                )
            cut = spans(length, limit=self._seq_length, overlong=self._overlong)
            found += [Piece(source, document, start, size) for start, size in cut]
        return found

    def text(self, piece: Piece) -> Text:
        source = self._corpus.sources[piece.source]
        tokens = source.tokens(piece.document, piece.start, piece.length + 1)
        return masked(tokens, masked_token=self._corpus.masked_token, pad_token=source.pad_token)

    def place(self, piece: Piece) -> str:
        source = self._corpus.sources[piece.source]
        return f"document {source.indices[piece.document]} of {source.name}"

    def describe(self, global_batch_size: int) -> str:
        mean = self._corpus.mean_length(self._seq_length, self._overlong)
        stock = global_batch_size * self._seq_length
        same = max(1, math.ceil(stock / max(mean, 1.0)))
        over, documents = self._corpus.longer_than(self._seq_length)
        empty = self._corpus.without_target()
        return (
            f"samples are documents: {global_batch_size} of them are {global_batch_size * mean:,.0f} tokens per step on "
            f"average (mean length {mean:,.0f}); stock Megatron trains {stock:,} tokens per step with these flags; "
            f"--global-batch-size {same} keeps that; {over:,} of {documents:,} documents are longer than --seq-length "
            f"{self._seq_length} (overlong: {self._overlong})"
            + (f"; {empty:,} have fewer than two tokens and train nothing" if empty else "")
        )


def spans(length: int, *, limit: int, overlong: Overlong) -> list[tuple[int, int]]:
    """(start, length) of the sequences that ``length`` input positions become; what is an ``error`` does not get here.

    A document of a single token has no input position: it counts as a sample and trains nothing.
    """
    if length < 1:
        return []
    if length <= limit:
        return [(0, length)]
    match overlong:
        case "split":
            # Pieces share one token: the last target of one is the first input of the next, so no target is lost.
            return [(start, min(limit, length - start)) for start in range(0, length, limit)]
        case "truncate":
            return [(0, limit)]
        case "drop":
            return []
        case "error":
            raise AssertionError(f"{length} input positions came past the check for more than {limit}")


def trained(inputs: NDArray[np.int64], limit: int, overlong: Overlong) -> NDArray[np.int64]:
    """How many of so many input positions ``spans`` keeps, in all its pieces."""
    match overlong:
        case "truncate":
            return np.minimum(inputs, limit)
        case "drop":
            return np.where(inputs <= limit, inputs, 0)
        case _:
            return inputs


def masked(tokens: NDArray[np.int64], *, masked_token: int | None, pad_token: int) -> Text:
    """Inputs and targets of consecutive tokens by the rules of Megatron's GPTDataset.

    A target does not count behind an input that is ``masked_token`` (the end of a document under --eod-mask-loss) or
    where it is padding; padding is given a token id that the embedding has.
    """
    inputs, targets = tokens[:-1], tokens[1:]
    counted = targets != pad_token
    if masked_token is not None:
        counted &= inputs != masked_token
    return Text(np.where(inputs == pad_token, 0, inputs), np.where(targets == pad_token, 0, targets), counted)


# -------------------------------------------------------------------------------------------------- Megatron's samples


class MegatronSamples:
    """A sample is one of Megatron's own GPTDataset samples, in Megatron's order, cut behind each end of document.

    The same tokens per step, order and consumed samples as stock Megatron has with --reset-position-ids
    --reset-attention-mask --eod-mask-loss --calculate-per-token-loss: a running job can take the flag up and drop it.
    """

    def __init__(self, dataset: Any, *, seq_length: int) -> None:
        """Raises ValueError, naming the class, for anything but GPTDataset, MockGPTDataset and blends of them."""
        self._members, _ = gpt_members_of(dataset)
        self._dataset = dataset
        self._seq_length = seq_length
        config = self._members[0].config
        self._end, self._mask_end = config.tokenizer.eod, config.eod_mask_loss
        # Every rank reads the samples of a step twice: to find the document ends and to build its micro-batches.
        self._tokens = functools.lru_cache(maxsize=1024)(self._read)

    def pieces(self, first: int, count: int) -> list[Piece]:
        found = []
        for sample in range(first, first + count):
            inputs = self._tokens(sample)[:-1]
            begin = 0
            for end in (*(np.flatnonzero(inputs == self._end) + 1).tolist(), len(inputs)):
                if end > begin:
                    found.append(Piece(0, sample, begin, end - begin))
                begin = end
        return found

    def text(self, piece: Piece) -> Text:
        tokens = self._tokens(piece.document)[piece.start : piece.start + piece.length + 1]
        end = self._end if self._mask_end else None
        return masked(tokens, masked_token=end, pad_token=self._members[0]._pad_token_id)

    def place(self, piece: Piece) -> str:
        return f"sample {piece.document} of Megatron's"

    def describe(self, global_batch_size: int) -> str:
        return (
            f"samples are Megatron's own, cut at document ends: {global_batch_size * self._seq_length:,} tokens per step "
            "as without the flag"
        )

    def _read(self, sample: int) -> NDArray[np.int64]:
        """The sample's tokens, one more than --seq-length; without the attention mask that __getitem__ would build."""
        dataset = self._dataset
        if dataset is not self._members[0]:
            if dataset.dataset_index is None:
                dataset[sample]  # loads the blend's index, which may be deferred
            member, sample = (
                self._members[int(dataset.dataset_index[sample])],
                int(dataset.dataset_sample_index[sample]),
            )
        else:
            member = dataset
        return np.asarray(member._query_document_sample_shuffle_indices(sample)[0], np.int64)


# --------------------------------------------------------------------------------------------------------------- files


def check_data_files(args: Any) -> None:
    """Raise ValueError, one line, for the first file of the command line's data that is missing or not whole.

    Needs no process group, so that a job ends before it starts. Object storage is not looked at.
    """
    from megatron.core.datasets.object_storage_utils import is_object_storage_path

    conversations = args.sft
    for paths, weights in _blends(args):
        if conversations and weights is None and len(paths) > 1:
            raise ValueError(
                f"--data-path: {len(paths)} files of conversations without weights; Megatron blends them by weights alone: "
                "write 0.5 A 0.5 B"
            )
        for path in paths:
            if is_object_storage_path(path):
                continue
            if conversations:
                _check_readable(path)
            else:
                check_index(path)


def data_files(args: Any) -> list[Path]:
    """The files of the command line's data, in its order, without those in object storage."""
    from megatron.core.datasets.object_storage_utils import is_object_storage_path

    paths = [str(path) for paths, _ in _blends(args) for path in paths if not is_object_storage_path(path)]
    return [Path(f"{path}{ending}") for path in paths for ending in (("",) if args.sft else (".idx", ".bin"))]


def data_weights(args: Any) -> list[Any]:
    """The weights of the command line's data, those in files that it names included; None for a blend without."""
    return [weights for _, weights in _blends(args)]


def _blends(args: Any) -> list[tuple[Any, Any]]:
    """(paths, weights) of the command line's data: its blend, or that of each split."""
    from megatron.training.utils import get_blend_and_blend_per_split

    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from None
    return [each for each in (blend, *(per_split or ())) if each is not None]


def _check_readable(path: str) -> None:
    try:
        with open(path, "rb") as file:
            empty = not file.read(1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if empty:
        raise ValueError(f"{path}: the file is empty")


def check_index(prefix: str) -> None:
    """Raise ValueError, one line, where an index and its data file are not whole, or hold nothing to train on."""
    summary = check_data(read_index(prefix))
    if summary.longest < 2:
        raise ValueError(f"{summary.index}: no document has two tokens or more, so there is nothing to train on")


@contextlib.contextmanager
def first_rank_of_every_group() -> Iterator[None]:
    """Let Megatron's rule "datasets are built on tensor-parallel rank 0 and the outer stages" hold on every rank."""
    from megatron.core import parallel_state

    patches = Patches()
    patches.set(parallel_state, "_MPU_TENSOR_MODEL_PARALLEL_RANK", 0)
    patches.set(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", 0)
    try:
        yield
    finally:
        patches.undo_all()
