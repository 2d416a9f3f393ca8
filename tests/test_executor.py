"""Plans carried out: on any number of ranks in one process, and on real gloo ranks.

Every comparison is with whole tensors cut independently of the layouts (``layouts.expected``), and is exact. The
negative controls show that the comparison sees what it must see. Buffers are so small that everything travels in pieces.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.profiler import profile

from hotspa_megatron.planning.param_layout import ExpertAxes, Layout, Placement, RankPieces, model_layout
from hotspa_megatron.planning.regions import Cell
from hotspa_megatron.planning.reshard_plan import RankPlan, ReshardPlan, plan_reshard
from hotspa_megatron.planning.topology import LinkClass, Topology
from hotspa_megatron.runtime.binding import Binder, Sizes, cut
from hotspa_megatron.runtime.executor import CHUNK_BYTES, Reshard
from hotspa_megatron.runtime.storage import flatten
from hotspa_megatron.runtime.transport import BatchedTransport, Exchange, Pace
from hotspa_megatron.strategy import Strategy, stage_layers
from tests.layouts import (
    expected,
    filled,
    full_tensors,
    layout,
    layouts,
    mixed_layouts,
    mixed_parameters,
    model_shape,
    optimizer_shards,
)
from tests.mailbox import SMALL_PACE, Mailboxes, MailboxTransport, on_ranks
from tests.spawn import run_ranks

Tensors = Mapping[int, torch.Tensor]
SHAPE = model_shape(tied=True, plain=False)
UNUSED = -1000.0
quick = settings(max_examples=25, deadline=None)


def move(
    plan: ReshardPlan,
    sources: Sequence[Sequence[Tensors]],
    destination: Sequence[Tensors],
    *,
    accumulate: bool = False,
    dtype: torch.dtype = torch.float32,
    pace: Pace = SMALL_PACE,
    chunk_bytes: int = CHUNK_BYTES,
    change: Callable[[RankPlan], RankPlan] = lambda part: part,
) -> int:
    """Carry a plan out for all ranks in this process. ``sources[i][rank]`` and ``destination[rank]`` hold tensors.

    Returns the number of operations.
    """
    mailboxes = Mailboxes()

    def run(rank: int) -> None:
        reshard = Reshard(
            change(plan.for_rank(rank)),
            MailboxTransport(mailboxes, rank, pace),
            accumulate=accumulate,
            dtype=dtype,
            chunk_bytes=chunk_bytes,
        )
        reshard.run(
            sources=[of[rank] if rank < len(of) else {} for of in sources],
            destination=destination[rank] if rank < len(destination) else {},
        )

    on_ranks(mailboxes, max(map(len, (*sources, destination))), run)
    assert mailboxes.is_empty
    return mailboxes.delivered


def everywhere(full: Sequence[torch.Tensor], of: Layout) -> list[dict[int, torch.Tensor]]:
    return [expected(full, of, rank) for rank in range(of.world_size)]


def empty(of: Layout, dtype: torch.dtype = torch.float32) -> list[dict[int, torch.Tensor]]:
    return [filled(of, rank, UNUSED, dtype) for rank in range(of.world_size)]


def equal(left: Sequence[Tensors], right: Sequence[Tensors]) -> bool:
    return len(left) == len(right) and all(
        a.keys() == b.keys() and all(torch.equal(a[index], b[index]) for index in a)
        for a, b in zip(left, right, strict=True)
    )


@quick
@given(layouts(SHAPE), layouts(SHAPE), st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
def test_there_and_back_is_the_identity(home: Layout, guest: Layout, dtype: torch.dtype) -> None:
    full = full_tensors(home, dtype=dtype)
    there, back = empty(guest, dtype), empty(home, dtype)
    move(plan_reshard([home], guest, itemsize=2), [everywhere(full, home)], there, dtype=dtype)
    assert equal(there, everywhere(full, guest))
    move(plan_reshard([guest], home, itemsize=2), [there], back, dtype=dtype)
    assert equal(back, everywhere(full, home))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("guest", [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (1, 2), (2, 2), (3, 4), (1, 3)])
@pytest.mark.parametrize("home", [(1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (1, 2), (2, 2), (3, 4), (1, 3)])
def test_all_pairs_on_twelve_ranks(home: tuple[int, int], guest: tuple[int, int], tied: bool) -> None:
    shape = model_shape(tied=tied)
    first, second = (
        # pp 3 is uneven: stages of 2, 1 and 1 layers.
        layout(shape, tp=tp, pp=pp, dp=12 // (tp * pp), stages=stage_layers(4, pp, 2 if pp == 3 else None))
        for tp, pp in (home, guest)
    )
    full = full_tensors(first)
    there, back = empty(second), empty(first)
    move(plan_reshard([first], second, itemsize=4), [everywhere(full, first)], there)
    assert equal(there, everywhere(full, second))
    move(plan_reshard([second], first, itemsize=4), [there], back)
    assert equal(back, everywhere(full, first))


@quick
@given(layouts(SHAPE), layouts(SHAPE), layouts(SHAPE))
def test_two_layouts_serve_as_sources_at_once(home: Layout, guest: Layout, other: Layout) -> None:
    full = full_tensors(home)
    there = empty(other)
    plan = plan_reshard([home, guest], other, itemsize=4)
    move(plan, [everywhere(full, home), everywhere(full, guest)], there)
    assert equal(there, everywhere(full, other))


def test_optimizer_shards_as_source_fill_a_layout() -> None:
    home, guest = layout(SHAPE, tp=2, dp=3), layout(SHAPE, tp=3, pp=2)
    full = full_tensors(home)
    there = empty(guest)
    move(plan_reshard([optimizer_shards(home)], guest, itemsize=4), [everywhere(full, home)], there)
    assert equal(there, everywhere(full, guest))


# Two phases, pieces, buffers


@quick
@given(st.data(), st.integers(1, 4), st.sampled_from([CHUNK_BYTES, 400]))
def test_what_a_node_lacks_is_relayed_inside_it(data: st.DataObject, gpus_per_node: int, chunk_bytes: int) -> None:
    parameters = mixed_parameters(2)
    home, guest = (data.draw(mixed_layouts(parameters, most_ranks=12)) for _ in range(2))
    cluster = Topology.nodes(max(home.world_size, guest.world_size), gpus_per_node)
    full = full_tensors(home, dtype=torch.bfloat16)
    there = empty(guest, torch.bfloat16)
    plan = plan_reshard([home], guest, itemsize=2, topology=cluster)
    move(plan, [everywhere(full, home)], there, dtype=torch.bfloat16, chunk_bytes=chunk_bytes)
    assert equal(there, everywhere(full, guest))


@quick
@given(layouts(SHAPE), layouts(SHAPE), st.integers(1, 300), st.integers(1, 300))
def test_both_ends_cut_a_message_alike_and_lose_nothing(home: Layout, guest: Layout, piece: int, direct: int) -> None:
    sizes = Sizes(piece=piece, direct=min(direct, piece), buffer=piece)
    plan = plan_reshard([home], guest, itemsize=2)
    parts = [plan.for_rank(rank) for rank in range(max(home.world_size, guest.world_size))]
    for part in parts:
        for message in part.phases[0].sends:
            received = next(m for m in parts[message.peer].phases[0].receives if m.peer == part.rank)
            pieces, theirs = cut(message.cells, sizes), cut(received.cells, sizes)
            assert pieces == theirs
            assert all(sum(map(_numel, each)) <= piece for each in pieces)
            elements = [element for each in pieces for cell in each for element in _elements(cell)]
            assert sorted(elements) == sorted(element for cell in message.cells for element in _elements(cell))


def _numel(cell: Cell) -> int:
    return math.prod(cell.shape)


def _elements(cell: Cell) -> list[tuple[int, ...]]:
    """Parameter and place at both ends of every element."""
    return [
        (cell.parameter, *(a + i for a, i in zip(cell.source_start, at, strict=True)),
         *(b + i for b, i in zip(cell.destination_start, at, strict=True)))
        for at in itertools.product(*map(range, cell.shape))
    ]  # fmt: skip


def _measured(rank: int, world_size: int, chunk_bytes: int) -> tuple[int, int]:
    """Most bytes that a switch takes at a time beside source and destination, and bytes left afterwards."""
    shape = model_shape(layers=8)
    home, guest = layout(shape, tp=4), layout(shape, dp=4)
    source, there = expected(full_tensors(home), home, rank), filled(guest, rank, UNUSED)
    plan = plan_reshard([home], guest, itemsize=4).for_rank(rank)
    transport = BatchedTransport()
    reshard = Reshard(plan, transport, accumulate=False, dtype=torch.float32, chunk_bytes=chunk_bytes)
    with profile(profile_memory=True) as profiled:
        reshard.run(sources=[source], destination=there)
    events = [each for each in profiled.kineto_results.events() if each.name() == "[memory]"]
    held = list(itertools.accumulate(each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())))
    assert equal([there], [expected(full_tensors(guest), guest, rank)])
    return max(held), held[-1]


def test_a_switch_takes_two_chunks_of_memory_and_gives_them_back() -> None:
    small, large = 4096, CHUNK_BYTES
    for most, left in run_ranks(_measured, 4, small):
        assert small < most <= 2 * small and left == 0
    for most, _ in run_ranks(_measured, 4, large):
        assert most > 4 * small


def in_one_run(of: Layout, rank: int, value: float) -> dict[int, torch.Tensor]:
    """Local tensors of ``rank`` that lie one after the other in one flat tensor, as a guest's do."""
    tensors = {index: torch.nn.Parameter(tensor) for index, tensor in filled(of, rank, value).items()}
    flatten(list(tensors.values()))
    return {index: tensor.data for index, tensor in tensors.items()}


def buffers_of(
    plan: ReshardPlan, sources: Sequence[Tensors], destination: Sequence[Tensors], pace: Pace
) -> Sequence[int]:
    """Carry a plan out; returns the bytes of each rank's buffers."""
    mailboxes = Mailboxes()

    def run(rank: int) -> int:
        transport = MailboxTransport(mailboxes, rank, pace)
        reshard = Reshard(plan.for_rank(rank), transport, accumulate=False, dtype=torch.float32)
        pending = reshard.begin(sources=[sources[rank]], destination=destination[rank])
        taken = pending.buffer_bytes
        pending.finish()
        return taken

    return on_ranks(mailboxes, len(sources), run)


def test_runs_of_memory_travel_without_a_buffer() -> None:
    shape = model_shape()
    home, guest = layout(shape, pp=4), layout(shape, dp=4)
    full, plan = full_tensors(home), plan_reshard([home], guest, itemsize=4)
    pace = Pace(piece=1 << 20, direct=1 << 20, buffer=1 << 20, on_stream=False)
    sources, there = ([in_one_run(of, rank, UNUSED) for rank in range(4)] for of in (home, guest))
    for held, wanted in zip(sources, everywhere(full, home), strict=True):
        for index, tensor in held.items():
            tensor.copy_(wanted[index])
    without = buffers_of(plan, sources, there, pace)
    assert equal(there, everywhere(full, guest))
    there = empty(guest)
    with_buffers = buffers_of(plan, everywhere(full, home), there, pace)
    assert equal(there, everywhere(full, guest))
    assert list(without) == [0] * 4 and min(with_buffers) > 0


def test_large_cells_travel_alone_so_that_they_can_go_without_a_buffer() -> None:
    home, guest = layout(SHAPE, tp=2), layout(SHAPE, dp=2)
    full, there = full_tensors(home), empty(guest)
    plan = plan_reshard([home], guest, itemsize=4)
    taken = buffers_of(
        plan, everywhere(full, home), there, Pace(piece=1 << 20, direct=1, buffer=1 << 20, on_stream=False)
    )
    assert equal(there, everywhere(full, guest))
    # Every rank lacks half of each matrix; only those that tp splits by columns need a buffer at the receiver.
    columns = [p for p in home.parameters if p.split_dim == 1]
    needed = sum(math.prod(p.shape) // 2 * 4 for p in columns)
    assert all(needed <= each <= needed + 128 * len(columns) for each in taken)


# Carried out again and again


def test_views_are_found_once_and_again_when_tensors_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(Binder, "to_copy", lambda *a, _original=Binder.to_copy: found.append(1) or _original(*a))
    of = layout(SHAPE, tp=2)
    full = full_tensors(of)
    plan = plan_reshard([of], of, itemsize=4).for_rank(0)
    reshard = Reshard(plan, MailboxTransport(Mailboxes(), 0), accumulate=False, dtype=torch.float32)
    there = {index: torch.nn.Parameter(tensor) for index, tensor in filled(of, 0, UNUSED).items()}
    (storage,) = flatten(list(there.values()))

    def check(source: Tensors, count: int) -> None:
        storage.release()
        storage.materialise()
        reshard.run(sources=[source], destination=there)
        assert equal([there], [source])
        assert len(found) == count

    source = expected(full, of, 0)
    check(source, 1)
    check({index: tensor.view_as(tensor) for index, tensor in source.items()}, 1)
    for tensor in source.values():
        tensor += 1
    check(source, 1)
    moved = {index: tensor.clone() + 1 for index, tensor in source.items()}
    check(moved, 2)
    check(moved, 2)


@pytest.mark.long
def test_a_thousand_moves_leave_memory_threads_and_descriptors_as_they_were() -> None:
    for before, after in run_ranks(_move_often, 4, timeout=250):
        # A page per move would be more than this.
        assert after.pop("resident_bytes") - before.pop("resident_bytes") < 900 * 4096
        assert before == after


def _move_often(rank: int, world_size: int) -> tuple[dict[str, int], dict[str, int]]:
    home, guest = layout(SHAPE, tp=4), layout(SHAPE, dp=4)
    transport = BatchedTransport()
    source, there = expected(full_tensors(home), home, rank), filled(guest, rank, UNUSED)
    gradients = filled(home, rank, 0.0)
    switch = Reshard(
        plan_reshard([home], guest, itemsize=4).for_rank(rank), transport, accumulate=False, dtype=torch.float32
    )
    fold = Reshard(
        plan_reshard([guest], home, itemsize=4).for_rank(rank), transport, accumulate=True, dtype=torch.float32
    )

    def counted() -> dict[str, int]:
        gc.collect()
        return {
            "groups": len(torch.distributed.distributed_c10d._world.pg_map),
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "objects": len(gc.get_objects()) // 100,
            "resident_bytes": psutil.Process().memory_info().rss,
        }

    before: dict[str, int] = {}
    for number in range(1000):
        switch.run(sources=[source], destination=there)
        pending = fold.begin(sources=[there], destination=gradients)
        pending.finish()
        if number == 100:
            before = counted()
    assert equal([there], [expected(full_tensors(guest), guest, rank)])
    return before, counted()


def test_two_folds_and_a_switch_may_be_under_way_at_once() -> None:
    home, guest, other = layout(SHAPE, tp=2, dp=2), layout(SHAPE, dp=4), layout(SHAPE, pp=2, dp=2)
    full, first, second = (full_tensors(home, seed=seed) for seed in (1, 2, 3))
    gradients, there = everywhere(full, home), empty(other)
    mailboxes = Mailboxes()
    fold, switch = plan_reshard([guest], home, itemsize=4), plan_reshard([home], other, itemsize=4)

    def run(rank: int) -> None:
        transport = MailboxTransport(mailboxes, rank)
        folding = Reshard(fold.for_rank(rank), transport, accumulate=True, dtype=torch.float32)
        switching = Reshard(switch.for_rank(rank), transport, accumulate=False, dtype=torch.float32)
        own = expected(full, home, rank)
        under_way = []
        for sums in (first, second):
            source = expected(sums, guest, rank)
            under_way.append(switching.begin(sources=[own], destination=there[rank]))
            under_way.append(folding.begin(sources=[source], destination=gradients[rank]))
            for tensor in source.values():
                tensor.fill_(float("nan"))
        for pending in under_way:
            pending.finish()

    on_ranks(mailboxes, 4, run)
    assert equal(there, everywhere(full, other))
    assert equal(gradients, everywhere([sum(each) for each in zip(full, first, second, strict=True)], home))


# Folds


def owned(of: Placement, rank: int, held: Tensors) -> dict[int, torch.Tensor]:
    """1 where the rank owns an element, 0 elsewhere."""
    masks = {index: torch.zeros(tensor.shape) for index, tensor in held.items()}
    for piece in of.pieces(rank):
        ends = (low + size for low, size in zip(piece.start, piece.box.shape, strict=True))
        masks[piece.parameter][tuple(slice(*ends) for ends in zip(piece.start, ends, strict=True))] = 1
    return masks


@quick
@given(layouts(SHAPE), layouts(SHAPE), layouts(SHAPE), st.booleans())
def test_folds_add_each_guests_sum_once_to_what_home_owns(
    home: Layout, first: Layout, second: Layout, sharded: bool
) -> None:
    target: Placement = optimizer_shards(home) if sharded else home
    own = full_tensors(home, seed=1)
    gradients = everywhere(own, home)
    total = own
    for seed, guest in ((2, first), (3, second)):
        full = full_tensors(guest, seed=seed)
        move(plan_reshard([guest], target, itemsize=4), [everywhere(full, guest)], gradients, accumulate=True)
        total = [a + b for a, b in zip(total, full, strict=True)]
    before, after = everywhere(own, home), everywhere(total, home)
    for rank, held in enumerate(gradients):
        masks = owned(target, rank, held)
        for index, gradient in held.items():
            assert torch.equal(gradient, torch.where(masks[index] == 1, after[rank][index], before[rank][index]))


def test_a_move_is_finished_once() -> None:
    home = layout(SHAPE)
    full = full_tensors(home)
    (there,) = empty(home)
    transport = MailboxTransport(Mailboxes(), 0)
    reshard = Reshard(
        plan_reshard([home], home, itemsize=4).for_rank(0), transport, accumulate=False, dtype=torch.float32
    )
    pending = reshard.begin(sources=everywhere(full, home), destination=there)
    pending.finish()
    with pytest.raises(RuntimeError, match="finished before"):
        pending.finish()
    assert equal([there], everywhere(full, home))


def test_a_fold_is_added_at_finish_and_may_lose_its_source_before() -> None:
    home, guest = layout(SHAPE, tp=2), layout(SHAPE, dp=2)
    plan = plan_reshard([guest], home, itemsize=4)
    own, full = full_tensors(home, seed=1), full_tensors(home, seed=2)
    gradients, sources = everywhere(own, home), everywhere(full, guest)
    mailboxes = Mailboxes()
    pending = [
        Reshard(plan.for_rank(rank), MailboxTransport(mailboxes, rank), accumulate=True, dtype=torch.float32).begin(
            sources=[sources[rank]], destination=gradients[rank]
        )
        for rank in range(2)
    ]
    assert equal(gradients, everywhere(own, home))
    for held in sources:
        for tensor in held.values():
            tensor.fill_(float("nan"))
    for one in pending:
        one.finish()
    assert equal(gradients, everywhere([a + b for a, b in zip(own, full, strict=True)], home))
    with pytest.raises(RuntimeError, match="finished before"):
        pending[0].finish()


def test_replicas_stay_bitwise_equal_when_a_fold_travels_in_less_precision() -> None:
    home, guest = layout(SHAPE, dp=2), layout(SHAPE, tp=2)
    full = [tensor / 3 for tensor in full_tensors(home)]
    gradients = [filled(home, rank, 0.0) for rank in range(2)]
    plan = plan_reshard([guest], home, itemsize=2)
    move(plan, [everywhere(full, guest)], gradients, accumulate=True, dtype=torch.bfloat16)
    assert equal(gradients[:1], gradients[1:])
    parameters = empty(home)
    move(plan, [everywhere(full, guest)], parameters, dtype=torch.bfloat16)
    assert equal(parameters[:1], parameters[1:])


def test_bf16_sums_are_added_to_fp32_gradients_in_fp32() -> None:
    home, guest = layout(SHAPE, tp=2), layout(SHAPE, pp=2)
    full = full_tensors(home, dtype=torch.bfloat16)
    gradients = [filled(home, rank, 1e6) for rank in range(2)]
    plan = plan_reshard([guest], home, itemsize=2)
    move(plan, [everywhere(full, guest)], gradients, accumulate=True, dtype=torch.bfloat16)
    assert equal(gradients, everywhere([tensor.float() + 1e6 for tensor in full], home))


# Tensors as Megatron has them


def test_any_strides_and_no_autograd_graph() -> None:
    home, guest = layout(SHAPE, tp=2), layout(SHAPE, pp=2)
    full = full_tensors(home)

    def strided(tensor: torch.Tensor) -> torch.Tensor:
        """The same values, neither contiguous nor at the start of their storage."""
        view = torch.full((tensor.numel() * 2 + 3,), UNUSED)[3::2].view(tensor.shape[::-1])
        view = view.permute(*reversed(range(tensor.dim())))
        view.copy_(tensor)
        return view.requires_grad_()

    sources = [{index: strided(tensor) for index, tensor in held.items()} for held in everywhere(full, home)]
    there = [{index: torch.nn.Parameter(strided(t).detach()) for index, t in held.items()} for held in empty(guest)]
    assert torch.is_grad_enabled()
    move(plan_reshard([home], guest, itemsize=4), [sources], there)
    assert torch.is_grad_enabled()
    assert equal(there, everywhere(full, guest))
    tensors: list[torch.Tensor] = [tensor for held in there for tensor in held.values()]
    tensors += [tensor for held in sources for tensor in held.values()]
    assert all(tensor.is_leaf and tensor.grad_fn is None and tensor.requires_grad for tensor in tensors)


def test_a_wrong_or_missing_local_tensor_is_named_before_anything_is_sent() -> None:
    home, guest = layout(SHAPE, tp=2), layout(SHAPE, dp=2)
    plan, full = plan_reshard([home], guest, itemsize=4), full_tensors(home)
    name = r"decoder\.layers\.0\.mlp\.linear_fc1\.weight"
    fc1 = next(i for i, p in enumerate(home.parameters) if p.name == name.replace("\\", ""))

    def attempt(source: Tensors, destination: Tensors) -> None:
        mailboxes = Mailboxes()
        try:
            Reshard(plan.for_rank(1), MailboxTransport(mailboxes, 1), accumulate=False, dtype=torch.float32).run(
                sources=[source], destination=destination
            )
        finally:
            assert mailboxes.is_empty and not mailboxes.delivered

    right, target = expected(full, home, 1), filled(guest, 1, 0.0)
    with pytest.raises(RuntimeError, match=rf"rank 1: {name} has shape \(48, 12\) in source layout 0, .* \(24, 12\)"):
        attempt(right | {fc1: full[fc1]}, target)
    with pytest.raises(RuntimeError, match=rf"rank 1: {name} has shape \(24, 12\) in the destination, .* \(48, 12\)"):
        attempt(right, target | {fc1: right[fc1]})
    with pytest.raises(RuntimeError, match=rf"rank 1: {name} is missing from source layout 0"):
        attempt({index: tensor for index, tensor in right.items() if index != fc1}, target)
    with pytest.raises(RuntimeError, match=rf"rank 1: {name} is missing from the destination"):
        attempt(right, {index: tensor for index, tensor in target.items() if index != fc1})


def test_ranks_without_a_part_take_none() -> None:
    class Forbidden(MailboxTransport):
        def run(self) -> Exchange:
            raise AssertionError("this rank has nothing to exchange")

    of = layout(SHAPE, tp=2)
    nobody = plan_reshard([of], RankPieces(of, {}), itemsize=4)
    local_only = plan_reshard([of], of, itemsize=4)
    full = full_tensors(of)
    for plan in (nobody, local_only):
        reshard = Reshard(plan.for_rank(0), Forbidden(Mailboxes(), 0), accumulate=False, dtype=torch.float32)
        reshard.run(sources=[expected(full, of, 0)], destination=filled(of, 0, 0.0))


# Negative controls: these faults raise nothing, so the comparison must see them


def test_control_a_gated_fc1_cut_without_its_stride_is_seen() -> None:
    home, guest = layout(SHAPE, tp=2), layout(SHAPE)
    wrong_parameters = [dataclasses.replace(parameter, split_stride=1) for parameter in home.parameters]
    wrong = [model_layout(wrong_parameters, of.strategy, stage_layers(4, 1), tied=True) for of in (home, guest)]
    full = full_tensors(home)
    there = empty(guest)
    move(plan_reshard([wrong[0]], wrong[1], itemsize=4), [everywhere(full, home)], there)
    right = expected(full, guest, 0)
    different = {home.parameters[index].name for index in right if not torch.equal(there[0][index], right[index])}
    assert different == {
        f"decoder.layers.{layer}.mlp.linear_fc1.{kind}" for layer in range(4) for kind in ("weight", "bias")
    }


def test_control_a_dropped_message_is_seen() -> None:
    home, guest = layout(SHAPE, tp=2, dp=2), layout(SHAPE, dp=4)
    plan, full = plan_reshard([home], guest, itemsize=4), full_tensors(home)

    def drop(part: RankPlan) -> RankPlan:
        (phase,) = part.phases
        kept = {
            "sends": tuple(message for message in phase.sends if (part.rank, message.peer) != (3, 2)),
            "receives": tuple(message for message in phase.receives if (message.peer, part.rank) != (3, 2)),
        }
        packed_as = tuple(range(len(kept["sends"])))
        return dataclasses.replace(part, phases=(dataclasses.replace(phase, **kept, packed_as=packed_as),))

    there = empty(guest)
    move(plan, [everywhere(full, home)], there, change=drop)
    right = everywhere(full, guest)
    assert [equal([there[rank]], [right[rank]]) for rank in range(4)] == [True, True, False, True]


def test_control_a_fold_added_twice_is_seen() -> None:
    home, guest = layout(SHAPE, tp=2), layout(SHAPE, pp=2)
    plan, full = plan_reshard([guest], home, itemsize=4), full_tensors(home)
    gradients = [filled(home, rank, 0.0) for rank in range(2)]
    move(plan, [everywhere(full, guest)], gradients, accumulate=True)
    assert equal(gradients, everywhere(full, home))
    move(plan, [everywhere(full, guest)], gradients, accumulate=True)
    assert not equal(gradients, everywhere(full, home))


# Real ranks


def _gloo_moves(rank: int, world_size: int, chunk_bytes: int) -> None:
    home = layout(SHAPE, tp=2, pp=2)
    guests = [
        layout(SHAPE, dp=4),
        layout(SHAPE, tp=4),
        layout(SHAPE, pp=4),
        layout(SHAPE, tp=3),
        layout(SHAPE, cp=2, dp=2),
    ]
    full = full_tensors(home)
    transport = BatchedTransport()
    gradients = expected(full, home, rank)
    shards = optimizer_shards(home)
    for guest in guests:
        here = rank < guest.world_size
        there = filled(guest, rank, UNUSED) if here else {}
        back = filled(home, rank, UNUSED)
        parameters = expected(full, home, rank)
        for plan, source, destination, accumulate in (
            (plan_reshard([home], guest, itemsize=4), parameters, there, False),
            (plan_reshard([guest], home, itemsize=4), there, back, False),
            (plan_reshard([guest], shards, itemsize=4), there, gradients, True),
        ):
            Reshard(
                plan.for_rank(rank), transport, accumulate=accumulate, dtype=torch.float32, chunk_bytes=chunk_bytes
            ).run(sources=[source], destination=destination)
        assert equal([there], [expected(full, guest, rank) if here else {}])
        assert equal([back], [expected(full, home, rank)])
    masks = owned(shards, rank, gradients)
    whole = expected(full, home, rank)
    for index, gradient in gradients.items():
        assert torch.equal(gradient, whole[index] * (1 + len(guests) * masks[index]))


def _gloo_ways(rank: int, world_size: int) -> None:
    """A -> B -> A, and A -> B -> C beside A -> C, with what a node lacks entering it once."""
    parameters = mixed_parameters(2)
    experts = ExpertAxes(experts=6, ep=2)
    first, second, third = (
        model_layout(parameters, Strategy(tp=tp, cp=1, pp=pp, dp=4 // (tp * pp)), stages, tied=False, experts=grid)
        for tp, pp, stages, grid in (
            (2, 2, [[0], [1]], experts),
            (1, 1, [[0, 1]], experts),
            (4, 1, [[0, 1]], ExpertAxes(experts=6, tp=4)),
        )
    )
    cluster, transport = Topology.nodes(world_size, 2), BatchedTransport()
    full = full_tensors(first, dtype=torch.bfloat16)
    relays = 0

    def moved(source: Layout, held: Tensors, destination: Layout) -> dict[int, torch.Tensor]:
        nonlocal relays
        plan = plan_reshard([source], destination, itemsize=2, topology=cluster)
        assert plan.link_bytes[LinkClass.INTER_NODE] == plan.floors[LinkClass.INTER_NODE]
        relays += len(plan.transfers) > 1
        there = filled(destination, rank, UNUSED, torch.bfloat16)
        part = plan.for_rank(rank)
        Reshard(part, transport, accumulate=False, dtype=torch.bfloat16, chunk_bytes=2000).run(
            sources=[held], destination=there
        )
        return there

    own = expected(full, first, rank)
    there = moved(first, own, second)
    assert equal([there], [expected(full, second, rank)])
    assert equal([moved(second, there, first)], [own])
    straight, around = moved(first, own, third), moved(second, there, third)
    assert equal([straight], [around]) and equal([around], [expected(full, third, rank)])
    assert relays, "no move took two phases: the case is wrong"


def test_on_gloo_a_way_back_is_the_identity_and_a_detour_changes_nothing_in_two_phases() -> None:
    run_ranks(_gloo_ways, 4)


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, 1000])
def test_four_gloo_ranks_move_parameters_there_and_back_and_fold(chunk_bytes: int) -> None:
    run_ranks(_gloo_moves, 4, chunk_bytes)
