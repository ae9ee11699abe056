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

Memory. A step costs one read of the remembered differences: beside them stand the inner products
that L-BFGS needs, to which every step adds one row and one column, so that the direction follows
from its coefficients (Chen, Wang & Zhou 2014, Large-scale L-BFGS using MapReduce).

All decisions stay on the device as tensors: a step never waits for the host and can be recorded.
This file is the reference; where passes run in Triton, `quasi_newton_kernels` does the same.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from otdd_flash.solver.trust import Trust

# Differences that are remembered.
MEMORY = 10

# What a difference of duals may be off by, in units of the unit roundoff times their sums.
DUAL_ROUNDING = 4.0


class Point(NamedTuple):
    """Potentials, (T(g), g) or (f, f), and what a look at their plan tells.

    Attributes:
        f: (n,) row potential.
        g: (m,) column potential.
        updated: (m,) the softmin of f.
        dual: dual value.
        gain: what the plain update adds to it at the least, <b, updated - g>.
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


class Numbers(NamedTuple):
    """The numbers of a track, 0-dim float64.

    Attributes:
        dual: of the point that was kept last, as in `Point`; -inf if it does not count.
        gain: likewise.
        gap: likewise.
        size: likewise.
        lowest: as in `Trust`, and those that follow.
        stale: likewise.
        plain: likewise; the candidate is a plain update if this is positive.
        penalty: likewise.
    """

    dual: Tensor
    gain: Tensor
    gap: Tensor
    size: Tensor
    lowest: Tensor
    stale: Tensor
    plain: Tensor
    penalty: Tensor

    @property
    def trust(self) -> Trust:
        """What decides on the next point."""
        return Trust(self.dual, self.gain, *self[4:])


class Track(NamedTuple):
    """Where a solve stands: the point that was kept last, and what follows it.

    Attributes:
        f: (n,) row potential of the point.
        g: (m,) column potential.
        updated: (m,) the softmin of f.
        candidate: (m,) column potential to look at next.
        memory: (2, MEMORY, m) last differences of g and of -r, the newest last; 0 where there is
            none yet. Without their means, and 0 where there is no mass.
        products: (2, MEMORY, MEMORY + 1) of both in the metric with the differences of -r, and with
            r itself at the point. Those of a step with an older difference of -r are 0.
        numbers: (8,) float64, the `Numbers`.
    """

    f: Tensor
    g: Tensor
    updated: Tensor
    candidate: Tensor
    memory: Tensor
    products: Tensor
    numbers: Tensor

    @property
    def named(self) -> Numbers:
        """The numbers by their names."""
        return Numbers(*self.numbers)

    @property
    def gap(self) -> Tensor:
        """L1 distance of the marginal from the masses at the point."""
        return self.named.gap

    @property
    def look(self) -> Tensor:
        """(4,): dual, gain, gap and size of the point, as they stand in the numbers."""
        return self.numbers[: Numbers._fields.index("size") + 1]


def begin(f: Tensor, g: Tensor) -> Track:
    """Start from f (n,) and g (m,), of which nothing is known yet."""
    f, g = f.contiguous(), g.contiguous()
    memory = torch.zeros((2, MEMORY, len(g)), dtype=torch.float64, device=g.device)
    products = memory.new_zeros((2, MEMORY, MEMORY + 1))
    return Track(f, g, g, g, memory, products, _unknown(g.device))


def restart(track: Track, candidate: Tensor) -> Track:
    """Go on from another g (m,), or at another epsilon, with the differences seen so far."""
    return track._replace(candidate=candidate, numbers=_unknown(candidate.device))


def _unknown(device: torch.device) -> Tensor:
    """The numbers before anything was looked at: the first point will be kept."""
    numbers = torch.zeros(len(Numbers._fields), dtype=torch.float64, device=device)
    named = Numbers(*numbers)
    named.dual.fill_(-math.inf)
    named.lowest.fill_(math.inf)
    named.penalty.fill_(1)
    return numbers


def advance(track: Track, seen: Point, weights: Tensor, damping: float) -> Track:
    """Keep the point at the candidate or not, learn from it, and choose the next candidate.

    Args:
        track: where the solve stands.
        seen: the point at its candidate.
        weights: (m,) masses b, the metric.
        damping: the plain update is g + damping r.
    """
    before = track.named
    rounding = torch.finfo(seen.g.dtype).eps / 2 * seen.size
    memory, sound = _learn(track, seen, weights, rounding)
    slack = DUAL_ROUNDING * rounding
    kept, trust = before.trust.judge(seen.dual, seen.gain, seen.gap, slack)
    last = (*track[:3], *before[:4])
    point = Point(*(torch.where(kept, new, old) for new, old in zip(seen, last, strict=True)))
    residual = point.updated.double() - point.g.double()
    centred = _centred(residual, weights)
    products = _products(track.products, memory, sound, centred, weights)
    learnt = _direction(centred, memory, products, damping)
    usable = (trust.plain == 0) & learnt.isfinite().all() & (weights > 0)
    move = torch.where(usable, learnt, damping * residual)
    numbers = Numbers(*point[3:], *trust[2:])
    candidate = (point.g.double() + move).to(seen.g.dtype)
    return Track(*point[:3], candidate, memory, products, torch.stack(numbers))


def _learn(track: Track, seen: Point, weights: Tensor, rounding: Tensor) -> tuple[Tensor, Tensor]:
    """The memory, with the newest differences if their curvature exceeds rounding; if it does."""
    step = _centred(seen.g.double() - track.g, weights)
    fall = step - _centred(seen.updated.double() - track.updated, weights)
    curvature = weights @ (step * fall)
    sound = curvature > rounding * (weights @ step.square()).sqrt()
    sound = sound & track.named.dual.isfinite() & curvature.isfinite()
    newest = torch.stack((step, fall))[:, None]
    return torch.where(sound, torch.cat((track.memory[:, 1:], newest), 1), track.memory), sound


def _centred(potential: Tensor, weights: Tensor) -> Tensor:
    """Without its mean, and 0 where there is no mass."""
    return torch.where(weights > 0, potential - weights @ potential, 0)


def _products(
    before: Tensor, memory: Tensor, sound: Tensor, residual: Tensor, weights: Tensor
) -> Tensor:
    """The inner products of a track whose memory has the newest differences if they are sound."""
    newest, on_residual = (
        (memory @ (weights * vector)).unsqueeze(2) for vector in (memory[1, -1], residual)
    )
    moved = torch.cat((pad(before[:, 1:, 1:-1], (0, 0, 0, 1)), newest), 2)
    # Falls with falls are symmetric.
    moved[1, -1] = newest[1, :, 0]
    return torch.cat((torch.where(sound, moved, before[:, :, :-1]), on_residual), 2)


def _direction(residual: Tensor, memory: Tensor, products: Tensor, damping: float) -> Tensor:
    """L-BFGS applied to the residual (m,), in matrix form.

    H r = s r + [S, s Y] [[R^-T (D + s Y^T Y) R^-1, -R^-T], [-R^-1, 0]] [S, s Y]^T r

    with R the upper triangle of S^T Y, D its diagonal and s = tr D / tr Y^T Y (Byrd, Nocedal &
    Schnabel 1994, Representations of quasi-Newton matrices).

    Args:
        residual: r, without its mean.
        memory: (2, MEMORY, m), S and Y.
        products: (2, MEMORY, MEMORY + 1) of both with Y and r.
        damping: s where nothing is remembered.
    """
    steps, falls = memory
    crossed, squared = products[:, :, :-1]
    on_steps, on_falls = products[:, :, -1:]
    curvatures = crossed.diagonal()
    empty = curvatures == 0
    upper = crossed.triu() + empty.double().diag()
    scale = torch.where(empty[-1], damping, curvatures.sum() / squared.diagonal().sum())
    inner = torch.linalg.solve_triangular(upper, on_steps, upper=True)
    outer = curvatures[:, None] * inner + scale * (squared @ inner - on_falls)
    outer = torch.linalg.solve_triangular(upper.T, outer, upper=False)
    direction: Tensor = scale * (residual - inner[:, 0] @ falls) + outer[:, 0] @ steps
    return direction
