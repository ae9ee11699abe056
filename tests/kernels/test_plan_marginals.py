"""Sums of a plan from exact products: every documented bound, against dense float64."""

from __future__ import annotations

import math

import pytest
import torch
from pairwise import pairwise

from otdd_flash.kernels.passes import plan_marginals as launching
from otdd_flash.kernels.passes.plan_marginals import (
    LEAST_ENTRY,
    SUM_ERROR,
    DigitSide,
    chunk_sizes,
    pieces,
    plan_marginals,
)
from otdd_flash.kernels.points import digits as fixed_point
from otdd_flash.kernels.points.digits import base_of, carry_error, digit_losses, pack_digits
from otdd_flash.kernels.points.packed_points import arrange

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NOTHING = -1e30
# (n, m, d, classes of each side), digits and symmetry; 60 and 70 classes are gathered, the others
# stand in pure blocks.
SMALL = [
    ((33, 130, 3, 1, 70), 3, False),
    ((33, 130, 3, 1, 70), 4, True),
    ((290, 300, 40, 2, 2), 4, True),
    ((290, 300, 40, 2, 2), 1, False),
    ((130, 33, 70, 2, 1), 4, False),
    ((1, 1, 1, 1, 1), 4, False),
]
LARGE = [
    (3000, 2049, 784, 3, 7),
    (9000, 9000, 64, 10, 10),
    (2000, 900, 2000, 100, 30),
    (700, 600, 16, 300, 200),
]
DIGITS = [1, 3, 4]


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of two blocks of columns and four of rows, programs of one or two, groups of 3."""
    monkeypatch.setattr(launching, "CHUNK_COLUMNS", 256)
    monkeypatch.setattr(launching, "MOST_ROWS", 512)
    monkeypatch.setattr(launching, "PROGRAMS", 4)
    monkeypatch.setattr(launching, "BLOCKS_PER_PROGRAM", 2)
    monkeypatch.setattr(launching, "GROUP", 3)


def decoded(values):
    """What digits (digits, n, DIM) stand for, (n, DIM) float64; exact."""
    # Tests that change the base do so for all dimensions.
    weights = float(base_of(1)) ** -torch.arange(len(values), device=DEVICE).double()
    return (values.double() * weights[:, None, None]).sum(0)


def points_of(n, d, digits, draw):
    """Points, their centre and scale: integers for one digit."""
    if digits == 1:
        integers = torch.randint(-128, 128, (n, d), generator=draw)
        return integers.float() + 5, torch.full((d,), 5.0).double(), 1.0
    # Half of a shared centre, so that scores have a sign.
    centre = torch.linspace(-1, 1, d).double()
    points = torch.rand(n, d, generator=draw) * 2 + centre.float() - 0.5
    return points, centre, 80.0 / 1.5


def side_of(n, d, classes, digits, seed):
    """A side of random points, its labels, and terms with points of no mass."""
    draw = torch.Generator().manual_seed(seed)
    points, centre, scale = points_of(n, d, digits, draw)
    labels = torch.randint(0, classes, (n,), generator=draw)
    term = torch.randn(n, generator=draw).double() * 3
    if n > 1:
        term[n // 2] = NOTHING
    layout = arrange(labels.to(DEVICE), classes)
    term = layout.spread(term.to(DEVICE), NOTHING)
    return DigitSide(points.to(DEVICE), layout, centre.to(DEVICE), scale, term)


def dense(rows, columns, costs, product_scale, digits):
    """The sums (n,), (m,) of the decoded points, and the largest size of an exponent's terms."""
    x, y = (
        decoded(pack_digits(*side[:4], digits, 0, side.layout.size)) for side in (rows, columns)
    )
    products = product_scale * (x @ y.T)
    exponents = products + rows.term[:, None] + columns.term[None, :]
    if costs is not None:
        exponents -= costs[rows.layout.labels.long()][:, columns.layout.labels.long()]
    plan = exponents.exp2()
    largest = products.abs().max() + 40
    return plan.sum(1), plan.sum(0), float(largest)


def product_error(rows, columns, digits):
    """The documented error of a score."""
    sides = ((side.points, side.centre, side.scale) for side in (rows, columns))
    left_out = sum(float(digit_losses(*side, digits)[1].max()) for side in sides)
    return left_out + carry_error(digits, rows.points.shape[1])


def tolerance(rows, columns, product_scale, digits, largest):
    """The documented relative error of a sum."""
    of_products = product_scale * product_error(rows, columns, digits)
    return SUM_ERROR + math.expm1(math.log(2) * (of_products + 2.0**-50 * largest))


def check(got, expected, relative, entries):
    # `expected` adds in float64 too.
    limit = (relative + 1e-11) * expected + LEAST_ENTRY * entries
    assert bool(((got - expected).abs() <= limit).all())


def check_sums(case, digits, *, symmetric):
    n, m, d, classes_x, classes_y = case
    if symmetric:
        m, classes_y = n, classes_x
    rows = side_of(n, d, classes_x, digits, 1)
    columns = rows if symmetric else side_of(m, d, classes_y, digits, 2)
    draw = torch.Generator().manual_seed(3)
    of_classes = torch.rand(classes_x, classes_y, generator=draw).double().to(DEVICE) * 3
    if symmetric:
        of_classes = (of_classes + of_classes.T).fill_diagonal_(0)
    # Exponents within 40 of the terms.
    scale = (20 if symmetric else 40) / (6400 * d)
    *expected, largest = dense(rows, columns, of_classes, scale, digits)
    got = plan_marginals(rows, columns, of_classes, scale, digits, symmetric=symmetric)
    assert (got[0] is got[1]) == symmetric
    for sums, reference, count in zip(got, expected, (m, n), strict=True):
        assert float(reference.max()) > 0
        check(sums, reference, tolerance(rows, columns, scale, digits, largest), count)
        assert bool((sums[reference == 0] == 0).all())
    if DEVICE.type == "cuda":
        again = plan_marginals(rows, columns, of_classes, scale, digits, symmetric=symmetric)
        assert all(torch.equal(one, two) for one, two in zip(got, again, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "digits", "symmetric"),
    [
        *SMALL,
        *(
            pytest.param(case, digits, symmetric, marks=pytest.mark.gpu)
            for case in LARGE
            for digits in DIGITS
            for symmetric in (False, True)
        ),
    ],
    ids=str,
)
def test_sums_are_within_the_documented_error(case, digits, symmetric):
    check_sums(case, digits, symmetric=symmetric)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "digits", "symmetric"),
    [
        ((700, 300, 3, 1, 200), 1, False),
        ((300, 300, 5, 200, 200), 3, True),
    ],
    ids=str,
)
def test_chunks_give_the_sums_of_the_whole(case, digits, symmetric, small_chunks):
    assert chunk_sizes(64) == (512, 256)
    check_sums(case, digits, symmetric=symmetric)


@pytest.mark.parametrize(
    ("first", "end", "expected"),
    [
        (0, 0, []),
        (128, 256, [(128, 256)]),
        (0, 768, [(0, 384), (384, 768)]),
        # One that is a little short, and one a little high.
        (0, 896, [(0, 384), (384, 896)]),
        (256, 896, [(256, 896)]),
    ],
)
def test_rows_are_cut_evenly_into_whole_blocks(first, end, expected):
    assert pieces(first, end, 512) == expected


def test_stripes_of_a_symmetric_plan_add_up_to_it():
    side = side_of(140, 2, 1, 3, 1)
    assert side.layout.size == 256
    whole, _ = plan_marginals(side, side, None, 1e-3, 3, symmetric=True)
    parts = [
        plan_marginals(side, side, None, 1e-3, 3, symmetric=True, stripes=[stripe])[0]
        for stripe in ((0, 128), (128, 256))
    ]
    check(sum(parts), whole, 2 * SUM_ERROR, side.layout.size)


@pytest.fixture(params=[256, 128])
def base(request, monkeypatch):
    """Digits of either base."""
    if request.param == 128:
        monkeypatch.setattr(fixed_point, "MOST_COORDINATES", 0)
    return request.param


def lowest_digits(n, d):
    """v cut into 1 and digits of -B / 2: every pair that is left out is as large as it gets."""
    base = float(base_of(d))
    return torch.full((n, d), 1 - sum(base / 2 * base**-s for s in (1, 2, 3)), dtype=torch.float64)


def alternating(n, d):
    """Two clusters, and coordinates whose digits alternate in sign."""
    sign = torch.where(torch.arange(d) % 2 == 0, 1.0, -1.0)
    return lowest_digits(n, d) * sign * torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0)[:, None]


def highest_digits(n, d):
    """All digits after the first as large as they get."""
    base = float(base_of(d))
    tail = sum((base / 2 - 1) * base**-s for s in range(1, 6))
    return torch.full((n, d), 10 + tail, dtype=torch.float64)


@pytest.mark.slow
@pairwise(
    make=[
        pytest.param(make, id=make.__name__)
        for make in (lowest_digits, alternating, highest_digits)
    ],
    d=[33, pytest.param(2000, marks=pytest.mark.gpu)],
    digits=[3, 4],
)
def test_scores_are_within_the_documented_error(make, d, digits, base):
    # The plan's exponents are the errors of the scores, in units of the bound.
    points = make(70, d).to(DEVICE)
    layout = arrange(torch.zeros(70, dtype=torch.int64, device=DEVICE), 1)
    centre = torch.zeros(d, dtype=torch.float64, device=DEVICE)
    packed = pack_digits(points, layout, centre, 1.0, digits, 0, layout.size)
    x = decoded(packed)[:70]
    _, omitted = digit_losses(points, centre, 1.0, digits)
    bound = 2 * float(omitted.max()) + carry_error(digits, d)
    one = arrange(torch.zeros(1, dtype=torch.int64, device=DEVICE), 1)
    for j in (0, 1):
        term = layout.spread(-(x @ x[j]) / bound, NOTHING)
        columns = DigitSide(
            points[j : j + 1], one, centre, 1.0, one.spread(torch.zeros_like(term[:1]), NOTHING)
        )
        rows = DigitSide(points, layout, centre, 1.0, term)
        sums, _ = plan_marginals(rows, columns, None, 1 / bound, digits)
        errors = sums[:70].log2().abs()
        slack = 2.0**-50 * 3 * float((x @ x[j]).abs().max()) / bound
        assert float(errors.max()) <= 1 + 2e-6 + slack
        if make is lowest_digits and d > 1:
            assert float(errors.max()) > 0.3


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("e", [9999900.0, 128.0, 127.9, -124.9, -125.0, NOTHING])
def test_exponents_at_the_ends_of_the_range(e):
    rows = side_of(5, 3, 1, 1, 1)
    zeros = torch.zeros_like(rows.points)
    term = rows.layout.spread(torch.full((5,), e, dtype=torch.float64, device=DEVICE), NOTHING)
    rows = rows._replace(points=zeros, centre=rows.centre * 0, term=term)
    one = arrange(torch.zeros(1, dtype=torch.int64, device=DEVICE), 1)
    zero = one.spread(torch.zeros(1, dtype=torch.float64, device=DEVICE), NOTHING)
    columns = rows._replace(points=zeros[:1], layout=one, term=zero)
    sums, totals = plan_marginals(rows, columns, None, 1.0, 1)
    expected = 0.0 if e < -125 else math.inf if e >= 128 else 2.0**e
    assert sums[:5].tolist() == pytest.approx([expected] * 5, rel=SUM_ERROR, abs=0)
    assert not bool(sums[5:].any())
    assert not bool(totals[1:].any())


@pytest.mark.parametrize("digits", DIGITS[::-1])
def test_digits_stand_for_the_points(digits, base):
    d = 70
    side = side_of(130, d, 2, digits, 4)
    layout = side.layout
    values = pack_digits(*side[:4], digits, 0, layout.size)
    lost, omitted = digit_losses(side.points, side.centre, side.scale, digits)
    v = (side.points.double() - side.centre) * side.scale
    difference = (decoded(values)[layout.position, :d] - v).square().sum(1)
    rounded = 2.0**-51 * v.square().sum(1).sqrt()
    assert bool((difference.sqrt() <= lost.sqrt() + rounded).all())
    largest = base ** -(digits - 1.0) * base / 2 / (base - 1)
    assert float(lost.max()) <= d * largest**2 * (1 + 1e-9)
    assert not bool(values[:, :, d:].any())
    assert not bool(values[:, ~layout.filled].any())
    later = values[1:].int()
    assert bool(((later >= -base // 2) & (later < base // 2)).all())
    pairs = ((s, t) for s in range(digits) for t in range(digits) if s + t >= digits)
    shares = sum(
        later[s - 1].double().square().sum(1) / 2 * float(base) ** -(s + t) for s, t in pairs
    )
    expected = omitted * 0 if digits == 1 else shares[layout.position]
    torch.testing.assert_close(omitted, expected, rtol=1e-9, atol=0)


def test_points_of_any_type_strides_and_rows():
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 2, (400,), generator=draw).to(DEVICE)
    layout = arrange(labels, 2)
    points = torch.randn(400, 10, generator=draw).to(torch.float16).to(DEVICE)
    centre = torch.zeros(10, dtype=torch.float64, device=DEVICE)
    whole = pack_digits(points, layout, centre, 20.0, 3, 0, layout.size)
    wide = torch.zeros(10, 800, dtype=torch.float64, device=DEVICE)
    wide[:, ::2] = points.T.double()
    strided = wide[:, ::2].T
    part = pack_digits(strided, layout, centre, 20.0, 3, 128, 256)
    assert torch.equal(whole[:, 128:384], part)
    losses = [digit_losses(each, centre, 20.0, 3) for each in (points, strided)]
    assert torch.equal(*losses)
