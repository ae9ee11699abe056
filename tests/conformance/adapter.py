"""Every way of holding a cost, behind the operations that the conformance tests are about.

The only file of these tests that knows how operators are built and how their operations are asked
for. What is asked and answered is float64 on the device of the problems.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from problems import DEVICE, LAMBDA_X, LAMBDA_Y, Case, Problem, problem_of
from rank_pool import pool
from torch import Tensor

from otdd_flash.cost import points as cost_points
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.facts import CostFacts
from otdd_flash.cost.ground import GroundCost
from otdd_flash.cost.points import equal_masses
from otdd_flash.distributed.ranks import Ranks, led
from otdd_flash.features.file_features import features_file
from otdd_flash.kernels.passes import plan_blocks, symmetric_step
from otdd_flash.operators import (
    base,
    blocked,
    comparison,
    given_costs,
    point_scores,
    sharing,
    torch_operator,
    triton_operator,
)
from otdd_flash.operators.base import EvaluatedPlan, Marginals, StoredPlan
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.given_costs import CostBlocks
from otdd_flash.operators.triton_operator import KernelOperator
from otdd_flash.operators.triton_plans import ExactFusedPlan, FusedPlan
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.matrix_comparison import MatrixComparison

# Of the points that are read from files.
FOLDER = TemporaryDirectory()

# So small that small problems are cut into several blocks and tiles, and that kernels use guesses
# and symmetry.
SMALL: list[tuple[Any, str, Any]] = [
    (point_scores, "BLOCK_ELEMENTS_CPU", 900),
    (torch_operator, "TILE_ELEMENTS_CPU", 300),
    (given_costs, "TILE_ELEMENTS_CPU", 300),
    (given_costs, "EXACT_ELEMENTS_CPU", 150),
    (given_costs, "BLOCK_ENTRIES_CPU", 500),
    (cost_points, "CHUNK_ELEMENTS_CPU", 60),
    (blocked, "LEAST_POINTS", 30),
    (triton_operator, "MANY_SCORES", 1),
    (base, "BLOCK_CPU", 200),
    (base, "FEW_COLUMNS", 8),
    (point_scores, "LEAST_ON_LATTICE", 20),
    (point_scores, "TILE_CPU", 32),
    (point_scores, "LEAST_TILE", 16),
    (plan_blocks, "BLOCK_HEIGHT", 256),
    (plan_blocks, "BLOCK_WIDTH", 256),
    (symmetric_step, "STRIPE_BYTES", 1),
]


class Plan:
    """A plan: `rows` P 1, `columns` P^T 1, `times` P V or P^T U, float64.

    Products with pairs are those with P o (A B^T + C D^T).

    Attributes:
        cost: that it is of, (n, m) float64.
        precision: a key of `PRODUCTS`.
        weighs: whether its entries can be weighted.
    """

    def __init__(self, products: Any, cost: Tensor, precision: str, *, weighs: bool = True) -> None:
        self._products, self.cost, self.precision, self.weighs = products, cost, precision, weighs

    @property
    def rows(self) -> Tensor:
        return _double(self._products.rows)

    @property
    def columns(self) -> Tensor:
        return _double(self._products.columns)

    def times(
        self, values: Tensor, *pairs: Sequence[tuple[Tensor, Tensor]], transposed: bool = False
    ) -> Tensor:
        return _double(self._products.times(values, *pairs, transposed=transposed))


class Held:
    """A cost with masses, held by one of today's operators.

    Attributes:
        cost: the matrix (n, m) float64 that softmins are of.
        exact: the one that certificates are of.
        precision: a key of `COSTS`.
    """

    def __init__(
        self, given: Problem, operator: Any, precision: str, exact: Tensor, cost: Tensor
    ) -> None:
        self._given, self._operator, self.precision = given, operator, precision
        self.exact, self.cost = exact, cost

    @property
    def a(self) -> Tensor:
        """Masses of the rows."""
        return _double(self._operator.a)

    @property
    def b(self) -> Tensor:
        """Masses of the columns."""
        return _double(self._operator.b)

    @property
    def facts(self) -> CostFacts:
        """What is known of the cost."""
        return self._operator.costs

    def softmin_rows(self, g: Tensor, epsilon: float, guess: Tensor | None = None) -> Tensor:
        """-epsilon log sum_j b_j exp((g_j - C_ij) / epsilon)."""
        return _double(self._operator.softmin_rows(self._in(g), epsilon, self._in(guess)))

    def softmin_columns(self, f: Tensor, epsilon: float, guess: Tensor | None = None) -> Tensor:
        """-epsilon log sum_i a_i exp((f_i - C_ij) / epsilon)."""
        return _double(self._operator.softmin_columns(self._in(f), epsilon, self._in(guess)))

    def softmin_self(self, f: Tensor, epsilon: float) -> Tensor:
        """The softmin of rows of a cloud with itself, at its only potential."""
        return _double(self._operator.softmin_self(self._in(f), epsilon))

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: float, *, accurate: bool = True
    ) -> Marginals:
        """Sums of the plan of f and g, with what they may be off by."""
        found = self._operator.marginals(f, g, epsilon, accurate=accurate)
        return Marginals(*map(_double, found[:4]), *found[4:])

    def expected_costs(self, masses: Tensor) -> Tensor:
        """sum_j C_ij q_j (n,) for masses q (m,)."""
        return _double(self._operator.expected_costs(masses))

    def own_costs(self) -> Tensor:
        """C_ii (n,), which the marginals of one potential have with them."""
        f = self._in(torch.zeros_like(self.a))
        return _double(self._operator.marginals(f, None, self._given.epsilon).own_costs)

    def plans(self, f: Tensor, g: Tensor, epsilon: float) -> dict[str, Plan]:
        """The plan of f and g, by every kind of products that there is."""
        # Of a cloud with itself they are one.
        at = self._in(f), None if self._given.case.own else self._in(g), epsilon
        plan, without_memory = self._operator.plan(*at), self._operator.plan(*at, 0)
        found: dict[str, Any] = {
            "evaluated": plan,
            "prepared": plan.prepared,
            "prepared without memory": without_memory.prepared,
            "rounded": plan.quick,
            "rounded without memory": without_memory.quick,
        }
        kinds = {type(products): name for name, products in reversed(found.items())}
        return {name: self._plan(found[name]) for name in found if name in kinds.values()}

    def _plan(self, products: Any) -> Plan:
        match products:
            case StoredPlan():
                return Plan(products, self.exact, self.precision)
            case EvaluatedPlan():
                return Plan(products, self.cost, self.precision)
            case ExactFusedPlan():
                return Plan(products, self.cost, "high")
            case FusedPlan():
                # Of points that are rounded once.
                dim = self._given.x.shape[1]
                points = (side.rounded(1)[:, :dim] for side in self._operator.packed)
                return Plan(products, self._given.cost_of(*points), "fast", weighs=False)
        return Plan(products, self.cost, "fast", weighs=False)

    def part(self, rows: Tensor, columns: Tensor) -> Held:
        """The cost between some rows (k,) and columns (l,), of equal masses."""
        part = self._operator.sample(rows, columns, (equal_masses(rows), equal_masses(columns)))
        exact, cost = (cost[rows][:, columns] for cost in (self.exact, self.cost))
        if isinstance(part, KernelOperator):
            # Its points are rounded on a scale of their own.
            cost = self._given.cost_of(*part.rounded_points(), rows, columns)
        return Held(self._given, part, self.precision, exact, cost)

    def softmin_over(self, columns: Tensor, g: Tensor, epsilon: float) -> Tensor:
        """The softmin of all rows over some columns (l,) with their masses."""
        return _double(self._operator.softmin_over(columns, self._in(g), epsilon))

    def refined(self) -> Held:
        """The same cost to the full accuracy of the potentials."""
        found = self._operator.refined
        if found is self._operator:
            return self
        return Held(self._given, found, "high", self.exact, self.exact)

    def _in(self, potential: Tensor | None) -> Any:
        return None if potential is None else potential.to(self._operator.passes.dtype)


def _double(values: Tensor) -> Tensor:
    return values.double()


def _moved(found: Any, device: torch.device) -> Any:
    """Tensors, and tuples of them, on a device."""
    if isinstance(found, Tensor):
        return found.to(device)
    if isinstance(found, Marginals):
        return Marginals(*(_moved(each, device) for each in found))
    return tuple(_moved(each, device) for each in found) if type(found) is tuple else found


class Way(NamedTuple):
    """A way of holding a cost.

    Attributes:
        build: makes it for a problem.
        precision: a key of `COSTS`.
        options: of the computation.
    """

    build: Callable[[Problem, Way], Held]
    precision: str
    options: dict[str, Any]


def _operator_of_points(given: Problem, options: dict[str, Any], folder: Path | None = None) -> Any:
    samples = []
    for number, (points, labels, masses, classes) in enumerate(given.sides):
        features = points
        if folder is not None:
            path = folder / f"{hash(given.case)}.{number}.npy"
            if not path.exists():
                np.save(path, points.numpy())
            features = features_file(path)
        names = tuple(map(str, range(classes)))
        samples.append(LabeledSamples(features, labels, names, masses))
    own = given.case.own
    whole = Comparison.between(
        samples[0],
        samples[-1],
        given.epsilon,
        (given.block.repeat(2, 2) if own else given.table).cpu(),
        GroundCost(LAMBDA_X, LAMBDA_Y),
        ComputeOptions(str(DEVICE), **options),
    )
    return whole.operator("xx" if own else "xy")


def _of_points(given: Problem, way: Way) -> Held:
    operator, cost = _operator_of_points(given, way.options), given.cost
    if isinstance(operator, KernelOperator):
        # An iteration is exact for points that are rounded.
        cost = given.cost_of(*operator.rounded_points())
    return Held(given, operator, way.precision, given.cost, cost)


def _of_files(given: Problem, way: Way) -> Held:
    """Points that are read from a file in every pass, as memory has room for few."""
    before, comparison.ASSUMED_FREE = comparison.ASSUMED_FREE, 0
    try:
        options = {"memory_budget": 1} | way.options
        operator = _operator_of_points(given, options, Path(FOLDER.name))
    finally:
        comparison.ASSUMED_FREE = before
    assert "points streamed in blocks" in operator.passes.backend
    return Held(given, operator, way.precision, given.cost, given.cost)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda costs: costs,
    "columns": lambda costs: costs.T.contiguous().T,
    "steps": lambda costs: costs.repeat_interleave(2, 1)[:, ::2],
}


def _of_a_matrix(given: Problem, way: Way, dtype: torch.dtype, layout: str = "rows") -> Held:
    costs = given.cost.to(dtype)
    rounded, costs = costs.double(), LAYOUTS[layout](costs)
    compute = ComputeOptions(str(DEVICE), **way.options)
    self_costs = (costs, costs) if given.case.own else None
    whole = MatrixComparison.prepare(costs, given.a, given.b, compute, self_costs)
    operator = whole.operator("xx" if given.case.own else "xy")
    return Held(given, operator, way.precision, rounded, rounded)


def _of_a_function(given: Problem, way: Way) -> Held:
    blocks = CostBlocks(*given.cost.shape, lambda rows, columns: given.cost[rows, columns])
    whole = MatrixComparison.prepare(
        blocks, given.a, given.b, ComputeOptions(str(DEVICE), memory_budget=0)
    )
    return Held(given, whole.operator("xy"), way.precision, given.cost, given.cost)


# Operations that ranks answer as they are asked.
ASKED = ("softmin_rows", "softmin_columns", "softmin_self", "softmin_over")
ASKED += ("expected_costs", "own_costs")


class HeldByRanks(Held):
    """A cost that two ranks share; every operation is asked of both, who have to agree."""

    def __init__(self, given: Problem, way: Way) -> None:
        super().__init__(given, None, way.precision, given.cost, given.cost)
        self._ask = partial(self._answer, given.case, way)
        for name in ASKED:
            setattr(self, name, partial(self._ask, name))

    a = property(lambda self: self._given.a)
    b = property(lambda self: self._given.b)
    facts = property(lambda self: self._ask("facts"))

    def _answer(self, case: Case, way: Way, name: str, *arguments: Any) -> Any:
        # Processes exchange what is in the processor's memory.
        answers = pool(2).run(_asked, case, way, name, _moved(arguments, torch.device("cpu")))
        for each in answers:
            if isinstance(each, Exception):
                raise each
        first, other = (each if isinstance(each, tuple) else (each,) for each in answers)
        for one, two in zip(first, other, strict=True):
            same = torch.equal(one, two) if isinstance(one, Tensor) else one == two
            assert same, "ranks disagree"
        return _moved(answers[0], DEVICE)

    def marginals(
        self, f: Tensor, g: Tensor | None, epsilon: float, *, accurate: bool = True
    ) -> Marginals:
        return self._ask("marginals", f, g, epsilon)

    def plans(self, f: Tensor, g: Tensor, epsilon: float) -> dict[str, Plan]:
        ask, at = partial(self._ask, "product"), (f, g, epsilon)
        products = SimpleNamespace(
            rows=ask("rows", *at),
            columns=ask("columns", *at),
            times=lambda *given, transposed: ask("times", *at, transposed, *given),
        )
        return {"evaluated": Plan(products, self.cost, self.precision)}

    def refined(self) -> Held:
        return self


def _asked(case: Case, way: Way, name: str, arguments: tuple[Any, ...]) -> Any:
    """What a rank finds; in a ring no rank has memory for all points."""
    arguments = _moved(arguments, DEVICE)
    options = dict(way.options)
    in_a_ring = options.pop("ring", False)
    before = sharing.ASSUMED_FREE
    sharing.ASSUMED_FREE = 0 if in_a_ring else before

    def work(ranks: Ranks) -> Any:
        problem = problem_of(case)
        operator = _operator_of_points(problem, options | {"group": ranks})
        assert operator.passes.backend.endswith("in a ring") == in_a_ring
        held = Held(problem, operator, way.precision, problem.cost, problem.cost)
        if name == "facts":
            return held.facts
        if name == "product":
            kind, f, g, epsilon, *given = arguments
            found = getattr(operator.plan(held._in(f), held._in(g), epsilon), kind)
            return _double(found(*given[1:], transposed=given[0]) if given else found)
        return getattr(held, name)(*arguments)

    try:
        return _moved(led(work), torch.device("cpu"))
    finally:
        sharing.ASSUMED_FREE = before


TORCH, DOUBLE, TRITON = {"backend": "torch"}, {"precision": "double"}, {"backend": "triton"}
FAST, HIGH = ({"precision": precision} for precision in ("fast", "high"))
KEPT, ANEW = {"memory_budget": "1GiB"}, {"memory_budget": 0}

POINTS = {
    "stored": Way(_of_points, "single", TORCH | KEPT),
    "stored, double": Way(_of_points, "double", DOUBLE | KEPT),
    "streamed": Way(_of_points, "single", TORCH | ANEW),
    "streamed, double": Way(_of_points, "double", DOUBLE | ANEW),
}
FILES = {
    "files": Way(_of_files, "single", TORCH),
    "files, double": Way(_of_files, "double", DOUBLE),
}
MATRICES = {
    "matrix": Way(partial(_of_a_matrix, dtype=torch.float32), "single", TORCH),
    "matrix, double": Way(
        partial(_of_a_matrix, dtype=torch.float64, layout="columns"), "double", {}
    ),
    "matrix, bfloat16": Way(
        partial(_of_a_matrix, dtype=torch.bfloat16, layout="steps"), "single", TORCH
    ),
    "function": Way(_of_a_function, "double", {}),
}
# In Triton's interpreter, or on a GPU.
KERNELS = {
    "fast": Way(_of_points, "fast", TRITON | FAST),
    "high": Way(_of_points, "high", TRITON | HIGH),
}
MATRIX_KERNELS = {
    "matrix in rows": Way(partial(_of_a_matrix, dtype=torch.float32), "single", TRITON),
    "matrix in columns": Way(
        partial(_of_a_matrix, dtype=torch.bfloat16, layout="columns"), "single", TRITON
    ),
}
FILE_KERNELS = {
    "files, fast": Way(_of_files, "blocks", TRITON | FAST),
    "files, high": Way(_of_files, "high", TRITON | HIGH),
}
RANKS = {
    "ranks, stored": Way(HeldByRanks, "single", TORCH | KEPT),
    "ranks, streamed": Way(HeldByRanks, "double", DOUBLE | ANEW),
    "ranks in a ring": Way(HeldByRanks, "double", DOUBLE | ANEW | {"ring": True}),
}
RANK_KERNELS = {
    "ranks, high": Way(HeldByRanks, "high", TRITON | HIGH),
    "ranks in a ring, fast": Way(HeldByRanks, "blocks", TRITON | FAST | ANEW | {"ring": True}),
    "ranks in a ring, high": Way(HeldByRanks, "high", TRITON | HIGH | ANEW | {"ring": True}),
}
WAYS = POINTS | FILES | MATRICES | KERNELS | MATRIX_KERNELS | FILE_KERNELS | RANKS | RANK_KERNELS


def held(name: str, given: Problem) -> Held:
    """The cost of a problem, held in a way."""
    way = WAYS[name]
    return way.build(given, way)
