"""A thinned trajectory: few moments, evenly spread, whatever the length of the flow."""

from __future__ import annotations

import pytest
import torch

from otdd_flash.flows.history import Recorder, Trajectory


def recorded(steps: int, most: int, *, stop: int | None = None) -> Trajectory:
    """Of points that are at k after k steps; state is handed on at step `stop`."""
    recorder = Recorder(torch.tensor([0, 2]), most)
    for step in range(steps + 1):
        points = torch.full((3, 1), float(step))
        if recorder.wants(step):
            recorder.keep(step, points, torch.tensor([step, 0, 1]))
        if step == stop:
            state, recorder = recorder.state(), Recorder(torch.tensor([1]), most)
            recorder.restore(state)
    return recorder.trajectory(steps, points, torch.tensor([steps, 0, 1]))


@pytest.mark.parametrize("most", [2, 5, 32])
def test_few_moments_evenly_spread_from_the_first_to_the_last(most: int) -> None:
    for steps in (1, 2, 3, 4, 5, 7, 8, 31, 32, 33, 100):
        check_spread(steps, most)


def check_spread(steps: int, most: int) -> None:
    seen = recorded(steps, most)
    assert len(seen.steps) <= most
    assert (seen.steps[0], seen.steps[-1]) == (0, steps)
    gaps = seen.steps.diff()
    assert len(set(gaps[:-1].tolist())) <= 1
    assert int(gaps[-1]) <= int(gaps[0])
    # Room is used: at half the distance there would be too many.
    assert len(seen.steps) > most // 2 or len(seen.steps) == steps + 1
    assert torch.equal(seen.points[:, :, 0], seen.steps[:, None].expand(-1, 2).float())
    assert seen.labels is not None
    assert torch.equal(seen.labels, torch.stack((seen.steps, torch.ones_like(seen.steps)), 1))


def test_what_is_kept_does_not_depend_on_what_follows() -> None:
    recorder = Recorder(torch.tensor([0]), 8)
    for step in range(60):
        if recorder.wants(step):
            recorder.keep(step, torch.zeros(1, 1), None)
        so_far = recorder.trajectory(step, torch.zeros(1, 1), None)
        assert torch.equal(so_far.steps, recorded(step, 8).steps)


def test_a_recorder_goes_on_from_its_state() -> None:
    whole = recorded(40, 8)
    for stop in (0, 3, 8, 9, 20):
        resumed = recorded(40, 8, stop=stop)
        assert torch.equal(whole.steps, resumed.steps), stop
        assert torch.equal(whole.points, resumed.points), stop


def test_what_was_kept_is_a_copy() -> None:
    recorder, points = Recorder(torch.tensor([0]), 4), torch.zeros(1, 1)
    recorder.keep(0, points, None)
    points += 1
    assert recorder.trajectory(1, points, None).points.flatten().tolist() == [0.0, 1.0]
