"""The shell scripts, the demo's parts and its exit codes; no network, no training."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.demo import __main__ as demo
from examples.demo import corpus, report, training
from tests.lint import assert_clean
from tests.spawn import run_ranks

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"])
BASE_PYTHON = getattr(sys, "_base_executable", sys.executable)


# ------------------------------------------------------------------------------------------------------------- scripts


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_sound(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    assert_clean("shellcheck", script)


def shell(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a user would, without this suite's own settings."""
    dropped = ("PYTHON", "HOTSPA_VENV", "HOTSPA_MEGATRON", "CXX", "VIRTUAL_ENV")
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    return subprocess.run(
        ["bash", str(script), *arguments],
        env={**env, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that holds the scripts and the metadata, and no environment yet."""
    folder = tmp_path / "a checkout"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    shutil.copy(ROOT / "setup.cfg", folder)
    return folder


def plan_of(checkout: Path, **variables: str) -> str:
    done = shell(checkout / "scripts" / "setup.sh", "--plan", **{"PYTHON": sys.executable, **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment_with(checkout: Path, plan: str) -> Path:
    """A made environment whose python only prints what it is asked to run."""
    venv = checkout / ".venv"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text('#!/bin/sh\necho "python $*; threads $OMP_NUM_THREADS"\n', encoding="utf-8")
    python.chmod(0o755)
    (venv / "made-by-hotspa-setup").touch()
    (venv / "hotspa-plan").write_text(plan, encoding="utf-8")
    return venv


def fake_python(folder: Path, version: str) -> Path:
    """An interpreter that is of another version than those supported."""
    kind = "old" if version < "3.11" else "new"
    python = folder / f"python-{version}"
    python.write_text(f"#!/bin/sh\nprintf '{kind}\\t/x\\t/x\\t{version}\\t-\\t-\\t-\\n'\n", encoding="utf-8")
    python.chmod(0o755)
    return python


def test_plan_is_stable_and_writes_nothing(checkout: Path) -> None:
    before = sorted(checkout.rglob("*"))
    assert plan_of(checkout) == plan_of(checkout)
    assert sorted(checkout.rglob("*")) == before


def test_plan_holds_what_setup_cfg_asks_for(checkout: Path) -> None:
    (line,) = [line for line in plan_of(checkout).splitlines() if line.startswith("requires ")]
    names = line.split()[1:]
    assert {"numpy", "pyyaml", "rich", "psutil", "packaging", "pytest", "hypothesis", "ruff", "mypy"} <= set(names)
    assert "torch" not in names  # has a step of its own, as has Megatron
    assert not any(name.startswith(("megatron", "transformer")) for name in names)


def test_plan_follows_the_requirements_and_the_checkout(checkout: Path, tmp_path: Path) -> None:
    plan = plan_of(checkout)
    assert plan_of(checkout, HOTSPA_MEGATRON="0.18.2") != plan
    moved = tmp_path / "moved"
    shutil.copytree(checkout, moved)
    assert plan_of(moved) != plan
    metadata = checkout / "setup.cfg"
    metadata.write_text(metadata.read_text(encoding="utf-8").replace("    numpy\n", "    numpy\n    scipy\n"))
    assert "scipy" in plan_of(checkout)


def test_second_setup_does_nothing(checkout: Path) -> None:
    environment_with(checkout, plan_of(checkout))
    done = shell(checkout / "scripts" / "setup.sh", PYTHON=sys.executable)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("is up to date\n")
    assert not (checkout / ".venv-setup").exists()  # it did not even take the lock


def test_setup_leaves_a_foreign_environment_alone(checkout: Path) -> None:
    mine = checkout / ".venv" / "mine.txt"
    mine.parent.mkdir()
    mine.touch()
    done = shell(checkout / "scripts" / "setup.sh", PYTHON=sys.executable)
    assert done.returncode == 1
    assert "was not made by this script" in done.stderr
    assert mine.exists()


def test_failed_setup_is_remade_the_next_time(checkout: Path) -> None:
    """Neither an outdated plan nor one that a failed run left counts as a made environment."""
    if "torch of the interpreter" in plan_of(checkout, PYTHON=BASE_PYTHON):
        pytest.skip("this interpreter brings torch along, so nothing is fetched first")
    venv = environment_with(checkout, "another plan\n")
    variables = {"PYTHON": BASE_PYTHON, "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    done = shell(checkout / "scripts" / "setup.sh", **variables)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("setup: torch")
    assert "[1/6] environment" in done.stdout
    assert not (venv / "hotspa-plan").exists()
    assert (venv / "made-by-hotspa-setup").exists()
    assert (checkout / ".venv-setup" / "setup.log").stat().st_size > 0


@pytest.mark.parametrize("version", ["3.10.13", "3.14.0"])
def test_setup_refuses_other_pythons(checkout: Path, tmp_path: Path, version: str) -> None:
    done = shell(checkout / "scripts" / "setup.sh", PYTHON=str(fake_python(tmp_path, version)))
    assert done.returncode == 1
    assert f"Python {version}, and this needs 3.11, 3.12 or 3.13" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_setup_names_what_is_missing(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sed", "dirname", "cksum", "cat", "mkdir", "rm", "mv", "tail", "flock"):
        found = shutil.which(name)
        assert found is not None
        (tools / name).symlink_to(found)
    script = checkout / "scripts" / "setup.sh"
    assert "no python3 on PATH" in shell(script, PATH=str(tools)).stderr
    assert "PYTHON=/nowhere is no working" in shell(script, PYTHON="/nowhere").stderr
    assert "unknown argument '--fast'" in shell(script, "--fast").stderr
    if sys.version_info < (3, 12):
        done = shell(script, PATH=str(tools), PYTHON=sys.executable, HOTSPA_MEGATRON="0.19.2")
        assert done.stderr.splitlines() == [
            "setup: no C++ compiler, which megatron-core needs on Python 3.11: apt-get install g++"
        ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["-m pytest -m not long"]),
        (["--all", "-k", "x"], ["-m pytest -k x", "other releases", "-m pytest -k x"]),
        (["tests/test_a.py"], ["-m pytest -m not long tests/test_a.py"]),
    ],
)
def test_test_script_checks_then_tests(checkout: Path, arguments: list[str], expected: list[str]) -> None:
    environment_with(checkout, plan_of(checkout))
    (checkout / "scripts" / "test_versions.sh").write_text('echo "python other releases; threads $OMP_NUM_THREADS"\n')
    done = shell(checkout / "scripts" / "test.sh", *arguments, PYTHON=sys.executable)
    assert done.returncode == 0, done.stderr
    ran = ["-m ruff check .", "-m mypy", *expected]
    assert done.stdout.splitlines()[-len(ran) :] == [f"python {each}; threads 1" for each in ran]


# ------------------------------------------------------------------------------------------------------ other releases

OF_MEGATRON = re.compile(
    r"hotspa_megatron\.hooks\b|(?<!\w)(?:from|import) megatron\b|import_megatron|find_spec\(.megatron|tests\.(?:training|job)\b"
)


def test_other_releases_run_every_file_of_tests_that_is_not_named_as_left_out() -> None:
    """A new file is run; the name of one that is gone, or that has come to use Megatron, is no reason to leave it out."""
    script = (ROOT / "scripts" / "test_versions.sh").read_text()
    lists = [
        re.search(rf"^{name}=\((.*?)\)$", script, re.DOTALL | re.MULTILINE)
        for name in ("without_megatron", "any_release")
    ]
    named = [re.sub("#.*", "", found[1]).split() for found in lists if found]
    files = {path.stem.removeprefix("test_"): path.read_text() for path in ROOT.glob("tests/test_*.py")}
    done = shell(ROOT / "scripts" / "test_versions.sh", "--list")
    assert done.returncode == 0, done.stderr
    run = [Path(line).stem.removeprefix("test_") for line in done.stdout.splitlines()]
    assert len(named) == 2 and sorted([*run, *named[0], *named[1]]) == sorted(files)
    assert [name for name in named[0] if OF_MEGATRON.search(files[name])] == []
    # What is looked for is what marks the others.
    assert {"launch", "training", "faults", "group_pool"} <= {name for name in run if OF_MEGATRON.search(files[name])}
    # Of other folders' tests none are of Megatron but Slurm's, which have a release of their own.
    assert {path.parent.name for path in ROOT.glob("tests/*/**/test_*.py")} == {"slurm"}


@pytest.mark.parametrize(("release", "some"), [("0.17.1", True), ("0.18.2", True), ("0.19.2", False)])
def test_single_tests_that_a_release_leaves_out_are_there(release: str, some: bool) -> None:
    function = re.search(
        r"^beyond\(\) \{.*?^\}", (ROOT / "scripts" / "test_versions.sh").read_text(), re.DOTALL | re.MULTILINE
    )
    assert function is not None
    command = ["bash", "-euc", f"{function[0]}\nbeyond {release}"]
    left_out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert bool(left_out) == some
    for each in left_out:
        file, _, name = each.partition("::")
        assert len(re.findall(rf"^def {name}", (ROOT / file).read_text(), re.MULTILINE)) == 1, each


@pytest.fixture
def releases(checkout: Path) -> Path:
    """A checkout with the environments of two releases, whose interpreters note how tests are run."""
    (checkout / "scripts" / "setup.sh").write_text("#!/usr/bin/env bash\n")
    (checkout / "tests").mkdir()
    for name in ("config", "launch", "megatron_lm", "of_tomorrow"):
        (checkout / "tests" / f"test_{name}.py").touch()
    for release in ("0.17.1", "0.18.2"):
        python = checkout / f".venv-{release}" / "bin" / "python"
        python.parent.mkdir(parents=True)
        note = f'echo "$*" >"{checkout}/ran-{release}"'
        python.write_text(f'#!/bin/sh\n{note}\necho "== {release} ended =="\nexit ${{CODE:-0}}\n')
        python.chmod(0o755)
    return checkout


def megatron_lm(folder: Path, release: str) -> str:
    """A folder that says that it is a checkout of this release."""
    info = folder / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    major, minor = release.split(".")
    info.write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = 0\n")
    return str(folder)


def test_each_release_runs_the_files_and_says_how_it_ended(releases: Path, tmp_path: Path) -> None:
    line, more = "-m pytest -m not long tests/test_launch.py tests/test_of_tomorrow.py", " tests/test_megatron_lm.py"
    eighteen = megatron_lm(tmp_path / "eighteen", "0.18")
    for code, path, extra in ((0, "", ""), (1, "", ""), (0, eighteen, more)):
        done = shell(releases / "scripts" / "test_versions.sh", "--", "-k", "x", CODE=str(code), MEGATRON_LM_PATH=path)
        assert done.returncode == code, done.stdout + done.stderr
        assert "not tried" not in done.stdout
        ends = [f"megatron-core {release}:  {release} ended " for release in ("0.17.1", "0.18.2")]
        assert done.stdout.splitlines()[-2:] == ends
        for release, added in (("0.17.1", ""), ("0.18.2", extra)):
            ran = re.sub(r" --deselect=tests/\S+::test_\w+", "", (releases / f"ran-{release}").read_text())
            assert ran == f"{line}{added} -k x\n"


def test_a_megatron_lm_that_is_not_tried_is_named(releases: Path, tmp_path: Path) -> None:
    other = megatron_lm(tmp_path / "twenty", "0.20")
    for path, what in ((other, "0.20"), (str(tmp_path), "no checkout of Megatron-LM")):
        done = shell(releases / "scripts" / "test_versions.sh", "0.18.2", MEGATRON_LM_PATH=path)
        assert done.returncode == 0 and "test_megatron_lm" not in (releases / "ran-0.18.2").read_text()
        assert done.stdout.splitlines()[0] == (
            f"test_versions: MEGATRON_LM_PATH={path} is {what}, and none of the releases that are run (0.18.2): "
            "its pretrain_gpt.py is not tried"
        )


def test_what_shows_the_tests_decides_nothing(releases: Path, tmp_path: Path) -> None:
    """Where it has ended before the tests, there is nothing left to end."""
    found = shutil.which("tail")
    (tmp_path / "tools").mkdir()
    tail = tmp_path / "tools" / "tail"
    tail.write_text(f'#!/bin/sh\ncase "$*" in *" -f "*) exit 1 ;; esac\nexec {found} "$@"\n')
    tail.chmod(0o755)
    path = f"{tail.parent}:{os.environ['PATH']}"
    for code in (0, 1):
        done = shell(releases / "scripts" / "test_versions.sh", PATH=path, CODE=str(code), MEGATRON_LM_PATH="")
        assert (done.returncode, len(done.stdout.splitlines())) == (code, 2), done.stdout + done.stderr


# -------------------------------------------------------------------------------------------------------------- corpus


def test_corpus_is_the_same_every_time() -> None:
    part = corpus.standard_library() / "asyncio"
    texts = list(corpus.documents(part))
    assert len(texts) > 50
    assert texts == list(corpus.documents(part))


def test_corpus_has_the_lengths_of_real_text() -> None:
    facts = corpus.statistics_of(list(corpus.documents(corpus.standard_library())))
    assert facts.documents > 3000
    assert 200 < facts.median < 800
    assert facts.median * 5 < facts.percentile_95 < 12_000
    assert facts.longest > training.SEQ_LENGTH


def test_documents_are_whole_functions_and_classes(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "left_out.py").write_text("def f(): pass\n")
    (tmp_path / "b.py").write_text(
        "import os\n\n@decorated\n@twice\nclass B:\n    x = 1\n\nasync def g():\n    return 1\n"
    )
    (tmp_path / "a.py").write_bytes(b"x = 1\ndef f():\r\n    return '\xc3\xa9'\r\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert list(corpus.documents(tmp_path)) == [
        b"def f():\r\n    return '\xc3\xa9'\r\n",
        b"@decorated\n@twice\nclass B:\n    x = 1\n",
        b"async def g():\n    return 1\n",
    ]


def test_corpus_is_written_as_megatron_reads_it(tmp_path: Path) -> None:
    """In a process of its own, as Megatron's import changes torch.cuda where there is no GPU."""
    code = f"""
from pathlib import Path
from examples.demo import corpus
corpus.write([b"ab", b"", b"\\xff"], Path({str(tmp_path / "corpus")!r}))
from megatron.core.datasets.indexed_dataset import IndexedDataset
data = IndexedDataset({str(tmp_path / "corpus")!r})
print([data[i].tolist() for i in range(len(data))], data.document_indices.tolist())
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[[97, 98, 256], [256], [255, 256]] [0, 1, 2, 3]"


# -------------------------------------------------------------------------------------------------------------- report


def entry(iteration: int, loss: float = 2.0, **changes: Any) -> dict[str, Any]:
    """A line of a step log, as the runtime writes it."""
    segment = {"strategy": "tp1-cp1-pp1-dp4", "kind": "guest", "sequences": 3, "micro_batches": 2, "tokens": 60}
    home = {"strategy": "tp2-cp2-pp1-dp1", "kind": "home", "sequences": 1, "micro_batches": 1, "tokens": 40}
    switch = {"from": "tp2-cp2-pp1-dp1", "to": "tp1-cp1-pp1-dp4", "bytes": 1000, "messages": 4, "seconds": 0.1}
    fold = {"from": "tp1-cp1-pp1-dp4", "bytes": 2000, "messages": 4, "seconds": 0.1}
    return {
        "iteration": iteration,
        "loss": loss,
        "grad_norm": 1.0,
        "tokens": 100,
        "padding_fraction": 0.2,
        "step_s": float(iteration),
        "segments": [segment, home],
        "switches": [switch, switch],
        "folds": [fold],
        **changes,
    }


def steps_of(entries: Sequence[dict[str, Any]]) -> tuple[report.Step, ...]:
    return tuple(report.parse_step(json.dumps(item)) for item in entries)


def test_report_holds_what_was_measured(tmp_path: Path) -> None:
    static = steps_of([entry(i, segments=[], switches=[], folds=[], step_s=3.0) for i in (1, 2, 3)])
    hotspa = steps_of([entry(1), entry(2, loss=2.0 + 1e-6), entry(3, tokens=100, padding_fraction=0.5)])
    comparison = report.compare(static, hotspa)
    report.write_report(comparison, tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert written["iterations"] == 3
    assert written["static_losses"] == [2.0, 2.0, 2.0]
    assert written["hotspa_losses"] == [2.0, 2.0 + 1e-6, 2.0]
    assert written["max_rel_loss_diff"] == pytest.approx(5e-7)
    assert (written["static_step_s"], written["hotspa_step_s"]) == (3.0, 2.0)
    assert (written["switch_bytes"], written["fold_bytes"], written["tokens"]) == (6000, 6000, 300)
    assert written["padding_fraction"] == pytest.approx(1 - 300 / (125 + 125 + 200))
    assert len(written["segments"]) == 6
    assert written["segments"][1] == {"iteration": 1, **entry(1)["segments"][1]}
    assert written["passed"] is True
    assert report.exit_code(comparison) == 0
    assert "the same training" in report.summary_lines(comparison)[0]


@pytest.mark.parametrize(
    ("loss", "code"), [(2.0, 0), (2.0 + 1.9e-5, 0), (2.0 + 2.1e-5, 1), (1.99, 1), (math.nan, 1), (math.inf, 1)]
)
def test_exit_code_follows_the_worst_loss(tmp_path: Path, loss: float, code: int) -> None:
    comparison = report.compare(steps_of([entry(1), entry(2)]), steps_of([entry(1), entry(2, loss=loss)]))
    assert report.exit_code(comparison) == code
    report.write_report(comparison, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["passed"] is (code == 0)


def test_equal_losses_that_are_not_finite_do_not_pass() -> None:
    broken = steps_of([entry(1, loss=math.nan)])
    assert report.exit_code(report.compare(broken, broken)) == 1


def test_runs_on_other_data_are_not_compared() -> None:
    with pytest.raises(RuntimeError, match="logged 1 steps, the other 2"):
        report.compare(steps_of([entry(1)]), steps_of([entry(1), entry(2)]))
    with pytest.raises(RuntimeError, match="step 1 trained 100 tokens in the static run and 99 in the other"):
        report.compare(steps_of([entry(1)]), steps_of([entry(1, tokens=99)]))
    with pytest.raises(RuntimeError, match="logged 0 steps"):
        report.compare((), ())


# ---------------------------------------------------------------------------------------------------------------- demo


def test_leaving_a_run_ends_its_whole_family(tmp_path: Path) -> None:
    """Ranks sit in sessions of their own and may ignore a polite request; an interrupted run leaves none all the same."""
    # One write each: unbuffered, print() makes two, and those of two children into one file may mingle.
    child = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(1, b'up\\n'); time.sleep(600)"
    )
    parent = (
        "import subprocess, sys, time\n"
        f"children = [subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True) for _ in range(2)]\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / "log"
    command = [sys.executable, "-c", parent]
    started = training.started(command, env=os.environ, log=log)
    with pytest.raises(KeyboardInterrupt), started as process:
        up = (line for _, line in training.lines_of(process, log, limit_s=30) if line == "up")
        assert [next(up), next(up)] == ["up", "up"]
        mark = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"HOTSPA_DEMO_RUN=")[1][:32].decode()
        assert len(training.marked_processes(mark)) == 3
        raise KeyboardInterrupt
    assert training.marked_processes(mark) == []
    assert process.returncode is not None


def test_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (
        pytest.raises(RuntimeError, match="longer than 0 s"),
        training.started(command, env=os.environ, log=tmp_path / "log") as process,
    ):
        list(training.lines_of(process, tmp_path / "log", limit_s=0.3))
    assert process.returncode == -signal.SIGTERM


@pytest.fixture
def signals() -> Iterator[None]:
    """The demo changes what signals do; the suite gets them back as they were."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


FAKE_RUN = """
import json, os, sys
entries = json.loads(sys.argv[1])
if sys.argv[3] != "None":
    entries[-1]["loss"] += 0.1
print("hotspa: switch tp2-cp2-pp1-dp1 -> tp1-cp1-pp1-dp4: 12.3 MiB sent, 4 messages, 41 ms", flush=True)
with open(os.environ["HOTSPA_STEP_LOG"], "w") as log:
    log.writelines(json.dumps(entry) + "\\n" for entry in entries)
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("flags", "run_code", "steps", "code"),
    [([], 0, 3, 0), (["--break", "fold"], 0, 3, 1), ([], 3, 3, 2), ([], 0, 2, 2)],
    ids=["same", "broken", "rank died", "steps missing"],
)
def test_demo_exit_codes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    run_code: int,
    steps: int,
    code: int,
) -> None:
    entries = json.dumps([entry(i) for i in range(1, steps + 1)])

    def fake_command(arguments: Sequence[str], *, config: Path, broken: str | None) -> list[str]:
        assert "--use-distributed-optimizer" in arguments
        assert config.exists()
        return [sys.executable, "-c", FAKE_RUN, entries, str(run_code), str(broken)]

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(training, "command_line", fake_command)
    monkeypatch.setattr(demo, "prepare", lambda out: out / "corpus")
    out = tmp_path / "out"
    out.mkdir()
    assert demo.main(["--iterations", "3", "--out", str(out), *flags]) == code
    printed = capsys.readouterr()
    assert (out / "report.json").exists() == (code < 2)
    if code == 2:
        assert "demo: the static run ended with code" in printed.err
        return
    assert "switch tp2-cp2-pp1-dp1 -> tp1-cp1-pp1-dp4: 12.3 MiB sent, 4 messages, 41 ms" in printed.out
    assert "(static 2.000000, off by 0.0e+00)" in printed.out
    assert ("NOT the same training" in printed.out) == (code == 1)
    assert json.loads((out / "report.json").read_text())["broken"] == ("fold" if flags else None)


@pytest.mark.usefixtures("signals")
def test_demo_reads_the_configuration_before_it_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "wrong.yaml").write_text("strategys: []\n")
    for name, complaint in (("wrong.yaml", "strategys"), ("missing.yaml", "missing.yaml")):
        assert demo.main(["--config", str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
        assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("flags", "code"), [([], 0), (["--break", "fold"], 1)], ids=["whole", "broken"])
def test_demo_for_real(tmp_path: Path, flags: list[str], code: int) -> None:
    """The broken run shows that the comparison can fail."""
    command = [
        sys.executable,
        "-m",
        "examples.demo",
        "--iterations",
        "10",
        "--batch",
        "8",
        "--out",
        str(tmp_path),
        *flags,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["iterations"] == len(written["static_losses"]) == len(written["hotspa_losses"]) == 10
    assert {part["kind"] for part in written["segments"]} == {"guest", "sibling", "home"}
    assert written["switch_bytes"] > 0
    assert (written["max_rel_loss_diff"] > report.MAX_REL_LOSS_DIFF) == bool(flags)


def test_demo_runs_the_same_training_twice() -> None:
    """Only the configuration differs; and what the pages promise of the demo's training holds."""
    arguments = training.megatron_arguments(corpus=Path("c"), cache=Path("d"), iterations=12, batch=64)
    words = " ".join(arguments)
    for promised in (
        "--vocab-size 257",
        "--seq-length 4096",
        "--adam-eps 1e-6",
        "--hidden-dropout 0",
        "--attention-dropout 0",
        "--calculate-per-token-loss",
        "--use-distributed-optimizer",
        "--num-query-groups",
        "--swiglu",
    ):
        assert promised in words
    command = training.command_line(arguments, config=ROOT / "examples" / "static.yaml", broken=None)
    assert command[-2] == "--hotspa-config"
    assert command[command.index("--nproc-per-node") + 1] == "4"
    assert "hotspa_megatron.launch" in command


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_cpu_example_trains_as_the_readme_says() -> None:
    env = {**os.environ, "HOTSPA_VENV": str(Path(sys.prefix))}
    text = (ROOT / "examples" / "cpu.sh").read_text().replace("bash scripts/setup.sh\n", "")
    command = text.replace('cd "$(dirname "${BASH_SOURCE[0]}")/.."', f'cd "{ROOT}"')
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=240, check=False, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "hotspa: switch tp2-cp1-pp1-dp1 -> tp1-cp1-pp1-dp2" in done.stdout
    assert "iteration        3/       3" in done.stdout


# ----------------------------------------------------------------------------------------------------------- a single GPU


def test_the_gpu_check_explains_itself_and_says_where_there_is_no_gpu() -> None:
    script = ROOT / "scripts" / "gpu_check.sh"
    explained = shell(script, "--help")
    assert explained.returncode == 0 and "prefetch on a side stream" in explained.stdout
    without = shell(script, PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert without.returncode == 0
    assert without.stdout == "gpu_check: no CUDA device is visible: nothing was checked\n"
    refused = shell(script, "--fast")
    assert refused.returncode == 2 and refused.stderr == "gpu_check: --fast: no such option; see --help\n"
    lost = shell(script, PYTHON="/bin/false")
    assert lost.returncode == 2 and "/bin/false has no torch" in lost.stderr


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("echo '::b[x y] PASSED'; echo '::c SKIPPED'", 0, ["gpu_check: all steps passed"]),
        ("echo '::b[x y] FAILED'; echo '::c PASSED'; exit 1", 1, []),
        # As pytest has it: the name when a test begins, the rest when it ends.
        (
            "printf '::b[x y] '; sleep 600",
            124,
            ["gpu_check: not reached: ::b[x y]", "gpu_check: not reached: ::c"],
        ),
    ],
    ids=["passes", "fails", "does not get through"],
)
def test_the_gpu_check_keeps_to_its_time_and_names_what_it_did_not_reach(
    ending: str, code: int, said: list[str], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(f"""#!/usr/bin/env bash
        case "$*" in
            *--collect-only*) printf '::a\\n::b[x y]\\n::c\\n\\n3 tests collected\\n' ;;
            *pytest*-v) echo '::a PASSED'; {ending} ;;
        esac
        """)
    python.chmod(0o755)
    done = shell(ROOT / "scripts" / "gpu_check.sh", PYTHON=str(python), LIMIT="5")
    assert done.returncode == code, (done.stdout, done.stderr)
    assert [line for line in done.stdout.splitlines() if line.startswith("gpu_check: ")] == said


def test_the_gpu_check_profiles_and_reads_the_profile(tmp_path: Path) -> None:
    """With this interpreter for the reading: a profile that is one passes, another ends the run before the tests."""
    python = tmp_path / "python"
    good = ROOT / "hotspa_megatron" / "planning" / "hardware" / "h100.yaml"
    for written, code in ((f"cp {good}", 0), ("echo 'memory_mib: none' >", 1), ("exit 3; echo", 3)):
        python.write_text(f"""#!/usr/bin/env bash
            case "$*" in
                '-m hotspa_megatron.cli.main profile --ranks 1 --output '*) {written} "${{@: -1}}" ;;
                *load_hardware*) exec {sys.executable} "$@" ;;
                *--collect-only*) echo '::a' ;;
                *pytest*-v) echo '::a PASSED' ;;
            esac
            """)
        python.chmod(0o755)
        done = shell(ROOT / "scripts" / "gpu_check.sh", PYTHON=str(python), LIMIT="60")
        assert done.returncode == code, (done.stdout, done.stderr)
        assert ("all steps passed" in done.stdout) == (code == 0)


def _gpu_check_on_cpu(rank: int, world_size: int, broken: bool) -> str:
    import contextlib
    import io
    import runpy

    if broken:
        from hotspa_megatron.runtime.binding import Copies

        Copies.add = lambda self: None  # type: ignore[method-assign]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(ROOT / "scripts" / "gpu_check.py"))["main"](["--device", "cpu"])
    return said.getvalue()


def test_what_the_gpu_check_runs_is_exact_on_cpu_and_fails_where_a_fold_is_lost() -> None:
    (said,) = run_ranks(_gpu_check_on_cpu, 1, False, init_process_group=False)
    assert [line.split(":")[0] for line in said.splitlines()] == [
        "pack", "unpack", "add", "world size 1", "four ranks on one device", "prefetch",
    ]  # fmt: skip
    with pytest.raises(AssertionError, match="fold of four ranks: parameter 0 differs on rank 0"):
        run_ranks(_gpu_check_on_cpu, 1, True, init_process_group=False)
