"""What a cost asks of a GPU for every piece of points that are in float64 at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from operation_counts import FREE
from other_device import OTHER, OtherDevice
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from otdd_flash.operators import float64_rows
from otdd_flash.operators.float64_rows import squared_distances, squared_norms
from otdd_flash.operators.labelled_cost import LabelledCost

COUNT, DIM = 40, 7
# What a small float64 next to points far from it is off by.
EXACT = {"rtol": 1e-13, "atol": 1e-13}


class Operations(TorchDispatchMode):
    """How many move data."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function.overloadpacket.__name__ not in {*FREE, "squeeze_"}
        return function(*args, **(kwargs or {}))


def points(seed: int) -> Tensor:
    return torch.randn(COUNT, DIM, generator=torch.Generator().manual_seed(seed)) + 5


def cost(place: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> LabelledCost:
    masses = torch.rand(COUNT, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(COUNT) % 2
    classes = torch.tensor([[0.0, 1.0], [1.0, 0.5]], dtype=torch.float64)
    x, y, a, of_class, classes = map(place, (points(0), points(1), masses, labels, classes))
    sides = {"labels_x": of_class, "labels_y": of_class, "class_costs": classes}
    return LabelledCost(x, y, a / a.sum(), a / a.sum(), **sides, lambda_x=0.5)


def there(tensor: Tensor) -> Tensor:
    return tensor.to(OTHER)


def asked(run: Callable[[], object], pieces: int, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(float64_rows, "CHUNK_ELEMENTS_CPU", COUNT // pieces * DIM)
    with Operations() as operations:
        run()
    return operations.count


# Both means: a copy and a product that is added; both norms: a difference and lengths.
FOUND = {"measured": 2 * 2 + 2 * 2, "moments": 2, "costs_of": 2, "distances": 2, "norms": 2}


@pytest.mark.parametrize("name", FOUND)
def test_a_piece_is_centred_as_it_is_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with OtherDevice():
        of, centre = cost(there), there(torch.ones(DIM, dtype=torch.float64))
        # What the others begin with.
        moments = of.moments(of.b)
        runs = {
            "measured": lambda: cost(there).mean_cost,
            "moments": lambda: of.moments(of.b),
            "costs_of": lambda: of.costs_of(moments),
            "distances": lambda: squared_distances(of.held[0], centre),
            "norms": lambda: squared_norms(of.held[0]),
        }
        few, many = (asked(runs[name], pieces, monkeypatch) for pieces in (2, 8))
    assert many - few == (8 - 2) * FOUND[name]


def test_what_pieces_make_is_as_good_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float64_rows, "CHUNK_ELEMENTS_CPU", 3 * DIM)
    of, masses = cost(), cost().b
    x, y = (each.double() for each in of.held)
    centre = (of.a @ x + of.b @ y) / 2
    torch.testing.assert_close(of.centre, centre, **EXACT)
    for found, each in zip(of.squares, (x, y), strict=True):
        torch.testing.assert_close(found, (each - centre).square().sum(1), **EXACT)
    table = of.class_costs[of.labels[0]][:, of.labels[1]]
    costs = torch.cdist(x, y).square() * of.lambda_x + table
    torch.testing.assert_close(of.expected_costs(masses), costs @ masses, rtol=1e-11, atol=1e-11)
    assert of.mean_cost == pytest.approx(float(of.a @ costs @ of.b), rel=1e-11)
    torch.testing.assert_close(squared_norms(x), x.square().sum(1), **EXACT)
    with OtherDevice():
        elsewhere: Any = squared_distances(there(points(0)), there(of.centre))
        assert torch.equal(elsewhere.held, of.squares[0])
