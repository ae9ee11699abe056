"""Pictures of particles that are images: images.png, a grid of steps, and flow.gif, an animation.

`report.flow.writing` calls `draw_images` and `write_animation` if it is given an image shape: both
for the report of the flow command, `draw_images` without a path for `FlowResult.plot`. images.png
ends with the nearest images of the target; in flow.gif, whose frames are drawn with Pillow, each
image has its label above it. All frames share one palette; without that, colours would flicker
between frames.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
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
from otdd_flash.report.figures.page import (
    INK,
    SOURCE_COLOR,
    TARGET_COLOR,
    fit,
    fit_title,
    font_file,
    grow_page,
    new_figure,
    save_picture,
)
from otdd_flash.report.flow.paths import evenly, evenly_over_classes
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    path: str | Path | None,
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
        path: the PNG file; None writes no file.

    Raises:
        InputError: particles are not images of this shape, or the file cannot be written.
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
    save_picture(figure, path)
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
