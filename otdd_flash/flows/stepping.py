"""The steps of a flow: optimiser, schedule, noise and box, on one process or several ranks.

Velocities v are gradients divided by masses, so plain descent, the default, is the explicit
Euler step x <- x - tau v of the flow, for any number of particles.

`Stepping` holds the options. Users, `commands.adapt` and `integrations.sklearn` set them, and
`flows.flow` stores them; a schedule in TO_THE_END depends on the number of steps, so a resumed flow
must repeat that number. `flows.objective` draws a `Batch` and hands it to the modes (`flows.modes`,
`flows.joint_modes`). `flows.run` takes steps through `Stepper`.

The optimisers allowed here move each number by its own gradients alone, so different ranks can move
different rows: rank r owns the rows `share(n)` of a variable of n rows, with their optimiser state
(`Rows`). It receives the velocities of its rows, or holds them already (`OwnedVelocity`), and the
moved rows are gathered. If other ranks hold copies of all points (`distributed.ranks.Copied`),
every rank moves its copy too.

If every rank has all points and the ranks share the passes, rank r computes the products of the
plans of both terms, xy and xx, for its own points. `OwnedGradient`, which `flows.objective` makes
on rank 0, has each rank add them up, term by term, as `DivergenceGradient` does in one process.
Then every row is sent to the rank that owns it in the particles' own order (`Ranks.share`), and
rank 0 gets an `OwnedVelocity`. So a step exchanges two arrays of the points' size in all: part of
the velocities, and the moved points.

Random numbers (`Draw`, `generator`; `flows.objective` and `flows.run` draw by them too) depend only
on seed, step and purpose, so a flow is the same when it is resumed, and on any device. Functions
that ranks run (`_own`, `_call`, `_add`, `_gather`, `_settle`) must stay at module level, where
other processes find them by name. `Stepper` calls methods of `Rows` by name ("step", "undo",
"write", "restore"), and the name of a variable holds no dot, because `restore` splits VARIABLE.KEY.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash.arguments import NotNegative, check_fields
from otdd_flash.cost.points import less_origin, per_mass_
from otdd_flash.derivatives.centred import origin_near
from otdd_flash.derivatives.gradient import DivergenceGradient, pulled
from otdd_flash.distributed.exchange import added
from otdd_flash.distributed.ranks import Copied, Dealt, Ranks
from otdd_flash.errors import InputError, choose
from otdd_flash.flows.checkpoint import VALUE, Parts, Shard, write_shard
from otdd_flash.operators import parts
from otdd_flash.operators.base import Operator
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.parts import Owned
from otdd_flash.operators.sharing import ShardedOperator
from otdd_flash.samples import largest_entry
from otdd_flash.solver.term import TransportTerm

# The step size at step k of T, as a multiple of the first.
SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "constant": lambda k, total: 1.0,
    "inverse_sqrt": lambda k, total: 1 / math.sqrt(k + 1),
    "linear": lambda k, total: 1 - k / total,
    "cosine": lambda k, total: (1 + math.cos(math.pi * k / total)) / 2,
}

# The schedules that depend on T.
TO_THE_END = ("linear", "cosine")

# Optimisers that need a closure or sparse gradients, or whose rows depend on other rows.
UNSUITABLE = ("Optimizer", "LBFGS", "SparseAdam", "Muon", "Adafactor")


@dataclass(frozen=True)
class Stepping:
    """The options of a flow's steps.

    `noise` moves the points at which the gradient is taken (`flows.objective`); the noise of an
    entropy functional is added to the points by `Stepper`.

    Args:
        step_size: time tau of a step, the optimiser's learning rate; with lambda_x = 0.5 and plain
            descent, the share of the way to the target that a point moves.
        optimizer: a class of torch.optim, in upper or lower case.
        optimizer_options: its other arguments.
        schedule: of the step size, one of `SCHEDULES`.
        box: (lowest, highest) value of a coordinate, None for no limits.
        noise: deviation of a Gaussian displacement at which the gradient is taken instead of at the
            points (Arbel et al. 2019, Maximum mean discrepancy gradient flow).
        minibatch: particles that move in a step, and target points that they are compared with;
            None for all. Particles outside the minibatch move by their momentum alone, so that n /
            minibatch steps correspond to one step of all.

    Raises:
        InputError: an unknown optimiser, option or schedule, or a number out of its range.
    """

    step_size: float = 0.1
    optimizer: str = "SGD"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    schedule: str = "constant"
    box: tuple[float, float] | None = None
    noise: NotNegative = 0.0
    minibatch: int | None = None

    def __post_init__(self) -> None:
        check_fields(self, "flow.")
        if not 0 < self.step_size < math.inf:
            raise InputError(
                f"flow.step_size must be positive and finite, got {self.step_size}; 0.1 moves a "
                "point a tenth of its way"
            )
        choose("flow.schedule", self.schedule, tuple(SCHEDULES))
        if self.box is not None:
            if len(self.box) != 2 or not self.box[0] < self.box[1]:
                raise InputError(
                    f"flow.box must be two numbers [lowest, highest], the first below the second, "
                    f"got {list(self.box)}"
                )
            # A list and a tuple must be the same setting.
            object.__setattr__(self, "box", tuple(self.box))
        if self.minibatch is not None and self.minibatch < 1:
            raise InputError(f"flow.minibatch must be positive or null, got {self.minibatch}")
        # Built once, so that errors of its options are raised here.
        self.build([torch.nn.Parameter(torch.zeros(1))])

    def build(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Build the optimiser over some parameters."""
        named = optimizers()
        choose("flow.optimizer", self.optimizer.lower(), tuple(named))
        chosen = named[self.optimizer.lower()]
        try:
            return chosen(parameters, lr=self.step_size, **self.optimizer_options)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"flow.optimizer_options={dict(self.optimizer_options)} do not suit "
                f"{chosen.__name__}: {error}; it takes "
                f"{', '.join(list(inspect.signature(chosen).parameters)[2:])}"
            ) from None

    @property
    def plain(self) -> bool:
        """Whether a step is x <- x - tau v with the current velocity alone."""
        return (
            self.optimizer.lower() == "sgd"
            and not self.optimizer_options
            and self.noise == 0
            and self.minibatch is None
        )

    def step_size_at(self, step: int, total: int) -> float:
        """Return the time tau of step number `step` of `total`."""
        return self.step_size * SCHEDULES[self.schedule](step, total)


def optimizers() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """Return the optimisers of torch.optim with one gradient per step, by lower-case name."""
    return {
        name.lower(): value
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value)
        and issubclass(value, torch.optim.Optimizer)
        and name not in UNSUITABLE
    }


class Draw(IntEnum):
    """The purposes of a step's random numbers."""

    PERTURBATION = 0
    LANGEVIN = 1
    MINIBATCH = 2


def normal_like(points: Tensor, draw: torch.Generator) -> Tensor:
    """Return standard normal numbers with the shape and type of `points`, equal on every device."""
    return torch.randn(points.shape, generator=draw, dtype=points.dtype).to(points.device)


def generator(seed: int, step: int, purpose: int) -> torch.Generator:
    """Return the generator of one step's random numbers, which need no stored state."""
    # A large odd factor separates neighbouring seeds, steps and purposes.
    mixed = (seed * 1_000_003 + step) * 1_000_003 + purpose
    return torch.Generator().manual_seed(mixed % 2**63)


class Batch(NamedTuple):
    """A minibatch of both sides: row indices (b,) of the particles and of the target."""

    particles: Tensor
    target: Tensor

    def only(self, rows: Tensor) -> Tensor:
        """Return the rows (n, d), one per particle, with 0 outside the batch."""
        return torch.zeros_like(rows).index_copy_(0, self.particles, rows[self.particles])


class Stepper:
    """Moves the variables of a flow, in place.

    Args:
        variables: (n, ...) by name; the points under "points".
        stepping: the options of steps.
        total: steps of the whole flow, which some schedules need.
        temperature: w of an entropy functional w * int rho log rho, 0 for none.
        before_box: called with the points of a step before they are clamped to the box.
        ranks: the ranks that own the rows, led by this process; None for one process.
    """

    def __init__(
        self,
        variables: Mapping[str, Tensor],
        stepping: Stepping,
        total: int,
        temperature: float,
        before_box: Callable[[Tensor], None] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._variables, self._stepping, self._total = dict(variables), stepping, total
        self._temperature, self._before_box, self._ranks = temperature, before_box, ranks
        counts = {name: len(tensor) for name, tensor in variables.items()}
        self._copied: Copied | None = None
        if ranks is None:
            self._own = Rows(None, stepping, counts, *variables.values())
            return
        self._number = ranks.number()
        weakref.finalize(self, ranks.drop, self._number)
        self._copied = Copied(ranks, variables["points"], self)
        dealt = self._of_own(*variables.values())
        self._own = ranks.order(_own, self._number, stepping, counts, *dealt)

    def step(
        self,
        velocities: Mapping[str, Tensor | OwnedVelocity],
        step: int,
        draw: torch.Generator,
        batch: Batch | None = None,
    ) -> None:
        """Move along -velocities, add the noise of entropy, and clamp to the box."""
        size, box = self._stepping.step_size_at(step, self._total), self._stepping.box
        points, noise, spread = self._variables["points"], None, 0.0
        if self._temperature > 0:
            spread = math.sqrt(2 * self._temperature * size)
            noise = normal_like(points, draw)
            noise = noise if batch is None else batch.only(noise)
            (noise,) = self._of_own(noise)
        against = (self._against(velocities[name], part) for name, part in self._variables.items())
        # Copies of the points on other ranks change alike, if there are any.
        copy = None if self._copied is None else self._copied.number
        self._take(self._all("step", copy, size, spread, noise, *against))
        if box is not None:
            if self._before_box is not None:
                self._before_box(points)
            points.clamp_(*box)
        if self._copied is not None and copy is not None:
            self._copied.mark_equal()

    def undo(self) -> None:
        """Return to the rows before the last step, on every rank."""
        self._take(self._all("undo"))

    def others(self) -> dict[str, dict[str, Any]]:
        """Return the optimiser's state that belongs to no row, such as its count of steps."""
        return self._own.kept(of_rows=False)

    def write(self, folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> list[Shard]:
        """Write a shard on every rank, with these tensors in that of rank 0.

        Raises:
            InputError: a shard cannot be written.
        """
        self._own.beside = tensors
        found: list[Shard] = self._all("write", folder.resolve(), stem)
        return found

    def restore(self, rows: Parts, others: Mapping[str, Any]) -> None:
        """Continue from a checkpoint: rows of all variables, and what `others` returned."""
        tensors = (rows[name].to(self._variables[name.split(".")[0]]) for name in rows)
        self._all("restore", [*rows], others, *self._of_own(*tensors))
        self._take({name: rows[f"{name}.{VALUE}"] for name in self._variables})

    def _against(self, velocity: Tensor | OwnedVelocity, variable: Tensor) -> Any:
        """Return what each rank receives of velocities, or the number under which it holds them."""
        if isinstance(velocity, OwnedVelocity):
            return velocity.number
        return self._of_own(velocity.to(variable))[0]

    def _all(self, method: str, *arguments: Any) -> Any:
        """Call a method of the rows on every rank."""
        if self._ranks is None:
            return getattr(self._own, method)(*arguments)
        return self._ranks.order(_call, self._number, method, *arguments)

    def _take(self, whole: Mapping[str, Tensor]) -> None:
        for name, tensor in whole.items():
            self._variables[name].copy_(tensor)

    def _of_own(self, *whole: Tensor) -> tuple[Any, ...]:
        """Mark tensors of all rows as arguments of which each rank receives its own rows."""
        return whole if self._ranks is None else tuple(map(Dealt, whole))


def _own(
    ranks: Ranks, number: int, stepping: Stepping, counts: Mapping[str, int], *own: Tensor
) -> Rows:
    rows = ranks.held[number] = Rows(ranks, stepping, counts, *own)
    return rows


def _call(ranks: Ranks, number: int, method: str, *arguments: Any) -> Any:
    return getattr(ranks.held[number], method)(*arguments)


class Rows:
    """The rows of variables that a process owns, with their optimiser.

    Args:
        ranks: the ranks, of which this process is one; None for one process.
        stepping: the options of steps.
        counts: numbers of all rows, by name.
        *own: for each name, the rows that this process owns; they are moved in place.

    Attributes:
        beside: tensors by name that `write` adds to the rows.
    """

    def __init__(
        self, ranks: Ranks | None, stepping: Stepping, counts: Mapping[str, int], *own: Tensor
    ) -> None:
        self._ranks, self._counts, self._box = ranks, dict(counts), stepping.box
        self._parameters = {
            name: torch.nn.Parameter(rows, requires_grad=False)
            for name, rows in zip(counts, own, strict=True)
        }
        self._optimizer = stepping.build([*self._parameters.values()])
        self._good: Any = None
        self.beside: Mapping[str, Tensor] = {}

    def step(
        self,
        copy: int | None,
        size: float,
        spread: float,
        noise: Tensor | None,
        *against: Tensor | int,
    ) -> dict[str, Tensor]:
        """Move against velocities, after storing the current rows for `undo`.

        Args:
            copy: the number of the copies of all points that other ranks hold, which are moved too;
                None if there are none.
            size: time tau of the step.
            spread: the factor of the noise that is added to the points.
            noise: of the own points, or None.
            *against: velocities of the own rows of each variable, or the number under which this
                rank holds them.

        Returns:
            All rows of each variable, before they are clamped to the box. One process moves its
            rows in place and returns none.
        """
        variables = {name: parameter.data for name, parameter in self._parameters.items()}
        state = {"variables": variables, "optimizer": self._optimizer.state_dict()}
        self._good = copied(state, self._good)
        for group in self._optimizer.param_groups:
            group["lr"] = size
        for parameter, velocity in zip(self._parameters.values(), against, strict=True):
            if isinstance(velocity, int):
                assert self._ranks is not None
                velocity = self._ranks.held[velocity]
            parameter.grad = velocity.to(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()
        points = variables["points"]
        if noise is not None:
            points.add_(noise, alpha=spread)
        if self._ranks is None:
            return {}
        whole = self._whole()
        followers = [points]
        if copy is not None and self._ranks.rank > 0:
            followers.append(self._ranks.held[copy].copy_(whole["points"]))
        if self._box is not None:
            for follower in followers:
                follower.clamp_(*self._box)
        return whole

    def undo(self) -> dict[str, Tensor]:
        """Put back the rows before the last step; return all of them as `step` does."""
        for name, parameter in self._parameters.items():
            if parameter.is_cuda:
                # Wait for the copies to arrive.
                torch.cuda.current_stream(parameter.device).synchronize()
            parameter.data.copy_(self._good["variables"][name])
        self._optimizer.load_state_dict(self._good["optimizer"])
        return {} if self._ranks is None else self._whole()

    def write(self, folder: Path, stem: str) -> list[Shard]:
        """Write a shard on every rank, and return all shards.

        Raises:
            InputError: a shard cannot be written.
        """
        ranks, rank = self._ranks, 0 if self._ranks is None else self._ranks.rank
        shares = {
            name: slice(0, count) if ranks is None else ranks.share(count)
            for name, count in self._counts.items()
        }

        def own() -> Shard:
            parts = {
                f"{name}.{key}": part
                for name, held in self.kept(of_rows=True).items()
                for key, part in held.items()
            }
            return write_shard(folder, f"{stem}.rank-{rank}", self.beside, shares, parts)

        return [own()] if ranks is None else ranks.all_gathered_objects(ranks.together(own))

    def restore(self, names: Sequence[str], others: Mapping[str, Any], *tensors: Tensor) -> None:
        """Continue from a checkpoint.

        Args:
            names: VARIABLE.KEY of each stored tensor of rows.
            others: the optimiser's state that belongs to no row, by variable.
            *tensors: the own rows of each of `names`.
        """
        kept = {name: dict(others.get(name, {})) for name in self._parameters}
        for name, tensor in zip(names, tensors, strict=True):
            variable, key = name.split(".", 1)
            if key == VALUE:
                self._parameters[variable].data.copy_(tensor)
            else:
                kept[variable][key] = tensor.clone()
        state = {place: held for place, held in enumerate(kept.values()) if held}
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        # `load_state_dict` has cast scalars, such as NAdam's product, to the type of the rows.
        for name, parameter in self._parameters.items():
            held = self._optimizer.state[parameter]
            held |= {
                key: held[key].to(part.dtype)
                for key, part in others.get(name, {}).items()
                if isinstance(part, Tensor)
            }

    def kept(self, *, of_rows: bool) -> dict[str, dict[str, Any]]:
        """Return values and optimiser's state by variable, of the rows or what belongs to none."""
        found: dict[str, dict[str, Any]] = {}
        for name, parameter in self._parameters.items():
            held = {VALUE: parameter.data, **self._optimizer.state.get(parameter, {})}
            found[name] = {
                key: part
                for key, part in held.items()
                if of_rows == (isinstance(part, Tensor) and part.shape == parameter.shape)
            }
        return found

    def _whole(self) -> dict[str, Tensor]:
        """Gather all rows of each variable; all ranks call this together."""
        assert self._ranks is not None
        gathered, counts = self._ranks.gathered, self._counts
        return {name: gathered(own.data, counts[name]) for name, own in self._parameters.items()}


def copied(state: Any, into: Any = None) -> Any:
    """Return a nested dictionary with CPU copies of its tensors, made in stream order.

    Args:
        state: the dictionary, or a part of it.
        into: an earlier copy, whose memory is reused if it fits: pinned memory, to which a GPU
            writes at full speed, is slow to allocate.
    """
    if isinstance(state, dict):
        known = into or {}
        return {key: copied(part, known.get(key)) for key, part in state.items()}
    if not isinstance(state, Tensor):
        return state
    if into is None or (into.shape, into.dtype) != (state.shape, state.dtype):
        into = torch.empty(state.shape, dtype=state.dtype, pin_memory=state.is_cuda)
    # The next step waits for the copy on the device, so the CPU need not wait.
    return into.copy_(state.detach(), non_blocking=True)


class OwnedVelocity:
    """Velocities (n, d) on rank 0, of which every rank holds the rows `Ranks.share(n)`.

    Args:
        ranks: the processes, led by this one.
        number: under which each holds its rows.
        largest: the largest absolute entry (), float64; NaN if there is one.
        norm: (sum_i a_i |v_i|^2)^1/2 (), float64.
    """

    def __init__(self, ranks: Ranks, number: int, largest: Tensor, norm: Tensor) -> None:
        self.number, self.largest, self.norm = number, largest, norm
        weakref.finalize(self, ranks.drop, number)


class OwnedGradient:
    """Derivatives of S_epsilon by the particles, summed up by ranks during `solve` as `solved`.

    Args:
        comparison: what is being solved, with the squared Euclidean distance as ground cost.
        ranks: the processes that share its passes, led by this one.
    """

    def __init__(self, comparison: Comparison, ranks: Ranks) -> None:
        self._ranks, self._weight = ranks, comparison.ground.lambda_x
        # The derivatives of all rows, on rank 0, for terms whose points no rank has whole.
        self._whole = DivergenceGradient(comparison, frozenset({"x"}))
        self._number: int | None = None

    def __call__(self, name: str, operator: Operator, term: TransportTerm) -> None:
        """Add the derivatives of the term "xy" or "xx"; "yy" has none."""
        operator = operator.refined
        if not (isinstance(operator, ShardedOperator) and operator.replicated):
            self._whole(name, operator, term)
            return
        if name == "yy":
            return
        if self._number is None:
            self._number = self._ranks.number()
            # A solve that ends with an error leaves nothing on the ranks.
            self._drop = weakref.finalize(self, self._ranks.drop, self._number)
        # A self term has the particles on both sides, and counts half and negative.
        sides, factor = (1, 1.0) if name == "xy" else (2, -0.5)
        given = term.f, term.g, term.epsilon, 2 * sides * self._weight, factor
        self._ranks.order(_add, operator.number, self._number, *given)

    def velocity(self, masses: Tensor) -> OwnedVelocity | Tensor:
        """Return (1 / a_i) dS / dx_i for the masses a (n,) of the particles, 0 where a_i is 0.

        All rows (n, d) if they are on rank 0 alone.
        """
        ranks, number, whole = self._ranks, self._number, self._whole.total.get("x")
        if whole is not None:
            if number is not None:
                # The points of some terms go round in a ring, those of others do not.
                whole.add_(ranks.order(_gather, number))
                self._drop()
            return per_mass_(whole, masses)
        assert number is not None
        found = ranks.order(_settle, number)
        self._drop.detach()
        return OwnedVelocity(ranks, number, *found.unbind())


@dataclass
class _Derivatives:
    """The derivatives by this rank's points (k, d), in the order of classes.

    Attributes:
        owned: how the points are divided.
        masses: of all particles (n,), float64.
        total: the sum over terms; None for none yet.
    """

    owned: Owned
    masses: Tensor
    total: Tensor | None = None

    def add(self, part: Tensor, factor: float) -> None:
        if self.total is None:
            self.total = part if factor == 1 else part.mul_(factor)
        else:
            self.total.add_(part, alpha=factor)


def _add(
    ranks: Ranks,
    number: int,
    into: int,
    f: Tensor,
    g: Tensor,
    epsilon: float,
    weight: float,
    factor: float,
) -> None:
    """Add factor * weight * (r x - P y) of the own rows of a plan to what is held under `into`."""
    held: parts.Parts = ranks.held[number]
    cost, dtype = held.cost, held.representative.passes.dtype
    origin = origin_near(zip(cost.held, (cost.a, cost.b), strict=True), dtype)
    values = less_origin(cost.held[1], origin)
    applied = parts.own_product(ranks, held, False, f, g, epsilon, values, None, None)
    owned = held.sides[0]
    sums: _Derivatives = ranks.held.setdefault(into, _Derivatives(owned, cost.a))
    own = cost.held[0][owned.of(ranks)]
    sums.add(pulled(own, applied.masses, applied.values, origin, weight), factor)


def _gather(ranks: Ranks, number: int) -> Tensor:
    """Gather the derivatives of all rows (n, d)."""
    held: _Derivatives = ranks.held[number]
    assert held.total is not None
    return held.owned.gathered(ranks, held.total)


def _settle(ranks: Ranks, number: int) -> Tensor:
    """Hold velocities of the rows that a rank moves; return `largest` and `norm` (2,), float64."""
    held: _Derivatives = ranks.held[number]
    assert held.total is not None
    masses = held.masses[held.owned.of(ranks)]
    velocity = per_mass_(held.total, masses)
    speeds = torch.linalg.vector_norm(velocity, dim=1).double()
    largest = largest_entry(velocity) if len(velocity) else speeds.new_zeros(())
    every = ranks.all_gathered(torch.stack((largest, masses @ speeds.square())))
    ranks.held[number] = held.owned.in_given_order(ranks, velocity)
    # `amax` propagates NaN.
    return torch.stack((every[:, 0].amax(), added(every[:, 1]).sqrt()))
