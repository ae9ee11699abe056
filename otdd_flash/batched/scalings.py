"""Scalings of the rows and columns of a chunk (n, m, s), of themselves or by logarithms.

With a grid kernel and masses are natural logarithms, and a scaling is a pair (2, k, s) whose sum is
its logarithm: the largest exponent of its sum, with the opposite sign, and what is left, which is
small. Logits and the first of a pair are multiples of a number, so that their sums are exact: in
float32 those of logits of 1e4 would be rounded by 1e-3, in every iteration anew. A grid is a number
that values are rounded by, as (value + grid) - grid. Sums have an order that their length decides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.batched.chunks import Chunk, present

# Terms that are summed up one after the other.
MOST_IN_ORDER = 8


def scaling(
    kernel: Tensor,
    other: Tensor,
    masses: Tensor | None,
    dim: int,
    side: Tensor | None,
    grid: Tensor | None,
) -> Tensor:
    """1 over sums along a dimension of the kernel, times the scalings of it and their masses."""
    other = with_masses(other, masses, log=grid is not None)
    if grid is None:
        return present(_products(kernel, other, dim).reciprocal_(), side)
    high, low = other.unsqueeze(2 - dim)
    return _log_scaling(kernel + high, low, dim, side, grid)


def with_masses(scalings: Tensor, masses: Tensor | None, *, log: bool) -> Tensor:
    """Scalings times masses, which are 1 by default."""
    if masses is None:
        return scalings
    return torch.stack((scalings[0], scalings[1] + masses)) if log else scalings * masses


def first_scalings(chunk: Chunk, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the scalings of the first iteration, by logarithms."""
    a, b = chunk.masses(log=True)
    low = chunk.logits.new_zeros((1, 1)) if b is None else b[None]
    u = _log_scaling(chunk.logits, low, 1, chunk.rows, grid)
    if a is not None:
        return u, scaling(chunk.logits, u, a, 0, chunk.columns, grid)
    # The largest logit of a row is 0, and so is the first of the pair.
    return u, _log_scaling(chunk.logits, u[1][:, None], 0, chunk.columns, grid)


def scaled(kernel: Tensor, phi: Tensor, gamma: Tensor, *, log: bool) -> Tensor:
    """Return phi_i K_ij gamma_j (n, m, s); with `log` all three are given as logarithms."""
    if log:
        exponents = (kernel + phi[0][:, None]).add_(gamma[0])
        return exponents.add_(phi[1][:, None] + gamma[1]).exp_()
    # Scalings may be far apart, and their product is nearer to 1 than that with an entry.
    return kernel * (phi[:, None] * gamma)


def grid_of(logits: Tensor) -> Tensor:
    """Return the grid for sums of two logits (s,): twice the range of a matrix's logits."""
    return -2 * torch.where(logits > -torch.inf, logits, 0).amin((0, 1))


def on_grid(values: Tensor, grid: Tensor) -> Tensor:
    """Values (..., s) rounded to the grid; as they are where it is 0."""
    return (values + grid).sub_(grid)


def _log_scaling(
    exponents: Tensor, low: Tensor, dim: int, side: Tensor | None, grid: Tensor
) -> Tensor:
    """The pair of -log sum exp(exponents + low) along a dimension."""
    highest = on_grid((exponents + low).amax(dim), grid)
    highest = torch.where(highest == -torch.inf, 0, highest)
    terms = (exponents - highest.unsqueeze(dim)).add_(low)
    # A coarse grid leaves much of the largest in what is left.
    left = terms.amax(dim)
    left = torch.where(left == -torch.inf, 0, left)
    sums = sum_by_halves(terms.sub_(left.unsqueeze(dim)).exp_(), dim)
    return present(torch.stack((-highest, sums.log_().add_(left).neg_())), side)


def _products(kernel: Tensor, other: Tensor, dim: int) -> Tensor:
    """Sums along a dimension of the kernel times the numbers along it."""
    if kernel.shape[dim] > MOST_IN_ORDER:
        return sum_by_halves(kernel * other.unsqueeze(1 - dim), dim)
    # In place of a product as large as the kernel, which is most of the traffic.
    sums = kernel.select(dim, 0) * other[0]
    for k in range(1, kernel.shape[dim]):
        sums.addcmul_(kernel.select(dim, k), other[k])
    return sums


def sum_by_halves(values: Tensor, dim: int) -> Tensor:
    """Sums along a dimension, in an order that only its length decides; overwrites."""
    while (size := values.shape[dim]) > 1:
        half = (size + 1) // 2
        second = values.narrow(dim, half, size - half)
        values = values.narrow(dim, 0, half)
        values.narrow(dim, 0, size - half).add_(second)
    return values.select(dim, 0)
