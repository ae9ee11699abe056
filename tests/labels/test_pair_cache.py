"""The cache of class distances: equal to the last bit, shared by processes, never in the way."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import warnings

import numpy as np
import pytest
import torch

from otdd_flash.errors import NotConvergedWarning
from otdd_flash.labels import Exact, Gaussian, Sinkhorn, exact, measure_classes, measuring
from otdd_flash.labels import pair_cache as pair_database
from otdd_flash.labels.classes import ClassCloud
from otdd_flash.labels.many import class_distances
from otdd_flash.labels.pair_cache import FILE, PairCache
from otdd_flash.labels.pairs import PairDistances, all_pairs
from otdd_flash.samples import LabeledSamples

CACHED = {
    "gaussian": Gaussian(),
    "sinkhorn": Sinkhorn(epsilon=20.0),
    "exact": Exact(),
}
every_cached = pytest.mark.parametrize("metric", CACHED.values(), ids=CACHED.keys())


@pytest.fixture
def datasets(blobs):
    return [blobs((4, 6, 4), 4, seed, name=f"set {seed}") for seed in range(3)]


@pytest.fixture
def measured(monkeypatch):
    """The numbers of pairs that each method was asked for, call by call."""
    asked: list[int] = []

    def counting(method):
        def run(metric, clouds, pairs, *args, **kwargs):
            asked.append(len(pairs))
            return method(metric, clouds, pairs, *args, **kwargs)

        return run

    for kind, name in ((Gaussian, "measure"), (Sinkhorn, "measure"), (Exact, "in_parts")):
        monkeypatch.setattr(kind, name, counting(getattr(kind, name)))
    return asked


def entries(folder):
    with sqlite3.connect(folder / FILE) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return database.execute("SELECT count(*) FROM pairs").fetchone()[0]


def tables(joint):
    return [table for table in (joint.full, joint.lower, joint.upper) if table is not None]


@every_cached
def test_cached_numbers_are_the_fresh_ones_to_the_last_bit(metric, datasets, tmp_path, measured):
    fresh = class_distances(datasets, metric)
    first = class_distances(datasets, metric, cache_dir=tmp_path)
    again = class_distances(datasets, metric, cache_dir=tmp_path)
    assert measured == [36, 36]
    assert entries(tmp_path) == 36
    for other in (first, again):
        for one, two in zip(tables(fresh), tables(other), strict=True):
            assert torch.equal(one, two)
    # In any order of the datasets, and so of the two classes of a pair.
    turned = class_distances(datasets[::-1], metric, cache_dir=tmp_path)
    assert torch.equal(turned.between(2, 0).full, fresh.between(0, 2).full)
    assert entries(tmp_path) == 36


@every_cached
def test_a_dataset_compared_twice_is_measured_within_itself_once(
    metric, datasets, tmp_path, measured
):
    one, two, three = datasets
    measure_classes(one, two, metric, cache_dir=tmp_path)
    heard: list[tuple[int, int]] = []
    table = class_distances(
        [one, three], metric, cache_dir=tmp_path, progress=lambda *event: heard.append(event)
    ).between(0, 1)
    # 15 pairs of 6 classes; of the next 15, the 3 within the first dataset are known, and count.
    assert measured == [15, 12]
    assert (heard[0], heard[-1]) == ((3, 15), (15, 15))
    assert torch.equal(table.full, measure_classes(one, three, metric).full)


def test_entries_belong_to_the_method_its_parameters_and_the_points(datasets, tmp_path, measured):
    one, two, _ = datasets
    moved = LabeledSamples(one.features + 1e-9, one.labels, one.class_names)
    for source, metric in (
        (one, Gaussian()),
        (one, Gaussian(unbiased=False)),
        (one, Sinkhorn(epsilon=20.0)),
        (one, Sinkhorn(epsilon=30.0)),
        (one, Sinkhorn(epsilon=30.0, tolerance=1e-4)),
        (one, Exact()),
    ):
        measure_classes(source, two, metric, cache_dir=tmp_path)
    assert measured == [15] * 6
    measure_classes(moved, two, Gaussian(), cache_dir=tmp_path)
    assert measured[-1] == 12
    # Another order of the samples rounds otherwise.
    shuffled = one.take(torch.arange(len(one)).flip(0))
    table = measure_classes(shuffled, two, Gaussian(), cache_dir=tmp_path)
    assert measured[-1] == 12
    assert torch.equal(table.full, measure_classes(shuffled, two, Gaussian()).full)


@pytest.mark.parametrize("method", ["means", "upper_bound", "none", None])
def test_what_is_cheap_is_not_kept_and_without_a_folder_nothing_is_hashed(
    method, datasets, tmp_path, monkeypatch
):
    def hashed(_):
        raise AssertionError("hashed")

    monkeypatch.chdir(tmp_path)
    if method is not None:
        class_distances(datasets, method, cache_dir=tmp_path / "cache")
    else:
        for name in ("fingerprint", "content"):
            monkeypatch.setattr(ClassCloud, name, property(hashed))
        class_distances(datasets, cache_dir=None)
    assert not list(tmp_path.iterdir())


def test_large_lists_are_measured_and_kept_in_parts(blobs, tmp_path, measured, monkeypatch):
    """A run that is killed keeps the parts before; the numbers are those of one part."""
    monkeypatch.setattr(measuring, "PAIRS_PER_CLASS", 1)
    monkeypatch.setattr(measuring, "SECONDS_BETWEEN_WRITES", 0.0)
    many = blobs((5,) * 12, 3)
    heard: list[tuple[int, int]] = []
    kept: list[int] = []
    keep = PairCache.keep

    def keeping(self, *args):
        keep(self, *args)
        kept.append(entries(tmp_path))

    monkeypatch.setattr(PairCache, "keep", keeping)
    table = class_distances([many], cache_dir=tmp_path, progress=lambda *event: heard.append(event))
    assert kept == [12, 24, 36, 48, 60, 66]
    assert measured == [12] * 5 + [6]
    assert heard[0] == (0, 66)
    assert heard[-1] == (66, 66)
    assert heard == sorted(heard)
    assert torch.equal(table.full, class_distances([many]).full)


@every_cached
def test_an_interrupted_run_keeps_what_it_measured(metric, blobs, tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "PAIRS_PER_CLASS", 1)
    monkeypatch.setattr(exact, "SECONDS_PER_TASK", 1e-9)
    many = blobs((3,) * 8, 3)

    def interrupt(done, _):
        if done >= 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        class_distances([many], metric, cache_dir=tmp_path, progress=interrupt)
    # What one call of a method was at is lost with it.
    assert entries(tmp_path) == (16 if isinstance(metric, Exact) else 8)
    table = class_distances([many], metric, cache_dir=tmp_path)
    assert torch.equal(table.full, class_distances([many], metric).full)


def test_what_has_not_converged_is_said_again_and_not_kept(datasets, tmp_path, monkeypatch):
    def late(metric, clouds, pairs, *args, **kwargs):
        warnings.warn("not converged", NotConvergedWarning, stacklevel=1)
        return PairDistances.exactly(torch.ones(len(pairs)))

    monkeypatch.setattr(Sinkhorn, "measure", late)
    for _ in range(2):
        with pytest.warns(NotConvergedWarning, match="not converged"):
            class_distances(datasets, CACHED["sinkhorn"], cache_dir=tmp_path)
    assert not list(tmp_path.iterdir())


def numbers(count, seed=0):
    values = torch.rand(count, dtype=torch.float64, generator=torch.manual_seed(seed))
    return PairDistances(values, values - 1e-3, values + 1e-3)


def classes(count):
    return [bytes([index]) * 32 for index in range(count)]


def test_the_first_entry_of_a_pair_stays(tmp_path):
    cache, pairs = PairCache(tmp_path), all_pairs(4)
    cache.keep("recipe", classes(4), pairs, numbers(6))
    cache.keep("recipe", classes(4), pairs, numbers(6, seed=1))
    known, found = PairCache(tmp_path).find("recipe", classes(4), pairs[[5, 0]])
    assert known.tolist() == [0, 1]
    assert torch.equal(found.values, numbers(6).values[[5, 0]])
    assert not len(cache.find("another", classes(4), pairs)[0])


def test_the_sign_of_zero_is_no_damage():
    """SQLite gives 0.0 back for -0.0."""
    classes, pairs = [bytes(range(8)), bytes(range(8, 16))], np.array([[1, 0]])
    numbers = np.array([[0.5, -0.0, 1.0]])
    kept = pair_database.checksums("method", classes, pairs, numbers)
    assert kept == pair_database.checksums("method", classes, pairs, np.abs(numbers))
    for change in (0.25, 1e-20):
        changed = numbers + np.array([[0, change, 0]])
        assert kept != pair_database.checksums("method", classes, pairs, changed)


def test_numbers_that_are_not_finite_are_not_kept(tmp_path):
    values = torch.tensor([1.0, torch.nan, torch.inf], dtype=torch.float64)
    cache = PairCache(tmp_path)
    cache.keep("recipe", classes(3), all_pairs(3), PairDistances.exactly(values))
    assert cache.find("recipe", classes(3), all_pairs(3))[0].tolist() == [0]


WRITER = """
    import sys, torch
    from otdd_flash.labels.pair_cache import PairCache
    from otdd_flash.labels.pairs import PairDistances, all_pairs
    folder, start, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    pairs = all_pairs(60)
    values = torch.arange(len(pairs), dtype=torch.float64)
    names = [bytes([index]) * 32 for index in range(60)]
    cache = PairCache(folder)
    for part in torch.arange(len(pairs)).split(30)[start::step]:
        cache.keep("recipe", names, pairs[part], PairDistances.exactly(values[part]))
        print("kept", flush=True)
    assert cache.active
"""


def writer(folder, start, step):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), str(start), str(step)],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.slow
def test_two_processes_write_at_once(tmp_path):
    # Every third part is written by both.
    running = [writer(tmp_path, 0, 2), writer(tmp_path, 0, 3), writer(tmp_path, 1, 2)]
    for process in running:
        process.communicate(timeout=120)
    assert [process.returncode for process in running] == [0, 0, 0]
    known, found = PairCache(tmp_path).find("recipe", classes(60), all_pairs(60))
    assert torch.equal(found.values, torch.arange(1770, dtype=torch.float64))
    assert entries(tmp_path) == len(known) == 1770


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_whole_parts(tmp_path):
    process = writer(tmp_path, 0, 1)
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    cache = PairCache(tmp_path)
    known, found = cache.find("recipe", classes(60), all_pairs(60))
    assert cache.active
    assert len(known) >= 90
    assert len(known) % 30 == 0
    assert torch.equal(found.values, known.double())
    cache.keep("recipe", classes(60), all_pairs(60), PairDistances.exactly(torch.zeros(1770)))
    assert entries(tmp_path) == 1770


def damage(path):
    path.write_bytes(b"no database" * 1000)


def cut(path):
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize("harm", [damage, cut])
def test_a_damaged_database_is_set_aside_and_rebuilt(harm, datasets, tmp_path, caplog, measured):
    fresh = class_distances(datasets)
    class_distances(datasets, cache_dir=tmp_path)
    harm(tmp_path / FILE)
    harmed = (tmp_path / FILE).read_bytes()
    with caplog.at_level(logging.WARNING):
        tables = [class_distances(datasets, cache_dir=tmp_path) for _ in range(2)]
    assert all(torch.equal(table.full, fresh.full) for table in tables)
    assert len(caplog.records) == 1
    for part in ("are damaged", FILE, "measuring them again", f"{FILE}.damaged"):
        assert part in caplog.text
    assert (tmp_path / f"{FILE}.damaged").read_bytes() == harmed
    # Fresh, for the first cache, again after the damage, and then no more.
    assert measured == [36, 36, 36]
    assert entries(tmp_path) == 36


def flipped(content, count, seed):
    content, rng = bytearray(content), np.random.default_rng(seed)
    for bit in rng.integers(8 * len(content), size=count):
        content[bit // 8] ^= 1 << bit % 8
    return bytes(content)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("flips", [1, 8, 300])
def test_a_database_with_flipped_bits_never_lies_and_never_stops_a_run(flips, tmp_path, caplog):
    """Whatever is found is what was kept; after whatever was not, all of it can be kept again."""
    kept = numbers(66)
    PairCache(tmp_path).keep("recipe", classes(12), all_pairs(12), kept)
    whole = (tmp_path / FILE).read_bytes()
    set_aside = 0
    for seed in range(40):
        (tmp_path / FILE).write_bytes(flipped(whole, flips, seed))
        cache = PairCache(tmp_path)
        known, found = cache.find("recipe", classes(12), all_pairs(12))
        for part, twin in zip(found, kept, strict=True):
            assert torch.equal(part, twin[known])
        cache.keep("recipe", classes(12), all_pairs(12), kept)
        assert cache.active
        set_aside += (aside := tmp_path / f"{FILE}.damaged").exists()
        aside.unlink(missing_ok=True)
    assert set_aside == len(caplog.records) > 0


def test_a_database_that_another_process_holds_is_waited_for(tmp_path, caplog, monkeypatch):
    PairCache(tmp_path).keep("recipe", classes(4), all_pairs(4), numbers(6))
    assert pair_database.BUSY_SECONDS <= 5
    monkeypatch.setattr(pair_database, "SILENT_SECONDS", 0.01)
    monkeypatch.setattr(pair_database, "BUSY_SECONDS", 0.05)
    holder = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    for use in (
        lambda cache: cache.find("recipe", classes(4), all_pairs(4)),
        lambda cache: cache.keep("recipe", classes(4), all_pairs(4), numbers(6)),
    ):
        caplog.clear()
        cache = PairCache(tmp_path)
        use(cache)
        assert not cache.active
        waiting, given_up = (record.getMessage() for record in caplog.records)
        assert waiting.startswith("another process holds the class distances in")
        assert "waiting for at most 0.05 s" in waiting
        assert "held by another process for" in given_up
    # One that lets go in time is not given up.
    caplog.clear()
    cache = PairCache(tmp_path)
    monkeypatch.setattr(pair_database.logger, "warning", lambda *_: holder.execute("ROLLBACK"))
    assert len(cache.find("recipe", classes(4), all_pairs(4))[0]) == 6
    holder.close()


def test_a_database_that_was_only_begun_is_filled(datasets, tmp_path, caplog):
    (tmp_path / FILE).touch()
    class_distances(datasets, cache_dir=tmp_path)
    assert entries(tmp_path) == 36
    assert not caplog.records


def test_a_folder_that_cannot_be_written_is_said_once(datasets, tmp_path, caplog):
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        caplog.clear()
        table = class_distances(datasets, cache_dir=folder)
        assert torch.equal(table.full, class_distances(datasets).full)
        assert len(caplog.records) == 1
        assert str(folder / FILE) in caplog.text


def test_a_database_that_may_only_be_read_is_read(
    datasets, tmp_path, caplog, monkeypatch, measured
):
    class_distances(datasets[:2], cache_dir=tmp_path)
    connect = sqlite3.connect

    def read_only(path, **options):
        return connect(f"file:{path}?mode=ro", uri=True, **options)

    monkeypatch.setattr(pair_database.sqlite3, "connect", read_only)
    monkeypatch.setattr(measuring, "PAIRS_PER_CLASS", 1)
    table = class_distances(datasets, cache_dir=tmp_path)
    monkeypatch.undo()
    assert measured == [15, 9, 9, 3]
    assert torch.equal(table.full, class_distances(datasets).full)
    assert len(caplog.records) == 1
    assert "cannot write" in caplog.text
    assert "readonly" in caplog.text


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (lambda folder: folder.chmod(0o777), "other users may write"),
        (lambda folder: (folder / FILE).chmod(0o666), "other users may write"),
        (lambda folder: link(folder / FILE, folder.with_name("theirs")), "a link to elsewhere"),
    ],
)
def test_a_database_that_may_be_anybodys_is_not_used(harm, why, datasets, tmp_path, caplog):
    folder = tmp_path / "cache"
    class_distances(datasets, cache_dir=folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600
    harm(folder)
    before = (folder / FILE).read_bytes()
    table = class_distances(datasets, cache_dir=folder)
    assert torch.equal(table.full, class_distances(datasets).full)
    assert (folder / FILE).read_bytes() == before
    assert caplog.text.count(why) == 1


def link(path, elsewhere):
    os.replace(path, elsewhere)
    path.symlink_to(elsewhere)


def test_an_entry_that_was_never_measured_is_not_believed(tmp_path, caplog):
    """Whoever can write the database can also compute checksums."""
    cache, pairs = PairCache(tmp_path), all_pairs(2)
    upside_down = PairDistances(*torch.tensor([[1.0], [2.0], [0.0]], dtype=torch.float64))
    cache.keep("recipe", classes(2), pairs, upside_down)
    assert not len(PairCache(tmp_path).find("recipe", classes(2), pairs)[0])
    assert "damaged" in caplog.text
