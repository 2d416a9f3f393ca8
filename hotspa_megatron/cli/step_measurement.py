"""Runs the trainings of ``hotspa bench step`` in turns on local ranks, or torchrun's, and notes what every step took."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hotspa_megatron.cli.local_ranks import Jobs, Ranks, World
from hotspa_megatron.cli.step_contenders import Case, Contender, LeftOut, drawn_lengths, megatron_arguments, slow_ones

_STEP_LIMIT_S: Final = 300.0
_START_LIMIT_S: Final = 240.0
_MOST_DISTURBED: Final = 0.1
"""Share of the machine that others may take during a step; above, the step is taken again, up to ``_AGAIN`` times."""
_AGAIN: Final = 1
_FULL_TURNS: Final = 2
"""Steps that each of the two runs on full-length sequences takes per round: their difference is a hundredth."""


@dataclass
class Taken:
    """What a contender's steps took, step by step."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    moving_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)
    """Share of this machine's cores that other processes took."""
    again: int = 0
    """Steps that were left out, since others took more than they may."""
    first_s: float = 0.0
    """Seconds of the first step, which counts towards nothing else."""
    first_disturbed: bool = False
    traffic: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        """(max - min) / median of the steps that count; of a single one it is not known, and 0."""
        return (max(self.wall_s) - min(self.wall_s)) / statistics.median(self.wall_s)


@contextlib.contextmanager
def _folder(world: World) -> Iterator[Path]:
    """A folder with one path on all ranks, for Megatron names its index by the data's path and builds it on rank 0 alone.

    Under torchrun it lies where temporary files do (TMPDIR), which several nodes have to share.
    """
    if world.alone:
        with tempfile.TemporaryDirectory(prefix="hotspa-bench-") as name:
            yield Path(name)
        return
    run = re.sub(r"\W", "-", f"{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['MASTER_PORT']}")
    folder = Path(tempfile.gettempdir()) / f"hotspa-bench-{run}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        if world.first:
            shutil.rmtree(folder, ignore_errors=True)


def measure(
    case: Case, chosen: Sequence[Contender], world: World, *, rounds: int, limit_s: int, say: Callable[[str], None]
) -> tuple[dict[str, Taken], list[LeftOut]]:
    """What every contender took, and which were dropped after the first step."""
    from hotspa_megatron.hooks import contender as rank

    began = time.monotonic()
    say(
        f"{len(chosen)} trainings on {world.size} ranks, in turns: {', '.join(each.name for each in chosen)}; limit "
        f"{case.max_tokens_per_rank:,} tokens per rank"
    )
    lengths = drawn_lengths(case)
    with Jobs(world, rank.prepare) as jobs, _folder(world) as folder:
        if world.alone or os.environ["LOCAL_RANK"] == "0":
            rank.write_corpus(folder / "lengths", lengths.tolist(), vocabulary=case.vocabulary, seed=case.seed)
            whole_text = [case.full_sequences * case.seq_length]
            rank.write_corpus(folder / "full", whole_text, vocabulary=case.vocabulary, seed=case.seed)
        started: dict[str, Ranks] = {}
        for each in chosen:
            words = megatron_arguments(
                case,
                each,
                corpus=folder / ("full" if each.full else "lengths"),
                cache=folder / "cache",
                steps=(rounds + 2) * _FULL_TURNS * (1 + _AGAIN),
            )
            if each.config is not None:
                path = folder / f"{each.name}.yaml"
                path.write_text(each.config, encoding="utf-8")
                words += ["--hotspa-config", str(path)]
            started[each.name] = jobs.start(each.name, _train, case.script, tuple(words), each.name == "unpacked", each)
        for each in chosen:
            # One after the other: all at once would take the machine's memory and time.
            jobs.begin([started[each.name]])
            started[each.name].receive(limit_s=_START_LIMIT_S)
        say(f"  ready after {time.monotonic() - began:.0f} s; a first step of each does not count")
        taken = {each.name: Taken() for each in chosen}
        running, dropped, longest = list(chosen), list[LeftOut](), 0.0
        for number in range(rounds + 1):
            if jobs.agree(number > 1 and time.monotonic() - began + 1.1 * longest > limit_s):
                say(f"  stopped after {number - 1} rounds: another would end after {limit_s} s")
                break
            at = time.monotonic()
            # There and back, so that a drift of the machine's speed meets all alike.
            for each in running if number % 2 else reversed(running):
                for _ in range(_FULL_TURNS if each.full else 1):
                    _turn(started[each.name], taken[each.name], jobs, counts=number > 0)
            longest = max(longest, time.monotonic() - at) if number else 0.0
            say(f"  round {number} of {rounds}: {time.monotonic() - at:.1f} s")
            if number == 0:
                dropped = _drop_slow(running, started, taken, jobs, say)
        for each in running:
            started[each.name].send("stop")
        return taken, dropped


def _drop_slow(
    running: list[Contender],
    started: Mapping[str, Ranks],
    taken: Mapping[str, Taken],
    jobs: Jobs,
    say: Callable[[str], None],
) -> list[LeftOut]:
    """End, and take out of ``running``, those whose first step was slow; one that others disturbed has another first."""
    again: set[str] = set()
    while True:
        dropped = slow_ones(running, {name: each.first_s for name, each in taken.items()})
        disturbed = [out.name for out in dropped if taken[out.name].first_disturbed and out.name not in again]
        if not disturbed:
            break
        # What is fastest may be another then, and who is slow beside it.
        for name in disturbed:
            _turn(started[name], taken[name], jobs, counts=False)
        again.update(disturbed)
    for out in dropped:
        say(f"  {out.name} is dropped: {out.reason}")
        started[out.name].send("stop")
    running[:] = [each for each in running if each.name not in {out.name for out in dropped}]
    return dropped


def _train(channel: Any, script: Path, words: tuple[str, ...], unpacked: bool, each: Contender) -> None:
    from hotspa_megatron.hooks import contender

    # Stock Megatron's attention for CPUs knows no context parallelism: both sides of that comparison have ours.
    contender.train(script, words, channel, packed_attention=each.config is None, unpacked=unpacked)


def _turn(job: Ranks, taken: Taken, jobs: Jobs, *, counts: bool) -> None:
    """Have a job take a step; once more where other processes disturbed it and it counts."""
    for attempt in range(1 + _AGAIN):
        began, busy = time.perf_counter(), _busy_seconds()
        job.send("step")
        steps = job.receive(limit_s=_STEP_LIMIT_S)
        wall, busy = time.perf_counter() - began, _busy_seconds() - busy
        job.receive(limit_s=_STEP_LIMIT_S)  # its ranks wait for their next turn
        others = max(0.0, busy - sum(step.cpu_s for step in steps)) / (wall * (os.cpu_count() or 1))
        all_of_them = jobs.gather((wall, others, steps))
        wall, others = (max(each[i] for each in all_of_them) for i in (0, 1))
        steps = [step for _, _, own in all_of_them for step in own]
        taken.losses.append(next((step.loss for step in steps if step.loss is not None), float("nan")))
        taken.grad_norms.append(max(step.grad_norm for step in steps))
        if not counts or others <= _MOST_DISTURBED or attempt == _AGAIN:
            break
        taken.again += 1
    if not counts:
        taken.first_s = min(wall, taken.first_s or wall)
        taken.first_disturbed = others > _MOST_DISTURBED
    else:
        taken.wall_s.append(wall)
        taken.cpu_s.append(sum(step.cpu_s for step in steps))
        taken.moving_s.append(max(step.moving_s for step in steps))
        taken.others.append(others)
    totals: dict[str, dict[str, float]] = {}
    for step in steps:
        for (kind, ranks), (count, num_bytes) in step.traffic.items():
            entry = totals.setdefault(kind if kind == "send" else f"{kind} of {ranks}", {"count": 0, "bytes": 0})
            share = 1 if kind == "send" else ranks
            entry["count"] += count / share
            entry["bytes"] += num_bytes / share
    taken.traffic = {key: totals[key] for key in sorted(totals)}


def _busy_seconds() -> float:
    """CPU seconds that this machine has worked so far, for anybody; 0 where the system does not say."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return 0.0
    user, nice, system, _, _, interrupts, soft, stolen = (int(number) for number in first[1:9])
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")
