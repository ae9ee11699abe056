"""Networks without trained weights: allowed, reproducible, and said aloud."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from otdd_flash.errors import DataNotice, warn


@contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Initialise weights from `seed`; torch's own generator is afterwards as it was.

    Modules initialise themselves from the global CPU generator: there is no other way to seed them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def notice_random_features(model: str, seed: int, trained: str) -> None:
    """Warn that `model` was not trained; `trained` is the setting that would give weights."""
    warn(
        f"{model} has random weights (seed {seed}), so its features are random; for trained ones "
        f"give {trained} or extractor.checkpoint=FILE",
        DataNotice,
    )
