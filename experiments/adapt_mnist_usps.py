"""Does adaptation help a classifier? Digits of two hands, and digits to clothes.

    python -m experiments.adapt_mnist_usps --data-root DIR [--samples 2000] [--seeds 0 1 2]
        [--device auto] [--output DIR]

Pairs: MNIST to USPS, USPS to MNIST, MNIST to Fashion-MNIST; 28 x 28 pixels, as many training images
of either side. The flow moves the source; its labels stay, but in mode `augmented`. It sees the
labels of both sides, as the dataset distance does: this is adaptation with a labelled target. Where
label sets differ, source classes become target classes by the class coupling of the distance
before the flow: the assignment that carries the most mass.

    on_source       a network trained on the target's images, tested on the source's images
    on_target       a network trained on the source's images, tested on the target's test images

both before and after the flow, three seeds for subsets, networks and flows. The ceiling is a
network trained on the same number of target images, tested on the target's test images. Accuracies
are in percent; `before` of MNIST to Fashion-MNIST is what the class map alone gives.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import otdd_flash as otdd
from experiments.adaptation_picture import draw_adaptation
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.devices import resolve_device
from otdd_flash.labels import Gaussian, NoLabels
from otdd_flash.samples import LabeledSamples

PAIRS = (("mnist", "usps"), ("usps", "mnist"), ("mnist", "fashion_mnist"))
SIDE = 28
STEPS, EPSILON_RELATIVE = 20, 0.01
# Name in tables, mode of the flow, class distances.
FLOWS = (
    ("features", "features", Gaussian()),
    ("features, no labels", "features", NoLabels()),
    ("attached", "attached", Gaussian()),
    ("joint", "joint", Gaussian(diagonal=True)),
    ("augmented", "augmented", Gaussian(diagonal=True)),
)
EPOCHS, BATCH, RATE = 30, 64, 1e-3


def pixels(name: str, root: Path, split: str, samples: int | None, seed: int) -> LabeledSamples:
    """Images of one split, resized to 28 x 28."""
    data = otdd.load(name, root=root, split=split, max_samples=samples, seed=seed)
    return otdd.embed(data, otdd.extractors.pixels(size=SIDE))


def network(seed: int, classes: int) -> nn.Module:
    """A small convolutional network."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Unflatten(1, (1, SIDE, SIDE)),
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 128),
            nn.ReLU(),
            nn.Linear(128, classes),
        )


def trained(
    images: Tensor, labels: Tensor, classes: int, seed: int, device: torch.device
) -> nn.Module:
    """A network trained on images (n, 784) and labels (n,)."""
    model = network(seed, classes).to(device).train()
    images, labels = images.to(device), labels.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for rows in torch.split(torch.randperm(len(images), generator=draw), BATCH):
            loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor, device: torch.device) -> float:
    """Percent of images whose class the network tells."""
    told = torch.cat([model(part.to(device)).argmax(1).cpu() for part in torch.split(images, 2000)])
    return 100 * float((told == labels.cpu()).double().mean())


def class_map(source: LabeledSamples, target: LabeledSamples, device: str) -> Tensor:
    """The target class of every source class (V_x,): its own name, or by the class coupling."""
    if source.class_names == target.class_names:
        return torch.arange(len(source.class_names))
    compute = otdd.ComputeOptions(device=device)
    result = otdd.dataset_distance(
        source, target, epsilon_relative=EPSILON_RELATIVE, compute=compute
    )
    _, columns = linear_sum_assignment(-result.class_coupling().numpy())
    return torch.from_numpy(columns)


def adapt_pair(
    names: tuple[str, str], root: Path, samples: int, seed: int, device: str
) -> list[dict[str, Any]]:
    """Accuracies of one pair and one seed, a row for every flow."""
    where = resolve_device(device)
    source, target = (pixels(name, root, "train", samples, seed) for name in names)
    test = pixels(names[1], root, "test", None, seed)
    assert source.labels is not None
    assert target.labels is not None
    assert test.labels is not None
    mapped, classes = class_map(source, target, device), len(target.class_names)
    teacher = trained(target.features, target.labels, classes, seed, where)
    before = {
        "on_source": accuracy(teacher, source.features, mapped[source.labels], where),
        "on_target": accuracy(
            trained(source.features, mapped[source.labels], classes, seed, where),
            test.features,
            test.labels,
            where,
        ),
    }
    ceiling = accuracy(teacher, test.features, test.labels, where)
    rows = []
    for title, mode, metric in FLOWS:
        flow = otdd.gradient_flow(
            source,
            target,
            otdd.Flow(STEPS, mode, otdd.Stepping(box=(0.0, 1.0)), seed=seed),
            labels=metric,
            epsilon_relative=EPSILON_RELATIVE,
            compute=otdd.ComputeOptions(device=device),
        )
        moved = flow.samples
        assert moved.labels is not None
        labels = mapped[moved.labels]
        student = trained(moved.features, labels, classes, seed, where)
        rows.append(
            {
                "source": names[0],
                "target": names[1],
                "flow": title,
                "seed": seed,
                "samples": samples,
                "before": before,
                "after": {
                    # The particles' own labels: what a person would call them.
                    "on_source": accuracy(teacher, moved.features, mapped[source.labels], where),
                    "on_target": accuracy(student, test.features, test.labels, where),
                },
                "ceiling": ceiling,
                "changed_labels": 100 * float((moved.labels != source.labels).double().mean()),
                "distance": [flow.history[0].divergence, flow.history[-1].divergence],
                "converged": flow.converged,
                "class_map": [target.class_names[k] for k in mapped.tolist()],
            }
        )
        sys.stdout.write(f"{rows[-1]}\n")
        sys.stdout.flush()
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Means and deviations over seeds, as Markdown."""
    lines = [
        "| source → target | flow | target's network on the source: before → after "
        "| source's network on the target: before → after | ceiling | labels changed |",
        "|---|---|---|---|---|---|",
    ]
    for source, target in PAIRS:
        for title, *_ in FLOWS:
            seen = [
                r for r in rows if (r["source"], r["target"], r["flow"]) == (source, target, title)
            ]
            if not seen:
                continue
            cells = [
                f"{_spread([r['before'][key] for r in seen])} → "
                f"{_spread([r['after'][key] for r in seen])}"
                for key in ("on_source", "on_target")
            ]
            ceiling = _spread([r["ceiling"] for r in seen])
            changed = _spread([r["changed_labels"] for r in seen])
            lines.append(
                f"| {source} → {target} | {title} | {' | '.join(cells)} | {ceiling} | {changed} |"
            )
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> str:
    numbers = torch.tensor(values, dtype=torch.float64)
    deviation = float(numbers.std()) if len(numbers) > 1 else 0.0
    return f"{float(numbers.mean()):.1f} ± {deviation:.1f}"


def main() -> None:
    """Write adapt_mnist_usps.json, .md and .png."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for names in PAIRS:
        for seed in arguments.seeds:
            rows += adapt_pair(
                names, arguments.data_root, arguments.samples, seed, arguments.device
            )
            content = {"environment": environment("torch", "torchvision", "scipy"), "rows": rows}
            write_result("adapt_mnist_usps", content, arguments.output)
    (arguments.output / "adapt_mnist_usps.md").write_text(table(rows), encoding="utf-8")
    draw_adaptation(rows, arguments.output / "adapt_mnist_usps.png")


if __name__ == "__main__":
    main()
