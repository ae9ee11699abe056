"""Small problems whose derivatives are checked, and dense products with their Hessians."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

import otdd_flash as otdd
from otdd_flash import CGOptions, Converged, NotConvergedWarning
from otdd_flash.derivatives import plan_system
from otdd_flash.derivatives.hessian import DivergenceCurvature
from otdd_flash.operators.point_scores import StoredScores

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPSILON, CLASSES = 1.0, 3
EXACT, TIGHT = Converged(tolerance=1e-12), CGOptions(tolerance=1e-12)
EARLY = Converged(tolerance=1e-12, max_iterations=2)

# One iteration is not enough for anything: what converges was solved without.
ONE = CGOptions(tolerance=1e-9, max_iterations=1)

# How linear systems are solved: decomposed, or by iterations with a plan that is held or is not.
WAYS = ("decomposed", "iterations", "streamed")


def solve_by(way: str, monkeypatch: pytest.MonkeyPatch) -> CGOptions:
    """Have systems solved in one of these ways; the options with which they then converge."""
    if way == "decomposed":
        return ONE
    monkeypatch.setattr(plan_system, "MOST_POINTS", 0)
    if way == "streamed":
        monkeypatch.setattr(StoredScores, "holds_plans", False)
    return TIGHT


def on_the_device(given: Any) -> Any:
    """Return tensors of a tuple or of a dictionary on the device, with all else."""
    if isinstance(given, dict):
        return dict(zip(given, on_the_device(tuple(given.values())), strict=True))
    return tuple(part.to(DEVICE) if isinstance(part, Tensor) else part for part in given)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw, dtype=torch.float64)


def masses(n: int, seed: int, *, zeros: bool = False) -> Tensor:
    found = drawn(n, seed=seed).sigmoid() + 0.1
    if zeros and n > 2:
        found[:: n // 2] = 0
    return found / found.sum()


def clouds(n: int, m: int, d: int = 3) -> tuple[Tensor, Tensor]:
    return drawn(n, d, seed=1), drawn(m, d, seed=2) + 0.3


def labelled(n: int, m: int) -> dict[str, Any]:
    means = drawn(2 * CLASSES, 2, seed=3)
    return {
        "labels_x": torch.arange(n) % CLASSES,
        "labels_y": torch.arange(m) % CLASSES,
        "class_table": torch.cdist(means, means).square(),
        "class_totals": (CLASSES, CLASSES),
    }


def quiet(call: Callable[..., Any], *given: Any, **settings: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        return call(*given, **{"epsilon": EPSILON, "options": EXACT, "cg": TIGHT} | settings)


class DenseHessian:
    """A Hessian at the potentials of a solved divergence, from dense float64 plans.

    Args:
        terms: of the divergence.
        x, y: points.
        a, b: masses, None where they are equal.
        unbalanced: penalties of both sides, None for exact ones.
        options: with `labels_x`, `labels_y` and `class_table`, if there are labels.
    """

    def __init__(
        self,
        terms: dict[str, Any],
        x: Tensor,
        y: Tensor,
        a: Tensor | None = None,
        b: Tensor | None = None,
        *,
        epsilon: float = EPSILON,
        lambda_x: float = 0.5,
        unbalanced: tuple[float | None, float | None] = (None, None),
        **options: Any,
    ) -> None:
        self._points, self._epsilon, self._lambda_x = (x.double(), y.double()), epsilon, lambda_x
        one_side, other = (math.inf if rho is None else rho for rho in unbalanced)
        self._rho, self.plans = (one_side, other), {}
        sides = dict(zip("xy", zip(self._points, (a, b), strict=True), strict=True))
        for name, term in terms.items():
            (one, of_one), (two, of_two) = (sides[key] for key in name)
            classes: tuple[Tensor, ...] = ()
            if "class_table" in options:
                rows, columns = (
                    slice(0, CLASSES) if key == "x" else slice(CLASSES, None) for key in name
                )
                labels = (options[f"labels_{key}"] for key in name)
                classes = (0.5 * options["class_table"][rows, columns], *labels)
            cost = reference.dense_cost(one, two, lambda_x, *classes)
            weights = (
                torch.full_like(points[:, 0], 1 / len(points)) if side is None else side
                for points, side in ((one, of_one), (two, of_two))
            )
            self.plans[name] = reference.plan(cost, *weights, term.f, term.g, epsilon)

    def along(self, v: Tensor, w: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The products by x and y with one direction, and its curvature."""
        along = v.double(), torch.zeros_like(self._points[1]) if w is None else w.double()
        how = self._epsilon, self._lambda_x, self._rho
        products = list(reference.hessian_product(self.plans["xy"], self._points, along, *how))
        for k, name in enumerate(("xx", "yy")):
            if name in self.plans:
                own = (self.plans[name], self._points[k], along[k])
                products[k] = products[k] - reference.own_hessian_product(*own, *how) / 2
        energy = sum((part * product).sum() for part, product in zip(along, products, strict=True))
        return products[0], products[1], torch.as_tensor(energy)


def of_both(found: otdd.SinkhornHessian, cg: CGOptions = TIGHT) -> Any:
    """Products along directions of both clouds."""
    return DivergenceCurvature(found._comparison, found.divergence, cg).along


def close(found: Tensor, expected: Tensor, atol: float) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=0, atol=atol)
