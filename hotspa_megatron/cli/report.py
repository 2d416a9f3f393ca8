"""``hotspa report``: one HTML page, which needs nothing beside it, about the steps that a job logged."""

from __future__ import annotations

import argparse
import html
import io
import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hotspa_megatron import run_folder
from hotspa_megatron.run_folder import MoveEntry, StepEntry
from hotspa_megatron.strategy import Kind

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_EPILOG: Final = """\
examples:
  hotspa report checkpoints/watched     the folder that `trace: watched` names, below --save checkpoints
  hotspa report checkpoints             the same, where no other folder in it has a log of steps
  hotspa report steps.jsonl --output page.html
"""
PAGE: Final = "report.html"
_POINTS: Final = 400
"""Steps beyond which neighbours are drawn as one, by their mean."""
_LARGEST_LOSS: Final = 1e30
_OUTLIER: Final = 2.5
"""Medians above which a first step, which also warms up, is cut off in the chart."""
_WIDE, _HALF, _NARROW = 11.6, 5.6, 3.9
"""Inches of a chart that fills a line, or half of one, of a wide screen, and of a narrow one: text has one size on all."""
_SEGMENTS: Final = ("#2b6cb0", "#63b3ed", "#2c7a7b", "#81e6d9", "#4c51bf", "#b794f4", "#1a365d", "#90cdf4")
_BLUE, _ORANGE, _GREEN, _RED = "#2b6cb0", "#dd6b20", "#2f855a", "#c53030"
_OTHER_PARTS: Final = (
    ("wait for switches", _ORANGE),
    ("wait for folds", "#f6ad55"),
    ("reduce gradients", "#805ad5"),
    ("wait for ranks", "#a0aec0"),
    ("wait for the plan", "#718096"),
    ("optimizer", "#48bb78"),
    ("other", "#e2e8f0"),
)


def add_command(commands: _SubParsersAction[Any]) -> None:
    """Add ``report`` to the ``hotspa`` command."""
    parser = commands.add_parser(
        "report",
        help="a page about a job's steps: time by segment, lengths, switches, loss",
        description="Write one HTML page about the steps that a job logged (`trace: FOLDER` in its file).",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="RUN_DIR", help="what `trace` names, the folder above it, or a log of steps")
    parser.add_argument("--output", metavar="FILE", help=f"the page (default: {PAGE} beside the log)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, megatron_arguments: Sequence[str]) -> None:
    """Write the page and say where; ``ValueError`` for bad input."""
    if megatron_arguments:
        raise ValueError("report: takes no Megatron arguments; remove what follows --")
    try:
        log = _find_log(Path(arguments.folder))
    except OSError as error:
        raise ValueError(
            f"{error.filename or arguments.folder}: {error.strerror}; name a folder that you may read"
        ) from None
    steps = run_folder.read_steps(log)
    output = Path(arguments.output) if arguments.output else log.parent / PAGE
    try:
        if output.is_dir():
            raise ValueError(f"--output: {output} is a folder; name a file")
        timeline = run_folder.merge_timelines(log.parent)
        name = os.fsencode(log.parent.resolve().name).decode("utf-8", errors="replace")
        run_folder.replace_file(output, [build_page(steps, name=name, timeline=timeline)])
    except OSError as error:
        raise ValueError(f"{error.filename or output}: {error.strerror}; give another --output, or make room") from None
    print(f"{output}: {len(steps):,} steps")
    if timeline is not None:
        print(f"{timeline}: all ranks' first steps; open it in ui.perfetto.dev or chrome://tracing")


def _find_log(given: Path) -> Path:
    if given.is_file():
        return given
    if not given.is_dir():
        raise ValueError(f"{given}: no such file or folder; name the one that `trace` made")
    if (given / run_folder.STEPS).is_file():
        return given / run_folder.STEPS
    below = sorted(path for path in given.glob(f"*/{run_folder.STEPS}") if path.is_file())
    if not below:
        raise ValueError(f"{given}: has no {run_folder.STEPS}; `trace: FOLDER` in a job's file makes it write one")
    if len(below) > 1:
        names = ", ".join(path.parent.name for path in below)
        raise ValueError(f"{given}: several folders have a {run_folder.STEPS}; name one: {names}")
    return below[0]


# ------------------------------------------------------------------------------------------------------------ the page


def build_page(steps: Sequence[StepEntry], *, name: str, timeline: Path | None = None) -> str:
    """The page as HTML; ``ValueError`` where matplotlib is missing."""
    figures = "\n".join(_figure(*each, steps) for each in _CHARTS)
    first, last = steps[0].iteration, steps[-1].iteration
    about = f"{len(steps):,} steps, {first:,} to {last:,}. All times are rank 0's."
    if timeline is not None:
        about += f" {timeline.name} beside this page shows all ranks; open it in ui.perfetto.dev or chrome://tracing."
    return _PAGE.format(
        title=html.escape(f"Steps of {name}"),
        about=html.escape(about),
        tiles="\n".join(_tile(*each) for each in _tiles(steps)),
        figures=figures,
        strategies=_table(*_strategies(steps)),
        moves=_moves(steps),
    )


def _tiles(steps: Sequence[StepEntry]) -> list[tuple[str, str]]:
    seconds = sum(step.step_s for step in steps)
    tokens = sum(step.tokens for step in steps)
    moves = [move for step in steps for move in (*step.switches, *step.folds)]
    computed = sum(step.tokens / (1 - step.padding_fraction) for step in steps)
    tiles = [
        ("median step", f"{_digits(statistics.median(step.step_s for step in steps))} s"),
        ("tokens per second", f"{tokens / seconds:,.0f}" if seconds else "-"),
        ("segments per step", f"{statistics.mean(len(step.segments) for step in steps):.1f}"),
        ("padding", f"{1 - tokens / computed:.1%}" if computed else "-"),
        ("moved per step", _size(sum(move.num_bytes for move in moves) / len(steps))),
        ("of that hidden", _hidden(moves)),
    ]
    modelled = [step for step in steps if step.static_modelled_s is not None and step.step_s]
    if modelled:
        static = sum(step.static_modelled_s or 0.0 for step in modelled)
        tiles.append(("gain over modelled static", f"{static / sum(step.step_s for step in modelled):.2f}x"))
    return tiles


def _hidden(moves: Sequence[MoveEntry]) -> str:
    """The share of the moves' time that was not waited for."""
    under_way = sum(move.seconds for move in moves)
    if not under_way:
        return "-"
    bound = "at most " if any(move.bound for move in moves) else ""
    return f"{bound}{sum(max(0.0, move.seconds - move.waited) for move in moves) / under_way:.0%}"


def _strategies(steps: Sequence[StepEntry]) -> tuple[tuple[str, ...], list[Sequence[str]]]:
    tokens = sum(segment.tokens for step in steps for segment in step.segments)
    rows: list[Sequence[str]] = []
    for strategy, kind in _names(steps):
        own = [each for step in steps for each in step.segments if (each.strategy, each.kind) == (strategy, kind)]
        used = sum(any((each.strategy, each.kind) == (strategy, kind) for each in step.segments) for step in steps)
        seconds, held = sum(each.seconds for each in own), sum(each.tokens for each in own)
        speed = f"{held / seconds:,.0f}" if seconds else "-"
        rows.append((strategy, kind, f"{used:,}", f"{sum(each.sequences for each in own):,}", f"{held:,}",
                     f"{held / tokens:.1%}" if tokens else "-", f"{seconds:.2f}", speed))  # fmt: skip
    return ("strategy", "kind", "steps", "sequences", "tokens", "of all", "seconds", "tokens/s"), rows


def _moves(steps: Sequence[StepEntry]) -> str:
    rows = []
    for kind, moves in _routes(steps):
        source, destination = moves[0].source, moves[0].destination
        seconds, size = sum(move.seconds for move in moves), sum(move.num_bytes for move in moves)
        rows.append((kind, f"{source} → {destination}", f"{len(moves):,}", f"{size / 1e9 / len(moves):.3g}",
                     _digits(1e3 * seconds / len(moves)), f"{size / 1e9 / seconds:.3g}" if seconds else "-",
                     _digits(1e3 * sum(move.waited for move in moves) / len(moves)), _hidden(moves)))  # fmt: skip
    if not rows:
        return "<p>Nothing moved: no guest strategy ran.</p>"
    return _table(("move", "route", "times", "GB", "ms", "GB/s", "waited ms", "hidden"), rows)


def _routes(steps: Sequence[StepEntry]) -> list[tuple[str, list[MoveEntry]]]:
    """Moves by route, switches before folds."""
    found: dict[tuple[int, str, str, str], list[MoveEntry]] = {}
    for step in steps:
        for order, (kind, moves) in enumerate((("switch", step.switches), ("fold", step.folds))):
            for move in moves:
                found.setdefault((order, kind, move.source, move.destination), []).append(move)
    return [(key[1], found[key]) for key in sorted(found)]


def _names(steps: Sequence[StepEntry]) -> list[tuple[str, str]]:
    """(strategy, kind) of all segments: guests, siblings, home."""
    order = [str(kind) for kind in (Kind.GUEST, Kind.SIBLING, Kind.HOME)]
    found = {(each.strategy, each.kind) for step in steps for each in step.segments}
    return sorted(found, key=lambda name: (order.index(name[1]), name[0]))


def _tile(name: str, value: str) -> str:
    return f"<div class=tile><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose cells know their column, by which narrow screens show a row as lines."""
    names = [html.escape(name) for name in head]

    def row(cells: Sequence[str]) -> str:
        named = zip(names, cells, strict=True)
        return "<tr>" + "".join(f'<td data-column="{name}">{html.escape(cell)}</td>' for name, cell in named) + "</tr>"

    top = f"<thead><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr></thead>"
    return f"<div class=table><table>{top}<tbody>{''.join(map(row, rows))}</tbody></table></div>"


def _size(count: float) -> str:
    """Bytes in the unit that leaves few digits."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= 0.1 * size:
            return f"{_digits(count / size)} {unit}"
    return f"{_digits(count / 1e3)} KB" if count else "nothing"


def _digits(value: float) -> str:
    """Three digits that matter."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# -------------------------------------------------------------------------------------------------------------- charts

Draw = Callable[[Any, Sequence[StepEntry], bool], "str | None"]
"""Draws steps into axes, for a narrow screen or a wide one; returns a sentence for the caption, or None."""


def _figure(title: str, caption: str, draw: Draw, whole_line: bool, steps: Sequence[StepEntry]) -> str:
    drawn, more = [], None
    for kind, width in (("wide", _WIDE if whole_line else _HALF), ("narrow", _NARROW)):
        svg, more = _svg(draw, steps, width=width, name=f"{title} {kind}")
        label = html.escape(title, quote=True)
        drawn.append(f'<div class={kind} role=img aria-label="{label}">{svg}</div>')
    said = html.escape(f"{caption} {more}" if more else caption)
    line = " class=line" if whole_line else ""
    return f"<figure{line}><h2>{html.escape(title)}</h2>{''.join(drawn)}<figcaption>{said}</figcaption></figure>"


def _svg(draw: Draw, steps: Sequence[StepEntry], *, width: float, name: str) -> tuple[str, str | None]:
    """A chart as an SVG element, and what ``draw`` said; its identifiers, which a page must not repeat, begin with ``name``."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except Exception as error:  # a broken installation fails in any way
        raise ValueError(f"report: matplotlib cannot be imported ({error}); pip install matplotlib") from None
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "", "font.family": "sans-serif", "font.size": 9,
                "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.grid.axis": "y",
                "grid.color": "#e2e8f0", "axes.axisbelow": True}  # fmt: skip
    with matplotlib.rc_context(settings):
        narrow = width == _NARROW
        figure = Figure(figsize=(width, 2.9 if width < _WIDE else 3.4), layout="constrained")
        axes = figure.add_subplot()
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5 if narrow else 10, integer=True))
        said = draw(axes, steps, narrow)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            beside = width == _WIDE
            columns = 1 if beside or max(map(len, labels)) > 12 else len(labels)
            figure.legend(handles[::-1], labels[::-1], loc="outside right upper" if beside else "outside lower left",
                          ncols=columns, frameon=False, fontsize=8)  # fmt: skip
            if not beside:
                figure.set_size_inches(width, 2.9 + 0.17 * len(labels) / columns)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    # The page sizes it: only the proportions stay.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg[svg.index("<svg") :], count=1)
    own = re.sub(r"\W", "", name)
    return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{own}-", svg), said


def _thinned(steps: Sequence[StepEntry], value: Callable[[StepEntry], float | None]) -> tuple[list[float], list[float]]:
    """Iterations and values, of at most ``_POINTS`` groups of neighbours their means; steps without a value left out."""
    pairs = [(float(step.iteration), found) for step in steps if (found := value(step)) is not None]
    size = -(-len(pairs) // _POINTS) or 1
    groups = [pairs[at : at + size] for at in range(0, len(pairs), size)]
    means = [(statistics.fmean(x for x, _ in group), statistics.fmean(y for _, y in group)) for group in groups]
    return [x for x, _ in means], [y for _, y in means]


def _line(axes: Any, points: tuple[list[float], list[float]], **options: Any) -> None:
    marker = "o" if len(points[0]) <= 60 else None
    axes.plot(*points, marker=marker, markersize=3, linewidth=1.4, **options)


def _draw_time(axes: Any, steps: Sequence[StepEntry], narrow: bool) -> str | None:
    parts: list[tuple[str, str, list[float]]] = []
    iterations: list[float] = []
    for index, (strategy, kind) in enumerate(_names(steps)):

        def of_strategy(step: StepEntry, own: tuple[str, str] = (strategy, kind)) -> float:
            return sum(each.seconds for each in step.segments if (each.strategy, each.kind) == own)

        iterations, values = _thinned(steps, of_strategy)
        parts.append((f"{strategy} ({kind})", _SEGMENTS[index % len(_SEGMENTS)], values))
    for index, (name, colour) in enumerate(_OTHER_PARTS):

        def of_part(step: StepEntry, index: int = index) -> float:
            return _other_parts(step)[index]

        iterations, values = _thinned(steps, of_part)
        # What takes no visible time needs no place in the legend.
        if sum(values) > 0.001 * sum(step.step_s for step in steps) * len(values) / len(steps):
            parts.append((name, colour, values))
    if len(iterations) > 60:
        axes.stackplot(iterations, *(values for *_, values in parts), labels=[name for name, *_ in parts],
                       colors=[colour for _, colour, _ in parts], linewidth=0)  # fmt: skip
    else:
        bottom = [0.0] * len(iterations)
        for name, colour, values in parts:
            axes.bar(iterations, values, width=0.8, bottom=bottom, label=name, color=colour)
            bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    static = _thinned(steps, lambda step: step.static_modelled_s)
    if static[0]:
        axes.plot(*static, linestyle="--", linewidth=1.4, color=_RED, label="static (modelled)")
    axes.set_ylabel("seconds")
    axes.set_xlabel("step")
    tops = _thinned(steps, lambda step: step.step_s)[1]
    usual = statistics.median(tops)
    if len(tops) > 2 and tops[0] > _OUTLIER * usual:
        axes.set_ylim(0, 1.1 * max(*tops[1:], *static[1][1:], 0.0))
        return f"The first step, which also warms up, took {_digits(steps[0].step_s)} s and is cut off."
    axes.set_ylim(bottom=0)
    return None


def _other_parts(step: StepEntry) -> tuple[float, ...]:
    """Seconds of a step beside its segments, as ``_OTHER_PARTS`` names them."""
    known = (
        sum(move.waited for move in step.switches),
        sum(move.waited for move in step.folds),
        step.reduce_s,
        step.wait_s,
        step.plan_s,
        step.optimizer_s,
    )
    return (*known, max(0.0, step.step_s - sum(known) - sum(segment.seconds for segment in step.segments)))


def _draw_loss(axes: Any, steps: Sequence[StepEntry], narrow: bool) -> str | None:
    # What is infinite, or near it, is left out: no axis could show it beside the others.
    _line(axes, _thinned(steps, lambda step: step.loss if abs(step.loss) < _LARGEST_LOSS else math.nan), color=_BLUE)
    axes.set_ylabel("loss")
    axes.set_xlabel("step")
    return None


def _draw_lengths(axes: Any, steps: Sequence[StepEntry], narrow: bool) -> str | None:
    found: dict[int, tuple[int, int]] = {}
    for step in steps:
        for upper, (count, tokens) in step.lengths.items():
            before = found.get(upper, (0, 0))
            found[upper] = (before[0] + count, before[1] + tokens)
    uppers = sorted(found)
    places = range(len(uppers))
    for offset, index, name, colour in ((-0.2, 0, "sequences", _BLUE), (0.2, 1, "tokens", _ORANGE)):
        whole = sum(found[upper][index] for upper in uppers) or 1
        shares = [100 * found[upper][index] / whole for upper in uppers]
        axes.bar([place + offset for place in places], shares, 0.4, label=name, color=colour)
    labels = [f"{upper // 1024}K" if upper >= 1024 else str(upper) for upper in uppers]
    axes.set_xticks(list(places), labels, rotation=45 if narrow and len(uppers) > 8 else 0)
    axes.set_ylabel("% of all")
    axes.set_xlabel("tokens of a sequence, up to")
    return None


def _draw_bandwidth(axes: Any, steps: Sequence[StepEntry], narrow: bool) -> str | None:
    drawn = False
    for index, (kind, moves) in enumerate(_routes(steps)):
        route = (moves[0].source, moves[0].destination)

        def rate(step: StepEntry, kind: str = kind, route: tuple[str, str] = route) -> float | None:
            own = [each for each in (step.switches if kind == "switch" else step.folds)
                   if (each.source, each.destination) == route and each.num_bytes and each.seconds]  # fmt: skip
            return sum(each.num_bytes for each in own) / 1e9 / sum(each.seconds for each in own) if own else None

        points = _thinned(steps, rate)
        if points[0]:
            drawn = True
            _line(axes, points, color=_SEGMENTS[index % len(_SEGMENTS)], label=f"{kind} {route[0]} → {route[1]}")
    axes.set_ylabel("GB/s, all ranks")
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)
    bound = any(move.bound for step in steps for move in (*step.switches, *step.folds))
    if not drawn:
        return "Nothing was sent: no guest ran, or every rank held already what it needed."
    if bound:
        return "This transport does not tell when values arrive: what is not waited for counts until it is needed."
    return None


def _draw_padding(axes: Any, steps: Sequence[StepEntry], narrow: bool) -> str | None:
    points = _thinned(steps, lambda step: 100 * step.padding_fraction)
    _line(axes, points, color=_BLUE)
    axes.set_ylabel("% of positions")
    axes.set_xlabel("step")
    axes.set_ylim(0, max(1.0, 1.15 * max(points[1])))
    return None


def _draw_gain(axes: Any, steps: Sequence[StepEntry], narrow: bool) -> str | None:
    def gain(step: StepEntry, over: float | None) -> float | None:
        return step.static_modelled_s / over if step.static_modelled_s is not None and over else None

    measured = _thinned(steps, lambda step: gain(step, step.step_s))
    if not measured[0]:
        return "These steps were not estimated."
    _line(axes, measured, color=_GREEN, label="over the measured step")
    planned = _thinned(steps, lambda step: gain(step, step.modelled_s))
    _line(axes, planned, color=_ORANGE, label="over the modelled step")
    axes.axhline(1.0, color="#718096", linewidth=0.8)
    axes.set_ylabel("times as fast")
    axes.set_xlabel("step")
    axes.set_ylim(bottom=0)
    return None


_CHARTS: Final[tuple[tuple[str, str, Draw, bool], ...]] = (
    (
        "Step time",
        "Where rank 0 spent its steps. The dashed line is the cost model's time of the same steps under home alone.",
        _draw_time,
        True,
    ),
    ("Loss", "As the training loop has it.", _draw_loss, False),
    (
        "Lengths",
        "Sequences and tokens by length, over all steps: each bar holds lengths up to its number and above half of it.",
        _draw_lengths,
        False,
    ),
    ("Switch bandwidth", "Bytes over all ranks, by the time under way.", _draw_bandwidth, False),
    ("Padding", "Share of the computed positions that hold no token.", _draw_padding, False),
    (
        "Gain over one static strategy",
        "The cost model's time of home alone over the measured time, and over its own time of the step as planned.",
        _draw_gain,
        True,
    ),
)
"""Title, caption, what draws it, whether it fills a line of its own."""

_PAGE: Final = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 1240px; padding: 24px 16px; color: #1a202c; background: #f7fafc;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }}
h1 {{ font-size: 24px; margin: 0; overflow-wrap: anywhere; }}
h2 {{ font-size: 16px; margin: 0 0 8px; }}
.about {{ color: #4a5568; margin: 4px 0 20px; }}
.tiles {{ display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); margin-bottom: 16px; }}
.tile, figure, section {{ background: #fff; border: 1px solid #e2e8f0; border-radius: 6px; }}
.tile {{ padding: 10px 14px; }}
.tile b {{ display: block; font-size: 20px; white-space: nowrap; }}
.tile span, figcaption {{ color: #4a5568; font-size: 13px; }}
.figures {{ display: grid; gap: 16px; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); }}
.figures .line {{ grid-column: 1 / -1; }}
figure, section {{ margin: 0; padding: 14px 16px; min-width: 0; }}
section {{ margin-top: 16px; }}
figure svg {{ display: block; width: 100%; height: auto; }}
svg text {{ font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif !important; }}
.narrow {{ display: none; }}
.table {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; width: 100%; }}
th, td {{ text-align: right; padding: 5px 10px; border-bottom: 1px solid #e2e8f0; white-space: nowrap; }}
th {{ color: #4a5568; font-weight: 600; }}
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) {{ text-align: left; }}
@media (max-width: 900px) {{ .figures {{ grid-template-columns: minmax(0, 1fr); }} }}
@media (max-width: 600px) {{
  .wide {{ display: none; }} .narrow {{ display: block; }}
  .tiles {{ grid-template-columns: 1fr 1fr; }} body {{ padding: 16px 10px; }}
  thead {{ display: none; }} tr {{ display: block; padding: 6px 0; border-bottom: 1px solid #e2e8f0; }}
  td {{ display: flex; justify-content: space-between; gap: 12px; padding: 1px 4px; border: 0; white-space: normal; }}
  td::before {{ content: attr(data-column); color: #4a5568; }}
}}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="about">{about}</p>
<div class="tiles">
{tiles}
</div>
<div class="figures">
{figures}
</div>
<section><h2>Segments by strategy</h2>{strategies}</section>
<section><h2>Switches and folds, per move</h2>{moves}</section>
</body>
</html>
"""
