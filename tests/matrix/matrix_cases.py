"""Cost matrices of many kinds, float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def random(n: int, m: int, draw: torch.Generator) -> Tensor:
    return torch.rand(n, m, generator=draw, dtype=torch.float64)


def integers(n: int, m: int, draw: torch.Generator) -> Tensor:
    return torch.randint(0, 9, (n, m), generator=draw).double()


def manhattan(n: int, m: int, draw: torch.Generator) -> Tensor:
    x, y = random(n, 3, draw), random(m, 3, draw)
    return torch.cdist(x, y, p=1)


def negative(n: int, m: int, draw: torch.Generator) -> Tensor:
    return -random(n, m, draw) - 0.5


def constant(n: int, m: int, draw: torch.Generator) -> Tensor:
    return torch.full((n, m), -3.0, dtype=torch.float64)


KINDS: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "random": random,
    "integers": integers,
    "manhattan": manhattan,
    "negative": negative,
    "constant": constant,
}


def masses(size: int, draw: torch.Generator, *, zero: bool = False) -> Tensor:
    """Unequal masses (size,) float64, one of them 0 if there are others."""
    found = torch.rand(size, generator=draw, dtype=torch.float64) + 0.1
    if zero and size > 2:
        found[size // 2] = 0
    return found / found.sum()


def uniform(size: int) -> Tensor:
    return torch.full((size,), 1 / size, dtype=torch.float64)


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seed) % 2**31)
