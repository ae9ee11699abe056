"""Files of a checkpoint, one a rank, with the rows of the particles that the rank owns.

The name says which rows of all particles they are. The file of rank 0 holds beside them what is of
no row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from otdd_flash.errors import InputError
from otdd_flash.files.atomic import cannot_write, reach_disk
from otdd_flash.files.tensor_file import DamagedFileError, read_tensors, save_tensors

# What the names of files are like, step-STEP.WRITE.rank-RANK.rows-FIRST-LAST.safetensors.
NAMES = "step-*.*.rows-*-*.safetensors"
# The first part of the names of tensors that hold rows.
ROWS = "rows"
# What is kept of the rows of a variable beside their momenta and the like: where they are.
VALUE = "value"

# Tensors by variable, then by what of it.
Parts = Mapping[str, Mapping[str, Tensor]]


class Shard(NamedTuple):
    """What a manifest says of one file.

    Attributes:
        file: its name.
        rows: of every variable, [first, last + 1] of the rows that it holds.
        bytes: its size.
        checksum: SHA-256 of its tensors.
    """

    file: str
    rows: dict[str, list[int]]
    bytes: int
    checksum: str


# write(folder, stem, tensors): shards of all rows, these tensors beside them.
Write = Callable[[Path, str, Mapping[str, Tensor]], list[Shard]]


def write_shard(
    folder: Path,
    name: str,
    tensors: Mapping[str, Tensor],
    rows: Mapping[str, slice] | None = None,
    parts: Parts | None = None,
) -> Shard:
    """Write some tensors and the rows that a process owns, and make them reach the disk.

    Args:
        folder: where, made by rank 0.
        name: what the file's name begins with.
        tensors: what is of no row, by name.
        rows: of every variable, those that are owned.
        parts: what is kept of them, (rows, ...).

    Raises:
        InputError: the file cannot be written, or this process does not see the folder.
    """
    if not folder.is_dir():
        raise InputError(
            f"{folder}, which rank 0 has made, is not there; give a hydra.run.dir that all "
            "machines share"
        )
    owned = {variable: [part.start, part.stop] for variable, part in (rows or {}).items()}
    first, last = owned.get("points", (0, 0))
    path = folder / f"{name}.rows-{first}-{last}.safetensors"
    of_rows = {
        f"{ROWS}.{variable}.{key}": tensor
        for variable, held in (parts or {}).items()
        for key, tensor in held.items()
    }
    try:
        checksum = save_tensors(path, {**tensors, **of_rows}, {})
        reach_disk(path)
        return Shard(path.name, owned, path.stat().st_size, checksum)
    except OSError as error:
        raise cannot_write(path, error) from error


def write_alone(folder: Path, stem: str, tensors: Mapping[str, Tensor]) -> list[Shard]:
    """Write what is of no row, where there are no rows."""
    return [write_shard(folder, stem, tensors)]


def read_shards(folder: Path, shards: Sequence[Shard]) -> tuple[dict[str, Tensor], Parts]:
    """What is of no row, and all rows of every variable, one below the other.

    Raises:
        DamagedFileError: a file is not what was written; the message names it.
        LookupError, ValueError: these are no shards of one checkpoint.
    """
    tensors: dict[str, Tensor] = {}
    parts: dict[str, dict[str, list[tuple[list[int], Tensor]]]] = {}
    for shard in shards:
        path = folder / shard.file
        if path.parent != folder:
            raise ValueError(f"{shard.file} is of another folder")
        for name, tensor in _read(path, shard).items():
            if not name.startswith(f"{ROWS}."):
                tensors[name] = tensor
                continue
            _, variable, key = name.split(".", 2)
            found = parts.setdefault(variable, {}).setdefault(key, [])
            found.append((shard.rows[variable], tensor))
    return tensors, {
        variable: {key: _joined(found) for key, found in held.items()}
        for variable, held in parts.items()
    }


def _read(path: Path, shard: Shard) -> dict[str, Tensor]:
    try:
        stored = read_tensors(path)
    except FileNotFoundError:
        raise DamagedFileError(f"{path} is missing") from None
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read ({error.strerror or error})") from error
    except DamagedFileError as error:
        raise DamagedFileError(f"{path} is damaged") from error
    if stored.checksum != shard.checksum:
        raise DamagedFileError(f"{path} is damaged")
    return stored.tensors


def _joined(found: list[tuple[list[int], Tensor]]) -> Tensor:
    """Parts in the order of their rows, each of which is in one."""
    found = sorted(found, key=lambda each: each[0])
    end = 0
    for (first, last), part in found:
        if first != end or last != first + len(part):
            raise ValueError(f"rows {first} to {last} do not follow {end}")
        end = last
    return torch.cat([part for _, part in found])
