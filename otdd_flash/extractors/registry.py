"""Extractors by the names and parameters that configurations give them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from otdd_flash.checks import takes
from otdd_flash.checks import text as text_name
from otdd_flash.errors import InputError, choose
from otdd_flash.extractors.base import Extractor
from otdd_flash.extractors.efficientnet import efficientnet_lite0
from otdd_flash.extractors.imported_function import from_callable
from otdd_flash.extractors.pixel_values import pixels
from otdd_flash.extractors.raw_vectors import identity
from otdd_flash.extractors.sentence_embedding import text
from otdd_flash.extractors.timm_models import timm
from otdd_flash.extractors.torchvision_models import torchvision
from otdd_flash.extractors.word_embedding import wordllama

FACTORIES: dict[str, Callable[..., Extractor]] = {
    "identity": identity,
    "pixels": pixels,
    "timm": timm,
    "torchvision": torchvision,
    "efficientnet_lite0": efficientnet_lite0,
    "text": text,
    "wordllama": wordllama,
    "callable": from_callable,
}


# What a configuration of an extractor also holds: arguments of `embed`, and of what follows it.
OTHER_SETTINGS = ("batch_size", "mixed_precision", "num_workers", "standardize", "pca")


@takes({"name": text_name})
def build_extractor(name: str, **parameters: Any) -> Extractor:
    """The extractor called `name` with its parameters.

    A whole configuration may be given: `OTHER_SETTINGS` are skipped.

    Raises:
        InputError: unknown name, unknown or missing parameter; the message lists the known ones.
    """
    factory = FACTORIES[choose("extractor", name, tuple(FACTORIES))]
    known = inspect.signature(factory).parameters
    chosen = {key: value for key, value in parameters.items() if key not in OTHER_SETTINGS}
    for parameter in chosen:
        if parameter not in known:
            raise InputError(
                f"extractor {name} has no parameter {parameter!r}; it has: "
                f"{', '.join(known) or 'none'}"
            )
    for parameter, declared in known.items():
        if declared.default is inspect.Parameter.empty and chosen.get(parameter) is None:
            raise InputError(f"extractor {name} needs extractor.{parameter}=...")
    return factory(**chosen)
