"""flow.gif: many particles that are images, moving together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from otdd_flash.data.writing import ImageShape, eight_bit_images
from otdd_flash.files.atomic import replacing
from otdd_flash.flows.history import Trajectory
from otdd_flash.report.flow.particles import evenly, evenly_over_classes

MOST_A_SIDE, MOST_FRAMES = 8, 60
# Pixels.
WIDTH, CAPTION, GAP = 480, 22, 1
# Milliseconds.
FIRST_PAUSE, LAST_PAUSE, WHOLE, SHORTEST, LONGEST = 1000, 2000, 5000, 80, 400
GAP_GREY, PAPER = 96, 255


def write_animation(trajectory: Trajectory, image_shape: ImageShape, path: str | Path) -> None:
    """Write an endless GIF of at most 8 x 8 particles over at most 60 steps, class after class.

    The first and the last frame stay longer. Small images are enlarged by whole factors, without
    smoothing; of large ones fewer are shown.

    Args:
        trajectory: pixel values in [0, 1]; what lies outside is clipped.
        image_shape: (c, h, w) of one particle.
        path: the GIF file.

    Raises:
        InputError: particles are not images of this shape, or the file cannot be written.
    """
    side = min(MOST_A_SIDE, max(1, WIDTH // image_shape[2]))
    labels = None if trajectory.labels is None else trajectory.labels[0]
    chosen = evenly_over_classes(labels, len(trajectory.rows), side * side)
    side = min(side, math.ceil(math.sqrt(len(chosen))))
    last = int(trajectory.steps[-1])
    frames = []
    for k in evenly(len(trajectory.steps), MOST_FRAMES):
        images = eight_bit_images(trajectory.points[k, torch.from_numpy(chosen)], image_shape)
        frames.append(_frame(images, side, f"step {int(trajectory.steps[k])} of {last}"))
    if image_shape[0] == 3:
        frames = _with_one_palette(frames)
    with replacing(path) as partial:
        frames[0].save(
            partial,
            format="GIF",
            save_all=True,
            append_images=frames[1:],
            duration=_durations(len(frames)),
            loop=0,
        )


def _durations(count: int) -> list[int]:
    """Milliseconds of each frame."""
    usual = min(max(WHOLE // count, SHORTEST), LONGEST)
    durations = [usual] * count
    durations[0] += FIRST_PAUSE
    durations[-1] += LAST_PAUSE
    return durations


def _frame(images: NDArray[np.uint8], side: int, caption: str) -> Image.Image:
    """Images row after row, `side` a row, enlarged, below a caption."""
    n, h, w, *channels = images.shape
    rows = math.ceil(n / side)
    paper = np.full((rows * (h + GAP) + GAP, side * (w + GAP) + GAP, *channels), GAP_GREY, np.uint8)
    for k, image in enumerate(images):
        top, left = GAP + k // side * (h + GAP), GAP + k % side * (w + GAP)
        paper[top : top + h, left : left + w] = image
    factor = max(1, WIDTH // paper.shape[1])
    grid = Image.fromarray(paper.repeat(factor, axis=0).repeat(factor, axis=1))
    size, bands = (grid.width, grid.height + CAPTION), len(grid.getbands())
    frame = Image.new(grid.mode, size, (PAPER,) * bands)
    frame.paste(grid, (0, CAPTION))
    ImageDraw.Draw(frame).text((6, 3), caption, fill=(0,) * bands, font_size=13)
    return frame


def _with_one_palette(frames: Sequence[Image.Image]) -> list[Image.Image]:
    """RGB frames in the 256 colours of the first, the middle and the last: none flickers."""
    few = [np.asarray(frames[k]) for k in evenly(len(frames), 3)]
    palette = Image.fromarray(np.concatenate(few)).quantize(256)
    return [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
