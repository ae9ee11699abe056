"""The networks of transfer runs, their training and its units, and the gains from test errors.

A network is a body that gives features, and a linear head. `build_body` and `build_head` make one
whose weights depend only on a seed; a user's function can replace the built-in bodies.

`source_unit` and `run_unit` make the units; `gains`, `halved_gains` and `gain_errors` turn test
errors into percentages. `study.measures.network` uses trained sources and the rows of targets,
`study.study` lists the units (`transfer_units`) and tries `build_body` and `build_head` first, and
`study.result` reads the units (`run_unit`) and computes the gains.

Each repetition has one seed per purpose. The initial weights depend only on the repetition, and so
do a target's head, its rows and their order, so one run on the target alone serves all sources. All
training runs on the CPU with one thread, so that errors are the same to the last bit on one
machine.

The name of a unit's file is a digest of its key (`study.units`), so stored results are used as long
as keys are equal. A change of the training, or of a built-in network, that gives other numbers must
change the key too; between releases the version in `Settings.machine` does so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from otdd_flash.data.subset import stratified_rows
from otdd_flash.errors import InputError
from otdd_flash.extractors.checkpoint import seeded_weights
from otdd_flash.plugins import user_code
from otdd_flash.samples import LabeledSamples
from otdd_flash.study.setup import Setup, Transfer
from otdd_flash.study.units import Content, Store, Unit

# Units of the hidden layer for features that are no images.
HIDDEN = 256

# LeNet-5: LeCun et al. 1998, Gradient-based learning applied to document recognition.
KERNEL, CHANNELS, WIDTHS = 5, (6, 16), (120, 84)

# The smallest side of which two poolings by 2 leave a pixel.
SMALLEST_SIDE = 4


class Network(nn.Module):
    """A body from features (n, d) to (n, k), and a linear head to one logit per class."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, features: Tensor) -> Tensor:
        """Return logits (n, V)."""
        logits: Tensor = self.head(self.body(features))
        return logits


def build_body(transfer: Transfer, dim: int, seed: int) -> nn.Module:
    """Build the body with the weights of a seed.

    Raises:
        InputError: the images are too small, or the user's function returns no module.
    """
    builder, shape = transfer.builder(), transfer.image_shape
    with seeded_weights(seed):
        if builder is None:
            if shape is None:
                return nn.Sequential(nn.Linear(dim, HIDDEN), nn.ReLU())
            return _lenet(shape, dim)
        with user_code("transfer.network"):
            body = builder(dim, shape)
    if not isinstance(body, nn.Module):
        raise InputError(
            f"transfer.network must return a torch module, got {type(body).__qualname__}"
        )
    return body


def build_head(body: nn.Module, dim: int, classes: int, seed: int) -> nn.Linear:
    """Build a head for the features of a body, with the weights of a seed.

    Raises:
        InputError: the body does not return a matrix of features.
    """
    # The body is left in evaluation mode; `training.train` sets the mode that it needs.
    with torch.no_grad():
        features = body.eval()(torch.zeros(2, dim))
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        raise InputError(
            "transfer.network must return a module that turns features (n, d) into (n, k), one row "
            "per input"
        )
    with seeded_weights(seed):
        return nn.Linear(features.shape[1], classes)


def _lenet(shape: tuple[int, ...], dim: int) -> nn.Sequential:
    channels, height, width = shape
    if channels * height * width != dim:
        raise InputError(
            f"transfer.image_shape={list(shape)} has {channels * height * width} values, but the "
            f"tasks have {dim} features; give the shape of their images, or null"
        )
    if min(height, width) < SMALLEST_SIDE:
        raise InputError(
            f"images of {height} x {width} are too small for the built-in network, which needs "
            f"{SMALLEST_SIDE}; set transfer.image_shape=null or transfer.network=module:function"
        )
    sides = [height // 2, width // 2]
    # Unpadded, the second convolution and pooling would leave nothing of a side below KERNEL + 1.
    padding = KERNEL // 2 if min(sides) < KERNEL + 1 else 0
    sides = [(side + 2 * padding - KERNEL + 1) // 2 for side in sides]
    first, second = CHANNELS
    layers = nn.Sequential(
        nn.Unflatten(1, (channels, height, width)),
        nn.Conv2d(channels, first, KERNEL, padding=KERNEL // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, KERNEL, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * sides[0] * sides[1], WIDTHS[0]),
        nn.ReLU(),
        nn.Linear(*WIDTHS),
        nn.ReLU(),
    )
    # A quarter faster on small images, forward and backward.
    return layers.to(memory_format=torch.channels_last)


# Rows of one pass when a network is evaluated.
ROWS_AT_ONCE = 2048


def train(
    network: Network,
    rows: LabeledSamples,
    transfer: Transfer,
    *,
    epochs: int,
    min_steps: int,
    seed: int,
    frozen_body: bool = False,
) -> int:
    """Train a network in place on labelled rows, with Adam on the cross entropy.

    Args:
        network: the network to train.
        rows: with a class index each; features are taken in float32.
        transfer: rate, decay and size of batches.
        epochs: passes over the rows.
        min_steps: the least number of steps; if `epochs` passes make fewer, further passes are
            added, the last one cut short.
        seed: seed of the order of rows.
        frozen_body: train the head alone, on the features that the body gives.

    Returns:
        The number of steps made.
    """
    features, labels = rows.features.float(), rows.labels
    assert labels is not None
    trained: nn.Module = network.train()
    if frozen_body:
        features, trained = body_features(network.body, features), network.head
    optimizer = torch.optim.Adam(
        trained.parameters(),
        lr=transfer.learning_rate,
        weight_decay=transfer.weight_decay,
        fused=True,
    )
    steps = max(epochs * math.ceil(len(labels) / transfer.batch_size), min_steps)
    for batch in islice(_batches(len(labels), transfer.batch_size, seed), steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(trained(features[batch]), labels[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    network.eval()
    return steps


@torch.no_grad()
def body_features(body: nn.Module, features: Tensor) -> Tensor:
    """Return the body's features (n, k) of all rows."""
    body.eval()
    return torch.cat([body(part) for part in torch.split(features, ROWS_AT_ONCE)])


@torch.no_grad()
def count_errors(network: Network, rows: LabeledSamples) -> int:
    """Return the number of rows that are classified wrongly."""
    assert rows.labels is not None
    told = network.head(body_features(network.body, rows.features.float())).argmax(1)
    return int((told != rows.labels).sum())


def _batches(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Yield the rows of steps without end; each pass has its own order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.split(torch.randperm(count, generator=generator), size)


class Purpose(IntEnum):
    """The purposes of seeds."""

    WEIGHTS = 0
    SOURCE_HEAD = 1
    SOURCE_ORDER = 2
    TARGET_HEAD = 3
    TARGET_ROWS = 4
    TARGET_ORDER = 5


def seed_for(setup: Setup, repetition: int, purpose: Purpose) -> int:
    """Return a seed that no other purpose or repetition has."""
    entropy = [setup.settings.seed, repetition, int(purpose)]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def target_rows(setup: Setup, j: int, repetition: int) -> LabeledSamples:
    """Return the rows of a target that a repetition trains on and that measures use."""
    samples = setup.tasks[j].train
    assert samples.labels is not None
    generator = np.random.default_rng(seed_for(setup, repetition, Purpose.TARGET_ROWS))
    count = transfer_of(setup).target_rows(samples)
    rows = stratified_rows(samples.labels.numpy(), count, generator)
    return samples.take(torch.from_numpy(rows))


def transfer_of(setup: Setup) -> Transfer:
    """Return the settings of training, in a study with transfer."""
    assert setup.settings.transfer is not None
    return setup.settings.transfer


def _training_key(
    setup: Setup, repetition: int, fingerprints: list[str | None], *left_out: str
) -> dict[str, Any]:
    """Return what a run depends on, without the settings of transfer that it does not read."""
    summary = transfer_of(setup).to_dict()
    # No repetition depends on how many there are.
    for name in ("seeds", *left_out):
        del summary[name]
    return {
        "fingerprints": fingerprints,
        "transfer": summary,
        "seed": setup.settings.seed,
        "repetition": repetition,
        **setup.settings.machine,
    }


def initial_network(setup: Setup, repetition: int, rows: LabeledSamples, head: Purpose) -> Network:
    """Return the network of the rows' classes before any training, with a head of that purpose."""
    seeds = [seed_for(setup, repetition, purpose) for purpose in (Purpose.WEIGHTS, head)]
    body = build_body(transfer_of(setup), rows.dim, seeds[0])
    return Network(body, build_head(body, rows.dim, rows.class_total, seeds[1]))


def source_unit(setup: Setup, i: int, repetition: int) -> Unit:
    """Return the network trained on a source.

    The protocol and all settings of targets are left out of its key, so that changing them does not
    train the network again.
    """
    left_out = ("protocol", "target_samples", "target_epochs", "min_target_steps")
    return Unit(
        "trained source",
        _training_key(setup, repetition, [setup.tasks[i].train.fingerprint], *left_out),
        f"the network of {setup.names[i]}, repetition {repetition}",
        partial(_train_source, setup, i, repetition),
        one_thread=True,
    )


def _train_source(setup: Setup, i: int, repetition: int, store: Store) -> Content:
    rows, transfer = setup.tasks[i].train, transfer_of(setup)
    network = initial_network(setup, repetition, rows, Purpose.SOURCE_HEAD)
    steps = train(
        network,
        rows,
        transfer,
        epochs=transfer.source_epochs,
        min_steps=0,
        seed=seed_for(setup, repetition, Purpose.SOURCE_ORDER),
    )
    return Content({"steps": steps}, network.state_dict())


def trained_network(setup: Setup, i: int, repetition: int, store: Store) -> Network:
    """Return a source's network with the weights that its unit stored."""
    network = initial_network(setup, repetition, setup.tasks[i].train, Purpose.SOURCE_HEAD)
    network.load_state_dict(dict(store.found(source_unit(setup, i, repetition)).tensors))
    return network.eval()


def run_unit(setup: Setup, i: int | None, j: int, repetition: int) -> Unit:
    """Return a training on a few rows of a target, from a source's network.

    With i None it is the baseline, which starts from the initial weights.
    """
    if i is None:
        # The baseline trains all layers under every protocol, and trains on no source.
        left_out: tuple[str, ...] = ("protocol", "source_epochs")
        needs, start = tuple[Unit, ...](), "alone"
    else:
        # The source's network enters the digest by `needs`.
        left_out = ()
        needs, start = (source_unit(setup, i, repetition),), f"from {setup.names[i]}"
    return Unit(
        "target run",
        _training_key(setup, repetition, setup.tasks[j].fingerprints, *left_out),
        f"the run on {setup.names[j]} {start}, repetition {repetition}",
        partial(_train_on_target, setup, i, j, repetition),
        needs,
        one_thread=True,
    )


def _train_on_target(setup: Setup, i: int | None, j: int, repetition: int, store: Store) -> Content:
    test, transfer = setup.tasks[j].test, transfer_of(setup)
    rows = target_rows(setup, j, repetition)
    network = initial_network(setup, repetition, rows, Purpose.TARGET_HEAD)
    if i is not None:
        network.body = trained_network(setup, i, repetition, store).body
    steps = train(
        network,
        rows,
        transfer,
        epochs=transfer.target_epochs,
        min_steps=transfer.min_target_steps,
        seed=seed_for(setup, repetition, Purpose.TARGET_ORDER),
        frozen_body=i is not None and transfer.protocol == "head",
    )
    assert test is not None
    errors = count_errors(network, test)
    return Content({"errors": errors, "steps": steps, "test_rows": len(test)})


def transfer_units(setup: Setup) -> list[Unit]:
    """Return the runs of all ordered pairs of tasks, and the runs of their targets alone.

    Pairs of tasks that share rows are left out.
    """
    pairs = setup.transferred()
    repetitions = range(transfer_of(setup).seeds)
    targets = dict.fromkeys(j for _, j in pairs)
    runs = [*((None, j) for j in targets), *pairs]
    return [run_unit(setup, i, j, repetition) for i, j in runs for repetition in repetitions]


Numbers = NDArray[np.float64]

# With fewer baseline errors, a gain cannot be distinguished from chance.
FEWEST_ERRORS = 5


def gains(transferred: Numbers, alone: Numbers, seeds: Sequence[int] | None = None) -> Numbers:
    """Return the gains 100 (e0 - e1) / e0, with e0, e1 the mean errors alone and transferred.

    Args:
        transferred: (K, K, S) test errors of transfer runs, rows are sources; NaN for missing runs.
        alone: (K, S) test errors of runs on the targets alone.
        seeds: which of the S repetitions to average over; None takes all.

    Returns:
        (K, K) gains; NaN if a baseline has fewer than FEWEST_ERRORS errors on average over all
        its repetitions, or if a run is missing.
    """
    if not alone.shape[-1]:
        return np.full(transferred.shape[:2], np.nan)
    chosen = slice(None) if seeds is None else list(seeds)
    # Sums of counts are exact, so equal ratios are equal numbers; ratios of means may differ.
    e0, e1 = alone[:, chosen].sum(-1), transferred[:, :, chosen].sum(-1)
    # Decided over all repetitions, so that subsets of seeds have the same pairs.
    enough = alone.mean(-1) >= FEWEST_ERRORS
    base = np.where(enough & (e0 > 0), e0, np.nan)
    found: Numbers = 100 * (base - e1) / base
    return found


def halved_gains(transferred: Numbers, alone: Numbers) -> tuple[Numbers, Numbers]:
    """Return gains by half of the seeds and by the other half, (D, K, K) each, in D = 2 S ways.

    A source that is picked by one half and scored by the other does not profit from luck. The seeds
    are laid in a circle: from each of the S starts, S // 2 seeds are one half and the rest is the
    other, and each half picks once. Baselines are means over all seeds, so that the mean of either
    return value over all D ways is `gains`. With one seed, D = 1 and both are its gains.

    Args:
        transferred: (K, K, S) as for `gains`.
        alone: (K, S) as for `gains`.
    """
    count = alone.shape[-1]
    if count < 2:
        whole = gains(transferred, alone)[None]
        return whole, whole
    enough = alone.mean(-1) >= FEWEST_ERRORS
    base = np.where(enough, alone.mean(-1), np.nan)
    picking = []
    for first in range(count):
        turned = np.roll(transferred, -first, axis=-1)
        for half in (turned[..., : count // 2], turned[..., count // 2 :]):
            picking.append(100 * (base - half.mean(-1)) / base)
    # Each of two halves side by side scores the pick of the other.
    return np.stack(picking), np.stack([picking[place ^ 1] for place in range(2 * count)])


def gain_errors(transferred: Numbers, alone: Numbers) -> Numbers:
    """Return standard errors (K, K) of the gains over seeds, by the jackknife; NaN for one seed."""
    count = alone.shape[-1]
    if count < 2:
        return np.full(transferred.shape[:2], np.nan)
    left = np.stack(
        [
            gains(transferred, alone, [seed for seed in range(count) if seed != out])
            for out in range(count)
        ]
    )
    spread = np.square(left - left.mean(0)).sum(0)
    found: Numbers = np.sqrt((count - 1) / count * spread)
    return found
