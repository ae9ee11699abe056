"""Balancing of many small matrices in PyTorch, in chunks that fit a cache.

`otdd_flash.kernels.batched.small_balance` says what is computed and how: the first iteration in
the log domain, scalings of a fixed matrix E from there on, and the log domain throughout for
matrices where underflow could matter.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.batched.checking import check_logits
from otdd_flash.batched.chunks import Chunk, chunk_of, parts, present
from otdd_flash.batched.problems import Balanced, Problems, computed_in
from otdd_flash.batched.scalings import (
    first_scalings,
    grid_of,
    on_grid,
    scaled,
    scaling,
    sum_by_halves,
    with_masses,
)

# What scalings may grow to where an entry of E was lost to 0, and where none was.
MOST_SCALING, MOST_WITHOUT_LOSS = 2.0**30, 2.0**96
# Entries of E below it are scaled by logarithms, so that what was lost of them is there.
SMALL = 2.0**-60


class Scalings(NamedTuple):
    """Of s problems: phi (n, s), gamma (m, s), errors (s,), iterations (s,), largest scalings."""

    phi: Tensor
    gamma: Tensor
    errors: Tensor
    counts: Tensor
    most: Tensor


def balance(problems: Problems, *, potentials: bool) -> Balanced:
    """Balance all matrices; potentials and errors are empty unless asked for."""
    matrices, stops = problems.matrices, problems.tolerance is not None
    count, n, m = matrices.shape
    dtype, kept = computed_in(matrices), count if potentials else 0
    found = Balanced(
        matrices.new_empty((count, n, m)),
        matrices.new_empty((kept, n), dtype=dtype),
        matrices.new_empty((kept, m), dtype=dtype),
        matrices.new_empty((kept,), dtype=dtype),
        matrices.new_empty((count if stops else 0,), dtype=torch.int32),
    )
    for part in parts(matrices):
        chunk = chunk_of(problems, part)
        if problems.a is None and matrices.device.type == "cpu":
            check_logits(chunk.highest, chunk.logits.amax(0))
        balanced, rows, columns, errors, counts = _balance(chunk, problems, potentials)
        found.matrices[part] = balanced.permute(2, 0, 1)
        if potentials:
            found.rows[part] = present(rows / chunk.scale - chunk.highest, chunk.rows).T
            found.columns[part] = present(columns / chunk.scale, chunk.columns).T
            found.errors[part] = errors
        if stops:
            found.counts[part] = counts
    return found


def _balance(chunk: Chunk, problems: Problems, potentials: bool) -> Balanced:
    """R (n, m, s), log phi (n, s) and log gamma (m, s), errors and iterations of a chunk."""
    u, v = first_scalings(chunk, torch.zeros_like(chunk.scale))
    kernel = scaled(chunk.logits, u, v, log=True)
    # As phi_i gamma_j <= 1 / E_ij, nothing goes far where no entry is small.
    near = chunk.a is None and bool(kernel.amin() >= SMALL)
    ones = torch.ones_like(u[0]), torch.ones_like(v[0])
    phi, gamma, errors, counts, most = iterate(chunk, kernel, *ones, problems, potentials, not near)
    a, b = chunk.masses(log=False)
    balanced = scaled(
        kernel, with_masses(phi, a, log=False), with_masses(gamma, b, log=False), log=False
    )
    if near and not potentials:
        return Balanced(balanced, phi, gamma, errors, counts)
    u[1] += phi.log()
    v[1] += gamma.log()
    found = Balanced(balanced, u, v, errors, counts)
    if not near:
        again = in_logs(chunk, kernel, most) | overflown(chunk, kernel, phi, gamma)
        _correct(chunk, kernel, again, problems, potentials, found)
    return found._replace(rows=u.sum(0), columns=v.sum(0))


def _correct(
    chunk: Chunk,
    kernel: Tensor,
    again: Tensor,
    problems: Problems,
    potentials: bool,
    found: Balanced,
) -> None:
    """Put in the log domain's: all of what is done `again` (s,), and small entries of the rest.

    Scalings of `found` are pairs here.
    """
    balanced, u, v, errors, counts = found
    small = (kernel < SMALL) & (chunk.logits > -torch.inf)
    which = again | small.flatten(0, 1).any(0)
    if not bool(which.any()):
        return
    some = chunk.take(which)
    if bool(again.any()):
        grid = torch.where(again[which], grid_of(some.logits), 0)
        some = some._replace(logits=on_grid(some.logits, grid))
        whole, grid = some.take(again[which]), grid[again[which]]
        first = first_scalings(whole, grid)
        logs = iterate(whole, whole.logits, *first, problems, potentials, grid=grid)
        u[..., again], v[..., again] = logs.phi, logs.gamma
        errors[again], counts[again] = logs.errors, logs.counts
    a, b = some.masses(log=True)
    exact = scaled(
        some.logits,
        with_masses(u[..., which], a, log=True),
        with_masses(v[..., which], b, log=True),
        log=True,
    )
    taken = again[which] | small[..., which]
    balanced[..., which] = torch.where(taken, exact, balanced[..., which])


def iterate(
    chunk: Chunk,
    kernel: Tensor,
    phi: Tensor,
    gamma: Tensor,
    problems: Problems,
    potentials: bool,
    watched: bool = False,
    grid: Tensor | None = None,
) -> Scalings:
    """Take all iterations but the first; if `watched`, record the largest scalings on the way."""
    a, b = chunk.masses(log=grid is not None)
    tolerance, count = problems.tolerance, kernel.shape[2]
    active = torch.ones(count, dtype=torch.bool, device=kernel.device)
    counts = torch.ones(count, dtype=torch.int32, device=kernel.device)
    errors = kernel.new_zeros(count)
    most_row, most_column = phi.clone(), gamma.clone()
    for i in range(1, problems.iterations + 1):
        last = i == problems.iterations
        if last and tolerance is None and not potentials:
            break
        next_phi = scaling(kernel, gamma, b, 1, chunk.rows, grid)
        if last or tolerance is not None:
            errors = torch.where(
                active, row_errors(chunk, phi, next_phi, log=grid is not None), errors
            )
        if tolerance is not None:
            # NaN is not above the tolerance, and ends its matrix.
            active = active & (errors > tolerance)
            if not bool(active.any()):
                break
        if last:
            break
        next_gamma = scaling(kernel, next_phi, a, 0, chunk.columns, grid)
        if tolerance is None:
            phi, gamma = next_phi, next_gamma
        else:
            phi = torch.where(active, next_phi, phi)
            gamma = torch.where(active, next_gamma, gamma)
            counts += active
        if watched:
            torch.maximum(most_row, phi, out=most_row)
            torch.maximum(most_column, gamma, out=most_column)
    most = torch.maximum(most_row.amax(-2), most_column.amax(-2))
    return Scalings(phi, gamma, errors, counts, most)


def row_errors(chunk: Chunk, phi: Tensor, following: Tensor, *, log: bool) -> Tensor:
    """|R 1 - a| (s,): the row sums are a o phi over the scalings that follow."""
    ratio = (phi - following).sum(0).exp() if log else phi / following
    deviation = present((ratio - 1).abs(), chunk.rows)
    if chunk.a is None:
        return deviation.amax(0)
    # The ratio of a row without mass may be infinite.
    return sum_by_halves(torch.where(chunk.a > 0, deviation * chunk.a, 0), 0)


def in_logs(chunk: Chunk, kernel: Tensor, most: Tensor) -> Tensor:
    """Which problems (s,) are done again in the log domain, by the largest of their scalings."""
    lost = (kernel < torch.finfo(kernel.dtype).tiny) & (chunk.logits > -torch.inf)
    limit = torch.where(lost.flatten(0, 1).any(0), MOST_SCALING, MOST_WITHOUT_LOSS)
    # NaN is not below any number.
    return ~(most <= limit)


def overflown(chunk: Chunk, kernel: Tensor, phi: Tensor, gamma: Tensor) -> Tensor:
    """Which problems (s,) have a sum or an entry of E above the largest number, which masses allow.

    As columns have their masses, a_i E_ij <= 1: without a mass there is no bound.
    """
    found = kernel.amax((0, 1)) == torch.inf
    for scalings, side in ((phi, chunk.rows), (gamma, chunk.columns)):
        lost = scalings == 0
        found = found | (lost if side is None else lost & side).any(0)
    return found
