"""The derivative of `otdd_flash.batched.cpu` by the iterations made, chunk by chunk.

`otdd_flash.kernels.batched.small_balance_backward` has the formulas. Column scalings of all
iterations are kept, of a chunk at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.batched.chunks import Chunk, chunk_of, matrices_last, parts, present, taken
from otdd_flash.batched.cpu import in_logs
from otdd_flash.batched.problems import Derivatives, Problems, computed_in
from otdd_flash.batched.scalings import (
    first_scalings,
    grid_of,
    on_grid,
    scaled,
    scaling,
    sum_by_halves,
)

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
