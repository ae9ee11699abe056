"""`quasi_newton.advance` and the look before it in three launches, where passes run in Triton.

In PyTorch they are a hundred, which for some thousand points take far longer than the passes. What
is decided and remembered is the same, up to rounding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otdd_flash.kernels.epsilon import on_device
from otdd_flash.kernels.quasi_newton_decision import decision_size, quasi_newton_decision
from otdd_flash.kernels.quasi_newton_sums import log_mass, partial_shape, quasi_newton_sums
from otdd_flash.kernels.quasi_newton_update import quasi_newton_update
from otdd_flash.operators.base import Epsilon, Operator
from otdd_flash.solver.quasi_newton import DUAL_ROUNDING, Track
from otdd_flash.solver.trust import GROWTH, PATIENCE


def advance_cross(
    operator: Operator, epsilon: Epsilon, track: Track, f: Tensor, updated: Tensor
) -> Track:
    """Look at the candidate g with f = T(g) (n,) and T'(f) (m,), and choose the next."""
    seen = f, track.candidate, updated
    return _advance(operator, epsilon, track, seen, damping=1.0, symmetric=False)


def advance_self(operator: Operator, epsilon: Epsilon, track: Track, softmin: Tensor) -> Track:
    """Look at the candidate f with T(f) (n,), both of mass 1 first, and choose the next."""
    seen = track.candidate, track.candidate, softmin
    return _advance(operator, epsilon, track, seen, damping=0.5, symmetric=True)


def _advance(
    operator: Operator,
    epsilon: Epsilon,
    track: Track,
    seen: tuple[Tensor, Tensor, Tensor],
    *,
    damping: float,
    symmetric: bool,
) -> Track:
    level, memory = on_device(epsilon, track.g.device), track.memory.shape[1]
    shape = partial_shape(*operator.shape, memory)
    # One allocation, its parts aligned alike at all sizes.
    sizes = [decision_size(memory), 2, math.prod(shape)]
    decision, log_total, partial = torch.split(track.numbers.new_empty(sum(sizes)), sizes)
    partial, total = partial.view(shape), log_total if symmetric else None
    if total is not None:
        log_mass(seen[1], seen[2], operator.a, level, total)
    last = track.f, track.g, track.updated
    masses = operator.a, operator.b
    quasi_newton_sums(seen, last[1:], track.memory, masses, level, partial, total)
    after = Track(*map(torch.empty_like, track))
    quasi_newton_decision(
        partial,
        (track.numbers, track.products),
        (after.numbers, after.products),
        decision,
        unit=torch.finfo(track.g.dtype).eps / 2,
        damping=damping,
        limits=(DUAL_ROUNDING, GROWTH, PATIENCE),
    )
    out = after.f, after.g, after.updated, after.candidate, after.memory
    quasi_newton_update(seen, last, track.memory, operator.b, level, total, decision, damping, out)
    return after
