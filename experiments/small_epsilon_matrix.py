"""A cost matrix at small epsilon: value, interval, marginal error and iterations, against `emd2`.

    python -m experiments.small_epsilon_matrix [--points 512] [--output DIR]

The problem of FastSinkhorn: a grid on [0, 1], Gaussian masses at 0.3 and 0.7 of spread 0.08, costs
|x - y|^2. In float32 for epsilon from 1 to 1e-4, where its Figure 4 ends, and in double precision
to 1e-6. What float32 cannot tell is refused and said so. exp(-C / epsilon) in float32 is 0 for the
share of pairs in the last column.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.report.page import (
    INK,
    SOURCE_COLOR,
    TARGET_COLOR,
    new_figure,
    save_picture,
)

EPSILONS = {
    "float32": (1.0, 0.1, 0.01, 1e-3, 1e-4),
    "float64": (1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-5, 1e-6),
}
PANELS = {
    "value": "value",
    "width": "width of its interval",
    "marginal_error": "marginal error",
    "iterations": "iterations",
}
SPREAD, CENTRES = 0.08, (0.3, 0.7)


def problem(points: int) -> tuple[Tensor, Tensor, Tensor]:
    """Costs and both masses, float64."""
    x = torch.linspace(0, 1, points, dtype=torch.float64)
    bumps = [torch.exp(-((x - at) ** 2) / (2 * SPREAD**2)) for at in CENTRES]
    return (x[:, None] - x).square(), bumps[0] / bumps[0].sum(), bumps[1] / bumps[1].sum()


def unregularised(costs: Tensor, a: Tensor, b: Tensor) -> float:
    """min_P <C, P>, by POT."""
    import ot

    return float(ot.emd2(a.numpy(), b.numpy(), costs.numpy(), numItermax=10_000_000))


def solve(costs: Tensor, a: Tensor, b: Tensor, epsilon: float) -> dict[str, Any]:
    """One row."""
    row: dict[str, Any] = {"dtype": str(costs.dtype).removeprefix("torch."), "epsilon": epsilon}
    row["underflow"] = float((torch.exp(-costs.float() / epsilon) == 0).float().mean())
    started = time.perf_counter()
    try:
        found = otdd.matrix_transport(costs, a, b, epsilon=epsilon)
    except otdd.InputError as error:
        return row | {"refused": str(error)}
    return row | {
        "value": found.value,
        "bounds": list(found.bounds),
        "transport_cost": found.transport_cost,
        "marginal_error": found.marginal_error,
        "tolerance": found.tolerance,
        "iterations": found.iterations,
        "passes": found.passes,
        "seconds": time.perf_counter() - started,
    }


def draw(rows: list[dict[str, Any]], exact: float, path: Path) -> None:
    """Value, width of its interval, marginal error and iterations, by epsilon."""
    figure = new_figure(12.0, 3.2)
    panels = figure.subplots(1, 4)
    styles = {"float32": (SOURCE_COLOR, "o", "-"), "float64": (TARGET_COLOR, "s", "--")}
    for dtype, (colour, marker, line) in styles.items():
        solved = [row for row in rows if row["dtype"] == dtype and "value" in row]
        widths = [row["bounds"][1] - row["bounds"][0] for row in solved]
        drawn = [widths if key == "width" else [row[key] for row in solved] for key in PANELS]
        for axes, values in zip(panels, drawn, strict=True):
            axes.plot(
                [row["epsilon"] for row in solved], values,
                color=colour, marker=marker, linestyle=line, label=dtype, markersize=4,
            )  # fmt: skip
    panels[0].axhline(exact, color=INK, linewidth=0.8, linestyle=":", label="emd2")
    for axes, title in zip(panels, PANELS.values(), strict=True):
        axes.set(xscale="log", xlabel="epsilon", title=title)
        axes.invert_xaxis()
    for axes in panels[1:]:
        axes.set_yscale("log")
    panels[0].legend(frameon=False)
    figure.tight_layout()
    save_picture(figure, path)


def main() -> None:
    """Write small_epsilon_matrix.json and its picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=512)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    costs, a, b = problem(given.points)
    exact = unregularised(costs, a, b)
    rows = [
        solve(costs.to(getattr(torch, dtype)), a, b, epsilon)
        for dtype, epsilons in EPSILONS.items()
        for epsilon in epsilons
    ]
    content = {
        "environment": environment("torch", "POT"),
        "points": given.points,
        "unregularised": exact,
        "rows": rows,
    }
    write_result("small_epsilon_matrix", content, given.output)
    draw(rows, exact, given.output / "small_epsilon_matrix.png")
    sys.stdout.writelines(f"{row}\n" for row in rows)


if __name__ == "__main__":
    main()
