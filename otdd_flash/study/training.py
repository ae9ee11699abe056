"""The training loop of transfer runs, its units, and the gains computed from test errors.

`TrainedSource` and `TargetRun` are the units; `gains`, `halved_gains` and `gain_errors` turn test
errors into percentages. `study.measures.network` uses trained sources and the rows of targets,
`study.pool` lists the units (`transfer_units`), and `study.result` computes the gains.

Each repetition has one seed per purpose. The initial weights depend only on the repetition, and so
do a target's head, its rows and their order, so one run on the target alone serves all sources. All
training runs on the CPU with one thread, so that errors are the same to the last bit on one
machine.

The name of a unit's file is a digest of its key (`study.units`), so stored results are used as long
as keys are equal. A change of the training that gives other numbers must change the key too;
between releases the version in `Settings.machine` does so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from otdd_flash.data.subset import stratified_rows
from otdd_flash.samples import LabeledSamples
from otdd_flash.study.networks import Network, Transfer, build_body, build_head
from otdd_flash.study.setup import Setup
from otdd_flash.study.units import Bench, Content, Unit

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
    """Train a network in place on rows (n, d) of classes (n,), with Adam on the cross entropy.

    Args:
        network: the network to train.
        features: float32.
        labels: class indices.
        transfer: rate, decay and size of batches.
        epochs: passes over the rows.
        min_steps: the least number of steps; if `epochs` passes make fewer, further passes are
            added, the last one cut short.
        seed: seed of the order of rows.
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
    """Return the body's features (n, k) of all rows."""
    body.eval()
    return torch.cat([body(part) for part in torch.split(features, ROWS_AT_ONCE)])


@torch.no_grad()
def count_errors(network: Network, features: Tensor, labels: Tensor) -> int:
    """Return the number of rows that are classified wrongly."""
    told = network.head(body_features(network.body, features)).argmax(1)
    return int((told != labels).sum())


def _batches(count: int, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Yield the rows of each step; each pass has its own order."""
    generator = torch.Generator().manual_seed(seed)
    made = 0
    while made < steps:
        for rows in torch.split(torch.randperm(count, generator=generator), size):
            if made == steps:
                return
            yield rows
            made += 1


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


class TrainingUnit(Unit):
    """One training run of a repetition, on one thread so that it is the same to the last bit."""

    one_thread = True

    def __init__(self, setup: Setup, repetition: int) -> None:
        self.setup, self.repetition = setup, repetition

    def _key(self, fingerprints: list[str | None]) -> dict[str, Any]:
        """Return the part of the key that all units of training share."""
        summary = transfer_of(self.setup).to_dict()
        # No repetition depends on how many there are.
        del summary["seeds"]
        return {
            "fingerprints": fingerprints,
            "transfer": summary,
            "seed": self.setup.settings.seed,
            "repetition": self.repetition,
            **self.setup.settings.machine,
        }

    def _body(self, dim: int) -> torch.nn.Module:
        seed = seed_for(self.setup, self.repetition, Purpose.WEIGHTS)
        return build_body(transfer_of(self.setup), dim, seed)


class TrainedSource(TrainingUnit):
    """The network trained on a source."""

    kind = "trained source"

    def __init__(self, setup: Setup, i: int, repetition: int) -> None:
        super().__init__(setup, repetition)
        self.i = i

    @property
    def key(self) -> Mapping[str, Any]:
        """Return what the network depends on.

        The protocol and all settings of targets are left out, so that changing them does not train
        the network again.
        """
        key = self._key([self.setup.tasks[self.i].train.fingerprint])
        for name in ("protocol", "target_samples", "target_epochs", "min_target_steps"):
            del key["transfer"][name]
        return key

    @property
    def title(self) -> str:
        return f"the network of {self.setup.names[self.i]}, repetition {self.repetition}"

    def compute(self, bench: Bench) -> Content:
        samples, transfer = self.setup.tasks[self.i].train, transfer_of(self.setup)
        network = self._network()
        assert samples.labels is not None
        steps = train(
            network,
            samples.features.float(),
            samples.labels,
            transfer,
            epochs=transfer.source_epochs,
            min_steps=0,
            seed=seed_for(self.setup, self.repetition, Purpose.SOURCE_ORDER),
        )
        return Content({"steps": steps}, _weights(network))

    def network(self, bench: Bench) -> Network:
        network, kept = self._network(), bench.found(self).tensors
        for name in ("body", "head"):
            parts = {
                key.partition(".")[2]: tensor
                for key, tensor in kept.items()
                if key.startswith(f"{name}.")
            }
            getattr(network, name).load_state_dict(parts)
        network.body.eval()
        return network

    def _network(self) -> Network:
        samples = self.setup.tasks[self.i].train
        body = self._body(samples.dim)
        seed = seed_for(self.setup, self.repetition, Purpose.SOURCE_HEAD)
        return Network(body, build_head(body, samples.dim, samples.class_total, seed))


class TargetRun(TrainingUnit):
    """A training on a few rows of a target, from a source's network or from the initial weights."""

    kind = "target run"

    def __init__(self, setup: Setup, i: int | None, j: int, repetition: int) -> None:
        super().__init__(setup, repetition)
        self.i, self.j = i, j

    @property
    def key(self) -> Mapping[str, Any]:
        """Return what the run depends on; the source's network enters the digest by `needs`."""
        key = self._key(self.setup.tasks[self.j].fingerprints)
        if self.i is None:
            # The baseline trains all layers under every protocol, and trains on no source.
            for name in ("protocol", "source_epochs"):
                del key["transfer"][name]
        return key

    @property
    def title(self) -> str:
        names = self.setup.names
        way = "alone" if self.i is None else f"from {names[self.i]}"
        return f"the run on {names[self.j]} {way}, repetition {self.repetition}"

    @property
    def needs(self) -> tuple[Unit, ...]:
        return () if self.i is None else (TrainedSource(self.setup, self.i, self.repetition),)

    def compute(self, bench: Bench) -> Content:
        task, transfer = self.setup.tasks[self.j], transfer_of(self.setup)
        rows = target_rows(self.setup, self.j, self.repetition)
        body = self._body(rows.dim)
        if self.i is not None:
            body = TrainedSource(self.setup, self.i, self.repetition).network(bench).body
        seed = seed_for(self.setup, self.repetition, Purpose.TARGET_HEAD)
        network = Network(body, build_head(body, rows.dim, rows.class_total, seed))
        assert task.test is not None
        assert task.test.labels is not None
        assert rows.labels is not None
        steps = train(
            network,
            rows.features.float(),
            rows.labels,
            transfer,
            epochs=transfer.target_epochs,
            min_steps=transfer.min_target_steps,
            seed=seed_for(self.setup, self.repetition, Purpose.TARGET_ORDER),
            frozen_body=self.i is not None and transfer.protocol == "head",
        )
        errors = count_errors(network, task.test.features.float(), task.test.labels)
        return Content({"errors": errors, "steps": steps, "test_rows": len(task.test)})


def transfer_units(setup: Setup) -> list[Unit]:
    """Return the runs of all ordered pairs of tasks, and the runs of their targets alone.

    Pairs of tasks that share rows are left out.
    """
    pairs = setup.transferred()
    repetitions = range(transfer_of(setup).seeds)
    targets = dict.fromkeys(j for _, j in pairs)
    units: list[Unit] = [TargetRun(setup, None, j, r) for j in targets for r in repetitions]
    return units + [TargetRun(setup, i, j, r) for i, j in pairs for r in repetitions]


def _weights(network: Network) -> dict[str, Tensor]:
    parts = {"body": network.body, "head": network.head}
    return {
        f"{name}.{key}": tensor
        for name, part in parts.items()
        for key, tensor in part.state_dict().items()
    }


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
    sides: tuple[list[Numbers], list[Numbers]] = ([], [])
    for first in range(count):
        turned = np.roll(transferred, -first, axis=-1)
        halves = (turned[..., : count // 2], turned[..., count // 2 :])
        one, other = (100 * (base - half.mean(-1)) / base for half in halves)
        sides[0].extend((one, other))
        sides[1].extend((other, one))
    return np.stack(sides[0]), np.stack(sides[1])


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
