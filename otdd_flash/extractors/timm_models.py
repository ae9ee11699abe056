"""The timm extractor: pooled features of any model in timm, with that model's own preparation."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from otdd_flash.arguments.datasets import EXTRACTORS
from otdd_flash.checks import takes
from otdd_flash.data.images import rgb_image
from otdd_flash.errors import InputError
from otdd_flash.extractors.checkpoint import classifiers, load_checkpoint
from otdd_flash.extractors.network import Network, forward_images
from otdd_flash.extractors.random_weights import notice_random_features, seeded_weights
from otdd_flash.offline import ALLOW, network


@takes(EXTRACTORS["timm"], prefix="extractor.")
def timm(
    model: str,
    pretrained: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    seed: int = 0,
    download: bool = False,
) -> Network:
    """Make a timm model without its classifier an extractor of pooled features (b, d).

    Images are resized, cropped and normalised as the model's configuration in timm says; grey
    images are repeated in the three channels.

    Args:
        model: a name that timm knows, such as `resnet18` or `vit_tiny_patch16_224`.
        pretrained: use timm's weights, from its cache or where `download` allows it from a hub.
        checkpoint: a file of weights for this model; its classifier, if any, is ignored.
        seed: of the random weights, when neither of the two is given.
        download: whether what is not on this machine may be fetched.

    Raises:
        InputError: unknown model, weights not to be had, or a checkpoint that does not fit.
    """
    if pretrained and checkpoint is not None:
        raise InputError("give extractor.pretrained=true or extractor.checkpoint=FILE, not both")
    import timm as library

    with network(allowed=download):
        module = _create(library, model, pretrained, seed, download)
    if checkpoint is not None:
        load_checkpoint(module, str(checkpoint), classifiers(module))
    elif not pretrained:
        notice_random_features(model, seed, "extractor.pretrained=true")
    return image_network(f"timm {library.__version__} {model}", module)


def image_network(name: str, module: nn.Module) -> Network:
    """Return a timm model as an extractor, its images prepared as its configuration says.

    Args:
        name: what its features are of; the preparation is added to it.
        module: the model without its classifier.

    Raises:
        InputError: it takes another number of channels than 3.
    """
    from timm.data import create_transform, resolve_model_data_config

    settings = resolve_model_data_config(module)
    if settings["input_size"][0] != 3:
        raise InputError(
            f"{name.split()[-1]} takes {settings['input_size'][0]} channels; choose one with 3"
        )
    return Network(
        description=f"{name} {sorted(settings.items())}",
        module=module.eval(),
        modalities=frozenset({"image"}),
        prepare=PreparedImage(create_transform(**settings, is_training=False)),
        forward=forward_images,
    )


@dataclass(frozen=True)
class PreparedImage:
    """A raw image as RGB, then transformed. A class, so that worker processes can be sent it."""

    transform: Callable[[Any], Any]

    def __call__(self, item: Any) -> Tensor:
        """The image (c, h, w) that the network takes."""
        prepared = self.transform(rgb_image(item))
        assert isinstance(prepared, Tensor)
        return prepared


def _create(library: Any, model: str, pretrained: bool, seed: int, download: bool) -> nn.Module:
    # Names such as hf-hub:owner/model are looked up elsewhere.
    if ":" not in model:
        _require_known(library, model)
    try:
        with seeded_weights(seed):
            module = library.create_model(model, pretrained=pretrained, num_classes=0)
    except Exception as error:
        # Hubs raise what their clients raise.
        reason = (str(error) or repr(error)).splitlines()[0]
        fetching = "" if download else f"{ALLOW}, and "
        raise InputError(
            f"timm cannot build {model!r}{' with its weights' if pretrained else ''}: {reason}; "
            f"{fetching}extractor.checkpoint=FILE takes weights from a file"
        ) from error
    assert isinstance(module, nn.Module)
    return module


def _require_known(library: Any, model: str) -> None:
    if not library.is_model(model):
        # Completions first: `vit_tiny` is further from vit_tiny_patch16_224 than from gcvit_tiny.
        known = library.list_models()
        close = library.list_models(f"{model}*")[:5] or get_close_matches(model, known, n=5)
        hint = f"close names: {', '.join(close)}" if close else "timm.list_models() lists all"
        raise InputError(f"unknown timm model {model!r}; {hint}")
    architecture, _, tag = model.partition(".")
    tags = [name.partition(".")[2] for name in library.list_pretrained(f"{architecture}.*")]
    if tag and tag not in tags:
        raise InputError(
            f"timm has no weights {tag!r} of {architecture}; choose one of: {', '.join(tags)}"
        )
