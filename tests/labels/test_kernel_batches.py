"""Which pairs of classes kernels solve at once, and what it takes to say so."""

from __future__ import annotations

from types import SimpleNamespace

import live_bytes
import pytest
import torch

from otdd_flash.kernels.segments.step import SMALL
from otdd_flash.labels import kernel_terms
from otdd_flash.labels.pairs import all_pairs
from otdd_flash.operators.kernel_segments import bytes_of

PAIRS = all_pairs(300)


@pytest.fixture
def pool():
    sizes = torch.randint(1, 2 * SMALL, (300,), generator=torch.Generator().manual_seed(0))
    return SimpleNamespace(sizes=sizes, starts=sizes)


@pytest.mark.parametrize("at_once", [1000, 1 << 20])
def test_batches_fill_half_of_the_memory(pool, at_once, monkeypatch):
    """All pairs, each once and in their order, those of small classes apart."""
    free = 50_000_000
    monkeypatch.setattr(kernel_terms, "AT_ONCE", at_once)
    monkeypatch.setattr(kernel_terms, "free_memory", lambda _: free)
    batches = kernel_terms._batches(pool, PAIRS)
    sizes, needed = pool.sizes[PAIRS], bytes_of(pool.sizes[PAIRS])
    small = sizes.amax(1) <= SMALL
    for kind in (True, False):
        chosen = [members for is_small, members in batches if is_small == kind]
        assert torch.equal(torch.cat(chosen), torch.nonzero(small == kind).squeeze(1))
        taken = [int(needed[members].sum()) for members in chosen]
        # A pair that two would share is of the second.
        assert max(taken) <= free // 2 + int(needed.max())
        assert min(taken[:-1]) >= free // 2 - int(needed.max())
        assert len(taken) > 2


def test_what_is_made_of_a_list_takes_few_bytes_of_a_pair(pool, monkeypatch):
    monkeypatch.setattr(kernel_terms, "AT_ONCE", 1000)
    monkeypatch.setattr(kernel_terms, "free_memory", lambda _: 1 << 40)
    run = lambda: kernel_terms._batches(pool, PAIRS)  # noqa: E731
    assert live_bytes.peak(run, torch.device("cpu")) < 30 * len(PAIRS)
    kept = sum(members.untyped_storage().nbytes() for _, members in run())
    assert kept == 8 * len(PAIRS)
