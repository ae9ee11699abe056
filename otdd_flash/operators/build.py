"""From two labelled clouds and their class distances to the operator of the cost between them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from otdd_flash.devices import resolve_device
from otdd_flash.errors import InputError, choose
from otdd_flash.operators.base import Operator
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.memory import budget_in_bytes
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.operators.streamed import StreamedOperator
from otdd_flash.samples import LabeledSamples

BACKENDS = ("auto", "torch", "triton")
PRECISIONS = ("fast", "high", "double")


@dataclass(frozen=True)
class GroundCost:
    """Weights of C_ij = lambda_x ||x_i - y_j||^2 + lambda_y W[l_i, l_j]."""

    lambda_x: float = 0.5
    lambda_y: float = 0.5

    def __post_init__(self) -> None:
        for name, value in (("lambda_x", self.lambda_x), ("lambda_y", self.lambda_y)):
            if not 0 <= value < float("inf"):
                raise InputError(f"{name} must be finite and not negative, got {value}")
        if self.lambda_x == self.lambda_y == 0:
            raise InputError("lambda_x and lambda_y are both 0, so every cost is 0; raise one")


@dataclass(frozen=True)
class ComputeOptions:
    """Where and how passes run.

    Args:
        device: `auto` (CUDA if there is one), `cpu`, `cuda`, `cuda:1`, ...
        backend: `auto` (Triton on CUDA but in double precision), `torch` or `triton`.
        precision: `fast` iterates on points rounded to float16 and ends on the original ones, in
            Triton; `high` is float32-like throughout, as both are in PyTorch; `double` is float64.
        memory_budget: bytes that stored scores may take in PyTorch: `auto` (half of free memory)
            or `4GiB`.
    """

    device: str = "auto"
    backend: str = "auto"
    precision: str = "fast"
    memory_budget: str | int = "auto"

    def __post_init__(self) -> None:
        choose("backend", self.backend, BACKENDS)
        choose("precision", self.precision, PRECISIONS)

    @property
    def dtype(self) -> torch.dtype:
        """The type of scores and potentials."""
        return torch.float64 if self.precision == "double" else torch.float32


def build_operator(
    source: LabeledSamples,
    target: LabeledSamples,
    class_distances: Tensor,
    weights: GroundCost,
    compute: ComputeOptions,
    *,
    keep_scores: bool = True,
) -> Operator:
    """The cost between two clouds: on a GPU in Triton kernels, else in PyTorch.

    In PyTorch the scores are stored if they fit the memory budget and that is asked for.

    Args:
        source: n labelled points.
        target: m labelled points.
        class_distances: the block of W (V_x, V_y) between their classes.
        weights: of both parts of the cost.
        compute: where and how passes run.
        keep_scores: False for a single pass, which storing would not speed up.

    Raises:
        InputError: the backend cannot run on the device or in the precision.
    """
    device = resolve_device(compute.device)
    cost = labelled_cost(source, target, class_distances, weights, device)
    if _use_triton(compute, device):
        from otdd_flash.operators.kernel import KernelOperator

        return KernelOperator(cost, compute.precision)
    streamed = StreamedOperator(cost, compute.dtype)
    n, m = cost.shape
    budget = budget_in_bytes(compute.memory_budget, device)
    if keep_scores and n * m * compute.dtype.itemsize <= budget:
        return StoredOperator.keep(streamed)
    return streamed


def labelled_cost(
    source: LabeledSamples,
    target: LabeledSamples,
    class_distances: Tensor,
    weights: GroundCost,
    device: torch.device,
) -> LabelledCost:
    """The cost between two clouds, on a device."""
    same = source is target
    source = source.to(device)
    target = source if same else target.to(device)
    masses, labels = source.masses.to(device), _class_indices(source)
    return LabelledCost(
        source.features,
        target.features,
        masses,
        masses if same else target.masses.to(device),
        labels_x=labels,
        labels_y=labels if same else _class_indices(target),
        class_costs=weights.lambda_y * class_distances.to(device, torch.float64),
        lambda_x=weights.lambda_x,
    )


def _use_triton(compute: ComputeOptions, device: torch.device) -> bool:
    """Whether half-steps run in Triton; an impossible request is refused, never replaced."""
    if compute.backend != "triton":
        return compute.backend == "auto" and device.type == "cuda" and compute.precision != "double"
    if compute.precision == "double":
        raise InputError("backend=triton has no double precision; use backend=torch or auto")
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise InputError(
            f"backend=triton needs a CUDA device, got device={device}; use backend=torch or auto"
        )
    return True


def _class_indices(samples: LabeledSamples) -> Tensor:
    """The labels; unlabelled data are one class."""
    if samples.labels is not None:
        return samples.labels
    return torch.zeros(len(samples), dtype=torch.int64, device=samples.features.device)
