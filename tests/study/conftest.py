"""Processes that are begun from one which has imported everything, and has computed nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FIRST = """
import os, signal, sys, traceback
sys.path[:0] = {paths!r}
import joblib, small_tasks, test_study_units
codes = {{}}
for line in sys.stdin:
    word, text = eval(line)
    if word == "start":
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(2, 1)
            signal.alarm(180)
            try:
                exec(text)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
    else:
        pid = int(text)
        if pid not in codes:
            ended, status = os.waitpid(pid, os.WNOHANG if word == "poll" else 0)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
    print(pid if word == "start" else codes.get(pid), flush=True)
"""


class Processes:
    """Copies of a process, each with a program and a folder of its own."""

    def __init__(self):
        here = Path(__file__).parent
        program = FIRST.format(paths=[str(here), str(here.parent), *sys.path])
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", program]
        self.first = subprocess.Popen(command, env=environment, **pipes)

    def _ask(self, word, text):
        self.first.stdin.write(f"{(word, text)!r}\n")
        self.first.stdin.flush()
        return eval(self.first.stdout.readline())

    def start(self, program, folder):
        """Begin a process; return its number."""
        return self._ask("start", f"os.chdir({str(folder)!r}); {program}")

    def poll(self, pid):
        """Its exit code, None while it runs."""
        return self._ask("poll", str(pid))

    def wait(self, pid):
        return self._ask("wait", str(pid))


@pytest.fixture(scope="session")
def processes():
    started = Processes()
    yield started
    started.first.stdin.close()
    started.first.wait()
