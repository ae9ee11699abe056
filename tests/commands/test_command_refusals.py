"""What commands refuse in one sentence with code 2, and what a user's own code leaves behind."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from otdd_flash.commands.choices import GROUPS, choices

pytestmark = pytest.mark.usefixtures("undrawn")

ARRAYS = ("source=arrays", "target=arrays", "target.path=b.npz", "max_samples=null")
IMAGES = ("source=digits", "target=digits")

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


@pytest.fixture(autouse=True)
def inputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Archives with one fault each, and modules of a user."""
    good = dict(np.load(folder / "a.npz"))
    x, classes = good["x"], np.arange(60) % 3
    holes = classes.astype(float)
    holes[[3, 7]] = np.nan
    weights = np.ones(60)
    np.savez("floats.npz", x=x, y=classes.astype(float))
    np.savez("holes.npz", x=x, y=holes)
    np.savez("one.npz", x=x, y=np.where(np.arange(60) == 59, "single", good["y"]))
    np.savez("huge.npz", x=x.astype(float) * 1e300, y=classes)
    np.savez("heavy.npz", x=x, y=classes, w=1e308 * weights)
    np.savez("imaginary.npz", x=x * 1j, y=classes)
    np.savez("imaginary_weights.npz", x=x, y=classes, w=1j * weights)
    np.savez("negative.npz", x=x, y=classes, w=np.where(np.arange(60) == 5, -1, weights))
    np.savez("W.npz", xx=np.full((3, 3), np.inf), xy=np.zeros((3, 3)), yy=np.zeros((3, 3)))
    Path("users_own.py").write_text(USER)
    Path("users_exit.py").write_text("import sys\nsys.exit(0)\n")
    Path("users_syntax.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(str(folder))
    for name in ("users_own", "users_exit", "users_syntax"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("value", ["null", "3", "true", "-1.5", "", "digits,null"])
@pytest.mark.parametrize("group", ["source", "extractor"])
def test_what_is_no_choice_of_a_group_names_the_choices(command, group, value):
    ended = command(f"{group}={value}", *(("-m",) if "," in value else ()))
    assert ended.code == 2
    assert ended.error.startswith(f"{group} must be one of {', '.join(choices(group))}, got ")


def test_choices_are_the_files_of_every_group():
    folder = Path(__file__).resolve().parents[2] / "conf"
    for group in GROUPS:
        assert choices(group) == sorted(path.stem for path in (folder / group).glob("*.yaml"))


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("epsilon_relative=1e-30",), "epsilon_relative=1e-30 is too small for float32"),
        (("epsilon_relative=1e-30",), "raise epsilon_relative to about"),
        (
            ("epsilon=0.1", "epsilon_relative=0.2"),
            "one of them; got both, epsilon=0.1 and epsilon_relative=0.2",
        ),
        (("epsilon=1e-30",), ", or give epsilon_relative=0.01 in its place"),
        (("labels=sinkhorn", "labels.epsilon=1e-30"), "labels.epsilon=1e-30 is too small"),
        (("labels=sinkhorn", "labels.epsilon=1e-30"), "raise labels.epsilon"),
        (
            ("epsilon=1e-60",),
            "underflows in precision=fast; raise epsilon or scale the features up",
        ),
        ((*IMAGES, "extractor=pixels", "extractor.size=1000000"), "lower extractor.size"),
        (
            (*IMAGES, "extractor=torchvision", "extractor.model=zzzz"),
            "unknown torchvision model 'zzzz'; there are: alexnet",
        ),
        (("source=torchvision", "source.dataset=EMNIST"), "needs its argument split; give"),
        ((*ARRAYS, "source.path=a.npz", "source.features=[]"), "must name a column, got []"),
        ((*ARRAYS, "source.path=huge.npz"), "scale them, such as with extractor.standardize=true"),
        ((*ARRAYS, "source.path=huge.npz", "extractor.pca=2"), "squared distances overflow"),
        ((*ARRAYS, "source.path=imaginary.npz"), "inputs must be numbers, got complex64"),
        ((*ARRAYS, "source.path=imaginary_weights.npz"), "weights must be real, got complex128"),
        ((*ARRAYS, "source.path=negative.npz"), "got -1 at row 5; a weight of 0 leaves a row out"),
        (
            (*ARRAYS, "source.path=holes.npz"),
            "2 labels are missing, at rows 3, 7; drop_unlabelled=true leaves those rows out",
        ),
        (
            (*ARRAYS, "source.path=a.npz", "labels=given", "labels.path=W.npz"),
            "xx hold 9 NaN or infinite entries, the first at [0, 0]; leave those classes out",
        ),
        (("seed=-1",), "seed must be at least 0, got -1"),
        (("report=table", "report.content=pages"), "unknown report 'pages'; choose one of: none"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_one_sentence_says_what_is_wrong_and_what_to_do(command, arguments, message):
    ended = command(*arguments)
    assert ended.code == 2
    assert len(ended.complaints) == 1
    assert message in ended.error
    assert "precision=double" not in ended.error


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("path", "notice"),
    [
        ("floats.npz", ""),
        ("heavy.npz", "weights are its key 'w'"),
        ("one.npz", "classes of one sample are points, with covariance 0: 'single' of one"),
        ("holes.npz", "2 of 60 rows have no label and are left out"),
    ],
)
def test_what_has_a_plain_meaning_is_computed(command, read, path, notice):
    dropping = ("source.drop_unlabelled=true",) if path == "holes.npz" else ()
    ended = command(*ARRAYS, f"source.path={path}", *dropping)
    assert ended.code == 0
    assert ended.err.count("notice") == bool(notice)
    assert notice in ended.err
    result = read("run/result.json")
    assert result["n"] == (58 if dropping else 60)
    assert len(result["classes"]["source"]) == (4 if path == "one.npz" else 3)


def test_huge_features_can_be_standardised(command):
    ended = command(*ARRAYS, "source.path=huge.npz", "extractor.standardize=true", "epsilon=1")
    assert ended.code == 0


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(
    ("path", "sentence", "trace"),
    [
        ("users_own:failing", "users_own:failing raised KeyError: 'a key'", "in failing"),
        ("users_own:leaving", "users_own:leaving raised SystemExit: 0", "sys.exit(0)"),
        ("users_exit:f", "users_exit:f does not import: it raised SystemExit: 0", "sys.exit(0)"),
        ("users_syntax:f", "does not import: it raised SyntaxError: ", "users_syntax.py"),
        ("users_own:text", "returns, features (b, d), must be real numbers, got 'text'", ""),
        ("users_own:imaginary", "must be real, got complex", ""),
        ("users_none:f", "no module named 'users_none'; give package.module:function", ""),
    ],
)
def test_a_users_extractor_is_named_with_its_own_error(command, path, sentence, trace):
    ended = command("extractor=callable", f"extractor.path={path}")
    assert ended.code == 2
    first, *below = ended.err.splitlines()
    assert first.startswith("error: ")
    assert sentence in first
    assert bool(below) == bool(trace)
    assert trace in "\n".join(below)
    assert "otdd_flash/" not in "\n".join(below)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sentence", "trace"),
    [
        ("energy", "functional energy raised OSError: no energy today", "in energy"),
        ("number", "functional number must return", ""),
    ],
)
def test_a_users_functional_is_named_with_its_own_error(flow_command, name, sentence, trace):
    ended = flow_command(f"flow.functionals=[{{path: 'users_own:{name}', weight: 1}}]")
    assert ended.code == 2
    first, *below = ended.err.splitlines()
    assert sentence in first
    assert trace in "\n".join(below)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "files"),
    [
        ("none", []),
        ("table", ["class_coupling.csv", "class_distances.csv", "nearest_classes.csv"]),
    ],
)
def test_a_report_can_be_the_number_alone_or_without_pictures(command, read, content, files):
    ended = command(f"report={content}")
    assert ended.code == 0
    result = read("run/result.json")
    beside = [path.name for path in Path("run").iterdir() if path.suffix in (".csv", ".png")]
    assert sorted(beside) == files
    if content == "none":
        value, bounds = ended.out.strip().split(" ", 1)
        assert float(value) == pytest.approx(result["value"], rel=1e-2)
        assert bounds.startswith("[")
    else:
        assert "marginal error" in ended.out


@pytest.mark.slow
def test_a_flow_without_pictures_leaves_its_data(flow_command):
    ended = flow_command("report=none")
    assert ended.code == 0
    assert len(ended.out.splitlines()) == 1
    names = {path.name for path in Path("run").iterdir()}
    assert {"adapted.npz", "metrics.csv", "result.json"} <= names
    assert not [name for name in names if name.endswith((".png", ".gif"))]
