"""The names that users import, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import otdd_flash

PROMISED = {
    *("LabeledSamples", "load", "embed", "extractors", "dataset_distance", "DistanceResult"),
    *("ClassDistances", "sinkhorn", "sinkhorn_divergence", "__version__"),
    *("SubsampleInterval", "subsample_interval", "NoiseFloor", "noise_floor"),
}
HEAVY = ("hydra", "timm", "torchvision", "matplotlib", "datasets", "sklearn", "ot", "pandas")


def test_promised_names_are_there_and_listed():
    assert set(otdd_flash.__all__) >= PROMISED
    for name in otdd_flash.__all__:
        assert hasattr(otdd_flash, name), name


def test_no_function_hides_a_module_of_its_name():
    """`otdd_flash.load` must not be both a function and the module otdd_flash/load.py."""
    folder = Path(otdd_flash.__file__).parent
    modules = {path.stem for path in folder.iterdir() if not path.name.startswith(("_", "."))}
    for name in set(otdd_flash.__all__) & modules:
        assert isinstance(getattr(otdd_flash, name), ModuleType), name


def test_importing_the_package_imports_nothing_heavy():
    check = f"import sys, otdd_flash; print(sorted(set(sys.modules) & set({HEAVY!r})))"
    run = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
