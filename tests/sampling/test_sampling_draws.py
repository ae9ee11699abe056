"""Rows drawn without replacement: which, how many, and how often."""

import numpy as np
import pytest
import torch
from sampling_cases import numbered, numbers

from otdd_flash.errors import InputError
from otdd_flash.samples import LabeledSamples
from otdd_flash.sampling.draws import least_rows, most_per_half, subsample, two_halves


@pytest.mark.parametrize(("sizes", "size"), [((33, 70, 3), 7), ((33, 70, 3), 105), ((2, 40, 1), 5)])
def test_a_subsample_holds_no_row_twice_and_two_of_every_class(sizes, size):
    samples = numbered(*sizes)
    least = [min(count, 2) for count in sizes]
    assert least_rows(samples) == sum(least)
    for seed in range(20):
        drawn = subsample(samples, size, np.random.default_rng(seed))
        rows = numbers(drawn)
        assert len(set(rows)) == len(rows) == size
        assert drawn.labels.tolist() == samples.labels[rows].tolist()
        assert all(a >= b for a, b in zip(drawn.class_counts.tolist(), least, strict=True))


def test_all_rows_are_drawn_equally_often_and_class_counts_vary_as_in_sampling():
    samples, draws, size = numbered(30, 70), 600, 20
    generator = np.random.default_rng(1)
    drawn = [subsample(samples, size, generator) for _ in range(draws)]
    often = np.bincount([row for one in drawn for row in numbers(one)], minlength=100)
    share = size / 100
    assert np.abs(often - draws * share).max() < 4.5 * np.sqrt(draws * share * (1 - share))
    counts = np.array([one.class_counts[0] for one in drawn])
    # Hypergeometric: 30 of 100 rows are of the class.
    assert counts.var() == pytest.approx(size * 0.3 * 0.7 * (100 - size) / 99, rel=0.15)


@pytest.mark.parametrize(("sizes", "size"), [((33, 70, 5), 53), ((33, 70, 5), 7), ((4,), 2)])
def test_halves_share_no_row_and_have_equal_classes(sizes, size):
    samples = numbered(*sizes)
    assert most_per_half(samples) == sum(count // 2 for count in sizes)
    for seed in range(20):
        one, other = two_halves(samples, size, np.random.default_rng(seed))
        assert len(set(numbers(one)) | set(numbers(other))) == 2 * size
        assert one.class_counts.tolist() == other.class_counts.tolist()
        assert min(one.class_counts) >= 2
        assert len(one) == size
        for half in (one, other):
            assert half.labels.tolist() == samples.labels[numbers(half)].tolist()


def test_every_row_falls_into_either_half_equally_often():
    samples, draws = numbered(10, 21), 400
    generator = np.random.default_rng(2)
    often = np.bincount(
        [row for _ in range(draws) for row in numbers(two_halves(samples, 15, generator)[0])],
        minlength=31,
    )
    assert np.abs(often - draws * 15 / 31).max() < 5 * np.sqrt(draws) / 2


def test_weights_go_with_their_rows():
    samples = numbered(9, 9)
    weighted = LabeledSamples(
        samples.features, samples.labels, samples.class_names, torch.arange(1.0, 19.0)
    )
    drawn = subsample(weighted, 7, np.random.default_rng(0))
    expected = torch.tensor(numbers(drawn), dtype=torch.float64) + 1
    torch.testing.assert_close(drawn.weights, expected / expected.sum())
    # Halves need four rows of every class.
    with pytest.raises(InputError, match="class b has 3; min_class_size=4 drops"):
        most_per_half(numbered(8, 3))
