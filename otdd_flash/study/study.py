"""The entry point of dataset-transfer studies: `Study`, its folder and its processes.

`Study` reads the tasks and checks the settings. `Study.run` checks the tasks, resolves every `auto`
or takes what the folder has, computes the units (`study.units`: pieces of work with a stored
result, such as one distance or one training run) that are not done, alone or with worker processes,
and gathers the result. `study_units` lists the units in an order in which one process can compute
them. Users call `Study` from Python; `commands.study` makes one from a configuration, also for
`experiments.transfer_study`, and looks for STUDY_FILE.

The units are stored in a folder, each file complete or absent, so a study or a worker that was
killed at any moment can be resumed. study.json holds the tasks and resolved settings, also what
`auto` was resolved to. Several processes may enter a folder at once, so study.json is checked and
written under a lock. A resumed study must have the settings of its folder, because its units would
not be comparable otherwise; so a change to `Setup.to_dict` or to a unit's key makes folders of
earlier versions useless. The names STUDY_FILE and LOCK_FILE must stay: without the first a folder
is taken for a foreign one, and processes with other lock files would not exclude each other.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from otdd_flash.arguments import (
    Count,
    NotNegative,
    Positive,
    Progress,
    Seed,
    Word,
    check_fields,
    takes,
)
from otdd_flash.checks import integer, mapping, optional
from otdd_flash.cost.compute import Compute, ComputeOptions, uses_triton
from otdd_flash.cost.ground import GroundCost
from otdd_flash.devices import resolve_device
from otdd_flash.eager import computes
from otdd_flash.errors import InputError
from otdd_flash.files.atomic import write_json
from otdd_flash.files.tensor_file import other_version
from otdd_flash.labels import (
    LabelMetric,
    Labels,
    NoLabels,
    PairFunction,
    metric_of,
    notice_single_samples,
    settled_metric,
)
from otdd_flash.labels.metrics import with_numbers
from otdd_flash.labels.pairs import pool
from otdd_flash.memory import budget_in_bytes
from otdd_flash.operators.comparison import check_comparable
from otdd_flash.plugins import blamed_on
from otdd_flash.samples import needs_classes
from otdd_flash.sampling.subsampling import LEVEL, check_count
from otdd_flash.solver.penalties import refuse_unbalanced
from otdd_flash.solver.schedules import Converged, Exact, Schedule, schedule_of
from otdd_flash.solver.term import DEFAULT_RELATIVE, default_hint, refuse_both
from otdd_flash.study.measures import MEASURES, measure_that_chooses, measures_named
from otdd_flash.study.result import StudyResult, gather
from otdd_flash.study.setup import (
    VERSION_KEY,
    Given,
    Settings,
    Setup,
    Task,
    Transfer,
    as_tasks,
    read_datasets,
)
from otdd_flash.study.training import build_body, build_head, transfer_units
from otdd_flash.study.units import (
    Shard,
    Stop,
    Store,
    Unit,
    in_order,
    locked,
    work_through,
)

DEFAULT_TRANSFER = Transfer()

STUDY_FILE = "study.json"
LOCK_FILE = ".study.lock"
# The content of a folder before a study begins: Hydra's folder, the lock of a command's run
# (`commands.outcome`), and the lock of a study.
NO_CONTENT = (".hydra", ".lock", LOCK_FILE)
# The pause between two tries to lock a folder.
LOCK_SECONDS = 0.05
# The pause between two checks of the workers' progress.
SECONDS_APART = 0.5


@dataclass(frozen=True, eq=False)
class Study:
    """A study: the tasks to compare, the measures, and the networks to train.

    Args:
        tasks: datasets by name, each as (train, test) or as training rows alone, all of one feature
            space; at least 4 with transfer, otherwise at least 2. Samples, or any datasets of
            vectors that `otdd.embed` accepts, which are read here.
        measures: names of measures: otdd, sliced, frechet, otce, and of trained sources knn, logme,
            h_score, leep; None takes all that are possible.
        measure: the measure that chooses a source for each target, fixed before any gain is known;
            None is otdd, or the first of `measures` if otdd is not among them.
        transfer: how networks are trained; None for no transfer.
        families: the family of tasks by name. Intervals count a family as one dataset; by default
            tasks that share rows, directly or through others, form a family.
        epsilon: entropic regularisation of all pairs, in units of the cost.
        epsilon_relative: epsilon as a multiple of the mean cost over all pairs of different tasks;
            instead of `epsilon`. If neither is given, epsilon is 0.01 of that mean; 0 is the
            unregularised cost, by `otdd.Exact()`.
        unbalanced: rho, the price of mass that is not matched, in units of the cost; None is exact
            marginals. It needs a measure of plans, otdd or otce.
        unbalanced_relative: the same as a multiple of the mean cost over all pairs of different
            tasks.
        labels: the method of class distances, as for `pairwise_distances`. For a function, the
            study stores its value for one pair of classes, and can be resumed only with a function
            that returns the same value.
        cost: the ground cost, `otdd.GroundCost()` by default.
        min_class_size: drop classes with fewer training rows, with a notice.
        solver: how transport is solved to a marginal error, `otdd.Converged()` by default.
        compute: where and how distances are computed, or only the device. Networks are trained on
            the CPU.
        projections: number of draws of the sliced distance, as for `sliced_distances`.
        subsample: K, the number of subsamples for the sampling intervals of all measures of this
            package except sliced; None for none.
        subsample_size: rows of each subsample of a source; None for a quarter.
        noise_floor: also compute distances between two halves of each dataset.
        seed: of every draw.
        cache_dir: where class distances are cached outside the study; None caches none.

    Raises:
        InputError: an argument is invalid, or the tasks do not fit together.
    """

    tasks: Mapping[str, Given]
    measures: Sequence[str] | None = None
    transfer: Transfer | None = DEFAULT_TRANSFER
    families: Mapping[str, str] | None = None
    epsilon: NotNegative | None = None
    epsilon_relative: NotNegative | None = None
    unbalanced: Positive | None = None
    unbalanced_relative: Positive | None = None
    labels: Labels = "gaussian"
    cost: GroundCost | None = None
    min_class_size: Count | None = None
    solver: Schedule | None = None
    compute: Compute | None = None
    projections: int = 10_000
    subsample: Count | None = None
    subsample_size: Count | None = None
    noise_floor: bool = False
    seed: Seed = 0
    cache_dir: str | os.PathLike[str] | None = None
    measure: Word | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            tasks=mapping("be a mapping of datasets by name, such as {'mnist': (train, test)}"),
            families=optional(mapping("be a mapping of families by the names of tasks")),
            projections=integer(at_least=2),
        )
        # The tasks are read only once, as a shuffled loader gives other rows the next time.
        object.__setattr__(self, "tasks", read_datasets(self.tasks))
        transfer = self.transfer is not None
        if self.measures is None:
            able = (name for name, kind in MEASURES.items() if transfer or not kind.needs_transfer)
            object.__setattr__(self, "measures", tuple(able))
        measures_named(self.measures or (), transfer=transfer)
        measure_that_chooses(self.measure, self.measures or ())
        if self.subsample is not None:
            check_count(self.subsample, LEVEL)
        elif self.subsample_size is not None:
            raise InputError(
                f"subsample_size={self.subsample_size} needs subsample=K, the number of subsamples"
            )
        # Called here for its errors.
        refuse_both(self.epsilon, self.epsilon_relative)
        options, *_ = self._schedule()
        metric, cost = metric_of(self.labels), self.cost or GroundCost()
        penalties = self.unbalanced, self.unbalanced_relative
        refuse_unbalanced(*penalties, options, debias=True, ground=cost.ground)
        self._refuse_without_plans()
        if metric.name == "given":
            raise InputError(
                "a study measures its class distances itself; choose any labels but given"
            )
        cost.check_labels(metric.name)

    def _refuse_without_plans(self) -> None:
        """Refuse a penalty of marginals where no measure is of a plan.

        Raises:
            InputError: it would have no effect.
        """
        names = tuple(dict.fromkeys(self.measures or ()))
        if any(MEASURES[name].reads_plans for name in names):
            return
        for key in ("unbalanced", "unbalanced_relative"):
            penalty = getattr(self, key)
            if penalty is not None:
                raise InputError(
                    f"{key}={penalty:g} is for measures of plans, and {', '.join(names)} read "
                    f"none; add otdd or otce to measures, or leave {key} out"
                )

    # `takes` checks arguments by their annotations; `computes` keeps PyTorch's surrounding modes,
    # such as the default device, out.
    @computes
    @torch.enable_grad()
    @takes()
    def run(
        self,
        folder: str | os.PathLike[str],
        *,
        resume: bool = False,
        shard: Word | None = None,
        workers: Count = 1,
        threads: Count | None = None,
        progress: Progress | None = None,
        stop: Stop | None = None,
    ) -> StudyResult:
        """Compute the units that the folder does not have yet, and return the result.

        Args:
            folder: the study's folder, created if it does not exist: study.json and units.
            resume: continue the study that the folder holds.
            shard: I/N such as 2/4, this process's part of the work; N processes share the folder.
            workers: the number of worker processes.
            threads: threads for units that may use several (`Unit.one_thread` is False). It is a
                setting of the study, so a resumed run must have the same; None takes the folder's,
                or torch's number, divided among the workers, when the study begins.
            progress: called as progress(units done, their total).
            stop: called between units; if it returns True, the run ends early.

        Returns:
            The result of all units that are done: of all units, unless the run was stopped or units
            failed, which `failures` lists.

        Raises:
            InputError: the folder holds something else, or a study with other settings.
        """
        part, folder = Shard.parse(shard), Path(folder)
        tasks, metric = self._compared(self._tasks())
        with _alone(folder):
            known = _read(folder)
            if known is not None and not resume and shard is None:
                raise InputError(
                    f"{folder} holds a study already; give study.resume=true (resume=True) to go "
                    "on with it, or another folder"
                )
            settings = self._settings(known or {}, metric, workers, threads)
            setup = Setup(tasks, settings, self.cache_dir)
            _note(folder, known, setup)
        started = time.perf_counter()
        store, units = Store(folder, settings.threads), study_units(setup)
        with part.alive(store):
            for unit in units:
                if part.owner(unit) == part.number:
                    store.forget_failure(unit)
            if workers > 1 and not all(map(store.done, units)):
                _work_in_processes(setup, store, units, workers, part, progress, stop)
            else:
                work_through(units, store, shard=part, progress=progress, stop=stop)
            return gather(setup, store, units, seconds=time.perf_counter() - started)

    def _tasks(self) -> tuple[Task, ...]:
        """Return the checked tasks, so that every error is raised before anything is computed."""
        transfer = self.transfer
        tasks = as_tasks(
            self.tasks,
            min_class_size=self.min_class_size,
            families=self.families,
            transfer=transfer is not None,
        )
        check_comparable(*(task.train for task in tasks))
        for one, other in combinations(tasks, 2):
            if one.train.fingerprint == other.train.fingerprint:
                raise InputError(
                    f"tasks {one.name} and {other.name} have the same training rows; take one out"
                )
        notice_single_samples([task.train for task in tasks], metric_of(self.labels))
        if transfer is not None:
            for task in tasks:
                transfer.target_rows(task.train)
            dim = tasks[0].train.dim
            # Built once, so that errors of the network are raised before anything is computed.
            build_head(build_body(transfer, dim, 0), dim, 2, 0)
        return tasks

    def _compared(self, tasks: tuple[Task, ...]) -> tuple[tuple[Task, ...], LabelMetric]:
        """Return tasks and the metric between classes, of numbers with one scale.

        A function of class pairs includes its value for one pair.

        Raises:
            InputError: a measure has no meaning for several labels a row, or numbers, or the metric
                has no distances between labels of a task.
        """
        trained = [task.train for task in tasks]
        metric, found = with_numbers(metric_of(self.labels), trained)
        if any(one.label_sets is not None or one.targets is not None for one in found):
            unable = [name for name in self.measures or () if MEASURES[name].one_class]
            if unable:
                are = "are measures" if len(unable) > 1 else "is a measure"
                raise InputError(
                    f"{', '.join(unable)} {are} of one class a row, and tasks have several "
                    f"labels a row or numbers; leave {', '.join(unable)} out of measures"
                )
        if "otdd" in (self.measures or ()) and not isinstance(metric, NoLabels):
            for one in found:
                if one.labels is None:
                    raise needs_classes(one)
            # For its errors.
            metric.by_names([*dict.fromkeys(name for one in found for name in one.label_names)])
        tasks = tuple(replace(task, train=one) for task, one in zip(tasks, found, strict=True))
        cost = self.cost or GroundCost()
        transformed = [cost.transform(one) for one in found]
        if isinstance(metric, PairFunction):
            return tasks, metric.probed(pool(transformed)[0])
        return tasks, settled_metric(metric, self._schedule()[1], transformed)

    def _schedule(self) -> tuple[Schedule, float | None, float | None]:
        """Return the schedule of every term, epsilon, and its multiple of the mean cost.

        Raises:
            InputError: the schedule is not for a study, or not for this epsilon.
        """
        chosen = schedule_of(self.solver, self.epsilon, self.epsilon_relative)
        options, epsilon, relative = chosen
        if not isinstance(options, Exact) and (
            not isinstance(options, Converged) or options.bound_width or options.max_seconds
        ):
            raise InputError(
                "a study solves every term once, to solver.tolerance; solver.bound_width, "
                "solver.max_seconds and solver.schedule=geomloss are for dataset_distance"
            )
        # A term that stops early is reported as not converged, and the others continue.
        return replace(options, require_convergence=False), epsilon, relative

    def _settings(
        self,
        known: Mapping[str, Any],
        metric: LabelMetric,
        workers: int,
        threads: int | None,
    ) -> Settings:
        """Return settings without `auto`: the folder's values, or those resolved now."""
        threads = threads or known.get("threads")
        solver, epsilon, relative = self._schedule()
        if epsilon is None and relative is None:
            relative = DEFAULT_RELATIVE
        return Settings(
            measures=tuple(dict.fromkeys(self.measures or ())),
            measure=measure_that_chooses(self.measure, self.measures or ()),
            epsilon=epsilon,
            epsilon_relative=relative,
            unbalanced=self.unbalanced,
            unbalanced_relative=self.unbalanced_relative,
            labels=metric,
            cost=self.cost or GroundCost(),
            solver=solver,
            compute=_resolved(ComputeOptions.of(self.compute), known.get("compute") or {}),
            projections=self.projections,
            subsample=self.subsample,
            subsample_size=self.subsample_size,
            noise_floor=self.noise_floor,
            transfer=self.transfer,
            seed=self.seed,
            threads=threads or max(1, torch.get_num_threads() // workers),
        )


def study_units(setup: Setup) -> list[Unit]:
    """Return the units of a study's measures and of its transfer runs, each after its needs."""
    settings, units = setup.settings, list[Unit]()
    for measure in measures_named(settings.measures, transfer=settings.transfer is not None):
        with blamed_on(measure, f"measure {measure.name}"):
            units += measure.units(setup)
    if settings.transfer is not None:
        units += transfer_units(setup)
    return in_order(units)


def _resolved(compute: ComputeOptions, kept: Mapping[str, Any]) -> ComputeOptions:
    """Return options without `auto`: the folder's values, or those resolved here and now."""
    asked = {
        key: kept.get(key, value) if value == "auto" else value
        for key, value in compute.settings.items()
    }
    device = resolve_device(asked["device"])
    asked["device"] = str(device)
    if asked["backend"] == "auto":
        asked["backend"] = "triton" if uses_triton(compute, device) else "torch"
    # Half of the free memory: several processes may run, and less may be free later.
    budget = asked["memory_budget"]
    asked["memory_budget"] = budget_in_bytes(budget, device) // (2 if budget == "auto" else 1)
    return ComputeOptions(**asked)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process has locked the folder, and lock it."""
    while True:
        with locked(folder / LOCK_FILE) as free:
            if free:
                yield
                return
        time.sleep(LOCK_SECONDS)


def _read(folder: Path) -> dict[str, Any] | None:
    """Return the content of study.json; None for a folder in which a study may begin.

    Raises:
        InputError: the file is damaged, or the folder holds something else.
    """
    path = folder / STUDY_FILE
    if path.exists():
        try:
            content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read ({error}); choose another folder") from error
        return content
    found = sorted(path.name for path in folder.iterdir() if path.name not in NO_CONTENT)
    # A failed command leaves error.json; a new attempt may begin in its folder.
    if found and found != ["error.json"]:
        raise InputError(
            f"{folder} is not a study: it holds {found[0]} and no {STUDY_FILE}; choose an empty "
            "folder"
        )
    return None


def _note(folder: Path, known: Mapping[str, Any] | None, setup: Setup) -> None:
    """Write study.json, or check that what is known of the folder's study is the same.

    Raises:
        InputError: the folder's study has other settings.
    """
    # The summary is in JSON's own types, with lists for tuples, so that it can equal a stored one.
    summary = json.loads(json.dumps(setup.to_dict()))
    if known is None:
        write_json(folder / STUDY_FILE, summary)
    elif known.get(VERSION_KEY) != summary[VERSION_KEY]:
        by = other_version(known.get("versions", {}))
        raise InputError(
            f"{folder} holds a study of another version of otdd_flash, whose fingerprints of "
            f"datasets cannot be compared with today's{by}; choose another folder"
        )
    elif different := sorted(_different(known, summary)):
        shown = ", ".join(different[:6]) + (", ..." if len(different) > 6 else "")
        # If epsilon differs and the folder has the default of earlier versions, the message says
        # how to give it.
        earlier = default_hint(known.get("epsilon")) if "epsilon" in different else ""
        raise InputError(
            f"{folder} holds a study with other settings: {shown} differ; give it the same, "
            f"or another folder{earlier}"
        )


def _different(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yield the dotted keys at which two summaries differ.

    Keys of software versions have both values with them.
    """
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {*one, *other}:
            yield from _different(one.get(key), other.get(key), f"{where}.{key}".strip("."))
    elif one != other:
        yield f"{where} ({one} then, {other} now)" if where.startswith("versions.") else where


def _work_in_processes(
    setup: Setup,
    store: Store,
    units: Sequence[Unit],
    workers: int,
    shard: Shard,
    progress: Progress | None,
    stop: Stop | None,
) -> None:
    """Compute all units with `workers` processes; other arguments are those of `work_through`.

    Raises:
        InputError: a worker was killed.
    """
    from joblib.externals.loky.process_executor import ProcessPoolExecutor, TerminatedWorkerError

    flag = store.folder / f".stop-{shard.number}"
    store.folder.mkdir(parents=True, exist_ok=True)
    flag.unlink(missing_ok=True)
    # Threads of torch are set for each unit; those of other libraries are few from the start.
    libraries, threads = ("OMP", "OPENBLAS", "MKL"), str(store.threads)
    environment = {f"{library}_NUM_THREADS": threads for library in libraries}
    executor = ProcessPoolExecutor(workers, env=environment)
    try:
        calls = [
            executor.submit(_worker, setup, store, shard, flag, os.getpid()) for _ in range(workers)
        ]
        while wait(calls, SECONDS_APART).not_done:
            if stop is not None and stop():
                flag.touch()
            if progress is not None:
                progress(sum(map(store.done, units)), len(units))
        for one in calls:
            one.result()
    except TerminatedWorkerError as error:
        raise InputError(
            "a worker process was killed from outside, as systems do where memory runs out; "
            "finished work is kept: go on with study.resume=true (resume=True) and a smaller "
            f"study.workers (workers) than {workers}"
        ) from error
    finally:
        # Units are written completely or not at all, so workers may end at any moment.
        executor.shutdown(kill_workers=True)
        flag.unlink(missing_ok=True)


def _worker(setup: Setup, store: Store, shard: Shard, flag: Path, parent: int) -> None:
    _end_with(parent)
    # Ctrl-C reaches all processes of a terminal; only the parent handles it and sets the flag.
    with suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    work_through(study_units(setup), store, shard=shard, stop=flag.exists)


@cache
def _end_with(parent: int) -> None:
    """End this process, even during a unit, once its parent has been killed.

    Otherwise it would hold the locks of its units and use cores unnoticed. Units are written
    completely or not at all, so it may end at any moment.
    """

    def watch() -> None:
        # If the parent ends, the process gets another parent.
        while os.getppid() == parent:
            time.sleep(SECONDS_APART)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
