"""torchrun, and the processes that it starts, as forks of one that has imported what they need.

The agent is torchrun's own, with its restarts, signals and reports. Only where it would start
Python it forks, and runs there what that Python would: an import of everything takes longer than
what these tests are about.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import otdd_flash

# Seconds within which all processes are to be gone.
GONE = 60
IMPORTED = (
    "torch.distributed.run",
    "torch._dynamo",
    "datasets",
    "hydra",
    "hydra._internal.utils",
    "hydra.core.override_parser.overrides_parser",
    "pandas",
    "rich.progress",
    "safetensors.torch",
    "sklearn.datasets",
    "otdd_flash.otdd",
    "otdd_flash.commands.compare",
    "otdd_flash.commands.adapt",
    "otdd_flash.commands.ranks",
    "otdd_flash.commands.outcome",
)


class Forked:
    """What torchrun asks of a process that it has started."""

    def __init__(self, arguments: tuple[str, ...], environment: dict[str, str], note: str) -> None:
        self.returncode: int | None = None
        self.pid = _forked(lambda: _python(arguments, environment))
        Path(f"{note}.{environment['RANK']}").write_text(f"{self.pid}\n")

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float = GONE) -> int:
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.01)
        return self.returncode or 0


def _forked(work: Callable[[], int]) -> int:
    """Fork a process, of a session of its own, that ends with the code that the work returns."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        code = work()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _python(arguments: tuple[str, ...], environment: dict[str, str]) -> int:
    """`python -u -m MODULE ...` or `python -u SCRIPT ...`."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    _, _, *given = arguments
    if given[0] == "-m":
        sys.argv = given[1:]
        runpy.run_module(given[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = given
        runpy.run_path(given[0], run_name="__main__")
    return 0


def _run(asked: dict[str, Any], out: int) -> int:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(asked["cwd"])
    if asked["ranks"] == 1:
        return _python(("python", "-u", *asked["command"]), dict(os.environ))
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.SubprocessHandler._popen = lambda _, arguments, environment: Forked(
        arguments, environment, asked["out"]
    )
    run.main(["--nproc-per-node", str(asked["ranks"]), *asked["options"], *asked["command"]])
    return 0


def serve() -> None:
    """Run what is asked for, one after another, and tell its process and its exit code."""
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        out = os.open(asked["out"], os.O_WRONLY)
        child = _forked(lambda asked=asked, out=out: _run(asked, out))
        os.close(out)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


@cache
def _server() -> subprocess.Popen[str]:
    paths = (str(Path(otdd_flash.__file__).parents[1]), os.environ.get("PYTHONPATH"))
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
    }
    environment.pop("TRITON_INTERPRET", None)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    # It ends as its standard input does, with this process.
    return subprocess.Popen(
        [sys.executable, __file__], text=True, bufsize=1, env=environment, **pipes
    )


class Started:
    """A command that runs in so many ranks, and what it prints.

    Args:
        folder: for what is noted of its processes.
        command: a module behind -m, or a script, and its arguments.
        options: of torchrun.
        ranks: how many; without torchrun for 1.
        cwd: where it runs.
    """

    def __init__(
        self,
        folder: Path,
        *command: str,
        options: tuple[str, ...] = (),
        ranks: int = 2,
        cwd: Path | None = None,
    ) -> None:
        self._out = folder / f"printed-{time.monotonic_ns()}"
        os.mkfifo(self._out)
        self._printed = os.open(self._out, os.O_RDONLY | os.O_NONBLOCK)
        self._server, self.returncode = _server(), None
        asked = {
            "out": str(self._out),
            "command": command if command[0].endswith(".py") else ("-m", *command),
            "options": options,
            "ranks": ranks,
            "cwd": str(cwd or folder),
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(asked) + "\n")
        self.pid = int(self._server.stdout.readline())

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        stream = self._server.stdout
        assert stream is not None
        if self.returncode is None and select.select([stream], [], [], 0)[0]:
            self.returncode = int(stream.readline())
        return self.returncode

    def rank(self, number: int) -> int:
        """The process of a rank, once it runs."""
        note, until = Path(f"{self._out}.{number}"), time.monotonic() + GONE
        while not (note.exists() and note.read_text().endswith("\n")):
            assert time.monotonic() < until, "no such rank"
            time.sleep(0.02)
        return int(note.read_text())

    def ended(self) -> str:
        """What it printed, once all of its processes are gone."""
        said, until = b"", time.monotonic() + GONE
        try:
            while time.monotonic() < until:
                if select.select([self._printed], [], [], 1)[0]:
                    more = os.read(self._printed, 1 << 16)
                    if not more:
                        break
                    said += more
            left = self._left()
            assert left == [], (left, said.decode(errors="replace"))
        finally:
            for process in self._left():
                os.kill(process, signal.SIGKILL)
            os.close(self._printed)
        while self.poll() is None:
            select.select([self._server.stdout], [], [], 1)
        return said.decode()

    def _left(self) -> list[int]:
        """Processes that could still print."""
        found = []
        for file in Path("/proc").glob("[0-9]*/fd/1"):
            with contextlib.suppress(OSError):
                if file.readlink() == self._out:
                    found.append(int(file.parts[2]))
        return found


def main() -> NoReturn:
    serve()
    sys.exit(0)


if __name__ == "__main__":
    main()
