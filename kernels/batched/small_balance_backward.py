"""The derivative of `small_balance` by the iterations made, in one launch.

    log phi_i   = -log sum_j b_j K_ij gamma_j      weights  w_ij = b_j phi_i K_ij gamma_j
    log gamma_j = -log sum_i a_i phi_i K_ij        weights  w_ij = a_i phi_i K_ij gamma_j

Backwards through one of them, its weights times its cotangent are taken from that of the logits log
K; sums of what is left along the other side are the next cotangent. A step needs the column
scalings before and after it. Iterations are made again: column scalings of every LENGTH-th are kept
on chip, and from there those of LENGTH at a time. So nothing grows with iterations but on chip, as
their root, and no work faster than they.

E in place of K, its rounding, and what is done in the log domain are as in `small_balance`.

Memory: x and the cotangent are read, and the gradient written, once.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.batched.small_adjoint import padded
from otdd_flash.kernels.batched.small_balance import (
    MOST_SCALING,
    Packing,
    first_scalings,
    inverse,
    load_logits,
    load_masses,
    sides,
    sums_of,
)

# By the entries of a padded matrix up to which it holds.
PACKINGS = {
    16: Packing(32, 2),
    64: Packing(8, 2),
    256: Packing(4, 4),
    1024: Packing(1, 4),
    4096: Packing(1, 8),
    16384: Packing(1, 16),
}


@triton.jit
def small_balance_backward_kernel(
    matrices_ptr,  # x (B, n, m) of any strides, -x if NEGATED
    scale_ptr,  # 1 / t (B,) or () float64
    a_ptr,  # (B, n) or (n,), read if MASSES
    b_ptr,  # (B, m) or (m,), read if MASSES
    sizes_ptr,  # (B, 2) int32, read if SIZES
    counts_ptr,  # (B,) int32, read if STOP
    cotangents_ptr,  # (B, n, m) of any strides
    row_cotangents_ptr,  # (B, n), read if POTENTIALS
    column_cotangents_ptr,  # (B, m), read if POTENTIALS
    gradients_ptr,  # (B, n, m)
    by_scale_ptr,  # (B,)
    by_a_ptr,  # (B, n), written if MASSES
    by_b_ptr,  # (B, m), written if MASSES
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
    cotangent_stride,
    cotangent_row_stride,
    cotangent_column_stride,
    TYPE: tl.constexpr,
    TINY: tl.constexpr,
    NEGATED: tl.constexpr,
    MASSES: tl.constexpr,
    SIZES: tl.constexpr,
    STOP: tl.constexpr,
    POTENTIALS: tl.constexpr,
    LENGTH: tl.constexpr,
    BATCH: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """One program per BATCH matrices; LENGTH^2, of a power of two, is at least iterations."""
    o_batch = tl.program_id(0).to(tl.int64) * BATCH + tl.arange(0, BATCH)
    m_batch = o_batch < count
    m_row, m_column = sides(o_batch, sizes_ptr, count, n, m, SIZES, N, M)
    logits, _, scale = load_logits(
        matrices_ptr, scale_ptr, o_batch, count, m_row, m_column, stride, row_stride,
        column_stride, scale_stride, TYPE, NEGATED, N, M,
    )  # fmt: skip
    a = load_masses(a_ptr, o_batch, m_row, a_stride, TYPE, MASSES, N)
    b = load_masses(b_ptr, o_batch, m_column, b_stride, TYPE, MASSES, M)
    o_row, o_column = tl.arange(0, N), tl.arange(0, M)
    p_cotangents = (
        cotangents_ptr
        + (o_batch * cotangent_stride)[:, None, None]
        + (o_row.to(tl.int64) * cotangent_row_stride)[None, :, None]
        + (o_column.to(tl.int64) * cotangent_column_stride)[None, None, :]
    )
    p_rows = o_batch[:, None] * n + o_row[None, :]
    p_columns = o_batch[:, None] * m + o_column[None, :]
    counts = tl.full((BATCH,), 0, tl.int32) + iterations
    if STOP:
        counts = tl.load(counts_ptr + o_batch, mask=m_batch, other=1)
    by_row, by_column = tl.zeros((BATCH, N), TYPE), tl.zeros((BATCH, M), TYPE)
    if POTENTIALS:
        # Of t log phi, so of log phi by t.
        unit = (1 / scale).to(TYPE)[:, None]
        by_row = unit * tl.load(row_cotangents_ptr + p_rows, mask=m_row, other=0.0).to(TYPE)
        loaded = tl.load(column_cotangents_ptr + p_columns, mask=m_column, other=0.0)
        by_column = unit * loaded.to(TYPE)

    u, v = first_scalings(logits, a, b, m_row, m_column)
    kernel = tl.exp2(logits + u[:, :, None] + v[:, None, :])
    lost = tl.max(tl.max(((kernel < TINY) & (logits > -float("inf"))).to(tl.int32), 2), 1)
    start = tl.where(m_column, tl.exp2(-v), 0)
    first = tl.where(m_column, tl.full((BATCH, M), 1, TYPE), 0)
    gradient, by_a, by_b, most = differentiate(
        kernel, a, b, a, b, start, first, p_cotangents, by_row, by_column, counts, m_row, m_column,
        LENGTH, BATCH, N, M, TYPE, False,
    )  # fmt: skip
    again = ((lost > 0) & (most > MOST_SCALING)) | ((most < float("inf")) == 0)
    if tl.max(again.to(tl.int32), 0) > 0:
        logits, _highest, _scale = load_logits(
            matrices_ptr, scale_ptr, o_batch, count, m_row, m_column, stride, row_stride,
            column_stride, scale_stride, TYPE, NEGATED, N, M,
        )  # fmt: skip
        _u, log_v = first_scalings(logits, a, b, m_row, m_column)
        in_logs, logs_a, logs_b, _most = differentiate(
            logits, tl.log2(a), tl.log2(b), a, b, 0 * log_v, log_v, p_cotangents, by_row, by_column,
            counts, m_row, m_column, LENGTH, BATCH, N, M, TYPE, True,
        )  # fmt: skip
        gradient = tl.where(again[:, None, None], in_logs, gradient)
        by_a = tl.where(again[:, None], logs_a, by_a)
        by_b = tl.where(again[:, None], logs_b, by_b)

    gradient = -gradient if NEGATED else gradient
    m_all = m_batch[:, None, None] & (o_row < n)[None, :, None] & (o_column < m)[None, None, :]
    m_entry = m_row[:, :, None] & m_column[:, None, :]
    x = tl.load(
        matrices_ptr
        + (o_batch * stride)[:, None, None]
        + (o_row.to(tl.int64) * row_stride)[None, :, None]
        + (o_column.to(tl.int64) * column_stride)[None, None, :],
        mask=m_entry,
        other=0.0,
    ).to(TYPE)
    # A forbidden pair has no part in it.
    paid = tl.where(tl.abs(x) < float("inf"), x * gradient, 0)
    tl.store(by_scale_ptr + o_batch, tl.sum(tl.sum(paid, 2), 1), mask=m_batch)
    p_gradients = (o_batch * n)[:, None, None] + o_row[None, :, None]
    gradient = tl.where(m_entry, gradient * scale.to(TYPE)[:, None, None], 0)
    tl.store(
        gradients_ptr + p_gradients * m + o_column[None, None, :],
        gradient.to(gradients_ptr.dtype.element_ty),
        mask=m_all,
    )
    if MASSES:
        m_rows = m_batch[:, None] & (o_row < n)[None, :]
        m_columns = m_batch[:, None] & (o_column < m)[None, :]
        tl.store(by_a_ptr + p_rows, tl.where(m_row, by_a, 0), mask=m_rows)
        tl.store(by_b_ptr + p_columns, tl.where(m_column, by_b, 0), mask=m_columns)


@triton.jit
def differentiate(
    kernel, a, b, mass_a, mass_b, start, first, p_cotangents, by_row, by_column, counts, m_row,
    m_column, LENGTH: tl.constexpr, BATCH: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
    TYPE: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """By logits (BATCH, N, M) and masses (BATCH, N), (BATCH, M); the largest scalings (BATCH,).

    `start` and `first` are the column scalings before and after the first iteration. With LOG,
    `kernel`, `a`, `b` and scalings are logarithms to base 2.
    """
    o_kept = tl.arange(0, LENGTH)[None, None, :]
    most_made = tl.max(counts, 0)
    kept = tl.zeros((BATCH, M, LENGTH), TYPE)
    gamma, phi = start, by_row
    most_row, most_column = tl.zeros((BATCH, N), TYPE), tl.zeros((BATCH, M), TYPE)
    for i in range(0, most_made):
        kept = tl.where((o_kept == i // LENGTH) & (i % LENGTH == 0), gamma[:, :, None], kept)
        active = counts > i
        found_phi, found = following(kernel, a, b, gamma, first, i, m_row, m_column, LOG)
        phi = tl.where(active[:, None], found_phi, phi)
        gamma = tl.where(active[:, None], found, gamma)
        most_row, most_column = tl.maximum(most_row, phi), tl.maximum(most_column, gamma)
    most = tl.maximum(tl.max(most_row, 1), tl.max(most_column, 1))
    most += 0 * (tl.sum(phi, 1) + tl.sum(gamma, 1))

    unit = weights(kernel, phi, gamma, LOG)
    m_entry = m_row[:, :, None] & m_column[:, None, :]
    unit *= tl.load(p_cotangents, mask=m_entry, other=0.0).to(TYPE)
    by_a = tl.sum(unit * mass_b[:, None, :], 2)
    by_b = tl.sum(unit * mass_a[:, :, None], 1)
    gradient = unit * mass_a[:, :, None] * mass_b[:, None, :]

    for segment in range(0, (most_made + LENGTH - 1) // LENGTH):
        begin = (most_made - 1) // LENGTH * LENGTH - segment * LENGTH
        before = tl.sum(tl.where(o_kept == begin // LENGTH, kept, 0), 2)
        history = tl.zeros((BATCH, M, LENGTH), TYPE)
        made = tl.minimum(LENGTH, most_made - begin)
        for i in range(0, made):
            history = tl.where(o_kept == i, before[:, :, None], history)
            i_made = begin + i
            _phi, found = following(kernel, a, b, before, first, i_made, m_row, m_column, LOG)
            before = tl.where((counts > i_made)[:, None], found, before)
        for step in range(0, made):
            i = made - 1 - step
            active = (counts > begin + i)[:, None]
            before = tl.sum(tl.where(o_kept == i, history, 0), 2)
            phi = tl.where(m_row, inverse(sums_of(kernel, before, b, 2, LOG), LOG), 0)
            # Sums of what is left, which what was rounded away before is part of.
            left = tl.where(active, tl.sum(gradient, 1) + by_column, 0)
            moved = weights(kernel, phi, gamma, LOG) * left[:, None, :]
            gradient -= mass_a[:, :, None] * moved
            by_a -= tl.sum(moved, 2)
            left = tl.where(active, tl.sum(gradient, 2) + by_row, 0)
            moved = weights(kernel, phi, before, LOG) * left[:, :, None]
            gradient -= mass_b[:, None, :] * moved
            by_b -= tl.sum(moved, 1)
            gamma = tl.where(active, before, gamma)
    return gradient, by_a, by_b, most


@triton.jit
def following(kernel, a, b, gamma, first, i, m_row, m_column, LOG: tl.constexpr):
    """Scalings after iteration i, from 0, of column scalings before it."""
    phi = tl.where(m_row, inverse(sums_of(kernel, gamma, b, 2, LOG), LOG), 0)
    found = tl.where(m_column, inverse(sums_of(kernel, phi, a, 1, LOG), LOG), 0)
    return phi, tl.where(i == 0, first, found)


@triton.jit
def weights(kernel, phi, gamma, LOG: tl.constexpr):
    """Phi_i K_ij gamma_j (BATCH, N, M), themselves with LOG as well."""
    if LOG:
        found = tl.exp2(kernel + phi[:, :, None] + gamma[:, None, :])
    else:
        found = kernel * phi[:, :, None] * gamma[:, None, :]
    return found


def packing_for(n: int, m: int, dtype: torch.dtype) -> Packing:
    """The packing of matrices (n, m) that are computed in float32 or float64."""
    rows, columns = padded(n, m)
    entries = rows * columns * (dtype.itemsize // 4)
    return next((found for most, found in PACKINGS.items() if entries <= most), Packing(1, 16))


def small_balance_backward(
    matrices: Tensor,
    scale: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    sizes: Tensor | None,
    iterations: int,
    tolerance: float | None,
    negated: bool,
    counts: Tensor,
    cotangents: Tensor,
    row_cotangents: Tensor | None,
    column_cotangents: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Differentiate the iterations of all matrices; what is not said here is as in `small_balance`.

    Args:
        matrices: x (B, n, m).
        scale: 1 / t.
        a: masses.
        b: masses.
        sizes: rows and columns.
        iterations: at the most.
        tolerance: None where all of them were made.
        negated: whether `matrices` holds -x.
        counts: (B,) int32, iterations made, not read without a tolerance.
        cotangents: of R (B, n, m), of any strides.
        row_cotangents: of t log phi (B, n), 0 by default.
        column_cotangents: of t log gamma (B, m), 0 by default.

    Returns:
        Derivatives by `matrices` (B, n, m) of their type, by 1 / t of each matrix (B,), in float32
        or float64, with potentials held, and by masses (B, n) and (B, m), empty without masses.
    """
    count, n, m = matrices.shape
    dtype, device = torch.promote_types(matrices.dtype, torch.float32), matrices.device
    kept = 0 if a is None else count
    found = (
        torch.empty(matrices.shape, dtype=matrices.dtype, device=device),
        torch.empty((count,), dtype=dtype, device=device),
        torch.empty((kept, n), dtype=dtype, device=device),
        torch.empty((kept, m), dtype=dtype, device=device),
    )
    if count == 0:
        return found
    potentials = row_cotangents is not None or column_cotangents is not None
    by_row, by_column = (
        matrices
        if not potentials
        else torch.zeros((count, size), dtype=dtype, device=device)
        if given is None
        else given.contiguous()
        for given, size in ((row_cotangents, n), (column_cotangents, m))
    )
    packing, (tile_rows, tile_columns) = packing_for(n, m, dtype), padded(n, m)
    stops = tolerance is not None
    small_balance_backward_kernel[(triton.cdiv(count, packing.matrices),)](
        matrices,
        scale,
        *(matrices if masses is None else masses for masses in (a, b)),
        matrices if sizes is None else sizes,
        counts if stops else matrices,
        cotangents,
        by_row,
        by_column,
        *(one if one.numel() else found[0] for one in found),
        count,
        n,
        m,
        iterations,
        *matrices.stride(),
        scale.stride(0) if scale.ndim else 0,
        *(masses.stride(0) if masses is not None and masses.ndim == 2 else 0 for masses in (a, b)),
        *cotangents.stride(),
        TYPE=tl.float64 if dtype == torch.float64 else tl.float32,
        TINY=torch.finfo(dtype).tiny,
        NEGATED=negated,
        MASSES=a is not None,
        SIZES=sizes is not None,
        STOP=stops,
        POTENTIALS=potentials,
        LENGTH=triton.next_power_of_2(max(2, math.isqrt(iterations - 1) + 1)),
        BATCH=packing.matrices,
        N=tile_rows,
        M=tile_columns,
        num_warps=packing.warps,
    )
    return found
