"""Compare the cases with a commit, with the file, or write the file: `python -m tests.frozen`."""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.frozen import recording, stored
from tests.frozen.cases import CASES, group_of
from tests.frozen.running import ROOT, Run, record_here, recorded, settings, tree_of

# Cases are entered that agree within so much less than is allowed later, on another processor.
MARGIN = 2.0


def main() -> None:
    """Exit with 0 where all agree, 1 where a case differs, 2 where the arguments are wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.frozen", description=__doc__)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--against", metavar="COMMIT", help="demand the bits of a commit")
    asked.add_argument("--check", action="store_true", help="compare with tests/frozen.json")
    asked.add_argument("--write", action="store_true", help="write tests/frozen.json")
    asked.add_argument("--list", action="store_true", help="print the names of the cases")
    asked.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help="cases, or parts of their names; all without any")
    given = parser.parse_args()
    chosen = {part: _named(part) for part in given.names}
    if strange := [part for part, found in chosen.items() if not found]:
        parser.error(f"no case is called {strange[0]!r}; --list prints their names")
    wanted = set(CASES) if not chosen else set().union(*chosen.values())
    names = [name for name in CASES if name in wanted]
    if given.list:
        _say("\n".join(names))
    elif given.record:
        record_here(given.record, names)
    elif given.against:
        sys.exit(_against(given.against, names))
    elif given.check:
        sys.exit(_check(names))
    else:
        sys.exit(_write(names))


def _named(part: str) -> list[str]:
    """The case of a name, or those whose names hold a part, which begins at a group if one is."""
    if part in CASES:
        return [part]
    return [name for name in CASES if group_of(name) == part] or [
        name for name in CASES if part in name
    ]


def _against(commit: str, names: Sequence[str]) -> int:
    with tree_of(commit) as tree:
        theirs = recorded(tree, names)
    ours = recorded(ROOT, names)
    said = {
        name: _failure(theirs[name], f"at {commit}")
        + _failure(ours[name], "here")
        + recording.differences(theirs[name].record, ours[name].record, (f"at {commit}", "here"))
        for name in names
    }
    seconds = [sum(run.seconds for run in runs.values()) for runs in (theirs, ours)]
    return _report(said, f"{seconds[0]:.0f} and {seconds[1]:.0f} CPU-s", "of equal bits")


def _check(names: Sequence[str]) -> int:
    kept = stored.read()
    said: dict[str, list[str]] = {}
    for name in names:
        said[name] = [] if name in kept else ["not in tests/frozen.json; --write enters it"]
    known = [name for name in names if name in kept]
    if left := [name for name in kept if name not in CASES]:
        _say(f"in tests/frozen.json, but no case: {', '.join(left)}")
    for setting in settings():
        runs = recorded(ROOT, known, setting)
        for name, run in runs.items():
            found = _failure(run, "") or recording.changes(kept[name], run.record)
            said[name] += [f"[{setting}] {one}" for one in found]
        _say(f"tried {setting}")
    return _report(said, "", "as in tests/frozen.json") or bool(left)


def _write(names: Sequence[str]) -> int:
    """Enter the cases that agree in all settings; exit with 1 where one does not."""
    tried = settings()
    first = recorded(ROOT, names, tried[0])
    said = {name: _failure(run, "") for name, run in first.items()}
    summaries: dict[str, Any] = {
        name: {key: recording.summary(field) for key, field in run.record.items()}
        for name, run in first.items()
    }
    for setting in tried[1:]:
        for name, run in recorded(ROOT, names, setting).items():
            found = _failure(run, "") or recording.changes(
                summaries[name], run.record, margin=MARGIN
            )
            said[name] += [f"[{setting}] {one}" for one in found]
        _say(f"tried {setting}")
    before = stored.read()
    kept = {
        name: summaries[name] if name in said else before[name]
        for name in CASES
        if (name in said and not said[name]) or (name not in said and name in before)
    }
    agreed = [str(setting) for setting in tried]
    if any(name not in said for name in kept):
        agreed = [setting for setting in stored.agreed_with() if setting in agreed]
    stored.write(kept, agreed)
    return _report(said, f"{len(kept)} cases in the file", "entered")


def _failure(run: Run, where: str) -> list[str]:
    return [f"raised {where}: {run.error}".replace(" :", ":")] if run.error else []


def _report(said: Mapping[str, Sequence[str]], note: str, agreed: str) -> int:
    """Print a line a group, every difference, and a total; return the exit code."""
    groups: dict[str, list[bool]] = defaultdict(list)
    for name, found in said.items():
        groups[group_of(name)].append(not found)
    for group, good in groups.items():
        _say(f"{group:12} {sum(good)} of {len(good)} {agreed}")
    for name, found in said.items():
        for sentence in found:
            _say(f"{name}: {sentence}")
    bad = sum(bool(found) for found in said.values())
    _say(f"{len(said) - bad} of {len(said)} cases {agreed}{f' ({note})' if note else ''}")
    return int(bad > 0)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
