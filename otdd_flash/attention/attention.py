"""The function `otdd.sinkhorn_attention`: checks, types and shapes around `operation`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otdd_flash.arguments import BatchedGradient, Count, Index, Positive, takes, traced_tensor
from otdd_flash.attention.operation import Attend, attend, attend_now
from otdd_flash.batched.checking import TYPES, placement
from otdd_flash.cost.compute import Compute
from otdd_flash.eager import check_transforms
from otdd_flash.errors import InputError

# The most coordinates of a query, key or value.
WIDEST = 256


@takes(
    q=traced_tensor("(..., n, d)"),
    k=traced_tensor("(..., m, d)"),
    v=traced_tensor("(..., m, e)"),
    key_mask=lambda name, value: value if value is None else traced_tensor("(..., m)")(name, value),
)
def sinkhorn_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    iterations: Index = 3,
    tolerance: Positive | None = None,
    max_iterations: Count = 100,
    scale: Positive | None = None,
    key_mask: Tensor | None = None,
    gradient: BatchedGradient = "unrolled",
    compute: Compute | None = None,
) -> Tensor:
    """Attention with weights whose rows sum to 1 and whose columns sum to n / m, for autograd.

    With S = scale q k^T, first u = -LSE_j(S); an iteration is v = log(n / m) - LSE_i(S + u), then
    u = -LSE_j(S + v) (Sinkhorn & Knopp 1967; as attention Sander et al. 2022, Sinkformers). The
    output is exp(u + S + v) values: rows sum to 1 but for rounding, columns nearly to n / m. No
    iteration is softmax attention. Nothing (n, m) is stored, and nothing waits for a GPU.

    Memory is linear in n + m: q, k, v, the output, and for an `unrolled` gradient
    iterations (n + m) float32 numbers a head. Differentiable once by q, k and v. Scores, sums and
    potentials are float32, or float64 of such inputs, which PyTorch computes on any device. Inside
    of autocast float32 inputs are cast, as those of `scaled_dot_product_attention` are.

    Args:
        q: queries (..., n, d), d up to 256, float16, bfloat16, float32 or float64. Leading
            dimensions, as batch and heads, are problems of their own.
        k: keys (..., m, d), of the same type and leading dimensions.
        v: values (..., m, e), e up to 256, likewise.
        iterations: how many are made.
        tolerance: instead of them, the largest relative error of a column sum, of each head by
            itself.
        max_iterations: with a tolerance, at the most.
        scale: of the scores; 1 / sqrt(d) by default.
        key_mask: (..., m) bool, leading dimensions broadcast; True leaves a key out. Then m counts
            those that are left. A head without keys is refused on a CPU; on a GPU its output is
            NaN.
        gradient: `unrolled` is that of the iterations made, exactly. `implicit` is that of the
            limit, with the sums that columns have; for iterations that converged. `none` keeps
            nothing.
        compute: where and how, or only the device; by default where q is.

    Returns:
        The output (..., n, e), of the type of the inputs.

    Raises:
        InputError: shapes or types that do not fit, or a head without keys; in a backward pass, a
            second derivative.

    Warns:
        NotConvergedWarning: in a backward pass on a CPU, the linear system of an `implicit`
            gradient was not solved, with its residual.
    """
    if not torch.compiler.is_compiling():
        check_transforms("sinkhorn_attention", (q, k, v))
    home, kind = q.device, q.device.type
    if torch.is_autocast_enabled(kind):
        cast = torch.get_autocast_dtype(kind)
        q, k, v = (each if each.dtype == torch.float64 else each.to(cast) for each in (q, k, v))
    _check(q, k, v, key_mask)
    given = q.dtype
    device, dtype, in_triton = placement(q, compute)
    lead, (n, d) = q.shape[:-2], q.shape[-2:]
    m, e = v.shape[-2:]
    heads = lead.numel()
    mask = None
    if key_mask is not None:
        mask = key_mask.to(device).expand(*lead, m).reshape(heads, m)
    q, k, v = (
        each.to(device, dtype).reshape(heads, *each.shape[-2:]).contiguous() for each in (q, k, v)
    )
    if gradient == "none":
        q, k, v = q.detach(), k.detach(), v.detach()
    wanted = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    arguments = (
        *(q, k, v, mask, 1 / math.sqrt(d) if scale is None else scale),
        *(iterations if tolerance is None else max_iterations, tolerance),
        *(wanted and gradient == "unrolled", in_triton and dtype != torch.float64),
    )
    out: Tensor
    if torch.compiler.is_compiling():
        out = attend(*arguments)[0]
    else:
        out = (Attend.apply if wanted else attend_now)(*arguments)[0]
    return out.reshape(*lead, n, e).to(home, given)


def _check(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """Raise an `InputError` unless types and shapes fit each other."""
    kinds = {(str(each.device), each.dtype) for each in (q, k, v)}
    if q.dtype not in TYPES or len(kinds) > 1:
        raise InputError(
            "q, k and v must be on one device and of one type, float16, bfloat16, float32 or "
            f"float64, got {q.dtype} on {q.device}, {k.dtype} on {k.device} and {v.dtype} on "
            f"{v.device}; convert them with .to()"
        )
    lead, points = q.shape[:-2], (q, k, v)
    if (
        min(each.ndim for each in points) < 2
        or not lead == k.shape[:-2] == v.shape[:-2]
        or (q.shape[-1], k.shape[-2]) != (k.shape[-1], v.shape[-2])
        or min(*q.shape[-2:], *v.shape[-2:]) < 1
        or max(q.shape[-1], v.shape[-1]) > WIDEST
    ):
        raise InputError(
            "q, k and v must have shapes (..., n, d), (..., m, d) and (..., m, e), with d and e of "
            f"1 to {WIDEST}, got {', '.join(str(tuple(each.shape)) for each in points)}"
        )
    if key_mask is not None:
        front = key_mask.shape[:-1]
        fits = len(front) <= len(lead) and all(
            size in (1, full) for size, full in zip(front[::-1], lead[::-1], strict=False)
        )
        if key_mask.dtype != torch.bool or key_mask.shape[-1:] != k.shape[-2:-1] or not fits:
            raise InputError(
                f"key_mask must be bool of shape (..., {k.shape[-2]}), got {key_mask.dtype} of "
                f"shape {tuple(key_mask.shape)}"
            )
