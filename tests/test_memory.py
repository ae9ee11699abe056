"""What operators are said to need against what they take, and what is said when it is not there."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from labelled_costs import labelled_cost
from live_bytes import peak
from torch import Tensor

from otdd_flash import memory
from otdd_flash.cost import points as cost_points
from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.cost.ground import GroundCost
from otdd_flash.cost.points import (
    CHUNK_ELEMENTS_CPU,
    CHUNK_ELEMENTS_GPU,
    LabelledCost,
    squared_norms,
)
from otdd_flash.errors import InputError
from otdd_flash.kernels.passes import plan_blocks
from otdd_flash.kernels.passes.fused_product import HELD_COORDINATES
from otdd_flash.kernels.passes.plan_blocks import PlanBlocks
from otdd_flash.memory import check_memory, free_memory, shortage, within_memory
from otdd_flash.operators import stored_segments
from otdd_flash.operators.build import CostSize, kernel_bytes
from otdd_flash.operators.comparison import Comparison
from otdd_flash.operators.triton_operator import KernelOperator
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.schedules import Converged
from otdd_flash.solver.solving import solve
from tests.refusals import naming

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# Where Triton runs: on a GPU, else in its interpreter.
HERE = GPU if torch.cuda.is_available() else CPU


def cloud(n: int, dim: int, classes: int, seed: int = 0) -> LabeledSamples:
    draw = torch.Generator().manual_seed(seed)
    names = tuple(map(str, range(classes)))
    return LabeledSamples(torch.randn(n, dim, generator=draw), torch.arange(n) % classes, names)


@pytest.mark.parametrize(
    ("n", "m", "dim", "classes", "precision"),
    [
        *((1200, m, 300, 4, precision) for m in (1000, None) for precision in ("fast", "double")),
        (300, 9000, 2, 300, "double"),
        (1200, 9000, 2, 1, "fast"),
    ],
)
def test_streaming_takes_what_it_is_said_to_need(
    n: int, m: int | None, dim: int, classes: int, precision: str
) -> None:
    x = cloud(n, dim, classes)
    y = x if m is None else cloud(m, dim, classes, seed=1)
    compute = ComputeOptions("cpu", precision=precision)

    prepared = Comparison.prepare((x, y), GroundCost(), compute, debias=False)
    given = prepared.with_classes(torch.ones(2 * classes, 2 * classes))

    def run() -> object:
        operator = given.operator("xy", keep_scores=False)
        return operator, operator.softmin_rows(torch.zeros(len(y)), 0.1)

    needed = given.needed
    assert needed <= peak(run, CPU) <= 1.1 * needed


@pytest.mark.slow
@pytest.mark.parametrize("m", [500, None])
def test_kernels_take_no_less_than_they_are_said_to_need(m: int | None) -> None:
    x = cloud(600, 300, 2)
    y = x if m is None else cloud(m, 300, 2, seed=1)
    compute = ComputeOptions(str(HERE), "triton")

    def prepared() -> Comparison:
        return Comparison.prepare((x, y), GroundCost(), compute, debias=False)

    def run() -> object:
        operator = prepared().with_classes(torch.ones(4, 4)).operator("xy")
        f, g = torch.zeros_like(operator.a), torch.zeros_like(operator.b)
        # So many columns that the plan is written to a block, as for a gradient by points.
        values = torch.ones((len(g), 40), device=g.device)
        return operator, operator.plan(f, g, 1000.0).applied(values)

    # More: padding to blocks, and float64 copies of a few rows.
    needed = prepared().needed
    assert needed <= peak(run, HERE) <= 4 * needed


@pytest.mark.parametrize(
    ("n", "dim", "device"),
    [
        (9000, 500, CPU),
        pytest.param(120_000, 512, GPU, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_float64_copies_of_points_are_one_small_buffer(n: int, dim: int, device: Any) -> None:
    x, y = (cloud(n, dim, 2, seed).to(device) for seed in (0, 1))
    masses = torch.full((n,), 1 / n, dtype=torch.float64, device=device)
    weights = {"lambda_x": 0.5, "lambda_y": 0.5}
    cost = LabelledCost.of(x, y, torch.ones(2, 2), **weights)
    gpu = device.type == "cuda"
    # The buffer, and some numbers of every point and every feature.
    most = 8 * (CHUNK_ELEMENTS_GPU if gpu else CHUNK_ELEMENTS_CPU) + 64 * (n + dim)
    assert most < 8 * n * dim / 8
    both = 2 * 4 * n * dim
    for extra, run in (
        (0, lambda: LabelledCost.of(x, y, torch.ones(2, 2), **weights).mean_cost),
        (0, lambda: cost.expected_costs(masses)),
        (0, lambda: squared_norms(x.features)),
        (both, lambda: cost.centred(torch.float32)),
    ):
        # First without counting: libraries take their own buffers then.
        run()
        assert peak(run, device) <= extra + most


@pytest.mark.gpu
def test_a_certified_divergence_takes_little_more_than_its_packed_points() -> None:
    x, y = (cloud(60_000, 512, 10, seed).to(GPU) for seed in (0, 1))
    comparison = Comparison.between(x, y, 100.0, compute=ComputeOptions(str(GPU), "triton"))
    options = Converged(tolerance=1.9, max_iterations=3)
    solve(comparison, options)
    packed = 2 * 2 * (60_000 + 60_000) * 512
    assert peak(lambda: solve(comparison, options), GPU) <= packed + 92 * 2**20


def test_kernels_hold_two_half_parts_of_every_coordinate_and_of_a_block_of_the_plan() -> None:
    def needed(dim: int, *, symmetric: bool) -> int:
        return kernel_bytes(CostSize(60_000, 60_000, dim, 10, symmetric=symmetric))

    of_dim, plan, stripes = 2 * 2 * 60_000, 2 * 2 * 8192 * 4096, 4 * (60_000 // 128) * 60_000
    assert needed(509, symmetric=False) == 2 * of_dim * 512 + plan
    assert needed(64, symmetric=False) == 2 * of_dim * 64
    assert stripes < plan
    assert needed(509, symmetric=True) == of_dim * 512 + plan
    assert needed(64, symmetric=True) == of_dim * 64 + stripes


@pytest.mark.slow(after=2)
@pytest.mark.parametrize("precision", ["fast", "high"])
@pytest.mark.parametrize(
    ("n", "m"), [(768, 512), (1024, 1024), (256, 256), (512, 1024), (256, 2048)]
)
@pytest.mark.parametrize("whole", [False, True])
def test_the_block_of_a_plan_is_what_it_is_said_to_take(
    n: int, m: int, precision: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole numbers are on a lattice, of which an operator reads one part."""
    monkeypatch.setattr(plan_blocks, "BLOCK_HEIGHT", 512)
    monkeypatch.setattr(plan_blocks, "BLOCK_WIDTH", 256)
    dim = HELD_COORDINATES + 8
    x, y = (cloud(size, dim, 1).features.to(HERE) for size in (n, m))
    cost = labelled_cost(x.round(), y.round(), 1) if whole else labelled_cost(x, y, 1)
    operator = KernelOperator(cost, precision).refined
    plan = operator.plan(torch.zeros(n, device=HERE), torch.zeros(m, device=HERE), 1.0)
    points = sum(side.coordinates.nbytes for side in operator.packed)
    block = PlanBlocks(*plan._computed(operator.plan_parts)).buffer().nbytes
    assert kernel_bytes(CostSize(n, m, dim, 1, symmetric=False)) == points + block


def test_units_are_powers_of_1024_and_of_1000() -> None:
    budgets = ["3", "3KiB", "3MiB", "3GiB", "3TiB", "3KB", "3MB", "3GB", "1.5 TB"]
    expected = [3, *(3 * 1024**k for k in (1, 2, 3, 4)), 3e3, 3e6, 3e9, 1.5e12]
    assert [memory.stated_budget(budget) for budget in budgets] == expected
    assert memory.stated_budget("auto") is None


def test_what_pytorch_keeps_on_a_gpu_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything was allocated PyTorch knows no numbers."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (5000, 10_000))
    known = {"reserved_bytes": 700, "allocated_bytes": 200}
    for expected, kept in ((5000, {}), (5500, known)):
        found = {name: {"all": {"current": count}} for name, count in kept.items()}
        monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _, found=found: found)
        assert free_memory(GPU) == expected


@pytest.mark.parametrize(
    ("dtype", "gpu", "ways"),
    [
        (torch.float32, False, "fewer samples (max_samples) or fewer dimensions (extractor.pca)"),
        (torch.float64, False, "fewer dimensions (extractor.pca) or precision=high"),
        (torch.float32, True, "fewer dimensions (extractor.pca) or device=cuda"),
    ],
)
def test_the_ways_out_are_those_that_help(
    dtype: torch.dtype, gpu: bool, ways: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(InputError) as refused:
        check_memory("this", 2**60, CPU, dtype)
    assert str(refused.value).endswith(ways)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
            "an allocation of 2.00 GiB found 500 bytes free, and these points need at least",
        ),
        (torch.OutOfMemoryError("no details"), "one allocation found 500 bytes free"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2048 "),
            "an allocation of 2.0 KiB found 500 bytes free",
        ),
    ],
)
def test_a_failed_allocation_is_told_in_numbers(
    error: RuntimeError, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda _: 500)
    told = str(shortage(error, "these points", 3000, GPU, torch.float32))
    assert told.startswith("out of memory on cuda:0: ")
    assert said in told
    assert "2.9 KiB in all; use fewer samples (max_samples)" in told


def test_an_error_of_memory_holds_no_tensors_of_the_calls_that_failed() -> None:
    """Without a collection of cycles: the next attempt needs the memory at once."""
    held: list[weakref.ref[Tensor]] = []

    def fill() -> None:
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        try:
            raise torch.OutOfMemoryError("Tried to allocate 1.00 GiB")
        except torch.OutOfMemoryError as first:
            # As where something smaller is tried next.
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB") from first

    gc.disable()
    try:
        within = within_memory("these points", 3000, CPU, torch.float32)
        with pytest.raises(InputError, match=r"of 2\.00 GiB") as raised, within:
            fill()
        assert raised.value.__context__ is None
        assert raised.value.__cause__ is None
        assert held[0]() is None
        error = weakref.ref(raised.value)
        del raised
        assert error() is None
    finally:
        gc.enable()


@pytest.mark.gpu
def test_what_a_failed_call_held_on_a_gpu_is_free_again() -> None:
    def fill() -> None:
        held = torch.empty(1 << 20, device=GPU)
        torch.empty(1 << 50, device=GPU).add_(held[0])

    before = torch.cuda.memory_allocated(GPU)
    within = within_memory("these points", 3000, GPU, torch.float32)
    said = "out of memory on cuda:0: an allocation of"
    with pytest.raises(InputError, match=said) as raised, within:
        fill()
    assert torch.cuda.memory_allocated(GPU) == before
    assert raised.value.__context__ is None


def test_other_errors_leave_a_block_of_memory_as_they_are() -> None:
    for given in (RuntimeError("an illegal memory access"), KeyboardInterrupt(), InputError("no")):
        within = within_memory("these points", 3000, CPU, torch.float32)
        with naming(str(given)), pytest.raises(type(given)) as raised, within:
            raise given
        assert raised.value is given
    with within_memory("these points", 3000, CPU, torch.float32):
        pass


def test_a_row_that_is_longer_than_a_chunk_is_taken_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cost_points, "CHUNK_ELEMENTS_CPU", 12)
    for dim, sizes in ((4, [3, 2]), (12, [1] * 5), (13, [1] * 5)):
        points = torch.arange(5.0 * dim).view(5, dim)
        seen = [(rows, some.clone()) for rows, some in cost_points.in_float64(points)]
        assert [len(some) for _, some in seen] == sizes
        assert torch.equal(torch.cat([some for _, some in seen]), points.double())


def test_tiles_of_padded_problems_fit_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole problems while several fit, else rows of one; the scratch is no larger than either."""
    monkeypatch.setattr(stored_segments, "TILE_ELEMENTS_CPU", 100)
    for size, most in (((7, 5, 6), 90), ((2, 5, 6), 60), ((3, 20, 9), 99), ((2, 3, 200), 200)):
        taken = torch.zeros(size[:2], dtype=torch.int64)
        for segments, rows, scratch in stored_segments.tiles(size, torch.float64, CPU):
            taken[segments, rows] += 1
            assert scratch.untyped_storage().nbytes() == 8 * most
        assert bool((taken == 1).all())
