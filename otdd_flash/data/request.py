"""What every kind of source is asked for, and how files on disk are found and read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from otdd_flash import checks
from otdd_flash.errors import DataNotice, InputError, choose, warn
from otdd_flash.offline import RefusedAddress, is_address

DEFAULT_ROOT = Path("~/.cache/otdd_flash/datasets")
SPLITS = ("train", "test", "all")


@dataclass(frozen=True)
class Request:
    """The options that all sources share.

    Args:
        name: the source's name in the registry.
        split: which part of the dataset; "all" for the whole.
        root: folder under which named datasets lie.
        download: whether missing files may be fetched.
        seed: of synthetic data.
        weights: a column, key or file with one mass per row.
    """

    name: str
    split: str = "train"
    root: Path = DEFAULT_ROOT
    download: bool = False
    seed: int = 0
    weights: str | None = None

    @property
    def title(self) -> str:
        """What reports call the dataset: its name, and the split where it is one part."""
        return self.name if self.split == "all" else f"{self.name} {self.split}"

    def parts(self) -> tuple[str, ...]:
        """The splits to read for a source that has a training and a test part."""
        choose(f"split of {self.name}", self.split, SPLITS)
        return ("train", "test") if self.split == "all" else (self.split,)

    def one_part(self) -> None:
        """Refuse any split but the whole, for a source whose files are not divided."""
        if self.split not in ("train", "all"):
            raise InputError(
                f"{self.name} reads files that have no splits: split={self.split!r} must be all "
                "(or the default); name the file that holds the other split instead"
            )

    def locate(self, option: str, path: str | Path | None) -> Path:
        """The file or folder that an option names: as given, or below the root.

        Raises:
            InputError: the option is not set, or nothing is there.
        """
        if not path:
            raise InputError(f"{self.name} needs {option}=PATH")
        if is_address(str(path)):
            raise InputError(
                f"{self.name}: {option}={path} is an address; fetch it and give the file's path"
            )
        given = Path(checks.path(option, path))
        candidates = [given] if given.is_absolute() else [given, self.root / given]
        for candidate in candidates:
            if candidate.exists():
                return candidate
        looked = " or ".join(str(candidate.absolute()) for candidate in candidates)
        raise InputError(f"{self.name}: {option}={path} does not exist (looked at {looked})")

    def masses(self) -> NDArray[Any] | None:
        """What the file holds that `weights` names, as no column or key; None without `weights`.

        Raises:
            InputError: there is no such file, or it is unreadable.
        """
        if self.weights is None:
            return None
        path = self.locate("weights", self.weights)
        with reading(path):
            values: NDArray[Any] = np.load(path, allow_pickle=False)
        return values

    def missing(self, looked: str) -> InputError:
        """The error for a named dataset whose files are not on disk."""
        return InputError(
            f"{self.name} is not on disk: no {looked}; set data_root=DIR to the folder that holds "
            "it, or allow fetching it with download=true"
        )


def chosen(where: str, choices: Sequence[str], way_out: str) -> tuple[str, ...]:
    """Say what a reader chose that the user did not name, and return it for the dataset.

    Warns:
        DataNotice: something was chosen.
    """
    if choices:
        said = "; ".join(choices)
        warn(f"{where}: {said}; choose with {way_out}", DataNotice)
    return tuple(choices)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn whatever a file reader raises for an unreadable or damaged file into an `InputError`.

    Readers of third parties raise anything from AssertionError to zlib.error on damaged bytes.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, RefusedAddress):
                raise InputError(f"{path}: {cause}") from error
            cause = cause.__cause__ or cause.__context__
        if "allow_pickle" in str(error):
            # NumPy's words for objects and for any file that is not NumPy's.
            raise InputError(
                f"cannot read {path}: it holds Python objects, or is no NumPy file; arrays must "
                "hold numbers, labels integers or strings"
            ) from error
        # The datasets library says of most errors that there was one.
        reason = error.__cause__ if type(error).__name__ == "DatasetGenerationError" else error
        detail = str(reason or error) or type(error).__name__
        raise InputError(f"cannot read {path}: {detail}; is it damaged or empty?") from error
