"""Commands that `torchrun` starts in several processes, and the heartbeat that finds lost ranks.

Rank 0 runs the command as one process would: it reads, prints, writes and handles Ctrl-C. The other
ranks wait for its orders (`otdd_flash.distributed.ranks`), print only what is wrong with
themselves, and end with its exit code. `commands.start` enters `together` if several processes were
launched. `commands.settings`, `commands.sides`, `commands.compare`, `commands.study` and
`commands.outcome` ask for `leading`; `commands.outcome` also calls `named` and `remember`.

torchrun ends all processes when one ends, but it does not notice a process that is stopped or whose
machine is gone, and the others would wait for it in a collective. So each process has a thread
(`Heartbeat`) that counts up a key in torchrun's store. Rank 0 watches all keys and the others watch
that of rank 0; a process that misses a rank ends, and torchrun ends the rest. A call to a store
whose machine is gone blocks for long, so a second thread watches the first. If rank 0 ends during
common work, by Ctrl-C or for lack of memory, the threads of the others read it in the store and end
them.

The limit is long because the thread needs Python's interpreter lock: a computing rank releases it,
but one call of a library may hold it for many seconds. A watcher measures the limit in its own
beats, so that a computer that slept loses no rank (`tests/ranks/test_heartbeat.py`). Help and
refused arguments import this module too, so torch is imported inside the functions that need it.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from otdd_flash.commands.start import INTERRUPTED, say_error
from otdd_flash.errors import BAD_INPUT, DEFECT, InputError, LostRankError

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

    from otdd_flash.distributed.ranks import Ranks
_leading: Ranks | None = None
_heartbeat: Heartbeat | None = None

# Keys in torchrun's store, which outlasts restarts: whether a run was refused, its directory, and
# the checkpoint of an earlier run that was found there.
REFUSED, DIRECTORY, FOUND = "otdd_flash/refused", "otdd_flash/directory", "otdd_flash/found"

NONE = "none"

# Seconds within which torchrun starts all of its processes, approximately.
STARTING = 10.0


def leading() -> Ranks | None:
    """Return the ranks that this process leads; None if it is the only process."""
    return _leading


def launched() -> bool:
    """Return whether torchrun, or a launcher like it, has started several processes.

    Raises:
        InputError: one of the environment variables that it sets has an invalid value.
    """
    size = _number("WORLD_SIZE", 1, None, 1)
    if size == 1:
        return False
    _number("RANK", 0, size - 1)
    _number("LOCAL_WORLD_SIZE", 1, size, size)
    _number("LOCAL_RANK", 0, size - 1, 0)
    _number("MASTER_PORT", 0, 65535)
    _number("TORCHELASTIC_RESTART_COUNT", 0, None, 0)
    if not os.environ.get("MASTER_ADDR"):
        raise _misread("MASTER_ADDR", "the name or address of the machine of rank 0")
    return True


def _number(name: str, least: int, most: int | None, default: int | None = None) -> int:
    """Return an integer variable of torchrun in its range; without a default it must be set."""
    text = os.environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least or (most is not None and number > most):
        ends = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise _misread(name, f"an integer {ends}")
    return number


def _misread(name: str, wanted: str) -> InputError:
    given = os.environ.get(name)
    got = "it is not set" if given is None else f"got {given!r}"
    return InputError(
        f"the environment variable {name} must be {wanted}, {got}; start several processes with "
        "torchrun, which sets it, or unset WORLD_SIZE for one"
    )


@contextmanager
def together() -> Iterator[None]:
    """Lead the other processes through a command, or serve as one of them and exit afterwards."""
    global _leading
    _end_where_refused_before()
    first = os.environ["RANK"] == "0"
    try:
        if not first:
            sys.exit(_follow())
        ranks, code = _joined(), DEFECT
    except InputError as error:
        say_error(error)
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        if first:
            print("interrupted before anything was done", file=sys.stderr)
        sys.exit(INTERRUPTED)
    _leading = ranks
    _go_on_after_restart()
    with _alive(ranks):
        try:
            yield
        except SystemExit as end:
            code = int(end.code or 0)
            raise
        finally:
            _leading = None
            if code == BAD_INPUT:
                _store().set(REFUSED, "1")
            _dismiss(ranks, code)


@contextmanager
def _alive(ranks: Ranks) -> Iterator[Heartbeat]:
    """Run the heartbeat during the work."""
    global _heartbeat
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store = PrefixStore(f"otdd_flash/alive/{_restarts()}", _store())
    _heartbeat = Heartbeat(store, ranks.rank, ranks.size, INTERVAL, LIMIT)
    _heartbeat.start()
    try:
        yield _heartbeat
    finally:
        _heartbeat.stop()


def named(error: LostRankError) -> LostRankError:
    """Return the error with the rank that has ended, if this process can find out which."""
    if _heartbeat is None or (rank := _heartbeat.gone()) is None:
        return error
    return type(error)(
        f"rank {rank} has ended; what it said before, or torchrun says below, tells why"
    )


def remember(directory: Path) -> None:
    """Store the run directory, so that a restart of these processes continues there."""
    if leading() is None:
        return
    store = _store()
    if not store.check([FOUND]):
        store.set(FOUND, _checkpoint(directory))
    store.set(DIRECTORY, str(directory.resolve()))


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _go_on_after_restart() -> None:
    """Continue in the earlier run directory, if torchrun has restarted the processes."""
    if _restarts() == 0 or not (store := _store()).check([DIRECTORY]):
        return
    directory = store.get(DIRECTORY).decode()
    given = {argument.partition("=")[0] for argument in sys.argv[1:]}
    if "hydra.run.dir" not in given:
        quoted = directory.replace("\\", "\\\\").replace("'", "\\'")
        sys.argv.append(f"hydra.run.dir='{quoted}'")
    # A checkpoint that was there before belongs to an earlier run, not to this flow.
    kept = _checkpoint(Path(directory))
    if kept not in (NONE, store.get(FOUND).decode()) and "flow.resume" not in given:
        sys.argv.append("flow.resume=true")


def _checkpoint(directory: Path) -> str:
    """Return a digest of the checkpoint in a directory; `NONE` if there is none."""
    from otdd_flash.commands.outcome import CHECKPOINT

    try:
        return hashlib.sha256((directory / CHECKPOINT).read_bytes()).hexdigest()
    except OSError:
        return NONE


def _dismiss(ranks: Ranks, code: int) -> None:
    _end_as_meant()
    if ranks.apart and code != DEFECT and _heartbeat is not None:
        # They may work for long on an order that this rank has left.
        _heartbeat.end_others(code)
    try:
        ranks.dismiss(code)
    except LostRankError:
        # The lost rank has printed its reason, and torchrun ends the rest.
        return
    _leave()


def _follow() -> int:
    """Serve until rank 0 is done; return its exit code, or this process's own after an error."""
    from otdd_flash.commands.messages import messages

    rank = os.environ["RANK"]
    try:
        ranks = _joined()
        # From here on only rank 0 handles Ctrl-C.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with _alive(ranks) as heartbeat:
            try:
                code = int(ranks.serve())
            except LostRankError as error:
                _end_as_meant()
                # Rank 0 reports the loss of any other rank.
                if heartbeat.gone() == 0 and heartbeat.first():
                    say_error(named(error))
                return DEFECT
            _end_as_meant()
            _leave()
            return code
    except InputError as error:
        say_error(f"rank {rank}: {error}")
        return BAD_INPUT
    except Exception as error:
        memory = _is_shortage(error)
        say_error(f"rank {rank}: {str(error).splitlines()[0] if str(error) else type(error)}")
        if not memory:
            messages.print("".join(traceback.format_exception(error)))
        return BAD_INPUT if memory else DEFECT


def _end_as_meant() -> None:
    """Ignore signals, so that torchrun cannot change this process's exit code while it ends."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _is_shortage(error: Exception) -> bool:
    import torch

    from otdd_flash.memory import shortage

    nowhere = torch.device("cpu")
    return isinstance(error, RuntimeError) and (
        shortage(error, "parts of the cost", 0, nowhere, torch.float32) is not None
    )


def _joined() -> Ranks:
    """Join the group of all processes, each on a GPU of its own if there are GPUs."""
    import torch

    from otdd_flash.distributed.exchange import PATIENCE
    from otdd_flash.distributed.ranks import Ranks, check_versions

    cards = torch.cuda.device_count()
    # With `device=cpu` there need not be a card per process.
    on_cards = cards > 0 and "device=cpu" not in sys.argv
    backend = "cpu:gloo"
    if on_cards:
        local, count = _number("LOCAL_RANK", 0, None), _number("LOCAL_WORLD_SIZE", 1, None)
        if count > cards:
            _refuse(
                f"{count} processes on a machine of {cards} GPUs; start torchrun with "
                f"--nproc-per-node {cards}, or set device=cpu",
                # One process per machine prints it: other machines may have enough GPUs.
                speaks=local == 0,
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    where: dict[str, Any] = {}
    if _restarts() > 0:
        # Some launchers leave addresses of ended processes in the same store.
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        fresh = PrefixStore(f"otdd_flash/{_restarts()}", _store())
        rank, size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
        where = {"store": fresh, "rank": rank, "world_size": size}
    try:
        torch.distributed.init_process_group(backend, timeout=PATIENCE, **where)
    except RuntimeError as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise InputError(
            f"the {os.environ['WORLD_SIZE']} processes that WORLD_SIZE counts do not meet at "
            f"{place}, where MASTER_ADDR and MASTER_PORT say ({str(error).splitlines()[0]}); start "
            "them with torchrun, or unset WORLD_SIZE for one process"
        ) from error
    ranks = Ranks()
    try:
        check_versions(ranks)
        ranks.check_same("the arguments", sys.argv[1:], "give all processes the same")
    except InputError as error:
        _refuse(str(error), speaks=ranks.rank == 0)
    return ranks


def _refuse(why: str, *, speaks: bool) -> NoReturn:
    """Exit before any work, also if torchrun starts the processes again."""
    import torch

    _end_as_meant()
    if speaks:
        say_error(why)
        _store().set(REFUSED, "1")
    if torch.distributed.is_initialized():
        _leave()
    sys.exit(BAD_INPUT)


def _leave() -> None:
    import torch

    torch.distributed.destroy_process_group()


def _end_where_refused_before() -> None:
    """Exit if torchrun has restarted a command that was refused."""
    if _restarts() == 0 or not (store := _store()).check([REFUSED]):
        return
    _end_as_meant()
    # All exit together, because torchrun ends those still starting once the first has exited.
    here, until = f"{REFUSED} {_restarts()}", time.monotonic() + STARTING
    store.add(here, 1)
    while store.add(here, 0) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < until:
        time.sleep(0.05)
    if os.environ["RANK"] == "0":
        say_error("refused before, as said above; it is not tried again")
    sys.exit(BAD_INPUT)


def _store() -> TCPStore:
    """Connect to torchrun's store for its processes."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


# Seconds between two beats, and seconds without a beat until a rank is lost.
INTERVAL, LIMIT = 2.0, 45.0

# Seconds that a process may take to end after it has closed its connections.
GOING = 1.0

# Seconds within which a working store answers.
ANSWER = 5.0

# Keys: the code with which the ranks except rank 0 are to end, and how many are about to.
END, ENDING = "end", "ending"

# A value in place of a count: the process has ended normally.
LEFT = "left"

# Linux's letters for processes that have ended; "" for those that no longer exist.
ENDED = ("Z", "X", "")

# Letters for stopped processes: Ctrl-Z stops torchrun, but not the processes that it started.
STOPPED = ("T", "t")


class Heartbeat(threading.Thread):
    """A thread that starts the beats of this process, and ends it if the store stops answering.

    The beats are a second thread, which also watches other ranks.

    Args:
        store: the store of the processes.
        rank: of this process.
        size: the number of processes.
        interval: seconds between two beats.
        limit: seconds without a beat until a rank is lost.
    """

    def __init__(self, store: Store, rank: int, size: int, interval: float, limit: float) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self._store, self._rank, self._interval, self._limit = store, rank, interval, limit
        self._size = size
        self._watched = range(1, size) if rank == 0 else range(1)
        # The last value read from a rank, and for how many beats it has been the same.
        self._heard: dict[int, str] = {}
        self._missed: dict[int, int] = {}
        # The number of beats for which the store has not answered.
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
        # If the store does not answer, the last beat cannot be written.
        self._beats.join(ANSWER)

    def end_others(self, code: int) -> None:
        """Make the processes of all other ranks end with a code; only rank 0 calls this."""
        with suppress(RuntimeError):
            self._store.set(END, str(code))
            self._met(2 * self._interval + GOING)

    def gone(self) -> int | None:
        """Return a rank of this machine whose process has ended; None if there is none."""
        until = time.monotonic() + GOING
        while time.monotonic() < until:
            for rank in [*self._heard]:
                process = self._neighbour(rank)
                if process is not None and _state(process) in ENDED:
                    return rank
            time.sleep(GOING / 20)
        return None

    def first(self) -> bool:
        """Return whether this process is the first to report a loss; the others stay silent."""
        try:
            return self._store.add("spoken", 1) == 1
        except RuntimeError:
            # The store is gone, so report the loss.
            return True

    def _beat(self) -> None:
        """Beat, and read the others' keys, until stopped or the connection is lost."""
        with suppress(RuntimeError):
            count = 0
            while not self._ended.wait(self._interval):
                count += 1
                # A beat names its process, by which ranks of the same torchrun can check it.
                beat = f"{count} {os.getpid()} {os.environ.get('GROUP_RANK')}"
                self._store.set(_key(self._rank), beat)
                self._listen()
                if self._rank > 0 and self._store.check([END]):
                    self._store.add(ENDING, 1)
                    # All exit together, because torchrun ends the others once the first is gone.
                    self._met(self._interval)
                    os._exit(int(self._store.get(END)))
                self._unheard = 0
            self._store.set(_key(self._rank), LEFT)

    def _met(self, seconds: float) -> None:
        """Wait until all other ranks are about to end, at most for this many seconds."""
        until = time.monotonic() + seconds
        while self._store.add(ENDING, 0) < self._size - 1 and time.monotonic() < until:
            time.sleep(GOING / 20)

    def _listen(self) -> None:
        for rank in self._watched:
            # A rank may have been stopped before its first beat.
            there = self._store.check([_key(rank)])
            heard = self._store.get(_key(rank)).decode() if there else ""
            if heard != self._heard.get(rank) or heard == LEFT:
                self._heard[rank], self._missed[rank] = heard, 0
                continue
            self._missed[rank] += 1
            if self._missed[rank] * self._interval >= self._limit:
                self._end(f"rank {rank}", self._neighbour(rank), speaks=self.first())

    def _end(self, who: str, process: int | None = None, *, speaks: bool = True) -> None:
        """Print the reason and exit at once: the main thread may be waiting for a lost rank."""
        if speaks:
            say_error(
                f"{who} has not answered for {self._limit:g} s: it is stopped, or its machine is "
                "gone; all processes end"
            )
        if process is not None:
            # A stopped process handles no other signal, and torchrun would wait for it.
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        os._exit(DEFECT)

    def _neighbour(self, rank: int) -> int | None:
        """Return the process of a rank that the same torchrun has started; None for others."""
        match self._heard[rank].split():
            case _, process, group if group == os.environ.get("GROUP_RANK"):
                return int(process)
        return None


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _state(process: int) -> str:
    """Return Linux's letter for the state of a process; "" for one that is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
