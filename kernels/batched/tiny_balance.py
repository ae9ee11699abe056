"""Doubly stochastic matrices of up to 4 rows: a matrix per thread, nothing exchanged.

    R = diag(phi) exp(x / t) diag(gamma)        x (n, n), n <= 4, rows then columns scaled to 1

It computes R as `small_balance` does, without masses, tolerance and potentials: the first iteration
in the log domain, the others by scalings of a fixed matrix E with entries in [0, 1].
`small_balance` says what else is done in the log domain, and why.

Every entry is a vector along matrices, and a thread loads the rows of its own matrices: sums along
rows and along columns take no exchange between threads. N sums have one reciprocal, 1 / s_0 = (s_1
s_2 s_3) / (s_0 s_1 s_2 s_3), which overflows or is lost only if scalings are beyond 2^30; scalings
are then infinite or NaN, and the matrix is done again in the log domain.

`otdd_flash.batched.balance` calls `tiny_balance` for the problems that `takes` accepts, where no
potentials are asked for. `tiny_balance_backward` uses its device functions and differentiates its
iterations, so a change of these must be made there too. `tests/kernels/test_compilation.py` limits
the registers that may spill.

Memory: x is read, and R written, once. Work: for 4 x 4 54 operations an iteration, two of them on
the special-function unit, and 32 exponentials in all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from otdd_flash.kernels.batched.problems import Balanced, Problems, computed_in
from otdd_flash.kernels.batched.tiles import SMALL, in_logs, on_grid, padded, reciprocal
from otdd_flash.kernels.launch import LOG2_E, on_its_device

# Rows and columns that the kernel takes at the most.
MOST = 4
# Matrices of a program, its warps, and registers of a thread at the most where tiles are full: a
# repeat in the log domain, which is rare, would take more, and spills them instead.
BATCH, WARPS, REGISTERS = 32, 1, 96
# Iterations between looks at how far scalings moved; an iteration moves one by 2^4 at the most.
LOOK_EVERY = tl.constexpr(4)


@on_its_device
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
    logits = load_entries(
        matrices_ptr, o_batch, count, n, stride, row_stride, column_stride, TYPE,
        -float("inf"), FULL, CONTIGUOUS, BATCH, N,
    )  # fmt: skip
    scale = tl.load(scale_ptr)
    # Neither negative nor infinite temperatures have a meaning.
    scale = (tl.where(scale > 0, scale, float("nan")) * LOG2_E).to(TYPE)
    logits = centred(logits, scale, n, FULL, N)

    ones = ()
    for _ in tl.static_range(N):
        ones += (tl.full((BATCH,), 1, TYPE),)
    kernel, _ = first_iteration(logits, n, FULL, N)
    smallest = tl.full((BATCH,), 1, TYPE)
    total = tl.zeros((BATCH,), TYPE)
    for k in tl.static_range(N * N):
        smallest = tl.minimum(smallest, tl.where(logits[k] > -float("inf"), kernel[k], 1))
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
    # Maxima forget NaN.
    most += 0 * (gamma[0] + phi[0]) + spoiled
    again = in_logs(smallest, most, TINY)
    balanced = ()
    for k in tl.static_range(N * N):
        # Scalings may be far apart, and their product is nearer to 1 than that with an entry.
        balanced += (kernel[k] * (phi[k // N] * gamma[k % N]) + spoiled,)
    m_batch = o_batch < count
    store_entries(balanced_ptr, balanced, o_batch, m_batch, n, FULL, BATCH, N)
    if tl.max((again | (smallest < SMALL)).to(tl.int32), 0) > 0:
        lowest = tl.zeros((BATCH,), TYPE)
        for k in tl.static_range(N * N):
            lowest = tl.minimum(lowest, tl.where(logits[k] > -float("inf"), logits[k], 0))
        # Logits of matrices that are not repeated stay as they are.
        grid = tl.where(again, -2 * lowest, 0)
        gridded, zeros = (), ()
        for k in tl.static_range(N * N):
            gridded += (on_grid(logits[k], grid),)
        for _ in tl.static_range(N):
            zeros += (tl.zeros((BATCH,), TYPE),)
        first_u, first_u_rest = log_scalings(gridded, zeros, zeros, grid, n, True, FULL, N)
        first_v, first_v_rest = log_scalings(
            gridded, first_u, first_u_rest, grid, n, False, FULL, N
        )
        u, u_rest, v, v_rest = first_u, first_u_rest, first_v, first_v_rest
        made = tl.where(tl.max(again.to(tl.int32), 0) > 0, iterations, 1)
        for _ in range(1, made):
            u, u_rest = log_scalings(gridded, v, v_rest, grid, n, True, FULL, N)
            v, v_rest = log_scalings(gridded, u, u_rest, grid, n, False, FULL, N)
        u, u_rest = chosen(again, u, u_rest, first_u, first_u_rest, phi, N)
        v, v_rest = chosen(again, v, v_rest, first_v, first_v_rest, gamma, N)
        corrected = ()
        for k in tl.static_range(N * N):
            exponent = gridded[k] + u[k // N] + v[k % N]
            found = tl.exp2(exponent + (u_rest[k // N] + v_rest[k % N]))
            corrected += (tl.where(again | (kernel[k] < SMALL), found + spoiled, balanced[k]),)
        store_entries(balanced_ptr, corrected, o_batch, m_batch, n, FULL, BATCH, N)


@triton.jit
def load_entries(
    matrices_ptr, o_batch, count, n, stride, row_stride, column_stride, TYPE: tl.constexpr,
    BEYOND: tl.constexpr, FULL: tl.constexpr, CONTIGUOUS: tl.constexpr, BATCH: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The N * N entries (BATCH,) of matrices, or BEYOND them; a thread loads its own, by rows."""
    o_column = tl.arange(0, N)
    m_batch = (o_batch < count)[:, None]
    entries = ()
    for i in tl.static_range(N):
        if CONTIGUOUS:
            p_row = matrices_ptr + o_batch[:, None] * (N * N) + (i * N + o_column)[None, :]
        else:
            p_row = matrices_ptr + (o_batch * stride)[:, None]
            p_row += (tl.full((1,), i, tl.int64) * row_stride + o_column * column_stride)[None, :]
        if FULL:
            row = tl.load(p_row, mask=m_batch, other=0.0).to(TYPE)
        else:
            m_here = ((tl.full((1,), i, tl.int32) < n) & (o_column < n))[None, :]
            row = tl.load(p_row, mask=m_batch & m_here, other=0.0).to(TYPE)
            row = tl.where(m_here, row, BEYOND)
        if N == 2:
            first, second = tl.split(row)
            entries += (first, second)
        else:
            even, odd = tl.split(tl.reshape(row, (BATCH, 2, 2)))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            entries += (first, second, third, fourth)
    return entries


@triton.jit
def store_entries(
    balanced_ptr, entries, o_batch, m_batch, n, FULL: tl.constexpr, BATCH: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """The matrices of N * N entries (BATCH,), contiguous."""
    o_column = tl.arange(0, N)
    for i in tl.static_range(N):
        if N == 2:
            row = tl.join(entries[2 * i], entries[2 * i + 1])
        else:
            even = tl.join(entries[4 * i], entries[4 * i + 2])
            odd = tl.join(entries[4 * i + 1], entries[4 * i + 3])
            row = tl.reshape(tl.join(even, odd), (BATCH, 4))
        if FULL:
            p_row = balanced_ptr + o_batch[:, None] * (N * N) + (i * N + o_column)[None, :]
            m_row = m_batch[:, None]
        else:
            p_row = balanced_ptr + (o_batch * n * n)[:, None] + (i * n + o_column)[None, :]
            m_here = ((tl.full((1,), i, tl.int32) < n) & (o_column < n))[None, :]
            m_row = m_batch[:, None] & m_here
        tl.store(p_row, row.to(balanced_ptr.dtype.element_ty), mask=m_row)


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
    """E: rows, whose largest logit is 0, and then columns, in the log domain; and their sums."""
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
    column_sums = ()
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
        column_sums += (sums * tl.exp2(highest),)
    kernel = ()
    for k in tl.static_range(N * N):
        kernel += (entries[k % N * N + k // N] * inverse[k % N],)
    return kernel, column_sums


@triton.jit
def row_scalings(
    kernel, gamma, n, FULL: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr = False
):
    """1 / (E gamma), N times (BATCH,), to rounding if EXACT."""
    sums = ()
    for i in tl.static_range(N):
        s = kernel[i * N] * gamma[0]
        for j in tl.static_range(1, N):
            s += kernel[i * N + j] * gamma[j]
        sums += (s if FULL else tl.where(tl.full((1,), i, tl.int32) < n, s, 1),)
    return inverses(sums, N, EXACT)


@triton.jit
def column_scalings(
    kernel, phi, n, FULL: tl.constexpr, N: tl.constexpr, EXACT: tl.constexpr = False
):
    """1 / (E^T phi), N times (BATCH,), to rounding if EXACT."""
    sums = ()
    for j in tl.static_range(N):
        s = kernel[j] * phi[0]
        for i in tl.static_range(1, N):
            s += kernel[i * N + j] * phi[i]
        sums += (s if FULL else tl.where(tl.full((1,), j, tl.int32) < n, s, 1),)
    return inverses(sums, N, EXACT)


@triton.jit
def inverses(sums, N: tl.constexpr, EXACT: tl.constexpr):
    """1 / s of each of N sums, by one of their product; EXACT takes a step of Newton's method."""
    if N == 2:
        both = reciprocal(sums[0] * sums[1])
        found = (both * sums[1], both * sums[0])
    else:
        first, second = sums[0] * sums[1], sums[2] * sums[3]
        all_of = reciprocal(first * second)
        by_first, by_second = all_of * second, all_of * first
        found = (by_first * sums[1], by_first * sums[0], by_second * sums[3], by_second * sums[2])
    if EXACT:
        better = ()
        for i in tl.static_range(N):
            better += (found[i] * (2 - sums[i] * found[i]),)
        found = better
    return found


@triton.jit
def log_scalings(
    logits, other, rest, grid, n, ROWS: tl.constexpr, FULL: tl.constexpr, N: tl.constexpr
):
    """Scalings of rows, or of columns, of the matrix itself: pairs, N numbers and N rests."""
    found, found_rest = (), ()
    for i in tl.static_range(N):
        exponents = ()
        for j in tl.static_range(N):
            exponents += ((logits[i * N + j] if ROWS else logits[j * N + i]) + other[j],)
        highest = exponents[0] + rest[0]
        for j in tl.static_range(1, N):
            highest = tl.maximum(highest, exponents[j] + rest[j])
        highest = on_grid(highest, grid)
        highest = tl.where(highest > -float("inf"), highest, 0)
        sums = 0 * highest
        for j in tl.static_range(N):
            sums += tl.exp2((exponents[j] - highest) + rest[j])
        inside = tl.full((1,), i, tl.int32) < n
        found += (-highest if FULL else tl.where(inside, -highest, 0),)
        found_rest += (-tl.log2(sums) if FULL else tl.where(inside, -tl.log2(sums), 0),)
    return found, found_rest


@triton.jit
def chosen(again, logs, rests, first, first_rests, scalings, N: tl.constexpr):
    """Pairs of repeated matrices, else of the first iteration and the scalings after it."""
    found, found_rest = (), ()
    for i in tl.static_range(N):
        found += (tl.where(again, logs[i], first[i]),)
        found_rest += (tl.where(again, rests[i], first_rests[i] + tl.log2(scalings[i])),)
    return found, found_rest


@triton.jit
def moved(most, phi, gamma, N: tl.constexpr):
    """The largest scalings so far."""
    for i in tl.static_range(N):
        most = tl.maximum(most, tl.maximum(phi[i], gamma[i]))
    return most


def takes(problems: Problems) -> bool:
    """Whether these have up to 4 rows, as many columns and one t, no masses and no tolerance."""
    n, m = problems.matrices.shape[1:]
    plain = problems.tolerance is None and problems.a is None and problems.scale.ndim == 0
    return plain and n == m <= MOST


def tiny_balance(problems: Problems, found: Balanced) -> None:
    """Balance all matrices that `takes` says yes of; `found` has room for them alone."""
    matrices, balanced = problems.matrices, found.matrices
    count, n, _ = matrices.shape
    if count == 0:
        return
    dtype = computed_in(matrices)
    width = padded(n, n)[0]
    tiny_balance_kernel[(-(-count // BATCH),)](
        matrices,
        problems.scale,
        balanced,
        count,
        n,
        problems.iterations,
        *matrices.stride(),
        TYPE=tl.float64 if dtype == torch.float64 else tl.float32,
        TINY=torch.finfo(dtype).tiny,
        FULL=n == width,
        CONTIGUOUS=n == width and matrices.is_contiguous(),
        BATCH=BATCH,
        N=width,
        num_warps=WARPS,
        maxnreg=REGISTERS if n == width else None,
    )
