"""How a command begins: help without torch, unknown keys with what is meant, Ctrl-C at once."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from importlib import import_module

import pytest
import yaml
from command_runs import ROOT, started


def test_help_shows_the_settings_that_the_arguments_lead_to(command):
    shown = command("--help", "labels=sinkhorn", "epsilon=0.25", "hydra.help.template='$X $CONFIG'")
    # A template is taken as it is.
    assert shown.out.startswith("$X ")
    assert "method: sinkhorn" in shown.out
    assert "epsilon: 0.25" in shown.out


# What is given, and how the sentence begins, or what it holds after dots.
UNKNOWN = """
    sorce=mnist -> there is no setting sorce (did you mean source?)
    source.splt=test -> there is no setting source.splt (did you mean source.split?)
    tolerance=1 -> there is no setting tolerance (did you mean solver.tolerance?)
    solver.tol=1 -> there is no setting solver.tol (did you mean solver.tolerance?)
    labels=gausian -> labels has no choice 'gausian' (did you mean gaussian?); choose one
    source.path=a.npz -> this choice of source has no source.path; choose source=arrays or source=hu
    solver.scaling=0.5 -> this choice of solver has no solver.scaling; choose solver=geoml
    source.pth=a.npz -> there is no setting source.pth; --help explains all of them
    runtime.device=cpu -> there is no setting runtime; --help explains all of them
    +labels=none -> labels has a choice already; write labels=none, without the +
    hydra.runn.dir=x -> there is no setting hydra.runn (did you mean hydra.run?)
    epsilon -> 'epsilon' sets nothing; write KEY=VALUE
    +epsilom=1 -> there is no setting epsilom (did you mean
    +solver.tolerence=1 -> there is no setting solver.tolerence (did you mean
"""
UNREADABLE = r"""
    epsilon = 0.2 -> cannot read 'epsilon = 0.2'; write epsilon=0.2, without spaces
    +lambda_x=0.2 -> lambda_x is a setting already; write lambda_x=VALUE, without the +
    epsilon=[1 -> ...or where they and other signs belong to a text, write epsilon='[1'
    data_root=~/a -> ...belong to a text, write data_root='~/a'
    data_root=it's\ -> ...belong to a text, write data_root='it\'s\\'
    epsilon=int(x) -> ...ValueError while evaluating 'int(x)'
    epsilon=0,2 -> ...a list as epsilon=[0,2], a text as epsilon='0,2'
    a b=1 -> ...'a b' is no key
    é=1 -> ...'é' is no key
    =1 -> ...Hydra ends on
    epsilon=${} -> ...cannot read 'epsilon=${}'
    epsilon=${a b} -> ...${KEY} is the value of another setting
    ~epsilon -> no setting can be deleted; leave ~epsilon out
    solver=[1] -> solver takes one choice, got [1]; write solver=CHOICE with one of conver
    solver={a:1} -> solver takes one choice, got {a:1}
    solver=${foo} -> solver takes one choice, got ${foo}
    ++solver=geomloss -> solver has a choice already; write solver=geomloss, without the +
    labels=exact,means -> labels takes one choice, got exact,means; write labels=CHOICE
    === -> ...cannot read '==='
    hydra.run.dir='\${x}' -> ...Hydra takes ${ in a folder's name for a reference
    hydra=null -> ...Hydra ends on
    hydra/launcher=[1] -> ...Hydra ends on
    hydra.run=3 -> ...hydra.run=3 cannot be set:
    hydra.run.dir=null -> ...hydra.run.dir=null cannot be set:
    hydra.hydra_logging={version:7} -> ...Unsupported version: 7
    --nosuch -> ...unrecognized arguments: --nosuch; --help
    --cfg=nosuch -> ...invalid choice: 'nosuch'
    --resolve -> ...--resolve flag can only be used
"""
REFERRING = """
    epsilon=${oc.env:NO_SUCH} -> ...epsilon=${oc.env:NO_SUCH} has no value: Environment variab
    epsilon=${foo} -> ...epsilon=${foo} has no value: there is no setting foo; write epsilon=
    epsilon=${epsilon} -> ...epsilon=${epsilon} has no value: it refers to itself
    epsilon=${nosuch:1} -> ...Unsupported interpolation type nosuch
    epsilon=${oc.decode:'['} -> ...epsilon=${oc.decode:'['} has no value
    epsilon=${source} -> ...epsilon must be a number or null, got '${source}'
    source.classes=[${foo}] -> ...source.classes[0]=${foo} has no value
    epsilon=${oc.env:PATH} -> ...epsilon must be a number or null, got '${oc.env:PATH}'
    max_samples=${oc.env:NO_SUCH} -> ...max_samples=${oc.env:NO_SUCH} has no value
    log_level=${foo} -> ...log_level=${foo} has no value
    overwrite=${foo} -> ...overwrite=${foo} has no value
    labels.method=${foo} -> ...labels.method=${foo} has no value
    hydra.run.dir=${foo} -> ...hydra.run.dir=${foo} has no value
    hydra.run.dir=${hydra.run.dir} -> ...it refers to itself
    hydra.run.dir='???' -> ...hydra.run.dir must be given: hydra.run.dir=DIR
"""


def _rows():
    for table in (UNKNOWN, UNREADABLE, REFERRING):
        for number, line in enumerate(table.strip().splitlines()):
            argument, _, sentence = line.strip().partition(" -> ")
            marks = pytest.mark.slow if number else ()
            yield pytest.param(argument, sentence, marks=marks, id=argument[:30])
    for argument, sentence in [
        (" epsilon=0.2", "cannot read ' epsilon=0.2'; write epsilon=0.2, without spaces"),
        ("epsilon=1\n", "...it holds a line end or another control character"),
        ("", "'' sets nothing; write KEY=VALUE"),
    ]:
        yield pytest.param(argument, sentence, marks=pytest.mark.slow, id=repr(argument))


@pytest.mark.parametrize(("argument", "sentence"), [*_rows()])
def test_what_hydra_cannot_take_is_one_sentence_with_what_is_meant(
    command, folder, argument, sentence
):
    # Of a multirun, too; what refers to nothing is for its jobs.
    ways = [(), ("-m",)] if argument.startswith("so") and "${" not in argument else [()]
    for flags in ways:
        ended = command(*flags, argument)
        assert ended.code == 2
        if sentence.startswith("..."):
            assert sentence[3:] in ended.error
        else:
            assert ended.error.startswith(sentence)
        assert len(ended.err.splitlines()) == 1
        assert not re.search("LexerNoViableAlt|append", ended.err)
    assert not (folder / "None").exists()


@pytest.mark.slow
def test_the_way_out_of_an_unreadable_text_keeps_it(command):
    """What is written of quotes and backslashes is what Hydra then reads."""
    text = "it's\\a [~] \\'"
    way_out = command(f"data_root={text}").error.partition("write ")[2].partition(", all of it")[0]
    assert yaml.safe_load(command("--cfg=job", way_out).out)["data_root"] == text


@pytest.mark.slow
def test_a_job_that_refers_to_nothing_costs_no_other(command):
    ended = command("-m", "epsilon=0.1,${foo}", "report=none")
    assert ended.code == 2
    assert "epsilon=${foo} has no value" in ended.err
    assert "2 jobs, 1 failed" in ended.err


RANKS = {"WORLD_SIZE": "2", "RANK": "0"}


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE must be an integer of at least 1, got 'abc'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be an integer of at least 1, got '0'"),
        ({"WORLD_SIZE": "2"}, "RANK must be an integer from 0 to 1, it is not set"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK must be an integer from 0 to 1, got '2'"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK must be an integer from 0 to 1, got '-1'"),
        (RANKS, "MASTER_PORT must be an integer from 0 to 65535, it is"),
        ({**RANKS, "MASTER_PORT": "1"}, "MASTER_ADDR must be the name or address of the machine"),
        ({**RANKS, "LOCAL_RANK": "x"}, "LOCAL_RANK must be an integer from 0 to 1, got 'x'"),
    ],
)
def test_variables_of_torchrun_that_mean_nothing_are_named(
    command, monkeypatch, variables, sentence
):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ended = command()
    assert ended.code == 2
    assert sentence in ended.error
    assert "unset WORLD_SIZE" in ended.error


def test_a_working_directory_that_is_gone_is_one_sentence(command, folder, monkeypatch):
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()
    ended = command()
    assert ended.code == 2
    assert "the working directory is not to be had (No such file or directory)" in ended.error


@pytest.mark.slow
def test_the_whole_error_of_hydra_is_there_for_who_asks(command, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    ended = command("foo=1")
    assert ended.code == 1
    assert "Traceback" in ended.err
    assert "Could not override 'foo'" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize(("imported", "name"), [("hydra", "distance"), ("torch", "flow")])
def test_ctrl_c_during_imports_is_130_without_a_traceback(folder, imported, name):
    """A module that interrupts the process that imports it stands in for the one named.

    It then waits: the signal may arrive at another thread, and some time later.
    """
    (folder / imported).mkdir()
    (folder / imported / "__init__.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    path = os.pathsep.join([str(folder), *sys.path])
    ended = started(folder, "-m", f"otdd_flash.{name}", "hydra.run.dir=run", PYTHONPATH=path)
    assert ended.returncode == 130
    *progress, last = ended.stderr.splitlines()
    assert last == "interrupted; what had been written is whole"
    # Hydra is imported before there is anything to say of it.
    assert [re.sub(r"\d+", "N", line) for line in progress] == (
        ["progress: N s, importing torch"] if imported == "torch" else []
    )


@pytest.mark.parametrize(("given", "kept"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_sleep_while_they_wait_unless_asked_otherwise(ended, monkeypatch, given, kept):
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    assert ended(lambda: None).code == 0
    assert os.environ["OMP_WAIT_POLICY"] == kept


SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]


def _script(folder):
    """The console command of distances as installers write it."""
    module, _, function = SCRIPTS["otdd-distance"].partition(":")
    path = folder / "bin" / "otdd-distance"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n")
    return path


@pytest.mark.slow
def test_help_comes_without_torch_and_names_its_command(folder):
    for command, flag, said in (
        ([_script(folder)], "--help", "\n  otdd-distance [KEY=VALUE ...]"),
        (["-m", "otdd_flash.flow"], "--version", "Hydra "),
    ):
        shown = started(folder, "-X", "importtime", *command, flag)
        assert shown.returncode == 0, shown.stderr
        assert said in shown.stdout
        assert "python -m" not in shown.stdout
        assert not re.search(r"\| +(torch|numpy|rich|matplotlib)$", shown.stderr, re.M)
    for entry in SCRIPTS.values():
        module, _, function = entry.partition(":")
        assert callable(getattr(import_module(module), function)), entry


@pytest.mark.slow
def test_a_console_command_does_what_the_module_does(folder):
    """In a process: what it imports, says of that, and finds in its environment.

    Functions of the working directory are found when they are named, and nothing else there. It
    draws whatever a notebook's environment names: its backend, and a style that needs LaTeX.
    """
    (folder / "features.py").write_text(
        "import helper\n\ndef embed(x):\n    return helper.TWICE * x\n"
    )
    (folder / "helper.py").write_text("TWICE = 2.0\n")
    for name in ("torch", "json", "typing", "datasets", "rich", "decimal", "hydra"):
        (folder / f"{name}.py").write_text("open('imported', 'a').write(__name__)\n")
    (folder / "hydra_plugins").mkdir()
    (folder / "hydra_plugins" / "evil.py").write_text("open('imported', 'a').write(__name__)\n")
    (folder / "matplotlibrc").write_text("text.usetex: True")
    # The encoding of a locale that has few signs.
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    variables["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    data = ["source=arrays", "source.path=a.npz", "target=arrays", "target.path=b.npz"]
    named = ["extractor=callable", "extractor.path=features:embed", "cache_dir=null"]
    late = ["solver.max_iterations=1", "solver.require_convergence=true", "solver.tolerance=1e-4"]
    more = ["overwrite=true", "hydra.run.dir=run"]
    one, other = (
        started(folder, *way, *data, *named, *late, *more, **variables)
        for way in ((_script(folder),), ("-m", "otdd_flash.distance"))
    )
    # Seconds differ.
    shown, again = (
        (run.returncode, run.stdout.partition("seconds")[0], re.sub("progress: .*", "", run.stderr))
        for run in (one, other)
    )
    assert shown == again
    assert one.returncode == 3
    assert "a -> b" in one.stdout
    assert re.search(r"\(import \d", one.stdout)
    lines = one.stderr.splitlines()
    assert re.fullmatch(r"progress: \d+ s, importing torch", lines[0])
    assert re.fullmatch(r"progress: \d+ s, importing scipy and otdd_flash", lines[1])
    # On a busy machine there are others, of what takes more than a minute.
    stages = iter([re.sub(r".* s, ", "", line) for line in lines[2:]])
    for stage in ("loading source: arrays", "embedding target: b", "comparing", "drawing"):
        assert stage in stages, lines
    assert len([*(folder / "run").glob("*.png")]) == 3
    assert not (folder / "imported").exists()
