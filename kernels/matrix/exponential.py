"""2^t in float64 by a polynomial, in half as many operations as the library's.

    2^t = 2^k 2^r,    k = round(t),    |r| <= 1/2

with 2^r as a polynomial of degree 11 that interpolates it at Chebyshev's points. The polynomial is
off by 2^-55 of itself, and by 2^-52 with the roundings of Horner's rule: its last step rounds the
result, and what earlier steps round is multiplied by r, at most 1/2. The kernel of `sums` calls
`exact_power_of_two`.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Next to it float64 holds whole numbers only: adding it rounds t to k, which is in the lowest bits.
WHOLE = tl.constexpr(1.5 * 2.0**52)


@triton.jit
def exact_power_of_two(exponents):
    """2^t of float64 from -1,022 on, and inf from 1,024 on."""
    exponents = tl.minimum(exponents, 1024.0)
    shifted = exponents + WHOLE
    rest = exponents - (shifted - WHOLE)
    power = rest * 4.4558179083360645e-10 + 7.074194297288521e-09
    power = power * rest + 1.0178057087733941e-07
    power = power * rest + 1.3215432535912375e-06
    power = power * rest + 1.5252733841556773e-05
    power = power * rest + 0.00015403530463724353
    power = power * rest + 0.001333355814640647
    power = power * rest + 0.009618129107587256
    power = power * rest + 0.055504108664821625
    power = power * rest + 0.24022650695910158
    power = power * rest + 0.6931471805599453
    power = power * rest + 1.0
    # k in the lowest bits becomes the exponent of a float64.
    whole = (shifted.to(tl.int64, bitcast=True) + 1023) << 52
    return power * whole.to(tl.float64, bitcast=True)
