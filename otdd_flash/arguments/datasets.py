"""What is accepted where datasets are read, embedded and cut: a check per argument or field."""

from __future__ import annotations

from otdd_flash.arguments.values import (
    COLUMNS,
    PAIR,
    RANKS_CLASS,
    classes,
    count,
    dataset,
    device,
    finite,
    mixed_precision,
    not_negative,
    path_or_dataset,
    positive,
    seed,
    weights,
)
from otdd_flash.checks import (
    Declaration,
    array,
    called,
    choice,
    flag,
    function,
    instance,
    integer,
    mapping,
    names,
    optional,
    path,
    sequence,
    text,
    word,
)

LOAD: Declaration = {
    "name": text,
    "root": optional(path),
    "split": optional(word),
    "max_samples": optional(count),
    "classes": optional(classes),
    "seed": seed,
    "weights": optional(weights),
    "download": flag,
}
CLUSTERING: Declaration = {"pseudo_labels": optional(choice("kmeans")), "k": optional(count)}
# The options of each source of data, by its name in `load`.
SOURCE_OPTIONS: dict[str, Declaration] = {
    "digits": {"rotate": finite},
    "blobs": {"samples": count, "dim": count, "num_classes": count, "spread": not_negative},
    "mnist": {},
    "fashion_mnist": {},
    "usps": {},
    "idx": {"images": optional(path), "labels": optional(path)},
    "torchvision": {
        "dataset": optional(word),
        "arguments": optional(mapping("be a mapping such as {split: letters}")),
    },
    "image_folder": {"path": optional(path)},
    "huggingface": {
        "path": optional(path),
        "config": optional(word),
        "input": COLUMNS,
        "label": optional(word),
        "drop_unlabelled": flag,
    },
    "arrays": {
        "path": optional(path),
        "labels_path": optional(path),
        "features": COLUMNS,
        "label": optional(word),
        "drop_unlabelled": flag,
    },
}
FEATURES_FILE: Declaration = {"path": path_or_dataset, "key": optional(word)}
EMBED: Declaration = {
    "dataset": dataset,
    "max_samples": optional(count),
    "seed": seed,
    "input": COLUMNS,
    "label": optional(word),
    "weights": optional(word),
    "batch_size": optional(called("extractor.batch_size", count)),
    "device": device,
    "mixed_precision": called("extractor.mixed_precision", mixed_precision),
    "cache_dir": optional(path),
    "features_path": optional(path),
    "num_workers": called("extractor.num_workers", integer(at_least=0)),
    "progress": optional(function),
    "group": optional(instance("be what otdd.led gives", RANKS_CLASS)),
}
# Parameters of extractors, by the extractor's name.
EXTRACTORS: dict[str, Declaration] = {
    "identity": {},
    "pixels": {"size": optional(integer(at_least=1)), "grayscale": flag},
    "timm": {
        "model": text,
        "pretrained": flag,
        "checkpoint": optional(path),
        "seed": seed,
        "download": flag,
    },
    "torchvision": {
        "model": text,
        "weights": optional(word),
        "checkpoint": optional(path),
        "seed": seed,
        "download": flag,
    },
    "efficientnet_lite0": {},
    "text": {"model": text, "download": flag},
    "wordllama": {},
    "callable": {},
    "from_module": {
        "transform": optional(function),
        "layer": optional(word),
        "batch_size": count,
        "device": device,
    },
}
STANDARDIZE: Declaration = PAIR
REDUCE_PCA: Declaration = {**PAIR, "k": called("extractor.pca", count), "seed": seed}

# Fields of what is built from keywords.
LABELED_SAMPLES: Declaration = {
    "class_names": names,
    "name": text,
    "subset_hash": optional(text),
    "mass": positive,
    "feature_names": optional(names),
}
TAKE: Declaration = {"rows": array("of row numbers"), "subset_hash": optional(text)}
KEEP_CLASSES: Declaration = {"keep": sequence(integer(at_least=0))}
