"""Measured files: which are older than the code that they measure."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from experiments import freshness
from experiments.freshness import Repository, commits, entries, patterns, unlinked, writer

SCRIPT = '''"""Measure."""
import otdd_flash as otdd
from experiments.environment import write_result

NAME = "bench_speed"


def main(device):
    write_result(f"{NAME}_{device}", {"seconds": otdd.distance(3)})
'''
PACKAGE = """from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from otdd_flash.solving import distance
    from otdd_flash.others import unused
"""
SOLVING = '''"""Solve."""
from otdd_flash import constants
from otdd_flash.kernels.passes import half_step
from otdd_flash.report.tables import show


def distance(n):
    """Return a distance."""
    show(n)
    return half_step(n) + constants.SCALE
'''
FILES = {
    "experiments/bench_speed.py": SCRIPT,
    "experiments/environment.py": "def write_result(name, content): ...\n",
    "otdd_flash/__init__.py": PACKAGE,
    "otdd_flash/solving.py": SOLVING,
    "otdd_flash/constants.py": "SCALE = 2.0\n",
    "otdd_flash/others.py": "def unused():\n    return 1\n",
    "otdd_flash/report/tables.py": "def show(n):\n    print(n)\n",
    "kernels/passes.py": "def half_step(n):\n    # One pass.\n    return n * n\n",
    "docs/page.md": "[numbers](../experiments/results/bench_speed_cpu.json)\n",
}


@pytest.fixture
def checkout(tmp_path):
    """Return a repository with one commit, which its two files of results name."""
    git(tmp_path, "init", "--quiet")
    write(tmp_path, FILES)
    commit = saved(tmp_path)
    about = {"commit": commit, "gpu": None, "processor": "A processor", "cores": 2}
    rows = [{"commit": commit}, {"commit": "0123abcd"}]
    head = {"environment": about}
    results = {"bench_speed_cpu": head, "bench_speed_cuda": head | {"rows": rows}, "other": {}}
    folder = "experiments/results"
    write(tmp_path, {f"{folder}/{name}.json": json.dumps(each) for name, each in results.items()})
    saved(tmp_path)
    return tmp_path


def git(root, *arguments):
    identity = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def saved(root):
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "One more.")
    return git(root, "rev-parse", "--short", "HEAD")


def state(root):
    """Return what is said of the first file, whose commit is the first of the history."""
    saved(root)
    return next(entries(Repository(root))).state


def test_files_are_listed_with_their_commits_hardware_and_state(checkout):
    listed = [*entries(Repository(checkout))]
    assert [(each.file, each.state) for each in listed] == [
        ("bench_speed_cpu", "current"),
        ("bench_speed_cuda", "current"),
        ("bench_speed_cuda", "commit unknown"),
        ("other", "commit unknown"),
    ]
    assert listed[0].hardware == "A processor, 2 cores"
    assert listed[0].day == git(checkout, "show", "-s", "--format=%cs", listed[0].commit)
    assert unlinked(Repository(checkout)) == ["bench_speed_cuda", "other"]


MOVED = {
    "a docstring": {
        "otdd_flash/solving.py": SOLVING.replace("Return a distance.", "Return the distance.")
    },
    "a comment": {"kernels/passes.py": "def half_step(n):\n    return n * n\n"},
    "a move": {
        "kernels/passes.py": "",
        "otdd_flash/solving.py": SOLVING.replace(
            "from otdd_flash.kernels.passes import half_step", "def half_step(n): return n * n"
        ),
    },
    "a module renamed": {
        "otdd_flash/constants.py": "",
        "otdd_flash/numbers.py": "SCALE = 2.0\n",
        "otdd_flash/solving.py": SOLVING.replace("constants", "numbers"),
    },
    "a module folded into its importer": {
        "otdd_flash/constants.py": "",
        "otdd_flash/solving.py": SOLVING.replace(
            "from otdd_flash import constants", "SCALE = 2.0"
        ).replace("constants.SCALE", "SCALE"),
    },
    "a new name": {"otdd_flash/constants.py": "SCALE = 2.0\nOTHER = 3.0\n"},
    "what draws": {"otdd_flash/report/tables.py": "def show(n):\n    print(-n)\n"},
    "what is not imported": {"otdd_flash/others.py": "def unused():\n    return 2\n"},
}
CHANGED = {
    "the script": ({"experiments/bench_speed.py": SCRIPT.replace("(3)", "(4)")}, "main"),
    "a function": (
        {"otdd_flash/solving.py": SOLVING.replace("half_step(n) +", "half_step(n) *")},
        "distance",
    ),
    "a kernel": ({"kernels/passes.py": "def half_step(n):\n    return n + n\n"}, "half_step"),
    "a constant": ({"otdd_flash/constants.py": "SCALE = 3.0\n"}, "SCALE"),
    "a function and a constant": (
        {
            "otdd_flash/solving.py": SOLVING.replace("half_step(n) +", "half_step(n) *"),
            "otdd_flash/constants.py": "SCALE = 3.0\n",
        },
        "distance, SCALE",
    ),
}


@pytest.mark.parametrize("files", MOVED.values(), ids=MOVED)
def test_a_file_stays_current_after(checkout, files):
    write(checkout, files)
    assert state(checkout) == "current"


@pytest.mark.parametrize(("files", "names"), CHANGED.values(), ids=CHANGED)
def test_a_file_is_older_after_a_change_of(checkout, files, names):
    write(checkout, files)
    assert state(checkout) == f"older than {names}"


def test_only_the_first_names_are_shown(checkout):
    write(checkout, {"otdd_flash/constants.py": "".join(f"V{k} = {k}\n" for k in range(9))})
    saved(checkout)
    # All of them existed and changed.
    about = {"environment": {"commit": git(checkout, "rev-parse", "HEAD")}}
    write(checkout, {"experiments/results/bench_speed_cpu.json": json.dumps(about)})
    write(checkout, {"otdd_flash/constants.py": "".join(f"V{k} = -{k}\n" for k in range(9))})
    assert state(checkout) == "older than V0, V1, V2 and 6 more"


def test_the_table_is_printed_and_may_list_older_files_alone(checkout, capsys):
    write(checkout, {"otdd_flash/constants.py": "SCALE = 3.0\n"})
    saved(checkout)
    freshness.main([], checkout)
    whole = capsys.readouterr().out
    assert "older than SCALE" in whole
    assert "No page links to: bench_speed_cuda, other" in whole
    freshness.main(["--older"], checkout)
    older = capsys.readouterr().out
    assert "older than SCALE" in older
    assert "unknown" not in older
    assert "No page links" not in older


def test_a_folder_without_history_is_said(tmp_path, capsys):
    freshness.main([], tmp_path)
    assert "no git repository" in capsys.readouterr().out


def test_names_of_files_are_read_from_the_calls_that_write_them():
    source = """
from experiments.environment import write_result
from experiments.rows import Rows
NAME = "alone"
name = f"sized_{device}" if gpu else "small"
Rows(name, ("n",))
write_result(NAME, {})
write_result(given.name or f"check_{NAME}{'' if data else '_drawn'}", {})
write_result(given.name, {})
print("nothing")
"""
    assert patterns(source) == {"sized_.+", "small", "alone", "check_alone", "check_alone_drawn"}
    assert patterns("class Rows: ...\nRows('another')") == set()
    writers = {"first.py": {"sized_.+"}, "second.py": {"sized_small_.+"}}
    assert writer("sized_small_cpu", writers) == "second.py"
    assert writer("sized_cpu", writers) == "first.py"
    assert writer("unknown", writers) is None


def test_every_file_but_one_has_a_script():
    root = Path(__file__).resolve().parents[1] / "experiments"
    writers = {path.name: patterns(path.read_text("utf-8")) for path in root.glob("*.py")}
    results = [path.stem for path in root.glob("results/*.json")]
    # Written by hand from a profile.
    assert [name for name in results if writer(name, writers) is None] == ["profile_flow_ranks"]


def test_commits_are_those_of_rows_and_of_the_head_where_rows_have_none():
    head = {"environment": {"commit": "a"}}
    assert commits(head | {"rows": [{"commit": "b"}, {"commit": "c"}, {"commit": "b"}]}) == [
        *("b", "c")
    ]
    assert commits(head | {"rows": [{"commit": "b"}, {}]}) == ["b", "a"]
    assert commits(head) == ["a"]
    assert commits({"commit": "a", "rows": [{}]}) == ["a"]
    assert commits({"runs": [{"environment": {"commit": "d"}}]}) == ["d"]
    assert commits({}) == []
