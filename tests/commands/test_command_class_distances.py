"""Class distances on the command line: their cache, their progress, how they are read."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from otdd_flash.labels.pair_cache import FILE

pytestmark = pytest.mark.usefixtures("undrawn")


def _never(*_, **__):
    raise AssertionError("measured again")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gaussian", "sinkhorn"])
def test_class_distances_are_counted_measured_once_and_their_gap_is_said(
    command, read, monkeypatch, method
):
    from otdd_flash.commands import compare
    from otdd_flash.labels import METRICS

    heard, compute = [], compare.dataset_distance

    def listening(*args, class_progress, **kwargs):
        def both(done, total):
            heard.append((done, total))
            class_progress(done, total)

        return compute(*args, class_progress=both, **kwargs)

    monkeypatch.setattr(compare, "dataset_distance", listening)
    settings = (f"labels={method}", "labels.epsilon=1", "epsilon=1", "cache_dir=cache")
    settings = (*settings, "max_samples=20", "report=table")
    assert command(*settings, "hydra.run.dir=first").code == 0
    assert heard[-1] == (45, 45)
    for kind in METRICS.values():
        monkeypatch.setattr(kind, "measure", _never)
        monkeypatch.setattr(kind, "in_parts", _never)
    assert command(*settings, "hydra.run.dir=second").complaints == []
    for name in ("class_distances.csv", "nearest_classes.csv"):
        assert Path("first", name).read_bytes() == Path("second", name).read_bytes()
    first, second = (read(f"{run}/result.json") for run in ("first", "second"))
    assert first["value"] == second["value"]
    gap = first.get("class_distance_gap")
    assert gap == second.get("class_distance_gap")
    assert (gap is not None) == (method == "sinkhorn")
    assert gap is None or 0 < gap < 1


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_or_is_damaged_is_said_and_done_without(command, read):
    Path("file").write_text("not a folder")
    ended = command("cache_dir=file", "report=none")
    assert (ended.code, ended.err.count("warning: ")) == (0, 1)
    for part in (f"file/{FILE}", "cache_dir=DIR", "cache_dir=null"):
        assert part in ended.err
    value = read("run/result.json")["value"]
    Path("cache").mkdir()
    Path("cache", FILE).write_bytes(b"damaged" * 999)
    ended = command("cache_dir=cache", "report=none")
    assert ended.code == 0
    for part in ("warning: the class distances in cache", "are damaged", f"kept as {FILE}.damaged"):
        assert part in ended.err
    assert read("run/result.json")["value"] == value


@pytest.mark.slow
def test_work_that_would_not_end_is_refused_with_the_ways_out(command, monkeypatch):
    from otdd_flash.labels import exact

    monkeypatch.setattr(exact, "MAX_HOURS", 1e-12)
    ended = command("labels=exact")
    assert ended.code == 2
    for part in ("labels=exact", "hours", "labels=gaussian", "labels=sinkhorn", "max_samples"):
        assert part in ended.error


@pytest.mark.slow
def test_nearest_classes_are_printed_and_written_in_the_order_that_is_asked_for(
    command, rows, monkeypatch
):
    from otdd_flash.commands import compare

    asked, write = [], compare.write_report

    def writing(*args, order, **kwargs):
        asked.append(order)
        return write(*args, order=order, **kwargs)

    monkeypatch.setattr(compare, "write_report", writing)
    assert "nearest classes" in command("report.order=hierarchical").out
    found = rows("run/nearest_classes.csv")
    assert [row["side"] for row in found] == ["source"] * 5 + ["target"] * 5
    # Both halves are drawn from the same five classes.
    assert all(row["class"] == row["nearest"] for row in found)
    assert "nearest classes" not in command("labels=none").out
    assert asked == ["hierarchical", "given"]


def test_a_bar_lasts_from_the_first_report_to_the_last(monkeypatch):
    from rich.console import Console

    from otdd_flash.commands import progress

    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(progress, "messages", terminal)
    with progress.Phases() as phases, phases.counting("class distances") as report:
        bars = phases._bars
        assert not bars.tasks[0].visible
        report(7, 1200)
        assert bars.tasks[0].visible
        bars.refresh()
        report(1200, 1200)
        assert not bars.tasks[0].visible
    assert "class distances" in terminal.file.getvalue()
    assert "7 of 1,200" in terminal.file.getvalue()
