"""The label cost of rows with several labels, or with numbers: as classes, or as columns of points.

With u_i the shares of a row's labels, which sum to 1, and W the class distances of the labels,

    several labels    u_i^T W v_j - u_i^T W_xx u_i / 2 - v_j^T W_yy v_j / 2
                      = -(u_i - v_j)^T W (u_i - v_j) / 2
    numbers           ||(t_i - s_j) / scale||^2

W is over the labels of both sides. Few distinct sets are classes, with the table of these numbers
(`set_table`). Otherwise columns c z are appended to the points, with c^2 = lambda_y / lambda_x:

    lambda_x ||x_i - y_j||^2 + lambda_y ||z_i - z_j||^2 = lambda_x ||(x_i, c z_i) - (y_j, c z_j)||^2

For numbers they are t / scale. For sets -J W J / 2 = Q L Q^T, with J the projection on vectors that
sum to 0, and z = u^T Q |L|^1/2. Where W is Euclidean no L is negative. Otherwise the columns of
negative L, which come last, change sign on the side of the columns:

    -||z_i - z_j||^2 = ||z_i + z_j||^2 - 2 ||z_i||^2 - 2 ||z_j||^2

The last two terms are of one side: they cancel in a debiased divergence, as those of the ground
cost `inner` do. Self terms are then of two different clouds.

`Comparison` chooses: up to MOST_SETS sets on each side take the table, more take columns, a
`LabelEmbedding`, which `derivatives.gradient` removes from gradients again. `ranking.bounds`
appends numbers to points (`embedding_of_targets`). Users call `set_table` through
`otdd_flash.labels`, `gromov.distance` refuses more than MOST_SETS sets, and `contributions`,
`flows` and `ranking.bounds` ask `has_sets`.

`Comparison.cost_error` widens solver bounds by `set_table_error` or by the `error` of an embedding,
so both must stay upper bounds on the rounding of a cost (`tests/labels/test_label_kinds.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otdd_flash.cost.ground import GroundCost
from otdd_flash.cost.points import DOUBLE_UNIT
from otdd_flash.data.given import Samples, as_samples
from otdd_flash.errors import InputError
from otdd_flash.real_numbers import real_tensor
from otdd_flash.samples import LabeledSamples, displaced

# Sets of labels on one side up to which they are classes: of so many a processor builds a table in
# the time of columns, and a GPU in 4 ms more; softmins take the same time either way, and self
# terms of columns may be of two clouds (experiments/bench_label_sets.py).
MOST_SETS = 256

# Eigenvalues below V times this share of the largest are rounding and left out, within `error`.
NEGLIGIBLE = 16 * DOUBLE_UNIT


@dataclass(frozen=True, eq=False)
class LabelEmbedding:
    """An embedding of labels: columns whose squared distances are the label cost of two datasets.

    Attributes:
        tables: of both sides, float64: the columns (S, k) of each set of labels, or the factors
            (q,) of targets, the same on both sides.
        of_rows: whether columns are each row's own targets, less `centre`, times the factors; else
            a row takes those of its set.
        negative: how many of the last columns count negatively.
        weight: of the points beside them, 1, or 0 if labels alone are compared.
        dim: coordinates of the points.
        lambda_x: weight of the squared distance between points with columns.
        error: bound on the error of a cost by that of the columns.
        centre: (q,) float64, subtracted from targets before they are scaled; None: nothing.
    """

    tables: tuple[Tensor, Tensor]
    of_rows: bool
    negative: int
    weight: float
    dim: int
    lambda_x: float
    error: float
    centre: Tensor | None = None

    @property
    def empty(self) -> bool:
        """Whether labels cost nothing, and points stay as they are."""
        return self.tables[0].shape[-1] == 0

    @property
    def width(self) -> int:
        """Coordinates of a point with its columns."""
        return self.dim + self.tables[0].shape[-1]

    def appended(self, samples: LabeledSamples, side: int) -> LabeledSamples:
        """Return samples of side 0 or 1 with these columns, as one class."""
        if self.empty:
            return replace(samples, labels=None, class_names=(), label_sets=None)
        # Points of files are read.
        points = samples.points_of(slice(None)).double()
        table, kind = self.tables[side].to(points.device), samples.labels
        if self.of_rows:
            assert self.centre is not None
            assert samples.targets is not None
            columns = (samples.targets - self.centre.to(points.device)) * table
        else:
            assert kind is not None
            columns = table[kind]
        points = points * self.weight if self.weight != 1 else points
        found = displaced(samples, torch.cat((points, columns), 1), subset_hash=samples.subset_hash)
        plain = {"labels": None, "class_names": (), "label_sets": None, "feature_names": None}
        for name, part in plain.items():
            object.__setattr__(found, name, part)
        return found

    def flipped(self, samples: LabeledSamples) -> LabeledSamples:
        """Return samples with columns as they stand on the side of a cost's columns."""
        features = samples.features.clone()
        features[:, features.shape[1] - self.negative :].neg_()
        return displaced(samples, features, subset_hash=samples.subset_hash)

    def one_side(self, samples: LabeledSamples) -> Tensor | None:
        """Return -2 lambda_x ||z_i||^2 over the negative columns (n,); None without any."""
        if not self.negative:
            return None
        last = samples.features[:, samples.dim - self.negative :]
        return last.square().sum(1) * (-2 * self.lambda_x)


def shares_of(sides: Sequence[LabeledSamples], device: torch.device) -> list[Tensor]:
    """Return the part that each label is of a class, (S, V) float64: the identity without sets."""
    return [
        torch.eye(side.class_total, dtype=torch.float64, device=device)
        if side.label_sets is None
        else side.label_sets.shares.to(device)
        for side in sides
    ]


def has_sets(sides: Sequence[LabeledSamples]) -> bool:
    """Return whether rows of a side have several labels."""
    return any(side.label_sets is not None for side in sides)


def set_table(table: Tensor, sides: Sequence[Samples]) -> Tensor:
    """Return the costs between sets of labels from the class distances of labels.

    The result is differentiable by W.

    Args:
        table: W (V_x + V_y, V_x + V_y), squared distances between the labels of both sides.
        sides: the source and the target, as samples or as arrays (features, labels), with S_x and
            S_y distinct sets of labels; if no row has several labels, each class is a set.

    Returns:
        (S_x + S_y, S_x + S_y) float64, in units of W, on its device.

    Raises:
        InputError: W is not of real numbers or has another size, or there are not two datasets.
    """
    table = real_tensor("class distances", table).to(torch.float64)
    if len(sides) != 2:
        raise InputError(f"set_table takes the source and the target, got {len(sides)} datasets")
    named = zip(sides, ("source", "target"), strict=True)
    shares = shares_of([as_samples(side, name) for side, name in named], table.device)
    x, y = (part.shape[1] for part in shares)
    if table.shape != (x + y, x + y):
        raise InputError(
            f"class distances have the shape {tuple(table.shape)} for {x} + {y} labels; give W "
            f"({x + y}, {x + y}), with the labels of the source first"
        )
    cut = [shares[0].shape[1]]
    blocks = [row.tensor_split(cut, 1) for row in table.tensor_split(cut, 0)]

    def between(i: int, j: int) -> Tensor:
        # Both ways and in one layout, so that blocks of equal sides and distances have equal bits.
        there = shares[i] @ blocks[i][j].contiguous() @ shares[j].T
        back = shares[j] @ blocks[i][j].T.contiguous() @ shares[i].T
        return (there + back.T) / 2

    half = [between(k, k).diagonal() / 2 for k in (0, 1)]
    rows = [
        torch.cat([between(i, j) - (half[i][:, None] + half[j]) for j in (0, 1)], 1) for i in (0, 1)
    ]
    return torch.cat(rows)


def set_table_error(table: Tensor, ground: GroundCost) -> float:
    """Bound the rounding error of lambda_y times `set_table`: three sums of V^2 terms."""
    return 4 * ground.lambda_y * _rounding(len(table)) * float(table.abs().max())


def _rounding(count: int) -> float:
    """Bound the error of two products of V terms each over the size of their terms."""
    return (4 * count + 32) * DOUBLE_UNIT


def by_labels(gradient: Tensor, sides: Sequence[LabeledSamples]) -> Tensor:
    """Pull a gradient by the table of sets back to that by W of their labels."""
    shares = _both_shares(sides, gradient)
    sums = (gradient.sum(0) + gradient.sum(1)) / 2
    found: Tensor = shares.T @ (gradient - sums.diag()) @ shares
    return found


def _both_shares(sides: Sequence[LabeledSamples], like: Tensor) -> Tensor:
    """Return the shares (S_x + S_y, V_x + V_y) of the labels of both sides."""
    of_x, of_y = shares_of(sides, like.device)
    above = torch.nn.functional.pad(of_x, (0, of_y.shape[1]))
    return torch.cat((above, torch.nn.functional.pad(of_y, (of_x.shape[1], 0)))).to(like.dtype)


def embedding_of_sets(
    table: Tensor, sides: Sequence[LabeledSamples], ground: GroundCost
) -> LabelEmbedding:
    """Return the embedding of sets of labels at W (V_x + V_y, V_x + V_y)."""
    # A small problem, which a processor solves.
    table = table.detach().to("cpu", torch.float64)
    count = len(table)
    half = -table / 2
    half = half - half.mean(0)
    half = half - half.mean(1, keepdim=True)
    half = (half + half.T) / 2
    values, vectors = torch.linalg.eigh(half)
    kept = values.abs() > count * NEGLIGIBLE * values.abs().max()
    values, vectors = values[kept], vectors[:, kept]
    order = torch.argsort(values, descending=True, stable=True)
    values, vectors = values[order], vectors[:, order]
    negative = int((values < 0).sum())
    weight, lambda_x, factor = _weights(ground)
    embedded = vectors * values.abs().sqrt() * factor
    of_x, of_y = shares_of(sides, table.device)
    tables = of_x @ embedded[: of_x.shape[1]], of_y @ embedded[of_x.shape[1] :]
    # (u - v)^T E (u - v) with E what W / 2 + Q L Q^T is on vectors that sum to 0, and
    # ||u - v||^2 <= 2. Products of V terms are off by V roundings of the sizes of their terms.
    rest = table / 2 + (vectors * values) @ vectors.T
    rest = rest - rest.mean(0)
    rest = rest - rest.mean(1, keepdim=True)
    size = float(table.abs().max()) + float((vectors.square() * values.abs()).sum(1).max())
    unit = _rounding(count)
    error = ground.lambda_y * 2 * (float(torch.linalg.matrix_norm(rest)) + count * unit * size)
    largest = float(embedded.abs().max()) if embedded.numel() else 0.0
    # Of one entry of u^T Q |L|^1/2, of a row of them, and of squared distances between rows.
    off = math.sqrt(max(1, len(values))) * unit * largest
    reach = max(float(part.square().sum(1).max()) for part in tables) ** 0.5
    error += lambda_x * 2 * off * (4 * reach + 4 * off)
    return LabelEmbedding(tables, False, negative, weight, sides[0].dim, lambda_x, error)


def no_embedding(sides: Sequence[LabeledSamples], ground: GroundCost) -> LabelEmbedding:
    """Return an embedding in no columns, for sets of labels that cost nothing."""
    nothing = torch.zeros(1, 0, dtype=torch.float64)
    lambda_x = ground.squared.lambda_x
    return LabelEmbedding((nothing, nothing), False, 0, 1.0, sides[0].dim, lambda_x, 0.0)


def embedding_of_targets(
    sides: Sequence[LabeledSamples], ground: GroundCost, divisors: Sequence[float]
) -> LabelEmbedding:
    """Return the embedding of numbers, which `divisors` (q,) divide column by column.

    One row is taken from all, the mean: differences stay and rounding does not grow with the mean.
    """
    weight, lambda_x, factor = _weights(ground)
    scale = factor / torch.tensor(divisors, dtype=torch.float64)
    rows = torch.cat([side.targets.cpu() for side in sides if side.targets is not None])
    # Divided first: sums of the largest numbers would overflow.
    centre = (rows / len(rows)).sum(0)
    largest = float(((rows - centre) * scale).abs().max())
    # A difference, two products, a quotient and a root: each number is off by 5 roundings, a
    # difference of two by twice that of the largest, and its square by 2 d e + e^2 for a
    # difference d.
    off = 10 * DOUBLE_UNIT * largest
    error = lambda_x * len(scale) * off * (4 * largest + off) * 2
    return LabelEmbedding((scale, scale), True, 0, weight, sides[0].dim, lambda_x, error, centre)


def _weights(ground: GroundCost) -> tuple[float, float, float]:
    """Return the weight of points beside columns, lambda_x of both, and the factor of columns."""
    if (lambda_x := ground.squared.lambda_x) == 0:
        return 0.0, ground.lambda_y, 1.0
    return 1.0, lambda_x, math.sqrt(ground.lambda_y / lambda_x)
