"""Draw mutants, run them, and say which survived: `python -m tests.mutation`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path

from tests.mutation.choosing import Executions
from tests.mutation.drawing import draw
from tests.mutation.running import preload, run

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Print every verdict, and at the end their numbers; every worker takes each `workers`-th."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests, for each mutant")
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--data", type=Path, default=ROOT / ".coverage")
    parser.add_argument("--times", type=Path, default=ROOT / ".coverage.xml")
    parser.add_argument("--only", type=int, nargs="+", help="mutants of these numbers")
    parser.add_argument("--output", type=Path, help="a line of JSON for each")
    given = parser.parse_args()
    os.chdir(ROOT)
    os.environ.setdefault("TRITON_INTERPRET", "1")
    executions, counts = Executions(given.data, given.times), Counter[str]()
    preload()
    for number, mutant in enumerate(draw(ROOT, given.count, given.seed)):
        if number % given.workers != given.worker or (given.only and number not in given.only):
            continue
        tests, possible = executions.choose(mutant, given.seconds)
        verdict = run(ROOT, mutant, tests, given.seconds, executions.seconds)
        counts[verdict.status] += 1
        sys.stdout.write(
            f"{number} {verdict.status}: {mutant.file}:{mutant.line}  {mutant.old}  ->  "
            f"{mutant.new}  ({len(tests)} of {possible} tests, {verdict.seconds:.0f} s, "
            f"{verdict.by})\n"
        )
        sys.stdout.flush()
        if given.output is not None:
            with given.output.open("a", encoding="utf-8") as lines:
                row = {"number": number, **mutant._asdict(), **verdict._asdict()}
                lines.write(json.dumps(row) + "\n")
    sys.stdout.write(f"{dict(counts)}\n")


if __name__ == "__main__":
    main()
