"""Velocities of a flow's particles by ranks: every row stays with the rank that moves it.

Where ranks share the passes and have all points, rank r computes the rows of both products with the
plans that belong to its points. `OwnedGradient` sums them up there, term by term, as
`DivergenceGradient` does in one process, and `OwnedVelocity` sends every row to the rank that owns
it in the particles' own order (`Ranks.share`), where `flows.stepping` moves it. So a step exchanges
two arrays of the points' size in all: part of the velocities, and the moved points.

`flows.objective` uses both on rank 0. Functions that ranks run (`_add`, `_gather`, `_settle`) must
stay at module level, where other processes find them by name.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from otdd_flash.cost.points import less_origin, per_mass_
from otdd_flash.derivatives.centred import origin_near
from otdd_flash.derivatives.gradient import DivergenceGradient, pulled
from otdd_flash.distributed.exchange import added
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.operators import parts
from otdd_flash.operators.base import Operator
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.parts import Owned, Parts
from otdd_flash.operators.sharing import ShardedOperator
from otdd_flash.samples import largest_entry
from otdd_flash.solver.term import TransportTerm


class OwnedVelocity:
    """Velocities (n, d) on rank 0, of which every rank holds the rows `Ranks.share(n)`.

    Args:
        ranks: the processes, led by this one.
        number: under which each holds its rows.
        largest: the largest absolute entry (), float64; NaN if there is one.
        norm: (sum_i a_i |v_i|^2)^1/2 (), float64.
    """

    def __init__(self, ranks: Ranks, number: int, largest: Tensor, norm: Tensor) -> None:
        self.number, self.largest, self.norm = number, largest, norm
        weakref.finalize(self, ranks.drop, number)


class OwnedGradient:
    """Derivatives of S_epsilon by the particles, summed up by ranks during `solve` as `solved`.

    Args:
        comparison: what is being solved, with the squared Euclidean distance as ground cost.
        ranks: the processes that share its passes, led by this one.
    """

    def __init__(self, comparison: Comparison, ranks: Ranks) -> None:
        self._ranks, self._weight = ranks, comparison.ground.lambda_x
        # Of terms whose points no rank has whole: the derivatives of all rows, on rank 0.
        self._whole = DivergenceGradient(comparison, frozenset({"x"}))
        self._number: int | None = None

    def __call__(self, name: str, operator: Operator, term: TransportTerm) -> None:
        """Add the derivatives of the term "xy" or "xx"; "yy" has none."""
        operator = operator.refined
        if not (isinstance(operator, ShardedOperator) and operator.replicated):
            self._whole(name, operator, term)
            return
        if name == "yy":
            return
        if self._number is None:
            self._number = self._ranks.number()
            # A solve that ends with an error leaves nothing on the ranks.
            self._drop = weakref.finalize(self, self._ranks.drop, self._number)
        # A self term has the particles on both sides, and counts half and negative.
        sides, factor = (1, 1.0) if name == "xy" else (2, -0.5)
        given = term.f, term.g, term.epsilon, 2 * sides * self._weight, factor
        self._ranks.order(_add, operator.number, self._number, *given)

    def velocity(self, masses: Tensor) -> OwnedVelocity | Tensor:
        """Return (1 / a_i) dS / dx_i for the masses a (n,) of the particles, 0 where a_i is 0.

        All rows (n, d) if they are on rank 0 alone.
        """
        ranks, number, whole = self._ranks, self._number, self._whole.total.get("x")
        if whole is not None:
            if number is not None:
                # The points of some terms go round in a ring, those of others do not.
                whole.add_(ranks.order(_gather, number))
                self._drop()
            return per_mass_(whole, masses)
        assert number is not None
        found = ranks.order(_settle, number)
        self._drop.detach()
        return OwnedVelocity(ranks, number, *found.unbind())


@dataclass
class _Derivatives:
    """The derivatives by this rank's points (k, d), in the order of classes.

    Attributes:
        owned: how the points are divided.
        masses: of all particles (n,), float64.
        total: the sum over terms; None for none yet.
    """

    owned: Owned
    masses: Tensor
    total: Tensor | None = None

    def add(self, part: Tensor, factor: float) -> None:
        if self.total is None:
            self.total = part if factor == 1 else part.mul_(factor)
        else:
            self.total.add_(part, alpha=factor)


def _add(
    ranks: Ranks,
    number: int,
    into: int,
    f: Tensor,
    g: Tensor,
    epsilon: float,
    weight: float,
    factor: float,
) -> None:
    """Add factor * weight * (r x - P y) of the own rows of a plan to what is held under `into`."""
    held: Parts = ranks.held[number]
    cost, dtype = held.cost, held.representative.passes.dtype
    origin = origin_near(zip(cost.held, (cost.a, cost.b), strict=True), dtype)
    values = less_origin(cost.held[1], origin)
    applied = parts.own_product(ranks, held, False, f, g, epsilon, values, None, None)
    owned = held.sides[0]
    sums: _Derivatives = ranks.held.setdefault(into, _Derivatives(owned, cost.a))
    own = cost.held[0][owned.of(ranks)]
    sums.add(pulled(own, applied.masses, applied.values, origin, weight), factor)


def _gather(ranks: Ranks, number: int) -> Tensor:
    """Gather the derivatives of all rows (n, d)."""
    held: _Derivatives = ranks.held[number]
    assert held.total is not None
    return held.owned.gathered(ranks, held.total)


def _settle(ranks: Ranks, number: int) -> Tensor:
    """Hold velocities of the rows that a rank moves; return `largest` and `norm` (2,), float64."""
    held: _Derivatives = ranks.held[number]
    assert held.total is not None
    masses = held.masses[held.owned.of(ranks)]
    velocity = per_mass_(held.total, masses)
    speeds = torch.linalg.vector_norm(velocity, dim=1).double()
    largest = largest_entry(velocity) if len(velocity) else speeds.new_zeros(())
    every = ranks.all_gathered(torch.stack((largest, masses @ speeds.square())))
    ranks.held[number] = held.owned.in_given_order(ranks, velocity)
    # `amax` propagates NaN.
    return torch.stack((every[:, 0].amax(), added(every[:, 1]).sqrt()))
