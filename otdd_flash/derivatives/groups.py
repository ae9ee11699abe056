"""Groups of points that exchange almost no mass, and the undetermined offsets of their potentials.

The plan P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon) does not change if a constant is added to
f and subtracted from g. If an offset t_g is added and subtracted in a group g of points alone, only
the flows between groups change,

    F_gh(t) = F_gh exp((t_g - t_h) / epsilon),    F_gh = sum of P over rows of g and columns of h,

and only these flows tie the offsets t to the masses. If they are far below the marginal error, a
converged solve leaves t wherever its iterations ended; in the linear system of the plan
(`plan_system`) they are small singular values. Plans, values and bounds do not depend on t, nor do
Hessians, derivatives of plans and maps by points and costs, or the map of points with mass: t is a
null vector of their linear systems, and their right-hand sides have no part along it. Potentials,
contributions, gradients by masses and the images of points without mass that lie between groups
depend on t. When these are asked for, and not in a solve for a value alone,

1. `plan_links` takes a small plan to its optimum, finds the groups, which for most plans are one,
   and sums the flows between them,
2. `group_flows` balances these and says which offsets remain undetermined.

In plans that are not small, slow modes within a group stay as the solve left them. A self term has
one potential, and so offsets only between groups that send all of their mass to each other.

`settle` does this for results (`result`, `solver.matrix.result`) and for functions of potentials
(`potentials`, `solver.matrix.gradients`), `settle_images` for maps (`result`, `potentials`). For
maps of new points `flows.maps` calls `settled_columns`, and `report_groups` where
`new_rows_straddle` says that their images depend on offsets. For gradients by masses `gradient` and
`solver.matrix.gradients` call `settled` during the solve and `report_groups` after it;
`contributions` reads the `Groups` that `gradient` found. `batched.plans` reports groups of small
plans, as `groups_of_matrix` finds them, and balances none. Code that depends on offsets must call
one of these: nothing else says that offsets are undetermined (`tests/derivatives/test_groups.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.sparse.csgraph import shortest_path
from torch import Tensor

from otdd_flash.cost.facts import SIDES
from otdd_flash.derivatives.group_flows import (
    MASS_ROUNDING,
    OPEN,
    Array,
    Labels,
    balanced,
    joined_to,
    mean_logs,
    most_along,
    undetermined,
)
from otdd_flash.derivatives.plan_links import (
    MOST_POLISHED,
    Entries,
    MatrixEntries,
    PointEntries,
    ScaledPlan,
    blocks_of_rows,
    by_group,
    connected,
    contracted,
    polished,
    with_softmins,
)
from otdd_flash.errors import ConvergenceError, NotConvergedWarning, warn
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.given_costs import HeldCosts, exact_blocks
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.matrix_comparison import MatrixComparison
from otdd_flash.solver.term import TransportTerm

# Two clouds of points, or a given matrix.
Compared = Comparison | MatrixComparison

# Of more groups than these, those with the largest flows are joined.
MOST_BALANCED = 128

# Offsets that the solve left off by no more, in units of epsilon, count as determined by it.
AS_SOLVED = 0.1

# A new row depends on offsets if it may send another group this many times what it sends its own.
# The gaps are those at which a row of the plan ties.
ABOVE_TIES = 2.0

# Groups and rows that a message names.
NAMED_GROUPS, NAMED_CLASSES, NAMED_ROWS, NAME_LENGTH = 4, 6, 5, 40


def masses_of(comparison: Compared) -> tuple[Tensor, Tensor]:
    """Return the masses a (n,) and b (m,)."""
    if isinstance(comparison, Comparison):
        source, target = comparison.sides("xy")
        return source.masses, target.masses
    return comparison.a, comparison.b


def _entries(comparison: Compared, name: str) -> tuple[Entries, Tensor, Tensor]:
    """Return the costs of the term of this name, and the masses a (n,) and b (m,)."""
    if isinstance(comparison, Comparison):
        cost = comparison.cost(name)
        return PointEntries(cost, comparison.compute.dtype), cost.a, cost.b
    masses = masses_of(comparison)
    if name == "xy":
        return MatrixEntries(comparison.source, comparison.dtype), *masses
    assert comparison.self_costs is not None
    side = SIDES[name][0]
    source = HeldCosts(comparison.self_costs[side].matrix)
    return MatrixEntries(source, comparison.dtype), masses[side], masses[side]


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of points whose offsets the masses do not determine.

    Attributes:
        rows: (n,) int64, the group of each row; -1 without mass.
        columns: (m,) int64, the group of each column; -1 without mass.
        gaps: (K, K) float64, upper bounds of t_g - t_h for the offsets t, in units of the cost:
            lengths of shortest paths, inf where nothing bounds it.
        exchanged: log of the largest flow between two of them; -inf if none is possible.
        advised: roughly the epsilon from which the masses determine all potentials.
        own: whether they are of a self term, where rows of one group are columns of another.
    """

    rows: Tensor
    columns: Tensor
    gaps: Array
    exchanged: float
    advised: float
    own: bool = False

    def spread(self, direction: Array) -> tuple[float, float]:
        """Return the range of <direction, t> over all offsets t (K,); the direction sums to 0."""
        low, high = (most_along(sign * direction, self.gaps) for sign in (-1, 1))
        return -low, high


def settled(
    comparison: Compared, term: TransportTerm, name: str = "xy"
) -> tuple[TransportTerm, Groups | None]:
    """Balance the offsets between groups of a term; return groups with undetermined offsets.

    Return the term itself if the plan is connected, and None if all offsets are determined. A term
    that has not converged is returned as it is, and is reported elsewhere: its plan is far from the
    optimum and shows no groups, and its marginal error is that of these potentials. Penalties of
    relaxed marginals determine every offset.

    Args:
        comparison: the costs and masses.
        term: potentials f (n,) and g (m,), and epsilon.
        name: of the term. A self term has one potential, so that an offset of rows is minus that of
            the same points as columns: only groups that send their mass to each other have one.
    """
    if not (term.converged and comparison.constraints.exact):
        return term, None
    if name != "xy" and not _may_leave_itself(comparison, name):
        return term, None
    entries, a, b = _entries(comparison, name)
    term = replace(term, f=term.f.to(a.device), g=term.g.to(a.device))
    f, g = (potential.double() / term.epsilon for potential in (term.f, term.g))
    plan = ScaledPlan(entries, f, g, a, b, term.epsilon)
    if math.prod(entries.shape) <= MOST_POLISHED:
        plan = polished(plan)
    plan, groups = _settled(plan)
    found = _moved(term, plan)
    if name == "xy":
        return found, groups
    mean = (found.f + found.g) / 2
    return replace(found, f=mean, g=mean), _of_one_potential(groups)


def settled_columns(
    comparison: Comparison, name: str, potential: Tensor, epsilon: float
) -> tuple[Tensor, Groups | None]:
    """Balance the column potential (m,) of a term, which gives new rows their conditional plans.

    Potentials stay as they are but for offsets between groups, and these too where the solve has
    determined them: rows of the plan then get the plan that it ended with. For most plans a sample
    of the rows shows one group, and nothing else is computed, see `plan_links.connected`.

    Args:
        comparison: the clouds.
        name: of the term.
        potential: g, or of a self term f, in units of the cost.
        epsilon: regularisation, in units of the cost.
    """
    if name != "xy" and not _may_leave_itself(comparison, name):
        return potential, None
    entries, a, b = _entries(comparison, name)
    given = potential.to(a.device)
    g = given.double() / epsilon
    plan = ScaledPlan(entries, torch.zeros_like(a), g, a, b, epsilon)
    # Groups do not depend on potentials of rows, which cost a pass over all pairs.
    if connected(plan) is None:
        return potential, None
    f = g
    if name == "xy":
        operator = comparison.operator(name, keep_scores=False).refined
        f = operator.softmin_rows(given, epsilon).double() / epsilon
    plan, groups = _settled(plan._replace(f=f))
    if name != "xy":
        plan, groups = plan._replace(g=(plan.f + plan.g) / 2), _of_one_potential(groups)
    if float((plan.g - g).abs().max()) <= AS_SOLVED:
        return potential, groups
    return torch.where(plan.g == g, given, (epsilon * plan.g).to(given)), groups


def groups_of_matrix(
    costs: Tensor,
    masses: tuple[Tensor, Tensor],
    potentials: tuple[Tensor, Tensor],
    epsilon: float,
    rounding: float,
) -> Groups | None:
    """Find the groups between which the offsets of a small plan are undetermined; None if none.

    Args:
        costs: C (n, m) float64.
        masses: a (n,) and b (m,) float64.
        potentials: f (n,) and g (m,) float64, in units of the cost.
        epsilon: regularisation, in units of the cost.
        rounding: relative rounding of a sum of masses, that of the type that these had.
    """
    entries = MatrixEntries(HeldCosts(costs), torch.float64)
    f, g = (potential / epsilon for potential in potentials)
    return _settled(ScaledPlan(entries, f, g, *masses, epsilon, rounding))[1]


def _of_one_potential(groups: Groups | None) -> Groups | None:
    """Return the groups of a self term that have offsets: rows that are columns of another."""
    if groups is None or torch.equal(groups.rows, groups.columns):
        return None
    return replace(groups, own=True)


def _may_leave_itself(comparison: Compared, name: str) -> bool:
    """Return whether in a self term two points may cost more by themselves than as a pair.

    C_ii + C_jj > 2 C_ij never holds for points alone, or with distances between classes that are 0
    from a class to itself: all points then keep mass, and their potentials have no offsets.
    """
    if isinstance(comparison, Comparison):
        blocks = iter([(slice(None), comparison.block(name))])
        own = comparison.block(name).diagonal()
    else:
        assert comparison.self_costs is not None
        matrix = comparison.self_costs[SIDES[name][0]].matrix
        blocks, own = exact_blocks(HeldCosts(matrix)), matrix.diagonal().double()
    return any(bool((own[rows, None] + own > 2 * costs.double()).any()) for rows, costs in blocks)


def _settled(plan: ScaledPlan) -> tuple[ScaledPlan, Groups | None]:
    """Balance the offsets between groups of a plan; return those that are undetermined."""
    linked = connected(plan)
    if linked is None:
        return plan, None
    rows, columns, _ = linked
    flows = contracted(plan, linked)
    strongest = joined_to(flows, MOST_BALANCED)
    flows = flows.joined(strongest)
    t = balanced(flows)
    t -= t[int(flows.masses.sum(1).argmax())]
    flows = flows.moved(t)
    alike = undetermined(flows)

    def of_points(labels: Labels, of: Tensor) -> Tensor:
        table = torch.from_numpy(labels[strongest]).to(of.device)
        return torch.where(of >= 0, table[of], -1)

    if t.any():
        offsets = torch.from_numpy(np.append(t, 0.0)).to(plan.f.device)
        place = np.arange(len(t))
        f = plan.f + offsets[of_points(place, rows)]
        plan = plan._replace(f=f, g=plan.g - offsets[of_points(place, columns)])
    if alike.max() == 0:
        return plan, None
    flows = flows.joined(alike)
    most = float(mean_logs(flows).max()) + math.log(2)
    # scipy takes a gap of 0 for no edge; the entropic spread may even make it negative.
    gaps = shortest_path(np.maximum(flows.gaps, np.finfo(np.float64).tiny), method="FW")
    groups = Groups(
        of_points(alike, rows),
        of_points(alike, columns),
        plan.epsilon * gaps,
        most,
        plan.epsilon * most / math.log(plan.rounding / OPEN),
    )
    return plan, groups


def _moved(term: TransportTerm, plan: ScaledPlan) -> TransportTerm:
    """Replace the term's potentials by those of the plan; equal ones keep their bits."""
    stay_f, stay_g = (
        (old.double() / term.epsilon == new) for old, new in ((term.f, plan.f), (term.g, plan.g))
    )
    if bool((stay_f | (plan.a == 0)).all() & (stay_g | (plan.b == 0)).all()):
        return term
    stay_f, stay_g = stay_f & (plan.a > 0), stay_g & (plan.b > 0)
    f, g = with_softmins(plan)
    return replace(
        term,
        f=torch.where(stay_f, term.f, (term.epsilon * f).to(term.f)),
        g=torch.where(stay_g, term.g, (term.epsilon * g).to(term.g)),
    )


def settle(
    comparison: Compared, term: TransportTerm, what: str, *, required: bool
) -> TransportTerm:
    """Balance the offsets between groups of a cross term, and report those that stay undetermined.

    Args:
        comparison: the costs and masses.
        term: potentials f (n,) and g (m,), and epsilon.
        what: the name of the numbers that depend on the offsets, in the plural.
        required: whether to raise.

    Raises:
        ConvergenceError: `required`, and offsets are undetermined.
    """
    term, groups = settled(comparison, term)
    rows = comparison.given[0] if isinstance(comparison, Comparison) else None
    report_groups(groups, what, rows, required=required)
    return term


def settle_images(comparison: Comparison, term: TransportTerm, *, required: bool) -> TransportTerm:
    """Balance the offsets of a cross term for the conditional plans of all rows.

    Those of rows with mass do not depend on offsets. Warn, or raise if `required`, where one of a
    row without mass does.

    Args:
        comparison: two clouds.
        term: potentials f (n,) and g (m,), and epsilon.
        required: whether to raise.

    Raises:
        ConvergenceError: `required`, and an image is undetermined.
    """
    absent = (masses_of(comparison)[0] == 0).nonzero().squeeze(1)
    if not len(absent):
        return term
    term, groups = settled(comparison, term)
    if groups is None:
        return term
    entries, a, b = _entries(comparison, "xy")
    f, g = (potential.double() / term.epsilon for potential in (term.f, term.g))
    plan = ScaledPlan(entries, f, g, a, b, term.epsilon)
    if straddle(plan, absent, groups, MASS_ROUNDING):
        what, rows = "images of points without mass", comparison.given[0]
        report_groups(groups, what, rows, required=required)
    return term


def new_rows_straddle(
    comparison: Comparison, f: Tensor, g: Tensor, epsilon: float, groups: Groups
) -> bool:
    """Return whether new points (n, d) send mass to columns of several groups at some offsets.

    A point at the place of a row of the plan, which at no offset sends another group more than its
    own, does not.

    Args:
        comparison: the new points, and the columns that the groups are of.
        f: (n,) softmins of g, in units of the cost.
        g: (m,) column potential.
        epsilon: regularisation, in units of the cost.
        groups: of the columns.
    """
    entries, a, b = _entries(comparison, "xy")
    plan = ScaledPlan(entries, f.double() / epsilon, g.double() / epsilon, a, b, epsilon)
    return straddle(plan, torch.arange(len(a), device=a.device), groups, ABOVE_TIES)


def straddle(plan: ScaledPlan, rows: Tensor, groups: Groups, share: float) -> bool:
    """Return whether some rows (k,) send mass to columns of several groups at some offsets.

    It is so if at an offset that `groups` allow the largest entry of another group is more than
    this share of the largest of its own.
    """
    gaps = groups.gaps / plan.epsilon
    every = (groups.columns >= 0).nonzero().squeeze(1)
    for part in blocks_of_rows(rows, len(every)):
        top, _ = by_group(plan, part, every, groups.columns[every], len(gaps))
        nearest = top.argmax(1)
        # Offsets raise the others against the nearest group by their gaps, at the most.
        others = top - top.max(1, keepdims=True) + gaps[nearest]
        np.put_along_axis(others, nearest[:, None], -np.inf, 1)
        if others.max() > math.log(share):
            return True
    return False


def report_groups(
    groups: Groups | None,
    what: str,
    rows: LabeledSamples | None = None,
    *,
    required: bool,
) -> None:
    """Warn, or raise if convergence is required, that offsets between groups are undetermined.

    Args:
        groups: from `settled`; None: nothing to report.
        what: the name of the numbers that depend on the offsets, in the plural.
        rows: n samples with their classes, if there are any.
        required: whether to raise.

    Raises:
        ConvergenceError: `required`, and offsets are undetermined.
    """
    if groups is None:
        return
    if math.isfinite(groups.exchanged):
        power, factor = divmod(groups.exchanged / math.log(10), 1)
        exchange = f"at most {10**factor:.1f}e{power:.0f} of the mass, less than its rounding"
        way_out = f"raise epsilon to about {groups.advised:.2g}"
    else:
        exchange, way_out = "no mass, as no allowed pair leads there and back", "allow more pairs"
    verb = "keep within each" if groups.own else "exchange"
    message = (
        f"{what} are not determined: {_named(groups, rows)} {verb} {exchange}, so their "
        f"potentials are fixed only together{_range_of(groups)}. Compare {what} within a group, or "
        f"{way_out}"
    )
    if required:
        raise ConvergenceError(message)
    warn(message, NotConvergedWarning)


def _named(groups: Groups, samples: LabeledSamples | None) -> str:
    """Name the groups by classes and rows, the largest last."""
    rows = groups.rows.cpu()
    sizes = torch.bincount(rows[rows >= 0], minlength=len(groups.gaps))
    order = sizes.argsort(descending=True, stable=True).tolist()
    shown, rest = order[1 : 1 + NAMED_GROUPS], order[1 + NAMED_GROUPS :]
    parts = []
    for group in shown:
        chosen = (rows == group).nonzero().squeeze(1)
        counted = f"{len(chosen)} row{'' if len(chosen) == 1 else 's'}"
        if samples is None or samples.labels is None:
            first = ", ".join(map(str, chosen[:NAMED_ROWS].tolist()))
            parts.append(f"{counted} ({first}{', ...' if len(chosen) > NAMED_ROWS else ''})")
            continue
        here = torch.unique(samples.labels.cpu()[chosen]).tolist()
        classes = [samples.class_names[c] for c in here]
        listed = ", ".join(f"{name[:NAME_LENGTH]!r}" for name in classes[:NAMED_CLASSES])
        more = ", ..." if len(classes) > NAMED_CLASSES else ""
        parts.append(f"{counted} of class {listed}{more}")
    if rest:
        parts.append(f"{len(rest)} further groups")
    others = int(sizes[order[0]])
    return f"{', '.join(parts)} and the other {others} row{'' if others == 1 else 's'}"


def _range_of(groups: Groups) -> str:
    """Return the range of the offset between the group named first and the largest, as text."""
    rows = groups.rows[groups.rows >= 0]
    largest, first = torch.bincount(rows, minlength=len(groups.gaps)).argsort(
        descending=True, stable=True
    )[:2]
    up, down = groups.gaps[first, largest], groups.gaps[largest, first]
    return (
        f"; as epsilon falls, the first may move by anything in [{-down:.4g}, {up:.4g}] against "
        "the last"
    )
