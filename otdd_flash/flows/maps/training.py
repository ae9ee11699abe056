"""A small network and its regression: seeded, with early stopping, the same on every run.

The last layer starts at 0, so that an untrained network answers 0. Weights are drawn and batches
shuffled by a generator on the CPU; the global one is neither read nor moved.
"""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

# Of n examples, 1 in HELD_OUT chooses the epoch.
HELD_OUT = 10
BATCH = 64
LEARNING_RATE = 2e-3
# Decoupled (Loshchilov & Hutter 2019), strong: particles are few and their ends are noisy.
WEIGHT_DECAY = 1.0
# Epochs without a better one before the rest is saved.
PATIENCE = 30


class Examples(NamedTuple):
    """Regression examples: inputs (n, p), answers (n, d), weights (n,) of mean 1."""

    inputs: Tensor
    answers: Tensor
    weights: Tensor

    def take(self, rows: Tensor) -> Examples:
        return Examples(*(part[rows] for part in self))


def build_network(sizes: tuple[int, ...]) -> nn.Sequential:
    """Linear layers sizes[0] -> sizes[1] -> ... with SiLU between, of weights not yet set."""
    parts: list[nn.Module] = []
    for width, next_width in pairwise(sizes):
        # A layer would else draw its first weights from the global generator.
        layer = nn.utils.skip_init(nn.Linear, width, next_width)  # type: ignore[no-untyped-call]
        parts += [layer, nn.SiLU()]
    return nn.Sequential(*parts[:-1])


def draw_weights(network: nn.Sequential, generator: torch.Generator) -> None:
    """He's uniform weights, biases 0; the last layer 0."""
    linear = [layer for layer in network if isinstance(layer, nn.Linear)]
    for layer in linear:
        nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=generator)
        nn.init.zeros_(layer.bias)
    nn.init.zeros_(linear[-1].weight)


def train(
    network: nn.Sequential, examples: Examples, epochs: int, generator: torch.Generator
) -> None:
    """Weighted least squares by AdamW with a cosine schedule; keeps the weights of the best epoch.

    Best is the lowest error of the tenth that is held out, or of all where there are fewer than
    ten; the untrained network is among the candidates.

    Args:
        network: changed in place.
        examples: on the device of the network.
        epochs: at most; 0 changes nothing.
        generator: of the CPU; chooses what is held out and shuffles the batches.
    """
    count, device = len(examples.inputs), examples.inputs.device
    order = torch.randperm(count, generator=generator).to(device)
    held_out, kept = order[: count // HELD_OUT], order[count // HELD_OUT :]
    watched = examples.take(held_out if len(held_out) else kept)
    optimiser = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(epochs, 1))
    best, best_epoch, state = _error_of(network, watched), 0, deepcopy(network.state_dict())
    for epoch in range(1, epochs + 1):
        shuffled = kept[torch.randperm(len(kept), generator=generator).to(device)]
        for rows in torch.split(shuffled, BATCH):
            _descend(network, optimiser, examples.take(rows))
        schedule.step()
        error = _error_of(network, watched)
        if error < best:
            best, best_epoch, state = error, epoch, deepcopy(network.state_dict())
        elif epoch - best_epoch >= PATIENCE:
            break
    network.load_state_dict(state)


def _descend(network: nn.Sequential, optimiser: torch.optim.Optimizer, examples: Examples) -> None:
    optimiser.zero_grad()
    _loss(network, examples).backward()  # type: ignore[no-untyped-call]
    optimiser.step()


def _loss(network: nn.Sequential, examples: Examples) -> Tensor:
    errors: Tensor = network(examples.inputs) - examples.answers
    return (examples.weights * errors.square().sum(1)).mean()


@torch.no_grad()
def _error_of(network: nn.Sequential, examples: Examples) -> float:
    return float(_loss(network, examples))
