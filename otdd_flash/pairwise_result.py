"""`PairwiseResult`: the distances between several datasets with solver bounds, and its files.

`pairwise` builds it with `gather`; `report.pairwise` shows it; users save and load it. It is saved
as result.json and class_distances.npz with one checksum over both; result.json is written last, so
a directory that holds it is complete. Keys of `to_dict` are the format: results of earlier versions
stay readable.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from otdd_flash.arguments import takes
from otdd_flash.errors import InputError
from otdd_flash.files.atomic import json_content, write_json
from otdd_flash.files.result_files import COMPUTE_AGAIN, SUMMARY_FILE
from otdd_flash.files.tensor_file import (
    CHECKSUM,
    FORMAT,
    FORMAT_KEY,
    DamagedFileError,
    LaterFormatError,
    check_format,
    checksum,
    other_version,
)
from otdd_flash.labels import JointClassDistances
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.operators.ground import GroundCost
from otdd_flash.raw_labels import frame_of
from otdd_flash.result import versions
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import NOT_SAMPLED, convergence_text, listing
from otdd_flash.solver.divergence import Divergence
from otdd_flash.solver.term.result import largest_tolerance

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

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
            allows.
        details: the other content of result.json.
    """

    values: Tensor
    lower: Tensor
    upper: Tensor
    marginal_errors: Tensor
    converged: Tensor = field(kw_only=True)
    class_distances: JointClassDistances = field(kw_only=True)
    epsilon: float = field(kw_only=True)
    tolerance: float = field(kw_only=True)
    details: Mapping[str, Any] = field(kw_only=True)

    def __repr__(self) -> str:
        """Return the number of datasets and epsilon; `pairs()` lists distances."""
        converged = convergence_text(bool(self.converged.all()))
        return (
            f"PairwiseResult({len(self.names)} datasets: {listing(self.names, 12)}; "
            f"epsilon={self.epsilon:.6g}, {converged})"
        )

    def __str__(self) -> str:
        """Return the line of `repr`, and one on the sampling error, which bounds do not hold."""
        return f"{self!r}\n{NOT_SAMPLED}"

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
        count = len(self.names)
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
            for i, j in combinations(range(count), 2)
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
            A matplotlib figure that pyplot does not know: a notebook shows it, its `savefig` writes
            it.

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
            return cls(
                *(_matrix(content.pop(key), UNKNOWN[key]) for key in MATRICES),
                converged=torch.tensor(content.pop("converged"), dtype=torch.bool),
                class_distances=JointClassDistances.load(path / TABLE_FILE),
                epsilon=float(content.pop("epsilon")),
                tolerance=float(content.pop("tolerance")),
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


def gather(
    found: Mapping[tuple[int, int], Divergence],
    datasets: Sequence[LabeledSamples],
    table: JointClassDistances,
    *,
    cost: GroundCost,
    compute: ComputeOptions,
    method: str,
    labels_epsilon: float | None,
    mean_cost: float,
    seconds: Mapping[str, float],
    streamed: Mapping[str, Any] | None = None,
) -> PairwiseResult:
    """Return the result of K datasets from the divergences of their pairs (i, j), i <= j."""
    count = len(datasets)
    numbers = torch.zeros(len(MATRICES), count, count, dtype=torch.float64)
    converged = torch.zeros(count, count, dtype=torch.bool)
    for (i, j), one in found.items():
        row = torch.tensor((one.value, *one.bounds, one.marginal_error), dtype=torch.float64)
        numbers[:, i, j] = numbers[:, j, i] = row
        converged[i, j] = converged[j, i] = one.converged
    some = found[0, 1]
    tolerance = largest_tolerance(divergence.tolerance for divergence in found.values())
    # Pairs are solved to a tolerance, never to a width of the bounds.
    assert tolerance is not None
    details = {
        "classes": [list(names) for names in table.class_names],
        "n": [len(samples) for samples in datasets],
        "d": datasets[0].dim,
        "labels": method,
        **({} if labels_epsilon is None else {"labels_epsilon": labels_epsilon}),
        "mean_cost": mean_cost,
        **asdict(cost),
        "fingerprints": [samples.fingerprint for samples in datasets],
        "seconds": dict(seconds),
        "versions": versions(),
        "device": some.device,
        "backend": some.backend,
        "precision": compute.precision,
        **({} if streamed is None else {"streamed": dict(streamed)}),
    }
    return PairwiseResult(
        *numbers,
        converged=converged,
        class_distances=table,
        epsilon=some.xy.epsilon,
        tolerance=tolerance,
        details=details,
    )
