"""Pairs and their distances stay where the points are, whatever measures them."""

from __future__ import annotations

import pytest
import torch
from other_device import OTHER, OtherDevice
from sinkhorn_cases import make_clouds, moved

import otdd_flash as otdd
from otdd_flash.engine.problems import SegmentTerms
from otdd_flash.labels import sinkhorn_pairs as transport_terms
from otdd_flash.labels.measuring import class_block, measure_all, measure_pairs
from otdd_flash.labels.pairs import all_pairs

METRICS = {
    "gaussian": otdd.labels.Gaussian(),
    "sinkhorn": otdd.labels.Sinkhorn(epsilon=50.0, tolerance=0.1),
    "exact": otdd.labels.Exact(),
    "means": otdd.labels.Means(),
    "none": otdd.labels.NoLabels(),
}
# Every operation of a solve there takes ten times as long.
every_metric = pytest.mark.parametrize(
    "metric",
    [
        pytest.param(metric, id=name, marks=[pytest.mark.slow] * (name == "sinkhorn"))
        for name, metric in METRICS.items()
    ],
)


def check(found, expected):
    """Numbers of both devices, which round otherwise."""
    for part, own in zip(found, expected, strict=True):
        assert part.device.type == "cpu"
        torch.testing.assert_close(part, own, rtol=1e-12, atol=1e-12)


@every_metric
def test_no_list_of_pairs_goes_between_device_and_host(metric, monkeypatch):
    """But for what processes on the host measure; kernels may answer anything."""

    def solve(pool, pairs, *rest):
        return SegmentTerms(*torch.zeros((6, len(pairs)), dtype=torch.float64, device=OTHER))

    monkeypatch.setattr(transport_terms, "kernels_run_on", lambda _: True)
    monkeypatch.setattr(transport_terms, "solve_in_kernels", solve)
    clouds = make_clouds((4,) * 30)
    with OtherDevice() as device:
        there, pairs = moved(clouds, OTHER), all_pairs(30, OTHER)
        device.sent.clear()
        measure_pairs(there, pairs, metric)
    most = max(device.fetched + device.sent, default=0)
    assert (most >= len(pairs)) == (metric.name == "exact")


@every_metric
def test_tables_come_to_the_host_whole(metric, blobs, tmp_path):
    """With a cache, from a part of it, and without; a block and a table of all classes."""
    one, two = blobs((3, 4), 2, name="one"), blobs((3, 2), 2, seed=1, name="two")
    known = [measure_all([one, two], metric), class_block(one, two, metric)]
    with OtherDevice():
        sides = [side.to(OTHER) for side in (one, two)]
        for cache_dir in (None, tmp_path, tmp_path):
            measure_all(sides[:1], metric, cache_dir=cache_dir)
            joint = measure_all(sides, metric, cache_dir=cache_dir)
            block = class_block(*sides, metric, cache_dir=cache_dir)
    tables = [(each.full, each.lower, each.upper) for each in (joint, known[0])]
    check(*([table for table in each if table is not None] for each in tables))
    check(block, known[1])
