"""`DistanceResult`: the distance with its bounds, what can be asked of the plan, and its files.

`otdd`, `gromov.distance` and `study.measures.distances` make it. `commands.compare` and
`report.distance` show it, and `commands.results` logs it. `sampling.comparison` returns one for
drawn rows, to `sampling.subsampling` and `study.measures.distances`. `pairwise`, `flows.result`,
`mixing.mixture`, `ranking` and `study.setup` write `versions` into their own files.

A change must respect three things. Plans are evaluated again from potentials and the cost, never
stored, because they have n x m entries; only at epsilon 0 the term itself has the plan
(`ExactTerm`). Methods that read the datasets again (those that use the plan, and `to_dict`) refuse
datasets that were changed in place, by `_check_unchanged`, because the potentials are not those of
the new points. Saved results must stay readable: keys of `to_dict` and names of tensors are their
format (`tests/files/test_files_of_today.py`).
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from otdd_flash import __version__
from otdd_flash.arguments import Count, Index, takes
from otdd_flash.contributions import Contributions, contributions_of, exact_contributions
from otdd_flash.cost.compute import Compute, ComputeOptions
from otdd_flash.cost.facts import SIDES
from otdd_flash.cost.ground import GroundCost
from otdd_flash.derivatives.centred import conditional_means, origin_near
from otdd_flash.derivatives.groups import settle, settle_images
from otdd_flash.devices import resolve_device
from otdd_flash.distributed.exchange import ALONE, Shared
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.files.atomic import json_content
from otdd_flash.files.tensor_file import read_result, write_result
from otdd_flash.fingerprint import Unchanged
from otdd_flash.formulas.marginals import EXACT, Constraints
from otdd_flash.gromov.record import GromovRecord
from otdd_flash.gromov.solve import last_linearised, prepare
from otdd_flash.label_sets import named_sets
from otdd_flash.labels import ClassDistances, NoLabels
from otdd_flash.labels.metrics import targets_of
from otdd_flash.operators.base import Applied, Operator
from otdd_flash.operators.comparison import Comparison
from otdd_flash.raw_labels import frame_of
from otdd_flash.real_numbers import real_tensor
from otdd_flash.samples import TENSORS, LabeledSamples
from otdd_flash.shown import bounded, bounded_energy, convergence_text, not_sampled
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.penalties import penalties_of, penalties_text, resolve_constraints
from otdd_flash.solver.term import ExactTerm, TransportTerm, plan_tensors, with_plan
from otdd_flash.unmatched import TargetHistogram, Unmatched, histogram, mean_changes, unmatched_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True, eq=False, repr=False)
class DistanceResult:
    """The distance between two datasets, with all that is needed to use and to check it.

    Attributes:
        source: the n points that were compared.
        target: the m points they were compared with.
        class_distances: W in blocks, squared distances between classes.
        divergence: the solved transport problems, called terms: the cross term and, if debiased,
            both self terms.
        cost: the ground cost and its weights.
        compute: where and how this was computed, by default also the plan.
        method: the method of class distances.
        labels_epsilon: the regularisation of class distances by `sinkhorn`, also where a tree adds
            them, in units of ||.||^2; else None.
        target_scale: with `labels="continuous"`, what each of the q numbers of a row was divided
            by; else None.
        seconds: wall time of each phase.
        comparison: both datasets on the device, from which the plan is computed; a loaded result
            prepares them when they are first needed.
        streamed: for points that did not fit on the device: bytes read, speed, and whether the
            computation waited for them; else None.
        shared: the number of processes that shared the passes, the bytes that rank 0 sent and
            received, and the layout. Methods that use the plan run in this process alone.
        unchanged: fingerprints of both datasets; methods raise once one of them was modified in
            place. None if nothing else shares their memory.
        constraints: whether the marginals of the plan are exact or relaxed, and by which penalties.
        required: what happens if the masses leave potentials of groups of points undetermined: True
            raises an error, as with `require_convergence`, False warns. False for a loaded result.
        gromov: with `ground="gromov"`: lower bounds, starts and the last linearised cost.
            `divergence` is the solve of that cost, except for its value and bounds. Else None.
    """

    source: LabeledSamples
    target: LabeledSamples
    class_distances: ClassDistances
    divergence: Divergence
    cost: GroundCost
    compute: ComputeOptions
    method: str = field(kw_only=True)
    labels_epsilon: float | None = field(default=None, kw_only=True)
    target_scale: tuple[float, ...] | None = field(default=None, kw_only=True)
    seconds: dict[str, float] = field(kw_only=True)
    comparison: Comparison | None = field(default=None, kw_only=True, repr=False)
    shared: Shared = field(default=ALONE, kw_only=True)
    streamed: Mapping[str, Any] | None = field(default=None, kw_only=True)
    unchanged: Unchanged | None = field(default=None, kw_only=True, repr=False)
    required: bool = field(default=False, kw_only=True, repr=False)
    constraints: Constraints = field(default=EXACT, kw_only=True)
    gromov: GromovRecord | None = field(default=None, kw_only=True, repr=False)

    def __repr__(self) -> str:
        """Return the distance, its solver bounds and what was compared, in one line."""
        penalties = penalties_text(penalties_of(self.constraints))
        shown = bounded if self.gromov is None else bounded_energy
        return (
            f"DistanceResult({shown(self.value, *self.bounds)}, "
            f"epsilon={self.epsilon:.6g}, {penalties}{convergence_text(self.converged)}, "
            f"{self.source!r} to {self.target!r}, class distances {self.method})"
        )

    def __str__(self) -> str:
        """Return the line of `repr`, and one on the sampling error, which bounds do not hold."""
        if self.divergence.identical:
            return repr(self)
        return f"{self!r}\n{not_sampled(self.ground)}"

    @property
    def value(self) -> float:
        """The distance S_epsilon, in units of the cost; never clipped at 0.

        With `otdd.GeomlossSchedule` it is the value of geomloss, which may lie outside `bounds`.
        """
        return self.divergence.value

    @property
    def bounds(self) -> tuple[float, float]:
        """Solver bounds (lower, upper): an interval that holds S_epsilon of these rows.

        They hold even if the solver stopped early. Two errors are not in the interval. One is the
        sampling error, how far other rows of the same datasets would be apart: see
        `subsample_interval`. The other is the error of the class distances, which are between
        `class_distances.lower` and `.upper`: it moves S_epsilon by at most 2 lambda_y times the
        largest difference.
        """
        return self.divergence.bounds

    @property
    def converged(self) -> bool:
        """Whether the solve reached what its options ask for."""
        return self.divergence.converged

    @property
    def epsilon(self) -> float:
        """The regularisation used, in units of the cost."""
        return self.divergence.xy.epsilon

    @property
    def mean_cost(self) -> float:
        """The mean cost, the unit of `epsilon_relative`.

        Raises:
            InputError: a dataset was changed in place since.
        """
        self._check_unchanged()
        return self._mean_cost

    @property
    def ground(self) -> str:
        """The ground cost; with `gromov` the attribute `cost` is the linearised one."""
        return self.cost.ground if self.gromov is None else "gromov"

    @cached_property
    def _mean_cost(self) -> float:
        if self.gromov is not None:
            return self.gromov.independent
        if self.comparison is not None:
            return self.comparison.mean_cost()
        # On the datasets' device, which may not be the device on which a loaded result was
        # computed.
        here = replace(self.compute, device=str(self.source.features.device))
        sides = self.source, self.target
        # No operator is built, so that it need not be possible here.
        scale = self.target_scale
        prepared = Comparison.prepare(sides, self.cost, here, pairs=(), target_scale=scale)
        return prepared.with_classes(self.class_distances.full).mean_cost()

    @property
    def class_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the V_x source and the V_y target classes; unlabelled data are one class."""
        return self.class_distances.names_x or (), self.class_distances.names_y or ()

    @property
    def potentials(self) -> tuple[Tensor, Tensor]:
        """The cross term's potentials f (n,) and g (m,), in units of the cost.

        With `ground="inner"` they belong to the equivalent squared distances: terms of one side
        alone are left out. Offsets between groups of points that exchange almost no mass are
        corrected here. Methods that use the plan take the uncorrected potentials, `divergence.xy`.

        Raises:
            ConvergenceError: the masses leave potentials undetermined, and `required` is set.

        Warns:
            NotConvergedWarning: the same, if `required` is not set; warned once.
        """
        return self._settled.f, self._settled.g

    @computes
    def plan(self) -> Tensor:
        """Return the plan P (n, m) at epsilon 0: sparse COO, coalesced, float64.

        Raises:
            InputError: epsilon is positive: the plan then has n x m entries and is not sparse.
        """
        term = self.divergence.xy
        if not isinstance(term, ExactTerm):
            raise InputError(
                f"the plan at epsilon={term.epsilon:g} has {len(term.f):,} x {len(term.g):,} "
                "entries, which are never stored; apply_plan(values) multiplies by it"
            )
        return term.plan()

    @computes
    def apply_plan(self, values: Any) -> Tensor:
        """Return P V for V (m,) or (m, k), streamed: the n x m plan is never stored.

        Raises:
            InputError: V does not have m rows, or holds NaN or infinite values.
        """
        columns = real_tensor("values", values)
        if columns.ndim not in (1, 2) or columns.shape[0] != len(self.target):
            raise InputError(
                f"apply_plan takes one row per target sample, ({len(self.target)},) or "
                f"({len(self.target)}, k), got {tuple(columns.shape)}"
            )
        if not bool(torch.isfinite(columns).all()):
            raise InputError("apply_plan takes finite values, got NaN or infinite ones")
        matrix = columns.unsqueeze(1) if columns.ndim == 1 else columns
        applied = self._applied(matrix).values
        return applied.squeeze(1) if columns.ndim == 1 else applied

    @computes
    def class_coupling(self) -> Tensor:
        """Return the mass moved from each source class to each target class, (V_x, V_y) float64.

        If rows have several labels, each label moves its share of the row. The entries are scaled
        to sum to 1, without the rounding error of the sum, or to the mass that moves if marginals
        are relaxed.
        """
        per_row = self._applied(self.target.shares.float()).values.double()
        coupling = self.source.shares.to(per_row.device).T @ per_row
        return (coupling / coupling.sum() if self.constraints.exact else coupling).cpu()

    @computes
    def target_changes(self) -> Tensor:
        """Return the mean of |t_i - s_j| under the plan, (q,) float64, in units of the numbers.

        The mean is over the mass that moves.

        If the target has more than 512 different numbers, neighbours are grouped; within a group,
        changes up and down cancel.

        Raises:
            InputError: rows have no numbers.
        """
        self._check_numbers()
        self._check_unchanged()
        return self._target_changes.clone()

    @cached_property
    def _target_changes(self) -> Tensor:
        return mean_changes(self._applied, self.source, self.target)

    @computes
    @takes()
    def target_histogram(self, column: Index = 0, bins: Count = 24) -> TargetHistogram:
        """Return the mass that moves between intervals of one column of numbers.

        Args:
            column: of the numbers, from 0.
            bins: intervals of equal length over the numbers of both sides.

        Raises:
            InputError: rows have no numbers, or no such column.
        """
        self._check_numbers()
        count = targets_of(self.source).shape[1]
        if column >= count:
            raise InputError(f"there is no column {column} of numbers; there are {count}, from 0")
        exact = self.constraints.exact
        return histogram(self._applied, self.source, self.target, column, bins, exact=exact)

    @computes
    def barycentric_map(self) -> Tensor:
        """Return where the plan sends each source point on average: (P y)_i / r_i, shape (n, d_y).

        Points without mass are mapped too, by the conditional plan that their potential defines; at
        epsilon 0 there is no such plan, and they are mapped to NaN, as are rows of less than about
        1e-16 of the mass.

        Raises:
            InputError: there is not enough memory.
            ConvergenceError: the masses leave images of points without mass undetermined, and
                `required` is set.

        Warns:
            NotConvergedWarning: the same, if `required` is not set.
        """
        self._check_unchanged()
        if isinstance(self.divergence.xy, ExactTerm):
            found = self.divergence.xy.applied(self._prepared.given_points(1))
            return found.values / found.masses[:, None]
        with self._prepared.within_memory():
            return self._conditional_means()

    @computes
    def contributions(self) -> Contributions:
        """Compute how much of the distance each source row contributes: s (n,), in cost units.

        Without row i the distance changes by -a_i s_i to first order. Class distances by `gaussian`
        and `means` change with the masses; others are fixed, which `through_classes` of the result
        says. At epsilon 0 the distance has kinks: class distances are fixed, s_i is the mean cost
        of row i under the plan, and `slopes` holds the least and the largest slope of each source
        class.

        Raises:
            InputError: there is not enough memory, or at epsilon 0 the plan is not proven optimal
                or self terms are not 0.
            ConvergenceError: the masses leave potentials of groups of points undetermined against
                each other, and `required` is set.

        Warns:
            NotConvergedWarning: the same, if `required` is not set; `slopes` then gives the range.
        """
        self._check_unchanged()
        if self.gromov is not None:
            raise InputError("contributions are of a linear cost, which ground=gromov is not")
        term = self.divergence.xy
        if isinstance(term, ExactTerm):
            return exact_contributions(self._prepared, self.divergence, term)
        with self._prepared.within_memory():
            return contributions_of(
                self._prepared, self.divergence, self.method, required=self.required
            )

    @computes
    def unmatched(self) -> Unmatched:
        """Return how much mass of every class and row the plan leaves unmatched (`unbalanced`).

        Raises:
            InputError: marginals are exact, or a dataset was changed in place since.
        """
        self._check_unchanged()
        if self.constraints.exact:
            raise InputError(
                "with exact marginals the plan moves all of every row; give unbalanced, or "
                "unbalanced_relative, the price of mass that is left"
            )
        return unmatched_of(self.source, self.target, self.divergence, self.constraints)

    def to_dict(self, **more: Any) -> dict[str, Any]:
        """Return the content of result.json, in JSON's own types; `more` replaces or adds keys.

        A number that is not finite becomes None.

        Raises:
            InputError: a dataset was changed in place since.
        """
        self._check_unchanged()
        names = {"source": self.source.feature_names, "target": self.target.feature_names}
        scale = self.target_scale
        content = {
            "source": self.source.name,
            "target": self.target.name,
            **self.divergence.to_dict(),
            "epsilon": self.epsilon,
            **({} if self.constraints.exact else {"unbalanced": penalties_of(self.constraints)}),
            "mean_cost": self.mean_cost,
            "seconds": dict(self.seconds),
            "n": len(self.source),
            "m": len(self.target),
            "d": self.source.dim,
            "classes": dict(zip(("source", "target"), map(list, self.class_names), strict=True)),
            "labels": self.method,
            **({} if self.labels_epsilon is None else {"labels_epsilon": self.labels_epsilon}),
            **self.cost.to_dict(),
            **({} if scale is None else {"target_scale": list(scale)}),
            "fingerprints": {
                "source": self.source.fingerprint,
                "target": self.target.fingerprint,
            },
            "subset_hash": {"source": self.source.subset_hash, "target": self.target.subset_hash},
            **({"feature_names": names} if any(names.values()) else {}),
            "seed": None,
            "versions": versions(),
            "device": self.divergence.device,
            "backend": self.divergence.backend,
            "precision": self.compute.precision,
            "compute": self.compute.settings,
            **({} if self.shared == ALONE else self.shared._asdict()),
            **({} if self.streamed is None else {"streamed": dict(self.streamed)}),
            **({} if scale is None else {"target_changes": self.target_changes().tolist()}),
            **({} if self.gromov is None else self._gromov_summary()),
            "config": None,
        }
        return json_content({**content, **more})

    def to_frame(self) -> DataFrame:
        """Return a pandas table of one row, which starts with the columns of `PairwiseResult`'s.

        The columns are: `source` and `target`, their names; `value`, `lower` and `upper`, the
        distance and its solver bounds, and `epsilon`, in units of the cost; `marginal_error`, the
        largest of all terms; `converged`; `n` and `m` rows of `d` features; `labels`, the method of
        class distances; `seconds` of wall time in all.
        """
        row = {
            "source": self.source.name,
            "target": self.target.name,
            "value": self.value,
            "lower": self.bounds[0],
            "upper": self.bounds[1],
            "marginal_error": self.divergence.marginal_error,
            "converged": self.converged,
            "epsilon": self.epsilon,
            "n": len(self.source),
            "m": len(self.target),
            "d": self.source.dim,
            "labels": self.method,
            "seconds": float(sum(self.seconds.values())),
        }
        return frame_of([row], {name: type(value) for name, value in row.items()})

    def plot(self) -> Figure:
        """Draw both datasets in their common plane, with the mass that moves between classes.

        Returns:
            The report's projection.png. A matplotlib figure that pyplot does not register.
            Notebooks display it, and `savefig` writes it to a file.

        Raises:
            InputError: a dataset was changed in place since, or the plan's device does not exist
                here.
        """
        from otdd_flash.report.distance import plot_distance

        return plot_distance(self)

    @takes()
    def save(self, path: str | Path, **more: Any) -> Path:
        """Write the directory `path`: result.json to read, result.safetensors with everything.

        result.safetensors is complete in itself, so an interrupted save never mixes two results.

        Args:
            path: created if it does not exist; its earlier result is replaced.
            **more: keys to add to result.json.

        Returns:
            The directory.
        """
        path = Path(path)
        write_result(path, self.to_dict(**more), self._tensors())
        return path

    @classmethod
    @takes()
    def load(cls, path: str | Path, compute: Compute | None = None) -> DistanceResult:
        """Read a directory that `save` wrote.

        Args:
            path: the directory.
            compute: where and how the plan is computed, or only a device; by default as in the
                original comparison.

        Raises:
            InputError: the directory holds no complete result.
        """
        result = read_result(Path(path), _restore, "DistanceResult")
        return result if compute is None else replace(result, compute=ComputeOptions.of(compute))

    def _applied(self, values: Tensor) -> Applied:
        """Return the plan applied to values (m, k), wherever they are."""
        self._check_unchanged()
        if isinstance(self.divergence.xy, ExactTerm):
            return self.divergence.xy.applied(values)
        with self._prepared.within_memory():
            f, g = self._potentials_on_device()
            return self._operator.plan(f, g, self.epsilon).applied(values.to(f.device))

    def _check_numbers(self) -> None:
        if self.source.targets is None or self.target.targets is None:
            raise InputError(
                "these rows have no numbers; labels=continuous compares rows that have some"
            )

    def _conditional_means(self) -> Tensor:
        """Return the means of the target points by the conditional plan of each source point."""
        # With equal masses points without mass have a plan, too.
        weighted = self.source.weights is not None
        operator = self._built(weighted=False) if weighted else self._operator
        f, g = self._potentials_on_device()
        if weighted:
            term = replace(self.divergence.xy, f=f, g=g)
            term = settle_images(self._prepared, term, required=self.required)
            f, g = term.f, term.g
        # Softmins are used, as a row may be so far that its plan has no mass.
        f = self.constraints.rows.softmin_of(f, self.epsilon)
        # The plan is of the points after the ground cost's transform; it is applied to the given
        # ones.
        points = self._prepared.points("xy")[0], self._prepared.given_points(1)
        origin = origin_near([(points[1], operator.b)], operator.passes.dtype)
        found = conditional_means(operator, f, g, self.epsilon, points, origin)
        return found.add_(origin.to(found.device))

    def _potentials_on_device(self) -> tuple[Tensor, Tensor]:
        """Return f (n,) and g (m,) where the operator is; those of a loaded result are not."""
        term, device = self.divergence.xy, self._prepared.device
        return term.f.to(device), term.g.to(device)

    def _check_unchanged(self) -> None:
        if self.unchanged is not None:
            self.unchanged.check()

    @cached_property
    @computes
    def _settled(self) -> TransportTerm:
        """The cross term with potentials balanced between groups, on its original device."""
        self._check_unchanged()
        if isinstance(self.divergence.xy, ExactTerm):
            return self.divergence.xy
        term, device = self.divergence.xy, self.divergence.xy.f.device
        with self._prepared.within_memory():
            found = settle(self._prepared, term, "potentials", required=self.required)
        return replace(found, f=found.f.to(device), g=found.g.to(device))

    @cached_property
    def _prepared(self) -> Comparison:
        """The comparison that was solved, or a new one for a loaded result or other options."""
        if self.comparison is not None and self.comparison.compute == self.compute:
            return self.comparison
        try:
            resolve_device(self.compute.device)
        except InputError as error:
            raise InputError(
                f"{error}; of another machine's result DistanceResult.load takes it as compute="
            ) from error
        if self.gromov is not None:
            compared = prepare((self.source, self.target), self.cost, self.compute)
            table = None if self.method == NoLabels.name else self.class_distances.full
            return last_linearised(compared.with_classes(table).at(self.epsilon), self.gromov)
        prepared = Comparison.prepare(
            (self.source, self.target),
            self.cost,
            self.compute,
            debias=self.divergence.xx is not None,
            # Questions about the plan take the cross term alone.
            pairs=(SIDES["xy"],),
            target_scale=self.target_scale,
        )
        prepared = prepared.with_classes(self.class_distances.full).at(self.epsilon)
        return replace(prepared, constraints=self.constraints)

    @cached_property
    def _operator(self) -> Operator:
        """The operator of the plan, built once for all questions."""
        return self._built()

    def _built(self, *, weighted: bool = True) -> Operator:
        comparison = self._prepared
        if not weighted:
            comparison = comparison.unweighted(0)
        # Precision `fast` rounds the points for its passes, and potentials are of unrounded points.
        return comparison.operator("xy", keep_scores=False).refined

    def _gromov_summary(self) -> dict[str, Any]:
        assert self.gromov is not None
        return {"ground": "gromov", "target_d": self.target.dim, "gromov": self.gromov.to_dict()}

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {
            f"W.{key}": table
            for key in ("xx", "xy", "yy", "lower", "upper")
            if (table := getattr(self.class_distances, key)) is not None
        }
        if self.gromov is not None:
            tensors |= {f"gromov.{name}": each for name, each in self.gromov.tensors.items()}
        for name, term in self.divergence.terms.items():
            tensors |= {f"{name}.f": term.f, f"{name}.g": term.g, **plan_tensors(name, term)}
        for side in ("source", "target"):
            samples: LabeledSamples = getattr(self, side)
            for key in (*TENSORS, "members"):
                if getattr(samples, key) is not None:
                    tensors[f"{side}.{key}"] = getattr(samples, key)
        return tensors


def versions() -> dict[str, str]:
    """Return the versions of the software that computes a result."""
    return {
        "otdd_flash": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _restore(summary: dict[str, Any], tensors: dict[str, Tensor]) -> DistanceResult:
    gromov = None
    if "gromov" in summary:
        own = {
            name.partition(".")[2]: each
            for name, each in tensors.items()
            if name.startswith("gromov.")
        }
        gromov = GromovRecord.from_dict(summary["gromov"], own)
        # The cost of the linearised problem.
        summary = {**summary, "ground": "inner"}
    names = summary["classes"]
    sides = {}
    for side in ("source", "target"):
        sides[side] = LabeledSamples(
            tensors[f"{side}.features"],
            tensors.get(f"{side}.labels"),
            weights=tensors.get(f"{side}.weights"),
            targets=tensors.get(f"{side}.targets"),
            **named_sets(tensors.get(f"{side}.members"), names[side]),
            name=summary[side],
            subset_hash=summary["subset_hash"][side],
            feature_names=summary.get("feature_names", {}).get(side),
        )
    potentials = {name: (tensors[f"{name}.f"], tensors[f"{name}.g"]) for name in summary["terms"]}
    solved = Divergence.from_dict(summary, potentials)
    plans = {name: with_plan(name, term, tensors) for name, term in solved.terms.items()}
    # Earlier versions stored two of the options.
    asked = summary.get("compute") or {key: summary[key] for key in ("precision", "memory_budget")}
    return DistanceResult(
        sides["source"],
        sides["target"],
        ClassDistances(
            tensors["W.xx"],
            tensors["W.xy"],
            tensors["W.yy"],
            # In the order of `to_dict`: source, then target.
            *(tuple(v) for v in names.values()),
            lower=tensors.get("W.lower"),
            upper=tensors.get("W.upper"),
        ),
        replace(solved, xy=plans["xy"], xx=plans.get("xx"), yy=plans.get("yy")),
        GroundCost(**{f.name: summary[f.name] for f in fields(GroundCost) if f.name in summary}),
        ComputeOptions(**asked),
        method=summary["labels"],
        labels_epsilon=summary.get("labels_epsilon"),
        target_scale=tuple(summary["target_scale"]) if "target_scale" in summary else None,
        seconds=summary["seconds"],
        shared=ALONE._replace(**{key: summary[key] for key in Shared._fields if key in summary}),
        streamed=summary.get("streamed"),
        constraints=resolve_constraints(summary.get("unbalanced"), None, lambda: 1.0),
        gromov=gromov,
    )
