"""Layers of networks: `otdd.nn.SinkhornAttention`, in the place of PyTorch's attention layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from otdd_flash.arguments import BatchedGradient, Count, Index, Positive, takes
from otdd_flash.attention.attention import WIDEST, sinkhorn_attention
from otdd_flash.errors import InputError


class SinkhornAttention(nn.MultiheadAttention):
    """Multi-head attention whose weights are balanced by `otdd.sinkhorn_attention`.

    Arguments, parameters and their names are those of `torch.nn.MultiheadAttention`, so weights of
    one load into the other, and it can be the `self_attn` of `torch.nn.TransformerEncoderLayer`.
    Weights are not returned, as they are never there; dropout, `attn_mask`, `add_bias_kv` and
    `add_zero_attn` are not offered.

    Args:
        embed_dim: coordinates of a query and of the output.
        num_heads: heads, of embed_dim / num_heads coordinates each, 256 at the most.
        bias: whether projections add a bias.
        kdim: coordinates of a key; embed_dim by default.
        vdim: coordinates of a value; embed_dim by default.
        batch_first: inputs are (batch, n, coordinates) instead of (n, batch, coordinates).
        iterations: of Sinkhorn; 0 is softmax attention.
        tolerance: instead of them, the largest relative error of a column sum.
        max_iterations: with a tolerance, at the most.
        gradient: `unrolled` or `implicit`.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        InputError: embed_dim is no multiple of num_heads, heads are too wide, or PyTorch has no
            such device or dtype.
    """

    @takes()
    def __init__(
        self,
        embed_dim: Count,
        num_heads: Count,
        bias: bool = True,
        kdim: Count | None = None,
        vdim: Count | None = None,
        batch_first: bool = False,
        *,
        iterations: Index = 3,
        tolerance: Positive | None = None,
        max_iterations: Count = 100,
        gradient: BatchedGradient = "unrolled",
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if embed_dim % num_heads or embed_dim // num_heads > WIDEST:
            raise InputError(
                f"embed_dim must be a multiple of num_heads, at most {WIDEST} of each head, got "
                f"embed_dim={embed_dim} and num_heads={num_heads}"
            )
        others = False, False, kdim, vdim, batch_first, device, dtype
        try:
            super().__init__(embed_dim, num_heads, 0.0, bias, *others)
        except (RuntimeError, TypeError) as error:
            what = f"device={device!r} and dtype={dtype!r}"
            raise InputError(f"no parameters can be made of {what}: {error}") from None
        # Of `otdd.sinkhorn_attention`.
        self.options: dict[str, Any] = {"iterations": iterations, "tolerance": tolerance}
        self.options |= {"max_iterations": max_iterations, "gradient": gradient}
        # What TransformerEncoderLayer asks for: True would let its fused softmax take the weights.
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Attend, and return the output and None, as `torch.nn.MultiheadAttention` without weights.

        Args:
            query: (n, batch, embed_dim), or (batch, n, embed_dim) where `batch_first`, or (n,
                embed_dim).
            key: (m, batch, kdim), likewise.
            value: (m, batch, vdim), likewise.
            key_padding_mask: (batch, m) or (m,); True, or -inf, leaves a key out.
            need_weights: must be False.
            attn_mask: must be None.
            average_attn_weights: has no meaning without weights.
            is_causal: must be False.

        Raises:
            InputError: what must not be given was given.
        """
        if query.is_nested:
            raise InputError(
                "SinkhornAttention takes no nested tensors; give TransformerEncoder "
                "enable_nested_tensor=False, or make it of a layer that has SinkhornAttention"
            )
        if is_causal:
            raise InputError(
                "is_causal=True leaves no choice: a triangular doubly stochastic matrix is the "
                "identity; leave it out, or take softmax attention"
            )
        if attn_mask is not None or need_weights:
            raise InputError(
                "SinkhornAttention takes no attn_mask and returns no weights, as these are never "
                "stored; leave keys out by key_padding_mask, and give need_weights=False"
            )
        if key_padding_mask is not None and key_padding_mask.dtype != torch.bool:
            # As PyTorch hands it on: added to the scores.
            key_padding_mask = key_padding_mask == -torch.inf
        weights: Sequence[Tensor] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        batched, leading = query.ndim == 3, self.batch_first or query.ndim == 2
        q, k, v = (
            self._heads(nn.functional.linear(each, weight, bias), leading)
            for each, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        mask = key_padding_mask
        if mask is not None and batched:
            mask = mask[:, None]
        attended = sinkhorn_attention(q, k, v, key_mask=mask, **self.options)
        # (..., heads, n, head's coordinates) to the order of the query.
        joined = attended.transpose(-3, -2).flatten(-2)
        out = self.out_proj(joined if leading else joined.transpose(0, 1))
        return out, None

    def _heads(self, projected: Tensor, leading: bool) -> Tensor:
        """Coordinates (..., n, embed_dim) as (..., heads, n, those of a head)."""
        rows = projected if leading else projected.transpose(0, 1)
        return rows.reshape(*rows.shape[:-1], self.num_heads, -1).transpose(-3, -2)
