"""Functionals of a labelled, weighted cloud: their construction from configurations and evaluation.

`FACTORIES` lists the built-in functionals by name; their parameters are those of `configured` in
`flows.functionals.potentials`. Names and parameters are keys of users' configurations, so they must
stay. `flows.functionals` exports this module's public names, and only it imports them.

Everything that depends on the starting particles is decided in `build_functionals`, so that a flow
descends the same objective at every step and after it is resumed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from otdd_flash.errors import InputError, choose, prefixed
from otdd_flash.flows.functionals.potentials import (
    AffineNorm,
    ClassRepulsion,
    CoordinateCollapse,
    HyperplaneMargin,
    Norm,
    as_number,
)
from otdd_flash.importing import import_callable, user_code
from otdd_flash.samples import LabeledSamples


def build_functionals(
    specs: Sequence[Mapping[str, Any] | WeightedFunctional], start: LabeledSamples
) -> tuple[WeightedFunctional, ...]:
    """Build functionals from configurations such as {name: norm, weight: 0.1}.

    Everything that depends on the starting particles is decided here and stays the same during the
    flow. A second functional with the same name is reported as `norm_2`.

    Args:
        specs: for each functional its `weight`, and its `name` with parameters or the import `path`
            of a function with keyword arguments. Functionals already built come last, unchanged.
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
    """Return the functional's name in reports: its name, or the last part of its path."""
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
    """Return the function at `path` with some of its arguments set.

    Args:
        path: "package.module:function" or "package.module.function". It is called as
            function(points, labels, masses, **parameters) and returns a 0-dim tensor; see
            `Functional`.
        parameters: keyword arguments.

    Raises:
        InputError: the path has no callable, or it does not accept these arguments.
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


class Functional(Protocol):
    """A function of the particles' positions, differentiable in `points` by autograd."""

    def __call__(self, points: Tensor, labels: Tensor | None, masses: Tensor) -> Tensor:
        """Return the value, a 0-dim tensor.

        Args:
            points: (n, d) particles.
            labels: (n,) int64 class indices, or None for unlabelled particles.
            masses: (n,) float64, summing to 1.
        """


@dataclass(frozen=True)
class Entropy:
    """F(rho) = int rho log rho, which spreads particles.

    Particles have no density, so it has neither value nor gradient here. Its flow is diffusion:
    with weight w, a step of size tau adds sqrt(2 w tau) N(0, I) to each particle (Langevin;
    Jordan, Kinderlehrer & Otto 1998, The variational formulation of the Fokker-Planck equation).
    """


# Each is called with the starting particles and the parameters by name.
FACTORIES: dict[str, Callable[..., Functional | Entropy]] = {
    "norm": Norm.configured,
    "affine_norm": AffineNorm.configured,
    "hyperplane_margin": HyperplaneMargin.configured,
    "coordinate_collapse": CoordinateCollapse.configured,
    "class_repulsion": ClassRepulsion.configured,
    "entropy": lambda start: Entropy(),
}


@dataclass(frozen=True, eq=False)
class WeightedFunctional:
    """One term w_k F_k of the objective.

    Attributes:
        name: its name in reports.
        weight: w_k, finite. A negative weight reverses the term: potentials repel, classes
            attract. Most potentials are then unbounded below and particles may run away.
        function: F_k; `Entropy` stands for noise.

    Raises:
        InputError: the weight is not finite, or that of the entropy is negative.
    """

    name: str
    weight: float
    function: Functional | Entropy

    def __post_init__(self) -> None:
        weight = as_number(f"the weight of functional {self.name}", self.weight)
        if isinstance(self.function, Entropy) and weight < 0:
            raise InputError(
                f"the weight of {self.name} must not be negative, got {self.weight}: noise can "
                "only spread particles"
            )


def noise_temperature(functionals: Iterable[WeightedFunctional]) -> float:
    """Return the sum w of the weights of entropies.

    A step of size tau adds sqrt(2 w tau) N(0, I).
    """
    return sum((term.weight for term in functionals if isinstance(term.function, Entropy)), 0.0)


def value_and_velocity(
    functionals: Sequence[WeightedFunctional],
    points: Tensor,
    labels: Tensor | None,
    masses: Tensor,
) -> tuple[dict[str, float], Tensor]:
    """Return what functionals add to the objective of a flow, and to its gradient.

    Args:
        functionals: the terms w_k F_k, with distinct names; entropies are skipped.
        points: (n, d) particles.
        labels: (n,) int64 class indices, or None.
        masses: a (n,) float64, summing to 1.

    Returns:
        w_k F_k(x) by name, and (1 / a_i) d(sum_k w_k F_k) / dx_i (n, d) in the type of `points`;
        0 for particles without mass. The flow moves in the opposite direction.

    Raises:
        InputError: a functional does not return a finite 0-dim tensor with a finite gradient, or
            two have the same name.
    """
    terms = [term for term in functionals if not isinstance(term.function, Entropy)]
    if len({term.name for term in terms}) < len(terms):
        raise InputError(f"functionals must have distinct names, got {[t.name for t in terms]}")
    values: dict[str, float] = {}
    total = torch.zeros_like(points, requires_grad=False)
    particles = points.detach().requires_grad_()
    for term in terms:
        value, gradient = _differentiate(term, particles, labels, masses)
        values[term.name] = term.weight * value
        total.add_(gradient, alpha=term.weight)
    inverse = torch.where(masses > 0, 1 / masses, 0.0)
    return values, total.mul_(inverse[:, None].to(total))


def _differentiate(
    term: WeightedFunctional, particles: Tensor, labels: Tensor | None, masses: Tensor
) -> tuple[float, Tensor]:
    """Return F_k and dF_k / dx (n, d)."""
    assert not isinstance(term.function, Entropy)
    with torch.enable_grad():
        with user_code(f"functional {term.name}"):
            # A copy, because the function may modify its arguments.
            value = term.function(particles, labels, masses.clone())
        _check(term.name, value)
        with user_code(f"the gradient of functional {term.name}"):
            (gradient,) = torch.autograd.grad(value, particles, allow_unused=True)
    if gradient is None:
        raise InputError(f"functional {term.name} does not depend on points; autograd finds no way")
    if not bool(torch.isfinite(gradient).all()):
        raise InputError(
            f"the gradient of functional {term.name} is not finite at "
            f"{int((~torch.isfinite(gradient)).any(1).sum())} of {len(gradient)} particles"
        )
    return float(value.detach()), gradient


def _check(name: str, value: Any) -> None:
    """Raise unless the value is a finite 0-dim tensor with a gradient, as `Functional` requires."""
    if not isinstance(value, Tensor) or value.ndim != 0:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"functional {name} must return a 0-dim tensor, got {got}")
    if not bool(torch.isfinite(value)):
        raise InputError(f"functional {name} is {float(value.detach())}; it must be finite")
    if not value.requires_grad:
        raise InputError(
            f"functional {name} returns a tensor without gradient; compute it from points by torch "
            "operations, without detach, item or numpy"
        )
