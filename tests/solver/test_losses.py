"""Losses of many pairs are those of each pair, one after the other or side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.solver import losses
from otdd_flash.solver.small import batches, forget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = ((8, 5), (6, 7), (5, 6))
EPSILON = 0.5


@pytest.fixture
def _side_by_side(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU, where recordings solve them; here in the interpreter."""
    monkeypatch.setattr(losses, "_small", lambda *_: True)
    forget()
    yield
    forget()


def clouds(seed: int = 0, side: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(sizes[side], 3, generator=draw) + side).to(DEVICE).requires_grad_()
        for sizes in SIZES
    ]


def labels(side: int) -> list[Tensor]:
    return [(torch.arange(sizes[side]) % (2 + side)).to(DEVICE) for sizes in SIZES]


def masses(side: int) -> list[Tensor]:
    weights = [torch.arange(1.0, sizes[side] + 1).to(DEVICE) for sizes in SIZES]
    return [part / part.sum() for part in weights]


def table() -> Tensor:
    drawn = torch.rand(5, 5, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    return drawn + drawn.T


LABELLED = {"class_table": table(), "class_totals": (2, 3)}


def each(x: list[Tensor], y: list[Tensor], **options: Any) -> Tensor:
    """One after the other, by `sinkhorn_loss`."""
    lists = {"a", "b", "labels_x", "labels_y"} & options.keys()
    return torch.stack(
        [
            otdd.sinkhorn_loss(
                x[k], y[k], epsilon=EPSILON, **options | {name: options[name][k] for name in lists}
            )
            for k in range(len(x))
        ]
    )


def gradients(found: Tensor, *sides: list[Tensor]) -> list[Tensor]:
    """Of a sum in which every pair has a weight of its own."""
    weights = torch.arange(1.0, len(found) + 1, device=found.device)
    parts = [part for side in sides for part in side]
    return list(torch.autograd.grad((weights * found).sum(), parts))


def assert_the_same(options: dict[str, Any], rtol: float) -> None:
    x, y = clouds(0), clouds(1, side=1)
    found = otdd.sinkhorn_losses(x, y, epsilon=EPSILON, **options)
    expected = each(x, y, **options)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)
    for got, wanted in zip(gradients(found, x, y), gradients(expected, x, y), strict=True):
        assert float((got - wanted).abs().max()) <= 1e3 * rtol * float(wanted.abs().max())


OPTIONS: list[dict[str, Any]] = [
    {},
    {"debias": False, "lambda_x": 0.7},
    {"a": masses(0), "b": masses(1)},
    {"labels_x": labels(0), "labels_y": labels(1), **LABELLED},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["points", "cross", "masses", "labels"])
def test_pairs_are_solved_one_after_the_other(options: dict[str, Any]) -> None:
    assert_the_same(options, 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("_side_by_side")
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[2] | OPTIONS[3]], ids=["points", "all"])
def test_pairs_are_solved_side_by_side(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two rooms: of two pairs and of one.
    one = batches.room_of(batch_of(clouds(0), clouds(1, side=1)), 1).bytes
    monkeypatch.setattr(batches, "MOST_AT_ONCE", 2 * one)
    assert_the_same(options | {"options": otdd.Converged(tolerance=2e-4)}, 1e-5)


def batch_of(x: list[Tensor], y: list[Tensor]) -> Any:
    padded = tuple(torch.nn.utils.rnn.pad_sequence(side, batch_first=True) for side in (x, y))
    return batches.Batch(padded, (None, None), (None, None), (1, 1), None)


@pytest.mark.slow
@pytest.mark.usefixtures("_side_by_side")
def test_a_pair_that_needs_more_is_solved_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal clouds are at distance 0, and costs beyond float32 are refused by their place."""
    x, y = clouds(0), clouds(1, side=1)
    y[1] = x[1].detach().clone().requires_grad_()
    alone: list[int] = []
    whole = losses.sinkhorn_loss
    monkeypatch.setattr(
        losses, "sinkhorn_loss", lambda *given, **more: alone.append(1) or whole(*given, **more)
    )
    found = otdd.sinkhorn_losses(x, y, epsilon=EPSILON)
    assert found[1] == 0
    assert len(alone) == 1
    parts = gradients(found, x, y)
    assert all(bool(part.isfinite().all()) for part in parts)
    assert float(parts[1].abs().max()) == 0 < float(parts[0].abs().max())
    far = [*y[:2], 3e19 * y[2].detach()]
    with pytest.raises(InputError, match=r"^pair 2: .*overflow"):
        otdd.sinkhorn_losses(x, far, epsilon=EPSILON)
    lost = [*y[:2], y[2].detach() * torch.nan]
    with pytest.raises(InputError, match=r"^pair 2: y"):
        otdd.sinkhorn_losses(x, lost, epsilon=EPSILON)


def test_one_tensor_holds_clouds_of_one_size() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(2, 6, 3, generator=draw, requires_grad=True) for _ in range(2))
    found = otdd.sinkhorn_losses(x, y, epsilon=EPSILON, compute="cpu")
    expected = each(list(x), list(y), compute="cpu")
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(part.sum(), x)[0] for part in (found, expected)))
    assert otdd.sinkhorn_losses([], [], epsilon=EPSILON).shape == (0,)


def test_masses_and_tables_have_gradients_too() -> None:
    x, y = clouds(0), clouds(1, side=1)
    leaves = table().requires_grad_(), torch.tensor(0.5, requires_grad=True)
    given = {"labels_x": labels(0), "labels_y": labels(1), "class_totals": (2, 3)}
    given |= {"class_table": leaves[0], "lambda_y": leaves[1]}
    found = otdd.sinkhorn_losses(x, y, epsilon=EPSILON, **given)
    one, other = (torch.autograd.grad(part.sum(), leaves) for part in (found, each(x, y, **given)))
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"y": clouds(1, side=1)[:2]}, "x holds 3 clouds and y is for 2"),
        ({"a": masses(0)[:1]}, "x holds 3 clouds and a is for 1"),
        ({"x": 3.0}, "x must be a list of tensors"),
        ({"y": [*clouds(1, side=1)[:2], clouds(1, side=1)[2][:, :2]]}, "^pair 2: "),
        ({"labels_x": labels(0)}, "^pair 0: labels need class_table"),
        ({"b": [part * 2 for part in masses(1)]}, "^pair 0: b must sum to 1"),
        ({"epsilon": 0.0}, "epsilon must be positive"),
    ],
)
def test_bad_requests_name_the_pair(wrong: dict[str, Any], message: str) -> None:
    given = {"x": clouds(0), "y": clouds(1, side=1), "epsilon": EPSILON} | wrong
    with pytest.raises(InputError, match=message):
        otdd.sinkhorn_losses(**given)
