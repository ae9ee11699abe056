"""The rows and classes of data that are used: chosen classes, a seeded draw, clusters as labels.

`data.registry`, `data.given`, `commands.sides` and `commands.study` call `subset`; `data.registry`,
`flows.run`, `sampling.subsampling`, `study.training` and `commands.study` draw by
`stratified_rows`. A change must keep the draw a function of labels, count and seed alone, and the
rows in their original order: results record the rows by a hash, and a later run with the same
settings must compare the same rows.

Clusters of features, by k-means, become the labels of samples, in place of any that they have:
`otdd_flash.data` exports `with_pseudo_labels`, and `commands.sides` calls `label_parts`, which for
`commands.study` labels a training and a test part alike. scikit-learn is imported in the function
that uses it, because few runs need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.samples import HOW_TO_LABEL, LabeledSamples
from otdd_flash.shown import display, listing


def subset(
    dataset: LabeledDataset,
    classes: Sequence[str | int] | str | int | None,
    max_samples: int | None,
    seed: int,
) -> LabeledDataset:
    """Keep the chosen classes, drop classes without samples, draw at most `max_samples` rows.

    The draw keeps class proportions with at least one row per class, is the same for the same
    labels, count and seed, and keeps the rows in their original order. Rows without classes, or
    with several labels, are drawn uniformly.

    Args:
        dataset: all rows of a split.
        classes: class names or indices, which are renumbered in this order; None keeps all. An
            entry that equals a class name, as text, means that class (also the integer 3 a class
            "3"); any other integer is a class index.
        max_samples: upper limit on the rows; None takes all.
        seed: seed of the draw.

    Raises:
        InputError: a class is unknown, the data have no labels to choose classes by, nothing is
            left, or `max_samples` is below the number of classes.
    """
    if classes is not None:
        dataset = _keep_labels(dataset, _chosen(dataset, classes))
    elif dataset.labels is not None:
        dataset = _keep_labels(dataset, range(len(dataset.label_names)))
    return _draw(dataset, max_samples, seed)


def stratified_rows(
    labels: NDArray[np.int64], count: int, generator: np.random.Generator, *, at_least: int = 1
) -> NDArray[np.int64]:
    """Draw `count` row numbers (sorted) in proportion to the classes.

    Args:
        labels: (n,) class indices. It is not checked that n >= count >= `at_least` times the
            number of distinct classes.
        count: number of rows.
        generator: the only source of randomness.
        at_least: smallest number of rows drawn of a class; every class must have as many,
            which is not checked.
    """
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    quota = _quotas(sizes, count, at_least)
    # Shuffled rows, sorted by class: the first of each class are a random draw of it.
    order = generator.permutation(len(labels))
    grouped = order[np.argsort(classes[order], kind="stable")]
    starts = np.cumsum(sizes) - sizes
    chosen = [grouped[start : start + q] for start, q in zip(starts, quota, strict=True)]
    return np.sort(np.concatenate(chosen))


def _quotas(sizes: NDArray[np.int64], count: int, at_least: int) -> NDArray[np.int64]:
    """Return rows per class, summing to `count`, nearest to proportional and >= `at_least`."""
    ideal = sizes * (count / sizes.sum())
    quota: NDArray[np.int64] = np.clip(np.floor(ideal).astype(np.int64), at_least, sizes)
    while quota.sum() < count:
        quota[np.argmax(np.where(quota < sizes, ideal - quota, -np.inf))] += 1
    while quota.sum() > count:
        quota[np.argmax(np.where(quota > at_least, quota - ideal, -np.inf))] -= 1
    return quota


def _draw(dataset: LabeledDataset, max_samples: int | None, seed: int) -> LabeledDataset:
    n = len(dataset)
    if max_samples is None or max_samples == n:
        return dataset
    if max_samples > n:
        warn(
            f"{dataset.name} has {n} rows, fewer than max_samples={max_samples}: all are taken",
            DataNotice,
        )
        return dataset
    generator = np.random.default_rng(seed)
    if dataset.labels is None or dataset.label_sets is not None:
        # Sets of labels may be nearly as many as rows.
        return dataset.take(np.sort(generator.permutation(n)[:max_samples]))
    if max_samples < len(dataset.class_names):
        raise InputError(
            f"max_samples={max_samples} is below the {len(dataset.class_names)} classes of "
            f"{dataset.name}; raise max_samples, or choose fewer classes with classes=[...]"
        )
    return dataset.take(stratified_rows(dataset.labels, max_samples, generator))


def _chosen(dataset: LabeledDataset, classes: Sequence[str | int] | str | int) -> list[int]:
    """Return the numbers of the classes, or labels, that a user chooses."""
    if dataset.targets is not None:
        raise InputError(
            f"classes={classes}: {dataset.name} has numbers and no classes; leave classes out, or "
            "cut the numbers into classes first"
        )
    if dataset.labels is None:
        raise InputError(f"classes={classes}: {dataset.name} has no labels; {HOW_TO_LABEL}")
    single = isinstance(classes, str) or not isinstance(classes, Iterable)
    wanted: list[Any] = [classes] if single else list(cast(Iterable[Any], classes))
    if not wanted:
        raise InputError("classes=[] leaves no class; name at least one, or classes=null for all")
    keep = [_class_index(entry, dataset) for entry in wanted]
    if len(set(keep)) < len(keep):
        raise InputError(f"classes={wanted} names a class twice")
    return keep


def _class_index(entry: Any, dataset: LabeledDataset) -> int:
    names = dataset.label_names
    if str(entry) in names:
        return names.index(str(entry))
    if isinstance(entry, int | np.integer) and 0 <= entry < len(names):
        return int(entry)
    raise InputError(
        f"unknown class {display(repr(entry))} of {display(dataset.name)}; choose names or indices "
        f"of: {listing(names)}"
    )


def _keep_labels(dataset: LabeledDataset, keep: Sequence[int]) -> LabeledDataset:
    """Keep some labels, and the rows that have one; labels without rows are left out.

    Warns:
        DataNotice: some labels have no rows.
    """
    assert dataset.labels is not None
    sets, names = dataset.label_sets, dataset.label_names
    present = set(np.unique(dataset.labels).tolist())
    if sets is not None:
        present = set(sets.members[list(present)].any(0).nonzero().squeeze(1).tolist())
    there = [label for label in keep if label in present]
    if not there:
        chosen = listing([names[label] for label in keep])
        raise InputError(f"{dataset.name} is empty: no rows are of the classes {chosen}")
    if absent := [names[label] for label in keep if label not in present]:
        what = "classes" if sets is None else "labels"
        warn(
            f"{dataset.name}: {len(absent)} of {len(keep)} {what} have no rows and are left out: "
            f"{listing(absent, 10)}",
            DataNotice,
        )
    rows, found = dataset.encoded.kept(there)
    return (dataset if len(rows) == len(dataset) else dataset.take(rows)).labelled(found)


def with_pseudo_labels(samples: LabeledSamples, k: int, seed: int = 0) -> LabeledSamples:
    """Label samples by their k-means cluster, replacing labels or numbers that they have.

    Clusters are weighted by the samples' masses, and numbered by their number of rows, the largest
    first.

    Args:
        samples: n feature vectors.
        k: number of clusters, 1 <= k <= n. Fewer distinct points give fewer clusters.
        seed: seed of the initial centres.

    Raises:
        InputError: k is not in [1, n].
    """
    return label_parts([samples], k, seed)[0]


def label_parts(parts: Sequence[LabeledSamples], k: int, seed: int) -> list[LabeledSamples]:
    """Label the parts of one dataset by the clusters of the first part.

    Clusters are weighted by the masses of the first part, and numbered by their number of its rows,
    the largest first. Rows of the other parts, such as test rows, get the nearest cluster. A notice
    says that labels or numbers are replaced if the first part has any.

    Args:
        parts: feature vectors; the first part has n rows.
        k: number of clusters, 1 <= k <= n. Fewer distinct points give fewer clusters.
        seed: seed of the initial centres.

    Raises:
        InputError: k is not in [1, n].
    """
    from sklearn.cluster import KMeans

    samples = parts[0]
    n = len(samples)
    if samples.labels is not None or samples.targets is not None:
        what = "labels" if samples.targets is None else "numbers"
        warn(f"{samples.name}: its {what} are replaced by labels of {k} clusters", DataNotice)
    if not 1 <= k <= n:
        raise InputError(
            f"pseudo_labels needs k from 1 to {n}, the rows of {samples.name}; got {k}"
        )
    points, *others = (part.features.detach().cpu().numpy() for part in parts)
    distinct = len(np.unique(points, axis=0)) if k > 1 else 1
    clustering = KMeans(n_clusters=min(k, distinct), n_init=4, random_state=seed)
    clusters = clustering.fit_predict(points, sample_weight=samples.masses.cpu().numpy())
    found, clusters, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    # rank[c]: the place of cluster c when they are sorted by size.
    rank = np.argsort(np.argsort(-sizes, kind="stable"), kind="stable")
    names = tuple(f"cluster {cluster}" for cluster in range(len(found)))
    # Points that differ by rounding may leave clusters without rows, which have no number.
    clustering.cluster_centers_ = clustering.cluster_centers_[found]
    every = [clusters, *(clustering.predict(some.astype(points.dtype)) for some in others)]
    of_clusters: dict[str, Any] = {"class_names": names, "label_sets": None, "targets": None}
    return [
        replace(part, labels=torch.from_numpy(rank[ones]), **of_clusters)
        for part, ones in zip(parts, every, strict=True)
    ]
