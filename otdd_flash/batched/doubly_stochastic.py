"""Doubly stochastic matrices from logits, for layers that mix or permute."""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.arguments import BatchedGradient, Count, Positive, takes, traced_tensor
from otdd_flash.batched.balance import differentiable_balance
from otdd_flash.batched.checking import (
    MOST_UNROLLED,
    check_matrices,
    check_type,
    placement,
)
from otdd_flash.cost.compute import Compute
from otdd_flash.eager import check_transforms
from otdd_flash.errors import InputError
from otdd_flash.kernels.batched.problems import Problems, computed_in

# Iterations where neither they nor a tolerance are given.
ITERATIONS = 20


@takes(logits=traced_tensor("(..., n, n)"))
def doubly_stochastic(
    logits: Tensor,
    *,
    iterations: Count | None = None,
    tolerance: Positive | None = None,
    max_iterations: Count = 1000,
    temperature: Positive | Tensor = 1.0,
    gradient: BatchedGradient = "unrolled",
    compute: Compute | None = None,
) -> Tensor:
    """R = diag(exp(u)) exp(logits / temperature) diag(exp(v)) with sums of 1, for autograd.

    An iteration scales rows, then columns (Sinkhorn & Knopp 1967), so that columns sum to 1 to
    rounding and rows nearly. Nothing is added to a sum. For logits / temperature up to +-1e4,
    entries of R above 2^-126 are those of the log domain in float64 to a relative
    16 u (1 + range of logits / temperature + 2 iterations), u = 2^-24 in float32: sums of up to 128
    terms, products and quotients round both scalings by 11 u at the most in each iteration, and
    iterations do not enlarge what earlier ones rounded. Differentiable once by logits and by a
    tensor `temperature`. A matrix gets the same bits among any others. On a GPU all matrices are
    one launch, forward and backward each, and nothing waits for the device.

    Args:
        logits: (..., n, n), n up to 128, float16 or bfloat16 or float32, computed in float32, or
            float64. -inf forbids a pair. A row or column of -inf, NaN or +inf are refused on a CPU;
            on a GPU such a matrix becomes NaN, and no other.
        iterations: how many are made, 20 by default.
        tolerance: instead of them, the largest deviation of a row sum from 1, of each matrix by
            itself.
        max_iterations: with a tolerance, at the most.
        temperature: positive, a number or a 0-dim tensor; between 2^-126 and 2^126 unless logits
            are float64.
        gradient: `unrolled` is that of the iterations made, exactly: they are made again, and only
            logits are kept. `implicit` is that of the limit, with the sums that R has; only R is
            kept. `none` keeps nothing.
        compute: where and how, or only the device; by default where the logits are.

    Returns:
        R (..., n, n) of the type of the logits.

    Raises:
        InputError: matrices that are not square or are too large, types that are not floating,
            iterations and a tolerance, or what the arguments above exclude; in a backward pass, a
            second derivative.
    """
    if not torch.compiler.is_compiling():
        check_transforms("doubly_stochastic", (logits, temperature))
    check_matrices("logits", logits)
    if logits.shape[-1] != logits.shape[-2]:
        raise InputError(
            f"logits must be square, (..., n, n), got shape {tuple(logits.shape)}; "
            "otdd.sinkhorn_plans takes rectangular costs"
        )
    if iterations is not None and tolerance is not None:
        raise InputError("iterations and tolerance exclude each other; give one of them")
    most = max_iterations if tolerance is not None else iterations or ITERATIONS
    if gradient == "unrolled" and most > MOST_UNROLLED and logits.requires_grad:
        raise InputError(
            f"{most} iterations are too many to differentiate one by one, which goes up to "
            f'{MOST_UNROLLED}; take gradient="implicit"'
        )
    if isinstance(temperature, Tensor) and temperature.ndim:
        raise InputError(
            "temperature must be a number or a 0-dim tensor, got shape "
            f"{tuple(temperature.shape)}; divide the logits by what differs between matrices"
        )
    check_type("temperature", temperature)
    device, dtype, in_triton = placement(logits, compute)
    shape = logits.shape
    matrices = logits.to(device, dtype).reshape(shape[:-2].numel(), *shape[-2:])
    # Logits are multiplied by 1 / temperature: both must be normal numbers of the type computed in.
    computed = computed_in(matrices)
    least = torch.finfo(computed).tiny
    if not isinstance(temperature, Tensor) and not least <= temperature <= 1 / least:
        raise InputError(
            f"temperature={temperature} is out of the range of {computed}; scale logits and "
            "temperature alike, or give float64 logits"
        )
    if isinstance(temperature, Tensor):
        scale = 1 / temperature.to(device, torch.float64)
    else:
        scale = torch.full((), 1 / temperature, dtype=torch.float64, device=device)
    if gradient == "none":
        matrices, scale = matrices.detach(), scale.detach()
    problems = Problems(matrices, scale, None, None, None, most, tolerance, negated=False)
    balanced = differentiable_balance(
        problems, potentials=False, gradient=gradient, in_triton=in_triton
    ).matrices
    return balanced.reshape(shape).to(logits.device, logits.dtype)
