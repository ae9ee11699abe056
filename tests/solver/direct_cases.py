"""Small problems whose linear systems are decomposed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from otdd_flash import CGOptions, Converged, NotConvergedWarning

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPSILON, CLASSES = 0.6, 3
EXACT, TIGHT = Converged(tolerance=1e-12), CGOptions(tolerance=1e-12)

# One iteration is not enough for anything: what converges was solved without.
ONE = CGOptions(tolerance=1e-9, max_iterations=1)


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
