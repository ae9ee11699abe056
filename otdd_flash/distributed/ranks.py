"""Processes that work on one problem, each a rank of a `torch.distributed` group.

Rank 0 leads: it alone runs solvers, flows and reports, reads clocks and caches, and hears Ctrl-C.
The others `serve`: they hold shares of what rank 0 works on, and do what it orders, until it says
that it is done. An order is a function that every rank calls with the same arguments, rank 0 too;
so ranks can never be of two minds about what comes next. `commands.ranks` and `otdd.led` make
`Ranks`; operators, `labels.by_ranks`, `flows.stepping`, `sampling.subsampling` and others order and
exchange by it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from otdd_flash import __version__
from otdd_flash.arguments import Progress, takes
from otdd_flash.distributed.exchange import Exchange, others_heard
from otdd_flash.distributed.messages import (
    Described,
    empty_message,
    messages,
    packed,
    unpacked,
)
from otdd_flash.errors import ConvergenceError, InputError, LeaderError, LostRankError
from otdd_flash.fingerprint import Mark

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from otdd_flash.distributed.copies import Copied

T = TypeVar("T")

# Bytes of the first broadcast of an order, as a rule the only one; so many of them tell its length.
PAGE, COUNTED = 4096, 8


# By object, what ranks call it and the mark of what they hold.
Numbers = WeakKeyDictionary[Any, tuple[int, Mark]]


class Dealt(NamedTuple):
    """An argument of an order of which every rank is given its own share of the rows alone."""

    tensor: Tensor


class _Sent(NamedTuple):
    """In place of a tensor in an order, which follows it: its place among those that follow."""

    place: int


class _DealtTo(NamedTuple):
    """In place of a `Dealt` tensor in an order, of which each rank is given its own share."""

    of: Described


class Ranks(Exchange):
    """One process's view of a group that rank 0 leads.

    Args:
        group: of `torch.distributed`; the default group for None. All its processes make `Ranks`
            of it, at the same time.

    Attributes:
        held: what this process keeps for orders to come, by the leader's numbers.
        numbers: the leader's, of objects that ranks hold as long as it does, each with what marked
            its content when it was sent.
        ring_numbers: likewise, of those of which every rank holds a part.
        copied: the leader's, tensors that change with their copies (`copies.Copied`), by `id`.
        room: the leader's, by device: its bytes free for points when ranks said last how many they
            have, and the least of these.
        apart: whether rank 0 has left an order in which the others still are.
        progress: called as progress(done, total) with what is done of this rank's own part of an
            order; the leader's alone.

    Raises:
        InputError: there is no such group, or this process is not in it.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.held: dict[int, Any] = {}
        self.numbers: Numbers = WeakKeyDictionary()
        self.ring_numbers: Numbers = WeakKeyDictionary()
        self.copied: dict[int, Copied] = {}
        self.room: dict[torch.device, tuple[int, int]] = {}
        self.progress: Progress | None = None
        self._numbers = count()
        self._dropped: list[int] = []
        self._dismissed = False
        self.apart = False

    def __repr__(self) -> str:
        return f"Ranks({self.rank} of {self.size})"

    def led(self, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, which leads it; the others serve, and get a copy.

        Raises:
            Exception: on every rank, where the work raises one; a `LostRankError` on others, but
                for `InputError` and `ConvergenceError`.
        """
        if self.rank > 0:
            return cast(T, self.serve())
        try:
            result = work()
        except LostRankError:
            raise
        except Exception as error:
            known = isinstance(error, InputError | ConvergenceError)
            lost = LostRankError(f"rank 0 ended with {type(error).__name__}: {error}")
            self.dismiss(error if known else lost)
            raise
        self.dismiss(result)
        return result

    def dismiss(self, result: Any) -> None:
        """End the service of the others, with something to return, or to raise.

        Where rank 0 has left them in the middle of an order, they end when its process does.
        """
        self._dismissed = True
        with self._interrupts.held():
            if not self.apart:
                self._send(None, (saved(result),))
        self.held.clear()

    def serve(self) -> Any:
        """Do what rank 0 orders, until it dismisses this rank; return what it gave.

        Raises:
            Exception: that rank 0 gave.
            LostRankError: another rank has ended.
        """
        while True:
            function, arguments = self._receive()
            if function is None:
                break
            try:
                function(self, *arguments)
            except (InputError, ConvergenceError, LeaderError) as error:
                # Of what all have raised rank 0 decides.
                if not self._is_raised_by_all(error):
                    raise
        self.held.clear()
        result = restored(arguments[0])
        if isinstance(result, Exception):
            raise result
        return result

    def order(self, function: Callable[..., T], *arguments: Any) -> T:
        """Have every rank call function(ranks, *arguments); return what it returns here.

        Ctrl-C comes when all have done so, or at once in what they do `together`. What is raised
        here alone leaves the others waiting, who can be given no other order.

        Args:
            function: of a module, which others find by its name.
            *arguments: tensors, moved to where each rank keeps what is there; tensors that are
                `Dealt`, likewise; or what is pickled.

        Raises:
            InputError: the others have been dismissed.
            LostRankError: they wait in an order that ended here with an error.
        """
        if self._dismissed:
            raise InputError(
                "the processes of compute.group have been dismissed; what needs them belongs into "
                "the work that otdd.led calls"
            )
        if self.apart:
            raise LostRankError(
                "rank 0 has left the other ranks in the middle of what they do together"
            )
        with self._interrupts.held():
            self.apart = True
            try:
                self._send(function, arguments)
                own = (
                    each.tensor[self.share(len(each.tensor))] if isinstance(each, Dealt) else each
                    for each in arguments
                )
                found = function(self, *own)
            except BaseException as error:
                self.apart = not self._is_raised_by_all(error)
                raise
            self.apart = False
        return found

    def report_to(self, progress: Progress | None, total: int) -> None:
        """Have progress(done, total) called in orders to come, as if all ranks were as far."""
        size = self.size
        self.progress = progress and (lambda done, _: progress(min(done * size, total), total))

    def number(self) -> int:
        """A new number for something that ranks hold."""
        return next(self._numbers)

    def drop(self, number: int) -> None:
        """Have no rank hold what has a number, from the next order on."""
        self._dropped.append(number)

    def _send(self, function: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> None:
        sent, carried = _taken_out(arguments)
        described = [*map(Described.of, carried)]
        # Taken first: what ends meanwhile is for the next order.
        dropped, self._dropped = self._dropped, []
        content = pickle.dumps((dropped, function, sent, described))
        with self.moving():
            for part in _pages(content):
                torch.distributed.broadcast(part, self._leader, group=self._orders)
            for places in messages(described):
                message = packed([self._movable(carried[place]) for place in places])
                torch.distributed.broadcast(message, self._leader, group=self._group)
                self._moved += message.nbytes
            for each in arguments:
                if isinstance(each, Dealt):
                    self.deal(each.tensor)
        self._moved += len(content)
        self._forget(dropped)

    def _receive(self) -> tuple[Callable[..., Any] | None, tuple[Any, ...]]:
        first = torch.empty(PAGE, dtype=torch.uint8)
        with others_heard():
            torch.distributed.broadcast(first, self._leader, group=self._orders)
            page = first.numpy().tobytes()
            length, content = int.from_bytes(page[:COUNTED], "little"), page[COUNTED:]
            if length > len(content):
                rest = torch.empty(length - len(content), dtype=torch.uint8)
                torch.distributed.broadcast(rest, self._leader, group=self._orders)
                content += rest.numpy().tobytes()
        dropped, function, arguments, described = pickle.loads(content[:length])
        self._forget(dropped)
        carried = self._received(described)

        def received(argument: Any) -> Any:
            match argument:
                case _Sent(place):
                    return carried[place]
                case _DealtTo(of):
                    like = torch.empty(0, dtype=of.dtype, device=self.device_of(of.device))
                    return self.own_of_dealt(like, of.shape)
            return argument

        return function, tuple(map(received, arguments))

    def _received(self, described: Sequence[Described]) -> list[Tensor]:
        """Receive the tensors that follow an order."""
        devices = [self.device_of(each.device) for each in described]
        found = [
            torch.empty(each.shape, dtype=each.dtype, device=device)
            if each.nbytes == 0
            else torch.empty(0)
            for each, device in zip(described, devices, strict=True)
        ]
        for places in messages(described):
            some, device = [described[place] for place in places], devices[places[0]]
            message = self._movable(empty_message(some, device))
            with others_heard():
                torch.distributed.broadcast(message, self._leader, group=self._group)
            for place, each in zip(places, unpacked(message, some), strict=True):
                found[place] = each.to(device)
        return found

    def _forget(self, numbers: list[int]) -> None:
        for number in numbers:
            self.held.pop(number, None)


def _pages(content: bytes) -> list[Tensor]:
    """A message as it is sent: its length and what a page has room for, then the rest if any."""
    room = PAGE - COUNTED
    first = len(content).to_bytes(COUNTED, "little") + content[:room].ljust(room, b"\0")
    pages = [first] if len(content) <= room else [first, content[room:]]
    return [torch.frombuffer(bytearray(page), dtype=torch.uint8) for page in pages]


def _taken_out(arguments: Sequence[Any]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Return what of an order's arguments is pickled, and the tensors that follow, each once."""
    carried: list[Tensor] = []
    places: dict[int, int] = {}

    def pickled(argument: Any) -> Any:
        if isinstance(argument, Dealt):
            return _DealtTo(Described.of(argument.tensor))
        if not isinstance(argument, Tensor):
            return argument
        if id(argument) not in places:
            places[id(argument)] = len(carried)
            carried.append(argument)
        return _Sent(places[id(argument)])

    return tuple(map(pickled, arguments)), carried


def check_versions(ranks: Ranks) -> None:
    """Raise an `InputError` on every rank unless all run the same versions."""
    versions = {"otdd_flash": __version__, "torch": torch.__version__}
    ranks.check_same("versions", versions, "install the same everywhere")


def balanced(costs: Sequence[float], size: int) -> list[int]:
    """Which of so many ranks takes each unit of work: the longest first, to the least loaded."""
    loads, owners = [0.0] * size, [0] * len(costs)
    for unit in sorted(range(len(costs)), key=lambda unit: -costs[unit]):
        owners[unit] = loads.index(min(loads))
        loads[owners[unit]] += costs[unit]
    return owners


def saved(something: Any) -> bytes:
    """An object with tensors, for an order."""
    content = io.BytesIO()
    torch.save(something, content)
    return content.getvalue()


def restored(content: bytes) -> Any:
    """A copy of it; what was on a GPU is on this process's."""

    def placed(storage: Any, device: str) -> Any:
        return storage.cuda() if device.startswith("cuda") else storage

    return torch.load(io.BytesIO(content), map_location=placed, weights_only=False)


def taken_apart(something: Any, device: torch.device) -> tuple[bytes, list[Tensor]]:
    """An object for an order: what is pickled of it, and its tensors on a device, each once."""
    tensors: dict[int, Tensor] = {}
    content = io.BytesIO()

    class Apart(pickle.Pickler):
        def persistent_id(self, part: Any) -> int | None:
            if not isinstance(part, Tensor) or part.device != device:
                return None
            tensors.setdefault(id(part), part)
            return list(tensors).index(id(part))

    Apart(content).dump(something)
    return content.getvalue(), list(tensors.values())


def put_together(content: bytes, tensors: Sequence[Tensor]) -> Any:
    """A copy of it, of the tensors as they have come."""

    class Together(pickle.Unpickler):
        def persistent_load(self, place: int) -> Tensor:
            return tensors[place]

    return Together(io.BytesIO(content)).load()


def ranks_of(group: ProcessGroup | Ranks | str) -> Ranks:
    """The ranks of what `ComputeOptions.group` holds.

    Raises:
        InputError: there is no such group.
    """
    if isinstance(group, Ranks):
        return group
    return Ranks(None if isinstance(group, str) else group)


@takes()
def led(work: Callable[[Ranks], T], group: ProcessGroup | str | None = None) -> T:
    """Call work(ranks) on rank 0 of a process group; the other ranks share its passes.

    All processes of the group call `led`; rank 0 alone runs `work`, which may call whatever takes
    `compute=otdd.ComputeOptions(group=ranks)`, with whole datasets. All return what it returns.

    Args:
        work: a function of the ranks, which it hands on as `group`.
        group: of `torch.distributed`; its default group for None.

    Raises:
        InputError: there is no such group, or its processes run several versions; also, on every
            rank, an error that `work` raises.
        LostRankError: another process has ended.
    """
    ranks = Ranks(None if group is None or isinstance(group, str) else group)
    check_versions(ranks)
    return ranks.led(lambda: work(ranks))
