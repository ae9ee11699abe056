"""flow.gif: an animation of particles that are images, each with its label above it.

`report.flow.writing` calls `write_animation` if the particles are images. Frames are drawn with
Pillow, not with matplotlib. All frames share one palette; without that, colours would flicker
between frames.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from otdd_flash.data.writing import ImageShape, eight_bit_images
from otdd_flash.files.atomic import replacing
from otdd_flash.flows.history import Trajectory
from otdd_flash.report.figures.page import TARGET_COLOR, fit, font_file
from otdd_flash.report.flow.paths import evenly, evenly_over_classes
from otdd_flash.samples import LabeledSamples

MOST_A_SIDE, MOST_FRAMES = 8, 60
# Pixels: all images with gaps, the least page, a gap, a label's strip, a mark, a caption's line.
WIDTH, LEAST_WIDTH, GAP, STRIP, MARK, LINE = 600, 330, 4, 19, 3, 17
LABEL_SIZE, CAPTION_SIZE = 12, 13
# Milliseconds.
FIRST_PAUSE, LAST_PAUSE, WHOLE, SHORTEST, LONGEST = 1000, 2000, 5000, 80, 400
BACKGROUND, PAPER, INK_GREY = 225, 255, 34
# Palette indices: white is 254, so that 255 is free for the colour of marks.
WHITE, MARKED = 254, 255
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
    misfits = _misfits(source, target, trajectory, rows, moments)
    legend = "" if labels is None else LABELLED
    if misfits is not None:
        legend += f"; {COMPARED}"
    last, frames = int(trajectory.steps[-1]), []
    for place, k in enumerate(moments):
        images = eight_bit_images(trajectory.points[k, rows], image_shape)
        names = [] if labels is None else [source.class_names[c] for c in labels[k, rows].tolist()]
        caption, marked = f"step {int(trajectory.steps[k])} of {last}", np.zeros(len(chosen), bool)
        if misfits is not None:
            marked = misfits[place]
            caption += f", {marked.sum()} of {len(chosen)} marked"
        frames.append(_frame(images, side, names, marked, (caption, legend)))
    pictures = _with_greys(frames) if image_shape[0] == 1 else _with_one_palette(frames)
    with replacing(path) as partial:
        pictures[0].save(
            partial,
            format="GIF",
            save_all=True,
            append_images=pictures[1:],
            duration=_durations(len(pictures)),
            loop=0,
        )


def _misfits(
    source: LabeledSamples,
    target: LabeledSamples,
    trajectory: Trajectory,
    rows: Tensor,
    moments: Sequence[int] | NDArray[np.int64],
) -> NDArray[np.bool_] | None:
    """Return (s, k) whether a particle's nearest image, by pixels, has another class than it has.

    The images compared are those of the target and the particles' own starts, so that no particle
    is marked before it moves. Classes with the same name count as one class. The result is None if
    nothing can be compared: a side has no labels, the target has another dimension, or the datasets
    share no class name.

    Args:
        source: the particles before the first step.
        target: the images they move to.
        trajectory: the positions of the particles and their labels.
        rows: (k,) indices into the recorded particles.
        moments: (s,) indices into the recorded steps.
    """
    labels = trajectory.labels
    if labels is None or target.labels is None or source.dim != target.dim:
        return None
    if set(source.class_names).isdisjoint(target.class_names):
        return None
    names = list(dict.fromkeys((*source.class_names, *target.class_names)))
    sides = []
    for side in (source, target):
        assert side.labels is not None
        features = side.features.detach()
        numbers = torch.tensor([names.index(name) for name in side.class_names])
        sides.append((features, numbers[side.labels.cpu()].to(features.device)))
    begun, began = trajectory.points[0, rows], labels[0, rows]
    found = []
    for k in moments:
        points, own = trajectory.points[k, rows], labels[k, rows]
        # Computed as a norm: exactly 0 before the particle moves, which `cdist` does not promise.
        like = (points - begun).norm(dim=1).double().where(own == began, torch.inf)
        unlike = torch.full_like(like, torch.inf)
        for features, kinds in sides:
            distances = torch.cdist(points.to(features), features)
            same = kinds == own.to(kinds)[:, None]
            nearest = (distances.where(which, torch.inf).amin(1) for which in (same, ~same))
            like, unlike = (
                torch.minimum(one, other.to(one))
                for one, other in zip((like, unlike), nearest, strict=True)
            )
        found.append((unlike < like).numpy())
    return np.array(found)


def _durations(count: int) -> list[int]:
    """Return the duration of each frame in milliseconds."""
    usual = min(max(WHOLE // count, SHORTEST), LONGEST)
    durations = [usual] * count
    durations[0] += FIRST_PAUSE
    durations[-1] += LAST_PAUSE
    return durations


def _frame(
    images: NDArray[np.uint8],
    side: int,
    names: Sequence[str],
    marked: NDArray[np.bool_],
    caption: Sequence[str],
) -> tuple[Image.Image, NDArray[np.bool_]]:
    """Draw a caption and below it enlarged images with labels, `side` a row; return also the marks.

    Returns:
        The frame, and pixels (height, width) that get the colour of marks.
    """
    n, h, w, *_ = images.shape
    factor = max(1, ((WIDTH - GAP) // side - GAP) // w)
    width, strip = w * factor, STRIP if names else 0
    across, down = width + GAP, h * factor + strip + GAP
    page = max(GAP + side * across, LEAST_WIDTH)
    # Letters of this size are rarely wider than 7 pixels.
    lines = [part for line in caption for part in textwrap.wrap(line, (page - 12) // 7)]
    head = LINE * len(lines) + 5
    height = head + GAP + math.ceil(n / side) * down
    bands = "RGB" if images.ndim == 4 else "L"
    frame = Image.new(bands, (page, height), (PAPER,) * len(bands))
    draw = ImageDraw.Draw(frame)
    ink = (INK_GREY,) * len(bands)
    draw.rectangle((0, head, GAP + side * across, height), fill=(BACKGROUND,) * len(bands))
    for number, line in enumerate(lines):
        draw.text((6, 2 + LINE * number), line, fill=ink, font=_font(line, CAPTION_SIZE))
    marks = np.zeros((height, page), bool)
    for k, image in enumerate(images):
        left, top = GAP + k % side * across, head + GAP + k // side * down + strip
        frame.paste(Image.fromarray(image.repeat(factor, 0).repeat(factor, 1)), (left, top))
        if names:
            sign = f"{UNLIKE} " if marked[k] else ""
            font = _font(names[k], LABEL_SIZE)
            room = width - font.getlength(sign)
            text = sign + fit(names[k], room, font.getlength)
            at = left + width / 2, top - MARK - (strip - MARK) / 2
            draw.text(at, text, fill=ink, font=font, anchor="mm")
        if marked[k]:
            down_to, right_to = top + h * factor, left + width
            marks[top - MARK : down_to + MARK, left - MARK : right_to + MARK] = True
            marks[top:down_to, left:right_to] = False
    return frame, marks


def _font(text: str, size: int) -> Any:
    """Return a font with the characters of a text, as far as one font has them."""
    return _font_of(font_file(text), size)


@cache
def _font_of(file: str, size: int) -> Any:
    try:
        return ImageFont.truetype(file, size)
    except OSError:
        # Bitmap fonts, such as those of emoji, do not have this size.
        return ImageFont.truetype(font_file(""), size)


def _with_greys(
    frames: Sequence[tuple[Image.Image, NDArray[np.bool_]]],
) -> list[Image.Image]:
    """Return grey frames with one extra colour for the marks, which takes the place of grey 254."""
    palette = bytearray(value for grey in range(256) for value in (grey,) * 3)
    palette[3 * WHITE : 3 * WHITE + 3] = bytes((PAPER,) * 3)
    palette[3 * MARKED :] = bytes.fromhex(TARGET_COLOR[1:])
    made = []
    for frame, marks in frames:
        levels = np.asarray(frame)
        levels = np.where(levels == PAPER, WHITE, np.minimum(levels, WHITE - 1))
        image = Image.fromarray(np.where(marks, MARKED, levels).astype(np.uint8), "P")
        image.putpalette(palette)
        made.append(image)
    return made


def _with_one_palette(
    frames: Sequence[tuple[Image.Image, NDArray[np.bool_]]],
) -> list[Image.Image]:
    """Return RGB frames in 256 colours, chosen from the first, middle and last frame."""
    for frame, marks in frames:
        frame.paste(TARGET_COLOR, mask=Image.fromarray(marks))
    pictures = [frame for frame, _ in frames]
    few = [np.asarray(pictures[k]) for k in evenly(len(pictures), 3)]
    palette = Image.fromarray(np.concatenate(few)).quantize(256)
    return [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in pictures]
