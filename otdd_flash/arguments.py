"""What every public entry accepts: a declaration for each, one check per argument.

Functions take theirs by `checks.takes`, dataclasses of options by `checks.check_fields`. Whatever
prepares a request for later can check it here as well: nothing of this imports torch.

Values that have a plain meaning are accepted here and become what they mean where they are read:
`(features, labels)` for samples, a device's name for `compute`, a method's name for `labels`.
"""

from __future__ import annotations

import math
import os
from typing import Any

from otdd_flash.checks import (
    Declaration,
    array,
    called,
    choice,
    flag,
    function,
    instance,
    integer,
    is_a,
    mapping,
    names,
    number,
    optional,
    path,
    refused,
    sequence,
    tensor,
    tensors,
    text,
)
from otdd_flash.errors import InputError

BACKENDS = ("auto", "torch", "triton")
PRECISIONS = ("fast", "high", "double")
BATCHED_GRADIENTS = ("unrolled", "implicit", "none")
GROUNDS = ("sqeuclidean", "cosine", "inner")
MODALITIES = ("image", "text", "array")

# Where the classes that arguments may be of are defined.
SAMPLES_CLASS = "otdd_flash.samples.LabeledSamples"
DATASET_CLASS = "otdd_flash.data.dataset.LabeledDataset"
METRIC_CLASS = "otdd_flash.labels.metrics.base.LabelMetric"
TABLE_CLASS = "otdd_flash.labels.table.ClassDistances"
JOINT_TABLE_CLASS = "otdd_flash.labels.many.JointClassDistances"
COMPUTE_CLASS = "otdd_flash.operators.build.ComputeOptions"
RANKS_CLASS = "otdd_flash.ranks.Ranks"
GROUP_CLASSES = ("torch.distributed.distributed_c10d.ProcessGroup", RANKS_CLASS)
COST_CLASS = "otdd_flash.operators.ground.GroundCost"
COST_BLOCKS_CLASS = "otdd_flash.operators.cost_blocks.CostBlocks"
CG_CLASS = "otdd_flash.solver.schur.CGOptions"
SCHEDULE_CLASS = "otdd_flash.solver.schedules.base.Schedule"
STEPPING_CLASS = "otdd_flash.flows.stepping.Stepping"
FLOW_CLASS = "otdd_flash.flows.flow.Flow"
CALLBACKS_CLASS = "otdd_flash.flows.flow.Callbacks"
TRANSFER_CLASS = "otdd_flash.study.transfer.settings.Transfer"
CHECKPOINTS_CLASS = "otdd_flash.flows.checkpoint.Checkpoints"

positive = number("be positive and finite", lambda value: 0 < value < math.inf)
not_negative = number("be finite and not negative", lambda value: 0 <= value < math.inf)
finite = number("be finite", math.isfinite)
any_number = number("be a number", lambda value: True)
marginal_error = number("lie in (0, 2), an L1 distance of two masses", lambda value: 0 < value < 2)
share = number("lie in (0, 1)", lambda value: 0 < value < 1)
count = integer(at_least=1)
seed = integer(at_least=0, below=2**32)


def samples(name: str, value: Any) -> Any:
    """Labelled samples, or what `LabeledSamples.of` makes them from."""
    if is_a(value, DATASET_CLASS):
        raise InputError(
            f"{name} is a dataset whose inputs have no features yet; pass "
            f"otdd.embed({name}, extractor), such as extractor=otdd.extractors.pixels()"
        )
    if is_a(value, SAMPLES_CLASS):
        return value
    pair = isinstance(value, tuple) and len(value) == 2
    accepted = "be LabeledSamples, arrays or tensors (features, labels), or features"
    if not pair and not hasattr(value, "__array__"):
        raise refused(name, accepted, value)
    for what, part in zip(("features", "labels"), value if pair else (), strict=False):
        if not hasattr(part, "__array__"):
            raise refused(f"{name} must {accepted}; {what}", "be an array or a tensor", part)
    return value


embedded = instance("be LabeledSamples", SAMPLES_CLASS)


def labels(name: str, value: Any) -> Any:
    """How distances between classes are measured; whether a name is known is for `metric_of`."""
    if not isinstance(value, str) and not is_a(value, METRIC_CLASS):
        accepted = "be a name such as gaussian, or a metric such as otdd.labels.Gaussian()"
        raise refused(name, accepted, value)
    return value


def device(name: str, value: Any) -> str:
    """A device's name, or a torch device."""
    if is_a(value, "torch.device"):
        return str(value)
    if not isinstance(value, str):
        raise refused(name, "be a device such as auto, cpu or cuda:1", value)
    return value


def compute(name: str, value: Any) -> Any:
    """Where and how passes run, or only where."""
    if is_a(value, COMPUTE_CLASS):
        return value
    if isinstance(value, str) or is_a(value, "torch.device"):
        return device(name, value)
    raise refused(name, "be ComputeOptions or a device's name", value)


def importable(name: str, value: Any) -> Any:
    """A function, or where to import it from."""
    if not isinstance(value, str) and not callable(value):
        raise refused(name, "be a function or module:function", value)
    return value


def scalar(name: str, value: Any) -> Any:
    """A number, or a 0-dim tensor for the sake of its gradient."""
    return value if is_a(value, "torch.Tensor") else not_negative(name, value)


def positive_scalar(name: str, value: Any) -> Any:
    """A positive number, or a tensor for the sake of its gradient."""
    return value if is_a(value, "torch.Tensor") else positive(name, value)


def mixed_precision(name: str, value: Any) -> Any:
    """True, false or auto."""
    if isinstance(value, str) and value != "auto":
        raise refused(name, "be auto, true or false", value)
    return value if isinstance(value, str) else flag(name, value)


def path_or_dataset(name: str, value: Any) -> Any:
    """A path, or a `datasets.Dataset`."""
    if is_a(value, "datasets.arrow_dataset.Dataset") or isinstance(value, str | os.PathLike):
        return value
    raise refused(name, "be a path or a datasets.Dataset", value)


def weights(name: str, value: Any) -> Any:
    """Where weights stand: a path or a name; numbers themselves go to the samples."""
    if not isinstance(value, str) and not hasattr(value, "__fspath__"):
        raise refused(name, "be a column, a key or a .npy file", value)
    return str(value)


def classes(name: str, value: Any) -> Any:
    """Class names or indices, one or several."""
    several = value if isinstance(value, list | tuple) else [value]
    for entry in several:
        if not isinstance(entry, str):
            integer(at_least=0)(f"a class in {name}", entry)
    return value


def memory(name: str, value: Any) -> Any:
    """Bytes as a number, as text with a unit, or `auto`."""
    return value if isinstance(value, str) else integer(at_least=0)(name, value)


def group(name: str, value: Any) -> Any:
    """Processes that share passes."""
    if (isinstance(value, str) and value == "world") or is_a(value, *GROUP_CLASSES):
        return value
    raise refused(name, 'be a torch.distributed group of this process, "world" or None', value)


solver = optional(instance("be otdd.Converged() or another schedule", SCHEDULE_CLASS))
cost = optional(instance("be a GroundCost", COST_CLASS))
table = optional(instance("be ClassDistances, a table of two datasets", TABLE_CLASS))
joint_table = optional(
    instance(
        "be JointClassDistances, which otdd.class_distances([...]) measures", JOINT_TABLE_CLASS
    )
)
start = optional(mapping("be potentials by term, {'xy': g}"))

PAIR: Declaration = {"source": samples, "target": samples}

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
    "epsilon": positive,
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
    "transfer": optional(instance("be an otdd.Transfer", TRANSFER_CLASS)),
    "families": optional(mapping("be a mapping of families by the names of tasks")),
    "epsilon": positive,
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
    "shard": optional(text),
    "workers": count,
    "threads": optional(count),
    "progress": optional(function),
    "stop": optional(function),
}
CLASS_DISTANCES: Declaration = {
    "datasets": sequence(samples),
    **MEASURING,
    "ground": choice(*GROUNDS),
}
GRADIENT_FLOW: Declaration = {
    **PAIR,
    "flow": optional(instance("be an otdd.Flow", FLOW_CLASS)),
    "epsilon": positive,
    "epsilon_relative": optional(positive),
    "labels": labels,
    "min_class_size": optional(count),
    "cost": cost,
    "solver": solver,
    "compute": optional(compute),
    "cache_dir": optional(path),
    "callbacks": optional(instance("be otdd.Callbacks", CALLBACKS_CLASS)),
}
FLOW: Declaration = {
    # Ranges are checked where they are explained.
    "steps": integer(at_least=None),
    "mode": text,
    "stepping": instance("be a Stepping", STEPPING_CLASS),
    "functionals": sequence(lambda name, value: value),
    "refresh": integer(at_least=None),
    "tolerance": optional(any_number),
    "keep_moments": flag,
    "seed": called("seed", seed),
    "checkpoints": optional(instance("be Checkpoints", CHECKPOINTS_CLASS)),
}
CALLBACKS: Declaration = {
    "progress": optional(function),
    "solver_progress": optional(function),
    "class_progress": optional(function),
    "stop": optional(function),
}
# Where earlier arguments went.
GRADIENT_FLOW_MOVED = {
    **{key: f"flow=otdd.Flow({key}=...)" for key in (*FLOW, "space")},
    **{key: f"callbacks=otdd.Callbacks({key}=...)" for key in CALLBACKS},
    **{key: f"cost=otdd.GroundCost({key}=...)" for key in ("lambda_x", "lambda_y")},
    "class_distances": "labels=otdd.labels.Given(table)",
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

SINKHORN: Declaration = {
    **PAIR,
    "cost": cost,
    "options": solver,
    "progress": optional(function),
    "epsilon": positive,
    "class_table": optional(array("(V_x + V_y, V_x + V_y)")),
    "compute": optional(compute),
}
SINKHORN_DIVERGENCE: Declaration = {
    **SINKHORN,
    "debias": flag,
    "start": start,
}
SINKHORN_LOSS: Declaration = {
    "options": solver,
    "x": tensor("(n, d)"),
    "y": tensor("(m, d)"),
    "a": optional(tensor("(n,)")),
    "b": optional(tensor("(m,)")),
    "epsilon": positive,
    "labels_x": optional(tensor("(n,)")),
    "labels_y": optional(tensor("(m,)")),
    "class_table": optional(tensor("(V_x + V_y, V_x + V_y)")),
    "class_totals": optional(sequence(count, length=2)),
    "lambda_x": scalar,
    "lambda_y": scalar,
    "ground": choice(*GROUNDS),
    "debias": flag,
    "start": start,
    "compute": optional(compute),
}
CG_OPTIONS: Declaration = {
    "tolerance": number("be between 0 and 1", lambda value: 0 < value < 1),
    "max_iterations": count,
    "damping": not_negative,
}
SINKHORN_HESSIAN: Declaration = {
    **{name: check for name, check in SINKHORN_LOSS.items() if name != "ground"},
    "lambda_x": not_negative,
    "lambda_y": not_negative,
    "cg": instance("be otdd.CGOptions()", CG_CLASS),
}
SINKHORN_POTENTIALS: Declaration = {
    **{name: check for name, check in SINKHORN_LOSS.items() if name not in ("ground", "debias")},
    "cg": instance("be otdd.CGOptions()", CG_CLASS),
}
TRANSPORT_MAP: Declaration = {**SINKHORN_POTENTIALS, "values": optional(tensor("(m, k)"))}
SINKHORN_LOSSES: Declaration = {
    **{name: check for name, check in SINKHORN_LOSS.items() if name != "start"},
    "x": tensors("(n, d)"),
    "y": tensors("(m, d)"),
    "a": optional(tensors("(n,)")),
    "b": optional(tensors("(m,)")),
    "labels_x": optional(tensors("(n,)")),
    "labels_y": optional(tensors("(m,)")),
}

DOUBLY_STOCHASTIC: Declaration = {
    "logits": tensor("(..., n, n)"),
    "iterations": optional(count),
    "tolerance": optional(positive),
    "max_iterations": count,
    "temperature": positive_scalar,
    "gradient": choice(*BATCHED_GRADIENTS),
    "compute": optional(compute),
}
SINKHORN_PLANS: Declaration = {
    "costs": tensor("(B, n, m)"),
    "a": optional(tensor("(n,) or (B, n)")),
    "b": optional(tensor("(m,) or (B, m)")),
    "epsilon": positive_scalar,
    "tolerance": marginal_error,
    "max_iterations": count,
    "gradient": choice(*BATCHED_GRADIENTS),
    "sizes": optional(tensor("(B, 2)")),
    "compute": optional(compute),
}


def matrix(name: str, value: Any) -> Any:
    """A matrix of costs, or a function of its blocks."""
    if is_a(value, COST_BLOCKS_CLASS):
        return value
    return array("(n, m) or otdd.CostBlocks(n, m, block)")(name, value)


def matrix_tensor(name: str, value: Any) -> Any:
    """The same, but no array that has no gradient."""
    if is_a(value, COST_BLOCKS_CLASS):
        return value
    return tensor("(n, m) or otdd.CostBlocks(n, m, block)")(name, value)


COST_BLOCKS: Declaration = {"n": count, "m": count, "block": function}
MATRIX_TRANSPORT: Declaration = {
    "costs": matrix,
    "a": optional(array("(n,)")),
    "b": optional(array("(m,)")),
    "epsilon": optional(positive),
    "epsilon_relative": optional(positive),
    "options": solver,
    "compute": optional(compute),
    "start": start,
    "progress": optional(function),
}
MATRIX_LOSS: Declaration = {
    **{name: check for name, check in MATRIX_TRANSPORT.items() if name != "progress"},
    "costs": matrix_tensor,
    "a": optional(tensor("(n,)")),
    "b": optional(tensor("(m,)")),
    "epsilon": positive,
    "self_costs": optional(sequence(tensor("(n, n) or (m, m)"), length=2)),
}
MATRIX_PLAN: Declaration = {
    **{name: check for name, check in MATRIX_TRANSPORT.items() if name != "progress"},
    "costs": tensor("(n, m)"),
    "a": optional(tensor("(n,)")),
    "b": optional(tensor("(m,)")),
    "cg": instance("be otdd.CGOptions()", CG_CLASS),
}
APPLY_PLAN: Declaration = {"values": array("(m, k)")}

LOAD: Declaration = {
    "name": text,
    "root": optional(path),
    "split": optional(text),
    "max_samples": optional(count),
    "classes": optional(classes),
    "seed": seed,
    "weights": optional(weights),
    "download": flag,
}
CLUSTERING: Declaration = {"pseudo_labels": optional(choice("kmeans")), "k": optional(count)}
COLUMNS = optional(lambda name, value: value if isinstance(value, str) else _columns(name, value))
# The options of each source of data, by its name in `load`.
SOURCE_OPTIONS: dict[str, Declaration] = {
    "digits": {"rotate": finite},
    "blobs": {"samples": count, "dim": count, "num_classes": count, "spread": not_negative},
    "mnist": {},
    "fashion_mnist": {},
    "usps": {},
    "idx": {"images": optional(path), "labels": optional(path)},
    "torchvision": {
        "dataset": optional(text),
        "arguments": optional(mapping("be a mapping such as {split: letters}")),
    },
    "image_folder": {"path": optional(path)},
    "huggingface": {
        "path": optional(path),
        "config": optional(text),
        "input": COLUMNS,
        "label": optional(text),
        "drop_unlabelled": flag,
    },
    "arrays": {
        "path": optional(path),
        "labels_path": optional(path),
        "features": COLUMNS,
        "label": optional(text),
        "drop_unlabelled": flag,
    },
}
FEATURES_FILE: Declaration = {"path": path_or_dataset, "key": optional(text)}
EMBED: Declaration = {
    "dataset": instance("be a dataset that otdd.load gave", DATASET_CLASS),
    "batch_size": called("extractor.batch_size", count),
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
        "weights": optional(text),
        "checkpoint": optional(path),
        "seed": seed,
        "download": flag,
    },
    "text": {"model": text, "download": flag},
    "callable": {},
}
STANDARDIZE: Declaration = PAIR
REDUCE_PCA: Declaration = {**PAIR, "k": called("extractor.pca", count), "seed": seed}

# Fields of what is built from keywords.
LABELED_SAMPLES: Declaration = {
    "class_names": names,
    "name": text,
    "subset_hash": optional(text),
    "mass": positive,
}
TAKE: Declaration = {"rows": array("of row numbers"), "subset_hash": optional(text)}
KEEP_CLASSES: Declaration = {"keep": sequence(integer(at_least=0))}
CLASS_DISTANCES_FIELDS: Declaration = {
    "names_x": optional(names),
    "names_y": optional(names),
}
FILE: Declaration = {"path": path}
LOAD_RESULT: Declaration = {**FILE, "compute": optional(compute)}
LOAD_MATRIX: Declaration = {**LOAD_RESULT, "costs": matrix}
FROM_FULL: Declaration = {
    "full": array("(Vx + Vy, Vx + Vy)"),
    "size_x": count,
    **CLASS_DISTANCES_FIELDS,
}
BETWEEN: Declaration = {"first": integer(at_least=0), "second": integer(at_least=0)}
COMPUTE_OPTIONS: Declaration = {
    "device": device,
    "backend": choice(*BACKENDS),
    "precision": choice(*PRECISIONS),
    "memory_budget": memory,
    "group": optional(group),
}
LED: Declaration = {"work": function, "group": optional(group)}
GROUND_COST: Declaration = {
    "lambda_x": not_negative,
    "lambda_y": not_negative,
    "ground": choice(*GROUNDS),
}
STEPPING: Declaration = {
    # Their ranges are those of the settings flow.KEY.
    "step_size": any_number,
    "optimizer": text,
    "optimizer_options": mapping(),
    "schedule": text,
    "box": optional(sequence(any_number)),
    "noise": any_number,
    "minibatch": optional(integer(at_least=None)),
}
CHECKPOINTS: Declaration = {"folder": path, "every": integer(at_least=None), "resume": flag}


def _columns(name: str, value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
        raise refused(name, "be a column or a list of columns", value)
    if not value:
        raise InputError(f"{name} must name a column, got []; null takes the usual ones")
    return value
