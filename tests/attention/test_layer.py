"""The layer `otdd.nn.SinkhornAttention`, beside PyTorch's own attention layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import otdd_flash as otdd


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": 5, "vdim": 7}])
@pytest.mark.parametrize("bias", [True, False])
def test_no_iteration_is_the_layer_of_pytorch(
    batch_first: bool, widths: dict[str, int], bias: bool
) -> None:
    settings = {"bias": bias, "batch_first": batch_first, **widths}
    theirs = nn.MultiheadAttention(12, 3, **settings)
    ours = otdd.nn.SinkhornAttention(12, 3, iterations=0, **settings)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    given = (
        drawn(4, 4, 12),
        drawn(4, 4, widths.get("kdim", 12)),
        drawn(4, 4, widths.get("vdim", 12)),
    )
    mask = torch.zeros(4, 4, dtype=torch.bool)
    mask[1, 2:] = True
    for padding in (None, mask):
        found, weights = ours(*given, key_padding_mask=padding)
        assert weights is None
        expected, _ = theirs(*given, key_padding_mask=padding, need_weights=False)
        assert torch.allclose(found, expected, atol=1e-6)
    if batch_first:
        found, _ = ours(*(each[0] for each in given), key_padding_mask=mask[0])
        assert torch.allclose(found, theirs(*(each[0] for each in given))[0], atol=1e-6)


def test_settings_reach_the_function() -> None:
    x = drawn(2, 9, 8)
    layer = otdd.nn.SinkhornAttention(8, 2, batch_first=True, tolerance=1e-5)
    converged = layer(x, x, x)[0]
    layer.options |= {"tolerance": None, "iterations": 60}
    assert torch.allclose(layer(x, x, x)[0], converged, atol=1e-4)
    layer.options["iterations"] = 0
    assert not torch.allclose(layer(x, x, x)[0], converged, atol=1e-4)


def test_within_an_encoder_layer_in_training_and_evaluation() -> None:
    """PyTorch's fused path would attend by softmax."""
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder.self_attn = otdd.nn.SinkhornAttention(8, 2, batch_first=True)
    x, mask = drawn(2, 9, 8), torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 5:] = True
    trained = encoder(x, src_key_padding_mask=mask)
    trained.square().sum().backward()
    assert all(each.grad is not None for each in encoder.parameters())
    with torch.no_grad():
        evaluated = encoder.eval()(x, src_key_padding_mask=mask)
    assert torch.allclose(trained, evaluated, atol=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_within_an_encoder() -> None:
    x, mask = drawn(2, 9, 8), torch.zeros(2, 9, dtype=torch.bool)
    mask[0, 5:] = True
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    late = nn.TransformerEncoder(layer, 1)
    layer.self_attn = otdd.nn.SinkhornAttention(8, 2, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    trained = encoder(x, src_key_padding_mask=mask)
    with torch.no_grad():
        evaluated = encoder.eval()(x, src_key_padding_mask=mask)
        assert torch.allclose(trained[~mask], evaluated[~mask], atol=1e-6)
        # Which had decided to nest before it had this layer.
        late.layers[0].self_attn = layer.self_attn
        with pytest.raises(otdd.InputError, match="enable_nested_tensor=False"):
            late.eval()(x, src_key_padding_mask=mask)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_causal": True}, "a triangular doubly stochastic matrix is the identity"),
        ({"attn_mask": torch.zeros(4, 4)}, "no attn_mask and returns no weights"),
        ({"need_weights": True}, "give need_weights=False"),
    ],
)
def test_what_is_refused_of_a_call(options: dict[str, Any], message: str) -> None:
    x = drawn(2, 4, 8)
    with pytest.raises(otdd.InputError, match=message):
        otdd.nn.SinkhornAttention(8, 2)(x, x, x, **options)


def test_what_is_refused_of_a_layer() -> None:
    with pytest.raises(
        otdd.InputError, match=r"multiple of num_heads.*embed_dim=8 and num_heads=3"
    ):
        otdd.nn.SinkhornAttention(8, 3)
    with pytest.raises(otdd.InputError, match="at most 256 of each head"):
        otdd.nn.SinkhornAttention(514, 2)


@pytest.mark.slow
def test_distributed_data_parallel() -> None:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        layer = otdd.nn.SinkhornAttention(8, 2, batch_first=True)
        parallel = nn.parallel.DistributedDataParallel(layer)
        x = drawn(2, 9, 8)
        parallel(x, x, x)[0].square().sum().backward()
        found = [each.grad.clone() for each in layer.parameters()]
        layer.zero_grad()
        layer(x, x, x)[0].square().sum().backward()
        for mine, each in zip(found, layer.parameters(), strict=True):
            assert torch.equal(mine, each.grad)
    finally:
        distributed.destroy_process_group()
