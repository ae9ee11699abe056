"""What is recorded of a result, how close it must stay, and where two records differ.

A record maps names of fields such as `xx.marginal_error` to a `Field`. Numbers keep all their bits
for comparisons on one machine; `frozen.json` keeps what `summary` makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

# What is recorded of a result, where it has it.
# fmt: off
ATTRIBUTES = (
    "value", "bounds", "lower", "upper", "epsilon", "mean_cost", "tolerance", "marginal_error",
    "marginal_errors", "iterations", "passes", "converged", "stopped_by", "terms", "divergence",
    "f", "g", "values", "standard_errors", "curvature", "xx", "xy", "yy", "full",
    "plans", "row_marginals", "estimate", "gradient_norm", "functionals",
)
# fmt: on
# A case with float32 potentials has `single` tolerances: of values, relative to their scale, and of
# potentials, plans and derivatives, relative to their largest entry.
VALUES = {"double": 1e-10, "single": 1e-9}
ARRAYS = {"double": 1e-9, "single": 1e-5}
# Of the width of bounds, and of errors.
SHARE = 0.01
ERRORS = ("marginal_error", "marginal_errors")
# An array of more entries is summarised by weighted means.
ENTRIES = 12


class Field(NamedTuple):
    """A recorded entry.

    Attributes:
        value: a float64 array, or what must be equal: an integer, a word, None.
        allowance: how far each number may be off on another processor; None for what is no number.
    """

    value: Any
    allowance: Any = None


Record = dict[str, Field]


def record(parts: Mapping[str, Any], *, precision: str, scale: float | None = None) -> Record:
    """Fields of results by name.

    Args:
        parts: results, tensors, numbers, words, and mappings and sequences of these.
        precision: `double` or `single`, of potentials.
        scale: of values; None takes the largest of the numbers that are called `value` in `parts`.
    """
    found: dict[str, Any] = {}
    for name, part in parts.items():
        _flatten(name, part, found)
    if scale is None:
        values = [np.abs(v).max() for k, v in found.items() if _last(k) in ("value", "values")]
        scale = float(max((v for v in values if np.isfinite(v)), default=1.0))
    return {
        name: Field(value, _allowance(name, value, found, precision, scale))
        for name, value in found.items()
    }


def _joined(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _last(name: str) -> str:
    return name.rsplit(".", 1)[-1]


def _flatten(name: str, part: Any, found: dict[str, Any]) -> None:
    match part:
        case bool() | int() | str() | None:
            found[name] = part
        case float():
            found[name] = np.float64(part).reshape(1)
        case np.generic():
            _flatten(name, part.item(), found)
        case torch.Tensor():
            _flatten(name, part.detach().cpu().numpy(), found)
        case np.ndarray():
            if part.dtype.kind != "f":
                found[name] = str(part.tolist())
                return
            array = part.astype(np.float64).ravel()
            if not np.isfinite(array).all() and array.size > 1:
                found[f"{name} not finite at"] = str(np.flatnonzero(~np.isfinite(array)).tolist())
                array = np.where(np.isfinite(array), array, 0.0)
            found[name] = array
        case Mapping():
            for key, value in part.items():
                _flatten(_joined(name, key), value, found)
        case (float(low), float(high)) if _last(name) == "bounds":
            stem = name.removesuffix("bounds")
            _flatten(f"{stem}lower", low, found)
            _flatten(f"{stem}upper", high, found)
        case tuple() | list() if part and all(isinstance(one, float) for one in part):
            _flatten(name, np.array(part), found)
        case tuple() | list():
            for place, value in enumerate(part):
                _flatten(f"{name}.{place}", value, found)
        case _:
            there = [key for key in ATTRIBUTES if hasattr(part, key)]
            if "terms" in there:
                there = [key for key in there if key not in ("xx", "xy", "yy")]
            if {"f", "g"} <= {*there} and part.f is part.g:
                there.remove("g")
            if not there:
                raise TypeError(f"nothing to record of {type(part).__name__} in {name}")
            for key in there:
                _flatten(_joined(name, key), getattr(part, key), found)


def _allowance(
    name: str, value: Any, found: Mapping[str, Any], precision: str, scale: float
) -> Any:
    if not isinstance(value, np.ndarray):
        return None
    last, stem = _last(name), name[: len(name) - len(_last(name))]
    if last in ("lower", "upper"):
        low, high = found[f"{stem}lower"], found[f"{stem}upper"]
        with np.errstate(invalid="ignore"):
            width = np.where(np.isfinite(high - low), high - low, 0.0)
        return SHARE * width
    if last in ERRORS:
        return SHARE * np.abs(value)
    if last != "gradient_norm" and (value.size == 1 or last == "values"):
        return np.full(value.size, VALUES[precision] * max(scale, np.abs(value).max()))
    return np.full(value.size, ARRAYS[precision] * np.abs(value).max(initial=0.0))


def summary(field: Field) -> Any:
    """What the file keeps of a field: [numbers, allowances], or what must be equal."""
    if field.allowance is None:
        return field.value
    value, allowance = field.value, field.allowance
    if value.size > ENTRIES:
        places = np.arange(value.size)
        weights = [np.ones(value.size), *((1 + places * k % m) / m for k, m in WEIGHTS)]
        value = np.array([math.fsum(value * weight) / value.size for weight in weights])
        allowance = np.full(len(weights), allowance.mean())
    if (allowance == allowance[:1]).all():
        allowance = allowance[:1]
    return [value.tolist(), [float(f"{one:.2g}") for one in allowance]]


# Entry i of an array has the weight (1 + k i mod m) / m.
WEIGHTS = ((7, 13), (11, 17), (5, 19))


def changes(stored: Mapping[str, Any], fields: Record, *, margin: float = 1.0) -> list[str]:
    """Sentences on the fields of a record that are not within the allowance of a stored one.

    Args:
        stored: summaries by the name of their field.
        fields: of now.
        margin: divides allowances.
    """
    now = {name: summary(field) for name, field in fields.items()}
    said = _missing(stored, now, "the file", "the record")
    for name in stored:
        if name not in now:
            continue
        before, after = stored[name], now[name]
        if not (isinstance(before, list) and isinstance(after, list)):
            if before != after or type(before) is not type(after):
                said.append(f"{name}: {before} in the file, {after} now")
            continue
        (old, allowed), (new, _) = before, after
        if len(old) != len(new):
            said.append(f"{name}: {len(old)} numbers in the file, {len(new)} now")
            continue
        allowed = allowed * len(old) if len(allowed) == 1 else allowed
        for was, is_, least in zip(old, new, allowed, strict=True):
            same = was == is_ or (math.isnan(was) and math.isnan(is_))
            if not same and not abs(was - is_) <= least / margin:
                off = f"{abs(was - is_):.2g}, {least / margin:.2g} allowed"
                said.append(f"{name}: {was!r} in the file, {is_!r} now (off by {off})")
                break
    return said


def differences(first: Record, second: Record, names: tuple[str, str]) -> list[str]:
    """Sentences on the fields whose bits differ, with both numbers."""
    said = _missing(first, second, *names)
    for name in first:
        if name not in second:
            continue
        one, other = first[name].value, second[name].value
        if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
            if type(one) is not type(other) or one != other:
                said.append(f"{name}: {one} {names[0]}, {other} {names[1]}")
        elif one.shape != other.shape:
            said.append(f"{name}: {one.size} numbers {names[0]}, {other.size} {names[1]}")
        elif (where := np.flatnonzero(one.view(np.int64) != other.view(np.int64))).size:
            at = int(where[0])
            place = "" if one.size == 1 else f"[{at}], {where.size} of {one.size} differ"
            said.append(
                f"{name}{place}: {float(one[at]).hex()} = {one[at]!r} {names[0]}, "
                f"{float(other[at]).hex()} = {other[at]!r} {names[1]}"
            )
    return said


def _missing(
    first: Mapping[str, Any], second: Mapping[str, Any], one: str, other: str
) -> list[str]:
    return [f"{name}: not in {other}" for name in first if name not in second] + [
        f"{name}: not in {one}" for name in second if name not in first
    ]
