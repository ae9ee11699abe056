"""Feature extractors: from raw images, text or arrays to the vectors that transport compares.

`identity`, `pixels`, `timm`, `torchvision`, `efficientnet_lite0`, `text`, `wordllama`,
`from_module` and `from_callable` make extractors, `embed` applies one to a dataset, `standardize`
and `reduce_pca` then map both sides together.

`commands.sides`, `commands.adapt` and `commands.study` import their names from here. An extractor
that an installed package adds is an attribute of this module by its name,
`otdd.extractors.NAME(...)`.
"""

from functools import partial
from typing import Any

from otdd_flash.extractors.embedding import embed
from otdd_flash.extractors.imported_function import from_callable
from otdd_flash.extractors.linear_maps import reduce_pca, standardize
from otdd_flash.extractors.module_features import from_module
from otdd_flash.extractors.network import Extractor
from otdd_flash.extractors.pixel_values import identity, pixels
from otdd_flash.extractors.registry import FACTORIES, build_extractor
from otdd_flash.extractors.sentence_embedding import text, wordllama
from otdd_flash.extractors.vision_models import efficientnet_lite0, timm, torchvision

__all__ = [
    "Extractor",
    "build_extractor",
    "efficientnet_lite0",
    "embed",
    "from_callable",
    "from_module",
    "identity",
    "pixels",
    "reduce_pca",
    "standardize",
    "text",
    "timm",
    "torchvision",
    "wordllama",
]


def __getattr__(name: str) -> Any:
    """Return the factory of an extractor that another package adds.

    Raises:
        AttributeError: no package adds an extractor of this name.
    """
    if name in FACTORIES or FACTORIES.package(name) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(build_extractor, name)
