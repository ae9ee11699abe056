"""From two labelled clouds and their class distances to the operator of the cost between them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from otdd_flash.arguments import Backend, DeviceName, Precision, check_fields, memory
from otdd_flash.devices import check_triton, is_amd
from otdd_flash.distributed.ranks import Ranks, ranks_of
from otdd_flash.errors import InputError
from otdd_flash.features.file_features import FileFeatures
from otdd_flash.operators.base import Operator
from otdd_flash.operators.cloud import Cloud
from otdd_flash.operators.float64_rows import Points
from otdd_flash.operators.footprint import CostSize, kernel_bytes, streamed_bytes
from otdd_flash.operators.ground import GroundCost
from otdd_flash.operators.host_points import HostPoints, Streaming
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.memory import (
    UNASKED,
    budget_in_bytes,
    free_memory,
    readable_bytes,
    stated_budget,
)
from otdd_flash.operators.point_scores import stored_operator, streamed_operator
from otdd_flash.operators.remembered import forget, remembered
from otdd_flash.samples import LabeledSamples

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# What costs keep of samples by this name.
CLOUD = "cloud"


@dataclass(frozen=True)
class ComputeOptions:
    """The device, precision, backend and memory of passes.

    Args:
        device: `auto` (CUDA if there is one), `cpu`, `cuda`, `cuda:1`, ...
        backend: `auto` (Triton on NVIDIA cards but in double precision), `torch` or `triton`.
        precision: `fast` iterates on points rounded to float16 and ends on the original ones, in
            Triton, but where float16 holds them; `high` is float32-like throughout, as both are in
            PyTorch; `double` is float64.
        memory_budget: bytes that stored scores may take in PyTorch, and that points with all that
            is made of them may take on the device before they are streamed: `auto` (half of free
            memory, and all of it) or `4GiB`; of each process.
        group: processes that share every pass: a group of `torch.distributed`, or "world" for its
            default group, where all of them call, each with its shards of the datasets; or what
            `otdd.led` gives. None: this process alone.
    """

    device: DeviceName = "auto"
    backend: Backend = "auto"
    precision: Precision = "fast"
    memory_budget: str | int = "auto"
    group: ProcessGroup | Ranks | str | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        # A group is of this process.
        return self.settings | {"group": None}

    def __post_init__(self) -> None:
        check_fields(self, memory_budget=memory)
        stated_budget(self.memory_budget)
        if self.group is not None and self.device.startswith("cuda:"):
            raise InputError(
                f"device={self.device} names one card for all processes of compute.group; let each "
                "call torch.cuda.set_device, and take device=cuda"
            )

    @classmethod
    def of(cls, given: Compute | None) -> ComputeOptions:
        """Return the options as they are, or the defaults on a named device."""
        if isinstance(given, ComputeOptions):
            return given
        return cls() if given is None else cls(str(given))

    @property
    def alone(self) -> ComputeOptions:
        """Return the options for this process alone, as results keep them."""
        return replace(self, group=None)

    @property
    def settings(self) -> dict[str, Any]:
        """All options but the group, for files."""
        return {key.name: getattr(self, key.name) for key in fields(self) if key.compare}

    @property
    def dtype(self) -> torch.dtype:
        """The type of scores and potentials."""
        return torch.float64 if self.precision == "double" else torch.float32


# What entry points take for `compute`: `ComputeOptions.of` makes them.
Compute = ComputeOptions | str | torch.device


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
        from otdd_flash.operators.blocked import BlockedOperator, BlockOperator

        def build(part: LabelledCost) -> BlockOperator:
            return cast(BlockOperator, operator_alone(part, compute, keep_scores=False))

        return BlockedOperator(cost, build)
    if uses_triton(compute, device):
        from otdd_flash.operators.triton_operator import KernelOperator

        return KernelOperator(cost, compute.precision)
    # Asked last: what is free by then is free for scores.
    if keep_scores and scores_fit(cost.shape, compute.dtype, compute, device):
        return stored_operator(cost, compute.dtype)
    return streamed_operator(cost, compute.dtype)


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


def uses_triton(compute: ComputeOptions, device: torch.device) -> bool:
    """Whether half-steps run in Triton; an impossible request is refused, never replaced."""
    cuda, double = device.type == "cuda", compute.precision == "double"
    fitting = cuda and not is_amd(device) and not double
    if compute.backend == "torch" or (compute.backend == "auto" and not fitting):
        return False
    if double:
        raise InputError("backend=triton has no double precision; use backend=torch or auto")
    if not cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise InputError(
            f"backend=triton needs a CUDA device, got device={device}; use backend=torch or auto"
        )
    check_triton(device)
    return True


def scores_fit(
    shape: tuple[int, int], dtype: torch.dtype, compute: ComputeOptions, device: torch.device
) -> bool:
    """Decide whether scores (n, m) may be stored in a type.

    Raises:
        InputError: the budget allows them, but the memory is not free.
    """
    size = shape[0] * shape[1] * dtype.itemsize
    if compute.memory_budget == "auto":
        return size <= UNASKED or size <= budget_in_bytes("auto", device)
    if size > budget_in_bytes(compute.memory_budget, device):
        return False
    if size > UNASKED and size > (free := free_memory(device)):
        raise InputError(
            f"memory_budget={compute.memory_budget} lets the scores be stored, but they take "
            f"{readable_bytes(size)} and {readable_bytes(free)} are free on {device}; use "
            "memory_budget=auto, which streams them then"
        )
    return True


def class_indices(samples: LabeledSamples) -> Tensor:
    """The labels; unlabelled data are one class."""
    if samples.labels is not None:
        return samples.labels
    return torch.zeros(len(samples), dtype=torch.int64, device=samples.features.device)
