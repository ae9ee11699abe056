"""Nuclear norms, polar factors and triangular factors against references of more digits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gaussian_cases import ROUTES, decomposing_by, every_route, exact_nuclear_norm

from otdd_flash.labels.gaussian import (
    NEGLIGIBLE,
    cholesky_qr,
    newton_schulz_scales,
    nuclear_norms,
    padded_rows,
    polar_factors,
)

SPECTRA = {
    "flat": lambda r: np.ones(r),
    "six decades": lambda r: np.geomspace(1, 1e-6, r),
    "thirteen decades": lambda r: np.geomspace(1, 1e-13, r),
    "thirty decades": lambda r: np.geomspace(1, 1e-30, r),
    "half the rank": lambda r: np.repeat([1.0, 0.0], [r - r // 2, r // 2]),
    "one large": lambda r: np.array([1.0] + [1e-9] * (r - 1)),
    "all but negligible": lambda r: np.array([1.0] + [2 * NEGLIGIBLE] * (r - 1)),
    "nothing": lambda r: np.zeros(r),
}
every_spectrum = pytest.mark.parametrize("spectrum", SPECTRA.values(), ids=SPECTRA.keys())


def orthonormal(rng, rows, columns):
    return np.linalg.qr(rng.normal(size=(rows, columns)))[0]


def with_spectrum(values, rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    rank = min(rows, columns)
    left, right = orthonormal(rng, rows, rank), orthonormal(rng, columns, rank)
    return torch.from_numpy(left * values(rank) @ right.T)


@every_spectrum
@pytest.mark.parametrize("shape", [(1, 1), (20, 20), (9, 40), (130, 100)])
def test_products_give_the_nuclear_norm(spectrum, shape):
    matrix = with_spectrum(spectrum, *shape).unsqueeze(0)
    expected = float(torch.linalg.svdvals(matrix).sum())
    for scale in (1, 1e-60, 1e60):
        with decomposing_by("products"):
            value = float(nuclear_norms(scale * matrix))
        assert value <= scale * expected * (1 + 1e-14)
        assert value == pytest.approx(scale * expected, rel=2e-14 * max(shape) ** 0.5, abs=0)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0])
def test_what_is_negligible_costs_no_more_than_promised(share):
    """The loss is largest where all but one singular value are near the limit."""
    rank = 100
    matrix = with_spectrum(lambda r: np.array([1.0] + [share * NEGLIGIBLE] * (r - 1)), rank, rank)
    exact = 1 + (rank - 1) * share * NEGLIGIBLE
    with decomposing_by("products"):
        value = float(nuclear_norms(matrix.unsqueeze(0)))
    assert -1e-14 < (exact - value) / exact < rank * NEGLIGIBLE


@every_route
@pytest.mark.parametrize("shape", [(1, 1), (7, 7), (5, 30), (30, 5)])
def test_polar_factors_are_isometries_in_the_matrix_s_direction(route, shape):
    matrices = torch.stack(
        [with_spectrum(lambda r: np.linspace(1, 9, r), *shape, k) for k in (0, 1)]
    )
    with decomposing_by(route):
        *_, nothing = factors = polar_factors(torch.cat((matrices, torch.zeros(1, *shape))))
    assert not nothing.any()
    factors = factors[:2]
    assert float(torch.linalg.matrix_norm(factors, 2).max()) <= 1 + 1e-14
    small = factors @ factors.mT if shape[0] <= shape[1] else factors.mT @ factors
    torch.testing.assert_close(small, torch.eye(min(shape)).double().expand_as(small))
    # M = U H with a symmetric H that has no negative eigenvalue.
    stretch = factors.mT @ matrices
    torch.testing.assert_close(stretch, stretch.mT, rtol=0, atol=1e-13)
    assert float(torch.linalg.eigvalsh(stretch).min()) > -1e-13


@every_route
def test_polar_factors_leave_lost_directions_out(route):
    rng = np.random.default_rng(0)
    left, right = orthonormal(rng, 12, 5), orthonormal(rng, 12, 5)
    matrix = torch.from_numpy(left * np.array([1, 0.1, 1e-3, 0, 0]) @ right.T).unsqueeze(0)
    with decomposing_by(route):
        factor = polar_factors(matrix)[0].numpy()
    inside = left.T @ factor @ right
    np.testing.assert_allclose(inside[:3, :3], np.eye(3), atol=1e-11)
    np.testing.assert_allclose(inside[:3, 3:], 0, atol=1e-11)
    assert np.linalg.svd(factor, compute_uv=False)[3] < 0.5


def test_the_steps_take_every_singular_value_to_one():
    """The scalar map of the iteration, over the whole range it is made for."""
    start = np.geomspace(NEGLIGIBLE, 1, 20_001)
    values = start
    for scale in newton_schulz_scales():
        values = 1.5 * scale * values - 0.5 * (scale * values) ** 3
        # What is large stays large: rounding is relative to 1.
        assert values[-1] > 0.09
        assert (values <= 1 + 1e-15).all()
    assert np.abs(values - 1).max() < 1e-14
    assert len(newton_schulz_scales()) < 40


@every_spectrum
@pytest.mark.parametrize(("size", "dim"), [(1, 1), (12, 12), (300, 40)])
def test_cholesky_qr_is_a_qr_decomposition(spectrum, size, dim):
    matrix = with_spectrum(spectrum, size, dim) * torch.logspace(0, -8, dim).double()
    q, r = cholesky_qr(matrix)
    assert torch.equal(r, r.triu())
    # Columns keep their own precision, whatever the others' size.
    norms = torch.linalg.vector_norm(matrix, dim=0)
    assert bool((torch.linalg.vector_norm(q @ r - matrix, dim=0) <= 1e-12 * norms).all())
    assert float(torch.linalg.matrix_norm(q, 2)) <= 1 + 1e-12
    gap = torch.linalg.vector_norm(r, dim=0) - norms
    assert bool((gap.abs() <= 1e-13 * norms).all())


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("thirteen decades", "half the rank"),
        ("flat", "six decades"),
        ("six decades", "one large"),
        ("half the rank", "half the rank"),
    ],
)
def test_triangles_keep_all_digits_of_singular_classes(one, two):
    """Cholesky or eigenvectors of the covariance would be wrong by 1e-8 of the norms here."""
    dim = 8
    first = with_spectrum(SPECTRA[one], 30, dim)
    second = with_spectrum(SPECTRA[two], 24, dim, seed=1)
    expected = exact_nuclear_norm(first.numpy(), second.numpy())
    scale = float(first.norm() * second.norm())
    for triangle in (cholesky_qr, torch.linalg.qr):
        factors = [triangle(points)[1] for points in (first, second)]
        product = (factors[0] @ factors[1].mT).unsqueeze(0)
        for route in ROUTES:
            with decomposing_by(route):
                assert abs(float(nuclear_norms(product)) - expected) < 3e-15 * scale


def test_padding_is_small_aligned_and_shared():
    rows = [padded_rows(count) for count in range(2000)]
    assert all(count <= padded for count, padded in enumerate(rows))
    assert all(padded % 4 == 0 and padded >= 4 for padded in rows)
    assert max(padded / count for count, padded in enumerate(rows) if count >= 32) < 1.13
    assert len(set(rows[:129])) <= 24


@pytest.mark.gpu
@every_spectrum
def test_a_gpu_gives_the_same_norms_and_factors(spectrum):
    matrices = torch.stack([with_spectrum(spectrum, 64, 100, seed) for seed in range(9)])
    values = nuclear_norms(matrices.cuda()).cpu()
    torch.testing.assert_close(values, nuclear_norms(matrices), rtol=1e-12, atol=0)
    q, r = (part.cpu() for part in cholesky_qr(matrices[0].mT.cuda()))
    # cuBLAS solves triangular systems through inverses of blocks, which costs it two digits.
    torch.testing.assert_close(q @ r, matrices[0].mT, rtol=0, atol=1e-12)
