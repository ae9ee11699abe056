"""Feature extractors: from raw images, text or arrays to the vectors that transport compares.

`identity`, `pixels`, `timm`, `torchvision`, `efficientnet_lite0`, `text`, `wordllama`,
`from_module` and `from_callable` make extractors, `embed` applies one to a dataset, `standardize`
and `reduce_pca` then map both sides together.

`otdd_flash`, `commands.sides` and `commands.study` import functions from here.
`commands.sides`, `commands.adapt`, `commands.nearest`, `study.setup` and `study.training` take
parts from the modules of this folder. An extractor that an installed package adds is an attribute
of this module by its name, `otdd.extractors.NAME(...)`.

`build_extractor` makes an extractor of a name and the parameters of a configuration, by the
registry `FACTORIES`. Names and parameters are keys of users' configurations and parts of the keys
of cached features, so they must stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor

from otdd_flash.arguments import takes
from otdd_flash.checks import shown
from otdd_flash.errors import InputError
from otdd_flash.extractors.embedding import embed
from otdd_flash.extractors.module_features import from_module
from otdd_flash.extractors.network import Extractor
from otdd_flash.extractors.plain import from_callable, identity, pixels, reduce_pca, standardize
from otdd_flash.extractors.sentence_embedding import text, wordllama
from otdd_flash.extractors.vision_models import efficientnet_lite0, timm, torchvision
from otdd_flash.plugins import Registry, blamed_on

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


_OWN: dict[str, Callable[..., Extractor]] = {
    "identity": identity,
    "pixels": pixels,
    "timm": timm,
    "torchvision": torchvision,
    "efficientnet_lite0": efficientnet_lite0,
    "text": text,
    "wordllama": wordllama,
    "callable": from_callable,
}
# Other packages add functions that take an extractor's parameters and return it.
FACTORIES: Registry[Callable[..., Extractor]] = Registry(
    "extractors",
    "extractor",
    _OWN,
    lambda make, name: None if callable(make) else "a function that returns an extractor",
)

# Settings beside an extractor's parameters in its configuration: arguments of `embed`, and of the
# maps after it.
OTHER_SETTINGS = ("batch_size", "mixed_precision", "num_workers", "standardize", "pca")


# `takes` checks arguments by their annotations.
@takes()
def build_extractor(name: str, **parameters: Any) -> Extractor:
    """Build the extractor called `name` from its parameters.

    A whole configuration may be given: `OTHER_SETTINGS` are skipped.

    Raises:
        InputError: unknown name, unknown or missing parameter; the message lists the known ones.
    """
    factory = FACTORIES.named(name)
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
    with blamed_on(factory, f"extractor {name}"):
        extractor = factory(**chosen)
    return _checked(name, extractor)


@dataclass(frozen=True)
class AddedExtractor:
    """An extractor of another package, whose name and version are part of its key."""

    extractor: Extractor
    name: str
    package: str | None
    modalities: frozenset[str]
    cacheable: bool

    @property
    def key(self) -> str:
        """The key of the extractor, followed by its package."""
        return f"{self.extractor.key} of {self.package}"

    def __call__(self, batch: Any) -> Tensor:
        """Return the features (b, d) of a batch of b inputs, after checking their shape."""
        with blamed_on(self.extractor, f"extractor {self.name} of package {self.package}"):
            features = self.extractor(batch)
        if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(batch):
            raise InputError(
                f"extractor {self.name} of package {self.package} must return a tensor "
                f"({len(batch)}, d) for {len(batch)} inputs, got {shown(features)}"
            )
        return features.detach().cpu()


def _checked(name: str, extractor: Any) -> Extractor:
    """Return an extractor, wrapped in `AddedExtractor` if its class is of another package."""
    if type(extractor).__module__.startswith("otdd_flash."):
        return cast(Extractor, extractor)
    if not isinstance(extractor, Extractor):
        raise InputError(
            f"extractor {name} of package {FACTORIES.package(name)} must be a callable with key, "
            f"modalities and cacheable, got {shown(extractor)}; otdd.extractors.from_callable "
            "makes one of a function"
        )
    package = FACTORIES.package(name)
    return AddedExtractor(extractor, name, package, extractor.modalities, extractor.cacheable)


def __getattr__(name: str) -> Any:
    """Return the factory of an extractor that another package adds.

    Raises:
        AttributeError: no package adds an extractor of this name.
    """
    if name in FACTORIES or FACTORIES.package(name) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return partial(build_extractor, name)
