"""The file that holds what was measured on a cluster, in the form that ``hardware`` reads.

Pure: what was measured comes from ``runtime/calibration.py``. Where such files are kept between jobs is said here, too.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from hotspa_megatron.planning.hardware import Hardware, load_hardware

CACHE_VARIABLE: Final = "HOTSPA_CACHE"
"""Environment variable: the folder of profiles that jobs made for themselves; default ~/.cache/hotspa_megatron."""


def as_yaml(
    values: Mapping[str, Any], assumed: Mapping[str, str], *, title: str, measured: str, notes: Sequence[str] = ()
) -> str:
    """A hardware description: every number either ``measured`` (when, where, with what) or assumed for a reason."""
    lines = [
        f"# {title}",
        "# GB: 10^9 bytes; rates per device and direction, with all ranks at it. Fields: class Hardware in planning/hardware.py.",
        *(f"# {note}" for note in notes),
    ]
    for each in fields(Hardware):
        if each.name in ("name", "assumed"):
            continue
        why = f"assumed: {_quoted(assumed[each.name])}" if each.name in assumed else f"source: {_quoted(measured)}"
        lines.append(f"{each.name}: {{value: {_number(values[each.name])}, {why}}}")
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    """Write a description that is whole or not there; ``ValueError`` where it is none or cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            draft = Path(folder) / path.name
            draft.write_text(text, encoding="utf-8")
            load_hardware(draft)
            os.replace(draft, path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None


def cached_path(*, device: str, ranks_per_node: int, world_size: int, versions: str) -> Path | None:
    """Where a job's own profile of such a cluster is kept: elsewhere than one that lacks a number that is asked for today.

    None where the user has no home folder, as in containers, and the variable says nothing.
    """
    folder = os.environ.get(CACHE_VARIABLE)
    try:
        base = Path(folder) if folder else Path.home() / ".cache" / "hotspa_megatron"
    except RuntimeError:
        return None
    asked = (versions, *(each.name for each in fields(Hardware)))
    key = hashlib.sha256("\n".join(asked).encode()).hexdigest()[:8]
    name = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-").lower()
    return base / f"{name}-{ranks_per_node}-of-{world_size}-{key}.yaml"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "/").replace('"', "'") + '"'


def _number(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(f"[{at}, {_number(number)}]" for at, number in value) + "]"
    if isinstance(value, int):
        return str(value)
    # Plain digits, four that count: the reader takes no exponents.
    text = f"{value:.9f}" if value < 1e-3 else f"{float(f'{value:.4g}'):f}"
    return text.rstrip("0").rstrip(".") or "0"
