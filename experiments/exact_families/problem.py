"""Two weighted clouds whose transport is known exactly: atoms, factors, and the truth of each term.

Two rules make large problems small.

Duplicates. Let the points i of a cloud fall into atoms k of equal coordinates and class, of masses
A_k = sum of a_i. For a plan P between points let Q_kl be its mass between atoms. Then <C, P> =
<C, Q>, and by the chain rule

    KL(P | a b^T) = KL(Q | A B^T) + sum_kl Q_kl KL(P / Q_kl within (k, l) | a_i b_j / (A_k B_l)),

whose second part is 0 for P_ij = Q_kl a_i b_j / (A_k B_l), which has the right marginals. So
OT_epsilon of the points is OT_epsilon of the atoms, at any epsilon.

Products. Let a = a_1 x a_2 and b = b_1 x b_2 be product measures and C((i, k), (j, l)) = C1_ij +
C2_kl. The product of both optimal plans is a plan of value OT_1 + OT_2, and f1_i + f2_k and
g1_j + g2_l have the same value in the dual. So OT_epsilon = OT_1 + OT_2. Axes of a grid are such
factors, and so is a class that is independent of the position.

Truths are of the numbers that the library holds: coordinates as stored, masses as
`LabeledSamples.masses` gives them. Masses sum to 1 but for rounding, by d_a and d_b; the truth is
that of masses divided by their sum, and its error counts (d_a + d_b) (<a, |f|> + <b, |g|> +
epsilon) for the difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

import otdd_flash as otdd
from experiments.exact_families.transport import (
    Extended,
    Truth,
    entropic_transport,
    extended,
)

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Factor:
    """Atoms that points are made of, or of one group of their coordinates.

    Attributes:
        points: (K, d) coordinates as stored, which float64 holds exactly; d may be 0.
        classes: (K,) class indices, or None where this factor does not say the class.
        index: (n,) the atom of every point.
        masses: (K,) as the library's masses add up to, not normalised.
    """

    points: Floats
    classes: Integers | None
    index: Integers
    masses: Extended


@dataclass(frozen=True, eq=False)
class Side:
    """A cloud as the library gets it, and what it is made of.

    Attributes:
        samples: n points.
        factors: one, or several for a product measure.
        deviation: how far the masses are from summing to 1, and from being a product.
    """

    samples: otdd.LabeledSamples
    factors: tuple[Factor, ...]
    deviation: float

    @cached_property
    def masses(self) -> Floats:
        """(n,), as the library uses them."""
        found: Floats = self.samples.masses.cpu().numpy()
        return found


@dataclass(frozen=True, eq=False)
class Problem:
    """Two sides and the cost between them.

    Attributes:
        family: which family it was drawn from.
        x: the source.
        y: the target; the same object as `x` for a cloud against itself.
        table: W (V_x + V_y, V_x + V_y), symmetric, or None.
        cost: weights of both parts of the cost.
    """

    family: str
    x: Side
    y: Side
    table: Floats | None
    cost: otdd.GroundCost

    @property
    def shape(self) -> tuple[int, int]:
        """(n, m)."""
        return len(self.x.samples), len(self.y.samples)

    @property
    def class_table(self) -> torch.Tensor | None:
        """What `sinkhorn` takes."""
        return None if self.table is None else torch.from_numpy(self.table)

    def sides(self, term: str) -> tuple[Side, Side]:
        """The clouds of "xy", "xx" or "yy"."""
        both = {"x": self.x, "y": self.y}
        return both[term[0]], both[term[1]]

    def block(self, term: str) -> Floats | None:
        """The class distances of a term (V, V')."""
        if self.table is None:
            return None
        source = self.x.samples.class_total
        parts = {"x": slice(0, source), "y": slice(source, None)}
        return self.table[parts[term[0]], parts[term[1]]]

    def costs(self, term: str) -> list[Extended]:
        """The cost between the atoms of every factor (K, L), in extended precision."""
        left, right = self.sides(term)
        pairs = zip(left.factors, right.factors, strict=True)
        return [factor_costs(one, other, self.cost, self.block(term)) for one, other in pairs]

    def truth(self, term: str, epsilon: float) -> Truth:
        """OT_epsilon of a term."""
        left, right = self.sides(term)
        total = Truth(0.0, 0.0, 0.0)
        for one, other, cost in zip(left.factors, right.factors, self.costs(term), strict=True):
            # Atoms without mass are not part of the problem.
            rows, columns = one.masses > 0, other.masses > 0
            total += entropic_transport(
                cost[rows][:, columns], one.masses[rows], other.masses[columns], epsilon
            )
        moved = (left.deviation + right.deviation) * (total.magnitude + epsilon)
        return total._replace(error=total.error + moved)

    def scale(self, term: str = "xy") -> float:
        """The mean of |C|, part by part; 1 where all costs are 0."""
        left, right = self.sides(term)
        parts = zip(left.factors, right.factors, self.costs(term), strict=True)
        return sum(float(one.masses @ abs(c) @ other.masses) for one, other, c in parts) or 1.0


def factor_costs(
    left: Factor, right: Factor, cost: otdd.GroundCost, block: Floats | None
) -> Extended:
    """lambda_x ||x_k - y_l||^2 + lambda_y W[k, l] between atoms (K, L)."""
    lambda_x, lambda_y = np.longdouble(cost.lambda_x), np.longdouble(cost.lambda_y)
    others = extended(right.points)
    # One row at a time: atoms may have 100,000 coordinates.
    rows = [((extended(point) - others) ** 2).sum(1) for point in left.points]
    found = lambda_x * extended(rows).reshape(len(left.points), len(right.points))
    if block is not None and left.classes is not None and right.classes is not None:
        found = found + lambda_y * extended(block[left.classes][:, right.classes])
    return found


def atom_masses(masses: Floats, index: Integers, count: int) -> Extended:
    """The masses of points added up by atom, in extended precision (pairwise, a few units off)."""
    return extended([extended(masses[index == k]).sum() for k in range(count)])
