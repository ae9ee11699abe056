"""What `gradient_flow` and its options accept: a check per argument or field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otdd_flash.arguments.values import (
    CALLBACKS_CLASS,
    CHECKPOINTS_CLASS,
    FLOW_CLASS,
    FUNCTIONAL_CLASS,
    PAIR,
    STEPPING_CLASS,
    any_number,
    compute,
    cost,
    count,
    labels,
    positive,
    seed,
    solver,
)
from otdd_flash.checks import (
    Declaration,
    called,
    flag,
    function,
    instance,
    integer,
    is_a,
    mapping,
    optional,
    path,
    refused,
    sequence,
    text,
)


def functional(name: str, value: Any) -> Any:
    """A weighted functional, or what `build_functionals` makes one from."""
    if not is_a(value, FUNCTIONAL_CLASS) and not isinstance(value, Mapping):
        raise refused(name, "be a mapping such as {name: norm, weight: 0.1}", value)
    return value


GRADIENT_FLOW: Declaration = {
    **PAIR,
    "flow": optional(instance("be an otdd.Flow", FLOW_CLASS)),
    "epsilon": optional(positive),
    "epsilon_relative": optional(positive),
    "labels": labels,
    "min_class_size": optional(count),
    "cost": cost,
    "solver": solver,
    "compute": optional(compute),
    "cache_dir": optional(path),
    "callbacks": optional(instance("be otdd.Callbacks", CALLBACKS_CLASS)),
}
FLOW: Declaration = {
    # Ranges are checked where they are explained.
    "steps": integer(at_least=None),
    "mode": text,
    "stepping": instance("be a Stepping", STEPPING_CLASS),
    "functionals": sequence(called("a functional", functional)),
    "refresh": integer(at_least=None),
    "tolerance": optional(any_number),
    "keep_moments": flag,
    "seed": called("seed", seed),
    "checkpoints": optional(instance("be Checkpoints", CHECKPOINTS_CLASS)),
}
CALLBACKS: Declaration = {
    "progress": optional(function),
    "solver_progress": optional(function),
    "class_progress": optional(function),
    "stop": optional(function),
}
PLOT_FLOW: Declaration = {"image_shape": optional(sequence(count, length=3))}
# Keywords that one may expect of it, and where they are.
GRADIENT_FLOW_ELSEWHERE = {
    **{key: f"flow=otdd.Flow({key}=...)" for key in (*FLOW, "space")},
    **{key: f"callbacks=otdd.Callbacks({key}=...)" for key in CALLBACKS},
    **{key: f"cost=otdd.GroundCost({key}=...)" for key in ("lambda_x", "lambda_y")},
    "class_distances": "labels=otdd.labels.Given(table)",
}
STEPPING: Declaration = {
    # Their ranges are those of the settings flow.KEY.
    "step_size": any_number,
    "optimizer": text,
    "optimizer_options": mapping(),
    "schedule": text,
    "box": optional(sequence(any_number)),
    "noise": any_number,
    "minibatch": optional(integer(at_least=None)),
}
CHECKPOINTS: Declaration = {"folder": path, "every": integer(at_least=None), "resume": flag}
