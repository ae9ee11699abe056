"""Balancing of many small matrices in one launch, each in registers for all iterations.

    R = diag(a o phi) exp(x / t) diag(b o gamma)        x (n, m), temperature t
    phi = 1 / (K (b o gamma)),  gamma = 1 / (K^T (a o phi)),        K = exp(x / t)

An iteration is rows, then columns, from gamma = 1: with a = b = 1 R becomes doubly stochastic, with
masses a and b and x = -C it is the plan of the cost C at epsilon = t (Sinkhorn & Knopp 1967).

The first iteration is done in the log domain. Scaled by it, E = K o (phi gamma^T) is fixed, and no
row or column of a o E o b is small throughout; further scalings are relative to it, and an
iteration is two products with E. Exponentials are taken once. A matrix that lost an entry of E
to 0, and one of whose scalings then went above 2^30, is done again in the log domain, from the
first iteration; so is one whose scalings overflow. Its neighbours keep what they have.

One program holds BATCH matrices, padded to powers of two. Sums have an order that depends on sizes
and type alone, so a matrix gets the same bits among any others.

Memory: x is read, and R written, once. Work: 4 n m operations an iteration, 3 n m exponentials.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.batched.small_adjoint import padded

LOG2_E = tl.constexpr(math.log2(math.e))
# What scalings may grow to where an entry of E was lost to 0.
MOST_SCALING = tl.constexpr(2.0**30)


class Packing(NamedTuple):
    """Matrices of a program, and its warps."""

    matrices: int
    warps: int


# By the entries of a padded matrix up to which it holds.
PACKINGS = {
    16: Packing(32, 1),
    64: Packing(4, 1),
    256: Packing(4, 1),
    1024: Packing(1, 1),
    4096: Packing(1, 4),
    16384: Packing(1, 8),
}


@triton.jit
def small_balance_kernel(
    matrices_ptr,  # x (B, n, m) of any strides, -x if NEGATED
    scale_ptr,  # 1 / t (B,) or () float64
    a_ptr,  # (B, n) or (n,), read if MASSES
    b_ptr,  # (B, m) or (m,), read if MASSES
    sizes_ptr,  # (B, 2) int32, read if SIZES
    balanced_ptr,  # R (B, n, m)
    rows_ptr,  # t log phi (B, n), written if POTENTIALS
    columns_ptr,  # t log gamma (B, m), written if POTENTIALS
    errors_ptr,  # (B,), written if POTENTIALS
    counts_ptr,  # (B,) int32, written if STOP
    count,
    n,
    m,
    iterations,
    tolerance,
    stride,
    row_stride,
    column_stride,
    scale_stride,
    a_stride,
    b_stride,
    TYPE: tl.constexpr,
    TINY: tl.constexpr,
    NEGATED: tl.constexpr,
    MASSES: tl.constexpr,
    SIZES: tl.constexpr,
    STOP: tl.constexpr,
    POTENTIALS: tl.constexpr,
    BATCH: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """One program per BATCH matrices."""
    o_batch = tl.program_id(0).to(tl.int64) * BATCH + tl.arange(0, BATCH)
    m_row, m_column = sides(o_batch, sizes_ptr, count, n, m, SIZES, N, M)
    logits, highest, scale = load_logits(
        matrices_ptr, scale_ptr, o_batch, count, m_row, m_column, stride, row_stride,
        column_stride, scale_stride, TYPE, NEGATED, N, M,
    )  # fmt: skip
    a = load_masses(a_ptr, o_batch, m_row, a_stride, TYPE, MASSES, N)
    b = load_masses(b_ptr, o_batch, m_column, b_stride, TYPE, MASSES, M)

    u, v = first_scalings(logits, a, b, m_row, m_column)
    kernel = tl.exp2(logits + u[:, :, None] + v[:, None, :])
    lost = tl.max(tl.max(((kernel < TINY) & (logits > -float("inf"))).to(tl.int32), 2), 1)
    phi = tl.where(m_row, tl.full((BATCH, N), 1, TYPE), 0)
    gamma = tl.where(m_column, tl.full((BATCH, M), 1, TYPE), 0)
    phi, gamma, most, errors, counts = balance(
        kernel, a, b, phi, gamma, m_row, m_column, iterations, tolerance, MASSES, STOP, POTENTIALS,
        False,
    )  # fmt: skip
    balanced = kernel * (a * phi)[:, :, None] * (b * gamma)[:, None, :]
    # Overflow ends in NaN or infinity, which are not below any number.
    again = ((lost > 0) & (most > MOST_SCALING)) | ((most < float("inf")) == 0)
    if POTENTIALS:
        u += tl.log2(tl.where(m_row, phi, 1))
        v += tl.log2(tl.where(m_column, gamma, 1))
    if tl.max(again.to(tl.int32), 0) > 0:
        # Loaded again, so that registers do not hold it till here.
        logits, _highest, _scale = load_logits(
            matrices_ptr, scale_ptr, o_batch, count, m_row, m_column, stride, row_stride,
            column_stride, scale_stride, TYPE, NEGATED, N, M,
        )  # fmt: skip
        first_u, first_v = first_scalings(logits, a, b, m_row, m_column)
        log_a, log_b = tl.log2(a), tl.log2(b)
        in_logs_u, in_logs_v, _most, log_errors, log_counts = balance(
            logits, log_a, log_b, first_u, first_v, m_row, m_column, iterations, tolerance, MASSES,
            STOP, POTENTIALS, True,
        )  # fmt: skip
        exponents = logits + (in_logs_u + log_a)[:, :, None] + (in_logs_v + log_b)[:, None, :]
        balanced = tl.where(again[:, None, None], tl.exp2(exponents), balanced)
        u = tl.where(again[:, None], in_logs_u, u)
        v = tl.where(again[:, None], in_logs_v, v)
        errors = tl.where(again, log_errors, errors)
        counts = tl.where(again, log_counts, counts)

    # A row or column without an entry spoils its matrix, and no other.
    total = tl.sum(tl.sum(balanced, 2), 1)
    balanced = tl.where((total < float("inf"))[:, None, None], balanced, float("nan"))
    o_row, o_column = tl.arange(0, N), tl.arange(0, M)
    m_batch = o_batch < count
    # All of a matrix is written, beyond the sizes that it has as well.
    tl.store(
        balanced_ptr + ((o_batch * n)[:, None, None] + o_row[None, :, None]) * m + o_column,
        balanced.to(balanced_ptr.dtype.element_ty),
        mask=m_batch[:, None, None] & (o_row < n)[None, :, None] & (o_column < m)[None, None, :],
    )
    if POTENTIALS:
        unit = tl.full((), 1 / LOG2_E, tl.float64) / scale
        f = unit[:, None] * u.to(tl.float64) - highest.to(tl.float64)
        g = unit[:, None] * v.to(tl.float64)
        tl.store(
            rows_ptr + o_batch[:, None] * n + o_row[None, :],
            tl.where(m_row, f, 0).to(TYPE),
            mask=m_batch[:, None] & (o_row < n)[None, :],
        )
        tl.store(
            columns_ptr + o_batch[:, None] * m + o_column[None, :],
            tl.where(m_column, g, 0).to(TYPE),
            mask=m_batch[:, None] & (o_column < m)[None, :],
        )
        tl.store(errors_ptr + o_batch, errors, mask=m_batch)
    if STOP:
        tl.store(counts_ptr + o_batch, counts, mask=m_batch)


@triton.jit
def balance(
    kernel, a, b, phi, gamma, m_row, m_column, iterations, tolerance,
    MASSES: tl.constexpr, STOP: tl.constexpr, POTENTIALS: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    """Iterations from the second on: scalings, what they went up to, errors and iterations made.

    With LOG, `kernel`, masses and scalings are logarithms to base 2.
    """
    most_row, most_column = phi, gamma
    errors = tl.sum(0 * phi, 1)
    counts = (0 * errors).to(tl.int32) + 1
    if STOP:
        sums = sums_of(kernel, gamma, b, 2, LOG)
        errors = row_error(phi, sums, a, m_row, MASSES, LOG)
        # NaN is not above the tolerance, and ends its matrix.
        active = errors > tolerance
        running = tl.max(active.to(tl.int32), 0)
        i = 1
        while (i < iterations) & (running > 0):
            next_phi = tl.where(m_row, inverse(sums, LOG), 0)
            next_gamma = tl.where(m_column, inverse(sums_of(kernel, next_phi, a, 1, LOG), LOG), 0)
            phi = tl.where(active[:, None], next_phi, phi)
            gamma = tl.where(active[:, None], next_gamma, gamma)
            most_row, most_column = tl.maximum(most_row, phi), tl.maximum(most_column, gamma)
            counts += active.to(tl.int32)
            sums = sums_of(kernel, gamma, b, 2, LOG)
            found = row_error(phi, sums, a, m_row, MASSES, LOG)
            errors = tl.where(active, found, errors)
            active = active & (errors > tolerance)
            running = tl.max(active.to(tl.int32), 0)
            i += 1
    else:
        for _ in range(1, iterations):
            phi = tl.where(m_row, inverse(sums_of(kernel, gamma, b, 2, LOG), LOG), 0)
            gamma = tl.where(m_column, inverse(sums_of(kernel, phi, a, 1, LOG), LOG), 0)
            most_row, most_column = tl.maximum(most_row, phi), tl.maximum(most_column, gamma)
        if POTENTIALS:
            errors = row_error(phi, sums_of(kernel, gamma, b, 2, LOG), a, m_row, MASSES, LOG)
    most = tl.maximum(tl.max(most_row, 1), tl.max(most_column, 1))
    # Maxima forget NaN.
    most = most + 0 * (tl.sum(phi, 1) + tl.sum(gamma, 1))
    return phi, gamma, most, errors, counts


@triton.jit
def sums_of(kernel, scaling, masses, AXIS: tl.constexpr, LOG: tl.constexpr):
    """Sums along columns (AXIS 2) or rows of the kernel, times what is scaled and its masses."""
    if LOG:
        found = log_sum(kernel + tl.expand_dims(scaling + masses, 3 - AXIS), AXIS)
    else:
        found = tl.sum(kernel * tl.expand_dims(scaling * masses, 3 - AXIS), AXIS)
    return found


@triton.jit
def inverse(sums, LOG: tl.constexpr):
    """1 / sums, by logarithms with LOG."""
    return -sums if LOG else 1 / sums


@triton.jit
def row_error(phi, sums, a, m_row, MASSES: tl.constexpr, LOG: tl.constexpr):
    """|R 1 - a|: its sum, or the largest where there are no masses."""
    ratio = tl.exp2(phi + sums) if LOG else phi * sums
    deviation = tl.where(m_row, tl.abs(ratio - 1), 0)
    if MASSES:
        error = tl.sum(deviation * (tl.exp2(a) if LOG else a), 1)
    else:
        # Maxima forget NaN.
        error = tl.max(deviation, 1) + 0 * tl.sum(deviation, 1)
    return error


@triton.jit
def first_scalings(logits, a, b, m_row, m_column):
    """Logarithms to base 2 of the scalings of the first iteration."""
    log_a, log_b = tl.log2(a), tl.log2(b)
    u = tl.where(m_row, -log_sum(logits + log_b[:, None, :], 2), 0)
    v = tl.where(m_column, -log_sum(logits + (u + log_a)[:, :, None], 1), 0)
    return u, v


@triton.jit
def log_sum(exponents, AXIS: tl.constexpr):
    """log2 sum 2^exponents along an axis, -inf where all of them are."""
    highest = tl.max(exponents, AXIS)
    highest = tl.where(highest > -float("inf"), highest, 0)
    return highest + tl.log2(tl.sum(tl.exp2(exponents - tl.expand_dims(highest, AXIS)), AXIS))


@triton.jit
def sides(o_batch, sizes_ptr, count, n, m, SIZES: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    """Which rows (BATCH, N) and columns (BATCH, M) there are."""
    m_batch = o_batch < count
    rows = tl.where(m_batch, n, 0)
    columns = tl.where(m_batch, m, 0)
    if SIZES:
        rows = tl.load(sizes_ptr + 2 * o_batch, mask=m_batch, other=0)
        columns = tl.load(sizes_ptr + 2 * o_batch + 1, mask=m_batch, other=0)
    return tl.arange(0, N)[None, :] < rows[:, None], tl.arange(0, M)[None, :] < columns[:, None]


@triton.jit
def load_logits(
    matrices_ptr, scale_ptr, o_batch, count, m_row, m_column, stride, row_stride, column_stride,
    scale_stride, TYPE: tl.constexpr, NEGATED: tl.constexpr, N: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """(x - h 1^T) / t by log2(e), -inf beyond the matrix, h (BATCH, N) largest of rows, and 1 / t.

    Less the largest of its row, no entry is rounded by more than the range of the matrix.
    """
    o_row, o_column = tl.arange(0, N).to(tl.int64), tl.arange(0, M).to(tl.int64)
    m_entry = m_row[:, :, None] & m_column[:, None, :]
    x = tl.load(
        matrices_ptr
        + (o_batch * stride)[:, None, None]
        + (o_row * row_stride)[None, :, None]
        + (o_column * column_stride)[None, None, :],
        mask=m_entry,
        other=0.0,
    ).to(TYPE)
    x = tl.where(m_entry, -x if NEGATED else x, -float("inf"))
    highest = tl.where(m_row, tl.max(x, 2), 0)
    scale = tl.load(scale_ptr + o_batch * scale_stride, mask=o_batch < count, other=1.0)
    # Neither negative nor infinite temperatures have a meaning.
    scale = tl.where(scale > 0, scale, float("nan"))
    logits = (x - highest[:, :, None]) * (scale * LOG2_E).to(TYPE)[:, None, None]
    return logits, highest, scale


@triton.jit
def load_masses(
    masses_ptr, o_batch, m_side, stride, TYPE: tl.constexpr, MASSES: tl.constexpr, N: tl.constexpr
):
    """Masses (BATCH, N), 1 where there are none, 0 beyond the side."""
    if MASSES:
        p_masses = masses_ptr + o_batch[:, None] * stride + tl.arange(0, N)[None, :]
        masses = tl.load(p_masses, mask=m_side, other=0.0).to(TYPE)
    else:
        masses = tl.where(m_side, 1.0, 0.0).to(TYPE)
    return masses


def packing_for(n: int, m: int, dtype: torch.dtype) -> Packing:
    """The packing of matrices (n, m) that are computed in float32 or float64."""
    rows, columns = padded(n, m)
    entries = rows * columns * (dtype.itemsize // 4)
    return next((found for most, found in PACKINGS.items() if entries <= most), Packing(1, 16))


def small_balance(
    matrices: Tensor,
    scale: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    sizes: Tensor | None,
    iterations: int,
    tolerance: float | None,
    negated: bool,
    *,
    potentials: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Balance all matrices.

    Args:
        matrices: x (B, n, m), n and m up to 128, float16 to float64, of any strides; computed in
            float32, or float64 if they are.
        scale: 1 / t, (B,) or () float64.
        a: (B, n) or (n,) masses, 1 by default; both or neither.
        b: (B, m) or (m,), likewise.
        sizes: (B, 2) int32, rows and columns of each matrix that there are.
        iterations: at least 1, the most there may be with a tolerance.
        tolerance: of |R 1 - a|, summed up with masses, else its largest; None makes all iterations.
        negated: whether `matrices` holds -x.
        potentials: whether potentials and errors are asked for.

    Returns:
        R (B, n, m) of the type of the matrices; t log phi (B, n), t log gamma (B, m) and errors
        (B,) in float32 or float64, empty unless asked for; iterations made (B,) int32, empty
        without a tolerance.
    """
    count, n, m = matrices.shape
    dtype = torch.promote_types(matrices.dtype, torch.float32)
    device, one = matrices.device, int(potentials)
    balanced = torch.empty((count, n, m), dtype=matrices.dtype, device=device)
    rows, columns, errors = (
        torch.empty(shape, dtype=dtype, device=device)
        for shape in ((one * count, n), (one * count, m), (one * count,))
    )
    stops = tolerance is not None
    counts = torch.empty(count if stops else 0, dtype=torch.int32, device=device)
    if balanced.numel() == 0:
        return balanced, rows, columns, errors, counts
    packing, (tile_rows, tile_columns) = packing_for(n, m, dtype), padded(n, m)
    small_balance_kernel[(triton.cdiv(count, packing.matrices),)](
        matrices,
        scale,
        *(matrices if masses is None else masses for masses in (a, b)),
        matrices if sizes is None else sizes,
        balanced,
        *(given if given.numel() else balanced for given in (rows, columns, errors, counts)),
        count,
        n,
        m,
        iterations,
        float(tolerance or 0),
        *matrices.stride(),
        scale.stride(0) if scale.ndim else 0,
        *(masses.stride(0) if masses is not None and masses.ndim == 2 else 0 for masses in (a, b)),
        TYPE=tl.float64 if dtype == torch.float64 else tl.float32,
        TINY=torch.finfo(dtype).tiny,
        NEGATED=negated,
        MASSES=a is not None,
        SIZES=sizes is not None,
        STOP=stops,
        POTENTIALS=potentials,
        BATCH=packing.matrices,
        N=tile_rows,
        M=tile_columns,
        num_warps=packing.warps,
    )
    return balanced, rows, columns, errors, counts
