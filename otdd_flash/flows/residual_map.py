"""A map by a residual network, trained on where the particles of a flow began and ended.

`ResidualMap` is a `FlowMap` (`flows.maps`). It holds the network with its scales, and saves and
loads itself as one safetensors file. The second part of the module is the regression: weighted
least squares with early stopping. `FlowResult.map` (`flows.result`) makes the map.

Training is deterministic on one device: weights are drawn and batches shuffled by a generator on
the CPU, and the global generator is neither read nor changed. The last layer starts at 0, so an
untrained network is the identity map. The names of tensors in the file, which are those of the
layers of `build_network`, and the keys of its text are its format, so they must stay
(`tests/files/test_files_of_today.py`).
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from otdd_flash.arguments import Count, Index, takes
from otdd_flash.devices import resolve_device
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.files.tensor_file import (
    DamagedFileError,
    LaterFormatError,
    other_version,
    read_tensors,
    write_tensors,
)
from otdd_flash.flows.maps import check_dimension, check_same_particles, class_indices
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import listing

# The number of points in one pass through the network.
ROWS_AT_ONCE = 16384


@dataclass(frozen=True, eq=False)
class ResidualMap:
    """z + reach h((z - centre) / spread, class of z), h a network of fully connected layers.

    It is valid for any flow, also with momentum. One spread serves all features, because the flow's
    cost weights them equally too.

    Attributes:
        network: h, float32; its inputs are d features, then one per class.
        centre: (d,) float64, mean of the particles at the start.
        spread: root mean square of the particles' features around it.
        reach: root mean square of the particles' displacements per feature.
        class_names: of classes with mass among the particles; none for unlabelled ones.
        of_sets: whether these are sets of labels, of which a class of other samples is one of its
            own.
    """

    network: nn.Sequential
    centre: Tensor
    spread: float
    reach: float
    class_names: tuple[str, ...]
    of_sets: bool

    # `takes` checks arguments by their annotations.
    @classmethod
    @takes()
    def fit(
        cls,
        before: LabeledSamples,
        after: LabeledSamples,
        *,
        hidden: Count = 256,
        layers: Count = 2,
        epochs: Index = 200,
        seed: int = 0,
        device: str = "auto",
    ) -> ResidualMap:
        """Train a map on the particles of a flow, weighted by mass.

        Before training it is the identity. A tenth of the particles is held out and decides which
        epoch is kept. The same seed gives the same map on the same device.

        Args:
            before: the n particles before the first step.
            after: the same particles, row by row, after the last.
            hidden: width of the layers.
            layers: number of layers of that width.
            epochs: passes over the particles, at most.
            seed: of initial weights, held-out particles and batches.
            device: where to train, and where the map runs.

        Raises:
            InputError: the two have different shapes, a size is too small, or the device does
                not exist.
        """
        check_same_particles(before, after)
        where = resolve_device(device)
        carriers = torch.nonzero(before.masses > 0).squeeze(1)
        displacement = (after.features.to(before.features) - before.features)[carriers].double()
        before = before.take(carriers)
        if before.labels is not None:
            before = before.keep_classes(torch.unique(before.labels).tolist())
        start, masses = before.features.double(), before.masses
        centre = masses @ start
        spread, reach = (
            float((masses @ rows.square().mean(1)).sqrt()) or 1.0
            for rows in (start - centre, displacement)
        )
        generator = torch.Generator().manual_seed(seed)
        sizes = (before.dim + len(before.class_names), *[hidden] * layers, before.dim)
        network = build_network(sizes)
        draw_weights(network, generator)
        names, of_sets = before.class_names, before.label_sets is not None
        fitted = cls(network.to(where), centre.to(where), spread, reach, names, of_sets)
        examples = TensorDataset(
            fitted._inputs(before),
            (displacement / reach).to(where, torch.float32),
            (masses * len(before)).to(where, torch.float32),
        )
        train(network, examples, epochs, generator)
        return fitted

    @torch.no_grad()
    @computes
    def __call__(self, samples: LabeledSamples) -> LabeledSamples:
        """Return the moved samples; labels are matched by class name.

        Raises:
            InputError: another dimension, a class that had no mass among the particles, or no
                labels although the particles had some.
        """
        check_dimension(samples, len(self.centre))
        inputs = torch.split(self._inputs(samples), ROWS_AT_ONCE)
        displacement = torch.cat([self.network(rows) for rows in inputs]) * self.reach
        return replace(samples, features=samples.features + displacement.to(samples.features))

    @takes()
    def save(self, path: str | Path) -> Path:
        """Write one safetensors file, completely or not at all.

        Returns:
            The path.

        Raises:
            InputError: the file cannot be written.
        """
        tensors = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        tensors["centre"] = self.centre
        layout = {
            "spread": self.spread,
            "reach": self.reach,
            "class_names": self.class_names,
            "of_sets": self.of_sets,
        }
        write_tensors(path, tensors, {"residual_map": json.dumps(layout)})
        return Path(path)

    @classmethod
    @takes()
    def load(cls, path: str | Path, *, device: str = "auto") -> ResidualMap:
        """Read a file of `save`; the map runs on `device`.

        Raises:
            InputError: the file holds no residual map, a damaged one or one of a later version, or
                the device does not exist.
        """
        where = resolve_device(device)
        texts: dict[str, str] = {}
        try:
            tensors, texts, _ = read_tensors(Path(path))
            layout = json.loads(texts["residual_map"])
            centre = tensors.pop("centre")
            state = {name.removeprefix("network."): value for name, value in tensors.items()}
            # The weights in the order of the layers.
            names = sorted(state, key=lambda name: int(name.split(".")[0]))
            matrices = [state[name] for name in names if name.endswith("weight")]
            sizes = (matrices[0].shape[1], *[matrix.shape[0] for matrix in matrices])
            network = build_network(sizes)
            network.load_state_dict(state)
            classes = tuple(layout["class_names"])
            moved = network.to(where), centre.to(where)
            # Earlier versions stored no `of_sets`.
            of_sets = layout.get("of_sets", False)
            return cls(*moved, layout["spread"], layout["reach"], classes, of_sets)
        except DamagedFileError as error:
            raise InputError(f"{path} is damaged ({error}); fit the map again") from error
        except LaterFormatError:
            raise
        except (OSError, ValueError, LookupError, TypeError, RuntimeError) as error:
            by = other_version(texts) if texts else ""
            raise InputError(
                f"no residual map in {path} ({error}{by}); ResidualMap.save writes one"
            ) from error

    def _inputs(self, samples: LabeledSamples) -> Tensor:
        """Return the network's inputs for k samples, (k, d + classes) float32 on its device."""
        centred = (samples.features.to(self.centre) - self.centre) / self.spread
        if not self.class_names:
            return centred.float()
        if samples.labels is None:
            raise InputError(
                f"{samples.name} has no labels, but this map was trained with the classes "
                f"{listing(self.class_names)}; label the samples, or fit a map to particles "
                "without labels"
            )
        labels = class_indices(samples, self.class_names, of_sets=self.of_sets).to(centred.device)
        one_hot = nn.functional.one_hot(labels, len(self.class_names))
        return torch.cat((centred, one_hot), 1).float()


# One in HELD_OUT examples is held out to choose the epoch.
HELD_OUT = 10

BATCH = 64

LEARNING_RATE = 2e-3

# Decoupled (Loshchilov & Hutter 2019). Strong, because particles are few and their ends noisy.
WEIGHT_DECAY = 1.0

# Training stops after this many epochs without improvement.
PATIENCE = 30


def build_network(sizes: tuple[int, ...]) -> nn.Sequential:
    """Build linear layers sizes[0] -> sizes[1] -> ... with SiLU between and no initial weights."""
    parts: list[nn.Module] = []
    for width, next_width in pairwise(sizes):
        # Without `skip_init` a layer would draw its weights from the global generator.
        layer = nn.utils.skip_init(nn.Linear, width, next_width)  # type: ignore[no-untyped-call]
        parts += [layer, nn.SiLU()]
    return nn.Sequential(*parts[:-1])


def draw_weights(network: nn.Sequential, generator: torch.Generator) -> None:
    """Draw He's uniform weights; biases and the last layer are 0."""
    linear = [layer for layer in network if isinstance(layer, nn.Linear)]
    for layer in linear:
        nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu", generator=generator)
        nn.init.zeros_(layer.bias)
    nn.init.zeros_(linear[-1].weight)


def train(
    network: nn.Sequential, examples: TensorDataset, epochs: int, generator: torch.Generator
) -> None:
    """Fit by weighted least squares with AdamW and a cosine schedule; keep the best epoch.

    The best epoch has the lowest error on the held-out tenth, or on all examples if there are fewer
    than ten; the untrained network is a candidate.

    Args:
        network: changed in place.
        examples: inputs (n, p), answers (n, d) and weights (n,) of mean 1, on the network's device.
        epochs: at most; 0 changes nothing.
        generator: on the CPU; chooses what is held out and shuffles the batches.
    """
    count, device = len(examples), examples.tensors[0].device
    order = torch.randperm(count, generator=generator).to(device)
    held_out, kept = order[: count // HELD_OUT], order[count // HELD_OUT :]
    watched = examples[held_out if len(held_out) else kept]
    optimiser = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(epochs, 1))
    best, best_epoch, state = _error_of(network, *watched), 0, deepcopy(network.state_dict())
    for epoch in range(1, epochs + 1):
        shuffled = kept[torch.randperm(len(kept), generator=generator).to(device)]
        for rows in torch.split(shuffled, BATCH):
            optimiser.zero_grad()
            _loss(network, *examples[rows]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        schedule.step()
        error = _error_of(network, *watched)
        if error < best:
            best, best_epoch, state = error, epoch, deepcopy(network.state_dict())
        elif epoch - best_epoch >= PATIENCE:
            break
    network.load_state_dict(state)


def _loss(network: nn.Sequential, inputs: Tensor, answers: Tensor, weights: Tensor) -> Tensor:
    errors: Tensor = network(inputs) - answers
    return (weights * errors.square().sum(1)).mean()


@torch.no_grad()
def _error_of(network: nn.Sequential, *examples: Tensor) -> float:
    return float(_loss(network, *examples))
