"""`from_module`: the extractor around a user's own PyTorch module, and the digest of its content.

`otdd_flash.extractors` exports `from_module`, and `extractors.embedding` applies it to a module
that `embed` is given. A change must leave the module as it was (modes, device, also after an
error), and must keep `key` a digest of all that determines the features (`content_digest`), since
features are cached by it. Errors of the user's code are reported with the code's name.

`study.setup` makes `content_digest` a part of study.json and of the keys of training units, so two
objects with one digest must compute the same. It covers:

    a tensor                              type, shape and values, on whatever device
    a network (nn.Module)                 its class and all that it holds except its mode:
                                          parameters, buffers, settings, submodules in order, hooks
    a function or class of an installed   its name and the version of its package
      package, or of this one
    any other function or class           its bytecode, defaults, bases, what it closes over and the
                                          global values that it names
    a Python module                       name and version, or the content of its file
    anything else                         its state, as pickle takes it

An object without such a state (an open file, a lock, an object of a C extension that pickle
refuses) has no digest. A change must keep the digest the same in every process: a digest may hold
no address, no count of this process and no order that a process chooses. If a change gives a
network another digest, its cached features are computed again, and a study with such a network
cannot be resumed in its folder.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from joblib.hashing import NumpyHasher
from PIL import Image
from torch import Tensor, nn

from otdd_flash import __version__
from otdd_flash.arguments import Count, Word, takes
from otdd_flash.checks import refused, shown
from otdd_flash.devices import resolve_device
from otdd_flash.errors import InputError
from otdd_flash.extractors.network import Network
from otdd_flash.files.tensor_file import content_hash
from otdd_flash.plugins import user_code
from otdd_flash.real_numbers import check_integers
from otdd_flash.shown import listing

WRAP = "wrap the network in a module whose forward returns one row of features per input"
# Types in which arrays hold images; networks expect another range and order of dimensions.
STORED = (np.uint8, np.uint16, np.bool_)
# Number of submodules named in a message.
NAMED = 5


@dataclass(frozen=True, eq=False, repr=False)
class ModuleFeatures(Network):
    """The extractor around a user's PyTorch module; see `from_module`.

    Attributes:
        batch_size: inputs per forward pass if `embed` is given none.
        device: where the module runs if `embed` says "auto". If this is "auto" too, it runs where
            its first weight is.
    """

    batch_size: Count = 256
    device: str | torch.device = "auto"

    @property
    def key(self) -> str:
        """The description with a digest of module and transform, or alone if there is no digest."""
        return self._identity()[0]

    @property
    def unidentified(self) -> str:
        """The reason why a cache cannot identify the features; empty if it can."""
        return self._identity()[1]

    @property
    def cacheable(self) -> bool:
        """Whether a digest identifies all that determines the features."""
        return not self.unidentified

    def __repr__(self) -> str:
        return self.description

    def __call__(self, batch: Any) -> Tensor:
        """Compute the features (n, d) of n inputs, on the CPU."""
        batch_size, device, _ = self.settings(None, "auto", "auto")
        return torch.cat([*self.stream(batch, batch_size=batch_size, device=device)])

    def settings(
        self,
        batch_size: int | None,
        device: str | torch.device,
        mixed_precision: bool | Literal["auto"],
    ) -> tuple[int, torch.device, bool]:
        """Return batch size, device and precision of a call, with the module's own as defaults.

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

    def _identity(self) -> tuple[str, str]:
        """Return the key, and the reason why it does not identify the features; "" if it does."""
        parts: tuple[Any, ...] = (self.module, self.prepare, self.forward)
        transform = getattr(self.prepare, "transform", None)
        if isinstance(transform, nn.Module):
            # `embed` puts only the network into evaluation mode. A transform keeps its mode, which
            # changes its result and is not in the content's digest.
            parts = (*parts, [part.training for part in transform.modules()])
        try:
            return f"{self.description} {content_digest(parts)}", ""
        except Unidentified as error:
            return self.description, f"{self} holds what has no content to tell it by ({error})"


# `takes` checks arguments by their annotations.
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
    `mixed_precision=True` asks for autocast). Afterwards every submodule has its previous mode, and
    the weights are on their previous device, also after an error.

    The module must return one row per input: (b, d), or (b, c, h, w), whose mean over space is
    taken, (b, c). Other outputs are refused; `layer` takes the output of a submodule instead.

    With `cache_dir`, features are cached by the content of module and transform: weights, buffers,
    settings, and the code of classes and functions that are not of an installed package. If that
    content cannot be determined, a notice says so and they are not cached.

    Args:
        net: the module. It is not copied: features are of its weights at the time of `embed`, which
            must still have the type that they have now.
        transform: converts one input to the tensor that the module takes, without a batch
            dimension. Its argument is an item of the dataset: a PIL image, a text, an array or a
            tensor. Without a transform, tensors are passed unchanged; arrays become tensors,
            floating-point ones in the type of the weights. PIL images, texts, and arrays of the
            types in which images are stored (uint8, uint16, bool) are refused.
        layer: name of a submodule, as in `net.named_modules()`, whose output to take. It must run
            once per forward pass.
        batch_size: inputs per forward pass.
        device: where to run; "auto" leaves the module where it is. To another device it is moved
            for the extraction and then back.

    Raises:
        InputError: no such layer. `embed` raises it for inputs and outputs of other forms, and for
            errors of the module or the transform.

    Example:
        >>> net = torchvision.models.resnet18(weights="DEFAULT")
        >>> features = otdd.extractors.from_module(net, prepare, layer="avgpool")
        >>> samples = otdd.embed(dataset, features, cache_dir="features")
    """
    if not isinstance(net, nn.Module):
        raise refused("net", "be a torch.nn.Module; from_callable takes functions", net)
    if layer is not None:
        layer = _layer_of(net, layer)
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
    """Converter of one input to the tensor that the module takes."""

    transform: Callable[[Any], Any] | None
    dtype: torch.dtype

    def __call__(self, item: Any) -> Tensor:
        """Return the tensor, without a batch dimension."""
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
    """A forward pass whose output, or a submodule's, is one row of features per input."""

    kind: str
    layer: str | None

    def __call__(self, module: nn.Module, items: list[Tensor]) -> Tensor:
        """Compute the features (b, d) of b prepared inputs."""
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
        # A compiled module would not run hooks that are added later.
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
            # A hook that stayed would run in every later pass of the user's module, and refuse
            # batches of another size.
            handle.remove()
        if len(outputs) != 1:
            times = f"runs {len(outputs)} times" if outputs else "does not run"
            raise InputError(
                f"layer={self.layer!r} of {self.kind} {times} in a forward pass; choose one that "
                "runs once"
            )
        return outputs[0]

    def _rows(self, output: Any, count: int) -> Tensor:
        """Return the output as features (b, d)."""
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


def _layer_of(net: nn.Module, layer: str) -> str:
    """Return the name of a layer in the module that runs, which is the original of a compiled one.

    Raises:
        InputError: there is no such submodule.
    """
    original = getattr(net, "_orig_mod", net)
    names = [name for name, _ in original.named_modules() if name]
    # A compiled module's names have a prefix that those of the original lack.
    wanted = layer if original is net else layer.removeprefix("_orig_mod.")
    if wanted in names:
        return wanted
    near = [name for name in names if name.endswith(f".{wanted}") or name.startswith(f"{wanted}.")]
    near = near or get_close_matches(wanted, names, n=NAMED, cutoff=0.5) or names
    hint = f"close names: {listing(near, NAMED)}" if near else "it has none"
    raise InputError(f"{type(net).__qualname__} has no submodule {layer!r}; {hint}")


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


class Unidentified(Exception):
    """An object has no digest; the message says why."""


def content_digest(thing: Any) -> str:
    """Return a digest of an object, the same in every process.

    Raises:
        Unidentified: some part of it has no readable state.
    """
    try:
        return str(_Hasher(hash_name="sha256").hash(thing))
    except Exception as error:
        # Other packages' objects raise anything when asked for their state.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Unidentified(reason) from error


class _Hasher(NumpyHasher):  # type: ignore[misc]
    """joblib's hash of what pickle reads, with content instead of names and addresses."""

    # Without entries by dill, which Python's pickler has if dill was imported before joblib: the
    # digest would depend on the order of imports.
    dispatch: ClassVar = {
        kind: way
        for kind, way in NumpyHasher.dispatch.items()
        if not way.__module__.startswith("dill")
    }

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Networks, functions and classes by id: the object itself, so that its id is not given to
        # another, and its number in the order of appearance. Where it appears again, also inside
        # itself, that number is written.
        self._seen: dict[int, tuple[Any, int]] = {}

    # Dicts are written in the order of insertion. joblib's own method sorts them, and takes any
    # TypeError from inside for a sign that keys cannot be sorted.
    _batch_setitems = pickle._Pickler._batch_setitems  # type: ignore[attr-defined]

    def save(self, obj: Any) -> None:
        """Write one object, or a substitute that holds its content."""
        super().save(self._content(obj))

    def _content(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return "tensor", content_hash({"": obj})
        if isinstance(obj, set | frozenset):
            # The order of a set differs between processes.
            return "set", sorted(map(content_digest, obj))
        if isinstance(obj, CodeType):
            return obj.co_code, obj.co_consts, obj.co_names, obj.co_varnames, obj.co_freevars
        if isinstance(obj, property):
            # A setter or deleter may do what forward depends on; most properties have neither.
            changing = (obj.fset, obj.fdel)
            return "property", obj.fget, *(changing if any(changing) else ())
        if isinstance(obj, staticmethod | classmethod):
            return type(obj).__name__, obj.__func__
        if isinstance(obj, ModuleType):
            # A module of a package is its name and version, a user's the content of its file.
            return _package(obj.__name__) or Path(str(obj.__file__)).read_bytes()
        if not isinstance(obj, nn.Module | FunctionType | type):
            return obj
        named = isinstance(obj, FunctionType | type)
        if named and (package := _package(obj.__module__)) is not None:
            return package, obj.__qualname__
        if id(obj) in self._seen:
            return "again", self._seen[id(obj)][1]
        self._seen[id(obj)] = obj, len(self._seen)
        if isinstance(obj, nn.Module):
            return _state(obj)
        if isinstance(obj, FunctionType):
            return _function(obj)
        # A class. Its attributes with two underscores that are no functions, and the caches of
        # abstract classes, differ between versions of Python and do not affect results.
        members = {
            name: value
            for name, value in vars(obj).items()
            if isinstance(value, FunctionType) or not name.startswith(("__", "_abc_"))
        }
        return obj.__qualname__, obj.__bases__, members


def _state(module: nn.Module) -> Any:
    """Return what determines a module's output: weights, settings and hooks."""
    if (original := module._modules.get("_orig_mod")) is not None:
        # The result of torch.compile: the original module stands for it.
        return "compiled", original
    state = {
        # Hooks without their keys, which are numbers that this process counts.
        name: list(value.values() if "_hooks" in name else value.items())
        if isinstance(value, dict)
        else value
        for name, value in vars(module).items()
        # Extraction sets the mode of the network (`network.evaluating`), and a module compiled in
        # place computes the same.
        if name not in ("training", "_compiled_call_impl")
    }
    return type(module), state


def _function(function: FunctionType) -> Any:
    """Return a function's code, and the outside values that it uses."""
    names: set[str] = set()
    # The code of nested functions is appended on the way.
    codes = [function.__code__]
    for code in codes:
        names.update(code.co_names)
        codes.extend(part for part in code.co_consts if isinstance(part, CodeType))
    # `co_names` also holds attributes; one that is a global too only makes the digest finer.
    known = sorted(names & function.__globals__.keys())
    used = [(name, function.__globals__[name]) for name in known]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = function.__defaults__, function.__kwdefaults__
    return function.__code__, defaults, cells, used, vars(function)


def _package(module: str) -> str | None:
    """Return name and version of the package of a module; None for a user's own code."""
    root = module.partition(".")[0]
    if root == __package__.partition(".")[0]:
        # A checkout of this package is not in site-packages; without this, the code of its modules
        # would enter the digest.
        return f"{module} {__version__}"
    if root in sys.stdlib_module_names:
        return f"{module} {sys.version_info[:2]}"
    package = sys.modules.get(root)
    places = [getattr(package, "__file__", None) or "", *getattr(package, "__path__", ())]
    installed = {"site-packages", "dist-packages"}
    if not any(installed.intersection(Path(place).parts) for place in places):
        return None
    # A package without `__version__` has one digest in all its versions.
    return f"{module} {getattr(package, '__version__', '')}"
