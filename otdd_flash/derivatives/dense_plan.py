"""The plan of a small problem, made of its clouds alone."""

from __future__ import annotations

from torch import Tensor

from otdd_flash.derivatives.direct import is_small
from otdd_flash.memory import holds, stated_budget
from otdd_flash.operators.base import KeptPlan
from otdd_flash.operators.comparison import Comparison


def dense_plan(comparison: Comparison, name: str, f: Tensor, g: Tensor | None) -> KeptPlan | None:
    """The plan of f (n,) and g (m,) of a term, of the original points in float64, on any backend.

    No operator is built for it, which takes longer than the plan. None where the problem is not
    small, where points stream or are shared between processes, or where memory is short.
    """
    if comparison.streaming is not None or comparison.compute.group is not None:
        return None
    source, target = comparison.sides(name)
    shape, device = (len(source), len(target)), source.features.device
    if not is_small(shape):
        return None
    # All points at once, as they are and in float64.
    entries, points = 8 * shape[0] * shape[1], 12 * sum(shape) * source.dim
    stated = stated_budget(comparison.compute.memory_budget)
    # What is made of a plan takes as much again.
    short = stated is not None and entries + points > stated
    if short or not holds(2 * entries + points, None, device):
        return None
    g = f if g is None else g
    return KeptPlan(comparison.cost(name).plan_entries(f, g, comparison.epsilon))
