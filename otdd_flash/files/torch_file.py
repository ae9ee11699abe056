"""Files of `torch.save`, read without running code and only if they are whole.

They are zip archives with a CRC-32 of every part, which torch writes and does not check: weights
and states with a flipped bit load without a word. Python's zip reader checks them.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from otdd_flash.files.tensor_file import DamagedFileError


def load_torch_file(path: Path) -> Any:
    """The content of a file, on the CPU, as far as torch restores it without running code.

    Raises:
        OSError: there is no such file, or it cannot be read.
        DamagedFileError: a part does not match its checksum.
        Exception: the file holds something else; of any kind, as torch and pickle raise it. Its
            message may advise to run the code that a file holds, so it is not for users.
    """
    # One open file: another writer may rename a new one to its place meanwhile.
    with path.open("rb") as file:
        _check_parts(file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=True)


def _check_parts(file: BinaryIO) -> None:
    """Hold all parts against their checksums, where there are any.

    Files before torch 1.6 were no archives, and torch can be told to leave checksums out.
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
        # A flipped bit of a header arrives in many forms.
        raise DamagedFileError(str(error)) from error
    if damaged is not None:
        raise DamagedFileError(f"the checksum of its part {damaged} does not match")
