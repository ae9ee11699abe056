"""How often a step of a flow reads all coordinates, and in how many pieces."""

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import otdd_flash as otdd
from otdd_flash.cost import points as cost_points

COUNT, DIM = 40, 7
# What reads nothing.
VIEWS = {"view", "detach", "t", "slice", "split", "alias", "expand", "transpose", "empty_like"}


class Reads(TorchDispatchMode):
    """Counts operations by the rows of points that they read, while it is on."""

    def __init__(self):
        super().__init__()
        self.on, self.whole, self.pieces = False, Counter[str](), Counter[str]()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        shapes = {leaf.shape for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        if self.on and name not in VIEWS:
            if (COUNT, DIM) in shapes:
                self.whole[name] += 1
            elif any(len(shape) == 2 and shape[1] == DIM for shape in shapes):
                self.pieces[name] += 1
        return function(*args, **(kwargs or {}))


def reads_of_a_step(pieces, monkeypatch):
    """Of the third step, by when all that is found once is."""
    monkeypatch.setattr(cost_points, "CHUNK_ELEMENTS_CPU", COUNT // pieces * DIM)
    draw, labels, reads = torch.Generator().manual_seed(0), torch.arange(COUNT) % 2, Reads()
    clouds = [
        otdd.LabeledSamples(torch.randn(COUNT, DIM, generator=draw) + k, labels, ("a", "b"))
        for k in range(2)
    ]

    table = torch.ones(4, 4, dtype=torch.float64).fill_diagonal_(0)

    def progress(record):
        reads.on = record.step == 1

    with reads:
        otdd.gradient_flow(
            *clouds,
            otdd.Flow(4),
            epsilon=2.0,
            labels=otdd.labels.Given(otdd.ClassDistances.from_full(table, 2)),
            compute=otdd.ComputeOptions("cpu", "torch", memory_budget=0),
            callbacks=otdd.Callbacks(progress=progress),
        )
    return reads


@pytest.mark.slow
def test_a_step_reads_its_points_a_known_number_of_times(monkeypatch):
    """A pass more, over all points or piece by piece, is a launch more on a GPU, or one a piece."""
    few, many = (reads_of_a_step(pieces, monkeypatch) for pieces in (2, 8))
    # Three checks that all numbers are finite read them once each, and either end of the particles.
    assert few.whole == many.whole
    assert few.whole["abs"] == few.whole["ne"] == 0
    assert few.whole.total() <= 63
    assert many.pieces.total() - few.pieces.total() <= (8 - 2) * 37
