"""What a change costs a certified divergence: this checkout against another, solve by solve.

    python -m experiments.bench_certified --against DIR [--device cpu] [--data-root DIR]

Two processes, one of each checkout, solve every case of `certified_solves` in turn, at the default
tolerance, each first in half of the pairs. A row holds the median of the ratios of their times, an
interval that covers the true median in 95 of 100 runs (order statistics), and the ratio of the
widths of both intervals. Intervals that have no number in common are refused.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from scipy.stats import binom

from experiments.certified_solves import CASES
from experiments.environment import environment, write_result

HERE = Path(__file__).parents[1]
SOLVES = HERE / "experiments" / "certified_solves.py"


class Checkout:
    """A process that solves cases with the library of one checkout."""

    def __init__(self, folder: Path, device: str, root: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SOLVES), device, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(folder)},
            cwd=folder,
            text=True,
        )

    def __enter__(self) -> Checkout:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()

    def solve(self, index: int) -> dict[str, Any]:
        """What one solve of a case took and found."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{index}\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def median_interval(values: list[float]) -> tuple[float, float]:
    """Order statistics between which the true median lies with a probability of 0.95 or more."""
    ordered, count = sorted(values), len(values)
    rank = max(1, int(binom.ppf(0.025, count, 0.5)))
    return ordered[rank - 1], ordered[count - rank]


def compare(new: Checkout, old: Checkout, index: int, pairs: int) -> dict[str, Any]:
    """One row."""
    ratios, seconds = [], []
    for pair in range(pairs):
        sides = (new, old) if pair % 2 == 0 else (old, new)
        found = {side: side.solve(index) for side in sides}
        after, before = found[new], found[old]
        low = max(after["bounds"][0], before["bounds"][0])
        if low > min(after["bounds"][1], before["bounds"][1]):
            sys.exit(f"{after['bounds']} and {before['bounds']} hold no number in common")
        seconds.append((before["seconds"], after["seconds"]))
        ratios.append(after["seconds"] / before["seconds"])
    widths = [found["bounds"][1] - found["bounds"][0] for found in (before, after)]
    return {
        "ratio_of_times": statistics.median(ratios),
        "ratio_interval": median_interval(ratios),
        "seconds_before": statistics.median(before for before, _ in seconds),
        "seconds_after": statistics.median(after for _, after in seconds),
        "ratio_of_widths": widths[1] / widths[0],
        "relative_width": widths[1] / abs(after["value"]),
        "passes": [before["passes"], after["passes"]],
        "converged": [before["converged"], after["converged"]],
    }


def main() -> None:
    """Write bench_certified_DEVICE.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--against", type=Path, required=True, help="the other checkout")
    parser.add_argument("--before", help="the commit of it, for the record")
    parser.add_argument("--device", choices=list(CASES), default="cpu")
    parser.add_argument("--data-root", default=".")
    parser.add_argument("--pairs", type=int, default=20)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    root = str(Path(given.data_root).resolve())
    for index, case in enumerate(CASES[given.device]):
        with (
            Checkout(HERE, given.device, root) as new,
            Checkout(given.against.resolve(), given.device, root) as old,
        ):
            rows.append(case._asdict() | compare(new, old, index, given.pairs))
        sys.stdout.write(f"{rows[-1]}\n")
        sys.stdout.flush()
        facts = {"environment": environment("torch", "triton"), "before": given.before}
        write_result(f"bench_certified_{given.device}", facts | {"rows": rows})


if __name__ == "__main__":
    main()
