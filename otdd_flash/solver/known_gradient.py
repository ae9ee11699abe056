"""A value for autograd whose derivatives were computed together with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class KnownGradient(torch.autograd.Function):
    """A value whose derivatives are known already: backward only scales them.

    `KnownGradient.apply(value, gradients, *inputs)` is a copy of the 0-dim `value` whose derivative
    by `inputs[k]` is `gradients[k]`, of the same shape. Differentiable once.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        """The value; keeps the gradients, and the types and devices to return them in."""
        ctx.save_for_backward(*gradients)
        ctx.kinds = [(tensor.dtype, tensor.device) for tensor in inputs]
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Scale times each gradient."""
        # Scaled first: gradients in a half type may be too small without the loss scale.
        scaled = (
            (scale.to(gradient.device, gradient.dtype) * gradient).to(dtype=dtype, device=device)
            for gradient, (dtype, device) in zip(ctx.saved_tensors, ctx.kinds, strict=True)
        )
        return None, None, *scaled
