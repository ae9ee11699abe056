"""`otce`: how uncertain a target class is once the source class that is moved to it is known."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from otdd_flash.sampling.comparison import Comparison
from otdd_flash.sampling.draws import subsample
from otdd_flash.sampling.subsampling import deviation_interval, sampling_rate, subsample_sizes
from otdd_flash.study.measures.base import Measure, Pair, Reading
from otdd_flash.study.setup import Setup
from otdd_flash.study.transport.sampling import PairSampling
from otdd_flash.study.transport.terms import Term
from otdd_flash.study.units.unit import Bench, Content, Unit


def conditional_entropy(coupling: Tensor) -> float:
    """H(target class | source class) in nats, of masses (V_x, V_y) that sum to 1.

    It is the transferability term of Tan et al. 2021, OTCE: a transferability metric for
    cross-domain cross-task representations, with the sign of a distance.
    """
    joint = coupling.double()
    given = joint / joint.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return float(-torch.xlogy(joint, given).sum())


class Otce(Measure):
    """The conditional entropy of the target's classes under the plan; it has a direction."""

    name = "otce"
    title = "OTCE entropy"
    nearer = -1
    unit = 1.0

    def units(self, setup: Setup) -> list[Unit]:
        terms: list[Unit] = [Term(setup, i, j) for i, j in setup.pairs()]
        if setup.settings.subsample is not None:
            terms += [CouplingSampling(setup, i, j) for i, j in setup.pairs()]
        return terms

    def read(self, setup: Setup, bench: Bench) -> Iterator[tuple[Pair, Reading]]:
        for i, j in setup.pairs():
            term = bench.known(Term(setup, i, j))
            if term is None:
                continue
            sampled = None
            if setup.settings.subsample is not None:
                sampled = bench.known(CouplingSampling(setup, i, j))
            coupling, converged = term.tensors["coupling"], bool(term.facts["converged"])
            for pair, masses, side in (((i, j), coupling, "to"), ((j, i), coupling.T, "from")):
                ends = {} if sampled is None else sampled.facts[side]
                yield pair, Reading(conditional_entropy(masses), converged=converged, **ends)


class CouplingSampling(PairSampling):
    """Sampling intervals of the conditional entropies of two tasks, in both directions."""

    kind = "sampling of the coupling"

    def compute(self, bench: Bench) -> Content:
        settings, whole = self.setup.settings, bench.found(Term(self.setup, self.i, self.j))
        assert settings.subsample is not None
        arguments = self._arguments(bench)
        generator = np.random.default_rng(arguments.pop("seed"))
        source, target = (self.setup.tasks[k].train for k in (self.i, self.j))
        comparison = Comparison(source, target, arguments)
        sides = comparison.source, comparison.target
        sizes = subsample_sizes(*sides, settings.subsample_size)
        values = []
        for _ in range(settings.subsample):
            parts = [
                subsample(side, size, generator) for side, size in zip(sides, sizes, strict=True)
            ]
            coupling = comparison.between(*parts).class_coupling()
            values.append([conditional_entropy(masses) for masses in (coupling, coupling.T)])
        rate = sampling_rate(sum(sizes) / sum(map(len, sides)))
        facts = {}
        for place, (side, masses) in enumerate(
            (("to", whole.tensors["coupling"]), ("from", whole.tensors["coupling"].T))
        ):
            drawn = np.array(values)[:, place]
            lower, upper = deviation_interval(conditional_entropy(masses), drawn, rate)
            facts[side] = {"sample_lower": float(lower), "sample_upper": float(upper)}
        return Content(facts)
