"""The page docs/api.md: whatever it shows of a class has a docstring."""

from __future__ import annotations

import inspect
import pkgutil
import re
from functools import cached_property
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"


@pytest.mark.slow
def test_classes_of_the_page_describe_their_methods():
    """Lint asks no method for a docstring (D102), and the page omits one that has none."""
    entries = re.findall(r"^::: (otdd_flash\.\S+)$", PAGE.read_text("utf-8"), re.M)
    assert entries
    silent = []
    for entry in entries:
        shown = pkgutil.resolve_name(entry)
        for name in [name for name in dir(shown) if isinstance(shown, type) and name[0] != "_"]:
            home = next(kind for kind in shown.__mro__ if name in vars(kind))
            member = vars(home)[name]
            is_method = inspect.isroutine(member) or isinstance(member, property | cached_property)
            if is_method and home.__module__.startswith("otdd_flash") and not member.__doc__:
                silent.append(f"{entry}.{name}, in {home.__module__}")
    assert silent == []
