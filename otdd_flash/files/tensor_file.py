"""Files of tensors and arrays that detect damage, and the two files of a saved result.

`write_tensors` and `read_tensors` handle named tensors and texts in one safetensors file, with a
checksum over all of them, so that a flipped bit is found instead of computed with.
`flows.residual_map`, `ranking.index` and `study.units` use them; `files.cache` and
`flows.checkpoint` write by `save_tensors` instead. `pairwise` and `ranking.index` use the checksum
for JSON files of their own. `load_torch_file` reads files of `torch.save` without running code, for
`extractors.checkpoint`. `write_arrays` writes npz files: tables of class distances
(`labels.table`), which `read_arrays` reads, samples (`data.writing`) and trajectories
(`report.flow`).

A saved result is result.json to read, and result.safetensors with everything. `result`,
`flows.result` and `solver.matrix.result` write and read both by `write_result` and `read_result`.
`pairwise` writes its own SUMMARY_FILE, with a table beside it. `commands.adapt`, `commands.compare`
and `commands.shift` name SUMMARY_FILE to `commands.results`, which removes an old result with
`remove_result` before it writes the new one. `read_result` reads result.safetensors alone, which
holds the summary too. So a write that was interrupted between both files never mixes two results,
although result.json is then older. Both file names and the layout are formats on disk: files of
earlier versions must stay readable (`tests/files/test_files_of_today.py`).

Files of tensors, tables of class distances, results, checkpoints and written features carry the
version and a format number (STAMP). `check_format` refuses a number above FORMAT, here and in
`flows.checkpoint`, `pairwise` and `extractors.feature_store`; `ranking.index` calls it with the
format number of an index. `study.study` only names the version in errors (`other_version`). FORMAT
must rise with a change that an earlier version would misread, so that a later file is refused
instead. Renamed keys and classes, which a reader can translate, do not need it. Caches have numbers
of their own, in the names of their files.

A change must also keep that files appear whole or not at all (`files.atomic`), but for
`save_tensors`, whose callers put a finished file in place or name it afterwards. `content_hash` is
part of cache keys (`extractors.module_features`, `extractors.network`, `labels.pairs`), of the
settings in checkpoints (`flows.objective`, `flows.flow`, `labels.metrics.tree`) and of digests in
an index (`ranking.index`). So its value for given tensors may not change: cached numbers would be
lost, and checkpoints refused.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, uint8

from otdd_flash import __version__
from otdd_flash.errors import InputError
from otdd_flash.files.atomic import replacing, write_json

FORMAT = 1

VERSION_KEY, FORMAT_KEY = "otdd_flash", "format"
# Written beside the content of tensor files, class distances and notes on written features.
STAMP = {VERSION_KEY: __version__, FORMAT_KEY: str(FORMAT)}


class LaterFormatError(InputError):
    """A file has a format of a later version, unknown to this one."""


def check_format(what: object, written: Mapping[str, Any], latest: int = FORMAT) -> None:
    """Refuse a file of a later format.

    Args:
        what: the file, for the message.
        written: its STAMP fields; files of earlier versions have none.
        latest: the latest format of such files that this version reads.

    Raises:
        LaterFormatError: the format is later.
    """
    given = str(written.get(FORMAT_KEY, latest))
    if not given.isdecimal() or int(given) > latest:
        raise LaterFormatError(
            f"{what} has format {given}, which otdd_flash {written.get(VERSION_KEY)} wrote and "
            f"otdd_flash {__version__} does not know (it reads up to format {latest}); read it "
            "with that version or a later one"
        )


def other_version(written: Mapping[str, Any]) -> str:
    """Return an error's ending that names the version that wrote a file; "" if this one did."""
    version = written.get(VERSION_KEY)
    if version == __version__:
        return ""
    named = "an earlier version" if version is None else f"otdd_flash {version}"
    return f"; {named} wrote it, and this is otdd_flash {__version__}"


CHECKSUM = "checksum"


class DamagedFileError(Exception):
    """The content of a file is not what was written."""


class Stored(NamedTuple):
    """The content of a tensor file.

    Attributes:
        tensors: tensors by name, on the CPU.
        texts: texts by name, with the version and the format, without the checksum.
        checksum: the checksum that was written, which matches.
    """

    tensors: dict[str, Tensor]
    texts: dict[str, str]
    checksum: str


def write_tensors(
    path: str | Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]
) -> None:
    """Write tensors and texts by name, whole or not at all.

    Raises:
        InputError: the file cannot be written.
    """
    with replacing(path) as partial:
        save_tensors(partial, tensors, texts)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    """Write tensors and texts into a new file, in place; return their checksum.

    Raises:
        OSError: the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # Cloned: safetensors refuses two names for one storage, such as f and g of a self term.
    content = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    texts = {**texts, **STAMP}
    header = {**texts, CHECKSUM: checksum(content, texts)}
    try:
        save_file(content, path, metadata=header)
    except SafetensorError as error:
        # A full disk raises this error.
        raise OSError(str(error)) from error
    return header[CHECKSUM]


def read_tensors(path: Path) -> Stored:
    """Read a file that `write_tensors` wrote.

    Raises:
        OSError: there is no such file, it cannot be read, or another program wrote it.
        DamagedFileError: it is no such file, or its content does not match its checksum.
        LaterFormatError: a later version wrote it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    # Read through one open file: safetensors' own reader opens the path again for the values, and
    # another writer may have renamed a new file there in between.
    content = path.read_bytes()
    try:
        tensors: dict[str, Tensor] = load(content)
        texts = _texts(content)
        written = texts.pop(CHECKSUM, "")
    except (SafetensorError, ValueError, LookupError, TypeError, RuntimeError) as error:
        raise DamagedFileError(str(error)) from error
    if not written:
        raise OSError("another program wrote it: it has no checksum")
    if written != checksum(tensors, texts):
        raise DamagedFileError("its checksum does not match")
    check_format(path, texts)
    return Stored(tensors, texts, written)


def content_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, types, shapes and values, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}{tuple(tensor.shape)}\0".encode())
        if tensor.numel() > 0:
            # Through bytes: NumPy has no bfloat16. Empty arrays of NumPy may have strides of 0.
            digest.update(tensor.reshape(-1).view(uint8).numpy().data)
    return digest.hexdigest()


def checksum(tensors: Mapping[str, Tensor], texts: Mapping[str, str]) -> str:
    """Return the SHA-256 of tensors and texts."""
    content = json.dumps([content_hash(tensors), sorted(texts.items())])
    return hashlib.sha256(content.encode()).hexdigest()


def _texts(content: bytes) -> dict[str, str]:
    """Return the texts of a valid safetensors file: a length, then that many bytes of JSON."""
    length = int.from_bytes(content[:8], "little")
    texts: dict[str, str] = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    return texts


def load_torch_file(path: Path) -> Any:
    """Load a file of `torch.save` on the CPU, as far as torch restores it without running code.

    Such files are zip archives with a CRC-32 of every part. torch writes these and does not check
    them, so they are checked here by Python's zip reader.

    Raises:
        OSError: there is no such file, or it cannot be read.
        DamagedFileError: a part does not match its checksum.
        Exception: the file holds something else; of any kind, from torch or pickle. Its message may
            advise running the code that a file holds, so it is not for users.
    """
    # Through one open file: another writer may rename a new one to its place meanwhile.
    with path.open("rb") as file:
        _check_parts(file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def _check_parts(file: BinaryIO) -> None:
    """Compare all parts with their checksums, if there are any.

    Files before torch 1.6 are no archives, and torch can be told to leave checksums out.
    """
    if not zipfile.is_zipfile(file):
        return
    try:
        with zipfile.ZipFile(file) as archive:
            if not any(part.CRC for part in archive.infolist()):
                return
            damaged = archive.testzip()
    except OSError:
        raise
    except Exception as error:
        # A flipped bit in a header raises many kinds of errors.
        raise DamagedFileError(str(error)) from error
    if damaged is not None:
        raise DamagedFileError(f"the checksum of its part {damaged} does not match")


def write_arrays(path: str | Path, arrays: Mapping[str, Any]) -> None:
    """Write named arrays as npz, whole or not at all; tensors, numbers and texts become NumPy's.

    Raises:
        InputError: the file cannot be written.
    """
    # Through a handle, because NumPy appends .npz to a path of any other ending.
    with replacing(path) as partial, partial.open("wb") as file:
        content: dict[str, Any] = {key: np.asarray(value) for key, value in arrays.items()}
        np.savez(file, **content)


def read_arrays(path: str | Path, needed: Sequence[str], writer: str) -> dict[str, Any]:
    """Read all arrays of an npz file of class distances, by name.

    Args:
        path: the file.
        needed: names that must be present.
        writer: the function that writes such files, for messages.

    Raises:
        InputError: the file is missing or unreadable, lacks an array, or a later version wrote it.
    """
    expected = f"class distances are an npz with arrays {_enumerated(needed)}, as {writer} writes"
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InputError(f"{path} holds a single array; {expected}")
        with archive:
            arrays = {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise InputError(f"no class distances at {path}: there is no such file") from None
    except InputError:
        raise
    except Exception as error:
        # NumPy and its zip reader raise anything on damaged bytes.
        raise InputError(f"cannot read class distances from {path} ({error}); {expected}") from None
    if VERSION_KEY in arrays:
        # Without the key another program wrote the file, which may use any names.
        check_format(path, {key: arrays[key] for key in STAMP if key in arrays})
    missing = [key for key in needed if key not in arrays]
    if missing:
        raise InputError(
            f"{path} has no array {', '.join(missing)} (it holds: "
            f"{', '.join(arrays) or 'nothing'}); {expected}"
        )
    return arrays


def _enumerated(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


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
