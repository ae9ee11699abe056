"""The problems of the convergence benchmark: real clouds, a relative epsilon, and exact looks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

import otdd_flash as otdd
from experiments.bench_divergence import marginal_error
from experiments.otdd_scaling.features import resnet18
from otdd_flash.labels import measure_classes
from otdd_flash.operators.base import Operator
from otdd_flash.operators.comparison import Comparison
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.certificate import certify

TARGET = 1e-3
DATASETS = ("mnist", "usps", "fashion_mnist")
IMAGE = 28
COST = otdd.GroundCost()
# A network trains on this many images of each dataset at the most, on a processor on few.
TRAINING_IMAGES, FEW_TRAINING_IMAGES = 60_000, 6_000


class Look(NamedTuple):
    """What potentials are worth.

    Attributes:
        error: L1 marginal error on the points as given, of the larger marginal; None if infinite.
        bounds: (lower, upper) of OT_epsilon that they prove, or None where not asked for.
    """

    error: float | None
    bounds: tuple[float, float] | None


@dataclass(frozen=True, eq=False)
class CrossTerm:
    """OT_epsilon(x, y) of two clouds on a device; without a table, labels do not count.

    Attributes:
        source: n points.
        target: m points.
        table: W (V_x + V_y, V_x + V_y), or None.
        epsilon: regularisation, in units of the cost.
        compute: where and how our passes run while iterating.
    """

    source: LabeledSamples
    target: LabeledSamples
    table: Tensor | None
    epsilon: float
    compute: otdd.ComputeOptions

    @cached_property
    def exact(self) -> Operator:
        """The cost in the precision of the looks: `double` on a processor, `high` on a GPU."""
        in_torch = self.source.features.device.type == "cpu" and self.compute.backend != "triton"
        return self.operator("double" if in_torch else "high")

    def operator(
        self, precision: str = "fast", points: tuple[Tensor, Tensor] | None = None
    ) -> Operator:
        """Our operator, of the clouds or of other points in their place."""
        x, y = self.source, self.target
        if points is not None:
            x, y = replace(x, features=points[0]), replace(y, features=points[1])
        compute = replace(self.compute, precision=precision)
        comparison = Comparison.prepare((x, y), COST, compute, debias=False)
        return comparison.with_classes(self.table).operator("xy")

    def look(self, f: Tensor, g: Tensor, *, certified: bool) -> Look:
        """Measure f (n,) and g (m,); a certificate takes three passes more."""
        exact = self.exact
        f, g = (potential.to(exact.a.device, exact.costs.dtype) for potential in (f, g))
        error = marginal_error(exact, f, g, self.epsilon)
        if not math.isfinite(error):
            return Look(None, None)
        return Look(error, certify(exact, f, g, self.epsilon).bounds if certified else None)


class Clouds:
    """Pairs of datasets as pixels (d = 784) or features (d = 512), on a device.

    Features come from one ResNet18, trained for one epoch on all three datasets at 28 x 28, because
    there are no pretrained weights (`otdd_scaling.features`).

    Args:
        root: folder of the datasets.
        device: where the clouds are kept.
        training_images: of each dataset, for the network.
    """

    def __init__(self, root: str, device: str, training_images: int = TRAINING_IMAGES) -> None:
        self.root, self.device = root, device
        self.training_images = training_images
        self.network = cache(self._network)
        self.side = cache(self._side)

    def pair(self, names: tuple[str, str], points: str, n: int) -> list[LabeledSamples]:
        """Both sides, n points each or all that there are."""
        return [self.side(name, points, n) for name in names]

    def _network(self) -> tuple[Any, dict[str, Any]]:
        datasets = [self._dataset(name, self.training_images) for name in DATASETS]
        return resnet18(datasets, None, torch.device(self.device))

    def _side(self, name: str, points: str, n: int) -> LabeledSamples:
        extractor = (
            self.network()[0] if points == "features" else otdd.extractors.pixels(size=IMAGE)
        )
        return otdd.embed(
            self._dataset(name, n),
            extractor,
            device=self.device,
            batch_size=1024,
            mixed_precision=False,
        ).to(self.device)

    def _dataset(self, name: str, n: int) -> Any:
        """A dataset's images, resized for the network."""
        dataset = otdd.load(name, root=self.root, max_samples=n)
        images = torch.from_numpy(np.array(dataset.inputs))
        if images.shape[-1] == IMAGE:
            return dataset
        wide = interpolate(images[:, None].float(), (IMAGE, IMAGE), mode="bilinear", antialias=True)
        return replace(dataset, inputs=wide[:, 0].round().byte().numpy())


def make_term(
    clouds: list[LabeledSamples], relative: float, compute: otdd.ComputeOptions, *, labels: bool
) -> CrossTerm:
    """The cross term at a multiple of its own mean cost, with gaussian class distances or none."""
    if labels:
        source, target = clouds
        table = measure_classes(source, target, otdd.labels.Gaussian()).full
    else:
        source, target = (LabeledSamples(side.features, None, ()) for side in clouds)
        table = None
    term = CrossTerm(source, target, table, 1.0, compute)
    comparison = Comparison.prepare((source, target), COST, compute, debias=False)
    mean = comparison.with_classes(table).mean_cost()
    return replace(term, epsilon=relative * mean)
