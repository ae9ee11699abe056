"""Bad input: exit code 2, and one sentence with the value and the way out.

A user's own code that fails is named with its own error.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from command_runs import write_archives

from otdd_flash.commands.choices import GROUPS, choices

pytestmark = pytest.mark.usefixtures("undrawn")

ARRAYS = "source=arrays target=arrays target.path=b.npz max_samples=null"
GIVEN = f"{ARRAYS} source.path=a.npz labels=given"
IMAGES = "source=digits target=digits extractor=pixels"
NOWHERE = "source=arrays target=arrays target.path=b.npz source.path=nowhere.npz"
# Commands, what all rows of a table give, and the rows: what is given, and parts of the sentence.
# Those with a star run before every commit.
TABLES = [
    (
        "command",
        ARRAYS,
        """
        * source.path=nowhere.npz -> source: | nowhere.npz does not exist
        source.path=damaged.npz -> source: | damaged.npz | damaged or empty
        source.path=text.npz -> source: | text.npz | no NumPy file
        source.path=objects.npz -> source: | objects.npz | integers or strings
        source.path=no_x.npz -> source: | no key 'x' | z, y
        source.path=holes.npz -> source: | 2 NaN or infinite | 2 rows | row 3, column 2 | impute
        source.path=empty.npz -> source: | empty | no rows
        source.path=continuous.npz -> source: | integers or strings | float64
        source.path=wide.npz -> 8 features | 4 | the same columns
        source.path=unlabelled.npz -> no labels | source.pseudo_labels | labels=none
        source.path=null -> source: | path=PATH
        source.path=a.npz source.features=[] -> must name a column, got []
        source.path=huge.npz -> scale them, such as with extractor.standardize=true
        source.path=huge.npz extractor.pca=2 -> squared distances overflow
        source.path=imaginary.npz -> inputs must be numbers, got complex64
        source.path=imaginary_weights.npz -> weights must be real, got complex128
        source.path=negative.npz -> got -1 at row 5; a weight of 0 leaves a row out
        source.path=missing.npz -> 2 labels are missing, at rows 3, 7; drop_unlabelled=true leaves
        source.path=unlabelled.npz target.path=unlabelled.npz source.pseudo_labels=kmeans \
            target.pseudo_labels=kmeans -> source.k=K
        source.path=unlabelled.npz target.path=unlabelled.npz source.pseudo_labels=kmeans -> \
            source.k=K
        """,
    ),
    (
        "command",
        GIVEN,
        """
        labels.path=nowhere.npz -> nowhere.npz | no such file
        labels.path=text.npz -> text.npz | xx, xy and yy
        labels.path=W_partial.npz -> no array xy, yy | xx
        labels.path=W_other.npz -> 2 source classes | 3 | u, v, w
        labels.path=W.npz -> xx hold 9 NaN or infinite entries, the first at [0, 0]; leave those
        """,
    ),
    (
        "command",
        IMAGES,
        """
        extractor.grayscale=yep -> extractor.grayscale must be true or false, got 'yep'
        extractor.size=1000000 -> lower extractor.size
        extractor=torchvision extractor.model=zzzz -> unknown torchvision model 'zzzz'; there are:
        source=torchvision source.dataset=EMNIST -> needs its argument split; give
        """,
    ),
    (
        "command",
        "",
        """
        * epsilon=-1 -> epsilon must be positive | -1
        lambda_x=-1 -> lambda_x | -1
        solver.tolerance=1e-12 -> 1e-12 | too tight for float32 | precision=double
        solver.tolerance=0 -> solver.tolerance | 0
        solver.max_iterations=0 -> solver.max_iterations | 0
        solver.bound_width=0 -> solver.bound_width must be positive and finite, got 0
        solver.max_seconds=-1 -> solver.max_seconds must be positive and finite, got -1
        solver=geomloss solver.scaling=1 -> solver.scaling must lie in (0, 1), got 1
        max_samples=3 -> max_samples=3 | 5 classes | raise max_samples
        max_samples=0 -> max_samples | 0
        source.max_samples=abc -> source: | max_samples | abc
        source.classes=[0,unheard] -> source: | 'unheard' | 0, 1, 2, 3, 4
        source.classes=1.5 -> source: | a class in classes must be an integer, got 1.5
        source.name=nothing -> 'nothing' | digits | arrays
        source.spread=inf -> spread | finite | inf
        source.pseudo_labels=magic -> 'magic' | kmeans
        source.k=4 -> source: | k=4 needs pseudo_labels=kmeans
        extractor.name=nothing -> 'nothing' | identity
        extractor=pixels -> array data | identity
        extractor.batch_size=abc -> extractor.batch_size | abc
        extractor.standardize=maybe -> extractor.standardize | true or false | maybe
        extractor.pca=99 -> extractor.pca | 99
        labels.method=nothing -> 'nothing' | gaussian
        labels=given -> labels.path=W.npz
        device=cuda:99 -> cuda:99 | on this machine | auto, cpu
        device=nothing -> 'nothing' | auto, cpu
        backend=nothing -> 'nothing' | auto, torch
        precision=nothing -> 'nothing' | double
        memory_budget=lots -> memory_budget | lots | GiB
        log_level=LOUD -> log_level | 'LOUD' | INFO
        epsilon_relative=1e-30 -> epsilon_relative=1e-30 is too small for float32 | raise epsilon_r
        epsilon=0.1 epsilon_relative=0.2 -> got both, epsilon=0.1 and epsilon_relative=0.2
        epsilon=1e-30 -> , or give epsilon_relative=0.01 in its place
        labels=sinkhorn labels.epsilon=1e-30 -> labels.epsilon=1e-30 is too small | raise labels.eps
        epsilon=1e-60 -> underflows in precision=fast; raise epsilon or scale the features up
        seed=-1 -> seed must be at least 0, got -1
        report=table report.content=pages -> unknown report 'pages'; choose one of: none
        """,
    ),
    # Found before anything is read.
    (
        "command",
        NOWHERE,
        """
        backend=nothing -> backend
        epsilon_relative=nan -> epsilon_relative
        min_class_size=0 -> min_class_size
        report.order=best -> unknown report.order 'best'; choose one of: given, hierarchical
        """,
    ),
    (
        "flow_command",
        NOWHERE,
        """
        backend=nothing -> backend
        epsilon_relative=nan -> epsilon_relative
        min_class_size=0 -> min_class_size
        flow.functionals=[3] -> a mapping such as {name: norm, weight: 0.1}, got 3
        """,
    ),
    (
        "flow_command",
        "",
        """
        epsilon=1 epsilon_relative=1 -> got both, epsilon=1 and epsilon_relative=1
        epsilon=0 -> epsilon must be positive
        flow.mode=sideways -> 'sideways' | features, attached, joint, augmented
        flow.mode=attached labels=sinkhorn -> attached | gaussian | means | sinkhorn
        flow.optimizer=newton -> 'newton' | sgd | adam
        'flow.optimizer_options={speed: 3}' -> speed | momentum
        flow.schedule=never -> 'never' | cosine
        flow.step_size=0 -> flow.step_size | 0
        flow.box=[1,0] -> flow.box | [1.0, 0.0]
        flow.box=3 -> flow.box | 3
        flow.box=[1000,1001] -> flow.box=[1000, 1001] leaves out the particles
        flow.steps=0 -> flow.steps | 0
        flow.steps=1.5 -> flow.steps | 1.5
        flow.refresh=0 -> flow.refresh | 0
        flow.minibatch=0 -> flow.minibatch | 0
        flow.tolerance=2 -> flow.tolerance | 2
        flow.checkpoint_every=0 -> flow.checkpoint_every | 0
        flow.image_size=0 -> flow.image_size must be positive | 0
        flow.image_size=8 -> flow.image_size=8 | flow.space=pixels | extractor.size
        flow.space=time -> 'time' | features, pixels
        flow.space=pixels -> pixels
        source=digits target=digits extractor=pixels extractor.pca=3 flow.space=pixels -> \
            flow.space=pixels | pca
        'flow.functionals=[{name: gravity, weight: 1}]' -> 'gravity' | norm
        'flow.functionals=[{name: norm}]' -> norm | weight
        labels.full=true -> labels.full | flow
        source=arrays source.path=a.npz -> 4 features | same
        """,
    ),
]


def _rows() -> Iterator[object]:
    for run, common, table in TABLES:
        for line in table.strip().splitlines():
            quick, row = line.strip().startswith("* "), line.strip().removeprefix("* ")
            given, _, parts = row.partition(" -> ")
            marks = () if quick else pytest.mark.slow
            name = f"{'flow ' * (run != 'command')}{given}"
            given = shlex.split(f"{common} {given}")
            yield pytest.param(run, given, parts.strip().split(" | "), marks=marks, id=name[:50])


USER = """
import sys

def failing(batch):
    return {}["a key"]

def leaving(batch):
    sys.exit(0)

def text(batch):
    return "text"

def imaginary(batch):
    return batch * 1j

def energy(points, labels, masses):
    raise OSError("no energy today")

def number(points, labels, masses):
    return 3
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Archives with one fault each, beside good ones, and modules of a user."""
    place = write_archives(tmp_path_factory.mktemp("made"))
    good = dict(np.load(place / "a.npz"))
    x, y, classes = good["x"], good["y"], np.arange(60) % 3
    holes, missing, weights = x.copy(), classes.astype(float), np.ones(60)
    holes[3, 2], holes[7, 1], missing[[3, 7]] = np.nan, np.inf, np.nan
    faults = {
        "unlabelled": {"x": x},
        "no_x": {"z": x, "y": y},
        "holes": {"x": holes, "y": y},
        "missing": {"x": x, "y": missing},
        "empty": {"x": x[:0], "y": y[:0]},
        "one": {"x": x, "y": np.where(np.arange(60) == 59, "single", y)},
        "continuous": {"x": x, "y": np.linspace(0, 1, 60)},
        "floats": {"x": x, "y": classes.astype(float)},
        "objects": {"x": x, "y": np.array([1, None] * 30, dtype=object)},
        "wide": {"x": np.hstack([x, x]), "y": y},
        "huge": {"x": x.astype(float) * 1e300, "y": classes},
        "heavy": {"x": x, "y": classes, "w": 1e308 * weights},
        "imaginary": {"x": x * 1j, "y": classes},
        "imaginary_weights": {"x": x, "y": classes, "w": 1j * weights},
        "negative": {"x": x, "y": classes, "w": np.where(np.arange(60) == 5, -1, weights)},
        "W": {"xx": np.full((3, 3), np.inf), "xy": np.zeros((3, 3)), "yy": np.zeros((3, 3))},
        "W_other": {"xx": np.zeros((2, 2)), "xy": np.zeros((2, 3)), "yy": np.zeros((3, 3))},
        "W_partial": {"xx": np.zeros((3, 3))},
    }
    for name, arrays in faults.items():
        np.savez(place / f"{name}.npz", **arrays)
    (place / "damaged.npz").write_bytes((place / "a.npz").read_bytes()[:99])
    (place / "text.npz").write_text("not an archive")
    (place / "users_own.py").write_text(USER)
    (place / "users_exit.py").write_text("import sys\nsys.exit(0)\n")
    (place / "users_syntax.py").write_text("def f(:\n")
    return place


@pytest.fixture(autouse=True)
def inputs(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of that in the working directory."""
    monkeypatch.chdir(made)
    monkeypatch.syspath_prepend(str(made))
    for name in ("users_own", "users_exit", "users_syntax"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(("run", "given", "parts"), [*_rows()])
def test_one_sentence_says_what_is_wrong_and_what_to_do(request, run, given, parts):
    ended = request.getfixturevalue(run)(*given)
    assert ended.code == 2
    assert len(ended.complaints) == 1
    for part in parts:
        assert part in ended.error
    # A way out only where there is one.
    assert ("precision=double" in ended.error) == ("precision=double" in parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "notice"),
    [
        ("floats.npz", ""),
        ("heavy.npz", "weights are its key 'w'"),
        ("one.npz", "classes of one sample are points, with covariance 0: 'single' of one"),
        ("one.npz min_class_size=2", "dropped classes of one"),
        ("missing.npz source.drop_unlabelled=true", "2 of 60 rows have no label and are left out"),
        ("huge.npz extractor.standardize=true epsilon=1", ""),
    ],
)
def test_what_has_a_plain_meaning_is_computed(command, read, path, notice):
    ended = command(*ARRAYS.split(), *f"source.path={path}".split(), "report=none")
    assert ended.code == 0
    assert ended.err.count("notice") == bool(notice)
    assert notice in ended.err
    result = read("run/result.json")
    assert result["n"] == 60 - 2 * ("drop" in path) - ("min_class" in path)
    assert len(result["classes"]["source"]) == 3 + (path == "one.npz")


@pytest.mark.parametrize(
    ("group", "value"),
    [
        ("source", "null"),
        *(
            pytest.param(group, value, marks=pytest.mark.slow)
            for group, value in [("source", v) for v in ("3", "", "digits,null")]
            + [("extractor", v) for v in ("true", "-1.5")]
        ),
    ],
)
def test_what_is_no_choice_of_a_group_names_the_choices(command, group, value):
    ended = command(f"{group}={value}", *(("-m",) if "," in value else ()))
    assert ended.code == 2
    assert ended.error.startswith(f"{group} must be one of {', '.join(choices(group))}, got ")


def test_choices_are_the_files_of_every_group():
    folder = Path(__file__).resolve().parents[2] / "conf"
    for group in GROUPS:
        assert choices(group) == sorted(path.stem for path in (folder / group).glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "setting", "sentence", "trace"),
    [
        ("command", "failing", "users_own:failing raised KeyError: 'a key'", "in failing"),
        ("command", "leaving", "users_own:leaving raised SystemExit: 0", "sys.exit(0)"),
        ("command", "users_exit:f", "does not import: it raised SystemExit: 0", "exit(0)"),
        ("command", "users_syntax:f", "it raised SyntaxError: ", "users_syntax.py"),
        ("command", "text", "features (b, d), must be real numbers, got 'text'", ""),
        ("command", "imaginary", "must be real, got complex", ""),
        ("command", "users_none:f", "no module named 'users_none'; give package.mod", ""),
        ("flow_command", "energy", "energy raised OSError: no energy today", "in energy"),
        ("flow_command", "number", "functional number must return", ""),
    ],
)
def test_a_users_own_code_is_named_with_its_own_error(request, run, setting, sentence, trace):
    path = setting if ":" in setting else f"users_own:{setting}"
    given = ("extractor=callable", f"extractor.path={path}")
    if run == "flow_command":
        given = (f"flow.functionals=[{{path: '{path}', weight: 1}}]",)
    ended = request.getfixturevalue(run)(*given)
    assert ended.code == 2
    first, *below = ended.err.splitlines()
    assert first.startswith("error: ")
    assert sentence in first
    assert bool(below) == bool(trace)
    assert trace in "\n".join(below)
    assert "otdd_flash/" not in "\n".join(below)


@pytest.mark.slow
def test_too_little_memory_is_said_with_the_bytes(command, monkeypatch):
    from otdd_flash.operators import memory
    from otdd_flash.operators.stored import StoredOperator

    with monkeypatch.context() as patched:
        patched.setattr(memory, "UNASKED", 0)
        patched.setattr(memory, "free_memory", lambda _: 2000)
        ended = command()
    assert ended.code == 2
    for part in ("not enough memory on cpu", "are needed and 2.0 KiB are free", "max_samples"):
        assert part in ended.error

    def run_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(StoredOperator, "softmin_rows", run_out)
    ended = command()
    assert ended.code == 2
    for part in ("out of memory on cpu", "2.00 GiB", "need at least", "max_samples"):
        assert part in ended.error
