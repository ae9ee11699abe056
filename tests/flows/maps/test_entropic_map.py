"""New points along the velocity fields of a flow."""

from dataclasses import replace

import pytest
import torch
from refusals import naming
from small_flows import DOUBLE

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.flows.maps import EntropicMap, VelocityField, relative_error
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.problem import Problem


@pytest.mark.slow
def test_held_out_points_go_where_the_flow_takes_them(held_out):
    flow, samples, truth = held_out
    maps = {
        "entropic": flow.map("entropic"),
        "unfelt": flow.map("entropic", mass=0.0),
        "nearest": flow.map("nearest"),
        "residual": flow.map("residual", device="cpu"),
    }
    errors = {name: relative_error(one, samples, truth) for name, one in maps.items()}
    assert errors["entropic"] < 0.05
    assert errors["unfelt"] < 0.25
    assert errors["nearest"] < 0.4
    assert errors["residual"] < 0.4
    assert 2 * errors["entropic"] < min(errors[name] for name in ("unfelt", "nearest", "residual"))
    # Particles go where they ended, and nearly so by what a network has learned.
    for name, most in (("unfelt", 1e-5), ("nearest", 1e-6), ("residual", 0.12)):
        assert relative_error(maps[name], flow.source, flow.samples) < most, name


def test_all_but_the_features_stays_and_unlabelled_points_are_of_their_nearest_class(small):
    flow, samples = small
    entropic = flow.map("entropic")
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
    close = replace(flow.source, features=flow.source.features + 1e-3)
    bare = entropic(replace(close, labels=None))
    assert bare.labels is None
    assert torch.equal(bare.features, entropic(close).features)


def test_the_class_of_an_unlabelled_point_is_chosen_before_the_first_step():
    """Two classes that change places between the steps, and whose targets lie far apart."""
    before = LabeledSamples(torch.tensor([[-1.0], [1.0]]), torch.tensor([0, 1]), ("west", "east"))
    target = replace(before, features=5 * before.features)
    table = torch.tensor([[0, 100.0], [100.0, 0]], dtype=torch.float64).repeat(2, 2)
    problem = Problem.between(before, target, 0.1, table, None, DOUBLE)
    first = VelocityField.of(problem, problem.solve(otdd.Converged(1e-8)))
    second = replace(first, particles=replace(before, features=-before.features))
    entropic = EntropicMap([first, second], [0.1, 0.1])
    point = LabeledSamples(torch.tensor([[-0.5]]), None, ())
    west = LabeledSamples(point.features, torch.tensor([0]), ("west",))
    assert torch.equal(entropic(point).features, entropic(west).features)


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
