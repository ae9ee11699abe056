"""Which models of timm have tensors of given shapes, without building its 1,400 models.

`timm_shapes.json` holds for every model of timm 1.0.31 without its classifier a digest of its
tensors' shapes, whatever their names and order; `experiments.timm_shapes` writes it. Digests of
shapes are added, so that a classifier, whose number of classes is anybody's, can be taken off a
checkpoint's. What is found is built and compared before it is named, since timm changes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Size, Tensor, nn

TABLE = Path(__file__).with_name("timm_shapes.json")
MODULUS = 1 << 64


def shapes_digest(shapes: Iterable[Size | tuple[int, ...]]) -> int:
    """Return the sum of the digests of shapes, without those of numbers such as batch counters."""
    return sum(_digest(tuple(shape)) for shape in shapes if len(shape)) % MODULUS


def models_like(state: Mapping[str, Tensor]) -> Iterator[tuple[str, nn.Module]]:
    """Yield models whose tensors have the shapes of a checkpoint's but for its classifier.

    Yields:
        Name and module, on the device meta and without its classifier.
    """
    import timm

    table: dict[str, str] = json.loads(TABLE.read_text(encoding="utf-8"))
    for digest in _without_classifier(state):
        for name in table.get(f"{digest:016x}", "").split():
            if not timm.is_model(name):
                continue
            with torch.device("meta"):
                module = timm.create_model(name, num_classes=0)
            if shapes_digest(t.shape for t in module.state_dict().values()) == digest:
                yield name, module


def _without_classifier(state: Mapping[str, Tensor]) -> list[int]:
    """Return digests of a checkpoint's shapes, whole and without what may be its classifier."""
    whole = shapes_digest(tensor.shape for tensor in state.values())
    digests = [whole]
    for tensor in state.values():
        # A layer (k, d), as a convolution (k, d, 1, 1) too, with a bias (k,) or without.
        if tensor.ndim < 2 or tensor.shape[2:].numel() > 1:
            continue
        for head in ([tensor.shape], [tensor.shape, tensor.shape[:1]]):
            # Distilled transformers have two.
            digests += [(whole - count * shapes_digest(head)) % MODULUS for count in (1, 2)]
    return list(dict.fromkeys(digests))


def _digest(shape: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.sha256(repr(shape).encode()).digest()[:8], "little")
