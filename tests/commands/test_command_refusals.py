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

pytestmark = pytest.mark.usefixtures("undrawn")

ARRAYS = "source=arrays target=arrays target.path=b.npz max_samples=null"
WORDS = {
    "ARRAYS": ARRAYS,
    "GIVEN": f"{ARRAYS} source.path=a.npz labels=given",
    "IMAGES": "source=digits target=digits extractor=pixels",
    "CLUSTERED": " ".join(
        f"{side}=arrays {side}.path=unlabelled.npz {side}.pseudo_labels=kmeans"
        for side in ("source", "target")
    ),
    # What is wrong is found before anything is read.
    "NOWHERE": f"{ARRAYS} source.path=nowhere.npz",
}
# What is given, in short, and parts of the sentence. Those with a star run before every commit.
TABLE = """
    * ARRAYS source.path=nowhere.npz -> source: | nowhere.npz does not exist
    ARRAYS source.path=damaged.npz -> source: | damaged.npz | damaged or empty
    ARRAYS source.path=holes.npz -> source: | 2 NaN or infinite | 2 rows | row 3, column 2 | impute
    ARRAYS source.path=empty.npz -> source: | empty | no rows
    ARRAYS source.path=wide.npz -> 8 features | 4 | the same columns
    ARRAYS source.path=unlabelled.npz -> no labels | source.pseudo_labels | labels=none
    ARRAYS source.path=null -> source: | path=PATH
    ARRAYS source.path=huge.npz -> scale them, such as with extractor.standardize=true
    ARRAYS source.path=huge.npz extractor.pca=2 -> squared distances overflow
    CLUSTERED -> source.k=K
    GIVEN labels.path=nowhere.npz -> nowhere.npz | no such file
    GIVEN labels.path=W_partial.npz -> no array xy, yy | xx
    GIVEN labels.path=W_other.npz -> 2 source classes | 3 | u, v, w
    GIVEN labels.path=W.npz -> xx hold 9 NaN or infinite entries, the first at [0, 0]; leave those
    IMAGES extractor.size=1000000 -> lower extractor.size
    * epsilon=-1 -> epsilon must be finite and not negative | -1
    solver.tolerance=1e-12 -> 1e-12 | too tight for float32 | precision=double
    solver=geomloss solver.scaling=1 -> solver.scaling must lie in (0, 1), got 1
    max_samples=3 -> max_samples=3 | 5 classes | raise max_samples
    source.classes=[0,unheard] -> source: | 'unheard' | 0, 1, 2, 3, 4
    source.pseudo_labels=magic -> 'magic' | kmeans
    source.k=4 -> source: | k=4 needs pseudo_labels=kmeans
    extractor=pixels -> array data | identity
    labels.method=nothing -> 'nothing' | gaussian
    labels=given -> labels.path=W.npz
    device=cuda:99 -> cuda:99 | on this machine | auto, cpu
    memory_budget=lots -> memory_budget | lots | GiB
    log_level=LOUD -> log_level | 'LOUD' | INFO
    log=tensorboard log.uri=https://a/b -> log.uri=https://a/b has no meaning with log=tensorboard
    epsilon_relative=1e-30 -> epsilon_relative=1e-30 is too small for float32 | raise epsilon_r
    epsilon=0.1 epsilon_relative=0.2 -> got both, epsilon=0.1 and epsilon_relative=0.2
    epsilon=1e-30 -> , or give epsilon_relative=0.01 in its place
    unbalanced=-1 -> unbalanced must be positive
    unbalanced=1 unbalanced_relative=2 -> got both, unbalanced=1 and unbalanced_relative=2
    unbalanced=[1,null] -> debias=false
    unbalanced=1 epsilon=0 -> epsilon=0 | takes exact marginals; leave out unbalanced
    unbalanced=1 solver=geomloss -> takes exact marginals; leave out unbalanced
    ground=gromov -> give lambda_y, or set labels=none
    ground=gromov labels=none -> not debiased; set debias=false
    ground=gromov labels=exact lambda_y=1 debias=false -> labels=exact | gaussian, given
    ground=gromov labels=none debias=false subsample=50 -> subsample is not there
    ground=gromov labels=none debias=false contributions=true -> contributions is not there
    ground=gromov labels=none debias=false extractor.pca=3 -> transform each side beforehand
    ground=gromov labels=none debias=false extractor.standardize=true -> transform each side
    ground=gromov labels=none debias=false starts=0 -> starts
    ground=gromov labels=none debias=false epsilon=0 solver.bound_width=0.3 -> leave out
    starts=9 -> starts are of ground=gromov alone
    flow ground=gromov -> unknown ground 'gromov'
    flow unbalanced=1 epsilon=0 -> distances alone take 0
    epsilon=0 solver=geomloss -> epsilon=0 is solved by solver=exact | leave solver out
    epsilon_relative=0.1 solver=exact -> for epsilon=0, got epsilon_relative=0.1
    epsilon=0 solver.tolerance=1e-3 -> solver.schedule=exact has no solver.tolerance
    epsilon=0 contributions=true -> contributions=true | solver=exact solver.bound_width=0
    epsilon=0 labels=sinkhorn -> set labels.epsilon | labels=exact
    flow epsilon=0 -> distances alone take 0
    flow solver=exact -> take solver=converged
    labels=sinkhorn labels.epsilon=1e-30 -> labels.epsilon=1e-30 is too small | raise labels.eps
    epsilon=1e-60 -> underflows in precision=fast; raise epsilon or scale the features up
    source=null -> source must be one of arrays, blobs, | got null
    extractor=true -> extractor must be one of callable, | got true
    report=table report.content=pages -> unknown report 'pages'; choose one of: none
    subsample=38 -> at least 39 subsamples
    subsample_size=10 -> needs subsample=K
    subsample=39 subsample_size=40 -> fewer than its 40
    noise_floor=true max_samples=10 -> min_class_size=4
    NOWHERE backend=nothing -> backend
    NOWHERE min_class_size=0 -> min_class_size
    NOWHERE extractor.pca=0 -> extractor.pca must be
    NOWHERE report.order=best -> unknown report.order 'best'; choose one of: given, hierarchical
    flow NOWHERE backend=nothing -> backend
    flow NOWHERE min_class_size=0 -> min_class_size
    flow NOWHERE flow.functionals=[3] -> a mapping such as {name: norm, weight: 0.1}, got 3
    flow NOWHERE flow.space=pixels extractor=pixels extractor.batch_size=0 -> extractor.batch_size
    flow NOWHERE flow.space=pixels extractor=pixels extractor.size=0 -> extractor.size must be
    flow flow.mode=sideways -> 'sideways' | features, attached, joint, augmented
    flow flow.mode=attached labels=sinkhorn -> attached | gaussian | means | sinkhorn
    flow 'flow.optimizer_options={speed: 3}' -> speed | momentum
    flow flow.box=[1000,1001] -> flow.box=[1000, 1001] leaves out the particles
    flow flow.steps=60 flow.step_size=30 epsilon=1 -> flow.step_size=30 | step
    flow flow.checkpoint_every=0 -> flow.checkpoint_every | 0
    flow flow.image_size=8 -> flow.image_size=8 | flow.space=pixels | extractor.size
    flow flow.space=pixels -> pixels
    flow IMAGES extractor.pca=3 flow.space=pixels -> flow.space=pixels | pca
    flow labels.full=true -> labels.full | flow
    flow source=arrays source.path=a.npz -> 4 features | same
"""


def _rows() -> Iterator[object]:
    for line in TABLE.strip().splitlines():
        given, _, parts = line.strip().removeprefix("* ").partition(" -> ")
        words = []
        for word in shlex.split(given):
            words += WORDS[word].split() if word in WORDS else [word]
        marks = () if line.strip().startswith("* ") else pytest.mark.slow
        yield pytest.param(words, parts.strip().split(" | "), marks=marks, id=given[:50])


USER = """
def failing(batch):
    return {}["a key"]

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
    holes, missing = x.copy(), classes.astype(float)
    holes[3, 2], holes[7, 1], missing[[3, 7]] = np.nan, np.inf, np.nan
    faults = {
        "unlabelled": {"x": x},
        "holes": {"x": holes, "y": y},
        "missing": {"x": x, "y": missing},
        "empty": {"x": x[:0], "y": y[:0]},
        "one": {"x": x, "y": np.where(np.arange(60) == 59, "single", y)},
        "wide": {"x": np.hstack([x, x]), "y": y},
        "huge": {"x": x.astype(float) * 1e300, "y": classes},
        "W": {"xx": np.full((3, 3), np.inf), "xy": np.zeros((3, 3)), "yy": np.zeros((3, 3))},
        "W_other": {"xx": np.zeros((2, 2)), "xy": np.zeros((2, 3)), "yy": np.zeros((3, 3))},
        "W_partial": {"xx": np.zeros((3, 3))},
    }
    for name, arrays in faults.items():
        np.savez(place / f"{name}.npz", **arrays)
    (place / "damaged.npz").write_bytes((place / "a.npz").read_bytes()[:99])
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


@pytest.mark.parametrize(("given", "parts"), [*_rows()])
def test_one_sentence_says_what_is_wrong_and_what_to_do(command, flow_command, given, parts):
    ended = flow_command(*given[1:]) if given[0] == "flow" else command(*given)
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
        ("one.npz", "classes of one sample are points, with covariance 0: 'single' of one"),
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
    assert result["n"] == 60 - 2 * ("drop" in path)
    assert len(result["classes"]["source"]) == 3 + (path == "one.npz")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "setting", "sentence", "trace"),
    [
        ("command", "failing", "users_own:failing raised KeyError: 'a key'", "in failing"),
        ("command", "users_exit:f", "does not import: it raised SystemExit: 0", "exit(0)"),
        ("command", "users_syntax:f", "it raised SyntaxError: ", "users_syntax.py"),
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
    from otdd_flash import memory
    from otdd_flash.operators.torch_pool import TorchTerm

    with monkeypatch.context() as patched:
        patched.setattr(memory, "ASSUMED_FREE", 0)
        patched.setattr(memory, "free_memory", lambda _: 2000)
        ended = command()
    assert ended.code == 2
    for part in ("not enough memory on cpu", "are needed and 2.0 KiB are free", "max_samples"):
        assert part in ended.error

    def run_out(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(TorchTerm, "marginals", run_out)
    ended = command()
    assert ended.code == 2
    for part in ("out of memory on cpu", "2.00 GiB", "need at least", "max_samples"):
        assert part in ended.error
