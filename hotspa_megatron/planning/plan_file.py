"""A chosen plan as a configuration file: what ``hotspa plan`` writes, and what a job writes that plans for itself."""

from __future__ import annotations

from collections.abc import Sequence

from hotspa_megatron.planning.execution import Execution, Recompute
from hotspa_megatron.planning.memory_model import GIB, Held
from hotspa_megatron.planning.search import PlannedRun
from hotspa_megatron.planning.step_time import GroupChoice
from hotspa_megatron.strict_yaml import one_line


def as_yaml(planned: PlannedRun, *, num_layers: int, given: Recompute, head: Sequence[str]) -> str:
    """The file's text; ``head`` becomes comments before all else.

    ``given``: what the command line recomputes. Where that is selective, strategies that recompute no layer do so, too.
    """
    static = planned.static.execution
    lines = [
        *(f"# {one_line(line)}" for line in head),  # a file's name in it may hold anything
        f"# Modelled, not measured: {planned.time.total:.3f} s per step, {planned.gain:.2f} times as fast as the best static",
        f"# strategy with the same packing ({static}, {planned.static_time.total:.3f} s).",
    ]
    if len(planned.groups) == 1:
        lines += ["# One strategy for all lengths is fastest here.", "strategies: []"]
    else:
        lines.append("strategies:")
    for choice, held in zip(planned.groups[:-1], planned.held, strict=False):
        strategy = choice.execution.strategy
        again = recompute_of(choice.execution, num_layers=num_layers, selective=given.granularity == "selective")
        lines += [
            f"  - max_length: {choice.max_length}  # {kind_of(choice, planned)} {choice.execution}, {_memory(held)}",
            f"    tp: {strategy.tp}",
            f"    cp: {strategy.cp}",
            f"    pp: {strategy.pp}",
            *([f"    vpp: {strategy.vpp}"] if strategy.pp > 1 else []),
            *_recompute_lines(again, indent=4),
            f"    tokens_per_microbatch: {choice.tokens_per_microbatch}",
        ]
    home = planned.home.execution.strategy
    lines += [
        f"home:  # the command line's own sizes: {planned.home.execution}, {_memory(planned.held[-1])}",
        f"  tp: {home.tp}",
        f"  cp: {home.cp}",
        f"  pp: {home.pp}",
        *([f"  vpp: {home.vpp}"] if home.pp > 1 else []),
        *_recompute_lines(home_recompute_of(planned.home.execution, num_layers=num_layers, given=given), indent=2),
        f"  tokens_per_microbatch: {planned.home.tokens_per_microbatch}",
    ]
    return "\n".join(lines) + "\n"


def home_recompute_of(execution: Execution, *, num_layers: int, given: Recompute) -> Recompute:
    """What home recomputes: to the word what the command line says, where that is the share that was chosen."""
    strategy = execution.strategy
    if given.share(num_layers / (strategy.pp * strategy.vpp)) == execution.recompute:
        return given
    return recompute_of(execution, num_layers=num_layers, selective=False)


def recompute_of(execution: Execution, *, num_layers: int, selective: bool) -> Recompute:
    """What the execution recomputes, in Megatron's terms; the command line's selective recomputation stays where it was."""
    if execution.recompute == 0 and selective:
        return Recompute(granularity="selective")
    strategy = execution.strategy
    # Of uneven stages the fullest: the others then recompute no smaller share.
    return Recompute.of_share(execution.recompute, -(-num_layers // (strategy.pp * strategy.vpp)))


def _recompute_lines(recompute: Recompute, *, indent: int) -> list[str]:
    lines = [f"recompute: {recompute.granularity}"]
    if recompute.layers is not None:
        lines.append(f"recompute_layers: {recompute.layers}")
    return [" " * indent + line for line in lines]


def kind_of(choice: GroupChoice, planned: PlannedRun) -> str:
    """home, sibling or guest."""
    if choice is planned.home:
        return "home"
    own = choice.execution.strategy.same_layout(planned.home.execution.strategy)
    return "sibling" if own else "guest"


def _memory(held: Held) -> str:
    return f"{held.total / GIB:.1f} of {held.limit / GIB:.1f} GiB on the fullest rank"
