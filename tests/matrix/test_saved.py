"""Saved results of `matrix_transport`."""

from __future__ import annotations

from pathlib import Path

import matrix_cases as cases
import pytest
import torch

import otdd_flash as otdd

COSTS = cases.random(33, 70, cases.generator(0)).float()


@pytest.mark.parametrize(
    ("dtype", "precision", "potentials"),
    [
        (torch.bfloat16, "high", torch.float32),
        (torch.float32, "high", torch.float32),
        (torch.float32, "double", torch.float64),
        (torch.float64, "double", torch.float64),
    ],
)
def test_what_was_saved_comes_back(
    tmp_path: Path, dtype: torch.dtype, precision: str, potentials: torch.dtype
) -> None:
    costs = COSTS.to(dtype)
    compute = otdd.ComputeOptions("cpu", precision=precision)
    found = otdd.matrix_transport(costs, epsilon=0.1, compute=compute)
    found.save(tmp_path / "result")
    loaded = otdd.MatrixTransport.load(tmp_path / "result", costs)
    assert loaded.term.to_dict() == found.term.to_dict()
    assert (loaded.epsilon, loaded.seconds) == (found.epsilon, found.seconds)
    for one, two in ((loaded.f, found.f), (loaded.g, found.g), (loaded.plan(), found.plan())):
        assert one.dtype == potentials
        assert torch.equal(one, two)
    assert loaded.transport_cost == found.transport_cost


def test_other_costs_are_refused(tmp_path: Path) -> None:
    otdd.matrix_transport(COSTS, epsilon=0.1).save(tmp_path)
    changed = COSTS.clone()
    changed[4, 5] += 1e-3
    for other in (changed, COSTS.double(), COSTS[:, torch.randperm(70)]):
        with pytest.raises(otdd.InputError, match="holds the result of other costs"):
            otdd.MatrixTransport.load(tmp_path, other)
    with pytest.raises(otdd.InputError, match=r"a must have shape \(32,\)"):
        otdd.MatrixTransport.load(tmp_path, COSTS[:-1])
    # In whatever order they lie.
    assert otdd.MatrixTransport.load(tmp_path, COSTS.T.contiguous().T.numpy()).converged
