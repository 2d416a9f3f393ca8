"""What every rank must have been given alike, compared once: before any group of ranks but the world exists.

Each rank writes down what it was given: Megatron's arguments, the configuration file, the data, versions, environment. Over
the job's store every rank holds a fingerprint of that against rank 0's, one small message a rank; where they differ, all ranks
are told ranks, item and both values. Paths may differ from machine to machine; what lies behind them may not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

import hotspa_megatron
from hotspa_megatron.config import ResolvedConfig
from hotspa_megatron.hooks import auto, checkpoint, compat, cpu
from hotspa_megatron.hooks.flags import FLAG
from hotspa_megatron.hooks.samples import data_files, data_weights
from hotspa_megatron.strategy import listed
from hotspa_megatron.strict_yaml import shown

_OF_A_RANK: Final = frozenset({"rank", "local_rank"})
_PATHS: Final = ("path", "dir", "file", "folder", "prefix", "save", "load", "hotspa_config")
"""How the names of flags end that hold paths; some that end so are switches, as --async-save."""
_NUMBER: Final = re.compile(r"[0-9.]+(e-?[0-9]+)?")
VARIABLES: Final = (
    # What is computed, and in which order sums are taken.
    *("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCHDYNAMO_DISABLE"),
    *("TORCH_COMPILE_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_*"),
    # How ranks talk to each other: where these differ, NCCL hangs or fails.
    *("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS"),
    *("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_NVLS_ENABLE", "NCCL_COLLNET_ENABLE", "NCCL_P2P_DISABLE"),
)
"""Environment variables that change results or what ranks agree on; a star stands for any ending."""
_INSTALLED: Final = ("torch", "numpy", "transformer-engine", "flash-attn", "apex")
_BLOCKS: Final = 16
_BLOCK_BYTES: Final = 4096
_ITEMS_SHOWN: Final = 3
_VALUES_SHOWN: Final = 3
_NOT_SET: Final = "not set"
_PATIENCE_S: Final = 5.0
_SILENT: Final = (
    "said nothing of what they were given; were they started without --hotspa-config, or do they stand still?"
)

_rounds = itertools.count()
_flags: tuple[str, ...] = ()


def remember_flags(parser: Any) -> None:
    """Note which arguments are Megatron's own: what a user's script adds may differ between ranks for reasons of its own."""
    global _flags
    _flags = tuple(action.dest for action in parser._actions)


def given(args: Any, resolved: ResolvedConfig | None) -> dict[str, str]:
    """What this rank was given, by the name that a message calls it, values as a message shows them.

    ``resolved``: None where there is no file yet, as before a job has planned for itself. A data file is known by its size
    and ``_BLOCKS`` blocks of it: another file is seen, a changed token may not be.
    """
    config: dict[str, Any] = {FLAG: auto.AUTO}
    shape: dict[str, Any] = {}
    if resolved is not None:
        config = {FLAG: "a file"} | {
            f"{key} of the --hotspa-config file": value for key, value in resolved.config.contents().items()
        }
        shape = {f"the model's {name}": value for name, value in dataclasses.asdict(resolved.shape).items()}
    flags = {
        f"--{name.replace('_', '-')}": _without_paths(value, is_path=name.endswith(_PATHS))
        for name in _flags
        if name not in _OF_A_RANK
        for value in [getattr(args, name, None)]
        if _is_plain(value)
    }
    files = {f"data file {number} ({path.suffix or path.name})": _known_by(path)
             for number, path in enumerate(data_files(args), 1)}  # fmt: skip
    files["the weights of the data"] = repr(data_weights(args))
    files["the checkpoint behind --load"] = checkpoint.seen(args)
    versions = {
        "the code of hotspa_megatron": _code(),
        "the version of megatron-core": compat.version(),
        **{f"the code of {package}": _sizes_in(package) for package in ("megatron.core", "megatron.training")},
        **{f"the version of {name}": _version(name) for name in _INSTALLED},
        "the version of Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "what it runs on": "CPU" if cpu.installed() else "CUDA",
    }
    variables = {f"the variable {name}": value for name, value in sorted(os.environ.items()) if _matters(name)}
    return {
        name: value if isinstance(value, str) else repr(value)
        for name, value in {**config, **flags, **shape, **files, **versions, **variables}.items()
    }


def difference(everyone: Mapping[int, Mapping[str, str]]) -> str | None:
    """What ranks were given differently, in one line: rank, item, both values. None where nothing is."""
    ranks = sorted(everyone)
    names = dict.fromkeys(name for rank in ranks for name in everyone[rank])
    found = []
    for name in names:
        values = [everyone[rank].get(name, _NOT_SET) for rank in ranks]
        if len(set(values)) == 1:
            continue
        counts = Counter(values)
        common = max(counts, key=lambda value: (counts[value], -values.index(value)))
        others = [value for value in dict.fromkeys(values) if value != common]
        said = [f"{shown(value)} on {_holders(everyone, name, value)}" for value in others[:_VALUES_SHOWN]]
        found.append(f"{name} is {', '.join(said)}, {shown(common)} on rank {ranks[values.index(common)]}")
    if not found:
        return None
    more = f"; and {len(found) - _ITEMS_SHOWN} more" if len(found) > _ITEMS_SHOWN else ""
    return f"ranks were not given the same: {'; '.join(found[:_ITEMS_SHOWN])}{more}"


def compare(own: Mapping[str, str]) -> None:
    """Raise ValueError on every rank where ranks were given different things, or one says nothing of it for half of the
    store's time-out. Needs the world's store, and no group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store = PrefixStore(f"hotspa/agreement/{next(_rounds)}", dist.distributed_c10d._get_default_store())
    text = json.dumps(own)
    mark = hashlib.sha256(text.encode()).hexdigest()
    if rank:
        store.set(str(rank), "" if store.get("0").decode() == mark else text)
        problem = store.get("verdict").decode()
        if problem:
            store.add("heard", 1)
    else:
        store.set("0", mark)
        silent = _silent(store, range(1, world))
        if silent:
            problem = f"rank{'s' * (len(silent) > 1)} {listed(silent)} {_SILENT}"
        else:
            said = {other: store.get(str(other)).decode() for other in range(1, world)}
            everyone = {0: own} | {other: json.loads(each) if each else own for other, each in said.items()}
            problem = difference(everyone) or ""
        store.set("verdict", problem)
        deadline = time.monotonic() + _PATIENCE_S
        # The store may be in this process, which ends next.
        while problem and store.add("heard", 0) < world - 1 - len(silent) and time.monotonic() < deadline:
            time.sleep(0.05)
    if problem:
        raise ValueError(problem)


def _silent(store: Any, ranks: Iterable[int]) -> list[int]:
    """Those that have left no word when half of the store's time-out is over: the others wait for the verdict meanwhile."""
    deadline = time.monotonic() + store.timeout.total_seconds() / 2
    silent = []
    for rank in ranks:
        try:
            store.wait([str(rank)], timedelta(seconds=max(0.01, deadline - time.monotonic())))
        except RuntimeError:
            if time.monotonic() < deadline:  # it is the store that is gone
                raise
            silent.append(rank)
    return silent


def _holders(everyone: Mapping[int, Mapping[str, str]], name: str, value: str) -> str:
    ranks = [rank for rank in sorted(everyone) if everyone[rank].get(name, _NOT_SET) == value]
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, Enum))


def _without_paths(value: Any, *, is_path: bool = False) -> Any:
    """What is left to compare: that a path was given, shares of a blend, and whatever is no text."""
    if isinstance(value, (list, tuple)):
        return [_without_paths(each, is_path=is_path) for each in value]
    if not isinstance(value, str) or _NUMBER.fullmatch(value):
        return value
    return "(a path)" if is_path or os.sep in value else value


def _matters(name: str) -> bool:
    return any(name.startswith(each[:-1]) if each.endswith("*") else name == each for each in VARIABLES)


def _version(package: str) -> str:
    if package in ("torch", "numpy"):
        return str({"torch": torch, "numpy": np}[package].__version__)
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _code() -> str:
    """A fingerprint of this package's own files: checkouts of one version may differ."""
    folder = Path(hotspa_megatron.__file__).parent
    found = hashlib.sha256()
    for path in sorted(each for ending in ("py", "yaml") for each in folder.rglob(f"*.{ending}")):
        found.update(f"{path.relative_to(folder)}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _sizes_in(package: str) -> str:
    """A fingerprint of the names and sizes of a package's files: two checkouts may call themselves by one version."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec is not None else None
    found = hashlib.sha256()
    for folder in folders or ():
        for path in sorted(Path(folder).rglob("*.py")):
            found.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
    return found.hexdigest()[:12] if folders else "not there"


def _known_by(path: Path) -> str:
    """A file's size and a fingerprint of blocks that lie evenly in it, its first and its last among them."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, size - _BLOCK_BYTES)
        for block in range(_BLOCKS):
            file.seek(last * block // (_BLOCKS - 1))
            found.update(file.read(_BLOCK_BYTES))
    return f"{size} bytes, content {found.hexdigest()[:12]}"
