"""Ours and plain alternating updates, and how any method is driven.

A method is one of three kinds:

- `Chain`: updates that go on from where they are, so that one run shows the whole way;
- `Budgets`: a number of iterations is all that it takes, so that every point is a run of its own;
- `Settings`: a few runs, each with a setting that decides when it ends.

All take the clouds as they are on the device. Packing, centring, norms and dense costs are a part
of every run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

import otdd_flash as otdd
from experiments.bench_divergence import marginal_error
from experiments.convergence.problem import COST, CrossTerm
from otdd_flash.engine.recording import STEPS, Repeated
from otdd_flash.operators.base import Operator

TOLERANCES = (0.3, 0.1, 0.03, 0.01, 3e-3, 1e-3)


class Solved(NamedTuple):
    """Potentials f (n,) and g (m,) in our convention, and the sweeps over n x m scores so far.

    `bounds` are those that the method itself proves, if it does.
    """

    f: Tensor
    g: Tensor
    passes: float
    bounds: tuple[float, float] | None = None


class Chain(Protocol):
    """Updates that go on from where they are."""

    def begin(self) -> None:
        """Prepare a run from the clouds."""
        ...

    def advance(self, steps: int) -> Solved:
        """Take some steps, two passes each."""
        ...

    def own_error(self, f: Tensor, g: Tensor) -> float | None:
        """The marginal error on the points as the method rounds them, or None if it does not."""
        ...


@dataclass(frozen=True)
class Budgets:
    """Runs of more and more iterations, two passes each, until one is enough."""

    solve: Callable[[int], Solved]
    iterations: Sequence[int]
    own_error: Callable[[Tensor, Tensor], float | None] = lambda f, g: None


class Run(NamedTuple):
    """One run of a setting; `passes` where they are known before it."""

    setting: dict[str, Any]
    solve: Callable[[], Solved]
    passes: int | None = None


@dataclass(frozen=True)
class Settings:
    """Runs in the order of their time."""

    runs: Sequence[Run]


def ours(term: CrossTerm) -> Settings:
    """Certified solves to tighter and tighter tolerances; everything counts."""

    def solve(tolerance: float) -> Solved:
        with warnings.catch_warnings():
            warnings.simplefilter("error", otdd.NotConvergedWarning)
            found = otdd.sinkhorn(
                term.source,
                term.target,
                epsilon=term.epsilon,
                class_table=term.table,
                cost=COST,
                options=otdd.Converged(tolerance),
                compute=term.compute,
            )
        return Solved(found.f, found.g, found.passes, found.bounds)

    return Settings(
        [
            Run({"tolerance": tolerance}, lambda tolerance=tolerance: solve(tolerance))  # type: ignore[misc]
            for tolerance in TOLERANCES
        ]
    )


class Plain:
    """Alternating updates from zero with our kernels; looks cost it nothing.

    Columns first, so that rows are exact in the end, as in POT, OTT-JAX and ours: on these pairs
    the other order takes up to a third more passes to the same error.
    """

    def __init__(self, term: CrossTerm) -> None:
        self.term = term
        self.operator: Operator
        self.repeated: Repeated
        self.passes = 0

    def begin(self) -> None:
        """Pack the points, and start from zero."""
        self.operator = operator = self.term.operator()
        self.f, self.g = (
            torch.zeros_like(side, dtype=operator.costs.dtype) for side in (operator.a, operator.b)
        )
        # Recorded steps read it from the device.
        recorded = operator.passes.recorded
        self.epsilon = operator.a.new_tensor(self.term.epsilon) if recorded else self.term.epsilon
        self.repeated = Repeated()
        self.passes = 0

    def step(self) -> None:
        """One iteration in place: g <- T'(f), f <- T(g)."""
        self.g.copy_(self.operator.softmin_columns(self.f, self.epsilon, self.g))
        self.f.copy_(self.operator.softmin_rows(self.g, self.epsilon, self.f))

    def advance(self, steps: int) -> Solved:
        """Update both potentials, some times; a recording takes two steps at once."""
        pairs = steps // STEPS if self.operator.passes.recorded else 0
        for _ in range(pairs):
            self.repeated.run(self.step)
        for _ in range(steps - STEPS * pairs):
            self.step()
        self.passes += 2 * steps
        return Solved(self.f.clone(), self.g.clone(), self.passes)

    def own_error(self, f: Tensor, g: Tensor) -> float | None:
        """On float16 points in Triton."""
        if self.operator.refined is self.operator:
            return None
        return marginal_error(self.operator, f, g, self.term.epsilon)
