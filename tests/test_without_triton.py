"""Everything that a processor computes runs where Triton is not installed, as on a Mac."""

from __future__ import annotations

import subprocess
import sys

import pytest

CALLS = """
import sys

sys.modules["triton"] = None
import torch

import otdd_flash as otdd

x, y = torch.randn(30, 2, requires_grad=True), torch.randn(20, 2)
loss = otdd.sinkhorn_loss(x, y, epsilon=1.0)
(gradient,) = torch.autograd.grad(loss, x, create_graph=True)
gradient.sum().backward()
otdd.sinkhorn_losses([x, x], [y, y], epsilon=1.0)
otdd.matrix_transport(torch.rand(20, 20), epsilon=0.1)
otdd.doubly_stochastic(torch.rand(2, 20, 20))
otdd.transport_map(x.detach(), y, epsilon=1.0)
labels = torch.arange(60) % 3
otdd.dataset_distance((torch.randn(60, 4), labels), (torch.randn(60, 4), labels))
print("done")
"""


@pytest.mark.slow
def test_a_processor_needs_no_triton() -> None:
    command = [sys.executable, "-W", "ignore", "-c", CALLS]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (found.stdout.strip(), found.returncode) == ("done", 0), found.stderr
