"""Passes over the scores of attention, S = scale q k^T of H heads, which are never stored.

A pass is a half-step, a product with a plan, or the gradient by scores times the points of one
side. `attention.attention` calls them through `Scores`, which runs `kernels.attention`, or PyTorch
by blocks of rows. Both must compute the same (`tests/attention` runs both). `Scores.transposed` has
keys for rows. Vectors are float64 for points in float64, else float32. A head whose count is below
the number of a step does not make this step: its part of `out` stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Scores that PyTorch holds at once.
BLOCK_SCORES = 2**21
# How far potentials of a head may move over iterations, those of rows and of columns together. Of
# the last plan entries below 2^-126 are 0 in float32; those of an earlier one are at most exp(FAR)
# times as large, below 3e-21.
FAR = 40.0
# Terms of earlier half-steps that a kernel adds up without a loop, as registers allow.
MOST_TERMS = 8


class Earlier(NamedTuple):
    """Terms of a gradient by half-steps before the last.

    Attributes:
        near: (H,) whether the potentials of a head moved less than `FAR` in all. Weights are over
            the last plan then.
        of_rows: (2 T, H, n) weights; 0 of terms that a head does not have.
        of_columns: (2 T, H, m) weights, by which those of rows are multiplied.
    """

    near: Tensor
    of_rows: Tensor
    of_columns: Tensor

    @property
    def transposed(self) -> Earlier:
        """The same terms, columns for rows."""
        return Earlier(self.near, self.of_columns, self.of_rows)


@dataclass(frozen=True)
class Scores:
    """Scores of rows and columns, scale rows columns^T.

    Attributes:
        rows: (H, n, d), contiguous.
        columns: (H, m, d), contiguous.
        scale: of the products.
        counts: (H,) int32, how many iterations each head makes.
        in_triton: whether passes are kernels.
        queries: whether rows are queries.
    """

    rows: Tensor
    columns: Tensor
    scale: float
    counts: Tensor
    in_triton: bool
    queries: bool = True

    @property
    def transposed(self) -> Scores:
        """Return the same scores with columns for rows."""
        of = self.columns, self.rows, self.scale, self.counts, self.in_triton
        return Scores(*of, queries=not self.queries)

    def vector(self, *shape: int) -> Tensor:
        """Make numbers (*shape, H, n), one of each row, not initialised."""
        dtype = torch.promote_types(self.rows.dtype, torch.float32)
        return self.rows.new_empty((*shape, *self.rows.shape[:2]), dtype=dtype)

    def half_step(
        self,
        potential: Tensor,
        target: Tensor,
        step: int,
        out: Tensor,
        guess: Tensor | None = None,
        values: Tensor | None = None,
        product: Tensor | None = None,
    ) -> None:
        """Write target - log sum_j exp(S_ij + potential_j), and the product with the values.

        Args:
            potential: (H, m) of columns; -inf where a column has no part.
            target: (H, n).
            step: the number of this step.
            out: (H, n).
            guess: (H, n), of the half-step before, so that no exp(S + guess + potential) is above
                max(1, n / m); may be `out`. Not with values.
            values: (H, m, e), multiplied by exp(S + potential) with rows that sum to 1.
            product: (H, n, e), written.
        """
        if self.in_triton:
            from otdd_flash.kernels.attention import half_step_kernel as kernel

            # In place of matrices that are not read there are vectors.
            matrices = (potential, out) if values is None else (values, product)
            width, kind = (0, "vector") if values is None else (values.shape[2], "matrix")
            given = potential, target, out, *matrices, out if guess is None else guess, step
            return self._launch(kernel, kind, width, *given, GUESSED=guess is not None)
        for heads, rows, logits in self._blocks():
            logits += potential[heads, None]
            sums = logits.logsumexp(2)
            self._write(out, heads, rows, step, target[heads, rows] - sums)
            if values is not None and product is not None:
                # Not by `sums`, whose rounding would leave rows without a sum of 1.
                weights = logits.softmax(2)
                product[heads, rows] = (weights @ values[heads].to(logits.dtype)).to(product.dtype)
        return None

    def plan_product(
        self,
        potentials: tuple[Tensor, Tensor],
        vector: Tensor,
        weight: Tensor,
        step: int,
        out: Tensor,
        matrices: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        """Write w P x, P = exp(S + alpha + beta); or P Z, and w (<R, P Z> - P x) of rows.

        Args:
            potentials: alpha (H, n) and beta (H, m).
            vector: x (H, m).
            weight: w (H,).
            step: the number of this step.
            out: (H, n).
            matrices: Z (H, m, e), R (H, n, e), and P Z (H, n, e), which is written.
        """
        if self.in_triton:
            from otdd_flash.kernels.attention import plan_product_kernel as kernel

            width, kind = (matrices[0].shape[2], "matrix") if matrices else (0, "vector")
            given = *potentials, vector, weight, out, *(matrices or (vector, out, out)), step
            return self._launch(kernel, kind, width, *given)
        for heads, rows, logits in self._blocks():
            logits += potentials[0][heads, rows, None]
            logits += potentials[1][heads, None]
            plan = logits.exp_()
            result = (plan @ vector[heads, :, None]).squeeze(2)
            if matrices is not None:
                of_columns, own, product = matrices
                applied = plan @ of_columns[heads].to(plan.dtype)
                result = (own[heads, rows].to(plan.dtype) * applied).sum(2) - result
                product[heads, rows] = applied.to(product.dtype)
            self._write(out, heads, rows, step, weight[heads, None] * result)
        return None

    def gradient(
        self,
        factors: tuple[Tensor, Tensor],
        potentials: tuple[Tensor, Tensor],
        earlier: Earlier,
        offsets: tuple[Tensor, Tensor],
        out: Tensor,
    ) -> None:
        """Write scale A columns (H, n, d), A the gradient by scores.

        Of pairs the rows' come first. With i queries, j keys and c the iterations of a head,

            A_ij = exp(S + u_c,i + v_c,j) (L_i . R_j - a_i - b_j)
                   - sum_(t < c) [exp(S + u_t,i + v_t,j) x_t,i + exp(S + u_t,i + v_t+1,j) y_t+1,j].

        Args:
            factors: cotangents of the output L (H, n, e), and values R (H, m, e).
            potentials: u (T + 1, H, n) and v (T + 1, H, m).
            earlier: the terms of the sum.
            offsets: a (H, n) and b (H, m).
            out: (H, n, d).
        """
        near, *weights = earlier
        if self.in_triton:
            from otdd_flash.kernels.attention import score_gradient_kernel as kernel

            given = *factors, *potentials, *weights, *offsets, near, out
            strides = offsets[0].numel(), offsets[1].numel()
            width, terms = factors[0].shape[2], len(weights[0])
            constants = {"QUERIES": self.queries, "TERMS": terms if terms <= MOST_TERMS else -1}
            # Without earlier terms all heads are near. Nothing waits to learn whether all are.
            for kind in (True, False)[: 1 + (terms > 0)]:
                self._launch(kernel, "gradient", width, *given, *strides, NEAR=kind, **constants)
            return
        of_rows, of_columns = (at(each, self.counts) for each in potentials)
        for heads, rows, logits in self._blocks():
            left, right = factors[0][heads, rows].to(logits.dtype), factors[1][heads]
            slopes = left @ right.to(logits.dtype).mT
            slopes -= offsets[0][heads, rows, None] + offsets[1][heads, None]
            plan = (logits + of_rows[heads, rows, None] + of_columns[heads, None]).exp_()
            terms = len(weights[0])
            if terms and not near.is_cuda and bool(near[heads].all()):
                # One exponential a score, as in the kernel.
                x, y = weights[0][:, heads, rows], weights[1][:, heads]
                slopes.baddbmm_(x.permute(1, 2, 0), y.transpose(0, 1), alpha=-1)
                terms = 0
            by_scores = slopes.mul_(plan)
            for r in range(terms):
                i, j = (r + (not self.queries)) // 2, (r + self.queries) // 2
                u, v = potentials[0][i, heads, rows, None], potentials[1][j, heads, None]
                power = torch.where(near[heads, None, None], plan, (logits + u + v).exp_())
                term = power * weights[0][r, heads, rows, None] * weights[1][r, heads, None]
                by_scores -= torch.where(r < 2 * self.counts[heads, None, None], term, 0)
            columns = self.columns[heads].to(logits.dtype)
            out[heads, rows] = (self.scale * (by_scores @ columns)).to(out.dtype)

    def earlier(
        self,
        potentials: tuple[Tensor, Tensor],
        lasts: tuple[Tensor, Tensor],
        adjoints: tuple[Tensor, Tensor],
    ) -> Earlier:
        """Prepare the terms of half-steps before the last, where rows are queries.

        Args:
            potentials: u (T + 1, H, n) and v (T + 1, H, m).
            lasts: those of each head's last iteration, (H, n) and (H, m).
            adjoints: x and y, of u, and of v times m / n; of the shapes of potentials.
        """
        count = 2 * (len(potentials[0]) - 1)
        if count == 0:
            near = torch.ones_like(self.counts, dtype=torch.bool)
            return Earlier(near, *(each[:0] for each in adjoints))
        r = torch.arange(count, device=self.counts.device)
        made = (r[:, None] < 2 * self.counts)[..., None]
        # Adjoints of queries in even terms, of keys in odd ones.
        owned = (r % 2 == 0)[:, None, None]
        moved, weights = [], []
        for each, place, last, adjoint, own in zip(
            potentials, (r // 2, (r + 1) // 2), lasts, adjoints, (owned, ~owned), strict=True
        ):
            moved.append(torch.where(made & last.isfinite(), each[place].sub_(last), 0))
            weights.append(torch.where(own, adjoint[place], 1).mul_(made))
        near = moved[0].abs().amax((0, 2)) + moved[1].abs().amax((0, 2)) <= FAR
        for each, weight in zip(moved, weights, strict=True):
            weight.mul_(torch.where(near[:, None], each, 0).exp_())
        return Earlier(near, *weights)

    def _launch(self, kernel: Any, kind: str, width: int, *given: Any, **constants: Any) -> None:
        from otdd_flash.kernels.attention import launch

        points = self.rows, self.columns
        launch(kernel, kind, points, self.scale, self.counts, width, *given, **constants)

    def _write(self, out: Tensor, heads: slice, rows: slice, step: int, result: Tensor) -> None:
        made = self.counts[heads, None] >= step
        out[heads, rows] = torch.where(made, result, out[heads, rows])

    def _blocks(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Yield heads, rows and their scores, in the type that is computed in, block by block."""
        count, n, _ = self.rows.shape
        m, dtype = self.columns.shape[1], self.vector().dtype
        together = max(1, BLOCK_SCORES // (min(n, 64) * m))
        for head in range(0, count, together):
            heads = slice(head, min(count, head + together))
            columns = self.columns[heads].to(dtype).mT
            height = max(1, BLOCK_SCORES // (len(columns) * m))
            for row in range(0, n, height):
                rows = slice(row, min(n, row + height))
                yield heads, rows, (self.rows[heads, rows].to(dtype) @ columns).mul_(self.scale)


def at(vectors: Tensor, counts: Tensor) -> Tensor:
    """Return of vectors (T + 1, H, n) side by side each head's at its count, (H, n)."""
    if len(vectors) == 1:
        return vectors[0]
    index = counts.to(torch.int64)[None, :, None].expand(1, -1, vectors.shape[2])
    return vectors.gather(0, index)[0]
