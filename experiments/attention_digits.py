"""Small transformers on the bundled digits, with softmax and with Sinkhorn attention.

    python -m experiments.attention_digits [--epochs 25] [--iterations 0 1 3]

Four layers of width 32 with four heads read an image of 8 x 8 as 16 patches of 2 x 2. Of 1,797
images 1,000 train, and 797 say how often the network is right. A seed draws the split, the weights
and the order of batches: all kinds of attention start from the same ones. Softmax is no iteration.
A row is written as soon as a network is trained.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.rows import Rows

SEEDS, TRAINING, BATCH = 5, 1000, 50
WIDTH, HEADS, LAYERS, PATCH = 32, 4, 4, 2


class Network(nn.Module):
    """A transformer of patches whose tokens are averaged."""

    def __init__(self, iterations: int) -> None:
        super().__init__()
        count = (8 // PATCH) ** 2
        self.embed = nn.Linear(PATCH**2, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(count, WIDTH))
        layers = []
        for _ in range(LAYERS):
            layer = nn.TransformerEncoderLayer(
                WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            attention = otdd.nn.SinkhornAttention(
                WIDTH, HEADS, batch_first=True, iterations=iterations
            )
            attention.load_state_dict(layer.self_attn.state_dict())
            layer.self_attn = attention
            layers.append(layer)
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, 10) of images (B, 8, 8)."""
        patches = nn.functional.unfold(images[:, None], PATCH, stride=PATCH).mT
        logits: Tensor = self.head(self.layers(self.embed(patches) + self.places).mean(1))
        return logits


def trained(iterations: int, seed: int, epochs: int) -> dict[str, float]:
    """Accuracy of a trained network, its loss in training, and the seconds that it took."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float() / 16
    labels = torch.from_numpy(digits.target)
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=draw)
    train, test = order[:TRAINING], order[TRAINING:]
    torch.manual_seed(seed)
    network, start = Network(iterations), time.perf_counter()
    optimiser = torch.optim.AdamW(network.parameters(), lr=2e-3)
    steps = epochs * (TRAINING // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    for _ in range(epochs):
        total = 0.0
        for rows in torch.split(train[torch.randperm(TRAINING, generator=draw)], BATCH):
            loss = nn.functional.cross_entropy(network(images[rows]), labels[rows])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            total += float(loss.detach()) * len(rows) / TRAINING
    seconds = time.perf_counter() - start
    with torch.no_grad():
        right = (network.eval()(images[test]).argmax(1) == labels[test]).double().mean()
    return {"accuracy": float(right), "training_loss": total, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--iterations", type=int, nargs="+", default=[0, 1, 3])
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the result")
    arguments = parser.parse_args()
    keys = ("iterations", "seed", "epochs")
    rows = Rows("attention_digits", keys, "torch", folder=arguments.output)
    epochs = arguments.epochs
    for seed in range(SEEDS):
        for iterations in arguments.iterations:
            setting = {"iterations": iterations, "seed": seed, "epochs": epochs}
            if not rows.has(**setting):
                rows.add(setting | trained(iterations, seed, epochs))
    for iterations in arguments.iterations:
        of = [
            row["accuracy"]
            for row in rows.rows
            if row["iterations"] == iterations and row["epochs"] == epochs
        ]
        mean, spread = statistics.mean(of), statistics.stdev(of)
        sys.stdout.write(f"{iterations} iterations: {mean:.4f}, seeds differ by {spread:.4f}\n")


if __name__ == "__main__":
    main()
