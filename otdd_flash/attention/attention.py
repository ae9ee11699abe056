"""`otdd.sinkhorn_attention`: the checks of its input, and the operation of PyTorch behind it.

`otdd_flash` exports `sinkhorn_attention`, and `nn.SinkhornAttention` calls it. The operation is for
autograd, `torch.compile` and CUDA graphs, over the passes of `passes`.

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
`torch.compile`. If arguments, results or their shapes change, both operations need other names
(`batched.recorded`). Nothing may wait for a GPU, and no tensor may grow with the number of scores
(`tests/attention`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from otdd_flash.arguments import BatchedGradient, Count, Index, Positive, takes, traced_tensor
from otdd_flash.attention.passes import Scores, at
from otdd_flash.batched.checking import TYPES, placement
from otdd_flash.batched.recorded import differentiable_once
from otdd_flash.cost.compute import Compute, ComputeOptions
from otdd_flash.eager import check_transforms, own_settings
from otdd_flash.errors import InputError, NotConvergedWarning, warn

# The most coordinates of a query, key or value.
WIDEST = 256


@takes(
    q=traced_tensor("(..., n, d)"),
    k=traced_tensor("(..., m, d)"),
    v=traced_tensor("(..., m, e)"),
    key_mask=lambda name, value: value if value is None else traced_tensor("(..., m)")(name, value),
)
def sinkhorn_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    iterations: Index = 3,
    tolerance: Positive | None = None,
    max_iterations: Count = 100,
    scale: Positive | None = None,
    key_mask: Tensor | None = None,
    gradient: BatchedGradient = "unrolled",
    compute: Compute | None = None,
) -> Tensor:
    """Compute attention with weights whose rows sum to 1 and columns to n / m, for autograd.

    With S = scale q k^T and LSE the logsumexp, first u = -LSE_j(S); an iteration is v = log(n / m)
    - LSE_i(S + u), then u = -LSE_j(S + v) (Sinkhorn & Knopp 1967; as attention Sander et al. 2022,
    Sinkformers). The output is exp(u + S + v) values: rows sum to 1 up to rounding, columns nearly
    to n / m. With `iterations=0` this is softmax attention. No tensor grows with n m, and nothing
    waits for a GPU.

    Memory is linear in n + m: q, k, v, the output, and for an `unrolled` gradient
    (iterations + 1) (n + m) float32 numbers a head, of which a backward pass takes up to seven
    times as many while it runs. Differentiable once by q, k and v. Scores, sums and potentials
    are float32, or float64 of such inputs, which PyTorch computes on any device. Inside of autocast
    float32 inputs are cast, as those of `scaled_dot_product_attention` are.

    Args:
        q: queries (..., n, d), d up to 256, float16, bfloat16, float32 or float64. Each index of
            the leading dimensions, such as batch and heads, is a separate problem.
        k: keys (..., m, d), of the same type and leading dimensions.
        v: values (..., m, e), e up to 256, of the same type and leading dimensions.
        iterations: number of iterations.
        tolerance: stop each head once the relative error of its column sums is no larger; instead
            of `iterations`.
        max_iterations: limit of iterations with a `tolerance`.
        scale: factor of the scores; 1 / sqrt(d) by default.
        key_mask: (..., m) bool, leading dimensions broadcast; True leaves a key out. m then counts
            the keys that are left. A head without keys is refused on a CPU; on a GPU its output is
            NaN.
        gradient: `unrolled`: the exact gradient of the iterations made. `implicit`: the gradient of
            the limit, at the sums that columns have; for iterations that converged. `none`: no
            gradient, and nothing is kept.
        compute: `otdd.ComputeOptions`, or only a device; by default that of q.

    Returns:
        The output (..., n, e), of the type of the inputs.

    Raises:
        InputError: shapes or types that do not fit, or a head without keys; in a backward pass, a
            second derivative.

    Warns:
        NotConvergedWarning: in a backward pass on a CPU, column sums of an `implicit` gradient are
            off by over 1%, or its linear system was not solved, with its residual.
    """
    if not torch.compiler.is_compiling():
        check_transforms("sinkhorn_attention", (q, k, v))
    _check_shapes(q, k, v, key_mask)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    most = iterations if tolerance is None else max_iterations
    return _attended([q, k, v], key_mask, compute, gradient, (scale, most, tolerance))


def _attended(
    given: list[Tensor],
    key_mask: Tensor | None,
    compute: Compute | None,
    gradient: str,
    settings: tuple[float, int, float | None],
) -> Tensor:
    """Compute the output, where and in the types that arguments and modes say."""
    cast = _cast(*given)
    _check_types(given, cast)
    home, of, lead = cast[0].device, cast[0].dtype, cast[0].shape[:-2]
    device, dtype, in_triton = placement(cast[0], compute)
    heads = math.prod(lead)
    points = [each.to(device, dtype).reshape(heads, *each.shape[-2:]).contiguous() for each in cast]
    if gradient == "none":
        points = [each.detach() for each in points]
    mask = None
    if key_mask is not None:
        m = points[1].shape[1]
        mask = key_mask.to(device).expand(*lead, m).reshape(heads, m)
    unrolled = gradient == "unrolled"
    kept = torch.is_grad_enabled() and any(each.requires_grad for each in points[:2])
    if torch.compiler.is_compiling():
        # An export, or a call inside of vmap, may be differentiated although no input says so.
        kept = torch.is_grad_enabled() or torch.compiler.is_exporting()
    if dtype == torch.float64:
        if compute is not None and ComputeOptions.of(compute).backend == "triton":
            raise InputError(
                "kernels of attention compute float16, bfloat16 and float32, got float64; leave "
                "backend=auto"
            )
        in_triton = False
    out = attend(*points, mask, *settings, unrolled, unrolled and kept, in_triton)[0]
    return out.reshape(*lead, *out.shape[1:]).to(home, of)


def _cast(*points: Tensor) -> list[Tensor]:
    """Cast points as autocast does: to its type, but for float64."""
    kind = points[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return list(points)
    dtype = torch.get_autocast_dtype(kind)
    return [each if each.dtype == torch.float64 else each.to(dtype) for each in points]


def _check_types(given: list[Tensor], cast: list[Tensor]) -> None:
    """Raise an `InputError` unless points are, as they are computed, of one type on one device."""
    if cast[0].dtype not in TYPES or len({(str(each.device), each.dtype) for each in cast}) > 1:
        q, k, v = (f"{each.dtype} on {each.device}" for each in given)
        raise InputError(
            "q, k and v must be on one device and of one type, float16, bfloat16, float32 or "
            f"float64, got {q}, {k} and {v}; convert them with .to()"
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """Raise an `InputError` unless shapes fit each other and the mask is one."""
    lead, points = q.shape[:-2], (q, k, v)
    if (
        min(each.ndim for each in points) < 2
        or (q.shape[-1], k.shape[-2]) != (k.shape[-1], v.shape[-2])
        # One by one: their least would be a condition on which of them it is, in a trace.
        or any(size < 1 for each in points for size in each.shape[-2:])
        or any(each.shape[-1] > WIDEST for each in points)
    ):
        raise InputError(
            "q, k and v must have shapes (..., n, d), (..., m, d) and (..., m, e), with n and m at "
            f"least 1, and d and e of 1 to {WIDEST}, got {_shapes(points)}"
        )
    if not lead == k.shape[:-2] == v.shape[:-2]:
        raise InputError(
            f"q, k and v must have equal leading dimensions, got shapes {_shapes(points)}; "
            "expand() those that several share"
        )
    if key_mask is None:
        return
    full = (*lead, k.shape[-2])
    fits = 1 <= key_mask.ndim <= len(full) and key_mask.shape[-1] == full[-1]
    if key_mask.dtype != torch.bool or not (
        fits
        and all(size in (1, of) for size, of in zip(key_mask.shape[::-1], full[::-1], strict=False))
    ):
        raise InputError(
            f"key_mask must be bool of shape {tuple(full)}, or of leading dimensions that "
            f"broadcast to that, got {key_mask.dtype} of shape {tuple(key_mask.shape)}"
        )


def _shapes(points: tuple[Tensor, ...]) -> str:
    return ", ".join(str(tuple(each.shape)) for each in points)


# Limits of conjugate gradients: steps at the most, residuals over the right-hand side that end a
# head, by type, and one that is reported.
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
            iterations that a head does not make is not initialised; on a CPU nor is v of those
            after all heads have stopped.
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
        earlier = rows.earlier((us, vs), (u, last), adjoints)
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
    # Column sums so far are exp(v_(t-1) - v_t) times their targets.
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

    Where a head has not made an iteration, passes leave the values that it starts with.
    """
    ratios = _key_ratios(vs[0], us.shape[2])
    xs = delta.expand(len(us), -1, -1).contiguous()
    ys = (y * ratios[:, None]).expand(len(vs), -1, -1).contiguous()
    columns, minus_ratios, minus_one = rows.transposed, -ratios, -torch.ones_like(ratios)
    u, v, x, y_of = us.unbind(), vs.unbind(), xs.unbind(), ys.unbind()
    for t in range(len(us) - 1, 0, -1):
        if t < len(us) - 1:
            # Heads whose last iteration is later.
            columns.plan_product((v[t], u[t]), x[t], minus_ratios, t + 1, y_of[t])
        rows.plan_product((u[t - 1], v[t]), y_of[t], minus_one, t, x[t - 1])
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
    """Return the gradients of the arguments of `attend`, by `gradients_now` or its operation."""
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
