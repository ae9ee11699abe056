"""Extractors by name, and their configuration files."""

import inspect
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from otdd_flash.errors import InputError
from otdd_flash.extractors import build_extractor, embed, pixels
from otdd_flash.extractors.registry import FACTORIES, OTHER_SETTINGS

# What follows the settings of the run.
FOLLOWING = ("seed", "download")
FOLDER = Path(__file__).resolve().parents[2] / "conf" / "extractor"


def test_there_is_one_file_per_extractor():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(FACTORIES)


@pytest.mark.parametrize("name", FACTORIES)
def test_files_hold_every_parameter_with_its_default(name):
    config = OmegaConf.load(FOLDER / f"{name}.yaml")
    values = OmegaConf.to_container(config)  # type: ignore[assignment]
    shared = {"name": name, "standardize": False, "pca": None, "batch_size": 256}
    assert shared.items() <= values.items()
    settings = set(inspect.signature(embed).parameters) & set(OTHER_SETTINGS)
    parameters = inspect.signature(FACTORIES[name]).parameters
    assert set(values) - settings - set(shared) == set(parameters)
    for parameter, declared in parameters.items():
        if declared.default is not inspect.Parameter.empty and parameter not in FOLLOWING:
            assert values[parameter] == declared.default


def test_a_whole_configuration_builds_the_extractor():
    config = OmegaConf.to_container(OmegaConf.load(FOLDER / "pixels.yaml"))
    assert build_extractor(**{**config, "size": 8}) == pixels(size=8)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("pixel", {}, "unknown extractor 'pixel'; choose one of: identity, pixels, timm"),
        ("pixels", {"sise": 3}, "no parameter 'sise'; it has: size, grayscale"),
        ("identity", {"size": 3}, "no parameter 'size'; it has: none"),
        ("callable", {}, r"callable needs extractor\.path="),
        ("timm", {"model": None}, r"timm needs extractor\.model="),
    ],
)
def test_bad_names_and_parameters_list_the_known(name, parameters, message):
    with pytest.raises(InputError, match=message):
        build_extractor(name, **parameters)
