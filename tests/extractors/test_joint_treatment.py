"""What is fitted on both sides together: dimension check, standardisation, PCA."""

import numpy as np
import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.extractors import reduce_pca, standardize
from otdd_flash.samples import check_same_dimension


@pytest.fixture
def clouds():
    rng = np.random.default_rng(0)
    scale = np.array([1.0, 100.0, 0.01, 3.0])
    return rng.normal(5, 1, (33, 4)) * scale, rng.normal(-2, 2, (70, 4)) * scale


def test_standardised_sides_share_mean_and_deviation(make_samples, clouds, monkeypatch):
    for dtype, tolerance in ((np.float32, 1e-5), (np.float64, 1e-12)):
        sides = [make_samples(cloud.astype(dtype)) for cloud in clouds]
        x, y = standardize(*sides)
        both = torch.cat([x.features, y.features]).double()
        assert x.features.dtype == sides[0].features.dtype
        assert both.mean(0).abs().max() < tolerance
        assert (both.std(0, correction=0) - 1).abs().max() < tolerance
        # One map for both sides: their difference survives.
        assert (x.features.mean(0) - y.features.mean(0)).abs().min() > 0.5
    # It undoes common units, and blocks of rows do not change it.
    units, origin = np.array([3.0, 0.1, 40.0, 1.0]), np.array([7.0, -3.0, 0.0, 1.0])
    other = standardize(*(make_samples(cloud * units + origin) for cloud in clouds))
    monkeypatch.setattr("otdd_flash.extractors.plain.ROWS_AT_ONCE", 7)
    for a, b, c in zip((x, y), other, standardize(*sides), strict=True):
        assert torch.allclose(a.features, b.features, atol=1e-9)
        assert torch.allclose(a.features, c.features, atol=1e-12)


def test_constant_features_are_left_alone(make_samples):
    # Six rows: the computed mean of 0.1 is then off by a rounding, its deviation not quite 0.
    x, y = np.column_stack([np.full(4, 0.1), np.arange(4.0)]), np.array([[0.1, 4.0], [0.1, 9.0]])
    for side in standardize(make_samples(x), make_samples(y)):
        assert set(side.features[:, 0].tolist()) == {0.1}
    # Constant on each side but not over both: that is what tells the sides apart.
    split = standardize(make_samples(np.zeros((2, 1))), make_samples(np.ones((2, 1))))
    assert [side.features.flatten().tolist() for side in split] == [[-1.0, -1.0], [1.0, 1.0]]


def test_pca_keeps_the_direction_between_the_sides(make_samples):
    rng = np.random.default_rng(0)
    x, y = rng.normal(0, 0.1, (40, 9)), rng.normal(0, 0.1, (50, 9))
    y[:, 4] += 10
    # Fitted on one side alone, the first component would miss the shift.
    out_x, out_y = reduce_pca(make_samples(x, "x"), make_samples(y), k=1, seed=0)
    assert out_x.features.shape == (40, 1)
    assert out_x.name == "x"
    assert (out_x.features.mean() - out_y.features.mean()).abs() == pytest.approx(10, abs=0.2)


def test_pca_repeats_with_its_seed(make_samples):
    # Wide enough for scikit-learn's randomised solver.
    rng = np.random.default_rng(0)
    sides = [make_samples(rng.normal(size=(300, 600)).astype(np.float32)) for _ in range(2)]
    first, again, other = (reduce_pca(*sides, k=5, seed=seed)[0].features for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.dtype == torch.float32


def test_pca_beyond_the_dimension_or_the_rows_is_refused(make_samples, clouds):
    for k, accepted in (
        (0, "at least 1"),
        (5, "an integer from 1 to 4.*"),
        (-1, "at least 1"),
        (2.5, "an integer"),
        (True, "an integer"),
    ):
        with pytest.raises(InputError, match=rf"extractor.pca must be {accepted}, got {k}"):
            reduce_pca(*(make_samples(cloud) for cloud in clouds), k=k, seed=0)
    with pytest.raises(InputError, match="from 1 to 3"):
        reduce_pca(make_samples(np.eye(9)[:1]), make_samples(np.eye(9)[1:3]), k=4, seed=0)


def test_different_dimensions_name_both_and_the_way_out(make_samples):
    end = (
        r"extractor.pca cannot help, as it is fitted on both sides together\..*ground=gromov.*each"
    )
    for (d, e), way_out in {
        (784, 3072): r"extractor\.size=32 extractor\.grayscale=true",
        (512, 784): r"extractor\.size=N,.*same columns",
        (784, 256): r"extractor\.size=28,",
    }.items():
        x, y = make_samples(np.ones((2, d)), "left"), make_samples(np.ones((2, e)), "right")
        message = f"left has {d} .* right has {e},.*{way_out}.*{end}$"
        for treat in (check_same_dimension, standardize, otdd.dataset_distance):
            with pytest.raises(InputError, match=message):
                treat(x, y)
    for treat in (
        lambda x, y: reduce_pca(x, y, 1, 0),
        lambda x, y: otdd.class_distances([x, y]),
        lambda x, y: otdd.pairwise_distances([x, y]),
        otdd.gradient_flow,
        lambda x, y: otdd.sinkhorn(x, y, epsilon=1.0),
        lambda x, y: otdd.sinkhorn_divergence(x, y, epsilon=1.0),
    ):
        with pytest.raises(InputError, match=message):
            treat(x, y)


def test_features_whose_squares_overflow_are_standardised_as_others(make_samples, clouds):
    plain = standardize(*(make_samples(cloud) for cloud in clouds))
    huge = standardize(*(make_samples(cloud * 1e305) for cloud in clouds))
    for one, other in zip(plain, huge, strict=True):
        torch.testing.assert_close(one.features, other.features)
    with pytest.raises(InputError, match="squared distances overflow float64"):
        reduce_pca(*(make_samples(cloud * 1e300) for cloud in clouds), k=2, seed=0)
