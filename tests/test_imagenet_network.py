"""The weights of an ImageNet network under timm's names: all of them, and they see."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch

import otdd_flash as otdd
from experiments.imagenet_network import (
    EXPANDING,
    MODEL,
    PACKAGE,
    PLAIN,
    STAGES,
    package_weights,
    timm_weights,
    write_checkpoint,
)

NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def theirs() -> list[str]:
    """The package's names, by its layers."""
    names = [f"{layer}.weight" for layer in ("_conv_stem", "_conv_head", "_fc")] + ["_fc.bias"]
    names += [f"{layer}.{part}" for layer in ("_bn0", "_bn1") for part in NORM]
    for block in range(sum(STAGES)):
        for layer in EXPANDING if block else PLAIN:
            parts = NORM if "bn" in layer else ("weight",)
            names += [f"_blocks.{block}.{layer}.{part}" for part in parts]
    return names


def test_every_name_of_timm_is_one_of_the_package() -> None:
    names = theirs()
    renamed = timm_weights({name: torch.tensor(float(k)) for k, name in enumerate(names)})
    assert len(renamed) == len(names)
    assert {*renamed} == {*timm.create_model(MODEL, pretrained=False).state_dict()}
    with pytest.raises(KeyError):
        timm_weights({"_blocks.16._bn0.weight": torch.ones(1)})


@pytest.mark.slow
def test_the_network_sees_a_palace_and_a_flower(tmp_path) -> None:
    pytest.importorskip(PACKAGE)
    from PIL import Image
    from sklearn.datasets import load_sample_images
    from timm.data import create_transform, resolve_model_data_config

    network = timm.create_model(MODEL, pretrained=False).eval()
    network.load_state_dict(timm_weights(package_weights()), strict=True)
    transform = create_transform(**resolve_model_data_config(network), is_training=False)
    images = load_sample_images().images
    with torch.no_grad():
        batch = torch.stack([transform(Image.fromarray(image)) for image in images])
        told = network(batch).argmax(1).tolist()
    # ImageNet's palace, and its daisy for a dahlia, which it does not have.
    assert told == [698, 985]
    write_checkpoint(tmp_path / "lite0.pth")
    extractor = otdd.extractors.timm(MODEL, checkpoint=str(tmp_path / "lite0.pth"))
    samples = otdd.embed(otdd.load("digits", max_samples=12), extractor)
    assert samples.dim == 1280
    assert float(np.ptp(samples.features.numpy(), 0).max()) > 0.1
