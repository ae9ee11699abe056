"""Defects of the original OTDD code in the distance itself, each named after what goes wrong.

Those of its class distances are in labels/, those of its data handling in data/.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch

from otdd_flash.errors import InputError, NotConvergedWarning
from otdd_flash.labels import Gaussian, Sinkhorn
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.otdd import dataset_distance
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.schedules.converged import Converged


def dataset(size, seed, *, classes=3, shift=0.0):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(size) % classes)
    features = rng.normal(size=(size, 4)) + 2 * labels[:, None] + shift
    return LabeledSamples.from_arrays(features.astype(np.float32), labels)


@pytest.fixture
def pair():
    return dataset(30, 0), dataset(25, 1, classes=4, shift=0.5)


def dense_plan(result):
    cost = reference.dense_cost(
        result.source.features,
        result.target.features,
        0.5,
        0.5 * result.class_distances.xy,
        result.source.labels,
        result.target.labels,
    )
    # Those that the plan is of; `potentials` are balanced for the masses of the result.
    f, g = result.divergence.xy.f, result.divergence.xy.g
    return reference.plan(cost, result.source.masses, result.target.masses, f, g, result.epsilon)


def test_the_solver_stops_far_from_convergence_and_says_nothing(pair):
    with pytest.warns(NotConvergedWarning, match="not converged after 3 iterations"):
        stopped = dataset_distance(*pair, epsilon=0.05, solver=Converged(max_iterations=3))
    assert not stopped.converged
    solved = dataset_distance(*pair, epsilon=0.05)
    plan = dense_plan(solved)
    # The reported error is that of the plan, recomputed here in float64.
    errors = [(plan.sum(1) - solved.source.masses), (plan.sum(0) - solved.target.masses)]
    assert solved.converged
    assert max(float(error.abs().sum()) for error in errors) <= 1e-3


def test_label_indices_leak_into_the_epsilon_schedule(pair):
    """Classes numbered from 1,000 are the same classes; the iterations are the same too."""
    far = [
        LabeledSamples.from_arrays(side.features, 1000 - 7 * side.labels.numpy()) for side in pair
    ]
    near, distant = (dataset_distance(*sides, epsilon=0.5) for sides in (pair, far))
    assert distant.value == pytest.approx(near.value, rel=1e-5)
    assert distant.divergence.xy.iterations == near.divergence.xy.iterations
    assert distant.class_names[0] == ("986", "993", "1000")


def test_without_debiasing_a_half_step_reads_the_class_table_where_it_needs_its_transpose(pair):
    """The source has 3 classes and the target 4, in an asymmetric table; both orders agree."""
    forth, back = (
        dataset_distance(*sides, epsilon=0.5, debias=False, solver=Converged(1e-4))
        for sides in (pair, reversed(pair))
    )
    assert forth.value == pytest.approx(back.value, rel=1e-3)
    torch.testing.assert_close(forth.class_coupling(), back.class_coupling().T, rtol=0, atol=1e-4)
    assert float((dense_plan(forth).sum(0) - forth.target.masses).abs().sum()) <= 1e-4


@pytest.mark.parametrize("debias", [True, False])
def test_the_coupling_lacks_the_masses_or_comes_from_debiased_potentials(pair, debias):
    result = dataset_distance(*pair, epsilon=0.5, debias=debias)
    ones = result.apply_plan(torch.ones(len(result.target)))
    torch.testing.assert_close(ones.double(), result.source.masses, rtol=0, atol=1e-5)
    assert float(result.class_coupling().sum()) == pytest.approx(1, abs=1e-12)
    # Row masses alone would fit the product plan as well; the transported cost tells them apart.
    torch.testing.assert_close(
        result.apply_plan(result.target.features).double(),
        dense_plan(result) @ result.target.features.double(),
        rtol=0,
        atol=1e-4,
    )


def test_a_dataset_differs_from_itself(pair):
    for method in (Gaussian(), Sinkhorn(epsilon=0.5)):
        result = dataset_distance(pair[0], pair[0], labels=method, epsilon=0.5)
        assert (result.value, result.bounds) == (0.0, (0.0, 0.0))


def test_missing_or_rare_class_ids_crash_or_shift():
    """Labels 3 and 9 only, and one name without samples between two with samples."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(8, 2)).astype(np.float32)
    labels = np.array([3, 9] * 4)
    features[labels == 9] += 10
    gaps = LabeledSamples.from_arrays(features, labels)
    names = LabeledSamples(features, torch.from_numpy(np.where(labels == 9, 2, 0)), ("3", "6", "9"))
    result = dataset_distance(gaps, names, epsilon=0.5)
    assert result.class_names == (("3", "9"), ("3", "9"))
    expected = 0.5 * torch.eye(2, dtype=torch.float64)
    torch.testing.assert_close(result.class_coupling(), expected, rtol=0, atol=1e-3)


def test_the_order_p_is_ignored():
    """The cost is squared at both levels; there is no order to set, and doubling says so."""
    one, two = (
        dataset_distance(
            LabeledSamples(torch.zeros(2, 1), torch.tensor([0, 1]), ("a", "b")),
            LabeledSamples(torch.full((2, 1), distance), torch.tensor([0, 1]), ("a", "b")),
            labels="means",
        )
        for distance in (1.0, 2.0)
    )
    # 1/2 ||x - y||^2 + 1/2 W, and both are the squared distance.
    assert one.value == pytest.approx(1, rel=1e-5)
    assert two.value == pytest.approx(4, rel=1e-5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'p'"):
        dataset_distance(one.source, one.target, p=1)


def test_large_inputs_move_silently_to_the_cpu(pair, monkeypatch):
    """The device asked for is the one used, or an error; the result names it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="cuda"):
        dataset_distance(*pair, compute=ComputeOptions(device="cuda"))
    result = dataset_distance(*pair, compute=ComputeOptions(device="cpu", memory_budget=1))
    assert result.to_dict()["device"] == "cpu"
    assert result.to_dict()["backend"] == "torch, scores streamed"


@pytest.mark.parametrize("debias", [True, False])
def test_comparing_a_dataset_with_itself_raises(pair, debias):
    result = dataset_distance(pair[0], pair[0], epsilon=0.5, debias=debias)
    assert result.converged
    coupling = result.class_coupling()
    torch.testing.assert_close(coupling, coupling.T, rtol=0, atol=1e-3)
    assert float(coupling.diagonal().sum()) > 0.9


def test_unlabelled_data_need_their_true_labels(pair):
    """Without labels the error says how to label; features alone can be compared."""
    bare = LabeledSamples(pair[0].features, None, ())
    with pytest.raises(InputError, match=r"pseudo_labels=kmeans.*labels=none"):
        dataset_distance(bare, pair[1])
    plain = dataset_distance(*pair, labels="none", epsilon=0.5)
    assert dataset_distance(bare, pair[1], labels="none", epsilon=0.5).value == plain.value
