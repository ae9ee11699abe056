"""Points in fixed point where no coordinate differs from the centre's, whose scale has no limit."""

from __future__ import annotations

import torch

import otdd_flash as otdd


def test_bounds_of_equal_points() -> None:
    x, labels = torch.full((1, 3), 1000.5), torch.zeros(1, dtype=torch.int64)
    compute = otdd.ComputeOptions("cpu", backend="triton", precision="high")
    options, table = otdd.Converged(max_iterations=1), torch.ones(2, 2, dtype=torch.float64)
    found = otdd.sinkhorn_divergence(
        (x, labels), (x, labels), epsilon=0.5, class_table=table, options=options, compute=compute
    )
    # All that it costs is the distance of a class with itself, as given.
    assert found.xy.bounds[0] <= 0.5 <= found.xy.bounds[1]
