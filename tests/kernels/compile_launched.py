"""Compile kernels for sm_90 with what launches of theirs give them; a script as `compile_tiled`.

It prints what each kernel of small matrices, of linear systems and over cost matrices takes.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import torch
from compiling import taken

from otdd_flash.batched.adjoint import adjoint
from otdd_flash.kernels.batched import (
    small_adjoint,
    small_balance,
    tiny_balance,
    tiny_balance_backward,
)
from otdd_flash.kernels.batched.problems import Balanced, Cotangents, Derivatives, Problems
from otdd_flash.kernels.linear import cg_start, cg_step, halves
from otdd_flash.kernels.matrix import facts, half_step, sweep
from otdd_flash.kernels.matrix import sums as matrix_sums
from otdd_flash.kernels.matrix.facts import Place
from otdd_flash.kernels.passes import score_terms
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.points.packed_points import PackedPoints, arrange

Taken = dict[str, dict[str, int]]
ONE = torch.ones((), dtype=torch.float64)


def batched() -> Taken:
    """One size of each kernel of small matrices; plans of every type and order of entries."""
    x, few = torch.zeros(1000, 4, 4), torch.zeros(1000, 2, 2)
    y, of_plans = torch.zeros(1000, 32, 32), {}

    def balance(module: Any, name: str, logits: torch.Tensor) -> dict[str, int]:
        """Of a kernel that balances all matrices, forward or backward."""
        problems = Problems(logits, ONE, None, None, None, 20, None, negated=False)
        if name.endswith("backward"):
            given = Cotangents(logits, None, None)
            room = Derivatives.empty(logits, masses=False, with_scale=True)
            counts = (torch.empty(0),) if name.startswith("small") else ()
            run = partial(getattr(module, name), problems, *counts, given, room)
        else:
            room = Balanced.empty(logits, stops=False, potentials=False)
            run = partial(getattr(module, name), problems, room)
        return taken(module, f"{name}_kernel", run)

    for dtype, p in (
        (torch.float16, torch.zeros(1000, 16, 16).half().mT.contiguous().mT),
        (torch.float32, torch.zeros(1000, 128, 128)),
        (torch.float64, torch.zeros(1000, 32, 32).double()),
        ("strides", torch.zeros(1000, 64, 128)[:, :, ::2]),
    ):
        run = partial(adjoint, p, p, p[:, :, 0], p[:, 0], in_triton=True)
        of_plans[f"adjoint {dtype}"] = taken(small_adjoint, "small_adjoint_kernel", run)
    return of_plans | {
        "tiny": balance(tiny_balance, "tiny_balance", x),
        "tiny backward": balance(tiny_balance_backward, "tiny_balance_backward", few),
        "forward": balance(small_balance, "small_balance", y),
        "backward": balance(small_balance, "small_balance_backward", y),
    }


def linear() -> Taken:
    """Of several columns whose addresses are not aligned, and of what is added up in slots."""
    m, count, parts, slots = 9_999, 7, 2, 2
    layout = arrange(torch.zeros(m, dtype=torch.int64), 1)
    vectors = torch.zeros(6, count, m, dtype=torch.float64).transpose(1, 2)
    numbers = torch.zeros(7, count, dtype=torch.float64)
    counts, flags = torch.zeros(3, count, dtype=torch.int64), torch.zeros(3, count) > 0
    masses, scales = torch.ones(m, dtype=torch.float64), numbers[0]
    limits = torch.zeros(layout.size, 2, count).half(), scales
    kept = cg_start.Kept(*vectors[:3], *numbers[:3], counts[0], *flags[:2])
    moving = cg_step.Vectors(*vectors[3:])
    stepping = cg_step.Numbers(*numbers[3:6], counts[1], flags[2], numbers[6], counts[2])
    points, squares = torch.zeros(m, 64), torch.zeros(2, layout.size)
    side = Side(PackedPoints(layout, points.half(), squares, 1.0), squares[0], squares[1])
    given = side, side, Scores(1.0, torch.zeros(1, 1), 3), (points[:, 0], points[:, 0]), 0.1
    split = layout.size // 2 * (slots - 1)
    values = torch.zeros(layout.size + split, parts, count)
    products = halves.Unmerged(values, layout.size - split, split, slots)
    image = cg_step.Image(products, scales, masses, masses, layout.position)
    step = partial(cg_step.cg_step, image, (masses, ONE), moving, stepping, limits, 1e-7)
    filled = layout.filled.double()
    runs = {
        "to halves": (halves, partial(halves.to_halves, vectors[0], layout, masses)),
        "from halves": (halves, partial(halves.from_halves, products, scales, layout, masses)),
        "plan terms": (score_terms, partial(score_terms.plan_terms, *given, masses)),
        "onward": (halves, partial(halves.onward, products, scales, filled)),
        "row sums": (halves, partial(halves.row_sums, products, layout, masses)),
        "cg step": (cg_step, partial(step, constants=False, preconditioned=False)),
        "cg step ": (cg_step, partial(step, constants=True, preconditioned=True)),
        "cg turn": (
            cg_step,
            partial(cg_step.cg_turn, vectors[0], layout.position, moving, stepping, limits),
        ),
    }
    for stage in (cg_start.BEGIN, cg_start.CORRECT, cg_start.RESUME):
        read = {cg_start.BEGIN.value: vectors[0], cg_start.CORRECT.value: image}.get(stage.value)
        started = read, (masses, ONE, masses), layout.position, kept, moving, stepping, limits
        ways = {"constants": True, "preconditioned": stage is cg_start.RESUME}
        run = partial(cg_start.cg_start, *started, (1e-5, 0.5, 1000, 32), stage, **ways)
        runs[f"cg start{' ' * stage.value}"] = cg_start, run
    found = {}
    for name, (module, run) in runs.items():
        kernel = f"{name.strip().replace(' ', '_')}_kernel"
        found[name] = taken(module, kernel, run)
    return found


def matrix() -> Taken:
    costs = {
        dtype: torch.zeros(4096, 4096, dtype=dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32)
    }
    single, vector = Place.of(costs[torch.float32]), torch.zeros(4096)
    masses, long = vector.double(), torch.zeros(16_384)
    given, twice = (masses, vector, ONE), (masses, masses)
    level, active = torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.bool)
    lines, bias = half_step.matrix_sums_of_lines, (half_step, "matrix_bias_kernel")
    sweeping = [(sweep, "matrix_sweep_kernel")]
    sweeping += [(sweep, f"matrix_{each}_kernel") for each in ("swept", "absent")]

    def swept() -> None:
        exact = long.double()
        sweep.matrix_sweep(single, (exact, exact), long, long, level, active)
        sweep.fill_absent(single, (exact, exact), long, level, long)

    runs = {
        "rows": (half_step, partial(lines, costs[torch.float32], *given), [bias]),
        "columns": (half_step, partial(lines, costs[torch.bfloat16], *given, columns=True), [bias]),
        "sums": (matrix_sums, partial(matrix_sums.matrix_sums, single, twice, twice, ONE, -700.0)),
        "facts": (
            facts,
            partial(facts.matrix_row_facts, Place.of(costs[torch.float16]), 4096, masses),
        ),
    }
    found = {}
    for name, (module, run, *others) in runs.items():
        found[name] = taken(module, f"matrix_{name}_kernel", run, *(others[0] if others else ()))
    for one in sweeping:
        found[one[1]] = taken(*one, swept, *(other for other in sweeping if other != one))
    return found


if __name__ == "__main__":
    groups = {"batched": batched(), "linear": linear(), "matrix": matrix()}
    sys.stdout.write(json.dumps(groups) + "\n")
