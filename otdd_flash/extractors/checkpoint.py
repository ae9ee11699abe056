"""Weights for networks without classifier: from a checkpoint file, or random ones from a seed.

`extractors.vision_models` calls it; `study.training` uses `seeded_weights`. A checkpoint must fit
the network exactly; it may only hold a classifier, which is ignored, and lack batch counters. If it
does not fit, the error names the models of timm that it fits, if any. Files are loaded without
running code in them (`tests/extractors/test_image_models.py`).

`timm_shapes.json` holds, for every model of timm 1.0.31 without its classifier, a digest of its
tensors' shapes, whatever their names and order; `experiments.timm_shapes` writes it. So a model is
found without building timm's 1,400 models. It is built and compared before it is named, since timm
changes. Digests of shapes are added up, so that the digest of any layer of a checkpoint that may be
the classifier can be subtracted again (`_without_classifier`). After a change of `shapes_digest` or
`_digest` the file must be written anew, because its keys are these digests.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor, nn

from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.files.tensor_file import DamagedFileError, load_torch_file

# How training scripts wrap the weights: under a key, or with a prefix on every name.
WRAPPERS = ("state_dict", "model")

PREFIXES = ("module.", "_orig_mod.")

# Names that a message lists.
NAMED = 3

# Models of timm that are built to compare them with a checkpoint, a second each.
BUILT = 8

GIVE_ANOTHER = "it is damaged, or no checkpoint: give an undamaged .pt, .pth or .safetensors file"


def load_checkpoint(module: nn.Module, file: str, heads: tuple[str, ...]) -> None:
    """Load the weights in `file` (.pt, .pth or .safetensors) into `module`.

    Args:
        module: the network without its classifier.
        file: a state dict, possibly under `state_dict` or `model`, possibly with names that start
            with `module.` as DistributedDataParallel writes them.
        heads: names of the classifier modules, whose weights in the file are ignored.

    Raises:
        InputError: the file cannot be read, or its weights are not those of the network.
    """
    path = Path(file)
    state = read_weights(path)
    problems = _mismatches(state, module.state_dict(), heads)
    if problems:
        raise InputError(
            f"checkpoint {path} does not fit {type(module).__name__}: {'; '.join(problems)}; "
            f"{_models_that_fit(state)}"
        )
    # Loading is not strict, for classifiers and for batch counters, which old files lack and
    # evaluation ignores.
    module.load_state_dict(state, strict=False)


def classifiers(module: Any) -> tuple[str, ...]:
    """Return the names of a timm model's classifier modules, from its configuration."""
    names = module.pretrained_cfg.get("classifier") or ()
    return (names,) if isinstance(names, str) else tuple(names)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a state dict (.pt, .pth or .safetensors), with or without a training script's wrapping.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """
    return _unwrapped(_read(path), path)


def _read(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"no checkpoint file {path}; give a .pt, .pth or .safetensors file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return load_torch_file(path)
    except DamagedFileError as error:
        raise InputError(f"cannot read checkpoint {path}: {error}; {GIVE_ANOTHER}") from None
    except OSError as error:
        raise InputError(f"cannot read checkpoint {path}: {error.strerror or error}") from None
    except pickle.UnpicklingError:
        # torch's own message advises running the code that the file may hold.
        raise InputError(
            f"cannot read checkpoint {path}: it is damaged, or holds more than tensors; save "
            "tensors only, with torch.save(model.state_dict(), FILE)"
        ) from None
    except Exception as error:
        # Damage raises many kinds of errors.
        reason = (str(error) or repr(error)).splitlines()[0]
        raise InputError(f"cannot read checkpoint {path} ({reason}); {GIVE_ANOTHER}") from None


def _unwrapped(content: Any, path: Path) -> dict[str, Tensor]:
    while isinstance(content, Mapping):
        inner = next(
            (content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), None
        )
        if inner is None:
            break
        content = inner
    if not isinstance(content, Mapping) or not content:
        raise InputError(f"checkpoint {path} holds no state dict but a {type(content).__name__}")
    state = {str(name): value for name, value in content.items()}
    # All prefixes are tried twice, as a name may have both, in either order.
    for prefix in PREFIXES * 2:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    strange = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if strange:
        raise InputError(
            f"checkpoint {path} holds more than weights ({_some(strange)}); keep the state dict "
            f"alone, or under one of the keys {', '.join(WRAPPERS)}"
        )
    return state


def _models_that_fit(state: Mapping[str, Tensor]) -> str:
    """Say which models of timm the weights fit: under the names they have, or by shapes alone."""
    fitting: list[str] = []
    alike: list[str] = []
    for name, module in islice(models_like(state), BUILT):
        misfit = _mismatches(state, module.state_dict(), classifiers(module))
        (alike if misfit else fitting).append(name)
    if len(fitting) == 1:
        name = fitting[0]
        return f"it fits timm's {name}: give extractor=timm extractor.model={name}"
    if fitting:
        return (
            f"it fits timm's {_some(fitting)}; choose the one that it was saved from with "
            "extractor=timm extractor.model=NAME"
        )
    if alike:
        return (
            f"timm's {_some(alike)} {'have' if len(alike) > 1 else 'has'} tensors of these shapes "
            "under other names: rename them to those of its state_dict()"
        )
    return (
        "no model of timm has tensors of these shapes; choose the model that it was saved from "
        "with extractor.model=NAME, or load it into your own network for "
        "otdd_flash.extractors.from_module"
    )


def _mismatches(
    state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], heads: tuple[str, ...]
) -> list[str]:
    ignored = tuple(f"{head}." for head in heads)
    state = {
        name: tensor
        for name, tensor in state.items()
        if name in wanted or not name.startswith(ignored)
    }
    missing = [n for n in wanted if n not in state and not n.endswith("num_batches_tracked")]
    unknown = [name for name in state if name not in wanted]
    misshapen = [
        f"{name} {tuple(state[name].shape)} for {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in state and state[name].shape != tensor.shape
    ]
    kinds = (("missing", missing), ("unknown", unknown), ("of another shape", misshapen))
    return [f"{len(names)} {kind} ({_some(names)})" for kind, names in kinds if names]


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


TABLE = Path(__file__).with_name("timm_shapes.json")

MODULUS = 1 << 64


def shapes_digest(shapes: Iterable[Size | tuple[int, ...]]) -> int:
    """Return the sum of the digests of shapes, except scalars such as batch counters."""
    return sum(_digest(tuple(shape)) for shape in shapes if len(shape)) % MODULUS


def models_like(state: Mapping[str, Tensor]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the timm models that have exactly the tensor shapes of a checkpoint.

    These are the shapes of the whole checkpoint, or of what remains without a classifier.

    Yields:
        Name and module, on the device meta and without its classifier.
    """
    import timm

    table: dict[str, str] = json.loads(TABLE.read_text(encoding="utf-8"))
    for digest in _without_classifier(state):
        for name in table.get(f"{digest:016x}", "").split():
            if not timm.is_model(name):
                continue
            with torch.device("meta"):
                module = timm.create_model(name, num_classes=0)
            if shapes_digest(t.shape for t in module.state_dict().values()) == digest:
                yield name, module


def _without_classifier(state: Mapping[str, Tensor]) -> list[int]:
    """Return digests of a checkpoint's shapes, whole and without possible classifiers."""
    whole = shapes_digest(tensor.shape for tensor in state.values())
    digests = [whole]
    for tensor in state.values():
        # A layer (k, d), or a convolution (k, d, 1, 1), with a bias (k,) or without.
        if tensor.ndim < 2 or tensor.shape[2:].numel() > 1:
            continue
        for head in ([tensor.shape], [tensor.shape, tensor.shape[:1]]):
            # Distilled transformers have two classifiers of one shape.
            digests += [(whole - count * shapes_digest(head)) % MODULUS for count in (1, 2)]
    return list(dict.fromkeys(digests))


def _digest(shape: tuple[int, ...]) -> int:
    return int.from_bytes(hashlib.sha256(repr(shape).encode()).digest()[:8], "little")


@contextmanager
def seeded_weights(seed: int) -> Iterator[None]:
    """Initialise weights from `seed` inside this context; restore torch's generator afterwards.

    Modules initialise themselves from the global CPU generator, and there is no other way to seed
    them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def notice_random_features(model: str, seed: int, trained: str) -> None:
    """Warn that `model` has random weights; `trained` is the setting for trained ones."""
    warn(
        f"{model} has random weights (seed {seed}), so its features are random; for trained ones "
        f"give {trained} or extractor.checkpoint=FILE",
        DataNotice,
    )
