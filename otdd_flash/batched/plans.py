"""Entropic plans of many small cost matrices, each solved for by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from otdd_flash.arguments import BatchedGradient, Count, MarginalError, Positive, takes
from otdd_flash.batched import checking
from otdd_flash.batched.balance import differentiable_balance
from otdd_flash.batched.small_plans import SmallPlans, Solved
from otdd_flash.checks import optional, tensor
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.operators.build import Compute

# How far from 1 masses may sum to, as those of a softmax in float32 do.
SUM_SLACK = 1e-4


@computes
@takes(
    costs=tensor("(B, n, m)"),
    a=optional(tensor("(n,) or (B, n)")),
    b=optional(tensor("(m,) or (B, m)")),
    sizes=optional(tensor("(B, 2)")),
)
def sinkhorn_plans(
    costs: Tensor,
    a: Tensor | None = None,
    b: Tensor | None = None,
    *,
    epsilon: Positive | Tensor,
    tolerance: MarginalError = 1e-3,
    max_iterations: Count = 1000,
    gradient: BatchedGradient = "implicit",
    sizes: Tensor | None = None,
    compute: Compute | None = None,
) -> SmallPlans:
    """P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon) of many matrices C, for autograd.

    Alternating updates of f and g, from g = 0, until |P 1 - a| sums up to the tolerance; each
    problem stops by itself and gets the same bits among any others. Differentiable once by costs,
    masses and epsilon, from plans, potentials and values. On a GPU all problems are one launch, and
    nothing waits for the device: there, what is refused below is told when a result is first read.

    Args:
        costs: C (B, n, m), n and m up to 128, of a floating type; float16 and bfloat16 are computed
            in float32. +inf forbids a pair.
        a: (n,) or (B, n) masses that sum to 1; by default uniform.
        b: (m,) or (B, m), likewise.
        epsilon: regularisation in units of the cost, positive: a number, a 0-dim tensor or (B,).
            Between 2^-126 and 2^126 unless costs are float64.
        tolerance: of the marginal error, which is that of rows: columns have their masses.
        max_iterations: at the most.
        gradient: `implicit` is that of the solution, with the marginals that the plan has;
            `unrolled` is that of the iterations made, exactly, and NaN where exp(cost / epsilon) of
            a row or column without mass is beyond the type: leave it out. `none` keeps nothing.
        sizes: (B, 2) integers, rows and columns of each problem that there are. Those beyond have
            mass 0 and no influence; masses not given are uniform over the rest.
        compute: where and how, or only the device; by default where the costs are.

    Returns:
        plans (B, n, m), potentials, values with solver bounds, and how each problem ended.

    Raises:
        InputError: shapes or types that do not fit, masses that are negative or do not sum to 1,
            costs that are NaN or -inf, a row or column all of whose pairs are forbidden; in a
            backward pass, a second derivative.
    """
    checking.check_matrices("costs", costs)
    if costs.ndim != 3:
        one = "pass costs[None] of one" if costs.ndim == 2 else "pass costs.flatten(0, -3)"
        raise InputError(f"costs must be (B, n, m), got shape {tuple(costs.shape)}; {one}")
    if gradient == "unrolled" and max_iterations > checking.MOST_UNROLLED and costs.requires_grad:
        raise InputError(
            f"{max_iterations} iterations are too many to differentiate one by one, which goes up "
            f'to {checking.MOST_UNROLLED}; take gradient="implicit"'
        )
    checking.check_type("epsilon", epsilon)
    device, dtype, in_triton = checking.placement(costs, compute)
    matrices = costs.to(device, dtype)
    count, n, m = matrices.shape
    if isinstance(epsilon, Tensor):
        if epsilon.shape not in ((), (count,)):
            raise InputError(
                f"epsilon must be a number or a tensor of shape () or ({count},), one of each "
                f"problem, got shape {tuple(epsilon.shape)}"
            )
        eps = epsilon.to(device, torch.float64)
    else:
        eps = torch.full((), epsilon, dtype=torch.float64, device=device)
    sizes = _sizes(sizes, count, n, m, device)
    masses = [
        _uniform(sizes, size, side, matrices)
        if given is None
        else _masses(name, given, count, size, sizes, side, matrices)
        for side, (name, given, size) in enumerate((("a", a, n), ("b", b, m)))
    ]
    computed = torch.promote_types(matrices.dtype, torch.float32)
    rows, columns = (part.to(computed).contiguous() for part in masses)
    given_rows, given_columns = (part.detach().double() for part in masses)
    if gradient == "none":
        matrices, eps = matrices.detach(), eps.detach()
        rows, columns = rows.detach(), columns.detach()
    plans, f, g, errors, counts = differentiable_balance(
        matrices,
        1 / eps,
        rows,
        columns,
        sizes,
        max_iterations,
        tolerance,
        True,
        True,
        gradient,
        in_triton,
    )
    flaws = _flaws(matrices.detach(), rows.detach(), columns.detach(), sizes, eps.detach())
    solved = Solved(
        matrices, rows, columns, (given_rows, given_columns), eps, sizes, tolerance, plans, f, g,
        errors.detach(), counts, flaws,
    )  # fmt: skip
    result = SmallPlans(solved, (costs.device, costs.dtype))
    if device.type == "cpu":
        result.check()
    return result


def _sizes(sizes: Tensor | None, count: int, n: int, m: int, device: torch.device) -> Tensor | None:
    if sizes is None:
        return None
    if sizes.dtype.is_floating_point or sizes.dtype == torch.bool or sizes.shape != (count, 2):
        raise InputError(
            f"sizes must be integers of shape ({count}, 2), rows and columns of each problem, got "
            f"{sizes.dtype} of shape {tuple(sizes.shape)}"
        )
    if sizes.device.type == "cpu" and count:
        most = torch.tensor([n, m])
        if bool(((sizes < 1) | (sizes > most)).any()):
            raise InputError(
                f"sizes must lie between 1 and ({n}, {m}), got {sizes.amin(0).tolist()} to "
                f"{sizes.amax(0).tolist()}"
            )
    return sizes.to(device, torch.int32).contiguous()


def _uniform(sizes: Tensor | None, size: int, side: int, matrices: Tensor) -> Tensor:
    dtype = torch.promote_types(matrices.dtype, torch.float32)
    if sizes is None:
        return torch.full((size,), 1 / size, dtype=dtype, device=matrices.device)
    there = torch.arange(size, device=matrices.device) < sizes[:, side, None]
    return there / sizes[:, side, None].to(dtype)


def _masses(
    name: str,
    given: Tensor,
    count: int,
    size: int,
    sizes: Tensor | None,
    side: int,
    matrices: Tensor,
) -> Tensor:
    if given.shape not in ((size,), (count, size)):
        raise InputError(
            f"{name} must have shape ({size},) or ({count}, {size}), got {tuple(given.shape)}"
        )
    if not given.dtype.is_floating_point:
        raise InputError(f"{name} must be of a floating type, got {given.dtype}")
    masses = given.to(matrices.device)
    if sizes is not None:
        there = torch.arange(size, device=matrices.device) < sizes[:, side, None]
        masses = torch.where(there, masses, 0)
    return masses


def _flaws(costs: Tensor, a: Tensor, b: Tensor, sizes: Tensor | None, epsilon: Tensor) -> Tensor:
    """What `small_plans.FLAWS` says of contents, as flags (5,) that nothing waits for."""
    closed, bad = costs == torch.inf, ~(costs > -torch.inf)
    rows, columns = (given.expand(len(costs), -1) for given in (a, b))
    # Partners are those with mass; all that are there need one.
    alone = (closed | (columns == 0)[:, None]).all(2), (closed | (rows == 0)[:, :, None]).all(1)
    if sizes is not None:
        sides = (torch.arange(size, device=costs.device) for size in costs.shape[1:])
        there = [side < of[:, None] for side, of in zip(sides, sizes.T, strict=True)]
        bad &= there[0][:, :, None] & there[1][:, None]
        alone = alone[0] & there[0], alone[1] & there[1]
    masses = [
        ~((given >= 0).all() & ((given.sum(-1, dtype=torch.float64) - 1).abs() <= SUM_SLACK).all())
        for given in (a, b)
    ]
    # Logits are multiplied by 1 / epsilon in their type; neither may overflow or be subnormal.
    least = torch.finfo(torch.promote_types(costs.dtype, torch.float32)).tiny
    wrong_epsilon = ~((epsilon >= least) & (epsilon <= 1 / least)).all()
    return torch.stack((bad.any(), alone[0].any() | alone[1].any(), wrong_epsilon, *masses))
