"""The work of `python -m otdd_flash.mix`: load target and sources, mix, write and print.

For the entry point `otdd_flash.mix`, `commands.start.run_work` imports this module by name and
`commands.outcome.run_job` calls `mix`. All datasets go through one extractor. mixture.json is
written and the table printed before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from otdd_flash.arguments import Count, Ground, NotNegative, Positive, check_fields
from otdd_flash.checks import shown
from otdd_flash.commands.messages import Phases, Terminal
from otdd_flash.commands.results import track_mixture
from otdd_flash.commands.settings import (
    EmbeddingSettings,
    ReportSettings,
    parse,
    recorded,
)
from otdd_flash.commands.sides import build, image_shape_of, listed_side
from otdd_flash.errors import InputError
from otdd_flash.files.atomic import write_json
from otdd_flash.mixing.mixture import mixture
from otdd_flash.mixing.result import Mixture
from otdd_flash.report.mixture import mixture_table, write_mixture_report
from otdd_flash.samples import LabeledSamples
from otdd_flash.shown import hidden
from otdd_flash.solver.schedules import Converged

MIXTURE_FILE = "mixture.json"
# Settings that are arguments of `otdd.mixture`.
OF_A_MIXTURE = (
    *("max_weights", "max_rows", "penalty", "towards", "bound_width", "max_seconds", "seed"),
    *("lambda_x", "lambda_y", "ground", "epsilon", "epsilon_relative", "min_class_size"),
    "cache_dir",
)


@dataclass
class MixSettings(EmbeddingSettings):
    """The settings of conf/mix.yaml."""

    target: dict[str, Any]
    sources: Any
    max_weights: Any
    max_rows: Count | None
    penalty: Positive | None
    towards: Any
    debias: bool
    both: bool
    bound_width: Positive
    max_seconds: Positive | None
    subsample: Count | None
    rows: Count | None
    lambda_x: NotNegative
    lambda_y: NotNegative
    ground: Ground
    epsilon: Positive | None
    epsilon_relative: Positive | None
    min_class_size: Count | None
    report: ReportSettings


def mix(config: DictConfig, directory: Path) -> None:
    """Find the weights of the sources and write the files into `directory`."""
    settings = parse(config, MixSettings)
    kept = recorded(settings, config)
    check_fields(settings)
    settings.log.check()
    for key, asked in (("labels.full", settings.labels.full), *_fitted(settings.extractor)):
        if asked:
            raise InputError(f"{key} is for two datasets, and has no meaning in a mixture")
    if settings.labels.method == "given":
        raise InputError("labels=given is for two datasets; otdd.mixture takes class_distances=")
    metric = settings.labels.metric(Converged().asked_tolerance, settings.epsilon)
    with Phases() as phases:
        sources, target, shape = _datasets(settings, phases)
        options = {name: getattr(settings, name) for name in OF_A_MIXTURE}
        options |= {"labels": metric, "compute": settings.compute_options()}
        found = _found(settings, sources, target, options, phases)
    content = settings.report.content
    first, console = found[0], Terminal()
    parts = {name: spent for name, spent in phases.seconds.items() if name == "mix"}
    more = {"seconds": phases.all_seconds(parts), "seed": settings.seed, "config": kept}
    other = {"other": found[1].to_dict()} if len(found) > 1 else {}
    try:
        write_json(directory / MIXTURE_FILE, {**first.to_dict(), **other, **more})
    finally:
        # Printed even if the file cannot be written, because the weights are known.
        if content == "none":
            for name, weight in first.weights.items():
                console.print(f"{weight:.6f} {name}", markup=False)
        else:
            console.print(mixture_table(*found))
            for sentence in first.sentences():
                console.print(sentence, soft_wrap=True, markup=False)
    # Weights are written by then, because a source may have too few rows.
    count = settings.rows or settings.max_rows
    drawn = None if count is None else first.dataset(count, settings.seed)
    report = write_mixture_report(
        first,
        directory,
        other=found[1] if len(found) > 1 else None,
        content=content,
        drawn=drawn,
        image_shape=shape,
    )
    if content != "none":
        console.print(f"written to {directory}", soft_wrap=True)
    report += track_mixture(first, settings.log, kept, directory)
    report.require_complete()


def _fitted(node: dict[str, Any]) -> list[tuple[str, bool]]:
    return [
        ("extractor.standardize", bool(node.get("standardize"))),
        ("extractor.pca", node.get("pca") is not None),
    ]


def _found(
    settings: MixSettings,
    sources: Mapping[str, LabeledSamples],
    target: LabeledSamples,
    options: dict[str, Any],
    phases: Phases,
) -> list[Mixture]:
    """Return the mixture, and with `both` that of the other value, at the same epsilon."""
    found: list[Mixture] = []
    for debias in (settings.debias, not settings.debias)[: 1 + settings.both]:
        with phases.phase("mix", "debiased weights" if debias else "weights"):
            subsample = None if found else settings.subsample
            found.append(mixture(target, sources, debias=debias, subsample=subsample, **options))
    return found


def _datasets(
    settings: MixSettings, phases: Phases
) -> tuple[dict[str, LabeledSamples], LabeledSamples, tuple[int, int, int] | None]:
    """Load and embed all datasets; return sources, target, and the shape of features as images."""
    if not isinstance(settings.sources, list) or not settings.sources:
        raise InputError(
            f"sources must be a list of datasets such as [{{name: mnist}}], got "
            f"{shown(settings.sources)}"
        )
    extractor, _ = build(settings.extractor, phases)
    sources: dict[str, LabeledSamples] = {}
    shape = None
    for place, given in enumerate(settings.sources):
        if not isinstance(given, Mapping) or "name" not in given:
            raise InputError(
                f"sources[{place}] must be a dataset's keys such as {{name: mnist}}, got "
                f"{shown(given)}"
            )
        node = dict(given)
        name = hidden(str(node.pop("as", None) or node["name"]))
        if name in sources:
            raise InputError(f"two sources are called {name}; give one as: NAME")
        samples, dataset = listed_side(name, node, extractor, settings, phases)
        shape = image_shape_of(extractor, dataset)
        sources[name] = replace(samples, name=name)
    target, _ = listed_side("target", settings.target, extractor, settings, phases)
    return sources, target, shape
