"""The choice of an operator for the cost between two labelled clouds, and its least memory.

`build_operator` is called by `Comparison.operator` if there is one process, by `sharing` on every
rank, and by operators over blocks for each pair of blocks. Before any work `comparison` asks
`operator_bytes` whether an operator fits the device, and else refuses it or streams its points.

Memory is counted from below, without padded rows, potentials and small tables: an operator that is
refused for its size would not have fitted. A change of the buffers of an operator must change its
count here (`tests/test_memory.py`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple, cast

import torch

from otdd_flash.cost.compute import ComputeOptions, scores_fit, uses_triton
from otdd_flash.cost.host_points import HostPoints
from otdd_flash.cost.points import LabelledCost
from otdd_flash.errors import InputError
from otdd_flash.operators.base import Operator
from otdd_flash.operators.point_scores import (
    BLOCK_ELEMENTS_CPU,
    BLOCK_ELEMENTS_GPU,
    stored_operator,
    streamed_operator,
)
from otdd_flash.operators.torch_operator import TILE_ELEMENTS_CPU, TILE_ELEMENTS_GPU


def build_operator(
    cost: LabelledCost, compute: ComputeOptions, *, keep_scores: bool = True
) -> Operator:
    """Build the operator of a cost in this process, over blocks, in Triton kernels or in PyTorch.

    Points on the host or in files are streamed in blocks. For others `cost.compute.uses_triton`
    decides; in PyTorch scores are stored if they fit the memory budget and `keep_scores` allows it.

    Args:
        cost: between two clouds.
        compute: options of the passes.
        keep_scores: False for single passes, which storing would not speed up.

    Raises:
        InputError: the precision cannot hold the costs, or there is not enough memory.
    """
    _check_range(cost, compute)
    device = cost.a.device
    if isinstance(cost.points[0], HostPoints):
        from otdd_flash.operators.blocked import BlockedOperator, Build

        build = partial(build_operator, compute=compute, keep_scores=False)
        return BlockedOperator(cost, cast(Build, build))
    if uses_triton(compute, device):
        from otdd_flash.operators.triton_operator import KernelOperator

        return KernelOperator(cost, compute.precision)
    # Decided last: memory that is free by now is free for scores.
    if keep_scores and scores_fit(cost.shape, compute.dtype, compute, device):
        return stored_operator(cost, compute.dtype)
    return streamed_operator(cost, compute.dtype)


def operator_bytes(size: CostSize, compute: ComputeOptions, device: torch.device) -> int:
    """Return the bytes that an operator takes at least.

    Raises:
        InputError: the backend cannot run on the device or in the precision.
    """
    if uses_triton(compute, device):
        return kernel_bytes(size)
    return streamed_bytes(size, compute.dtype, device)


def _check_range(cost: LabelledCost, compute: ComputeOptions) -> None:
    """Raise an `InputError` if sums of costs would overflow."""
    highest = max(map(abs, cost.cost_range))
    float64_room = torch.finfo(torch.float64).max / 4
    if not highest < torch.finfo(compute.dtype).max / 4:
        way_out = " or set precision=double" if highest < float64_room else ""
        raise InputError(
            f"costs of up to {highest:.1e} overflow in precision={compute.precision}; scale the "
            f"features down{way_out}"
        )


class CostSize(NamedTuple):
    """The size of a cost between labelled clouds.

    Attributes:
        n: number of rows.
        m: number of columns.
        dim: coordinates of a point.
        classes: number of classes of the rows.
        symmetric: whether both sides are one cloud.
    """

    n: int
    m: int
    dim: int
    classes: int
    symmetric: bool

    @property
    def points(self) -> int:
        """The number of distinct points."""
        return self.n if self.symmetric else self.n + self.m

    def __str__(self) -> str:
        return f"{self.n:,} x {self.m:,} points of dimension {self.dim:,}"


def kernel_bytes(size: CostSize) -> int:
    """Return the bytes of a `KernelOperator` and of its largest pass.

    Counted are two float16 parts of every coordinate and either two of a block of the plan, which
    products with points of few coordinates do not store, or for a self term the sums of each block
    of rows. Plans are of refined operators, whose blocks always have both parts.
    """
    # These import Triton, which may be missing.
    from otdd_flash.kernels.passes.fused_product import HELD_COORDINATES
    from otdd_flash.kernels.passes.plan_blocks import block_shape
    from otdd_flash.kernels.passes.symmetric_step import STRIPE_BYTES
    from otdd_flash.kernels.tiling import BLOCK_ROWS

    n, m = size.n, size.m
    coordinates = 2 * 2 * size.points * (-(-size.dim // 8) * 8)
    in_blocks = size.dim > HELD_COORDINATES
    plan = 2 * 2 * math.prod(block_shape(n, m)) if in_blocks else 0
    sums = min(4 * (n // BLOCK_ROWS) * n, STRIPE_BYTES) if size.symmetric else 0
    return coordinates + max(plan, sums)


def streamed_bytes(size: CostSize, dtype: torch.dtype, device: torch.device) -> int:
    """Return the bytes of a `streamed_operator`.

    Counted are centred points, the bias table, and a block and a tile of scores. The bias table is
    computed in float64, from two terms, before there are any scores.
    """
    cpu = device.type == "cpu"
    scores, bias = size.n * size.m, size.classes * size.m
    block = min(scores, BLOCK_ELEMENTS_CPU if cpu else BLOCK_ELEMENTS_GPU)
    tile = min(scores, TILE_ELEMENTS_CPU if cpu else TILE_ELEMENTS_GPU)
    points = dtype.itemsize * size.points * size.dim
    return points + max(2 * 8 * bias, dtype.itemsize * (bias + block + tile))
