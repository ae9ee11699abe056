"""The site, the modules that build it, and processes for the code that pages show."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOOKS = ROOT / "docs" / "hooks"
# What examples import first, which takes longer than most of them do.
IMPORTED = [
    *("matplotlib.pyplot", "pandas", "scipy.stats", "sklearn.datasets", "sklearn.linear_model"),
    *("torchvision", "otdd_flash.otdd", "otdd_flash.flows.run", "otdd_flash.study"),
    *("otdd_flash.report.distance", "otdd_flash.report.flow"),
]


@pytest.fixture(scope="session")
def hook() -> Callable[[str], ModuleType]:
    """`hook(name)` is the module docs/hooks/NAME.py."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"hooks_{name}", HOOKS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def apart() -> Callable[..., Any]:
    """`apart(function, *arguments)` is what a function returns in a process of its own.

    It is forked from one that has imported a lot and run nothing.
    """
    from multiprocessing.forkserver import ensure_running

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    with patch.dict(os.environ, variables):
        ensure_running()

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        with ProcessPoolExecutor(1, context) as one:
            return one.submit(function, *arguments).result()

    return run


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built strictly."""
    pytest.importorskip("mkdocs", reason="the extra docs is not installed; `make docs` needs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return folder
