"""The pages about failures say what the code does: every reason, every status, and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from registry.errors import Refused
from registry.statuses import HAS_VALUE, Status

REPOSITORY = Path(__file__).parents[2]
SCORING = (REPOSITORY / "docs/how-scoring-works.md").read_text()
CASES = (REPOSITORY / "docs/failure-cases.md").read_text()

EXPECTED = {
    "A": [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 13, 15, 16, 18, 19, 21, 22],
    "B": [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 15, 16, 17, 18, 19, 20, 22, 23, 25, 26, 27, 29, 30],
    "E": [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 13, 14, 16],
}
FOLDERS = {"A": "tests/tasks", "B": "tests/tasks", "E": "tests/registry"}


def table(page: str, heading: str) -> dict[str, list[str]]:
    """First cell without quotes → the other cells, of the table under that head line."""
    _, _, rest = page.partition(heading + "\n")
    assert rest, f"there is no table {heading!r}"
    lines = rest.splitlines()[1:]
    rows = [line.strip("|").split("|") for line in lines[: next(n for n, one in enumerate(lines) if one[:1] != "|")]]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in rows}


def section(letter: str) -> str:
    return re.split(r"^## ", CASES, flags=re.M)[[one[0] for one in re.split(r"^## ", CASES, flags=re.M)].index(letter)]


def stated() -> set[str]:
    """The reasons that `registry.errors.Refused` lists."""
    return set(re.findall(r"\b[a-z]+(?:_[a-z]+)*\b", " ".join(re.findall(r": ([^.:]+)\.", Refused.__doc__ or ""))))


def raised() -> set[str]:
    """The reasons in the code, as far as they are written out where they are raised."""
    found = set()
    for path in [*(REPOSITORY / "tasks").rglob("*.py"), *(REPOSITORY / "registry").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refused" and node.args:
                first = node.args[0]
                if isinstance(first, ast.Constant):
                    found.add(str(first.value))
    return found


def test_every_reason_is_explained() -> None:
    rows = table(SCORING, "| reason | why | what to do |")
    assert set(rows) == stated()
    assert raised() <= stated()
    assert all(why and what for why, what in rows.values())


def test_every_status_is_explained() -> None:
    rows = table(SCORING, "| status | value | why | what to do |")
    assert list(rows) == [one.name.lower() for one in Status]
    assert {name for name, cells in rows.items() if cells[0] == "yes"} == {one.name.lower() for one in HAS_VALUE}


@pytest.mark.parametrize("letter", EXPECTED)
def test_every_case_is_there_with_tests_that_exist(letter: str) -> None:
    rows = table(section(letter), "| case | what happens elsewhere | what we do | tests |")
    assert [name.split()[0] for name in rows] == [f"{letter}{number:02}" for number in EXPECTED[letter]]
    for name, cells in rows.items():
        file = None
        for word in re.findall(r"`([^`]+)`", cells[-1]):
            if word.endswith(".py"):
                file = REPOSITORY / (word if "/" in word else f"{FOLDERS[letter]}/{word}")
                continue
            assert file is not None
            assert f"def {word}(" in file.read_text(), f"{name}: {file.name} has no {word}"
        waits = "waits" in cells[1] or "does not apply" in cells[1] or "benchmarks/" in cells[1]
        assert file is not None or waits, f"{name} names no test and gives no reason"
