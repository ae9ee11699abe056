"""pyproject.toml against the tree: what is installed is what is here."""

from __future__ import annotations

import importlib.resources
import tomllib
from pathlib import Path

import pytest

import otdd_flash

ROOT = Path(otdd_flash.__file__).resolve().parents[1]
PYPROJECT = ROOT / "pyproject.toml"
if not PYPROJECT.exists():
    pytest.skip("otdd_flash is not imported from a checkout", allow_module_level=True)
SETTINGS = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
PACKAGES = set(SETTINGS["tool"]["setuptools"]["packages"])


def test_every_package_is_installed():
    folders = {init.parent.relative_to(ROOT) for init in (ROOT / "otdd_flash").rglob("__init__.py")}
    linked = {name for name in ("conf", "kernels") if (ROOT / name).is_dir()}
    found = {".".join(folder.parts) for folder in folders} | {f"otdd_flash.{n}" for n in linked}
    # A link is not followed.
    kernels = (init.parent.relative_to(ROOT) for init in (ROOT / "kernels").rglob("__init__.py"))
    found |= {".".join(("otdd_flash", *folder.parts)) for folder in kernels}
    assert found == PACKAGES


@pytest.mark.parametrize("name", [name for name in ("conf", "kernels") if (ROOT / name).is_dir()])
def test_folders_of_the_top_level_are_mapped_and_linked(name):
    assert SETTINGS["tool"]["setuptools"]["package-dir"][f"otdd_flash.{name}"] == name
    link = ROOT / "otdd_flash" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


def test_conf_is_a_package_and_kernels_is_none():
    """With kernels/__init__.py, Hugging Face's package of that name is hidden in a checkout."""
    assert (ROOT / "conf" / "__init__.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_configs_are_found_in_the_installed_package():
    found = importlib.resources.files("otdd_flash.conf")
    for path in (ROOT / "conf").rglob("*.yaml"):
        parts = path.relative_to(ROOT / "conf").parts
        assert found.joinpath(*parts).is_file(), path
    assert found.joinpath("distance.yaml").is_file()
    assert SETTINGS["tool"]["setuptools"]["package-data"]["otdd_flash.conf"] == ["**/*.yaml"]


def test_versions_agree():
    assert SETTINGS["project"]["version"] == otdd_flash.__version__
