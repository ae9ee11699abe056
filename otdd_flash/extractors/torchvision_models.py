"""The torchvision extractor: classification models without their head, weights' own transforms."""

from __future__ import annotations

import os
from difflib import get_close_matches
from typing import Any

from torch import nn

from otdd_flash.arguments.datasets import EXTRACTORS
from otdd_flash.checks import takes
from otdd_flash.errors import InputError
from otdd_flash.extractors.checkpoint import load_checkpoint
from otdd_flash.extractors.network import Network, forward_images
from otdd_flash.extractors.random_weights import notice_random_features, seeded_weights
from otdd_flash.extractors.timm_models import PreparedImage
from otdd_flash.offline import ALLOW, network

CLASSES = 1000


@takes(EXTRACTORS["torchvision"], prefix="extractor.")
def torchvision(
    model: str,
    weights: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    seed: int = 0,
    download: bool = False,
) -> Network:
    """Make a torchvision classification model without its last layer an extractor (b, d).

    Images go through the transforms of the named weights, or of the model's default weights where
    none are named; grey images are repeated in the three channels.

    Args:
        model: a name such as `resnet18` or `vit_b_16`.
        weights: one of the model's weights such as `IMAGENET1K_V1` or `DEFAULT`, from torch.hub's
            folder or where `download` allows it from the network.
        checkpoint: a file of weights for this model; its last layer is ignored.
        seed: of the random weights, when neither of the two is given.
        download: whether weights that are not on this machine may be fetched.

    Raises:
        InputError: unknown model or weights, weights not to be had, or a checkpoint that does not
            fit.
    """
    if weights is not None and checkpoint is not None:
        raise InputError("give extractor.weights=NAME or extractor.checkpoint=FILE, not both")
    import torchvision as library

    _require_known(library.models, model)
    entries = library.models.get_model_weights(model)
    chosen = None if weights is None else _weights(entries, model, weights)
    with network(allowed=download):
        module = _create(library.models, model, chosen, seed, download)
    head = remove_head(module)
    if checkpoint is not None:
        load_checkpoint(module, str(checkpoint), (head,))
    elif chosen is None:
        notice_random_features(model, seed, "extractor.weights=DEFAULT")
    transform = (chosen or entries.DEFAULT).transforms()
    # The transform prints itself over several lines.
    settings = " ".join(str(transform).split())
    return Network(
        description=f"torchvision {library.__version__} {model} {settings}",
        module=module.eval(),
        modalities=frozenset({"image"}),
        prepare=PreparedImage(transform),
        forward=forward_images,
    )


def remove_head(module: nn.Module) -> str:
    """Replace the layer that gives the class scores by the identity; returns its name.

    It is the last linear layer or convolution with 1000 outputs: what follows a convolution
    (SqueezeNet) is its pooling, which stays.
    """
    name: str = [
        name
        for name, layer in module.named_modules()
        if getattr(layer, "out_features", getattr(layer, "out_channels", None)) == CLASSES
    ][-1]
    module.set_submodule(name, nn.Identity())
    return name


def _require_known(models: Any, model: str) -> None:
    known = models.list_models(module=models)
    if model not in known:
        close = get_close_matches(model, known, n=5)
        hint = f"close names: {', '.join(close)}" if close else f"there are: {', '.join(known)}"
        raise InputError(f"unknown torchvision model {model!r}; {hint}")


def _weights(entries: Any, model: str, name: str) -> Any:
    names = [*entries.__members__]
    # Both IMAGENET1K_V1 and ResNet18_Weights.IMAGENET1K_V1 are in use.
    short = name.removeprefix(f"{entries.__name__}.")
    if short not in names:
        raise InputError(f"{model} has no weights {name!r}; choose one of: {', '.join(names)}")
    return entries[short]


def _create(models: Any, model: str, weights: Any, seed: int, download: bool) -> nn.Module:
    try:
        with seeded_weights(seed):
            module = models.get_model(model, weights=weights)
    except (OSError, RuntimeError) as error:
        fetching = "" if download else f"{ALLOW}, and "
        raise InputError(
            f"torchvision cannot build {model!r} with weights {weights}: {error}; "
            f"{fetching}extractor.checkpoint=FILE takes weights from a file"
        ) from error
    assert isinstance(module, nn.Module)
    return module
