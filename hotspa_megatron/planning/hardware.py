"""What a cluster's devices and links sustain: read from ``hardware/*.yaml`` beside this file, or from a file of one's own.

Every number in such a file names its source or says why it is assumed; the loader refuses one that does neither. Nothing
is discovered or measured here. ``cost_model`` and ``memory_model`` turn these numbers into time and bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from hotspa_megatron.planning.topology import Link, Topology
from hotspa_megatron.strict_yaml import Value, config_error, read_document, shown

Curve: TypeAlias = tuple[tuple[int, float], ...]
"""(at, value) points by ascending ``at``."""

UNKNOWN_DEVICE: Final = "a100-80"
"""What stands for a device that no description is named after: the oldest of those that large runs are made on."""
_DEVICES: Final = (
    *((r"H200", "h200"), (r"H100", "h100"), (r"H20", "h20"), (r"A800", "a800-80"), (r"A100.*\b40 ?GB", "a100-40")),
    *((r"A100", "a100-80"), (r"L40S?", "l40s-pcie"), (r"MI250X?", "mi250x")),
)
"""A word in the name that a device's driver gives it, and the description that fits."""
_FOLDER: Final = Path(__file__).with_suffix("")
_MIB: Final = 2**20
_FIELDS_OF_A_NUMBER: Final = ("value", "source", "assumed")
_NUMBER: Final = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,9})?")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of node. GB are 10^9 bytes, MiB 2^20; rates are what is sustained, per GPU and direction, unless named peak.

    ``gemm_efficiency`` and ``attention_efficiency`` are shares of the peak that matrix products (by hidden size) and
    causal attention over packed sequences (by head dim: exact multiples of 64 keep it, others take the lower of the
    listed) reach, forward and backward together. ``layer_overhead_us``: time that a micro-batch takes per layer besides
    its operations, by tp. ``card_gigabytes_per_s``: one network card. ``spanning_gigabytes_per_s``: bus bandwidth of a
    collective over all GPUs of several nodes. ``reserved_mib``: CUDA context, communicators and what else no allocator
    sees; ``margin_mib``: kept free against fragmentation. ``communicator_mib``: device memory that a rank gives to a
    communicator, by its ranks; 0 where it takes none (gloo). ``assumed``: the fields that no source was found for.
    """

    name: str
    gpus_per_node: int
    cards_per_node: int
    memory_mib: int
    reserved_mib: int
    margin_mib: int
    communicator_mib: Curve
    peak_bf16_teraflops: float
    peak_fp32_teraflops: float
    gemm_efficiency: Curve
    attention_efficiency: Curve
    layer_overhead_us: Curve
    context_overhead_us: float
    copy_gigabytes_per_s: float
    intra_gigabytes_per_s: float
    pair_gigabytes_per_s: float
    intra_latency_us: float
    card_gigabytes_per_s: float
    card_latency_us: float
    spanning_gigabytes_per_s: float
    assumed: tuple[str, ...] = ()

    @property
    def usable_bytes(self) -> int:
        """Memory of one GPU that a plan may fill."""
        return (self.memory_mib - self.reserved_mib - self.margin_mib) * _MIB

    def gemm_flops(self, hidden_size: int, *, parameter_bytes: int = 2) -> float:
        """Operations per second of matrix products at this hidden size; between listed sizes linearly."""
        sizes, shares = zip(*self.gemm_efficiency, strict=True)
        return float(np.interp(hidden_size, sizes, shares)) * self._peak(parameter_bytes)

    def attention_flops(self, head_dim: int, *, parameter_bytes: int = 2) -> float:
        """Operations per second of attention; kernels pad a head dim that is no multiple of 64."""
        shares = [share for _, share in self.attention_efficiency]
        return (max(shares) if head_dim % 64 == 0 else min(shares)) * self._peak(parameter_bytes)

    def layer_overhead_s(self, tp: int) -> float:
        """Seconds per layer and micro-batch; a tp that is not listed takes the next listed one below."""
        return [microseconds for at, microseconds in self.layer_overhead_us if at <= tp][-1] * 1e-6

    def communicator_bytes(self, ranks: int) -> int:
        """Of one communicator on each of its ranks; a size that is not listed takes the next listed one below."""
        return round([mib for at, mib in self.communicator_mib if at <= ranks][-1] * _MIB)

    def with_nodes_of(self, gpus: int) -> Hardware:
        """The same devices and links with so many of them in each node, and cards in proportion."""
        cards = max(1, round(self.cards_per_node * gpus / self.gpus_per_node))
        return replace(self, gpus_per_node=gpus, cards_per_node=min(cards, gpus))

    def topology(self, world_size: int) -> Topology:
        """These nodes, filled one after the other, as reshard plans see them."""
        return Topology.nodes(
            world_size,
            min(self.gpus_per_node, world_size),
            cards_per_node=min(self.cards_per_node, self.gpus_per_node, world_size),
            # A copy reads and writes.
            local=Link(gigabytes_per_s=self.copy_gigabytes_per_s / 2, latency_us=0.0),
            intra_node=Link(gigabytes_per_s=self.intra_gigabytes_per_s, latency_us=self.intra_latency_us),
            inter_node=Link(gigabytes_per_s=self.card_gigabytes_per_s, latency_us=self.card_latency_us),
        )

    def _peak(self, parameter_bytes: int) -> float:
        return (self.peak_bf16_teraflops if parameter_bytes == 2 else self.peak_fp32_teraflops) * 1e12


def hardware_names() -> tuple[str, ...]:
    """The descriptions that come with the package."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def described_device(device: str | None) -> str:
    """The description for a device by its driver's name for it, as "NVIDIA H100 80GB HBM3"; None: no device, ranks on CPU."""
    if device is None:
        return "cpu-gloo"
    return next((name for word, name in _DEVICES if re.search(rf"\b{word}\b", device)), UNKNOWN_DEVICE)


def load_hardware(name: str | Path) -> Hardware:
    """A description by name, or from a file (anything that ends in .yaml or names a folder); ``ValueError`` on bad input."""
    text = str(name)
    is_file = text.endswith((".yaml", ".yml")) or "/" in text
    if not is_file:
        text = text.lower()
    if not is_file and text not in hardware_names():
        raise ValueError(
            f"--hardware: {shown(str(name))} is not known; write one of {', '.join(hardware_names())}, or a .yaml file"
        )
    path = Path(text) if is_file else _FOLDER / f"{text}.yaml"
    document = read_document(path)
    if document is None:
        raise config_error(path, 1, "file", "holds no keys; start from one of the package's own descriptions")
    kinds: Mapping[str, str] = {each.name: str(each.type) for each in fields(Hardware)}
    known = tuple(key for key in kinds if key not in ("name", "assumed"))
    found = document.mapping(known=known, refused={}, also={})
    if missing := [key for key in known if key not in found]:
        raise config_error(path, document.line, missing[0], "is missing; give its value and its source, or why assumed")
    values: dict[str, int | float | Curve] = {}
    assumed = []
    for key in known:
        number, is_assumed = _sourced(found[key])
        values[key] = _curve(number) if kinds[key] == "Curve" else _number(number, whole=kinds[key] == "int")
        assumed += [key] if is_assumed else []
    _check(found, values)
    # Types were read off the fields above, which a type checker cannot follow.
    return Hardware(name=path.stem, assumed=tuple(assumed), **values)  # type: ignore[arg-type]


def _sourced(entry: Value) -> tuple[Value, bool]:
    """The value of an entry and whether it is assumed; refuses an entry that says neither source nor reason."""
    parts = entry.mapping(known=_FIELDS_OF_A_NUMBER, refused={}, also={})
    if "value" not in parts:
        raise entry.error("has no value; write {value: ..., source: ...}")
    if ("source" in parts) == ("assumed" in parts):
        raise entry.error("needs either a source or the reason why it is assumed; write one of source and assumed")
    why = parts["source"] if "source" in parts else parts["assumed"]
    if not (why.text() or "").strip():
        raise why.error("says nothing; name where the number is from")
    return parts["value"], "assumed" in parts


def _number(value: Value, *, whole: bool = False) -> int | float:
    if whole:
        return value.integer()
    text = value.text()
    if text is None or not _NUMBER.fullmatch(text):
        raise value.error(f"{shown(str(text))} is not a number; write plain digits, with a point where needed")
    number = float(text)
    if not math.isfinite(number):
        raise value.error(f"{shown(text)} is too large")
    return number


def _curve(value: Value) -> Curve:
    points: list[tuple[int, float]] = []
    for pair in value.sequence():
        both = pair.sequence()
        if len(both) != 2:
            raise pair.error("is not a pair; write [at, value]")
        points.append((both[0].integer(), float(_number(both[1]))))
    if not points or [at for at, _ in points] != sorted({at for at, _ in points}):
        raise value.error("needs at least one pair [at, value], each once, rising")
    return tuple(points)


def _check(found: Mapping[str, Value], values: Mapping[str, int | float | Curve]) -> None:
    for key, value in values.items():
        numbers = [number for _, number in value] if isinstance(value, tuple) else [value]
        if key.endswith("efficiency") and not all(0 < number <= 1 for number in numbers):
            raise found[key].error(f"a share of the peak lies above 0 and up to 1, not {numbers}")
        if not key.endswith("_us") and key != "communicator_mib" and min(numbers) <= 0:
            raise found[key].error("must be above 0")
    memory, kept = values["memory_mib"], [values["reserved_mib"], values["margin_mib"]]
    if memory <= sum(kept):  # type: ignore[operator, arg-type]
        raise found["memory_mib"].error(f"{memory} MiB are taken by what is reserved and the margin; nothing is left")
    if values["cards_per_node"] > values["gpus_per_node"]:  # type: ignore[operator]
        raise found["cards_per_node"].error("exceeds gpus_per_node; count several cards of a GPU as one")
    for key, least, what in (("layer_overhead_us", 1, "tp 1"), ("communicator_mib", 2, "2 ranks")):
        curve = values[key]
        if isinstance(curve, tuple) and curve[0][0] != least:
            raise found[key].error(f"must start at {what}")
