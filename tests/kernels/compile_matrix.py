"""Compile the kernels over a cost matrix for sm_90; a script of its own, as `compile_kernels`.

It prints a JSON object: for each kernel and type shared memory and bytes spilled to a stack.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from compile_batched import TYPES, taken

from otdd_flash.kernels.matrix import facts, half_step, sums, sweep, swept_columns
from otdd_flash.kernels.matrix.place import Place

TYPES |= {torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int8: "*i8"}

# Columns of a sweep by the type of costs: the most, of many rows at once, and of as many as there
# are processors.
WIDTHS = {torch.float16: 8192, torch.bfloat16: 1024, torch.float32: 16_384}
SWEEPS = {
    "matrix_sweep_kernel": sweep,
    "matrix_swept_kernel": swept_columns,
    "matrix_absent_kernel": swept_columns,
}
KERNELS = {name: inspect.getattr_static(module, name) for name, module in SWEEPS.items()}


class Nothing:
    """A kernel that, launched, does nothing."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *given, **constants: None


def sweeping(place: Place, m: int) -> Callable[[], None]:
    """Launches all kernels of a sweep over as many rows as columns."""
    vector, exact = torch.zeros(m), torch.zeros(m, dtype=torch.float64)
    level, active = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.bool)

    def run() -> None:
        sweep.matrix_sweep(place, (exact, exact), vector, vector, level, active)
        swept_columns.fill_absent(place, (exact, exact), vector, level, vector)

    return run


def alone(name: str, run: Callable[[], None]) -> dict[str, int]:
    """What one kernel of a sweep takes; the others do nothing."""
    for other, module in SWEEPS.items():
        setattr(module, other, Nothing() if other != name else KERNELS[name])
    return taken(SWEEPS[name], name, run)


def main() -> None:
    step = half_step.matrix_sums_of_lines
    half_step.matrix_bias_kernel = Nothing()
    one, found = torch.ones((), dtype=torch.float64), {}
    for dtype, m in WIDTHS.items():
        costs = torch.zeros(4096, 4096, dtype=dtype)
        place = Place.of(costs)
        bias, masses = torch.zeros(4096), torch.zeros(4096, dtype=torch.float64)
        given, twice = (costs, masses, bias, one), (masses, masses)
        runs = {
            "rows": (half_step, lambda given=given: step(*given)),
            "columns": (half_step, lambda given=given: step(*given, columns=True)),
            "sums": (
                sums,
                lambda place=place, twice=twice: sums.matrix_sums(place, twice, twice, one, -700.0),
            ),
            "facts": (
                facts,
                lambda place=place, masses=masses: facts.matrix_row_facts(place, 4096, masses),
            ),
        }
        # Of float32 all are compiled.
        some = {torch.float16: ("rows", "facts"), torch.bfloat16: ("columns", "sums")}
        for name in some.get(dtype, tuple(runs)):
            module, run = runs[name]
            found[f"{name} {dtype}"] = taken(module, f"matrix_{name}_kernel", run)
        found[f"sweep {m} {dtype}"] = alone("matrix_sweep_kernel", sweeping(place, m))
    for name in ("matrix_swept_kernel", "matrix_absent_kernel"):
        found[name] = alone(name, sweeping(place, 1024))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
