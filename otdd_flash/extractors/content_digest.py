"""A digest of an object by content: weights, settings, and the code of functions and classes.

`extractors.module_features` makes it a part of the cache key of a user's own network, and
`study.setup` a part of study.json and of the keys of training units, so two objects with one
digest must compute the same. It covers:

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
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

from joblib.hashing import NumpyHasher
from torch import Tensor, nn

from otdd_flash import __version__
from otdd_flash.files.tensor_file import content_hash


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
