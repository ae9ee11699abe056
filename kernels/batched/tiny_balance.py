"""Doubly stochastic matrices of up to 4 rows: a matrix per thread, nothing exchanged.

    R = diag(phi) exp(x / t) diag(gamma)        x (n, n), n <= 4, rows then columns scaled to 1

`small_balance` without masses, errors and potentials, as there in the log domain first and then by
scalings of a fixed matrix E with entries in [0, 1]; see there for what is done again, and why.

A row of N entries is one load of a thread, which holds all N rows of its matrix: sums along rows
and along columns are its own. N sums have one reciprocal: 1 / s_0 = (s_1 s_2 s_3) / (s_0 s_1 s_2
s_3), which overflows or is lost only where scalings are beyond 2^30, and is then NaN to the end.

Memory: x is read, and R written, once. Work: for 4 x 4 50 operations and two reciprocals an
iteration, 32 exponentials in all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.batched.small_adjoint import padded
from otdd_flash.kernels.batched.small_balance import LOG2_E, MOST_SCALING, log_sum

# Rows and columns that the kernel takes at the most.
MOST = 4
# Matrices of a program, and its warps.
BATCH, WARPS = 128, 4
# Iterations between looks at how far scalings moved; an iteration moves one by 2^4 at the most.
LOOK_EVERY = tl.constexpr(4)


@triton.jit
def tiny_balance_kernel(
    matrices_ptr,  # x (B, n, n) of any strides
    scale_ptr,  # 1 / t () float64
    balanced_ptr,  # R (B, n, n)
    count,
    n,
    iterations,
    stride,
    row_stride,
    column_stride,
    TYPE: tl.constexpr,
    TINY: tl.constexpr,
    FULL: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    BATCH: tl.constexpr,
    N: tl.constexpr,
):
    """One program per BATCH matrices; FULL where n is N, CONTIGUOUS where matrices then are."""
    o_batch = tl.program_id(0).to(tl.int64) * BATCH + tl.arange(0, BATCH)
    o_column = tl.arange(0, N)
    m_batch = (o_batch < count)[:, None]
    m_entry = m_batch if FULL else m_batch & (o_column < n)[None, :]  # (BATCH, N)
    scale = (tl.load(scale_ptr) * LOG2_E).to(TYPE)
    logits = ()
    for i in tl.static_range(N):
        if CONTIGUOUS:
            p_row = matrices_ptr + o_batch[:, None] * (N * N) + (i * N + o_column)[None, :]
        else:
            p_row = matrices_ptr + o_batch[:, None] * stride + i * row_stride
            p_row += (o_column * column_stride)[None, :]
        m_here = tl.full((1, 1), i, tl.int32) < n
        x = tl.load(p_row, mask=m_entry if FULL else m_entry & m_here, other=0.0).to(TYPE)
        if not FULL:
            x = tl.where((o_column < n)[None, :] & m_here, x, -float("inf"))
        highest = tl.max(x, 1)[:, None]
        if not FULL:
            highest = tl.where(m_here, highest, 0)
        logits = logits + ((x - highest) * scale,)

    # The first iteration. Rows have 0 for their largest logit.
    raised = tl.full((BATCH, N), -float("inf"), TYPE)
    kernel = ()
    for i in tl.static_range(N):
        sums = tl.sum(tl.exp2(logits[i]), 1)
        if not FULL:
            sums = tl.where(i < n, sums, 1)
        row = logits[i] - tl.log2(sums)[:, None]
        kernel = kernel + (row,)
        raised = tl.maximum(raised, row)
    if not FULL:
        raised = tl.where((o_column < n)[None, :], raised, 0)
    gamma = tl.zeros((BATCH, N), TYPE)
    entries = ()
    for i in tl.static_range(N):
        entry = tl.exp2(kernel[i] - raised)
        entries = entries + (entry,)
        gamma += entry
    gamma = 1 / (gamma if FULL else tl.where((o_column < n)[None, :], gamma, 1))
    kernel = ()
    lost = tl.zeros((BATCH,), tl.int32)
    for i in tl.static_range(N):
        kernel = kernel + (entries[i] * gamma,)
        missing = (kernel[i] < TINY) & (logits[i] > -float("inf"))
        lost = tl.maximum(lost, tl.max(missing.to(tl.int32), 1))

    phi, gamma = ones_of(kernel, BATCH, N, TYPE)
    most = tl.zeros((BATCH, N), TYPE)
    for _ in range((iterations - 1) // LOOK_EVERY):
        for _ in tl.static_range(LOOK_EVERY):
            phi = row_scalings(kernel, gamma, n, FULL, N)
            gamma = column_scalings(kernel, phi, o_column < n, FULL, BATCH, N)
        most = moved(most, phi, gamma, N)
    for _ in range((iterations - 1) % LOOK_EVERY):
        phi = row_scalings(kernel, gamma, n, FULL, N)
        gamma = column_scalings(kernel, phi, o_column < n, FULL, BATCH, N)
    most = moved(most, phi, gamma, N)
    # Overflow ends in NaN or infinity, which are not below any number; maxima forget NaN.
    highest = tl.max(most, 1) + 0 * (tl.sum(gamma, 1) + phi[0])
    again = ((lost > 0) & (highest > MOST_SCALING)) | ((highest < float("inf")) == 0)
    for i in tl.static_range(N):
        row = kernel[i] * phi[i][:, None] * gamma
        store_row(balanced_ptr, o_batch, o_column, i, n, row, m_entry, FULL, N)
    if tl.max(again.to(tl.int32), 0) > 0:
        u, v = (), tl.zeros((BATCH, N), TYPE)
        for i in tl.static_range(N):
            u = u + (tl.zeros((BATCH,), TYPE),)
        for _ in range(iterations):
            u = log_row_scalings(logits, v, n, FULL, N)
            v = log_column_scalings(logits, u, o_column < n, FULL, N)
        # A column without an entry spoils its matrix.
        spoiled = 0 * tl.sum(v, 1)[:, None]
        for i in tl.static_range(N):
            row = tl.exp2(logits[i] + u[i][:, None] + v) + spoiled
            m_again = m_entry & again[:, None]
            store_row(balanced_ptr, o_batch, o_column, i, n, row, m_again, FULL, N)


@triton.jit
def ones_of(kernel, BATCH: tl.constexpr, N: tl.constexpr, TYPE: tl.constexpr):
    """Scalings of 1, all of them NaN where the kernel has one."""
    total = tl.zeros((BATCH,), TYPE)
    for i in tl.static_range(N):
        total += tl.sum(kernel[i], 1)
    one = 1 + 0 * total
    phi = ()
    for _ in tl.static_range(N):
        phi = phi + (one,)
    return phi, tl.full((BATCH, N), 1, TYPE)


@triton.jit
def row_scalings(kernel, gamma, n, FULL: tl.constexpr, N: tl.constexpr):
    """1 / (E gamma), N times (BATCH,), with one reciprocal."""
    sums = ()
    for i in tl.static_range(N):
        s = tl.sum(kernel[i] * gamma, 1)
        sums = sums + (s if FULL else tl.where(i < n, s, 1),)
    if N == 2:
        both = 1 / (sums[0] * sums[1])
        return both * sums[1], both * sums[0]
    else:
        first, second = sums[0] * sums[1], sums[2] * sums[3]
        all_of = 1 / (first * second)
        by_first, by_second = all_of * second, all_of * first
        return by_first * sums[1], by_first * sums[0], by_second * sums[3], by_second * sums[2]


@triton.jit
def column_scalings(
    kernel, phi, m_column, FULL: tl.constexpr, BATCH: tl.constexpr, N: tl.constexpr
):
    """1 / (E^T phi) (BATCH, N), with one reciprocal a matrix."""
    sums = kernel[0] * phi[0][:, None]
    for i in tl.static_range(1, N):
        sums += kernel[i] * phi[i][:, None]
    if not FULL:
        sums = tl.where(m_column[None, :], sums, 1)
    if N == 2:
        first, second = tl.split(sums)
        both = 1 / (first * second)
        return tl.join(both * second, both * first)
    else:
        even, odd = tl.split(tl.reshape(sums, (BATCH, 2, 2)))
        first, second = tl.split(even * odd)
        all_of = 1 / (first * second)
        by_pair = tl.join(all_of * second, all_of * first)
        return tl.reshape(tl.join(by_pair * odd, by_pair * even), (BATCH, N))


@triton.jit
def log_row_scalings(logits, v, n, FULL: tl.constexpr, N: tl.constexpr):
    """Likewise by logarithms to base 2, of the matrix itself."""
    u = ()
    for i in tl.static_range(N):
        row = -log_sum(logits[i] + v, 1)
        u = u + (row if FULL else tl.where(i < n, row, 0),)
    return u


@triton.jit
def log_column_scalings(logits, u, m_column, FULL: tl.constexpr, N: tl.constexpr):
    """Likewise."""
    raised = logits[0] + u[0][:, None]
    for i in tl.static_range(1, N):
        raised = tl.maximum(raised, logits[i] + u[i][:, None])
    raised = tl.where(raised > -float("inf"), raised, 0)
    sums = tl.zeros_like(raised)
    for i in tl.static_range(N):
        sums += tl.exp2(logits[i] + u[i][:, None] - raised)
    v = -(raised + tl.log2(sums))
    return v if FULL else tl.where(m_column[None, :], v, 0)


@triton.jit
def moved(most, phi, gamma, N: tl.constexpr):
    """The largest scalings so far, spread over columns."""
    most = tl.maximum(most, gamma)
    for i in tl.static_range(N):
        most = tl.maximum(most, phi[i][:, None])
    return most


@triton.jit
def store_row(
    balanced_ptr, o_batch, o_column, i, n, row, m_entry, FULL: tl.constexpr, N: tl.constexpr
):
    """Row i of contiguous matrices."""
    if FULL:
        p_row = balanced_ptr + o_batch[:, None] * (N * N) + (i * N + o_column)[None, :]
        tl.store(p_row, row.to(balanced_ptr.dtype.element_ty), mask=m_entry)
    else:
        p_row = balanced_ptr + o_batch[:, None] * n * n + (i * n + o_column)[None, :]
        m_row = m_entry & (tl.full((1, 1), i, tl.int32) < n)
        tl.store(p_row, row.to(balanced_ptr.dtype.element_ty), mask=m_row)


def tiny_balance(matrices: Tensor, scale: Tensor, iterations: int) -> Tensor:
    """Balance all matrices.

    Args:
        matrices: x (B, n, n), n up to 4, float16 to float64, of any strides; computed in float32,
            or float64 if they are.
        scale: 1 / t, () float64.
        iterations: at least 1.

    Returns:
        R (B, n, n) of the type of the matrices.
    """
    count, n, _ = matrices.shape
    balanced = torch.empty(matrices.shape, dtype=matrices.dtype, device=matrices.device)
    if balanced.numel() == 0:
        return balanced
    dtype = torch.promote_types(matrices.dtype, torch.float32)
    width = padded(n, n)[0]
    tiny_balance_kernel[(triton.cdiv(count, BATCH),)](
        matrices,
        scale,
        balanced,
        count,
        n,
        iterations,
        *matrices.stride(),
        TYPE=tl.float64 if dtype == torch.float64 else tl.float32,
        TINY=torch.finfo(dtype).tiny,
        FULL=n == width,
        CONTIGUOUS=n == width and matrices.is_contiguous(),
        BATCH=BATCH,
        N=width,
        num_warps=WARPS,
    )
    return balanced
