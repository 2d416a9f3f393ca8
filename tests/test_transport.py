"""The contract of a transport, for every implementation: one suite, run on the fake, on gloo and, where there are GPUs, NCCL."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from hotspa_megatron.runtime.transport import BatchedTransport, Exchange, Transport
from tests.mailbox import Mailboxes, MailboxTransport, on_ranks
from tests.spawn import run_ranks

RANKS = 4


def contract(rank: int, transport: Transport, device: str = "cpu") -> None:
    """All that the executor relies on, seen from one of four ranks."""
    for check in (_messages_of_any_kind, _runs_send_what_is_new, _moves_overlap, _sent_in_place_and_received_in_place):
        check(rank, transport, device)


def _messages_of_any_kind(rank: int, transport: Transport, device: str) -> None:
    """Rank 0 sends two messages to rank 1; 1 and 2 exchange other dtypes and sizes; rank 3 has nothing."""
    tag = transport.next_tag()
    expected: list[torch.Tensor] = []
    if rank == 0:
        transport.submit_send(torch.arange(5.0, device=device), 1, tag)
        transport.submit_send(torch.arange(7, dtype=torch.bfloat16, device=device), 1, tag)
    elif rank == 1:
        third = torch.full((3,), 1 / 3, dtype=torch.float64, device=device)
        expected = [torch.arange(5.0, device=device), torch.arange(7, dtype=torch.bfloat16, device=device), third]
        transport.submit_send(torch.full((100_000,), 4.0, device=device), 2, tag)
    elif rank == 2:
        expected = [torch.full((100_000,), 4.0, device=device)]
        transport.submit_send(torch.full((3,), 1 / 3, dtype=torch.float64, device=device), 1, tag)
    received = [torch.zeros_like(each) for each in expected]
    for buffer, sender in zip(received, (0, 0, 2) if rank == 1 else (1,), strict=False):
        transport.submit_receive(buffer, sender, tag)
    transport.run().wait()
    assert all(torch.equal(*pair) for pair in zip(received, expected, strict=True))


def _runs_send_what_is_new(rank: int, transport: Transport, device: str) -> None:
    """A run sends only what was submitted since the last one: here a ring, and then nothing."""
    tag, received = transport.next_tag(), torch.zeros(1, device=device)
    transport.submit_send(torch.full((1,), float(rank), device=device), (rank + 1) % RANKS, tag)
    transport.submit_receive(received, (rank - 1) % RANKS, tag)
    transport.run().wait()
    assert received.item() == (rank - 1) % RANKS
    transport.run().wait()


def _moves_overlap(rank: int, transport: Transport, device: str) -> None:
    """Two runs under way between the same ranks, and more of the first behind: values do not cross.

    Where moves cannot be queued whole, one end may have started less of a move than the other when the next begins.
    """
    first, second = transport.next_tag(), transport.next_tag()
    peer = rank ^ 1
    early = 3 if transport.pace.on_stream or rank % 2 else 1
    received = [torch.zeros(50, device=device) for _ in range(4)]

    def exchange(number: int, tag: int) -> Exchange:
        transport.submit_send(torch.full((50,), 10.0 * rank + number, device=device), peer, tag)
        transport.submit_receive(received[number], peer, tag)
        return transport.run()

    under_way = [exchange(number, first) for number in range(early)]
    under_way.append(exchange(3, second))
    under_way += [exchange(number, first) for number in range(early, 3)]
    for each in under_way:
        each.wait()
    assert [tensor.unique().tolist() for tensor in received] == [[10.0 * peer + number] for number in range(4)]


def _sent_in_place_and_received_in_place(rank: int, transport: Transport, device: str) -> None:
    """Slices of a larger tensor travel without touching what lies around them."""
    tag, peer = transport.next_tag(), rank ^ 1
    whole = torch.arange(30.0, device=device) + 100 * rank
    transport.submit_send(whole[:10], peer, tag)
    transport.submit_receive(whole[10:20], peer, tag)
    transport.run().wait()
    own, theirs = (torch.arange(30.0, device=device) + 100 * of for of in (rank, peer))
    assert torch.equal(whole, torch.cat([own[:10], theirs[:10], own[20:]]))


def test_the_fake_keeps_the_contract() -> None:
    mailboxes = Mailboxes()
    on_ranks(mailboxes, RANKS, lambda rank: contract(rank, MailboxTransport(mailboxes, rank)))
    assert mailboxes.is_empty


def test_the_real_one_keeps_the_contract_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a gloo of our own, whose ranks are threads."""
    mailboxes, here = Mailboxes(), threading.local()

    def post(buffer: torch.Tensor, peer: int, tag: int, group: object, *, sending: bool) -> Exchange:
        assert group == "a group"
        one = MailboxTransport(mailboxes, here.rank)
        (one.submit_send if sending else one.submit_receive)(buffer, peer, tag)
        return one.run()

    def irecv(buffer: torch.Tensor, peer: int, group: object = None, tag: int = 0) -> Exchange:
        return post(buffer, peer, tag, group, sending=False)

    def isend(buffer: torch.Tensor, peer: int, group: object = None, tag: int = 0) -> Exchange:
        return post(buffer, peer, tag, group, sending=True)

    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(dist, "irecv", irecv)
    monkeypatch.setattr(dist, "isend", isend)

    def run(rank: int) -> None:
        here.rank = rank
        contract(rank, BatchedTransport("a group"))  # type: ignore[arg-type]

    on_ranks(mailboxes, RANKS, run)
    assert mailboxes.is_empty and mailboxes.delivered > RANKS


def _gloo(rank: int, world_size: int) -> None:
    # A group in another order than the world: peers are global ranks all the same.
    for group in (None, dist.new_group([3, 1, 0, 2])):
        contract(rank, BatchedTransport(group))


def test_gloo_keeps_the_contract() -> None:
    run_ranks(_gloo, RANKS)


def _gpu(rank: int, world_size: int, backend: str) -> None:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, rank=rank, world_size=world_size)
    contract(rank, BatchedTransport(), "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")
def test_nccl_keeps_the_contract() -> None:
    run_ranks(_gpu, RANKS, "nccl", init_process_group=False, timeout=120)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gloo_carries_gpu_tensors_through_the_host() -> None:
    run_ranks(_gpu, RANKS, "gloo", init_process_group=False, timeout=120)
