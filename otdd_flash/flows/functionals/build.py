"""Functionals by the names and parameters that configurations give them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from otdd_flash.errors import InputError, choose, prefixed
from otdd_flash.flows.functionals.base import Entropy, Functional, WeightedFunctional
from otdd_flash.flows.functionals.class_repulsion import ClassRepulsion
from otdd_flash.flows.functionals.potentials import (
    AffineNorm,
    CoordinateCollapse,
    HyperplaneMargin,
    Norm,
)
from otdd_flash.importing import import_callable
from otdd_flash.samples import LabeledSamples

# Called with the starting particles and the parameters by name.
FACTORIES: dict[str, Callable[..., Functional | Entropy]] = {
    "norm": Norm.configured,
    "affine_norm": AffineNorm.configured,
    "hyperplane_margin": HyperplaneMargin.configured,
    "coordinate_collapse": CoordinateCollapse.configured,
    "class_repulsion": ClassRepulsion.configured,
    "entropy": lambda start: Entropy(),
}


def build_functionals(
    specs: Sequence[Mapping[str, Any] | WeightedFunctional], start: LabeledSamples
) -> tuple[WeightedFunctional, ...]:
    """Functionals from configurations such as {name: norm, weight: 0.1}.

    Everything that depends on the starting particles is decided here and stays the same during the
    flow. A second functional of one name is reported as `norm_2`.

    Args:
        specs: for each functional its `weight`, its `name` with parameters, or the import `path` of
            a function with keyword arguments; those that are built already come last, as they are.
        start: the particles before the first step, in the space in which they move.

    Raises:
        InputError: an unknown name, an unknown or missing parameter, values that do not fit, or a
            weight that is not finite; the message names the functional.
    """
    built: list[WeightedFunctional] = []
    described = [spec for spec in specs if not isinstance(spec, WeightedFunctional)]
    for spec in described:
        label = _label(spec)
        try:
            function = _build(spec, start)
        except InputError as error:
            raise prefixed(f"functional {label}", error) from error
        taken = {term.name for term in built}
        numbered = (f"{label}_{count}" for count in range(2, len(described) + 2))
        name = label if label not in taken else next(n for n in numbered if n not in taken)
        built.append(WeightedFunctional(name, spec["weight"], function))
    return (*built, *(spec for spec in specs if isinstance(spec, WeightedFunctional)))


def _label(spec: Mapping[str, Any]) -> str:
    """What reports call it: its name, or the last part of its path."""
    if not isinstance(spec, Mapping) or ("name" in spec) == ("path" in spec):
        raise InputError(f"a functional needs either name=NAME or path=MODULE:FUNCTION, got {spec}")
    if "name" in spec:
        return choose("functional", str(spec["name"]), tuple(FACTORIES))
    return str(spec["path"]).replace(":", ".").rpartition(".")[2]


def _build(spec: Mapping[str, Any], start: LabeledSamples) -> Functional | Entropy:
    if "weight" not in spec:
        raise InputError("needs weight=NUMBER")
    parameters = {key: spec[key] for key in spec if key not in ("name", "path", "weight")}
    if "path" in spec:
        return _imported(spec["path"], parameters)
    factory = FACTORIES[str(spec["name"])]
    known = {key: p for key, p in inspect.signature(factory).parameters.items() if key != "start"}
    for key in parameters:
        if key not in known:
            raise InputError(f"has no parameter {key!r}; it has: {', '.join(known) or 'none'}")
    for key, declared in known.items():
        if declared.default is inspect.Parameter.empty and parameters.get(key) is None:
            raise InputError(f"needs {key}=...")
    return factory(start, **parameters)


def _imported(path: str, parameters: Mapping[str, Any]) -> Functional:
    """The function at `path` with some of its arguments.

    Args:
        path: "package.module:function" or "package.module.function". It is called as
            function(points, labels, masses, **parameters) and returns a 0-dim tensor; see
            `Functional`.
        parameters: keyword arguments.

    Raises:
        InputError: nothing callable stands there, or it does not take these arguments.
    """
    if not isinstance(path, str):
        raise InputError(f"path must be package.module:function, got {path!r}")
    function = import_callable(path, "path")
    try:
        inspect.signature(function).bind("points", "labels", "masses", **parameters)
    except TypeError as error:
        raise InputError(
            f"{error}; it is called with points, labels, masses, and every other key of the "
            "configuration as a keyword"
        ) from None
    return cast(Functional, partial(function, **parameters))
