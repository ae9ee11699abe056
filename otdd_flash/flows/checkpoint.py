"""Checkpoints of a flow, whole or not at all, that a later run goes on from.

A checkpoint is a manifest, `checkpoint.json`, and the files in `checkpoint/` that it names, with
their checksums: one a rank, with the rows that the rank owns. The manifest takes its place when all
of them are on the disk, so that a process killed at any moment leaves the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from otdd_flash.arguments.flows import CHECKPOINTS
from otdd_flash.checks import check_fields
from otdd_flash.errors import DataNotice, InputError
from otdd_flash.files.atomic import cannot_write, reach_disk
from otdd_flash.files.locks import lock, unlock
from otdd_flash.files.tensor_file import DamagedFileError
from otdd_flash.files.written_by import FORMAT, FORMAT_KEY, check_format, other_version
from otdd_flash.fingerprint import VERSION
from otdd_flash.flows.nest import put_together, taken_apart
from otdd_flash.flows.shard import NAMES, Shard, Write, read_shards, write_alone
from otdd_flash.solver.term.epsilon import once_default
from otdd_flash.version import __version__

MANIFEST, FOLDER, LOCK_FILE = "checkpoint.json", "checkpoint", ".lock"
# What earlier versions wrote.
EARLIER = "checkpoint.pt"
# Of a manifest, before it takes its place: beside it, as the folder may be on another disk.
NEXT = "checkpoint.json.partial"

# Parameters of a choice, which only another choice lacks: that has a key of its own.
PARAMETERS = ("labels.", "solver.")

START_AGAIN = "leave flow.resume out to start again"


@dataclass(frozen=True)
class Checkpoints:
    """The folder of a flow's checkpoints, and how often they are written.

    Args:
        folder: gets a manifest, `checkpoint.json`, and a folder `checkpoint` of what that names.
            The last two checkpoints are kept there.
        every: steps between two writes; the end of a flow is always written.
        resume: go on from the last one instead of starting.

    Raises:
        InputError: `every` is not positive.
    """

    folder: Path
    every: int = 10
    resume: bool = False

    def __post_init__(self) -> None:
        check_fields(self, CHECKPOINTS)
        object.__setattr__(self, "folder", Path(self.folder))
        if self.every < 1:
            raise InputError(f"flow.checkpoint_every must be positive, got {self.every}")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder, as each flow removes what its own manifest does not name.

        Raises:
            InputError: another flow writes here, or nothing can be written.
        """
        place = self.folder / FOLDER / LOCK_FILE
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            descriptor = lock(place)
        except OSError as error:
            raise cannot_write(self.folder / MANIFEST, error) from error
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
        may_change: Sequence[str] = (),
        write: Write = write_alone,
    ) -> None:
        """Write a state, the settings that it belongs to, and which of them may change.

        Args:
            state: what is of no row, and `step`.
            settings: by key.
            may_change: keys.
            write: writes the rows.

        Raises:
            InputError: a file cannot be written; the last checkpoint is still there then.
        """
        folder, before = self.folder / FOLDER, self._manifest()
        stem = f"step-{state['step']}.{uuid.uuid4().hex[:8]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shards = write(folder, stem, taken_apart(state))
            for shard in shards:
                _check_seen(folder, shard)
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
        """Read the last state, tensors on `device`, or on the CPU if they were there.

        `rows` are what was kept of the rows of every variable, on the CPU. Where a file of the last
        checkpoint came to harm, it is the state of the one before.

        Raises:
            InputError: there is no checkpoint, it cannot be read, or it belongs to other settings:
                the message names the first key that changed.

        Warns:
            DataNotice: it is the one before.
        """
        path = self.folder / MANIFEST
        if not path.exists():
            if (earlier := self.folder / EARLIER).exists():
                raise InputError(
                    f"flow.resume=true, but {earlier} is of an earlier version of otdd_flash and "
                    f"can only be gone on from by that, not by {__version__}; {START_AGAIN}"
                )
            raise InputError(
                f"flow.resume=true, but there is no {path}; give the folder of the run to go on "
                "with as hydra.run.dir=FOLDER, or leave flow.resume out"
            )
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
            warnings.warn(
                f"{error}; going on from the checkpoint before it, of step {before['step']}",
                DataNotice,
                stacklevel=2,
            )
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
                    f"again without flow.resume{once_default(then) if key == 'epsilon' else ''}"
                )

    def _manifest(self) -> dict[str, Any] | None:
        """The manifest that is in its place; None without one that is whole."""
        try:
            content: Any = json.loads((self.folder / MANIFEST).read_text(encoding="utf-8"))
            checksum = content.pop("checksum")
        except (OSError, ValueError, LookupError, AttributeError, TypeError):
            return None
        return content if checksum == _checksum(content) else None

    def _sweep(self) -> None:
        """Remove what the manifest does not name: earlier checkpoints, and writes that failed."""
        manifest = self._manifest()
        if manifest is None and (self.folder / MANIFEST).exists():
            return
        named = {
            shard["file"]
            for each in (manifest, (manifest or {}).get("before"))
            for shard in (each["shards"] if each else ())
        }
        for path in (self.folder / NEXT, *(self.folder / FOLDER).glob(NAMES)):
            if path.name not in named:
                # Another's folder may have such a name.
                with suppress(OSError):
                    path.unlink(missing_ok=True)

    def _put_in_place(self, manifest: dict[str, Any]) -> None:
        content = {**manifest, "checksum": _checksum(manifest)}
        coming = self.folder / NEXT
        coming.unlink(missing_ok=True)
        # A new file, and none that a link leads to.
        with coming.open("x", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2) + "\n")
        reach_disk(coming)
        os.replace(coming, self.folder / MANIFEST)
        reach_disk(self.folder)


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON gives them back."""
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=repr))
    return plain


def _checksum(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _check_seen(folder: Path, shard: Shard) -> None:
    """Refuse a folder that is another one for every rank."""
    path = folder / shard.file
    if not path.exists() or path.stat().st_size != shard.bytes:
        raise InputError(
            f"{path}, which another process wrote, is not seen by rank 0; give a hydra.run.dir "
            "that all machines share"
        )
