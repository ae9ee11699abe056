"""Tables of class distances W: of two datasets with its validation, and of several; npz files.

`ClassDistances` holds the blocks xx, xy and yy of two datasets; a `Comparison` takes its `full` as
the W of the ground cost. `JointClassDistances` is the (V, V) table over all classes of K datasets;
`between` gives that of two. `labels.measuring`, `gromov.distance`, `flows.modes` and
`study.measures.distances` build tables, `labels.metrics` reads the first kind from a file, and
`report.distance` shows its `NearestClass` rows. Whatever compares labelled datasets (`otdd`,
`pairwise`, `flows`, `mixing`, `study`, ...) imports the tables through `otdd_flash.labels`, and the
names of classes (`class_names`, `distinct_names`) from here.

A change must respect that any `ClassDistances` is valid: its constructor checks shapes, entries and
names, so a table of the user's, of a file or of a metric obeys the same rules
(`tests/labels/test_tables.py`). The constructor of `JointClassDistances` checks none of these, and
its `load` checks the file. The npz keys must stay, because users' files have them, and `arguments`
names both classes by their path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from otdd_flash.arguments import Count, Index, check_fields, takes
from otdd_flash.checks import array
from otdd_flash.cost.class_table import ROUNDING, symmetrized
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.files.tensor_file import STAMP, read_arrays, write_arrays
from otdd_flash.real_numbers import in_double, real_tensor
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import listing

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

    # `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes,
    # such as the default device, out.
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
        of_x, of_y = (None if of is None else tuple(of) for of in (names_x, names_y))
        return cls.split(full, size_x, of_x, of_y, lower, upper)

    @classmethod
    def split(
        cls,
        full: Tensor,
        size_x: int,
        names_x: tuple[str, ...] | None,
        names_y: tuple[str, ...] | None,
        lower: Tensor | None,
        upper: Tensor | None,
    ) -> ClassDistances:
        """Split a square table of more than `size_x` rows; `from_full` checks that for users."""
        blocks = full[:size_x, :size_x], full[:size_x, size_x:], full[size_x:, size_x:]
        return cls(*blocks, names_x, names_y, lower=lower, upper=upper)

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


UNLABELLED_CLASS = "all"


@dataclass(frozen=True, eq=False)
class JointClassDistances:
    """Squared 2-Wasserstein distances between all classes of K datasets, ground cost ||.||^2.

    Attributes:
        full: (V, V) float64, with V classes in all; symmetric, 0 on the diagonal and, but for what
            a `Tree` adds by names, between classes of equal content.
        datasets: K names, made distinct by numbers where datasets share one.
        class_names: for each dataset the names of its classes, in the order of its rows in the
            table.
        lower: (V, V) lower solver bounds; None if the metric gives none.
        upper: (V, V) upper solver bounds; None if the metric gives none.
    """

    full: Tensor
    datasets: tuple[str, ...]
    class_names: tuple[tuple[str, ...], ...]
    lower: Tensor | None = None
    upper: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("full", "lower", "upper"):
            if (given := getattr(self, name)) is not None:
                what = f"class distances {name}"
                object.__setattr__(self, name, in_double(what, real_tensor(what, given)))

    @property
    def offsets(self) -> tuple[int, ...]:
        """The K + 1 row offsets: dataset k has the rows offsets[k] to offsets[k + 1] - 1."""
        return (0, *accumulate(len(names) for names in self.class_names))

    @computes
    @takes()
    def between(self, first: Index, second: Index) -> ClassDistances:
        """Return the table of two of the datasets, given by their indices in the list.

        Raises:
            InputError: an index is out of range.
        """
        for place in (first, second):
            if not 0 <= place < len(self.datasets):
                raise InputError(
                    f"there is no dataset {place}; the table has {len(self.datasets)}, counted "
                    f"from 0: {', '.join(self.datasets)}"
                )
        return self.pair(first, second)

    def pair(self, first: int, second: int) -> ClassDistances:
        """Return the table of two datasets, without the check of indices that `between` does."""
        rows = torch.cat([torch.arange(*self.offsets[k : k + 2]) for k in (first, second)])
        full, lower, upper = self._of(rows)
        names = self.class_names[first], self.class_names[second]
        return ClassDistances.split(full, len(names[0]), *names, lower, upper)

    def named_for(self, datasets: Sequence[LabeledSamples]) -> JointClassDistances:
        """Return the table of these datasets' classes; rows are matched to classes by name.

        Raises:
            InputError: the number of datasets differs, or a class has no row.
        """
        if len(datasets) != len(self.datasets):
            raise InputError(
                f"the given class distances are about {len(self.datasets)} datasets "
                f"({', '.join(self.datasets)}), but there are {len(datasets)}"
            )
        rows: list[int] = []
        for samples, known, start in zip(datasets, self.class_names, self.offsets, strict=False):
            missing = [name for name in class_names(samples) if name not in known]
            if missing:
                raise InputError(
                    f"the given class distances have no class {', '.join(missing[:12])} of "
                    f"{samples.name}; they have {', '.join(known[:12])}"
                )
            rows += [start + known.index(name) for name in class_names(samples)]
        return joint_table(datasets, *self._of(torch.tensor(rows)))

    def _of(self, rows: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the values and bounds of some of the classes."""
        lower, upper = (
            None if table is None else table[rows][:, rows] for table in (self.lower, self.upper)
        )
        return self.full[rows][:, rows], lower, upper

    @takes()
    def save(self, path: str | Path) -> None:
        """Write an npz file with the keys full, offsets, datasets, class_names and the version.

        The keys lower and upper are added if there are bounds.

        Raises:
            InputError: the file cannot be written.
        """
        parts = {
            "full": self.full,
            "offsets": self.offsets,
            "datasets": self.datasets,
            "class_names": [name for names in self.class_names for name in names],
            "lower": self.lower,
            "upper": self.upper,
        }
        known = {key: part for key, part in parts.items() if part is not None}
        write_arrays(path, {**known, **STAMP})

    @classmethod
    @takes()
    def load(cls, path: str | Path) -> JointClassDistances:
        """Read a file that `save` wrote.

        Raises:
            InputError: the file is missing, unreadable or no such table.
        """
        needed = ("full", "offsets", "datasets", "class_names")
        arrays = read_arrays(path, needed, "JointClassDistances.save")
        names, datasets = (
            tuple(str(name) for name in np.atleast_1d(arrays[key]))
            for key in ("class_names", "datasets")
        )
        offsets = np.atleast_1d(arrays["offsets"]).tolist()
        full, lower, upper = (
            torch.as_tensor(arrays[key]).double() if key in arrays else None
            for key in ("full", "lower", "upper")
        )
        assert full is not None
        if not all(table is None or table.isfinite().all() for table in (full, lower, upper)):
            raise InputError(f"{path}: class distances hold NaN or infinite entries")
        square = (len(names), len(names))
        counted = offsets[-1] == len(names) and len(offsets) == len(datasets) + 1
        if not counted or any(t is not None and t.shape != square for t in (full, lower, upper)):
            raise InputError(
                f"{path}: the tables, names and offsets do not count the same classes; "
                "JointClassDistances.save writes such files"
            )
        groups = tuple(names[start:end] for start, end in pairwise(offsets))
        return cls(full, datasets, groups, lower, upper)


def joint_table(
    datasets: Sequence[LabeledSamples],
    full: Tensor,
    lower: Tensor | None = None,
    upper: Tensor | None = None,
) -> JointClassDistances:
    """Return the table of all classes of some datasets, with their names."""
    names = tuple(class_names(samples) for samples in datasets)
    return JointClassDistances(full, distinct_names(datasets), names, lower, upper)


def class_names(samples: LabeledSamples) -> tuple[str, ...]:
    """Return the names of the labels; unlabelled samples have the one class `UNLABELLED_CLASS`."""
    return samples.label_names if samples.labels is not None else (UNLABELLED_CLASS,)


def distinct_names(datasets: Sequence[LabeledSamples]) -> tuple[str, ...]:
    """Return the datasets' names, with the index appended to names that several share."""
    names = [samples.name for samples in datasets]
    return tuple(
        f"{name} ({place})" if names.count(name) > 1 else name for place, name in enumerate(names)
    )
