"""Numbers and foreign text made safe and readable: for terminals, csv, HTML and pictures.

Names of classes, columns, files and datasets are written by others. Every place that shows one
calls `display`, or a form of it: `csv_cell`, `html_text`, or `shorten` for a narrow place. Errors
and warnings do so when they are made (`errors`), and `commands.messages.Terminal` again for all
that a command prints. Files of results (JSON, safetensors) keep names unchanged.

Modules that make results and reports take `interval`, `bounded` and `epsilon_shown` for numbers.

A change must respect that `display` of its own result changes nothing, because messages pass
several of these places (`tests/test_shown.py`); that secrets are hidden before text is cut, because
half a secret is not recognised; and that `interval` rounds finite bounds outwards, so that they
still hold (`tests/report/test_distance_report.py`).
"""

from __future__ import annotations

import math
import os
import re
import sys
import unicodedata
from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Decimal
from html import escape

# Most characters of a name in a sentence, of a sentence with its names, and of a cell of a csv
# file.
LONGEST_NAME, LONGEST_MESSAGE, LONGEST_CELL = 200, 4000, 1000
# Longer text is cut in the middle: sentences end with the way out.
KEEPS_ITS_END = 1000

# Letters and marks that are invisible, although Unicode counts them as printable.
UNSEEN = re.compile(
    "[\\u034f\\u115f\\u1160\\u17b4\\u17b5\\u180b-\\u180f\\u2800\\u3164\\ufe00-\\ufe0d\\uffa0"
    "\\U000e0100-\\U000e01ef]"
)
# In an address, the user and secret parameters.
USER = re.compile(r"(?<=://)[^/?#\s]+@")
SECRET = re.compile(
    r"([?&;][\w.-]{0,40}(?:token|key|secret|signature|sig|password|passwd|credential)=)[^&;#\s]+",
    re.IGNORECASE,
)
HIDDEN = "***"

# The error that solver bounds do not hold, shown beside results without a sampling interval.
NOT_SAMPLED = "sampling error was not measured: otdd_flash.subsample_interval gives an interval"


def not_sampled(ground: str) -> str:
    """Return the line on the sampling error; nothing measures it of `ground="gromov"`."""
    return NOT_SAMPLED.partition(":")[0] if ground == "gromov" else NOT_SAMPLED


# Text that spreadsheets compute, also in full-width forms, behind spaces that they ignore.
FORMULA = re.compile(r"\s*[=+\-@\t\r\uff1d\uff0b\uff0d\uff20']")
PLAIN_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")

# Values from the environment, with what to show instead; see `conceal`.
_concealed: dict[str, str] = {}


def epsilon_shown(epsilon: float, mean_cost: float | None) -> str:
    """Return a regularisation in units of the cost and, if that is known, of the mean cost."""
    if not mean_cost:
        return f"{epsilon:.6g}"
    return f"{epsilon:.6g} ({epsilon / mean_cost:.3g} of the mean cost {mean_cost:.6g})"


def interval(value: float, lower: float, upper: float) -> str:
    """Return `value [lower, upper]` as `numbers_of_interval` writes them."""
    texts = numbers_of_interval(value, lower, upper)
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"


def numbers_of_interval(value: float, lower: float, upper: float) -> tuple[str, str, str]:
    """Return a value and its bounds as text, with as many digits as the bounds support.

    Bounds are rounded outwards, so the printed interval still holds the true distance.
    """
    finite = [abs(number) for number in (value, lower, upper) if math.isfinite(number)]
    size = max(finite, default=0.0)
    leading = math.floor(math.log10(size)) if size > 0 else 0
    last = leading - 5
    if upper > lower and len(finite) == 3:
        # Two digits of the width, but at least three and at most nine digits of the number.
        width = min(upper - lower, sys.float_info.max)
        last = min(max(math.floor(math.log10(width)) - 1, leading - 8), leading - 2)
    plain = -5 < leading < 9
    digit = Decimal(1).scaleb(min(last, 0) if plain else last)
    roundings = (ROUND_HALF_EVEN, ROUND_FLOOR, ROUND_CEILING)

    def text(number: float, rounding: str) -> str:
        if not math.isfinite(number):
            return str(float(number))
        # Through the float's shortest text: rounding 1.4 outwards must not give 1.39.
        rounded = Decimal(repr(float(number))).quantize(digit, rounding)
        return "0" if rounded == 0 else f"{rounded:{'f' if plain else 'e'}}"

    of_value, of_lower, of_upper = map(text, (value, lower, upper), roundings)
    return of_value, of_lower, of_upper


def bounded(value: float, lower: float, upper: float) -> str:
    """Return `interval` with the words "solver bounds"."""
    return f"{interval(value, lower, upper)} (solver bounds)"


def bounded_energy(value: float, lower: float, upper: float) -> str:
    """Return a value that bounds say little of, as they are of the least of all plans."""
    texts = numbers_of_interval(value, lower, upper)
    return f"{texts[0]} (the least: {texts[1]} to {texts[2]})"


def display(text: object, limit: int | None = LONGEST_NAME) -> str:
    r"""Return text in one line that is safe to print.

    Control, invisible and undecodable characters become the escapes that Python writes for them
    (`\x1b`, `\n`, `\u202e`). Passwords in addresses and values from the environment (`conceal`) are
    hidden. Displaying the result again does not change it.

    Args:
        text: a name, a path or a sentence; any other object as its `str`.
        limit: the most characters; longer text is cut, with an ellipsis and its length. None: no
            limit.
    """
    # Before anything is cut: half a password would not be recognised.
    given = hidden(str(text))
    size = len(given)
    if limit is not None and size > 2 * limit:
        # Of very long text, only the characters that may be shown are examined.
        given = given[:limit] + given[-limit:]
    if not (given.isascii() and given.isprintable()):
        given = "".join(map(_seen, given))
    if limit is None or (len(given) <= limit and size <= 2 * limit):
        return given
    mark = f"… ({size:,} characters)"
    room = max(limit - len(mark), 1)
    if limit < KEEPS_ITS_END:
        return given[:room].rstrip() + mark
    head = 3 * room // 4
    return f"{given[:head]}{mark}{given[head - room :]}"


def sentence(text: object) -> str:
    """Return a message in one line; of a very long one, the beginning and the end."""
    given = str(text)
    return display(" ".join(given.splitlines()) if "\n" in given else given, LONGEST_MESSAGE)


def listing(names: Iterable[object], most: int = 50) -> str:
    """List names for a sentence, each displayed, and count those beyond the first `most`."""
    given = [*names]
    shown = ", ".join(display(name) for name in given[:most])
    return shown if len(given) <= most else f"{shown}, ... {len(given) - most:,} more"


def told_apart(names: Iterable[str]) -> list[str]:
    """Return names made distinct: of equal ones all but the first get a number, `a (2)`."""
    found: list[str] = []
    for name in names:
        distinct, repeats = name, 1
        while distinct in found:
            repeats += 1
            distinct = f"{name} ({repeats})"
        found.append(distinct)
    return found


def shorten(name: str, length: int) -> str:
    """Return `name` in one line of at most `length` characters, cut with an ellipsis."""
    line = display(" ".join(hidden(name).split())[: 8 * length], None)
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def csv_cell(text: str) -> str:
    """Return text as a cell of a csv file that no spreadsheet takes for a formula.

    Text that begins like one (`=`, `+`, `-`, `@`, maybe behind spaces) gets an apostrophe in front,
    and so does text that begins with an apostrophe: readers remove one. Plain numbers are
    unchanged.
    """
    cell = display(text, LONGEST_CELL)
    formula = FORMULA.match(cell) and not PLAIN_NUMBER.fullmatch(cell)
    return f"'{cell}" if formula else cell


def html_text(text: object, limit: int | None = LONGEST_NAME) -> str:
    """Return text for HTML, between tags or in a quoted attribute."""
    return escape(display(text, limit))


def hidden(text: str) -> str:
    """Return text without passwords in addresses and without concealed values."""
    # The longest first: one may be the beginning of another.
    for value, shown in sorted(_concealed.items(), key=lambda item: -len(item[0])):
        text = text.replace(value, shown)
    if "://" in text or "=" in text:
        text = SECRET.sub(rf"\g<1>{HIDDEN}", USER.sub(f"{HIDDEN}@", text))
    return text


def conceal(value: str, shown: str) -> None:
    """Make `hidden` replace a value by `shown`, from now on in this process.

    Values of fewer than 6 characters are not replaced, as they would hide parts of other words; nor
    are folders that exist, which are no secrets.
    """
    if len(value) >= 6 and not os.path.isdir(value):
        _concealed[value] = shown


def _seen(character: str) -> str:
    """Return a visible character or a space of any width unchanged, any other as its escape."""
    shown = character.isprintable() or unicodedata.category(character) == "Zs"
    if shown and not UNSEEN.match(character):
        return character
    return character.encode("unicode_escape").decode()


def convergence_text(converged: bool) -> str:
    """Return words that say whether a solve converged."""
    return "converged" if converged else "not converged"
