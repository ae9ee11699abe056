"""Exact distances between datasets: ground costs, labels, self terms, streamed points, results."""

import math

import numpy as np
import ot
import pytest
import torch

import otdd_flash as otdd
from otdd_flash.errors import EpsilonOutOfRange, InputError, UserCodeError
from otdd_flash.operators import comparison
from otdd_flash.solver.exact import pricing, slopes, solve
from otdd_flash.solver.term import check_reachable


def cloud(size, seed, classes=3, dim=4, weights=False):
    draw = torch.Generator().manual_seed(seed)
    points = torch.randn(size, dim, generator=draw) + 0.3 * seed
    masses = torch.rand(size, generator=draw) if weights else None
    labels = torch.arange(size) % classes
    return otdd.LabeledSamples(points, labels, tuple("abc"[:classes]), masses)


def costs_of(result):
    """The ground cost in float64, as `sqeuclidean` of the points has it."""
    x, y = (side.features.double() for side in (result.source, result.target))
    table = result.class_distances.xy[result.source.labels][:, result.target.labels]
    cost = result.cost
    if cost.ground == "cosine":
        x, y = (side / side.norm(dim=1, keepdim=True) for side in (x, y))
        return cost.lambda_x * (1 - x @ y.T) + cost.lambda_y * table
    return cost.lambda_x * torch.cdist(x, y) ** 2 + cost.lambda_y * table


def true_value(result, costs):
    a, b = (side.masses.numpy() for side in (result.source, result.target))
    return ot.emd2(a, b * (a.sum() / b.sum()), costs.numpy(), numItermax=10**7)


DOUBLE = otdd.ComputeOptions(precision="double")


@pytest.fixture
def few_arcs(monkeypatch):
    monkeypatch.setattr(solve, "FEW_ENTRIES", 0)
    monkeypatch.setattr(pricing, "BLOCK_ELEMENTS_CPU", 1 << 11)


@pytest.mark.usefixtures("few_arcs")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"debias": False},
        {"ground": "cosine"},
        {"labels": "means", "lambda_y": 1e4},
        {"lambda_x": 0.0},
        {"compute": otdd.ComputeOptions(precision="double")},
    ],
    ids=str,
)
def test_distances_have_the_true_value(settings):
    x, y = cloud(70, 0, weights=True), cloud(90, 1)
    found = otdd.dataset_distance(x, y, epsilon=0, solver=otdd.Exact(bound_width=0), **settings)
    costs = costs_of(found)
    slack = 1e-10 * float(costs.max())
    truth, (low, high) = true_value(found, costs), found.bounds
    assert low - slack <= truth <= high + slack
    assert high - low <= slack
    assert found.divergence.stopped_by == "optimal"
    assert low <= found.value <= high
    assert found.epsilon == 0
    plan = found.plan().to_dense()
    assert float((plan * costs).sum()) == pytest.approx(truth, abs=slack)
    values = torch.randn(90, 2, dtype=torch.float64)
    assert torch.allclose(found.apply_plan(values), plan @ values, atol=1e-15)
    means = (plan @ y.features.double()) / plan.sum(1, keepdim=True)
    assert torch.allclose(found.barycentric_map(), means, atol=1e-12)
    one_hot = [torch.nn.functional.one_hot(side.labels).double() for side in (x, y)]
    assert torch.allclose(found.class_coupling(), one_hot[0].T @ plan @ one_hot[1], atol=1e-12)


@pytest.mark.parametrize("debias", [False, True])
def test_inner_products_may_have_any_sign(debias):
    x, y = cloud(30, 0), cloud(40, 1)
    settings = {"epsilon": 0, "ground": "inner", "labels": "none", "debias": debias}
    found = otdd.dataset_distance(x, y, solver=otdd.Exact(bound_width=0), **settings)
    costs = -0.5 * x.features.double() @ y.features.double().T
    shift = float(costs.min())
    truth = true_value(found, costs - shift) + shift
    if debias:
        truth += (
            sum(float(side.features.double().square().sum()) / len(side) for side in (x, y)) / 4
        )
    assert found.bounds[0] - 1e-12 <= truth <= found.bounds[1] + 1e-12
    assert found.bounds[1] - found.bounds[0] < 1e-12


@pytest.mark.parametrize(
    ("size", "device"),
    [
        (1500, "cpu"),
        pytest.param(6000, "cpu", marks=pytest.mark.slow),
        pytest.param(100_000, "cuda", marks=pytest.mark.gpu),
    ],
)
def test_points_on_a_line_are_sorted(size, device):
    draw = torch.Generator().manual_seed(0)
    along = torch.randn(50, generator=draw, dtype=torch.float64)
    along /= along.norm()
    s, t = (torch.randn(size, generator=draw, dtype=torch.float64) for _ in range(2))
    x, y = s[:, None] * along, 2 * t[:, None] * along + 3
    found = otdd.sinkhorn(x.to(device), y.to(device), epsilon=0)
    place = t.sort().values * 2 + float(3 * along.sum())
    across = 9 * 50 - float(3 * along.sum()) ** 2
    truth = (float((s.sort().values - place).square().mean()) + across) / 2
    assert found.converged
    assert found.bounds[0] <= truth + 1e-11
    assert truth - 1e-11 <= found.bounds[1] <= truth * (1 + 1e-4)


@pytest.mark.parametrize(("n", "m"), [(2_000, 2_000), (2_000, 1_500)])
def test_points_on_a_line_need_few_rounds(n, m):
    # Within the blur of the first potentials are hundreds of points, not the few arcs of each.
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(k, 1, generator=draw, dtype=torch.float64) for k in (n, m))
    found = otdd.sinkhorn(x, 2 * y + 3, epsilon=0, options=otdd.Exact(bound_width=0))
    assert found.stopped_by == "optimal"
    assert found.iterations <= 3


@pytest.mark.usefixtures("few_arcs")
@pytest.mark.parametrize("scale", [2.0**-60, 2.0**60])
def test_scales_beyond_float32_are_solved_to_the_end(scale):
    x, y = cloud(60, 0).features, cloud(50, 1).features
    options = otdd.Exact(bound_width=0)
    expected = otdd.sinkhorn(x, y, epsilon=0, options=options)
    found = otdd.sinkhorn(
        x.double() * scale, y.double() * scale, epsilon=0, options=options, compute=DOUBLE
    )
    assert found.stopped_by == "optimal"
    assert found.value / scale**2 == pytest.approx(expected.value, rel=1e-12)


def test_equal_datasets_are_at_distance_0():
    x = cloud(40, 0, weights=True)
    found = otdd.dataset_distance(x, x, epsilon=0)
    assert (found.value, found.bounds) == (0.0, (0.0, 0.0))
    assert torch.equal(found.plan().to_dense(), torch.diag(x.masses))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    shuffled = otdd.LabeledSamples(
        x.features[order], x.labels[order], x.class_names, x.weights[order]
    )
    found = otdd.dataset_distance(x, shuffled, epsilon=0)
    assert found.bounds[0] <= 0 <= found.bounds[1] < 1e-12
    assert found.divergence.stopped_by == "optimal"
    assert found.plan().indices()[1].tolist() == order.argsort().tolist()


def test_self_terms_are_solved_where_the_diagonal_costs():
    x, y = cloud(30, 0), cloud(33, 1)
    table = torch.rand(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) + 1
    table = table + table.T
    found = otdd.sinkhorn_divergence(
        x, y, epsilon=0, class_table=table, options=otdd.Exact(bound_width=1e-10)
    )
    truth = []
    for one, other, block in ((x, y, table[:3, 3:]), (x, x, table[:3, :3]), (y, y, table[3:, 3:])):
        costs = (torch.cdist(one.features.double(), other.features.double()) ** 2) / 2
        costs = costs + block[one.labels][:, other.labels] / 2
        truth.append(ot.emd2([], [], costs.numpy()))
    assert found.terms["xx"].value > 0
    for term, value in zip(found.terms.values(), truth, strict=True):
        assert term.value == pytest.approx(value, abs=1e-11)
    assert found.value == pytest.approx(truth[0] - (truth[1] + truth[2]) / 2, abs=1e-11)
    assert found.bound_width <= 1e-10


def test_self_terms_are_solved_where_a_class_distance_is_negative():
    x, y = cloud(20, 0, classes=2), cloud(20, 1, classes=2)
    table = torch.zeros(4, 4, dtype=torch.float64)
    table[0, 1] = table[1, 0] = -50.0
    found = otdd.sinkhorn_divergence(x, y, epsilon=0, class_table=table)
    costs = torch.cdist(x.features.double(), x.features.double()) ** 2 / 2
    costs = costs + table[:2, :2][x.labels][:, x.labels] / 2
    shift = float(costs.min())
    truth = ot.emd2([], [], (costs - shift).numpy()) + shift
    assert truth < -10
    assert found.terms["xx"].value == pytest.approx(truth, rel=1e-4)
    assert found.terms["yy"].value == 0


def test_the_error_of_directions_is_in_the_interval():
    sides = [cloud(20, seed, dim=400) for seed in (0, 1)]
    settings = {"epsilon": 0, "solver": otdd.Exact(bound_width=0), "labels": "none"}
    found = otdd.dataset_distance(*sides, ground="cosine", **settings)
    assert found.comparison is not None
    # The same points as given: no direction is rounded.
    lengths = [each.features for each in found.comparison.transformed]
    given = otdd.dataset_distance(*lengths, lambda_x=found.cost.lambda_x / 2, **settings)
    widths = [high - low for low, high in (found.bounds, given.bounds)]
    assert widths[0] - widths[1] == pytest.approx(2 * found.cost.error(400), rel=1e-3, abs=0)


def test_all_pairs_are_those_of_distances(tmp_path):
    sets = [cloud(20, 0), cloud(25, 1), cloud(30, 2)]
    found = otdd.pairwise_distances(sets, epsilon_relative=0)
    assert found.epsilon == 0
    assert found.tolerance is None
    assert bool(found.converged.all())
    for i, j in ((0, 1), (0, 2), (1, 2)):
        one = otdd.dataset_distance(
            sets[i], sets[j], epsilon=0, class_distances=found.class_distances.between(i, j)
        )
        assert found.values[i, j] == pytest.approx(one.value, rel=1e-12)
    assert found.to_dict()["tolerance"] is None
    loaded = otdd.PairwiseResult.load(found.save(tmp_path))
    assert loaded.tolerance is None
    assert torch.equal(loaded.values, found.values)
    assert torch.equal(loaded.lower, found.lower)


def test_sampling_intervals_take_the_solver_as_epsilon_0():
    x, y, asked = cloud(60, 0), cloud(50, 1), {"count": 20, "size": 40, "level": 0.8}
    found = otdd.subsample_interval(x, y, 1.0, solver=otdd.Exact(), **asked)
    assert found == otdd.subsample_interval(x, y, 1.0, epsilon=0, **asked)
    with pytest.raises(InputError, match=r"epsilon=result\.epsilon"):
        otdd.subsample_interval(x, y, 1.0, solver=otdd.Exact(), epsilon_relative=0.1, **asked)


def test_plans_are_of_no_default_device():
    found = otdd.dataset_distance(cloud(20, 0), cloud(30, 1), epsilon=0)
    expected = found.plan()
    torch.set_default_device("meta")
    try:
        plan = found.plan()
    finally:
        torch.set_default_device(None)
    assert torch.equal(plan.to_dense(), expected.to_dense())


@pytest.mark.usefixtures("few_arcs")
def test_streamed_points_have_the_same_value(tmp_path, monkeypatch):
    x, y = cloud(600, 0, dim=20), cloud(500, 1, dim=20)
    expected = otdd.dataset_distance(x, y, epsilon=0)
    monkeypatch.setattr(comparison, "ASSUMED_FREE", 0)
    np.save(tmp_path / "x.npy", x.features.numpy())
    streamed = otdd.LabeledSamples(otdd.features_file(tmp_path / "x.npy"), x.labels, x.class_names)
    found = otdd.dataset_distance(
        streamed,
        y,
        epsilon=0,
        class_distances=expected.class_distances,
        solver=otdd.Exact(bound_width=0),
        compute=otdd.ComputeOptions(memory_budget=1 << 16),
    )
    assert found.streamed is not None
    assert expected.bounds[0] <= found.value <= expected.bounds[1]
    assert found.plan().values().numel() <= 1099
    assert found.barycentric_map().shape == (600, 20)


def test_results_are_saved_with_their_plan(tmp_path):
    x, y = cloud(30, 0), cloud(40, 1)
    found = otdd.dataset_distance(x, y, epsilon=0)
    loaded = otdd.DistanceResult.load(found.save(tmp_path / "distance"))
    assert (loaded.value, loaded.bounds) == (found.value, found.bounds)
    assert torch.equal(loaded.plan().to_dense(), found.plan().to_dense())
    assert torch.equal(loaded.barycentric_map(), found.barycentric_map())
    assert torch.equal(loaded.potentials[1], found.potentials[1])
    assert loaded.divergence.schedule == "exact"
    costs = torch.rand(20, 30)
    matrix = otdd.matrix_transport(costs, epsilon=0)
    matrix.save(tmp_path / "matrix")
    again = otdd.MatrixTransport.load(tmp_path / "matrix", costs)
    plan = matrix.plan().to_dense()
    assert torch.equal(again.plan().to_dense(), plan)
    assert again.transport_cost == matrix.value
    values = torch.rand(20, 3, dtype=torch.float64)
    assert torch.allclose(again.apply_transposed(values), plan.T @ values)
    assert torch.allclose(again.apply(torch.ones(30)), plan.sum(1))


def test_potentials_prove_the_lower_end():
    x, y = cloud(30, 0), cloud(40, 1)
    found = otdd.dataset_distance(x, y, epsilon=0, debias=False, solver=otdd.Exact(bound_width=0))
    f, g = found.potentials
    assert float((costs_of(found) - f[:, None] - g).min()) >= -1e-10
    assert float(f.mean() + g.mean()) == pytest.approx(found.value, abs=1e-10)


@pytest.mark.parametrize(("n", "m"), [(12, 12), (20, 30), (31, 17)])
@pytest.mark.parametrize("weights", [False, True])
def test_contributions_are_the_slopes_to_both_sides(n, m, weights, monkeypatch):
    x, y = cloud(n, 0, weights=weights), cloud(m, 1, weights=weights)
    found = otdd.dataset_distance(x, y, epsilon=0, solver=otdd.Exact(bound_width=0))
    # So few arcs that passes have to find others.
    monkeypatch.setattr(slopes, "ARCS", 1)
    rows, through_classes, ends = found.contributions()
    costs, a, b = costs_of(found).numpy(), x.masses.numpy(), y.masses.numpy()

    def value(masses):
        return ot.emd2(masses, b * (masses.sum() / b.sum()), costs)

    assert not through_classes
    assert float(rows @ x.masses) == pytest.approx(found.value, rel=1e-12)
    step, labels = 1e-5, x.labels.numpy()
    for c in range(3):
        share = a[labels == c].sum()
        direction = (np.where(labels == c, a / share, 0) - a) / (1 - share)
        least = (value(a) - value(a - step * direction)) / step
        most = (value(a + step * direction) - value(a)) / step
        assert ends[:, c].tolist() == pytest.approx([least, most], abs=1e-7)
        assert weights or n == 31 or most > least + 1e-3


def test_slopes_that_are_not_found_are_nan_and_said(monkeypatch):
    x, y = cloud(40, 0), cloud(40, 1)
    found = otdd.dataset_distance(x, y, epsilon=0, solver=otdd.Exact(bound_width=0))
    monkeypatch.setattr(slopes, "ARCS", 1)
    expected = found.contributions().slopes
    monkeypatch.setattr(slopes, "MOST_PASSES", 1)
    with pytest.warns(otdd.NotConvergedWarning, match=r"slopes .* after 1 passes .* NaN"):
        ends = found.contributions().slopes
    missing = ends.isnan()
    assert bool(missing.any())
    torch.testing.assert_close(ends[~missing], expected[~missing])


@pytest.mark.parametrize("debias", [False, True])
@pytest.mark.parametrize("ground", ["sqeuclidean", "inner"])
@pytest.mark.parametrize("diagonal", [0.0, 2.0])
def test_contributions_are_refused_where_other_terms_move_with_masses(debias, ground, diagonal):
    x, y = cloud(15, 0, weights=True), cloud(12, 1)
    table = torch.rand(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    table = table + table.T
    table.diagonal().copy_(diagonal * torch.arange(6))
    classes = otdd.ClassDistances(table[:3, :3], table[:3, 3:], table[3:, 3:])

    def distance(weights):
        moved = otdd.LabeledSamples(x.features, x.labels, x.class_names, weights)
        return otdd.dataset_distance(
            moved,
            y,
            epsilon=0,
            class_distances=classes,
            ground=ground,
            debias=debias,
            solver=otdd.Exact(bound_width=0),
        )

    masses = x.masses
    found = distance(masses)
    if (diagonal and debias) or (ground == "inner" and not debias):
        with pytest.raises(InputError, match=r"has other terms .*; take ground=sqeuclidean"):
            found.contributions()
        return
    rows, _, ends = found.contributions()
    assert float(rows @ masses) == pytest.approx(found.value, rel=1e-12)
    for c in range(3):
        share = masses[x.labels == c].sum()
        moved = masses + 1e-6 * (torch.where(x.labels == c, masses / share, 0) - masses) / (
            1 - share
        )
        slope = (distance(moved).value - found.value) / 1e-6
        assert float(ends[1, c]) == pytest.approx(slope, abs=1e-6)


X, Y = cloud(20, 0), cloud(20, 1)
LOSS = (X.features, Y.features)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: otdd.dataset_distance(X, Y, epsilon=0, solver=otdd.Converged()),
            r"epsilon=0 is solved by solver=exact .* got solver=converged",
        ),
        (
            lambda: otdd.dataset_distance(X, Y, epsilon=0, solver=otdd.GeomlossSchedule()),
            "got solver=geomloss",
        ),
        (
            lambda: otdd.dataset_distance(X, Y, epsilon=0.5, solver=otdd.Exact()),
            r"solver=exact is for epsilon=0, got epsilon=0\.5",
        ),
        (
            lambda: otdd.matrix_transport(torch.eye(3), epsilon_relative=0.5, options=otdd.Exact()),
            r"got epsilon_relative=0\.5",
        ),
        (
            lambda: otdd.dataset_distance(X, Y, epsilon=0, labels="sinkhorn"),
            "set labels.epsilon .* or take labels=exact",
        ),
        (
            lambda: otdd.dataset_distance(
                X, Y, epsilon=0, solver=otdd.Exact(bound_width=2.0)
            ).contributions(),
            r"not proven to be; solve with solver\.bound_width=0",
        ),
        (lambda: otdd.dataset_distance(X, Y, epsilon=0.5).plan(), r"20 x 20 entries.*apply_plan"),
        (
            lambda: otdd.sinkhorn_loss(*LOSS, epsilon=0),
            r"got 0; distances alone take 0.* 0\.001 of the mean",
        ),
        (
            lambda: otdd.sinkhorn_loss(*LOSS, epsilon=1.0, options=otdd.Exact()),
            "take solver=converged",
        ),
        (
            lambda: otdd.sinkhorn_losses(
                LOSS[0][None], LOSS[1][None], epsilon=1.0, options=otdd.Exact()
            ),
            "take solver=converged",
        ),
        (lambda: otdd.gradient_flow(X, Y, epsilon=0), "distances alone take 0"),
        (lambda: otdd.sinkhorn_potentials(*LOSS, epsilon=0), "distances alone take 0"),
        (
            lambda: otdd.matrix_loss(torch.eye(3), epsilon=1.0, options=otdd.Exact()),
            "take solver=converged",
        ),
        (
            lambda: otdd.sinkhorn_divergence(X, Y, epsilon=0, start={"xy": torch.zeros(20)}),
            "leave it out",
        ),
        (
            lambda: otdd.Exact(bound_width=-1),
            r"solver\.bound_width must be finite and not negative",
        ),
        (lambda: otdd.Exact(max_seconds=0), r"solver\.max_seconds must be positive"),
        (lambda: otdd.matrix_transport(torch.full((3, 3), math.nan), epsilon=0), "must not be NaN"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_arcs_that_do_not_fit_are_refused(monkeypatch):
    monkeypatch.setattr(solve, "free_memory", lambda device: 1000)
    with pytest.raises(InputError, match=r"epsilon=0 takes 400 arcs, some 0\.0 GB"):
        otdd.dataset_distance(X, Y, epsilon=0)


@pytest.mark.parametrize("fitting", range(3))
def test_arcs_are_checked_in_every_round(fitting, monkeypatch):
    """Memory for the first arcs, or for some rounds, and then for none."""
    monkeypatch.setattr(solve, "FEW_ENTRIES", 0)
    monkeypatch.setattr(solve, "FIRST_ARCS", 1)
    monkeypatch.setattr(solve, "MORE_ARCS", 1)
    nothing = np.zeros(20), np.zeros(20), 0.0
    monkeypatch.setattr(solve, "first_potentials", lambda *_: nothing)
    left = iter([10**12] * fitting)
    monkeypatch.setattr(solve, "free_memory", lambda device: next(left, 1000))
    with pytest.raises(InputError, match=r"epsilon=0 takes \d+ arcs"):
        otdd.dataset_distance(X, Y, epsilon=0, solver=otdd.Exact(bound_width=0))


def test_the_start_raises_its_epsilon_and_passes_on_other_errors(monkeypatch):
    monkeypatch.setattr(solve, "FEW_ENTRIES", 0)
    solved, tried = solve.solve_term, []

    def failing(operator, epsilon, options, form):
        tried.append((epsilon, options.max_seconds))
        if len(tried) == 1:
            raise EpsilonOutOfRange("{given} is too small", epsilon)
        if len(tried) == 2:
            check_reachable(0.05, 0.04, epsilon, torch.float64)
        return solved(operator, epsilon, options, form)

    monkeypatch.setattr(solve, "solve_term", failing)
    assert otdd.dataset_distance(X, Y, epsilon=0, solver=otdd.Exact(max_seconds=60)).converged
    epsilons, seconds = zip(*tried[:3], strict=True)
    assert epsilons[2] == pytest.approx(100 * epsilons[0])
    assert 60 > seconds[0] > seconds[1] > seconds[2]

    def broken(*_):
        raise UserCodeError("your function failed")

    monkeypatch.setattr(solve, "solve_term", broken)
    with pytest.raises(UserCodeError, match="your function failed"):
        otdd.dataset_distance(X, Y, epsilon=0)


@pytest.mark.slow
def test_the_command_takes_epsilon_0(tmp_path, monkeypatch, capsys):
    from command_runs import run_here

    from otdd_flash.distance import main

    monkeypatch.chdir(tmp_path)
    asked = ["source=blobs", "target=blobs", "target.split=test", "extractor=identity"]
    # The default solver, also if it is named, gives way to exact.
    asked += ["max_samples=40", "cache_dir=null", "epsilon=0", "save_result=true"]
    asked += ["hydra.run.dir=run", "solver.require_convergence=true", "solver=converged"]
    ended = run_here(main, asked, monkeypatch, capsys)
    assert ended.code == 0
    assert "stopped by" in ended.out
    found = otdd.DistanceResult.load("run")
    assert found.epsilon == 0
    assert found.divergence.schedule == "exact"
    assert found.plan().shape == (40, 40)


@pytest.mark.slow
def test_a_study_takes_epsilon_0(tmp_path):
    tasks = {f"task {seed}": cloud(24, seed) for seed in range(4)}
    study = otdd.Study(tasks, ["otdd"], None, epsilon=0)
    found = study.run(tmp_path)
    pair = otdd.dataset_distance(tasks["task 0"], tasks["task 1"], epsilon=0)
    assert found.complete
    assert pair.value == pytest.approx(float(found.matrix("otdd")[0, 1]), rel=1e-9)


@pytest.mark.parametrize(
    ("solver", "limits"),
    [
        (otdd.Exact(max_seconds=1e-9), "solver.max_seconds or solver.bound_width"),
        (otdd.Converged(max_iterations=1), "solver.max_iterations or solver.tolerance"),
    ],
)
def test_a_study_names_the_limits_of_its_solver(solver, limits, tmp_path):
    tasks = {f"task {seed}": cloud(24, seed) for seed in range(3)}
    epsilon = 0 if isinstance(solver, otdd.Exact) else 0.01
    study = otdd.Study(tasks, ["otdd"], None, epsilon=epsilon, solver=solver)
    with pytest.warns(otdd.NotConvergedWarning, match=f"raise {limits}$"):
        study.run(tmp_path)
