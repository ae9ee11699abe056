"""New points along a flow: by its velocities, by the nearest particle, by a network."""

from dataclasses import replace

import pytest
import torch
from refusals import naming
from small_flows import DOUBLE, blobs, digits, flow

import otdd_flash as otdd
from experiments.flow_maps import relative_error
from otdd_flash.derivatives import groups
from otdd_flash.errors import InputError
from otdd_flash.flows import maps, residual_map
from otdd_flash.flows.maps import EntropicMap, NearestParticleMap, VelocityField
from otdd_flash.flows.residual_map import ResidualMap
from otdd_flash.operators.comparison import Comparison
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.solving import solve


@pytest.fixture(scope="module")
def small():
    """A flow of few points and two steps, for what holds of any; and points of its own classes."""
    options = {"solver": otdd.Converged(1e-2), "epsilon": 2.0, "keep_moments": True}
    return flow(blobs(12, 4), blobs(17, 4, seed=1), **options), blobs(5, 4, seed=2)


@pytest.mark.slow
def test_held_out_points_go_where_the_flow_takes_them():
    """Upright digits towards rotated ones, epsilon 5% of the mean cost."""
    everything, target = digits("train", 180), digits("test", 180, rotate=90)
    order = torch.randperm(180, generator=torch.Generator().manual_seed(0))
    inside, outside = order[:150], order[150:]
    options = {"steps": 3, "stepping": otdd.Stepping(0.2), "keep_moments": True}
    options["solver"] = otdd.Converged(1e-5)
    full = flow(everything, target, epsilon=None, epsilon_relative=0.05, **options)
    result = flow(everything.take(inside), target, epsilon=full.settings["epsilon"], **options)
    samples, truth = everything.take(outside), full.samples.take(outside)
    followed = {
        "entropic": result.map("entropic"),
        "unfelt": result.map("entropic", mass=0.0),
        "nearest": result.map("nearest"),
        "residual": result.map("residual", device="cpu"),
    }
    errors = {name: relative_error(one, samples, truth) for name, one in followed.items()}
    assert errors["entropic"] < 0.05
    assert errors["unfelt"] < 0.25
    assert errors["nearest"] < 0.4
    assert errors["residual"] < 0.4
    assert 2 * errors["entropic"] < min(errors[name] for name in ("unfelt", "nearest", "residual"))
    # Particles go where they ended, and nearly so by what a network has learned.
    for name, most in (("unfelt", 1e-5), ("nearest", 1e-6), ("residual", 0.12)):
        assert relative_error(followed[name], result.source, result.samples) < most, name


def test_all_but_the_features_stays_and_unlabelled_points_are_of_their_nearest_class(small):
    result, samples = small
    entropic = result.map("entropic")
    samples = replace(samples, weights=torch.arange(5, dtype=torch.float64), name="new")
    moved = entropic(samples)
    assert torch.equal(moved.labels, samples.labels)
    assert (moved.class_names, moved.name) == (samples.class_names, "new")
    assert torch.equal(moved.masses, samples.masses)
    assert moved.features.dtype == samples.features.dtype
    assert not torch.equal(moved.features, samples.features)
    # Classes are matched by their names.
    renamed = replace(samples, labels=2 - 2 * samples.labels, class_names=("b", "unused", "a"))
    assert torch.equal(entropic(renamed).features, moved.features)
    close = replace(result.source, features=result.source.features + 1e-3)
    bare = entropic(replace(close, labels=None))
    assert bare.labels is None
    assert torch.equal(bare.features, entropic(close).features)


# The point is nearer to the other class than the particle of its own.
@pytest.mark.filterwarnings("ignore:velocities of new points are not determined")
def test_the_class_of_an_unlabelled_point_is_chosen_before_the_first_step():
    """Two classes that change places between the steps, and whose targets lie far apart."""
    before = LabeledSamples(torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 1]), ("west", "east"))
    target = replace(before, features=5 * before.features)
    table = torch.tensor([[0, 100.0], [100.0, 0]], dtype=torch.float64).repeat(2, 2)
    comparison = Comparison.between(before, target, 0.1, table, None, DOUBLE)
    solved = solve(comparison, otdd.Converged(1e-8))
    potentials = solved.xy.g, solved.xx.f
    first = VelocityField(before, target, table, *potentials, 0.1, otdd.GroundCost(), DOUBLE)
    second = replace(first, particles=replace(before, features=-before.features))
    entropic = EntropicMap([first, second], [0.1, 0.1])
    point = LabeledSamples(torch.tensor([[-0.5]]), None, ())
    west = LabeledSamples(point.features, torch.tensor([0]), ("west",))
    assert torch.equal(entropic(point).features, entropic(west).features)


def between_two(epsilon):
    """The field of x = {0, 10} and y = {1, 10}, whose f1 - f2 is 5 by symmetry at every epsilon."""
    sides = [LabeledSamples(torch.tensor([[low], [10.0]]).double(), None, ()) for low in (0.0, 1.0)]
    solved = solve(Comparison.between(*sides, epsilon, None, None, DOUBLE), otdd.Converged())
    table, potentials = torch.zeros(2, 2).double(), (solved.xy.g, solved.xx.f)
    return VelocityField(*sides, table, *potentials, epsilon, otdd.GroundCost(), DOUBLE)


def at(*places):
    return LabeledSamples(torch.tensor(places).double()[:, None], None, ())


@pytest.mark.parametrize("offset", [-20.0, 0.0, 20.0])
def test_velocities_between_groups_are_balanced_and_reported(offset):
    """An offset that changes no velocity of a particle takes a point between them to either."""
    field = between_two(0.5)
    field = replace(field, g=field.g + torch.tensor([0.0, offset]))
    # To send the point to either particle costs alike, and g2 - g1 = 4.5 to either target, too.
    with pytest.warns(otdd.NotConvergedWarning, match="not determined") as told:
        found = field.velocity(at(5.0))
    assert len(told) == 1
    assert "velocities of new points" in str(told[0].message)
    assert "may move by anything in [-45, 45]" in str(told[0].message)
    assert float(found) == pytest.approx(5 - 5.5, abs=0.1)
    # Particles, and points that no offset takes to the other target, say nothing.
    expected = torch.tensor([[-1.0], [0.0], [-1.0]]).double()
    torch.testing.assert_close(field.velocity(at(0.0, 10.0, -30.0)), expected, rtol=0, atol=1e-5)
    # Said once for all steps.
    with pytest.warns(otdd.NotConvergedWarning, match="not determined") as told:
        EntropicMap([field, field], [0.1, 0.1])(at(5.0))
    assert len(told) == 1


def test_velocities_depend_on_the_offsets_of_particles_that_leave_themselves_too():
    """Two classes nearer to each other than to themselves, and one that has no particle."""
    own = torch.tensor([[10.0, 0, 5], [0, 20, 7], [5, 7, 0]]).double()
    names, target = ("p", "q", "r"), LabeledSamples(torch.zeros(1, 1).double(), None, ())
    particles = LabeledSamples(torch.tensor([[0.0], [1.0]]).double(), torch.tensor([0, 1]), names)
    table, cost = torch.block_diag(own, torch.zeros(1, 1)).double(), otdd.GroundCost(lambda_y=1.0)
    solved = solve(
        Comparison.between(particles, target, 0.3, table, cost, DOUBLE), otdd.Converged()
    )
    new = LabeledSamples(torch.zeros(1, 1).double(), torch.tensor([2]), names)
    for offset in (-7.0, 0.0, 3.0):
        f = solved.xx.f + torch.tensor([offset, -offset])
        field = VelocityField(particles, target, table, solved.xy.g, f, 0.3, cost, DOUBLE)
        with pytest.warns(otdd.NotConvergedWarning, match="keep within each at most"):
            found = field.velocity(new)
        # f2 - f1 = 5 outweighs what q costs more than p; with f2 = f1 the point would go to p.
        assert float(found) == pytest.approx(1, abs=1e-3)


def test_a_field_of_one_group_is_sampled_once(monkeypatch):
    """And with it all that the ordinary way costs more."""
    asked, connected = [], groups.connected
    monkeypatch.setattr(groups, "connected", lambda plan: asked.append(1) or connected(plan))
    monkeypatch.setattr(groups, "contracted", None)
    field = between_two(20.0)
    for place in (5.0, 6.0):
        field.velocity(at(place))
    assert len(asked) == 1


def test_impossible_maps_and_points_are_refused(small):
    entropic = small[0].map("entropic")
    fields, sizes = entropic.fields, entropic.step_sizes
    ten = LabeledSamples(torch.zeros(1, 4), torch.tensor([0]), ("ten",))
    own = replace(fields[0].particles, class_names=("b", "b"))
    twins = replace(fields[0], particles=own)
    points = replace(small[1], labels=0 * small[1].labels, class_names=("b",))
    for call, message in (
        (lambda: EntropicMap([], []), "at least one step, got 0"),
        (lambda: EntropicMap(fields, sizes[:1]), "got 1 sizes for 2 fields"),
        (lambda: EntropicMap(fields, [float("nan")] * 2), "finite, got nan"),
        (lambda: EntropicMap(fields, sizes, (1, 0)), r"\(lo, hi\) with lo < hi, got \(1, 0\)"),
        (lambda: EntropicMap(fields, sizes, (1, 1)), r"lo < hi, got \(1, 1\)"),
        (lambda: EntropicMap(fields, sizes, mass=1.0), r"\[0, 1\), got 1.0"),
        (lambda: EntropicMap(fields, sizes, mass=-0.1), r"\[0, 1\), got -0.1"),
        (lambda: EntropicMap(fields, sizes, mass=float("nan")), r"\[0, 1\), got nan"),
        (
            lambda: entropic(LabeledSamples(torch.zeros(2, 3), None, ())),
            "3 features, but the particles of the flow had 4",
        ),
        (lambda: entropic(ten), "did not move: ten; it moved a, b"),
        (lambda: twins.velocity(points), "share names"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            call()


@pytest.mark.slow
def test_a_point_far_from_all_particles_is_on_its_own(small):
    (field, _), draw = small[0].map("entropic").fields, torch.Generator().manual_seed(2)
    features = torch.randn(3, 4, generator=draw, dtype=torch.float64) + 1e3
    far = replace(small[1].take(torch.arange(3)), features=features)
    nearest = torch.cdist(far.features, field.target.features).argmin(1)
    # Twice the weight 1/2 of squared distances.
    expected = far.features - field.target.features[nearest]
    assert float((field.velocity(far, mass=0.1) - expected).norm() / expected.norm()) < 2e-3
    assert bool(torch.isfinite(field.velocity(far)).all())


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("backend", "precision", "shift"),
    [("torch", "high", 4096.0), ("torch", "double", 4096.0), ("triton", "fast", 0.0)],
)
def test_neither_precision_nor_a_distant_origin_costs_accuracy(backend, precision, shift, small):
    """In any precision the field is that of the original points."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    (field, _), samples = small[0].map("entropic").fields, small[1]

    def away(samples):
        return replace(samples, features=samples.features + shift)

    there = replace(
        field,
        compute=otdd.ComputeOptions(device, backend, precision),
        particles=away(field.particles),
        target=away(field.target),
    )
    close = 1e-9 if precision == "double" else 1e-5
    expected = field.velocity(samples, mass=0.04)
    found = there.velocity(away(samples), mass=0.04)
    torch.testing.assert_close(found, expected, rtol=close, atol=close)


def line(*places, labels=None):
    """Points on a line."""
    indices = None if labels is None else torch.tensor(labels)
    return LabeledSamples(torch.tensor(places).unsqueeze(1), indices, ("a", "b") if labels else ())


@pytest.mark.parametrize("block", [1, 1000, 1 << 24])
def test_the_search_is_exact_in_any_chunks_and_far_from_the_origin(block, monkeypatch):
    monkeypatch.setattr(maps, "BLOCK_ELEMENTS", block)
    draw = torch.Generator().manual_seed(0)
    particles, samples = (
        LabeledSamples(torch.randn(count, 5, generator=draw), None, ()) for count in (70, 33)
    )
    expected = torch.cdist(samples.features.double(), particles.features.double()).argmin(1)
    assert torch.equal(maps.nearest_particles(samples, particles), expected)
    offset = 1000.0 + torch.arange(64) / 64
    particles = LabeledSamples(torch.stack((offset, offset), 1), None, ())
    samples = replace(particles, features=particles.features + 0.002)
    assert torch.equal(maps.nearest_particles(samples, particles), torch.arange(64))


def test_particles_with_mass_of_the_same_class_lead():
    before, after = (0.0, 1.0, 5.0), (10.0, 21.0, 35.0)
    three = line(0.1, 0.1, 4.0, labels=[0, 1, 1])
    # The same points with the classes numbered the other way round.
    other = LabeledSamples(three.features, torch.tensor([1, 0, 0]), ("b", "a"))
    massless = torch.tensor([0.0, 1.0, 2.0])
    for labels, samples, weights, expected in (
        ([0, 1, 1], three, None, [10.1, 20.1, 34.0]),
        ([0, 1, 1], other, None, [10.1, 20.1, 34.0]),
        # Without labels on either side place alone decides.
        ([0, 1, 1], line(0.1, 0.9), None, [10.1, 20.9]),
        (None, line(0.1, 0.9, labels=[1, 0]), None, [10.1, 20.9]),
        # Those without mass lead nobody.
        ([0, 0, 1], line(0.1, 0.1, labels=[0, 0]), massless, [20.1, 20.1]),
        ([0, 0, 1], line(0.1, 0.1), massless, [20.1, 20.1]),
    ):
        start = replace(line(*before, labels=labels), weights=weights)
        found = NearestParticleMap(start, line(*after, labels=labels))(samples)
        with naming(expected):
            torch.testing.assert_close(found.features.squeeze(1), torch.tensor(expected))


def test_the_error_is_a_root_mean_square_by_mass():
    samples, truth = line(0.0, 1.0), line(2.0, 2.0)
    heavy = replace(samples, weights=torch.tensor([1.0, 3.0]))
    for moved, given, expected in (
        (lambda _: truth, samples, 0.0),
        (lambda given: given, samples, 1.0),
        # Errors 1 and 0, distances 2 and 1.
        (lambda _: line(1.0, 2.0), heavy, (1 / 7) ** 0.5),
        (lambda _: line(1.0, 2.0), samples, (1 / 5) ** 0.5),
    ):
        assert relative_error(moved, given, truth) == pytest.approx(expected)


def test_what_has_no_neighbour_is_refused():
    start, two = line(0.0, 1.0, labels=[0, 1]), line(0.0, 1.0)
    light, plane = replace(start, weights=torch.tensor([1.0, 0.0])), torch.zeros(2, 2)
    new = LabeledSamples(torch.zeros(1, 1), torch.tensor([0]), ("c",))
    for call, message in (
        (
            lambda: NearestParticleMap(start, start)(LabeledSamples(plane, None, ())),
            "2 features, but the particles of the flow had 1",
        ),
        (lambda: NearestParticleMap(start, start)(new), "did not move: c; it moved a, b"),
        (
            lambda: NearestParticleMap(light, start)(line(0.0, labels=[1])),
            "no particle of class 'b' has mass",
        ),
        (
            lambda: NearestParticleMap(start, line(0.0, 1.0, 2.0)),
            r"before has shape \(2, 1\) and after \(3, 1\)",
        ),
        (lambda: relative_error(lambda given: given, two, two), "where the samples began"),
        (lambda: relative_error(lambda given: given, two, line(0, 0, 0)), "row i of both"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            call()


NAMES = ("a", "b", "c")
SHORT = {"hidden": 16, "epochs": 3, "device": "cpu"}


def turned(n=120, *, labels=True, seed=0):
    """Points and where they go: by a quarter turn, and by their class number along an axis."""
    points = torch.randn(n, 2, generator=torch.Generator().manual_seed(seed))
    classes = torch.arange(n) % 3
    before = LabeledSamples(points, classes if labels else None, NAMES)
    ends = torch.stack((-points[:, 1], points[:, 0] + 3 * classes * labels), 1)
    return before, replace(before, features=ends)


def weights_of(residual):
    return torch.cat([value.flatten() for value in residual.network.state_dict().values()])


def test_it_is_the_identity_before_training_and_of_particles_that_stay():
    before, after = turned()
    for end, epochs in ((after, 0), (before, 3)):
        residual = ResidualMap.fit(before, end, **{**SHORT, "epochs": epochs})
        assert torch.equal(residual(before).features, before.features)


@pytest.mark.slow
def test_it_learns_a_map_of_places_and_classes():
    residual = ResidualMap.fit(*turned(300), hidden=64, device="cpu")
    assert relative_error(residual, *turned(100, seed=1)) < 0.15
    # Equal points of different classes go different ways, by their names.
    point = LabeledSamples(torch.zeros(3, 2), torch.arange(3), NAMES)
    places = residual(point).features[:, 1]
    torch.testing.assert_close(places, torch.tensor([0.0, 3.0, 6.0]), rtol=0.0, atol=0.6)
    renamed = LabeledSamples(torch.zeros(3, 2), torch.tensor([2, 0, 1]), ("b", "c", "a"))
    assert torch.equal(residual(renamed).features, residual(point).features)
    # A few particles are learned by heart.
    few = [side.take(torch.arange(9)) for side in turned()]
    assert relative_error(ResidualMap.fit(*few, hidden=64, device="cpu"), *few) < 0.35


def test_a_seed_gives_one_map_and_leaves_the_global_generator_alone():
    state = torch.random.get_rng_state()
    first, other = (weights_of(ResidualMap.fit(*turned(), **SHORT, seed=k)) for k in (3, 4))
    assert torch.equal(state, torch.random.get_rng_state())
    torch.rand(5)
    assert torch.equal(first, weights_of(ResidualMap.fit(*turned(), **SHORT, seed=3)))
    assert not torch.equal(first, other)


@pytest.mark.slow
def test_units_origin_and_particles_without_mass_do_not_matter():
    before, after = turned()
    expected = ResidualMap.fit(before, after, **SHORT)(before).features
    there = [replace(side, features=1024 * side.features + 4096) for side in (before, after)]
    found = ResidualMap.fit(there[0], there[1], **SHORT)(there[0]).features
    torch.testing.assert_close((found - 4096) / 1024, expected, rtol=1e-3, atol=1e-3)
    weights = (torch.arange(120) % 4 > 0).double()
    few = torch.nonzero(weights).squeeze(1)
    expected = ResidualMap.fit(before.take(few), after.take(few), **SHORT)
    spoiled = after.features.masked_fill((weights == 0)[:, None], 1e6)
    ends = replace(after, features=spoiled)
    weighted = ResidualMap.fit(replace(before, weights=weights), ends, **SHORT)
    torch.testing.assert_close(weights_of(weighted), weights_of(expected), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_what_nothing_explains_is_left_alone():
    """An epoch that makes it worse than the identity is not kept."""
    before, _ = turned(60, labels=False)
    noise = torch.randn(60, 2, generator=torch.Generator().manual_seed(7))
    residual = ResidualMap.fit(
        before, replace(before, features=before.features + noise), device="cpu"
    )
    assert float((residual(before).features - before.features).norm()) < 0.6 * float(noise.norm())
    # Where two ways part at one place, the mean of where they lead, by mass.
    before = LabeledSamples(torch.zeros(400, 1), None, (), torch.tensor([9.0, 1.0]).repeat(200))
    after = LabeledSamples(torch.tensor([[0.0], [10.0]]).repeat(200, 1), None, ())
    residual = ResidualMap.fit(before, after, hidden=8, device="cpu")
    assert float(residual(before).features[0]) == pytest.approx(1.0, abs=0.5)


def test_training_ends_thirty_epochs_after_the_best(monkeypatch):
    errors = []

    def error(*_):
        errors.append(1.0 if len(errors) == 20 else 2.0)
        return errors[-1]

    monkeypatch.setattr(residual_map, "_error_of", error)
    ResidualMap.fit(*turned(20), hidden=4, device="cpu")
    # Before training, and after every epoch.
    assert len(errors) == 1 + 20 + residual_map.PATIENCE


@pytest.mark.parametrize("labels", [False, True])
def test_saved_and_loaded_it_is_the_same_bit_for_bit(tmp_path, labels, monkeypatch):
    before, after = turned(labels=labels)
    residual = ResidualMap.fit(before, after, **SHORT, layers=3)
    path = residual.save(tmp_path / "sub" / "map.safetensors")
    loaded = ResidualMap.load(path, device="cpu")
    assert torch.equal(loaded(before).features, residual(before).features)
    assert loaded.class_names == residual.class_names
    assert [entry.name for entry in path.parent.iterdir()] == ["map.safetensors"]
    # All but the features stays.
    samples = replace(before, features=before.features.double(), name="new")
    moved = residual(samples)
    assert (moved.name, moved.class_names) == ("new", before.class_names)
    assert moved.features.dtype == torch.float64
    # Row by row: what else is in the batch does not matter, nor how the rows are chunked.
    monkeypatch.setattr(residual_map, "ROWS_AT_ONCE", 50)
    torch.testing.assert_close(residual(samples).features, moved.features)
    rows = torch.arange(7).flip(0)
    torch.testing.assert_close(residual(samples.take(rows)).features, moved.features[rows])


def test_files_and_points_that_it_cannot_take_are_refused(tmp_path):
    from safetensors.torch import save_file

    before, after = turned()
    residual = ResidualMap.fit(before, after, **SHORT)
    path = residual.save(tmp_path / "map.safetensors")
    (tmp_path / "half").write_bytes(path.read_bytes()[:900])
    save_file({"x": torch.zeros(1)}, tmp_path / "other")
    light = replace(before, weights=(before.labels != 2).double())

    def points(dim, *names):
        return LabeledSamples(torch.zeros(1, dim), torch.tensor([0]) if names else None, names)

    for call, message in (
        (lambda: ResidualMap.load(tmp_path / "half"), "half is damaged"),
        (lambda: ResidualMap.load(tmp_path / "missing"), r"no residual map in .*missing"),
        (lambda: ResidualMap.load(tmp_path / "other"), "no residual map in"),
        (lambda: residual.save(path / "map.safetensors"), "cannot write"),
        (lambda: residual(points(3, "a")), "3 features, but the particles of the flow had 2"),
        (lambda: residual(points(2, "d")), "did not move: d; it moved a, b, c"),
        (lambda: residual(points(2)), "has no labels, but this map was trained with"),
        (lambda: ResidualMap.fit(light, after, **SHORT)(before), "did not move: c; it moved a, b"),
        (lambda: ResidualMap.fit(before, after.take(torch.arange(5))), "row i of both"),
        (lambda: ResidualMap.fit(before, after, hidden=0), "hidden must be at least .*, got 0"),
        (lambda: ResidualMap.fit(before, after, layers=0), "layers must be at least .*, got 0"),
        (lambda: ResidualMap.fit(before, after, epochs=-1), "epochs must be at least .*, got -1"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            call()
