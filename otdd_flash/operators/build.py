"""From two labelled clouds and their class distances to the operator of the cost between them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor

from otdd_flash.cost.compute import ComputeOptions, scores_fit, uses_triton
from otdd_flash.cost.ground import GroundCost
from otdd_flash.cost.host_points import HostPoints, Streaming
from otdd_flash.cost.points import Cloud, LabelledCost, Points
from otdd_flash.cost.remembered import forget, remembered
from otdd_flash.distributed.ranks import ranks_of
from otdd_flash.errors import InputError
from otdd_flash.features.file_features import FileFeatures
from otdd_flash.operators.base import Operator
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.operators.streamed import BLOCK_ELEMENTS_CPU, BLOCK_ELEMENTS_GPU, StreamedOperator
from otdd_flash.operators.tiled import TILE_ELEMENTS_CPU, TILE_ELEMENTS_GPU
from otdd_flash.samples import LabeledSamples

# What costs keep of samples by this name.
CLOUD = "cloud"


@dataclass(frozen=True, eq=False)
class CostInputs:
    """The parts of the cost between two labelled clouds, on the device that computes it.

    Attributes:
        source: n points as the ground cost sees them.
        target: m points likewise; the same object as `source` for a self term.
        class_distances: the block of W (V_x, V_y) between their classes.
        cost: what it compares, and the weights of both parts.
        compute: how passes run.
        streaming: of points that do not stay on the device.
    """

    source: LabeledSamples
    target: LabeledSamples
    class_distances: Tensor
    cost: GroundCost
    compute: ComputeOptions
    streaming: Streaming | None = None

    @property
    def points(self) -> tuple[Points, Points]:
        """Both clouds, on the device or on their way there."""
        x = points_of(self.source, self.streaming)
        return x, x if self.source is self.target else points_of(self.target, self.streaming)

    @cached_property
    def labelled(self) -> LabelledCost:
        """The cost between both clouds, with cached statistics, where the clouds are."""
        source, target = self.source, self.target
        x = cloud_of(source, self.streaming)
        y = x if source is target else cloud_of(target, self.streaming)
        table = self.class_distances.to(x.masses.device, torch.float64)
        return LabelledCost.between(x, y, self.cost.lambda_y * table, self.cost.squared.lambda_x)


def build_operator(inputs: CostInputs, *, keep_scores: bool = True) -> Operator:
    """The cost between two clouds: on a GPU in Triton kernels, else in PyTorch.

    In PyTorch the scores are stored if they fit the memory budget and that is asked for.

    Args:
        inputs: both clouds and the cost between them, of a prepared request.
        keep_scores: False for single passes, which storing would not speed up.

    Raises:
        InputError: the precision cannot hold the costs, or there is not enough memory.
    """
    if (ranks := ranks_of(inputs.compute.group)) is not None:
        from otdd_flash.operators.sharing import shared_operator

        return shared_operator(inputs, ranks, keep_scores=keep_scores)
    return operator_alone(inputs.labelled, inputs.compute, keep_scores=keep_scores)


def operator_alone(
    cost: LabelledCost, compute: ComputeOptions, *, keep_scores: bool = True
) -> Operator:
    """A cost that this process computes by itself; as for `build_operator`."""
    _check_range(cost, compute)
    device = cost.a.device
    if isinstance(cost.points[0], HostPoints):
        from otdd_flash.operators.block_tiles import BlockOperator
        from otdd_flash.operators.blocked import BlockedOperator

        def build(part: LabelledCost) -> BlockOperator:
            return cast(BlockOperator, operator_alone(part, compute, keep_scores=False))

        return BlockedOperator(cost, build)
    if uses_triton(compute, device):
        from otdd_flash.operators.kernel import KernelOperator

        return KernelOperator(cost, compute.precision)
    # Asked last: what is free by then is free for scores.
    if keep_scores and scores_fit(cost.shape, compute.dtype, compute, device):
        return StoredOperator.keep(cost, compute.dtype)
    return StreamedOperator(cost, compute.dtype)


def operator_bytes(size: CostSize, compute: ComputeOptions, device: torch.device) -> int:
    """The bytes that an operator takes at the least.

    Raises:
        InputError: the backend cannot run on the device or in the precision.
    """
    if uses_triton(compute, device):
        return kernel_bytes(size)
    return streamed_bytes(size, compute.dtype, device)


def cloud_of(samples: LabeledSamples, streaming: Streaming | None) -> Cloud:
    """Return the samples as a `Cloud`; the same object as long as the samples are unchanged."""

    def find() -> Cloud:
        points, equal = points_of(samples, streaming), samples.weights is None
        masses, labels = (
            each.to(points.device) for each in (samples.masses, class_indices(samples))
        )
        return Cloud(points, masses, labels, equal=equal)

    if streaming is not None or isinstance(samples.features, FileFeatures):
        # What is found of points that stream is kept with what streams them.
        return find()
    return remembered(samples, CLOUD, find)


def forget_cloud(samples: LabeledSamples) -> None:
    """Drop the cached cloud: the tensors may have been modified in place since the last call."""
    forget(samples, CLOUD)


def points_of(samples: LabeledSamples, streaming: Streaming | None) -> Points:
    """Points (n, d) on the device, or on their way there."""
    return samples.features if streaming is None else HostPoints(samples.features, streaming)


def mean_cost(inputs: CostInputs) -> float:
    """What `epsilon_relative` is a multiple of: the mean cost, 0 where that is rounding alone.

    Where costs may have any sign, as those of `inner` have, the mean of lambda_x ||x_i|| ||y_j|| +
    lambda_y W[l_i, l_j].
    """
    lengths = inputs.cost.size(inputs.source, inputs.target)
    if lengths is None:
        mean = float(inputs.labelled.mean_cost)
        return mean if mean > inputs.cost.error(inputs.source.dim) else min(mean, 0.0)
    if inputs.cost.lambda_y == 0:
        return lengths
    classes = replace(inputs, cost=GroundCost(0.0, inputs.cost.lambda_y))
    return lengths + float(classes.labelled.mean_cost)


def _check_range(cost: LabelledCost, compute: ComputeOptions) -> None:
    """Refuse costs whose sums would overflow."""
    highest = max(map(abs, cost.cost_range))
    float64_room = torch.finfo(torch.float64).max / 4
    if not highest < torch.finfo(compute.dtype).max / 4:
        way_out = " or set precision=double" if highest < float64_room else ""
        raise InputError(
            f"costs of up to {highest:.1e} overflow in precision={compute.precision}; scale the "
            f"features down{way_out}"
        )


def class_indices(samples: LabeledSamples) -> Tensor:
    """The labels; unlabelled data are one class."""
    if samples.labels is not None:
        return samples.labels
    return torch.zeros(len(samples), dtype=torch.int64, device=samples.features.device)


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
    """Bytes of a `StreamedOperator`: centred points, the bias table, a block and a tile of scores.

    The bias table is made in float64, of two terms, before there are any scores.
    """
    cpu = device.type == "cpu"
    scores, bias = size.n * size.m, size.classes * size.m
    block = min(scores, BLOCK_ELEMENTS_CPU if cpu else BLOCK_ELEMENTS_GPU)
    tile = min(scores, TILE_ELEMENTS_CPU if cpu else TILE_ELEMENTS_GPU)
    points = dtype.itemsize * size.points * size.dim
    return points + max(2 * 8 * bias, dtype.itemsize * (bias + block + tile))
