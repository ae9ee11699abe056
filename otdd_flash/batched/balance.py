"""Balancing as an operation of PyTorch, for autograd, `torch.compile` and CUDA graphs.

`balance` runs `balance_now` and, backward, `gradients_now`, from Python or recorded by
`torch.compile`. `batched.doubly_stochastic` and `batched.plans` call it by
`differentiable_balance`, which returns R with potentials, errors and iterations (`Balanced`).

The first arguments are the fields of `Problems`, one by one, because an operation takes tensors and
numbers. If arguments, results or their shapes change, both operations need other names: PyTorch
finds compiled graphs on disk by these (`batched.recorded`). Kernels must never wait for a GPU; only
PyTorch's own path (`batched.cpu`) does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from otdd_flash.batched import cpu
from otdd_flash.batched.adjoint import gradient_with_masses, plan_gradient
from otdd_flash.batched.checking import check_temperature
from otdd_flash.batched.recorded import differentiable_once
from otdd_flash.kernels.batched.problems import (
    Balanced,
    Cotangents,
    Derivatives,
    Problems,
    computed_in,
)


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
    a CPU, temperatures are checked here, where `torch.compile` does not look.
    """
    if a is None and not in_triton and matrices.device.type == "cpu" and matrices.numel() > 0:
        check_temperature(scale)
    problems = Problems(matrices, scale, a, b, sizes, iterations, tolerance, negated)
    found = Balanced.empty(matrices, stops=tolerance is not None, potentials=potentials)
    if not in_triton:
        cpu.balance(problems, found)
        return found
    from otdd_flash.kernels.batched import small_balance, tiny_balance

    if not potentials and tiny_balance.takes(problems):
        tiny_balance.tiny_balance(problems, found)
    else:
        small_balance.small_balance(problems, found)
    return found


def gradients_now(
    matrices: Tensor | None,
    scale: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    sizes: Tensor | None,
    iterations: int,
    tolerance: float | None,
    negated: bool,
    counts: Tensor,
    balanced: Tensor | None,
    rows: Tensor,
    columns: Tensor,
    cotangents: Tensor,
    row_cotangents: Tensor | None,
    column_cotangents: Tensor | None,
    with_scale: bool,
    in_triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Derivatives by matrices (B, n, m), 1 / t (B,), a (B, n) and b (B, m).

    Without R (`balanced`) of the iterations made, else by the optimality of R with its marginals,
    for which matrices may be None without masses and `with_scale`. The derivative by 1 / t is empty
    unless it is asked for, the last two are without masses.
    """
    given = Cotangents(cotangents, row_cotangents, column_cotangents)
    if balanced is None:
        assert matrices is not None
        problems = Problems(matrices, scale, a, b, sizes, iterations, tolerance, negated)
        found = Derivatives.empty(matrices, masses=a is not None, with_scale=with_scale)
        _unrolled_gradient(problems, counts, given, found, in_triton)
        return found
    sign, dtype = -1 if negated else 1, computed_in(balanced)
    if a is None:
        by_logits = plan_gradient(balanced, cotangents, in_triton=in_triton)
        by_a, by_b = (scale.new_empty(0, dtype=dtype) for _ in range(2))
    else:
        assert matrices is not None
        problems = Problems(matrices, scale, a, b, sizes, iterations, tolerance, negated)
        by_logits, by_a, by_b = gradient_with_masses(
            problems, balanced, rows, columns, given, in_triton=in_triton
        )
    by_scale = scale.new_empty(0, dtype=dtype)
    if with_scale:
        assert matrices is not None
        paid = torch.where(matrices.isfinite(), sign * matrices * by_logits, 0)
        by_scale = paid.sum((1, 2), dtype=dtype)
    by_matrices = by_logits * (sign * scale.reshape(-1, 1, 1)).to(by_logits.dtype)
    return by_matrices.to(balanced.dtype), by_scale, by_a, by_b


def _unrolled_gradient(
    problems: Problems, counts: Tensor, given: Cotangents, found: Derivatives, in_triton: bool
) -> None:
    if not in_triton:
        cpu.balance_backward(problems, counts, given, found)
        return
    from otdd_flash.kernels.batched import small_balance, tiny_balance_backward

    if tiny_balance_backward.takes(problems):
        tiny_balance_backward.tiny_balance_backward(problems, given, found)
    else:
        small_balance.small_balance_backward(problems, counts, given, found)


def _balanced_shapes(matrices: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tolerance, potentials = rest[5], rest[7]
    return Balanced.empty(matrices, stops=tolerance is not None, potentials=potentials)


def _gradient_shapes(
    matrices: Tensor | None, scale: Tensor, a: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    balanced, with_scale = rest[6], rest[-2]
    of: Any = matrices if balanced is None else balanced
    return Derivatives.empty(of, masses=a is not None, with_scale=with_scale)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the backward pass reads: the matrices, or R."""
    matrices, scale, a, b, sizes, iterations, tolerance, negated, _, gradient, in_triton = inputs
    balanced: Tensor | None
    balanced, rows, columns, errors, counts = output
    ctx.settings = iterations, tolerance, negated, in_triton
    ctx.mark_non_differentiable(errors, counts)
    ctx.set_materialize_grads(False)
    if gradient == "unrolled":
        balanced = None
    elif a is None and not scale.requires_grad:
        # Only gradients by masses and by the temperature read the matrices.
        matrices = None
    ctx.save_for_backward(matrices, scale, a, b, sizes, counts, balanced, rows, columns)


def _gradients(
    ctx: Any,
    run: Callable[..., tuple[Tensor, ...]],
    balanced_: Tensor | None,
    rows_: Tensor | None,
    columns_: Tensor | None,
    *_: Any,
) -> tuple[Any, ...]:
    """Return gradients of arguments of `balance`, `run` by `gradients_now` or its operation."""
    *settings, in_triton = ctx.settings
    matrices, scale, a, b, sizes, counts, balanced, rows, columns = ctx.saved_tensors
    if a is None:
        rows_ = columns_ = None
    if balanced_ is None:
        of = matrices if balanced is None else balanced
        balanced_ = torch.zeros(of.shape, dtype=of.dtype, device=of.device)
    needs = ctx.needs_input_grad
    by_matrices, by_scale, by_a, by_b = run(
        matrices, scale, a, b, sizes, *settings, counts, balanced, rows, columns,
        balanced_, rows_, columns_, needs[1], in_triton,
    )  # fmt: skip
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


balance = differentiable_once(
    ("balance_problems", "balance_problems_gradients"),
    "balanced matrices",
    balance_now,
    gradients_now,
    (_balanced_shapes, _gradient_shapes),
    _keep,
    _gradients,
)


def differentiable_balance(
    problems: Problems, *, potentials: bool, gradient: str, in_triton: bool
) -> Balanced:
    """Balance for autograd and `torch.compile`: R, and the other results as asked for.

    Args:
        problems: the matrices to balance.
        potentials: whether potentials and errors are asked for.
        gradient: `unrolled` or `implicit`, by inputs that require one.
        in_triton: whether by kernels.
    """
    return Balanced(*balance(*problems, potentials, gradient, in_triton))
