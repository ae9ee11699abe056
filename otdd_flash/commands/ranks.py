"""Commands that `torchrun` starts in several processes: rank 0 runs them, the others serve.

Rank 0 is the command as it is in one process: it reads, prints, writes and hears Ctrl-C. The others
wait for its orders (`otdd_flash.distributed.ranks`), print nothing but what is wrong with
themselves, and end with its exit code.

Whether the other processes of a command are alive, beside the collectives that wait for them.

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

from otdd_flash.commands import exit_codes
from otdd_flash.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

    from otdd_flash.distributed.ranks import Ranks
    from otdd_flash.errors import LostRankError

_leading: Ranks | None = None
_heartbeat: Heartbeat | None = None

# In the store of torchrun, which outlasts its restarts: that a run was refused, its directory, and
# which checkpoint of an earlier run it found there.
REFUSED, DIRECTORY, FOUND = "otdd_flash/refused", "otdd_flash/directory", "otdd_flash/found"

NONE = "none"

# Seconds by which processes that torchrun starts at once may differ at the most, about.
STARTING = 10.0


def leading() -> Ranks | None:
    """The ranks that this process leads; None where it is the only one."""
    return _leading


def launched() -> bool:
    """Whether torchrun, or what is like it, has started several processes.

    Raises:
        InputError: a variable that it sets for them has no meaning.
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
    """Return an integer variable of torchrun's, in its range; without a default it must be set."""
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
    """Lead the other processes through a command; or be one of them, and leave when it is done."""
    global _leading
    _end_where_refused_before()
    first = os.environ["RANK"] == "0"
    try:
        if not first:
            sys.exit(_follow())
        ranks, code = _joined(), exit_codes.DEFECT
    except InputError as error:
        from otdd_flash.commands.messages import say_error

        say_error(error)
        sys.exit(exit_codes.BAD_INPUT)
    except KeyboardInterrupt:
        if first:
            print("interrupted before anything was done", file=sys.stderr)
        sys.exit(exit_codes.INTERRUPTED)
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
            if code == exit_codes.BAD_INPUT:
                _store().set(REFUSED, "1")
            _dismiss(ranks, code)


@contextmanager
def _alive(ranks: Ranks) -> Iterator[Heartbeat]:
    """Run the heartbeat beside the work."""
    global _heartbeat
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store = PrefixStore(f"otdd_flash/alive/{_restarts()}", _store())
    with beating(store, ranks.rank, ranks.size) as _heartbeat:
        yield _heartbeat


def named(error: LostRankError) -> LostRankError:
    """Name the rank that has ended in the error, if this process can tell which."""
    if _heartbeat is None or (rank := _heartbeat.gone()) is None:
        return error
    return type(error)(
        f"rank {rank} has ended; what it said before, or torchrun says below, tells why"
    )


def remember(directory: Path) -> None:
    """Keep the run directory, so that a restart of these processes goes on there."""
    if leading() is None:
        return
    store = _store()
    if not store.check([FOUND]):
        store.set(FOUND, _checkpoint(directory))
    store.set(DIRECTORY, str(directory.resolve()))


def _restarts() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _go_on_after_restart() -> None:
    """Continue in the run directory of before, if torchrun has restarted the processes."""
    if _restarts() == 0 or not (store := _store()).check([DIRECTORY]):
        return
    directory = store.get(DIRECTORY).decode()
    given = {argument.partition("=")[0] for argument in sys.argv[1:]}
    if "hydra.run.dir" not in given:
        quoted = directory.replace("\\", "\\\\").replace("'", "\\'")
        sys.argv.append(f"hydra.run.dir='{quoted}'")
    # One that an earlier run left is not of this flow.
    kept = _checkpoint(Path(directory))
    if kept not in (NONE, store.get(FOUND).decode()) and "flow.resume" not in given:
        sys.argv.append("flow.resume=true")


def _checkpoint(directory: Path) -> str:
    """Return a digest of the checkpoint in a directory, `NONE` if there is none."""
    from otdd_flash.commands.claims import CHECKPOINT

    try:
        return hashlib.sha256((directory / CHECKPOINT).read_bytes()).hexdigest()
    except OSError:
        return NONE


def _dismiss(ranks: Ranks, code: int) -> None:
    from otdd_flash.errors import LostRankError

    _end_as_meant()
    if ranks.apart and code != exit_codes.DEFECT and _heartbeat is not None:
        # They may work for long on what this rank has left.
        _heartbeat.end_others(code)
    try:
        ranks.dismiss(code)
    except LostRankError:
        # It has said why it ended, and torchrun ends the rest.
        return
    _leave()


def _follow() -> int:
    """Serve until rank 0 is done; return its exit code, or one of this process."""
    from otdd_flash.commands.messages import messages, say_error

    rank = os.environ["RANK"]
    try:
        ranks = _joined()
        # From here on rank 0 hears Ctrl-C, and decides.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with _alive(ranks) as heartbeat:
            return _served(ranks, heartbeat)
    except InputError as error:
        say_error(f"rank {rank}: {error}")
        return exit_codes.BAD_INPUT
    except Exception as error:
        memory = _is_shortage(error)
        say_error(f"rank {rank}: {str(error).splitlines()[0] if str(error) else type(error)}")
        if not memory:
            messages.print("".join(traceback.format_exception(error)))
        return exit_codes.BAD_INPUT if memory else exit_codes.DEFECT


def _served(ranks: Ranks, heartbeat: Heartbeat) -> int:
    from otdd_flash.commands.messages import say_error
    from otdd_flash.errors import LostRankError

    try:
        code = int(ranks.serve())
        _end_as_meant()
        _leave()
        return code
    except LostRankError as error:
        _end_as_meant()
        # Of any other rank 0 tells.
        if heartbeat.gone() == 0 and heartbeat.first():
            say_error(named(error))
        return exit_codes.DEFECT


def _end_as_meant() -> None:
    """Keep this process's exit code where torchrun ends it, as another was a moment faster."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _is_shortage(error: Exception) -> bool:
    import torch

    from otdd_flash.operators.memory import shortage

    nowhere = torch.device("cpu")
    return isinstance(error, RuntimeError) and (
        shortage(error, "parts of the cost", 0, nowhere, torch.float32) is not None
    )


def _joined() -> Ranks:
    """Join the group of all processes, on a GPU of this one's own if there are any."""
    import torch

    from otdd_flash.distributed.exchange import PATIENCE
    from otdd_flash.distributed.ranks import Ranks, check_versions

    cards = torch.cuda.device_count()
    # As in `device=cpu`, for which there need not be a card each.
    on_cards = cards > 0 and "device=cpu" not in sys.argv
    backend = "cpu:gloo"
    if on_cards:
        local, count = _number("LOCAL_RANK", 0, None), _number("LOCAL_WORLD_SIZE", 1, None)
        if count > cards:
            _refuse(
                f"{count} processes on a machine of {cards} GPUs; start torchrun with "
                f"--nproc-per-node {cards}, or set device=cpu",
                # Other machines may have enough, and wait for this one.
                speaks=local == 0,
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    where: dict[str, Any] = {}
    if _restarts() > 0:
        # In the same store some launchers leave addresses of processes that are gone.
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
    """End before any work, also where torchrun starts the processes again."""
    import torch

    _end_as_meant()
    if speaks:
        from otdd_flash.commands.messages import say_error

        say_error(why)
        _store().set(REFUSED, "1")
    if torch.distributed.is_initialized():
        _leave()
    sys.exit(exit_codes.BAD_INPUT)


def _leave() -> None:
    import torch

    torch.distributed.destroy_process_group()


def _end_where_refused_before() -> None:
    """Exit if torchrun restarts a command that was refused before."""
    if _restarts() == 0 or not (store := _store()).check([REFUSED]):
        return
    _end_as_meant()
    # Together, as torchrun ends those that still start when the first has left.
    here, until = f"{REFUSED} {_restarts()}", time.monotonic() + STARTING
    store.add(here, 1)
    while store.add(here, 0) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < until:
        time.sleep(0.05)
    if os.environ["RANK"] == "0":
        from otdd_flash.commands.messages import say_error

        say_error("refused before, as said above; it is not tried again")
    sys.exit(exit_codes.BAD_INPUT)


def _store() -> TCPStore:
    """Connect to the store that torchrun keeps for its processes."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


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
