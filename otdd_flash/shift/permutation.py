"""The permutation test of T on pooled rows: draws, hits that bounds decide, and the p-value.

Permutation k of a seed is the same whatever is computed beside it, and hits are counted in the
order drawn, not in that of finishing. A hit is a permutation whose T is not proven to be below that
of the rows as they are: upper(T_k) >= lower(T). There are at least as many of them as permutations
with T_k >= T, so

    p = (1 + hits) / (1 + B)

is valid: P(p <= alpha) <= alpha for exchangeable units, at any size. With an early end after h hits
p = h / l at the l-th permutation, if that is the h-th hit (Besag & Clifford 1991, Sequential Monte
Carlo p-values). `shift.joint` and `shift.parts` call `permutation_test`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from otdd_flash.arguments import Progress
from otdd_flash.shift.pooled import PooledCost, Until
from otdd_flash.shift.rows import Mask, PooledRows

# Statistics that are sums of counts are equal up to this share of the larger one.
EQUAL = 1e-9
# Width of bounds over T up to which a permutation is solved once it is decided, so that the mean of
# all is that of converged values.
NULL_WIDTH = 0.05


class PermutationTest(NamedTuple):
    """A statistic among its permutations.

    Attributes:
        p_value: valid at any number of rows.
        statistic: T of the rows as they are.
        bounds: of the statistic.
        null: (l,) float64, T of the permutations in the order drawn, by dual values, whose error is
            of second order in that of the plan.
        hits: permutations whose T may be as large.
    """

    p_value: float
    statistic: float
    bounds: tuple[float, float]
    null: Tensor
    hits: int


def draws(rows: PooledRows, count: int, seed: int | tuple[int, ...], size: int) -> Iterator[Mask]:
    """Yield which units (U, k) are on the reference's side, of `count` permutations in all.

    Args:
        rows: the units that are exchanged; as many as there are stay on each side.
        count: permutations, each a uniform draw.
        seed: of the draws.
        size: k, but for the last.
    """
    generator, units = np.random.default_rng(seed), rows.unit_in_reference
    for start in range(0, count, size):
        yield np.stack([generator.permutation(units) for _ in range(min(size, count - start))], 1)


def permutation_test(
    pooled: PooledCost,
    rows: PooledRows,
    count: int,
    seed: int | tuple[int, ...],
    *,
    stop_after: int | None = None,
    null_width: float = NULL_WIDTH,
    progress: Progress | None = None,
) -> PermutationTest:
    """Compare T of the rows as they are with T of permutations.

    Args:
        pooled: costs of all rows.
        rows: the rows, their weights and units.
        count: B, the permutations drawn at most.
        seed: of the draws.
        stop_after: h, hits after which no more are drawn.
        null_width: of bounds over T, up to which decided permutations are solved; infinite where
            only hits matter.
        progress: called as progress(permutations done, B).
    """
    device = pooled.cost.device
    observed = pooled.statistics(*rows.sides(rows.unit_in_reference[:, None], device))
    threshold = float(observed.lower)
    until = Until(threshold=threshold, decided_width=null_width)
    values, hits, done = list[Tensor](), 0, 0
    size = pooled.batch if stop_after is None else min(pooled.batch, max(32, 2 * stop_after))
    for drawn in draws(rows, count, seed, size):
        found = pooled.statistics(*rows.sides(drawn, device), until)
        counted = hits + (found.upper >= threshold).cumsum(0)
        last = len(counted)
        if stop_after is not None and int(counted[-1]) >= stop_after:
            last = int((counted == stop_after).nonzero()[0]) + 1
        values.append(found.value[:last])
        hits, done = int(counted[last - 1]), done + last
        if progress is not None:
            progress(done, count)
        if hits == stop_after:
            break
    p_value = hits / done if hits == stop_after else (1 + hits) / (1 + count)
    bounds = (threshold, float(observed.upper))
    return PermutationTest(p_value, float(observed.value), bounds, torch.cat(values), hits)


def label_test(rows: PooledRows, count: int, seed: int) -> tuple[float, float]:
    """Return the p-value of class proportions alone, and Pearson's chi-square of the sides.

    With weights, the shares of the classes are those of masses. Permutations are those of the joint
    test.

    Args:
        rows: rows of one class each.
        count: permutations.
        seed: of the draws.
    """
    assert rows.labels is not None
    within = torch.nn.functional.one_hot(rows.labels).double().T
    pooled = within @ rows.samples.masses.cpu()

    def statistic(units: Mask) -> Tensor:
        """sum_c (p_c - q_c)^2 / pooled_c times n m / (n + m): Pearson's, of equal weights."""
        ours, others = rows.sides(units, within.device)
        n = (ours > 0).sum(0)
        gaps = (within @ (ours - others)).square() / pooled[:, None]
        return gaps.sum(0) * n * (len(rows) - n) / len(rows)

    observed = float(statistic(rows.unit_in_reference[:, None]))
    least = observed * (1 - EQUAL) - EQUAL
    hits = sum(int((statistic(drawn) >= least).sum()) for drawn in draws(rows, count, seed, 256))
    return (1 + hits) / (1 + count), observed
