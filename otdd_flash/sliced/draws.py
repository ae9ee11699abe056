"""The random draws of a sliced distance, which all datasets share.

A draw consists of a direction theta, uniform on the unit sphere of the features, weights psi,
uniform on the unit sphere of 1 + 5 dimensions, and orders l_1 to l_5 of moments, l_i from the
Poisson distribution of rate i without 0 (Nguyen et al. 2025, Lightspeed geometric dataset distance
via sliced optimal transport). Draws come in chunks with a generator each: draw number k is the same
however many there are, and any chunk can be had without the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MOMENTS = 5
DRAWS_PER_CHUNK = 500
# Of rate 5, a larger one has probability 2e-32.
LARGEST_ORDER = 40


class Draws(NamedTuple):
    """C draws for features of d dimensions, on the CPU.

    Attributes:
        directions: theta (C, d) float64, rows of length 1.
        weights: psi (C, 1 + MOMENTS) float64, rows of length 1.
        orders: l (C, MOMENTS) int64, at least 1.
    """

    directions: Tensor
    weights: Tensor
    orders: Tensor

    def part(self, start: int, end: int) -> Draws:
        return Draws(*(part[start:end] for part in self))

    def to(self, device: torch.device) -> Draws:
        return Draws(*(part.to(device) for part in self))


def chunks_of(projections: int) -> range:
    """The numbers of the chunks that hold so many draws."""
    return range(-(-projections // DRAWS_PER_CHUNK))


def draws_in(chunk: int, projections: int) -> int:
    """How many draws a chunk holds."""
    return min(DRAWS_PER_CHUNK, projections - chunk * DRAWS_PER_CHUNK)


def draw_chunk(chunk: int, projections: int, dim: int, seed: int) -> Draws:
    """The draws of one chunk; the last chunk of `projections` may hold fewer than the others."""
    generator = np.random.default_rng([seed, chunk])
    directions = _on_sphere(generator, dim)
    weights = _on_sphere(generator, 1 + MOMENTS)
    orders = _positive_poisson(generator)
    draws = Draws(*(torch.from_numpy(part) for part in (directions, weights, orders)))
    return draws.part(0, draws_in(chunk, projections))


def draw_all(projections: int, dim: int, seed: int) -> Iterator[Draws]:
    """All chunks, one after the other."""
    for chunk in chunks_of(projections):
        yield draw_chunk(chunk, projections, dim, seed)


def _on_sphere(generator: np.random.Generator, dim: int) -> NDArray[np.float64]:
    normal = generator.standard_normal((DRAWS_PER_CHUNK, dim))
    lengths = np.linalg.norm(normal, axis=1, keepdims=True)
    return np.asarray(normal / lengths)


def _positive_poisson(generator: np.random.Generator) -> NDArray[np.int64]:
    """Column i - 1 is Poisson(i) given that it is not 0, by inversion of the distribution."""
    from scipy.stats import poisson

    uniform = generator.random((DRAWS_PER_CHUNK, MOMENTS))
    orders = np.empty((DRAWS_PER_CHUNK, MOMENTS), dtype=np.int64)
    for place in range(MOMENTS):
        below = poisson.cdf(np.arange(LARGEST_ORDER), place + 1)
        level = below[0] + (1 - below[0]) * uniform[:, place]
        # The first order whose probability of at most itself reaches the level, and not 0.
        orders[:, place] = np.searchsorted(below[1:], level) + 1
    return orders
