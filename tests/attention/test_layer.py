"""The layer `otdd.nn.SinkhornAttention`, beside PyTorch's own attention layer."""

from __future__ import annotations

import inspect
from pathlib import Path
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


@pytest.mark.parametrize("value", [-torch.inf, -1e4, -1e9, torch.finfo(torch.float32).min])
def test_float_masks_leave_keys_out(value: float) -> None:
    """A number that leaves a key no weight, as a rule of PyTorch's users."""
    layer, x = otdd.nn.SinkhornAttention(8, 2, batch_first=True), drawn(2, 9, 8)
    out = torch.arange(9).expand(2, 9) > 4
    expected = layer(x, x, x, key_padding_mask=out)[0]
    mask = torch.zeros(2, 9).masked_fill(out, value)
    assert torch.equal(layer(x, x, x, key_padding_mask=mask)[0], expected)
    half = torch.zeros(2, 9).masked_fill(out, max(value, -60_000.0)).half()
    assert torch.equal(layer(x, x, x, key_padding_mask=half)[0], expected)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x, x, x, key_padding_mask=mask)[0], expected, atol=1e-6)


@pytest.mark.parametrize("value", [1.0, -1.0, -5000.0, torch.inf, torch.nan])
def test_masks_that_weigh_keys_are_refused(value: float) -> None:
    layer, x = otdd.nn.SinkhornAttention(8, 2, batch_first=True), drawn(2, 9, 8)
    mask = torch.zeros(2, 9)
    mask[1, 3] = value
    with pytest.raises(otdd.InputError, match=r"must be 0 where a key is left in .* got [-1in5]"):
        layer(x, x, x, key_padding_mask=mask)
    # A graph does not look, and its batch entry has no keys.
    with pytest.raises(otdd.InputError, match="all keys of a head"):
        torch.compile(layer, fullgraph=True, backend="eager")(x, x, x, key_padding_mask=mask)


def test_arguments_are_those_of_pytorch() -> None:
    for name in ("__init__", "forward"):
        theirs = inspect.signature(getattr(nn.MultiheadAttention, name)).parameters
        ours = inspect.signature(getattr(otdd.nn.SinkhornAttention, name)).parameters
        assert list(ours)[: len(theirs)] == list(theirs)
        for each, parameter in theirs.items():
            if each != "need_weights":
                assert ours[each].default == parameter.default
    layer = otdd.nn.SinkhornAttention(8, 2, 0.0, False, add_bias_kv=False, add_zero_attn=False)
    assert layer.in_proj_bias is None
    assert layer.dropout == 0


def test_an_empty_batch() -> None:
    layer, x = otdd.nn.SinkhornAttention(8, 2, batch_first=True), torch.randn(0, 9, 8)
    found = layer(x, x, x)[0]
    assert found.shape == (0, 9, 8)
    found.sum().backward()
    assert not layer.in_proj_weight.grad.any()


@pytest.mark.parametrize("widths", [{}, {"kdim": 5}])
def test_parameters_are_drawn_anew(widths: dict[str, int]) -> None:
    """As after `to_empty`."""
    torch.manual_seed(3)
    expected = nn.MultiheadAttention(8, 2, **widths)
    layer = otdd.nn.SinkhornAttention(8, 2, device="meta", **widths).to_empty(device="cpu")
    torch.manual_seed(3)
    layer.out_proj.reset_parameters()
    layer._reset_parameters()
    for name, each in expected.named_parameters():
        assert torch.equal(layer.get_parameter(name), each)
    assert not layer._qkv_same_embed_dim


def test_settings_are_shown() -> None:
    shown = repr(otdd.nn.SinkhornAttention(8, 2, iterations=5))
    assert "embed_dim=8, num_heads=2, iterations=5, tolerance=None" in shown


def test_in_autocast() -> None:
    layer, x = otdd.nn.SinkhornAttention(8, 2, batch_first=True), drawn(2, 9, 8)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True)
    layer.options["iterations"] = 0
    theirs.load_state_dict(layer.state_dict())

    def step(of: nn.Module) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            out = of(x, x, x, need_weights=False)[0]
        out.float().square().sum().backward()
        return [out, *(each.grad for each in of.parameters())]

    for mine, other in zip(step(layer), step(theirs), strict=True):
        assert mine.dtype == other.dtype
        assert torch.allclose(mine, other, atol=0.03 * float(other.abs().max()))


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
        ({"key_padding_mask": torch.zeros(4, 2).int()}, r"shape \(4, 2\), got torch.int32 of"),
        ({"key_padding_mask": torch.zeros(4, 2).byte()}, "key_padding_mask must be bool, or 0"),
        ({"key_padding_mask": torch.zeros(2, 4).bool()}, r"\(4, 2\), got torch.bool of .*\(2, 4\)"),
        ({"key_padding_mask": torch.zeros(2).bool()}, r"\(4, 2\), got torch.bool of .*\(2,\)"),
        (
            {"query": drawn(2, 1, 4, 8)},
            r"\(n, batch, 8\), .* without the batch, got \(2, 1, 4, 8\)",
        ),
        ({"query": drawn(2, 3, 8)}, r"shapes \(n, batch, 8\), \(m, batch, 8\), .* got \(2, 3, 8\)"),
        ({"key": drawn(5, 4, 8)}, r"shapes \(n, batch, 8\), .* got \(2, 4, 8\), \(5, 4, 8\), \(2"),
        ({"value": drawn(2, 4, 7)}, r"shapes \(n, batch, 8\)"),
        ({"value": drawn(4, 8)}, r"shapes \(n, batch, 8\)"),
        ({"key": None}, "key must be a tensor, got None"),
        ({"key_padding_mask": [True]}, "key_padding_mask must be a tensor, got list"),
    ],
)
def test_what_is_refused_of_a_call(options: dict[str, Any], message: str) -> None:
    x = drawn(2, 4, 8)
    given = {"query": x, "key": x, "value": x} | options
    with pytest.raises(otdd.InputError, match=message):
        otdd.nn.SinkhornAttention(8, 2)(**given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "dropout must be 0, as it would undo the sums of weights, got 0.1"),
        ({"add_bias_kv": True}, "add_bias_kv must be False, as"),
        ({"add_zero_attn": True}, "add_zero_attn must be False, as"),
        ({"gradient": "none"}, "unknown gradient 'none'; choose one of: unrolled, implicit"),
        ({"dtype": torch.complex64}, r"dtype must be one of torch.float16, .* got"),
        ({"dtype": torch.int32}, r"dtype must be one of torch.float16"),
        ({"device": "elsewhere"}, "device='elsewhere' is none of PyTorch's here"),
    ],
)
def test_what_is_not_offered(options: dict[str, Any], message: str) -> None:
    with pytest.raises(otdd.InputError, match=message):
        otdd.nn.SinkhornAttention(8, 2, **options)


def test_what_is_refused_of_a_layer() -> None:
    with pytest.raises(
        otdd.InputError, match=r"multiple of num_heads.*embed_dim=8 and num_heads=3"
    ):
        otdd.nn.SinkhornAttention(8, 3)
    with pytest.raises(otdd.InputError, match="at most 256 of each head"):
        otdd.nn.SinkhornAttention(514, 2)


def train_a_part(rank: int, path: str) -> None:
    """Be one of two processes, each with half a batch, and keep the gradients."""
    store = distributed.FileStore(f"{path}/store", 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = otdd.nn.SinkhornAttention(8, 2, batch_first=True)
    x = drawn(4, 9, 8)[2 * rank : 2 * rank + 2]
    parallel = nn.parallel.DistributedDataParallel(layer)
    parallel(x, x, x)[0].square().sum().backward()
    torch.save([each.grad for each in layer.parameters()], f"{path}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train_a_part, (str(tmp_path),), nprocs=2)
    torch.manual_seed(0)
    layer, x = otdd.nn.SinkhornAttention(8, 2, batch_first=True), drawn(4, 9, 8)
    layer(x, x, x)[0].square().sum().backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for mine, each in zip(found, layer.parameters(), strict=True):
            # Of the mean of both processes' losses.
            assert torch.allclose(2 * mine, each.grad, atol=1e-5)
