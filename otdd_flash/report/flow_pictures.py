"""Pictures of a flow: paths.png, its particles in their principal plane; images.png and flow.gif.

`report.flow` calls `draw_paths`, and for particles that are images `draw_images` and
`write_animation`. paths.png has at most 120 paths, coloured by class, with the mean path of each
class and the target. images.png is a grid of steps, which ends with the nearest images of the
target; in flow.gif, whose frames are drawn with Pillow, each image has its label above it. All
frames share one palette; without that, colours would flicker between frames. Particles and steps
are chosen without randomness, so that pictures of one flow show the same ones in every run.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from otdd_flash.data.writing import ImageShape, eight_bit_images
from otdd_flash.files.atomic import replacing
from otdd_flash.flows.result import Trajectory
from otdd_flash.report.page import (
    INK,
    SOURCE_COLOR,
    TARGET_COLOR,
    fit,
    fit_title,
    font_file,
    grow_page,
    new_figure,
)
from otdd_flash.report.planes import (
    PointName,
    ProjectedSide,
    draw_names,
    new_page,
    plane_frame,
    plane_of,
    side_of,
    write_legend,
)
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Array = NDArray[np.float64]

TARGET_GREY, TARGET_INK = "0.72", "0.35"

STEPS_HEIGHT = 4.6  # inches

LONGEST_DATASET = 60

# With more classes in the target, their names would cover those of the particles.
MOST_TARGET_NAMES = 12

# Points of each mean path that names avoid.
CORNERS = 10


def draw_paths(
    source: LabeledSamples,
    target: LabeledSamples,
    samples: LabeledSamples,
    trajectory: Trajectory,
    *,
    seed: int = 0,
) -> Figure:
    """Draw paths of particles, coloured by class, with the mean path of each class and the target.

    The axes are the first two principal axes of target, start and end together, each fitted to at
    most 5,000 rows. If all points are on a line, the position is drawn against the step. At most
    120 paths and the 20 heaviest classes are shown; means are over all particles of `trajectory`. A
    target in another space than the particles is left out.

    Args:
        source: the n particles before the first step; their classes determine the colours.
        target: the m points.
        samples: the n particles after the last step.
        trajectory: the positions of some particles at some steps.
        seed: of the subsamples.
    """
    from matplotlib.ticker import MaxNLocator

    clouds = [source, samples] + ([target] if target.dim == source.dim else [])
    plane = plane_of(clouds, seed)
    goal, title = None, f"{source.name} on its way to {target.name}"
    if target in clouds:
        classes_of = max(1, len(target.label_names))
        goal = side_of(target, classes_of, plane, seed, TARGET_INK, "^")
    s, k, d = trajectory.points.shape
    places = plane.project(trajectory.points.reshape(s * k, d)).reshape(s, k, 2)
    if plane.flat:
        times = trajectory.steps.double().numpy()
        # The target is drawn a little after the last step.
        after = times[-1] + 0.06 * max(times[-1] - times[0], 1.0)
        classes = class_paths(source, trajectory, _against(times[:, None], places))
        if goal is not None:
            turned = _against(after, goal.points), _against(after, goal.centroids)
            goal = replace(goal, points=turned[0], centroids=turned[1])
        figure, axes = new_page(STEPS_HEIGHT, title)
        axes.margins(0.06)
        axes.set(xlabel="step", ylabel=f"position along {plane.name(0)}")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    else:
        classes = class_paths(source, trajectory, places)
        inside = [paths.lines.reshape(-1, 2) for paths in classes]
        inside += [] if goal is None else [goal.points]
        figure, axes = plane_frame(inside, [paths.mean for paths in classes], plane, title)
    marked = _draw_target(axes, goal)
    for paths in classes:
        _draw_class(axes, paths)
    # The particles' classes are named at the ends of their mean paths, then the target's.
    names = [PointName(c.name, tuple(c.mean[-1]), c.color) for c in classes if c.name]
    means = [c.mean[evenly(len(c.mean), CORNERS)] for c in classes]
    segments = [np.stack([mean[:-1], mean[1:]], axis=1) for mean in means]
    draw_names(axes, [*names, *marked], np.concatenate(segments))
    _explain(axes, classes, source, _about(goal, target, bool(marked)))
    return figure


def _against(times: Array | float, places: Array) -> Array:
    """Replace coordinates (..., 2) by time and first coordinate, for points on a line."""
    return np.stack([np.broadcast_to(times, places.shape[:-1]), places[..., 0]], axis=-1)


def _draw_target(axes: Axes, goal: ProjectedSide | None) -> list[PointName]:
    """Draw the target in grey and, if they are few, its class means; return the names of these."""
    if goal is None:
        return []
    x, y = goal.points.T
    axes.scatter(x, y, s=14, c=TARGET_GREY, marker="^", alpha=0.6, linewidths=0, zorder=1)
    if not any(goal.class_names) or len(goal.class_names) > MOST_TARGET_NAMES:
        return []
    x, y = goal.centroids.T
    axes.scatter(x, y, s=60, c=TARGET_INK, marker="^", edgecolors="white", zorder=4.2)
    return [
        PointName(name, (x, y), TARGET_INK, italic=True)
        for name, (x, y), mass in zip(goal.class_names, goal.centroids, goal.masses, strict=True)
        if mass > 0
    ]


def _draw_class(axes: Axes, paths: ClassPaths) -> None:
    """Draw thin paths from hollow to full dots, and the mean path over them as a thicker line."""
    from matplotlib.collections import LineCollection
    from matplotlib.patheffects import Normal, Stroke

    color, lines = paths.color, list(paths.lines)
    axes.add_collection(LineCollection(lines, colors=color, linewidths=0.7, alpha=0.4, zorder=2))
    x, y = paths.lines[:, 0].T
    axes.scatter(x, y, s=12, c="white", edgecolors=color, linewidths=0.7, alpha=0.6, zorder=2)
    x, y = paths.lines[:, -1].T
    axes.scatter(x, y, s=12, c=color, alpha=0.6, linewidths=0, zorder=2.5)
    x, y = paths.mean.T
    casing = [Stroke(linewidth=4.6, foreground="white"), Normal()]
    axes.plot(x, y, color=color, linewidth=2.6, zorder=4, path_effects=casing)
    axes.scatter(x[:1], y[:1], s=60, c="white", edgecolors=color, linewidths=2.0, zorder=4.5)
    axes.scatter(x[-1:], y[-1:], s=75, c=color, edgecolors="white", linewidths=1.2, zorder=5)


def _about(goal: ProjectedSide | None, target: LabeledSamples, marked: bool) -> str:
    name = shorten(target.name, LONGEST_DATASET)
    if goal is None:
        return f"{name} lies in another space and is not shown"
    return f"{name} ({goal.size:,} samples)" + (", and the means of its classes" if marked else "")


def _explain(
    axes: Axes, classes: Sequence[ClassPaths], source: LabeledSamples, about_target: str
) -> None:
    from matplotlib.lines import Line2D

    shown, total = sum(len(paths.lines) for paths in classes), source.class_total
    part = "" if len(classes) == total else f" ({len(classes)} of {total} shown)"
    path = f"path of a particle from ○ to ● ({shown:,} of {len(source):,} shown)"
    mean = "their mean" if source.labels is None else f"mean of a class{part}"
    write_legend(
        axes,
        Line2D([], [], color=INK, linewidth=0.7, alpha=0.6, label=path),
        Line2D([], [], color=INK, linewidth=2.6, label=mean),
        Line2D([], [], color=TARGET_INK, marker="^", linestyle="none", label=about_target),
    )


# With more, a picture can no longer be read.
MOST_LINES, MOST_CLASSES = 120, 20

# Tol's muted scheme, distinct for every common colour blindness, with its light colours darkened.
CLASS_COLORS = (
    *("#332288", "#CC6677", "#117733", "#4499DD", "#999933"),
    *("#AA4499", "#44AA99", "#882255", "#DDAA33", "#000000"),
)


@dataclass(frozen=True)
class ClassPaths:
    """One class of particles: `lines` (k, s, 2) of some, and `mean` (s, 2) of all recorded ones."""

    name: str
    color: str
    lines: Array
    mean: Array


def class_paths(source: LabeledSamples, trajectory: Trajectory, places: Array) -> list[ClassPaths]:
    """Return the paths of the at most 20 heaviest classes, heaviest first.

    Args:
        source: the particles before the first step, which give the classes; particles without
            labels are one class without a name.
        trajectory: the recorded positions.
        places: (s, k, 2) the positions as they are drawn.
    """
    rows = trajectory.rows.cpu()
    masses = source.masses.cpu()[rows].numpy()
    if not masses.any():
        masses = np.ones(len(rows))
    index = (
        np.zeros(len(rows), np.int64)
        if source.labels is None
        else source.labels.cpu()[rows].numpy()
    )
    totals = np.bincount(index, masses)
    heaviest = [c for c in np.argsort(-totals, kind="stable")[:MOST_CLASSES] if totals[c] > 0]
    kept = np.flatnonzero(np.isin(index, heaviest) & (masses > 0))
    drawn = kept[evenly_over_classes(torch.from_numpy(index[kept]), len(kept), MOST_LINES)]
    names = source.class_names or ("",)
    return [
        ClassPaths(
            name=names[c],
            color=CLASS_COLORS[c % len(CLASS_COLORS)],
            lines=places[:, drawn[index[drawn] == c]].swapaxes(0, 1),
            mean=np.average(places[:, index == c], axis=1, weights=masses[index == c]),
        )
        for c in heaviest
    ]


def evenly(total: int, count: int) -> NDArray[np.int64]:
    """Return at most `count` evenly spaced indices below `total`.

    The first index is among them, and the last if there are two or more.
    """
    places: NDArray[np.int64] = (
        np.linspace(0, total - 1, min(total, count)).round().astype(np.int64)
    )
    return places


def evenly_over_classes(labels: Tensor | None, total: int, count: int) -> NDArray[np.int64]:
    """Return at most `count` of `total` particles, ordered by class, equally many of each class.

    A class with too few particles gives all it has.

    Args:
        labels: (total,) class indices, or None for particles of one class.
        total: how many particles there are.
        count: how many to choose; if there are more classes, evenly spaced classes get one each.
    """
    if labels is None:
        return evenly(total, count)
    index = labels.cpu().numpy()
    members = [np.flatnonzero(index == label) for label in np.unique(index)]
    members = [members[k] for k in evenly(len(members), count)]
    sizes = np.array([len(rows) for rows in members])
    quotas = np.zeros_like(sizes)
    while quotas.sum() < min(count, sizes.sum()):
        # One more particle for each class that has one left, starting with the first class.
        open_classes = np.flatnonzero(quotas < sizes)
        quotas[open_classes[: count - quotas.sum()]] += 1
    chosen = [rows[evenly(len(rows), q)] for rows, q in zip(members, quotas, strict=True)]
    return np.concatenate(chosen)


# Particles, steps and nearest images that images.png shows.
MOST_ROWS, MOST_STEPS, NEIGHBOURS = 12, 8, 2

# Inches: an image's width, between images, before the nearest images, a title's least room.
CELL, SPACE, BREAK, TITLE_ROOM = 0.78, 0.05, 0.3, 4.0

LONGEST_NAME = 16


def draw_images(
    source: LabeledSamples,
    target: LabeledSamples,
    trajectory: Trajectory,
    image_shape: ImageShape,
) -> Figure:
    """Draw particles in rows, evenly over classes, and steps in columns; then their nearest images.

    The last columns are the two images of the target whose features are nearest to the particle's
    last position; beside them stands the class of the nearest one. They are left out if the
    target's features have another dimension than the particles.

    Args:
        source: the particles before the first step; their class names are written beside the rows.
        target: images of the same shape, or features of another dimension.
        trajectory: pixel values in [0, 1]; values outside are clipped.
        image_shape: (c, h, w) of one particle.

    Raises:
        InputError: particles are not images of this shape.
    """
    labels = None if source.labels is None else source.labels.cpu()[trajectory.rows.cpu()]
    chosen = torch.from_numpy(evenly_over_classes(labels, len(trajectory.rows), MOST_ROWS))
    moments = evenly(len(trajectory.steps), MOST_STEPS).tolist()
    steps = [eight_bit_images(trajectory.points[k, chosen], image_shape) for k in moments]
    found = _nearest(trajectory.points[-1, chosen], target)
    # `nearest` has one entry for each of the last columns of the picture.
    nearest = [eight_bit_images(target.features[rows], image_shape) for rows in found.T]
    lefts = [k * (CELL + SPACE) + BREAK * (k >= len(steps)) for k in range(len(steps + nearest))]
    height = CELL * image_shape[1] / image_shape[2]
    tops = [row * (height + SPACE) for row in range(len(chosen))]
    width, depth = lefts[-1] + CELL, tops[-1] + height
    figure = new_figure(width, depth)
    axes = figure.add_axes((0, 0, 1, 1))
    for left, images in zip(lefts, [*steps, *nearest], strict=True):
        for top, image in zip(tops, images, strict=True):
            extent = (left, left + CELL, top + height, top)
            axes.imshow(image, cmap="gray", vmin=0, vmax=255, aspect="auto", extent=extent)
    # Each `imshow` sets the limits to its own image.
    axes.set(xlim=(0, width), ylim=(depth, 0))
    heads = [str(step) for step in trajectory.steps[moments].tolist()]
    axes.set_xticks(
        [left + CELL / 2 for left in lefts[: len(steps)]], ["step " + heads[0], *heads[1:]]
    )
    middles, starts = (
        [top + height / 2 for top in tops],
        trajectory.rows[chosen.to(trajectory.rows)],
    )
    axes.set_yticks(middles, _class_names(source, starts))
    axes.tick_params(length=0, labelsize=9, labeltop=True, labelbottom=False)
    axes.tick_params(axis="y", labelcolor=SOURCE_COLOR)
    if nearest:
        other = axes.secondary_yaxis("right")
        other.set_yticks(middles, _class_names(target, found[:, 0]))
        other.tick_params(length=0, labelsize=9, labelcolor=TARGET_COLOR)
        other.spines[:].set_visible(False)
        at = lefts[len(steps)], -0.06
        axes.text(*at, "nearest in the target", color=TARGET_COLOR, va="bottom")
    axes.spines[:].set_visible(False)
    title = f"{source.name} on its way to {target.name}"
    axes.set_title(fit_title(figure, title, max(width, TITLE_ROOM)), pad=22)
    grow_page(figure)
    return figure


def _class_names(samples: LabeledSamples, rows: Tensor) -> list[str]:
    if samples.labels is None:
        return [""] * len(rows)
    labels = samples.labels[rows.to(samples.labels.device)].tolist()
    return [shorten(samples.class_names[label], LONGEST_NAME) for label in labels]


def _nearest(points: Tensor, target: LabeledSamples) -> Tensor:
    """Return (k, 2) the target rows nearest to each point, nearest first.

    The result is (k, 0) if the target has another dimension.
    """
    if target.dim != points.shape[1]:
        return torch.empty((len(points), 0), dtype=torch.int64)
    features = target.features.detach()
    distances = torch.cdist(points.to(features), features)
    return distances.topk(min(NEIGHBOURS, len(target)), largest=False).indices


MOST_A_SIDE, MOST_FRAMES = 8, 60
# Pixels: all images with gaps, the least page, a gap, a label's strip, a mark, a caption's line.
WIDTH, LEAST_WIDTH, GAP, STRIP, MARK, LINE = 600, 330, 4, 19, 3, 17
LABEL_SIZE, CAPTION_SIZE = 12, 13
# Milliseconds: more for the first and for the last frame, all frames together, and the least and
# the most of one frame.
FIRST_PAUSE, LAST_PAUSE, WHOLE, SHORTEST, LONGEST = 1000, 2000, 5000, 80, 400
BACKGROUND, PAPER = "#e1e1e1", "#fefefe"
# The grey level that becomes the colour of marks.
MARKED = 255
UNLIKE = "≠"
LABELLED = "above each image: its label"
COMPARED = f"orange frame and {UNLIKE}: the nearest of both datasets' images has another label"


def write_animation(
    source: LabeledSamples,
    target: LabeledSamples,
    trajectory: Trajectory,
    image_shape: ImageShape,
    path: str | Path,
) -> None:
    """Write an endless GIF of at most 8 x 8 particles over at most 60 steps, ordered by class.

    The first and the last frame are shown longer. Small images are enlarged by an integer factor,
    without smoothing; if images are large, fewer are shown. The label is written above each image.
    A coloured frame and an unequal sign mark an image that its label no longer fits (see
    `_misfits`).

    Args:
        source: the particles before the first step.
        target: the dataset they move to.
        trajectory: pixel values in [0, 1]; values outside are clipped.
        image_shape: (c, h, w) of one particle.
        path: the GIF file.

    Raises:
        InputError: particles are not images of this shape, or the file cannot be written.
    """
    side = min(MOST_A_SIDE, max(1, (WIDTH - GAP) // (image_shape[2] + GAP)))
    labels = trajectory.labels
    chosen = evenly_over_classes(
        None if labels is None else labels[0], len(trajectory.rows), side * side
    )
    side = min(side, math.ceil(math.sqrt(len(chosen))))
    moments, rows = evenly(len(trajectory.steps), MOST_FRAMES), torch.from_numpy(chosen)
    compared, misfits = _misfits(source, target, trajectory, rows, moments)
    legend = "; ".join([LABELLED] * (labels is not None) + [COMPARED] * compared)
    last, frames = int(trajectory.steps[-1]), []
    for place, k in enumerate(moments):
        images = eight_bit_images(trajectory.points[k, rows], image_shape)
        names = [] if labels is None else [source.class_names[c] for c in labels[k, rows].tolist()]
        caption = f"step {int(trajectory.steps[k])} of {last}"
        if compared:
            caption += f", {misfits[place].sum()} of {len(chosen)} marked"
        frames.append(_frame(images, side, names, misfits[place], (caption, legend)))
    pictures = _with_one_palette(frames)
    usual = min(max(WHOLE // len(pictures), SHORTEST), LONGEST)
    durations = [usual] * len(pictures)
    durations[0] += FIRST_PAUSE
    durations[-1] += LAST_PAUSE
    with replacing(path) as partial:
        pictures[0].save(
            partial,
            format="GIF",
            save_all=True,
            append_images=pictures[1:],
            duration=durations,
            loop=0,
        )


def _misfits(
    source: LabeledSamples,
    target: LabeledSamples,
    trajectory: Trajectory,
    rows: Tensor,
    moments: Sequence[int] | NDArray[np.int64],
) -> tuple[bool, NDArray[np.bool_]]:
    """Return (s, k) whether a particle's nearest image, by pixels, has another class than it has.

    The images compared are those of the target and the particles' own starts, so that no particle
    is marked before it moves. Classes with the same name count as one class. The first part of the
    result is False if nothing can be compared: a side has no labels, the target has another
    dimension, or the datasets share no class name.

    Args:
        source: the particles before the first step.
        target: the images they move to.
        trajectory: the positions of the particles and their labels.
        rows: (k,) indices into the recorded particles.
        moments: (s,) indices into the recorded steps.
    """
    labels, found = trajectory.labels, np.zeros((len(moments), len(rows)), bool)
    shared = set(source.class_names) & set(target.class_names)
    if labels is None or target.labels is None or source.dim != target.dim or not shared:
        return False, found
    names = list(dict.fromkeys((*source.class_names, *target.class_names)))
    sides = []
    for side in (source, target):
        assert side.labels is not None
        numbers = torch.tensor([names.index(name) for name in side.class_names])
        sides.append((side.features.detach(), numbers[side.labels.cpu()]))
    begun, began = trajectory.points[0, rows], labels[0, rows]
    for place, k in enumerate(moments):
        points, own = trajectory.points[k, rows], labels[k, rows]
        # The distance is computed as a norm: exactly 0 before the particle moves, which `cdist`
        # does not promise.
        like = (points - begun).norm(dim=1).where(own == began, torch.inf)
        unlike = torch.full_like(like, torch.inf)
        for features, kinds in sides:
            distances = torch.cdist(points.to(features), features).to(like)
            same = kinds == own[:, None]
            like = torch.minimum(like, distances.where(same, torch.inf).amin(1))
            unlike = torch.minimum(unlike, distances.where(~same, torch.inf).amin(1))
        found[place] = (unlike < like).numpy()
    return True, found


def _frame(
    images: NDArray[np.uint8],
    side: int,
    names: Sequence[str],
    marked: NDArray[np.bool_],
    caption: Sequence[str],
) -> Image.Image:
    """Draw a caption and below it enlarged images with labels, `side` a row, and with marks."""
    n, h, w, *colors = images.shape
    factor = max(1, ((WIDTH - GAP) // side - GAP) // w)
    width, strip = w * factor, STRIP if names else 0
    across, down = width + GAP, h * factor + strip + GAP
    page = max(GAP + side * across, LEAST_WIDTH)
    # Letters of this size are rarely wider than 7 pixels.
    lines = [part for line in caption for part in textwrap.wrap(line, (page - 12) // 7)]
    head = LINE * len(lines) + 5
    height = head + GAP + math.ceil(n / side) * down
    frame = Image.new("RGB" if colors else "L", (page, height), PAPER)
    draw = ImageDraw.Draw(frame)
    draw.rectangle((0, head, GAP + side * across, height), fill=BACKGROUND)
    for number, line in enumerate(lines):
        draw.text((6, 2 + LINE * number), line, fill=INK, font=_font(line, CAPTION_SIZE))
    for k, image in enumerate(images if colors else np.minimum(images, MARKED - 1)):
        left, top = GAP + k % side * across, head + GAP + k // side * down + strip
        if names:
            sign = f"{UNLIKE} " if marked[k] else ""
            font = _font(names[k], LABEL_SIZE)
            text = sign + fit(names[k], width - font.getlength(sign), font.getlength)
            at = left + width / 2, top - MARK - (strip - MARK) / 2
            draw.text(at, text, fill=INK, font=font, anchor="mm")
        if marked[k]:
            box = left - MARK, top - MARK, left + width + MARK - 1, top + h * factor + MARK - 1
            draw.rectangle(box, fill=TARGET_COLOR if colors else MARKED)
        frame.paste(Image.fromarray(image.repeat(factor, 0).repeat(factor, 1)), (left, top))
    return frame


@cache
def _font(text: str, size: int) -> Any:
    """Return a font with the characters of a text, as far as one font has them."""
    try:
        return ImageFont.truetype(font_file(text), size)
    except OSError:
        # Bitmap fonts, such as those of emoji, do not have this size.
        return ImageFont.truetype(font_file(""), size)


def _with_one_palette(frames: Sequence[Image.Image]) -> list[Image.Image]:
    """Return frames in the same 256 colours.

    Grey levels are kept, and the last one becomes the colour of marks. The colours of RGB frames
    are chosen from the first, middle and last frame.
    """
    if frames[0].mode == "L":
        greys = [value for grey in range(MARKED) for value in (grey,) * 3]
        for frame in frames:
            frame.putpalette(bytes((*greys, *bytes.fromhex(TARGET_COLOR[1:]))))
        return [*frames]
    few = [np.asarray(frames[k]) for k in evenly(len(frames), 3)]
    colors = Image.fromarray(np.concatenate(few)).quantize(256)
    return [frame.quantize(palette=colors, dither=Image.Dither.NONE) for frame in frames]
