"""Checks of batches of small matrices, and the device and the type that they are brought to.

A batch is of logits (..., n, n), to be made doubly stochastic, or of costs (B, n, m) of transport
problems, each matrix a problem of its own. `doubly_stochastic` and `plans` check shapes and types
here and ask for the `placement`. `attention` asks for the `placement` too; it and `nn` read
`TYPES`. Contents of logits are checked on a CPU alone, because a check would wait for a GPU:
`balance` checks the temperature by `check_temperature`, `cpu` the logits by `check_logits`. `plans`
checks the contents of costs and masses itself.

The error bounds that `chunks` and `doubly_stochastic` state hold for up to `MOST` rows and columns,
so a larger `MOST` needs other bounds.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from otdd_flash.cost.compute import Compute, ComputeOptions, uses_triton
from otdd_flash.devices import resolve_device
from otdd_flash.errors import InputError

# The largest number of rows or columns.
MOST = 128
# Iterations that can be differentiated one by one. The backward pass of a kernel keeps the scalings
# of every k-th, with k up to 128, at most 128 of them, and computes those between again.
MOST_UNROLLED = 128**2
TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_matrices(name: str, matrices: Tensor) -> None:
    """Raise an `InputError` unless these are small matrices of a floating type."""
    if matrices.dtype not in TYPES:
        raise InputError(
            f"{name} must be float16, bfloat16, float32 or float64, got {matrices.dtype}; "
            "convert them with .float()"
        )
    if matrices.ndim < 2 or min(matrices.shape[-2:]) < 1:
        raise InputError(
            f"{name} must have at least a row and a column each, got shape {tuple(matrices.shape)}"
        )
    n, m = matrices.shape[-2:]
    if max(n, m) > MOST:
        raise InputError(
            f"{name} are {n} x {m} each, and a batch takes up to {MOST} rows and columns; larger "
            "problems are solved one at a time, by otdd.sinkhorn where they are of points"
        )


def placement(matrices: Tensor, compute: Compute | None) -> tuple[torch.device, torch.dtype, bool]:
    """Return the device and the type to bring matrices to, and whether kernels compute.

    float16 and bfloat16 are then computed in float32 (`problems.computed_in`).
    """
    if compute is None:
        device = matrices.device
        no_kernels = device.type in ("cpu", "meta")
        return device, matrices.dtype, not no_kernels and _runs_kernels(str(device))
    options = ComputeOptions.of(compute)
    device = resolve_device(options.device)
    dtype = torch.float64 if options.precision == "double" else matrices.dtype
    if options.backend == "auto":
        # Kernels of clouds have no float64, so `uses_triton` would refuse them in double precision.
        # Those of small matrices compute in float64 as well: precision has no say.
        options = ComputeOptions(options.device, "auto", "fast")
    return device, dtype, uses_triton(options, device)


@cache
def _runs_kernels(device: str) -> bool:
    """Whether a device runs kernels by default, asked once."""
    return uses_triton(ComputeOptions(device), torch.device(device))


# As `torch.compiler.assume_constant_result` does, which would import PyTorch's compiler.
_runs_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_type(name: str, value: float | Tensor) -> None:
    """Raise an `InputError` for a tensor that is not of a floating type."""
    if isinstance(value, Tensor) and not value.dtype.is_floating_point:
        raise InputError(f"{name} must be of a floating type, got {value.dtype}")


def check_temperature(scale: Tensor) -> None:
    """Raise an `InputError` unless `scale`, 1 / temperature, is positive and finite."""
    if not 0 < float(scale) < math.inf:
        raise InputError(f"temperature must be positive and finite, got {1 / float(scale):g}")


def check_logits(by_row: Tensor, by_column: Tensor) -> None:
    """Raise an `InputError` for NaN, +inf, or a row or column of -inf alone.

    Args:
        by_row: the largest logit of each row, of any shape.
        by_column: the largest of each column, less that of its row, with the opposite sign.
    """
    if not float(by_row.amax()) < math.inf:
        raise InputError("logits must not be NaN or +inf; -inf forbids a pair")
    if float(by_row.amin()) == -math.inf or float(by_column.amax()) == math.inf:
        raise InputError(
            "logits forbid all pairs of a row or of a column, which then cannot sum to 1; "
            "allow at least one"
        )
