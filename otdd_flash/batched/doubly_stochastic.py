"""Doubly stochastic matrices from logits, for layers that mix or permute.

`otdd_flash` exports `doubly_stochastic`; users alone call it, in training loops. So a change must
keep that nothing waits for a GPU on which kernels run, that the call can be compiled and recorded,
and that the bits of a matrix do not depend on the others of its batch (`tests/batched`).
`batched.balance` computes and differentiates.
"""

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
    """Scale exp(logits / temperature) to row and column sums of 1, for autograd.

    The result is R = diag(exp(u)) exp(logits / temperature) diag(exp(v)). An iteration scales rows,
    then columns (Sinkhorn & Knopp 1967): columns then sum to 1 up to rounding, rows nearly. No
    constant is added to the sums. For logits / temperature up to +-1e4, entries of R above 2^-126
    are those of the log domain in float64 to a relative 16 u (1 + range of logits / temperature + 2
    iterations), u = 2^-24 in float32: sums of up to 128 terms, products and quotients round both
    scalings by 11 u at the most in each iteration, and iterations do not enlarge the roundings of
    earlier ones. Differentiable once by logits and by a tensor `temperature`. The bits of a result
    do not depend on the other matrices. By kernels, on a GPU, the forward and the backward pass are
    one launch each for all matrices, and nothing waits for the device.

    Args:
        logits: (..., n, n), n up to 128, float16 or bfloat16 or float32, computed in float32, or
            float64. -inf forbids a pair. A row or column of -inf, NaN or +inf are refused on a CPU;
            on a GPU such a matrix becomes NaN, and no other.
        iterations: number of iterations, 20 by default.
        tolerance: stop each matrix once its row sums deviate from 1 by no more; instead of
            `iterations`.
        max_iterations: limit of iterations with a `tolerance`.
        temperature: positive, a number or a 0-dim tensor; between 2^-126 and 2^126 unless logits
            are float64.
        gradient: `unrolled`: the exact gradient of the iterations made; the backward pass makes
            them again, and only logits are kept. `implicit`: the gradient of the limit, at the sums
            that R has; only R is kept. `none`: no gradient, and nothing is kept.
        compute: `otdd.ComputeOptions`, or only a device; by default that of the logits.

    Returns:
        R (..., n, n) of the type of the logits.

    Raises:
        InputError: matrices are not square or too large, types are not floating, both iterations
            and a tolerance are given, more than 16384 are to be differentiated one by one, or an
            argument is out of the range above; a second derivative is asked for.
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
