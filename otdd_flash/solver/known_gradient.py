"""A value for autograd whose derivatives were computed together with it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from otdd_flash.errors import InputError


class KnownGradient(torch.autograd.Function):
    """A value whose derivatives are known already: backward only scales them.

    `KnownGradient.apply(value, gradients, *inputs)` is a copy of `value` whose derivative by
    `inputs[k]` is `gradients[k]`, of the same shape. A value of shape (B,) is B values, each of the
    inputs at its place of the first dimension alone. Differentiable once.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        """The value; keeps the gradients, and the inputs that they belong to."""
        ctx.save_for_backward(*gradients)
        # Not saved: an input may change in place before backward, which does not read it.
        ctx.inputs = inputs
        return value.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Scale times each gradient."""
        # Scaled first: gradients in a half type may be too small without the loss scale.
        scaled = [
            (_spread(scale.detach(), gradient) * gradient).to(given)
            for gradient, given in zip(ctx.saved_tensors, ctx.inputs, strict=True)
        ]
        # Of create_graph=True.
        if torch.is_grad_enabled():
            ties = scale, *ctx.inputs
            scaled = [cast(Tensor, OnceDifferentiable.apply(part, *ties)) for part in scaled]
        return None, None, *scaled


def _spread(scale: Tensor, gradient: Tensor) -> Tensor:
    """A scale () or (B,) over all dimensions of a gradient."""
    ones = (1,) * (gradient.ndim - scale.ndim)
    return scale.to(gradient.device, gradient.dtype).reshape((*scale.shape, *ones))


class OnceDifferentiable(torch.autograd.Function):
    """A gradient that depends on some inputs by derivatives that nobody knows.

    Autograd's own `once_differentiable` is silent where only the inputs, and not the scale of the
    gradient, need a derivative: it takes the gradient for a constant then.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor) -> Tensor:
        """A copy of the gradient."""
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Refused.

        Raises:
            InputError: always.
        """
        raise InputError(
            "the loss is differentiable once, and its gradient was to be differentiated; detach "
            "the gradient, or take differences of gradients at inputs nearby"
        )
