"""Sorting numbers by a permutation that a network learns: implicit against unrolled gradients.

Gumbel-Sinkhorn (Mena et al. 2018, Learning latent permutations with Gumbel-Sinkhorn networks): each
of 64 uniform numbers gets the logits of its place from a small network, noise is added, and the
doubly stochastic matrix at a temperature falling from 1 to 0.1 is to sort them.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import otdd_flash as otdd
from experiments.rows import Rows


def train(
    gradient: str, numbers: int, steps: int, iterations: int, device: str
) -> tuple[nn.Module, float]:
    """The logits of places, (B, numbers) to (B, numbers, numbers), and MiB that balancing keeps."""
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    network = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, numbers)).to(device)
    optimizer = torch.optim.Adam(network.parameters(), 0.01)
    for step in range(steps):
        drawn = torch.rand(32, numbers, device=device)
        noise = -torch.empty(32, numbers, numbers, device=device).exponential_().log()
        temperature = 0.1 ** (step / max(steps - 1, 1))
        logits = network(drawn[..., None]) + 0.1 * noise
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            matrices = otdd.doubly_stochastic(
                logits, iterations=iterations, temperature=temperature, gradient=gradient
            )
        loss = (matrices.mT @ drawn[..., None] - drawn.sort().values[..., None]).square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return network, sum(kept) / 2**20


@torch.no_grad()
def accuracy(network: nn.Module, numbers: int, device: str) -> float:
    """The share of numbers whose likeliest place is no more than one off, without noise."""
    drawn = torch.rand(256, numbers, device=device)
    logits: Tensor = network(drawn[..., None])
    places = otdd.doubly_stochastic(logits, iterations=100, temperature=0.1).argmax(-1)
    true = drawn.argsort().argsort()
    return float(((places - true).abs() <= 1).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--numbers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    given = parser.parse_args()
    rows = Rows(f"permutation_sorting_{given.device}", ("gradient", "iterations", "seed"), "torch")
    for iterations in (20, 100):
        for gradient in ("unrolled", "implicit"):
            for seed in range(2):
                keys = {"gradient": gradient, "iterations": iterations, "seed": seed}
                if rows.has(**keys):
                    continue
                torch.manual_seed(seed)
                if given.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                start = time.perf_counter()
                network, kept = train(
                    gradient, given.numbers, given.steps, iterations, given.device
                )
                seconds = time.perf_counter() - start
                found = accuracy(network, given.numbers, given.device)
                row = {**keys, "within_one": found, "seconds": seconds, "kept_mib": kept}
                if given.device == "cuda":
                    row["peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
                rows.add({**row, "numbers": given.numbers, "steps": given.steps})


if __name__ == "__main__":
    main()
