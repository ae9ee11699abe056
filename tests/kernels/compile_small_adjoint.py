"""Compile the kernel of small plans for sm_90; a script of its own, as `compile_kernels`.

It prints a JSON object: for each size, type and order of entries shared memory and bytes spilled to
a stack.
"""

from __future__ import annotations

import json
import sys
from itertools import product

import torch
import triton.language as tl
from compile_kernels import resources
from triton.compiler import ASTSource

from otdd_flash.batched.adjoint import LIMITS
from otdd_flash.kernels.batched.small_adjoint import packing_for, padded, small_adjoint_kernel

# One for each type and order, and the largest is added to them.
SIZES = [(2, 2), (4, 4), (64, 64), (8, 8), (16, 16), (127, 127), (128, 2), (32, 32), (128, 64)]
TYPES = "fp32", "fp16", "fp64"
# Which side of a matrix is contiguous.
ORDERS = {"rows": "column_stride", "columns": "row_stride", "neither": "none"}


def needs(n: int, m: int, io: str, order: str) -> dict[str, int]:
    dtype = torch.float64 if io == "fp64" else torch.float32
    computed = "fp64" if io == "fp64" else "fp32"
    limits, packing, (rows, columns) = LIMITS[dtype], packing_for(n, m, dtype), padded(n, m)
    constants = {
        "TYPE": getattr(tl, f"float{computed[2:]}"),
        "ROW_COTANGENTS": True,
        "COLUMN_COTANGENTS": True,
        "SIDES": True,
        "GOAL": limits.tolerance**2,
        "ROUNDING": limits.rounding,
        "SMALLEST": limits.smallest,
        "STEPS_PER_ROW": limits.steps_per_row,
        "BATCH": packing.matrices,
        "N": rows,
        "M": columns,
        "ROWS": packing.rows,
        "HELD": packing.held,
        "CONTIGUOUS": order == "rows" and (n, m) == (rows, columns),
    }
    names = small_adjoint_kernel.arg_names
    constants |= {name: 1 for name in names if name.endswith(ORDERS[order])}
    matrices = ("plan_ptr", "cotangent_ptr", "weighted_ptr")
    signature = {}
    for name in names:
        pointer = f"*{io if name in matrices else computed}" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else pointer
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
        or (m % 16 == 0 and name.endswith("stride") and name not in constants)
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(small_adjoint_kernel, signature, values, aligned)
    return resources(source, 90, packing.warps)


def main() -> None:
    cases = [(*SIZES[place], *way) for place, way in enumerate(product(TYPES, ORDERS))]
    cases += [(128, 128, io, order) for io, order in (("fp32", "rows"), ("fp16", "columns"))]
    found = {f"{n} x {m} {io} {order}": needs(n, m, io, order) for n, m, io, order in cases}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
