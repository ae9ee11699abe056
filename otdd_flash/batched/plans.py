"""Entropic plans of many small cost matrices, each solved for by itself.

`otdd_flash` exports the entry point `sinkhorn_plans`, which users alone call, and its result
`SmallPlans`. `batched.balance` solves problems with exact marginals, `batched.relaxed` those with
relaxed ones. With exact marginals and kernels nothing may wait for a GPU before a result is read.
`bounds_of` computes intervals for values, from any potentials, in float64; they must contain the
exact value, rounding included (`tests/batched/test_plans.py`):

    <a, f> + <b, g> - epsilon log sum P <= OT_epsilon <= <C, Q> + epsilon KL(Q | a b^T),
    P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon)

with costs C, masses a and b, potentials f and g, and Q the plan with marginals a and b that
P / sum P is rounded to (Altschuler, Weed & Rigollet 2017, Near-linear time approximation algorithms
for optimal transport via Sinkhorn iteration): no row or column keeps more than its mass, and the
missing mass is filled with a product.

If a plan falls apart into groups of points, the offsets between potentials of different groups are
undetermined, and `report_open` warns. With exact marginals `SmallPlans` calls it when potentials
are read, or before the first result if masses require an implicit gradient. It makes three tests,
each only for problems that the one before leaves open:

1. No entry of the plan P is less than twice a share of the largest a_i b_j: one read of all plans.
2. A group that starts at the heaviest column takes in all rows and columns with which it exchanges
   that share of the lighter one's mass: some products of plans and flags a round.
3. `derivatives.groups` in float64 on the host, one problem after another, up to the first with
   undetermined offsets, which is reported in the words of that module.

If that share is exchanged, the rounding of the masses, in the type that is computed in, changes an
offset by at most `OPEN` epsilon (`derivatives.group_flows`). The first test shows this for every
cut between groups: if one side holds p of the rows' mass and q of the columns', p + q <= 1, twice
the share of

    p (1 - q) + q (1 - p) >= (p + q) / 2

crosses, which is the share of the lighter side's mass.

Potentials are not balanced here, unlike in `derivatives.groups`: they stay where the iterations
ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from otdd_flash.arguments import BatchedGradient, Count, MarginalError, Positive, takes
from otdd_flash.batched import checking
from otdd_flash.batched.balance import differentiable_balance
from otdd_flash.batched.chunks import parts
from otdd_flash.batched.relaxed import bounds_of_relaxed, relaxed_plans
from otdd_flash.checks import optional, tensor
from otdd_flash.cost.compute import Compute
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.formulas.marginals import Constraints
from otdd_flash.kernels.batched.problems import Balanced, Problems, computed_in, within
from otdd_flash.solver.penalties import (
    Unbalanced,
    beyond_digits,
    beyond_digits_text,
    resolve_constraints,
)

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
    unbalanced: Unbalanced | None = None,
    compute: Compute | None = None,
) -> SmallPlans:
    """Compute the entropic plans of many small cost matrices at once, for autograd.

    P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon). f and g are updated in turn, from g = 0, until
    ||P 1 - a||_1 is within the tolerance. Each problem stops by itself; its bits do not depend on
    the others. Differentiable once by costs, masses and epsilon, from plans, potentials and values.
    By kernels, on a GPU, all problems with exact marginals are one launch, and nothing waits for
    the device. On any GPU errors of contents are raised when a result is first read.

    Args:
        costs: C (B, n, m), n and m up to 128, of a floating type; float16 and bfloat16 are computed
            in float32. +inf forbids a pair.
        a: (n,) or (B, n) masses that sum to 1; by default uniform.
        b: (m,) or (B, m) masses that sum to 1; by default uniform.
        epsilon: regularisation in units of the cost, positive: a number, a 0-dim tensor or (B,).
            Between 2^-126 and 2^126 unless costs are float64.
        tolerance: marginal error to reach, that of rows: columns have their masses after each
            update.
        max_iterations: limit of iterations.
        gradient: `implicit`: the gradient of the solution, at the marginals that the plan has.
            `unrolled`: the exact gradient of the iterations made; it is NaN if exp(cost / epsilon)
            of a row or column without mass overflows, so leave these out. `none`: no gradient, and
            nothing is kept.
        sizes: (B, 2) integers, how many rows and columns each problem uses. Those beyond have mass
            0 and no influence. Default masses are uniform over those in use.
        unbalanced: rho or [rho_x, rho_y], the price of mass that is not matched, in units of the
            cost, as in `matrix_transport`. Iterations then run in PyTorch in float64, up to ten
            times slower, and gradients are `implicit`.
        compute: `otdd.ComputeOptions`, or only a device; by default that of the costs.

    Returns:
        plans (B, n, m), potentials, values with solver bounds, and how each problem ended.

    Raises:
        InputError: shapes or types that do not fit, masses that are negative or do not sum to 1,
            costs that are NaN or -inf, a row or column all of whose pairs are forbidden; in a
            backward pass, a second derivative.

    Warns:
        NotConvergedWarning: masses require an implicit gradient that is undetermined, as potentials
            are (`SmallPlans.f`); given with the first result that is read.
    """
    constraints = resolve_constraints(unbalanced, None, lambda: 1.0)
    if not constraints.exact and gradient == "unrolled":
        raise InputError(
            "with unbalanced, gradients of plans are those of the solution, and there are none of "
            'the iterations made; take gradient="implicit"'
        )
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
    masses = _masses("a", a, sizes, 0, matrices), _masses("b", b, sizes, 1, matrices)
    computed = computed_in(matrices)
    rows, columns = (part.to(computed).contiguous() for part in masses)
    if gradient == "none":
        matrices, eps = matrices.detach(), eps.detach()
        rows, columns = rows.detach(), columns.detach()
    problems = Problems(
        matrices, 1 / eps, rows, columns, sizes, max_iterations, tolerance, negated=True
    )
    if constraints.exact:
        found = differentiable_balance(
            problems, potentials=True, gradient=gradient, in_triton=in_triton
        )
    else:
        found = relaxed_plans(problems, eps, constraints)
    flaws = _flaws(matrices, (rows, columns), sizes, eps, constraints)
    home = costs.device, costs.dtype
    given = masses[0].detach().double(), masses[1].detach().double(), eps
    by_masses = rows.requires_grad or columns.requires_grad
    # Not so in `no_grad`.
    by_masses = by_masses and gradient == "implicit" and found.rows.requires_grad
    result = SmallPlans(
        problems,
        (rows, columns),
        given,
        found,
        flaws,
        home,
        # Penalties determine every offset.
        by_masses and constraints.exact,
        constraints,
    )
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


def _masses(
    name: str, given: Tensor | None, sizes: Tensor | None, side: int, matrices: Tensor
) -> Tensor:
    """Masses (size,) or (B, size) of a side, 0 beyond the sizes; uniform where none are given."""
    count, size = len(matrices), matrices.shape[1 + side]
    if given is None:
        dtype = computed_in(matrices)
        if sizes is None:
            return torch.full((size,), 1 / size, dtype=dtype, device=matrices.device)
        return within(sizes, side, size) / sizes[:, side, None].to(dtype)
    if given.shape not in ((size,), (count, size)):
        raise InputError(
            f"{name} must have shape ({size},) or ({count}, {size}), got {tuple(given.shape)}"
        )
    if not given.dtype.is_floating_point:
        raise InputError(f"{name} must be of a floating type, got {given.dtype}")
    masses = given.to(matrices.device)
    return masses if sizes is None else torch.where(within(sizes, side, size), masses, 0)


@torch.no_grad()
def _flaws(
    costs: Tensor,
    masses: tuple[Tensor, Tensor],
    sizes: Tensor | None,
    epsilon: Tensor,
    constraints: Constraints,
) -> Tensor:
    """Flags (5,) of the `FLAWS` of contents, which nothing waits for.

    A sixth is that relaxed marginals have a penalty `beyond_digits`.
    """
    closed, bad = costs == torch.inf, ~(costs > -torch.inf)
    rows, columns = (given.expand(len(costs), -1) for given in masses)
    # Partners are those with mass; all that are there need one.
    alone = (closed | (columns == 0)[:, None]).all(2), (closed | (rows == 0)[:, :, None]).all(1)
    if sizes is not None:
        there = [within(sizes, side, size) for side, size in enumerate(costs.shape[1:])]
        bad &= there[0][:, :, None] & there[1][:, None]
        alone = alone[0] & there[0], alone[1] & there[1]
    wrong_masses = [
        ~((given >= 0).all() & ((given.sum(-1, dtype=torch.float64) - 1).abs() <= SUM_SLACK).all())
        for given in masses
    ]
    # Logits are multiplied by 1 / epsilon in their type; neither may overflow or be subnormal.
    least = torch.finfo(computed_in(costs)).tiny
    wrong_epsilon = ~((epsilon >= least) & (epsilon <= 1 / least)).all()
    found = [bad.any(), alone[0].any() | alone[1].any(), wrong_epsilon, *wrong_masses]
    if not constraints.exact:
        read = costs.isfinite() & (rows > 0)[:, :, None] & (columns > 0)[:, None]
        largest = torch.where(read, costs.double(), 0).abs().flatten(1).amax(1)
        found.append(beyond_digits(constraints, torch.maximum(largest, epsilon)).any())
    return torch.stack(found)


FLAWS = (
    "costs must not be NaN or -inf; +inf forbids a pair",
    "costs forbid all pairs with mass of a row or of a column, which then cannot have its own; "
    "allow one, or leave the row or column out",
    "epsilon must be positive, and within 2^-126 and 2^126 unless costs are float64; scale costs "
    "and epsilon alike, or give float64 costs",
    "a must not be negative and must sum to 1 in each problem; divide masses by their sum",
    "b must not be negative and must sum to 1 in each problem; divide masses by their sum",
)


@dataclass(frozen=True, eq=False)
class SmallPlans:
    """The entropic plans of B problems, the result of `otdd.sinkhorn_plans`.

    Plans, potentials and values are differentiable. On a GPU invalid problems are found late: the
    first result that is read raises the `InputError`.
    """

    _problems: Problems = field(repr=False)
    # As in the problems.
    _masses: tuple[Tensor, Tensor] = field(repr=False)
    # Masses before they were rounded to the type that is computed in, detached, and epsilon, all
    # float64.
    _given: tuple[Tensor, Tensor, Tensor] = field(repr=False)
    _found: Balanced = field(repr=False)
    # Flags of the input, as `FLAWS`.
    _flaws: Tensor = field(repr=False)
    # Device and type of the costs.
    _home: tuple[torch.device, torch.dtype] = field(repr=False)
    # Whether gradients by masses, which are potentials, may be asked for.
    _by_masses: bool = field(repr=False)
    _constraints: Constraints = field(repr=False)

    def check(self) -> None:
        """Raise the `InputError` of problems that have no solution, waiting for the device."""
        _ = self._checked

    @property
    def plans(self) -> Tensor:
        """P (B, n, m) of the type of the costs; 0 beyond the sizes."""
        device, dtype = self._home
        return self._checked.matrices.to(device, dtype)

    @property
    def f(self) -> Tensor:
        """Potentials (B, n) of rows, in units of the cost, float32, or float64 of such costs.

        They are those of the last iteration. If groups of points exchange less mass than its
        rounding, the potentials of each group are determined only up to a constant; a warning says
        so once, when f or g is first read. Groups that exchange more, but less than the marginal
        error, are balanced only as far as the iterations got. `matrix_transport` balances both.

        Warns:
            NotConvergedWarning: potentials of a problem are undetermined; the first such problem is
                named.
        """
        _ = self._reported
        return self._at_home(self._shifted[0])

    @property
    def g(self) -> Tensor:
        """Potentials (B, m) of columns, as `f`, with <b, g> = 0 where both marginals are exact."""
        _ = self._reported
        return self._at_home(self._shifted[1])

    @property
    def value(self) -> Tensor:
        """OT_epsilon (B,), in units of the cost: <a, f> + <b, g> if marginals are exact."""
        return self._at_home(self._value.to(self._found.rows.dtype))

    @cached_property
    def bounds(self) -> Tensor:
        """Solver bounds (B, 2) of OT_epsilon, lower and upper, float64.

        They hold for the masses as given, before rounding to another type, divided by their sums.

        The lower bound is the dual value of f and g, the upper one the cost of a plan with exactly
        these marginals, infinite if that needs a forbidden pair. Both are evaluated in float64 and
        include rounding errors.
        """
        solved, matrices = self._checked, self._problems.matrices
        count, n, m = matrices.shape
        found = torch.empty((count, 2), dtype=torch.float64, device=matrices.device)
        a, b, epsilon = (
            given.detach().expand(count, *shape)
            for given, shape in zip(self._given, ((n,), (m,), ()), strict=True)
        )
        for part in parts(matrices):
            costs = matrices[part].detach().double()
            # Pairs without mass have no price, whatever stands there.
            costs = torch.where((a[part, :, None] > 0) & (b[part, None] > 0), costs, 0)
            f, g = (each[part].detach().double() for each in (solved.rows, solved.columns))
            if self._constraints.exact:
                found[part] = bounds_of(costs, a[part], b[part], f, g, epsilon[part])
            else:
                masses = a[part], b[part]
                found[part] = bounds_of_relaxed(
                    costs, masses, (f, g), epsilon[part], self._constraints
                )
        value = self.value.detach().double().to(found.device)
        found[:, 0] = torch.minimum(found[:, 0], value)
        found[:, 1] = torch.maximum(found[:, 1], value)
        # Potentials that are no numbers prove nothing.
        found = torch.where(found.isnan(), found.new_tensor([-torch.inf, torch.inf]), found)
        return self._at_home(found)

    @property
    def marginal_error(self) -> Tensor:
        """The larger of ||P 1 - a||_1 and ||P^T 1 - b||_1 (B,), exact up to rounding.

        It is the error of rows: columns have their masses after the last update. With relaxed
        marginals it is the larger distance between the sums of the plan and those that the
        potentials imply, over the mass that moves. Rounding of plans to float16 or bfloat16 is not
        included.
        """
        return self._at_home(self._checked.errors)

    @property
    def iterations(self) -> Tensor:
        """Updates of both potentials (B,) int32."""
        return self._at_home(self._checked.counts)

    @property
    def converged(self) -> Tensor:
        """Whether the marginal error is within the tolerance (B,)."""
        tolerance = self._problems.tolerance
        assert tolerance is not None
        return self._at_home(self._checked.errors <= tolerance)

    @cached_property
    def _checked(self) -> Balanced:
        """Return the results; raise if the input has flaws, which waits for the device."""
        sentences = *FLAWS, beyond_digits_text(self._constraints)
        # Exact marginals have no flag for the last one.
        for flaw, sentence in zip(self._flaws.tolist(), sentences, strict=False):
            if flaw:
                raise InputError(sentence)
        if self._by_masses:
            self._report("gradients by masses")
        return self._found

    @cached_property
    def _reported(self) -> None:
        """Report undetermined potentials, once for both sides."""
        _ = self._checked
        if self._constraints.exact:
            self._report("potentials")

    @computes
    def _report(self, what: str) -> None:
        """Report numbers that depend on undetermined offsets between groups of a problem."""
        report_open(what, self._problems, self._masses, self._found, self._given[2])

    @cached_property
    def _value(self) -> Tensor:
        found, (a, b), sides = self._checked, self._masses, self._constraints
        f, g = found.rows.double(), found.columns.double()
        value = (a * sides.rows.dual(f)).sum(1) + (b * sides.columns.dual(g)).sum(1)
        if sides.exact:
            # Columns have their masses, so the plan has the mass 1.
            return value
        return value + self._given[2] * (1 - found.matrices.double().sum((1, 2)))

    @cached_property
    def _shifted(self) -> tuple[Tensor, Tensor]:
        found, sizes = self._checked, self._problems.sizes
        dtype, f, g = found.rows.dtype, found.rows, found.columns
        if self._constraints.exact:
            mean = (self._masses[1] * found.columns.double()).sum(1, keepdim=True)
            f, g = (found.rows + mean).to(dtype), (found.columns - mean).to(dtype)
        if sizes is None:
            return f, g
        rows, columns = (within(sizes, side, of.shape[1]) for side, of in enumerate((f, g)))
        return torch.where(rows, f, 0), torch.where(columns, g, 0)

    def _at_home(self, values: Tensor) -> Tensor:
        return values.to(self._home[0])


TINY = torch.finfo(torch.float64).tiny
UNIT = torch.finfo(torch.float64).eps / 2


def bounds_of(costs: Tensor, a: Tensor, b: Tensor, f: Tensor, g: Tensor, epsilon: Tensor) -> Tensor:
    """Both bounds (B, 2), in units of the cost.

    Rounding: an exponent (f + g - C) / epsilon is off by 4 u of its terms, over epsilon, and so is
    each P_ij, relatively. Sums of n m terms by pairs, and by rows and columns, add n + m units at
    the most; logarithms of sums and of shares carry the same errors times epsilon. Marginals of Q
    are off by as many units of 1, each at most the price of a pair.

    Args:
        costs: C (B, n, m) float64, +inf for forbidden pairs.
        a: (B, n) float64, not negative; divided by its sum here.
        b: (B, m) float64, not negative; divided by its sum here.
        f: (B, n) float64, in units of the cost.
        g: (B, m) float64, in units of the cost.
        epsilon: (B,) float64.
    """
    a, b = (masses / masses.sum(1, keepdim=True) for masses in (a, b))
    has_a, has_b = a > 0, b > 0
    f, g = torch.where(has_a, f, 0), torch.where(has_b, g, 0)
    eps = epsilon[:, None, None]
    product = a[:, :, None] * b[:, None]
    # By logarithms: where epsilon is small, rounded potentials make exponents of any size.
    logs = torch.where(
        product > 0, product.log() + (f[:, :, None] + g[:, None] - costs) / eps, -torch.inf
    )
    of_mass = logs.flatten(1).logsumexp(1)
    plan = (logs - of_mass[:, None, None]).exp()
    lower = (a * f).sum(1) + (b * g).sum(1) - epsilon * of_mass

    plan = plan * (a / plan.sum(2).clamp_min(TINY)).clamp_max(1)[:, :, None]
    plan = plan * (b / plan.sum(1).clamp_min(TINY)).clamp_max(1)[:, None]
    u, v = (a - plan.sum(2)).clamp_min(0), (b - plan.sum(1)).clamp_min(0)
    missing = torch.maximum(u.sum(1), v.sum(1)).clamp_min(TINY)
    plan = plan + u[:, :, None] * v[:, None] / missing[:, None, None]
    logs = torch.xlogy(plan, plan / product.clamp_min(TINY))
    upper = (torch.where(plan > 0, plan * costs, 0) + eps * logs).sum((1, 2))

    finite = torch.where(costs.isfinite(), costs, 0).abs().amax((1, 2))
    largest = torch.maximum(f.abs().amax(1) + g.abs().amax(1), finite)
    prices = largest + epsilon * (1 - product.clamp_min(TINY).log().amin((1, 2)))
    slack = 8 * UNIT * (sum(costs.shape[1:]) + 16) * prices
    return torch.stack((lower - slack, upper + slack), 1)


# Units in which sums of masses are rounded, of the type's epsilon; in float64 `MASS_ROUNDING`.
UNITS = 2


@torch.no_grad()
def report_open(
    what: str,
    problems: Problems,
    masses: tuple[Tensor, Tensor],
    found: Balanced,
    epsilon: Tensor,
) -> None:
    """Warn if groups of a problem exchange too little mass for their potentials to be determined.

    Args:
        what: the name of the numbers that depend on the offsets, in the plural.
        problems: costs and sizes; nothing else of them is read.
        masses: a (n,) or (B, n), and b (m,) or (B, m), of the type that was computed in.
        found: plans, and potentials in units of the cost.
        epsilon: () or (B,) float64, in units of the cost.
    """
    # Not at the top: they import solvers, which most calls do not need.
    from otdd_flash.derivatives.group_flows import OPEN
    from otdd_flash.derivatives.groups import groups_of_matrix, report_groups

    costs, sizes, plans = problems.matrices, problems.sizes, found.matrices
    count, dtype = len(plans), masses[0].dtype
    a, b = (given.expand(count, -1) for given in masses)
    rounding = UNITS * torch.finfo(dtype).eps
    share = rounding / OPEN
    least = 2 * share * a.amax(1) * b.amax(1)
    suspects = (plans.amin((1, 2)) < least).nonzero().squeeze(1)
    # As many at once as elsewhere, of the first ones' shape.
    for some in parts(plans[: len(suspects)]):
        chosen = suspects[some]
        apart = ~_grown(plans[chosen].to(dtype), a[chosen], b[chosen], share)
        for k in chosen[apart].tolist():
            n, m = plans.shape[1:] if sizes is None else sizes[k].tolist()
            groups = groups_of_matrix(
                costs[k, :n, :m].double().cpu(),
                (a[k, :n].double().cpu(), b[k, :m].double().cpu()),
                (found.rows[k, :n].double().cpu(), found.columns[k, :m].double().cpu()),
                float(epsilon.expand(count)[k]),
                rounding,
            )
            if groups is not None:
                named = f"{what} of problem {k}" if count > 1 else what
                report_groups(groups, named, required=False)
                return


def _grown(plans: Tensor, a: Tensor, b: Tensor, share: float) -> Tensor:
    """Return whether a group takes in all rows and columns with mass, (B,)."""
    rows, columns = torch.zeros_like(a), torch.zeros_like(b)
    columns.scatter_(1, b.argmax(1, keepdim=True), 1)
    size = columns.sum()

    def joined(flow: Tensor, masses: Tensor) -> Tensor:
        held = (rows * a).sum(1, keepdim=True) + (columns * b).sum(1, keepdim=True)
        return (flow >= share * torch.minimum(masses, held)) & (masses > 0)

    while True:
        rows = torch.maximum(rows, joined((plans @ columns[:, :, None])[:, :, 0], a).to(a))
        columns = torch.maximum(columns, joined((plans.mT @ rows[:, :, None])[:, :, 0], b).to(b))
        before, size = size, rows.sum() + columns.sum()
        if bool(size == before):
            return ((rows > 0) | (a == 0)).all(1) & ((columns > 0) | (b == 0)).all(1)
