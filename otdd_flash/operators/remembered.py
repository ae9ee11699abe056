"""What is found of a tensor once, and kept as long as that lives and holds what it held.

Labels stay as they are while points move: their order in blocks, and who owns which, are the same
at every step of a flow.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from otdd_flash.content_mark import Mark, mark_of_tensors

T = TypeVar("T")

# By tensor and name, with the mark of what it held.
_KEPT: MutableMapping[Tensor, dict[str, tuple[Mark, Any]]] = WeakTensorKeyDictionary()


def remembered(tensor: Tensor, name: str, find: Callable[[], T]) -> T:
    """What `find` returns, of the last call by this name for the tensor as it is now.

    What it returns must not hold the tensor, which would then never be freed.
    """
    if tensor.is_inference():
        # Nothing tells whether it has changed.
        return find()
    kept = _KEPT.setdefault(tensor, {})
    mark = mark_of_tensors(tensor)
    if name not in kept or kept[name][0] != mark:
        kept[name] = mark, find()
    found: T = kept[name][1]
    return found
