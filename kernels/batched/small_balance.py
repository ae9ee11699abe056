"""Balancing of many small matrices in one launch, each in registers for all iterations.

    R = diag(a o phi) exp(x / t) diag(b o gamma)        x (n, m), temperature t
    phi = 1 / (K (b o gamma)),  gamma = 1 / (K^T (a o phi)),        K = exp(x / t)

An iteration is rows, then columns, from gamma = 1: with a = b = 1 R becomes doubly stochastic, with
masses a and b and x = -C it is the plan of the cost C at epsilon = t (Sinkhorn & Knopp 1967).

The first iteration is done in the log domain. Scaled by it, E = K o (phi gamma^T) is fixed, and no
row or column of a o E o b is small throughout; further scalings are relative to it, and an
iteration is two products with E. Exponentials are taken once. Where an entry of E is below 2^-60,
and may have lost bits, that of R is computed in the log domain, with the same scalings. A matrix is
done again in the log domain, from the first iteration, if it lost an entry of E to 0 and a scaling
went above 2^30, if any scaling went above 2^96, or if an entry or a sum overflowed. Its neighbours
keep their results.

One program holds BATCH matrices, padded to powers of two. Sums have an order that depends on sizes
and type alone, so a matrix gets the same bits among any others. `otdd_flash.batched.balance` calls
`small_balance` and `small_balance_backward`, for the problems that `tiny_balance` and its backward
pass do not take. A change of the iterations must be made in `tiny_balance` and, for PyTorch, in
`otdd_flash.batched.cpu` too (`tests/batched` runs both backends).

Memory: x is read, and R written, once. Work: 4 n m operations an iteration, 3 n m exponentials.

`small_balance_backward` is the derivative by the iterations made, in one launch.

    log phi_i   = -log sum_j b_j K_ij gamma_j      weights  w_ij = b_j phi_i K_ij gamma_j
    log gamma_j = -log sum_i a_i phi_i K_ij        weights  w_ij = a_i phi_i K_ij gamma_j

Backward through one of them, its weights times its cotangent are subtracted from the cotangent of
the logits log K; the sums of the remainder along the other side are the next cotangent. A step
needs the column scalings before and after it. Iterations are made again: column scalings of every
LENGTH-th are kept on chip, and from each the scalings of the next LENGTH iterations are computed
again. So only memory on chip grows with the iterations, as their square root, and work grows in
proportion to them.

E takes the place of K. A matrix is done again in the log domain as above; single small entries are
not.

Memory: x and the cotangent are read, and the gradient written, once; x is read again for the
derivative by 1 / t.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.batched.problems import (
    Balanced,
    Cotangents,
    Derivatives,
    Problems,
    computed_in,
)
from otdd_flash.kernels.batched.tiles import (
    LOG2_SMALL,
    SMALL,
    Packing,
    batch_of,
    first_kernel,
    first_scalings,
    grid_of,
    in_logs,
    inverse,
    launch,
    load_both_masses,
    load_logits,
    load_numbers,
    load_tile,
    on_grid,
    padded,
    places,
    scaled,
    scaling,
    sides,
    smallest_entry,
    store_numbers,
    store_tile,
    sums_of,
    with_masses,
)
from otdd_flash.kernels.launch import LOG2_E, on_its_device

# By the bytes of a padded matrix up to which it holds.
PACKINGS = {
    1 << 6: Packing(32, 1),
    1 << 8: Packing(8, 1),
    1 << 10: Packing(8, 1, 128),
    1 << 12: Packing(1, 1, 96),
    1 << 14: Packing(1, 2, 168),
    1 << 16: Packing(1, 4),
}


@on_its_device
@triton.jit
def small_balance_kernel(
    matrices_ptr,  # x (B, n, m) of any strides, -x if NEGATED
    scale_ptr,  # 1 / t (B,) or () float64
    a_ptr,  # (B, n) or (n,), read if MASSES
    b_ptr,  # (B, m) or (m,), read if MASSES
    sizes_ptr,  # (B, 2) int32, read if SIZES
    count,
    n,
    m,
    iterations,
    stride,
    row_stride,
    column_stride,
    scale_stride,
    a_stride,
    b_stride,
    balanced_ptr,  # R (B, n, m)
    rows_ptr,  # t log phi (B, n), written if POTENTIALS
    columns_ptr,  # t log gamma (B, m), written if POTENTIALS
    errors_ptr,  # (B,), written if POTENTIALS
    counts_ptr,  # (B,) int32, written if STOP
    tolerance,
    TYPE: tl.constexpr,
    TINY: tl.constexpr,
    NEGATED: tl.constexpr,
    MASSES: tl.constexpr,
    SIZES: tl.constexpr,
    FULL: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    STOP: tl.constexpr,
    POTENTIALS: tl.constexpr,
    BATCH: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """One program per BATCH matrices; FULL where all of them are N by M.

    CONTIGUOUS where they then are.
    """
    m_row, m_column = sides(sizes_ptr, count, n, m, SIZES, FULL, BATCH, N, M)
    logits, highest, scale = load_logits(
        matrices_ptr, scale_ptr, count, m_row, m_column, stride, row_stride, column_stride,
        scale_stride, TYPE, NEGATED, CONTIGUOUS,
    )  # fmt: skip
    a, b = (
        load_both_masses(a_ptr, b_ptr, count, m_row, m_column, a_stride, b_stride, TYPE)
        if MASSES
        else (None, None)
    )
    u, v = first_scalings(logits, a, b, m_row, m_column)
    kernel = first_kernel(logits, u, v, a, m_column)
    smallest = smallest_entry(kernel, logits)
    largest = tl.max(tl.max(kernel, 0), 1)
    phi = tl.where(m_row, tl.full((N, BATCH), 1, TYPE), 0)
    gamma = tl.where(m_column, tl.full((BATCH, M), 1, TYPE), 0)
    phi, _rest, gamma, _rests, most, errors, counts = balance(
        kernel, a, b, phi, gamma, 0 * smallest, m_row, m_column, iterations, tolerance,
        STOP, POTENTIALS, False,
    )  # fmt: skip
    balanced = scaled(kernel, phi, None, gamma, None, a, b, False)
    again = in_logs(smallest, most, TINY)
    if MASSES:
        # As columns have their masses, a_i E_ij <= 1: without a mass there is no bound.
        again = again | (largest == float("inf"))
    o_batch, o_row, o_column = batch_of(BATCH), tl.arange(0, N)[:, None], tl.arange(0, M)[None, :]
    rows_of, columns_of = o_batch[None, :], o_batch[:, None]
    p_balanced = places(balanced_ptr, n * m, m, 1, kernel.shape, FULL)
    # All of a matrix is written, beyond the sizes that it has as well.
    m_rows, m_columns = (rows_of < count) & (o_row < n), (columns_of < count) & (o_column < m)
    m_all = m_rows[:, :, None] & m_columns[None, :, :]
    store_tile(p_balanced, spoiled(balanced), m_all)
    if POTENTIALS:
        u_rest, v_rest = tl.log2(tl.where(m_row, phi, 1)), tl.log2(tl.where(m_column, gamma, 1))
    if tl.max((again | (smallest < SMALL)).to(tl.int32), 0) > 0:
        # Loaded again, so that registers do not hold it till here.
        logits, _highest, _scale = load_logits(
            matrices_ptr, scale_ptr, count, m_row, m_column, stride, row_stride, column_stride,
            scale_stride, TYPE, NEGATED, CONTIGUOUS,
        )  # fmt: skip
        first_u, first_v = first_scalings(logits, a, b, m_row, m_column)
        small = logits + first_u[:, :, None] + first_v[None, :, :] < LOG2_SMALL
        log_a = tl.log2(a) if MASSES else None
        log_b = tl.log2(b) if MASSES else None
        found = scaled(logits, first_u, tl.log2(phi), first_v, tl.log2(gamma), log_a, log_b, True)
        store_tile(p_balanced, found, m_all & small)
        if tl.max(again.to(tl.int32), 0) > 0:
            grid = grid_of(logits)
            logits = on_grid(logits, grid[None, :, None])
            first_u, first_v = on_grid(first_u, grid[None, :]), on_grid(first_v, grid[:, None])
            log_u, log_u_rest, log_v, log_v_rest, _most, log_errors, log_counts = balance(
                logits, log_a, log_b, first_u, first_v, grid, m_row, m_column, iterations,
                tolerance, STOP, POTENTIALS, True,
            )  # fmt: skip
            found = scaled(logits, log_u, log_u_rest, log_v, log_v_rest, log_a, log_b, True)
            store_tile(p_balanced, spoiled(found), m_all & again[None, :, None])
            errors = tl.where(again, log_errors, errors)
            counts = tl.where(again, log_counts, counts)
            if POTENTIALS:
                u = tl.where(again[None, :], log_u, u)
                u_rest = tl.where(again[None, :], log_u_rest, u_rest)
                v = tl.where(again[:, None], log_v, v)
                v_rest = tl.where(again[:, None], log_v_rest, v_rest)
    if POTENTIALS:
        unit = tl.full((), 1 / LOG2_E, tl.float64) / scale
        f = unit[None, :] * (u.to(tl.float64) + u_rest.to(tl.float64)) - highest.to(tl.float64)
        g = unit[:, None] * (v.to(tl.float64) + v_rest.to(tl.float64))
        f, g = tl.where(m_row, f, 0).to(TYPE), tl.where(m_column, g, 0).to(TYPE)
        store_numbers(rows_ptr, rows_of, o_row, count, n, f)
        store_numbers(columns_ptr, columns_of, o_column, count, m, g)
        tl.store(errors_ptr + o_batch, errors, mask=o_batch < count)
    if STOP:
        tl.store(counts_ptr + o_batch, counts, mask=o_batch < count)


@triton.jit
def balance(
    kernel, a, b, phi, gamma, grid, m_row, m_column, iterations, tolerance,
    STOP: tl.constexpr, POTENTIALS: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Iterations from the second on: scalings, their maxima, errors and iterations made.

    With LOG, `kernel` and masses are logarithms to base 2, and a scaling is a pair whose sum is its
    logarithm.
    """
    most_row, most_column = phi, gamma
    phi_rest, gamma_rest = tl.zeros_like(phi), tl.zeros_like(gamma)
    errors = tl.sum(0 * phi, 0)
    counts = (0 * errors).to(tl.int32) + 1
    if STOP:
        sums, rest = sums_of(kernel, gamma, gamma_rest, b, grid, 2, LOG)
        errors = row_error(phi, phi_rest, sums, rest, a, m_row, LOG)
        # NaN is not above the tolerance, and ends its matrix.
        active = errors > tolerance
        running = tl.max(active.to(tl.int32), 0)
        i = 1
        while (i < iterations) & (running > 0):
            next_phi, next_rest = inverse(sums, rest, m_row, LOG)
            phi = tl.where(active[None, :], next_phi, phi)
            phi_rest = tl.where(active[None, :], next_rest, phi_rest)
            sums, rest = sums_of(kernel, phi, phi_rest, a, grid, 0, LOG)
            next_gamma, next_rest = inverse(sums, rest, m_column, LOG)
            gamma = tl.where(active[:, None], next_gamma, gamma)
            gamma_rest = tl.where(active[:, None], next_rest, gamma_rest)
            most_row, most_column = tl.maximum(most_row, phi), tl.maximum(most_column, gamma)
            counts += active.to(tl.int32)
            sums, rest = sums_of(kernel, gamma, gamma_rest, b, grid, 2, LOG)
            found = row_error(phi, phi_rest, sums, rest, a, m_row, LOG)
            errors = tl.where(active, found, errors)
            active = active & (errors > tolerance)
            running = tl.max(active.to(tl.int32), 0)
            i += 1
    else:
        for _ in range(1, iterations):
            phi, phi_rest = scaling(kernel, gamma, gamma_rest, b, grid, m_row, 2, LOG)
            gamma, gamma_rest = scaling(kernel, phi, phi_rest, a, grid, m_column, 0, LOG)
            most_row, most_column = tl.maximum(most_row, phi), tl.maximum(most_column, gamma)
        if POTENTIALS:
            sums, rest = sums_of(kernel, gamma, gamma_rest, b, grid, 2, LOG)
            errors = row_error(phi, phi_rest, sums, rest, a, m_row, LOG)
    most = tl.maximum(tl.max(most_row, 0), tl.max(most_column, 1))
    # Maxima forget NaN.
    most = most + 0 * (tl.sum(phi, 0) + tl.sum(gamma, 1))
    if (a is not None) and (not LOG):
        # Sums that overflow leave scalings of 0.
        least = tl.minimum(
            tl.min(tl.where(m_row, phi, 1), 0), tl.min(tl.where(m_column, gamma, 1), 1)
        )
        most = tl.where(least > 0, most, float("inf"))
    return phi, phi_rest, gamma, gamma_rest, most, errors, counts


@triton.jit
def spoiled(balanced):
    """Matrices, NaN throughout where an entry is: by a row or column without any."""
    total = tl.sum(tl.sum(balanced, 0), 1)
    return tl.where((total < float("inf"))[None, :, None], balanced, float("nan"))


@triton.jit
def row_error(phi, phi_rest, sums, rest, a, m_row, LOG: tl.constexpr):
    """|R 1 - a|: its sum, or the largest where there are no masses."""
    ratio = tl.exp2((phi + sums) + (phi_rest + rest)) if LOG else phi * sums
    deviation = tl.where(m_row, tl.abs(ratio - 1), 0)
    if a is not None:
        masses = tl.exp2(a) if LOG else a
        # The ratio of a row without mass may be infinite.
        error = tl.sum(tl.where(masses > 0, deviation * masses, 0), 0)
    else:
        # Maxima forget NaN.
        error = tl.max(deviation, 0) + 0 * tl.sum(deviation, 0)
    return error


def small_balance(problems: Problems, found: Balanced) -> None:
    """Balance all matrices in one launch.

    Args:
        problems: the matrices to balance.
        found: results to write: potentials and errors, and iterations, where there is room for
            them, as there is for iterations with a tolerance.
    """
    if found.matrices.numel() == 0:
        return
    potentials = found.errors.numel() > 0
    grid, given, options = launch(problems, PACKINGS)
    if potentials:
        options["maxnreg"] = None
    small_balance_kernel[grid](
        *given,
        # Empty results are not written.
        *(one if one.numel() else found.matrices for one in found),
        float(problems.tolerance or 0),
        **options,
        POTENTIALS=potentials,
    )


# By the bytes of a padded matrix up to which it holds.
BACKWARD_PACKINGS = {
    1 << 6: Packing(8, 1),
    1 << 8: Packing(16, 1),
    1 << 10: Packing(4, 1),
    1 << 12: Packing(1, 1, 168),
    1 << 14: Packing(1, 2),
    1 << 16: Packing(1, 4),
}


@on_its_device
@triton.jit
def small_balance_backward_kernel(
    matrices_ptr,  # x (B, n, m) of any strides, -x if NEGATED
    scale_ptr,  # 1 / t (B,) or () float64
    a_ptr,  # (B, n) or (n,), read if MASSES
    b_ptr,  # (B, m) or (m,), read if MASSES
    sizes_ptr,  # (B, 2) int32, read if SIZES
    count,
    n,
    m,
    iterations,
    stride,
    row_stride,
    column_stride,
    scale_stride,
    a_stride,
    b_stride,
    counts_ptr,  # (B,) int32, read if STOP
    cotangents_ptr,  # (B, n, m) of any strides
    row_cotangents_ptr,  # (B, n), read if POTENTIALS
    column_cotangents_ptr,  # (B, m), read if POTENTIALS
    gradients_ptr,  # (B, n, m)
    by_scale_ptr,  # (B,), written if BY_SCALE
    by_a_ptr,  # (B, n), written if MASSES
    by_b_ptr,  # (B, m), written if MASSES
    cotangent_stride,
    cotangent_row_stride,
    cotangent_column_stride,
    TYPE: tl.constexpr,
    TINY: tl.constexpr,
    NEGATED: tl.constexpr,
    MASSES: tl.constexpr,
    SIZES: tl.constexpr,
    FULL: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    CONTIGUOUS_COTANGENTS: tl.constexpr,
    STOP: tl.constexpr,
    POTENTIALS: tl.constexpr,
    BY_SCALE: tl.constexpr,
    LENGTH: tl.constexpr,
    BATCH: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """One program per BATCH matrices; LENGTH^2, of a power of two, is at least iterations.

    FULL where all of them are N by M.
    """
    m_row, m_column = sides(sizes_ptr, count, n, m, SIZES, FULL, BATCH, N, M)
    logits, _, scale = load_logits(
        matrices_ptr, scale_ptr, count, m_row, m_column, stride, row_stride, column_stride,
        scale_stride, TYPE, NEGATED, CONTIGUOUS,
    )  # fmt: skip
    a, b = (
        load_both_masses(a_ptr, b_ptr, count, m_row, m_column, a_stride, b_stride, TYPE)
        if MASSES
        else (None, None)
    )
    u, v = first_scalings(logits, a, b, m_row, m_column)
    o_batch, o_row, o_column = batch_of(BATCH), tl.arange(0, N)[:, None], tl.arange(0, M)[None, :]
    rows_of, columns_of, m_batch = o_batch[None, :], o_batch[:, None], o_batch < count
    m_entry = m_row[:, :, None] & m_column[None, :, :] & m_batch[None, :, None]
    p_cotangents = places(
        cotangents_ptr, cotangent_stride, cotangent_row_stride, cotangent_column_stride,
        m_entry.shape, CONTIGUOUS_COTANGENTS,
    )  # fmt: skip
    counts = tl.full((BATCH,), 0, tl.int32) + iterations
    if STOP:
        counts = tl.load(counts_ptr + o_batch, mask=m_batch, other=1)
    by_row, by_column = tl.zeros((N, BATCH), TYPE), tl.zeros((BATCH, M), TYPE)
    if POTENTIALS:
        # Cotangents of t log phi, so of log phi by t.
        unit = (1 / scale).to(TYPE)
        loaded = load_numbers(row_cotangents_ptr, rows_of, o_row, count, n).to(TYPE)
        by_row = tl.where(m_row, unit[None, :] * loaded, 0)
        loaded = load_numbers(column_cotangents_ptr, columns_of, o_column, count, m).to(TYPE)
        by_column = tl.where(m_column, unit[:, None] * loaded, 0)

    kernel = first_kernel(logits, u, v, a, m_column)
    smallest = smallest_entry(kernel, logits)
    start = tl.where(m_column, tl.exp2(-v), 0)
    first = tl.where(m_column, tl.full((BATCH, M), 1, TYPE), 0)
    gradient, by_a, by_b, most = differentiate(
        kernel, a, b, a, b, start, first, 0 * smallest, p_cotangents, by_row, by_column, counts,
        m_entry, m_row, m_column, LENGTH, False,
    )  # fmt: skip
    again = in_logs(smallest, most, TINY)
    if tl.max(again.to(tl.int32), 0) > 0:
        logits, _highest, _scale = load_logits(
            matrices_ptr, scale_ptr, count, m_row, m_column, stride, row_stride, column_stride,
            scale_stride, TYPE, NEGATED, CONTIGUOUS,
        )  # fmt: skip
        _u, log_v = first_scalings(logits, a, b, m_row, m_column)
        grid = grid_of(logits)
        logits, log_v = on_grid(logits, grid[None, :, None]), on_grid(log_v, grid[:, None])
        log_a = tl.log2(a) if MASSES else None
        log_b = tl.log2(b) if MASSES else None
        log_gradient, log_by_a, log_by_b, _most = differentiate(
            logits, log_a, log_b, a, b, 0 * log_v, log_v, grid, p_cotangents,
            by_row, by_column, counts, m_entry, m_row, m_column, LENGTH, True,
        )  # fmt: skip
        gradient = tl.where(again[None, :, None], log_gradient, gradient)
        if MASSES:
            by_a = tl.where(again[None, :], log_by_a, by_a)
            by_b = tl.where(again[:, None], log_by_b, by_b)

    gradient = -gradient if NEGATED else gradient
    if BY_SCALE:
        p_entries = places(
            matrices_ptr, stride, row_stride, column_stride, m_entry.shape, CONTIGUOUS
        )
        x = load_tile(p_entries, m_entry).to(TYPE)
        # A forbidden pair has no part in it.
        paid = tl.where(tl.abs(x) < float("inf"), x * gradient, 0)
        tl.store(by_scale_ptr + o_batch, tl.sum(tl.sum(paid, 0), 1), mask=m_batch)
    gradient = tl.where(m_entry, gradient * scale.to(TYPE)[None, :, None], 0)
    m_rows, m_columns = (rows_of < count) & (o_row < n), (columns_of < count) & (o_column < m)
    p_gradients = places(gradients_ptr, n * m, m, 1, m_entry.shape, FULL)
    store_tile(p_gradients, gradient, m_rows[:, :, None] & m_columns[None, :, :])
    if MASSES:
        store_numbers(by_a_ptr, rows_of, o_row, count, n, tl.where(m_row, by_a, 0))
        store_numbers(by_b_ptr, columns_of, o_column, count, m, tl.where(m_column, by_b, 0))


@triton.jit
def differentiate(
    kernel, a, b, mass_a, mass_b, start, first, grid, p_cotangents, by_row, by_column, counts,
    m_entry, m_row, m_column, LENGTH: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Return derivatives by logits (N, BATCH, M) and masses, and the largest scalings (BATCH,).

    `start` and `first` are the column scalings before and after the first iteration. With LOG,
    `kernel`, `a` and `b` are logarithms to base 2, and a scaling is a pair whose sum is its
    logarithm.
    """
    N: tl.constexpr = kernel.shape[0]
    BATCH: tl.constexpr = kernel.shape[1]
    M: tl.constexpr = kernel.shape[2]
    TYPE: tl.constexpr = kernel.dtype
    o_kept = tl.arange(0, LENGTH)[:, None, None]
    most_made = tl.max(counts, 0)
    kept = tl.zeros((LENGTH, BATCH, M), TYPE)
    kept_rest = kept
    gamma, phi = start, tl.zeros((N, BATCH), TYPE)
    gamma_rest, phi_rest = tl.zeros((BATCH, M), TYPE), phi
    most_row, most_column = tl.zeros((N, BATCH), TYPE), tl.zeros((BATCH, M), TYPE)
    for i in range(0, most_made):
        m_kept = (o_kept == i // LENGTH) & (i % LENGTH == 0)
        kept = tl.where(m_kept, gamma[None, :, :], kept)
        if LOG:
            kept_rest = tl.where(m_kept, gamma_rest[None, :, :], kept_rest)
        active = counts > i
        next_phi, next_rest, found, found_rest = following(
            kernel, a, b, gamma, gamma_rest, first, grid, i, m_row, m_column, LOG
        )
        phi = tl.where(active[None, :], next_phi, phi)
        phi_rest = tl.where(active[None, :], next_rest, phi_rest)
        gamma = tl.where(active[:, None], found, gamma)
        gamma_rest = tl.where(active[:, None], found_rest, gamma_rest)
        most_row, most_column = tl.maximum(most_row, phi), tl.maximum(most_column, gamma)
    most = tl.maximum(tl.max(most_row, 0), tl.max(most_column, 1))
    # Maxima forget NaN.
    most += 0 * (tl.sum(phi, 0) + tl.sum(gamma, 1))

    unit = scaled(kernel, phi, phi_rest, gamma, gamma_rest, None, None, LOG)
    unit *= load_tile(p_cotangents, m_entry).to(TYPE)
    by_a = tl.sum(with_masses(unit, mass_b, 0), 2)
    by_b = tl.sum(with_masses(unit, mass_a, 2), 0)
    gradient = with_masses(with_masses(unit, mass_a, 2), mass_b, 0)

    for segment in range(0, (most_made + LENGTH - 1) // LENGTH):
        begin = (most_made - 1) // LENGTH * LENGTH - segment * LENGTH
        m_begin = o_kept == begin // LENGTH
        before = tl.sum(tl.where(m_begin, kept, 0), 0)
        before_rest = tl.zeros((BATCH, M), TYPE)
        if LOG:
            before_rest = tl.sum(tl.where(m_begin, kept_rest, 0), 0)
        history = tl.zeros((LENGTH, BATCH, M), TYPE)
        history_rest = history
        made = tl.minimum(LENGTH, most_made - begin)
        for i in range(0, made):
            history = tl.where(o_kept == i, before[None, :, :], history)
            if LOG:
                history_rest = tl.where(o_kept == i, before_rest[None, :, :], history_rest)
            i_made = begin + i
            _phi, _rest, found, found_rest = following(
                kernel, a, b, before, before_rest, first, grid, i_made, m_row, m_column, LOG
            )
            active = (counts > i_made)[:, None]
            before = tl.where(active, found, before)
            before_rest = tl.where(active, found_rest, before_rest)
        for step in range(0, made):
            i = made - 1 - step
            active = counts > begin + i
            before = tl.sum(tl.where(o_kept == i, history, 0), 0)
            if LOG:
                before_rest = tl.sum(tl.where(o_kept == i, history_rest, 0), 0)
            phi, phi_rest = scaling(kernel, before, before_rest, b, grid, m_row, 2, LOG)
            # Sums of the remaining cotangents, which include earlier roundings.
            left = tl.where(active[:, None], tl.sum(gradient, 0) + by_column, 0)
            moved = (
                scaled(kernel, phi, phi_rest, gamma, gamma_rest, None, None, LOG) * left[None, :, :]
            )
            gradient -= with_masses(moved, mass_a, 2)
            by_a -= tl.sum(moved, 2)
            left = tl.where(active[None, :], tl.sum(gradient, 2) + by_row, 0)
            moved = (
                scaled(kernel, phi, phi_rest, before, before_rest, None, None, LOG)
                * left[:, :, None]
            )
            gradient -= with_masses(moved, mass_b, 0)
            by_b -= tl.sum(moved, 0)
            gamma = tl.where(active[:, None], before, gamma)
            gamma_rest = tl.where(active[:, None], before_rest, gamma_rest)
    return gradient, by_a, by_b, most


@triton.jit
def following(kernel, a, b, gamma, rest, first, grid, i, m_row, m_column, LOG: tl.constexpr):
    """Scalings after iteration i, from 0, of column scalings before it."""
    phi, phi_rest = scaling(kernel, gamma, rest, b, grid, m_row, 2, LOG)
    found, found_rest = scaling(kernel, phi, phi_rest, a, grid, m_column, 0, LOG)
    return phi, phi_rest, tl.where(i == 0, first, found), tl.where(i == 0, 0, found_rest)


def small_balance_backward(
    problems: Problems, counts: Tensor, given: Cotangents, found: Derivatives
) -> None:
    """Differentiate the iterations of all matrices in one launch.

    Args:
        problems: as for `small_balance`.
        counts: (B,) int32, iterations made, not read without a tolerance.
        given: cotangents of the results of `small_balance`.
        found: derivatives to write, with potentials held: by 1 / t where there is room for it,
            and by masses where there are any.
    """
    matrices, cotangents = problems.matrices, given.matrices
    count, n, m = matrices.shape
    if count == 0:
        return
    potentials = given.rows is not None or given.columns is not None
    by_row, by_column = (
        matrices
        if not potentials
        else matrices.new_zeros((count, size), dtype=computed_in(matrices))
        if one is None
        else one.contiguous()
        for one, size in ((given.rows, n), (given.columns, m))
    )
    grid, first, options = launch(problems, BACKWARD_PACKINGS)
    small_balance_backward_kernel[grid](
        *first,
        counts if options["STOP"] else matrices,
        cotangents,
        by_row,
        by_column,
        # Empty results are not written.
        *(one if one.numel() else found.matrices for one in found),
        *cotangents.stride(),
        **options,
        CONTIGUOUS_COTANGENTS=(n, m) == padded(n, m) and cotangents.is_contiguous(),
        POTENTIALS=potentials,
        BY_SCALE=found.scale.numel() > 0,
        LENGTH=triton.next_power_of_2(max(2, math.isqrt(problems.iterations - 1) + 1)),
    )
