"""The options that all data sources share, and how files on disk are found and read.

`data.registry` builds a `Request` for every source, and `data.given` one for a Hugging Face dataset
in memory; it is the first argument of the readers in `data`. `reading` turns any error of a file
reader into an `InputError`; `data.images` and `flows.functionals` use it too. Readers of
other packages also receive a `Request`, so its fields must stay.
"""

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
        split: the part of the dataset; "all" for the whole.
        root: folder of datasets that have a name, such as mnist, and of relative paths that are
            not in the working directory; `data_root` on the command line.
        download: whether missing files may be fetched.
        seed: seed of synthetic data.
        weights: one mass per row: a column or key of the data, which its reader takes, or a .npy
            file, which `masses` reads.
    """

    name: str
    split: str = "train"
    root: Path = DEFAULT_ROOT
    download: bool = False
    seed: int = 0
    weights: str | None = None

    @property
    def title(self) -> str:
        """The dataset's name in reports: its name, and the split if it is one part."""
        return self.name if self.split == "all" else f"{self.name} {self.split}"

    def parts(self) -> tuple[str, ...]:
        """Return the splits to read for a source that has a training and a test part."""
        choose(f"split of {self.name}", self.split, SPLITS)
        return ("train", "test") if self.split == "all" else (self.split,)

    def one_part(self) -> None:
        """Refuse any split but `all` and the default `train`, for files that are not divided."""
        if self.split not in ("train", "all"):
            raise InputError(
                f"{self.name} reads files that have no splits: split={self.split!r} must be all "
                "(or the default); name the file that holds the other split instead"
            )

    def locate(self, option: str, path: str | Path | None) -> Path:
        """Return the existing file or folder that an option names, as given or below the root.

        Raises:
            InputError: the option is not set, or there is no such file.
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
        """Read the .npy file that `weights` names; return None without `weights`.

        Raises:
            InputError: there is no such file, or it is unreadable.
        """
        if self.weights is None:
            return None
        path = self.locate("weights", self.weights)
        with reading(path):
            values: NDArray[Any] = np.load(path, allow_pickle=False)
        return values


def chosen(where: str, choices: Sequence[str], way_out: str) -> tuple[str, ...]:
    """Report the choices that a reader made for the user, and return them as a tuple.

    Warns:
        DataNotice: there are choices.
    """
    if choices:
        said = "; ".join(choices)
        warn(f"{where}: {said}; choose with {way_out}", DataNotice)
    return tuple(choices)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error of a file reader into an `InputError`.

    Third-party readers raise anything from AssertionError to zlib.error on damaged bytes.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # Libraries wrap the refusal of an address, whose own words name the way out.
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, RefusedAddress):
                raise InputError(f"{path}: {cause}") from error
            cause = cause.__cause__ or cause.__context__
        if "allow_pickle" in str(error):
            # NumPy's message for pickled objects, and for any file that is not NumPy's.
            raise InputError(
                f"cannot read {path}: it holds Python objects, or is no NumPy file; arrays must "
                "hold numbers, labels integers or strings"
            ) from error
        # This error of `datasets` says only that generation failed; its cause says why.
        reason = error.__cause__ if type(error).__name__ == "DatasetGenerationError" else error
        detail = str(reason or error) or type(error).__name__
        raise InputError(f"cannot read {path}: {detail}; is it damaged or empty?") from error
