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
from otdd_flash.kernels.tiling import gathering_tile, narrow_tile, tile_for

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("compile_kernels.py")
ROOT = SCRIPT.parents[2]


class Card(NamedTuple):
    capability: int
    shared_memory: int


CARDS = {
    "A100": Card(80, 166_912),
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


def compiled(card: Card, dim: int, parts: int, tiles):
    """What each kernel takes, from a process without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(SCRIPT), str(card.capability), str(dim), str(parts)]
    done = subprocess.run(
        [*command, json.dumps(tiles)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "dim", "parts"),
    [
        *(("H200", *of) for of in ((16, 1), (128, 3), (300, 1), (512, 3))),
        *((name, 512, 3) for name in ("A100", "RTX 4090")),
    ],
)
def test_kernels_compile_and_fit(name, dim, parts, monkeypatch):
    card = CARDS[name]
    tiles = tiles_of(card, dim, parts, monkeypatch)
    kernels = compiled(card, dim, parts, tiles)
    on_hopper = name == "H200" and dim > 256 and parts == 1
    assert sum("resident" in kernel for kernel in kernels) == 6 * on_hopper
    for kernel, taken in kernels.items():
        assert taken["shared"] <= card.shared_memory, kernel
        # The kernels whose time is nearly all of a solve's must not wait for their own registers.
        if kernel.startswith(("half_step", "symmetric_step")) and "scores" not in kernel:
            assert taken["stack"] == 0, kernel


@pytest.mark.parametrize(
    ("name", "dim", "digits"),
    [
        *(("H200", *of) for of in ((64, 1), (512, 3), (784, 4))),
        *((name, 784, 4) for name in ("A100", "RTX 4090")),
    ],
)
def test_sums_of_plans_compile_and_fit(name, dim, digits, monkeypatch):
    card = CARDS[name]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(card.capability, 10))
    dim = padded_dim(dim)
    marginal = marginal_tile(dim, digits, torch.device("cuda"))
    kernels = compiled(card, dim, digits, {"plan_marginals": marginal})
    for kernel, taken in kernels.items():
        assert taken["shared"] <= card.shared_memory, kernel
    if name == "H200":
        # Spilled registers go past the first cache, which shared memory fills.
        assert kernels["plan_marginals"]["stack"] <= 32
