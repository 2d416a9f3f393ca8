"""``verify_every``: what it sees, what it says, and that it changes nothing.

Every fault that it is there for is put into a step on purpose, and must be named with its parameter and ranks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.planning.param_layout import model_layout
from tests.job import Mix, document, start, step_of
from tests.spawn import run_ranks
from tests.test_training import OVERLAP, _drop_folds
from tests.training import GUEST_AND_SIBLING, SHARDED, SP, TP2_CP2, TP2_PP2, TWO_GUESTS, Home, Run, import_megatron

pytestmark = pytest.mark.timeout(600)

LINE = re.compile(
    r"hotspa: verify_every: iteration (\d+): (\d+) parameters are the same bits in all copies(?: and after (\d) switch(?:es)?)?; "
    r"the gradient is off by (\S+) from that of home alone \(allowed (\S+)\); this took (\S+) s"
)


def checks(run: Run) -> list[tuple[int, int, float, float, float]]:
    """(iteration, switches, off, allowed, seconds) of every check that the log tells of."""
    return [
        (int(line[1]), int(line[3] or 0), float(line[4]), float(line[5]), float(line[6])) for line in LINE.finditer(run.output)
    ]  # fmt: skip


def assert_the_same_bits(home: Home, config: str, *flags: str, largest: float, ranks: int = 4) -> None:
    plain = home.run(config, *flags, iterations=4, ranks=ranks)
    verified = home.run(f"{config}verify_every: 2\n", *flags, iterations=4, ranks=ranks)
    assert verified.losses == plain.losses and verified.grad_norms == plain.grad_norms
    assert verified.parameters == plain.parameters and verified.parameters != verified.loaded
    found = checks(verified)
    for iteration, switches, off, allowed, seconds in found:
        print(f"{home} {flags}: iteration {iteration}: off by {off:.1e}, {switches} switches, {seconds} s")
        assert switches and 0 < off <= largest < allowed and seconds > 0
    assert [iteration for iteration, *_ in found] == [2, 4]
    assert not checks(plain)


def test_a_verified_training_is_the_training_bit_for_bit() -> None:
    assert_the_same_bits(TP2_CP2, GUEST_AND_SIBLING, *OVERLAP, largest=1e-5)


def test_an_optimizer_that_leaves_its_gradients_does_not_disturb_the_check() -> None:
    """Megatron's plain one in single precision hands gradients over by reference, and takes them back a step later."""
    assert_the_same_bits(Home(2, 1, 1, ()), "strategies: [{max_length: 64, tp: 1}]\n", largest=1e-5, ranks=2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("home", "config", "flags", "largest"),
    [
        (TP2_PP2, TWO_GUESTS, (), 1e-5),
        (TP2_PP2, TWO_GUESTS, ("--timing-log-level", "2", "--log-num-zeros-in-grad"), 1e-5),
        (TP2_CP2, GUEST_AND_SIBLING, ("--bf16",), 5e-2),
        (TP2_CP2, GUEST_AND_SIBLING + "switch: {fold_dtype: bf16}\n", (), 1e-2),
        (TP2_CP2, GUEST_AND_SIBLING, ("--fp16", "--initial-loss-scale", "128"), 1e-2),
        (Home(1, 1, 2, (SHARDED,)), "strategies: [{max_length: 32, tp: 2}, {max_length: 128, pp: 2}]\n", OVERLAP, 1e-5),
    ],
    ids=["pipelined home", "timers", "bf16", "folds in bf16", "fp16", "overlapped pipeline"],
)
def test_other_verified_trainings_are_the_training_bit_for_bit(
    home: Home, config: str, flags: tuple[str, ...], largest: float
) -> None:
    assert_the_same_bits(home, config, *flags, largest=largest)


def test_a_difference_ends_the_job_on_every_rank() -> None:
    config = f"{TWO_GUESTS}verify_every: 2\n"
    with pytest.raises(AssertionError) as caught:
        TP2_PP2.run(config, iterations=4, before=_drop_folds)
    said = re.findall(r"^RuntimeError: (.*)$", str(caught.value), re.MULTILINE)
    assert len(said) == 4 and len(set(said)) == 1
    assert re.match(r"verify_every: iteration 2: the gradient of \S+ on ranks [\d, ]+ is off by", said[0]), said[0]
    assert said[0].endswith("go on from a checkpoint before this iteration")


# ------------------------------------------------------------------------------------------------------------ the faults

# On tp2-dp2: a guest without tensor parallelism, one whose parts nobody else has, and a sibling.
MIX = Mix((2, 1, 1), ((16, 1, 1, 1), (32, 4, 1, 1), (48, 2, 2, 1)), (SP, SHARDED), more="verify_every: 1\n")
LENGTHS = (5, 12, 9, 30, 20, 40, 44, 60)
ENDS = r"; the job ends here, as it would train on with wrong numbers: .*$"
WRONG = (
    r"the gradient of \S+ on ranks? [\d, ]+ is off by (\S+) from that of home alone \(allowed 1e-04\), and so (?:is|are) \d+ "
    r"more of \d+ parameters; element \[[\d, ]+\] is "
)
EXPECTED = {
    "nothing": "$",
    "a norm of rank 3": r"copies of decoder\.final_layernorm\.weight under tp2-cp1-pp1-dp2 differ: rank 3 holds other bits "
    r"than ranks 0, 1, 2",
    "a weight of rank 2": r"copies of decoder\.layers\.1\.mlp\.linear_fc2\.weight under tp2-cp1-pp1-dp2 differ: rank 2 holds "
    r"other bits than rank 0",
    "arrived wrong on rank 1": r"copies of decoder\.layers\.1\.mlp\.linear_fc2\.weight under tp1-cp1-pp1-dp4 differ: rank 1 "
    r"holds other bits than ranks 0, 2, 3",
    "arrived wrong where nobody has a copy": r"after the switch to tp4-cp1-pp1-dp1, decoder\.layers\.1\.mlp\.linear_fc2\.weight "
    r"on rank 2 is not what home holds",
    "halves of the gate in another order": r"after the switch to tp1-cp1-pp1-dp4, decoder\.layers\.0\.mlp\.linear_fc1\.weight on "
    r"ranks 0, 1, 2, 3 is not what home holds",
    "fold dropped": WRONG,
    "fold twice": WRONG,
    "a part of one rank's gradient lost": WRONG.replace(
        r"\S+ on ranks? [\d, ]+", r"decoder\.layers\.1\.mlp\.linear_fc2\.weight on ranks? [13, ]+", 1
    ),
    "not a number in the step alone": WRONG.replace("(\\S+)", "(inf)", 1),
    "a token too many": r"lm loss sums to \S+ over 213 tokens, in home alone to \S+ over 212",
    "a loss that differs": r"lm loss sums to \S+ over 212 tokens, in home alone to \S+ over 212",
}  # fmt: skip


def test_every_fault_is_named_with_its_parameter_and_ranks() -> None:
    results = run_ranks(_what_the_guard_says, 4, MIX, tuple(EXPECTED), timeout=120, prepare=import_megatron)
    for fault, expected in EXPECTED.items():
        (said,) = {result[fault] for result in results}  # every rank ends, with the same words
        print(f"{fault}: {said}")
        if fault == "nothing":
            assert not said
        else:
            assert re.match(rf"verify_every: iteration 1: {expected}", said) and re.search(ENDS, said), said
    # What is finite nowhere, home alone included, is left to Megatron's own checks, and said.
    said = results[0]["not finite anywhere"]
    assert "gradients are not finite, which is Megatron's to judge, and were not compared" in said


def _what_the_guard_says(rank: int, world: int, mix: Mix, faults: tuple[str, ...]) -> dict[str, str]:
    from hotspa_megatron.hooks import cpu, get_batch, install, loss_reports

    cpu.install()
    session, model, forward_step = start(mix, world, torch.float32)
    said: list[str] = []
    session.guard._say = said.append
    patches = Patches()
    get_batch.serve(forward_step, patches, adapter=None)
    loader, step = step_of(session, [document(0, index, length) for index, length in enumerate(LENGTHS)])

    def check(late: Callable[[Any], None] | None = None) -> None:
        session.guard.before(forward_step, step, loader, 1)
        for chunk in model:
            chunk.zero_grad_buffer()
        _, record = session.runner.run(
            forward_step_func=forward_step, step=step, loader=loader, switched=session.guard.switched
        )
        if late is not None:
            late(record)
        session.guard.after(record)

    results = {}
    for fault in faults:
        with _fault(fault, rank, session) as late:
            try:
                check(late)
                results[fault] = ""
            except RuntimeError as error:
                results[fault] = str(error)
    only_counted = loss_reports._only_counted
    patches.set(loss_reports, "_only_counted", lambda *given: only_counted(*given) * float("inf"))
    check()
    results["not finite anywhere"] = said[-1]
    patches.undo_all()
    install.uninstall()
    return results


@contextmanager
def _fault(fault: str, rank: int, session: Any) -> Iterator[Callable[[Any], None] | None]:
    """The fault in this rank's part of the job; yields what is to be done to a finished step's record, if anything."""
    from hotspa_megatron.runtime.binding import Copies

    runner, moves = session.runner, session.runner.moves
    index = {parameter.name: at for at, parameter in enumerate(moves.layout.parameters)}
    fc2 = index["decoder.layers.1.mlp.linear_fc2.weight"]
    patches = Patches()
    before = {at: parameter.detach().clone() for at, parameter in moves.parameters.items()}
    late: Callable[[Any], None] | None = None

    def flip(tensor: torch.Tensor) -> None:
        tensor.detach().view(torch.int32).view(-1)[5] ^= 1

    def arrives_wrong(strategy: str, on: int) -> None:
        switch = moves.switch

        def wrong(resident: Any, guest: Any) -> Any:
            move = switch(resident, guest)
            if str(guest.state.strategy) == strategy and rank == on:
                flip(guest.parameters[fc2])
            return move

        patches.set(moves, "switch", wrong)

    match fault:
        case "a norm of rank 3" if rank == 3:
            flip(moves.parameters[index["decoder.final_layernorm.weight"]])
        case "a weight of rank 2" if rank == 2:
            flip(moves.parameters[fc2])
        case "arrived wrong on rank 1":
            arrives_wrong("tp1-cp1-pp1-dp4", 1)
        case "arrived wrong where nobody has a copy":
            arrives_wrong("tp4-cp1-pp1-dp1", 2)
        case "halves of the gate in another order":
            guest = next(each for strategy, each in runner._guests.items() if strategy.tp == 1)
            wrong = [dataclasses.replace(each, split_stride=1) for each in moves.layout.parameters]
            right = moves.layout, guest.layout
            known, moves._switches = moves._switches, {}
            moves.layout, guest.layout = (model_layout(wrong, each.strategy, [range(4)], tied=True) for each in right)
            moves._switch_route(None, guest.state.strategy)  # kept: plans are made once
            moves.layout, guest.layout = right
            patches.on_undo("switches", lambda: setattr(moves, "_switches", known))
        case "fold dropped":
            patches.set(Copies, "add", lambda self: None)
        case "fold twice":
            add = Copies.add
            patches.set(Copies, "add", lambda self: (add(self), add(self)))
        case "a part of one rank's gradient lost" if rank in (1, 3):  # one of them owns some of it

            def late(record: Any) -> None:
                moves.parameters[fc2].main_grad.zero_()
        case "not a number in the step alone":

            def late(record: Any) -> None:
                moves.parameters[fc2].main_grad.fill_(float("nan"))
        case "a token too many" | "a loss that differs":

            def late(record: Any) -> None:
                total, tokens = record.losses["lm loss"]
                record.losses["lm loss"] = (total, tokens + 1) if "token" in fault else (total * 1.001, tokens)

    try:
        yield late
    finally:
        patches.undo_all()
        for at, parameter in moves.parameters.items():
            parameter.detach().copy_(before[at])


# ----------------------------------------------------------------------------------------------------------- the settings


def test_gradients_are_compared_only_where_one_more_pass_changes_nothing() -> None:
    from hotspa_megatron.hooks.session import why_ungraded

    plain: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fp8": None}
    several: Any = SimpleNamespace(strategies=(1,))
    assert why_ungraded(SimpleNamespace(**plain), several) is None
    for changed, why in (
        ({"hidden_dropout": 0.1}, "dropout"),
        ({"attention_dropout": 0.1}, "dropout"),
        ({"fp8": "hybrid"}, "fp8"),
    ):
        assert why in str(why_ungraded(SimpleNamespace(**{**plain, **changed}), several))
    assert "only strategy" in str(why_ungraded(SimpleNamespace(**plain), SimpleNamespace(strategies=())))
