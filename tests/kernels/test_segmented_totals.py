"""Numbers of whole segments from those of their blocks."""

from __future__ import annotations

import pytest
import torch

from otdd_flash.kernels.segments.totals import BLOCK, first_blocks, segmented_totals

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COUNTS = {"rows": [1, BLOCK, BLOCK + 1, 70, 3], "columns": [BLOCK + 1, 2, 40, 1, BLOCK]}


def blocks(counts):
    """Of each segment so many, as they are made of a table."""
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return torch.stack((owners, torch.zeros_like(owners)), 1).to(DEVICE, torch.int32)


def drawn(counts, width):
    """Partial numbers, none of them near 0, where minima and maxima would be those of nothing."""
    draw = torch.Generator().manual_seed(width)
    signs = torch.randn(sum(counts), 1, generator=draw).sign()
    numbers = torch.rand(sum(counts), width, generator=draw, dtype=torch.float64) + 1
    return (numbers * signs).to(DEVICE)


def totals(counts, parts, active):
    firsts = [first_blocks(blocks(own), len(own)) for own in counts.values()]
    return segmented_totals(*parts, *firsts, active)


@pytest.mark.parametrize("width", [14 + 4 * 4, 14 + 4 * 8])
@pytest.mark.parametrize("themselves", [False, True])
def test_totals_are_sums_and_two_extremes(width, themselves):
    parts = None if themselves else drawn(COUNTS["rows"], 2), drawn(COUNTS["columns"], width)
    active = torch.tensor([True, True, False, True, True], device=DEVICE)
    rows, columns = totals(COUNTS, parts, active)
    for k, part in enumerate(torch.split(parts[1], COUNTS["columns"])):
        expected = part.sum(0)
        expected[2], expected[3] = part[:, 2].min(), part[:, 3].max()
        if active[k]:
            torch.testing.assert_close(columns[k], expected, rtol=1e-14, atol=1e-13)
    if themselves:
        assert torch.equal(rows[active], columns[active, :2])
        return
    for k, part in enumerate(torch.split(parts[0], COUNTS["rows"])):
        if active[k]:
            torch.testing.assert_close(rows[k], part.sum(0), rtol=1e-14, atol=1e-13)


def test_segments_do_not_see_each_other():
    """To the last bit: alone, and among others."""
    parts = drawn(COUNTS["rows"], 2), drawn(COUNTS["columns"], 46)
    together = totals(COUNTS, parts, torch.ones(5, dtype=torch.bool, device=DEVICE))
    for k in range(5):
        counts = {name: [own[k]] for name, own in COUNTS.items()}
        own = [
            torch.split(part, counts)[k]
            for part, counts in zip(parts, COUNTS.values(), strict=True)
        ]
        alone = totals(counts, own, torch.ones(1, dtype=torch.bool, device=DEVICE))
        for one, other in zip(together, alone, strict=True):
            assert torch.equal(one[k], other[0])
