"""Optimal Transport Dataset Distances between all pairs of several labelled datasets.

    S_epsilon(x, y) = OT_epsilon(x, y) - OT_epsilon(x, x) / 2 - OT_epsilon(y, y) / 2

A self term depends on one dataset and its block of W alone. So K datasets take K self terms and K
(K - 1) / 2 cross terms, and the table W over all their classes is measured once.
`pairwise_distances` is public, and no module of this package calls it; it uses the same comparison
and solver as `otdd.dataset_distance`. With `ground="gromov"`, which has no self terms,
`gromov.distance` measures W and solves every pair. A change must keep every number equal to that of
`dataset_distance` for the same two datasets, the same epsilon and the same settings of labels
(`tests/test_pairwise.py`), also if several ranks solve the terms, so that results of both can be
compared. Settings of labels that are left to the data, the scale of `continuous` and the epsilon of
`sinkhorn`, follow from all K datasets here.

`PairwiseResult` is what it returns; `report.pairwise` shows it; users save and load it. It is saved
as result.json and class_distances.npz with one checksum over both; result.json is written last, so
a directory that holds it is complete. Keys of `to_dict` are the format: results of earlier versions
stay readable.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from otdd_flash.arguments import Count, DatasetGround, NotNegative, Positive, Progress, takes
from otdd_flash.cost.compute import Compute, ComputeOptions
from otdd_flash.cost.facts import Pair
from otdd_flash.cost.ground import NO_OFFSET
from otdd_flash.data.given import Samples
from otdd_flash.distributed.ranks import Ranks, balanced, restored, saved
from otdd_flash.eager import computes
from otdd_flash.errors import ConvergenceError, InputError, NotConvergedWarning, warn
from otdd_flash.files.atomic import json_content, write_json
from otdd_flash.files.tensor_file import (
    CHECKSUM,
    COMPUTE_AGAIN,
    FORMAT,
    FORMAT_KEY,
    SUMMARY_FILE,
    DamagedFileError,
    LaterFormatError,
    check_format,
    checksum,
    other_version,
)
from otdd_flash.gromov.distance import GromovPairs, checked, gromov_options, gromov_table
from otdd_flash.gromov.solve import prepare
from otdd_flash.gromov.starts import STARTS
from otdd_flash.labels import (
    JointClassDistances,
    Labels,
    NoLabels,
    metric_of,
    settled_metric,
)
from otdd_flash.labels.by_ranks import measured_by_ranks
from otdd_flash.labels.measuring import as_datasets, measure_all
from otdd_flash.labels.metrics import refuse_table, with_numbers
from otdd_flash.operators.comparison import Comparison
from otdd_flash.otdd import ground_cost, prepared, refuse_starts
from otdd_flash.raw_labels import frame_of
from otdd_flash.result import versions
from otdd_flash.shown import convergence_text, display, listing, not_sampled
from otdd_flash.solver.divergence import Divergence, whole_term
from otdd_flash.solver.penalties import (
    penalties_of,
    penalties_text,
    refuse_unbalanced,
    resolve_constraints,
)
from otdd_flash.solver.schedules import Converged, Exact, Schedule, schedule_of
from otdd_flash.solver.shortfall import joint_shortfall
from otdd_flash.solver.solving import solve
from otdd_flash.solver.term import (
    epsilon_of_datasets,
    largest_tolerance,
    resolve_epsilon,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@computes
@takes()
def pairwise_distances(
    datasets: Sequence[Samples],
    *,
    epsilon: NotNegative | None = None,
    epsilon_relative: NotNegative | None = None,
    labels: Labels = "gaussian",
    class_distances: JointClassDistances | None = None,
    min_class_size: Count | None = None,
    lambda_x: NotNegative = 0.5,
    lambda_y: NotNegative | None = None,
    ground: DatasetGround = "sqeuclidean",
    starts: Count | None = None,
    unbalanced: Positive | None = None,
    unbalanced_relative: Positive | None = None,
    solver: Schedule | None = None,
    compute: Compute | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    class_progress: Progress | None = None,
    progress: Progress | None = None,
) -> PairwiseResult:
    """Compute the distances between several labelled datasets, each with each.

    Every number is that of `dataset_distance` between the same two datasets, the earlier one as the
    source, at the same epsilon. If labels are `continuous` or `sinkhorn` without a scale or an
    epsilon of their own, these are of all datasets together.

    Args:
        datasets: K >= 2 labelled datasets of one dimension, on one device, as samples, as arrays
            (features, labels) or as any datasets of vectors that `otdd.embed` takes.
        epsilon: entropic regularisation of all pairs, in units of the cost.
        epsilon_relative: the same as a multiple of the mean cost, the mean over all pairs of
            different datasets; instead of `epsilon`. Neither given means 0.01 of that mean; 0 is
            the unregularised cost, by `otdd.Exact()`.
        labels: how distances between classes are measured, a name such as "gaussian", a metric such
            as `otdd.labels.Gaussian(diagonal=True)`, or a function f(x, y) of the points (n, d) and
            (m, d) of two classes that returns their squared distance.
        class_distances: a table to use instead of measuring one, from `otdd.class_distances` on the
            same datasets or on those of which they are subsets; classes are matched by name.
        min_class_size: drop classes with fewer samples, with a notice.
        lambda_x: weight of the squared distance between features, or of the `ground` cost.
        lambda_y: weight of the squared distance between classes, as for `dataset_distance`.
        ground: the cost between features, as for `dataset_distance`. With `gromov`, which is not
            debiased, datasets may have any dimensions, and `converged` tells of one solve a pair.
        starts: as for `dataset_distance`; `details["gromov"]` of the result holds where each start
            led.
        unbalanced: rho, the price of mass that is not matched, in units of the cost, for all pairs.
        unbalanced_relative: the same as a multiple of the mean cost over all pairs of different
            datasets.
        solver: how to solve and when to stop, `otdd.Converged()` by default.
        compute: `otdd.ComputeOptions`, or only a device.
        cache_dir: folder of a database of measured class distances, keyed by the content of the
            classes; known distances are read from it. None: no cache.
        class_progress: called as class_progress(pairs of classes measured, their total).
        progress: called as progress(terms solved, their total).

    Raises:
        InputError: the request cannot be met; the message says what to change.
        ConvergenceError: `solver.require_convergence` is set and a term stopped early.

    Warns:
        NotConvergedWarning: a term stopped early.
    """
    cost, compute = ground_cost(lambda_x, lambda_y, ground), ComputeOptions.of(compute)
    whole = as_datasets(datasets, at_least=2)
    metric = metric_of(labels)
    refuse_table(metric, class_distances)
    metric, whole = with_numbers(metric, whole)
    options, epsilon, epsilon_relative = schedule_of(solver, epsilon, epsilon_relative)
    if ground != "gromov":
        refuse_starts(starts)
        refuse_unbalanced(unbalanced, unbalanced_relative, options, debias=True, ground=ground)
    if not isinstance(options, Exact) and (
        not isinstance(options, Converged) or options.bound_width or options.max_seconds
    ):
        raise InputError(
            "pairwise_distances solves every term once, to solver.tolerance; solver.bound_width, "
            "solver.max_seconds and solver.schedule=geomloss are for dataset_distance"
        )
    measured_by = metric if class_distances is None else None
    gromov = ground == "gromov"
    if gromov:
        relaxed = unbalanced if unbalanced_relative is None else unbalanced_relative
        options = gromov_options(
            measured_by, lambda_x, lambda_y, options, compute, debias=False, unbalanced=relaxed
        )
        sides = checked(whole, measured_by, min_class_size)
        comparison = prepare(sides, cost, compute)
    else:
        sides, comparison = prepared(whole, cost, compute, measured_by, min_class_size)

    started = time.perf_counter()
    if class_distances is None and gromov:
        table = gromov_table(sides, metric)
    elif class_distances is None:
        metric = settled_metric(metric, epsilon, comparison.transformed, comparison.streaming)
        measure = measured_by_ranks(metric, compute.group if comparison.streaming is None else None)
        table = measure_all(
            comparison.transformed, measure, cache_dir=cache_dir, progress=class_progress
        )
    else:
        table = class_distances.named_for(sides)
    measured = time.perf_counter()
    labelled = None if isinstance(measured_by, NoLabels) else table
    inner = GromovPairs(comparison, labelled) if gromov else None
    mean = _mean_cost(comparison, table) if inner is None else inner.mean_cost
    scale = cost.standardized(sides[0].dim)
    name, given, used = resolve_epsilon(epsilon, epsilon_relative, lambda: mean)
    with epsilon_of_datasets(name, given, used, lambda: mean, scale):
        constraints = resolve_constraints(unbalanced, unbalanced_relative, lambda: mean)
        comparison = replace(comparison.at(used), constraints=constraints)
        # A dataset's self term comes before the pairs that need it; `gromov` has none.
        places = range(len(sides))
        pairs = [(i, j) for j in places for i in (*(() if gromov else (j,)), *range(j))]
        terms: Iterator[Divergence | None]
        if inner is None:
            terms = _terms(comparison, table, options, pairs)
        else:
            terms = inner.solve(used, options, starts or STARTS, pairs)
        found = _solve_all(table, options, progress, pairs, terms)
    solved = time.perf_counter()
    labels_epsilon = getattr(metric, "epsilon", None) if class_distances is None else None
    streaming, target_scale = comparison.streaming, comparison.target_scale
    streamed = None if streaming is None else streaming.tally.summary(solved - measured)
    details = {
        "classes": [list(names) for names in table.class_names],
        "n": [len(samples) for samples in sides],
        "d": [samples.dim for samples in sides] if gromov else sides[0].dim,
        "labels": "given" if measured_by is None else metric.name,
        **({} if labels_epsilon is None else {"labels_epsilon": labels_epsilon}),
        **({} if constraints.exact else {"unbalanced": penalties_of(constraints)}),
        "mean_cost": mean,
        **cost.to_dict(),
        **({} if inner is None else {"ground": ground, "gromov": _records(inner)}),
        **({} if target_scale is None else {"target_scale": list(target_scale)}),
        "fingerprints": [samples.fingerprint for samples in sides],
        "seconds": {"class_distances": measured - started, "solve": solved - measured},
        "versions": versions(),
        "device": found[0, 1].device,
        "backend": found[0, 1].backend,
        "precision": compute.precision,
        **({} if streamed is None else {"streamed": dict(streamed)}),
    }
    return _gathered(found, table, details)


def _records(inner: GromovPairs) -> dict[str, Any]:
    """Return where each start of each pair led, and more, by the places of the pair."""
    return {f"{i},{j}": record.to_dict() for (i, j), record in inner.records.items()}


def _mean_cost(comparison: Comparison, table: JointClassDistances) -> float:
    """Return the mean cost over all pairs of different datasets."""
    pairs = combinations(range(len(comparison.transformed)), 2)
    means = [_of(comparison, table, pair).mean_cost() for pair in pairs]
    return sum(means, 0.0) / len(means)


def _of(comparison: Comparison, table: JointClassDistances, pair: Pair) -> Comparison:
    """Return the comparison of two of the datasets, with their class distances."""
    return comparison.of(*pair).with_classes(table.between(*pair).full)


def _solve_all(
    table: JointClassDistances,
    options: Schedule,
    progress: Progress | None,
    pairs: Sequence[Pair],
    terms: Iterator[Divergence | None],
) -> dict[Pair, Divergence]:
    """Solve every term once: the divergence of every pair (i, j), i <= j; of itself it is 0.

    `terms` yields those of `pairs`, None for the divergence of equal datasets.

    Raises:
        ConvergenceError: convergence is required and a term stopped early.
    """
    found: dict[Pair, Divergence] = {}

    def message(late: Sequence[Pair]) -> str:
        some = {pair: found[pair] for pair in late}
        names = [display(name) for name in table.datasets]
        return joint_shortfall(some, options, partial(_named, names), some[late[0]].xy.f.dtype)

    for (i, j), solved in zip(pairs, terms, strict=True):
        if solved is None:
            solved = found[j, j]
        elif i < j and (i, i) in found:
            solved = replace(solved, xx=found[i, i].xx, yy=found[j, j].xx)
        found[i, j] = solved
        if not solved.converged and options.require_convergence:
            raise ConvergenceError(message([(i, j)]))
        if progress is not None:
            progress(len(found), len(pairs))
    late = [pair for pair, divergence in found.items() if not divergence.converged]
    if late:
        warn(message(late), NotConvergedWarning)
    return found


def _named(names: Sequence[str], pairs: Sequence[Pair]) -> str:
    shown = [f"{names[i]} and {names[j] if i < j else 'itself'}" for i, j in pairs[:5]]
    more = f" and {len(pairs) - 5} more" if len(pairs) > 5 else ""
    return f"{'; '.join(shown)}{more}"


def _terms(
    comparison: Comparison,
    table: JointClassDistances,
    options: Schedule,
    pairs: Sequence[Pair],
) -> Iterator[Divergence | None]:
    """Yield the terms of pairs, solved by this process or distributed over ranks by size."""
    if not isinstance(ranks := comparison.compute.group, Ranks):
        yield from (_term(comparison, table, options, pair) for pair in pairs)
        return
    sizes = [len(side) for side in comparison.transformed]
    work = [sizes[i] * sizes[j] / (2 if i == j else 1) for i, j in pairs]
    content = saved((comparison, table, options))
    yield from ranks.order(_solve_owned, content, pairs, balanced(work, ranks.size))


def _term(
    comparison: Comparison, table: JointClassDistances, options: Schedule, pair: Pair
) -> Divergence | None:
    """Solve a self term, or a cross term alone; return None for equal datasets."""
    one = _of(comparison, table, pair)
    if pair[0] == pair[1]:
        found = solve(one, options)
    elif one.identical:
        return None
    else:
        found = solve(replace(one, debias=False), options)
    xy, xx, yy = (
        None if term is None else whole_term(term, one) for term in (found.xy, found.xx, found.yy)
    )
    assert xy is not None
    return replace(found, xy=xy, xx=xx, yy=yy, offset=NO_OFFSET)


def _solve_owned(
    ranks: Ranks, content: bytes, pairs: Sequence[Pair], owners: Sequence[int]
) -> list[Divergence | None]:
    """Solve this rank's share of the terms and gather all; run by every rank."""
    comparison, table, options = restored(content)
    own = [place for place, owner in enumerate(owners) if owner == ranks.rank]
    found = ranks.together(
        lambda: {place: _term(comparison, table, options, pairs[place]) for place in own}
    )
    together: dict[int, Divergence | None] = {}
    for others in ranks.all_gathered_objects(saved(found)):
        together |= restored(others)
    return [together[place] for place in range(len(pairs))]


TABLE_FILE = "class_distances.npz"
MATRICES = ("values", "lower", "upper", "marginal_errors")
# The meaning of null in result.json, which holds finite numbers only.
UNKNOWN = {"values": math.nan, "lower": -math.inf, "upper": math.inf, "marginal_errors": math.inf}


class ComparedPair(NamedTuple):
    """The distance between two of several datasets.

    Attributes:
        source: the name of the earlier dataset.
        target: the name of the later one.
        value: S_epsilon, in units of the cost.
        lower: its lower solver bound.
        upper: its upper solver bound.
        marginal_error: the largest of the three terms'.
        converged: whether all three reached the tolerance.
    """

    source: str
    target: str
    value: float
    lower: float
    upper: float
    marginal_error: float
    converged: bool


@dataclass(frozen=True, eq=False, repr=False)
class PairwiseResult:
    """The distances between K datasets, each with each.

    Attributes:
        values: (K, K) float64, S_epsilon in units of the cost; symmetric, 0 on the diagonal.
        lower: (K, K) lower solver bounds.
        upper: (K, K) upper solver bounds; every interval holds S_epsilon of the rows compared.
        marginal_errors: (K, K) the largest L1 marginal error of a pair's three terms; on the
            diagonal that of the self term.
        class_distances: W over the classes of all datasets.
        converged: (K, K) bool, whether all terms of a pair reached their tolerance.
        epsilon: the regularisation of all pairs, in units of the cost.
        tolerance: the largest marginal error accepted for a term, as asked for or as rounding
            allows; None at epsilon 0, where the width of the bounds decides.
        details: the other content of result.json.
    """

    values: Tensor
    lower: Tensor
    upper: Tensor
    marginal_errors: Tensor
    converged: Tensor = field(kw_only=True)
    class_distances: JointClassDistances = field(kw_only=True)
    epsilon: float = field(kw_only=True)
    tolerance: float | None = field(kw_only=True)
    details: Mapping[str, Any] = field(kw_only=True)

    def __repr__(self) -> str:
        """Return the number of datasets and epsilon; `pairs()` lists distances."""
        converged, penalties = (
            convergence_text(bool(self.converged.all())),
            self.details.get("unbalanced"),
        )
        return (
            f"PairwiseResult({len(self.names)} datasets: {listing(self.names, 12)}; "
            f"epsilon={self.epsilon:.6g}, {penalties_text(penalties)}{converged})"
        )

    def __str__(self) -> str:
        """Return the line of `repr`, and one on the sampling error, which bounds do not hold."""
        return f"{self!r}\n{not_sampled(self.details.get('ground', ''))}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the datasets, in the order of rows; with indices where two share a name."""
        return self.class_distances.datasets

    @property
    def mean_cost(self) -> float | None:
        """The mean cost over all pairs; None in results of earlier versions."""
        return self.details.get("mean_cost")

    @property
    def method(self) -> str:
        """The method of class distances."""
        return str(self.details["labels"])

    def pairs(self) -> tuple[ComparedPair, ...]:
        """Return one row for every pair of different datasets, the nearest first."""
        rows = [
            ComparedPair(
                self.names[i],
                self.names[j],
                value=float(self.values[i, j]),
                lower=float(self.lower[i, j]),
                upper=float(self.upper[i, j]),
                marginal_error=float(self.marginal_errors[i, j]),
                converged=bool(self.converged[i, j]),
            )
            for i, j in combinations(range(len(self.names)), 2)
        ]
        return tuple(sorted(rows, key=lambda row: row.value))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of result.json, in JSON's own types; infinite numbers are None."""
        content = {
            "datasets": list(self.names),
            **{key: getattr(self, key).tolist() for key in MATRICES},
            "converged": self.converged.tolist(),
            "epsilon": self.epsilon,
            "tolerance": self.tolerance,
            **self.details,
        }
        return json_content(content)

    def to_frame(self) -> DataFrame:
        """Return a pandas table of one row a pair of different datasets, the nearest first.

        The columns are those of `pairs()`, with values and bounds in units of the cost, and
        `epsilon`, the same for all pairs.
        """
        rows = [(*pair, self.epsilon) for pair in self.pairs()]
        return frame_of(rows, {**get_type_hints(ComparedPair), "epsilon": float})

    def plot(self, order: str = "given") -> Figure:
        """Draw the distances as a table of colours, the report's distances.png.

        Args:
            order: order of the datasets: `given`, or `hierarchical` for near ones side by side.

        Returns:
            A matplotlib figure that pyplot does not register. Notebooks display it, and `savefig`
            writes it to a file.

        Raises:
            InputError: no such order.
        """
        from otdd_flash.report.pairwise import plot_distances

        return plot_distances(self, order)

    @takes()
    def save(self, path: str | Path) -> Path:
        """Write the directory `path`: result.json, and W as class_distances.npz.

        Returns:
            The directory.

        Raises:
            InputError: it cannot be written.
        """
        path = Path(path)
        # A directory that holds result.json is complete: the file is removed first and written
        # last.
        (path / SUMMARY_FILE).unlink(missing_ok=True)
        self.class_distances.save(path / TABLE_FILE)
        summary = {**self.to_dict(), FORMAT_KEY: FORMAT}
        mark = _checksum(summary, path / TABLE_FILE)
        write_json(path / SUMMARY_FILE, {**summary, CHECKSUM: mark})
        return path

    @classmethod
    @takes()
    def load(cls, path: str | Path) -> PairwiseResult:
        """Read a directory that `save` wrote.

        Raises:
            InputError: the directory holds no complete result, a damaged one, or one of a later
                version.
        """
        path = Path(path)
        versions: dict[str, Any] = {}
        try:
            content = json.loads((path / SUMMARY_FILE).read_text(encoding="utf-8"))
            if content.pop(CHECKSUM) != _checksum(content, path / TABLE_FILE):
                raise DamagedFileError("its checksum does not match")
            versions = dict(content.get("versions", {}))
            check_format(path / SUMMARY_FILE, {**versions, FORMAT_KEY: content.pop(FORMAT_KEY, 0)})
            del content["datasets"]
            tolerance = content.pop("tolerance")
            return cls(
                *(_matrix(content.pop(key), UNKNOWN[key]) for key in MATRICES),
                converged=torch.tensor(content.pop("converged"), dtype=torch.bool),
                class_distances=JointClassDistances.load(path / TABLE_FILE),
                epsilon=float(content.pop("epsilon")),
                tolerance=None if tolerance is None else float(tolerance),
                details=content,
            )
        except DamagedFileError as error:
            raise InputError(
                f"the result in {path} is damaged ({error}); {COMPUTE_AGAIN}"
            ) from error
        except LaterFormatError:
            raise
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            by = other_version(versions) if versions else ""
            raise InputError(
                f"no complete result in {path} ({error}{by}); PairwiseResult.save writes "
                f"{SUMMARY_FILE} and {TABLE_FILE} there"
            ) from error


def _matrix(rows: Sequence[Sequence[float | None]], unknown: float) -> Tensor:
    known = [[unknown if number is None else number for number in row] for row in rows]
    return torch.tensor(known, dtype=torch.float64)


def _checksum(summary: Mapping[str, Any], table: Path) -> str:
    """Return one checksum over the content of result.json and the table's file."""
    content = hashlib.sha256(table.read_bytes()).hexdigest()
    return checksum({}, {"summary": json.dumps(summary, sort_keys=True), "table": content})


def _gathered(
    found: Mapping[Pair, Divergence], table: JointClassDistances, details: Mapping[str, Any]
) -> PairwiseResult:
    """Return the result of K datasets from the divergences of their pairs (i, j), i <= j."""
    count = len(table.datasets)
    numbers = torch.zeros(len(MATRICES), count, count, dtype=torch.float64)
    # Without self terms nothing is solved on the diagonal.
    converged = torch.eye(count, dtype=torch.bool)
    for (i, j), one in found.items():
        row = torch.tensor((one.value, *one.bounds, one.marginal_error), dtype=torch.float64)
        numbers[:, i, j] = numbers[:, j, i] = row
        converged[i, j] = converged[j, i] = one.converged
    tolerance = largest_tolerance(divergence.tolerance for divergence in found.values())
    return PairwiseResult(
        *numbers,
        converged=converged,
        class_distances=table,
        epsilon=found[0, 1].xy.epsilon,
        tolerance=tolerance,
        details=details,
    )
