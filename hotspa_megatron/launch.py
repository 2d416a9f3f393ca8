"""Run an unmodified Megatron-LM training script with the hooks installed: no source change.

    torchrun --nproc-per-node 8 -m hotspa_megatron.launch pretrain_gpt.py ARGS --hotspa-config FILE

Where no CUDA device is visible, the CPU stand-in is installed first, and said so. Importing this module changes nothing.
``install`` is for a script that is started directly.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

_SCRIPT_VARIABLE: Final = "HOTSPA_SCRIPT"
"""Environment variable by which processes that the script spawns find it."""

_USAGE = """\
usage: python -m hotspa_megatron.launch SCRIPT [ARGS ...] [--hotspa-config FILE]

Runs SCRIPT, a Megatron-LM training script such as pretrain_gpt.py, with --hotspa-config understood.
Without --hotspa-config the script runs as it would alone.

example:
  torchrun --nproc-per-node 8 -m hotspa_megatron.launch pretrain_gpt.py ... --hotspa-config hotspa.yaml
"""


def install() -> None:
    """Make Megatron in this process understand ``--hotspa-config``; a second call does nothing.

    Call it before the script's first import of Megatron: names are replaced, and what took one earlier keeps the old one.
    Ends the process with one line and exit code 2 where this Megatron is not supported, unless the flag is not given: then
    nothing is replaced, and the script runs as it would alone.
    """
    from hotspa_megatron.hooks import compat, cpu

    already = cpu.installed()
    try:
        _prepare()
        compat.check_version()  # before the hooks are, which import what they replace
    except Exception as error:
        if not already:
            cpu.uninstall()
        if any(word.split("=")[0] == "--hotspa-config" for word in sys.argv[1:]):
            _fail(str(error) if isinstance(error, ValueError) else compat.not_imported("Megatron", error))
        return
    spawned = multiprocessing.parent_process() is not None
    if cpu.installed() and not already and os.environ.get("RANK", "0") == "0" and not spawned:
        sys.stdout.write("hotspa: no CUDA device is visible: training on CPU and gloo through the stand-in\n")
        sys.stdout.flush()
    from hotspa_megatron.hooks import install as hooks

    hooks.install()


def _prepare() -> None:
    """What the script's process and every process that it spawns (checkpoint writers) need before megatron is imported."""
    from hotspa_megatron.hooks import cpu

    if cpu.needed():
        cpu.install()


def _fail(message: str) -> NoReturn:
    sys.stderr.write(f"hotspa: {message}\n")
    raise SystemExit(2)


def main() -> None:
    """Run the script that ``sys.argv`` names, in this process's ``__main__``."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        sys.stdout.write(_USAGE)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    script = Path(sys.argv[1])
    if not os.path.isfile(script):  # Path.is_file raises where a folder may not be entered
        _fail(f"{script}: no such script; give the path of a Megatron-LM training script such as pretrain_gpt.py")
    # First of all: a Megatron-LM checkout beside the script goes before an installed megatron-core, as without us.
    sys.path.insert(0, str(script.resolve().parent))
    install()
    sys.argv = sys.argv[1:]
    os.environ[_SCRIPT_VARIABLE] = str(script.resolve())
    # In this very __main__, not through runpy: processes that the script spawns import __main__ again, and so get
    # what `_prepare` does below, and then the script's own names, which they unpickle by.
    _recorded(_execute)(script, sys.modules["__main__"].__dict__)


def _recorded(run: Callable[[Path, dict[str, Any]], None]) -> Callable[[Path, dict[str, Any]], Any]:
    """Have torchrun, where it started this process, end with the error of the rank that failed first."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return run
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(run)


def _execute(script: Path, namespace: dict[str, Any]) -> None:
    """Run ``script`` as the module of ``namespace``, with none of our names and none of our __future__ imports."""
    for name in [name for name in namespace if not name.startswith("__")]:
        del namespace[name]
    namespace.update(__file__=str(script), __doc__=None, __package__=None)
    namespace.pop("__annotations__", None)
    exec(compile(script.read_bytes(), str(script), "exec", dont_inherit=True), namespace)  # nosec B102


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":
    _prepare()
    # multiprocessing puts this file's name into sys.argv[0] meanwhile, so the script's comes by the environment.
    _execute(Path(os.environ[_SCRIPT_VARIABLE]), globals())
