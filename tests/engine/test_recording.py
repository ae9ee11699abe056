"""Steps are repeated alike one by one and as a recorded graph, and read without waiting."""

from __future__ import annotations

from threading import Thread

import pytest
import torch
from otdd_flash.solver.quasi_newton import begin
from otdd_flash.solver.sweep import _overwrite, steps_between_looks, sweep

from otdd_flash.engine.late_reader import LateReader
from otdd_flash.operators import kernel as kernel_operator
from otdd_flash.operators.kernel import KernelOperator
from otdd_flash.operators.labelled_cost import LabelledCost
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.solver import sweep as sweep_module
from otdd_flash.solver.alternating import alternate, solve_alternating
from otdd_flash.solver.converged import Converged
from otdd_flash.solver.symmetric import average, solve_symmetric

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def add_one(operator, epsilon, state):
    count, _ = state
    return count + epsilon, count


@pytest.mark.parametrize("count", [1, 2, 7])
def test_a_sweep_takes_that_many_steps(count):
    masses = torch.ones(1).double()
    operator = StoredOperator.from_cost(torch.zeros(1, 1), masses, masses)
    start = (torch.zeros(3), torch.zeros(3))
    after, before = sweep(operator, add_one, 0.5, start, count)
    assert torch.equal(after, torch.full((3,), 0.5 * count))
    assert torch.equal(before, after - 0.5)
    assert torch.equal(start[0], torch.zeros(3))


class Replayed:
    """Stands for a graph: does its step again on the recording's own tensors."""

    def __init__(self, recording, operator):
        self.recording, self.operator = recording, operator

    def replay(self):
        own = self.recording._state
        _overwrite(own, self.recording._step(self.operator, self.recording._epsilon, own))


def record(recording, operator, state):
    recording._state = tuple(tensor.clone() for tensor in state)
    return Replayed(recording, operator)


def test_replayed_steps_are_those_one_by_one_at_every_level(monkeypatch):
    masses, recorded = torch.ones(1).double(), []
    monkeypatch.setattr(StoredOperator, "short_passes", True)
    monkeypatch.setattr(
        sweep_module._Recording,
        "_record",
        lambda *arguments: recorded.append(arguments) or record(*arguments),
    )
    operator = StoredOperator.from_cost(torch.zeros(1, 1), masses, masses)
    state, pairs = (torch.zeros(3), torch.zeros(3)), []
    for count, epsilon in ((3, 0.5), (1, 0.5), (2, 0.25), (1, 0.25), (4, 0.5)):
        # From what a sweep handed out, and from elsewhere.
        for start in (state, (torch.rand(3), torch.rand(3))):
            expected = start
            for _ in range(count):
                expected = add_one(operator, epsilon, expected)
            state = sweep(operator, add_one, epsilon, start, count)
            pairs.append((state, expected))
    # Only now: what was handed out is not written to any more.
    assert all(all(map(torch.equal, *pair)) for pair in pairs)
    assert len(recorded) == 1


def test_a_state_may_be_overwritten_by_its_own_parts():
    old = (torch.arange(4.0), torch.arange(4.0) + 9, torch.ones(2).double())
    new = (old[1], old[0], old[2] + 1)
    expected = [tensor.clone() for tensor in new]
    _overwrite(old, new)
    assert all(map(torch.equal, old, expected))


@pytest.mark.parametrize(
    ("short", "taken", "steps"), [(True, 31, 1), (True, 32, 4), (False, 99, 1)]
)
def test_only_recorded_steps_are_looked_at_in_groups(short, taken, steps, monkeypatch):
    masses = torch.ones(1).double()
    monkeypatch.setattr(StoredOperator, "short_passes", short)
    operator = StoredOperator.from_cost(torch.zeros(1, 1), masses, masses)
    assert steps_between_looks(operator, taken) == steps


def test_on_a_cpu_numbers_come_back_at_once():
    reader: LateReader[str] = LateReader()
    reading = reader.exchange(torch.tensor([1.0, 2.0]), "kept")
    assert reading is not None
    assert (reading.numbers, reading.kept) == ([1.0, 2.0], "kept")
    assert reader.last() is None


def labelled_cost(n, m, device="cuda"):
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(size, 20, generator=draw).to(device) for size in (n, m))
    y = x if n == m else y
    a, b = (torch.full((size,), 1 / size).double().to(device) for size in (n, m))
    b = a if n == m else b
    labels = tuple(torch.arange(size, device=device) % 3 for size in (n, m))
    costs = torch.rand(3, 3, generator=draw).double().to(device)
    return LabelledCost(
        x,
        y,
        a,
        b,
        labels_x=labels[0],
        labels_y=labels[0] if n == m else labels[1],
        class_costs=costs + costs.T,
        lambda_x=0.5,
    )


STEPS = [(alternate, 130, 70), (average, 130, 130)]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "n", "m"), STEPS)
@pytest.mark.parametrize("many", [1, 1 << 26])
def test_a_step_reads_epsilon_from_the_device_alone(step, n, m, many, monkeypatch):
    """As a recorded one must, on which the host has no more say."""
    monkeypatch.setattr(kernel_operator, "MANY_SCORES", many)
    operator = KernelOperator(labelled_cost(n, m, DEVICE), "fast")
    level = torch.empty((), dtype=torch.float64, device=DEVICE)
    state = begin(*(torch.zeros(size, device=DEVICE) for size in (n, m)))

    def refuse(tensor):
        raise AssertionError("the host waits for the device")

    for epsilon in (1.0, 0.01, 1 / 3):
        level.fill_(epsilon)
        expected = step(operator, epsilon, state)
        with monkeypatch.context() as patched:
            for name in ("__float__", "__bool__", "item", "tolist"):
                patched.setattr(torch.Tensor, name, refuse)
            found = step(operator, level, state)
        assert all(map(torch.equal, found, expected))
        state = expected


@pytest.mark.gpu
@pytest.mark.parametrize(("step", "n", "m"), [(alternate, 900, 700), (average, 800, 800)])
@pytest.mark.parametrize("many", [1, 1 << 26])
def test_a_step_recorded_at_one_level_is_right_at_another(step, n, m, many, monkeypatch):
    monkeypatch.setattr(kernel_operator, "MANY_SCORES", many)
    operator = KernelOperator(labelled_cost(n, m), "fast")
    assert operator.short_passes
    state = begin(*(torch.zeros(size, device="cuda") for size in (n, m)))
    handed_out = []
    for epsilon in (1.0, 0.05, 0.3, 1.0):
        expected = state
        for _ in range(4):
            expected = step(operator, epsilon, expected)
        state = sweep(operator, step, epsilon, state, 4)
        handed_out.append((state, expected))
    assert all(all(map(torch.equal, *states)) for states in handed_out)


@pytest.mark.gpu
def test_on_a_gpu_numbers_come_back_one_exchange_late_and_in_order():
    reader: LateReader[int] = LateReader()
    sent = [torch.full((2,), float(i), device="cuda") for i in range(5)]
    received = [reader.exchange(numbers, i) for i, numbers in enumerate(sent)]
    received.append(reader.last())
    assert received[0] is None
    assert [(reading.numbers, reading.kept) for reading in received[1:]] == [
        ([float(i)] * 2, i) for i in range(5)
    ]
    assert reader.last() is None


@pytest.mark.gpu
@pytest.mark.parametrize("relative_epsilon", [1.0, 0.03])
def test_recorded_solves_are_those_that_are_not_recorded(relative_epsilon, monkeypatch):
    recorded = KernelOperator(labelled_cost(900, 700), "high")
    plain = KernelOperator(labelled_cost(900, 700), "high")
    assert recorded.short_passes
    monkeypatch.setattr(plain, "short_passes", False)
    epsilon = relative_epsilon * recorded.mean_cost
    options = Converged(1e-4)
    again, first, expected = (
        solve_alternating(operator, epsilon, options) for operator in (recorded, recorded, plain)
    )
    assert first.converged
    assert again.value == first.value
    assert torch.equal(again.g, first.g)
    assert expected.bounds[0] <= first.value <= expected.bounds[1]


@pytest.mark.gpu
def test_recorded_self_terms_are_those_that_are_not_recorded(monkeypatch):
    operator = KernelOperator(labelled_cost(800, 800), "high")
    assert operator.short_passes
    first = solve_symmetric(operator, 0.5, Converged(1e-4))
    monkeypatch.setattr(kernel_operator, "MANY_SCORES", 1)
    monkeypatch.setattr(kernel_operator, "FEW_PRODUCTS", 0)
    halves = KernelOperator(labelled_cost(800, 800), "high")
    assert not halves.short_passes
    second = solve_symmetric(halves, 0.5, Converged(1e-4))
    assert first.converged
    assert second.converged
    assert first.bounds[0] <= second.value <= first.bounds[1]


@pytest.mark.gpu
def test_recordings_that_are_gone_keep_no_memory():
    cost = labelled_cost(900, 700)

    def solve():
        operator = KernelOperator(cost, "fast")
        assert operator.short_passes
        return solve_alternating(operator, 0.03 * operator.mean_cost, Converged(1e-3))

    for _ in range(5):
        solve()
    kept = torch.cuda.memory_reserved()
    for _ in range(20):
        solve()
    assert torch.cuda.memory_reserved() <= kept


@pytest.mark.gpu
def test_what_else_happens_meanwhile_does_not_end_a_recording():
    """The garbage collector frees an older graph, another thread takes memory."""
    recorder = sweep_module._recorder(torch.cuda.current_stream())
    total = torch.zeros(3, device="cuda")
    older = [recorder.record(lambda: total.add_(5))]
    taken = []

    def launch():
        older.clear()
        thread = Thread(target=lambda: taken.append(torch.empty(1 << 28, device="cuda")))
        thread.start()
        thread.join()
        total.add_(1)

    graph = recorder.record(launch)
    assert taken
    for _ in range(3):
        graph.replay()
    assert total.tolist() == [3.0] * 3


@pytest.mark.gpu
def test_after_a_recording_that_failed_the_next_one_works():
    operator = KernelOperator(labelled_cost(900, 700), "fast")
    state = begin(*(torch.zeros(size, device="cuda") for size in (900, 700)))

    def waiting(operator, epsilon, state):
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return alternate(operator, epsilon, state)

    with pytest.raises(RuntimeError):
        sweep(operator, waiting, 0.5, state, 4)
    expected = state
    for _ in range(4):
        expected = alternate(operator, 0.5, expected)
    assert all(map(torch.equal, sweep(operator, alternate, 0.5, state, 4), expected))
