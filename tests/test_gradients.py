"""The step's gradient equals a one-process, one-sequence-at-a-time reference under every mix of strategies.

In double precision (Megatron's own casts to single precision lifted) to 1e-9; in single precision to 1e-6, with the
static run's noise beside it. All mixes of a world size share one set of ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotspa_megatron.hooks import arguments
from hotspa_megatron.planning.param_layout import LogicalParameter
from tests.job import SEQ_LENGTH, Mix, document, double_precision, region, single_precision, start, step_of
from tests.reference_gpt import loss_and_gradients
from tests.spawn import run_ranks
from tests.training import RELEASE, import_megatron

# Many short documents, a few long ones, one longer than --seq-length, and two without a target or nearly so.
LENGTHS = ((3, 9, 17, 5, 33, 12, 65, 2, 28, 7, 50, 1, 150, 16, 4, 31, 11, 62), (6, 14, 9, 5, 3, 20), (60, 65, 58, 40))


SP = "--sequence-parallel"
UNTIED = "--untie-embeddings-and-output-weights"
SHARDED = "--use-distributed-optimizer"
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
MIXES_OF_4 = (
    Mix((2, 2, 1), (), (SP, UNTIED)),
    Mix((2, 2, 1), ((16, 1, 1, 1), (32, 2, 1, 1)), (SP, UNTIED, SHARDED)),
    Mix((2, 2, 1), ((16, 1, 1, 1), (32, 2, 1, 1)), (UNTIED, "--recompute-activations")),
    Mix((2, 1, 2), ((16, 1, 1, 1), (32, 4, 1, 1)), (SP, SHARDED)),
    Mix((2, 1, 2), ((8, 1, 1, 1), (16, 4, 1, 1), (32, 1, 2, 2)), (UNTIED, SP)),
    Mix((1, 1, 2), ((32, 2, 1, 1),), (SP,)),
    Mix((1, 1, 1), ((32, 2, 1, 2),), (SP, SHARDED, *RECOMPUTE)),
    Mix((1, 4, 1), ((16, 1, 1, 1), (32, 1, 2, 1)), (UNTIED, SHARDED)),
    # tp above the number of query groups, at home and as a guest.
    Mix((4, 1, 1), ((16, 1, 1, 1), (32, 2, 2, 1)), (SP, UNTIED)),
    Mix((1, 2, 2), ((16, 4, 1, 1), (32, 1, 1, 2)), (SP,)),
    Mix((1, 1, 4), ((16, 1, 1, 1), (32, 2, 1, 2)), ("--decoder-first-pipeline-num-layers", "1",
                                                    "--decoder-last-pipeline-num-layers", "1")),
    Mix((2, 1, 1), ((16, 1, 1, 2), (32, 2, 2, 1)), ("--normalization", "LayerNorm", "--add-qkv-bias", "--qk-layernorm", SP)),
    Mix((2, 1, 1), ((16, 1, 1, 1),), ("--position-embedding-type", "learned_absolute", SP)),
)  # fmt: skip
OVERLAPPED = Mix((2, 2, 1), ((16, 1, 1, 1), (32, 2, 1, 1)), (SP, UNTIED, "--overlap-grad-reduce", SHARDED))
# One sequence of the first step is between 32 and 52 long: the schedule needs a second micro-batch, which has none.
FILLED = Mix((1, 1, 1), ((32, 2, 1, 2), (52, 1, 1, 2, "vpp: 2")), (SHARDED,))
VIRTUAL = ("--num-virtual-stages-per-pipeline-rank", "2")
BY_LAYERS = ("--num-layers-per-virtual-pipeline-stage", "1")
"""The same, of four layers over two stages, in the older flag's words."""
INTERLEAVED = (
    FILLED,
    # Guests with virtual stages, beside one without on the same (tp, pp); budgets that leave replicas unequal counts.
    Mix((2, 2, 1), ((16, 1, 1, 2, "vpp: 2"), (32, 1, 1, 2)), (SP, UNTIED, SHARDED)),
    Mix((1, 1, 2), ((16, 1, 1, 2, "vpp: 2, recompute: full"), (32, 1, 2, 2, "vpp: 2, tokens_per_microbatch: 64")), ()),
    # Home with virtual stages: a sibling, the same (tp, pp) without them, and another guest.
    Mix((1, 1, 2), ((16, 1, 2, 2), (32, 1, 1, 2, "vpp: 1"), (48, 2, 1, 1)), (UNTIED, SHARDED, *VIRTUAL)),
    Mix(
        (2, 1, 2),
        ((16, 1, 1, 1), (32, 1, 1, 4)),
        (SP, SHARDED, "--overlap-grad-reduce", "--overlap-param-gather", *BY_LAYERS),
    ),
)
RECOMPUTING = (
    Mix((2, 2, 1), ((8, 1, 1, 1, "recompute: selective"), (16, 1, 1, 1, "recompute: full"),
                    (32, 2, 1, 1, "recompute: full, recompute_layers: 3")), (SP, UNTIED, SHARDED)),
    Mix((2, 1, 2), ((8, 2, 1, 2, "recompute: none"), (16, 2, 1, 2, "recompute: selective"), (32, 1, 2, 2)),
        (SP, *RECOMPUTE)),
    Mix((1, 2, 2), ((16, 1, 1, 2, "recompute: none"), (32, 1, 1, 2, "vpp: 2, recompute: full, recompute_layers: 1")),
        (UNTIED, "--recompute-activations")),
)  # fmt: skip
# Two guests in a row, so that the second may arrive beside the first one's segment.
PREFETCHED = Mix((2, 1, 2), ((16, 1, 1, 1), (32, 4, 1, 1)), (SP, SHARDED), switch="prefetch: always")
SWITCHED = tuple(
    dataclasses.replace(PREFETCHED, switch=switch)
    for switch in (
        "prefetch: always",
        "prefetch: never",
        "prefetch: auto, transport: auto",
        "prefetch: always, transport: gloo, chunk_mb: 1",
    )
)
IN_BF16 = dataclasses.replace(PREFETCHED, switch="fold_dtype: bf16")
UNEVEN = Mix(
    (1, 1, 4),
    ((16, 1, 1, 1), (32, 2, 1, 2)),
    ("--num-layers", "6", "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
)
LAID_OUT = (
    # Stages, and virtual ones, as a string of the command line says: uneven, and with layers beside the embedding or not.
    Mix((1, 1, 2), ((16, 1, 1, 1), (32, 1, 2, 2)), (UNTIED, SHARDED, "--pipeline-model-parallel-layout", "Et|tttL")),
    Mix((1, 1, 2), ((16, 1, 2, 2), (32, 2, 1, 2)), (SHARDED, "--pipeline-model-parallel-layout", "E|tt|t|tL")),
)
MIXES_OF_8 = (
    Mix((2, 1, 2), ((16, 1, 1, 1), (32, 4, 1, 1)), (SP, SHARDED)),
    Mix((2, 2, 2), ((16, 1, 1, 1), (32, 4, 2, 1)), (SP, UNTIED)),
)


@pytest.mark.parametrize(
    "mixes",
    [MIXES_OF_4[:7], pytest.param((*MIXES_OF_4[7:], UNEVEN), marks=pytest.mark.long)],
    ids=["the first", "all others"],
)
def test_gradients_of_every_mix_equal_the_reference(mixes: tuple[Mix, ...]) -> None:
    for result in run_ranks(_gradient_errors, 4, mixes, "float64", timeout=280, prepare=import_megatron)[0]:
        _within(result, 1e-9)


@pytest.mark.parametrize(
    "mixes",
    [
        (*INTERLEAVED[:3], RECOMPUTING[0], LAID_OUT[0]),
        pytest.param((*INTERLEAVED[3:], *RECOMPUTING[1:], LAID_OUT[1]), marks=pytest.mark.long),
    ],
    ids=["the first", "all others"],
)
def test_gradients_with_interleaved_schedules_and_recomputation_per_strategy_equal_the_reference(
    mixes: tuple[Mix, ...],
) -> None:
    if RELEASE < (0, 18):
        mixes = tuple(each for each in mixes if each in RECOMPUTING[:-1])
    for result in run_ranks(_gradient_errors, 4, mixes, "float64", timeout=280, prepare=import_megatron)[0]:
        _within(result, 1e-9)


@pytest.mark.skipif(RELEASE >= (0, 18), reason="exact from 0.18 on")
def test_virtual_stages_are_refused_where_they_are_not_exact() -> None:
    with pytest.raises(AssertionError, match="virtual pipeline stages need megatron-core"):
        run_ranks(_gradient_errors, 4, (INTERLEAVED[1],), "float64", timeout=120, prepare=import_megatron)


@pytest.mark.long
def test_gradients_with_every_way_to_switch_equal_the_reference() -> None:
    for result in run_ranks(_gradient_errors, 4, SWITCHED, "float64", timeout=280, prepare=import_megatron)[0]:
        _within(result, 1e-9)


def test_folds_in_bf16_round_what_guests_found_and_nothing_else() -> None:
    (errors,) = run_ranks(_gradient_errors, 4, (IN_BF16,), "float64", timeout=120, prepare=import_megatron)[0]
    assert _within(errors, 2**-6) > 2**-12
    assert errors["loss"] < 1e-9


@pytest.mark.long
def test_single_precision_is_no_worse_than_a_static_run_of_the_same_home() -> None:
    mixes = [mix for each in MIXES_OF_4[1:7:2] for mix in (dataclasses.replace(each, strategies=()), each)]
    results = run_ranks(_gradient_errors, 4, tuple(mixes), "float32", timeout=280, prepare=import_megatron)[0]
    for static, mixed in zip(results[::2], results[1::2], strict=True):
        _within(mixed, max(1e-6, 2 * _within(static, 1e-5)))


@pytest.mark.long
def test_gradients_on_eight_ranks_equal_the_reference() -> None:
    for result in run_ranks(_gradient_errors, 8, MIXES_OF_8, "float64", timeout=280, prepare=import_megatron)[0]:
        _within(result, 1e-9)


@pytest.mark.parametrize(
    ("fault", "mix"),
    [
        ("fold_dropped", OVERLAPPED),
        ("fold_twice", OVERLAPPED),
        ("fc1_contiguous", OVERLAPPED),
        ("sibling_reduces_early", OVERLAPPED),
        ("segment_means", OVERLAPPED),
        pytest.param("fillers_weigh", FILLED, marks=pytest.mark.skipif(RELEASE < (0, 18), reason="vpp is refused")),
        ("prefetched_wrong", PREFETCHED),
    ],
)
def test_the_comparison_sees(fault: str, mix: Mix) -> None:
    """Negative controls: each fault is one that gives plausible losses and no error."""
    (errors,) = run_ranks(_gradient_errors, 4, (mix,), "float64", fault, timeout=120, prepare=import_megatron)[0]
    with pytest.raises(AssertionError, match="is off by"):
        _within(errors, 1e-4)


def _within(result: dict[str, Any], bound: float) -> float:
    """Check every parameter's error and the loss's; returns, and prints, the largest."""
    errors = {name: value for name, value in result.items() if name != "mix"}
    worst = max(errors, key=lambda name: errors[name])
    print(f"{result['mix']}: {errors[worst]:.2e} ({worst}), bound {bound:.2e}")
    assert errors[worst] <= bound, f"{result['mix']}: {worst} is off by {errors[worst]:.2e}, bound {bound:.2e}"
    return errors[worst]


def test_a_guest_adds_256_micro_batches_up_in_single_precision_where_home_does() -> None:
    """A large gradient, and 255 of a thousandth of it, each of which bf16 would lose."""
    flags = (("--bf16",), ("--bf16", "--grad-reduce-in-bf16"))
    single, half = run_ranks(_sums_of_micro_batches, 1, flags, timeout=240, prepare=import_megatron)[0]
    assert {(dtype, travels) for _, dtype, travels in single} == {("torch.float32", "torch.float32")}
    assert all(abs(total - 1.255) < 1e-3 for total, *_ in single) and len(single) > 3
    # As the user asked; and what the first would be, did it not hold.
    assert {(dtype, travels) for _, dtype, travels in half} == {("torch.bfloat16", "torch.bfloat16")}
    assert all(total == 1.0 for total, *_ in half)


# --------------------------------------------------------------------------------------------------------- on the ranks


def _sums_of_micro_batches(
    rank: int, world: int, jobs: tuple[tuple[str, ...], ...]
) -> list[list[tuple[float, str, str]]]:
    """Per job and every sixth bf16 parameter of a guest (which has home's layout, so that a rank alone will do): the sum of its
    gradients, their precision, and that in which a fold carries them."""
    from hotspa_megatron.hooks import install
    from hotspa_megatron.hooks.model import build_guest, read_home
    from hotspa_megatron.hooks.patching import Patches
    from hotspa_megatron.hooks.session import Session

    found = []
    for flags in jobs:
        builders: list[Any] = []
        prepare, patches = Session.prepare_runner, Patches()

        def prepared(self: Session, model: list[Any], build: Any, into: Any = builders, original: Any = prepare) -> Any:
            into.append(build)
            return original(self, model, build)

        patches.set(Session, "prepare_runner", prepared)
        session, model, _ = start(Mix((1, 1, 1), (), flags), world, torch.bfloat16)
        patches.undo_all()
        home = session.resolved.home.strategy
        logical = read_home(model, home)
        guest = build_guest(session.states, home, logical, logical.home_layers, builders[0])
        guest.materialise()
        sums = []
        for parameter in list(guest.parameters.values())[::6]:
            assert parameter.dtype is torch.bfloat16
            parameter.data.zero_()
            for micro_batch in range(256):
                (parameter * (0.001 if micro_batch else 1.0)).sum().backward()
            total = parameter.main_grad.flatten()[-1]
            sums.append((float(total), str(total.dtype), str(session.runner.moves._fold_dtype)))
        found.append(sums)
        install.uninstall()
    return found


def _gradient_errors(
    rank: int, world: int, mixes: tuple[Mix, ...], dtype: str, fault: str = ""
) -> list[dict[str, Any]]:
    """For each mix the error of every logical parameter, relative: max |a - b| / max |b|; and of the logged loss."""
    with double_precision() if dtype == "float64" else single_precision():
        return [_errors_of(mix, rank, world, getattr(torch, dtype), fault) for mix in mixes]


def _errors_of(mix: Mix, rank: int, world: int, dtype: torch.dtype, fault: str) -> dict[str, Any]:
    from hotspa_megatron.hooks import get_batch, install
    from hotspa_megatron.hooks.patching import Patches

    session, model, forward_step = start(mix, world, dtype)
    runner, layout = session.runner, session.runner.moves.layout
    parameters = [_value(parameter) for parameter in layout.parameters]
    for piece in layout.pieces(rank):
        local = runner.moves.parameters[piece.parameter].data
        local[region(piece.start, piece.box.shape)] = parameters[piece.parameter][region(piece.box.lo, piece.box.shape)]
    patches = Patches()
    get_batch.serve(forward_step, patches, adapter=None)
    if fault:
        _inject(fault, session, patches)
    shape = arguments.shape_of(session.args)
    named = {parameter.name: value for parameter, value in zip(layout.parameters, parameters, strict=True)}
    errors: dict[str, Any] = {"mix": str(mix)}
    # A faulty step leaves states behind that a later one may refuse to start from.
    for number, lengths in enumerate(LENGTHS[:1] if fault else LENGTHS):
        documents = [document(number, index, length) for index, length in enumerate(lengths)]
        loader, step = step_of(session, documents)
        for chunk in model:
            chunk.zero_grad_buffer()
        reports, record = runner.run(forward_step_func=forward_step, step=step, loader=loader)
        assert bool(reports) == (session.resolved.home.strategy.coordinates(rank).pp == mix.home[2] - 1)
        for guest in runner._guests.values():
            assert guest.resident_bytes == 0
        gathered = _gathered(runner)
        if rank:  # all of them hold the same, and share the cores
            continue
        loss, targets, expected = loss_and_gradients(
            named, shape, [torch.from_numpy(each) for each in documents], limit=SEQ_LENGTH
        )
        ((total, tokens),) = record.losses.values()
        assert tokens == targets
        _worsen(errors, "loss", abs(total - loss) / loss)
        for name, gradient in gathered.items():
            reference = expected[name] / targets
            _worsen(errors, name, float((gradient - reference).abs().max() / reference.abs().max()))
    patches.undo_all()
    install.uninstall()
    return errors


def _worsen(errors: dict[str, Any], name: str, error: float) -> None:
    # A comparison with NaN is never true: it must not pass for small.
    errors[name] = max(errors.get(name, 0.0), error if error == error else float("inf"))


def _value(parameter: LogicalParameter) -> torch.Tensor:
    """The whole tensor of a parameter, in double precision but exact in single, from its name alone, whatever the layout."""
    seed = int.from_bytes(hashlib.sha256(parameter.name.encode()).digest()[:4], "big")
    values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32) * 0.1
    if parameter.name.endswith("norm.weight"):
        values += 1
    return values.double()


def _gathered(runner: Any) -> dict[str, torch.Tensor]:
    """Whole gradients in double precision, from the elements that each rank's optimizer would read."""
    moves = runner.moves
    own = [
        (piece, moves.parameters[piece.parameter].main_grad[region(piece.start, piece.box.shape)].double().clone())
        for piece in moves.owned.pieces(dist.get_rank())
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    whole = {
        index: torch.full(parameter.shape, float("nan"), dtype=torch.float64)
        for index, parameter in enumerate(moves.layout.parameters)
    }
    for theirs in everyone:
        for piece, values in theirs:
            target = whole[piece.parameter][region(piece.box.lo, piece.box.shape)]
            # Whoever holds a copy must hold the same: replicas may not drift.
            assert bool((target.isnan() | (target == values)).all()), moves.layout.parameters[piece.parameter].name
            target.copy_(values)
    return {moves.layout.parameters[index].name: value for index, value in whole.items()}


def _inject(fault: str, session: Any, patches: Any) -> None:
    from hotspa_megatron.hooks import forward_backward
    from hotspa_megatron.hooks.data import SegmentIterator
    from hotspa_megatron.planning.param_layout import model_layout
    from hotspa_megatron.runtime.binding import Copies

    runner, moves = session.runner, session.runner.moves
    match fault:
        case "fold_dropped":
            patches.set(Copies, "add", lambda self: None)
        case "fold_twice":
            add = Copies.add

            def twice(self: Copies) -> None:
                add(self)
                add(self)

            patches.set(Copies, "add", twice)
        case "prefetched_wrong":
            prefetch = moves.prefetch

            def wrong(resident: Any, later: Any) -> None:
                prefetch(resident, later)
                if moves._fetch is not None:
                    pending, parameters = moves._fetch.pending, moves._fetch.guest.parameters.values()
                    finish = pending.finish

                    def spoil() -> None:
                        finish()
                        for parameter in parameters:
                            parameter.data.mul_(1.5)

                    pending.finish = spoil

            moves.prefetch = wrong
        case "fc1_contiguous":
            wrong = [dataclasses.replace(each, split_stride=1) for each in moves.layout.parameters]
            (guest,) = runner._guests.values()
            right = moves.layout, guest.layout
            moves.layout, guest.layout = (model_layout(wrong, each.strategy, [range(4)], tied=False) for each in right)
            moves._switch_route(None, guest.state.strategy)  # kept: plans are made once
            moves.layout, guest.layout = right
        case "sibling_reduces_early":
            # Every segment may start home's reduction, as if each were the step's last.
            @contextmanager
            def without_no_sync(self: Any, segment: Any) -> Iterator[None]:
                yield

            for chunk in runner._model:
                for group in chunk.bucket_groups:
                    group.is_first_batch = False
                    group.golden_per_param_grad_ready_counts = dict.fromkeys(group.params, 1)
            patches.set(forward_backward._HomeSchedule, "accumulating", without_no_sync)
        case "fillers_weigh":
            build = SegmentIterator._build

            def weighed(self: SegmentIterator, batch: tuple[int, ...], total: int) -> Any:
                built = build(self, batch, total)
                if batch:
                    return built
                # Weights that sum to nothing: the step's tokens do not tell.
                positions = torch.arange(built.labels.numel()).view_as(built.labels)
                weights = torch.linspace(-1, 1, built.labels.numel()).view_as(built.loss_mask)
                return dataclasses.replace(built, labels=positions, loss_mask=weights)

            patches.set(SegmentIterator, "_build", weighed)
        case "segment_means":
            schedule = runner._schedule

            def mean(forward_step_func: Any, model: Any, iterator: Any, tally: Any, **options: Any) -> Any:
                def scaled(data_iterator: Any, module: Any) -> Any:
                    output, loss_func = forward_step_func(data_iterator, module)

                    def loss(result: Any) -> Any:
                        value, tokens, report = loss_func(result)
                        return value / tokens, tokens, report

                    return output, loss

                return schedule(scaled, model, iterator, tally, **options)

            runner._schedule = mean
