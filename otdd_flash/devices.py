"""Which device a computation runs on, from the name that a user gives."""

from __future__ import annotations

import torch

from otdd_flash.errors import InputError


def resolve_device(name: str | torch.device) -> torch.device:
    """The torch device called `name`; `auto` is the first CUDA device, or the CPU without one.

    A CUDA device comes back with its index, so that it compares equal to the device of its tensors.

    Raises:
        InputError: no such device on this machine; the message lists those that are there.
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


def _choices() -> str:
    found = ["auto", "cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        found.append("mps")
    return f"choose one of: {', '.join(found)}"
