"""Errors against time and passes: the clock runs while a method works, and stands at looks."""

from __future__ import annotations

import gc
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from experiments.convergence.methods import Budgets, Chain, Settings, Solved
from experiments.convergence.problem import TARGET, CrossTerm

# Looks at a chain are this far apart in iterations.
LOOK_RATIO = 1.15
# Potentials are certified when their error fell to this part of that of the last certificate.
CERTIFIED_FALL = 0.5

# Runs of fewer seconds are repeated.
SHORT = 0.3

T = TypeVar("T")


class TimeLimitError(Exception):
    """A method took too long."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt Python code by a `TimeLimitError` after some seconds."""

    def interrupt(*_: Any) -> None:
        raise TimeLimitError(f"interrupted after {seconds:.0f} s, compilation and looks included")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Trace:
    """The points of one method on one problem.

    Args:
        term: the problem.
        cap: seconds after which a method is given up.
        own_error: the error on the points as a method rounds them, or None.

    Attributes:
        points: seconds, passes, errors and certified bounds, in the order of time.
        stopped: why the trace ends.
        at_least: seconds that the target takes at the least, if it was not reached.
    """

    def __init__(self, term: CrossTerm, cap: float, own_error: Callable[..., float | None]) -> None:
        self.term, self.cap, self.own_error = term, cap, own_error
        self.points: list[dict[str, Any]] = []
        self.stopped = ""
        self.at_least: float | None = None
        self._certified = float("inf")

    def timed(self, run: Callable[[], T]) -> tuple[T, float]:
        """What a run returns, and its seconds: those of the processor, or of the wall with a GPU.

        Other work on a processor does not disturb the former; the process is bound to one core.
        """
        on_gpu = self.term.source.features.is_cuda
        clock = time.perf_counter if on_gpu else time.process_time
        if on_gpu:
            torch.cuda.synchronize()
        started = clock()
        result = run()
        if on_gpu:
            torch.cuda.synchronize()
        return result, clock() - started

    def median_of_three(self, run: Callable[[], T]) -> tuple[T, float]:
        """A run, and the median of its seconds and those of two more if it is short."""
        result, seconds = self.timed(run)
        if seconds > SHORT:
            return result, seconds
        return result, statistics.median([seconds, *(self.timed(run)[1] for _ in range(2))])

    def add(self, solved: Solved, seconds: float, **setting: Any) -> bool:
        """Look at potentials; whether the target is reached, on some points."""
        look = self.term.look(solved.f, solved.g, certified=False)
        own = self.own_error(solved.f, solved.g)
        if own is not None and not math.isfinite(own):
            own = None
        lowest = min((e for e in (look.error, own) if e is not None), default=None)
        bounds = solved.bounds
        reached = lowest is not None and lowest <= TARGET
        due = look.error is not None and look.error <= CERTIFIED_FALL * self._certified
        if bounds is None and (due or (reached and look.error is not None)):
            bounds = self.term.look(solved.f, solved.g, certified=True).bounds
            self._certified = look.error or 0.0
        self.points.append(
            {
                **setting,
                "seconds": seconds,
                "passes": solved.passes,
                "error": look.error,
                "own_error": own,
                "bounds": None if bounds is None else list(bounds),
            }
        )
        if reached and not self.stopped:
            self.stopped = "reached"
        return reached


def trace_chain(chain: Chain, term: CrossTerm, cap: float) -> Trace:
    """Look at a chain at iterations about LOOK_RATIO apart, until the target or the cap."""
    chain.begin()
    chain.advance(2)
    trace = Trace(term, cap, chain.own_error)
    _, seconds = trace.timed(chain.begin)
    taken, steps = 0, 1
    while True:
        solved, spent = trace.timed(lambda steps=steps: chain.advance(steps))  # type: ignore[misc]
        seconds += spent
        taken += steps
        if trace.add(solved, seconds):
            return trace
        if seconds >= cap:
            trace.stopped, trace.at_least = f"stopped after {seconds:.3g} s", seconds
            return trace
        # Not far beyond the cap.
        left = int((cap - seconds) / spent * steps) + 1
        steps = min(max(1, int((LOOK_RATIO - 1) * taken)), left)


def trace_budgets(budgets: Budgets, term: CrossTerm, cap: float) -> Trace:
    """Run each budget anew; the one that would pass the cap is cut to fill it."""
    trace = Trace(term, cap, budgets.own_error)
    budgets.solve(1)
    few, many = (trace.timed(lambda count=count: budgets.solve(count))[1] for count in (2, 12))  # type: ignore[misc]
    per_iteration = max(many - few, 0.0) / 10
    for count in budgets.iterations:
        cut = count * per_iteration > cap
        if cut:
            count = max(1, int(cap / per_iteration))
        solved, seconds = trace.median_of_three(lambda count=count: budgets.solve(count))  # type: ignore[misc]
        if trace.add(solved, seconds):
            return trace
        trace.at_least = seconds
        if cut or seconds >= cap:
            break
    trace.stopped = f"not reached in {len(trace.points)} runs of up to {trace.at_least:.3g} s"
    return trace


def trace_settings(settings: Settings, term: CrossTerm, cap: float) -> Trace:
    """Run every setting, but those that would pass the cap by the time of a pass."""
    trace = Trace(term, cap, lambda f, g: None)
    settings.runs[0].solve()
    per_pass = 0.0
    for run in settings.runs:
        expected = per_pass * (run.passes or 0)
        if expected > cap:
            trace.at_least = cap
            trace.stopped = trace.stopped or f"{run.setting} would take about {expected:.3g} s"
            return trace
        solved, seconds = trace.median_of_three(run.solve)
        per_pass = seconds / solved.passes
        trace.add(solved, seconds, **run.setting)
    trace.stopped = trace.stopped or "not reached by any setting"
    return trace


def trace_method(method: Chain | Budgets | Settings, term: CrossTerm, cap: float) -> Trace:
    """Warm up, then trace."""
    gc.collect()
    if term.source.features.is_cuda:
        torch.cuda.empty_cache()
    if isinstance(method, Budgets):
        return trace_budgets(method, term, cap)
    if isinstance(method, Settings):
        return trace_settings(method, term, cap)
    return trace_chain(method, term, cap)
