"""What distances between datasets and their results accept: a check per argument or field."""

from __future__ import annotations

from otdd_flash.arguments.values import (
    FILE,
    GROUNDS,
    PAIR,
    compute,
    count,
    device,
    embedded,
    finite,
    joint_table,
    labels,
    not_negative,
    positive,
    samples,
    seed,
    share,
    solver,
    table,
)
from otdd_flash.checks import (
    Declaration,
    array,
    choice,
    flag,
    function,
    integer,
    names,
    optional,
    path,
    sequence,
)

# What all comparisons of datasets share.
MEASURING: Declaration = {
    "labels": labels,
    "min_class_size": optional(count),
    "cache_dir": optional(path),
    "progress": optional(function),
}
COMPARING: Declaration = {
    **MEASURING,
    "solver": solver,
    "epsilon": optional(positive),
    "epsilon_relative": optional(positive),
    "lambda_x": not_negative,
    "lambda_y": not_negative,
    "ground": choice(*GROUNDS),
    "compute": optional(compute),
    "class_progress": optional(function),
}

DATASET_DISTANCE: Declaration = {
    **PAIR,
    **COMPARING,
    "class_distances": table,
    "class_statistics": optional(sequence(embedded, length=2)),
    "debias": flag,
}
# Lists of datasets name the place of what is none.
PAIRWISE_DISTANCES: Declaration = {
    "datasets": sequence(samples),
    **COMPARING,
    "class_distances": joint_table,
}
SLICED_DISTANCES: Declaration = {
    "datasets": sequence(samples),
    "projections": integer(at_least=2),
    "seed": seed,
    "device": device,
    "progress": optional(function),
}
CLASS_DISTANCES: Declaration = {
    "datasets": sequence(samples),
    **MEASURING,
    "ground": choice(*GROUNDS),
}
NOISE_FLOOR: Declaration = {**PAIR, "progress": optional(function), "seed": seed}
SUBSAMPLE_INTERVAL: Declaration = {
    **PAIR,
    "progress": optional(function),
    "value": finite,
    "count": count,
    "size": optional(count),
    "level": share,
    "seed": seed,
}
CLASS_DISTANCES_FIELDS: Declaration = {
    "names_x": optional(names),
    "names_y": optional(names),
}
LOAD_RESULT: Declaration = {**FILE, "compute": optional(compute)}
FROM_FULL: Declaration = {
    "full": array("(Vx + Vy, Vx + Vy)"),
    "size_x": count,
    **CLASS_DISTANCES_FIELDS,
}
BETWEEN: Declaration = {"first": integer(at_least=0), "second": integer(at_least=0)}
