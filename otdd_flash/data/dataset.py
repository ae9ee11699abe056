"""`Request`, the options of all data sources, and `LabeledDataset`, their rows before extraction.

`LabeledDataset` holds raw inputs with class indices, sets of labels or numbers, and optional
weights: `load` returns it and `embed` takes it; all readers of `data`, `data.subset`,
`extractors.embedding`, `commands.sides` and `commands.study` use it; its `with_features` makes
samples, for `extractors.embedding` and `data.given`. `LazyItems` is a sequence of inputs that are
read on access; `extractors.network` reads it by `item_loader`. `as_inputs` decides by shape whether
arrays are vectors or images; `data.arrays`, `data.given`, `data.hugging_face` and
`data.image_datasets` call it.

`Request` has the options that all sources share. `data.registry` builds one for every source, and
`data.given` one for a Hugging Face dataset in memory; it is the first argument of the readers in
`data` and of those of other packages, so its fields must stay. `reading` turns any error of a file
reader into an `InputError`; `data.images` and `flows.functionals` use it too.

A change must keep the order of rows and the meaning of `rows`, the row numbers in the original
data: `subset_hash` is derived from them and identifies a subset in results. Integers are never
rounded silently, because rounded values would give another distance unnoticed. Arrays of the caller
are not written to.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader

from otdd_flash import checks
from otdd_flash.errors import DataNotice, InputError, choose, placed, warn
from otdd_flash.label_sets import (
    Encoded,
    LabelSets,
    check_range,
    encode_rows,
    named_numbers,
)
from otdd_flash.offline import RefusedAddress, is_address
from otdd_flash.raw_labels import missing_rows
from otdd_flash.real_numbers import (
    LARGEST_INTEGER,
    check_integers,
    exact_array,
    in_double,
    largest_integer,
    real_tensor,
)
from otdd_flash.samples import BOTH_KINDS, LabeledSamples, check_masses

Modality = Literal["image", "text", "array"]


@dataclass(frozen=True, eq=False)
class LabeledDataset:
    """Inputs of n items before feature extraction.

    Args:
        inputs: one array with leading dimension n (images (n, h, w) or (n, h, w, c), usually uint8;
            vectors (n, d)), or a sequence of n PIL images, strings or vectors.
        labels: (n,) class indices in [0, V), or None for unlabelled data.
        class_names: V names, one per class index.
        weights: (n,) masses in any unit, or None for uniform ones.
        modality: the kind of one item.
        name: the dataset's name in reports.
        rows: (n,) each item's row number in the original data; 0 to n - 1 if empty.
        choices: choices of the reader that the user had not made, such as the label column.
        feature_names: names of the table columns that vectors consist of.
        label_sets: of rows with several labels, which are in each set; `labels` are sets then.
        targets: (n, q) numbers in place of labels.

    Raises:
        InputError: there are no items, lengths or label values disagree, or there are labels and
            targets.
    """

    inputs: Sequence[Any] | NDArray[Any]
    labels: NDArray[np.int64] | None
    class_names: tuple[str, ...]
    weights: NDArray[np.float64] | None
    modality: Modality
    name: str
    rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64), kw_only=True)
    choices: tuple[str, ...] = field(default=(), kw_only=True)
    feature_names: tuple[str, ...] | None = field(default=None, kw_only=True)
    label_sets: LabelSets | None = field(default=None, kw_only=True)
    targets: NDArray[np.float64] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        n = len(self.inputs)
        if n == 0:
            raise InputError(f"{self.name} is empty: it has no rows")
        if self.modality not in get_args(Modality):
            raise InputError(f"modality must be one of {get_args(Modality)}, got {self.modality!r}")
        targets = None if self.targets is None else self.targets[:, 0]
        given = {"labels": self.labels, "weights": self.weights, "targets": targets}
        for what, values in given.items():
            if values is not None and values.shape != (n,):
                raise InputError(
                    f"{self.name} has {n} inputs, but its {what} have shape {values.shape}; give "
                    "one for each input"
                )
        if self.labels is not None:
            if self.targets is not None:
                raise InputError(f"{self.name}: {BOTH_KINDS}")
            with placed(self.name):
                check_range(self.labels, len(self.class_names))
        if len(self.rows) == 0:
            object.__setattr__(self, "rows", np.arange(n))

    @classmethod
    def from_raw(
        cls,
        inputs: Sequence[Any] | NDArray[Any],
        labels: ArrayLike | None,
        *,
        targets: NDArray[np.float64] | None = None,
        modality: Modality,
        name: str,
        class_names: Sequence[str] | None = None,
        weights: ArrayLike | None = None,
        rows: NDArray[np.int64] | None = None,
        drop_unlabelled: bool | None = None,
        choices: tuple[str, ...] = (),
        feature_names: tuple[str, ...] | None = None,
    ) -> LabeledDataset:
        """Build a dataset from labels as its source stores them.

        With `class_names` the labels are indices into them, and labels that are all negative mean
        an unlabelled split (a common convention for hidden test labels). Without, the classes are
        the distinct integer or string labels in sorted order; whole numbers in floats are integers.
        Rows with several labels, and numbers, are read as by `label_sets.encode_rows`. `targets`
        (n, q) are numbers whatever they are, in place of labels.

        Rows without a label (None, NaN, a negative index) are left out if `drop_unlabelled` is
        true; it is None for a source without that option.

        Raises:
            InputError: the labels are neither integers nor strings, or do not fit; labels are
                missing and may not be dropped; weights are not finite and non-negative numbers.
        """
        if len(inputs) == 0:
            raise InputError(f"{name} is empty: it has no rows")
        masses = None if weights is None else _as_masses(weights, name)
        known_rows = np.arange(len(inputs)) if rows is None else rows
        about: dict[str, Any] = {"choices": choices, "feature_names": feature_names}
        dataset = cls(inputs, None, (), masses, modality, name, rows=known_rows, **about)
        if targets is not None:
            missing = np.asarray(np.isnan(targets).any(1))
            found = Encoded(None, (), targets=targets[~missing])
        elif labels is not None:
            with placed(name):
                found, missing = encode_rows(labels, class_names)
        else:
            return dataset
        if missing.any():
            dataset = dataset.take(_labelled_rows(missing, dataset, drop=drop_unlabelled))
        if found.labels is None and found.targets is None:
            warn(f"{name}: all its labels are negative, and it is taken as unlabelled", DataNotice)
        return dataset.labelled(found)

    def numbered(self) -> LabeledDataset:
        """Return the dataset with numbers in place of classes that are named by them."""
        values = named_numbers(self.class_names) if self.label_sets is None else None
        if self.labels is None or values is None:
            return self
        return self.labelled(Encoded(None, (), targets=values[self.labels]))

    @property
    def encoded(self) -> Encoded:
        """The labels of all rows."""
        return Encoded(self.labels, self.class_names, self.label_sets, self.targets)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels, of which a row may have several."""
        return self.class_names if self.label_sets is None else self.label_sets.names

    def labelled(self, found: Encoded) -> LabeledDataset:
        """Return the dataset with labels of n rows of any kind.

        Raises:
            InputError: their number differs.
        """
        return replace(self, **found._asdict())

    @cached_property
    def subset_hash(self) -> str:
        """SHA-256 of `rows`, which identifies the subset in results."""
        return hashlib.sha256(self.rows.astype("<i8").tobytes()).hexdigest()

    @property
    def kind_of_labels(self) -> str:
        """The kind of labels, for messages: `3 classes`, `2 numbers a row`."""
        if self.targets is not None:
            count = self.targets.shape[1]
            return f"{count} {'number' if count == 1 else 'numbers'} a row"
        if self.labels is None:
            return "no labels"
        if self.label_sets is not None:
            return f"{len(self.label_sets.names)} labels in {len(self.class_names)} sets"
        return f"{len(self.class_names)} classes"

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, rows: ArrayLike) -> LabeledDataset:
        chosen = np.asarray(rows, dtype=np.int64)
        return replace(
            self,
            inputs=take_inputs(self.inputs, chosen),
            labels=None if self.labels is None else self.labels[chosen],
            weights=None if self.weights is None else self.weights[chosen],
            targets=None if self.targets is None else self.targets[chosen],
            rows=self.rows[chosen],
        )

    def weighted(self, weights: ArrayLike) -> LabeledDataset:
        """Return the dataset with other masses (n,).

        Raises:
            InputError: their number differs, or they are not finite and non-negative numbers.
        """
        return replace(self, weights=_as_masses(weights, self.name))

    def with_features(
        self, features: Tensor, feature_names: tuple[str, ...] | None = None
    ) -> LabeledSamples:
        """Return samples of these features (n, d), with everything else of the dataset."""
        return LabeledSamples(
            features,
            weights=None if self.weights is None else torch.from_numpy(self.weights),
            name=self.name,
            subset_hash=self.subset_hash,
            feature_names=feature_names,
            **self.encoded.of_samples(),
        )


def concatenate(parts: Sequence[LabeledDataset], name: str) -> LabeledDataset:
    """Join splits of one dataset, which have no weights; row numbers count through all of them.

    Raises:
        InputError: only some splits have labels, or their classes differ.
    """
    first = parts[0]
    if any(part.label_sets is not None or part.targets is not None for part in parts):
        raise InputError(f"{name}: splits of several labels or numbers are read one at a time")
    labels = [part.labels for part in parts if part.labels is not None]
    if len(labels) not in (0, len(parts)):
        raise InputError(f"{name}: some splits have labels and others have none; load one split")
    if any(part.class_names != first.class_names for part in parts):
        raise InputError(f"{name}: the splits have different classes; load one split")
    return LabeledDataset(
        join_inputs([part.inputs for part in parts]),
        np.concatenate(labels) if labels else None,
        first.class_names,
        None,
        first.modality,
        name,
        feature_names=first.feature_names,
    )


def _labelled_rows(
    missing: NDArray[np.bool_], dataset: LabeledDataset, *, drop: bool | None
) -> NDArray[np.int64]:
    name, count = dataset.name, len(dataset)
    if len(missing) != count:
        raise InputError(
            f"{name} has {count} inputs, but {len(missing)} labels; give one for each input"
        )
    if missing.all():
        raise InputError(f"{name}: all {count} labels are missing; load it without labels")
    if not drop:
        way_out = "remove those rows or label them"
        if drop is not None:
            way_out = (
                "drop_unlabelled=true leaves those rows out (on the command line a key of the "
                "dataset, such as source.drop_unlabelled)"
            )
        raise InputError(f"{name}: {missing_rows(missing)}; {way_out}")
    warn(f"{name}: {int(missing.sum())} of {count} rows have no label and are left out", DataNotice)
    return np.flatnonzero(~missing)


def _as_masses(values: ArrayLike, name: str) -> NDArray[np.float64]:
    with placed(name):
        given = in_double("weights", real_tensor("weights", values)).detach().cpu()
        # A copy: the caller may write to its own array.
        masses = np.array(given.numpy())
        check_masses(masses)
    return masses


def take_inputs(inputs: Sequence[Any] | NDArray[Any], rows: NDArray[np.int64]) -> Any:
    """Return the inputs of some rows; unread ones stay unread."""
    if isinstance(inputs, np.ndarray):
        return inputs[rows]
    if isinstance(inputs, LazyItems):
        return inputs.take(rows)
    return [inputs[row] for row in rows.tolist()]


def join_inputs(parts: Sequence[Any]) -> Any:
    """Join several sequences of inputs; unread ones stay unread."""
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    joined = ConcatDataset[Any](parts)
    return LazyItems(joined.__getitem__, np.arange(len(joined)))


class LazyItems(Sequence[Any]):
    """Items read one at a time; a slice gives a list.

    Args:
        fetch: reads the item of one key. It must pickle, for processes that are not forked.
        keys: (n,) the keys of the items, in order: row numbers, or names of files as objects.
    """

    def __init__(self, fetch: Callable[[Any], Any], keys: NDArray[Any]) -> None:
        self._fetch = fetch
        self._keys = keys

    @property
    def paths(self) -> list[str] | None:
        """The n files of the items, or None if items are not files."""
        return self._keys.tolist() if self._keys.dtype == object else None

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._fetch(key) for key in self._keys[index].tolist()]
        # The key is taken out of a list of one, whose entry is Python's own number.
        return self._fetch(*self._keys[[index]].tolist())

    def take(self, rows: NDArray[np.int64]) -> LazyItems:
        """Return the items at these positions, still unread."""
        return LazyItems(self._fetch, self._keys[rows])


def item_loader(items: Any, batch_size: int, num_workers: int) -> DataLoader[Any]:
    """Return a loader of lists of items, read in order; it draws no number.

    Args:
        items: a `torch.utils.data.Dataset`, or `LazyItems`.
        batch_size: items of a list.
        num_workers: processes that read items; 0 reads them in this process.
    """
    # Forked workers inherit the items; other start methods would pickle them. None is the
    # platform's default.
    forks = num_workers > 0 and "fork" in multiprocessing.get_all_start_methods()
    return DataLoader(
        items,
        batch_size=batch_size,
        num_workers=num_workers,
        collate_fn=list,
        # A loader without its own generator draws from the global one, which belongs to the caller.
        generator=torch.Generator(),
        multiprocessing_context="fork" if forks else None,
    )


CHANNELS = (1, 3, 4)


def as_inputs(values: NDArray[Any], where: str) -> tuple[NDArray[Any], Modality]:
    """Return arrays with their modality: vectors (n, d), "array"; images (n, h, w[, c]), "image".

    Images of uint8, uint16, bool and floats keep their type, which says what is white. Those of
    other integers become uint8, or float32 if a value is outside 0 to 255. Vectors with integers
    that float32 cannot hold become float64, which must hold them.

    Args:
        values: numbers.
        where: the file and key, for the message.

    Raises:
        InputError: the values are not numbers, have another shape or would be rounded.
    """
    values = exact_array(what := f"{where}: inputs", values)
    if values.dtype.kind not in "fiub":
        raise InputError(f"{where}: inputs must be numbers, got {values.dtype}")
    if values.ndim == 2:
        large = largest_integer(values) > LARGEST_INTEGER
        return in_double(what, real_tensor(what, values)).numpy() if large else values, "array"
    if values.ndim == 3 or (values.ndim == 4 and values.shape[3] in CHANNELS):
        check_integers(where, values)
        return _as_pixels(values), "image"
    raise InputError(
        f"{where}: inputs must have shape (n, d), or (n, h, w) or (n, h, w, c) with {CHANNELS} "
        f"channels last for images; got {values.shape}"
    )


def _as_pixels(values: NDArray[Any]) -> NDArray[Any]:
    kind, size = values.dtype.kind, values.dtype.itemsize
    if kind in "fb" or (kind == "u" and size <= 2) or values.size == 0:
        return values
    if values.min() < 0 or values.max() > 255:
        return values.astype(np.float32)
    return values.astype(np.uint8)


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
