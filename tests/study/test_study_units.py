"""Units of a study: computed once, whole or not at all, by any number of processes."""

import os
import time
from pathlib import Path

import pytest
import torch

from otdd_flash.errors import ConvergenceError, DataNotice, InputError
from otdd_flash.study.units import Content, Shard, Store, Unit, in_order, work_through


def sum_of(number, *needs, kind="sum", log="log", seconds=0, error=None, one_thread=False):
    """A number, and those of the units that it needs; writes a line whenever it is computed."""

    def compute(store):
        time.sleep(seconds)
        with open(log, "a") as file:
            file.write(f"{number}\n")
        if error is not None:
            raise error
        total = number + sum(store.found(unit).facts["total"] for unit in needs)
        return Content({"total": total}, {"threads": torch.tensor(torch.get_num_threads())})

    return Unit(kind, {"number": number}, f"sum {number}", compute, needs, one_thread)


def run(units, folder, **more):
    store = Store(folder, threads=2)
    work_through(in_order(units), store, **{"shard": Shard(), **more})
    return store


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def computed():
    return [int(line) for line in Path("log").read_text().split()] if Path("log").exists() else []


def test_units_come_after_what_they_need_and_are_computed_once(tmp_path):
    one, two = sum_of(1), sum_of(2)
    last = sum_of(10, one, two, sum_of(2))
    store = run([last, one], tmp_path)
    assert store.found(last).facts["total"] == 15
    assert computed() == [1, 2, 10]
    run([last, one, sum_of(3)], tmp_path)
    assert computed() == [1, 2, 10, 3]
    # A digest is of kind, key and needs.
    alone = sum_of(1, kind="alone", one_thread=True)
    units = [sum_of(1), sum_of(2), alone, sum_of(1, sum_of(2)), sum_of(1, sum_of(3))]
    assert len({unit.digest for unit in units}) == 5
    assert sum_of(1, sum_of(2)).digest == sum_of(1, sum_of(2)).digest
    # Threads are those of the study, or one.
    before = torch.get_num_threads()
    store = run([one, alone], tmp_path)
    assert int(store.found(one).tensors["threads"]) == 2
    assert int(store.found(alone).tensors["threads"]) == 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_damaged_unit_is_computed_again_with_a_notice(tmp_path, damage):
    run([sum_of(1)], tmp_path)
    path = tmp_path / "units" / f"{sum_of(1).digest}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content) if damage is None else damage)
    with pytest.warns(DataNotice, match=r"the file of sum 1, .* is damaged .* computed again"):
        assert run([sum_of(5, sum_of(1))], tmp_path).found(sum_of(5, sum_of(1))).facts["total"] == 6
    assert sorted(computed()) == [1, 1, 5]
    # The file of another unit is none of this.
    path.rename(path.with_name(f"{sum_of(2).digest}.safetensors"))
    with pytest.warns(DataNotice, match="not what its name says"):
        assert run([sum_of(2)], tmp_path).found(sum_of(2)).facts["total"] == 2


def test_a_failed_unit_leaves_why_and_the_others_go_on(tmp_path):
    for code, error in ((2, InputError("no")), (3, ConvergenceError("no")), (1, ValueError("no"))):
        failing = sum_of(code, kind="failing", error=error)
        run([sum_of(7, failing), sum_of(8, sum_of(7, failing)), sum_of(10 * code)], tmp_path)
        assert computed()[-2:] == [code, 10 * code]
        record = Store(tmp_path, 1).failure(failing)
        said = record["unit"], record["error"], record["exit_code"]
        assert said == (f"sum {code}", "no", code)
        assert ("traceback" in record) == (code == 1)
        with pytest.raises(InputError, match=f"sum {code} failed: no"):
            Store(tmp_path, 1).found(failing)


def test_every_unit_belongs_to_one_shard():
    units = [sum_of(number) for number in range(200)]
    owners = [Shard.parse("1/4").owner(unit) for unit in units]
    assert {*owners} == {1, 2, 3, 4}
    assert owners == [Shard.parse("3/4").owner(unit) for unit in units]
    for text in ("0/2", "3/2", "2", "a/b", "1/2/3", "-1/2"):
        with pytest.raises(InputError, match=r"study.shard must be I/N .* such as 2/4"):
            Shard.parse(text)


def test_units_of_a_shard_are_others_once_it_is_dead():
    store = Store(Path.cwd(), 2)
    one, two = Shard(1, 2), Shard(2, 2)
    units = [sum_of(number) for number in range(20)]
    theirs = [unit for unit in units if one.owner(unit) == 2]
    assert theirs
    assert all(one.mine(unit, store) == (unit not in theirs) for unit in units)
    with two.alive(store):
        assert not any(one.mine(unit, store) for unit in theirs)
        with (
            pytest.raises(InputError, match=r"study\.shard=2/2 of this folder is in use"),
            two.alive(store),
        ):
            pass
    assert all(one.mine(unit, store) for unit in units)


def worker(folder, text=None):
    """What a process of the next tests does in its folder."""
    os.chdir(folder)
    units = [sum_of(k, seconds=0.05) for k in range(12)]
    units += [sum_of(100, *units[:6])]
    shard = Shard.parse(text)
    with shard.alive(Store(Path.cwd(), 2)):
        run(units, Path.cwd(), shard=shard)


@pytest.mark.slow
def test_processes_share_the_units_of_a_folder(begin, tmp_path):
    started = [begin(worker, tmp_path) for _ in range(3)]
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [0, 0, 0]
    assert sorted(computed()) == [*range(12), 100]


@pytest.mark.slow
def test_a_shard_waits_for_others_and_takes_over_from_a_dead_one(begin, tmp_path):
    first = begin(worker, tmp_path, "1/2")
    units = [sum_of(k) for k in range(12)]
    mine = {unit.key["number"] for unit in units if Shard(1, 2).owner(unit) == 1}
    deadline = time.monotonic() + 60
    while {*computed()} < mine and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    assert {*computed()} <= mine | {100}
    assert first.is_alive()
    second = begin(worker, tmp_path, "2/2")
    while len(computed()) <= len(mine) and time.monotonic() < deadline:
        time.sleep(0.01)
    second.kill()
    first.join(120)
    assert first.exitcode == 0
    assert sorted({*computed()}) == [*range(12), 100]
    # The one that was under way when its process died may have been begun twice.
    assert len(computed()) <= 14


def test_a_key_of_what_is_no_number_of_json_is_a_defect():
    with pytest.raises(ValueError, match="JSON"):
        _ = sum_of(float("nan")).digest
