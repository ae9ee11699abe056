"""The composed configuration: every choice fits the settings, every default is as documented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from otdd_flash.commands.adapt import FlowSettings
from otdd_flash.commands.compare import DistanceSettings
from otdd_flash.commands.settings import parse
from otdd_flash.commands.study import StudySettings
from otdd_flash.errors import InputError
from otdd_flash.solver.schedules.converged import Converged
from otdd_flash.solver.schedules.geomloss import GeomlossSchedule

CONF = Path(__file__).resolve().parents[2] / "conf"
GROUPS = ("source", "target", "extractor", "labels", "solver", "log")
# The key of a choice that is its name.
NAMED_BY = {"labels": "method", "solver": "schedule", "log": "tracker"}
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted(CONF.glob(f"{group}/*.yaml"))]
# What a choice cannot do without.
NEEDED = {"callable": "extractor.path=math:sqrt"}

SOLVER = {
    "tolerance": None,
    "bound_width": None,
    "max_seconds": None,
    "max_iterations": 100_000,
    "require_convergence": False,
}
DEFAULTS = {
    "ground": "sqeuclidean",
    "lambda_x": 0.5,
    "lambda_y": 0.5,
    "epsilon": None,
    "epsilon_relative": None,
    "debias": True,
    "min_class_size": None,
    "report": {"content": "full", "order": "given"},
    "subsample": None,
    "subsample_size": None,
    "noise_floor": False,
    "save_result": False,
    "contributions": False,
    "device": "auto",
    "backend": "auto",
    "precision": "fast",
    "memory_budget": "auto",
    "seed": 0,
    "max_samples": None,
    "data_root": None,
    "download": False,
    "cache_dir": "~/.cache/otdd_flash",
    "overwrite": False,
    "log_level": "WARNING",
}


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes_and_fits_the_settings(composed, group, choice):
    config = composed(f"{group}={choice}", *([NEEDED[choice]] if choice in NEEDED else []))
    assert OmegaConf.is_struct(config)
    with pytest.raises(ConfigAttributeError):
        config[group].no_such_key = 1
    parse(config, DistanceSettings)
    name = config[group][NAMED_BY.get(group, "name")]
    assert name == (None if (group, choice) == ("log", "none") else choice)


def test_the_root_holds_the_documented_defaults_and_nothing_else(composed):
    root = OmegaConf.to_container(composed(), resolve=True)
    nodes = {key: root.pop(key) for key in GROUPS}
    assert root == DEFAULTS
    assert nodes["source"]["name"] == nodes["target"]["name"] == "digits"
    assert nodes["extractor"]["name"] == "pixels"
    labels = {"full": False, "unbiased": True, "diagonal": False, "epsilon": None, "path": None}
    assert nodes["labels"] == {"method": "gaussian", **labels}
    assert nodes["solver"] == {"schedule": "converged", **SOLVER}
    assert nodes["log"] == {"tracker": None}


def test_a_choice_of_solver_takes_no_key_of_the_other(composed):
    assert set(composed("solver=geomloss").solver) & set(SOLVER) == {
        *("tolerance", "require_convergence")
    }
    for wrong in (("solver.scaling=0.9",), ("solver=geomloss", "solver.max_seconds=1")):
        with pytest.raises(ConfigCompositionException, match=r"solver\."):
            composed(*wrong)


@pytest.mark.slow
def test_unset_solver_settings_are_those_of_the_library(composed):
    converged = parse(composed(), DistanceSettings).solver.options()
    assert converged == Converged()
    geomloss = parse(composed("solver=geomloss"), DistanceSettings).solver.options()
    assert geomloss == GeomlossSchedule()
    for command in ("distance", "flow"):
        assert composed("solver=geomloss", name=command).solver.scaling == 0.5


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["solver.schedule=geomlos"], r"unknown solver\.schedule 'geomlos'; choose .*geomloss"),
        (["solver.schedule=geomloss", "solver.bound_width=0.1"], r"has no solver\.bound_width"),
        (["solver.schedule=geomloss", "solver.max_seconds=1"], r"has no solver\.max_seconds"),
        (["solver=geomloss", "solver.schedule=converged", "solver.scaling=0.9"], r"no solver\.sc"),
    ],
)
def test_keys_of_another_schedule_are_refused(composed, overrides, message):
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


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("epsilon=abc", "epsilon must be a number or null, got 'abc'"),
        ("lambda_x=null", "lambda_x must be a number, got null"),
        ("epsilon=[1]", "epsilon must be a number or null, got [1]"),
        ("solver.max_iterations=1.5", "solver.max_iterations must be an integer, got 1.5"),
        ("debias=maybe", "debias must be true or false, got 'maybe'"),
        ("seed=1.5", "seed must be an integer, got 1.5"),
        ("max_samples=abc", "max_samples must be an integer or null, got 'abc'"),
        ("subsample=true", "subsample must be an integer or null, got true"),
        ("labels.full=7up", "labels.full must be true or false, got '7up'"),
        ("labels.epsilon={a: 1}", "labels.epsilon must be a number or null, got {'a': 1}"),
        ("cache_dir=[a]", "cache_dir must be text or null, got ['a']"),
    ],
)
def test_a_value_of_the_wrong_type_is_said_with_what_its_own_key_takes(
    composed, override, sentence
):
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        parse(composed(override), DistanceSettings)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("name", "schema", "override", "sentence"),
    [
        ("study", StudySettings, "study.tasks=3", "study.tasks must be a list or null, got 3"),
        ("study", StudySettings, "measures=otdd", "measures must be a list or null, got 'otdd'"),
        ("study", StudySettings, "transfer=3", "transfer must be a mapping or null, got 3"),
        ("flow", FlowSettings, "flow.functionals=3", "flow.functionals must be a list, got 3"),
    ],
)
def test_lists_and_mappings_are_said_as_such(name, schema, override, sentence):
    with initialize_config_module("otdd_flash.conf", version_base="1.3"):
        config = compose(name, overrides=[override])
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        parse(config, schema)


def test_an_added_key_is_unknown(composed):
    with pytest.raises(InputError, match=r"no setting epsilom \(did you mean epsilon\?\)"):
        parse(composed("+epsilom=1"), DistanceSettings)


def test_a_value_that_must_be_given_is_named(composed):
    with pytest.raises(InputError, match=r"extractor\.path must be given: extractor\.path=VALUE"):
        parse(composed("extractor=callable"), DistanceSettings)


def test_help_explains_every_choice_and_every_key(command, composed):
    help_text = command("--help").out
    described = help_text[: help_text.index("DEFAULTS")]
    for group, choice in CHOICES:
        assert re.search(rf"^    .*\b{choice}\b", described, re.M), f"{group}={choice}"
    config = composed()
    shared = set(config.source) - {"name", "rotate"}
    extractor = {"standardize", "pca", "batch_size"}
    labels = set(config.labels) - {"method"}
    solver = {*config.solver, *composed("solver=geomloss").solver} - {"schedule"}
    nested = {f"report.{key}" for key in config.report}
    for key in {*config, *shared, *extractor, *labels, *solver, *nested} - {*GROUPS, "report"}:
        assert re.search(rf"(?<![\w.]){re.escape(key)}(?![\w])", described), key


def test_help_names_the_command_that_lists_the_keys_of_a_choice(command):
    shown = command("--help").out
    listing = re.search(
        r"python -m otdd_flash\.distance (source=\S+) --cfg job --package source", shown
    )
    assert listing is not None
    keys = command(listing[1], "--cfg=job", "--package=source")
    assert keys.code == 0
    assert {"name: idx", "images: null", "labels: null"} <= set(keys.out.splitlines())


def test_the_whole_configuration_can_be_printed(command):
    printed = command("epsilon=0.25", "--cfg=job", "--resolve")
    assert printed.code == 0
    assert OmegaConf.create(printed.out).labels.epsilon == 0.25
