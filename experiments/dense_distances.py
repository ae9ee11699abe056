"""The dataset distance of thousands of small pairs at once, for simulations.

    S = OT(x, y) - OT(x, x) / 2 - OT(y, y) / 2,   C = |x - y|^2 / 2 + W / 2,

two classes a side, W between their Gaussians, every row of equal mass: `otdd.dataset_distance` at a
fixed epsilon, with costs that are stored and one problem beside the other. Plain log-domain
iterations in float32 from large epsilon to the small one, until no marginal of a batch is off by
1e-3 or so many are done; the values come from dual potentials, of second order in that error.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

CLASSES = 2
TOLERANCE, MOST, MOST_SELF, MOST_ROOT = 1e-3, 300, 200, 22
# Rows (B, n, d) of B datasets and their labels (B, n).
Sides = tuple[Tensor, Tensor]
# Entries of the costs that are held at once.
ENTRIES = 2**29

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _softmin_rows(  # type: ignore[no-untyped-def]
        cost_ptr,  # (B, R, M)
        g_ptr,  # (B, M)
        out_ptr,  # (B, R)
        R,
        M,
        log_mass,
        inverse_epsilon,
        BLOCK_M: tl.constexpr,
        BLOCK_R: tl.constexpr,
    ):
        """One program per BLOCK_R rows of one problem."""
        b = tl.program_id(0).to(tl.int64)
        rows = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        columns = tl.arange(0, BLOCK_M)
        inside = (rows[:, None] < R) & (columns[None, :] < M)
        places = b * R * M + rows[:, None].to(tl.int64) * M + columns[None, :]
        costs = tl.load(cost_ptr + places, mask=inside, other=float("inf"))
        g = tl.load(g_ptr + b * M + columns, mask=columns < M, other=0.0)
        scores = (g[None, :] - costs) * inverse_epsilon  # (BLOCK_R, BLOCK_M)
        largest = tl.where(rows < R, tl.max(scores, 1), 0.0)
        sums = tl.log(tl.sum(tl.exp(scores - largest[:, None]), 1)) + largest
        tl.store(out_ptr + b * R + rows, -(sums + log_mass) / inverse_epsilon, mask=rows < R)


def softmin(cost: Tensor, g: Tensor, epsilon: float) -> Tensor:
    """-epsilon log of the mean over j of exp((g_j - C_ij) / epsilon), (B, R) of (B, R, M)."""
    count, rows, columns = cost.shape
    if triton is None or not cost.is_cuda:
        scores = (g[:, None, :] - cost) / epsilon
        return -epsilon * (torch.logsumexp(scores, 2) - math.log(columns))
    out = cost.new_empty(count, rows)
    block = triton.next_power_of_2(columns)
    together = max(1, min(triton.next_power_of_2(rows), 4096 // block))
    grid = (count, triton.cdiv(rows, together))
    _softmin_rows[grid](
        *(cost, g.contiguous(), out, rows, columns, -math.log(columns), 1 / epsilon),
        BLOCK_M=block,
        BLOCK_R=together,
    )
    return out


def _largest(cost: Tensor) -> float:
    largest = float(cost.amax())
    assert math.isfinite(largest), "costs overflow"
    return largest


def between(cost: Tensor, epsilon: float) -> Tensor:
    """OT_epsilon (B,) float64 of costs (B, R, M)."""
    turned = cost.transpose(1, 2).contiguous()
    g = cost.new_zeros(len(cost), cost.shape[2])
    current = _largest(cost)
    while current > epsilon:
        g = softmin(turned, softmin(cost, g, current), current)
        current /= 4
    f = softmin(cost, g, epsilon)
    for step in range(MOST):
        g = softmin(turned, f, epsilon)
        following = softmin(cost, g, epsilon)
        error, f = ((f - following) / epsilon).expm1().abs().mean(1), following
        if step % 10 == 9 and float(error.amax()) < TOLERANCE:
            break
    return f.double().mean(1) + g.double().mean(1)


def within(cost: Tensor, epsilon: float) -> Tensor:
    """OT_epsilon (B,) float64 of a cloud and itself, by averaged updates, of costs (B, n, n)."""
    f = cost.new_zeros(cost.shape[:2])
    current = _largest(cost)
    while current > epsilon:
        f = (f + softmin(cost, f, current)) / 2
        current /= 4
    for step in range(MOST_SELF):
        following = softmin(cost, f, epsilon)
        error = ((f - following) / epsilon).expm1().abs().mean(1)
        if step % 5 == 4 and float(error.amax()) < TOLERANCE:
            break
        f = (f + following) / 2
    return f.double().mean(1) + softmin(cost, f, epsilon).double().mean(1)


def moments(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Means (B, V, d) and unbiased covariances (B, V, d, d) of the classes, float64."""
    shares = torch.nn.functional.one_hot(labels, CLASSES).double()
    counts = shares.sum(1)
    means = torch.einsum("bnv,bnd->bvd", shares, x) / counts.clamp_min(1)[..., None]
    parts = []
    for v in range(CLASSES):
        centred = x - means[:, v : v + 1]
        products = (centred * shares[:, :, v : v + 1]).transpose(1, 2) @ centred
        parts.append(products / (counts[:, v] - 1).clamp_min(1)[:, None, None])
    return means, torch.stack(parts, 1)


def root(s: Tensor) -> Tensor:
    """The roots of semidefinite matrices (..., d, d), by Newton and Schulz's iteration."""
    scale = s.square().sum((-1, -2), keepdim=True).sqrt().clamp_min(1e-30)
    eye = torch.eye(s.shape[-1], dtype=s.dtype, device=s.device)
    near, inverse = s / scale, eye.expand_as(s)
    for _ in range(MOST_ROOT):
        step = 1.5 * eye - 0.5 * (inverse @ near)
        near, inverse = near @ step, step @ inverse
        # Rounding that is not symmetric would grow where an eigenvalue is 0.
        near, inverse = (near + near.mT) / 2, (inverse + inverse.mT) / 2
    return near * scale.sqrt()


def trace_of_root(s: Tensor, t: Tensor) -> Tensor:
    """The trace of (s^1/2 t s^1/2)^1/2."""
    dim = s.shape[-1]
    if dim == 1:
        return (s * t).sqrt()[..., 0, 0]
    if dim == 2:
        determinants: list[Tensor] = [torch.linalg.det(part).clamp_min(0) for part in (s, t)]
        trace = (s * t).sum((-1, -2))
        return (trace + 2 * (determinants[0] * determinants[1]).sqrt()).clamp_min(0).sqrt()
    half = root(s)
    return root(half @ t @ half).diagonal(dim1=-2, dim2=-1).sum(-1)


def class_table(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """W (B, V, U) between Gaussians of two sides, from their `moments`."""
    (means, covariances), (other_means, other_covariances) = one, other
    squares = (means[:, :, None] - other_means[:, None]).square().sum(-1)
    traces = covariances.diagonal(dim1=-2, dim2=-1).sum(-1)
    other_traces = other_covariances.diagonal(dim1=-2, dim2=-1).sum(-1)
    shape = len(means), means.shape[1], other_means.shape[1], *covariances.shape[2:]
    sides = covariances[:, :, None].expand(shape), other_covariances[:, None].expand(shape)
    roots = trace_of_root(*(side.flatten(0, 2) for side in sides)).reshape(shape[:3])
    return (squares + traces[:, :, None] + other_traces[:, None] - 2 * roots).clamp_min(0)


def own_table(one: tuple[Tensor, Tensor]) -> Tensor:
    """W (B, 2, 2) within one side."""
    means, covariances = one
    first, second = ((means[:, v : v + 1], covariances[:, v : v + 1]) for v in range(CLASSES))
    table = one[0].new_zeros(len(one[0]), CLASSES, CLASSES)
    table[:, 0, 1] = table[:, 1, 0] = class_table(first, second)[:, 0, 0]
    return table


def costs(x: Tensor, labels_x: Tensor, y: Tensor, labels_y: Tensor, table: Tensor) -> Tensor:
    """C (B, n, m) float64."""
    rows = torch.gather(table, 1, labels_x[:, :, None].expand(-1, -1, table.shape[2]))
    places = labels_y[:, None, :].expand(-1, x.shape[1], -1)
    return (torch.cdist(x, y).square() + torch.gather(rows, 2, places)) / 2


def distances(source: Sides, target: Sides, epsilon: float) -> Tensor:
    """S (B,) float64 of B pairs: rows (B, n, d) and (B, m, d) float64 with labels 0 and 1."""
    (x, labels_x), (y, labels_y) = source, target
    largest = max(x.shape[1], y.shape[1]) ** 2
    size = max(1, ENTRIES // max(largest, 24 * x.shape[2] ** 2))
    values = []
    for start in range(0, len(x), size):
        one, kinds, other, other_kinds = (
            part[start : start + size] for part in (x, labels_x, y, labels_y)
        )
        of_one, of_other = moments(one, kinds), moments(other, other_kinds)
        cost = costs(one, kinds, other, other_kinds, class_table(of_one, of_other)).float()
        value = between(cost, epsilon)
        for side, side_kinds, found in ((one, kinds, of_one), (other, other_kinds, of_other)):
            cost = costs(side, side_kinds, side, side_kinds, own_table(found)).float()
            value = value - within(cost, epsilon) / 2
        values.append(value)
    return torch.cat(values)
