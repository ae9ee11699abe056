"""Isolation of public calls from PyTorch's surrounding modes.

A solve reads its iterates to decide when to stop, so it cannot be traced or transformed. A graph of
`torch.compile` breaks at the call and continues with its result; `torch.func`, forward-mode
derivatives, `torch.jit.trace` and fake tensors are refused in one sentence. Autocast, the default
dtype, the default device and inference mode do not reach into the call.

`computes` decorates every entry point that computes and cannot be traced (`otdd`, `pairwise`,
`flows.run`, `labels.measuring`, `derivatives.loss`, `batched.plans`, methods of `result`, ...), so
that surrounding modes change no number of its result; a new entry point needs it too
(`tests/test_eager.py`). Backward passes that compute from their inputs (`derivatives.autograd`) use
`own_settings` and `check_transforms`, as they may be called inside such a context although the
forward pass was outside; `samples` uses them and `untraced`, because users make samples inside such
contexts. `batched.doubly_stochastic`, `attention` and gradients of `batched.recorded`, which may be
traced by `torch.compile`, use `check_transforms`, and passes of `attention` run with
`own_settings`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from otdd_flash.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")

# Device types for which autocast may be enabled, where this package computes.
CASTING = ("cpu", "cuda", "mps")

BY_AUTOGRAD = "call it outside and take gradients by .backward() or torch.autograd.grad"
# Advice by the name of the innermost transform of torch.func.
INSTEAD = {
    "Vmap": "loop over the batch and torch.stack the results, or pass it whole where that is taken",
    "Grad": BY_AUTOGRAD,
    "Jvp": f"{BY_AUTOGRAD}; along a direction v that is (gradient * v).sum()",
    "Functionalize": "call it outside",
}


def computes(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate an entry point to run eagerly and under PyTorch's default settings.

    Raises:
        InputError: when called inside a transform or a trace that it cannot be part of.
    """
    name = function.__qualname__

    @contextmanager
    def alone(arguments: Iterable[Any]) -> Iterator[None]:
        check_transforms(name, arguments)
        _check_eager(name)
        with own_settings():
            yield

    return untraced(function, alone)


def untraced(
    function: Callable[P, R],
    within: Callable[[Iterable[Any]], AbstractContextManager[None]] = lambda _: nullcontext(),
) -> Callable[P, R]:
    """Keep `torch.compile` out of a function, without the slow import of the compiler.

    Args:
        function: to decorate.
        within: makes a context of its arguments, in which it runs.
    """
    disabled: list[Callable[P, R]] = []

    def entered(*args: P.args, **kwargs: P.kwargs) -> R:
        with within((*args, *kwargs.values())):
            return function(*args, **kwargs)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # Nothing is compiled before the compiler is imported.
        if "torch._dynamo" not in sys.modules:
            with within((*args, *kwargs.values())):
                return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(entered))  # type: ignore[no-untyped-call]
        return disabled[0](*args, **kwargs)

    # The compiler breaks its graph at calls of a function with this attribute.
    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    run._torchdynamo_disable_msg = "otdd_flash solves to a tolerance"  # type: ignore[attr-defined]
    return run


@contextmanager
def own_settings() -> Iterator[None]:
    """Turn inference mode into `no_grad`, end autocast, and make float32 and the CPU defaults."""
    with ExitStack() as settings:
        if torch.is_inference_mode_enabled():
            settings.enter_context(torch.inference_mode(False))
            settings.enter_context(torch.no_grad())
        for kind in CASTING:
            if torch.is_autocast_enabled(kind):
                settings.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_dtype() != torch.float32:
            settings.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        # Seen on a new tensor: torch.get_default_device takes ten times as long.
        if torch.empty(0).device.type != "cpu":
            settings.enter_context(torch.device("cpu"))
        yield


def check_transforms(name: str, arguments: Iterable[Any] = ()) -> None:
    """Refuse a call inside a transform or a trace; `name` is that of the function.

    Raises:
        InputError: the call is inside one, or an argument belongs to one.
    """
    transform: Any = torch._C._functorch.peek_interpreter_stack()
    if transform is not None:
        kind = transform.key().name
        raise InputError(
            f"{name} cannot run inside of torch.func transforms such as {kind.lower()}; "
            f"{INSTEAD.get(kind, BY_AUTOGRAD)}"
        )
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        raise InputError(
            f"{name} cannot be traced by torch.jit.trace, which would keep numbers of this call as "
            "constants; call it outside"
        )
    for value in arguments:
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, Tensor):
                _check_one(name, part)


def _check_eager(name: str) -> None:
    """Refuse a call while operations are recorded or tensors are fake.

    Raises:
        InputError: operations are recorded, or tensors have no numbers.
    """
    # The module is imported by whatever records operations.
    fx = sys.modules.get("torch.fx.experimental.proxy_tensor")
    # Seen on a new tensor: such modes make tensors of a class of their own.
    if type(torch.empty(0)) is not Tensor or (fx is not None and fx.get_proxy_mode() is not None):
        raise InputError(
            f"{name} computes with numbers, which tensors have not inside of FakeTensorMode, "
            "make_fx or torch.export; call it outside"
        )


def _check_one(name: str, tensor: Tensor) -> None:
    """Refuse a tensor of torch's own vmap over gradients, or with a forward-mode tangent.

    `torch.autograd.grad` makes the former with `is_grads_batched`.

    Raises:
        InputError: the tensor is one of these.
    """
    if torch._C._functorch.is_legacy_batchedtensor(tensor):
        raise InputError(
            f"{name} is not computed for a batch of cotangents; leave vectorize=True or "
            "is_grads_batched=True out"
        )
    dual = torch.autograd.forward_ad.unpack_dual(tensor)  # type: ignore[no-untyped-call]
    if dual.tangent is not None:
        raise InputError(
            f"{name} has no forward-mode derivative, and an argument is a dual tensor; "
            f"{INSTEAD['Jvp']}"
        )
