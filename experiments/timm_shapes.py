"""The table of shapes by which the error of a checkpoint names models of timm.

    python -m experiments.timm_shapes

Builds every model of the installed timm on the device meta (half an hour) and writes
`otdd_flash/extractors/timm_shapes.json`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence

import timm
import torch
from torch import Tensor

from otdd_flash.extractors.checkpoint import TABLE, shapes_digest

Shapes = Iterable[Sequence[int]]


def table_of(models: Iterable[tuple[str, Shapes]]) -> dict[str, str]:
    """Names of models by the digest of their shapes."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, shapes in models:
        names[f"{shapes_digest(map(tuple, shapes)):016x}"].append(name)
    return {digest: " ".join(sorted(names[digest])) for digest in sorted(names)}


def main() -> None:
    # On the device meta there is nothing to initialise, which would take most of the time.
    for name in ("normal_", "uniform_", "erfinv_", "fill_", "zero_"):
        setattr(Tensor, name, lambda self, *_, **__: self)
    models = []
    for name in timm.list_models():
        with torch.device("meta"):
            module = timm.create_model(name, num_classes=0)
        models.append((name, [tuple(tensor.shape) for tensor in module.state_dict().values()]))
    TABLE.write_text(json.dumps(table_of(models)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
