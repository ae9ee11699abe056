"""Balancing of many small matrices in PyTorch, and its derivative, in chunks that fit a cache.

    R = diag(a o phi) K diag(b o gamma),        K = exp(x / t)
    phi = 1 / (K (b o gamma)),  gamma = 1 / (K^T (a o phi))

Scalings are relative to a fixed matrix E = exp(x / t + u 1^T + 1 v^T) whose rows and columns, with
masses, have a largest entry of about 1. Exponentials are taken once, and half an iteration is a
product with E and a division.

An entry of E may be lost to 0. Those of R are then put in by logarithms, and are too small to be
missed in a sum as long as scalings are up to 2^30. A matrix whose scalings go beyond that, and one
that lost nothing whose scalings go beyond 2^48, is done again by logarithms throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.batched.checking import check_logits
from otdd_flash.batched.chunks import (
    Balanced,
    Chunk,
    Derivatives,
    LogScaling,
    Problems,
    Products,
    Scaling,
    chunk_of,
    computed_in,
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

# What scalings may grow to where an entry of E was lost to 0, and where none was: there no product
# of two of them, and of a cotangent, overflows, which a forbidden pair would make NaN.
MOST_SCALING, MOST_WITHOUT_LOSS = 2.0**30, 2.0**48
# Where no entry of E is below it, scalings of a side are within a factor of 1 / SMALL, as are
# phi_i gamma_j <= 1 / E_ij, and neither goes beyond its square.
SMALL = 2.0**-24
# Scalings that are kept in the place of an entry of a matrix.
KEPT_PER_ENTRY = 16

Cotangents = tuple[Tensor, Tensor | None, Tensor | None]


class Anchored(NamedTuple):
    """E (n, m, s) with u (n, s), None for 0, v (m, s), and its smallest entry, 0 if forbidden."""

    kernel: Tensor
    u: Tensor | None
    v: Tensor
    least: float

    def near(self, chunk: Chunk) -> bool:
        """Whether scalings cannot grow beyond what they may."""
        return chunk.a is None and self.least >= SMALL

    def lost(self, chunk: Chunk) -> Tensor | None:
        """Entries (n, m, s) that are lost to 0, or in part; None where none are."""
        tiny = torch.finfo(self.kernel.dtype).tiny
        if self.least >= tiny:
            return None
        return (self.kernel < tiny) & (chunk.logits > -torch.inf)


class Iterated(NamedTuple):
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
        _balance(problems, part, potentials, found)
    return found


def _balance(problems: Problems, part: slice, potentials: bool, found: Balanced) -> None:
    """Balance a chunk and put in what is found; what is held ends before the next begins."""
    chunk = chunk_of(problems, part)
    anchored = anchor(chunk)
    kernel, u, v, _ = anchored
    # What is refused ends in infinity less infinity.
    if problems.a is None and kernel.device.type == "cpu" and math.isnan(anchored.least):
        check_logits(chunk.highest, v)
    # Times masses before an exponential that may overflow where there are none.
    start = -v if chunk.b is None else chunk.b.log() - v
    near = anchored.near(chunk)
    if near and problems.tolerance is None and not potentials:
        phi, gamma = scalings_alone(kernel, start, problems.iterations)
        found.matrices[part] = scaled(kernel, phi, gamma, log=False).permute(2, 0, 1)
        return
    row = Scaling(kernel, 1, chunk.b, chunk.rows)
    column = Scaling(kernel, 0, chunk.a, chunk.columns)
    phi, gamma, errors, counts, most = iterate(
        chunk, row, column, row.of(start.exp_()), problems, potentials, watched=not near
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
    """Put in the logarithms': all of what is done `again` (s,), and what is lost of the rest.

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
        u[..., again], v[..., again] = logs.phi, logs.gamma
        errors[again], counts[again] = logs.errors, logs.counts
    log_a, log_b = some.log_masses()
    exact = scaled(
        some.logits,
        with_masses(u[..., which], log_a, log=True),
        with_masses(v[..., which], log_b, log=True),
        log=True,
    )
    by_logs = again[which] if lost is None else again[which] | lost[..., which]
    balanced[..., which] = torch.where(by_logs, exact, balanced[..., which])


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
    watched: bool = False,
) -> Iterated:
    """Take all iterations, of which `phi` is the first half; `watched`, record the largest."""
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
        if watched:
            torch.maximum(most_row, phi, out=most_row)
            torch.maximum(most_column, gamma, out=most_column)
    most = torch.maximum(most_row.amax(-2), most_column.amax(-2))
    return Iterated(phi, gamma, errors, counts, most)


def row_errors(chunk: Chunk, phi: Tensor, following: Tensor, *, log: bool) -> Tensor:
    """|R 1 - a| (s,): the row sums are a o phi over the scalings that follow."""
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
    problems: Problems,
    counts: Tensor,
    cotangents: Tensor,
    row_cotangents: Tensor | None,
    column_cotangents: Tensor | None,
    *,
    with_scale: bool,
) -> Derivatives:
    """Differentiate the iterations of all matrices; arguments as of `small_balance_backward`.

    The derivative by 1 / t is empty unless it is asked for.
    """
    matrices = problems.matrices
    count, n, m = matrices.shape
    dtype, masses = computed_in(matrices), 0 if problems.a is None else count
    found = Derivatives(
        matrices.new_empty((count, n, m)),
        matrices.new_empty((count if with_scale else 0,), dtype=dtype),
        matrices.new_empty((masses, n), dtype=dtype),
        matrices.new_empty((masses, m), dtype=dtype),
    )
    for part in parts(matrices, kept=(n + m) * problems.iterations // KEPT_PER_ENTRY):
        chunk = chunk_of(problems, part)
        made = counts[part] if len(counts) else None
        by_row, by_column = (
            None if given is None else given[part].T.to(dtype) / chunk.scale
            for given in (row_cotangents, column_cotangents)
        )
        given = side_by_side(cotangents[part], dtype), by_row, by_column
        left = _differentiate(chunk, problems.iterations, made, given)
        by_logits = left.by_logits
        if with_scale:
            x = side_by_side(matrices[part], dtype)
            paid = torch.where(chunk.logits > -torch.inf, x * by_logits, 0)
            total = sum_by_halves(sum_by_halves(paid, 1), 0)
            found.scale[part] = -total if problems.negated else total
        by_logits.mul_(-chunk.scale if problems.negated else chunk.scale)
        found.matrices[part] = by_logits.permute(2, 0, 1)
        if left.by_a is not None and left.by_b is not None:
            found.a[part] = present(left.by_a, chunk.rows).T
            found.b[part] = present(left.by_b, chunk.columns).T
    return found


def _differentiate(chunk: Chunk, iterations: int, made: Tensor | None, given: Cotangents) -> Left:
    """Go back through all iterations of a chunk, to what is left by logits and masses.

    Args:
        chunk: the problems.
        iterations: how many are made at the most.
        made: how many of each problem (s,), None for all.
        given: cotangents of R, of log phi and of log gamma.
    """
    anchored = anchor(chunk)
    row = Scaling(anchored.kernel, 1, chunk.b, chunk.rows)
    column = Scaling(anchored.kernel, 0, chunk.a, chunk.columns)
    history = History.of(row, column, (-anchored.v).exp_(), iterations, made)
    left = Left.of(chunk, anchored.kernel, history, given)
    left.through_scalings(anchored.kernel, row, column, history)
    if anchored.near(chunk):
        return left
    again = in_logs(anchored.lost(chunk), history.most())
    if bool(again.any()):
        some = chunk.take(again)
        grid = grid_of(some.logits)
        some = some._replace(logits=on_grid(some.logits, grid))
        log_row, log_column, start = logarithmic(some, grid)
        history = History.of(log_row, log_column, start, iterations, taken(made, again))
        of_some = taken(given[0], again), taken(given[1], again), taken(given[2], again)
        other = Left.of(some, some.logits, history, of_some)
        for i in range(len(history.steps) - 1, 0, -1):
            other.through(some.logits, *history.step(i), history.here(i))
        left.put_in(other, again)
    return left


@dataclass
class History:
    """Scalings of all iterations, or pairs of their logarithms.

    Attributes:
        steps: phi of each iteration, and gamma before it.
        last: phi and gamma of the last of each problem, and gamma before it.
        made: iterations of each problem (s,), None for all.
    """

    steps: list[tuple[Tensor, Tensor]]
    last: tuple[Tensor, Tensor, Tensor]
    made: Tensor | None

    @staticmethod
    def of(
        row: Scaling | LogScaling,
        column: Scaling | LogScaling,
        start: Tensor,
        iterations: int,
        made: Tensor | None,
    ) -> History:
        """Take the iterations again, from the column scalings `start`."""
        phi = row(start)
        steps, last = [(phi, start)], (phi, column(phi), start)
        for i in range(2, (iterations if made is None else int(made.max())) + 1):
            before = last[1]
            phi = row(before)
            steps.append((phi, before))
            reached = phi, column(phi), before
            if made is not None:
                phi, gamma, before = (
                    torch.where(made >= i, new, old) for new, old in zip(reached, last, strict=True)
                )
                reached = phi, gamma, before
            last = reached
        return History(steps, last, made)

    def step(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return phi and gamma of iteration `i`, which is not the last, and gamma before it."""
        phi, before = self.steps[i - 1]
        return phi, self.steps[i][1], before

    def here(self, i: int) -> Tensor | None:
        """Return which problems (s,) went on after iteration `i`; None for all."""
        return None if self.made is None else self.made > i

    def most(self) -> Tensor:
        """Return the largest scalings of each problem (s,)."""
        phi, gamma, _ = self.last
        for row, column in self.steps[1:]:
            phi, gamma = torch.maximum(phi, row), torch.maximum(gamma, column)
        return torch.maximum(phi.amax(0), gamma.amax(0))


@dataclass
class Left:
    """What is left of the cotangents on the way back through the iterations.

    log phi_i = -log sum_j b_j K_ij gamma_j takes its cotangent times the weights of its sum from
    those of logits, of masses and of what it scaled; so does log gamma_j.

    Attributes:
        by_logits: of logits (n, m, s).
        by_a: of row masses (n, s); None where they are 1.
        by_b: of column masses (m, s), likewise.
        by_row: of log phi (n, s), from outside; 0 for none.
        by_column: of log gamma (m, s), likewise.
        a: row masses, None for 1.
        b: column masses, likewise.
    """

    by_logits: Tensor
    by_a: Tensor | None
    by_b: Tensor | None
    by_row: Tensor | int
    by_column: Tensor | int
    a: Tensor | None
    b: Tensor | None

    @staticmethod
    def of(chunk: Chunk, kernel: Tensor, history: History, given: Cotangents) -> Left:
        """Go back through R and through the last iteration of each problem."""
        by_matrix, by_row, by_column = given
        phi, gamma, before = history.last
        by_logits = scaled(kernel, phi, gamma, log=phi.ndim == 3).mul_(by_matrix)
        by_a = by_b = None
        if chunk.a is not None and chunk.b is not None:
            by_a = sum_by_halves(by_logits * chunk.b, 1)
            by_b = sum_by_halves(by_logits * chunk.a[:, None], 0)
            by_logits.mul_(chunk.a[:, None]).mul_(chunk.b)
        left = Left(
            by_logits,
            by_a,
            by_b,
            0 if by_row is None else by_row,
            0 if by_column is None else by_column,
            chunk.a,
            chunk.b,
        )
        left.through(kernel, phi, gamma, before, None)
        return left

    def through(
        self, kernel: Tensor, phi: Tensor, gamma: Tensor, before: Tensor, here: Tensor | None
    ) -> None:
        """Go back through an iteration of the problems `here` (s,), by all weights of its sums."""
        log = phi.ndim == 3
        moved = scaled(kernel, phi, gamma, log=log).mul_(present(self.column_cotangent(), here))
        self.by_logits -= moved if self.a is None else self.a[:, None] * moved
        if self.by_a is not None:
            self.by_a -= sum_by_halves(moved, 1)
        given = sum_by_halves(self.by_logits.clone(), 1) + self.by_row
        moved = scaled(kernel, phi, before, log=log).mul_(present(given, here)[:, None])
        self.by_logits -= moved if self.b is None else self.b * moved
        if self.by_b is not None:
            self.by_b -= sum_by_halves(moved, 0)

    def column_cotangent(self) -> Tensor:
        """Return the cotangent of log gamma (m, s) of the iteration that is next.

        It sums up what is left, which what was rounded away before is part of.
        """
        return sum_by_halves(self.by_logits.clone(), 0) + self.by_column

    def through_scalings(
        self, kernel: Tensor, row: Scaling, column: Scaling, history: History
    ) -> None:
        """Go back through all iterations but the last, by products with E but for the first.

        There only scalings pass a cotangent on, q_k that of log gamma_k and p_k that of log phi_k,

            p_k = -a o phi_k o E (gamma_k o q_k),   q_k-1 = -b o gamma_k-1 o E^T (phi_k o p_k)

        and logits lose E o sum_k (a o phi_k) (gamma_k o q_k)^T + (phi_k o p_k) (b o gamma_k-1)^T.
        Near a permutation little is left of large numbers: the first iteration, with all weights,
        takes what they were rounded by.
        """
        if len(history.steps) == 1:
            return
        share, given = torch.zeros_like(kernel), self.column_cotangent()
        for i in range(len(history.steps) - 1, 1, -1):
            phi, gamma, before = history.step(i)
            here = history.here(i)
            by_column = present(gamma * given, here)
            moved = phi * row.products(by_column)
            if self.by_a is not None:
                self.by_a -= moved
            phi = with_masses(phi, self.a, log=False)
            share.addcmul_(phi[:, None], by_column)
            # -phi_k o p_k; the signs of what follows are opposite as well.
            by_row = phi * moved
            moved = before * column.products(by_row)
            if self.by_b is not None:
                self.by_b += moved
            share.addcmul_(by_row[:, None], with_masses(before, self.b, log=False), value=-1)
            moved = with_masses(moved, self.b, log=False)
            given = moved if here is None else torch.where(here, moved, given)
        self.by_logits.addcmul_(kernel, share, value=-1)
        self.through(kernel, *history.step(1), history.here(1))

    def put_in(self, other: Left, which: Tensor) -> None:
        """Put in what is left of some problems (s,)."""
        self.by_logits[..., which] = other.by_logits
        for into, part in ((self.by_a, other.by_a), (self.by_b, other.by_b)):
            if into is not None and part is not None:
                into[..., which] = part
