"""What a kernel takes of a card that is not here: shared memory, and bytes spilled to a stack."""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

# Bytes that ptxas, as Triton 3.8 brings it, keeps in memory over calls in kernels of 56 and of 128
# registers, which may have 255.
KEPT_OVER_CALLS = 16
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


def resources(source: ASTSource, capability: int, **options: Any) -> dict[str, int]:
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        stack = re.search(r"STACK:(\d+)", dumped(file.name, "--dump-resource-usage"))
        assert stack is not None
        taken = int(stack[1])
        # Some assemblers keep a number or two in memory while a division of float64 is called.
        if 0 < taken <= KEPT_OVER_CALLS and re.search(r"\bCALL\b", dumped(file.name, "-sass")):
            taken = 0
    return {"shared": compiled.metadata.shared, "stack": taken}


def dumped(cubin: str, what: str) -> str:
    command = [CUOBJDUMP, what, cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def needs(
    kernel: Any,
    type_of: Callable[[str], str],
    constants: dict[str, Any],
    capability: int,
    *,
    multiples: Container[str] = (),
    source: type = ASTSource,
    **options: Any,
) -> dict[str, int]:
    """Of a kernel whose arguments are constants or of stated types; some multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name) for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or (signature[name] == "i32" and name in multiples)
    }
    more = (aligned,) if source is ASTSource else ()
    return resources(source(kernel, signature, values, *more), capability, **options)


class Recorded:
    """A kernel that, launched, is compiled for sm_90 with what it was given, or does nothing."""

    def __init__(self, kernel: Any = None) -> None:
        self.kernel = kernel
        self.taken: dict[str, int] = {}

    def __getitem__(self, grid: object) -> Any:
        return self.compiled if self.kernel is not None else lambda *given, **constants: None

    def compiled(
        self, *given: Any, num_warps: int = 4, maxnreg: int | None = None, **constants: Any
    ) -> None:
        values = {**dict(zip(self.kernel.arg_names, given, strict=False)), **constants}
        fixed = dict(constants)
        # A number 1 is a constant, too.
        plain = {
            k: v for k, v in values.items() if not isinstance(v, torch.Tensor) and k not in fixed
        }
        fixed |= {name: value for name, value in plain.items() if value == 1}

        def type_of(name: str) -> str:
            value = values[name]
            if isinstance(value, torch.Tensor):
                return TYPES[value.dtype]
            return "fp32" if isinstance(value, float) else "i32"

        multiples = {name for name, value in plain.items() if value % 16 == 0}
        options = {"num_warps": num_warps, "maxnreg": maxnreg}
        self.taken = needs(self.kernel, type_of, fixed, 90, multiples=multiples, **options)


def taken(module: Any, kernel: str, run: Callable[[], object], *others: Any) -> dict[str, int]:
    """What a kernel of a module needs that `run` launches; other kernels of theirs do nothing."""
    recorded = Recorded(inspect.getattr_static(module, kernel))
    with mock.patch.object(module, kernel, recorded):
        for other, name in others:
            mock.patch.object(other, name, Recorded()).start()
        run()
    mock.patch.stopall()
    return recorded.taken
