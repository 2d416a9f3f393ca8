"""The folder of a traced run, and the page that ``hotspa report`` makes of it, opened in a browser where there is one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hotspa_megatron import run_folder
from hotspa_megatron.cli.main import main
from tests.spawn import REPOSITORY

HOME, SIBLING, GUEST = "tp2-cp2-pp1-dp1", "tp2-cp1-pp1-dp2", "tp1-cp1-pp1-dp4"


def logged(iteration: int, **changes: Any) -> dict[str, Any]:
    """A step as a job logs it."""
    numbers = random.Random(iteration)

    def segment(strategy: str, kind: str, sequences: int, tokens: int, seconds: float) -> dict[str, Any]:
        return {"strategy": strategy, "kind": kind, "sequences": sequences, "micro_batches": 4, "tokens": tokens,
                "seconds": seconds * numbers.uniform(0.9, 1.1)}  # fmt: skip

    def move(source: str, destination: str, size: int, seconds: float, waited: float) -> dict[str, Any]:
        return {"from": source, "to": destination, "bytes": size, "messages": 4, "seconds": waited,
                "under_way_s": seconds * numbers.uniform(0.9, 1.1), "bound": False}  # fmt: skip

    return {
        "iteration": iteration, "loss": 2 + 9 * math.exp(-iteration / 30), "tokens": 200_000,
        "padding_fraction": numbers.uniform(0.002, 0.012), "step_s": 5.0 + 9.0 * (iteration == 1), "plan_s": 0.002,
        "segments": [segment(GUEST, "guest", 300, 60_000, 1.1), segment(SIBLING, "sibling", 80, 80_000, 1.9),
                     segment(HOME, "home", 12, 60_000, 1.4)],
        "switches": [move(HOME, GUEST, 13_500_000_000, 0.35, 0.12)],
        "folds": [move(GUEST, HOME, 27_000_000_000, 0.55, 0.05)],
        "reduce_s": 0.15, "wait_s": 0.03, "optimizer_s": 0.1,
        "lengths": {"128": [200, 15_000], "512": [150, 45_000], "4096": [36, 75_000], "16384": [6, 65_000]},
        "modelled_s": 4.8, "static_modelled_s": 6.5, **changes,
    }  # fmt: skip


def write_steps(folder: Path, *steps: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / run_folder.STEPS
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    return path


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Folders that others may not enter are closed to root, too, meanwhile."""
    own = os.geteuid()
    if own == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(own)


# -------------------------------------------------------------------------------------------------- names of the folder


@pytest.mark.parametrize("text", ["watched", "a/b", "runs/2026-11-30 x", "..a/b..", "ü", "./a"])
def test_a_folder_inside_the_runs_own_is_taken(text: str, tmp_path: Path) -> None:
    assert run_folder.folder_problem(text) is None
    assert run_folder.folder_inside(tmp_path, text).resolve().is_relative_to(tmp_path.resolve())


@pytest.mark.parametrize(
    "text",
    ["/tmp/a", "..", "a/../../b", "~/a", "~root", ".", "./", "", "a\nb", "a\0b", "a\x1b[31m", "a/\u202eb", "x" * 201],
)
def test_a_folder_elsewhere_and_names_that_mislead_are_refused(text: str) -> None:
    problem = run_folder.folder_problem(text)
    assert problem is not None and problem.isprintable() and "write" in problem


def test_links_out_of_the_runs_folder_and_files_in_the_way_are_refused(tmp_path: Path) -> None:
    base = tmp_path / "saved"
    base.mkdir()
    (base / "out").symlink_to(tmp_path)
    (base / "file").write_text("kept")
    for text, problem in (
        ("out", "link out of"),
        ("out/a", "link out of"),
        ("file", "is a file"),
        ("file/a", "is a file"),
    ):
        with pytest.raises(ValueError, match=problem):
            run_folder.folder_inside(base, text)
    (base / "inside").mkdir()
    (base / "link").symlink_to(base / "inside")
    assert run_folder.folder_inside(base, "link/a") == base / "link" / "a"


# ------------------------------------------------------------------------------------------------------------ timelines


def test_clocks_of_other_hosts_are_put_right_and_those_of_one_host_are_one_clock() -> None:
    # b is 5 s ahead. Every rank reads a little late, one much too late once.
    seen = [(10.0, 20.0, 30.0), (10.2, 20.1, 30.3), (15.1, 25.0, 35.0), (15.0, 28.0, 35.2)]
    offsets = run_folder.clock_offsets(["a", "a", "b", "b"], seen)
    assert offsets[:2] == [0.0, 0.0] and offsets[2:] == pytest.approx([5.0, 5.0])


def _rank_events(rank: int, start: str, *names: str) -> str:
    events = run_folder.header_events(rank, name=f"rank {rank}", start=start)
    for place, name in enumerate(names):
        events.append(run_folder.complete_event(rank, name, "segment", at=place, seconds=0.5, details={}))
    return "[\n" + run_folder.event_lines(events)


def test_timelines_of_all_ranks_of_the_last_start_become_one(tmp_path: Path) -> None:
    """Of a job that was killed while a rank wrote, and that had more ranks before."""
    (tmp_path / run_folder.RANKS).mkdir()
    for rank, text in (
        (0, _rank_events(0, "second", "a", "b")),
        (1, _rank_events(1, "second", "a", "b")[:-20]),
        (2, _rank_events(2, "first", "z")),
    ):
        run_folder.rank_file(tmp_path, rank).write_text(text)
    path = run_folder.merge_timelines(tmp_path)
    assert path is not None
    events = json.loads(path.read_text())["traceEvents"]
    assert [(each["pid"], each["name"]) for each in events if each["ph"] == "X"] == [(1, "a"), (1, "b"), (2, "a")]
    assert not list(tmp_path.glob("*.new"))
    # A rank's own file is what viewers take as well: an array of events whose end may be missing.
    alone = run_folder.rank_file(tmp_path, 0).read_text()
    assert len(json.loads(alone.rstrip().rstrip(",") + "]")) == 6


def test_what_is_no_timeline_is_left_out(tmp_path: Path) -> None:
    (tmp_path / run_folder.RANKS).mkdir()
    for rank, text in enumerate((
        _rank_events(0, "one", "a"), "", "no json", "[\n" + "[" * 5000, '[\n{"name": "process_labels", "args": 3},\n5,\n',
    )):  # fmt: skip
        run_folder.rank_file(tmp_path, rank).write_text(text)
    path = run_folder.merge_timelines(tmp_path)
    assert path is not None and {each["pid"] for each in json.loads(path.read_text())["traceEvents"]} == {1}


def test_without_timelines_nothing_is_merged(tmp_path: Path) -> None:
    assert run_folder.merge_timelines(tmp_path) is None and not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------------- steps


def test_a_resumed_jobs_last_word_on_a_step_counts_and_an_unfinished_line_does_not(tmp_path: Path) -> None:
    path = write_steps(tmp_path, logged(1), logged(2, loss=5.0), logged(3), logged(2, loss=6.0))
    with path.open("a") as file:
        file.write('{"iteration": 4, "lo')
    steps = run_folder.read_steps(path)
    assert [step.iteration for step in steps] == [1, 2, 3] and steps[1].loss == 6.0


# ----------------------------------------------------------------------------------------------------------- the command


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a call that fails."""
    assert main(["report", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("hotspa: ")
    return captured.err


BROKEN = {
    "no JSON": ("not json", "'not json' is not a logged step"),
    "no step": ("[1, 2]", "is not a logged step"),
    "deep": ("[" * 5000, "is not a logged step"),
    "older log": (json.dumps({"iteration": 1, "loss": 2.0}), "no 'tokens'; was it logged by this version?"),
    "negative time": (json.dumps(logged(1, step_s=-1.0)), "is not a logged step"),
    "no number": (json.dumps(logged(1, step_s="<b>")), "is not a logged step"),
    "markup": (json.dumps(logged(1)).replace(GUEST, "<script>alert(1)</script>"), "is not a logged step"),
    "all padding": (json.dumps(logged(1, padding_fraction=1.0)), "is not a logged step"),
    "endless": (json.dumps(logged(1)).replace('"iteration": 1', '"iteration": 1e999'), "is not a logged step"),
    "400 digits": (json.dumps(logged(1) | {"iteration": 10**400}), "is not a logged step"),
    "a time of 400 digits": (json.dumps(logged(1, step_s=10**400)), "is not a logged step"),
    "endless time": (json.dumps(logged(1, step_s=math.inf)), "is not a logged step"),
    "fewer than none": (json.dumps(logged(1, tokens=-1)), "is not a logged step"),
    "length of none": (json.dumps(logged(1, lengths={"100": [1, 90]})), "is not a logged step"),
    "no text": ("\udcff", "not UTF-8"),
    "too long": (" " * (1 << 20), "the line has more than 1048576 bytes"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_line_is_named(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line, problem = BROKEN[case]
    path = tmp_path / run_folder.STEPS
    path.write_bytes(os.fsencode(f"{json.dumps(logged(1))}\n{line}\n"))
    assert problem in (said := _refused(capsys, str(tmp_path)))
    assert f"{path}:2: " in said
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_run_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such file or folder" in _refused(capsys, str(tmp_path / "missing"))
    assert f"{tmp_path}: has no steps.jsonl" in _refused(capsys, str(tmp_path))
    (tmp_path / run_folder.STEPS).write_text("")
    assert "holds no step" in _refused(capsys, str(tmp_path))
    (tmp_path / run_folder.STEPS).write_bytes(b"\xff\xfe\n")
    assert "not UTF-8" in _refused(capsys, str(tmp_path))
    (tmp_path / run_folder.STEPS).unlink()
    for name in ("a", "b"):
        write_steps(tmp_path / name, logged(1))
    assert "name one: a, b" in _refused(capsys, str(tmp_path))
    output = tmp_path / "none" / "page.html"
    assert f"{output}" in _refused(capsys, str(tmp_path / "a"), "--output", str(output))
    assert "takes no Megatron arguments" in _refused(capsys, str(tmp_path / "a"), "--", "--lr", "1")
    assert "is a folder; name a file" in _refused(capsys, str(tmp_path / "a"), "--output", str(tmp_path))


def test_what_may_not_be_read_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_steps(tmp_path / "closed", logged(1))
    with as_nobody():
        for named in (log, log.parent):
            said = _refused(capsys, str(named))
            assert said == f"hotspa: {named}: Permission denied; name a folder that you may read\n"
        with pytest.raises(ValueError, match=f"{log}: Permission denied; name a log"):
            run_folder.read_steps(log)
        with pytest.raises(ValueError, match=r"trace: .*: Permission denied; name another folder"):
            run_folder.folder_inside(tmp_path, "closed")


def test_a_page_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write_steps(tmp_path, logged(1))
    page = tmp_path / "report.html"
    page.write_text("old")

    def full(source: Path, destination: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert f"{page}: No space left on device" in _refused(capsys, str(tmp_path))
    assert page.read_text() == "old" and sorted(tmp_path.iterdir()) == [page, log]


def test_a_loss_that_is_infinite_is_left_out_of_its_chart(tmp_path: Path) -> None:
    write_steps(tmp_path, *(logged(at, loss=loss) for at, loss in enumerate((5.0, math.inf, -math.inf, 1e308, 1e308))))
    assert main(["report", str(tmp_path)]) == 0


def test_the_page_is_beside_the_log_wherever_the_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write_steps(tmp_path / "watched", *map(logged, range(1, 4)))
    for named in (tmp_path, log.parent, log):
        assert main(["report", str(named)]) == 0
        page = log.parent / "report.html"
        assert capsys.readouterr().out == f"{page}: 3 steps\n"
        page.unlink()


class _Page(HTMLParser):
    """What a page refers to, and the texts of its parts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.identifiers: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "action") and value and not value.startswith("#"):
                self.references.append(value)
            if name == "id" and value:
                self.identifiers.append(value)


def test_the_page_holds_everything_itself(tmp_path: Path) -> None:
    write_steps(tmp_path, *map(logged, range(1, 31)))
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text()
    page = _Page(text)
    assert page.references == [] and "script" not in page.tags and "@import" not in text and "url(http" not in text
    assert page.tags.count("svg") == 12  # six charts, for wide and for narrow screens
    assert len(page.identifiers) == len(set(page.identifiers)) > 0
    for shown in (
        GUEST,
        SIBLING,
        HOME,
        "wait for switches",
        "static (modelled)",
        "GB/s",
        "1.23x",
        "40.5 GB",
        "30 steps, 1 to 30",
    ):
        assert shown in text
    # The first step's nine seconds of warming up must not squash the others.
    assert "The first step, which also warms up, took 14 s" in text


def test_runs_without_guests_estimates_or_many_steps_have_a_page_too(tmp_path: Path) -> None:
    home = [each for each in logged(1)["segments"] if each["kind"] == "home"]
    bare = {"switches": [], "folds": [], "segments": home, "modelled_s": None, "static_modelled_s": None}
    write_steps(tmp_path / "bare", logged(1, **bare, loss=math.nan))
    write_steps(
        tmp_path / "idle", logged(1, **bare | {"segments": []}, tokens=0, lengths={}, step_s=0.0, padding_fraction=0)
    )
    write_steps(tmp_path / "long", *map(logged, range(1, 1201)))
    for name, shown in (("bare", "no guest strategy ran"), ("idle", "not estimated"), ("long", "1,200 steps")):
        assert main(["report", str(tmp_path / name)]) == 0
        assert shown in (tmp_path / name / "report.html").read_text()
    # Neighbours are drawn as one: 40 times the steps of the test above, not 40 times its page.
    assert (tmp_path / "long" / "report.html").stat().st_size < 2_000_000


# -------------------------------------------------------------------------------------------------------- in a browser

SCREENSHOTS = REPOSITORY / "build" / "screenshots"


def _chromium() -> str:
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium on PATH: apt-get install chromium")
    return found


def _open(page: Path, *more: str, width: int = 1280, height: int = 800, home: Path) -> subprocess.CompletedProcess[str]:
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
             "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={home}", "--enable-logging=stderr")  # fmt: skip
    command = [_chromium(), *flags, f"--window-size={width},{height}", *more, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def test_the_page_fits_wide_and_narrow_screens(tmp_path: Path) -> None:
    """The screenshots stay in build/screenshots, for people to look at."""
    write_steps(tmp_path, *map(logged, range(1, 41)))
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path)]) == 0
    # The browser tells what it laid out through a probe that only the test adds.
    probe = """<script>onload = () => {
      const box = e => e.getBoundingClientRect(), all = s => [...document.querySelectorAll(s)];
      const shown = all("figure svg").filter(e => box(e).width > 0);
      document.title = JSON.stringify({page: document.documentElement.scrollWidth, window: innerWidth,
        charts: shown.length, narrow: all(".narrow svg").filter(e => box(e).width > 0).length,
        height: document.documentElement.scrollHeight, out: shown.filter(e => box(e).right > innerWidth).length,
        cells: all("td").filter(e => box(e).width > 0).length,
        cut: all("td").filter(e => box(e).right > box(e.closest("section")).right).length,
        least: Math.min(...shown.map(e => box(e).width)),
        text: Math.min(...shown.flatMap(e => [...e.querySelectorAll("text")]).map(e => box(e).height))});
    }</script>"""
    probed = tmp_path / "probed.html"
    text = page.read_text()
    policy = re.search(r'<meta http-equiv="Content-Security-Policy".*?>', text)
    assert policy is not None
    probed.write_text(text.replace(policy[0], "").replace("</head>", f"{probe}</head>"))
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for name, width, narrow in (("wide", 1280, 0), ("narrow", 500, 6)):
        laid_out = _open(probed, "--dump-dom", width=width, home=tmp_path / "profile").stdout
        said = re.search(r"<title>(\{.*?\})</title>", laid_out)
        assert said is not None, laid_out[:500]
        found = json.loads(said[1])
        assert found["page"] <= found["window"] == width and found["out"] == 0
        assert (found["charts"], found["narrow"]) == (6, narrow)
        assert found["cells"] == 5 * 8 and found["cut"] == 0  # no column of a table is out of sight
        assert found["least"] > 300 and found["text"] >= 9  # pixels: text of charts stays readable
        picture = SCREENSHOTS / f"report-{name}.png"
        ended = _open(page, f"--screenshot={picture}", width=width, height=found["height"], home=tmp_path / "profile")
        assert "Content Security Policy" not in ended.stderr  # the page asks for nothing that its own policy forbids
        size = struct.unpack(">II", picture.read_bytes()[16:24])
        assert size == (width, found["height"])
    # The check sees a page that is too wide.
    probed.write_text(probed.read_text().replace("</body>", "<div style='width: 3000px'>x</div></body>"))
    laid_out = _open(probed, "--dump-dom", home=tmp_path / "profile").stdout
    assert json.loads(re.search(r"<title>(\{.*?\})</title>", laid_out)[1])["page"] >= 3000  # type: ignore[index]


def test_help_says_what_to_give() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hotspa_megatron.cli.main", "report", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "RUN_DIR" in done.stdout and "trace" in done.stdout
