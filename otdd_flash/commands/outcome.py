"""The jobs of a command: their directories, exit codes and error files, and the summary of a sweep.

`run_job` runs the work of a command in Hydra's output directory, and turns exceptions into
messages, error.json and exit codes; `commands.start` calls it. `Outcome` is the callback that
conf/runtime.yaml names, so its path must stay: it claims the output directory before Hydra writes
into it, and after a multirun collects the jobs into summary.csv and summary.png. `commands.ranks`
reads `CHECKPOINT`.

A claim on a directory is a lock that the process holds (flock), so a killed process leaves none
behind. The directory of a run, or of a whole sweep, is claimed before Hydra writes its
configuration there; a job of a sweep, or one whose directory's name only a running job knows,
claims its own as it starts; runs that share the directory of a study (`may_share`) claim none. A
directory with a result is only claimed if the user allows it to be replaced
(`tests/commands/test_command_folders.py`). `OF_A_RUN` repeats the names that the files of results
have in `files.tensor_file`, `flows.checkpoint`, `study.study`, `commands.nearest` and
`commands.mix`, so it must change with these. `commands.start` releases what is still claimed when
the command ends.

The summary is read from the jobs' files, so that a launcher may run jobs in other processes. Help
does not import this module: it needs no console.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from otdd_flash.checks import path
from otdd_flash.commands.arguments import check_references, limit_of_the_system
from otdd_flash.commands.messages import messages, shown
from otdd_flash.commands.ranks import leading, named, remember
from otdd_flash.commands.start import at_the_end, job_ended, note, say_error, unheard
from otdd_flash.errors import (
    BAD_INPUT,
    DEFECT,
    INCOMPLETE,
    NOT_CONVERGED,
    SHIFTED,
    IncompleteError,
    InputError,
    LostRankError,
    exit_code,
)
from otdd_flash.files.atomic import lock, unlock, write_json
from otdd_flash.plugins import user_traceback
from otdd_flash.shown import hidden

RESULT_FILE, ERROR_FILE = "result.json", "error.json"
SUMMARY_FILE, PICTURE_FILE = "summary.csv", "summary.png"

LOCK_FILE = ".lock"
CHECKPOINT = "checkpoint.json"
# Files of a run, and of a multirun, that are worth keeping.
STUDY, RANKING, MIXTURE = "study.json", "ranking.json", "mixture.json"
OF_A_RUN = (RESULT_FILE, "result.safetensors", CHECKPOINT, STUDY, RANKING, MIXTURE)
OF_A_MULTIRUN = (SUMMARY_FILE, *(f"*/{name}" for name in OF_A_RUN))

# Space for the files that Hydra writes before a job starts.
PROBE_BYTES = 2**16

# The locks of this process, by directory.
_held: dict[Path, int] = {}

Work = Callable[[DictConfig, Path], None]


def run_job(work: Work, config: DictConfig) -> int:
    """Run one job in its run directory, and record its exit code for the process.

    Bad input is printed without a traceback, a defect with one. Failures of the work are written to
    error.json, the refusal of a directory that another job holds is not. In a multirun the next job
    still runs.

    Returns:
        The job's exit code.
    """
    directory = Path(HydraConfig.get().runtime.output_dir)
    alone = claimed(directory, "hydra.sweep.subdir", replace=may_replace(config))
    try:
        with nullcontext() if may_share(config) else alone:
            code = _carried_out(work, config, directory)
    except InputError as error:
        # No error.json: the directory belongs to another job.
        say_error(error)
        code = BAD_INPUT
    finally:
        job_ended()
    note(code)
    return code


def _carried_out(work: Work, config: DictConfig, directory: Path) -> int:
    try:
        # If it cannot be removed, writing fails as well, and that is reported.
        with suppress(OSError):
            (directory / ERROR_FILE).unlink(missing_ok=True)
        check_references(config)
        with shown(str(config.log_level)):
            work(config, directory)
        if (stream := unheard()) is not None:
            raise IncompleteError(
                f"the result was written to {directory}, but {stream} did not take all that was to "
                "be written to it"
            )
    except LostRankError as error:
        return _failed(directory, named(error), DEFECT)
    except Exception as error:
        code = exit_code(error)
        if code == DEFECT:
            if (limit := limit_of_the_system(error)) is not None:
                return _failed(directory, InputError(limit), BAD_INPUT)
            messages.print_exception()
        return _failed(directory, error, code)
    return 0


def _failed(directory: Path, error: Exception, code: int) -> int:
    say_error(error)
    if trace := user_traceback(error):
        messages.print(trace, soft_wrap=True)
    record = {"error": hidden(str(error)), "type": type(error).__name__, "exit_code": code}
    if code == DEFECT:
        record["traceback"] = hidden("".join(traceback.format_exception(error)))
    try:
        write_json(directory / ERROR_FILE, record)
    except InputError as unwritable:
        say_error(unwritable)
    return code


# Exit codes of jobs that have written a result.
WITH_RESULT = (0, NOT_CONVERGED, INCOMPLETE, SHIFTED)

# Errors of reading a file that is no JSON or YAML, or has unexpected content.
DAMAGED = (
    *(OSError, ValueError, LookupError, TypeError, OmegaConfBaseException, YAMLError),
    HydraException,
)


class Outcome(Callback):
    """The callback that claims the output folder and writes the summary of a sweep.

    Exit codes of a sweep are read from the jobs' directories, so that a launcher may run the jobs
    anywhere.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Claim the run directory; exit with an error if that is impossible."""
        _claim(config, "hydra.run.dir", OF_A_RUN)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Claim the sweep's directory; exit with an error on failure or on several ranks."""
        if leading() is not None:
            say_error(
                "a multirun is of one process: leave torchrun out, or start it for every job and "
                "leave --multirun out"
            )
            sys.exit(BAD_INPUT)
        _claim(config, "hydra.sweep.dir", OF_A_MULTIRUN)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Collect all jobs into summary.csv and summary.png, and take the highest exit code."""
        from otdd_flash.report.page import write_each
        from otdd_flash.report.sweep import axes_of, draw_sweep, names_drawn, summary_csv

        sweep = Path(config.hydra.sweep.dir)
        rows = [_row(job, sweep) for job in _job_directories(sweep)]
        codes = [row.pop("exit_code") for row in rows]
        drawn = "full" in [row.pop("content", None) for row in rows]
        note(max(codes, default=0))
        try:
            summary_csv(rows, sweep / SUMMARY_FILE)
        except InputError as error:
            say_error(error)
            note(BAD_INPUT)
            return
        if differ := _different_epsilons(rows):
            messages.print(differ, soft_wrap=True)
        failed = sum(code > 0 for code in codes)
        messages.print(
            f"{len(rows)} jobs, {failed} failed; summary written to "
            f"{(sweep / SUMMARY_FILE).absolute()}",
            soft_wrap=True,
        )
        picture = sweep / PICTURE_FILE
        # A picture of an earlier sweep would not show these jobs.
        with suppress(OSError):
            picture.unlink(missing_ok=True)
        if not drawn:
            return
        axes = axes_of(rows)
        if isinstance(axes, str):
            messages.print(f"no picture of the sweep: {axes}", soft_wrap=True)
        elif write_each({}, {picture: lambda: draw_sweep(rows, *axes)}, names_drawn(rows)).missing:
            note(INCOMPLETE)


def may_replace(config: DictConfig) -> bool:
    """Return whether a result in the output directory may be replaced or continued."""
    return any(_is_true(config, key) for key in ("overwrite", "flow.resume"))


def may_share(config: DictConfig) -> bool:
    """Return whether several runs may use the output directory at once, for one study."""
    shard = OmegaConf.select(config, "study.shard", throw_on_resolution_failure=False)
    return shard is not None or _is_true(config, "study.resume")


def _is_true(config: DictConfig, key: str) -> bool:
    """Return whether a key is true; it is not if it refers to nothing, which its job reports."""
    return OmegaConf.select(config, key, throw_on_resolution_failure=False) is True


def _claim(config: DictConfig, key: str, worth_keeping: Sequence[str]) -> None:
    """Claim a directory, and exit on failure: Hydra swallows other exceptions of callbacks."""
    if may_share(config):
        return
    try:
        given = OmegaConf.select(config, key)
    except OmegaConfBaseException:
        # The directory's name refers to values that only a running job has; the job claims it.
        return
    try:
        if given is None:
            raise InputError(f"{key} must be given: {key}=DIR")
        folder = Path(str(given))
        if path(key, str(given)) != str(given):
            raise InputError(f"{key}={given}: ~ is expanded in arguments only; give the whole path")
        if "${" in str(given):
            raise InputError(f"{key}={given}: Hydra takes ${{ in a folder's name for a reference")
        claim(folder, key, replace=may_replace(config), worth_keeping=worth_keeping)
    except InputError as error:
        say_error(error)
        sys.exit(BAD_INPUT)
    remember(folder)


def _job_directories(sweep: Path) -> list[Path]:
    jobs = [file.parent.parent for file in sweep.rglob(".hydra/overrides.yaml")]
    return sorted(jobs, key=lambda job: (len(str(job)), str(job)))


def _row(job: Path, sweep: Path) -> dict[str, Any]:
    """Return one line of summary.csv, with the job's exit code."""
    row: dict[str, Any] = {
        "job": job.name,
        "overrides": {},
        "directory": str(job.relative_to(sweep)),
        "exit_code": 0,
    }
    try:
        return row | _results(job)
    except DAMAGED as error:
        # One damaged file must not cost the lines of the others.
        return row | {
            "error": f"its files cannot be read ({' '.join(str(error).split())})",
            "exit_code": INCOMPLETE,
        }


def _results(job: Path) -> dict[str, Any]:
    """Read the columns of a job's line from its files."""
    given: Any = OmegaConf.to_container(OmegaConf.load(job / ".hydra" / "overrides.yaml"))
    row: dict[str, Any] = {"overrides": dict(map(_override, given))}
    result, error = _read(job / RESULT_FILE), _read(job / ERROR_FILE)
    # With any other error, the result is that of an earlier run.
    if result and error.get("exit_code", 0) in WITH_RESULT:
        lower, upper = result["bounds"]
        row |= {key: result[key] for key in ("source", "target", "value", "epsilon", "converged")}
        row |= {"lower": lower, "upper": upper, "seconds": sum(result.get("seconds", {}).values())}
        row |= {key: result.get(key) for key in ("stopped_by", "marginal_error")}
        if "p_value" in result:
            row |= {"p_value": result["p_value"], "effect": result["effect"]["value"]}
        row["content"] = result.get("config", {}).get("report", {}).get("content")
        if sampling := result.get("subsample"):
            row |= {f"sampling_{end}": sampling[end] for end in ("lower", "upper")}
    if error:
        row |= {"error": error["error"], "exit_code": int(error["exit_code"])}
    return row


def _override(text: str) -> tuple[str, Any]:
    """Return key and value of an argument as Hydra parses it; lists stay text."""
    override = OverridesParser.create().parse_override(text)
    value = override.value()
    if value is None or isinstance(value, (list, dict)):
        value = override.get_value_element_as_str()
    return override.key_or_group, value


def _different_epsilons(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence if the values of a sweep have different epsilons, with advice.

    There is no advice if only a swept epsilon makes the difference.
    """
    used = [float(row["epsilon"]) for row in rows if row.get("epsilon") is not None]
    if len(set(used)) < 2:
        return ""
    said = f"the rows are not at one epsilon: it goes from {min(used):.6g} to {max(used):.6g}"
    alike: dict[tuple[str, ...], set[float]] = {}
    for row in rows:
        if row.get("epsilon") is not None:
            given = tuple(str(row["overrides"].get(key)) for key in ("epsilon", "epsilon_relative"))
            alike.setdefault(given, set()).add(float(row["epsilon"]))
    if all(len(same) == 1 for same in alike.values()):
        return said
    values = "VALUE" if len(alike) == 1 else "VALUE,VALUE,..."
    return f"{said}; give epsilon={values} to compare them at the same"


def _read(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def claim(
    folder: Path, key: str, *, replace: bool, worth_keeping: Sequence[str] = OF_A_RUN
) -> None:
    """Claim a directory for this process until it is released or the process ends.

    Args:
        folder: created if it does not exist.
        key: the setting that names it, for messages.
        replace: whether files worth keeping may be replaced.
        worth_keeping: patterns of such files.

    Raises:
        InputError: another process holds it, it holds a result, or it cannot be written.
    """
    try:
        if (place := folder.resolve()) in _held:
            return
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(PROBE_BYTES))
        descriptor = lock(folder / LOCK_FILE)
    except (OSError, RuntimeError, ValueError) as error:
        # Circular links and names that no folder can have raise RuntimeError and ValueError.
        raise InputError(
            f"cannot write to {key}={folder} ({getattr(error, 'strerror', None) or error}); "
            f"free space there or choose another folder with {key}=DIR"
        ) from error
    if descriptor is None:
        raise InputError(
            f"{key}={folder} is in use by another run that has not ended; choose another folder "
            f"with {key}=DIR, or wait"
        )
    _held[place] = descriptor
    at_the_end.callback(release, place)
    found = chain.from_iterable(folder.glob(pattern) for pattern in worth_keeping)
    if not replace and (kept := next(found, None)):
        release(folder)
        goes_on = "".join(
            f", {setting}=true to go on"
            for file, setting in ((CHECKPOINT, "flow.resume"), (STUDY, "study.resume"))
            if (kept.parent / file).exists()
        )
        raise InputError(
            f"{key}={folder} holds a result already, {kept.relative_to(folder)}; choose another "
            f"folder with {key}=DIR, or give overwrite=true to replace it{goes_on}"
        )


def release(folder: Path) -> None:
    """Release a directory, if this process has claimed it."""
    place = folder.resolve()
    if (descriptor := _held.pop(place, None)) is not None:
        unlock(place / LOCK_FILE, descriptor)


@contextmanager
def claimed(folder: Path, key: str, *, replace: bool) -> Iterator[None]:
    """Claim a directory within a context; a claim made before remains."""
    before = folder.resolve() in _held
    claim(folder, key, replace=replace)
    try:
        yield
    finally:
        if not before:
            release(folder)
