"""Does a mixture that is near in transport cost train a better network?

    python -m experiments.mixture_networks --data-root DIR [--rows 800] [--pool 250]
        [--seeds 0 1 2 3 4] [--output DIR]

Sources are training images of MNIST, USPS, Fashion-MNIST and scikit-learn's digits at 16 x 16
pixels. Targets are test images: half MNIST and half USPS, USPS alone, and digits alone. Weights are
found on `pool` rows of each source and labelled images of the target that no network is tested on.
Networks of one hidden layer are trained on as many rows each, drawn by

    mixture         `otdd.mixture`, the default
    debiased        the same with debias=True
    uniform         equal weights
    proportional    in proportion to the sizes of the sources
    best single     the one source that is nearest

and tested on the target's other images; classes of one name are one. Five seeds for rows, draws and
networks; accuracies are in percent. Whatever comes out is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.mixing.result import Mixture
from otdd_flash.samples import LabeledSamples

SIDE = 16
SOURCES = ("mnist", "usps", "fashion_mnist", "digits")
TARGETS = {"mnist and usps": ("mnist", "usps"), "usps": ("usps",), "digits": ("digits",)}
EPOCHS, BATCH, RATE, HIDDEN = 40, 64, 1e-3, 128


def pixels(name: str, root: Path, split: str, samples: int | None, seed: int) -> LabeledSamples:
    """Images of one split, at 16 x 16."""
    data = otdd.load(name, root=root, split=split, max_samples=samples, seed=seed)
    return otdd.embed(data, otdd.extractors.pixels(size=SIDE))


def halves(
    names: Sequence[str], root: Path, size: int, seed: int
) -> tuple[LabeledSamples, LabeledSamples]:
    """Labelled images of a target, and as many others to test on."""
    parts: list[list[LabeledSamples]] = [[], []]
    for name in names:
        whole = pixels(name, root, "test", None, seed)
        draw = torch.Generator().manual_seed(seed)
        rows = torch.randperm(len(whole), generator=draw)
        each = min(size // len(names), len(whole) // 2)
        parts[0].append(whole.take(rows[:each]))
        parts[1].append(whole.take(rows[each : 2 * each]))
    known, held = (
        LabeledSamples.from_arrays(
            torch.cat([one.features for one in some]),
            [one.class_names[k].partition(" ")[0] for one in some for k in labels_of(one)],
        )
        for some in parts
    )
    return known, held


def labels_of(samples: LabeledSamples) -> list[int]:
    """Class indices."""
    assert samples.labels is not None
    found: list[int] = samples.labels.tolist()
    return found


def accuracy(train: LabeledSamples, test: LabeledSamples, seed: int) -> float:
    """The percentage of test images that a network of these rows classifies by name."""
    torch.manual_seed(seed)
    x, labels = train.features.float(), torch.tensor(labels_of(train))
    net = nn.Sequential(
        nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, train.class_total)
    )
    optimizer = torch.optim.Adam(net.parameters(), RATE)
    for _ in range(EPOCHS):
        for rows in torch.split(torch.randperm(len(x)), BATCH):
            loss = nn.functional.cross_entropy(net(x[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    with torch.no_grad():
        found = net(test.features.float()).argmax(1).tolist()
    hits: list[bool] = [
        bool(train.class_names[one] == test.class_names[label])
        for one, label in zip(found, labels_of(test), strict=True)
    ]
    return 100 * sum(hits) / len(hits)


def drawn(found: Mixture, weights: Sequence[float], rows: int, seed: int) -> LabeledSamples:
    """Rows drawn by other weights than the mixture's."""
    named = dict(zip(found.weights, weights, strict=True))
    return replace(found, weights=named).dataset(rows, seed)


def run(target: str, root: Path, rows: int, pool: int, seed: int) -> list[dict[str, Any]]:
    """Accuracies of all ways to draw, for one target and seed."""
    sources = {name: pixels(name, root, "train", max(pool, rows), seed) for name in SOURCES}
    sizes = {"mnist": 60_000, "usps": 7_291, "fashion_mnist": 60_000, "digits": 899}
    known, held = halves(TARGETS[target], root, 2 * pool, seed)
    fewer = {name: some_rows(one, pool, seed) for name, one in sources.items()}
    found = otdd.mixture(known, fewer, max_seconds=120)
    debiased = otdd.mixture(
        known, fewer, debias=True, epsilon=found.details["epsilon"], max_seconds=120
    )
    total = sum(sizes.values())
    ways = {
        "mixture": list(found.weights.values()),
        "debiased": list(debiased.weights.values()),
        "uniform": [1 / len(sizes)] * len(sizes),
        "proportional": [size / total for size in sizes.values()],
        "best single": list(found.others[0].weights) if found.others else [],
    }
    wide = replace(
        found, sources=tuple(sources.values()), sizes={n: len(s) for n, s in sources.items()}
    )
    told = []
    for way, weights in ways.items():
        if not weights:
            continue
        train = drawn(wide, weights, rows, seed)
        told.append(
            {
                "target": target,
                "seed": seed,
                "way": way,
                "weights": dict(zip(sources, weights, strict=True)),
                "rows": rows,
                "accuracy": accuracy(train, held, seed),
                "bounds": found.bounds,
            }
        )
    return told


def some_rows(samples: LabeledSamples, count: int, seed: int) -> LabeledSamples:
    """Some rows, drawn."""
    rows = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    return samples.take(rows[:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--pool", type=int, default=250)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for target in TARGETS:
        for seed in given.seeds:
            rows += run(target, given.data_root, given.rows, given.pool, seed)
            for row in rows[-5:]:
                sys.stdout.write(f"{target} {seed} {row['way']} {row['accuracy']:.1f}\n")
            sys.stdout.flush()
            content = {"rows": rows, "environment": environment("torch")}
            write_result("mixture_networks", content, given.output)


if __name__ == "__main__":
    main()
