"""Dense float64 formulas of entropic transport, written independently of the package."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def dense_cost(
    x: Tensor,
    y: Tensor,
    lambda_x: float = 0.5,
    class_costs: Tensor | None = None,
    labels_x: Tensor | None = None,
    labels_y: Tensor | None = None,
) -> Tensor:
    """C_ij = lambda_x ||x_i - y_j||^2 + class_costs[l_i, l_j], (n, m) float64."""
    differences = x.double()[:, None, :] - y.double()[None, :, :]
    cost = lambda_x * differences.square().sum(2)
    if class_costs is not None:
        cost = cost + class_costs.double()[labels_x][:, labels_y]
    return cost


def huber_cost(x: Tensor, y: Tensor, delta: float) -> Tensor:
    """C_ij = r^2 / 2 - max(r - delta, 0)^2 / 2 of r = ||x_i - y_j||, (n, m) float64."""
    squares = dense_cost(x, y, 1.0)
    return (squares - (squares.sqrt() - delta).clamp_min(0).square()) / 2


def softmin_rows(cost: Tensor, b: Tensor, g: Tensor, epsilon: float) -> Tensor:
    """-epsilon log sum_j b_j exp((g_j - C_ij) / epsilon)."""
    return -epsilon * torch.logsumexp(b.log() + (g.double() - cost) / epsilon, 1)


def plan(cost: Tensor, a: Tensor, b: Tensor, f: Tensor, g: Tensor, epsilon: float) -> Tensor:
    """P_ij = a_i b_j exp((f_i + g_j - C_ij) / epsilon)."""
    exponent = (f.to(cost)[:, None] + g.to(cost)[None, :] - cost) / epsilon
    # Masses as logarithms: next to a mass of 0 the exponent may be too large for exp.
    return (exponent + a.log()[:, None] + b.log()[None, :]).exp()


def plain_iterations(
    cost: Tensor, a: Tensor, b: Tensor, epsilon: float, tolerance: float, most: int = 100_000
) -> int:
    """Alternating updates of both potentials from g = 0 until the columns are right; `most` if not.

    Counted as a solver counts: every look at a plan, and one iteration that certifies the last.
    """
    g = torch.zeros_like(b)
    for iteration in range(1, most):
        f = softmin_rows(cost, b, g, epsilon)
        updated = softmin_rows(cost.T, a, f, epsilon)
        columns = b * torch.where(b > 0, (g - updated) / epsilon, 0).exp()
        if float((columns - b).abs().sum()) <= tolerance:
            return iteration + 1
        g = updated
    return most


def entropic_transport(
    cost: Tensor, a: Tensor, b: Tensor, epsilon: float, tolerance: float = 1e-11
) -> tuple[float, Tensor, Tensor]:
    """OT_epsilon with KL(P | a b^T), by Newton's method on the concave dual in g.

    With f = T(g), the dual F(g) = <a, f> + <b, g> has gradient b - c and Hessian
    (P^T diag(1 / a) P - diag(c)) / epsilon. Points without mass are left out and get their softmin.
    Epsilon is halved from the mean cost down, so that each Newton solve starts close.
    """
    rows, columns = a > 0, b > 0
    inner, alpha, beta = cost[rows][:, columns], a[rows], b[columns]
    g = torch.zeros_like(beta)
    level = max(epsilon, float(alpha @ inner @ beta))
    while True:
        g = _newton(inner, alpha, beta, g, level, tolerance if level == epsilon else 1e-3)
        if level == epsilon:
            break
        level = max(epsilon, level / 2)
    full_g = torch.zeros_like(b)
    full_g[columns] = g
    f = softmin_rows(cost, b, full_g, epsilon)
    full_g = softmin_rows(cost.T, a, f, epsilon)
    f = softmin_rows(cost, b, full_g, epsilon)
    return float(a @ f + b @ full_g), f, full_g


def _newton(
    cost: Tensor, a: Tensor, b: Tensor, g: Tensor, epsilon: float, tolerance: float
) -> Tensor:
    for _ in range(500):
        # A Sinkhorn update first: Newton's region of convergence shrinks with epsilon.
        g = softmin_rows(cost.T, a, softmin_rows(cost, b, g, epsilon), epsilon)
        f = softmin_rows(cost, b, g, epsilon)
        coupling = plan(cost, a, b, f, g, epsilon)
        c = coupling.sum(0)
        if float((c - b).abs().sum()) < tolerance:
            return g
        hessian = torch.diag(c) - coupling.T @ (coupling / a[:, None])
        step = epsilon * torch.linalg.lstsq(hessian, b - c, driver="gelsd").solution
        g = g + _line_search(cost, a, b, g, step, epsilon)
    raise AssertionError(f"the reference did not converge: {float((c - b).abs().sum()):.1e}")


def _line_search(
    cost: Tensor, a: Tensor, b: Tensor, g: Tensor, step: Tensor, epsilon: float
) -> Tensor:
    """Halve the step until the dual does not fall; zero if it never stops falling."""
    start = a @ softmin_rows(cost, b, g, epsilon) + b @ g
    for _ in range(30):
        if a @ softmin_rows(cost, b, g + step, epsilon) + b @ (g + step) >= start - 1e-13:
            return step
        step = step / 2
    return torch.zeros_like(step)


def translation(a: Tensor, b: Tensor, f: Tensor, g: Tensor, rho: tuple[float, float]) -> Tensor:
    """The t of the largest dual value of f + t, g - t; a penalty of inf is an exact marginal."""
    rate = 1 / rho[0] + 1 / rho[1]
    of_rows = torch.logsumexp(a.log() - f / rho[0], 0)
    return (of_rows - torch.logsumexp(b.log() - g / rho[1], 0)) / rate


def unbalanced_dual(
    cost: Tensor, a: Tensor, b: Tensor, f: Tensor, g: Tensor, epsilon: float, rho: Sequence[float]
) -> Tensor:
    """sum_i a_i phi(f_i) + sum_j b_j phi(g_j) + epsilon (1 - sum P).

    phi(f) is -rho (e^(-f / rho) - 1), and f where rho is inf. All masses are positive.
    """

    def side(masses: Tensor, potential: Tensor, penalty: float) -> Tensor:
        if penalty == math.inf:
            return masses @ potential
        return -penalty * (masses @ torch.expm1(-potential / penalty))

    return (
        side(a, f, rho[0])
        + side(b, g, rho[1])
        + epsilon * (a.sum() * b.sum() - plan(cost, a, b, f, g, epsilon).sum())
    )


def unbalanced_primal(
    cost: Tensor, a: Tensor, b: Tensor, coupling: Tensor, epsilon: float, rho: Sequence[float]
) -> Tensor:
    """<C, P> + epsilon KL(P | a b^T) + rho_x KL(P 1 | a) + rho_y KL(P^T 1 | b) as defined."""

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        return (torch.xlogy(p, p / q) - p + q).sum()

    value = (cost * coupling).sum() + epsilon * divergence(coupling, a[:, None] * b)
    for sums, masses, penalty in ((coupling.sum(1), a, rho[0]), (coupling.sum(0), b, rho[1])):
        if penalty < math.inf:
            value = value + penalty * divergence(sums, masses)
    return value


def unbalanced_transport(
    cost: Tensor,
    a: Tensor,
    b: Tensor,
    epsilon: float,
    rho: tuple[float, float],
    tolerance: float = 1e-11,
) -> tuple[float, Tensor, Tensor]:
    """OT with relaxed marginals: updates with translation, then Newton's method on the dual.

    Updates alone are slow where rho is large. Epsilon is halved from the mean cost down. All masses
    are positive; a penalty of inf is an exact marginal, of one side at the most.
    """
    f, g = torch.zeros_like(a), torch.zeros_like(b)
    level = max(epsilon, float(a @ cost @ b))
    while True:
        shares = [1.0 if p == math.inf else p / (p + level) for p in rho]
        for _ in range(50):
            f = shares[0] * softmin_rows(cost, b, g, level)
            g = shares[1] * softmin_rows(cost.T, a, f, level)
            t = translation(a, b, f, g, rho)
            f, g = f + t, g - t
        if level == epsilon:
            break
        level = max(epsilon, level / 2)
    n = len(a)
    for _ in range(200):
        coupling = plan(cost, a, b, f, g, epsilon)
        r, c = coupling.sum(1), coupling.sum(0)
        p, q = a * (-f / rho[0]).exp(), b * (-g / rho[1]).exp()
        if float((p - r).abs().sum() + (q - c).abs().sum()) < tolerance * float(r.sum()):
            break
        hessian = torch.zeros(n + len(b), n + len(b), dtype=torch.float64)
        hessian[:n, :n] = torch.diag(r / epsilon + p / rho[0])
        hessian[n:, n:] = torch.diag(c / epsilon + q / rho[1])
        hessian[:n, n:] = coupling / epsilon
        hessian[n:, :n] = coupling.T / epsilon
        # Scaled to a diagonal of 1: sums may differ by hundreds of orders of magnitude.
        scale = hessian.diagonal().rsqrt()
        matrix = scale[:, None] * hessian * scale
        right = scale * torch.cat((p - r, q - c))
        step = scale * torch.linalg.lstsq(matrix, right[:, None], driver="gelsd").solution[:, 0]
        start = unbalanced_dual(cost, a, b, f, g, epsilon, rho)
        for _ in range(40):
            if unbalanced_dual(cost, a, b, f + step[:n], g + step[n:], epsilon, rho) > start:
                f, g = f + step[:n], g + step[n:]
                break
            step = step / 2
        for _ in range(5):
            f = shares[0] * softmin_rows(cost, b, g, epsilon)
            g = shares[1] * softmin_rows(cost.T, a, f, epsilon)
            t = translation(a, b, f, g, rho)
            f, g = f + t, g - t
    else:
        raise AssertionError("the reference did not converge")
    return float(unbalanced_dual(cost, a, b, f, g, epsilon, rho)), f, g


def potentials_of(
    cost: Tensor, a: Tensor, b: Tensor, epsilon: float, rho: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """Relaxed potentials f (n,) and g (m,) for autograd, once, by the implicit function theorem.

    Newton's method in logarithms, f / rho_x + log sum_j b_j e_ij = 0, whose last step has the
    derivatives by cost and masses. A potential without mass is the update of the others.
    """
    held, there = (cost.detach(), a.detach(), b.detach()), (a > 0, b > 0)
    part = held[0][there[0]][:, there[1]]
    _, inner_f, inner_g = unbalanced_transport(
        part, held[1][there[0]], held[2][there[1]], epsilon, rho
    )
    f, g = torch.zeros_like(held[1]), torch.zeros_like(held[2])
    f[there[0]], g[there[1]] = inner_f, inner_g
    shares = [1.0 if p == math.inf else p / (p + epsilon) for p in rho]
    f = torch.where(there[0], f, -shares[0] * epsilon * _log_sum(held[2], (g - held[0]) / epsilon))
    g = torch.where(
        there[1], g, -shares[1] * epsilon * _log_sum(held[1], (f - held[0].T) / epsilon)
    )
    n = len(a)
    for step in range(4):
        c, of_a, of_b = (cost, a, b) if step == 3 else held
        exponents = (f[:, None] + g - c) / epsilon
        by_row = f / rho[0] + _log_sum(of_b, exponents)
        by_column = g / rho[1] + _log_sum(of_a, exponents.T)
        at = exponents.detach()
        jacobian = torch.zeros(n + len(b), n + len(b), dtype=torch.float64)
        jacobian[:n, :n].fill_diagonal_(1 / epsilon + 1 / rho[0])
        jacobian[n:, n:].fill_diagonal_(1 / epsilon + 1 / rho[1])
        jacobian[:n, n:] = (at - _log_sum(held[2], at)[:, None]).exp() * held[2] / epsilon
        jacobian[n:, :n] = (at.T - _log_sum(held[1], at.T)[:, None]).exp() * held[1] / epsilon
        moved = torch.linalg.solve(jacobian, torch.cat((by_row, by_column)))
        f, g = f - moved[:n], g - moved[n:]
    return f, g


def _log_sum(masses: Tensor, exponents: Tensor) -> Tensor:
    """Return log sum_j m_j e^(x_ij), differentiable by masses of 0 as well."""
    top = exponents.detach().amax(1, keepdim=True)
    return top[:, 0] + ((exponents - top).exp() @ masses).log()


def sinkhorn_divergence(
    costs: tuple[Tensor, Tensor, Tensor], a: Tensor, b: Tensor, epsilon: float
) -> float:
    """S_epsilon from the dense costs (xy, xx, yy)."""
    xy, xx, yy = costs
    self_terms = entropic_transport(xx, a, a, epsilon)[0] + entropic_transport(yy, b, b, epsilon)[0]
    return entropic_transport(xy, a, b, epsilon)[0] - self_terms / 2


def dual_value(cost: Tensor, a: Tensor, b: Tensor, f: Tensor, g: Tensor, epsilon: float) -> Tensor:
    """<a, f> + <b, g> + epsilon (1 - sum P); masses may be 0 or, for differences, below."""
    mass = (a[:, None] * b[None, :] * ((f[:, None] + g[None, :] - cost) / epsilon).exp()).sum()
    return a @ f + b @ g + epsilon * (1 - mass)


def finite_differences(
    function: Callable[[Tensor], Tensor], point: Tensor, step: float = 1e-5
) -> Tensor:
    """The gradient of a scalar function by central differences, entry by entry."""
    gradient = torch.zeros_like(point)
    for index in range(point.numel()):
        moved = torch.zeros_like(point)
        moved.view(-1)[index] = step
        gradient.view(-1)[index] = (function(point + moved) - function(point - moved)) / (2 * step)
    return gradient


def hessian_product(
    coupling: Tensor,
    points: tuple[Tensor, Tensor],
    along: tuple[Tensor, Tensor],
    epsilon: float,
    lambda_x: float = 0.5,
    rho: tuple[float, float] = (math.inf, math.inf),
) -> tuple[Tensor, Tensor]:
    """How the gradients of OT_epsilon by x and y change along A (n, d), B (m, d), sums of P fixed.

    Dense: both potentials answer by the pseudo-inverse of the whole system. Sums of a relaxed side
    give way.
    """
    (x, y), (a, b), n = points, along, len(coupling)
    r, c = coupling.sum(1), coupling.sum(0)
    softness = torch.cat((r * (epsilon / rho[0]), c * (epsilon / rho[1])))
    change = 2 * lambda_x * ((x[:, None] - y[None]) * (a[:, None] - b[None])).sum(2)
    weighted = coupling * change
    matrix = torch.cat((torch.cat((r.diag(), coupling), 1), torch.cat((coupling.T, c.diag()), 1)))
    w = torch.linalg.pinv(matrix + softness.diag(), rtol=1e-13, hermitian=True) @ torch.cat(
        (weighted.sum(1), weighted.sum(0))
    )
    moved = (coupling * (w[:n, None] + w[None, n:]) - weighted) / epsilon
    lost = (softness * w / epsilon)[:, None]
    by_x = 2 * lambda_x * (r[:, None] * a - coupling @ b - moved @ y - lost[:n] * x)
    by_y = 2 * lambda_x * (c[:, None] * b - coupling.T @ a - moved.T @ x - lost[n:] * y)
    return by_x, by_y


def own_hessian_product(
    coupling: Tensor,
    x: Tensor,
    along: Tensor,
    epsilon: float,
    lambda_x: float = 0.5,
    rho: tuple[float, float] = (math.inf, math.inf),
) -> Tensor:
    """Likewise of the self term, both of whose arguments are x."""
    by_both = hessian_product(coupling, (x, x), (along, along), epsilon, lambda_x, rho)
    return by_both[0] + by_both[1]


def adjoint(
    coupling: Tensor,
    cotangent: Tensor,
    sides: tuple[Tensor, Tensor] | None = None,
    sums: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """P o (G - u 1^T - 1 v^T), u (n,) and v (m,) of a plan, a system by the pseudo-inverse.

    `sides` are cotangents of what P is solved for, `sums` stand in place of those of P.
    """
    r, c = (coupling.sum(1), coupling.sum(0)) if sums is None else sums
    matrix = torch.cat((torch.cat((r.diag(), coupling), 1), torch.cat((coupling.T, c.diag()), 1)))
    weighted = coupling * cotangent
    right = torch.cat((weighted.sum(1), weighted.sum(0)))
    if sides is not None:
        right = right + torch.cat(sides)
    found = torch.linalg.pinv(matrix, rtol=1e-13, hermitian=True) @ right
    u, v = found[: len(r)], found[len(r) :]
    return weighted - coupling * (u[:, None] + v), u, v


def held_potentials(
    cost: Tensor,
    masses: tuple[Tensor, Tensor],
    potentials: tuple[Tensor, Tensor],
    epsilon: float,
    iterations: int = 400,
) -> tuple[Tensor, Tensor]:
    """The same potentials as the solution of a problem, which autograd differentiates.

    Of the problem whose plan has the sums that theirs has, relative to the masses: for optimal
    potentials the problem itself. Where there is no mass they are softmins.
    """
    a, b = masses
    f, g = (potential.detach() for potential in potentials)
    with torch.no_grad():
        q = torch.where(a > 0, (f - softmin_rows(cost, b, g, epsilon)) / epsilon, 0)
        p = torch.where(b > 0, (g - softmin_rows(cost.T, a, f, epsilon)) / epsilon, 0)
    for _ in range(iterations):
        f = softmin_rows(cost, b, g, epsilon) + epsilon * q
        g = softmin_rows(cost.T, a, f, epsilon) + epsilon * p
    return f, g


def balanced_matrices(logits: Tensor, iterations: int) -> Tensor:
    """Rows, then columns of exp(logits) (..., n, n) divided by their sums, in the log domain."""
    for _ in range(iterations):
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()


def sinkhorn_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    iterations: int,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Attention of balanced weights, as a loop over stored scores, for autograd."""
    scores = q @ k.mT * (scale or q.shape[-1] ** -0.5)
    n = scores.shape[-2]
    mask = torch.zeros_like(scores[..., :1, :])
    if key_mask is not None:
        mask = mask.masked_fill(key_mask[..., None, :], -torch.inf)
    target = n / (mask == 0).sum(-1, keepdim=True)
    columns = mask
    rows = -(scores + columns).logsumexp(-1, keepdim=True)
    for _ in range(iterations):
        columns = target.to(q.dtype).log() - (scores + rows).logsumexp(-2, keepdim=True) + mask
        rows = -(scores + columns).logsumexp(-1, keepdim=True)
    return (rows + scores + columns).exp() @ v


def entropic_plan(
    cost: Tensor, a: Tensor, b: Tensor, epsilon: Tensor | float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The plan (n, m) after some updates of both potentials from g = 0, and these, for autograd."""
    g = torch.zeros_like(b)
    for _ in range(iterations):
        f = softmin_rows(cost, b, g, epsilon)
        g = softmin_rows(cost.T, a, f, epsilon)
    return plan(cost, a, b, f, g, epsilon), f, g


def numbers_on_a_line(
    x: Tensor, labels: Tensor, a: Tensor, theta: Tensor, psi: Tensor, orders: Tensor
) -> Tensor:
    """psi_0 theta.x + sum_k psi_k M_k(class of x), (n,), for one draw of a sliced distance."""
    projected = x.double() @ theta
    numbers = psi[0] * projected
    for k, order in enumerate(orders.tolist()):
        for c in labels.unique().tolist():
            rows = labels == c
            powers = projected[rows] ** order / math.factorial(order)
            numbers[rows] += psi[1 + k] * (a[rows] * powers).sum() / a[rows].sum()
    return numbers


def transport_on_a_line(x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> float:
    """W_2^2 of weighted numbers: the north-west corner rule on both, sorted."""
    first, second = x.argsort(), y.argsort()
    left, right = a[first].tolist(), b[second].tolist()
    points, others = x[first].tolist(), y[second].tolist()
    i = j = 0
    cost = 0.0
    while i < len(left) and j < len(right):
        mass = min(left[i], right[j])
        cost += mass * (points[i] - others[j]) ** 2
        left[i] -= mass
        right[j] -= mass
        i, j = i + (left[i] <= right[j]), j + (left[i] > right[j])
    return cost


def log_evidence(features: Tensor, y: Tensor, alpha: float, beta: float) -> float:
    """log p(y) / n for y (n,) from N(0, I / beta + F F^T / alpha), F (n, d)."""
    n = len(y)
    covariance = torch.eye(n, dtype=torch.float64) / beta + features @ features.T / alpha
    factor = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(factor, y[:, None], upper=False)
    logs = factor.diagonal().log().sum() * 2 + n * math.log(2 * math.pi)
    return float(-(white.square().sum() + logs) / (2 * n))


def h_score_by_inverse(features: Tensor, labels: Tensor) -> float:
    """tr(cov(F)^+ cov(E[F | class])), both covariances over the n rows."""
    means = torch.stack([features[labels == c].mean(0) for c in labels.tolist()])
    covariance, between = (torch.cov(part.T, correction=0) for part in (features, means))
    inverse = torch.linalg.pinv(torch.atleast_2d(covariance), rtol=1e-12, hermitian=True)
    return float((inverse @ torch.atleast_2d(between)).trace())


def leep_by_loops(probabilities: Tensor, labels: Tensor) -> float:
    """Mean over rows of log sum_z P(y | z) theta_z, with P(y, z) counted row by row."""
    table, kinds, total = probabilities.tolist(), labels.tolist(), 0.0
    for row, kind in zip(table, kinds, strict=True):
        inner = 0.0
        for z, likely in enumerate(row):
            same = sum(other[z] for other, its in zip(table, kinds, strict=True) if its == kind)
            inner += same / sum(other[z] for other in table) * likely
        total += math.log(inner)
    return total / len(table)


def bures_wasserstein(x: Tensor, a: Tensor, y: Tensor, b: Tensor) -> float:
    """Of the Gaussians of two weighted clouds, with covariances that divide by 1 - sum a^2."""
    moments = []
    for points, masses in ((x, a), (y, b)):
        mean = masses @ points
        centred = points - mean
        unbiased = 1 - masses.square().sum()
        moments.append((mean, (centred.T * masses) @ centred / unbiased))
    (m, s), (o, t) = moments
    values, vectors = torch.linalg.eigh(s)
    root = (vectors * values.clamp_min(0).sqrt()) @ vectors.T
    fidelity = torch.linalg.eigvalsh(root @ t @ root).clamp_min(0).sqrt().sum()
    return float((m - o).square().sum() + s.trace() + t.trace() - 2 * fidelity)


def transport_entropy(coupling: Tensor) -> float:
    """H(column | row) = H(row, column) - H(row) of masses that sum to 1."""

    def entropy(masses: Tensor) -> float:
        return -sum(p * math.log(p) for p in masses.flatten().tolist() if p > 0)

    return entropy(coupling) - entropy(coupling.sum(1))
