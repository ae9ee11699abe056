"""Both sides of a flow come to the CPU while it runs, and are what they were at its start."""

from threading import Event

import pytest
import torch
from small_flows import blobs

import otdd_flash as otdd
from otdd_flash.flows import run
from otdd_flash.flows.run import on_host


def sides(device):
    return blobs(12).to(device), blobs(12, seed=1).to(device)


@pytest.mark.slow
def test_they_come_while_steps_are_taken_and_a_copy_that_fails_ends_the_flow(monkeypatch):
    begun, stepped = Event(), Event()

    # Before the loop a copy would wait for it in vain, and after it the loop for a copy.
    def late(*given):
        begun.set()
        assert stepped.wait(60)
        return on_host(*given)

    def progress(record):
        assert begun.wait(60)
        stepped.set()

    def fails(*given):
        raise MemoryError("none left")

    monkeypatch.setattr(run, "on_host", late)
    told = otdd.Callbacks(progress=progress)
    source, target = sides("cpu")
    result = otdd.gradient_flow(source, target, otdd.Flow(1), callbacks=told, compute="cpu")
    assert torch.equal(result.source.features, source.features)
    assert torch.equal(result.target.features, target.features)
    monkeypatch.setattr(run, "on_host", fails)
    with pytest.raises(MemoryError, match="none left"):
        otdd.gradient_flow(source, target, otdd.Flow(1), compute="cpu")


def test_particles_leave_before_they_are_evaluated_for_the_last_time(monkeypatch):
    """Where the end is not known before, they leave after it."""
    left, evaluated = [], []
    copy = run.particles_on_host

    def leaves(*given):
        left.append(len(evaluated))
        return copy(*given)

    monkeypatch.setattr(run, "particles_on_host", leaves)
    for stop in (None, lambda: len(evaluated) == 2):
        left.clear()
        evaluated.clear()
        told = otdd.Callbacks(progress=evaluated.append, stop=stop)
        source, target = sides("cpu")
        result = otdd.gradient_flow(source, target, otdd.Flow(3), callbacks=told, compute="cpu")
        assert left == [3]
        assert len(evaluated) == (4 if stop is None else 3)
        assert result.samples.subset_hash == source.subset_hash
        assert result.samples.fingerprint != source.fingerprint
        assert torch.equal(result.samples.labels, source.labels)


@pytest.mark.gpu
def test_a_result_has_where_a_flow_on_a_gpu_began_and_ended():
    gpu, alone = (
        otdd.gradient_flow(*sides(device), otdd.Flow(2), compute=device)
        for device in ("cuda", "cpu")
    )
    for name in ("source", "target", "samples"):
        found, expected = getattr(gpu, name), getattr(alone, name)
        assert found.features.device.type == found.labels.device.type == "cpu"
        close = 1e-2 if name == "samples" else 0
        torch.testing.assert_close(found.features, expected.features, rtol=0, atol=close)
        assert torch.equal(found.labels, expected.labels)
