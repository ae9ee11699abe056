"""Compile the kernels of linear systems for sm_90, and what they take of plans.

A script of its own, as `compile_kernels`.
It prints a JSON object: for each kernel shared memory and bytes spilled to a stack.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import torch
from compile_batched import taken

from otdd_flash.kernels.linear import cg_start, cg_step, halves, onward, row_sums
from otdd_flash.kernels.passes import plan_terms
from otdd_flash.kernels.passes.sides import Scores, Side
from otdd_flash.kernels.points.packed_points import PackedPoints, arrange


def needs(m: int, count: int, shapes: tuple[tuple[int, int], ...]) -> dict[str, dict[str, int]]:
    layout = arrange(torch.zeros(m, dtype=torch.int64), 1)
    vectors = torch.zeros(6, count, m, dtype=torch.float64).transpose(1, 2)
    numbers = torch.zeros(7, count, dtype=torch.float64)
    counts, flags = torch.zeros(3, count, dtype=torch.int64), torch.zeros(3, count) > 0
    masses, total = torch.ones(m, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    scales, packed = numbers[0], torch.zeros(layout.size, 2, count).half()
    kept = cg_start.Kept(*vectors[:3], *numbers[:3], counts[0], *flags[:2])
    moving = cg_step.Vectors(*vectors[3:])
    stepping = cg_step.Numbers(*numbers[3:6], counts[1], flags[2], numbers[6], counts[2])
    runs = {
        f"to halves{of}": (halves, "to_halves", partial(halves.to_halves, values, layout, masses))
        for of, values in (("", vectors[0]), (" adjacent", torch.zeros(m, halves.MANY_COLUMNS)))
    }
    points, squares = torch.zeros(m, 64), torch.zeros(2, layout.size)
    side = Side(PackedPoints(layout, points.half(), squares, 1.0), squares[0], squares[1])
    given = side, side, Scores(1.0, torch.zeros(1, 1), 3), (points[:, 0], points[:, 0]), 0.1
    terms = partial(plan_terms.plan_terms, *given, masses)
    runs["plan terms"] = plan_terms, "plan_terms", terms
    for parts, slots in shapes:
        split = layout.size // 2 * (slots - 1)
        values = torch.zeros(layout.size + split, parts, count)
        products = halves.Unmerged(values, layout.size - split, split, slots)
        of = f"{parts} {slots}"
        image = cg_step.Image(products, scales, masses, masses, layout.position)
        step = partial(
            cg_step.cg_step, image, (masses, total), moving, stepping, (packed, scales), 1e-7
        )
        for constants, preconditioned in ((False, False), (True, False), (True, True)):
            name = f"step {of}{' constants' * constants}{' preconditioned' * preconditioned}"
            run = partial(step, constants=constants, preconditioned=preconditioned)
            runs[name] = cg_step, "cg_step", run
        run = partial(onward.onward, products, scales, layout.filled.double())
        runs[f"onward {of}"] = onward, "onward", run
        run = partial(halves.from_halves, products, scales, layout, masses)
        runs[f"from halves {of}"] = halves, "from_halves", run
        run = partial(row_sums.row_sums, products, layout, masses)
        runs[f"row sums {of}"] = row_sums, "row_sums", run
    for stage in (cg_start.BEGIN, cg_start.CORRECT, cg_start.RESUME):
        read = {cg_start.BEGIN.value: vectors[0], cg_start.CORRECT.value: image}.get(stage.value)
        given = read, (masses, total, masses), layout.position, kept, moving, stepping
        limits = (packed, scales), (1e-5, 0.5, 1000, 32), stage
        ways = {"constants": True, "preconditioned": stage is cg_start.RESUME}
        run = partial(cg_start.cg_start, *given, *limits, **ways)
        runs[f"start {stage.value}"] = cg_start, "cg_start", run
    run = partial(cg_step.cg_turn, vectors[0], layout.position, moving, stepping, (packed, scales))
    runs["turn"] = cg_step, "cg_turn", run
    return {
        f"{name}, {m} x {count}": taken(module, f"{kernel}_kernel", run)
        for name, (module, kernel, run) in runs.items()
    }


def main() -> None:
    found = needs(10_000, 1, ((1, 2), (2, 2))) | needs(9_999, 7, ((2, 1),))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
