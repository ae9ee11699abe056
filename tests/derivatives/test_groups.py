"""Potentials of points that exchange almost no mass: balanced, and reported where masses do not."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from derivative_cases import WAYS, drawn, solve_by
from scipy.optimize import linprog
from spying import calls_of
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.derivatives import group_flows, groups, plan_links
from otdd_flash.derivatives.plan_links import spread
from otdd_flash.operators.given_costs import HeldCosts
from tests import reference

STRICT = otdd.Converged(require_convergence=True)
OPEN = "not determined"

# x = {0, 10} and y = {1, 10}: by symmetry f1 - f2 = 5 at every epsilon, and once the exchange of
# exp(-45 / epsilon) is below rounding, any f1 - f2 in [-40, 50] is optimal.
X, Y = torch.tensor([[0.0], [10.0]]).double(), torch.tensor([[1.0], [10.0]]).double()
COSTS = torch.cdist(X, Y).square() / 2


def by_masses(loss) -> Tensor:
    masses = torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(loss(masses), masses)
    return found


def compared(epsilon: float, options=None, *, debias: bool = False) -> otdd.DistanceResult:
    source, target = (X, np.array([0, 1])), (Y, np.array([0, 1]))
    return otdd.dataset_distance(
        source, target, epsilon=epsilon, labels="none", debias=debias, solver=options
    )


# What has the potentials' difference in it: functions of epsilon and options.
ASKED = {
    "potentials": lambda e, o: otdd.sinkhorn_potentials(X, Y, epsilon=e, options=o)[0],
    "loss": lambda e, o: by_masses(lambda a: otdd.sinkhorn_loss(X, Y, a, epsilon=e, options=o)),
    "losses": lambda e, o: by_masses(
        lambda a: otdd.sinkhorn_losses(X[None], Y[None], a[None], epsilon=e, options=o).sum()
    ),
    "undebiased": lambda e, o: by_masses(
        lambda a: otdd.sinkhorn_loss(X, Y, a, epsilon=e, options=o, debias=False)
    ),
    "matrix loss": lambda e, o: by_masses(
        lambda a: otdd.matrix_loss(COSTS, a, epsilon=e, options=o)
    ),
    "matrix": lambda e, o: otdd.matrix_transport(COSTS, epsilon=e, options=o).f,
    "result": lambda e, o: compared(e, o).potentials[0],
    "contributions": lambda e, o: compared(e, o).contributions().values / 2,
    "debiased": lambda e, o: compared(e, o, debias=True).contributions().values / 2,
}


@pytest.mark.slow(after=5)
@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED.keys())
def test_two_points_have_the_closed_form_at_every_epsilon(ask) -> None:
    f = ask(10.0, None)
    assert float(f[0] - f[1]) == pytest.approx(5, abs=1e-2)
    with pytest.warns(otdd.NotConvergedWarning, match=OPEN) as told:
        f = ask(0.5, None)
    assert len(told) == 1
    assert "may move by anything in [-45, 45]" in str(told[0].message)
    assert float(f[0] - f[1]) == pytest.approx(5, abs=1e-3)
    with pytest.raises(otdd.ConvergenceError, match=OPEN):
        ask(0.5, STRICT)


# Two points that are nearer to each other than to themselves: 2 f1 - 10 = 2 f2 - 20 at every
# epsilon. Once the mass that they keep, exp(-15 / epsilon), is below rounding, any f1 - f2 in
# [-20, 10] is optimal.
OWN_COSTS = torch.tensor([[10.0, 0.0], [0.0, 20.0]]).double()
NONE = torch.zeros(2, 2).double()


def loss_of_classes(a: Tensor, epsilon: float, options) -> Tensor:
    table, both = torch.block_diag(OWN_COSTS, NONE), torch.zeros(2, 1).double()
    labels = torch.arange(2)
    return otdd.sinkhorn_loss(
        *(both, both, a),
        epsilon=epsilon,
        labels_x=labels,
        labels_y=labels,
        class_table=table,
        lambda_y=1.0,
        options=options,
    )


OWN = {
    "points": loss_of_classes,
    "matrices": lambda a, epsilon, options: otdd.matrix_loss(
        NONE, a, epsilon=epsilon, self_costs=[OWN_COSTS, NONE], options=options
    ),
}


@pytest.mark.parametrize("loss", OWN.values(), ids=OWN.keys())
def test_a_cloud_that_leaves_itself_has_the_closed_form_too(loss) -> None:
    """Its self term's potential is f on one part and -f on the other."""
    found = by_masses(lambda a: loss(a, 10.0, None))
    assert float(found[0] - found[1]) == pytest.approx(5, abs=2e-2)
    with pytest.warns(otdd.NotConvergedWarning, match=OPEN) as told:
        found = by_masses(lambda a: loss(a, 0.3, None))
    assert len(told) == 1
    assert "keep within each at most" in str(told[0].message)
    assert "may move by anything in [-15, 15]" in str(told[0].message)
    assert float(found[0] - found[1]) == pytest.approx(5, abs=1e-3)
    with pytest.raises(otdd.ConvergenceError, match=OPEN):
        by_masses(lambda a: loss(a, 0.3, STRICT))


def classes_alone(own: Tensor, across: Tensor, epsilon: float, options=None) -> otdd.DistanceResult:
    """Points of one place and a class each, so that costs are class distances alone."""
    count = len(own)
    table = otdd.ClassDistances(own, across, own if len(across.T) == count else NONE[:1, :1])
    source, target = (
        (torch.zeros(size, 1).double(), torch.arange(size)) for size in (count, len(across.T))
    )
    return otdd.dataset_distance(
        *(source, target),
        labels=otdd.labels.Given(table),
        lambda_y=1.0,
        epsilon=epsilon,
        solver=options,
        compute=otdd.ComputeOptions("cpu", precision="double"),
    )


def exact_value(costs: Tensor, a: Tensor) -> float:
    """OT(a, a) at epsilon = 0."""
    n = len(a)
    sums = np.zeros((2 * n, n, n))
    for k in range(n):
        sums[k, k] = sums[n + k, :, k] = 1
    found = linprog(
        costs.numpy().ravel(), A_eq=sums.reshape(2 * n, -1), b_eq=torch.cat((a, a)).numpy()
    )
    return float(found.fun)


def test_slopes_through_a_self_term_are_those_of_its_value_to_both_sides() -> None:
    """Two pairs of classes that send all of their mass to each other; the target is one point."""
    own = torch.block_diag(OWN_COSTS, OWN_COSTS + torch.diag(torch.tensor([2.0, 16.0])))
    own[:2, 2:] = own[2:, :2] = 30.0
    result = classes_alone(own, torch.zeros(4, 1).double(), 0.3)
    with pytest.warns(otdd.NotConvergedWarning, match=OPEN) as told:
        found = result.contributions()
    assert len(told) == 1
    a, step = uniform(4), 1e-3
    for c in range(4):
        along = (torch.eye(4)[c] - a) / (1 - a[c])
        ends = [
            -(exact_value(own, a + sign * step * along) - exact_value(own, a)) / (2 * sign * step)
            for sign in (1, -1)
        ]
        # -OT(x, x) / 2 is concave: growth has the lesser slope.
        assert ends[1] - ends[0] > 10
        assert found.slopes[:, c].tolist() == pytest.approx(ends, abs=1e-2)
        assert ends[0] < float(found.values[c]) < ends[1]
    with pytest.raises(otdd.ConvergenceError, match=OPEN):
        classes_alone(own, torch.zeros(4, 1).double(), 0.3, STRICT).contributions()


def test_a_cloud_that_leaves_itself_contributes_nothing_against_itself() -> None:
    """The offsets of all three terms are balanced alike, and reported once."""
    result = classes_alone(OWN_COSTS, OWN_COSTS, 0.3)
    with pytest.warns(otdd.NotConvergedWarning, match=OPEN) as told:
        found = result.contributions()
    assert len(told) == 1
    torch.testing.assert_close(found.values, torch.zeros(2).double(), rtol=0, atol=1e-6)
    # OT(x, y) and OT(x, x) / 2 may each move by 15 to both sides.
    assert found.slopes[:, 0].tolist() == pytest.approx([-30, 30], abs=0.1)


def test_images_of_points_without_mass_between_groups_are_reported() -> None:
    """And those within a group are not: no offset takes them out of it."""
    between, within = torch.tensor([[5.0]]).double(), torch.tensor([[-30.0]]).double()
    masses = torch.tensor([0.5, 0.5, 0.0]).double()

    def mapped(point: Tensor, options=None) -> tuple[Tensor, Tensor]:
        x = torch.cat((X, point))
        found = otdd.transport_map(x, Y, masses, epsilon=0.5, options=options)
        source = otdd.LabeledSamples(x, None, (), weights=masses)
        settings = {"labels": "none", "debias": False, "solver": options}
        result = otdd.dataset_distance(source, Y, epsilon=0.5, **settings)
        return found, result.barycentric_map().double()

    with pytest.warns(otdd.NotConvergedWarning, match=OPEN) as told:
        images = mapped(between)
    assert len(told) == 2
    assert all("images of points without mass" in str(each.message) for each in told)
    # f1 - f2 = 5 gives g2 - g1 = 4.5, and to send the point to y2 costs 12.5 - 8 = 4.5 more.
    for found in images:
        torch.testing.assert_close(found[:2], Y, rtol=0, atol=1e-5)
        assert float(found[2]) == pytest.approx(5.5, abs=0.1)
    with pytest.raises(otdd.ConvergenceError, match=OPEN):
        mapped(between, STRICT)
    for found in mapped(within, STRICT):
        torch.testing.assert_close(found, Y[[0, 1, 0]], rtol=0, atol=1e-5)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("way", WAYS)
def test_what_offsets_do_not_change_is_that_of_each_group(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hessians, and derivatives of plans, maps and balanced potentials by points and costs."""
    cg = solve_by(way, monkeypatch)
    exact, cg = otdd.Converged(tolerance=1e-10), otdd.CGOptions(1e-9, damping=cg.damping)
    settings = {"epsilon": 0.5, "options": exact, "cg": cg}
    shift = torch.tensor([60.0, 0.0]).double()
    parts = [(drawn(6, 2, seed=k) + k * shift, drawn(5, 2, seed=2 + k) + k * shift) for k in (0, 1)]
    whole = tuple(torch.cat(side) for side in zip(*parts, strict=True))

    def by_x(function, x, y, along) -> Tensor:
        x = x.clone().requires_grad_()
        found = function(x, y, **settings)
        found = found if isinstance(found, Tensor) else found[0]
        return torch.autograd.grad(found, x, along)[0]

    v, of_f = drawn(12, 2, seed=5), drawn(12, seed=6)
    of_f -= of_f.reshape(2, 6).mean(1).repeat_interleave(6)
    for debias in (False, True):

        def product(x, y, v, debias=debias) -> Tensor:
            return otdd.sinkhorn_hessian(x, y, debias=debias, **settings).product(v).values

        expected = [product(*part, v[6 * k : 6 * k + 6]) / 2 for k, part in enumerate(parts)]
        torch.testing.assert_close(product(*whole, v), torch.cat(expected), rtol=0, atol=1e-8)
    for function, along in ((otdd.transport_map, v), (otdd.sinkhorn_potentials, of_f)):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "potentials are not determined")
            found = by_x(function, *whole, along)
        expected = [by_x(function, *part, along[6 * k : 6 * k + 6]) for k, part in enumerate(parts)]
        torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=1e-8)

    def by_costs(x, y, along) -> Tensor:
        costs = (torch.cdist(x, y).square() / 2).requires_grad_()
        return torch.autograd.grad(otdd.matrix_plan(costs, **settings), costs, along)[0]

    along = drawn(12, 10, seed=7)
    blocks = along[:6, :5], along[6:, 5:]
    expected = [by_costs(*part, block) / 2 for part, block in zip(parts, blocks, strict=True)]
    found = by_costs(*whole, along)
    torch.testing.assert_close(found, torch.block_diag(*expected), rtol=0, atol=1e-8)


def test_what_does_not_depend_on_potentials_says_nothing() -> None:
    """Values, plans, maps and gradients by points."""
    x = X.clone().requires_grad_()
    otdd.sinkhorn_loss(x, Y, epsilon=0.1).backward()
    found = otdd.matrix_transport(COSTS, epsilon=0.1, options=STRICT)
    assert repr(found)
    torch.testing.assert_close(found.plan(), torch.eye(2).double() / 2)
    result = compared(0.1, STRICT)
    torch.testing.assert_close(result.apply_plan(torch.eye(2)), torch.eye(2) / 2, rtol=0, atol=1e-4)
    otdd.transport_map(x, Y, epsilon=0.1).sum().backward()


def test_the_plan_s_gradients_by_masses_are_reported() -> None:
    for function in (
        lambda a: otdd.transport_map(X, Y, a, epsilon=0.1),
        lambda a: otdd.matrix_plan(COSTS, a, epsilon=0.1),
    ):
        with pytest.warns(otdd.NotConvergedWarning, match=OPEN):
            function(torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True))


def clusters(
    sizes: tuple[tuple[int, int], ...], apart: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Costs of clusters on a line, with so many rows and columns, and both sides' clusters."""
    draw = torch.Generator().manual_seed(seed)
    rows, columns = (
        torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor([size[k] for size in sizes]))
        for k in (0, 1)
    )
    x, y = (torch.randn(len(side), 2, generator=draw).double() for side in (rows, columns))
    x[:, 0] += apart * rows
    y[:, 0] += 1.3 * apart * columns
    return torch.cdist(x, y).square() / 2, rows, columns


def uniform(count: int) -> Tensor:
    return torch.full((count,), 1 / count, dtype=torch.float64)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("sizes", "apart", "epsilon"),
    [
        # Equal masses with little exchange, a shift of which is all that the exchange fixes.
        (((6, 12), (5, 10)), 4.5, 0.5),
        (((7, 7), (6, 6), (9, 9)), 4.5, 0.7),
        # Unequal masses, which must flow, however small epsilon is.
        (((8, 6), (6, 8)), 9.0, 0.3),
    ],
)
def test_balanced_potentials_are_those_of_the_dense_optimum(sizes, apart, epsilon) -> None:
    costs, rows, _ = clusters(sizes, apart, 3)
    a, b = uniform(costs.shape[0]), uniform(costs.shape[1])
    _, f, _ = reference.entropic_transport(costs, a, b, epsilon, tolerance=1e-13)
    found = otdd.matrix_transport(costs, epsilon=epsilon).f

    def means(potential: Tensor) -> Tensor:
        return torch.stack([potential[rows == k].mean() for k in range(len(sizes))])

    expected = means(f)
    torch.testing.assert_close(
        means(found).diff(), expected.diff(), rtol=0, atol=0.05 * epsilon, msg=str(sizes)
    )


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.1, 0.01])
def test_real_images_raise_no_alarm(share) -> None:
    """Digits: rows that hardly exchange mass with others get the potentials of a tight solve."""
    datasets = pytest.importorskip("sklearn.datasets")
    pixels = torch.from_numpy(datasets.load_digits().data / 16)
    costs = torch.cdist(pixels[:150], pixels[900:1050]).square() / 2
    epsilon = share * float(costs.mean())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f = otdd.matrix_transport(costs, epsilon=epsilon).f
        tight = otdd.matrix_transport(costs, epsilon=epsilon, options=otdd.Converged(1e-9)).term.f
    error = (f - f.mean()) - (tight - tight.mean())
    assert float(error.abs().max()) < 0.25 * epsilon


def optimal_face(costs: Tensor, direction: Tensor) -> tuple[float, float]:
    """Least and most <direction, f> over the dual optima at epsilon = 0, uniform masses."""
    n, m = costs.shape
    pairs = np.array(list(itertools.product(range(n), range(m))))
    sums = np.zeros((n * m, n + m))
    sums[np.arange(n * m), pairs[:, 0]] = 1
    sums[np.arange(n * m), n + pairs[:, 1]] = 1
    value = np.concatenate((np.full(n, 1 / n), np.full(m, 1 / m)))
    bounds = [(None, None)] * (n + m)
    best = linprog(-value, sums, costs.numpy().ravel(), bounds=bounds)
    face = np.vstack((sums, -value)), np.append(costs.numpy().ravel(), best.fun + 1e-9)
    aim = np.concatenate((direction.numpy(), np.zeros(m)))
    low, high = (linprog(sign * aim, *face, bounds=bounds).fun for sign in (1, -1))
    return low, -high


@pytest.mark.slow
def test_slopes_are_the_ends_of_the_optimal_face() -> None:
    """Four clusters of equal masses; classes are whole clusters, two of them, and halves."""
    costs, rows, columns = clusters(((4, 4), (4, 4), (3, 3), (5, 5)), 12.0, 5)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(16, 2, generator=draw).double() + 12 * rows[:, None]
    y = torch.randn(16, 2, generator=draw).double() + 14 * columns[:, None]
    costs = torch.cdist(x, y).square() / 2
    labels = torch.tensor([0] * 4 + [1, 1, 2, 2] + [0] * 3 + [3] * 5)
    result = otdd.dataset_distance(
        (x, labels),
        (y, torch.zeros(16).long()),
        epsilon=1e-3 * float(costs.mean()),
        labels="none",
        debias=False,
        compute=otdd.ComputeOptions("cpu", precision="double"),
    )
    with pytest.warns(otdd.NotConvergedWarning, match=r"of class '\d'") as told:
        found = result.contributions()
    assert len(told) == 1
    assert found.slopes.shape == (2, 4)
    values = found.values
    for c in range(4):
        mine = labels == c
        share = float(mine.double().mean())
        direction = (mine / mine.sum() - 1 / 16) / (1 - share)
        expected = optimal_face(costs, direction)
        size = expected[1] - expected[0]
        assert size > 1
        assert found.slopes[:, c].tolist() == pytest.approx(expected, abs=0.01 * size)
        inside = float(values[mine].mean()) * (15 / 16) / (1 - share)
        assert found.slopes[0, c] <= inside <= found.slopes[1, c]


def test_forbidden_pairs_leave_blocks_open_at_every_epsilon() -> None:
    draw = torch.Generator().manual_seed(3)
    costs = torch.full((9, 9), math.inf, dtype=torch.float64)
    for part in (slice(0, 4), slice(4, 9)):
        costs[part, part] = torch.rand(
            part.stop - part.start, part.stop - part.start, generator=draw
        )
    found = otdd.matrix_transport(costs, epsilon=1.0)
    with pytest.warns(otdd.NotConvergedWarning, match=r"\[-inf, inf\].*allow more pairs"):
        _ = found.f
    # Said once for both sides.
    _ = found.g
    # Pairs of one way alone cannot be used either: what goes there does not come back.
    costs[0, 8] = 0.5
    with pytest.warns(otdd.NotConvergedWarning, match="allow more pairs"):
        _ = otdd.matrix_transport(costs, epsilon=1.0).f


@pytest.mark.slow
def test_classes_that_labels_hold_apart() -> None:
    """Equal class counts and a class table that outweighs epsilon, as in many datasets."""
    draw = torch.Generator().manual_seed(4)
    x, y = (torch.randn(24, 3, generator=draw) for _ in range(2))
    labels = torch.arange(24) % 3
    table = 200.0 * (1 - torch.eye(3)).repeat(2, 2)
    masses = uniform(24).requires_grad_()
    sides = {"labels_x": labels, "labels_y": labels, "class_table": table}
    with pytest.warns(otdd.NotConvergedWarning, match="8 rows of class '1'"):
        otdd.sinkhorn_loss(x, y, masses, epsilon=1.0, class_totals=(3, 3), **sides)
    otdd.sinkhorn_loss(x, y, masses, epsilon=20.0, class_totals=(3, 3), **sides)
    # More rows of two classes, and mass must pass from them to the third.
    sides["labels_x"] = labels.clone()
    sides["labels_x"][[0, 3]] = torch.tensor([1, 2])
    otdd.sinkhorn_loss(x, y, masses, epsilon=1.0, class_totals=(3, 3), **sides)


def test_points_without_mass_follow_their_group() -> None:
    """Their potentials are softmins of the balanced ones."""
    x, y = torch.cat((X, torch.tensor([[9.0], [1.0]]))), torch.cat((Y, torch.tensor([[2.0]])))
    a, b = torch.tensor([0.5, 0.5, 0, 0]).double(), torch.tensor([0.5, 0.5, 0]).double()
    costs, epsilon = torch.cdist(x, y).square() / 2, 5.0
    for f, g in (
        otdd.sinkhorn_potentials(x, y, a, b, epsilon=epsilon),
        (lambda found: (found.f, found.g))(otdd.matrix_transport(costs, a, b, epsilon=epsilon)),
    ):
        assert float(f[0] - f[1]) == pytest.approx(5, abs=5e-3)
        expected = reference.softmin_rows(costs, b, g, epsilon)
        torch.testing.assert_close(f[2:], expected[2:], rtol=0, atol=1e-6)
        expected = reference.softmin_rows(costs.T, a, f, epsilon)
        torch.testing.assert_close(g[2:], expected[2:], rtol=0, atol=1e-6)


def test_a_cloud_and_itself_are_determined() -> None:
    """Every group is its own mirror image, and gradients are 0."""
    masses = torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True)
    otdd.sinkhorn_loss(X, X.clone(), masses, masses.detach(), epsilon=0.1).backward()
    torch.testing.assert_close(masses.grad, torch.zeros(2).double())


@pytest.mark.slow
@pytest.mark.parametrize("count", [100, 1100])
def test_a_permutation(count) -> None:
    """Groups that are all alike: f is what rows add to the costs; of too many it is only open."""
    draw = torch.Generator().manual_seed(6)
    u, v = torch.rand(2, count, generator=draw, dtype=torch.float64) * 5
    costs = u[:, None] + v + 60
    costs[torch.arange(count), torch.randperm(count, generator=draw)] -= 60
    found = otdd.matrix_transport(costs, epsilon=1.0)
    with pytest.warns(otdd.NotConvergedWarning, match="further groups"):
        f = found.f
    if count == 100:
        torch.testing.assert_close(f - f.mean(), u - u.mean(), rtol=0, atol=0.01)


@pytest.mark.parametrize(("flow", "moves"), [(2e-9, True), (5e-10, False)])
def test_a_direction_that_larger_flows_may_hide_is_left_to_the_cuts(
    flow: float, moves: bool
) -> None:
    """Two pairs of groups exchange 1 within and little between: their eigenvalue is that flow."""
    shares = np.zeros((4, 4))
    shares[0, 1] = shares[2, 3] = 0.5
    shares[1, 2] = flow / 2
    with np.errstate(divide="ignore"):
        logs = np.log(shares + shares.T)
    step = group_flows._newton(logs, 1e-10 * np.array([1.0, 0.0, 0.0, -1.0]))
    assert step[0] - step[3] == pytest.approx(1e-10 / flow if moves else 0.0, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("flow", [1e-3, 1e-8, 1e-11, 1e-14, 0.0])
def test_newton_steps_leave_out_what_float64_does_not_see(flow: float) -> None:
    """Two groups of two points with so little exchange: their offset, and constants, stay."""
    plan = torch.block_diag(torch.full((2, 2), 0.125), torch.full((2, 2), 0.125)).double()
    plan[:2, 2:] = plan[2:, :2] = flow / 8
    sums = plan.sum(1)
    per_row = sums.rsqrt()
    scaled = per_row[:, None] * plan
    system = torch.eye(4, dtype=torch.float64) - (scaled / plan.sum(0)) @ scaled.T
    within = torch.tensor([1.0, -1.0, 0.0, 0.0]).double()
    across = torch.tensor([1.0, 1.0, -1.0, -1.0]).double()
    found = per_row * plan_links._without_constants(
        system, sums, per_row * (within + flow * across)
    )
    # A step t across changes each row sum by t flow: half of what goes over comes back with g.
    expected = 4 * within + (across if flow > 1e-12 else 0)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-15 / max(flow, 1e-12) + 5 * flow)


def test_self_terms_of_clouds_are_not_searched_for_groups(monkeypatch) -> None:
    """Unless a class is farther from itself than from another."""
    searched = calls_of(monkeypatch, groups, "connected")
    a = torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True)
    sides = {"labels_x": torch.arange(2), "labels_y": torch.arange(2)}
    for own, expected in ((0.0, 1), (1.0, 1), (1.01, 3)):
        table = torch.full((4, 4), 2.0).double()
        table[range(4), range(4)] = 2 * own
        searched.clear()
        otdd.sinkhorn_loss(X, X + 0.1, a, a, epsilon=50.0, class_table=table, **sides)
        assert len(searched) == expected, own


def test_a_light_point_ties_no_two_heavy_ones() -> None:
    """The quick test of one group must not see a bridge where all but 0.3% of a mass stays."""
    light = 1e-3
    masses = torch.tensor([(1 - light) / 2, light, (1 - light) / 2], dtype=torch.float64)
    shares = torch.tensor([[1, light, 0], [1, 1, 1], [0, light, 1]])
    ends, others = torch.arange(3).repeat_interleave(3), torch.arange(3).repeat(3)
    assert not spread(masses, ends, others, (masses[:, None] * shares).flatten()).all()
    assert spread(masses, ends, others, (masses[:, None] * (shares + 0.1)).flatten()).all()


def test_nothing_spreads_without_links() -> None:
    """Nor from a node without mass, which is the first of those with as many links."""
    none = torch.zeros(0, dtype=torch.int64)
    masses = torch.tensor([0.0, 0.5, 0.5, 0.0], dtype=torch.float64)
    inside = spread(masses, none, none, torch.zeros(0, dtype=torch.float64))
    assert inside.tolist() == [False, True, False, False]


def test_groups_after_a_column_without_mass_are_reported() -> None:
    """Pairs of points far from all others, which no link leaves."""
    x = (100 * torch.arange(8)).double().repeat_interleave(2)[:, None]
    y = (100 * torch.arange(8)).double()[:, None]
    a = torch.full((len(x),), 1 / 16, dtype=torch.float64)
    b = torch.full((len(y),), 1 / 8, dtype=torch.float64)
    x, a = torch.cat((x[:1] - 1000, x)), torch.cat((torch.zeros(1).double(), a))
    y, b = torch.cat((y[:1] - 1000, y)), torch.cat((torch.zeros(1).double(), b))
    with pytest.warns(otdd.NotConvergedWarning, match=OPEN):
        otdd.sinkhorn_potentials(x, y, a, b, epsilon=0.5)


@pytest.mark.parametrize("apart", [0.0, 9.0])
def test_weaker_links_join_the_groups_of_stronger_ones(
    monkeypatch: pytest.MonkeyPatch, apart: float
) -> None:
    """Each lies in a group that the weaker links alone connect: nothing else is joined."""
    n, epsilon = 300, 2e-3
    x, y = (torch.rand(n, 2, generator=torch.Generator().manual_seed(k)).double() for k in (0, 1))
    x[n // 2 :] += apart
    y[n // 2 :] += apart
    costs, masses = torch.cdist(x, y).square(), torch.full((n,), 1 / n, dtype=torch.float64)
    _, f, g = reference.entropic_transport(costs, masses, masses, epsilon)
    entries = plan_links.MatrixEntries(HeldCosts(costs), torch.float64)
    plan = plan_links.ScaledPlan(entries, f / epsilon, g / epsilon, masses, masses, epsilon)
    monkeypatch.setattr(plan_links, "MOST_CONTRACTED", 8)
    begun, found = calls_of(monkeypatch, plan_links, "_linked"), {}
    for links in ((0.5,), (0.5, 1e-5), (1e-5,)):
        monkeypatch.setattr(plan_links, "LINKS", links)
        found[links] = plan_links.connected(plan)
    staged, at_once = found[0.5, 1e-5], found[1e-5,]
    sizes = [len(groups.unique()) for _, _, groups in begun]
    assert sizes[0] == sizes[1] == sizes[3] == n
    assert sizes[2] < n
    assert int(found[0.5,].columns.max()) == 7, "groups are joined where they stay too many"
    count = 1 + int(staged.columns.max())
    assert count < 8
    pairs = torch.stack((staged.columns, at_once.columns))
    assert pairs.unique(dim=1).shape[1] == count
    assert torch.stack((staged.rows, at_once.rows)).unique(dim=1).shape[1] == count


def test_links_within_a_group_that_a_sample_shows_are_not_gathered_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Light columns, to which no row links, keep a plan on a line from being whole at once."""
    n, epsilon = 400, 0.1
    line = torch.linspace(0, 1, n, dtype=torch.float64)
    costs = (line[:, None] - line).square()
    a, b = (torch.softmax(-((line - centre) / 0.07).square(), 0) for centre in (0.3, 0.6))
    _, f, g = reference.entropic_transport(costs, a, b, epsilon)
    entries = plan_links.MatrixEntries(HeldCosts(costs), torch.float64)
    plan = plan_links.ScaledPlan(entries, f / epsilon, g / epsilon, a, b, epsilon)
    monkeypatch.setattr(plan_links, "ELEMENTS_CPU", 100 * n)
    calls = calls_of(monkeypatch, plan_links, "spread")
    found = plan_links.connected(plan)
    assert found is None or int(found.columns.max()) == 0
    # The sample has a sixth of the rows.
    assert len(calls[-1][1]) < len(calls[0][1])


@pytest.mark.parametrize("largest", [0, 3])
def test_links_with_the_largest_group_are_summed_to_one_a_row_and_column(largest: int) -> None:
    """The mass between any two groups is that of all links, one by one."""
    draw = torch.Generator().manual_seed(largest)
    logs = 3 * torch.randn(40, 30, generator=draw, dtype=torch.float64)
    masses = torch.rand(40, generator=draw, dtype=torch.float64)
    masses[:5] = 0
    groups = torch.randint(0, 5, (30,), generator=draw)
    groups[25:] = 30
    logs[:, 25:] = -torch.inf
    most, best = logs.max(1)
    shares = torch.where(logs >= (most - 1.5)[:, None], (logs - most[:, None]).exp(), 0)
    expected = torch.zeros(31, 31, dtype=torch.float64)
    expected.index_put_(
        (groups[best][:, None].expand(40, 30), groups.expand(40, 30)),
        masses[:, None] * shares,
        accumulate=True,
    )
    expected.fill_diagonal_(0)
    ends, others, weights = plan_links._links_of(
        logs, most, best, masses, 1.5, groups, torch.tensor(largest)
    )
    found = torch.zeros_like(expected)
    found.index_put_((groups[ends], groups[others]), weights, accumulate=True)
    torch.testing.assert_close(found, expected)
    within = groups == largest
    into = within[ends] & ~within[others]
    assert len(others[into].unique()) == int(into.sum()) > 0


def test_few_rows_are_sampled_on_a_processor_alone() -> None:
    parts = {
        kind: plan_links._even_parts(1000, 1000, torch.device(kind)) for kind in ("cpu", "cuda")
    }
    assert [of_sample for _, of_sample in parts["cpu"]] == [True, False]
    assert parts["cuda"] == [(slice(0, 1000, 1), False)]
    assert plan_links._even_parts(5000, 5000, torch.device("cuda"))[0][1]


def test_a_row_of_a_sample_does_not_join_a_group_of_which_no_row_is_in_it() -> None:
    """Of 600 rows every tenth is in the sample, which has none of the 50 rows of one group."""
    epsilon, joint = 0.1, torch.full((600, 300), 1e-20, dtype=torch.float64)
    few = torch.zeros(600, dtype=torch.bool)
    few[5:500:10] = True
    joint[~few, :270] = 1
    joint[few, 270:] = 1
    # Row 0 sends nearly as much to a column of the other group as to one of its own.
    joint[0] = 1e-20
    joint[0, 0], joint[0, 280] = 1.1, 1
    joint /= joint.sum()
    a, b = joint.sum(1), joint.sum(0)
    costs = (a[:, None] * b / joint).log() * epsilon
    entries = plan_links.MatrixEntries(HeldCosts(costs), torch.float64)
    none = torch.zeros_like(a), torch.zeros_like(b)
    found = plan_links.connected(plan_links.ScaledPlan(entries, *none, a, b, epsilon))
    assert found is not None
    assert found.rows.tolist() == few.long().tolist()
    assert found.columns.tolist() == [0] * 270 + [1] * 30
