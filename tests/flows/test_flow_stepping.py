"""How a flow steps: optimisers, schedules, box, noise, Langevin, minibatches."""

import math
from dataclasses import replace

import pytest
import torch
from refusals import naming
from small_flows import blobs, flow, mode_of, rough_flow

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.flows.stepping import Batch, Stepper, Stepping, generator, optimizers

ZEROS = torch.zeros(4, 3, dtype=torch.float64)
ONES = torch.ones(4, 3, dtype=torch.float64)


def walk(stepping, steps, temperature=0.0):
    """Where points at 0 are after steps of the velocity 1."""
    points = ZEROS.clone()
    stepper = Stepper({"points": points}, stepping, steps, temperature)
    for step in range(steps):
        stepper.step({"points": torch.ones_like(points)}, step, generator(0, step, 1))
    return points


SCHEDULES = {
    "constant": [0.4, 0.4, 0.4, 0.4],
    "inverse_sqrt": [0.4, 0.4 / math.sqrt(2), 0.4 / math.sqrt(3), 0.2],
    "cosine": [0.4, 0.2 + 0.2 * math.sqrt(0.5), 0.2, 0.2 - 0.2 * math.sqrt(0.5)],
    "linear": [0.4, 0.3, 0.2, 0.1],
}


def test_schedules_have_their_values_and_steps_follow_them():
    for schedule, sizes in SCHEDULES.items():
        stepping = Stepping(0.4, schedule=schedule)
        assert [stepping.step_size_at(k, 4) for k in range(4)] == pytest.approx(sizes), schedule
        torch.testing.assert_close(walk(stepping, 4), -sum(sizes) * ONES)
    history = rough_flow(blobs(9), blobs(9, seed=1), steps=4, stepping=stepping).history
    assert [record.step_size for record in history] == pytest.approx([*sizes, 0.0])


def test_options_reach_the_optimiser_whose_name_is_in_any_case():
    heavy = walk(Stepping(0.1, optimizer_options={"momentum": 0.5}), 3)
    torch.testing.assert_close(heavy, -0.1 * (1 + 1.5 + 1.75) * ONES)
    for name in sorted(optimizers()):
        walked = walk(Stepping(0.1, name.title()), 9)
        # No row depends on another, and all began as one.
        assert bool((walked == walked[0, 0]).all()), name
        assert -9 < float(walked[0, 0]) < 0, name


def test_points_stay_in_the_box_whatever_moves_them_and_they_alone():
    walked = walk(Stepping(0.1, box=(0.2, 0.7)), 9, temperature=10.0)
    assert walked.min() == 0.2
    assert walked.max() == 0.7
    variables = {"points": ZEROS.clone(), "means": ZEROS.clone()}
    stepper = Stepper(variables, Stepping(1.0, box=(-0.5, 0.5)), 1, 0.0)
    stepper.step({"points": ONES, "means": ONES}, 0, generator(0, 0, 1))
    assert torch.equal(variables["points"], -0.5 * ONES)
    assert torch.equal(variables["means"], -ONES)


@pytest.mark.slow
def test_entropy_functionals_add_that_noise_to_a_flow_within_its_box():
    source, target = blobs(300, classes=1), blobs(5, seed=1, classes=1)
    hot = {"functionals": [{"name": "entropy", "weight": weight} for weight in (0.3, 0.1)]}
    boxed = {"stepping": Stepping(0.3, box=(-1.0, 0.5))}
    options = {"steps": 1, "labels": "none", "epsilon": 9.0}
    still, moved, within, other = (
        rough_flow(source, target, **options, **more).samples.features
        for more in ({}, hot, {**hot, **boxed}, {**hot, "seed": 1})
    )
    assert float((moved - still).square().mean()) == pytest.approx(2 * 0.4 * 0.3, rel=0.1)
    torch.testing.assert_close(within, moved.clamp(-1.0, 0.5))
    assert not torch.equal(moved, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "attached", "functionals": [{"name": "entropy", "weight": 1.0}]},
        {"mode": "features", "functionals": [{"name": "norm", "weight": 1.0}]},
        {"mode": "joint"},
        {"mode": "augmented"},
    ],
    ids=str,
)
def test_only_rows_of_the_minibatch_move(options):
    """By whatever moves them: else functionals would outweigh the divergence by n / minibatch."""
    source, target = blobs(9), blobs(11, seed=1)
    result = rough_flow(source, target, steps=1, stepping=Stepping(0.3, minibatch=4), **options)
    assert int((result.samples.features != source.features).any(1).sum()) == 4


@pytest.mark.slow
def test_every_variable_moves_a_batch_share_of_its_way_on_average():
    """Particles of a batch take a whole step, the others none: variables must not overtake them."""
    source = blobs(12)
    # All target points in one place: what a particle does then hardly depends on its batch.
    target = replace(blobs(12, seed=1), features=torch.full((12, 3), 6.0, dtype=torch.float64))
    for mode in ("joint", "augmented"):
        moving = mode_of(mode, source, target, otdd.labels.Means())
        whole = moving.evaluate(source.features).variables["means"]
        batches = (Batch(rows, rows) for rows in torch.arange(12).reshape(3, 4))
        total = sum(moving.evaluate(source.features, one).variables["means"] for one in batches)
        with naming(mode):
            torch.testing.assert_close(total, whole, rtol=0.15, atol=0.1)


@pytest.mark.slow
def test_minibatches_hold_only_particles_with_mass_in_their_type():
    weights = torch.zeros(9, dtype=torch.float64)
    weights[3:5] = 1
    source = replace(blobs(9), weights=weights, features=blobs(9).features.float())
    result = rough_flow(
        source, blobs(9, seed=1), labels="means", stepping=Stepping(0.3, minibatch=1)
    )
    assert result.samples.features.dtype == torch.float32
    moved = (result.samples.features != source.features).any(1)
    assert bool(moved.any())
    assert not bool(moved[weights == 0].any())


BAD_STEPPINGS = [
    ({"step_size": 0.0}, "flow.step_size must be positive.*got 0.0"),
    ({"step_size": math.nan}, "flow.step_size must be positive.*got nan"),
    ({"optimizer": "sdg"}, "flow.optimizer 'sdg'.*adam.*sgd"),
    ({"optimizer_options": {"momentun": 1}}, "SGD.*momentun.*takes momentum, dampening"),
    ({"optimizer_options": {"momentum": -1}}, "SGD.*momentum"),
    ({"optimizer_options": {"lr": 1}}, "SGD.*'lr'"),
    ({"schedule": "cosin"}, "flow.schedule 'cosin'.*constant, inverse_sqrt, linear, cosine"),
    ({"box": (1.0, 0.0)}, r"flow.box .*got \[1.0, 0.0\]"),
    ({"box": (0.0, math.nan)}, r"flow.box .*got \[0.0, nan\]"),
    ({"box": (0.0,)}, r"flow.box .*got \[0.0\]"),
    ({"noise": -0.1}, "flow.noise must be finite and not negative.*-0.1"),
    ({"minibatch": 0}, "flow.minibatch must be positive.*got 0"),
    ({"minibatch": 1.5}, "flow.minibatch must be an integer, got 1.5"),
]


def test_bad_steppings_are_refused_with_their_value():
    for options, message in BAD_STEPPINGS:
        with naming(options), pytest.raises(InputError, match=message):
            Stepping(**options)


BAD_FLOWS = [
    ({"steps": 0}, "flow.steps must be at least 1, got 0"),
    ({"steps": 1.5}, "steps must be an integer, got 1.5"),
    ({"refresh": 0}, "flow.refresh must be positive, got 0"),
    ({"tolerance": 0.0}, "flow.tolerance.*got 0.0"),
    ({"tolerance": 1.0}, "flow.tolerance.*got 1.0"),
    ({"epsilon": 0.0}, "epsilon must be positive.*got 0.0"),
    ({"mode": "feature"}, "flow.mode 'feature'.*features, attached, joint, augmented"),
    *(
        ({"mode": mode, "labels": method}, f"labels=gaussian and labels=means, got labels={method}")
        for mode, method in (("attached", "none"), ("joint", "upper_bound"), ("augmented", "none"))
    ),
    ({"epsilon_relative": -1.0}, "epsilon_relative must be positive.*got -1.0"),
]


def test_bad_flows_are_refused_with_their_value():
    for options, message in BAD_FLOWS:
        with naming(options), pytest.raises(InputError, match=message):
            flow(blobs(9), blobs(9, seed=1), **options)
    with pytest.raises(InputError, match=r"flow.checkpoint_every must be positive, got 0"):
        otdd.Checkpoints("folder", every=0)
