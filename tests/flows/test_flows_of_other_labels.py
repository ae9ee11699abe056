"""Flows of rows with several labels, and with numbers."""

from __future__ import annotations

import pytest
import torch

import otdd_flash as otdd
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.errors import InputError
from otdd_flash.flows.maps import in_classes_of
from otdd_flash.operators import comparison as comparisons
from otdd_flash.samples import LabeledSamples

DOUBLE = ComputeOptions("cpu", precision="double")
TIGHT = otdd.Converged(tolerance=1e-9)
SETTINGS = {"epsilon": 0.5, "solver": TIGHT, "compute": DOUBLE}


def tagged(n, seed, names="abc"):
    draw = torch.Generator().manual_seed(seed)
    indicator = torch.rand(n, len(names), generator=draw) < 0.4
    indicator[torch.arange(n), torch.arange(n) % len(names)] = True
    points = torch.randn(n, 2, generator=draw, dtype=torch.float64) + seed
    return LabeledSamples(points, indicator, tuple(names), name=f"tagged {seed}")


def numbered(n, seed):
    draw = torch.Generator().manual_seed(seed)
    points, targets = (torch.randn(n, k, generator=draw, dtype=torch.float64) for k in (2, 1))
    return LabeledSamples(points + seed, None, (), targets=targets, name=f"numbered {seed}")


@pytest.fixture(params=["sets", "columns"])
def way(request, monkeypatch):
    monkeypatch.setattr(comparisons, "MOST_SETS", 512 if request.param == "sets" else 0)
    return request.param


def moved(source, target, mode="features", steps=1, **settings):
    stepping = otdd.Stepping(step_size=0.01, optimizer="sgd")
    flow = otdd.Flow(mode=mode, steps=steps, stepping=stepping)
    return otdd.gradient_flow(source, target, flow, **SETTINGS, **settings)


def slope(source, target, row, **settings):
    """n dS / dx_row by central differences."""
    found = torch.zeros(2, dtype=torch.float64)
    for axis in range(2):
        for sign in (1, -1):
            points = source.features.clone()
            points[row, axis] += sign * 1e-4
            side = LabeledSamples(
                points,
                source.labels,
                source.class_names,
                label_sets=source.label_sets,
                targets=source.targets,
            )
            value = otdd.dataset_distance(side, target, **SETTINGS, **settings).value
            found[axis] += sign * value / 2e-4
    return len(source) * found


@pytest.mark.parametrize("table", [False, True])
def test_rows_with_several_labels_move_down_the_slope(way, table):
    source, target = tagged(20, 0), tagged(15, 1, "wxyz")
    settings = {"labels": "gaussian"}
    if table:
        # Not Euclidean: the middle of a star is nearer to its tips than in any space of points.
        given = torch.ones(7, 7, dtype=torch.float64) - torch.eye(7, dtype=torch.float64)
        given[0, 1:] = given[1:, 0] = 0.25
        settings = {"labels": otdd.labels.Given(otdd.ClassDistances.from_full(3 * given, 3))}
    found = moved(source, target, **settings)
    fixed = {
        "class_distances": otdd.dataset_distance(
            source, target, epsilon=1, **settings
        ).class_distances
    }
    for row in (0, 7):
        step = found.samples.features[row] - source.features[row]
        expected = -0.01 * slope(source, target, row, **fixed)
        torch.testing.assert_close(step, expected, atol=1e-7, rtol=1e-4)
    assert found.samples.label_sets is source.label_sets
    again = otdd.dataset_distance(found.samples, target, **SETTINGS, **settings)
    assert found.after.divergence == pytest.approx(again.value, abs=1e-7)


@pytest.mark.parametrize("labels", ["gaussian", "means"])
def test_classes_move_along_where_they_are_attached(labels):
    source, target = tagged(20, 0), tagged(15, 1, "wxyz")
    found = moved(source, target, "attached", labels=labels)
    for row in (0, 7):
        step = found.samples.features[row] - source.features[row]
        expected = -0.01 * slope(source, target, row, labels=labels)
        torch.testing.assert_close(step, expected, atol=1e-7, rtol=1e-4)


def test_rows_keep_their_numbers():
    source, target = numbered(20, 0), numbered(15, 1)
    found = moved(source, target, labels="continuous")
    for row in (0, 7):
        step = found.samples.features[row] - source.features[row]
        expected = -0.01 * slope(source, target, row, labels="continuous")
        torch.testing.assert_close(step, expected, atol=1e-7, rtol=1e-4)
    assert torch.equal(found.samples.targets, source.targets)


def test_minibatches_of_rows_with_other_labels(way):
    stepping = otdd.Stepping(step_size=0.5, minibatch=10)
    flow = otdd.Flow(steps=3, stepping=stepping)
    for source, target, labels in (
        (tagged(20, 0), tagged(15, 1), "gaussian"),
        (numbered(20, 0), numbered(15, 1), "continuous"),
    ):
        found = otdd.gradient_flow(source, target, flow, labels=labels, epsilon=0.5)
        assert found.after.divergence < found.before.divergence


@pytest.mark.parametrize("mode", ["joint", "augmented"])
def test_other_modes_refuse_them(mode):
    with pytest.raises(InputError, match=f"flow.mode={mode} moves a class with its particles"):
        moved(tagged(20, 0), tagged(15, 1), mode)
    with pytest.raises(InputError, match=f"flow.mode={mode} works with .* got labels=continuous"):
        moved(numbered(20, 0), numbered(15, 1), mode, labels="continuous")


def test_attached_classes_of_many_sets_are_refused(monkeypatch):
    monkeypatch.setattr(comparisons, "MOST_SETS", 0)
    said = "no gradient by classes .* or keep fewer labels with classes="
    with pytest.raises(InputError, match=said):
        moved(tagged(20, 0), tagged(15, 1), "attached")


@pytest.mark.parametrize("labelled", [True, False])
def test_new_points_get_the_sets_of_the_particles(labelled):
    particles = tagged(20, 0)
    # The same sets, found in another order.
    new = particles.take(torch.arange(19, -1, -1))
    if not labelled:
        new = LabeledSamples(new.features, None, ())
    found = in_classes_of(new, particles)
    assert found.label_sets is particles.label_sets
    expected = particles.label_sets.shares[particles.labels].flip(0)
    assert torch.equal(found.label_sets.shares[found.labels], expected)


def test_flows_are_read_back(tmp_path):
    for source, target, labels in (
        (tagged(20, 0), tagged(15, 1, "wxyz"), "gaussian"),
        (numbered(20, 0), numbered(15, 1), "continuous"),
    ):
        found = moved(source, target, steps=2, labels=labels)
        read = otdd.FlowResult.load(found.save(tmp_path / labels))
        assert read.samples.fingerprint == found.samples.fingerprint
        assert read.target.fingerprint == target.fingerprint
        assert read.settings["lambda_x"] == 0.5


def test_a_flow_resumes_at_its_scale(tmp_path):
    source, target = numbered(20, 0), numbered(15, 1)
    whole = moved(source, target, steps=4, labels="continuous")
    store = otdd.Checkpoints(tmp_path / "state", every=1)
    stepping = otdd.Stepping(step_size=0.01, optimizer="sgd")
    callbacks = otdd.Callbacks(stop=iter([False, False, True, True]).__next__)
    flow = otdd.Flow(steps=4, stepping=stepping, checkpoints=store)
    otdd.gradient_flow(source, target, flow, **SETTINGS, labels="continuous", callbacks=callbacks)
    flow = otdd.Flow(
        steps=4, stepping=stepping, checkpoints=otdd.Checkpoints(tmp_path / "state", resume=True)
    )
    again = otdd.gradient_flow(source, target, flow, **SETTINGS, labels="continuous")
    torch.testing.assert_close(again.samples.features, whole.samples.features)


def test_an_entropic_map_refuses_them():
    stepping = otdd.Stepping(step_size=0.01, optimizer="sgd")
    flow = otdd.Flow(steps=1, stepping=stepping, keep_moments=True)
    for source, target, labels in (
        (tagged(20, 0), tagged(15, 1), "gaussian"),
        (numbered(20, 0), numbered(15, 1), "continuous"),
    ):
        found = otdd.gradient_flow(source, target, flow, **SETTINGS, labels=labels)
        with pytest.raises(InputError, match="rows have numbers or several labels"):
            found.map("entropic")
