"""A ground cost learned from a few known matches of classes, through the transport map.

    python -m experiments.learn_a_cost --data-root DIR [--samples N] [--steps K]

MNIST and USPS, 16 x 16 pixels. Points are compared through a linear map to a few coordinates, from
their principal components on, and classes by the distances between their means, with weight
lambda_y. Both are learned by Adam so that the map of the classes, `transport_map` with one-hot
labels as values, sends points of five classes to the same class; the other five are not told. The
loss is the cross-entropy of those votes, and the accuracy that of the class with most of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import nll_loss, one_hot, softplus

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result

CLASSES, KNOWN, COORDINATES, EPSILON, RATE = 10, 5, 16, 0.2, 0.01


def digits(name: str, samples: int, root: Path) -> tuple[Tensor, Tensor]:
    """Points (n, 256), float32, and classes (n,)."""
    loaded = otdd.load(name, root=root, max_samples=samples, seed=0)
    found = otdd.embed(loaded, otdd.extractors.pixels(size=16, grayscale=True))
    assert found.labels is not None
    return found.features.float(), found.labels


class Cost(torch.nn.Module):
    """A linear map (256, k) and the weight of class distances."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__()
        both = torch.cat((x, y))
        _, sizes, directions = torch.linalg.svd(both - both.mean(0), full_matrices=False)
        scale = len(both) ** 0.5 / sizes[:COORDINATES].square().sum().sqrt()
        self.linear = torch.nn.Parameter(scale * directions[:COORDINATES].T)
        self.weight = torch.nn.Parameter(torch.tensor(-3.0))

    @property
    def lambda_y(self) -> Tensor:
        """Not negative."""
        return softplus(self.weight)

    def votes(self, sides: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor]) -> Tensor:
        """What every point of x gets of each class (n, 10)."""
        x, y = (side @ self.linear for side in sides)
        means = torch.cat([class_means(*side) for side in zip((x, y), labels, strict=True)])
        table = (means[:, None] - means).square().sum(2).detach()
        return otdd.transport_map(
            x,
            y,
            values=one_hot(labels[1], CLASSES).to(y),
            epsilon=EPSILON,
            labels_x=labels[0],
            labels_y=labels[1],
            class_table=table,
            class_totals=(CLASSES, CLASSES),
            lambda_y=self.lambda_y,
        )


def class_means(points: Tensor, labels: Tensor) -> Tensor:
    """(10, k)."""
    members = one_hot(labels, CLASSES).to(points)
    return members.T @ points / members.sum(0)[:, None]


def learned(sides: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor], steps: int) -> list[Any]:
    """A row for every step."""
    cost = Cost(*sides)
    optimizer, known = torch.optim.Adam(cost.parameters(), RATE), labels[0] < KNOWN
    rows: list[Any] = []
    for step in range(steps + 1):
        started = time.perf_counter()
        votes = cost.votes(sides, labels)
        loss = nll_loss(votes[known].clamp_min(1e-6).log(), labels[0][known])
        right = votes.argmax(1) == labels[0]
        row = {
            "step": step,
            "loss": float(loss.detach()),
            "accuracy_known": float(right[known].float().mean()),
            "accuracy_others": float(right[~known].float().mean()),
            "lambda_y": float(cost.lambda_y.detach()),
        }
        if step < steps:
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        rows.append(row | {"seconds": time.perf_counter() - started})
        sys.stdout.write(f"{rows[-1]}\n")
    return rows


def main() -> None:
    """Write learn_a_cost_DEVICE.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    loaded = [digits(name, given.samples, given.data_root) for name in ("mnist", "usps")]
    (x, of_x), (y, of_y) = ([part.to(given.device) for part in side] for side in loaded)
    rows = learned((x, y), (of_x, of_y), given.steps)
    content: dict[str, Any] = {"environment": environment("torch"), "samples": given.samples}
    content |= {"epsilon": EPSILON, "coordinates": COORDINATES, "rows": rows}
    write_result(f"learn_a_cost_{given.device}", content, given.output)


if __name__ == "__main__":
    main()
