"""``hotspa doctor``: what this machine has, what is missing for training, and what to do about it. Changes nothing."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from hotspa_megatron.cli import tables
from hotspa_megatron.cli.described_run import check_flags, word_of
from hotspa_megatron.cli.megatron_args import read_command_line
from hotspa_megatron.config import load_config
from hotspa_megatron.hooks.flags import DOCUMENT_FLAGS, FLAG, NEWEST, OLDEST, conflicts

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_EPILOG: Final = """\
examples:
  hotspa doctor
      versions, packages, network, shared memory, limits
  hotspa doctor -- $GPT_ARGS
      also flags of Megatron's that do not go together with this package
"""
_REQUIRED: Final = (
    ("torch", "torch"),
    ("megatron-core", "megatron"),
    ("numpy", "numpy"),
    ("PyYAML", "yaml"),
    ("rich", "rich"),
)
_OPTIONAL: Final = (
    ("transformer-engine", "transformer_engine", "context parallelism on GPUs by Megatron's own attention"),
    ("flash-attn", "flash_attn", "packed attention by its own kernels"),
    ("apex", "apex", "fused optimizer and norms"),
    ("triton", "triton", "Megatron's fused kernels"),
    ("matplotlib", "matplotlib", "--plot"),
)
_SHARED_MEMORY: Final = Path("/dev/shm")  # nosec B108
_LEAST_SHARED_BYTES: Final = 1 << 30
_LEAST_FILES: Final = 4096
_NETWORK_FOLDER: Final = Path("/sys/class/net")
_INFINIBAND_FOLDER: Final = Path("/sys/class/infiniband")
_VIRTUAL: Final = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "tun", "tap")

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at; ``fix`` where something should be done. A problem keeps a run from working well."""

    what: str
    found: str
    state: State = "ok"
    fix: str = ""


def add_command(commands: _SubParsersAction[Any]) -> None:
    """Add ``doctor`` to the ``hotspa`` command."""
    parser = commands.add_parser(
        "doctor",
        help="look for what keeps this machine from training",
        description="Look at versions, packages, network, shared memory and limits, and say what to do.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="hotspa doctor [--json] [-- MEGATRON ARGS]",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, megatron_arguments: Sequence[str]) -> None:
    """Print the findings."""
    findings = list(examine(megatron_arguments, os.environ))
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    console = tables.console()
    shown = tables.table("", "what", "found", left=("", "what", "found"))
    for finding in findings:
        tables.row(shown, {"ok": "ok", "note": "-", "problem": "!!"}[finding.state], finding.what, finding.found)
    tables.print_table(console, "This machine", shown)
    todo = [finding for finding in findings if finding.fix]
    for finding in todo:
        tables.say(console, f"{finding.what}: {finding.fix}")
    problems = sum(finding.state == "problem" for finding in findings)
    tables.say(console, f"{problems} problem{'s' if problems > 1 else ''}." if problems else "No problems found.")


def examine(megatron_arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Everything that is looked at, in the order in which it is shown."""
    yield _python()
    for name, module in _REQUIRED:
        yield _required(name, module)
    for name, module, use in _OPTIONAL:
        yield _optional(name, module, use)
    yield _devices()
    yield from _network(environment)
    yield _shared_memory()
    yield from _limits()
    yield from _flags(megatron_arguments, environment)


def _python() -> Finding:
    found = platform.python_version()
    if sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)):
        return Finding(
            what="Python", found=found, state="problem", fix="use Python 3.12 or 3.13; 3.11 does for CPU runs"
        )
    return Finding(what="Python", found=found)


def _required(name: str, module: str) -> Finding:
    version, error = _probe(name, module)
    if error is not None:
        return Finding(what=name, found=error, state="problem", fix=f"pip install {name}, or mend its installation")
    if name == "megatron-core":
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if len(numbers) == 2 and not OLDEST <= numbers <= NEWEST:
            oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
            fix = f"install one of the releases {oldest} to {newest}, which are known to work"
            return Finding(what=name, found=version, state="note", fix=fix)
    return Finding(what=name, found=version)


def _optional(name: str, module: str, use: str) -> Finding:
    version, error = _probe(name, module)
    if error is not None:
        return Finding(what=name, found=f"{error}; only needed for {use}", state="note")
    return Finding(what=name, found=version)


def _probe(name: str, module: str) -> tuple[str, str | None]:
    """Version, and what went wrong: a package may be there and still fail to load, in any way."""
    try:
        # What packages say when they load, about others that are missing, is found out here anyway.
        with warnings.catch_warnings(action="ignore"):
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        return "", "not installed" if missing == module.split(".")[0] else f"needs {missing}"
    except Exception as error:  # built against another torch, CUDA library missing, ...
        first = (str(error).splitlines() or [""])[0]
        return "", f"installed, but does not load: {type(error).__name__}: {first[:80]}"
    try:
        return importlib.metadata.version(name), None
    except importlib.metadata.PackageNotFoundError:
        return "version not known", None


def _devices() -> Finding:
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
    except Exception as error:  # torch is absent or its driver is
        return Finding(what="GPUs", found=f"cannot be asked for: {error}"[:80], state="note")
    if not count:
        return Finding(what="GPUs", found="none; training runs on CPU with --distributed-backend gloo", state="note")
    return Finding(what="GPUs", found=f"{count} x {', '.join(names)}")


def _network(environment: Mapping[str, str]) -> Iterator[Finding]:
    names = _entries(_NETWORK_FOLDER)
    real = [name for name in names if not name.startswith(_VIRTUAL)]
    yield Finding(what="network interfaces", found=", ".join(real) or "none but virtual ones")
    for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        chosen = environment.get(variable)
        if chosen is None:
            if len(real) > 1:
                yield Finding(
                    what=variable,
                    found="not set",
                    state="note",
                    fix=f"with several interfaces set it to the one between the nodes, one of {', '.join(real)}",
                )
            continue
        wanted = chosen.removeprefix("^").removeprefix("=").split(",")
        if not chosen.startswith("^") and not any(name.startswith(prefix) for prefix in wanted for name in names):
            yield Finding(
                what=variable,
                found=f"{chosen}: no such interface",
                state="problem",
                fix=f"set it to one of {', '.join(names)}",
            )
        else:
            yield Finding(what=variable, found=chosen)
    cards = _entries(_INFINIBAND_FOLDER)
    yield Finding(what="InfiniBand cards", found=", ".join(cards) or "none", state="ok" if cards else "note")
    if cards and environment.get("NCCL_IB_DISABLE") == "1":
        yield Finding(
            what="NCCL_IB_DISABLE", found="1", state="problem", fix="unset it: nodes would talk over Ethernet"
        )


def _shared_memory() -> Finding:
    try:
        total = shutil.disk_usage(_SHARED_MEMORY).total
    except OSError as error:
        return Finding(what=str(_SHARED_MEMORY), found=str(error.strerror), state="note")
    size = f"{total / 2**30:.1f} GiB"
    if total < _LEAST_SHARED_BYTES:
        fix = "give at least 1 GiB: docker run --shm-size 16g (NCCL and data loaders use it)"
        return Finding(what=str(_SHARED_MEMORY), found=size, state="problem", fix=fix)
    return Finding(what=str(_SHARED_MEMORY), found=size)


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _LEAST_FILES:
        fix = f"ulimit -n {_LEAST_FILES if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)}: every group opens sockets"
        yield Finding(what="open files", found=str(soft), state="problem", fix=fix)
    else:
        yield Finding(what="open files", found="unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and _entries(_INFINIBAND_FOLDER):
        fix = "ulimit -l unlimited: InfiniBand pins its buffers"
        yield Finding(what="locked memory", found=f"{soft // 1024} KiB", state="problem", fix=fix)
    else:
        yield Finding(
            what="locked memory", found="unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
        )


def _flags(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[Finding]:
    if not arguments:
        return
    try:
        check_flags(arguments)
        line = read_command_line(arguments, world_size=None)
    except ValueError as error:
        yield Finding(
            what="Megatron's flags", found=str(error), state="problem", fix="change what the line above names"
        )
        return
    yield Finding(what="Megatron's flags", found=f"home {line.home}")
    file, config = word_of(arguments, FLAG), None
    if file is not None and file != "auto":
        try:
            config = load_config(file)  # against model and world `hotspa explain` holds it
        except ValueError as error:
            yield Finding(what=FLAG, found=str(error), state="problem", fix="change what the line above names")
    for row in conflicts(arguments):
        if config is None or row.unless not in config.allow_untested:
            yield Finding(
                what="Megatron's flags", found=row.line, state="problem", fix="change it: a job with it would not start"
            )
    given = {argument.split("=", 1)[0] for argument in arguments}
    if config is not None and config.samples == "megatron":
        if missing := [flag for flag in DOCUMENT_FLAGS if flag not in given]:
            yield Finding(
                what="samples: megatron",
                found=f"without {' '.join(missing)}",
                state="problem",
                fix="give them: it asks for them",
            )
    elif "--reset-position-ids" in given or "--reset-attention-mask" in given:
        yield Finding(
            what="--reset-position-ids",
            found="given",
            state="note",
            fix="not needed: packed sequences restart by themselves",
        )
    if "--sequence-parallel" in given and environment.get("CUDA_DEVICE_MAX_CONNECTIONS") not in ("1", None):
        yield Finding(
            what="CUDA_DEVICE_MAX_CONNECTIONS",
            found=str(environment.get("CUDA_DEVICE_MAX_CONNECTIONS")),
            state="problem",
            fix="set it to 1: --sequence-parallel needs communication to start before what follows it",
        )
    if not given & {"--use-distributed-optimizer", "--optimizer"}:
        yield Finding(
            what="--use-distributed-optimizer",
            found="not given",
            state="note",
            fix="give it: optimizer state is then shared out over replicas, which leaves room for longer micro-batches",
        )


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir())
    except OSError:
        return []
