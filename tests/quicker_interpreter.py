"""Triton's interpreter without what it looks for again at every call."""

from __future__ import annotations

import inspect
import os
from functools import cache
from typing import Any


def quicken_interpreter() -> None:
    """Replace its language once a launch, and look for what to replace once a process.

    It lists and replaces all members again at every call of a device function, more than half of
    the time of tests of kernels; they are the same, and stay replaced until the launch has ended.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        _replace()


@cache
def _replace() -> None:
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    known: dict[int, list[str]] = {}

    def patch(package: Any, *scope: Any) -> None:
        if id(package) not in known:
            members = inspect.getmembers(package)
            known[id(package)] = [name for name, member in members if is_builtin(member)]
        for name in known[id(package)]:
            if is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, *scope)

    interpreter._patch_builtin = patch

    replaced: set[int] = set()
    used_by: dict[int, set[int]] = {}
    whole = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in used_by:
            languages = {id(interpreter.tl), id(interpreter.tl.core)}
            used_by[id(function.__globals__)] = languages & set(
                map(id, function.__globals__.values())
            )
        used = used_by[id(function.__globals__)]
        if replaced and used <= replaced:
            return interpreter._LangPatchScope()
        outermost, scope = not replaced, whole(function)
        replaced.update(used)
        if outermost:
            restore = scope.restore

            def restore_all() -> None:
                replaced.clear()
                restore()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_once
