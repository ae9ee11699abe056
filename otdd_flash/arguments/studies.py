"""What studies and their transfer runs accept: a check per argument or field."""

from __future__ import annotations

from otdd_flash.arguments.values import (
    TRANSFER_CLASS,
    compute,
    cost,
    count,
    importable,
    labels,
    not_negative,
    positive,
    seed,
    solver,
)
from otdd_flash.checks import (
    Declaration,
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

TRANSFER: Declaration = {
    "protocol": text,
    "target_samples": optional(count),
    "seeds": count,
    "source_epochs": count,
    "target_epochs": count,
    "min_target_steps": integer(at_least=0),
    "batch_size": count,
    "learning_rate": positive,
    "weight_decay": not_negative,
    "network": optional(importable),
    "image_shape": optional(sequence(count, length=3)),
}
STUDY: Declaration = {
    "tasks": mapping("be a mapping of datasets by name, such as {'mnist': (train, test)}"),
    "measures": optional(names),
    "measure": optional(word),
    "transfer": optional(instance("be an otdd.Transfer", TRANSFER_CLASS)),
    "families": optional(mapping("be a mapping of families by the names of tasks")),
    "epsilon": optional(positive),
    "epsilon_relative": optional(positive),
    "labels": labels,
    "cost": cost,
    "min_class_size": optional(count),
    "solver": solver,
    "compute": optional(compute),
    "projections": integer(at_least=2),
    "subsample": optional(count),
    "subsample_size": optional(count),
    "noise_floor": flag,
    "seed": seed,
    "cache_dir": optional(path),
}
RUN_STUDY: Declaration = {
    "folder": path,
    "resume": flag,
    "shard": optional(word),
    "workers": count,
    "threads": optional(count),
    "progress": optional(function),
    "stop": optional(function),
}
