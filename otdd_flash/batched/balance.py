"""Balancing as an operation of PyTorch, for autograd, `torch.compile` and CUDA graphs.

Each of the three functions exists twice: as it is, for calls from Python, and as an operation that
`torch.compile` records without looking inside. A call of such an operation from Python would import
PyTorch's compiler, which takes seconds.

Matrices come with 1 / t (() or (B,) float64) and masses or none, as for
`otdd_flash.kernels.batched.small_balance`; the kernels never wait for a GPU,
where PyTorch's own path asks it once for each chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from otdd_flash.batched import cpu
from otdd_flash.batched.adjoint import adjoint, plan_gradient
from otdd_flash.batched.checking import check_temperature
from otdd_flash.batched.chunks import Balanced, Derivatives, Problems, computed_in
from otdd_flash.errors import InputError


def balance_now(
    matrices: Tensor,
    scale: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    sizes: Tensor | None,
    iterations: int,
    tolerance: float | None,
    negated: bool,
    potentials: bool,
    gradient: str,
    in_triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """R (B, n, m), t log phi (B, n), t log gamma (B, m), errors (B,) and iterations (B,) int32.

    The middle three are empty without `potentials`, the last without a tolerance. Without masses on
    a CPU, contents are checked here, where `torch.compile` does not look.
    """
    if a is None and not in_triton and matrices.device.type == "cpu" and matrices.numel() > 0:
        check_temperature(scale)
    problems = Problems(matrices, scale, a, b, sizes, iterations, tolerance, negated)
    if not in_triton:
        return cpu.balance(problems, potentials=potentials)
    from otdd_flash.kernels.batched import small_balance, tiny_balance

    if _is_tiny(problems, tiny_balance.MOST) and not potentials:
        balanced = tiny_balance.tiny_balance(matrices, scale, iterations)
        rows, columns, errors, counts = (matrices.new_empty(0) for _ in range(4))
        return balanced, rows, columns, errors, counts
    return small_balance.small_balance(*problems, potentials=potentials)


def _is_tiny(problems: Problems, most: int) -> bool:
    """Whether these are square matrices of so many rows, with nothing else to know of them."""
    _, n, m = problems.matrices.shape
    plain = problems.tolerance is None and problems.a is None and problems.scale.ndim == 0
    return plain and n == m <= most


def unrolled_gradient(
    matrices: Tensor,
    scale: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    sizes: Tensor | None,
    iterations: int,
    tolerance: float | None,
    negated: bool,
    counts: Tensor,
    cotangents: Tensor,
    row_cotangents: Tensor | None,
    column_cotangents: Tensor | None,
    with_scale: bool,
    in_triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Derivatives by matrices (B, n, m), 1 / t (B,), a (B, n) and b (B, m) of the iterations made.

    That by 1 / t is empty unless it is asked for, the last two are without masses.
    """
    problems = Problems(matrices, scale, a, b, sizes, iterations, tolerance, negated)
    given = counts, cotangents, row_cotangents, column_cotangents
    if not in_triton:
        return cpu.balance_backward(problems, *given, with_scale=with_scale)
    from otdd_flash.kernels.batched import tiny_balance, tiny_balance_backward
    from otdd_flash.kernels.batched.small_balance_backward import small_balance_backward

    few = iterations <= tiny_balance_backward.MOST_ITERATIONS
    if _is_tiny(problems, tiny_balance.MOST) and few:
        by_matrices, by_scale = tiny_balance_backward.tiny_balance_backward(
            matrices, scale, iterations, cotangents
        )
        n, m = matrices.shape[1:]
        by_a, by_b = by_scale.new_empty((0, n)), by_scale.new_empty((0, m))
    else:
        by_matrices, by_scale, by_a, by_b = small_balance_backward(*problems, *given)
    return by_matrices, by_scale if with_scale else by_scale.new_empty(0), by_a, by_b


def implicit_gradient(
    matrices: Tensor | None,
    scale: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    sizes: Tensor | None,
    negated: bool,
    balanced: Tensor,
    rows: Tensor,
    columns: Tensor,
    cotangents: Tensor,
    row_cotangents: Tensor | None,
    column_cotangents: Tensor | None,
    in_triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Derivatives by the same inputs, by the optimality of R with its marginals.

    By x / t it is P o (G - u 1^T - 1 v^T), by a it is the sum of (P / a) o (G - 1 v^T) along rows,
    and by b likewise. A row without mass has a potential that is the softmin of its costs, and that
    of its derivative; so has a column.
    """
    per_matrix = scale.reshape(-1, 1, 1)
    sign = -1 if negated else 1
    if a is None:
        by_logits = plan_gradient(balanced, cotangents, in_triton=in_triton)
        by_a, by_b = cotangents.new_empty(0), cotangents.new_empty(0)
    else:
        assert matrices is not None
        assert b is not None
        by_logits, by_a, by_b = _implicit_with_masses(
            sign * matrices, per_matrix, a, b, sizes, balanced, rows, columns, cotangents,
            row_cotangents, column_cotangents, in_triton,
        )  # fmt: skip
    by_matrices = by_logits * (sign * per_matrix).to(by_logits.dtype)
    by_scale = by_logits.new_empty(0)
    if matrices is not None:
        paid = torch.where(matrices.isfinite(), sign * matrices * by_logits, 0)
        by_scale = paid.sum((1, 2), dtype=computed_in(by_logits))
    return by_matrices, by_scale, by_a, by_b


def _implicit_with_masses(
    x: Tensor,
    scale: Tensor,
    a: Tensor,
    b: Tensor,
    sizes: Tensor | None,
    plans: Tensor,
    rows: Tensor,
    columns: Tensor,
    cotangents: Tensor,
    row_cotangents: Tensor | None,
    column_cotangents: Tensor | None,
    in_triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, unit = rows.dtype, scale[:, :, 0].to(rows.dtype)
    a, b = (given.to(dtype).expand_as(of) for given, of in ((a, rows), (b, columns)))
    s, t = (
        torch.zeros_like(of) if given is None else given / unit
        for given, of in ((row_cotangents, rows), (column_cotangents, columns))
    )
    logs = (x + rows[:, :, None] + columns[:, None]) * scale.to(dtype)
    # Potentials of rows and columns without mass, softmins, are those of the iteration before,
    # whose entries may overflow. With their sums made 1 they are those of the plan at hand.
    without_a, without_b = a[:, :, None] == 0, b[:, None] == 0
    logs = logs - torch.where(without_a, _log_sum(logs + b[:, None].log(), 2), 0)
    logs = logs - torch.where(without_b, _log_sum(logs + a[:, :, None].log(), 1), 0)
    per_mass = logs.exp()
    # A pair of a row and a column without mass has no say, and may overflow.
    there = ~(without_a & without_b)
    if sizes is not None:
        sides = (torch.arange(size, device=x.device) for size in x.shape[1:])
        one, other = (side < of[:, None] for side, of in zip(sides, sizes.T, strict=True))
        there &= one[:, :, None] & other[:, None]
    per_mass = torch.where(there, per_mass, 0)
    s_free, t_free = torch.where(a > 0, 0, s), torch.where(b > 0, 0, t)
    by_row = per_mass * b[:, None] * s_free[:, :, None]
    by_column = per_mass * a[:, :, None] * t_free[:, None]
    plan = plans.to(dtype)
    weighted, u, v = adjoint(
        plan,
        cotangents.to(dtype),
        s - s_free - by_column.sum(2),
        t - t_free - by_row.sum(1),
        in_triton=in_triton,
    )
    by_logits = weighted - by_row - by_column
    by_a = (per_mass * (b[:, None] * (cotangents - v[:, None]) - t_free[:, None])).sum(2)
    by_b = (per_mass * (a[:, :, None] * (cotangents - u[:, :, None]) - s_free[:, :, None])).sum(1)
    return by_logits, by_a, by_b


def _log_sum(logs: Tensor, dim: int) -> Tensor:
    """Return log sum exp along a dimension, which stays; 0 where all are forbidden."""
    found = logs.logsumexp(dim, keepdim=True)
    return torch.where(found.isfinite(), found, 0)


balance = torch.library.custom_op("otdd_flash::balance", mutates_args=())(balance_now)
balance_unrolled = torch.library.custom_op("otdd_flash::balance_unrolled", mutates_args=())(
    unrolled_gradient
)
balance_implicit = torch.library.custom_op("otdd_flash::balance_implicit", mutates_args=())(
    implicit_gradient
)


@balance.register_fake
def _(matrices: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tolerance, potentials = rest[5], rest[7]
    return Balanced.empty(matrices, stops=tolerance is not None, potentials=potentials)


@balance_unrolled.register_fake
def _(matrices: Tensor, scale: Tensor, a: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    with_scale = rest[-2]
    return Derivatives.empty(matrices, masses=a is not None, with_scale=with_scale)


@balance_implicit.register_fake
def _(matrices: Tensor | None, scale: Tensor, a: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    balanced = rest[3]
    count, n, m = balanced.shape
    dtype = computed_in(balanced)
    return (
        balanced.new_empty((count, n, m), dtype=balanced.dtype if a is None else dtype),
        balanced.new_empty((0 if matrices is None else count,), dtype=dtype),
        balanced.new_empty((0,) if a is None else (count, n), dtype=dtype),
        balanced.new_empty((0,) if a is None else (count, m), dtype=dtype),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the backward pass reads: the matrices, or R."""
    matrices, scale, a, b, sizes, iterations, tolerance, negated, _, gradient, in_triton = inputs
    balanced, rows, columns, errors, counts = output
    ctx.settings = iterations, tolerance, negated, gradient, in_triton
    ctx.mark_non_differentiable(errors, counts)
    ctx.set_materialize_grads(False)
    if gradient == "unrolled":
        ctx.save_for_backward(matrices, scale, a, b, sizes, counts, rows, columns)
    else:
        # Matrices themselves for what else than they has a gradient.
        kept = matrices if a is not None or scale.requires_grad else None
        ctx.save_for_backward(kept, scale, a, b, sizes, balanced, rows, columns)


def _gradients(
    ctx: Any,
    unrolled: Callable[..., tuple[Tensor, ...]],
    implicit: Callable[..., tuple[Tensor, ...]],
    balanced_: Tensor | None,
    rows_: Tensor | None,
    columns_: Tensor | None,
    *_: Any,
) -> tuple[Any, ...]:
    """Return the gradients of what `balance` takes, by functions that compute those of a kind."""
    iterations, tolerance, negated, gradient, in_triton = ctx.settings
    matrices, scale, a, b, sizes, kept, rows, columns = ctx.saved_tensors
    if a is None:
        rows_ = columns_ = None
    if balanced_ is None:
        of = matrices if kept.ndim == 1 else kept
        balanced_ = torch.zeros(of.shape, dtype=of.dtype, device=of.device)
    cotangents, needs = (balanced_, rows_, columns_), ctx.needs_input_grad
    if gradient == "unrolled":
        by_matrices, by_scale, by_a, by_b = unrolled(
            matrices, scale, a, b, sizes, iterations, tolerance, negated, kept, *cotangents,
            needs[1], in_triton,
        )  # fmt: skip
    else:
        by_matrices, by_scale, by_a, by_b = implicit(
            matrices, scale, a, b, sizes, negated, kept, rows, columns, *cotangents, in_triton
        )
        by_matrices = by_matrices.to(kept.dtype)
    if needs[1]:
        by_scale = by_scale.to(scale.dtype)
        for cotangent, of in ((rows_, rows), (columns_, columns)):
            if cotangent is not None:
                by_scale = by_scale - (cotangent * of).sum(1, dtype=scale.dtype) / scale
        by_scale = by_scale if scale.ndim else by_scale.sum()
    by_masses = (
        None
        if not needed
        else found.sum(0).to(given.dtype)
        if given.ndim == 1
        else found.to(given.dtype)
        for needed, found, given in ((needs[2], by_a, a), (needs[3], by_b, b))
    )
    return by_matrices, by_scale if needs[1] else None, *by_masses, *(7 * (None,))


def _refuse_second(ctx: Any, *_: Any) -> NoReturn:
    raise InputError(
        "gradients through balanced matrices are taken once, and these were asked for again "
        "(create_graph=True); differentiate iterations written in PyTorch twice"
    )


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep nothing: a second derivative is refused."""


class Balance(torch.autograd.Function):
    """`balance_now` with its gradient, for calls from Python."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, ...]:
        """Return what `balance_now` does; `setup_context` would cost a signature in each call."""
        balanced = balance_now(*given)
        _keep(ctx, given, balanced)
        return balanced

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
        """Return the gradients, once."""
        unrolled, implicit = (
            partial(_Once.apply, gradient) for gradient in (unrolled_gradient, implicit_gradient)
        )
        return _gradients(ctx, unrolled, implicit, *cotangents)


class _Once(torch.autograd.Function):
    """A function whose own gradient is refused."""

    @staticmethod
    def forward(_: Any, run: Callable[..., tuple[Tensor, ...]], *given: Any) -> tuple[Tensor, ...]:
        return run(*given)

    backward = staticmethod(_refuse_second)


def differentiable_balance(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`balance`, for autograd and `torch.compile`."""
    if torch.compiler.is_compiling():
        return balance(*given)  # type: ignore[no-any-return]
    wanted = any(isinstance(one, Tensor) and one.requires_grad for one in given)
    if not (wanted and torch.is_grad_enabled()):
        return balance_now(*given)
    return Balance.apply(*given)  # type: ignore[no-any-return]


def _recorded_backward(ctx: Any, *cotangents: Any) -> tuple[Any, ...]:
    return _gradients(ctx, balance_unrolled, balance_implicit, *cotangents)


balance.register_autograd(_recorded_backward, setup_context=_keep)
balance_unrolled.register_autograd(_refuse_second, setup_context=_keep_nothing)
balance_implicit.register_autograd(_refuse_second, setup_context=_keep_nothing)
