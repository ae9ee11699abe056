"""Results for autograd whose derivatives come from a linear system, solved in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from otdd_flash.derivatives.known_gradient import OnceDifferentiable
from otdd_flash.eager import check_transforms, own_settings
from otdd_flash.errors import InputError
from otdd_flash.fingerprint import mark_of_tensors


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
            parts = [_Once.apply(part, ctx.name, *ties) for part in parts]
        return None, None, None, None, *parts


class _Once(OnceDifferentiable):
    """A gradient of a `Solved` result, which cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *ties: Any) -> Tensor:
        """Return a copy of the gradient; the first of `ties` is the name of the function."""
        ctx.name = ties[0]
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """Raise an `InputError`.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"{ctx.name} is differentiable once, and its gradient was to be differentiated; detach "
            "the gradient, or take differences of gradients at inputs nearby"
        )
