"""The result of a flow: the adapted dataset, the records of its steps, and how to store it.

While a flow runs, `flows.objective` makes a `StepRecord` of every step, and `flows.run` stores a
thinned trajectory in a `Recorder`. With `keep_moments` it also makes a `Moment` of every step, the
state from which an entropic map is built. `flows.checkpoint` stores records, moments and the state
of the `Recorder`. `commands.messages`, `report.flow` and the user's callback `progress`
(`flows.flow`) read records; `report.flow_pictures` reads the trajectory. The fields of `StepRecord`
and `Moment` are part of the checkpoint format, and those of `StepRecord` are the columns of
metrics.csv, so their names must stay.

`gradient_flow` (`flows.run`) returns a `FlowResult`; `commands.adapt`, `commands.results`,
`report.flow` and `integrations.sklearn` read it. It saves and loads itself, and makes maps of new
points (`flows.maps`, `flows.residual_map`). result.json comes from `to_dict`, and
result.safetensors from the tensors that `PARTS` lists and the fields of moments: keys and names are
the format, and files of earlier versions must stay readable (`tests/files/test_files_of_today.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from otdd_flash.arguments import takes
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.eager import computes
from otdd_flash.errors import InputError, choose
from otdd_flash.files.atomic import json_content
from otdd_flash.files.tensor_file import read_result, write_result
from otdd_flash.fingerprint import Unchanged
from otdd_flash.flows.maps import EntropicMap, FlowMap, NearestParticleMap, VelocityField
from otdd_flash.flows.residual_map import ResidualMap
from otdd_flash.label_sets import named_sets
from otdd_flash.labels import ClassDistances, Continuous
from otdd_flash.labels.table import class_names
from otdd_flash.operators.label_costs import has_sets
from otdd_flash.raw_labels import frame_of
from otdd_flash.result import versions
from otdd_flash.samples import TENSORS, LabeledSamples
from otdd_flash.shown import NOT_SAMPLED
from otdd_flash.solver.term import StoppedBy

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


@dataclass(frozen=True)
class StepRecord:
    """The evaluation of the particles from which step number `step` was taken, and that step.

    A step on a minibatch uses some of the points, one with noise uses displaced points. Its value
    is an estimate of the divergence, so `objective`, `divergence`, `lower` and `upper`, which are
    of all points, are None; `bound_width` is that of the estimate's own solve.

    Attributes:
        step: k >= 0; the last record of a flow describes its end, from which no step was taken, and
            uses all points.
        objective: divergence plus functionals, in units of the cost; None for an estimate.
        divergence: S_epsilon(particles, target); None for an estimate.
        lower: the lower solver bound of S_epsilon at the current class distances; None for an
            estimate.
        upper: the upper solver bound.
        functionals: weight times value of each functional, by name, at the points of the step.
        gradient_norm: (sum_i a_i |v_i|^2)^1/2 of the velocities v of the particles that the step
            used, with masses a that sum to 1; in features per unit of time.
        step_size: time that the step moves forward; 0 at the end.
        iterations: of the cross term.
        marginal_error: the largest over the terms.
        tolerance: the largest marginal error that was accepted, as asked for, or the least that
            rounding allows; None if the solver stopped by the width of its bounds.
        converged: whether the solve reached its goal.
        stopped_by: what ended the solve.
        seconds: wall time of evaluation and step.
        estimate: S_epsilon of the points that the step used, after noise moved them; None if the
            step used all points without noise: then `divergence` is it.
        estimated_on: the number of particles of the estimate.
        bound_width: (upper - lower) / |value| of the divergence that was solved for this step, also
            of an estimate; None if the value is 0.
    """

    step: int
    objective: float | None
    divergence: float | None
    lower: float | None
    upper: float | None
    functionals: dict[str, float]
    gradient_norm: float
    step_size: float
    iterations: int
    marginal_error: float
    tolerance: float | None
    converged: bool
    stopped_by: StoppedBy
    seconds: float
    estimate: float | None = None
    estimated_on: int | None = None
    bound_width: float | None = None

    @property
    def seen(self) -> float:
        """The value that the step descended: the objective, or an estimate plus functionals."""
        value = self.divergence if self.estimate is None else self.estimate
        assert value is not None
        return value + sum(self.functionals.values())

    @property
    def described(self) -> str:
        """`seen` as text, with its name."""
        if self.estimate is None:
            return f"objective {self.seen:.5g}"
        return f"objective {self.seen:.5g}, an estimate on {self.estimated_on:,} points"

    def row(self) -> dict[str, Any]:
        """Return one line of metrics.csv: all attributes, with one column per functional."""
        row = asdict(self)
        for name, value in row.pop("functionals").items():
            row[f"functional.{name}"] = value
        return row


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The positions of some particles at some steps.

    Attributes:
        rows: (k,) int64, which particles, ascending.
        steps: (s,) int64, the numbers of steps taken, ascending; the first is 0, the last the end.
        points: (s, k, d) their positions, on the CPU.
        labels: (s, k) int64 their class indices, or None for unlabelled particles.
    """

    rows: Tensor
    steps: Tensor
    points: Tensor
    labels: Tensor | None


class Moment(NamedTuple):
    """The state of a step on the CPU, from which its velocity at any other point follows.

    Attributes:
        step_size: time that the step moved forward.
        features: (n, d) of the particles.
        table: W (V_x + V_y, V_x + V_y), the class distances between the V_x source and V_y target
            classes.
        g: (m,) target potential of the cross term, in units of the cost.
        f: (n,) potential of the particles' self term.
    """

    step_size: float
    features: Tensor
    table: Tensor
    g: Tensor
    f: Tensor


class Recorder:
    """Stores a thinned trajectory: at most `most` sets of positions, evenly spaced.

    When only the place for the end is left, every second stored position is dropped and the spacing
    doubles. Stored positions after k steps depend on k alone, not on the number of steps to come.

    Args:
        rows: (k,) which particles to follow.
        most: the largest number of stored positions, at least 2.
    """

    def __init__(self, rows: Tensor, most: int) -> None:
        self.rows, self._most, self.every = rows, most, 1
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}

    def wants(self, step: int) -> bool:
        """Return whether the particles after `step` steps are to be stored."""
        return step % self.every == 0

    def keep(self, step: int, points: Tensor, labels: Tensor | None) -> None:
        """Store the followed rows of points (n, d) and labels (n,)."""
        self._kept[step] = self._followed(points, labels)
        while len(self._kept) >= self._most:
            self.every *= 2
            self._kept = {k: seen for k, seen in self._kept.items() if k % self.every == 0}

    def trajectory(self, step: int, points: Tensor, labels: Tensor | None) -> Trajectory:
        """Return what is stored, with the points and labels after `step` steps as the end."""
        kept = {**self._kept, step: self._followed(points, labels)}
        steps = sorted(kept)
        seen = [kept[k][1] for k in steps]
        return Trajectory(
            self.rows,
            torch.tensor(steps),
            torch.stack([kept[k][0] for k in steps]),
            None if labels is None else torch.stack([part for part in seen if part is not None]),
        )

    def state(self) -> dict[str, Any]:
        return {"rows": self.rows, "every": self.every, "kept": dict(self._kept)}

    def restore(self, state: dict[str, Any]) -> None:
        self.rows, self.every, self._kept = state["rows"], state["every"], dict(state["kept"])

    def _followed(self, points: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
        rows = self.rows.to(points.device)
        return points[rows].cpu(), None if labels is None else labels[rows].cpu()


MAPS = ("entropic", "nearest", "residual")


@dataclass(frozen=True, eq=False, repr=False)
class FlowResult:
    """A dataset that was moved towards another.

    Attributes:
        source: the n particles before the first step.
        target: the m points they moved towards, in the same space.
        samples: the n particles after the last step, with their labels and weights; row i was row
            i of `source`.
        before: the record of the start, evaluated on all points: the dataset distance of source and
            target.
        history: one record per step, and one of the end.
        trajectory: positions of some particles at some steps.
        class_distances: W of the last evaluation; in mode `augmented`, that of the start.
        settings: what the flow depended on, by the keys of the command line.
        moments: the state of each step, if it was stored.
        compute: where and how passes were asked to run, which also serves maps.
        ran_on: the device and backend of the passes.
        stopped_by: `steps`, `tolerance` or `interrupted`.
        seconds: wall time of the preparation and of the flow.
        unchanged: marks of source and target; methods that read them raise once one was modified in
            place. None for a loaded result, as nothing else shares its memory.
        mean_cost: the mean cost at the start, of which `epsilon_relative` is a multiple.
    """

    source: LabeledSamples
    target: LabeledSamples
    samples: LabeledSamples
    before: StepRecord
    history: tuple[StepRecord, ...]
    trajectory: Trajectory
    class_distances: ClassDistances
    settings: Mapping[str, Any]
    moments: tuple[Moment, ...]
    compute: ComputeOptions
    ran_on: str
    stopped_by: str
    seconds: Mapping[str, float]
    unchanged: Unchanged | None = field(default=None, kw_only=True, repr=False)
    mean_cost: float | None = field(default=None, kw_only=True)

    def __repr__(self) -> str:
        """Return one line with the distances before and after, and what moved."""
        return (
            f"FlowResult({self.before.divergence:.7g} to {self.after.divergence:.7g}, "
            f"mode={self.mode}, {len(self.history) - 1} steps, stopped by {self.stopped_by}, "
            f"{self.source!r} to {self.target!r})"
        )

    def __str__(self) -> str:
        """Return the line of `repr`, and one on the sampling error that bounds leave out."""
        return f"{self!r}\n{NOT_SAMPLED} of the start"

    @property
    def mode(self) -> str:
        """The mode of the flow: `features`, `attached`, `joint` or `augmented`."""
        return str(self.settings["flow.mode"])

    @property
    def after(self) -> StepRecord:
        """The record of the end, evaluated on all points of `samples`.

        In the modes `features` and `attached` its divergence is the dataset distance of `samples`
        and the target. In `joint` and `augmented` class distances are those between the Gaussians
        that moved with the points, which are not statistics of `samples`.
        """
        return self.history[-1]

    @property
    def evaluations(self) -> tuple[StepRecord, ...]:
        """`history`, preceded by `before` if the first step did not use all points in place."""
        first = () if self.before == self.history[0] else (self.before,)
        return (*first, *self.history)

    @property
    def converged(self) -> bool:
        """Whether every solve of the flow reached its tolerance."""
        return all(record.converged for record in self.evaluations)

    # `computes` keeps PyTorch's surrounding modes, such as the default device, out.
    @computes
    @torch.enable_grad()
    def map(self, kind: str = "nearest", **options: Any) -> FlowMap:
        """Return the flow as a map of new points: a callable from samples to samples.

        Args:
            kind: `entropic` follows the velocity of each step (needs `keep_moments`); `nearest`
                copies the displacement of the nearest particle; `residual` trains a network on all
                displacements.
            options: of `EntropicMap`, `NearestParticleMap` or `ResidualMap.fit`.

        Raises:
            InputError: an unknown map, a flow that an entropic map cannot follow, or a dataset was
                modified in place.
        """
        choose("map", kind, MAPS)
        self._check_unchanged()
        if kind == "nearest":
            return NearestParticleMap(self.source, self.samples, **options)
        if kind == "residual":
            return ResidualMap.fit(self.source, self.samples, **options)
        self._check_entropic()
        sizes = [moment.step_size for moment in self.moments]
        fields = [self._field(moment) for moment in self.moments]
        return EntropicMap(fields, sizes, self.settings["flow.box"], **options)

    def to_dict(self, **more: Any) -> dict[str, Any]:
        """Return the content of result.json as JSON types; `more` replaces or adds keys.

        A number that is not finite becomes None.

        Raises:
            InputError: a dataset was modified in place since.
        """
        self._check_unchanged()
        before, after = self.before, self.after
        content = {
            "source": self.source.name,
            "target": self.target.name,
            "value": after.divergence,
            "bounds": [after.lower, after.upper],
            "start": {"value": before.divergence, "bounds": [before.lower, before.upper]},
            "objective": {"start": before.objective, "end": after.objective},
            "steps": after.step,
            "stopped_by": self.stopped_by,
            "converged": self.converged,
            "marginal_error": max(record.marginal_error for record in self.evaluations),
            "epsilon": self.settings["epsilon"],
            "mean_cost": self.mean_cost,
            "seconds": dict(self.seconds),
            "n": len(self.source),
            "m": len(self.target),
            "d": self.source.dim,
            "classes": {
                "source": list(self.source.label_names),
                "target": list(self.target.label_names),
            },
            "subset_hash": {"source": self.source.subset_hash, "target": self.target.subset_hash},
            "before": asdict(before),
            "history": [asdict(record) for record in self.history],
            "settings": dict(self.settings),
            "compute": self.compute.settings,
            "ran_on": self.ran_on,
            "versions": versions(),
            "config": None,
        }
        return json_content({**content, **more})

    def to_frame(self) -> DataFrame:
        """Return a pandas table with one row per step and one of the end, as in metrics.csv.

        A row describes the particles before its step, and the step. If the first step did not use
        all points in place, a row for the start precedes it. Values that a step does not have are
        missing. Columns:

        - `step`; `step_size`, the time it moves forward; `seconds` of wall time.
        - `objective`, `divergence`, `lower` and `upper`, in units of the cost: the distance plus
          functionals, the distance to the target, and the bounds of its solve. They are missing
          if a step used part of the points or displaced ones: then `estimate` is the distance of
          these, in the same units, and `estimated_on` their number of particles.
        - `functional.NAME`: weight times value of each functional, in units of the cost.
        - `gradient_norm`: of the velocities of the particles that the step used, in features per
          unit of time.
        - `iterations`, `marginal_error`, `tolerance`, `converged`, `stopped_by` and `bound_width`,
          of the solve: the last is relative to the value.
        """
        rows = [record.row() for record in self.evaluations]
        hints = get_type_hints(StepRecord)
        # Columns without a hint are values of functionals.
        return frame_of(rows, {name: hints.get(name, float) for row in rows for name in row})

    @takes()
    def plot(self, image_shape: tuple[int, int, int] | None = None) -> Figure:
        """Draw images at several steps or, without an image shape, the decrease of the distance.

        Args:
            image_shape: (c, h, w) of the particles, if they are images with pixel values in [0, 1],
                channel after channel: the report's images.png. None draws its objective.png.

        Returns:
            A matplotlib figure that pyplot does not register. Notebooks display it, and `savefig`
            writes it to a file.

        Raises:
            InputError: particles are not images of this shape, or a dataset was modified in place.
        """
        self._check_unchanged()
        from otdd_flash.report.flow import plot_flow

        return plot_flow(self, image_shape)

    @takes()
    def save(self, path: str | Path, **more: Any) -> Path:
        """Write the directory `path`: result.json to read, and result.safetensors with all tensors.

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
    def load(cls, path: str | Path) -> FlowResult:
        """Read a directory that `save` wrote.

        Raises:
            InputError: the directory holds no complete result of a flow.
        """
        return read_result(Path(path), _restored, "FlowResult")

    def _check_unchanged(self) -> None:
        if self.unchanged is not None:
            self.unchanged.check()

    def _check_entropic(self) -> None:
        """Refuse flows whose steps did not follow the velocity field alone."""
        settings, sides = self.settings, (self.source, self.target)
        plain, space = settings["flow.plain"], settings["flow.space"]
        numbers = settings["labels.method"] == Continuous.name
        reasons = {
            "keep_moments=true keeps what it needs, and was not set": not self.moments,
            f"flow.mode={self.mode} moves more than points": self.mode != "features",
            "only flow.optimizer=sgd without options, noise or minibatches": not plain,
            "flow.functionals move particles too": settings["flow.functionals"],
            "points moved in another space than that of features": space != "features",
            "rows have numbers or several labels": numbers or has_sets(sides),
            "with unbalanced points move by more than conditional plans": "unbalanced" in settings,
        }
        met = "; ".join(reason for reason, holds in reasons.items() if holds)
        if met:
            raise InputError(
                f"an entropic map cannot follow this flow: {met}. The maps nearest and residual "
                "take any flow"
            )

    def _field(self, moment: Moment) -> VelocityField:
        return VelocityField(
            replace(self.source, features=moment.features, subset_hash=None),
            self.target,
            moment.table,
            moment.g,
            moment.f,
            self.settings["epsilon"],
            GroundCost(**{key: self.settings[key] for key in COST}).squared,
            self.compute,
        )

    def _tensors(self) -> dict[str, Tensor]:
        owners = {name: getattr(self, name) for name in ("source", "target", "samples")}
        owners |= {"trajectory": self.trajectory, "W": self.class_distances}
        parts = {
            f"{name}.{key}": getattr(owner, key)
            for name, owner in owners.items()
            for key in PARTS[name]
        }
        for k, moment in enumerate(self.moments):
            parts |= {f"moment.{k}.{key}": part for key, part in moment._asdict().items()}
            parts[f"moment.{k}.step_size"] = torch.tensor(moment.step_size, dtype=torch.float64)
        return {key: part for key, part in parts.items() if part is not None}


# Settings of the ground cost.
COST = ("lambda_x", "lambda_y", "ground")
# Tensors of a result by their owners; all but features may be missing.
SAMPLES = (*TENSORS, "members")
PARTS = {
    **dict.fromkeys(("source", "target", "samples"), SAMPLES),
    "trajectory": ("rows", "steps", "points", "labels"),
    "W": ("xx", "xy", "yy"),
}


def _restored(summary: dict[str, Any], tensors: dict[str, Tensor]) -> FlowResult:
    stored: dict[str, dict[str, Any]] = {
        name: {key: tensors.get(f"{name}.{key}") for key in keys} for name, keys in PARTS.items()
    }
    names, hashes = summary["classes"], summary["subset_hash"]
    sides = {
        key: LabeledSamples(
            **{part: stored[key][part] for part in TENSORS},
            **named_sets(stored[key]["members"], names[side]),
            name=summary[side],
            subset_hash=hashes[side],
        )
        for key, side in (("source", "source"), ("target", "target"), ("samples", "source"))
    }
    moments: list[Moment] = []
    while (place := f"moment.{len(moments)}") + ".f" in tensors:
        step_size, *parts = (tensors[f"{place}.{key}"] for key in Moment._fields)
        moments.append(Moment(float(step_size), *parts))
    settings = dict(summary["settings"])
    if settings["flow.box"] is not None:
        settings["flow.box"] = tuple(settings["flow.box"])
    return FlowResult(
        source=sides["source"],
        target=sides["target"],
        samples=sides["samples"],
        before=StepRecord(**summary["before"]),
        history=tuple(StepRecord(**record) for record in summary["history"]),
        trajectory=Trajectory(**stored["trajectory"]),
        class_distances=ClassDistances(
            **stored["W"],
            names_x=class_names(sides["source"]),
            names_y=class_names(sides["target"]),
        ),
        settings=settings,
        moments=tuple(moments),
        compute=ComputeOptions(**{**summary["compute"], "device": "auto"}),
        **{key: summary[key] for key in ("ran_on", "stopped_by", "seconds", "mean_cost")},
    )
