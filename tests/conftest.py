"""Fixtures that several folders of tests share."""

from __future__ import annotations

import gc
import gzip
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.quicker_interpreter import quicken_interpreter

# Before anything imports Triton: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
IMAGE_SETS = ("MNIST", "FashionMNIST", "USPS")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep modules and items out of garbage collections: each would visit millions of objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the first cases of `slow(after=N)` quick; skip what needs a GPU where there is none."""
    _keep_first_cases(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _keep_first_cases(items: list[pytest.Item]) -> None:
    """Of a test that is `slow(after=N)`, N cases that are not slow otherwise stay quick."""
    left: dict[tuple[Path, str], int] = {}
    for item in items:
        marks = list(item.iter_markers("slow"))
        after = max((mark.kwargs.get("after", 0) for mark in marks), default=0)
        if len(marks) != 1 or not after or item.get_closest_marker("gpu"):
            continue
        test = item.path, getattr(item, "originalname", item.name)
        left.setdefault(test, after)
        if left[test] > 0:
            left[test] -= 1
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Give a GPU's free memory back after a test, as other processes of the suite need it."""
    if item.get_closest_marker("gpu") and torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def _quicker_interpreter() -> None:
    quicken_interpreter()


@pytest.fixture
def iterations_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear systems of few points are solved as those of many are, by conjugate gradients."""
    from otdd_flash.derivatives import plan_system

    monkeypatch.setattr(plan_system, "MOST_POINTS", 0)


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    """What solves of small problems keep for the next is made anew, and gone after the test."""
    from otdd_flash.solver.small import forget

    forget()
    yield
    forget()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated holds NaN until it is written."""
    empty = torch.empty

    def filled(*args: object, **kwargs: object) -> torch.Tensor:
        found = empty(*args, **kwargs)
        return found.fill_(torch.nan) if found.dtype.is_floating_point else found

    monkeypatch.setattr(torch, "empty", filled)


@pytest.fixture(scope="session")
def real_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with MNIST, FashionMNIST and USPS as uncompressed IDX files under NAME/raw.

    `OTDD_TEST_DATA` names such a folder; without it, copies beside the checkout are unpacked.
    """
    given = os.environ.get("OTDD_TEST_DATA")
    if given:
        return Path(given)
    if not all((SHARED_DATA / name / "raw").is_dir() for name in IMAGE_SETS):
        pytest.skip("no MNIST, FashionMNIST and USPS beside the checkout; set OTDD_TEST_DATA")
    root = tmp_path_factory.getbasetemp().parent / "otdd_real_data"
    for name in IMAGE_SETS:
        (root / name / "raw").mkdir(parents=True, exist_ok=True)
        for packed in sorted((SHARED_DATA / name / "raw").glob("*.gz")):
            _unpack(packed, root / name / "raw" / packed.stem)
    return root


def _unpack(packed: Path, target: Path) -> None:
    """Unpack under a name of this process, then rename: parallel test workers share the folder."""
    if target.exists():
        return
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    with gzip.open(packed) as source, partial.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    partial.rename(target)
