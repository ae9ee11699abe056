"""How well a finished flow carries new points: its maps against the flow that had them inside.

    python -m experiments.flow_maps [--output DIR]

The bundled digits on their way to digits turned by 90 degrees: 800 particles, 99 held out, ten
plain steps of size 0.2, gaussian class distances measured at every step. A flow of all 899 says
where the held-out points end. The error of a map is the root mean square of its distance from
there, over that of the displacement: 1 is the identity. The floor is how much the displacement of
the 800 particles themselves changes when the others join, by the same measure.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

import otdd_flash as otdd
from experiments.environment import RESULTS, environment, write_result
from otdd_flash.errors import InputError
from otdd_flash.flows.maps import FlowMap, check_same_particles
from otdd_flash.samples import LabeledSamples

PARTICLES, STEPS, STEP_SIZE = 800, 10, 0.2
KINDS = ("entropic", "residual", "nearest")


def digits(**request: Any) -> LabeledSamples:
    """Pixels of one half of the digits."""
    return otdd.embed(otdd.load("digits", **request), otdd.extractors.pixels())


def flow(source: LabeledSamples, target: LabeledSamples, epsilon: float) -> otdd.FlowResult:
    """The flow at a multiple of the mean cost."""
    return otdd.gradient_flow(
        source,
        target,
        otdd.Flow(STEPS, stepping=otdd.Stepping(STEP_SIZE), keep_moments=True),
        epsilon_relative=epsilon,
    )


def relative_error(flow_map: FlowMap, samples: LabeledSamples, truth: LabeledSamples) -> float:
    """Return (sum_i a_i |map(z_i) - t_i|^2 / sum_i a_i |t_i - z_i|^2)^1/2 for samples z, masses a.

    A perfect map has 0, and the identity has 1.

    Args:
        flow_map: of a flow without the samples.
        samples: k points z at the start.
        truth: the same points, row by row, at the end of a flow that contained them.

    Raises:
        InputError: the two have different shapes, the truth did not move, or the map refuses the
            samples.
    """
    check_same_particles(samples, truth)
    moved = flow_map(samples).features.double()
    masses, start = samples.masses, samples.features.double()
    end = truth.features.to(start)
    distance = masses @ (end - start).square().sum(1)
    if not float(distance) > 0:
        raise InputError("the truth is where the samples began, so no error is relative to it")
    return float((masses @ (moved - end).square().sum(1) / distance).sqrt())


def measure(epsilon: float, seed: int) -> dict[str, Any]:
    """Errors of all maps at one epsilon."""
    everyone, target = digits(split="train"), digits(split="test", rotate=90)
    order = torch.randperm(len(everyone), generator=torch.Generator().manual_seed(seed))
    kept, held_out = order[:PARTICLES], order[PARTICLES:]
    small, whole = flow(everyone.take(kept), target, epsilon), flow(everyone, target, epsilon)
    new, truth = everyone.take(held_out), whole.samples.take(held_out)
    moved, start = whole.samples.features[kept], everyone.features[kept]
    floor = (small.samples.features - moved).norm() / (moved - start).norm()
    return {
        "epsilon_relative": epsilon,
        "seed": seed,
        "particles": len(kept),
        "held_out": len(held_out),
        "errors": {kind: relative_error(small.map(kind), new, truth) for kind in KINDS},
        "floor": float(floor),
        "converged": small.converged and whole.converged,
    }


def main() -> None:
    """Write flow_maps.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = [measure(epsilon, seed) for epsilon in (0.01, 0.05) for seed in (0, 1, 2)]
    write_result("flow_maps", {"environment": environment("torch"), "rows": rows}, arguments.output)
    sys.stdout.writelines(f"{row}\n" for row in rows)


if __name__ == "__main__":
    main()
