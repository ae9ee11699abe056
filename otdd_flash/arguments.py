"""Checks of arguments by their annotations.

`takes` checks the arguments of a public function, `check_fields` the fields of a dataclass of
options. The text of an annotation is a key of `ACCEPTED`, so `epsilon: Positive | None` is both a
signature and a declaration. `Positive` itself is float, so a module that uses these names must
begin with `from __future__ import annotations`, which keeps the text; an annotation that is neither
a key of `ACCEPTED` nor a `Callable` is not checked. A condition that an annotation cannot say, such
as the shape of a tensor, is declared beside it: `@takes(x=tensor("(n, d)"))`. A new kind of
argument is a check and a line of `ACCEPTED`; `checks` holds the checks of single values.

Some eighty modules use this one. Public functions are decorated with `takes` (`otdd`, `pairwise`,
`flows.run`, `derivatives.loss`, ...), classes of options call `check_fields` (`cost.compute`,
`flows.flow`, `commands.settings`, ...), and `data.registry` calls `checks_of` for the options of
data sources.

Other forms of a value are accepted here and converted by the function that reads it: `(features,
labels)` by `data.given`, a device in place of `ComputeOptions` by `cost.compute`, a method's name
by `labels.metrics`. Numbers, paths and `torch.device` are converted by the check itself. This
module must not import torch (`tests/test_arguments.py`): classes are compared by their full names,
which must follow a class that moves.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from otdd_flash.checks import (
    Check,
    array,
    choice,
    either,
    flag,
    function,
    instance,
    integer,
    is_a,
    mapping,
    must,
    names,
    number,
    optional,
    path,
    refused,
    sequence,
    tensor,
    text,
    word,
)
from otdd_flash.errors import InputError

P = ParamSpec("P")
R = TypeVar("R")

# Keywords without a default, and what to say where one is missing.
REQUIRED = {
    "epsilon": "give epsilon=VALUE, the regularisation in units of the cost, such as 0.01 times "
    "its mean"
}

# Names for ranges of numbers and texts. To a type checker they are float, int and str; the name in
# the annotation chooses the check.
Positive = float
NotNegative = float
Finite = float
Share = float
MarginalError = float
Count = int
Index = int
Seed = int
Word = str
Ground = str
DatasetGround = str
Backend = str
Precision = str
BatchedGradient = str
DeviceName = str

# progress(units of work done, their total).
Progress = Callable[[int, int], None]


TENSOR_CLASS = "torch.Tensor"
FAKE_CLASS = "torch._subclasses.fake_tensor.FakeTensor"
# Full names of the classes that arguments may have.
SAMPLES_CLASS = "otdd_flash.samples.LabeledSamples"
DATASET_CLASS = "otdd_flash.data.dataset.LabeledDataset"
TORCH_DATASET_CLASS = "torch.utils.data.dataset.Dataset"
LOADER_CLASS = "torch.utils.data.dataloader.DataLoader"
HF_DATASET_CLASS = "datasets.arrow_dataset.Dataset"
HF_STREAM_CLASS = "datasets.iterable_dataset.IterableDataset"
# Exists since version 4 of the library.
HF_COLUMN = "datasets.arrow_dataset.Column"
HF_SPLITS_CLASS = "datasets.dataset_dict.DatasetDict"
HF_STREAM_SPLITS_CLASS = "datasets.dataset_dict.IterableDatasetDict"
METRIC_CLASS = "otdd_flash.labels.metrics.base.LabelMetric"
COMPUTE_CLASS = "otdd_flash.cost.compute.ComputeOptions"
RANKS_CLASS = "otdd_flash.distributed.ranks.Ranks"
GROUP_CLASSES = ("torch.distributed.distributed_c10d.ProcessGroup", RANKS_CLASS)
COST_BLOCKS_CLASS = "otdd_flash.operators.given_costs.CostBlocks"
COSTS_SHAPE = "(n, m) or otdd.CostBlocks(n, m, block)"
FUNCTIONAL_CLASS = "otdd_flash.flows.functionals.WeightedFunctional"
# Other classes of arguments: the words of messages, and the full name of each.
OBJECTS = {
    "LabeledSamples": ("be LabeledSamples", SAMPLES_CLASS),
    "ClassDistances": (
        "be ClassDistances, a table of two datasets",
        "otdd_flash.labels.table.ClassDistances",
    ),
    "JointClassDistances": (
        "be JointClassDistances, which otdd.class_distances([...]) measures",
        "otdd_flash.labels.table.JointClassDistances",
    ),
    "GroundCost": ("be a GroundCost", "otdd_flash.cost.ground.GroundCost"),
    "Schedule": (
        "be otdd.Converged() or another schedule",
        "otdd_flash.solver.schedules.Schedule",
    ),
    "CGOptions": ("be otdd.CGOptions()", "otdd_flash.derivatives.plan_system.CGOptions"),
    "Flow": ("be an otdd.Flow", "otdd_flash.flows.flow.Flow"),
    "Stepping": ("be a Stepping", "otdd_flash.flows.stepping.Stepping"),
    "Callbacks": ("be otdd.Callbacks", "otdd_flash.flows.flow.Callbacks"),
    "Checkpoints": ("be Checkpoints", "otdd_flash.flows.checkpoint.Checkpoints"),
    "Transfer": ("be an otdd.Transfer", "otdd_flash.study.setup.Transfer"),
    "Ranks": ("be what otdd.led gives", RANKS_CLASS),
}

_positive = number("be positive and finite", lambda value: 0 < value < math.inf)
_zero = number("be 0", lambda value: value == 0)


def positive(name: str, value: Any) -> Any:
    """Accept a positive number; for an epsilon of 0 the message names the least that is of use."""
    try:
        return _positive(name, value)
    except InputError as error:
        if name.rpartition(".")[2] not in ("epsilon", "epsilon_relative") or not _is_zero(value):
            raise
        raise InputError(
            f"{error}; distances alone take 0, which otdd.Exact() solves: set about 0.001 of the "
            "mean cost, below which solves get slow and derivatives say little"
        ) from None


def _is_zero(value: Any) -> bool:
    try:
        _zero("", value)
    except InputError:
        return False
    return True


not_negative = number("be finite and not negative", lambda value: 0 <= value < math.inf)
finite = number("be finite", math.isfinite)
any_number = number("be a number", lambda value: True)
marginal_error = number("lie in (0, 2), an L1 distance of two masses", lambda value: 0 < value < 2)
share = number("lie in (0, 1)", lambda value: 0 < value < 1)
importable = must(
    "be a function or module:function", lambda value: isinstance(value, str) or callable(value)
)
# A weighted functional, or a mapping from which `build_functionals` makes one.
functional = either(mapping("be a mapping such as {name: norm, weight: 0.1}"), FUNCTIONAL_CLASS)
# A process group, whose processes share the work.
group = must(
    'be a torch.distributed group of this process, "world" or None',
    lambda value: (isinstance(value, str) and value == "world") or is_a(value, *GROUP_CLASSES),
)
count = integer(at_least=1)


def penalties(name: str, value: Any) -> Any:
    """Accept a penalty of unmatched mass, or [of rows, of columns], where None is exact.

    A pair may be an array or a tensor.
    """
    if getattr(value, "ndim", 0) == 1:
        value = value.tolist()
    if not isinstance(value, list | tuple):
        return positive(name, value)
    return sequence(optional(positive), length=2)(name, value)


index = integer(at_least=0)
seed = integer(at_least=0, below=2**32)


def samples(name: str, value: Any) -> Any:
    """Accept labelled samples, or an object that `otdd_flash.data.given.as_samples` converts."""
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
    """Accept a dataset of raw inputs, or an object that `otdd_flash.data.given.opened` converts."""
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
    """Return whether a value is a dataset of items: of this package, PyTorch or Hugging Face."""
    if is_a(value, DATASET_CLASS, TORCH_DATASET_CLASS, LOADER_CLASS, *HF_CLASSES):
        return True
    if isinstance(value, str | bytes | list | tuple | Mapping) or _is_matrix(value):
        return False
    # PyTorch requires no more than this of a dataset.
    return hasattr(type(value), "__getitem__") and hasattr(type(value), "__len__")


HF_CLASSES = (HF_DATASET_CLASS, HF_STREAM_CLASS)


def _is_matrix(value: object) -> bool:
    """Return whether a value is an array, a tensor, a table, a column or a sparse matrix."""
    return any(hasattr(value, mark) for mark in ("__array__", "tocsr")) or is_a(value, HF_COLUMN)


def _no_dataset(name: str, accepted: str, value: Any) -> InputError:
    if is_a(value, HF_SPLITS_CLASS, HF_STREAM_SPLITS_CLASS) and value:
        return InputError(
            f"{name} holds the splits {', '.join(map(str, value))} of a dataset; choose one, such "
            f"as {name}[{next(iter(value))!r}]"
        )
    return refused(name, accepted, value)


def labels(name: str, value: Any) -> Any:
    """Accept a method of class distances; `metric_of` refuses unknown names."""
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
    """Return the name of a device, or of a `torch.device`."""
    # Text first, whose bases a trace of `torch.compile` cannot ask for.
    if isinstance(value, str):
        return value
    if not is_a(value, "torch.device"):
        raise refused(name, "be a device such as auto, cpu or cuda:1", value)
    return str(value)


def compute(name: str, value: Any) -> Any:
    """Accept `ComputeOptions`, or a device alone."""
    # Text first, as for a device.
    if isinstance(value, str) or is_a(value, COMPUTE_CLASS):
        return value
    if is_a(value, "torch.device"):
        return device(name, value)
    raise refused(name, "be ComputeOptions or a device's name", value)


def mixed_precision(name: str, value: Any) -> Any:
    """Accept true, false or auto."""
    if isinstance(value, str) and value != "auto":
        raise refused(name, "be auto, true or false", value)
    return value if isinstance(value, str) else flag(name, value)


def path_or_dataset(name: str, value: Any) -> Any:
    """Accept a path or a `datasets.Dataset`."""
    if is_a(value, "datasets.arrow_dataset.Dataset"):
        return value
    if not isinstance(value, str | os.PathLike):
        raise refused(name, "be a path or a datasets.Dataset", value)
    return path(name, value)


def weights(name: str, value: Any) -> Any:
    """Accept a path or name of weights; arrays of weights are given with the samples instead."""
    if not isinstance(value, str) and not hasattr(value, "__fspath__"):
        raise refused(name, "be a column, a key or a .npy file", value)
    return word(name, str(value))


def classes(name: str, value: Any) -> Any:
    """Accept class names or indices, one or several."""
    several = value if isinstance(value, list | tuple) else [value]
    for entry in several:
        if not isinstance(entry, str):
            integer(at_least=0)(f"a class in {name}", entry)
    return value


def memory(name: str, value: Any) -> Any:
    """Accept bytes as a number, as text with a unit, or `auto`."""
    return value if isinstance(value, str) else integer(at_least=0)(name, value)


def traced_tensor(shape: str) -> Check:
    """Return a check for tensors that accepts fake ones, whose shapes in traces have no numbers."""
    plain = tensor(shape)

    def check(name: str, value: Any) -> Any:
        fake = is_a(value, FAKE_CLASS) or (is_a(value, TENSOR_CLASS) and value.is_meta)
        return value if fake else plain(name, value)

    return check


def table_or_path(name: str, value: Any) -> Any:
    """Accept a table of class distances, or the path of its file."""
    if isinstance(value, str | os.PathLike):
        return path(name, value)
    _, table = OBJECTS["ClassDistances"]
    return instance("be ClassDistances or the path of their npz", table)(name, value)


def columns(name: str, value: Any) -> Any:
    """Accept the name of a column, or several."""
    if isinstance(value, str):
        return word(name, value)
    if not isinstance(value, list | tuple) or not all(isinstance(entry, str) for entry in value):
        raise refused(name, "be a column or a list of columns", value)
    if not value:
        raise InputError(f"{name} must name a column, got []; null takes the usual ones")
    return value


# Arguments of functions of two point clouds with masses and classes.
TENSORS_OF_A_PAIR: dict[str, Check] = {
    "x": tensor("(n, d)"),
    "y": tensor("(m, d)"),
    "a": optional(tensor("(n,)")),
    "b": optional(tensor("(m,)")),
    "labels_x": optional(tensor("(n,)")),
    "labels_y": optional(tensor("(m,)")),
    "class_table": optional(tensor("(V_x + V_y, V_x + V_y)")),
}
# The checks of annotations, written without ` | None`, which `check_of` handles.
ACCEPTED: dict[str, Check] = {
    **{kind: instance(accepted, place) for kind, (accepted, place) in OBJECTS.items()},
    "bool": flag,
    "int": integer(at_least=None),
    "float": any_number,
    "str": text,
    "Word": word,
    "Positive": positive,
    "NotNegative": not_negative,
    "Finite": finite,
    "Share": share,
    "MarginalError": marginal_error,
    "Count": count,
    "Index": index,
    "Seed": seed,
    # A tensor may need a gradient.
    "Positive | Tensor": either(positive, TENSOR_CLASS),
    "NotNegative | Tensor": either(not_negative, TENSOR_CLASS),
    "Ground": choice("sqeuclidean", "cosine", "inner"),
    # `gromov` is no cost between two points.
    "DatasetGround": choice("sqeuclidean", "cosine", "inner", "gromov"),
    "Backend": choice("auto", "torch", "triton"),
    "Precision": choice("fast", "high", "double"),
    "BatchedGradient": choice("unrolled", "implicit", "none"),
    "str | torch.device": device,
    "DeviceName": device,
    "Compute": compute,
    "ProcessGroup | Ranks | str": group,
    "ProcessGroup | str": group,
    "Path": path,
    "str | Path": path,
    "str | os.PathLike[str]": path,
    "str | os.PathLike[str] | Dataset": path_or_dataset,
    "Samples": samples,
    "Sequence[Samples]": sequence(samples),
    "tuple[LabeledSamples, LabeledSamples]": sequence(
        instance(*OBJECTS["LabeledSamples"]), length=2
    ),
    "ClassDistances | str | Path": table_or_path,
    "Labels": labels,
    "Unbalanced": penalties,
    "Costs": either(array(COSTS_SHAPE), COST_BLOCKS_CLASS),
    # Arrays have no gradient.
    "Tensor | CostBlocks": either(tensor(COSTS_SHAPE), COST_BLOCKS_CLASS),
    "Potentials": mapping("be potentials by term, {'xy': g}"),
    "Progress": function,
    "SolverProgress": function,
    "MixtureProgress": function,
    "Stop": function,
    "Mapping[str, Any]": mapping("be a mapping such as {name: value}"),
    "Sequence[str]": names,
    "tuple[str, ...]": names,
    "str | Sequence[str]": columns,
    "Sequence[Index]": sequence(index),
    "ImageShape": sequence(count, length=3),
    "tuple[int, int, int]": sequence(count, length=3),
    "tuple[Count, Count]": sequence(count, length=2),
    "tuple[float, float]": sequence(any_number),
}


def check_of(annotation: Any) -> Check | None:
    """Return the check for an annotation; None if it has none."""
    written = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    kind = written.removesuffix(" | None")
    check = function if kind.startswith("Callable[") else ACCEPTED.get(kind)
    return optional(check) if check and kind != written else check


def takes(
    *shared: Mapping[str, Check],
    prefix: str = "",
    elsewhere: Mapping[str, str] | None = None,
    **declared: Check,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Check the arguments of a function, except those left to their defaults.

    Args:
        *shared: checks by parameter that several functions share, for what annotations cannot say.
        prefix: text before a parameter's name in messages, such as `extractor.`.
        elsewhere: keywords that are fields of an options argument, and how to write them there.
        **declared: further checks by parameter.

    Returns:
        A decorator. The decorated function raises an `InputError` for a bad argument.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        checks = checks_of(signature)
        for declaration in (*shared, declared):
            checks |= declaration

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                for name in kwargs:
                    if elsewhere and name in elsewhere:
                        raise InputError(
                            f"{function.__name__} takes no {name}: write {elsewhere[name]}"
                        ) from None
                if missing := _missing(signature, kwargs):
                    raise InputError(f"{function.__name__} {missing}") from None
                # Too many or too few arguments: Python's own error names the function as well.
                return function(*args, **kwargs)
            for name, value in bound.arguments.items():
                if name in checks:
                    bound.arguments[name] = checks[name](f"{prefix}{name}", value)
            return function(*bound.args, **bound.kwargs)

        return checked

    return decorate


def checks_of(signature: inspect.Signature) -> dict[str, Check]:
    """Return the checks for the annotations of a signature, by parameter."""
    stated = {name: check_of(each.annotation) for name, each in signature.parameters.items()}
    return {name: check for name, check in stated.items() if check}


def _missing(signature: inspect.Signature, given: Mapping[str, Any]) -> str:
    """Return words on a missing keyword without default and what to give; "" if none is missing."""
    known = signature.parameters
    if "epsilon_relative" in given and "epsilon" in known and "epsilon_relative" not in known:
        return f"takes no epsilon_relative: {REQUIRED['epsilon']}"
    for name, parameter in known.items():
        required = parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
        if required and name not in given:
            return f"needs {name}: {REQUIRED.get(name, f'give {name}=...')}"
    return ""


def check_fields(options: Any, prefix: str = "", **declared: Check) -> None:
    """Check the fields of a dataclass, frozen or not, and store the values that the checks return.

    Args:
        options: the instance; a frozen one in its `__post_init__`.
        prefix: text before a field's name in messages, such as `solver.`.
        **declared: checks by field, for what the annotation cannot say.

    Raises:
        InputError: a field is not valid.
    """
    for each in dataclasses.fields(options):
        check, value = declared.get(each.name) or check_of(each.type), getattr(options, each.name)
        if check and value is not each.default:
            object.__setattr__(options, each.name, check(f"{prefix}{each.name}", value))
