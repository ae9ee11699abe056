"""Balancing of many small matrices in PyTorch, and its derivative, in chunks that fit a cache.

`otdd_flash.kernels.batched.small_balance` says what is computed and how: the first iteration in
the log domain, scalings of a fixed matrix from there on, and the log domain throughout for
matrices where underflow could matter. Matrices stand along the last dimension of a chunk, (n, m,
s), so that operations run along them whatever their shape, and sums have an order that their
length decides.

With `log` a kernel, masses and scalings are natural logarithms, else they are themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.batched.adjoint import ENTRIES_AT_ONCE

# What scalings may grow to where an entry of the fixed matrix was lost to 0.
MOST_SCALING = 2.0**30
# Terms that are summed up one after the other.
MOST_IN_ORDER = 8


class Problems(NamedTuple):
    """Matrices to balance.

    Attributes:
        matrices: x (B, n, m), or -x if `negated`.
        scale: 1 / t, (B,) or () float64.
        a: (B, n) or (n,) masses; None for 1.
        b: (B, m) or (m,), likewise.
        sizes: (B, 2) int32, rows and columns that there are; None for all.
        iterations: at least 1; with a tolerance the most there may be.
        tolerance: of |R 1 - a|, summed up with masses, else its largest; None for all iterations.
        negated: whether `matrices` holds -x.
    """

    matrices: Tensor
    scale: Tensor
    a: Tensor | None
    b: Tensor | None
    sizes: Tensor | None
    iterations: int
    tolerance: float | None
    negated: bool


class Balanced(NamedTuple):
    """R (B, n, m); t log phi (B, n), t log gamma (B, m), errors (B,); iterations (B,) int32."""

    matrices: Tensor
    rows: Tensor
    columns: Tensor
    errors: Tensor
    counts: Tensor


class Derivatives(NamedTuple):
    """By matrices (B, n, m), by 1 / t (B,), by a (B, n) and by b (B, m)."""

    matrices: Tensor
    scale: Tensor
    a: Tensor
    b: Tensor


class Chunk(NamedTuple):
    """Problems (n, m, s) side by side.

    Attributes:
        logits: (x - h 1^T) / t, at most 0 (n, m, s).
        highest: h (n, s), the largest of each row of x.
        scale: 1 / t (s,).
        a: (n, s) or (n, 1).
        b: (m, s) or (m, 1).
        uniform: whether all masses are 1.
        rows: which there are (n, s), None for all.
        columns: likewise (m, s).
    """

    logits: Tensor
    highest: Tensor
    scale: Tensor
    a: Tensor
    b: Tensor
    uniform: bool
    rows: Tensor | None
    columns: Tensor | None

    def take(self, which: Tensor) -> Chunk:
        """Some of its problems."""

        def taken(values: Any) -> Any:
            if not isinstance(values, Tensor) or values.shape[-1] == 1 != len(which):
                return values
            return values[..., which]

        return Chunk(*(taken(values) for values in self))

    def masses(self, log: bool) -> tuple[Tensor | None, Tensor | None]:
        """Both masses, or their logarithms; None where all are 1."""
        if self.uniform:
            return None, None
        return (self.a.log(), self.b.log()) if log else (self.a, self.b)


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
        u, v = first_scalings(chunk)
        kernel = (chunk.logits + u[:, None] + v).exp_()
        lost = (kernel < torch.finfo(dtype).tiny) & (chunk.logits > -torch.inf)
        lost = lost.flatten(0, 1).any(0)
        scalings = iterate(
            chunk, kernel, torch.ones_like(u), torch.ones_like(v), problems, potentials=potentials
        )
        again = in_logs(lost, scalings.most)
        if potentials:
            u += scalings.phi.log()
            v += scalings.gamma.log()
        balanced = kernel.mul_((chunk.a * scalings.phi)[:, None]).mul_(chunk.b * scalings.gamma)
        errors, counts = scalings.errors, scalings.counts
        if bool(again.any()):
            some = chunk.take(again)
            logs = iterate(
                some, some.logits, *first_scalings(some), problems, potentials=potentials, log=True
            )
            log_a, log_b = some.a.log(), some.b.log()
            exponents = some.logits + (logs.phi + log_a)[:, None] + (logs.gamma + log_b)
            balanced[..., again] = exponents.exp()
            u[:, again], v[:, again] = logs.phi, logs.gamma
            errors[again], counts[again] = logs.errors, logs.counts
        found.matrices[part] = balanced.permute(2, 0, 1)
        if potentials:
            found.rows[part] = present(u / chunk.scale - chunk.highest, chunk.rows).T
            found.columns[part] = present(v / chunk.scale, chunk.columns).T
            found.errors[part] = errors
        if stops:
            found.counts[part] = counts
    return found


def unrolled(
    problems: Problems,
    counts: Tensor,
    cotangents: Tensor,
    row_cotangents: Tensor | None,
    column_cotangents: Tensor | None,
) -> Derivatives:
    """The derivative of the iterations made; arguments as of `small_balance_backward`."""
    matrices = problems.matrices
    count, n, m = matrices.shape
    dtype = computed_in(matrices)
    found = Derivatives(
        matrices.new_empty((count, n, m)),
        matrices.new_empty((count,), dtype=dtype),
        matrices.new_empty((count, n), dtype=dtype),
        matrices.new_empty((count, m), dtype=dtype),
    )
    for part in parts(matrices):
        chunk = chunk_of(problems, part)
        made = counts[part] if len(counts) else torch.full_like(chunk.scale, problems.iterations)
        given = cotangents[part].permute(1, 2, 0).to(dtype).contiguous()
        by_row, by_column = (
            None if given is None else given[part].T.to(dtype) / chunk.scale
            for given in (row_cotangents, column_cotangents)
        )
        u, v = first_scalings(chunk)
        kernel = (chunk.logits + u[:, None] + v).exp_()
        lost = (kernel < torch.finfo(dtype).tiny) & (chunk.logits > -torch.inf)
        results = differentiate(chunk, kernel, (-v).exp(), torch.ones_like(v), made,
                                (given, by_row, by_column))  # fmt: skip
        again = in_logs(lost.flatten(0, 1).any(0), results[3])
        by_logits, by_a, by_b, _ = results
        if bool(again.any()):
            some = chunk.take(again)
            u, v = first_scalings(some)
            of_some = tuple(
                None if one is None else one[..., again] for one in (given, by_row, by_column)
            )
            by_logits[..., again], by_a[:, again], by_b[:, again], _ = differentiate(
                some, some.logits, torch.zeros_like(v), v, made[again], of_some, log=True
            )
        x = matrices[part].permute(1, 2, 0).to(dtype)
        signed = by_logits.neg() if problems.negated else by_logits
        found.matrices[part] = (signed * chunk.scale).permute(2, 0, 1)
        finite = torch.where(chunk.logits > -torch.inf, x * signed, 0)
        found.scale[part] = sum_by_halves(sum_by_halves(finite, 1), 0)
        found.a[part], found.b[part] = by_a.T, by_b.T
    return found


def differentiate(
    chunk: Chunk,
    kernel: Tensor,
    start: Tensor,
    gamma: Tensor,
    counts: Tensor,
    cotangents: tuple[Tensor | None, ...],
    log: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """By logits (n, m, s), masses (n, s) and (m, s); and the largest scalings.

    Backwards through log phi_i = -log sum_j b_j K_ij gamma_j and the same of columns, each of which
    takes its cotangent times the weights of its sum from those of logits and of what it scaled.
    Only column scalings are kept: `start` before, and `gamma` after the first iteration.
    """
    a, b = chunk.masses(log)
    most_made = int(counts.max())
    history, most = [start], torch.zeros_like(chunk.scale)
    for i in range(1, most_made + 1):
        phi = scaling(kernel, history[-1], b, 1, chunk.rows, log)
        after = gamma if i == 1 else scaling(kernel, phi, a, 0, chunk.columns, log)
        after = torch.where(counts >= i, after, history[-1])
        history.append(after)
        if i > 1:
            most = torch.maximum(most, torch.maximum(phi.amax(0), after.amax(0)))
            most = most + 0 * sum_by_halves(phi.clone(), 0)
    gamma = history[-1]
    phi = scaling(kernel, last_before(history, counts), b, 1, chunk.rows, log)
    given, by_row, by_column = cotangents
    assert given is not None
    unit = weights(kernel, phi, gamma, log)
    by_a = sum_by_halves(unit * chunk.b * given, 1)
    by_b = sum_by_halves(unit * chunk.a[:, None] * given, 0)
    by_logits = unit.mul_(chunk.a[:, None]).mul_(chunk.b).mul_(given)
    row_extra, column_extra = (0 if extra is None else extra for extra in (by_row, by_column))
    for i in range(most_made, 0, -1):
        here, before = counts >= i, history[i - 1]
        phi = scaling(kernel, before, b, 1, chunk.rows, log)
        # Sums of what is left, which what was rounded away before is part of.
        left = torch.where(here, sum_by_halves(by_logits.clone(), 0) + column_extra, 0)
        moved = weights(kernel, phi, history[i], log).mul_(left)
        by_logits -= chunk.a[:, None] * moved
        by_a -= sum_by_halves(moved, 1)
        left = torch.where(here, sum_by_halves(by_logits.clone(), 1) + row_extra, 0)
        moved = weights(kernel, phi, before, log).mul_(left[:, None])
        by_logits -= chunk.b * moved
        by_b -= sum_by_halves(moved, 0)
    return by_logits, present(by_a, chunk.rows), present(by_b, chunk.columns), most


def last_before(history: list[Tensor], counts: Tensor) -> Tensor:
    """The column scalings (m, s) before the last iteration of each problem."""
    return torch.stack(history).gather(0, (counts.long() - 1).expand_as(history[0])[None])[0]


def weights(kernel: Tensor, phi: Tensor, gamma: Tensor, log: bool) -> Tensor:
    """Phi_i K_ij gamma_j (n, m, s), themselves with `log` as well."""
    if log:
        return (kernel + phi[:, None] + gamma).exp_()
    return kernel * phi[:, None] * gamma


def iterate(
    chunk: Chunk,
    kernel: Tensor,
    phi: Tensor,
    gamma: Tensor,
    problems: Problems,
    *,
    potentials: bool,
    log: bool = False,
) -> Scalings:
    """All iterations but the first."""
    a, b = chunk.masses(log)
    stops = problems.tolerance is not None
    active = torch.ones_like(chunk.scale, dtype=torch.bool)
    counts = torch.ones_like(chunk.scale, dtype=torch.int32)
    errors = torch.zeros_like(chunk.scale)
    most_row, most_column = phi.clone(), gamma.clone()
    for i in range(1, problems.iterations + 1):
        last = i == problems.iterations
        if last and not stops and not potentials:
            break
        next_phi = scaling(kernel, gamma, b, 1, chunk.rows, log)
        if stops or last:
            errors = torch.where(active, row_errors(chunk, phi, next_phi, problems, log), errors)
        if problems.tolerance is not None:
            # NaN is not above the tolerance, and ends its matrix.
            active = active & (errors > problems.tolerance)
            if not bool(active.any()):
                break
        if last:
            break
        next_gamma = scaling(kernel, next_phi, a, 0, chunk.columns, log)
        phi = torch.where(active, next_phi, phi) if stops else next_phi
        gamma = torch.where(active, next_gamma, gamma) if stops else next_gamma
        counts += active
        torch.maximum(most_row, phi, out=most_row)
        torch.maximum(most_column, gamma, out=most_column)
    most = torch.maximum(most_row.amax(0), most_column.amax(0))
    return Scalings(phi, gamma, errors, counts, most)


def row_errors(
    chunk: Chunk, phi: Tensor, following: Tensor, problems: Problems, log: bool
) -> Tensor:
    """|R 1 - a| (s,): the row sums are a o phi over the scalings that follow."""
    ratio = (phi - following).exp() if log else phi / following
    deviation = present((ratio - 1).abs(), chunk.rows)
    if problems.a is None:
        return deviation.amax(0)
    return sum_by_halves(deviation * chunk.a, 0)


def scaling(
    kernel: Tensor,
    other: Tensor,
    masses: Tensor | None,
    dim: int,
    side: Tensor | None,
    log: bool,
) -> Tensor:
    """1 over sums along a dimension of the kernel, times the scalings of it and their masses."""
    if masses is not None:
        other = other + masses if log else other * masses
    if log:
        return present(-log_sum(kernel + other.unsqueeze(1 - dim), dim), side)
    return present(products(kernel, other, dim).reciprocal_(), side)


def products(kernel: Tensor, other: Tensor, dim: int) -> Tensor:
    """Sums along a dimension of the kernel times the numbers along it."""
    if kernel.shape[dim] > MOST_IN_ORDER:
        return sum_by_halves(kernel * other.unsqueeze(1 - dim), dim)
    # In place of a product as large as the kernel, which is most of the traffic.
    sums = kernel.select(dim, 0) * other[0]
    for k in range(1, kernel.shape[dim]):
        sums.addcmul_(kernel.select(dim, k), other[k])
    return sums


def first_scalings(chunk: Chunk) -> tuple[Tensor, Tensor]:
    """Logarithms of the scalings of the first iteration."""
    log_a, log_b = chunk.masses(log=True)
    zero = torch.zeros_like(chunk.b)
    u = scaling(chunk.logits, zero, log_b, 1, chunk.rows, log=True)
    return u, scaling(chunk.logits, u, log_a, 0, chunk.columns, log=True)


def in_logs(lost: Tensor, most: Tensor) -> Tensor:
    """Which problems (s,) are done again in the log domain; NaN is not below any number."""
    return (lost & (most > MOST_SCALING)) | ~(most < torch.inf)


def chunk_of(problems: Problems, part: slice) -> Chunk:
    """Some of the problems, matrices last."""
    matrices = problems.matrices
    dtype, (n, m) = computed_in(matrices), matrices.shape[1:]
    x = matrices[part].permute(1, 2, 0).to(dtype, copy=True, memory_format=torch.contiguous_format)
    if problems.negated:
        x.neg_()
    rows = columns = None
    if problems.sizes is not None:
        places = torch.arange(max(n, m), device=x.device)[:, None]
        rows, columns = (
            places[:size] < given
            for size, given in zip((n, m), problems.sizes[part].T, strict=True)
        )
        x.masked_fill_(~(rows[:, None] & columns), -torch.inf)
    highest = present(x.amax(1), rows)
    scale = problems.scale[part] if problems.scale.ndim else problems.scale
    scale = scale.to(dtype).expand(x.shape[2])
    a, b = (
        _masses(given, part, size, dtype, side)
        for given, size, side in ((problems.a, n, rows), (problems.b, m, columns))
    )
    a, b = (
        given if given is not None else x.new_ones((size, 1)) for given, size in ((a, n), (b, m))
    )
    uniform = problems.a is None and problems.sizes is None
    return Chunk(x.sub_(highest[:, None]).mul_(scale), highest, scale, a, b, uniform, rows, columns)


def _masses(
    given: Tensor | None, part: slice, size: int, dtype: torch.dtype, side: Tensor | None
) -> Tensor | None:
    if given is None:
        return None if side is None else side.to(dtype)
    masses = (given[part] if given.ndim == 2 else given[None]).to(dtype).T.contiguous()
    return masses if side is None else torch.where(side, masses, 0)


def present(values: Tensor, side: Tensor | None) -> Tensor:
    """Values of rows or columns, 0 beyond them."""
    return values if side is None else torch.where(side, values, 0)


def parts(matrices: Tensor) -> list[slice]:
    """Chunks of a batch."""
    count, n, m = matrices.shape
    height = max(1, ENTRIES_AT_ONCE // max(n * m, 1))
    return [slice(first, min(first + height, count)) for first in range(0, count, height)]


def computed_in(matrices: Tensor) -> torch.dtype:
    """Float32, or float64 of matrices in it."""
    return torch.promote_types(matrices.dtype, torch.float32)


def log_sum(exponents: Tensor, dim: int) -> Tensor:
    """Log sum exp along a dimension; -inf where all are."""
    highest = exponents.amax(dim)
    highest = torch.where(highest == -torch.inf, 0, highest)
    return sum_by_halves((exponents - highest.unsqueeze(dim)).exp_(), dim).log_() + highest


def sum_by_halves(values: Tensor, dim: int) -> Tensor:
    """Sums along a dimension, in an order that only its length decides; overwrites."""
    while (size := values.shape[dim]) > 1:
        half = (size + 1) // 2
        second = values.narrow(dim, half, size - half)
        values = values.narrow(dim, 0, half)
        values.narrow(dim, 0, size - half).add_(second)
    return values.select(dim, 0)
