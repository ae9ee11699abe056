"""Kernels compile for the cards that they are written for, and fit them, without such a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from otdd_flash.kernels import tiling
from otdd_flash.kernels.passes.fused_product import NARROW, most_columns, product_tile, widths
from otdd_flash.kernels.passes.plan_blocks import plan_tile
from otdd_flash.kernels.passes.plan_marginals import marginal_tile
from otdd_flash.kernels.points.digits import padded_dim
from otdd_flash.kernels.tiling import Tile, gathering_tile, narrow_tile, tile_for

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SHARED = {89: 101_376, 90: 232_448}
# By the height of a tile, of large and of small classes.
SEGMENTS = {
    89: {128: Tile(128, 32, 8, 3, False), 64: Tile(64, 32, 8, 3, False)},
    90: {128: Tile(256, 64, 8, 4, True), 64: Tile(64, 64, 4, 3, True)},
}


@pytest.fixture
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A capability that the device of this process seems to have."""
    capability: int = request.param
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: divmod(capability, 10))
    room = SHARED[capability]
    monkeypatch.setattr(tiling, "_has_room_for_wide_tiles", lambda _: room > 200_000)
    properties = SimpleNamespace(shared_memory_per_block_optin=room)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    yield capability
    for function in (tile_for, narrow_tile, gathering_tile):
        function.cache_clear()


def pass_tiles(dim: int, parts: int) -> dict[str, Tile]:
    """The tile that each kernel gets."""
    device, depth = torch.device("cuda"), dim * parts
    most = most_columns(dim, parts, device)
    tiles = {
        "half_step": tile_for(depth, device),
        "symmetric_step": narrow_tile(device),
        "half_step_gathering": gathering_tile(device),
        "symmetric_step_gathering": gathering_tile(device),
    }
    for gather in (False, True):
        end = "_gathering" * gather
        for factors in (False, True):
            tile = plan_tile(depth, device, factors=factors, gather=gather)
            tiles[f"plan_block{'_with_factors' * factors}{end}"] = tile
        for columns, extra in map(widths, {min(65, most), most}):
            tiles[f"fused_product {columns} {extra}{end}"] = product_tile(
                dim, columns, parts, device, pure=not gather, held=most > NARROW
            )
    return tiles


def compiled(script: str, *arguments: str) -> dict[str, dict[str, dict[str, int]]]:
    """What each kernel of each group takes, from a process without the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(HERE.parents[1])
    command = [sys.executable, str(HERE / f"compile_{script}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, dict[str, int]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def assert_fit(kernels: dict[str, dict[str, int]], shared: int, stack: int = 0, **of: int) -> None:
    for kernel, taken in kernels.items():
        assert taken["shared"] <= shared, kernel
        assert taken["stack"] <= of.get(kernel.replace(" ", "_"), stack), kernel


@pytest.mark.parametrize(
    ("card", "passes", "sums"),
    [(90, (300, 1), (512, 3, False)), (89, (512, 3), (784, 4, True))],
    ids=["H200", "RTX 4090"],
    indirect=["card"],
)
def test_kernels_compile_and_fit(card: int, passes: Any, sums: Any) -> None:
    dim, digits, gather = sums
    tiles = {
        "passes": (*passes, pass_tiles(*passes)),
        "sums": (
            *(padded_dim(dim), digits, gather),
            marginal_tile(padded_dim(dim), digits, torch.device("cuda")),
        ),
        "segments": SEGMENTS[card],
    }
    found, room = compiled("tiled", str(card), json.dumps(tiles)), SHARED[card]
    resident = [kernel for kernel in found["passes"] if "resident" in kernel]
    assert len(resident) == (2 if card == 90 else 0)
    for kernel, taken in found["passes"].items():
        # The kernels whose time is nearly all of a solve's must not wait for their own registers.
        quick = kernel.startswith(("half_step", "symmetric_step")) and "scores" not in kernel
        assert_fit({kernel: taken}, room, 0 if quick else 1 << 20)
    # Spilled registers go past the first cache, which shared memory fills.
    assert_fit(found["sums"], room, 32 if card == 90 else 1 << 20)
    for group in ("segments", "stored"):
        assert_fit(found.get(group, {}), room)


def test_kernels_compile_and_spill_no_more_than_was_fast() -> None:
    found = compiled("launched")
    # Bytes of a thread, of packings that were measured to be faster than those that spill none:
    # most of it belongs to the log domain, where few matrices go.
    assert_fit(found["batched"], 232_448, tiny=32, backward=256)
    # Some where addresses are not aligned.
    assert_fit(found["linear"], 49_152, 128)
    # A sweep has an SM to itself, two more rows in shared memory, and before it reads any row the
    # longest biases in float64.
    assert_fit(found["matrix"], 196_608, matrix_sweep_kernel=64)
    assert [len(group) for group in found.values()] == [8, 11, 7]


HALVES = ("float16", "bfloat16")


def test_kernels_of_attention_compile_and_fit() -> None:
    found = compiled("attention", "64", "256")["attention"]
    assert len(found) == 36
    for kernel, taken in found.items():
        # Wide rows of float32 do not fit registers.
        half = "float32" not in kernel
        stack = 0 if half and " 64 " in kernel else 1 << 20
        # Of 15 blocks those that spill 8 numbers a thread here were the fastest on an H100; and a
        # gradient of heads that are not near, with an exponential a term, is rare.
        spilled = {f"plan_product_kernel_matrix_64_torch.{name}": 32 for name in HALVES}
        spilled |= {f"score_gradient_kernel_False_64_torch.{name}": 64 for name in HALVES}
        assert_fit({kernel: taken}, SHARED[90], stack, **spilled)
