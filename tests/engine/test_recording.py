"""Steps that are repeated one by one and as a recorded graph, and read without waiting."""

from __future__ import annotations

from functools import partial
from threading import Thread

import pytest
import torch
from labelled_costs import cost_between

from otdd_flash.engine import recording
from otdd_flash.engine.problems import LateReader, Start
from otdd_flash.engine.recording import LAUNCHED, STEPS, STREAMS, Repeated, run_branches
from otdd_flash.formulas.decision import CROSS, SELF, Goal, Levels
from otdd_flash.operators import triton_operator
from otdd_flash.operators.one_problem import problem_of
from otdd_flash.operators.triton_operator import KernelOperator
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.solve import solve_term

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def labelled_cost(n, m, device="cuda"):
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(size, 20, generator=draw).to(device) for size in (n, m))
    one, other = (torch.arange(size, device=device) % 3 for size in (n, m))
    y, other = (x, one) if n == m else (y, other)
    costs = torch.rand(3, 3, generator=draw).double().to(device)
    return cost_between(x, y, labels_x=one, labels_y=other, class_costs=costs + costs.T)


class Replayed:
    """Stands for a graph: does again what was launched."""

    def __init__(self, launch):
        self.replay = launch


def test_replayed_steps_are_those_one_by_one(monkeypatch):
    recorded, count = [], torch.zeros(3)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(
        recording,
        "_recorder",
        lambda _: type("Recorder", (), {"record": lambda self, launch: record(launch)})(),
    )

    def record(launch):
        recorded.append(launch)
        return Replayed(launch)

    repeated = Repeated()
    for times in range(1, LAUNCHED + 4):
        repeated.run(lambda: count.add_(1))
        assert count.tolist() == [float(STEPS * times)] * 3
        assert len(recorded) == (times > LAUNCHED)


def test_on_a_cpu_numbers_come_back_at_once():
    reader = LateReader()
    assert reader.exchange(torch.tensor([1.0, 2.0])) == [1.0, 2.0]
    assert reader.last() is None


def begin(operator, top):
    """The iterations of a term from a level on."""
    symmetric = operator.shape[0] == operator.shape[1]
    nothing = torch.zeros_like(operator.b).float()
    level = torch.full((1,), top, dtype=torch.float64, device=DEVICE)
    start = Start(Levels.descending(level), torch.zeros_like(level))
    goal = Goal(top / 8, 1e-3, 0.1, 100)
    form = SELF if symmetric else CROSS
    return problem_of(operator, form).iterations(nothing, goal, form, start)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "m"), [(130, 70), (130, 130)])
@pytest.mark.parametrize("many", [1, 1 << 26])
def test_a_step_leaves_the_host_alone(n, m, many, monkeypatch):
    """As a recorded one must, on which the host has no more say: levels are on the device."""
    monkeypatch.setattr(triton_operator, "MANY_SCORES", many)
    operator = KernelOperator(labelled_cost(n, m, DEVICE), "fast")
    rule = begin(operator, 1.0)
    rule.step()

    def refuse(tensor):
        raise AssertionError("the host waits for the device")

    for name in ("__float__", "__bool__", "item", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    rule.step()


@pytest.mark.parametrize("count", [1, 2, STREAMS, STREAMS + 1, 3 * STREAMS])
def test_branches_take_turns_on_streams(count, monkeypatch):
    """More launches than streams, too: each once, in order, between the waits for its stream."""
    events = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            events.append((self.name, "waits for", other.name))

        def __enter__(self):
            events.append(("on", self.name))

        def __exit__(self, *_):
            events.append(("off", self.name))

    streams = [Stream(f"stream {k}") for k in range(STREAMS)]
    monkeypatch.setattr(recording, "_streams", lambda _: streams)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: streams[0])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)

    def launch(k):
        events.append(("launch", k))
        return k

    launches = [partial(launch, k) for k in range(count)]
    assert run_branches(torch.device("cuda"), *launches) == list(range(count))
    used = [stream.name for stream in streams[1:count]]
    before = [(name, "waits for", "stream 0") for name in used]
    beside = []
    for k in range(1, count):
        name = used[(k - 1) % len(used)]
        beside += [("on", name), ("launch", k), ("off", name)]
    after = [("stream 0", "waits for", name) for name in used]
    assert events == [*before, *beside, ("launch", 0), *after]


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, STREAMS, STREAMS + 1, 3 * STREAMS])
def test_recorded_branches_all_run(count):
    totals, device = torch.zeros(count, device="cuda"), torch.device("cuda", 0)
    recorder = recording._recorder(torch.cuda.current_stream())
    launches = [partial(totals[k].add_, k + 1) for k in range(count)]
    graph = recorder.record(lambda: (run_branches(device, *launches), totals.mul_(2)))
    for _ in range(2):
        graph.replay()
    assert totals.tolist() == [6.0 * (k + 1) for k in range(count)]


@pytest.mark.gpu
@pytest.mark.parametrize("relative_epsilon", [1.0, 0.03])
@pytest.mark.parametrize("m", [700, 900])
def test_recorded_solves_are_those_that_are_not_recorded(relative_epsilon, m, monkeypatch):
    """To the last bit, and however many steps are launched after the end."""
    recorded, plain = (KernelOperator(labelled_cost(900, m), "high") for _ in range(2))
    assert recorded.passes.recorded
    monkeypatch.setattr(plain, "passes", plain.passes._replace(recorded=False))
    epsilon = relative_epsilon * recorded.costs.mean
    again, first, expected = (
        solve_term(operator, epsilon, Converged(1e-4), SELF if m == 900 else CROSS)
        for operator in (recorded, recorded, plain)
    )
    assert first.converged
    assert first.iterations == expected.iterations
    for term in (again, expected):
        assert term.value == first.value
        assert torch.equal(term.g, first.g)


@pytest.mark.gpu
def test_recordings_that_are_gone_keep_no_memory():
    cost = labelled_cost(900, 700)

    def solve():
        operator = KernelOperator(cost, "fast")
        assert operator.passes.recorded
        return solve_term(operator, 0.03 * operator.costs.mean, Converged(1e-3))

    for _ in range(5):
        solve()
    kept = torch.cuda.memory_reserved()
    for _ in range(20):
        solve()
    assert torch.cuda.memory_reserved() <= kept


@pytest.mark.gpu
def test_what_else_happens_meanwhile_does_not_end_a_recording():
    """The garbage collector frees an older graph, another thread takes memory."""
    recorder = recording._recorder(torch.cuda.current_stream())
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
    total = torch.zeros(3, device="cuda")

    def waiting():
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()

    failing, working = Repeated(), Repeated()
    for _ in range(LAUNCHED):
        failing.run(waiting)
    with pytest.raises(RuntimeError):
        failing.run(waiting)
    for _ in range(LAUNCHED + 2):
        working.run(lambda: total.add_(1))
    assert total.tolist() == [(LAUNCHED + 2.0) * STEPS] * 3
