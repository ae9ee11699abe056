"""Flows of rows with several labels, and with numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_flows import DOUBLE, TIGHT, flow

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.flows.maps import in_classes_of
from otdd_flash.flows.residual_map import ResidualMap
from otdd_flash.operators import comparison as comparisons
from otdd_flash.samples import LabeledSamples

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


# A source, a target, and the method that compares their labels.
KINDS = (
    (tagged(20, 0), tagged(15, 1, "wxyz"), "gaussian"),
    (numbered(20, 0), numbered(15, 1), "continuous"),
)


@pytest.fixture(params=["sets", "columns"])
def way(request, monkeypatch):
    monkeypatch.setattr(comparisons, "MOST_SETS", 512 if request.param == "sets" else 0)
    return request.param


def moved(source, target, **options):
    return flow(
        source, target, **{"steps": 1, "epsilon": 0.5, "stepping": otdd.Stepping(0.01)} | options
    )


def assert_moved_down_the_slope(found, source, target, **settings):
    """Rows of a flow of one step, by n dS / dx_row in central differences."""
    for row in (0, 7):
        slope = torch.zeros(2, dtype=torch.float64)
        for axis in range(2):
            for sign in (1, -1):
                points = source.features.clone()
                points[row, axis] += sign * 1e-4
                side = replace(source, features=points)
                value = otdd.dataset_distance(side, target, **SETTINGS, **settings).value
                slope[axis] += len(source) * sign * value / 2e-4
        step = found.samples.features[row] - source.features[row]
        torch.testing.assert_close(step, -0.01 * slope, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("table", [False, True])
def test_rows_with_several_labels_move_down_the_slope(way, table):
    source, target, labels = KINDS[0]
    if table:
        # Not Euclidean: the middle of a star is nearer to its tips than in any space of points.
        given = torch.ones(7, 7, dtype=torch.float64) - torch.eye(7, dtype=torch.float64)
        given[0, 1:] = given[1:, 0] = 0.25
        labels = otdd.labels.Given(otdd.ClassDistances.from_full(3 * given, 3))
    found = moved(source, target, labels=labels)
    measured = otdd.dataset_distance(source, target, epsilon=1, labels=labels).class_distances
    assert_moved_down_the_slope(found, source, target, class_distances=measured)
    assert found.samples.label_sets is source.label_sets
    again = otdd.dataset_distance(found.samples, target, labels=labels, **SETTINGS)
    assert found.after.divergence == pytest.approx(again.value, abs=1e-7)


@pytest.mark.parametrize("labels", ["gaussian", "means"])
def test_classes_move_along_where_they_are_attached(labels):
    source, target, _ = KINDS[0]
    found = moved(source, target, mode="attached", labels=labels)
    assert_moved_down_the_slope(found, source, target, labels=labels)


def test_rows_keep_their_numbers():
    source, target, labels = KINDS[1]
    found = moved(source, target, labels=labels)
    assert_moved_down_the_slope(found, source, target, labels=labels)
    assert torch.equal(found.samples.targets, source.targets)


@pytest.mark.parametrize(("source", "target", "labels"), KINDS)
def test_minibatches_of_rows_with_other_labels(way, source, target, labels):
    usual = {"solver": otdd.Converged(), "compute": otdd.ComputeOptions("cpu")}
    stepping = otdd.Stepping(0.5, minibatch=10)
    found = moved(source, target, steps=3, stepping=stepping, labels=labels, **usual)
    assert found.after.divergence < found.before.divergence


@pytest.mark.parametrize("mode", ["joint", "augmented"])
def test_other_modes_refuse_them(mode):
    with pytest.raises(InputError, match=f"flow.mode={mode} moves a class with its particles"):
        moved(tagged(20, 0), tagged(15, 1), mode=mode)
    with pytest.raises(InputError, match=f"flow.mode={mode} works with .* got labels=continuous"):
        moved(*KINDS[1][:2], mode=mode, labels="continuous")


def test_attached_classes_of_many_sets_are_refused(monkeypatch):
    monkeypatch.setattr(comparisons, "MOST_SETS", 0)
    said = "no gradient by classes .* or keep fewer labels with classes="
    with pytest.raises(InputError, match=said):
        moved(tagged(20, 0), tagged(15, 1), mode="attached")


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


@pytest.mark.parametrize(("source", "target", "labels"), KINDS)
def test_flows_are_read_back_and_have_no_entropic_map(source, target, labels, tmp_path):
    found = moved(source, target, steps=2, labels=labels, keep_moments=True)
    read = otdd.FlowResult.load(found.save(tmp_path))
    assert read.samples.fingerprint == found.samples.fingerprint
    assert read.target.fingerprint == target.fingerprint
    assert read.settings["lambda_x"] == 0.5
    with pytest.raises(InputError, match="rows have numbers or several labels"):
        read.map("entropic")


def test_a_flow_resumes_at_its_scale(tmp_path):
    source, target, labels = KINDS[1]
    whole = moved(source, target, steps=4, labels=labels)
    stop = iter([False, False, True, True]).__next__
    kept = otdd.Checkpoints(tmp_path)
    moved(source, target, steps=4, labels=labels, checkpoints=kept, stop=stop)
    again = otdd.Checkpoints(tmp_path, resume=True)
    found = moved(source, target, steps=4, labels=labels, checkpoints=again)
    torch.testing.assert_close(found.samples.features, whole.samples.features)


@pytest.mark.parametrize("kind", ["nearest", "residual", "loaded"])
def test_maps_match_sets_whatever_the_order_of_labels(kind, tmp_path):
    names = ("a", "b", "c++")
    source = tagged(20, 0, names)
    assert {r"a+b", r"c\+\+"} <= {*source.class_names}
    found = moved(source, tagged(15, 1))
    if kind == "nearest":
        flow_map = found.map(kind)
    else:
        flow_map = found.map("residual", epochs=1, hidden=4, device="cpu")
    if kind == "loaded":
        path = flow_map.save(tmp_path / "map.safetensors")
        flow_map = ResidualMap.load(path, device="cpu")
    turned = LabeledSamples(
        source.features, (source.shares > 0)[:, [2, 0, 1]], ("c++", "a", "b"), name="turned"
    )
    assert torch.equal(flow_map(turned).features, flow_map(source).features)
    # A class of samples with one label each is a set of its own, whatever its name.
    points, first = source.features[:3], torch.zeros(3)
    one = LabeledSamples(points, torch.tensor([[0, 0, 1]] * 3), names)
    alone = LabeledSamples(points, first, ("c++",))
    assert torch.equal(flow_map(alone).features, flow_map(one).features)
    with pytest.raises(InputError, match=r"has classes that the flow did not move: a\\\+b"):
        flow_map(replace(alone, class_names=("a+b",)))
