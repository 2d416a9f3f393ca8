"""The part of gpu_check.sh that is Python: each check ends with an assertion, and prints what it measured.

With ``--device cpu`` it runs on tiny tensors without a GPU: that shows that the checks run, and nothing about speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hotspa_megatron.planning.known_models import KNOWN_MODELS
from hotspa_megatron.planning.param_layout import Layout, gpt_parameters, model_layout
from hotspa_megatron.planning.reshard_plan import plan_reshard
from hotspa_megatron.runtime.binding import Binder, Copies, Sizes
from hotspa_megatron.runtime.executor import Reshard
from hotspa_megatron.runtime.transport import NCCL_PACE, BatchedTransport
from hotspa_megatron.strategy import Strategy, stage_layers
from tests.layouts import expected, filled, full_tensors
from tests.mailbox import Mailboxes, MailboxTransport, on_ranks

Tensors = dict[int, torch.Tensor]


class Check:
    """The checks, on one device. ``shape``: a few layers of a 7B model, or of a tiny one."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.is_cuda = device, device.type == "cuda"
        known = KNOWN_MODELS["llama-7b"]
        if self.is_cuda:
            self.shape = dataclasses.replace(known, num_layers=2)
        else:
            self.shape = dataclasses.replace(
                known, num_layers=2, hidden_size=64, num_attention_heads=8, num_query_groups=8, kv_channels=8,
                ffn_hidden_size=96, padded_vocab_size=128,
            )  # fmt: skip

    def layout(self, **axes: int) -> Layout:
        strategy = Strategy(**({"tp": 1, "cp": 1, "pp": 1, "dp": 1} | axes))
        layers = stage_layers(self.shape.num_layers, strategy.pp)
        return model_layout(gpt_parameters(self.shape), strategy, layers, tied=False)

    def there(self, tensors: Tensors) -> Tensors:
        return {index: tensor.to(self.device) for index, tensor in tensors.items()}

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of a run; on the device, queueing included."""
        taken = []
        for _ in range(7):
            self.wait()
            started = time.perf_counter()
            run()
            self.wait()
            taken.append(time.perf_counter() - started)
        return statistics.median(taken[2:])

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    # ------------------------------------------------------------------------------------------------------ the checks

    def kernels(self) -> None:
        """Packing, unpacking and adding of tp4 -> dp4, beside a plain copy of as many bytes."""
        home, guest = self.layout(tp=4), self.layout(dp=4)
        part = plan_reshard([home], guest, itemsize=2).for_rank(0)
        source, destination = (self.there(filled(of, 0, 1.0, torch.bfloat16)) for of in (home, guest))
        # Nothing travels without a buffer here: all of it is to be packed.
        sizes = Sizes(piece=1 << 40, direct=1 << 40, buffer=1 << 40)
        (batch,) = Binder(part, sources=[source], destination=destination, dtype=torch.bfloat16).to_copy(sizes).batches
        gradients = self.there(filled(home, 0, 1.0))
        sums = self.there(filled(guest, 0, 0.0))
        fold = Binder(
            plan_reshard([home], guest, itemsize=4, two_phase=False).for_rank(0),
            sources=[gradients], destination=sums, dtype=torch.float32,
        ).to_add()  # fmt: skip
        for name, copies, run in (
            ("pack", batch.packs, batch.packs.copy),
            ("unpack", batch.unpacks, batch.unpacks.copy),
            ("add", fold.addends[0], fold.addends[0].add),
        ):
            self._beside_a_copy(name, copies, run)

    def _beside_a_copy(self, name: str, copies: Copies, run: Callable[[], None]) -> None:
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in copies.to)
        assert num_bytes, f"{name} has nothing to do: the case is wrong"
        plain = torch.zeros(2, num_bytes, dtype=torch.uint8, device=self.device)
        copying, taken = self.seconds(lambda: plain[0].copy_(plain[1])), self.seconds(run)
        print(
            f"{name}: {num_bytes / 2**20:,.0f} MiB in {len(copies.to)} regions, {num_bytes / taken / 1e9:,.0f} GB/s; a plain "
            f"copy {num_bytes / copying / 1e9:,.0f} GB/s ({copying / taken:.0%} of it)"
        )

    def world_of_one(self) -> None:
        """A move without a peer: all of it is copied, on the stream of moves, and no group is asked for."""
        transport = BatchedTransport()
        of = self.layout()
        held = self.there(expected(full_tensors(of, dtype=torch.bfloat16), of, 0))
        arrived = self.there(filled(of, 0, -1000.0, torch.bfloat16))
        plan = plan_reshard([of], of, itemsize=2).for_rank(0)
        reshard = Reshard(plan, transport, accumulate=False, dtype=torch.bfloat16)
        reshard.run(sources=[held], destination=arrived)
        self._same([arrived], [held], "world size 1")
        num_bytes = sum(tensor.numel() * 2 for tensor in held.values())
        taken = self.seconds(lambda: reshard.run(sources=[held], destination=arrived))
        print(f"world size 1: {num_bytes / 2**20:,.0f} MiB, {num_bytes / taken / 1e9:,.0f} GB/s")

    def four_ranks_on_one_device(self) -> None:
        """Whole moves and folds of four ranks, exact; what they send each other stays on the device."""
        # NCCL's sizes, and the host waits: the ranks are threads.
        pace = dataclasses.replace(NCCL_PACE, on_stream=False)
        home, guest = self.layout(tp=4), self.layout(pp=2, dp=2)
        full = full_tensors(home)
        held, wanted = ([self.there(expected(full, of, rank)) for rank in range(4)] for of in (home, guest))
        arrived = [self.there(filled(guest, rank, -1000.0)) for rank in range(4)]
        folded = [self.there(filled(home, rank, 1.0)) for rank in range(4)]
        mailboxes = Mailboxes()
        switch = plan_reshard([home], guest, itemsize=4)
        fold = plan_reshard([guest], home, itemsize=4, two_phase=False)

        def run(rank: int) -> None:
            transport = MailboxTransport(mailboxes, rank, pace)
            Reshard(switch.for_rank(rank), transport, accumulate=False, dtype=torch.float32).run(
                sources=[held[rank]], destination=arrived[rank]
            )
            Reshard(fold.for_rank(rank), transport, accumulate=True, dtype=torch.float32).run(
                sources=[arrived[rank]], destination=folded[rank]
            )

        on_ranks(mailboxes, 4, run)
        self._same(arrived, wanted, "switch of four ranks")
        self._same(folded, [{i: t + 1 for i, t in of.items()} for of in held], "fold of four ranks")
        print("four ranks on one device: a switch and a fold are exact")

    def prefetch(self) -> None:
        """A move that begins before a matrix product, and is complete after it."""
        of = self.layout()
        held = self.there(expected(full_tensors(of, dtype=torch.bfloat16), of, 0))
        arrived = self.there(filled(of, 0, -1000.0, torch.bfloat16))
        reshard = Reshard(
            plan_reshard([of], of, itemsize=2).for_rank(0), BatchedTransport(), accumulate=False, dtype=torch.bfloat16
        )
        factor = torch.full((8192 if self.is_cuda else 64,) * 2, 1e-4, dtype=torch.bfloat16, device=self.device)

        def compute() -> None:
            for _ in range(20):
                torch.mm(factor, factor)

        def both() -> None:
            pending = reshard.begin(sources=[held], destination=arrived)
            compute()
            pending.finish()

        both()
        self._same([arrived], [held], "prefetch")
        alone, together = (self.seconds(run) * 1e3 for run in (compute, both))
        move = self.seconds(lambda: reshard.run(sources=[held], destination=arrived)) * 1e3
        hidden = max(0.0, min(1.0, 1 - (together - alone) / move))
        print(
            f"prefetch: compute {alone:.2f} ms, move {move:.2f} ms, both {together:.2f} ms: {hidden:.0%} of the move hidden"
        )

    def _same(self, found: Sequence[Tensors], wanted: Sequence[Tensors], what: str) -> None:
        for rank, (left, right) in enumerate(zip(found, wanted, strict=True)):
            assert left.keys() == right.keys()
            for index in left:
                assert torch.equal(left[index], right[index]), f"{what}: parameter {index} differs on rank {rank}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Check moves and folds on one device.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = torch.device(parser.parse_args(argv).device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    try:
        check = Check(device)
        for run in (check.kernels, check.world_of_one, check.four_ranks_on_one_device, check.prefetch):
            run()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
