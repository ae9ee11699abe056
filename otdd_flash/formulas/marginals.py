"""The marginals of a plan: equal to the masses, or near them at the price of a KL penalty.

    OT = min_P <C, P> + epsilon KL(P | a b^T) + D_x(P 1 | a) + D_y(P^T 1 | b),
    KL(p | q) = sum p log(p / q) - p + q,

with masses that sum to 1. A `Marginal` is the D of one side: `Exact` is 0 at p = a and infinite
elsewhere, `RelaxedByKL` is rho KL(p | a). `Constraints` holds those of both sides; a comparison has
it beside the cost. The formulas in which the two kinds differ are methods here, for solver, engine
and certificates alike. `kernels.segments` has the dual, the update and the translation once more,
by 1 / rho (`softness`), so a change of these must be made there too.

**Dual.** With phi(f) = f where marginals are exact and -rho (e^(-f / rho) - 1) where they are
relaxed,

    D(f, g) = <a, phi_x(f)> + <b, phi_y(g)> + epsilon (1 - sum P) <= OT    for any f and g,

of the plan P_ij = a_i b_j e^((f_i + g_j - C_ij) / epsilon). D is largest in f where the row sums
equal the marginal that is owed, p = a phi_x'(f): a, or a e^(-f / rho). That gives the update

    f = rho / (rho + epsilon) T(g),    or f = T(g) of exact marginals.

**Primal.** As log(P_ij / a_i b_j) is an exponent, P itself costs as much as

    D(f, g) + rho_x KL(P 1 | p) + rho_y KL(P^T 1 | q),    p = a e^(-f / rho_x),

with q = b e^(-g / rho_y): an upper bound of OT where both sides are relaxed, as every P >= 0 is
admissible then.

**Translation.** f + t and g - t have the same plan, and D(f + t, g - t) is largest where both sides
owe the same mass. Updates alone approach that t at a rate of rho / (rho + epsilon) on each side;
in closed form it takes no time (Sejourne, Vialard & Peyre 2022, Faster unbalanced optimal
transport: translation invariant Sinkhorn and 1-D Frank-Wolfe):

    t = log(<a, e^(-f / rho_x)> / <b, e^(-g / rho_y)>) / (1 / rho_x + 1 / rho_y).

Vectors and their masses have shape (..., k); potentials and penalties are in units of the cost. A
change must keep `expm1`: for a large rho e^(-f / rho) - 1 has no correct digits otherwise.

`solver.penalties` makes `Constraints` of the user's penalties. Comparisons and `decision.Form` hold
them; `engine`, `operators`, `solver`, `derivatives`, `batched`, `ranking.bounds`, `result`,
`unmatched` and `study.measures.distances` read them. `tests/solver/test_unbalanced.py` tests the
formulas.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from otdd_flash.formulas.evidence import at_least

# Keeps quotients finite where no mass moves.
TINY = torch.finfo(torch.float64).tiny

# Shares of a mass below e^this, 1e-278, count as that much: rounding hides far more of what moves.
# It is above the exponents at which entries of a plan are 0, or as small as they get.
LEAST_EXPONENT = -640.0

# The mass of a plan from which on it is more than what so small shares add up to.
LEAST_MOVING = 1e-260


class ColumnNumbers(NamedTuple):
    """The numbers of `evidence.Evaluation` that depend on the kind of the columns' marginal."""

    value: Any
    size: Any
    gap: Any
    mass: Any
    raised: Any


class Marginal(ABC):
    """The marginal of one side: how near to the masses it must be.

    Attributes:
        exact: whether it must equal the masses.
        rho: the penalty, in units of the cost; infinite if the marginal is exact. A tensor () where
            recordings read it from the device's memory.
    """

    exact: ClassVar[bool] = False
    rho: float | Tensor

    @property
    def softness(self) -> float | Tensor:
        """1 / rho; 0 of an exact one."""
        return 1 / self.rho

    @abstractmethod
    def at(self, rho: float | Tensor) -> Marginal:
        """Return this kind of marginal with another penalty, if it has one."""

    @abstractmethod
    def updated(self, softmin: Tensor, epsilon: float | Tensor) -> Tensor:
        """Return the potential that maximizes the dual, from its softmin."""

    @abstractmethod
    def softmin_of(self, potential: Tensor, epsilon: float | Tensor) -> Tensor:
        """Return the softmin of which a potential is the update."""

    def diagonal(self, epsilon: float) -> float:
        """Return the factor, 1 + epsilon / rho, of a side's sums in the linear system of a plan.

        The owed mass falls with the potential: where the costs change, a e^(-f / rho) = P 1 gives
        (1 + epsilon / rho) r df + P dg = (P o dC) 1.
        """
        return 1 + epsilon * float(self.softness)

    @abstractmethod
    def mean_slopes(self, masses: Tensor, potential: Tensor) -> tuple[Tensor, Tensor]:
        """Return the slopes of <a, f>, or of -rho log <a, e^(-f / rho)>, by f (n,) and by a (n,).

        Those by a are up to a constant.
        """

    @abstractmethod
    def mass_slope(self, slope: Tensor, sums: Tensor, epsilon: float) -> Tensor:
        """Return the slope by masses, along the simplex, of a function of a plan.

        Args:
            slope: u (n,), the solution of the plan's linear system for this side; where there is no
                mass, what the equation of its row gives.
            sums: r / a (n,), those of a point without mass by its potential.
            epsilon: regularisation.
        """

    @abstractmethod
    def dual(self, potential: Tensor) -> Tensor:
        """Return phi(f), whose product with the masses is this side's part of the dual value."""

    @abstractmethod
    def owed(self, masses: Tensor, potential: Tensor) -> Tensor:
        """Return the marginal that a plan of this potential owes: a, or a e^(-f / rho)."""

    @abstractmethod
    def log_factors(
        self, masses: Tensor, sums: Tensor, potential: Tensor, epsilon: float | Tensor
    ) -> Tensor:
        """Return (f' - f) / epsilon of the update f' of a potential, whose plan has these sums."""

    @abstractmethod
    def missing(self, masses: Tensor, sums: Tensor, least: float) -> Tensor | None:
        """Return the logarithms (..., k) of factors that make sums admissible; None if all are.

        They are infinite where a sum is at most the share `least` of its mass.
        """

    @abstractmethod
    def charged(
        self, masses: Tensor, sums: Tensor, potential: Tensor, ends: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Bound <r, f> + D(r | a), (...), this side's part of the primal value of a plan.

        Args:
            masses: a.
            sums: of the plan as it was evaluated.
            potential: f.
            ends: logarithms (..., 1) between which r / sums is.
        """

    @abstractmethod
    def level(
        self, mass: Tensor, masses: Tensor, potential: Tensor, epsilon: float | Tensor
    ) -> Tensor:
        """Return by what to divide a self term's plan of this mass to maximize its dual value.

        Its potential then falls by half of epsilon log of that. The plan's mass is then the mass
        owed after the fall.

        Args:
            mass: of the plan, (..., 1).
            masses: of the points.
            potential: f.
            epsilon: regularisation.
        """

    @abstractmethod
    def update_size(
        self, owed: Tensor, before: Tensor, after: Tensor, epsilon: float | Tensor
    ) -> Tensor | float:
        """Return the size, (...), of numbers whose rounding moves the mass of an updated plan.

        Its mass is taken from what the marginal owes after the update (..., n), times epsilon,
        which potentials (..., n) have only as far as their rounding allows.
        """

    @abstractmethod
    def terms(self, potential: Tensor, step: Tensor, epsilon: float | Tensor) -> tuple[Tensor, ...]:
        """Return the vectors whose sums over masses `numbers` takes, from a potential and its step.

        Args:
            potential: g.
            step: its change by the plain update.
            epsilon: regularisation.
        """

    @abstractmethod
    def numbers(self, totals: Sequence[Any], mean_step: Any) -> ColumnNumbers:
        """Return an evaluation's numbers from the sums of `terms`, and of that step."""


@dataclass(frozen=True)
class Exact(Marginal):
    """A marginal that equals the masses."""

    exact = True
    rho: float | Tensor = field(default=math.inf, init=False)

    def at(self, rho: float | Tensor) -> Exact:
        return self

    def updated(self, softmin: Tensor, epsilon: float | Tensor) -> Tensor:
        return softmin

    def softmin_of(self, potential: Tensor, epsilon: float | Tensor) -> Tensor:
        return potential

    def mean_slopes(self, masses: Tensor, potential: Tensor) -> tuple[Tensor, Tensor]:
        return masses, potential

    def mass_slope(self, slope: Tensor, sums: Tensor, epsilon: float) -> Tensor:
        # The masses are those that the plan has.
        return slope

    def dual(self, potential: Tensor) -> Tensor:
        return potential

    def owed(self, masses: Tensor, potential: Tensor) -> Tensor:
        return masses

    def log_factors(
        self, masses: Tensor, sums: Tensor, potential: Tensor, epsilon: float | Tensor
    ) -> Tensor:
        return (masses / sums).log_()

    def missing(self, masses: Tensor, sums: Tensor, least: float) -> Tensor | None:
        logs = (masses / sums).log_().masked_fill_(sums <= least * masses, math.inf)
        return logs.masked_fill_(masses == 0, 0)

    def charged(
        self, masses: Tensor, sums: Tensor, potential: Tensor, ends: tuple[Tensor, Tensor]
    ) -> Tensor:
        return torch.full_like(sums[..., 0], math.inf)

    def level(
        self, mass: Tensor, masses: Tensor, potential: Tensor, epsilon: float | Tensor
    ) -> Tensor:
        return mass

    def update_size(
        self, owed: Tensor, before: Tensor, after: Tensor, epsilon: float | Tensor
    ) -> Tensor | float:
        return 0.0

    def terms(self, potential: Tensor, step: Tensor, epsilon: float | Tensor) -> tuple[Tensor, ...]:
        change = torch.exp(step / -epsilon)
        return potential, potential.abs(), (change - 1).abs_(), change

    def numbers(self, totals: Sequence[Any], mean_step: Any) -> ColumnNumbers:
        value, size, gap, mass = totals
        return ColumnNumbers(value, size, gap, mass, mean_step)


@dataclass(frozen=True)
class RelaxedByKL(Marginal):
    """A marginal p that costs rho KL(p | a)."""

    rho: float | Tensor

    def at(self, rho: float | Tensor) -> RelaxedByKL:
        return RelaxedByKL(rho)

    def updated(self, softmin: Tensor, epsilon: float | Tensor) -> Tensor:
        return softmin * (self.rho / (self.rho + epsilon))

    def softmin_of(self, potential: Tensor, epsilon: float | Tensor) -> Tensor:
        return potential * ((self.rho + epsilon) / self.rho)

    def mean_slopes(self, masses: Tensor, potential: Tensor) -> tuple[Tensor, Tensor]:
        mean = -self.rho * log_mass(self, masses, potential)
        # Owed masses may underflow where their shares do not.
        shares = torch.where(masses > 0, masses * torch.exp((mean - potential) / self.rho), 0)
        return shares, self.dual(potential - mean)

    def mass_slope(self, slope: Tensor, sums: Tensor, epsilon: float) -> Tensor:
        return slope * sums * self.diagonal(epsilon)

    def dual(self, potential: Tensor) -> Tensor:
        return torch.expm1(potential / -self.rho) * -self.rho

    def owed(self, masses: Tensor, potential: Tensor) -> Tensor:
        # Where there is no mass the exponential may overflow.
        exponent = (potential / -self.rho).clamp_min(LEAST_EXPONENT)
        return torch.where(masses > 0, masses * torch.exp(exponent), 0)

    def log_factors(
        self, masses: Tensor, sums: Tensor, potential: Tensor, epsilon: float | Tensor
    ) -> Tensor:
        return self.updated((masses / sums).log_() - potential / self.rho, epsilon)

    def missing(self, masses: Tensor, sums: Tensor, least: float) -> Tensor | None:
        return None

    def charged(
        self, masses: Tensor, sums: Tensor, potential: Tensor, ends: tuple[Tensor, Tensor]
    ) -> Tensor:
        # r f + rho (r log(r / a) - r + a) is convex in r, so that it is largest at an end. Its last
        # part is free of cancellation. It is not computed from what f owes, which may be out of all
        # proportion.
        shares = torch.where(sums > 0, (sums / masses).log(), 0)
        found = []
        for end in ends:
            logs = shares + end
            each = sums * torch.exp(end) * (potential + self.rho * (logs + torch.expm1(-logs)))
            found.append(torch.where(sums > 0, each, masses * self.rho))
        return torch.maximum(*found).sum(-1)

    def level(
        self, mass: Tensor, masses: Tensor, potential: Tensor, epsilon: float | Tensor
    ) -> Tensor:
        apart = mass.log() - log_mass(self, masses, potential)
        return torch.exp(apart * (self.rho / (self.rho + epsilon / 2)))

    def update_size(
        self, owed: Tensor, before: Tensor, after: Tensor, epsilon: float | Tensor
    ) -> Tensor | float:
        # f' / rho is off by the rounding of f / rho, which may be far above it, and of log(a / r).
        sizes: Tensor = torch.linalg.vecdot(owed, before.abs() + after.abs())
        return sizes * (1 + epsilon / self.rho)

    def terms(self, potential: Tensor, step: Tensor, epsilon: float | Tensor) -> tuple[Tensor, ...]:
        after = potential + step
        change = torch.exp((potential - self.softmin_of(after, epsilon)) / epsilon)
        exponent = potential / -self.rho
        owed, more = torch.exp(exponent), torch.expm1(exponent)
        # The update makes it owed + grown.
        grown = torch.expm1(step / -self.rho) * owed
        return (
            more * -self.rho,
            potential.abs(),
            (change - owed).abs_(),
            change,
            owed,
            # The gain of the update is -rho grown + epsilon (change - owed - grown).
            grown * -(self.rho + epsilon) - more * epsilon,
        )

    def numbers(self, totals: Sequence[Any], mean_step: Any) -> ColumnNumbers:
        value, size, gap, mass, owed, raised = totals
        return ColumnNumbers(value, size, gap / at_least(owed, TINY), mass, raised)


class Factors(NamedTuple):
    """The effect on marginals of a translation t that makes the masses owed by both sides equal.

    Attributes:
        mass: the mass that both sides owe, (...).
        exponent: t / rho_x, by which the marginal that rows owe falls, (...).
        fit: the factor of a plan that fitted the masses owed before, and fits the new ones, (...).
    """

    mass: Tensor
    exponent: Tensor
    fit: Tensor


class Translated(NamedTuple):
    """Potentials f + t and g - t; where both marginals are exact t is 0 and nothing is computed."""

    f: Tensor
    g: Tensor
    factors: Factors | None = None

    def adjusted(
        self, sums: Tensor, owed: Tensor, kappa: Tensor, total: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a plan's numbers after the translation.

        Args:
            sums: of its rows (..., n), which are scaled as the masses that rows owe.
            owed: these masses (..., n).
            kappa: a factor (...) with which it fitted, which is lowered until it fits again.
            total: its mass (...), to be returned over what both sides owe.
        """
        if self.factors is None:
            return sums, owed, kappa, total
        mass, exponent, fit = self.factors
        scale = torch.exp(-exponent)[..., None]
        return sums * scale, owed * scale, kappa * fit, total / mass


@dataclass(frozen=True)
class Constraints:
    """The constraints on both marginals of a plan.

    Attributes:
        rows: those of a.
        columns: those of b.
        exact: whether both are: masses owed sum to 1, and potentials are free to translate.
    """

    rows: Marginal
    columns: Marginal
    exact: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "exact", self.rows.exact and self.columns.exact)

    def between(self, row: int, column: int) -> Constraints:
        """Return those of a term between two sides, 0 and 1, of which a self term takes one."""
        sides = self.rows, self.columns
        return Constraints(sides[row], sides[column])

    @property
    def softness(self) -> float | Tensor:
        """1 / rho_x + 1 / rho_y; 0 where both are exact, and D the same for all translations."""
        return self.rows.softness + self.columns.softness

    def diagonal(self, epsilon: float) -> tuple[float, float]:
        """Return the factors of the sums of rows and of columns in the linear system of a plan."""
        return self.rows.diagonal(epsilon), self.columns.diagonal(epsilon)

    def normalized(self, a: Tensor, f: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Return f + t (n,) and g - t (m,) with t that of `translation`; <b, g> if both are exact.

        t is the mean of g less that of f, as `Marginal.mean_slopes` says, each times its side's
        share of 1 / rho_x + 1 / rho_y.
        """
        t = self.translation(a, f, b, g)
        t = b @ g if t is None else t[0]
        return f + t, g - t

    def translation_slopes(
        self, a: Tensor, f: Tensor, b: Tensor, g: Tensor
    ) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
        """Return the slopes of the t of `normalized`, of each side that it depends on.

        Returns:
            Those by f (n,) and by a (n,), and by g (m,) and by b (m,), up to a constant those by
            masses.
        """
        if self.exact:
            return None, self.columns.mean_slopes(b, g)
        found: list[tuple[Tensor, Tensor] | None] = []
        sides = (self.rows, a, f, -1), (self.columns, b, g, 1)
        for side, masses, potential, sign in sides:
            if side.exact:
                found.append(None)
                continue
            share = sign * side.softness / self.softness
            by_potential, by_masses = side.mean_slopes(masses, potential)
            found.append((share * by_potential, share * by_masses))
        return found[0], found[1]

    def at(self, penalties: Sequence[float] | Tensor) -> Constraints:
        """Return these kinds of marginals with penalties (2,) of rows and of columns."""
        return Constraints(self.rows.at(penalties[0]), self.columns.at(penalties[1]))

    def translation(self, a: Tensor, f: Tensor, b: Tensor, g: Tensor) -> Tensor | None:
        """Return the t (..., 1) of the largest D(f + t, g - t); None where all are as large."""
        if self.exact:
            return None
        of_rows, of_columns = log_mass(self.rows, a, f), log_mass(self.columns, b, g)
        return (of_rows - of_columns) / self.softness

    def translated(self, a: Tensor, f: Tensor, b: Tensor, g: Tensor) -> Translated:
        """Return f + t (..., n) and g - t (..., m), of the same plan and the largest dual value."""
        t = self.translation(a, f, b, g)
        if t is None:
            return Translated(f, g)
        exponent = t * self.rows.softness
        mass = torch.exp(log_mass(self.rows, a, f) - exponent)
        falls = torch.cat((-exponent, t * self.columns.softness), -1).amin(-1)
        fit = torch.exp(falls.clamp_max(0))
        return Translated(f + t, g - t, Factors(mass[..., 0], exponent[..., 0], fit))

    def untranslated(
        self,
        a: Tensor,
        f: Tensor,
        b: Tensor,
        g: Tensor,
        updated: Tensor,
        epsilon: float | Tensor,
    ) -> Tensor:
        """Return T'(f) (..., m) of an f that is T(g), from T'(f) less any t: `updated`.

        Iterations keep it with the translation. The mass of the plan of f and g tells that, as its
        row sums are the masses owed and its columns are b e^((g - softmin) / epsilon).
        """
        if self.exact:
            return updated
        apart = (g.double() - self.columns.softmin_of(updated.double(), epsilon)) / epsilon
        mass = torch.logsumexp(b.log() + apart, -1, keepdim=True)
        t = (mass - log_mass(self.rows, a, f)) * epsilon / (1 + epsilon * self.columns.softness)
        return updated + t.nan_to_num(0, 0, 0).to(updated.dtype)

    def ends(self, lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ends of potentials for `evidence.oscillation_bound`, which takes a and b."""
        if self.exact:
            return lowest, highest
        return torch.full_like(lowest, -math.inf), torch.full_like(highest, math.inf)

    def owed(self, masses: Tensor, f: Tensor, g: Tensor) -> Tensor:
        """Return the masses owed by both sides (..., n + m) at their potentials, side by side."""
        if self.exact:
            return masses
        a, b = masses[..., : f.shape[-1]], masses[..., f.shape[-1] :]
        return torch.cat((self.rows.owed(a, f), self.columns.owed(b, g)), -1)

    def dual(self, potentials: Tensor, rows: slice) -> Tensor:
        """Return phi(f) and phi(g) (..., n + m) of potentials side by side, f in `rows`."""
        if self.exact:
            return potentials
        f, g = potentials[..., rows], potentials[..., rows.stop :]
        return torch.cat((self.rows.dual(f), self.columns.dual(g)), -1)

    def primal(
        self,
        masses: Sequence[Tensor],
        sums: Sequence[Tensor],
        potentials: Sequence[Tensor],
        epsilon: float | Tensor,
        relative: float,
        least: float,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Bound the primal value of a plan of which not both sides are exact.

        An exact side is updated before, and then has its sums. Those of the other are known but
        for a factor between the least and the largest of that update. It matters little, as the
        slope of their penalty is 0 where they are the masses owed.

        Args:
            masses: a (..., n) and b (..., m).
            sums: of the plan.
            potentials: f and g.
            epsilon: regularisation.
            relative: the share by which each sum may be off.
            least: no sum of up to this share of its mass is scaled up: the bound is infinite.

        Returns:
            The bound, (...), and the most that sums of rows and columns may be after the update.
        """
        kinds, mass = (self.rows, self.columns), sums[0].sum(-1)
        updates = [k.missing(a, r, least) for k, a, r in zip(kinds, masses, sums, strict=True)]
        value, most = torch.zeros_like(mass), list(sums)
        for i, update in enumerate(updates):
            if update is None:
                ends = _ends(updates[1 - i], masses[1 - i], 2 * relative)
                most[i] = sums[i] * ends[1].exp()
                value = value + kinds[i].charged(masses[i], sums[i], potentials[i], ends)
            else:
                most[i], mass = masses[i], torch.ones_like(mass)
                value = value + torch.linalg.vecdot(masses[i], potentials[i] + epsilon * update)
        return value + epsilon * (1 - mass), (most[0], most[1])


def log_mass(side: Marginal, masses: Tensor, potential: Tensor) -> Tensor:
    """Return the logarithm (..., 1) of the mass that is owed, also where that underflows."""
    exponents = masses.log() - side.softness * potential.double()
    return torch.logsumexp(exponents, -1, keepdim=True)


def _ends(logs: Tensor | None, masses: Tensor, off: float) -> tuple[Tensor, Tensor]:
    """Return the least and the largest (..., 1) of logarithms, 0 if None, lowered and raised."""
    if logs is None:
        logs = torch.zeros_like(masses)
    low, high = (logs.masked_fill(masses == 0, end) for end in (math.inf, -math.inf))
    return low.amin(-1, keepdim=True) - off, high.amax(-1, keepdim=True) + off


EXACT = Constraints(Exact(), Exact())
