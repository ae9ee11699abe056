"""Objects that users hold (datasets, loaders, arrays), converted to `LabeledDataset` or samples.

    object                                    inputs                  rows that `max_samples` takes
    LabeledDataset, arrays, TensorDataset     as they are             drawn in proportion to classes
    torchvision's datasets                    stored or on access     drawn in proportion to classes
    Subset, ConcatDataset of both             as those of the parts   drawn in proportion to classes
    datasets.Dataset                          numbers read at once,   drawn in proportion to classes
                                              others on access
    any other with items and a length         read once, in order     drawn whatever their class
    DataLoader, IterableDataset               read once, in order     the first ones
    datasets.IterableDataset                  read once, in order     the first ones

A torchvision dataset whose labels are not stored beside its items, or are changed by a transform,
counts as any other. Rows with several labels, or with numbers, are drawn whatever these are.
Items are pairs (input, label). An input is a vector (an array, a tensor or a list of numbers), a
text, or an image: of PIL, an array (h, w) or (h, w, c), or a tensor (h, w) or (c, h, w). A tensor
is kept as one, as networks take it. Arrays of other shapes are for extractors that know their
meaning.

`extractors.embedding` calls `opened`, to embed a dataset batch by batch. The entry points that take
samples (`otdd`, `solver.solving`, `flows.run`, `ranking.index`, `shift.joint` and others) call
`as_samples`.

A change must keep the order of rows and draw them by labels, number and `seed` alone, so that the
same call compares the same rows, and must refuse a stream before it fills the memory. User code
runs inside `user_code`, so that its errors name the row or batch.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
)

from otdd_flash.arguments import (
    HF_DATASET_CLASS,
    HF_STREAM_CLASS,
    LOADER_CLASS,
    Progress,
    holds_items,
)
from otdd_flash.checks import is_a, shown
from otdd_flash.data.dataset import (
    CHANNELS,
    LabeledDataset,
    LazyItems,
    Modality,
    Request,
    as_inputs,
    item_loader,
    join_inputs,
    take_inputs,
)
from otdd_flash.data.hugging_face import labeled_table
from otdd_flash.data.image_datasets import known_labels, stored_images
from otdd_flash.data.images import plain_item
from otdd_flash.data.subset import subset
from otdd_flash.errors import DataNotice, InputError, UserCodeError, placed, prefixed, warn
from otdd_flash.memory import ASSUMED_FREE, check_room
from otdd_flash.plugins import user_code
from otdd_flash.raw_labels import names_of_columns, raw_values, without_fractions
from otdd_flash.real_numbers import dense, exact_array, real_tensor
from otdd_flash.samples import LabeledSamples, SamplesOrArrays
from otdd_flash.shown import listing

if TYPE_CHECKING:
    import datasets

# The datasets that `embed` takes, and what entry points take as samples.
Held: TypeAlias = (
    "LabeledDataset | Dataset[Any] | DataLoader[Any] | datasets.Dataset | datasets.IterableDataset"
)
Samples: TypeAlias = "SamplesOrArrays | Held"

CALLED = {"image": "an image", "text": "a text", "array": "an array of numbers"}
HOW_TO_CHOOSE = "; where it is one-hot or one number in brackets, take its argmax or flatten it"
HOW_TO_PAIR = "wrap the dataset so that its items are pairs (input, label)"
# Items of a stream of unknown length after which a notice says that it may have no end.
MANY = 1 << 20
# Rows of a Hugging Face stream read at once, and the fields in which it stores images.
ROWS_AT_ONCE, STORED_IMAGE = 1000, {"bytes", "path"}
# Items that a worker process reads at once.
ITEMS_AT_ONCE = 64


def opened(
    given: Any,
    name: str = "dataset",
    *,
    max_samples: int | None = None,
    seed: int = 0,
    input: str | Sequence[str] | None = None,
    label: str | None = None,
    weights: str | None = None,
    num_workers: int = 0,
) -> LabeledDataset | ReadOnce:
    """Convert a user's object to a dataset, or to pairs still to be read; see the table above.

    Args:
        given: of a type that `arguments.dataset` accepts, or a tuple of arrays.
        name: name of the argument for messages, and of datasets without a name of their own.
        max_samples: the largest number of rows taken.
        seed: seed of the draw.
        input: the input column of a Hugging Face dataset, or several numeric ones.
        label: its label column.
        weights: its column of masses.
        num_workers: processes that read items; 0 reads them in this process.

    Raises:
        InputError: there are no items, an item is no pair of an input and a label, or the items do
            not fit in memory.
    """
    if is_a(given, HF_DATASET_CLASS, HF_STREAM_CLASS):
        found = _of_hugging_face(given, name, max_samples, weights, input=input, label=label)
        return subset(found, None, max_samples, seed)
    for option, column in (("input", input), ("label", label), ("weights", weights)):
        if column is not None:
            raise InputError(
                f"{option}={column} names a column of a Hugging Face dataset, and {name} is "
                f"{shown(given)}; leave {option} out"
            )
    if isinstance(given, LabeledDataset):
        return given if max_samples is None else subset(given, None, max_samples, seed)
    if isinstance(given, tuple):
        inputs, columns = _array_inputs(given[0], name), names_of_columns(given[0])
        found = _labelled(inputs, given[1], None, name)
        if columns and inputs.shape[1:] == (len(columns),):
            found = replace(found, feature_names=columns)
        return subset(found, None, max_samples, seed)
    name = _title(given) or name
    names = _class_names(given, name)
    if is_a(given, LOADER_CLASS):
        read = islice(_of_loader(given, name), max_samples)
        return ReadOnce(name, names, read, max_samples, max_samples, loaded=True)
    if isinstance(given, IterableDataset):
        read = islice(_each(given, "row", name), max_samples)
        return ReadOnce(name, names, read, max_samples, max_samples)
    try:
        count = len(given)
    except (TypeError, NotImplementedError):
        raise InputError(
            f"{name} is a {type(given).__qualname__} without a length; define __len__, or make it "
            "an IterableDataset"
        ) from None
    _check_length(count, name)
    if (known := _known(given, name)) is not None:
        return subset(_labelled(*known, names, name), None, max_samples, seed)
    rows = np.arange(count)
    if max_samples is not None and max_samples < count:
        rows = np.sort(np.random.default_rng(seed).permutation(count)[:max_samples])
    pairs = _at(given, rows, num_workers, name)
    return ReadOnce(name, names, pairs, len(rows), max_samples, rows)


def as_samples(given: Samples, name: str) -> LabeledSamples:
    """Convert the argument of an entry point to samples; a dataset must hold vectors.

    Args:
        given: of a type that `arguments.samples` accepts.
        name: name of the argument, for messages.

    Raises:
        InputError: as for the parts of samples, or inputs are no vectors.
    """
    if not holds_items(given):
        return LabeledSamples.of(cast("SamplesOrArrays", given), name)
    found = opened(given, name)
    dataset = found.whole() if isinstance(found, ReadOnce) else found
    check_vectors(dataset, f"otdd.embed({name}, extractor)", name)
    inputs = dataset.inputs
    if not isinstance(inputs, np.ndarray):
        inputs = [inputs[row] for row in range(len(inputs))]
        _check_lengths(inputs, name)
    with placed(name):
        features = real_tensor("features", inputs)
        return dataset.with_features(features, dataset.feature_names).detached()


def check_vectors(dataset: LabeledDataset, way_out: str, name: str) -> None:
    """Refuse a dataset whose inputs are not vectors and need an extractor.

    Raises:
        InputError: inputs are no vectors; `way_out` is the call that takes an extractor.
    """
    first = dataset.inputs[0]
    if dataset.modality == "array" and np.ndim(first) == 1:
        if isinstance(dataset.inputs, list):
            _check_lengths(dataset.inputs, name)
        return
    extractor = {
        "image": "otdd.extractors.pixels()",
        "text": "otdd.extractors.text(MODEL)",
        "array": "otdd.extractors.from_callable(function)",
    }[dataset.modality]
    what, vectors = shown(first), "flatten them, if they are vectors, or "
    if isinstance(first, Image.Image | str):
        what, vectors = "text" if isinstance(first, str) else f"an image of mode {first.mode}", ""
    raise InputError(
        f"{name} is a dataset whose inputs are no vectors and have no features yet, the first is "
        f"{what}; {vectors}pass {way_out}, such as extractor={extractor}"
    )


def _check_lengths(vectors: list[Any], name: str) -> None:
    shape = np.shape(vectors[0])
    for row, vector in enumerate(vectors):
        if np.shape(vector) != shape:
            raise InputError(
                f"inputs of {name} have no common length: row 0 is of shape {shape}, and row {row} "
                f"of {np.shape(vector)}; pad or cut them to one length"
            )


def _check_length(count: int, name: str) -> None:
    if count == 0:
        raise InputError(f"{name} is empty: it has no items")


def _title(given: Any) -> str | None:
    """Return the name of a torchvision dataset, through loaders and subsets; None for others."""
    if is_a(given, LOADER_CLASS) or type(given) is Subset:
        return _title(given.dataset)
    if not type(given).__module__.startswith("torchvision.datasets."):
        return None
    if hasattr(given, "class_to_idx") and hasattr(given, "loader"):
        return Path(given.root).absolute().name or None
    part = getattr(given, "split", getattr(given, "_split", None))
    if isinstance(train := getattr(given, "train", None), bool):
        part = "train" if train else "test"
    kind = type(given).__name__
    return f"{kind} {part}" if isinstance(part, str) else kind


def _class_names(given: Any, name: str) -> tuple[str, ...] | None:
    """Return a dataset's class names, through loaders, subsets and parts that agree."""
    if is_a(given, LOADER_CLASS) or type(given) is Subset:
        return _class_names(given.dataset, name)
    if type(given) is ConcatDataset:
        parts = [_class_names(part, name) for part in given.datasets]
        if len(set(parts)) == 1:
            return parts[0]
        if None not in parts:
            warn(
                f"{name}: its parts name their classes differently, and classes are called by "
                "their labels",
                DataNotice,
            )
        return None
    found = getattr(given, "classes", None)
    found = found.tolist() if isinstance(found, np.ndarray) else found
    if isinstance(found, Mapping) and sorted(found, key=str) == sorted(range(len(found)), key=str):
        found = [found[index] for index in range(len(found))]
    if not isinstance(found, list | tuple) or not found or _changes_labels(given):
        return None
    return tuple(", ".join(c) if isinstance(c, tuple) else str(c) for c in found)


def _changes_labels(given: Any) -> bool:
    """Return whether a torchvision dataset's items have other labels than its label list."""
    transforms = getattr(given, "transforms", None)
    both = transforms is not None and type(transforms).__name__ != "StandardTransform"
    return both or getattr(given, "target_transform", None) is not None


def _known(given: Any, name: str) -> tuple[Any, list[Any]] | None:
    """Return unread inputs and labels if the labels are known without reading items, else None."""
    kind = type(given)
    if kind is TensorDataset and len(given.tensors) == 2:
        return _array_inputs(given.tensors[0], name), _label_list(given.tensors[1], name)
    if kind is Subset:
        if (whole := _known(given.dataset, name)) is None:
            return None
        rows = _rows_of(given.indices, len(whole[1]), name)
        return take_inputs(whole[0], rows), [whole[1][row] for row in rows.tolist()]
    if kind is ConcatDataset:
        parts = [part for one in given.datasets if (part := _known(one, name)) is not None]
        if len(parts) < len(given.datasets):
            return None
        shapes = {part[0].shape[1:] for part in parts if isinstance(part[0], np.ndarray)}
        if len(shapes) > 1:
            listed = " and ".join(map(str, sorted(shapes)))
            raise InputError(f"{name}: its parts hold inputs of shapes {listed}; bring them to one")
        return join_inputs([part[0] for part in parts]), [y for part in parts for y in part[1]]
    reader = getattr(kind, "__getitem__", None)
    if not getattr(reader, "__module__", "").startswith("torchvision.datasets."):
        return None
    if _changes_labels(given) or (labels := known_labels(given)) is None:
        return None
    labels = _label_list(labels, name)
    _, first = _item_at(given, name, 0) if labels else ("", None)
    # Some datasets store labels of another kind than their items have.
    if not isinstance(first, tuple) or np.ndim(first[-1]) > 0 or not bool(first[-1] == labels[0]):
        return None
    if getattr(given, "transform", None) is None and getattr(given, "transforms", None) is None:
        return stored_images(given), labels
    return LazyItems(partial(_input_at, given, name), np.arange(len(given))), labels


def _rows_of(indices: Any, count: int, name: str) -> NDArray[np.int64]:
    """Return the rows of a `Subset`, which does not check its indices."""
    rows = np.asarray(indices)
    if rows.size and not np.issubdtype(rows.dtype, np.integer):
        raise InputError(
            f"{name}: the indices of a Subset must be row numbers, got {rows.dtype}; of a mask "
            "these are mask.nonzero()"
        )
    if rows.size and not (-count <= rows.min() and rows.max() < count):
        raise InputError(
            f"{name}: a Subset has rows {rows.min()} to {rows.max()} of a dataset of {count}"
        )
    return rows.astype(np.int64)


def _input_at(dataset: Any, name: str, row: int) -> Any:
    place, item = _item_at(dataset, name, row)
    return _input(_pair(item, place)[0], place)


def _item_at(dataset: Any, name: str, row: int) -> tuple[str, Any]:
    """Read an item of a user's dataset; return it after its place, such as `row 3 of NAME`."""
    place = f"row {row} of {name}"
    with user_code(place):
        return place, dataset[row]


def _labelled(
    inputs: Any,
    labels: ArrayLike,
    names: tuple[str, ...] | None,
    name: str,
    rows: NDArray[np.int64] | None = None,
) -> LabeledDataset:
    """Build a dataset of raw labels and of inputs that are in memory or read on access."""
    _check_length(len(inputs), name)
    modality = _modality(inputs[0])
    inputs = _stacked(inputs, name) if isinstance(inputs, list) else inputs
    if isinstance(labels, list) and all(isinstance(row, np.ndarray) for row in labels):
        labels = _of_vectors(labels, names)
    try:
        return LabeledDataset.from_raw(
            inputs,
            labels,
            class_names=None if names is None else _fitting(names, labels, name),
            modality=modality,
            name=name,
            rows=rows,
        )
    except InputError as error:
        raise error if str(error).startswith(name) else prefixed(name, error) from error


def _of_vectors(labels: list[NDArray[Any]], names: tuple[str, ...] | None) -> Any:
    """Return vectors of one length as a matrix, and those of indices of names as lists."""
    if len({row.shape for row in labels}) > 1:
        return [row.tolist() for row in labels]
    stacked = np.stack(labels)
    if names is None or stacked.dtype.kind not in "iu":
        return stacked
    hot = stacked.shape[1] == len(names) and bool(((stacked == 0) | (stacked == 1)).all())
    return stacked if hot else stacked.tolist()


def _stacked(inputs: list[Any], name: str) -> Any:
    """Return vectors of one length as an array (n, d), other inputs unchanged."""
    vectors = all(isinstance(item, np.ndarray) and item.ndim == 1 for item in inputs)
    if not vectors or len({item.shape for item in inputs}) > 1:
        return list(inputs)
    return as_inputs(np.stack(inputs), name)[0]


def _fitting(names: tuple[str, ...], labels: Any, name: str) -> tuple[str, ...] | None:
    """Return the class names if labels are indices into them, else None."""
    if isinstance(labels, list) and isinstance(labels[0], list | tuple | set | frozenset):
        text = any(isinstance(entry, str) for row in labels for entry in row or ())
        return None if text else names
    values = raw_values(labels)
    if values.ndim == 2 and values.shape[1] == len(names):
        return names if bool(((values == 0) | (values == 1)).all()) else None
    values = without_fractions(values)
    if values.dtype.kind not in "iub" or values.ndim != 1:
        return None
    if (most := int(values.max(initial=-1))) < len(names):
        return names
    warn(
        f"{name}: it names {len(names)} classes, and labels go up to {most}, by which classes are "
        "called",
        DataNotice,
    )
    return None


def _modality(item: Any) -> Modality:
    if isinstance(item, str):
        return "text"
    if isinstance(item, Image.Image) or item.ndim == 2:
        return "image"
    channels = item.shape[0 if isinstance(item, Tensor) else -1]
    return "image" if item.ndim == 3 and channels in CHANNELS else "array"


@dataclass
class ReadOnce:
    """Pairs (input, label) that are read once, in order, each with its place for messages.

    Args:
        name: name of the dataset.
        names: names of its classes, if it has some.
        pairs: the pairs, each after its place.
        most: the largest number of pairs; None if unknown.
        max_samples: the number of pairs asked for.
        rows: the row numbers of all pairs; None for the first ones of a stream.
        loaded: whether a `DataLoader` yields the pairs.
    """

    name: str
    names: tuple[str, ...] | None
    pairs: Iterable[tuple[str, Any]]
    most: int | None
    max_samples: int | None
    rows: NDArray[np.int64] | None = None
    loaded: bool = False
    taken: int = field(default=0, init=False)
    asked_from: int = field(default_factory=lambda: ASSUMED_FREE, init=False)

    def whole(self) -> LabeledDataset:
        """Read all pairs and keep the inputs in memory.

        Raises:
            InputError: an item is no pair, inputs are of different kinds, or do not fit in memory.
        """
        inputs: list[Any] = []
        labels: list[Any] = []
        for item, label in self._read():
            inputs.append(item)
            labels.append(label)
            self.take(_bytes_of(item), len(inputs))
        return self._labelled(inputs, labels)

    def extracted(
        self,
        extract: Callable[[LabeledDataset], NDArray[Any]],
        batch_size: int,
        progress: Progress | None,
    ) -> LabeledDataset:
        """Read all pairs and keep features instead of inputs, as a dataset of vectors.

        Args:
            extract: returns features (k, d) of k inputs, given as an unlabelled dataset.
            batch_size: k is a multiple of it, except for the last inputs.
            progress: called with (inputs done, total as far as it is known).

        Raises:
            InputError: as for `whole`.
        """
        parts: list[NDArray[Any]] = []
        labels: list[Any] = []
        chunk: list[Any] = []
        held = 0

        def flush() -> None:
            inputs = _stacked(chunk, self.name)
            given = LabeledDataset(inputs, None, (), None, _modality(chunk[0]), self.name)
            first = len(labels) - len(chunk)
            with placed(f"{self.name} from row {first} on") if first else nullcontext():
                parts.append(extract(given))
            if parts[-1].shape[1:] != parts[0].shape[1:]:
                raise InputError(
                    f"inputs of {self.name} have no common feature dimension: "
                    f"{parts[0].shape[1]} and {parts[-1].shape[1]}; bring them to one size"
                )
            self.take(parts[-1].nbytes, len(labels))
            chunk.clear()
            if progress is not None:
                progress(len(labels), max(len(labels), self.most or 0))

        for item, label in self._read():
            chunk.append(item)
            labels.append(label)
            held += _bytes_of(item)
            if held >= ASSUMED_FREE and len(chunk) % batch_size == 0:
                flush()
                held = 0
        if chunk:
            flush()
        return self._labelled(np.concatenate(parts) if parts else [], labels)

    def take(self, size: int, items: int) -> None:
        """Count `size` more bytes held of `items` items in all; raise before the memory is full."""
        self.taken += size
        if self.taken < self.asked_from:
            return
        self.asked_from = 2 * self.taken
        # If the number of items is unknown, as many again must fit.
        others = self.taken
        if self.most is not None:
            rest = int(self.taken * (self.most / items - 1))
            others = rest if self.rows is not None else min(rest, others)
        check_room(
            f"{self.name}: its first {items} items take {self.taken >> 20} MiB, and "
            f"{others / self.taken * items:.0f} more",
            others,
            f"take fewer, such as max_samples={items}"
            + (", or give a dataset of torchvision itself, not its DataLoader" * self.loaded),
        )

    def _read(self) -> Iterator[tuple[Any, Any]]:
        first = None
        for count, (place, pair) in enumerate(self.pairs):
            given, label = _pair(pair, place)
            item = _input(given, place)
            kind = _modality(item)
            first = first or kind
            if kind != first:
                raise InputError(
                    f"the input of {place} is {CALLED[kind]}, {shown(given)}, and that of the "
                    f"first is {CALLED[first]}; leave it out"
                )
            if self.most is None and count == MANY:
                warn(_may_not_end(self.name, count), DataNotice)
            yield item, _label(label, place)

    def _labelled(self, inputs: Any, labels: list[Any]) -> LabeledDataset:
        dataset = _labelled(inputs, labels, self.names, self.name, self.rows)
        return subset(dataset, None, self.max_samples, 0)


def _may_not_end(name: str, count: int) -> str:
    return (
        f"{name}: {count} items are read, and more follow; max_samples=N takes the first N, which "
        "one without an end needs"
    )


def _bytes_of(item: Any) -> int:
    if isinstance(item, Image.Image):
        return item.width * item.height * len(item.getbands())
    return len(item) if isinstance(item, str) else int(item.nbytes)


def _each(given: Iterable[Any], what: str, name: str) -> Iterator[tuple[str, Any]]:
    """Iterate over a user's iterable; yield each item with its place, such as `row 3 of NAME`."""
    items, count = None, 0
    while True:
        place = f"{what} {count} of {name}"
        with user_code(place):
            items = iter(given) if items is None else items
            try:
                item = next(items)
            except StopIteration:
                return
        yield place, item
        count += 1


def _at(
    given: Any, rows: NDArray[np.int64], num_workers: int, name: str
) -> Iterator[tuple[str, Any]]:
    """Read the items of some rows; yield each with its place."""
    if num_workers == 0:
        yield from (_item_at(given, name, row) for row in rows.tolist())
        return
    loader = item_loader(Subset(given, rows.tolist()), ITEMS_AT_ONCE, num_workers)
    places = (f"row {row} of {name}" for row in rows.tolist())
    for _, batch in _each(loader, "batch", name):
        yield from zip(islice(places, len(batch)), batch, strict=True)


def _of_loader(loader: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Read a `DataLoader` with batches (inputs, labels); yield each item with its place."""
    try:
        for place, batch in _each(loader, "batch", name):
            inputs, labels = _pair(batch, place)
            if loader.batch_size is None and loader.batch_sampler is None and np.ndim(labels) == 0:
                # Without batching the loader yields the items of its dataset.
                yield place, batch
                continue
            if isinstance(inputs, Mapping | str) or not hasattr(inputs, "__len__"):
                raise InputError(
                    f"{place} has {_described(inputs)} for inputs, and a tensor, an array or a "
                    f"list of them is needed; {HOW_TO_PAIR}"
                )
            if not hasattr(labels, "__len__") or len(inputs) != len(labels):
                raise InputError(
                    f"{place} has {len(inputs)} inputs, and its labels are {_described(labels)}; "
                    "give one for each"
                )
            for row, pair in enumerate(zip(inputs, labels, strict=True)):
                yield f"item {row} of {place}", pair
    except UserCodeError as error:
        if "PIL" not in str(error):
            raise
        raise InputError(
            f"{error}; give its dataset itself, or one whose transform makes tensors"
        ) from error


def _of_hugging_face(
    given: Any, name: str, max_samples: int | None, weights: str | None, **columns: Any
) -> LabeledDataset:
    """Convert a `datasets.Dataset`, or the first rows of a `datasets.IterableDataset`."""
    table, where = given, f"otdd.embed({name})"
    if is_a(given, HF_STREAM_CLASS):
        table = _first_rows(given, where, max_samples)
    elif given.format["type"] == "custom":
        raise InputError(
            f"{name} has a transform of its own, and columns are read as they are stored; read "
            f"{name}.with_format(None), or give a PyTorch dataset of pairs (input, label)"
        )
    elif set(shown_columns := given.format["columns"]) != set(given.column_names):
        table = given.select_columns(shown_columns)
    _check_length(len(table), name)
    title, info = name, given.info
    # Otherwise its name is the format of its files.
    if info.dataset_name and info.dataset_name != info.builder_name:
        title = f"{info.dataset_name} {given.split or ''}".strip()
    request = Request("huggingface", "all", weights=weights)
    return labeled_table(table, title, where, request, **columns)


def _first_rows(stream: Any, name: str, most: int | None) -> Any:
    """Read the first rows of a `datasets.IterableDataset`, or all, into a `datasets.Dataset`."""
    import datasets
    import pyarrow
    from datasets.table import InMemoryTable, table_cast

    size = ROWS_AT_ONCE if most is None else min(ROWS_AT_ONCE, most)
    parts, count, read = [], 0, ReadOnce(name, None, (), most, most)
    # Rows are read in Arrow format, as the library would decode images.
    for _, batch in _each(stream.with_format("arrow").iter(batch_size=size), "batch", name):
        parts.append(batch if most is None else batch.slice(0, most - count))
        count += len(parts[-1])
        read.take(parts[-1].nbytes, count)
        if count == most:
            break
        if most is None and count - len(parts[-1]) < MANY <= count:
            warn(_may_not_end(name, count), DataNotice)
    if count == 0:
        return parts
    table = pyarrow.concat_tables(parts, promote_options="permissive").replace_schema_metadata()
    if (features := stream.features) is None:
        features = datasets.Features.from_arrow_schema(table.schema)
        for column, kind in zip(table.schema.names, table.schema.types, strict=True):
            # This is a column of images for which no feature is declared.
            if pyarrow.types.is_struct(kind) and {field.name for field in kind} == STORED_IMAGE:
                features[column] = datasets.Image()
    table = table_cast(table, features.arrow_schema)
    return datasets.Dataset(InMemoryTable(table), info=stream.info, split=stream.split)


def _pair(item: Any, place: str) -> tuple[Any, Any]:
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    way_out = HOW_TO_PAIR
    if isinstance(item, Mapping):
        way_out += (
            ", or give the Hugging Face dataset itself, whose columns input=COLUMN and "
            "label=COLUMN name"
        )
    elif not isinstance(item, tuple | list) or len(item) == 1:
        way_out += "; features without labels are compared as an array, with labels='none'"
    raise InputError(f"{place} must be a pair (input, label), got {_described(item)}; {way_out}")


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__qualname__} with the keys {listing(list(map(str, value)), 10)}"
    if isinstance(value, tuple | list) and 0 < len(value) < 10:
        parts = ", ".join(type(part).__qualname__ for part in value)
        return f"a {type(value).__qualname__} of {len(value)}: {parts}"
    return shown(value)


def _input(value: Any, place: str) -> Any:
    """Return an input as a text, a PIL image, an array, or a tensor of several dimensions."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Image.Image):
        return plain_item(value, place)
    what = f"the input of {place}"
    vector = isinstance(value, list | tuple) and all(isinstance(x, numbers.Real) for x in value)
    if isinstance(value, Tensor):
        tensor = _on_host(what, value)
        # A copy, as a dataset may reuse the memory for its next item.
        if tensor.ndim > 0 and tensor.numel() > 0:
            return tensor.clone() if tensor.ndim > 1 else np.array(tensor.numpy())
    elif vector or hasattr(value, "__array__"):
        array = exact_array(what, value)
        if array.dtype.kind in "fiub" and array.ndim > 0 and array.size > 0:
            return np.array(array)
    raise InputError(
        f"{what} must be a vector, an image or a text, got {_described(value)}; give an array, a "
        "tensor, an image of PIL or a string"
    )


def _label(value: Any, place: str) -> Any:
    """Return a label as an object of Python or NumPy."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim < 2:
        # A vector is a row of an indicator, or of numbers.
        return value.item() if value.ndim == 0 else np.asarray(value).copy()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if value is None or isinstance(value, str | bytes | numbers.Number | np.generic):
        return value
    raise InputError(
        f"the label of {place} must be one integer or text, or several in a list, got "
        f"{_described(value)}"
        f"{HOW_TO_CHOOSE if hasattr(value, 'ndim') else ''}"
    )


def _label_list(labels: Any, name: str) -> list[Any]:
    """Return the labels that a dataset stores beside its items, as a list."""
    if (ndim := getattr(labels, "ndim", 1)) not in (1, 2):
        raise InputError(
            f"{name}: labels must be one integer or text for each item, or a vector, got "
            f"{shown(labels)}{HOW_TO_CHOOSE if ndim else ''}"
        )
    if ndim == 2:
        return list(np.asarray(labels))
    return list(labels.tolist() if hasattr(labels, "tolist") else labels)


def _array_inputs(values: Any, name: str) -> Any:
    """Convert an array, tensor, table or list of inputs to an array or a list of n items."""
    what = f"{name}: inputs"
    if isinstance(values, list):
        return [_input(item, f"row {row} of {name}") for row, item in enumerate(values)]
    if isinstance(values, Tensor):
        tensor = _on_host(what, values)
        if tensor.ndim > 2:
            return list(tensor.unbind(0))
        return as_inputs(tensor.numpy(), name)[0]
    array = exact_array(what, dense(what, values))
    if array.dtype.kind not in "fiub" and array.ndim == 1:
        return _array_inputs(array.tolist(), name)
    return as_inputs(array, name)[0]


def _on_host(what: str, values: Tensor) -> Tensor:
    """Return a dense tensor on the CPU, in a type that NumPy has."""
    tensor = real_tensor(what, dense(what, values.detach())).cpu()
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
