"""Commands that `torchrun` starts in several processes: rank 0 runs them, the others serve.

Rank 0 is the command as it is in one process: it reads, prints, writes and hears Ctrl-C. The others
wait for its orders (`otdd_flash.distributed.ranks`), print nothing but what is wrong with
themselves, and end with its exit code.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from otdd_flash.commands import exit_codes
from otdd_flash.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from otdd_flash.commands.heartbeat import Heartbeat
    from otdd_flash.distributed.ranks import Ranks
    from otdd_flash.errors import LostRankError

# In the store of torchrun, which outlasts its restarts: that a run was refused, its directory, and
# which checkpoint of an earlier run it found there.
REFUSED, DIRECTORY, FOUND = "otdd_flash/refused", "otdd_flash/directory", "otdd_flash/found"
NONE = "none"

# Seconds by which processes that torchrun starts at once may differ at the most, about.
STARTING = 10.0

_leading: Ranks | None = None
_heartbeat: Heartbeat | None = None


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

    from otdd_flash.commands.heartbeat import beating

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
