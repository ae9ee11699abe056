"""Processes that work on one problem, each a rank of a `torch.distributed` group.

Rank 0 leads: it alone runs the caller's work, such as flows and reports, reads caches, and hears
Ctrl-C. The others `serve`: they hold shares of what rank 0 works on, and do what it orders, which
may be whole solves of their own (`pairwise`, `ranking.bounds`, `sampling.subsampling`), until it
says that it is done. An order is a function that every rank calls with the same arguments, or its
own share of a `Dealt` one, rank 0 too, so ranks always agree on the exchange that comes next.
`commands.ranks`, `otdd.led` and `ranks_of`
make `Ranks`; operators, `labels.by_ranks`, `flows.stepping`, `sampling.subsampling` and others give
orders and exchange tensors by it.

A broadcast of a number takes as long as one of many potentials. So the small tensors of an order
that are on one device are sent as one message of bytes, and every large one by itself. Both sides
call `messages` with the same descriptions, so that they agree on which tensors a message holds.

The other ranks hold copies of a flow's points, which change (`flows.stepping`), and of the labels
and weights of its source, which a user may change (`flows.run`). A `Copied` of each tells whether
they are still equal. An order that changes such a tensor must change its copies alike, and rank 0
must then call `mark_equal` (`tests/ranks/test_what_ranks_hold.py`). PyTorch's count of changes
shows whether a tensor was changed otherwise; it is then sent anew. Changes through `.data`, or by
libraries that share its memory, are not counted; for the memory of a user (`given`) a checksum of
the content shows them on a CPU.
"""

from __future__ import annotations

import io
import math
import pickle
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from otdd_flash import __version__
from otdd_flash.arguments import Progress, takes
from otdd_flash.distributed.exchange import Exchange, others_heard
from otdd_flash.errors import ConvergenceError, InputError, LeaderError, LostRankError
from otdd_flash.fingerprint import Mark, mark_of_tensors

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


T = TypeVar("T")

# Bytes of the first broadcast of an order, as a rule the only one; so many of them tell its length.
PAGE, COUNTED = 4096, 8


# By object, its number and the mark of the content that ranks hold.
Numbers = WeakKeyDictionary[Any, tuple[int, Mark]]


class Dealt(NamedTuple):
    """An argument of an order of which every rank is given its own share of the rows alone."""

    tensor: Tensor


class Ranks(Exchange):
    """One process's view of a group that rank 0 leads.

    Args:
        group: of `torch.distributed`; the default group for None. All its processes make `Ranks`
            of it, at the same time.

    Attributes:
        held: objects that this process keeps for orders to come, by the leader's numbers.
        numbers: the leader's, of objects that ranks hold as long as it does, each with the mark of
            its content when it was sent.
        ring_numbers: the leader's, of objects of which every rank holds a part, with such marks.
        copied: the leader's, tensors of which the others hold copies (`Copied`), by `id`.
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
        """The result of `work` on rank 0, which leads it; the others serve, and get a copy.

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

        Ctrl-C comes when all have done so, or at once in what they do `together`. An exception
        raised here alone leaves the others waiting, who can be given no other order.

        Args:
            function: of a module, which others find by its name.
            *arguments: pickled, but for plain tensors, also within other objects, which are
                moved to where each rank keeps what is there. An argument may be `Dealt`, but hold
                none. Within objects, tensors that the group does not move are pickled.

        Raises:
            InputError: the others have been dismissed, or the group does not move an argument.
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
        for each in arguments:
            tensor = each.tensor if isinstance(each, Dealt) else each
            if isinstance(tensor, Tensor):
                self.device_of(tensor.device)
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
        order = io.BytesIO()
        pickler = _WithoutTensors(order, self.moves)
        pickler.dump((function, arguments))
        carried, dealt = pickler.carried, pickler.dealt
        # Rank 0 would find the whole of a tensor that is dealt within an argument.
        assert len(dealt) == sum(isinstance(each, Dealt) for each in arguments)
        described, of_dealt = ([*map(Described.of, tensors)] for tensors in (carried, dealt))
        # Taken first: objects that end meanwhile are for the next order.
        dropped, self._dropped = self._dropped, []
        content = bytearray(pickle.dumps((dropped, described, of_dealt))) + order.getbuffer()
        with self.moving():
            for part in _pages(content):
                torch.distributed.broadcast(part, self._leader, group=self._orders)
            for places in messages(described):
                message = packed([self._movable(carried[place]) for place in places])
                torch.distributed.broadcast(message, self._leader, group=self._group)
                self._moved += message.nbytes
            for each in dealt:
                self.deal(each)
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
        order = io.BytesIO(content)
        dropped, described, of_dealt = pickle.load(order)
        self._forget(dropped)
        carried, shares = self._received(described), []
        for of in of_dealt:
            like = torch.empty(0, dtype=of.dtype, device=self.device_of(of.device))
            shares.append(self.own_of_dealt(like, of.shape))
        function, arguments = _WithTensors(order, carried, shares).load()
        return function, arguments

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


def _pages(content: bytearray) -> list[Tensor]:
    """A message as it is sent: its length and what a page has room for, then the rest if any."""
    room = PAGE - COUNTED
    first = len(content).to_bytes(COUNTED, "little") + content[:room].ljust(room, b"\0")
    pages = [torch.frombuffer(bytearray(first), dtype=torch.uint8)]
    if len(content) > room:
        # Of a large order there is no second copy.
        pages.append(torch.frombuffer(content, dtype=torch.uint8, offset=room))
    return pages


class _WithoutTensors(pickle.Pickler):
    """Pickles an order without its plain tensors, which follow it.

    Of a `Parameter` and a sparse tensor their parts follow, of `FileFeatures` nothing: they are
    pickled as names of files.

    Args:
        file: where to.
        moves: whether the group moves tensors from a device; others are pickled.

    Attributes:
        carried: the tensors that every rank is given whole, each once.
        dealt: those of which every rank is given its own share.
    """

    def __init__(self, file: io.BytesIO, moves: Callable[[torch.device], bool]) -> None:
        super().__init__(file)
        self._moves = moves
        self._places: dict[int, int] = {}
        self.carried: list[Tensor] = []
        self.dealt: list[Tensor] = []

    def persistent_id(self, part: Any) -> tuple[bool, int] | None:
        """Return what stands for a tensor: whether it is dealt, and its place among such."""
        if isinstance(part, Dealt):
            self.dealt.append(part.tensor)
            return True, len(self.dealt) - 1
        # As bytes, other layouts and numbers to be conjugated cannot be moved.
        plain = type(part) is Tensor and part.layout is torch.strided and not part.is_conj()
        if not plain or not self._moves(part.device):
            return None
        if id(part) not in self._places:
            self._places[id(part)] = len(self.carried)
            self.carried.append(part)
        return False, self._places[id(part)]


class _WithTensors(pickle.Unpickler):
    """Reads an order that `_WithoutTensors` has pickled, with the tensors as they have come."""

    def __init__(self, file: io.BytesIO, carried: list[Tensor], shares: list[Tensor]) -> None:
        super().__init__(file)
        self._carried, self._shares = carried, shares

    def persistent_load(self, pid: tuple[bool, int]) -> Tensor:
        dealt, place = pid
        return (self._shares if dealt else self._carried)[place]


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
    """A copy of it; tensors of a GPU are on this process's."""

    def placed(storage: Any, device: str) -> Any:
        return storage.cuda() if device.startswith("cuda") else storage

    return torch.load(io.BytesIO(content), map_location=placed, weights_only=False)


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


# Bytes up to which a tensor is copied into a message.
SMALL = 2**26
# In a message every tensor begins at a multiple of so many bytes, as kernels want them.
ALIGNED = 256


class Described(NamedTuple):
    """Shape, type and device of a tensor on rank 0."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Described:
        return cls(tensor.shape, tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def messages(tensors: Sequence[Described]) -> list[list[int]]:
    """Return the places of the tensors that each message carries; none of those without entries."""
    found: list[list[int]] = []
    together: dict[torch.device, list[int]] = {}
    for place, each in enumerate(tensors):
        if each.nbytes > SMALL:
            found.append([place])
        elif each.nbytes > 0:
            together.setdefault(each.device, []).append(place)
    return [*found, *together.values()]


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Put tensors of one device into one of bytes; a single one is returned as it is."""
    if len(tensors) == 1:
        return tensors[0].contiguous()
    # One operation: `cat` of all, with what each is short of its room.
    padding = torch.empty(ALIGNED, dtype=torch.uint8, device=tensors[0].device)
    parts = []
    for each in tensors:
        content = each.detach().contiguous().reshape(-1).view(torch.uint8)
        parts += [content, padding[: -len(content) % ALIGNED]]
    return torch.cat(parts)


def empty_message(described: Sequence[Described], device: torch.device) -> Tensor:
    """Return an empty tensor for what `packed` makes of tensors, on a device."""
    if len(described) == 1:
        return torch.empty(described[0].shape, dtype=described[0].dtype, device=device)
    size = sum(map(_room, described))
    return torch.empty(size, dtype=torch.uint8, device=device)


def unpacked(message: Tensor, described: Sequence[Described]) -> list[Tensor]:
    """Return the tensors of a message, which share its memory.

    They are no views of it: a change of one in place is none of the others.
    """
    if len(described) == 1:
        return [message]
    found, first = [], 0
    for each in described:
        there = torch.empty(0, dtype=each.dtype, device=message.device)
        stride = torch.empty(each.shape, device="meta").stride()
        place = first // each.dtype.itemsize
        found.append(there.set_(message.untyped_storage(), place, each.shape, stride))
        first += _room(each)
    return found


def _room(each: Described) -> int:
    """Return the bytes that a tensor takes in a message."""
    return -(-each.nbytes // ALIGNED) * ALIGNED


class Copied:
    """A tensor of which copies are sent when they are needed first.

    Args:
        ranks: that hold them, led by this process.
        tensor: the original.
        owner: the object that changes it; there are copies as long as it lives.
        given: whether its memory is a user's, who may change it as NumPy does; a failed flow, and
            with it its copies, lives as long as somebody keeps the exception.
    """

    def __init__(self, ranks: Ranks, tensor: Tensor, owner: object, *, given: bool = False) -> None:
        self._ranks, self._tensor, self._number = ranks, tensor, ranks.number()
        self._given = given
        self._equal: Mark | None = None
        # The tensor is held here, so that no other one is at its place in memory.
        ranks.copied[id(tensor)] = self
        weakref.finalize(owner, _forget, ranks, id(tensor), self._number)

    @property
    def number(self) -> int | None:
        """The other ranks' number of copies that are equal to the tensor; None where they are not.

        Tensors made in inference mode count nothing, and no copy of one is known to be equal.
        """
        equal = self._equal is not None and self._equal == self._mark()
        return self._number if equal else None

    def _mark(self) -> Mark | None:
        """The mark that changes with the tensor; None where none does."""
        tensor = self._tensor
        if tensor.is_inference():
            return None
        return mark_of_tensors(tensor) if self._given else (tensor._version,)

    def sent(self) -> int:
        """Return `number`, after sending copies if there are no equal ones."""
        if self.number is None:
            self._ranks.order(_hold_copy, self._number, self._tensor)
            self.mark_equal()
        return self._number

    def mark_equal(self) -> None:
        """Record that the copies have been changed as the tensor was."""
        self._equal = self._mark()


def _hold_copy(ranks: Ranks, number: int, tensor: Tensor) -> None:
    if ranks.rank > 0:
        ranks.held[number] = tensor


def _forget(ranks: Ranks, place: int, number: int) -> None:
    ranks.copied.pop(place, None)
    ranks.drop(number)
