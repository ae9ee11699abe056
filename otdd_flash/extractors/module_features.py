"""The extractor around a user's own PyTorch module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from otdd_flash.arguments import Count, Word, takes
from otdd_flash.checks import refused, shown
from otdd_flash.devices import resolve_device
from otdd_flash.errors import InputError
from otdd_flash.extractors.content_digest import Unidentified, content_digest
from otdd_flash.extractors.network import Network
from otdd_flash.importing import user_code
from otdd_flash.real_numbers import check_integers
from otdd_flash.shown import listing

WRAP = "wrap the network in a module whose forward returns one row of features per input"
# The types of images as arrays, whose values and order of dimensions networks do not take.
STORED = (np.uint8, np.uint16, np.bool_)
# Names of submodules in a message.
NAMED = 5


@dataclass(frozen=True, eq=False, repr=False)
class ModuleFeatures(Network):
    """See `from_module`.

    Attributes:
        batch_size: inputs per forward pass where `embed` is given none.
        device: where it runs where `embed` says "auto"; "auto" here too is where its weights are.
    """

    batch_size: Count = 256
    device: str | torch.device = "auto"

    @property
    def key(self) -> str:
        """The description and a digest of module and transform; without one, the description."""
        try:
            return f"{self.description} {self._digest()}"
        except Unidentified:
            return self.description

    @property
    def unidentified(self) -> str:
        """Why a cache cannot identify the features; empty if it can."""
        try:
            self._digest()
        except Unidentified as error:
            return f"{self} holds what has no content to tell it by ({error})"
        return ""

    @property
    def cacheable(self) -> bool:
        """Whether a digest says all of what it computes."""
        return not self.unidentified

    def __repr__(self) -> str:
        return self.description

    def __call__(self, batch: Any) -> Tensor:
        """Features (n, d) of n inputs, on the CPU."""
        batch_size, device, _ = self.settings(None, "auto", "auto")
        return torch.cat([*self.stream(batch, batch_size=batch_size, device=device)])

    def settings(
        self,
        batch_size: int | None,
        device: str | torch.device,
        mixed_precision: bool | Literal["auto"],
    ) -> tuple[int, torch.device, bool]:
        """Fill in the settings of a call: its own batch size and device, and its own precision.

        Raises:
            InputError: there is no such device, or the module cannot be moved to it.
        """
        parts = {tensor.device for tensor in _tensors(self.module)}
        if any(part.type == "meta" for part in parts):
            raise InputError(
                f"{self}: some of its weights are on the device meta, where tensors have no "
                "numbers; load them first"
            )
        chosen = self.device if device == "auto" else device
        if chosen == "auto":
            first = next((tensor.device for tensor in _tensors(self.module)), "cpu")
            chosen = torch.device(first)
        elif len(parts) > 1:
            places = ", ".join(sorted(map(str, parts)))
            raise InputError(
                f"{self}: its weights are spread over {places} and stay there; leave device=auto, "
                f"got {chosen}"
            )
        precision = False if mixed_precision == "auto" else mixed_precision
        return batch_size or self.batch_size, resolve_device(chosen), precision

    def _digest(self) -> str:
        return content_digest((self.module, self.prepare, self.forward))


@takes()
def from_module(
    net: nn.Module,
    transform: Callable[[Any], Any] | None = None,
    *,
    layer: Word | None = None,
    batch_size: Count = 256,
    device: str | torch.device = "auto",
) -> ModuleFeatures:
    """Make any PyTorch module an extractor of features (b, d).

    `embed(dataset, net)` is short for `embed(dataset, from_module(net))`. The module runs in
    evaluation mode, without gradients, in the precision of its own weights (`embed`'s
    `mixed_precision=True` asks for autocast). Afterwards every submodule is in the mode, and the
    weights are on the device, that they were in before, also after an error.

    The module must return one row per input: (b, d), or (b, c, h, w), of which the mean over space
    is taken, (b, c). Other outputs are refused; `layer` takes those of a submodule instead.

    With `cache_dir`, features are cached by the content of module and transform: weights, buffers,
    settings, and the code of classes and functions that are not of an installed package. Where
    that cannot be told, a notice says so and they are not cached.

    Args:
        net: the module. It is not copied: features are of its weights at the time of `embed`.
        transform: makes of one input the tensor that the module takes, without a batch dimension.
            It gets what the dataset holds: an image of PIL, a text, an array or a tensor. Without
            it, tensors go in as they are, and so do arrays, floating-point numbers in the type of
            the weights; images of PIL, images as arrays of integers, and texts are refused.
        layer: name of a submodule, as in `net.named_modules()`, whose output to take. It must run
            once per forward pass.
        batch_size: inputs per forward pass.
        device: where to run; "auto" leaves the module where it is. On another device it is moved
            there while it runs and then back.

    Raises:
        InputError: no such layer. `embed` raises it for inputs and outputs of other forms, and for
            what the module or the transform raises.

    Example:
        >>> net = torchvision.models.resnet18(weights="DEFAULT")
        >>> features = otdd.extractors.from_module(net, prepare, layer="avgpool")
        >>> samples = otdd.embed(dataset, features, cache_dir="features")
    """
    if not isinstance(net, nn.Module):
        raise refused("net", "be a torch.nn.Module; from_callable takes functions", net)
    if layer is not None:
        _require_layer(net, layer)
    kind = type(getattr(net, "_orig_mod", net)).__qualname__
    said = [kind]
    if transform is not None:
        said.append(f"transform={getattr(transform, '__qualname__', type(transform).__qualname__)}")
    if layer is not None:
        said.append(f"layer={layer!r}")
    dtype = next((t.dtype for t in _tensors(net) if t.is_floating_point()), torch.float32)
    return ModuleFeatures(
        description=f"from_module({', '.join(said)})",
        module=net,
        modalities=frozenset({"image", "text", "array"}),
        prepare=ModuleInput(transform, dtype),
        forward=ModuleOutput(kind, layer),
        batch_size=batch_size,
        device=device,
    )


@dataclass(frozen=True)
class ModuleInput:
    """One input as the tensor that the module takes, by a transform or as it is."""

    transform: Callable[[Any], Any] | None
    dtype: torch.dtype

    def __call__(self, item: Any) -> Tensor:
        """The tensor, without a batch dimension."""
        if self.transform is not None:
            with user_code("transform"):
                item = self.transform(item)
        if isinstance(item, Tensor):
            return item
        is_array = isinstance(item, np.ndarray | np.number) and item.dtype.kind in "fiub"
        if is_array and (self.transform is not None or item.dtype not in STORED):
            values = torch.as_tensor(np.asarray(item))
            return values.to(self.dtype) if values.is_floating_point() else values
        if self.transform is not None:
            raise InputError(
                f"transform must return a tensor without the batch dimension, got {shown(item)}"
            )
        raise InputError(f"a network takes tensors, and the inputs are {_what_to_pass(item)}")


def _what_to_pass(item: Any) -> str:
    """Describe an input that is not a tensor, and say how to make it one."""
    if isinstance(item, str):
        return (
            "texts; pass transform=..., which makes a tensor of one text, such as the numbers of "
            "its tokens"
        )
    if isinstance(item, Image.Image):
        kind = f"images of PIL such as {item.mode} {item.width} x {item.height}"
    elif isinstance(item, np.ndarray) and item.dtype in STORED:
        kind = f"images as arrays {item.shape} of {item.dtype}"
    else:
        return f"{shown(item)}; pass transform=..., which makes a tensor of one of them"
    return (
        f"{kind}; pass transform=..., such as torchvision.transforms.ToTensor(), which makes a "
        "tensor (c, h, w) in [0, 1] of one of them"
    )


@dataclass(frozen=True)
class ModuleOutput:
    """A forward pass, and of what it or one of its submodules returns one row per input."""

    kind: str
    layer: str | None

    def __call__(self, module: nn.Module, items: list[Tensor]) -> Tensor:
        """Features (b, d) of b prepared inputs."""
        shapes = list(dict.fromkeys(tuple(item.shape) for item in items))
        if len(shapes) > 1:
            raise InputError(
                f"inputs must be of one shape to form a batch, got {shapes[0]} and {shapes[1]}; "
                "pass transform=..., which resizes, cuts or pads them"
            )
        place = next((tensor.device for tensor in _tensors(module)), items[0].device)
        batch = torch.stack(items).to(place)
        if self.layer is None:
            with user_code(f"network {self.kind}"):
                output = module(batch)
            return self._rows(output, len(items))
        # A compiled module would run past hooks that are added later.
        module = getattr(module, "_orig_mod", module)
        outputs: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # A copy: the next layer may change it in place.
            outputs.append(self._rows(output, len(items)).clone())

        handle = module.get_submodule(self.layer).register_forward_hook(keep)
        try:
            with user_code(f"network {self.kind}"):
                module(batch)
        finally:
            handle.remove()
        if len(outputs) != 1:
            times = f"runs {len(outputs)} times" if outputs else "does not run"
            raise InputError(
                f"layer={self.layer!r} of {self.kind} {times} in a forward pass; choose one that "
                "runs once"
            )
        return outputs[0]

    def _rows(self, output: Any, count: int) -> Tensor:
        """The output as features (b, d)."""
        of = f"{self.kind}" if self.layer is None else f"layer={self.layer!r} of {self.kind}"
        if not isinstance(output, Tensor):
            raise InputError(f"{of} returns {_described(output)}; {self._way_out()}")
        if output.ndim == 4:
            output = output.mean((2, 3))
        if output.ndim != 2 or len(output) != count:
            raise InputError(
                f"{of} must return (b, d) or (b, c, h, w) with one row for each of {count} inputs, "
                f"got {tuple(output.shape)}; {self._way_out()}"
            )
        if output.is_complex():
            raise InputError(f"{of} must return real features, got {output.dtype}; {WRAP}")
        check_integers(of, output)
        rows: Tensor = output
        return rows

    def _way_out(self) -> str:
        other = "another layer" if self.layer else "layer=NAME"
        return f"take the output of {other}, a submodule that returns such rows, or {WRAP}"


def _described(output: Any) -> str:
    """Describe an output that is not a tensor by its type and the shapes of its parts."""
    if isinstance(output, dict):
        parts = [f"{name}: {_shape(part)}" for name, part in output.items()]
    elif isinstance(output, tuple | list):
        parts = [_shape(part) for part in output]
    else:
        return shown(output)
    return f"{type(output).__qualname__} ({listing(parts, NAMED)})"


def _shape(part: Any) -> str:
    return str(tuple(part.shape)) if isinstance(part, Tensor) else shown(part)


def _require_layer(net: nn.Module, layer: str) -> None:
    names = [name for name, _ in net.named_modules() if name]
    if layer in names:
        return
    # A compiled module's names have a prefix that its original's, which runs, have not.
    inside = [name.removeprefix("_orig_mod.") for name in names]
    if layer in inside and hasattr(net, "_orig_mod"):
        return
    near = [name for name in inside if name.endswith(f".{layer}") or name.startswith(f"{layer}.")]
    near = near or get_close_matches(layer, inside, n=NAMED, cutoff=0.5) or inside
    hint = f"close names: {listing(near, NAMED)}" if near else "it has none"
    raise InputError(f"{type(net).__qualname__} has no submodule {layer!r}; {hint}")


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
