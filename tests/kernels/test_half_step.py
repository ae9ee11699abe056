"""How points are packed for kernels, and solves that end on the points themselves."""

from __future__ import annotations

import pytest
import reference
import torch
from kernel_cases import (
    DEVICE,
    clouds,
    cost_of,
)

from otdd_flash.kernels.points.packed_points import MOST_PADDING, arrange, pack, power_of_two_scale
from otdd_flash.kernels.tiling import BLOCK_COLUMNS, BLOCK_ROWS
from otdd_flash.operators.base import refined
from otdd_flash.operators.build import ComputeOptions
from otdd_flash.operators.ground import GroundCost
from otdd_flash.operators.kernel import KernelOperator
from otdd_flash.otdd import dataset_distance
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.problem import Problem
from otdd_flash.solver.schedules.converged import Converged


def test_rounding_keeps_eleven_bits_and_the_second_part_the_next_eleven():
    operator = KernelOperator(cost_of((60, 50, 4, 2, 2)), "fast")
    x, _ = operator.cost.centred(torch.float64)
    largest = operator.cost.largest
    assert float((operator.seen_points()[0] - x).abs().max()) <= 2**-11 * largest
    assert float((refined(operator).seen_points()[0] - x).abs().max()) <= 2**-22 * largest
    assert float((operator.seen_points()[0] - x).abs().max()) > 2**-16 * largest


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_points_of_any_type_and_strides_are_packed(dtype):
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(6, 70, generator=draw).to(dtype).T[:, ::2].to(DEVICE)
    centre = torch.full((3,), 0.5, dtype=torch.float64, device=DEVICE)
    layout = arrange(torch.zeros(70, dtype=torch.int64, device=DEVICE), 1)
    packed = pack(points, layout, centre, 2.0**10)
    expected = points.double() - centre
    got = packed.rounded(3)[:, :3]
    torch.testing.assert_close(got, expected, rtol=2**-21, atol=2**-30)
    squares = packed.squares[:, layout.position].double()
    torch.testing.assert_close(squares[1], got.square().sum(1), rtol=1e-6, atol=0)
    high = packed.rounded(1).square().sum(1)
    torch.testing.assert_close(squares[0], high, rtol=1e-6, atol=0)
    assert not bool(packed.squares[:, ~layout.filled].any())


@pytest.mark.parametrize(("classes", "pure"), [(1, True), (3, True), (40, False)])
def test_packing_keeps_every_point_once_and_blocks_pure_where_that_pays(classes, pure):
    draw = torch.Generator().manual_seed(classes)
    points = torch.randn(900, 5, generator=draw).to(DEVICE)
    labels = torch.randint(0, classes, (900,), generator=draw).to(DEVICE)
    layout = arrange(labels, classes)
    packed = pack(points, layout, torch.zeros(5, dtype=torch.float64, device=DEVICE), 2.0**12)
    size = layout.size
    assert layout.pure == pure
    assert size % BLOCK_COLUMNS == 0
    assert size <= MOST_PADDING * 1024 + BLOCK_COLUMNS
    assert int(layout.filled.sum()) == 900
    index = torch.arange(900, device=DEVICE)
    assert torch.equal(layout.origin[layout.position], index)
    assert torch.equal(layout.labels[layout.position].long(), labels)
    blocks = layout.labels.view(-1, BLOCK_ROWS)
    same = (blocks == layout.block_class[:, None]) | ~layout.filled.view(-1, BLOCK_ROWS)
    assert bool(same.all()) == pure
    assert packed.coordinates.shape == (2 * size, 8)
    assert not bool(packed.coordinates[:size][~layout.filled].any())


@pytest.mark.parametrize("largest", [1e-20, 0.99, 1.0, 3.0, 1e20])
def test_the_scale_brings_the_largest_coordinate_below_the_end_of_float16(largest):
    assert 2**14 <= largest * power_of_two_scale(largest) < 2**15


def test_the_scale_of_nothing_is_one():
    assert power_of_two_scale(0.0) == 1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fast", "high"])
@pytest.mark.parametrize("iterations", [1, 5, pytest.param(40, marks=pytest.mark.gpu)])
def test_divergences_in_triton_hold_the_truth_at_every_stop(precision, iterations):
    x, y, a, b, labels_x, labels_y, _ = clouds(20, 30, 3, 2, 2)
    source, target = (
        LabeledSamples(points, labels, ("0", "1"), masses)
        for points, labels, masses in ((x, labels_x, a), (y, labels_y, b))
    )
    table = torch.rand(4, 4, generator=torch.Generator().manual_seed(0)).double() * 3
    table = (table + table.T).fill_diagonal_(0)
    compute = ComputeOptions(device=DEVICE.type, backend="triton", precision=precision)
    options = Converged(1e-3, max_iterations=iterations)
    problem = Problem.between(source, target, 0.1, table, GroundCost(0.5, 1.0), compute)
    found = problem.solve(options)
    costs = (
        reference.dense_cost(x, y, 0.5, table[:2, 2:], labels_x, labels_y),
        reference.dense_cost(x, x, 0.5, table[:2, :2], labels_x, labels_x),
        reference.dense_cost(y, y, 0.5, table[2:, 2:], labels_y, labels_y),
    )
    truth = reference.sinkhorn_divergence(costs, a, b, 0.1)
    assert found.bounds[0] <= truth <= found.bounds[1]
    assert found.bounds[1] - found.bounds[0] < {1: 4.0, 5: 0.3, 40: 3e-3}[iterations] * truth


@pytest.mark.gpu
@pytest.mark.parametrize("relative_epsilon", [1e-1, 1e-2, 1e-3])
def test_divergences_on_a_gpu_hold_the_double_precision_value(relative_epsilon):
    x, y, a, b, labels_x, labels_y, _ = clouds(1500, 2000, 64, 10, 10)
    names = tuple(map(str, range(10)))
    source = LabeledSamples(x, labels_x, names, a)
    target = LabeledSamples(y, labels_y, names, b)
    fast, double = (
        dataset_distance(
            source,
            target,
            epsilon_relative=relative_epsilon,
            labels="means",
            solver=Converged(tolerance),
            compute=ComputeOptions(device="cuda", precision=precision),
        )
        for precision, tolerance in (("fast", 1e-3), ("double", 1e-8))
    )
    assert fast.divergence.backend.startswith("triton")
    assert double.divergence.backend.startswith("torch")
    assert fast.converged
    assert fast.bounds[0] <= double.value <= fast.bounds[1]
