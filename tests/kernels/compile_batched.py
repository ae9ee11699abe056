"""Compile the kernels of small matrices for sm_90; a script of its own, as `compile_kernels`.

It prints a JSON object: for each kernel and packing, and of plans for sizes, types and orders of
entries, shared memory and bytes spilled to a stack.
"""

from __future__ import annotations

import inspect
import json
import sys
from itertools import product
from typing import Any
from unittest import mock

import torch
from compile_kernels import resources
from triton.compiler import ASTSource

from otdd_flash.batched.adjoint import adjoint
from otdd_flash.kernels.batched import (
    small_adjoint,
    small_balance,
    small_balance_backward,
    tiny_balance,
    tiny_balance_backward,
)

# One for each type and order, and the largest is added to them.
SIZES = [(2, 2), (4, 4), (64, 64), (8, 8), (16, 16), (127, 127), (128, 2), (32, 32), (128, 64)]
# Which side of a matrix is contiguous.
ORDERS = {
    "rows": lambda x: x,
    "columns": lambda x: x.mT.contiguous().mT,
    "neither": lambda x: x.repeat(1, 2, 2)[:, ::2, ::2],
}
TYPES = {
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


class Recorded:
    """A kernel that, launched, is compiled with what it was given."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.taken: dict[str, int] = {}

    def __getitem__(self, grid: object) -> Any:
        return self.compiled

    def compiled(
        self, *given: Any, num_warps: int = 4, maxnreg: int | None = None, **constants: Any
    ) -> None:
        names = self.kernel.arg_names
        values = {**dict(zip(names, given, strict=False)), **constants}
        signature, fixed, aligned = {}, {}, {}
        for place, name in enumerate(names):
            value = values[name]
            if isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
                aligned[(place,)] = [["tt.divisibility", 16]]
            elif name in constants or value == 1:
                signature[name], fixed[(place,)] = "constexpr", value
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32"
                if value % 16 == 0:
                    aligned[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, fixed, aligned)
        self.taken = resources(source, 90, num_warps, registers=maxnreg)


def taken(module: Any, kernel: str, run: Any) -> dict[str, int]:
    """What a kernel of a module needs that `run` launches."""
    recorded = Recorded(inspect.getattr_static(module, kernel))
    with mock.patch.object(module, kernel, recorded):
        run()
    return recorded.taken


def main() -> None:
    one, found = torch.ones((), dtype=torch.float64), {}
    for n in (2, 4):
        x = torch.zeros(1000, n, n)
        found[f"tiny {n}"] = taken(
            tiny_balance, "tiny_balance_kernel", lambda x=x: tiny_balance.tiny_balance(x, one, 20)
        )
        found[f"tiny backward {n}"] = taken(
            tiny_balance_backward,
            "tiny_balance_backward_kernel",
            lambda x=x: tiny_balance_backward.tiny_balance_backward(x, one, 20, x),
        )
    for n in (4, 32):
        x, empty = torch.zeros(1000, n, n), torch.empty(0)
        problems = x, one, None, None, None, 20, None, False
        found[f"forward {n}"] = taken(
            small_balance,
            "small_balance_kernel",
            lambda problems=problems: small_balance.small_balance(*problems, potentials=False),
        )
        found[f"backward {n}"] = taken(
            small_balance_backward,
            "small_balance_backward_kernel",
            lambda problems=problems, x=x, empty=empty: (
                small_balance_backward.small_balance_backward(*problems, empty, x, None, None)
            ),
        )
    ways = list(product((torch.float32, torch.float16, torch.float64), ORDERS))
    large = [((128, 128), torch.float32, "rows"), ((128, 128), torch.float16, "columns")]
    for (n, m), dtype, order in [
        *((one, *way) for one, way in zip(SIZES, ways, strict=True)),
        *large,
    ]:
        p = ORDERS[order](torch.zeros(1000, n, m, dtype=dtype))
        sides = p[:, :, 0], p[:, 0]
        found[f"adjoint {n} x {m} {dtype} {order}"] = taken(
            small_adjoint,
            "small_adjoint_kernel",
            lambda p=p, sides=sides: adjoint(p, p, *sides, in_triton=True),
        )
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
