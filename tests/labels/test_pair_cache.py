"""The cache of class distances: equal to the last bit, shared by processes, never in the way."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sqlite3
import stat
import warnings

import numpy as np
import pytest
import torch
from spying import calls_of

from otdd_flash.errors import NotConvergedWarning
from otdd_flash.labels import Exact, Gaussian, Sinkhorn, exact, measure_classes, measuring
from otdd_flash.labels import pair_cache as pair_database
from otdd_flash.labels.measuring import class_distances
from otdd_flash.labels.pair_cache import FILE, PairCache
from otdd_flash.labels.pairs import ClassCloud, PairDistances, all_pairs
from otdd_flash.samples import LabeledSamples

CACHED = {
    "gaussian": Gaussian(),
    "sinkhorn": Sinkhorn(epsilon=20.0),
    "exact": Exact(),
}
every_cached = pytest.mark.parametrize("metric", CACHED.values(), ids=CACHED.keys())


@pytest.fixture(autouse=True)
def _nothing_known_to_be_unusable(monkeypatch):
    monkeypatch.setattr(pair_database, "UNUSABLE", set())


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
    """Also of a dataset that is compared twice, which is measured within itself once."""
    fresh = class_distances(datasets, metric)
    class_distances(datasets[:2], metric, cache_dir=tmp_path)
    heard: list[tuple[int, int]] = []
    first = class_distances(
        datasets, metric, cache_dir=tmp_path, progress=lambda *event: heard.append(event)
    )
    again = class_distances(datasets, metric, cache_dir=tmp_path)
    # Of 36 pairs of 9 classes, the 15 of the first two datasets are known, and count.
    assert measured == [36, 15, 21]
    assert (heard[0], heard[-1]) == ((15, 36), (36, 36))
    for other in (first, again):
        for one, two in zip(tables(fresh), tables(other), strict=True):
            assert torch.equal(one, two)
    # In any order of the datasets, and so of the two classes of a pair.
    turned = class_distances(datasets[::-1], metric, cache_dir=tmp_path)
    assert torch.equal(turned.between(2, 0).full, fresh.between(0, 2).full)
    assert entries(tmp_path) == 36


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


def test_what_is_cheap_is_not_kept_and_without_a_folder_nothing_is_hashed(
    datasets, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for method in ("means", "upper_bound", "none"):
        class_distances(datasets, method, cache_dir=tmp_path / "cache")
    for name in ("fingerprint", "content"):
        monkeypatch.setattr(ClassCloud, name, property(lambda _: pytest.fail("hashed")))
    class_distances(datasets, cache_dir=None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("metric", [Gaussian(), Exact()], ids=["gaussian", "exact"])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_that_are_not_finite_are_not_kept_and_minus_zero_is_no_damage(tmp_path, dtype):
    """SQLite gives 0.0 back for -0.0; a metric of the user may be of float32."""
    values = torch.tensor([1.0, torch.nan, torch.inf, 0.0, -0.0, 3.0], dtype=dtype)
    cache = PairCache(tmp_path)
    cache.keep("recipe", classes(4), all_pairs(4), PairDistances(values, values, values))
    known, found = cache.find("recipe", classes(4), all_pairs(4))
    assert known.tolist() == [0, 3, 4, 5]
    assert found.values.tolist() == [1, 0, 0, 3]


def write(folder, start, step, wrote=None):
    """What a writing process does: it keeps every so many parts of thirty pairs."""
    cache, pairs = PairCache(folder), all_pairs(60)
    for part in torch.arange(len(pairs)).split(30)[start::step]:
        cache.keep("recipe", classes(60), pairs[part], PairDistances.exactly(part.double()))
        if wrote is not None:
            wrote.release()
    assert not pair_database.UNUSABLE


FORKS = multiprocessing.get_context("fork")


@pytest.mark.slow
def test_several_processes_write_at_once(tmp_path):
    # Every third part is written by two of them.
    running = [
        FORKS.Process(target=write, args=(tmp_path, *part)) for part in ((0, 2), (0, 3), (1, 2))
    ]
    for process in running:
        process.start()
    for process in running:
        process.join(120)
    assert [process.exitcode for process in running] == [0, 0, 0]
    known, found = PairCache(tmp_path).find("recipe", classes(60), all_pairs(60))
    assert torch.equal(found.values, torch.arange(1770, dtype=torch.float64))
    assert entries(tmp_path) == len(known) == 1770


def test_a_writer_that_is_killed_leaves_whole_parts(tmp_path):
    wrote = FORKS.Semaphore(0)
    process = FORKS.Process(target=write, args=(tmp_path, 0, 1, wrote))
    process.start()
    for _ in range(3):
        assert wrote.acquire(timeout=60)
    process.kill()
    process.join(60)
    cache = PairCache(tmp_path)
    known, found = cache.find("recipe", classes(60), all_pairs(60))
    assert not pair_database.UNUSABLE
    assert len(known) >= 90
    assert len(known) % 30 == 0
    assert torch.equal(found.values, known.double())
    cache.keep("recipe", classes(60), all_pairs(60), PairDistances.exactly(torch.zeros(1770)))
    assert entries(tmp_path) == 1770


@pytest.mark.parametrize("whole", [True, False])
def test_a_damaged_database_is_set_aside_and_rebuilt(whole, datasets, tmp_path, caplog, measured):
    fresh = class_distances(datasets)
    # A file that was only begun is filled.
    (tmp_path / FILE).touch()
    class_distances(datasets, cache_dir=tmp_path)
    assert not caplog.records
    harmed = b"no database" * 1000 if whole else (tmp_path / FILE).read_bytes()[:5000]
    (tmp_path / FILE).write_bytes(harmed)
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
@pytest.mark.parametrize("flips", [1, 300])
def test_a_database_with_flipped_bits_never_lies_and_never_stops_a_run(flips, tmp_path, caplog):
    """Whatever is found is what was kept; after whatever was not, all of it can be kept again."""
    kept = numbers(66)
    PairCache(tmp_path).keep("recipe", classes(12), all_pairs(12), kept)
    whole = (tmp_path / FILE).read_bytes()
    set_aside = 0
    for seed in range(20):
        (tmp_path / FILE).write_bytes(flipped(whole, flips, seed))
        cache = PairCache(tmp_path)
        known, found = cache.find("recipe", classes(12), all_pairs(12))
        for part, twin in zip(found, kept, strict=True):
            assert torch.equal(part, twin[known])
        cache.keep("recipe", classes(12), all_pairs(12), kept)
        assert not pair_database.UNUSABLE
        set_aside += (aside := tmp_path / f"{FILE}.damaged").exists()
        aside.unlink(missing_ok=True)
    assert set_aside == len(caplog.records) > 0


def test_a_database_that_another_process_holds_is_waited_for_once(tmp_path, caplog, monkeypatch):
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
        pair_database.UNUSABLE.clear()
        for _ in range(2):
            use(PairCache(tmp_path))
        waiting, given_up = (record.getMessage() for record in caplog.records)
        assert waiting.startswith("another process holds the class distances in")
        assert "waiting for at most 0.05 s" in waiting
        assert "held by another process for" in given_up
    # One that lets go in time is not given up.
    pair_database.UNUSABLE.clear()
    cache = PairCache(tmp_path)
    monkeypatch.setattr(pair_database.logger, "warning", lambda *_: holder.execute("ROLLBACK"))
    assert len(cache.find("recipe", classes(4), all_pairs(4))[0]) == 6
    holder.close()


def test_a_database_that_may_only_be_read_is_read(
    datasets, tmp_path, caplog, monkeypatch, measured
):
    class_distances(datasets[:2], cache_dir=tmp_path)
    connect = sqlite3.connect

    def read_only(path, **options):
        return connect(f"file:{path}?mode=ro", uri=True, **options)

    monkeypatch.setattr(pair_database.sqlite3, "connect", read_only)
    monkeypatch.setattr(measuring, "PAIRS_PER_CLASS", 1)
    for _ in range(2):
        table = class_distances(datasets, cache_dir=tmp_path)
    monkeypatch.undo()
    assert measured == [15, *(2 * [9, 9, 3])]
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
    for _ in range(2):
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


def test_pairs_are_written_while_others_are_measured(datasets, tmp_path, monkeypatch):
    """So that a process that is killed loses seconds."""
    monkeypatch.setattr(measuring, "SECONDS_BETWEEN_WRITES", 0.0)
    monkeypatch.setattr(measuring, "PAIRS_PER_CLASS", 1)
    kept = calls_of(monkeypatch, PairCache, "keep")
    class_distances(datasets, Gaussian(), cache_dir=tmp_path)
    assert len(kept) > 1
    assert entries(tmp_path) == sum(len(pairs) for _, _, _, pairs, _ in kept)
