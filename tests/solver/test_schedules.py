"""Ways to solve: what a new one takes, and that the command's names are theirs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

import otdd_flash as otdd
from otdd_flash.arguments import Count
from otdd_flash.errors import InputError, NotConvergedWarning
from otdd_flash.formulas.decision import Form
from otdd_flash.operators.base import Operator
from otdd_flash.solver.certificate import certify
from otdd_flash.solver.divergence import SCHEDULES, SOLVES
from otdd_flash.solver.schedules import Schedule
from otdd_flash.solver.term import TermProgress, TransportTerm

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "solver"


@dataclass(frozen=True)
class Sweeps(Schedule):
    """So many plain updates at the final epsilon, as a file of its own would have them."""

    name = "sweeps"

    updates: Count = 5


def sweep(
    operator: Operator,
    epsilon: float,
    options: Sweeps,
    form: Form,
    *,
    start: Tensor | None,
    progress: TermProgress | None,
) -> TransportTerm:
    exact = operator.refined
    g = torch.zeros_like(exact.b, dtype=exact.costs.dtype) if start is None else start
    f = exact.softmin_rows(g, epsilon)
    for _ in range(options.updates):
        g = exact.softmin_columns(f, epsilon)
        f = exact.softmin_rows(g, epsilon)
    found = certify(exact, f, g, epsilon)
    error = found.marginal_error
    return TransportTerm(
        found.f,
        found.g,
        epsilon,
        found.value,
        found.bounds,
        error,
        options.asked_tolerance,
        options.updates,
        2 * options.updates,
        error <= options.asked_tolerance,
        "schedule",
    )


def cloud(size: int, seed: int) -> otdd.LabeledSamples:
    draw = torch.Generator().manual_seed(seed)
    points = torch.randn(size, 3, generator=draw) + seed
    return otdd.LabeledSamples.from_arrays(points, torch.arange(size) % 2)


def test_a_new_schedule_is_a_type_that_every_entry_takes(tmp_path, monkeypatch):
    monkeypatch.setitem(SOLVES, Sweeps, sweep)
    pair = cloud(11, 0), cloud(7, 1)
    truth = otdd.dataset_distance(*pair, epsilon=2.0, solver=otdd.Converged(1e-5))
    found = otdd.dataset_distance(*pair, epsilon=2.0, solver=Sweeps(updates=40))
    assert found.converged
    assert found.bounds[0] <= truth.bounds[1]
    assert truth.bounds[0] <= found.bounds[1]
    found.save(tmp_path)
    for result in (found, otdd.DistanceResult.load(tmp_path)):
        assert (result.divergence.schedule, result.divergence.stopped_by) == ("sweeps", "schedule")
    with pytest.warns(NotConvergedWarning, match=r"by the schedule of sweeps.*solver=converged"):
        rough = otdd.dataset_distance(*pair, epsilon=0.01, solver=Sweeps(updates=1))
    assert not rough.converged
    loss = otdd.sinkhorn_loss(
        pair[0].features, pair[1].features, epsilon=2.0, options=Sweeps(updates=40)
    )
    assert float(loss) > 0
    flown = otdd.gradient_flow(*pair, otdd.Flow(1), epsilon=2.0, solver=Sweeps(updates=40))
    assert flown.settings["solver.schedule"] == "sweeps"
    assert flown.settings["solver.updates"] == 40


def test_parameters_that_all_share_and_those_of_one_are_checked():
    for bad in ({"updates": 0}, {"tolerance": 3.0}, {"require_convergence": "no"}):
        with pytest.raises(InputError, match=rf"solver\.{next(iter(bad))} must"):
            Sweeps(**bad)  # type: ignore[arg-type]


def test_the_command_has_a_file_for_every_schedule():
    files = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yaml")}
    assert {name: keys["schedule"] for name, keys in files.items()} == {
        name: name for name in SCHEDULES
    }
    for name, kind in SCHEDULES.items():
        defaults = {key: value for key, value in files[name].items() if key != "schedule"}
        assert kind(**defaults) == kind()
