"""OT_epsilon of a small problem in extended precision, with a proven bound on its own error.

`entropic_transport` maximises F(g) = <a, T(g)> + <b, g> by Newton's method in NumPy's long double
(64 bits of mantissa on x86), at epsilons that fall to the one asked for. Nothing is taken on trust:
with f = T(g) the plan P = a b^T exp((f + g - C) / epsilon) has the rows a and mass 1, and for any
plan Q with both marginals

    <C, Q> + epsilon KL(Q | a b^T) - F(g) = epsilon KL(Q | P),

so that F(g) <= OT <= F(g) + epsilon KL(Q | P). Q is P with columns scaled down to b and the missing
mass put back as a product (Altschuler, Weed, Rigollet 2017, Algorithm 2). The KL divergence is of
second order in the missing mass, and summed without cancellation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Extended = NDArray[np.longdouble]

UNIT = float(np.finfo(np.longdouble).eps)
# Of the error of a value over its magnitude: what sums, logarithms and costs add up to.
EVALUATION = 64 * UNIT
# Epsilon falls by this factor from level to level.
STEP = 4.0
STEPS_PER_LEVEL = 200
# Shares of the masses that are added to the Laplacian's diagonal, and the longest steps, in
# epsilons.
PENALTIES = (0.0, 1e-12, 1e-8, 1e-5, 1e-3, 1e-2, 0.1, 1.0)
LONGEST = (3000.0, 300.0, 30.0)
# Newton's steps end once the gap is this small beside the magnitude of the value.
ENOUGH = 4 * UNIT


class Truth(NamedTuple):
    """A value in extended precision and how far it may be from the exact one."""

    value: float
    error: float
    # <a, |f|> + <b, |g|>: what a relative change of masses may move the value by.
    magnitude: float

    def __add__(self, other: object) -> Truth:
        assert isinstance(other, Truth)
        return Truth(*(one + two for one, two in zip(self, other, strict=True)))


class State(NamedTuple):
    """Potentials with f = T(g), their plan, and how far its columns are from b."""

    f: Extended
    g: Extended
    plan: Extended
    columns: Extended
    dual: np.longdouble
    residual: float


def extended(values: Any) -> Extended:
    return np.asarray(values, dtype=np.longdouble)


def entropic_transport(cost: Extended, a: Extended, b: Extended, epsilon: float) -> Truth:
    """OT_epsilon for costs (K, L) and masses (K,), (L,), positive and normalised here."""
    a, b = a / a.sum(), b / b.sum()
    if min(cost.shape) == 1:
        value = float(a @ cost @ b)
        size = float(a @ np.abs(cost) @ b)
        return Truth(value, EVALUATION * size, size)
    if cost.shape[0] < cost.shape[1]:
        # Newton's systems are as large as the second side.
        cost, a, b = cost.T.copy(), b, a
    spread = float(cost.max() - cost.min())
    g, level = np.zeros_like(b), max(epsilon, spread)
    while level > epsilon:
        g = _newton(cost, a, b, g, level, 1e-2).g
        level = max(epsilon, level / STEP)
    state = _newton(cost, a, b, g, epsilon, None)
    # A constant may move from one potential to the other; the smallest ones lose the least.
    constant = (a @ state.f - b @ state.g) / 2
    state = _evaluate(cost, a, b, state.g + constant, epsilon)
    magnitude = float(a @ np.abs(state.f) + b @ np.abs(state.g))
    # The optimum is between dual and dual + gap.
    gap = _gap(state, a, b, epsilon)
    error = gap + EVALUATION * (magnitude + float(a @ np.abs(cost) @ b))
    return Truth(float(state.dual), error + 2.0**-53 * abs(float(state.dual)), magnitude)


def softmin_rows(cost: Extended, b: Extended, g: Extended, epsilon: float) -> Extended:
    """-epsilon log sum_j b_j exp((g_j - C_ij) / epsilon), accurate for large epsilon too."""
    exponents = (g - cost) / np.longdouble(epsilon)
    highest = exponents.max(1)
    # sum_j b_j exp(z_j) = 1 + sum_j b_j expm1(z_j), as masses add up to 1.
    excess = np.expm1(exponents - highest[:, None]) @ b
    total = np.exp(exponents - highest[:, None]) @ b
    logs = np.where(excess > -0.5, np.log1p(np.maximum(excess, -0.5)), np.log(total))
    result: Extended = -np.longdouble(epsilon) * (highest + logs)
    return result


def _evaluate(cost: Extended, a: Extended, b: Extended, g: Extended, epsilon: float) -> State:
    f = softmin_rows(cost, b, g, epsilon)
    plan = np.exp((f[:, None] + g - cost) / np.longdouble(epsilon)) * a[:, None] * b
    columns = plan.sum(0)
    dual = np.longdouble(a @ f + b @ g)
    return State(f, g, plan, columns, dual, float(np.abs(columns - b).sum()))


def _newton(
    cost: Extended, a: Extended, b: Extended, g: Extended, epsilon: float, residual: float | None
) -> State:
    """Steps from g to a relative error of columns, or without one until the gap is closed."""
    state = _evaluate(cost, a, b, g, epsilon)
    best, worse = state, 0
    for _ in range(STEPS_PER_LEVEL):
        if residual is not None and np.abs(state.columns / b - 1).max() <= residual:
            return state
        if residual is None and state.residual < 1e-9:
            gap = _gap(state, a, b, epsilon)
            size = float(a @ np.abs(state.f) + b @ np.abs(state.g))
            if gap <= ENOUGH * size:
                return state
        # A Sinkhorn update first: Newton's region of convergence shrinks with epsilon.
        moved = softmin_rows(cost.T, a, state.f, epsilon)
        state = _step(cost, a, b, _evaluate(cost, a, b, moved, epsilon), epsilon)
        worse = 0 if state.residual < 0.9 * best.residual else worse + 1
        best = min(best, state, key=lambda one: one.residual)
        if residual is None and worse > 8 and best.residual < 1e-12:
            break
    return best


def _step(cost: Extended, a: Extended, b: Extended, state: State, epsilon: float) -> State:
    """Newton's step, shortened by a growing penalty until the dual rises; none if it never does.

    The Hessian is -(diag(c) - P^T diag(1 / a) P) / epsilon: minus a graph's Laplacian.
    """
    weights = state.plan.T @ (state.plan / a[:, None])
    tiny = 8 * UNIT * float(a @ np.abs(state.f) + b @ np.abs(state.g))
    for penalty in PENALTIES:
        step = _solve_laplacian(weights, b - state.columns, penalty * state.columns)
        size = float(np.abs(step).max())
        if not np.isfinite(size):
            continue
        # Mass that has to cross a link of exp(-1,000) asks for a step without end.
        for longest in LONGEST if size > LONGEST[-1] else (np.inf,):
            share = np.longdouble(min(1.0, longest / size) if size else 1.0)
            tried = _evaluate(cost, a, b, state.g + np.longdouble(epsilon) * share * step, epsilon)
            risen = tried.dual - state.dual
            last = abs(risen) <= tiny and tried.residual < 0.5 * state.residual
            if risen > tiny or last:
                return tried
    return state


def _solve_laplacian(weights: Extended, rhs: Extended, ground: Extended) -> Extended:
    """Solve sum_l w_kl (x_k - x_l) + ground_k x_k = rhs_k, for weights (K, K) and ground >= 0.

    Eliminates without a subtraction (Grassmann, Taksar, Heyman 1985), so that weak links between
    groups of points, down to exp(-10,000), are as accurate as strong ones. Without ground, x ends
    in 0.
    """
    weights, rhs, ground = weights.copy(), rhs.copy(), ground.copy()
    last = len(rhs) - 1
    shares: list[Extended] = []
    solution = np.zeros_like(rhs)
    for k in range(last):
        links = weights[k, k + 1 :]
        total = links.sum() + ground[k]
        inverse = 1 / total if total > 0 else np.longdouble(0)
        share = links * inverse
        weights[k + 1 :, k + 1 :] += weights[k + 1 :, k, None] * share
        rhs[k + 1 :] += share * rhs[k]
        ground[k + 1 :] += share * ground[k]
        rhs[k] *= inverse
        shares.append(share)
    if ground[last] > 0:
        solution[last] = rhs[last] / ground[last]
    for k in reversed(range(last)):
        solution[k] = rhs[k] + shares[k] @ solution[k + 1 :]
    return solution


def _gap(state: State, a: Extended, b: Extended, epsilon: float) -> float:
    """The gap epsilon KL(Q | P) of the rounded plan Q; P has the marginals (a, columns)."""
    scale = np.minimum(1, b / state.columns)
    rows_left = np.maximum(a - state.plan @ scale, 0)
    columns_left = b - state.columns * scale
    missing = columns_left.sum()
    if missing <= 0:
        return 0.0
    left = rows_left.sum()
    added = (rows_left / left if left > 0 else a)[:, None] * columns_left
    # The sum of Q log(Q / P) - Q + P where P has anything: P x^2 / 2 where Q / P = 1 + x is near 1.
    held = state.plan > 0
    plan = state.plan[held]
    moved = (state.plan * (scale - 1) + added)[held]
    small = np.abs(moved) < 1e-6 * plan
    filled = np.where(small, plan, plan + moved)
    large = filled * np.log(filled / plan) - moved
    total = np.where(small, moved * (moved / plan), large).sum()
    # What is added where P underflowed: its logarithm is at least that of the smallest number.
    total += added[~held].sum() * 11_400
    return float(np.longdouble(epsilon) * total)
