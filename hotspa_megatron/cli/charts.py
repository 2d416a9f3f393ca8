"""Charts of the subcommands, drawn with matplotlib where it is there; an error in one line where not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hotspa_megatron.cli import options

_MOST_LABELS: Final = 32
"""Rows that can be labelled without one label touching the next."""


def check(path: str) -> None:
    """Refuse a file that none of these charts could be saved to; ``ValueError`` before the work for it."""
    figure, _ = _figure(width=8.0)
    target, known = options.writable(path, flag="--plot"), sorted(figure.canvas.get_supported_filetypes())
    if target.suffix[1:].lower() not in known:
        raise ValueError(f"--plot: {path}: its ending is not supported; write one of .{', .'.join(known)}")


def save_bars(path: str, *, title: str, labels: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Grouped bars, one group per label."""
    figure, axes = _figure(width=max(8.0, 0.5 * len(labels)))
    width = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        axes.bar([place + index * width for place in range(len(labels))], values, width, label=name)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(labels))], labels, rotation=75, fontsize=8)
    _save(figure, axes, path, title)


def save_lines(path: str, *, title: str, series: Mapping[str, Sequence[float]]) -> None:
    """One line per name over steps from 1."""
    figure, axes = _figure(width=8.0)
    for name, values in series.items():
        axes.plot(range(1, len(values) + 1), values, marker="o", label=name)
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)
    _save(figure, axes, path, title)


def save_shares(
    path: str,
    *,
    title: str,
    edges: Sequence[float],
    series: Mapping[str, Sequence[float]],
    limits: Sequence[float],
) -> None:
    """One histogram per name, of shares in percent between ascending lengths; a line at each limit. Logarithmic."""
    figure, axes = _figure(width=8.0)
    for name, shares in series.items():
        axes.stairs(shares, edges, fill=True, alpha=0.5, label=name)
    for limit in limits:
        axes.axvline(limit, color="black", linewidth=0.5, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("length (input positions)")
    axes.set_ylabel("share per bar (%)")
    _save(figure, axes, path, title)


def save_spans(path: str, *, title: str, rows: Mapping[str, Sequence[tuple[str, float, float]]]) -> None:
    """One bar per row, the first on top, of (name, start, duration) in ms; a colour per name."""
    figure, axes = _figure(width=10.0)
    names = list(dict.fromkeys(name for spans in rows.values() for name, _, _ in spans))
    for name in names:
        drawn = False
        for place, spans in enumerate(rows.values()):
            pieces = [(start, duration) for each, start, duration in spans if each == name]
            if pieces:
                axes.broken_barh(
                    pieces, (place - 0.45, 0.9), color=f"C{names.index(name)}", label=None if drawn else name
                )
                drawn = True
    every = -(-len(rows) // _MOST_LABELS)
    axes.set_yticks(range(0, len(rows), every), [f"rank {label}" for label in rows][::every], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    _save(figure, axes, path, title, loc="upper left", bbox_to_anchor=(1.0, 1.0))  # beside the bars, not on them


def _figure(*, width: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except Exception as error:  # a broken installation fails in any way
        raise ValueError(f"--plot: matplotlib cannot be imported ({error}); pip install matplotlib") from None
    figure = Figure(figsize=(width, 5.0), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Any, axes: Any, path: str, title: str, **legend: Any) -> None:
    axes.set_title(title, parse_math=False)  # it has the user's own words in it
    axes.legend(**legend)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--plot: {path}: {getattr(error, 'strerror', None) or error}") from None
