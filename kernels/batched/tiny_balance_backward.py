"""Backward pass of `tiny_balance` through the iterations made: a matrix per thread, in one launch.

`tiny_balance` is Sinkhorn scaling of matrices x (n, n), n <= 4, to doubly stochastic R:

    R = diag(phi_K) E diag(gamma_K),   phi_k = 1 / (E gamma_k-1),   gamma_k = 1 / (E^T phi_k)

E is what the first iteration makes of exp(x / t), and gamma_0 = 1. G is the cotangent of R, and D
begins as R o G, the cotangent of log R, and ends as that of log E. Backward through a division of
rows or columns by their sums, with quotients Q,

    D <- D - Q o sums of D.

The last iteration is done in this way, because D is then of the size of the result, which R o G is
not near a permutation. Before it, only the scalings carry the cotangent back: q_k is that of log
gamma_k, and D gathers the share of the entries of E,

    q_K-1 = D^T 1
    p_k = -phi_k o (E (gamma_k o q_k)),      q_k-1 = -gamma_k-1 o (E^T (phi_k o p_k))
    D <- D - E o sum_k (phi_k (gamma_k o q_k)^T + (phi_k o p_k) gamma_k-1^T)

The first iteration is done as the last.

Column scalings of every LENGTH-th iteration are kept in registers, and from each the scalings of
the next LENGTH iterations are computed again. A matrix that `tiny_balance` does again in the log
domain is done again so here; phi, gamma and E are then logarithms to base 2.

`otdd_flash.batched.balance` calls `tiny_balance_backward` for the problems that `takes` accepts. It
differentiates the iterations of `tiny_balance`, whose device functions it uses, so a change of
these must be made here too. `tests/kernels/test_compilation.py` limits the registers that may
spill.

Memory: x and the cotangent are read, and the gradient written, once; x is read again for the
derivative by 1 / t. Work: for 4 x 4 some 210 operations an iteration, four of them on the
special-function unit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from otdd_flash.kernels.batched import tiny_balance
from otdd_flash.kernels.batched.problems import Cotangents, Derivatives, Problems, computed_in
from otdd_flash.kernels.batched.tiles import in_logs, padded
from otdd_flash.kernels.batched.tiny_balance import (
    centred,
    column_scalings,
    first_iteration,
    load_entries,
    moved,
    row_scalings,
    store_entries,
)
from otdd_flash.kernels.launch import LOG2_E, on_its_device

# Matrices of a program and its warps, as in `tiny_balance`, and registers of a thread at the most
# where tiles are full, which are more than there.
BATCH, WARPS, REGISTERS = 32, 1, 168
# LENGTH and how many are kept, by the steps up to which they do.
SEGMENTS = {1: (1, 1), 4: (2, 2), 9: (3, 3), 18: (3, 6), 20: (4, 5)}
# In the log domain, which is rare, a short program: registers may spill.
LOG_LENGTH, LOG_KEPT = tl.constexpr(2), tl.constexpr(10)
# Iterations that registers hold the scalings of.
MOST_ITERATIONS = 2 + max(SEGMENTS)


@on_its_device
@triton.jit
def tiny_balance_backward_kernel(
    matrices_ptr,  # x (B, n, n) of any strides
    scale_ptr,  # 1 / t () float64
    cotangents_ptr,  # (B, n, n) of any strides
    gradients_ptr,  # (B, n, n)
    by_scale_ptr,  # (B,), written if BY_SCALE
    count,
    n,
    steps,
    stride,
    row_stride,
    column_stride,
    cotangent_stride,
    cotangent_row_stride,
    cotangent_column_stride,
    TYPE: tl.constexpr,
    TINY: tl.constexpr,
    FULL: tl.constexpr,
    CONTIGUOUS: tl.constexpr,
    CONTIGUOUS_COTANGENTS: tl.constexpr,
    BY_SCALE: tl.constexpr,
    ONCE: tl.constexpr,
    EVEN: tl.constexpr,
    LENGTH: tl.constexpr,
    KEPT: tl.constexpr,
    BATCH: tl.constexpr,
    N: tl.constexpr,
):
    """One program per BATCH matrices, FULL where n is N."""
    o_batch = tl.program_id(0).to(tl.int64) * BATCH + tl.arange(0, BATCH)
    m_batch = o_batch < count
    x = load_entries(
        matrices_ptr, o_batch, count, n, stride, row_stride, column_stride, TYPE,
        -float("inf"), FULL, CONTIGUOUS, BATCH, N,
    )  # fmt: skip
    cotangents = load_entries(
        cotangents_ptr, o_batch, count, n, cotangent_stride, cotangent_row_stride,
        cotangent_column_stride, TYPE, 0, FULL, CONTIGUOUS_COTANGENTS, BATCH, N,
    )  # fmt: skip
    scale = tl.load(scale_ptr)
    # As in `tiny_balance`: such temperatures have no meaning.
    scale = tl.where(scale > 0, scale, float("nan"))
    logits = centred(x, (scale * LOG2_E).to(TYPE), n, FULL, N)
    kernel, column_sums = first_iteration(logits, n, FULL, N)
    smallest = tl.full((BATCH,), 1, TYPE)
    for k in tl.static_range(N * N):
        smallest = tl.minimum(smallest, tl.where(logits[k] > -float("inf"), kernel[k], 1))
    found, most = derivative(
        kernel, cotangents, n, steps, False, FULL, ONCE, EVEN, LENGTH, KEPT, BATCH, N, TYPE
    )
    again = in_logs(smallest, most, TINY)
    found = before_first(found, kernel, column_sums, False, N)
    store(
        found, matrices_ptr, scale, gradients_ptr, by_scale_ptr, o_batch, m_batch, count, n, stride,
        row_stride, column_stride, TYPE, FULL, CONTIGUOUS, BY_SCALE, BATCH, N,
    )  # fmt: skip
    if tl.max(again.to(tl.int32), 0) > 0:
        zeros = ()
        for _ in tl.static_range(N):
            zeros += (tl.zeros((BATCH,), TYPE),)
        u = log_scalings(logits, zeros, n, True, FULL, N)
        v = log_scalings(logits, u, n, False, FULL, N)
        kernel = ()
        for k in tl.static_range(N * N):
            kernel += (logits[k] + u[k // N] + v[k % N],)
        found, most = derivative(
            kernel,
            cotangents,
            n,
            steps,
            True,
            FULL,
            ONCE,
            False,
            LOG_LENGTH,
            LOG_KEPT,
            BATCH,
            N,
            TYPE,
        )
        found = before_first(found, kernel, v, True, N)
        m_again = m_batch & again
        store(
            found, matrices_ptr, scale, gradients_ptr, by_scale_ptr, o_batch, m_again, count, n,
            stride, row_stride, column_stride, TYPE, FULL, CONTIGUOUS, BY_SCALE, BATCH, N,
        )  # fmt: skip


@triton.jit
def derivative(
    kernel,
    cotangents,
    n,
    steps,
    LOG: tl.constexpr,
    FULL: tl.constexpr,
    ONCE: tl.constexpr,
    EVEN: tl.constexpr,
    LENGTH: tl.constexpr,
    KEPT: tl.constexpr,
    BATCH: tl.constexpr,
    N: tl.constexpr,
    TYPE: tl.constexpr,
):
    """D, N * N times (BATCH,), and the largest scalings (BATCH,).

    Places of all steps end a multiple of LENGTH: those before the first have scalings of 1, and
    nothing comes back to them.
    """
    most = tl.zeros((BATCH,), TYPE)
    phi = filled(0 if LOG else 1, N, BATCH, TYPE)
    gamma = phi
    if ONCE:
        found = of_entries(kernel, cotangents, phi, gamma, LOG, N)
    else:
        turns = (steps + LENGTH - 1) // LENGTH
        start = turns * LENGTH - steps
        kept = filled(0, KEPT * N, BATCH, TYPE)
        for turn in range(turns):
            before = kept
            kept = ()
            for k in tl.static_range(KEPT):
                kept += chosen_of(turn == k, gamma, part_of(before, k, N), N)
            for _ in range(max(start, turn * LENGTH), (turn + 1) * LENGTH):
                phi = rows_of(kernel, gamma, n, LOG, FULL, N)
                gamma = columns_of(kernel, phi, n, LOG, FULL, N)
            most = moved(most, phi, gamma, N)
        phi = rows_of(kernel, gamma, n, LOG, FULL, N, True)
        last = columns_of(kernel, phi, n, LOG, FULL, N, True)
        most = moved(most, phi, last, N)
        most += 0 * (last[0] + phi[0])
        found = of_entries(kernel, cotangents, phi, last, LOG, N)
        found = less_sums(found, quotients(kernel, phi, last, False, LOG, N), False, N)
        found = less_sums(found, quotients(kernel, gamma, phi, True, LOG, N), True, N)
        q = sums_of(found, False, N)
        nothing = filled(0, N, BATCH, TYPE)
        shares = filled(0, N * N, BATCH, TYPE)
        for turn in range(turns):
            first = (turns - 1 - turn) * LENGTH
            gamma = part_of(kept, 0, N)
            for k in tl.static_range(1, KEPT):
                gamma = chosen_of(first == k * LENGTH, part_of(kept, k, N), gamma, N)
            phis = ()
            gammas = gamma
            for i in tl.static_range(LENGTH):
                phi = rows_of(kernel, gamma, n, LOG, FULL, N)
                after = columns_of(kernel, phi, n, LOG, FULL, N)
                gamma = after if EVEN else chosen_of(first + i < start, gamma, after, N)
                phis += phi
                gammas += gamma
            for back in tl.static_range(LENGTH):
                shares, q = step_back(
                    kernel, shares, q,
                    part_of(phis, LENGTH - 1 - back, N),
                    part_of(gammas, LENGTH - back, N),
                    part_of(gammas, LENGTH - 1 - back, N),
                    LOG, N,
                )  # fmt: skip
                if not EVEN:
                    q = chosen_of(first + (LENGTH - 1 - back) > start, q, nothing, N)
        before = found
        found = ()
        for k in tl.static_range(N * N):
            found += (before[k] - (shares[k] if LOG else kernel[k] * shares[k]),)
    return found, most


@triton.jit
def of_entries(kernel, cotangents, phi, gamma, LOG: tl.constexpr, N: tl.constexpr):
    """R o G."""
    found = ()
    for k in tl.static_range(N * N):
        entry = weighted(weighted(kernel[k], phi[k // N], LOG), gamma[k % N], LOG)
        found += ((tl.exp2(entry) if LOG else entry) * cotangents[k],)
    return found


@triton.jit
def step_back(kernel, shares, q, phi, gamma, gamma_before, LOG: tl.constexpr, N: tl.constexpr):
    """Go from q_k to q_k-1; add what the step takes from D to `shares`, over E but for LOG."""
    after = ()
    q_before = ()
    if LOG:
        columns = ()
        for k in tl.static_range(N * N):
            columns += (tl.exp2(kernel[k] + phi[k // N] + gamma[k % N]) * q[k % N],)
        p = sums_of(columns, True, N)
        rows = ()
        for k in tl.static_range(N * N):
            rows += (-tl.exp2(kernel[k] + phi[k // N] + gamma_before[k % N]) * p[k // N],)
            after += (shares[k] + columns[k] + rows[k],)
        sums = sums_of(rows, False, N)
        for j in tl.static_range(N):
            q_before += (-sums[j],)
    else:
        by_column = ()
        for j in tl.static_range(N):
            by_column += (gamma[j] * q[j],)
        by_row = ()
        for i in tl.static_range(N):
            sums = kernel[i * N] * by_column[0]
            for j in tl.static_range(1, N):
                sums += kernel[i * N + j] * by_column[j]
            by_row += (-phi[i] * phi[i] * sums,)
        for k in tl.static_range(N * N):
            share = by_row[k // N] * gamma_before[k % N]
            after += (shares[k] + phi[k // N] * by_column[k % N] + share,)
        for j in tl.static_range(N):
            sums = kernel[j] * by_row[0]
            for i in tl.static_range(1, N):
                sums += kernel[i * N + j] * by_row[i]
            q_before += (-gamma_before[j] * sums,)
    return after, q_before


@triton.jit
def quotients(kernel, given, found, ROWS: tl.constexpr, LOG: tl.constexpr, N: tl.constexpr):
    """The entries of E times the scalings given, over their sums, of which `found` is one over.

    Right to rounding: an entry that is its whole sum gives 1, and its remainder 0.
    """
    terms = ()
    for k in tl.static_range(N * N):
        terms += (weighted(kernel[k], given[k % N] if ROWS else given[k // N], LOG),)
    result = ()
    if LOG:
        for k in tl.static_range(N * N):
            result += (tl.exp2(terms[k] + found[k // N if ROWS else k % N]),)
    else:
        sums = sums_of(terms, ROWS, N)
        for k in tl.static_range(N * N):
            inverse = found[k // N if ROWS else k % N]
            quotient = terms[k] * inverse
            left = terms[k] - quotient * sums[k // N if ROWS else k % N]
            result += (quotient + left * inverse,)
    return result


@triton.jit
def weighted(entry, scaling, LOG: tl.constexpr):
    """An entry of E times a scaling; both are logarithms with LOG."""
    return entry + scaling if LOG else entry * scaling


@triton.jit
def before_first(found, kernel, column_sums, LOG: tl.constexpr, N: tl.constexpr):
    """Return the derivative by the natural logits, from D, that by the logarithms of E.

    The columns that E was divided by had `column_sums`, of which the logarithm of one over them is
    given with LOG.
    """
    columns = ()
    rows = ()
    for k in tl.static_range(N * N):
        if LOG:
            columns += (tl.exp2(kernel[k]),)
            rows += (tl.exp2(kernel[k] - column_sums[k % N]),)
        else:
            columns += (kernel[k],)
            rows += (kernel[k] * column_sums[k % N],)
    return less_sums(less_sums(found, columns, False, N), rows, True, N)


@triton.jit
def less_sums(found, weights, ROWS: tl.constexpr, N: tl.constexpr):
    """Cotangents of logarithms, from those after their exponentials were divided by their sums."""
    sums = sums_of(found, ROWS, N)
    result = ()
    for k in tl.static_range(N * N):
        total = sums[k // N] if ROWS else sums[k % N]
        result += (found[k] - weights[k] * total,)
    return result


@triton.jit
def sums_of(values, ROWS: tl.constexpr, N: tl.constexpr):
    """Along rows, or along columns."""
    sums = ()
    for i in tl.static_range(N):
        total = values[i * N] if ROWS else values[i]
        for j in tl.static_range(1, N):
            total += values[i * N + j] if ROWS else values[j * N + i]
        sums += (total,)
    return sums


@triton.jit
def filled(value, COUNT: tl.constexpr, BATCH: tl.constexpr, TYPE: tl.constexpr):
    """COUNT times a number (BATCH,)."""
    found = ()
    for _ in tl.static_range(COUNT):
        found += (tl.full((BATCH,), value, TYPE),)
    return found


@triton.jit
def part_of(values, k: tl.constexpr, N: tl.constexpr):
    """The k-th N of them."""
    found = ()
    for i in tl.static_range(N):
        found += (values[k * N + i],)
    return found


@triton.jit
def chosen_of(condition, one, other, COUNT: tl.constexpr):
    """One or the other, each of COUNT."""
    found = ()
    for k in tl.static_range(COUNT):
        found += (tl.where(condition, one[k], other[k]),)
    return found


@triton.jit
def rows_of(
    kernel, gamma, n, LOG: tl.constexpr, FULL: tl.constexpr, N: tl.constexpr,
    EXACT: tl.constexpr = False,
):  # fmt: skip
    """The next phi."""
    if LOG:
        found = log_scalings(kernel, gamma, n, True, FULL, N)
    else:
        found = row_scalings(kernel, gamma, n, FULL, N, EXACT)
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
def columns_of(
    kernel, phi, n, LOG: tl.constexpr, FULL: tl.constexpr, N: tl.constexpr,
    EXACT: tl.constexpr = False,
):  # fmt: skip
    """The next gamma."""
    if LOG:
        found = log_scalings(kernel, phi, n, False, FULL, N)
    else:
        found = column_scalings(kernel, phi, n, FULL, N, EXACT)
    return found


@triton.jit
def store(
    found, matrices_ptr, scale, gradients_ptr, by_scale_ptr, o_batch, m_batch, count, n, stride,
    row_stride, column_stride, TYPE: tl.constexpr, FULL: tl.constexpr, CONTIGUOUS: tl.constexpr,
    BY_SCALE: tl.constexpr, BATCH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Derivatives by x, and by 1 / t; x is read again, which costs less than the registers."""
    if BY_SCALE:
        x = load_entries(
            matrices_ptr, o_batch, count, n, stride, row_stride, column_stride, TYPE,
            -float("inf"), FULL, CONTIGUOUS, BATCH, N,
        )  # fmt: skip
        by_scale = tl.zeros((BATCH,), TYPE)
        for k in tl.static_range(N * N):
            by_scale += tl.where(x[k] > -float("inf"), x[k] * found[k], 0.0)
        tl.store(by_scale_ptr + o_batch, by_scale, mask=m_batch)
    gradients = ()
    for k in tl.static_range(N * N):
        gradients += (found[k] * scale.to(TYPE),)
    store_entries(gradients_ptr, gradients, o_batch, m_batch, n, FULL, BATCH, N)


def takes(problems: Problems) -> bool:
    """Whether `tiny_balance` takes these, and registers hold the scalings of all iterations."""
    return tiny_balance.takes(problems) and problems.iterations <= MOST_ITERATIONS


def tiny_balance_backward(problems: Problems, given: Cotangents, found: Derivatives) -> None:
    """Differentiate the iterations of all matrices that `takes` says yes of.

    Args:
        problems: as for `tiny_balance`.
        given: cotangents of R alone.
        found: derivatives to write, by 1 / t where there is room for it.
    """
    matrices, cotangents = problems.matrices, given.matrices
    count, n, _ = matrices.shape
    if count == 0:
        return
    dtype, with_scale = computed_in(matrices), found.scale.numel() > 0
    # The first iteration and the last stand by themselves.
    width, steps = padded(n, n)[0], max(problems.iterations - 2, 0)
    length, kept = next(found for most, found in SEGMENTS.items() if steps <= most)
    tiny_balance_backward_kernel[(triton.cdiv(count, BATCH),)](
        matrices,
        problems.scale,
        cotangents,
        found.matrices,
        found.scale if with_scale else found.matrices,
        count,
        n,
        steps,
        *matrices.stride(),
        *cotangents.stride(),
        TYPE=tl.float64 if dtype == torch.float64 else tl.float32,
        TINY=torch.finfo(dtype).tiny,
        FULL=n == width,
        CONTIGUOUS=n == width and matrices.is_contiguous(),
        CONTIGUOUS_COTANGENTS=n == width and cotangents.is_contiguous(),
        BY_SCALE=with_scale,
        ONCE=problems.iterations == 1,
        EVEN=steps % length == 0,
        LENGTH=length,
        KEPT=kept,
        BATCH=BATCH,
        N=width,
        num_warps=WARPS,
        maxnreg=REGISTERS if n == width else None,
    )
