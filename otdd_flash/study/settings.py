"""What of a study decides its results: everything that is part of every unit's digest."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from otdd_flash.labels.metrics import LabelMetric
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.operators.ground import GroundCost
from otdd_flash.result import versions
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.study.transfer.settings import Transfer


@dataclass(frozen=True)
class Settings:
    """The settings of a study, resolved: nothing in them is `auto`.

    Attributes:
        measures: names of measures, in the order of tables.
        measure: the one that chooses sources, fixed before any gain is known.
        epsilon: of the transport, in units of the cost; None where it is relative.
        epsilon_relative: the same as a multiple of the mean cost over all pairs.
        labels: how distances between classes are measured.
        cost: the ground cost.
        solver: how transport is solved.
        compute: where and how.
        projections: draws of the sliced distance.
        subsample: K subsamples of a sampling interval; None for none.
        subsample_size: rows of each of a source; None for a quarter.
        noise_floor: whether distances between halves of every dataset are measured.
        transfer: how networks are trained; None for no transfer.
        seed: of every draw.
        threads: of every unit that is not to be computed by one.
    """

    measures: tuple[str, ...]
    measure: str
    epsilon: float | None
    epsilon_relative: float | None
    labels: LabelMetric
    cost: GroundCost
    solver: Converged
    compute: ComputeOptions
    projections: int
    subsample: int | None
    subsample_size: int | None
    noise_floor: bool
    transfer: Transfer | None
    seed: int
    threads: int

    @property
    def transport(self) -> dict[str, Any]:
        """What a transport term depends on beside the datasets, for JSON."""
        return {
            "epsilon": self.epsilon,
            "epsilon_relative": self.epsilon_relative,
            "labels": self.metric,
            "cost": asdict(self.cost),
            "solver": asdict(self.solver),
            **self.machine,
        }

    @property
    def metric(self) -> dict[str, Any]:
        return {"method": self.labels.name, **self.labels.to_dict()}

    @property
    def machine(self) -> dict[str, Any]:
        """What computes, for JSON."""
        return {"compute": self.compute.settings, "threads": self.threads, "versions": versions()}

    @property
    def sampling(self) -> dict[str, Any]:
        """What a sampling interval depends on, for JSON."""
        return {
            "subsample": self.subsample,
            "subsample_size": self.subsample_size,
            "seed": self.seed,
        }

    def to_dict(self) -> dict[str, Any]:
        """The content of study.json but for the tasks."""
        return {
            "measures": list(self.measures),
            "measure": self.measure,
            **self.transport,
            "projections": self.projections,
            **self.sampling,
            "noise_floor": self.noise_floor,
            "transfer": None if self.transfer is None else self.transfer.to_dict(),
        }
