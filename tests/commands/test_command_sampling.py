"""Sampling error from the command line."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("undrawn")

# Of 39 solves each ends soon.
QUICK = ("labels=means", "epsilon_relative=0.5", "solver.tolerance=0.1")


@pytest.mark.slow
def test_the_result_and_the_table_tell_of_the_sampling_error(command, read):
    more = ("subsample=39", "subsample_size=26", "noise_floor=true", "max_samples=52")
    ended = command(*more, *QUICK, "report=table")
    assert ended.code == 0, ended.err
    result = read("run/result.json")
    found, floor = result["subsample"], result["noise_floor"]
    assert found["lower"] < result["value"] < found["upper"]
    assert (found["count"], found["size"], len(found["values"])) == (39, [26, 26], 39)
    assert (found["level"], found["rate"], found["identical"]) == (0.95, pytest.approx(1), False)
    for key in ("source", "target", "between"):
        assert floor[key]["lower"] <= floor[key]["value"] <= floor[key]["upper"]
    assert result["seconds"]["sampling"] > 0
    assert list(result["seconds"])[-2:] == ["sampling", "other"]
    assert result["config"]["subsample"] == 39
    assert "sampling interval (95%)" in ended.out
    assert "39 subsamples of 26 × 26" in ended.out
    assert f"noise floor at {floor['size']} × {floor['size']}" in ended.out


@pytest.mark.slow
def test_a_dataset_and_itself(command, read):
    ended = command("subsample=39", "target.split=train")
    assert ended.code == 0, ended.err
    found = read("run/result.json")["subsample"]
    assert (found["lower"], found["upper"], found["identical"]) == (0.0, 0.0, True)
    assert "none drawn: both datasets are one" in ended.out


@pytest.mark.slow
def test_subsamples_have_the_epsilon_and_the_settings_of_the_whole(command, monkeypatch):
    from otdd_flash.sampling import comparison

    asked, whole = [], comparison.dataset_distance

    def recorded(*sides, **settings):
        asked.append(settings)
        return whole(*sides, **settings)

    monkeypatch.setattr(comparison, "dataset_distance", recorded)
    more = ("epsilon_relative=0.1", "lambda_y=2", "labels.full=true", "report=none")
    ended = command("noise_floor=true", *more)
    assert ended.code == 0, ended.err
    assert len(asked) == 3
    assert all(settings["lambda_y"] == 2 for settings in asked)
    assert len({settings["epsilon"] for settings in asked} - {0.1}) == 1
    assert all(settings["class_distances"] is not None for settings in asked)


@pytest.mark.slow
def test_unlabelled_data(command, read, folder):
    for name in "pq":
        points = np.random.default_rng(ord(name)).normal(size=(40, 3))
        np.savez(folder / f"{name}.npz", x=points.astype(np.float32))
    ended = command(
        *("source=arrays", "source.path=p.npz", "target=arrays", "target.path=q.npz"),
        *("extractor=identity", "labels=none", "labels.full=true", "report=none"),
        *("source.max_samples=30", "subsample=39", "noise_floor=true", *QUICK[1:]),
    )
    assert ended.code == 0, ended.err
    result = read("run/result.json")
    assert result["subsample"]["size"] == [8, 10]
    assert result["noise_floor"]["size"] == 15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["subsample=38"], "at least 39 subsamples"),
        (["subsample_size=10"], "needs subsample=K"),
        (["subsample=39", "subsample_size=40"], "fewer than its 40"),
        (["noise_floor=true", "max_samples=10"], "min_class_size=4"),
    ],
)
def test_bad_requests_end_before_the_solve(command, monkeypatch, arguments, message):
    monkeypatch.setattr("otdd_flash.commands.compare.dataset_distance", None)
    ended = command(*arguments)
    assert ended.code == 2
    assert message in ended.error
