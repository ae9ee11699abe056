"""The loop of transfer runs: Adam on cross entropy, rows in an order that a seed gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from otdd_flash.study.transfer.networks import Network
from otdd_flash.study.transfer.settings import Transfer

# Rows of one pass when a network is evaluated.
ROWS_AT_ONCE = 2048


def train(
    network: Network,
    features: Tensor,
    labels: Tensor,
    transfer: Transfer,
    *,
    epochs: int,
    min_steps: int,
    seed: int,
    frozen_body: bool = False,
) -> int:
    """Train a network in place on rows (n, d) of classes (n,).

    Args:
        network: what is trained.
        features: float32.
        labels: class indices.
        transfer: rate, decay and size of batches.
        epochs: passes over the rows.
        min_steps: passes are added until there are so many steps; the last may stop within.
        seed: of the order of rows.
        frozen_body: train the head alone, on the features that the body gives.

    Returns:
        The number of steps made.
    """
    if frozen_body:
        features = body_features(network.body, features)
    parameters: Iterable[nn.Parameter] = network.head.parameters()
    if not frozen_body:
        parameters = [*network.body.parameters(), *network.head.parameters()]
        network.body.train()
    optimizer = torch.optim.Adam(
        parameters, lr=transfer.learning_rate, weight_decay=transfer.weight_decay, fused=True
    )
    made = 0
    steps = max(epochs * math.ceil(len(labels) / transfer.batch_size), min_steps)
    for rows in _batches(len(labels), transfer.batch_size, steps, seed):
        optimizer.zero_grad()
        logits = network.head(features[rows]) if frozen_body else network(features[rows])
        nn.functional.cross_entropy(logits, labels[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        made += 1
    network.body.eval()
    return made


@torch.no_grad()
def body_features(body: nn.Module, features: Tensor) -> Tensor:
    """What the body gives for all rows, (n, k)."""
    body.eval()
    return torch.cat([body(part) for part in torch.split(features, ROWS_AT_ONCE)])


@torch.no_grad()
def count_errors(network: Network, features: Tensor, labels: Tensor) -> int:
    """How many rows get another class than theirs."""
    told = network.head(body_features(network.body, features)).argmax(1)
    return int((told != labels).sum())


def _batches(count: int, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Rows of every step: each pass has an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    made = 0
    while made < steps:
        for rows in torch.split(torch.randperm(count, generator=generator), size):
            if made == steps:
                return
            yield rows
            made += 1
