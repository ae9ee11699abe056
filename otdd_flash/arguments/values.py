"""What single arguments may be: a check for each kind of value that several entries take.

Values that have a plain meaning are accepted here and become what they mean where they are read:
`(features, labels)` for samples, a device's name for `compute`, a method's name for `labels`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from otdd_flash.checks import (
    Check,
    Declaration,
    array,
    flag,
    instance,
    integer,
    is_a,
    mapping,
    number,
    optional,
    path,
    refused,
    tensor,
    word,
)
from otdd_flash.errors import InputError

BACKENDS = ("auto", "torch", "triton")
PRECISIONS = ("fast", "high", "double")
BATCHED_GRADIENTS = ("unrolled", "implicit", "none")
GROUNDS = ("sqeuclidean", "cosine", "inner")

TENSOR_CLASS = "torch.Tensor"
FAKE_CLASS = "torch._subclasses.fake_tensor.FakeTensor"
# Where the classes that arguments may be of are defined.
SAMPLES_CLASS = "otdd_flash.samples.LabeledSamples"
DATASET_CLASS = "otdd_flash.data.dataset.LabeledDataset"
TORCH_DATASET_CLASS = "torch.utils.data.dataset.Dataset"
LOADER_CLASS = "torch.utils.data.dataloader.DataLoader"
HF_DATASET_CLASS = "datasets.arrow_dataset.Dataset"
HF_STREAM_CLASS = "datasets.iterable_dataset.IterableDataset"
# There since version 4 of the library.
HF_COLUMN = "datasets.arrow_dataset.Column"
HF_SPLITS_CLASS = "datasets.dataset_dict.DatasetDict"
HF_STREAM_SPLITS_CLASS = "datasets.dataset_dict.IterableDatasetDict"
METRIC_CLASS = "otdd_flash.labels.metrics.base.LabelMetric"
TABLE_CLASS = "otdd_flash.labels.table.ClassDistances"
JOINT_TABLE_CLASS = "otdd_flash.labels.many.JointClassDistances"
COMPUTE_CLASS = "otdd_flash.operators.build.ComputeOptions"
RANKS_CLASS = "otdd_flash.distributed.ranks.Ranks"
GROUP_CLASSES = ("torch.distributed.distributed_c10d.ProcessGroup", RANKS_CLASS)
COST_CLASS = "otdd_flash.operators.ground.GroundCost"
COST_BLOCKS_CLASS = "otdd_flash.operators.cost_blocks.CostBlocks"
CG_CLASS = "otdd_flash.solver.schur.CGOptions"
SCHEDULE_CLASS = "otdd_flash.solver.schedules.base.Schedule"
STEPPING_CLASS = "otdd_flash.flows.stepping.Stepping"
FLOW_CLASS = "otdd_flash.flows.flow.Flow"
CALLBACKS_CLASS = "otdd_flash.flows.flow.Callbacks"
FUNCTIONAL_CLASS = "otdd_flash.flows.functionals.build.WeightedFunctional"
TRANSFER_CLASS = "otdd_flash.study.transfer.networks.Transfer"
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
    """Labelled samples, or what `otdd_flash.data.given.as_samples` makes them from."""
    if is_a(value, SAMPLES_CLASS) or holds_items(value):
        return value
    pair = isinstance(value, tuple) and len(value) == 2
    accepted = (
        "be LabeledSamples, a dataset of vectors, arrays or tensors (features, labels), or features"
    )
    if not pair and not _is_matrix(value):
        raise _no_dataset(name, accepted, value)
    if pair and not _is_matrix(value[0]):
        raise refused(f"{name} must {accepted}; features", "be an array or a tensor", value[0])
    several = pair and isinstance(value[1], Sequence) and not isinstance(value[1], str | bytes)
    if pair and not several and not _is_matrix(value[1]):
        raise refused(
            f"{name} must {accepted}; labels", "be a list, an array or a tensor", value[1]
        )
    return value


def dataset(name: str, value: Any) -> Any:
    """Accept a dataset of raw inputs, or an object that `otdd_flash.data.given.opened` reads."""
    pair = isinstance(value, tuple) and len(value) == 2
    if holds_items(value) or (pair and all(_is_matrix(p) or isinstance(p, list) for p in value)):
        return value
    if is_a(value, SAMPLES_CLASS):
        raise InputError(f"{name} has features already, {value!r}; use it as it is")
    raise _no_dataset(
        name,
        "be what otdd.load gives, a dataset or DataLoader of PyTorch, a Hugging Face dataset, or "
        "arrays (inputs, labels)",
        value,
    )


def holds_items(value: object) -> bool:
    """Whether a value is a dataset of items: of this package, of PyTorch or of Hugging Face."""
    if is_a(value, DATASET_CLASS, TORCH_DATASET_CLASS, LOADER_CLASS, *HF_CLASSES):
        return True
    if isinstance(value, str | bytes | list | tuple | Mapping) or _is_matrix(value):
        return False
    # PyTorch asks no more of a dataset.
    return hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")


HF_CLASSES = (HF_DATASET_CLASS, HF_STREAM_CLASS)


def _is_matrix(value: object) -> bool:
    """Whether a value is an array, a tensor, a table, a column or a sparse matrix."""
    return any(hasattr(value, mark) for mark in ("__array__", "tocsr")) or is_a(value, HF_COLUMN)


def _no_dataset(name: str, accepted: str, value: Any) -> InputError:
    if is_a(value, HF_SPLITS_CLASS, HF_STREAM_SPLITS_CLASS) and value:
        return InputError(
            f"{name} holds the splits {', '.join(map(str, value))} of a dataset; choose one, such "
            f"as {name}[{next(iter(value))!r}]"
        )
    return refused(name, accepted, value)


embedded = instance("be LabeledSamples", SAMPLES_CLASS)


def labels(name: str, value: Any) -> Any:
    """How distances between classes are measured; whether a name is known is for `metric_of`."""
    if isinstance(value, type):
        kind = value.__qualname__
        raise InputError(f"{name} is the type {kind} and no object of it; write {kind}()")
    if not isinstance(value, str) and not is_a(value, METRIC_CLASS) and not callable(value):
        accepted = (
            "be a name such as gaussian, a metric such as otdd.labels.Gaussian(), or a function of "
            "the points of two classes"
        )
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
    if is_a(value, "datasets.arrow_dataset.Dataset"):
        return value
    if not isinstance(value, str | os.PathLike):
        raise refused(name, "be a path or a datasets.Dataset", value)
    return path(name, value)


def weights(name: str, value: Any) -> Any:
    """Where weights stand: a path or a name; numbers themselves go to the samples."""
    if not isinstance(value, str) and not hasattr(value, "__fspath__"):
        raise refused(name, "be a column, a key or a .npy file", value)
    return word(name, str(value))


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


def traced_tensor(shape: str) -> Check:
    """Accept a tensor, or a fake one, which stands for it in traces and has a shape alone."""
    plain = tensor(shape)

    def check(name: str, value: Any) -> Any:
        fake = is_a(value, FAKE_CLASS) or (is_a(value, TENSOR_CLASS) and value.is_meta)
        return value if fake else plain(name, value)

    return check


def matrix(name: str, value: Any) -> Any:
    """A matrix of costs, or a function of its blocks."""
    if is_a(value, COST_BLOCKS_CLASS):
        return value
    return array("(n, m) or otdd.CostBlocks(n, m, block)")(name, value)


def matrix_tensor(name: str, value: Any) -> Any:
    """Accept what `matrix` does but for arrays, which have no gradient."""
    if is_a(value, COST_BLOCKS_CLASS):
        return value
    return tensor("(n, m) or otdd.CostBlocks(n, m, block)")(name, value)


COLUMNS = optional(
    lambda name, value: word(name, value) if isinstance(value, str) else _columns(name, value)
)
FILE: Declaration = {"path": path}
FOLDER: Declaration = {"directory": path}


def _columns(name: str, value: Any) -> Any:
    if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
        raise refused(name, "be a column or a list of columns", value)
    if not value:
        raise InputError(f"{name} must name a column, got []; null takes the usual ones")
    return value
