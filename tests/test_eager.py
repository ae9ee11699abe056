"""Public calls inside of what PyTorch can do around them: modes, defaults, transforms, traces."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
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

N, M, D = 24, 20, 3


def inputs() -> dict[str, Tensor]:
    """Clouds with two classes each, made where this is called."""
    draw = torch.Generator().manual_seed(0)
    named = {"device": "cpu", "generator": draw, "dtype": torch.float32}
    x = torch.randn(N, D, **named)
    y = torch.randn(M, D, **named) * 1.5 + 1
    return {
        **{"x": x, "y": y},
        "labels_x": torch.arange(N, device="cpu") % 2,
        "labels_y": torch.arange(M, device="cpu") % 2,
        "costs": torch.rand(N, M, **named),
    }


def samples(given: dict[str, Tensor]) -> tuple[otdd.LabeledSamples, otdd.LabeledSamples]:
    return tuple(
        otdd.LabeledSamples(given[name], given[f"labels_{name}"], ("0", "1"), name=name)
        for name in "xy"
    )


def flow(mode: str, labels: Any = "gaussian") -> Callable[[dict[str, Tensor]], list[Tensor]]:
    def run(given: dict[str, Tensor]) -> list[Tensor]:
        found = otdd.gradient_flow(
            *samples(given),
            otdd.Flow(mode=mode, steps=2),
            epsilon=0.5,
            labels=labels,
        )
        return [found.samples.features, found.class_distances.full]

    return run


def contributions(given: dict[str, Tensor]) -> list[Tensor]:
    result = otdd.dataset_distance(*samples(given), epsilon=0.5)
    values = torch.tensor(result.value, dtype=torch.float64, device="cpu")
    return [
        values,
        result.contributions().values,
        result.barycentric_map(),
        result.class_coupling(),
    ]


def flow_map(given: dict[str, Tensor]) -> list[Tensor]:
    one, two = samples(given)
    found = otdd.gradient_flow(one, two, otdd.Flow(steps=2), epsilon=0.5)
    return [found.map("residual", epochs=3, device="cpu")(one).features]


def number(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def pairwise(given: dict[str, Tensor]) -> list[Tensor]:
    return [otdd.pairwise_distances(samples(given), epsilon=0.5).values]


def sliced(given: dict[str, Tensor]) -> list[Tensor]:
    return [otdd.sliced_distances(samples(given), projections=200).values]


def hessian(given: dict[str, Tensor]) -> list[Tensor]:
    found = otdd.sinkhorn_hessian(given["x"], given["y"], epsilon=0.5)
    direction = torch.ones(N, D, device="cpu", dtype=torch.float32)
    return [found.gradient, found.product(direction).values]


def matrix(given: dict[str, Tensor]) -> list[Tensor]:
    found = otdd.matrix_transport(given["costs"], epsilon=0.1)
    return [number(found.value, *found.bounds), found.plan(), found.apply(given["y"])]


def plans(given: dict[str, Tensor]) -> list[Tensor]:
    found = otdd.sinkhorn_plans(given["costs"][None], epsilon=0.1)
    return [found.plans, found.value, found.bounds, found.f]


def joint(given: dict[str, Tensor]) -> list[Tensor]:
    return [
        otdd.class_distances(samples(given), labels=labels).full
        for labels in (
            "gaussian",
            "means",
            "exact",
            otdd.labels.Sinkhorn(epsilon=0.1),
            otdd.labels.Gaussian(diagonal=True),
        )
    ]


def of_loss(**more: Any) -> Callable[[dict[str, Tensor]], list[Tensor]]:
    return lambda given: [otdd.sinkhorn_loss(given["x"], given["y"], epsilon=0.5, **more)]


CALLS: dict[str, Callable[[dict[str, Tensor]], list[Tensor]]] = {
    "flow attached": flow("attached"),
    "flow attached, diagonal": flow("attached", otdd.labels.Gaussian(diagonal=True)),
    "flow attached, means": flow("attached", "means"),
    "flow joint": flow("joint"),
    "flow augmented": flow("augmented"),
    "flow augmented, diagonal": flow("augmented", otdd.labels.Gaussian(diagonal=True)),
    "flow features": flow("features"),
    "flow map": flow_map,
    "dataset_distance": contributions,
    "pairwise_distances": pairwise,
    "sliced_distances": sliced,
    "class_distances": joint,
    "sinkhorn_loss": of_loss(),
    "sinkhorn_loss cosine": of_loss(ground="cosine"),
    "sinkhorn_losses": lambda g: [otdd.sinkhorn_losses([g["x"]], [g["y"]], epsilon=0.5)],
    "sinkhorn_divergence": lambda g: [
        number(otdd.sinkhorn_divergence(*samples(g), epsilon=0.5).value)
    ],
    "sinkhorn": lambda g: [otdd.sinkhorn(*samples(g), epsilon=0.5).f],
    "sinkhorn_potentials": lambda g: [*otdd.sinkhorn_potentials(g["x"], g["y"], epsilon=0.5)],
    "transport_map": lambda g: [otdd.transport_map(g["x"], g["y"], epsilon=0.5)],
    "sinkhorn_hessian": hessian,
    "matrix_loss": lambda g: [otdd.matrix_loss(g["costs"], epsilon=0.1)],
    "matrix_plan": lambda g: [otdd.matrix_plan(g["costs"], epsilon=0.1)],
    "matrix_transport": matrix,
    "doubly_stochastic": lambda g: [otdd.doubly_stochastic(g["costs"][:M, :M])],
    "doubly_stochastic f64": lambda g: [otdd.doubly_stochastic(g["costs"][:M, :M].double())],
    "sinkhorn_plans": plans,
    "noise_floor": lambda g: [number(otdd.noise_floor(*samples(g), epsilon=0.5).between.value)],
    "standardize": lambda g: [side.features for side in standardize(*samples(g))],
    "reduce_pca": lambda g: [side.features for side in reduce_pca(*samples(g), k=2, seed=0)],
}


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled": lambda: torch.set_grad_enabled(False),
    "meta": lambda: torch.device("meta"),
    "float64": lambda: default_type(torch.float64),
    "float16": lambda: default_type(torch.float16),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
# Seconds each, in all modes.
LONG = {name for name in CALLS if name.startswith("flow")} | {"noise_floor", "class_distances"}


@cache
def alone(name: str) -> list[Tensor]:
    return CALLS[name](inputs())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in CALLS],
)
def test_numbers_are_the_same_in_any_mode(name: str, mode: str) -> None:
    outside = inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = alone(name)
        with MODES[mode]():
            # What is made in inference mode lacks what autograd asks of a tensor.
            given = inputs() if mode == "inference_mode" else outside
            found = CALLS[name](given)
    for mine, wanted in zip(found, expected, strict=True):
        assert (mine.dtype, mine.device) == (wanted.dtype, wanted.device)
        assert torch.equal(mine, wanted)


def test_modes_around_a_call_are_there_again_after_it() -> None:
    given = inputs()
    with torch.device("meta"), default_type(torch.float64), torch.inference_mode():
        with torch.autocast("cpu", torch.bfloat16):
            otdd.sinkhorn_loss(given["x"], given["y"], epsilon=0.5)
            assert torch.is_autocast_enabled("cpu")
        with pytest.raises(InputError):
            otdd.sinkhorn_loss(given["x"], given["y"][:, :2], epsilon=0.5)
        assert torch.get_default_device().type == "meta"
        assert torch.get_default_dtype() == torch.float64
        assert torch.is_inference_mode_enabled()


Loss = Callable[[Tensor], Tensor]


def differentiable(y: Tensor) -> dict[str, Loss]:
    costs = {"epsilon": 0.5, "options": otdd.Converged(tolerance=1e-5)}
    return {
        "sinkhorn_loss": lambda x: otdd.sinkhorn_loss(x, y, **costs),
        "batch": lambda x: otdd.sinkhorn_loss(x[None], y[None], **costs).sum(),
        "transport_map": lambda x: otdd.transport_map(x, y, **costs).square().sum(),
        "sinkhorn_potentials": lambda x: otdd.sinkhorn_potentials(x, y, **costs)[0].square().sum(),
        "matrix_loss": lambda x: otdd.matrix_loss(torch.cdist(x, y), epsilon=0.1),
        "matrix_plan": lambda x: otdd.matrix_plan(torch.cdist(x, y), epsilon=0.1).square().sum(),
    }


DIFFERENTIABLE = list(differentiable(torch.zeros(1)))


def value_and_gradient(loss: Loss, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().clone().requires_grad_()
    value = loss(x)
    value.backward()
    assert x.grad is not None
    return value.detach(), x.grad


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward_passes_are_the_same_under_autocast_and_other_defaults(name: str) -> None:
    given = inputs()
    loss = differentiable(given["y"])[name]
    x = given["x"].requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    value = loss(x)
    with torch.autocast("cpu", torch.bfloat16), default_type(torch.float64), torch.device("meta"):
        (found,) = torch.autograd.grad(value, x)
    assert torch.equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", [*DIFFERENTIABLE, "dataset_distance"])
def test_a_compiled_step_has_the_eager_value_and_gradient(name: str, backend: str) -> None:
    given = inputs()
    losses = differentiable(given["y"])
    pair = (given["y"], given["labels_y"])
    losses["dataset_distance"] = lambda x: (
        x.square().sum() * otdd.dataset_distance((x, given["labels_x"]), pair, epsilon=0.5).value
    )
    seen: list[str] = []

    def compiler(graph: Any, example: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def step(x: Tensor) -> Tensor:
        return losses[name](1.1 * x) + 1

    torch.compiler.reset()
    compiled = torch.compile(step, backend=compiler if backend == "eager" else backend)
    for _ in range(2):
        found = value_and_gradient(compiled, given["x"])
        for mine, wanted in zip(found, value_and_gradient(step, given["x"]), strict=True):
            assert torch.equal(mine, wanted)
    if backend == "eager":
        # The user's own operations, and none of the solver.
        assert any("mul" in target for target in seen)
        assert not any("exp" in target or "where" in target for target in seen)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="otdd_flash solves to a tolerance"):
        torch.compile(step, backend="eager", fullgraph=True)(given["x"])


TRANSFORMS: dict[str, tuple[Callable[[Loss, Tensor], Any], str]] = {
    "grad": (lambda f, x: torch.func.grad(f)(x), r"such as grad; .*torch\.autograd\.grad"),
    "vmap": (lambda f, x: torch.vmap(f)(x[None]), r"such as vmap; .*torch\.stack"),
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,)), r"such as jvp; .*\(gradient \* v\)"),
    "jacrev": (lambda f, x: torch.func.jacrev(f)(x), "such as grad"),
    "jacfwd": (lambda f, x: torch.func.jacfwd(f)(x), "such as jvp"),
    "hessian": (lambda f, x: torch.func.hessian(f)(x), "such as grad"),
    "functionalize": (lambda f, x: torch.func.functionalize(f)(x), "such as functionalize"),
    "dual": (lambda f, x: forward_mode(f, x), "no forward-mode derivative"),
    "trace": (lambda f, x: torch.jit.trace(f, (x,)), r"torch\.jit\.trace"),
    "fake": (lambda f, x: fake(f, x), "FakeTensor"),
    "make_fx": (lambda f, x: make_fx(f)(x), "make_fx"),
    "export": (lambda f, x: export(f, x), r"torch\.export"),
    "meta": (lambda f, x: f(x.to("meta")), "device meta, where tensors have no numbers"),
    "nested": (lambda f, x: f(torch.nested.nested_tensor([x, x])), r"nested tensor; .*unbind\(\)"),
    "masked": (lambda f, x: f(torch.masked.masked_tensor(x, x > 0)), "MaskedTensor, which keeps"),
}


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


# Of torch, about prototypes and what is deprecated.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", ["sinkhorn_loss", "transport_map", "sinkhorn_divergence"])
def test_transforms_and_traces_are_refused(name: str, transform: str) -> None:
    given = inputs()
    losses = differentiable(given["y"])
    # Inside of a transform, its numbers would be constants.
    losses["sinkhorn_divergence"] = lambda x: torch.tensor(
        otdd.sinkhorn_divergence(x, given["y"], epsilon=0.5).value
    )
    apply, message = TRANSFORMS[transform]
    with pytest.raises(InputError, match=message):
        apply(losses[name], given["x"])


def doubly(logits: Tensor) -> Tensor:
    return otdd.doubly_stochastic(logits).square().sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "hessian", "dual", "trace"])
def test_transforms_of_doubly_stochastic_are_refused(transform: str) -> None:
    apply, message = TRANSFORMS[transform]
    with pytest.raises(InputError, match=message):
        apply(doubly, torch.rand(4, 4))


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "dual"])
def test_samples_are_not_made_inside_of_transforms(transform: str) -> None:
    apply, message = TRANSFORMS[transform]
    with pytest.raises(InputError, match=f"LabeledSamples .*{message}"):
        apply(lambda x: otdd.LabeledSamples(x, None, ()).features.sum(), torch.rand(4, 4))


@pytest.mark.slow
def test_a_compiled_function_reads_a_fingerprint() -> None:
    def first(x: Tensor) -> str:
        return otdd.LabeledSamples(2 * x, None, ()).fingerprint

    torch.compiler.reset()
    x = inputs()["x"]
    assert torch.compile(first, backend="eager")(x) == first(x)


def test_batches_of_cotangents_are_right_or_refused() -> None:
    given = inputs()
    losses = differentiable(given["y"])
    jacobian, hessian = torch.autograd.functional.jacobian, torch.autograd.functional.hessian
    plain = jacobian(losses["sinkhorn_loss"], given["x"])
    assert torch.equal(jacobian(losses["sinkhorn_loss"], given["x"], vectorize=True), plain)
    for call, name in ((hessian, "sinkhorn_loss"), (jacobian, "transport_map")):
        with pytest.raises(InputError, match="leave vectorize=True or is_grads_batched=True out"):
            call(losses[name], given["x"], vectorize=True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_losses_have_the_same_gradient(reentrant: bool) -> None:
    given = inputs()
    loss = differentiable(given["y"])["sinkhorn_loss"]

    def checkpointed(x: Tensor) -> Tensor:
        found: Tensor = checkpoint(lambda x: loss(2 * x), x, use_reentrant=reentrant)
        return found

    found = value_and_gradient(checkpointed, given["x"])
    for mine, wanted in zip(
        found, value_and_gradient(lambda x: loss(2 * x), given["x"]), strict=True
    ):
        assert torch.equal(mine, wanted)
