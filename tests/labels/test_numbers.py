"""Numbers in place of classes, against columns of features that are appended by hand."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.datasets
import torch

import otdd_flash as otdd
import otdd_flash.result as result_module
from otdd_flash import unmatched
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


def distance(source, target, **settings):
    """In float64, solved to nine digits of the marginals."""
    settings = {"epsilon": 0.3, "compute": DOUBLE, "solver": TIGHT} | settings
    return otdd.dataset_distance(source, target, **settings)


def with_twin(**settings):
    """The distance by numbers, and by columns of features with the scale that it reports."""
    found = distance(diabetes(ONE), diabetes(OTHER), labels="continuous", **settings)
    (scale,) = found.target_scale
    return found, distance(by_hand(ONE, scale), by_hand(OTHER, scale), labels="none", **settings)


@pytest.mark.parametrize("epsilon", [0.3, 0])
@pytest.mark.parametrize("debias", [True, False])
def test_numbers_are_columns_of_features(epsilon, debias):
    settings = {"epsilon": epsilon, "debias": debias, "solver": TIGHT if epsilon else None}
    weights = torch.rand(60, generator=torch.Generator().manual_seed(0)) + 0.1
    found = distance(diabetes(ONE, weights), diabetes(OTHER), labels="continuous", **settings)
    share = 60 * weights.double() / weights.double().sum()
    masses = np.concatenate([share.numpy(), np.ones(50)]) / 110
    rows = PROGRESS[np.concatenate((ONE, OTHER))]
    scale = float(np.sqrt(masses @ (rows - masses @ rows) ** 2))
    hand = by_hand(ONE, scale, weights=weights), by_hand(OTHER, scale)
    expected = distance(*hand, labels="none", **settings)
    assert found.value == pytest.approx(expected.value, abs=1e-9)
    assert found.bounds[0] <= expected.bounds[1]
    assert expected.bounds[0] <= found.bounds[1]
    assert found.target_scale == pytest.approx((scale,))
    assert found.mean_cost == pytest.approx(expected.mean_cost)
    assert found.method == "continuous"


@pytest.mark.parametrize("lambdas", [(0.0, 0.5), (0.5, 0.0), (2.0, 0.5)])
def test_weights_of_numbers(lambdas):
    lambda_x, lambda_y = lambdas
    labels, weights = otdd.labels.Continuous((70.0,)), {"lambda_x": lambda_x, "lambda_y": lambda_y}
    found = distance(diabetes(ONE), diabetes(OTHER), labels=labels, **weights)
    sides = [by_hand(rows, 70.0, lambda_y / lambda_x if lambda_x else 1) for rows in (ONE, OTHER)]
    if lambda_x == 0:
        sides = [LabeledSamples(side.features[:, -1:], None, ()) for side in sides]
    expected = distance(*sides, labels="none", lambda_x=lambda_x or lambda_y)
    assert found.value == pytest.approx(expected.value, abs=1e-9)


def test_several_columns_and_cosines():
    draw = torch.Generator().manual_seed(0)
    x, t = (torch.randn(30, k, generator=draw) for k in (3, 2))
    y, s = (torch.randn(20, k, generator=draw) for k in (3, 2))
    given = LabeledSamples(x, None, (), targets=t), LabeledSamples.from_arrays(y, s)
    found = distance(*given, labels=otdd.labels.Continuous(None), ground="cosine")
    # 1 - <x, y> is half of a squared distance of directions.
    sides = [
        torch.cat((p.double() / p.double().norm(dim=1, keepdim=True) / 2**0.5, q.double()), 1)
        for p, q in ((x, t), (y, s))
    ]
    expected = distance(*sides, labels="none")
    assert found.value == pytest.approx(expected.value, abs=1e-9)


def test_all_datasets_of_a_matrix_have_one_scale():
    parts = [DRAW[:40], DRAW[40:80], DRAW[80:130]]
    scale = float(PROGRESS[np.concatenate(parts)].std())
    found, expected = (
        otdd.pairwise_distances(sides, labels=labels, epsilon=0.3, compute=DOUBLE, solver=TIGHT)
        for sides, labels in (
            ([diabetes(rows) for rows in parts], "continuous"),
            ([by_hand(rows, scale) for rows in parts], "none"),
        )
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


@pytest.mark.parametrize(
    "scale",
    ["wide", (0.0,), (), 0, True, (1.0, float("nan")), ["a"], [None], [True], [[1]], [10**400]],
)
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
    found, expected = with_twin()
    torch.testing.assert_close(
        found.contributions().values, expected.contributions().values, atol=1e-6, rtol=0
    )


def test_relaxed_marginals_of_numbers():
    found, expected = with_twin(unbalanced=0.5)
    assert found.value == pytest.approx(expected.value, abs=1e-8)
    assert found.unmatched().moved == pytest.approx(expected.unmatched().moved, abs=1e-6)


@pytest.mark.parametrize("entries", [None, 1])
def test_changes_of_numbers_are_found_in_blocks_and_once(entries, monkeypatch):
    """Of few groups at a time, so that a million rows take no more memory."""
    if entries is not None:
        monkeypatch.setattr(unmatched, "ENTRIES", entries)
    found = otdd.dataset_distance(
        diabetes(ONE), diabetes(OTHER), labels="continuous", epsilon=0.3, compute=DOUBLE
    )
    plan = found.apply_plan(torch.eye(50)).double()
    gaps = torch.from_numpy(np.abs(PROGRESS[ONE][:, None] - PROGRESS[OTHER]))
    change = found.target_changes()
    assert change.tolist() == pytest.approx([float((plan * gaps).sum() / plan.sum())], rel=1e-6)
    monkeypatch.setattr(result_module, "mean_changes", None)
    assert found.target_changes() is not change
    assert torch.equal(found.target_changes(), change)
    assert found.to_dict()["target_changes"] == change.tolist()


def test_histograms_of_relaxed_marginals_sum_to_the_mass_that_moves():
    sides = diabetes(ONE), diabetes(OTHER)
    found = distance(*sides, labels="continuous", unbalanced=0.05)
    moved = found.unmatched().moved
    assert 0 < moved < 0.9
    assert float(found.target_histogram().masses.sum()) == pytest.approx(moved, rel=1e-6)
    exact = distance(*sides, labels="continuous")
    assert float(exact.target_histogram().masses.sum()) == pytest.approx(1, abs=1e-12)


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
    values = []
    for start in (0.0, 1.7e9):
        pairs = zip((x, y), days, strict=True)
        sides = (LabeledSamples(p, None, (), targets=t + start) for p, t in pairs)
        values.append(distance(*sides, labels="continuous"))
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
    for scale in (50, np.float32(50), np.int64(50), [50], np.array([50]), torch.tensor(50.0)):
        assert otdd.labels.Continuous(scale) == otdd.labels.Continuous((50.0,))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("form", [np.asarray, list, torch.tensor])
def test_whole_floats_beyond_exact_integers_are_numbers(kind, form):
    """No classes, as integers may have become one; prices come so."""
    unit = 2 / float(np.finfo(kind).eps)
    given = (unit * np.array([1, 2, 3, 4])).astype(kind)
    x, numbers = np.eye(4), [0.5, 1.5, 2.5]
    found = LabeledSamples.from_arrays(x, form(given))
    assert found.labels is None
    assert found.targets.ravel().tolist() == given.astype(np.float64).tolist()
    assert torch.equal(otdd.embed((x, given)).targets, found.targets)
    other = (np.eye(4)[:3], np.array(numbers) * unit)
    settings = {"epsilon": 0.1, "labels": "continuous"}
    expected = otdd.dataset_distance(
        LabeledSamples(x, None, (), targets=given.astype(np.float64)), other, **settings
    )
    assert otdd.dataset_distance((x, form(given)), other, **settings).value == expected.value
    with pytest.raises(InputError, match=r"has numbers and no classes; .*, or give classes as int"):
        otdd.dataset_distance((x, form(given)), (x, [0, 0, 1, 1]))


def test_numbers_in_half_precision():
    values = torch.tensor([0.5, 300, 1000], dtype=torch.bfloat16)
    found = LabeledSamples.from_arrays(np.eye(3), values)
    assert found.targets.ravel().tolist() == values.tolist()
    with pytest.raises(InputError, match="give them as integers, or numbers in a wider type"):
        LabeledSamples.from_arrays(np.eye(3), values[1:])


@pytest.mark.parametrize("base", [2**60, 2**70])
def test_integers_that_float64_rounds_are_no_numbers(base):
    x, labels = np.eye(3), [base + 1, base + 2, base + 1]
    with pytest.raises(
        InputError, match=rf"^source: targets must be numbers that float64 .* got {base + 1}; round"
    ):
        otdd.dataset_distance((x, labels), (x, [1.5, 2, 3]), labels="continuous")
    # Those that it holds are.
    held = LabeledSamples.from_arrays(x, [base, base + 2**20, base])
    assert otdd.dataset_distance(held, (x, [1.5, 2, 3]), labels="continuous", epsilon=0.1).value > 0


@pytest.mark.parametrize("text", ["1_0", " 1", "1 ", "nan", "inf", "0x1"])
def test_text_that_python_alone_reads_as_numbers_is_text(text):
    with pytest.raises(InputError, match="source has classes that are none, such as"):
        otdd.dataset_distance((np.eye(2), [text, text]), (np.eye(2), [1.5, 2]), labels="continuous")
