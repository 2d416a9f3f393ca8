"""``hotspa bench step``: whole training steps, ours beside all static strategies that hold the longest sequence under one
limit of tokens per rank.

The limit counts tokens of a micro-batch over tp * cp. A pipeline divides no further: of its pp micro-batches in flight a
rank has the pp-th part of the layers. Where many strategies fit, a first step drops the slow ones.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from hotspa_megatron.cli import tables
from hotspa_megatron.cli.described_run import whole
from hotspa_megatron.cli.local_ranks import Jobs, Ranks, RanksFailed, World
from hotspa_megatron.planning.legality import tp_problem
from hotspa_megatron.planning.lengths import LengthHistogram
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.strategy import Strategy

_EPILOG: Final = """\
examples:
  hotspa bench step --ranks 4
      the case whose goals are known: 4 layers of 256, lengths of Wikipedia cut at 2,048, 512 tokens per rank
  hotspa bench step --ranks 4 --config hotspa.yaml --home tp2-cp2 --lengths data/my_text_document
      your own configuration on your own lengths
  hotspa bench step --ranks 4 --max-tokens-per-rank 1658 --only static,ours
      every static strategy that fits, pipelines too, and ours

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
_MOST_STATIC: Final = 5
"""Static strategies that the measured rounds have time for; of more, a first step drops those slower than ``_SLOW``."""
_SLOW: Final = 1.3
"""Of the fastest static strategy's first step."""
_STATIC_OF_PLAN: Final = re.compile(r"^# strategy with the same packing \((tp[-a-z0-9]+)", re.MULTILINE)
"""Where a file that ``hotspa plan`` wrote names the best static strategy; what that recomputes is left aside."""
_FULL_TURNS: Final = 2
"""Steps that each of the two runs on full-length sequences takes per round: their difference is a hundredth."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured. Lengths and limits in tokens; ``config``: the file of ours, None for one made from the limit;
    ``named``: static strategies that are measured however slow."""

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
    named: tuple[str, ...] = ()

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            num_layers=self.layers, hidden_size=self.hidden, ffn_hidden_size=self.ffn, num_attention_heads=self.heads,
            num_query_groups=self.query_groups, kv_channels=self.hidden // self.heads, padded_vocab_size=self.vocabulary,
            seq_length=self.seq_length, gated_linear_unit=True, tied_embeddings=False, rms_norm=True, qk_layernorm=False,
            linear_bias=False, qkv_bias=False, learned_positions=None, sequence_parallel=False, layers_in_first_stage=None,
            layers_in_last_stage=None, parameter_bytes=4, gradient_bytes=4, distributed_optimizer=True, local_layers=True,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One training. ``config``: the text of its --hotspa-config file, None for stock Megatron. ``static``: ours is
    compared with it. ``kept``: however slow its first step. ``full``: it trains full-length sequences, and is compared with
    those that do. ``beyond_limit``: the limit does not hold for it."""

    name: str
    home: Strategy
    config: str | None
    sequence_parallel: bool = False
    static: bool = False
    kept: bool = False
    full: bool = False
    beyond_limit: bool = False


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A static strategy that is not measured; ``first_step_s``: of one that was dropped for being slow."""

    name: str
    reason: str
    first_step_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class LineUp:
    """Who takes part, in the order of their turns, and which static strategies do not. ``planned``: the name of the one
    that the file of ours calls the best static, None where it says none or that one is left out."""

    contenders: tuple[Contender, ...]
    left_out: tuple[LeftOut, ...]
    planned: str | None


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
        return (max(self.wall_s) - min(self.wall_s)) / statistics.median(self.wall_s)


def add_part(parts: Any) -> None:
    """Add ``step`` to ``hotspa bench``."""
    parser = parts.add_parser(
        "step",
        help="train steps under one strategy, and by length groups",
        description="Train the same steps under static strategies and by length groups, in turns, and compare.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="hotspa bench step --ranks N [--config FILE] [--home S] [--lengths L] [--contender S] [--json]",
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
    parser.add_argument(
        "--contender",
        action="append",
        default=[],
        metavar="S",
        help="a static strategy to measure however slow, as tp2-cp2-sp",
    )
    parser.add_argument("--only", metavar="A,B", help="contenders to run; static stands for all static strategies")
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
    entered = line_up(case)
    if arguments.only:
        names = arguments.only.split(",")
        if lacking := [name for name in case.named if not {name, "static"} & set(names)]:
            raise ValueError(f"--only: lacks {lacking[0]}, which --contender names; add it, or remove --contender")
        entered = _only(entered, names)
    rounds, limit = whole("--rounds", arguments.rounds), whole("--time-limit", arguments.time_limit)

    def say(text: str) -> None:
        if world.first:
            print(text, file=sys.stderr, flush=True)

    try:
        taken, dropped = _measure(case, entered.contenders, world, rounds=rounds, limit_s=limit, say=say)
    except RanksFailed as error:
        print(f"hotspa: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if not world.first:
        return
    entered = replace(entered, left_out=(*entered.left_out, *dropped))
    result = summary(case, entered, taken)
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        _print(case, entered, taken, result)
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
        named=tuple(options.contender),
    )


def _strategy(text: str, ranks: int) -> Strategy:
    from hotspa_megatron.cli.bench import read_strategy

    return read_strategy(text, flag="--home", ranks=ranks)


def line_up(case: Case) -> LineUp:
    """All that take part: static strategies, ours, and what both are compared with."""
    ours = _ours(case)
    static, left_out, planned = _static(case, ours)
    home, limit = case.home, case.max_tokens_per_rank
    alone = Strategy.from_world(case.ranks, tp=1, cp=1, pp=1)
    others = (
        Contender(name="unpacked", home=home, config=_yaml(limit * home.tp * home.cp)),
        Contender(name="ours", home=home, config=ours),
        Contender(name="ceiling", home=alone, config=_yaml(max(limit, case.seq_length)), beyond_limit=True),
        Contender(name="home_only", home=home, config="samples: megatron\n" + _yaml(case.seq_length), full=True),
        Contender(name="stock", home=home, config=None, full=True),
    )
    return LineUp(contenders=(*static, *others), left_out=tuple(left_out), planned=planned)


def _static(case: Case, ours: str) -> tuple[list[Contender], list[LeftOut], str | None]:
    """Every static strategy over the ranks, either as a contender or with the reason why not; ``LineUp.planned``."""
    everyone = _every_static(case)
    problems = {name: problem for name, each in everyone.items() if (problem := _problem(case, each)) is not None}
    # A name is also taken as Strategy prints it.
    names = {f"{each.home}{'-sp' if each.sequence_parallel else ''}": name for name, each in everyone.items()}
    wanted = set()
    for text in case.named:
        name = text if text in everyone else names.get(text)
        if name is None:
            raise ValueError(
                f"--contender: {text!r} is no strategy over {case.ranks} ranks; give one of {', '.join(everyone)}"
            )
        if name in problems:
            raise ValueError(f"--contender: {text}: {problems[name]}")
        wanted.add(name)
    said = _STATIC_OF_PLAN.search(ours)
    planned = None if said is None else names.get(said[1])
    if said is not None and planned is None:
        problems[said[1]] = f"the file's best static strategy has virtual stages or other than {case.ranks} ranks"
    if planned in problems:
        planned = None
    kept = wanted | ({planned} if planned else set())
    beside_cp = [n for n, c in everyone.items() if c.sequence_parallel and c.home.cp > 1 and n not in problems]
    if len(everyone) - sum(name in problems for name in everyone) - len(beside_cp) <= _MOST_STATIC:
        for name in beside_cp:
            if name not in kept:
                problems[name] = (
                    f"sequence parallelism beside cp takes part where more than {_MOST_STATIC} others do and a first step "
                    f"drops the slow ones, or with --contender {name}"
                )
    chosen = [replace(each, kept=name in kept) for name, each in everyone.items() if name not in problems]
    return chosen, [LeftOut(name=name, reason=reason) for name, reason in problems.items()], planned


def _every_static(case: Case) -> dict[str, Contender]:
    """Every (tp, cp, pp, dp) over the ranks, with and without sequence parallelism where tp > 1, by name."""
    sizes = [size for size in range(1, case.ranks + 1) if case.ranks % size == 0]
    homes = [
        Strategy.from_world(case.ranks, tp=tp, cp=cp, pp=pp)
        for pp in sizes
        for cp in sizes
        for tp in sizes
        if case.ranks % (tp * cp * pp) == 0
    ]
    made = {}
    for home in sorted(homes, key=lambda each: (each.pp, each.dp, (each.tp > 1) + (each.cp > 1), each.tp)):
        axes = (("tp", home.tp), ("cp", home.cp), ("pp", home.pp), ("dp", home.dp))
        name = "-".join(f"{axis}{size}" for axis, size in axes if size > 1) or "dp1"
        config = _yaml(case.max_tokens_per_rank * home.tp * home.cp)
        made[name] = Contender(name=name, home=home, config=config, static=True)
        if home.tp > 1:
            made[f"{name}-sp"] = replace(made[name], name=f"{name}-sp", sequence_parallel=True)
    return made


def _problem(case: Case, static: Contender) -> str | None:
    """Why a static strategy cannot run the case; None where it can."""
    home = static.home
    room = case.max_tokens_per_rank * home.tp * home.cp
    if room < case.seq_length:
        return f"{room:,} tokens per micro-batch are fewer than the longest sequence's {case.seq_length:,}"
    if case.layers % home.pp:
        return f"{case.layers} layers do not divide over pp {home.pp}"
    if home.cp > 1 and case.seq_length % (2 * home.cp):
        return f"--seq-length {case.seq_length} is no multiple of 2 * cp {home.cp}"
    return tp_problem(replace(case.shape, sequence_parallel=static.sequence_parallel), home.tp)


def _only(entered: LineUp, names: Sequence[str]) -> LineUp:
    known = [each.name for each in entered.contenders]
    if unknown := sorted(set(names) - {"static", *known}):
        raise ValueError(f"--only: {unknown[0]!r} is none of static, {', '.join(known)}")
    chosen = (each for each in entered.contenders if each.name in names or (each.static and "static" in names))
    return replace(entered, contenders=tuple(chosen))


def slow_ones(chosen: Sequence[Contender], first_s: Mapping[str, float]) -> list[LeftOut]:
    """Static contenders that a first step (seconds by name) is enough to know of, where there are many."""
    static = [each for each in chosen if each.static]
    if len(static) <= _MOST_STATIC:
        return []
    best = min(static, key=lambda each: first_s[each.name])
    # ratio_tp_static compares ours with the fastest of these.
    tensor = min((e for e in static if _tensor_only(e)), key=lambda each: first_s[each.name], default=None)
    return [
        LeftOut(
            name=each.name,
            reason=f"its first step took {first_s[each.name]:.2f} s, more than {_SLOW:g} times {best.name}'s "
            f"{first_s[best.name]:.2f} s",
            first_step_s=first_s[each.name],
        )
        for each in static
        if first_s[each.name] > _SLOW * first_s[best.name] and not each.kept and each is not tensor
    ]


def _tensor_only(static: Contender) -> bool:
    return static.home.cp == 1 and static.home.tp > 1


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


# -------------------------------------------------------------------------------------------------------------- results


def summary(case: Case, entered: LineUp, taken: dict[str, Taken]) -> dict[str, Any]:
    """Everything ``--json`` prints. Ratios are None where a side is missing; ``too_noisy`` names whose times vary too much."""
    chosen = entered.contenders
    wall = {name: statistics.median(each.wall_s) for name, each in taken.items() if each.wall_s}
    cpu = {name: statistics.median(each.cpu_s) for name, each in taken.items() if each.cpu_s}
    fixed = [each for each in chosen if each.static and each.name in wall]
    static = min((each.name for each in fixed), key=lambda name: wall[name], default=None)
    tensor = min((each.name for each in fixed if _tensor_only(each)), key=lambda name: wall[name], default=None)
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
                "first_step_s": each.first_s,
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
        "left_out": [asdict(each) for each in entered.left_out],
        "planned_static": entered.planned,
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


def _print(case: Case, entered: LineUp, taken: dict[str, Taken], result: dict[str, Any]) -> None:
    console = tables.console()
    chosen = [each for each in entered.contenders if taken[each.name].wall_s]
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
    if entered.left_out:
        shown = tables.table("strategy", "why it was not measured", left=("strategy", "why it was not measured"))
        for out in entered.left_out:
            tables.row(shown, out.name, out.reason)
        tables.print_table(console, "Static strategies left out", shown)
    if entered.planned is not None:
        tables.say(console, f"The file calls {entered.planned} the best static strategy.")
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
