"""Kernels compile for the cards that they are written for, and fit them, without such a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from otdd_flash.kernels import tiling
from otdd_flash.kernels.passes.fused_product import NARROW, most_columns, product_tile, widths
from otdd_flash.kernels.passes.marginal_tiles import marginal_tile
from otdd_flash.kernels.passes.plan_blocks import plan_tile
from otdd_flash.kernels.points.digits import padded_dim
from otdd_flash.kernels.tiling import Tile, gathering_tile, narrow_tile, tile_for

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


class Card(NamedTuple):
    capability: int
    shared_memory: int


CARDS = {
    "RTX 4090": Card(89, 101_376),
    "H200": Card(90, 232_448),
}


def tiles_of(card: Card, dim: int, parts: int, monkeypatch: pytest.MonkeyPatch):
    """The tile that each kernel gets on a card."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(card.capability, 10))
    monkeypatch.setattr(tiling, "_has_room_for_wide_tiles", lambda _: card.shared_memory > 200_000)
    properties = SimpleNamespace(shared_memory_per_block_optin=card.shared_memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    device, depth = torch.device("cuda"), dim * parts
    try:
        most = most_columns(dim, parts, device)
        products = {}
        for count in sorted({1, min(65, most), most}):
            columns, extra = widths(count)
            for gather in (False, True):
                name = f"fused_product {columns} {extra}{'_gathering' * gather}"
                products[name] = product_tile(
                    dim, columns, parts, device, pure=not gather, held=most > NARROW
                )
        of_plan = {
            f"plan_block{'_with_factors' * factors}{'_gathering' * gather}": plan_tile(
                depth, device, factors=factors, gather=gather
            )
            for factors in (False, True)
            for gather in (False, True)
        }
        return (
            of_plan
            | products
            | {
                "half_step": tile_for(depth, device),
                "half_step_gathering": gathering_tile(device),
                "symmetric_step": narrow_tile(device),
                "symmetric_step_gathering": gathering_tile(device),
            }
        )
    finally:
        for function in (tile_for, narrow_tile, gathering_tile):
            function.cache_clear()


def compiled(script: str, *arguments: object) -> dict[str, dict[str, int]]:
    """What each kernel takes, from a process without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(HERE.parents[1])
    command = [sys.executable, str(HERE / f"compile_{script}.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("name", "dim", "parts"), [("H200", 300, 1), ("H200", 512, 3), ("RTX 4090", 512, 3)]
)
def test_passes_compile_and_fit(name, dim, parts, monkeypatch):
    card = CARDS[name]
    tiles = json.dumps(tiles_of(card, dim, parts, monkeypatch))
    kernels = compiled("kernels", card.capability, dim, parts, tiles)
    on_hopper = name == "H200" and dim > 256 and parts == 1
    assert sum("resident" in kernel for kernel in kernels) == 2 * on_hopper
    for kernel, taken in kernels.items():
        assert taken["shared"] <= card.shared_memory, kernel
        # The kernels whose time is nearly all of a solve's must not wait for their own registers.
        if kernel.startswith(("half_step", "symmetric_step")) and "scores" not in kernel:
            assert taken["stack"] == 0, kernel


@pytest.mark.parametrize(("name", "dim", "digits"), [("H200", 512, 3), ("RTX 4090", 784, 4)])
def test_sums_of_plans_compile_and_fit(name, dim, digits, monkeypatch):
    card = CARDS[name]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(card.capability, 10))
    dim = padded_dim(dim)
    tiles = {"plan_marginals": marginal_tile(dim, digits, torch.device("cuda"))}
    kernels = compiled("kernels", card.capability, dim, digits, json.dumps(tiles))
    for kernel, taken in kernels.items():
        assert taken["shared"] <= card.shared_memory, kernel
    if name == "H200":
        # Spilled registers go past the first cache, which shared memory fills.
        assert kernels["plan_marginals"]["stack"] <= 32


# By the height of a tile, of large and of small classes.
NARROW_CLASSES = {128: Tile(128, 32, 8, 3, False), 64: Tile(64, 32, 8, 3, False)}
HOPPER_CLASSES = {128: Tile(256, 64, 8, 4, True), 64: Tile(64, 64, 4, 3, True)}


@pytest.mark.parametrize(
    ("name", "tiles"), [("RTX 4090", NARROW_CLASSES), ("H200", HOPPER_CLASSES)]
)
def test_segmented_kernels_compile_and_fit(name, tiles):
    card = CARDS[name]
    for kernel, taken in compiled("segmented", card.capability, json.dumps(tiles)).items():
        assert taken["shared"] <= card.shared_memory, kernel
        assert taken["stack"] == 0, kernel


def test_kernels_of_stored_scores_compile_and_fit():
    for kernel, taken in compiled("stored", 89).items():
        assert taken["shared"] <= CARDS["RTX 4090"].shared_memory, kernel
        assert taken["stack"] == 0, kernel


# Bytes of a thread, of packings that were measured to be faster than those that spill none: most of
# it belongs to the log domain, where few matrices go.
FASTEST = {
    "tiny 4": 32,
    "tiny backward 4": 64,
    "backward 32": 256,
}


@pytest.mark.parametrize(
    ("script", "count", "shared", "spilled"),
    [
        # Large plans of which neither side is contiguous are right, and not as fast.
        (
            "batched",
            19,
            232_448,
            lambda kernel: FASTEST.get(kernel, 4096 if "neither" in kernel else 0),
        ),
        # Some where addresses are not aligned.
        ("linear", 32, 49_152, lambda kernel: 128),
        # A sweep has an SM to itself, two more rows in shared memory, and before it reads any row
        # the longest biases in float64.
        ("matrix", 13, 196_608, lambda kernel: 64 if kernel.startswith("sweep 16384") else 0),
    ],
)
def test_kernels_compile_and_spill_no_more_than_was_fast(script, count, shared, spilled):
    kernels = compiled(script)
    assert len(kernels) == count
    for kernel, taken in kernels.items():
        assert taken["shared"] <= shared, kernel
        assert taken["stack"] <= spilled(kernel), kernel
