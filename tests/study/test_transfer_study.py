"""The committed study of twelve tasks: what it reports, and that this code would do the same."""

import json

import pytest

from experiments.environment import RESULTS
from experiments.transfer_study import AIM, NAME, markdown, study
from otdd_flash.study.measures import MEASURES
from otdd_flash.study.setup import Setup

KINDS = ("", "_features")
# What of the settings depends on the machine.
OF_THE_MACHINE = ("compute", "versions")
MOST_BYTES = 300_000


def committed(kind):
    return json.loads((RESULTS / f"{NAME}{kind}.json").read_text("utf-8"))


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_reported_of_every_measure(kind):
    content = committed(kind)
    rows = {row["measure"]: row for row in content["measures"]}
    assert {*rows} == {*MEASURES}
    found = {(row["measure"], row["statistic"]): row for row in content["correlations"]}
    for name, row in rows.items():
        assert row["pairs"] == 116
        saturated = (kind, name) == ("_features", "h_score")
        assert (row["rho"] is None) == saturated
        assert saturated or row["lower"] < row["rho"] < row["upper"]
        assert found[name, "spearman"]["value"] == row["rho"]
        assert found[name, "regret"]["value"] == row["regret"]
        assert {*row["without"]} == {"mnist", "fashion", "usps", "digits"}
        rhos = [-1.0 if rho is None else rho for rho in (row["rho"], *row["without"].values())]
        assert row["aim_reached"] == (min(rhos) > AIM)
        assert row["sign"] == MEASURES[name].nearer
    assert len(content["notes"]) == (9 if kind else 8)
    assert (RESULTS / f"{NAME}{kind}.md").read_text("utf-8") == markdown(content["measures"])
    # The files are small.
    assert sum(path.stat().st_size for path in RESULTS.glob(f"{NAME}*")) <= MOST_BYTES


@pytest.mark.slow
def test_the_tasks_and_the_protocol_are_those_of_this_code(real_data):
    whole = study(str(real_data), 2000, features=False)
    tasks, metric = whole._compared(whole._tasks())
    setup = Setup(tasks, whole._settings({}, metric, 1, 1))
    now = json.loads(json.dumps(setup.to_dict()))
    then = committed("")["settings"]
    # It was run before the measure that chooses was a setting.
    assert now.pop("measure") == "otdd"
    assert "measure" not in then
    for content in (now, then):
        for key in OF_THE_MACHINE:
            del content[key]
    assert now == then
