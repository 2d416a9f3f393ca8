"""Megatron's global state per strategy, and the one function that switches it.

Megatron keeps the parallel layout in two places that must agree: the globals of ``megatron.core.parallel_state`` (with
the sizes in the argument namespace) and the ``ProcessGroupCollection`` that models hold. A ``ParallelState`` is both for
one strategy. ``ParallelStates.activate`` is the only writer of the globals after start-up, and restores home's.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hotspa_megatron.hooks import compat
from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.runtime.group_pool import GroupPool
from hotspa_megatron.strategy import Strategy

# Grow-only scratch memory without a layout: one for all strategies. initialize_model_parallel insists on making its own.
_SHARED_GLOBALS = ("_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER")


@dataclass(frozen=True)
class ParallelState:
    """One strategy as Megatron sees it. ``globals``: parallel_state's; ``sizes``: argument name -> value."""

    strategy: Strategy
    globals: dict[str, Any]
    sizes: dict[str, Any]
    groups: Any
    """megatron.core's ProcessGroupCollection."""


def _global_names() -> list[str]:
    """Every global of parallel_state that describes a layout, whatever this Megatron version calls them."""
    from megatron.core import parallel_state

    return [
        name
        for name in vars(parallel_state)
        if name.startswith("_") and not name.startswith("__") and name.isupper() and name not in _SHARED_GLOBALS
    ]


def _read_globals() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {name: getattr(parallel_state, name) for name in _global_names()}


def _write_globals(values: dict[str, Any]) -> None:
    from megatron.core import parallel_state

    for name, value in values.items():
        setattr(parallel_state, name, value)


@contextlib.contextmanager
def recording_groups(pool: GroupPool) -> Iterator[None]:
    """Adopt into ``pool`` every group that Megatron creates meanwhile, those of other ranks included."""
    from megatron.core import parallel_state

    patches = Patches()

    def record(create: Callable[..., Any]) -> Callable[..., Any]:
        def create_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
            group = create(ranks, *args, **kwargs)
            if ranks is not None:
                pool.adopt(ranks, group, backend=kwargs.get("backend"))
            return group

        return create_group

    patches.wrap(parallel_state, "create_group", record)
    try:
        yield
    finally:
        patches.undo_all()


class ParallelStates:
    """The parallel states of all strategies of a job; home's is the one that Megatron itself set up.

    ``args`` is Megatron's argument namespace. Create every strategy on every rank, in the same order.
    """

    def __init__(
        self, home: Strategy, args: Any, pool: GroupPool, *, embedding_ranks: Any = None, position_ranks: Any = None
    ):
        self._args = args
        self._pool = pool
        self._embedding_ranks = embedding_ranks
        self._position_ranks = position_ranks
        names = (
            *compat.TENSOR_PARALLEL_FIELDS,
            "pipeline_model_parallel_size",
            "transformer_pipeline_model_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "overlap_p2p_comm",
            "context_parallel_size",
            "data_parallel_size",
            "sequence_parallel",
            *compat.UNEVEN_PIPELINE_ARGUMENTS,
        )
        self.home = ParallelState(
            strategy=home,
            globals=_read_globals(),
            sizes={name: getattr(args, name) for name in names if hasattr(args, name)},
            groups=compat.process_groups(),
        )
        self._states = {home: self.home}
        self.active = self.home

    def __getitem__(self, strategy: Strategy) -> ParallelState:
        return self._states[strategy]

    def create(self, strategy: Strategy) -> ParallelState:
        """Set up a strategy's globals and groups beside home's. Collective; a known strategy is returned as it is."""
        if strategy in self._states:
            return self._states[strategy]
        from megatron.core import parallel_state

        home, sizes = self.home.strategy, dict(self.home.sizes)
        same_layout = strategy.same_layout(home)
        for name in compat.TENSOR_PARALLEL_FIELDS:
            if sizes.get(name) is not None:
                sizes[name] = strategy.tp
        sizes["pipeline_model_parallel_size"] = strategy.pp
        if "transformer_pipeline_model_parallel_size" in sizes:
            sizes["transformer_pipeline_model_parallel_size"] = strategy.pp
        sizes["virtual_pipeline_model_parallel_size"] = strategy.vpp if strategy.vpp > 1 else None
        sizes["context_parallel_size"] = strategy.cp
        sizes["data_parallel_size"] = strategy.dp
        sizes["sequence_parallel"] = self.home.sizes["sequence_parallel"] and strategy.tp > 1
        if not same_layout:
            # As Megatron has it: transfers overlap where stages interleave, and only there.
            sizes["overlap_p2p_comm"] = strategy.vpp > 1
            # A guest's pipeline splits evenly; home's uneven split has no meaning for another number of stages.
            for name in compat.UNEVEN_PIPELINE_ARGUMENTS:
                if name in sizes:
                    sizes[name] = False if isinstance(sizes[name], bool) else None
        patches, shared = (
            Patches(),
            {name: getattr(parallel_state, name) for name in _SHARED_GLOBALS if hasattr(parallel_state, name)},
        )

        def from_pool(_: Callable[..., Any]) -> Callable[..., Any]:
            def create_group(
                ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None,
                use_local_synchronization: bool = False, group_desc: Any = None,
            ) -> Any:  # fmt: skip
                return self._pool.get(
                    ranks, backend=backend, timeout=timeout, pg_options=pg_options, group_desc=group_desc
                )

            return create_group

        patches.wrap(parallel_state, "create_group", from_pool)
        try:
            _write_globals({name: {} if isinstance(value, dict) else None for name, value in self.home.globals.items()})
            _write_globals(dict.fromkeys(shared))
            self._write_sizes(sizes)
            compat.initialize_model_parallel(
                strategy, self._args, embedding_ranks=self._embedding_ranks, position_ranks=self._position_ranks
            )
            state = ParallelState(
                strategy=strategy, globals=_read_globals(), sizes=sizes, groups=compat.process_groups()
            )
        finally:
            patches.undo_all()
            _write_globals(self.home.globals)
            _write_globals(shared)
            self._write_sizes(self.home.sizes)
        self._states[strategy] = state
        return state

    @contextlib.contextmanager
    def activate(self, strategy: Strategy) -> Iterator[ParallelState]:
        """Make ``strategy`` the one that Megatron's globals and arguments describe; home's again afterwards, always."""
        state = self._states[strategy]
        if state is self.home:
            yield state
            return
        if self.active is not self.home:
            raise RuntimeError(f"{self.active.strategy} is active; strategies do not nest")
        # Megatron itself may have changed home's globals since start (its virtual pipeline rank, for one).
        home_globals, home_sizes = _read_globals(), {name: getattr(self._args, name) for name in self.home.sizes}
        self.active = state
        try:
            _write_globals(state.globals)
            self._write_sizes(state.sizes)
            yield state
        finally:
            self.active = self.home
            _write_globals(home_globals)
            self._write_sizes(home_sizes)

    def _write_sizes(self, sizes: dict[str, Any]) -> None:
        for name, value in sizes.items():
            setattr(self._args, name, value)


@contextlib.contextmanager
def random_state_of(strategy: Strategy, *, rank: int, seed: int, iteration: int, segment: int) -> Iterator[None]:
    """Random numbers of one segment, a function of (seed, iteration, segment, position in the strategy) alone.

    Nothing of it is saved: home's generators stand afterwards where they stood before, so a stock checkpoint resumes.
    Call it under ``activate``: tensor-parallel seeds follow Megatron's own scheme for the active layout.
    """
    from megatron.core.tensor_parallel import random as megatron_random

    at = strategy.coordinates(rank)
    # Ranks of one tensor-parallel group share the base: Megatron adds the tp rank itself where masks must differ.
    key = repr((seed, iteration, segment, at.pp, at.dp, at.cp)).encode()
    base = int.from_bytes(hashlib.sha256(key).digest()[:4], "big") % (2**31 - 2**17)
    with preserved_random_state():
        torch.manual_seed(base)
        np.random.seed(base)
        random.seed(base)
        megatron_random.model_parallel_cuda_manual_seed(base)
        yield


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Every generator that Megatron draws from stands afterwards where it stood before."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    seeds = set(tracker.seeds_) if hasattr(tracker, "seeds_") else None
    states, cpu, device = tracker.get_states(), torch.get_rng_state(), torch.cuda.get_rng_state()
    numpy_state, python_state = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        tracker.set_states(states)
        if seeds is not None:
            tracker.seeds_ = seeds
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state(device)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
