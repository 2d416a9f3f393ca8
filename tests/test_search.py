"""The choice of strategies: never slower than static, legal, within memory, and as good as trying everything where one can."""

from __future__ import annotations

import doctest
import itertools
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_megatron.planning import plan_strategies, search
from hotspa_megatron.planning.alignment import alignment_of
from hotspa_megatron.planning.communicators import group_memory
from hotspa_megatron.planning.execution import VIRTUAL_STAGES, Execution, legal_executions
from hotspa_megatron.planning.group_estimates import Models, cut_points
from hotspa_megatron.planning.hardware import Hardware, load_hardware
from hotspa_megatron.planning.known_models import KNOWN_MODELS
from hotspa_megatron.planning.lengths import LengthHistogram
from hotspa_megatron.planning.memory_model import MemoryModel
from hotspa_megatron.planning.programme import Programme
from hotspa_megatron.planning.search import PlannedRun, others_of, plan_batches
from hotspa_megatron.planning.step_plan import StepPlanner
from hotspa_megatron.planning.step_time import GroupChoice, RunModel
from hotspa_megatron.strategy import Kind, Strategy

A800 = load_hardware("a800-80")
L40S = load_hardware("l40s-pcie")
SEVEN = KNOWN_MODELS["llama-7b"]
WIKIPEDIA = LengthHistogram.wikipedia(size=10_000)


def at(world: int, *, tp: int = 1, cp: int = 1, pp: int = 1, recompute: float = 0.0) -> Execution:
    return Execution(strategy=Strategy.from_world(world, tp=tp, cp=cp, pp=pp), recompute=recompute)


def check(planned: PlannedRun, batches: list[np.ndarray], models: Models) -> None:
    """What holds for any answer, worked out anew."""
    home = planned.home.execution.strategy
    model = models.under(home)
    assert planned.time.total <= planned.static_time.total and planned.gain >= 1
    ends = [choice.max_length for choice in planned.groups]
    assert ends == sorted(ends) and ends[-1] == models.shape.seq_length
    kinds = [(choice.execution.strategy, choice.execution.strategy.kind(home)) for choice in planned.groups[:-1]]
    for index, (choice, held) in enumerate(zip(planned.groups, planned.held, strict=True)):
        others = others_of(planned.groups, index)
        assert held.fits
        assert held == model.memory.held(choice.execution, home, choice.tokens_per_microbatch, others)
        on_gpus = model.hardware.communicator_bytes(2) > 0
        assert held.communicators == (group_memory(home, kinds).added_mb * 2**20 if on_gpus else 0)
        assert choice.tokens_per_microbatch >= choice.max_length
    again = RunModel(Models(models.shape, models.hardware, models.world_size).under(home), planned.groups)
    assert planned.time.total == pytest.approx(sum(again.step(batch).total for batch in batches) / len(batches))
    static = planned.static.execution.strategy
    alone = RunModel(Models(models.shape, models.hardware, models.world_size).under(static), (planned.static,))
    assert planned.static_time.total == pytest.approx(sum(alone.step(batch).total for batch in batches) / len(batches))


@settings(max_examples=12, deadline=None)
@given(
    world=st.sampled_from([1, 2, 4, 8, 16]),
    context=st.sampled_from([2048, 8192, 32768]),
    sequences=st.integers(1, 96),
    seed=st.integers(0, 1000),
    hardware=st.sampled_from(["a800-80", "h200", "l40s-pcie"]),
)
def test_never_slower_than_static(world: int, context: int, sequences: int, seed: int, hardware: str) -> None:
    shape = replace(SEVEN, num_layers=8, seq_length=context)
    batches = [WIKIPEDIA.limited(context).sample(sequences, seed=seed + step) for step in range(2)]
    models = Models(shape, load_hardware(hardware), world)
    if not any(
        models.under(each.strategy).memory.capacity(each, each.strategy) >= context
        for each in legal_executions(shape, world, max_tp=8)
    ):
        with pytest.raises(ValueError, match=r"no strategy holds sequences of .* at most [\d,]+ tokens fit"):
            plan_batches(batches, shape=shape, hardware=models.hardware, world_size=world)
        return
    planned = plan_batches(batches, shape=shape, hardware=models.hardware, world_size=world)
    check(planned, batches, models)


def test_siblings_take_most_of_the_gain_where_context_parallelism_is_there() -> None:
    batches = [WIKIPEDIA.limited(32768).sample(512, seed=step) for step in range(2)]
    planned = plan_batches(batches, shape=SEVEN, hardware=A800, world_size=16)
    check(planned, batches, Models(SEVEN, A800, 16))
    assert planned.gain > 1.02
    assert len(planned.groups) > 1 and planned.time.switch == planned.time.fold == 0
    assert {choice.execution.layout for choice in planned.groups} == {(1, 1, 1)}


def test_slow_links_make_guests_pay() -> None:
    shape = replace(SEVEN, seq_length=32768)
    batches = [WIKIPEDIA.limited(32768).sample(256, seed=step) for step in range(2)]
    planned = plan_batches(batches, shape=shape, hardware=L40S, world_size=8)
    check(planned, batches, Models(shape, L40S, 8))
    assert planned.gain > 1.1


def test_guests_are_chosen_where_context_parallelism_is_not_available() -> None:
    batches = [WIKIPEDIA.limited(32768).sample(512, seed=step) for step in range(2)]
    shape = KNOWN_MODELS["llama-32b"]
    # Beside the guests' gradients on their way home: an A800 holds the longest sequence and nothing else.
    roomy = replace(A800, memory_mib=96_000)
    planned = plan_batches(batches, shape=shape, hardware=roomy, world_size=32, max_tp=16, max_cp=1, recompute=(0.0,))
    check(planned, batches, Models(shape, roomy, 32))
    home = planned.home.execution.strategy
    guests = [choice for choice in planned.groups if not choice.execution.strategy.same_layout(home)]
    assert guests and planned.time.switch > 0 and planned.time.fold > 0 and planned.gain > 1.1
    assert planned.time.switch + planned.time.fold < 0.03 * planned.time.total
    assert all(choice.execution.strategy.cp == 1 for choice in planned.groups)


def test_equally_long_sequences_want_one_strategy() -> None:
    shape = replace(SEVEN, seq_length=4096)
    planned = plan_batches([np.full(64, 4096)], shape=shape, hardware=A800, world_size=8)
    assert len(planned.groups) == 1 and planned.gain == 1


def test_the_programme_finds_what_trying_everything_finds() -> None:
    shape = replace(SEVEN, num_layers=8, seq_length=16384)
    tight = replace(A800, memory_mib=40000)
    batches = [WIKIPEDIA.limited(16384).sample(128, seed=3)]
    executions = (at(8), at(8, cp=2), at(8, cp=4), at(8, cp=8), at(8, tp=2), at(8, tp=4, pp=2))
    searching = search._Search(Models(shape, tight, 8), batches, executions, None)
    homes, _ = searching._homes()
    cuts = searching.estimates.cuts
    for layout in sorted({choice.execution.layout for choice in homes}):
        of = [choice for choice in homes if choice.execution.layout == layout]
        programme = Programme(searching.estimates, of, guests=True)
        while True:
            solution = programme.solve()
            if not programme.make_real(solution):
                break
        values, own, count = programme._values, programme._own, len(programme._layouts)
        best = float("inf")
        inner = range(1, len(cuts) - 1)
        for size in range(4):
            for chosen in itertools.combinations(inner, size):
                bounds = (0, *chosen, len(cuts) - 1)
                for places in itertools.product(range(count), repeat=size + 1):
                    seconds, before = 0.0, count
                    for first, last, place in zip(bounds, bounds[1:], places, strict=False):
                        seconds += values[place, first, last]
                        if place != own:
                            seconds += programme._switch[before, place] + programme._fold[place]
                            before = place
                    best = min(best, seconds)
        ends = searching.estimates.end_of_step(programme.home_choice(solution))
        assert solution.seconds - ends <= best + 1e-9
        if len(solution.intervals) <= 4:
            assert solution.seconds - ends == pytest.approx(best)


@pytest.mark.parametrize(("model", "gpus", "sequences"), [("llama-32b", 32, 192), ("llama-13b", 16, 96)])
def test_the_baseline_is_the_best_of_all_static_runs(model: str, gpus: int, sequences: int) -> None:
    """Pipelines with one sequence much longer than the others among them: a few micro-batches, all padded to that one."""
    shape = replace(KNOWN_MODELS[model], seq_length=32768)
    random = np.random.default_rng(4)
    batch = np.minimum(np.exp(random.normal(6.6, 1.5, sequences)).astype(int) + 1, 32768)
    batch[0] = 32768
    executions = legal_executions(shape, gpus, max_tp=8, vpp=(1, 3))
    searching = search._Search(Models(shape, A800, gpus), [batch], executions, None)
    homes, _ = searching._homes()
    every = {home.execution: searching._seconds((home,)) for home in homes}
    best = min(every, key=every.__getitem__)
    assert len(every) > 20 and (gpus == 16 or best.strategy.pp > 1)
    assert searching._statics(homes)[0].execution == best


def test_micro_batches_larger_than_the_longest_sequence_are_a_lever() -> None:
    shape = replace(SEVEN, seq_length=8192)
    batches = [WIKIPEDIA.limited(8192).sample(256, seed=2)]
    with_it, without = (
        plan_batches(batches, shape=shape, hardware=A800, world_size=16, beyond_longest=beyond)
        for beyond in (True, False)
    )
    assert any(choice.tokens_per_microbatch > choice.max_length for choice in with_it.groups)
    for choice in (*without.groups, without.static):
        unit = alignment_of(choice.execution.strategy, sequence_parallel=without.home.execution.strategy.tp > 1).total
        assert choice.max_length <= choice.tokens_per_microbatch < choice.max_length + unit
    assert with_it.time.total < without.time.total <= without.static_time.total


def test_a_step_of_few_tokens_leaves_room_for_its_longest_sequence() -> None:
    shape = replace(SEVEN, seq_length=256)
    planned = plan_strategies(
        LengthHistogram.of([40, 256]), shape=shape, hardware=A800, world_size=8, sequences_per_step=4
    )
    assert all(choice.tokens_per_microbatch >= choice.max_length for choice in planned.groups)


def test_a_given_home_is_kept_and_is_the_baseline() -> None:
    home = Strategy.from_world(16, tp=4, cp=1, pp=2)
    batches = [WIKIPEDIA.limited(32768).sample(256, seed=0)]
    planned = plan_batches(batches, shape=SEVEN, hardware=A800, world_size=16, home=home)
    assert planned.home.execution.strategy == home and planned.static.execution.strategy == home
    assert planned.gain >= 1


@settings(max_examples=8, deadline=None)
@given(
    home=st.sampled_from([{"cp": 4}, {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2}]),
    share=st.sampled_from([0.25, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_homes_recomputation_can_be_given_and_is_the_baselines(home: dict[str, int], share: float, seed: int) -> None:
    shape = replace(SEVEN, num_layers=8, seq_length=16384)
    batches = [WIKIPEDIA.limited(16384).sample(64, seed=seed)]
    fixed = at(8, **home, recompute=share)
    planned = plan_batches(batches, shape=shape, hardware=A800, world_size=8, home=fixed.strategy, home_recompute=share)
    check(planned, batches, Models(shape, A800, 8))
    assert planned.home.execution == planned.static.execution == fixed


def test_others_choose_their_recomputation_where_homes_is_given() -> None:
    batches = [WIKIPEDIA.limited(16384).sample(64, seed=1)]
    shape = replace(SEVEN, num_layers=8, seq_length=16384)
    home = at(8, tp=2, recompute=1.0)
    planned = plan_batches(
        batches, shape=shape, hardware=A800, world_size=8, home=home.strategy, home_recompute=1.0, recompute=(0.0,)
    )
    assert planned.home.execution == home and planned.gain > 1.1
    assert {choice.execution.recompute for choice in planned.groups[:-1]} == {0.0}
    # And home, where it is to be chosen, is one that recomputes as said.
    chosen = plan_batches(batches, shape=shape, hardware=A800, world_size=8, home_recompute=1.0)
    assert chosen.home.execution.recompute == chosen.static.execution.recompute == 1.0


def test_a_home_with_uneven_stages_keeps_them() -> None:
    shape = replace(SEVEN, num_layers=7, layers_in_first_stage=3, layers_in_last_stage=4, seq_length=4096)
    home = Strategy.from_world(4, tp=1, cp=1, pp=2)
    planned = plan_batches([np.full(16, 1000)], shape=shape, hardware=A800, world_size=4, home=home)
    assert planned.home.execution.strategy == home


def test_what_memory_rules_out_is_kept_with_its_numbers() -> None:
    planned = plan_batches([np.full(8, 4096)], shape=SEVEN, hardware=A800, world_size=8)
    assert planned.refused
    refused = {refusal.execution: refusal.reason for refusal in planned.refused}
    reason = refused[at(8)]
    assert "32,768 tokens take" in reason and "GiB" in reason and "at most" in reason
    assert planned.home.execution not in refused
    for refusal in planned.refused:
        assert refusal.needed > refusal.limit == planned.held[0].limit


@pytest.mark.parametrize("virtual", [(1,), (1, 2)])
def test_what_cannot_run_beside_home_is_kept_too(virtual: tuple[int, ...]) -> None:
    tight = replace(A800, memory_mib=24000)
    shape = replace(SEVEN, num_layers=8, seq_length=8192)
    options = {"shape": shape, "hardware": tight, "world_size": 8, "recompute": (0.0, 1.0), "vpp": virtual}
    planned = plan_batches([WIKIPEDIA.limited(8192).sample(64, seed=1)], **options)  # type: ignore[arg-type]
    home = planned.home.execution.strategy
    memory = Models(shape, tight, 8).under(home).memory
    found = {(refusal.execution, refusal.kind): refusal for refusal in planned.refused}
    assert len(found) == len(planned.refused)
    every = legal_executions(shape, 8, max_tp=8, recompute=(0.0, 1.0), vpp=virtual)
    beside = {each for each in every if each.strategy != home and memory.capacity(each, home) < 512}
    guests = {each for each in beside if not each.strategy.same_layout(home)}
    assert {refusal.execution for refusal in planned.refused if refusal.kind is not Kind.HOME} == beside
    assert guests, "the case rules out no guest"
    for each in guests:
        refusal = found[each, Kind.GUEST]
        assert refusal.needed > refusal.limit == tight.usable_bytes
        assert refusal.reason.startswith("512 tokens take") and "home's" in refusal.reason


def test_strategies_that_fit_one_by_one_but_not_together_are_not_chosen_together() -> None:
    shape, home = replace(SEVEN, num_layers=8, seq_length=32768), at(16, cp=8)
    batches = [WIKIPEDIA.limited(32768).sample(256, seed=1)]
    least = MemoryModel(shape, A800, 16).held(home, home.strategy, 32768).total // 2**20 + 1

    def with_room(mib: int, **changes: Any) -> Hardware:
        return replace(A800, memory_mib=least + mib + A800.reserved_mib + A800.margin_mib, **changes)

    def fits(mib: int, *cps: int) -> bool:
        ends = [GroupChoice(max_length=4096 * cp, execution=at(16, cp=cp), tokens_per_microbatch=0) for cp in (*cps, 8)]
        searching = search._Search(Models(shape, with_room(mib), 16), batches, (), None)
        return searching._sized(tuple(ends)) is not None

    # cp 2 adds a pair and a group of eight to home's, cp 4 two groups of four.
    assert [fits(1300, 2), fits(1300, 4)] == [True, False] and fits(1400, 4)
    assert [fits(2500, 2, 4), fits(2700, 2, 4)] == [False, True]

    def chosen(hardware: Hardware) -> set[int]:
        planned = plan_batches(
            batches, shape=shape, hardware=hardware, world_size=16, home=home.strategy, recompute=(0.0,)
        )
        assert all(held.fits for held in planned.held)
        return {choice.execution.strategy.cp for choice in planned.groups}

    assert 2 in chosen(with_room(200, communicator_mib=((2, 0.0),))) and 2 not in chosen(with_room(200))


@pytest.mark.parametrize("usable_mib", [200, 300])
def test_guests_are_planned_in_little_memory_too(usable_mib: int) -> None:
    """As of ranks on a small machine: what guests take beside home is a matter of the model, not of gigabytes."""
    cpu = load_hardware("cpu-gloo")
    cpu = replace(cpu, memory_mib=usable_mib + cpu.reserved_mib + cpu.margin_mib)
    shape = replace(
        SEVEN, num_layers=4, hidden_size=256, ffn_hidden_size=768, num_attention_heads=8, num_query_groups=8,
        kv_channels=32, padded_vocab_size=1024, seq_length=4096, parameter_bytes=4, local_layers=True,
    )  # fmt: skip
    batches = [WIKIPEDIA.limited(4096).sample(128, seed=1)]
    planned = plan_batches(batches, shape=shape, hardware=cpu, world_size=4, max_cp=1, recompute=(0.0,))
    check(planned, batches, Models(shape, cpu, 4))
    home = planned.home.execution.strategy
    assert any(choice.execution.strategy.kind(home) is Kind.GUEST for choice in planned.groups)
    assert all(held.communicators == 0 for held in planned.held)


@pytest.mark.parametrize("mib", [100, 300])
def test_of_a_plan_that_memory_does_not_hold_the_rest_is_kept(
    mib: int,
) -> None:
    """At home's limit siblings that fit alone leave home too little: it recomputes more, or there are fewer of them."""
    shape, home = replace(SEVEN, num_layers=8, seq_length=32768), at(16, cp=8)
    batches = [WIKIPEDIA.limited(32768).sample(256, seed=1)]
    least = MemoryModel(shape, A800, 16).held(home, home.strategy, 32768).total // 2**20 + 1
    tight = replace(A800, memory_mib=least + mib + A800.reserved_mib + A800.margin_mib)
    executions = legal_executions(shape, 16, max_tp=1, recompute=(0.0, 0.5))
    searching = search._Search(Models(shape, tight, 16), batches, executions, home.strategy)
    homes, _ = searching._homes()
    programme = Programme(searching.estimates, homes, guests=False)
    solution = programme.solve()
    groups = programme.groups(solution)
    assert searching._sized(groups) is None
    found = list(searching._finalists(homes))

    def executions_of(plan: tuple[GroupChoice, ...]) -> list[Execution]:
        return [choice.execution for choice in plan]

    assert found and all(len(plan) > 1 for plan in found)
    if programme.make_room(solution):
        assert searching._sized(programme.groups(programme.solve())) in found
        assert mib == 100
    else:
        assert all(set(executions_of(plan)) < set(executions_of(groups)) for plan in found)
        assert mib == 300


def test_nothing_fits_is_an_error_with_the_nearest_miss() -> None:
    small = replace(A800, memory_mib=16000)
    with pytest.raises(ValueError, match=r"no strategy holds sequences of 32768 tokens.*nearest is tp.*GiB"):
        plan_batches([np.full(8, 100)], shape=SEVEN, hardware=small, world_size=2)


def test_a_megabyte_less_than_needed_changes_the_plan() -> None:
    batches = [np.full(8, 32768)]
    roomy = plan_batches(batches, shape=SEVEN, hardware=A800, world_size=8, recompute=(0.0,))
    home = roomy.static.execution
    least = Models(SEVEN, A800, 8).under(home.strategy).memory.held(home, home.strategy, 32768).total
    tight = replace(A800, memory_mib=least // 2**20 + A800.reserved_mib + A800.margin_mib)
    planned = plan_batches(batches, shape=SEVEN, hardware=tight, world_size=8, recompute=(0.0,))
    assert home in {refusal.execution for refusal in planned.refused}
    assert all(held.fits for held in planned.held)


def test_equal_input_gives_an_equal_plan_in_any_process() -> None:
    code = (
        "from hotspa_megatron.planning import plan_strategies\n"
        "from hotspa_megatron.planning.hardware import load_hardware\n"
        "from hotspa_megatron.planning.known_models import KNOWN_MODELS\n"
        "from hotspa_megatron.planning.lengths import LengthHistogram\n"
        "planned = plan_strategies(LengthHistogram.wikipedia(size=10_000), shape=KNOWN_MODELS['llama-13b'],\n"
        "    hardware=load_hardware('a800-80'), world_size=16, sequences_per_step=64)\n"
        "print(planned.groups, planned.time)\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PATH": ""}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_recomputation_is_chosen_where_it_is_offered_alone() -> None:
    batches = [WIKIPEDIA.limited(32768).sample(128, seed=1)]
    shape = KNOWN_MODELS["llama-32b"]
    given_ = plan_batches(batches, shape=shape, hardware=A800, world_size=32)
    never = plan_batches(batches, shape=shape, hardware=A800, world_size=32, recompute=(0.0,))
    assert not any(choice.execution.recompute for choice in never.groups)
    assert given_.static_time.total <= never.static_time.total


def test_cut_points() -> None:
    assert cut_points(512) == (0, 512)
    assert cut_points(5000) == (0, 512, 1024, 2048, 3072, 4096, 5000)


def test_the_docstrings_example_runs() -> None:
    result = doctest.testmod(search)
    assert result.attempted > 5 and result.failed == 0


def test_planning_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys\n"
        "from hotspa_megatron.planning import plan_strategies\n"
        "import hotspa_megatron.planning.simulate\n"
        "print({'torch', 'megatron'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_packages_front_door_names_what_it_lacks() -> None:
    import hotspa_megatron.planning as planning

    with pytest.raises(AttributeError, match="no attribute 'plan_everything'"):
        planning.plan_everything  # noqa: B018


def planned_for(world: int, sequences: int, name: str) -> PlannedRun:
    return plan_strategies(
        LengthHistogram.wikipedia(),
        shape=replace(KNOWN_MODELS[name], seq_length=32768),
        hardware=A800,
        world_size=world,
        sequences_per_step=sequences,
        vpp=VIRTUAL_STAGES,
    )


@pytest.mark.timeout(60)
def test_32_gpus_are_planned_in_seconds() -> None:
    planned = planned_for(32, 512, "llama-32b")
    assert len(planned.groups) > 1 and planned.gain > 1.05


@pytest.mark.long
@pytest.mark.timeout(300)
def test_1024_gpus_are_planned_within_a_minute() -> None:
    planned = planned_for(1024, 8192, "llama-70b")
    assert len(planned.groups) > 1 and planned.gain > 1


# ------------------------------------------------------------------------------------------------------ the time of a step


def run_model(world: int, *groups: tuple[int, Execution, int]) -> RunModel:
    choices = [
        GroupChoice(max_length=end, execution=execution, tokens_per_microbatch=budget)
        for end, execution, budget in groups
    ]
    return RunModel(
        Models(replace(SEVEN, seq_length=groups[-1][0]), A800, world).under(groups[-1][1].strategy), choices
    )


def test_a_step_of_one_sequence_takes_its_time() -> None:
    run = run_model(8, (4096, at(8), 4096))
    time_of = run.model.stage_time(at(8))
    took = run.step(np.array([1000]))
    alone = float(time_of.seconds(1000.0, 1000.0**2))
    home = at(8).strategy
    expected = alone + run.model.home_reduction(home, last=alone) + run.model.optimizer_seconds(home)
    assert took.total == pytest.approx(expected)
    assert took.switch == took.fold == 0


def test_a_pipeline_pays_its_fill_with_the_longest_micro_batch() -> None:
    run = run_model(4, (4096, at(4, pp=4), 4096))
    each = float(run.model.stage_time(at(4, pp=4)).seconds(4096.0, 4096.0**2))
    took = run.step(np.full(4, 4096))
    rest = run.model.optimizer_seconds(at(4, pp=4).strategy)
    assert took.total == pytest.approx((4 + 3) * each + rest)


def test_a_guest_pays_for_its_moves() -> None:
    run = run_model(8, (2048, at(8, tp=2), 4096), (4096, at(8, tp=8), 4096))
    lengths = np.array([2000] * 64 + [4000])
    # A planner without costs runs the groups as they are given, worth it or not.
    as_given = StepPlanner(run.planner.groups).plan(lengths)
    assert [segment.kind for segment in as_given.segments] == [Kind.GUEST, Kind.HOME]
    took, model = run.time(as_given), run.model
    home, guest = at(8, tp=8).strategy, at(8, tp=2).strategy
    assert took.switch == model.switch_seconds(home, None, guest) > 0
    assert took.fold == model.fold_seconds(guest, home) > 0
    assert took.reduce == model.guest_reduction(guest)
    assert run.step(lengths).total <= took.total


def test_siblings_do_not_wait_for_each_other() -> None:
    run = run_model(4, (2048, at(4), 2048), (4096, at(4, cp=2), 4096))
    # Three ranks have one short sequence each, the fourth is free for the long one at once, its partner is not.
    lengths = np.array([2048, 2048, 2048, 4096])
    plan = StepPlanner(run.planner.groups).plan(lengths)
    took = run.time(plan)
    assert took.switch == took.fold == 0
    short = float(run.model.stage_time(at(4)).seconds(2048.0, 2048.0**2))
    long = float(run.model.stage_time(at(4, cp=2)).seconds(4096.0, 4096.0**2))
    assert took.total <= short + long + took.reduce + took.optimizer + 1e-9
    free = StepPlanner(run.planner.groups).plan(lengths[[0, 3]])
    assert run.time(free).total < took.total + 1e-9
