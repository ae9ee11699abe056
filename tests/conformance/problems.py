"""Small transport problems of many structures, with their dense cost in float64.

Their tensors are on the CUDA device where there is one: there the problems are large, and the dense
reference of one takes a processor seconds.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import reference
import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAMBDA_X, LAMBDA_Y = 0.7, 0.4
# Where the Huber cost turns from the square of a distance to the distance.
DELTA = 0.8
# Elements of the differences of points that the dense cost makes at once.
DIFFERENCES = 1 << 26


class Case(NamedTuple):
    """What a problem is made of.

    Attributes:
        shape: n, m and the dimension of the points.
        points: a structure, see `_points`.
        classes: of each side; None for one class a point.
        massless: whether a third of the points of each side has no mass.
        epsilon: over the mean cost.
        near: whether potentials are those of a nearly solved problem, or up to e^10 away.
        own: whether the cost is that of the first cloud with itself.
        guess: how far in epsilon a guess is from the softmin; None for no guess.
        matrix: for costs that are given, whether some are negative, or forbid a pair; or "huber"
            for the Huber cost of the distance.
        columns: of what plans are multiplied by.
    """

    shape: tuple[int, int, int] = (33, 70, 3)
    points: str = "random"
    classes: int | None = 1
    massless: bool = False
    epsilon: float = 0.1
    near: bool = True
    own: bool = False
    guess: float | None = None
    matrix: str = ""
    columns: int = 3

    @property
    def name(self) -> str:
        """What differs from other cases."""
        said = ["x".join(map(str, self.shape)), self.points, self.classes or "many", self.epsilon]
        flags = {"massless": self.massless, "near": self.near, "own": self.own}
        said += [name for name, is_set in flags.items() if is_set]
        said += [each for each in (self.guess, self.matrix) if each not in (None, "")]
        return "-".join(map(str, said))


def _points(kind: str, n: int, dim: int, draw: torch.Generator) -> Tensor:
    """A cloud (n, dim) float32 of a structure that a random one does not show."""
    random = torch.randn(n, dim, generator=draw) / math.sqrt(dim)
    match kind:
        case "random":
            return random + 3
        case "duplicates":
            return random[torch.randint(0, -(-n // 4), (n,), generator=draw)]
        case "equal":
            return torch.full((n, dim), 1 / 3)
        case "one direction":
            # Roundings of coordinates are alike, and add up.
            return 1 + torch.rand(n, 1, generator=draw) / 3 + torch.zeros(1, dim)
        case "grey":
            return torch.randint(0, 256, (n, dim), generator=draw) / 255
        case "integers":
            return torch.randint(0, 256, (n, dim), generator=draw).float()
        case "far from 0":
            return (random * 1024).round() / 1024 + 1000
        case "one far point":
            random[-1] += 40
            return random
    raise AssertionError(kind)


class Problem:
    """Two labelled clouds with masses, their cost, and potentials at which operations are asked."""

    def __init__(self, case: Case) -> None:
        self.case = case
        (n, m, dim), draw = case.shape, torch.Generator().manual_seed(sum(case.shape))
        sides = []
        for count in (n, m):
            points = _points(case.points, count, dim, draw)
            classes = count if case.classes is None else case.classes
            labels = torch.randint(0, classes, (count,), generator=draw)
            masses = torch.rand(count, generator=draw, dtype=torch.float64) + 0.1
            if case.massless:
                masses[1::3] = 0
            masses /= masses.sum()
            sides.append((*(part.to(DEVICE) for part in (points, labels, masses)), classes))
        (self.x, self.labels_x, self.a, first), (self.y, self.labels_y, self.b, last) = sides
        # W between all classes; of a cloud with itself its block is symmetric.
        table = torch.rand(first + last, first + last, generator=draw, dtype=torch.float64)
        self.table, self.classes = (table + table.T).to(DEVICE), (first, last)
        if case.own:
            self.y, self.labels_y, self.b, self.classes = self.x, self.labels_x, self.a, (first, 0)
        self.draw = draw

    @property
    def block(self) -> Tensor:
        """W between the classes of both sides of the cost."""
        first, _ = self.classes
        return self.table[:first, :first] if self.case.own else self.table[:first, first:]

    @property
    def sides(self) -> list[tuple[Tensor, Tensor, Tensor, int]]:
        """Points, labels, masses and the number of classes of both clouds, or of the one.

        In the processor's memory, as users give them.
        """
        x = (self.x.cpu(), self.labels_x.cpu(), self.a.cpu(), self.classes[0])
        if self.case.own:
            return [x]
        return [x, (self.y.cpu(), self.labels_y.cpu(), self.b.cpu(), self.classes[1])]

    @cached_property
    def _distances(self) -> Tensor:
        return self.cost_of(self.x, self.y)

    @cached_property
    def cost(self) -> Tensor:
        """C (n, m) float64."""
        cost = self._distances
        match self.case.matrix:
            case "negative":
                return cost.mean() - cost
            case "huber":
                return reference.huber_cost(self.x, self.y, DELTA)
            case "forbidden":
                draw = torch.Generator().manual_seed(1)
                closed = (torch.rand(cost.shape, generator=draw) < 0.3).to(DEVICE)
                # Every point has a partner with mass.
                closed[0] = closed[:, 0] = False
                return cost.where(~closed, math.inf)
        return cost

    @cached_property
    def scale(self) -> float:
        """The largest of the costs."""
        return float(self.cost[self.cost < math.inf].abs().max())

    def cost_of(
        self, x: Tensor, y: Tensor, rows: Any = slice(None), columns: Any = slice(None)
    ) -> Tensor:
        """The cost with other points, of these rows and columns."""
        height = max(1, DIFFERENCES // y.numel())
        block, of_columns = LAMBDA_Y * self.block, self.labels_y[columns]
        parts = zip(x.split(height), self.labels_x[rows].split(height), strict=True)
        found = [reference.dense_cost(z, y, LAMBDA_X, block, own, of_columns) for z, own in parts]
        return torch.cat(found)

    @cached_property
    def epsilon(self) -> float:
        """In units of the cost."""
        return self.case.epsilon * max(float(self.a @ self._distances @ self.b), 0.1)

    @cached_property
    def potentials(self) -> tuple[Tensor, Tensor]:
        """f (n,) and g (m,) that float32 holds; one tensor for a cloud with itself."""
        return self._potentials(self.scale)

    @cached_property
    def potentials_within_reach(self) -> tuple[Tensor, Tensor]:
        """The same, but those of points without mass make no entry of a plan overflow float32."""
        return self._potentials(None)

    @cached_property
    def _noise(self) -> list[Tensor]:
        return [normal(k, self.draw) for k in self.cost.shape]

    def _potentials(self, above: float | None) -> tuple[Tensor, Tensor]:
        """Potentials of points without mass stand above a value, or above what a solve leaves."""
        (n, m), epsilon = self.cost.shape, self.epsilon
        noise = [3 * epsilon * each for each in self._noise]
        f, g = (self.cost.new_zeros(k) for k in (n, m))
        for _ in range(20):
            f = reference.softmin_rows(self.cost, self.b, g, epsilon)
            g = reference.softmin_rows(self.cost.T, self.a, f, epsilon)
            g = (f + g) / 2 if self.case.own else g
        if not self.case.near:
            f, g = f + noise[0], g + noise[1]
            if self.case.massless:
                # Potentials of points without mass do not matter to others.
                f, g = (
                    torch.where(w > 0, p, (p if above is None else above) + 30 * epsilon)
                    for w, p in ((self.a, f), (self.b, g))
                )
        f, g = (potential.float().double() for potential in (f, g))
        return (g, g) if self.case.own else (f, g)

    def values(self, size: int, columns: int) -> Tensor:
        """A matrix (size, columns) to multiply a plan by; numbers of either sign and many sizes."""
        draw = torch.Generator().manual_seed(size + columns)
        sizes = 10.0 ** -(torch.arange(columns, dtype=torch.float64, device=DEVICE) % 10)
        return sizes * normal((size, columns), draw)


def normal(size: int | tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Standard normal numbers, the same on every device."""
    shape = (size,) if isinstance(size, int) else size
    return torch.randn(shape, generator=draw, dtype=torch.float64).to(DEVICE)


@lru_cache(maxsize=64)
def problem_of(case: Case) -> Problem:
    """The problem of a case, made once."""
    return Problem(case)
