"""Compile the kernels over a cost matrix for sm_90; a script of its own, as `compile_kernels`.

It prints a JSON object: for each kernel and type shared memory and bytes spilled to a stack.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from compile_batched import TYPES, taken

from otdd_flash.kernels.matrix import facts, half_step, sums

TYPES[torch.bfloat16] = "*bf16"


class Nothing:
    """A kernel that, launched, does nothing."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *given, **constants: None


def main() -> None:
    step = half_step.matrix_sums_of_lines
    half_step.matrix_bias_kernel = Nothing()
    one, found = torch.ones((), dtype=torch.float64), {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        costs = torch.zeros(4096, 4096, dtype=dtype)
        bias, masses = torch.zeros(4096), torch.zeros(4096, dtype=torch.float64)
        given, twice = (costs, masses, bias, one), (masses, masses)
        runs = {
            "rows": (half_step, lambda given=given: step(*given)),
            "columns": (half_step, lambda given=given: step(*given, columns=True)),
            "sums": (
                sums,
                lambda costs=costs, twice=twice: sums.matrix_sums(costs, twice, twice, one, -700.0),
            ),
            "facts": (
                facts,
                lambda costs=costs, masses=masses: facts.matrix_row_facts(costs, masses),
            ),
        }
        for name, (module, run) in runs.items():
            found[f"{name} {dtype}"] = taken(module, f"matrix_{name}_kernel", run)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
