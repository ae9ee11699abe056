"""Launches on the device of their tensors, and epsilon as CUDA graphs can record it.

Triton launches on the current device and reads its stream there. `on_its_device` makes a kernel's
device current while it is launched. It must decorate every kernel that is launched
(`tests/kernels/test_launch.py`).

Kernels with an argument `epsilon_ptr` read epsilon as a float64 in the device's memory. A value
that a launch is given is fixed when a CUDA graph records it; a number that its kernel loads is not.
So one recording serves all levels of epsilon. A kernel derives its scales from epsilon in float64
and rounds them once, to the bits that the host would get.

`operators.triton_operator`, `operators.triton_plans` and `operators.matrix_kernel` call
`on_device`. In `passes`, `half_step`, `symmetric_step` and `score_terms` call `load_scales`, the
first two also `log2_scale`. Kernels of `passes`, `matrix`, `batched` and `attention` use the
constants.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

K = TypeVar("K")


def on_its_device(kernel: K) -> K:
    """A kernel of `triton.jit` or `gluon.jit`, launched on the device of its first tensor.

    All tensors of a launch are on one device.
    """
    launcher: Any = kernel
    run = launcher.run

    def run_there(*args: Any, **kwargs: Any) -> Any:
        index = _index(args) if several_devices() else None
        if index is None or index == torch.cuda.current_device():
            return run(*args, **kwargs)
        with torch.cuda.device(index):
            return run(*args, **kwargs)

    launcher.run = run_there
    return kernel


@cache
def several_devices() -> bool:
    """Whether a launch may be meant for another device than the current one."""
    return torch.cuda.device_count() > 1


def _index(args: tuple[Any, ...]) -> int | None:
    """The CUDA device of the first tensor; None if that is on another kind of device."""
    for each in args:
        # A tensor descriptor has its tensor as `base`.
        tensor = each if isinstance(each, Tensor) else getattr(each, "base", None)
        if isinstance(tensor, Tensor):
            return tensor.get_device() if tensor.is_cuda else None
    return None


LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2.0))


def on_device(epsilon: float | Tensor, device: torch.device) -> Tensor:
    """Return a number as () float64 on `device`; a tensor is returned as it is, wherever it is."""
    if isinstance(epsilon, Tensor):
        return epsilon
    return torch.full((), epsilon, dtype=torch.float64, device=device)


def log2_scale(epsilon: Tensor) -> Tensor:
    """log2(e) / epsilon, () float64, for what PyTorch computes between kernels."""
    # A quotient of a Python number would be a product with the rounded inverse.
    return torch.tensor(LOG2_E.value, dtype=torch.float64) / epsilon


@triton.jit
def load_scales(epsilon_ptr, product_scale):
    """The factors of a product of coordinates and of a cost in a logit, float32."""
    scale = tl.full((), LOG2_E, tl.float64) / tl.load(epsilon_ptr)
    return (product_scale * scale).to(tl.float32), scale.to(tl.float32)
