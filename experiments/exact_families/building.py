"""From atoms, counts and weights to the clouds that the library sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

import otdd_flash as otdd
from experiments.exact_families.problem import Factor, Floats, Integers, Problem, Side, atom_masses

Random = np.random.Generator
Points = NDArray[np.floating[Any]]
Weights = Literal["equal", "random", "by_atom", "orders"]

ORDERS = ("sorted", "shuffled", "striped")


@dataclass(frozen=True)
class Frame:
    """What every family is asked for.

    Attributes:
        random: where all draws come from.
        n: points of the source, at most; a family may take fewer.
        m: points of the target, likewise.
        device: where the clouds are built.
        most_elements: of (n + m) d, so that memory and time stay bounded.
    """

    random: Random
    n: int
    m: int
    device: str = "cpu"
    most_elements: int = 1 << 22

    def dimension(self, *choices: int) -> int:
        """One of some dimensions, among those that fit."""
        most = self.most_elements // (self.n + self.m)
        return int(self.random.choice([d for d in choices if d <= most] or [min(choices)]))

    def atoms(self, most: int) -> tuple[int, int]:
        """How many atoms the two sides get."""
        first, second = self.random.integers(1, most + 1, 2)
        return min(int(first), self.n), min(int(second), self.m)


def spread_index(random: Random, count: int, atoms: int, *, even: bool = False) -> Integers:
    """The atom of every one of `count` points, each atom at least once, in a random order type."""
    if even:
        counts = np.full(atoms, count // atoms)
    else:
        shares = random.dirichlet(np.full(atoms, random.choice([0.3, 1.0, 10.0])))
        counts = 1 + np.floor(shares * (count - atoms)).astype(np.int64)
    counts[0] += count - counts.sum()
    index = np.repeat(np.arange(atoms), counts)
    match random.choice(ORDERS):
        case "shuffled":
            random.shuffle(index)
        case "striped":
            ranks = np.concatenate([np.arange(c) / c for c in counts])
            index = index[np.argsort(ranks, kind="stable")]
    return index


def draw_weights(random: Random, index: Integers, kind: Weights) -> Floats | None:
    """Weights of points, or None for equal ones; some are 0 at times."""
    if kind == "equal":
        return None
    atoms = int(index.max()) + 1
    if kind == "random":
        weights = random.uniform(0.5, 1.5, len(index))
    elif kind == "by_atom":
        weights = random.uniform(0.05, 1, atoms)[index]
    else:
        spread = random.uniform(2, 10)
        weights = 10 ** (random.uniform(-spread, 0, atoms)[index])
        if random.random() < 0.5:
            weights *= 10 ** random.uniform(-4, 0, len(index))
    if random.random() < 0.2:
        weights[random.random(len(index)) < 0.2] = 0
        weights[int(random.integers(len(index)))] = 1.0
    return weights


def any_weights(random: Random) -> Weights:
    """Mostly equal ones, as most users have."""
    kinds: tuple[Weights, ...] = ("equal", "random", "by_atom", "orders")
    return kinds[int(random.choice(4, p=[0.55, 0.15, 0.2, 0.1]))]


def collapsed_side(
    points: Points,
    index: Integers,
    weights: Floats | None,
    *,
    classes: Integers | None = None,
    class_total: int = 1,
    device: str = "cpu",
    features: torch.Tensor | None = None,
) -> Side:
    """A cloud whose points are copies of a few atoms.

    `features` replaces the copies where the cost does not read them (lambda_x = 0).
    """
    where = torch.from_numpy(index).to(device)
    if features is None:
        features = torch.from_numpy(points).to(device)[where]
    labels = None if classes is None else torch.from_numpy(classes).to(device)[where]
    names = () if classes is None else tuple(f"class {k}" for k in range(class_total))
    samples = otdd.LabeledSamples(
        features, labels, names, None if weights is None else torch.from_numpy(weights)
    )
    masses = samples.masses.cpu().numpy()
    added = atom_masses(masses, index, len(points))
    # Ten units for what adding up costs.
    deviation = float(abs(added.sum() - 1)) + 1e-18
    exact = np.asarray(points, dtype=np.float64)
    return Side(samples, (Factor(exact, classes, index, added),), deviation)


def symmetric_table(random: Random, classes: int, scale: float) -> Floats:
    """Distances (V, V) between classes, 0 on the diagonal."""
    table = scale * random.uniform(0, 1, (classes, classes))
    table = (table + table.T) / 2
    np.fill_diagonal(table, 0)
    return table


def mirrored(problem: Problem, random: Random | None) -> Problem:
    """The source against itself: the same object, or with `random` a shuffled copy."""
    x, table = problem.x, problem.table
    if table is not None:
        own = table[: x.samples.class_total, : x.samples.class_total]
        table = np.block([[own, own], [own, own]])
    y = x if random is None else _shuffled(x, random)
    return Problem(problem.family, x, y, table, problem.cost)


def _shuffled(side: Side, random: Random) -> Side:
    order = random.permutation(len(side.samples))
    rows = torch.from_numpy(order).to(side.samples.features.device)
    factors = tuple(
        Factor(part.points, part.classes, part.index[order], part.masses) for part in side.factors
    )
    # `take` keeps weights that add up to 1.
    return Side(side.samples.take(rows), factors, side.deviation)
