"""Minimisation of a convex function over weights, from cuts: a bundle method with a metric.

An oracle is asked at weights w (K,) for an upper bound of a convex function V at w and for a cut e
(K,): V(w') >= <e, w'> for all weights w' that sum to 1. `minimise` keeps the cuts and asks next at

    argmin  max_c <e_c, w> + penalty KL(w | towards) + (w - v)^T H (w - v) / 2

over the allowed weights, with v the best weights so far. Far from the optimum V is nearly piecewise
linear, and cuts are good models of it. Near the optimum V is smooth, and the step is a quasi-Newton
step at curvature H. The multipliers of the step combine the cuts to one cut. Its minimum with the
penalty over the allowed weights is a lower bound of V + penalty KL: `Allowed.lowest` is a dual
value, a bound for any multiplier (Kiwiel 1990, Proximity control in bundle methods; Lemarechal,
Nemirovskii & Nesterov 1995, New variants of bundle methods).

`mixing.mixture` calls `minimise` with a `sources.MixtureOracle` and an `Allowed`, and takes from
`Found` weights, bounds and the cut that proves the lower one. `mixing.sources` uses `Allowed` and
`without_small`. For a convex V `Found.lower` must stay a bound, rounding included, so it comes from
`Allowed.lowest` alone (`tests/mixing/test_weights.py`). The values of `StoppedBy` are written to
mixture.json, so they must stay. All numbers are float64 on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from otdd_flash.mixing.sources import MixtureOracle, Solved

Vector = NDArray[np.float64]

StoppedBy = Literal["bound_width", "max_seconds", "max_iterations", "rounding"]

# Shares of the predicted fall: to go on from the next weights, and to damp the next step less.
SERIOUS, WELL = 0.1, 0.5
# The share of the gap below which a predicted fall means that steps are too short.
TIMID = 0.1
# Damping by diag(1 / w) at the start, over the value, and the least w in it, over 1 / K.
FIRST_DAMPING, SPREAD = 0.05, 0.2
# Shares of the gap and of the predicted fall that a solve may be off by; its largest width, and the
# least over the one asked for.
OF_GAP, OF_FALL, WIDEST, OF_WIDTH = 0.2, 0.3, 0.1, 0.25
# Solves in a row that do not narrow the gap by a percent, beside one a source, after which the
# search ends; fewer where the gap is no bound.
MOST_IDLE, MOST_IDLE_UNPROVEN = 25, 8
# Most solves, and the cuts that are kept.
MOST_SOLVES, MOST_CUTS = 400, 120
# Steps of an interior-point solve, its last gap over the spread of the cuts, and how near to the
# border a step goes.
STEPS, LAST_GAP, INSIDE = 80, 1e-11, 0.99
# Seconds of a solve whose time is over: it gets one iteration.
NO_TIME = 1e-9
# The part of the wanted gap by which a tangent may be above a function that is not convex.
ABOVE = 0.1
# Weights below it are 0.
NO_WEIGHT = 1e-7


@dataclass(frozen=True)
class Allowed:
    """The allowed weights of K sources, and what they cost beside the transport.

    Args:
        most: (K,) largest weights, which sum to 1 or more.
        penalty: price of KL(w | towards), in units of the cost.
        towards: (K,) weights that sum to 1.
    """

    most: Vector
    penalty: float
    towards: Vector

    @property
    def usable(self) -> NDArray[np.bool_]:
        """Which sources may have weight (K,)."""
        free = self.most > 0
        return free & (self.towards > 0) if self.penalty else free

    @property
    def centre(self) -> Vector:
        """Weights (K,) away from all borders."""
        room = np.where(self.usable, self.most, 0.0)
        shares: Vector = room / room.sum()
        return shares

    def with_entropy(self, price: float) -> Allowed:
        """Return the weights with a further penalty price KL(w | 1 / K), up to a constant."""
        with np.errstate(divide="ignore"):
            logs = np.log(self.towards)
        total = self.penalty + price
        found = np.exp(logs * (self.penalty / total)) if self.penalty else np.ones_like(logs)
        return Allowed(self.most, total, found / found.sum())

    def charge(self, w: Vector) -> float:
        """Return penalty KL(w | towards)."""
        if not self.penalty:
            return 0.0
        held = w > 0
        return self.penalty * float(np.sum(w[held] * np.log(w[held] / self.towards[held])))

    def nearest(self, prices: Vector, step: float, w: Vector) -> Vector:
        """Minimise <prices, w'> + penalty KL(w' | towards) + KL(w' | w) / step over the weights."""
        free = self.usable & (w > 0)
        logs = np.log(w[free]) / step - prices[free]
        if self.penalty:
            logs += self.penalty * np.log(self.towards[free])
        logs *= 1 / (1 / step + self.penalty)
        most, found = self.most[free], np.zeros_like(w)
        # The weights at their limit; the others share the rest, and may be far less likely.
        full = np.zeros(len(logs), dtype=bool)
        while True:
            grown = np.where(full, 0.0, np.exp(np.minimum(logs - logs[~full].max(), 0.0)))
            rest = max(1.0 - most[full].sum(), 0.0)
            shares = np.where(full, most, rest * grown / grown.sum())
            more = shares > most * (1 + 1e-12)
            if not more.any():
                break
            full |= more
            if full.all():
                shares = most / most.sum()
                break
        found[free] = shares
        return found

    def lowest(self, cut: Vector) -> float:
        """Bound min <cut, w> + penalty KL(w | towards) over the allowed weights, from below.

        For any number s it is at least s + sum_k min_w (e_k - s) w + penalty w log(w / towards_k),
        with 0 <= w <= most_k.
        """
        free = self.usable
        e, most, unit = cut[free], self.most[free], 4 * len(cut) * 2.0**-53
        if not self.penalty:
            order = np.argsort(e)
            filled = np.minimum(np.cumsum(most[order]), 1.0)
            found = float(np.diff(filled, prepend=0.0) @ e[order])
            return found - unit * float(np.abs(e).max())
        logs = np.log(self.towards[free])

        def weights(level: float) -> Vector:
            grown = np.exp(np.minimum((level - e) / self.penalty - 1 + logs, 0.0))
            return np.minimum(most, grown)

        spread = self.penalty * (2 - float(logs.min()))
        low, high = float(e.min()) - spread, float(e.max()) + spread
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if weights(middle).sum() < 1 else (low, middle)
        w = np.maximum(weights(high), 1e-300)
        terms = (e - high) * w + self.penalty * w * (np.log(w) - logs)
        size = float(np.abs(e).max()) + abs(high) + spread
        return high + float(terms.sum()) - unit * size


def without_small(w: Vector, least: float, most: Vector) -> Vector:
    """Return weights (K,) that sum to 1, of which none is below `least` but 0."""
    w = np.where(w < least, 0.0, w)
    # The rest goes to the largest ones, as far as they have room.
    lost = 1.0 - w.sum()
    for k in np.argsort(-w):
        more = min(lost, most[k] - w[k])
        w[k], lost = w[k] + more, lost - more
    return w


class Found(NamedTuple):
    """The best weights, and bounds of the least value.

    Attributes:
        w: (K,) weights.
        answer: of the oracle at w.
        upper: upper bound at w, with the penalty.
        lower: lower bound over all allowed weights, with the penalty.
        cut: (K,) the combined cut that proves it.
        cuts: (c, K) those kept.
        solves: how often the oracle was asked.
        stopped_by: why it ended.
    """

    w: Vector
    answer: Solved
    upper: float
    lower: float
    cut: Vector
    cuts: NDArray[np.float64]
    solves: int
    stopped_by: StoppedBy


def minimise(
    oracle: MixtureOracle,
    allowed: Allowed,
    start: Vector,
    width: float,
    left: Callable[[], float | None] = lambda: None,
    progress: Callable[[int, float], None] | None = None,
) -> Found:
    """Minimise V(w) + penalty KL(w | towards) over the allowed weights.

    Args:
        oracle: V, of which `at`, `curvature`, `convex` and `scale` are read.
        allowed: the weights.
        start: (K,) allowed weights to begin with.
        width: (upper - lower) / scale to reach.
        left: returns the seconds that are left, or None; without any no solve begins.
        progress: called as progress(solves, gap over the scale).
    """
    w, idle = start, 0
    best = oracle.at(w, WIDEST)
    upper, lower, cuts = best.upper + allowed.charge(w), -math.inf, best.cut[None]
    metric, proof, narrowest = oracle.curvature(best), best.cut, math.inf
    # The scale at the best weights: that of the last ones may be larger.
    scale = oracle.scale
    damping = FIRST_DAMPING * scale
    most_idle = MOST_IDLE + len(w) if oracle.convex else MOST_IDLE_UNPROVEN
    for solves in range(1, MOST_SOLVES + 1):
        damped = metric + damping * np.diag(1 / np.maximum(w, SPREAD / len(w)))
        following, shares, model = next_weights(cuts, w, damped, allowed)
        if not oracle.convex:
            # Tangents that are gone prove nothing.
            lower = -math.inf
        for cut in (shares @ cuts, best.cut):
            if (found := allowed.lowest(cut)) > lower:
                lower, proof = found, cut
        gap, wanted = upper - lower, width * scale
        if progress is not None:
            progress(solves, gap / scale)
        idle = 0 if gap < 0.99 * narrowest else idle + 1
        narrowest = min(gap, narrowest)
        stopped = _ended(gap <= wanted, left(), solves, idle >= most_idle)
        if stopped is not None:
            return Found(w, best, upper, lower, proof, cuts, solves, stopped)
        level = float(best.cut @ w) + allowed.charge(w)
        predicted = max(level - model, 0.0)
        if predicted < TIMID * gap:
            # Secants over kinks have made the metric too large.
            metric, damping = oracle.curvature(best), damping / 4
        asked = max(min(OF_GAP * gap, OF_FALL * predicted) / scale, OF_WIDTH * width)
        answer = oracle.at(following, min(asked, WIDEST))
        reached, charged = answer.upper, allowed.charge(following)
        # Dual values are nearer to the truth than upper bounds.
        fallen = level - float(answer.cut @ following) - charged
        unsure = answer.upper - float(answer.cut @ following)
        better = fallen > SERIOUS * predicted or reached + charged < upper
        if better:
            metric = secant(metric, following - w, answer.slope - best.slope)
            w, best, upper, scale = following, answer, reached + charged, oracle.scale
        # A cut is added whether or not the step was good: only far too long steps are damped.
        if fallen > WELL * predicted:
            damping *= 0.25
        elif fallen < -predicted and predicted > unsure:
            damping *= 2
        if not oracle.convex:
            # A tangent that is above the function elsewhere is no cut.
            below = cuts @ following <= answer.upper + ABOVE * wanted
            cuts = cuts[below & (cuts @ w <= best.upper + ABOVE * wanted)]
        cuts = _kept(np.vstack((cuts, best.cut, answer.cut)), w)
    raise AssertionError("the last solve ends the loop")


def _ended(narrow: bool, seconds: float | None, solves: int, idle: int) -> StoppedBy | None:
    if narrow:
        return "bound_width"
    if seconds is not None and seconds <= NO_TIME:
        return "max_seconds"
    if idle:
        return "rounding"
    return "max_iterations" if solves == MOST_SOLVES else None


def _kept(cuts: NDArray[np.float64], w: Vector) -> NDArray[np.float64]:
    """Keep the cuts that are highest at w, and the last one at the end."""
    if len(cuts) <= MOST_CUTS:
        return cuts
    high = np.sort(np.argsort(cuts[:-1] @ w)[1 - MOST_CUTS :])
    return np.vstack((cuts[high], cuts[-1:]))


def secant(metric: NDArray[np.float64], moved: Vector, changed: Vector) -> NDArray[np.float64]:
    """Return the metric with H moved = changed, by the update of Broyden, Fletcher and others.

    Prices are known up to a constant, which sums with `moved` to 0.
    """
    changed = changed - changed.mean()
    along, image = float(moved @ changed), metric @ moved
    before = float(moved @ image)
    if along <= 1e-12 * float(np.linalg.norm(moved) * np.linalg.norm(changed)):
        return metric
    grown: NDArray[np.float64] = metric + np.outer(changed, changed) / along
    return grown - np.outer(image, image) / before if before > 0 else grown


def next_weights(
    cuts: NDArray[np.float64], best: Vector, metric: NDArray[np.float64], allowed: Allowed
) -> tuple[Vector, Vector, float]:
    """Minimise max_c <e_c, w> + penalty KL + (w - best)^T H (w - best) / 2 over allowed weights.

    A primal-dual interior-point method in the K weights and the largest cut t.

    Returns:
        The weights (K,), the multipliers of the cuts (c,), which sum to 1, and the value of the
        cuts and the penalty there.
    """
    free = allowed.usable
    most, towards, w = allowed.most[free], allowed.towards[free], allowed.centre[free]
    count, lowest = len(w), float(cuts.min())
    unit = max(float(cuts.max()) - lowest, 1e-12 * abs(lowest), 1e-300)
    rows = (cuts[:, free] - lowest) / unit
    penalty, metric = allowed.penalty / unit, metric[np.ix_(free, free)] / unit
    full = np.zeros_like(best)
    if count == 1 or most.sum() <= 1 + 1e-12:
        full[free] = w
        values = cuts @ full
        shares = np.zeros(len(cuts))
        shares[np.argmax(values)] = 1.0
        return full, shares, float(values.max()) + allowed.charge(full)
    eye, zeros = np.eye(count), np.zeros((count, 1))
    sides = np.vstack(
        (np.hstack((rows, -np.ones((len(rows), 1)))), np.hstack((-eye, zeros)))
        + ((np.hstack((eye, zeros)),) if (capped := bool((most < 1).any())) else ())
    )
    ends = np.concatenate((np.zeros(len(rows) + count), most if capped else []))
    x = np.append(w, float((rows @ w).max()) + 1.0)
    slack = ends - sides @ x
    duals, balance = 1.0 / (len(slack) * slack), np.append(np.ones(count), 0.0)
    system = np.zeros((count + 2, count + 2))
    for _ in range(STEPS):
        slack = ends - sides @ x
        gap = float(duals @ slack) / len(slack)
        if gap * len(slack) < LAST_GAP:
            break
        aim, w = 0.1 * gap, x[:count]
        gradient = np.append(metric @ (w - best[free]), 1.0)
        system[: count + 1, : count + 1] = (sides.T * (duals / slack)) @ sides
        system[:count, :count] += metric
        if penalty:
            gradient[:count] += penalty * (np.log(w / towards) + 1)
            system[range(count), range(count)] += penalty / w
        system[-1, :-1] = system[:-1, -1] = balance
        right = np.append(-gradient - sides.T @ (aim / slack), 1.0 - w.sum())
        try:
            step = np.linalg.solve(system, right)[:-1]
        except np.linalg.LinAlgError:
            break
        towards_dual = aim / slack - duals + (duals / slack) * (sides @ step)
        falls, down = -(sides @ step) / slack, -towards_dual / duals
        length = min(1.0, INSIDE / max(1e-300, float((-falls).max()), float(down.max())))
        x, duals = x + length * step, duals + length * towards_dual
    full[free] = without_small(x[:count], NO_WEIGHT, most)
    shares = duals[: len(rows)] / duals[: len(rows)].sum()
    return full, shares, float((cuts @ full).max()) + allowed.charge(full)
