"""Steps that go too far: a flow says so at once, and what it leaves is of use."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pairwise import named, pairwise
from refusals import naming
from small_flows import blobs, digits, flow, rough_flow

import otdd_flash as otdd
from otdd_flash.errors import EpsilonOutOfRange, InputError
from otdd_flash.flows.modes import FeaturesMode
from otdd_flash.flows.stepping import Stepping

SOURCE, TARGET = blobs(9), blobs(11, seed=1)
OVERSHOOTS = {
    "fifty times too far": Stepping(50.0),
    "adam": Stepping(1e6, "adam"),
    "beyond float32": Stepping(3e38),
    "beyond float32 in the square": Stepping(1e25),
}


@pytest.mark.slow(after=1)
@pairwise(
    stepping=named(OVERSHOOTS),
    mode=("features", "attached", "augmented"),
    dtype=(torch.float64, torch.float32),
)
def test_a_flow_that_overshoots_says_so_at_once(dtype, mode, stepping):
    sides = [replace(side, features=side.features.to(dtype)) for side in (SOURCE, TARGET)]
    precision = "double" if dtype == torch.float64 else "high"
    # As many iterations as a step needs, and far too few to solve for particles that ran away.
    solver = otdd.Converged(1e-2, max_iterations=500, require_convergence=True)
    message = (
        r"the flow cannot go on after step \d: particles .*; "
        rf"lower flow.step_size={stepping.step_size:g} and start again"
    ).replace("+", r"\+")
    compute = otdd.ComputeOptions(device="cpu", precision=precision)
    options = {"mode": mode, "steps": 20, "stepping": stepping, "epsilon": 4.0}
    with pytest.raises(InputError, match=message) as raised:
        flow(*sides, solver=solver, compute=compute, **options)
    assert "flow.resume" not in str(raised.value)


@pytest.mark.slow
def test_a_step_that_overshoots_is_caught_although_a_box_clips_it():
    source, target = digits("train", 20), digits("test", 20, rotate=30)
    wild = Stepping(50.0, "adam", box=(0.0, 1.0))
    message = (
        r"after step 0: particles that a step took out of flow.box=\[0, 1\] are at a mean cost of "
        r".*; lower flow.step_size=50 and start"
    )
    with pytest.raises(InputError, match=message):
        rough_flow(source, target, stepping=wild)


@pytest.mark.slow
def test_a_box_may_clip_steps_that_go_a_little_too_far_and_a_flow_that_ends_farther_says_so(caplog):
    digits_sides = digits("train", 20), digits("test", 20, rotate=30)
    # The target lies far outside of the second, and no step overshoots.
    shifted = replace(TARGET, features=TARGET.features + 50)
    narrow = (float(SOURCE.features.min()), float(SOURCE.features.max()) + 0.1)
    for sides, stepping in (
        (digits_sides, Stepping(1.5, box=(0.0, 1.0))),
        ((SOURCE, shifted), Stepping(0.5, box=narrow)),
    ):
        result = rough_flow(*sides, stepping=stepping, labels="means", steps=1)
        assert result.after.divergence < result.before.divergence, stepping
    assert not caplog.records
    flow(*digits_sides, stepping=Stepping(5.0, box=(0.0, 1.0)), epsilon=0.5, steps=1)
    (record,) = caplog.records
    assert "ended farther from its target than it began" in record.getMessage()
    assert record.getMessage().endswith("lower flow.step_size=5, or widen flow.box=[0, 1]")


def test_what_cannot_go_on_for_another_reason_names_no_step_size(monkeypatch, tmp_path):
    source = replace(SOURCE, features=(SOURCE.features.abs() / 9).clamp(0.0, 0.9))
    source.features[0] = torch.tensor([0.0, 0.9, 0.5], dtype=torch.float64)
    for box in ((10.0, 11.0), (0.99, 9.0), (-9.0, -0.5)):
        with pytest.raises(
            InputError,
            match=rf"flow.box=\[{box[0]:g}, {box[1]:g}\] leaves out the particles, "
            r".* lie in \[0, 0.9\]",
        ) as error:
            rough_flow(source, TARGET, stepping=Stepping(0.1, box=box))
        assert "step_size" not in str(error.value)

    def refused(*_):
        raise InputError("class 'a' has 1 sample; min_class_size=2 drops it")

    monkeypatch.setattr(FeaturesMode, "measure", refused)
    message = "^the flow cannot go on after step 0: class 'a' has 1 sample; min_class_size=2 drops"
    with pytest.raises(InputError, match=f"{message} it$"):
        rough_flow(SOURCE, TARGET, checkpoints=otdd.Checkpoints(tmp_path))


@pytest.mark.slow
def test_clouds_that_begin_as_one_point_may_round():
    """The mean cost of the start is 0, and any step's is far above."""
    point = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    source, target = (otdd.LabeledSamples(point.expand(n, -1), None, ()) for n in (7, 50))
    found = otdd.gradient_flow(source, target, otdd.Flow(1), labels="none", epsilon=1e-3)
    assert abs(found.after.divergence) <= 1e-10


def spoiled(points):
    """Features that are no numbers at one particle, once particles have moved."""
    began = any(torch.equal(points, side.features) for side in (SOURCE, TARGET))
    return points if began else points.index_fill(0, torch.tensor([8]), math.nan)


@pytest.mark.slow
def test_what_is_not_finite_or_too_far_is_named():
    far = Stepping(1.7e308, "adam", optimizer_options={"eps": 1e-30})
    network = SimpleNamespace(
        key="spoiled", features=spoiled, pull_back=lambda _, gradient: gradient
    )
    for stepping, more, message in (
        (far, {}, "after step 0: particles have values that are not finite; lower"),
        (
            Stepping(0.1),
            {"space": network},
            "0: particles have features that are not finite; lower",
        ),
        (Stepping(0.1, noise=1e3), {}, "^particles moved by flow.noise=1000 are at a mean cost"),
        (Stepping(50.0, noise=0.1), {}, "lower flow.step_size=50 or flow.noise=0.1 and start"),
    ):
        with naming(message), pytest.raises(InputError, match=message):
            rough_flow(SOURCE, TARGET, stepping=stepping, steps=3, **more)


@pytest.mark.slow
def test_what_overshoots_goes_on_from_before_with_a_lower_step_size(tmp_path):
    options = {"steps": 12, "solver": otdd.Converged(1e-3)}
    # Four times too far: particles run away step by step.
    wild, folder = Stepping(4.0), otdd.Checkpoints(tmp_path)
    with pytest.raises(InputError, match=r"after step (\d).*flow.resume=true with a lower") as at:
        flow(SOURCE, TARGET, stepping=wild, checkpoints=folder, **options)
    again = otdd.Checkpoints(tmp_path, resume=True)
    with pytest.raises(InputError, match=r"flow.optimizer was SGD"):
        flow(SOURCE, TARGET, stepping=Stepping(0.3, "adam"), checkpoints=again, **options)
    told = []
    result = flow(SOURCE, TARGET, checkpoints=again, progress=told.append, **options)
    assert f"after step {told[0].step}:" in str(at.value)
    assert [record.step_size for record in result.history[: told[0].step]] == [4.0] * told[0].step
    assert result.history[-1].objective < result.before.objective
    # What it wrote belongs to the new step size alone.
    with pytest.raises(InputError, match=r"flow.step_size was 0.3 .* and is 4.0 now"):
        flow(SOURCE, TARGET, stepping=wild, checkpoints=again, **options)


@pytest.mark.slow
def test_functionals_that_blow_up_are_named_and_may_lead_far_from_the_target():
    repelled = [{"name": "norm", "weight": -1e30}]
    with pytest.raises(InputError, match=r"after step 0: .*or the weight -1e\+30 of norm"):
        rough_flow(SOURCE, TARGET, steps=20, functionals=repelled)
    # Far is no reason to stop where the objective asks for it.
    away = [{"name": "norm", "weight": 50.0, "centre": [40.0, 0.0, 0.0]}]
    result = rough_flow(SOURCE, TARGET, functionals=away, stepping=Stepping(0.018), steps=4)
    assert result.history[-1].divergence > 100 * result.history[0].divergence
    assert result.history[-1].objective < result.history[0].objective


@pytest.mark.parametrize("name", ["epsilon", "epsilon_relative"])
def test_an_epsilon_that_becomes_too_small_on_the_way_is_refused_as_at_the_start(name):
    """In the setting and unit of the user, with the step, and advice that serves."""
    draw = torch.Generator().manual_seed(0)
    source, target = (torch.randn(12, 3, generator=draw) for _ in range(2))
    mean = float(torch.cdist(source, target).square().mean()) / 2
    unit = mean if name == "epsilon" else 1.0

    def move(factor: float) -> None:
        otdd.gradient_flow(
            *(source, target, otdd.Flow(steps=3, stepping=Stepping(3.0))),
            labels="none",
            solver=otdd.Converged(max_iterations=30),
            compute=otdd.ComputeOptions("cpu"),
            **{name: factor * unit},
        )

    sentence = (
        rf"{name}=\S+ is too small for float32: rounding alone moves the marginals by up to \S+; "
        rf"raise {name} to about (\S+) or set precision=double.*"
    )
    with pytest.raises(EpsilonOutOfRange) as raised:
        move(1e-6)
    assert re.fullmatch(sentence, str(raised.value))
    with pytest.raises(EpsilonOutOfRange) as raised:
        move(1e-5)
    found = re.fullmatch(rf"the flow cannot go on after step \d: {sentence}", str(raised.value))
    assert found is not None, raised.value
    assert 1e-5 * unit < float(found[1].rstrip(",")) < 1e-3 * unit
