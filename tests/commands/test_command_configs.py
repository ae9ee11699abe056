"""The composed configuration: every choice fits the settings, every default is as documented."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

import otdd_flash as otdd
from otdd_flash.commands.adapt import FlowSettings
from otdd_flash.commands.compare import DistanceSettings
from otdd_flash.commands.settings import parse
from otdd_flash.commands.study import StudySettings
from otdd_flash.errors import InputError
from otdd_flash.solver.geomloss import GeomlossSchedule
from otdd_flash.solver.schedules import Converged

CONF = Path(__file__).resolve().parents[2] / "conf"
GROUPS = ("source", "target", "extractor", "labels", "solver", "log")
# The key of a choice that is its name.
NAMED_BY = {"labels": "method", "solver": "schedule", "log": "tracker"}
CHOICES = {group: sorted(p.stem for p in CONF.glob(f"{group}/*.yaml")) for group in GROUPS}
# What a choice cannot do without.
NEEDED = {"callable": "extractor.path=math:sqrt"}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("number", range(max(map(len, CHOICES.values()))))
def test_every_choice_composes_and_fits_the_settings(composed, number):
    chosen = {group: names[number % len(names)] for group, names in CHOICES.items()}
    needed = [NEEDED[choice] for choice in chosen.values() if choice in NEEDED]
    config = composed(*(f"{group}={choice}" for group, choice in chosen.items()), *needed)
    assert OmegaConf.is_struct(config)
    parse(config, DistanceSettings)
    for group, choice in chosen.items():
        with pytest.raises(ConfigAttributeError):
            config[group].no_such_key = 1
        name = config[group][NAMED_BY.get(group, "name")]
        assert name == (None if (group, choice) == ("log", "none") else choice)


def test_defaults_are_those_of_the_library(composed):
    root = OmegaConf.to_container(composed(), resolve=True)
    given = inspect.signature(otdd.dataset_distance).parameters
    # Without a value the command chooses what the library does.
    shared = {*root} & {*given} - {"source", "target", "labels", "solver", "cache_dir"}
    assert shared >= {"ground", "lambda_x", "lambda_y", "epsilon", "debias", "min_class_size"}
    assert {key: root[key] for key in shared} == {key: given[key].default for key in shared}
    assert root["source"]["name"] == root["target"]["name"] == "digits"
    assert (root["extractor"]["name"], root["labels"]["method"]) == ("pixels", "gaussian")
    assert (root["seed"], root["overwrite"], root["download"]) == (0, False, False)


@pytest.mark.slow
def test_a_choice_of_solver_has_the_librarys_defaults_and_no_key_of_the_other(composed):
    for choice, kind in (("converged", Converged), ("geomloss", GeomlossSchedule)):
        config = composed(f"solver={choice}")
        assert parse(config, DistanceSettings).solver.options() == kind()
    assert not {"max_seconds", "bound_width", "max_iterations"} & {*config.solver}
    assert composed("solver=geomloss", name="flow").solver.scaling == 0.5
    for overrides, message in (
        (["solver.schedule=geomlos"], r"unknown solver\.schedule 'geomlos'; choose .*geomloss"),
        (["solver.schedule=geomloss", "solver.max_seconds=1"], r"has no solver\.max_seconds"),
    ):
        with pytest.raises(InputError, match=message):
            parse(composed(*overrides), DistanceSettings).solver.options()


def test_shorthands_reach_both_sides_and_the_labels(composed):
    settings = parse(
        composed("max_samples=7", "seed=3", "data_root=d", "epsilon=0.2", "source.seed=5"),
        DistanceSettings,
    )
    for node, seed in ((settings.source, 5), (settings.target, 3)):
        assert (node["max_samples"], node["seed"], node["root"]) == (7, seed, "d")
    assert settings.labels.epsilon == 0.2


WRONG = {
    FlowSettings: """
        flow.functionals=3 -> flow.functionals must be a list, got 3""",
    DistanceSettings: """
        epsilon=abc -> epsilon must be a number or null, got 'abc'
        lambda_x=null -> lambda_x must be a number, got null
        solver.max_iterations=1.5 -> solver.max_iterations must be an integer, got 1.5
        debias=maybe -> debias must be true or false, got 'maybe'
        max_samples=abc -> max_samples must be an integer or null, got 'abc'
        labels.full=7up -> labels.full must be true or false, got '7up'
        labels.epsilon={a: 1} -> labels.epsilon must be a number or null, got {'a': 1}
        cache_dir=[a] -> cache_dir must be text or null, got ['a']
        +epsilom=1 -> no setting epsilom (did you mean epsilon?)
        extractor=callable -> extractor.path must be given: extractor.path=VALUE""",
    StudySettings: """
        study.tasks=3 -> study.tasks must be a list or null, got 3
        measures=otdd -> measures must be a list or null, got 'otdd'
        transfer=3 -> transfer must be a mapping or null, got 3""",
}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("schema", WRONG)
def test_a_value_of_the_wrong_type_is_said_with_what_its_own_key_takes(composed, schema):
    name = schema.__name__.removesuffix("Settings").lower()
    for line in WRONG[schema].strip().splitlines():
        override, _, sentence = line.strip().partition(" -> ")
        with pytest.raises(InputError) as refused:
            parse(composed(override, name=name), schema)
        assert sentence in str(refused.value)


@pytest.mark.slow
def test_the_configuration_of_flows_fits_its_settings(composed):
    flow, shared = composed(name="flow"), composed()
    parse(flow, FlowSettings)
    # `lambda_y` is null for distances, as that of ground=gromov has no default.
    for key in ("lambda_x", "epsilon", "epsilon_relative", "min_class_size", "solver"):
        assert flow[key] == shared[key]


@pytest.mark.slow
def test_help_explains_every_choice_and_every_key(command, composed):
    help_text = command("--help").out
    described = help_text[: help_text.index("DEFAULTS")]
    for group, choices in CHOICES.items():
        for choice in choices:
            assert re.search(rf"^    .*\b{choice}\b", described, re.M), f"{group}={choice}"
    config = composed()
    solver = {*config.solver, *composed("solver=geomloss").solver} - {"schedule"}
    keys = {*config, *config.source, *config.labels, *solver, "standardize", "pca", "batch_size"}
    keys |= {f"report.{key}" for key in config.report}
    for key in keys - {*GROUPS, "report", "name", "rotate", "method"}:
        assert re.search(rf"(?<![\w.]){re.escape(key)}(?![\w])", described), key
    listing = re.search(
        r"python -m otdd_flash\.distance (source=\S+) --cfg job --package source", help_text
    )
    assert listing is not None
    keys = command(listing[1], "--cfg=job", "--package=source")
    assert keys.code == 0
    assert {"name: idx", "images: null", "labels: null"} <= set(keys.out.splitlines())
    printed = command("epsilon=0.25", "--cfg=job", "--resolve")
    assert OmegaConf.create(printed.out).labels.epsilon == 0.25
