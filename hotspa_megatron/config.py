"""The configuration file: what it says (``load_config``) and what that means for one model and world (``resolve``).

Pure: reads one file, decides nothing that the file and the command line do not. Every error is one line that names the
file, the line, the key, the value and the fix.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from hotspa_megatron.planning.alignment import Alignment, alignment_of
from hotspa_megatron.planning.communicators import ASSUMPTION, GroupMemory, group_memory
from hotspa_megatron.planning.execution import Granularity, Recompute
from hotspa_megatron.planning.home_flags import change_of_home
from hotspa_megatron.planning.legality import legal_products, legal_tps, tp_problem, vocabulary_problem
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.run_folder import folder_problem
from hotspa_megatron.strategy import Kind, Strategy, layers_by_stage, listed, stage_layers
from hotspa_megatron.strict_yaml import ConfigError, Value, config_error, read_document, shown

__all__ = [
    "ConfigError",
    "HotSPaConfig",
    "Overlong",
    "ResolvedConfig",
    "ResolvedStrategy",
    "Samples",
    "StrategyConfig",
    "SwitchConfig",
    "Untested",
    "load_config",
    "resolve",
]

Overlong: TypeAlias = Literal["split", "error", "truncate", "drop"]
Samples: TypeAlias = Literal["documents", "megatron"]
Merge: TypeAlias = Literal["auto", "never"]
Prefetch: TypeAlias = Literal["auto", "always", "never"]
TransportName: TypeAlias = Literal["auto", "nccl", "gloo"]
FoldDtype: TypeAlias = Literal["main_grad", "bf16"]
Untested: TypeAlias = Literal["fp8", "megatron"]
"""What is refused unless the file lets it run: fp8, and a Megatron that is newer than the tests'."""

_TOP_KEYS: Final = (
    *("strategies", "home", "samples", "overlong", "mock_lengths", "merge", "switch", "check_plans", "get_batch"),
    *("verify_every", "trace", "watchdog_s", "start_sample", "allow_untested"),
)
_STRATEGY_KEYS: Final = (
    "max_length", "tp", "cp", "pp", "vpp", "tokens_per_microbatch", "recompute", "recompute_layers"
)  # fmt: skip
_SIZES: Final = ("max_length", "tp", "cp", "pp", "vpp", "tokens_per_microbatch", "recompute_layers")
_HOME_AXES: Final = ("tp", "cp", "pp", "vpp")
_HOME_KEYS: Final = (*_HOME_AXES, "recompute", "recompute_layers", "tokens_per_microbatch")
_SWITCH_KEYS: Final = ("chunk_mb", "prefetch", "transport", "max_group_mb", "fold_dtype")
_STRATEGY_REFUSED: Final = {
    "ep": "is not available in this version; remove it",
    "dp": "follows from the world: dp = world / (tp * cp * pp); remove it",
}
_OTHER_NAMES: Final = {
    "tensor_parallel": "tp",
    "tensor_model_parallel": "tp",
    "context_parallel": "cp",
    "pipeline_parallel": "pp",
    "pipeline_model_parallel": "pp",
    "threshold": "max_length",
    "max_seqlen": "max_length",
    "max_tokens": "tokens_per_microbatch",
}
_NOT_RECOMPUTED: Final = Recompute(granularity="none")
_LARGEST_COUNT: Final = 2**63 - 1
_GET_BATCH: Final = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


class KeyLine(NamedTuple):
    """Where a key stands in its file."""

    key: str
    line: int


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """One entry of ``strategies``; lengths in input positions, ``tokens_per_microbatch`` None where it follows.

    ``line`` and ``key_lines`` place messages; they take no part in comparisons.
    """

    max_length: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    vpp: int | None = None
    """None: home's where tp and pp are home's, else 1."""
    tokens_per_microbatch: int | None = None
    recompute: Recompute | None = None
    """None: as the command line has it."""
    line: int = field(default=1, compare=False)
    key_lines: tuple[KeyLine, ...] = field(default=(), compare=False, repr=False)

    def line_of(self, key: str) -> int:
        """The line of one of the entry's keys, or of the entry where the key was left out."""
        return next((place.line for place in self.key_lines if place.key == key), self.line)


@dataclass(frozen=True, kw_only=True)
class SwitchConfig:
    """How parameters and gradients move. Sizes in units of 2^20 bytes.

    ``chunk_mb``: size of each of the two buffers that a switch may take. ``prefetch``: whether the next guest's
    parameters arrive while a guest runs. ``max_group_mb``: the most that the communicators of added strategies may take
    of a rank's memory, None for no limit. ``fold_dtype``: what a guest's gradients travel home as; ``bf16`` rounds each
    element once, to 8 significant bits, and adds it in main_grad's precision as ever.
    """

    chunk_mb: int = 256
    prefetch: Prefetch = "auto"
    transport: TransportName = "auto"
    max_group_mb: int | None = None
    fold_dtype: FoldDtype = "main_grad"
    key_lines: tuple[KeyLine, ...] = field(default=(), compare=False, repr=False)

    def line_of(self, key: str) -> int:
        """The line of a key, or 1 where it was left out."""
        return next((place.line for place in self.key_lines if place.key == key), 1)

    def fold_itemsize(self, gradient_bytes: int) -> int:
        """Bytes of an element on its way home, for a main_grad of so many."""
        return min(gradient_bytes, 2) if self.fold_dtype == "bf16" else gradient_bytes


@dataclass(frozen=True, kw_only=True)
class HotSPaConfig:
    """A configuration file as written, with defaults that do not depend on the model filled in."""

    path: Path = field(compare=False)
    strategies: tuple[StrategyConfig, ...]
    home_tokens_per_microbatch: int | None = None
    home_sizes: tuple[tuple[str, int], ...] = ()
    """Axes and sizes of the home that the file was made for; the command line's have to be the same."""
    home_recompute: Recompute | None = None
    """What that home recomputes; None: not looked at."""
    samples: Samples = "documents"
    overlong: Overlong = "split"
    mock_lengths: str | None = None
    """Lengths of --mock-data, as ``LengthHistogram.named`` reads them; None leaves them to Megatron."""
    merge: Merge = "auto"
    """Whether a step may run a length group under a longer one's strategy where its own would cost more than it saves."""
    switch: SwitchConfig = SwitchConfig()
    check_plans: bool = True
    verify_every: int | None = None
    """Steps between self-checks of parameters and gradients; None for none."""
    get_batch: str | None = None
    trace: str | None = None
    """A folder below --save (without it, below where the job starts) for the log of all steps and the timeline of the
    first ones; ``hotspa report`` draws it. None for neither."""
    start_sample: int | None = None
    """The consumed samples, counted as ``samples`` says, to start at where the checkpoint counts another kind of sample."""
    watchdog_s: int | None = 120
    """Seconds without progress after which the log says which rank is behind; None for never."""
    allow_untested: tuple[Untested, ...] = ()
    """What may run although the authors never ran it."""
    watchdog_line: int | None = field(default=None, compare=False)
    """None where the file leaves ``watchdog_s`` out."""
    start_sample_line: int = field(default=1, compare=False)
    home_line: int = field(default=1, compare=False)
    home_sizes_line: int = field(default=1, compare=False)
    overlong_line: int | None = field(default=None, compare=False)
    """None where the file leaves ``overlong`` out."""

    def overlong_for_conversations(self) -> Overlong:
        """The rule for conversations, of which a piece would answer a question that it does not hold: error by default.

        ``ConfigError`` where the file asks for split.
        """
        if self.overlong != "split":
            return self.overlong
        if self.overlong_line is None:
            return "error"
        raise config_error(
            self.path,
            self.overlong_line,
            "overlong",
            "split cuts documents; conversations (--sft) are not cut: write error, truncate or drop",
        )

    def digest(self) -> str:
        """SHA-256 of the contents, equal exactly where two configurations compare equal; for comparing ranks."""
        return hashlib.sha256(json.dumps(self.contents(), sort_keys=True).encode()).hexdigest()

    def contents(self) -> dict[str, object]:
        """What the file says, by key, in plain lists and values; defaults that do not depend on the model are filled in."""
        return {
            "strategies": [
                [
                    entry.max_length,
                    entry.tp,
                    entry.cp,
                    entry.pp,
                    entry.vpp,
                    entry.tokens_per_microbatch,
                    str(entry.recompute),
                ]
                for entry in self.strategies
            ],
            "home_tokens_per_microbatch": self.home_tokens_per_microbatch,
            "home_sizes": self.home_sizes,
            "home_recompute": str(self.home_recompute),
            "samples": self.samples,
            "overlong": self.overlong,
            "mock_lengths": self.mock_lengths,
            "merge": self.merge,
            "switch": [getattr(self.switch, key) for key in _SWITCH_KEYS],
            "check_plans": self.check_plans,
            "verify_every": self.verify_every,
            "get_batch": self.get_batch,
            "trace": self.trace,
            "watchdog_s": self.watchdog_s,
            "start_sample": self.start_sample,
            "allow_untested": self.allow_untested,
        }


@dataclass(frozen=True, kw_only=True)
class ResolvedStrategy:
    """A strategy that the model can take: lengths and budget in tokens.

    ``tokens_per_microbatch`` counts a micro-batch over all its context-parallel ranks, padding included; it holds at
    least one sequence of ``max_length``. ``layers``: of every virtual stage, in the model's order, counted from 0.
    ``recompute`` None: as the command line has it.
    """

    strategy: Strategy
    kind: Kind
    max_length: int
    tokens_per_microbatch: int
    layers: tuple[range, ...]
    alignment: Alignment
    recompute: Recompute | None = None

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each pipeline stage, all its chunks'."""
        return layers_by_stage(self.layers, self.strategy.pp)


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """A configuration checked against one model and world; ``strategies`` ascend by length and leave out home."""

    config: HotSPaConfig
    shape: ModelShape
    home: ResolvedStrategy
    strategies: tuple[ResolvedStrategy, ...]

    @property
    def group_memory(self) -> GroupMemory:
        """What the communicators of all strategies take."""
        return group_memory(self.home.strategy, [(each.strategy, each.kind) for each in self.strategies])


def load_config(path: str | Path) -> HotSPaConfig:
    """Read and check a file on its own; ``ConfigError`` on the first thing that is wrong."""
    path = Path(path)
    document = read_document(path)
    if document is None:
        raise config_error(path, 1, "strategies", "the file holds no keys; write at least 'strategies: []'")
    top = document.mapping(known=_TOP_KEYS, refused={}, also=_OTHER_NAMES)
    if "strategies" not in top:
        raise config_error(
            path, document.line, "strategies", "the key is missing; write 'strategies: []' for a run without any"
        )
    home = top["home"].mapping(known=_HOME_KEYS, refused={}, also=_OTHER_NAMES) if "home" in top else {}
    budget = home.get("tokens_per_microbatch")
    return HotSPaConfig(
        path=path,
        strategies=_strategies(top["strategies"]),
        home_tokens_per_microbatch=None if budget is None else budget.integer(),
        home_sizes=tuple((axis, home[axis].integer()) for axis in _HOME_AXES if axis in home),
        home_recompute=_recompute(home),
        samples=_samples(top["samples"]) if "samples" in top else "documents",
        overlong=_overlong(top["overlong"]) if "overlong" in top else "split",
        mock_lengths=_mock_lengths(top["mock_lengths"]) if "mock_lengths" in top else None,
        merge=_merge(top["merge"]) if "merge" in top else "auto",
        switch=_switch(top["switch"]) if "switch" in top else SwitchConfig(),
        check_plans=top["check_plans"].boolean() if "check_plans" in top else True,
        verify_every=_verify_every(top["verify_every"]) if "verify_every" in top else None,
        get_batch=_get_batch(top["get_batch"]) if "get_batch" in top else None,
        trace=_trace(top["trace"]) if "trace" in top else None,
        watchdog_s=_watchdog(top["watchdog_s"]) if "watchdog_s" in top else 120,
        start_sample=_start_sample(top["start_sample"]) if "start_sample" in top else None,
        allow_untested=_untested(top["allow_untested"]) if "allow_untested" in top else (),
        start_sample_line=top["start_sample"].line if "start_sample" in top else 1,
        watchdog_line=top["watchdog_s"].line if "watchdog_s" in top else None,
        home_line=document.line if budget is None else budget.line,
        home_sizes_line=top["home"].line if "home" in top else document.line,
        overlong_line=top["overlong"].line if "overlong" in top else None,
    )


def resolve(
    config: HotSPaConfig, *, shape: ModelShape, home: Strategy, recompute: Recompute = _NOT_RECOMPUTED
) -> ResolvedConfig:
    """Check a file against the model and the world that home fills; ``ConfigError`` where they do not fit.

    ``recompute``: what the command line has home recompute; nothing without its flags.
    """
    _check_home(config, home, recompute)
    every_tp = [home.tp, *(entry.tp for entry in config.strategies)]
    strategies = []
    for index, entry in enumerate(config.strategies):
        strategies.append(_resolve_entry(config, f"strategies[{index}]", entry, shape, home, every_tp))
    resolved = ResolvedConfig(
        config=config, shape=shape, home=_resolve_home(config, shape, home, every_tp), strategies=tuple(strategies)
    )
    limit, taken = config.switch.max_group_mb, resolved.group_memory
    if limit is not None and taken.added_mb > limit:
        raise config_error(
            config.path,
            config.switch.line_of("max_group_mb"),
            "switch.max_group_mb",
            f"the {taken.added_groups} communicators that home does not have take about {taken.added_mb} MiB of a rank's "
            f"memory, more than {limit} ({ASSUMPTION}); list fewer strategies, or write {taken.added_mb} or null",
        )
    return resolved


def _strategies(value: Value) -> tuple[StrategyConfig, ...]:
    entries: list[StrategyConfig] = []
    for item in value.sequence():
        keys = item.mapping(known=_STRATEGY_KEYS, refused=_STRATEGY_REFUSED, also=_OTHER_NAMES)
        if "max_length" not in keys:
            raise item.error("max_length is missing; write the longest sequence that it takes, in tokens")
        sizes = {name: keys[name].integer() for name in _SIZES if name in keys}
        entry = StrategyConfig(
            max_length=sizes["max_length"],
            tp=sizes.get("tp", 1),
            cp=sizes.get("cp", 1),
            pp=sizes.get("pp", 1),
            vpp=sizes.get("vpp"),
            tokens_per_microbatch=sizes.get("tokens_per_microbatch"),
            recompute=_recompute(keys),
            line=item.line,
            key_lines=tuple(KeyLine(name, key.line) for name, key in keys.items()),
        )
        if entries and entry.max_length <= entries[-1].max_length:
            raise keys["max_length"].error(
                f"{entry.max_length} is not above {entries[-1].max_length} of the entry before; "
                "list strategies from short to long, each length once"
            )
        if entry.tokens_per_microbatch is not None and entry.tokens_per_microbatch < entry.max_length:
            raise keys["tokens_per_microbatch"].error(
                f"{entry.tokens_per_microbatch} cannot hold one sequence of max_length {entry.max_length}; "
                f"write {entry.max_length} or more"
            )
        entries.append(entry)
    return tuple(entries)


def _recompute(keys: Mapping[str, Value]) -> Recompute | None:
    names: Sequence[Granularity] = get_args(Granularity)
    granularity = keys["recompute"].choice(names) if "recompute" in keys else None
    layers = keys.get("recompute_layers")
    if layers is not None and granularity != "full":
        raise layers.error(f"counts layers that are recomputed in full, but recompute is {granularity or 'not given'}; "
                           "write 'recompute: full' or remove it")  # fmt: skip
    return (
        None
        if granularity is None
        else Recompute(granularity=granularity, layers=None if layers is None else layers.integer())
    )


def _samples(value: Value) -> Samples:
    names: Sequence[Samples] = get_args(Samples)
    return value.choice(names)


def _overlong(value: Value) -> Overlong:
    names: Sequence[Overlong] = get_args(Overlong)
    return value.choice(names)


def _merge(value: Value) -> Merge:
    names: Sequence[Merge] = get_args(Merge)
    return value.choice(names)


def _mock_lengths(value: Value) -> str | None:
    text = value.text()
    if text is not None:
        # Here, because it needs numpy, which a configuration without the key does without.
        from hotspa_megatron.planning.lengths import LengthHistogram

        try:
            LengthHistogram.named(text)
        except ValueError as error:
            raise value.error(str(error)) from None
    return text


def _switch(value: Value) -> SwitchConfig:
    keys = value.mapping(known=_SWITCH_KEYS, refused={}, also={})
    prefetch: Sequence[Prefetch] = get_args(Prefetch)
    transports: Sequence[TransportName] = get_args(TransportName)
    fold_dtypes: Sequence[FoldDtype] = get_args(FoldDtype)
    limit = keys.get("max_group_mb")
    return SwitchConfig(
        chunk_mb=keys["chunk_mb"].integer() if "chunk_mb" in keys else SwitchConfig.chunk_mb,
        prefetch=keys["prefetch"].choice(prefetch) if "prefetch" in keys else SwitchConfig.prefetch,
        transport=keys["transport"].choice(transports) if "transport" in keys else SwitchConfig.transport,
        max_group_mb=None if limit is None or limit.text() is None else limit.integer(),
        fold_dtype=keys["fold_dtype"].choice(fold_dtypes) if "fold_dtype" in keys else SwitchConfig.fold_dtype,
        key_lines=tuple(KeyLine(name, key.line) for name, key in keys.items()),
    )


def _verify_every(value: Value) -> int | None:
    return None if value.text() is None else value.integer(least=0) or None


def _get_batch(value: Value) -> str | None:
    text = value.text()
    if text is not None and not _GET_BATCH.fullmatch(text):
        raise value.error(f"{shown(text)} does not name a function; write pkg.mod:function or null")
    return text


def _trace(value: Value) -> str | None:
    text = value.text()
    problem = None if text is None else folder_problem(text)
    if problem is not None:
        raise value.error(problem)
    return text


def _start_sample(value: Value) -> int | None:
    return None if value.text() is None else value.integer(least=0, most=_LARGEST_COUNT)


def _watchdog(value: Value) -> int | None:
    return None if value.text() in (None, "0") else value.integer()


def _untested(value: Value) -> tuple[Untested, ...]:
    names: Sequence[Untested] = get_args(Untested)
    return tuple(sorted({item.choice(names) for item in value.sequence()}))


def _resolve_entry(
    config: HotSPaConfig, key: str, entry: StrategyConfig, shape: ModelShape, home: Strategy, every_tp: Sequence[int]
) -> ResolvedStrategy:
    def error(name: str, problem: str) -> ConfigError:
        return config_error(config.path, entry.line_of(name), f"{key}.{name}", problem)

    virtual = entry.vpp or (home.vpp if (entry.tp, entry.pp) == (home.tp, home.pp) else 1)
    if virtual > 1 and entry.pp == 1:
        raise error("vpp", f"{virtual} virtual stages need a pipeline, but pp is 1; remove vpp")
    try:
        strategy = Strategy.from_world(home.world_size, tp=entry.tp, cp=entry.cp, pp=entry.pp, vpp=virtual)
    except ValueError as problem:
        fix = f"legal tp * cp * pp: {legal_products(home.world_size)}"
        raise config_error(config.path, entry.line, key, f"{problem}; {fix}") from None
    if illegal := tp_problem(shape, entry.tp):
        legal = legal_tps(shape, ranks=home.world_size // (entry.cp * entry.pp))
        raise error("tp", f"{illegal}; legal tp: {listed(legal)}")
    if illegal := vocabulary_problem(shape, entry.tp, every_tp=every_tp):
        raise error("tp", illegal)
    try:
        layers = _layers(shape, strategy, home)
    except ValueError as problem:
        raise error("pp", str(problem)) from None
    if strategy.vpp > 1 and shape.num_layers % (strategy.pp * strategy.vpp):
        legal_vpps = [size for size in range(1, shape.num_layers + 1) if shape.num_layers % (strategy.pp * size) == 0]
        raise error(
            "vpp",
            f"{shape.num_layers} layers do not divide over {strategy.vpp} virtual stages of pp {strategy.pp}; "
            f"legal vpp: {listed(legal_vpps)}",
        )
    per_stage = max(map(len, layers)) or shape.num_layers
    if entry.recompute is not None and (entry.recompute.layers or 0) > per_stage:
        raise error(
            "recompute_layers",
            f"{entry.recompute.layers} is more than the {per_stage} layers of a stage of {strategy}; "
            "remove it to recompute all",
        )
    if entry.max_length > shape.seq_length:
        raise error(
            "max_length", f"{entry.max_length} is longer than --seq-length {shape.seq_length}; write at most that"
        )
    alignment = alignment_of(strategy, sequence_parallel=shape.sequence_parallel, token_multiple=shape.token_multiple)
    least = alignment.alone(entry.max_length)
    budget = least if entry.tokens_per_microbatch is None else entry.tokens_per_microbatch
    if budget < least:
        raise error(
            "tokens_per_microbatch",
            f"{budget} cannot hold one sequence of max_length {entry.max_length}, "
            f"which {strategy} pads to {least} tokens; write {least} or more",
        )
    return ResolvedStrategy(
        strategy=strategy,
        # An entry equal to home differs by its budget: it runs on home's parameters as any sibling does.
        kind=Kind.SIBLING if strategy.same_layout(home) else Kind.GUEST,
        max_length=entry.max_length,
        tokens_per_microbatch=budget,
        layers=layers,
        alignment=alignment,
        recompute=entry.recompute,
    )


def _resolve_home(config: HotSPaConfig, shape: ModelShape, home: Strategy, every_tp: Sequence[int]) -> ResolvedStrategy:
    tp_flag = "command line: --tensor-model-parallel-size"
    if illegal := tp_problem(shape, home.tp):
        legal = legal_tps(shape, ranks=home.world_size // (home.cp * home.pp))
        raise ConfigError(f"{tp_flag}: {illegal}; legal tp: {listed(legal)}")
    if illegal := vocabulary_problem(shape, home.tp, every_tp=every_tp):
        raise ConfigError(f"{tp_flag}: {illegal}")
    try:
        layers = _layers(shape, home, home)
    except ValueError as problem:
        raise ConfigError(f"command line: --pipeline-model-parallel-size: {problem}") from None
    alignment = alignment_of(home, sequence_parallel=shape.sequence_parallel, token_multiple=shape.token_multiple)
    least = alignment.alone(shape.seq_length)
    budget = least if config.home_tokens_per_microbatch is None else config.home_tokens_per_microbatch
    if budget < least:
        raise config_error(
            config.path,
            config.home_line,
            "home.tokens_per_microbatch",
            f"{budget} cannot hold one sequence of --seq-length {shape.seq_length}, "
            f"which {home} pads to {least} tokens; write {least} or more",
        )
    return ResolvedStrategy(
        strategy=home,
        kind=Kind.HOME,
        max_length=shape.seq_length,
        tokens_per_microbatch=budget,
        layers=layers,
        alignment=alignment,
    )


def _check_home(config: HotSPaConfig, home: Strategy, recompute: Recompute) -> None:
    """Under another home siblings become guests, budgets are too large, and memory is not what the plan said."""
    other = [(axis, str(size)) for axis, size in config.home_sizes if size != getattr(home, axis)]
    here = str(home)
    if config.home_recompute is not None and config.home_recompute != recompute:
        other.append(("recompute", str(config.home_recompute)))
        here += f" recompute {recompute}"
    if not other:
        return
    sizes = dict(config.home_sizes)
    if sizes.get("pp") == 1:
        sizes["vpp"] = 1  # flags of virtual stages could not stay
    change = change_of_home(sizes, config.home_recompute, now=home, now_recompute=recompute)
    raise config_error(
        config.path,
        config.home_sizes_line,
        f"home.{other[0][0]}",
        f"the file was made for a home of {', '.join(map(' '.join, other))}, but the command line's is {here}; {change}, "
        "or have the file made anew for this home (hotspa plan --keep-home)",
    )


def _layers(shape: ModelShape, strategy: Strategy, home: Strategy) -> tuple[range, ...]:
    """Layers of every virtual stage. Home and its siblings keep the command line's uneven split; a guest's are even."""
    if strategy.same_layout(home) and shape.home_split_by_megatron:
        return (range(0),) * strategy.pp * strategy.vpp
    if strategy.vpp > 1:
        stage_layers(shape.num_layers, strategy.pp)  # so that pp alone is named where it is pp that does not divide
        if shape.num_layers % (strategy.pp * strategy.vpp):
            return stage_layers(shape.num_layers, strategy.pp)
        return stage_layers(shape.num_layers, strategy.pp * strategy.vpp)
    if strategy.same_layout(home):
        return stage_layers(shape.num_layers, strategy.pp, shape.layers_in_first_stage, shape.layers_in_last_stage)
    return stage_layers(shape.num_layers, strategy.pp)
