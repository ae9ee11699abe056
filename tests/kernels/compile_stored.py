"""Compile the kernels of stored scores for a card; a script of its own, as `compile_kernels`.

It takes the compute capability and prints a JSON object: for each kernel shared memory and bytes
spilled to a stack.
"""

from __future__ import annotations

import json
import sys

from compile_kernels import resources
from triton.compiler import ASTSource

from otdd_flash.kernels.segments.step import LOG2_E
from otdd_flash.kernels.stored.plan import (
    BLOCK_COLUMNS,
    BLOCK_ROWS,
    signed_plan_kernel,
    stored_plan_kernel,
    stored_product_kernel,
)
from otdd_flash.kernels.stored.scores import BLOCK, stored_scores_kernel
from otdd_flash.kernels.stored.step import (
    COLUMNS_AT_ONCE,
    ROWS_OF_PROGRAM,
    stored_step_kernel,
)
from otdd_flash.operators.tiled import LEAST_EXPONENT

INTEGERS = {"problem_stride", "stride", "masses_stride", "rows", "columns", "points", "classes"}
INTEGERS |= {"first", "n"}
KINDS = {
    "*fp32": {"scores_ptr", "transposed_ptr", "potential_ptr", "highest_ptr", "cross_ptr"},
    "*i64": {"row_labels_ptr", "column_labels_ptr", "segments_ptr"},
    "*i32": {"programs_ptr"},
    "*i8": {"active_ptr"},
}
KINDS["*fp32"] |= {"own_ptr"}


def argument_type(kernel: str, name: str) -> str:
    if name in INTEGERS:
        return "i32"
    # What is written of plans with their signs is float32.
    if kernel == "signed_plan_kernel" and name == "out_ptr":
        return "*fp32"
    return next((kind for kind, names in KINDS.items() if name in names), "*fp64")


def main() -> None:
    tile = {"BLOCK_M": BLOCK_ROWS, "BLOCK_N": BLOCK_COLUMNS}
    step = {"LOG2_E": LOG2_E, "BLOCK_M": ROWS_OF_PROGRAM, "BLOCK_N": COLUMNS_AT_ONCE}
    compiled = {}
    for kernel, constants in (
        *((stored_scores_kernel, {"SYMMETRIC": own, "BLOCK": BLOCK}) for own in (False, True)),
        (stored_step_kernel, step),
        (stored_plan_kernel, {"LEAST": LEAST_EXPONENT} | tile),
        (stored_product_kernel, tile),
        *((signed_plan_kernel, {"OWN": own} | tile) for own in (False, True)),
    ):
        names = kernel.arg_names
        signature = {
            name: "constexpr" if name in constants else argument_type(kernel.__name__, name)
            for name in names
        }
        values = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, signature, values, {})
        compiled[f"{kernel.__name__} {len(compiled)}"] = resources(source, int(sys.argv[1]), 4)
    sys.stdout.write(json.dumps(compiled) + "\n")


if __name__ == "__main__":
    main()
