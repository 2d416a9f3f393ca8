"""Who takes part in ``hotspa bench step``: the case, every static strategy that fits it, ours, and their command lines.

Decides alone: nothing is started here. ``step_measurement`` runs the line-up, ``bench_step`` compares what it took.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from hotspa_megatron.planning.legality import tp_problem
from hotspa_megatron.planning.lengths import LengthHistogram
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.strategy import Strategy

_MOST_STATIC: Final = 5
"""Static strategies that the measured rounds have time for; of more, a first step drops those slower than ``_SLOW``."""
_SLOW: Final = 1.3
"""Of the fastest static strategy's first step."""
_STATIC_OF_PLAN: Final = re.compile(r"^# strategy with the same packing \((tp[-a-z0-9]+)", re.MULTILINE)
"""Where a file that ``hotspa plan`` wrote names the best static strategy; what that recomputes is left aside."""


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


def chosen_of(entered: LineUp, names: Sequence[str]) -> LineUp:
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
    tensor = min((e for e in static if tensor_only(e)), key=lambda each: first_s[each.name], default=None)
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


def tensor_only(static: Contender) -> bool:
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


def drawn_lengths(case: Case) -> np.ndarray:
    """Lengths of a step's sequences, in input positions."""
    histogram = LengthHistogram.named(case.lengths).limited(case.seq_length, case.overlong)
    return histogram.sample(case.sequences, seed=case.seed)
