"""Quasi-Newton steps for Sinkhorn's fixed points, with the dual value as their safeguard.

Cross term. With f = T(g) the dual is the concave semi-dual D(g) = <a, T(g)> + <b, g>. With column
sums c of the plan, the update of g moves it by

    r = T'(T(g)) - g = epsilon log(b / c),

in the metric <u, v>_b = sum_j b_j u_j v_j a gradient step. The Jacobian of -r at the optimum is
I - diag(1 / b) P^T diag(1 / a) P: self-adjoint in that metric, with eigenvalues in [0, 1], many of
them near 0 when epsilon is small. L-BFGS learns its inverse from the last differences of g and r.
In units of the cost they stay good estimates at the next level of epsilon. A self term is the same
with r = T(f) - f, whose half is the averaged update.

Safeguard. The plain update raises the dual by at least

    <b, r> + epsilon (M - 1) = epsilon KL(b || c) >= 0,        M = mass of the plan,

which is known before it is taken. A quasi-Newton step is kept only if it does as well, so that the
convergence proof of the plain iteration holds for the kept ones (Altschuler, Weed & Rigollet 2017,
Near-linear time approximation algorithms for optimal transport via Sinkhorn iteration). One that is
not kept is followed by plain updates, twice as many each time in a row: N of them are held up by no
more than log2(N) rejections. Where a gain drowns in the rounding of the dual, the marginal error
must soon fall instead.

All decisions stay on the device as tensors: a step never waits for the host and can be recorded.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

# Differences that are remembered.
MEMORY = 10

# What a difference of duals may be off by, in units of the unit roundoff times their sums.
DUAL_ROUNDING = 4.0

# How far the marginal error may grow over its lowest where the dual cannot tell, and for how long.
GROWTH = 4.0
PATIENCE = 10.0


class Point(NamedTuple):
    """Potentials, (T(g), g) or (f, f), and what a look at their plan tells.

    Attributes:
        f: (n,) row potential.
        g: (m,) column potential.
        updated: (m,) the softmin of f.
        dual: dual value.
        gain: what the plain update adds to it at the least.
        gap: L1 distance of the marginal from the masses.
        size: <a, |f|> + <b, |g|>.
    """

    f: Tensor
    g: Tensor
    updated: Tensor
    dual: Tensor
    gain: Tensor
    gap: Tensor
    size: Tensor


class Track(NamedTuple):
    """Where a solve stands: the point that was kept last, and what follows it.

    Attributes:
        candidate: (m,) column potential to look at next.
        steps: (MEMORY, m) last differences of g, the newest last; 0 where there is none yet.
        falls: (MEMORY, m) by how much r fell over them.
        lowest: the lowest gap since the last restart.
        stale: iterations since it was found.
        plain: plain updates to come; the candidate is one if this is positive.
        penalty: how many follow the next rejection.

    The other attributes are those of `Point`.
    """

    f: Tensor
    g: Tensor
    updated: Tensor
    dual: Tensor
    gain: Tensor
    gap: Tensor
    size: Tensor
    candidate: Tensor
    steps: Tensor
    falls: Tensor
    lowest: Tensor
    stale: Tensor
    plain: Tensor
    penalty: Tensor


def begin(f: Tensor, g: Tensor) -> Track:
    """Start from f (n,) and g (m,), of which nothing is known yet."""
    number = torch.zeros((), dtype=torch.float64, device=g.device)
    memory = torch.zeros((MEMORY, len(g)), dtype=torch.float64, device=g.device)
    numbers = (number - math.inf, number, number, number)
    counters = (number + math.inf, number, number, number + 1)
    return Track(f, g, g, *numbers, g, memory, memory, *counters)


def restart(track: Track, candidate: Tensor) -> Track:
    """Go on from another g (m,), or at another epsilon, with the differences seen so far."""
    return track._replace(
        candidate=candidate,
        dual=torch.full_like(track.dual, -math.inf),
        lowest=torch.full_like(track.lowest, math.inf),
        stale=torch.zeros_like(track.stale),
        plain=torch.zeros_like(track.plain),
        penalty=torch.ones_like(track.penalty),
    )


def advance(track: Track, seen: Point, weights: Tensor, damping: float) -> Track:
    """Keep the point at the candidate or not, learn from it, and choose the next candidate.

    Args:
        track: where the solve stands.
        seen: the point at its candidate.
        weights: (m,) masses b, the metric.
        damping: the plain update is g + damping r.
    """
    rounding = torch.finfo(seen.g.dtype).eps / 2 * seen.size
    steps, falls = _learn(track, seen, weights, rounding)
    plain, lower = track.plain > 0, seen.gap < track.lowest
    surplus = seen.dual - track.dual - track.gain
    better = surplus > DUAL_ROUNDING * rounding
    steady = (seen.gap <= GROWTH * track.lowest) & (track.stale < PATIENCE)
    forced = plain | track.dual.isneginf()
    kept = forced | better | ((surplus >= -DUAL_ROUNDING * rounding) & steady)
    point = Point(*(torch.where(kept, new, old) for new, old in zip(seen, track, strict=False)))
    # Trust comes back with a step that certainly gained something.
    forgiven = kept & ~plain & (better | lower)
    penalty = torch.where(forgiven, (track.penalty / 2).clamp_min(1), track.penalty)
    waits = torch.where(kept, (track.plain - 1).clamp_min(0), penalty)
    residual = point.updated.double() - point.g.double()
    learnt = _direction(residual, steps, falls, weights, damping)
    usable = (waits == 0) & learnt.isfinite().all() & (weights > 0)
    move = torch.where(usable, learnt, damping * residual)
    return Track(
        *point,
        candidate=(point.g.double() + move).to(seen.g.dtype),
        steps=steps,
        falls=falls,
        lowest=torch.minimum(track.lowest, point.gap),
        stale=torch.where(kept & lower, 0, track.stale + 1),
        plain=waits,
        penalty=torch.where(kept, penalty, 2 * penalty),
    )


def _learn(track: Track, seen: Point, weights: Tensor, rounding: Tensor) -> tuple[Tensor, Tensor]:
    """The last differences of g and -r, with the newest if its curvature exceeds rounding."""
    step = _centred(seen.g.double() - track.g, weights)
    fall = step - _centred(seen.updated.double() - track.updated, weights)
    curvature = weights @ (step * fall)
    sound = curvature > rounding * (weights @ step.square()).sqrt()
    sound = sound & track.dual.isfinite() & curvature.isfinite()

    def learnt(memory: Tensor, newest: Tensor) -> Tensor:
        return torch.where(sound, torch.cat((memory[1:], newest[None])), memory)

    return learnt(track.steps, step), learnt(track.falls, fall)


def _centred(potential: Tensor, weights: Tensor) -> Tensor:
    """Without its mean, and 0 where there is no mass."""
    return torch.where(weights > 0, potential - weights @ potential, 0)


def _direction(
    residual: Tensor, steps: Tensor, falls: Tensor, weights: Tensor, damping: float
) -> Tensor:
    """L-BFGS applied to the residual (m,), in matrix form.

    H r = s r + [S, s Y] [[R^-T (D + s Y^T Y) R^-1, -R^-T], [-R^-1, 0]] [S, s Y]^T r

    with R the upper triangle of S^T Y, D its diagonal and s = tr D / tr Y^T Y (Byrd, Nocedal &
    Schnabel 1994, Representations of quasi-Newton matrices).
    """
    residual = _centred(residual, weights)
    vectors = torch.cat((steps, falls, residual[None]))
    products = (vectors * weights) @ vectors.T
    old, new = slice(0, MEMORY), slice(MEMORY, 2 * MEMORY)
    curvatures, squares = products[old, new].diagonal(), products[new, new].diagonal()
    empty = curvatures == 0
    upper = products[old, new].triu() + empty.double().diag()
    scale = torch.where(empty[-1], damping, curvatures.sum() / squares.sum())
    inner = torch.linalg.solve_triangular(upper, products[old, -1:], upper=True)
    outer = curvatures[:, None] * inner + scale * (products[new, new] @ inner - products[new, -1:])
    outer = torch.linalg.solve_triangular(upper.T, outer, upper=False)
    direction: Tensor = scale * (residual - inner[:, 0] @ falls) + outer[:, 0] @ steps
    return direction
