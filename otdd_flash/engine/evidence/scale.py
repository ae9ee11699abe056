"""What rounding keeps solves from: the scale of marginal errors that it causes or hides.

(2) of `perturbed_costs` to first order, for the mean error of the costs and for potentials rounded
to their type. No bound rests on it: a tolerance below twice the floor is refused, and quasi-Newton
steps are judged by the noise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.cost.facts import CostFacts, Number
from otdd_flash.engine.numbers import Numbers
from otdd_flash.engine.segments import Costs
from otdd_flash.operators.base import Operator


def magnitude(operator: Operator, f: Tensor, g: Tensor) -> Tensor:
    """<a, |f|> + <b, |g|>: a point without mass does not count, however far away it is."""
    rows, columns = operator.a * f, operator.b * g
    size: Tensor = torch.linalg.vector_norm(rows, 1) + torch.linalg.vector_norm(columns, 1)
    return size


def hidden_error(costs: CostFacts, size: Number, epsilon: float) -> Number:
    """What a certificate will call hidden, with m = `magnitude` of the potentials in `size`."""
    unit = torch.finfo(costs.dtype).eps / 2
    return (costs.error + unit * size) / epsilon + unit


def rounding_floor(costs: CostFacts, size: Number, epsilon: float) -> Number:
    """Marginal error that rounding causes: what is hidden, and what half-steps cannot mend.

    Their exponents are of the size of a cost, in the type of the potentials.
    """
    unit = torch.finfo(costs.dtype).eps / 2
    return hidden_error(costs, size, epsilon) + unit * costs.magnitude / epsilon


def rounding_noise(costs: Costs, size: Numbers, epsilon: Numbers) -> Numbers:
    """The size of marginal errors that rounding makes as a rule (S,)."""
    unit, unit_of_sums = (torch.finfo(dtype).eps / 2 for dtype in (costs.dtype, costs.sum_dtype))
    return unit * (size + 2 * costs.mean_cost) / epsilon + 4 * unit_of_sums
