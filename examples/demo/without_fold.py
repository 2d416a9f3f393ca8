"""The launcher with one fault built in: guests' gradients travel but are never added to home's.

The demo's negative control: losses stay plausible and nothing fails, so only a comparison can tell.
"""

from __future__ import annotations

from hotspa_megatron import launch
from hotspa_megatron.runtime.executor import PendingReshard


def drop_folds() -> None:
    """Let switches finish and folds not."""
    finish = PendingReshard.finish

    def finish_switches_only(self: PendingReshard) -> None:
        if not self._accumulate:
            finish(self)

    PendingReshard.finish = finish_switches_only  # type: ignore[method-assign]


if __name__ == "__main__":
    drop_folds()
    launch.main()
