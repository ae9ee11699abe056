"""Small classes that a GPU decomposes side by side have the moments that each has alone."""

from __future__ import annotations

import pytest
import torch

from otdd_flash.labels import gaussian
from otdd_flash.labels.pairs import ClassCloud


def cloud(size, dim, *, weighted, constant=False, seed=0):
    draw = torch.Generator().manual_seed(100 * size + seed)
    points = 1e3 + torch.randn(size, dim, generator=draw)
    if constant:
        points[:, 1] = 7.0
    weights = torch.rand(size, generator=draw, dtype=torch.float64) + 0.1 if weighted else None
    return ClassCloud("c", points, None if weights is None else weights / weights.sum())


CLOUDS = [
    cloud(size, 5, weighted=size % 2 == 1, constant=size % 3 == 0)
    for size in (1, 2, 5, 6, 7, 8, 9, 21, 33, 34, 200)
]


@pytest.fixture
def products(monkeypatch):
    monkeypatch.setattr(gaussian, "by_products", lambda _: True)


@pytest.mark.parametrize("unbiased", [False, True])
def test_moments_are_those_of_each_class(unbiased, products, monkeypatch):
    found = gaussian.class_moments(CLOUDS, unbiased)
    assert len(dict(gaussian._small_moments(CLOUDS, unbiased))) == 8
    monkeypatch.setattr(gaussian, "MOST_STACKED", 0)
    for one, alone in zip(found, gaussian.class_moments(CLOUDS, unbiased), strict=True):
        assert torch.allclose(one.mean, alone.mean, rtol=1e-14)
        assert torch.allclose(one.trace, alone.trace, rtol=1e-12)
        covariance = alone.factor.mT @ alone.factor
        assert torch.allclose(one.factor.mT @ one.factor, covariance, rtol=1e-12, atol=1e-13)


def test_a_singular_class_has_the_digits_of_its_points(products, monkeypatch):
    """A factor by the covariance itself would be off by 1e-8."""
    draw = torch.Generator().manual_seed(3)
    line = torch.randn(40, 1, generator=draw) * torch.tensor([[1.0, 2.0, -1.0]])
    clouds = [ClassCloud("line", line + 5, None), cloud(30, 3, weighted=False)]
    pairs = torch.tensor([[1, 0]])
    found = gaussian.gaussian_table(clouds, pairs)
    monkeypatch.setattr(gaussian, "by_products", lambda _: False)
    assert torch.allclose(found, gaussian.gaussian_table(clouds, pairs), rtol=1e-12)


def test_a_class_has_the_same_bits_in_any_company(products):
    many = [cloud(20 + k % 3, 4, weighted=k % 2 == 0, seed=k) for k in range(90)]
    found = gaussian.class_moments(many, True)
    for place in (0, 1, 63, 64, 89):
        (alone,) = gaussian.class_moments([many[place]], True)
        assert all(torch.equal(one, other) for one, other in zip(found[place], alone, strict=True))


def test_moving_points_keep_their_derivatives(products):
    one = cloud(20, 4, weighted=False)
    points = one.points.double().requires_grad_()
    clouds = [ClassCloud("moving", points, None), cloud(30, 4, weighted=False)]
    gaussian.gaussian_table(clouds, torch.tensor([[1, 0]])).sum().backward()
    assert bool(points.grad.abs().max() > 0)
