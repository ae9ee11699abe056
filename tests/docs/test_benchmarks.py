"""docs/benchmarks.md: the numbers of its tables are those of the files that it names."""

import json
import re
from pathlib import Path

import pytest
from benchmark_claims import (
    bounds,
    class_distances,
    curvature,
    distances,
    flows,
    gradients,
    implicit,
    memory,
    on_a_processor,
    regression,
    small_on_a_processor,
)
from result_rows import RESULTS, content, shows

from experiments.rows import TRACE, read_rows

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
_RUN = re.compile(r"results/(\w+)\.json\), ([0-9a-f]{7}(?: and [0-9a-f]{7})*)")


def measured(start):
    """The cells of the row called `start`, or beginning so, but for that one, machine and run."""
    lines = PAGE.splitlines()
    rows = [line for line in lines if line.startswith(f"| {start} |")]
    rows = rows or [line for line in lines if line.startswith(f"| {start}")]
    assert len(rows) == 1, (start, len(rows))
    found = rows[0].strip("| ").split(" | ")[1:]
    return " | ".join(found[:-2] if "json" in found[-1] or "the same" in found[-1] else found)


TABLES = [
    *(distances, class_distances, flows, on_a_processor, gradients, implicit, curvature),
    *(small_on_a_processor, regression, memory, bounds),
]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_every_row_shows_the_numbers_of_its_file(table):
    claims = [*table()]
    assert len(claims) > 3
    for start, values in claims:
        assert shows(measured(start), values), (start, measured(start), values)


def test_every_run_is_of_a_commit_that_its_file_records():
    runs = _RUN.findall(PAGE)
    assert len(runs) > 25
    for name, commits in runs:
        recorded = re.findall(r'"commit": "(\w+)"', json.dumps(content(name)))
        assert set(commits.split(" and ")) <= {each[:7] for each in recorded}, (name, commits)


def test_results_are_small_and_traces_come_back_to_their_rows():
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 5_000_000
    for path in files:
        if path.suffix == ".json":
            assert f'"{TRACE}"' not in path.read_text(encoding="utf-8"), path
            assert path.stat().st_size <= 150_000, path
        elif path.suffix == ".parquet":
            rows = read_rows(path.name.removesuffix(".traces.parquet"))
            assert any(row.get(TRACE) for row in rows), path


def test_numbers_are_compared_to_the_digits_that_are_shown():
    for text, values, agree in (
        ("97 / 193 ms | 1e-2 and 4,563", [97.4, 192.6, 0.0118, 4563], True),
        ("97 / 193 ms", [97.6, 193], False),
        ("0.80 s", [0.806], False),
        ("97", [97, 1], False),
    ):
        assert shows(text, values) == agree, text
