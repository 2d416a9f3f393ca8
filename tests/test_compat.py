"""A Megatron that is not the one that was tested is known at the start, by its version and by what is missing."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path

import pytest

from tests.spawn import run_ranks
from tests.training import run_module

MET = "0.18.77"
"""What the Megatron that lacks something says that it is; no release."""


def test_what_is_missing_in_a_megatron_is_named_with_its_version() -> None:
    told = run_ranks(_told, 1, timeout=200, init_process_group=False)[0]
    assert told["as it is"] is None
    assert told["old"] == "megatron-core 0.16.3 is older than 0.17, the oldest supported; upgrade it"
    found = f"megatron-core {MET}"
    unknown = "this version of hotspa_megatron does not know it"
    assert told["no function"] == f"{found}: there is no training.training.dummy_train_step; {unknown}"
    assert told["no method"] == f"{found}: there is no core.timers.Timers.write; {unknown}"
    assert told["no parameter"] == f"{found}: training.training.training_log has no parameter iteration; {unknown}"
    assert told["half a package"] == (
        f"megatron.training.training cannot be imported: RuntimeError: no lib.so (raised in {__file__}); repair or remove "
        "that package"
    )


def _told(rank: int, world_size: int) -> dict[str, str | None]:
    """What the check says of Megatron as it is, and of one that lacks something."""
    from hotspa_megatron.hooks import compat, cpu

    cpu.install()
    from megatron.core import package_info, timers
    from megatron.training import training

    def check() -> str | None:
        try:
            compat.check_version()
        except ValueError as error:
            return str(error)
        return None

    def log_nothing(loss_dict: object) -> None: ...

    def broken(name: str) -> object:
        if name == "megatron.training.training":
            raise RuntimeError("no lib.so\nand more")
        return sys.modules[name]

    told = {"as it is": check()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(package_info, "__version__", "0.16.3")
        told["old"] = check()
    for case, owner, name in (("no function", training, "dummy_train_step"), ("no method", timers.Timers, "write")):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(package_info, "__version__", MET)
            patched.delattr(owner, name)
            told[case] = check()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(package_info, "__version__", MET)
        patched.setattr(training, "training_log", log_nothing)
        told["no parameter"] = check()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compat.importlib, "import_module", broken)
        told["half a package"] = check()
    return told


def test_everything_that_is_replaced_is_looked_at_first() -> None:
    replaced, looked_at = run_ranks(_replaced, 1, timeout=200, init_process_group=False)[0]
    assert len(replaced) >= 15 and replaced <= looked_at


def _replaced(rank: int, world_size: int) -> tuple[set[str], set[str]]:
    """Functions of Megatron's that install replaces, and those that the check knows."""
    from hotspa_megatron.hooks import compat, cpu, install

    cpu.install()
    install.install()
    import megatron.core.timers  # noqa: F401

    functions = {
        f"{module}.{path}": functools.reduce(getattr, path.split("."), sys.modules[module])
        for module, paths in compat.HOOKED.items()
        for path in paths
    }
    known = {f"{inspect.unwrap(each).__module__}.{inspect.unwrap(each).__qualname__}" for each in functions.values()}
    of = {}
    for name in install.replaced():
        module, _, attribute = name.rpartition(".")
        owner = sys.modules.get(module) or getattr(sys.modules[module.rpartition(".")[0]], module.rpartition(".")[2])
        original = inspect.unwrap(getattr(owner, attribute))
        of[name] = f"{original.__module__}.{original.__qualname__}"
    return set(of.values()), known


@pytest.fixture
def half_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script, in an environment whose Transformer Engine raises what no ImportError is."""
    (tmp_path / "transformer_engine.py").write_text("raise RuntimeError('libtransformer_engine.so: no such file')\n")
    script = tmp_path / "script.py"
    script.write_text("print('the script runs')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return script


def test_half_an_installation_is_one_line_with_the_flag(half_installed: Path) -> None:
    done = run_module("hotspa_megatron.launch", str(half_installed), "--hotspa-config=x.yaml")
    assert done.returncode == 2 and "the script runs" not in done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("hotspa: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr
    assert "cannot be imported: RuntimeError: libtransformer_engine.so: no such file" in lines[0]
    assert f"{half_installed.with_name('transformer_engine.py')}" in lines[0]


def test_a_megatron_that_is_not_known_is_left_alone_without_the_flag(half_installed: Path) -> None:
    done = run_module("hotspa_megatron.launch", str(half_installed), "--some", "argument")
    assert done.returncode == 0 and "the script runs" in done.stdout and "hotspa: " not in done.stderr, done.stderr
