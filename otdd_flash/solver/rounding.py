"""What rounding keeps solves from: the scale of marginal errors that it causes or hides."""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.operators.base import Operator


def magnitude(operator: Operator, f: Tensor, g: Tensor) -> Tensor:
    """<a, |f|> + <b, |g|>: a point without mass does not count, however far away it is."""
    return operator.a @ f.abs().double() + operator.b @ g.abs().double()


def hidden_error(operator: Operator, size: float, epsilon: float) -> float:
    """What a certificate will call hidden, with m = `magnitude` of the potentials.

    (2) of `certificate` to first order, for the mean error of the costs and for potentials rounded
    to their type.
    """
    unit = torch.finfo(operator.dtype).eps / 2
    return (operator.cost_error + unit * size) / epsilon + unit


def rounding_floor(operator: Operator, size: float, epsilon: float) -> float:
    """Marginal error that rounding causes, with m = `magnitude` of the potentials.

    What a certificate will call hidden, and what exponents of the size of a cost in the type of the
    potentials keep half-steps from.
    """
    unit = torch.finfo(operator.dtype).eps / 2
    cost = operator.mean_cost - 2 * min(0.0, operator.cost_range.lowest)
    return hidden_error(operator, size, epsilon) + unit * cost / epsilon
