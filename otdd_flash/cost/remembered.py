"""A cache of results by tensor or samples, for as long as these live and stay unchanged.

Labels stay as they are while points move: their order in blocks, and who owns which, are the same
at every step of a flow. So is the target, and particles stand in several costs of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from otdd_flash.fingerprint import Mark, mark_of_tensors
from otdd_flash.samples import LabeledSamples

T = TypeVar("T")

# By what it is of and name, with the mark of what that held.
_KEPT: MutableMapping[Tensor | LabeledSamples, dict[Hashable, tuple[Mark, Any]]]
_KEPT = WeakIdKeyDictionary()


def remembered(of: Tensor | LabeledSamples, name: Hashable, find: Callable[[], T]) -> T:
    """Return the cached result of `find` under this name, while `of` is unchanged.

    What it returns must not hold the tensor, or the samples, which would then never be freed.
    """
    parts = (of,) if isinstance(of, Tensor) else (of.features, of.labels, of.weights)
    if any(part is not None and part.is_inference() for part in parts):
        # Nothing tells whether it has changed.
        return find()
    kept = _KEPT.setdefault(of, {})
    mark = mark_of_tensors(*parts)
    if name not in kept or kept[name][0] != mark:
        kept[name] = mark, find()
    found: T = kept[name][1]
    return found


def forget(of: LabeledSamples, name: Hashable) -> None:
    """Drop a cached result, as not every change of the samples can be detected.

    On a GPU torch counts its own changes, and neither those through `x.data`, of fused optimisers
    and of replayed CUDA graphs, nor those of other libraries. On a CPU the content is marked.
    """
    if of.features.device.type != "cpu":
        _KEPT.get(of, {}).pop(name, None)
