"""Options of passes over the cost: device, backend, precision, memory and processes.

Entry points take a `ComputeOptions`, or only a device, and call `ComputeOptions.of`. `uses_triton`
decides whether passes run in Triton, `scores_fit` whether scores may be stored. `operators.build`
and `solver.matrix_comparison` call both; `operators.sharing`, `solver.small.route`,
`derivatives.loss`, `batched.checking`, `ranking.bounds` and `study.study` call `uses_triton`.

An impossible request must raise an `InputError` and never be replaced by another one. Results and
studies write `settings` to their files, so the names of the fields must stay.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from otdd_flash.arguments import Backend, DeviceName, Precision, check_fields, memory
from otdd_flash.devices import check_triton, is_amd
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.errors import InputError
from otdd_flash.memory import (
    ASSUMED_FREE,
    budget_in_bytes,
    free_memory,
    readable_bytes,
    stated_budget,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ComputeOptions:
    """The device, backend, precision, memory and processes of a computation.

    A solve makes many passes; a pass evaluates all n x m costs once.

    Args:
        device: `auto` (CUDA if there is one), `cpu`, `cuda`, `cuda:1`, ...
        backend: `auto` (Triton on NVIDIA cards except in double precision), `torch` or `triton`.
        precision: in Triton, `fast` iterates on points rounded to float16 (unless float16 holds
            them exactly) and ends on the original ones; `high` has float32 accuracy throughout. In
            PyTorch both compute in float32. `double` is float64.
        memory_budget: limit in bytes for each process, as a number or as text such as `4GiB`.
            PyTorch stores scores up to this limit. Points, with all that is computed from them,
            stay on the device up to this limit; larger ones are streamed. `auto`: half of the free
            memory for scores, all of it for points.
        group: processes that share every pass. A group of `torch.distributed`, or "world" for its
            default group: every process makes the same call, each with its shards of the datasets.
            Or the ranks that `otdd.led` hands to its function. None: this process alone.
    """

    device: DeviceName = "auto"
    backend: Backend = "auto"
    precision: Precision = "fast"
    memory_budget: str | int = "auto"
    group: ProcessGroup | Ranks | str | None = field(default=None, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        # A group cannot be sent to another process.
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
        """Return the given options; of a device or None, the defaults on that device."""
        if isinstance(given, ComputeOptions):
            return given
        return cls() if given is None else cls(str(given))

    @property
    def alone(self) -> ComputeOptions:
        """The same options without a group, as results keep them."""
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


def uses_triton(compute: ComputeOptions, device: torch.device) -> bool:
    """Decide whether passes run in Triton.

    Raises:
        InputError: `backend=triton` was asked for, which cannot run here; or `auto` takes Triton on
            an NVIDIA card that has none or is too old for it.
    """
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
    """Decide whether scores (n, m) of a type may be stored within the memory budget.

    Raises:
        InputError: the budget allows them, but the memory is not free.
    """
    size = shape[0] * shape[1] * dtype.itemsize
    if compute.memory_budget == "auto":
        return size <= ASSUMED_FREE or size <= budget_in_bytes("auto", device)
    if size > budget_in_bytes(compute.memory_budget, device):
        return False
    if size > ASSUMED_FREE and size > (free := free_memory(device)):
        raise InputError(
            f"memory_budget={compute.memory_budget} lets the scores be stored, but they take "
            f"{readable_bytes(size)} and {readable_bytes(free)} are free on {device}; use "
            "memory_budget=auto, which streams them then"
        )
    return True
