"""What `matrix_transport` refuses, in a sentence each."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import otdd_flash as otdd

COSTS = torch.tensor([[1.0, 2.0, 3.0], [3.0, 1.0, 2.0]])


def with_entry(value: float) -> torch.Tensor:
    costs = COSTS.clone()
    costs[1, 2] = value
    return costs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "give epsilon or epsilon_relative, one of them; got none"),
        ({"epsilon": 1.0, "epsilon_relative": 1.0}, "one of them; got both"),
        ({"costs": COSTS[0]}, r"costs must be a matrix \(n, m\), got shape \(3,\)"),
        ({"costs": COSTS[:, :0]}, r"got shape \(2, 0\)"),
        ({"costs": COSTS + 1j}, "costs must be real"),
        ({"costs": np.array([["a", "b"]])}, "costs must be real numbers"),
        ({"costs": with_entry(math.nan)}, r"costs\[1, 2\] is nan"),
        ({"costs": with_entry(-math.inf)}, r"costs\[1, 2\] is -inf"),
        ({"a": torch.ones(3) / 3}, r"a must have shape \(2,\), got \(3,\)"),
        ({"a": torch.ones(2)}, "a must sum to 1, got 2"),
        ({"b": torch.tensor([0.5, 0.75, -0.25])}, r"b\[2\] is -0.25"),
        ({"b": torch.tensor([0.5, math.nan, 0.5])}, r"b\[1\] is nan"),
        ({"b": torch.tensor([0.5, 0.5, math.inf])}, r"b must be finite .*b\[2\] is inf"),
        ({"epsilon_relative": 1.0, "costs": -COSTS}, "needs a positive mean cost; here it is -2"),
        ({"epsilon": 1e-9}, r"epsilon=1e-09 is too small for float32.*precision=double"),
        ({"epsilon_relative": 1e-9}, "epsilon_relative=1e-09 is too small"),
        ({"epsilon": 1e-45}, "overflow in torch.float32"),
        ({"epsilon": 1e38}, "out of the range of torch.float32"),
        ({"epsilon": 1.0, "costs": COSTS * 1e38}, "overflow in torch.float32; scale them down"),
        ({"epsilon": 1.0, "options": otdd.Converged(1e-8)}, "too tight for float32"),
        (
            {"epsilon": 1.0, "start": {"xy": torch.zeros(2)}},
            r"start\['xy'\] must have shape \(3",
        ),
        ({"epsilon": 1.0, "start": {"x": torch.zeros(3)}}, "start holds potentials by term"),
        ({"epsilon": 1.0, "compute": "nowhere"}, "unknown device 'nowhere'"),
        ({"epsilon": 1.0, "options": otdd.GeomlossSchedule()}, r"set solver\.diameter"),
        (
            {"costs": with_entry(math.inf), "options": otdd.Converged(bound_width=1e-3)},
            r"set solver\.tolerance",
        ),
        (
            {
                "costs": otdd.CostBlocks(2, 3, lambda rows, columns: COSTS[rows, columns]),
                "compute": otdd.ComputeOptions("cpu", "triton", memory_budget=0),
            },
            "backend=triton reads costs that are held",
        ),
        (
            {
                "epsilon": 1.0,
                "costs": COSTS.double(),
                "compute": otdd.ComputeOptions("cpu", "triton"),
            },
            "backend=triton has no double precision",
        ),
    ],
)
def test_is_refused(change: dict[str, Any], message: str) -> None:
    given = {"costs": COSTS, **change}
    if not {"epsilon", "epsilon_relative"} & given.keys() and change:
        given["epsilon"] = 1.0
    with pytest.raises(otdd.InputError, match=message):
        otdd.matrix_transport(**given)
