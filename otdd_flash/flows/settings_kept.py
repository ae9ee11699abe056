"""What a flow depended on, by the keys of the command line: kept with results and checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from otdd_flash.flows.flow import Flow
from otdd_flash.flows.functionals import WeightedFunctional
from otdd_flash.flows.setting import FlowSetting
from otdd_flash.flows.stepping import TO_THE_END
from otdd_flash.labels import ClassDistances, Given, LabelMetric
from otdd_flash.samples import LabeledSamples
from otdd_flash.tensor_file import content_hash


def data_settings(
    points: LabeledSamples, goal: LabeledSamples, setting: FlowSetting, table: ClassDistances
) -> dict[str, Any]:
    """What a flow's problem is, by the keys of the command line."""
    metric, compute = setting.metric, setting.request.compute
    return {
        "source": points.fingerprint,
        "target": goal.fingerprint,
        "labels.method": metric.name,
        **_label_parameters(metric, table),
        "epsilon": setting.epsilon,
        **asdict(setting.request.cost),
        "solver.schedule": setting.solver.name,
        **{
            f"solver.{key}": value
            for key, value in asdict(setting.solver).items()
            if key != "require_convergence"
        },
        "backend": compute.backend,
        "precision": compute.precision,
    }


def _label_parameters(metric: LabelMetric, table: ClassDistances) -> dict[str, Any]:
    """A metric's own; of a given table, its content."""
    if isinstance(metric, Given):
        return {"labels.given": content_hash({"W": table.full})}
    return {f"labels.{key}": value for key, value in asdict(metric).items()}


def flow_settings(flow: Flow) -> dict[str, Any]:
    """How a flow moves, by the keys of the command line; its length where that matters."""
    settings = {
        "flow.mode": flow.mode,
        **{f"flow.{key}": value for key, value in asdict(flow.stepping).items()},
        "flow.functionals": [
            f"{part.weight} {part.name}"
            if isinstance(part, WeightedFunctional)
            else {key: _plain(value) for key, value in part.items()}
            for part in flow.functionals
        ],
        "flow.refresh": flow.refresh,
        "flow.space": flow.space.key,
        "flow.plain": flow.stepping.plain,
        "flow.keep_moments": flow.keep_moments,
        "seed": flow.seed,
    }
    if flow.stepping.schedule in TO_THE_END:
        settings["flow.steps"] = flow.steps
    return settings


def _plain(parameter: Any) -> Any:
    """A parameter as JSON holds it: of arrays, the hash."""
    if isinstance(parameter, Tensor | np.ndarray):
        return content_hash({"array": torch.as_tensor(parameter)})
    return str(parameter) if isinstance(parameter, Path) else parameter
