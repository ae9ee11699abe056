"""Epsilon as kernels read it: a float64 in the device's memory.

What a launch takes by value is fixed when a CUDA graph records it; what its kernel loads is not. So
one recording serves all levels of epsilon. Kernels derive from it in float64 and round once, to the
bits that the host would get. `operators.triton_operator`, `operators.triton_plans` and
`operators.matrix_kernel` call `on_device`; kernels of `passes`, `points` and `matrix` take scales
and constants from here.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    """What a product of coordinates and a cost are times in a logit, float32."""
    scale = tl.full((), LOG2_E, tl.float64) / tl.load(epsilon_ptr)
    return (product_scale * scale).to(tl.float32), scale.to(tl.float32)
