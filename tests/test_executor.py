"""Plans carried out: on any number of ranks in one process, and on real gloo ranks.

Every comparison is with whole tensors cut independently of the layouts (``layouts.expected``), and is exact. The
negative controls show that the comparison sees what it must see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspa_megatron.planning.param_layout import Layout, Placement, RankPieces, model_layout
from hotspa_megatron.planning.reshard_plan import RankPlan, ReshardPlan, plan_reshard
from hotspa_megatron.runtime.executor import begin, execute
from hotspa_megatron.runtime.transport import BatchedTransport, Exchange, Transport
from hotspa_megatron.strategy import stage_layers
from tests.layouts import expected, filled, full_tensors, layout, layouts, model_shape, optimizer_shards
from tests.mailbox import Mailboxes, MailboxTransport
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
    change: Callable[[RankPlan], RankPlan] = lambda part: part,
) -> None:
    """Carry a plan out for all ranks in this process. ``sources[i][rank]`` and ``destination[rank]`` hold tensors."""
    mailboxes: Mailboxes = {}
    pending = [
        begin(
            change(plan.for_rank(rank)),
            sources=[of[rank] if rank < len(of) else {} for of in sources],
            destination=destination[rank] if rank < len(destination) else {},
            transport=MailboxTransport(mailboxes, rank),
            accumulate=accumulate,
            dtype=dtype,
        )
        for rank in range(max(map(len, (*sources, destination))))
    ]
    for _ in plan.transfers:
        # No rank may wait for a message of a phase that its sender has not started.
        for one in pending:
            one.advance()
    for one in pending:
        one.finish()


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


def test_a_fold_is_added_at_finish_and_may_lose_its_source_before() -> None:
    home, guest = layout(SHAPE, tp=2), layout(SHAPE, dp=2)
    plan = plan_reshard([guest], home, itemsize=4)
    own, full = full_tensors(home, seed=1), full_tensors(home, seed=2)
    gradients, sources = everywhere(own, home), everywhere(full, guest)
    mailboxes: Mailboxes = {}
    pending = [
        begin(
            plan.for_rank(rank),
            sources=[sources[rank]],
            destination=gradients[rank],
            transport=MailboxTransport(mailboxes, rank),
            accumulate=True,
            dtype=torch.float32,
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
        mailboxes: Mailboxes = {}
        try:
            execute(
                plan.for_rank(1),
                sources=[source],
                destination=destination,
                transport=MailboxTransport(mailboxes, 1),
                accumulate=False,
                dtype=torch.float32,
            )
        finally:
            assert not mailboxes

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
        execute(
            plan.for_rank(0),
            sources=[expected(full, of, 0)],
            destination=filled(of, 0, 0.0),
            transport=Forbidden({}, 0),
            accumulate=False,
            dtype=torch.float32,
        )


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
        if part.rank != 2:
            return part
        (phase,) = part.phases
        return dataclasses.replace(part, phases=(dataclasses.replace(phase, receives=phase.receives[1:]),))

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


# The contract of a transport, for every implementation

CONTRACT_RANKS = 4


def contract_first(rank: int, transport: Transport) -> tuple[Exchange, list[torch.Tensor]]:
    """Rank 0 sends two messages to rank 1; 1 and 2 exchange other dtypes; rank 3 has nothing."""
    received: list[torch.Tensor] = []
    if rank == 0:
        transport.submit_send(torch.arange(5.0), 1)
        transport.submit_send(torch.arange(7, dtype=torch.bfloat16), 1)
    elif rank == 1:
        received = [torch.zeros(5), torch.zeros(7, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.float64)]
        transport.submit_receive(received[0], 0)
        transport.submit_receive(received[1], 0)
        transport.submit_receive(received[2], 2)
        transport.submit_send(torch.full((100_000,), 4.0), 2)
    elif rank == 2:
        received = [torch.zeros(100_000)]
        transport.submit_send(torch.full((3,), 1 / 3, dtype=torch.float64), 1)
        transport.submit_receive(received[0], 1)
    return transport.run(), received


def contract_second(rank: int, transport: Transport) -> tuple[Exchange, list[torch.Tensor]]:
    """A run sends only what was submitted since the last one: here a ring over all ranks."""
    received = [torch.zeros(1)]
    transport.submit_send(torch.full((1,), float(rank)), (rank + 1) % CONTRACT_RANKS)
    transport.submit_receive(received[0], (rank - 1) % CONTRACT_RANKS)
    return transport.run(), received


def contract_check(rank: int, first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    if rank == 1:
        assert torch.equal(first[0], torch.arange(5.0))
        assert torch.equal(first[1], torch.arange(7, dtype=torch.bfloat16))
        assert torch.equal(first[2], torch.full((3,), 1 / 3, dtype=torch.float64))
    if rank == 2:
        assert torch.equal(first[0], torch.full((100_000,), 4.0))
    assert second[0].item() == (rank - 1) % CONTRACT_RANKS


def test_mailbox_transport_keeps_the_contract() -> None:
    mailboxes: Mailboxes = {}
    transports = [MailboxTransport(mailboxes, rank) for rank in range(CONTRACT_RANKS)]
    results = []
    for step in (contract_first, contract_second):
        runs = [step(rank, transports[rank]) for rank in range(CONTRACT_RANKS)]
        for exchange, _ in runs:
            exchange.wait()
        results.append([received for _, received in runs])
    for rank in range(CONTRACT_RANKS):
        contract_check(rank, results[0][rank], results[1][rank])


def _gloo_contract(rank: int, world_size: int) -> None:
    # A group in another order than the world: peers are global ranks all the same.
    group = dist.new_group([3, 1, 0, 2])
    for of in (None, group):
        transport = BatchedTransport(of)
        results = []
        for step in (contract_first, contract_second):
            exchange, received = step(rank, transport)
            exchange.wait()
            results.append(received)
        contract_check(rank, *results)


def test_gloo_transport_keeps_the_contract() -> None:
    run_ranks(_gloo_contract, CONTRACT_RANKS)


def _gloo_moves(rank: int, world_size: int) -> None:
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
        plans = [
            plan.for_rank(rank)
            for plan in (
                plan_reshard([home], guest, itemsize=4),
                plan_reshard([guest], home, itemsize=4),
                plan_reshard([guest], shards, itemsize=4),
            )
        ]
        for part, source, destination, accumulate in (
            (plans[0], parameters, there, False),
            (plans[1], there, back, False),
            (plans[2], there, gradients, True),
        ):
            execute(
                part,
                sources=[source],
                destination=destination,
                transport=transport,
                accumulate=accumulate,
                dtype=torch.float32,
            )
        assert equal([there], [expected(full, guest, rank) if here else {}])
        assert equal([back], [expected(full, home, rank)])
    masks = owned(shards, rank, gradients)
    whole = expected(full, home, rank)
    for index, gradient in gradients.items():
        assert torch.equal(gradient, whole[index] * (1 + len(guests) * masks[index]))


def test_four_gloo_ranks_move_parameters_there_and_back_and_fold() -> None:
    run_ranks(_gloo_moves, 4)
