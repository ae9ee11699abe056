"""A straight flow between blobs, filled in by hand: reports read results and compute none."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from otdd_flash.flows.result import StepRecord, Trajectory
from otdd_flash.samples import LabeledSamples


@dataclass(frozen=True)
class Flow:
    source: LabeledSamples
    target: LabeledSamples
    samples: LabeledSamples
    history: tuple[StepRecord, ...]
    trajectory: Trajectory

    @property
    def evaluations(self):
        return self.history


def record(step, divergence, **changes):
    usual = StepRecord(
        step=step,
        objective=divergence,
        divergence=divergence,
        lower=divergence - 0.1,
        upper=divergence + 0.2,
        functionals={},
        gradient_norm=2.0 * 0.7**step,
        step_size=0.1,
        iterations=10 + step,
        marginal_error=5e-4,
        tolerance=1e-3,
        converged=True,
        stopped_by="tolerance",
        seconds=0.25,
    )
    return replace(usual, **changes)


def blobs(classes, d, n, seed, name):
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % (classes or 1)
    centres = 3 * torch.randn(classes or 1, d, generator=draw)
    features = centres[labels] + torch.randn(n, d, generator=draw)
    names = tuple(f"class {k}" for k in range(classes or 0))
    return LabeledSamples(features, None if classes is None else labels, names, name=name)


def straight_flow(classes=3, d=4, *, n=33, steps=4, keep=20):
    """Particles go straight to their mirror images, moved by 5; the first `keep` are kept."""
    source = blobs(classes, d, n, 0, "blobs $a$")
    target = blobs(classes, d, n + 4, 1, "shifted blobs")
    end = 5 - source.features
    along = torch.linspace(0, 1, steps + 1)[:, None, None]
    points = source.features[:keep] + along * (end - source.features)[:keep]
    labels = None if source.labels is None else source.labels[:keep].expand(steps + 1, -1)
    return Flow(
        source,
        target,
        replace(source, features=end),
        tuple(record(k, 8.0 * 0.5**k) for k in range(steps + 1)),
        Trajectory(torch.arange(len(points[0])), torch.arange(steps + 1), points, labels),
    )


def image_flow(shape=(1, 5, 4), classes=3, steps=10):
    """Images that brighten from below 0 to above 1; the target is of the same shape."""
    flow = straight_flow(classes, shape[0] * shape[1] * shape[2], n=70, steps=steps, keep=70)
    draw = torch.Generator().manual_seed(2)
    pattern = torch.rand(flow.source.features.shape, generator=draw)
    light = torch.linspace(-0.4, 0.8, steps + 1)[:, None, None]
    points = pattern + light
    return replace(
        flow,
        source=replace(flow.source, features=points[0]),
        samples=replace(flow.source, features=points[-1]),
        trajectory=replace(flow.trajectory, points=points),
    )
