#!/usr/bin/env python3
"""Seeds one fault at a time and checks that the tests of the changed file notice: a test of the tests.

Each fault replaces a short text in one file of a temporary copy of this tree, and the tests named with it must fail there.
What counts is a test that passes without the fault and fails with it; a file that cannot be imported any more, a process that
dies and a test that never ends are no findings of a test, the last but for faults that are marked so. Nothing in the tree
itself is touched. A fault whose text is no longer there, or stands more than once, is an error, so that the list cannot rot.
Exit code 1: a fault survived, or the list is wrong; its name is printed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, TypeVar

ROOT: Final = Path(__file__).resolve().parents[1]
TIME_LIMIT_S: Final = 900

_EPILOG: Final = """\
examples:
  python scripts/mutants.py                  all faults; minutes
  python scripts/mutants.py --single         those that single-process tests notice
  python scripts/mutants.py --only packing   those with 'packing' in their names
  python scripts/mutants.py --list
"""

PLANNING: Final = "hotspa_megatron/planning"
RUNTIME: Final = "hotspa_megatron/runtime"


Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """``old`` stands exactly once in ``path``. ``tests``: arguments of pytest. ``ranks``: they start several processes.

    ``hangs``: something waits or runs for ever, so that no end in good time is how the fault shows.
    """

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    ranks: bool = False
    hangs: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """``verdict``: caught, survived, or what is wrong with the entry itself; ``by``: the first test that failed."""

    name: str
    path: str
    verdict: str
    by: str
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.verdict == "caught"


def _of(
    path: str,
    tests: Sequence[str],
    faults: dict[str, tuple[str, str]],
    *,
    ranks: bool = False,
    hangs: Sequence[str] = (),
) -> Iterator[Mutant]:
    room = Path(path).stem
    for name, (old, new) in faults.items():
        yield Mutant(
            name=f"{room}: {name}", path=path, old=old, new=new, tests=tuple(tests), ranks=ranks, hangs=name in hangs
        )


MUTANTS: Final = (
    *_of(
        f"{RUNTIME}/watchdog.py",
        ["tests/test_watchdog.py", "-k", "not lost"],
        {
            "a silent rank counts as beating": ("if beat is None or rank in quiet", "if beat is None"),
            "a rank that stops in the midst of a stall counts as beating": (
                "if self.now - new >= seconds",
                "if new == self.begun",
            ),
            "the rank that is furthest on is behind": ("earliest = min(", "earliest = max("),
            "a stall is told again and again": ("        self._named = since\n", ""),
            "ranks that get on ask for the others": (
                "self._hear(store, since) if still >= self._seconds / 2 else None",
                "self._hear(store, since)",
            ),
            "nobody looks where rank 0 is silent": ("elif still < self._seconds + patience:", "elif self._rank:"),
        },
    ),
    *_of(
        "hotspa_megatron/hooks/agreement.py",
        ["tests/test_agreement.py", "-k", "named or compared"],
        {
            "rank 0 is always right": ("(counts[value], -values.index(value))", "-values.index(value)"),
            "the end of a file does not count": ("size - _BLOCK_BYTES)", "size - 2 * _BLOCK_BYTES)"),
            "what a rank lacks is no difference": ("if len(set(values)) == 1:", "if len({*values} - {_NOT_SET}) == 1:"),
        },
    ),
    *_of(
        f"{PLANNING}/regions.py",
        ["tests/test_reshard_plan.py"],
        {
            "what a rank holds is sent to it": (
                "needers = _union(ranks for _, ranks in region.destinations) & ~owners",
                "needers = _union(ranks for _, ranks in region.destinations)",
            ),
            "a cache key without the sources": (
                "key = (destination.holdings(index), *(source.holdings(index) for source in sources))",
                "key = (destination.holdings(index),)",
            ),
            "a slab of the refinement is lost": (
                "bisect_right(edges, other.lo[dim]) - 1, bisect_left",
                "bisect_right(edges, other.lo[dim]), bisect_left",
            ),
        },
    ),
    *_of(
        f"{PLANNING}/routing.py",
        ["tests/test_reshard_plan.py"],
        {
            "the last rank of a node is forgotten": (
                "& ((1 << topology.gpus_per_node) - 1)",
                "& ((1 << (topology.gpus_per_node - 1)) - 1)",
            ),
            "senders of another node": ("block[:, 3:] += ", "block[:, 4:] += "),
            "a relay sends to itself": (
                "others = [rank for rank in missing[line] if rank != entry]",
                "others = list(missing[line])",
            ),
        },
    ),
    *_of(
        f"{PLANNING}/reshard_plan.py",
        ["tests/test_reshard_plan.py"],
        {
            "messages share a buffer whatever they hold": (
                "tuple((c.parameter, c.source, c.source_start, c.shape) for c in send.cells)",
                "tuple((c.parameter, c.source, c.shape) for c in send.cells)",
            ),
        },
    ),
    *_of(
        f"{PLANNING}/param_layout.py",
        ["tests/test_param_layout.py", "-k", "not megatrons"],
        {
            "a gated fc1 cut without its stride": (
                "(size // self.split_stride,) * self.split_stride",
                "(size,)",
            ),
            "every block starts where the first does": ("low = first + part * size", "low = part * size"),
            "a shard's first row twice": ("        first_row += 1\n", ""),
            "the tied copy on the last stage is lost": ("return (0, pp - 1) if tied", "return (0,) if tied"),
            "experts start at the first rank": (
                "part = (position - self.offset) % self.step",
                "part = position % self.step",
            ),
            "local tensors as large as the whole": (
                "size // width if dim == logical.split_dim",
                "size if dim == logical.split_dim",
            ),
        },
    ),
    *_of(
        f"{PLANNING}/load_balance.py",
        ["tests/test_load_balance.py"],
        {
            "what does not divide is lost": (
                "level, extra = divmod(amount + below, filled)",
                "level, extra = (amount + below) // filled, 0",
            ),
            "a pool is counted twice": ("load[server] -= amount", "load[server] -= 0"),
            "a border that never moves on": ("            position += served.size\n", "            position += 0\n"),
        },
    ),
    *_of(
        f"{PLANNING}/alignment.py",
        ["tests/test_packing.py", "tests/test_step_plan.py", "tests/test_strategy.py"],
        {
            "sequences cut into one chunk per rank": (
                "sequence = 2 * strategy.cp if strategy.cp > 1 else 1",
                "sequence = strategy.cp",
            ),
            "sequence parallelism forgotten": (
                "ranks = strategy.cp * strategy.tp if sequence_parallel else strategy.cp",
                "ranks = strategy.cp",
            ),
            "a sequence is rounded down": (
                "return -(-tokens // self.sequence) * self.sequence",
                "return tokens // self.sequence * self.sequence",
            ),
        },
    ),
    *_of(
        f"{PLANNING}/packing.py",
        ["tests/test_packing.py"],
        {
            "a budget that alignment overruns": (
                "room = budget // alignment.total * alignment.total",
                "room = budget",
            ),
            "one of two parts may overflow": (
                "heavier[(filled > room) | (total - filled > room)] = whole",
                "heavier[filled > room] = whole",
            ),
            "one token too many": (
                "while open_parts and open_parts[0][1] + size > room:",
                "while open_parts and open_parts[0][1] + size > room + 1:",
            ),
            "no fillers": ("        + ((),) * (count - len(batches))\n", ""),
            "an empty sequence is packed": (
                "wrong = np.flatnonzero((lengths < 1) |",
                "wrong = np.flatnonzero((lengths < 0) |",
            ),
            "an exchanged sequence stays in both parts": ("        goes.remove(returned)\n", ""),
            "an input's place is lost": (
                "tuple(tuple(sorted(positions[item] for item in batch))",
                "tuple(tuple(sorted(batch))",
            ),
        },
    ),
    *_of(
        f"{PLANNING}/step_plan.py",
        ["tests/test_step_plan.py", "tests/test_merging.py"],
        {
            "a sequence of max_length goes to the next group": (
                "own = np.searchsorted(self._max_lengths, whole)",
                'own = np.searchsorted(self._max_lengths, whole, "right")',
            ),
            "a group's sequences train twice": (
                "members = np.flatnonzero((self._own > after) & (self._own <= position))",
                "members = np.flatnonzero((self._own >= after) & (self._own <= position))",
            ),
            "a digest blind to lengths": ("        numbers += self.lengths\n", ""),
            "home before its guests": (
                "return (*self._guest_orders.get(guests, guests), *others)",
                "return (*others, *self._guest_orders.get(guests, guests))",
            ),
            "sequences counted within their group": (
                "            index = members.tolist()\n",
                "            index = list(range(len(members)))\n",
            ),
            "a segment as fast as its idlest replica": (
                "return max(self.busy(segment, lengths))",
                "return min(self.busy(segment, lengths))",
            ),
            "a guest's fold costs nothing": (
                "total += moves.switch(before, guest) + moves.folds[guest]",
                "total += moves.switch(before, guest)",
            ),
        },
    ),
    *_of(
        f"{PLANNING}/programme.py",
        ["tests/test_search.py", "-k", "programme or rest_is_kept"],
        {
            "a guest's fold is free": (
                "reached = through.min(axis=0) + self._fold",
                "reached = through.min(axis=0)",
            ),
            "no room is made": ("return bool(self._homes)", "return False"),
        },
    ),
    *_of(
        f"{PLANNING}/group_estimates.py",
        ["tests/test_search.py", "-k", "cut_points or given_home"],
        {
            "no cut between two powers of two": ("if size >= 4 * SHORTEST_CUT else", "if size < 0 else"),
            "a budget below the longest sequence": (
                "max(int(self._sums.tokens[:, 0, -1].max()) * 2, self.longest * 2)",
                "self.longest // 2",
            ),
        },
    ),
    *_of(
        f"{PLANNING}/search.py",
        ["tests/test_search.py", "-k", "given_home or together or rest_is_kept"],
        {
            "strategies fit if each fits alone": (
                "memory.capacity(choice.execution, home, others_of(groups, index))",
                "memory.capacity(choice.execution, home)",
            ),
            "every execution may be home": (
                "if self._home is not None and strategy != self._home:",
                "if self._home is not None and strategy == self._home:",
            ),
        },
    ),
    *_of(
        f"{PLANNING}/cost_model.py",
        ["tests/test_cost_model.py"],
        {
            "the output layer costs nothing": ("        work[-1] += self._head\n", ""),
            "recomputation is free": (
                "recompute_token=gemm * again / 3",
                "recompute_token=0.0",
            ),
            "a guest reduces within its node": (
                "bandwidth = min(bandwidth, members * self._card)",
                "bandwidth = max(bandwidth, members * self._card)",
            ),
            "all of a reduction hides": (
                "return max(_NEVER_HIDDEN * whole, whole - _REDUCTION_OVERLAP * last)",
                "return max(0.0, whole - _REDUCTION_OVERLAP * last)",
            ),
        },
    ),
    *_of(
        f"{PLANNING}/step_time.py",
        ["tests/test_explain.py"],
        {
            "a segment starts before its ranks are free": (
                "start = float(ranks.max())",
                "start = float(ranks.min()) / 2",
            ),
            "a guest's fold has no time of its own": (
                "together(Activity.FOLD, number, model.fold_seconds(guest, home))",
                "together(Activity.FOLD, None, model.fold_seconds(guest, home))",
            ),
            "folds in bf16 are counted in single precision": (
                "resolved.config.switch.fold_itemsize(shape.gradient_bytes)",
                "shape.gradient_bytes",
            ),
        },
    ),
    *_of(
        "hotspa_megatron/cli/sample_step.py",
        ["tests/test_explain.py"],
        {
            "a replica is drawn on other ranks": (
                "ranks.reshape(strategy.pp, strategy.dp, strategy.cp * strategy.tp)[:, span.replica]",
                "ranks.reshape(strategy.pp, strategy.cp * strategy.tp, strategy.dp)[:, :, span.replica]",
            ),
        },
    ),
    *_of(
        "hotspa_megatron/cli/moves.py",
        ["tests/test_explain.py"],
        {
            "every switch starts at home": (
                "model.switch_plan(home, before, guest)",
                "model.switch_plan(home, None, guest)",
            ),
        },
    ),
    *_of(
        f"{PLANNING}/memory_model.py",
        ["tests/test_memory_model.py"],
        {
            "a guest stands alone": (
                "                        0 if own else resident,\n",
                "                        0,\n",
            ),
            "all stages keep as many micro-batches": (
                "live = float(strategy.pp - stage)",
                "live = float(strategy.pp)",
            ),
            "a shard rounded down": (
                "return self.optimizer_bytes * -(-self.numels(home)[stage] // self._shards(home))",
                "return self.optimizer_bytes * (self.numels(home)[stage] // self._shards(home))",
            ),
            "communicators take nothing": (
                "sizes = () if self._on_gloo else added_sizes(home, key[1])",
                "sizes = ()",
            ),
            "a strategy alone adds communicators": (
                "key = home, frozenset((strategy, *others))",
                "key = home, frozenset((strategy,))",
            ),
            "folds under way take nothing": (
                "transfers=waiting + max(0, moves - activations)",
                "transfers=max(0, moves - activations)",
            ),
            "a token too many fits": (
                "return max(0, int(most) // unit * unit)",
                "return max(0, (int(most) // unit + 1) * unit)",
            ),
        },
    ),
    *_of(
        f"{PLANNING}/sample_order.py",
        ["tests/test_sample_order.py"],
        {
            "one sample is skipped": ("start = first - sum(before)", "start = first - sum(before) + 1"),
            "every epoch the same": ("SeedSequence([self._seed, source, epoch])", "SeedSequence([self._seed, source])"),
            "every seed the same": ("SeedSequence([self._seed, source, epoch])", "SeedSequence([source, epoch])"),
            "shares that are not kept": ("times.append((own + 0.5) / share)", "times.append(own + 0.5)"),
        },
    ),
    *_of(
        "hotspa_megatron/strategy.py",
        ["tests/test_strategy.py"],
        {
            "cp and dp swapped": (
                "return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))",
                "return tp + self.tp * (dp + self.dp * (cp + self.cp * pp))",
            ),
            "virtual stages make no difference": (
                "return (self.tp, self.pp, self.vpp, self.world_size) == (other.tp, other.pp, other.vpp, other.world_size)",
                "return (self.tp, self.pp, self.world_size) == (other.tp, other.pp, other.world_size)",
            ),
            "virtual stages in one run per stage": ("virtual_stages[stage::pp]", "virtual_stages[stage : stage + 1]"),
            "an uneven last stage counted twice": (
                "middle_layers = num_layers - (first or 0) - (last or 0)",
                "middle_layers = num_layers - (first or 0)",
            ),
        },
    ),
    *_of(
        "hotspa_megatron/config.py",
        ["tests/test_config.py"],
        {
            "equal lengths pass": (
                "if entries and entry.max_length <= entries[-1].max_length:",
                "if entries and entry.max_length < entries[-1].max_length:",
            ),
            "longer than home by one": (
                "if entry.max_length > shape.seq_length:",
                "if entry.max_length > shape.seq_length + 1:",
            ),
            "a digest blind to merging": ('            "merge": self.merge,\n', ""),
            "a budget without its padding": ("least = alignment.alone(entry.max_length)", "least = entry.max_length"),
            "siblings without home's virtual stages": (
                "virtual = entry.vpp or (home.vpp if",
                "virtual = entry.vpp or (1 if",
            ),
            "a file for any recomputation of home": (
                "if config.home_recompute is not None and config.home_recompute != recompute:",
                "if config.home_recompute is None and config.home_recompute != recompute:",
            ),
            "a file for any virtual stages of home": (
                '_HOME_AXES: Final = ("tp", "cp", "pp", "vpp")',
                '_HOME_AXES: Final = ("tp", "cp", "pp")',
            ),
            "every strategy a guest": (
                "kind=Kind.SIBLING if strategy.same_layout(home) else Kind.GUEST",
                "kind=Kind.GUEST",
            ),
        },
    ),
    *_of(
        f"{RUNTIME}/executor.py",
        ["tests/test_executor.py", "-k", "not gloo and not thousand"],
        {
            "a fold added twice": (
                "            addends.add()\n",
                "            addends.add()\n            addends.add()\n",
            ),
            "a move may be finished twice": ("        self._finished = True\n", ""),
            "views of tensors that moved": ("        if places != self._places:\n", "        if not self._places:\n"),
            "local copies keep their precision": ("batch.copies.copy(through=self._dtype)", "batch.copies.copy()"),
            "a fold reads its source late": (
                "                batch.packs.copy()\n        with self._beside():",
                "                pass\n        with self._beside():",
            ),
            "a phase that does not wait for the one before": (
                " and not (self._later[0].starts_phase and self._running)",
                "",
            ),
            "buffers are kept": ("        for buffer in self._binding.buffers:\n            buffer.release()\n", ""),
        },
    ),
    *_of(
        f"{RUNTIME}/binding.py",
        ["tests/test_executor.py", "-k", "not gloo and not thousand"],
        {
            "the last piece of a message is dropped": (
                "    if shared:\n        pieces.append(tuple(shared))\n    return",
                "    return",
            ),
            "a wrong stride": (
                "found[index - 1] = found[index] * shape[index]",
                "found[index - 1] = found[index] * shape[index - 1]",
            ),
            "regions with a gap are joined": (
                "other.offset == self.offset + numel and other.memory",
                "other.offset >= self.offset + numel and other.memory",
            ),
            "a slice starts where the cell does": ("        target[dim] += first\n", ""),
            "a slice runs over its cell": ("shape[dim] = min(rows, cell.shape[dim] - first)", "shape[dim] = rows"),
            "places of the batch before": ("                places, end = {}, 0\n", "                end = 0\n"),
            "phases that are not told apart": ("starts_phase=number > 0 and index == 0", "starts_phase=False"),
            "a buffer without a limit": ("(buffered and end + piece.numel > limit)", "(buffered and end > 2 * limit)"),
        },
    ),
    *_of(
        f"{RUNTIME}/transport.py",
        ["tests/test_transport.py", "-k", "in_one_process"],
        {
            "what was sent is sent again": ("sends, self._sends = self._sends, []", "sends = self._sends"),
            "one tag for all moves": ("self._tag = (self._tag + 1) % _TAGS", "self._tag = 1"),
            "nobody waits": ("                work.wait()\n", "                pass\n"),
            "the world instead of the group": (
                "dist.isend(host, peer, group=self._group, tag=tag)",
                "dist.isend(host, peer, tag=tag)",
            ),
        },
        hangs=["what was sent is sent again"],
    ),
    *_of(
        f"{RUNTIME}/group_pool.py",
        ["tests/test_group_pool.py", "-k", "not sixty_four"],
        {
            "the group of another backend": ("if len(key[0]) == 1:", "if len(key[0]) <= 2:"),
            "ranks in another order": (
                "        key = (tuple(ranks), backend)\n        if len(key[0])",
                "        key = (tuple(sorted(ranks)), backend)\n        if len(key[0])",
            ),
            "a group nobody planned": ("            if self._sealed:\n", "            if False:\n"),
        },
    ),
    *_of(
        f"{RUNTIME}/attention.py",
        ["tests/test_attention.py", "-k", "not context_parallel_ranks"],
        {
            "chunks swapped": (
                "starts + (2 * cp - 1 - rank) * chunks), dim=1)",
                "starts + (cp + rank) * chunks), dim=1)",
            ),
            "a sequence sees its neighbour": (
                "if calls and (length == longest or alike):",
                "if calls:",
            ),
            "filler of the batch is collected": (
                "stop = rows + len(members) * parts * chunk",
                "stop = rows + len(members) * parts * int(chunks.min())",
            ),
            "no scale": ("        scale=softmax_scale,", "        scale=None,"),
            "a query sees what comes after it": ("        is_causal=mask is None,", "        is_causal=False,"),
        },
    ),
    *_of(
        "hotspa_megatron/hooks/samples.py",
        ["tests/test_samples.py", "-k", "not stock and not megatrons and not mock"],
        {
            "padding counts": ("    counted = targets != pad_token\n", "    counted = np.ones(len(targets), bool)\n"),
            "the end of a document is masked as a target": (
                "counted &= inputs != masked_token",
                "counted &= targets != masked_token",
            ),
            "pieces lose a target": (
                "for start in range(0, length, limit)]",
                "for start in range(0, length, limit + 1)]",
            ),
            "token shares are taken for document shares": (
                "return [share / mean for share, mean in zip(self.token_shares, means, strict=True)]",
                "return list(self.token_shares)",
            ),
            "a token too many": (
                "length = int(self._corpus.sources[source].lengths[document]) - 1",
                "length = int(self._corpus.sources[source].lengths[document])",
            ),
        },
    ),
    *_of(
        "hotspa_megatron/hooks/conversations.py",
        [
            "tests/test_conversations.py",
            "-k",
            "line or system or bytes or overlong_ones or order_of_their_own or labels_and_masks",
        ],
        {
            "blank lines count": ("                    if line.strip():\n", "                    if line:\n"),
            "a prompt counts": ("targets += [IGNORED] * len(said)", "targets += said"),
            "the assistant's role counts": ("targets += [IGNORED, *said[1:]]", "targets += said"),
            "one conversation a line": ('if number == 0 or message["role"] == "system"]', "if number == 0]"),
            "a target too early": (
                "return Text(tokens[:-1], targets[1:], counted[1:])",
                "return Text(tokens[:-1], targets[:-1], counted[:-1])",
            ),
        },
    ),
    *_of(
        "hotspa_megatron/hooks/data.py",
        ["tests/test_micro_batches.py"],
        {
            "positions run on": (
                "np.minimum(np.arange(padded), piece.length - 1)",
                "begin + np.minimum(np.arange(padded), piece.length - 1)",
            ),
            "the loss of padding counts": (
                "np.zeros(total, np.float32), np.zeros",
                "np.ones(total, np.float32), np.zeros",
            ),
            "boundaries without the padding": (
                "boundaries.append(begin + padded)",
                "boundaries.append(begin + piece.length)",
            ),
        },
    ),
    *_of(
        f"{RUNTIME}/checksum.py",
        ["tests/test_checksum.py"],
        {
            "factors that lose a bit": ("^ (mixed >> 32)) | 1", "^ (mixed >> 32)) & ~1"),
            "every batch of rows counts from the first": ("(start[0] + first, *start[1:])", "(start[0], *start[1:])"),
            "places do not count": ("(bits * _weights(", "(bits | 0 * _weights("),
        },
    ),
    *_of(
        "hotspa_megatron/hooks/guard.py",
        ["tests/test_guard.py", "-k", "every_fault"],
        {
            "a switch is not compared": (
                "np.flatnonzero(totals != check.totals)[:1]",
                "np.flatnonzero(totals != check.totals)[:0]",
            ),
            "only the first copy is looked at": (
                "                found = table[ranks, parameter]\n",
                "                found = table[ranks[:1], parameter]\n",
            ),
            "what is not finite counts as equal": (
                "        return np.inf\n    difference",
                "        return 0.0\n    difference",
            ),
            "tokens are not compared": ("if counted != tokens or not abs", "if not abs"),
            "a part that differs on one rank is spread over all": (
                "dist.ReduceOp.MAX)\n        worst",
                "dist.ReduceOp.MIN)\n        worst",
            ),
        },
        ranks=True,
    ),
    *_of(
        "hotspa_megatron/hooks/moves.py",
        ["tests/test_gradients.py", "-k", "in_bf16"],
        {
            "folds travel in single precision, whatever the file says": (
                "dtype = self._fold_dtype\n",
                "dtype = torch.float32\n",
            )
        },
        ranks=True,
    ),
    *_of(
        "hotspa_megatron/hooks/forward_backward.py",
        ["tests/test_gradients.py", "-k", "every_mix"],
        {
            "gradients are not divided": (
                "        self._scale(totals.pop(TOKENS)[1])\n",
                "        totals.pop(TOKENS)\n",
            ),
            "a fold is left out": ("        for fold in folds:\n", "        for fold in folds[1:]:\n"),
            "a guest's own reduction is left out": (
                "                        self._finish_guest(guest)\n",
                "                        pass\n",
            ),
        },
        ranks=True,
    ),
    *_of(
        "hotspa_megatron/hooks/loss_reports.py",
        ["tests/test_gradients.py", "-k", "every_mix"],
        {
            "every tensor-parallel rank counts its tokens": (
                "return at.pp == strategy.pp - 1 and at.tp == 0",
                "return at.pp == strategy.pp - 1",
            ),
        },
        ranks=True,
    ),
)


def problem_of(mutant: Mutant, text: str) -> str | None:
    """What is wrong with the entry, given its file's text; None where nothing is."""
    found = text.count(mutant.old)
    if found != 1:
        return "its text is no longer in the file" if not found else f"its text stands {found} times in the file"
    try:
        compile(text.replace(mutant.old, mutant.new), mutant.path, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"the changed file is no Python: line {error.lineno}"
    return None


def copy_tree(folder: Path) -> None:
    """What git knows and would know of the tree, as it stands."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


PLUGIN: Final = "what_the_tests_said"
PLUGIN_TEXT: Final = """\
import json
import os

from hypothesis import Phase, settings

# A failure is enough, the smallest example of it takes minutes; and the same examples every time.
settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], derandomize=True, database=None)
settings.load_profile("mutants")


def pytest_runtest_logreport(report):
    if report.failed or (report.when == "call" and report.passed):
        crash = getattr(report.longrepr, "reprcrash", None)
        said = (getattr(crash, "message", "").splitlines() or [""])[0]
        # Of pytest-timeout, of tests/spawn.py, of tests/mailbox.py.
        endless = ("from pytest-timeout", "did not finish within", "a message never met its other end")
        ended = not any(each in said for each in endless)
        with open(os.environ["MUTANTS_REPORT"], "a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, report.outcome, ended]) + "\\n")
"""


@dataclass(frozen=True, kw_only=True)
class Said:
    """Of a run of pytest: its exit code (None: still running at the time limit), the tests that passed and those that
    failed, those that failed for having no end, seconds, and its last line."""

    code: int | None
    passed: frozenset[str]
    failed: tuple[str, ...]
    endless: frozenset[str]
    seconds: float
    last: str


def run_tests(folder: Path, tests: Sequence[str], *, limit_s: float = TIME_LIMIT_S) -> Said:
    """pytest in the copy, up to the first failure."""
    (folder / f"{PLUGIN}.py").write_text(PLUGIN_TEXT, encoding="utf-8")
    report = folder / f"{PLUGIN}.jsonl"
    report.write_text("", encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "MUTANTS_REPORT": str(report),
    }
    environment |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        PLUGIN,
        "-p",
        "no:cacheprovider",
        "-m",
        "not long",
        *tests,
    ]
    started, code = time.monotonic(), None
    # Ranks that it has started have to go with it.
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            output = f"no end within {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    found = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
    return Said(
        code=code,
        passed=frozenset(name for name, outcome, _ in found if outcome == "passed"),
        failed=tuple(name for name, outcome, _ in found if outcome == "failed"),
        endless=frozenset(name for name, outcome, ended in found if outcome == "failed" and not ended),
        seconds=time.monotonic() - started,
        last=(output.strip().splitlines() or ["(no output)"])[-1],
    )


def verdict_of(mutant: Mutant, whole: Said, said: Said) -> tuple[str, str]:
    """The verdict on a fault and the first test that failed: ``whole`` is what the tests say without it."""
    if said.code == 0:
        return "survived", ""
    found = [test for test in said.failed if test in whole.passed]
    judged = [test for test in found if test not in said.endless]
    if judged:
        return "caught", judged[0]
    if found or said.code is None:
        by = found[0] if found else said.last
        return ("caught" if mutant.hangs else "no test says so, one only does not end", by)
    return f"pytest ended with {said.code}, and no test that passes without the fault has failed", said.last


def judge(folder: Path, mutant: Mutant, whole: Said) -> Outcome:
    """Change the copy, run the tests, and change it back."""
    started = time.monotonic()
    path = folder / mutant.path
    text = path.read_text(encoding="utf-8")
    verdict, by = problem_of(mutant, text), ""
    if verdict is None:
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        # What is known to hang is waited for no longer than it takes to tell that from a slow machine.
        limit_s = max(60.0, 10 * whole.seconds) if mutant.hangs else TIME_LIMIT_S
        try:
            verdict, by = verdict_of(mutant, whole, run_tests(folder, mutant.tests, limit_s=limit_s))
        finally:
            path.write_text(text, encoding="utf-8")
    seconds = time.monotonic() - started
    return Outcome(name=mutant.name, path=mutant.path, verdict=verdict, by=by, seconds=round(seconds, 1))


def in_copies(
    copies: Sequence[Path], items: Sequence[Item], run: Callable[[Path, Item], Result], alone: Callable[[Item], bool]
) -> Iterator[tuple[Item, Result]]:
    """``run(copy, item)`` of each, as many at once as there are copies; those that are to run ``alone`` come last, so."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    for each in copies:
        free.put(each)

    def taken(item: Item) -> tuple[Item, Result]:
        folder = free.get()
        try:
            return item, run(folder, item)
        finally:
            free.put(folder)

    with concurrent.futures.ThreadPoolExecutor(len(copies)) as pool:
        beside = [pool.submit(taken, item) for item in items if not alone(item)]
        try:
            for done in concurrent.futures.as_completed(beside):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)
    for item in items:
        if alone(item):
            yield taken(item)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; 0 where every fault was caught."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--list", action="store_true", help="name the faults, check that each still applies, run nothing"
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="faults with TEXT in their names")
    parser.add_argument("--single", action="store_true", help="leave out those whose tests start several processes")
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="faults at a time, each in a copy (the cores)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON; progress goes to stderr")
    options = parser.parse_args(argv)
    chosen = [each for each in MUTANTS if options.only in each.name and not (options.single and each.ranks)]
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: give at least 1")
    if not chosen:
        parser.error(f"--only {options.only!r}: no fault has that in its name; see --list")
    if options.list:
        problems = {each.name: problem_of(each, (ROOT / each.path).read_text(encoding="utf-8")) for each in chosen}
        for each in chosen:
            print(
                f"{each.name}  ({each.path}; {' '.join(each.tests)}){f': {problems[each.name]}' if problems[each.name] else ''}"
            )
        return 1 if any(problems.values()) else 0

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        copies = [Path(name) / str(number) for number in range(options.jobs)]
        for copy in copies:
            copy_tree(copy)
        # Tests that start several ranks take all cores as it is.
        alone = {each.tests for each in chosen if each.ranks}
        runs = [(tests, tests in alone) for tests in dict.fromkeys(each.tests for each in chosen)]
        whole = {}
        for (tests, _), said in in_copies(
            copies, runs, lambda folder, run: run_tests(folder, run[0]), lambda run: run[1]
        ):
            whole[tests] = said
            if said.code != 0:
                say(f"{' '.join(tests)} fails without any fault: {' '.join(said.failed[:1]) or said.last}")
                return 1
        say(f"{len(chosen)} faults; their tests pass without one")
        judged = in_copies(
            copies,
            chosen,
            lambda folder, mutant: judge(folder, mutant, whole[mutant.tests]),
            lambda mutant: mutant.ranks,
        )
        for _, outcome in judged:
            outcomes.append(outcome)
            say(
                f"[{len(outcomes)}/{len(chosen)}] {outcome.name}: {outcome.verdict} ({outcome.seconds:.0f} s) {outcome.by}"
            )
    bad = [each for each in outcomes if not each.is_good]
    if options.json:
        print(json.dumps([asdict(each) for each in outcomes], indent=2))
    say(
        f"{len(outcomes) - len(bad)} of {len(outcomes)} faults were caught"
        + "".join(f"\n{each.name}: {each.verdict}" for each in bad)
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
