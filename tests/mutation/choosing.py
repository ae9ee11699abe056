"""Which tests a mutant can fail, and in which order they are worth their time."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

from coverage import CoverageData

from tests.mutation.listed import Mutant

# Tests without a time have this one, in seconds.
UNKNOWN = 1.0

# Of the files with the most specific tests: how many, and tests of each that come first.
FIRST_FILES, FIRST_TESTS = 8, 6


class Choice(NamedTuple):
    """Tests to run, in that order, and how many there are that execute the line."""

    tests: list[str]
    possible: int


class Executions:
    """What `make coverage` has found: which test executes which line, and how long it takes.

    Args:
        data: the file of coverage, with a context for every test.
        times: the junit file of the same run, if there is one.
    """

    def __init__(self, data: Path, times: Path) -> None:
        self._data = CoverageData(str(data))
        self._data.read()
        self.seconds = {
            f"{case.get('classname', '').replace('.', '/')}.py::{_plain(case.get('name', ''))}": (
                float(case.get("time", UNKNOWN))
            )
            for case in (ET.parse(times).iter("testcase") if times.exists() else ())
        }
        self._lines: dict[str, dict[int, set[str]]] = {}
        self._total: Counter[str] = Counter()
        self._within: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._count(data)

    def _count(self, data: Path) -> None:
        """Lines that every test executes, in all and in each file."""
        with sqlite3.connect(data) as base:
            files = dict(base.execute("select id, path from file"))
            contexts = dict(base.execute("select id, context from context"))
            for file, context, bits in base.execute(
                "select file_id, context_id, numbits from line_bits"
            ):
                test = _test(contexts[context])
                lines = sum(byte.bit_count() for byte in bits)
                self._total[test] += lines
                self._within[files[file]][test] += lines

    def of(self, mutant: Mutant) -> set[str]:
        """The tests that execute a mutant's line, or if it runs at import its function or file."""
        lines = self._of_file(mutant.file)
        tests = lines.get(mutant.line, set()) | lines.get(mutant.statement, set())
        if not tests and mutant.body is not None:
            first, last = mutant.body
            tests = set().union(*(lines.get(line, set()) for line in range(first, last + 1)))
        if not tests and mutant.body is None:
            tests = set().union(*lines.values())
        return tests

    def choose(self, mutant: Mutant, seconds: float) -> Choice:
        """Tests for so many seconds, cheapest first.

        They are from every file of tests, of first those that do little else.
        """
        tests = self.of(mutant)
        within = next((n for path, n in self._within.items() if path.endswith(mutant.file)), {})
        share = {test: within.get(test, 0) / max(1, self._total[test]) for test in tests}
        queues: defaultdict[str, list[str]] = defaultdict(list)
        for test in sorted(tests, key=lambda test: (-round(share[test], 2), self._time(test))):
            queues[test.partition("::")[0]].append(test)
        stem = Path(mutant.file).stem
        files = sorted(queues, key=lambda file: (stem not in file, -share[queues[file][0]]))
        turns = [file for file in files[:FIRST_FILES] for _ in range(FIRST_TESTS)]
        turns += [file for _ in range(max(map(len, queues.values()), default=0)) for file in files]
        chosen: list[str] = []
        for file in turns:
            # One that takes too long stands in no other's way.
            if queues[file] and self._time(test := queues[file].pop(0)) <= seconds:
                seconds -= self._time(test)
                chosen.append(test)
        return Choice(sorted(chosen, key=self._time), len(tests))

    def _of_file(self, file: str) -> dict[int, set[str]]:
        if file not in self._lines:
            self._lines[file] = {
                line: {_test(context) for context in contexts if context}
                for measured in self._data.measured_files()
                if measured.endswith(file)
                for line, contexts in self._data.contexts_by_lineno(measured).items()
            }
        return self._lines[file]

    def _time(self, test: str) -> float:
        return self.seconds.get(test, UNKNOWN)


def _test(context: str) -> str:
    """The test of a context such as `tests/test_a.py::test_b[c]|run`."""
    return _plain(context.rpartition("|")[0])


def _plain(name: str) -> str:
    """Without the group that keeps tests on one worker, `test_b@group`."""
    return re.sub(r"@[\w\-. ]+$", "", name)
