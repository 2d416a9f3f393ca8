"""``hotspa bench step``: whole training steps, ours beside the static strategies, all under one limit of tokens per rank.

Every contender is a training of its own, Megatron's loop and optimizer included. They take turns within one run, and all
train the same documents from the same weights, so losses and gradient norms must be equal step by step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from hotspa_megatron.cli import tables
from hotspa_megatron.cli.described_run import whole
from hotspa_megatron.cli.local_ranks import Jobs, Ranks, RanksFailed, World
from hotspa_megatron.planning.lengths import LengthHistogram
from hotspa_megatron.strategy import Strategy

_EPILOG: Final = """\
examples:
  hotspa bench step --ranks 4
      the case whose goals are known: 4 layers of 256, lengths of Wikipedia cut at 2,048, 512 tokens per rank
  hotspa bench step --ranks 4 --config hotspa.yaml --home tp2-cp2 --lengths data/my_text_document
      your own configuration on your own lengths

Exit code: 0; 1 where losses or gradient norms differ or a rank fails; 3 where times vary too much to be judged.
"""
_SCRIPT: Final = Path(__file__).resolve().parents[2] / "examples" / "pretrain_small.py"
_STEP_LIMIT_S: Final = 300.0
_START_LIMIT_S: Final = 240.0
_MOST_SPREAD: Final = 0.25
"""(max - min) / median of a contender's step times above which no ratio is judged."""
_LOSS_TOLERANCE: Final = 1e-5
_NORM_TOLERANCE: Final = 1e-4
"""Relative differences that fp32 sums in another order may have."""
_MOST_DISTURBED: Final = 0.1
"""Share of the machine that others may take during a step; above, the step is taken again, up to ``_AGAIN`` times."""
_AGAIN: Final = 1
_FULL_TURNS: Final = 2
"""Steps that each of the two runs on full-length sequences takes per round: their difference is a hundredth."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured. Lengths and limits in tokens; ``config``: the file of ours, None for one made from the limit."""

    ranks: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    query_groups: int
    vocabulary: int
    seq_length: int
    max_tokens_per_rank: int
    lengths: str
    overlong: Literal["split", "truncate", "drop"]
    sequences: int
    full_sequences: int
    home: Strategy
    config: Path | None
    script: Path
    seed: int


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One training. ``config``: the text of its --hotspa-config file, None for stock Megatron. ``full``: it trains
    full-length sequences, and is compared with those that do. ``beyond_limit``: the limit does not hold for it."""

    name: str
    home: Strategy
    config: str | None
    sequence_parallel: bool = False
    full: bool = False
    beyond_limit: bool = False


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
    traffic: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def spread(self) -> float:
        return (max(self.wall_s) - min(self.wall_s)) / statistics.median(self.wall_s)


def add_part(parts: Any) -> None:
    """Add ``step`` to ``hotspa bench``."""
    parser = parts.add_parser(
        "step",
        help="train steps under one strategy, and by length groups",
        description="Train the same steps under static strategies and by length groups, in turns, and compare.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="hotspa bench step --ranks N [--config FILE] [--home S] [--lengths L] [--json]",
    )
    number = {"metavar": "N"}
    parser.add_argument("--ranks", **number, help="ranks to start here; under torchrun, those that it started")
    parser.add_argument("--max-tokens-per-rank", default="512", **number, help="stands for GPU memory (512)")
    parser.add_argument("--seq-length", default="2048", **number, help="longer documents are cut (2048)")
    parser.add_argument(
        "--lengths", default="wikipedia", metavar="L", help="wikipedia, lognormal:..., an index or a list"
    )
    parser.add_argument(
        "--overlong", default="truncate", choices=("split", "truncate", "drop"), help="longer documents"
    )
    parser.add_argument("--sequences", default="32", **number, help="documents per step (32)")
    parser.add_argument(
        "--full-sequences", default="4", **number, help="full-length sequences of home only and stock (4)"
    )
    parser.add_argument("--home", default=None, metavar="S", help="home of ours, as tp2-cp2 (cpN over all ranks)")
    parser.add_argument(
        "--config", metavar="FILE", help="configuration of ours (default: cp doubled as lengths double)"
    )
    parser.add_argument("--layers", default="4", **number, help="layers (4)")
    parser.add_argument("--hidden", default="256", **number, help="hidden size (256)")
    parser.add_argument("--rounds", default="7", **number, help="steps of every contender that count (7)")
    parser.add_argument("--time-limit", default="840", metavar="S", help="start no round that would end later (840)")
    parser.add_argument("--only", metavar="A,B", help="contenders to run, for a closer look; no ratio is judged then")
    parser.add_argument(
        "--script", default=str(_SCRIPT), metavar="FILE", help="training script (examples/pretrain_small.py)"
    )
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="which lengths are drawn (1234)")
    parser.add_argument("--json", action="store_true", help="print JSON; seconds, bytes, counts")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, megatron_arguments: Sequence[str]) -> None:
    """Measure and print; ``ValueError`` for bad input."""
    if megatron_arguments:
        raise ValueError("bench step takes no arguments of Megatron's; remove what follows --")
    world = World.of(whole("--ranks", arguments.ranks) if arguments.ranks else None)
    case = _case(arguments, world.size)
    chosen = contenders(case)
    if arguments.only:
        names = arguments.only.split(",")
        if unknown := sorted(set(names) - {each.name for each in chosen}):
            raise ValueError(f"--only: {unknown[0]!r} is none of {', '.join(each.name for each in chosen)}")
        chosen = [each for each in chosen if each.name in names]
    rounds, limit = whole("--rounds", arguments.rounds), whole("--time-limit", arguments.time_limit)

    def say(text: str) -> None:
        if world.first:
            print(text, file=sys.stderr, flush=True)

    try:
        taken = _measure(case, chosen, world, rounds=rounds, limit_s=limit, say=say)
    except RanksFailed as error:
        print(f"hotspa: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if not world.first:
        return
    result = summary(case, chosen, taken)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        _print(case, chosen, taken, result)
    if result["different"]:
        for line in result["different"]:
            print(f"hotspa: {line}", file=sys.stderr)
        raise SystemExit(1)
    if result["too_noisy"]:
        raise SystemExit(3)


def _case(options: argparse.Namespace, ranks: int) -> Case:
    hidden, limit = whole("--hidden", options.hidden), whole("--max-tokens-per-rank", options.max_tokens_per_rank)
    seq_length = whole("--seq-length", options.seq_length)
    if hidden % 64:
        raise ValueError(f"--hidden: {hidden} is no multiple of 64, which heads and tensor parallelism take here")
    if limit * ranks < seq_length:
        raise ValueError(
            f"--max-tokens-per-rank: {limit} tokens on each of {ranks} ranks cannot hold a sequence of {seq_length}; give "
            f"at least {-(-seq_length // ranks)}, or a smaller --seq-length"
        )
    script = Path(options.script)
    if not script.is_file():
        raise ValueError(f"--script: {script}: no such file; give a training script such as pretrain_gpt.py")
    config = None if options.config is None else Path(options.config)
    if config is not None and options.home is None:
        raise ValueError("--home: missing; --config needs home's sizes, as Megatron's command line would give them")
    return Case(
        ranks=ranks,
        layers=whole("--layers", options.layers),
        hidden=hidden,
        ffn=hidden * 2,
        heads=hidden // 32,
        query_groups=hidden // 64,
        vocabulary=1024,
        seq_length=seq_length,
        max_tokens_per_rank=limit,
        lengths=options.lengths,
        overlong=options.overlong,
        sequences=whole("--sequences", options.sequences),
        full_sequences=whole("--full-sequences", options.full_sequences),
        home=_strategy(options.home or f"cp{ranks}", ranks),
        config=config,
        script=script.resolve(),
        seed=options.seed,
    )


def _strategy(text: str, ranks: int) -> Strategy:
    from hotspa_megatron.cli.bench import read_strategy

    return read_strategy(text, flag="--home", ranks=ranks)


def contenders(case: Case) -> list[Contender]:
    """All that take part, ours with the static strategies that meet the limit, in the order of their turns."""
    ranks, limit = case.ranks, case.max_tokens_per_rank
    made: list[Contender] = []
    for sizes in ({"cp": ranks}, {"tp": ranks}, {"tp": 2, "cp": ranks // 2}, {}):
        size = sizes.get("tp", 1) * sizes.get("cp", 1)
        if ranks % max(size, 1) or size * limit < case.seq_length or size == 0:
            continue
        home = Strategy.from_world(ranks, tp=sizes.get("tp", 1), cp=sizes.get("cp", 1), pp=1)
        config = _yaml(limit * size)
        name = "-".join(f"{axis}{n}" for axis, n in sizes.items() if n > 1) or f"dp{ranks}"
        if all(name != each.name for each in made):
            made.append(Contender(name=name, home=home, config=config))
            if home.tp == ranks > 1:
                made.append(Contender(name=f"{name}-sp", home=home, config=config, sequence_parallel=True))
    home, at_home = case.home, limit * case.home.tp * case.home.cp
    alone = Strategy.from_world(ranks, tp=1, cp=1, pp=1)
    return [
        *made,
        Contender(name="unpacked", home=home, config=_yaml(at_home)),
        Contender(name="ours", home=home, config=_ours(case)),
        Contender(name="ceiling", home=alone, config=_yaml(max(limit, case.seq_length)), beyond_limit=True),
        Contender(name="home_only", home=home, config="samples: megatron\n" + _yaml(case.seq_length), full=True),
        Contender(name="stock", home=home, config=None, full=True),
    ]


def _yaml(budget: int, strategies: str = "strategies: []") -> str:
    return f"{strategies}\nhome: {{tokens_per_microbatch: {budget}}}\n"


def _ours(case: Case) -> str:
    """The file of ours: what was given, or siblings of home with as much context parallelism as a length needs."""
    if case.config is not None:
        try:
            return case.config.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--config: {case.config}: {error.strerror}") from None
    home, limit = case.home, case.max_tokens_per_rank
    lines, cp = [], 1
    while cp < home.cp and limit * home.tp * cp < case.seq_length:
        room = limit * home.tp * cp
        lines.append(f"  - {{max_length: {room}, tp: {home.tp}, cp: {cp}, tokens_per_microbatch: {room}}}")
        cp *= 2
    return _yaml(limit * home.tp * home.cp, "strategies:\n" + "\n".join(lines) if lines else "strategies: []")


def megatron_arguments(case: Case, contender: Contender, *, corpus: Path, cache: Path, steps: int) -> list[str]:
    """Megatron's command line of a contender."""
    home, full = contender.home, contender.full
    text = f"""
        --data-path {corpus} --data-cache-path {cache} --split 100,0,0 --num-workers 0 --seed 1234
        --tokenizer-type NullTokenizer --vocab-size {case.vocabulary - 1} --make-vocab-size-divisible-by {case.ranks}
        --num-layers {case.layers} --hidden-size {case.hidden} --ffn-hidden-size {case.ffn}
        --num-attention-heads {case.heads} --group-query-attention --num-query-groups {case.query_groups}
        --kv-channels {case.hidden // case.heads} --swiglu --disable-bias-linear --normalization RMSNorm
        --position-embedding-type rope --untie-embeddings-and-output-weights
        --seq-length {case.seq_length} --max-position-embeddings {case.seq_length} --hidden-dropout 0 --attention-dropout 0
        --tensor-model-parallel-size {home.tp} --context-parallel-size {home.cp} --pipeline-model-parallel-size {home.pp}
        --use-cpu-initialization --use-distributed-optimizer --calculate-per-token-loss --micro-batch-size 1
        --global-batch-size {case.full_sequences if full else case.sequences} --train-iters {steps}
        --lr 1e-3 --lr-decay-style constant --weight-decay 0.01 --clip-grad 1.0 --adam-eps 1e-6
        --log-interval 1 --eval-interval 1000000 --eval-iters 0
        --transformer-impl local --attention-backend unfused --distributed-backend gloo
        --no-create-attention-mask-in-dataloader --no-gradient-accumulation-fusion --no-persist-layer-norm
        --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    """
    words = text.split()
    if contender.sequence_parallel:
        words.append("--sequence-parallel")
    if full and contender.config is not None:
        # What Megatron's own samples are asked for with; there is no end of document inside them.
        words += ["--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"]
    return words


# ------------------------------------------------------------------------------------------------------------ measuring


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


def _measure(
    case: Case, chosen: Sequence[Contender], world: World, *, rounds: int, limit_s: int, say: Callable[[str], None]
) -> dict[str, Taken]:
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
        longest = 0.0
        for number in range(rounds + 1):
            if jobs.agree(number > 1 and time.monotonic() - began + 1.1 * longest > limit_s):
                say(f"  stopped after {number - 1} rounds: another would end after {limit_s} s")
                break
            at = time.monotonic()
            # There and back, so that a drift of the machine's speed meets all alike.
            for each in chosen if number % 2 else reversed(chosen):
                for _ in range(_FULL_TURNS if each.full else 1):
                    _turn(started[each.name], taken[each.name], jobs, counts=number > 0)
            longest = max(longest, time.monotonic() - at) if number else 0.0
            say(f"  round {number} of {rounds}: {time.monotonic() - at:.1f} s")
        for each in chosen:
            started[each.name].send("stop")
        return taken


def drawn_lengths(case: Case) -> np.ndarray:
    """Lengths of a step's sequences, in input positions."""
    histogram = LengthHistogram.named(case.lengths).limited(case.seq_length, case.overlong)
    return histogram.sample(case.sequences, seed=case.seed)


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
    if counts:
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


# -------------------------------------------------------------------------------------------------------------- results


def summary(case: Case, chosen: Sequence[Contender], taken: dict[str, Taken]) -> dict[str, Any]:
    """Everything ``--json`` prints. Ratios are None where a side is missing; ``too_noisy`` names whose times vary too much."""
    wall = {name: statistics.median(each.wall_s) for name, each in taken.items() if each.wall_s}
    cpu = {name: statistics.median(each.cpu_s) for name, each in taken.items() if each.cpu_s}
    fixed = [each for each in chosen if each.name not in ("unpacked", "ours", "ceiling") and not each.full]
    static = min((each.name for each in fixed), key=lambda name: wall[name], default=None)
    tensor = min((e.name for e in fixed if e.home.cp == 1 and e.home.tp > 1), key=lambda name: wall[name], default=None)
    ours = wall.get("ours")

    def over_ours(name: str | None) -> float | None:
        return None if ours is None or name is None or name not in wall else wall[name] / ours

    share = None
    if static is not None and ours is not None and "ceiling" in wall:
        share = (wall[static] - ours) / (wall[static] - wall["ceiling"])
    both = "home_only" in cpu and "stock" in cpu
    return {
        "case": {
            "ranks": case.ranks,
            "layers": case.layers,
            "hidden": case.hidden,
            "seq_length": case.seq_length,
            "max_tokens_per_rank": case.max_tokens_per_rank,
            "lengths": case.lengths,
            "sequences": case.sequences,
            "tokens": int(drawn_lengths(case).sum()),
            "home": str(case.home),
            "ours": next((each.config for each in chosen if each.name == "ours"), None),
        },
        "contenders": {
            name: {
                "wall_s": wall[name],
                "cpu_s": cpu[name],
                "steps_s": each.wall_s,
                "spread": each.spread,
                "others": each.others,
                "taken_again": each.again,
                "losses": each.losses,
                "grad_norms": each.grad_norms,
            }
            for name, each in taken.items()
            if name in wall
        },
        "static": static,
        "tp_static": tensor,
        "ours_s": ours,
        "static_s": None if static is None else wall[static],
        "tp_static_s": None if tensor is None else wall[tensor],
        "unpacked_s": wall.get("unpacked"),
        "ceiling_s": wall.get("ceiling"),
        "home_only_s": wall.get("home_only"),
        "stock_s": wall.get("stock"),
        "ratio_static": over_ours(static),
        "ratio_tp_static": over_ours(tensor),
        "ratio_unpacked": over_ours("unpacked"),
        "ceiling_share": share,
        "ratio_home_only": cpu["home_only"] / cpu["stock"] if both else None,
        "home_only_extra": _extra(taken) if both else None,
        "switch_fraction": statistics.median(taken["ours"].moving_s) / ours if ours else None,
        "collectives": {n: {key: v["count"] for key, v in each.traffic.items()} for n, each in taken.items()},
        "bytes": {n: {key: v["bytes"] for key, v in each.traffic.items()} for n, each in taken.items()},
        "different": _different(chosen, taken),
        "too_noisy": sorted(name for name, each in taken.items() if each.wall_s and each.spread > _MOST_SPREAD),
    }


def _extra(taken: dict[str, Taken]) -> dict[str, dict[str, float]]:
    """What home only sends per step beside what stock Megatron does; negative where it sends less."""
    ours, stock, nothing = taken["home_only"].traffic, taken["stock"].traffic, {"count": 0, "bytes": 0}
    found = {}
    for key in sorted({*ours, *stock}):
        one, other = ours.get(key, nothing), stock.get(key, nothing)
        if one != other:
            found[key] = {what: one[what] - other[what] for what in ("count", "bytes")}
    return found


def _different(chosen: Sequence[Contender], taken: dict[str, Taken]) -> list[str]:
    """Where losses or gradient norms of contenders on the same sequences are not the same: a line each."""
    lines = []
    for full in (False, True):
        names = [each.name for each in chosen if each.full == full]
        for what, tolerance in (("losses", _LOSS_TOLERANCE), ("grad_norms", _NORM_TOLERANCE)):
            for name in names[1:]:
                # Steps that were disturbed were taken again, so that some have taken more than others.
                values = getattr(taken[names[0]], what), getattr(taken[name], what)
                one, other = (np.array(each[: min(map(len, values))]) for each in values)
                # Written so that a value that is no number counts as a difference.
                off = ~(np.abs(one - other) <= tolerance * np.abs(one))
                if off.any():
                    step = int(np.flatnonzero(off)[0])
                    lines.append(
                        f"{what} of {name} differ from those of {names[0]} in step {step + 1}: {other[step]:.8g}, "
                        f"not {one[step]:.8g} (allowed: {tolerance:g} of it)"
                    )
    return lines


def _print(case: Case, chosen: Sequence[Contender], taken: dict[str, Taken], result: dict[str, Any]) -> None:
    console = tables.console()
    shown = tables.table(
        "training", "strategy", "wall s", "CPU s", "spread", "again", "loss", "grad norm", left=("training", "strategy")
    )
    for each in chosen:
        of = taken[each.name]
        strategy = f"{each.home}{' sp' if each.sequence_parallel else ''}{' (no limit)' if each.beyond_limit else ''}"
        wall, cpu = statistics.median(of.wall_s), statistics.median(of.cpu_s)
        last = of.again, f"{of.losses[0]:.6f}", f"{of.grad_norms[0]:.5f}"
        tables.row(shown, each.name, strategy, f"{wall:.3f}", f"{cpu:.2f}", f"{of.spread:.0%}", *last)
    tables.print_table(
        console,
        f"{case.ranks} ranks, {case.layers} layers of {case.hidden}, {result['case']['tokens']:,} tokens in {case.sequences} "
        f"sequences of {case.lengths} cut at {case.seq_length:,}, at most {case.max_tokens_per_rank:,} tokens per rank; medians",
        shown,
    )
    shown = tables.table("training", "operation", "per step", "MB", left=("training", "operation"))
    for each in chosen:
        for key, entry in taken[each.name].traffic.items():
            tables.row(shown, each.name, key, f"{entry['count']:,.0f}", f"{entry['bytes'] / 1e6:,.2f}")
    tables.print_table(console, "Sent per step", shown)
    if result["home_only_extra"] is not None:
        more = "; ".join(
            f"{key}: {e['count']:+.0f}, {e['bytes']:+,.0f} bytes" for key, e in result["home_only_extra"].items()
        )
        tables.say(
            console,
            f"Home only beside stock, both on full sequences with this package's attention: {more or 'nothing'}.",
        )
    if result["different"]:
        tables.say(console, "No times are compared: the trainings differ.")
    elif result["too_noisy"]:
        tables.say(
            console,
            f"Not judged: step times of {', '.join(result['too_noisy'])} vary by more than {_MOST_SPREAD:.0%} of their median.",
        )
    else:
        for key in ("ratio_static", "ratio_tp_static", "ratio_unpacked", "ceiling_share", "ratio_home_only"):
            if result[key] is not None:
                tables.say(console, f"{key}: {result[key]:.3f}")
