"""Nests of containers, numbers, texts and tensors, as JSON and tensors by name.

Reading one runs no code: of classes, only those of `TYPES` are made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from otdd_flash.flows.history import Moment, StepRecord
from otdd_flash.labels import ClassDistances
from otdd_flash.solver.term.result import TransportTerm

# What the state of a flow holds beside tensors, numbers, texts and containers. Files have these
# names, which stay where a class is renamed, and the names of its fields.
TYPES: dict[str, Any] = {
    "ClassDistances": ClassDistances,
    "Moment": Moment,
    "StepRecord": StepRecord,
    "TransportTerm": TransportTerm,
}

# The tensor that holds the JSON: texts of a safetensors file are bounded in length.
OUTLINE = "outline.json"


def taken_apart(nest: Any) -> dict[str, Tensor]:
    """Tensors by their place in a nest, and its outline as bytes of JSON, a tensor too."""
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def outline(part: Any, place: str) -> Any:
        match part:
            case None | bool() | int() | float() | str():
                return part
            case Tensor():
                # Two places may share a tensor, as the potentials of a self term do.
                name = names.setdefault(id(part), place)
                tensors[name] = part
                return {"tensor": name, "on_cpu": part.device.type == "cpu"}
            case Mapping():
                found = [[key, outline(each, f"{place}.{key}")] for key, each in part.items()]
                return {"dict": found}
        for name, kind in TYPES.items():
            if type(part) is kind:
                held = _fields(part)
                return {name: {key: outline(each, f"{place}.{key}") for key, each in held.items()}}
        found = [outline(each, f"{place}.{row}") for row, each in enumerate(part)]
        return {"tuple" if isinstance(part, tuple) else "list": found}

    text = json.dumps(outline(nest, "state")).encode()
    return {**tensors, OUTLINE: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def put_together(tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """The nest that was taken apart, with tensors on `device`, or on the CPU if they were there.

    Raises:
        LookupError, TypeError, ValueError: these are no parts of a nest.
    """

    def nest(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        if "tensor" in part:
            tensor = tensors[part["tensor"]]
            return tensor if part["on_cpu"] else tensor.to(device)
        ((kind, held),) = part.items()
        match kind:
            case "dict":
                return {key: nest(each) for key, each in held}
            case "tuple":
                return tuple(map(nest, held))
            case "list":
                return [*map(nest, held)]
        return TYPES[kind](**{key: nest(each) for key, each in held.items()})

    return nest(json.loads(tensors[OUTLINE].numpy().tobytes()))


def _fields(part: Any) -> dict[str, Any]:
    if is_dataclass(part):
        return {field.name: getattr(part, field.name) for field in fields(part)}
    return dict(part._asdict())
