"""Gromov-Wasserstein distances: against dense sums, permutations, POT and closed forms."""

import io
import itertools
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import ot
import pytest
import torch
from rich.console import Console
from tiers import slow

import otdd_flash as otdd
from otdd_flash.errors import InputError, NotConvergedWarning
from otdd_flash.gromov import solve, starts
from otdd_flash.gromov.bounds import eccentricity_bound, spectral_bound
from otdd_flash.gromov.distance import gaussian_table, gromov_options
from otdd_flash.gromov.energy import Cloud, Energy
from otdd_flash.gromov.problem import Problem, plan_of, round_plan
from otdd_flash.gromov.solve import Search, prepare, take_step
from otdd_flash.report.distance import nearest_table, summary_table, write_report
from otdd_flash.solver.schedules import Converged

DOUBLE = otdd.ComputeOptions(device="cpu", precision="double")
PLAIN = {"ground": "gromov", "debias": False, "labels": "none", "lambda_x": 1.0}


def cloud(size, dim, seed, *, classes=None, weights=False, name="samples"):
    """A skewed cloud off the origin, whose axes differ in length."""
    draw = torch.Generator().manual_seed(seed)
    points = torch.randn(size, dim, generator=draw, dtype=torch.float64)
    points = (points + 0.2 * points**2) * torch.linspace(2.0, 0.7, dim) + 3.0
    labels = None if classes is None else torch.arange(size) % classes
    names = () if classes is None else tuple("abcdefgh"[:classes])
    masses = torch.rand(size, generator=draw) + 0.1 if weights else None
    return otdd.LabeledSamples(points, labels, names, masses, name=name)


def dense_energy(plan, x, y):
    """E of a plan (n, m) from all four indices, float64."""
    plan, first, second = (each.double() for each in (plan, *map(squared, (x, y))))
    a, b = plan.sum(1), plan.sum(0)
    cross = torch.einsum("ij,kl,ik,jl->", plan, plan, first, second)
    return float(a @ first.square() @ a + b @ second.square() @ b - 2 * cross)


def squared(samples):
    points = samples.features.double()
    return (points[:, None] - points).square().sum(2)


def problem(x, y, epsilon=None, relative=None, lambda_x=1.0):
    cost = otdd.GroundCost(lambda_x, 0.0, "inner")
    compared = prepare((x, y), cost, DOUBLE).with_classes(None)
    if relative is not None:
        epsilon = relative * Problem.of(compared).independent
    return Problem.of(compared.at(epsilon))


def dense_plan(result):
    """The plan (n, m) of a result, by its products."""
    return result.apply_plan(torch.eye(len(result.target), dtype=torch.float64)).double()


def copied(x, seed, extra=3):
    """A rotated, shifted, padded and shuffled copy, and its permutation."""
    draw = torch.Generator().manual_seed(seed)
    dim = x.dim + extra
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=draw, dtype=torch.float64)).Q
    padded = torch.nn.functional.pad(x.features, (0, extra))
    order = torch.randperm(len(x), generator=draw)
    points = (padded @ turn.T + 5.0)[order]
    return otdd.LabeledSamples(points, None, (), name="copy"), order


def test_points_of_the_linearised_cost_have_its_inner_products():
    for dims in ((5, 3), (3, 5)):
        found = Energy(Cloud.of(cloud(9, dims[0], 1)), Cloud.of(cloud(8, dims[1], 2)))
        matrix = torch.randn(*dims, dtype=torch.float64)
        z, w = found.linear_points(matrix)
        assert z.shape[1] == w.shape[1] == min(dims) + 1
        norms = found.x.centred_norms[:, None] * found.y.centred_norms
        wanted = -4 * norms - 16 * found.x.points @ matrix @ found.y.points.T
        assert torch.allclose(-z @ w.T, wanted, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("seed", [0, 5, *slow([*range(1, 5), *range(6, 12)])])
def test_bounds_hold_the_best_permutation(seed):
    n, dims = 4 + seed % 4, (1 + seed % 3, 1 + seed // 3 % 4)
    x, y = cloud(n, dims[0], 10 + seed), cloud(n, dims[1], 50 + seed)
    best = min(
        dense_energy(torch.eye(n, dtype=torch.float64)[list(order)] / n, x, y)
        for order in itertools.permutations(range(n))
    )
    result = otdd.dataset_distance(x, y, epsilon=0, starts=12, compute=DOUBLE, **PLAIN)
    lower, upper = result.bounds
    assert lower <= best * (1 + 1e-12)
    assert upper >= best * (1 - 1e-12)
    # Concave: the least E is at a permutation, and some start leads to it.
    assert result.value == pytest.approx(best, rel=1e-9)
    assert lower > 0.1 * best


def test_the_eccentricity_bound_is_that_of_all_pairs():
    x, y = cloud(30, 3, 1, weights=True), cloud(40, 2, 2)
    sizes = [(squared(side).square() @ side.masses).sqrt().numpy() for side in (x, y)]
    wanted = ot.emd2_1d(*sizes, x.masses.numpy(), y.masses.numpy())
    found = eccentricity_bound(Energy(Cloud.of(x), Cloud.of(y)))
    assert found == pytest.approx(wanted, rel=1e-9)
    assert found <= wanted


@pytest.mark.parametrize("size", [101, 120, 142, *slow([*range(50, 1000, 50), 2000])])
def test_a_moved_copy_is_found(size):
    x = cloud(size, 5, size)
    y, order = copied(x, size)
    result = otdd.dataset_distance(x, y, epsilon=0, starts=1, compute=DOUBLE, **PLAIN)
    scale = result.gromov.independent
    rows, columns = result.plan().indices()
    assert torch.equal(order[columns], rows)
    assert result.gromov.energy_bounds[1] == 0
    assert result.bounds[0] <= 1e-12 * scale
    assert abs(result.value) <= 1e-12 * scale
    assert result.bounds[1] <= 1e-8 * scale


@pytest.mark.parametrize("relative", [0.1, *slow([0.02])])
def test_it_is_what_pot_finds_from_the_same_start(relative):
    x, y = cloud(20, 3, 1), cloud(24, 5, 2)
    entropic = problem(x, y, relative=relative)
    a, b = x.masses.numpy(), y.masses.numpy()
    draw = np.random.default_rng(3).random((20, 24))
    start = ot.sinkhorn(a, b, draw, 0.2, stopThr=1e-14)
    matrix = entropic.energy.x.points.T @ torch.from_numpy(start) @ entropic.energy.y.points
    found = Search(entropic, Converged(1e-11)).descend(
        matrix, Converged(1e-11), 1e-15 * entropic.independent
    )
    plan = ot.gromov.entropic_gromov_wasserstein(
        squared(x).numpy(),
        squared(y).numpy(),
        a,
        b,
        "square_loss",
        epsilon=entropic.compared.epsilon,
        G0=start,
        max_iter=3000,
        tol=1e-13,
        solver="PGD",
        stopThr=1e-13,
        numItermax=50_000,
    )
    wanted = dense_energy(torch.from_numpy(plan), x, y)
    rounded = round_plan(entropic, found.last.matrix, found.last.solved.xy)
    assert rounded.energy == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("precision", ["high", *slow(["double"])])
def test_the_value_is_the_energy_of_a_plan_with_corrected_sums(precision):
    x, y = cloud(50, 3, 1, weights=True), cloud(45, 6, 2)
    compute = otdd.ComputeOptions(device="cpu", precision=precision)
    settings = {**PLAIN, "solver": otdd.Converged(tolerance=0.05), "compute": compute}
    result = otdd.dataset_distance(x, y, epsilon_relative=0.05, **settings)
    plan, (a, b) = dense_plan(result), (x.masses, y.masses)
    plan = plan * (a / plan.sum(1)).clamp_max(1)[:, None]
    plan = plan * (b / plan.sum(0)).clamp_max(1)
    missing = a - plan.sum(1), b - plan.sum(0)
    plan = plan + missing[0][:, None] * missing[1] / missing[1].sum()
    rounding = 1e-9 if precision == "double" else 1e-5
    assert result.value == pytest.approx(dense_energy(plan, x, y), rel=rounding)
    assert result.gromov.gw == pytest.approx(math.sqrt(result.value) / 2)
    assert result.mean_cost == pytest.approx(dense_energy(a[:, None] * b, x, y))


def gaussian_forms(first, second):
    """Delon's lower and upper forms for eigenvalues (d,), the longer list first."""
    second = np.pad(second, (0, len(first) - len(second)))
    traces = 4 * (first.sum() - second.sum()) ** 2
    apart = np.square(first - second).sum()
    norms = 4 * (np.linalg.norm(first) - np.linalg.norm(second)) ** 2
    return traces + norms + 4 * apart, traces + 8 * apart


# Of 20,000 it takes some minutes on a processor.
@pytest.mark.parametrize("size", [500, *slow([3000]), pytest.param(20_000, marks=pytest.mark.gpu)])
def test_gaussians_are_between_delons_forms(size):
    axes = np.array([4.0, 2.0, 0.7]), np.array([3.0, 0.5])
    draw = torch.Generator().manual_seed(size)
    x, y = (
        otdd.LabeledSamples(
            torch.randn(size, len(each), generator=draw) * torch.from_numpy(each).float().sqrt(),
            None,
            (),
        )
        for each in axes
    )
    # Of the covariances that were drawn.
    drawn = (np.linalg.eigvalsh(np.cov(side.features.numpy().T, bias=True)) for side in (x, y))
    lower, upper = gaussian_forms(*(each[::-1] for each in drawn))
    result = otdd.dataset_distance(x, y, epsilon_relative=0.01, starts=1, **PLAIN)
    # Of 40 draws of 500 the bound over the lower form had mean 1.025 and deviation 0.038; the value
    # less the upper form, over E(a b^T), 0.012 and 0.010, with what entropy adds; of 6 draws of
    # 3,000 deviations were a third and a quarter. These are four of them.
    share = math.sqrt(500 / size)
    assert lower * (1 - 0.15 * share) <= max(result.gromov.energy_bounds) <= result.value
    assert result.value <= upper + 0.053 * share * result.gromov.independent


def test_the_gaussian_table_is_delons():
    x = cloud(60, 4, 1, classes=2)
    y = otdd.LabeledSamples(cloud(50, 3, 2).features * 2, torch.arange(50) % 3, ("a", "b", "q"))
    settings = {**PLAIN, "labels": "gaussian", "lambda_y": 2.0, "epsilon_relative": 0.1}
    result = otdd.dataset_distance(x, y, starts=2, **settings)
    for i in range(2):
        for j in range(3):
            spectra = [
                np.sort(np.linalg.eigvalsh(np.cov(side.features[side.labels == k].T.numpy())))[::-1]
                for side, k in ((x, i), (y, j))
            ]
            wanted = gaussian_forms(*spectra)[1]
            assert float(result.class_distances.xy[i, j]) == pytest.approx(wanted, rel=1e-9)
    assert not bool(result.class_distances.xx.diagonal().any())
    # Along an axis of both sides they are compared in the order of their lengths.
    points = torch.tensor([[0.0, 1.0], [0.0, -1.0], [5.0, 0.0], [-5.0, 0.0]])
    turned = (
        otdd.LabeledSamples(each, torch.zeros(4), ("a",)) for each in (points, points[:, [1, 0]])
    )
    settings["labels"] = otdd.labels.Gaussian(diagonal=True)
    turned = otdd.dataset_distance(*turned, starts=1, **settings)
    assert float(turned.class_distances.xy) == pytest.approx(0, abs=1e-9)
    plain = gaussian_table(torch.tensor([[3.0, 1.0], [2.0, 0.0]], dtype=torch.float64))
    assert float(plain[0, 1]) == 4 * (4 - 2) ** 2 + 8 * (1 + 1)


def test_the_class_term_is_added_and_bounded():
    x, y = cloud(24, 3, 1, classes=2, weights=True), cloud(24, 2, 2, classes=3)
    table = otdd.ClassDistances(
        1 - torch.eye(2), torch.tensor([[0.0, 3.0, 9.0], [4.0, 0.5, 9.0]]), 1 - torch.eye(3)
    )
    for weight in (0.0, 5.0, 1e6):
        result = otdd.dataset_distance(
            x,
            y,
            epsilon=0,
            compute=DOUBLE,
            ground="gromov",
            debias=False,
            lambda_x=2.0,
            lambda_y=weight,
            class_distances=table,
        )
        plan, coupling = dense_plan(result), result.class_coupling()
        cost = float((table.xy * coupling).sum())
        wanted = 2 * dense_energy(plan, x, y) + weight * cost
        assert result.value == pytest.approx(wanted, rel=1e-9)
        assert result.gromov.class_cost == pytest.approx(cost, rel=1e-9)
        masses = [
            torch.zeros(k, dtype=torch.float64).index_add_(0, side.labels, side.masses)
            for side, k in ((x, 2), (y, 3))
        ]
        least = ot.emd2(*(each.numpy() for each in masses), table.xy.double().numpy())
        assert result.gromov.class_lower == pytest.approx(least, rel=1e-9)
        assert result.gromov.class_lower <= least
        assert result.bounds[0] <= result.value <= result.bounds[1]
    # The class term decides.
    assert cost == pytest.approx(least, rel=1e-3)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("labels", "weight"),
    [("none", None), ("gaussian", 0.1), (otdd.labels.Tree(dict.fromkeys("abcd", "root")), 1.0)],
)
def test_a_saved_result_answers_as_before(labels, weight, tmp_path):
    x, y = cloud(40, 4, 1, classes=3, name="left"), cloud(30, 3, 2, classes=4, name="right")
    settings = {"ground": "gromov", "debias": False, "labels": labels, "lambda_y": weight}
    for epsilon in ({"epsilon_relative": 0.02}, {"epsilon": 0}):
        result = otdd.dataset_distance(x, y, compute="cpu", **epsilon, **settings)
        loaded = otdd.DistanceResult.load(result.save(tmp_path / "result"))
        assert (loaded.value, loaded.bounds) == (result.value, result.bounds)
        assert loaded.to_dict() == result.to_dict()
        assert loaded.gromov.starts == result.gromov.starts
        assert torch.equal(loaded.class_coupling(), result.class_coupling())
        images = result.barycentric_map()
        assert images.shape == (40, 3)
        assert torch.equal(loaded.barycentric_map(), images)
        plan = dense_plan(result)
        wanted = plan @ y.features / plan.sum(1, keepdim=True)
        assert torch.allclose(images.double(), wanted, atol=1e-4)
        assert result.to_dict()["ground"] == "gromov"
        assert result.class_coupling().shape == (3, 4)


def test_classes_of_one_name_are_a_start():
    x = cloud(60, 3, 1, classes=3)
    shifted = x.features + 6 * torch.eye(3, dtype=torch.float64)[x.labels]
    x = replace(x, features=shifted)
    y = replace(x, features=-shifted[:, [2, 0, 1]])
    result = otdd.dataset_distance(x, y, epsilon=0, compute=DOUBLE, **PLAIN)
    names = [start.name for start in result.gromov.starts]
    assert names == ["axes", "classes", "independent", "random 1"]
    assert result.gromov.starts[1].objective == pytest.approx(0, abs=1e-9 * result.mean_cost)
    assert result.value == min(start.objective for start in result.gromov.starts)


def test_pairs_are_distances_of_two():
    sides = [cloud(20 + k, 2 + k, k, classes=2, name=f"set {k}") for k in range(3)]
    settings = {"ground": "gromov", "labels": "gaussian", "lambda_y": 0.1, "starts": 1}
    found = otdd.pairwise_distances(sides, epsilon=2.0, compute="cpu", **settings)
    for i, j in itertools.combinations(range(3), 2):
        one = otdd.dataset_distance(
            sides[i], sides[j], epsilon=2.0, compute="cpu", debias=False, **settings
        )
        assert float(found.values[i, j]) == one.value
        assert (float(found.lower[i, j]), float(found.upper[i, j])) == one.bounds
    assert not bool(found.values.diagonal().any())
    assert found.details["d"] == [2, 3, 4]
    assert found.details["ground"] == "gromov"
    assert list(found.details["gromov"]) == ["0,1", "0,2", "1,2"]
    assert [one["name"] for one in found.details["gromov"]["1,2"]["starts"]] == ["axes"]
    assert "subsample_interval" not in str(found)
    assert bool(found.converged.all())
    mean = otdd.pairwise_distances(sides, compute="cpu", **settings)
    assert mean.epsilon == pytest.approx(0.01 * mean.mean_cost)


REFUSED = [
    ({"debias": True}, "not debiased"),
    ({"labels": "gaussian"}, "give lambda_y"),
    ({"labels": "means", "lambda_y": 1.0}, "labels=means"),
    ({"labels": "continuous", "lambda_y": 1.0}, "continuous"),
    ({"unbalanced": 1.0}, "exact marginals"),
    ({"unbalanced_relative": 1.0}, "exact marginals"),
    ({"solver": otdd.Converged(bound_width=0.1)}, "bound_width"),
    ({"solver": otdd.GeomlossSchedule()}, "geomloss"),
    ({"starts": 0}, "starts"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_what_is_not_there_is_refused(settings, words):
    x, y = cloud(10, 3, 1, classes=2), cloud(9, 2, 2, classes=2)
    with pytest.raises(InputError, match=words):
        otdd.dataset_distance(x, y, **{**PLAIN, **settings})


def test_settings_that_would_be_ignored_are_refused():
    x, y = cloud(10, 3, 1, classes=2), cloud(9, 2, 2, classes=2)
    for call, words in (
        (lambda: otdd.dataset_distance(x, x, starts=9), "starts are of ground=gromov"),
        (lambda: otdd.pairwise_distances([x, x], starts=9), "starts are of ground=gromov"),
        (
            lambda: otdd.dataset_distance(x, y, solver=otdd.Exact(bound_width=0.3), **PLAIN),
            "leave out solver",
        ),
        (
            lambda: otdd.dataset_distance(x, y, **{**PLAIN, "lambda_x": 0.0}),
            "every cost is 0; raise lambda_x",
        ),
        (lambda: otdd.dataset_distance(x, y), "ground=gromov of dataset_distance"),
    ):
        with pytest.raises(InputError, match=words):
            call()


def test_ranks_are_refused_before_anything_is_solved():
    compute = SimpleNamespace(group=object())
    with pytest.raises(InputError, match=r"leave out compute\.group"):
        gromov_options(None, 1.0, 1.0, Converged(), compute, debias=False, unbalanced=None)


def test_many_sets_of_labels_are_refused_with_a_way_out():
    draw = torch.Generator().manual_seed(0)
    sets = torch.rand(600, 12, generator=draw) < 0.5
    sets[:, 0] = True
    names = tuple("abcdefghijkl")
    x = otdd.LabeledSamples(torch.randn(600, 3, generator=draw), sets, names)
    y = otdd.LabeledSamples(torch.randn(600, 2, generator=draw), sets, names)
    assert x.class_total > 256
    settings = {**PLAIN, "lambda_y": 1.0, "starts": 1, "epsilon_relative": 0.1}
    with pytest.raises(InputError, match=r"up to 256 sets of labels.*; set labels=none, or"):
        otdd.dataset_distance(x, y, **{**settings, "labels": "gaussian"})
    assert otdd.dataset_distance(x, y, **settings).gromov.class_cost == 0


def test_other_entries_do_not_take_it():
    x = cloud(10, 3, 1, classes=2)
    unknown = "ground.*gromov"
    for call, words in (
        (lambda: otdd.sinkhorn_loss(x.features, x.features, epsilon=1.0, ground="gromov"), unknown),
        (lambda: otdd.class_distances([x], ground="gromov"), unknown),
        (lambda: otdd.GroundCost(ground="gromov"), unknown),
        (lambda: otdd.mixture(x, {"x": x, "y": x}, ground="gromov"), unknown),
        (lambda: otdd.shift_test(x, x, ground="gromov"), unknown),
        (lambda: otdd.subsample_interval(x, x, 1.0, epsilon=1.0, ground="gromov"), unknown),
        (lambda: otdd.noise_floor(x, x, epsilon=1.0, ground="gromov"), unknown),
        (lambda: otdd.dataset_distance(x, x, **PLAIN).contributions(), "of a linear cost"),
    ):
        with pytest.raises(InputError, match=words):
            call()


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("seeds", [range(2), range(2, 6)])
@pytest.mark.parametrize("relative", [0.05, 0.01, 0.1])
def test_the_best_of_what_is_told_is_kept(relative, seeds):
    for seed in seeds:
        x, y = cloud(30, 3, seed), cloud(25, 2, seed + 40)
        result = otdd.dataset_distance(x, y, epsilon_relative=relative, compute="cpu", **PLAIN)
        told = [start.objective for start in result.gromov.starts]
        assert result.value <= min(told)
        # It is that of the plan, with entropy.
        plan, independent = dense_plan(result), x.masses[:, None] * y.masses
        entropy = float(torch.xlogy(plan, plan / independent).sum())
        wanted = dense_energy(plan, x, y) + result.epsilon * entropy
        assert min(told) == pytest.approx(wanted, rel=2e-3)
        assert min(told) == pytest.approx(result.gromov.objectives[-1], rel=1e-12)


def test_fewer_iterations_do_not_give_a_better_number():
    x, y = cloud(120, 4, 1), cloud(110, 3, 2)
    found = []
    for most in (1, 4, 12, 100_000):
        solver = otdd.Converged(max_iterations=most)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotConvergedWarning)
            result = otdd.dataset_distance(
                x, y, epsilon_relative=0.005, solver=solver, compute="cpu", **PLAIN
            )
        found.append(result)
        assert result.value <= min(start.objective for start in result.gromov.starts)
    assert [result.converged for result in found] == [False, False, False, True]
    least = min(start.objective for start in found[-1].gromov.starts)
    for late in found[:-1]:
        assert min(start.objective for start in late.gromov.starts) >= least * (1 - 1e-6)
        # What was not solved is not told as a step.
        assert all(each >= least * (1 - 1e-3) for each in late.gromov.objectives)
    values = [result.value for result in found]
    assert values == sorted(values, reverse=True)


def test_the_objective_of_a_step_that_stopped_is_of_a_plan():
    x, y = cloud(60, 4, 1), cloud(50, 3, 2)
    entropic = problem(x, y, relative=0.01)
    matrix = next(iter(starts.starts(entropic.energy, entropic.compared, 1)))[1]
    best = Search(entropic, Converged(1e-6)).descend(matrix, Converged(1e-6), 0.0).last
    step = take_step(entropic, best.following, Converged(1e-6, max_iterations=1))
    assert not step.solved.converged
    assert step.objective >= best.objective
    rounded = round_plan(entropic, step.matrix, step.solved.xy)
    assert step.objective == pytest.approx(rounded.value + entropic.compared.epsilon * math.log(50))


def test_a_late_step_does_not_replace_a_good_one():
    entropic = problem(cloud(60, 4, 1), cloud(50, 3, 2), relative=0.01)
    matrix = next(iter(starts.starts(entropic.energy, entropic.compared, 1)))[1]
    good = Search(entropic, Converged(1e-6)).descend(
        matrix, Converged(1e-6), 1e-3 * entropic.independent
    )
    short = Search(entropic, Converged(1e-6, max_iterations=1))
    late = short.finish(good)
    assert late.last.matrix is good.last.matrix
    assert not late.last.solved.converged
    assert short.settle(late).plan.value <= good.objective


def test_the_value_is_close_to_that_of_sums_without_errors():
    x, y = cloud(200, 4, 1), cloud(180, 3, 2)
    settings = {**PLAIN, "epsilon_relative": 0.01, "starts": 1}
    result = otdd.dataset_distance(x, y, compute="cpu", **settings)
    wanted = otdd.dataset_distance(
        x, y, compute=DOUBLE, solver=otdd.Converged(tolerance=1e-7), **settings
    )
    assert result.value == pytest.approx(wanted.value, rel=3e-4)
    assert result.divergence.xy.marginal_error < 1e-4
    # What was asked for.
    assert result.divergence.xy.tolerance == pytest.approx(1e-3)


def test_few_rows_of_many_features_are_compared_in_their_span(tmp_path):
    draw = torch.Generator().manual_seed(3)
    wide = otdd.LabeledSamples(
        torch.randn(7, 40_000, generator=draw, dtype=torch.float64), None, ()
    )
    y = cloud(9, 4, 2)
    found = Cloud.of(wide)
    assert found.covariance.shape == (7, 7)
    centred = wide.features - wide.features.mean(0)
    assert torch.allclose(found.points @ found.points.T, centred @ centred.T, rtol=1e-12)
    # The same in seven dimensions.
    values, vectors = torch.linalg.eigh(centred @ centred.T)
    narrow = otdd.LabeledSamples(vectors * values.clamp_min(0).sqrt(), None, ())
    for epsilon in (0.0, 1e4):
        settings = {**PLAIN, "epsilon": epsilon, "compute": DOUBLE}
        result = otdd.dataset_distance(wide, y, **settings)
        other = otdd.dataset_distance(narrow, y, **settings)
        assert result.value == pytest.approx(other.value, rel=1e-9)
        assert result.bounds[0] == pytest.approx(other.bounds[0], rel=1e-6)
        loaded = otdd.DistanceResult.load(result.save(tmp_path / "result"))
        assert torch.equal(loaded.barycentric_map(), result.barycentric_map())


def test_memory_of_moments_is_checked(monkeypatch):
    x = otdd.LabeledSamples(torch.zeros(4000, 1500), None, ())
    monkeypatch.setattr("otdd_flash.memory.free_memory", lambda device: 2**28)
    with pytest.raises(InputError, match=r"not enough memory.*fewer dimensions \(of each"):
        otdd.dataset_distance(x, x, **PLAIN)


def test_classes_that_are_not_compared_cost_nothing():
    x = otdd.LabeledSamples(torch.randn(30, 3), torch.arange(30), tuple(map(str, range(30))))
    compared = prepare((x, x), otdd.GroundCost(1.0, 0.0, "inner"), DOUBLE).with_classes(None)
    assert Problem.of(compared).values.shape == (30, 1 + 3 + 1)


def test_time_and_convergence():
    x, y = cloud(60, 3, 1), cloud(50, 2, 2)
    with pytest.warns(NotConvergedWarning):
        result = otdd.dataset_distance(x, y, solver=otdd.Converged(max_seconds=1e-6), **PLAIN)
    assert not result.converged
    assert result.bounds[0] <= result.value <= result.bounds[1]
    assert len(result.gromov.starts) == 1


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("scale", "compute"),
    [
        *((1e20, DOUBLE), (1e-6, "cpu"), (1e-20, DOUBLE), (1e-3, DOUBLE)),
        *((1e-3, "cpu"), (0.1, "cpu"), (1e6, "cpu")),
    ],
)
def test_scales_whose_fourth_powers_are_far_from_1(scale, compute):
    x, y = cloud(12, 3, 1), cloud(9, 2, 2)
    plain = otdd.dataset_distance(x, y, compute=DOUBLE, **PLAIN)
    dtype, near = (torch.float64, 1e-6) if compute is DOUBLE else (torch.float32, 1e-3)
    moved = [replace(side, features=(scale * side.features).to(dtype)) for side in (x, y)]
    scaled = otdd.dataset_distance(*moved, compute=compute, **PLAIN)
    assert scaled.value == pytest.approx(plain.value * scale**4, rel=near)


def test_extremes():
    """Points that are all one, one point, and products that overflow."""
    x, y = cloud(12, 3, 1), cloud(9, 2, 2)
    # Equal but for the rounding of their mean.
    tenths = [otdd.LabeledSamples(torch.full((7, k), k / 10), None, ()) for k in (1, 3)]
    nothing = otdd.dataset_distance(*tenths, compute="cpu", **PLAIN)
    assert (nothing.value, nothing.bounds[0]) == (0, 0)
    # Their fourth powers are finite, the products of steps are not all.
    far = [replace(side, features=1e60 * side.features) for side in (x, y)]
    assert math.isfinite(otdd.dataset_distance(*far, epsilon=0, compute=DOUBLE, **PLAIN).value)
    spread = float(x.masses @ squared(x).square() @ x.masses)
    for one in (otdd.LabeledSamples(torch.ones(4, 2), None, ()), cloud(1, 2, 1)):
        result = otdd.dataset_distance(x, one, compute="cpu", **PLAIN)
        assert result.value == pytest.approx(spread, rel=1e-9)
        assert result.bounds[0] == pytest.approx(spread, rel=1e-5)
        assert otdd.dataset_distance(one, one, compute="cpu", **PLAIN).value == 0
    with pytest.raises(InputError, match="overflow"):
        otdd.dataset_distance(replace(x, features=1e90 * x.features), y, **PLAIN)


def test_rounding_of_the_energy_is_bounded():
    """The energy in float64 against that in twice the digits, far from the origin."""
    for seed in range(4):
        x = cloud(15, 3, seed)
        x = replace(x, features=x.features + 10.0**seed)
        y, order = copied(x, seed)
        found = Energy(Cloud.of(x), Cloud.of(y))
        plan = torch.zeros(15, 15, dtype=torch.float64)
        plan[order, torch.arange(15)] = 1 / 15
        norms = float(found.x.centred_norms @ plan @ found.y.centred_norms)
        value = found.value(norms, found.x.points.T @ plan @ found.y.points)
        first, second = (
            np.square(each[:, None] - each).sum(2)
            for each in (
                x.features.numpy().astype(np.longdouble),
                y.features.numpy().astype(np.longdouble),
            )
        )
        places = np.argsort(order.numpy())
        wanted = float(np.square(first - second[places][:, places]).mean())
        assert abs(value - wanted) <= found.rounding


@pytest.mark.parametrize("weights", [False, True])
def test_bounds_that_are_attained_hold_with_their_rounding(weights):
    """Copies by an isometry, whose least energy is 0 but for the rounding of the copy."""
    for seed in range(8):
        x = cloud(40, 4, seed)
        masses = torch.rand(40, generator=torch.Generator().manual_seed(seed)) + 0.1
        x = replace(x, weights=masses if weights else None)
        y, order = copied(x, seed)
        y = replace(y, weights=masses[order] if weights else None)
        found = Energy(Cloud.of(x), Cloud.of(y))
        assert eccentricity_bound(found) == 0
        assert spectral_bound(found) == 0
        result = otdd.dataset_distance(x, y, epsilon=0, starts=1, compute=DOUBLE, **PLAIN)
        assert 0 == result.bounds[0] <= result.value < result.bounds[1]
        # The energy of the permutation in twice the digits, which is more than 0.
        sides = (each.features.numpy().astype(np.longdouble) for each in (x, y))
        first, second = (np.square(each[:, None] - each).sum(2) for each in sides)
        gaps = np.square(first[order][:, order] - second)
        a = y.masses.numpy().astype(np.longdouble)
        assert 0 < a @ gaps @ a <= result.bounds[1]


def test_spectra_of_points_of_one_length_hold_with_their_rounding():
    """Where norms do not differ only eigenvalues and sums are off."""
    for seed in range(12):
        draw = torch.Generator().manual_seed(seed)
        half = torch.randn(20, 4, generator=draw, dtype=torch.float64)
        half /= torch.linalg.vector_norm(half, dim=1, keepdim=True)
        x = otdd.LabeledSamples(torch.cat((half, -half)), None, ())
        y, _ = copied(x, seed)
        assert spectral_bound(Energy(Cloud.of(x), Cloud.of(y))) == 0


@pytest.mark.parametrize("scale", [2.0, 0.25, 1 + 2**-20])
def test_the_eccentricity_bound_of_a_scaled_copy_is_its_energy(scale):
    for seed in range(6):
        x = cloud(30, 4, seed)
        y = replace(x, features=scale * x.features)
        found = eccentricity_bound(Energy(Cloud.of(x), Cloud.of(y)))
        sides = (each.features.numpy().astype(np.longdouble) for each in (x, y))
        first, second = (np.square(each[:, None] - each).sum(2) for each in sides)
        wanted = np.square(first - second).mean()
        assert wanted * (1 - 1e-3) <= found <= wanted


def test_a_shuffled_copy_is_at_no_negative_distance():
    draw = torch.Generator().manual_seed(0)
    counts = torch.poisson(torch.full((100, 50), 0.1), generator=draw)
    other = counts[torch.randperm(100, generator=draw)]
    result = otdd.dataset_distance(counts, other, epsilon=0, compute="cpu", **PLAIN)
    assert result.bounds[0] == 0 <= result.value


def test_accepted_steps_fall_where_steps_are_stretched(monkeypatch):
    """The objective of each, from all entries of its plan; some steps rise, and are retaken."""
    rises = 0
    for seed in range(3):
        x, y = cloud(30, 4, seed), cloud(25, 3, seed + 30)
        entropic = problem(x, y, relative=0.02)
        taken = []

        def kept(*given, taken=taken, **settings):
            taken.append(take_step(*given, **settings))
            return taken[-1]

        monkeypatch.setattr(solve, "take_step", kept)
        draw = torch.Generator().manual_seed(seed)
        matrix = torch.randn(4, 3, generator=draw, dtype=torch.float64)
        found = Search(entropic, Converged(1e-10)).descend(
            matrix, Converged(1e-10), 1e-9 * entropic.independent
        )
        independent, objectives = x.masses[:, None] * y.masses, []
        for step in taken:
            apply = plan_of(entropic.linearised(step.matrix), step.solved.xy)
            plan = apply(torch.eye(25, dtype=torch.float64), False).values
            entropy = float(torch.xlogy(plan, plan / independent).sum())
            objectives.append(dense_energy(plan, x, y) + entropic.compared.epsilon * entropy)
        assert np.allclose(objectives, [step.objective for step in taken], rtol=1e-7)
        accepted = [
            each for each in objectives if np.isclose(found.objectives, each, rtol=1e-9).any()
        ]
        assert len(accepted) >= found.steps == len(found.objectives)
        assert (np.diff(accepted) <= 1e-9 * entropic.independent).all()
        assert min(objectives) == pytest.approx(found.objective, rel=1e-7)
        rises += int((np.diff(objectives) > 0).sum())
    assert rises > 0


def test_the_report_shows_the_source_as_mapped(tmp_path):
    x, y = cloud(30, 4, 1, classes=3, name="left"), cloud(20, 2, 2, classes=2, name="right")
    weights = torch.ones(30)
    weights[5] = 0
    settings = {**PLAIN, "labels": "gaussian", "lambda_y": 0.1, "starts": 2}
    # A row without mass has no image at epsilon 0.
    result = otdd.dataset_distance(replace(x, weights=weights), y, epsilon=0, **settings)
    report = write_report(result, tmp_path)
    assert {"projection.png", "class_coupling.csv"} <= {path.name for path in report.written}
    report.require_complete()
    console = Console(file=io.StringIO(), width=100)
    console.print(summary_table(result.to_dict()))
    printed = console.file.getvalue()
    for words in ("gromov", "not an error", "axes", "30 × 20, 4 and 2 features", "GW"):
        assert words in printed
    assert "subsample" not in printed
    assert "solver bounds" not in printed + str(result)
    assert "subsample" not in str(result)
    assert result.ground == "gromov"
    table = io.StringIO()
    nearest = nearest_table(result.class_distances.nearest(), result.ground)
    Console(file=table, width=100).print(nearest)
    assert "squared" not in table.getvalue() + (tmp_path / "nearest_classes.csv").read_text()
