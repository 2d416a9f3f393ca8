"""The list of seeded faults still fits the code, and the script that seeds them can fail."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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
    assert len(names) == len(set(names)) >= 40
    wrong = {each.name: mutants.problem_of(each, (ROOT / each.path).read_text()) for each in mutants.MUTANTS}
    assert not {name: problem for name, problem in wrong.items() if problem is not None}
    tests = {test for each in mutants.MUTANTS for test in each.tests if test.startswith("tests/")}
    assert all((ROOT / test).is_file() for test in tests)


def _folder(tmp_path: Path, *, checks: str) -> Path:
    (tmp_path / "sums.py").write_text("def add(a: int, b: int) -> int:\n    return a + b\n")
    (tmp_path / "test_sums.py").write_text(f"from sums import add\n\n\ndef test_add() -> None:\n    assert {checks}\n")
    return tmp_path


def _mutant(old: str, new: str) -> object:
    return mutants.Mutant(name="sums: a fault", path="sums.py", old=old, new=new, tests=("test_sums.py",))


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
    outcome = mutants.judge(folder, _mutant(old, new))
    assert outcome.verdict == verdict and outcome.is_good == (verdict == "caught")
    assert (folder / "sums.py").read_text() == before


@pytest.mark.parametrize(
    ("checks", "code", "said"), [("add(2, 3) == 5", 0, "1 of 1 faults"), ("add(0, 0) == 0", 1, "survived")]
)
def test_a_survivor_fails_the_run(
    tmp_path: Path,
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
        lambda folder: [(folder / path.name).write_text(path.read_text()) for path in tree.glob("*.py")],
    )
    assert mutants.main([]) == code
    assert said in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_fault_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    """The whole list; those that need several ranks, too."""
    code = mutants.main([])
    assert code == 0, capsys.readouterr().out
