"""What a certified divergence holds beside its inputs: packed points, vectors, bounded buffers."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from labelled_costs import labelled_cost
from live_bytes import LiveBytes

import otdd_flash as otdd
from otdd_flash.cost import points as cost_points
from otdd_flash.cost import rounding
from otdd_flash.kernels.passes import plan_marginals, symmetric_step
from otdd_flash.operators import triton_operator
from otdd_flash.operators.triton_operator import KernelOperator

# Of a divergence, and of a pass: a multiple of the block for 2 and for 8 classes, whose padding is
# the same.
COUNT, COUNT_OF_PASS = 512, 1024
CHUNK = 128
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of stated sizes do not hide what grows."""
    monkeypatch.setattr(cost_points, "CHUNK_ELEMENTS_CPU", 1 << 10)
    monkeypatch.setattr(cost_points, "CHUNK_ELEMENTS_GPU", 1 << 10)
    monkeypatch.setattr(rounding, "SAMPLED_POINTS", 16)
    monkeypatch.setattr(plan_marginals, "CHUNK_COLUMNS", CHUNK)
    monkeypatch.setattr(plan_marginals, "MOST_ROWS", CHUNK)
    monkeypatch.setattr(symmetric_step, "STRIPE_BYTES", 1 << 14)
    monkeypatch.setattr(triton_operator, "MANY_SCORES", 1)


@lru_cache
def held(dim: int, classes: int) -> int:
    draw = torch.Generator().manual_seed(0)
    names = tuple(map(str, range(classes)))
    x, y = (
        otdd.LabeledSamples(
            torch.randn(COUNT, dim, generator=draw), torch.arange(COUNT) % classes, names
        ).to(HERE)
        for _ in range(2)
    )
    means = torch.randn(2 * classes, 3, generator=draw).double()
    xx, xy, yy = (
        torch.cdist(one, other).square()
        for one, other in (
            (means[:classes], means[:classes]),
            (means[:classes], means[classes:]),
            (means[classes:], means[classes:]),
        )
    )
    table = otdd.ClassDistances(xx, xy, yy)

    live = LiveBytes()
    with live:
        otdd.dataset_distance(
            x,
            y,
            epsilon_relative=0.3,
            class_distances=table,
            solver=otdd.Converged(tolerance=1.9, max_iterations=2),
            compute=otdd.ComputeOptions(str(HERE), "triton"),
        )
    return live.highest - x.features.nbytes - y.features.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["self", "rows", "near", "plan"])
def test_passes_hold_no_table_of_classes_against_columns(kind: str) -> None:
    """A table would take 24 KiB more for 8 classes than for 2; one of classes alone, 240 bytes."""

    points = torch.randn(COUNT_OF_PASS, 8, generator=torch.Generator().manual_seed(0))

    def taken(classes: int) -> int:
        cost = labelled_cost(points.to(HERE), None, classes)
        if kind != "self":
            cost.symmetric = False
        operator = KernelOperator(cost, "fast")
        f = torch.zeros(COUNT_OF_PASS, device=HERE)
        live = LiveBytes()
        with live:
            match kind:
                case "rows":
                    operator.softmin_rows(f, 100.0)
                case "near":
                    operator.softmin_rows(f, 100.0, f)
                case "self":
                    operator.softmin_self(f, 100.0)
                case "plan":
                    operator.plan(f, f, 100.0).applied(f[:, None])
        return live.highest

    assert taken(8) - taken(2) <= 4096


@pytest.mark.slow
def test_a_coordinate_takes_two_half_numbers_of_either_side() -> None:
    """No float64 copy of the points, nor a float32 one, is ever there beside them.

    Two chunks of up to four digits are.
    """
    per_coordinate = (held(48, 2) - held(16, 2)) / 32
    assert per_coordinate <= 4 * 2 * COUNT + 4 * 2 * CHUNK


@pytest.mark.slow
def test_a_point_takes_some_vectors() -> None:
    """Beside 4 bytes for each of 16 coordinates."""
    assert held(16, 2) <= (4 * 16 + 400) * 2 * COUNT
