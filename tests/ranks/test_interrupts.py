"""Orders that rank 0 leaves, by an error of its own or by Ctrl-C, and groups that are gone."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool, lead, pool

import otdd_flash as otdd
from otdd_flash.distributed.exchange import Interrupts
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.errors import InputError, LostRankError
from otdd_flash.flows.result import StepRecord
from otdd_flash.operators.torch_operator import TorchOperator

pytestmark = pytest.mark.xdist_group("ranks")


@contextmanager
def own_pool() -> Iterator[RankPool]:
    """Ranks that are of no use to others afterwards."""
    own = RankPool(2)
    try:
        yield own
    finally:
        own.close()


def _sum(ranks: Ranks) -> torch.Tensor:
    return ranks.summed(torch.ones(1, dtype=torch.float64))


def short_in_a_flow() -> Any:
    """A flow of which rank 0 has no memory for a pass of the second step."""
    draw = torch.Generator().manual_seed(4)
    clouds = [torch.randn(count, 3, generator=draw) for count in (37, 29)]

    def fall_short(record: StepRecord) -> None:
        def short(*args: Any) -> torch.Tensor:
            raise RuntimeError("can't allocate memory: you tried to allocate 1048576 bytes")

        patched.setattr(TorchOperator, "softmin_rows", short)

    def work(ranks: Ranks) -> None:
        otdd.gradient_flow(
            *clouds,
            otdd.Flow(3),
            epsilon=0.3,
            labels="none",
            compute=otdd.ComputeOptions("cpu", group=ranks),
            callbacks=otdd.Callbacks(progress=fall_short),
        )

    with pytest.MonkeyPatch.context() as patched:
        return otdd.led(work)


@pytest.mark.slow
def test_a_flow_says_what_rank_0_lacked_in_a_pass() -> None:
    with own_pool() as own:
        answer = own.answer_of(0, short_in_a_flow)
    assert isinstance(answer, InputError)
    assert "the flow cannot go on after step 1: out of memory on cpu" in str(answer)


@pytest.fixture
def came() -> Iterator[list[int]]:
    """Ctrl-C that comes through."""
    found: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: found.append(number))
    yield found
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_pressed_twice_comes_at_once_and_once(came: list[int]) -> None:
    def press_twice() -> None:
        with Interrupts().held():
            signal.raise_signal(signal.SIGINT)
            assert came == []
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        press_twice()
    assert came == []


def test_an_interrupt_that_was_held_comes_where_it_is_heard(came: list[int]) -> None:
    interrupts = Interrupts()
    with interrupts.held():
        signal.raise_signal(signal.SIGINT)
        assert came == []
        with interrupts.heard():
            assert came == [signal.SIGINT]
            signal.raise_signal(signal.SIGINT)
            assert came == [signal.SIGINT] * 2
        signal.raise_signal(signal.SIGINT)
        assert came == [signal.SIGINT] * 2
    assert came == [signal.SIGINT] * 3


def interrupted(ranks: Ranks) -> tuple[list[str], float]:
    """What rank 0 hears where Ctrl-C is pressed in an order, and what the next order finds."""
    said = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ranks.order(_press)
    except KeyboardInterrupt:
        said.append("interrupted")
    finally:
        signal.signal(signal.SIGINT, before)
    return said, float(ranks.order(_sum))


def _press(ranks: Ranks) -> None:
    if ranks.rank == 0:
        signal.raise_signal(signal.SIGINT)
    _sum(ranks)


def test_an_interrupt_comes_when_an_order_is_done() -> None:
    assert pool(2).led(interrupted) == [(["interrupted"], 2.0)] * 2


def interrupted_in_their_midst(ranks: Ranks) -> bool:
    """Whether Ctrl-C in what ranks do together has rank 0 leave the others there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ranks.order(_press_together)
    except KeyboardInterrupt:
        return ranks.apart
    return False


def _press_together(ranks: Ranks) -> None:
    def press() -> None:
        if ranks.rank == 0:
            signal.raise_signal(signal.SIGINT)

    ranks.together(press)


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_what_others_do_for_long() -> None:
    with own_pool() as own:
        assert own.answer_of(0, lead, interrupted_in_their_midst) is True


def left_alone() -> Any:
    return otdd.led(lambda ranks: ranks.order(_leave))


def _leave(ranks: Ranks) -> torch.Tensor:
    if ranks.rank == 1:
        os._exit(0)
    return ranks.summed(torch.zeros(1, dtype=torch.float64))


@pytest.mark.slow
def test_a_process_that_ends_is_missed() -> None:
    with own_pool() as own:
        answer = own.answer_of(0, left_alone)
    assert isinstance(answer, LostRankError)
    assert "another process of compute.group has ended" in str(answer)


def threads_that_are_left() -> list[str]:
    """Names of threads of gloo, once its group has been destroyed."""
    otdd.led(lambda ranks: None)
    assert torch.distributed.group.WORLD is not None
    # Imports what would keep the group.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    torch.distributed.destroy_process_group()
    tasks = Path("/proc/self/task")
    names = [(tasks / task / "comm").read_text() for task in os.listdir(tasks)]
    return [name for name in names if "gloo" in name]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed by Linux")
def test_no_thread_outlives_the_group() -> None:
    with own_pool() as own:
        assert own.run(threads_that_are_left) == [[], []]
