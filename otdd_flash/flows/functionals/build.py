"""Functionals by the names and parameters that configurations give them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from otdd_flash.errors import InputError, choose, prefixed
from otdd_flash.flows.functionals.affine_norm import AffineNorm
from otdd_flash.flows.functionals.base import Functional, WeightedFunctional
from otdd_flash.flows.functionals.class_repulsion import ClassRepulsion
from otdd_flash.flows.functionals.coordinate_collapse import CoordinateCollapse
from otdd_flash.flows.functionals.entropy import Entropy
from otdd_flash.flows.functionals.hyperplane_margin import HyperplaneMargin
from otdd_flash.flows.functionals.imported import imported_functional
from otdd_flash.flows.functionals.norm import Norm
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
    specs: Sequence[Mapping[str, Any]], start: LabeledSamples
) -> tuple[WeightedFunctional, ...]:
    """Functionals from configurations such as {name: norm, weight: 0.1}.

    Everything that depends on the starting particles is decided here and stays the same during the
    flow. A second functional of one name is reported as `norm_2`.

    Args:
        specs: for each functional its `weight`, its `name` with parameters, or the import `path` of
            a function with keyword arguments.
        start: the particles before the first step, in the space in which they move.

    Raises:
        InputError: an unknown name, an unknown or missing parameter, values that do not fit, or a
            weight that is not finite; the message names the functional.
    """
    built: list[WeightedFunctional] = []
    for spec in specs:
        label = _label(spec)
        try:
            function = _build(spec, start)
        except InputError as error:
            raise prefixed(f"functional {label}", error) from error
        taken = {term.name for term in built}
        numbered = (f"{label}_{count}" for count in range(2, len(specs) + 2))
        name = label if label not in taken else next(n for n in numbered if n not in taken)
        built.append(WeightedFunctional(name, spec["weight"], function))
    return tuple(built)


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
        return imported_functional(spec["path"], parameters)
    factory = FACTORIES[str(spec["name"])]
    known = {key: p for key, p in inspect.signature(factory).parameters.items() if key != "start"}
    for key in parameters:
        if key not in known:
            raise InputError(f"has no parameter {key!r}; it has: {', '.join(known) or 'none'}")
    for key, declared in known.items():
        if declared.default is inspect.Parameter.empty and parameters.get(key) is None:
            raise InputError(f"needs {key}=...")
    return factory(start, **parameters)
