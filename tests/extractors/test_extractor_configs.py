"""Extractors by name, and their configuration files."""

import inspect
from pathlib import Path

import pytest

from otdd_flash.errors import InputError
from otdd_flash.extractors import build_extractor, embed, pixels
from otdd_flash.extractors.registry import FACTORIES, OTHER_SETTINGS

# What follows the settings of the run.
FOLLOWING = ("seed", "download")
FOLDER = Path(__file__).resolve().parents[2] / "conf" / "extractor"


def test_files_hold_every_parameter_with_its_default():
    from omegaconf import OmegaConf

    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(FACTORIES)
    for name, factory in FACTORIES.items():
        values = OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml"))
        shared = {"name": name, "standardize": False, "pca": None, "batch_size": 256}
        assert shared.items() <= values.items(), name
        settings = set(inspect.signature(embed).parameters) & set(OTHER_SETTINGS)
        parameters = inspect.signature(factory).parameters
        assert set(values) - settings - set(shared) == set(parameters), name
        for parameter, declared in parameters.items():
            if declared.default is not inspect.Parameter.empty and parameter not in FOLLOWING:
                assert values[parameter] == declared.default, (name, parameter)
        if name == "pixels":
            assert build_extractor(**{**values, "size": 8}) == pixels(size=8)


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
