"""Losses of many pairs are those of each pair, one after the other or side by side."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from spying import calls_of
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.derivatives import loss
from otdd_flash.engine.few_problems import FewQuasiNewton
from otdd_flash.engine.quasi_newton import QuasiNewton
from otdd_flash.errors import InputError
from otdd_flash.operators import torch_pool
from otdd_flash.solver.small import route
from otdd_flash.solver.small.pooled_solve import Batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = ((8, 5), (6, 7), (5, 6))
EPSILON = 4.0


@pytest.fixture(params=["few on a processor", "many on a processor", "kernels"])
def backend(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, nothing_kept: None
) -> str:
    """How pairs are solved side by side; kernels run in the interpreter where there is no GPU."""
    monkeypatch.setattr(loss, "_small", lambda *_: True)
    if request.param.startswith("many"):
        monkeypatch.setattr(torch_pool, "FEW", 0)
    return "triton" if request.param == "kernels" else "torch"


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


def assert_the_same(options: dict[str, Any], rtol: float, backend: str = "auto") -> None:
    x, y = clouds(0), clouds(1, side=1)
    compute = otdd.ComputeOptions(DEVICE, backend)
    found = otdd.sinkhorn_losses(x, y, epsilon=EPSILON, compute=compute, **options)
    expected = each(x, y, **options)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)
    for got, wanted in zip(gradients(found, x, y), gradients(expected, x, y), strict=True):
        assert float((got - wanted).abs().max()) <= 1e3 * rtol * float(wanted.abs().max())


OPTIONS: list[dict[str, Any]] = [
    {"labels_x": labels(0), "labels_y": labels(1), "debias": False, "lambda_x": 0.7, **LABELLED},
    {"a": masses(0), "b": masses(1)},
    {},
]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("options", OPTIONS, ids=["labels", "masses", "points"])
def test_pairs_are_solved_one_after_the_other(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss, "_small", lambda *_: False)
    assert_the_same(options, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [OPTIONS[2] | {"debias": False}, OPTIONS[1] | OPTIONS[0] | {"debias": True}],
    ids=["points", "all"],
)
def test_pairs_are_solved_side_by_side(
    options: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two rooms: of two pairs and of one.
    given = batch_of(clouds(0), clouds(1, side=1))
    one = given.room(1, in_triton=backend == "triton").bytes
    monkeypatch.setattr(route, "MOST_BYTES", 2 * one)
    monkeypatch.setattr(route, "MOST_BYTES_CPU", 2 * one)
    assert_the_same(options | {"options": otdd.Converged(tolerance=2e-4)}, 1e-5, backend)


def batch_of(x: list[Tensor], y: list[Tensor]) -> Any:
    padded = tuple(torch.nn.utils.rnn.pad_sequence(side, batch_first=True) for side in (x, y))
    return Batch(padded, (None, None), (None, None), (1, 1), None, (0.5, 0.5))


@pytest.mark.slow
def test_a_pair_that_needs_more_is_solved_alone(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal clouds are at distance 0, and costs beyond float32 are refused by their place."""
    x, y = clouds(0), clouds(1, side=1)
    y[1] = x[1].detach().clone().requires_grad_()
    alone = calls_of(monkeypatch, loss, "sinkhorn_loss")
    solve = partial(
        otdd.sinkhorn_losses, epsilon=EPSILON, compute=otdd.ComputeOptions(DEVICE, backend)
    )
    found = solve(x, y)
    assert found[1] == 0
    assert len(alone) == 1
    parts = gradients(found, x, y)
    assert all(bool(part.isfinite().all()) for part in parts)
    assert float(parts[1].abs().max()) == 0 < float(parts[0].abs().max())
    far = [*y[:2], 3e19 * y[2].detach()]
    with pytest.raises(InputError, match=r"^pair 2: .*overflow"):
        solve(x, far)
    lost = [*y[:2], y[2].detach() * torch.nan]
    with pytest.raises(InputError, match=r"^pair 2: y"):
        solve(x, lost)


def test_a_pair_that_is_refused_is_refused_at_once() -> None:
    """By its place, before iterations that costs beyond float32 would keep from ending."""
    x, y = clouds(0), clouds(1, side=1)
    solve = partial(otdd.sinkhorn_losses, epsilon=EPSILON, compute=otdd.ComputeOptions("cpu"))
    x, y = ([part.detach().cpu() for part in side] for side in (x, y))
    for wrong, message in ((torch.nan, "y: "), (1e20, "overflow")):
        with pytest.raises(InputError, match=rf"^pair 1: .*{message}"):
            solve(x, [y[0], wrong * y[1], y[2]])
    with pytest.raises(InputError, match="overflow"):
        otdd.sinkhorn_loss(x[0], 1e20 * y[0], epsilon=EPSILON)
    labelled = [torch.arange(len(part)) % 2 for part in x], [torch.arange(len(y[0])) + 7] * 3
    with pytest.raises(InputError, match=r"^pair 0: y"):
        solve(
            x,
            [y[0]] * 3,
            labels_x=labelled[0],
            labels_y=labelled[1],
            class_table=table().cpu(),
            class_totals=(2, 3),
        )
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TRITON_INTERPRET", "0")
        with pytest.raises(InputError, match=r"^pair 0: .*backend=triton"):
            solve(x, y, compute=otdd.ComputeOptions("cpu", "triton"))


@pytest.mark.usefixtures("nothing_kept")
@pytest.mark.parametrize("few", [0, 4])
def test_what_is_hopeless_ends_long_before_the_iterations(
    few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor: not finite, or beyond float32."""
    monkeypatch.setattr(torch_pool, "FEW", few)
    steps = [calls_of(monkeypatch, rule, "step") for rule in (FewQuasiNewton, QuasiNewton)]
    options, cpu = otdd.Converged(max_iterations=1000), otdd.ComputeOptions("cpu")
    solve = partial(otdd.sinkhorn_losses, epsilon=EPSILON, options=options, compute=cpu)
    x, y = ([part.detach().cpu() for part in clouds(side, side=side)] for side in (0, 1))
    for bad in (torch.nan * y[1], 3e19 * y[1]):
        with pytest.raises(InputError, match=r"^pair 1: "):
            solve(x, [y[0], bad, y[2]])
    # Of cross terms and of self terms, and of pairs that are solved alone after that.
    assert 0 < sum(map(len, steps)) < 1000


def test_a_label_without_a_class_is_refused_by_the_place_of_its_pair() -> None:
    bad = labels(0)
    bad[1] = bad[1] + 7
    given = {"epsilon": EPSILON, "labels_y": labels(1), **LABELLED}
    with pytest.raises(InputError, match=r"^pair 1: x: labels must lie"):
        otdd.sinkhorn_losses(clouds(0), clouds(1, side=1), labels_x=bad, **given)


def test_clouds_of_other_sizes_are_uniform_each_by_itself() -> None:
    """Points that fill up a smaller one have no mass; clouds of one size need none said."""
    two, three = torch.zeros(2, 1), torch.zeros(3, 1)
    found = loss._masses([two, three], None)
    torch.testing.assert_close(
        found, torch.tensor([[0.5, 0.5, 0.0], [1 / 3] * 3], dtype=torch.float64)
    )
    assert loss._masses([two, two], None) is None


def batch() -> dict[str, Tensor]:
    """Two pairs of clouds (B, n, d), with masses and labels of each."""
    draw = torch.Generator().manual_seed(3)
    a, b = (torch.rand(2, size, generator=draw, dtype=torch.float64) + 0.1 for size in (7, 5))
    a[1, 2] = 0
    return {
        "x": torch.randn(2, 7, 3, generator=draw, dtype=torch.float64),
        "y": torch.randn(2, 5, 3, generator=draw, dtype=torch.float64) + 1,
        "a": a / a.sum(1, keepdim=True),
        "b": b / b.sum(1, keepdim=True),
        "labels_x": torch.arange(14).reshape(2, 7) % 2,
        "labels_y": torch.arange(10).reshape(2, 5) % 3,
    }


@pytest.mark.slow
@pytest.mark.parametrize("labelled", [True, False])
def test_a_batch_of_clouds_has_the_values_and_gradients_of_its_pairs(labelled: bool) -> None:
    given = batch()
    if labelled:
        # As for one pair, the labels say how many classes there are.
        given["class_table"] = table().cpu().double()
    else:
        del given["labels_x"], given["labels_y"]
    leaves = [given[name].requires_grad_() for name in ("x", "y", "a", "b")]
    options = {"epsilon": EPSILON, "options": otdd.Converged(tolerance=1e-4)}
    found = otdd.sinkhorn_loss(**given, **options)
    assert found.shape == (2,)
    shared = {"class_table"} & given.keys()
    alone = torch.stack(
        [
            otdd.sinkhorn_loss(
                **{name: part if name in shared else part[k] for name, part in given.items()},
                **options | ({"class_totals": (2, 3)} if labelled else {}),
            )
            for k in range(2)
        ]
    )
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=0)
    for mine, wanted in zip(gradients(found, leaves), gradients(alone, leaves), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-15)


X, Y = torch.zeros(4, 7, 3), torch.ones(4, 5, 3)
OF_LISTS: list[tuple[dict[str, Any], str]] = [
    ({"y": clouds(1, side=1)[:2]}, "x holds 3 clouds and y is for 2"),
    ({"a": masses(0)[:1]}, "x holds 3 clouds and a is for 1"),
    ({"x": 3.0}, "x must be a list of tensors"),
    ({"y": [*clouds(1, side=1)[:2], clouds(1, side=1)[2][:, :2]]}, "^pair 2: "),
    ({"labels_x": labels(0)}, "^pair 0: labels need class_table"),
    ({"b": [part * 2 for part in masses(1)]}, "^pair 0: b must sum to 1"),
    ({"epsilon": 0.0}, "epsilon must be positive"),
    ({"x": X[0], "y": Y[0]}, r"give it as \[x\]"),
    # Solved, a batch in a batch would be B x B numbers.
    ({"x": [X], "y": [Y]}, r"pair 0: x must be a cloud"),
]
OF_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"x": X[0]}, r"one cloud, \(7, 3\); expand that to a batch, as by x.expand\(4, -1, -1\)"),
    ({"y": Y[0]}, r"expand that to a batch, as by y.expand\(4, -1, -1\)"),
    ({"x": X[:3]}, "batch of 3 clouds and y of 4"),
    ({"x": X[None], "y": Y[None]}, r"got shape \(1, 4, 7, 3\); .* x.flatten\(0, -3\)"),
    ({"x": X[0, 0], "y": Y[0]}, r"got shape \(3,\); x.reshape\(-1, 1\)"),
    ({"a": torch.full((7,), 1 / 7)}, r"\(4, 7\), one entry for each .* a.expand\(4, 7\)"),
    ({"b": torch.full((4, 7), 1 / 7)}, r"b must have shape \(4, 5\).*got \(4, 7\)$"),
    ({"labels_x": torch.zeros(4).long()}, r"labels_x must have shape \(4, 7\)"),
    ({"labels_x": torch.zeros(4, 7).long()}, "labels need class_table"),
    ({"start": {"xy": torch.zeros(4, 5)}}, "start holds potentials of one pair"),
    ({"y": Y[:, :, :2]}, "pair 0: x has 3 features and y has 2"),
    ({"y": Y.where(torch.arange(4)[:, None, None] != 2, torch.nan)}, "pair 2: y: features hold"),
]
ONE_PAIR = (otdd.transport_map, otdd.sinkhorn_potentials, otdd.sinkhorn_hessian)
REFUSED = [
    *((otdd.sinkhorn_losses, {"x": clouds(0), "y": clouds(1, side=1)} | one, message)
      for one, message in OF_LISTS),
    *((otdd.sinkhorn_loss, {"x": X, "y": Y} | one, message) for one, message in OF_BATCHES),
    *((one, {"x": X, "y": Y}, r"otdd\.sinkhorn_loss, which takes") for one in ONE_PAIR),
    (otdd.sinkhorn_divergence, {"source": X, "target": Y}, r"unless these are several clouds"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "given", "message"), REFUSED, ids=lambda _: "")
def test_what_does_not_fit_is_refused(function: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        function(**{"epsilon": 1.0, **given})
