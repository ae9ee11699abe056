"""Sinkhorn attention in traces: `torch.compile`, `torch.export`, vmap, and fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import otdd_flash as otdd
from otdd_flash.attention.attention import attend

Points = tuple[Tensor, ...]


def drawn(*lead: int, n: int = 9, m: int = 7, d: int = 4) -> Points:
    draw = torch.Generator().manual_seed(n + m)
    shapes = (*lead, n, d), (*lead, m, d), (*lead, m, 5)
    return tuple(torch.randn(shape, generator=draw).requires_grad_() for shape in shapes)


def gradients(run: Callable[..., Tensor], points: Points) -> tuple[Tensor, ...]:
    return torch.autograd.grad(run(*points).square().sum(), points)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tolerance": 1e-3}, {"gradient": "implicit"}])
def test_compiled(options: dict[str, Any]) -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return otdd.sinkhorn_attention(2 * q, k, v, **{"iterations": 20} | options).square()

    points = drawn(2)
    compiled = torch.compile(layer, fullgraph=True)
    assert torch.allclose(compiled(*points), layer(*points), atol=1e-5)
    for one, other in zip(gradients(compiled, points), gradients(layer, points), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def assert_unrolled(run: Callable[..., Tensor], points: Points) -> None:
    expected = gradients(otdd.sinkhorn_attention, points)
    for one, other in zip(gradients(run, points), expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_compiled_vmap_differentiates_the_iterations() -> None:
    """Inside of vmap no tensor says that it requires a gradient."""
    run = torch.compile(torch.vmap(otdd.sinkhorn_attention), backend="aot_eager")
    assert_unrolled(run, drawn(2, 3))


class Attention(torch.nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return otdd.sinkhorn_attention(q, k, v)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("strict", [False, True])
def test_what_was_exported_without_gradients_can_be_trained(strict: bool) -> None:
    points = drawn(2)
    with torch.no_grad():
        run = torch.export.export(Attention(), points, strict=strict).module()
    assert_unrolled(run, points)
    detached = tuple(each.detach() for each in points)
    assert_unrolled(torch.export.export(Attention(), detached, strict=strict).module(), points)
    layer = otdd.nn.SinkhornAttention(8, 2, batch_first=True)
    x = torch.randn(2, 9, 8)
    with torch.no_grad():
        module = torch.export.export(layer, (x, x, x), strict=strict).module()
    module(x, x, x)[0].square().sum().backward()
    layer(x, x, x)[0].square().sum().backward()
    found = dict(module.named_parameters())
    for name, each in layer.named_parameters():
        assert torch.allclose(found[name].grad, each.grad, atol=1e-5)


def test_a_gradient_that_was_not_prepared_is_refused() -> None:
    unrolled, kept = True, False
    out, *_ = attend(*drawn(2), None, 0.5, 3, None, unrolled, kept, False)
    with pytest.raises(otdd.InputError, match="recorded without"):
        out.sum().backward()


def test_shapes_of_a_graph_are_any() -> None:
    graphs: list[Any] = []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    run = torch.compile(Attention(), fullgraph=True, dynamic=True, backend=counted)
    for batch, n in ((2, 9), (3, 10), (4, 12), (5, 4), (7, 33)):
        points = drawn(batch, 3, n=n)
        assert torch.allclose(run(*points), otdd.sinkhorn_attention(*points), atol=1e-6)
    assert len(graphs) == 1
    layer, x = otdd.nn.SinkhornAttention(8, 2, batch_first=True), torch.randn(3, 9, 8)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("n")}
    exported = torch.export.export(layer, (x, x, x), dynamic_shapes=(sizes,) * 3).module()
    for shape in ((5, 17, 8), (2, 3, 8)):
        x = torch.randn(shape)
        assert torch.allclose(exported(x, x, x)[0], layer(x, x, x)[0], atol=1e-6)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    "options",
    [
        *([{"tolerance": 1e-3}, {"tolerance": 1e-5}], [{"scale": 0.5}, {"scale": 0.25}]),
        *([{"iterations": 1}, {"iterations": 4}, {"iterations": 5}], [{"compute": "cpu"}]),
    ],
)
def test_values_of_options_in_a_graph(options: list[dict[str, Any]]) -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(points: Points, options: dict[str, Any]) -> Tensor:
        return otdd.sinkhorn_attention(*points, **options)

    points = drawn(2)
    for each in options:
        expected = otdd.sinkhorn_attention(*points, **each)
        assert torch.allclose(run(points, each), expected, atol=1e-6)


def test_tensors_without_numbers_have_shapes() -> None:
    mask, options = torch.zeros(7, dtype=torch.bool), {"tolerance": 1e-3}
    points = tuple(each.to("meta") for each in drawn(2))
    found = otdd.sinkhorn_attention(*points, key_mask=mask.to("meta"), **options)
    assert (found.shape, found.device.type) == ((2, 9, 5), "meta")
    with FakeTensorMode() as mode:
        points = tuple(mode.from_tensor(each.detach()).requires_grad_() for each in drawn(2))
        found = otdd.sinkhorn_attention(*points, key_mask=mode.from_tensor(mask), **options)
        assert torch.autograd.grad(found.sum(), points)[2].shape == (2, 7, 5)


def test_vmap_is_refused() -> None:
    with pytest.raises(otdd.InputError, match="transforms such as vmap"):
        torch.vmap(otdd.sinkhorn_attention)(*drawn(2))
