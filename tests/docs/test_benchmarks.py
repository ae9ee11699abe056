"""docs/benchmarks.md: the numbers of its tables are those of the files that it names."""

import re
from pathlib import Path

import pytest
from benchmark_claims import SECTIONS, sentences
from result_rows import RESULTS, content, shows

from experiments.rows import TRACE, read_rows

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
_FILE = re.compile(r" \| ([^|]+) \| \[\w+\]\(\.\./experiments/results/(\w+)\.json\) \|$", re.M)
# What a table's rows are followed by, where these columns stand.
_MACHINE_AND_FILE = re.compile(r" \| [^|]+ \| \[\w+\]\([^)]+\.json\)$")


def measured(start):
    """The cells of the row that begins so, but for its first, machine and file."""
    rows = [line for line in PAGE.splitlines() if line.startswith(f"| {start}")]
    assert len(rows) == 1, (start, len(rows))
    return _MACHINE_AND_FILE.sub("", rows[0].strip("| ")).partition(" | ")[2]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_row_shows_the_numbers_of_its_file(section):
    for start, values in section():
        assert shows(measured(start), values), (start, measured(start), values)


def test_sentences_say_what_is_in_the_files():
    text = " ".join(PAGE.split())
    assert [said for said in sentences() if said not in text] == []


def test_no_row_is_without_a_claim():
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    # Every table has a line of titles.
    assert len(lines) - PAGE.count("\n|---|") == sum(len([*section()]) for section in SECTIONS)


def test_the_machine_of_a_row_is_that_of_its_file():
    rows = _FILE.findall(PAGE)
    assert len(rows) > 40
    for machine, name in rows:
        file = content(name)
        about = file["runs"][0] if "runs" in file else file
        about = about.get("environment", about)
        if about["gpu"]:
            assert re.search(rf"\b{machine}\b", about["gpu"]), (machine, name)
            continue
        cores, processor = machine.split(", ")
        assert processor == re.sub(r"\(R\)| Processor", "", about["processor"]), (machine, name)
        assert int(cores.split()[0]) in (about["threads"], about["cores"]), (machine, name)


def test_results_are_small_and_traces_come_back_to_their_rows():
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 5_000_000
    for path in files:
        if path.suffix == ".json":
            assert f'"{TRACE}"' not in path.read_text(encoding="utf-8"), path
            assert path.stat().st_size <= 150_000, path
        elif path.suffix == ".parquet":
            rows = read_rows(path.name.removesuffix(".traces.parquet"))
            assert any(row.get(TRACE) for row in rows), path


def test_numbers_are_compared_to_the_digits_that_are_shown():
    for text, values, agree in (
        ("97 / 193 ms | 1e-2 and 4,563", [97.4, 192.6, 0.0118, 4563], True),
        ("97 / 193 ms", [97.6, 193], False),
        ("0.80 s", [0.806], False),
        ("97", [97, 1], False),
    ):
        assert shows(text, values) == agree, text
