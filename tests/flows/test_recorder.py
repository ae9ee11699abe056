"""A thinned trajectory: few moments, evenly spread, whatever the length of the flow."""

import pytest
import torch

from otdd_flash.flows.history import Recorder


def recorded(steps, most, *, stop=None):
    """Of points that are at k after k steps; state is handed on at step `stop`."""
    recorder, points = Recorder(torch.tensor([0, 2]), most), torch.zeros(3, 1)
    for step in range(steps + 1):
        points.fill_(step)
        if recorder.wants(step):
            recorder.keep(step, points, torch.tensor([step, 0, 1]))
        if step == stop:
            state, recorder = recorder.state(), Recorder(torch.tensor([1]), most)
            recorder.restore(state)
    return recorder.trajectory(steps, points, torch.tensor([steps, 0, 1]))


@pytest.mark.parametrize("most", [2, 5, 32])
def test_few_moments_evenly_spread_from_the_first_to_the_last(most):
    for steps in (1, 2, 3, 4, 5, 7, 8, 31, 32, 33, 100):
        seen = recorded(steps, most)
        assert len(seen.steps) <= most, steps
        assert (seen.steps[0], seen.steps[-1]) == (0, steps)
        gaps = seen.steps.diff()
        assert len(set(gaps[:-1].tolist())) <= 1, steps
        assert int(gaps[-1]) <= int(gaps[0]), steps
        # Room is used: at half the distance there would be too many.
        assert len(seen.steps) > most // 2 or len(seen.steps) == steps + 1, steps
        # What was kept is a copy.
        assert torch.equal(seen.points[:, :, 0], seen.steps[:, None].expand(-1, 2).float())
        assert torch.equal(seen.labels, torch.stack((seen.steps, torch.ones_like(seen.steps)), 1))


def test_a_recorder_goes_on_from_a_state():
    whole = recorded(40, 8)
    for stop in (0, 3, 8, 9, 20):
        resumed = recorded(40, 8, stop=stop)
        assert torch.equal(whole.steps, resumed.steps), stop
        assert torch.equal(whole.points, resumed.points), stop
