"""Megatron-LM's own pretrain_gpt.py, unmodified, from a checkout that MEGATRON_LM_PATH names.

Environments with the same release tried core_v0.17.1, core_v0.18.2 and core_v0.19.0; that of the newest also tried main.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hotspa_megatron.hooks.flags import NEWEST
from tests.training import REPOSITORY, STATIC, TP2_PP2, TWO_GUESTS, arguments, flag, printed_losses, under_torchrun

VARIABLE = "MEGATRON_LM_PATH"
PACKAGE_INFO = "megatron/core/package_info.py"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to the checkout's files, its scripts copied, with the installed package's compiled helpers where it has none."""
    if not os.environ.get(VARIABLE):
        pytest.skip(f"{VARIABLE} names no checkout of Megatron-LM")
    original = Path(os.environ[VARIABLE]).resolve()
    copy = tmp_path_factory.mktemp("checkout")
    _link(original, copy, "megatron", "core", "datasets")
    if any((original / "megatron/core/datasets").glob("helpers_cpp*.so")):
        return copy
    package = importlib.util.find_spec("megatron.core")
    assert package is not None and package.submodule_search_locations
    helpers = [
        path for each in package.submodule_search_locations for path in Path(each).glob("datasets/helpers_cpp*.so")
    ]
    if not helpers:
        pytest.skip(f"neither {original} nor the installed megatron-core has the compiled dataset helpers")
    shutil.copy(helpers[0], copy / "megatron/core/datasets")
    return copy


def _link(source: Path, target: Path, *down: str) -> None:
    """Fill ``target`` with links to what ``source`` holds; the folders named ``down`` the path become real ones.

    Files beside such a folder are copied: Python looks for a script's neighbours where a link to it leads.
    """
    for entry in source.iterdir():
        if down and entry.name == down[0]:
            (target / entry.name).mkdir()
            _link(entry, target / entry.name, *down[1:])
        elif down and entry.is_file():
            shutil.copy(entry, target / entry.name)
        else:
            (target / entry.name).symlink_to(entry)


def test_pretrain_gpt_trains_under_the_flag_as_it_does_statically(checkout: Path, tmp_path: Path) -> None:
    """Through the launcher as it is, and with the one line of patches/ in it, started alone.

    One that is newer than what is supported has no patch, and has to be allowed by the file.
    """
    line = arguments(*TP2_PP2.flags, tp=TP2_PP2.tp, pp=TP2_PP2.pp, iterations=5)
    runs = {"static": STATIC, "mixed": TWO_GUESTS, "patched": TWO_GUESTS}
    release = release_of(checkout)
    if tuple(map(int, release.split(".")[:2])) > NEWEST:
        del runs["patched"]
        runs = {name: f"{config}\nallow_untested: [megatron]\n" for name, config in runs.items()}
    losses = {}
    for name, config in runs.items():
        if name == "patched":
            subprocess.run([REPOSITORY / "scripts" / "apply_patches.sh", checkout], check=True)
        code, output, errors = under_torchrun(
            tmp_path / name, checkout / "pretrain_gpt.py", *line, *flag(config), ranks=4, folder=checkout,
            launcher=name != "patched",
        )  # fmt: skip
        assert code == 0, errors[0]
        assert f"{checkout}/megatron/" in errors[0]  # in its warnings: this Megatron ran, not an installed one
        assert f"hotspa: megatron-core {release}" in output[0]
        losses[name] = printed_losses(output[-1])
    print(f"pretrain_gpt.py of {release}: " + ", ".join(f"{name} {each}" for name, each in losses.items()))
    assert len(losses["static"]) == 5
    assert all(each == pytest.approx(losses["static"], rel=1e-6) for each in losses.values())
    assert losses.get("patched", losses["mixed"]) == losses["mixed"]


def release_of(checkout: Path) -> str:
    numbers = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", (checkout / PACKAGE_INFO).read_text(), re.M))
    return ".".join(numbers[name] for name in ("MAJOR", "MINOR", "PATCH"))
