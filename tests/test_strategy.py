"""Strategies against Megatron's own rank arithmetic, and pipeline stages as partitions of the layers."""

from __future__ import annotations

import ast
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_megatron.planning.alignment import Alignment, alignment_of
from hotspa_megatron.strategy import Coordinates, Kind, Strategy, layers_by_stage, listed, stage_layers

sizes = st.integers(1, 4)
any_strategy = st.builds(Strategy, tp=sizes, cp=sizes, pp=sizes, dp=sizes)
axis_sets = st.sampled_from(
    ["tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp", "tp-dp", "tp-dp-cp", "pp-tp", "tp-cp-dp-pp"]
)


@functools.cache
def megatron_rank_generator() -> Any:
    """Megatron's RankGenerator, taken out of its source: importing megatron.core needs triton and seconds."""
    root = importlib.util.find_spec("megatron")
    if root is None or not root.submodule_search_locations:
        pytest.skip("megatron-core is not installed")
    source = Path(next(iter(root.submodule_search_locations)), "core", "parallel_state.py").read_text()
    wanted = {"RankGenerator", "generate_masked_orthogonal_rank_groups"}
    body = [node for node in ast.parse(source).body if getattr(node, "name", None) in wanted]
    assert len(body) == len(wanted)
    names: dict[str, Any] = {"List": list}
    exec(compile(ast.Module(body=body, type_ignores=[]), "parallel_state.py", "exec"), names)
    return names["RankGenerator"]


def test_prints_and_parses() -> None:
    strategy = Strategy(tp=4, cp=1, pp=2, dp=3)
    assert str(strategy) == "tp4-cp1-pp2-dp3"
    assert Strategy.parse("tp4-cp1-pp2-dp3") == strategy
    assert (strategy.world_size, strategy.replica_size) == (24, 8)


@settings(deadline=None)
@given(any_strategy)
def test_parse_reads_what_str_prints(strategy: Strategy) -> None:
    assert Strategy.parse(str(strategy)) == strategy


@pytest.mark.parametrize(
    "text",
    ["", "tp4", "tp4-cp1-pp2-dp0", "tp04-cp1-pp2-dp1", "tp4-cp1-pp2-dp1 ", "tp4-pp2-cp1-dp1", "tp4-cp1-pp2-dp\u0661"],
)
def test_parse_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a strategy; write it like tp4-cp1-pp2-dp1"):
        Strategy.parse(text)


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "2", None])
@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "dp"])
def test_sizes_are_whole_numbers_of_at_least_1(axis: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=f"^{axis} must be a whole number of at least 1, not "):
        Strategy(**{**dict.fromkeys(("tp", "cp", "pp", "dp"), 1), axis: bad})


def test_from_world_gives_the_rest_to_dp() -> None:
    assert Strategy.from_world(16, tp=2, cp=2, pp=1) == Strategy(tp=2, cp=2, pp=1, dp=4)


@pytest.mark.parametrize(("world_size", "tp", "cp", "pp"), [(8, 7, 1, 1), (8, 16, 1, 1), (8, 2, 3, 1), (0, 1, 1, 1)])
def test_from_world_names_the_values_that_do_not_fill_it(world_size: int, tp: int, cp: int, pp: int) -> None:
    with pytest.raises(
        ValueError, match=rf"world of {world_size} ranks .* tp {tp} \* cp {cp} \* pp {pp} = {tp * cp * pp}"
    ):
        Strategy.from_world(world_size, tp=tp, cp=cp, pp=pp)


def test_ranks_follow_megatrons_default_order() -> None:
    strategy = Strategy(tp=2, cp=3, pp=2, dp=2)
    assert strategy.coordinates(13) == Coordinates(tp=1, cp=0, dp=0, pp=1)
    assert strategy.coordinates(8) == Coordinates(tp=0, cp=1, dp=1, pp=0)
    with pytest.raises(ValueError, match="rank 24 is outside the 24 ranks of tp2-cp3-pp2-dp2"):
        strategy.coordinates(24)
    with pytest.raises(ValueError, match="cp coordinate 3 is outside"):
        strategy.rank(tp=0, cp=3, dp=0, pp=0)


@settings(deadline=None)
@given(any_strategy)
def test_coordinates_and_rank_are_inverse(strategy: Strategy) -> None:
    for rank in range(strategy.world_size):
        at = strategy.coordinates(rank)
        assert strategy.rank(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank


def test_groups_by_hand() -> None:
    strategy = Strategy(tp=2, cp=1, pp=2, dp=2)
    assert strategy.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert strategy.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert strategy.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert strategy.groups("tp-pp") == strategy.groups("pp-tp") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert Strategy(tp=1, cp=2, pp=1, dp=2).groups("dp-cp") == ((0, 1, 2, 3),)


@settings(deadline=None)
@given(any_strategy, axis_sets)
def test_groups_are_megatrons(strategy: Strategy, axes: str) -> None:
    generator = megatron_rank_generator()(
        tp=strategy.tp, ep=1, dp=strategy.dp, pp=strategy.pp, cp=strategy.cp, order="tp-cp-ep-dp-pp"
    )
    assert [list(group) for group in strategy.groups(axes)] == generator.get_ranks(axes)


@settings(deadline=None)
@given(any_strategy, axis_sets)
def test_groups_partition_the_world(strategy: Strategy, axes: str) -> None:
    ranks = [rank for group in strategy.groups(axes) for rank in group]
    assert sorted(ranks) == list(range(strategy.world_size))


@pytest.mark.parametrize("axes", ["", "ep", "tp-", "tp-tp", "TP", "tp,pp"])
def test_groups_refuse_other_axes(axes: str) -> None:
    with pytest.raises(ValueError, match="does not name axes; join some of tp, cp, dp, pp with '-'"):
        Strategy(tp=2, cp=1, pp=1, dp=1).groups(axes)


def test_kinds() -> None:
    home = Strategy(tp=2, cp=2, pp=2, dp=1)
    assert home.kind(home) is Kind.HOME
    assert Strategy(tp=2, cp=1, pp=2, dp=2).kind(home) is Kind.SIBLING
    assert Strategy(tp=1, cp=2, pp=2, dp=2).kind(home) is Kind.GUEST
    assert Strategy(tp=2, cp=2, pp=1, dp=2).kind(home) is Kind.GUEST
    # Virtual stages place layers elsewhere.
    assert Strategy(tp=2, cp=1, pp=2, dp=2, vpp=2).kind(home) is Kind.GUEST
    assert f"{Kind.SIBLING}" == "sibling"


@settings(deadline=None)
@given(any_strategy, any_strategy)
def test_same_layout_puts_the_same_parameters_on_every_rank(one: Strategy, other: Strategy) -> None:
    if one.world_size != other.world_size:
        assert not one.same_layout(other)
        return
    alike = all(
        (one.coordinates(rank).tp, one.coordinates(rank).pp) == (other.coordinates(rank).tp, other.coordinates(rank).pp)
        for rank in range(one.world_size)
    ) and (one.tp, one.pp) == (other.tp, other.pp)
    assert one.same_layout(other) == alike


def test_virtual_stages() -> None:
    at = Strategy.from_world(8, tp=1, cp=1, pp=2, vpp=3)
    assert str(at) == "tp1-cp1-pp2-dp4-vpp3" and Strategy.parse(str(at)) == at
    assert layers_by_stage(stage_layers(12, 6), 2) == ((0, 1, 4, 5, 8, 9), (2, 3, 6, 7, 10, 11))
    assert layers_by_stage(stage_layers(6, 2), 2) == ((0, 1, 2), (3, 4, 5))
    with pytest.raises(ValueError, match="vpp 2 at pp 1: virtual stages need a pipeline"):
        Strategy(tp=1, cp=1, pp=1, dp=1, vpp=2)


def test_strategies_sort_and_hash() -> None:
    one, two = Strategy(tp=1, cp=1, pp=1, dp=4), Strategy(tp=2, cp=1, pp=1, dp=2)
    assert sorted([two, one]) == [one, two]
    assert len({one, two, Strategy.parse(str(one))}) == 2


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        ((8, 1, None, None), [8]),
        ((8, 4, None, None), [2, 2, 2, 2]),
        ((14, 4, 2, None), [2, 4, 4, 4]),
        ((14, 4, None, 2), [4, 4, 4, 2]),
        ((10, 4, 1, 3), [1, 3, 3, 3]),
        ((10, 2, 4, 6), [4, 6]),
        ((10, 2, 4, None), [4, 6]),
    ],
)
def test_stage_layers(arguments: tuple[int, int, int | None, int | None], counts: list[int]) -> None:
    assert [len(stage) for stage in stage_layers(*arguments)] == counts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((30, 4, None, None), "30 layers do not divide over pp 4 stages; legal pp: 1, 2, 3, 5, 6, 10, 15, 30"),
        ((5, 8, None, None), "5 layers do not divide over pp 8 stages; legal pp: 1, 5"),
        ((20, 1, None, 1), "have no meaning at pp 1; remove them"),
        ((20, 1, 20, None), "have no meaning at pp 1; remove them"),
        ((14, 4, 3, None), "legal --decoder-first-pipeline-num-layers: 2, 5, 8, 11"),
        ((10, 2, 4, 5), "legal --decoder-last-pipeline-num-layers: 6"),
        ((14, 4, 0, None), "pp 4 stages with --decoder-first-pipeline-num-layers 0;"),
        ((4, 4, None, 4), "legal --decoder-last-pipeline-num-layers: 1"),
        ((2, 4, 1, None), "legal --decoder-first-pipeline-num-layers: none"),
        ((0, 1, None, None), "both must be at least 1"),
    ],
)
def test_stage_layers_lists_the_legal_values(arguments: tuple[int, int, int | None, int | None], message: str) -> None:
    with pytest.raises(ValueError) as error:
        stage_layers(*arguments)
    assert message in str(error.value)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 8), st.none() | st.integers(0, 12), st.none() | st.integers(0, 12))
def test_stages_partition_the_layers_or_are_refused(
    num_layers: int, pp: int, first: int | None, last: int | None
) -> None:
    try:
        stages = stage_layers(num_layers, pp, first, last)
    except ValueError:
        return
    assert len(stages) == pp and all(stages)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert first is None or len(stages[0]) == first
    assert last is None or len(stages[-1]) == last
    middle = stages[first is not None : pp - (last is not None)]
    assert len({len(stage) for stage in middle}) <= 1


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(2, 6), st.integers(1, 30))
def test_legal_values_in_the_message_are_exactly_the_legal_ones(num_layers: int, pp: int, first: int) -> None:
    def fits(value: int) -> bool:
        try:
            stage_layers(num_layers, pp, value)
        except ValueError:
            return False
        return True

    if fits(first):
        return
    with pytest.raises(ValueError) as error:
        stage_layers(num_layers, pp, first)
    legal = listed(value for value in range(1, num_layers + 1) if fits(value))
    assert str(error.value).endswith(f"legal --decoder-first-pipeline-num-layers: {legal}")


def test_long_lists_are_cut() -> None:
    assert listed([]) == "none"
    assert listed(range(100)).endswith("14, 15, ...")


@pytest.mark.parametrize(
    ("strategy", "sequence_parallel", "expected"),
    [
        ("tp1-cp1-pp1-dp1", False, Alignment(sequence=1, total=1)),
        ("tp4-cp1-pp2-dp1", False, Alignment(sequence=1, total=1)),
        ("tp4-cp1-pp2-dp1", True, Alignment(sequence=1, total=4)),
        ("tp1-cp3-pp1-dp1", True, Alignment(sequence=6, total=6)),
        ("tp2-cp2-pp1-dp1", True, Alignment(sequence=4, total=4)),
        ("tp3-cp2-pp1-dp1", True, Alignment(sequence=4, total=12)),
        ("tp8-cp2-pp1-dp1", True, Alignment(sequence=4, total=16)),
        ("tp8-cp2-pp1-dp1", False, Alignment(sequence=4, total=4)),
    ],
)
def test_alignment(strategy: str, sequence_parallel: bool, expected: Alignment) -> None:
    assert alignment_of(Strategy.parse(strategy), sequence_parallel=sequence_parallel) == expected


@settings(deadline=None)
@given(any_strategy, st.booleans(), st.integers(1, 300), st.sampled_from([1, 16, 32]))
def test_what_a_rank_holds_is_of_the_multiple_that_products_ask_for(
    strategy: Strategy, sequence_parallel: bool, length: int, multiple: int
) -> None:
    aligned = alignment_of(strategy, sequence_parallel=sequence_parallel, token_multiple=multiple)
    ranks = strategy.cp * (strategy.tp if sequence_parallel else 1)
    assert (
        aligned.alone(length) % (ranks * multiple) == 0
        and aligned.sequence == alignment_of(strategy, sequence_parallel=sequence_parallel).sequence
    )


@settings(deadline=None)
@given(any_strategy, st.booleans(), st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_aligned_micro_batches_split_evenly(strategy: Strategy, sequence_parallel: bool, lengths: list[int]) -> None:
    alignment = alignment_of(strategy, sequence_parallel=sequence_parallel)
    padded = [alignment.pad_sequence(length) for length in lengths]
    total = alignment.pad_total(sum(padded))
    assert total >= sum(padded) >= sum(lengths)
    assert total - sum(padded) < alignment.total
    assert strategy.cp == 1 or all(length % (2 * strategy.cp) == 0 for length in padded)
    # The last sequence takes the padding of the total and must still cut into halves.
    assert (padded[-1] + total - sum(padded)) % alignment.sequence == 0
    per_cp_rank, rest = divmod(total, strategy.cp)
    assert rest == 0 and (not sequence_parallel or per_cp_rank % strategy.tp == 0)
    assert alignment.alone(lengths[0]) == alignment.pad_total(padded[0])


def test_alignment_refuses_a_total_that_breaks_sequences() -> None:
    with pytest.raises(ValueError, match="total 6 must be a multiple of sequence 4"):
        Alignment(sequence=4, total=6)


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        (
            "hotspa_megatron.strategy, hotspa_megatron.config, hotspa_megatron.planning.alignment",
            "torch megatron numpy",
        ),
        ("hotspa_megatron.cli.main", "torch megatron matplotlib"),
    ],
)
def test_imports_without_what_takes_long(modules: str, without: str) -> None:
    code = f"import {modules}, sys; print(sorted(set('{without}'.split()) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
