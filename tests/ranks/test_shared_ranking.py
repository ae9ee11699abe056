"""Candidates and self terms dealt to several ranks: the ranking of one process."""

from __future__ import annotations

from typing import Any

import pytest
from rank_pool import lead, pool
from ranking.libraries import library, truth

import otdd_flash as otdd
from otdd_flash.distributed.ranks import Ranks
from otdd_flash.errors import InputError
from otdd_flash.ranking import bounds

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.slow]


def ranked(ranks: Ranks, seed: int) -> Any:
    """A ranking, and how many terms each rank solved."""
    compute = otdd.ComputeOptions("cpu", group=ranks)
    query, members = library(seed)
    index = otdd.index(members, compute=compute)
    found = otdd.nearest(query, index, 2, ordered=True)
    return found.rows, found.certified, index.settings.epsilon


def counted(seed: int) -> Any:
    """What rank 0 finds, and the number of problems that this rank solved."""
    solved = []
    real = bounds.Terms.raised

    def raised(self: Any, problems: Any) -> Any:
        solved.append(len(problems))
        return real(self, problems)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bounds.Terms, "raised", raised)
        found = lead(ranked, seed)
    return found, sum(solved)


@pytest.mark.parametrize("size", [2, 3])
def test_rankings_are_those_of_one_process(size: int) -> None:
    for seed in (0, 1, 3):
        answers = pool(size).run(counted, seed)
        (rows, certified, epsilon), _ = answers[0]
        query, members = library(seed)
        alone = otdd.nearest(query, otdd.index(members), 2, ordered=True)
        assert certified == alone.certified
        assert epsilon == otdd.index(members).settings.epsilon
        assert [row.name for row in rows] == [row.name for row in alone.rows]
        values = truth(query, members, epsilon)
        for row in rows:
            assert row.lower - 1e-7 <= values[row.name] <= row.upper + 1e-7
        # Every rank had its part.
        assert all(solved > 1 for _, solved in answers)


def refused(ranks: Ranks) -> Any:
    query, members = library(1)
    compute = otdd.ComputeOptions("cpu", group=ranks)
    index = otdd.index(members, compute=compute, epsilon=1e-9)
    return otdd.nearest(query, index, 2)


def test_what_a_rank_refuses_all_refuse() -> None:
    found = pool(2).run(refusal)
    assert all("too small for float32" in said for said in found), found
    # The pool is as it was.
    assert pool(2).run(counted, 1)[0][0][1]


def refusal() -> str:
    try:
        lead(refused)
    except InputError as error:
        return str(error)
    return "not refused"
