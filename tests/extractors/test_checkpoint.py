"""Checkpoints: every wrapping gives the same weights, anything unfitting is named."""

from functools import partial

import pytest
import torch
from refusals import naming
from torch import nn

from otdd_flash.errors import InputError
from otdd_flash.extractors import timm, torchvision
from otdd_flash.extractors.checkpoint import load_checkpoint


def network(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))


WRAPPINGS = {
    "bare": lambda state: state,
    "state_dict": lambda state: {"state_dict": state, "epoch": 3, "optimizer": {}},
    "both": lambda state: {"model": {"state_dict": state}},
    "distributed": lambda state: {f"module.{name}": value for name, value in state.items()},
    "compiled": lambda state: {f"_orig_mod.module.{n}": v for n, v in state.items()},
    "with a head": lambda state: {**state, "fc.weight": torch.ones(10, 2)},
    "without counters": lambda state: {
        name: value for name, value in state.items() if "num_batches" not in name
    },
}


def test_wrapped_weights_are_found(tmp_path):
    from safetensors.torch import save_file

    files = []
    for place, wrapping in enumerate(WRAPPINGS.values()):
        file = tmp_path / f"{place}{('.pt', '.pth')[place % 2]}"
        torch.save(wrapping(network(1).state_dict()), file)
        files.append(file)
    state = {f"module.{name}": value for name, value in network(1).state_dict().items()}
    files.append(tmp_path / "w.safetensors")
    save_file({**state, "module.fc.bias": torch.ones(10)}, files[-1])
    for name, file in zip([*WRAPPINGS, "safetensors"], files, strict=True):
        loaded = network(2)
        load_checkpoint(loaded, str(file), ("fc",))
        for key, tensor in network(1).state_dict().items():
            assert torch.equal(loaded.state_dict()[key], tensor), (name, key)


@pytest.mark.slow
def test_unfitting_weights_are_named(tmp_path):
    module = network(0)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    s = network(1).state_dict()
    for given, message in (
        ({k: v for k, v in s.items() if k != "0.weight"}, r"1 missing \(0\.weight\)"),
        ({**s, "fcx.weight": s["0.bias"]}, r"1 unknown \(fcx\.weight\)"),
        ({**s, "0.bias": torch.ones(5)}, r"1 of another shape \(0\.bias \(5,\) for"),
        ({f"x.{k}": v for k, v in s.items()}, r"7 unknown \(.*, \.\.\.\)"),
        ({**s, "args": "lr=3"}, r"more than weights \(args\)"),
        ([*s.values()], "holds no state dict but a list"),
        ({}, "holds no state dict"),
        # A pickled module is not executed.
        (network(0), r"torch\.save\(model\.state_dict\(\), FILE\)"),
    ):
        torch.save(given, tmp_path / "w.pt")
        with pytest.raises(InputError, match=message):
            load_checkpoint(module, str(tmp_path / "w.pt"), ("fc",))
        now = module.state_dict()
        assert all(torch.equal(before[name], now[name]) for name in now), message


def test_unreadable_files_are_named(tmp_path):
    for name in ("w.pt", "w.safetensors"):
        file = tmp_path / name
        with pytest.raises(InputError, match=f"no checkpoint file .*{name}"):
            load_checkpoint(network(0), str(file), ())
        for content in (b"", b"no weights at all"):
            file.write_bytes(content)
            with pytest.raises(InputError, match=f"cannot read checkpoint .*{name}"):
                load_checkpoint(network(0), str(file), ())


@pytest.mark.slow
@pytest.mark.parametrize(("model", "classes"), [("test_vit3", 3), ("test_efficientnet", 0)])
def test_the_error_names_the_model_of_timm_that_a_checkpoint_fits(tmp_path, model, classes):
    import timm as library

    state = library.create_model(model, num_classes=classes).state_dict()
    torch.save({"state_dict": state}, tmp_path / "w.pt")
    with pytest.raises(InputError, match=r"does not fit .* missing .*it fits timm's ") as told:
        timm("test_resnet", checkpoint=tmp_path / "w.pt")
    advice = str(told.value).rpartition("extractor=timm extractor.model=")[2]
    assert advice == model
    extractor = timm(advice, checkpoint=tmp_path / "w.pt")
    assert extractor.description.split()[2] == model


@pytest.mark.slow
def test_weights_that_fit_another_model_or_none_are_told(tmp_path):
    import timm as library
    from torchvision.models import resnet18

    state = library.create_model("test_efficientnet", num_classes=5).state_dict()
    others = {f"{i}.{n.rpartition('.')[2]}": state[n] for i, n in enumerate(state)}
    renamed = "timm's test_efficientnet has tensors of these shapes under other names: rename"
    for make, weights, message in (
        (partial(timm, "test_resnet"), others, renamed),
        (partial(timm, "test_resnet"), network(1).state_dict(), "no model of timm .*from_module"),
        # Weights of torchvision are those of timm by the same name.
        (
            partial(torchvision, "squeezenet1_1"),
            resnet18(num_classes=10).state_dict(),
            "timm's resnet18, resnetblur18; choose the one",
        ),
    ):
        torch.save(weights, tmp_path / "w.pt")
        with naming(message), pytest.raises(InputError, match=message):
            make(checkpoint=tmp_path / "w.pt")
