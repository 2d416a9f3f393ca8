"""Which document is sample number i: a pure function of the corpus, its weights and the seed.

Random access without state: no index of the whole run is built, and the order depends neither on strategies nor on the
number of ranks, so a resumed run continues it from its count of consumed samples alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class SampleOrder:
    """Documents of one or more sources in training order.

    ``documents``: documents per source. ``shares``: each source's share of *documents* (any positive scale; token shares
    become document shares by dividing by the source's mean length). Every source is passed through in epochs, each a
    fresh permutation that holds every document once.

    Sources are interleaved by stride: the j-th document of a source with share p is due at time (j + 1/2) / p, and
    samples are taken in the order of their times. So after any number of samples a source is off its share by at most half
    as many documents as there are sources, or by one: of many sources with equal shares, documents fall due together.
    """

    def __init__(self, documents: Sequence[int], shares: Sequence[float], seed: int) -> None:
        if not documents or len(documents) != len(shares):
            raise ValueError(f"{len(documents)} sources with {len(shares)} shares")
        if min(documents) < 1 or min(shares) <= 0:
            raise ValueError("every source needs at least one document and a share above 0")
        self._documents = tuple(int(n) for n in documents)
        self._shares = np.asarray(shares, np.float64) / float(np.sum(shares))
        # Two epochs per source can meet in one mini-batch; more only where an epoch is shorter than a mini-batch.
        self._permutation = functools.lru_cache(maxsize=4 * len(documents))(self._new_permutation)
        self._seed = seed

    def samples(self, first: int, count: int) -> list[tuple[int, int]]:
        """(source, document within the source) of samples ``first`` to ``first + count - 1``."""
        return [(source, self._document(source, draw)) for source, draw in self._draws(first, count)]

    def _draws(self, first: int, count: int) -> list[tuple[int, int]]:
        """(source, how many of its documents came before) of each sample."""
        if len(self._documents) == 1:
            return [(0, draw) for draw in range(first, first + count)]
        # Each source is off its share by at most half a document: the samples lie in this span of time.
        margin = len(self._documents) + 1
        begin, end = max(0, first - margin), first + count + margin
        before = [max(0, int(np.ceil(begin * share - 0.5))) for share in self._shares]
        times, sources, draws = [], [], []
        for source, share in enumerate(self._shares):
            own = np.arange(before[source], max(before[source], int(np.ceil(end * share - 0.5))), dtype=np.int64)
            times.append((own + 0.5) / share)
            sources.append(np.full(len(own), source, np.int64))
            draws.append(own)
        in_time = np.lexsort((np.concatenate(sources), np.concatenate(times)))
        start = first - sum(before)
        chosen = in_time[start : start + count]
        return list(zip(np.concatenate(sources)[chosen].tolist(), np.concatenate(draws)[chosen].tolist(), strict=True))

    def _document(self, source: int, draw: int) -> int:
        epoch, position = divmod(draw, self._documents[source])
        return int(self._permutation(source, epoch)[position])

    def _new_permutation(self, source: int, epoch: int) -> NDArray[np.int64]:
        generator = np.random.default_rng(np.random.SeedSequence([self._seed, source, epoch]))
        return generator.permutation(self._documents[source])
