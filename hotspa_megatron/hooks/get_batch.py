"""The user's own ``forward_step`` gets our micro-batches through the ``get_batch`` that it looks up in its own module.

The contract is read from the names that ``forward_step`` unpacks: they are the same in every Megatron version, while
their number and order are not. Any iterator but ours goes to the user's original function, so evaluation is untouched.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

import torch

from hotspa_megatron.hooks.data import MicroBatch, SegmentIterator
from hotspa_megatron.hooks.patching import Patches
from hotspa_megatron.strict_yaml import one_line

_FIX = "name a function for it: `get_batch: pkg.mod:function` in the --hotspa-config file"


def _boundaries(boundaries: tuple[int, ...]) -> torch.Tensor:
    if boundaries[-1] > torch.iinfo(torch.int32).max:
        raise ValueError(
            f"a micro-batch of {boundaries[-1]:,} tokens is beyond 32-bit sequence boundaries; lower its budget"
        )
    return torch.tensor([boundaries], dtype=torch.int32).cuda(non_blocking=True)


def _packed_seq_params(batch: MicroBatch) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    boundaries = _boundaries(batch.boundaries)[0]
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=batch.longest,
        max_seqlen_kv=batch.longest,
    )


VALUES: dict[str, Callable[[MicroBatch], Any]] = {
    "tokens": lambda batch: batch.tokens,
    "labels": lambda batch: batch.labels,
    "loss_mask": lambda batch: batch.loss_mask,
    "position_ids": lambda batch: batch.position_ids,
    "attention_mask": lambda batch: None,
    "packed_seq_params": _packed_seq_params,
    "cu_seqlens": lambda batch: _boundaries(batch.real_boundaries),
    "cu_seqlens_padded": lambda batch: _boundaries(batch.boundaries),
    # On the CPU: forward_step calls .item() on it for every micro-batch, which would wait for the GPU.
    "max_seqlen": lambda batch: torch.tensor(batch.longest, dtype=torch.int32),
    "hybrid_cp_group": lambda batch: None,
    "local_cp_size": lambda batch: None,
}
"""Everything that Megatron's own training scripts unpack, and what it is for one of our micro-batches."""

_ALWAYS_NEEDED = ("tokens", "labels", "loss_mask", "position_ids")


def unwrapped(forward_step: Callable[..., Any]) -> Any:
    """The plain function inside partials, decorators, bound methods and callable objects."""
    while True:
        if isinstance(forward_step, functools.partial):
            forward_step = forward_step.func
        elif hasattr(forward_step, "__wrapped__"):
            forward_step = forward_step.__wrapped__
        elif hasattr(forward_step, "__func__"):
            forward_step = forward_step.__func__
        elif not hasattr(forward_step, "__code__") and hasattr(type(forward_step).__call__, "__code__"):
            forward_step = type(forward_step).__call__
        else:
            return forward_step


def check(forward_step: Callable[..., Any], *, adapter: str | None) -> None:
    """Raise ValueError, before anything is built, where ``serve`` could not."""
    function = unwrapped(forward_step)
    if "get_batch" not in getattr(function, "__globals__", {}):
        raise ValueError(
            f"forward_step {getattr(function, '__qualname__', repr(forward_step))}: its module has no function get_batch "
            "to take over; pass a plain function that calls get_batch(data_iterator) of its own module"
        )
    if adapter is not None:
        _named_function(adapter)
    else:
        contract_of(forward_step)


def contract_of(forward_step: Callable[..., Any]) -> tuple[str, ...]:
    """The names that ``forward_step`` unpacks from ``get_batch(...)``, in order.

    Raises ValueError, with file and line, where they cannot be read or are not Megatron's.
    """
    function = unwrapped(forward_step)
    code = function.__code__
    where = f"{code.co_filename}:{code.co_firstlineno}: {function.__name__}"
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError) as error:
        raise ValueError(f"{where}: its source cannot be read; {_FIX}") from error
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if not isinstance(node.value.func, ast.Name) or node.value.func.id != "get_batch":
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Tuple | ast.List) or not all(isinstance(each, ast.Name) for each in target.elts):
            raise ValueError(f"{where}: `{ast.unparse(node)}` does not unpack names; {_FIX}")
        names = tuple(each.id for each in target.elts if isinstance(each, ast.Name))
        unknown = [name for name in names if name not in VALUES]
        missing = [name for name in _ALWAYS_NEEDED if name not in names]
        if unknown or missing or not {"packed_seq_params", "cu_seqlens", "cu_seqlens_padded"} & set(names):
            problem = (
                f"unknown: {', '.join(unknown)}" if unknown
                else f"missing: {', '.join(missing)}" if missing
                else "neither packed_seq_params nor cu_seqlens is among them, so packed sequences would see each other"
            )  # fmt: skip
            raise ValueError(f"{where}: cannot serve the names it unpacks from get_batch ({problem}); {_FIX}")
        return names
    raise ValueError(f"{where}: it does not call get_batch; {_FIX}")


def _named_function(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever somebody's module does while it is imported
        problem = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"get_batch: {name}: {problem}; name a function, as PACKAGE.MODULE:FUNCTION") from error


def serve(forward_step: Callable[..., Any], patches: Patches, *, adapter: str | None) -> None:
    """Replace ``get_batch`` where ``forward_step`` looks it up, once, through ``patches``.

    ``adapter``: "pkg.mod:function" of the configuration, a function from our MicroBatch to what ``forward_step``
    expects of ``get_batch``; None reads the contract from the source. Raises ValueError where neither serves.
    """
    check(forward_step, adapter=adapter)
    module = unwrapped(forward_step).__globals__
    original = module["get_batch"]
    if hasattr(original, "serves_hotspa"):
        return
    if adapter is not None:
        convert = _named_function(adapter)
    else:
        names = contract_of(forward_step)

        def convert(batch: MicroBatch) -> Any:
            return [VALUES[name](batch) for name in names]

    @functools.wraps(original)
    def get_batch(data_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data_iterator, SegmentIterator):
            return convert(next(data_iterator))
        return original(data_iterator, *args, **kwargs)

    get_batch.serves_hotspa = True  # type: ignore[attr-defined]
    patches.item(module, "get_batch", get_batch)
    if "update_seqlen_stats_from_cu_seqlens" in module:
        # It counts work as home's layout would; the step adds its own count once (see forward_backward).
        count = module["update_seqlen_stats_from_cu_seqlens"]
        patches.item(module, "update_seqlen_stats_from_cu_seqlens", _outside_segments(count))


_in_segment = False


def mark_segment(inside: bool) -> None:
    """Tell the replaced work counter whether a segment of ours is running."""
    global _in_segment
    _in_segment = inside


def _outside_segments(count: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(count)
    def counted(*args: Any, **kwargs: Any) -> None:
        if not _in_segment:
            count(*args, **kwargs)

    return counted
