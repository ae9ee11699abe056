"""Kernels run on the device of what they are given, whatever device is current.

Triton launches on the current device and reads its stream there. `on_its_device` makes a kernel's
device current for as long as it takes to launch it. It decorates the kernels of all folders beside
this file.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

K = TypeVar("K")


def on_its_device(kernel: K) -> K:
    """A kernel of `triton.jit` or `gluon.jit`, launched on the device of its first tensor.

    All tensors of a launch are on one device.
    """
    launcher: Any = kernel
    run = launcher.run

    def run_there(*args: Any, **kwargs: Any) -> Any:
        index = _index(args) if several_devices() else None
        if index is None or index == torch.cuda.current_device():
            return run(*args, **kwargs)
        with torch.cuda.device(index):
            return run(*args, **kwargs)

    launcher.run = run_there
    return kernel


@cache
def several_devices() -> bool:
    """Whether a launch may be meant for another device than the current one."""
    return torch.cuda.device_count() > 1


def _index(args: tuple[Any, ...]) -> int | None:
    """The CUDA device of the first tensor; None if that is on another kind of device."""
    for each in args:
        # A tensor descriptor has its tensor as `base`.
        tensor = each if isinstance(each, Tensor) else getattr(each, "base", None)
        if isinstance(tensor, Tensor):
            return tensor.get_device() if tensor.is_cuda else None
    return None
