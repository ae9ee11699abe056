"""`embed`: the features of every input of a dataset, in this process or on several ranks.

`embed` is the public function; `commands.sides` calls it through `otdd_flash.extractors`. It reads
a dataset batch by batch, applies an extractor and gathers one matrix. Features of cacheable
extractors, such as networks, can be cached (`files.cache`), and those of any extractor written to
a resumable file (`extractors.feature_store`).

A change must keep the following rules (`tests/extractors/test_embedding.py`,
`tests/ranks/test_extraction.py`). The order of rows is that of the dataset. The cache key holds
`inputs_hash`, the extractor's key, the device type and the precision: equal keys must mean equal
features, so a change of what is computed needs another key. Ranks extract the batches that one
process would, so features do not depend on the number of ranks on devices of one kind. A stream is
never read twice.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial, reduce
from typing import Any, Literal, cast

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor, nn

from otdd_flash.arguments import (
    Count,
    Progress,
    Seed,
    Word,
    count,
    dataset,
    index,
    mixed_precision,
    takes,
)
from otdd_flash.checks import called, optional, shown
from otdd_flash.data.dataset import LabeledDataset, LazyItems
from otdd_flash.data.given import Held, ReadOnce, check_vectors, opened
from otdd_flash.data.images import DECODING, image_array, plain_item
from otdd_flash.devices import resolve_device
from otdd_flash.distributed.ranks import Ranks, restored, saved
from otdd_flash.eager import computes
from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.extractors.feature_store import FeatureStore
from otdd_flash.extractors.module_features import ModuleFeatures, from_module
from otdd_flash.extractors.network import Extractor, Network
from otdd_flash.extractors.plain import (
    ImportedFunction,
    PixelValues,
    RawVectors,
    identity,
    require_same_shape,
)
from otdd_flash.files.cache import TensorCache
from otdd_flash.memory import check_room
from otdd_flash.plugins import user_code
from otdd_flash.samples import Array, LabeledSamples

logger = logging.getLogger(__name__)

# Inputs per call of an extractor without a batch size of its own.
BATCH_SIZE = 256

# Batches that each rank extracts before a round is written to a features file.
BATCHES_OF_A_ROUND = 64

SUITABLE = {
    "image": "pixels, timm, torchvision, efficientnet_lite0 or callable",
    "text": "text, wordllama or callable",
    "array": "identity or callable",
}


# `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes, such
# as the default device, out.
@computes
@takes(
    dataset=dataset,
    batch_size=optional(called("extractor.batch_size", count)),
    mixed_precision=called("extractor.mixed_precision", mixed_precision),
    num_workers=called("extractor.num_workers", index),
)
def embed(
    dataset: Held | tuple[Array, Array],
    extractor: Extractor | nn.Module | None = None,
    *,
    max_samples: Count | None = None,
    seed: Seed = 0,
    input: str | Sequence[str] | None = None,
    label: Word | None = None,
    weights: Word | None = None,
    batch_size: int | None = None,
    device: str | torch.device = "auto",
    mixed_precision: bool | Literal["auto"] = "auto",
    cache_dir: str | os.PathLike[str] | None = None,
    features_path: str | os.PathLike[str] | None = None,
    num_workers: int = 0,
    progress: Progress | None = None,
    group: Ranks | None = None,
) -> LabeledSamples:
    """Make `LabeledSamples` of a dataset: extract the features of every input.

    ```python
    import otdd_flash as otdd
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    rows = TensorDataset(torch.randn(60, 4), torch.arange(60) % 3)
    samples = otdd.embed(DataLoader(rows, batch_size=16), max_samples=50)
    ```

    Args:
        dataset: the result of `otdd.load`; a PyTorch dataset of pairs (input, label), such as
            torchvision's, a `TensorDataset`, `Subset` or `ConcatDataset`, or an `IterableDataset`;
            a `DataLoader` of such pairs, which is read once, in its order; a `datasets.Dataset` or
            `datasets.IterableDataset`; or arrays (inputs, labels). Labels are integers or text;
            class names come from `dataset.classes` or a `ClassLabel`. Inputs are vectors, texts, or
            images: of PIL, as arrays (h, w) or (h, w, c), or as tensors (h, w) or (c, h, w), which
            your own extractor gets unchanged.
        extractor: one of `otdd_flash.extractors`; a PyTorch module, for `from_module(module)`; None
            takes inputs that are vectors as they are.
        max_samples: largest number of rows. Rows of `otdd.load` results, arrays, a
            `datasets.Dataset`, a `TensorDataset`, torchvision's datasets and subsets of these are
            drawn in proportion to the classes, as by `otdd.load`. Rows of other datasets with a
            length are drawn whatever their class, as only their items hold labels. Of a
            `DataLoader` or an iterable dataset the first rows are taken; an endless one needs
            `max_samples`.
        seed: seed of the draw.
        input: the input column of a Hugging Face dataset, or several numeric ones; None chooses it,
            with a notice, if only one reading is possible.
        label: its label column; None chooses the only ClassLabel, or a column by its name.
        weights: its column of masses.
        batch_size: inputs per call of the extractor; None: 256, or that of `from_module`.
        device: where a network runs; the features are returned on the CPU. With "auto" your own
            module stays where it is, unless `from_module` was given a device.
        mixed_precision: run a network under autocast (float16 on a GPU, bfloat16 on a CPU); "auto"
            does so on CUDA only, and never with your own module.
        cache_dir: folder of a cache of networks' features, by the content of inputs and weights;
            None: no cache.
        features_path: a .npy file to which features are written as they are extracted, and where
            they stay. A call after an interruption continues, after checking that the existing rows
            are undamaged. A function is identified by its name alone, so its first and last batch
            in the file are computed again and compared. `cache_dir` is then not used.
        num_workers: processes that read items of a dataset, and prepare the inputs of a network.
        progress: called with (inputs done, n).
        group: the ranks that `otdd.led` hands to its function. They share the batches of a network
            (of your own module, if it can be pickled), of a function that all of them can import,
            or of pixels of image files. Other extractors run in this process alone. This process
            writes `features_path`.

    Returns:
        Samples with features (n, d).

    Raises:
        InputError: items are no pairs of an input and a label, the extractor does not take this
            kind of data, inputs have no common dimension, features are not finite, or the device
            does not exist.
    """
    extractor = from_module(extractor) if isinstance(extractor, nn.Module) else extractor
    dataset = opened(
        dataset,
        max_samples=max_samples,
        seed=seed,
        input=input,
        label=label,
        weights=weights,
        num_workers=num_workers,
    )
    if isinstance(dataset, ReadOnce):
        # The dataset is read whole: pixels need no less memory as features, and the key of a cache
        # needs all inputs first.
        kept = cache_dir is not None or features_path is not None
        if extractor is None or isinstance(extractor, PixelValues | RawVectors) or kept:
            dataset = dataset.whole()
        else:
            extract = partial(
                embed,
                extractor=extractor,
                batch_size=batch_size,
                device=device,
                mixed_precision=mixed_precision,
                num_workers=num_workers,
                group=group,
            )
            own = extractor.batch_size if isinstance(extractor, ModuleFeatures) else BATCH_SIZE
            dataset = dataset.extracted(
                lambda part: extract(part).features.numpy(), batch_size or own, progress
            )
            extractor = progress = None
    if extractor is None:
        check_vectors(dataset, "an extractor", dataset.name)
        extractor = identity()
    _check(dataset, extractor)
    if isinstance(extractor, ModuleFeatures):
        batch_size, device, mixed_precision = extractor.settings(
            batch_size, device, mixed_precision
        )
    batch_size = batch_size or BATCH_SIZE
    if isinstance(extractor, PixelValues):
        extractor = extractor.suited_to(dataset.inputs)
    where = resolve_device(device)
    autocast = _autocast_type(mixed_precision, where)
    asked = cache_dir is not None and features_path is None
    cached = asked and extractor.cacheable
    if asked and not cached and isinstance(extractor, ModuleFeatures):
        warn(f"features are not cached: {extractor.unidentified}", DataNotice)
    cache = TensorCache(cache_dir if cached else None)
    kept = cache.active or features_path is not None
    key = _cache_key(dataset, extractor, where, autocast) if kept else ""
    stored = _sound(cache.get(key), dataset)
    if stored is not None:
        features = stored
        if progress is not None:
            progress(len(dataset), len(dataset))
    else:
        settings = {
            "batch_size": batch_size,
            "device": where,
            "autocast": autocast,
            "num_workers": num_workers,
        }
        ranks = group if group is not None and is_shared(extractor, dataset.inputs) else None
        if features_path is None:
            features = _extracted(
                dataset.inputs, extractor, dataset.name, settings, ranks, progress
            )
        else:
            # Batches of another size may round differently, and begin at other rows.
            key = f"{key} batch_size={batch_size}"
            features = _written(features_path, key, dataset, extractor, settings, ranks, progress)
        if autocast is not None and not bool(torch.isfinite(features).all()):
            raise InputError(
                f"the features of {dataset.name} overflow {autocast}; use mixed_precision=false"
            )
        cache.put(key, {"features": features}, {"dataset": dataset.name})
    names = dataset.feature_names if isinstance(extractor, RawVectors) else None
    return dataset.with_features(features, names)


def _written(
    path: str | os.PathLike[str],
    key: str,
    dataset: LabeledDataset,
    extractor: Extractor,
    settings: dict[str, Any],
    ranks: Ranks | None,
    progress: Progress | None,
) -> Tensor:
    """Extract features to a file, after those that it holds; arguments as for `_extracted`."""
    inputs, size = dataset.inputs, settings["batch_size"]

    def blocks(first: int) -> Iterator[Tensor]:
        rest = _rows(inputs, first, len(inputs))
        if ranks is None:
            return _blocks(rest, extractor, **settings)
        # An interruption loses at most one round.
        count = ranks.size * BATCHES_OF_A_ROUND * size
        return (
            _extracted(_rows(rest, start, start + count), extractor, name, settings, ranks, None)
            for start in range(0, len(rest), count)
        )

    def again(row: int) -> tuple[int, Tensor]:
        first = row - row % size
        return first, next(_blocks(_rows(inputs, first, first + size), extractor, **settings))

    name = dataset.name
    store = FeatureStore(path, key, len(dataset), name, None if extractor.cacheable else again)
    store.write(blocks, progress)
    return store.features


def _check(dataset: LabeledDataset, extractor: Extractor) -> None:
    # `Network` comes first: the check of the protocol `Extractor` reads `key`, which hashes all
    # weights.
    if not isinstance(extractor, (Network, Extractor)):
        raise InputError(
            f"extractor must be one of otdd_flash.extractors, got {shown(extractor)}; "
            "otdd_flash.extractors.from_callable wraps a function"
        )
    if dataset.modality not in extractor.modalities:
        raise InputError(
            f"{dataset.name} holds {dataset.modality} data, which extractor "
            f"{extractor.key.split()[0]} does not take; use {SUITABLE[dataset.modality]}"
        )
    if len(dataset) == 0:
        raise InputError(f"{dataset.name} is empty; there is nothing to extract features from")


def _autocast_type(wanted: bool | str, device: torch.device) -> torch.dtype | None:
    if wanted == "auto":
        wanted = device.type == "cuda"
    if not wanted:
        return None
    return torch.bfloat16 if device.type == "cpu" else torch.float16


def _sound(entry: dict[str, Tensor] | None, dataset: LabeledDataset) -> Tensor | None:
    """Return the features (n, d) of a cache entry; None if they cannot be those of the dataset."""
    features = None if entry is None else entry.get("features")
    if features is None:
        return None
    fits = features.ndim == 2 and len(features) == len(dataset) and features.is_floating_point()
    if fits and bool(torch.isfinite(features).all()):
        return features
    logger.warning(
        "the cache holds something else than features of %s, which are extracted again; delete "
        "what others may have put into cache_dir",
        dataset.name,
    )
    return None


def _cache_key(
    dataset: LabeledDataset, extractor: Extractor, device: torch.device, autocast: Any
) -> str:
    # The device type is in the key, as a GPU's float32 convolutions differ from a CPU's.
    parts = f"{inputs_hash(dataset)} {extractor.key} {device.type} {autocast}"
    return f"features {hashlib.sha256(parts.encode()).hexdigest()}"


def _rows(inputs: Any, start: int, stop: int) -> Any:
    """Return the inputs from `start` to before `stop`, still unread."""
    if isinstance(inputs, LazyItems):
        return inputs.take(np.arange(start, min(stop, len(inputs))))
    return inputs[start:stop]


def _blocks(
    inputs: Any,
    extractor: Extractor,
    batch_size: int,
    device: torch.device,
    autocast: torch.dtype | None,
    num_workers: int,
) -> Iterator[Tensor]:
    if isinstance(extractor, Network):
        return extractor.stream(
            inputs,
            batch_size=batch_size,
            device=device,
            autocast=autocast,
            num_workers=num_workers,
        )
    # Pixels are unflattened here, so that images of 28 x 32 and 32 x 28 do not pass for one shape.
    extract = extractor.images if isinstance(extractor, PixelValues) else extractor
    return (extract(batch) for batch in _batches(inputs, batch_size))


def _batches(inputs: Any, batch_size: int) -> Iterator[Any]:
    for start in range(0, len(inputs), batch_size):
        stop = min(start + batch_size, len(inputs))
        if isinstance(inputs, np.ndarray):
            yield inputs[start:stop]
        else:
            yield [plain_item(inputs[row], f"row {row}") for row in range(start, stop)]


def _gather(
    name: str, blocks: Iterator[Tensor], count: int, progress: Progress | None
) -> tuple[Tensor, torch.Size]:
    """Fill one matrix (n, d) block by block; a list of blocks would need the memory twice.

    Returns:
        The matrix, and the shape of one input's features before they were flattened.
    """
    done = 0
    features, shape = torch.empty(0), torch.Size()
    # The generator is closed at once, not when an error's traceback is freed: this restores a
    # network's mode.
    with closing(cast("Generator[Tensor]", blocks)):
        for block in blocks:
            if done == 0:
                shape = block.shape[1:]
                check_room(
                    f"{count} rows of {shape.numel()} features of {name}",
                    count * shape.numel() * block.dtype.itemsize,
                    "use fewer samples (max_samples) or smaller images (extractor.size)",
                )
                features = torch.empty((count, shape.numel()), dtype=block.dtype)
            require_same_shape(shape, block.shape[1:], name)
            # A later batch may need a wider type than the first ones.
            features = features.to(torch.promote_types(features.dtype, block.dtype))
            features[done : done + len(block)] = block.flatten(1)
            done += len(block)
            if progress is not None:
                progress(done, count)
    return features, shape


KINDS = {Image.Image: "image ", Tensor: "tensor "}


def inputs_hash(dataset: LabeledDataset) -> str:
    """Return the SHA-256 of the inputs, without labels, names and weights.

    Lazy inputs that know their files (an attribute `paths`, one per input) are identified by path,
    size, and the times of change of content and of inode, which tools that copy files with their
    dates cannot set. So images are not decoded twice. Other inputs are read.
    """
    digest = hashlib.sha256(dataset.modality.encode())
    inputs = dataset.inputs
    paths = getattr(inputs, "paths", None)
    if isinstance(inputs, np.ndarray) and inputs.dtype != object:
        digest.update(_content(inputs))
    elif paths is not None:
        digest.update(f"decoding {DECODING} by PIL {PIL.__version__}\0".encode())
        for path in paths:
            status = os.stat(path)
            changed = f"{status.st_mtime_ns}\0{status.st_ctime_ns}"
            digest.update(f"{path}\0{status.st_size}\0{changed}\0".encode("utf-8", "surrogatepass"))
    else:
        for row in range(len(inputs)):
            digest.update(_content(plain_item(inputs[row], f"row {row}")))
    return digest.hexdigest()


def _content(item: Any) -> bytes:
    """Return an item's bytes after its length or shape, so that neighbours cannot run together."""
    if isinstance(item, str):
        text = item.encode("utf-8", "surrogatepass")
        return f"{len(text)}\0".encode() + text
    array = image_array(item)
    # A tensor has channels first, and a network may take it unchanged.
    header = next((kind for cls, kind in KINDS.items() if isinstance(item, cls)), "")
    return f"{header}{array.dtype}{array.shape}\0".encode() + array.tobytes()


# Rows of the first batch that ranks compare, and the largest difference that is taken for rounding
# on other devices, as a share of their norm.
COMPARED, ROUNDING = 16, 1e-2


def is_shared(extractor: Extractor, inputs: Any) -> bool:
    """Return whether ranks share the work of an extractor on these inputs.

    They share where extraction takes longer than sending the inputs: networks, the user's functions
    and modules that can be pickled, and pixels of files, which each rank reads itself.
    """
    if isinstance(extractor, ImportedFunction | ModuleFeatures):
        try:
            pickle.dumps(extractor)
        except Exception:
            # Objects of the user's refuse pickling with errors of their own.
            return False
        return True
    from_files = isinstance(extractor, PixelValues) and isinstance(inputs, LazyItems)
    return isinstance(extractor, Network) or from_files


def _extracted(
    inputs: Any,
    extractor: Extractor,
    name: str,
    settings: dict[str, Any],
    ranks: Ranks | None,
    progress: Progress | None,
) -> Tensor:
    """Extract the features (n, d) of inputs, in this process or by every rank a share of them.

    Batches of ranks are those of one process, and so are the features on devices of one kind.

    Args:
        inputs: n raw inputs: an array, a list, or `LazyItems`, which each rank reads itself.
        extractor: an extractor; for ranks one for which `is_shared` is true.
        name: the dataset's.
        settings: keyword arguments of `_blocks`; every rank takes a GPU of its own.
        ranks: the ranks that share the work, led by rank 0, which calls; None is this process
            alone.
        progress: called with (inputs done, n), of ranks estimated from what rank 0 has done.

    Raises:
        InputError: on every rank, if one cannot extract its inputs, or if a function returns other
            features for the same inputs on different ranks.
    """
    if ranks is None:
        return _gather(name, _blocks(inputs, extractor, **settings), len(inputs), progress)[0]
    count, size = len(inputs), settings["batch_size"]
    batches = -(-count // size)
    rows = [ranks.share(batches, rank) for rank in range(ranks.size)]
    parts = [_rows(inputs, part.start * size, part.stop * size) for part in rows]
    # A function may draw, or depend on state of this process, and differ silently on another rank.
    compare = isinstance(extractor, ImportedFunction) and batches > 1
    first = _rows(inputs, 0, size if compare else 0)
    # Rank 0's own part is not serialised.
    contents = [b"", *(saved((part, first, extractor)) for part in parts[1:])]
    number = ranks.number()
    ranks.held[number] = contents, (parts[0], first, extractor)
    ranks.report_to(progress, count)
    found = ranks.order(_extract, number, name, settings)
    assert found is not None
    if progress is not None:
        progress(count, count)
    return found


def _extract(ranks: Ranks, number: int, name: str, settings: dict[str, Any]) -> Tensor | None:
    contents, given = ranks.held.pop(number, (None, None))
    content = ranks.scattered(contents)

    def received() -> tuple[Any, Any, Extractor]:
        # Unpickling imports modules, which the user's module may refuse.
        with user_code("a function that rank 0 uses", doing="is not to be had here:"):
            found: tuple[Any, Any, Extractor] = given or restored(content)
            return found

    inputs, first, extractor = ranks.together(received)
    settings = {**settings, "device": ranks.device_of(settings["device"])}

    def extracted(some: Any, progress: Progress | None) -> tuple[Tensor, torch.Size]:
        return _gather(name, _blocks(some, extractor, **settings), len(some), progress)

    def own() -> tuple[Tensor | None, Tensor, torch.Size]:
        if len(inputs) == 0:
            return None, torch.empty(0, 0), torch.Size()
        # This batch comes first, so that a function that adapts to its first batch sees the same
        # one on every rank.
        compared = extracted(first, None)[0][:COMPARED] if len(first) else None
        return compared, *extracted(inputs, ranks.progress)

    compared, features, shape = ranks.together(own)
    # As in one process, the first block sets the shape, and the type holds the numbers of all
    # blocks.
    said = ranks.all_gathered_objects((len(inputs), shape, features.dtype))
    shapes, types = zip(*(each[1:] for each in said if each[0]), strict=True)
    firsts = ranks.all_gathered_objects(compared)

    def check() -> None:
        for other in shapes:
            require_same_shape(shapes[0], other, name)
        if isinstance(extractor, ImportedFunction):
            _check_alike(firsts, extractor)

    ranks.together(check)
    dtype = reduce(torch.promote_types, types)
    return ranks.gathered_at_leader(features.to(dtype) if len(features) else features)


def _check_alike(compared: list[Tensor | None], extractor: ImportedFunction) -> None:
    """Refuse a function that differs between ranks; None is of a rank without inputs."""
    known = [(rank, part.double()) for rank, part in enumerate(compared) if part is not None]
    for rank, part in known[1:]:
        one, other = (each.nan_to_num() for each in (known[0][1], part))
        if (one - other).norm() > ROUNDING * one.norm():
            raise InputError(
                f"extractor {extractor.name} gives other features on rank {rank} than on rank "
                f"{known[0][0]} for the same inputs; draw what is random in it from a seed, set "
                "what it depends on where its module is imported, or start one process"
            )
