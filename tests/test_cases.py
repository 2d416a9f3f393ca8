"""docs/cases.md names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
TABLE = (TESTS.parent / "docs" / "cases.md").read_text()
ROWS = [line for line in TABLE.splitlines() if line.startswith("| O-")]


def named(row: str) -> list[tuple[str, str]]:
    """(file, test or "" for the whole file) of a row's last cell."""
    found = []
    for part in row.rsplit("|", 2)[1].split(";"):
        file, *names = re.findall(r"`((?:slurm/)?test_\w+(?:\.py|\.\.\.)?)", part)
        found += [(file, name) for name in names] or [(file, "")]
    return found


def test_every_test_of_the_table_exists() -> None:
    assert ROWS
    for row in ROWS:
        for file, name in named(row):
            text = (TESTS / file).read_text()
            pattern = name.removesuffix("...") + ("" if name.endswith("...") else r"\(") if name else ""
            assert re.search(f"^def {pattern}", text, re.MULTILINE), f"{row[:7]}: {file}: {name}"


def test_all_thirty_cases_are_listed_once_and_in_order() -> None:
    numbers = [int(row[4:6]) for row in ROWS]
    assert numbers == list(range(1, 31))
