"""Measures one move on real ranks: ours, Megatron's own, and the least that packing allows, in turn on the same tensors.

Collective throughout: every rank of the default process group calls everything in the same order, and gets the same
result. Called by ``bench_reshard`` and the tests.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import torch
import torch.distributed as dist

from hotspa_megatron.hooks import refit
from hotspa_megatron.planning.model_shape import ModelShape
from hotspa_megatron.planning.param_layout import (
    Interval,
    Layout,
    Point,
    RankPieces,
    flat_shards,
    gpt_parameters,
    model_layout,
)
from hotspa_megatron.planning.regions import Cell
from hotspa_megatron.planning.reshard_plan import LocalTensor, Message, Phase, RankPlan, ReshardPlan, plan_reshard
from hotspa_megatron.runtime.binding import Copies, Region, Tensors
from hotspa_megatron.runtime.executor import Reshard
from hotspa_megatron.runtime.storage import flatten
from hotspa_megatron.runtime.transport import BatchedTransport, Exchange, Pace
from hotspa_megatron.strategy import Strategy, stage_layers

DTYPE: Final = torch.bfloat16
_UNWRITTEN: Final = -1.0
"""What destinations hold before a move: no parameter has this value."""


@dataclass(frozen=True, kw_only=True)
class PairResult:
    """One move of a model from one strategy to another; the names of the fields are those of ``--json``.

    Seconds: medians of the slowest rank's times; ``bound_s`` is one packed message per pair of ranks with its copies,
    ``ratio`` is refit_s / ours_s, and ``*_first_s`` include planning. Bytes and messages as they went over the
    transport, over all ranks or at the busiest receiver; the pieces of what one rank sends to another count as one
    message. ``floor_max_recv``: the most that a rank lacks.
    """

    source: str
    destination: str
    model_mb: float
    ours_s: float
    refit_s: float
    bound_s: float
    ratio: float
    ours_first_s: float
    refit_first_s: float
    bytes_total: int
    bytes_max_recv: int
    floor_max_recv: int
    messages: int
    floor_total: int
    operations: int
    differences: tuple[str, ...]
    """Which of the three left another value than they should have, with the parameter: none if all is well."""

    def row(self) -> dict[str, object]:
        """As ``--json`` has it."""
        kept = {name: getattr(self, name) for name in _ROW}
        return {"from": self.source, "to": self.destination, **kept}


@dataclass(frozen=True, kw_only=True)
class FoldResult:
    """A guest's fp32 gradients on their way to the shards of home's optimizer, once in two steps and once in one.

    ``apart``: all-reduced over the guest's replicas, as Megatron does, and moved. ``fused``: every replica's addends go
    straight to the rank that owns them at home. Bytes over all ranks; buffers: of the rank that takes most.
    """

    source: str
    destination: str
    model_mb: float
    apart_s: float
    fused_s: float
    apart_bytes: int
    fused_bytes: int
    apart_buffers: int
    fused_buffers: int
    differences: tuple[str, ...]

    def row(self) -> dict[str, object]:
        """As ``--json`` has it."""
        kept = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("source", "destination", "differences")
        }
        return {"guest": self.source, "home": self.destination, **kept}


_ROW: Final = (
    "model_mb", "ours_s", "refit_s", "bound_s", "ratio", "ours_first_s", "refit_first_s", "bytes_total", "bytes_max_recv",
    "floor_max_recv", "messages",
)  # fmt: skip


class CountingTransport:
    """A transport that notes what is sent through it. ``sent``: (receiver, bytes) of every operation."""

    def __init__(self, inner: BatchedTransport) -> None:
        self._inner = inner
        self.sent: list[tuple[int, int]] = []

    @property
    def pace(self) -> Pace:
        return self._inner.pace

    def next_tag(self) -> int:
        return self._inner.next_tag()

    def submit_send(self, buffer: torch.Tensor, receiver: int, tag: int) -> None:
        self.sent.append((receiver, buffer.numel() * buffer.element_size()))
        self._inner.submit_send(buffer, receiver, tag)

    def submit_receive(self, buffer: torch.Tensor, sender: int, tag: int) -> None:
        self._inner.submit_receive(buffer, sender, tag)

    def run(self) -> Exchange:
        return self._inner.run()


class PackedExchange:
    """The bound: each rank packs one message per peer, sends and receives all at once, and unpacks.

    Memory and views are there beforehand, and nothing is cut to pieces.
    """

    def __init__(self, plan: RankPlan, transport: BatchedTransport, *, source: Tensors, destination: Tensors) -> None:
        (phase,) = plan.phases
        self._transport = transport
        self._packs, self._unpacks, self._local = Copies(), Copies(), Copies()
        self._sends: list[tuple[torch.Tensor, int]] = []
        self._receives: list[tuple[torch.Tensor, int]] = []
        device = next(iter(source.values())).device

        def buffer(numel: int) -> torch.Tensor:
            return torch.zeros(numel, dtype=DTYPE, device=device)

        taken = {index: Region.all_of(tensor) for index, tensor in source.items()}
        given = {index: Region.all_of(tensor) for index, tensor in destination.items()}

        def origins(cells: Sequence[Cell]) -> list[Region]:
            return [taken[cell.parameter].part(cell.source_start, cell.shape) for cell in cells]

        def targets(cells: Sequence[Cell]) -> list[Region]:
            return [given[cell.parameter].part(cell.destination_start, cell.shape) for cell in cells]

        def packed(flat: torch.Tensor, cells: Sequence[Cell]) -> Iterator[Region]:
            return Region.all_of(flat).parts(cell.shape for cell in cells)

        outgoing: dict[int, torch.Tensor] = {}
        for message, first in zip(phase.sends, phase.packed_as, strict=True):
            if first not in outgoing:
                outgoing[first] = buffer(message.numel)
                self._packs.extend(packed(outgoing[first], message.cells), origins(message.cells))
            self._sends.append((outgoing[first], message.peer))
        for message in phase.receives:
            incoming = buffer(message.numel)
            self._unpacks.extend(targets(message.cells), packed(incoming, message.cells))
            self._receives.append((incoming, message.peer))
        self._local.extend(targets(phase.copies), origins(phase.copies))

    def run(self) -> None:
        tag = self._transport.next_tag()
        self._packs.copy()
        for tensor, peer in self._receives:
            self._transport.submit_receive(tensor, peer, tag)
        for tensor, peer in self._sends:
            self._transport.submit_send(tensor, peer, tag)
        exchange = self._transport.run()
        self._local.copy()
        exchange.wait()
        self._unpacks.copy()


class Bench:
    """What the moves of one run share: the ranks, their transport and their process groups.

    Needs the default process group; tensors lie on ``device``.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        self._groups: dict[tuple[int, ...], Any] = {}
        self.transport = BatchedTransport(dist.new_group(list(range(self.world)), backend=self.backend))

    def group(self, ranks: tuple[int, ...]) -> Any:
        """The process group of these ranks, made once."""
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), backend=self.backend)
        return self._groups[ranks]

    def measure(
        self, shape: ModelShape, source: Strategy, destination: Strategy, *, repeats: int, names: tuple[str, str]
    ) -> PairResult:
        """Move a model of ``shape`` often in three ways, taking turns, and once with counting."""
        layouts = _layouts(shape, source, destination)
        held = self._tensors(layouts[0], fill=self._value)
        wanted = {index: tensor.clone() for index, tensor in self._tensors(layouts[1], fill=self._value).items()}
        there = self._tensors(layouts[1], fill=None)
        plan = plan_reshard(layouts[:1], layouts[1], itemsize=DTYPE.itemsize)
        swap = refit.WeightSwap(
            *layouts, sources=held, destinations=there, rank=self.rank, backend=self.backend, group=self.group
        )
        bound = PackedExchange(plan.for_rank(self.rank), self.transport, source=held, destination=there)
        sides: dict[str, Any] = {"sources": [held], "destination": there}
        kept: list[Reshard] = []

        def first_of_ours() -> None:
            again = _layouts(shape, source, destination)
            kept[:] = [self._reshard(plan_reshard(again[:1], again[1], itemsize=DTYPE.itemsize), self.transport)]
            kept[0].run(**sides)

        ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "ours_first": (lambda: None, first_of_ours),
            "refit_first": (swap.forget, swap.run),
            "ours": (lambda: None, lambda: kept[0].run(**sides)),
            "refit": (lambda: None, swap.run),
            "bound": (lambda: None, bound.run),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        differences: set[str] = set()
        for round_number in range(repeats + 1):
            for name, (prepare, run) in ways.items():
                for tensor in there.values():
                    tensor.fill_(_UNWRITTEN)
                prepare()
                seconds = self._seconds(run)
                # The first round warms up: connections, the memory of the process, imports.
                if round_number:
                    times[name].append(seconds)
                differences.update(f"{name}: {which}" for which in self._wrong(layouts[1], there, wanted))
        counting = CountingTransport(self.transport)
        self._reshard(plan, counting).run(**sides)
        sent = self._gather(counting.sent)
        received = [0] * self.world
        for of_rank in sent:
            for receiver, num_bytes in of_rank:
                received[receiver] += num_bytes
        floors = self._gather(_lacked(layouts[0], layouts[1], self.rank))
        median = {name: statistics.median(of) for name, of in times.items()}
        return PairResult(
            source=names[0],
            destination=names[1],
            model_mb=_numel(layouts[0]) * DTYPE.itemsize / 1e6,
            ours_s=median["ours"],
            refit_s=median["refit"],
            bound_s=median["bound"],
            ratio=median["refit"] / median["ours"],
            ours_first_s=median["ours_first"],
            refit_first_s=median["refit_first"],
            bytes_total=sum(received),
            bytes_max_recv=max(received),
            floor_max_recv=max(floors),
            messages=sum(len({receiver for receiver, _ in of_rank}) for of_rank in sent),
            floor_total=sum(floors),
            operations=sum(map(len, sent)),
            differences=tuple(sorted({each for of in self._gather(sorted(differences)) for each in of})),
        )

    def measure_fold(
        self, shape: ModelShape, guest: Strategy, home: Strategy, *, repeats: int, names: tuple[str, str]
    ) -> FoldResult:
        """Bring a guest's gradients, whose sum over its replicas is still to be made, to home's shards in two ways."""
        there, here = _layouts(shape, guest, home)
        owned = flat_shards(here, {rank: _shard(here, rank) for rank in range(self.world)})
        replica_of = [guest.coordinates(rank).dp * guest.cp + guest.coordinates(rank).cp for rank in range(self.world)]
        replicas = guest.dp * guest.cp
        group = next(
            made for ranks in guest.groups("dp-cp") for made in [self.group(tuple(ranks))] if self.rank in ranks
        )
        # Sums of small whole numbers: the same in any order.
        partial = self._tensors(there, fill=self._value, dtype=torch.float32)
        for tensor in partial.values():
            tensor.mul_(1 + replica_of[self.rank])
        gradients = self._tensors(there, fill=None, dtype=torch.float32)
        summed = self._tensors(here, fill=self._value, dtype=torch.float32)
        sums = {index: tensor * sum(range(1, replicas + 1)) for index, tensor in summed.items()}
        results = {name: self._tensors(here, fill=None, dtype=torch.float32) for name in ("apart", "fused", "wanted")}
        for name, tensors in results.items():
            for tensor in tensors.values():
                tensor.zero_()
            if name == "wanted":
                for index, box, start in owned.pieces(self.rank):
                    part_of(tensors[index], start, box.shape).copy_(part_of(sums[index], start, box.shape))
        move = plan_reshard([there], owned, itemsize=4, two_phase=False)
        each = [
            plan_reshard(
                [RankPieces(there, {r: there.pieces(r) for r in range(self.world) if replica_of[r] == number})],
                owned,
                itemsize=4,
                two_phase=False,
            )
            for number in range(replicas)
        ]
        apart = Reshard(move.for_rank(self.rank), self.transport, accumulate=True, dtype=torch.float32)
        fused = Reshard(
            _merged([plan.for_rank(self.rank) for plan in each]), self.transport, accumulate=True, dtype=torch.float32
        )
        flat = flat_of(gradients)
        buffers = dict.fromkeys(("apart", "fused"), 0)

        def run_apart() -> None:
            dist.all_reduce(flat, group=group)
            pending = apart.begin(sources=[gradients], destination=results["apart"])
            buffers["apart"] = pending.buffer_bytes
            pending.finish()

        def run_fused() -> None:
            pending = fused.begin(sources=[gradients] * replicas, destination=results["fused"])
            buffers["fused"] = pending.buffer_bytes
            pending.finish()

        times: dict[str, list[float]] = {"apart": [], "fused": []}
        differences: set[str] = set()
        for round_number in range(repeats + 1):
            for name, run in (("apart", run_apart), ("fused", run_fused)):
                flat.copy_(flat_of(partial))
                for tensor in results[name].values():
                    tensor.zero_()
                seconds = self._seconds(run)
                if round_number:
                    times[name].append(seconds)
                differences.update(f"{name}: {of}" for of in self._wrong(here, results[name], results["wanted"]))
        reduced = sum(2 * (replicas - 1) * there.local_numel(rank) * 4 // replicas for rank in range(self.world))
        most = [max(of) for of in zip(*self._gather((buffers["apart"], buffers["fused"])), strict=True)]
        return FoldResult(
            source=names[0],
            destination=names[1],
            model_mb=_numel(there) * DTYPE.itemsize / 1e6,
            apart_s=statistics.median(times["apart"]),
            fused_s=statistics.median(times["fused"]),
            apart_bytes=reduced + move.total_bytes,
            fused_bytes=sum(plan.total_bytes for plan in each),
            apart_buffers=most[0],
            fused_buffers=most[1],
            differences=tuple(sorted({each for of in self._gather(sorted(differences)) for each in of})),
        )

    def _reshard(self, plan: ReshardPlan, transport: Any) -> Reshard:
        return Reshard(plan.for_rank(self.rank), transport, accumulate=False, dtype=DTYPE)

    def _seconds(self, run: Callable[[], None]) -> float:
        """Time of the slowest rank."""
        self._synchronise()
        dist.barrier()
        started = time.perf_counter()
        run()
        self._synchronise()
        taken = torch.tensor([time.perf_counter() - started], dtype=torch.float64, device=self.device)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken.item())

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _gather(self, own: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.world
        dist.all_gather_object(gathered, own)
        return gathered

    def _tensors(
        self, layout: Layout, *, fill: Callable[[int, Layout], torch.Tensor] | None, dtype: torch.dtype = DTYPE
    ) -> dict[int, torch.Tensor]:
        """This rank's tensors, one after the other in memory, as a guest's and a DDP buffer's are."""
        parameters = {
            index: torch.nn.Parameter(
                torch.empty(layout.local_shape(index, self.rank), dtype=dtype, device=self.device)
            )
            for index in range(len(layout.parameters))
            if layout.holds(index, self.rank)
        }
        flatten(list(parameters.values()))
        tensors = {index: parameter.data for index, parameter in parameters.items()}
        if fill is not None:
            whole = {index: fill(index, layout) for index in tensors}
            for index, box, start in layout.pieces(self.rank):
                part_of(tensors[index], start, box.shape).copy_(part_of(whole[index], box.lo, box.shape))
        return tensors

    def _value(self, index: int, layout: Layout) -> torch.Tensor:
        """The whole of a parameter: the same numbers on every rank, from 0 to 255, which bf16 holds exactly."""
        numbers = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, layout.parameters[index].shape, generator=numbers).to(DTYPE)

    def _wrong(self, layout: Layout, found: Tensors, wanted: Tensors) -> list[str]:
        return [layout.parameters[i].name for i, tensor in found.items() if not torch.equal(tensor, wanted[i])]


def _layouts(shape: ModelShape, *strategies: Strategy) -> list[Layout]:
    parameters = gpt_parameters(shape)
    return [
        model_layout(parameters, strategy, stage_layers(shape.num_layers, strategy.pp), shape.tied_embeddings)
        for strategy in strategies
    ]


def _numel(layout: Layout) -> int:
    return sum(math.prod(parameter.shape) for parameter in layout.parameters)


def _lacked(source: Layout, destination: Layout, rank: int) -> int:
    """Bytes that the rank needs and does not hold, counted element by element of the whole tensors."""
    count = 0
    for index, parameter in enumerate(destination.parameters):
        needed, held = (torch.zeros(parameter.shape, dtype=torch.bool) for _ in range(2))
        for layout, flags in ((destination, needed), (source, held)):
            for number, box, _ in layout.pieces(rank):
                if number == index:
                    part_of(flags, box.lo, box.shape).fill_(True)
        count += int((needed & ~held).sum())
    return count * DTYPE.itemsize


def part_of(tensor: torch.Tensor, start: Point, shape: Point) -> torch.Tensor:
    """The elements of a tensor from ``start`` on."""
    return tensor[tuple(slice(low, low + size) for low, size in zip(start, shape, strict=True))]


def _shard(layout: Layout, rank: int) -> dict[int, list[Interval]]:
    """A rank's share of its flat local tensors, cut into one equal stretch per replica, as a distributed optimizer does."""
    at, strategy = layout.strategy.coordinates(rank), layout.strategy
    size = -(-layout.local_numel(rank) // (strategy.dp * strategy.cp))
    first = (at.dp * strategy.cp + at.cp) * size
    found: dict[int, list[Interval]] = {}
    start = 0
    for index in range(len(layout.parameters)):
        if layout.holds(index, rank):
            numel = math.prod(layout.local_shape(index, rank))
            low, high = max(first - start, 0), min(first + size - start, numel)
            if low < high:
                found[index] = [(low, high)]
            start += numel
    return found


def _merged(parts: Sequence[RankPlan]) -> RankPlan:
    """One exchange of several, whose layouts become its sources in their order."""
    messages: dict[str, dict[int, list[Cell]]] = {"sends": {}, "receives": {}}
    copies: list[Cell] = []
    tensors: list[LocalTensor] = []
    for number, part in enumerate(parts):
        (phase,) = part.phases
        copies += [cell._replace(source=number) for cell in phase.copies]
        for name, of_peer in messages.items():
            for message in getattr(phase, name):
                of_peer.setdefault(message.peer, []).extend(cell._replace(source=number) for cell in message.cells)
        tensors += [replace(each, source=None if each.source is None else number) for each in part.tensors]
    made = {
        name: tuple(
            Message(peer, tuple(cells), sum(math.prod(cell.shape) for cell in cells))
            for peer, cells in sorted(of.items())
        )
        for name, of in messages.items()
    }
    phase = Phase(tuple(copies), made["sends"], made["receives"], tuple(range(len(made["sends"]))))
    return RankPlan(parts[0].rank, (phase,), tuple(dict.fromkeys(tensors)))


def flat_of(tensors: Tensors) -> torch.Tensor:
    """All of the tensors, which lie one after the other, as one."""
    first = next(iter(tensors.values()))
    return first.as_strided((sum(tensor.numel() for tensor in tensors.values()),), (1,), first.storage_offset())
