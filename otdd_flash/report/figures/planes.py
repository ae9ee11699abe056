"""The principal plane of several point clouds, the page it is drawn on, and projected datasets.

`fit_plane` finds the plane, `plane_frame`, `write_title` and `write_legend` make the page, and
`side_of` projects one dataset: sampled points, class means and masses. `report.distance` uses it
for projection.png and `report.flow.paths` for paths.png.

A float64 copy of the features may not fit into memory, so they are read in chunks of rows. Every
random draw takes a seed, so that a picture is the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.report.figures.page import INK, fit, measure, name_style, new_figure
from otdd_flash.samples import LabeledSamples

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


ROWS_AT_ONCE = 4096

BLOCK, ROUNDS = 12, 8


@dataclass(frozen=True)
class PrincipalPlane:
    """The plane through `mean` (d,) spanned by the columns of `axes` (d, 2), both float64.

    `explained` holds the axes' shares of the variance. If d = 1 or all points are on a line, the
    second share is 0.
    """

    mean: Tensor
    axes: Tensor
    explained: tuple[float, float]

    def project(self, features: Tensor) -> Tensor:
        """Return the coordinates (n, 2), float64 on the CPU, of features (n, d) on any device."""
        return torch.cat([(rows - self.mean) @ self.axes for rows in _chunks(features)])


def fit_plane(clouds: Sequence[Tensor], seed: int) -> PrincipalPlane:
    """Fit the first two principal axes to several clouds, each with the same total weight.

    The method is block power iteration (Halko, Martinsson & Tropp 2011), so that neither a (d, d)
    covariance nor a float64 copy of the features is stored. The largest entry of each axis is
    positive.

    Args:
        clouds: matrices (n_k, d) with the same d, on any device.
        seed: of the block that the iteration starts from.
    """
    d = clouds[0].shape[1]
    mean = _average(clouds, lambda rows: rows.sum(0))
    total = float(_average(clouds, lambda rows: (rows - mean).square().sum()))

    def spread(block: Tensor) -> Tensor:
        """Return the covariance times a block (d, k)."""
        return _average(clouds, lambda rows: (rows - mean).T @ ((rows - mean) @ block))

    start = np.random.default_rng(seed).normal(size=(d, min(d, BLOCK)))
    block = torch.linalg.qr(torch.from_numpy(start)).Q
    for _ in range(ROUNDS):
        block = torch.linalg.qr(spread(block)).Q
    variances, vectors = torch.linalg.eigh(block.T @ spread(block))
    axes = torch.zeros(d, 2, dtype=torch.float64)
    explained = [0.0, 0.0]
    for k in range(min(2, d)):
        axis = block @ vectors[:, -1 - k]
        axes[:, k] = axis * torch.sign(axis[axis.abs().argmax()])
        explained[k] = max(float(variances[-1 - k]) / total, 0.0) if total > 0 else 0.0
    return PrincipalPlane(mean, axes, (explained[0], explained[1]))


def _average(clouds: Sequence[Tensor], part: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mean over clouds of the mean over rows; `part` sums over a chunk of rows."""
    means = [torch.stack([part(rows) for rows in _chunks(c)]).sum(0) / len(c) for c in clouds]
    return torch.stack(means).mean(0)


def _chunks(features: Tensor) -> Iterator[Tensor]:
    """Yield the rows in float64 on the CPU, `ROWS_AT_ONCE` at a time."""
    for start in range(0, len(features), ROWS_AT_ONCE):
        yield features[start : start + ROWS_AT_ONCE].detach().cpu().double()


Array = NDArray[np.float64]

# Inches.
WIDTH, LEAST_HEIGHT, MOST_HEIGHT = 8.6, 3.6, 7.4

LEFT, RIGHT, TOP, BOTTOM = 0.75, 0.15, 0.5, 1.25

TITLE_POINTS = 12.0


def new_page(height: float) -> tuple[Figure, Axes]:
    """Return a page with axes of `WIDTH` and this height in inches."""
    page = (LEFT + WIDTH + RIGHT, BOTTOM + height + TOP)
    figure = new_figure(*page)
    axes = figure.add_axes((LEFT / page[0], BOTTOM / page[1], WIDTH / page[0], height / page[1]))
    axes.ticklabel_format(scilimits=(-2, 4), useMathText=True)
    axes.tick_params(labelsize=8, color="0.6", labelcolor=INK, length=3)
    axes.spines[:].set_color("0.8")
    return figure, axes


def plane_frame(clouds: Sequence[Array], means: Sequence[Array]) -> tuple[Figure, Axes]:
    """Return a page with the same scale in both directions that contains all but far outliers.

    Args:
        clouds: points (k, 2); one in a hundred may lie outside.
        means: points (k, 2) that must all lie inside; rows of NaN are ignored.
    """
    points = np.concatenate(clouds)
    low, high = np.quantile(points, [0.005, 0.995], axis=0)
    reach = 0.25 * (high - low)
    low, high = np.maximum(low - reach, points.min(0)), np.minimum(high + reach, points.max(0))
    inside = np.concatenate(means)
    low, high = np.fmin(low, np.nanmin(inside, 0)), np.fmax(high, np.nanmax(inside, 0))
    span = high - low if (high > low).any() else np.ones(2)
    height = MOST_HEIGHT
    if span[1] * WIDTH < span[0] * MOST_HEIGHT:
        height = max(float(WIDTH * span[1] / span[0]), LEAST_HEIGHT)
    half = 0.54 * max(span[0] / WIDTH, span[1] / height) * np.array([WIDTH, height])
    centre = (low + high) / 2
    figure, axes = new_page(height)
    axes.set_xlim(centre[0] - half[0], centre[0] + half[0])
    axes.set_ylim(centre[1] - half[1], centre[1] + half[1])
    return figure, axes


def axis_name(plane: PrincipalPlane, k: int) -> str:
    """Return the label of a principal axis with its share of the variance."""
    share = plane.explained[k]
    percent = f"{share:.1%}" if 0 < share < 0.01 else f"{share:.0%}"
    return f"principal axis {k + 1} ({percent} of the variance)"


def name_axes(axes: Axes, horizontal: str, vertical: str) -> None:
    """Label both axes."""
    axes.xaxis.set_label_text(horizontal, fontsize=9, color=INK)
    axes.yaxis.set_label_text(vertical, fontsize=9, color=INK)


def write_title(figure: Figure, axes: Axes, title: str) -> None:
    """Write a title above the axes, shortened to their width."""
    text = fit(title, WIDTH, lambda shown: measure(figure, shown, TITLE_POINTS)[0])
    place = (axes.get_position().x0, 1 - 0.15 / figure.get_size_inches()[1])
    figure.text(*place, text, fontsize=TITLE_POINTS, color=INK, va="top", **name_style(text))


def write_legend(
    figure: Figure, axes: Axes, handles: Sequence[Line2D], texts: Sequence[str], columns: int = 1
) -> None:
    """Write the legend below the axes; there is room for three lines."""
    legend = figure.legend(
        handles,
        texts,
        loc="upper left",
        bbox_to_anchor=(axes.get_position().x0, (BOTTOM - 0.5) / figure.get_size_inches()[1]),
        frameon=False,
        fontsize=9,
        borderpad=0,
        borderaxespad=0,
        labelcolor=INK,
        ncols=columns,
    )
    for text in legend.get_texts():
        text.set(**name_style(text.get_text()))


ROWS_DRAWN = 2000


@dataclass(frozen=True)
class ProjectedSide:
    """One dataset as it is drawn.

    `points` (k, 2) are a sample of its rows. `centroids` (V, 2), NaN for a class without mass, and
    `masses` (V,) come from all rows. `class_names` has V entries, empty where a class has no name.
    """

    name: str
    size: int
    points: NDArray[np.float64]
    centroids: NDArray[np.float64]
    masses: NDArray[np.float64]
    class_names: Sequence[str]
    color: str
    marker: str


def side_of(
    samples: LabeledSamples, classes: int, plane: PrincipalPlane, seed: int, color: str, marker: str
) -> ProjectedSide:
    """Project a dataset whose side of the coupling has `classes` classes.

    If `classes` is 1, the dataset needs no labels.

    Raises:
        ValueError: the dataset has another number of classes.
    """
    labels, names = samples.labels, samples.class_names
    if classes == 1 and (labels is None or len(names) != 1):
        labels, names = torch.zeros(len(samples), dtype=torch.int64), ("",)
    if labels is None or classes != len(names):
        known = "no labels" if labels is None else f"{len(names)} classes"
        raise ValueError(f"the coupling has {classes} classes, {samples.name} has {known}")
    index, weights = labels.cpu().numpy(), samples.masses.cpu().numpy()
    places = plane.project(samples.features).numpy()
    masses = np.bincount(index, weights, minlength=classes).astype(np.float64)
    sums = [np.bincount(index, weights * places[:, k], minlength=classes) for k in range(2)]
    with np.errstate(invalid="ignore"):
        centroids = np.stack(sums, axis=1) / masses[:, None]
    return ProjectedSide(
        name=samples.name,
        size=len(samples),
        points=places[rows_with_mass(samples, ROWS_DRAWN, seed)],
        centroids=centroids,
        masses=masses,
        class_names=names,
        color=color,
        marker=marker,
    )


def rows_with_mass(samples: LabeledSamples, limit: int, seed: int) -> NDArray[np.int64]:
    """Return the indices of at most `limit` rows, drawn at random among those with mass."""
    rows: NDArray[np.int64] = np.flatnonzero(samples.masses.cpu().numpy() > 0)
    if len(rows) > limit:
        rows = np.sort(np.random.default_rng(seed).choice(rows, limit, replace=False))
    return rows
