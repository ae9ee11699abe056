"""Checkpoints of a flow, from which a later run continues.

A checkpoint is a manifest, `checkpoint.json`, and the files in `checkpoint/` that it names with
their checksums: one per rank, with the rows of the particles that the rank owns. The file of rank 0
also holds the state that belongs to no row. The manifest is replaced last, when all files are on
the disk, so a process killed at any moment leaves the previous checkpoint usable. The last two
checkpoints are kept.

The state is stored as tensors by name and an outline in JSON (`taken_apart`, `put_together`).
Reading runs no code: of classes, only those of `TYPES` are made. The names in `TYPES`, their
fields, the fields of `Shard`, the keys of a manifest and of the state, and the names of tensors are
a file format; a change breaks earlier checkpoints, which `tests/files/test_files_of_today.py`
reads. Files must be named as `NAMES` says, because older ones are found and removed by it.

`Flow` (`flows.flow`) has `Checkpoints` among its options; users and `commands.adapt` make them.
`flows.run` loads and saves a checkpoint, and `flows.stepping` writes the rows of each rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from otdd_flash import __version__
from otdd_flash.arguments import check_fields
from otdd_flash.errors import DataNotice, InputError, warn
from otdd_flash.files.atomic import cannot_write, lock, reach_disk, unlock
from otdd_flash.files.tensor_file import (
    FORMAT,
    FORMAT_KEY,
    DamagedFileError,
    check_format,
    other_version,
    read_tensors,
    save_tensors,
)
from otdd_flash.fingerprint import VERSION
from otdd_flash.flows.result import Moment, StepRecord
from otdd_flash.labels import ClassDistances
from otdd_flash.solver.term import TransportTerm, default_hint

# The classes that a state may hold. Files contain these names, which must not change when a class
# is renamed, and the names of the fields.
TYPES: dict[str, Any] = {
    "ClassDistances": ClassDistances,
    "Moment": Moment,
    "StepRecord": StepRecord,
    "TransportTerm": TransportTerm,
}

MANIFEST, FOLDER, LOCK_FILE = "checkpoint.json", "checkpoint", ".lock"

# A manifest before it replaces the last one. It is beside it, as FOLDER may be on another disk.
NEXT = "checkpoint.json.partial"

# Parameters of a choice. A missing one means that the choice itself changed, which has its own key.
PARAMETERS = ("labels.", "solver.")

START_AGAIN = "leave flow.resume out to start again"


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in the form in which JSON returns them."""
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=repr))
    return plain


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


# The tensor that holds the JSON: texts of a safetensors file are bounded in length.
OUTLINE = "outline.json"


def taken_apart(nest: Any) -> dict[str, Tensor]:
    """Return the tensors of a nested state by place, and its outline as a tensor of JSON bytes.

    A state consists of containers, numbers, texts, tensors and the classes of `TYPES`.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def outline(part: Any, place: str) -> Any:
        match part:
            case None | bool() | int() | float() | str():
                return part
            case Tensor():
                # Two places may share a tensor, such as the potentials of a self term.
                name = names.setdefault(id(part), place)
                tensors[name] = part
                return {"tensor": name, "on_cpu": part.device.type == "cpu"}
            case Mapping():
                found = [[key, outline(each, f"{place}.{key}")] for key, each in part.items()]
                return {"dict": found}
        for name, kind in TYPES.items():
            if type(part) is kind:
                held = _fields(part)
                return {name: {key: outline(each, f"{place}.{key}") for key, each in held.items()}}
        found = [outline(each, f"{place}.{row}") for row, each in enumerate(part)]
        return {"tuple" if isinstance(part, tuple) else "list": found}

    text = json.dumps(outline(nest, "state")).encode()
    return {**tensors, OUTLINE: torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def put_together(tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """Return the state that was taken apart.

    Tensors are put on `device`, or on the CPU if they were there.

    Raises:
        LookupError, TypeError, ValueError: the tensors are not parts of a state.
    """

    def nest(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        if "tensor" in part:
            tensor = tensors[part["tensor"]]
            return tensor if part["on_cpu"] else tensor.to(device)
        ((kind, held),) = part.items()
        match kind:
            case "dict":
                return {key: nest(each) for key, each in held}
            case "tuple":
                return tuple(map(nest, held))
            case "list":
                return [*map(nest, held)]
        return TYPES[kind](**{key: nest(each) for key, each in held.items()})

    return nest(json.loads(tensors[OUTLINE].numpy().tobytes()))


def _fields(part: Any) -> dict[str, Any]:
    if is_dataclass(part):
        return {field.name: getattr(part, field.name) for field in fields(part)}
    return dict(part._asdict())


# The form of file names: step-STEP.WRITE.rank-RANK.rows-FIRST-LAST.safetensors.
NAMES = "step-*.*.rows-*-*.safetensors"

# The first part of the names of tensors that hold rows.
ROWS = "rows"

# The key of a variable's values, beside the keys of the optimiser's state.
VALUE = "value"

# Tensors by VARIABLE.KEY.
Parts = Mapping[str, Tensor]


class Shard(NamedTuple):
    """The entry of one file in a manifest.

    Attributes:
        file: its name.
        rows: for each variable, [first, last + 1] of the rows that it holds.
        bytes: its size.
        checksum: SHA-256 of its tensors.
    """

    file: str
    rows: dict[str, list[int]]
    bytes: int
    checksum: str


# write(folder, stem, tensors): writes these tensors and all rows, and returns the shards.
Write = Callable[[Path, str, Mapping[str, Tensor]], list[Shard]]


def write_shard(
    folder: Path,
    name: str,
    tensors: Mapping[str, Tensor],
    rows: Mapping[str, slice],
    parts: Parts,
) -> Shard:
    """Write some tensors and the rows that a process owns, and flush them to the disk.

    Args:
        folder: the folder, created by rank 0.
        name: the beginning of the file's name.
        tensors: tensors that belong to no row, by name.
        rows: for each variable, the rows that this process owns.
        parts: what is stored for them, (rows, ...), by VARIABLE.KEY.

    Raises:
        InputError: the file cannot be written, or this process does not see the folder.
    """
    if not folder.is_dir():
        raise InputError(
            f"{folder}, which rank 0 has made, is not there; give a hydra.run.dir that all "
            "machines share"
        )
    owned = {variable: [part.start, part.stop] for variable, part in rows.items()}
    first, last = owned.get("points", (0, 0))
    path = folder / f"{name}.rows-{first}-{last}.safetensors"
    of_rows = {f"{ROWS}.{name}": tensor for name, tensor in parts.items()}
    try:
        checksum = save_tensors(path, {**tensors, **of_rows}, {})
        reach_disk(path)
        return Shard(path.name, owned, path.stat().st_size, checksum)
    except OSError as error:
        raise cannot_write(path, error) from error


@dataclass(frozen=True)
class Checkpoints:
    """The folder of a flow's checkpoints, and how often they are written.

    Args:
        folder: gets a manifest, `checkpoint.json`, and a folder `checkpoint` with its files.
            The last two checkpoints are kept there.
        every: steps between two writes; the end of a flow is always written.
        resume: continue from the last checkpoint instead of starting anew.

    Raises:
        InputError: `every` is not positive.
    """

    folder: Path
    every: int = 10
    resume: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "folder", Path(self.folder))
        if self.every < 1:
            raise InputError(f"flow.checkpoint_every must be positive, got {self.every}")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder: each flow removes the files that its own manifest does not name.

        A checkpoint must be loaded under the lock, or another flow could replace it meanwhile.

        Raises:
            InputError: another flow writes here, the folder cannot be written, or there is no
                checkpoint to resume from.
        """
        place, path = self.folder / FOLDER / LOCK_FILE, self.folder / MANIFEST
        # Checked first, so that no folder is made where there is nothing to resume from.
        if self.resume and not path.exists():
            raise InputError(
                f"flow.resume=true, but there is no {path}; give the folder of the run to go on "
                "with as hydra.run.dir=FOLDER, or leave flow.resume out"
            )
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            descriptor = lock(place)
        except OSError as error:
            raise cannot_write(path, error) from error
        if descriptor is None:
            raise InputError(
                f"another flow that has not ended keeps its checkpoints in {self.folder}; give "
                "each a folder of its own, or wait"
            )
        try:
            yield
        finally:
            unlock(place, descriptor)

    def save(
        self,
        state: Mapping[str, Any],
        settings: Mapping[str, Any],
        may_change: Sequence[str],
        write: Write,
    ) -> None:
        """Write a state, the settings that it belongs to, and which of them may change.

        Args:
            state: the part of the state that belongs to no single row, with `step`.
            settings: by key.
            may_change: keys of settings that a resumed run may change.
            write: called to write the files of all rows.

        Raises:
            InputError: a file cannot be written; the previous checkpoint then remains.
        """
        folder, before = self.folder / FOLDER, self._manifest()
        stem = f"step-{state['step']}.{uuid.uuid4().hex[:8]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shards = write(folder, stem, taken_apart(state))
            for shard in shards:
                path = folder / shard.file
                if not path.exists() or path.stat().st_size != shard.bytes:
                    raise InputError(
                        f"{path}, which another process wrote, is not seen by rank 0; give a "
                        "hydra.run.dir that all machines share"
                    )
            reach_disk(folder)
            manifest = {
                "versions": {"otdd_flash": __version__, "torch": torch.__version__},
                "fingerprints": VERSION,
                FORMAT_KEY: FORMAT,
                "step": state["step"],
                "settings": _plain(settings),
                "may_change": [*may_change],
                "shards": [shard._asdict() for shard in shards],
            }
            self._put_in_place({**manifest, "before": before and {**before, "before": None}})
        except OSError as error:
            raise cannot_write(self.folder / MANIFEST, error) from error
        finally:
            self._sweep()

    def load(self, settings: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Read the last state, with tensors on `device`, or on the CPU if they were there.

        `rows` holds what was stored for the rows of each variable, on the CPU. If a file of the
        last checkpoint is damaged, the state is that of the previous checkpoint.

        Raises:
            InputError: the checkpoint cannot be read, or it belongs to other settings; the message
                names the first key that changed.

        Warns:
            DataNotice: the previous checkpoint is used.
        """
        path = self.folder / MANIFEST
        manifest = self._manifest()
        if manifest is None:
            raise InputError(f"{path} is damaged, or no checkpoint of a flow; {START_AGAIN}")
        self._check_settings(manifest, settings)
        try:
            return self._state(manifest, device)
        except DamagedFileError as error:
            if (before := manifest["before"]) is None:
                raise InputError(f"{error}; {START_AGAIN}") from error
            try:
                self._check_settings(before, settings)
                state = self._state(before, device)
            except (DamagedFileError, InputError):
                raise InputError(
                    f"{error}, and the checkpoint before it does not help; {START_AGAIN}"
                ) from error
            step = before["step"]
            warn(f"{error}; going on from the checkpoint before it, of step {step}", DataNotice)
            return state

    def _state(self, manifest: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        try:
            shards = [Shard(**shard) for shard in manifest["shards"]]
            tensors, rows = read_shards(self.folder / FOLDER, shards)
            return {**put_together(tensors, device), "rows": rows}
        except (LookupError, TypeError, ValueError) as error:
            version = manifest["versions"]["otdd_flash"]
            ours = "" if version == __version__ else f" than those of otdd_flash {__version__}"
            raise DamagedFileError(
                f"{self.folder / MANIFEST} is of otdd_flash {version}, whose states are "
                f"others{ours}"
            ) from error

    def _check_settings(self, manifest: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        path, versions = self.folder / MANIFEST, manifest.get("versions", {})
        check_format(path, {**versions, FORMAT_KEY: manifest.get(FORMAT_KEY, FORMAT)})
        if manifest.get("fingerprints") != VERSION:
            raise InputError(
                f"{path} is of another version of otdd_flash, whose fingerprints of datasets "
                f"cannot be compared with today's{other_version(versions)}; {START_AGAIN}"
            )
        now_all, then_all, free = _plain(settings), manifest["settings"], manifest["may_change"]
        chosen = [key for key in then_all if not key.startswith(PARAMETERS)]
        for key in [*now_all, *chosen]:
            now, then = now_all.get(key), then_all.get(key)
            if now != then and key not in free:
                raise InputError(
                    f"flow.resume=true, but {key} was {then} in the run of "
                    f"{path} and is {now} now; set {key} as it was, or start "
                    f"again without flow.resume{default_hint(then) if key == 'epsilon' else ''}"
                )

    def _manifest(self) -> dict[str, Any] | None:
        """Return the current manifest; None if there is none or it is damaged."""
        try:
            content: Any = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
            checksum = content.pop("checksum")
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            return None
        return content if checksum == _checksum(content) else None

    def _sweep(self) -> None:
        """Remove files that the manifest does not name: older checkpoints and failed writes."""
        manifest = self._manifest()
        if manifest is None and (self.folder / MANIFEST).exists():
            return
        kept = [each for each in (manifest, manifest and manifest["before"]) if each]
        named = {shard["file"] for each in kept for shard in each["shards"]}
        for path in (self.folder / NEXT, *(self.folder / FOLDER).glob(NAMES)):
            if path.name not in named:
                # Someone else's folder may have such a name.
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def _put_in_place(self, manifest: dict[str, Any]) -> None:
        content = {**manifest, "checksum": _checksum(manifest)}
        coming = self.folder / NEXT
        coming.unlink(missing_ok=True)
        # Mode "x": a new file, never the target of a link.
        with coming.open("x", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2) + "\n")
        reach_disk(coming)
        os.replace(coming, self.folder / MANIFEST)
        reach_disk(self.folder)


def read_shards(folder: Path, shards: Sequence[Shard]) -> tuple[dict[str, Tensor], Parts]:
    """Return the tensors that belong to no row, and the rows of each variable, concatenated.

    Raises:
        DamagedFileError: a file differs from what was written; the message names it.
        LookupError, ValueError: the files are not those of one checkpoint.
    """
    tensors: dict[str, Tensor] = {}
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for shard in shards:
        path = folder / shard.file
        if path.parent != folder:
            raise ValueError(f"{shard.file} is of another folder")
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
        for name, tensor in stored.tensors.items():
            kind, _, part = name.partition(".")
            if kind == ROWS:
                rows = shard.rows[part.split(".")[0]]
                parts.setdefault(part, []).append((rows, tensor))
            else:
                tensors[name] = tensor
    return tensors, {part: _joined(found) for part, found in parts.items()}


def _joined(found: list[tuple[list[int], Tensor]]) -> Tensor:
    """Concatenate parts in the order of their rows; each row must be in exactly one part."""
    found = sorted(found, key=lambda each: each[0])
    end = 0
    for (first, last), part in found:
        if first != end or last != first + len(part):
            raise ValueError(f"rows {first} to {last} do not follow {end}")
        end = last
    return torch.cat([part for _, part in found])
