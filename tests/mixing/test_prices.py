"""Prices: a cut by any potentials is below the value of any mixture, in floating point too."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from otdd_flash.mixing.sources import MixtureOracle, priced
from tests.mixing.dense import prepared, problem, value


def simplex(count: int, draw: np.random.Generator) -> np.ndarray:
    """Weights, of which some are 0."""
    w = draw.exponential(size=count) * (draw.random(count) < 0.7)
    w[draw.integers(count)] += 0.1
    return w / w.sum()


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("precision", ["fast", "double"])
@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_below_all_mixtures(seed, precision):
    target, each = problem(seed)
    epsilon = float(np.random.default_rng(seed).choice([0.02, 0.2, 2.0]))
    sources, comparison = prepared(target, each, epsilon, precision)
    operator = comparison.operator("xy", keep_scores=False).refined
    draw = np.random.default_rng(seed)
    others = [simplex(len(each), draw) for _ in range(3)]
    truths = [value(target, each, w, epsilon) for w in others]
    scale = max(map(abs, truths))
    for spread in (0.0, 0.3, 3.0):
        # Potentials that are nothing of the kind, and their softmins.
        g = torch.from_numpy(draw.normal(size=len(target)) * spread)
        softmins = operator.softmin_rows(g.to(operator.costs.dtype), epsilon).double()
        noise = torch.from_numpy(draw.normal(size=len(sources.own)) * spread * epsilon)
        for f in (softmins, softmins + noise, noise):
            found = priced(operator, sources, f, g, epsilon)
            for w, truth in zip(others, truths, strict=True):
                assert float(w @ found.cut) <= truth + 1e-9 * scale


@pytest.mark.parametrize("seed", range(4))
def test_cuts_of_solves_are_tight(seed):
    """A bound that is too high by more than rounding is no bound here."""
    target, each = problem(seed)
    sources, comparison = prepared(target, each, 0.3)
    w = simplex(len(each), np.random.default_rng(seed))
    truth = value(target, each, w, 0.3)
    answer = MixtureOracle(comparison, sources).at(w, 1e-6)
    size = max(abs(truth), 1.0)
    assert truth - 1e-4 * size <= float(w @ answer.cut) <= truth + 1e-9 * size
    assert answer.divergence.bounds[0] <= truth + 1e-9 * size
    assert truth <= answer.upper + 1e-9 * size


def test_cuts_are_lowered_by_all_errors_of_their_pass():
    target, each = problem(3)
    sources, comparison = prepared(target, each, 0.2)
    operator = comparison.operator("xy", keep_scores=False).refined

    class Rough:
        a, b, costs = operator.a, operator.b, operator.costs

        def marginals(self, *given):
            sums = operator.marginals(*given)
            return sums._replace(
                row_errors=sums.row_errors + 0.5,
                column_errors=sums.column_errors + 0.25,
                relative_error=0.01,
                underflow=0.02,
                cost_rounding=1e-3,
            )

    g = torch.zeros(len(target), dtype=torch.float64)
    f = operator.softmin_rows(g.to(operator.costs.dtype), 0.2).double()
    exact, rough = (priced(one, sources, f, g, 0.2, e) for one, e in ((operator, 0), (Rough(), 4)))
    assert rough.prices == pytest.approx(exact.prices)
    # Rows at their softmins have r = 1.
    lost = 0.5 + 0.25 + 0.2 * (0.01 + 0.02) + 2e-3 * operator.costs.highest + 4
    assert exact.cut - rough.cut == pytest.approx(np.full(len(each), lost), rel=1e-3)


@pytest.mark.parametrize("seed", [1, 4])
def test_prices_are_the_gradient(seed):
    target, each = problem(seed)
    sources, comparison = prepared(target, each, 0.3, "double")
    oracle, count = MixtureOracle(comparison, sources), len(each)
    w = np.full(count, 1 / count)
    slope = oracle.at(w, 1e-9).slope
    for k in range(1, count):
        step = np.zeros(count)
        step[[0, k]] = -1e-4, 1e-4
        ends = [value(target, each, w + sign * step, 0.3) for sign in (1, -1)]
        assert (ends[0] - ends[1]) / 2e-4 == pytest.approx(slope[k] - slope[0], abs=1e-4)


def test_curvature_is_at_most_the_hessian():
    target, each = problem(2)
    sources, comparison = prepared(target, each, 0.5, "double")
    oracle, count = MixtureOracle(comparison, sources), len(each)
    w = np.full(count, 1 / count)
    found = oracle.curvature(oracle.at(w, 1e-10))
    assert np.linalg.eigvalsh(found).min() > -1e-12
    for k in range(1, count):
        step = np.zeros(count)
        step[[0, k]] = -1.0, 1.0
        ends = [value(target, each, w + length * step, 0.5) for length in (-1e-2, 0.0, 1e-2)]
        second = (ends[0] - 2 * ends[1] + ends[2]) / 1e-4
        assert 0 < step @ found @ step <= second * 1.01
