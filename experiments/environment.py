"""What a result was measured on, and how results are written."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from otdd_flash import __version__
from otdd_flash.files.atomic import write_json

RESULTS = Path(__file__).parent / "results"


def environment(*packages: str) -> dict[str, Any]:
    """Hardware, versions and commit of this run."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {"otdd-flash": __version__, **{name: _version(name) for name in packages}},
        "commit": _commit(),
    }


def write_result(name: str, content: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write NAME.json, by default into experiments/results."""
    path = folder / f"{name}.json"
    write_json(path, content)
    return path


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this checkout; a machine that has the files alone is told by OTDD_COMMIT."""
    if "OTDD_COMMIT" in os.environ:
        return os.environ["OTDD_COMMIT"]
    command = ["git", "-C", str(RESULTS), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
