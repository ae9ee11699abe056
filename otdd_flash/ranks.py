"""Processes that work on one problem, each a rank of a `torch.distributed` group.

Rank 0 leads: it alone runs solvers, flows and reports, reads clocks and caches, and hears Ctrl-C.
The others `serve`: they hold shares of what rank 0 works on, and do what it orders, until it says
that it is done. An order is a function that every rank calls with the same arguments, rank 0 too;
so ranks can never be of two minds about what comes next.

What is gathered is put together in the order of the ranks: a run of as many ranks repeats to the
last bit.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from otdd_flash import arguments
from otdd_flash.checks import takes
from otdd_flash.errors import ConvergenceError, InputError, LostRankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

# How long ranks wait for an order, which may be for data to be read or a flow's pictures.
PATIENCE = timedelta(days=30)


class Shared(NamedTuple):
    """How work was shared.

    Attributes:
        ranks: by how many processes.
        bytes_moved: what rank 0 sent, once however many received it, and received.
    """

    ranks: int
    bytes_moved: int


ALONE = Shared(1, 0)


class _Sent(NamedTuple):
    """In place of a tensor in an order, which follows it."""

    shape: torch.Size
    dtype: torch.dtype


class Ranks:
    """One process's view of a group that rank 0 leads.

    Args:
        group: of `torch.distributed`; the default group for None. All its processes make `Ranks`
            of it, at the same time.

    Attributes:
        rank: this process's number in the group, from 0.
        size: how many processes there are.
        held: what this process keeps for orders to come, by the leader's numbers.
        numbers: the leader's, of objects that ranks hold as long as it does.
        heard: what the leader is told of its own part of an order; no part of the order.
        shared: how work was shared so far, as the leader knows.

    Raises:
        InputError: there is no such group, or this process is not in it.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        dist = torch.distributed
        if not (dist.is_available() and dist.is_initialized()):
            raise InputError(
                "compute.group needs torch.distributed: start the script with torchrun, and call "
                "torch.distributed.init_process_group() first"
            )
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InputError("this process is not in compute.group; call with ranks of it alone")
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._group, self._leader = group, members[0]
        parts = (part.split(":") for part in dist.get_backend_config(group).split(","))
        self._backends = dict(parts)
        self._orders: Any = group
        if self._backends.get("cpu") != "gloo":
            # Orders are in host memory.
            self._orders = dist.new_group(
                members, PATIENCE, backend="gloo", use_local_synchronization=True
            )
        self.held: dict[int, Any] = {}
        self.numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.heard: Callable[[int], None] | None = None
        self._numbers = count()
        self._dropped: list[int] = []
        self._dismissed = False
        self._moved = 0

    def __repr__(self) -> str:
        return f"Ranks({self.rank} of {self.size})"

    @property
    def shared(self) -> Shared:
        """How work was shared so far."""
        return Shared(self.size, self._moved)

    def device_of(self, device: torch.device) -> torch.device:
        """Where this process keeps what the leader has on a device.

        Raises:
            InputError: the group's backend cannot move tensors from there.
        """
        if device.type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        if device.type not in self._backends:
            raise InputError(
                f"compute.group is of nccl, which moves no tensors of device={device}; use a group "
                "of gloo, or device=cuda"
            )
        return device

    def share(self, count: int, rank: int | None = None) -> slice:
        """The places of `count` that a rank owns, this one by default; shares differ by 1 at most.

        Of fewer places than ranks some ranks own none.
        """
        rank = self.rank if rank is None else rank
        return slice(rank * count // self.size, (rank + 1) * count // self.size)

    # What follows is called by all ranks together: in an order, or before one of them leads.

    def each(self, tensor: Tensor) -> Tensor:
        """A tensor of one shape and type of every rank, (size, ...)."""
        device = tensor.device
        sent = self._movable(tensor)
        found = sent.new_empty((self.size, *sent.shape))
        with _others_heard():
            torch.distributed.all_gather(list(found.unbind()), sent, group=self._group)
        self._moved += (self.size - 1) * sent.nbytes
        return found.to(device)

    def gathered(self, part: Tensor, count: int) -> Tensor:
        """All shares of a tensor (count, ...), of which each rank gives its own, (share, ...)."""
        own = self.share(count)
        padded = part.new_zeros((-(-count // self.size), *part.shape[1:]))
        padded[: own.stop - own.start] = part
        every = self.each(padded)
        shares = [self.share(count, rank) for rank in range(self.size)]
        return torch.cat(
            [every[rank, : share.stop - share.start] for rank, share in enumerate(shares)]
        )

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum of a float64 tensor over all ranks, added in their order."""
        every = self.each(tensor)
        total = every[0].clone()
        for part in every[1:]:
            total += part
        return total

    def concatenated(self, part: Tensor) -> Tensor:
        """Tensors (n_r, ...) of every rank, one below the other."""
        counts = self.said(len(part))
        padded = part.new_zeros((max(counts), *part.shape[1:]))
        padded[: len(part)] = part
        every = self.each(padded)
        return torch.cat([every[rank, :count] for rank, count in enumerate(counts)])

    def said(self, something: T) -> list[T]:
        """What every rank says, pickled; for the little that is not tensors."""
        found: list[Any] = [None] * self.size
        with _others_heard():
            torch.distributed.all_gather_object(found, something, group=self._orders)
        return found

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns, where it does on every rank.

        Raises:
            InputError: on every rank, with the sentence of the first one that refused its input;
                it says which one that is, unless all say the same.
            ConvergenceError: likewise, where convergence is required and was not reached.
        """
        refusal: InputError | ConvergenceError | None = None
        try:
            result = work()
        except (InputError, ConvergenceError) as error:
            refusal = error
        own = None if refusal is None else (isinstance(refusal, InputError), str(refusal))
        said = self.said(own)
        for rank, refused in enumerate(said):
            if refused is not None:
                kind = InputError if refused[0] else ConvergenceError
                alike = all(other == refused for other in said)
                raise kind(refused[1] if alike else f"rank {rank}: {refused[1]}")
        return result

    def check_same(self, what: str, content: Any, advice: str) -> None:
        """Raise an `InputError` on every rank unless all have the same content."""
        said = self.said(content)
        for rank, other in enumerate(said):
            if other != said[0]:
                raise InputError(
                    f"ranks disagree on {what}: rank 0 has {said[0]}, rank {rank} has {other}; "
                    f"{advice}"
                )

    # How rank 0 leads, and how the others follow.

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
        """End the service of the others, with something to return, or to raise."""
        self._send(None, (saved(result),))
        self._dismissed = True
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
            except (InputError, ConvergenceError):
                # It was raised by `together`: rank 0 has it too, and decides.
                continue
        self.held.clear()
        result = restored(arguments[0])
        if isinstance(result, Exception):
            raise result
        return result

    def order(self, function: Callable[..., T], *arguments: Any) -> T:
        """Have every rank call function(ranks, *arguments); return what it returns here.

        Args:
            function: of a module, which others find by its name.
            *arguments: tensors, moved to where each rank keeps what is there; or what is pickled.

        Raises:
            InputError: the others have been dismissed.
        """
        if self._dismissed:
            raise InputError(
                "the processes of compute.group have been dismissed; what needs them belongs into "
                "the work that otdd.led calls"
            )
        self._send(function, arguments)
        return function(self, *arguments)

    def number(self) -> int:
        """A new number for something that ranks hold."""
        return next(self._numbers)

    def drop(self, number: int) -> None:
        """Have no rank hold what has a number, from the next order on."""
        self._dropped.append(number)

    def _movable(self, tensor: Tensor) -> Tensor:
        """A tensor where the group moves it: gloo moves what is in host memory."""
        fast = self._backends.get(tensor.device.type) == "nccl"
        return (tensor if fast else tensor.cpu()).contiguous()

    def _send(self, function: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> None:
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        sent = tuple(
            (_Sent(each.shape, each.dtype), each.device) if isinstance(each, Tensor) else each
            for each in arguments
        )
        # Taken first: what ends meanwhile is for the next order.
        dropped, self._dropped = self._dropped, []
        content = pickle.dumps((dropped, function, sent))
        message = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        with _others_heard():
            for part in (torch.tensor([len(message)]), message):
                torch.distributed.broadcast(part, self._leader, group=self._orders)
            for tensor in tensors:
                torch.distributed.broadcast(self._movable(tensor), self._leader, group=self._group)
        self._moved += len(message) + sum(tensor.nbytes for tensor in tensors)
        self._forget(dropped)

    def _receive(self) -> tuple[Callable[..., Any] | None, tuple[Any, ...]]:
        length = torch.empty(1, dtype=torch.int64)
        with _others_heard():
            torch.distributed.broadcast(length, self._leader, group=self._orders)
            message = torch.empty(int(length), dtype=torch.uint8)
            torch.distributed.broadcast(message, self._leader, group=self._orders)
        dropped, function, arguments = pickle.loads(message.numpy().tobytes())
        self._forget(dropped)
        return function, tuple(map(self._received, arguments))

    def _received(self, argument: Any) -> Any:
        match argument:
            case (_Sent(shape, dtype), torch.device() as device):
                own = self.device_of(device)
                there = self._movable(torch.empty(shape, dtype=dtype, device=own))
                with _others_heard():
                    torch.distributed.broadcast(there, self._leader, group=self._group)
                return there.to(own)
        return argument

    def _forget(self, numbers: list[int]) -> None:
        for number in numbers:
            self.held.pop(number, None)


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


@contextmanager
def _others_heard() -> Iterator[None]:
    """Say in an error that it is another process that has ended."""
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            "another process of compute.group has ended or does not answer; what it said before "
            "tells why"
        ) from error


def ranks_of(group: ProcessGroup | Ranks | str | None) -> Ranks | None:
    """The ranks of what `ComputeOptions.group` holds; None without a group.

    Raises:
        InputError: there is no such group.
    """
    if group is None or isinstance(group, Ranks):
        return group
    return Ranks(None if isinstance(group, str) else group)


def shared_since(before: Shared, group: ProcessGroup | Ranks | str | None) -> Shared:
    """How work was shared by a group after it had been shared so far."""
    if not isinstance(group, Ranks):
        return ALONE
    return Shared(group.size, group.shared.bytes_moved - before.bytes_moved)


@takes(arguments.LED)
def led(work: Callable[[Ranks], T], group: ProcessGroup | str | None = None) -> T:
    """Call work(ranks) on rank 0 of a group, with the other processes to share its passes.

    All processes of the group call `led`; rank 0 alone runs `work`, which may call whatever takes
    `compute=otdd.ComputeOptions(group=ranks)`, with whole datasets. All return what it returns.

    Args:
        work: takes the ranks.
        group: of `torch.distributed`; its default group for None.

    Raises:
        InputError: there is no such group; on every rank, where the work raises one.
        LostRankError: another process has ended.
    """
    ranks = Ranks(None if group is None or isinstance(group, str) else group)
    return ranks.led(lambda: work(ranks))
