"""Numbers in place of classes, against columns of features that are appended by hand."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.datasets
import torch

import otdd_flash as otdd
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples

DOUBLE = ComputeOptions("cpu", precision="double")
TIGHT = otdd.Converged(tolerance=1e-9)
FEATURES, PROGRESS = sklearn.datasets.load_diabetes(return_X_y=True)
DRAW = np.random.default_rng(0).permutation(len(FEATURES))
ONE, OTHER = DRAW[:60], DRAW[60:110]


def diabetes(rows, weights=None):
    """Patients with how far their disease went, in whole numbers."""
    x = 10 * torch.from_numpy(FEATURES[rows])
    return LabeledSamples.from_arrays(x, PROGRESS[rows], weights, name="diabetes")


def by_hand(rows, scale, ratio=1.0, weights=None):
    columns = torch.from_numpy(PROGRESS[rows])[:, None] / scale * ratio**0.5
    x = torch.cat((10 * torch.from_numpy(FEATURES[rows]), columns), 1)
    return LabeledSamples(x, None, (), weights)


def pooled(*rows):
    return float(PROGRESS[np.concatenate(rows)].std())


@pytest.mark.parametrize("epsilon", [0.3, 0])
@pytest.mark.parametrize("debias", [True, False])
def test_numbers_are_columns_of_features(epsilon, debias):
    settings = {"epsilon": epsilon, "debias": debias, "compute": DOUBLE}
    settings |= {"solver": TIGHT} if epsilon else {}
    weights = torch.rand(60, generator=torch.Generator().manual_seed(0)) + 0.1
    found = otdd.dataset_distance(
        diabetes(ONE, weights), diabetes(OTHER), labels="continuous", **settings
    )
    share = 60 * weights.double() / weights.double().sum()
    masses = np.concatenate([share.numpy(), np.ones(50)]) / 110
    rows = PROGRESS[np.concatenate((ONE, OTHER))]
    scale = float(np.sqrt(masses @ (rows - masses @ rows) ** 2))
    hand = by_hand(ONE, scale, weights=weights), by_hand(OTHER, scale)
    expected = otdd.dataset_distance(*hand, labels="none", **settings)
    assert found.value == pytest.approx(expected.value, abs=1e-9)
    assert found.bounds[0] <= expected.bounds[1]
    assert expected.bounds[0] <= found.bounds[1]
    assert found.cost.target_scale == pytest.approx((scale,))
    assert found.mean_cost == pytest.approx(expected.mean_cost)
    assert found.method == "continuous"


@pytest.mark.parametrize("lambdas", [(0.0, 0.5), (0.5, 0.0), (2.0, 0.5)])
def test_weights_of_numbers(lambdas):
    lambda_x, lambda_y = lambdas
    settings = {"epsilon": 0.3, "compute": DOUBLE, "solver": TIGHT}
    found = otdd.dataset_distance(
        diabetes(ONE),
        diabetes(OTHER),
        labels=otdd.labels.Continuous((70.0,)),
        lambda_x=lambda_x,
        lambda_y=lambda_y,
        **settings,
    )
    sides = [by_hand(rows, 70.0, lambda_y / lambda_x if lambda_x else 1) for rows in (ONE, OTHER)]
    if lambda_x == 0:
        sides = [LabeledSamples(side.features[:, -1:], None, ()) for side in sides]
    expected = otdd.dataset_distance(
        *sides, labels="none", lambda_x=lambda_x or lambda_y, **settings
    )
    assert found.value == pytest.approx(expected.value, abs=1e-9)


def test_several_columns_and_cosines():
    draw = torch.Generator().manual_seed(0)
    x, t = (torch.randn(30, k, generator=draw) for k in (3, 2))
    y, s = (torch.randn(20, k, generator=draw) for k in (3, 2))
    found = otdd.dataset_distance(
        LabeledSamples(x, None, (), targets=t),
        LabeledSamples.from_arrays(y, s),
        labels=otdd.labels.Continuous(None),
        ground="cosine",
        epsilon=0.3,
        compute=DOUBLE,
        solver=TIGHT,
    )
    # 1 - <x, y> is half of a squared distance of directions.
    sides = [
        torch.cat((p.double() / p.double().norm(dim=1, keepdim=True) / 2**0.5, q.double()), 1)
        for p, q in ((x, t), (y, s))
    ]
    expected = otdd.dataset_distance(
        *sides, labels="none", epsilon=0.3, compute=DOUBLE, solver=TIGHT
    )
    assert found.value == pytest.approx(expected.value, abs=1e-9)


def test_all_datasets_of_a_matrix_have_one_scale():
    parts = [DRAW[:40], DRAW[40:80], DRAW[80:130]]
    found = otdd.pairwise_distances(
        [diabetes(rows) for rows in parts],
        labels="continuous",
        epsilon=0.3,
        compute=DOUBLE,
        solver=TIGHT,
    )
    scale = pooled(*parts)
    expected = otdd.pairwise_distances(
        [by_hand(rows, scale) for rows in parts],
        labels="none",
        epsilon=0.3,
        compute=DOUBLE,
        solver=TIGHT,
    )
    torch.testing.assert_close(found.values, expected.values, atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("source", "labels", "message"),
    [
        (
            (np.eye(3), ["a", "b", "a"]),
            "continuous",
            "source has classes that are none, such as 'b'",
        ),
        ((np.eye(3), [{1}, {1, 2}, {2}]), "continuous", "source has several labels a row"),
        (np.eye(3), "continuous", "source has no labels; give one number"),
        ((np.eye(3), [2.5, 2.5, 2.5]), "continuous", "column 0 of the targets is constant"),
        (
            (np.eye(3), np.eye(3)[:, :2] + 0.3),
            "continuous",
            "have 1 and 2 columns, and are",
        ),
        ((np.eye(3), [2.5, 3.5, 2.5]), "gaussian", "has numbers and no classes; labels=continuous"),
        (
            (np.eye(3), [2.5, 3.5, 2.5]),
            otdd.labels.Continuous((1, 2)),
            "has 2 numbers for 1 columns",
        ),
    ],
)
def test_what_numbers_cannot_be_is_said(source, labels, message):
    constant = labels == "continuous" and "constant" in message
    target = (np.eye(3)[:2], [2.5, 2.5] if constant else [1.5, 2.5])
    with pytest.raises(InputError, match=message):
        otdd.dataset_distance(source, target, labels=labels)


def test_numbers_need_squared_distances():
    with pytest.raises(InputError, match="labels=continuous measures squared distances"):
        otdd.dataset_distance(diabetes(ONE), diabetes(OTHER), labels="continuous", ground="inner")


@pytest.mark.parametrize("scale", ["wide", (0.0,), (), 0, True, (1.0, float("nan"))])
def test_a_scale_is_checked(scale):
    with pytest.raises(InputError, match="scale must be pooled, null, or a positive number"):
        otdd.labels.Continuous(scale)


def test_a_result_with_numbers_is_read_back(tmp_path):
    found = otdd.dataset_distance(diabetes(ONE), diabetes(OTHER), labels="continuous", epsilon=0.3)
    read = otdd.DistanceResult.load(found.save(tmp_path / "run"))
    assert read.cost == found.cost
    assert read.source.fingerprint == found.source.fingerprint
    assert torch.equal(read.apply_plan(torch.arange(50.0)), found.apply_plan(torch.arange(50.0)))
    assert torch.equal(read.barycentric_map(), found.barycentric_map())
    assert found.barycentric_map().shape == (60, 10)


def test_contributions_of_rows_with_numbers():
    found = otdd.dataset_distance(
        diabetes(ONE),
        diabetes(OTHER),
        labels="continuous",
        epsilon=0.3,
        compute=DOUBLE,
        solver=TIGHT,
    )
    scale = found.cost.target_scale[0]
    expected = otdd.dataset_distance(
        by_hand(ONE, scale),
        by_hand(OTHER, scale),
        labels="none",
        epsilon=0.3,
        compute=DOUBLE,
        solver=TIGHT,
    )
    torch.testing.assert_close(
        found.contributions().values, expected.contributions().values, atol=1e-6, rtol=0
    )


def test_relaxed_marginals_of_numbers():
    settings = {"epsilon": 0.3, "unbalanced": 0.5, "compute": DOUBLE, "solver": TIGHT}
    sides = diabetes(ONE), diabetes(OTHER)
    found = otdd.dataset_distance(*sides, labels="continuous", **settings)
    scale = found.cost.target_scale[0]
    hand = by_hand(ONE, scale), by_hand(OTHER, scale)
    expected = otdd.dataset_distance(*hand, labels="none", **settings)
    assert found.value == pytest.approx(expected.value, abs=1e-8)
    assert found.unmatched().moved == pytest.approx(expected.unmatched().moved, abs=1e-6)


def test_numbers_have_no_distances_between_classes():
    with pytest.raises(InputError, match="labels=continuous compares the numbers of rows and has"):
        otdd.class_distances([diabetes(ONE), diabetes(OTHER)], "continuous")


def test_numbers_take_no_table():
    sides = diabetes(ONE), diabetes(OTHER)
    two = otdd.ClassDistances.from_full(torch.zeros(2, 2), 1)
    all_of_them = otdd.class_distances([(np.eye(4), [0, 0, 1, 1])] * 2)
    message = "compares numbers and takes no class_distances=; leave"
    with pytest.raises(InputError, match=message):
        otdd.dataset_distance(*sides, labels="continuous", class_distances=two)
    with pytest.raises(InputError, match=message):
        otdd.pairwise_distances(sides, labels="continuous", class_distances=all_of_them)


def test_numbers_far_from_0_lose_no_digits():
    """Times of day, in seconds since 1970, are those since midnight."""
    x, y = torch.from_numpy(10 * FEATURES[ONE]), torch.from_numpy(10 * FEATURES[OTHER])
    days = [torch.from_numpy(PROGRESS[rows]).double() * 100 for rows in (ONE, OTHER)]
    settings = {"labels": "continuous", "epsilon": 0.3, "compute": DOUBLE, "solver": TIGHT}
    values = [
        otdd.dataset_distance(
            *(
                LabeledSamples(p, None, (), targets=t + start)
                for p, t in zip((x, y), days, strict=True)
            ),
            **settings,
        )
        for start in (0.0, 1.7e9)
    ]
    assert values[1].value == pytest.approx(values[0].value, abs=1e-9)
    assert values[1].comparison.cost_error < 1e-10


@pytest.mark.parametrize("unit", [1e200, 1e-200])
def test_numbers_of_any_size(unit):
    targets = [torch.from_numpy(PROGRESS[rows]).double() for rows in (ONE, OTHER)]
    found = [
        otdd.dataset_distance(
            *(LabeledSamples(torch.ones(len(t), 1), None, (), targets=t * factor) for t in targets),
            labels="continuous",
            epsilon=0.3,
            lambda_x=0.0,
            compute=DOUBLE,
        ).value
        for factor in (1.0, unit)
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-9)


def test_one_number_is_the_scale_of_one_column():
    assert otdd.labels.Continuous(50) == otdd.labels.Continuous((50.0,))
