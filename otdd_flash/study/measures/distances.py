"""Measures of a study that compare datasets without networks, and their units of work.

`otdd` is the dataset distance S_epsilon with its solver bounds, equal to that of
`pairwise_distances`. `otce` is the conditional entropy of the target's classes under the plan.
`sliced` is the sliced dataset distance over draws that all tasks share. `frechet` is the squared
Bures-Wasserstein distance between whole datasets, without labels. `study.measures` registers them;
`study.result` reads `epsilon_unit`.

    S_epsilon(x, y) = OT_epsilon(x, y) - OT_epsilon(x, x) / 2 - OT_epsilon(y, y) / 2

K tasks have K self terms and K (K - 1) / 2 cross terms, each solved as `dataset_distance` does and
each a unit of its own (`term_unit`), so that both directions share one. Class distances are
computed in blocks of two tasks (`class_unit`), and the mean cost over all pairs is one unit
(`epsilon_unit`). Units on two tasks i and j have i <= j. Those that others need (`term_unit`,
`class_unit` and `epsilon_unit`) are made once per `Setup`; each call makes the others again, the
same by digest.

Stored units are used as long as their keys are equal, so a change that gives other numbers must
change the key. The datasets are checked and moved to the device once per process (`compared`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otdd_flash.arguments import finite
from otdd_flash.errors import DataNotice, NotConvergedWarning
from otdd_flash.formulas.marginals import Constraints
from otdd_flash.labels import ClassDistances
from otdd_flash.labels.gaussian import gaussian_table
from otdd_flash.labels.measuring import class_block
from otdd_flash.labels.metrics import scale_of
from otdd_flash.labels.pairs import ClassCloud
from otdd_flash.labels.table import class_names
from otdd_flash.operators.comparison import Comparison
from otdd_flash.result import DistanceResult
from otdd_flash.samples import LabeledSamples, same_content
from otdd_flash.sampling.comparison import SubsetComparison, subsample
from otdd_flash.sampling.subsampling import (
    MOST_EXCESS,
    noise_floor,
    subsample_interval,
    subsample_sizes,
)
from otdd_flash.sliced import (
    SlicedResult,
    chunk_distances,
    chunks_of,
    draw_chunk,
    draws_in,
    prepare,
    rows_excess,
)
from otdd_flash.solver.penalties import penalties_of, resolve_constraints
from otdd_flash.solver.solving import solve
from otdd_flash.solver.term import DEFAULT_RELATIVE, epsilon_of_datasets, resolve_epsilon
from otdd_flash.study.measures.base import (
    Measure,
    Pair,
    PairMeasure,
    Reading,
    interval_ends,
)
from otdd_flash.study.setup import Settings, Setup
from otdd_flash.study.units import Content, Store, Unit


class Otdd(Measure):
    """The Optimal Transport Dataset Distance; it is the same in both directions."""

    name = "otdd"
    title = "OTDD"
    nearer = -1
    proven = True
    reads_plans = True

    def units(self, setup: Setup) -> list[Unit]:
        units: list[Unit] = [epsilon_unit(setup)]
        for i, j in setup.pairs():
            units += [*distance_units(setup, i, j), *_sampling_units(setup, i, j).values()]
        return units

    def read(self, setup: Setup, store: Store) -> Iterator[tuple[Pair, Reading]]:
        for i, j in setup.pairs():
            found = distance_of(setup, store, i, j)
            if found is None:
                continue
            for part, unit in _sampling_units(setup, i, j).items():
                if (content := store.known(unit)) is not None:
                    facts = {f"{part}_{key}": value for key, value in content.facts.items()}
                    found = replace(found, **facts)
            yield (i, j), found
            floors: dict[str, Any] = {
                "floor_source": found.floor_target,
                "floor_target": found.floor_source,
            }
            yield (j, i), replace(found, **floors)


def _sampling_units(setup: Setup, i: int, j: int) -> dict[str, Unit]:
    """Return the units of the sampling error that the settings ask for.

    Before their facts, their names are those of fields of `Reading`.
    """
    units: dict[str, Unit] = {}
    if setup.settings.subsample is not None:
        units["sample"] = _sampling_unit("subsample interval", _interval, setup, i, j)
    if setup.settings.noise_floor:
        units["floor"] = _sampling_unit("noise floor", _floor, setup, i, j)
    return units


def distance_units(setup: Setup, i: int, j: int) -> tuple[Unit, ...]:
    """Return the cross term and the two self terms of a distance."""
    return term_unit(setup, i, j), term_unit(setup, i, i), term_unit(setup, j, j)


def distance_of(setup: Setup, store: Store, i: int, j: int) -> Reading | None:
    """Return the distance between two tasks from its terms, or None if one is not done."""
    terms = [store.known(unit) for unit in distance_units(setup, i, j)]
    facts = [term.facts for term in terms if term is not None]
    if len(facts) < len(terms):
        return None
    xy, *selfs = facts
    converged = all(term["converged"] for term in (xy, *selfs))
    if xy["identical"]:
        return Reading(0.0, 0.0, 0.0, converged=converged)
    # As in `Divergence`: a lower bound takes the upper bounds of the self terms, and vice versa.
    value = xy["value"] - sum(term["value"] for term in selfs) / 2
    lower = xy["bounds"][0] - sum(term["bounds"][1] for term in selfs) / 2
    upper = xy["bounds"][1] - sum(term["bounds"][0] for term in selfs) / 2
    return Reading(value, lower, upper, converged=converged)


def term_unit(setup: Setup, i: int, j: int) -> Unit:
    """Return the transport term of two tasks, or the self term of one."""
    return setup.once(("transport term", i, j), partial(_make_term, setup, i, j))


def _make_term(setup: Setup, i: int, j: int) -> Unit:
    settings, names = setup.settings, setup.names
    needs = [class_unit(setup, *pair) for pair in dict.fromkeys(((i, i), (i, j), (j, j)))]
    # An epsilon or penalty relative to the mean cost is read from the unit of the latter.
    if settings.epsilon is None or settings.unbalanced_relative is not None:
        needs.append(epsilon_unit(setup))
    title = f"the self term of {names[i]}"
    if i != j:
        title = f"the cross term of {setup.both(i, j)}"
    key = {"fingerprints": setup.fingerprints(i, j), **settings.transport}
    return Unit("transport term", key, title, partial(_solve_term, setup, i, j), tuple(needs))


def _solve_term(setup: Setup, i: int, j: int, store: Store) -> Content:
    """Solve the term; a cross term also stores the class coupling of its plan."""
    settings = setup.settings
    table, epsilon = table_of(setup, store, i, j), epsilon_of(setup, store)
    comparison = compared(setup, store).of(i, j).with_classes(table.full)
    relative, cost = settings.epsilon_relative, settings.cost
    given = ("epsilon", epsilon) if relative is None else ("epsilon_relative", relative)
    scale = cost.standardized(comparison.given[0].dim)
    with epsilon_of_datasets(*given, epsilon, comparison.mean_cost, scale):
        constraints = constraints_of(setup, store)
        identical = comparison.identical
        comparison = replace(comparison.at(epsilon), debias=identical, constraints=constraints)
        divergence = solve(comparison, settings.solver)
    term = divergence.xy
    facts = {
        "value": term.value,
        "bounds": list(term.bounds),
        "marginal_error": term.marginal_error,
        "iterations": term.iterations,
        "converged": term.converged,
        "identical": identical,
        "epsilon": epsilon,
    }
    if i == j:
        return Content(facts)
    source, target = comparison.given
    result = DistanceResult(
        source,
        target,
        table,
        divergence,
        settings.cost,
        settings.compute,
        method=settings.labels.name,
        target_scale=comparison.target_scale,
        seconds={},
        comparison=comparison,
        constraints=constraints,
    )
    return Content(facts, {"coupling": result.class_coupling()})


def class_unit(setup: Setup, i: int, j: int) -> Unit:
    """Return squared distances between the classes of two tasks, or within one task."""
    return setup.once(("class distances", i, j), partial(_make_classes, setup, i, j))


def _make_classes(setup: Setup, i: int, j: int) -> Unit:
    settings = setup.settings
    key = {
        "fingerprints": setup.fingerprints(i, j),
        "labels": settings.metric,
        "ground": settings.cost.ground,
        **settings.machine,
    }

    def compute(store: Store) -> Content:
        x, y = (compared(setup, store).transformed[place] for place in (i, j))
        found = class_block(x, y, settings.labels, cache_dir=setup.cache_dir)
        return Content(tensors=found._asdict())

    kind = "class distances"
    return Unit(kind, key, f"{kind} of {setup.both(i, j)}", compute)


def epsilon_unit(setup: Setup) -> Unit:
    """Return the mean cost over all pairs, and the regularisation, which may be relative to it."""
    return setup.once("epsilon", partial(_make_epsilon, setup))


def _make_epsilon(setup: Setup) -> Unit:
    pairs = list(setup.pairs())
    if _several(setup):
        pairs = [*((place, place) for place in range(len(setup.tasks))), *pairs]
    return Unit(
        "epsilon",
        {"fingerprints": setup.fingerprints(), **setup.settings.transport},
        "the mean cost of all pairs",
        partial(_settle_epsilon, setup),
        tuple(class_unit(setup, *pair) for pair in pairs),
    )


def _several(setup: Setup) -> bool:
    """Return whether rows have several labels, whose costs depend on W within a task as well."""
    return any(task.train.label_sets is not None for task in setup.tasks)


def _settle_epsilon(setup: Setup, store: Store) -> Content:
    whole, means = compared(setup, store), []
    for i, j in setup.pairs():
        comparison = whole.of(i, j)
        if _several(setup):
            table = table_of(setup, store, i, j).full
        else:
            # The mean of the cross term's cost, to which the other blocks do not belong.
            block = store.found(class_unit(setup, i, j)).tensors["values"]
            table = comparison.classes.around("xy", block)
        means.append(comparison.with_classes(table).mean_cost())
    mean, settings = sum(means, 0.0) / len(means), setup.settings
    relative = settings.epsilon_relative
    # None is the default, for which a constant cost is no error.
    relative = None if relative == DEFAULT_RELATIVE else relative
    *_, epsilon = resolve_epsilon(settings.epsilon, relative, lambda: mean)
    return Content({"epsilon": epsilon, "mean_cost": mean})


def epsilon_of(setup: Setup, store: Store) -> float:
    """Return the regularisation of all pairs, in units of the cost."""
    if setup.settings.epsilon is not None:
        return setup.settings.epsilon
    return float(store.found(epsilon_unit(setup)).facts["epsilon"])


def constraints_of(setup: Setup, store: Store) -> Constraints:
    """Return the constraints on marginals of all pairs."""
    settings = setup.settings

    def mean_cost() -> float:
        return float(store.found(epsilon_unit(setup)).facts["mean_cost"])

    return resolve_constraints(settings.unbalanced, settings.unbalanced_relative, mean_cost)


def table_of(setup: Setup, store: Store, i: int, j: int) -> ClassDistances:
    """Return W over the classes of two tasks, i <= j, in the form of `class_distances`."""
    blocks = [store.found(class_unit(setup, *pair)).tensors for pair in ((i, i), (i, j), (j, j))]
    full = {}
    for part in ("values", "lower", "upper"):
        xx, xy, yy = (block[part] for block in blocks)
        full[part] = torch.cat((torch.cat((xx, xy), 1), torch.cat((xy.T, yy), 1)))
    bounded = not all(torch.equal(full["values"], full[part]) for part in ("lower", "upper"))
    tasks = setup.tasks
    return ClassDistances.from_full(
        full["values"],
        len(class_names(tasks[i].train)),
        class_names(tasks[i].train),
        class_names(tasks[j].train),
        lower=full["lower"] if bounded else None,
        upper=full["upper"] if bounded else None,
    )


def compared(setup: Setup, store: Store) -> Comparison:
    """Return the comparison of all tasks, prepared once per process.

    Raises:
        InputError: the device or its memory does not suffice for a term.
    """
    settings = setup.settings

    def prepare() -> Comparison:
        datasets = [task.train for task in setup.tasks]
        return Comparison.prepare(
            datasets,
            settings.cost,
            settings.compute,
            resident=True,
            target_scale=scale_of(settings.labels),
        )

    return store.cached("comparison", prepare)


def _sampling_unit(
    kind: str,
    compute: Callable[[Setup, int, int, Store], Content],
    setup: Setup,
    i: int,
    j: int,
) -> Unit:
    """Return a unit on the sampling error of two tasks, in the order of the study."""
    return Unit(
        kind,
        setup.settings.sampling,
        f"the {kind} of {setup.both(i, j)}",
        partial(compute, setup, i, j),
        distance_units(setup, i, j),
    )


def _arguments(setup: Setup, store: Store) -> dict[str, Any]:
    """Return the arguments of `dataset_distance`."""
    settings = setup.settings
    return {
        "epsilon": epsilon_of(setup, store),
        "unbalanced": penalties_of(constraints_of(setup, store)),
        "labels": settings.labels,
        "solver": settings.solver,
        "compute": settings.compute,
        **{key: getattr(settings.cost, key) for key in ("lambda_x", "lambda_y", "ground")},
    }


def _interval(setup: Setup, i: int, j: int, store: Store) -> Content:
    """Compute the sampling interval of a distance from subsamples."""
    settings, whole = setup.settings, distance_of(setup, store, i, j)
    assert settings.subsample is not None
    assert whole is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataNotice)
        warnings.simplefilter("ignore", NotConvergedWarning)
        found = subsample_interval(
            *setup.sides(i, j),
            whole.value,
            count=settings.subsample,
            size=settings.subsample_size,
            seed=settings.seed,
            **_arguments(setup, store),
        )
    return Content({"lower": found.lower, "upper": found.upper})


def _floor(setup: Setup, i: int, j: int, store: Store) -> Content:
    """Compute the noise floor of two tasks: distances between two halves of each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)
        arguments = _arguments(setup, store)
        found = noise_floor(*setup.sides(i, j), seed=setup.settings.seed, **arguments)
    return Content({"source": found.source.value, "target": found.target.value})


def conditional_entropy(coupling: Tensor) -> float:
    """Return H(target class | source class) in nats, of the mass (V_x, V_y) that a plan moves.

    It is the transferability term of Tan et al. 2021, OTCE: a transferability metric for
    cross-domain cross-task representations, with the sign of a distance.
    """
    joint = coupling.double() / coupling.double().sum()
    given = joint / joint.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return float(-torch.xlogy(joint, given).sum())


class Otce(Measure):
    """The conditional entropy of the target's classes under the plan, which has a direction."""

    name = "otce"
    title = "OTCE entropy"
    one_class = reads_plans = True
    nearer = -1
    unit = 1.0

    def units(self, setup: Setup) -> list[Unit]:
        units = [epsilon_unit(setup), *(term_unit(setup, i, j) for i, j in setup.pairs())]
        if setup.settings.subsample is not None:
            units += [_coupling_unit(setup, i, j) for i, j in setup.pairs()]
        return units

    def read(self, setup: Setup, store: Store) -> Iterator[tuple[Pair, Reading]]:
        for i, j in setup.pairs():
            term = store.known(term_unit(setup, i, j))
            if term is None:
                continue
            sampled = None
            if setup.settings.subsample is not None:
                sampled = store.known(_coupling_unit(setup, i, j))
            values, converged = _both_ways(term.tensors["coupling"]), bool(term.facts["converged"])
            for pair, value, side in zip(((i, j), (j, i)), values, ("to", "from"), strict=True):
                ends = {} if sampled is None else sampled.facts[side]
                yield pair, Reading(value, converged=converged, **ends)


def _both_ways(coupling: Tensor) -> list[float]:
    return [conditional_entropy(coupling), conditional_entropy(coupling.T)]


def _coupling_unit(setup: Setup, i: int, j: int) -> Unit:
    return _sampling_unit("sampling of the coupling", _coupling_intervals, setup, i, j)


def _coupling_intervals(setup: Setup, i: int, j: int, store: Store) -> Content:
    """Compute sampling intervals of the conditional entropies of two tasks, in both directions."""
    whole = store.found(term_unit(setup, i, j)).tensors["coupling"]
    comparison = SubsetComparison(*setup.sides(i, j), _arguments(setup, store))
    ends = _subsampled(
        setup.settings,
        (comparison.source, comparison.target),
        _both_ways(whole),
        lambda x, y: _both_ways(comparison.distance(x, y).class_coupling()),
    )
    return Content(dict(zip(("to", "from"), ends, strict=True)))


def _subsampled(
    settings: Settings,
    sides: tuple[LabeledSamples, LabeledSamples],
    values: Sequence[float],
    statistics: Callable[[LabeledSamples, LabeledSamples], Sequence[float]],
    excess: float = 0.0,
) -> list[dict[str, float]]:
    """Return `interval_ends` of statistics of two datasets, with the same fraction of both."""
    source, target = sides
    size, other_size = subsample_sizes(source, target, settings.subsample_size)

    def draw(generator: np.random.Generator) -> Sequence[float]:
        drawn = subsample(source, size, generator)
        return statistics(drawn, subsample(target, other_size, generator))

    fraction = (size + other_size) / (len(source) + len(target))
    return interval_ends(settings, values, draw, fraction, excess)


class Sliced(Measure):
    """The mean of W_2^2 over draws, with its 95% interval; it is the same in both directions."""

    name = "sliced"
    title = "s-OTDD"
    one_class = True
    nearer = -1

    def units(self, setup: Setup) -> list[Unit]:
        return [draws_unit(setup, chunk) for chunk in chunks_of(setup.settings.projections)]

    def read(self, setup: Setup, store: Store) -> Iterator[tuple[Pair, Reading]]:
        """Yield the readings of all pairs once all draws are done, and none before."""
        found = [store.known(unit) for unit in self.units(setup)]
        parts = [content.tensors["squared"] for content in found if content is not None]
        if len(parts) < len(found):
            return
        result = SlicedResult.of_draws(torch.cat(parts, 1), setup.names, setup.settings.seed)
        matrices = {"value": result.values, "lower": result.lower, "upper": result.upper}
        for pair in setup.ordered_pairs():
            numbers: dict[str, Any] = {}
            for name, matrix in matrices.items():
                number = float(matrix[pair])
                if not math.isnan(number):
                    root = "root" if name == "value" else f"root_{name}"
                    numbers |= {name: number, root: math.sqrt(max(number, 0.0))}
            yield pair, Reading(**numbers)


def draws_unit(setup: Setup, chunk: int) -> Unit:
    """Return W_2^2 of all pairs of tasks along some of the draws."""
    settings = setup.settings
    key = {
        "fingerprints": setup.fingerprints(),
        "chunk": chunk,
        "draws": draws_in(chunk, settings.projections),
        "seed": settings.seed,
        "device": settings.compute.device,
        "threads": settings.threads,
        "versions": settings.machine["versions"],
    }

    def compute(store: Store) -> Content:
        trained = [task.train for task in setup.tasks]
        datasets = store.cached("sliced", lambda: prepare(trained, settings.compute.device))
        draws = draw_chunk(chunk, settings.projections, trained[0].dim, settings.seed)
        return Content(tensors={"squared": chunk_distances(datasets, draws)})

    return Unit("draws", key, f"chunk {chunk} of the draws", compute)


def frechet_distance(source: LabeledSamples, target: LabeledSamples) -> float:
    """Return the squared Bures-Wasserstein distance of two datasets; 0 if they are equal.

        |m_x - m_y|^2 + tr S_x + tr S_y - 2 tr (S_x^1/2 S_y S_x^1/2)^1/2

    with means m and unbiased covariances S, in units of ||.||^2; labels are ignored.
    """
    if same_content(source, target):
        return 0.0
    clouds = [_whole(source), _whole(target)]
    return float(gaussian_table(clouds, torch.tensor([[0, 1]])))


def _whole(samples: LabeledSamples) -> ClassCloud:
    """Return all rows of positive weight as one class."""
    if samples.weights is None:
        return ClassCloud(samples.name, samples.features, None)
    kept = samples.weights > 0
    weights = samples.weights[kept]
    return ClassCloud(samples.name, samples.features[kept], weights / weights.sum())


class Frechet(PairMeasure):
    """The distance between the Gaussians of two datasets; it is the same in both directions."""

    name = "frechet"
    title = "Fréchet distance"
    nearer = -1
    symmetric = True

    def value(self, source: LabeledSamples, target: LabeledSamples) -> float:
        return frechet_distance(source, target)

    def pair_unit(self, setup: Setup, i: int, j: int) -> Unit:
        """Return the unit of the distance and, if the settings ask for one, its interval."""
        title, settings = f"the Fréchet distance of {setup.both(i, j)}", setup.settings
        sides, fingerprints = setup.sides(i, j), setup.fingerprints(i, j)
        key = {"fingerprints": fingerprints, **settings.sampling, **settings.machine}

        def compute(_: Store) -> Content:
            facts = {"value": finite(title, self.value(*sides))}
            if settings.subsample is not None:
                (ends,) = _subsampled(
                    settings,
                    sides,
                    [facts["value"]],
                    lambda x, y: [self.value(x, y)],
                    min(rows_excess(*sides), MOST_EXCESS),
                )
                facts |= ends
            return Content(facts)

        return Unit("frechet", key, title, compute)
