"""Sinkhorn attention as an operation of PyTorch, for autograd, `torch.compile` and CUDA graphs.

With S = scale q k^T, u_0 = -LSE_j(S + v_0) and for t = 1 .. T

    v_t = log(n / m) - LSE_i(S + u_(t-1)),   u_t = -LSE_j(S + v_t),   P = exp(u_T + S + v_T),
    O = P V

(LSE: logarithm of a sum of exponentials). The mask of keys is in v_0, 0 or -inf, and m counts the
keys that are left. Backward, with G = dL/dO, D = G V^T, delta_i = G_i . O_i, w_j = V_j . (P^T G)_j,

    x_T = delta,   y_T = w - P^T delta,   x_(t-1) = -Q_t y_t,   y_t = -P_t^T x_t  (t < T),
    P_t = exp(u_t + S + v_t),   Q_t = (m / n) exp(u_(t-1) + S + v_t),
    dL/dS = P o (D - x_T 1^T) - sum_(t <= T) Q_t o 1 y_t^T - sum_(t < T) P_t o x_t 1^T,

exactly the derivative of these T iterations: T pairs of passes with vectors, the first of which
makes dL/dV as well, and one with matrices for each of q and k. y is kept times m / n. The gradient
of the limit is P o (D - a 1^T - 1 b^T), with a = delta - P b and (diag(P^T 1) - P^T P) b = y_T.

`attend` runs `attend_now` and, backward, `gradients_now`, from Python or recorded by
`torch.compile`. Nothing waits for a GPU. `attention.attention` calls `attend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from otdd_flash.attention.passes import Scores, at
from otdd_flash.batched.recorded import differentiable_once
from otdd_flash.eager import own_settings
from otdd_flash.errors import InputError, NotConvergedWarning, warn

# Of conjugate gradients: steps at the most, residuals over the right-hand side that end a head, by
# type, and one that is reported.
CG_STEPS = 200
CG_RESIDUAL = {torch.float32: 1e-6, torch.float64: 1e-12}
CG_REPORTED = 1e-3
# The relative error of a column sum from which on an implicit gradient, off by about as much,
# says so.
SUMS_REPORTED = 1e-2

Attended = tuple[Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


def attend_now(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    iterations: int,
    tolerance: float | None,
    unrolled: bool,
    kept: bool,
    in_triton: bool,
) -> Attended:
    """Return O (H, n, e), u (T + 1, H, n), v (T + 1, H, m) and the iterations of heads (H,) int32.

    Args:
        q: (H, n, d), contiguous.
        k: (H, m, d).
        v: (H, m, e).
        mask: (H, m) bool, True where a key is left out.
        scale: of the scores.
        iterations: T, how many are made, with a tolerance at the most.
        tolerance: the largest relative error of a column sum at which a head stops. Then u of
            iterations that a head does not make is not initialised.
        unrolled: whether the gradient is that of the iterations made, or of the limit.
        kept: whether u and v of all iterations are, as an unrolled gradient by q or k needs; else
            they are the last ones alone, (1, H, ...).
        in_triton: whether by kernels.

    Raises:
        InputError: on a CPU, a head without keys.
    """
    with own_settings():
        if mask is not None and not q.is_cuda and bool(mask.all(1).any()):
            raise InputError("key_mask leaves out all keys of a head; leave one in")
        out, us, vs, counts = _room(q, k, v, iterations, kept)
        counts.fill_(iterations)
        rows = Scores(q, k, scale, counts, in_triton)
        columns, zero, start = rows.transposed, torch.zeros_like(us[0]), torch.zeros_like(vs[0])
        if mask is not None:
            start.masked_fill_(mask, -torch.inf)
        vs[0] = start
        if len(q) == 0:
            return out, us, vs, counts
        target = start - _key_ratios(start, q.shape[1]).log()[:, None]
        rows.half_step(vs[0], zero, 0, us[0], *((None, v, out) if iterations == 0 else ()))
        for t in range(1, iterations + 1):
            before, now = (t - 1, t) if kept else (0, 0)
            fresh = vs[now] if tolerance is None else torch.empty_like(start)
            columns.half_step(us[before], target, t, fresh, vs[before])
            if tolerance is not None and _all_stop(
                fresh, vs[before], vs[now], counts, t, tolerance
            ):
                break
            last = t == iterations and tolerance is None
            rows.half_step(vs[now], zero, t, us[now], *((None, v, out) if last else (us[before],)))
        if tolerance is not None:
            # Heads have stopped at steps of their own: all make step 0 once more, with the values.
            rows.half_step(at(vs, counts), zero, 0, torch.empty_like(zero), None, v, out)
        return out, us, vs, counts


def gradients_now(
    cotangents: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    us: Tensor,
    vs: Tensor,
    counts: Tensor,
    scale: float,
    unrolled: bool,
    by_q: bool,
    by_k: bool,
    in_triton: bool,
) -> Gradients:
    """Return the gradients by q, k and v; unless `by_q` or `by_k`, the first or second is empty.

    Warns:
        NotConvergedWarning: on a CPU, iterations have not converged to the limit, or its linear
            system was not solved.
    """
    with own_settings():
        cotangents = cotangents.contiguous()
        of_q, of_k, of_v = _gradient_room(q, k, v, by_q, by_k)
        if len(q) == 0:
            return of_q, of_k, of_v
        if not unrolled:
            counts = torch.zeros_like(counts)
        elif not q.is_cuda:
            # Iterations that a head has made.
            most = int(counts.max()) + 1
            us, vs = us[:most], vs[:most]
        rows = Scores(q, k, scale, counts, in_triton)
        columns = rows.transposed
        delta = (cotangents.to(us.dtype) * out).sum(2)
        u, last = at(us, counts), at(vs, counts)
        y = torch.empty_like(last)
        columns.plan_product((last, u), delta, us.new_ones(len(q)), 0, y, (cotangents, v, of_v))
        if not (by_q or by_k):
            return of_q, of_k, of_v
        if unrolled:
            adjoints, offsets = _adjoints(rows, us, vs, delta, y), (delta, torch.zeros_like(y))
        else:
            adjoints, offsets = (us, vs), _solve_implicit(rows, u, last, delta, y)
        earlier = rows.earlier((us, vs), adjoints)
        if by_q:
            rows.gradient((cotangents, v), (us, vs), earlier, offsets, of_q)
        if by_k:
            sides = (v, cotangents), (vs, us), earlier.transposed, offsets[::-1]
            columns.gradient(*sides, of_k)
        return of_q, of_k, of_v


def _room(q: Tensor, k: Tensor, v: Tensor, iterations: int, kept: bool) -> Attended:
    """Make the results of `attend_now`, not initialised."""
    (heads, n), m, dtype = q.shape[:2], k.shape[1], torch.promote_types(q.dtype, torch.float32)
    us, vs = (
        q.new_empty((iterations + 1 if kept else 1, heads, size), dtype=dtype) for size in (n, m)
    )
    out, counts = q.new_empty((heads, n, v.shape[2])), q.new_empty(heads, dtype=torch.int32)
    return out, us, vs, counts


def _gradient_room(q: Tensor, k: Tensor, v: Tensor, by_q: bool, by_k: bool) -> Gradients:
    """Make the results of `gradients_now`, not initialised."""
    of_q = torch.empty_like(q) if by_q else q.new_empty(0)
    of_k = torch.empty_like(k) if by_k else k.new_empty(0)
    return of_q, of_k, torch.empty_like(v)


def _all_stop(
    fresh: Tensor, before: Tensor, now: Tensor, counts: Tensor, t: int, tolerance: float
) -> bool:
    """Write v of iteration t, `fresh`, to `now` for heads that make it; others stop at t - 1.

    Return whether no head makes it, which is not asked on a GPU.
    """
    # Column sums so far are exp(v_(t-1) - v_t) times what they shall be.
    error = (before - fresh).expm1_().abs_().masked_fill(fresh == -torch.inf, 0).amax(1)
    making = (counts >= t) & (error > tolerance)
    counts.copy_(torch.where((counts >= t) & ~making, t - 1, counts))
    now.copy_(torch.where(making[:, None], fresh, before))
    return not now.is_cuda and not bool(making.any())


def _key_ratios(v: Tensor, n: int) -> Tensor:
    """Return m / n of each head (H,); m counts keys that are not left out, where v is -inf."""
    return (v > -torch.inf).sum(1).to(v.dtype) / n


def _adjoints(
    rows: Scores, us: Tensor, vs: Tensor, delta: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Return x (T + 1, H, n) and y times m / n (T + 1, H, m), for a head the first ones.

    Where a head has not made an iteration, passes leave what stands there: what it starts with.
    """
    ratios = _key_ratios(vs[0], us.shape[2])
    xs = delta.expand(len(us), -1, -1).contiguous()
    ys = (y * ratios[:, None]).expand(len(vs), -1, -1).contiguous()
    columns, one = rows.transposed, torch.ones_like(ratios)
    for t in range(len(us) - 1, 0, -1):
        if t < len(us) - 1:
            # Heads whose last iteration is later.
            columns.plan_product((vs[t], us[t]), xs[t], -ratios, t + 1, ys[t])
        rows.plan_product((us[t - 1], vs[t]), ys[t], -one, t, xs[t - 1])
    return xs, ys


def _solve_implicit(
    rows: Scores, u: Tensor, v: Tensor, delta: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    """Solve P^T P b = C b - y, C = diag(P^T 1), and return a = delta - P b and b.

    Conjugate gradients on I - A^T A, A = P C^(-1/2), of which C^(1/2) 1 is the null vector. Heads
    that are through stay as they are.
    """
    columns, one = rows.transposed, torch.ones_like(u[:, 0])
    sums, of_rows, of_columns = torch.empty_like(v), torch.zeros_like(u), torch.zeros_like(v)
    columns.plan_product((v, u), torch.ones_like(u), one, 0, sums)
    if not u.is_cuda:
        _report_sums(sums * _key_ratios(v, u.shape[1])[:, None], v)
    null: Tensor = sums.sqrt()
    null = null / torch.linalg.vector_norm(null, dim=1, keepdim=True)
    scaling = torch.where(sums > 0, sums, 1).rsqrt()

    def applied(b: Tensor) -> Tensor:
        rows.plan_product((u, v), b, one, 0, of_rows)
        return of_rows

    def projected(x: Tensor) -> Tensor:
        return x - (x * null).sum(1, keepdim=True) * null

    residual = projected(scaling * y)
    solution, direction = torch.zeros_like(residual), residual
    first = square = residual.square().sum(1, keepdim=True)
    goal = CG_RESIDUAL[u.dtype] ** 2 * first
    steps = min(CG_STEPS, 2 * v.shape[1])
    for _ in range(steps):
        if not u.is_cuda and not bool((square > goal).any()):
            break
        # Heads that are through make no step 0.
        rows.counts.copy_((square > goal)[:, 0].int() - 1)
        columns.plan_product((v, u), applied(scaling * direction), one, 0, of_columns)
        image = projected(direction - scaling * of_columns)
        curvature = (direction * image).sum(1, keepdim=True)
        length = torch.where((square > goal) & (curvature > 0), square / curvature, 0)
        solution = solution + length * direction
        residual = residual - length * image
        before, square = square, residual.square().sum(1, keepdim=True)
        direction = residual + torch.where(before > 0, square / before, 0) * direction
    rows.counts.zero_()
    if not u.is_cuda and bool((square > CG_REPORTED**2 * first).any()):
        left = float((square / first).nan_to_num(0).max()) ** 0.5
        warn(
            "the linear system of an implicit gradient is left at a relative residual of "
            f'{left:.1e} after {steps} steps; take gradient="unrolled" or a smaller scale',
            NotConvergedWarning,
        )
    b = scaling * solution
    return delta - applied(b), b


def _report_sums(sums: Tensor, v: Tensor) -> None:
    """Warn of column sums (H, m), relative to n / m, that are far from 1."""
    error = float((sums - 1).abs().masked_fill(v == -torch.inf, 0).max())
    if error > SUMS_REPORTED:
        warn(
            f"the iterations have not converged: column sums are off by {error:.1g} of n / m, and "
            "so, about, is an implicit gradient; make more iterations, or take "
            'gradient="unrolled"',
            NotConvergedWarning,
        )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep points, output and potentials."""
    q, k, v, _, scale, _, _, unrolled, kept, in_triton = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.settings = scale, unrolled, kept, in_triton
    ctx.save_for_backward(q, k, v, *output)


def _backward(
    ctx: Any, gradients: Callable[..., tuple[Tensor, ...]], cotangents: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    """Return the gradients of what `attend` takes, by `gradients_now` or its operation."""
    if cotangents is None:
        return (None,) * 10
    scale, unrolled, kept, in_triton = ctx.settings
    needed = ctx.needs_input_grad[:3]
    if unrolled and not kept and any(needed[:2]):
        raise InputError(
            "the gradient of iterations is asked of Sinkhorn attention that was recorded without "
            'one; record it with gradients enabled, or take gradient="implicit"'
        )
    of_points = gradients(cotangents, *ctx.saved_tensors, scale, unrolled, *needed[:2], in_triton)
    given = (each if wanted else None for each, wanted in zip(of_points, needed, strict=True))
    return (*given, *(7 * (None,)))


attend = differentiable_once(
    ("attend", "attend_gradients"),
    "Sinkhorn attention",
    attend_now,
    gradients_now,
    (
        lambda q, k, v, *rest: _room(q, k, v, iterations=rest[2], kept=rest[5]),
        lambda _, q, k, v, *rest: _gradient_room(q, k, v, *rest[6:8]),
    ),
    _keep,
    _backward,
)
