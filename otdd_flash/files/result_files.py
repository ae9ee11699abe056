"""The two files of a saved result: result.json to read, result.safetensors with everything.

`result`, `flows.result` and `solver.matrix.result` save and load through this module;
`pairwise` has one file of the name SUMMARY_FILE with a table of its own beside it, and takes
SUMMARY_FILE and COMPUTE_AGAIN. `commands.results` and `commands.shift` remove an old result with
`remove_result`.

`read_result` reads result.safetensors alone, which holds the summary too. So a write that was
interrupted between both files never mixes two results, although result.json is then older. Both
file names and the layout are formats on disk: files of earlier versions must stay readable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.files.atomic import write_json
from otdd_flash.files.tensor_file import (
    DamagedFileError,
    other_version,
    read_tensors,
    write_tensors,
)

SUMMARY_FILE = "result.json"
TENSOR_FILE = "result.safetensors"
COMPUTE_AGAIN = "restore it from a copy, or compute it again"

Result = TypeVar("Result")


def write_result(path: Path, summary: Mapping[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write result.safetensors with tensors and summary, then result.json with the summary.

    The first holds the summary too, so that an interrupted write can never mix two results.

    Raises:
        InputError: the directory cannot be written.
    """
    write_tensors(path / TENSOR_FILE, tensors, {"summary": json.dumps(summary)})
    write_json(path / SUMMARY_FILE, summary)


def remove_result(path: Path) -> None:
    """Remove a result in `path`, so that no part of it remains beside a new one.

    Raises:
        InputError: it cannot be removed.
    """
    # First result.json, by which commands recognise a result.
    for name in (SUMMARY_FILE, TENSOR_FILE):
        try:
            (path / name).unlink(missing_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot remove {path / name} ({error.strerror or error}); choose another folder"
            ) from error


def read_result(
    path: Path, restore: Callable[[dict[str, Any], dict[str, Tensor]], Result], kind: str
) -> Result:
    """Restore a result from the summary and the tensors that `write_result` wrote.

    Args:
        path: the directory.
        restore: called as restore(summary, tensors).
        kind: the class whose `save` writes such results, for the message.

    Raises:
        InputError: the directory holds no complete result of this kind, a damaged one, or one of a
            later version.
    """
    file = path / TENSOR_FILE
    try:
        stored = read_tensors(file)
    except DamagedFileError as error:
        raise InputError(f"{file} is damaged ({error}); {COMPUTE_AGAIN}") from error
    except OSError as error:
        raise _no_result(path, f"{error}", kind) from error
    try:
        return restore(json.loads(stored.texts["summary"]), stored.tensors)
    except Exception as error:
        # Whatever it raises: files of earlier versions are not checked otherwise.
        raise _no_result(path, f"{error}{other_version(stored.texts)}", kind) from error


def _no_result(path: Path, reason: str, kind: str) -> InputError:
    return InputError(
        f"no complete result in {path} ({reason}); {kind}.save writes {TENSOR_FILE} there, and so "
        "does the command with save_result=true"
    )
