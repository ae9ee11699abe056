"""The result of a mixture: `Mixture`, with the rows to train on.

`mixing.mixture` makes it. `commands.mix` writes `to_dict` as mixture.json, prints `sentences`, and
gives the rows of `dataset` to `report.mixture`, which writes them and draws the weights;
`commands.results` sends its numbers to trackers. Users read mixture.json, whose keys are the fields
of `Mixture` but `sources`, the `sentences` and the keys of `details`, so their names must stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.arguments import Count, Seed, takes
from otdd_flash.errors import InputError
from otdd_flash.files.atomic import json_content
from otdd_flash.labels.metrics import targets_of
from otdd_flash.mixing.weights import StoppedBy
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import bounded, display, listing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Weights below it are not named in sentences.
NAMED = 5e-4


class OtherWeights(NamedTuple):
    """Other weights, and how far their mixture is from the target.

    Attributes:
        name: `uniform`, `proportional to size`, or `NAME alone`, the best single source.
        weights: (K,) of the sources; limits do not hold for them.
        value: of the transport, without a penalty: an upper bound, with debiasing the value that
            the solver reached, as that of the mixture.
        lower: its lower solver bound.
        upper: its upper solver bound.
    """

    name: str
    weights: tuple[float, ...]
    value: float
    lower: float
    upper: float


class WeightInterval(NamedTuple):
    """A confidence interval of a weight: what another sample of the same sizes would give."""

    lower: float
    upper: float


@dataclass(frozen=True, eq=False, repr=False)
class Mixture:
    """Weights of sources whose mixture is nearest to a target, with what is proven of them.

    Attributes:
        weights: by source; they sum to 1.
        value: upper bound of the objective at these weights, transport cost plus penalty. With
            `debias` the value that the solver reached.
        bounds: (lower, upper) contain the least objective over all allowed weights, and the
            objective at `weights`. With `debias` they are solver bounds at these weights alone.
        transport: the value without the penalty.
        marginal_costs: by source: the change of the objective per unit of its weight, less the mean
            of these under the weights. About 0 where a source is in use, positive where it is not,
            negative only at a limit.
        undetermined: changes of weights by source, of 0.05 or more, each of which raises the
            objective by less than `bound_width` of the value. With `debias`, and once
            `max_seconds` are over, none are looked for.
        others: other weights for comparison, such as uniform ones, with their distances.
        intervals: confidence intervals of the weights by source, from subsamples; None if they were
            not asked for.
        limits: by source the largest weight that was allowed.
        sizes: rows of each source that have mass.
        converged: whether `bound_width` was reached.
        stopped_by: why the search ended.
        debias: whether self terms were subtracted. The weights are then a stationary point, not
            proven to be the best.
        solves: transport problems solved for the weights.
        target: name of the target.
        details: epsilon, mean cost, settings, versions, seconds.
        sources: the sources, to draw from.
    """

    weights: Mapping[str, float]
    value: float
    bounds: tuple[float, float]
    transport: float
    marginal_costs: Mapping[str, float]
    undetermined: tuple[Mapping[str, float], ...]
    others: tuple[OtherWeights, ...]
    intervals: Mapping[str, WeightInterval] | None
    limits: Mapping[str, float]
    sizes: Mapping[str, int]
    converged: bool
    stopped_by: StoppedBy
    debias: bool
    solves: int
    target: str
    details: Mapping[str, Any] = field(kw_only=True)
    sources: tuple[LabeledSamples, ...] = field(kw_only=True)

    @property
    def bound_width(self) -> float:
        """(upper - lower) / |value|."""
        width = self.bounds[1] - self.bounds[0]
        return 0.0 if width == 0 else width / abs(self.value) if self.value else np.inf

    def __repr__(self) -> str:
        used = [f"{display(name)} {w:.3f}" for name, w in self._ordered() if w >= NAMED]
        return f"Mixture({display(self.target)}: {listing(used, 8)}; {self._proof()})"

    def __str__(self) -> str:
        lines = [f"{w:.4f}  {display(name)}" for name, w in self._ordered()]
        return "\n".join([*lines, *self.sentences()])

    def _ordered(self) -> list[tuple[str, float]]:
        return sorted(self.weights.items(), key=lambda item: -item[1])

    def _proof(self) -> str:
        if self.debias:
            return f"value {bounded(self.value, *self.bounds)}, a stationary point, unproven"
        return f"value {bounded(self.value, *self.bounds)} of all allowed weights"

    def sentences(self) -> list[str]:
        """Say in words what is proven, what is undetermined, and how other weights compare."""
        said = [self._proof()]
        if not self.converged:
            said.append(
                f"the search stopped by {self.stopped_by} before its bounds were "
                f"{self.details['bound_width']:g} of the value wide"
            )
        if self.debias:
            said.append(
                "with debias=true the value need not be convex in the weights, so that no lower "
                "bound over other weights is known, and what leaves it unchanged is not looked for"
            )
        else:
            said.append(
                "without debiasing weights are drawn to sources that are narrower than the target, "
                "the more the larger epsilon is; debias=true has no such pull, and no proof"
            )
        for moves in self.undetermined:
            given = [f"{display(k)} {v:+.2f}" for k, v in moves.items()]
            said.append(f"undetermined: {listing(given, 8)} changes the value by less than the gap")
        for other in self.others:
            more = other.value - self.transport
            said.append(f"{display(other.name)}: {other.value:.6g}, {more:+.2g} to the mixture")
        if self.intervals is None:
            said.append(
                "sampling error of the weights was not measured: subsample=K gives intervals"
            )
        return said

    @takes()
    def rows(self, count: Count, seed: Seed = 0) -> dict[str, Tensor]:
        """Draw rows without replacement, from every source in proportion to its weight.

        Args:
            count: rows in all.
            seed: of the draw.

        Returns:
            Ascending row numbers of each source. Rows of classes that `min_class_size` dropped are
            not counted.

        Raises:
            InputError: a source has fewer rows than its share; `max_rows` of `otdd.mixture`
                prevents that.
        """
        w = np.array(list(self.weights.values()))
        shares = _whole(w * count, count)
        most = np.array(list(self.sizes.values()))
        if (shares > most).any():
            place = int(np.argmax(shares - most))
            name, reach = list(self.weights)[place], int((most[w > 0] / w[w > 0]).min())
            way = f"ask for the mixture with max_rows={count}"
            if count > most.sum():
                way = f"add sources, as all together have {most.sum()}"
            raise InputError(
                f"{count} rows take {shares[place]} of {display(name)}, which has {most[place]}; "
                f"draw {reach} or fewer, or {way}"
            )
        generator, found = np.random.default_rng(seed), {}
        for name, size, source in zip(self.weights, shares, self.sources, strict=True):
            masses = source.masses.cpu().numpy()
            drawn = generator.choice(len(source), int(size), replace=False, p=masses / masses.sum())
            found[name] = torch.from_numpy(np.sort(drawn))
        return found

    @takes()
    def dataset(self, rows: Count, seed: Seed = 0) -> LabeledSamples:
        """Draw a dataset to train on, see `rows`.

        Classes of equal names become one class, as a network has one output for both. For `value`
        they stayed separate, so `dataset_distance` of this dataset is another number.

        Raises:
            InputError: as for `rows`, or some sources have labels and others none.
        """
        drawn = self.rows(rows, seed)
        parts = [
            source.take(places)
            for source, places in zip(self.sources, drawn.values(), strict=True)
            if len(places)
        ]
        features = torch.cat([part.features for part in parts])
        labelled = [part.labels is not None for part in parts]
        labels, names, targets = None, tuple[str, ...](), None
        if all(labelled):
            names = tuple(dict.fromkeys(name for part in parts for name in part.class_names))
            labels = torch.cat([_renamed(part, names) for part in parts])
        elif all(part.targets is not None for part in parts):
            targets = torch.cat([targets_of(part) for part in parts])
        elif any(labelled):
            raise InputError("some sources have labels and others none; rows(...) draws from each")
        return LabeledSamples(features, labels, names, name="mixture", targets=targets)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of mixture.json, in JSON's own types."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        del named["details"], named["sources"]
        content = {
            "target": self.target,
            **named,
            "others": [other._asdict() for other in self.others],
            "sentences": self.sentences(),
            **self.details,
        }
        return json_content(content)

    def plot(self) -> Figure:
        """Draw weights and marginal costs as bars, the report's mixture.png."""
        from otdd_flash.report.mixture import plot_mixture

        return plot_mixture(self)


def _renamed(part: LabeledSamples, names: tuple[str, ...]) -> Tensor:
    """Return the labels (n,) of samples as places in other names."""
    assert part.labels is not None
    places = torch.tensor([names.index(name) for name in part.class_names])
    return places[part.labels.cpu()].to(part.labels.device)


def _whole(shares: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Round shares (K,) to whole numbers that sum to `count`, the largest remainders up."""
    found = np.floor(shares + 1e-9).astype(np.int64)
    remainders = np.argsort(found - shares, kind="stable")
    found[remainders[: count - int(found.sum())]] += 1
    return found
