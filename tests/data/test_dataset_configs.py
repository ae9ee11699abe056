"""The YAML of every dataset holds exactly the keys that `load` takes."""

from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from otdd_flash.commands.clustering import without_clustering
from otdd_flash.data import load
from otdd_flash.data.registry import SOURCES, known_options

CONF = Path(__file__).resolve().parents[2] / "conf"
ROOT = {
    "defaults": ["_self_", {"source": "digits"}, {"target": "digits"}],
    "max_samples": None,
    "seed": 0,
    "data_root": None,
    "download": False,
}


def _compose(*overrides):
    ConfigStore.instance().store("datasets_only", ROOT)
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose("datasets_only", overrides=list(overrides))
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("name", SOURCES)
def test_keys_are_the_options_of_load(side, name):
    node = _compose(f"{side}={name}")[side]
    assert node["name"] == name
    assert set(node) == {"name", "pseudo_labels", "k", *known_options(name)}


@pytest.mark.parametrize("folder", ["dataset", "source", "target"])
def test_every_source_has_a_file(folder):
    assert {path.stem for path in (CONF / folder).glob("*.yaml")} == set(SOURCES)


def test_the_default_compares_disjoint_halves_one_of_them_rotated():
    config = _compose("max_samples=100")
    source, target = (load(**without_clustering(config[side])) for side in ("source", "target"))
    assert len(source) == len(target) == 100
    assert np.intersect1d(source.rows, target.rows).size == 0
    assert config["target"]["rotate"] == 30


def test_shared_keys_reach_both_sides_and_can_be_overridden():
    config = _compose("source=mnist", "seed=7", "data_root=d", "source.max_samples=5")
    assert config["source"] | {"root": "d", "seed": 7, "max_samples": 5} == config["source"]
    assert config["target"] | {"root": "d", "seed": 7, "max_samples": None} == config["target"]


def test_nested_arguments_and_lists_can_be_set():
    config = _compose(
        "source=torchvision", "source.arguments={split: letters}", "source.classes=[a,2]"
    )
    assert config["source"]["arguments"] == {"split": "letters"}
    assert config["source"]["classes"] == ["a", 2]


def test_a_node_is_enough_to_load(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.eye(4), y=[0, 0, 1, 1])
    node = _compose("target=arrays", f"target.path={tmp_path / 'a.npz'}", "target.classes=[1]")
    assert load(**without_clustering(node["target"])).rows.tolist() == [2, 3]
