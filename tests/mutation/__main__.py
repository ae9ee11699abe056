"""Break listed expressions one at a time, and say which no test sees."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.mutation.choosing import Executions
from tests.mutation.listed import LISTS, Entry, Mutant, NotFoundError, find, read
from tests.mutation.running import copied, failing, preload, run

ROOT = Path(__file__).resolve().parents[2]
# Of the seconds of a mutant, what its tests took by themselves: half of it goes to coverage, which
# does not watch here, and what is left imports and collects.
SHARE = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write every verdict; 1 if there is something to do, as `_needs_work` has it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", choices=LISTS, action="append", help="default: both")
    parser.add_argument("--only", nargs="+", default=(), help="functions, as `Plan.apply`")
    parser.add_argument("--folder", default="", help="of the file, as otdd_flash/solver")
    parser.add_argument("--sample", type=int, help="so many of them, at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each mutant")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--data", type=Path, default=ROOT / ".coverage")
    parser.add_argument("--times", type=Path, default=ROOT / ".coverage.xml")
    parser.add_argument("--against", type=Path, help="results of before: which survive newly?")
    parser.add_argument("--output", type=Path, default=ROOT / "mutants.json")
    given = parser.parse_args(arguments)
    before = json.loads(given.against.read_text("utf-8")) if given.against else []
    entries = [
        entry
        for name in given.list or LISTS
        for entry in read(LISTS[name])
        if not given.only or f".{entry.function}".endswith(tuple(f".{name}" for name in given.only))
    ]
    rows, mutants = _found(entries, given.folder)
    if given.sample is not None:
        mutants = random.Random(given.seed).sample(mutants, min(given.sample, len(mutants)))
    executions = Executions(given.data, given.times) if given.data.exists() else None
    if executions is None and not all(entry.test for entry, _ in mutants):
        parser.error(f"run `make coverage` first: {given.data} says which tests execute a line")
    for row in _run(mutants, executions, given):
        print(_sentence(row), flush=True)
        rows = [*(each for each in rows if _key(each) != _key(row)), row]
        _write(rows, given.output)
    old = {_key(row): row["status"] for row in before}
    for row in rows:
        row["newly survives"] = row["status"] == "survived" and old.get(_key(row)) != "survived"
    _write(rows, given.output)
    for row in filter(_needs_work, rows):
        sys.stdout.write(f"to do: {'newly ' if given.against else ''}{_sentence(row)}\n")
    sys.stdout.write(f"{dict(Counter(row['status'] for row in rows))}\n")
    return int(any(map(_needs_work, rows)))


def _needs_work(row: dict[str, Any]) -> bool:
    """Whether a mutant survives that did not before, or nothing can be said of it."""
    unknown = ("not found", "no such test", "test fails anyway")
    return row["newly survives"] or row["status"] in unknown


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["function"], row["expression"], row["replacement"]


def _write(rows: list[dict[str, Any]], output: Path) -> None:
    output.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _sentence(row: dict[str, Any]) -> str:
    found = f"{row['status']}: {row['module']} {row['function']}"
    found += f"  {row['expression']}  ->  {row['replacement']}"
    if "tests" in row:
        found += (
            f"  ({row['tests']} of {row['possible']} tests, {row['seconds']:.0f} s, {row['by']})"
        )
    return found


def _found(
    entries: list[Entry], folder: str
) -> tuple[list[dict[str, Any]], list[tuple[Entry, Mutant]]]:
    """Rows of entries in a folder that are not run, and the others with their mutants."""
    rows, mutants = [], []
    for entry in entries:
        status, mutant = "removed" if entry.removed else "not found", None
        if not entry.removed:
            with suppress(NotFoundError):
                mutant = find(entry, ROOT)
                status = "equivalent" if entry.equivalent else ""
        if not (mutant.file if mutant else entry.module).startswith(folder):
            continue
        if status or mutant is None:
            rows.append({**entry._asdict(), "status": status})
        else:
            mutants.append((entry._replace(module=mutant.file), mutant))
    return rows, mutants


def _run(
    mutants: list[tuple[Entry, Mutant]], executions: Executions | None, given: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The rows of mutants as they end, and once more those whose test fails anyway."""
    tasks = []
    for entry, mutant in mutants:
        tests, possible = [], 0
        if executions is not None:
            tests, possible = executions.choose(mutant, SHARE * given.seconds)
        if entry.test:
            tests = [entry.test, *(test for test in tests if test != entry.test)]
        tasks.append((entry, mutant, tests, max(possible, len(tests)), given.seconds))
    preload()
    known, rows = executions.seconds if executions else {}, []
    with tempfile.TemporaryDirectory() as folder:
        start = copied(ROOT, Path(folder)), known
        # Not a `multiprocessing.Pool`, whose workers may have no children: tests start ranks.
        with ProcessPoolExecutor(given.workers, get_context("fork"), _start, start) as pool:
            for done in as_completed([pool.submit(_row, task) for task in tasks]):
                rows.append(done.result())
                yield rows[-1]
            # A test that fails without a mutant kills none, nor does a file that is not collected.
            killers = sorted({row["by"] for row in rows if row["status"] == "killed"})
            broken = pool.submit(_failing, [each for each in killers if "::" in each]).result()
            files = [each for each in killers if each.endswith(".py")]
            broken |= pool.submit(_failing, files, collect=True).result()
            yield from (
                row | {"status": "test fails anyway"}
                for row in rows
                if row["status"] == "killed" and row["by"] in broken
            )


def _start(copy: Path, known: dict[str, float]) -> None:
    """Give a worker a copy of its own, and the times of tests."""
    global _checkout
    # Ends its test as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    _checkout = copied(copy, copy.parent / str(os.getpid())), known


def _row(task: tuple[Entry, Mutant, list[str], int, float]) -> dict[str, Any]:
    """Run the tests of a mutant, which are some of the possible ones, for so many seconds."""
    entry, mutant, tests, possible, seconds = task
    verdict = run(_checkout[0], mutant, tests, seconds, _checkout[1])
    counts = {"line": mutant.line, "tests": len(tests), "possible": possible}
    return entry._asdict() | verdict._asdict() | counts


def _failing(tests: list[str], *, collect: bool = False) -> set[str]:
    return failing(_checkout[0], tests, collect=collect)


if __name__ == "__main__":
    sys.exit(main())
