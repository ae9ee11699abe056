"""The version and format number that every saved file carries, and their check on reading.

`files.tensor_file`, `flows.checkpoint`, `pairwise_result`, `extractors.feature_store`,
`labels.table` and `labels.many` write STAMP or FORMAT, and the first four call `check_format`.
`files.result_files`, `files.cache`, `flows.maps.residual` and `study.study` use the messages and
errors. FORMAT must rise with a change that an earlier version would misread. Renamed keys and
classes, which a reader can translate, do not need it. Caches have numbers of their own, in the
names of their files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otdd_flash.errors import InputError
from otdd_flash.version import __version__

FORMAT = 1

VERSION_KEY, FORMAT_KEY = "otdd_flash", "format"
# Written into every file, beside its content.
STAMP = {VERSION_KEY: __version__, FORMAT_KEY: str(FORMAT)}


class LaterFormatError(InputError):
    """A file has a format of a later version, unknown to this one."""


def check_format(what: object, written: Mapping[str, Any]) -> None:
    """Refuse a file of a later format.

    Args:
        what: the file, for the message.
        written: its STAMP fields; files of earlier versions have none.

    Raises:
        LaterFormatError: the format is later than `FORMAT`.
    """
    given = str(written.get(FORMAT_KEY, FORMAT))
    if not given.isdecimal() or int(given) > FORMAT:
        raise LaterFormatError(
            f"{what} has format {given}, which otdd_flash {written.get(VERSION_KEY)} wrote and "
            f"otdd_flash {__version__} does not know (it reads up to format {FORMAT}); read it "
            "with that version or a later one"
        )


def other_version(written: Mapping[str, Any]) -> str:
    """Return an error's ending that names the version that wrote a file; "" if this one did."""
    version = written.get(VERSION_KEY)
    if version == __version__:
        return ""
    named = "an earlier version" if version is None else f"otdd_flash {version}"
    return f"; {named} wrote it, and this is otdd_flash {__version__}"
