"""The points of both datasets: pixels, or features of a ResNet18 without pretrained weights.

The network is trained here: torchvision's ResNet18 for one grey channel and small images (a first
convolution of 3 x 3 with stride 1, no max pooling), one output per class of both datasets, one
epoch over both in a random order, bfloat16 autocast on a GPU. Features are what the last layer
gets, in evaluation mode and float32. Or a user's checkpoint of torchvision's own ResNet18 takes its
place, with the transforms of its ImageNet weights.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import otdd_flash as otdd
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.extractors.checkpoint import seeded_weights
from otdd_flash.extractors.network import Network, forward_images

SEED = 0
BATCH = 512
LEARNING_RATE = 2e-3
EMBEDDING_BATCH = 1024
MOST_WORKERS = 16


class Inputs:
    """The datasets as features or pixels; the network is trained when it is first needed.

    Args:
        root: folder of the datasets.
        largest: n of the images to train on.
        checkpoint: weights to use instead of training.
        device: where features are computed and kept.
    """

    def __init__(
        self, root: str, largest: int, checkpoint: Path | None, device: torch.device
    ) -> None:
        self.root, self.checkpoint, self.device = root, checkpoint, device
        self.network_name = _network_name(checkpoint, 2 * largest)
        self.network = cache(lambda: resnet18(self._datasets(largest), checkpoint, device))

    def embedded(self, points: str, n: int) -> list[otdd.LabeledSamples]:
        """Both sides, n points each, on the device; pixels have no labels."""
        extractor = otdd.extractors.pixels() if points == "pixels" else self.network()[0]
        ready = (
            otdd.embed(
                dataset,
                extractor,
                batch_size=EMBEDDING_BATCH,
                device=self.device,
                mixed_precision=False,
                # A checkpoint's transforms are slow.
                num_workers=min(MOST_WORKERS, os.cpu_count() or 1) if self.checkpoint else 0,
            ).to(self.device)
            for dataset in self._datasets(n)
        )
        if points == "features":
            return list(ready)
        return [otdd.LabeledSamples(side.features, None, (), name=side.name) for side in ready]

    def _datasets(self, n: int) -> list[LabeledDataset]:
        names = ("mnist", "fashion_mnist")
        datasets = [otdd.load(name, root=self.root, max_samples=n) for name in names]
        if min(map(len, datasets)) < n:
            raise SystemExit(f"{self.root} has no {n} images of each dataset")
        return datasets


def _network_name(checkpoint: Path | None, images: int) -> str:
    """Which network this is, for the rows of a result; `images` are those that it is trained on."""
    if checkpoint is None:
        return f"ResNet18 trained for one epoch on {images:,} images, seed {SEED}"
    digest = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    return f"ResNet18 from {checkpoint.name}, sha256 {digest[:12]}"


def resnet18(
    datasets: Sequence[LabeledDataset], checkpoint: Path | None, device: torch.device
) -> tuple[Network, dict[str, Any]]:
    """The extractor of 512 features, and what is to be said of it.

    Args:
        datasets: grey images (n, h, w) with labels, to train on where there is no checkpoint.
        checkpoint: a file of weights.
        device: where to train.
    """
    if checkpoint is not None:
        network = otdd.extractors.torchvision("resnet18", checkpoint=str(checkpoint))
        return network, {"trained_here": False, "checkpoint": checkpoint.name}
    started = time.perf_counter()
    images = torch.cat([torch.from_numpy(np.array(side.inputs)) for side in datasets]).unsqueeze(1)
    labels = _joint_labels(datasets)
    module = _small_resnet(sum(len(side.class_names) for side in datasets))
    module = module.to(device, memory_format=torch.channels_last)
    accuracy = _train(module, images.to(device), labels.to(device))
    module.fc = nn.Identity()
    details = {
        "trained_here": True,
        "epochs": 1,
        "training_images": len(images),
        "batch": BATCH,
        "seed": SEED,
        "accuracy_on_new_batches": accuracy,
        "seconds": time.perf_counter() - started,
    }
    name = _network_name(None, len(images))
    kind = frozenset({"image"})
    return Network(name, module.cpu().eval(), kind, _prepare, forward_images), details


def _small_resnet(classes: int) -> Any:
    from torchvision import models

    with seeded_weights(SEED):
        module = models.resnet18(weights=None, num_classes=classes)
        module.conv1 = nn.Conv2d(1, 64, 3, padding=1, bias=False)
    module.maxpool = nn.Identity()
    return module


def _train(module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """One epoch; the accuracy on the last quarter of the batches, each before its step."""
    draw = torch.Generator().manual_seed(SEED)
    order = torch.randperm(len(images), generator=draw)
    batches = torch.split(order.to(images.device), BATCH)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(batches))
    right, seen = torch.zeros((), device=images.device), 0
    module.train()
    for step, rows in enumerate(batches):
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            scores = module(_scaled(images[rows]).contiguous(memory_format=torch.channels_last))
        optimizer.zero_grad()
        cross_entropy(scores.float(), labels[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step >= len(batches) * 3 // 4:
            right += (scores.argmax(1) == labels[rows]).sum()
            seen += len(rows)
    return float(right) / seen


def _joint_labels(datasets: Sequence[LabeledDataset]) -> Tensor:
    """The labels, numbered through all datasets."""
    parts, shift = [], 0
    for side in datasets:
        assert side.labels is not None
        parts.append(torch.from_numpy(side.labels) + shift)
        shift += len(side.class_names)
    return torch.cat(parts)


def _scaled(images: Tensor) -> Tensor:
    """Bytes to numbers of about unit size around 0."""
    return images.float().div_(127.5).sub_(0.5)


def _prepare(image: np.ndarray[Any, Any]) -> Tensor:
    return _scaled(torch.from_numpy(image).unsqueeze(0))
