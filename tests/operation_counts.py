"""What a host asks of a device, counted in the interpreter: every one takes it microseconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

# Operations that move no data, and what PyTorch does on a CPU alone to multiply halves.
FREE = {
    *("view", "slice", "select", "transpose", "unsqueeze", "squeeze", "t", "expand", "split"),
    *("unbind", "alias", "detach", "as_strided", "permute", "_unsafe_view", "_reshape_alias"),
    *("empty", "empty_like", "empty_strided", "new_empty", "unflatten", "chunk", "lift_fresh"),
}
# What waits for the device.
READS = ("tolist", "item", "__bool__", "__float__", "__int__")


class Calls(TorchDispatchMode):
    """Counts every operation that PyTorch is asked for while it is entered.

    Attributes:
        by_name: how often, without what tells overloads apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.by_name[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


class OperationCounts(TorchDispatchMode):
    """Counts while it is entered.

    Attributes:
        operations: of PyTorch on tensors.
        launches: of kernels, by name.
        reads: of numbers from the device, by the methods of tensors that are given.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reads: tuple[str, ...] = READS) -> None:
        super().__init__()
        self.operations, self.reads = 0, 0
        self.launches: Counter[str] = Counter()
        self._counting, self._inside = False, False
        launch = interpreter.GridExecutor.__call__

        def counted(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self.launches[executor.fn.__name__] += self._counting
            return self._uncounted(launch, executor, *args, **kwargs)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
        for name in reads:
            monkeypatch.setattr(torch.Tensor, name, self._read(getattr(torch.Tensor, name)))

    def __enter__(self) -> OperationCounts:
        self._counting = True
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._counting = False
        super().__exit__(*raised)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        halves = name == "_to_copy" and args[0].dtype == torch.float16
        # A mask as an index is counted by the device first.
        masked = name == "index" and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if not self._inside:
            self.operations += name not in FREE and not halves
            self.reads += masked or name in ("nonzero", "equal")
        return function(*args, **(kwargs or {}))

    def _read(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: torch.Tensor, *args: Any) -> Any:
            self.reads += self._counting and not self._inside
            return self._uncounted(read, tensor, *args)

        return counted

    def _uncounted(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inside, self._inside = self._inside, True
        try:
            return run(*args, **kwargs)
        finally:
            self._inside = inside
