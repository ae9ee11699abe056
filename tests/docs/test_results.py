"""experiments/results: small, summaries in JSON, traces beside them and whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.rows import TRACE, read_rows, write_rows

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results"
TRACED = sorted(path.name.removesuffix(".traces.parquet") for path in RESULTS.glob("*.parquet"))


def test_results_take_at_most_five_megabytes():
    assert sum(path.stat().st_size for path in RESULTS.rglob("*") if path.is_file()) <= 5_000_000


def test_summaries_hold_no_traces():
    for path in RESULTS.rglob("*.json"):
        assert f'"{TRACE}"' not in path.read_text(encoding="utf-8"), path
        assert path.stat().st_size <= 150_000, path


@pytest.mark.parametrize("name", TRACED)
def test_traces_come_back_to_their_rows(name):
    rows = read_rows(name)
    assert any(row.get(TRACE) for row in rows)
    assert all(TRACE not in row or row[TRACE] is not None for row in rows)


def test_rows_are_written_and_read_whole(tmp_path):
    rows = [
        {"n": 1, TRACE: [{"error": 0.1}, {"error": 1e-17}]},
        {"n": 2},
        {"n": 3, TRACE: {"a": 1}},
    ]
    write_rows("name", {"environment": {}}, rows, tmp_path)
    assert read_rows("name", tmp_path) == rows
    assert json.loads((tmp_path / "name.json").read_text())["rows"] == [{"n": n} for n in (1, 2, 3)]
