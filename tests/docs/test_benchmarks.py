"""docs/benchmarks.md: the numbers of its tables are those of the files that it names."""

import json
import math
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
)
from benchmark_details import balanced, convergence, half_steps, matrices, small_problems
from result_rows import content, shows

from experiments.rows import read_rows

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
_RUN = re.compile(r"results/(\w+)\.json\), ([0-9a-f]{7}(?: and [0-9a-f]{7})*)")


def measured(start):
    """The cells of the row that begins with `start`, but for that one, machine and run."""
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| {start} |")]
    assert len(rows) == 1, (start, len(rows))
    found = rows[0].strip("| ").split(" | ")[1:]
    return " | ".join(found[:-2] if "json" in found[-1] or "the same" in found[-1] else found)


TABLES = [
    *(distances, small_problems, convergence, half_steps, class_distances, flows),
    *(matrices, balanced, on_a_processor, gradients, implicit, curvature, regression, memory),
    bounds,
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
        assert set(commits.split(" and ")) <= set(recorded), (name, commits)


def test_what_is_said_of_the_starts_of_a_regression_is_in_their_traces():
    rows = [r for r in read_rows("shuffled_regression") if r["method"] == "ours"]
    starts = [r for r in rows if r["epsilon"] == 0.5]
    steps = sorted(r["newton_steps"] for r in starts)
    assert f"Newton took {steps[0]} to {steps[-1]} steps" in PAGE
    quick = sorted(r["seconds"] for r in starts)[:-1]
    assert f"and eight of the nine ended within {math.ceil(quick[-1])} s" in PAGE
    traces = [r["trace"] for r in starts]
    iterations = max(max(trace["iterations"]) for trace in traces)
    slowest = max(max(trace["check_seconds"]) for trace in traces)
    assert f"took at most {iterations} iterations to 1e-4" in PAGE
    assert f"and an eigenvalue at most {slowest:.2f} s" in PAGE
    assert max(max(trace["residual"]) for trace in traces) <= 1e-4
    (before,) = (r["trace"] for r in rows if r["epsilon"] == 0.25)
    assert f"they took up to {max(before['iterations']):,}" in PAGE
    assert f"left with {math.ceil(1e3 * max(before['residual'])) / 1e3:.3f} of their" in PAGE


def test_numbers_are_compared_to_the_digits_that_are_shown():
    for text, values, agree in (
        ("97 / 193 ms | 1e-2 and 4,563", [97.4, 192.6, 0.0118, 4563], True),
        ("97 / 193 ms", [97.6, 193], False),
        ("0.80 s", [0.806], False),
        ("97", [97, 1], False),
    ):
        assert shows(text, values) == agree, text
