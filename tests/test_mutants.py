"""The list of seeded faults still fits the code, and the script that seeds them can fail."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _script() -> ModuleType:
    found = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["mutants"] = module  # dataclasses look their module up
    found.loader.exec_module(module)
    return module


mutants = _script()


def test_every_fault_still_applies_and_has_a_name_of_its_own() -> None:
    names = [each.name for each in mutants.MUTANTS]
    assert len(names) == len(set(names)) > 100  # as CONTRIBUTING says
    wrong = {each.name: mutants.problem_of(each, (ROOT / each.path).read_text()) for each in mutants.MUTANTS}
    assert not {name: problem for name, problem in wrong.items() if problem is not None}
    tests = {test for each in mutants.MUTANTS for test in each.tests if test.startswith("tests/")}
    assert all((ROOT / test).is_file() for test in tests)


def _folder(tmp_path: Path, *, checks: str) -> Path:
    (tmp_path / "sums.py").write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    (tmp_path / "test_sums.py").write_text(f"from sums import add\n\n\ndef test_add() -> None:\n    assert {checks}\n")
    return tmp_path


def _mutant(old: str, new: str, *, hangs: bool = False) -> object:
    return mutants.Mutant(name="sums: a fault", path="sums.py", old=old, new=new, tests=("test_sums.py",), hangs=hangs)


def _without_a_fault(*, passed: bool = True) -> Any:
    """What the test says of the folder as it is."""
    names = frozenset({"test_sums.py::test_add"})
    return mutants.Said(
        code=0, passed=names if passed else frozenset(), failed=(), endless=frozenset(), seconds=1.0, last=""
    )


@pytest.mark.parametrize(
    ("checks", "old", "new", "verdict"),
    [
        ("add(2, 3) == 5", "a + b", "a - b", "caught"),
        ("add(0, 0) == 0", "a + b", "a - b", "survived"),
        ("add(2, 3) == 5", "a * b", "a - b", "its text is no longer in the file"),
        ("add(2, 3) == 5", "a", "c", "its text stands 3 times in the file"),
        ("add(2, 3) == 5", "a + b", "a +", "the changed file is no Python: line 2"),
    ],
)
def test_a_fault_is_caught_survives_or_is_wrong(tmp_path: Path, checks: str, old: str, new: str, verdict: str) -> None:
    folder = _folder(tmp_path, checks=checks)
    before = (folder / "sums.py").read_text()
    outcome = mutants.judge(folder, _mutant(old, new), _without_a_fault())
    assert outcome.verdict == verdict and outcome.is_good == (verdict == "caught")
    assert (folder / "sums.py").read_text() == before


NOBODY = "no test that passes without the fault has failed"


@pytest.mark.parametrize(
    ("old", "new", "verdict"),
    [
        ("    return a + b", "    return a - b\n\n\nraise OSError", f"pytest ended with 2, and {NOBODY}"),
        ("def add", "def added", f"pytest ended with 2, and {NOBODY}"),
        ("    return a + b", "    import os\n    os._exit(7)", f"pytest ended with 7, and {NOBODY}"),
    ],
    ids=["raises at import", "cannot be imported", "dies"],
)
def test_what_no_test_has_found_is_not_caught(tmp_path: Path, old: str, new: str, verdict: str) -> None:
    folder = _folder(tmp_path, checks="add(2, 3) == 5")
    assert mutants.judge(folder, _mutant(old, new), _without_a_fault()).verdict == verdict


def test_a_test_that_fails_anyhow_finds_nothing(tmp_path: Path) -> None:
    folder = _folder(tmp_path, checks="add(2, 3) == 6")
    without = _without_a_fault(passed=False)
    assert mutants.judge(folder, _mutant("a + b", "a - b"), without).verdict == f"pytest ended with 1, and {NOBODY}"


def test_no_end_is_a_finding_only_where_the_fault_is_said_to_hang(tmp_path: Path) -> None:
    """By pytest-timeout, and by the limit for a whole run."""
    folder = _folder(tmp_path, checks="add(2, 3) == 5")
    (folder / "sums.py").write_text("def add(a: int, b: int) -> int:\n    while True:\n        pass\n")
    cut = mutants.run_tests(folder, ("test_sums.py", "--timeout", "1"))
    assert cut.code == 1 and cut.endless == {"test_sums.py::test_add"}
    ended = mutants.run_tests(folder, ("test_sums.py",), limit_s=1.0)
    assert ended.code is None and not ended.failed
    for said, by in ((cut, "test_sums.py::test_add"), (ended, "no end within 1 s")):
        for hangs, verdict in ((True, "caught"), (False, "no test says so, one only does not end")):
            mutant = _mutant("a + b", "a - b", hangs=hangs)
            assert mutants.verdict_of(mutant, _without_a_fault(), said) == (verdict, by)


@pytest.mark.parametrize(
    ("checks", "code", "said"), [("add(2, 3) == 5", 0, "1 of 1 faults"), ("add(0, 0) == 0", 1, "survived")]
)
@pytest.mark.parametrize("jobs", ["1", "3"])
def test_a_survivor_fails_the_run(
    tmp_path: Path,
    jobs: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    checks: str,
    code: int,
    said: str,
) -> None:
    tree = _folder(tmp_path, checks=checks)
    monkeypatch.setattr(mutants, "MUTANTS", (_mutant("a + b", "a - b"),))
    monkeypatch.setattr(
        mutants,
        "copy_tree",
        lambda folder: (
            folder.mkdir() or [(folder / path.name).write_text(path.read_text()) for path in tree.glob("*.py")]
        ),
    )
    assert mutants.main(["--jobs", jobs]) == code
    assert said in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_fault_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole list; those that need several ranks, too."""
    code = mutants.main([])
    assert code == 0, capsys.readouterr().out
