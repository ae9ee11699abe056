"""The kernel of small plans compiles for the cards it is written for, without spilling registers.

Under the interpreter there is nothing to compile, so the test runs this file as a script, without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SIZES = [(2, 2), (4, 4), (8, 8), (16, 16), (32, 32), (64, 64), (128, 2), (128, 64), (128, 128)]
SIZES += [(127, 127)]
# Which side of a matrix is contiguous.
ORDERS = {"rows": "column_stride", "columns": "row_stride", "neither": "none"}


def test_registers_hold_what_a_program_does() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 3 * len(ORDERS) * len(SIZES)
    spilling = [taken for taken in found if taken["stack"]]
    # Large matrices of other strides, or of odd ones, are right, and not as fast.
    rare = [
        taken["n"] == 127 or (taken["n"] > 32 and taken["order"] == "neither") for taken in spilling
    ]
    assert all(rare), spilling


def needs(n: int, m: int, io: str, order: str) -> dict[str, object]:
    import torch
    import triton.language as tl
    from compile_kernels import resources
    from triton.compiler import ASTSource

    from otdd_flash.batched.adjoint import LIMITS
    from otdd_flash.kernels.batched.small_adjoint import (
        packing_for,
        padded,
        small_adjoint_kernel,
    )

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
    return {"n": n, "m": m, "io": io, "order": order} | resources(source, 90, packing.warps)


if __name__ == "__main__":
    taken = [
        needs(*size, io, order)
        for io in ("fp32", "fp16", "fp64")
        for order in ORDERS
        for size in SIZES
    ]
    sys.stdout.write(json.dumps(taken) + "\n")
