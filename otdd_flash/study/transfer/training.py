"""The loop of transfer runs: Adam on cross entropy, rows in an order that a seed gives.

Units of transfer: trained sources, transfer runs, and runs on the target alone.

Every repetition has seeds of its own for each purpose. The weights that a source begins with depend
on the repetition alone, and so do the head of a target, its rows and their order: the run on the
target alone is one for all sources.

Gains of transfer: by how many percent fewer errors a source leaves on a target's test rows.
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
from otdd_flash.study.setup import Setup
from otdd_flash.study.transfer.networks import Network, Transfer, build_body, build_head
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


class Purpose(IntEnum):
    """What a seed is for."""

    WEIGHTS = 0
    SOURCE_HEAD = 1
    SOURCE_ORDER = 2
    TARGET_HEAD = 3
    TARGET_ROWS = 4
    TARGET_ORDER = 5


def seed_for(setup: Setup, repetition: int, purpose: Purpose) -> int:
    """A seed that no other purpose or repetition has."""
    entropy = [setup.settings.seed, repetition, int(purpose)]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def target_rows(setup: Setup, j: int, repetition: int) -> LabeledSamples:
    """The rows of a target that a repetition trains on and measures see."""
    samples = setup.tasks[j].train
    assert samples.labels is not None
    generator = np.random.default_rng(seed_for(setup, repetition, Purpose.TARGET_ROWS))
    count = transfer_of(setup).target_rows(samples)
    rows = stratified_rows(samples.labels.numpy(), count, generator)
    return samples.take(torch.from_numpy(rows))


def transfer_of(setup: Setup) -> Transfer:
    """How networks are trained, in a study with transfer."""
    assert setup.settings.transfer is not None
    return setup.settings.transfer


class TrainingUnit(Unit):
    """A training of one repetition; by one thread, so that it is the same to the last bit."""

    one_thread = True

    def __init__(self, setup: Setup, repetition: int) -> None:
        self.setup, self.repetition = setup, repetition

    def _key(self, fingerprints: list[str | None]) -> dict[str, Any]:
        """What every training depends on."""
        summary = transfer_of(self.setup).to_dict()
        # How many repetitions there are decides none of them.
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
    """The network of a source."""

    kind = "trained source"

    def __init__(self, setup: Setup, i: int, repetition: int) -> None:
        super().__init__(setup, repetition)
        self.i = i

    @property
    def key(self) -> Mapping[str, Any]:
        """Return what the network depends on: not the protocol, and nothing of a target."""
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
    """A training on a few rows of a target, from a source's network or from nothing."""

    kind = "target run"

    def __init__(self, setup: Setup, i: int | None, j: int, repetition: int) -> None:
        super().__init__(setup, repetition)
        self.i, self.j = i, j

    @property
    def key(self) -> Mapping[str, Any]:
        """Return what the run depends on but for the source, which is among `needs`."""
        key = self._key(self.setup.tasks[self.j].fingerprints)
        if self.i is None:
            # Alone, all layers are trained whatever the protocol is, and no source is.
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
    """The runs of all ordered pairs without rows in common, and those of their targets alone."""
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

# A baseline with fewer leaves nothing to gain that could be told from chance.
FEWEST_ERRORS = 5


def gains(transferred: Numbers, alone: Numbers, seeds: Sequence[int] | None = None) -> Numbers:
    """100 (e0 - e1) / e0 with e0, e1 the mean errors alone and transferred, (K, K).

    Args:
        transferred: (K, K, S) test errors of transfer runs, rows sources; NaN where there is none.
        alone: (K, S) test errors of runs on the targets alone.
        seeds: which of the S repetitions to take the means over; None takes all.

    Returns:
        NaN where a baseline has fewer than 5 errors in the mean over all its repetitions, and
        where a run is missing.
    """
    if not alone.shape[-1]:
        return np.full(transferred.shape[:2], np.nan)
    chosen = slice(None) if seeds is None else list(seeds)
    # Sums are exact, and so equal ratios of them are equal numbers; ratios of means need not be.
    e0, e1 = alone[:, chosen].sum(-1), transferred[:, :, chosen].sum(-1)
    # Of all repetitions, so that halves of them have the pairs that the whole has.
    enough = alone.mean(-1) >= FEWEST_ERRORS
    base = np.where(enough & (e0 > 0), e0, np.nan)
    found: Numbers = 100 * (base - e1) / base
    return found


def halved_gains(transferred: Numbers, alone: Numbers) -> tuple[Numbers, Numbers]:
    """Gains by one half of the seeds and by the other, (D, K, K) each, in D = 2 S directions.

    A source that is picked by the first and scored by the second is no better for its luck. Halves
    are the rotations of the seeds, S // 2 and the others, in both directions, and baselines those
    of all seeds, so that the mean over directions of either is `gains`. With one seed there are no
    halves, and both are the gains of that seed.

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
    """Standard errors of the gains over seeds (K, K), by the jackknife; NaN of one seed."""
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
