"""How many bytes a call holds at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that were allocated on a device at once."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = run()
    del kept
    held = highest = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return highest


class LiveBytes(TorchDispatchMode):
    """Follows the tensors that operations return while it is entered, each storage once.

    What an operation allocates and gives up before it returns is not seen, nor are tensors that
    no operation has read or returned.

    Attributes:
        highest: the most bytes that were there at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.highest = self._held = 0
        self._known: set[int] = set()

    def __enter__(self) -> LiveBytes:
        # What is there already need not be looked through at every new peak.
        gc.collect()
        gc.freeze()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        gc.unfreeze()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return found

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self._held += size
        if self._held > self.highest:
            # What only the interpreter's cycles of references keep is gone on a GPU.
            gc.collect()
            self.highest = max(self.highest, self._held)

        def gone() -> None:
            self._known.discard(key)
            self._held -= size

        weakref.finalize(storage, gone)


class LargestTensor(TorchDispatchMode):
    """The most numbers of a tensor that an operation made while it is entered."""

    numbers = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.untyped_storage().nbytes() // each.itemsize)
        return made
