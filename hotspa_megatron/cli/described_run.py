"""What ``plan`` and ``simulate`` are told about a run: model, cluster, lengths; read alike by both."""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hotspa_megatron.cli.megatron_args import MegatronCommandLine, read_command_line
from hotspa_megatron.cli.run_script import arguments_of_script
from hotspa_megatron.planning.execution import RECOMPUTE_SHARES, VIRTUAL_STAGES, Execution, Recompute
from hotspa_megatron.planning.hardware import Hardware, hardware_names, load_hardware
from hotspa_megatron.planning.home_flags import RECOMPUTE_ACTIVATIONS, FlagChange, change_of_home
from hotspa_megatron.planning.lengths import LengthHistogram
from hotspa_megatron.planning.memory_model import ADAM_BYTES
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.planning.search import PlannedRun, plan_strategies
from hotspa_megatron.strategy import Strategy
from hotspa_megatron.strict_yaml import LARGEST_INTEGER, read_document, shown

_FLAGS_FILE: Final = Path(__file__).with_name("megatron_flags.yaml")
_WORLD_SIZE_VARIABLES: Final = ("WORLD_SIZE", "SLURM_NTASKS")
_OURS: Final = "--hotspa-config"
MOST_COUNTED: Final = 1 << 20
"""Sequences of a step that are drawn one by one, and steps of a simulation."""


@dataclass(frozen=True, kw_only=True)
class DescribedRun:
    """A run as it is before anything is planned for it."""

    arguments: tuple[str, ...]
    line: MegatronCommandLine
    hardware: Hardware
    world_size: int
    histogram: LengthHistogram
    lengths_from: str
    sequences_per_step: int
    stock_tokens_per_step: int
    """Of samples of stock Megatron's, which are all --seq-length long."""
    given: Recompute
    """What the command line recomputes."""

    @property
    def shape(self) -> ModelShape:
        """The model as planning takes it: Megatron turns sequence parallelism off at tp 1, which another home may not have."""
        return replace(self.line.shape, sequence_parallel="--sequence-parallel" in self.arguments)

    @property
    def optimizer_bytes(self) -> int:
        """Per parameter; as for Adam with fp32 state where the optimizer's is not known."""
        return ADAM_BYTES if self.line.optimizer_bytes is None else self.line.optimizer_bytes

    @property
    def recompute(self) -> float:
        """The share of layers that the command line recomputes in full."""
        return self.given.share(self.line.shape.num_layers / (self.line.home.pp * self.line.home.vpp))

    @property
    def home(self) -> Execution:
        """What the command line itself would run."""
        return Execution(strategy=self.line.home, recompute=self.recompute)

    def plan(self, *, keep_home: bool = False, max_tp: int | None = None, max_cp: int | None = None) -> PlannedRun:
        """What ``plan_strategies`` chooses for the run, with all that a strategy may have of its own."""
        return plan_strategies(
            self.histogram,
            shape=self.shape,
            hardware=self.hardware,
            world_size=self.world_size,
            sequences_per_step=self.sequences_per_step,
            home=self.line.home if keep_home else None,
            recompute=sorted({*RECOMPUTE_SHARES, self.recompute}),
            vpp=VIRTUAL_STAGES,
            max_tp=max_tp,
            max_cp=max_cp,
            optimizer_bytes=self.optimizer_bytes,
        )

    def change_to(self, home: Strategy, recompute: Recompute | None) -> FlagChange:
        """What to change on the command line for this home; ``recompute`` None leaves that as it is."""
        sizes = {axis: getattr(home, axis) for axis in ("tp", "cp", "pp", "vpp")}
        there = {argument.split("=", 1)[0] for argument in self.arguments}
        return change_of_home(sizes, recompute, now=self.line.home, now_recompute=self.given, given=there)


def add_options(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """The options that describe a run; where they are not required, ``require`` asks for them later."""
    parser.add_argument(
        "--from-script", metavar="FILE", help="take Megatron's arguments from the script that starts the job"
    )
    cluster = parser.add_mutually_exclusive_group(required=required)
    cluster.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help=f"the cluster: {', '.join(hardware_names())}, or a .yaml file in their form",
    )
    cluster.add_argument("--profile", dest="hardware", metavar="FILE", help="the cluster as hotspa profile measured it")
    parser.add_argument("--world-size", metavar="N", help="ranks (default: WORLD_SIZE, else SLURM_NTASKS)")
    lengths = parser.add_mutually_exclusive_group(required=required)
    lengths.add_argument("--corpus", metavar="PREFIX", help="lengths of the documents of PREFIX.idx")
    lengths.add_argument(
        "--lengths",
        metavar="WHAT",
        help="those of a file of one length per line, of PREFIX, wikipedia, or lognormal:mean=M,sigma=S,max=N",
    )
    parser.add_argument("--sequences", metavar="N", help="sequences per step (default: Megatron's --global-batch-size)")


def require(options: argparse.Namespace) -> None:
    """Refuse a run without cluster or lengths."""
    if options.hardware is None:
        raise ValueError(f"--hardware: missing; give one of {', '.join(hardware_names())}, or a .yaml file")
    if options.corpus is None and options.lengths is None:
        raise ValueError("--corpus: missing; give it or --lengths, so that there are sequences to plan for")


def read_run(options: argparse.Namespace, megatron_arguments: Sequence[str]) -> DescribedRun:
    """Read everything that was given; ``ValueError`` in one line for what is wrong or missing."""
    hardware = load_hardware(options.hardware)
    if options.from_script is not None and megatron_arguments:
        raise ValueError("--from-script: given together with arguments behind --; give one of them")
    arguments = arguments_of_script(options.from_script) if options.from_script else list(megatron_arguments)
    if not arguments:
        raise ValueError("Megatron's arguments are missing; add them behind --, or give --from-script")
    arguments = without(arguments, {_OURS: 1})
    check_flags(arguments)
    world_size = world_size_of(options.world_size)
    if world_size is None:
        raise ValueError("--world-size: missing; give the number of ranks, as the launcher has not set WORLD_SIZE")
    line = read_command_line(arguments, world_size=world_size)
    histogram, source = _histogram(options)
    batch = whole_of(arguments, "--global-batch-size", most=MOST_COUNTED)
    sequences = whole("--sequences", options.sequences, most=MOST_COUNTED) if options.sequences else batch
    if sequences is None:
        raise ValueError("--sequences: missing, and the command line has no --global-batch-size; give one of them")
    return DescribedRun(
        arguments=tuple(arguments),
        line=line,
        hardware=hardware,
        world_size=world_size,
        histogram=histogram,
        lengths_from=source,
        sequences_per_step=sequences,
        stock_tokens_per_step=(batch or sequences) * line.shape.seq_length,
        given=recompute_of(arguments),
    )


def check_flags(arguments: Sequence[str]) -> None:
    """Refuse a flag that neither Megatron's own parser nor this package has."""
    known = _known_flags() | {_OURS}
    for argument in arguments:
        flag = argument.split("=", 1)[0]
        if flag.startswith("--") and flag not in known:
            near = difflib.get_close_matches(flag, sorted(known), n=1)
            fix = f"did you mean {near[0]}?" if near else "remove it here if your own script adds it"
            raise ValueError(f"command line: {flag}: not an argument of Megatron's; {fix}")


@functools.cache
def _known_flags() -> frozenset[str]:
    document = read_document(_FLAGS_FILE)
    assert document is not None
    return frozenset(flag.text() or "" for flag in document.sequence())


def changed(arguments: Sequence[str], change: FlagChange) -> list[str]:
    """The command line as it is once the change is made."""
    return [*without(arguments, {flag: flag != RECOMPUTE_ACTIVATIONS for flag in change.remove}), *change.give]


def without(command: Sequence[str], flags: Mapping[str, int]) -> list[str]:
    """The command without these flags and as many values as each has, written --flag value or --flag=value."""
    kept, skip = [], 0
    for word in command:
        flag, given, _ = word.partition("=")
        if flag in flags:
            skip = 0 if given else flags[flag]
        elif skip:
            skip -= 1
        else:
            kept.append(word)
    return kept


def whole_of(arguments: Sequence[str], flag: str, *, most: int = LARGEST_INTEGER) -> int | None:
    """The whole number given for a flag, the last one as argparse takes it."""
    found = None
    for argument, after in zip(arguments, [*arguments[1:], None], strict=True):
        if argument == flag:
            found = whole(flag, after or "", most=most)
        elif argument.startswith(f"{flag}="):
            found = whole(flag, argument.split("=", 1)[1], most=most)
    return found


def recompute_of(arguments: Sequence[str]) -> Recompute:
    """What the command line recomputes, under any strategy."""
    if RECOMPUTE_ACTIVATIONS in arguments:
        return Recompute(granularity="selective")
    return Recompute.of_flags(
        word_of(arguments, "--recompute-granularity"),
        word_of(arguments, "--recompute-method"),
        whole_of(arguments, "--recompute-num-layers"),
    )


def word_of(arguments: Sequence[str], flag: str) -> str | None:
    """The word given for a flag, the last one as argparse takes it."""
    found = None
    for argument, after in zip(arguments, [*arguments[1:], None], strict=True):
        if argument == flag:
            found = after
        elif argument.startswith(f"{flag}="):
            found = argument.split("=", 1)[1]
    return found


def world_size_of(given: str | None) -> int | None:
    """The number of ranks that was asked for, else the launcher's; None where neither says."""
    texts = {"--world-size": given, **{name: os.environ.get(name) or None for name in _WORLD_SIZE_VARIABLES}}
    return next((whole(name, text) for name, text in texts.items() if text is not None), None)


def whole(name: str, text: str, *, most: int = LARGEST_INTEGER) -> int:
    """A whole number from 1 to ``most`` as the user wrote it."""
    if not re.fullmatch("[1-9][0-9]*", text):
        raise ValueError(f"{name}: {shown(text)} is not a whole number of at least 1")
    if len(text) > len(str(most)) or int(text) > most:
        raise ValueError(f"{name}: {shown(text)} is too large; write at most {most}")
    return int(text)


def _histogram(options: argparse.Namespace) -> tuple[LengthHistogram, str]:
    if options.corpus is not None:
        return LengthHistogram.from_index(options.corpus), f"the documents of {options.corpus}"
    if options.lengths == "wikipedia":
        return LengthHistogram.wikipedia(), "English Wikipedia"
    try:
        return LengthHistogram.named(options.lengths), f"the lengths of {options.lengths}"
    except ValueError as error:
        raise ValueError(f"--lengths: {error}") from None
