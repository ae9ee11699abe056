"""Exchange between processes of a `torch.distributed` group, in the order of the ranks.

All processes call these methods together. A run of as many ranks repeats to the last bit, because
nothing is added in the order in which it arrives; a change must keep this. `ranks` derives `Ranks`
from `Exchange`; `operators.parts`, `operators.self_share` and `flows.stepping` call `added`, and
`commands.ranks` reads `PATIENCE`. `otdd_flash.otdd` and `otdd_flash.result` store a `Shared` in
results, which says how work was shared.

An order is a function that rank 0 has all ranks call (`Ranks.order`). If one process alone leaves
it by an exception, the others wait for messages that never come. So `Exchange.together` raises an
`InputError` or a `ConvergenceError` of one rank on every rank, and `Interrupts` delays Ctrl-C at
rank 0 until the order is done. Ctrl-C comes at once within `together`, and if it is pressed twice
(`tests/ranks/test_interrupts.py`).
"""

from __future__ import annotations

import importlib
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from otdd_flash.errors import ConvergenceError, InputError, LeaderError, LostRankError

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
        layout: `replicated`, if every process held all points; `ring`, if for some cost each held
            its own, and those of the other side went round; `streamed`, if each read what it needed
            from files.
    """

    ranks: int
    bytes_moved: int
    layout: str = "replicated"


ALONE = Shared(1, 0)


class Exchange:
    """One process of a group, and its exchange with the others.

    Args:
        group: of `torch.distributed`; the default group for None. All its processes make one of
            these, at the same time.

    Attributes:
        rank: this process's number in the group, from 0.
        size: how many processes there are.
        shared: how work was shared so far, as this process knows.
        layout: as in `Shared`.
        seconds: that exchanges took, the wait for the slowest process included. None, as from the
            start: they are not timed, for which a GPU has to be waited for.

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
        _import_without_group()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InputError("this process is not in compute.group; call with ranks of it alone")
        members = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._group, self._members, self._leader = group, members, members[0]
        parts = (part.split(":") for part in dist.get_backend_config(group).split(","))
        self._backends = dict(parts)
        self._orders: Any = group
        if self._backends.get("cpu") != "gloo":
            # Orders are in host memory.
            self._orders = dist.new_group(
                members, PATIENCE, backend="gloo", use_local_synchronization=True
            )
        self.seconds: float | None = None
        self.layout, self._moved = ALONE.layout, 0
        self._interrupts = Interrupts()
        # The exception that all ranks raised together last.
        self._raised_by_all: BaseException | None = None

    @property
    def shared(self) -> Shared:
        return Shared(self.size, self._moved, self.layout)

    def sharing_from_here(self) -> Shared:
        """Return how work has been shared so far, and reset the layout that is reported."""
        before, self.layout = self.shared, ALONE.layout
        return before

    def shared_since(self, before: Shared) -> Shared:
        """Return how work has been shared since `before`."""
        now = self.shared
        return now._replace(bytes_moved=now.bytes_moved - before.bytes_moved)

    def moves(self, device: torch.device) -> bool:
        """Return whether the group moves tensors from there; gloo moves those of a GPU by host."""
        return device.type == "cuda" or device.type in self._backends

    def device_of(self, device: torch.device) -> torch.device:
        """The device of this process for tensors that the leader has on a device.

        Raises:
            InputError: the group's backend cannot move tensors from there.
        """
        if not self.moves(device):
            raise InputError(
                f"compute.group is of nccl, which moves no tensors of device={device}; use a group "
                "of gloo, or device=cuda"
            )
        if device.type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return device

    def share(self, count: int, rank: int | None = None) -> slice:
        """The places of `count` that a rank owns, this one by default; shares differ by 1 at most.

        Of fewer places than ranks some ranks own none.
        """
        rank = self.rank if rank is None else rank
        return slice(rank * count // self.size, (rank + 1) * count // self.size)

    def all_gathered(self, tensor: Tensor) -> Tensor:
        """A tensor of one shape and type of every rank, (size, ...)."""
        device = tensor.device
        sent = self._movable(tensor)
        found = sent.new_empty((self.size, *sent.shape))
        dist = torch.distributed
        # Without a copy of each; as newer versions of torch call it, which warn of its first name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self.moving():
            gather(found.view(-1), sent.view(-1), group=self._group)
        self._moved += (self.size - 1) * sent.nbytes
        return found.to(device)

    def gathered(self, part: Tensor, count: int) -> Tensor:
        """All shares of a tensor (count, ...), of which each rank gives its own, (share, ...)."""
        if count % self.size == 0:
            return self.all_gathered(part).flatten(0, 1)
        shares = (self.share(count, rank) for rank in range(self.size))
        return self._joined(part, [share.stop - share.start for share in shares])

    def concatenated(self, part: Tensor) -> Tensor:
        """Tensors (n_r, ...) of every rank, one below the other."""
        return self._joined(part, self.all_gathered_objects(len(part)))

    def _joined(self, part: Tensor, counts: Sequence[int]) -> Tensor:
        """Tensors (n_r, ...) of every rank, of as many rows as `counts` say."""
        padded = part.new_zeros((max(counts), *part.shape[1:]))
        padded[: len(part)] = part
        every = self.all_gathered(padded)
        return torch.cat([every[rank, :count] for rank, count in enumerate(counts)])

    def from_leader(self, tensor: Tensor) -> Tensor:
        """Rank 0's values of a tensor of the same shape and type on every rank."""
        there = self._movable(tensor)
        if self.rank > 0:
            there = torch.empty_like(there)
        with self.moving():
            torch.distributed.broadcast(there, self._leader, group=self._group)
        self._moved += there.nbytes
        return there.to(tensor.device)

    def deal(self, whole: Tensor) -> None:
        """Send every other rank its share of a tensor (count, ...): rank 0 alone.

        All get as many rows as the last, who has most, because NCCL begins with all ranks of a
        group: of fewer rows than ranks every rank gets one, of no rows none does.
        """
        dist, moves = torch.distributed, []
        width = -(-len(whole) // self.size)
        for rank in range(1, self.size):
            first = self.share(len(whole), rank).start
            sent = self._movable(whole[first : first + width])
            moves.append(dist.P2POp(dist.isend, sent, self._members[rank], self._group))
            self._moved += sent.nbytes
        self._wait_for(moves)

    def own_of_dealt(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """This rank's share of what rank 0 deals, of a shape and like a tensor: all but rank 0."""
        own, dist = self.share(shape[0]), torch.distributed
        there = self._movable(like.new_empty((-(-shape[0] // self.size), *shape[1:])))
        self._wait_for([dist.P2POp(dist.irecv, there, self._leader, self._group)])
        return there[: own.stop - own.start].to(like.device)

    def exchanged_rows(self, rows: Tensor, sent: Sequence[int], coming: Sequence[int]) -> Tensor:
        """Send every rank so many of the rows (k, ...) in turn; return what comes, in their order.

        Args:
            rows: those for rank 0 first.
            sent: how many of them each rank gets, this one included.
            coming: how many rows each rank has for this one.
        """
        here, own = self._movable(rows), coming[self.rank]
        found = here.new_empty((sum(coming), *rows.shape[1:]))
        with self.moving():
            torch.distributed.all_to_all_single(
                found, here, list(coming), list(sent), group=self._group
            )
        row = rows.element_size() * math.prod(rows.shape[1:])
        self._moved += (len(rows) + len(found) - 2 * own) * row
        return found.to(rows.device)

    def circulated(
        self,
        own: Sequence[Tensor],
        shapes: Sequence[Sequence[torch.Size]],
        count: int | None = None,
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """The tensors of ranks, as (rank, tensors): first its own, then those of the ranks after.

        While one is used the next is on its way: every rank passes on what it has to the one before
        it. Two are held at a time beside the own. On a GPU the host waits for nothing: tensors that
        come are ordered after the work launched before, and work launched next after them.

        Args:
            own: tensors of one type, at least one, which do not change meanwhile.
            shapes: of every rank's tensors.
            count: of how many ranks; all of them by default.
        """
        device, here = own[0].device, [self._movable(tensor) for tensor in own]
        dist, members = torch.distributed, self._members
        before, after = (members[(self.rank + by) % self.size] for by in (-1, 1))
        last = (self.size if count is None else count) - 1
        for step in range(last + 1):
            rank, coming, waiting, moved = (self.rank + step) % self.size, [], [], 0
            if step < last:
                following = shapes[(rank + 1) % self.size]
                coming = [here[0].new_empty(shape) for shape in following]
                moves = [
                    dist.P2POp(move, tensor, peer, self._group)
                    for move, tensors, peer in (
                        (dist.isend, here, before),
                        (dist.irecv, coming, after),
                    )
                    for tensor in tensors
                    # Both sides know of what there is nothing.
                    if tensor.numel() > 0
                ]
                moved = sum(tensor.nbytes for tensor in (*here, *coming))
                with others_heard():
                    waiting = dist.batch_isend_irecv(moves) if moves else []
            yield rank, [tensor.to(device) for tensor in here]
            with self.moving():
                for each in waiting:
                    each.wait()
            self._moved += moved
            here = coming

    def summed(self, tensor: Tensor) -> Tensor:
        """The sum of a float64 tensor over all ranks, added in their order."""
        return added(self.all_gathered(tensor))

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest that any rank has of each of some numbers of the host; waits for no GPU."""
        said = torch.tensor(numbers, dtype=torch.float64)
        with others_heard():
            torch.distributed.all_reduce(said, torch.distributed.ReduceOp.MAX, group=self._orders)
        return said.tolist()

    def all_gathered_objects(self, something: T) -> list[T]:
        """The objects of all ranks, pickled; for the little that is not tensors."""
        found: list[Any] = [None] * self.size
        with others_heard():
            torch.distributed.all_gather_object(found, something, group=self._orders)
        return found

    def scattered(self, contents: Sequence[Any] | None) -> Any:
        """Rank 0's object for this rank, pickled, of as many as ranks; others give None."""
        found: list[Any] = [None]
        given = None if contents is None else list(contents)
        with self.moving():
            torch.distributed.scatter_object_list(found, given, self._leader, group=self._orders)
        return found[0]

    def gathered_at_leader(self, part: Tensor) -> Tensor | None:
        """Tensors (n_r, ...) in host memory of every rank, one below the other: at rank 0."""
        shapes = self.all_gathered_objects((len(part), part.shape[1:], part.dtype))
        counts = [count for count, _, _ in shapes]
        # A rank without rows does not know how long they are.
        _, row, dtype = max(shapes, key=lambda shape: shape[0])
        padded = torch.zeros((max(counts), *row), dtype=dtype)
        if len(part):
            padded[: len(part)] = part
        every = [torch.empty_like(padded) for _ in counts] if self.rank == 0 else None
        with self.moving():
            torch.distributed.gather(padded, every, self._leader, group=self._orders)
        if every is None:
            return None
        self._moved += (self.size - 1) * padded.nbytes
        return torch.cat([each[:count] for each, count in zip(every, counts, strict=True)])

    def together(self, work: Callable[[], T]) -> T:
        """The result of `work`, where it returns on every rank.

        Raises:
            InputError: on every rank, with the sentence of the first one that refused its input;
                it says which one that is, unless all say the same.
            ConvergenceError: on every rank in the same way, where convergence is required and was
                not reached.
            LeaderError: on all ranks but 0, where that ended with any other error.
        """
        refusal: Exception | None = None
        try:
            # Ctrl-C goes on at once: others may work for long.
            with self._interrupts.heard():
                result = work()
        except Exception as error:
            # Of others rank 0 learns by their end.
            if self.rank > 0 and not isinstance(error, InputError | ConvergenceError):
                raise
            refusal = error
        # Whether any has refused: to gather objects takes seven times as long.
        if self.largest([float(refusal is not None)])[0] == 0:
            return result
        try:
            self._raise_together(refusal)
        except BaseException as error:
            self._raised_by_all = error
            raise
        raise AssertionError("one of them has refused")

    def _raise_together(self, refusal: Exception | None) -> None:
        """Raise what `together` does, where some rank has refused."""
        said = self.all_gathered_objects(None if refusal is None else _as_said(refusal))
        for rank, refused in enumerate(said):
            if refused is not None:
                kind, sentence = refused
                if kind is LeaderError and refusal is not None and rank == self.rank:
                    raise refusal
                alike = kind is LeaderError or all(other == refused for other in said)
                own_error = refusal if rank == self.rank or alike else None
                raise kind(sentence if alike else f"rank {rank}: {sentence}") from own_error

    def _is_raised_by_all(self, error: BaseException) -> bool:
        """Whether it is what all ranks raised together last, which is forgotten with its memory."""
        last, self._raised_by_all = self._raised_by_all, None
        return error is last

    def check_same(self, what: str, content: Any, advice: str) -> None:
        """Raise an `InputError` on every rank unless all have the same content."""
        said = self.all_gathered_objects(content)
        for rank, other in enumerate(said):
            if other != said[0]:
                raise InputError(
                    f"ranks disagree on {what}: rank 0 has {said[0]}, rank {rank} has {other}; "
                    f"{advice}"
                )

    @staticmethod
    def _wait_for(moves: list[Any]) -> None:
        with others_heard():
            for each in torch.distributed.batch_isend_irecv(moves) if moves else ():
                each.wait()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Exchange something, and time it where that is asked for."""
        begun = None if self.seconds is None else _now()
        with others_heard():
            yield
        if begun is not None and self.seconds is not None:
            self.seconds += _now() - begun

    def _movable(self, tensor: Tensor) -> Tensor:
        """A tensor where the group moves it: gloo moves what is in host memory."""
        fast = self._backends.get(tensor.device.type) == "nccl"
        return (tensor if fast else tensor.cpu()).contiguous()


def added(every: Tensor) -> Tensor:
    """The sum (...) of what all ranks have (size, ...), in their order; a new tensor."""
    total = every[0].clone()
    for part in every[1:]:
        total += part
    return total


def _as_said(error: Exception) -> tuple[type[Exception], str]:
    """The kind and sentence of the error that other ranks raise in place of one."""
    for kind in (InputError, ConvergenceError):
        if isinstance(error, kind):
            return kind, str(error)
    return LeaderError, f"rank 0 ended with {type(error).__name__}: {error}"


def _import_without_group() -> None:
    """Import `torch.distributed.nn.functional` as if there were no default group.

    The default arguments of its functions are the default group of the moment when it is imported,
    which the optimisers of torch do. They would keep the group past `destroy_process_group`: its
    threads would run while Python ends, and rarely one of them wants Python then, which aborts the
    process.
    """
    name, group = "torch.distributed.nn.functional", torch.distributed.group
    if name in sys.modules:
        return
    world, group.WORLD = group.WORLD, None
    try:
        importlib.import_module(name)
    finally:
        group.WORLD = world


def _now() -> float:
    """Seconds on a clock, when the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def others_heard() -> Iterator[None]:
    """Raise a `LostRankError` in place of a `RuntimeError`: another process has ended."""
    try:
        yield
    except RuntimeError as error:
        raise LostRankError(
            "another process of compute.group has ended or does not answer; what it said before "
            "tells why"
        ) from error


class Interrupts:
    """Delays Ctrl-C while ranks exchange something; only the main thread receives it."""

    def __init__(self) -> None:
        self._before: Any = None
        self._pressed = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay Ctrl-C until the end; pressed twice, it comes at once."""
        before = signal.getsignal(signal.SIGINT)
        main = threading.current_thread() is threading.main_thread()
        if self._before is not None or before is None or not main:
            yield
            return
        self._before = before
        signal.signal(signal.SIGINT, self._note)
        try:
            yield
        finally:
            self._before = None
            signal.signal(signal.SIGINT, before)
            self._come()

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Let Ctrl-C come at once inside `held`, also one that was pressed before."""
        if self._before is None:
            yield
            return
        signal.signal(signal.SIGINT, self._before)
        try:
            self._come()
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pressed:
            self._pressed = False
            raise KeyboardInterrupt
        self._pressed = True

    def _come(self) -> None:
        if self._pressed:
            self._pressed = False
            signal.raise_signal(signal.SIGINT)
