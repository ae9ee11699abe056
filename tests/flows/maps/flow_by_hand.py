"""A flow as short as it can be written, and the velocity fields that it went through."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import otdd_flash as otdd
from otdd_flash.flows.maps import EntropicMap, VelocityField
from otdd_flash.labels import measure_classes
from otdd_flash.operators.build import CostInputs
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.gradient import DivergenceGradient
from otdd_flash.solver.problem import Problem

DOUBLE = otdd.ComputeOptions(device="cpu", precision="double")


@dataclass(frozen=True)
class HandFlow:
    """Where the particles began and ended, and what moved them."""

    before: LabeledSamples
    after: LabeledSamples
    fields: list[VelocityField]
    step_sizes: list[float]

    @property
    def entropic(self):
        return EntropicMap(self.fields, self.step_sizes)


@dataclass(frozen=True)
class HeldOut:
    """A flow, and where points that it did not have go in a flow that had them too."""

    flow: HandFlow
    samples: LabeledSamples
    truth: LabeledSamples


def class_table(source, target):
    """W of gaussian classes; 0 without labels."""
    if source.labels is None:
        return torch.zeros(2, 2, dtype=torch.float64)
    metric = otdd.labels.metric_of("gaussian")
    return measure_classes(source, target, metric).full


def resolved_epsilon(source, target, relative, cost):
    """Epsilon as a multiple of the mean cost."""
    block = class_table(source, target)[: source.class_total, source.class_total :]
    return relative * CostInputs(source, target, block, cost, DOUBLE).labelled.mean_cost


def euler_flow(
    source, target, *, epsilon, steps, step_size=0.2, cost=None, compute=DOUBLE, tolerance=1e-6
):
    """x <- x - tau (1 / a) dS/dx with the solver's own gradient; W is measured at every step."""
    options = otdd.Converged(tolerance=tolerance)
    particles, fields, solved = source, [], None
    for _ in range(steps):
        table = class_table(particles, target)
        problem = Problem.between(particles, target, epsilon, table, cost, compute)
        gradient = DivergenceGradient(problem, frozenset({"x"}))
        solved = problem.solve(options, start=_potentials(solved), solved=gradient)
        fields.append(VelocityField.of(problem, solved))
        velocity = gradient.total["x"] / particles.masses.unsqueeze(1)
        moved = particles.features - step_size * velocity.to(particles.features)
        particles = replace(particles, features=moved)
    return HandFlow(source, particles, fields, [step_size] * steps)


def _potentials(solved):
    return None if solved is None else {name: term.g for name, term in solved.terms.items()}


def digits(split, count, *, rotate=0.0):
    """Bundled digits as float64 vectors (count, 64) of values in [0, 1]."""
    loaded = otdd.load("digits", split=split, max_samples=count, rotate=rotate)
    samples = otdd.embed(loaded, otdd.extractors.pixels())
    return replace(samples, features=samples.features.double())


def blobs(n, seed, *, shift=0.0):
    """n normal points of four dimensions, in two classes."""
    draw = torch.Generator().manual_seed(seed)
    points = torch.randn(n, 4, generator=draw, dtype=torch.float64) + shift
    return LabeledSamples(points, torch.arange(n) % 2, ("a", "b"))
