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

Forward and backward exist twice, as in `batched.balance`: as they are, for calls from Python, and
as operations that `torch.compile` records without looking inside. Nothing waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from otdd_flash.attention.passes import Scores, at
from otdd_flash.eager import own_settings
from otdd_flash.errors import InputError, NotConvergedWarning, warn

# Of the linear system: steps at the most, residuals over the right-hand side that end a head, by
# type, and one that is reported.
STEPS = 200
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}
REPORTED = 1e-3

Found = tuple[Tensor, Tensor, Tensor, Tensor]


def attend_now(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    iterations: int,
    tolerance: float | None,
    kept: bool,
    in_triton: bool,
) -> Found:
    """Return O (H, n, e), u (T + 1, H, n), v (T + 1, H, m) and the iterations of heads (H,) int32.

    Unless `kept`, u and v are the last ones alone, (1, H, ...). With a tolerance u and v of
    iterations that a head does not make are not initialised.

    Args:
        q: (H, n, d), contiguous.
        k: (H, m, d).
        v: (H, m, e).
        mask: (H, m) bool, True where a key is left out.
        scale: of the scores.
        iterations: T, how many are made, with a tolerance at the most.
        tolerance: the largest relative error of a column sum at which a head stops.
        kept: whether potentials of all iterations are.
        in_triton: whether by kernels.

    Raises:
        InputError: on a CPU, a head without keys.
    """
    with own_settings():
        if mask is not None and not q.is_cuda and bool(mask.all(1).any()):
            raise InputError("key_mask leaves out all keys of a head; leave one in")
        heads, n, _ = q.shape
        counts = torch.full((heads,), iterations, dtype=torch.int32, device=q.device)
        rows = Scores(q, k, scale, counts, in_triton)
        columns = rows.transposed
        out = q.new_empty((heads, n, v.shape[2]))
        slots = iterations + 1 if kept else 1
        us, vs = rows.vector(slots), columns.vector(slots)
        start, shares = _start(vs, mask, n)
        vs[0] = start
        zero, target = torch.zeros_like(us[0]), start - shares.log()[:, None]
        if heads == 0:
            return out, us, vs, counts
        rows.half_step(vs[0], zero, 0, us[0], *((None, v, out) if iterations == 0 else ()))
        for t in range(1, iterations + 1):
            before, now = (t - 1, t) if kept else (0, 0)
            if tolerance is None:
                columns.half_step(us[before], target, t, vs[now], vs[before])
                last = (None, v, out) if t == iterations else (us[before],)
                rows.half_step(vs[now], zero, t, us[now], *last)
                continue
            fresh = torch.empty_like(start)
            columns.half_step(us[before], target, t, fresh, vs[before])
            # Sums of columns so far are exp(v_(t-1) - v_t) times what they shall be.
            error = (vs[before] - fresh).expm1_().abs_().masked_fill(start < 0, 0).amax(1)
            going = (counts >= t) & (error > tolerance)
            counts.copy_(torch.where((counts >= t) & ~going, t - 1, counts))
            vs[now] = torch.where(going[:, None], fresh, vs[before])
            if not q.is_cuda and not bool(going.any()):
                break
            rows.half_step(vs[now], zero, t, us[now], us[before])
        if tolerance is not None and iterations:
            rows.half_step(at(vs, counts), zero, 0, torch.empty_like(zero), None, v, out)
        return out, us, vs, counts


def gradients_now(
    cotangents: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    us: Tensor,
    vs: Tensor,
    counts: Tensor,
    scale: float,
    unrolled: bool,
    in_triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by q, k and v, of the iterations made if `unrolled`, else of the limit.

    Warns:
        NotConvergedWarning: on a CPU, the linear system of the limit was not solved.
    """
    with own_settings():
        cotangents = cotangents.contiguous()
        by_v = torch.empty_like(v)
        if len(q) == 0:
            return torch.empty_like(q), torch.empty_like(k), by_v
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
        one = us.new_ones(len(q))
        y = torch.empty_like(last)
        columns.plan_product((last, u), delta, one, 0, y, (cotangents, v, by_v))
        if unrolled:
            adjoints = _adjoints(rows, us, vs, delta, y, _start(vs, mask, q.shape[1])[1])
            offsets = delta, torch.zeros_like(y)
        else:
            adjoints, offsets = (us, vs), _limit(rows, u, last, delta, y)
        by_q = rows.gradient((cotangents, v), (us, vs), adjoints, offsets)
        by_k = columns.gradient((v, cotangents), (vs, us), adjoints[::-1], offsets[::-1])
        return by_q, by_k, by_v


def _start(vs: Tensor, mask: Tensor | None, n: int) -> tuple[Tensor, Tensor]:
    """v_0 (H, m), 0 or -inf, and m / n of each head (H,), which counts keys that are left."""
    start = torch.zeros_like(vs[0])
    if mask is None:
        return start, torch.full_like(start[:, 0], start.shape[1] / n)
    return start.masked_fill(mask, -torch.inf), (~mask).sum(1).to(vs.dtype) / n


def _adjoints(
    rows: Scores, us: Tensor, vs: Tensor, delta: Tensor, y: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """x (T + 1, H, n) and y times m / n (T + 1, H, m); of a head that made fewer, the first ones.

    Where a head has not made an iteration, passes leave what stands there: what it starts with.
    """
    xs = delta.expand(len(us), -1, -1).contiguous()
    ys = (y * shares[:, None]).expand(len(vs), -1, -1).contiguous()
    columns, one = rows.transposed, torch.ones_like(shares)
    for t in range(len(us) - 1, 0, -1):
        if t < len(us) - 1:
            # Heads whose last iteration is later.
            columns.plan_product((vs[t], us[t]), xs[t], -shares, t + 1, ys[t])
        rows.plan_product((us[t - 1], vs[t]), ys[t], -one, t, xs[t - 1])
    return xs, ys


def _limit(rows: Scores, u: Tensor, v: Tensor, delta: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Solve P^T P b = C b - y, C = diag(P^T 1), and return a = delta - P b and b.

    Conjugate gradients on I - A^T A, A = P C^(-1/2), of which C^(1/2) 1 is the null vector. Heads
    that are through stay as they are.
    """
    columns, one = rows.transposed, torch.ones_like(u[:, 0])
    sums, of_rows, of_columns = torch.empty_like(v), torch.empty_like(u), torch.empty_like(v)
    columns.plan_product((v, u), torch.ones_like(u), one, 0, sums)
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
    goal = TOLERANCE[u.dtype] ** 2 * first
    for _ in range(min(STEPS, 2 * v.shape[1])):
        if not u.is_cuda and not bool((square > goal).any()):
            break
        columns.plan_product((v, u), applied(scaling * direction), one, 0, of_columns)
        image = projected(direction - scaling * of_columns)
        curvature = (direction * image).sum(1, keepdim=True)
        length = torch.where((square > goal) & (curvature > 0), square / curvature, 0)
        solution = solution + length * direction
        residual = residual - length * image
        before, square = square, residual.square().sum(1, keepdim=True)
        direction = residual + torch.where(before > 0, square / before, 0) * direction
    if not u.is_cuda and bool((square > REPORTED**2 * first).any()):
        left = float((square / first).nan_to_num(0).max()) ** 0.5
        warn(
            "the linear system of an implicit gradient is left at a relative residual of "
            f'{left:.1e} after {STEPS} steps; take gradient="unrolled" or a smaller scale',
            NotConvergedWarning,
        )
    b = scaling * solution
    return delta - applied(b), b


# PyTorch keeps compiled graphs on disk and finds them by these names, whatever stands behind them:
# where arguments, results or their shapes change, both need other names.
attend = torch.library.custom_op("otdd_flash::sinkhorn_attention", mutates_args=())(attend_now)
attend_gradients = torch.library.custom_op(
    "otdd_flash::sinkhorn_attention_gradients", mutates_args=()
)(gradients_now)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Found:
    _, scale, iterations, _, kept, in_triton = rest
    counts = torch.empty(len(q), dtype=torch.int32, device=q.device)
    rows, slots = Scores(q, k, scale, counts, in_triton), iterations + 1 if kept else 1
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    return out, rows.vector(slots), rows.transposed.vector(slots), counts


@attend_gradients.register_fake
def _(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Found) -> None:
    """Keep points, output and potentials."""
    q, k, v, mask, scale, _, _, kept, in_triton = inputs
    out, us, vs, counts = output
    ctx.mark_non_differentiable(us, vs, counts)
    ctx.set_materialize_grads(False)
    ctx.settings = scale, kept, in_triton
    ctx.save_for_backward(q, k, v, mask, out, us, vs, counts)


def _gradients(
    ctx: Any, run: Callable[..., tuple[Tensor, ...]], cotangents: Tensor | None, *_: Any
) -> tuple[Any, ...]:
    """Return the gradients of what `attend` takes, `run` by `gradients_now` or its operation."""
    if cotangents is None:
        return (None,) * 9
    return (*run(cotangents, *ctx.saved_tensors, *ctx.settings), *(6 * (None,)))


def _refuse_second(ctx: Any, *_: Any) -> NoReturn:
    raise InputError(
        "gradients through Sinkhorn attention are taken once, and these were asked for again "
        "(create_graph=True); differentiate iterations written in PyTorch twice"
    )


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep nothing: a second derivative is refused."""


class Attend(torch.autograd.Function):
    """`attend_now` with its gradient, for calls from Python."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Found:
        """Return what `attend_now` does."""
        found = attend_now(*given)
        _keep(ctx, given, found)
        return found

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        """Return the gradients, once."""
        return _gradients(ctx, AttendGradients.apply, *cotangents)


class AttendGradients(torch.autograd.Function):
    """`gradients_now`, whose own gradient is refused."""

    @staticmethod
    def forward(_: Any, *given: Any) -> tuple[Tensor, ...]:
        """Return what `gradients_now` does."""
        return gradients_now(*given)

    backward = staticmethod(_refuse_second)


def _recorded_backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
    return _gradients(ctx, attend_gradients, *cotangents)


attend.register_autograd(_recorded_backward, setup_context=_keep)
attend_gradients.register_autograd(_refuse_second, setup_context=_keep_nothing)
