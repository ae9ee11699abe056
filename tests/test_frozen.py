"""The frozen cases have the numbers of the file, and what compares them names what has changed."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import otdd_flash as otdd
from tests.frozen import stored
from tests.frozen.cases import CASES, group_of
from tests.frozen.recording import changes, record, summary
from tests.frozen.running import ROOT

KEPT = stored.read()


# The others wait for `make test-slow`, where each kind has a cheaper one that goes the same way.
QUICK = """
clouds: a term | a term in double | masses, one of them 0 | one cloud twice | schedule of geomloss |
    64 dimensions | out of iterations | not debiased | one dimension | cosine | copies of points |
    320 and 250 points | width of bounds
labels: given | cosine | inner with given labels | masses and contributions | gaussian in double
classes: cosine | gaussian
matrices: no plan | in blocks | stored in single | forbidden pairs | stored | loss and plan backward
batched: doubly stochastic | doubly stochastic, implicit | plans | plans of some sizes
pairwise: gaussian
flows: attached | features, resumed | cosine
maps: barycentric | barycentric in double
gradients: loss | loss in double | loss, not debiased | potentials | twice |
    labels, table and weights of the cost
hessians: product | product in double | not debiased, damped
sliced: three datasets
kernels: doubly stochastic
ranks: led
"""
LISTED = {
    f"{group}: {' '.join(name.split())}"
    for group, names in re.findall(r"^(\w+): (.*(?:\n +.*)*)", QUICK, re.M)
    for name in names.split("|")
}


def marked(name: str) -> Any:
    marks = [] if name in LISTED else [pytest.mark.slow]
    if group_of(name) == "ranks":
        marks.append(pytest.mark.xdist_group("ranks"))
    if group_of(name) == "kernels":
        interpreted = "of the interpreter, which a process with a GPU does not start"
        marks.append(pytest.mark.skipif(torch.cuda.is_available(), reason=interpreted))
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_a_case_has_the_numbers_of_the_file(name: str) -> None:
    changed = changes(KEPT[name], CASES[name].run())
    assert not changed, "\n".join([f"{name}:", *changed])


def test_the_file_has_no_other_cases() -> None:
    assert set(KEPT) == set(CASES)
    assert set(CASES) >= LISTED


NUMBERS = np.arange(40) / 7
PARTS = {"value": 2.5, "bounds": (2.0, 3.0), "marginal_error": 1e-4, "iterations": 12}
RECORD = record(PARTS | {"stopped_by": "tolerance", "f": NUMBERS}, precision="double")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("value", np.array([2.5 + 2.4e-10]), True),
        ("value", np.array([2.5 + 2.6e-10]), False),
        ("value", np.array([np.nan]), False),
        ("lower", np.array([2.009]), True),
        ("upper", np.array([3.011]), False),
        ("marginal_error", np.array([1.011e-4]), False),
        ("iterations", 13, False),
        ("stopped_by", "rounding", False),
        ("f", NUMBERS * (1 + 1e-10), True),
        ("f", np.where(np.arange(40) == 33, 33 / 7 + 1e-6, NUMBERS), False),
        ("f", NUMBERS[:39], False),
    ],
)
def test_a_change_beyond_the_allowance_is_named(name: str, value: Any, allowed: bool) -> None:
    kept = {key: summary(field) for key, field in RECORD.items()}
    now = RECORD | {name: RECORD[name]._replace(value=value)}
    assert [each.split(":")[0] for each in changes(kept, now)] == ([] if allowed else [name])


def ask(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.frozen", *arguments]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_changed_package_differs_from_its_last_commit(tmp_path: Path) -> None:
    for part in ("otdd_flash", "kernels", "conf", "tests/frozen"):
        unneeded = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, tmp_path / part, symlinks=True, ignore=unneeded)
    for file in ("tests/rank_pool.py", "tests/quicker_interpreter.py"):
        shutil.copy(ROOT / file, tmp_path / "tests")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for step in (["init", "-q"], ["add", "-A"], [*who, "commit", "-qm", "as it is"]):
        subprocess.run(["git", *step], cwd=tmp_path, check=True)
    source = inspect.getsourcefile(inspect.unwrap(otdd.sinkhorn_plans))
    assert source is not None
    file = tmp_path / Path(source).resolve().relative_to(ROOT)
    default = "tolerance: MarginalError = 1e-"
    changed = file.read_text().replace(f"{default}3", f"{default}2")
    assert changed != file.read_text()
    file.write_text(changed)
    found = ask(tmp_path, "--against", "HEAD", "batched: plans", "batched: doubly stochastic")
    assert found.returncode == 1, found.stderr
    assert "batched      1 of 2 of equal bits" in found.stdout
    assert "batched: plans: value" in found.stdout
    assert "1 of 2 cases of equal bits" in found.stdout
    worktrees = ["git", "worktree", "list"]
    left = subprocess.run(worktrees, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(left.stdout.splitlines()) == 1
    assert ask(tmp_path, "--against", "no-such-commit").returncode == 2
