"""Class distances on the command line: their cache, their progress, how they are read."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from rich.console import Console

from otdd_flash.commands import compare, progress
from otdd_flash.commands.progress import Phases
from otdd_flash.labels import METRICS, exact
from otdd_flash.labels.pair_cache import FILE

pytestmark = pytest.mark.usefixtures("undrawn")

METHODS = ("gaussian", "sinkhorn", "exact")


def _never(*_, **__):
    raise AssertionError("measured again")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_second_run_measures_nothing_again(command, read, monkeypatch, method):
    settings = [f"labels={method}", "cache_dir=cache"]
    if method == "sinkhorn":
        settings.append("labels.epsilon=1")
    assert command(*settings, "hydra.run.dir=first").code == 0
    for kind in METRICS.values():
        monkeypatch.setattr(kind, "measure", _never)
        monkeypatch.setattr(kind, "in_parts", _never)
    ended = command(*settings, "hydra.run.dir=second")
    assert (ended.code, ended.err) == (0, "")
    for name in ("class_distances.csv", "nearest_classes.csv"):
        assert Path("first", name).read_bytes() == Path("second", name).read_bytes()
    first, second = (read(f"{run}/result.json") for run in ("first", "second"))
    assert first["value"] == second["value"]
    assert first.get("class_distance_gap") == second.get("class_distance_gap")


def test_null_turns_the_cache_off(command, folder):
    before = {path.name for path in folder.iterdir()}
    assert command("cache_dir=null").code == 0
    assert {path.name for path in folder.iterdir()} == before | {"run"}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["file", "file/below"])
def test_a_cache_that_cannot_be_written_is_said_and_done_without(command, folder, target):
    (folder / "file").write_text("not a folder")
    ended = command(f"cache_dir={target}")
    assert ended.code == 0
    assert ended.err.count("warning: ") == 1
    for part in (f"{target}/{FILE}", "cache_dir=DIR", "cache_dir=null"):
        assert part in ended.err


@pytest.mark.slow
def test_a_damaged_cache_is_said_and_done_without(command, read):
    assert command("cache_dir=cache", "hydra.run.dir=first").code == 0
    Path("cache", FILE).write_bytes(b"damaged" * 999)
    ended = command("cache_dir=cache", "hydra.run.dir=second")
    assert ended.code == 0
    assert "warning: the class distances in cache" in ended.err
    assert "are damaged" in ended.err
    assert f"kept as {FILE}.damaged" in ended.err
    assert read("first/result.json")["value"] == read("second/result.json")["value"]


def test_work_that_would_not_end_is_refused_with_the_ways_out(command, monkeypatch):
    monkeypatch.setattr(exact, "MAX_HOURS", 1e-12)
    ended = command("labels=exact")
    assert ended.code == 2
    for part in ("labels=exact", "hours", "labels=gaussian", "labels=sinkhorn", "max_samples"):
        assert part in ended.error


@pytest.mark.slow
def test_bounds_of_class_distances_are_mentioned(command, read):
    assert command("labels=sinkhorn", "labels.epsilon=1").code == 0
    assert 0 < read("run/result.json")["class_distance_gap"] < 1
    assert command("labels=gaussian").code == 0
    assert "class_distance_gap" not in read("run/result.json")


@pytest.mark.slow
def test_nearest_classes_are_printed_and_written(command):
    ended = command()
    assert "nearest classes" in ended.out
    with Path("run/nearest_classes.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert [row["side"] for row in rows] == ["source"] * 5 + ["target"] * 5
    # Both halves are drawn from the same five classes.
    assert all(row["class"] == row["nearest"] for row in rows)
    assert "nearest classes" not in command("labels=none").out


@pytest.mark.slow
def test_the_order_of_classes_is_that_of_the_report(command, monkeypatch):
    asked = []
    write = compare.write_report

    def writing(*args, order, **kwargs):
        asked.append(order)
        return write(*args, order=order, **kwargs)

    monkeypatch.setattr(compare, "write_report", writing)
    assert command().code == command("report.order=hierarchical").code == 0
    assert asked == ["given", "hierarchical"]


def test_an_unknown_order_is_found_before_anything_is_read(command):
    ended = command("report.order=best", "source=arrays", "source.path=nowhere.npz")
    assert ended.code == 2
    assert ended.error == "unknown report.order 'best'; choose one of: given, hierarchical"


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_reports_its_progress(command, monkeypatch, method):
    heard = []
    compute = compare.dataset_distance

    def listening(*args, class_progress, **kwargs):
        def both(done, total):
            heard.append((done, total))
            class_progress(done, total)

        return compute(*args, class_progress=both, **kwargs)

    monkeypatch.setattr(compare, "dataset_distance", listening)
    assert command(f"labels={method}", "labels.epsilon=1", "lambda_x=1").code == 0
    assert heard[-1] == (45, 45)


def test_a_bar_lasts_from_the_first_report_to_the_last(monkeypatch):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(progress, "messages", terminal)
    with Phases() as phases, phases.counting("class distances") as report:
        bars = phases._bars
        assert not bars.tasks[0].visible
        report(7, 1200)
        assert bars.tasks[0].visible
        bars.refresh()
        report(1200, 1200)
        assert not bars.tasks[0].visible
    assert "class distances" in terminal.file.getvalue()
    assert "7 of 1,200" in terminal.file.getvalue()
