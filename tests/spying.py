"""What functions are called with while a test runs."""

from __future__ import annotations

from typing import Any

import pytest


def calls_of(monkeypatch: pytest.MonkeyPatch, holder: Any, name: str) -> list[tuple[Any, ...]]:
    """The arguments of every later call of a function or method, which goes on as it is.

    Args:
        monkeypatch: of the test.
        holder: module or object; of a class the first argument is `self`.
        name: of the function in it.
    """
    real, calls = getattr(holder, name), []

    def noted(*given: Any, **settings: Any) -> Any:
        calls.append((*given, *settings.values()))
        return real(*given, **settings)

    monkeypatch.setattr(holder, name, noted)
    return calls
