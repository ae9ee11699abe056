"""Which pairs of classes are padded to one shape, and by how much."""

from __future__ import annotations

import itertools

import pytest

from otdd_flash.labels import stored_terms
from otdd_flash.labels.stored_terms import _groups, padded_size


def test_padding_is_below_sixteen_or_a_quarter():
    lengths = set()
    for size in range(1, 3000):
        length = padded_size(size)
        lengths.add(length)
        assert length % 16 == 0
        assert size <= length < max(size + 16, 1.25 * size)
    assert sorted(lengths)[:8] == [*range(16, 129, 16)]
    # Four lengths to every power of two.
    for top in (256, 512, 1024, 2048):
        expected = [top * part // 8 for part in (5, 6, 7, 8)]
        assert sorted(length for length in lengths if top // 2 < length <= top) == expected


@pytest.mark.parametrize("most", [10**8, 255])
def test_every_pair_is_in_one_group_of_its_shape(most, monkeypatch):
    """As many together as `GROUP` costs are, and one that is too large to store alone."""
    monkeypatch.setattr(stored_terms, "GROUP", 3 * 256)
    monkeypatch.setattr(stored_terms, "MOST_STORED", most)
    sizes = [3, 16, 17, 5, 9]
    pairs = list(itertools.combinations(range(5), 2))
    groups = list(_groups(sizes, pairs))
    assert sorted(itertools.chain(*(members for _, members in groups))) == list(range(10))
    for shape, members in groups:
        assert {tuple(padded_size(sizes[k]) for k in pairs[p]) for p in members} == {shape}
    # Six pairs of (16, 16); of (16, 32) and (32, 16) one fits.
    assert sorted(len(members) for _, members in groups) == (
        [1] * 4 + [3, 3] if most > 255 else [1] * 10
    )
