"""Terms that a flow may add to the divergence that it descends.

    F(x) = S_epsilon(x, target) + sum_k w_k F_k(x),      dx_i / dt = -(1 / a_i) dF / dx_i

They are the three kinds of energy of gradient flows in probability space (Alvarez-Melis & Fusi
2021, Dataset Dynamics via Gradient Flows in Probability Space), for particles x_i of mass a_i and
class l_i:

    potential    sum_i a_i V(x_i, l_i)                norm, affine_norm, hyperplane_margin,
                                                      coordinate_collapse
    interaction  sum_ij a_i a_j W(x_i, l_i, x_j, l_j) class_repulsion
    internal     int rho log rho                      entropy, by noise

and any function of the user. `build_functionals` makes them from a configuration,
`value_and_velocity` evaluates them, and `noise_temperature` says how much noise a step adds;
`flows.run` and `flows.objective` call these, and `flows.flow` stores `WeightedFunctional`s.

`FACTORIES` lists the built-in functionals by name. Names and parameters are keys of users'
configurations, so they must stay. Everything that depends on the starting particles is decided in
`build_functionals`, so that a flow descends the same objective at every step and after it is
resumed.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.arguments import Finite, NotNegative, Positive, finite, takes
from otdd_flash.checks import path
from otdd_flash.data.arrays import read_npy
from otdd_flash.data.dataset import reading
from otdd_flash.derivatives.autograd import KnownGradient
from otdd_flash.errors import InputError, choose, prefixed
from otdd_flash.plugins import import_callable, user_code
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import listing

# function(points (n, d), labels (n,) int64 or None, masses (n,) float64, of sum 1): a 0-dim tensor,
# differentiable in the points by autograd.
Functional = Callable[[Tensor, Tensor | None, Tensor], Tensor]


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
    for spec in specs:
        if isinstance(spec, WeightedFunctional):
            continue
        label = _label(spec)
        try:
            function = _build(spec, start)
        except InputError as error:
            raise prefixed(f"functional {label}", error) from error
        taken = {term.name for term in built}
        numbered = (label, *(f"{label}_{count}" for count in range(2, len(specs) + 2)))
        name = next(name for name in numbered if name not in taken)
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
            function(points, labels, masses, **parameters) and is a
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


@dataclass(frozen=True)
class Entropy:
    """F(rho) = int rho log rho, which spreads particles.

    Particles have no density, so it has neither value nor gradient here. Its flow is diffusion:
    with weight w, a step of size tau adds sqrt(2 w tau) N(0, I) to each particle (Langevin;
    Jordan, Kinderlehrer & Otto 1998, The variational formulation of the Fokker-Planck equation).
    """


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
        weight = finite(f"the weight of functional {self.name}", self.weight)
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
    """Return F_k and dF_k / dx (n, d), both finite."""
    assert not isinstance(term.function, Entropy)
    name = term.name
    with torch.enable_grad():
        with user_code(f"functional {name}"):
            # A copy, because the function may modify its arguments.
            value: Any = term.function(particles, labels, masses.clone())
        if not isinstance(value, Tensor) or value.ndim != 0:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"functional {name} must return a 0-dim tensor, got {got}")
        if not bool(torch.isfinite(value)):
            raise InputError(f"functional {name} is {float(value.detach())}; it must be finite")
        if not value.requires_grad:
            raise InputError(
                f"functional {name} returns a tensor without gradient; compute it from points by "
                "torch operations, without detach, item or numpy"
            )
        with user_code(f"the gradient of functional {name}"):
            (gradient,) = torch.autograd.grad(value, particles, allow_unused=True)
    if gradient is None:
        raise InputError(f"functional {name} does not depend on points; autograd finds no way")
    if not bool(torch.isfinite(gradient).all()):
        raise InputError(
            f"the gradient of functional {name} is not finite at "
            f"{int((~torch.isfinite(gradient)).any(1).sum())} of {len(gradient)} particles"
        )
    return float(value.detach()), gradient


class Potential(ABC):
    """F(x) = sum_i a_i V(x_i, l_i), the potential energy of a cloud in the field V.

    Its velocity -(1 / a_i) dF / dx_i = -grad V(x_i, l_i) does not depend on the other particles.

    V is computed in float64, whatever the type of the points: in float32 a centre, an offset or a
    plane would be rounded to 6e-8 of its distance from 0, which is not small near it. Gradients
    have the type of the points, rounded once.
    """

    @abstractmethod
    def energies(self, points: Tensor, labels: Tensor | None) -> Tensor:
        """Return V (n,) of the points (n, d), float64, with class indices `labels` (n,)."""

    def __call__(self, points: Tensor, labels: Tensor | None, masses: Tensor) -> Tensor:
        """Return the mean energy, 0-dim float64."""
        return masses @ self.energies(points.double(), labels)


class Norm(Potential):
    """V(x) = 1/2 ||x - c||^2.

    Args:
        start: the particles before the first step, in d dimensions.
        centre: c, d numbers or a file of them; None is the origin.

    Raises:
        InputError: the centre has another shape or is not finite.
    """

    def __init__(self, start: LabeledSamples, centre: Any = None) -> None:
        given = torch.zeros(start.dim) if centre is None else centre
        self.centre = as_tensor("centre", given, (start.dim,))

    def energies(self, points: Tensor, labels: Tensor | None) -> Tensor:
        return (points - self.centre.to(points)).square().sum(1) / 2


class AffineNorm(Potential):
    """V(x) = 1/2 ||A x - b||^2.

    Args:
        start: the particles before the first step, in d dimensions.
        matrix: A (k, d), as numbers or a file of them.
        offset: b (k,), as numbers or a file of them; None is 0.

    Raises:
        InputError: the shapes do not fit, or a value is not finite.
    """

    def __init__(self, start: LabeledSamples, matrix: Any, offset: Any = None) -> None:
        self.matrix = as_tensor("matrix", matrix, (None, start.dim))
        rows = len(self.matrix)
        self.offset = as_tensor("offset", torch.zeros(rows) if offset is None else offset, (rows,))

    def energies(self, points: Tensor, labels: Tensor | None) -> Tensor:
        residuals = points @ self.matrix.to(points).T - self.offset.to(points)
        return residuals.square().sum(1) / 2


class CoordinateCollapse(Potential):
    """V(x) = 1/2 sum_(k in K) (x_k - value)^2.

    Args:
        start: the particles before the first step, in d dimensions.
        coordinates: K, distinct indices into [0, d).
        value: the value to which the coordinates of K are drawn.

    Raises:
        InputError: an index is not an integer, is outside [0, d) or is repeated; or there is none.
    """

    @takes()
    def __init__(
        self, start: LabeledSamples, coordinates: Sequence[int], value: Finite = 0.0
    ) -> None:
        given, dim = coordinates, start.dim
        whole = isinstance(given, list | tuple | range) and all(type(k) is int for k in given)
        if not whole or not given or not all(0 <= k < dim for k in given):
            raise InputError(f"coordinates must be a list of indices in [0, {dim}), got {given!r}")
        if len(set(given)) < len(given):
            raise InputError(f"coordinates must be distinct, got {given!r}")
        self.coordinates, self.value = torch.tensor(list(given)), value

    def energies(self, points: Tensor, labels: Tensor | None) -> Tensor:
        chosen = points.index_select(1, self.coordinates.to(points.device))
        return (chosen - self.value).square().sum(1) / 2


class HyperplaneMargin(Potential):
    """V(x, l) = max(0, margin - s_l (<w, x> - b)), the hinge loss of a linear classifier.

    Particles stop at distance margin / ||w|| from the plane <w, x> = b, on the side of their class.

    Args:
        start: the labelled particles before the first step, in d dimensions.
        normal: w as d numbers or a file of them.
        signs: s, the side of a class by its name: 1 or -1; other classes have no side, V = 0.
        offset: b.
        margin: in units of <w, x>, not negative.

    Raises:
        InputError: unlabelled particles, an unknown class, a sign other than 1 and -1, or numbers
            that do not fit.
    """

    @takes()
    def __init__(
        self,
        start: LabeledSamples,
        normal: Any,
        signs: Mapping[str, int],
        offset: Finite = 0.0,
        margin: NotNegative = 1.0,
    ) -> None:
        self.normal = as_tensor("normal", normal, (start.dim,))
        self.signs = _signs(signs, start)
        self.offset, self.margin = offset, margin

    def energies(self, points: Tensor, labels: Tensor | None) -> Tensor:
        sides = self.signs.to(points)[labels]
        distances = points @ self.normal.to(points) - self.offset
        return sides.abs() * torch.relu(self.margin - sides * distances)


def _signs(given: Any, start: LabeledSamples) -> Tensor:
    if start.labels is None:
        raise InputError("needs labelled particles: classes have sides")
    if not isinstance(given, Mapping) or not given:
        raise InputError(f"signs must give 1 or -1 by class name, got {given!r}")
    signs = torch.zeros(len(start.class_names))
    for name, sign in given.items():
        # YAML reads a class name such as "3" as a number.
        if str(name) not in start.class_names:
            raise InputError(
                f"signs names an unknown class {str(name)!r}; the classes are: "
                f"{listing(start.class_names)}"
            )
        if sign not in (1, -1):
            raise InputError(f"the sign of class {name} must be 1 or -1, got {sign!r}")
        signs[start.class_names.index(str(name))] = sign
    return signs


# The pairs of points in one tile: 64 MB in float32.
TILE = 2**24

# The number of points behind the automatic radius, and the seed that draws them.
SAMPLED, SEED = 1024, 0


class ClassRepulsion:
    """F(x) = sum_ij a_i a_j k_ij with k_ij = 1[l_i != l_j] exp(-||x_i - x_j||^2 / (2 s^2)).

    Work is O(n^2 d); memory is that of n points and of one tile of pairs. The gradient

        dF / dx_i = -(2 a_i / s^2) sum_j a_j k_ij (x_i - x_j)

    is computed together with the value, so autograd stores no pairs either.

    Args:
        start: the labelled particles before the first step.
        radius: s, in units of the points. Pairs far beyond it have no effect on each other. None is
            `median_radius` of the start.

    Raises:
        InputError: unlabelled particles, a radius that is not positive, or no automatic radius.
    """

    @takes()
    def __init__(self, start: LabeledSamples, radius: Positive | None = None) -> None:
        if start.labels is None:
            raise InputError("needs labelled particles: only different classes repel each other")
        self.radius = median_radius(start) if radius is None else radius

    def __call__(self, points: Tensor, labels: Tensor | None, masses: Tensor) -> Tensor:
        """Return the energy, 0-dim float64."""
        assert labels is not None
        with torch.no_grad():
            value, gradient = _value_and_gradient(points, labels, masses, self.radius)
        return cast(Tensor, KnownGradient.apply(value, (gradient,), None, points))


# Each is called with the starting particles and the parameters by name.
FACTORIES: dict[str, Callable[..., Functional | Entropy]] = {
    "norm": Norm,
    "affine_norm": AffineNorm,
    "hyperplane_margin": HyperplaneMargin,
    "coordinate_collapse": CoordinateCollapse,
    "class_repulsion": ClassRepulsion,
    "entropy": lambda start: Entropy(),
}


def median_radius(start: LabeledSamples) -> float:
    """Return the median distance between points of different classes, whatever their masses.

    It is taken over 1,024 of the points with mass, drawn by a fixed seed, so that the same points
    always give the same radius.

    Raises:
        InputError: no two of them differ in class, or most such pairs coincide.
    """
    assert start.labels is not None
    present = torch.nonzero(start.masses.cpu() > 0).squeeze(1)
    generator = torch.Generator().manual_seed(SEED)
    rows = present[torch.randperm(len(present), generator=generator)[:SAMPLED]]
    rows = rows.to(start.features.device)
    points, labels = start.features[rows].double(), start.labels[rows]
    distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    apart = distances[labels[:, None] != labels]
    if len(apart) == 0:
        raise InputError(
            f"no two of {len(rows)} starting points differ in class; give radius=NUMBER, or leave "
            "class_repulsion out"
        )
    radius = float(apart.median())
    if radius == 0:
        raise InputError("most points of different classes coincide; give radius=NUMBER")
    return radius


def _value_and_gradient(
    points: Tensor, labels: Tensor, masses: Tensor, radius: float
) -> tuple[Tensor, Tensor]:
    """Return F and dF / dx (n, d), computed in tiles of rows against all points."""
    # Centred, so that the scalar products below do not cancel far from the origin.
    z = (points - points.mean(0)) / radius
    halves = z.square().sum(1) / 2
    weights = masses.to(z)
    value = torch.zeros((), dtype=torch.float64, device=points.device)
    gradient = torch.empty_like(z)
    rows = max(1, TILE // len(z))
    for start in range(0, len(z), rows):
        tile = slice(start, start + rows)
        # a_j exp(-|z_i - z_j|^2 / 2), in place, because a tile takes the most memory.
        kernel = (z[tile] @ z.T).sub_(halves[tile, None]).sub_(halves).clamp_(max=0).exp_()
        kernel.masked_fill_(labels[tile, None] == labels, 0).mul_(weights)
        felt = kernel.sum(1)
        value += masses[tile] @ felt.double()
        differences = felt[:, None] * z[tile] - kernel @ z
        gradient[tile] = (-2 / radius) * weights[tile, None] * differences
    return value, gradient


def as_tensor(name: str, value: Any, shape: tuple[int | None, ...]) -> Tensor:
    """Return a float64 tensor on the CPU from (nested lists of) numbers, an array, or a file.

    Args:
        name: the parameter; also the key in an npz file that holds several arrays.
        value: the numbers, or the path of a .npy or .npz file.
        shape: the required shape; None is any length from 1.

    Raises:
        InputError: the file cannot be read, the shape differs or a value is not finite.
    """
    given = _read(name, Path(path(name, value))) if isinstance(value, str | Path) else value
    try:
        # Without a type, `as_tensor` would make float32 from a list.
        tensor = torch.as_tensor(given, dtype=torch.float64).detach().to("cpu", copy=True)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name} must be numbers or a file of them, got {given!r}") from None
    fits = tensor.ndim == len(shape) and all(
        length == wanted if wanted is not None else length > 0
        for length, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise InputError(f"{name} must have shape ({wanted}), got {tuple(tensor.shape)}")
    if not bool(torch.isfinite(tensor).all()):
        raise InputError(f"{name} holds NaN or infinite values")
    return tensor


def _read(name: str, file: Path) -> NDArray[Any]:
    match file.suffix.lower():
        case ".npy":
            return np.array(read_npy(file))
        case ".npz":
            with reading(file), np.load(file, allow_pickle=False) as archive:
                keys = archive.files
                key = keys[0] if len(keys) == 1 else name
                if key not in keys:
                    raise InputError(
                        f"{file} has no key {name!r} for {name}; its keys are: {', '.join(keys)}"
                    )
                return np.asarray(archive[key])
    raise InputError(f"{name} must be numbers or a .npy or .npz file, got {str(file)!r}")
