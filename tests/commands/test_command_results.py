"""What a result says of class distances, of the sampling error, and of how the solver ended."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from otdd_flash import DistanceResult
from otdd_flash.labels.pair_cache import FILE

pytestmark = pytest.mark.usefixtures("undrawn")


def _never(*_, **__):
    raise AssertionError("measured again")


@pytest.mark.slow
def test_class_distances_are_measured_once_and_their_gap_is_said(command, read, monkeypatch):
    from otdd_flash.labels import METRICS

    settings = ("labels=sinkhorn", "labels.epsilon=1", "epsilon=1", "cache_dir=cache")
    settings = (*settings, "max_samples=20", "report=table")
    assert command(*settings, "hydra.run.dir=first").code == 0
    for kind in METRICS.values():
        monkeypatch.setattr(kind, "measure", _never)
        monkeypatch.setattr(kind, "in_parts", _never)
    assert command(*settings, "hydra.run.dir=second").complaints == []
    for name in ("class_distances.csv", "nearest_classes.csv"):
        assert Path("first", name).read_bytes() == Path("second", name).read_bytes()
    first, second = (read(f"{run}/result.json") for run in ("first", "second"))
    for key in ("value", "class_distance_gap"):
        assert first[key] == second[key]
    assert 0 < first["class_distance_gap"] < 1


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
def test_nearest_classes_are_printed_and_written_in_the_order_that_is_asked_for(
    command, rows, monkeypatch
):
    from otdd_flash.commands import compare

    assert "nearest classes" in command().out
    found = rows("run/nearest_classes.csv")
    assert [row["side"] for row in found] == ["source"] * 5 + ["target"] * 5
    # Both halves are drawn from the same five classes.
    assert all(row["class"] == row["nearest"] for row in found)
    assert "nearest classes" not in command("labels=none").out
    asked = []
    monkeypatch.setattr(compare, "write_report", lambda *_, order, **__: asked.append(order) or [])
    command("report.order=hierarchical")
    assert asked == ["hierarchical"]


@pytest.mark.slow
def test_what_is_left_of_classes_is_printed_and_written(command, read, rows):
    from otdd_flash.unmatched import UnmatchedClass

    ended = command("unbalanced_relative=0.3", "target.classes=[0,1]", "labels=means")
    assert ended.code == 0, ended.err
    assert "unmatched mass of classes" in ended.out
    found = rows("run/unmatched.csv")
    assert tuple(found[0]) == UnmatchedClass._fields
    assert [row["side"] for row in found] == ["source"] * 5 + ["target"] * 2
    assert Path("run/unmatched.png").stat().st_size > 1000
    result = read("run/result.json")
    assert result["unbalanced"] == pytest.approx([0.3 * result["mean_cost"]] * 2)
    assert result["terms"]["xy"]["mass"] < 1
    ended = command(
        "unbalanced=[1.0,null]", "debias=false", "report=none", "noise_floor=true", "subsample=39"
    )
    assert ended.code == 0, ended.err
    result = read("run/result.json")
    assert result["unbalanced"] == [1.0, None]
    assert result["subsample"]["lower"] <= result["subsample"]["upper"]


@pytest.mark.slow
def test_the_result_and_the_table_tell_of_the_sampling_error(command, read):
    more = ("subsample=39", "subsample_size=26", "noise_floor=true", "max_samples=52")
    # Of 39 solves each ends soon.
    quick = ("labels=means", "epsilon_relative=0.5", "solver.tolerance=0.1")
    ended = command(*more, *quick, "report=table")
    assert ended.code == 0, ended.err
    result = read("run/result.json")
    found, floor = result["subsample"], result["noise_floor"]
    assert found["lower"] < result["value"] < found["upper"]
    assert (found["count"], found["size"], len(found["values"])) == (39, [26, 26], 39)
    assert (found["level"], found["rate"], found["identical"]) == (0.95, pytest.approx(1), False)
    for key in ("source", "target", "between"):
        assert floor[key]["lower"] <= floor[key]["value"] <= floor[key]["upper"]
    assert list(result["seconds"])[-2:] == ["sampling", "other"]
    assert "sampling interval (95%)" in ended.out
    assert "39 subsamples of 26 × 26" in ended.out
    assert f"noise floor at {floor['size']} × {floor['size']}" in ended.out
    ended = command("subsample=39", "target.split=train")
    found = read("run/result.json")["subsample"]
    assert (found["lower"], found["upper"], found["identical"]) == (0.0, 0.0, True)
    assert "none drawn: both datasets are one" in ended.out


@pytest.mark.slow
def test_datasets_of_other_features_are_compared_by_their_inner_distances(command, folder, read):
    x, y = (np.load(folder / "a.npz")[key] for key in "xy")
    np.savez(folder / "wide.npz", x=np.hstack([x, 2 * x]), y=y)
    files = (f"source.path={folder / 'wide.npz'}", f"target.path={folder / 'b.npz'}")
    ended = command(
        *("ground=gromov", "lambda_y=0.1", "debias=false", "starts=2", "max_samples=null"),
        *("source=arrays", "target=arrays", "extractor=identity", *files),
    )
    assert ended.code == 0, ended.err
    found = read("run/result.json")
    assert (found["ground"], found["d"], found["target_d"]) == ("gromov", 8, 4)
    assert [start["name"] for start in found["gromov"]["starts"]] == ["axes", "classes"]
    assert found["bounds"][0] <= found["value"] <= found["bounds"][1]
    assert "their gap is not an error of the solver" in ended.out


@pytest.mark.slow
def test_parts_of_the_data_have_the_epsilon_and_the_settings_of_the_whole(command, monkeypatch):
    from otdd_flash.sampling import comparison

    asked, whole = [], comparison.dataset_distance

    def recorded(*sides, **settings):
        asked.append(settings)
        return whole(*sides, **settings)

    monkeypatch.setattr(comparison, "dataset_distance", recorded)
    more = ("epsilon_relative=0.1", "lambda_y=2", "labels.full=true", "report=none")
    goals = ("solver.bound_width=0.05", "solver.tolerance=2e-3")
    ended = command("noise_floor=true", *more, *goals)
    assert ended.code == 0, ended.err
    assert len(asked) == 3
    assert all(settings["lambda_y"] == 2 for settings in asked)
    assert len({settings["epsilon"] for settings in asked} - {0.1}) == 1
    assert all(settings["class_distances"] is not None for settings in asked)
    goals = {(each["solver"].tolerance, each["solver"].bound_width) for each in asked}
    assert goals == {(2e-3, None)}


@pytest.mark.slow
def test_how_the_solve_ended_is_told(command, read):
    ended = command("solver.bound_width=0.05", "save_result=true")
    assert ended.code == 0
    assert re.search(r"converged +│ yes, stopped by bound_width", ended.out)
    result = read("run/result.json")
    assert (result["converged"], result["stopped_by"]) == (True, "bound_width")
    lower, upper = result["bounds"]
    assert upper - lower <= 0.05 * abs(result["value"])
    assert (result["tolerance"], result["config"]["solver"]["tolerance"]) == (None, None)
    loaded = DistanceResult.load("run")
    assert (loaded.converged, loaded.divergence.stopped_by) == (True, "bound_width")

    ended = command("epsilon_relative=3e-6", "save_result=true")
    assert ended.code == 0
    assert re.search(r"converged +│ yes, stopped by rounding", ended.out)
    result = read("run/result.json")
    assert (result["converged"], result["stopped_by"]) == (True, "rounding")
    assert 1e-3 < result["marginal_error"] <= result["tolerance"]
    assert f"≤ {result['tolerance']:.2g}" in ended.out
    assert DistanceResult.load("run").divergence.tolerance == result["tolerance"]

    ended = command("solver.max_seconds=1e-9", "solver.tolerance=1e-4")
    assert ended.code == 0
    assert ended.err.startswith("warning: not converged within solver.max_seconds=1e-09 in ")
    assert "stopped by max_seconds; only solver bounds can be trusted" in ended.out
    result = read("run/result.json")
    assert (result["converged"], result["stopped_by"]) == (False, "max_seconds")
    assert result["bounds"][0] <= result["value"] <= result["bounds"][1]


@pytest.mark.slow
def test_geomlosses_value_is_told_from_the_converged_one(command, read):
    ended = command("solver=geomloss")
    assert ended.code == 0
    assert ended.err.startswith("warning: not converged by the schedule of geomloss in ")
    assert "stopped by schedule; the value is geomloss's, the" in ended.out
    result = read("run/result.json")
    assert (result["schedule"], result["stopped_by"]) == ("geomloss", "schedule")
    assert command("hydra.run.dir=other", "report=none").code == 0
    converged = read("other/result.json")
    assert result["bounds"][0] <= converged["bounds"][1]
    assert converged["bounds"][0] <= result["bounds"][1]
    assert result["value"] != pytest.approx(converged["value"], rel=1e-6)
