"""`log=` hands numbers with bounds, settings and pictures to the real trackers.

Nothing leaves this machine: servers are threads of the test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from command_runs import run_here
from PIL import Image

from otdd_flash.commands import results
from otdd_flash.errors import InputError
from otdd_flash.integrations import tracking
from otdd_flash.integrations.tracking import TrackedRun, check_tracker, track

INSTALLED = [name for name in tracking.TRACKERS if importlib.util.find_spec(name)]
RUN = ("report=none", "max_samples=40", "extractor=identity")
# Where a command's entry point is, if not in the module of its name.
MODULES = {"study": "study.__main__"}
PAIR = ("source=blobs", "target=blobs")


@pytest.fixture(autouse=True)
def plain_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable and no file of this machine names a server, and no notice has been given."""
    for names in tracking.SENDING.values():
        for name in names:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    results._notice_once.cache_clear()


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """`command(*arguments, name="distance")` runs a command; its code and what it said."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, name: str = "distance") -> tuple[int, str]:
        settings = RUN if name == "study" else (*RUN, *PAIR)
        flags = [argument for argument in arguments if argument.startswith("-")]
        keys = [argument for argument in arguments if not argument.startswith("-")]
        folders = ("cache_dir=null", "hydra.run.dir=run", "hydra.sweep.dir=sweep")
        main = import_module(f"otdd_flash.{MODULES.get(name, name)}").main
        ended = run_here(main, [*flags, *settings, *folders, *keys], monkeypatch, capsys)
        return ended.code, ended.err

    return run


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        name not in INSTALLED, reason=f"{name} is not installed; the extra integrations has it"
    )


@pytest.fixture
def run(tmp_path: Path) -> TrackedRun:
    Image.new("RGB", (8, 6), (200, 30, 30)).save(tmp_path / "projection.png")
    return TrackedRun(
        "digits → digits",
        tmp_path,
        {"epsilon": 0.1, "solver": {"tolerance": None}},
        {"value": 6.118, "lower": 6.117, "upper": 6.119, "otdd/a → b": 2.0},
        {"divergence": [(0, 6.0), (1, 5.0)]},
    )


REFUSED = [
    ("tensorbord", None, False, r"unknown log 'tensorbord'.*tensorboard"),
    (None, "runs", False, r"log\.uri=runs does nothing without a tracker; give log=tensorb"),
    (None, None, True, r"log\.online=true does nothing without a tracker"),
    ("tensorboard", None, True, r"log\.online=true has no meaning with log=tensorboard"),
    ("tensorboard", "https://a/b", False, r"log\.uri=https://a/b has no meaning with log=tens"),
    ("mlflow", None, True, r"give log\.uri=ADDRESS, or set MLFLOW_TRACKING_URI"),
    ("mlflow", "runs", True, r"log\.online=true and log\.uri=runs, .* exclude each other"),
    ("wandb", "file:///runs", True, r"exclude each other"),
    ("mlflow", "htp://a", False, r"knows no address such as log\.uri=htp://a; .*https://"),
    ("mlflow", "sqlite:///a.db", False, r"needs the package sqlalchemy"),
    ("wandb", "sqlite:///a.db", False, r"knows no address"),
    ("wandb", None, True, r"no API key for api\.wandb\.ai: .* or leave log\.online out"),
    ("wandb", "https://u:pw@b.example", False, r"no API key for b\.example: .* log\.uri out"),
    ("mlflow", " ", False, r"log\.uri must be a folder or an address, got an empty one"),
]


def test_what_no_tracker_can_do_is_refused_before_the_solve(tmp_path, monkeypatch):
    there = {*tracking.TRACKERS}
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda one: one in there or None)
    for name, uri, online, sentence in REFUSED:
        with pytest.raises(InputError, match=sentence):
            check_tracker(name, uri, online=online)
    check_tracker(None)
    check_tracker("mlflow", "http://127.0.0.1:5000")
    # An API key may stand where wandb looks for it.
    (tmp_path / "netrc").write_text("machine b.example login user password key\n")
    check_tracker("wandb", "https://b.example")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    check_tracker("wandb", "https://c.example")
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=r"needs the package wandb: pip install .*integrations"):
        check_tracker("wandb")


@pytest.mark.slow
@needs("mlflow")
def test_mlflow_reads_what_was_written(run, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    track("mlflow", replace(run, store=run.directory / "mlruns"))
    assert "MLFLOW_ALLOW_FILE_STORE" not in os.environ
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(run.directory / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("otdd-flash")
    (written,) = client.search_runs([experiment.experiment_id])
    assert written.data.metrics["lower"] == 6.117
    assert written.data.metrics["otdd/a _ b"] == 2.0
    assert written.data.params == {"epsilon": "0.1", "solver.tolerance": "None"}
    steps = client.get_metric_history(written.info.run_id, "divergence")
    assert [(metric.step, metric.value) for metric in steps] == [(0, 6.0), (1, 5.0)]
    assert [file.path for file in client.list_artifacts(written.info.run_id)] == ["projection.png"]


class Recorder(BaseHTTPRequestHandler):
    """As much of an MLflow server as one run needs; what it was sent is in `server.sent`."""

    def do_GET(self) -> None:
        self._answer(404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "none"})

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        path = urlsplit(self.path).path.removeprefix("/api/2.0/mlflow/")
        self.server.sent.append((path, json.loads(content)))  # type: ignore[attr-defined]
        info = {"run_id": "r", "experiment_id": "1"}
        info |= {"artifact_uri": "/nowhere", "status": "RUNNING"}
        answers: dict[str, Any] = {
            "experiments/create": {"experiment_id": "1"},
            "runs/create": {"run": {"info": info, "data": {}}},
            "runs/update": {"run_info": info},
        }
        self._answer(200, answers.get(path, {}))

    def _answer(self, code: int, content: Any) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Recorder) as server:
        server.sent = []  # type: ignore[attr-defined]
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.slow
@needs("mlflow")
@pytest.mark.parametrize("asked", ["uri", "online", "environment alone"])
def test_mlflow_sends_only_where_it_is_asked_to(asked, server, command, monkeypatch):
    address = f"http://user:pw-in-address@127.0.0.1:{server.server_port}"
    if asked != "uri":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    more = {"uri": f"log.uri={address}", "online": "log.online=true"}.get(asked, "seed=0")
    code, said = command("log=mlflow", "log.name=mine", "log.project=ours", "report=table", more)
    assert (code, "pw-in-address" in said) == (0, False)
    assert "pw-in-address" not in Path("run/result.json").read_text()
    if asked == "environment alone":
        assert said.count("notice: MLFLOW_TRACKING_URI is set and not followed") == 1
        assert (server.sent, Path("run/mlruns").is_dir()) == ([], True)
        return
    paths = [path for path, _ in server.sent]
    assert paths[:2] == ["experiments/create", "runs/create"]
    assert (server.sent[0][1]["name"], server.sent[1][1]["run_name"]) == ("ours", "mine")
    assert not Path("run/mlruns").exists()
    metrics = {m["key"] for _, content in server.sent for m in content.get("metrics", ())}
    assert {"value", "lower", "upper"} <= metrics
    assert "pw-in-address" not in json.dumps(server.sent)
    assert server.sent[-1][1]["status"] == "FINISHED"


@pytest.mark.slow
@needs("mlflow")
def test_a_server_that_refuses_costs_a_notice_and_code_4(command, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    code, said = command("log=mlflow", f"log.uri={address}")
    assert code == 4
    assert f"notice: cannot log to {address} (MlflowException: " in said
    assert "but not the run in mlflow" in said
    assert json.loads(Path("run/result.json").read_text())["value"] > 0


ASKED = [
    (None, False, "offline", {}),
    ("folder", False, "offline", {}),
    (None, True, "online", {}),
    ("https://b.example", False, "online", {"base_url": "https://b.example"}),
]


def test_wandb_is_online_only_if_asked(run, monkeypatch):
    """Of the package, what is called is recorded."""
    given: dict[str, Any] = {}
    tracked = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None, summary={})

    def init(**settings: Any) -> Any:
        given.update(settings)
        return tracked

    fake = SimpleNamespace(init=init, Settings=dict, Image=str)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    for store, online, mode, more in ASKED:
        place = run.directory / "folder" if store == "folder" else store
        track("wandb", replace(run, store=place, online=online, project="ours", group="sweep"))
        assert given["mode"] == mode, store
        told = {key: value for key, value in given["settings"].items() if key == "base_url"}
        assert told == more
        assert given["settings"]["x_disable_meta"]
        assert (given["project"], given["group"], given["name"]) == ("ours", "sweep", run.name)
        assert given["dir"] == str(run.directory / ("folder" if store == "folder" else ""))


@pytest.mark.slow
@needs("wandb")
def test_wandb_offline_opens_no_connection_and_keeps_no_argument(command, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            for one in (name, name.upper()):
                monkeypatch.setenv(one, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        code, said = command("log=wandb", "source.spread=0.123456")
        assert code == 0
        assert "notice: WANDB_API_KEY is set and not followed: log=wandb writes to this" in said
        proxy.settimeout(0)
        with pytest.raises(BlockingIOError):
            proxy.accept()
    files = [path for path in Path("run/wandb").rglob("*") if path.is_file()]
    assert not any(b"source.spread=0.123456" in path.read_bytes() for path in files)


TWO = "study.tasks=[{name: blobs, as: one}, {name: blobs, seed: 1, as: two}]"
LOGGED = {
    "distance": (("report=full",), {"value", "lower", "upper"}),
    "flow": (("flow.steps=2",), {"value/after", "upper/before", "divergence", "lower"}),
    "study": (
        (TWO, "transfer=null", "measures=[otdd]", "study.workers=1"),
        {"otdd/one to two", "otdd/one to two/lower", "otdd/one to two/upper"},
    ),
}


@pytest.mark.slow
@needs("tensorboard")
@pytest.mark.parametrize("name", LOGGED)
def test_commands_log(name, command):
    more, names = LOGGED[name]
    assert command("log=tensorboard", *more, name=name)[0] == 0
    events = _events("run/tensorboard")
    assert names <= set(events.Tags()["scalars"])
    if name == "distance":
        assert events.Tags()["images"]
        result = json.loads(Path("run/result.json").read_text())
        assert events.Scalars("value")[0].value == pytest.approx(result["value"])
    if name == "flow":
        assert [event.step for event in events.Scalars("divergence")] == [0, 1, 2]


def _events(folder: str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(folder).Reload()


@pytest.mark.slow
@needs("tensorboard")
def test_jobs_of_a_sweep_have_sibling_folders_in_tensorboard(command):
    sweep = ("-m", "epsilon=0.1,0.3", "log=tensorboard", "overwrite=true")
    # A sweep into the same folder replaces the runs.
    for _ in range(2):
        assert command(*sweep)[0] == 0
    for job, epsilon in ((0, 0.1), (1, 0.3)):
        (point,) = _events(f"sweep/tensorboard/{job}").Scalars("epsilon")
        assert point.value == pytest.approx(epsilon)
    # In a store of many, an earlier run of the same name stays beside.
    named = ("log.uri=store", "log.name='at ${epsilon}'", "log.project=../a/b")
    for _ in range(2):
        assert command("log=tensorboard", "epsilon=0.1", "overwrite=true", *named)[0] == 0
    assert {str(file.parent) for file in Path("store").rglob("events.*")} == {
        f"store/.._a_b/at 0.1/run{again}" for again in ("", "-2")
    }


@pytest.mark.slow
@needs("tensorboard")
def test_events_that_cannot_be_replaced_cost_a_notice_and_code_4(command):
    # A folder is no file that could be removed.
    Path("run/tensorboard/events.out.tfevents.0").mkdir(parents=True)
    code, said = command("log=tensorboard", "overwrite=true")
    assert code == 4
    assert "notice: cannot log to tensorboard (" in said
    assert "but not the run in tensorboard" in said
    assert json.loads(Path("run/result.json").read_text())["value"] > 0


@pytest.mark.slow
@needs("mlflow")
def test_a_sweep_shares_one_store_of_mlflow(command, monkeypatch):
    code, _ = command("-m", "epsilon=0.1,0.3", "log=mlflow", "hydra.job.chdir=true")
    assert code == 0
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=Path("sweep/mlruns").absolute().as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'otdd-flash'")
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.data.params["epsilon"] for run in runs) == ["0.1", "0.3"]
    assert {run.data.tags["sweep"] for run in runs} == {"sweep"}
    names = {run.info.run_name for run in runs}
    assert names == {f"blobs train to blobs test, job {job}" for job in (0, 1)}
    assert not [*Path().glob("sweep/*/mlruns")]


@pytest.mark.slow
def test_nothing_of_this_is_imported_with_the_package():
    code = (
        "import sys, otdd_flash, otdd_flash.integrations.tracking; "
        "print([n for n in ('torchmetrics', 'tensorboard', 'wandb', 'mlflow', 'sklearn') "
        "if n in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
