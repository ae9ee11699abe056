"""The colours of one photograph for another's, by all of its colours and by a sample of 512.

    python -m experiments.colour_transfer [--device cpu] [--epsilons 0.01 0.001] [--output DIR]

scikit-learn's two bundled photographs, RGB in [0, 1]. Every distinct colour is a point, its count
its mass: about 100,000 a side, streamed as clouds at the cost |x - y|^2 to a marginal error of
1e-3. A colour becomes the barycentre of its conditional plan. `--sample` does the same between
pixels drawn at random, as FastSinkhorn does between 512, and carries all other colours over by the
entropic map of the sample. For both, S_epsilon to the target's colours before and after, on all
colours. Colours are rounded to so many levels first (256 are all); of one level in two or four
there are few enough for two cores.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.rows import Rows
from otdd_flash.report.page import new_figure, save_picture
from otdd_flash.solver.divergence import Divergence

EPSILONS, SAMPLE, SEED, AT_ONCE = (0.01, 0.001), 512, 0, 4096
COST = otdd.GroundCost(1.0, 0.0)
NAMES = ("china", "flower")


class Colours(NamedTuple):
    """The distinct colours of an image (h, w, 3).

    Attributes:
        points: (n, 3) float32 in [0, 1].
        masses: (n,) float64, shares of the pixels.
        places: (h, w) int64, which colour a pixel has.
    """

    points: Tensor
    masses: Tensor
    places: Tensor

    @classmethod
    def of(cls, image: np.ndarray[Any, Any], levels: int) -> Colours:
        """Colours of an image of bytes, rounded to some levels a channel."""
        step = 256 // levels
        rounded = torch.from_numpy(image.astype(np.int64)) // step * step + (step - 1) / 2
        flat, places, counts = torch.unique(
            rounded.reshape(-1, 3), dim=0, return_inverse=True, return_counts=True
        )
        return cls(
            (flat / 255).float(), counts.double() / counts.sum(), places.view(image.shape[:2])
        )

    @property
    def samples(self) -> otdd.LabeledSamples:
        """As a weighted cloud."""
        return otdd.LabeledSamples(self.points, None, (), self.masses)


def photographs(levels: int) -> list[Colours]:
    """Both, by the names in `NAMES`."""
    from sklearn.datasets import load_sample_image

    return [Colours.of(load_sample_image(f"{name}.jpg"), levels) for name in NAMES]


def of_all(source: Colours, target: Colours, epsilon: float, device: str) -> Tensor:
    """New colours (n, 3) by the barycentric map between all."""
    found = otdd.dataset_distance(
        source.samples, target.samples, epsilon=epsilon, lambda_x=COST.lambda_x, labels="none",
        debias=False, compute=device,
    )  # fmt: skip
    return found.barycentric_map().cpu().float()


def of_sample(source: Colours, target: Colours, epsilon: float, device: str, size: int) -> Tensor:
    """The same by the entropic map between samples of pixels, which is defined anywhere.

    T(x) = sum_j w_j(x) y_j with w_j(x) proportional to exp((g_j - |x - y_j|^2) / epsilon).
    """
    draw = torch.Generator().manual_seed(SEED)
    x, y = (
        side.points[torch.multinomial(side.masses, size, replacement=True, generator=draw)]
        for side in (source, target)
    )
    term = otdd.sinkhorn(x, y, epsilon=epsilon, cost=COST, compute=device)
    g = term.g.float().cpu()
    found = []
    for first in range(0, len(source.points), AT_ONCE):
        part = source.points[first : first + AT_ONCE]
        weights = torch.softmax((g - torch.cdist(part, y).square()) / epsilon, 1)
        found.append(weights @ y)
    return torch.cat(found)


def divergence(
    colours: Tensor, source: Colours, target: Colours, epsilon: float, device: str
) -> Divergence:
    """S_epsilon of the source's pixels in these colours to the target's."""
    cloud = otdd.LabeledSamples(colours, None, (), source.masses)
    return otdd.sinkhorn_divergence(
        cloud, target.samples, epsilon=epsilon, cost=COST, compute=device
    )


def measure(
    rows: Rows, sides: list[Colours], levels: int, epsilon: float, size: int, device: str
) -> dict[str, Tensor]:
    """Both directions by both methods; the new images (h, w, 3) by name."""
    images = {}
    for one, two in ((0, 1), (1, 0)):
        source, target = sides[one], sides[two]
        keys = {"from": NAMES[one], "to": NAMES[two], "levels": levels, "epsilon": epsilon}
        before = divergence(source.points, source, target, epsilon, device)
        for method, number in (("all", None), ("sample", size)):
            started = time.perf_counter()
            if number is None:
                colours = of_all(source, target, epsilon, device)
            else:
                colours = of_sample(source, target, epsilon, device, number)
            seconds = time.perf_counter() - started
            after = divergence(colours, source, target, epsilon, device)
            images[f"{NAMES[one]} {method}"] = colours.clamp(0, 1)[source.places]
            rows.add(
                {
                    **keys,
                    "method": method,
                    "colours": [len(source.points), len(target.points)],
                    "sample": number,
                    "seconds": seconds,
                    "before": before.value,
                    "after": after.value,
                    "bounds": list(after.bounds),
                }
            )
    return images


def draw(images: dict[str, Tensor], sides: list[Colours], epsilon: float, path: Path) -> None:
    """Each photograph, in the other's colours by all, and by a sample."""
    figure = new_figure(11.0, 5.2)
    panels = figure.subplots(2, 3)
    for row, (name, side) in enumerate(zip(NAMES, sides, strict=True)):
        shown = {
            "as it is": side.points[side.places],
            "all colours": images[f"{name} all"],
            f"a sample of {SAMPLE}": images[f"{name} sample"],
        }
        for axes, (title, image) in zip(panels[row], shown.items(), strict=True):
            axes.imshow(image.numpy()[::2, ::2])
            axes.set_title(title if row == 0 else "", fontsize=10)
            axes.axis("off")
    figure.suptitle(f"epsilon = {epsilon:g}", fontsize=10)
    figure.tight_layout()
    save_picture(figure, path)


def main() -> None:
    """Write colour_transfer_DEVICE.json, and a picture for every epsilon."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--sample", type=int, default=SAMPLE)
    parser.add_argument("--levels", type=int, default=256, choices=(16, 32, 64, 128, 256))
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    warnings.simplefilter("ignore", otdd.NotConvergedWarning)
    sides = photographs(given.levels)
    sys.stdout.write(f"{[len(side.points) for side in sides]} colours\n")
    keys = ("from", "to", "levels", "epsilon", "method")
    name = f"colour_transfer_{given.device}"
    rows = Rows(name, keys, "torch", "scikit-learn", folder=given.output, again=True)
    for epsilon in given.epsilons:
        images = measure(rows, sides, given.levels, epsilon, given.sample, given.device)
        draw(images, sides, epsilon, given.output / f"{name}_{epsilon:g}.png")


if __name__ == "__main__":
    main()
