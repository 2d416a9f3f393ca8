"""Documents of the user's own datasets -> one step's sequences -> every rank's own part of every micro-batch.

The user's dataset provider is called once and unwrapped to its indexed documents, whose lengths stand in the index: no
rank has to ask another. Everything after that is a pure function of the consumed samples.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotspa_megatron.config import Overlong
from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.planning.alignment import Alignment
from hotspa_megatron.planning.sample_order import SampleOrder
from hotspa_megatron.planning.step_plan import Segment, StepPlan, StepPlanner
from hotspa_megatron.runtime.attention import zigzag_indices
from hotspa_megatron.strategy import Coordinates

# ------------------------------------------------------------------------------------------------ the user's datasets


@dataclass(frozen=True)
class Source:
    """One indexed dataset as Megatron's --split exposes it. ``lengths``: tokens of each of its documents."""

    indexed: Any
    indices: NDArray[np.int64]
    lengths: NDArray[np.int64]
    pad_token: int

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

    def mean_length(self, limit: int | None = None) -> float:
        """Mean input positions of a sample (a document of L tokens has L - 1), each at most ``limit``."""
        inputs = [np.maximum(source.lengths - 1, 0) for source in self.sources]
        capped = [each if limit is None else np.minimum(each, limit) for each in inputs]
        shares = self.document_shares()
        return float(sum(share * each.mean() for share, each in zip(shares, capped, strict=True)) / sum(shares))

    def document_shares(self) -> list[float]:
        """Shares of documents that give ``token_shares`` of tokens, on any scale."""
        pairs = zip(self.token_shares, self.sources, strict=True)
        return [share / max(float(source.lengths.mean()), 1.0) for share, source in pairs]

    def longer_than(self, limit: int) -> tuple[int, int]:
        """(documents with more input positions than ``limit``, all documents)."""
        over = sum(int((source.lengths - 1 > limit).sum()) for source in self.sources)
        return over, sum(len(source.lengths) for source in self.sources)


def corpus_from(dataset: Any) -> Corpus:
    """Unwrap what the user's provider returned for training.

    Raises ValueError, naming the class, for anything but Megatron's GPTDataset, MockGPTDataset and blends of them: a
    class that draws or rewrites documents in a way of its own cannot be read past.
    """
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset

    blended = type(dataset) is BlendedDataset
    members = dataset.datasets if blended else [dataset]
    weights = [float(weight) for weight in dataset.weights] if blended else [1.0]
    for member in members:
        if type(member) not in (GPTDataset, MockGPTDataset):
            kind = type(member)
            raise ValueError(
                f"train dataset of class {kind.__module__}.{kind.__qualname__} cannot be read as documents; "
                "GPTDataset, MockGPTDataset and blends of them can"
            )
    sources = []
    for member in members:
        lengths = np.asarray(member.dataset.sequence_lengths)
        indices = np.arange(len(lengths)) if member.indices is None else np.asarray(member.indices)
        sources.append(
            Source(member.dataset, indices.astype(np.int64), lengths[indices].astype(np.int64), member._pad_token_id)
        )
    config = members[0].config
    eod = config.tokenizer.eod if config.eod_mask_loss else None
    return Corpus(tuple(sources), tuple(weight / sum(weights) for weight in weights), eod)


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


# ---------------------------------------------------------------------------------------------------- one step's data


@dataclass(frozen=True)
class StepBatch:
    """What the training iterator yields, once per step: which samples. Small, so that it can be kept for a rerun."""

    first_sample: int
    samples: int


@dataclass(frozen=True)
class Piece:
    """A piece of a document: ``length`` input positions from token ``start`` on, whose targets are one token ahead."""

    source: int
    document: int
    start: int
    length: int


@dataclass(frozen=True)
class Step:
    """A step ready to run: its sequences and the plan over them (``plan.lengths[i]`` is ``sequences[i].length``)."""

    batch: StepBatch
    sequences: tuple[Piece, ...]
    plan: StepPlan


class StepLoader:
    """Serves steps as a pure function of consumed samples.

    Iterating yields a ``StepBatch`` per step, for the position and size that ``position`` reports then, so batch-size
    ramp-up and skipped iterations need nothing of their own.
    """

    def __init__(
        self,
        corpus: Corpus,
        planner: StepPlanner,
        *,
        seed: int,
        seq_length: int,
        overlong: Overlong,
        position: Callable[[], tuple[int, int]],
    ) -> None:
        self.corpus = corpus
        self._order = SampleOrder([len(s.lengths) for s in corpus.sources], corpus.document_shares(), seed)
        self._planner = planner
        self._seq_length = seq_length
        self._overlong = overlong
        self._position = position
        # A rerun asks for the same step again; two are enough for the one before, too.
        self.step = functools.lru_cache(maxsize=2)(self._make_step)

    def __iter__(self) -> Iterator[StepBatch]:
        while True:
            yield StepBatch(*self._position())

    def _make_step(self, batch: StepBatch) -> Step:
        """The step of these samples. Raises ValueError for an overlong document where the rule is ``error``."""
        sequences: list[Piece] = []
        for offset, (source, document) in enumerate(self._order.samples(batch.first_sample, batch.samples)):
            length = int(self.corpus.sources[source].lengths[document]) - 1
            # A document of a single token has no target: it counts as a sample and trains nothing.
            if length < 1:
                continue
            sequences += self._cut(source, document, length, sample=batch.first_sample + offset)
        return Step(batch, tuple(sequences), self._planner.plan([each.length for each in sequences]))

    def _cut(self, source: int, document: int, length: int, *, sample: int) -> list[Piece]:
        limit = self._seq_length
        if length <= limit:
            return [Piece(source, document, 0, length)]
        match self._overlong:
            case "split":
                # Pieces share one token: the last target of one is the first input of the next, so no target is lost.
                starts = range(0, length, limit)
                return [Piece(source, document, start, min(limit, length - start)) for start in starts]
            case "truncate":
                return [Piece(source, document, 0, limit)]
            case "drop":
                return []
            case "error":
                raise ValueError(
                    f"sample {sample} (document {document} of source {source}) has {length} input positions, more than "
                    f"--seq-length {limit}; raise --seq-length or set overlong: split, truncate or drop"
                )


# ------------------------------------------------------------------------------------------------------ micro-batches


@dataclass(frozen=True)
class MicroBatch:
    """This rank's part of one packed micro-batch, batch dim 1.

    ``tokens``, ``labels``, ``position_ids``: int64 [1, tokens / cp]; ``loss_mask``: float32 alike; ``boundaries``: the
    cumulative padded lengths over all context-parallel ranks, ``real_boundaries`` without the padding at each
    sequence's end; ``longest``: the longest padded sequence.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    boundaries: tuple[int, ...]
    real_boundaries: tuple[int, ...]
    longest: int


def padded_tokens(lengths: Sequence[int], alignment: Alignment) -> int:
    """Tokens of a micro-batch of these sequences over all its context-parallel ranks."""
    return alignment.pad_total(sum(alignment.pad_sequence(length) for length in lengths))


class SegmentIterator:
    """The micro-batches of one segment that this rank runs, in order; ``forward_step`` takes them from here.

    Micro-batches of a pipelined replica are all padded to the replica's longest, ``total_tokens``, so that stages know
    each other's shapes without asking.
    """

    def __init__(self, step: Step, segment: Segment, corpus: Corpus, at: Coordinates, alignment: Alignment) -> None:
        self._step, self._corpus, self._at, self._alignment = step, corpus, at, alignment
        self._cp = segment.strategy.cp
        self._batches = segment.micro_batches[at.dp]
        totals = [padded_tokens([step.plan.lengths[i] for i in batch], alignment) for batch in self._batches]
        self.total_tokens = max(totals, default=0)
        self._totals = [self.total_tokens] * len(totals) if segment.strategy.pp > 1 else totals
        self._next = 0

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def padded(self) -> int:
        """Tokens that this rank's replica computes over, padding included."""
        return sum(self._totals)

    def __iter__(self) -> SegmentIterator:
        return self

    def __next__(self) -> MicroBatch:
        if self._next == len(self._batches):
            raise StopIteration
        batch, total = self._batches[self._next], self._totals[self._next]
        self._next += 1
        return self._build(batch, total)

    def _build(self, batch: tuple[int, ...], total: int) -> MicroBatch:
        tokens, labels = np.zeros(total, np.int64), np.zeros(total, np.int64)
        mask, positions = np.zeros(total, np.float32), np.zeros(total, np.int64)
        boundaries, real = [0], [0]
        for index in batch:
            piece = self._step.sequences[index]
            source = self._corpus.sources[piece.source]
            text = source.tokens(piece.document, piece.start, piece.length + 1)
            begin, padded = boundaries[-1], self._alignment.pad_sequence(piece.length)
            end = begin + piece.length
            inputs, targets = text[:-1], text[1:]
            # The same rules as Megatron's GPTDataset has for a sample: masked inputs, then padding, then safe ids.
            counts = targets != source.pad_token
            if self._corpus.masked_token is not None:
                counts &= inputs != self._corpus.masked_token
            mask[begin:end] = counts
            tokens[begin:end] = np.where(inputs == source.pad_token, 0, inputs)
            labels[begin:end] = np.where(targets == source.pad_token, 0, targets)
            # Padding repeats the last position: it is never looked at, and stays within a learned position table.
            positions[begin : begin + padded] = np.minimum(np.arange(padded), piece.length - 1)
            boundaries.append(begin + padded)
            real.append(real[-1] + piece.length)
        # What is left belongs to sequences of its own, none longer than the real ones: attention is quadratic.
        longest = max(end - begin for begin, end in itertools.pairwise(boundaries))
        while boundaries[-1] < total:
            filler = min(longest, total - boundaries[-1])
            real.append(real[-1] + filler)
            boundaries.append(boundaries[-1] + filler)
        mine = zigzag_indices(boundaries, self._cp, self._at.cp).numpy()

        def part(values: NDArray[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.from_numpy(values[mine]).to(dtype).unsqueeze(0).cuda(non_blocking=True)

        return MicroBatch(
            tokens=part(tokens),
            labels=part(labels),
            loss_mask=part(mask, torch.float32),
            position_ids=part(positions),
            boundaries=tuple(boundaries),
            real_boundaries=tuple(real),
            longest=longest,
        )


def padding_fraction(step: Step, planner: StepPlanner) -> float:
    """Share of the step's computed tokens that pad; 0 for an empty step."""
    computed = 0
    for segment in step.plan.segments:
        alignment = planner.groups[segment.group].alignment
        for batches in segment.micro_batches:
            totals = [padded_tokens([step.plan.lengths[i] for i in batch], alignment) for batch in batches]
            computed += max(totals, default=0) * len(totals) if segment.strategy.pp > 1 else sum(totals)
    return 1.0 - sum(step.plan.lengths) / computed if computed else 0.0


def describe_batch_size(corpus: Corpus, *, global_batch_size: int, seq_length: int) -> str:
    """One line on what a step holds when its samples are documents, and the batch size that keeps stock's tokens."""
    mean = corpus.mean_length()
    stock = global_batch_size * seq_length
    same = max(1, math.ceil(stock / max(mean, 1.0)))
    over, documents = corpus.longer_than(seq_length)
    return (
        f"samples are documents: {global_batch_size} of them are {global_batch_size * mean:,.0f} tokens per step on average "
        f"(mean length {mean:,.0f}); stock Megatron trains {stock:,} tokens per step with these flags; "
        f"--global-batch-size {same} keeps that; {over:,} of {documents:,} documents are longer than --seq-length {seq_length}"
    )
