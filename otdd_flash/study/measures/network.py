"""Measures of a study on trained sources: h_score, knn, leep and logme.

Each is a score of a trained source's features or outputs on the target's training rows; the larger,
the better. A score of one source and one target is a unit of work of a study (`study.units.Unit`):
it evaluates every repetition of the source's network on that repetition's target rows.
`study.measures` lists the measures in its registry `MEASURES`; the study uses them only through
`Measure` and `Unit`.

A change must respect that one thread computes a score, so that it is the same to the last bit on
one machine, and that `name` stays: it is part of stored keys and of users' settings
`measures=NAME`. A formula that changes needs a new version of this package, which is in the keys of
the networks.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from otdd_flash.sampling.comparison import subsample_rows
from otdd_flash.sampling.subsampling import subsample_sizes
from otdd_flash.study.measures.base import Pair, PairwiseMeasure, interval_ends
from otdd_flash.study.setup import Setup
from otdd_flash.study.training import (
    body_features,
    source_unit,
    target_rows,
    trained_network,
    transfer_of,
)
from otdd_flash.study.units import Content, Store, Unit


class NetworkView(NamedTuple):
    """The features and outputs of a trained source on the target's training rows, on the CPU.

    Attributes:
        features: (n, d) the input of the network's last layer.
        outputs: (n, Z) logits of the source's classes.
        labels: (n,) the target's class indices.
    """

    features: Tensor
    outputs: Tensor
    labels: Tensor

    def take(self, rows: Tensor) -> NetworkView:
        return NetworkView(*(part[rows] for part in self))


class NetworkMeasure(PairwiseMeasure):
    """A score of all repetitions of a source's network, each on its own target rows."""

    # The sign of an improvement, and the size to which rounding is relative; see `Measure`.
    nearer = 1
    unit = 1.0
    needs_transfer = one_class = True

    @abstractmethod
    def score(self, view: NetworkView) -> float:
        """Return the score of all rows of a view; the larger, the better."""

    def pair_unit(self, setup: Setup, i: int, j: int) -> Unit:
        """Return the unit of one source and one target: mean and deviation over repetitions."""
        transfer, target = transfer_of(setup), setup.tasks[j].train
        # The inputs of the score except the networks, which are among its needs; their keys hold
        # the versions of packages.
        key = {
            "measure": self.name,
            "fingerprints": [target.fingerprint],
            "target_samples": transfer.target_rows(target),
            **setup.settings.sampling,
        }
        return Unit(
            "score",
            key,
            self.pair_title(setup, i, j),
            partial(_score, self, setup, i, j),
            tuple(source_unit(setup, i, repetition) for repetition in range(transfer.seeds)),
            one_thread=True,
        )

    def pairs(self, setup: Setup) -> list[Pair]:
        """Return the ordered pairs of tasks without shared rows."""
        return setup.transferred()


def _score(measure: NetworkMeasure, setup: Setup, i: int, j: int, store: Store) -> Content:
    """Score every repetition of a source's network on that repetition's target rows."""
    views, drawn = [], []
    for repetition in range(transfer_of(setup).seeds):
        rows = target_rows(setup, j, repetition)
        network = trained_network(setup, i, repetition, store)
        # Networks have float32 weights.
        features = body_features(network.body, rows.features.float())
        assert rows.labels is not None
        with torch.no_grad():
            views.append(NetworkView(features, network.head(features), rows.labels))
        drawn.append(rows)
    scores = np.array([measure.score(view) for view in views])
    deviation = float(scores.std(ddof=1)) if len(scores) > 1 else None
    facts: dict[str, Any] = {"value": float(scores.mean()), "deviation": deviation}
    if setup.settings.subsample is not None:
        # The target stands on both sides, as only its rows are drawn.
        (size, _) = subsample_sizes(drawn[0], drawn[0], None)

        def mean_score(generator: np.random.Generator) -> list[float]:
            taken = (subsample_rows(rows, size, generator) for rows in drawn)
            found = [
                measure.score(view.take(some)) for view, some in zip(views, taken, strict=True)
            ]
            return [float(np.mean(found))]

        fraction = size / len(drawn[0])
        (ends,) = interval_ends(setup.settings, [facts["value"]], mean_score, fraction)
        facts |= ends
    return Content(facts)


class HScore(NetworkMeasure):
    """The H-score, which is at most the number of classes minus 1."""

    name = "h_score"
    title = "H-score"

    def score(self, view: NetworkView) -> float:
        """Return how much of the features' variance lies between the classes.

            H = tr(cov(F)^+ cov(E[F | class]))

        (Bao et al. 2019, An information-theoretic approach to transferability in task transfer
        learning). With centred features U S W^T and Q an orthonormal basis (n, number of classes
        present) of functions of the class, it is the squared Frobenius norm of U^T Q, which needs
        no inverse; columns of U with singular value 0 are left out.
        """
        centred = view.features.double() - view.features.double().mean(0)
        left, singular, _ = torch.linalg.svd(centred, full_matrices=False)
        # Singular values up to this are rounding errors of the decomposition, as in `matrix_rank`.
        least = max(centred.shape) * torch.finfo(torch.float64).eps * singular.max()
        left = left[:, singular > least]
        members = _members(view.labels)
        basis = members / members.sum(0).sqrt()
        return float((left.T @ basis).square().sum())


def _members(labels: Tensor) -> Tensor:
    """Return (n, number of classes present): 1 for a row of the class, otherwise 0."""
    members: Tensor = labels[:, None] == torch.unique(labels)
    return members.double()


NEIGHBOURS = 5


class Knn(NetworkMeasure):
    """The leave-one-out accuracy of the vote of the `NEIGHBOURS` nearest rows."""

    name = "knn"
    title = "k-nearest-neighbour accuracy"

    def score(self, view: NetworkView) -> float:
        """Return the share of rows whose class has the most votes among the nearest other rows.

        If classes have equally many votes, the class of the nearest row wins; of rows at the same
        distance, the earlier counts as nearer. With fewer other rows, all of them vote.
        """
        n, labels = len(view.features), view.labels
        points = view.features.double()
        # Not by a matrix product, whose cancellation would order near rows by rounding.
        distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
        distances.fill_diagonal_(torch.inf)
        # A stable sort: rows at one distance keep their order.
        order = torch.sort(distances, dim=1, stable=True).indices
        nearest = labels[order[:, : min(NEIGHBOURS, n - 1)]]
        votes = torch.nn.functional.one_hot(nearest, int(labels.max()) + 1)
        # (n, k): the votes for the class of each neighbour.
        counts = votes.sum(1).gather(1, nearest)
        # The first of the highest counts, in the order of distance.
        winner = nearest.gather(1, counts.argmax(1, keepdim=True)).squeeze(1)
        return float((winner == labels).double().mean())


class Leep(NetworkMeasure):
    """The log expected empirical prediction, which is at most 0."""

    name = "leep"
    title = "LEEP"

    def score(self, view: NetworkView) -> float:
        """Return the mean log-likelihood of the target's classes, given the predicted ones.

            LEEP = mean_i log sum_z P(y_i | z) theta_z(x_i)
            P(y, z) = mean_i [y_i = y] theta_z(x_i)

        with theta(x) the source classes' probabilities (Nguyen et al. 2020, LEEP: a new measure to
        evaluate transferability of learned representations).
        """
        theta = view.outputs.double().softmax(1)
        members = torch.nn.functional.one_hot(view.labels).double()
        joint = members.T @ theta / len(theta)
        # The clamp avoids 0 / 0 for a source class that no row is predicted to have.
        given = joint / joint.sum(0).clamp_min(torch.finfo(torch.float64).tiny)
        expected = theta @ given.T
        return float(expected.gather(1, view.labels.unsqueeze(1)).log().mean())


# The grid of log t in units of the largest s^2, with t = alpha / beta of `_best_evidence`. It ends,
# because the best t of a y in the span of F would be 0.
LOG_LOWEST, LOG_HIGHEST, GRID = math.log(1e-12), math.log(1e8), 120


class LogMe(NetworkMeasure):
    """The mean over classes of the largest log evidence per row."""

    name = "logme"
    title = "LogME"

    def score(self, view: NetworkView) -> float:
        """Return the mean over the classes that have rows of max over alpha, beta of log p(y) / n.

        For the 0-1 vector y of a class and features F (n, d) the model is y = F w + noise with w
        from N(0, I / alpha) and noise of precision beta, so that y is from
        N(0, I / beta + F F^T / alpha) (You et al. 2021, LogME: practical assessment of pre-trained
        models for transfer learning).
        """
        left, singular, _ = torch.linalg.svd(view.features.double(), full_matrices=False)
        targets = _members(view.labels)
        projected = left.T @ targets
        rest = (targets - left @ projected).square().sum(0).numpy()
        squares, parts = singular.square().numpy(), projected.square().numpy()
        found = [
            _best_evidence(squares, part, float(one), len(targets))
            for part, one in zip(parts.T, rest, strict=True)
        ]
        return float(np.mean(found))


def _best_evidence(
    squares: NDArray[np.float64], parts: NDArray[np.float64], rest: float, n: int
) -> float:
    """Return the largest log p / n of one class, given s^2, z^2 and |y - U z|^2.

    With F = U S V^T, z = U^T y and t = alpha / beta, the best beta for a given t has a closed form,
    which leaves

        log p / n = -(1 + log(2 pi q(t) / n)) / 2 - sum_i log(1 + s_i^2 / t) / (2 n)
        q(t) = sum_i z_i^2 / (1 + s_i^2 / t) + |y - U z|^2

    There can be several maxima over t, so a grid is searched first and the best cell is refined.
    """
    from scipy.optimize import minimize_scalar

    scale = float(squares.max(initial=0.0))
    # All features are 0.
    if scale == 0:
        scale = 1.0

    def negative(log_t: float) -> float:
        stretch = 1 + squares / (scale * math.exp(log_t))
        q = float((parts / stretch).sum()) + rest
        # q is 0 for a class that is fitted exactly.
        q = max(q, np.finfo(np.float64).tiny)
        fit = 1 + math.log(2 * math.pi * q / n)
        return (fit + float(np.log(stretch).sum()) / n) / 2

    grid = np.linspace(LOG_LOWEST, LOG_HIGHEST, GRID)
    values = [negative(point) for point in grid]
    best = int(np.argmin(values))
    bracket = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
    refined = minimize_scalar(negative, bounds=bracket, method="bounded", options={"xatol": 1e-9})
    # The search inside the cell may end above its grid point.
    return -min(float(refined.fun), values[best])
