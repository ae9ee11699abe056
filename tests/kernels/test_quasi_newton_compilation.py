"""The kernels of a quasi-Newton step compile for the cards that they are written for.

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
CAPABILITIES = {"A100": 80, "RTX 4090": 89, "H200": 90}


@pytest.mark.parametrize("name", CAPABILITIES)
def test_kernels_compile_without_spilling(name):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, __file__, str(CAPABILITIES[name])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    taken = json.loads(done.stdout.splitlines()[-1])
    assert len(taken) == 6
    assert all(kernel["stack"] == 0 for kernel in taken.values()), taken


def argument_type(name: str) -> str:
    potentials = ("f_ptr", "g_ptr", "updated_ptr", "candidate_ptr")
    if name.removeprefix("new_").removeprefix("last_") in potentials:
        return "*fp32"
    if name.endswith("_ptr"):
        return "*fp64"
    return {"damping": "fp32", "unit": "fp32"}.get(name, "i32")


def needs(kernel, constants: dict[str, object], warps: int, capability: int) -> dict[str, int]:
    from compile_kernels import resources
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else argument_type(name) for name in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*")
    }
    values = {(names.index(name),): value for name, value in constants.items()}
    return resources(ASTSource(kernel, signature, values, aligned), capability, warps)


def main() -> None:
    from otdd_flash.solver.quasi_newton import DUAL_ROUNDING, MEMORY

    from otdd_flash.engine.trust import GROWTH, PATIENCE
    from otdd_flash.kernels import quasi_newton_decision as decision
    from otdd_flash.kernels import quasi_newton_sums as sums
    from otdd_flash.kernels import quasi_newton_update as update

    capability = int(sys.argv[1])
    limits = {"DUAL_ROUNDING": DUAL_ROUNDING, "GROWTH": GROWTH, "PATIENCE": PATIENCE}
    memory = {"MEMORY": MEMORY, "SUMS": sums.SUMS}
    variants = {
        "log_mass": (sums.log_mass_kernel, {"BLOCK": sums.BLOCK_MASS}, 8),
        "decision": (
            decision.quasi_newton_decision_kernel,
            {**memory, **limits, "LANES": 16, "BLOCK": decision.BLOCK_PROGRAMS},
            1,
        ),
    }
    for symmetric in (False, True):
        shared = {"SELF": symmetric, "MEMORY": MEMORY}
        block, rows = sums.BLOCK_POINTS, 32
        kernel = sums.quasi_newton_sums_kernel
        known = {**memory, **shared, "ROWS": rows, "BLOCK": block}
        variants[f"sums {symmetric}"] = kernel, known, 8
        kernel, known = update.quasi_newton_update_kernel, {**shared, "BLOCK": update.BLOCK_POINTS}
        variants[f"update {symmetric}"] = kernel, known, 4
    taken = {name: needs(*variant, capability) for name, variant in variants.items()}
    sys.stdout.write(json.dumps(taken) + "\n")


if __name__ == "__main__":
    main()
