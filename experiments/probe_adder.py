"""How tensor cores add products of float16 numbers: block length, extra bits, truncation.

    python -m experiments.probe_adder [--name h100] [--output DIR]

One `tl.dot` of crafted inputs per question (Fasi, Higham, Mikaitis & Pranesh 2021, Numerical
behavior of NVIDIA tensor cores). Products are 2^0, and powers of two beside it:

- extra bits: 1 + 2^-k - 1 within a block. The product 2^-k is aligned to the 1 before anything is
  added, and is kept up to k = 23 + extra bits.
- block: 1 + 2^-26 + 2^-26 ..., the small products at positions 1 to p. A block that adds all of its
  products at once keeps or drops them alike, wherever they stand; those after it meet the 1 in the
  accumulator. -1 at position p + 1 of the same block leaves nothing to round. So the first position
  of -1 from which 1 + 2^-(23 + extra) - 1 is lost, because 1 + 2^-(23 + extra) was rounded to
  float32 in between, is the block length.
- truncation: 1 + 3 2^-25 and -(1 + 3 2^-25), whose nearest float32 is one step from 0's side.
- accumulator: 2^-k in the accumulator meets products 1 and -1.
- whole numbers: random integers whose absolute products add up to at most 2^24, in one long chain,
  against int64; the only property that the exact parts of segmented solves rely on.
- subnormals: 2^-24 in float16 times 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from experiments.environment import RESULTS, environment, write_result

M, N, K = 128, 128, 64
WHOLE_K = 1024


@triton.jit  # type: ignore[untyped-decorator]
def product_kernel(  # type: ignore[no-untyped-def]
    x_ptr,  # (M, DEPTH) float16
    y_ptr,  # (N, DEPTH) float16
    start_ptr,  # (M, N) float32
    out_ptr,  # (M, N) float32
    DEPTH: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """One program: start + x y^T."""
    o_m, o_n, o_k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    o_out = o_m[:, None] * N + o_n[None, :]
    sums = tl.load(start_ptr + o_out)
    for k in range(0, DEPTH, K):
        x = tl.load(x_ptr + o_m[:, None] * DEPTH + (k + o_k)[None, :])
        y = tl.load(y_ptr + o_n[:, None] * DEPTH + (k + o_k)[None, :])
        sums = tl.dot(x, y.T, sums)
    tl.store(out_ptr + o_out, sums)


def products(x: Tensor, y: Tensor, start: Tensor | None = None) -> Tensor:
    """Return start + x y^T, (M, N) float32, of (M, d) and (N, d) float16."""
    out = torch.empty(M, N, device=x.device)
    start = torch.zeros_like(out) if start is None else start
    product_kernel[(1,)](x, y, start, out, DEPTH=x.shape[1], M=M, N=N, K=K, num_warps=4)
    return out


def chain(terms: dict[int, tuple[float, float]], device: str, start: float = 0.0) -> float:
    """Return start + sum of products x y at positions of a chain of K; all outputs must agree."""
    x, y = torch.zeros(2, 128, K, dtype=torch.float16, device=device)
    for position, (one, two) in terms.items():
        x[:, position], y[:, position] = one, two
    out = products(x, y, torch.full((M, N), start, device=device))
    assert bool((out == out[0, 0]).all())
    return float(out[0, 0])


def power(exponent: int) -> tuple[float, float]:
    """Factors of 2^-exponent, float16 both."""
    half = exponent // 2
    return 2.0**-half, 2.0 ** (half - exponent)


def extra_bits(device: str, at: tuple[int, int, int]) -> int:
    """Bits past float32's that a small product keeps beside a 1 in its block."""
    kept = [
        k
        for k in range(20, 29)
        if chain({at[0]: (1, 1), at[1]: power(k), at[2]: (-1, 1)}, device) == 2.0**-k
    ]
    return max(kept, default=0) - 23


def accumulator_bits(device: str) -> int:
    """The same of a small accumulator beside products of 1 and -1."""
    kept = [k for k in range(20, 29) if chain({0: (1, 1), 1: (-1, 1)}, device, 2.0**-k) == 2.0**-k]
    return max(kept, default=0) - 23


def block_length(device: str, extra: int) -> int | None:
    """The first position where a block is over; None where no extra bit tells."""
    if extra <= 0:
        return None
    small = power(23 + extra)
    for position in range(2, K):
        if chain({0: (1, 1), 1: small, position: (-1, 1)}, device) != 2.0 ** -(23 + extra):
            return position
    return K


def is_truncated(device: str, sign: int) -> bool:
    """Whether 1 + 3/4 of its last bit becomes 1, of either sign, all products in one block."""
    terms = {0: (float(sign), 1.0), 1: (sign * 2.0**-12, 2.0**-12), 2: (sign * 2.0**-12, 2.0**-13)}
    return chain(terms, device) == float(sign)


def whole_numbers_are_exact(device: str) -> bool:
    """Random integer vectors of norms up to 2^12."""
    draw = torch.Generator().manual_seed(0)
    for peaked in (False, True):
        x, y = torch.randn(2, 128, WHOLE_K, generator=draw, dtype=torch.float64)
        if peaked:
            x[:, 40:] *= 0.01
            y = x.roll(1, 0)
        x, y = (
            (4095 * values / values.norm(dim=1, keepdim=True)).trunc().clamp(-2047, 2047)
            for values in (x, y)
        )
        assert float(x.norm(dim=1).max() * y.norm(dim=1).max()) <= 2**24
        expected = x.long() @ y.long().T
        found = products(*(values.half().to(device) for values in (x, y)))
        if not torch.equal(found.cpu().long(), expected):
            return False
    return True


def probe(device: str) -> dict[str, Any]:
    """All answers."""
    extra = extra_bits(device, (0, 1, 2))
    return {
        "environment": environment("torch", "triton"),
        "capability": list(torch.cuda.get_device_capability()) if device == "cuda" else None,
        "extra_bits": extra,
        "extra_bits_at_positions_3_9_14": extra_bits(device, (3, 9, 14)),
        "extra_bits_of_the_accumulator": accumulator_bits(device),
        "products_in_a_block": block_length(device, extra),
        "truncates": is_truncated(device, 1) and is_truncated(device, -1),
        "whole_numbers_are_exact": whole_numbers_are_exact(device),
        "keeps_subnormals": chain({0: (2.0**-24, 1.0)}, device) == 2.0**-24,
    }


def main() -> None:
    """Probe the card and write what it answered."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="h100")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    answers = probe("cuda" if torch.cuda.is_available() else "cpu")
    print(answers)
    write_result(f"probe_adder_{arguments.name}", answers, arguments.output)


if __name__ == "__main__":
    main()
