"""Functions that are differentiated once, from Python and as operations of `torch.compile`.

A function and its gradient exist twice: as they are, for calls from Python, and as operations that
`torch.compile` records without looking inside. A call of such an operation from Python would import
PyTorch's compiler, which takes seconds. `batched.balance` and `attention.attention` are built here;
`nn` calls `has_no_numbers`.

Calls from Python must not run the recorded operation, and an operation whose arguments, results or
shapes change needs another name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from otdd_flash.arguments import FAKE_CLASS
from otdd_flash.checks import is_a
from otdd_flash.eager import check_transforms
from otdd_flash.errors import InputError

Tensors = tuple[Tensor, ...]


def differentiable_once(
    names: tuple[str, str],
    what: str,
    function: Callable[..., Tensors],
    gradients: Callable[..., Tensors],
    shapes: tuple[Callable[..., Tensors], Callable[..., Tensors]],
    keep: Callable[[Any, tuple[Any, ...], Tensors], None],
    backward: Callable[..., tuple[Any, ...]],
) -> Callable[..., Tensors]:
    """Return a function of tensors and numbers with its gradient, for any kind of call.

    Args:
        names: of both operations. PyTorch keeps compiled graphs on disk and finds them by these,
            whatever stands behind them: where arguments, results or their shapes change, both need
            other names.
        what: is differentiated, for messages.
        function: of tensors and numbers; annotations make the operation's signature.
        gradients: of the tensors and numbers that `backward` gives it, annotated as well.
        shapes: of the results of both, by empty tensors, from the same arguments.
        keep: keeps in a context, of arguments and results, what the backward pass reads.
        backward: of a context, `gradients` or its operation, and cotangents: gradients of all
            arguments.
    """
    recorded, recorded_gradients = (
        torch.library.custom_op(f"otdd_flash::{name}", mutates_args=())(run)
        for name, run in zip(names, (function, gradients), strict=True)
    )
    recorded.register_fake(shapes[0])
    recorded_gradients.register_fake(shapes[1])
    refuse, gradients_once = _refusing(what, gradients)
    recorded.register_autograd(
        lambda ctx, *cotangents: backward(ctx, recorded_gradients, *cotangents), setup_context=keep
    )
    recorded_gradients.register_autograd(refuse, setup_context=lambda ctx, inputs, output: None)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Tensors:
            # `setup_context` would cost a signature in each call.
            results = function(*given)
            keep(ctx, given, results)
            return results

        @staticmethod
        def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
            check_transforms(f"the gradient of {what}", cotangents)
            return backward(ctx, gradients_once, *cotangents)

    def call(*given: Any) -> Tensors:
        wanted = torch.is_grad_enabled() and any(
            isinstance(each, Tensor) and each.requires_grad for each in given
        )
        run = recorded if has_no_numbers(given[0]) else Function.apply if wanted else function
        results: Tensors = run(*given)
        return results

    return call


def _refusing(
    what: str, gradients: Callable[..., Tensors]
) -> tuple[Callable[..., NoReturn], Callable[..., Tensors]]:
    """Return a backward pass that refuses, and `gradients` with it for calls from Python."""

    def refuse(ctx: Any, *_: Any) -> NoReturn:
        raise InputError(
            f"gradients through {what} are taken once, and these were asked for again "
            "(create_graph=True); differentiate iterations written in PyTorch twice"
        )

    class Gradients(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, *given: Any) -> Tensors:
            return gradients(*given)

        backward = staticmethod(refuse)

    return refuse, Gradients.apply


def has_no_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor has a shape alone: in a trace, fake, or on the device meta."""
    return torch.compiler.is_compiling() or tensor.is_meta or is_a(tensor, FAKE_CLASS)
