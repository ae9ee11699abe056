"""The table of class-to-class distances W, in named blocks, validated, saved and loaded as npz."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otdd_flash.errors import InputError

# Entries come from sums of squares of very different sizes: what is this far below zero, relative
# to the largest entry, or differs this much between W and its transpose, is taken for rounding.
ROUNDING = 1e-5
ABSOLUTE_ROUNDING = 1e-6


@dataclass(frozen=True, eq=False)
class ClassDistances:
    """Squared 2-Wasserstein distances between the classes of two datasets, ground cost ||.||^2.

    Args:
        xx: (Vx, Vx) within the source; symmetric.
        xy: (Vx, Vy) from source classes (rows) to target classes (columns).
        yy: (Vy, Vy) within the target; symmetric.
        names_x: names of the Vx source classes; None where unknown.
        names_y: names of the Vy target classes; None where unknown.

    All blocks become float64 CPU tensors.

    Raises:
        InputError: shapes disagree, an entry is not finite or below zero by more than rounding, a
            diagonal block is not symmetric, or the names do not count as many as the classes.
    """

    xx: Tensor
    xy: Tensor
    yy: Tensor
    names_x: tuple[str, ...] | None = None
    names_y: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for key in ("xx", "xy", "yy"):
            object.__setattr__(self, key, _as_block(key, getattr(self, key)))
        _check_shapes(self.xx, self.xy, self.yy)
        for key in ("xx", "yy"):
            _check_symmetric(key, getattr(self, key))
        for key, size in zip(("names_x", "names_y"), self.xy.shape, strict=True):
            object.__setattr__(self, key, _as_names(key, getattr(self, key), size))

    @classmethod
    def from_full(
        cls,
        full: Tensor,
        size_x: int,
        names_x: Sequence[str] | None = None,
        names_y: Sequence[str] | None = None,
    ) -> ClassDistances:
        """Cut a (Vx + Vy, Vx + Vy) table into its blocks; `size_x` is Vx."""
        return cls(
            full[:size_x, :size_x],
            full[:size_x, size_x:],
            full[size_x:, size_x:],
            None if names_x is None else tuple(names_x),
            None if names_y is None else tuple(names_y),
        )

    @property
    def full(self) -> Tensor:
        """The (Vx + Vy, Vx + Vy) table [[xx, xy], [xy^T, yy]]."""
        return torch.cat((torch.cat((self.xx, self.xy), 1), torch.cat((self.xy.T, self.yy), 1)))

    def named_for(self, names_x: Sequence[str], names_y: Sequence[str]) -> ClassDistances:
        """The same table with these class names, once it is sure that it is about these classes.

        Raises:
            InputError: the table counts other classes or names them otherwise.
        """
        for side, size, own, wanted in (
            ("source", self.xx.shape[0], self.names_x, tuple(names_x)),
            ("target", self.yy.shape[0], self.names_y, tuple(names_y)),
        ):
            if size != len(wanted):
                raise InputError(
                    f"the given class distances are about {size} {side} classes"
                    f"{'' if own is None else f' ({_listing(own)})'}, but the {side} has "
                    f"{len(wanted)} ({_listing(wanted)}); give a table for these datasets, or "
                    f"choose classes with {side}.classes"
                )
            if own is not None and own != wanted:
                raise InputError(
                    f"the given class distances name the {side} classes {_listing(own)}, but the "
                    f"{side} has {_listing(wanted)}; give a table for these datasets, with rows "
                    "and columns in this order, or one without names"
                )
        return ClassDistances(self.xx, self.xy, self.yy, tuple(names_x), tuple(names_y))

    def save(self, path: str | Path) -> None:
        """Write an npz with keys xx, xy, yy and, where known, names_x and names_y."""
        arrays: dict[str, Any] = {
            "xx": self.xx.numpy(),
            "xy": self.xy.numpy(),
            "yy": self.yy.numpy(),
        }
        for key, names in (("names_x", self.names_x), ("names_y", self.names_y)):
            if names is not None:
                arrays[key] = np.array(names, dtype=str)
        # Through a handle, because numpy appends .npz to a path of any other ending.
        with Path(path).open("wb") as file:
            np.savez(file, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> ClassDistances:
        """Read what `save` wrote, or any npz with arrays xx, xy and yy.

        Raises:
            InputError: the file is missing or unreadable, lacks a key, or fails the checks above.
        """
        path = Path(path)
        blocks = _read_npz(path)
        missing = [key for key in ("xx", "xy", "yy") if key not in blocks]
        if missing:
            raise InputError(
                f"{path} has no array {', '.join(missing)} (it holds: "
                f"{', '.join(blocks) or 'nothing'}); {_EXPECTED}"
            )
        names = (
            tuple(str(name) for name in np.atleast_1d(blocks[key])) if key in blocks else None
            for key in ("names_x", "names_y")
        )
        try:
            return cls(blocks["xx"], blocks["xy"], blocks["yy"], *names)
        except InputError as error:
            raise InputError(f"{path}: {error}") from error


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InputError(f"{path} holds a single array; {_EXPECTED}")
        with archive:
            return {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise InputError(f"no class distances at {path}: there is no such file") from None
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"cannot read class distances from {path} ({error}); {_EXPECTED}"
        ) from None


_EXPECTED = "class distances are an npz with arrays xx, xy and yy, as ClassDistances.save writes"


def _as_block(key: str, values: Any) -> Tensor:
    try:
        block = torch.as_tensor(values).detach().to("cpu", torch.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"class distances {key} must be a real matrix: {error}") from None
    if block.ndim != 2 or 0 in block.shape:
        raise InputError(f"class distances {key} must be a matrix, got shape {tuple(block.shape)}")
    if not bool(torch.isfinite(block).all()):
        count = int((~torch.isfinite(block)).sum())
        raise InputError(f"class distances {key} hold {count} NaN or infinite entries")
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


def _check_symmetric(key: str, block: Tensor) -> None:
    gap = float((block - block.T).abs().max())
    if gap > _rounding(block):
        raise InputError(
            f"class distances {key} must be symmetric, but differ by {gap:.6g} from its transpose"
        )


def _as_names(key: str, names: Sequence[str] | None, size: int) -> tuple[str, ...] | None:
    if names is None:
        return None
    names = tuple(str(name) for name in names)
    if len(names) != size:
        raise InputError(f"{key} has {len(names)} names ({_listing(names)}) for {size} classes")
    return names


def _rounding(block: Tensor) -> float:
    return ROUNDING * float(block.abs().max()) + ABSOLUTE_ROUNDING


def _listing(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, ... {len(names) - most} more"
