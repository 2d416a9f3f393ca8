"""Self-checks of a running job, every N steps: copies of parameters, switches, and the gradient of the whole step.

Copies are compared by checksums of their bits, at home and, after every switch, under the guest, whose parameters must be
home's. The gradient is compared with that of the same sequences run in home alone, before the step, by a sample of every
rank's elements. A difference ends the job on all ranks: training on would put wrong numbers into the next checkpoint.
The step itself runs as it would have: the pass in home alone draws no random numbers that the step then lacks, counts in
no timer, and leaves nothing in gradients that Megatron clears anyway. Made by ``session`` and called by ``training``; collective
throughout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from hotspa_megatron.hooks.data import Step, StepLoader
from hotspa_megatron.hooks.forward_backward import StepRecord, StepRunner
from hotspa_megatron.hooks.model import Guest, LogicalModel, local_tensors, owned_gradients
from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.planning.param_layout import Layout, Piece
from hotspa_megatron.runtime.checksum import checksum
from hotspa_megatron.strategy import Strategy, listed

_SAMPLED: Final = 1024
"""Elements of a parameter's gradient that a rank compares."""
_FAINT: Final = 1e-3
"""A parameter's gradient counts as at least this part of the whole gradient's size: below, it is sums that cancel."""
_ALLOWED: Final = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_ALLOWED_TF32: Final = 3e-2
"""On CUDA, products of single precision may be made of 11 bits, as those of half precision are."""


class _Sampled(NamedTuple):
    """Elements of one parameter's gradient that this rank's optimizer reads: where here, and where in the whole tensor."""

    parameter: int
    local: tuple[torch.Tensor, ...]
    whole: NDArray[np.int64]


@dataclasses.dataclass
class _Check:
    """A check under way. ``alone``: the sampled gradient of home alone, and its losses."""

    iteration: int
    totals: NDArray[np.int64]
    seconds: float
    switches: int = 0
    sampled: tuple[_Sampled, ...] = ()
    alone: tuple[list[NDArray[np.float64]], Mapping[str, tuple[float, float]]] | None = None


class Guard:
    """Checks every ``every``-th step. One per job; ``before``, ``switched`` and ``after`` surround a step that is ``due``.

    ``alone`` runs steps in home alone; its gradients are compared unless ``ungraded`` says why they are not.
    """

    def __init__(
        self,
        *,
        every: int,
        ungraded: str | None,
        alone: StepRunner,
        home: Strategy,
        logical: LogicalModel,
        model: Sequence[Any],
        say: Callable[[str], None],
        scaled: bool,
        folded_in: torch.dtype | None,
    ) -> None:
        """``scaled``: whether a loss scale is in use, under which gradients may overflow in a step that is then skipped.

        ``folded_in``: what guests' gradients travel home as; None without guests.
        """
        self._every, self._alone, self._model, self._say = every, alone, list(model), say
        self._scaled, self._compares, self._folded_in = scaled, ungraded is None, folded_in
        self._home, self._rank = home, dist.get_rank()
        self._layout = logical.layout(home, logical.home_layers)
        self._parameters = local_tensors(model, logical)
        self._owned: dict[int, list[Piece]] = {}
        for piece in owned_gradients(model, self._layout, self._parameters).pieces(self._rank):
            self._owned.setdefault(piece.parameter, []).append(piece)
        self._copies: dict[Layout, list[list[NDArray[np.int64]]]] = {}
        self._check: _Check | None = None
        what = "parameters" + ("" if ungraded else " and the gradient of home alone")
        because = f"; gradients are not compared: {ungraded}" if ungraded else ""
        say(f"verify_every: {what} are compared in every step that {every} divides{because}")

    def due(self, iteration: int) -> bool:
        """Whether the step with this number, counted from 1, is checked."""
        return iteration % self._every == 0

    def before(self, forward_step_func: Callable[..., Any], step: Step, loader: StepLoader, iteration: int) -> None:
        """Check home's copies, and run the step's sequences in home alone. Leaves gradients for Megatron to clear."""
        started = time.perf_counter()
        self._check = None
        self._alone.complete_parameters()
        check = _Check(iteration, self._compare_copies(iteration, self._layout, self._parameters), 0.0)
        if self._compares:
            check.sampled = tuple(self._sample(iteration))
            for chunk in self._model:
                chunk.zero_grad_buffer()
                for parameter in chunk.parameters():
                    # Megatron's plain optimizer in single precision has left the last gradient here, by reference.
                    parameter.grad = None
            in_home = dataclasses.replace(step, plan=self._alone.planner.plan(step.plan.lengths))
            with _unnoticed(self._model):
                _, record = self._alone.run(forward_step_func=forward_step_func, step=in_home, loader=loader)
            check.alone = self._values(check.sampled), record.losses
        check.seconds = time.perf_counter() - started
        self._check = check

    def switched(self, guest: Guest) -> None:
        """Check a guest's parameters, once they are there and before they are used."""
        check = self._check
        assert check is not None
        started = time.perf_counter()
        totals = self._compare_copies(check.iteration, guest.layout, guest.parameters)
        for parameter in np.flatnonzero(totals != check.totals)[:1].tolist():
            ranks = self._ranks_that_differ(parameter, guest)
            self._fail(
                check.iteration,
                f"after the switch to {guest.state.strategy}, {self._name(parameter)} on {_ranks(ranks)} is not what home "
                "holds",
            )
        check.switches += 1
        check.seconds += time.perf_counter() - started

    def after(self, record: StepRecord) -> None:
        """Compare the finished step's gradient with that of home alone, and say what was checked."""
        check = self._check
        assert check is not None
        started = time.perf_counter()
        found = "" if check.alone is None else f"; {self._compare_gradients(check, *check.alone, record)}"
        check.seconds += time.perf_counter() - started
        copies = f"{len(check.totals)} parameters are the same bits in all copies"
        if check.switches:
            copies += f" and after {check.switches} switch{'es' if check.switches > 1 else ''}"
        self._say(f"verify_every: iteration {check.iteration}: {copies}{found}; this took {check.seconds:.3g} s")
        check.switches = 0  # Megatron may run the step again

    # ------------------------------------------------------------------------------------------------------ parameters

    def _compare_copies(
        self, iteration: int, layout: Layout, parameters: Mapping[int, torch.Tensor]
    ) -> NDArray[np.int64]:
        """Checksums of the whole parameters; RuntimeError on every rank where copies of one differ."""
        own = torch.zeros(len(layout.parameters), dtype=torch.int64).cuda()
        for piece in layout.pieces(self._rank):
            own[piece.parameter] += _checksum_of(piece, layout, parameters)
        everyone = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, own)
        table = torch.stack(everyone).cpu().numpy()
        totals = np.zeros(len(layout.parameters), np.int64)
        for parameter, holders in enumerate(self._holders(layout)):
            for ranks in holders:
                found = table[ranks, parameter]
                if (found != found[0]).any():
                    self._fail_on_copies(iteration, layout, parameter, ranks, found)
            totals[parameter] = table[[ranks[0] for ranks in holders], parameter].sum()
        return totals

    def _fail_on_copies(
        self, iteration: int, layout: Layout, parameter: int, ranks: NDArray[np.int64], found: NDArray[np.int64]
    ) -> NoReturn:
        kinds, first, which, counts = np.unique(found, return_index=True, return_inverse=True, return_counts=True)
        # Most copies are right; of as many, those of the lowest rank.
        common = min(range(len(kinds)), key=lambda kind: (-counts[kind], first[kind]))
        self._fail(
            iteration,
            f"copies of {self._name(parameter)} under {layout.strategy} differ: {_ranks(ranks[which != common])} "
            f"hold{'s' if len(ranks[which != common]) == 1 else ''} other bits than {_ranks(ranks[which == common])}",
        )

    def _holders(self, layout: Layout) -> list[list[NDArray[np.int64]]]:
        """For each parameter, the ranks that hold the same part of it, part by part."""
        if layout not in self._copies:
            self._copies[layout] = [
                [np.array(ranks) for ranks in sorted({tuple(each.ranks) for each in layout.holdings(parameter)})]
                for parameter in range(len(layout.parameters))
            ]
        return self._copies[layout]

    def _ranks_that_differ(self, parameter: int, guest: Guest) -> list[int]:
        """Ranks on which some part of a guest's parameter is not home's."""
        dim = self._layout.parameters[parameter].split_dim
        layouts = {"home": (self._layout, self._parameters), "guest": (guest.layout, guest.parameters)}
        cuts = sorted({
            edge for layout, _ in layouts.values() for held in layout.holdings(parameter)
            for edge in ((held.box.lo[dim], held.box.hi[dim]) if dim is not None else ())
        })  # fmt: skip
        own = {
            side: {
                part.box: int(_checksum_of(part, layout, tensors))
                for piece in layout.pieces(self._rank)
                if piece.parameter == parameter
                for part in _cut(piece, dim, cuts)
            }
            for side, (layout, tensors) in layouts.items()
        }
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        right = {box: value for each in gathered for box, value in each["home"].items()}
        return [
            rank
            for rank, each in enumerate(gathered)
            if any(right[box] != value for box, value in each["guest"].items())
        ]

    # ------------------------------------------------------------------------------------------------------- gradients

    def _sample(self, iteration: int) -> Iterator[_Sampled]:
        """Evenly spaced elements of what this rank's optimizer reads, others in every check."""
        for parameter, pieces in self._owned.items():
            ends = np.cumsum([piece.box.numel for piece in pieces])
            count = min(int(ends[-1]), _SAMPLED)
            chosen = np.sort((np.arange(count) * int(ends[-1]) // count + iteration) % int(ends[-1]))
            local, whole = [], []
            for piece, end in zip(pieces, ends.tolist(), strict=True):
                first = end - piece.box.numel
                inside = np.stack(np.unravel_index(chosen[(chosen >= first) & (chosen < end)] - first, piece.box.shape))
                local.append(inside + np.array(piece.start)[:, None])
                whole.append(inside + np.array(piece.box.lo)[:, None])
            axes = tuple(torch.from_numpy(axis).cuda() for axis in np.concatenate(local, axis=1))
            yield _Sampled(parameter, axes, np.concatenate(whole, axis=1).T)

    def _values(self, sampled: Sequence[_Sampled]) -> list[NDArray[np.float64]]:
        """The sampled elements of home's gradients as they are now."""
        values = [self._parameters[each.parameter].main_grad[each.local].double() for each in sampled]
        return [np.asarray(each) for each in _on_the_host(values)]

    def _compare_gradients(
        self,
        check: _Check,
        alone: list[NDArray[np.float64]],
        losses: Mapping[str, tuple[float, float]],
        record: StepRecord,
    ) -> str:
        """What was found, for the log; RuntimeError on every rank where something is off by more than sums explain."""
        step = self._values(check.sampled)
        names = range(len(self._layout.parameters))
        # By parameter: squares and how many; then whether a value is not finite: home alone's, the step's.
        sums = np.zeros((len(names) + 1, 2))
        for each, values, other in zip(check.sampled, alone, step, strict=True):
            finite = values[np.isfinite(values)]
            sums[each.parameter] = float(finite @ finite), len(values)
            sums[-1] += len(finite) < len(values), not np.isfinite(other).all()
        sums = _reduced(sums, dist.ReduceOp.SUM)
        if sums[-1, 0] or (sums[-1, 1] and self._scaled):
            return "gradients are not finite, which is Megatron's to judge, and were not compared"
        allowed = self._allowed()
        for key in sorted(losses):
            (wanted, tokens), (total, counted) = losses[key], record.losses[key]
            if counted != tokens or not abs(total - wanted) <= allowed * abs(wanted):
                self._fail(
                    check.iteration,
                    f"{key} sums to {total:.9g} over {counted:.0f} tokens, in home alone to {wanted:.9g} over {tokens:.0f}",
                )
        sizes = np.sqrt(sums[:-1, 0] / np.maximum(sums[:-1, 1], 1))
        least = _FAINT * float(np.sqrt(sums[:-1, 0].sum() / max(sums[:-1, 1].sum(), 1)))
        off = np.zeros(len(names))
        for each, values, other in zip(check.sampled, alone, step, strict=True):
            off[each.parameter] = _off(other, values, max(float(sizes[each.parameter]), least))
        everyones = _reduced(off, dist.ReduceOp.MAX)
        worst = int(everyones.argmax())
        if not everyones[worst] <= allowed:
            others = int((~(everyones <= allowed)).sum()) - 1
            self._fail_on_gradient(check, worst, others, float(off[worst]), alone, step, allowed)
        return f"the gradient is off by {everyones[worst]:.1e} from that of home alone (allowed {allowed:.0e})"

    def _fail_on_gradient(
        self,
        check: _Check,
        parameter: int,
        others: int,
        off: float,
        alone: list[NDArray[np.float64]],
        step: list[NDArray[np.float64]],
        allowed: float,
    ) -> NoReturn:
        own: tuple[float, list[int], float, float] | None = None
        for each, values, other in zip(check.sampled, alone, step, strict=True):
            if each.parameter == parameter:
                at = int(np.nan_to_num(np.abs(other - values), nan=np.inf).argmax())
                own = off, each.whole[at].tolist(), float(other[at]), float(values[at])
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, own)
        wrong = [rank for rank, each in enumerate(gathered) if each is not None and not each[0] <= allowed]
        most, place, value, wanted = max((gathered[rank] for rank in wrong), key=lambda each: each[0])
        self._fail(
            check.iteration,
            f"the gradient of {self._name(parameter)} on {_ranks(wrong)} is off by {most:.1e} from that of home alone "
            f"(allowed {allowed:.0e}), and so {'is' if others == 1 else 'are'} {others} more of {len(self._layout.parameters)} "
            f"parameters; element {place} is {value:.9g}, in home alone {wanted:.9g}",
        )

    def _allowed(self) -> float:
        """The largest difference that the order of sums explains, relative to the size of a parameter's gradient.

        Layouts add the same products in other orders, and round in between. A model of four layers on four ranks was off by
        2e-7 in single precision, by 1e-3 in fp16, whose products are rounded to 2^-12, and by 4e-3 in bf16, at 2^-9; layers
        pass on what they round, so that deep models and long sums may have some tens of that. A lost or doubled part of the
        gradient is off by its share of it, of order 1. What was folded in bf16 was rounded to 2^-9, too.
        """
        parameter = next(iter(self._parameters.values()))
        tf32 = parameter.is_cuda and parameter.dtype is torch.float32
        allowed = _ALLOWED_TF32 if tf32 else _ALLOWED[parameter.dtype]
        return max(allowed, _ALLOWED[torch.bfloat16]) if self._folded_in is torch.bfloat16 else allowed

    def _name(self, parameter: int) -> str:
        return self._layout.parameters[parameter].name

    def _fail(self, iteration: int, problem: str) -> NoReturn:
        raise RuntimeError(
            f"verify_every: iteration {iteration}: {problem}; the job ends here, as it would train on with wrong numbers: "
            "look at these ranks' devices, or report it, and go on from a checkpoint before this iteration"
        )


def _checksum_of(piece: Piece, layout: Layout, tensors: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Checksum of a piece of this rank's tensors."""
    region = tensors[piece.parameter].detach()[
        tuple(slice(low, low + size) for low, size in zip(piece.start, piece.box.shape, strict=True))
    ]
    return checksum(region, piece.box.lo, layout.parameters[piece.parameter].shape)


def _cut(piece: Piece, dim: int | None, cuts: Sequence[int]) -> Iterator[Piece]:
    """The parts of a piece between positions along a dim."""
    if dim is None:
        yield piece
        return
    low, high = piece.box.lo[dim], piece.box.hi[dim]
    for first, last in itertools.pairwise(edge for edge in cuts if low <= edge <= high):
        lo, hi, start = list(piece.box.lo), list(piece.box.hi), list(piece.start)
        lo[dim], hi[dim], start[dim] = first, last, start[dim] + first - low
        yield Piece(piece.parameter, type(piece.box)(tuple(lo), tuple(hi)), tuple(start))


def _off(step: NDArray[np.float64], alone: NDArray[np.float64], size: float) -> float:
    """Root of the mean square difference, relative to the larger of ``size`` and that of the values."""
    if not np.isfinite(step).all():
        return np.inf
    difference = float(np.sqrt(np.mean((step - alone) ** 2)))
    if not difference:
        return 0.0
    size = max(size, float(np.sqrt(np.mean(alone**2))))
    return difference / size if size else np.inf


def _reduced(values: NDArray[np.float64], operation: Any) -> NDArray[np.float64]:
    """The values of all ranks together."""
    tensor = torch.from_numpy(values.copy()).cuda()
    dist.all_reduce(tensor, op=operation)
    return np.asarray(tensor.cpu().numpy())


def _on_the_host(values: Sequence[torch.Tensor]) -> list[NDArray[np.float64]]:
    """All in one copy from the device."""
    if not values:
        return []
    joined = torch.cat(list(values)).cpu().numpy()
    return np.split(joined, np.cumsum([len(each) for each in values])[:-1])


def _ranks(ranks: Sequence[int] | NDArray[np.int64]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {listed([int(rank) for rank in ranks])}"


@contextlib.contextmanager
def _unnoticed(model: Sequence[Any]) -> Iterator[None]:
    """A pass that Megatron's timers and rerun machine do not see: what is wrong with the step shows in the step itself."""
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.core.utils import get_model_config

    patches = Patches()
    patches.set(get_rerun_state_machine(), "validate_result", lambda *_, **__: None)
    patches.set(get_model_config(model[0]), "timers", None)
    try:
        yield
    finally:
        patches.undo_all()
