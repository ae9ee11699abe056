"""How much of the package a call enters: `python -m tests.trace`, in Python 3.11.

Counted are the package's own frames: files, functions (lambdas, comprehensions and generator
expressions are none), and how many of its functions are on the stack at once; then the modules of
the package that an import loads, without folders. `--list` names all of them. The figures say what
a reader has to hold.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = tuple(f"{ROOT / package}/" for package in ("otdd_flash", "kernels"))
VERSION = (3, 11)
# Parts of the function around them, to a reader; later versions of Python make them its own.
NO_FUNCTIONS = {"<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>"}
LOADED = """import json, sys, otdd_flash
otdd_flash.dataset_distance
ours = {name: part for name, part in sys.modules.items() if name.startswith("otdd_flash.")}
print(json.dumps(sorted(name for name, part in ours.items() if not hasattr(part, "__path__"))))
"""


def traced(call: Callable[[], Any]) -> tuple[dict[str, list[str]], int]:
    """The functions that a call enters by file, and the most that are on one stack at once.

    Of threads that start meanwhile as well.
    """
    files: dict[CodeType, str | None] = {}
    entered: set[tuple[str, int, str]] = set()
    deepest = 0

    def file_of(code: CodeType) -> str | None:
        """The file of a function of the package; None for all others."""
        if code not in files:
            path = Path(code.co_filename).resolve()
            ours = str(path).startswith(FOLDERS) and code.co_name not in NO_FUNCTIONS
            files[code] = path.relative_to(ROOT).as_posix() if ours else None
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
    return by_file, deepest


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


def main() -> None:
    """Print the table, and with --list what is in it."""
    if sys.version_info[:2] != VERSION:
        print(
            f"the trace is counted in Python {'.'.join(map(str, VERSION))}, whose frames it is "
            f"compared by, and this is {sys.version.split()[0]}"
        )
        return
    lists = []
    print(f"{'':24} {'files':>6} {'functions':>10} {'depth':>6}")
    for name, call in calls().items():
        # Once before, for what is imported, compiled and remembered.
        call()
        files, depth = traced(call)
        print(f"{name:24} {len(files):6} {sum(map(len, files.values())):10} {depth:6}")
        lists += ["", name, *(f"  {file}: {', '.join(files[file])}" for file in files)]
    command = [sys.executable, "-c", LOADED]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    modules: list[str] = json.loads(run.stdout)
    kernels = sum(name.startswith("otdd_flash.kernels.") for name in modules)
    print(f"{'modules loaded':24} {len(modules) - kernels:6}  and {kernels} of kernels")
    if "--list" in sys.argv:
        print(*lists, "", "modules loaded", *(f"  {name}" for name in modules), sep="\n")


if __name__ == "__main__":
    main()
