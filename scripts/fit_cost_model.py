#!/usr/bin/env python3
"""Fits the cost model's constants for A800 GPUs to published times, and shows how far the model is from them.

    scripts/fit_cost_model.py            what is fitted, and the errors of the model as it is
    scripts/fit_cost_model.py --check    exit with 1 where planning/hardware/a800-80.yaml says something else

Links within a node are not fitted: they are what nccl-tests measured, and the tables agree with it. Products: the mean rate
of the rows that measure a whole model (pp 1) within a node. Attention: the median rate of its column, apart for head
dims that are multiples of 64 and others. Then, by least squares of relative errors at four lengths: overheads per layer
for each tp, and links of groups that span nodes.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hotspa_megatron.planning.cost_model import CostModel
from hotspa_megatron.planning.execution import Execution
from hotspa_megatron.planning.hardware import Hardware, load_hardware
from hotspa_megatron.planning.known_models import KNOWN_MODELS
from hotspa_megatron.strategy import Strategy

TABLE = Path(__file__).with_name("calibration") / "hydraulis_a800.csv"
LENGTHS = (1024, 4096, 8192, 16384)
CLOSE = 0.01
"""Relative difference up to which a constant counts as the one written down, which is rounded."""


class Row(NamedTuple):
    model: str
    layers: int
    hidden: int
    tp: int
    pp: int
    fixed: float
    per_token: float
    per_square: float
    """Seconds."""

    def seconds(self, length: int) -> float:
        return self.fixed + self.per_token * length + self.per_square * length**2


def rows() -> list[Row]:
    """The published points."""
    with TABLE.open() as file:
        found = csv.DictReader(line for line in file if not line.startswith("#"))
        return [
            Row(
                each["model"],
                int(each["layers"]),
                int(each["hidden"]),
                int(each["tp"]),
                int(each["pp"]),
                *(float(each[name]) / 1e3 for name in ("ms_fixed", "ms_per_token", "ms_per_square")),
            )
            for each in found
        ]


def predicted(row: Row, length: int, hardware: Hardware) -> float:
    """What the cost model says of a point: no replicas, no transfers between stages."""
    shape = KNOWN_MODELS[row.model]
    strategy = Strategy.from_world(row.tp * row.pp, tp=row.tp, cp=1, pp=row.pp)
    time = CostModel(shape, hardware, strategy.world_size).stage_time(Execution(strategy=strategy))
    time = replace(time, pipeline=0.0)
    return float(time.seconds(float(length), float(length) ** 2))


def errors(hardware: Hardware) -> Iterator[tuple[Row, int, float]]:
    """Relative error of the model at every point and length."""
    for row in rows():
        for length in LENGTHS:
            yield row, length, predicted(row, length, hardware) / row.seconds(length) - 1


def fit(hardware: Hardware) -> dict[str, float]:
    """The constants, in the units of the hardware file; ``hardware`` gives what is not fitted."""
    points = rows()
    node = hardware.intra_gigabytes_per_s * 1e9
    peak = hardware.peak_bf16_teraflops * 1e12

    def tensor_bytes(row: Row) -> float:
        return 16.0 * row.hidden * (row.tp - 1) / row.tp * row.layers / row.pp

    def link(row: Row) -> float:
        return hardware.pair_gigabytes_per_s * 1e9 if row.tp == 2 else node

    def operations(row: Row) -> float:
        shape = KNOWN_MODELS[row.model]
        layer = 4 * row.hidden**2 + 3 * row.hidden * shape.ffn_hidden_size
        return 6.0 * (layer * row.layers / row.pp + shape.padded_vocab_size * row.hidden) / row.tp

    found: dict[str, float] = {}
    for hidden in sorted({row.hidden for row in points}):
        whole = [row for row in points if row.hidden == hidden and row.pp == 1 and row.tp <= hardware.gpus_per_node]
        rates = [operations(row) / (row.per_token - tensor_bytes(row) / link(row)) for row in whole]
        found[f"gemm_efficiency {hidden}"] = statistics.mean(rates) / peak
    for name, even in (("64", True), ("104", False)):
        rates = [
            6.0 * row.hidden * row.layers / row.pp / row.tp / row.per_square
            for row in points
            if (KNOWN_MODELS[row.model].kv_channels % 64 == 0) == even
        ]
        found[f"attention_efficiency {name}"] = statistics.median(rates) / peak

    tps = sorted({row.tp for row in points})
    matrix, wanted = [], []
    for row in points:
        even = KNOWN_MODELS[row.model].kv_channels % 64 == 0
        for length in LENGTHS:
            known = operations(row) * length / (found[f"gemm_efficiency {row.hidden}"] * peak)
            rate = found[f"attention_efficiency {'64' if even else '104'}"] * peak
            known += 6.0 * row.hidden * row.layers / row.pp / row.tp * length**2 / rate
            spans = row.tp > hardware.gpus_per_node
            if not spans:
                known += tensor_bytes(row) * length / link(row)
            line = [row.layers / row.pp if row.tp == tp else 0.0 for tp in tps]
            line.append(tensor_bytes(row) * length / 1e9 if spans else 0.0)
            weight = 1 / row.seconds(length)
            matrix.append([weight * value for value in line])
            wanted.append(weight * (row.seconds(length) - known))
    solved = np.linalg.lstsq(np.array(matrix), np.array(wanted), rcond=None)[0]
    for tp, seconds in zip(tps, solved, strict=False):
        found[f"layer_overhead_us {tp}"] = float(seconds) * 1e6
    found["spanning_gigabytes_per_s"] = 1 / float(solved[-1])
    return found


def written(hardware: Hardware) -> dict[str, float]:
    """The same constants as the hardware file has them."""
    found = {"spanning_gigabytes_per_s": hardware.spanning_gigabytes_per_s}
    for name in ("gemm_efficiency", "attention_efficiency", "layer_overhead_us"):
        found |= {f"{name} {at}": value for at, value in getattr(hardware, name)}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Fit the cost model to published times.")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the hardware file says something else")
    arguments = parser.parse_args()
    hardware = load_hardware("a800-80")
    has, wants = written(hardware), fit(hardware)
    differ = 0
    for name, value in wants.items():
        off = abs(has[name] / value - 1)
        differ += off > CLOSE
        sys.stdout.write(f"{name:28} fitted {value:10.4f}   in the file {has[name]:10.4f}\n")
    found = list(errors(hardware))
    for model in sorted({row.model for row, _, _ in found}):
        sizes = [abs(error) for row, _, error in found if row.model == model]
        sys.stdout.write(f"{model:28} mean error {statistics.mean(sizes):.1%}, largest {max(sizes):.1%}\n")
    return 1 if arguments.check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
