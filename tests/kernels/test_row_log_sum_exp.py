"""The half-step kernel against dense float64, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import reference
import torch

from otdd_flash.operators.build import ComputeOptions
from otdd_flash.operators.kernel import KernelOperator
from otdd_flash.operators.packed import pack, power_of_two_scale
from otdd_flash.operators.streamed import StreamedOperator
from otdd_flash.otdd import dataset_distance
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.clouds import sinkhorn
from otdd_flash.solver.options import SolverOptions

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# (n, m, d, classes of each side)
# Few classes fit into class-pure blocks; 7 and 70 are gathered.
SMALL = [(1, 1, 1, 1, 1), (33, 70, 3, 1, 70), (400, 257, 40, 3, 1), (7, 300, 70, 7, 2)]
LARGE = [
    (4000, 3500, 128, 10, 10),
    (5000, 3001, 512, 10, 10),
    (2000, 2500, 784, 100, 3),
    (1000, 900, 4096, 2, 2),
    (3000, 2000, 100, 3000, 500),
]
LARGE_CASES = [pytest.param(case, marks=pytest.mark.gpu) for case in LARGE]
EPSILON = 0.3


def clouds(n, m, d, classes_x, classes_y):
    """Random labelled clouds, some masses zero."""
    draw = torch.Generator().manual_seed(n + m + d)
    x, y = torch.randn(n, d, generator=draw), torch.randn(m, d, generator=draw)
    x, y = x / d**0.5 + 1, y / d**0.5
    a, b = torch.rand(n, generator=draw).double(), torch.rand(m, generator=draw).double()
    if min(n, m) > 1:
        a[n // 2] = b[0] = 0
    labels_x = torch.randint(0, classes_x, (n,), generator=draw)
    labels_y = torch.randint(0, classes_y, (m,), generator=draw)
    costs = torch.rand(classes_x, classes_y, generator=draw).double() * 3
    return x, y, a / a.sum(), b / b.sum(), labels_x, labels_y, costs


def operator_of(case, precision):
    x, y, a, b, labels_x, labels_y, costs = (part.to(DEVICE) for part in clouds(*case))
    streamed = StreamedOperator(
        x,
        y,
        a,
        b,
        labels_x=labels_x,
        labels_y=labels_y,
        class_costs=costs,
        lambda_x=0.7,
        dtype=torch.float32,
    )
    return KernelOperator(streamed, precision), streamed


def dense_cost(operator, streamed):
    """The cost of the points that the kernel sees, (n, m) float64."""
    x, y = operator.seen_points()
    # By products, because differences of 5,000 x 5,000 x 512 would fill any memory.
    squares = x.square().sum(1)[:, None] + y.square().sum(1)[None, :] - 2 * x @ y.T
    return 0.7 * squares + streamed.class_costs[streamed.labels[0]][:, streamed.labels[1]]


@pytest.mark.parametrize("case", [*SMALL, *LARGE_CASES], ids=str)
@pytest.mark.parametrize("precision", ["fast", "high"])
@pytest.mark.parametrize("epsilon", [0.01, EPSILON, 30.0])
def test_half_steps_are_exact_for_the_rounded_points(case, precision, epsilon):
    operator, streamed = operator_of(case, precision)
    cost = dense_cost(operator, streamed)
    draw = torch.Generator().manual_seed(0)
    f, g = (torch.randn(size, generator=draw).to(DEVICE) for size in operator.shape)
    atol = operator.cost_error + 1e-6 * (float(cost.max()) + epsilon)
    expected = reference.softmin_rows(cost, operator.b, g, epsilon)
    got = operator.softmin_rows(g, epsilon)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=atol)
    expected = reference.softmin_rows(cost.T, operator.a, f, epsilon)
    got = operator.softmin_columns(f, epsilon)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_refined_half_steps_are_those_of_the_original_points(case):
    operator, streamed = operator_of(case, "fast")
    g = torch.randn(case[1], generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expected = streamed.softmin_rows(g, EPSILON)
    refined = operator.refined.softmin_rows(g, EPSILON)
    atol = operator.cost_error + streamed.cost_error
    torch.testing.assert_close(refined, expected, rtol=0, atol=atol)
    # The rounded points are another cloud, or this test could not tell the two apart.
    fast = operator.softmin_rows(g, EPSILON)
    assert case == SMALL[0] or float((fast - expected).abs().max()) > atol
    assert operator.refined.refined.backend == operator.refined.backend != operator.backend


def test_rounding_keeps_eleven_bits_and_the_second_part_the_next_eleven():
    operator, streamed = operator_of((60, 50, 4, 2, 2), "fast")
    x, largest = streamed.points[0].double(), float(streamed.points[0].abs().max())
    assert float((operator.seen_points()[0] - x).abs().max()) <= 2**-11 * largest
    assert float((operator.refined.seen_points()[0] - x).abs().max()) <= 2**-22 * largest
    assert float((operator.seen_points()[0] - x).abs().max()) > 2**-16 * largest


@pytest.mark.parametrize(("classes", "pure"), [(1, True), (3, True), (40, False)])
def test_packing_keeps_every_point_once_and_blocks_pure_where_that_pays(classes, pure):
    draw = torch.Generator().manual_seed(classes)
    points = torch.randn(100, 5, generator=draw)
    labels = torch.randint(0, classes, (100,), generator=draw)
    exponent = power_of_two_scale(points)
    packed = pack(points, labels, exponent, block=16, multiple=32)
    size = len(packed.origin)
    assert packed.pure == pure
    assert size % 32 == 0
    assert size <= 1.5 * 112 + 32
    assert int(packed.filled.sum()) == 100
    assert torch.equal(packed.origin[packed.position], torch.arange(100))
    assert torch.equal(packed.labels[packed.position].long(), labels)
    if pure:
        same = packed.labels.view(-1, 16) == packed.block_class[:, None]
        assert bool((same | ~packed.filled.view(-1, 16)).all())
    assert packed.coordinates.shape == (2 * size, 8)
    assert 2**14 <= float(packed.coordinates.abs().max()) <= 2**15
    assert not bool(packed.coordinates[:size][~packed.filled].any())


def test_the_scale_of_nothing_is_one():
    assert power_of_two_scale(torch.zeros(3, 2)) == 0


@pytest.mark.parametrize("epsilon", [2.0, 0.02])
def test_a_solve_in_triton_ends_on_the_original_points(epsilon):
    """Fast iterations, refined ones, certificate: the float64 optimum is inside the bounds.

    At the small epsilon the rounded points alone would leave a marginal error of about 1e-2.
    """
    x, y, a, b, labels_x, labels_y, costs = clouds(20, 30, 3, 2, 2)
    source, target = (
        LabeledSamples(points, labels, ("0", "1"), masses)
        for points, labels, masses in ((x, labels_x, a), (y, labels_y, b))
    )
    full = torch.zeros(4, 4).double()
    full[:2, 2:], full[2:, :2] = costs, costs.T
    compute = ComputeOptions(device=DEVICE.type, backend="triton")
    term = sinkhorn(source, target, epsilon=epsilon, class_table=full, compute=compute)
    cost = reference.dense_cost(x, y, 0.5, costs / 2, labels_x, labels_y)
    truth, *_ = reference.entropic_transport(cost, a, b, epsilon)
    assert term.converged
    assert term.bounds[0] <= truth <= term.bounds[1]
    assert term.bounds[1] - term.bounds[0] < 0.02 * truth
    plan = reference.plan(cost, a, b, term.f.cpu(), term.g.cpu(), epsilon)
    assert float((plan.sum(0) - b).abs().sum()) <= term.marginal_error


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
            solver=SolverOptions(tolerance),
            compute=ComputeOptions(device="cuda", precision=precision),
        )
        for precision, tolerance in (("fast", 1e-3), ("double", 1e-8))
    )
    assert fast.divergence.backend.startswith("triton")
    assert double.divergence.backend.startswith("torch")
    assert fast.converged
    assert fast.bounds[0] <= double.value <= fast.bounds[1]
