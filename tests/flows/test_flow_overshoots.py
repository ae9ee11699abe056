"""Steps that go too far: a flow says so at once, and what it leaves is of use."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pairwise import named, pairwise
from small_flows import blobs, digits, flow, rough_flow
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.flows.history import StepRecord
from otdd_flash.flows.modes.feature_driven import FeaturesMode
from otdd_flash.flows.space import FeatureSpace, Space
from otdd_flash.flows.stepping import Stepping

SOURCE, TARGET, NAN = blobs(9), blobs(11, seed=1), math.nan
OVERSHOOTS: dict[str, Stepping] = {
    "fifty times too far": Stepping(50.0),
    "adam": Stepping(1e6, "adam"),
    "beyond float32": Stepping(3e38),
    "beyond float32 in the square": Stepping(1e25),
}


@pytest.mark.slow(after=1)
@pairwise(
    stepping=named(OVERSHOOTS),
    mode=("features", "attached", "joint", "augmented"),
    dtype=(torch.float64, torch.float32),
)
def test_a_flow_that_overshoots_says_so_at_once(
    dtype: torch.dtype, mode: str, stepping: Stepping
) -> None:
    sides = [replace(side, features=side.features.to(dtype)) for side in (SOURCE, TARGET)]
    precision = "double" if dtype == torch.float64 else "high"
    # As many iterations as a step needs, and far too few to solve for particles that ran away.
    solver = otdd.Converged(1e-3, max_iterations=500, require_convergence=True)
    message = (
        r"the flow cannot go on after step \d: particles .*; "
        rf"lower flow.step_size={stepping.step_size:g} and start again"
    ).replace("+", r"\+")
    with pytest.raises(InputError, match=message) as raised:
        flow(
            *sides,
            mode=mode,
            steps=20,
            stepping=stepping,
            solver=solver,
            compute=otdd.ComputeOptions(device="cpu", precision=precision),
        )
    assert "flow.resume" not in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(("step_size", "optimizer"), [(50.0, "adam"), (1e30, "sgd")])
def test_a_step_that_overshoots_is_caught_although_a_box_clips_it(
    step_size: float, optimizer: str, tmp_path: Path
) -> None:
    source, target = digits("train", 20), digits("test", 20, rotate=30)
    wild = Stepping(step_size, optimizer, box=(0.0, 1.0))
    message = (
        r"after step 0: particles that a step took out of flow.box=\[0, 1\] are at a mean cost of "
        rf".*; lower flow.step_size={step_size:g} and start".replace("+", r"\+")
    )
    kept = otdd.Checkpoints(tmp_path)
    with pytest.raises(InputError, match=message):
        flow(source, target, steps=3, stepping=wild, checkpoints=kept)
    # The state from before that step is there, and a lower step size goes on.
    again = replace(kept, resume=True)
    result = flow(source, target, steps=3, stepping=Stepping(0.3, optimizer, box=(0.0, 1.0)))
    tame = Stepping(0.3, optimizer, box=(0.0, 1.0))
    with pytest.raises(InputError, match=r"flow.box was"):
        flow(source, target, steps=3, stepping=Stepping(0.3, optimizer), checkpoints=again)
    resumed = flow(source, target, steps=3, stepping=tame, checkpoints=again)
    torch.testing.assert_close(resumed.samples.features, result.samples.features)


@pytest.mark.slow
def test_a_box_may_clip_steps_that_go_a_little_too_far() -> None:
    source, target = digits("train", 20), digits("test", 20, rotate=30)
    result = rough_flow(source, target, stepping=Stepping(1.5, box=(0.0, 1.0)))
    assert result.after.divergence < result.before.divergence
    # The target lies far outside of this one, and no step overshoots.
    shifted = replace(TARGET, features=TARGET.features + 50)
    narrow = (float(SOURCE.features.min()), float(SOURCE.features.max()) + 0.1)
    result = rough_flow(SOURCE, shifted, stepping=Stepping(0.5, box=narrow), labels="means")
    assert result.after.divergence < result.before.divergence


@pytest.mark.slow
def test_a_flow_that_ends_farther_than_it_began_says_so(caplog: pytest.LogCaptureFixture) -> None:
    source, target = digits("train", 20), digits("test", 20, rotate=30)
    flow(source, target, stepping=Stepping(5.0, box=(0.0, 1.0)), epsilon=0.5)
    (record,) = caplog.records
    assert "ended farther from its target than it began" in record.getMessage()
    assert record.getMessage().endswith("lower flow.step_size=5, or widen flow.box=[0, 1]")


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("box", [(10.0, 11.0), (0.99, 9.0), (-9.0, -0.5)])
def test_a_box_that_leaves_out_the_particles_is_named_and_no_step_size(
    box: tuple[float, float],
) -> None:
    source, target = digits("train", 20), digits("test", 20, rotate=30)
    source = replace(source, features=source.features.clamp(0.0, 0.9))
    where = rf"flow.box=\[{box[0]:g}, {box[1]:g}\] leaves out the particles, .* lie in \[0, 0.9\]"
    with pytest.raises(InputError, match=where) as error:
        rough_flow(source, target, stepping=Stepping(0.1, box=box))
    assert "step_size" not in str(error.value)


def test_a_class_that_cannot_be_measured_is_named_and_no_step_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(*_: object) -> None:
        raise InputError("class 'a' has 1 sample; min_class_size=2 drops it")

    monkeypatch.setattr(FeaturesMode, "measure", refused)
    message = (
        r"^the flow cannot go on after step 0: class 'a' has 1 sample; min_class_size=2 drops it$"
    )
    with pytest.raises(InputError, match=message):
        rough_flow(SOURCE, TARGET, checkpoints=otdd.Checkpoints(tmp_path))


@pytest.mark.slow
def test_a_class_of_one_sample_moves_as_a_point() -> None:
    one = replace(SOURCE, labels=torch.tensor([0] * 8 + [1]))
    with pytest.warns(DataNotice, match="classes of one sample are points"):
        result = rough_flow(one, TARGET)
    assert result.after.divergence < result.before.divergence


@pytest.mark.slow
def test_clouds_that_begin_as_one_may_round() -> None:
    """The mean cost of the start is 0, and any step's is far above."""
    point = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    source, target = (otdd.LabeledSamples(point.expand(n, -1), None, ()) for n in (7, 50))
    found = otdd.gradient_flow(source, target, otdd.Flow(1), labels="none", epsilon=1e-3)
    assert abs(found.after.divergence) <= 1e-10


class Plain:
    """Particles are features, but nobody knows."""

    key = "plain"

    def features(self, points: Tensor) -> Tensor:
        return points

    def pull_back(self, points: Tensor, gradient: Tensor) -> Tensor:
        return gradient


class Bounded(Plain):
    """Features are finite wherever particles are."""

    def features(self, points: Tensor) -> Tensor:
        return points.clamp(-9.0, 9.0).nan_to_num()


class Moved(Plain):
    """Of particles that have moved there are no features."""

    def features(self, points: Tensor) -> Tensor:
        began = any(torch.equal(points, side.features) for side in (SOURCE, TARGET))
        return points if began else points.index_fill(0, torch.tensor([8]), NAN)


class Pulled(Plain):
    """One particle has no gradient."""

    def pull_back(self, points: Tensor, gradient: Tensor) -> Tensor:
        return gradient.index_fill(0, torch.tensor([4]), NAN)


FAR = Stepping(1.7e308, "adam", optimizer_options={"eps": 1e-30})


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("space", "stepping", "message"),
    [
        (FeatureSpace(), FAR, "after step 0: particles have values that are not finite; lower"),
        (Bounded(), FAR, "after step 0: particles have values that are not finite; lower"),
        (
            Moved(),
            Stepping(0.1),
            "after step 0: particles have features that are not finite; lower",
        ),
        (Pulled(), Stepping(0.1), "^the objective or its gradient is not finite$"),
    ],
    ids=lambda case: type(case).__name__,
)
def test_what_is_not_finite_is_named(space: Space, stepping: Stepping, message: str) -> None:
    with pytest.raises(InputError, match=message):
        rough_flow(SOURCE, TARGET, space=space, stepping=stepping, steps=3)


@pytest.mark.slow
def test_noise_that_is_too_much_is_named() -> None:
    with pytest.raises(InputError, match=r"^particles moved by flow.noise=1000 are at a mean cost"):
        rough_flow(SOURCE, TARGET, stepping=Stepping(0.1, noise=1e3))
    with pytest.raises(InputError, match=r"lower flow.step_size=50 or flow.noise=0.1 and start"):
        rough_flow(SOURCE, TARGET, stepping=Stepping(50.0, noise=0.1))


@pytest.mark.slow
def test_what_overshoots_goes_on_from_before_with_a_lower_step_size(tmp_path: Path) -> None:
    few = flow(SOURCE, TARGET, steps=3)
    # Four times too far: particles run away step by step.
    wild, folder = Stepping(4.0), otdd.Checkpoints(tmp_path)
    with pytest.raises(InputError, match=r"after step (\d).*flow.resume=true with a lower") as at:
        flow(SOURCE, TARGET, steps=30, stepping=wild, checkpoints=folder)
    again = otdd.Checkpoints(tmp_path, resume=True)
    with pytest.raises(InputError, match=r"flow.optimizer was SGD"):
        flow(SOURCE, TARGET, steps=30, stepping=Stepping(0.3, "adam"), checkpoints=again)
    told: list[StepRecord] = []
    result = flow(SOURCE, TARGET, steps=30, checkpoints=again, progress=told.append)
    assert f"after step {told[0].step}:" in str(at.value)
    assert [record.step_size for record in result.history[: told[0].step]] == [4.0] * told[0].step
    assert result.history[-1].objective < few.history[-1].objective
    # What it wrote belongs to the new step size alone.
    with pytest.raises(InputError, match=r"flow.step_size was 0.3"):
        flow(SOURCE, TARGET, steps=30, stepping=wild, checkpoints=again)


def kept_state(checkpoints: otdd.Checkpoints) -> dict[str, Any]:
    """What a folder holds, whatever it belongs to."""
    manifest = checkpoints._manifest()
    assert manifest is not None
    return checkpoints._state(manifest, torch.device("cpu"))


@pytest.mark.slow
def test_functionals_that_blow_up_are_named(tmp_path: Path) -> None:
    repelled = [{"name": "norm", "weight": -1e30}]
    with pytest.raises(InputError, match=r"after step 0: .*or the weight -1e\+30 of norm") as error:
        rough_flow(
            SOURCE,
            TARGET,
            steps=20,
            functionals=repelled,
            checkpoints=otdd.Checkpoints(tmp_path, every=1),
        )
    assert str(tmp_path) in str(error.value)
    # The state it left is the one before the step that went wrong.
    state = kept_state(otdd.Checkpoints(tmp_path))
    assert state["step"] == 0
    assert torch.equal(state["rows"]["points"]["value"], SOURCE.features)


@pytest.mark.slow
def test_functionals_may_lead_far_from_the_target() -> None:
    """Far is no reason to stop where the objective asks for it."""
    away = [{"name": "norm", "weight": 50.0, "centre": [40.0, 0.0, 0.0]}]
    result = rough_flow(SOURCE, TARGET, functionals=away, stepping=Stepping(0.018), steps=4)
    assert result.history[-1].divergence > 100 * result.history[0].divergence
    assert result.history[-1].objective < result.history[0].objective


@pytest.mark.slow
def test_particles_of_one_point_may_spread_over_the_target() -> None:
    point = replace(SOURCE, features=TARGET.features.mean(0).expand(9, 3).clone())
    draw = torch.Generator().manual_seed(0)
    jitter = 1e-3 * torch.randn(9, 3, generator=draw, dtype=torch.float64)
    point = replace(point, features=point.features + jitter)
    result = flow(point, TARGET, steps=10, epsilon=0.2, solver=otdd.Converged())
    assert result.history[-1].divergence < 0.3 * result.history[0].divergence
