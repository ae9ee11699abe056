"""How much of a dataset distance every row of the source contributes, to first order.

    s_i = (g_i - sum_j a_j g_j) / (1 - a_i),    g = dS / da

with S the distance and a the masses of the source. Without row i the other masses grow by the
factor 1 / (1 - a_i), and S changes by -a_i s_i to first order: a row with s_i > 0 keeps the
datasets apart. For equal masses and without debiasing it is the calibrated gradient of Just et al.
2023, LAVA: data valuation without pre-specified learning algorithms. At epsilon 0, where S has
kinks, the contribution of a row is its mean cost under the plan.

Masses act in two ways. With fixed class distances W, g is f_xy - f_xx, of the source's potentials
in the cross and in the self term, or f_xy without debiasing; with marginals relaxed by a fixed rho,
phi(f) of `formulas.marginals` takes the place of each f. In addition, for W by `gaussian` and
`means`, the moments of a row's class move with its mass, and W with them,

    m = sum_i w_i x_i,  cov = sum_i w_i (x_i - m)(x_i - m)^T / z,  w_i = a_i / sum of the class

where z = 1, or z = 1 - sum w_i^2, which is differentiated too, for unbiased covariances.

`DistanceResult.contributions` (`result`) computes them and `commands.compare` reports them; the
gradient itself is `derivatives.gradient`. A metric of class distances whose values move with the
masses must be treated in `_tables`, or its contributions count W as fixed, as they do for all other
metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.cost.ground import NO_OFFSET
from otdd_flash.cost.points import mass_per_class
from otdd_flash.derivatives.gradient import DivergenceGradient, Needs
from otdd_flash.derivatives.groups import Groups
from otdd_flash.errors import InputError
from otdd_flash.labels.gaussian import diagonal_gaussian_table, gaussian_table, mean_table
from otdd_flash.labels.pairs import ClassCloud, all_pairs, symmetric_table
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.label_costs import has_sets
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.term import ExactTerm

# Largest difference, relative to the largest entry, between the given class distances and those of
# these rows: they may have been measured elsewhere, or read from a file.
SAME_TABLE = 1e-6

# A class with more than this share of the mass has all of it, up to rounding.
ALL = 1 - 1e-12


class Contributions(NamedTuple):
    """The contributions of the source's rows to a distance.

    Attributes:
        values: s (n,) float64 on the CPU, in units of the cost; NaN for rows without mass. At
            epsilon 0, which has no gradient, the mean cost of each row under the plan, NaN for rows
            of which it has nothing: those of less than about 1e-16 of the mass.
        through_classes: whether class distances moved with the masses; False if they were fixed.
        slopes: (2, V) float64 on the CPU, least and most s_c of each source class for epsilon to 0,
            with the potentials of each group as they are: of all offsets that are equally good in
            the cross term and in the source's self term. Both are equal if the masses determine
            the potentials, NaN for classes with all or none of the mass, at epsilon 0 but for
            rounding, and for a slope that was not found there, which a warning says. Rows with
            several labels count as one class.
    """

    values: Tensor
    through_classes: bool
    slopes: Tensor


def contributions_of(
    comparison: Comparison, divergence: Divergence, method: str, *, required: bool
) -> Contributions:
    """Compute the contributions of all rows of the source.

    Args:
        comparison: both datasets and the class distances that were used, on the device.
        divergence: the solved terms.
        method: the method of class distances; those of `gaussian` and `means` move with the masses,
            unless the table is of other rows or rows have several labels.
        required: whether potentials that the masses do not determine are an error.

    Raises:
        ConvergenceError: potentials are not determined, and `required`.

    Warns:
        NotConvergedWarning: potentials are not determined, and not `required`.
    """
    # With several labels a row stands in the moments of all its classes.
    moved = bool(_tables(method)) and not has_sets(comparison.given)
    needs: Needs = frozenset({"a", "classes"}) if moved else frozenset({"a"})
    gradient = DivergenceGradient(comparison, needs)
    for name, term in divergence.terms.items():
        operator = comparison.operator(name)
        f, g = (potential.to(comparison.device) for potential in (term.f, term.g))
        gradient(name, operator, replace(term, f=f, g=g))
    gradient.report("contributions", required=required)
    found = gradient.total["a"]
    through = _through_classes(comparison, gradient.total["classes"], method) if moved else None
    if through is not None:
        found = found + through.to(found.device)
    masses = comparison.given[0].masses.to(found.device)
    found = torch.where(masses > 0, found, 0.0)
    values = (found - masses @ found) / (1 - masses)
    values[masses == 0] = torch.nan
    slopes = _slopes(comparison.given[0], found.cpu(), gradient.groups)
    return Contributions(values.cpu(), through is not None, slopes)


def exact_contributions(
    comparison: Comparison, divergence: Divergence, term: ExactTerm
) -> Contributions:
    """Compute what the rows of the source pay, and the slopes of its classes, at epsilon 0.

    Args:
        comparison: of the distance.
        divergence: its terms.
        term: the cross term among them.

    Raises:
        InputError: the term is not proven optimal, or the distance has other terms than it.
    """
    others = [each for name, each in divergence.terms.items() if name != "xy"]
    if any(each.bounds != (0.0, 0.0) for each in others) or (
        not others and divergence.offset != NO_OFFSET
    ):
        raise InputError(
            "contributions at epsilon 0 are those of the cross term, and this distance has other "
            "terms that move with the masses, of ground=inner or of class distances within a class "
            "or below 0; take ground=sqeuclidean or cosine, and debias=false, or a positive epsilon"
        )
    # It imports SciPy's graphs and POT's simplex.
    from otdd_flash.solver.exact.slopes import mass_rounding, slopes_of

    source = comparison.given[0]
    of_classes, labels = _class_masses(source)
    masses, count = source.masses.cpu(), len(of_classes)
    least = mass_rounding(len(term.f) + len(term.g))
    rest = torch.where((of_classes > least) & (of_classes < ALL), 1 - of_classes, torch.nan)
    within = torch.nn.functional.one_hot(labels, count).double()
    directions = masses[:, None] * (within / of_classes - 1) / rest
    found = slopes_of(comparison, term, directions)
    return Contributions(found.row_costs, False, found.slopes)


def _class_masses(source: LabeledSamples) -> tuple[Tensor, Tensor]:
    """Return the masses (V,) of the classes, and the labels (n,), on the CPU."""
    masses, count = source.masses.cpu(), 1
    labels = torch.zeros(len(masses), dtype=torch.int64)
    # Rows with several labels count as one class, of which there is no slope.
    if source.labels is not None and source.label_sets is None:
        labels, count = source.labels.cpu(), source.class_total
    return mass_per_class(masses, labels, count), labels


def _slopes(
    source: LabeledSamples, gradient: Tensor, groups: Mapping[str, Groups | None]
) -> Tensor:
    """Return the least and the most s_c of each class, (2, V).

    A class c as a whole has s_c = (sum of a_i g_i / a_c over its rows - sum_j a_j g_j) / (1 - a_c),
    at the class's mass a_c: the slope of S as c grows and all other classes shrink in proportion.
    If groups of points exchange almost no mass, f_xy is determined within groups alone
    (`derivatives.groups`), and f_xx in a self term whose points leave themselves. As epsilon falls
    S then has a kink there as a function of the masses. Its slopes to both sides are the ends where
    one of the terms has groups: OT(x, y) is convex, and -OT(x, x) / 2 concave. Where both have,
    they lie between the least and the most s_c over all equally good offsets, which are returned.
    """
    of_classes, labels = _class_masses(source)
    masses, count = source.masses.cpu(), len(of_classes)
    rest = torch.where((of_classes > 0) & (of_classes < ALL), 1 - of_classes, torch.nan)
    sums = mass_per_class(masses * gradient, labels, count)
    slopes = ((sums / of_classes - masses @ gradient) / rest).repeat(2, 1)

    def per_offset(of_points: Tensor, total: int) -> Tensor:
        """Return the derivatives (V, K) of s_c by the offsets of potentials of groups (n,)."""
        within = of_points >= 0
        place = (labels * total + of_points)[within]
        shared = mass_per_class(masses[within], place, count * total).reshape(count, total)
        return (shared / of_classes[:, None] - shared.sum(0)) / rest[:, None]

    for name in ("xy", "xx"):
        if (found := groups.get(name)) is None:
            continue
        total = len(found.gaps)
        directions = per_offset(found.rows.cpu(), total)
        if name == "xx":
            # g has -f_xx, the mean of both sides' potentials, of which columns move by -t.
            directions = (per_offset(found.columns.cpu(), total) - directions) / 2
        for c in rest.isfinite().nonzero().squeeze(1).tolist():
            slopes[:, c] += torch.tensor(found.spread(directions[c].numpy()), dtype=slopes.dtype)
    return slopes


@torch.enable_grad()
def _through_classes(comparison: Comparison, by_table: Tensor, method: str) -> Tensor | None:
    """Sum over W of dS / dW times dW / da, (n,); None if W is fixed."""
    source, target = comparison.transformed
    if source.labels is None or target.labels is None:
        return None
    masses = source.masses.detach().requires_grad_(True)
    clouds = _clouds(source, masses) + _clouds(target, target.masses)
    pairs = all_pairs(len(clouds))
    scale = float(comparison.classes.full.abs().max())
    for measured in _tables(method):
        values = measured(clouds, pairs)
        table = symmetric_table(values, pairs, len(clouds)).to(by_table.device)
        if float((table.detach() - comparison.classes.full).abs().max()) > SAME_TABLE * scale:
            # The table is of other rows, as with labels.full, or of other settings.
            continue
        (found,) = torch.autograd.grad((table * by_table).sum(), masses)
        return found
    return None


def _tables(method: str) -> list[Callable[[list[ClassCloud], Tensor], Tensor]]:
    """Return the measures of a method whose distances move with masses, the usual one first."""
    if method == "means":
        return [mean_table]
    if method != "gaussian":
        return []
    tables = gaussian_table, diagonal_gaussian_table
    return [partial(table, unbiased=unbiased) for table in tables for unbiased in (True, False)]


def _clouds(samples: LabeledSamples, masses: Tensor) -> list[ClassCloud]:
    """Return the classes with weights that depend on the masses, even if all are equal."""
    assert samples.labels is not None
    clouds = []
    for c, name in enumerate(samples.class_names):
        rows = ((samples.labels == c) & (masses.detach() > 0)).nonzero().squeeze(1)
        weights = masses[rows]
        clouds.append(ClassCloud(name, samples.points_of(rows), weights / weights.sum()))
    return clouds
