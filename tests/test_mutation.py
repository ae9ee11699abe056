"""Listed mutants are found wherever they stand, and a test that fails kills them."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from coverage import CoverageData

from tests.mutation import __main__ as mutation
from tests.mutation import drawing, running
from tests.mutation.choosing import Executions
from tests.mutation.listed import LISTS, Entry, Mutant, NotFoundError, find, read

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_lists_are_of_the_code_as_it_is() -> None:
    entries = {name: read(path) for name, path in LISTS.items()}
    assert len(entries["mutants"]) >= 400
    assert len(entries["kernels"]) >= 40
    core = [each for each in entries["mutants"] if drawing.group(each.module) != "rest"]
    assert 2 * len(core) >= len(entries["mutants"])
    assert all(each.why and each.test for each in entries["kernels"])
    every = [each for listed_of in entries.values() for each in listed_of]
    assert not [key for key, count in Counter(each.key for each in every).items() if count > 1]
    wrong, plain = [], cache(drawing.compiled)
    for each in every:
        file, _, test = each.test.partition("::")
        if each.test and f"def {test.partition('[')[0]}(" not in (ROOT / file).read_text("utf-8"):
            wrong.append(f"no test {each.test}")
        if each.removed:
            continue
        try:
            mutant = find(each, ROOT)
        except NotFoundError as error:
            wrong.append(str(error))
            continue
        content = (ROOT / mutant.file).read_bytes()
        if drawing.compiled(mutant.applied(content)) == plain(content):
            wrong.append(f"the same program: {each.key}")
    assert not wrong


SOURCE = """
class Plan:
    def apply(self, x):
        def inner(y):
            return y + 1

        return (x + 1) * inner(x)
"""
# Names that no test of the suite has: a fork inherits the modules of those that ran.
TESTS = """
import multiprocessing, subprocess, sys, time
from pathlib import Path
FOLDER = str(Path(__file__).parent / "kernels")
sys.path.insert(0, FOLDER)
import numbers_of_a_mutant as numbers

def test_here():
    assert numbers.Plan().apply(1) == 4

def test_elsewhere():
    code = "import numbers_of_a_mutant as n; print(n.Plan().apply(1))"
    found = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True)
    assert found.stdout == b"4\\n"

def test_nothing():
    pass

def test_that_waits():
    time.sleep(4 - numbers.Plan().apply(1))

def test_by_a_process_of_multiprocessing():
    process = multiprocessing.get_context("fork").Process(target=test_here)
    process.start()
    process.join()
    assert process.exitcode == 0
"""


def mutant_of_a_checkout(folder: Path, new: str) -> tuple[Entry, Mutant]:
    """Write a checkout of one file and its tests; of the mutant, list where it stood before."""
    path = folder / "kernels" / "numbers_of_a_mutant.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    (folder / "test_of_a_mutant.py").write_text(TESTS)
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    entry = Entry("kernels/before.py", "Plan.apply.inner", "y+1", new)
    return entry, find(entry, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tests", "new", "status", "by"),
    [
        (["nothing", "here"], "y + 2", "killed", "test_here"),
        (["elsewhere"], "y + 2", "killed", "test_elsewhere"),
        (["here"], "1 + y", "survived", "exit code 0"),
        (["that_waits"], "y - 99", "hangs", "test_that_waits"),
        (["is_gone"], "y + 2", "no such test", "exit code 4"),
        ([], "y + 2", "not covered", ""),
    ],
)
def test_a_failing_test_kills(
    tests: list[str],
    new: str,
    status: str,
    by: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "SECONDS", 0.5)
    _, mutant = mutant_of_a_checkout(tmp_path, new)
    names = [f"test_of_a_mutant.py::test_{name}" for name in tests]
    known = {"test_of_a_mutant.py::test_that_waits": 0.1}
    limit = 15.0 if status == "hangs" else 60.0
    found = running.run(tmp_path, mutant, names, limit, known)
    assert (found.status, found.by.rpartition("::")[2]) == (status, by)
    assert (tmp_path / mutant.file).read_text() == SOURCE
    with pytest.raises(NotFoundError, match="nowhere"):
        find(Entry("kernels/before.py", "Plan.apply", "y + 1", new), tmp_path)


@pytest.mark.slow
def test_tests_may_start_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of ranks do, which children of a worker of `multiprocessing.Pool` may not."""
    entry, mutant = mutant_of_a_checkout(tmp_path, "1 + y")
    monkeypatch.setattr(mutation, "ROOT", tmp_path)
    monkeypatch.setattr(mutation, "preload", lambda: None)
    entry = entry._replace(test="test_of_a_mutant.py::test_by_a_process_of_multiprocessing")
    given = Namespace(seconds=60.0, workers=1)
    rows = list(mutation._run([(entry, mutant)], None, given))
    assert [row["status"] for row in rows] == ["survived"]


@pytest.mark.slow
def test_files_whose_marks_are_of_plugins_are_collected() -> None:
    """In a process of its own: pytest remembers the marks that it has seen."""
    script = "from pathlib import Path; from tests.mutation.running import failing; "
    script += "print(failing(Path.cwd(), ['tests/test_frozen.py'], collect=True))"
    ask = [sys.executable, "-c", script]
    found = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


def test_a_test_that_takes_too_long_stands_in_no_others_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = CoverageData(str(tmp_path / ".coverage"))
    for name in ("long", "short"):
        data.set_context(f"tests/test_a.py::test_{name}|run")
        data.add_lines({"kernels/a.py": [3]})
    data.write()
    known = Executions(tmp_path / ".coverage", tmp_path / "no times")
    seconds = {"tests/test_a.py::test_long": 50.0, "tests/test_a.py::test_short": 5.0}
    monkeypatch.setattr(known, "seconds", seconds)
    mutant = Mutant("kernels/a.py", 3, 3, None, 0, 1, "a", "b")
    # The other one does much beside, and so comes after the long one.
    monkeypatch.setattr(known, "_total", Counter({"tests/test_a.py::test_short": 9}))
    assert known.choose(mutant, 30).tests == ["tests/test_a.py::test_short"]
