"""Plans of many small matrices whose marginals are relaxed, in PyTorch.

With exact marginals an iteration only scales rows and columns of one fixed matrix (`batched.cpu`
and kernels). Relaxed updates are powers of such scalings, with a translation of the potentials
between them. So iterations here are of potentials, by logarithms of sums: alternating updates and
the translation of `formulas.marginals`, in float64, for all problems side by side. A problem that
has stopped keeps its potentials, so every problem gets the result that it gets alone.

Gradients are those of the solution, of

    f / rho_x + log sum_j b_j e_ij = 0,    g / rho_y + log sum_i a_i e_ij = 0,
    e_ij = exp((f_i + g_j - C_ij) / epsilon),

with costs C, masses a and b, and the penalties rho_x and rho_y of the marginals, infinite for an
exact one. A step of Newton's method leaves the potentials as they are and carries the derivatives
by costs, masses and epsilon. The equations for f are eliminated; a system of m rows is left, which
is factorized.

`batched.plans` calls `relaxed_plans` for the plans and `bounds_of_relaxed` for bounds of their
values. A change must keep that the host waits for a GPU only once in CHECKED iterations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from otdd_flash.batched.chunks import parts
from otdd_flash.derivatives.autograd import Inputs, Solved
from otdd_flash.formulas.marginals import Constraints
from otdd_flash.kernels.batched.problems import Balanced, Problems, computed_in, within

# Exponents of float64, at the most.
MOST_EXPONENT = 700.0

# Iterations between two looks at whether all problems have stopped, on a GPU.
CHECKED = 8

# Shares of a mass that no sum may have to be scaled up, and units of rounding for a term of a sum.
LEAST_SCALED, UNITS = 1e-12, 8
UNIT = torch.finfo(torch.float64).eps / 2

# Masses a (B, n) and b (B, m), float64.
Masses = tuple[Tensor, Tensor]


def relaxed_plans(problems: Problems, epsilon: Tensor, constraints: Constraints) -> Balanced:
    """Solve for plans (B, n, m), potentials in units of the cost, errors and iterations.

    Results are for autograd, by those of costs, masses and epsilon that require a gradient.

    Args:
        problems: costs, +inf for forbidden pairs, with masses; the scale is not read, and the
            tolerance is that of the marginal error over the mass that moves.
        epsilon: () or (B,).
        constraints: on the marginals.
    """
    costs, a, b = problems.matrices, problems.a, problems.b
    assert a is not None
    assert b is not None
    given = {"costs": costs, "a": a, "b": b, "epsilon": epsilon}
    inputs = Inputs(given)
    with torch.no_grad():
        cost, (a, b), eps = _in_double(given, problems.sizes)
        # An empty batch as well.
        found = [
            _solved(cost[part], (a[part], b[part]), eps[part], problems, constraints)
            for part in parts(costs) or [slice(0, 0)]
        ]
        f, g, errors, counts = (torch.cat(each) for each in zip(*found, strict=True))
        plan = _plan(cost, (a, b), f, g, eps).to(costs.dtype)
    dtype = computed_in(costs)
    results = plan, f.to(dtype), g.to(dtype)
    if inputs.tensors:
        backward = partial(_gradients, given, (f, g), problems.sizes, constraints)
        tensors = inputs.tensors.values()
        results = Solved.apply("sinkhorn_plans", backward, inputs, results, *tensors)
    return Balanced(*results, errors.to(dtype), counts)


def _in_double(given: Mapping[str, Tensor], sizes: Tensor | None) -> tuple[Tensor, Masses, Tensor]:
    """Return C (B, n, m), masses and epsilon (B, 1), float64; C is 0 where there is no pair."""
    cost, epsilon = given["costs"].double(), given["epsilon"].double()
    count, n, m = cost.shape
    if sizes is not None:
        rows, columns = within(sizes, 0, n), within(sizes, 1, m)
        cost = torch.where(rows[:, :, None] & columns[:, None], cost, 0)
    masses = given["a"].double().expand(count, n), given["b"].double().expand(count, m)
    return cost, masses, epsilon.expand(count)[:, None]


def _solved(
    cost: Tensor, masses: Masses, eps: Tensor, problems: Problems, constraints: Constraints
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return f (B, n), g (B, m), marginal errors (B,) and iterations (B,)."""
    (a, b), every = masses, CHECKED if cost.is_cuda else 1
    rows, columns, tolerance = constraints.rows, constraints.columns, problems.tolerance
    assert tolerance is not None
    logits, log_a, log_b = cost / -eps[:, :, None], a.log(), b.log()

    def softmin_rows(g: Tensor) -> Tensor:
        return -eps * torch.logsumexp(logits + (log_b + g / eps)[:, None], 2)

    def softmin_columns(f: Tensor) -> Tensor:
        return -eps * torch.logsumexp(logits + (log_a + f / eps)[:, :, None], 1)

    g = torch.zeros_like(b)
    f = torch.zeros_like(a)
    softmin = softmin_rows(g)
    errors = torch.full_like(a[:, 0], torch.inf)
    counts = torch.zeros_like(errors, dtype=torch.int32)
    active = errors > tolerance
    for count in range(problems.iterations):
        if count % every == 0 and not bool(active.any()):
            break
        new_f = rows.updated(softmin, eps)
        new_g = columns.updated(softmin_columns(new_f), eps)
        # The sums of columns are their targets before the translation.
        kept = columns.owed(b, new_g)
        t = constraints.translation(a, new_f, b, new_g)
        assert t is not None
        new_f, new_g = new_f + t, new_g - t
        found = softmin_rows(new_g)
        moved = a * torch.exp((new_f - found) / eps)
        missed = (moved - rows.owed(a, new_f)).abs().sum(1)
        missed = torch.maximum(missed, (kept - columns.owed(b, new_g)).abs().sum(1))
        error = missed / moved.sum(1)
        going = active[:, None]
        f, g = torch.where(going, new_f, f), torch.where(going, new_g, g)
        softmin = torch.where(going, found, softmin)
        errors, counts = torch.where(active, error, errors), counts + active.to(torch.int32)
        # One that is no number stops, and has not converged.
        active = active & (errors > tolerance)
    return f, g, errors, counts


def _plan(cost: Tensor, masses: Masses, f: Tensor, g: Tensor, eps: Tensor) -> Tensor:
    """Return P (B, n, m)."""
    a, b = masses
    product = a[:, :, None] * b[:, None]
    # The exponential of two points without mass may overflow.
    return product * torch.exp(_exponents(cost, f, g, eps).clamp_max(MOST_EXPONENT))


def _exponents(cost: Tensor, f: Tensor, g: Tensor, eps: Tensor) -> Tensor:
    """Return (f_i + g_j - C_ij) / epsilon (B, n, m), -inf of forbidden pairs without a slope."""
    allowed = cost < torch.inf
    found = (f[:, :, None] + g[:, None] - torch.where(allowed, cost, 0)) / eps[:, :, None]
    return torch.where(allowed, found, -torch.inf)


def _gradients(
    given: Mapping[str, Tensor],
    potentials: tuple[Tensor, Tensor],
    sizes: Tensor | None,
    constraints: Constraints,
    cotangents: Sequence[Tensor],
) -> dict[str, Tensor]:
    """Return gradients by key, from the potentials.

    Args:
        given: `costs`, `a`, `b` and `epsilon`.
        potentials: f (B, n) and g (B, m), float64.
        sizes: (B, 2), rows and columns that there are; None for all.
        constraints: on the marginals.
        cotangents: of plans and of both potentials.
    """
    with torch.enable_grad():
        leaves = {key: one.detach().requires_grad_(one.requires_grad) for key, one in given.items()}
        cost, masses, eps = _in_double(leaves, sizes)
        f, g = _moved(potentials, constraints, cost, masses, eps)
        solved = _plan(cost, masses, f, g, eps), f, g
        pairs = zip(solved, cotangents, strict=True)
        total = sum((one * along.double()).sum() for one, along in pairs)
        wanted = {key: leaf for key, leaf in leaves.items() if leaf.requires_grad}
        found = torch.autograd.grad(torch.as_tensor(total), list(wanted.values()))
    return dict(zip(wanted, found, strict=True))


def _moved(
    potentials: tuple[Tensor, Tensor],
    sides: Constraints,
    cost: Tensor,
    masses: Masses,
    eps: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return f (B, n) and g (B, m) as they are, with derivatives of the solution."""
    (f, g), (a, b) = potentials, masses
    exponents = _exponents(cost, f, g, eps)
    by_rows, log_q = _weighted(exponents, b[:, None], 2)
    by_columns, log_p = _weighted(exponents, a[:, :, None], 1)
    left, right = f * sides.rows.softness + log_q, g * sides.columns.softness + log_p
    held = eps.detach()
    # Times epsilon: alpha df + Q dg = left, R^T df + beta dg = right, Q and R of sums 1.
    alpha, beta = 1 + held * sides.rows.softness, 1 + held * sides.columns.softness
    matrix = by_columns.mT @ by_rows / -alpha[:, :, None]
    matrix.diagonal(dim1=1, dim2=2).add_(beta)
    left, right = held * left, held * right
    taken = right - (by_columns.mT @ (left / alpha)[:, :, None])[:, :, 0]
    dg = torch.linalg.solve(matrix, taken)
    df = (left - (by_rows @ dg[:, :, None])[:, :, 0]) / alpha
    return f - df + df.detach(), g - dg + dg.detach()


def _weighted(exponents: Tensor, masses: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return shares of sum m e^x along a dimension, detached, and its logarithm."""
    top = exponents.detach().masked_fill(masses.detach() == 0, -torch.inf).amax(dim, keepdim=True)
    # Exponentials of points without mass may overflow, and are multiplied by 0.
    weights = torch.exp((exponents - top).clamp_max(MOST_EXPONENT))
    sums = (weights * masses).sum(dim, keepdim=True)
    return (weights * masses / sums).detach(), (sums.log() + top).squeeze(dim)


def bounds_of_relaxed(
    costs: Tensor,
    masses: Masses,
    potentials: tuple[Tensor, Tensor],
    epsilon: Tensor,
    constraints: Constraints,
) -> Tensor:
    """Both bounds (B, 2) of values, in units of the cost: the dual and the primal of the plan.

    Rounding as in `plans.bounds_of`: an entry of the plan is off by some units of its exponent's
    terms over epsilon, and phi(f) by those of f times e^(-f / rho).

    Args:
        costs: C (B, n, m) float64, +inf for forbidden pairs.
        masses: a (B, n) and b (B, m) float64; divided by their sums here.
        potentials: f (B, n) and g (B, m) float64, in units of the cost.
        epsilon: (B,) float64.
        constraints: on the marginals.
    """
    a, b = (part / part.sum(1, keepdim=True) for part in masses)
    # All in units of epsilon, which is 1 then.
    eps = epsilon[:, None]
    costs = costs / eps[:, :, None]
    rows, columns = constraints.rows, constraints.columns
    constraints = Constraints(rows.at(rows.rho / eps), columns.at(columns.rho / eps))
    f, g = (torch.where(m > 0, p / eps, 0) for m, p in zip((a, b), potentials, strict=True))
    plan = _plan(costs, (a, b), f, g, torch.ones_like(eps))
    sums = plan.sum(2), plan.sum(1)
    mass = sums[0].sum(1)
    sides = (constraints.rows, a, f), (constraints.columns, b, g)
    dual, size = 1 - mass, 1 + mass
    for side, of_side, potential in sides:
        part = side.dual(potential)
        dual = dual + (of_side * part).sum(1)
        owed = side.owed(of_side, potential)
        size = size + (of_side * part.abs() + (owed + of_side) * potential.abs()).sum(1)
    finite = torch.where(costs.isfinite(), costs, 0).abs().amax((1, 2))
    largest = f.abs().amax(1) + g.abs().amax(1) + finite
    units = UNITS * UNIT * (sum(costs.shape[1:]) + 16)
    relative = float((units * (1 + largest)).max())
    upper, most = constraints.primal((a, b), sums, (f, g), 1.0, relative, LEAST_SCALED)
    size = size + largest * torch.maximum(mass, most[0].sum(1))
    return torch.stack((dual - units * size, upper + units * size), 1) * eps
