"""Squared distances of pairs of classes by their means and covariances, in float64.

Most of them are Bures-Wasserstein distances between Gaussians,

    W_ij = ||m_i - m_j||^2 + tr S_i + tr S_j - 2 tr (S_i^1/2 S_j S_i^1/2)^1/2

for class means m and covariances S. The last trace, the fidelity, is computed from factors F with
F^T F = S as the nuclear norm of F_i F_j^T: with polar decompositions F = U S^1/2 that product is
U_i (S_i^1/2 S_j^1/2) U_j^T, whose singular values are those of S_i^1/2 S_j^1/2. No matrix square
root is taken, and rank-deficient classes need no special case. `mean_table` and `upper_bound_table`
are the methods `labels=means` and `labels=upper_bound`.

`labels.metrics`, `contributions`, `flows.modes`, `flows.joint_modes`, `ranking.bounds`,
`gromov.distance` and `study.measures.distances` call it.

A change must keep three things. Everything is differentiable in the points, for flows that move
them, and in weights that keep their sum, for `contributions`. The distance of a pair has the same
bits whatever other pairs and classes are measured beside it (`equal_chunks`, `padded_rows`),
because distances are cached. Factors are as accurate as the points: a factor computed from S
itself, by Cholesky or eigenvectors, has half the digits of small singular values and puts errors of
1e-8 of the traces into distances from a class with a singular covariance, against 1e-15 here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from otdd_flash.arguments import Progress
from otdd_flash.cost.points import DOUBLE_UNIT
from otdd_flash.derivatives.autograd import ONCE, LastDerivative
from otdd_flash.labels.pairs import ClassCloud, chunk_size, equal_chunks, masses_of, used_classes


class ClassMoments(NamedTuple):
    """The statistics of a class that determine its Gaussian distances, float64.

    Attributes:
        mean: (d,).
        factor: F (r, d) with F^T F the covariance, as `reduced_factors` returns it.
        trace: () trace of the covariance.
    """

    mean: Tensor
    factor: Tensor
    trace: Tensor


def gaussian_table(
    clouds: Sequence[ClassCloud],
    pairs: Tensor,
    unbiased: bool = True,
    progress: Progress | None = None,
) -> Tensor:
    """Compute Bures-Wasserstein distances (P,) of pairs, differentiable in the classes' points.

    The bits of each are independent of the other pairs. The distance can have a kink where a
    covariance or a product of two is singular. The gradient there is finite and leaves the null
    directions out.

    Args:
        clouds: V classes.
        pairs: (P, 2) int64, indices of the classes of each pair.
        unbiased: whether covariances divide by n - 1 (for weights: by 1 - sum w^2) or by n.
        progress: called with the number of pairs of classes done and their total.
    """
    clouds, pairs = used_classes(clouds, pairs)
    return moments_table(class_moments(clouds, unbiased), pairs, progress)


def class_moments(clouds: Sequence[ClassCloud], unbiased: bool) -> list[ClassMoments]:
    """Compute the moments of all classes, differentiable in the points as in `reduced_factors`.

    The moments of a class are the same to the last bit whatever the other classes are.
    """
    found = dict(_small_moments(clouds, unbiased))
    if rest := [place for place in range(len(clouds)) if place not in found]:
        others = [clouds[place] for place in rest]
        factors, traces = reduced_factors(others, unbiased)
        moments = map(ClassMoments, class_means(others), factors, traces)
        found |= zip(rest, moments, strict=True)
    return [found[place] for place in range(len(clouds))]


# Classes of one shape that a GPU decomposes side by side, always so many, and their most entries.
STACKED, MOST_STACKED = 64, 1 << 17


def _small_moments(
    clouds: Sequence[ClassCloud], unbiased: bool
) -> Iterator[tuple[int, ClassMoments]]:
    """Yield places and moments of small classes on a GPU that no derivative is asked of.

    Each takes a few launches of microseconds if it is alone. Batches are filled up to one size, so
    that a class has the same bits in any company.
    """
    alike = defaultdict[tuple[int, int, torch.dtype], list[int]](list)
    for place, cloud in enumerate(clouds):
        points, rows, dim = cloud.points, padded_rows(len(cloud)), cloud.points.shape[1]
        moving = points.requires_grad or (cloud.weights is not None and cloud.weights.requires_grad)
        # No more rows than features: the factor is that of the points, which nothing decomposes.
        small = len(cloud) > dim and rows * dim <= MOST_STACKED
        if by_products(points) and small and not moving:
            alike[rows, dim, points.dtype].append(place)
    for (rows, _, _), places in alike.items():
        for first in range(0, len(places), STACKED):
            own = places[first : first + STACKED]
            some = [clouds[place] for place in own + own[:1] * (STACKED - len(own))]
            points, masses = (
                torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
                for parts in ([cloud.points for cloud in some], list(masses_of(some)))
            )
            missing = rows - points.shape[1]
            points = torch.nn.functional.pad(points, (0, 0, 0, missing))
            masses = torch.nn.functional.pad(masses, (0, missing))
            stacked = _stacked_moments(points.double(), masses, unbiased)
            yield from zip(own, map(ClassMoments, *stacked), strict=False)


def _stacked_moments(
    points: Tensor, masses: Tensor, unbiased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return means (B, d), factors (B, r, d) and traces (B,) of points (B, n, d) of masses (B, n).

    The formulas are those of `_from_the_heaviest`, `covariance_factor` and `reduced_factors`.
    """
    heaviest, dim = masses.argmax(1, keepdim=True), points.shape[2]
    anchor = points.gather(1, heaviest[:, :, None].expand(-1, 1, dim))
    # Rows of mass 0 fill up.
    seen = torch.where(masses[:, :, None] > 0, points - anchor, 0.0)
    shift = masses[:, None] @ seen
    scaled = masses
    if unbiased:
        others, heavy = masses.scatter(1, heaviest, 0.0), masses.gather(1, heaviest).squeeze(1)
        scaled = masses / ((others * (1 - others)).sum(1) + heavy * others.sum(1))[:, None]
    factor = (seen - shift) * scaled.sqrt()[:, :, None]
    traces = factor.square().sum((1, 2))
    _, triangle = cholesky_qr(factor)
    missing = padded_rows(dim) - dim
    return (
        (anchor + shift).squeeze(1),
        torch.nn.functional.pad(triangle, (0, 0, 0, missing)),
        traces,
    )


def moments_table(
    moments: Sequence[ClassMoments], pairs: Tensor, progress: Progress | None = None
) -> Tensor:
    """Return the values of `gaussian_table` for pairs (P, 2) of V classes from their moments."""
    if len(pairs) == 0:
        return torch.zeros(0, dtype=torch.float64, device=pairs.device)
    means, traces = (
        torch.stack([getattr(one, key) for one in moments]) for key in ("mean", "trace")
    )
    fidelity = fidelities([one.factor for one in moments], pairs, progress)
    first, second = pairs.to(traces.device).unbind(1)
    spread = traces[first] + traces[second] - 2 * fidelity
    # The Bures part is a squared distance; below zero there is only rounding.
    return squared_gaps(means, pairs) + spread.clamp_min(0)


def diagonal_gaussian_table(
    clouds: Sequence[ClassCloud], pairs: Tensor, unbiased: bool = True
) -> Tensor:
    """Return `gaussian_table` with diagonal covariances, differentiable in the classes' points.

    Diagonal covariances commute, so these are ||m_i - m_j||^2 + ||s_i - s_j||^2 with standard
    deviations s.
    """
    clouds, pairs = used_classes(clouds, pairs)
    if len(pairs) == 0:
        return torch.zeros(0, dtype=torch.float64, device=pairs.device)
    deviations = standard_deviations(clouds, unbiased)
    return squared_gaps(class_means(clouds), pairs) + squared_gaps(deviations, pairs)


def mean_table(clouds: Sequence[ClassCloud], pairs: Tensor) -> Tensor:
    """Return ||m_i - m_j||^2 of pairs (P, 2) of classes, (P,) float64, differentiable in points."""
    clouds, pairs = used_classes(clouds, pairs)
    if len(pairs) == 0:
        return torch.zeros(0, dtype=torch.float64, device=pairs.device)
    return squared_gaps(class_means(clouds), pairs)


def upper_bound_table(clouds: Sequence[ClassCloud], pairs: Tensor, unbiased: bool = True) -> Tensor:
    """Return ||m_i - m_j||^2 + tr S_i + tr S_j of pairs (P, 2), differentiable as in `mean_table`.

    It is the cost of the independent coupling. Covariances divide by n - 1 if `unbiased`.
    """
    clouds, pairs = used_classes(clouds, pairs)
    if len(pairs) == 0:
        return torch.zeros(0, dtype=torch.float64, device=pairs.device)
    traces = torch.stack([covariance_factor(one, unbiased).square().sum() for one in clouds])
    first, second = pairs.unbind(1)
    return squared_gaps(class_means(clouds), pairs) + (traces[first] + traces[second])


def _from_the_heaviest(cloud: ClassCloud) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heaviest point (d,), the points (n, d) relative to it, and their mean (d,).

    Differences from a point of the class keep the digits that a large distance from the origin
    would take, and the small offset of a dominant point from the mean. The heaviest point counts as
    a constant.
    """
    points = cloud.points.to(torch.float64)
    heaviest = points.new_zeros(1, dtype=torch.int64)
    if cloud.weights is not None:
        heaviest = cloud.weights.argmax().reshape(1)
    anchor = points.detach().index_select(0, heaviest).squeeze(0)
    seen = points - anchor
    return anchor, seen, seen.mean(0) if cloud.weights is None else cloud.weights @ seen


def class_means(clouds: Sequence[ClassCloud]) -> Tensor:
    """Return the weighted means of all classes, (V, d) float64."""
    return torch.stack([anchor + shift for anchor, _, shift in map(_from_the_heaviest, clouds)])


def covariance_factor(cloud: ClassCloud, unbiased: bool) -> Tensor:
    """Return A (n, d) float64 with A^T A the covariance of the class.

    The rows of A are sqrt(w_i / z) (x_i - mean). The plain covariance has z = 1; the unbiased one
    has z = 1 - sum_i w_i^2 (reliability weights), so that w_i / z is 1 / (n - 1) for equal weights.
    The covariance of a class of one sample is 0, `unbiased` or not.
    """
    size = len(cloud)
    unbiased = unbiased and size > 1
    _, seen, shift = _from_the_heaviest(cloud)
    centred = seen - shift
    if cloud.weights is None:
        return centred / math.sqrt(size - 1 if unbiased else size)
    masses = cloud.weights / _unevenness(cloud.weights) if unbiased else cloud.weights
    return centred * masses.sqrt().unsqueeze(1)


def _unevenness(weights: Tensor) -> Tensor:
    """Return 1 - sum_i w_i^2 = sum_i w_i (1 - w_i) without cancellation, weights (n,) of sum 1.

    At most one weight exceeds 1/2; its 1 - w is computed as the sum of the others.
    """
    heaviest = weights.argmax().reshape(1)
    others = weights.index_fill(0, heaviest, 0.0)
    # The largest weight is selected by its index: the derivative of a maximum would be shared among
    # equal weights.
    heavy = weights.index_select(0, heaviest).squeeze(0)
    return (others * (1 - others)).sum() + heavy * others.sum()


def standard_deviations(clouds: Sequence[ClassCloud], unbiased: bool) -> Tensor:
    """Compute the features' deviations within classes, (V, d) float64; gradient 0 at 0."""
    return torch.stack(
        [torch.linalg.vector_norm(covariance_factor(cloud, unbiased), dim=0) for cloud in clouds]
    )


def squared_gaps(points: Tensor, pairs: Tensor) -> Tensor:
    """Return ||p_i - p_j||^2 (P,) for rows of `points` (V, d) and pairs (P, 2), from differences.

    Equal rows are at exactly 0.
    """
    gaps = [points.new_zeros(0)]
    # The numbers of a pair are two rows, their difference and its squares.
    size = chunk_size(4 * points.shape[1], points.device)
    for count, chunk in equal_chunks(pairs.to(points.device), size):
        first, second = chunk.unbind(1)
        gaps.append((points[first] - points[second]).square().sum(1)[:count])
    return torch.cat(gaps)


# Entries of all products of a chunk: enough to keep a GPU busy.
FILLING_ENTRIES = 3 * 2**21


def fidelities(
    factors: Sequence[Tensor], pairs: Tensor, progress: Progress | None = None
) -> Tensor:
    """Compute the nuclear norms (P,) of F_i F_j^T, differentiable in the factors.

    The gradient in F_i is P F_j, and in F_j it is P^T F_i, with P the polar factor of F_i F_j^T.
    Where the product is rank-deficient the norm has a kink, and P leaves the null directions out. A
    polar factor takes three times as long as a norm. It is computed only for pairs whose gradient
    exceeds rounding: optimal transport between many classes moves most masses to 0.

    Args:
        factors: V matrices (r_c, d) float64.
        pairs: (P, 2) int64, P >= 1, on any device; they are sorted there.
        progress: called with the number of pairs done and their total, and again in the backward
            pass with the pairs that have a gradient.
    """
    rows = torch.tensor([factor.shape[0] for factor in factors])
    stacks, places = _stacked(factors, rows)
    rows, places = rows.to(pairs.device), places.to(pairs.device)
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, len(pairs))

    device = factors[0].device
    order, values = [], []
    for (fewer, more), positions, chosen in _groups_of_equal_shape(rows, pairs):
        local = places[chosen].to(device)
        order.append(positions)
        values.append(_Fidelities.apply(stacks[fewer], stacks[more], local, report, progress))
    back = torch.argsort(torch.cat(order))
    found = torch.cat(values)[back.to(device)]
    return _InGradients.apply(found, factors, pairs.to(device)) if found.requires_grad else found


def _stacked(factors: Sequence[Tensor], rows: Tensor) -> tuple[dict[int, Tensor], Tensor]:
    """Stack the factors of r rows into one (k, r, d) for every r.

    Returns:
        The stacks by r, and (V,) the index of every class in its stack.
    """
    stacks = {}
    places = torch.empty_like(rows)
    for count in torch.unique(rows).tolist():
        members = torch.nonzero(rows == count).squeeze(1)
        stacks[count] = torch.stack([factors[index] for index in members.tolist()])
        places[members] = torch.arange(len(members))
    return stacks, places


def _groups_of_equal_shape(
    rows: Tensor, pairs: Tensor
) -> Iterator[tuple[tuple[int, int], Tensor, Tensor]]:
    """Group pairs by the numbers of rows of their factors.

    The number of groups depends on the sizes of the classes, not on how many there are.

    Yields:
        For each group: (fewer, more) rows, the positions of its pairs, and the pairs themselves
        with the class of fewer rows first.
    """
    swap = rows[pairs[:, 0]] > rows[pairs[:, 1]]
    pairs = torch.where(swap.unsqueeze(1), pairs.flip(1), pairs)
    fewer, more = rows[pairs].unbind(1)
    base = int(rows.max()) + 1
    keys, inverse, counts = torch.unique(
        fewer * base + more, return_inverse=True, return_counts=True
    )
    groups = torch.split(torch.argsort(inverse, stable=True), counts.tolist())
    for key, positions in zip(keys.tolist(), groups, strict=True):
        yield divmod(key, base), positions, pairs[positions]


class _InGradients(torch.autograd.Function):
    """Values (P,) of pairs of factors; gradients lost to rounding are set to 0.

    A pair of weight w adds w P F_j to the gradient in F_i, at most |w| ||F_j||. If that is below
    the rounding of another pair's share, for both factors, the weight becomes 0.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, factors: Sequence[Tensor], pairs: Tensor) -> Tensor:
        norms = torch.stack([torch.linalg.matrix_norm(factor) for factor in factors])
        moving = torch.tensor([factor.requires_grad for factor in factors], device=norms.device)
        ctx.save_for_backward(norms, moving, pairs)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, weights: Tensor) -> tuple[Tensor, None, None]:
        norms, moving, pairs = ctx.saved_tensors
        mine, theirs = torch.cat((pairs, pairs.flip(1))).unbind(1)
        added = weights.detach().abs().repeat(2) * norms[theirs] * moving[mine]
        most = torch.zeros_like(norms).scatter_reduce(0, mine, added, "amax")
        seen = (added > DOUBLE_UNIT * most[mine]).reshape(2, -1).any(0)
        return torch.where(seen, weights, 0.0), None, None


class _Fidelities(torch.autograd.Function):
    """||F_i G_j||_* for F (k, r, d), G (l, s, d) and indices (P, 2) of their matrices.

    Only F and G are saved for the backward pass; products and polar factors live for one chunk.
    """

    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        pairs: Tensor,
        report: Callable[[int], None],
        progress: Progress | None,
    ) -> Tensor:
        ctx.save_for_backward(left, right, pairs)
        ctx.progress = progress
        values = left.new_empty(len(pairs))
        start = 0
        for count, chunk in equal_chunks(pairs, _chunk_size(left, right)):
            first, second = chunk.unbind(1)
            products = left.index_select(0, first) @ right.index_select(0, second).mT
            if not by_products(products):
                # LAPACK factors one matrix at a time, so the padding of the chunk is left out.
                products = products[:count]
            values[start : start + count] = nuclear_norms(products)[:count]
            start += count
            report(count)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        left, right, pairs = ctx.saved_tensors
        with torch.no_grad():
            by_left, by_right = _Fidelities._gradients(left, right, pairs, gradient, ctx.progress)
        # With create_graph=True: raise if the gradient is differentiated again.
        if torch.is_grad_enabled():
            by_left, by_right = (
                cast(Tensor, LastDerivative.apply(ONCE, part, gradient, left, right))
                for part in (by_left, by_right)
            )
        return by_left, by_right, None, None, None

    @staticmethod
    def _gradients(
        left: Tensor, right: Tensor, pairs: Tensor, gradient: Tensor, progress: Progress | None
    ) -> tuple[Tensor, Tensor]:
        """Differentiate sum_p gradient_p norm_p by F (k, r, d) and by G (l, s, d)."""
        gradient_left, gradient_right = torch.zeros_like(left), torch.zeros_like(right)
        done, shown = 0, gradient != 0
        pairs, gradient = pairs[shown], gradient[shown]
        size = _chunk_size(left, right)
        for chunk, weights in zip(
            torch.split(pairs, size), torch.split(gradient, size), strict=True
        ):
            first, second = chunk.unbind(1)
            ours, theirs = left.index_select(0, first), right.index_select(0, second)
            polar = polar_factors(ours @ theirs.mT) * weights.reshape(-1, 1, 1)
            gradient_left.index_add_(0, first, polar @ theirs)
            gradient_right.index_add_(0, second, polar.mT @ ours)
            done += len(chunk)
            if progress is not None:
                progress(done, len(pairs))
        return gradient_left, gradient_right


def _chunk_size(left: Tensor, right: Tensor) -> int:
    rows, more_rows, dim = left.shape[1], right.shape[1], left.shape[2]
    # The two factors, and three matrices for the product and its decomposition.
    size = chunk_size((rows + more_rows) * dim + 3 * rows * more_rows, left.device)
    # A few large products fill a GPU, and padding there costs time.
    return min(size, max(1, FILLING_ENTRIES // (rows * more_rows))) if left.is_cuda else size


def reduced_factors(clouds: Sequence[ClassCloud], unbiased: bool) -> tuple[list[Tensor], Tensor]:
    """Return factors (r_c, d) and traces (V,) of all covariances, differentiable in the points.

    F^T F = S with r near the rank that S can have. If a class has no more samples than varying
    features, F holds its scaled centred points. Otherwise F is the triangle of a QR decomposition
    of these points: Householder's on the CPU; `cholesky_qr` on a GPU, where Householder's narrow
    panels are slow.

    The gradient of a factor is right for functions of its covariance, which do not change when the
    factor is multiplied by an orthogonal matrix from the left.
    """
    factors, traces = [], []
    varying = [_varying(cloud) for cloud in clouds]
    # One transfer for all classes.
    counts: list[int] = torch.stack([features.sum() for features in varying]).tolist()
    for cloud, features, count in zip(clouds, varying, counts, strict=True):
        factor = covariance_factor(cloud, unbiased)
        traces.append(factor.square().sum())
        if len(cloud) > count:
            factor = _Triangle.apply(factor, torch.nonzero(features).squeeze(1))
        missing = padded_rows(factor.shape[0]) - factor.shape[0]
        factors.append(torch.nn.functional.pad(factor, (0, 0, 0, missing)))
    return factors, torch.stack(traces)


def padded_rows(rows: int) -> int:
    """Return the number of rows to which a factor is padded with zeros.

    Classes of similar sizes so share their batches. Multiples of 4 also give every matrix of a
    batch the same alignment, on which LAPACK's rounding depends.
    """
    step = 1 << min(4, max(2, rows.bit_length() - 4))
    return max(step, -(-rows // step) * step)


def cholesky_qr(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose A = Q R by three passes of shifted Cholesky QR (Fukaya et al. 2020).

    One pass has the accuracy of a Cholesky factor of A^T A. The singular values that it cannot
    resolve are recovered by the next pass, in units of the square root of the shift.

    Args:
        matrix: A (n, c) float64, n >= c, or a batch (B, n, c) of them.

    Returns:
        Q (n, c), orthonormal on the range of A and small on the rest, and R (c, c) with R^T R = A^T
        A to rounding.
    """
    columns = matrix.shape[-1]
    # The rounding of a product of unit columns, with a margin.
    shift = 100 * columns * DOUBLE_UNIT
    norms = torch.linalg.vector_norm(matrix, dim=-2)
    q = matrix / torch.where(norms > 0, norms, 1.0).unsqueeze(-2)
    r = torch.diag_embed(norms)
    for _ in range(3):
        gram = q.mT @ q
        gram.diagonal(dim1=-2, dim2=-1).add_(shift)
        step = torch.linalg.cholesky(gram, upper=True)
        q = torch.linalg.solve_triangular(step, q, upper=True, left=False)
        r = step @ r
    # R^T R has grown by the shifts of the last two passes, in units of A^T A. The shift of the
    # first pass enters only through the product of all three, far below rounding.
    return q, r / (1 + shift + shift**2) ** 0.5


def _varying(cloud: ClassCloud) -> Tensor:
    """Return which features (d,) differ within the class; constant ones add no rank."""
    points = cloud.points.detach()
    return points.amax(0) > points.amin(0)


class _Triangle(torch.autograd.Function):
    """R (c, d) of the QR decomposition of the varying columns of A (n, d), zeros in the others.

    With A = Q R and a function of R^T R, whose gradient in R is R T for some T, the gradient in A
    is A T = Q R T: Q times the gradient in R.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, columns: Tensor) -> Tensor:
        dense = matrix[:, columns]
        needs_q = ctx.needs_input_grad[0]
        if by_products(dense):
            q, r = cholesky_qr(dense)
        else:
            q, r = torch.linalg.qr(dense, mode="reduced" if needs_q else "r")
        if needs_q:
            ctx.save_for_backward(q, matrix)
        triangle = matrix.new_zeros(len(columns), matrix.shape[1])
        triangle[:, columns] = r
        return triangle

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        q, matrix = ctx.saved_tensors
        by_matrix = q @ gradient.detach()
        # With create_graph=True: raise if the gradient is differentiated again.
        if torch.is_grad_enabled():
            by_matrix = cast(Tensor, LastDerivative.apply(ONCE, by_matrix, gradient, matrix))
        return by_matrix, None


# Singular values below this share of the Frobenius norm count as zero: a product rounded to float64
# holds none of their digits.
NEGLIGIBLE = 1e-13

# The scale that maps the largest singular value, 1, to 0.1 (Chen & Chow).
LARGEST_SCALE = 1.69770248526


def nuclear_norms(matrices: Tensor) -> Tensor:
    """Return the sums of the singular values of (B, r, c) float64 matrices, (B,)."""
    if by_products(matrices):
        return (matrices * iterated_polar_factors(matrices)).sum((-2, -1))
    values: Tensor = torch.linalg.svdvals(matrices)
    return values.sum(-1)


def polar_factors(matrices: Tensor) -> Tensor:
    """Return U (B, r, c) of M = U (M^T M)^1/2, from the singular values above NEGLIGIBLE."""
    if by_products(matrices):
        return iterated_polar_factors(matrices)
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    floor = NEGLIGIBLE * torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    factors: Tensor = (left * (values > floor).unsqueeze(-2)) @ right
    return factors


def by_products(matrices: Tensor) -> bool:
    """Return whether decompositions are faster by matrix products on this device."""
    return matrices.is_cuda


def iterated_polar_factors(matrices: Tensor) -> Tensor:
    """Compute `polar_factors` by a scaled Newton-Schulz iteration, for GPUs, where an SVD is slow.

    From X = M / ||M||_F each step takes

        X <- 3/2 (a X) - 1/2 (a X) (a X)^T (a X),

    which maps every singular value x to 3/2 a x - 1/2 (a x)^3 and keeps the singular vectors. A
    singular value s whose x has reached y <= 1 counts s y in <M, U>. The resulting norm exceeds the
    nuclear norm by rounding only, and is below it by a share of at most min(rows, columns)
    NEGLIGIBLE.
    """
    if matrices.shape[-2] > matrices.shape[-1]:
        return iterated_polar_factors(matrices.mT).mT
    norms = torch.linalg.matrix_norm(matrices, keepdim=True)
    factors = matrices / torch.where(norms > 0, norms, 1.0)
    for scale in newton_schulz_scales():
        gram = factors @ factors.mT
        factors = torch.baddbmm(factors, gram, factors, beta=1.5 * scale, alpha=-0.5 * scale**3)
    return factors


@cache
def newton_schulz_scales() -> tuple[float, ...]:
    """Return the scale a of every step that takes the interval [NEGLIGIBLE, 1] to 1.

    If all x lie in [l, 1], then a^2 = 3 / (1 + l + l^2) brings them closest to 1 (Chen & Chow 2014,
    "A stable scaling of Newton-Schulz for improving the sign function computation of a Hermitian
    matrix"): small x grow by 2.6 a step. Their bound on a prevents a large x from being mapped near
    0, where rounding would spoil its vectors.
    """
    scales = []
    lower = NEGLIGIBLE
    while lower < 1 - 1e-14:
        scale = min(LARGEST_SCALE, math.sqrt(3 / (1 + lower + lower**2)))
        lower *= scale * (3 - (scale * lower) ** 2) / 2
        scales.append(scale)
    return tuple(scales)
