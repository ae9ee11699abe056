"""The tracker `log=tensorboard`: event files in a folder, for `tensorboard --logdir`.

`integrations.tracking.track` imports this module and calls `write`. `commands.results` deletes the
EVENTS of an earlier run where the folder belongs to this run alone. Elsewhere `_folder` chooses a
folder without other event files, because tensorboard shows the files of one folder as one run.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import numpy as np
from PIL import Image

from otdd_flash.integrations.tracking import TrackedRun

EVENTS = "events.out.tfevents.*"


def write(run: TrackedRun) -> None:
    """Write settings as text, numbers and series as scalars, pictures as images."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(_folder(run)))
    try:
        writer.add_text("config", f"```\n{json.dumps(run.config, indent=2, default=str)}\n```")
        for name, value in run.numbers.items():
            writer.add_scalar(name, value, 0)
        for name, points in run.series.items():
            for step, value in points:
                writer.add_scalar(name, value, step)
        for path in run.pictures:
            with Image.open(path) as image:
                writer.add_image(path.stem, np.asarray(image.convert("RGB")), 0, dataformats="HWC")
    finally:
        writer.close()


def _folder(run: TrackedRun) -> Path:
    """Return a folder for this run alone: tensorboard shows the files of a folder as one run."""
    # TensorBoard has no server, so `commands.results` always gives it a folder as `store`.
    first = Path(str(run.store))
    folders = (first.with_name(f"{first.name}-{number}") for number in count(2))
    folder = first
    while any(folder.glob(EVENTS)):
        folder = next(folders)
    return folder
