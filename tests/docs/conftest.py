"""The modules that build the site, which stand beside its pages and are no package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

HOOKS = Path(__file__).resolve().parents[2] / "docs" / "hooks"


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
