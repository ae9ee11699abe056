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
PROJECT = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))
SETTINGS = PROJECT["tool"]["setuptools"]


def test_every_package_is_installed():
    folders = {init.parent.relative_to(ROOT) for init in (ROOT / "otdd_flash").rglob("__init__.py")}
    # A link is not followed.
    kernels = (init.parent.relative_to(ROOT) for init in (ROOT / "kernels").rglob("__init__.py"))
    folders |= {Path("otdd_flash", *folder.parts) for folder in kernels}
    found = {".".join(folder.parts) for folder in folders}
    assert found | {"otdd_flash.conf", "otdd_flash.kernels"} == set(SETTINGS["packages"])
    assert PROJECT["project"]["version"] == otdd_flash.__version__
    assert SETTINGS["package-data"]["otdd_flash"][0] == "py.typed"
    assert (ROOT / "otdd_flash" / "py.typed").exists()


def test_folders_of_the_top_level_are_mapped_and_linked():
    for name in ("conf", "kernels"):
        assert SETTINGS["package-dir"][f"otdd_flash.{name}"] == name
        assert (ROOT / "otdd_flash" / name).readlink() == Path("..") / name
    # With kernels/__init__.py, Hugging Face's package of that name is hidden in a checkout.
    assert (ROOT / "conf" / "__init__.py").exists()
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_configs_are_found_in_the_installed_package():
    found = importlib.resources.files("otdd_flash.conf")
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert found.joinpath(*path.relative_to(ROOT / "conf").parts).is_file(), path
    assert SETTINGS["package-data"]["otdd_flash.conf"] == ["**/*.yaml"]
