r"""Formulas of the pages, `$...$` and `$$...$$` in TeX, become MathML when the site is built.

A browser draws MathML itself, so that no page needs a script for it.
"""

from __future__ import annotations

import html
import re
from typing import Any

# What pymdownx.arithmatex leaves of a formula.
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


def on_page_content(content: str, **_: Any) -> str:
    """The page with every formula in MathML."""
    return mathml(content)


def mathml(content: str) -> str:
    """HTML whose formulas are MathML; a formula that cannot be read ends the build."""
    from latex2mathml.converter import convert

    def converted(found: re.Match[str]) -> str:
        display = "block" if found[2] == "[" else "inline"
        return str(convert(html.unescape(found[3]).strip(), display=display))

    return _FORMULA.sub(converted, content)
