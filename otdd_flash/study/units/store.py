"""The folder of a study's units: one file each, whole or not at all, with a checksum."""

from __future__ import annotations

import json
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from otdd_flash.errors import ConvergenceError, DataNotice, InputError
from otdd_flash.files.json_file import write_json
from otdd_flash.files.locks import lock, unlock
from otdd_flash.files.tensor_file import DamagedFileError, read_tensors, write_tensors
from otdd_flash.study.units.unit import Content, Unit

FOLDER = "units"
# How a unit that failed ends, in the order of the commands' exit codes.
DEFECT, BAD_INPUT, NOT_CONVERGED = 1, 2, 3


class Store:
    """Contents of units by their digests, under `folder`/units.

    Args:
        folder: the study's; made on the first write.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder) / FOLDER

    def done(self, unit: Unit) -> bool:
        """Whether there is a file of the unit."""
        return self._path(unit).exists()

    def get(self, unit: Unit) -> Content | None:
        """What the unit came to, or None where there is no file, or a damaged one, which goes.

        Warns:
            DataNotice: the file is damaged.
        """
        path = self._path(unit)
        try:
            stored = read_tensors(path)
            if not stored.checked or stored.texts.get("digest") != unit.digest:
                raise DamagedFileError("it is not what its name says")
            return Content(json.loads(stored.texts["facts"]), stored.tensors)
        except FileNotFoundError:
            return None
        except (DamagedFileError, OSError) as error:
            warnings.warn(
                f"the file of {unit.title}, {path}, is damaged ({error}); it is computed again",
                DataNotice,
                stacklevel=2,
            )
            with suppress(OSError):
                path.unlink(missing_ok=True)
        return None

    def put(self, unit: Unit, content: Content) -> None:
        """Keep what a unit came to.

        Raises:
            InputError: the file cannot be written.
        """
        texts = {
            "digest": unit.digest,
            "kind": unit.kind,
            "title": unit.title,
            "key": json.dumps(unit.key, sort_keys=True),
            "facts": json.dumps(content.facts, sort_keys=True, allow_nan=False),
        }
        write_tensors(self._path(unit), content.tensors, texts)
        with suppress(OSError):
            self._error_path(unit).unlink(missing_ok=True)

    def fail(self, unit: Unit, error: Exception) -> None:
        match error:
            case InputError():
                code = BAD_INPUT
            case ConvergenceError():
                code = NOT_CONVERGED
            case _:
                code = DEFECT
        record = {
            "unit": unit.title,
            "error": str(error) or type(error).__name__,
            "type": type(error).__name__,
            "exit_code": code,
        }
        if code == DEFECT:
            record["traceback"] = "".join(traceback.format_exception(error))
        write_json(self._error_path(unit), record)

    def failure(self, unit: Unit) -> dict[str, Any] | None:
        """Why the unit failed when it was last tried; None if it did not."""
        try:
            record: dict[str, Any] = json.loads(self._error_path(unit).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return record

    def forget_failure(self, unit: Unit) -> None:
        with suppress(OSError):
            self._error_path(unit).unlink(missing_ok=True)

    @contextmanager
    def locked(self, unit: Unit) -> Iterator[bool]:
        """Whether no other living process computes the unit; until the end none will.

        Raises:
            InputError: the folder cannot be written.
        """
        path = self.folder / f".{unit.digest}.lock"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = lock(path)
        except OSError as error:
            raise InputError(
                f"cannot write {path} ({error.strerror or error}); free space there or choose "
                "another folder"
            ) from error
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                unlock(path, descriptor)

    def _path(self, unit: Unit) -> Path:
        return self.folder / f"{unit.digest}.safetensors"

    def _error_path(self, unit: Unit) -> Path:
        return self.folder / f"{unit.digest}.error.json"
