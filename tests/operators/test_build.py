"""The choice between stored and streamed scores, and what the options accept."""

from __future__ import annotations

import pytest
import torch

from otdd_flash.errors import InputError
from otdd_flash.operators.build import ComputeOptions, GroundCost, build_operator
from otdd_flash.operators.memory import budget_in_bytes, free_memory
from otdd_flash.operators.stored import StoredOperator
from otdd_flash.operators.streamed import StreamedOperator
from otdd_flash.samples import LabeledSamples

CPU = torch.device("cpu")


def cloud(n: int) -> LabeledSamples:
    features = torch.randn(n, 3, generator=torch.Generator().manual_seed(n))
    return LabeledSamples(features, torch.arange(n) % 2, ("a", "b"))


@pytest.mark.parametrize(
    ("budget", "kind"), [(4 * 50 * 40, StoredOperator), (4 * 50 * 40 - 1, StreamedOperator)]
)
def test_scores_are_kept_if_they_fit_the_budget(budget: int, kind: type) -> None:
    compute = ComputeOptions(device="cpu", memory_budget=budget)
    operator = build_operator(cloud(50), cloud(40), torch.ones(2, 2), GroundCost(), compute)
    assert type(operator) is kind


def test_double_precision_needs_twice_the_budget() -> None:
    compute = ComputeOptions(device="cpu", precision="double", memory_budget=4 * 50 * 40)
    operator = build_operator(cloud(50), cloud(40), torch.ones(2, 2), GroundCost(), compute)
    assert type(operator) is StreamedOperator
    assert operator.dtype == torch.float64


def test_a_single_pass_is_never_stored() -> None:
    operator = build_operator(
        cloud(5), cloud(4), torch.ones(2, 2), GroundCost(), ComputeOptions(), keep_scores=False
    )
    assert type(operator) is StreamedOperator


def test_both_ways_give_the_same_potentials() -> None:
    g = torch.randn(40, generator=torch.Generator().manual_seed(1))
    rows = [
        build_operator(
            cloud(50),
            cloud(40),
            torch.ones(2, 2),
            GroundCost(),
            ComputeOptions(device="cpu", memory_budget=budget),
        ).softmin_rows(g, 0.1)
        for budget in ("1GiB", 0)
    ]
    torch.testing.assert_close(*rows)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4GiB", 4 * 2**30), ("1.5 MiB", 3 * 2**19), ("2GB", 2 * 10**9), ("100", 100), (7, 7)],
)
def test_memory_budgets_are_read(text: str | int, expected: int) -> None:
    assert budget_in_bytes(text, CPU) == expected


@pytest.mark.parametrize("text", ["lots", "4 GiBs", "-1", "1.2.3GiB", ""])
def test_an_unreadable_memory_budget_is_the_users_error(text: str) -> None:
    with pytest.raises(InputError, match="memory_budget must be auto"):
        budget_in_bytes(text, CPU)


def test_the_automatic_budget_is_half_of_what_is_free() -> None:
    assert 0 < budget_in_bytes("auto", CPU) <= 0.6 * free_memory(CPU)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"lambda_x": -1.0}, "lambda_x must be finite and not negative, got -1.0"),
        ({"lambda_y": float("nan")}, "lambda_y"),
        ({"lambda_x": 0.0, "lambda_y": 0.0}, "both 0"),
    ],
)
def test_bad_weights_of_the_cost(bad: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        GroundCost(**bad)


@pytest.mark.parametrize(
    ("bad", "known"), [({"backend": "keops"}, "auto, torch"), ({"precision": "half"}, "fast, high")]
)
def test_unknown_options_list_the_known(bad: dict[str, str], known: str) -> None:
    with pytest.raises(InputError, match=known):
        ComputeOptions(**bad)
