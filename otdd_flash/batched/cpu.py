"""Balancing of many small matrices in PyTorch, and its derivative, in chunks that fit a cache.

`otdd_flash.kernels.batched.small_balance` says what is computed and how: the first iteration in
the log domain, scalings of a fixed matrix E from there on, and the log domain throughout for
matrices where underflow could matter. `otdd_flash.kernels.batched.small_balance_backward` has the
formulas of the derivative; column scalings of all iterations are kept, of a chunk at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.batched.checking import check_logits
from otdd_flash.batched.chunks import (
    Balanced,
    Chunk,
    Derivatives,
    Problems,
    chunk_of,
    computed_in,
    first_scalings,
    grid_of,
    matrices_last,
    on_grid,
    parts,
    present,
    scaled,
    scaling,
    sum_by_halves,
    taken,
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


# Column scalings that are kept in the place of an entry of a matrix.
KEPT_PER_ENTRY = 16


def balance_backward(
    problems: Problems,
    counts: Tensor,
    cotangents: Tensor,
    row_cotangents: Tensor | None,
    column_cotangents: Tensor | None,
) -> Derivatives:
    """Differentiate the iterations of all matrices; arguments as of `small_balance_backward`."""
    matrices = problems.matrices
    count, n, m = matrices.shape
    dtype, masses = computed_in(matrices), 0 if problems.a is None else count
    found = Derivatives(
        matrices.new_empty((count, n, m)),
        matrices.new_empty((count,), dtype=dtype),
        matrices.new_empty((masses, n), dtype=dtype),
        matrices.new_empty((masses, m), dtype=dtype),
    )
    for part in parts(matrices, kept=m * problems.iterations // KEPT_PER_ENTRY):
        chunk = chunk_of(problems, part)
        size = chunk.logits.shape[2]
        made = counts[part] if len(counts) else counts.new_full((size,), problems.iterations)
        given = (
            matrices_last(cotangents[part], dtype),
            *(
                None if given is None else given[part].T.to(dtype) / chunk.scale
                for given in (row_cotangents, column_cotangents)
            ),
        )
        u, v = first_scalings(chunk, torch.zeros_like(chunk.scale))
        kernel = scaled(chunk.logits, u, v, log=True)
        start, ones = (-v.sum(0)).exp(), torch.ones_like(v[0])
        by_logits, by_a, by_b, most = differentiate(chunk, kernel, start, ones, made, given)
        again = in_logs(chunk, kernel, most)
        if bool(again.any()):
            some, of_some = chunk.take(again), tuple(taken(one, again) for one in given)
            grid = grid_of(some.logits)
            some = some._replace(logits=on_grid(some.logits, grid))
            _, v = first_scalings(some, grid)
            by_logits[..., again], by_a[:, again], by_b[:, again], _ = differentiate(
                some, some.logits, torch.zeros_like(v), v, made[again], of_some, grid
            )
        x = matrices_last(matrices[part], dtype)
        signed = by_logits.neg() if problems.negated else by_logits
        found.matrices[part] = (signed * chunk.scale).permute(2, 0, 1)
        finite = torch.where(chunk.logits > -torch.inf, x * signed, 0)
        found.scale[part] = sum_by_halves(sum_by_halves(finite, 1), 0)
        if problems.a is not None:
            found.a[part], found.b[part] = by_a.T, by_b.T
    return found


def differentiate(
    chunk: Chunk,
    kernel: Tensor,
    start: Tensor,
    gamma: Tensor,
    counts: Tensor,
    cotangents: tuple[Tensor | None, ...],
    grid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return derivatives by logits (n, m, s) and both masses, and the largest scalings (s,).

    Backwards through log phi_i = -log sum_j b_j K_ij gamma_j and the same of columns, each of which
    takes its cotangent times the weights of its sum from those of logits and of what it scaled.
    Only column scalings are kept: `start` before, and `gamma` after the first iteration.
    """
    log = grid is not None
    a, b = chunk.masses(log)
    iterations = int(counts.max())
    history, most = [start], kernel.new_zeros(kernel.shape[2])
    phi = scaling(kernel, start, b, 1, chunk.rows, grid)
    for i in range(1, iterations + 1):
        here = counts >= i
        if i > 1:
            phi = torch.where(here, scaling(kernel, history[-1], b, 1, chunk.rows, grid), phi)
            gamma = scaling(kernel, phi, a, 0, chunk.columns, grid)
            most = torch.maximum(most, torch.maximum(phi.amax(-2), gamma.amax(-2)))
        history.append(torch.where(here, gamma, history[-1]))
    given, by_row, by_column = cotangents
    assert given is not None
    by_logits = scaled(kernel, phi, history[-1], log=log).mul_(given)
    one = kernel.new_ones((1, 1))
    mass_a, mass_b = (one if given is None else given for given in (chunk.a, chunk.b))
    by_a = sum_by_halves(by_logits * mass_b, 1)
    by_b = sum_by_halves(by_logits * mass_a[:, None], 0)
    by_logits.mul_(mass_a[:, None]).mul_(mass_b)
    row_extra, column_extra = (0 if extra is None else extra for extra in (by_row, by_column))
    for i in range(iterations, 0, -1):
        here, before = counts >= i, history[i - 1]
        phi = scaling(kernel, before, b, 1, chunk.rows, grid)
        # Sums of what is left, which what was rounded away before is part of.
        left = torch.where(here, sum_by_halves(by_logits.clone(), 0) + column_extra, 0)
        moved = scaled(kernel, phi, history[i], log=log).mul_(left)
        by_logits -= mass_a[:, None] * moved
        by_a -= sum_by_halves(moved, 1)
        left = torch.where(here, sum_by_halves(by_logits.clone(), 1) + row_extra, 0)
        moved = scaled(kernel, phi, before, log=log).mul_(left[:, None])
        by_logits -= mass_b * moved
        by_b -= sum_by_halves(moved, 0)
    return by_logits, present(by_a, chunk.rows), present(by_b, chunk.columns), most
