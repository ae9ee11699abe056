"""A value for autograd whose derivatives were computed together with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from otdd_flash.eager import check_transforms, own_settings
from otdd_flash.errors import InputError

# second(along): Hessian-vector products, the changes of all gradients along directions of the
# inputs, each of the shape of its input, or None for an input held fixed.
Second = Callable[[Sequence[Tensor | None]], Sequence[Tensor]]


class KnownGradient(torch.autograd.Function):
    """A value whose derivatives are known already: backward only scales them.

    `KnownGradient.apply(value, gradients, second, *inputs)` is a copy of `value` whose derivative
    by `inputs[k]` is `gradients[k]`, of the same shape. A value of shape (B,) is B values; value k
    depends on the k-th entries of the inputs' first dimension alone. Differentiable twice where
    `second` gives second derivatives, and else once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        gradients: tuple[Tensor, ...],
        second: Second | None,
        *inputs: Tensor,
    ) -> Tensor:
        """Return the value; keep the gradients, and the inputs that they belong to."""
        ctx.save_for_backward(*gradients)
        # Not saved: an input may change in place before backward, which does not read it.
        ctx.inputs, ctx.second = inputs, second
        return value.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Return scale times each gradient."""
        # With create_graph=True.
        again = torch.is_grad_enabled()
        if again and ctx.second is not None:
            scaled = _Moving.apply(ctx.second, ctx.saved_tensors, scale, *ctx.inputs)
        else:
            with torch.no_grad():
                scaled = _scaled(scale, ctx.saved_tensors, ctx.inputs)
            if again:
                ties = scale, *ctx.inputs
                scaled = tuple(OnceDifferentiable.apply(part, *ties) for part in scaled)
        return None, None, None, *scaled


class _Moving(torch.autograd.Function):
    """Scaled gradients whose own derivatives are known."""

    @staticmethod
    def forward(
        ctx: Any, second: Second, gradients: Sequence[Tensor], scale: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """Return scale times each gradient."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(scale, *gradients)
        ctx.second, ctx.inputs = second, inputs
        return _scaled(scale, gradients, inputs)

    @staticmethod
    def backward(ctx: Any, *along: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return derivatives by the scale and by every input."""
        check_transforms("a second derivative of a loss", along)
        scale, *gradients = ctx.saved_tensors
        if all(one is None for one in along):
            return (None,) * (3 + len(ctx.inputs))
        with torch.no_grad(), own_settings():
            given = [None if one is None else one.detach() for one in along]
            pairs = [
                (one * gradient).sum()
                for one, gradient in zip(given, gradients, strict=True)
                if one is not None
            ]
            by_scale = torch.stack([pair.to(scale) for pair in pairs]).sum().reshape(scale.shape)
            changes = ctx.second(given)
            found = by_scale, *_scaled(scale, changes, ctx.inputs)
        if torch.is_grad_enabled():
            ties = scale, *ctx.inputs, *(one for one in along if one is not None)
            found = tuple(_TwiceDifferentiable.apply(part, *ties) for part in found)
        return None, None, *found


def _scaled(
    scale: Tensor, gradients: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    # Scaled before the conversion: in float16 gradients may underflow without the loss scale.
    return tuple(
        (_spread(scale, gradient) * gradient).to(given)
        for gradient, given in zip(gradients, inputs, strict=True)
    )


def _spread(scale: Tensor, gradient: Tensor) -> Tensor:
    """Reshape a scale () or (B,) to broadcast over the dimensions of a gradient."""
    ones = (1,) * (gradient.ndim - scale.ndim)
    return scale.to(gradient.device, gradient.dtype).reshape((*scale.shape, *ones))


class OnceDifferentiable(torch.autograd.Function):
    """A gradient whose own derivatives by the inputs are not available: differentiating it raises.

    Autograd's own `once_differentiable` does not raise where only the inputs, and not the scale of
    the gradient, require a derivative: it treats the gradient as a constant then.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Raise an `InputError`.

        Raises:
            InputError: always.
        """
        raise InputError(
            "the loss is differentiable once, and its gradient was to be differentiated; detach "
            "the gradient, or take differences of gradients at inputs nearby"
        )


class _TwiceDifferentiable(OnceDifferentiable):
    """A second derivative, whose own derivatives are not available."""

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Raise an `InputError`.

        Raises:
            InputError: always.
        """
        raise InputError(
            "the loss is differentiable twice, and its second derivative was to be "
            "differentiated; detach that, or in place of torch.autograd.functional.hvp call vhp, "
            "whose product is the same"
        )
