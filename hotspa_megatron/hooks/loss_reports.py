"""Losses of a step's segments, put together exactly: sums and token counts, never means of means.

A segment's schedule reports what the user's loss function says of each micro-batch on the ranks of its own last stage. They
are summed over the world once per step and handed to the training loop as one report of home's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from hotspa_megatron.hooks.data import SegmentIterator
from hotspa_megatron.strategy import Strategy

TOKENS: Final = ""
"""Key of the valid tokens in ``LossReports.sum``; no loss report can use it."""


class Tally:
    """Loss reports and valid tokens of this rank's segments, summed in double precision."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        self.tokens = 0.0
        self._last = 0.0

    def count_tokens(self, model: Any, num_tokens: Any = None, **_: Any) -> None:
        """In the place of finalize_model_grads while a segment runs: only note the tokens that the schedule counted."""
        self._last = float(num_tokens) if num_tokens is not None else 0.0

    def add(self, reports: list[Any], counts: bool) -> None:
        """Take in a segment's reports (one dict per micro-batch) where this rank's count."""
        tokens, self._last = self._last, 0.0
        if not counts:
            return
        self.tokens += tokens
        for key in reports[0] if reports else ():
            values = [report[key].detach() for report in reports]
            if values[0].numel() != 2:
                raise ValueError(
                    f"the loss report's {key!r} has {values[0].numel()} elements; return [sum, tokens] of two, as "
                    "Megatron's own loss function does"
                )
            total, count = torch.stack([value.double().view(2) for value in values]).sum(0).tolist()
            before = self.sums.get(key, (0.0, 0.0))
            self.sums[key] = (before[0] + total, before[1] + count)


class LossReports:
    """A job's loss reports, seen from this rank."""

    def __init__(self, home: Strategy) -> None:
        self._home = home
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._report_keys: tuple[str, ...] | None = None

    def counts(self, strategy: Strategy) -> bool:
        """Whether this rank's loss reports count: once per token, so only tp 0 of the last stage."""
        at = strategy.coordinates(self._rank)
        return at.pp == strategy.pp - 1 and at.tp == 0

    def sum(self, tally: Tally) -> dict[str, tuple[float, float]]:
        """Sum every key's (total, tokens) over the world, once per step; ``TOKENS`` holds the valid tokens.

        Ranks that never are a last stage do not know the keys: they learn them in the first step that has any.
        """
        keys = self._report_keys
        if keys is None:
            gathered: list[Any] = [None] * self._world
            dist.all_gather_object(gathered, tuple(tally.sums))
            keys = tuple(sorted({key for each in gathered for key in each}))
            if keys:
                self._report_keys = keys
        unknown = sorted(set(tally.sums) - set(keys))
        if unknown:
            raise RuntimeError(f"the loss report has a new key {unknown[0]!r}; its keys must be the same in every step")
        zero = (0.0, 0.0)
        rows = [tally.sums.get(key, zero) for key in keys] + [(0.0, tally.tokens)]
        values = torch.tensor(rows, dtype=torch.float64).cuda()
        dist.all_reduce(values)
        sums = [(float(total), float(tokens)) for total, tokens in values.tolist()]
        return dict(zip((*keys, TOKENS), sums, strict=True))

    def report(self, totals: dict[str, tuple[float, float]]) -> list[Any]:
        """One report on every rank of home's last stage: the training loop then sums it over home's dp x cp ranks."""
        home = self._home
        if home.coordinates(self._rank).pp != home.pp - 1:
            return []
        share = home.dp * home.cp
        return [
            {
                # Without a valid token the loss is 0 of something, not 0 / 0.
                key: torch.tensor([total / share, (tokens or 1.0) / share], dtype=torch.float64).cuda()
                for key, (total, tokens) in totals.items()
            }
        ]


def checked(forward_step_func: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a loss function without a token count: its sum over micro-batches of any size would be meaningless.

    And have it see zeros where the mask is: it multiplies by the mask, and a NaN that a kernel left there would stay one.
    """

    @functools.wraps(forward_step_func)
    def forward_step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        output, loss_func = forward_step_func(data_iterator, model, *args, **kwargs)

        def counted(losses: Any, *loss_args: Any, **loss_kwargs: Any) -> Any:
            result = loss_func(_only_counted(losses, data_iterator), *loss_args, **loss_kwargs)
            if len(result) != 3:
                raise ValueError(
                    f"the loss function returns {len(result)} values; return (loss sum, number of tokens, report), as "
                    "Megatron's own does: a mean per micro-batch cannot be put together exactly"
                )
            return result

        return output, counted

    return forward_step


def _only_counted(losses: Any, iterator: SegmentIterator) -> Any:
    """Losses of tokens, exactly 0 where they do not count; what is not one number per token stays as it is."""
    mask = iterator.latest_mask
    if not torch.is_tensor(losses) or mask is None or losses.shape != mask.shape:
        return losses
    return torch.where(mask != 0, losses, 0.0)
