"""The cases: public names alone, so that they run across moves of what stands below these.

A case is called GROUP: WHAT. Its function gives what is to be recorded by name. `precision` says of
which type potentials are, and decides how much another processor may change.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import otdd_flash as otdd
from tests.frozen.inputs import cloud, labelled, masses, numbers
from tests.frozen.recording import Record, record
from tests.rank_pool import pool

DOUBLE = otdd.ComputeOptions("cpu", precision="double")
SINGLE = otdd.ComputeOptions("cpu")
KERNELS = otdd.ComputeOptions("cpu", backend="triton", precision="high")
# Of the marginal error, far above rounding.
CLOSE = otdd.Converged(tolerance=1e-4)


class Case(NamedTuple):
    """A problem whose numbers are recorded.

    Attributes:
        compute: the parts of its record, from the options for the case's precision.
        precision: of potentials, `double` or `single`.
        scale: of values, None for the largest of them.
    """

    compute: Callable[[otdd.ComputeOptions], Mapping[str, Any]]
    precision: str
    scale: float | None

    def run(self) -> Record:
        """The fields of the case, in a folder and with warnings that nobody sees."""
        options = DOUBLE if self.precision == "double" else SINGLE
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = self.compute(options)
            return record(parts, precision=self.precision, scale=self.scale)


CASES: dict[str, Case] = {}


def case(
    name: str, precision: str = "double", *, scale: float | None = None
) -> Callable[[Callable[..., Mapping[str, Any]]], Callable[..., Mapping[str, Any]]]:
    """Enter a function of `compute` as a case of this name."""

    def enter(function: Callable[..., Mapping[str, Any]]) -> Callable[..., Mapping[str, Any]]:
        assert name not in CASES, name
        CASES[name] = Case(function, precision, scale)
        return function

    return enter


def type_of(compute: otdd.ComputeOptions) -> torch.dtype:
    """The type that loses nothing of such potentials, where functions compute in that of points."""
    return torch.float64 if compute.precision == "double" else torch.float32


def group_of(name: str) -> str:
    """The group of a case."""
    return name.partition(":")[0]


# Clouds

X, Y = cloud(61, seed=1), cloud(45, seed=2, shift=0.5)
A, B = masses(61, zero=7), masses(45)


def weighted(points: torch.Tensor, weights: torch.Tensor) -> otdd.LabeledSamples:
    return otdd.LabeledSamples(points, None, (), weights)


@case("clouds: a term", "single")
@case("clouds: a term in double")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    return {"term": otdd.sinkhorn(X, Y, epsilon=1.0, options=CLOSE, compute=compute)}


@case("clouds: masses, one of them 0")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    given = weighted(X, A), weighted(Y, B)
    return {"term": otdd.sinkhorn(*given, epsilon=0.3, options=CLOSE, compute=compute)}


def divergence(
    compute: otdd.ComputeOptions,
    x: torch.Tensor = X,
    y: torch.Tensor = Y,
    *,
    epsilon: float,
    **options: Any,
) -> Mapping[str, Any]:
    options = {"options": CLOSE, **options}
    return {"": otdd.sinkhorn_divergence(x, y, epsilon=epsilon, compute=compute, **options)}


ROUGH, NARROW = otdd.Converged(1e-3), otdd.Converged(bound_width=1e-3)
HURRIED, GEOMLOSS = otdd.Converged(1e-6, max_iterations=5), otdd.GeomlossSchedule(0.7)
WIDE = cloud(90, 64, seed=3), cloud(70, 64, seed=4, shift=0.25)
LARGE = cloud(320, 4, seed=5), cloud(250, 4, seed=6, shift=0.5)
LINE = cloud(50, 1, seed=7), cloud(40, 1, seed=8, shift=1.0)
COPIED = X[torch.arange(30) % 12], Y[torch.arange(40) % 9]

for _name, _precision, _clouds, _options in (
    ("epsilon 1", "single", (X, Y), {"epsilon": 1.0}),
    ("epsilon 0.25", "single", (X, Y), {"epsilon": 0.25}),
    ("epsilon 0.1 in double", "double", (X, Y), {"epsilon": 0.1}),
    ("epsilon 0.01 in double", "double", (X, Y), {"epsilon": 0.01}),
    ("64 dimensions", "single", WIDE, {"epsilon": 8.0, "options": ROUGH}),
    ("one dimension", "double", LINE, {"epsilon": 0.2}),
    ("320 and 250 points", "single", LARGE, {"epsilon": 0.5}),
    ("320 and 250 points in double", "double", LARGE, {"epsilon": 0.2}),
    ("copies of points", "double", COPIED, {"epsilon": 0.1}),
    ("one cloud twice", "double", (X, X.clone()), {"epsilon": 0.1}),
    ("not debiased", "double", (X, Y), {"epsilon": 0.5, "debias": False}),
    ("width of bounds", "double", (X, Y), {"epsilon": 0.1, "options": NARROW}),
    ("schedule of geomloss", "double", (X, Y), {"epsilon": 0.1, "options": GEOMLOSS}),
    ("out of iterations", "double", (X, Y), {"epsilon": 0.01, "options": HURRIED}),
    ("cosine", "double", (X, Y), {"epsilon": 0.05, "cost": otdd.GroundCost(ground="cosine")}),
    ("inner", "single", (X, Y), {"epsilon": 0.5, "cost": otdd.GroundCost(ground="inner")}),
):
    case(f"clouds: {_name}", _precision)(
        partial(divergence, x=_clouds[0], y=_clouds[1], **_options)
    )


@case("clouds: streamed scores")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    little = otdd.ComputeOptions("cpu", precision="double", memory_budget=400_000)
    return divergence(little, *LARGE, epsilon=1.0)


@case("clouds: warm start")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    first = otdd.sinkhorn(X, Y, epsilon=0.3, options=CLOSE, compute=compute)
    return divergence(compute, X + 0.125, epsilon=0.25, start={"xy": first.g})


# Labels

SOURCE = labelled(66, classes=3, seed=11)
TARGET = labelled(52, classes=4, seed=12, shift=0.5)
WEIGHTED = labelled(66, classes=3, seed=11, weights=True)
TABLE = otdd.ClassDistances.from_full(
    1.0 + (torch.arange(7)[:, None] - torch.arange(7)).abs().double() / 2 - torch.eye(7), 3
)


def distance(
    compute: otdd.ComputeOptions, source: Any = SOURCE, target: Any = TARGET, **options: Any
) -> Mapping[str, Any]:
    options = {"epsilon": 0.5, "solver": CLOSE, **options}
    found = otdd.dataset_distance(source, target, compute=compute, **options)
    labels = {} if found.source.labels is None else {"coupling": found.class_coupling()}
    return {"": found, "W": found.class_distances, **labels}


for _name, _precision, _options in (
    ("gaussian", "single", {"epsilon": 1.0}),
    ("gaussian in double", "double", {}),
    ("default epsilon", "double", {"epsilon": None}),
    ("diagonal", "double", {"labels": otdd.labels.Gaussian(diagonal=True)}),
    ("means", "double", {"labels": "means"}),
    ("sinkhorn", "double", {"labels": otdd.labels.Sinkhorn(epsilon=0.5)}),
    ("exact", "double", {"labels": "exact"}),
    ("upper bound", "double", {"labels": "upper_bound"}),
    ("none", "single", {"labels": "none"}),
    ("given", "double", {"labels": otdd.labels.Given(TABLE)}),
    (
        "labels weigh more",
        "double",
        {"lambda_x": 0.25, "lambda_y": 1.0, "epsilon_relative": 0.1, "epsilon": None},
    ),
    ("cosine", "double", {"ground": "cosine", "epsilon": 0.05}),
    ("cosine without labels", "single", {"ground": "cosine", "epsilon": 0.05, "labels": "none"}),
    ("inner with given labels", "double", {"ground": "inner", "labels": otdd.labels.Given(TABLE)}),
):
    case(f"labels: {_name}", _precision)(partial(distance, **_options))


@case("labels: masses and contributions")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    found = otdd.dataset_distance(WEIGHTED, TARGET, epsilon=0.5, solver=CLOSE, compute=compute)
    return {"": found, "contributions": found.contributions().values}


# Tables of classes

THIRD = labelled(40, classes=2, seed=13, shift=-0.5)


def table(compute: otdd.ComputeOptions, **options: Any) -> Mapping[str, Any]:
    return {"W": otdd.class_distances([SOURCE, TARGET, THIRD], **options)}


for _name, _options in (
    ("gaussian", {}),
    ("sinkhorn", {"labels": otdd.labels.Sinkhorn(epsilon=1.0, tolerance=1e-4)}),
    ("exact", {"labels": "exact"}),
    ("cosine", {"ground": "cosine"}),
):
    case(f"classes: {_name}")(partial(table, **_options))

# Matrices

COSTS = (X[:, None] - Y[None]).abs().sum(-1)
FORBIDDEN = COSTS.clone()
FORBIDDEN[(torch.arange(61)[:, None] * 7 + torch.arange(45) * 3) % 5 == 0] = torch.inf


def matrix(
    compute: otdd.ComputeOptions, costs: Any = COSTS, a: Any = A, b: Any = B, **options: Any
) -> Mapping[str, Any]:
    options = {"epsilon": 0.2, "options": CLOSE, **options}
    if isinstance(costs, torch.Tensor):
        costs = costs.to(type_of(compute))
    found = otdd.matrix_transport(costs, a, b, compute=compute, **options)
    return {"": found, "short rows": found.short_rows, "points": found.apply(Y)}


BLOCKS = otdd.CostBlocks(61, 45, lambda rows, columns: COSTS[rows, columns])
HALL = torch.full((4, 3), torch.inf, dtype=torch.float64)
HALL[0, 0] = HALL[1, 0] = HALL[2, 1] = HALL[3, 2] = 1.0
for _name, _precision, _options in (
    ("stored", "double", {}),
    ("stored in single", "single", {}),
    ("relative epsilon", "double", {"epsilon": None, "epsilon_relative": 0.02}),
    ("forbidden pairs", "double", {"costs": FORBIDDEN, "a": None, "b": None}),
    ("in blocks", "double", {"costs": BLOCKS}),
):
    case(f"matrices: {_name}", _precision)(partial(matrix, **_options))


@case("matrices: no plan")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    found = otdd.matrix_transport(HALL, epsilon=0.2, options=CLOSE, compute=compute)
    return {"stopped by": found.stopped_by, "short rows": found.short_rows}


@case("matrices: loss and plan backward")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    costs = COSTS.clone().requires_grad_()
    loss = otdd.matrix_loss(costs, A, B, epsilon=0.5, options=CLOSE, compute=compute)
    (by_loss,) = torch.autograd.grad(loss, costs)
    plan = otdd.matrix_plan(costs, epsilon=0.5, options=CLOSE, compute=compute)
    (by_plan,) = torch.autograd.grad((plan * COSTS.sin().round(decimals=3)).sum(), costs)
    return {"value": loss, "by loss": by_loss, "plan": plan, "by plan": by_plan}


# Many small problems


def balanced(compute: otdd.ComputeOptions, **options: Any) -> Mapping[str, Any]:
    logits = numbers(9, 4, 4, seed=21).requires_grad_()
    found = otdd.doubly_stochastic(logits, compute=compute, **options)
    (found * numbers(9, 4, 4, seed=22)).sum().backward()
    return {"plans": found, "gradient": logits.grad}


case("batched: doubly stochastic")(balanced)
case("batched: doubly stochastic, implicit")(partial(balanced, tolerance=1e-6, gradient="implicit"))


def small_plans(compute: otdd.ComputeOptions, **options: Any) -> Mapping[str, Any]:
    costs = numbers(8, 6, 7, seed=23).square().requires_grad_()
    found = otdd.sinkhorn_plans(costs, epsilon=0.5, compute=compute, **options)
    (found.plans * numbers(8, 6, 7, seed=24)).sum().backward()
    return {"": found, "gradient": costs.grad}


case("batched: plans")(small_plans)
SIZES = torch.tensor([[1 + k % 6, 7 - k % 4] for k in range(8)], dtype=torch.int32)
case("batched: plans of some sizes")(partial(small_plans, sizes=SIZES))


@case("batched: losses of several clouds", "single")
@case("batched: losses of several clouds in double")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    points = X.to(type_of(compute)), Y.to(type_of(compute))
    x = [points[0][: 10 + 9 * k].clone().requires_grad_() for k in range(4)]
    y = [points[1][5 * k :] for k in range(4)]
    losses = otdd.sinkhorn_losses(x, y, epsilon=0.5, options=CLOSE, compute=compute)
    losses.sum().backward()
    return {"values": losses, "gradient": [each.grad for each in x]}


# Several datasets


def pairwise(compute: otdd.ComputeOptions, **options: Any) -> Mapping[str, Any]:
    options = {"epsilon": 0.5, "solver": CLOSE, **options}
    return {"": otdd.pairwise_distances([SOURCE, TARGET, THIRD], compute=compute, **options)}


case("pairwise: gaussian", "single")(partial(pairwise, epsilon=1.0))
case("pairwise: default epsilon, means")(partial(pairwise, epsilon=None, labels="means"))
case("pairwise: cosine")(partial(pairwise, epsilon=0.05, ground="cosine"))


@case("sliced: three datasets")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    found = otdd.sliced_distances([SOURCE, TARGET, THIRD], projections=200, device="cpu")
    return {
        "values": found.values,
        "standard_errors": found.standard_errors,
        "interval": [found.lower, found.upper],
    }


# Flows

SMALL = labelled(30, classes=2, seed=31), labelled(24, classes=2, seed=32, shift=1.0)


def flow(
    compute: otdd.ComputeOptions,
    moves: Mapping[str, Any],
    callbacks: otdd.Callbacks | None = None,
    **options: Any,
) -> otdd.FlowResult:
    plain = {"steps": 3, "stepping": otdd.Stepping(0.25)}
    return otdd.gradient_flow(
        *SMALL,
        otdd.Flow(**{**plain, **moves}),
        callbacks=callbacks,
        compute=compute,
        **{"epsilon": 1.0, "solver": CLOSE, **options},
    )


def moved(found: otdd.FlowResult) -> Mapping[str, Any]:
    return {
        "features": found.samples.features,
        "W": found.class_distances.xy,
        "before": found.before,
        "history": found.history,
        "path": found.trajectory.points,
        "stopped by": found.stopped_by,
    }


def whole_flow(compute: otdd.ComputeOptions, **more: Any) -> Mapping[str, Any]:
    return moved(flow(compute, more.pop("moves"), **more))


FUNCTIONALS = ({"name": "norm", "weight": 0.1}, {"name": "class_repulsion", "weight": 0.05})
NOISY = otdd.Stepping(0.1, "Adam", schedule="cosine", box=(-3, 3), noise=0.05, minibatch=12)
for _name, _precision, _options in (
    ("features", "double", {"moves": {}}),
    ("attached", "double", {"moves": {"mode": "attached"}}),
    ("joint", "double", {"moves": {"mode": "joint"}}),
    (
        "joint, diagonal",
        "double",
        {"moves": {"mode": "joint"}, "labels": otdd.labels.Gaussian(diagonal=True)},
    ),
    ("augmented", "double", {"moves": {"mode": "augmented"}}),
    ("minibatches, noise and Adam", "double", {"moves": {"stepping": NOISY, "seed": 3}}),
    ("functionals", "double", {"moves": {"functionals": FUNCTIONALS, "refresh": 2}}),
    ("until the tolerance", "double", {"moves": {"steps": 20, "tolerance": 0.05}}),
    ("cosine", "double", {"moves": {}, "epsilon": 0.05, "cost": otdd.GroundCost(ground="cosine")}),
):
    case(f"flows: {_name}", _precision)(partial(whole_flow, **_options))


@case("flows: a step in single", "single")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    """A second step would start from points that differ by their rounding.

    What twenty iterations in float32 leave of the marginal error differs by more, and the upper
    bound with it.
    """
    found = flow(compute, {"steps": 1})
    before = {name: getattr(found.before, name) for name in ("divergence", "iterations")}
    return {"before": before, "features": found.samples.features, "W": found.class_distances.xy}


def resumed(compute: otdd.ComputeOptions, mode: str) -> Mapping[str, Any]:
    """Stop after two steps, and go on from the files in a call of its own."""
    asked = iter((False, False, True))
    with tempfile.TemporaryDirectory() as folder:
        moves = {"mode": mode, "steps": 4, "stepping": otdd.Stepping(0.1, "Adam")}
        kept = otdd.Checkpoints(Path(folder), every=1)
        stop = otdd.Callbacks(stop=lambda: next(asked, False))
        first = flow(compute, {**moves, "checkpoints": kept}, stop)
        again = otdd.Checkpoints(Path(folder), every=1, resume=True)
        found = flow(compute, {**moves, "checkpoints": again})
    return {"first": first.stopped_by, "steps": len(first.history), **moved(found)}


for _mode in ("features", "attached", "joint", "augmented"):
    case(f"flows: {_mode}, resumed")(partial(resumed, mode=_mode))


@case("maps: of a flow")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    found = flow(compute, {"keep_moments": True})
    new = labelled(17, classes=2, seed=33)
    return {
        "nearest": found.map("nearest")(new).features,
        "entropic": found.map("entropic")(new).features,
    }


@case("maps: barycentric", "single")
@case("maps: barycentric in double")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    x, y = (points.to(type_of(compute), copy=True) for points in (X, Y))
    x.requires_grad_()
    images = otdd.transport_map(x, y, A, B, epsilon=0.5, options=CLOSE, compute=compute)
    (gradient,) = torch.autograd.grad((images * numbers(61, 3, seed=41)).sum(), x)
    return {"images": images, "gradient": gradient}


# Derivatives


def loss(compute: otdd.ComputeOptions, **options: Any) -> Mapping[str, Any]:
    """The loss and its gradients in points, masses and the cost, as far as they exist."""
    x, y = (points.to(type_of(compute), copy=True).requires_grad_() for points in (X, Y))
    a, b = masses(61).requires_grad_(), B.clone().requires_grad_()
    given = {"epsilon": 0.5, "options": CLOSE, "compute": compute, **options}
    value = otdd.sinkhorn_loss(x, y, a, b, **given)
    gradients = torch.autograd.grad(value, (x, y, a, b))
    return {"value": value, **dict(zip("xyab", gradients, strict=True))}


case("gradients: loss", "single")(loss)
case("gradients: loss in double")(loss)
case("gradients: loss, not debiased")(partial(loss, debias=False))
case("gradients: loss, cosine")(partial(loss, ground="cosine", epsilon=0.05))


@case("gradients: labels, table and weights of the cost")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    full = TABLE.full.clone().requires_grad_()
    weight = torch.tensor(0.75, dtype=torch.float64, requires_grad=True)
    value = otdd.sinkhorn_loss(
        SOURCE.features,
        TARGET.features,
        epsilon=0.5,
        labels_x=SOURCE.labels,
        labels_y=TARGET.labels,
        class_table=full,
        lambda_y=weight,
        options=CLOSE,
        compute=compute,
    )
    by_table, by_weight = torch.autograd.grad(value, (full, weight))
    return {"value": value, "table": by_table, "weight": by_weight}


@case("gradients: twice")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    x = X.clone().requires_grad_()
    value = otdd.sinkhorn_loss(x, Y, epsilon=1.0, options=CLOSE, compute=compute)
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    (second,) = torch.autograd.grad((gradient * numbers(61, 3, seed=42)).sum(), x)
    return {"gradient": gradient, "second": second}


@case("gradients: potentials")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    x = X.clone().requires_grad_()
    f, g = otdd.sinkhorn_potentials(x, Y, epsilon=0.5, options=CLOSE, compute=compute)
    (gradient,) = torch.autograd.grad((f * numbers(61, seed=43)).sum() + g[3], x)
    return {"f": f, "g": g, "gradient": gradient}


def hessian(
    compute: otdd.ComputeOptions,
    x: torch.Tensor = X,
    y: torch.Tensor = Y,
    **options: Any,
) -> Mapping[str, Any]:
    given = {"epsilon": 0.5, "options": CLOSE, "compute": compute, **options}
    x, y = x.to(type_of(compute)), y.to(type_of(compute))
    found = otdd.sinkhorn_hessian(x, y, **given)
    product = found.product(numbers(2, *x.shape, seed=44).to(x.dtype))
    return {
        "value": found.value,
        "directions": product.values,
        **{part: getattr(product, part) for part in ("curvature", "iterations", "converged")},
    }


case("hessians: product", "single")(hessian)
case("hessians: product in double")(hessian)
case("hessians: 320 and 250 points", "single")(partial(hessian, x=LARGE[0], y=LARGE[1]))
PRECISE = otdd.CGOptions(tolerance=1e-8, damping=1e-3)
case("hessians: not debiased, damped")(partial(hessian, debias=False, cg=PRECISE))

# Sampling and studies


@case("sampling: interval")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    rough = otdd.Converged(tolerance=1e-2)
    settings = {"labels": "none", "epsilon": 4.0, "solver": rough, "compute": compute}
    found = otdd.subsample_interval(SOURCE, TARGET, 1.5, count=39, seed=5, **settings)
    return {"interval": [found.lower, found.upper], "values": found.values, "rate": found.rate}


@case("sampling: noise floor")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    settings = {"labels": "none", "epsilon": 1.0, "solver": CLOSE, "compute": compute}
    found = otdd.noise_floor(SOURCE, TARGET, seed=5, **settings)
    return {name: getattr(found, name) for name in ("source", "target", "between", "size")}


def study(
    compute: otdd.ComputeOptions, measures: Sequence[str], count: int = 4, **options: Any
) -> otdd.StudyResult:
    """A study of some tasks, each with rows to train on and rows to test on."""
    tasks = {
        f"task {k}": tuple(
            labelled(rows, classes=2 + k % 2, seed=50 + 2 * k + part, shift=k / 8)
            for part, rows in enumerate((30, 90))
        )
        for k in range(count)
    }
    given = {"epsilon": 1.0, "solver": CLOSE, "projections": 60, "compute": compute, **options}
    with tempfile.TemporaryDirectory() as folder:
        return otdd.Study(tasks, measures=measures, **given).run(folder)


@case("studies: measures without training")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    measures = "otdd", "sliced", "frechet"
    found = study(compute, measures, 3, transfer=None, noise_floor=True)
    return {
        f"{measure}, {part}": found.matrix(measure, part)
        for measure in measures
        for part in ("value", "floor_source", "floor_target")
    }


@case("studies: statistics of transfer", "single")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    protocol = otdd.Transfer(
        seeds=2, source_epochs=2, target_epochs=1, min_target_steps=5, target_samples=8
    )
    found = study(compute, ("otdd", "knn"), transfer=protocol)
    return {
        "gains": found.gains,
        "gain errors": found.gain_errors,
        **{f"{row.measure}, {row.statistic}": row.value for row in found.correlations()},
    }


# Two processes of one gloo group


def of_a_rank(shards: bool) -> Mapping[str, Any]:
    """The distance that two ranks compute, each with its rows or all of them given by rank 0."""

    def of(group: Any, *datasets: otdd.LabeledSamples) -> Mapping[str, Any]:
        compute = otdd.ComputeOptions("cpu", precision="double", group=group)
        found = otdd.dataset_distance(*datasets, epsilon=0.5, solver=CLOSE, compute=compute)
        fields = record({"": found}, precision="double")
        return {name: field.value for name, field in fields.items()}

    if not shards:
        return otdd.led(lambda group: of(group, SOURCE, TARGET))
    rank = torch.distributed.get_rank()
    rows = [
        torch.arange(len(side) * rank // 2, len(side) * (rank + 1) // 2)
        for side in (SOURCE, TARGET)
    ]
    return of("world", SOURCE.take(rows[0]), TARGET.take(rows[1]))


def ranked(compute: otdd.ComputeOptions, shards: bool) -> Mapping[str, Any]:
    return {f"rank {rank}": found for rank, found in enumerate(pool(2).run(of_a_rank, shards))}


case("ranks: shards")(partial(ranked, shards=True))
case("ranks: led")(partial(ranked, shards=False))

# Kernels, in Triton's interpreter

FEW = otdd.Converged(tolerance=0.1, max_iterations=4)


@case("kernels: labels, rounded to float16", "single")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    rounded = otdd.ComputeOptions("cpu", backend="triton")
    given = otdd.labels.Given(TABLE)
    return distance(rounded, epsilon=8.0, labels=given, solver=FEW, debias=False)


@case("kernels: matrix", "single")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    return matrix(KERNELS, COSTS.float(), epsilon=1.0, options=FEW)


@case("kernels: doubly stochastic", "single")
def _(compute: otdd.ComputeOptions) -> Mapping[str, Any]:
    logits = numbers(5, 4, 4, seed=21).float().requires_grad_()
    found = otdd.doubly_stochastic(logits, iterations=5, compute=KERNELS)
    found.square().sum().backward()
    return {"plans": found, "gradient": logits.grad}
