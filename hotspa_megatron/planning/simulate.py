"""Whole runs on a described cluster, without one: the steps of a run, and suites of settings beside other systems.

Everything here is modelled. Decides nothing: ``search`` chooses, ``step_time`` times, ``baselines`` gives the others.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np

from hotspa_megatron.planning.baselines import (
    hotspa_rules,
    hotspa_table,
    hybrid_context,
    one_sequence_each,
    static_first_fit,
)
from hotspa_megatron.planning.cost_model import CostModel
from hotspa_megatron.planning.execution import VIRTUAL_STAGES, Execution, legal_executions
from hotspa_megatron.planning.group_estimates import Models
from hotspa_megatron.planning.hardware import Hardware, load_hardware
from hotspa_megatron.planning.known_models import KNOWN_MODELS
from hotspa_megatron.planning.lengths import LengthHistogram, Lengths
from hotspa_megatron.planning.memory_model import ADAM_BYTES
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.planning.search import PlannedRun, plan_batches
from hotspa_megatron.planning.step_time import GroupChoice, RunModel, StepTime
from hotspa_megatron.strategy import Strategy
from hotspa_megatron.strict_yaml import Value, config_error, read_document, shown

Lever: TypeAlias = Literal["interleaving", "long packing"]
"""What a suite can be run without: virtual stages; micro-batches larger than their group's longest sequence."""
_FOLDER: Final = Path(__file__).with_name("suites")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One model on one number of GPUs with one context (tokens); ``max_tp`` bounds every system alike."""

    model: str
    gpus: int
    context: int
    max_tp: int
    data: str

    def __str__(self) -> str:
        return f"{self.model}@{self.gpus} {self.context // 1024}K {self.data}"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Settings on one cluster, and the mini-batches of each kind of data, before they are cut to a context."""

    name: str
    hardware: Hardware
    settings: tuple[Setting, ...]
    data: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]

    def batches(self, setting: Setting) -> tuple[Lengths, ...]:
        """The setting's mini-batches, overlong sequences truncated as HotSPa does."""
        lengths = dict(self.data)[setting.data]
        return tuple(np.minimum(np.array(batch, np.int64), setting.context) for batch in lengths)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Seconds per step of every system in one setting, means over its mini-batches; None where a system cannot run.

    ``static_s``: the best static strategy with our packing. ``static_first_fit_s``: with random rows of whole contexts.
    ``home_unpacked_s``: HotSPa's home, one sequence per micro-batch. ``hotspa_s``: ours. ``hotspa_tables_s``: HotSPa's
    tables and rules. ``hybrid_cp_s``: Megatron's hybrid context parallelism. ``dynamic_cp_s``: its packed ideal.
    ``ceiling_s``: the kernels alone. ``switch_fraction``: share of ours that switches and folds take.
    """

    model: str
    gpus: int
    context: int
    data: str
    tokens: float
    static_s: float
    static_first_fit_s: float | None
    home_unpacked_s: float | None
    hotspa_s: float
    hotspa_tables_s: float | None
    hybrid_cp_s: float | None
    dynamic_cp_s: float | None
    ceiling_s: float
    switch_fraction: float
    static: str
    groups: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OtherSystems:
    """Seconds per step of others with a run's sequences, means over its steps; None where one cannot run.

    Fields as of ``Cell``; ``home_unpacked_s`` is of the plan's home.
    """

    home_unpacked_s: float
    hybrid_cp_s: float | None
    dynamic_cp_s: float | None
    ceiling_s: float


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """One step of a run; ``static`` is the same sequences under the best static strategy."""

    step: int
    sequences: int
    tokens: int
    time: StepTime
    static: StepTime
    segments: int


def suite_names() -> tuple[str, ...]:
    """The suites that come with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def load_suite(name: str) -> Suite:
    """A suite by name; ``ValueError`` where there is none."""
    if name not in suite_names():
        raise ValueError(f"--suite: {shown(name)} is not known; write one of {', '.join(suite_names())}")
    return read_suite(_FOLDER / f"{name}.yaml")


def read_suite(path: Path) -> Suite:
    """Read a suite's file; ``ConfigError`` for what is not one."""
    document = read_document(path)
    if document is None:
        raise config_error(path, 1, "file", "holds no keys")
    top = _entries(document, "hardware", "contexts", "settings", "data")
    data = []
    for kind in top["data"].sequence():
        entry = _entries(kind, "name", "batches")
        batches = tuple(tuple(length.integer() for length in batch.sequence()) for batch in entry["batches"].sequence())
        if not batches or not all(batches):
            raise entry["batches"].error("holds no lengths; write at least one list of at least one")
        data.append((entry["name"].text() or "", batches))
    settings = []
    contexts = [context.integer() for context in top["contexts"].sequence()]
    for value in top["settings"].sequence():
        entry = _entries(value, "model", "gpus", "max_tp")
        model = entry["model"].choice(sorted(KNOWN_MODELS))
        settings += [
            Setting(
                model=model,
                gpus=entry["gpus"].integer(),
                context=context,
                max_tp=entry["max_tp"].integer(),
                data=name,
            )
            for context in contexts
            for name, _ in data
        ]
    return Suite(
        name=path.stem,
        hardware=load_hardware(top["hardware"].text() or ""),
        settings=tuple(settings),
        data=tuple(data),
    )


def run_suite(suite: Suite, *, jobs: int = 1, without: Lever | None = None) -> Iterator[Cell]:
    """Every setting's cell, in the suite's order, as they become ready; over ``jobs`` processes where more than one."""
    cell = functools.partial(run_cell, suite, without=without)
    if jobs == 1:
        yield from map(cell, suite.settings)
        return
    # Not fork: numpy may hold threads.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(cell, suite.settings)


def run_cell(suite: Suite, setting: Setting, *, without: Lever | None = None) -> Cell:
    """All systems in one setting; ``without``: what ours and the best static strategy have to do without."""
    batches = suite.batches(setting)
    shape = replace(KNOWN_MODELS[setting.model], seq_length=setting.context)
    planned = plan_batches(
        batches,
        shape=shape,
        hardware=suite.hardware,
        world_size=setting.gpus,
        max_tp=setting.max_tp,
        vpp=(1,) if without == "interleaving" else VIRTUAL_STAGES,
        beyond_longest=without != "long packing",
    )
    model = _with_tensor_parallelism(Models(shape, suite.hardware, setting.gpus))
    table = hotspa_table(setting.model, setting.gpus, setting.context)
    unpacked = tables = None
    if table is not None:
        _, tp, pp = table.strategies[0]
        home = Execution(strategy=Strategy.from_world(setting.gpus, tp=tp, cp=1, pp=pp))
        unpacked = one_sequence_each(model, home, batches)
        tables = hotspa_rules(model, table, batches)
    executions = legal_executions(shape, setting.gpus, max_tp=setting.max_tp)
    return Cell(
        model=setting.model,
        gpus=setting.gpus,
        context=setting.context,
        data=setting.data,
        tokens=sum(float(batch.sum()) for batch in batches) / len(batches),
        static_s=planned.static_time.total,
        static_first_fit_s=_finite(static_first_fit(model, executions, batches)),
        home_unpacked_s=unpacked,
        hotspa_s=planned.time.total,
        hotspa_tables_s=tables,
        hybrid_cp_s=_finite(hybrid_context(model, batches, max_tp=setting.max_tp, packed=False)),
        dynamic_cp_s=_finite(hybrid_context(model, batches, max_tp=setting.max_tp, packed=True)),
        ceiling_s=_ceiling(model, batches),
        switch_fraction=(planned.time.switch + planned.time.fold) / planned.time.total,
        static=str(planned.static.execution),
        groups=described(planned.groups),
    )


def simulate_run(
    planned: PlannedRun,
    histogram: LengthHistogram,
    *,
    shape: ModelShape,
    hardware: Hardware,
    steps: int,
    sequences_per_step: int,
    seed: int,
) -> Iterator[SimulatedStep]:
    """Steps of a run under a plan: sequences drawn from the corpus, each step planned as the run would plan it."""
    home = planned.home.execution.strategy
    world = home.world_size
    ours = RunModel(Models(shape, hardware, world).under(home), planned.groups)
    static = RunModel(Models(shape, hardware, world).under(planned.static.execution.strategy), (planned.static,))
    batches = _batches(histogram, shape, steps=steps, sequences_per_step=sequences_per_step, seed=seed)
    for step, batch in enumerate(batches):
        plan = ours.planner.plan(batch)
        yield SimulatedStep(
            step=step + 1,
            sequences=len(batch),
            tokens=int(batch.sum()),
            time=ours.time(plan),
            static=static.step(batch),
            segments=len(plan.segments),
        )


def other_systems(
    planned: PlannedRun,
    histogram: LengthHistogram,
    *,
    shape: ModelShape,
    hardware: Hardware,
    steps: int,
    sequences_per_step: int,
    seed: int,
    optimizer_bytes: int = ADAM_BYTES,
) -> OtherSystems:
    """What others would take for the steps of ``simulate_run`` with the same arguments."""
    home = planned.home.execution
    models = Models(shape, hardware, home.strategy.world_size, optimizer_bytes=optimizer_bytes)
    model = _with_tensor_parallelism(models)
    batches = list(_batches(histogram, shape, steps=steps, sequences_per_step=sequences_per_step, seed=seed))
    max_tp = min(hardware.gpus_per_node, home.strategy.world_size)
    return OtherSystems(
        home_unpacked_s=one_sequence_each(models.under(home.strategy), home, batches),
        hybrid_cp_s=_finite(hybrid_context(model, batches, max_tp=max_tp, packed=False)),
        dynamic_cp_s=_finite(hybrid_context(model, batches, max_tp=max_tp, packed=True)),
        ceiling_s=_ceiling(model, batches),
    )


def _batches(
    histogram: LengthHistogram, shape: ModelShape, *, steps: int, sequences_per_step: int, seed: int
) -> Iterator[Lengths]:
    """A run's mini-batches, drawn step by step."""
    fitting = histogram.limited(shape.seq_length, "split")
    for step in range(steps):
        yield fitting.sample(sequences_per_step, seed=seed + step)


def _with_tensor_parallelism(models: Models) -> CostModel:
    """The model for systems whose tp is not settled: one under which sequence parallelism, where given, is on."""
    world = models.world_size
    return models.under(Strategy.from_world(world, tp=min(2, world), cp=1, pp=1))


def _ceiling(model: CostModel, batches: Sequence[Lengths]) -> float:
    return sum(model.ceiling(batch) for batch in batches) / len(batches)


def described(groups: Sequence[GroupChoice]) -> tuple[str, ...]:
    """One line per length group."""
    return tuple(f"<={choice.max_length} {choice.execution}" for choice in groups)


def _entries(value: Value, *keys: str) -> dict[str, Value]:
    """The entries of a map that must have exactly these keys."""
    found = value.mapping(known=keys, refused={}, also={})
    if missing := [key for key in keys if key not in found]:
        raise value.error(f"has no {missing[0]}; add it")
    return found


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None
