"""How many bytes an operator takes on its device, from the size of its cost alone.

What is counted is allocated for certain, and padding, potentials and small tables are not: an
operator that is refused for its footprint would not have fitted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from otdd_flash.operators.point_scores import BLOCK_ELEMENTS_CPU, BLOCK_ELEMENTS_GPU
from otdd_flash.operators.torch_operator import TILE_ELEMENTS_CPU, TILE_ELEMENTS_GPU


class CostSize(NamedTuple):
    """The size of a cost between labelled clouds.

    Attributes:
        n: points of the rows.
        m: points of the columns.
        dim: of the points.
        classes: of the rows.
        symmetric: whether both sides are one cloud.
    """

    n: int
    m: int
    dim: int
    classes: int
    symmetric: bool

    @property
    def points(self) -> int:
        """Points that are held, once each."""
        return self.n if self.symmetric else self.n + self.m

    def __str__(self) -> str:
        return f"{self.n:,} x {self.m:,} points of dimension {self.dim:,}"


def kernel_bytes(size: CostSize) -> int:
    """Bytes of a `KernelOperator` and of the pass that takes most.

    Two float16 parts of every coordinate, and a block of the plan, which points of few coordinates
    do without, or for a self term the sums of each block of rows.
    """
    # Triton, which these need, is not everywhere.
    from otdd_flash.kernels.passes.fused_product import HELD_COORDINATES
    from otdd_flash.kernels.passes.plan_blocks import BLOCK_HEIGHT, BLOCK_WIDTH
    from otdd_flash.kernels.passes.symmetric_step import STRIPE_BYTES
    from otdd_flash.kernels.tiling import BLOCK_ROWS

    n, m = size.n, size.m
    coordinates = 2 * 2 * size.points * (-(-size.dim // 8) * 8)
    in_blocks = size.dim > HELD_COORDINATES
    plan = 2 * min(n, BLOCK_HEIGHT) * min(m, BLOCK_WIDTH) if in_blocks else 0
    sums = min(4 * (n // BLOCK_ROWS) * n, STRIPE_BYTES) if size.symmetric else 0
    return coordinates + max(plan, sums)


def streamed_bytes(size: CostSize, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes of a `streamed_operator`: centred points, the bias table, a block and a tile of scores.

    The bias table is made in float64, of two terms, before there are any scores.
    """
    cpu = device.type == "cpu"
    scores, bias = size.n * size.m, size.classes * size.m
    block = min(scores, BLOCK_ELEMENTS_CPU if cpu else BLOCK_ELEMENTS_GPU)
    tile = min(scores, TILE_ELEMENTS_CPU if cpu else TILE_ELEMENTS_GPU)
    points = dtype.itemsize * size.points * size.dim
    return points + max(2 * 8 * bias, dtype.itemsize * (bias + block + tile))
