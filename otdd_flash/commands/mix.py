"""The work of `python -m otdd_flash.mix`: load target and sources, mix, write and print.

For the entry point `otdd_flash.mix`, `commands.start.run_work` imports this module by name and
`commands.outcome.run_job` calls `mix`. All datasets go through one extractor; `mixing.mixture`
finds the weights. mixture.json is written and the table printed before anything is drawn.

`MixSettings` must have the keys of conf/mix.yaml. `commands.outcome` keeps a list of files that
hold results, so another name of mixture.json must be given there too
(`tests/commands/test_mix_command.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from otdd_flash.arguments import Count, Ground, NotNegative, Positive, check_fields
from otdd_flash.commands.messages import Phases
from otdd_flash.commands.results import track_mixture, write_run
from otdd_flash.commands.settings import (
    EmbeddingSettings,
    ReportSettings,
    parse,
    recorded,
)
from otdd_flash.commands.sides import build, image_shape_of, listed, listed_side
from otdd_flash.errors import InputError
from otdd_flash.mixing.mixture import mixture
from otdd_flash.mixing.result import Mixture
from otdd_flash.report.mixture import mixture_table, write_mixture_report
from otdd_flash.report.page import Report
from otdd_flash.samples import LabeledSamples
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
    content, first = settings.report.content, found[0]
    parts = {name: spent for name, spent in phases.seconds.items() if name == "mix"}
    more = {"seconds": phases.all_seconds(parts), "seed": settings.seed, "config": kept}
    other = {"other": found[1].to_dict()} if len(found) > 1 else {}

    def draw() -> Report:
        # Weights are written by then, because a source may have too few rows.
        count = settings.rows or settings.max_rows
        return write_mixture_report(
            first,
            directory,
            other=found[1] if len(found) > 1 else None,
            content=content,
            drawn=None if count is None else first.dataset(count, settings.seed),
            image_shape=shape,
        )

    report = write_run(
        directory / MIXTURE_FILE,
        {**first.to_dict(), **other, **more},
        content,
        [f"{weight:.6f} {name}" for name, weight in first.weights.items()],
        lambda: [mixture_table(*found), *first.sentences()],
        draw,
    )
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
    nodes = listed("sources", settings.sources)
    extractor, _ = build(settings.extractor, phases)
    sources: dict[str, LabeledSamples] = {}
    shape = None
    for name, node in nodes.items():
        samples, dataset = listed_side(name, node, extractor, settings, phases)
        shape = image_shape_of(extractor, dataset)
        sources[name] = replace(samples, name=name)
    target, _ = listed_side("target", settings.target, extractor, settings, phases)
    return sources, target, shape
