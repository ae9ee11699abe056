"""Inner products of docstrings, <x, y>, which a page of HTML would take for a tag."""

from __future__ import annotations

import re
from typing import Any

import griffe

_PRODUCT = re.compile(r"<([^<>\n]+?),\s+([^<>]+?)>")


class InnerProducts(griffe.Extension):
    """Writes them with angle brackets of their own, which look the same."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = _PRODUCT.sub(r"⟨\1, \2⟩", obj.docstring.value)
