"""Public calls inside of what PyTorch can do around them: modes, defaults, transforms, traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import otdd_flash as otdd
from otdd_flash.errors import InputError
from otdd_flash.extractors import reduce_pca, standardize
from tests.frozen.cases import CASES, SMALL, SOURCE, TARGET

N, M, D = 14, 12, 3


def inputs() -> dict[str, Tensor]:
    """Clouds with two classes each, made where this is called."""
    draw = torch.Generator().manual_seed(0)
    named = {"device": "cpu", "generator": draw, "dtype": torch.float32}
    x = torch.randn(N, D, **named)
    y = torch.randn(M, D, **named) * 1.5 + 1
    return {
        **{"x": x, "y": y, "costs": torch.rand(N, M, **named)},
        **{"labels_x": torch.arange(N, device="cpu") % 2},
        **{"labels_y": torch.arange(M, device="cpu") % 2},
    }


def clouds(function: Callable[..., Any]) -> Callable[[dict[str, Tensor]], Any]:
    return lambda given: function(given["x"], given["y"], epsilon=0.5)


CALLS: dict[str, Callable[[dict[str, Tensor]], Any]] = {
    "sinkhorn_loss": clouds(otdd.sinkhorn_loss),
    "sinkhorn_losses": lambda g: otdd.sinkhorn_losses([g["x"]], [g["y"]], epsilon=0.5),
    "sinkhorn_potentials": clouds(otdd.sinkhorn_potentials),
    "transport_map": clouds(otdd.transport_map),
    "matrix_loss": lambda given: otdd.matrix_loss(given["costs"], epsilon=0.1),
    "matrix_plan": lambda given: otdd.matrix_plan(given["costs"], epsilon=0.1),
    "doubly_stochastic": lambda given: otdd.doubly_stochastic(given["costs"][:M]),
    # Of float64, which autocast leaves as it is.
    "sinkhorn_attention": lambda g: otdd.sinkhorn_attention(*3 * (g["x"].double(),)),
    "sinkhorn_plans": lambda given: otdd.sinkhorn_plans(given["costs"][None], epsilon=0.1).plans,
    "standardize": lambda given: standardize(SOURCE, TARGET)[0].features,
    "reduce_pca": lambda given: reduce_pca(SOURCE, TARGET, k=2, seed=0)[0].features,
    "map of a flow": lambda given: (
        otdd.gradient_flow(*SMALL, otdd.Flow(2), epsilon=1.0)
        .map("residual", epochs=3, device="cpu")(SMALL[0])
        .features
    ),
}
# Of the frozen cases those that ask for no gradient.
QUICK = ("labels: gaussian", "clouds: epsilon 1", "matrices: stored in single")
SLOW = (
    *("flows: attached", "flows: joint, diagonal", "flows: augmented", "map of a flow"),
    *("classes: gaussian", "classes: sinkhorn", "classes: exact", "pairwise: gaussian"),
    *("hessians: product", "labels: cosine", "sampling: noise floor", "sliced: three datasets"),
)


def numbers_of(name: str) -> list[Any]:
    """The numbers of a call or a frozen case, with their types and devices."""
    if name not in CALLS:
        fields = CASES[name].run().values()
        return [field.value.tobytes() for field in fields if field.allowance is not None]
    found = CALLS[name](inputs())
    every = found if isinstance(found, tuple) else (found,)
    return [(each.dtype, each.device, each.detach().numpy().tobytes()) for each in every]


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in (*CALLS, *QUICK) if name not in SLOW),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_numbers_are_the_same_in_any_mode(name: str) -> None:
    expected = numbers_of(name)
    default = torch.device("meta"), default_type(torch.float64)
    with default[0], default[1], torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        # What is made in inference mode lacks what autograd asks of a tensor.
        found = numbers_of(name)
        # The modes are there again.
        assert torch.get_default_device().type == "meta"
        assert torch.get_default_dtype() == torch.float64
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert found == expected


Loss = Callable[[Tensor], Tensor]


def losses(given: dict[str, Tensor]) -> dict[str, Loss]:
    y, costs = given["y"], {"epsilon": 0.5, "options": otdd.Converged(tolerance=1e-5)}
    pair = (y, given["labels_y"])
    return {
        "sinkhorn_loss": lambda x: otdd.sinkhorn_loss(x, y, **costs),
        "batch": lambda x: otdd.sinkhorn_loss(x[None], y[None], **costs).sum(),
        "transport_map": lambda x: otdd.transport_map(x, y, **costs).square().sum(),
        "sinkhorn_potentials": lambda x: otdd.sinkhorn_potentials(x, y, **costs)[0].square().sum(),
        "matrix_plan": lambda x: otdd.matrix_plan(torch.cdist(x, y), epsilon=0.1).square().sum(),
        "matrix_loss": lambda x: otdd.matrix_loss(torch.cdist(x, y), epsilon=0.1),
        # Their numbers are constants.
        "dataset_distance": lambda x: (
            x.sum() * otdd.dataset_distance((x, given["labels_x"]), pair, epsilon=0.5).value
        ),
        "LabeledSamples": lambda x: otdd.LabeledSamples(x, None, ()).features.sum(),
    }


def value_and_gradient(loss: Loss, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    value = loss(x)
    value.backward()
    assert x.grad is not None
    return value.detach(), x.grad


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for mine, wanted in zip(found, expected, strict=True):
        assert torch.equal(mine, wanted)


SLOWLY = ("sinkhorn_loss", "batch", "transport_map", "sinkhorn_potentials", "matrix_plan")


@pytest.mark.parametrize(
    "name", ["matrix_loss", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWLY)]
)
def test_backward_passes_are_the_same_under_autocast_and_other_defaults(name: str) -> None:
    given = inputs()
    loss, x = losses(given)[name], given["x"].requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    value = loss(x)
    with torch.autocast("cpu", torch.bfloat16), default_type(torch.float64), torch.device("meta"):
        (found,) = torch.autograd.grad(value, x)
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sinkhorn_loss", "matrix_plan", "dataset_distance"])
def test_a_compiled_step_has_the_eager_value_and_gradient(name: str) -> None:
    given, seen = inputs(), list[str]()

    def compiler(graph: Any, example: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def step(x: Tensor) -> Tensor:
        return losses(given)[name](1.1 * x) + 1

    expected = value_and_gradient(step, given["x"])
    torch.compiler.reset()
    for backend in (compiler, "aot_eager") if name == "sinkhorn_loss" else (compiler,):
        compiled = torch.compile(step, backend=backend)
        for _ in range(2):
            assert_same(value_and_gradient(compiled, given["x"]), expected)
    # The user's own operations, and none of the solver.
    assert any("mul" in target for target in seen)
    assert not any("exp" in target or "where" in target for target in seen)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="otdd_flash solves to a tolerance"):
        torch.compile(step, backend="eager", fullgraph=True)(given["x"])


def forward_mode(loss: Loss, x: Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        loss(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))


def fake(loss: Loss, x: Tensor) -> None:
    with FakeTensorMode() as mode:
        loss(mode.from_tensor(x))


def export(loss: Loss, x: Tensor) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return loss(x)

    torch.export.export(Module(), (x,), strict=False)


TRANSFORMS: dict[str, tuple[Callable[[Loss, Tensor], Any], str]] = {
    "grad": (lambda f, x: torch.func.grad(f)(x), r"such as grad; .*torch\.autograd\.grad"),
    "vmap": (lambda f, x: torch.vmap(f)(x[None]), r"such as vmap; .*torch\.stack"),
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,)), r"such as jvp; .*\(gradient \* v\)"),
    "hessian": (lambda f, x: torch.func.hessian(f)(x), "such as grad"),
    "functionalize": (lambda f, x: torch.func.functionalize(f)(x), "such as functionalize"),
    "dual": (forward_mode, "no forward-mode derivative"),
    "trace": (lambda f, x: torch.jit.trace(f, (x,)), r"torch\.jit\.trace"),
    "fake": (fake, "FakeTensor"),
    "make_fx": (lambda f, x: make_fx(f)(x), "make_fx"),
    "export": (export, r"torch\.export"),
    "meta": (lambda f, x: f(x.to("meta")), "device meta, where tensors have no numbers"),
    "nested": (lambda f, x: f(torch.nested.nested_tensor([x, x])), r"nested tensor; .*unbind\(\)"),
    "masked": (lambda f, x: f(torch.masked.masked_tensor(x, x > 0)), "MaskedTensor, which keeps"),
}
# What they import takes a second or more.
DEAR = ("jvp", "dual", "fake", "export")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "transform"),
    [
        *(("sinkhorn_loss", name) for name in TRANSFORMS if name not in DEAR),
        *(pytest.param("sinkhorn_loss", name, marks=pytest.mark.slow) for name in DEAR),
        *(("transport_map", transform) for transform in ("grad", "trace")),
        *(("dataset_distance", transform) for transform in ("grad", "trace")),
        ("LabeledSamples", "vmap"),
    ],
)
def test_transforms_and_traces_are_refused(name: str, transform: str) -> None:
    given = inputs()
    apply, message = TRANSFORMS[transform]
    with pytest.raises(InputError, match=message):
        apply(losses(given)[name], given["x"])


@pytest.mark.slow
def test_batches_of_cotangents_are_right_or_refused() -> None:
    given = inputs()
    loss, of_map = losses(given)["sinkhorn_loss"], losses(given)["transport_map"]
    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    plain = jacobian(loss, given["x"])
    assert torch.equal(jacobian(loss, given["x"], vectorize=True), plain)
    for call, function in ((hessian, loss), (jacobian, of_map)):
        with pytest.raises(InputError, match="leave vectorize=True or is_grads_batched=True out"):
            call(function, given["x"], vectorize=True)


IMPLICIT: dict[str, Any] = {"gradient": "implicit", "iterations": 20}
# Of a square matrix.
ONCE: dict[str, Loss] = {
    "sinkhorn_attention": lambda x: otdd.sinkhorn_attention(x, x, x),
    "sinkhorn_attention, implicit": lambda x: otdd.sinkhorn_attention(x, x, x, **IMPLICIT),
    "doubly_stochastic": otdd.doubly_stochastic,
    "doubly_stochastic, implicit": lambda x: otdd.doubly_stochastic(x, **IMPLICIT),
    "sinkhorn_plans": lambda x: otdd.sinkhorn_plans(x[None], epsilon=0.5, unbalanced=1.0).plans,
    "matrix_plan": lambda x: otdd.matrix_plan(x, epsilon=0.5),
    "matrix_loss": lambda x: otdd.matrix_loss(x, epsilon=0.5),
}


@pytest.mark.parametrize("name", ONCE)
def test_what_is_differentiable_once_refuses_a_second_derivative(name: str) -> None:
    x = inputs()["costs"][:M].requires_grad_()
    found = ONCE[name](x)
    (first,) = torch.autograd.grad(found.square().sum(), x, create_graph=True)
    with pytest.raises(InputError, match=r"(differentiable|taken) once"):
        torch.autograd.grad(first.sum(), x)
    if not name.startswith("matrix"):
        found, many = ONCE[name](x), torch.ones(3, *found.shape)
        with pytest.raises(InputError, match="batch of cotangents"):
            torch.autograd.grad(found, x, many, is_grads_batched=True)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_losses_have_the_same_gradient(reentrant: bool) -> None:
    given = inputs()
    loss = losses(given)["sinkhorn_loss"]
    found = value_and_gradient(
        lambda x: checkpoint(lambda x: loss(2 * x), x, use_reentrant=reentrant), given["x"]
    )
    assert_same(found, value_and_gradient(lambda x: loss(2 * x), given["x"]))
