"""Cases in processes of their own, with the package of a tree, in a setting of the processor."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.frozen.recording import Record

ROOT = Path(__file__).resolve().parents[2]
# What the cases of another commit are run by, from this tree.
DRIVERS = ("tests/frozen", "tests/rank_pool.py", "tests/quicker_interpreter.py")


class Run(NamedTuple):
    """What became of a case: its record, or the error that it raised, and CPU seconds."""

    record: Record
    error: str
    seconds: float


class Setting(NamedTuple):
    """How a processor is used: threads, and variables by which libraries choose vector units."""

    threads: int = 1
    variables: Mapping[str, str] = {}

    def __str__(self) -> str:
        units = self.variables.get("ATEN_CPU_CAPABILITY", f"{best_units()} by itself")
        return f"{units}, {self.threads} thread{'s' * (self.threads > 1)}"


ALONE = Setting()
# PyTorch, MKL, the OpenBLAS of NumPy and SciPy, oneDNN.
UNITS = (
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "OPENBLAS_CORETYPE",
    "ONEDNN_MAX_CPU_ISA",
)
NO_AVX = dict(zip(UNITS, ("default", "SSE4_2", "Nehalem", "SSE41"), strict=True))
AVX2 = dict(zip(UNITS, ("avx2", "AVX2", "Haswell", "AVX2"), strict=True))
AVX512 = dict(zip(UNITS, ("avx512", "AVX512", "SkylakeX", "AVX512_CORE"), strict=True))


def settings() -> list[Setting]:
    """Those of this processor, at first as it is; it ends a process that asks for what it lacks."""
    named = [AVX2, AVX512] if best_units() == "avx512" else []
    among = [Setting(threads, each) for each in named for threads in (1, 2)]
    return [Setting(1), Setting(2), Setting(1, NO_AVX), *among]


@cache
def best_units() -> str:
    """The widest vector units of this processor, as PyTorch calls them."""
    flags = {*Path("/proc/cpuinfo").read_text(encoding="utf-8").split()}
    if {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"} <= flags:
        return "avx512"
    return "avx2" if {"avx2", "fma"} <= flags else "default"


def run_cases(names: Sequence[str]) -> dict[str, Run]:
    """Run cases in this process, in their order."""
    from tests.frozen.cases import CASES

    runs = {}
    for name in names:
        started = time.process_time()
        try:
            fields, error = CASES[name].run(), ""
        except Exception as raised:
            fields, error = {}, f"{type(raised).__name__}: {raised}"
        runs[name] = Run(fields, error, time.process_time() - started)
    return runs


def recorded(tree: Path, names: Sequence[str], setting: Setting = ALONE) -> dict[str, Run]:
    """Run cases with the package of a tree, in a process of its own.

    Raises:
        SystemExit: the process ended before its last case.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "runs"
        threads = dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(setting.threads)
        )
        environment = {
            **{key: value for key, value in os.environ.items() if key not in UNITS},
            **threads,
            **setting.variables,
            "PYTHONPATH": str(tree),
            # Iteration over sets of words is the same on both sides.
            "PYTHONHASHSEED": "0",
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, "-m", "tests.frozen", "--record", str(file), *names]
        status = subprocess.run(command, cwd=tree, env=environment, check=False).returncode
        if status or not file.exists():
            sys.exit(f"the cases of {tree} ({setting}) ended with exit code {status}")
        runs: dict[str, Run] = pickle.loads(file.read_bytes())
        return runs


def record_here(file: Path, names: Sequence[str]) -> None:
    """Run cases for `recorded`, in its process, and write their runs."""
    import torch

    import otdd_flash

    tree = Path.cwd().resolve()
    if not Path(otdd_flash.__file__).resolve().is_relative_to(tree):
        sys.exit(f"otdd_flash was imported from {otdd_flash.__file__}, not from {tree}")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    file.write_bytes(pickle.dumps(run_cases(names)))


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """A worktree of a commit, with the cases of this tree, that is removed at the end.

    Raises:
        SystemExit: with 2, there is no such commit.
    """
    asked = _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    if asked.returncode:
        sys.stderr.write(f"{commit!r} names no commit of {ROOT}; give one that `git log` lists\n")
        sys.exit(2)
    with tempfile.TemporaryDirectory(prefix="frozen-") as folder:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--detach", "--quiet", str(tree), asked.stdout.strip(), check=True)
        try:
            shutil.rmtree(tree / "tests")
            for driver in DRIVERS:
                there = tree / driver
                there.parent.mkdir(parents=True, exist_ok=True)
                if (ROOT / driver).is_dir():
                    shutil.copytree(ROOT / driver, there)
                else:
                    shutil.copy(ROOT / driver, there)
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=check, capture_output=True, text=True
    )
