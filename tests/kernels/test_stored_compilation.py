"""The kernels of stored scores compile for the cards that they are written for, and fit them.

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
# Compute capability and shared memory.
CARDS = {"A100": (80, 166_912), "RTX 4090": (89, 101_376), "H200": (90, 232_448)}

INTEGERS = {"problem_stride", "stride", "masses_stride", "rows", "columns", "points", "classes"}
INTEGERS |= {"first", "n"}
KINDS = {
    "*fp32": {"scores_ptr", "transposed_ptr", "potential_ptr", "highest_ptr", "cross_ptr"},
    "*i64": {"row_labels_ptr", "column_labels_ptr", "segments_ptr"},
    "*i32": {"programs_ptr"},
    "*i8": {"active_ptr"},
}
KINDS["*fp32"] |= {"own_ptr"}


@pytest.mark.parametrize("name", CARDS)
def test_kernels_compile_and_fit(name: str) -> None:
    capability, shared = CARDS[name]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, __file__, str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    for taken in json.loads(done.stdout.splitlines()[-1]):
        assert taken["shared"] <= shared, taken
        assert taken["stack"] == 0, taken


def argument_type(kernel: str, name: str) -> str:
    if name in INTEGERS:
        return "i32"
    # What is written of plans with their signs is float32.
    if kernel == "signed_plan_kernel" and name == "out_ptr":
        return "*fp32"
    return next((kind for kind, names in KINDS.items() if name in names), "*fp64")


def main() -> None:
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

    tile = {"BLOCK_M": BLOCK_ROWS, "BLOCK_N": BLOCK_COLUMNS}
    step = {"LOG2_E": LOG2_E, "BLOCK_M": ROWS_OF_PROGRAM, "BLOCK_N": COLUMNS_AT_ONCE}
    compiled = []
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
        taken = resources(ASTSource(kernel, signature, values, {}), int(sys.argv[1]), 4)
        compiled.append({"kernel": kernel.__name__, **taken})
    sys.stdout.write(json.dumps(compiled) + "\n")


if __name__ == "__main__":
    main()
