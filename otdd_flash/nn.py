"""Network layers: `otdd.nn.SinkhornAttention`, a replacement of PyTorch's attention layer.

Users alone call it; it calls `attention.attention`. A change must keep what
`torch.nn.MultiheadAttention` has: arguments, parameters and their names, so that state dicts load
and PyTorch's encoder layers take it. Options of PyTorch that this layer lacks are refused, never
ignored; only `average_attn_weights` has no effect, as no weights are returned
(`tests/attention/test_layer.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from otdd_flash.arguments import BatchedGradient, Count, Index, Positive, takes
from otdd_flash.attention.attention import WIDEST, sinkhorn_attention
from otdd_flash.batched.checking import TYPES
from otdd_flash.batched.recorded import has_no_numbers
from otdd_flash.checks import choice, must, number, refused
from otdd_flash.errors import InputError

# The reason against arguments that are not offered.
UNDONE = ", as it would undo the sums of weights"
# The most that a float mask adds to scores of a key that it leaves out: PyTorch's users write -1e4,
# -1e9 or the least number of a type for -inf.
NOTHING = -10_000.0


def _is_type(value: object) -> bool:
    return value is None or (isinstance(value, torch.dtype) and value in TYPES)


class SinkhornAttention(nn.MultiheadAttention):
    """Multi-head attention whose weights are balanced by `otdd.sinkhorn_attention`.

    Arguments, parameters and their names are those of `torch.nn.MultiheadAttention`, so a state
    dict of one loads into the other, and it can be the `self_attn` of
    `torch.nn.TransformerEncoderLayer`. Attention weights are never stored, so they are not
    returned. Dropout, `attn_mask`, `add_bias_kv` and `add_zero_attn` are not supported.

    Args:
        embed_dim: coordinates of a query and of the output.
        num_heads: number of heads; each has embed_dim / num_heads coordinates, at most 256.
        dropout: must be 0.
        bias: whether projections add a bias.
        add_bias_kv: must be False.
        add_zero_attn: must be False.
        kdim: coordinates of a key; embed_dim by default.
        vdim: coordinates of a value; embed_dim by default.
        batch_first: True for inputs (batch, n, coordinates), False for (n, batch, coordinates).
        device: device of the parameters.
        dtype: type of the parameters: float16, bfloat16, float32 or float64.
        iterations: Sinkhorn iterations; 0 is softmax attention.
        tolerance: stop each head once the relative error of its column sums is no larger; instead
            of `iterations`.
        max_iterations: limit of iterations with a `tolerance`.
        gradient: `unrolled` or `implicit`, as in `otdd.sinkhorn_attention`.

    Raises:
        InputError: embed_dim is no multiple of num_heads, heads are too wide, an unsupported
            argument is given, or PyTorch has no such device or type.
    """

    @takes(
        dropout=number(f"be 0{UNDONE}", lambda value: value == 0),
        add_bias_kv=must(f"be False{UNDONE}", lambda value: value is False),
        add_zero_attn=must(f"be False{UNDONE}", lambda value: value is False),
        dtype=must(f"be one of {', '.join(map(str, TYPES))}", _is_type),
        gradient=choice("unrolled", "implicit"),
    )
    def __init__(
        self,
        embed_dim: Count,
        num_heads: Count,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: Count | None = None,
        vdim: Count | None = None,
        batch_first: bool = False,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        *,
        iterations: Index = 3,
        tolerance: Positive | None = None,
        max_iterations: Count = 100,
        gradient: BatchedGradient = "unrolled",
    ) -> None:
        if embed_dim % num_heads or embed_dim // num_heads > WIDEST:
            raise InputError(
                f"embed_dim must be a multiple of num_heads, at most {WIDEST} of each head, got "
                f"embed_dim={embed_dim} and num_heads={num_heads}"
            )
        try:
            torch.empty(0, device=device)
        except RuntimeError as error:
            raise InputError(f"device={device!r} is none of PyTorch's here: {error}") from None
        others = add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        super().__init__(embed_dim, num_heads, dropout, bias, *others)
        # Keywords of `otdd.sinkhorn_attention`.
        self.options: dict[str, Any] = {"iterations": iterations, "tolerance": tolerance}
        self.options |= {"max_iterations": max_iterations, "gradient": gradient}

    def extra_repr(self) -> str:
        """Return the settings, for `repr`."""
        options = {"embed_dim": self.embed_dim, "num_heads": self.num_heads, **self.options}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())

    def _reset_parameters(self) -> None:
        """Draw the parameters anew, as PyTorch does."""
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        # TransformerEncoderLayer asks for it: True would let its fused softmax take the weights.
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
            key: (m, batch, kdim), its axes in the order of the query's.
            value: (m, batch, vdim), its axes in the order of the query's.
            key_padding_mask: (batch, m) or (m,). True leaves a key out; of a floating type 0 leaves
                it in, and -inf, or at most -10,000, out. Anything between is refused on a CPU; on a
                GPU outputs of its batch entry are NaN.
            need_weights: must be False.
            attn_mask: must be None.
            average_attn_weights: has no effect, as no weights are returned.
            is_causal: must be False.

        Raises:
            InputError: an unsupported argument is given, or shapes do not fit.
        """
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
        self._check_points(query, key, value)
        weights: Sequence[Tensor] = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        leading = self.batch_first or query.ndim == 2
        q, k, v = (
            self._heads(nn.functional.linear(each, weight, bias), leading)
            for each, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )
        mask = None
        if key_padding_mask is not None:
            # The same for all heads.
            mask = _left_out(key_padding_mask, (*k.shape[:-3], k.shape[-2]))[..., None, :]
        attended = sinkhorn_attention(q, k, v, key_mask=mask, **self.options)
        # (..., heads, n, head's coordinates) to the order of the query.
        joined = attended.transpose(-3, -2).flatten(-2)
        return self.out_proj(joined if leading else joined.transpose(0, 1)), None

    def _check_points(self, *points: Tensor) -> None:
        """Raise an `InputError` unless query, key and value are tensors that fit each other."""
        for name, each in zip(("query", "key", "value"), points, strict=True):
            if not isinstance(each, Tensor):
                raise refused(name, "be a tensor", each)
            if each.is_nested:
                raise InputError(
                    "SinkhornAttention takes no nested tensors; give TransformerEncoder "
                    "enable_nested_tensor=False, or make it of a layer that has SinkhornAttention"
                )
        (query, key, value), widths = points, (self.embed_dim, self.kdim, self.vdim)
        fits = query.ndim in (2, 3) and all(
            each.ndim == query.ndim and each.shape[-1] == width
            for each, width in zip(points, widths, strict=True)
        )
        batch = 0 if self.batch_first else 1
        if (
            not fits
            or key.shape[:-1] != value.shape[:-1]
            or (query.ndim == 3 and query.shape[batch] != key.shape[batch])
        ):
            order = "batch, {}" if self.batch_first else "{}, batch"
            wanted = ", ".join(
                f"({order.format(size)}, {width})"
                for size, width in zip("nmm", widths, strict=True)
            )
            raise InputError(
                f"query, key and value must have shapes {wanted}, or these without the batch, got "
                f"{', '.join(str(tuple(each.shape)) for each in points)}"
            )

    def _heads(self, projected: Tensor, leading: bool) -> Tensor:
        """Return coordinates (..., n, embed_dim) as (..., heads, n, those of a head)."""
        rows = projected if leading else projected.transpose(0, 1)
        return rows.reshape(*rows.shape[:-1], self.num_heads, self.head_dim).transpose(-3, -2)


def _left_out(mask: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return, of a `key_padding_mask`, a bool mask of the same shape, True where a key is left out.

    Raises:
        InputError: it is of another shape or type, or would weigh keys, which balancing undoes.
    """
    if not isinstance(mask, Tensor):
        raise refused("key_padding_mask", "be a tensor", mask)
    floating = mask.is_floating_point()
    if mask.shape != shape or not (floating or mask.dtype == torch.bool):
        raise InputError(
            f"key_padding_mask must be bool, or 0 and -inf, of shape {tuple(shape)}, got "
            f"{mask.dtype} of shape {tuple(mask.shape)}"
        )
    if not floating:
        return mask
    out = mask <= NOTHING
    unclear = ~out & (mask != 0)
    if not (mask.is_cuda or has_no_numbers(mask)) and bool(unclear.any()):
        raise InputError(
            "key_padding_mask must be 0 where a key is left in and -inf, or at most "
            f"{NOTHING:,.0f}, where it is not, got {float(mask[unclear][0])}; balancing would undo "
            "weights of keys"
        )
    # Unclear values that nobody may see leave their entry without keys: later refused, or NaN.
    return out | unclear.any(-1, keepdim=True)
