"""Features that stay in files: tensors that are read from disk as they are used.

`features_file` is public and opens a .npy array, a matrix of a .safetensors file or a column of
Arrow files. A matrix in one piece is memory-mapped, so that any operation reads what it touches
(`FileFeatures`). A column in record batches has no address (`ScatteredFeatures`): indexed rows and
the largest entry are read block by block, and any other operation reads all of it. `samples`,
`fingerprint`, `operators`, `solver.tensor_problem`, `flows.run` and `extractors.feature_store`
recognise or open such tensors.

A change must respect that nothing written to such a tensor reaches its files, from which long
passes read: in-place changes are refused. Pickling sends the names of files, not their content.
"""

from __future__ import annotations

import math
import os
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from otdd_flash.arguments import Word, takes
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.features.feature_file import FeatureFile

if TYPE_CHECKING:
    from datasets import Dataset

CHANGED = (
    "features in files cannot be changed in place, as they are read from there again; change a "
    "copy in memory, features[:].clone()"
)


class FileFeatures(Tensor):
    """A matrix with the files that hold it; results of operations are plain tensors.

    Attributes:
        file: the matrix in its files.
    """

    file: FeatureFile

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def check(self) -> None:
        """Refuse files that changed, and changes in memory, which the files lack.

        Raises:
            InputError: a file or a number in memory has changed.
        """
        self.file.check()
        if not self.is_inference() and self._version > 0:
            raise InputError(CHANGED)

    def __deepcopy__(self, _: Any) -> Tensor:
        self.check()
        # A copy with memory maps of its own.
        return features_of(copy(self.file))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the files' names; other processes read the files."""
        self.check()
        return _reopened, (self.file,)


class ScatteredFeatures(FileFeatures):
    """A matrix in several pieces, read when an operation needs them."""

    @staticmethod
    def of(file: FeatureFile) -> ScatteredFeatures:
        """Make a tensor without memory of its own."""
        make: Any = Tensor._make_wrapper_subclass
        found: ScatteredFeatures = make(
            ScatteredFeatures, file.matrix.shape, dtype=file.matrix.dtype, device="cpu"
        )
        found.file = file
        return found

    def __setitem__(self, *_: Any) -> None:
        raise InputError(CHANGED)

    def tolist(self) -> Any:
        return self.numpy().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ScatteredFeatures({self.file.matrix.shape}, {self.file.matrix.dtype})"

    def numpy(self, *, force: bool = False) -> Any:
        return self.file.rows(slice(0, self.shape[0])).numpy(force=force)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Take rows and the largest entry without reading the whole matrix; else read it.

        Raises:
            InputError: the operation writes to the matrix; the files would not change.
        """
        one = args[0]
        aten = torch.ops.aten
        if isinstance(one, ScatteredFeatures):
            file, count = one.file, one.file.matrix.shape[0]
            match function, args[1:]:
                case aten.detach.default | aten.alias.default, _:
                    return ScatteredFeatures.of(file)
                case aten.slice.Tensor, (0, start, stop, *step) if step in ([], [1]):
                    start, stop, _ = slice(start, stop).indices(count)
                    return file.rows(slice(start, max(start, stop)))
                case aten.index.Tensor, ([Tensor() as rows],) if _is_places(rows):
                    rows = torch.where(rows < 0, rows + count, rows).cpu()
                    return file.take(rows, torch.empty(len(rows), one.shape[1], dtype=one.dtype))
                case aten.linalg_vector_norm.default, (math.inf,):
                    norms = [function(file.rows(rows), math.inf) for rows in file.blocks()]
                    return torch.stack(norms).amax()

        def read(given: Any) -> Any:
            whole = isinstance(given, ScatteredFeatures)
            return given.file.rows(slice(0, given.shape[0])) if whole else given

        if any(isinstance(given, ScatteredFeatures) for given in _written(function, args, kwargs)):
            raise InputError(CHANGED)
        args, kwargs = torch.utils._pytree.tree_map(read, (args, kwargs or {}))
        return function(*args, **kwargs)


@computes
@takes()
def features_file(path: str | os.PathLike[str] | Dataset, *, key: Word | None = None) -> Tensor:
    """Open features (n, d) in files, as a matrix that is read as it is used.

    Args:
        path: a .npy or .safetensors file with a matrix of floating-point numbers; an .arrow file or
            a folder of `Dataset.save_to_disk` with a column of lists of one length; or a
            `datasets.Dataset` that is stored in such files.
        key: the name of the matrix in a .safetensors file, or of the column; needed if there are
            several.

    Returns:
        (n, d), mapped into memory or read as it is used. Distances stream it to the device in
        blocks of rows if it does not fit there.

    Raises:
        InputError: there is no such file or matrix, it is truncated or damaged, or has another
            type.
    """
    given = Path(path) if isinstance(path, str | os.PathLike) else path
    return features_of(FeatureFile(given, key))


def features_of(file: FeatureFile) -> FileFeatures:
    """Return the matrix (n, d) of files, mapped into memory if it is in one piece."""
    if len(file.matrix.pieces) > 1:
        return ScatteredFeatures.of(file)
    features = file.mapped().as_subclass(FileFeatures)
    features.file = file
    return features


def _reopened(file: FeatureFile) -> Tensor:
    return features_of(file.reopened())


def _is_places(rows: Tensor) -> bool:
    """Return whether an index (k,) lists rows by number."""
    return rows.dtype == torch.int64 and rows.ndim == 1


def _written(function: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation writes to."""
    declared = function._schema.arguments
    given = dict(zip((each.name for each in declared), args, strict=False)) | (kwargs or {})
    changed = (each.name for each in declared if each.alias_info and each.alias_info.is_write)
    return [given.get(name) for name in changed]
