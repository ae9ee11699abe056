"""Flows descend the divergence of the ground cost that they are given."""

import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import InputError


def sides(count=16, dim=3):
    draw = torch.Generator().manual_seed(5)
    labels = torch.arange(count) % 2
    x = torch.randn(count, dim, generator=draw) + 1 + labels[:, None]
    y = 2 * torch.randn(count, dim, generator=draw) - labels[:, None]
    return (otdd.LabeledSamples(x, labels, ("a", "b")), otdd.LabeledSamples(y, labels, ("c", "d")))


def flow(ground, *, labels="none", lambda_x=0.5, step_size=1.0, epsilon=0.5):
    return otdd.gradient_flow(
        *sides(),
        otdd.Flow(steps=1, stepping=otdd.Stepping(step_size=step_size)),
        epsilon=epsilon,
        labels=labels,
        cost=otdd.GroundCost(lambda_x, 0.5, ground),
        solver=otdd.Converged(tolerance=1e-6),
        compute=otdd.ComputeOptions(precision="double"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["none", "gaussian"])
def test_a_flow_of_cosines_turns_particles_towards_the_target(labels):
    moved = flow("cosine", labels=labels)
    asked = {"epsilon": 0.5, "labels": labels, "ground": "cosine"}
    before = otdd.dataset_distance(*sides(), **asked)
    assert moved.before.divergence == pytest.approx(before.value, rel=1e-3)
    assert moved.after.divergence < moved.before.divergence
    after = otdd.dataset_distance(moved.samples, sides()[1], **asked)
    assert moved.after.divergence == pytest.approx(after.value, rel=1e-3)
    # A step changes no length to first order.
    source = sides()[0].features.double()
    step = flow("cosine", step_size=1e-3).samples.features.double() - source
    along = (step * source).sum(1).abs() / (step.norm(dim=1) * source.norm(dim=1))
    assert float(step.norm(dim=1).max()) > 0
    assert float(along.max()) < 1e-2


@pytest.mark.slow
def test_inner_products_flow_as_half_squared_distances():
    inner, squared = (
        flow(ground, lambda_x=lambda_x, epsilon=5.0)
        for ground, lambda_x in (("inner", 0.5), ("sqeuclidean", 0.25))
    )
    assert torch.equal(inner.samples.features, squared.samples.features)
    assert inner.after.divergence == squared.after.divergence
    with pytest.raises(InputError, match=r"labels=gaussian .* ground=inner"):
        flow("inner", labels="gaussian")
