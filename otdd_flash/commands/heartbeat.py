"""Whether the other processes of a command are alive, beside the collectives that wait for them.

torchrun ends all processes when one ends. It does not see one that is stopped or whose machine is
gone, for which the others would wait. So a thread of every process counts up a key in torchrun's
store. Rank 0 watches all keys and the others that of rank 0; whoever misses a rank ends, and
torchrun the rest. A call of a store whose machine is gone does not return for long, so a second
thread watches the first.

Where rank 0 ends in the middle of what all do, by Ctrl-C or for want of memory, the threads of the
others hear of it there, and end them.

The limit is long, because the thread needs Python's interpreter: a rank that computes lets it go,
but one call of a library may keep it for many seconds. A watcher measures the limit in beats of its
own, so that a computer that slept misses nobody.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from otdd_flash.commands import exit_codes

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

# Seconds between two beats, and without one until a rank is lost.
INTERVAL, LIMIT = 2.0, 45.0
# Seconds that a process which has closed its connections may take to be gone.
GOING = 1.0

# Seconds that a store which answers may take.
ANSWER = 5.0

# By which code the ranks beside rank 0 are to end, and how many are about to.
END, ENDING = "end", "ending"
# In place of a count: the process has ended as meant.
LEFT = "left"
# Letters of Linux for processes that have ended, and none for those that nobody waits for.
ENDED = ("Z", "X", "")
# Letters for those that are stopped, as a torchrun is by Ctrl-Z; its processes go on.
STOPPED = ("T", "t")


class Heartbeat(threading.Thread):
    """Beats for this process and watches others, in a thread that this one watches.

    Args:
        store: of the processes.
        rank: of this process.
        size: how many processes there are.
        interval: seconds between two beats.
        limit: seconds without a beat until a rank is lost.
    """

    def __init__(self, store: Store, rank: int, size: int, interval: float, limit: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._store, self._rank, self._interval, self._limit = store, rank, interval, limit
        self._size = size
        self._watched = range(1, size) if rank == 0 else range(1)
        # What was heard of a rank, and for how many beats it has been that.
        self._heard: dict[int, str] = {}
        self._missed: dict[int, int] = {}
        # For how many beats the store has not answered.
        self._unheard = 0
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="beats", daemon=True)

    def run(self) -> None:
        """Watch the store until stopped."""
        self._beats.start()
        while not self._ended.wait(self._interval):
            if _state(os.getppid()) not in STOPPED:
                self._unheard += 1
            if self._unheard * self._interval >= self._limit:
                self._end("the store of torchrun")

    def stop(self) -> None:
        self._ended.set()
        self.join()
        # Nobody hears of it where the store does not answer.
        self._beats.join(ANSWER)

    def end_others(self, code: int) -> None:
        """Make the processes of all other ranks end with a code; called by rank 0 alone."""
        with suppress(RuntimeError):
            self._store.set(END, str(code))
            self._met(2 * self._interval + GOING)

    def gone(self) -> int | None:
        """Return a rank of this machine whose process has ended; None if none has."""
        until = time.monotonic() + GOING
        while time.monotonic() < until:
            for rank in [*self._heard]:
                process = self._neighbour(rank)
                if process is not None and _state(process) in ENDED:
                    return rank
            time.sleep(GOING / 20)
        return None

    def first(self) -> bool:
        """Whether this process is the first to report a loss: the others then stay silent."""
        try:
            return self._store.add("spoken", 1) == 1
        except RuntimeError:
            # Nobody can tell.
            return True

    def _beat(self) -> None:
        """Beat, and listen to the others, until stopped or the connection breaks for good."""
        with suppress(RuntimeError):
            count = 0
            while not self._ended.wait(self._interval):
                count += 1
                # With what the ranks that the same torchrun has started may know it by.
                beat = f"{count} {os.getpid()} {os.environ.get('GROUP_RANK')}"
                self._store.set(_key(self._rank), beat)
                self._listen()
                if self._rank > 0 and self._store.check([END]):
                    self._store.add(ENDING, 1)
                    # Together, as torchrun ends those that are left when the first is gone.
                    self._met(self._interval)
                    os._exit(int(self._store.get(END)))
                self._unheard = 0
            self._store.set(_key(self._rank), LEFT)

    def _met(self, seconds: float) -> None:
        """Wait until all other ranks are about to end, for so many seconds at most."""
        until = time.monotonic() + seconds
        while self._store.add(ENDING, 0) < self._size - 1 and time.monotonic() < until:
            time.sleep(GOING / 20)

    def _listen(self) -> None:
        for rank in self._watched:
            # All have met before they beat, so that one may have been stopped before its first.
            there = self._store.check([_key(rank)])
            heard = self._store.get(_key(rank)).decode() if there else ""
            if heard != self._heard.get(rank) or heard == LEFT:
                self._heard[rank], self._missed[rank] = heard, 0
                continue
            self._missed[rank] += 1
            if self._missed[rank] * self._interval >= self._limit:
                self._end(f"rank {rank}", self._neighbour(rank), speaks=self.first())

    def _end(self, who: str, process: int | None = None, *, speaks: bool = True) -> None:
        """Say why, and end at once: the main thread may be waiting for the lost rank."""
        from otdd_flash.commands.messages import say_error

        if speaks:
            say_error(
                f"{who} has not answered for {self._limit:g} s: it is stopped, or its machine is "
                "gone; all processes end"
            )
        if process is not None:
            # What is stopped hears no other signal, and torchrun would wait for it.
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        os._exit(exit_codes.DEFECT)

    def _neighbour(self, rank: int) -> int | None:
        """Return the process of a rank that the same torchrun has started; None for others."""
        match self._heard[rank].split():
            case _, process, group if group == os.environ.get("GROUP_RANK"):
                return int(process)
        return None


@contextmanager
def beating(store: Store, rank: int, size: int) -> Iterator[Heartbeat]:
    """Run a heartbeat for as long as something is done."""
    heartbeat = Heartbeat(store, rank, size, INTERVAL, LIMIT)
    heartbeat.start()
    try:
        yield heartbeat
    finally:
        heartbeat.stop()


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _state(process: int) -> str:
    """Return the letter that Linux has for a process's state; "" for one that is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
