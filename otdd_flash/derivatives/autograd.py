"""Results for autograd whose derivatives do not come from its tape.

`KnownGradient` is a value whose gradients were computed together with it, for `derivatives.loss`
and `flows.functionals`. `Solved` are results whose gradients come from a linear system that the
backward pass solves, for `derivatives.potentials`, `solver.matrix.gradients` and `batched.relaxed`.
`LastDerivative` is a gradient that may not be differentiated again, here and in `labels.gaussian`.

The first backward pass of `KnownGradient` scales the gradients that it keeps and reads no input.
The others compute from the inputs: they must run outside of the caller's contexts
(`eager.own_settings`) and refuse inputs that were changed in place since (`Inputs`, and
`hessian.check_unchanged` for second derivatives; `tests/derivatives/test_changed_inputs.py`). Every
pass must raise an `InputError` for derivatives that it cannot give (`tests/test_eager.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from otdd_flash.eager import check_transforms, own_settings
from otdd_flash.errors import InputError
from otdd_flash.fingerprint import mark_of_tensors

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
                scaled = tuple(LastDerivative.apply(ONCE, part, *ties) for part in scaled)
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
            found = tuple(LastDerivative.apply(TWICE, part, *ties) for part in found)
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


class LastDerivative(torch.autograd.Function):
    """A derivative whose own derivatives by the inputs are not available: asking for one raises.

    `LastDerivative.apply(message, derivative, *inputs)` is a copy of the derivative. Autograd's own
    `once_differentiable` does not raise where only the inputs, and not the scale of a gradient,
    require a derivative: it treats the gradient as a constant then.
    """

    @staticmethod
    def forward(ctx: Any, message: str, derivative: Tensor, *inputs: Tensor) -> Tensor:
        ctx.message = message
        return derivative.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Raise an `InputError`.

        Raises:
            InputError: always.
        """
        raise InputError(ctx.message)


def once(what: str) -> str:
    """Return the message that a result is differentiable once."""
    return (
        f"{what} is differentiable once, and its gradient was to be differentiated; detach the "
        "gradient, or take differences of gradients at inputs nearby"
    )


ONCE = once("the loss")
TWICE = (
    "the loss is differentiable twice, and its second derivative was to be differentiated; detach "
    "that, or in place of torch.autograd.functional.hvp call vhp, whose product is the same"
)


class Inputs:
    """The tensors that a result depends on, marked to detect changes in place.

    Args:
        by_key: the arguments by key, numbers and None included.
        others: further arguments, which have no derivative.
    """

    def __init__(self, by_key: dict[str, Any], *others: Tensor | None) -> None:
        self.tensors = {
            key: given
            for key, given in by_key.items()
            if torch.is_grad_enabled() and isinstance(given, Tensor) and given.requires_grad
        }
        # Without a tensor that requires a gradient there is no backward pass.
        read = (*by_key.values(), *others) if self.tensors else ()
        self._read = [given for given in read if isinstance(given, Tensor)]
        self._mark = mark_of_tensors(*self._read)

    def check_unchanged(self) -> None:
        """Refuse inputs that have been changed in place.

        Raises:
            InputError: an input has been changed in place.
        """
        if mark_of_tensors(*self._read) != self._mark:
            raise InputError(
                "an input was changed in place after the result was computed, and the gradient "
                "needs it as it was; clone it before"
            )


# backward(cotangents): gradients by key.
Backward = Callable[[Sequence[Tensor]], dict[str, Tensor]]


class Solved(torch.autograd.Function):
    """Results for autograd, whose backward pass solves a linear system.

    `Solved.apply(name, backward, inputs, results, *inputs.tensors.values())` returns copies of the
    results. `backward` computes gradients from their cotangents; `name` is that of the function,
    for errors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        backward: Backward,
        inputs: Inputs,
        results: tuple[Tensor, ...],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the results; keep nothing of how they were computed."""
        ctx.name, ctx.solve, ctx.inputs = name, backward, inputs
        return tuple(result.clone() for result in results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        """Return derivatives by every input."""
        check_transforms(f"the gradient of {ctx.name}", cotangents)
        ctx.inputs.check_unchanged()
        tensors = ctx.inputs.tensors
        with torch.no_grad(), own_settings():
            found = ctx.solve([cotangent.detach() for cotangent in cotangents])
            parts = [found[key].to(given).reshape(given.shape) for key, given in tensors.items()]
        if torch.is_grad_enabled():
            ties = (*cotangents, *tensors.values())
            parts = [LastDerivative.apply(once(ctx.name), part, *ties) for part in parts]
        return None, None, None, None, *parts
