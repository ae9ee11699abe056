"""How points are packed for kernels, and solves that end on the points themselves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from otdd_flash.cost.compute import ComputeOptions
from otdd_flash.kernels.passes import resident_half_step
from otdd_flash.kernels.passes.score_terms import ClassTerms
from otdd_flash.kernels.points.packed_points import arrange, pack, power_of_two_scale
from otdd_flash.kernels.tiling import Tile
from otdd_flash.otdd import dataset_distance
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.schedules import Converged

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_points_of_any_type_and_strides_are_packed(dtype):
    draw = torch.Generator().manual_seed(0)
    points = torch.randn(6, 70, generator=draw).to(dtype).T[:, ::2].to(DEVICE)
    centre = torch.full((3,), 0.5, dtype=torch.float64, device=DEVICE)
    layout = arrange(torch.zeros(70, dtype=torch.int64, device=DEVICE), 1)
    packed = pack(points, layout, centre, 2.0**10)
    expected = points.double() - centre
    got = packed.rounded(3)[:, :3]
    torch.testing.assert_close(got, expected, rtol=2**-21, atol=2**-30)
    squares = packed.squares[:, layout.position].double()
    torch.testing.assert_close(squares[1], got.square().sum(1), rtol=1e-6, atol=0)
    high = packed.rounded(1).square().sum(1)
    torch.testing.assert_close(squares[0], high, rtol=1e-6, atol=0)
    assert not bool(packed.squares[:, ~layout.filled].any())


@pytest.mark.parametrize("shifted", [True, False])
def test_resident_rows_take_a_guess_of_the_highest_logits_where_there_is_one(
    shifted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a launch on a Hopper card is given, without one."""
    given: dict[str, object] = {}

    class Noted:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *args, **constants: given.update(constants, shift=args[6])

    monkeypatch.setattr(resident_half_step, "resident_half_step_kernel", Noted())
    places = SimpleNamespace(from_tensor=lambda *_: None)
    monkeypatch.setattr(resident_half_step, "TensorDescriptor", places)
    x, bias = torch.zeros(512, 320, dtype=torch.float16), torch.zeros(256)
    terms = ClassTerms("in_bias", bias, bias, torch.zeros(1, 1))
    shift, sums = torch.ones(256) if shifted else None, torch.zeros(1, 256)
    resident_half_step.resident_half_step(
        *(x, x, bias, terms, shift, torch.zeros(2, 4), sums, sums, torch.ones(()), 1.0),
        Tile(256, 64, 4, 3, descriptors=True),
    )
    assert given["SHIFTED"] == shifted
    assert given["shift"] is (bias if shift is None else shift)


@pytest.mark.parametrize("largest", [1e-20, 0.99, 1.0, 3.0, 1e20])
def test_the_scale_brings_the_largest_coordinate_below_the_end_of_float16(largest):
    assert 2**14 <= largest * power_of_two_scale(largest) < 2**15


@pytest.mark.gpu
@pytest.mark.parametrize("relative_epsilon", [1e-1, 1e-2, 1e-3])
def test_divergences_on_a_gpu_hold_the_double_precision_value(relative_epsilon):
    draw, sides = torch.Generator().manual_seed(0), []
    for count, shift in ((1500, 1.0), (2000, 0.0)):
        points = torch.randn(count, 64, generator=draw) / 8 + shift
        weights = torch.rand(count, generator=draw)
        weights[0] = 0
        labels = torch.randint(0, 10, (count,), generator=draw)
        sides.append(LabeledSamples(points, labels, tuple("abcdefghij"), weights))
    fast, double = (
        dataset_distance(
            *sides,
            epsilon_relative=relative_epsilon,
            labels="means",
            solver=Converged(tolerance),
            compute=ComputeOptions(device="cuda", precision=precision),
        )
        for precision, tolerance in (("fast", 1e-3), ("double", 1e-8))
    )
    assert fast.divergence.backend.startswith("triton")
    assert double.divergence.backend.startswith("torch")
    assert fast.converged
    assert fast.bounds[0] <= double.value <= fast.bounds[1]
