"""A digest of an object by content: weights, settings, and the code of functions and classes.

`extractors.module_features` uses it as the cache key of a user's own network, so two objects with
one digest must compute the same. It covers:

    a tensor                              type, shape and values, on whatever device
    a module of PyTorch                   its class and all that it holds but its mode: parameters,
                                          buffers, settings, submodules in order, hooks
    a function or class of an installed   its name and the version of its package
      package, or of this one
    any other function or class           its bytecode, defaults, bases, what it closes over and the
                                          global values that it names
    a module of Python                    name and version, or the content of its file
    anything else                         its state, as pickle takes it

An object without such a state (an open file, a lock, compiled code) has no digest. The digest must
be the same in every process.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

from joblib.hashing import NumpyHasher
from torch import Tensor, nn

from otdd_flash.files.tensor_file import content_hash
from otdd_flash.version import __version__


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

    # dill adds its own entries to Python's pickler if it was imported before joblib.
    dispatch: ClassVar = {
        kind: way
        for kind, way in NumpyHasher.dispatch.items()
        if not way.__module__.startswith("dill")
    }

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # Objects by id, kept alive, with their order of appearance: some refer to themselves.
        self._seen: dict[int, tuple[Any, int]] = {}

    # In the order of insertion. joblib sorts, and takes any TypeError inside for unsortable keys.
    _batch_setitems = pickle._Pickler._batch_setitems  # type: ignore[attr-defined]

    def save(self, obj: Any) -> None:
        """Write one object, or a substitute that holds its content."""
        super().save(self._content(obj))

    def _content(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return "tensor", content_hash({"": obj})
        if isinstance(obj, set | frozenset):
            return "set", sorted(map(content_digest, obj))
        if isinstance(obj, CodeType):
            return obj.co_code, obj.co_consts, obj.co_names, obj.co_varnames, obj.co_freevars
        if isinstance(obj, property):
            return "property", obj.fget
        if isinstance(obj, staticmethod | classmethod):
            return type(obj).__name__, obj.__func__
        if isinstance(obj, ModuleType):
            return _package(obj.__name__) or Path(str(obj.__file__)).read_bytes()
        if not isinstance(obj, nn.Module | FunctionType | type):
            return obj
        named = isinstance(obj, FunctionType | type)
        if named and (package := _package(obj.__module__)) is not None:
            return package, obj.__qualname__
        if id(obj) in self._seen:
            return "again", self._seen[id(obj)][1]
        self._seen[id(obj)] = obj, len(self._seen)
        match obj:
            case nn.Module():
                return _state(obj)
            case FunctionType():
                return _function(obj)
        # Python's own entries differ between its versions and do not affect results.
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
        name: list(value.values() if name.endswith("_hooks") else value.items())
        if isinstance(value, dict)
        else value
        for name, value in vars(module).items()
        # A module compiled in place computes the same.
        if name not in ("training", "_compiled_call_impl")
    }
    return type(module), state


def _function(function: FunctionType) -> Any:
    """Return a function's code, and the outside values that it uses."""
    names: set[str] = set()
    codes = [function.__code__]
    for code in codes:
        names.update(code.co_names)
        codes.extend(part for part in code.co_consts if isinstance(part, CodeType))
    known = sorted(names & function.__globals__.keys())
    used = [(name, function.__globals__[name]) for name in known]
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = function.__defaults__, function.__kwdefaults__
    return function.__code__, defaults, cells, used, vars(function)


def _package(module: str) -> str | None:
    """Return name and version of the package of a module; None for a user's own code."""
    root = module.partition(".")[0]
    if root == __package__.partition(".")[0]:
        # A checkout is not in site-packages, and the state of its modules would enter the digest.
        return f"{module} {__version__}"
    if root in sys.stdlib_module_names:
        return f"{module} {sys.version_info[:2]}"
    package = sys.modules.get(root)
    places = [getattr(package, "__file__", None) or "", *getattr(package, "__path__", ())]
    installed = {"site-packages", "dist-packages"}
    if not any(installed.intersection(Path(place).parts) for place in places):
        return None
    return f"{module} {getattr(package, '__version__', '')}"
