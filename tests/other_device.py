"""A device that is not there, for tests of what stays on one: tensors say so, and hold host memory.

As on a GPU, operations refuse tensors of two devices, but for single numbers and for indices in
host memory, which are copied.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from otdd_flash import checks, real_numbers
from otdd_flash.checks import check_numbers

CHECKED = (checks, real_numbers)

# PyTorch takes it for a device as any other, and has nothing of its own there.
OTHER = torch.device("meta")

COPIES = ("_to_copy", "copy_")
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")


class Elsewhere(torch.Tensor):
    """A tensor there, of which `held` has the numbers."""

    held: torch.Tensor

    @staticmethod
    def of(held: torch.Tensor) -> Elsewhere:
        """These numbers as if they were there."""
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            Elsewhere,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=OTHER,
        )
        made.held = held
        return made

    def tolist(self) -> Any:
        """The numbers, as any device gives them."""
        return self.held.tolist()

    def __matmul__(self, other: Any) -> Elsewhere:
        """The product, of which PyTorch would change the shape in place."""
        return Elsewhere.of(self.held @ other.held)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_indices(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_indices(index), value)

    @classmethod
    def __torch_dispatch__(cls, function: Any, *rest: Any) -> Any:
        raise AssertionError(f"{function} outside of the mode")


class OtherDevice(TorchDispatchMode):
    """Has the device while it is entered.

    Attributes:
        fetched: how many numbers each copy to the host had.
        sent: likewise, from there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[int] = []
        self.sent: list[int] = []

    def __enter__(self) -> OtherDevice:
        super().__enter__()
        make = torch.tensor

        def there(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            # PyTorch would not let the mode see the numbers.
            made = make(*args, **kwargs)
            return made if device is None else made.to(device)

        def check(name: str, given: Any) -> None:
            # A user's tensor of such a class would be refused.
            if not isinstance(given, Elsewhere):
                check_numbers(name, given)

        self._patches = [patch.object(torch, "tensor", there)]
        self._patches += [patch.object(place, "check_numbers", check) for place in CHECKED]
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *raised: Any) -> None:
        for each in self._patches:
            each.stop()
        super().__exit__(*raised)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = {id(each.held): each for each in tensors if isinstance(each, Elsewhere)}
        assert all(isinstance(each, Elsewhere) for each in tensors if each.is_meta), "no numbers"
        name, device = function.overloadpacket.__name__, kwargs.get("device")
        stays = bool(there) if device is None else torch.device(device).type == OTHER.type
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        if name == "copy_":
            stays = isinstance(args[0], Elsewhere)
        if name in COPIES:
            source = args[name == "copy_"]
            if isinstance(source, Elsewhere) != stays:
                (self.sent if stays else self.fetched).append(source.numel())
        else:
            self._check(name, args, tensors)
        found = function(*tree_map(_held, args), **tree_map(_held, kwargs))

        def placed(value: Any) -> Any:
            if not stays or not isinstance(value, torch.Tensor):
                return value
            # What an operation in place returns is what it was given.
            known = there.get(id(value))
            return Elsewhere.of(value) if known is None else known

        return tree_map(placed, found)

    def _check(self, name: str, args: Any, tensors: list[torch.Tensor]) -> None:
        if name in INDEXED and isinstance(args[0], Elsewhere):
            copied = [id(each) for each in args[1] if type(each) is torch.Tensor]
            self.sent += [each.numel() for each in tensors if id(each) in copied]
            tensors = [each for each in tensors if id(each) not in copied]
        devices = {each.device.type for each in tensors if each.ndim}
        if len(devices) > 1:
            raise RuntimeError(f"{name} of tensors on {' and '.join(sorted(devices))}")


def _held(value: Any) -> Any:
    return value.held if isinstance(value, Elsewhere) else value


def _indices(index: Any) -> Any:
    """An index with tensors for lists, of which PyTorch would make tensors without numbers."""
    if isinstance(index, tuple):
        return tuple(map(_indices, index))
    return torch.tensor(index) if isinstance(index, list) else index
