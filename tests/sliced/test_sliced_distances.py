"""Sliced dataset distances against dense float64 loops on the same draws."""

import json
import math
import time
import warnings
from itertools import combinations

import numpy as np
import pytest
import torch
from reference import numbers_on_a_line, transport_on_a_line
from scipy import stats

import otdd_flash as otdd
from otdd_flash import sliced
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.sliced import DRAWS_PER_CHUNK, MOMENTS, draw_all, draw_chunk, intervals


def some(n, d, classes, seed, *, weights="none"):
    generator = np.random.default_rng(seed)
    features = generator.random((n, d)).astype(np.float32) + 0.2 * seed
    labels = torch.from_numpy(np.arange(n) % classes)
    masses = None
    if weights != "none":
        masses = generator.random(n)
        masses[: n // 5] = 0 if weights == "zeros" else masses[: n // 5]
    names = tuple(map(str, range(classes)))
    return otdd.LabeledSamples(features, labels, names, masses, name=f"set {seed}")


def dense(one, other, draws):
    """The mean of W_2^2 over draws, and the mean second moments of both sides' numbers."""
    totals = [0.0, 0.0, 0.0]
    for theta, psi, orders in zip(*draws, strict=True):
        sides = [
            numbers_on_a_line(side.features, side.labels, side.masses, theta, psi, orders)
            for side in (one, other)
        ]
        totals[0] += transport_on_a_line(sides[0], one.masses, sides[1], other.masses)
        for place, (side, numbers) in enumerate(zip((one, other), sides, strict=True)):
            totals[1 + place] += float(side.masses @ numbers.square())
    return tuple(total / len(draws.orders) for total in totals)


@pytest.mark.parametrize(
    "datasets",
    [
        [some(33, 7, 3, 0), some(33, 7, 4, 1)],
        [some(33, 7, 3, 0), some(20, 7, 2, 1), some(1, 7, 1, 2)],
        [some(30, 3, 3, 0, weights="any"), some(17, 3, 2, 1)],
        [some(30, 3, 3, 0, weights="zeros"), some(25, 3, 2, 1, weights="any")],
    ],
    ids=["equal sizes", "unequal sizes", "weights", "zeros"],
)
def test_values_are_those_of_dense_loops_on_the_same_draws(datasets):
    with warnings.catch_warnings():
        # Of too few draws for an interval.
        warnings.simplefilter("ignore", DataNotice)
        result = otdd.sliced_distances(datasets, projections=8, seed=3, device="cpu")
    draws = draw_chunk(0, 8, datasets[0].dim, seed=3)
    for i, j in combinations(range(len(datasets)), 2):
        value, *moments = dense(datasets[i], datasets[j], draws)
        # Stated for all devices: 1e-5 of the projected second moments. In float64 it is rounding.
        assert abs(float(result.values[i, j]) - value) <= 1e-12 * sum(moments)
        assert result.values[i, j] == result.values[j, i]


def test_a_dataset_is_at_0_from_itself_and_a_shuffled_or_weighted_copy_and_labels_count():
    one = some(50, 5, 3, 0)
    shuffled = one.take(torch.randperm(50, generator=torch.Generator().manual_seed(0)))
    copies = np.tile([1, 3, 2, 1, 4], 10)
    weighted = otdd.LabeledSamples.from_arrays(one.features, one.labels, copies)
    whole = [np.repeat(part.numpy(), copies, 0) for part in (one.features, one.labels)]
    relabelled = (one.features, np.arange(50) // 20)
    given = [one, one, shuffled, weighted, (whole[0], whole[1]), relabelled]
    values = otdd.sliced_distances(given, projections=200, device="cpu").values
    assert values[0, 1] == 0
    assert values[0, 2] < 1e-25
    torch.testing.assert_close(values[3, :3], values[4, :3], rtol=1e-12, atol=0)
    assert values[0, 3] > 1e-4
    assert values[0, 5] > 1e-4


def test_draws_are_uniform_on_spheres_and_orders_are_poisson_without_0():
    parts = [draw_chunk(chunk, 10**6, 3, seed=0) for chunk in range(40)]
    directions = torch.cat([part.directions for part in parts])
    weights = torch.cat([part.weights for part in parts])
    orders = torch.cat([part.orders for part in parts]).double()
    count = len(orders)
    for sphere in (directions, weights):
        torch.testing.assert_close(sphere.norm(dim=1), torch.ones(count, dtype=torch.float64))
        spread = sphere.T @ sphere / count * sphere.shape[1]
        assert (spread - torch.eye(len(spread))).abs().max() < 8 / math.sqrt(count)
    assert orders.min() == 1
    rates = torch.arange(1, MOMENTS + 1, dtype=torch.float64)
    expected = rates / (1 - (-rates).exp())
    assert (orders.mean(0) - expected).abs().max() < 5 * math.sqrt(5 / count)


def test_a_draw_is_the_same_however_many_there_are(monkeypatch):
    few = list(draw_all(DRAWS_PER_CHUNK + 3, 4, 0))[1]
    many = list(draw_all(3 * DRAWS_PER_CHUNK, 4, 0))[1]
    for one, other in zip(few, many, strict=True):
        assert torch.equal(one, other[:3])
    datasets = [some(40, 6, 3, 0), some(30, 6, 3, 1)]
    whole = otdd.sliced_distances(datasets, projections=50, device="cpu")
    monkeypatch.setattr(sliced, "WORK_BYTES", 8 * 70 * 20)
    parts = otdd.sliced_distances(datasets, projections=50, device="cpu")
    torch.testing.assert_close(parts.values, whole.values, rtol=1e-12, atol=0)


def test_intervals_are_longer_above_by_the_tail_of_the_draws_and_roots_are_of_their_ends():
    datasets = [some(40, 6, 3, 0), some(30, 6, 3, 1), some(20, 6, 3, 2)]
    result = otdd.sliced_distances(datasets, projections=200, device="cpu")
    reach = stats.t.ppf(0.975, 199) * result.standard_errors
    torch.testing.assert_close(result.values - result.lower, reach)
    apart = result.values > 0
    # At least as far on a log scale.
    ratios = (result.upper / result.values).log() / (reach / result.values)
    assert (ratios[apart] >= 1).all()
    assert torch.equal(result.upper.diagonal(), torch.zeros(3, dtype=torch.float64))
    nearest = result.pairs()[0]
    assert nearest.value == float(result.values[apart].min())
    assert nearest.root_upper == math.sqrt(nearest.upper)
    assert nearest.root_lower == math.sqrt(max(nearest.lower, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0, 4.0])
def test_intervals_of_100_draws_hold_the_mean_over_all_lines(scale):
    """200 intervals of 24 normal points a side in 8 dimensions, one side multiplied.

    By the normal law they would hold it far less often.
    """
    generator = np.random.default_rng(0)
    sides = [
        otdd.LabeledSamples.from_arrays(factor * generator.normal(size=(24, 8)), np.arange(24) % 2)
        for factor in (1.0, scale)
    ]
    prepared = sliced.prepare(sides, "cpu")
    chunks = (draw_chunk(chunk, 10**6, 8, seed=0) for chunk in range(40))
    pool = torch.cat([sliced.chunk_distances(prepared, draws)[0] for draws in chunks])
    lower, upper = intervals(pool.reshape(200, 100))
    truth, blocks = pool.mean(), pool.reshape(200, 100)
    assert ((lower <= truth) & (truth <= upper)).double().mean() >= 0.915
    normal = blocks.mean(1) + 1.96 * blocks.std(1) / 10
    assert (normal >= truth).double().mean() < 0.88


def test_an_interval_is_given_and_called_wide_where_few_draws_carry_most_of_the_sum():
    generator = np.random.default_rng(0)
    table = generator.normal(size=(60, 3)) * [1, 30, 1]
    one, other = (table, np.arange(60) % 2), (1.1 * table + 1, np.arange(60) % 2)
    with pytest.warns(DataNotice, match="its mean is hardly known.* standardize"):
        result = otdd.sliced_distances([one, other], projections=1000, device="cpu")
    assert result.upper[0, 1] > 100 * result.values[0, 1]
    standardised = [(values / table.std(0), labels) for values, labels in (one, other)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        otdd.sliced_distances(standardised, projections=1000, device="cpu")


@pytest.mark.parametrize("projections", [29, 30])
@pytest.mark.filterwarnings("ignore::otdd_flash.errors.DataNotice")
def test_the_table_has_a_row_a_pair_and_the_content_is_json(projections):
    """With the intervals that 30 draws have and 29 have not, which say so."""
    datasets = [some(20, 3, 2, seed) for seed in range(3)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = otdd.sliced_distances(datasets, projections=projections, device="cpu")
    said = [str(one.message) for one in caught if one.category is DataNotice]
    few, known = projections < 30, projections >= 30
    assert [text.startswith(f"{projections} draws are too few") for text in said] == [True] * few
    assert all(text.endswith("at least 30") for text in said)
    frame = result.to_frame()
    assert list(frame.columns) == list(result.pairs()[0]._fields)
    for value, pair in zip(frame.value, result.pairs(), strict=True):
        assert value == pair.value
        assert (pair.root_upper is not None) == known
    assert frame.lower.notna().all() == known
    content = result.to_dict()
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert (content["lower"][0][1] is not None) == known


def test_bad_datasets_end_in_a_sentence():
    two = some(9, 2, 2, 0)
    for datasets, message in (
        ([two], "holds 1 datasets, and at least 2"),
        ([two, some(9, 3, 2, 0)], "has 2 features and .* has 3"),
        ([two, np.ones((4, 2))], r"datasets\[1\] has no labels"),
        ([two, (np.eye(2) * 1e40, np.arange(2))], "overflow float64 in a sliced distance"),
    ):
        with pytest.raises(InputError, match=message):
            otdd.sliced_distances(datasets, projections=1000, device="cpu")


@pytest.mark.gpu
def test_60000_images_take_5_seconds_a_dataset_and_a_gibibyte():
    datasets = [some(60_000, 784, 10, seed).to("cuda") for seed in range(2)]
    otdd.sliced_distances(datasets, projections=500, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, started = torch.cuda.memory_allocated(), time.perf_counter()
    otdd.sliced_distances(datasets, projections=10_000, device="cuda")
    assert time.perf_counter() - started < 2 * 5
    assert torch.cuda.max_memory_allocated() - before < 2**30
    few = [some(700, 90, 5, 0, weights="any"), some(600, 90, 4, 1)]
    here, there = (
        otdd.sliced_distances(few, projections=600, device=device).values
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(here, there, rtol=1e-10, atol=0)
