"""flow.gif: many particles that are images, moving together, each with its label."""

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
# Pixels: of the images with their gaps, of a label above an image, of a frame around one.
WIDTH, LEAST_WIDTH, GAP, STRIP, MARK, LINE = 600, 330, 4, 19, 3, 17
LABEL_SIZE, CAPTION_SIZE = 12, 13
# Milliseconds.
FIRST_PAUSE, LAST_PAUSE, WHOLE, SHORTEST, LONGEST = 1000, 2000, 5000, 80, 400
BACKGROUND, PAPER, INK_GREY = 225, 255, 34
# In a palette of greys, where the colour of marks takes the place of 254.
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
    """Write an endless GIF of at most 8 x 8 particles over at most 60 steps, class after class.

    The first and the last frame stay longer. Small images are enlarged by whole factors, without
    smoothing; of large ones fewer are shown. Above each image stands its label; a frame and an
    unequal sign mark an image that its label no longer fits, see `_misfits`.

    Args:
        source: the particles before the first step.
        target: what they move to.
        trajectory: pixel values in [0, 1]; what lies outside is clipped.
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
    """Whether particles (s, k) are nearest, by pixels, to an image of another class than theirs.

    The images are the target's and those that the particles began as, so that none is marked before
    it moves. Classes are one where they have one name. None where nothing can be compared: a side
    has no labels, the target other features, or no class a namesake.

    Args:
        source: the particles before the first step.
        target: the images they move to.
        trajectory: where particles were, and their labels.
        rows: (k,) which of the kept particles.
        moments: (s,) which of the kept steps.
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
        # To the last digit, unlike the distances below.
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
    """Milliseconds of each frame."""
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
    """Images row after row, `side` a row, enlarged, with labels, below a caption; and the marks.

    Marks are pixels (height, width) that get the colour of marks.
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
    """A font that has the letters of a text, as far as one does."""
    return _font_of(font_file(text), size)


@cache
def _font_of(file: str, size: int) -> Any:
    try:
        return ImageFont.truetype(file, size)
    except OSError:
        # A font of bitmaps, such as those of emoji, has other sizes.
        return ImageFont.truetype(font_file(""), size)


def _with_greys(
    frames: Sequence[tuple[Image.Image, NDArray[np.bool_]]],
) -> list[Image.Image]:
    """Grey frames with the colour of marks, which takes the place of the grey 254."""
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
    """RGB frames in the 256 colours of the first, the middle and the last: none flickers."""
    for frame, marks in frames:
        frame.paste(TARGET_COLOR, mask=Image.fromarray(marks))
    pictures = [frame for frame, _ in frames]
    few = [np.asarray(pictures[k]) for k in evenly(len(pictures), 3)]
    palette = Image.fromarray(np.concatenate(few)).quantize(256)
    return [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in pictures]
