"""The numbers written into a heat map's cells: one unit, one precision, a readable colour."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def power_of_ten(values: NDArray[np.float64]) -> int:
    """The exponent, a multiple of 3, that leaves the largest value between 0.01 and 10,000."""
    largest = _largest(values)
    if largest == 0 or 0.01 <= largest < 10_000:
        return 0
    return 3 * math.floor(math.log10(largest) / 3)


def with_unit(label: str, exponent: int) -> str:
    """`label`, saying which power of ten was divided out."""
    return f"{label} (× 10{str(exponent).translate(SUPERSCRIPTS)})" if exponent else label


def cell_texts(
    values: NDArray[np.float64], decimals: int | None = None, zero: str = "0"
) -> list[list[str]]:
    """The values with equally many decimals: by default, as give the largest three digits.

    What rounds to nothing becomes `zero`, what is not finite a dash.
    """
    largest = _largest(values)
    if decimals is None:
        decimals = max(0, 2 - math.floor(math.log10(largest))) if largest > 0 else 0

    def text(value: float) -> str:
        if not math.isfinite(value):
            return "–"
        written = f"{value:.{decimals}f}"
        return written if float(written) else zero

    return [[text(float(value)) for value in row] for row in values]


def ink_on(color: tuple[float, ...]) -> str:
    """Black or white, whichever contrasts more with an RGB colour (WCAG: at least 4.5 to 1)."""
    return "black" if relative_luminance(color) > 0.179 else "white"


def relative_luminance(color: tuple[float, ...]) -> float:
    """WCAG 2 relative luminance of an sRGB colour with channels in [0, 1]."""
    red, green, blue = (
        channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        for channel in color[:3]
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _largest(values: NDArray[Any]) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size else 0.0
