"""How tensor cores add products, and the largest error of a chain of them.

A hardware step adds p products, exact ones of float16 numbers, to a float32 accumulator. All p + 1
numbers are aligned to the largest exponent, cut off e bits below float32's last, and added; the sum
is cut to float32 (Fasi, Higham, Mikaitis & Pranesh 2021, Numerical behavior of NVIDIA tensor cores;
Khattak & Mikaitis 2025, Accurate models of NVIDIA tensor cores). Let u = 2^-24, let S be the sum of
the absolute products of the chain, and A >= S bound all accumulators. In one step

    cut off by alignment      < (p + 1) 2^-(23 + e) A = (p + 1) 2^(1 - e) u A,
    lost by the result        < 2 u A,

because no exponent exceeds that of the largest number, whose size is at most A. A chain of K
products takes ceil(K / p) steps, so its error is at most

    ceil(K / p) ((p + 1) 2^(1 - e) + 2) u S (1 + 2^-8),

as A <= S (1 + 2^-8) if that error is below 2^-8 S.

The same bound holds for zeros that were skipped or products that came in any other order.

Whole numbers. Where all products are whole numbers and S <= 2^24, every number that is aligned has
an exponent of at most 24 and is a multiple of 1: nothing is ever cut off, with no extra bits and
for any p, in float32 sums of any order just the same.

p and e are whole numbers of a card, found by `experiments.probe_adder`. A card that was not probed
is taken to add one product at a time without extra bits. That is the worst of all p for e = 0: 6 u
per product. It also covers float32 sums in any order, u per product, as the interpreter has them.

`operators.kernel_segments` calls `adder_of` and takes `chain_error` into the bounds of class
distances. So it must never be below the true error, and a card may enter `PROBED` only with the
result of its probe.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

UNIT = 2.0**-24


class Adder(NamedTuple):
    """Products added at once, and bits kept below float32's last."""

    products: int
    extra_bits: int


# By major compute capability, with the result of the probe that found them.
PROBED = {9: Adder(products=16, extra_bits=2)}  # probe_adder_h100.json
UNPROBED = Adder(products=1, extra_bits=0)


def adder_of(device: torch.device) -> Adder:
    """The adder of a device, `UNPROBED` where nobody looked."""
    if device.type != "cuda":
        return UNPROBED
    return PROBED.get(torch.cuda.get_device_capability(device)[0], UNPROBED)


def chain_error(products: int, adder: Adder) -> float:
    """Error of a chain over the sum of its absolute products, at the most."""
    steps = math.ceil(products / adder.products)
    per_step = (adder.products + 1) * 2.0 ** (1 - adder.extra_bits) + 2
    return steps * per_step * UNIT * (1 + 2.0**-8)
