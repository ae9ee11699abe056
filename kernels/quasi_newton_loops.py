"""L-BFGS from inner products alone: the coefficients of its direction, for one program.

With steps S, falls Y and the residual r, all without means, the oldest first, R_ij = <s_i, y_j> for
i <= j, curvatures D_i = R_ii and the scale t = tr D / tr Y^T Y:

    alpha = R^-1 S^T r,    z = t (Y^T r - Y^T Y alpha),
    beta_i = alpha_i - (z_i + sum_{j<i} R_ji beta_j) / D_i,
    direction = t (r - sum_i alpha_i y_i) + sum_i beta_i s_i.

These are Nocedal's two loops (Chen, Wang & Zhou 2014, Large-scale L-BFGS using MapReduce). A place
where nothing is remembered has products and coefficients 0.

Shapes: products (2, MEMORY, MEMORY + 1) float64, those of S and of Y with Y and r. Lanes are the
remembered differences.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def entry(vector, i):
    """The element i of a vector in registers."""
    return tl.sum(tl.where(tl.arange(0, vector.shape[0]) == i, vector, 0.0), 0)


@triton.jit
def two_loops(
    products_ptr,  # (2, MEMORY, MEMORY + 1) float64
    new_products_ptr,  # (2, MEMORY, MEMORY + 1) float64
    moved,  # whether the oldest is forgotten
    newest,  # (LANES,) the place of what is remembered instead
    steps_fall,  # (LANES,) products with the newest fall
    falls_fall,
    on_steps,  # (LANES,) products with the residual
    on_falls,
    damping,
    MEMORY: tl.constexpr,
):
    """alpha, beta (LANES,) and t; writes the products of the remembered differences on the way.

    Loads may reach one past the old products of a row or column, never past all of them; what they
    find there is not used.
    """
    WIDTH: tl.constexpr = MEMORY + 1
    o = tl.arange(0, newest.shape[0])
    o_old, m_lane = o + moved, o < MEMORY
    m_old = o_old < MEMORY
    p_steps, p_new_steps = products_ptr + o_old * WIDTH, new_products_ptr + o * WIDTH
    p_falls, p_new_falls = p_steps + MEMORY * WIDTH, p_new_steps + MEMORY * WIDTH
    curvatures = tl.load(p_steps + o_old, mask=m_old, other=0.0)
    curvatures = tl.where(newest, steps_fall, curvatures)
    squares = tl.load(p_falls + o_old, mask=m_old, other=0.0)
    squares = tl.where(newest, falls_fall, squares)
    empty = entry(curvatures, MEMORY - 1) == 0
    scale = tl.where(empty, damping, tl.sum(curvatures, 0) / tl.sum(squares, 0))
    inverse = 1 / tl.where(curvatures == 0, 1.0, curvatures)

    rest, alpha = on_steps, tl.zeros_like(on_steps)
    for i in tl.static_range(MEMORY - 1, -1, -1):
        column = tl.load(p_steps + i + moved, mask=m_old, other=0.0)
        if i == MEMORY - 1:
            column = tl.where(moved > 0, steps_fall, column)
        tl.store(p_new_steps + i, column, mask=m_lane)
        factor = entry(rest * inverse, i)
        alpha = tl.where(o == i, factor, alpha)
        rest -= factor * column

    p_squared = p_falls[:, None] + o_old[None, :]
    squared = tl.load(p_squared, mask=m_old[:, None] & m_old[None, :], other=0.0)
    squared = tl.where(newest[:, None], falls_fall[None, :], squared)
    squared = tl.where(newest[None, :], falls_fall[:, None], squared)  # (LANES, LANES)
    tl.store(p_new_falls[:, None] + o[None, :], squared, mask=m_lane[:, None] & m_lane[None, :])
    rest = scale * (on_falls - tl.sum(squared * alpha[None, :], 1))
    beta = tl.zeros_like(alpha)
    for i in tl.static_range(MEMORY):
        row = tl.load(products_ptr + (i + moved) * WIDTH + o_old, mask=m_old, other=0.0)
        row = tl.where(newest, entry(steps_fall, i), row)
        factor = entry(alpha - rest * inverse, i)
        beta = tl.where(o == i, factor, beta)
        rest += factor * row
    return alpha, beta, scale
