"""Units of transfer: trained sources, transfer runs, and runs on the target alone.

Every repetition has seeds of its own for each purpose. The weights that a source begins with depend
on the repetition alone, and so do the head of a target, its rows and their order: the run on the
target alone is one for all sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otdd_flash.data.subset import stratified_rows
from otdd_flash.samples import LabeledSamples
from otdd_flash.study.setup import Setup
from otdd_flash.study.transfer.networks import Network, build_body, build_head
from otdd_flash.study.transfer.settings import Transfer
from otdd_flash.study.transfer.training import count_errors, train
from otdd_flash.study.units.unit import Bench, Content, Unit


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
