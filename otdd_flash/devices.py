"""Devices: the choice by name, transfers without stalls, and what a device can run.

`resolve_device` converts the names that users give: `flows.run`, `result`, `sliced`, `study.study`,
`extractors.embedding`, `commands.sides` and others call it. `moved` and `sent` transfer tensors
(`samples`, `labels.measuring`, `engine.quasi_newton_kernels`); `check_triton` and `is_amd` tell
`cost.compute` and `labels.sinkhorn_pairs` whether Triton kernels may run. A device that is not
there must be refused, not replaced by another, whose speed, memory and rounding differ
(`tests/test_devices.py`).
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.nn.functional import pad

from otdd_flash.errors import InputError

# Ampere, the oldest generation that the kernels support.
LEAST_CAPABILITY = (8, 0)

# Bytes: Triton compiles a kernel again for a tensor whose address is no multiple of them.
ALIGNMENT = 16


def resolve_device(name: str | torch.device) -> torch.device:
    """Return the torch device of a name; `auto` is the current CUDA device, or without one the CPU.

    A CUDA device has its index, so that it equals the device of its tensors.

    Raises:
        InputError: no such device on this machine; the message lists the existing ones.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device {str(name)!r}; {_choices()}") from None
    match device.type:
        case "cpu":
            return torch.device("cpu")
        case "cuda" if torch.cuda.is_available():
            index = torch.cuda.current_device() if device.index is None else device.index
            if index < torch.cuda.device_count():
                return torch.device("cuda", index)
        case "mps" if torch.backends.mps.is_available():
            return device
    raise InputError(f"there is no device {str(name)!r} on this machine; {_choices()}")


def current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a device is current, for streams, events and graphs."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor.to(device)`; from a GPU to the CPU at the speed of the bus.

    New host memory is allocated page by page when it is first written. Here all cores write to it
    before the GPU's driver does, which would take five times as long and block other launches.
    """
    if not tensor.is_cuda or device.type != "cpu":
        return tensor.to(device)
    return torch.empty_like(tensor, device=device).fill_(0).copy_(tensor)


def sent(device: torch.device, *numbers: Tensor) -> tuple[Tensor, ...]:
    """Return tensors of one type on a device; those elsewhere are sent in one transfer.

    Nothing waits for a GPU, as a `.to` of each tensor would. Each tensor is aligned like memory of
    its own: Triton compiles separate kernels for tensors that are not.
    """
    elsewhere = [part for part in numbers if part.device != device]
    if not elsewhere:
        return numbers
    gaps = [-part.numel() % max(1, ALIGNMENT // part.itemsize) for part in elsewhere]
    padded = [pad(part.reshape(-1), (0, gap)) for part, gap in zip(elsewhere, gaps, strict=True)]
    packed = torch.cat(padded)
    if device.type == "cuda" and packed.device.type == "cpu":
        arrived = packed.pin_memory().to(device, non_blocking=True)
    else:
        arrived = packed.to(device)
    there = iter(torch.split(arrived, [len(part) for part in padded]))
    return tuple(
        part if part.device == device else next(there)[: part.numel()].view(part.shape)
        for part in numbers
    )


def check_one_device(source: torch.device, target: torch.device) -> None:
    """Refuse a source and a target on different devices.

    Raises:
        InputError: they differ.
    """
    if source != target:
        raise InputError(
            f"source is on {source} and target on {target}; move both to one device with .to()"
        )


def is_amd(device: torch.device) -> bool:
    """Return whether a device is an AMD card, which PyTorch also calls cuda."""
    return device.type == "cuda" and torch.version.hip is not None


def check_triton(device: torch.device) -> None:
    """Refuse a device on which Triton's kernels cannot run.

    They run on NVIDIA cards of compute capability 8.0 and later. On other device types they run
    only interpreted, which the caller must check.

    Raises:
        InputError: the device is an AMD card, has no Triton, or is too old.
    """
    if is_amd(device):
        raise InputError(
            f"{_described(device)} is an AMD card, but the error model that the bounds of the "
            "Triton kernels rest on is of NVIDIA cards; use backend=torch"
        )
    try:
        importlib.import_module("triton")
    except ImportError as error:
        raise InputError(
            f"{_described(device)} has no Triton: {error}; install triton or use backend=torch"
        ) from error
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        found, least = (".".join(map(str, pair)) for pair in (capability, LEAST_CAPABILITY))
        raise InputError(
            f"{_described(device)} is too old for the Triton kernels: its compute capability is "
            f"{found} and they need {least}; use backend=torch"
        )


def _described(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    return f"{device} ({torch.cuda.get_device_name(device)})"


def _choices() -> str:
    found = ["auto", "cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        found.append("mps")
    return f"choose one of: {', '.join(found)}"
