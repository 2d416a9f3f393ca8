"""HotSPa for stock Megatron-LM: one exact training step under several parallel strategies."""

from __future__ import annotations

__all__ = ["install"]


def install() -> None:
    """Make Megatron in this process understand ``--hotspa-config``; ``hotspa_megatron.launch.install`` says the rest."""
    # Inside, because importing the package alone changes nothing and needs nothing.
    from hotspa_megatron import launch

    launch.install()
