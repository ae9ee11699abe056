"""From a dataset to labelled features: batches through an extractor, kept on disk if expensive."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from otdd_flash.arguments.datasets import EMBED
from otdd_flash.checks import shown, takes
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.data.given import Held, ReadOnce, check_vectors, opened
from otdd_flash.data.images import plain_item
from otdd_flash.data.lazy_items import LazyItems
from otdd_flash.devices import resolve_device
from otdd_flash.distributed.ranks import Progress, Ranks
from otdd_flash.eager import computes
from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.extractors.base import Extractor
from otdd_flash.extractors.by_ranks import Ways, features_of_ranks, is_shared
from otdd_flash.extractors.feature_store import FeatureStore
from otdd_flash.extractors.input_hash import inputs_hash
from otdd_flash.extractors.module_features import ModuleFeatures, from_module
from otdd_flash.extractors.network import Network
from otdd_flash.extractors.pixel_values import PixelValues, require_one_shape
from otdd_flash.extractors.raw_vectors import RawVectors, identity
from otdd_flash.files.cache import TensorCache
from otdd_flash.operators.memory import UNASKED, free_memory, readable_bytes
from otdd_flash.samples import Array, LabeledSamples

logger = logging.getLogger(__name__)

# Inputs per call of an extractor that says nothing else.
BATCH_SIZE = 256

# Batches that each of several processes extracts before what they found is written to a file.
BATCHES_OF_A_ROUND = 64

SUITABLE = {
    "image": "pixels, timm, torchvision, efficientnet_lite0 or callable",
    "text": "text, wordllama or callable",
    "array": "identity or callable",
}


@computes
@takes(EMBED)
def embed(
    dataset: Held | tuple[Array, Array],
    extractor: Extractor | nn.Module | None = None,
    *,
    max_samples: int | None = None,
    seed: int = 0,
    input: str | Sequence[str] | None = None,
    label: str | None = None,
    weights: str | None = None,
    batch_size: int | None = None,
    device: str | torch.device = "auto",
    mixed_precision: bool | Literal["auto"] = "auto",
    cache_dir: str | os.PathLike[str] | None = None,
    features_path: str | os.PathLike[str] | None = None,
    num_workers: int = 0,
    progress: Progress | None = None,
    group: Ranks | None = None,
) -> LabeledSamples:
    """Extract the features of every input.

    ```python
    import otdd_flash as otdd
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    rows = TensorDataset(torch.randn(60, 4), torch.arange(60) % 3)
    samples = otdd.embed(DataLoader(rows, batch_size=16), max_samples=50)
    ```

    Args:
        dataset: what `otdd.load` gives; a PyTorch dataset of pairs (input, label), such as
            torchvision's, a `TensorDataset`, `Subset` or `ConcatDataset`, or an `IterableDataset`;
            a `DataLoader` of such pairs, read once, in its order; a `datasets.Dataset` or
            `datasets.IterableDataset`; or arrays (inputs, labels). Labels are integers or text;
            classes are called as `dataset.classes` or a `ClassLabel` says. Inputs are vectors,
            texts, or images: of PIL, as arrays (h, w) or (h, w, c), or as tensors (h, w) or
            (c, h, w), which an extractor of yours gets as they are.
        extractor: one of `otdd_flash.extractors`; a PyTorch module, for `from_module(module)`; None
            takes inputs that are vectors as they are.
        max_samples: take at most so many rows. What `otdd.load` gives, arrays, a
            `datasets.Dataset`, a `TensorDataset`, torchvision's datasets and subsets of these are
            drawn in proportion to the classes, as by `otdd.load`; other datasets that have a
            length whatever the class, as only their items hold labels. Of a `DataLoader` or an
            iterable dataset the first rows are taken; one without an end needs this.
        seed: of the draw.
        input: the input column of a Hugging Face dataset, or several numeric ones; found, and said
            in a notice, where only one reading is possible.
        label: its label column; found as the only ClassLabel, or by its name.
        weights: its column of masses.
        batch_size: inputs per call of the extractor; None: 256, or what `from_module` was given.
        device: where a network runs; the features come back on the CPU. With "auto" a module of
            yours stays where it is, unless `from_module` was given a device.
        mixed_precision: run a network under autocast (float16 on a GPU, bfloat16 on a CPU);
            "auto" does so on CUDA only, and never with a module of yours.
        cache_dir: where features of networks are kept, by content of inputs and weights; None: not.
        features_path: a .npy file to write features to as they come, where they then stay: a call
            after an interruption goes on, once it has found that what is there is undamaged. What a
            function computes is known by its name alone, so that its first and last batch there
            are computed again and compared. `cache_dir` is not asked then.
        num_workers: processes that read items of a dataset, and prepare the inputs of a network.
        progress: called with (inputs done, n).
        group: what `otdd.led` gives: processes of which each extracts some of the batches, by a
            network, by a function that all find by its name, or of pixels of images in files. Other
            extractors run here alone. What they extract is written to `features_path` here.

    Returns:
        Samples with features (n, d).

    Raises:
        InputError: items are no pairs of an input and a label, the extractor does not take this
            kind of data, inputs have no common dimension, features are not finite, or the device is
            not there.
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
        # Pixels are held as inputs or as features, and a cache asks for all inputs first.
        kept = cache_dir is not None or features_path is not None
        if extractor is None or isinstance(extractor, PixelValues | RawVectors) or kept:
            dataset = dataset.whole()
        else:
            options: dict[str, Any] = {"batch_size": batch_size, "device": device, "group": group}
            options |= {"mixed_precision": mixed_precision, "num_workers": num_workers}
            extract = partial(_features, extractor, options)
            own = extractor.batch_size if isinstance(extractor, ModuleFeatures) else BATCH_SIZE
            dataset = dataset.extracted(extract, batch_size or own, progress)
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
        settings: dict[str, Any] = {"batch_size": batch_size, "device": where, "autocast": autocast}
        settings["num_workers"] = num_workers
        ranks = group if group is not None and is_shared(extractor, dataset.inputs) else None
        extraction = _Extraction(dataset, extractor, settings, ranks)
        if features_path is not None:
            # Batches of another size may round otherwise, and begin elsewhere.
            sized = f"{key} batch_size={batch_size}"
            again = None if extractor.cacheable else extraction.batch_again
            store = FeatureStore(features_path, sized, len(dataset), extraction.check, again)
            store.write(extraction.blocks, progress)
            features = store.features
        else:
            features = extraction.features(progress)
        if autocast is not None and not bool(torch.isfinite(features).all()):
            raise InputError(
                f"the features of {dataset.name} overflow {autocast}; use mixed_precision=false"
            )
        cache.put(key, {"features": features}, {"dataset": dataset.name})
    return LabeledSamples(
        features,
        None if dataset.labels is None else torch.from_numpy(dataset.labels),
        dataset.class_names,
        None if dataset.weights is None else torch.from_numpy(dataset.weights),
        name=dataset.name,
        subset_hash=dataset.subset_hash,
        feature_names=dataset.feature_names if isinstance(extractor, RawVectors) else None,
    )


def _features(
    extractor: Extractor, options: dict[str, Any], dataset: LabeledDataset
) -> NDArray[Any]:
    """The features (n, d) of a part of a dataset, as an array."""
    found: NDArray[Any] = embed(dataset, extractor, **options).features.numpy()
    return found


@dataclass(frozen=True)
class _Extraction:
    """The features of one dataset, extracted by this process, or by several.

    Attributes:
        dataset: of n inputs.
        extractor: what extracts.
        settings: of `_blocks`.
        ranks: the processes that share the work; None is this one alone.
    """

    dataset: LabeledDataset
    extractor: Extractor
    settings: dict[str, Any]
    ranks: Ranks | None

    def features(self, progress: Progress | None) -> Tensor:
        """Extract all features (n, d)."""
        inputs = self.dataset.inputs
        if self.ranks is not None:
            return self._of_ranks(self.ranks, inputs, progress)
        blocks = _blocks(inputs, self.extractor, **self.settings)
        return _gather(self.dataset.name, blocks, len(inputs), progress)

    def blocks(self, first: int) -> Iterator[Tensor]:
        """Yield features (b, ...) batch after batch, from the input `first` on."""
        rest = _from(self.dataset.inputs, first)
        if (ranks := self.ranks) is None:
            return _blocks(rest, self.extractor, **self.settings)
        # What is lost by an interruption is a round at the most.
        count = ranks.size * BATCHES_OF_A_ROUND * self.settings["batch_size"]
        return (self._of_ranks(ranks, part, None) for part in _parts(rest, count))

    def batch_again(self, row: int) -> tuple[int, Tensor]:
        """Extract the batch of an input in this process, and number its first input."""
        size = self.settings["batch_size"]
        first = row - row % size
        part = next(_parts(_from(self.dataset.inputs, first), size))
        return first, next(_blocks(part, self.extractor, **self.settings))

    @property
    def check(self) -> Callable[[torch.Size, torch.Size], None]:
        """Refuses features of another shape than the first ones; it can be sent to other ranks."""
        return partial(_require_same_shape, name=self.dataset.name)

    def _of_ranks(self, ranks: Ranks, inputs: Any, progress: Progress | None) -> Tensor:
        ways = Ways(_blocks, partial(_gather, self.dataset.name), self.check)
        return features_of_ranks(ranks, inputs, self.extractor, ways, self.settings, progress)


def _check(dataset: LabeledDataset, extractor: Extractor) -> None:
    # The second asks for the key, which reads all weights.
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
    # The device is part of it: a GPU's float32 convolutions differ from a CPU's.
    parts = f"{inputs_hash(dataset)} {extractor.key} {device.type} {autocast}"
    return f"features {hashlib.sha256(parts.encode()).hexdigest()}"


def _from(inputs: Any, first: int) -> Any:
    """Return the inputs from one on, still unread."""
    if first > 0 and isinstance(inputs, LazyItems):
        return inputs.take(np.arange(first, len(inputs)))
    return inputs[first:] if first > 0 else inputs


def _parts(inputs: Any, count: int) -> Iterator[Any]:
    """Yield the inputs, so many at a time, still unread."""
    for first in range(0, len(inputs), count):
        rest = _from(inputs, first)
        yield (
            rest.take(np.arange(min(count, len(rest))))
            if isinstance(rest, LazyItems)
            else (rest[:count])
        )


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
    # Unflattened, so that 28 x 32 and 32 x 28 images are told apart.
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
    name: str,
    blocks: Iterator[Tensor],
    count: int,
    progress: Progress | None,
) -> Tensor:
    """Fill one matrix (n, d) block by block: a list of blocks would need the memory twice."""
    done = 0
    features, shape = torch.empty(0), torch.Size()
    # Closed at once, not when an error's traceback goes: a network is then as it was before.
    with closing(cast("Generator[Tensor]", blocks)):
        for block in blocks:
            if done == 0:
                shape = block.shape[1:]
                _check_room(name, (count, shape.numel()), block.dtype)
                features = torch.empty((count, shape.numel()), dtype=block.dtype)
            _require_same_shape(shape, block.shape[1:], name)
            if block.dtype != features.dtype:
                # Numbers of a later batch may need a type that those of the first did without.
                features = features.to(torch.promote_types(features.dtype, block.dtype))
            features[done : done + len(block)] = block.flatten(1)
            done += len(block)
            if progress is not None:
                progress(done, count)
    return features


def _check_room(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    needed = shape[0] * shape[1] * dtype.itemsize
    if needed > UNASKED and needed > (free := free_memory(torch.device("cpu"))):
        raise InputError(
            f"{shape[0]} rows of {shape[1]} features of {name} need "
            f"{readable_bytes(needed)}, and {readable_bytes(free)} are free; use fewer samples "
            "(max_samples) or smaller images (extractor.size)"
        )


def _require_same_shape(first: torch.Size, shape: torch.Size, name: str) -> None:
    if len(first) == 3:
        require_one_shape([tuple(first), tuple(shape)])
    if shape != first:
        raise InputError(
            f"inputs of {name} have no common feature dimension: {first.numel()} and "
            f"{shape.numel()}; bring the rows to one length"
        )
