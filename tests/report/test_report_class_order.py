"""Orders of classes in pictures."""

import itertools

import pytest
import torch

from otdd_flash.report.figures.heat_maps import class_orders


def line(positions):
    """Squared distances between points of a line."""
    points = torch.tensor(positions, dtype=torch.float64).unsqueeze(1)
    return torch.cdist(points, points) ** 2


def test_every_class_has_one_place_in_its_dataset():
    for sizes in ([1, 1], [1, 2], [4, 3], [2, 5, 1]):
        table = line(torch.rand(sum(sizes), generator=torch.manual_seed(0)).tolist())
        whole = [list(range(size)) for size in sizes]
        assert class_orders(table, sizes, "given") == whole
        assert [sorted(p) for p in class_orders(table, sizes, "hierarchical")] == whole
    # Rounding and equal classes.
    table = line([0.0, 0.0, 1.0, 1.0])
    table[0, 2] += 1e-9
    table[0, 0] = -1e-9
    (places,) = class_orders(table, [4], "hierarchical")
    assert sorted(places[:2]) in ([0, 1], [2, 3])


def test_like_stands_beside_like_and_both_datasets_are_ordered_alike():
    """On a line the best order is along it, either way."""
    positions = torch.rand(20, generator=torch.manual_seed(0)).tolist()
    (places,) = class_orders(line(positions), [20], "hierarchical")
    shown = [positions[place] for place in places]
    assert sorted(shown) in (shown, shown[::-1])
    source, target = [5.0, 1.0, 4.2, 0.0, 2.5], [0.1, 2.6, 4.9, 1.1, 4.3]
    first, second = class_orders(line(source + target), [5, 5], "hierarchical")
    pairs = [(source[i], target[j]) for i, j in zip(first, second, strict=True)]
    assert all(abs(one - two) < 0.2 for one, two in pairs)
    table = line([0.0, 3.0, 1.0, 2.2]) + line([0.0, 0.5, 2.0, 0.1])
    (places,) = class_orders(table, [4], "hierarchical")

    def length(order):
        return sum(float(table[i, j].sqrt()) for i, j in itertools.pairwise(order))

    # No other order has nearer neighbours.
    assert length(places) == pytest.approx(min(map(length, itertools.permutations(range(4)))))
