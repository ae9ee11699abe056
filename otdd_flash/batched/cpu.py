"""Balancing of many small matrices in PyTorch, and its derivative, in chunks that fit a cache.

    R = diag(a o phi) K diag(b o gamma),        K = exp(x / t)
    phi = 1 / (K (b o gamma)),  gamma = 1 / (K^T (a o phi))

with logits x (negated costs, in transport problems), temperature t, and masses a and b, 1 without.
Scalings are relative to a fixed matrix E = exp(x / t + u 1^T + 1 v^T) whose rows and columns, with
masses, have a largest entry of about 1. Exponentials are taken once, and half an iteration is a
product with E and a division.

Entries of E may underflow. Those of R are then computed by logarithms; in sums they are too small
to matter as long as scalings are at most 2^30. A matrix is done again by logarithms throughout if
it lost an entry and a scaling goes beyond 2^30, if any scaling goes beyond 2^48, or, except in the
derivative, if an entry of E or a sum overflows.

`batched.balance` calls `balance` and `balance_backward` if kernels do not run, and allocates what
they fill. `kernels.batched.small_balance` and `tiny_balance`, with their backward passes, make the
same iterations, so a change of these must be made there too. A matrix must get the same bits among
any others (`tests/batched` checks both, of PyTorch and of kernels).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.batched.checking import check_logits
from otdd_flash.batched.chunks import (
    Chunk,
    LogScaling,
    Products,
    Scaling,
    chunk_of,
    grid_of,
    largest,
    on_grid,
    parts,
    present,
    scaled,
    side_by_side,
    sum_by_halves,
    taken,
    with_masses,
)
from otdd_flash.kernels.batched.problems import (
    Balanced,
    Cotangents,
    Derivatives,
    Problems,
    computed_in,
)

# The largest scalings allowed where an entry of E was lost to 0, and where none was: there no
# product of two of them, and of a cotangent, overflows, which a forbidden pair would make NaN.
MOST_SCALING, MOST_WITHOUT_LOSS = 2.0**30, 2.0**48
# Where no entry of E is below it, scalings of a side are within a factor of 1 / SMALL, as are
# phi_i gamma_j <= 1 / E_ij, and neither goes beyond its square.
SMALL = 2.0**-24
# Scalings that are kept in the place of an entry of a matrix.
KEPT_PER_ENTRY = 16

# By logits, by rows and by columns, where there are any, of a chunk.
OfChunk = tuple[Tensor, Tensor | None, Tensor | None]
# phi and gamma of an iteration, and gamma before it.
Step = tuple[Tensor, Tensor, Tensor]


class Anchored(NamedTuple):
    """E (n, m, s) with u (n, s), None for 0, v (m, s), and its smallest entry, 0 if forbidden."""

    kernel: Tensor
    u: Tensor | None
    v: Tensor
    least: float

    def near(self, chunk: Chunk) -> bool:
        """Whether scalings cannot grow beyond their limits."""
        return chunk.a is None and self.least >= SMALL

    def lost(self, chunk: Chunk) -> Tensor | None:
        """Entries (n, m, s) that are lost to 0, or in part; None where none are."""
        tiny = torch.finfo(self.kernel.dtype).tiny
        if self.least >= tiny:
            return None
        return (self.kernel < tiny) & (chunk.logits > -torch.inf)


def balance(problems: Problems, found: Balanced) -> None:
    """Balance all matrices; potentials, errors and iterations where there is room for them."""
    for part in parts(problems.matrices):
        _balance(problems, part, found)


def _balance(problems: Problems, part: slice, found: Balanced) -> None:
    """Balance a chunk and put in the results; its buffers are freed before the next begins."""
    chunk, potentials = chunk_of(problems, part), found.errors.numel() > 0
    anchored = anchor(chunk)
    kernel, u, v, _ = anchored
    # Refused logits end in infinity less infinity.
    if problems.a is None and kernel.device.type == "cpu" and math.isnan(anchored.least):
        check_logits(chunk.highest, v)
    # Times masses before an exponential that may overflow where there are none.
    start = -v if chunk.b is None else chunk.b.log() - v
    near = anchored.near(chunk)
    if near and problems.tolerance is None and not potentials:
        phi, gamma = scalings_alone(kernel, start, problems.iterations)
        # As `scaled`, to where it goes.
        torch.mul(phi[:, None] * gamma, kernel, out=found.matrices[part].permute(1, 2, 0))
        return
    row, column = scalings(chunk, kernel)
    phi, gamma, errors, counts, most = iterate(
        chunk, row, column, row.of(start.exp_()), problems, potentials
    )
    del row, column
    balanced = scaled(
        kernel,
        with_masses(phi, chunk.a, log=False),
        with_masses(gamma, chunk.b, log=False),
        log=False,
    )
    u = torch.stack((torch.zeros_like(phi) if u is None else u, phi.log()))
    v = torch.stack((v, gamma.log()))
    if not near:
        lost = anchored.lost(chunk)
        again = in_logs(lost, most) | overflown(chunk, kernel, phi, gamma)
        _correct(chunk, lost, again, problems, potentials, Balanced(balanced, u, v, errors, counts))
    found.matrices[part] = balanced.permute(2, 0, 1)
    if potentials:
        found.rows[part] = present(u.sum(0) / chunk.scale - chunk.highest, chunk.rows).T
        found.columns[part] = present(v.sum(0) / chunk.scale, chunk.columns).T
        found.errors[part] = errors
    if problems.tolerance is not None:
        found.counts[part] = counts


def scalings_alone(kernel: Tensor, start: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Take the iterations of matrices without masses, of which nothing else is asked for.

    As `iterate` does, from logarithms `start` of column scalings.
    """
    row, column = Products(kernel, 1), Products(kernel, 0)
    torch.exp(start, out=row.numbers)
    for _ in range(iterations):
        torch.reciprocal(row.sums(), out=column.numbers)
        torch.reciprocal(column.sums(), out=row.numbers)
    return column.numbers, row.numbers


def anchor(chunk: Chunk) -> Anchored:
    """Compute E, of which rows and then columns are divided by their largest, with masses.

    That is the sum that the first iteration divides by, but for a factor of n or m.
    """
    log_a, log_b = chunk.log_masses()
    if log_a is None or log_b is None:
        # The largest of a row is 1 already, and that column's as well, which therefore stays.
        u, exponents = None, chunk.logits
        v = largest(exponents, 0).neg_()
    else:
        u = present(largest(chunk.logits + log_b, 1).neg_(), chunk.rows)
        exponents = chunk.logits + u[:, None]
        v = present(largest(exponents + log_a[:, None], 0).neg_(), chunk.columns)
    kernel = (exponents + v).exp_()
    return Anchored(kernel, u, v, float(kernel.amin()))


def _correct(
    chunk: Chunk,
    lost: Tensor | None,
    again: Tensor,
    problems: Problems,
    potentials: bool,
    found: Balanced,
) -> None:
    """Put in results by logarithms: all of problems `again` (s,), lost entries of the others.

    Scalings of `found` are pairs here.
    """
    balanced, u, v, errors, counts = found
    which = again if lost is None else again | lost.flatten(0, 1).any(0)
    if not bool(which.any()):
        return
    some = chunk.take(which)
    if bool(again.any()):
        grid = torch.where(again[which], grid_of(some.logits), 0)
        some = some._replace(logits=on_grid(some.logits, grid))
        whole, grid = some.take(again[which]), grid[again[which]]
        row, column, start = logarithmic(whole, grid)
        logs = iterate(whole, row, column, row(start), problems, potentials)
        u[..., again], v[..., again], errors[again], counts[again], _ = logs
    log_a, log_b = some.log_masses()
    exact = scaled(
        some.logits,
        with_masses(u[..., which], log_a, log=True),
        with_masses(v[..., which], log_b, log=True),
        log=True,
    )
    by_logs = again[which] if lost is None else again[which] | lost[..., which]
    balanced[..., which] = torch.where(by_logs, exact, balanced[..., which])


def scalings(chunk: Chunk, kernel: Tensor) -> tuple[Scaling, Scaling]:
    """Scalings of rows and of columns, of E."""
    row = Scaling(Products(kernel, 1), chunk.b, chunk.rows)
    return row, Scaling(Products(kernel, 0), chunk.a, chunk.columns)


def logarithmic(chunk: Chunk, grid: Tensor) -> tuple[LogScaling, LogScaling, Tensor]:
    """Scalings of rows and of columns by logarithms, and those of columns to begin with."""
    log_a, log_b = chunk.log_masses()
    row = LogScaling(chunk.logits, 1, log_b, chunk.rows, grid)
    column = LogScaling(chunk.logits, 0, log_a, chunk.columns, grid)
    return row, column, chunk.logits.new_zeros((2, *chunk.logits.shape[1:]))


def iterate(
    chunk: Chunk,
    row: Scaling | LogScaling,
    column: Scaling | LogScaling,
    phi: Tensor,
    problems: Problems,
    potentials: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Take all iterations, of which `phi` (n, s) is the first half.

    Returns phi, gamma (m, s), errors (s,), iterations (s,) and the largest scalings (s,).
    """
    tolerance, count, log = problems.tolerance, chunk.logits.shape[2], phi.ndim == 3
    active = torch.ones(count, dtype=torch.bool, device=phi.device)
    counts = torch.ones(count, dtype=torch.int32, device=phi.device)
    errors = phi.new_zeros(count)
    gamma = column(phi)
    most_row, most_column = phi.clone(), gamma.clone()
    for i in range(1, problems.iterations + 1):
        last = i == problems.iterations
        if last and tolerance is None and not potentials:
            break
        next_phi = row(gamma)
        if last or tolerance is not None:
            errors = torch.where(active, row_errors(chunk, phi, next_phi, log=log), errors)
        if tolerance is not None:
            # NaN is not above the tolerance, and ends its matrix.
            active = active & (errors > tolerance)
            if not bool(active.any()):
                break
        if last:
            break
        next_gamma = column(next_phi)
        if tolerance is None:
            phi, gamma = next_phi, next_gamma
        else:
            phi = torch.where(active, next_phi, phi)
            gamma = torch.where(active, next_gamma, gamma)
            counts += active
        torch.maximum(most_row, phi, out=most_row)
        torch.maximum(most_column, gamma, out=most_column)
    most = torch.maximum(most_row.amax(-2), most_column.amax(-2))
    return phi, gamma, errors, counts, most


def row_errors(chunk: Chunk, phi: Tensor, following: Tensor, *, log: bool) -> Tensor:
    """Return how far row sums are from a (s,): the largest deviation, or with masses their sum.

    The row sums are a o phi over the scalings that follow.
    """
    ratio = (phi - following).sum(0).exp() if log else phi / following
    deviation = present((ratio - 1).abs(), chunk.rows)
    if chunk.a is None:
        return deviation.amax(0)
    # The ratio of a row without mass may be infinite.
    return sum_by_halves(torch.where(chunk.a > 0, deviation * chunk.a, 0), 0)


def in_logs(lost: Tensor | None, most: Tensor) -> Tensor:
    """Which problems (s,) are done again by logarithms, by the largest of their scalings."""
    if lost is None:
        limit = most.new_full((), MOST_WITHOUT_LOSS)
    else:
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


def balance_backward(
    problems: Problems, counts: Tensor, given: Cotangents, found: Derivatives
) -> None:
    """Differentiate the iterations of all matrices; arguments as of `small_balance_backward`."""
    matrices, dtype = problems.matrices, computed_in(problems.matrices)
    kept = sum(matrices.shape[1:]) * problems.iterations // KEPT_PER_ENTRY
    for part in parts(matrices, kept=kept):
        chunk = chunk_of(problems, part)
        made = counts[part] if len(counts) else None
        by_row, by_column = (
            None if one is None else one[part].T.to(dtype) / chunk.scale
            for one in (given.rows, given.columns)
        )
        cotangents = side_by_side(given.matrices[part], dtype), by_row, by_column
        by_logits, by_a, by_b = _differentiate(chunk, problems.iterations, made, cotangents)
        if found.scale.numel() > 0:
            x = side_by_side(matrices[part], dtype)
            paid = torch.where(chunk.logits > -torch.inf, x * by_logits, 0)
            total = sum_by_halves(sum_by_halves(paid, 1), 0)
            found.scale[part] = -total if problems.negated else total
        by_logits.mul_(-chunk.scale if problems.negated else chunk.scale)
        found.matrices[part] = by_logits.permute(2, 0, 1)
        if by_a is not None and by_b is not None:
            found.a[part] = present(by_a, chunk.rows).T
            found.b[part] = present(by_b, chunk.columns).T


def _differentiate(chunk: Chunk, iterations: int, made: Tensor | None, given: OfChunk) -> OfChunk:
    """Return the derivatives by logits (n, m, s), and by row and column masses if there are.

    Args:
        chunk: the problems.
        iterations: how many are made at the most.
        made: how many of each problem (s,), None for all.
        given: cotangents of R, of log phi and of log gamma.
    """
    anchored = anchor(chunk)
    kernel = anchored.kernel
    row, column = scalings(chunk, kernel)
    steps = _steps(row, column, (-anchored.v).exp_(), iterations, made)
    left = Left(chunk, kernel, steps[-1], given)
    left.through_scalings(kernel, row, column, steps, made)
    found = left.by_logits, left.by_a, left.by_b
    if anchored.near(chunk):
        return found
    most = torch.stack([torch.maximum(phi.amax(0), gamma.amax(0)) for phi, gamma, _ in steps])
    again = in_logs(anchored.lost(chunk), most.amax(0))
    if bool(again.any()):
        some, made = chunk.take(again), taken(made, again)
        grid = grid_of(some.logits)
        some = some._replace(logits=on_grid(some.logits, grid))
        steps = _steps(*logarithmic(some, grid), iterations, made)
        of_some = taken(given[0], again), taken(given[1], again), taken(given[2], again)
        left = Left(some, some.logits, steps[-1], of_some)
        for i in range(len(steps) - 1, 0, -1):
            left.through(some.logits, steps[i - 1], None if made is None else made > i)
        for into, part in zip(found, (left.by_logits, left.by_a, left.by_b), strict=True):
            if into is not None and part is not None:
                into[..., again] = part
    return found


def _steps(
    row: Scaling | LogScaling,
    column: Scaling | LogScaling,
    start: Tensor,
    iterations: int,
    made: Tensor | None,
) -> list[Step]:
    """Take the iterations from column scalings `start`; a problem stays where it was left."""
    steps: list[Step] = []
    gamma = start
    for i in range(iterations if made is None else int(made.max())):
        phi = row(gamma)
        step = phi, column(phi), gamma
        if made is not None and i > 0:
            phi, gamma, before = (
                torch.where(made > i, new, old) for new, old in zip(step, steps[-1], strict=True)
            )
            step = phi, gamma, before
        steps.append(step)
        gamma = step[1]
    return steps


class Left:
    """The remaining cotangents on the way back through the iterations.

    log phi_i = -log sum_j b_j K_ij gamma_j takes its cotangent times the weights of its sum from
    those of logits, of masses and of the scalings in its sum; so does log gamma_j.

    Attributes:
        by_logits: of logits (n, m, s).
        by_a: of row masses (n, s); None where they are 1.
        by_b: of column masses (m, s); None where they are 1.
    """

    def __init__(self, chunk: Chunk, kernel: Tensor, last: Step, given: OfChunk) -> None:
        """Go back through R and through the last iteration of each problem."""
        self._a, self._b = chunk.a, chunk.b
        by_matrix, self._by_row, self._by_column = given
        phi, gamma, _ = last
        self.by_logits = scaled(kernel, phi, gamma, log=phi.ndim == 3).mul_(by_matrix)
        self.by_a = self.by_b = None
        if chunk.a is not None and chunk.b is not None:
            self.by_a = sum_by_halves(self.by_logits * chunk.b, 1)
            self.by_b = sum_by_halves(self.by_logits * chunk.a[:, None], 0)
            self.by_logits.mul_(chunk.a[:, None]).mul_(chunk.b)
        self.through(kernel, last, None)

    def through(self, kernel: Tensor, step: Step, here: Tensor | None) -> None:
        """Go back through an iteration of the problems `here` (s,), by all weights of its sums."""
        phi, gamma, before = step
        log = phi.ndim == 3
        given = present(self._sums(0, self._by_column), here)
        moved = scaled(kernel, phi, gamma, log=log).mul_(given)
        self.by_logits -= moved if self._a is None else self._a[:, None] * moved
        if self.by_a is not None:
            self.by_a -= sum_by_halves(moved, 1)
        given = present(self._sums(1, self._by_row), here)
        moved = scaled(kernel, phi, before, log=log).mul_(given[:, None])
        self.by_logits -= moved if self._b is None else self._b * moved
        if self.by_b is not None:
            self.by_b -= sum_by_halves(moved, 0)

    def _sums(self, dim: int, outside: Tensor | None) -> Tensor:
        """Return the cotangents of the scalings of a side, which include earlier roundings."""
        sums = sum_by_halves(self.by_logits.clone(), dim)
        return sums if outside is None else sums + outside

    def through_scalings(
        self,
        kernel: Tensor,
        row: Scaling,
        column: Scaling,
        steps: list[Step],
        made: Tensor | None,
    ) -> None:
        """Go back through all iterations but the last, by products with E but for the first.

        There only scalings pass a cotangent on, q_k that of log gamma_k and p_k that of log phi_k,

            p_k = -a o phi_k o E (gamma_k o q_k),   q_k-1 = -b o gamma_k-1 o E^T (phi_k o p_k)

        and logits lose E o sum_k (a o phi_k) (gamma_k o q_k)^T + (phi_k o p_k) (b o gamma_k-1)^T.
        Near a permutation little is left of large numbers: the first iteration, with all weights,
        takes their roundings.
        """
        if len(steps) == 1:
            return
        share, given = torch.zeros_like(kernel), self._sums(0, self._by_column)
        for i in range(len(steps) - 1, 1, -1):
            phi, gamma, before = steps[i - 1]
            here = None if made is None else made > i
            by_column = present(gamma * given, here)
            moved = phi * row.products(by_column)
            if self.by_a is not None:
                self.by_a -= moved
            phi = with_masses(phi, self._a, log=False)
            share.addcmul_(phi[:, None], by_column)
            # -phi_k o p_k; the signs of the next terms are opposite as well.
            by_row = phi * moved
            moved = before * column.products(by_row)
            if self.by_b is not None:
                self.by_b += moved
            share.addcmul_(by_row[:, None], with_masses(before, self._b, log=False), value=-1)
            moved = with_masses(moved, self._b, log=False)
            given = moved if here is None else torch.where(here, moved, given)
        self.by_logits.addcmul_(kernel, share, value=-1)
        self.through(kernel, steps[0], None if made is None else made > 1)
