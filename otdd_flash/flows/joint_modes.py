"""Modes `joint` and `augmented`: points and Gaussians move as independent variables.

dx_i / dt = -(1 / a_i) dS/dx_i,   dm_k / dt = -(1 / A_k) dS/dm_k,   dF_k / dt = -(1 / A_k) dS/dF_k

with S the divergence, a_i the mass of particle i and A_k that of all whose Gaussian is k. They are
the jointly driven flows of Alvarez-Melis and Fusi 2021, Dataset Dynamics via Gradient Flows in
Probability Space: each particle is a pair of a point and a Gaussian of mean m_k and covariance S_k
= F_k^T F_k. Factors keep covariances positive semi-definite, and the flow of F is that of F^T F in
the Bures metric. Gaussians are compared by

    W_kl = ||m_k - m_l||^2 + tr S_k + tr S_l - 2 tr (S_k^1/2 S_l S_k^1/2)^1/2

With `labels.diagonal`, F_k is the vector s_k of standard deviations and the last three terms are
|| |s_k| - |s_l| ||^2; with labels=means there is no F_k.

In mode `joint`, with fixed labels (jd-fl), the particles of a class share their Gaussian. In mode
`augmented`, with variable labels (jd-vl), each particle has its own Gaussian.

`flows.flow` names both; `flows.run` and `flows.objective` use them as a `Mode`. `flows.stepping`
changes the tensors of `variables` in place: a mode may not replace them, and each evaluation must
compute anew what depends on them. Mode `augmented` computes its labels each time that they are
asked for. Gaussians are float64, because small distances are differences of large traces, and their
tables must stay differentiable by means and spreads, which are moved along their gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from otdd_flash.arguments import Progress
from otdd_flash.cost.ground import GroundCost
from otdd_flash.errors import InputError
from otdd_flash.flows.modes import Evaluation, Mode, beside, per_mass, require_moments
from otdd_flash.flows.objective import FlowSetting
from otdd_flash.flows.stepping import Batch
from otdd_flash.labels import ClassDistances, Gaussian, LabelMetric
from otdd_flash.labels.gaussian import (
    class_means,
    fidelities,
    reduced_factors,
    squared_gaps,
    standard_deviations,
)
from otdd_flash.labels.pairs import all_pairs, chunk_size, pool, symmetric_table
from otdd_flash.memory import free_memory, readable_bytes
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.label_costs import has_sets
from otdd_flash.samples import LabeledSamples

# A pair of particles i, j that can carry at most this times (a_i a_j)^1/2 is not compared
# (`_needed`). For equal masses a particle misjudges at most n * 1e-18 of its mass by it: 1e-16, the
# rounding of float64, for a hundred particles, and 1e-12 for a million.
NO_MASS = 1e-18

# For `_check_memory`: arrays of the size of the factors and of W that an evaluation holds, such as
# factors, gradient, stacks and polar factors.
COPIES = 6
# For `_check_memory`: arrays of roots of covariances (n, d, d) in memory while labels are computed.
ROOTS = 2


class JointlyDrivenMode(Mode):
    """The common part of both modes.

    `variables` holds `means` and, except for labels=means, `spreads`.

    Raises:
        InputError: the metric between classes is not `gaussian` or `means`, or rows have several
            labels.
    """

    def __init__(self, setting: FlowSetting, table: ClassDistances) -> None:
        require_moments(setting)
        if has_sets((setting.source, setting.target)):
            raise InputError(
                f"flow.mode={setting.flow.mode} moves a class with its particles, and these have "
                "several labels; flow.mode=features and attached take them"
            )
        super().__init__(setting, table)
        # The target's Gaussians do not move.
        self._target = Gaussians.of(setting.target, setting.metric)
        self._start(Gaussians.of(setting.source, setting.metric))

    def _start(self, classes: Gaussians) -> None:
        """Start from the Gaussians of the particles' classes."""
        self.variables = classes.variables

    def _moving(self) -> dict[str, Tensor]:
        """Return the variables as leaves for autograd, which share their memory."""
        return {key: part.detach().requires_grad_() for key, part in self.variables.items()}

    def _evaluated(
        self,
        particles: LabeledSamples,
        table: Tensor,
        moving: Mapping[str, Tensor],
        masses: Tensor,
        batch: Batch | None,
    ) -> Evaluation:
        """Evaluate the divergence at W = `table`, a function of `moving`.

        The velocity of row k of each tensor of `moving` is divided by the mass `masses[k]` that the
        row stands for.
        """
        solved, by_features, parts = self._solve(particles, table, [*moving.values()], batch)
        velocities = (per_mass(part, masses) for part in parts)
        return Evaluation(solved, by_features, dict(zip(moving, velocities, strict=True)))


class JointMode(JointlyDrivenMode):
    """Mode `joint`: `means` (V, d) and `spreads` (V, r, d) or (V, d).

    They are of V classes, with factors of r rows or with d standard deviations.
    The Gaussian of a class moves by the mean of its particles' velocities, and A_k is the class
    mass:

    W_kl = ||m_k - m_l||^2 + Bures^2(F_k^T F_k, F_l^T F_l)
    """

    def evaluate(self, features: Tensor, batch: Batch | None = None) -> Evaluation:
        """Evaluate the divergence at the distances of the moving Gaussians."""
        particles, moving = self._setting.at(features), self._moving()
        table = Gaussians(**moving).table(self._target, self.class_distances.yy)
        # For the result. Mode `augmented` does not store its tables, which are between particles;
        # its result has W of the start.
        self._keep(table)
        assert particles.labels is not None
        # `_masses` has the particles outside the batch, too: they do not move, and a class moves by
        # the mean over all its particles.
        masses = torch.bincount(
            particles.labels, weights=self._masses(batch), minlength=len(moving["means"])
        )
        return self._evaluated(particles, table, moving, masses, batch)


class AugmentedMode(JointlyDrivenMode):
    """Mode `augmented`: `means` (n, d) and `spreads` (n, r, d) or (n, d).

    Each particle has its own Gaussian, which starts as that of its class, and A_i = a_i. With l the
    class of y_j, the cost is

    C_ij = lambda_x ||x_i - y_j||^2 + lambda_y (||m_i - m_l||^2 + Bures^2(F_i^T F_i, F_l^T F_l)).

    Particles of one class may separate, and `labels` clusters their Gaussians by k-means that
    starts at the centres of the original classes, so that a class keeps its name.
    """

    def labels(self) -> Tensor:
        """Return the clusters of the particles' Gaussians, numbered as the original classes."""
        started_as, masses = self._started_as, self._setting.source.masses
        return recluster(Gaussians(**self.variables), started_as, masses)

    def _start(self, classes: Gaussians) -> None:
        labels = self._setting.source.labels
        assert labels is not None
        self._started_as = labels
        self.variables = classes.take(labels).variables


class EuclideanAugmentedMode(AugmentedMode):
    """Mode `augmented` with diagonal or no covariances: transport of vectors of up to 3 d features.

    The cost is the squared Euclidean distance of the vectors
    (sqrt(lambda_x) x, sqrt(lambda_y) m, sqrt(lambda_y) |s|), so no table between particles is made.
    """

    def _start(self, classes: Gaussians) -> None:
        super()._start(classes)
        setting, labels = self._setting, self._setting.target.labels
        assert labels is not None
        vectors = self._vectors(setting.target.features, self._target.take(labels).variables)
        target = LabeledSamples(vectors, None, (), setting.target.weights)
        particles = self._particles(self._vectors(setting.source.features, self.variables))
        # The vectors contain both weights of the cost.
        cost = GroundCost(1.0, 0.0)
        # Resources are checked for the particles at the start; those of later steps need as much.
        prepared = Comparison.prepare(
            (particles, target), cost, setting.comparison.compute, resident=True
        )
        prepared = prepared.at(setting.comparison.epsilon)
        self._comparison = replace(prepared, constraints=setting.comparison.constraints)

    def evaluate(self, features: Tensor, batch: Batch | None = None) -> Evaluation:
        """Evaluate the divergence of the vectors, with the gradient of each part."""
        points, moving = features.detach().requires_grad_(), self._moving()
        vectors = self._vectors(points, moving)
        particles = self._particles(vectors.detach())
        # The vectors are unlabelled, so there are no class distances.
        moved = self._comparison.with_points(particles, self._comparison.transformed[1])
        solved, gradient = self._divergence(moved, frozenset({"x"}), batch)
        velocity = self._feature_velocity(gradient["x"], batch)
        # Row i of the vectors depends on particle i alone, so the factor 1 / a_i passes through.
        by_features, *parts = torch.autograd.grad(vectors, [points, *moving.values()], velocity)
        return Evaluation(solved, by_features, dict(zip(moving, parts, strict=True)))

    def _particles(self, vectors: Tensor) -> LabeledSamples:
        return LabeledSamples(vectors, None, (), self._setting.source.weights)

    def _vectors(self, features: Tensor, gaussians: Mapping[str, Tensor]) -> Tensor:
        """Return (sqrt(lambda_x) x, sqrt(lambda_y) m, sqrt(lambda_y) |s|), (n, up to 3 d)."""
        cost = self._setting.comparison.ground.squared
        parts = [cost.lambda_x**0.5 * features, cost.lambda_y**0.5 * gaussians["means"]]
        if "spreads" in gaussians:
            parts.append(cost.lambda_y**0.5 * gaussians["spreads"].abs())
        return torch.cat([part.to(features) for part in parts], 1)


class FullAugmentedMode(AugmentedMode):
    """Mode `augmented` with full covariances: each particle is a class of its own.

    Each particle has a factor (r, d) and is compared with the L Gaussians of the target and with
    those particles that the optimal plan of the self term can reach (see `_needed`).

    Raises:
        InputError: the factors of all particles and their distances do not fit into memory.
    """

    def _start(self, classes: Gaussians) -> None:
        _check_memory(classes, self._setting)
        super()._start(classes)
        count = len(self._started_as)
        self._own_classes = torch.arange(count, device=self._setting.comparison.device)
        self._own_names = tuple(map(str, range(count)))

    def evaluate(self, features: Tensor, batch: Batch | None = None) -> Evaluation:
        """Evaluate the divergence at the distances of the particles' Gaussians."""
        weights = self._setting.source.weights
        particles = LabeledSamples(features, self._own_classes, self._own_names, weights)
        moving = self._moving()
        table = Gaussians(**moving).table(
            self._target,
            self.class_distances.yy,
            self._needed(features, batch),
            self._setting.callbacks.class_progress,
        )
        return self._evaluated(particles, table, moving, self._masses(batch), batch)

    def expected_seconds(self, features: Tensor, batch: Batch | None = None) -> float:
        """Time a chunk of pairs of Gaussians, and scale the time to the pairs that are compared."""
        spreads, theirs = self.variables["spreads"], self._target.spreads
        assert theirs is not None
        # One pair stands for all, as the factors of a side have one shape.
        factors = [spreads[0].detach().requires_grad_(), theirs[0]]
        rows, dim = spreads.shape[1:]
        # As `labels.gaussian` counts the numbers of a pair: two factors, and three matrices for
        # their product and its decomposition.
        timed = chunk_size(2 * rows * dim + 3 * rows**2, spreads.device)
        # The first round is a warm-up.
        for pairs in (torch.tensor([[0, 1]]), torch.tensor([[0, 1]]).repeat(timed, 1)):
            started = time.perf_counter()
            float(torch.autograd.grad(fidelities(factors, pairs).sum(), factors[0])[0].sum())
            seconds = time.perf_counter() - started
        needed = self._needed(features, batch)
        # Pairs of two particles are marked twice.
        count = int(needed.sum()) - int(needed[:, : len(features)].sum()) // 2
        return count * seconds / timed

    @torch.no_grad()
    def _needed(self, features: Tensor, batch: Batch | None) -> Tensor:
        """Return (n, n + L): between which pairs of Gaussians mass may move, within the batch.

        With f the potential of the self term: its optimal plan is symmetric and C_ii = 0, so
        P_ii = a_i^2 exp(2 f_i / eps) <= a_i bounds f_i, and

        P_ij = a_i a_j exp((f_i + f_j - C_ij) / eps) <= (a_i a_j)^1/2 exp(-C_ij / eps).

        Where a lower bound of C_ij already makes exp(-C_ij / eps) at most `NO_MASS`,
        `Gaussians.table` takes the lower bound of the distance, and no matrix of the pair is
        decomposed.
        """
        comparison, points = self._setting.comparison, features.double()
        cost = comparison.ground.squared.lambda_x * torch.cdist(points, points).square()
        gaussians = Gaussians(**self.variables)
        cost += comparison.ground.lambda_y * gaussians.lower_bounds()
        near = cost < -math.log(NO_MASS) * comparison.epsilon
        # A particle with itself is no pair. Every Gaussian of the target is compared with each.
        needed = torch.nn.functional.pad(
            near.fill_diagonal_(False), (0, len(self._target)), value=1
        )
        if batch is not None:
            outside = torch.ones(len(points), dtype=torch.bool, device=points.device)
            outside[batch.particles] = False
            needed[outside] = False
            needed[:, : len(points)][:, outside] = False
        return needed


def augmented_mode(setting: FlowSetting, table: ClassDistances) -> AugmentedMode:
    """Return the form of mode `augmented` for the metric's covariances."""
    full = isinstance(setting.metric, Gaussian) and not setting.metric.diagonal
    return (FullAugmentedMode if full else EuclideanAugmentedMode)(setting, table)


def _check_memory(classes: Gaussians, setting: FlowSetting) -> None:
    """Raise unless full covariances of all particles fit into memory."""
    assert classes.spreads is not None
    count = len(setting.source)
    # Factors of the V classes of the source, of r rows each.
    rows, dim = classes.spreads.shape[1:]
    factors, roots = count * rows * dim, count * dim**2
    table = (count + setting.target.class_total) ** 2
    needed = (COPIES * (factors + table) + ROOTS * roots) * classes.spreads.itemsize
    device = setting.comparison.device
    free = free_memory(device)
    if needed > free:
        raise InputError(
            f"flow.mode=augmented with full covariances gives each of {count:,} particles a factor "
            f"of {rows} x {dim} and takes about {needed:,} bytes ({readable_bytes(needed)}); "
            f"{readable_bytes(free)} are free on {device}. Use labels.diagonal=true, "
            "labels=means, fewer samples (max_samples) or fewer dimensions (extractor.pca)"
        )


@dataclass(frozen=True, eq=False)
class Gaussians:
    """K Gaussians in d dimensions, float64.

    Attributes:
        means: (K, d).
        spreads: factors F (K, r, d) of the covariances, standard deviations (K, d), or None.
    """

    means: Tensor
    spreads: Tensor | None = None

    @classmethod
    @torch.no_grad()
    def of(cls, samples: LabeledSamples, metric: LabelMetric) -> Gaussians:
        """Compute the Gaussians of the classes of `samples`, for the metric `Gaussian` or `Means`.

        Raises:
            InputError: there are no labels, or a class has no sample of positive weight.
        """
        clouds, _ = pool([samples])
        means = class_means(clouds)
        if not isinstance(metric, Gaussian):
            return cls(means)
        if metric.diagonal:
            return cls(means, standard_deviations(clouds, metric.unbiased))
        factors, _ = reduced_factors(clouds, metric.unbiased)
        most = max(factor.shape[0] for factor in factors)
        padded = [
            torch.nn.functional.pad(factor, (0, 0, 0, most - factor.shape[0])) for factor in factors
        ]
        stack = torch.stack(padded)
        # Rows that are 0 in all classes are left out: they would be decomposed with every pair.
        return cls(means, stack[:, stack.any(2).any(0)])

    @property
    def variables(self) -> dict[str, Tensor]:
        """The means and, if there are any, spreads by name."""
        named = {"means": self.means, "spreads": self.spreads}
        return {name: part for name, part in named.items() if part is not None}

    def __len__(self) -> int:
        return len(self.means)

    def take(self, which: Tensor) -> Gaussians:
        """Return the Gaussians with these indices, which may repeat."""
        return Gaussians(self.means[which], None if self.spreads is None else self.spreads[which])

    def table(
        self,
        target: Gaussians,
        within_target: Tensor,
        needed: Tensor | None = None,
        progress: Progress | None = None,
    ) -> Tensor:
        """Return W (K + L, K + L) of these and L of a target, differentiable by means and spreads.

        Args:
            target: L fixed Gaussians.
            within_target: the block (L, L).
            needed: (K, K + L) bool, symmetric in its first K columns: the pairs whose spreads are
                compared; the others get lower bounds as in `lower_bounds`. None: all.
            progress: called with the number of pairs compared and their total.
        """
        own, total = len(self), len(self) + len(target)
        pairs = all_pairs(total)
        pairs = pairs[(pairs < own).any(1)]
        values = squared_gaps(torch.cat((self.means, target.means)), pairs)
        if self.spreads is not None and target.spreads is not None:
            chosen = torch.ones(len(pairs), dtype=torch.bool)
            if needed is not None:
                # In each pair the larger index comes first, and the smaller one is below K.
                chosen = needed.cpu()[pairs[:, 1], pairs[:, 0]]
            values = values + _spread_gaps(self.spreads, target.spreads, pairs, chosen, progress)
        return symmetric_table(values, pairs, total) + beside(own, within_target.to(values))

    @torch.no_grad()
    def lower_bounds(self) -> Tensor:
        """Return lower bounds (K, K) of the distances between these, with full covariances.

        They are ||m_k - m_l||^2 + (||F_k|| - ||F_l||)^2, because the trace of (S_k^1/2 S_l
        S_k^1/2)^1/2 is at most ||F_k|| ||F_l||.
        """
        assert self.spreads is not None
        norms = torch.linalg.matrix_norm(self.spreads)
        bounds: Tensor = (norms.unsqueeze(1) - norms).square()
        return bounds.add_(torch.cdist(self.means, self.means).square())


def _spread_gaps(
    own: Tensor,
    target: Tensor,
    pairs: Tensor,
    chosen: Tensor,
    progress: Progress | None,
) -> Tensor:
    """Return squared Bures distances (P,) of the chosen pairs, and lower bounds for the others."""
    if own.ndim == 2:
        return squared_gaps(torch.cat((own, target)).abs(), pairs)
    factors = [*own.unbind(), *target.unbind()]
    traces = torch.cat((own.square().sum((1, 2)), target.square().sum((1, 2))))
    first, second = pairs.to(traces.device).unbind(1)
    # `fidelity` is tr (S_k^1/2 S_l S_k^1/2)^1/2, and `most` its upper bound ||F_k|| ||F_l||, which
    # makes the gap of the other pairs the lower bound of `lower_bounds`.
    most = (traces[first] * traces[second]).detach().sqrt()
    places = chosen.nonzero().squeeze(1).to(traces.device)
    fidelity = most.index_put((places,), fidelities(factors, pairs[chosen], progress))
    gaps = traces[first] + traces[second] - 2 * fidelity
    # A squared distance is negative only by rounding.
    return gaps.clamp_min(0)


def recluster(gaussians: Gaussians, labels: Tensor, masses: Tensor) -> Tensor:
    """Return class indices (n,) of particles, by k-means over their Gaussians.

    k-means starts at the centres of the classes `labels`, so that a cluster keeps the index of the
    class it started from. Gaussians are compared by ||m_i - m_j||^2 + ||S_i^1/2 - S_j^1/2||^2,
    which for diagonal covariances is their squared 2-Wasserstein distance and otherwise an upper
    bound of it.

    Args:
        gaussians: of n particles.
        labels: (n,) the classes at the start; each of them has mass.
        masses: (n,) of the particles; one without mass joins the nearest cluster.
    """
    from sklearn.cluster import KMeans

    vectors, masses = _vectors(gaussians).cpu(), masses.cpu()
    classes, places = torch.unique(labels.cpu(), return_inverse=True)
    members = torch.nn.functional.one_hot(places).to(masses) * masses[:, None]
    centres = (members / members.sum(0)).T @ vectors
    kmeans = KMeans(len(classes), init=centres.numpy(), n_init=1)
    found = kmeans.fit_predict(vectors.numpy(), sample_weight=masses.numpy())
    new: Tensor = classes[torch.from_numpy(found).long()]
    return new.to(labels.device)


def _vectors(gaussians: Gaussians) -> Tensor:
    """Return (n, d) means, with deviations (n, d) or roots of covariances (n, d d) beside them."""
    means, spreads = gaussians.means.detach(), gaussians.spreads
    if spreads is None:
        return means
    spreads = spreads.detach()
    if spreads.ndim == 2:
        return torch.cat((means, spreads.abs()), 1)
    # S^1/2 = V diag(s) V^T for F = U diag(s) V^T.
    _, values, rows = torch.linalg.svd(spreads, full_matrices=False)
    roots = rows.mT @ (values.unsqueeze(2) * rows)
    return torch.cat((means, roots.flatten(1)), 1)
