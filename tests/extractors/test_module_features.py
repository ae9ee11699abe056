"""A user's own network as an extractor: what goes in and comes out, its state, and its cache."""

import copy
import os
import subprocess
import sys
import threading
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import naming
from torch import nn

from otdd_flash import shown
from otdd_flash.data.dataset import LabeledDataset
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.extractors import embed, from_module
from otdd_flash.extractors.network import Network, evaluating

IMAGES = torch.rand(7, 3, 6, 5, generator=torch.Generator().manual_seed(0))
FACTOR = 2.0


def images(inputs=None, modality="image"):
    inputs = list(IMAGES) if inputs is None else inputs
    return LabeledDataset(inputs, None, (), None, modality, "tiny")


def network(seed=0):
    """A network whose output depends on its mode, and whose layers change their inputs."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 2, 2),
            nn.Dropout(0.5),
        )
        nn.init.normal_(net[1].running_mean)
    return net


class Own(nn.Module):
    """A network of a user's own class, with a setting, a set, and a buffer of no state dict."""

    kinds = frozenset({"one", "two", "three"})

    def __init__(self, scale=1.0):
        super().__init__()
        self.body = network()
        self.scale = scale
        self.register_buffer("shift", torch.zeros(2, 1, 1), persistent=False)

    def forward(self, batch):
        return self.body(batch) * self.scale + self.shift


def evaluated(net, batch=IMAGES):
    modes = [part.training for part in net.modules()]
    with torch.no_grad():
        output = net.eval()(batch)
    for part, mode in zip(net.modules(), modes, strict=True):
        part.training = mode
    return output


def test_a_network_runs_in_evaluation_mode_and_space_is_averaged():
    net = network().train()
    expected = evaluated(net).mean((2, 3))
    assert torch.equal(embed(images(), net).features, expected)
    assert torch.equal(embed(images(), from_module(net)).features, expected)
    assert torch.equal(from_module(net)(list(IMAGES)), expected)
    torch.testing.assert_close(from_module(net, batch_size=2)(list(IMAGES)), expected)
    assert not expected.requires_grad
    assert all(parameter.grad is None for parameter in net.parameters())


def test_rows_stay_rows_and_numbers_of_arrays_get_the_type_of_the_weights():
    layer, rows = nn.Linear(4, 3), np.random.default_rng(0).normal(size=(5, 4))
    table, numbers = nn.EmbeddingBag(9, 3), np.arange(12).reshape(4, 3) % 9
    for net, given, tensor in (
        (layer, rows, torch.from_numpy(rows).float()),
        (copy.deepcopy(layer).double(), rows, torch.from_numpy(rows)),
        (table, numbers, torch.from_numpy(numbers)),
    ):
        assert torch.equal(embed(images(given, "array"), net).features, net(tensor).detach())


def test_a_layer_gives_its_own_output():
    """Before the next layer changes it in place."""
    for layer, last in (("1", 2), ("3", 4)):
        net = network()
        with torch.no_grad():
            wanted = net.eval()[:last](IMAGES).mean((2, 3))
        assert torch.equal(embed(images(), from_module(net.train(), layer=layer)).features, wanted)
        assert not any(part._forward_hooks for part in net.modules())


def test_a_layer_of_a_compiled_module_has_two_names():
    """As the compiled module lists it, and as the original does."""
    net = network()
    listed = torch.compile(net)
    names = {name for name, _ in listed.named_modules()}
    assert "_orig_mod.1" in names
    wanted = embed(images(), from_module(net, layer="1"))
    for name in ("_orig_mod.1", "1"):
        extractor = from_module(listed, layer=name)
        assert extractor.key == from_module(listed, layer="1").key
        assert torch.equal(embed(images(), extractor).features, wanted.features)
    with pytest.raises(InputError, match=r"no submodule '_orig_mod.7'; close names: 0, 1, 2, 3, 4"):
        from_module(listed, layer="_orig_mod.7")


class Several(nn.Module):
    """Parts that run twice, never, and whose output is no tensor."""

    def __init__(self):
        super().__init__()
        self.twice, self.never = nn.Identity(), nn.Identity()
        self.memory, self.last_layer = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, batch):
        return self.twice(self.twice(self.last_layer(self.memory(batch[:, 0])[0][:, -1])))


LAYERS = [
    ("twice", r"'twice' of Several runs 2 times in a forward pass; choose one that runs once"),
    ("never", r"'never' of Several does not run in a forward pass"),
    ("memory", r"'memory' of Several returns tuple \(\(7, 6, 4\), tuple of 2 items\)"),
    ("last_layr", r"Several has no submodule 'last_layr'; close names: last_layer"),
    ("xyz", r"no submodule 'xyz'; close names: twice, never, memory, last_layer$"),
]


class Returns(nn.Module):
    """What a function makes of the batch."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, batch):
        return self.make(batch)


def failing(item):
    raise ZeroDivisionError


RETURNED = [
    (lambda x: x.mean(1), r"\(b, d\) or \(b, c, h, w\).* 7 inputs, got \(7, 6, 5\); .*layer"),
    (lambda x: x.sum(), r"got \(\)"),
    (lambda x: x[:1], r"got \(1, 3\)"),
    (lambda x: x[None], r"got \(1, 7, 3, 6, 5\)"),
    (lambda x: (x, x.mean((2, 3))), r"returns tuple \(\(7, 3, 6, 5\), \(7, 3\)\); take"),
    (lambda x: {"logits": x[:, 0, 0]}, r"returns dict \(logits: \(7, 5\)\)"),
    (lambda x: None, "returns None"),
    (lambda x: x[:, 0, 0].to(torch.complex64), "real features, got torch.complex64"),
    (lambda x: torch.full((7, 2), 2**30), "gives integers up to 1073741824"),
    (lambda x: x @ x, "network Returns raised RuntimeError: "),
]
FLAT = nn.Flatten()
GIVEN = [
    (images(["a", "b"], "text"), FLAT, "the inputs are texts; pass transform=.*tokens"),
    (images(np.zeros((2, 8, 8), np.uint8)), FLAT, r"arrays \(8, 8\) of uint8; pass .*=.*ToTen"),
    (images([[0.0] * 8], "array"), FLAT, "list of 8 items; pass transform="),
    (images([IMAGES[0, :, :4], IMAGES[0]]), FLAT, r"\(3, 4, 5\) and \(3, 6, 5\); pass"),
    (images([Image.new("RGB", (5, 6))]), FLAT, r"images of PIL such as RGB 5 x 6; .*=.*ToT"),
    (
        images(),
        from_module(FLAT, lambda item: {"pixels": item}),
        r"transform must return a tensor .* got dict of 1 items",
    ),
    (images(), from_module(FLAT, failing), "transform raised ZeroDivisionError"),
    (images(), nn.Linear(5, 2, device="meta"), "on the device meta"),
    (images(), from_module(FLAT, device="gpu"), "unknown device 'gpu'"),
]


def test_inputs_networks_and_outputs_that_do_not_fit_are_refused():
    returned = ((images(), Returns(make), message) for make, message in RETURNED)
    for dataset, net, message in (*GIVEN, *returned):
        with naming(message), pytest.raises(InputError, match=message):
            embed(dataset, net)
    several = Several()
    for layer, message in LAYERS:
        with naming(layer), pytest.raises(InputError, match=message):
            embed(images(), from_module(several, layer=layer))
        assert not any(part._forward_hooks for part in several.modules())
    with pytest.raises(InputError, match=r"net must be a torch.nn.Module; from_callable takes"):
        from_module(torch.relu)


class Interrupt(BaseException):
    """What a user presses."""


def test_an_empty_batch_is_refused():
    for extractor in (from_module(Own()), text_network()):
        with pytest.raises(InputError, match="needs at least one input, got an empty batch"):
            extractor([])


def text_network():
    return Network("lengths", nn.Identity(), frozenset({"text"}), len, lambda _, sizes: sizes)


@pytest.mark.parametrize("end", ["done", "transform", "network", "progress"])
def test_every_submodule_gets_its_mode_back(end, tmp_path):
    net = network().train()
    # As one does who trains with frozen statistics.
    net[1].eval()
    modes, seen = [part.training for part in net.modules()], []
    net[4].register_forward_hook(lambda *_: seen.append([p.training for p in net.modules()]))

    def ends(value, where):
        if seen and end == where:
            raise Interrupt
        return value

    extractor = from_module(
        nn.Sequential(net, Returns(lambda x: ends(x, "network"))),
        lambda item: ends(item, "transform"),
    )
    options = {"batch_size": 3, "progress": lambda *_: ends(None, "progress")}
    # Its traceback is kept, as an interactive session does.
    kept = []
    try:
        embed(images(), extractor, features_path=tmp_path / "features.npy", **options)
    except Interrupt as error:
        kept.append(error)
    assert [part.training for part in net.modules()] == modes
    assert bool(kept) == (end != "done")
    assert seen
    assert not any(map(any, seen))


def test_batch_size_device_and_precision_are_those_of_the_extractor_unless_a_call_has_its_own():
    net, sizes = network(), []
    exact = evaluated(net).mean((2, 3))
    net[0].register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    embed(images(), from_module(net, batch_size=3))
    embed(images(), from_module(net, batch_size=3), batch_size=5)
    assert torch.equal(embed(images(), net).features, exact)
    assert sizes == [3, 3, 1, 5, 2, 7]
    assert len(embed(images(), from_module(net, device="gpu"), device="cpu").features) == 7
    # It is not rounded to half precision unless asked.
    rounded = embed(images(), net, mixed_precision=True).features
    assert 0 < float((rounded - exact).abs().max()) < 0.05


@pytest.mark.gpu
def test_auto_leaves_a_network_where_it_is_and_a_device_has_it_only_meanwhile():
    net = network().train()
    expected = evaluated(net).mean((2, 3))
    seen = []
    net[0].register_forward_hook(lambda layer, _, __: seen.append(layer.weight.device.type))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for device, moved in (("auto", "cpu"), ("cuda", "cuda")):
        features = embed(images(), from_module(net, device=device)).features
        torch.testing.assert_close(features, expected, rtol=1e-2, atol=1e-3)
        assert seen.pop() == moved
        assert {parameter.device.type for parameter in net.parameters()} == {"cpu"}
    assert optimizer.param_groups[0]["params"][0] is net[0].weight
    embed(images(), net.cuda())
    assert seen.pop() == "cuda"
    assert net[0].weight.is_cuda


class Moving(nn.Linear):
    """Notes where it is moved to."""

    def __init__(self):
        super().__init__(2, 3)
        self.places = []

    def to(self, device):
        self.places.append(device.type)
        return self


def test_a_network_is_moved_to_a_device_and_back_if_it_is_not_there():
    for device, places in (("meta", ["meta", "cpu"]), ("cpu", [])):
        with evaluating(net := Moving(), torch.device(device)):
            assert net.places == places[:1]
        assert net.places == places


# Caching.


def scaled(item):
    return item * FACTOR


class Other(Own):
    def forward(self, batch):
        return super().forward(batch) + 1


CHANGES = {
    "weights": lambda net: net.body[0].weight.data[0, 0, 0, 0].add_(1),
    "statistics": lambda net: net.body[1].running_mean.add_(1),
    "buffer": lambda net: net.shift.add_(1),
    "setting": lambda net: setattr(net, "scale", 3.0),
    "stride": lambda net: setattr(net.body[3], "stride", (2, 2)),
    "hook": lambda net: net.body.register_forward_hook(lambda _, __, output: output + 1),
    "method": lambda net: setattr(net, "__class__", Other),
}


def test_whatever_changes_features_is_another_entry_of_the_cache(tmp_path):
    before = embed(images(), Own(), cache_dir=tmp_path).features
    for case, change in CHANGES.items():
        change(net := Own())
        features = embed(images(), net, cache_dir=tmp_path).features
        assert torch.equal(features, evaluated(net).mean((2, 3))), case
        assert not torch.equal(features, before), case


def test_equal_networks_have_one_entry_whatever_their_mode(tmp_path, monkeypatch):
    first = Own().train()
    # It holds nothing of what the package remembers.
    monkeypatch.setattr(shown, "_concealed", {"a password": "${oc.env:PASSWORD}"})
    features = embed(images(), first, cache_dir=tmp_path).features
    again = Own().eval().requires_grad_(False)
    monkeypatch.undo()
    again.body[0].weight.grad = torch.ones_like(again.body[0].weight)
    assert from_module(again).key == from_module(first).key
    entries = sorted(tmp_path.rglob("*"))
    assert torch.equal(embed(images(), again, cache_dir=tmp_path).features, features)
    assert sorted(tmp_path.rglob("*")) == entries


@pytest.mark.slow
def test_compiled_networks_have_the_entry_of_what_was_compiled():
    one, two, other = (torch.compile(Own(), backend="eager") for _ in range(3))
    CHANGES["weights"](other)
    keys = [from_module(net).key for net in (one, two, other)]
    assert keys[0] == keys[1] != keys[2]


def test_layers_and_transforms_are_told_apart(monkeypatch):
    own, relu, tanh = partial(from_module, Own()), nn.ReLU(), nn.Tanh()
    for one, other in (
        (own, partial(own, layer="body.3")),
        (own, partial(own, scaled)),
        (partial(own, lambda x: x * 2), partial(own, lambda x: x * 3)),
        (partial(own, times(2)), partial(own, times(3))),
        # A transform keeps its mode.
        (partial(own, nn.Dropout().eval()), partial(own, nn.Dropout())),
        (
            partial(from_module, nn.Sequential(relu, tanh)),
            partial(from_module, nn.Sequential(tanh, relu)),
        ),
    ):
        assert one().key == one().key != other().key, other
        assert one().cacheable, one
    # A property's setter may decide what is computed, as its getter does.
    assert from_module(of_property(halved)).key == from_module(of_property(halved)).key
    assert from_module(of_property(halved)).key != from_module(of_property(doubled)).key
    # A global value that a transform reads is part of it.
    before = from_module(Own(), scaled).key
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    assert from_module(Own(), scaled).key != before


def halved(net, value):
    net.factor = value / 2


def doubled(net, value):
    net.factor = value * 2


def of_property(setter):
    """Return a network whose property has this setter."""
    return type("Adjusted", (nn.Identity,), {"scale": property(None, setter)})()


def times(factor):
    return lambda item: item * factor


def test_what_cannot_be_told_by_content_is_not_cached_and_said(tmp_path):
    lock = threading.Lock()

    def transform(item):
        with lock:
            return item

    net, sizes = network(), []
    net[0].register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    extractor = from_module(net, transform)
    for _ in range(2):
        with pytest.warns(DataNotice, match=r"not cached: from_module\(Sequential, .*lock") as told:
            features = embed(images(), extractor, cache_dir=tmp_path).features
        assert told[0].filename == __file__
        assert torch.equal(features, evaluated(net).mean((2, 3)))
    assert sizes[::2] == [7, 7]
    assert not [*tmp_path.rglob("*.safetensors")]


@pytest.mark.slow
def test_the_digest_is_one_in_every_process():
    """Of another order of sets."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    code = f"import {__name__} as own; print(own.from_module(own.Own(), own.scaled).key)"
    command, pipes = [sys.executable, "-c", code], {"capture_output": True, "text": True}
    done = subprocess.run(command, check=True, env=environment, **pipes)
    assert done.stdout.strip() == from_module(Own(), scaled).key
