"""The work of `python -m otdd_flash.nearest`: load query and library, rank, write and print.

For the entry point `otdd_flash.nearest`, `commands.start.run_work` imports this module by name and
`commands.outcome.run_job` calls `nearest`. Query and members go through one extractor;
`ranking.index` keeps the members, and `ranking.race` ranks them. ranking.json is written and the
table printed before anything is drawn.

An index in a folder has the settings of its extractor beside it, in extractor.json. A query with
other settings is refused, so that file and its keys must stay
(`tests/commands/test_nearest_command.py`). `NearestSettings` must have the keys of
conf/nearest.yaml. `commands.outcome` keeps a list of files that hold results, so another name of
ranking.json must be given there too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from otdd_flash.arguments import Count, Ground, NotNegative, Positive, check_fields
from otdd_flash.commands.messages import Phases
from otdd_flash.commands.results import track_ranking, write_run
from otdd_flash.commands.settings import (
    EmbeddingSettings,
    ReportSettings,
    parse,
    recorded,
)
from otdd_flash.commands.sides import build, keys_of, listed, listed_side
from otdd_flash.errors import InputError
from otdd_flash.extractors.network import Extractor
from otdd_flash.files.atomic import write_json
from otdd_flash.ranking import race
from otdd_flash.ranking.index import INDEX_FILE, Index, index
from otdd_flash.report.nearest import ranking_table, write_ranking_report
from otdd_flash.samples import LabeledSamples
from otdd_flash.solver.schedules import Converged

# Settings that are arguments of `otdd.nearest` and of `otdd.index`.
OF_A_QUERY = ("k", "ordered", "tie", "max_seconds", "subsample", "seed", "cache_dir")
OF_AN_INDEX = (
    *("epsilon", "epsilon_relative", "unbalanced", "unbalanced_relative", "min_class_size"),
    *("lambda_x", "lambda_y", "ground", "rebuild", "skip", "cache_dir"),
)
RANKING_FILE, EXTRACTOR_FILE = "ranking.json", "extractor.json"


@dataclass
class NearestSettings(EmbeddingSettings):
    """The settings of conf/nearest.yaml."""

    query: Any
    library: Any
    index: str | None
    k: Count
    ordered: bool
    tie: NotNegative
    max_seconds: Positive | None
    subsample: Count | None
    rebuild: bool
    skip: bool
    lambda_x: float
    lambda_y: float
    ground: Ground
    epsilon: NotNegative | None
    epsilon_relative: NotNegative | None
    unbalanced: Positive | None
    unbalanced_relative: Positive | None
    min_class_size: Count | None
    report: ReportSettings


def nearest(config: DictConfig, directory: Path) -> None:
    """Rank a library for one query and write the files into `directory`."""
    settings = parse(config, NearestSettings)
    kept = recorded(settings, config)
    check_fields(settings)
    settings.log.check()
    if settings.labels.full:
        raise InputError("labels.full=true has no meaning in a ranking; leave it out")
    if settings.extractor.get("standardize") or settings.extractor.get("pca") is not None:
        raise InputError(
            "extractor.standardize and extractor.pca fit a map to the datasets at hand, and an "
            "index has to take queries to come; leave them out, or transform the data beforehand"
        )
    settings.labels.metric(Converged().asked_tolerance, settings.epsilon)
    query = keys_of("query", settings.query)
    folder = settings.library if isinstance(settings.library, str) else settings.index
    if folder is not None and (Path(folder) / INDEX_FILE).exists():
        _check_extractor(Path(folder), settings.extractor)
    with Phases() as phases:
        extractor, _ = build(settings.extractor, phases)
        given, _ = listed_side("query", query, extractor, settings, phases)
        known = _indexed(settings, extractor, given.dim, phases)
        with phases.phase("race", "ranking") as progress:
            options = {name: getattr(settings, name) for name in OF_A_QUERY}
            found = race.nearest(given, known, progress=progress, **options)
    content = settings.report.content
    parts = {name: spent for name, spent in phases.seconds.items() if name in ("index", "race")}
    more = {"seconds": phases.all_seconds(parts), "seed": settings.seed, "config": kept}
    report = write_run(
        directory / RANKING_FILE,
        {**found.to_dict(), **more},
        content,
        [row.name for row in found.rows],
        lambda: [ranking_table(found), *found.sentences()],
        lambda: write_ranking_report(found, directory, content=content),
    )
    report += track_ranking(found, settings.log, kept, directory)
    report.require_complete()


def _indexed(settings: NearestSettings, extractor: Extractor, dim: int, phases: Phases) -> Index:
    """Return the index in a folder, or that of datasets, which is stored if `index` names one.

    A new one is of datasets with `dim` features, those of the query.
    """
    if isinstance(settings.library, str):
        folder = Path(settings.library)
        if not (folder / INDEX_FILE).exists():
            raise InputError(
                f"library={folder} is no index; build one with 'library=[{{name: mnist}}, ...]' "
                f"index={folder}"
            )
        return _built({}, folder, settings, dim, phases)
    nodes = listed("library", settings.library, ", or the folder of an index", empty=True)
    library: dict[str, LabeledSamples] = {}
    for name, node in nodes.items():
        samples, _ = listed_side(name, node, extractor, settings, phases)
        library[name] = replace(samples, name=name)
    stored = None if settings.index is None else Path(settings.index)
    return _built(library, stored, settings, dim, phases)


def _built(
    library: Mapping[str, LabeledSamples],
    folder: Path | None,
    settings: NearestSettings,
    dim: int,
    phases: Phases,
) -> Index:
    """Build or read an index; other settings than it was built with are refused."""
    new = folder is None or not (folder / INDEX_FILE).exists()
    if folder is not None and new:
        # First: of an index that is killed while it is built the extractor is known.
        write_json(folder / EXTRACTOR_FILE, settings.extractor)
    with phases.phase("index", "self terms") as progress:
        options = {name: getattr(settings, name) for name in OF_AN_INDEX}
        metric = settings.labels.metric(Converged().asked_tolerance, settings.epsilon)
        options |= {"labels": metric, "compute": settings.compute_options(), "progress": progress}
        options["dim"] = dim if new else None
        return index(library, folder, **options)


def _check_extractor(folder: Path, node: dict[str, Any]) -> None:
    """Refuse an index whose members were embedded otherwise than the query."""
    try:
        built = json.loads((folder / EXTRACTOR_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # Built from Python, where the user embeds: the number of features is checked.
        return
    for key in {*built, *node} - {"batch_size", "num_workers", "download"}:
        if built.get(key) != node.get(key):
            raise InputError(
                f"the index in {folder} was built with extractor.{key}={built.get(key)}, got "
                f"{node.get(key)}; features by different maps do not compare"
            )
