"""How much of the package a call enters: `python -m tests.trace`, in Python 3.11.

Counted are the package's own frames: files, functions (lambdas, comprehensions and generator
expressions are none), and how many of its functions are on the stack at once; then the modules of
the package that an import loads, without folders. `--list` names all of them. The figures say what
a reader has to hold.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("otdd_flash", "kernels")
VERSION = (3, 11)
# Parts of the function around them, to a reader; later versions of Python make them its own.
NO_FUNCTIONS = {"<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>"}
LOADED = """import json, sys, otdd_flash
otdd_flash.dataset_distance
ours = {name: part for name, part in sys.modules.items() if name.startswith("otdd_flash.")}
print(json.dumps(sorted(name for name, part in ours.items() if not hasattr(part, "__path__"))))
"""


class Trace(NamedTuple):
    """What a call entered.

    Attributes:
        files: the qualified names of the functions entered, by file.
        depth: the most of them that were on one thread's stack at once.
    """

    files: dict[str, list[str]]
    depth: int

    @property
    def functions(self) -> int:
        """How many."""
        return sum(map(len, self.files.values()))


def traced(call: Callable[[], Any], root: Path, packages: tuple[str, ...] = PACKAGES) -> Trace:
    """Trace a call, and threads that start meanwhile.

    Args:
        call: what to trace.
        root: the folder of the packages.
        packages: folders below it whose functions count.
    """
    folders = tuple(f"{(root / package).resolve()}/" for package in packages)
    files: dict[CodeType, str | None] = {}
    entered: set[tuple[str, int, str]] = set()
    deepest = 0

    def file_of(code: CodeType) -> str | None:
        """The file of a function of the packages; None for all others."""
        if code not in files:
            path = Path(code.co_filename).resolve()
            ours = str(path).startswith(folders) and code.co_name not in NO_FUNCTIONS
            files[code] = path.relative_to(root.resolve()).as_posix() if ours else None
        return files[code]

    def profile(frame: FrameType, event: str, _: Any) -> None:
        nonlocal deepest
        if event != "call" or (file := file_of(frame.f_code)) is None:
            return
        entered.add((file, frame.f_code.co_firstlineno, frame.f_code.co_qualname))
        depth, above = 0, frame
        while above is not None:
            depth += file_of(above.f_code) is not None
            above = above.f_back  # type: ignore[assignment]
        deepest = max(deepest, depth)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    by_file: dict[str, list[str]] = {}
    for file, _, name in sorted(entered):
        by_file.setdefault(file, []).append(name)
    return Trace(by_file, deepest)


def calls() -> dict[str, Callable[[], Any]]:
    """What is traced, by name."""
    import torch

    import otdd_flash as otdd

    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, 8, generator=draw) for n in (300, 250))
    labels = [torch.arange(len(points)) % 5 for points in (x, y)]

    def distance() -> None:
        otdd.dataset_distance((x, labels[0]), (y, labels[1]), epsilon=1.0, compute="cpu")

    def loss() -> None:
        otdd.sinkhorn_loss(x.clone().requires_grad_(), y, epsilon=1.0).backward()

    return {"dataset_distance": distance, "sinkhorn_loss, backward": loss}


def loaded_modules() -> list[str]:
    """The modules of the package that `otdd_flash.dataset_distance` imports."""
    run = subprocess.run(
        [sys.executable, "-c", LOADED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names: list[str] = json.loads(run.stdout)
    return names


def main() -> None:
    """Print the table, and with --list what is in it."""
    parser = argparse.ArgumentParser(description="Count what of the package a call enters.")
    parser.add_argument("--list", action="store_true", help="name files, functions and modules")
    listed = parser.parse_args().list
    if sys.version_info[:2] != VERSION:
        print(
            f"the trace is counted in Python {'.'.join(map(str, VERSION))}, whose frames it is "
            f"compared by, and this is {sys.version.split()[0]}"
        )
        return
    traces = {}
    for name, call in calls().items():
        # Once before, for what is imported, compiled and remembered.
        call()
        traces[name] = traced(call, ROOT)
    modules = loaded_modules()
    print(f"{'':24} {'files':>6} {'functions':>10} {'depth':>6}")
    for name, trace in traces.items():
        print(f"{name:24} {len(trace.files):6} {trace.functions:10} {trace.depth:6}")
    kernels = sum(name.startswith("otdd_flash.kernels.") for name in modules)
    print(f"{'modules loaded':24} {len(modules) - kernels:6}  and {kernels} of kernels")
    if not listed:
        return
    for name, trace in traces.items():
        print(f"\n{name}")
        for file, functions in trace.files.items():
            print(f"  {file}: {', '.join(functions)}")
    print("\nmodules loaded", *(f"  {name}" for name in modules), sep="\n")


if __name__ == "__main__":
    main()
