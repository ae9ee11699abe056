"""The principal plane of several point clouds, the page it is drawn on, and names beside points.

`plane_of` finds the plane, `side_of` projects one dataset (sampled points, class means and masses),
`plane_frame` makes the page with its axes, `write_legend` the legend, and `draw_names` writes names
so that none covers another, a marker or the frame. `report.distance` calls these for projection.png
and `report.flow_pictures` for paths.png, on a page of `new_page` if all points are on a line;
`report.study.writing` draws names.

Features are projected in chunks of rows, because a float64 copy may not fit into memory. Every
random draw takes a seed, so that a picture is the same in every run. Names are placed in pixels, so
the data, the place of the axes and the size of the figure must be final before they are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.report.page import DPI, TICK_POINTS, fit_title, measure, new_figure
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Array = NDArray[np.float64]

# Rows of each cloud that the plane is fitted to, rows of a dataset that are drawn, and rows that
# are projected at once.
ROWS_FITTED, ROWS_DRAWN, ROWS_AT_ONCE = 5000, 2000, 4096

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

    @property
    def flat(self) -> bool:
        """Whether all points are on a line."""
        return self.explained[1] < 1e-9

    def project(self, features: Tensor) -> Array:
        """Return the coordinates (n, 2) of features (n, d) on any device."""
        chunks = torch.split(features.detach(), ROWS_AT_ONCE)
        places = [(rows.cpu().double() - self.mean) @ self.axes for rows in chunks]
        return torch.cat(places).numpy()

    def name(self, k: int) -> str:
        """Return the label of a principal axis with its share of the variance."""
        share = self.explained[k]
        percent = f"{share:.1%}" if 0 < share < 0.01 else f"{share:.0%}"
        return f"principal axis {k + 1} ({percent} of the variance)"


def plane_of(datasets: Sequence[LabeledSamples], seed: int) -> PrincipalPlane:
    """Fit the plane to at most `ROWS_FITTED` rows with mass of each dataset."""
    return fit_plane(
        [
            one.features[torch.from_numpy(rows_with_mass(one, ROWS_FITTED, seed))]
            for one in datasets
        ],
        seed,
    )


def fit_plane(clouds: Sequence[Tensor], seed: int) -> PrincipalPlane:
    """Fit the first two principal axes to several clouds, each with the same total weight.

    The method is block power iteration (Halko, Martinsson & Tropp 2011), so that no (d, d)
    covariance is stored. The largest entry of each axis is positive.

    Args:
        clouds: matrices (n_k, d) with the same d, on any device.
        seed: of the block that the iteration starts from.
    """
    given = [cloud.detach().cpu() for cloud in clouds]
    mean = torch.stack([cloud.mean(0, dtype=torch.float64) for cloud in given]).mean(0)
    rows = torch.cat([(cloud - mean).float() / len(cloud) ** 0.5 for cloud in given])
    d = len(mean)
    start = np.random.default_rng(seed).normal(size=(d, min(d, BLOCK)))
    block = torch.from_numpy(start).float()
    for _ in range(ROUNDS):
        block = torch.linalg.qr(rows.T @ (rows @ block)).Q
    _, spread, right = torch.linalg.svd(rows @ block, full_matrices=False)
    axes, explained = torch.zeros(d, 2, dtype=torch.float64), [0.0, 0.0]
    total = float(rows.square().sum())
    for k in range(min(2, len(spread))):
        axis = (block @ right[k]).double()
        axes[:, k] = axis * torch.sign(axis[axis.abs().argmax()])
        explained[k] = float(spread[k]) ** 2 / total if total > 0 else 0.0
    return PrincipalPlane(mean, axes, (explained[0], explained[1]))


@dataclass(frozen=True)
class ProjectedSide:
    """One dataset as it is drawn.

    `points` (k, 2) are a sample of its rows. `centroids` (V, 2), NaN for a class without mass, and
    `masses` (V,) come from all rows. `class_names` has V entries, empty where a class has no name.
    """

    name: str
    size: int
    points: Array
    centroids: Array
    masses: Array
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
    labels, names = samples.labels, samples.label_names
    if classes == 1 and (labels is None or len(names) != 1):
        labels, names = torch.zeros(len(samples), dtype=torch.int64), ("",)
    if labels is None or classes != len(names):
        known = "no labels" if labels is None else f"{len(names)} classes"
        raise ValueError(f"the coupling has {classes} classes, {samples.name} has {known}")
    index, weights = labels.cpu().numpy(), samples.masses.cpu().numpy()
    places = plane.project(samples.features)
    counted = [np.bincount(index, weights * x, minlength=1) for x in (1, *places.T)]
    sums = [np.asarray(each, dtype=np.float64) for each in counted]
    if samples.label_sets is not None and classes > 1:
        # A row stands in the means of all its labels.
        shares = samples.label_sets.shares.numpy()
        sums = [np.pad(each, (0, len(shares) - len(each))) @ shares for each in sums]
    masses, *sums = (np.pad(each, (0, max(0, classes - len(each)))) for each in sums)
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


# Inches: the width of the axes, and their least and greatest height.
WIDTH, LEAST_HEIGHT, MOST_HEIGHT = 8.6, 3.6, 7.4

LEFT, RIGHT, TOP, BOTTOM = 0.75, 0.15, 0.5, 1.25


def new_page(height: float, title: str) -> tuple[Figure, Axes]:
    """Return a page with a title above axes of `WIDTH` and this height in inches."""
    page = (LEFT + WIDTH + RIGHT, BOTTOM + height + TOP)
    figure = new_figure(*page)
    axes = figure.add_axes((LEFT / page[0], BOTTOM / page[1], WIDTH / page[0], height / page[1]))
    axes.tick_params(labelsize=TICK_POINTS)
    axes.set_title(fit_title(figure, title, WIDTH), pad=10)
    return figure, axes


def plane_frame(
    clouds: Sequence[Array], means: Sequence[Array], plane: PrincipalPlane, title: str
) -> tuple[Figure, Axes]:
    """Return a page with the same scale in both directions that contains all but far outliers.

    Args:
        clouds: points (k, 2); one in a hundred may lie outside.
        means: points (k, 2) that must all lie inside; rows of NaN are ignored.
        plane: the plane, which names the axes.
        title: the title above the axes.
    """
    points, inside = np.concatenate(clouds), np.concatenate(means)
    low, high = np.quantile(points, [0.005, 0.995], axis=0)
    reach = 0.25 * (high - low)
    low, high = np.maximum(low - reach, points.min(0)), np.minimum(high + reach, points.max(0))
    low, high = np.fmin(low, np.nanmin(inside, 0)), np.fmax(high, np.nanmax(inside, 0))
    span = high - low if (high > low).any() else np.ones(2)
    height = MOST_HEIGHT
    if span[1] * WIDTH < span[0] * MOST_HEIGHT:
        height = max(float(WIDTH * span[1] / span[0]), LEAST_HEIGHT)
    size, centre = np.array([WIDTH, height]), (low + high) / 2
    half = 0.54 * (span / size).max() * size
    figure, axes = new_page(height, title)
    (x0, y0), (x1, y1) = centre - half, centre + half
    axes.set(xlim=(x0, x1), ylim=(y0, y1), xlabel=plane.name(0), ylabel=plane.name(1))
    return figure, axes


def write_legend(axes: Axes, *handles: Line2D) -> None:
    """Write the legend of labelled lines below the axes; there is room for three lines."""
    at = 0.0, -0.5 / (axes.bbox.height / DPI)
    legend = {"frameon": False, "borderpad": 0, "borderaxespad": 0}
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=at, **legend)


LONGEST_NAME, POINTS = 16, 9.0

# Pixels: from the centre of a marker to its edges, and the distance beyond which a name gets a line
# to its point.
MARKER_RADIUS, LEADER_FROM = 8.0, 24.0

RADII = (13.0, 18.0, 25.0, 35.0, 48.0, 64.0, 84.0, 110.0, 145.0, 190.0)

DIRECTIONS = 16

# Penalties, in pixels of distance that are as bad: a name on a line, a name nearest to another
# point.
CROSSING_COST, CONFUSION_COST = 25.0, 20.0


class PointName(NamedTuple):
    """A name `text` to write beside the marker at `place`, in data coordinates."""

    text: str
    place: tuple[float, float]
    color: str
    italic: bool = False


def draw_names(
    axes: Axes, names: Sequence[PointName], lines: Array | None = None, top: float = 1.0
) -> None:
    """Name points, the most important first; a name for which there is no room is left out.

    Each name gets the best free place around its point: near, off the lines, and nearest to its own
    point. A place is free if the name is inside the axes and covers no marker and no earlier name.

    Args:
        axes: where the points are drawn; nothing may move them later.
        names: the names, which are shortened to 16 characters.
        lines: (s, 2, 2) ends of line segments, in data coordinates, that names should not cover.
        top: the height, as a part of the axes, below which names may be placed.
    """
    from matplotlib.patheffects import withStroke

    axes.autoscale_view()
    pixels = axes.transData.transform
    anchors = pixels(np.array([name.place for name in names]).reshape(-1, 2))
    lines = np.zeros((0, 2, 2)) if lines is None else pixels(lines.reshape(-1, 2)).reshape(-1, 2, 2)
    along = np.linspace(0.0, 1.0, 40)[:, None, None]
    dots = lines[:, 0] * (1 - along) + lines[:, 1] * along
    x0, y0, x1, y1 = axes.bbox.extents
    y1 = y0 + top * (y1 - y0)
    angles = np.arange(DIRECTIONS) * (2 * np.pi / DIRECTIONS)
    directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    radii = np.repeat(RADII, DIRECTIONS)
    steps = np.tile(directions, (len(RADII), 1))
    taken = np.stack([anchors - MARKER_RADIUS, anchors + MARKER_RADIUS], axis=1)
    for k, (name, anchor) in enumerate(zip(names, anchors, strict=True)):
        text = shorten(name.text, LONGEST_NAME)
        size = DPI * np.array(measure(axes.figure, text, POINTS, fontweight="bold")) + 3
        # A name touches the circle with the side that faces it: beside it, above it or a corner.
        offsets = radii[:, None] * steps + np.clip(1.5 * steps, -1.0, 1.0) * size / 2
        low, high = anchor + offsets - size / 2, anchor + offsets + size / 2
        free = ((low >= (x0, y0)) & (high <= (x1, y1))).all(1)
        free &= ~((low[:, None] < taken[:, 1]) & (taken[:, 0] < high[:, None])).all(2).any(1)
        if not free.any():
            continue
        under = (dots > low[:, None, None]) & (dots < high[:, None, None])
        gaps = np.linalg.norm((anchor + offsets)[:, None] - anchors, axis=2)
        cost = radii + CROSSING_COST * under.all(3).any(1).sum(1)
        cost = cost + CONFUSION_COST * (gaps.argmin(1) != k)
        best = int(np.where(free, cost, np.inf).argmin())
        taken = np.concatenate([taken, [[low[best], high[best]]]])
        leader = {"arrowstyle": "-", "color": name.color, "linewidth": 0.7, "shrinkB": 0}
        axes.annotate(
            text,
            name.place,
            offsets[best] * 72 / DPI,
            textcoords="offset points",
            arrowprops=leader if radii[best] > LEADER_FROM else None,
            fontsize=POINTS,
            fontweight="bold",
            fontstyle="italic" if name.italic else "normal",
            color=name.color,
            ha="center",
            va="center",
            zorder=6,
            path_effects=[withStroke(linewidth=2.2, foreground="white")],
        )
