"""HotSPa's tables of strategies, as its launch scripts write them, read into ours: ``hotspa plan --table``.

Sizes descend and end in 0; triples are dp,tp,pp, the longest group's first, then the shortest's, and on to longer ones.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from hotspa_megatron.strategy import Strategy

_OPTION = "--table"


@dataclass(frozen=True, kw_only=True)
class HotSPaTable:
    """``entries``: (longest sequence, strategy) of every group but home's, ascending. ``longest``: home's longest."""

    home: Strategy
    entries: tuple[tuple[int, Strategy], ...]
    longest: int

    @classmethod
    def read(cls, sizes: str, triples: str, *, world_size: int) -> HotSPaTable:
        """``ValueError``, one line, for a table that HotSPa's own rules do not allow."""
        bounds = [_size(word) for word in _words(sizes)]
        strategies = [_strategy(word, world_size) for word in _words(triples)]
        if len(bounds) < 2 or bounds[-1] != 0 or any(low >= high for high, low in itertools.pairwise(bounds)):
            raise ValueError(f"{_OPTION}: sizes {sizes!r} do not descend to 0; write them as in '32768 16384 4096 0'")
        if len(bounds) != len(strategies) + 1:
            raise ValueError(
                f"{_OPTION}: {len(strategies)} strategies take {len(strategies) + 1} sizes, but there are {len(bounds)}; "
                "each strategy has a size, and 0 ends them"
            )
        home, *others = strategies
        return cls(home=home, entries=tuple(zip(reversed(bounds[1:-1]), others, strict=True)), longest=bounds[0])

    def as_yaml(self) -> str:
        """The configuration file: budgets of one row of a group's longest, as HotSPa packs."""
        sizes = f"--tensor-model-parallel-size {self.home.tp} --pipeline-model-parallel-size {self.home.pp}"
        lines = ["# HotSPa's table. Home, which takes what is longer, is given to Megatron:"]
        lines += [f"# {sizes} --seq-length {self.longest}", "strategies:" if self.entries else "strategies: []"]
        lines += [
            f"  - {{max_length: {longest}, tp: {each.tp}, pp: {each.pp}}}  # {each}" for longest, each in self.entries
        ]
        return "\n".join(lines) + "\n"


def _words(text: str) -> list[str]:
    return text.replace(";", " ").split()


def _size(word: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,8}", word):
        raise ValueError(f"{_OPTION}: size {word!r} is not a whole number")
    return int(word)


def _strategy(word: str, world_size: int) -> Strategy:
    if not re.fullmatch("[1-9][0-9]{0,5}(,[1-9][0-9]{0,5}){2}", word):
        raise ValueError(f"{_OPTION}: strategy {word!r} is not dp,tp,pp; replicas of different shape are not supported")
    dp, tp, pp = map(int, word.split(","))
    if dp * tp * pp != world_size:
        raise ValueError(f"{_OPTION}: strategy {word} fills {dp * tp * pp} ranks, the world has {world_size}")
    return Strategy.from_world(world_size, tp=tp, cp=1, pp=pp)
