"""What holds after every test of the suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_stand_in_left_behind() -> Iterator[None]:
    """The CPU stand-in changes what torch.cuda says: tests that install it do so in processes of their own."""
    yield
    if cpu := sys.modules.get("hotspa_megatron.hooks.cpu"):
        assert not cpu.installed(), "this test left the CPU stand-in installed in pytest's own process"
