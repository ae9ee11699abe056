"""Doubly stochastic matrices of up to 4 rows: a matrix per thread, nothing exchanged.

    R = diag(phi) exp(x / t) diag(gamma)        x (n, n), n <= 4, rows then columns scaled to 1

`small_balance` without masses, errors and potentials, as there in the log domain first and then by
scalings of a fixed matrix E with entries in [0, 1]; see there for what is done again, and why.

Matrices are loaded in one piece and turned over once, so that every entry is a vector along
matrices: sums along rows and along columns are a thread's own. N sums have one reciprocal,
1 / s_0 = (s_1 s_2 s_3) / (s_0 s_1 s_2 s_3), which overflows or is lost only where scalings are
beyond 2^30, and is then NaN to the end. 1 / s is the square of 1 / sqrt(s), one instruction each
where a quotient is eight, and right to three units in the last place.

Memory: x is read, and R written, once. Work: for 4 x 4 54 operations an iteration, two of them on
the special-function unit, and 32 exponentials in all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from otdd_flash.kernels.batched.small_adjoint import padded
from otdd_flash.kernels.batched.small_balance import LOG2_E, MOST_SCALING

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
    o_entry = tl.arange(0, N * N)
    o_row, o_column = o_entry // N, o_entry % N
    m_here = (o_row < n) & (o_column < n)
    m_entry = (o_batch < count)[:, None] & m_here[None, :]  # (BATCH, N * N)
    if CONTIGUOUS:
        p_entries = matrices_ptr + o_batch[:, None] * (N * N) + o_entry[None, :]
    else:
        p_entries = matrices_ptr + (o_batch * stride)[:, None]
        p_entries += (o_row.to(tl.int64) * row_stride + o_column.to(tl.int64) * column_stride)[
            None, :
        ]
    if FULL:
        m_entry = (o_batch < count)[:, None]
        x = tl.load(p_entries, mask=m_entry, other=0.0).to(TYPE)
    else:
        x = tl.load(p_entries, mask=m_entry, other=0.0).to(TYPE)
        x = tl.where(m_here[None, :], x, -float("inf"))
    logits = entries_of(x, BATCH, N)
    scale = tl.load(scale_ptr)
    # Neither negative nor infinite temperatures have a meaning.
    scale = (tl.where(scale > 0, scale, float("nan")) * LOG2_E).to(TYPE)
    logits = centred(logits, scale, n, FULL, N)

    ones = ()
    for _ in tl.static_range(N):
        ones += (tl.full((BATCH,), 1, TYPE),)
    kernel = first_iteration(logits, n, FULL, N)
    lost = tl.zeros((BATCH,), tl.int32)
    total = tl.zeros((BATCH,), TYPE)
    for k in tl.static_range(N * N):
        missing = (kernel[k] < TINY) & (logits[k] > -float("inf"))
        lost = tl.maximum(lost, missing.to(tl.int32))
        total += kernel[k]
    # A column without an entry spoils its matrix.
    spoiled = 0 * total
    phi, gamma, most = ones, ones, tl.zeros((BATCH,), TYPE)
    for _ in range((iterations - 1) // LOOK_EVERY):
        for _ in tl.static_range(LOOK_EVERY):
            phi = row_scalings(kernel, gamma, n, FULL, N)
            gamma = column_scalings(kernel, phi, n, FULL, N)
        most = moved(most, phi, gamma, N)
    for _ in range((iterations - 1) % LOOK_EVERY):
        phi = row_scalings(kernel, gamma, n, FULL, N)
        gamma = column_scalings(kernel, phi, n, FULL, N)
    most = moved(most, phi, gamma, N)
    # Overflow ends in NaN or infinity, which are not below any number; maxima forget NaN.
    most += 0 * (gamma[0] + phi[0]) + spoiled
    again = ((lost > 0) & (most > MOST_SCALING)) | ((most < float("inf")) == 0)
    balanced = ()
    for k in tl.static_range(N * N):
        balanced += (kernel[k] * phi[k // N] * gamma[k % N] + spoiled,)
    if CONTIGUOUS or FULL:
        p_balanced = balanced_ptr + o_batch[:, None] * (N * N) + o_entry[None, :]
    else:
        p_balanced = balanced_ptr + (o_batch * n * n)[:, None] + (o_row * n + o_column)[None, :]
    whole = matrix_of(balanced, BATCH, N)
    tl.store(p_balanced, whole.to(balanced_ptr.dtype.element_ty), mask=m_entry)
    if tl.max(again.to(tl.int32), 0) > 0:
        u, v = (), ()
        for _ in tl.static_range(N):
            u += (tl.zeros((BATCH,), TYPE),)
            v += (tl.zeros((BATCH,), TYPE),)
        for _ in range(iterations):
            u = log_scalings(logits, v, n, True, FULL, N)
            v = log_scalings(logits, u, n, False, FULL, N)
        balanced = ()
        for k in tl.static_range(N * N):
            balanced += (tl.exp2(logits[k] + u[k // N] + v[k % N]) + spoiled,)
        whole = matrix_of(balanced, BATCH, N)
        m_again = m_entry & again[:, None]
        tl.store(p_balanced, whole.to(balanced_ptr.dtype.element_ty), mask=m_again)


@triton.jit
def entries_of(x, BATCH: tl.constexpr, N: tl.constexpr):
    """The N * N entries (BATCH,) of matrices (BATCH, N * N)."""
    if N == 2:
        left, right = tl.split(tl.reshape(x, (BATCH, 2, 2)))
        a, c = tl.split(left)
        b, d = tl.split(right)
        entries = (a, b, c, d)
    else:
        parts = (tl.reshape(x, (BATCH, 2, 2, 2, 2)),)
        for _ in tl.static_range(4):
            halves = ()
            for k in tl.static_range(len(parts)):
                first, second = tl.split(parts[k])
                halves += (first, second)
            parts = halves
        # The last bit of the place was split off first.
        entries = ()
        for k in tl.static_range(16):
            entries += (parts[((k & 1) << 3) | ((k & 2) << 1) | ((k & 4) >> 1) | ((k & 8) >> 3)],)
    return entries


@triton.jit
def matrix_of(entries, BATCH: tl.constexpr, N: tl.constexpr):
    """Matrices (BATCH, N * N) of N * N entries (BATCH,)."""
    if N == 2:
        columns = tl.join(tl.join(entries[0], entries[2]), tl.join(entries[1], entries[3]))
        whole = tl.reshape(columns, (BATCH, 4))
    else:
        parts = ()
        for k in tl.static_range(16):
            parts += (entries[((k & 1) << 3) | ((k & 2) << 1) | ((k & 4) >> 1) | ((k & 8) >> 3)],)
        for _ in tl.static_range(4):
            joined = ()
            for k in tl.static_range(len(parts) // 2):
                joined += (tl.join(parts[2 * k], parts[2 * k + 1]),)
            parts = joined
        whole = tl.reshape(parts[0], (BATCH, 16))
    return whole


@triton.jit
def centred(entries, scale, n, FULL: tl.constexpr, N: tl.constexpr):
    """Entries less the largest of their row, scaled; -inf beyond the matrix."""
    logits = ()
    for i in tl.static_range(N):
        highest = entries[i * N]
        for j in tl.static_range(1, N):
            highest = tl.maximum(highest, entries[i * N + j])
        if not FULL:
            highest = tl.where(tl.full((1,), i, tl.int32) < n, highest, 0)
        for j in tl.static_range(N):
            logits += ((entries[i * N + j] - highest) * scale,)
    return logits


@triton.jit
def first_iteration(logits, n, FULL: tl.constexpr, N: tl.constexpr):
    """E: rows, whose largest logit is 0, and then columns, in the log domain."""
    rows = ()
    for i in tl.static_range(N):
        sums = tl.exp2(logits[i * N])
        for j in tl.static_range(1, N):
            sums += tl.exp2(logits[i * N + j])
        sums = sums if FULL else tl.where(tl.full((1,), i, tl.int32) < n, sums, 1)
        shift = tl.log2(sums)
        for j in tl.static_range(N):
            rows += (logits[i * N + j] - shift,)
    inverse = ()
    entries = ()
    for j in tl.static_range(N):
        highest = rows[j]
        for i in tl.static_range(1, N):
            highest = tl.maximum(highest, rows[i * N + j])
        if not FULL:
            highest = tl.where(tl.full((1,), j, tl.int32) < n, highest, 0)
        sums = 0 * highest
        for i in tl.static_range(N):
            entry = tl.exp2(rows[i * N + j] - highest)
            entries += (entry,)
            sums += entry
        if not FULL:
            sums = tl.where(tl.full((1,), j, tl.int32) < n, sums, 1)
        inverse += (1 / sums,)
    kernel = ()
    for k in tl.static_range(N * N):
        kernel += (entries[k % N * N + k // N] * inverse[k % N],)
    return kernel


@triton.jit
def row_scalings(kernel, gamma, n, FULL: tl.constexpr, N: tl.constexpr):
    """1 / (E gamma), N times (BATCH,)."""
    sums = ()
    for i in tl.static_range(N):
        s = kernel[i * N] * gamma[0]
        for j in tl.static_range(1, N):
            s += kernel[i * N + j] * gamma[j]
        sums += (s if FULL else tl.where(tl.full((1,), i, tl.int32) < n, s, 1),)
    return inverses(sums, N)


@triton.jit
def column_scalings(kernel, phi, n, FULL: tl.constexpr, N: tl.constexpr):
    """1 / (E^T phi), N times (BATCH,)."""
    sums = ()
    for j in tl.static_range(N):
        s = kernel[j] * phi[0]
        for i in tl.static_range(1, N):
            s += kernel[i * N + j] * phi[i]
        sums += (s if FULL else tl.where(tl.full((1,), j, tl.int32) < n, s, 1),)
    return inverses(sums, N)


@triton.jit
def inverses(sums, N: tl.constexpr):
    """1 / s of each of N sums, by one of their product."""
    if N == 2:
        both = reciprocal(sums[0] * sums[1])
        found = (both * sums[1], both * sums[0])
    else:
        first, second = sums[0] * sums[1], sums[2] * sums[3]
        all_of = reciprocal(first * second)
        by_first, by_second = all_of * second, all_of * first
        found = (by_first * sums[1], by_first * sums[0], by_second * sums[3], by_second * sums[2])
    return found


@triton.jit
def reciprocal(x):
    """1 / x of positive numbers: the square of 1 / sqrt(x), but for float64."""
    if x.dtype == tl.float64:
        found = 1 / x
    else:
        root = tl.rsqrt(x)
        found = root * root
    return found


@triton.jit
def log_scalings(logits, other, n, ROWS: tl.constexpr, FULL: tl.constexpr, N: tl.constexpr):
    """Scalings of rows, or of columns, by logarithms to base 2, of the matrix itself."""
    found = ()
    for i in tl.static_range(N):
        highest = (logits[i * N] if ROWS else logits[i]) + other[0]
        for j in tl.static_range(1, N):
            highest = tl.maximum(
                highest, (logits[i * N + j] if ROWS else logits[j * N + i]) + other[j]
            )
        highest = tl.where(highest > -float("inf"), highest, 0)
        sums = 0 * highest
        for j in tl.static_range(N):
            sums += tl.exp2((logits[i * N + j] if ROWS else logits[j * N + i]) + other[j] - highest)
        scaling = -(highest + tl.log2(sums))
        found += (scaling if FULL else tl.where(tl.full((1,), i, tl.int32) < n, scaling, 0),)
    return found


@triton.jit
def moved(most, phi, gamma, N: tl.constexpr):
    """The largest scalings so far."""
    for i in tl.static_range(N):
        most = tl.maximum(most, tl.maximum(phi[i], gamma[i]))
    return most


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
