"""Random settings of the commands: small problems, of which some keys take hostile values."""

from __future__ import annotations

from typing import Any

import numpy as np
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

# What makes a problem take a tenth of a second. Folders of their own are the caller's.
SMALL = {
    "distance": ("source=blobs", "target=blobs", "target.split=test", "extractor=identity"),
    "flow": ("source=blobs", "target=blobs", "target.split=test", "extractor=identity"),
}
ALWAYS = ("max_samples=30", "cache_dir=null")
GROUPS = {
    "source": ("blobs", "digits", "arrays", "mnist", "huggingface", "nosuch"),
    "target": ("blobs", "digits", "idx", "image_folder", "torchvision"),
    "extractor": ("identity", "pixels", "callable", "timm", "torchvision", "text"),
    "labels": ("gaussian", "means", "none", "sinkhorn", "exact", "upper_bound", "given"),
    "solver": ("converged", "geomloss"),
}
# Settings that go together with any other.
GOOD = {
    "epsilon": ("0.01", "0.1", "2", "100"),
    "epsilon_relative": ("1e-2", "0.1", "3"),
    "lambda_x": ("0.1", "1"),
    "ground": ("cosine", "sqeuclidean"),
    "lambda_y": ("0", "0.2", "1"),
    "precision": ("fast", "high", "double"),
    "solver.tolerance": ("1e-2", "1e-4"),
    "solver.max_iterations": ("1", "3", "1000"),
    "solver.require_convergence": ("true", "false"),
    "max_samples": ("5", "17", "40"),
    "min_class_size": ("1", "3"),
    "seed": ("0", "7"),
    "extractor.standardize": ("true",),
    "extractor.pca": ("1", "2"),
    "source.pseudo_labels": ("kmeans",),
    "memory_budget": ("auto", "1"),
}
# Values that some key takes gladly, and none takes all of.
VALUES = (
    "null", "true", "false", "0", "1", "2", "5", "-1", "0.5", "1.5", "1e-3", "1e3", "1e30", "-1e30",
    "1e-30", "nan", "inf", "abc", "''", "[]", "[0]", "[0,1]", "[a,b]", "{}", "{a:1}", "cpu", "cuda",
    "means", "sgd", "adam", "joint", "attached", "augmented", "pixels", "double", "high", "none",
    "kmeans", "all", "train", "test", "file.npz", "/nosuch", "é", "[[1]]", "'1'", "99999999999999",
)  # fmt: skip
# References, of which most lead nowhere, and what Hydra's grammar does not read.
REFERENCES = (
    "${oc.env:NO_SUCH}", "${oc.env:HOME}", "${foo}", "${epsilon}", "${seed}", "${.foo}", "${",
    "${oc.decode:'['}", "${oc.select:x}", "${now:}", "${source}", "${hydra:nope}", "${nosuch:1}",
    "${}", "${a b}", "[1", "1]", "'1", '"', "(1)", " 1", "1 ", "=1", "a=b", "1,", "1\n", "~/a",
    "it's", "\\", "int(x)", "choice(1,2)", "1,2", "???",
)  # fmt: skip
# Arguments of Hydra's own, and of other forms than KEY=VALUE.
FOREIGN = (
    "nosuch=1", "+foo=1", "labels.=3", "=", "=1", "source.name", "~epsilon", "~source.name",
    "~solver", "solver=[1]", "solver={a:1}", "solver=${foo}", "labels=[exact,means]",
    "solver@x=converged", "hydra=null", "hydra=3", "hydra.run=3", "hydra.run=[1]",
    "hydra.job_logging=3", "hydra.hydra_logging={version:7}", "hydra/launcher=[1]",
    "hydra.verbose=abc", "epsilon = 0.2", " epsilon=0.2", "+epsilon=1", "++epsilon=1",
    "a b=1", "é=1", "", "-x", "--nosuch", "--cfg=nosuch", "--resolve", "--cfg=job", "--help",
)  # fmt: skip
# What a command's streams and their environment may be: a shell's redirections and variables.
REDIRECTIONS = (
    "", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1", ">&-", "2>&-", "<&-", ">&- 2>&-",
    "<&- >&- 2>&-", "| true", "| head -c 1", "2> >(true)",
)  # fmt: skip
VARIABLES = {
    "PYTHONIOENCODING": ("cp1252", "ascii", "latin-1", "cp437", "utf-16", "shift_jis"),
    "LC_ALL": ("C", "POSIX"),
    "COLUMNS": ("0", "1", "-5", "abc", "²", "1000000000"),
    "LINES": ("0", "²"),
    "TERM": ("dumb", "nosuch"),
    "NO_COLOR": ("1",),
    "FORCE_COLOR": ("1",),
    "MPLBACKEND": ("banana", "module://matplotlib_inline.backend_inline", "svg"),
    "WORLD_SIZE": ("abc", "0", "2", "1"),
    "HOME": ("/proc/nosuch",),
    "OMP_NUM_THREADS": ("abc", "0"),
}
# Values that some key takes for work of minutes.
LONG = {"1e3", "1e30", "99999999999999"}
COUNTS = ("steps", "max_iterations", "subsample", "max_samples", "image_size", "size", "k")


class Grammar:
    """Draws command lines.

    Args:
        random: of which a command depends alone.
    """

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._keys = {name: _keys(name) for name in SMALL}

    def draw(self) -> tuple[str, list[str]]:
        """A command's name and its arguments."""
        name = self._pick(list(SMALL))
        given = dict(setting.split("=", 1) for setting in (*SMALL[name], *ALWAYS))
        if name == "flow":
            given["flow.steps"] = "2"
        for _ in range(int(self._random.integers(1, 4))):
            key, value = self._setting(name)
            given[key] = value
            if key == "target":
                given.pop("target.split", None)
        arguments = [f"{key}={value}" for key, value in given.items()]
        if self._random.random() < 0.03:
            arguments.append(self._pick(FOREIGN))
        return name, arguments

    def streams(self) -> tuple[str, dict[str, str]]:
        """A shell's redirection and variables of the environment."""
        names = [name for name in VARIABLES if self._random.random() < 0.2]
        return self._pick(REDIRECTIONS), {name: self._pick(VARIABLES[name]) for name in names}

    def _setting(self, name: str) -> tuple[str, str]:
        if self._random.random() < 0.5:
            key = self._pick(list(GOOD))
            return key, self._pick(GOOD[key])
        if self._random.random() < 0.25:
            group = self._pick(list(GROUPS))
            return group, self._pick(GROUPS[group])
        key = self._pick(self._keys[name])
        if self._random.random() < 0.2:
            return key, self._pick(REFERENCES)
        short = key.rpartition(".")[2] in COUNTS
        values = [value for value in VALUES if not (short and value in LONG)]
        return key, self._pick(values)

    def _pick(self, choices: Any) -> str:
        return str(choices[int(self._random.integers(len(choices)))])


def _keys(name: str) -> list[str]:
    """All keys of a command's configuration, so that a new one is tried too."""
    with initialize_config_module("otdd_flash.conf", version_base="1.3"):
        content = OmegaConf.to_container(compose(name), resolve=False)
    return list(_flat(content, ""))


def _flat(content: Any, prefix: str) -> Any:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
