"""A deformed sphere, rotated, shifted and shaken, found again by alternating plans and rotations.

    python -m experiments.match_shapes [--device cpu] [--points 200] [--noises ...] [--epsilons ...]

The shape of FastSinkhorn's example: a sphere whose radius waves. Its copy is rotated by an angle
about a random axis, shifted, and every coordinate gets noise. From the identity, each step solves
for the plan between the shape as rotated so far and the copy, both centred, and takes the rotation
that fits its barycentres best (Procrustes). Epsilon is relative to the mean cost, and lower from
step to step. Of the last plan: the share of points whose largest entry is their own copy's, and the
error of the rotation in degrees. Up to 4,096 points the costs are a matrix, more are clouds.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import otdd_flash as otdd
from experiments.environment import RESULTS
from experiments.rows import Rows
from otdd_flash.report.page import SOURCE_COLOR, TARGET_COLOR, new_figure, save_picture

NOISES, EPSILONS = (0.0, 0.01, 0.03, 0.1), (0.1, 0.01, 0.001)
ANGLE, STEPS, SEEDS = 40.0, 30, 5
START = 0.3
# Entries of a matrix of costs, and rows that are worked on at once.
MOST_ENTRIES, AT_ONCE = 1 << 24, 1024


class Shapes(NamedTuple):
    """A shape (n, 3), its copy (n, 3) in another order, the order, and the rotation (3, 3)."""

    x: Tensor
    y: Tensor
    order: Tensor
    rotation: Tensor


def shapes(points: int, noise: float, seed: int, device: str) -> Shapes:
    """Draw x and y = (x R^T + shift)[order] + noise.

    The radius of x is 1 + 0.3 sin(3 phi) sin(theta)^2 + 0.2 cos(2 theta + phi).
    """
    draw = torch.Generator().manual_seed(seed)
    unit = torch.nn.functional.normalize(torch.randn(points, 3, generator=draw).double(), dim=1)
    theta, phi = unit[:, 2].acos(), torch.atan2(unit[:, 1], unit[:, 0])
    radius = 1 + 0.3 * torch.sin(3 * phi) * theta.sin() ** 2 + 0.2 * torch.cos(2 * theta + phi)
    x = radius[:, None] * unit
    axis = torch.nn.functional.normalize(torch.randn(3, generator=draw).double(), dim=0)
    rotation = torch.linalg.matrix_exp(math.radians(ANGLE) * cross(axis))
    order = torch.randperm(points, generator=draw)
    y = x @ rotation.T + torch.randn(3, generator=draw).double()
    y = y[order] + noise * torch.randn(points, 3, generator=draw).double()
    return Shapes(*(part.to(device) for part in (x, y, order, rotation)))


def cross(axis: Tensor) -> Tensor:
    """The matrix (3, 3) of the product with an axis (3,)."""
    x, y, z = axis.tolist()
    return torch.tensor([[0, -z, y], [z, 0, -x], [-y, x, 0]], dtype=torch.float64)


class Plan(NamedTuple):
    """Of every point of x: the barycentre (n, 3) of its conditional plan, and its largest entry."""

    barycentres: Tensor
    largest: Tensor


def plan_between(x: Tensor, y: Tensor, relative: float) -> Plan:
    """The plan at the cost |x - y|^2, by a matrix if that is small enough, else by clouds."""
    mean = float(x.square().sum(1).mean() + y.square().sum(1).mean())
    epsilon = relative * mean
    if len(x) * len(y) <= MOST_ENTRIES:
        g = otdd.matrix_transport(torch.cdist(x, y).square(), epsilon=epsilon).g
    else:
        cost = otdd.GroundCost(1.0, 0.0)
        g = otdd.sinkhorn(x.float(), y.float(), epsilon=epsilon, cost=cost, compute=x.device).g
    parts = []
    for first in range(0, len(x), AT_ONCE):
        logits = (g - torch.cdist(x[first : first + AT_ONCE], y).square()) / epsilon
        parts.append((torch.softmax(logits, 1) @ y, logits.argmax(1)))
    barycentres, largest = (torch.cat(each) for each in zip(*parts, strict=True))
    return Plan(barycentres, largest)


def fitted(x: Tensor, images: Tensor) -> Tensor:
    """The rotation R (3, 3) for which x R^T is nearest to its images (Kabsch 1976)."""
    u, _, v = torch.linalg.svd(images.T @ x)
    sign = torch.ones(3, dtype=x.dtype, device=x.device)
    sign[2] = torch.linalg.det(u @ v).sign()
    rotation: Tensor = u @ (sign[:, None] * v)
    return rotation


def match(found: Shapes, epsilon: float) -> tuple[Tensor, Plan]:
    """The rotation, and the last plan, from the shape's centre."""
    x, y = (side - side.mean(0) for side in found[:2])
    rotation = torch.eye(3, dtype=x.dtype, device=x.device)
    for step in range(STEPS):
        level = max(epsilon, START * 0.7**step)
        plan = plan_between(x @ rotation.T, y, level)
        after = fitted(x, plan.barycentres)
        done = float((after - rotation).abs().max()) < 1e-4 and level == epsilon
        rotation = after
        if done:
            break
    return rotation, plan


def right_share(found: Shapes, plan: Plan) -> float:
    """The share of points whose largest entry is their own copy's."""
    own = torch.empty_like(found.order)
    own[found.order] = torch.arange(len(own), device=own.device)
    return float((plan.largest == own).double().mean())


def angle_between(one: Tensor, two: Tensor) -> float:
    """Of two rotations, in degrees."""
    cosine = (torch.trace(one.T @ two) - 1) / 2
    return math.degrees(math.acos(float(cosine.clamp(-1, 1))))


def measure(rows: Rows, points: int, noise: float, epsilon: float, device: str) -> None:
    """One row: medians over seeds."""
    shares, angles, seconds = [], [], []
    for seed in range(SEEDS if points <= 1000 else 1):
        found = shapes(points, noise, seed, device)
        started = time.perf_counter()
        rotation, plan = match(found, epsilon)
        seconds.append(time.perf_counter() - started)
        shares.append(right_share(found, plan))
        angles.append(angle_between(rotation, found.rotation))
    values = {"right": shares, "degrees": angles, "seconds": seconds}
    row: dict[str, Any] = {"points": points, "noise": noise, "epsilon_relative": epsilon}
    row |= {key: float(torch.tensor(each).median()) for key, each in values.items()}
    rows.add(row | {"worst_degrees": max(angles)})


def draw(points: int, noise: float, epsilon: float, path: Path) -> None:
    """The shape and its copy, before and after, with lines from points to their copies."""
    found = shapes(points, noise, 0, "cpu")
    rotation, plan = match(found, epsilon)
    x, y = (side - side.mean(0) for side in found[:2])
    nearest = y[plan.largest]
    turned_by = f"turned back by the plan, epsilon {epsilon:g} of the mean cost"
    figure = new_figure(9.0, 4.5)
    for place, (title, turned) in enumerate((("as given", x), (turned_by, x @ rotation.T))):
        # Without axes most of what a subplot leaves free is empty.
        axes: Any = figure.add_axes((0.5 * place, 0.0, 0.5, 0.86), projection="3d")
        axes.set_box_aspect((1, 1, 1), zoom=1.6)
        axes.scatter(*turned.T.numpy(), s=8, color=SOURCE_COLOR, label="shape")
        axes.scatter(*y.T.numpy(), s=8, color=TARGET_COLOR, marker="x", label="copy")
        for start, end in zip(turned.numpy(), nearest.numpy(), strict=True):
            axes.plot(*zip(start, end, strict=True), color="#999999", linewidth=0.5)
        axes.set_axis_off()
        figure.text(0.25 + 0.5 * place, 0.9, title, ha="center", fontsize=10)
    told = f"A shape of {points} points and its copy, rotated by {ANGLE:g}°, noise {noise:g}"
    figure.text(0.5, 0.965, told, ha="center", va="center", fontsize=11)
    figure.legend(*axes.get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False)
    save_picture(figure, path)


def main() -> None:
    """Write match_shapes_DEVICE.json and a picture of 200 points."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--points", type=int, nargs="+", default=(200, 20_000))
    parser.add_argument("--noises", type=float, nargs="+", default=NOISES)
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    warnings.simplefilter("ignore", otdd.NotConvergedWarning)
    keys = ("points", "noise", "epsilon_relative")
    rows = Rows(f"match_shapes_{given.device}", keys, "torch", folder=given.output)
    for points in given.points:
        for noise in given.noises:
            for epsilon in given.epsilons:
                if not rows.has(points=points, noise=noise, epsilon_relative=epsilon):
                    measure(rows, points, noise, epsilon, given.device)
    draw(min(given.points), 0.03, 0.01, given.output / "match_shapes.png")
    sys.stdout.write(f"{given.output / 'match_shapes.png'}\n")


if __name__ == "__main__":
    main()
