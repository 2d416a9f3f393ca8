"""Packing: every sequence once, the budget strict, ranks balanced, the same in every process."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hotspa_megatron.cli.main import main
from hotspa_megatron.planning.alignment import Alignment
from hotspa_megatron.planning.lengths import LengthHistogram
from hotspa_megatron.planning.packing import LARGEST_MICRO_BATCH, MicroBatches, lower_bound, pack

PLAIN = Alignment(sequence=1, total=1)
ALIGNMENTS = [PLAIN, Alignment(sequence=4, total=4), Alignment(sequence=4, total=8), Alignment(sequence=1, total=2)]
alignments = st.sampled_from(ALIGNMENTS)
lengths_of_any_size = st.lists(st.integers(1, 300), max_size=60)


def quadratic(length: int) -> float:
    """A 7B model's forward and backward: 4e10 operations per token, 8e5 per squared token of causal attention."""
    return 4e10 * length + 8e5 * length**2


def scattered(length: int) -> float:
    """Says nothing about the tokens, so that balance and budget pull in different directions."""
    return float(length * 7919 % 101)


COSTS: list[Callable[[int], float]] = [
    float,
    quadratic,
    lambda n: float(n) ** 4,
    lambda n: 1 / n,
    lambda n: 1.0,
    scattered,
]
costs_of_any_kind = st.sampled_from(COSTS)


def roomy(lengths: Sequence[int], slack: int, alignment: Alignment) -> int:
    """A budget that every sequence fits, ``slack`` tokens above the least."""
    return max([alignment.alone(n) for n in lengths], default=1) + slack


def every_batch(packed: Sequence[MicroBatches]) -> list[tuple[int, ...]]:
    return [batch for rank in packed for batch in rank]


def check(packed: Sequence[MicroBatches], lengths: Sequence[int], *, budget: int, alignment: Alignment) -> None:
    """Each sequence exactly once, no micro-batch above the budget."""
    assert sorted(i for batch in every_batch(packed) for i in batch) == list(range(len(lengths)))
    for batch in every_batch(packed):
        assert list(batch) == sorted(batch)
        assert alignment.pad_total(sum(alignment.pad_sequence(lengths[i]) for i in batch)) <= budget


def busy(packed: Sequence[MicroBatches], lengths: Sequence[int], cost: Callable[[int], float]) -> list[float]:
    return [sum(cost(lengths[i]) for batch in rank for i in batch) for rank in packed]


# ---------------------------------------------------------------------------------------------------------- guarantees


@settings(max_examples=400, deadline=None)
@given(
    lengths=lengths_of_any_size,
    slack=st.integers(0, 500),
    dp=st.integers(1, 5),
    alignment=alignments,
    cost=costs_of_any_kind,
)
def test_every_sequence_is_packed_once_and_no_micro_batch_exceeds_the_budget(
    lengths: list[int], slack: int, dp: int, alignment: Alignment, cost: Callable[[int], float]
) -> None:
    budget = roomy(lengths, slack, alignment)
    packed = pack(lengths, budget=budget, dp=dp, alignment=alignment, cost=cost)
    assert len(packed) == dp
    assert all(every_batch(packed))
    check(packed, lengths, budget=budget, alignment=alignment)


@settings(max_examples=200, deadline=None)
@given(
    lengths=lengths_of_any_size,
    slack=st.integers(0, 500),
    dp=st.integers(1, 5),
    alignment=alignments,
    multiple_of=st.integers(1, 5),
    at_least=st.integers(1, 9),
    equal_counts=st.booleans(),
    equal_shapes=st.booleans(),
    cost=costs_of_any_kind,
)
def test_counts_are_what_a_schedule_asks_for_and_nothing_is_dropped_for_that(
    lengths: list[int],
    slack: int,
    dp: int,
    alignment: Alignment,
    multiple_of: int,
    at_least: int,
    equal_counts: bool,
    equal_shapes: bool,
    cost: Callable[[int], float],
) -> None:
    budget = roomy(lengths, slack, alignment)
    packed = pack(
        lengths,
        budget=budget,
        dp=dp,
        alignment=alignment,
        cost=cost,
        multiple_of=multiple_of,
        at_least=at_least,
        equal_counts=equal_counts,
        equal_shapes=equal_shapes,
    )
    check(packed, lengths, budget=budget, alignment=alignment)
    counts = [len(rank) for rank in packed]
    assert all(count % multiple_of == 0 for count in counts)
    assert not equal_counts or len(set(counts)) == 1
    for rank in packed:
        real = [batch for batch in rank if batch]
        assert rank[: len(real)] == tuple(real)  # fillers come last
        sequences = sum(map(len, real))
        assert len(real) >= min(at_least, sequences)
        # A filler stands only where no micro-batch is left to split.
        assert len(real) == min(len(rank), sequences)


@settings(max_examples=200, deadline=None)
@given(
    lengths=lengths_of_any_size,
    slack=st.integers(0, 300),
    dp=st.integers(1, 5),
    cost=costs_of_any_kind,
    order=st.randoms(),
)
def test_the_order_of_the_sequences_does_not_change_the_cost(
    lengths: list[int], slack: int, dp: int, cost: Callable[[int], float], order: random.Random
) -> None:
    budget = roomy(lengths, slack, PLAIN)
    shuffled = list(lengths)
    order.shuffle(shuffled)

    def shape(given: list[int]) -> list[list[list[int]]]:
        packed = pack(given, budget=budget, dp=dp, alignment=PLAIN, cost=cost)
        return [[sorted(given[i] for i in batch) for batch in rank] for rank in packed]

    assert shape(lengths) == shape(shuffled)


IN_ANOTHER_PROCESS = """
import json, sys
from hotspa_megatron.planning.alignment import Alignment
from hotspa_megatron.planning.packing import pack
lengths = json.loads(sys.stdin.read())
packed = pack(lengths, budget=4096, dp=7, alignment=Alignment(sequence=4, total=8), cost=lambda n: n + n * n / 5e4)
print(json.dumps(packed))
"""


def test_processes_with_other_hash_seeds_pack_alike() -> None:
    lengths = LengthHistogram.wikipedia().limited(4096).sample(200, seed=3).tolist()
    texts = {
        subprocess.run(
            [sys.executable, "-c", IN_ANOTHER_PROCESS],
            input=json.dumps(lengths),
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(texts) == 1
    assert json.loads(texts.pop()) == [
        [list(batch) for batch in rank]
        for rank in pack(
            lengths,
            budget=4096,
            dp=7,
            alignment=Alignment(sequence=4, total=8),
            cost=lambda n: n + n * n / 5e4,
        )
    ]


# --------------------------------------------------------------------------------------------------------- known traps


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize(
    ("lengths", "budget"),
    [([7] * 8, 8), ([8] * 3, 8), ([5, 4, 4, 4, 3], 8), ([1] * 17, 8), ([30720] * 16, 32768)],
)
def test_the_budget_is_strict_where_a_count_by_total_tokens_is_too_low(
    lengths: list[int], budget: int, dp: int, cost: Callable[[int], float]
) -> None:
    check(pack(lengths, budget=budget, dp=dp, alignment=PLAIN, cost=cost), lengths, budget=budget, alignment=PLAIN)


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=20, max_size=60),
    batches=st.integers(2, 3),
    slack=st.integers(0, 12),
    cost=costs_of_any_kind,
)
def test_the_budget_is_strict_where_many_sequences_fill_few_micro_batches_to_the_brim(
    lengths: list[int], batches: int, slack: int, cost: Callable[[int], float]
) -> None:
    budget = -(-sum(lengths) // batches) + slack
    check(pack(lengths, budget=budget, dp=1, alignment=PLAIN, cost=cost), lengths, budget=budget, alignment=PLAIN)


def test_the_check_of_the_budget_can_fail() -> None:
    lengths = [7] * 8
    with pytest.raises(AssertionError):
        check((((0, 1), (2, 3)), ((4, 5), (6, 7))), lengths, budget=8, alignment=PLAIN)
    with pytest.raises(AssertionError):
        check(pack(lengths, budget=14, dp=1, alignment=PLAIN), lengths, budget=8, alignment=PLAIN)
    with pytest.raises(AssertionError):  # raw lengths fit, padded ones do not
        check((((0, 1),),), [3, 3], budget=7, alignment=Alignment(sequence=4, total=4))


@pytest.mark.parametrize(("pp", "vpp"), list(itertools.product([1, 2, 4], [1, 2, 4])))
@pytest.mark.parametrize("packs", range(1, 21))
def test_an_interleaved_schedule_gets_a_legal_number_of_micro_batches(packs: int, pp: int, vpp: int) -> None:
    """Interleaved (vpp > 1), Megatron takes multiples of pp; otherwise any number of at least one."""
    multiple = pp if vpp > 1 else 1
    (rank,) = pack([8] * packs, budget=8, dp=1, alignment=PLAIN, multiple_of=multiple)
    assert len(rank) == -(-packs // multiple) * multiple
    assert sum(map(len, rank)) == packs


def test_micro_batches_are_split_before_fillers_are_added() -> None:
    # Five sequences in two micro-batches of room 100 become four micro-batches, none of them empty.
    (rank,) = pack([30, 30, 30, 30, 30], budget=100, dp=1, alignment=PLAIN, multiple_of=4)
    assert sorted(map(len, rank)) == [1, 1, 1, 2]
    (rank,) = pack([30, 30, 30], budget=100, dp=1, alignment=PLAIN, multiple_of=4)
    assert [len(batch) for batch in rank] == [1, 1, 1, 0]
    # An idle rank has nothing to run, which is a multiple of anything.
    assert pack([30], budget=100, dp=2, alignment=PLAIN, multiple_of=4)[1] == ()
    assert pack([30], budget=100, dp=2, alignment=PLAIN, multiple_of=4, equal_counts=True)[1] == ((),) * 4


def test_work_is_spread_over_ranks_before_it_is_piled_up() -> None:
    packed = pack([10] * 8, budget=1000, dp=4, alignment=PLAIN)
    assert [sum(len(batch) for batch in rank) for rank in packed] == [2, 2, 2, 2]


def test_micro_batches_that_are_padded_alike_are_balanced_by_tokens() -> None:
    """One long sequence and many short ones: equal costs need unequal tokens, which padding would make up for."""
    lengths = [3000, *[100] * 40]

    def tokens(packed: Sequence[MicroBatches]) -> list[int]:
        return sorted(sum(lengths[i] for i in batch) for batch in packed[0])

    by_cost = pack(lengths, budget=4000, dp=1, alignment=PLAIN, cost=lambda n: float(n**2))
    by_tokens = pack(lengths, budget=4000, dp=1, alignment=PLAIN, cost=lambda n: float(n**2), equal_shapes=True)
    assert tokens(by_cost) == [3000, 4000]
    assert tokens(by_tokens) == [3500, 3500]


def test_a_sequence_above_the_budget_is_named() -> None:
    four = Alignment(sequence=4, total=4)
    with pytest.raises(ValueError, match="sequence 1 of 61 tokens takes 64"):
        pack([30, 61], budget=60, dp=1, alignment=four)
    assert pack([60], budget=60, dp=1, alignment=four) == (((0,),),)
    with pytest.raises(ValueError, match="at least one token"):
        pack([0], budget=60, dp=1, alignment=PLAIN)


def test_what_does_not_fit_32_bits_is_refused_and_sums_beyond_them_are_not() -> None:
    long = 2**30
    with pytest.raises(ValueError, match="32-bit"):
        pack([long] * 3, budget=LARGEST_MICRO_BATCH + 1, dp=1, alignment=PLAIN)
    packed = pack(np.array([long] * 3, np.int32), budget=LARGEST_MICRO_BATCH, dp=1, alignment=PLAIN)
    assert [len(batch) for batch in packed[0]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lengths": [1.5]}, "whole numbers"),
        ({"lengths": [[1, 2]]}, "flat list"),
        ({"dp": 0}, "at least 1"),
        ({"multiple_of": 0}, "at least 1"),
        ({"at_least": 0}, "at least 1"),
        ({"cost": lambda n: float("nan")}, "the cost of 5 tokens is nan"),
        ({"cost": lambda n: -1.0}, "the cost of 5 tokens is -1"),
    ],
)
def test_impossible_requests_are_refused(wrong: dict[str, object], message: str) -> None:
    request: dict[str, object] = {"lengths": [5], "budget": 10, "dp": 1, "alignment": PLAIN, **wrong}
    with pytest.raises(ValueError, match=message):
        pack(**request)  # type: ignore[arg-type]


def test_sequences_without_a_cost_are_packed_all_the_same() -> None:
    check(pack([5] * 9, budget=10, dp=2, alignment=PLAIN, cost=lambda n: 0.0), [5] * 9, budget=10, alignment=PLAIN)


# -------------------------------------------------------------------------------------------------------------- quality

WIKIPEDIA = LengthHistogram.wikipedia().limited(32768)
GROUPS = [(0, 512), (0, 4096), (512, 2048), (2048, 4096), (4096, 8192), (4096, 32768), (8192, 32768)]


def group(seed: int, lower: int, upper: int) -> list[int]:
    return [n for n in WIKIPEDIA.sample(512, seed=seed).tolist() if lower < n <= upper]


def imbalance(loads: Sequence[float]) -> float:
    return (max(loads) - sum(loads) / len(loads)) / max(loads)


@pytest.mark.parametrize("dp", [4, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_short_sequences_leave_ranks_balanced_to_three_percent(seed: int, dp: int) -> None:
    lengths = group(seed, 0, 4096)
    packed = pack(lengths, budget=4096, dp=dp, alignment=PLAIN, cost=quadratic)
    assert imbalance(busy(packed, lengths, quadratic)) <= 0.03
    # The check tells: dealt out in turn, as a loader does, the same sequences are far from it.
    dealt = [sum(quadratic(n) for n in lengths[rank::dp]) for rank in range(dp)]
    assert imbalance(dealt) > 0.03


def least_possible(costs: Sequence[float], parts: int) -> float:
    """The heaviest part's weight in the best division, by trying all of them; for up to a dozen items."""
    best = float("inf")
    loads = [0.0] * parts
    ordered = sorted(costs, reverse=True)

    def place(index: int) -> None:
        nonlocal best
        if index == len(ordered):
            best = min(best, max(loads))
            return
        for part in range(min(parts, index + 1)):
            if loads[part] + ordered[index] < best:
                loads[part] += ordered[index]
                place(index + 1)
                loads[part] -= ordered[index]

    place(0)
    return best


def ranks_needed(costs: Sequence[float], most: float) -> float:
    """How many parts any division into parts of at most ``most`` has at least.

    Weights that no such part can hold more than 1 of, whatever is in it, add up to a number of parts: dual feasible functions
    (Fekete and Schepers, New classes of fast lower bounds for bin packing problems, 2001).
    """
    sizes = np.asarray(costs) / most
    needed = float(sizes.sum())
    for small in np.unique(np.concatenate([sizes[sizes <= 0.5], 1 - sizes[sizes > 0.5]])):
        # What leaves no room for ``small`` fills a part; what is smaller is left out. Two that fill a part exactly do fit.
        filled = np.where(sizes > 1 - small + 1e-9, 1.0, np.where(sizes < small, 0.0, sizes))
        needed = max(needed, float(filled.sum()))
        for steps in range(1, 8):
            scaled = (steps + 1) * filled
            whole = np.abs(scaled - np.round(scaled)) < 1e-9
            needed = max(needed, float(np.where(whole, filled, np.floor(scaled) / steps).sum()))
    return needed


LONG_GROUPS = [(0, 4096), (4096, 8192), (8192, 32768)]
"""The groups of a table with the limits 4,096, 8,192 and 32,768. The other ones are narrower than people write them."""


@pytest.mark.parametrize("dp", [2, 4, 16, 64])
@pytest.mark.parametrize(("lower", "upper"), GROUPS)
def test_the_busiest_rank_is_near_what_any_division_must_give_it(lower: int, upper: int, dp: int) -> None:
    """Within 1 % of max(mean, longest), or of what is possible, where a few long sequences cannot be made to fit that."""
    near = 1.01 if (lower, upper) in LONG_GROUPS else 1.06
    for seed in range(4):
        lengths = group(seed, lower, upper)
        costs = [quadratic(n) for n in lengths]
        packed = pack(lengths, budget=max(upper, 4096), dp=dp, alignment=PLAIN, cost=quadratic)
        busiest = max(busy(packed, lengths, quadratic))
        if busiest <= 1.01 * max(sum(costs) / dp, *costs):
            continue
        if len(lengths) <= 14:
            assert busiest <= 1.01 * least_possible(costs, dp)
        else:
            assert ranks_needed(costs, busiest / near) > dp + 1e-6


@settings(max_examples=60, deadline=None)
@given(costs=st.lists(st.integers(1, 60), min_size=1, max_size=9), dp=st.integers(1, 3))
@example(costs=[17, 31], dp=1)  # 31/48 and 1 - 17/48 round apart
def test_no_division_has_fewer_parts_than_are_said_to_be_needed(costs: list[int], dp: int) -> None:
    """The proof itself: it never says that more parts are needed than a division has; and it sees what cannot be."""
    assert ranks_needed(costs, least_possible(costs, dp)) <= dp + 1e-6
    assert ranks_needed([2.0] * (dp + 1), 3.9) > dp


def test_the_lower_bound_is_one_and_knows_that_items_must_share() -> None:
    assert lower_bound([4.0, 4.0, 4.0], 2) == 8.0
    assert lower_bound([4.0, 4.0, 3.0, 3.0, 3.0], 2) == 9.0
    assert lower_bound([], 3) == 0.0
    random = np.random.default_rng(0)
    for _ in range(50):
        costs = random.integers(1, 50, random.integers(1, 9)).astype(float).tolist()
        parts = int(random.integers(1, 4))
        assert lower_bound(costs, parts) <= least_possible(costs, parts)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=9), dp=st.integers(1, 3))
def test_few_sequences_are_divided_nearly_as_well_as_can_be(lengths: list[int], dp: int) -> None:
    packed = pack(lengths, budget=10**6, dp=dp, alignment=PLAIN)
    assert max(busy(packed, lengths, float)) <= 1.06 * least_possible([float(n) for n in lengths], dp)


@pytest.mark.parametrize("multiple", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("by_sequence", [True, False])
def test_alignment_pads_a_step_by_less_than_a_percent(multiple: int, by_sequence: bool) -> None:
    alignment = Alignment(sequence=multiple if by_sequence else 1, total=multiple)
    for seed in range(4):
        lengths = WIKIPEDIA.sample(512, seed=seed).tolist()
        packed = pack(lengths, budget=32768, dp=4, alignment=alignment, cost=quadratic)
        computed = sum(
            alignment.pad_total(sum(alignment.pad_sequence(lengths[i]) for i in batch)) for batch in every_batch(packed)
        )
        assert 1 - sum(lengths) / computed <= 0.01


def test_a_pipelines_micro_batches_are_padded_to_no_more_than_they_must_be() -> None:
    """All of a rank's are padded to the longest: that is the mean, or its longest sequence."""
    for seed in range(4):
        lengths = group(seed, 0, 4096)
        for dp in (1, 4, 16):
            packed = pack(lengths, budget=4096, dp=dp, alignment=PLAIN, cost=quadratic, equal_shapes=True)
            for rank in packed:
                totals = [sum(lengths[i] for i in batch) for batch in rank]
                longest = max(lengths[i] for batch in rank for i in batch)
                assert max(totals) <= 1.01 * max(sum(totals) / len(totals), longest)


@pytest.mark.parametrize("lower_upper", [(0, 512), (0, 4096)])
def test_there_are_few_micro_batches(lower_upper: tuple[int, int]) -> None:
    """At most one per rank more than the tokens ask for: each costs a fixed time."""
    for seed in range(4):
        lengths = group(seed, *lower_upper)
        for dp in (1, 4, 16):
            packed = pack(lengths, budget=4096, dp=dp, alignment=PLAIN, cost=quadratic)
            assert max(len(rank) for rank in packed) <= -(-sum(lengths) // (4096 * dp)) + 1


# --------------------------------------------------------------------------------------------------------------- bench


def test_the_bench_shows_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "packing", "--json", "--align", "16", "--steps", "2"]) == 0
    bench = json.loads(capsys.readouterr().out)
    assert [(each["upper"], each["dp"]) for each in bench["results"]] == list(
        itertools.product((4096, 8192, 32768), (4, 16, 64))
    )
    for each in bench["results"]:
        assert each["padding"] <= 0.03
        assert each["imbalance"] <= each["in_turn"]
        if each["upper"] == 4096:
            assert each["imbalance"] <= 0.03
            assert each["over_simple"] <= 0.01
    assert main(["bench", "packing", "--dp", "4", "--groups", "512", "--steps", "1"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("1-512")]
    assert line.split()[:3] == ["1-512", "4", "512"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dp", "0"], "--dp: '0' is not a list of numbers"),
        (["--groups", "4096,512"], "--groups: 4096,512 does not rise"),
        (["--lengths", "nothing"], "'nothing' names no lengths"),
        (["--lengths", "lognormal:mean=5"], "names no lengths"),
        (["--seq-length", "0"], "--seq-length must be at least 1, not 0"),
        (["--seed", "-1"], "--seed must be at least 0, not -1"),
        (["--sequences", "99999999999"], "--sequences 99999999999: at most 1,000,000"),
        (["--steps", "10001"], "--steps 10001: at most 10,000"),
        (["--dp", "4,999999999999"], "at most 262,144 ranks"),
        (["--budget", "100"], "above the budget of 100 tokens"),
        (["--", "x"], "remove what follows --"),
    ],
)
def test_the_bench_refuses_what_it_cannot_use(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "packing", *arguments]) == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert message in written.err
    assert written.err.count("\n") == 1
