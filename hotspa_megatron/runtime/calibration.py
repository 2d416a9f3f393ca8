"""Measures what this cluster's devices and links sustain, with all ranks at it: the numbers of a hardware description.

Every rank runs every measurement at the same time, since ranks share cores, memory and links when they train. A layer of a
transformer, forward and backward, is timed at several sizes; attention, collectives and messages on their own. Torch only.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hotspa_megatron.planning.communicators import ASSUMPTION, GROUP_MB, PAIR_MB
from hotspa_megatron.runtime.attention import packed_attention

_MIB: Final = 1 << 20
_SMALL: Final = 1 << 12
"""Bytes of an exchange whose time is its latency."""
_SLICE_S: Final = 1.0
"""Seconds that one measurement takes, unless the fewest repetitions take longer; what takes longer by itself is timed once."""
_FEWEST: Final = 3
_CPU_MARGIN_MIB: Final = 256
_GPU_MARGIN_SHARE: Final = 0.06

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured: the fields of ``planning.hardware.Hardware``, by name. ``assumed``: of those not measured, why.

    ``notes``: what is known besides, for a reader. ``seconds``: how long it took.
    """

    values: dict[str, Any]
    assumed: dict[str, str]
    notes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class _Sizes:
    """What is measured with; ``hidden`` ascending."""

    hidden: tuple[int, ...]
    tokens: int
    sequence: int
    head_dims: tuple[int, int]
    """One that is a multiple of 64, and one that is not."""
    message: int
    copy: int
    dtype: torch.dtype


_ON_GPU: Final = _Sizes((1024, 4096, 8192), 8192, 8192, (128, 104), 256 * _MIB, 1024 * _MIB, torch.bfloat16)
_ON_CPU: Final = _Sizes((64, 256, 1024), 512, 1024, (64, 32), 4 * _MIB, 64 * _MIB, torch.float32)


def calibrate(device: torch.device, *, ranks_per_node: int, say: Say) -> Calibration:
    """Measure on all ranks of the default group; the same result on every one. Collective.

    ``ranks_per_node``: consecutive ranks share a node. ``say`` is told what comes next.
    """
    return _Calibrator(device, ranks_per_node, say).run()


class _Calibrator:
    def __init__(self, device: torch.device, ranks_per_node: int, say: Say) -> None:
        self._device, self._say = device, say
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._node = min(ranks_per_node, self._world)
        self._sizes = _ON_GPU if device.type == "cuda" else _ON_CPU

    def run(self) -> Calibration:
        began = time.perf_counter()
        values: dict[str, Any] = {"gpus_per_node": self._node, "cards_per_node": 1}
        assumed = {"cards_per_node": "all network cards of a node counted as one of their joint bandwidth"}
        self._say("memory")
        values |= self._memory()
        assumed["margin_mib"] = "kept free against fragmentation"
        on_device = dist.get_backend() == dist.Backend.NCCL
        values["communicator_mib"] = [(2, PAIR_MB), (3, GROUP_MB)] if on_device else [(2, 0)]
        assumed["communicator_mib"] = ASSUMPTION if on_device else "gloo keeps nothing on devices, and little elsewhere"
        self._say("matrix products")
        peaks = {dtype: self._peak(dtype) for dtype in (torch.bfloat16, torch.float32)}
        values["peak_bf16_teraflops"] = peaks[torch.bfloat16] / 1e12
        values["peak_fp32_teraflops"] = peaks[torch.float32] / 1e12
        peak = peaks[self._sizes.dtype]
        self._say("layers")
        layers = [self._layer(hidden) for hidden in self._sizes.hidden]
        values["gemm_efficiency"] = [
            (hidden, min(1.0, rate / peak)) for hidden, (_, rate) in zip(self._sizes.hidden, layers, strict=True)
        ]
        self._say("attention")
        shares = [(dim, min(1.0, self._attention(dim) / peak)) for dim in sorted(self._sizes.head_dims)]
        values["attention_efficiency"] = shares
        self._say("collectives")
        # The overhead of the smallest layer: what launching costs, whatever the size.
        overhead = max(0.0, min(fixed for fixed, _ in layers))
        sizes = [size for size in (2, 4, 8) if self._node % size == 0]
        groups = {size: self._own_group(size) for size in sizes}
        # With sequence parallelism a layer takes four all-gathers and four reduce-scatters; without, four all-reduces.
        latencies = {size: sum(self._collectives(group, size, _SMALL)) for size, group in groups.items()}
        values["layer_overhead_us"] = [
            (1, overhead * 1e6),
            *((size, (overhead + 4 * latencies[size]) * 1e6) for size in sizes),
        ]
        largest = max(sizes, default=1)
        values["context_overhead_us"] = self._context_overhead(groups.get(largest)) * 1e6
        busy = {size: self._bus(group, size) for size, group in groups.items()}
        self._say("messages and copies")
        values["copy_gigabytes_per_s"] = self._copy() / 1e9
        neighbour = self._messages(1)
        if busy:
            values["intra_gigabytes_per_s"] = busy[largest] / 1e9
            values["pair_gigabytes_per_s"] = busy.get(2, busy[largest]) / 1e9
            values["intra_latency_us"] = neighbour[0] * 1e6
        else:
            for name, value in (("intra_gigabytes_per_s", values["copy_gigabytes_per_s"] / 2), ("intra_latency_us", 1)):
                values[name], assumed[name] = value, "one rank in a node: as a copy"
            values["pair_gigabytes_per_s"] = values["intra_gigabytes_per_s"]
            assumed["pair_gigabytes_per_s"] = "one rank in a node: as a copy"
        if self._world > self._node:
            latency, rate = self._messages(self._node)
            # All ranks of a node at once, over all of its cards.
            values["card_gigabytes_per_s"], values["card_latency_us"] = rate * self._node / 1e9, latency * 1e6
            values["spanning_gigabytes_per_s"] = self._bus(dist.group.WORLD, self._world) / 1e9
        else:
            for name, like in (("card_gigabytes_per_s", "intra_gigabytes_per_s"), ("card_latency_us", "intra_latency_us"),
                               ("spanning_gigabytes_per_s", "intra_gigabytes_per_s")):  # fmt: skip
                values[name], assumed[name] = values[like], "one node: there is no network to measure; as within it"
        for group in groups.values():
            dist.destroy_process_group(group)
        notes = (f"messages between neighbouring ranks: {neighbour[1] / 1e9:.3g} GB/s, {neighbour[0] * 1e6:.0f} us",)
        return Calibration(
            values=values, assumed=assumed, notes=notes if self._world > 1 else (), seconds=time.perf_counter() - began
        )

    # ------------------------------------------------------------------------------------------------------ one device

    def _memory(self) -> dict[str, int]:
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            allocated = torch.cuda.memory_reserved(self._device)
            mine = (total // _MIB, (total - free - allocated) // _MIB, int(total * _GPU_MARGIN_SHARE) // _MIB)
        else:
            total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self._node
            mine = (total // _MIB, _resident_bytes() // _MIB, _CPU_MARGIN_MIB)
        # Plans must fit on the smallest; the least that is taken is a MiB.
        memory = -self._largest(-mine[0])
        reserved = self._largest(mine[1])
        return {"memory_mib": int(memory), "reserved_mib": max(1, int(reserved)), "margin_mib": mine[2]}

    def _peak(self, dtype: torch.dtype) -> float:
        """Operations per second of the fastest of some matrix products."""
        best = 0.0
        for hidden in self._sizes.hidden[1:]:
            left = torch.randn(self._sizes.tokens, hidden, device=self._device).to(dtype)
            right = torch.randn(hidden, 4 * hidden, device=self._device).to(dtype)
            best = max(best, 2 * left.numel() * 4 * hidden / self._time(lambda left=left, right=right: left @ right))  # type: ignore[misc]
        return best

    def _layer(self, hidden: int) -> tuple[float, float]:
        """Seconds that a layer takes whatever its tokens, and operations per second of its matrices with all around them."""
        few, many = self._sizes.tokens // 4, self._sizes.tokens
        layer = _Layer(hidden, dtype=self._sizes.dtype, device=self._device)
        short, long = (self._time(layer.step(tokens, sequence=64)) for tokens in (few, many))
        per_token = max((long - short) / (many - few), 1e-12)
        return short - few * per_token, 6 * layer.matrix_elements / per_token

    def _attention(self, head_dim: int) -> float:
        """Operations per second of causal attention, forward and backward, over one long sequence."""
        length, heads = self._sizes.sequence, 8
        inputs = [
            torch.randn(length, heads, head_dim, device=self._device, dtype=self._sizes.dtype).requires_grad_()
            for _ in range(3)
        ]

        def step() -> None:
            packed_attention(*inputs, boundaries=(0, length), softmax_scale=head_dim**-0.5).sum().backward()

        return 6 * heads * head_dim * length**2 / self._time(step)

    def _copy(self) -> float:
        """Bytes read and written per second."""
        source = torch.zeros(self._sizes.copy // 4, device=self._device)
        target = torch.empty_like(source)
        return 2 * self._sizes.copy / self._time(lambda: target.copy_(source))

    # -------------------------------------------------------------------------------------------------------- several

    def _own_group(self, size: int) -> Any:
        """This rank's group of ``size`` consecutive ranks; all of them are made, by all ranks."""
        own = None
        for first in range(0, self._world, size):
            group = dist.new_group(list(range(first, first + size)))
            if first <= self._rank < first + size:
                own = group
        return own

    def _collectives(self, group: Any, ranks: int, num_bytes: int) -> tuple[float, float]:
        """Seconds of an all-gather and of a reduce-scatter of a tensor of so many bytes, all groups at once."""
        whole = torch.zeros(max(1, num_bytes // 4 // ranks) * ranks, device=self._device)
        part = torch.zeros(whole.numel() // ranks, device=self._device)
        gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        return (
            self._time(lambda: gather(whole, part, group=group), together=group),
            self._time(lambda: scatter(part, whole, group=group), together=group),
        )

    def _bus(self, group: Any, ranks: int) -> float:
        """Bytes per second and rank that an all-gather and a reduce-scatter move, on average."""
        seconds = sum(self._collectives(group, ranks, self._sizes.message)) / 2
        return self._sizes.message * (ranks - 1) / ranks / seconds

    def _context_overhead(self, group: Any) -> float:
        """Seconds that context parallelism adds to a layer, forward and backward, whatever its tokens."""
        if group is None:
            return 0.0
        tokens = 2 * 8
        inputs = [
            torch.randn(tokens, 4, 64, device=self._device, dtype=self._sizes.dtype).requires_grad_() for _ in range(3)
        ]

        def step(boundaries: tuple[int, int], cp_group: Any) -> Callable[[], None]:
            def run() -> None:
                packed_attention(
                    *inputs, boundaries=boundaries, softmax_scale=0.125, cp_group=cp_group
                ).sum().backward()

            return run

        alone = self._time(step((0, tokens), None))
        return max(0.0, self._time(step((0, tokens * group.size()), group), together=group) - alone)

    def _messages(self, distance: int) -> tuple[float, float]:
        """Latency in seconds and bytes per second of messages to the rank so far on, while all ranks send and receive."""
        if self._world == 1:
            return 0.0, 1.0

        def seconds(num_bytes: int) -> float:
            out, into = (torch.zeros(num_bytes // 4, device=self._device) for _ in range(2))

            def exchange() -> None:
                operations = [
                    dist.P2POp(dist.isend, out, (self._rank + distance) % self._world),
                    dist.P2POp(dist.irecv, into, (self._rank - distance) % self._world),
                ]
                for work in dist.batch_isend_irecv(operations):
                    work.wait()

            return self._time(exchange, together=dist.group.WORLD)

        small, large = seconds(_SMALL), seconds(self._sizes.message)
        return small, self._sizes.message / max(large - small, 1e-9)

    # ------------------------------------------------------------------------------------------------------------ timing

    def _time(self, run: Callable[[], Any], *, together: Any = None) -> float:
        """Median seconds of ``run``, of the slowest rank, while all ranks run it.

        ``together``: the group whose ranks must run it equally often; they agree on how often.
        """
        run()
        self._wait()
        dist.barrier()
        started = time.perf_counter()
        run()
        self._wait()
        # Ranks that time alone, too, keep each other busy all the time.
        once = self._largest(time.perf_counter() - started)
        if once > _SLICE_S:
            return once
        count = max(_FEWEST, min(200, math.ceil(_SLICE_S / max(once, 1e-6))))
        block = max(1, count // 10) if together is None or self._device.type == "cuda" else 1
        times = []
        for _ in range(max(1, count // block)):
            started = time.perf_counter()
            for _ in range(block):
                run()
            self._wait()
            times.append((time.perf_counter() - started) / block)
        return self._largest(statistics.median(times))

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _largest(self, value: float) -> float:
        """The largest over all ranks."""
        tensor = torch.tensor([value], dtype=torch.float64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor.item())


class _Layer:
    """A transformer layer with RMS norms, attention and a gated MLP, and what its matrices amount to."""

    def __init__(self, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        wide = 8 * hidden // 3 // 16 * 16
        self._hidden, self._dtype, self._device = hidden, dtype, device
        self._head_dim = min(64, hidden)
        self._shapes = ((3 * hidden, hidden), (hidden, hidden), (2 * wide, hidden), (hidden, wide))
        self._matrices = [
            torch.randn(shape, device=device, dtype=dtype).mul_(shape[1] ** -0.5).requires_grad_()
            for shape in self._shapes
        ]
        self._norms = [torch.ones(hidden, device=device, dtype=dtype).requires_grad_() for _ in range(2)]

    @property
    def matrix_elements(self) -> int:
        return sum(rows * columns for rows, columns in self._shapes)

    def step(self, tokens: int, *, sequence: int) -> Callable[[], None]:
        """Forward and backward of ``tokens`` tokens in sequences of this length."""
        given = torch.randn(tokens, self._hidden, device=self._device, dtype=self._dtype).requires_grad_()
        boundaries = tuple(range(0, tokens + 1, sequence))

        def run() -> None:
            self._forward(given, boundaries).backward(torch.ones_like(given))

        return run

    def _forward(self, given: Tensor, boundaries: tuple[int, ...]) -> Tensor:
        qkv, projection, up, down = self._matrices
        normed = F.rms_norm(given, (self._hidden,), self._norms[0])
        query, key, value = F.linear(normed, qkv).view(len(given), -1, 3, self._head_dim).unbind(2)
        attended = packed_attention(query, key, value, boundaries=boundaries, softmax_scale=self._head_dim**-0.5)
        middle = given + F.linear(attended.reshape(len(given), -1), projection)
        gate, values = F.linear(F.rms_norm(middle, (self._hidden,), self._norms[1]), up).chunk(2, dim=-1)
        return middle + F.linear(F.silu(gate) * values, down)


def _resident_bytes() -> int:
    """Memory of this process that is there now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
