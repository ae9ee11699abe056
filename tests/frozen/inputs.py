"""Inputs of frozen cases, by integer arithmetic and exact divisions: equal bits on every processor.

Random normal numbers of PyTorch are not: they are computed by logarithms and cosines of as many
lanes as the processor has.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import otdd_flash as otdd


def bits(count: int, seed: int) -> np.ndarray:
    """So many integers in [0, 2^64), by splitmix64 (Steele, Lea & Flood 2014)."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed * 1_000_003)
        z *= np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Sums of four uniform integers, scaled to a deviation of 1.15: multiples of 2^-15 below 4."""
    word = bits(int(np.prod(shape)), seed)
    total = sum(
        ((word >> np.uint64(16 * k)) & np.uint64(0xFFFF)).astype(np.int64) for k in range(4)
    )
    return torch.from_numpy((total - (1 << 17)) / float(1 << 15)).to(dtype).reshape(shape)


def cloud(n: int, d: int = 3, *, seed: int = 0, shift: float = 0.0) -> Tensor:
    """Points (n, d) float64 about (shift, ..., shift)."""
    return numbers(n, d, seed=seed) + shift


def masses(n: int, *, zero: int | None = None) -> Tensor:
    """Masses (n,) in the ratios 1 to 5, one of them 0 if asked for."""
    weights = (1 + torch.arange(n) % 5).double()
    if zero is not None:
        weights[zero] = 0
    return weights / weights.sum()


def labelled(
    n: int,
    d: int = 3,
    *,
    classes: int = 3,
    seed: int = 0,
    shift: float = 0.0,
    weights: bool = False,
) -> otdd.LabeledSamples:
    """Classes of different centres and spreads, the rows of a class not side by side."""
    labels = torch.arange(n) % classes
    spread = (1 + (labels % 2)[:, None]) / 2
    centre = ((labels[:, None] * 5 + torch.arange(d) * 3) % 7 - 3) / 2
    features = cloud(n, d, seed=seed) * spread + centre + shift
    return otdd.LabeledSamples(
        features, labels, tuple("abcdef"[:classes]), masses(n) if weights else None
    )
