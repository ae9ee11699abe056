"""The function `otdd.sinkhorn_attention`: checks, types and shapes around `operation`.

`otdd_flash` exports `sinkhorn_attention`, and `nn.SinkhornAttention` calls it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from otdd_flash.arguments import BatchedGradient, Count, Index, Positive, takes, traced_tensor
from otdd_flash.attention.operation import attend
from otdd_flash.batched.checking import TYPES, placement
from otdd_flash.cost.compute import Compute, ComputeOptions
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
    """Compute attention with weights whose rows sum to 1 and columns to n / m, for autograd.

    With S = scale q k^T and LSE the logsumexp, first u = -LSE_j(S); an iteration is v = log(n / m)
    - LSE_i(S + u), then u = -LSE_j(S + v) (Sinkhorn & Knopp 1967; as attention Sander et al. 2022,
    Sinkformers). The output is exp(u + S + v) values: rows sum to 1 up to rounding, columns nearly
    to n / m. With `iterations=0` this is softmax attention. Nothing of size n x m is stored, and
    nothing waits for a GPU.

    Memory is linear in n + m: q, k, v, the output, and for an `unrolled` gradient
    (iterations + 1) (n + m) float32 numbers a head, of which a backward pass takes up to seven
    times as many while it runs. Differentiable once by q, k and v. Scores, sums and potentials
    are float32, or float64 of such inputs, which PyTorch computes on any device. Inside of autocast
    float32 inputs are cast, as those of `scaled_dot_product_attention` are.

    Args:
        q: queries (..., n, d), d up to 256, float16, bfloat16, float32 or float64. Each index of
            the leading dimensions, such as batch and heads, is a separate problem.
        k: keys (..., m, d), of the same type and leading dimensions.
        v: values (..., m, e), e up to 256, likewise.
        iterations: number of iterations.
        tolerance: stop each head once the relative error of its column sums is no larger; instead
            of `iterations`.
        max_iterations: limit of iterations with a `tolerance`.
        scale: factor of the scores; 1 / sqrt(d) by default.
        key_mask: (..., m) bool, leading dimensions broadcast; True leaves a key out. m then counts
            the keys that are left. A head without keys is refused on a CPU; on a GPU its output is
            NaN.
        gradient: `unrolled`: the exact gradient of the iterations made. `implicit`: the gradient of
            the limit, at the sums that columns have; for iterations that converged. `none`: no
            gradient, and nothing is kept.
        compute: `otdd.ComputeOptions`, or only a device; by default that of q.

    Returns:
        The output (..., n, e), of the type of the inputs.

    Raises:
        InputError: shapes or types that do not fit, or a head without keys; in a backward pass, a
            second derivative.

    Warns:
        NotConvergedWarning: in a backward pass on a CPU, column sums of an `implicit` gradient are
            off by over 1%, or its linear system was not solved, with its residual.
    """
    if not torch.compiler.is_compiling():
        check_transforms("sinkhorn_attention", (q, k, v))
    _check_shapes(q, k, v, key_mask)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    most = iterations if tolerance is None else max_iterations
    return _attended([q, k, v], key_mask, compute, gradient, (scale, most, tolerance))


def _attended(
    given: list[Tensor],
    key_mask: Tensor | None,
    compute: Compute | None,
    gradient: str,
    settings: tuple[float, int, float | None],
) -> Tensor:
    """Compute the output, where and in the types that arguments and modes say."""
    cast = _cast(*given)
    _check_types(given, cast)
    home, of, lead = cast[0].device, cast[0].dtype, cast[0].shape[:-2]
    device, dtype, in_triton = placement(cast[0], compute)
    heads = math.prod(lead)
    points = [each.to(device, dtype).reshape(heads, *each.shape[-2:]).contiguous() for each in cast]
    if gradient == "none":
        points = [each.detach() for each in points]
    mask = None
    if key_mask is not None:
        m = points[1].shape[1]
        mask = key_mask.to(device).expand(*lead, m).reshape(heads, m)
    unrolled = gradient == "unrolled"
    kept = torch.is_grad_enabled() and any(each.requires_grad for each in points[:2])
    if torch.compiler.is_compiling():
        # What is exported, or inside of vmap, may be differentiated although no input says so.
        kept = torch.is_grad_enabled() or torch.compiler.is_exporting()
    if dtype == torch.float64:
        if compute is not None and ComputeOptions.of(compute).backend == "triton":
            raise InputError(
                "kernels of attention compute float16, bfloat16 and float32, got float64; leave "
                "backend=auto"
            )
        in_triton = False
    out = attend(*points, mask, *settings, unrolled, unrolled and kept, in_triton)[0]
    return out.reshape(*lead, *out.shape[1:]).to(home, of)


def _cast(*points: Tensor) -> list[Tensor]:
    """Cast points as autocast does: to its type, but for float64."""
    kind = points[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return list(points)
    dtype = torch.get_autocast_dtype(kind)
    return [each if each.dtype == torch.float64 else each.to(dtype) for each in points]


def _check_types(given: list[Tensor], cast: list[Tensor]) -> None:
    """Raise an `InputError` unless points are, as they are computed, of one type on one device."""
    if cast[0].dtype not in TYPES or len({(str(each.device), each.dtype) for each in cast}) > 1:
        q, k, v = (f"{each.dtype} on {each.device}" for each in given)
        raise InputError(
            "q, k and v must be on one device and of one type, float16, bfloat16, float32 or "
            f"float64, got {q}, {k} and {v}; convert them with .to()"
        )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> None:
    """Raise an `InputError` unless shapes fit each other and the mask is one."""
    lead, points = q.shape[:-2], (q, k, v)
    if (
        min(each.ndim for each in points) < 2
        or (q.shape[-1], k.shape[-2]) != (k.shape[-1], v.shape[-2])
        # One by one: their least would be a condition on which of them it is, in a trace.
        or any(size < 1 for each in points for size in each.shape[-2:])
        or any(each.shape[-1] > WIDEST for each in points)
    ):
        raise InputError(
            "q, k and v must have shapes (..., n, d), (..., m, d) and (..., m, e), with n and m at "
            f"least 1, and d and e of 1 to {WIDEST}, got {_shapes(points)}"
        )
    if not lead == k.shape[:-2] == v.shape[:-2]:
        raise InputError(
            f"q, k and v must have equal leading dimensions, got shapes {_shapes(points)}; "
            "expand() those that several share"
        )
    if key_mask is None:
        return
    full = (*lead, k.shape[-2])
    fits = 1 <= key_mask.ndim <= len(full) and key_mask.shape[-1] == full[-1]
    if key_mask.dtype != torch.bool or not (
        fits
        and all(size in (1, of) for size, of in zip(key_mask.shape[::-1], full[::-1], strict=False))
    ):
        raise InputError(
            f"key_mask must be bool of shape {tuple(full)}, or of leading dimensions that "
            f"broadcast to that, got {key_mask.dtype} of shape {tuple(key_mask.shape)}"
        )


def _shapes(points: tuple[Tensor, ...]) -> str:
    return ", ".join(str(tuple(each.shape)) for each in points)
