"""What a session shows of results: the answer in a line, not thousands of coordinates."""

from __future__ import annotations

import pytest
import torch

import otdd_flash as otdd
from otdd_flash.shown import interval


def _blobs() -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(30) % 3
    x = torch.randn(30, 2, generator=draw)
    source = otdd.LabeledSamples(x, labels, ("a", "b", "c"), name="photos")
    return source, otdd.LabeledSamples(x + 1, labels, ("a", "b", "c"), name="drawings")


def test_samples_show_name_and_sizes() -> None:
    source, _ = _blobs()
    assert repr(source) == "LabeledSamples('photos', 30 x 2, 3 classes)"
    unlabelled = otdd.LabeledSamples(source.features, None, ())
    assert repr(unlabelled) == "LabeledSamples('samples', 30 x 2, no labels)"


def test_a_distance_shows_value_bounds_and_datasets() -> None:
    source, target = _blobs()
    result = otdd.dataset_distance(source, target, epsilon=0.5)
    assert repr(result) == (
        f"DistanceResult({interval(result.value, *result.bounds)}, epsilon=0.5, converged, "
        f"{source!r} to {target!r}, class distances gaussian)"
    )
    lower, upper = map(float, repr(result).split("[")[1].split("]")[0].split(", "))
    assert lower <= result.bounds[0] < result.bounds[1] <= upper


def test_a_solve_that_stopped_early_says_so() -> None:
    costs = torch.rand(6, 5, generator=torch.Generator().manual_seed(0))
    found = otdd.matrix_transport(costs, epsilon=0.1)
    assert repr(found).endswith("epsilon=0.1, converged, 6 x 5)")
    options = otdd.Converged(tolerance=1e-4, max_iterations=1)
    with pytest.warns(otdd.NotConvergedWarning):
        early = otdd.matrix_transport(costs, epsilon=0.01, options=options)
    assert repr(early).endswith("epsilon=0.01, not converged, 6 x 5)")


def test_pairs_and_flows_show_one_line() -> None:
    source, target = _blobs()
    pairs = otdd.pairwise_distances([source, target], epsilon=0.5)
    assert repr(pairs) == "PairwiseResult(2 datasets: photos, drawings; epsilon=0.5, converged)"
    flow = otdd.gradient_flow(source, target, otdd.Flow(steps=2), epsilon=0.5)
    start = f"FlowResult({flow.before.divergence:.7g} to {flow.after.divergence:.7g}, mode=features"
    assert repr(flow).startswith(start + ", 2 steps")
    assert "tensor" not in repr(flow)
