"""The table of class distances W of two datasets: validation, nearest classes, npz files.

`ClassDistances` holds the blocks xx, xy and yy and is what the ground cost reads. `labels.many`
builds it, `labels.metrics.given` reads it from a file, `report.distance` shows its `NearestClass`
rows; `otdd`, `result`, `sampling.comparison`, `study.measures` and modules of `flows` import it
through `otdd_flash.labels`.

A change must respect that any instance is valid: all checks run in the constructor, so a table of
the user's, of a file or of a metric obeys the same rules. The npz keys are the field names, so
these must stay: users' files are read by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from otdd_flash.arguments import Count, check_fields, takes
from otdd_flash.checks import array
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.files.tensor_file import read_arrays, write_arrays
from otdd_flash.files.written_by import STAMP
from otdd_flash.real_numbers import in_double, real_tensor
from otdd_flash.shown import listing
from otdd_flash.solver.class_blocks import ROUNDING, symmetrized

# Distances between coinciding classes are pure rounding, with no larger entry as a scale. Values
# this far below zero, or this far from the transpose, count as rounding as well.
ABSOLUTE_ROUNDING = 1e-6


class NearestClass(NamedTuple):
    """The nearest class of the other dataset to a class.

    Attributes:
        side: the dataset of the class, "source" or "target".
        name: the class.
        nearest: its nearest class of the other dataset; the first of several.
        distance: their squared 2-Wasserstein distance.
    """

    side: str
    name: str
    nearest: str
    distance: float


@dataclass(frozen=True, eq=False)
class ClassDistances:
    """Squared 2-Wasserstein distances between the classes of two datasets, ground cost ||.||^2.

    Args:
        xx: (Vx, Vx) within the source; symmetric.
        xy: (Vx, Vy) from source classes (rows) to target classes (columns).
        yy: (Vy, Vy) within the target; symmetric.
        names_x: names of the Vx source classes; None if unknown.
        names_y: names of the Vy target classes; None if unknown.
        lower: (Vx + Vy, Vx + Vy) lower solver bounds of `full`; None if the metric gives none.
        upper: (Vx + Vy, Vx + Vy) upper solver bounds of `full`; None if the metric gives none.

    All tables become float64 CPU tensors. `xx` and `yy` are symmetrised if their asymmetry is
    within rounding.

    Raises:
        InputError: shapes disagree, an entry is not finite or below zero by more than rounding, a
            diagonal block is not symmetric, or the number of names is not the number of classes.
    """

    xx: Tensor
    xy: Tensor
    yy: Tensor
    names_x: tuple[str, ...] | None = None
    names_y: tuple[str, ...] | None = None
    lower: Tensor | None = field(default=None, kw_only=True)
    upper: Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        for key in ("xx", "xy", "yy"):
            object.__setattr__(self, key, _as_block(key, getattr(self, key)))
        _check_shapes(self.xx, self.xy, self.yy)
        for key in ("xx", "yy"):
            block: Tensor = getattr(self, key)
            symmetric = symmetrized(f"class distances {key}", block, absolute=ABSOLUTE_ROUNDING)
            object.__setattr__(self, key, symmetric)
        for key, size in zip(("names_x", "names_y"), self.xy.shape, strict=True):
            object.__setattr__(self, key, _as_names(key, getattr(self, key), size))
        for key in ("lower", "upper"):
            if getattr(self, key) is not None:
                object.__setattr__(self, key, _as_bounds(key, getattr(self, key), self.full))

    @classmethod
    @computes
    @takes(full=array("(Vx + Vy, Vx + Vy)"))
    def from_full(
        cls,
        full: Tensor,
        size_x: Count,
        names_x: Sequence[str] | None = None,
        names_y: Sequence[str] | None = None,
        *,
        lower: Tensor | None = None,
        upper: Tensor | None = None,
    ) -> ClassDistances:
        """Split a (Vx + Vy, Vx + Vy) table into its blocks; `size_x` is Vx."""
        full = real_tensor("the table of class distances", full)
        if full.ndim != 2 or not size_x < len(full):
            raise InputError(
                f"a table of {size_x} classes and others must be a matrix of more than {size_x} "
                f"rows, got shape {tuple(full.shape)}"
            )
        return cls(
            full[:size_x, :size_x],
            full[:size_x, size_x:],
            full[size_x:, size_x:],
            None if names_x is None else tuple(names_x),
            None if names_y is None else tuple(names_y),
            lower=lower,
            upper=upper,
        )

    @property
    def full(self) -> Tensor:
        """The (Vx + Vy, Vx + Vy) table [[xx, xy], [xy^T, yy]]."""
        return torch.cat((torch.cat((self.xx, self.xy), 1), torch.cat((self.xy.T, self.yy), 1)))

    def nearest(self) -> tuple[NearestClass, ...]:
        """Find each class's nearest class of the other dataset, source classes first."""
        names_x, names_y = (
            tuple(map(str, range(size))) if names is None else names
            for names, size in zip((self.names_x, self.names_y), self.xy.shape, strict=True)
        )
        rows: list[NearestClass] = []
        for side, table, own, other in (
            ("source", self.xy, names_x, names_y),
            ("target", self.xy.T, names_y, names_x),
        ):
            rows += [
                NearestClass(side, name, other[index], float(distances[index]))
                for name, distances in zip(own, table, strict=True)
                for index in (int(distances.argmin()),)
            ]
        return tuple(rows)

    def named_for(self, names_x: Sequence[str], names_y: Sequence[str]) -> ClassDistances:
        """Return the table with these class names, after checking that it is about these classes.

        Raises:
            InputError: the number of classes or a known name differs.
        """
        for side, size, own, wanted in (
            ("source", self.xx.shape[0], self.names_x, tuple(names_x)),
            ("target", self.yy.shape[0], self.names_y, tuple(names_y)),
        ):
            if size != len(wanted):
                raise InputError(
                    f"the given class distances are about {size} {side} classes"
                    f"{'' if own is None else f' ({listing(own, 12)})'}, but the {side} has "
                    f"{len(wanted)} ({listing(wanted, 12)}); give a table for these datasets, or "
                    f"choose classes with {side}.classes"
                )
            if own is not None and own != wanted:
                raise InputError(
                    f"the given class distances name the {side} classes {listing(own, 12)}, but "
                    f"the {side} has {listing(wanted, 12)}; give a table for these, with rows "
                    "and columns in this order, or one without names"
                )
        return replace(self, names_x=tuple(names_x), names_y=tuple(names_y))

    @takes()
    def save(self, path: str | Path) -> None:
        """Write an npz file with keys xx, xy, yy, known names and bounds, and the version.

        Raises:
            InputError: the file cannot be written.
        """
        parts = {part.name: getattr(self, part.name) for part in fields(self)}
        known = {key: value for key, value in parts.items() if value is not None}
        write_arrays(path, {**known, **STAMP})

    @classmethod
    @takes()
    def load(cls, path: str | Path) -> ClassDistances:
        """Read a file that `save` wrote, or any npz file with arrays xx, xy and yy.

        Raises:
            InputError: the file is missing, unreadable or lacks a key, or its table is not valid.
        """
        blocks = read_arrays(path, ("xx", "xy", "yy"), "ClassDistances.save")
        for key in ("names_x", "names_y"):
            if key in blocks:
                blocks[key] = tuple(str(name) for name in np.atleast_1d(blocks[key]))
        known = {part.name: blocks[part.name] for part in fields(cls) if part.name in blocks}
        try:
            return cls(**known)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error


def _as_block(key: str, values: Any) -> Tensor:
    what = f"class distances {key}"
    block = in_double(what, real_tensor(what, values).detach().cpu())
    if block.ndim != 2 or 0 in block.shape:
        raise InputError(f"class distances {key} must be a matrix, got shape {tuple(block.shape)}")
    bad = ~torch.isfinite(block)
    if bool(bad.any()):
        row, column = torch.nonzero(bad)[0].tolist()
        raise InputError(
            f"class distances {key} hold {int(bad.sum())} NaN or infinite entries, the first at "
            f"[{row}, {column}]; leave those classes out with classes=[...], or measure distances "
            "with another method of labels"
        )
    lowest = float(block.min())
    if lowest < -_rounding(block):
        raise InputError(
            f"class distances {key} must not be negative, got {lowest:.6g}; they are squared "
            "distances, not similarities"
        )
    return block.contiguous()


def _check_shapes(xx: Tensor, xy: Tensor, yy: Tensor) -> None:
    size_x, size_y = xy.shape
    if xx.shape != (size_x, size_x) or yy.shape != (size_y, size_y):
        shapes = ", ".join(
            f"{key} {tuple(block.shape)}" for key, block in (("xx", xx), ("xy", xy), ("yy", yy))
        )
        raise InputError(
            f"class distances must have shapes xx (Vx, Vx), xy (Vx, Vy), yy (Vy, Vy), got {shapes}"
        )


def _as_bounds(key: str, values: Any, full: Tensor) -> Tensor:
    """Check a table of bounds of `full`; lower bounds may be below zero."""
    what = f"the {key} bounds of class distances"
    bounds = in_double(what, real_tensor(what, values).detach().cpu())
    if bounds.shape != full.shape or not bool(torch.isfinite(bounds).all()):
        raise InputError(
            f"{what} must be finite and of shape "
            f"{tuple(full.shape)}, as all classes together, got {tuple(bounds.shape)}"
        )
    beyond = bounds - full if key == "lower" else full - bounds
    if float(beyond.max()) > _rounding(full):
        raise InputError(
            f"{what} are {'above' if key == 'lower' else 'below'} "
            f"the distances by up to {float(beyond.max()):.6g}"
        )
    return bounds.contiguous()


def _as_names(key: str, names: Sequence[str] | None, size: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    if len(names) != size:
        raise InputError(f"{key} has {len(names)} names ({listing(names, 12)}) for {size} classes")
    return tuple(names)


def _rounding(block: Tensor) -> float:
    return ROUNDING * float(block.abs().max()) + ABSOLUTE_ROUNDING
